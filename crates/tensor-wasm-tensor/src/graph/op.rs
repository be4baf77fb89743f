//! Primitive operations: what a graph is made of, and all that schedulers and devices have to know. Everything else is
//! composed of them.

use std::sync::Arc;

use crate::dtype::{DType, Scalar};
use crate::error::TensorError;
use crate::shape::{AxisSet, Layout, RANK_MAX, Shape};

#[derive(Debug, Clone)]
pub(crate) enum Op {
    /// Elements that are there.
    Data,
    /// The same element everywhere.
    Fill(Scalar),
    /// The number of each element, counted in row-major order. i64.
    Iota,
    /// Numbers from 0 up to 1, each from the seed and its own number. f32.
    Random {
        seed: u64,
    },
    Unary(UnaryOp),
    Binary(BinaryOp),
    /// The second input where the first is true, the third elsewhere.
    Where,
    Cast,
    /// The same elements under other indices.
    Move(Movement),
    /// Over some axes, which stay with size 1.
    Reduce(ReduceOp, AxisSet),
    /// The first index of the largest or smallest element along an axis, which stays with size 1. i64.
    ArgReduce {
        axis: usize,
        largest: bool,
    },
    /// Matrices in the last two axes; those before are the same.
    Matmul,
    /// What queries get from values, by how much keys are like them, as one kernel. Its last input is the same composed
    /// of other operations: that is computed where the device has no such kernel, and gradients flow through it.
    Attention {
        is_causal: bool,
    },
    /// What attention's gradients need of each query, of queries, keys, the result and its gradient: [`ATTENTION_ROWS`]
    /// numbers, as rows. A kernel that only an [`Op::Preferred`] has as its input, as the next one is.
    AttentionRows {
        is_causal: bool,
    },
    /// The gradient of attention's queries, or of its keys and then its values in one line (see
    /// [`packed_values_start`]), of queries, keys, values, the result's gradient and its rows.
    AttentionGradient {
        is_causal: bool,
        of: AttentionInput,
    },
    /// The same twice, after the queries, keys and values of attention: made by kernels of its own, which is computed
    /// where the device has them, and composed of other operations, which is computed elsewhere, and through which
    /// gradients flow.
    Preferred,
    /// Sums over some axes of the products of two tensors of as many axes, each of size 1 along those that it does not
    /// know. What is summed over stays with size 1. Convolutions, and their gradients.
    Contract {
        summed: AxisSet,
    },
    /// Running sums along an axis.
    Cumsum {
        axis: usize,
        is_reverse: bool,
    },
    /// The indices that sort along an axis; equal elements keep their order. i64.
    ArgSort {
        axis: usize,
        is_descending: bool,
    },
    /// `out[i, j, k] = in[i, index[i, j, k], k]`
    Gather {
        axis: usize,
    },
    /// `out[i, index[i, j, k], k] += in[i, j, k]`, into zeros. The size of the axis is `size`.
    ScatterAdd {
        axis: usize,
        size: usize,
    },
    /// Each input at a corner of its own in a tensor of zeros.
    Place(Arc<[[usize; RANK_MAX]]>),
    /// The sum of all windows that an element was in: what [`Movement::Windows`] takes apart. Windows of one axis are
    /// the last axis, and those of another may be the one before.
    Fold {
        last: FoldedAxis,
        before: Option<FoldedAxis>,
    },
    Failed(TensorError),
}

/// What a gradient is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum AttentionInput {
    Queries,
    KeysAndValues,
}

/// Numbers of each query in [`Op::AttentionRows`].
pub(crate) const ATTENTION_ROWS: usize = 3;

/// The element from which on values' gradients lie behind those of so many elements of keys: a multiple of what is
/// moved at once.
pub(crate) fn packed_values_start(keys: usize) -> usize {
    keys.next_multiple_of(64)
}

