//! Products of matrices by the items of a subgroup: on tensor cores, where a GPU has them.

mod import {
    #[link(wasm_import_module = "kernel")]
    unsafe extern "C" {
        #[rustfmt::skip]
        pub(crate) safe fn mma_f16_f32(
            a0: u32,
            a1: u32,
            a2: u32,
            a3: u32,
            b0: u32,
            b1: u32,
            c0: f32,
            c1: f32,
            c2: f32,
            c3: f32,
        );
        #[rustfmt::skip]
        pub(crate) safe fn mma_bf16_f32(
            a0: u32,
            a1: u32,
            a2: u32,
            a3: u32,
            b0: u32,
            b1: u32,
            c0: f32,
            c1: f32,
            c2: f32,
            c3: f32,
        );
        pub(crate) safe fn mma_sum(which: u32) -> f32;
    }
}

/// `a * b + sums` of a subgroup: 16 rows by 16 columns of halves, times 16 by 8, added to 16 by 8. Returns the item's
/// own four sums. GPUs need compute capability 8.0 for it.
///
/// Each word is two halves, the lower one first. The item of lane `l` has, with `g = l / 4` and `t = l % 4`:
///
/// - in `a`, columns `2 t` and `2 t + 1` of rows `g` and `g + 8`, then columns `2 t + 8` and `2 t + 9` of these rows;
/// - in `b`, rows `2 t` and `2 t + 1` of column `g`, then rows `2 t + 8` and `2 t + 9`;
/// - of the sums, columns `2 t` and `2 t + 1` of row `g`, then the same of row `g + 8`.
///
/// Items come together for it as for [`shuffle`](crate::shuffle). What those that are not there would have in `a` and
/// `b` is zero. Sums are those of single precision, but a GPU adds up in an order of its own, with fewer bits: see
/// docs/KERNELS.md.
///
/// A tile of a product, with the right operand column by column:
///
/// ```ignore
/// let (row, pair) = (subgroup_lane() as usize / 4, subgroup_lane() as usize % 4);
/// let (upper, lower, column) = (a.add(row * words), a.add((row + 8) * words), b.add(row * words));
/// let (mut sums, mut at) = ([0.0; 4], pair);
/// while at < words {
///     let of_a = [*upper.add(at), *lower.add(at), *upper.add(at + 4), *lower.add(at + 4)];
///     sums = mma_f16(of_a, [*column.add(at), *column.add(at + 4)], sums);
///     at += 8;
/// }
/// ```
#[inline(always)]
pub fn mma_f16(a: [u32; 4], b: [u32; 2], sums: [f32; 4]) -> [f32; 4] {
    import::mma_f16_f32(a[0], a[1], a[2], a[3], b[0], b[1], sums[0], sums[1], sums[2], sums[3]);
    own_sums()
}

/// The same of bfloats.
#[inline(always)]
pub fn mma_bf16(a: [u32; 4], b: [u32; 2], sums: [f32; 4]) -> [f32; 4] {
    import::mma_bf16_f32(a[0], a[1], a[2], a[3], b[0], b[1], sums[0], sums[1], sums[2], sums[3]);
    own_sums()
}

/// What the item keeps of its last product. The compiler of kernels has to see constants here.
#[inline(always)]
fn own_sums() -> [f32; 4] {
    [import::mma_sum(0), import::mma_sum(1), import::mma_sum(2), import::mma_sum(3)]
}
