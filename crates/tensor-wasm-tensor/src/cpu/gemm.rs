//! Matrix products. Both matrices are packed, block by block, into the order in which the innermost kernel reads them;
//! that kernel keeps a tile of the result in registers. Blocks of one matrix stay in the first-level cache, those of
//! the other in the second. An element of the result is summed up in an order that depends on its shape alone.
//!
//! Measured here against the crate `gemm` 0.19 (82 GFLOPS on one core at 1024³, for want of AVX-512 on a stable
//! compiler), MKL and OpenBLAS (some 140).
#![expect(unsafe_code, reason = "instruction sets are chosen at run time; threads write parts of one result")]

use std::sync::LazyLock;

use super::memory::CpuBuffer;
use super::threads::{parallel, threads};
use crate::error::ErrorKind;

/// Steps of the inner dimension that are packed at once: a sliver of the right matrix, 32 columns of single precision,
/// takes two thirds of a first-level cache of 48 KiB.
const DEPTH: usize = 256;

/// Columns of the right matrix that are packed at once; they stay in the third-level cache, or the second.
const WIDTH: usize = 2048;

/// Rows of the left matrix that are packed at once: half of a second-level cache of 1 MiB or more.
const HEIGHT: usize = 448;

/// With fewer rows, the right matrix is read as it lies: each of its elements is used too seldom to pay for packing.
const UNPACKED_ROWS_MAX: usize = 512;

/// Elements of the largest tile.
const EDGE: usize = 14 * 32;

/// Products that are worth a thread.
const WORK_MIN: usize = 64 * 64 * 64;

/// A matrix in memory, by the strides of its rows and columns.
#[derive(Clone, Copy)]
pub(super) struct Matrix<T> {
    pub start: *const T,
    pub row: isize,
    pub column: isize,
}

/// What is computed, and where it goes: rows one after the other.
#[derive(Clone, Copy)]
pub(super) struct Product<T> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub left: Matrix<T>,
    pub right: Matrix<T>,
    pub to: *mut T,
}

// SAFETY: operands are only read, and threads write parts of the result that do not overlap.
unsafe impl<T> Sync for Product<T> {}

/// `to (+)= left · right`, as many rows and columns as the kernel has.
type Kernel<T> = unsafe fn(&Sliver<T>);

/// What a kernel multiplies.
pub(super) struct Sliver<T> {
    pub(super) steps: usize,
    /// Packed, a line of [`Tile::width`] elements for each step.
    pub(super) left: *const T,
    /// A line for each step, which may be packed or not.
    pub(super) right: *const T,
    pub(super) right_stride: usize,
    pub(super) to: *mut T,
    pub(super) to_stride: usize,
    /// Whether it is added to what is there.
    pub(super) adds: bool,
}

/// Kernels, and the tile of the result that they keep in registers.
#[derive(Clone, Copy)]
pub(super) struct Tile<T: 'static> {
    /// Rows at most, which is also the width of a line of the packed left matrix.
    pub(super) width: usize,
    pub(super) columns: usize,
    /// By the number of rows, from one on.
    kernels: &'static [Kernel<T>],
}

