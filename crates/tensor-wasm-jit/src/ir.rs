//! The operations of a kernel between Wasm, or a host that builds one, and PTX or Wasm again: all of them are listed
//! here. A kernel is one flat list of operations over typed registers, with the structure of Wasm's control flow kept:
//! what a kernel calls is part of it already.
//!
//! A register is assigned by one operation, or by moves where paths meet. What is known about registers is found by
//! `facts.rs`.

use wasm_encoder::Instruction;
use wasmparser::Operator;

use crate::gpu::GpuOp;
pub(crate) use crate::subgroup::{PRODUCT_COST, Product, REDUCTION_STEPS, Reduction, SUBGROUP_COST, SubgroupOp};

/// The type of a register, or of a kernel's parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ty {
    I32,
    I64,
    F32,
    F64,
}

impl Ty {
    pub(crate) fn bytes(self) -> u32 {
        match self {
            Ty::I32 | Ty::F32 => 4,
            Ty::I64 | Ty::F64 => 8,
        }
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self, Ty::F32 | Ty::F64)
    }
}

/// Work items of a subgroup, which exchange registers: those of a group whose numbers differ in the lowest bits only.
pub const SUBGROUP: u32 = 32;

/// Where the group's shared memory begins, in the kernel's address space. Windows end below it.
pub const SHARED_ADDRESS: u32 = 0xf000_0000;

/// The lower half of a register's bits.
pub(crate) fn low_half(bits: u64) -> u32 {
    u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(0)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Reg(pub u32);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Label(pub u32);

/// A place in the source that may trap: an index into the kernel's list of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Site(pub u32);

/// Why a work item trapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum TrapKind {
    Unreachable = 1,
    DivideByZero = 2,
    IntegerOverflow = 3,
    BadConversion = 4,
    OutOfBounds = 5,
    WriteToConstant = 6,
    UnalignedAtomic = 7,
    NoSuchFunction = 8,
    WrongFunctionType = 9,
    Deadline = 10,
    Cancelled = 11,
    Recursion = 12,
}

impl TrapKind {
    pub const ALL: [TrapKind; 12] = [
        TrapKind::Unreachable,
        TrapKind::DivideByZero,
        TrapKind::IntegerOverflow,
        TrapKind::BadConversion,
        TrapKind::OutOfBounds,
        TrapKind::WriteToConstant,
        TrapKind::UnalignedAtomic,
        TrapKind::NoSuchFunction,
        TrapKind::WrongFunctionType,
        TrapKind::Deadline,
        TrapKind::Cancelled,
        TrapKind::Recursion,
    ];

    pub fn of(code: u32) -> Option<TrapKind> {
        TrapKind::ALL.into_iter().find(|kind| *kind as u32 == code)
    }

    pub fn what(self) -> &'static str {
        match self {
            TrapKind::Unreachable => "unreachable code was reached",
            TrapKind::DivideByZero => "integer divide by zero",
            TrapKind::IntegerOverflow => "integer overflow",
            TrapKind::BadConversion => "invalid conversion to integer",
            TrapKind::OutOfBounds => "out of bounds memory access",
            TrapKind::WriteToConstant => "a write to the module's constant data",
            TrapKind::UnalignedAtomic => "unaligned atomic",
            TrapKind::NoSuchFunction => "undefined element",
            TrapKind::WrongFunctionType => "indirect call type mismatch",
            TrapKind::Deadline => "the deadline passed",
            TrapKind::Cancelled => "the launch was cancelled",
            TrapKind::Recursion => "a function called itself through the table",
        }
    }
}

