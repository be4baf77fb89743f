//! What a kernel may use: its place in the launch, barriers, memory that its group shares, what subgroups do together,
//! products of matrices among it, mathematics, numbers of 16 bits.
//!
//! A kernel is an exported function that returns nothing, in a `cdylib` for wasm32-unknown-unknown without the standard
//! library:
//!
//! ```ignore
//! #![no_std]
//! #![no_main]
//!
//! use tensor_wasm_kernel::{fma, global_id};
//!
//! #[unsafe(no_mangle)]
//! pub unsafe extern "C" fn saxpy(n: usize, a: f32, x: *const f32, y: *mut f32) {
//!     let i = global_id(0);
//!     if i < n {
//!         unsafe { *y.add(i) = fma(a, *x.add(i), *y.add(i)) }
//!     }
//! }
//! ```
//!
//! The host fences every access, so what goes wrong in a kernel ends the launch with a trap and harms nobody else.

#![no_std]

mod half;
mod math;
mod matrix;
mod subgroup;

pub use half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use math::{Float, cos, exp, exp2, fma, log, log2, pow, rsqrt, sin, sqrt, tanh};
pub use matrix::{mma_bf16, mma_f16};
pub use subgroup::{
    SubgroupValue, shuffle, shuffle_xor, subgroup_add, subgroup_all, subgroup_any, subgroup_ballot, subgroup_lane,
    subgroup_max, subgroup_min, subgroup_size,
};

mod import {
    #[link(wasm_import_module = "kernel")]
    unsafe extern "C" {
        pub(crate) safe fn global_id(dimension: u32) -> u32;
        pub(crate) safe fn local_id(dimension: u32) -> u32;
        pub(crate) safe fn group_id(dimension: u32) -> u32;
        pub(crate) safe fn global_size(dimension: u32) -> u32;
        pub(crate) safe fn local_size(dimension: u32) -> u32;
        pub(crate) safe fn num_groups(dimension: u32) -> u32;
        pub(crate) safe fn barrier();
        pub(crate) safe fn shared(bytes: usize) -> *mut u8;
    }
}

/// The item's number in the launch, in dimension 0, 1 or 2.
#[inline(always)]
pub fn global_id(dimension: u32) -> usize {
    import::global_id(dimension) as usize
}

/// The item's number in its group.
#[inline(always)]
pub fn local_id(dimension: u32) -> usize {
    import::local_id(dimension) as usize
}

/// The number of the item's group.
#[inline(always)]
pub fn group_id(dimension: u32) -> usize {
    import::group_id(dimension) as usize
}

/// How many items the launch has.
#[inline(always)]
pub fn global_size(dimension: u32) -> usize {
    import::global_size(dimension) as usize
}

/// How many items a group has.
#[inline(always)]
pub fn local_size(dimension: u32) -> usize {
    import::local_size(dimension) as usize
}

/// How many groups the launch has.
#[inline(always)]
pub fn num_groups(dimension: u32) -> usize {
    import::num_groups(dimension) as usize
}

/// Waits until every item of the group is here. What they wrote before it, all of them see after it.
///
/// All items of a group must come to as many barriers. Which ones these are in the compiled code does not matter:
/// Rust's compiler knows nothing of barriers, and may put one that follows a branch on both its sides.
#[inline(always)]
pub fn barrier() {
    import::barrier();
}

/// Memory that the items of a group share, 48 KiB in all; it begins as zeros. Each call in the text of a
/// kernel is memory of its own, so calls belong at its top, outside of loops.
///
/// ```ignore
/// let tile: *mut [f32; 256] = shared();
/// ```
#[inline(always)]
pub fn shared<T: Copy>() -> *mut T {
    // The compiler of kernels has to see a constant here: that is why this is always inlined.
    import::shared(const { size_of::<T>() }).cast()
}

#[cfg(all(feature = "panic-handler", target_arch = "wasm32"))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    core::arch::wasm32::unreachable()
}
