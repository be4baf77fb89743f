//! A graph as it is at one moment, and its key: graphs that have the same are computed by the same plan.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::Arc;

use crate::account;
use crate::error::{ErrorKind, TensorError};
use crate::graph::op::{FoldedAxis, Movement, Op};
use crate::graph::{Node, Recipe, Storage, Value};
use crate::shape::{Layout, Shape};

use super::Mode;
use super::plan::Parameter;

pub(super) struct Snapshot {
    /// Inputs come before what is made of them.
    pub nodes: Vec<SnapshotNode>,
    /// Those of all nodes, one after the other.
    inputs: Vec<usize>,
    pub leaves: Vec<Value>,
    /// For each leaf whether its buffer may be overwritten, and then how many elements it has.
    pub given_up: Vec<Option<usize>>,
    pub parameters: Vec<Parameter>,
    /// Nodes that have to be computed. Those that are there already are left out.
    pub outputs: Vec<usize>,
    pub key: Vec<u64>,
}

pub(super) struct SnapshotNode {
    pub node: Arc<Node>,
    pub op: Op,
    /// Which of the snapshot's inputs are its own.
    inputs: Range<u32>,
    /// Which of the leaves, or of the parameters, it is.
    pub number: usize,
}

/// Nodes of a graph beyond which those that were met are found by hashing.
const SEARCHED_MAX: usize = 16;

/// Nodes of a graph that a thread in a hurry looks through: some ten microseconds.
const HURRIED_MAX: usize = 128;

/// Numbers of the nodes that were met, once there are many.
#[derive(Default)]
struct Seen(HashSet<u64, BuildHasherDefault<IdHasher>>);

impl Seen {
    /// Whether a node is new, beside those that were found already.
    fn insert(&mut self, id: u64, found: &[Found]) -> bool {
        if found.len() < SEARCHED_MAX {
            return found.iter().all(|found| found.node.id != id);
        }
        if self.0.is_empty() {
            self.0.extend(found.iter().map(|found| found.node.id));
        }
        self.0.insert(id)
    }
}

/// Numbers of nodes are different, and need no more than to be spread.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = (self.0 ^ id).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// A node with how it is computed, from which others, or what it is. Small: it is moved while nodes are sorted, and
/// what is taken of a graph is taken anew for each of its runs.
struct Found {
    node: Arc<Node>,
    op: Op,
    /// Which of the ids that were collected.
    inputs: Range<u32>,
    /// Which of the values.
    value: Option<usize>,
}

/// Nodes that there is room for from the beginning.
const NODES_MIN: usize = 16;

