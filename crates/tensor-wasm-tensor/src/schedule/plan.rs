//! What a graph is scheduled to: kernels in an order, and the buffers between them. Nothing here knows a device, and
//! nothing that changes from one run of the same graph to the next (elements, scalars, seeds) is part of it.

use super::Mode;
use crate::dtype::{DType, Scalar};
use crate::graph::op::{BinaryOp, Op, ReduceOp, UnaryOp};
use crate::shape::{AxisSet, Layout, Shape};

/// Where elements are: in a buffer that was there, or in one that a step of the plan fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    Leaf(usize),
    Slot(usize),
}

/// A buffer read under a layout. Leaves have layouts of their own, which these are made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BufferView {
    pub source: Source,
    pub layout: Layout,
    pub dtype: DType,
}

#[derive(Debug)]
pub(crate) struct Plan {
    pub steps: Vec<Step>,
    pub slots: Vec<Slot>,
    /// What each output is, in the order asked for.
    pub outputs: Vec<BufferView>,
    /// Whether results take over buffers of leaves. Such a plan cannot fail once it has its memory: there would be
    /// neither the old elements nor the new ones.
    pub takes_leaves: bool,
}

/// A buffer that a step fills with contiguous elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub shape: Shape,
    pub dtype: DType,
    /// The step after which nobody reads it; none if it is an output.
    pub last_step: Option<usize>,
}

#[derive(Debug, Clone)]
pub(crate) enum Step {
    Map(MapKernel),
    Special(SpecialKernel),
}

/// An operation that is a kernel by itself.
#[derive(Debug, Clone)]
pub(crate) struct SpecialKernel {
    pub op: Op,
    pub inputs: Vec<BufferView>,
    pub shape: Shape,
    pub dtype: DType,
    pub slot: usize,
    /// The node that it computes, counted as the graph's nodes are.
    pub node: usize,
    /// What is done to its elements as soon as they are there: an expression without reductions over all of them.
    pub epilogue: Option<MapKernel>,
}

/// A fused expression over an index space, with reductions over some of its axes.
#[derive(Debug, Clone)]
pub(crate) struct MapKernel {
    pub space: Shape,
    pub reduced: AxisSet,
    pub loads: Vec<BufferView>,
    /// In an order in which they can be computed.
    pub values: Vec<MapValue>,
    /// Which values go to which slots.
    pub stores: Vec<(usize, usize)>,
    /// For each store the load whose buffer it takes over, a slot's or a leaf's that was given up: nobody reads that
    /// after this kernel, and this one reads each element before it writes the one in its place.
    pub in_place: Vec<Option<usize>>,
    /// The node whose computing may fail, or else the last, counted as the graph's nodes are.
    pub node: usize,
}

#[derive(Debug, Clone)]
pub(crate) struct MapValue {
    pub kind: ValueKind,
    pub dtype: DType,
    pub level: Level,
}

/// How often a value is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Level {
    /// Once for each point of the space.
    Full,
    /// Once for all points that differ in the reduced axes only.
    Row,
}

/// Operands are numbers of earlier values.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum ValueKind {
    Load(usize),
    /// A scalar that comes with each run.
    Fill(usize),
    /// What a buffer of the numbers 0, 1, 2… would have there.
    Iota(Layout),
    /// The same for random numbers, from a seed that comes with each run.
    Random(usize, Layout),
    Unary(UnaryOp, usize),
    Binary(BinaryOp, usize, usize),
    Where(usize, usize, usize),
    Cast(usize),
    Reduce(ReduceOp, usize),
}

/// What changes between runs of a plan, besides elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Parameter {
    Scalar(Scalar),
    Seed(u64),
}

impl Step {
    /// Everything that it reads.
    pub(crate) fn reads(&self) -> impl Iterator<Item = &BufferView> {
        let (own, after): (&[BufferView], &[BufferView]) = match self {
            Step::Map(kernel) => (&kernel.loads, &[]),
            Step::Special(kernel) => (&kernel.inputs, kernel.epilogue.as_ref().map_or(&[], |after| &after.loads)),
        };
        own.iter().chain(after)
    }

    /// The slots that it fills.
    pub(crate) fn writes(&self) -> impl Iterator<Item = usize> {
        let (own, map) = match self {
            Step::Map(kernel) => (None, Some(kernel)),
            Step::Special(kernel) => (Some(kernel.slot), kernel.epilogue.as_ref()),
        };
        own.into_iter().chain(map.into_iter().flat_map(|map| map.stores.iter().map(|(_, slot)| *slot)))
    }