/// Elements that there are kernels for.
pub(super) trait Multiply: Copy + Default + Send + Sync + 'static {
    fn tile() -> Tile<Self>;

    fn plus(a: Self, b: Self) -> Self;

    /// Packs lines of elements side by side: `to[step * width + line]`, lines that are missing as zeros. May write as
    /// much as [`SLACK`] beyond.
    ///
    /// # Safety
    ///
    /// There are `count` lines of `steps` elements, `stride` apart, and there is room for `width` lines.
    unsafe fn pack_lines(lines: *const Self, stride: isize, count: usize, steps: usize, width: usize, to: *mut Self);

    /// Turns a block round: `to[step * width + line]` for sixteen steps of lines, of which there is a multiple of
    /// sixteen, and no more is written.
    ///
    /// # Safety
    ///
    /// There are so many lines, `stride` apart, and room for the block.
    unsafe fn turn(lines: *const Self, stride: isize, count: usize, to: *mut Self, width: usize) {
        for step in 0..16 {
            for line in 0..count {
                // SAFETY: the caller's promise.
                unsafe { to.add(step * width + line).write(*lines.offset(signed(line) * stride).add(step)) };
            }
        }
    }

    /// Packs elements from anywhere: `to[step * width + line]` is what lies at `lines[line] + steps[step]`; lines that
    /// are missing are zeros. May write as much as [`SLACK`] beyond.
    ///
    /// # Safety
    ///
    /// There are elements at all of these places, and there is room for `width` lines.
    unsafe fn pack_gathered(from: *const Self, lines: &[i32], steps: &[i32], width: usize, to: *mut Self) {
        for (n, step) in steps.iter().enumerate() {
            let to = to.wrapping_add(n * width);
            for line in 0..width {
                let at = lines.get(line).map(|line| *line as isize + *step as isize);
                // SAFETY: the caller's promise.
                unsafe { to.add(line).write(at.map_or(Self::default(), |at| *from.offset(at))) };
            }
        }
    }
}

/// Elements of room behind what is packed.
pub(super) const SLACK: usize = 16;

impl Multiply for f32 {
    fn tile() -> Tile<f32> {
        static TILE: LazyLock<Tile<f32>> = LazyLock::new(|| {
            #[cfg(target_arch = "x86_64")]
            {
                if std::is_x86_feature_detected!("avx512f") {
                    return Tile { width: 14, columns: 32, kernels: &x86::F32_AVX512 };
                }
                if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
                    return Tile { width: 6, columns: 16, kernels: &x86::F32_AVX2 };
                }
            }
            Tile {
                width: 4,
                columns: 16,
                kernels: &[plain::<f32, 1, 16>, plain::<f32, 2, 16>, plain::<f32, 3, 16>, plain::<f32, 4, 16>],
            }
        });
        *TILE
    }

    fn plus(a: f32, b: f32) -> f32 {
        a + b
    }

    unsafe fn pack_lines(lines: *const f32, stride: isize, count: usize, steps: usize, width: usize, to: *mut f32) {
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx512f") {
            // SAFETY: the caller's promise, and the instructions are there.
            return unsafe { x86::pack_lines_avx512(lines, stride, count, steps, width, to) };
        }
        // SAFETY: the caller's promise.
        unsafe { pack_plainly(lines, stride, count, steps, width, to) }
    }

    unsafe fn turn(lines: *const f32, stride: isize, count: usize, to: *mut f32, width: usize) {
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx512f") {
            for first in (0..count).step_by(16) {
                let lines = lines.wrapping_offset(signed(first) * stride);
                // SAFETY: the caller's promise, and the instructions are there.
                unsafe { x86::turn_avx512(lines, stride, to.add(first), width) };
            }
            return;
        }
        for step in 0..16 {
            for line in 0..count {
                // SAFETY: the caller's promise.
                unsafe { to.add(step * width + line).write(*lines.offset(signed(line) * stride).add(step)) };
            }
        }
    }

    unsafe fn pack_gathered(from: *const f32, lines: &[i32], steps: &[i32], width: usize, to: *mut f32) {
        let is_even = |places: &[i32], stride: i32| places.windows(2).all(|pair| pair[1] == pair[0] + stride);
        // Whole lines are read along them.
        if let [first, second, ..] = lines
            && let Some(stride) = second.checked_sub(*first).filter(|stride| *stride != 1)
            && is_even(steps, 1)
            && is_even(lines, stride)
        {
            let start = from.wrapping_offset(*first as isize + steps[0] as isize);
            // SAFETY: the caller's promise.
            return unsafe { f32::pack_lines(start, stride as isize, lines.len(), steps.len(), width, to) };
        }
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx512f") {
            // SAFETY: the caller's promise, and the instructions are there.
            return unsafe { x86::pack_gathered_avx512(from, lines, steps, width, to) };
        }
        for (n, step) in steps.iter().enumerate() {
            let to = to.wrapping_add(n * width);
            for line in 0..width {
                let at = lines.get(line).map(|line| *line as isize + *step as isize);
                // SAFETY: the caller's promise.
                unsafe { to.add(line).write(at.map_or(0.0, |at| *from.offset(at))) };
            }
        }
    }
}

