//! Kernels of the examples, written with the SDK. Atomics need `-C target-feature=+atomics`, which `cargo xtask guests` gives.

#![no_std]
#![no_main]
#![allow(clippy::missing_safety_doc, reason = "a kernel's arguments are whatever the launch says")]

use core::sync::atomic::{AtomicU32, Ordering};

use tensor_wasm_kernel::{barrier, fma, global_id, global_size, local_id, local_size, shared};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn saxpy(n: usize, a: f32, x: *const f32, y: *mut f32) {
    let i = global_id(0);
    if i < n {
        unsafe { *y.add(i) = fma(a, *x.add(i), *y.add(i)) }
    }
}

/// How often each byte occurs, added to `bins`. Each group counts in memory of its own and adds that up once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn histogram(n: usize, data: *const u8, bins: *mut u32) {
    let own: *mut [u32; 256] = shared();
    let own = own.cast::<u32>();
    let add = |bin: *mut u32, count| unsafe { AtomicU32::from_ptr(bin) }.fetch_add(count, Ordering::Relaxed);
    unsafe {
        let mut bin = local_id(0);
        while bin < 256 {
            *own.add(bin) = 0;
            bin += local_size(0);
        }
        barrier();
        let mut i = global_id(0);
        while i < n {
            add(own.add(*data.add(i) as usize), 1);
            i += global_size(0);
        }
        barrier();
        let mut bin = local_id(0);
        while bin < 256 {
            let count = *own.add(bin);
            if count > 0 {
                add(bins.add(bin), count);
            }
            bin += local_size(0);
        }
    }
}
