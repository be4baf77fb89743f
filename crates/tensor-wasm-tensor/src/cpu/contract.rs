//! Sums of products over any axes of two tensors: a convolution, and what its gradients are. They are products of
//! matrices whose rows, columns and steps are counted through several axes, so nothing is copied into the form of a
//! matrix first (im2col): elements are gathered while they are packed, from wherever their axes say.
//!
//! A block of the result is computed by one thread, which packs what it needs of both operands, so blocks know nothing
//! of each other. How the result is cut, and long sums are, depends on nothing but the shapes.
#![expect(unsafe_code, reason = "threads write parts of one result; packed elements are read by vector instructions")]

use std::cell::RefCell;

use super::gemm::{Multiply, SLACK, Sliver, tile_product};
use super::memory::CpuBuffer;
use super::threads::parallel;
use crate::error::ErrorKind;
use crate::shape::{AxisSet, Layout, RANK_MAX, Shape};

/// Steps that are packed at once.
const DEPTH: usize = 256;

/// Rows and columns of a block: both operands' parts and the block itself stay in a second-level cache of 2 MiB.
const ROWS: usize = 448;
const COLUMNS: usize = 256;
const COLUMNS_MAX: usize = 512;

/// Below this many blocks, sums are cut into parts that are computed apart from each other.
const BLOCKS: usize = 16;

/// Steps of such a part at least.
const PART_MIN: usize = 512;

/// Products that are worth a thread.
const WORK_MIN: usize = 2 * 64 * 64 * 64;

/// Axes that are counted through together, the last one fastest: sizes, and strides of some tensors.
#[derive(Debug, Default)]
struct Axes<const N: usize>(Vec<(usize, [isize; N])>);

impl<const N: usize> Axes<N> {
    fn count(&self) -> usize {
        self.0.iter().map(|(size, _)| size).product()
    }

    /// Writes where some indices are in one of the tensors.
    fn positions(&self, tensor: usize, indices: std::ops::Range<usize>, to: &mut Vec<i32>) {
        to.clear();
        let Some(((inner, strides), outer)) = self.0.split_last() else {
            return to.extend(indices.map(|_| 0));
        };
        // Divided once, then counted: rows of an image are short.
        let (mut rest, mut within) = (indices.start / inner, indices.start % inner);
        let mut index = [0; RANK_MAX];
        for (axis, (size, _)) in outer.iter().enumerate().rev() {
            (index[axis], rest) = (rest % size, rest / size);
        }
        let mut left = indices.len();
        while left > 0 {
            let places = outer.iter().zip(index).map(|((_, strides), along)| signed(along) * strides[tensor]);
            let row: isize = places.sum();
            let count = (inner - within).min(left);
            #[expect(clippy::cast_possible_truncation, reason = "`is_near` has seen that all of them fit")]
            to.extend((within..within + count).map(|n| (row + signed(n) * strides[tensor]) as i32));
            (left, within) = (left - count, 0);
            for (axis, (size, _)) in outer.iter().enumerate().rev() {
                index[axis] += 1;
                if index[axis] < *size {
                    break;
                }
                index[axis] = 0;
            }
        }
    }

    /// How many lie one after the other in one of the tensors, from each multiple of as many on.
    fn run(&self, tensor: usize) -> usize {
        let inner = self.0.iter().rev();
        inner
            .fold((1, true), |(run, goes_on), (size, strides)| {
                let goes_on = goes_on && strides[tensor] == signed(run);
                (if goes_on { run * size } else { run }, goes_on)
            })
            .0
    }

    /// How far each is from the one before in one of the tensors, if that is the same for all.
    fn step(&self, tensor: usize) -> Option<usize> {
        let [(_, strides)] = &self.0[..] else { return None };
        usize::try_from(strides[tensor]).ok()
    }

    /// How far from the first element the others are, in both directions.
    fn reach(&self, tensor: usize) -> isize {
        self.0.iter().map(|(size, strides)| signed(size - 1).saturating_mul(strides[tensor].saturating_abs())).sum()
    }
}