macro_rules! operations {
    ($(#[$doc:meta])* $vis:vis $name:ident { $($op:ident $wasm:literal $($from:ident)+ => $to:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        $vis enum $name { $($op,)* }

        #[allow(dead_code, reason = "not every table is asked for every column")]
        impl $name {
            $vis const ALL: &[$name] = &[$($name::$op,)*];

            /// As the text format of Wasm spells it.
            $vis fn name(self) -> &'static str {
                match self { $($name::$op => $wasm,)* }
            }

            /// The type of its operands.
            $vis fn from(self) -> Ty {
                match self { $($name::$op => operations!(@first $($from)+),)* }
            }

            $vis fn to(self) -> Ty {
                match self { $($name::$op => Ty::$to,)* }
            }
        }
    };
    (@first $first:ident $($rest:ident)*) => { Ty::$first };
    // Those that are instructions of Wasm, each with its class: what the passes have to know about it.
    (
        instructions: $(#[$doc:meta])* $vis:vis $name:ident : $classes:ident
        { $($op:ident $wasm:literal $($from:ident)+ => $to:ident : $class:expr,)* }
    ) => {
        operations! { $(#[$doc])* $vis $name { $($op $wasm $($from)+ => $to,)* } }

        impl $name {
            pub(crate) fn class(self) -> $classes {
                use $classes::*;
                match self { $($name::$op => $class,)* }
            }

            pub(crate) fn of(operator: &Operator<'_>) -> Option<$name> {
                match operator {
                    $(Operator::$op => Some($name::$op),)*
                    _ => None,
                }
            }

            pub(crate) fn instruction(self) -> Instruction<'static> {
                match self { $($name::$op => Instruction::$op,)* }
            }
        }
    };
}

operations! {
    instructions:
    /// One operand.
    pub Un: UnaryClass {
        I32Clz "i32.clz" I32 => I32: Integer,
        I32Ctz "i32.ctz" I32 => I32: Integer,
        I32Popcnt "i32.popcnt" I32 => I32: Integer,
        I32Eqz "i32.eqz" I32 => I32: Integer,
        I32Extend8S "i32.extend8_s" I32 => I32: Integer,
        I32Extend16S "i32.extend16_s" I32 => I32: Integer,
        I64Clz "i64.clz" I64 => I64: Integer,
        I64Ctz "i64.ctz" I64 => I64: Integer,
        I64Popcnt "i64.popcnt" I64 => I64: Integer,
        I64Eqz "i64.eqz" I64 => I32: Integer,
        I64Extend8S "i64.extend8_s" I64 => I64: Integer,
        I64Extend16S "i64.extend16_s" I64 => I64: Integer,
        I64Extend32S "i64.extend32_s" I64 => I64: Integer,
        F32Abs "f32.abs" F32 => F32: Abs,
        F32Neg "f32.neg" F32 => F32: Neg,
        F32Ceil "f32.ceil" F32 => F32: Float,
        F32Floor "f32.floor" F32 => F32: Float,
        F32Trunc "f32.trunc" F32 => F32: Float,
        F32Nearest "f32.nearest" F32 => F32: Float,
        F32Sqrt "f32.sqrt" F32 => F32: Float,
        F64Abs "f64.abs" F64 => F64: Abs,
        F64Neg "f64.neg" F64 => F64: Neg,
        F64Ceil "f64.ceil" F64 => F64: Float,
        F64Floor "f64.floor" F64 => F64: Float,
        F64Trunc "f64.trunc" F64 => F64: Float,
        F64Nearest "f64.nearest" F64 => F64: Float,
        F64Sqrt "f64.sqrt" F64 => F64: Float,
        I32WrapI64 "i32.wrap_i64" I64 => I32: Integer,
        I64ExtendI32S "i64.extend_i32_s" I32 => I64: Integer,
        I64ExtendI32U "i64.extend_i32_u" I32 => I64: Integer,
        I32TruncF32S "i32.trunc_f32_s" F32 => I32: Convert(Least::At(-TWO_31), TWO_31),
        I32TruncF32U "i32.trunc_f32_u" F32 => I32: Convert(Least::Above(-1.0), 2.0 * TWO_31),
        I32TruncF64S "i32.trunc_f64_s" F64 => I32: Convert(Least::Above(-TWO_31 - 1.0), TWO_31),
        I32TruncF64U "i32.trunc_f64_u" F64 => I32: Convert(Least::Above(-1.0), 2.0 * TWO_31),
        I64TruncF32S "i64.trunc_f32_s" F32 => I64: Convert(Least::At(-TWO_63), TWO_63),
        I64TruncF32U "i64.trunc_f32_u" F32 => I64: Convert(Least::Above(-1.0), 2.0 * TWO_63),
        I64TruncF64S "i64.trunc_f64_s" F64 => I64: Convert(Least::At(-TWO_63), TWO_63),
        I64TruncF64U "i64.trunc_f64_u" F64 => I64: Convert(Least::Above(-1.0), 2.0 * TWO_63),
        I32TruncSatF32S "i32.trunc_sat_f32_s" F32 => I32: Integer,
        I32TruncSatF32U "i32.trunc_sat_f32_u" F32 => I32: Integer,
        I32TruncSatF64S "i32.trunc_sat_f64_s" F64 => I32: Integer,
        I32TruncSatF64U "i32.trunc_sat_f64_u" F64 => I32: Integer,
        I64TruncSatF32S "i64.trunc_sat_f32_s" F32 => I64: Integer,
        I64TruncSatF32U "i64.trunc_sat_f32_u" F32 => I64: Integer,
        I64TruncSatF64S "i64.trunc_sat_f64_s" F64 => I64: Integer,
        I64TruncSatF64U "i64.trunc_sat_f64_u" F64 => I64: Integer,
        F32ConvertI32S "f32.convert_i32_s" I32 => F32: Float,
        F32ConvertI32U "f32.convert_i32_u" I32 => F32: Float,
        F32ConvertI64S "f32.convert_i64_s" I64 => F32: Float,
        F32ConvertI64U "f32.convert_i64_u" I64 => F32: Float,
        F64ConvertI32S "f64.convert_i32_s" I32 => F64: Float,
        F64ConvertI32U "f64.convert_i32_u" I32 => F64: Float,
        F64ConvertI64S "f64.convert_i64_s" I64 => F64: Float,
        F64ConvertI64U "f64.convert_i64_u" I64 => F64: Float,
        F32DemoteF64 "f32.demote_f64" F64 => F32: Float,
        F64PromoteF32 "f64.promote_f32" F32 => F64: Float,
        I32ReinterpretF32 "i32.reinterpret_f32" F32 => I32: ToBits,
        I64ReinterpretF64 "i64.reinterpret_f64" F64 => I64: ToBits,
        F32ReinterpretI32 "f32.reinterpret_i32" I32 => F32: FromBits,
        F64ReinterpretI64 "f64.reinterpret_i64" I64 => F64: FromBits,
    }
}

const TWO_31: f64 = 2_147_483_648.0;
const TWO_63: f64 = 9_223_372_036_854_775_808.0;

/// The least that a float may be to be converted to an integer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Least {
    At(f64),
    Above(f64),
}

/// What the passes have to know about an operation of one operand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum UnaryClass {
    /// Makes an integer, and looks at no NaN's bits.
    Integer,
    /// Makes a float; where that is a NaN, it is the canonical one.
    Float,
    /// Clears the sign, and keeps the other bits of a NaN.
    Abs,
    /// Flips the sign, also a NaN's: that is looked at, and kept.
    Neg,
    /// A float's bits as an integer.
    ToBits,
    /// An integer as a float's bits.
    FromBits,
    /// Traps unless the float is no NaN, at least or above the first, and below the second.
    Convert(Least, f64),
}

