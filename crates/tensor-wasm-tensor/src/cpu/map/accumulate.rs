//! Reductions over any axes whose results are stored and not used again. What is summed up in which order depends on
//! nothing but the shape, so results do not depend on how many threads there are.
#![expect(unsafe_code, reason = "threads write parts of the same results, each its own")]

use super::super::memory::CpuBuffer;
use super::super::tile::{self, Class, TileArgs, TileOp};
use super::run::{Part, Run};
use super::{Accumulate, CHUNK};
use crate::dtype::DType;
use crate::error::ErrorKind;
use crate::graph::op::ReduceOp;

/// Partial results of a long reduction are kept for pieces of this many elements, however many threads there are.
const PIECE: usize = 64 << 10;

/// Sums of columns are summed up in groups of this many rows first, which keeps rounding errors small.
const GROUP_ROWS: usize = 64;

/// Elements that are summed up in their own precision at most, 64 sums side by side.
const SUM_MAX: usize = 8 << 10;

/// Short rows that are summed up at once at most. They are as far apart as a row is long, and where that is a power of
/// two they share one set of the first-level cache: with 32 rows of 4 KiB, sums of columns took half as long again.
const ROWS_MAX: usize = 4;

/// Columns that are summed up side by side at most: their sums stay in the first-level cache. Rows of no more are read
/// from their beginning to their end, which is how memory is fetched ahead.
const COLUMNS_MAX: usize = 4 << 10;

