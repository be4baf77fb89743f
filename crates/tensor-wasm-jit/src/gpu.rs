//! Instructions that only GPUs have: matrix instructions of a warp, loads of their fragments, copies to shared memory
//! that go on while the kernel computes, and conversions of packed halves. Hosts build them (`build.rs`); no
//! instruction of Wasm becomes one, and what guests multiply is a product of a subgroup, whose items need not all be
//! there (`subgroup.rs`). Those that access memory have no fence, so that a kernel with one is compiled
//! trusted or not at all, and none has a form for a CPU.
//!
//! Every item of a warp comes to a matrix instruction and to a load of fragments: what one item holds is part of a tile
//! that the warp holds together. Fragments are laid out as PTX says for `mma.m16n8k16` (`mma.m8n8k4` of Volta is not
//! here) and `ldmatrix`.

use crate::ir::{Address, Reg};

/// Bytes that one asynchronous copy moves, from and to multiples of as many.
pub const COPY_BYTES: u32 = 16;

/// The elements that a matrix instruction multiplies. Products are exact, and sums are of single precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatrixElement {
    /// 16 by 16 elements times 16 by 8.
    F16,
    BF16,
    /// 16 by 8 elements times 8 by 8: the upper 19 bits of single precision.
    Tf32,
}

impl MatrixElement {
    /// As PTX spells it, and the shape of the product.
    pub(crate) fn spelling(self) -> (&'static str, &'static str) {
        match self {
            MatrixElement::F16 => ("f16", "m16n8k16"),
            MatrixElement::BF16 => ("bf16", "m16n8k16"),
            MatrixElement::Tf32 => ("tf32", "m16n8k8"),
        }
    }
}

/// One of the two types of half precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HalfType {
    F16,
    BF16,
}

/// What a kernel asks of a GPU: the least that has all of its instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Target {
    /// Compute capability 7.5.
    #[default]
    Turing,
    /// Compute capability 8.0: matrix instructions of bf16 and tf32, asynchronous copies, packed halves.
    Ampere,
    /// Compute capability 9.0 and no other: matrix instructions of warpgroups.
    Hopper,
}

impl Target {
    /// Major and minor compute capability.
    pub fn capability(self) -> (u32, u32) {
        match self {
            Target::Turing => (7, 5),
            Target::Ampere => (8, 0),
            Target::Hopper => (9, 0),
        }
    }

    /// The most of a device of such a capability.
    pub fn of(capability: (u32, u32)) -> Target {
        match capability {
            (9, 0) => Target::Hopper,
            newer if newer >= Target::Ampere.capability() => Target::Ampere,
            _ => Target::Turing,
        }
    }