impl Multiply for f64 {
    fn tile() -> Tile<f64> {
        static TILE: LazyLock<Tile<f64>> = LazyLock::new(|| {
            #[cfg(target_arch = "x86_64")]
            {
                if std::is_x86_feature_detected!("avx512f") {
                    return Tile { width: 14, columns: 16, kernels: &x86::F64_AVX512 };
                }
                if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
                    return Tile { width: 6, columns: 8, kernels: &x86::F64_AVX2 };
                }
            }
            Tile {
                width: 4,
                columns: 8,
                kernels: &[plain::<f64, 1, 8>, plain::<f64, 2, 8>, plain::<f64, 3, 8>, plain::<f64, 4, 8>],
            }
        });
        *TILE
    }

    fn plus(a: f64, b: f64) -> f64 {
        a + b
    }

    unsafe fn pack_lines(lines: *const f64, stride: isize, count: usize, steps: usize, width: usize, to: *mut f64) {
        // SAFETY: the caller's promise.
        unsafe { pack_plainly(lines, stride, count, steps, width, to) }
    }
}

/// Step after step: reads several lines at once, and writes one after the other.
unsafe fn pack_plainly<T: Copy + Default>(
    lines: *const T,
    stride: isize,
    count: usize,
    steps: usize,
    width: usize,
    to: *mut T,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for step in 0..steps {
            let (from, to) = (lines.add(step), to.add(step * width));
            for line in 0..count {
                to.add(line).write(*from.offset(signed(line) * stride));
            }
            for line in count..width {
                to.add(line).write(T::default());
            }
        }
    }
}