impl Run<'_> {
    /// Reductions whose results are stored and not used again.
    pub(super) fn accumulate(&self, accumulate: &Accumulate) -> Result<(), ErrorKind> {
        let Accumulate { kept, reduced, inner, is_inner_reduced, .. } = accumulate;
        let outer_kept: usize = kept.iter().map(|(size, _)| size).product();
        let outer_reduced: usize = reduced.iter().map(|(size, _)| size).product();
        if *is_inner_reduced {
            self.accumulate_rows(accumulate, outer_kept, outer_reduced, *inner)
        } else {
            self.accumulate_columns(accumulate, outer_kept, outer_reduced, *inner)
        }
    }

    /// Each result is of elements that lie together, in one stretch or several.
    fn accumulate_rows(
        &self,
        accumulate: &Accumulate,
        rows: usize,
        stretches: usize,
        inner: usize,
    ) -> Result<(), ErrorKind> {
        let tile = self.program.tile(inner).min(SUM_MAX);
        // Long stretches are cut, at places that depend on nothing but their length.
        let pieces = inner.div_ceil(PIECE).max(1);
        let count = accumulate.results.len();
        let items = rows * pieces;
        let bytes = if pieces == 1 { 0 } else { items * count * 8 };
        let partial = CpuBuffer::uninitialized(bytes).ok_or(ErrorKind::OutOfMemory { bytes })?;
        let partials = SharedResults(partial.as_ptr());
        let at_once = (CHUNK / (inner.min(PIECE) * stretches).max(1)).max(1);
        let work = |n: usize| {
            let start: Vec<Total> = accumulate.results.iter().map(|(op, dtype, ..)| Total::new(*op, *dtype)).collect();
            let mut totals = start.clone();
            self.with_tiles(tile, 1, |tiles| {
                for item in n * at_once..((n + 1) * at_once).min(items) {
                    let (row, piece) = (item / pieces, item % pieces);
                    totals.clone_from(&start);
                    let base = position(&accumulate.kept, row);
                    for stretch in 0..stretches {
                        let start = base + position(&accumulate.reduced, stretch);
                        let (mut at, end) = (start + piece * PIECE, start + ((piece + 1) * PIECE).min(inner));
                        while at < end {
                            let part = Part { start: at, count: tile.min(end - at), first_row: 0, rows: 0 };
                            self.part(tiles, part);
                            for (total, (op, dtype, from, _)) in totals.iter_mut().zip(&accumulate.results) {
                                let class = Class::of(*dtype);
                                let from = self.address(tiles, *from, at).cast_const();
                                let mut one = [0_u8; 8];
                                let to = one.as_mut_ptr();
                                let args = TileArgs { to, a: from, b: from, c: from, n: part.count, count: 1 };
                                // SAFETY: the operand has a part's elements, and `one` is room for any.
                                unsafe { tile::run(TileOp::Reduce(*op, class), &args) };
                                total.add(class, one);
                            }
                            at += tile;
                        }
                    }
                    for (n, total) in totals.iter().enumerate() {
                        if pieces == 1 {
                            self.write_total(accumulate, n, row, total);
                        } else {
                            partials.write(item * count + n, total.bits());
                        }
                    }
                }
            });
        };
        let chunks = items.div_ceil(at_once);
        self.share(rows * inner * stretches, chunks, &work);
        if pieces > 1 {
            let partials = partial.elements::<i64>();
            for row in 0..rows {
                for (n, (op, dtype, ..)) in accumulate.results.iter().enumerate() {
                    let mut total = Total::new(*op, *dtype);
                    (0..pieces).for_each(|piece| total.add_bits(partials[(row * pieces + piece) * count + n]));
                    self.write_total(accumulate, n, row, &total);
                }
            }
        }
        Ok(())
    }

    /// Results lie together: whole rows of them are added up.
    fn accumulate_columns(
        &self,
        accumulate: &Accumulate,
        outer: usize,
        steps: usize,
        columns: usize,
    ) -> Result<(), ErrorKind> {
        let tile = self.program.tile(columns).min(COLUMNS_MAX);
        let strips = columns.div_ceil(tile);
        let elements = outer * steps * columns;
        // With few columns, rows are cut into blocks that are summed up by themselves, as many as the shape says.
        let blocks = if outer * strips < 16 {
            (elements / (4 * PIECE)).clamp(1, 32).min(steps.div_ceil(GROUP_ROWS)).max(1)
        } else {
            1
        };
        let block = steps.div_ceil(blocks).max(1);
        // Short rows that lie one after the other are computed some at a time. As many divide a group.
        let is_close = strips == 1 && matches!(accumulate.reduced[..], [(_, stride)] if stride == columns);
        let fit = if is_close { (self.program.tile(CHUNK) / columns).min(block) } else { 1 };
        let at_once = 1 << fit.clamp(1, ROWS_MAX).ilog2();
        let count = accumulate.results.len();
        let bytes = if blocks == 1 { 0 } else { outer * columns * blocks * count * 8 };
        let partial = CpuBuffer::uninitialized(bytes).ok_or(ErrorKind::OutOfMemory { bytes })?;
        let partials = SharedResults(partial.as_ptr());
        let items = outer * strips * blocks;
        let work = |item: usize| {
            let (rest, strip) = (item / strips, item % strips);
            let (block_number, row) = (rest % blocks, rest / blocks);
            let first = strip * tile;
            let width = tile.min(columns - first);
            let base = position(&accumulate.kept, row) + first;
            self.with_tiles(tile.max(at_once * width), 1, |tiles| {
                let mut sums: Vec<Columns> =
                    accumulate.results.iter().map(|(op, dtype, ..)| Columns::new(*op, *dtype, width)).collect();
                let end = ((block_number + 1) * block).min(steps);
                for step in (block_number * block..end).step_by(at_once) {
                    let start = base + position(&accumulate.reduced, step);
                    let rows = at_once.min(end - step);
                    self.part(tiles, Part { start, count: rows * width, first_row: 0, rows: 0 });
                    for (sum, (.., from, _)) in sums.iter_mut().zip(&accumulate.results) {
                        sum.add(self.address(tiles, *from, start), rows);
                    }
                }
                for (n, sum) in sums.iter_mut().enumerate() {
                    sum.close_group();
                    for (column, bits) in sum.totals.iter().enumerate() {
                        let at = row * columns + first + column;
                        if blocks == 1 {
                            self.write_total(accumulate, n, at, &Total::of_bits(accumulate, n, *bits));
                        } else {
                            partials.write((block_number * outer * columns + at) * count + n, *bits);
                        }
                    }
                }
            });
        };
        self.share(elements, items, &work);
        if blocks > 1 {
            let partials = partial.elements::<i64>();
            for at in 0..outer * columns {
                for (n, (op, dtype, ..)) in accumulate.results.iter().enumerate() {
                    let mut total = Total::new(*op, *dtype);
                    (0..blocks).for_each(|block| total.add_bits(partials[(block * outer * columns + at) * count + n]));
                    self.write_total(accumulate, n, at, &total);
                }
            }
        }
        Ok(())
    }

    /// Stores the `n`th reduction of a row.
    fn write_total(&self, accumulate: &Accumulate, n: usize, row: usize, total: &Total) {
        let (_, dtype, _, result) = accumulate.results[n];
        // SAFETY: the result has an element for each row.
        unsafe { total.write(dtype, self.results[result].add(row * self.sizes[result])) };
    }
}

/// A buffer of which every thread writes elements of its own.
struct SharedResults(*mut u8);

// SAFETY: as it says.
unsafe impl Sync for SharedResults {}

impl SharedResults {
    fn write(&self, at: usize, bits: i64) {
        // SAFETY: whoever made it has room for every item.
        unsafe { self.0.cast::<i64>().add(at).write(bits) };
    }
}

/// The position of an index that counts through axes, the last one fastest.
fn position(axes: &[(usize, usize)], mut index: usize) -> usize {
    let mut position = 0;
    for (size, stride) in axes.iter().rev() {
        position += index % size * stride;
        index /= size;
    }
    position
}

/// A reduction of many tiles. Floats are added up in double precision, whatever they are.
#[derive(Debug, Clone)]
struct Total {
    op: ReduceOp,
    is_float: bool,
    float: f64,
    int: i64,
}