/// Which axes are which: strides are those of the left and the right operand and of the result, where they have any.
#[derive(Debug, Default)]
pub(super) struct Contraction {
    batch: Axes<3>,
    rows: Axes<2>,
    columns: Axes<2>,
    steps: Axes<2>,
    /// Whether the left operand is the second one.
    is_swapped: bool,
}

impl Contraction {
    /// Of two operands of as many axes, each of size 1 along those that it does not know.
    pub(super) fn new(a: &Layout, b: &Layout, summed: AxisSet, result: &Shape) -> Contraction {
        let mut contraction = Contraction::default();
        let strides = result.strides();
        for (axis, to) in strides.into_iter().enumerate().take(result.rank()) {
            let (in_a, in_b) = (a.shape[axis] != 1, b.shape[axis] != 1);
            let stride = |layout: &Layout, is_known: bool| if is_known { layout.strides()[axis] } else { 0 };
            let (left, right) = (stride(a, in_a), stride(b, in_b));
            let size = if in_a { a.shape[axis] } else { b.shape[axis] };
            match (summed.contains(axis), in_a, in_b) {
                (_, false, false) => {}
                (true, ..) => contraction.steps.0.push((size, [left, right])),
                (false, true, true) => contraction.batch.0.push((size, [left, right, to])),
                (false, true, false) => contraction.rows.0.push((size, [left, to])),
                (false, false, true) => contraction.columns.0.push((size, [right, to])),
            }
        }
        // Packing is quick along columns, so there are more of them; or else they lie together in the result.
        let (rows, columns) = (contraction.rows.count(), contraction.columns.count());
        let lies = |axes: &Axes<2>| axes.0.last().is_some_and(|(_, [_, to])| *to == 1);
        if rows > columns || rows == columns && lies(&contraction.rows) {
            std::mem::swap(&mut contraction.rows, &mut contraction.columns);
            contraction.batch.0.iter_mut().for_each(|(_, strides)| strides.swap(0, 1));
            contraction.steps.0.iter_mut().for_each(|(_, strides)| strides.swap(0, 1));
            contraction.is_swapped = true;
        }
        contraction
    }

    /// Whether all distances in a matrix fit into 32 bits, so that they can be tables of what vectors gather.
    fn is_near(&self) -> bool {
        let reach = [
            self.rows.reach(0).saturating_add(self.steps.reach(0)),
            self.columns.reach(0).saturating_add(self.steps.reach(1)),
        ];
        reach.into_iter().all(|reach| reach < isize::try_from(i32::MAX / 2).unwrap_or(0))
    }

    /// Both operands' numbers, the left one first.
    pub(super) fn order(&self) -> [usize; 2] {
        if self.is_swapped { [1, 0] } else { [0, 1] }
    }

    /// Calls for each element of the result: with where it is and its first operands are, and with how far from there
    /// the operands of all products are.
    pub(super) fn each(&self, work: &(dyn Fn(Places, &[[isize; 2]]) + Sync)) {
        let counts = [self.batch.count(), self.rows.count(), self.columns.count()];
        let steps: Vec<[isize; 2]> = (0..self.steps.count()).map(|step| at(&self.steps.0, step)).collect();
        let lines = counts[0] * counts[1];
        let pieces = counts[2].div_ceil(COLUMNS);
        parallel(lines * pieces, &|item| {
            let (line, first) = (item / pieces, item % pieces * COLUMNS);
            let batch = at(&self.batch.0, line / counts[1]);
            let row = at(&self.rows.0, line % counts[1]);
            for column in first..(first + COLUMNS).min(counts[2]) {
                let column = at(&self.columns.0, column);
                let to = (batch[2] + row[1] + column[1]).unsigned_abs();
                work(Places { to, left: batch[0] + row[0], right: batch[1] + column[0] }, &steps);
            }
        });
    }
}

/// Where an element of the result is, and its first operands.
pub(super) struct Places {
    pub to: usize,
    pub left: isize,
    pub right: isize,
}

