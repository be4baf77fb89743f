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
use self::snapshot::{PlanGraph, Snapshot};
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

/// A plan that is kept, and what graphs that are computed by it have in common.
struct KeptPlan {
    hash: u64,
    key: Box<[u64]>,
    plan: Arc<CompiledPlan>,
}

/// Plans that are kept, those that were used last first.
pub(crate) struct PlanCache(Mutex<Vec<KeptPlan>>);

impl PlanCache {
    pub(crate) const fn new() -> PlanCache {
        PlanCache(Mutex::new(Vec::new()))
    }

    pub(crate) fn clear(&self) {
        // Dropped without the lock: what is kept on GPUs goes back.
        let kept = std::mem::take(&mut *self.0.lock());
        drop(kept);
    }

    fn get(&self, snapshot: &Snapshot) -> Option<Arc<CompiledPlan>> {
        let mut plans = self.0.lock();
        let at = plans.iter().position(|kept| kept.hash == snapshot.hash && *kept.key == *snapshot.key)?;
        plans[..=at].rotate_right(1);
        plans.first().map(|kept| kept.plan.clone())
    }

    fn keep(&self, snapshot: &Snapshot, plan: &Arc<CompiledPlan>) {
        let Snapshot { hash, key, .. } = snapshot;
        if key.len() > PLAN_WORDS_MAX / 2 {
            return;
        }
        let mut plans = self.0.lock();
        plans.truncate(PLANS_MAX - 1);
        let mut words: usize = key.len() + plans.iter().map(|kept| kept.key.len()).sum::<usize>();
        while words > PLAN_WORDS_MAX
            && let Some(kept) = plans.pop()
        {
            words -= kept.key.len();
        }
        plans.insert(0, KeptPlan { hash: *hash, key: key[..].into(), plan: plan.clone() });
    }

    /// Has those that are not running give back what they keep on GPUs.
    #[cfg(feature = "cuda")]
    fn give_back(&self) {
        let kept: Vec<Arc<CompiledPlan>> = self.0.lock().iter().map(|kept| kept.plan.clone()).collect();
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
    let mut snapshot = Snapshot::take(nodes, mode, given_up)?;
    if !snapshot.has_outputs() {
        return Ok(());
    }
    let compiled = match planned(&snapshot) {
        Some(found) => found,
        None => {
            account::check_hurry().map_err(|what| snapshot.failed(snapshot.last_output(), what))?;
            // Taken anew: others may have computed some of its nodes meanwhile.
            let graph = PlanGraph::take(nodes, mode, given_up)?;
            let compiled = compiled(&graph, mode);
            snapshot = graph.snapshot;
            compiled
        }
    };
    if !snapshot.has_outputs() {
        return Ok(());
    }
    let values = admit(&compiled, &snapshot).and_then(|()| execute(&compiled, &snapshot));
    let values = values.map_err(|(node, what)| snapshot.failed(node, what))?;
    snapshot.outputs().zip(values).for_each(|(output, value)| output.realize(value));
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
    account::admit(need, is_on_cpu).map_err(|what| (snapshot.last_output(), what))
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
            (Some(value), _) => Some(Single::Value(Value::clone(value))),
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
    with_plans(|plans| plans.get(snapshot))
}

/// A graph's plan, made unless it is there by now.
fn compiled(graph: &PlanGraph, mode: Mode) -> Arc<CompiledPlan> {
    if let Some(found) = planned(&graph.snapshot) {
        return found;
    }
    MADE.set(MADE.get() + 1);
    let compiled = Arc::new(CompiledPlan::new(Grouping::of(graph, mode).plan()));
    with_plans(|plans| plans.keep(&graph.snapshot, &compiled));
    compiled
}

#[cfg(test)]
pub(crate) fn plan_of(nodes: &[Arc<Node>], mode: Mode, given_up: &[Arc<Storage>]) -> Result<Plan, TensorError> {
    Ok(Grouping::of(&PlanGraph::take(nodes, mode, given_up)?, mode).plan())
}
