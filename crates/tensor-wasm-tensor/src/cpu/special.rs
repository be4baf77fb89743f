//! Operations that are kernels by themselves.
#![expect(unsafe_code, reason = "results are written where they belong, by several threads")]

use half::{bf16, f16};

use super::blas::{self, HasBlas};
use super::contract::{self, Contraction};
use super::execute::Buffers;
use super::fold::fold;
use super::gemm::{Finish, Matrix, Multiply, Product, multiply};
use super::memory::CpuBuffer;
use super::threads::parallel;
use super::walk::{CHUNK, Walk};
use crate::dtype::{DType, Element};
use crate::error::ErrorKind;
use crate::graph::op::Op;
use crate::schedule::plan::{Source, SpecialKernel};
use crate::shape::{AxisSet, Layout, Shape};

/// Calls a function with the type of elements.
macro_rules! with_type {
    ($dtype:expr, $f:ident $args:tt) => {
        match $dtype {
            DType::Bool | DType::U8 => $f::<u8> $args,
            DType::I32 => $f::<i32> $args,
            DType::I64 => $f::<i64> $args,
            DType::F16 => $f::<f16> $args,
            DType::BF16 => $f::<bf16> $args,
            DType::F32 => $f::<f32> $args,
            DType::F64 => $f::<f64> $args,
        }
    };
}

/// Whether a kernel can say which of its elements are there before all of them are.
pub(super) fn finishes(kernel: &SpecialKernel) -> bool {
    matches!(kernel.op, Op::Matmul) && matches!(kernel.dtype, DType::F32 | DType::F64)
}

/// Fills the kernel's slot. `finish` is told which elements are there, if it is a kernel that can say so.
pub(super) fn run(kernel: &SpecialKernel, buffers: &Buffers<'_>, finish: Option<&Finish<'_>>) -> Result<(), ErrorKind> {
    let mut inputs = Vec::with_capacity(kernel.inputs.len());
    for view in &kernel.inputs {
        inputs.push(Input { buffer: buffers.view(view)?, layout: view.layout });
    }
    let dtype = kernel.inputs.first().map_or(kernel.dtype, |view| view.dtype);
    let made = buffers.get(Source::Slot(kernel.slot))?;
    let run = Special { inputs, shape: kernel.shape, to: Output(made.as_ptr()) };
    match &kernel.op {
        Op::Matmul => match dtype {
            DType::F32 => return fast_matmul::<f32>(&run, finish),
            DType::F64 => return fast_matmul::<f64>(&run, finish),
            _ => with_type!(dtype, matmul(&run)),
        },
        Op::Contract { summed } => match dtype {
            DType::F32 => return fast_contract::<f32>(&run, *summed),
            DType::F64 => return fast_contract::<f64>(&run, *summed),
            _ => with_type!(dtype, contract_plainly(&run, *summed)),
        },
        Op::ArgReduce { axis, largest } => with_type!(dtype, arg_reduce(&run, *axis, *largest)),
        Op::Cumsum { axis, is_reverse } => with_type!(dtype, cumsum(&run, *axis, *is_reverse)),
        Op::ArgSort { axis, is_descending } => with_type!(dtype, arg_sort(&run, *axis, *is_descending)),
        Op::Gather { axis } => return with_type!(dtype, gather(&run, *axis)),
        Op::ScatterAdd { axis, size } => return with_type!(dtype, scatter_add(&run, *axis, *size)),
        Op::Place(corners) => with_type!(dtype, place(&run, corners)),
        Op::Fold { last, before } => with_type!(dtype, fold(&run, *last, *before)),
        op => return Err(ErrorKind::Bug { why: format!("{} is no kernel", op.name()) }),
    }
    Ok(())
}

pub(super) struct Special<'r> {
    pub(super) inputs: Vec<Input<'r>>,
    pub(super) shape: Shape,
    pub(super) to: Output,
}

pub(super) struct Input<'r> {
    buffer: &'r CpuBuffer,
    pub(super) layout: Layout,
}

/// The result, of which each thread writes elements of its own.
#[derive(Clone, Copy)]
pub(super) struct Output(pub(super) *mut u8);

// SAFETY: as it says.
unsafe impl Send for Output {}
// SAFETY: as it says.
unsafe impl Sync for Output {}

impl Output {
    fn write<T: Element>(self, at: usize, value: T) {
        // SAFETY: callers stay below the number of elements of the result's shape, which it has room for.
        unsafe { self.0.cast::<T>().add(at).write(value) };
    }