impl Total {
    fn new(op: ReduceOp, dtype: DType) -> Total {
        let (float, int) = match op {
            ReduceOp::Sum => (0.0, 0),
            ReduceOp::Prod => (1.0, 1),
            ReduceOp::Max => (f64::NEG_INFINITY, i64::MIN),
            ReduceOp::Min => (f64::INFINITY, i64::MAX),
        };
        Total { op, is_float: dtype.is_float(), float, int }
    }

    /// The total of the `n`th reduction that these are the bits of.
    fn of_bits(accumulate: &Accumulate, n: usize, bits: i64) -> Total {
        let (op, dtype, ..) = accumulate.results[n];
        Total { float: f64::from_bits(bits.cast_unsigned()), int: bits, ..Total::new(op, dtype) }
    }

    fn add(&mut self, class: Class, one: [u8; 8]) {
        let four = [one[0], one[1], one[2], one[3]];
        match class {
            Class::F32 => self.add_float(f64::from(f32::from_ne_bytes(four))),
            Class::F64 => self.add_float(f64::from_ne_bytes(one)),
            Class::I32 => self.add_int(i64::from(i32::from_ne_bytes(four))),
            Class::I64 => self.add_int(i64::from_ne_bytes(one)),
            Class::U8 => self.add_int(i64::from(one[0])),
        }
    }

    fn add_bits(&mut self, bits: i64) {
        if self.is_float { self.add_float(f64::from_bits(bits.cast_unsigned())) } else { self.add_int(bits) }
    }

    fn add_float(&mut self, x: f64) {
        self.float = match self.op {
            ReduceOp::Sum => self.float + x,
            ReduceOp::Prod => self.float * x,
            ReduceOp::Max => {
                if x > self.float || x.is_nan() {
                    x
                } else {
                    self.float
                }
            }
            ReduceOp::Min => {
                if x < self.float || x.is_nan() {
                    x
                } else {
                    self.float
                }
            }
        };
    }

    fn add_int(&mut self, x: i64) {
        self.int = match self.op {
            ReduceOp::Sum => self.int.wrapping_add(x),
            ReduceOp::Prod => self.int.wrapping_mul(x),
            ReduceOp::Max => self.int.max(x),
            ReduceOp::Min => self.int.min(x),
        };
    }

    fn bits(&self) -> i64 {
        if self.is_float { self.float.to_bits().cast_signed() } else { self.int }
    }

    /// Writes it as an element.
    ///
    /// # Safety
    ///
    /// There is room for an element.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is as large as an element of its class, which it is made from"
    )]
    unsafe fn write(&self, dtype: DType, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            match dtype {
                DType::F16 => to.cast::<half::f16>().write_unaligned(half::f16::from_f64(self.float)),
                DType::BF16 => to.cast::<half::bf16>().write_unaligned(half::bf16::from_f64(self.float)),
                DType::F32 => to.cast::<f32>().write_unaligned(self.float as f32),
                DType::F64 => to.cast::<f64>().write_unaligned(self.float),
                DType::I32 => to.cast::<i32>().write_unaligned(self.int as i32),
                DType::I64 => to.cast::<i64>().write_unaligned(self.int),
                DType::U8 | DType::Bool => to.write(self.int as u8),
            }
        }
    }
}

/// Reductions of columns that lie together: in groups first, then the groups, as widely as totals are.
struct Columns {
    op: ReduceOp,
    class: Class,
    /// The elements of one group, in room for any.
    group: Vec<u64>,
    totals: Vec<i64>,
    rows: usize,
}

impl Columns {
    fn new(op: ReduceOp, dtype: DType, width: usize) -> Columns {
        let totals = vec![Total::new(op, dtype).bits(); width];
        Columns { op, class: Class::of(dtype), group: vec![0; width], totals, rows: 0 }
    }

    fn run(op: TileOp, to: *mut u8, a: *const u8, n: usize, count: usize) {
        let args = TileArgs { to, a, b: a, c: a, n, count };
        // SAFETY: rows have as many elements as the group and the totals have room for.
        unsafe { tile::run(op, &args) };
    }

    /// Adds rows that lie one after the other, no more than are missing in the group.
    fn add(&mut self, rows: *const u8, count: usize) {
        let (to, n) = (self.group.as_mut_ptr().cast::<u8>(), self.totals.len());
        // The first row is what the group begins with.
        let first = usize::from(self.rows == 0);
        if first == 1 {
            Columns::run(TileOp::Copy(self.class), to, rows, n, 1);
        }
        let rest = rows.wrapping_add(first * n * self.class.size());
        Columns::run(TileOp::Accumulate(self.op, self.class), to, rest, n, count - first);
        self.rows += count;
        if self.rows >= GROUP_ROWS {
            self.close_group();
        }
    }

    fn close_group(&mut self) {
        if self.rows > 0 {
            let (to, n) = (self.totals.as_mut_ptr().cast::<u8>(), self.totals.len());
            Columns::run(TileOp::AccumulateWide(self.op, self.class), to, self.group.as_ptr().cast(), n, 1);
            self.rows = 0;
        }
    }
}