/// The kernel for any machine: what the compiler makes of it. Lines of the left matrix have four elements.
unsafe fn plain<T, const ROWS: usize, const COLUMNS: usize>(sliver: &Sliver<T>)
where
    T: Copy + Default + std::ops::Add<Output = T> + std::ops::Mul<Output = T>,
{
    let Sliver { steps, left, right, right_stride, to, to_stride, adds } = *sliver;
    let mut sums = [[T::default(); COLUMNS]; ROWS];
    // SAFETY: the caller has as many steps of both, and has room for the tile.
    unsafe {
        for step in 0..steps {
            let b = right.add(step * right_stride).cast::<[T; COLUMNS]>().read_unaligned();
            for (row, sums) in sums.iter_mut().enumerate() {
                let a = *left.add(step * 4 + row);
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum = *sum + a * b;
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (column, sum) in sums.iter().enumerate() {
                let to = to.add(row * to_stride + column);
                *to = if adds { *to + *sum } else { *sum };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Kernels written with vector instructions: rows of the left sliver are broadcast, columns of the right one are
    //! vectors, and all sums stay in registers.

    use std::arch::x86_64::*;

    use super::{Kernel, Sliver};

    macro_rules! kernel {
        ($name:ident $kernels:ident $feature:literal $ty:ty, $width:literal [$($rows:literal)*], $lanes:literal,
         $zero:ident $load:ident $store:ident $broadcast:ident $fma:ident $add:ident) => {
            pub(super) static $kernels: [Kernel<$ty>; $width] = [$($name::<$rows>),*];

            #[target_feature(enable = $feature)]
            unsafe fn $name<const ROWS: usize>(sliver: &Sliver<$ty>) {
                let Sliver { steps, mut left, mut right, right_stride, to, to_stride, adds } = *sliver;
                // The tile is read or written at the end: by then it is here.
                for row in 0..ROWS {
                    let to = to.wrapping_add(row * to_stride).cast::<i8>();
                    _mm_prefetch::<_MM_HINT_T0>(to);
                    _mm_prefetch::<_MM_HINT_T0>(to.wrapping_add(64));
                }
                let mut sums = [[$zero(); 2]; ROWS];
                // SAFETY: the caller has as many steps of both, and has room for the tile.
                unsafe {
                    for _ in 0..steps {
                        let b = [$load(right), $load(right.add($lanes))];
                        for (row, sums) in sums.iter_mut().enumerate() {
                            let a = $broadcast(*left.add(row));
                            sums[0] = $fma(a, b[0], sums[0]);
                            sums[1] = $fma(a, b[1], sums[1]);
                        }
                        left = left.add($width);
                        right = right.wrapping_add(right_stride);
                    }
                    for (row, sums) in sums.iter().enumerate() {
                        for (half, sum) in sums.iter().enumerate() {
                            let to = to.add(row * to_stride + half * $lanes);
                            let sum = if adds { $add($load(to), *sum) } else { *sum };
                            $store(to, sum);
                        }
                    }
                }
            }
        };
    }

    /// Sixteen lines and steps at a time, turned round in registers.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn pack_lines_avx512(
        lines: *const f32,
        stride: isize,
        count: usize,
        steps: usize,
        width: usize,
        to: *mut f32,
    ) {
        for first_line in (0..width).step_by(16) {
            for first_step in (0..steps).step_by(16) {
                let many = (steps - first_step).min(16);
                let mask: __mmask16 = 0xffff >> (16 - many);
                let mut a = [_mm512_setzero_ps(); 16];
                for (n, a) in a.iter_mut().enumerate().take(count.saturating_sub(first_line)) {
                    let line = lines.wrapping_offset(super::signed(first_line + n) * stride).wrapping_add(first_step);
                    // SAFETY: the caller's promise; what is beyond the last step is not read.
                    *a = unsafe { _mm512_maskz_loadu_ps(mask, line) };
                }
                let columns = transpose(a);
                for (n, column) in columns.iter().enumerate().take(many) {
                    let to = to.wrapping_add((first_step + n) * width + first_line);
                    // SAFETY: there is room for the step, and a little behind it; what is written too much is
                    // overwritten by the next step, or nobody's.
                    unsafe { _mm512_storeu_ps(to, *column) };
                }
            }
        }
    }

    /// Sixteen lines of sixteen elements.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn turn_avx512(lines: *const f32, stride: isize, to: *mut f32, width: usize) {
        let mut a = [_mm512_setzero_ps(); 16];
        // SAFETY: the caller's promise.
        unsafe {
            for (n, a) in a.iter_mut().enumerate() {
                *a = _mm512_loadu_ps(lines.offset(super::signed(n) * stride));
            }
            for (n, column) in transpose(a).iter().enumerate() {
                _mm512_storeu_ps(to.add(n * width), *column);
            }
        }
    }

    /// Sixteen lines at a time, by loads where they lie together and by a gather where they do not.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn pack_gathered_avx512(
        from: *const f32,
        lines: &[i32],
        steps: &[i32],
        width: usize,
        to: *mut f32,
    ) {
        for first in (0..width).step_by(16) {
            let own = lines.get(first..).unwrap_or_default();
            let own = &own[..own.len().min(16)];
            let is_run = |places: &[i32]| places.windows(2).all(|pair| pair[1] == pair[0] + 1);
            let mask: __mmask16 = if own.is_empty() { 0 } else { 0xffff >> (16 - own.len()) };
            let mut places = [0_i32; 16];
            places[..own.len()].copy_from_slice(own);
            let start = |step: &i32, line: usize| from.wrapping_offset(places[line] as isize + *step as isize);
            // SAFETY: the caller's promise; lines that are missing are not read, and what is written too much is
            // overwritten by the next step, or nobody's.
            unsafe {
                let to = |n: usize| to.add(n * width + first);
                if is_run(own) {
                    for (n, step) in steps.iter().enumerate() {
                        _mm512_storeu_ps(to(n), _mm512_maskz_loadu_ps(mask, start(step, 0)));
                    }
                } else if own.len() == 16 && is_run(&own[..8]) && is_run(&own[8..]) {
                    for (n, step) in steps.iter().enumerate() {
                        _mm256_storeu_ps(to(n), _mm256_loadu_ps(start(step, 0)));
                        _mm256_storeu_ps(to(n).add(8), _mm256_loadu_ps(start(step, 8)));
                    }
                } else {
                    let index = _mm512_loadu_si512(places.as_ptr().cast());
                    let zero = _mm512_setzero_ps();
                    for (n, step) in steps.iter().enumerate() {
                        let base = from.wrapping_offset(*step as isize);
                        _mm512_storeu_ps(to(n), _mm512_mask_i32gather_ps::<4>(zero, mask, index, base));
                    }
                }
            }
        }
    }

    /// Rows to columns: pairs, then fours, then blocks of four.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn transpose(a: [__m512; 16]) -> [__m512; 16] {
        let zero = _mm512_setzero_ps();
        let (mut b, mut c, mut d, mut e, mut f) = ([zero; 16], [zero; 16], [zero; 8], [zero; 8], [zero; 16]);
        let low = |a, b| _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
        let high = |a, b| _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
        for n in 0..8 {
            b[2 * n] = _mm512_unpacklo_ps(a[2 * n], a[2 * n + 1]);
            b[2 * n + 1] = _mm512_unpackhi_ps(a[2 * n], a[2 * n + 1]);
        }
        for n in (0..16).step_by(4) {
            (c[n], c[n + 1]) = (low(b[n], b[n + 2]), high(b[n], b[n + 2]));
            (c[n + 2], c[n + 3]) = (low(b[n + 1], b[n + 3]), high(b[n + 1], b[n + 3]));
        }
        for n in 0..4 {
            (d[n], d[n + 4]) = (_mm512_shuffle_f32x4(c[n], c[4 + n], 0x88), _mm512_shuffle_f32x4(c[n], c[4 + n], 0xdd));
            e[n] = _mm512_shuffle_f32x4(c[8 + n], c[12 + n], 0x88);
            e[n + 4] = _mm512_shuffle_f32x4(c[8 + n], c[12 + n], 0xdd);
        }
        for n in 0..8 {
            f[n] = _mm512_shuffle_f32x4(d[n], e[n], 0x88);
            f[n + 8] = _mm512_shuffle_f32x4(d[n], e[n], 0xdd);
        }
        f
    }

    kernel!(f32_avx512 F32_AVX512 "avx512f" f32, 14 [1 2 3 4 5 6 7 8 9 10 11 12 13 14], 16,
        _mm512_setzero_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_set1_ps _mm512_fmadd_ps _mm512_add_ps);
    kernel!(f64_avx512 F64_AVX512 "avx512f" f64, 14 [1 2 3 4 5 6 7 8 9 10 11 12 13 14], 8,
        _mm512_setzero_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_set1_pd _mm512_fmadd_pd _mm512_add_pd);
    kernel!(f32_avx2 F32_AVX2 "avx2,fma" f32, 6 [1 2 3 4 5 6], 8,
        _mm256_setzero_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_set1_ps _mm256_fmadd_ps _mm256_add_ps);
    kernel!(f64_avx2 F64_AVX2 "avx2,fma" f64, 6 [1 2 3 4 5 6], 4,
        _mm256_setzero_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_set1_pd _mm256_fmadd_pd _mm256_add_pd);
}