    /// Makes elements zero.
    pub(super) fn clear<T: Element>(self, at: usize, count: usize) {
        // SAFETY: as above; and every type's zero is zeros.
        unsafe { self.0.cast::<T>().add(at).write_bytes(0, count) };
    }

    /// Copies `count` elements to places that are `step` apart; `from` says of which buffer, from where on, how far
    /// apart.
    fn copy<T: Element>(self, at: isize, step: isize, from: (&[T], isize, isize), count: usize) {
        let (elements, first, from_step) = from;
        // SAFETY: callers stay inside of the result's shape.
        let to = unsafe { self.0.cast::<T>().offset(at) };
        if step == 1 && from_step == 1 {
            let from = &elements[first.unsigned_abs()..][..count];
            // SAFETY: as above, and what is read is no part of the result.
            unsafe { to.copy_from_nonoverlapping(from.as_ptr(), count) };
            return;
        }
        for n in 0..signed(count) {
            // SAFETY: as above; the layout that is read was checked to stay inside of its buffer.
            unsafe { to.offset(n * step).write(*elements.as_ptr().offset(first + n * from_step)) };
        }
    }

    /// Adds to what was written before.
    pub(super) fn add<T: Number>(self, at: isize, step: isize, from: (&[T], isize, isize), count: usize) {
        let (elements, first, from_step) = from;
        // SAFETY: callers stay inside of the result's shape.
        let to = unsafe { self.0.cast::<T>().offset(at) };
        if step == 1 && from_step == 1 {
            // SAFETY: as above, it was written before, and nobody else has this part of the result.
            let to = unsafe { std::slice::from_raw_parts_mut(to, count) };
            let from = &elements[first.unsigned_abs()..][..count];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = to.plus(*from));
            return;
        }
        for n in 0..signed(count) {
            // SAFETY: as above; the layout that is read was checked to stay inside of its buffer.
            unsafe {
                let to = to.offset(n * step);
                to.write(to.read().plus(*elements.as_ptr().offset(first + n * from_step)));
            }
        }
    }
}

/// Elements that can be computed with here: in double precision, or as the widest integer.
pub(super) trait Number: Element + PartialOrd {
    fn plus(self, other: Self) -> Self;
    fn times_into(self, other: Self, sum: &mut f64, whole: &mut i64);
    fn of(sum: f64, whole: i64) -> Self;
    fn is_nan(self) -> bool;
}

macro_rules! numbers {
    (floats: $($float:ident)*; halves: $($half:ident)*; integers: $($int:ident)*) => {
        $(impl Number for $float {
            fn plus(self, other: $float) -> $float { self + other }
            #[inline]
            fn times_into(self, other: $float, sum: &mut f64, _: &mut i64) { *sum += f64::from(self) * f64::from(other); }
            #[allow(clippy::cast_possible_truncation, reason = "the result is rounded once; for f64 nothing is")]
            fn of(sum: f64, _: i64) -> $float { sum as $float }
            fn is_nan(self) -> bool { $float::is_nan(self) }
        })*
        $(impl Number for $half {
            fn plus(self, other: $half) -> $half { $half::from_f32(self.to_f32() + other.to_f32()) }
            #[inline]
            fn times_into(self, other: $half, sum: &mut f64, _: &mut i64) { *sum += self.to_f64() * other.to_f64(); }
            fn of(sum: f64, _: i64) -> $half { $half::from_f64(sum) }
            fn is_nan(self) -> bool { $half::is_nan(self) }
        })*
        $(impl Number for $int {
            fn plus(self, other: $int) -> $int { self.wrapping_add(other) }
            #[inline]
            fn times_into(self, other: $int, _: &mut f64, whole: &mut i64) {
                *whole = whole.wrapping_add(i64::from(self).wrapping_mul(i64::from(other)));
            }
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "integers wrap; i64 does not need to")]
            fn of(_: f64, whole: i64) -> $int { whole as $int }
            fn is_nan(self) -> bool { false }
        })*
    };
}

numbers! { floats: f32 f64; halves: f16 bf16; integers: u8 i32 i64 }

impl Input<'_> {
    pub(super) fn elements<T: Element>(&self) -> &[T] {
        self.buffer.elements::<T>()
    }
}

/// The position of the element with a number, counted in row-major order.
pub(super) fn position(layout: &Layout, shape: &Shape, mut number: usize) -> usize {
    let mut position = layout.offset;
    for axis in (0..shape.rank()).rev() {
        position += signed(number % shape[axis]) * layout.strides()[axis];
        number /= shape[axis];
    }
    position.unsigned_abs()
}