/// An axis that windows are put back into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FoldedAxis {
    pub axis: usize,
    pub step: usize,
    pub dilation: usize,
    pub size: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum UnaryOp {
    Neg,
    Abs,
    Sign,
    Recip,
    Sqrt,
    Rsqrt,
    Exp,
    Expm1,
    Ln,
    Ln1p,
    Sin,
    Cos,
    Tanh,
    Erf,
    Floor,
    Round,
    Not,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum BinaryOp {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    Pow,
    Max,
    Min,
    Eq,
    Lt,
    Le,
    And,
    Or,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ReduceOp {
    Sum,
    Prod,
    Max,
    Min,
}

/// A tensor seen under other indices.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Movement {
    /// The same order of elements.
    Reshape,
    /// Axis `n` is axis `[n]` of the input.
    Permute([u8; RANK_MAX]),
    Expand,
    Slice {
        axis: usize,
        start: usize,
        step: isize,
    },
    Windows {
        axis: usize,
        step: usize,
        dilation: usize,
    },
}

impl Movement {
    /// The layout of the result, which has that shape; none where strides cannot say it.
    pub(crate) fn apply(&self, layout: &Layout, shape: Shape) -> Option<Layout> {
        match self {
            Movement::Reshape => layout.reshape(shape),
            Movement::Permute(axes) => {
                let mut order = [0; RANK_MAX];
                order.iter_mut().zip(axes).for_each(|(to, from)| *to = usize::from(*from));
                Some(layout.permute(&order[..shape.rank()]))
            }
            Movement::Expand => Some(layout.expand(shape)),
            Movement::Slice { axis, start, step } => Some(layout.slice(*axis, *start, *step, shape[*axis])),
            Movement::Windows { axis, step, dilation } => {
                layout.windows(*axis, *shape.last()?, *step, *dilation, shape[*axis])
            }
        }
    }
}

impl UnaryOp {
    pub(crate) fn name(self) -> &'static str {
        match self {
            UnaryOp::Neg => "neg",
            UnaryOp::Abs => "abs",
            UnaryOp::Sign => "sign",
            UnaryOp::Recip => "recip",
            UnaryOp::Sqrt => "sqrt",
            UnaryOp::Rsqrt => "rsqrt",
            UnaryOp::Exp => "exp",
            UnaryOp::Expm1 => "expm1",
            UnaryOp::Ln => "ln",
            UnaryOp::Ln1p => "ln1p",
            UnaryOp::Sin => "sin",
            UnaryOp::Cos => "cos",
            UnaryOp::Tanh => "tanh",
            UnaryOp::Erf => "erf",
            UnaryOp::Floor => "floor",
            UnaryOp::Round => "round",
            UnaryOp::Not => "not",
        }
    }

    pub(crate) fn takes(self, dtype: DType) -> bool {
        match self {
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign => dtype != DType::Bool,
            UnaryOp::Floor | UnaryOp::Round => dtype != DType::Bool,
            UnaryOp::Not => dtype == DType::Bool,
            _ => dtype.is_float(),
        }
    }
}

impl BinaryOp {
    pub(crate) fn name(self) -> &'static str {
        match self {
            BinaryOp::Add => "add",
            BinaryOp::Sub => "sub",
            BinaryOp::Mul => "mul",
            BinaryOp::Div => "div",
            BinaryOp::Rem => "rem",
            BinaryOp::Pow => "pow",
            BinaryOp::Max => "maximum",
            BinaryOp::Min => "minimum",
            BinaryOp::Eq => "eq",
            BinaryOp::Lt => "lt",
            BinaryOp::Le => "le",
            BinaryOp::And => "and",
            BinaryOp::Or => "or",
        }
    }

    pub(crate) fn is_comparison(self) -> bool {
        matches!(self, BinaryOp::Eq | BinaryOp::Lt | BinaryOp::Le)
    }

    pub(crate) fn takes(self, dtype: DType) -> bool {
        match self {
            BinaryOp::And | BinaryOp::Or => dtype == DType::Bool,
            BinaryOp::Eq | BinaryOp::Lt | BinaryOp::Le | BinaryOp::Max | BinaryOp::Min => true,
            BinaryOp::Pow => dtype.is_float(),
            _ => dtype != DType::Bool,
        }
    }
}

impl ReduceOp {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        }
    }

    /// What it makes of elements of a type: sums and products of small integers would soon not fit.
    pub(crate) fn result(self, dtype: DType) -> DType {
        match self {
            ReduceOp::Sum | ReduceOp::Prod if !dtype.is_float() => DType::I64,
            _ => dtype,
        }
    }
}

impl Op {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Op::Data => "data",
            Op::Fill(_) => "fill",
            Op::Iota => "iota",
            Op::Random { .. } => "random",
            Op::Unary(op) => op.name(),
            Op::Binary(op) => op.name(),
            Op::Where => "where",
            Op::Cast => "cast",
            Op::Move(Movement::Reshape) => "reshape",
            Op::Move(Movement::Permute(_)) => "permute",
            Op::Move(Movement::Expand) => "expand",
            Op::Move(Movement::Slice { .. }) => "slice",
            Op::Move(Movement::Windows { .. }) => "windows",
            Op::Reduce(op, _) => op.name(),
            Op::ArgReduce { largest: true, .. } => "argmax",
            Op::ArgReduce { largest: false, .. } => "argmin",
            Op::Matmul => "matmul",
            Op::Attention { .. } => "attention",
            Op::AttentionRows { .. } => "attention_rows",
            Op::AttentionGradient { of: AttentionInput::Queries, .. } => "attention_queries",
            Op::AttentionGradient { of: AttentionInput::KeysAndValues, .. } => "attention_keys",
            Op::Preferred => "preferred",
            Op::Contract { .. } => "contract",
            Op::Cumsum { .. } => "cumsum",
            Op::ArgSort { .. } => "argsort",
            Op::Gather { .. } => "gather",
            Op::ScatterAdd { .. } => "scatter_add",
            Op::Place(_) => "place",
            Op::Fold { .. } => "fold",
            Op::Failed(error) => error.operation,
        }
    }

    /// Whether each element is computed from those at the same index, so that it can be a part of any kernel.
    pub(crate) fn is_elementwise(&self) -> bool {
        matches!(self, Op::Unary(_) | Op::Binary(_) | Op::Where | Op::Cast)
    }

    /// Whether it is made from nothing but its index.
    pub(crate) fn is_generated(&self) -> bool {
        matches!(self, Op::Fill(_) | Op::Iota | Op::Random { .. })
    }
}
