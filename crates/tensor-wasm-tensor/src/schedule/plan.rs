//! What a graph is scheduled to: kernels in an order, and the buffers between them. Nothing here knows a device, and
//! nothing that changes from one run of the same graph to the next (elements, scalars, seeds) is part of it.

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
}

/// A buffer that a step fills with contiguous elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub shape: Shape,
    pub dtype: DType,
    /// The step after which nobody reads it; none if it is an output.
    pub last_step: Option<usize>,
}

#[derive(Debug)]
pub(crate) enum Step {
    Map(MapKernel),
    Special(SpecialKernel),
}

/// An operation that is a kernel by itself.
#[derive(Debug)]
pub(crate) struct SpecialKernel {
    pub op: Op,
    pub inputs: Vec<BufferView>,
    pub shape: Shape,
    pub dtype: DType,
    pub slot: usize,
    /// The node that it computes, counted as the graph's nodes are.
    pub node: usize,
}

/// A fused expression over an index space, with reductions over some of its axes.
#[derive(Debug)]
pub(crate) struct MapKernel {
    pub space: Shape,
    pub reduced: AxisSet,
    pub loads: Vec<BufferView>,
    /// In an order in which they can be computed.
    pub values: Vec<MapValue>,
    /// Which values go to which slots.
    pub stores: Vec<(usize, usize)>,
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

impl MapKernel {
    /// The space without its reduced axes, which have size 1.
    pub(crate) fn rows(&self) -> Shape {
        rows(self.space, self.reduced)
    }
}

pub(crate) fn rows(space: Shape, reduced: AxisSet) -> Shape {
    (0..space.rank()).filter(|axis| reduced.contains(*axis)).fold(space, |shape, axis| shape.with(axis, 1))
}