/// Room that several threads write parts of.
struct Packed<T>(*mut T);

// SAFETY: as it says.
unsafe impl<T> Sync for Packed<T> {}

impl<T> Packed<T> {
    fn at(&self, offset: usize) -> *mut T {
        self.0.wrapping_add(offset)
    }
}

/// Is told which elements of the result are there: so many from one on. They are still in the cache then.
pub(super) type Finish<'f> = dyn Fn(usize, usize) + Sync + 'f;

/// Multiplies matrices.
pub(super) fn multiply<T: Multiply>(product: &Product<T>, finish: Option<&Finish<'_>>) -> Result<(), ErrorKind> {
    let Product { m, n, k, .. } = *product;
    if m == 0 || n == 0 {
        return Ok(());
    }
    if k == 0 {
        // SAFETY: the result has so many elements.
        unsafe { (0..m * n).for_each(|at| product.to.add(at).write(T::default())) };
        finish.inspect(|finish| finish(0, m * n));
        return Ok(());
    }
    let tile = T::tile();
    let allocate = |count: usize| {
        let bytes = count * size_of::<T>();
        CpuBuffer::uninitialized(bytes).ok_or(ErrorKind::OutOfMemory { bytes })
    };
    let depth = DEPTH.min(k);
    let width = WIDTH.min(n).next_multiple_of(tile.columns);
    // With few rows, packing the right matrix costs more than reading it as it lies.
    let is_packed = product.right.column != 1 || product.right.row < 0 || m > UNPACKED_ROWS_MAX;
    let right = allocate(if is_packed { width * depth } else { tile.columns * depth } + SLACK)?;
    let is_shared = m * n * k >= 2 * WORK_MIN && threads() > 1;
    // As many rows in each sliver, and enough blocks of slivers for everybody, none larger than fits.
    let rows = m.div_ceil(m.div_ceil(tile.width));
    let slivers = m.div_ceil(rows);
    let parts = if is_shared { m.div_ceil(HEIGHT).max(2 * threads()) } else { m.div_ceil(HEIGHT) };
    let at_once = slivers.div_ceil(parts);
    let blocks = slivers.div_ceil(at_once);
    // Blocks are packed by several threads, and each may write a little behind its own.
    let room = at_once * tile.width * depth + SLACK;
    let left = allocate(blocks * room)?;
    let (right, left) = (Packed(right.as_ptr().cast::<T>()), Packed(left.as_ptr().cast::<T>()));
    let each = |items: usize, work: &(dyn Fn(usize) + Sync)| {
        if is_shared { parallel(items, work) } else { (0..items).for_each(work) }
    };
    for first_column in (0..n).step_by(width) {
        let columns = width.min(n - first_column);
        for first_step in (0..k).step_by(depth) {
            let steps = depth.min(k - first_step);
            let Matrix { start, row, column } = product.right;
            let start = start.wrapping_offset(signed(first_step) * row + signed(first_column) * column);
            let strips = columns.div_ceil(tile.columns);
            let is_whole = columns.is_multiple_of(tile.columns);
            // What is not read where it lies: everything, or the last strip if it is not a whole one.
            let first_strip = if is_packed { 0 } else { strips - usize::from(!is_whole) };
            let right_at = |strip: usize| right.at((strip - first_strip) * tile.columns * steps);
            let lines = Matrix { start, row: column, column: row };
            let lines = &Lines(lines);
            each(strips - first_strip, &|strip| {
                let strip = first_strip + strip;
                let at = strip * tile.columns;
                // SAFETY: every strip has its own part of the room, and the matrix has these columns and steps.
                unsafe { pack(lines.from(at), tile.columns.min(columns - at), tile.columns, steps, right_at(strip)) };
            });
            each(blocks, &|block| {
                let own = left.at(block * room);
                let first_row = block * at_once * rows;
                let end = (first_row + at_once * rows).min(m);
                for (sliver, at) in (first_row..end).step_by(rows).enumerate() {
                    let Matrix { start, row, column } = product.left;
                    let start = start.wrapping_offset(signed(at) * row + signed(first_step) * column);
                    let to = own.wrapping_add(sliver * tile.width * steps);
                    // SAFETY: every block has its own part of the room, and the matrix has these rows and steps.
                    unsafe { pack(Matrix { start, row, column }, rows.min(end - at), tile.width, steps, to) };
                }
                for strip in 0..strips {
                    let column = strip * tile.columns;
                    let (right, right_stride) = if strip >= first_strip {
                        (right_at(strip).cast_const(), tile.columns)
                    } else {
                        (lines.from(column).start, row.unsigned_abs())
                    };
                    for (sliver, at) in (first_row..end).step_by(rows).enumerate() {
                        let left = own.wrapping_add(sliver * tile.width * steps).cast_const();
                        let to = product.to.wrapping_add(at * n + first_column + column);
                        let sliver =
                            Sliver { steps, left, right, right_stride, to, to_stride: n, adds: first_step > 0 };
                        let (height, width) = (rows.min(end - at), tile.columns.min(columns - column));
                        // SAFETY: both were packed, or lie in lines; the rows of a block are written by nobody else.
                        unsafe { tile_product(&tile, &sliver, height, width) };
                    }
                }
                let Some(finish) = finish.filter(|_| first_step + steps == k) else { return };
                if columns == n {
                    finish(first_row * n, (end - first_row) * n);
                } else {
                    (first_row..end).for_each(|row| finish(row * n + first_column, columns));
                }
            });
        }
    }
    Ok(())
}

