//! From a graph to a plan. Elementwise operations join the kernel that computes their inputs; reductions join it and
//! give it rows; what consumes a row joins too where a whole row fits into the cache. Views are not computed: they are
//! layouts under which buffers are read.

mod explain;
mod group;
pub(crate) mod plan;
mod snapshot;

use std::cell::Cell;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

pub(crate) use self::explain::explain;
#[cfg(feature = "cuda")]
pub(crate) use self::explain::explained_kernels;
pub use self::explain::{ExplainedKernel, Explanation};
use self::group::Grouping;
use self::plan::Plan;
use self::snapshot::Snapshot;
use crate::account::{self, PlanNeed};
use crate::cpu;
use crate::cpu::single::{self, Single};
use crate::error::{ErrorKind, TensorError};
use crate::graph::op::Op;
use crate::graph::{Node, Recipe, Storage, Value};

/// Plans that are kept together.
const PLANS_MAX: usize = 256;

/// Words of the keys of plans that are kept together, 32 MiB: a plan is some times as large as its key, and who
/// builds a graph of a hundred thousand nodes once is not to leave as much behind.
const PLAN_WORDS_MAX: usize = 4 << 20;

/// Those of everybody who has no account.
static PLANS: PlanCache = PlanCache::new();

/// What graphs that are computed by the same plan have in common.
type PlanKey = Arc<[u64]>;

/// Plans that are kept, those that were used last first.
pub(crate) struct PlanCache(Mutex<Vec<(PlanKey, Arc<CompiledPlan>)>>);

impl PlanCache {
    pub(crate) const fn new() -> PlanCache {
        PlanCache(Mutex::new(Vec::new()))
    }

    pub(crate) fn clear(&self) {
        // Dropped without the lock: what is kept on GPUs goes back.
        let kept = std::mem::take(&mut *self.0.lock());
        drop(kept);
    }

    fn get(&self, key: &[u64]) -> Option<Arc<CompiledPlan>> {
        let mut plans = self.0.lock();
        let at = plans.iter().position(|(known, _)| **known == *key)?;
        plans[..=at].rotate_right(1);
        plans.first().map(|(_, plan)| plan.clone())
    }

    fn keep(&self, key: &[u64], plan: &Arc<CompiledPlan>) {
        if key.len() > PLAN_WORDS_MAX / 2 {
            return;
        }
        let mut plans = self.0.lock();
        plans.truncate(PLANS_MAX - 1);
        let mut words: usize = key.len() + plans.iter().map(|(known, _)| known.len()).sum::<usize>();
        while words > PLAN_WORDS_MAX
            && let Some((known, _)) = plans.pop()
        {
            words -= known.len();
        }
        plans.insert(0, (key.into(), plan.clone()));
    }

    /// Has those that are not running give back what they keep on GPUs.
    #[cfg(feature = "cuda")]
    fn give_back(&self) {
        let kept: Vec<Arc<CompiledPlan>> = self.0.lock().iter().map(|(_, plan)| plan.clone()).collect();
        kept.iter().for_each(|plan| plan.cuda.give_back());
    }
}

/// Does something with the plans of whoever this thread works for.
fn with_plans<R>(run: impl FnOnce(&PlanCache) -> R) -> R {
    account::with_plans(|own| run(own.unwrap_or(&PLANS)))
}

thread_local! {
    static MADE: Cell<u64> = const { Cell::new(0) };
}

/// Plans that were made for this thread. A loop that does the same in every step makes none after its first.
pub fn plans_made() -> u64 {
    MADE.get()
}

/// A plan, and what the device has made of it.
pub(crate) struct CompiledPlan {
    pub plan: Plan,
    need: OnceLock<PlanNeed>,
    pub kernels: OnceLock<cpu::execute::CpuKernels>,
    #[cfg(feature = "cuda")]
    pub cuda: crate::cuda::execute::CudaKernels,
    /// What it has to do, and where and how fast it was done: what the device `auto` decides by.
    #[cfg(feature = "cuda")]
    pub work: OnceLock<crate::auto::cost::Work>,
    #[cfg(feature = "cuda")]
    pub history: Mutex<crate::auto::history::History>,
}

impl CompiledPlan {
    fn new(plan: Plan) -> CompiledPlan {
        CompiledPlan {
            plan,
            need: OnceLock::new(),
            kernels: OnceLock::new(),
            #[cfg(feature = "cuda")]
            cuda: crate::cuda::execute::CudaKernels::default(),
            #[cfg(feature = "cuda")]
            work: OnceLock::new(),
            #[cfg(feature = "cuda")]
            history: Mutex::default(),
        }
    }
}

/// Whether operations are fused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// As many as go together.
    Fused,
    /// None: each is a kernel of its own. Slow, and what the fused mode is compared with.
    Eager,
}

/// Computes nodes, all of them in one plan.
pub(crate) fn realize(nodes: &[Arc<Node>], mode: Mode) -> Result<(), TensorError> {
    realize_over(nodes, mode, &[])
}

