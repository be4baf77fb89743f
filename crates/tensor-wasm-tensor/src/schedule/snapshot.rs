//! A graph as it is at one moment, and its key: graphs that have the same are computed by the same plan. A plan that is
//! there is run with a [`Snapshot`]: elements, numbers and what is to be computed. What a plan is made of is a
//! [`PlanGraph`], which only a graph is taken as that has no plan yet: a loop makes none after its first steps, and
//! takes a snapshot in each of them.

use std::cell::Cell;
#[cfg(feature = "cuda")]
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::account;
use crate::error::{ErrorKind, TensorError};
use crate::graph::numbers::Numbers;
use crate::graph::op::{FoldedAxis, Movement, Op};
use crate::graph::{Node, Recipe, Storage, Value};

use super::Mode;
use super::plan::Parameter;

pub(super) struct Snapshot {
    /// In the order they were met: what is to be computed, and then what that is made of.
    nodes: Vec<Arc<Node>>,
    /// How many of them are to be computed. Those that are there already are left out.
    outputs: usize,
    /// As they were met. So are parameters.
    pub leaves: Vec<Value>,
    pub parameters: Vec<Parameter>,
    /// Leaves, and then all other nodes in the order they were made: inputs come before what is made of them. Plans
    /// number nodes like that.
    order: Vec<u32>,
    pub key: Vec<u64>,
    /// Of the key.
    pub hash: u64,
}

/// A snapshot with what each node does.
pub(super) struct PlanGraph {
    pub snapshot: Snapshot,
    /// Inputs come before what is made of them.
    pub nodes: Vec<PlanNode>,
    /// Those of all nodes, one after the other.
    inputs: Vec<usize>,
    /// For each leaf whether its buffer may be overwritten, and then how many elements it has.
    pub given_up: Vec<Option<usize>>,
    /// Nodes that have to be computed.
    pub outputs: Vec<usize>,
}

pub(super) struct PlanNode {
    pub node: Arc<Node>,
    pub op: Op,
    /// Which of the graph's inputs are its own.
    inputs: Range<u32>,
    /// Which of the leaves, or of the parameters, it is.
    pub number: usize,
}

/// Nodes of a graph that a thread in a hurry looks through: some ten microseconds.
const HURRIED_MAX: usize = 128;

/// What nodes do, in the order they were met.
#[derive(Default)]
struct Details {
    /// Each with its range of the inputs, and which of the leaves or of the parameters it is.
    ops: Vec<(Op, Range<u32>, usize)>,
    inputs: Vec<u32>,
    /// The leaves whose buffers may be overwritten.
    given_up: Vec<bool>,
}

impl Details {
    fn add(&mut self, op: &Op, number: usize) {
        let end = index(self.inputs.len());
        let start = self.ops.last().map_or(0, |(_, inputs, _)| inputs.end);
        self.ops.push((op.clone(), start..end, number));
    }
}

fn index(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

/// Memory that the next snapshot of this thread is made in.
#[derive(Default)]
struct Scratch {
    nodes: Vec<Arc<Node>>,
    leaves: Vec<Value>,
    parameters: Vec<Parameter>,
    order: Vec<u32>,
    key: Vec<u64>,
    numbers: Numbers,
    new: Vec<Arc<Node>>,
    made: Vec<u32>,
    places: Vec<u32>,
}

/// Nodes of a graph beyond which its scratch is not kept: some hundred kilobytes.
const SCRATCH_NODES_MAX: usize = 2048;

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        let (mut nodes, mut leaves) = (std::mem::take(&mut self.nodes), std::mem::take(&mut self.leaves));
        let is_kept = nodes.len() <= SCRATCH_NODES_MAX;
        nodes.clear();
        leaves.clear();
        if !is_kept {
            return;
        }
        // Not while its thread ends.
        let _ = SCRATCH.try_with(|kept| {
            let mut scratch = kept.take().unwrap_or_default();
            let (mut parameters, mut key) = (std::mem::take(&mut self.parameters), std::mem::take(&mut self.key));
            let mut order = std::mem::take(&mut self.order);
            parameters.clear();
            key.clear();
            order.clear();
            (scratch.nodes, scratch.leaves, scratch.parameters) = (nodes, leaves, parameters);
            (scratch.order, scratch.key) = (order, key);
            kept.set(Some(scratch));
        });
    }
}

