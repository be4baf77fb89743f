//! The CPU as a device: memory, threads, and kernels that run fused expressions tile by tile in the first-level cache.

mod affine;
mod blas;
mod contract;
pub(crate) mod execute;
mod fold;
mod gemm;
mod map;
pub(crate) mod math;
pub(crate) mod memory;
pub(crate) mod single;
mod special;
mod threads;
mod tile;
mod walk;

#[cfg(feature = "cuda")]
pub(crate) use map::register_of;
#[cfg(test)]
pub(crate) use math::wide_erf;
#[cfg(feature = "cuda")]
pub(crate) use math::{ERF_LARGE, ERF_SMALL};
pub use memory::{memory_limit, set_memory_limit, used_bytes};
pub use threads::{set_threads, threads};
#[cfg(feature = "cuda")]
pub(crate) use tile::Class;

use crate::dtype::DType;

/// The vector instructions that kernels use.
pub(crate) fn instructions() -> &'static str {
    tile::instructions()
}

/// What multiplies matrices of a type.
pub(crate) fn product_by(dtype: DType) -> String {
    match dtype {
        DType::F32 | DType::F64 => blas::note(dtype == DType::F64),
        _ => "a plain loop".to_owned(),
    }
}
