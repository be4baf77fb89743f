//! Element types, and single values of them.

use half::{bf16, f16};

/// What the elements of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    Bool,
    U8,
    I32,
    I64,
    F16,
    BF16,
    F32,
    F64,
}

impl DType {
    pub const ALL: [DType; 8] =
        [DType::Bool, DType::U8, DType::I32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::Bool | DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    pub const fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    pub const fn is_integer(self) -> bool {
        matches!(self, DType::U8 | DType::I32 | DType::I64)
    }

    pub const fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }

    pub fn named(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A Rust type whose values are elements.
pub trait Element: Copy + Default + Send + Sync + std::fmt::Debug + private::Sealed + 'static {
    const DTYPE: DType;
}

mod private {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($ty:ty, $dtype:ident;)*) => {
        $(impl private::Sealed for $ty {}
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}

elements! {
    bool, Bool;
    u8, U8;
    i32, I32;
    i64, I64;
    f16, F16;
    bf16, BF16;
    f32, F32;
    f64, F64;
}

/// A number that becomes an element of whatever type it meets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    Bool(bool),
    Int(i64),
    Float(f64),
}

impl Scalar {
    pub fn as_f64(self) -> f64 {
        match self {
            Scalar::Bool(value) => f64::from(u8::from(value)),
            Scalar::Int(value) => value as f64,
            Scalar::Float(value) => value,
        }
    }

    /// Floats are cut towards zero, and to the nearest there is; NaN is zero.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a float becomes the nearest integer there is, as `as` does it"
    )]
    pub fn as_i64(self) -> i64 {
        match self {
            Scalar::Bool(value) => i64::from(value),
            Scalar::Int(value) => value,
            Scalar::Float(value) => value as i64,
        }
    }

    /// The type it has by itself.
    pub fn dtype(self) -> DType {
        match self {
            Scalar::Bool(_) => DType::Bool,
            Scalar::Int(_) => DType::I64,
            Scalar::Float(_) => DType::F32,
        }
    }
}

macro_rules! scalars {
    ($($ty:ty, $variant:ident;)*) => {
        $(impl From<$ty> for Scalar {
            fn from(value: $ty) -> Scalar {
                Scalar::$variant(value.into())
            }
        })*
    };
}

scalars! {
    bool, Bool;
    u8, Int;
    i32, Int;
    u32, Int;
    i64, Int;
    f32, Float;
    f64, Float;
}

/// A size. More than an `i64` can say is the most that it can.
impl From<usize> for Scalar {
    fn from(size: usize) -> Scalar {
        Scalar::Int(i64::try_from(size).unwrap_or(i64::MAX))
    }
}
