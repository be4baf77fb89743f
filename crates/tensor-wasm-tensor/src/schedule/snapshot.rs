//! A graph as it is at one moment, and its key: graphs that have the same are computed by the same plan.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::error::{ErrorKind, TensorError};
use crate::graph::op::{FoldedAxis, Movement, Op};
use crate::graph::{Node, Recipe, Storage, Value};
use crate::shape::{Layout, Shape};

use super::Mode;
use super::plan::Parameter;

pub(super) struct Snapshot {
    /// Inputs come before what is made of them.
    pub nodes: Vec<SnapshotNode>,
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
    pub inputs: Vec<usize>,
    /// Which of the leaves, or of the parameters, it is.
    pub number: usize,
}

/// Nodes of a graph beyond which those that were met are found by hashing.
const SEARCHED_MAX: usize = 16;

/// Numbers of the nodes that were met, once there are many.
#[derive(Default)]
struct Seen(HashSet<u64, BuildHasherDefault<IdHasher>>);

impl Seen {
    /// Whether a node is new, beside those that were found already.
    fn insert(&mut self, id: u64, found: &[Found]) -> bool {
        if found.len() < SEARCHED_MAX {
            return found.iter().all(|(node, ..)| node.id != id);
        }
        if self.0.is_empty() {
            self.0.extend(found.iter().map(|(node, ..)| node.id));
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

/// A node with how it is computed, from which others, or what it is.
type Found = (Arc<Node>, Op, Vec<u64>, Option<Value>);

impl Snapshot {
    /// Of nodes, to be computed in a mode, which is part of the key. Elements that are in `given_up` nobody wants to
    /// see again.
    pub(super) fn take(asked: &[Arc<Node>], mode: Mode, given_up: &[Arc<Storage>]) -> Result<Snapshot, TensorError> {
        let mut left: Vec<Arc<Node>> = asked.iter().filter(|node| node.state.lock().value.is_none()).cloned().collect();
        let mut missing: Vec<u64> = left.iter().map(|node| node.id).collect();
        missing.sort_unstable();
        missing.dedup();
        let mut found: Vec<Found> = Vec::with_capacity(4);
        let mut seen = Seen::default();
        while let Some(node) = left.pop() {
            if !seen.insert(node.id, &found) {
                continue;
            }
            let state = node.state.lock();
            let (op, inputs, value) = match (&state.value, &state.recipe) {
                (Some(value), _) => (Op::Data, Vec::new(), Some(value.clone())),
                (None, Some(recipe)) => {
                    if let Op::Failed(error) = &recipe.op {
                        return Err(error.clone());
                    }
                    let (op, inputs) = chosen(recipe);
                    left.extend(inputs.iter().cloned());
                    (op, inputs.iter().map(|input| input.id).collect(), None)
                }
                (None, None) => return Err(TensorError::new("realize", ErrorKind::GraphFreed, node.at)),
            };
            drop(state);
            found.push((node, op, inputs, value));
        }
        found.sort_unstable_by_key(|(node, ..)| node.id);
        let ids: Vec<u64> = found.iter().map(|(node, ..)| node.id).collect();
        let position = |id: &u64| ids.binary_search(id).ok();
        let (mut nodes, mut leaves, mut parameters) = (Vec::with_capacity(found.len()), Vec::new(), Vec::new());
        let mut all_given_up = Vec::new();
        let stored_as = |storage: &Arc<Storage>| {
            let values = found.iter().filter_map(|(.., value)| value.as_ref());
            values.filter(|value| Arc::ptr_eq(&value.storage, storage)).count()
        };
        // What two leaves are in is read by whoever reads either.
        let given_up: Vec<&Arc<Storage>> = given_up.iter().filter(|storage| stored_as(storage) == 1).collect();
        let mut key = Vec::with_capacity(16 * found.len() + 1);
        key.push(u64::from(mode == Mode::Eager));
        for (node, op, inputs, value) in found {
            let inputs: Vec<usize> = inputs.iter().filter_map(position).collect();
            let is_output = missing.binary_search(&node.id).is_ok();
            let number = match &op {
                Op::Fill(scalar) => add(&mut parameters, Parameter::Scalar(*scalar)),
                Op::Random { seed } => add(&mut parameters, Parameter::Seed(*seed)),
                _ => leaves.len(),
            };
            write_key(&mut key, &node, &op, &inputs, value.as_ref(), is_output);
            if let Some(value) = value {
                let is_given_up = given_up.iter().any(|storage| Arc::ptr_eq(storage, &value.storage));
                key.push(u64::from(is_given_up));
                all_given_up.push(is_given_up.then(|| node.shape.numel()));
                leaves.push(value);
            }
            nodes.push(SnapshotNode { node, op, inputs, number });
        }
        let mut outputs: Vec<usize> = missing.iter().filter_map(position).collect();
        outputs.sort_unstable();
        outputs.dedup();
        Ok(Snapshot { nodes, leaves, given_up: all_given_up, parameters, outputs, key })
    }
}

/// How a node is computed: of what there is a kernel for on some devices only, that or what it is composed of.
fn chosen(recipe: &Recipe) -> (Op, &[Arc<Node>]) {
    match (&recipe.op, &recipe.inputs[..]) {
        (Op::Attention { .. }, [operands @ .., composed]) => {
            if is_one_kernel(operands) {
                (recipe.op.clone(), operands)
            } else {
                (Op::Move(Movement::Reshape), std::slice::from_ref(composed))
            }
        }
        (op, inputs) => (op.clone(), inputs),
    }
}

/// Whether attention is computed on a GPU that can do it as one kernel.
#[cfg(feature = "cuda")]
fn is_one_kernel(operands: &[Arc<Node>]) -> bool {
    let device = match crate::device() {
        crate::Device::Cuda(device) => Some(device),
        crate::Device::Cpu => gpu_of(operands),
        // Where the plan will run is decided later, and may be a CPU.
        crate::Device::Auto => None,
    };
    device.is_some_and(|device| crate::cuda::has_attention(&device, operands))
}

#[cfg(not(feature = "cuda"))]
fn is_one_kernel(_: &[Arc<Node>]) -> bool {
    false
}

/// A GPU that something is on which nodes are computed from.
#[cfg(feature = "cuda")]
fn gpu_of(nodes: &[Arc<Node>]) -> Option<crate::cuda::CudaDevice> {
    let (mut left, mut seen) = (nodes.to_vec(), HashSet::new());
    while let Some(node) = left.pop() {
        let state = node.state.lock();
        if let Some(device) = state.value.as_ref().and_then(|value| value.storage.cuda_device()) {
            return Some(device);
        }
        let inputs = state.recipe.as_ref().filter(|_| state.value.is_none()).map(|recipe| recipe.inputs.clone());
        left.extend(inputs.into_iter().flatten().filter(|input| seen.insert(input.id)));
    }
    None
}

fn add(parameters: &mut Vec<Parameter>, parameter: Parameter) -> usize {
    parameters.push(parameter);
    parameters.len() - 1
}

/// Everything that a plan depends on, one number after the other: as many as the first ones say.
fn write_key(key: &mut Vec<u64>, node: &Node, op: &Op, inputs: &[usize], value: Option<&Value>, is_output: bool) {
    let (code, details): (u64, [u64; 5]) = match op {
        Op::Data => (0, [0; 5]),
        Op::Fill(_) => (1, [0; 5]),
        Op::Iota => (2, [0; 5]),
        Op::Random { .. } => (3, [0; 5]),
        Op::Unary(op) => (4, [*op as u64, 0, 0, 0, 0]),
        Op::Binary(op) => (5, [*op as u64, 0, 0, 0, 0]),
        Op::Where => (6, [0; 5]),
        Op::Cast => (7, [0; 5]),
        Op::Move(Movement::Reshape) => (8, [0; 5]),
        Op::Move(Movement::Permute(axes)) => (9, [u64::from_le_bytes(*axes), 0, 0, 0, 0]),
        Op::Move(Movement::Expand) => (10, [0; 5]),
        Op::Move(Movement::Slice { axis, start, step }) => {
            (11, [*axis as u64, *start as u64, step.cast_unsigned() as u64, 0, 0])
        }
        Op::Move(Movement::Windows { axis, step, dilation }) => {
            (12, [*axis as u64, *step as u64, *dilation as u64, 0, 0])
        }
        Op::Reduce(op, axes) => (13, [*op as u64, axes.bits(), 0, 0, 0]),
        Op::ArgReduce { axis, largest } => (14, [*axis as u64, u64::from(*largest), 0, 0, 0]),
        Op::Matmul => (15, [0; 5]),
        Op::Cumsum { axis, is_reverse } => (16, [*axis as u64, u64::from(*is_reverse), 0, 0, 0]),
        Op::ArgSort { axis, is_descending } => (17, [*axis as u64, u64::from(*is_descending), 0, 0, 0]),
        Op::Gather { axis } => (18, [*axis as u64, 0, 0, 0, 0]),
        Op::ScatterAdd { axis, size } => (19, [*axis as u64, *size as u64, 0, 0, 0]),
        // Its corners follow, one for each input.
        Op::Place(_) => (20, [0; 5]),
        // Its axes follow.
        Op::Fold { before, .. } => (21, [u64::from(before.is_some()), 0, 0, 0, 0]),
        Op::Failed(_) => (22, [0; 5]),
        Op::Contract { summed } => (23, [summed.bits(), 0, 0, 0, 0]),
        Op::Attention { is_causal } => (24, [u64::from(*is_causal), 0, 0, 0, 0]),
    };
    let flags = u64::from(is_output) << 16 | (node.dtype as u64) << 8 | code;
    key.push(flags | (inputs.len() as u64) << 32 | u64::from(value.is_some()) << 24);
    key.extend(details);
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