    /// The first lines of its PTX.
    pub(crate) fn header(self) -> &'static str {
        match self {
            Target::Turing => ".version 7.1\n.target sm_75",
            Target::Ampere => ".version 7.1\n.target sm_80",
            Target::Hopper => ".version 8.0\n.target sm_90a",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum GpuOp {
    /// `to = a * b + sums`, each a fragment of a tile.
    Multiply {
        element: MatrixElement,
        to: [Reg; 4],
        a: [Reg; 4],
        b: [Reg; 2],
        sums: [Reg; 4],
    },
    /// Four tiles of eight rows of 16 bytes from shared memory: items 0 to 7 say where the rows of the first are, and
    /// so on. Each item gets four bytes of each; transposed, two elements of two bytes that are in one column.
    LoadTiles {
        to: [Reg; 4],
        at: Address,
        is_transposed: bool,
    },
    /// 16 bytes from a window to shared memory, of which the first few are read and the rest are zeros. It is done when
    /// the group of copies that it was committed with has been waited for.
    Copy {
        to: Address,
        from: Address,
        bytes: Reg,
    },
    CommitCopies,
    /// Waits for the item's own copies, but for so many groups that were committed last.
    AwaitCopies {
        pending: u32,
    },
    /// Where something is in shared memory, as a device counts: for descriptors.
    SharedAddress {
        to: Reg,
        at: Address,
    },
    /// `sums += left * right` of a warpgroup: 64 rows, and twice as many columns as there are sums of an item, by a
    /// depth of 32 bytes. Operands are in shared memory, as descriptors say. Sums are nobody's until it has been
    /// waited for.
    MultiplyShared {
        element: MatrixElement,
        sums: Vec<Reg>,
        left: Reg,
        right: Reg,
        is_turned: [bool; 2],
    },
    /// Before the first of some such products: what was written to sums is seen.
    FenceMultiply,
    CommitMultiply,
    /// Waits for the warpgroup's products, but for so many groups of them that were committed last.
    AwaitMultiply {
        pending: u32,
    },
    /// What the item has written to shared memory is seen by tensor cores that read it themselves.
    FenceAsync,
    /// Two halves in one register, rounded to the nearest.
    Pack {
        half: HalfType,
        to: Reg,
        low: Reg,
        high: Reg,
    },
    /// An f16 of a register as single precision.
    Unpack {
        to: Reg,
        word: Reg,
        is_high: bool,
    },
    /// Single precision with the bits of tf32, rounded to the nearest.
    RoundTf32 {
        to: Reg,
        from: Reg,
    },
    /// The larger of two numbers of single precision, and a NaN where one is.
    Max {
        to: Reg,
        a: Reg,
        b: Reg,
    },
    /// Two to the power, within 2 ulp of single precision; subnormal numbers are zeros.
    Exp2 {
        to: Reg,
        from: Reg,
    },
}

impl GpuOp {
    pub(crate) fn assigned(&self) -> &[Reg] {
        match self {
            GpuOp::Multiply { to, .. } | GpuOp::LoadTiles { to, .. } => to,
            GpuOp::MultiplyShared { sums, .. } => sums,
            GpuOp::Pack { to, .. }
            | GpuOp::SharedAddress { to, .. }
            | GpuOp::Unpack { to, .. }
            | GpuOp::RoundTf32 { to, .. }
            | GpuOp::Max { to, .. }
            | GpuOp::Exp2 { to, .. } => std::slice::from_ref(to),
            GpuOp::Copy { .. }
            | GpuOp::CommitCopies
            | GpuOp::AwaitCopies { .. }
            | GpuOp::FenceMultiply
            | GpuOp::CommitMultiply
            | GpuOp::AwaitMultiply { .. }
            | GpuOp::FenceAsync => &[],
        }
    }

    pub(crate) fn read(&self) -> impl Iterator<Item = Reg> + '_ {
        let one = std::slice::from_ref::<Reg>;
        let parts: [&[Reg]; 3] = match self {
            GpuOp::Multiply { a, b, sums, .. } => [a, b, sums],
            GpuOp::LoadTiles { at, .. } | GpuOp::SharedAddress { at, .. } => [one(&at.base), &[], &[]],
            GpuOp::MultiplyShared { sums, left, right, .. } => [sums, one(left), one(right)],
            GpuOp::Copy { to, from, bytes } => [one(&to.base), one(&from.base), one(bytes)],
            GpuOp::Pack { low: a, high: b, .. } | GpuOp::Max { a, b, .. } => [one(a), one(b), &[]],
            GpuOp::Unpack { word: from, .. } | GpuOp::RoundTf32 { from, .. } | GpuOp::Exp2 { from, .. } => {
                [one(from), &[], &[]]
            }
            GpuOp::CommitCopies
            | GpuOp::AwaitCopies { .. }
            | GpuOp::FenceMultiply
            | GpuOp::CommitMultiply
            | GpuOp::AwaitMultiply { .. }
            | GpuOp::FenceAsync => [&[], &[], &[]],
        };
        parts.into_iter().flatten().copied()
    }

    /// The addresses that it accesses: those that it only reads first.
    pub(crate) fn addresses_mut(&mut self) -> [Option<&mut Address>; 2] {
        match self {
            GpuOp::LoadTiles { at, .. } | GpuOp::SharedAddress { at, .. } => [Some(at), None],
            GpuOp::Copy { to, from, .. } => [Some(from), Some(to)],
            GpuOp::Multiply { .. }
            | GpuOp::CommitCopies
            | GpuOp::AwaitCopies { .. }
            | GpuOp::MultiplyShared { .. }
            | GpuOp::FenceMultiply
            | GpuOp::CommitMultiply
            | GpuOp::AwaitMultiply { .. }
            | GpuOp::FenceAsync
            | GpuOp::Pack { .. }
            | GpuOp::Unpack { .. }
            | GpuOp::RoundTf32 { .. }
            | GpuOp::Max { .. }
            | GpuOp::Exp2 { .. } => [None, None],
        }
    }

    /// Whether loads and stores must not be moved across it.
    pub(crate) fn orders_memory(&self) -> bool {
        match self {
            GpuOp::LoadTiles { .. }
            | GpuOp::Copy { .. }
            | GpuOp::CommitCopies
            | GpuOp::AwaitCopies { .. }
            | GpuOp::MultiplyShared { .. }
            | GpuOp::FenceMultiply
            | GpuOp::CommitMultiply
            | GpuOp::AwaitMultiply { .. }
            | GpuOp::FenceAsync => true,
            GpuOp::Multiply { .. }
            | GpuOp::SharedAddress { .. }
            | GpuOp::Pack { .. }
            | GpuOp::Unpack { .. }
            | GpuOp::RoundTf32 { .. }
            | GpuOp::Max { .. }
            | GpuOp::Exp2 { .. } => false,
        }
    }

    pub(crate) fn target(&self) -> Target {
        match self {
            GpuOp::LoadTiles { .. } | GpuOp::SharedAddress { .. } | GpuOp::Unpack { .. } | GpuOp::Exp2 { .. } => {
                Target::Turing
            }
            GpuOp::MultiplyShared { .. }
            | GpuOp::FenceMultiply
            | GpuOp::CommitMultiply
            | GpuOp::AwaitMultiply { .. }
            | GpuOp::FenceAsync => Target::Hopper,
            GpuOp::Multiply { .. }
            | GpuOp::Copy { .. }
            | GpuOp::CommitCopies
            | GpuOp::AwaitCopies { .. }
            | GpuOp::Pack { .. }
            | GpuOp::Max { .. }
            | GpuOp::RoundTf32 { .. } => Target::Ampere,
        }
    }
}