/// The same. Results may take the place of elements that are given up: those that the caller alone can reach (see
/// [`Node::sole_storage`]), and does not look at again unless this fails.
pub(crate) fn realize_over(nodes: &[Arc<Node>], mode: Mode, given_up: &[Arc<Storage>]) -> Result<(), TensorError> {
    // Who is watched may be stopped between two kernels, with neither the old elements nor the new ones.
    let given_up = if account::is_charged() { &[] } else { given_up };
    if let ([node], Mode::Fused) = (nodes, mode)
        && let Some(value) = single(node)
    {
        node.realize(value);
        return Ok(());
    }
    let snapshot = Snapshot::take(nodes, mode, given_up)?;
    if snapshot.outputs.is_empty() {
        return Ok(());
    }
    let compiled = compiled(&snapshot, mode).map_err(|what| {
        let node = snapshot.outputs.last().map_or(&nodes[0], |output| &snapshot.nodes[*output].node);
        TensorError::of_node(node, "realize", what)
    })?;
    let values = admit(&compiled, &snapshot).and_then(|()| execute(&compiled, &snapshot));
    let values = values.map_err(|(node, what)| {
        let failed = &snapshot.nodes[node];
        TensorError::of_node(&failed.node, failed.op.name(), what)
    })?;
    for (output, value) in snapshot.outputs.iter().zip(values) {
        snapshot.nodes[*output].node.realize(value);
    }
    Ok(())
}

/// Whether who pays for a plan and who watches it have nothing against it.
fn admit(compiled: &CompiledPlan, snapshot: &Snapshot) -> Result<(), (usize, ErrorKind)> {
    if !account::is_charged() {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    let is_on_cpu = crate::device::gpu_for(&snapshot.leaves).is_none();
    #[cfg(not(feature = "cuda"))]
    let is_on_cpu = true;
    let need = compiled.need.get_or_init(|| explain::need(&compiled.plan));
    let output = snapshot.outputs.last().copied().unwrap_or_default();
    account::admit(need, is_on_cpu).map_err(|what| (output, what))
}

/// Runs a plan where it is to run.
fn execute(compiled: &CompiledPlan, snapshot: &Snapshot) -> Result<Vec<Value>, (usize, ErrorKind)> {
    #[cfg(feature = "cuda")]
    if crate::device() == crate::Device::Auto {
        return crate::auto::execute(compiled, &snapshot.leaves, &snapshot.parameters);
    }
    #[cfg(feature = "cuda")]
    if let Some(device) = crate::device::gpu_for(&snapshot.leaves) {
        let CompiledPlan { plan, cuda, .. } = compiled;
        return crate::cuda::execute::execute(&device, plan, cuda, &snapshot.leaves, &snapshot.parameters);
    }
    cpu::execute::execute(compiled, &snapshot.leaves, &snapshot.parameters)
}

/// What a node is that makes one number from numbers that are there.
fn single(node: &Node) -> Option<Value> {
    if node.shape.numel() != 1 {
        return None;
    }
    let state = node.state.lock();
    let Recipe { op, inputs } = state.recipe.as_ref().filter(|_| state.value.is_none())?;
    let of = inputs.first()?.dtype;
    let operand = |input: &Arc<Node>| {
        let state = input.state.lock();
        match (&state.value, &state.recipe) {
            (Some(value), _) => Some(Single::Value(value.clone())),
            (None, Some(Recipe { op: Op::Fill(scalar), .. })) => Some(Single::Scalar(*scalar)),
            _ => None,
        }
    };
    match &inputs[..] {
        [a] if matches!(op, Op::Unary(_)) => single::compute(op, of, node.dtype, node.shape, &[operand(a)?]),
        [a, b] if matches!(op, Op::Binary(_)) => {
            single::compute(op, of, node.dtype, node.shape, &[operand(a)?, operand(b)?])
        }
        _ => None,
    }
}

/// Has plans of whoever this thread works for give back what they keep on GPUs, unless they are running.
#[cfg(feature = "cuda")]
pub(crate) fn give_back() {
    with_plans(PlanCache::give_back);
}

/// The plan that is there for it, if there is one.
fn planned(snapshot: &Snapshot) -> Option<Arc<CompiledPlan>> {
    with_plans(|plans| plans.get(&snapshot.key))
}

fn compiled(snapshot: &Snapshot, mode: Mode) -> Result<Arc<CompiledPlan>, ErrorKind> {
    let key = &snapshot.key[..];
    if let Some(found) = with_plans(|plans| plans.get(key)) {
        return Ok(found);
    }
    account::check_hurry()?;
    MADE.set(MADE.get() + 1);
    let plan = Grouping::of(snapshot, mode).plan();
    let compiled = Arc::new(CompiledPlan::new(plan));
    with_plans(|plans| plans.keep(key, &compiled));
    Ok(compiled)
}

#[cfg(test)]
pub(crate) fn plan_of(nodes: &[Arc<Node>], mode: Mode, given_up: &[Arc<Storage>]) -> Result<Plan, TensorError> {
    Ok(Grouping::of(&Snapshot::take(nodes, mode, given_up)?, mode).plan())
}
