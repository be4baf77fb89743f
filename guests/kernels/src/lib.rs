//! Kernels as people write them: what the tests and benchmarks of the kernel compiler run.

#![no_std]
#![no_main]
#![allow(clippy::missing_safety_doc, reason = "a kernel's arguments are whatever the launch says")]

#[link(wasm_import_module = "kernel")]
unsafe extern "C" {
    fn global_id(dimension: i32) -> i32;
    fn local_id(dimension: i32) -> i32;
    fn group_id(dimension: i32) -> i32;
    fn barrier();
    fn shared(bytes: i32) -> i32;
    fn fma_f32(a: f32, b: f32, c: f32) -> f32;
    fn rsqrt_f32(a: f32) -> f32;
    fn subgroup_lane() -> i32;
    fn subgroup_add_f32(value: f32) -> f32;
    fn subgroup_add_i32(value: i32) -> i32;
    fn subgroup_ballot(value: i32) -> i32;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    core::arch::wasm32::unreachable()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn empty() {}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn saxpy(n: i32, a: f32, x: *const f32, y: *mut f32) {
    unsafe {
        let i = global_id(0);
        if i < n {
            let i = i as usize;
            *y.add(i) = fma_f32(a, *x.add(i), *y.add(i));
        }
    }
}

/// Five points, on a grid of `width` by `height`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stencil(width: i32, height: i32, from: *const f32, to: *mut f32) {
    unsafe {
        let (x, y) = (global_id(0), global_id(1));
        if x > 0 && y > 0 && x < width - 1 && y < height - 1 {
            let at = (y * width + x) as usize;
            let w = width as usize;
            let sum = *from.add(at - 1) + *from.add(at + 1) + *from.add(at - w) + *from.add(at + w);
            *to.add(at) = fma_f32(0.1, sum - 4.0 * *from.add(at), *from.add(at));
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn matmul(n: i32, a: *const f32, b: *const f32, c: *mut f32) {
    unsafe {
        let (col, row) = (global_id(0), global_id(1));
        if col >= n || row >= n {
            return;
        }
        let mut sum = 0.0;
        for k in 0..n {
            sum = fma_f32(*a.add((row * n + k) as usize), *b.add((k * n + col) as usize), sum);
        }
        *c.add((row * n + col) as usize) = sum;
    }
}

const TILE: i32 = 16;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn matmul_tiled(n: i32, a: *const f32, b: *const f32, c: *mut f32) {
    unsafe {
        let ta = shared(TILE * TILE * 4) as *mut f32;
        let tb = shared(TILE * TILE * 4) as *mut f32;
        let (x, y) = (local_id(0), local_id(1));
        let (col, row) = (group_id(0) * TILE + x, group_id(1) * TILE + y);
        let own = (y * TILE + x) as usize;
        let mut sum = 0.0;
        let mut t = 0;
        while t < n {
            *ta.add(own) = *a.add((row * n + t + x) as usize);
            *tb.add(own) = *b.add(((t + y) * n + col) as usize);
            barrier();
            for k in 0..TILE {
                sum = fma_f32(*ta.add((y * TILE + k) as usize), *tb.add((k * TILE + x) as usize), sum);
            }
            barrier();
            t += TILE;
        }
        *c.add((row * n + col) as usize) = sum;
    }
}

/// Accelerations of bodies (x, y, z, mass), from all of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nbody(n: i32, bodies: *const [f32; 4], out: *mut [f32; 4]) {
    unsafe {
        let tile = shared(256 * 16) as *mut [f32; 4];
        let (i, own) = (global_id(0), local_id(0) as usize);
        let me = *bodies.add(i as usize);
        let (mut ax, mut ay, mut az) = (0.0, 0.0, 0.0);
        let mut base = 0;
        while base < n {
            *tile.add(own) = *bodies.add(base as usize + own);
            barrier();
            for j in 0..256 {
                let other = *tile.add(j);
                let (dx, dy, dz) = (other[0] - me[0], other[1] - me[1], other[2] - me[2]);
                let square = fma_f32(dx, dx, fma_f32(dy, dy, fma_f32(dz, dz, 1e-3)));
                let inverse = rsqrt_f32(square);
                let s = other[3] * (inverse * inverse * inverse);
                ax = fma_f32(s, dx, ax);
                ay = fma_f32(s, dy, ay);
                az = fma_f32(s, dz, az);
            }
            barrier();
            base += 256;
        }
        *out.add(i as usize) = [ax, ay, az, 0.0];
    }
}

/// A sparse matrix in rows, times a vector.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spmv(
    rows: i32,
    starts: *const i32,
    columns: *const i32,
    values: *const f32,
    x: *const f32,
    y: *mut f32,
) {
    unsafe {
        let row = global_id(0);
        if row >= rows {
            return;
        }
        let mut sum = 0.0;
        for at in *starts.add(row as usize)..*starts.add(row as usize + 1) {
            sum = fma_f32(*values.add(at as usize), *x.add(*columns.add(at as usize) as usize), sum);
        }
        *y.add(row as usize) = sum;
    }
}

/// Looks keys up in a table of (key, value) with open addressing; `mask` is its size less one. Each pair is read at
/// once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe(n: i32, mask: i32, keys: *const u32, table: *const u64, out: *mut u32) {
    unsafe {
        let i = global_id(0);
        if i >= n {
            return;
        }
        let key = *keys.add(i as usize);
        let mut at = key.wrapping_mul(2_654_435_761) & mask as u32;
        let found = loop {
            let pair = *table.add(at as usize);
            let (own, value) = (pair as u32, (pair >> 32) as u32);
            if own == key {
                break value;
            }
            if own == 0 {
                break 0;
            }
            at = (at + 1) & mask as u32;
        };
        *out.add(i as usize) = found;
    }
}

/// The sum of each group's elements: every subgroup adds up its own in registers, and the first what they all have.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sums(n: i32, x: *const f32, out: *mut f32) {
    unsafe {
        let of_subgroups = shared(32 * 4) as *mut f32;
        let (i, own) = (global_id(0), local_id(0) as usize);
        let sum = subgroup_add_f32(if i < n { *x.add(i as usize) } else { 0.0 });
        if subgroup_lane() == 0 {
            *of_subgroups.add(own / 32) = sum;
        }
        barrier();
        if own < 32 {
            let all = subgroup_add_f32(*of_subgroups.add(own));
            if own == 0 {
                *out.add(group_id(0) as usize) = all;
            }
        }
    }
}

/// Items of a subgroup that part: every other one waits at a barrier before it goes round as often as its number says,
/// the others after that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn parted(out: *mut i32) {
    unsafe {
        let own = local_id(0);
        let mut sum = own;
        if own & 1 == 0 {
            barrier();
        }
        for _ in 0..own % 7 {
            sum = sum.wrapping_mul(31).wrapping_add(subgroup_add_i32(sum));
        }
        if own & 1 == 1 {
            barrier();
        }
        *out.add(global_id(0) as usize) = sum ^ subgroup_ballot(1);
    }
}