fn index(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

impl Snapshot {
    /// The nodes that one is made of.
    pub(super) fn inputs(&self, node: usize) -> &[usize] {
        let Range { start, end } = self.nodes[node].inputs;
        &self.inputs[start as usize..end as usize]
    }

    /// Of nodes, to be computed in a mode, which is part of the key. Elements that are in `given_up` nobody wants to
    /// see again.
    pub(super) fn take(asked: &[Arc<Node>], mode: Mode, given_up: &[Arc<Storage>]) -> Result<Snapshot, TensorError> {
        let mut left: Vec<Arc<Node>> = Vec::with_capacity(NODES_MIN);
        left.extend(asked.iter().filter(|node| node.state.lock().value.is_none()).cloned());
        let mut missing: Vec<u64> = left.iter().map(|node| node.id).collect();
        missing.sort_unstable();
        missing.dedup();
        let mut found: Vec<Found> = Vec::with_capacity(NODES_MIN);
        let (mut input_ids, mut values) = (Vec::<u64>::with_capacity(2 * NODES_MIN), Vec::<Option<Value>>::new());
        let mut seen = Seen::default();
        let mut target = PlanTarget::default();
        let nodes_max = if account::is_hurried() { HURRIED_MAX } else { usize::MAX };
        while let Some(node) = left.pop() {
            if !seen.insert(node.id, &found) {
                continue;
            }
            if found.len() >= nodes_max {
                return Err(TensorError::of_node(&node, "realize", ErrorKind::WouldWait));
            }
            let state = node.state.lock();
            let first = index(input_ids.len());
            let (op, value) = match (&state.value, &state.recipe) {
                (Some(value), _) => {
                    values.push(Some(value.clone()));
                    (Op::Data, Some(values.len() - 1))
                }
                (None, Some(recipe)) => {
                    if let Op::Failed(error) = &recipe.op {
                        return Err(error.clone());
                    }
                    let (op, inputs) = target.chosen(recipe);
                    left.extend_from_slice(inputs);
                    input_ids.extend(inputs.iter().map(|input| input.id));
                    (op, None)
                }
                (None, None) => return Err(TensorError::new("realize", ErrorKind::GraphFreed, node.at)),
            };
            drop(state);
            found.push(Found { node, op, inputs: first..index(input_ids.len()), value });
        }
        // Nodes are met from the last to the first, more or less.
        found.reverse();
        found.sort_by_key(|found| found.node.id);
        let ids: Vec<u64> = found.iter().map(|found| found.node.id).collect();
        let position = |id: &u64| ids.binary_search(id).ok();
        let inputs: Vec<usize> = input_ids.iter().map(|id| position(id).unwrap_or(usize::MAX)).collect();
        let (mut nodes, mut leaves, mut parameters) =
            (Vec::with_capacity(found.len()), Vec::with_capacity(values.len()), Vec::new());
        let mut all_given_up = Vec::with_capacity(values.len());
        let stored_as = |storage: &Arc<Storage>| {
            values.iter().flatten().filter(|value| Arc::ptr_eq(&value.storage, storage)).count()
        };
        // What two leaves are in is read by whoever reads either.
        let given_up: Vec<&Arc<Storage>> = given_up.iter().filter(|storage| stored_as(storage) == 1).collect();
        let mut key = Vec::with_capacity(12 * found.len() + 16 * values.len() + 1);
        key.push(u64::from(mode == Mode::Eager));
        for Found { node, op, inputs: own, value } in found {
            let is_output = !missing.is_empty() && missing.binary_search(&node.id).is_ok();
            let number = match &op {
                Op::Fill(scalar) => add(&mut parameters, Parameter::Scalar(*scalar)),
                Op::Random { seed } => add(&mut parameters, Parameter::Seed(*seed)),
                _ => leaves.len(),
            };
            let value = value.and_then(|at| values[at].take());
            write_key(&mut key, &node, &op, &inputs[own.start as usize..own.end as usize], value.as_ref(), is_output);
            if let Some(value) = value {
                let is_given_up = given_up.iter().any(|storage| Arc::ptr_eq(storage, &value.storage));
                key.push(u64::from(is_given_up));
                all_given_up.push(is_given_up.then(|| node.shape.numel()));
                leaves.push(value);
            }
            nodes.push(SnapshotNode { node, op, inputs: own, number });
        }
        let mut outputs: Vec<usize> = missing.iter().filter_map(position).collect();
        outputs.sort_unstable();
        outputs.dedup();
        Ok(Snapshot { nodes, inputs, leaves, given_up: all_given_up, parameters, outputs, key })
    }
}

/// Where a graph will be computed, as far as that decides what it is computed by.
#[derive(Default)]
struct PlanTarget {
    #[cfg(feature = "cuda")]
    gpu: GpuSearch,
}

impl PlanTarget {
    /// How a node is computed: of what there is a kernel for on some devices only, that or what it is composed of.
    fn chosen<'r>(&mut self, recipe: &'r Recipe) -> (Op, &'r [Arc<Node>]) {
        match (&recipe.op, &recipe.inputs[..]) {
            (Op::Attention { .. }, [operands @ .., composed]) => {
                if self.has_attention(operands) {
                    (recipe.op.clone(), operands)
                } else {
                    (Op::Move(Movement::Reshape), std::slice::from_ref(composed))
                }
            }
            (Op::Preferred, [operands @ .., by_kernels, composed]) => {
                let chosen = if self.has_attention(operands) { by_kernels } else { composed };
                (Op::Move(Movement::Reshape), std::slice::from_ref(chosen))
            }
            (op, inputs) => (op.clone(), inputs),
        }
    }

    /// Whether attention, or its gradient, is computed on a GPU that has kernels for such queries, keys and values.
    #[cfg(feature = "cuda")]
    fn has_attention(&mut self, operands: &[Arc<Node>]) -> bool {
        let device = match crate::device() {
            crate::Device::Cuda(device) => Some(device),
            crate::Device::Cpu => self.gpu.find(operands),
            // Where the plan will run is decided later, and may be a CPU.
            crate::Device::Auto => None,
        };
        device.is_some_and(|device| crate::cuda::has_attention(&device, operands))
    }

    #[cfg(not(feature = "cuda"))]
    fn has_attention(&mut self, _: &[Arc<Node>]) -> bool {
        false
    }
}

/// Looks for a GPU that something is on which nodes are computed from, at no node twice: a model has many layers that
/// ask, each for all before it.
#[cfg(feature = "cuda")]
#[derive(Default)]
struct GpuSearch {
    seen: HashSet<u64>,
    found: Option<crate::cuda::CudaDevice>,
}