/// Columns of a matrix, as lines.
struct Lines<T>(Matrix<T>);

// SAFETY: they are only read.
unsafe impl<T> Sync for Lines<T> {}

impl<T: Copy> Lines<T> {
    fn from(&self, line: usize) -> Matrix<T> {
        Matrix { start: self.0.start.wrapping_offset(signed(line) * self.0.row), ..self.0 }
    }
}

fn signed(size: usize) -> isize {
    isize::try_from(size).unwrap_or(isize::MAX)
}

/// Packs `count` rows of a matrix side by side, step after step, with zeros in the place of those that are missing.
///
/// # Safety
///
/// The matrix has so many rows and steps, and there is room for `width` rows.
unsafe fn pack<T: Multiply>(from: Matrix<T>, count: usize, width: usize, steps: usize, to: *mut T) {
    // SAFETY: the caller's promise.
    unsafe {
        if from.row == 1 && count == width {
            for step in 0..steps {
                let from = from.start.offset(signed(step) * from.column);
                to.add(step * width).copy_from_nonoverlapping(from, width);
            }
            return;
        }
        if from.column == 1 {
            return T::pack_lines(from.start, from.row, count, steps, width, to);
        }
        for step in 0..steps {
            let line = from.start.offset(signed(step) * from.column);
            for row in 0..width {
                let value = if row < count { *line.offset(signed(row) * from.row) } else { T::default() };
                to.add(step * width + row).write(value);
            }
        }
    }
}