/// What the passes have to know about an operation of two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BinaryClass {
    /// i32 arithmetic that addresses are computed with; `Or` is also `xor`.
    Add,
    Sub,
    And,
    Or,
    Mul,
    Shl,
    /// Any other that makes an integer and never traps.
    Integer,
    /// Traps where the divisor is zero.
    Divide,
    /// And where the quotient overflows.
    DivideSigned,
    /// Makes a float; where that is a NaN, it is the canonical one.
    Float,
    /// Takes the sign of the second operand, also a NaN's: both operands' bits are looked at, and kept.
    Copysign,
}

operations! {
    instructions:
    /// Two operands of one type.
    pub Bin: BinaryClass {
        I32Add "i32.add" I32 I32 => I32: Add,
        I32Sub "i32.sub" I32 I32 => I32: Sub,
        I32Mul "i32.mul" I32 I32 => I32: Mul,
        I32DivS "i32.div_s" I32 I32 => I32: DivideSigned,
        I32DivU "i32.div_u" I32 I32 => I32: Divide,
        I32RemS "i32.rem_s" I32 I32 => I32: Divide,
        I32RemU "i32.rem_u" I32 I32 => I32: Divide,
        I32And "i32.and" I32 I32 => I32: And,
        I32Or "i32.or" I32 I32 => I32: Or,
        I32Xor "i32.xor" I32 I32 => I32: Or,
        I32Shl "i32.shl" I32 I32 => I32: Shl,
        I32ShrS "i32.shr_s" I32 I32 => I32: Integer,
        I32ShrU "i32.shr_u" I32 I32 => I32: Integer,
        I32Rotl "i32.rotl" I32 I32 => I32: Integer,
        I32Rotr "i32.rotr" I32 I32 => I32: Integer,
        I32Eq "i32.eq" I32 I32 => I32: Integer,
        I32Ne "i32.ne" I32 I32 => I32: Integer,
        I32LtS "i32.lt_s" I32 I32 => I32: Integer,
        I32LtU "i32.lt_u" I32 I32 => I32: Integer,
        I32GtS "i32.gt_s" I32 I32 => I32: Integer,
        I32GtU "i32.gt_u" I32 I32 => I32: Integer,
        I32LeS "i32.le_s" I32 I32 => I32: Integer,
        I32LeU "i32.le_u" I32 I32 => I32: Integer,
        I32GeS "i32.ge_s" I32 I32 => I32: Integer,
        I32GeU "i32.ge_u" I32 I32 => I32: Integer,
        I64Add "i64.add" I64 I64 => I64: Integer,
        I64Sub "i64.sub" I64 I64 => I64: Integer,
        I64Mul "i64.mul" I64 I64 => I64: Integer,
        I64DivS "i64.div_s" I64 I64 => I64: DivideSigned,
        I64DivU "i64.div_u" I64 I64 => I64: Divide,
        I64RemS "i64.rem_s" I64 I64 => I64: Divide,
        I64RemU "i64.rem_u" I64 I64 => I64: Divide,
        I64And "i64.and" I64 I64 => I64: Integer,
        I64Or "i64.or" I64 I64 => I64: Integer,
        I64Xor "i64.xor" I64 I64 => I64: Integer,
        I64Shl "i64.shl" I64 I64 => I64: Integer,
        I64ShrS "i64.shr_s" I64 I64 => I64: Integer,
        I64ShrU "i64.shr_u" I64 I64 => I64: Integer,
        I64Rotl "i64.rotl" I64 I64 => I64: Integer,
        I64Rotr "i64.rotr" I64 I64 => I64: Integer,
        I64Eq "i64.eq" I64 I64 => I32: Integer,
        I64Ne "i64.ne" I64 I64 => I32: Integer,
        I64LtS "i64.lt_s" I64 I64 => I32: Integer,
        I64LtU "i64.lt_u" I64 I64 => I32: Integer,
        I64GtS "i64.gt_s" I64 I64 => I32: Integer,
        I64GtU "i64.gt_u" I64 I64 => I32: Integer,
        I64LeS "i64.le_s" I64 I64 => I32: Integer,
        I64LeU "i64.le_u" I64 I64 => I32: Integer,
        I64GeS "i64.ge_s" I64 I64 => I32: Integer,
        I64GeU "i64.ge_u" I64 I64 => I32: Integer,
        F32Add "f32.add" F32 F32 => F32: Float,
        F32Sub "f32.sub" F32 F32 => F32: Float,
        F32Mul "f32.mul" F32 F32 => F32: Float,
        F32Div "f32.div" F32 F32 => F32: Float,
        F32Min "f32.min" F32 F32 => F32: Float,
        F32Max "f32.max" F32 F32 => F32: Float,
        F32Copysign "f32.copysign" F32 F32 => F32: Copysign,
        F32Eq "f32.eq" F32 F32 => I32: Integer,
        F32Ne "f32.ne" F32 F32 => I32: Integer,
        F32Lt "f32.lt" F32 F32 => I32: Integer,
        F32Gt "f32.gt" F32 F32 => I32: Integer,
        F32Le "f32.le" F32 F32 => I32: Integer,
        F32Ge "f32.ge" F32 F32 => I32: Integer,
        F64Add "f64.add" F64 F64 => F64: Float,
        F64Sub "f64.sub" F64 F64 => F64: Float,
        F64Mul "f64.mul" F64 F64 => F64: Float,
        F64Div "f64.div" F64 F64 => F64: Float,
        F64Min "f64.min" F64 F64 => F64: Float,
        F64Max "f64.max" F64 F64 => F64: Float,
        F64Copysign "f64.copysign" F64 F64 => F64: Copysign,
        F64Eq "f64.eq" F64 F64 => I32: Integer,
        F64Ne "f64.ne" F64 F64 => I32: Integer,
        F64Lt "f64.lt" F64 F64 => I32: Integer,
        F64Gt "f64.gt" F64 F64 => I32: Integer,
        F64Le "f64.le" F64 F64 => I32: Integer,
        F64Ge "f64.ge" F64 F64 => I32: Integer,
    }
}