fn signed(size: usize) -> isize {
    isize::try_from(size).unwrap_or(isize::MAX)
}

/// A number of an element as an element.
fn index_of(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Lines along an axis: calls with the number of each line's first element in the result, and its position in the
/// input.
fn each_line(shape: &Shape, axis: usize, layout: &Layout, work: &(dyn Fn(usize, usize) + Sync)) {
    if shape.numel() == 0 || layout.shape.numel() == 0 {
        return;
    }
    let inner: usize = shape[axis + 1..].iter().product();
    let lines: usize = shape[..axis].iter().product::<usize>() * inner;
    let chunk = (CHUNK / shape[axis].max(1)).max(1);
    let line_shape = shape.with(axis, 1);
    parallel(lines.div_ceil(chunk), &|n| {
        for line in n * chunk..((n + 1) * chunk).min(lines) {
            let first = line / inner * inner * shape[axis] + line % inner;
            work(first, position(layout, &line_shape, line));
        }
    });
}

/// Products of floats that there are kernels for.
fn fast_matmul<T: Number + HasBlas + From<u8>>(
    run: &Special<'_>,
    finish: Option<&Finish<'_>>,
) -> Result<(), ErrorKind> {
    let [a, b] = &run.inputs[..] else { return Ok(()) };
    let rank = run.shape.rank();
    let (m, n, k) = (run.shape[rank - 2], run.shape[rank - 1], a.layout.shape[rank - 1]);
    let batches: usize = run.shape[..rank - 2].iter().product();
    if batches == 0 || m == 0 || n == 0 {
        return Ok(());
    }
    let matrix = |input: &Input<'_>, batch: usize| {
        let heads = input.layout.shape.with(rank - 2, 1).with(rank - 1, 1);
        let (row, column) = (input.layout.strides()[rank - 2], input.layout.strides()[rank - 1]);
        let elements = input.elements::<T>();
        let at = if k == 0 { 0 } else { position(&input.layout, &heads, batch) };
        // The layout was checked to stay inside of the buffer.
        Matrix { start: elements.as_ptr().wrapping_add(at), row, column }
    };
    let product = |batch: usize| {
        let to = run.to.0.cast::<T>().wrapping_add(batch * m * n);
        let within = |start: usize, count: usize| finish.map_or((), |finish| finish(batch * m * n + start, count));
        let product = Product { m, n, k, left: matrix(a, batch), right: matrix(b, batch), to };
        if blas::multiply(&product) {
            within(0, m * n);
            return Ok(());
        }
        multiply(&product, finish.is_some().then_some(&within))
    };
    // Many products are shared by whole ones, few by their rows.
    if batches < 4 {
        return (0..batches).try_for_each(product);
    }
    let failed = parking_lot::Mutex::new(None);
    parallel(batches, &|batch| {
        if let Err(error) = product(batch) {
            *failed.lock() = Some(error);
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}

fn matmul<T: Number>(run: &Special<'_>) {
    let [a, b] = &run.inputs[..] else { return };
    let rank = run.shape.rank();
    let (m, n, k) = (run.shape[rank - 2], run.shape[rank - 1], a.layout.shape[rank - 1]);
    let batches: usize = run.shape[..rank - 2].iter().product();
    let (left, right) = (a.elements::<T>(), b.elements::<T>());
    let of = |layout: &Layout| (layout.strides()[rank - 2], layout.strides()[rank - 1]);
    let ((a_row, a_column), (b_row, b_column)) = (of(&a.layout), of(&b.layout));
    let heads = |layout: &Layout| layout.shape.with(rank - 2, 1).with(rank - 1, 1);
    let (a_heads, b_heads) = (heads(&a.layout), heads(&b.layout));
    let rows = (CHUNK / (n * k).max(1)).max(1);
    let chunks = m.div_ceil(rows);
    parallel(batches * chunks, &|item| {
        let (batch, first) = (item / chunks, item % chunks * rows);
        let a_start = signed(position(&a.layout, &a_heads, batch));
        let b_start = signed(position(&b.layout, &b_heads, batch));
        for row in first..(first + rows).min(m) {
            for column in 0..n {
                let (mut sum, mut whole) = (0.0, 0);
                for step in 0..k {
                    let x = left[(a_start + signed(row) * a_row + signed(step) * a_column).unsigned_abs()];
                    let y = right[(b_start + signed(step) * b_row + signed(column) * b_column).unsigned_abs()];
                    x.times_into(y, &mut sum, &mut whole);
                }
                run.to.write((batch * m + row) * n + column, T::of(sum, whole));
            }
        }
    });
}

fn fast_contract<T: Number + Multiply>(run: &Special<'_>, summed: AxisSet) -> Result<(), ErrorKind> {
    let [a, b] = &run.inputs[..] else { return Ok(()) };
    let contraction = Contraction::new(&a.layout, &b.layout, summed, &run.shape);
    let [left, right] = contraction.order().map(|n| {
        let input = &run.inputs[n];
        input.elements::<T>().as_ptr().wrapping_offset(input.layout.offset)
    });
    // SAFETY: layouts were checked to stay inside of their buffers, and the result has room for its shape.
    let done = unsafe { contract::contract(&contraction, left, right, run.to.0.cast::<T>()) }?;
    if !done {
        contract_plainly::<T>(run, summed);
    }
    Ok(())
}

fn contract_plainly<T: Number>(run: &Special<'_>, summed: AxisSet) {
    let [a, b] = &run.inputs[..] else { return };
    let contraction = Contraction::new(&a.layout, &b.layout, summed, &run.shape);
    let [left, right] = contraction.order().map(|n| &run.inputs[n]);
    let (left_elements, right_elements) = (left.elements::<T>(), right.elements::<T>());
    contraction.each(&|places, steps| {
        let (mut sum, mut whole) = (0.0, 0);
        let (x, y) = (left.layout.offset + places.left, right.layout.offset + places.right);
        for [left_step, right_step] in steps {
            let (x, y) = ((x + left_step).unsigned_abs(), (y + right_step).unsigned_abs());
            left_elements[x].times_into(right_elements[y], &mut sum, &mut whole);
        }
        run.to.write(places.to, T::of(sum, whole));
    });
}

fn arg_reduce<T: Number>(run: &Special<'_>, axis: usize, largest: bool) {
    let input = &run.inputs[0];
    let (elements, size, stride) = (input.elements::<T>(), input.layout.shape[axis], input.layout.strides()[axis]);
    each_line(&run.shape, axis, &input.layout, &|first, start| {
        let at = |n: usize| elements[(signed(start) + signed(n) * stride).unsigned_abs()];
        let mut best = 0;
        for n in 1..size {
            let (new, old) = (at(n), at(best));
            // The first NaN wins, as it does where extremes are asked for.
            let is_better = !old.is_nan() && (new.is_nan() || if largest { new > old } else { new < old });
            if is_better {
                best = n;
            }
        }
        run.to.write(first, index_of(best));
    });
}

fn cumsum<T: Number>(run: &Special<'_>, axis: usize, is_reverse: bool) {
    let input = &run.inputs[0];
    let (elements, size, stride) = (input.elements::<T>(), run.shape[axis], input.layout.strides()[axis]);
    let step: usize = run.shape[axis + 1..].iter().product();
    each_line(&run.shape, axis, &input.layout, &|first, start| {
        let (mut sum, mut whole) = (0.0, 0);
        let one = T::of(1.0, 1);
        for n in 0..size {
            let n = if is_reverse { size - 1 - n } else { n };
            elements[(signed(start) + signed(n) * stride).unsigned_abs()].times_into(one, &mut sum, &mut whole);
            run.to.write(first + n * step, T::of(sum, whole));
        }
    });
}

fn arg_sort<T: Number>(run: &Special<'_>, axis: usize, is_descending: bool) {
    let input = &run.inputs[0];
    let (elements, size, stride) = (input.elements::<T>(), run.shape[axis], input.layout.strides()[axis]);
    let step: usize = run.shape[axis + 1..].iter().product();
    each_line(&run.shape, axis, &input.layout, &|first, start| {
        let at = |n: &usize| elements[(signed(start) + signed(*n) * stride).unsigned_abs()];
        let mut order: Vec<usize> = (0..size).collect();
        // NaN is larger than everything.
        let compare = |a: T, b: T| a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()));
        order.sort_by(|a, b| if is_descending { compare(at(b), at(a)) } else { compare(at(a), at(b)) });
        order.iter().enumerate().for_each(|(n, index)| run.to.write(first + n * step, index_of(*index)));
    });
}

/// An index as it may be given, from the end too.
fn checked(index: i64, axis: usize, size: usize) -> Result<usize, ErrorKind> {
    let count = i64::try_from(size).unwrap_or(i64::MAX);
    let from_start = if index < 0 { index + count } else { index };
    match usize::try_from(from_start) {
        Ok(at) if at < size => Ok(at),
        _ => Err(ErrorKind::OutOfRange { index, axis, size }),
    }
}

/// Sizes of a shape's axes with the strides of layouts for them, the outermost first.
fn axes<const N: usize>(shape: &Shape, strides: [&[isize]; N]) -> impl Iterator<Item = (usize, [isize; N])> {
    shape.iter().enumerate().map(move |(axis, size)| (*size, strides.map(|strides| strides[axis])))
}

fn gather<T: Number>(run: &Special<'_>, axis: usize) -> Result<(), ErrorKind> {
    let [input, indices] = &run.inputs[..] else { return Ok(()) };
    let (elements, numbers) = (input.elements::<T>(), indices.elements::<i64>());
    let (size, stride) = (input.layout.shape[axis], input.layout.strides()[axis]);
    // The same axes as the result but for the one that is chosen from, where every line begins at its start.
    let lines = input.layout.slice(axis, 0, 0, run.shape[axis]);
    let strides = run.shape.strides();
    let start = [0, lines.offset, indices.layout.offset];
    let walk = Walk::new(start, axes(&run.shape, [&strides, lines.strides(), indices.layout.strides()]));
    let [to_step, line_step, index_step] = walk.steps();
    let failed = parking_lot::Mutex::new(None);
    walk.share(&|[to, line, index], count| {
        let chosen = |n: usize| checked(numbers[(index + signed(n) * index_step).unsigned_abs()], axis, size);
        // A row of a table has one index.
        let (each, many) = if index_step == 0 { (count, 1) } else { (1, count) };
        for n in 0..many {
            match chosen(n) {
                Ok(index) => {
                    let from = line + signed(n) * line_step + signed(index) * stride;
                    run.to.copy(to + signed(n) * to_step, to_step, (elements, from, line_step), each);
                }
                Err(error) => *failed.lock() = Some(error),
            }
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}

fn scatter_add<T: Number>(run: &Special<'_>, axis: usize, size: usize) -> Result<(), ErrorKind> {
    let [input, indices] = &run.inputs[..] else { return Ok(()) };
    let (elements, numbers) = (input.elements::<T>(), indices.elements::<i64>());
    run.to.clear::<T>(0, run.shape.numel());
    let mut strides = run.shape.strides();
    let stride = std::mem::take(&mut strides[axis]);
    let start = [0, input.layout.offset, indices.layout.offset];
    let shape = input.layout.shape;
    let walk = Walk::new(start, axes(&shape, [&strides, input.layout.strides(), indices.layout.strides()]));
    let ([to_step, from_step, index_step], count) = (walk.steps(), walk.len());
    // Sums of a place are in the order of its elements, so one thread adds them all.
    let mut failed = Ok(());
    let rows = if shape.numel() == 0 { 0 } else { walk.rows() };
    walk.each_row(0..rows, |[to, from, index]| {
        let chosen = |n: usize| checked(numbers[(index + signed(n) * index_step).unsigned_abs()], axis, size);
        let (each, many) = if index_step == 0 { (count, 1) } else { (1, count) };
        for n in 0..many {
            match chosen(n) {
                Ok(index) => {
                    let (to, from) = (to + signed(n) * to_step, from + signed(n) * from_step);
                    let to = to + signed(index) * stride;
                    run.to.add(to, to_step, (elements, from, from_step), each);
                }
                Err(error) => failed = Err(error),
            }
        }
    });
    failed
}

fn place<T: Number>(run: &Special<'_>, corners: &[[usize; crate::shape::RANK_MAX]]) {
    let covered: usize = run.inputs.iter().map(|input| input.layout.shape.numel()).sum();
    if covered != run.shape.numel() {
        run.to.clear::<T>(0, run.shape.numel());
    }
    let strides = run.shape.strides();
    for (input, corner) in run.inputs.iter().zip(corners) {
        let (elements, shape) = (input.elements::<T>(), input.layout.shape);
        let start: isize = corner.iter().zip(strides).take(shape.rank()).map(|(at, stride)| signed(*at) * stride).sum();
        let walk = Walk::new([start, input.layout.offset], axes(&shape, [&strides, input.layout.strides()]));
        let [to_step, from_step] = walk.steps();
        walk.share(&|[to, from], count| {
            run.to.copy(to, to_step, (elements, from, from_step), count);
        });
    }
}