#[cfg(feature = "cuda")]
impl GpuSearch {
    fn find(&mut self, nodes: &[Arc<Node>]) -> Option<crate::cuda::CudaDevice> {
        let GpuSearch { seen, found } = self;
        let mut left: Vec<Arc<Node>> = nodes.iter().filter(|node| seen.insert(node.id)).cloned().collect();
        while let (None, Some(node)) = (&found, left.pop()) {
            let state = node.state.lock();
            *found = state.value.as_ref().and_then(|value| value.storage.cuda_device());
            let inputs = state.recipe.as_ref().filter(|_| state.value.is_none()).map(|recipe| recipe.inputs.clone());
            left.extend(inputs.into_iter().flatten().filter(|input| seen.insert(input.id)));
        }
        found.clone()
    }
}

fn add(parameters: &mut Vec<Parameter>, parameter: Parameter) -> usize {
    parameters.push(parameter);
    parameters.len() - 1
}

/// Everything that a plan depends on, one number after the other: as many as the first ones say.
fn write_key(key: &mut Vec<u64>, node: &Node, op: &Op, inputs: &[usize], value: Option<&Value>, is_output: bool) {
    let (code, details): (u64, [Option<u64>; 3]) = match op {
        Op::Data => (0, [None; 3]),
        Op::Fill(_) => (1, [None; 3]),
        Op::Iota => (2, [None; 3]),
        Op::Random { .. } => (3, [None; 3]),
        Op::Unary(op) => (4, [Some(*op as u64), None, None]),
        Op::Binary(op) => (5, [Some(*op as u64), None, None]),
        Op::Where => (6, [None; 3]),
        Op::Cast => (7, [None; 3]),
        Op::Move(Movement::Reshape) => (8, [None; 3]),
        Op::Move(Movement::Permute(axes)) => (9, [Some(u64::from_le_bytes(*axes)), None, None]),
        Op::Move(Movement::Expand) => (10, [None; 3]),
        Op::Move(Movement::Slice { axis, start, step }) => {
            (11, [Some(*axis as u64), Some(*start as u64), Some(step.cast_unsigned() as u64)])
        }
        Op::Move(Movement::Windows { axis, step, dilation }) => {
            (12, [Some(*axis as u64), Some(*step as u64), Some(*dilation as u64)])
        }
        Op::Reduce(op, axes) => (13, [Some(*op as u64), Some(axes.bits()), None]),
        Op::ArgReduce { axis, largest } => (14, [Some(*axis as u64), Some(u64::from(*largest)), None]),
        Op::Matmul => (15, [None; 3]),
        Op::Cumsum { axis, is_reverse } => (16, [Some(*axis as u64), Some(u64::from(*is_reverse)), None]),
        Op::ArgSort { axis, is_descending } => (17, [Some(*axis as u64), Some(u64::from(*is_descending)), None]),
        Op::Gather { axis } => (18, [Some(*axis as u64), None, None]),
        Op::ScatterAdd { axis, size } => (19, [Some(*axis as u64), Some(*size as u64), None]),
        // Its corners follow, one for each input.
        Op::Place(_) => (20, [None; 3]),
        // Its axes follow.
        Op::Fold { before, .. } => (21, [Some(u64::from(before.is_some())), None, None]),
        Op::Failed(_) => (22, [None; 3]),
        Op::Contract { summed } => (23, [Some(summed.bits()), None, None]),
        Op::Attention { is_causal } => (24, [Some(u64::from(*is_causal)), None, None]),
        Op::AttentionRows { is_causal } => (25, [Some(u64::from(*is_causal)), None, None]),
        Op::AttentionGradient { is_causal, of } => (26, [Some(u64::from(*is_causal)), Some(*of as u64), None]),
        Op::Preferred => (27, [None; 3]),
    };
    let flags = u64::from(is_output) << 16 | (node.dtype as u64) << 8 | code;
    key.push(flags | (inputs.len() as u64) << 32 | u64::from(value.is_some()) << 24);
    key.extend(details.iter().flatten());
    key.extend(inputs.iter().map(|input| *input as u64));
    match op {
        Op::Place(corners) => key.extend(corners.iter().flatten().map(|at| *at as u64)),
        Op::Fold { last, before } => {
            for FoldedAxis { axis, step, dilation, size } in [Some(last), before.as_ref()].into_iter().flatten() {
                key.extend([axis, step, dilation, size].map(|number| *number as u64));
            }
        }
        _ => {}
    }
    write_shape(key, &node.shape);
    if let Some(Value { layout, .. }) = value {
        write_layout(key, layout);
    }
}

fn write_shape(key: &mut Vec<u64>, shape: &Shape) {
    key.push(shape.rank() as u64);
    key.extend(shape.iter().map(|size| *size as u64));
}

fn write_layout(key: &mut Vec<u64>, layout: &Layout) {
    key.extend(layout.strides().iter().map(|stride| stride.cast_unsigned() as u64));
    key.push(layout.offset.cast_unsigned() as u64);
}