operations! {
    /// Functions of module `kernel` that a device computes in one instruction, or two, and Wasm has none for. Where one
    /// makes a float that is a NaN, it is the canonical one; where it makes a half's bits, they say the same.
    pub(crate) Math {
        FmaF32 "fma_f32" F32 F32 F32 => F32,
        FmaF64 "fma_f64" F64 F64 F64 => F64,
        RsqrtF32 "rsqrt_f32" F32 => F32,
        F16ToF32 "f16_to_f32" I32 => F32,
        F32ToF16 "f32_to_f16" F32 => I32,
    }
}

impl Math {
    pub(crate) fn operands(self) -> usize {
        match self {
            Math::FmaF32 | Math::FmaF64 => 3,
            Math::RsqrtF32 | Math::F16ToF32 | Math::F32ToF16 => 1,
        }
    }

    pub(crate) fn named(name: &str) -> Option<Math> {
        Math::ALL.iter().copied().find(|math| math.name() == name)
    }
}

/// One of the three dimensions of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    X,
    Y,
    Z,
}

impl Axis {
    pub const ALL: [Axis; 3] = [Axis::X, Axis::Y, Axis::Z];
}

/// What a work item knows about where it is, in one of three dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Id {
    Global,
    Local,
    Group,
    LocalSize,
    GlobalSize,
    Groups,
}