    fn takes_leaves(&self) -> bool {
        let Step::Map(kernel) = self else { return false };
        kernel.in_place.iter().flatten().any(|load| matches!(kernel.loads[*load].source, Source::Leaf(_)))
    }

    /// The slots that it reads or fills, some of them more than once.
    pub(crate) fn slots(&self) -> impl Iterator<Item = usize> {
        self.reads().filter_map(BufferView::slot).chain(self.writes())
    }

    /// The node to name when it fails.
    pub(crate) fn node(&self) -> usize {
        match self {
            Step::Map(kernel) => kernel.node,
            Step::Special(kernel) => kernel.node,
        }
    }
}

impl ValueKind {
    pub(crate) fn operands(&self) -> impl Iterator<Item = usize> {
        let operands = match *self {
            ValueKind::Load(_) | ValueKind::Fill(_) | ValueKind::Iota(_) | ValueKind::Random(..) => [None; 3],
            ValueKind::Unary(_, a) | ValueKind::Cast(a) | ValueKind::Reduce(_, a) => [Some(a), None, None],
            ValueKind::Binary(_, a, b) => [Some(a), Some(b), None],
            ValueKind::Where(a, b, c) => [Some(a), Some(b), Some(c)],
        };
        operands.into_iter().flatten()
    }
}

impl Plan {
    /// `given_up` has the elements of each leaf that nobody wants to see again.
    pub(crate) fn new(
        steps: Vec<Step>,
        mut slots: Vec<Slot>,
        outputs: Vec<BufferView>,
        given_up: &[Option<usize>],
        mode: Mode,
    ) -> Plan {
        let mut steps = if mode == Mode::Fused { with_epilogues(steps) } else { steps };
        for (n, step) in steps.iter().enumerate() {
            let read = step.reads().filter_map(BufferView::slot);
            read.chain(step.writes()).for_each(|slot| slots[slot].last_step = Some(n));
        }
        outputs.iter().filter_map(BufferView::slot).for_each(|slot| slots[slot].last_step = None);
        let leaves = ended_leaves(&steps, &outputs, given_up);
        for (n, step) in steps.iter_mut().enumerate().filter(|_| mode == Mode::Fused) {
            // What ends with this step: its elements.
            let ended = |source: Source| match source {
                Source::Slot(slot) => (slots[slot].last_step == Some(n)).then(|| slots[slot].shape.numel()),
                Source::Leaf(leaf) => {
                    leaves.get(leaf).copied().flatten().filter(|(last, _)| *last == n).map(|(_, count)| count)
                }
            };
            match step {
                Step::Map(kernel) => kernel.work_in_place(&slots, ended),
                Step::Special(SpecialKernel { epilogue: Some(kernel), inputs, .. }) => {
                    // Elements of the product are still to come when the first ones are finished.
                    let is_input = |source: Source| inputs.iter().any(|input| input.source == source);
                    kernel.work_in_place(&slots, |source| ended(source).filter(|_| !is_input(source)));
                }
                Step::Special(_) => {}
            }
        }
        let takes_leaves = steps.iter().any(Step::takes_leaves);
        Plan { steps, slots, outputs, takes_leaves }
    }
}

/// For each leaf that was given up and may be overwritten, the step after which nobody reads it, and its elements.
fn ended_leaves(steps: &[Step], outputs: &[BufferView], given_up: &[Option<usize>]) -> Vec<Option<(usize, usize)>> {
    let is_whole = |step: &Step| matches!(step, Step::Map(kernel) if !kernel.may_fail());
    if !steps.iter().all(is_whole) {
        return Vec::new();
    }
    let ended = |(leaf, count): (usize, &Option<usize>)| {
        let reads = |view: &BufferView| view.source == Source::Leaf(leaf);
        let last = steps.iter().rposition(|step| step.reads().any(reads))?;
        if outputs.iter().any(reads) { None } else { count.map(|count| (last, count)) }
    };
    given_up.iter().enumerate().map(ended).collect()
}