/// The positions of one index.
fn at<const N: usize>(axes: &[(usize, [isize; N])], mut index: usize) -> [isize; N] {
    let mut position = [0; N];
    for (size, strides) in axes.iter().rev() {
        let along = signed(index % size);
        (0..N).for_each(|n| position[n] += along * strides[n]);
        index /= size;
    }
    position
}

fn signed(size: usize) -> isize {
    isize::try_from(size).unwrap_or(isize::MAX)
}

/// How the work is cut.
struct Cut {
    /// Rows and columns of a block, and steps of a part.
    rows: usize,
    columns: usize,
    steps: usize,
    row_blocks: usize,
    column_blocks: usize,
    parts: usize,
}

impl Cut {
    fn new(batch: usize, m: usize, n: usize, k: usize) -> Cut {
        let rows = m.div_ceil(m.div_ceil(ROWS));
        let row_blocks = m.div_ceil(rows);
        let blocks = |columns: usize| batch * row_blocks * n.div_ceil(columns);
        let (columns, parts) = if blocks(COLUMNS) >= BLOCKS {
            (COLUMNS, 1)
        } else {
            (COLUMNS_MAX, BLOCKS.div_ceil(blocks(COLUMNS_MAX)).min(k / PART_MIN).max(1))
        };
        let columns = columns.min(n);
        let steps = k.div_ceil(parts).next_multiple_of(DEPTH);
        Cut { rows, columns, steps, row_blocks, column_blocks: n.div_ceil(columns), parts: k.div_ceil(steps) }
    }
}

/// A result that threads write parts of.
struct Shared<T>(*mut T);

// SAFETY: as it says.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn at(&self, offset: isize) -> *mut T {
        self.0.wrapping_offset(offset)
    }
}

/// What is read by several threads.
struct Operand<T>(*const T);

// SAFETY: as it says.
unsafe impl<T> Sync for Operand<T> {}

impl<T> Operand<T> {
    fn from(&self, offset: isize) -> *const T {
        self.0.wrapping_offset(offset)
    }
}

thread_local! {
    /// What a thread packs, and the sums of its block: at most as much as the constants above say.
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch::new()) };
}

/// Room for blocks, one after the other.
struct Scratch {
    elements: Vec<u64>,
    left_rows: Vec<i32>,
    left_steps: Vec<i32>,
    right_columns: Vec<i32>,
    right_steps: Vec<i32>,
}

impl Scratch {
    const fn new() -> Scratch {
        Scratch {
            elements: Vec::new(),
            left_rows: Vec::new(),
            left_steps: Vec::new(),
            right_columns: Vec::new(),
            right_steps: Vec::new(),
        }
    }
}