impl Id {
    /// What it is in a dimension that there is not: one item of number 0.
    pub(crate) fn nowhere(self) -> u32 {
        match self {
            Id::Global | Id::Local | Id::Group => 0,
            Id::LocalSize | Id::GlobalSize | Id::Groups => 1,
        }
    }

    pub(crate) fn named(name: &str) -> Option<Id> {
        Some(match name {
            "global_id" => Id::Global,
            "local_id" => Id::Local,
            "group_id" => Id::Group,
            "local_size" => Id::LocalSize,
            "global_size" => Id::GlobalSize,
            "num_groups" => Id::Groups,
            _ => return None,
        })
    }
}

/// How many bytes of memory a load or store moves, and how a load extends them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    pub bytes: u32,
    pub is_signed: bool,
}

/// What an atomic does to memory; it returns what was there before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rmw {
    Add,
    Sub,
    And,
    Or,
    Xor,
    Exchange,
    /// Compares with the third operand first.
    CompareExchange,
}

/// The memory that an access goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Region {
    /// Not known: looked up among all of them as the access is made.
    Any,
    /// The window of a parameter, which has at least as many bytes as an access.
    Window(u16),
    /// The window of a parameter, of any size, even of none.
    SmallWindow(u16),
    /// The work item's private stack.
    Stack,
    /// What the group shares.
    Shared,
}

impl Region {
    /// Whether an offset in it can be clamped: it is known, and has room for an access.
    pub(crate) fn can_clamp(self) -> bool {
        match self {
            Region::Window(_) | Region::Stack | Region::Shared => true,
            Region::Any | Region::SmallWindow(_) => false,
        }
    }
}

/// Offsets from this on may carry an address beyond the address space into a window. No window begins below it.
const OFFSET_WRAPS: u32 = 1 << 16;

/// An address: a register and what is added to it, without wrapping around.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    pub base: Reg,
    pub offset: u32,
    /// Where it is and whether it is a multiple of the access's size, as far as is known: nothing before `legalize.rs`
    /// has looked at the whole kernel.
    pub region: Region,
    pub is_aligned: bool,
}

impl Address {
    /// An address of which nothing is known.
    pub(crate) fn new(base: Reg, offset: u32) -> Address {
        Address { base, offset, region: Region::Any, is_aligned: false }
    }

    /// Whether the sum may be beyond the address space, so that the offset in a window has to be checked for that too.
    pub(crate) fn may_wrap(self) -> bool {
        self.offset >= OFFSET_WRAPS
    }
}

/// What a check looks for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Test {
    IsZero(Reg),
    /// The smallest integer divided by -1: dividend and divisor.
    Overflows(Reg, Reg),
    IsNan(Reg),
    /// A float, no NaN, that is not at least or above the first and below the second.
    IsOutside(Reg, Least, f64),
    /// An address and offset whose sum is no multiple of so many bytes, a power of two.
    IsUnaligned(Reg, u32, u32),
}