/// Gives products of matrices what follows them, if it goes over the same elements and needs nothing that comes later.
fn with_epilogues(steps: Vec<Step>) -> Vec<Step> {
    let mut steps: Vec<Option<Step>> = steps.into_iter().map(Some).collect();
    for at in 0..steps.len() {
        let (before, after) = steps.split_at_mut(at + 1);
        let (earlier, product) = before.split_at_mut(at);
        let Some(Some(Step::Special(product))) = product.first_mut() else { continue };
        if !matches!(product.op, Op::Matmul) {
            continue;
        }
        let is_there =
            |slot: usize| slot == product.slot || earlier.iter().flatten().any(|step| step.writes().any(|w| w == slot));
        let follows = |step: &&mut Option<Step>| match step {
            Some(Step::Map(kernel)) => {
                let own = |view: &&BufferView| view.slot() == Some(product.slot);
                let is_straight =
                    |view: &BufferView| view.layout.has_strides(&kernel.space.strides()) && view.layout.offset == 0;
                kernel.reduced.is_empty()
                    && kernel.space.numel() == product.shape.numel()
                    && kernel.loads.iter().any(|view| own(&view))
                    && kernel.loads.iter().filter(own).all(is_straight)
                    && kernel.loads.iter().filter_map(BufferView::slot).all(is_there)
            }
            _ => false,
        };
        if let Some(found) = after.iter_mut().find(follows)
            && let Some(Step::Map(kernel)) = found.take()
        {
            product.epilogue = Some(kernel);
        }
    }
    steps.into_iter().flatten().collect()
}

impl BufferView {
    pub(crate) fn slot(&self) -> Option<usize> {
        if let Source::Slot(slot) = self.source { Some(slot) } else { None }
    }
}

impl MapKernel {
    /// Finds buffers that its results can take over: `ended` has the elements of those that end with this kernel.
    fn work_in_place(&mut self, slots: &[Slot], ended: impl Fn(Source) -> Option<usize>) {
        let mut taken: Vec<usize> = Vec::new();
        for (value, store) in &self.stores {
            let (space, is_full) = (self.space, self.values[*value].level == Level::Full);
            let bytes = slots[*store].dtype.size();
            let fits = |load: &usize| {
                let view = &self.loads[*load];
                let Some(count) = ended(view.source) else { return false };
                let reads = self.loads.iter().filter(|other| other.source == view.source).count();
                let is_straight = view.layout.has_strides(&space.strides()) && view.layout.offset == 0;
                is_full
                    && reads == 1
                    && !self.is_read_late(*load)
                    && is_straight
                    && view.dtype.size() == bytes
                    && count == space.numel()
            };
            let load = (0..self.loads.len()).find(|load| !taken.contains(load) && fits(load));
            taken.extend(load);
            self.in_place.push(load);
        }
    }

    /// Whether a load may be read when results are written already: where everything reduced is a result, tiles are
    /// computed first and reduced then, and what is stored as it is is copied at the end.
    fn is_read_late(&self, load: usize) -> bool {
        let is_load = |value: usize| self.values[value].kind == ValueKind::Load(load);
        let is_reduced = |value: &MapValue| matches!(value.kind, ValueKind::Reduce(_, operand) if is_load(operand));
        self.values.iter().any(is_reduced) || self.stores.iter().any(|(value, _)| is_load(*value))
    }

    /// Whether it needs memory on the way, or elements decide if it can be computed.
    fn may_fail(&self) -> bool {
        let divides = |value: &MapValue| {
            matches!(value.kind, ValueKind::Binary(BinaryOp::Div | BinaryOp::Rem, ..)) && !value.dtype.is_float()
        };
        !self.reduced.is_empty() || self.values.iter().any(divides)
    }

    /// The space without its reduced axes, which have size 1.
    pub(crate) fn rows(&self) -> Shape {
        rows(self.space, self.reduced)
    }
}

/// Elements of a row whose elements lie apart, if it is computed at once.
const PLANES_MAX: usize = 64;

/// Whether the elements of each row lie together.
pub(crate) fn is_trailing(space: Shape, reduced: AxisSet) -> bool {
    let first = (0..space.rank()).find(|axis| reduced.contains(*axis)).unwrap_or(space.rank());
    (first..space.rank()).all(|axis| reduced.contains(axis) || space[axis] == 1)
}

/// Whether rows are short though their elements lie apart: then many are computed side by side, the first elements of
/// all of them, then the second ones. The windows of a pool are such rows.
pub(crate) fn has_planes(space: Shape, reduced: AxisSet) -> bool {
    let axes = (0..space.rank()).filter(|axis| reduced.contains(*axis));
    let count: usize = axes.map(|axis| space[axis]).product();
    !is_trailing(space, reduced) && (1..=PLANES_MAX).contains(&count)
}

pub(crate) fn rows(space: Shape, reduced: AxisSet) -> Shape {
    (0..space.rank()).filter(|axis| reduced.contains(*axis)).fold(space, |shape, axis| shape.with(axis, 1))
}
