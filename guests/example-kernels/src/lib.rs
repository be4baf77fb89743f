//! Kernels of the examples, written with the SDK. Atomics need `-C target-feature=+atomics`, with which `cargo xtask
//! guests` builds this.

#![no_std]
#![no_main]
#![allow(clippy::missing_safety_doc, reason = "a kernel's arguments are whatever the launch says")]

mod hostile;
mod images;

use core::sync::atomic::{AtomicU32, Ordering};

use tensor_wasm_kernel::{
    barrier, fma, global_id, global_size, group_id, local_id, local_size, mma_f16, rsqrt, shared, subgroup_lane,
};

/// What a launch costs that does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn empty() {}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn saxpy(n: usize, a: f32, x: *const f32, y: *mut f32) {
    let i = global_id(0);
    if i < n {
        unsafe { *y.add(i) = fma(a, *x.add(i), *y.add(i)) }
    }
}

const TILE: usize = 16;

/// The product of square matrices, in groups of 16 by 16. What tiles have beyond the matrices counts as zero, so every
/// `n` but 0 will do. Items there read the last row or column all the same: a choice between values is quicker than a
/// branch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn matmul(n: usize, a: *const f32, b: *const f32, c: *mut f32) {
    let (tile_a, tile_b): (*mut [f32; TILE * TILE], *mut [f32; TILE * TILE]) = (shared(), shared());
    let (tile_a, tile_b) = (tile_a.cast::<f32>(), tile_b.cast::<f32>());
    let (x, y) = (local_id(0), local_id(1));
    let (column, row) = (group_id(0) * TILE + x, group_id(1) * TILE + y);
    let (own, last) = (y * TILE + x, n - 1);
    let mut sum = 0.0;
    let mut t = 0;
    unsafe {
        while t < n {
            let of_a = *a.add(row.min(last) * n + (t + x).min(last));
            let of_b = *b.add((t + y).min(last) * n + column.min(last));
            *tile_a.add(own) = if t + x < n { of_a } else { 0.0 };
            *tile_b.add(own) = if t + y < n { of_b } else { 0.0 };
            barrier();
            for k in 0..TILE {
                sum = fma(*tile_a.add(y * TILE + k), *tile_b.add(k * TILE + x), sum);
            }
            barrier();
            t += TILE;
        }
        if row < n && column < n {
            *c.add(row * n + column) = sum;
        }
    }
}

/// The product of two matrices of halves on tensor cores, in groups of 32: each has 16 rows and 8 columns of it. Row by
/// row the left one, and column by column the right one, are so many words of two halves; rows, columns and words are
/// multiples of 16, 8 and 8.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn matmul_halves(columns: usize, words: usize, a: *const u32, b: *const u32, c: *mut f32) {
    let lane = subgroup_lane() as usize;
    let (own, pair) = (lane / 4, lane % 4);
    let (row, column) = (group_id(1) * 16 + own, group_id(0) * 8 + own);
    unsafe {
        let (upper, lower, right) = (a.add(row * words), a.add((row + 8) * words), b.add(column * words));
        let mut sums = [0.0; 4];
        let mut at = pair;
        while at < words {
            let left = [*upper.add(at), *lower.add(at), *upper.add(at + 4), *lower.add(at + 4)];
            sums = mma_f16(left, [*right.add(at), *right.add(at + 4)], sums);
            at += 8;
        }
        let to = c.add(row * columns + group_id(0) * 8 + 2 * pair);
        *to = sums[0];
        *to.add(1) = sums[1];
        *to.add(8 * columns) = sums[2];
        *to.add(8 * columns + 1) = sums[3];
    }
}

const BODIES: usize = 256;

/// One step of bodies (x, y, z, mass) that attract each other, in groups of 256. Velocities change where they are; the
/// new places go elsewhere, because other items still read the old ones.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nbody(n: usize, dt: f32, from: *const [f32; 4], velocities: *mut [f32; 4], to: *mut [f32; 4]) {
    let tile: *mut [[f32; 4]; BODIES] = shared();
    let tile = tile.cast::<[f32; 4]>();
    let (i, own) = (global_id(0), local_id(0));
    // A body without mass attracts nobody.
    let body = |i| if i < n { unsafe { *from.add(i) } } else { [0.0; 4] };
    let me = body(i);
    let mut pull = [0.0; 3];
    let mut base = 0;
    unsafe {
        while base < n {
            *tile.add(own) = body(base + own);
            barrier();
            for j in 0..BODIES {
                let other = *tile.add(j);
                let (dx, dy, dz) = (other[0] - me[0], other[1] - me[1], other[2] - me[2]);
                let inverse = rsqrt(fma(dx, dx, fma(dy, dy, fma(dz, dz, 1e-3))));
                let s = other[3] * (inverse * inverse * inverse);
                pull = [fma(s, dx, pull[0]), fma(s, dy, pull[1]), fma(s, dz, pull[2])];
            }
            barrier();
            base += BODIES;
        }
        if i < n {
            let v = *velocities.add(i);
            let v = [fma(pull[0], dt, v[0]), fma(pull[1], dt, v[1]), fma(pull[2], dt, v[2]), 0.0];
            *velocities.add(i) = v;
            *to.add(i) = [fma(v[0], dt, me[0]), fma(v[1], dt, me[1]), fma(v[2], dt, me[2]), me[3]];
        }
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

const SUMMANDS: usize = 256;

/// The sum of what each group sees of `x`, in groups of 256: one number for each group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reduce_sum(n: usize, x: *const f32, partial: *mut f32) {
    let sums: *mut [f32; SUMMANDS] = shared();
    let sums = sums.cast::<f32>();
    let own = local_id(0);
    let mut sum = 0.0;
    let mut i = global_id(0);
    unsafe {
        while i < n {
            sum += *x.add(i);
            i += global_size(0);
        }
        *sums.add(own) = sum;
        barrier();
        let mut half = SUMMANDS / 2;
        while half > 0 {
            if own < half {
                *sums.add(own) += *sums.add(own + half);
            }
            barrier();
            half /= 2;
        }
        if own == 0 {
            *partial.add(group_id(0)) = *sums;
        }
    }
}

/// One step of heat that spreads on a plate of `width` by `height`. The edge stays as warm as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn heat(width: usize, height: usize, alpha: f32, from: *const f32, to: *mut f32) {
    let (x, y) = (global_id(0), global_id(1));
    if x >= width || y >= height {
        return;
    }
    let at = y * width + x;
    unsafe {
        let own = *from.add(at);
        *to.add(at) = if x > 0 && y > 0 && x + 1 < width && y + 1 < height {
            let around = *from.add(at - 1) + *from.add(at + 1) + *from.add(at - width) + *from.add(at + width);
            fma(alpha, fma(-4.0, own, around), own)
        } else {
            own
        };
    }
}