impl Test {
    fn reads(self) -> [Option<Reg>; 3] {
        match self {
            Test::IsZero(a) | Test::IsNan(a) | Test::IsOutside(a, ..) | Test::IsUnaligned(a, ..) => {
                [Some(a), None, None]
            }
            Test::Overflows(a, b) => [Some(a), Some(b), None],
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Op {
    Const {
        to: Reg,
        bits: u64,
    },
    Move {
        to: Reg,
        from: Reg,
    },
    Un {
        op: Un,
        to: Reg,
        a: Reg,
        site: Site,
    },
    Bin {
        op: Bin,
        to: Reg,
        a: Reg,
        b: Reg,
        site: Site,
    },
    Math {
        op: Math,
        to: Reg,
        operands: [Reg; 3],
    },
    /// `a` where the condition is not zero, else `b`.
    Select {
        to: Reg,
        condition: Reg,
        a: Reg,
        b: Reg,
    },
    Id {
        id: Id,
        to: Reg,
        axis: Axis,
    },
    /// The address of the group's shared memory.
    Shared {
        to: Reg,
    },
    Barrier {
        site: Site,
    },
    Load {
        to: Reg,
        access: Access,
        at: Address,
        site: Site,
    },
    Store {
        access: Access,
        at: Address,
        value: Reg,
        site: Site,
    },
    AtomicLoad {
        to: Reg,
        access: Access,
        at: Address,
        site: Site,
    },
    AtomicStore {
        access: Access,
        at: Address,
        value: Reg,
        site: Site,
    },
    Atomic {
        op: Rmw,
        to: Reg,
        access: Access,
        at: Address,
        value: Reg,
        expected: Reg,
        site: Site,
    },
    /// What another item of the subgroup has in a register: the one whose number differs in these bits. Every item of
    /// the group comes here, and the group is made of whole subgroups: a host vouches for that.
    Shuffle {
        to: Reg,
        value: Reg,
        mask: u32,
        site: Site,
    },
    /// What the items of a subgroup do together that are at the same function, wherever in the kernel that is. All
    /// items of the subgroup come to one, to a barrier or to their end before any goes on.
    Subgroup {
        op: SubgroupOp,
        to: Reg,
        value: Reg,
        site: Site,
    },
    /// A product of matrices, by the items of a subgroup that are at one of this kind, as at what is above.
    Product {
        product: Box<Product>,
        site: Site,
    },
    /// Traps unless so many bytes lie in one region; none always do.
    CheckRange {
        start: Reg,
        count: Reg,
        is_write: bool,
        site: Site,
    },
    /// What only a GPU does.
    Gpu {
        op: Box<GpuOp>,
        site: Site,
    },
    Fence,
    Trap {
        kind: TrapKind,
        site: Site,
    },
    /// Made by `legalize.rs` only: traps if the test is true. What follows may rely on it being false.
    TrapIf {
        test: Test,
        kind: TrapKind,
        site: Site,
    },
    /// Made by `legalize.rs` only: a float, or the canonical NaN where it is a NaN. May assign what it reads.
    Canonical {
        to: Reg,
        from: Reg,
    },
    /// A branch to its label goes to its end.
    Block {
        label: Label,
    },
    /// A branch to its label goes to its beginning.
    Loop {
        label: Label,
    },
    If {
        condition: Reg,
        label: Label,
    },
    Else {
        label: Label,
    },
    End {
        label: Label,
    },
    Branch {
        label: Label,
    },
    BranchIf {
        condition: Reg,
        label: Label,
    },
    /// The last label is where every other index goes.
    BranchTable {
        index: Reg,
        labels: Vec<Label>,
    },
    /// Ends the work item.
    Return,
}

/// What begins with an operation and ends with the `End` of its label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Structure {
    Block,
    Loop,
    If,
}

/// What an operation does to the structure of control flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    /// The next operation follows; a trap may end the work item instead, as a check does.
    Straight,
    Open(Label, Structure),
    Else(Label),
    Close(Label),
    /// Goes somewhere else, perhaps.
    Leave,
    /// Every item of the group, or of the subgroup, comes here first, or somewhere like it.
    Wait,
}

/// A kernel, with everything it calls.
#[derive(Debug, Clone)]
pub(crate) struct Body {
    pub name: String,
    pub params: Vec<Reg>,
    pub types: Vec<Ty>,
    pub ops: Vec<Op>,
    pub sites: Vec<crate::refusal::SourceLocation>,
    pub shared_bytes: u32,
    /// The private stack: where it ends, and how much of it is used.
    pub stack_top: u32,
    pub stack_bytes: u32,
    /// The register that holds the address of the stack.
    pub stack_pointer: Option<Reg>,
    /// Constant data, and the address at which it begins.
    pub data: Vec<u8>,
    pub data_address: u32,
}

impl Op {
    /// The register it assigns, if it is one and not several at once.
    pub(crate) fn to(&self) -> Option<Reg> {
        match self {
            Op::Const { to, .. }
            | Op::Move { to, .. }
            | Op::Un { to, .. }
            | Op::Bin { to, .. }
            | Op::Math { to, .. }
            | Op::Select { to, .. }
            | Op::Id { to, .. }
            | Op::Shared { to }
            | Op::Load { to, .. }
            | Op::AtomicLoad { to, .. }
            | Op::Atomic { to, .. }
            | Op::Shuffle { to, .. }
            | Op::Subgroup { to, .. }
            | Op::Canonical { to, .. } => Some(*to),
            Op::Barrier { .. }
            | Op::Gpu { .. }
            | Op::Product { .. }
            | Op::Store { .. }
            | Op::AtomicStore { .. }
            | Op::CheckRange { .. }
            | Op::Fence
            | Op::Trap { .. }
            | Op::TrapIf { .. }
            | Op::Block { .. }
            | Op::Loop { .. }
            | Op::If { .. }
            | Op::Else { .. }
            | Op::End { .. }
            | Op::Branch { .. }
            | Op::BranchIf { .. }
            | Op::BranchTable { .. }
            | Op::Return => None,
        }
    }