impl Snapshot {
    /// Of nodes, to be computed in a mode, which is part of the key. Elements that are in `given_up` nobody wants to
    /// see again.
    pub(super) fn take(asked: &[Arc<Node>], mode: Mode, given_up: &[Arc<Storage>]) -> Result<Snapshot, TensorError> {
        Snapshot::walk(asked, mode, given_up, None)
    }

    pub(super) fn has_outputs(&self) -> bool {
        self.outputs > 0
    }

    /// Nodes that have to be computed, in the order they were made.
    pub(super) fn outputs(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.order.iter().filter(|met| self.is_output(**met)).map(|met| &self.nodes[*met as usize])
    }

    fn is_output(&self, met: u32) -> bool {
        (met as usize) < self.outputs
    }

    /// The last of them, as plans number nodes.
    pub(super) fn last_output(&self) -> usize {
        self.order.iter().rposition(|met| self.is_output(*met)).unwrap_or_default()
    }

    /// What went wrong with a node that a plan has by this number.
    pub(super) fn failed(&self, number: usize, what: ErrorKind) -> TensorError {
        let node = &self.nodes[self.order[number] as usize];
        let name = node.state.lock().recipe.as_ref().map_or("data", |recipe| recipe.op.name());
        TensorError::of_node(node, name, what)
    }

    /// Nodes are met level by level from what is asked for, and the key says of each what it does and which nodes it
    /// does that with; after them comes in which order they were made, by which operations are put into kernels.
    /// Nothing is kept of them but by `details`.
    fn walk(
        asked: &[Arc<Node>],
        mode: Mode,
        given_up: &[Arc<Storage>],
        mut details: Option<&mut Details>,
    ) -> Result<Snapshot, TensorError> {
        let mut scratch = SCRATCH.try_with(Cell::take).ok().flatten().unwrap_or_default();
        let Scratch { nodes, leaves, parameters, order, key, numbers, new, made, places } = &mut *scratch;
        let (mut nodes, mut leaves) = (std::mem::take(nodes), std::mem::take(leaves));
        let (mut parameters, mut order, mut key) =
            (std::mem::take(parameters), std::mem::take(order), std::mem::take(key));
        numbers.clear();
        for node in asked.iter().filter(|node| node.state.lock().value.is_none()) {
            let next = index(nodes.len());
            if numbers.of(node.id, next) == next {
                nodes.push(node.clone());
            }
        }
        let outputs = nodes.len();
        key.push((outputs as u64) << 1 | u64::from(mode == Mode::Eager));
        let mut target = PlanTarget::default();
        made.clear();
        let nodes_max = if account::is_hurried() { HURRIED_MAX } else { usize::MAX };
        let mut at = 0;
        while let Some(node) = nodes.get(at) {
            if nodes.len() > nodes_max {
                return Err(TensorError::of_node(node, "realize", ErrorKind::WouldWait));
            }
            let state = node.state.lock();
            match (&state.value, &state.recipe) {
                (Some(value), _) => {
                    write_op(&mut key, node, &Op::Data, 0);
                    write_layout(&mut key, value);
                    details.iter_mut().for_each(|details| details.add(&Op::Data, leaves.len()));
                    leaves.push(Value::clone(value));
                    // What is there has no inputs to come after.
                    order.push(index(at));
                }
                (None, Some(recipe)) => {
                    if let Op::Failed(error) = &recipe.op {
                        return Err(error.clone());
                    }
                    made.push(index(at));
                    let (op, inputs) = target.chosen(recipe);
                    if inputs.len() > nodes_max {
                        return Err(TensorError::of_node(node, "realize", ErrorKind::WouldWait));
                    }
                    write_op(&mut key, node, op, inputs.len());
                    for input in inputs {
                        let next = index(nodes.len() + new.len());
                        let number = numbers.of(input.id, next);
                        if number == next {
                            new.push(input.clone());
                        }
                        key.push(number.into());
                        details.iter_mut().for_each(|details| details.inputs.push(number));
                    }
                    details.iter_mut().for_each(|details| details.add(op, parameters.len()));
                    match op {
                        Op::Fill(scalar) => parameters.push(Parameter::Scalar(*scalar)),
                        Op::Random { seed } => parameters.push(Parameter::Seed(*seed)),
                        _ => {}
                    }
                }
                (None, None) => return Err(TensorError::new("realize", ErrorKind::GraphFreed, node.at)),
            }
            drop(state);
            nodes.append(new);
            at += 1;
        }
        in_order(&nodes, made, &mut order, places);
        key.extend(order.chunks(2).map(|pair| pair.iter().fold(0, |word, met| word << 32 | u64::from(*met))));
        write_given_up(&mut key, &leaves, given_up, numbers, details);
        if nodes.len() <= SCRATCH_NODES_MAX {
            let _ = SCRATCH.try_with(|kept| kept.set(Some(scratch)));
        }
        let hash = hash_of(&key);
        Ok(Snapshot { nodes, outputs, leaves, parameters, order, key, hash })
    }
}