/// Computes a contraction. `left`, `right` and `to` are where the first elements are. Returns false if an operand is so
/// large that distances in it are not small numbers.
///
/// # Safety
///
/// The layouts that the contraction was made of stay inside of the operands, and the result has room for its shape.
pub(super) unsafe fn contract<T: Multiply>(
    contraction: &Contraction,
    left: *const T,
    right: *const T,
    to: *mut T,
) -> Result<bool, ErrorKind> {
    let (matrices, k) = (contraction.batch.count(), contraction.steps.count());
    let (m, n) = (contraction.rows.count(), contraction.columns.count());
    if matrices * m * n == 0 {
        return Ok(true);
    }
    let (left, right, to) = (Operand(left), Operand(right), Shared(to));
    if k == 0 {
        // SAFETY: the result has as many elements.
        unsafe { (0..matrices * m * n).for_each(|at| to.at(signed(at)).write(T::default())) };
        return Ok(true);
    }
    if !contraction.is_near() {
        return Ok(false);
    }
    let cut = Cut::new(matrices, m, n, k);
    let bytes = if cut.parts > 1 { matrices * m * n * cut.parts * size_of::<T>() } else { 0 };
    let partial = CpuBuffer::uninitialized(bytes).ok_or(ErrorKind::OutOfMemory { bytes })?;
    let partials = Shared(partial.as_ptr().cast::<T>());
    let blocks = matrices * cut.row_blocks * cut.column_blocks;
    let work = |item: usize| {
        let (block, part) = (item / cut.parts, item % cut.parts);
        let (rest, column) = (block / cut.column_blocks, block % cut.column_blocks * cut.columns);
        let (batch, row) = (rest / cut.row_blocks, rest % cut.row_blocks * cut.rows);
        let block = Block {
            contraction,
            start: at(&contraction.batch.0, batch),
            rows: row..(row + cut.rows).min(m),
            columns: column..(column + cut.columns).min(n),
            steps: part * cut.steps..((part + 1) * cut.steps).min(k),
        };
        if cut.parts == 1 {
            let at = |row: usize, column: usize| to.at(block.position(row, column));
            let to = Target { at, run: contraction.columns.run(1), step: contraction.rows.step(1) };
            // SAFETY: the caller's promise, and blocks do not overlap.
            unsafe { block.compute(&left, &right, &to) }
        } else {
            let first = signed((part * matrices + batch) * m * n);
            let at = |row: usize, column: usize| partials.at(first + signed(row * n + column));
            // SAFETY: the same; every part has room of its own.
            unsafe { block.compute(&left, &right, &Target { at, run: n, step: Some(n) }) }
        }
    };
    let items = blocks * cut.parts;
    if matrices * m * n * k < WORK_MIN {
        (0..items).for_each(work)
    } else {
        parallel(items, &work)
    }
    if cut.parts > 1 {
        parallel(matrices * m, &|line| {
            let (batch, row) = (line / m, line % m);
            let start = at(&contraction.batch.0, batch)[2] + at(&contraction.rows.0, row)[1];
            for column in 0..n {
                let mut sum = T::default();
                for part in 0..cut.parts {
                    let from = signed(((part * matrices + batch) * m + row) * n + column);
                    // SAFETY: it was written above.
                    sum = T::plus(sum, unsafe { *partials.at(from) });
                }
                let position = start + at(&contraction.columns.0, column)[1];
                // SAFETY: the result has such an element, and nobody else writes it.
                unsafe { to.at(position).write(sum) };
            }
        });
    }
    Ok(true)
}

/// Where a block goes.
struct Target<F> {
    /// Where the element of a row and column is.
    at: F,
    /// Columns that lie one after the other, from each multiple of as many on.
    run: usize,
    /// How far rows are apart, if that is the same for all.
    step: Option<usize>,
}

/// A part of the result, or of the sums that make it.
struct Block<'c> {
    contraction: &'c Contraction,
    /// Where its matrices begin in the left and right operand and in the result.
    start: [isize; 3],
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
    steps: std::ops::Range<usize>,
}