    /// All registers it assigns.
    pub(crate) fn assigned(&self) -> impl Iterator<Item = Reg> + '_ {
        let several = if let Op::Gpu { op, .. } = self { op.assigned() } else { &[] };
        let sums: &[Reg] = if let Op::Product { product, .. } = self { &product.to } else { &[] };
        self.to().into_iter().chain(several.iter().chain(sums).copied())
    }

    /// All registers it reads.
    pub(crate) fn read(&self) -> impl Iterator<Item = Reg> + '_ {
        let several = if let Op::Gpu { op, .. } = self { Some(op.read()) } else { None };
        let factors = if let Op::Product { product, .. } = self { Some(product.read()) } else { None };
        let several = several.into_iter().flatten().chain(factors.into_iter().flatten());
        self.reads().into_iter().flatten().chain(several)
    }

    /// The memory it reads or writes, and how many bytes of it. A range of any length is not one access, nor is what
    /// only a GPU does.
    pub(crate) fn access(&self) -> Option<(Address, Access)> {
        match self {
            Op::Load { at, access, .. }
            | Op::Store { at, access, .. }
            | Op::AtomicLoad { at, access, .. }
            | Op::AtomicStore { at, access, .. }
            | Op::Atomic { at, access, .. } => Some((*at, *access)),
            Op::Const { .. }
            | Op::Move { .. }
            | Op::Canonical { .. }
            | Op::Un { .. }
            | Op::Bin { .. }
            | Op::Math { .. }
            | Op::Select { .. }
            | Op::Id { .. }
            | Op::Shuffle { .. }
            | Op::Subgroup { .. }
            | Op::Product { .. }
            | Op::Shared { .. }
            | Op::Gpu { .. }
            | Op::Barrier { .. }
            | Op::CheckRange { .. }
            | Op::Fence
            | Op::Trap { .. }
            | Op::TrapIf { .. }
            | Op::Block { .. }
            | Op::Loop { .. }
            | Op::If { .. }
            | Op::Else { .. }
            | Op::End { .. }
            | Op::Branch { .. }
            | Op::BranchIf { .. }
            | Op::BranchTable { .. }
            | Op::Return => None,
        }
    }

    /// Whether others may see that it was done: what accesses memory and is no load.
    pub(crate) fn writes(&self) -> bool {
        self.access().is_some() && !matches!(self, Op::Load { .. } | Op::AtomicLoad { .. })
    }

    /// What it does to the structure of control flow.
    pub(crate) fn flow(&self) -> Flow {
        match self {
            Op::Block { label } => Flow::Open(*label, Structure::Block),
            Op::Loop { label } => Flow::Open(*label, Structure::Loop),
            Op::If { label, .. } => Flow::Open(*label, Structure::If),
            Op::Else { label } => Flow::Else(*label),
            Op::End { label } => Flow::Close(*label),
            Op::Branch { .. } | Op::BranchIf { .. } | Op::BranchTable { .. } | Op::Return | Op::Trap { .. } => {
                Flow::Leave
            }
            Op::Barrier { .. } | Op::Subgroup { .. } | Op::Product { .. } => Flow::Wait,
            Op::Const { .. }
            | Op::Move { .. }
            | Op::Un { .. }
            | Op::Bin { .. }
            | Op::Math { .. }
            | Op::Select { .. }
            | Op::Id { .. }
            | Op::Shuffle { .. }
            | Op::Shared { .. }
            | Op::Load { .. }
            | Op::Store { .. }
            | Op::AtomicLoad { .. }
            | Op::AtomicStore { .. }
            | Op::Atomic { .. }
            | Op::CheckRange { .. }
            | Op::Gpu { .. }
            | Op::Fence
            | Op::TrapIf { .. }
            | Op::Canonical { .. } => Flow::Straight,
        }
    }

    /// The place in the source that it is blamed on.
    pub(crate) fn site(&self) -> Option<Site> {
        match self {
            Op::Un { site, .. }
            | Op::Bin { site, .. }
            | Op::Barrier { site }
            | Op::Load { site, .. }
            | Op::Store { site, .. }
            | Op::AtomicLoad { site, .. }
            | Op::AtomicStore { site, .. }
            | Op::Atomic { site, .. }
            | Op::Shuffle { site, .. }
            | Op::Subgroup { site, .. }
            | Op::Product { site, .. }
            | Op::Gpu { site, .. }
            | Op::CheckRange { site, .. }
            | Op::Trap { site, .. }
            | Op::TrapIf { site, .. } => Some(*site),
            Op::Const { .. }
            | Op::Move { .. }
            | Op::Canonical { .. }
            | Op::Math { .. }
            | Op::Select { .. }
            | Op::Id { .. }
            | Op::Shared { .. }
            | Op::Fence
            | Op::Block { .. }
            | Op::Loop { .. }
            | Op::If { .. }
            | Op::Else { .. }
            | Op::End { .. }
            | Op::Branch { .. }
            | Op::BranchIf { .. }
            | Op::BranchTable { .. }
            | Op::Return => None,
        }
    }

    /// The registers it reads, but for what only a GPU does and a product.
    fn reads(&self) -> [Option<Reg>; 3] {
        match self {
            Op::Move { from: a, .. }
            | Op::Shuffle { value: a, .. }
            | Op::Canonical { from: a, .. }
            | Op::Un { a, .. }
            | Op::If { condition: a, .. }
            | Op::BranchIf { condition: a, .. }
            | Op::BranchTable { index: a, .. } => [Some(*a), None, None],
            Op::Load { at, .. } | Op::AtomicLoad { at, .. } => [Some(at.base), None, None],
            Op::Subgroup { op, value, .. } => [Some(*value), op.operand(), None],
            Op::Bin { a, b, .. } => [Some(*a), Some(*b), None],
            Op::Store { at, value, .. } | Op::AtomicStore { at, value, .. } => [Some(at.base), Some(*value), None],
            Op::CheckRange { start, count, .. } => [Some(*start), Some(*count), None],
            Op::Select { condition, a, b, .. } => [Some(*condition), Some(*a), Some(*b)],
            Op::Atomic { at, value, expected, .. } => [Some(at.base), Some(*value), Some(*expected)],
            Op::Math { operands, .. } => operands.map(Some),
            Op::TrapIf { test, .. } => test.reads(),
            Op::Const { .. }
            | Op::Id { .. }
            | Op::Shared { .. }
            | Op::Gpu { .. }
            | Op::Product { .. }
            | Op::Barrier { .. }
            | Op::Fence
            | Op::Trap { .. }
            | Op::Block { .. }
            | Op::Loop { .. }
            | Op::Else { .. }
            | Op::End { .. }
            | Op::Branch { .. }
            | Op::Return => [None; 3],
        }
    }
}