impl PlanGraph {
    /// As [`Snapshot::take`].
    pub(super) fn take(asked: &[Arc<Node>], mode: Mode, given_up: &[Arc<Storage>]) -> Result<PlanGraph, TensorError> {
        let mut details = Details::default();
        let snapshot = Snapshot::walk(asked, mode, given_up, Some(&mut details))?;
        let Details { ops, inputs, given_up } = details;
        let mut positions = vec![0; snapshot.nodes.len()];
        snapshot.order.iter().zip(0..).for_each(|(met, position)| positions[*met as usize] = position);
        let inputs = inputs.into_iter().map(|met| positions[met as usize]).collect();
        let mut sizes = vec![0; snapshot.leaves.len()];
        let made = |met: &u32| {
            let (op, inputs, number) = ops[*met as usize].clone();
            let node = snapshot.nodes[*met as usize].clone();
            if let Op::Data = op {
                sizes[number] = node.shape.numel();
            }
            PlanNode { node, op, inputs, number }
        };
        let nodes = snapshot.order.iter().map(made).collect();
        let given_up = given_up.into_iter().zip(sizes).map(|(is_given_up, size)| is_given_up.then_some(size)).collect();
        let mut outputs: Vec<usize> = positions[..snapshot.outputs].to_vec();
        outputs.sort_unstable();
        Ok(PlanGraph { snapshot, nodes, inputs, given_up, outputs })
    }

    /// The nodes that one is made of.
    pub(super) fn inputs(&self, node: usize) -> &[usize] {
        let Range { start, end } = self.nodes[node].inputs;
        &self.inputs[start as usize..end as usize]
    }
}

/// Adds nodes in the order they were made. Most were made together, so that most ids from one on are theirs; those of
/// variables, which are made long before, are sorted.
fn in_order(nodes: &[Arc<Node>], made: &[u32], order: &mut Vec<u32>, places: &mut Vec<u32>) {
    /// Ids that there may be for each node that is not sorted.
    const SPREAD_MAX: usize = 4;
    const NONE: u32 = u32::MAX;
    let id = |met: u32| nodes[met as usize].id;
    let Some(last) = made.iter().map(|met| id(*met)).max() else { return };
    let first = last.saturating_sub((SPREAD_MAX * made.len()) as u64);
    places.clear();
    places.resize(SPREAD_MAX * made.len() + 1, NONE);
    let begin = order.len();
    for met in made {
        match id(*met).checked_sub(first).and_then(|at| places.get_mut(usize::try_from(at).ok()?)) {
            Some(place) => *place = *met,
            None => order.push(*met),
        }
    }
    order[begin..].sort_unstable_by_key(|met| id(*met));
    order.extend(places.iter().filter(|met| **met != NONE));
}

/// What views are where they are computed as one.
const RESHAPE: &Op = &Op::Move(Movement::Reshape);

/// Where a graph will be computed, as far as that decides what it is computed by.
#[derive(Default)]
struct PlanTarget {
    #[cfg(feature = "cuda")]
    gpu: GpuSearch,
}

