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
use crate::cpu;
use crate::cpu::single::{self, Single};
use crate::error::{ErrorKind, TensorError};
use crate::graph::op::Op;
use crate::graph::{Node, Recipe, Storage, Value};

/// Plans that are kept, those that were used last first.
const PLANS_MAX: usize = 256;

static PLANS: Mutex<Vec<(PlanKey, Arc<CompiledPlan>)>> = Mutex::new(Vec::new());

/// What graphs that are computed by the same plan have in common.
type PlanKey = Arc<[u64]>;

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
    let compiled = compiled(&snapshot, mode);
    let values = execute(&compiled, &snapshot);
    let values = values.map_err(|(node, what)| {
        let failed = &snapshot.nodes[node];
        TensorError::of_node(&failed.node, failed.op.name(), what)
    })?;
    for (output, value) in snapshot.outputs.iter().zip(values) {
        snapshot.nodes[*output].node.realize(value);
    }
    Ok(())
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

/// Has plans that are not running give back what they keep on GPUs.
#[cfg(feature = "cuda")]
pub(crate) fn give_back() {
    let kept: Vec<Arc<CompiledPlan>> = PLANS.lock().iter().map(|(_, plan)| plan.clone()).collect();
    kept.iter().for_each(|plan| plan.cuda.give_back());
}

/// The plan that is there for it, if there is one.
fn planned(snapshot: &Snapshot) -> Option<Arc<CompiledPlan>> {
    PLANS.lock().iter().find(|(known, _)| **known == *snapshot.key).map(|(_, plan)| plan.clone())
}

fn compiled(snapshot: &Snapshot, mode: Mode) -> Arc<CompiledPlan> {
    let key = &snapshot.key[..];
    {
        let mut plans = PLANS.lock();
        if let Some(at) = plans.iter().position(|(known, _)| **known == *key) {
            let found = plans.remove(at);
            let plan = found.1.clone();
            plans.insert(0, found);
            return plan;
        }
    }
    MADE.set(MADE.get() + 1);
    let plan = Grouping::of(snapshot, mode).plan();
    let compiled = Arc::new(CompiledPlan::new(plan));
    let mut plans = PLANS.lock();
    plans.truncate(PLANS_MAX - 1);
    plans.insert(0, (key.into(), compiled.clone()));
    compiled
}

#[cfg(test)]
pub(crate) fn plan_of(nodes: &[Arc<Node>], mode: Mode, given_up: &[Arc<Storage>]) -> Result<Plan, TensorError> {
    Ok(Grouping::of(&Snapshot::take(nodes, mode, given_up)?, mode).plan())
}
