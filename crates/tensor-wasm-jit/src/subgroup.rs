//! What the items of a subgroup do together: the kinds of [`Op::Subgroup`](crate::ir::Op), the product of
//! [`Op::Product`](crate::ir::Op), and what all devices have to agree on to get the same bits.

use crate::gpu::{HalfType, MatrixElement};
use crate::ir::{Reg, Ty};

/// What the items of a subgroup do together, each with a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SubgroupOp {
    /// The value of the item of a number; zero if that is not there.
    Shuffle(Reg),
    /// The same of the item whose number differs from the own one in these bits.
    ShuffleXor(Reg),
    Reduce(Reduction),
    /// A bit for each item, by its number: whether its value is not zero.
    Ballot,
    /// Whether any value, or every one, is not zero.
    Any,
    All,
}

/// What makes one of all values. Signed where they are integers, and as Wasm's instruction of that name where they are
/// floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Add,
    Min,
    Max,
}

/// In which order a reduction combines values: an item's and that of the item whose number differs in the first bit,
/// then what both have with what two others have, and so on. Those of whom nobody is there are left out.
pub(crate) const REDUCTION_STEPS: [u32; 5] = [16, 8, 4, 2, 1];

/// What operations of a subgroup cost, next to others.
pub(crate) const SUBGROUP_COST: u32 = 32;

/// What an item's part of a product costs: 64 multiplications on a CPU, and the way there.
pub(crate) const PRODUCT_COST: u32 = 96;

/// A product of matrices by the items of a subgroup: 16 rows by 16 columns of 16-bit numbers, times 16 by 8, added to
/// 16 by 8 sums of single precision. What each item holds of them lies as PTX says for `mma.m16n8k16`. Of an item that
/// does not take part, its numbers of both operands are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Product {
    pub half: HalfType,
    /// Assigned here and nowhere else.
    pub to: [Reg; 4],
    pub a: [Reg; 4],
    pub b: [Reg; 2],
    pub sums: [Reg; 4],
}

impl Product {
    /// See [`SubgroupOp::key`].
    pub(crate) fn key(self) -> u32 {
        let kind = match self.half {
            HalfType::F16 => 9,
            HalfType::BF16 => 10,
        };
        kind << 2
    }

    pub(crate) fn read(&self) -> impl Iterator<Item = Reg> + '_ {
        self.a.iter().chain(&self.b).chain(&self.sums).copied()
    }

    /// The elements that a matrix instruction of a GPU multiplies.
    pub(crate) fn element(self) -> MatrixElement {
        match self.half {
            HalfType::F16 => MatrixElement::F16,
            HalfType::BF16 => MatrixElement::BF16,
        }
    }
}

impl SubgroupOp {
    /// A number that only items have in common that take part in the same: never 0, which is a barrier's.
    pub(crate) fn key(self, ty: Ty) -> u32 {
        let kind = match self {
            SubgroupOp::Ballot => 1,
            SubgroupOp::Any => 2,
            SubgroupOp::All => 3,
            SubgroupOp::Shuffle(_) => 4,
            SubgroupOp::ShuffleXor(_) => 5,
            SubgroupOp::Reduce(Reduction::Add) => 6,
            SubgroupOp::Reduce(Reduction::Min) => 7,
            SubgroupOp::Reduce(Reduction::Max) => 8,
        };
        kind << 2 | ty as u32
    }

    /// What it reads besides the value.
    pub(crate) fn operand(self) -> Option<Reg> {
        match self {
            SubgroupOp::Shuffle(lane) | SubgroupOp::ShuffleXor(lane) => Some(lane),
            SubgroupOp::Reduce(_) | SubgroupOp::Ballot | SubgroupOp::Any | SubgroupOp::All => None,
        }
    }

    /// Whether the result is one of the values, as it is.
    pub(crate) fn hands_on(self) -> bool {
        match self {
            SubgroupOp::Shuffle(_) | SubgroupOp::ShuffleXor(_) => true,
            SubgroupOp::Reduce(_) | SubgroupOp::Ballot | SubgroupOp::Any | SubgroupOp::All => false,
        }
    }
}