impl PlanTarget {
    /// How a node is computed: of what there is a kernel for on some devices only, that or what it is composed of.
    fn chosen<'r>(&mut self, recipe: &'r Recipe) -> (&'r Op, &'r [Arc<Node>]) {
        match (&recipe.op, &recipe.inputs[..]) {
            (Op::Attention { .. }, [operands @ .., composed]) => {
                if self.has_attention(operands) {
                    (&recipe.op, operands)
                } else {
                    (RESHAPE, std::slice::from_ref(composed))
                }
            }
            (Op::Preferred, [operands @ .., by_kernels, composed]) => {
                let chosen = if self.has_attention(operands) { by_kernels } else { composed };
                (RESHAPE, std::slice::from_ref(chosen))
            }
            (op, inputs) => (op, inputs),
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

/// Everything that a plan depends on, one number after the other: as many as the first ones say.
/// The numbers of a node's inputs follow.
fn write_op(key: &mut Vec<u64>, node: &Node, op: &Op, inputs: usize) {
    let (code, details): (u64, [u64; 3]) = match op {
        Op::Data => (0, [0; 3]),
        Op::Fill(_) => (1, [0; 3]),
        Op::Iota => (2, [0; 3]),
        Op::Random { .. } => (3, [0; 3]),
        Op::Unary(op) => (4, [*op as u64, 0, 0]),
        Op::Binary(op) => (5, [*op as u64, 0, 0]),
        Op::Where => (6, [0; 3]),
        Op::Cast => (7, [0; 3]),
        Op::Move(Movement::Reshape) => (8, [0; 3]),
        Op::Move(Movement::Permute(axes)) => (9, [u64::from_le_bytes(*axes), 0, 0]),
        Op::Move(Movement::Expand) => (10, [0; 3]),
        Op::Move(Movement::Slice { axis, start, step }) => {
            (11, [*axis as u64, *start as u64, step.cast_unsigned() as u64])
        }
        Op::Move(Movement::Windows { axis, step, dilation }) => (12, [*axis as u64, *step as u64, *dilation as u64]),
        Op::Reduce(op, axes) => (13, [*op as u64, axes.bits(), 0]),
        Op::ArgReduce { axis, largest } => (14, [*axis as u64, u64::from(*largest), 0]),
        Op::Matmul => (15, [0; 3]),
        Op::Cumsum { axis, is_reverse } => (16, [*axis as u64, u64::from(*is_reverse), 0]),
        Op::ArgSort { axis, is_descending } => (17, [*axis as u64, u64::from(*is_descending), 0]),
        Op::Gather { axis } => (18, [*axis as u64, 0, 0]),
        Op::ScatterAdd { axis, size } => (19, [*axis as u64, *size as u64, 0]),
        // Its corners follow, one for each input.
        Op::Place(_) => (20, [0; 3]),
        // Its axes follow.
        Op::Fold { before, .. } => (21, [u64::from(before.is_some()), 0, 0]),
        Op::Failed(_) => (22, [0; 3]),
        Op::Contract { summed } => (23, [summed.bits(), 0, 0]),
        Op::Attention { is_causal } => (24, [u64::from(*is_causal), 0, 0]),
        Op::AttentionRows { is_causal } => (25, [u64::from(*is_causal), 0, 0]),
        Op::AttentionGradient { is_causal, of } => (26, [u64::from(*is_causal), *of as u64, 0]),
        Op::Preferred => (27, [0; 3]),
    };
    let (rank, dtype) = (node.shape.rank() as u64, node.dtype as u64);
    let [first, second, third] = details;
    key.extend_from_slice(&[(inputs as u64) << 32 | rank << 16 | dtype << 8 | code, first, second, third]);
    match op {
        Op::Place(corners) => key.extend(corners.iter().flatten().map(|at| *at as u64)),
        Op::Fold { last, before } => {
            for FoldedAxis { axis, step, dilation, size } in [Some(last), before.as_ref()].into_iter().flatten() {
                key.extend([axis, step, dilation, size].map(|number| *number as u64));
            }
        }
        _ => {}
    }
    key.extend(node.shape.iter().map(|size| *size as u64));
}

fn write_layout(key: &mut Vec<u64>, Value { layout, .. }: &Value) {
    key.extend(layout.strides().iter().map(|stride| stride.cast_unsigned() as u64));
    key.push(layout.offset.cast_unsigned() as u64);
}

/// Which leaves may be overwritten, as bits. What two of them are in is read by whoever reads either.
fn write_given_up(
    key: &mut Vec<u64>,
    leaves: &[Value],
    given_up: &[Arc<Storage>],
    numbers: &mut Numbers,
    mut details: Option<&mut Details>,
) {
    let address = |storage: &Arc<Storage>| Arc::as_ptr(storage).addr() as u64;
    let mut held: SmallVec<[u32; 16]> = SmallVec::new();
    if !given_up.is_empty() {
        numbers.clear();
        given_up.iter().zip(0..).for_each(|(storage, number)| {
            numbers.of(address(storage), number);
        });
        held.resize(given_up.len(), 0);
    }
    // Which of those given up a leaf is in, if any.
    let found = |leaf: &Value| {
        let number = if given_up.is_empty() { None } else { numbers.find(address(&leaf.storage)) };
        number.map(|number| number as usize)
    };
    for leaf in leaves {
        if let Some(number) = found(leaf) {
            held[number] += 1;
        }
    }
    for part in leaves.chunks(u64::BITS as usize) {
        let mut word = 0;
        for (bit, leaf) in part.iter().enumerate() {
            let is_given_up = found(leaf).is_some_and(|number| held[number] == 1);
            word |= u64::from(is_given_up) << bit;
            details.iter_mut().for_each(|details| details.given_up.push(is_given_up));
        }
        key.push(word);
    }
}

/// Keys that are not equal may have the same: they are compared when it is.
fn hash_of(key: &[u64]) -> u64 {
    const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;
    // Four side by side: each waits for its own last product only.
    let mut lanes = [key.len() as u64, 1, 2, 3];
    for words in key.chunks(lanes.len()) {
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = (*lane ^ word).wrapping_mul(SPREAD).rotate_left(29);
        }
    }
    lanes.iter().fold(0, |hash, lane| (hash ^ lane).wrapping_mul(SPREAD).rotate_left(29))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::OwnDevice;
    use crate::{DType, Device, Tensor};

    fn graph_of(tensors: &[&Tensor]) -> PlanGraph {
        let nodes: Vec<Arc<Node>> = tensors.iter().map(|tensor| tensor.node.clone()).collect();
        PlanGraph::take(&nodes, Mode::Fused, &[]).unwrap()
    }

    #[test]
    fn nodes_are_numbered_as_they_were_made_however_long_ago_that_was() {
        let _cpu = OwnDevice::set(&Device::Cpu);
        let variables: Vec<Tensor> = (0..5).map(|n| Tensor::full(&[3], n, DType::F32).with_grad()).collect();
        // Ids of others lie in between.
        let others: Vec<Tensor> = (0..1000).map(|n| Tensor::full(&[3], n, DType::F32)).collect();
        let last = variables.iter().rev().fold(&others[0] * 2.0, |sum, variable| (&sum + variable) * &sum);
        let graph = graph_of(&[&last, &variables[0]]);
        let made: Vec<u64> = graph.nodes.iter().map(|node| node.node.id).collect();
        assert!(made.is_sorted(), "{made:?}");
        for node in 0..graph.nodes.len() {
            let ids: Vec<u64> = graph.inputs(node).iter().map(|input| graph.nodes[*input].node.id).collect();
            let state = graph.nodes[node].node.state.lock();
            let own: Vec<u64> = state.recipe.iter().flat_map(|recipe| &recipe.inputs).map(|input| input.id).collect();
            assert_eq!(ids, own, "{node}");
        }
        let outputs: Vec<u64> = graph.outputs.iter().map(|output| graph.nodes[*output].node.id).collect();
        assert_eq!(outputs, [variables[0].node.id, last.node.id]);
        let met: Vec<u64> = graph.snapshot.outputs().map(|node| node.id).collect();
        assert_eq!(met, outputs, "values come in the order that the plan has its outputs in");
    }

    #[test]
    fn keys_tell_what_plans_depend_on() {
        let _cpu = OwnDevice::set(&Device::Cpu);
        let [a, b] = [1.0, 2.0].map(|value| Tensor::full(&[4], value, DType::F32));
        Tensor::realize_all(&[&a, &b]).unwrap();
        let key = |tensors: &[&Tensor]| graph_of(tensors).snapshot.key.clone();
        let one = key(&[&((&a + &b) * 3.0)]);
        assert_eq!(one, key(&[&((&b + &a) * 4.0)]), "elements and scalars are no part of it");
        let (twice, sum) = (&a + &a, &a + &b);
        let others = [
            key(&[&((&a + &a) * 3.0)]),
            key(&[&((&a - &b) * 3.0)]),
            key(&[&(&a + &b)]),
            key(&[&(&sum * 3.0), &sum]),
            key(&[&((a.reshape(&[2, 2]) + b.reshape(&[2, 2])) * 3.0)]),
            key(&[&((&a + b.flip(0)) * 3.0)]),
            key(&[&(&twice * 3.0), &twice]),
        ];
        for (n, other) in others.iter().enumerate() {
            assert!(*other != one && others[..n].iter().all(|before| before != other), "{n}");
        }
        // Of what two leaves are in, neither may be overwritten.
        let storage = a.value().unwrap().storage;
        let taken = |tensor: &Tensor| {
            let graph =
                PlanGraph::take(std::slice::from_ref(&tensor.node), Mode::Fused, std::slice::from_ref(&storage));
            graph.unwrap().given_up.clone()
        };
        assert_eq!(taken(&(&a + &b)), [Some(4), None]);
        let seen = Tensor { node: Node::of_value(a.value().unwrap(), DType::F32, false, a.node.at) };
        assert_eq!(taken(&(&a + &seen)), [None, None]);
    }
}