impl Block<'_> {
    fn position(&self, row: usize, column: usize) -> isize {
        self.start[2] + at(&self.contraction.rows.0, row)[1] + at(&self.contraction.columns.0, column)[1]
    }

    /// Computes it, and writes it to where `to` says that elements are.
    ///
    /// # Safety
    ///
    /// Positions are inside of the operands and of the result, of which nobody else writes these elements.
    unsafe fn compute<T: Multiply>(
        &self,
        left: &Operand<T>,
        right: &Operand<T>,
        to: &Target<impl Fn(usize, usize) -> *mut T>,
    ) {
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: the caller's promise.
            unsafe { self.compute_in(scratch, left, right, to) };
        });
    }

    /// The same in room that is there.
    ///
    /// # Safety
    ///
    /// As for [`Block::compute`].
    unsafe fn compute_in<T: Multiply>(
        &self,
        scratch: &mut Scratch,
        left: &Operand<T>,
        right: &Operand<T>,
        to: &Target<impl Fn(usize, usize) -> *mut T>,
    ) {
        let Scratch { elements, left_rows, left_steps, right_columns, right_steps } = scratch;
        let Contraction { rows, columns, steps, .. } = self.contraction;
        rows.positions(0, self.rows.clone(), left_rows);
        columns.positions(0, self.columns.clone(), right_columns);
        let steps_of = steps;
        let tile = T::tile();
        let (height, width) = (self.rows.len(), self.columns.len());
        // As many rows in each sliver: kernels of few rows wait for their own sums.
        let each = height.div_ceil(height.div_ceil(tile.width));
        let slivers = height.div_ceil(each);
        let strips = width.div_ceil(tile.columns);
        let padded = strips * tile.columns;
        let depth = DEPTH.min(self.steps.len());
        let (left_count, right_count) = (slivers * tile.width * depth + SLACK, tile.columns * depth + SLACK);
        let count = left_count + right_count + height * padded;
        elements.resize((count * size_of::<T>()).div_ceil(size_of::<u64>()).max(elements.len()), 0);
        let packed_left = elements.as_mut_ptr().cast::<T>();
        let packed_right = packed_left.wrapping_add(left_count);
        let sums = packed_right.wrapping_add(right_count);
        let columns_of = |strip: usize| {
            let first = self.columns.start + strip * tile.columns;
            first..(first + tile.columns).min(self.columns.end)
        };
        // A tile goes to the result at once if it is whole there, and lies in rows.
        let direct = |strip: usize| {
            let columns = columns_of(strip);
            let is_whole = columns.len() == tile.columns && columns.start / to.run == (columns.end - 1) / to.run;
            to.step.filter(|_| is_whole)
        };
        for first in self.steps.clone().step_by(depth) {
            let steps = first..(first + depth).min(self.steps.end);
            let count = steps.len();
            steps_of.positions(0, steps.clone(), left_steps);
            steps_of.positions(1, steps, right_steps);
            for sliver in 0..slivers {
                let rows = &left_rows[sliver * each..((sliver + 1) * each).min(height)];
                let (from, to) = (left.from(self.start[0]), packed_left.wrapping_add(sliver * tile.width * count));
                // SAFETY: the caller's promise, and there is room for the sliver.
                unsafe { T::pack_gathered(from, rows, left_steps, tile.width, to) };
            }
            for strip in 0..strips {
                let columns = &right_columns[strip * tile.columns..((strip + 1) * tile.columns).min(width)];
                let from = right.from(self.start[1]);
                // SAFETY: the caller's promise, and there is room for the strip.
                unsafe { T::pack_gathered(from, columns, right_steps, tile.columns, packed_right) };
                let (corner, to_stride) = match direct(strip) {
                    Some(step) => ((to.at)(self.rows.start, columns_of(strip).start), step),
                    None => (sums.wrapping_add(strip * tile.columns), padded),
                };
                for sliver in 0..slivers {
                    let row = sliver * each;
                    let product = Sliver {
                        steps: count,
                        left: packed_left.wrapping_add(sliver * tile.width * count).cast_const(),
                        right: packed_right.cast_const(),
                        right_stride: tile.columns,
                        to: corner.wrapping_add(row * to_stride),
                        to_stride,
                        adds: first > self.steps.start,
                    };
                    // SAFETY: both were packed, and there is room for whole strips of so many rows.
                    unsafe { tile_product(&tile, &product, each.min(height - row), tile.columns) };
                }
            }
        }
        for strip in (0..strips).filter(|strip| direct(*strip).is_none()) {
            let mut columns = columns_of(strip);
            while !columns.is_empty() {
                let count = (to.run - columns.start % to.run).min(columns.len());
                for row in 0..height {
                    let from = sums.wrapping_add(row * padded + columns.start - self.columns.start).cast_const();
                    let to = (to.at)(self.rows.start + row, columns.start);
                    // SAFETY: the sums were computed; the caller's promise.
                    unsafe { if count == 1 { to.write(*from) } else { to.copy_from_nonoverlapping(from, count) } }
                }
                columns.start += count;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::seq::SliceRandom;
    use rand::{Rng, SeedableRng};

    use crate::dtype::DType;
    use crate::shape::AxisSet;
    use crate::tensor::Tensor;

    /// A tensor of quarters, whose sums of products are exact, that lies in memory by chance.
    fn random(rng: &mut SmallRng, sizes: &[usize], dtype: DType) -> Tensor {
        // Larger along one axis, and with its axes in another order.
        let wide = rng.random_range(0..sizes.len());
        let mut larger = sizes.to_vec();
        larger[wide] = 2 * sizes[wide] + 1;
        let mut order: Vec<isize> = (0..sizes.len().cast_signed()).collect();
        order.shuffle(rng);
        let stored: Vec<usize> = order.iter().map(|axis| larger[axis.unsigned_abs()]).collect();
        let elements: Vec<f64> =
            (0..stored.iter().product()).map(|_| f64::from(rng.random_range(-8..9_i32)) / 4.0).collect();
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(to, from)| back[from.unsigned_abs()] = to.cast_signed());
        let stored = Tensor::from_vec(elements, &stored).cast(dtype);
        stored.realize().unwrap();
        let wide = wide.cast_signed();
        let tensor = stored.permute(&back);
        let tensor = match rng.random_range(0..3) {
            0 => tensor.slice(wide, Some(1), None, 2),
            1 => tensor.slice(wide, Some(-2), None, -2),
            _ => tensor.narrow(wide, 0, sizes[wide.unsigned_abs()]),
        };
        assert_eq!(tensor.shape()[..], *sizes);
        tensor
    }

    fn check(rng: &mut SmallRng, axes: &[(usize, [bool; 3])], dtype: DType) {
        let of = |which: usize| axes.iter().map(|(size, is)| if is[which] { *size } else { 1 }).collect::<Vec<_>>();
        let (a, b) = (random(rng, &of(0), dtype), random(rng, &of(1), dtype));
        let mut summed = AxisSet::default();
        axes.iter().enumerate().filter(|(_, (_, is))| is[2]).for_each(|(axis, _)| {
            summed.insert(axis);
        });
        let found = a.contract(&b, summed, std::panic::Location::caller());
        let (x, y) = (a.to_f64().unwrap(), b.to_f64().unwrap());
        let mut expected = vec![0.0; found.numel()];
        let count: usize = axes.iter().map(|(size, _)| size).product();
        for index in 0..count {
            let (mut rest, mut places, mut strides) = (index, [0; 3], [1; 3]);
            for (size, is) in axes.iter().rev() {
                let along = rest % size;
                rest /= size;
                for (n, is_known) in [is[0], is[1], !is[2] && (is[0] || is[1])].into_iter().enumerate() {
                    if is_known {
                        places[n] += along * strides[n];
                        strides[n] *= size;
                    }
                }
            }
            expected[places[2]] += x[places[0]] * y[places[1]];
        }
        let found = found.to_f64().unwrap();
        let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        assert_eq!(wrong, None, "{axes:?} of {dtype}: {:?}", wrong.map(|at| (found[at], expected[at])));
    }

    #[test]
    fn contractions_are_exact_however_operands_lie_and_work_is_cut() {
        let mut rng = SmallRng::seed_from_u64(5);
        let [row, column, step, batch] =
            [[true, false, false], [false, true, false], [true, true, true], [true, true, false]];
        // More rows than a block has, more columns, several parts of long sums; and everything at once.
        let mut cases: Vec<Vec<(usize, [bool; 3])>> = vec![
            vec![(460, row), (470, column), (3, step)],
            vec![(3, row), (700, column), (8, step)],
            vec![(5, row), (7, column), (2100, step)],
            vec![(40, row), (5, column), (5, column), (11, step), (120, step)],
            vec![(2, batch), (9, row), (33, column), (9, column), (300, step)],
            vec![(600, column), (20, row), (2, batch), (13, step)],
            // Summed up, and known to one of them alone.
            vec![(4, row), (5, column), (6, [true, false, true]), (7, [false, true, true])],
            vec![(0, step), (3, row), (4, column)],
            vec![(0, row), (3, step)],
        ];
        for _ in 0..60 {
            let kinds = [row, column, step, batch];
            let mut axes: Vec<_> =
                (0..rng.random_range(2..7)).map(|n| (rng.random_range(1..8), kinds[n % 4])).collect();
            axes.shuffle(&mut rng);
            cases.push(axes);
        }
        for (n, case) in cases.iter().enumerate() {
            check(&mut rng, case, DType::F32);
            check(&mut rng, case, DType::F64);
            if n >= 9 {
                check(&mut rng, case, DType::I32);
            }
        }
    }
}
