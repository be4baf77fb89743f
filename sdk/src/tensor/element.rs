//! Element types.

use std::borrow::Cow;

use super::raw;
pub use super::raw::Elements;

/// What the elements of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::Bool | DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    pub(super) fn raw(self) -> raw::Dtype {
        match self {
            DType::Bool => raw::Dtype::Bool,
            DType::U8 => raw::Dtype::U8,
            DType::I32 => raw::Dtype::I32,
            DType::I64 => raw::Dtype::I64,
            DType::F16 => raw::Dtype::F16,
            DType::BF16 => raw::Dtype::Bf16,
            DType::F32 => raw::Dtype::F32,
            DType::F64 => raw::Dtype::F64,
        }
    }

    pub(super) fn of(dtype: raw::Dtype) -> DType {
        match dtype {
            raw::Dtype::Bool => DType::Bool,
            raw::Dtype::U8 => DType::U8,
            raw::Dtype::I32 => DType::I32,
            raw::Dtype::I64 => DType::I64,
            raw::Dtype::F16 => DType::F16,
            raw::Dtype::Bf16 => DType::BF16,
            raw::Dtype::F32 => DType::F32,
            raw::Dtype::F64 => DType::F64,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A type of Rust whose values are elements.
pub trait Element: sealed::Sealed + Copy {
    const DTYPE: DType;

    #[doc(hidden)]
    fn to_bytes(elements: &[Self]) -> Cow<'_, [u8]>;

    /// None if they are of another type.
    #[doc(hidden)]
    fn of(elements: Elements) -> Option<Vec<Self>>;
}

macro_rules! numbers {
    ($($number:ty, $dtype:ident;)*) => {
        $(
            impl sealed::Sealed for $number {}
            impl Element for $number {
                const DTYPE: DType = DType::$dtype;

                fn to_bytes(elements: &[$number]) -> Cow<'_, [u8]> {
                    Cow::Borrowed(bytemuck::cast_slice(elements))
                }

                fn of(elements: Elements) -> Option<Vec<$number>> {
                    match elements {
                        Elements::$dtype(all) => Some(all),
                        _ => None,
                    }
                }
            }
        )*
    };
}

numbers! {
    u8, U8;
    i32, I32;
    i64, I64;
    f32, F32;
    f64, F64;
}

impl sealed::Sealed for bool {}
impl Element for bool {
    const DTYPE: DType = DType::Bool;

    fn to_bytes(elements: &[bool]) -> Cow<'_, [u8]> {
        Cow::Owned(elements.iter().map(|element| u8::from(*element)).collect())
    }

    fn of(elements: Elements) -> Option<Vec<bool>> {
        match elements {
            Elements::Bool(all) => Some(all),
            _ => None,
        }
    }
}
