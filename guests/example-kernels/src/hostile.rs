//! Kernels that misbehave, for the guest that does.

use core::num::NonZero;

use tensor_wasm_kernel::{barrier, global_id, local_id};

/// Writes to an element that need not be there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn store_at(at: usize, out: *mut u32) {
    unsafe { *out.add(at) = 1 }
}

/// Never ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn endless(out: *mut u32) {
    loop {
        unsafe { out.write_volatile(1) }
    }
}

/// Divides without looking, which is what this type is for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn divide(a: u32, b: NonZero<u32>, out: *mut u32) {
    unsafe { *out = a / b }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn panics(at: usize) {
    let table = [1, 2, 3];
    assert!(table.get(at).is_some());
}

/// Half of each group waits for the other half, which does not come.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn half_a_barrier(out: *mut u32) {
    if local_id(0).is_multiple_of(2) {
        barrier();
    }
    unsafe { *out.add(global_id(0)) = 1 }
}

/// One item in 32 divides by zero, deep in a branch that the others do not take; they wait for it at a barrier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn one_lane(zero: u32, out: *mut u32) {
    let i = local_id(0);
    let mut number = i as u32;
    if i % 32 == 7 {
        for round in 0..i as u32 + 3 {
            if number & 1 == 0 || round > i as u32 {
                number = number.wrapping_add(unsafe { (round + 1) / NonZero::new_unchecked(zero) });
            }
            number = number.wrapping_mul(3) ^ round;
        }
    }
    barrier();
    unsafe { *out.add(global_id(0)) = number }
}

/// Takes its time: every item goes through a sequence of numbers and leaves where it arrived.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spin(rounds: u32, out: *mut u32) {
    let i = global_id(0);
    let mut number = i as u32;
    for _ in 0..rounds {
        number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223) ^ number >> 16;
    }
    unsafe { *out.add(i) = number }
}