/// One tile of the result; at the right edge through room of its own.
///
/// # Safety
///
/// There are as many steps of both matrices as the sliver says, and the result has so many rows and columns there.
pub(super) unsafe fn tile_product<T: Multiply>(tile: &Tile<T>, sliver: &Sliver<T>, height: usize, width: usize) {
    let kernel = tile.kernels[height - 1];
    // SAFETY: the caller's promise.
    unsafe {
        if width == tile.columns {
            return kernel(sliver);
        }
        let mut edge = [T::default(); EDGE];
        kernel(&Sliver { to: edge.as_mut_ptr(), to_stride: tile.columns, adds: false, ..*sliver });
        for row in 0..height {
            for column in 0..width {
                let to = sliver.to.add(row * sliver.to_stride + column);
                let sum = edge[row * tile.columns + column];
                *to = if sliver.adds { T::plus(*to, sum) } else { sum };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    /// A matrix of chance in rows or in columns, and its elements.
    struct Random {
        elements: Vec<f64>,
        row: isize,
        column: isize,
    }

    impl Random {
        fn new(rng: &mut SmallRng, rows: usize, columns: usize) -> Random {
            let elements = (0..rows * columns).map(|_| f64::from(rng.random_range(-8..9_i32)) / 4.0).collect();
            let (row, column) =
                if rng.random_bool(0.5) { (signed(columns.max(1)), 1) } else { (1, signed(rows.max(1))) };
            Random { elements, row, column }
        }

        fn at(&self, row: usize, column: usize) -> f64 {
            self.elements[(signed(row) * self.row + signed(column) * self.column).unsigned_abs()]
        }
    }

    fn check<T: Multiply + PartialEq + std::fmt::Debug>(
        of: impl Fn(f64) -> T,
        sizes: (usize, usize, usize),
        seed: u64,
    ) {
        let (m, n, k) = sizes;
        let mut rng = SmallRng::seed_from_u64(seed);
        let (a, b) = (Random::new(&mut rng, m, k), Random::new(&mut rng, k, n));
        let (left, right) = (a.elements.iter().map(|x| of(*x)), b.elements.iter().map(|x| of(*x)));
        let (left, right) = (left.collect::<Vec<T>>(), right.collect::<Vec<T>>());
        // Sums of quarters are exact, whatever the order.
        let mut found = vec![of(77.0); m * n + 1];
        let matrix = |elements: &[T], random: &Random| Matrix {
            start: elements.as_ptr(),
            row: random.row,
            column: random.column,
        };
        let (left, right) = (matrix(&left, &a), matrix(&right, &b));
        multiply(&Product { m, n, k, left, right, to: found.as_mut_ptr() }, None).unwrap();
        for row in 0..m {
            for column in 0..n {
                let sum: f64 = (0..k).map(|step| a.at(row, step) * b.at(step, column)).sum();
                assert_eq!(found[row * n + column], of(sum), "{sizes:?}, row {row}, column {column}");
            }
        }
        assert_eq!(found[m * n], of(77.0), "nothing is written behind the result");
    }

    #[test]
    #[expect(clippy::cast_possible_truncation, reason = "the numbers are small")]
    fn products_of_any_size_are_exact_where_they_can_be() {
        let mut sizes = vec![(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (14, 32, 256), (15, 33, 257), (200, 70, 300)];
        let mut rng = SmallRng::seed_from_u64(3);
        sizes.extend((0..150).map(|_| (rng.random_range(1..90), rng.random_range(1..100), rng.random_range(1..80))));
        sizes.extend([(460, 40, 20), (520, 70, 300), (20, 2100, 10), (64, 128, 784), (300, 65, 513)]);
        for (seed, sizes) in (0..).zip(sizes) {
            check::<f32>(|x| x as f32, sizes, seed);
            check::<f64>(|x| x, sizes, seed);
        }
    }

    #[test]
    fn the_kernel_for_any_machine_computes_the_same() {
        let (k, columns) = (37, 16);
        let left: Vec<f32> = (0..4 * k).map(|n| (n % 7) as f32 - 3.0).collect();
        let right: Vec<f32> = (0..columns * k).map(|n| (n % 5) as f32 - 2.0).collect();
        let mut to = vec![1.0_f32; 3 * columns];
        let sliver = Sliver {
            steps: k,
            left: left.as_ptr(),
            right: right.as_ptr(),
            right_stride: columns,
            to: to.as_mut_ptr(),
            to_stride: columns,
            adds: true,
        };
        // SAFETY: both have as many steps, and the result has three rows.
        unsafe { plain::<f32, 3, 16>(&sliver) };
        for row in 0..3 {
            for column in 0..columns {
                let sum: f32 = (0..k).map(|step| left[4 * step + row] * right[columns * step + column]).sum();
                assert_eq!(to[row * columns + column], 1.0 + sum);
            }
        }
    }
}
