//! The CPU as a device: memory, threads, and kernels that run fused expressions tile by tile in the first-level cache.

pub(crate) mod execute;
mod gemm;
mod map;
mod math;
pub(crate) mod memory;
mod special;
mod threads;
mod tile;
mod walk;

#[cfg(test)]
pub(crate) use math::wide_erf;
pub use memory::used_bytes;
pub use threads::{set_threads, threads};