impl Body {
    /// Where windows may begin: beyond everything of its own.
    pub(crate) fn windows_from(&self) -> u32 {
        let own_end = u64::from(self.stack_top).max(u64::from(self.data_address) + self.data.len() as u64);
        u32::try_from(own_end.next_multiple_of(16)).unwrap_or(u32::MAX).max(OFFSET_WRAPS)
    }

    pub(crate) fn ty(&self, reg: Reg) -> Ty {
        self.types[reg.0 as usize]
    }

    /// Whether items of a subgroup do something together that others of it may not come to.
    pub(crate) fn has_subgroups(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Subgroup { .. } | Op::Product { .. }))
    }

    /// Whether they multiply matrices.
    pub(crate) fn has_products(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Product { .. }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Program;

    fn ty(ty: Ty) -> &'static str {
        match ty {
            Ty::I32 => "i32",
            Ty::I64 => "i64",
            Ty::F32 => "f32",
            Ty::F64 => "f64",
        }
    }

    /// Every instruction in the tables is one of Wasm's, of the types that the tables say, and is compiled.
    #[test]
    fn the_tables_say_what_wasm_says() {
        let mut functions = String::new();
        for op in Un::ALL {
            let (name, from, to) = (op.name(), ty(op.from()), ty(op.to()));
            functions += &format!(r#"(func (export "{name}") (param {from}) (result {to}) ({name} (local.get 0)))"#);
        }
        for op in Bin::ALL {
            let (name, from, to) = (op.name(), ty(op.from()), ty(op.to()));
            functions += &format!(
                r#"(func (export "{name}") (param {from} {from}) (result {to}) ({name} (local.get 0) (local.get 1)))"#
            );
        }
        let wasm = wat::parse_str(format!("(module {functions})")).unwrap();
        let program = Program::read(&wasm).unwrap();
        for name in Un::ALL.iter().map(|op| op.name()).chain(Bin::ALL.iter().map(|op| op.name())) {
            program.compile_call(name).unwrap();
        }
    }
}
