//! Operations that are kernels by themselves: each is right for every shape and type, and quick where it says so.

use tensor_wasm_jit::build::{Axis, BinaryOp as B, BuildError, IdKind, KernelBuilder, UnaryOp as U, Value, Variable};

use super::index::{Axes, Indices, count, small, sum, times};
use super::map::{Argument, GROUP, LoweredKernel, LoweredStep, OUT_OF_RANGE, Program, load_one, store_one};
use super::numbers::{Built, Class, Numbers, Registers};
use super::{attention, lines};
use crate::dtype::DType;
use crate::graph::op::{FoldedAxis, Op};
use crate::schedule::plan::{BufferView, Source, SpecialKernel};
use crate::shape::{AxisSet, Layout, RANK_MAX};

/// Lowers an operation that is a kernel by itself, without what follows it.
pub(super) fn lower(kernel: &SpecialKernel) -> Built<LoweredStep> {
    if kernel.shape.numel() == 0 {
        return Ok(LoweredStep::default());
    }
    let kernels = match &kernel.op {
        Op::Attention { is_causal } => return attention::lower(kernel, *is_causal),
        Op::AttentionRows { is_causal } => return attention::backward::rows(kernel, *is_causal),
        Op::AttentionGradient { is_causal, of } => return attention::backward::gradient(kernel, *is_causal, *of),
        Op::Matmul => vec![matmul(kernel)?],
        Op::Contract { summed } => vec![contract(kernel, *summed)?],
        Op::ArgReduce { axis, largest } => return lines::arg_reduce(kernel, *axis, *largest),
        Op::Cumsum { axis, is_reverse } => return lines::cumsum(kernel, *axis, *is_reverse),
        Op::ArgSort { axis, is_descending } => return lines::arg_sort(kernel, *axis, *is_descending),
        Op::Gather { axis } => vec![gather(kernel, *axis)?],
        Op::ScatterAdd { axis, size } => return lines::scatter_add(kernel, *axis, *size),
        Op::Place(corners) => place(kernel, corners)?,
        Op::Fold { last, before } => vec![fold(kernel, *last, *before)?],
        _ => return Err(BuildError::Structure { what: "an operation is no kernel by itself" }),
    };
    Ok(LoweredStep { kernels, scratch_bytes: Vec::new() })
}

/// The windows of a kernel that reads some views and writes a slot.
struct Given {
    inputs: Vec<Value>,
    to: Value,
    flags: Value,
}

/// A work item for each of so many numbers.
fn each(
    kernel: &SpecialKernel,
    inputs: &[BufferView],
    name: &str,
    count: usize,
    body: impl FnOnce(&mut KernelBuilder, &Given, Value) -> Built<()>,
) -> Built<LoweredKernel> {
    let mut b = KernelBuilder::new(name);
    let mut arguments: Vec<Argument> = inputs.iter().map(|view| Argument::Buffer(view.source)).collect();
    arguments.push(Argument::Buffer(Source::Slot(kernel.slot)));
    arguments.push(Argument::Flags);
    let mut windows: Vec<Value> = arguments.iter().map(|_| b.window()).collect::<Built<_>>()?;
    let missing = || BuildError::Structure { what: "a kernel has too few windows" };
    let flags = windows.pop().ok_or_else(missing)?;
    let to = windows.pop().ok_or_else(missing)?;
    let number = b.id(IdKind::Global, Axis::X)?;
    let end = b.i32(small(count).cast_signed())?;
    let is_one = b.binary(B::I32LtU, number, end)?;
    b.begin_if(is_one, &[])?;
    body(&mut b, &Given { inputs: windows, to, flags }, number)?;
    b.end()?;
    let groups = small(count.div_ceil(GROUP as usize));
    Ok(LoweredKernel { program: Program::Built(b.finish()?), groups, items: GROUP, arguments })
}

fn all(_: usize) -> bool {
    true
}

/// Loads the element at a place.
pub(super) fn load_at(b: &mut KernelBuilder, dtype: DType, window: Value, place: Value) -> Built<Value> {
    let address = b.element(window, place, small(dtype.size()))?;
    load_one(b, dtype, address, 0)
}

pub(super) fn store_at(b: &mut KernelBuilder, dtype: DType, value: Value, window: Value, place: Value) -> Built<()> {
    let address = b.element(window, place, small(dtype.size()))?;
    store_one(b, dtype, value, address, 0)
}

pub(super) fn number_of(b: &mut KernelBuilder, number: usize) -> Built<Value> {
    b.i32(small(number).cast_signed())
}

/// What sums of products are added up in.
fn wide(dtype: DType) -> (Class, DType) {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => (Class::F32, DType::F32),
        DType::F64 => (Class::F64, DType::F64),
        DType::Bool | DType::U8 | DType::I32 | DType::I64 => (Class::I64, DType::I64),
    }
}

fn multiply_add(b: &mut KernelBuilder, class: Class, x: Value, y: Value, sum: Value) -> Built<Value> {
    if matches!(class, Class::F32 | Class::F64) {
        return b.fma(x, y, sum);
    }
    let product = b.binary(B::I64Mul, x, y)?;
    b.binary(B::I64Add, sum, product)
}

// ---- products

/// Rows and columns of the tile that a group computes, and steps that it has in shared memory at once.
const TILE: usize = 64;
const DEPTH: usize = 16;

/// Rows and columns of a work item.
const EACH: usize = 4;

/// A tile of the result for each group of 16 by 16 items, each of which keeps 4 by 4 sums in registers.
fn matmul(kernel: &SpecialKernel) -> Built<LoweredKernel> {
    let [left, right] = &kernel.inputs[..] else {
        return Err(BuildError::Structure { what: "a product has two operands" });
    };
    let rank = kernel.shape.rank();
    let (m, n, k) = (kernel.shape[rank - 2], kernel.shape[rank - 1], left.layout.shape[rank - 1]);
    let batches: usize = kernel.shape[..rank - 2].iter().product();
    let (row_tiles, column_tiles) = (m.div_ceil(TILE), n.div_ceil(TILE));
    let (class, wide_type) = wide(kernel.dtype);
    let bytes = class.bytes();
    let mut b = KernelBuilder::new("matmul");
    let arguments = vec![
        Argument::Buffer(left.source),
        Argument::Buffer(right.source),
        Argument::Buffer(Source::Slot(kernel.slot)),
    ];
    let windows: Vec<Value> = arguments.iter().map(|_| b.window()).collect::<Built<_>>()?;
    let mut indices = Indices::default();
    let item = b.id(IdKind::Local, Axis::X)?;
    let group = b.id(IdKind::Group, Axis::X)?;
    let (batch, tile) = indices.divide(&mut b, group, small(row_tiles * column_tiles))?;
    let (tile_row, tile_column) = indices.divide(&mut b, tile, small(column_tiles))?;
    let (first_row, first_column) = (times(&mut b, tile_row, 64)?, times(&mut b, tile_column, 64)?);
    let tile_bytes = small(TILE * DEPTH) * bytes;
    let (left_tile, right_tile) = (b.shared(tile_bytes)?, b.shared(tile_bytes)?);
    let heads = |layout: &Layout| Axes::of(layout, |axis| axis < rank - 2);
    let starts = [(left, 0), (right, 1)].map(|(view, _)| {
        let place = indices.place(&mut b, &heads(&view.layout), batch)?;
        sum(&mut b, &[place], view.layout.offset)
    });
    let [left_start, right_start] = starts;
    let (left_start, right_start) = (left_start?, right_start?);
    let (in_row, in_column) = {
        let (row, column) = indices.divide(&mut b, item, small(TILE / EACH))?;
        (times(&mut b, row, 4)?, times(&mut b, column, 4)?)
    };
    let zero = Numbers { b: &mut b }.number(class, 0.0)?;
    let sums: Vec<Variable> = (0..EACH * EACH).map(|_| b.variable(zero)).collect::<Built<_>>()?;
    let steps = number_of(&mut b, k.div_ceil(DEPTH))?;
    b.count_to::<BuildError>(steps, &sums, |b, step| {
        let mut indices = Indices::default();
        let first_step = times(b, step, DEPTH.cast_signed())?;
        // Of the left tile an item has one step of four rows, of the right one four columns of one step.
        for part in 0..small(TILE * DEPTH) / GROUP {
            let shift = b.i32((part * GROUP).cast_signed())?;
            let number = b.binary(B::I32Add, item, shift)?;
            for (view, window, to, start, is_left) in
                [(left, windows[0], left_tile, left_start, true), (right, windows[1], right_tile, right_start, false)]
            {
                let strides = view.layout.strides();
                let (row_stride, column_stride) = (strides[rank - 2], strides[rank - 1]);
                // Neighbours take neighbouring elements, whichever way they lie.
                let is_by_step = is_left == (column_stride.unsigned_abs() <= row_stride.unsigned_abs());
                let (along, own_step) = if is_by_step {
                    let (along, step) = indices.divide(b, number, small(DEPTH))?;
                    (along, step)
                } else {
                    let (step, along) = indices.divide(b, number, small(TILE))?;
                    (along, step)
                };
                let tile_start = if is_left { first_row } else { first_column };
                let (at, at_step) =
                    (b.binary(B::I32Add, tile_start, along)?, b.binary(B::I32Add, first_step, own_step)?);
                let (end, step_end) = (number_of(b, if is_left { m } else { n })?, number_of(b, k)?);
                let is_inside = b.binary(B::I32LtU, at, end)?;
                let is_step = b.binary(B::I32LtU, at_step, step_end)?;
                let is_inside = b.binary(B::I32And, is_inside, is_step)?;
                let (row, column) = if is_left { (at, at_step) } else { (at_step, at) };
                let (row, column) = (times(b, row, row_stride)?, times(b, column, column_stride)?);
                let place = b.binary(B::I32Add, row, column)?;
                let place = b.binary(B::I32Add, place, start)?;
                // What is outside is nothing.
                let place = b.select(is_inside, place, start)?;
                let value = load_at(b, view.dtype, window, place)?;
                let value = Numbers { b: &mut *b }.cast(view.dtype, wide_type, value)?;
                let nothing = Numbers { b: &mut *b }.number(class, 0.0)?;
                let value = b.select(is_inside, value, nothing)?;
                let slot = times(b, own_step, TILE.cast_signed())?;
                let slot = b.binary(B::I32Add, slot, along)?;
                let address = b.element(to, slot, bytes)?;
                b.store(value, address, 0)?;
            }
        }
        b.barrier()?;
        let (left_at, right_at) = (b.element(left_tile, in_row, bytes)?, b.element(right_tile, in_column, bytes)?);
        let mut now: Vec<Value> = sums.iter().map(|sum| b.get(*sum)).collect::<Built<_>>()?;
        for step in 0..small(DEPTH) {
            let offset = step * small(TILE) * bytes;
            let (mut rows, mut columns) = (Vec::new(), Vec::new());
            for n in 0..small(EACH) {
                rows.push(b.load(class.ty(), left_at, offset + n * bytes)?);
            }
            for n in 0..small(EACH) {
                columns.push(b.load(class.ty(), right_at, offset + n * bytes)?);
            }
            for (n, sum) in now.iter_mut().enumerate() {
                *sum = multiply_add(b, class, rows[n / EACH], columns[n % EACH], *sum)?;
            }
        }
        for (variable, value) in sums.iter().zip(now) {
            b.set(*variable, value)?;
        }
        b.barrier()
    })?;
    let size = number_of(&mut b, n)?;
    let matrix = times(&mut b, batch, (m * n).cast_signed())?;
    let last_row = number_of(&mut b, m)?;
    for row in 0..EACH {
        let shift = number_of(&mut b, row)?;
        let at = b.binary(B::I32Add, first_row, in_row)?;
        let at = b.binary(B::I32Add, at, shift)?;
        let is_row = b.binary(B::I32LtU, at, last_row)?;
        let start = b.binary(B::I32Mul, at, size)?;
        let start = b.binary(B::I32Add, start, matrix)?;
        for column in 0..EACH {
            let shift = number_of(&mut b, column)?;
            let at = b.binary(B::I32Add, first_column, in_column)?;
            let at = b.binary(B::I32Add, at, shift)?;
            let is_column = b.binary(B::I32LtU, at, size)?;
            let is_inside = b.binary(B::I32And, is_row, is_column)?;
            let value = b.get(sums[row * EACH + column])?;
            let value = Numbers { b: &mut b }.cast(wide_type, kernel.dtype, value)?;
            let place = b.binary(B::I32Add, start, at)?;
            b.begin_if(is_inside, &[])?;
            store_at(&mut b, kernel.dtype, value, windows[2], place)?;
            b.end()?;
        }
    }
    let groups = small(batches * row_tiles * column_tiles);
    Ok(LoweredKernel { program: Program::Built(b.finish()?), groups, items: GROUP, arguments })
}

/// Sums of products over some axes: a work item for each element.
fn contract(kernel: &SpecialKernel, summed: AxisSet) -> Built<LoweredKernel> {
    let (class, wide_type) = wide(kernel.dtype);
    // Along an axis that one does not know, all of it is one element.
    let rank = kernel.shape.rank();
    let size = |axis: usize| kernel.inputs.iter().map(|view| view.layout.shape[axis]).max().unwrap_or(1);
    let whole = (0..rank).fold(kernel.shape, |shape, axis| shape.with(axis, size(axis)));
    let spread = |view: &BufferView| {
        let narrow = (0..rank).filter(|axis| view.layout.shape[*axis] == 1);
        let flat = narrow.fold(view.layout, |layout, axis| layout.slice(axis, 0, 1, 1));
        flat.expand(whole)
    };
    let layouts: Vec<Layout> = kernel.inputs.iter().map(spread).collect();
    let steps = count(whole, |axis| summed.contains(axis));
    each(kernel, &kernel.inputs, "contract", kernel.shape.numel(), |b, given, number| {
        let mut indices = Indices::default();
        let mut starts = Vec::new();
        for layout in &layouts {
            let kept = Axes::of(layout, |axis| !summed.contains(axis));
            let place = indices.place(b, &kept, number)?;
            starts.push(sum(b, &[place], layout.offset)?);
        }
        let zero = Numbers { b: &mut *b }.number(class, 0.0)?;
        let total = b.variable(zero)?;
        let count = number_of(b, steps)?;
        b.count_to::<BuildError>(count, &[total], |b, step| {
            let mut indices = Indices::default();
            let mut factors = Vec::new();
            for (n, layout) in layouts.iter().enumerate() {
                let along = Axes::of(layout, |axis| summed.contains(axis));
                let place = indices.place(b, &along, step)?;
                let place = sum(b, &[Some(starts[n]), place], 0)?;
                let dtype = kernel.inputs[n].dtype;
                let value = load_at(b, dtype, given.inputs[n], place)?;
                factors.push(Numbers { b: &mut *b }.cast(dtype, wide_type, value)?);
            }
            let before = b.get(total)?;
            let after = multiply_add(b, class, factors[0], factors[1], before)?;
            b.set(total, after)
        })?;
        let total = b.get(total)?;
        let total = Numbers { b: &mut *b }.cast(wide_type, kernel.dtype, total)?;
        store_at(b, kernel.dtype, total, given.to, number)
    })
}

// ---- elements that are chosen by indices

/// An index as it may be given, from the end too. One that is beyond is told, and is the first then.
pub(super) fn checked(
    b: &mut KernelBuilder,
    kernel: &SpecialKernel,
    flags: Value,
    index: Value,
    size: usize,
) -> Built<Value> {
    let (zero, count) = (b.i64(0)?, b.i64(i64::try_from(size).unwrap_or(i64::MAX))?);
    let from_end = b.binary(B::I64Add, index, count)?;
    let is_from_end = b.binary(B::I64LtS, index, zero)?;
    let at = b.select(is_from_end, from_end, index)?;
    let is_inside = b.binary(B::I64LtU, at, count)?;
    let is_outside = b.unary(U::I32Eqz, is_inside)?;
    b.begin_if(is_outside, &[])?;
    let (code, node) = (b.i32(OUT_OF_RANGE.cast_signed())?, number_of(b, kernel.node)?);
    b.store(index, flags, 8)?;
    b.store(node, flags, 4)?;
    b.store(code, flags, 0)?;
    b.end()?;
    let at = b.select(is_inside, at, zero)?;
    b.unary(U::I32WrapI64, at)
}

fn gather(kernel: &SpecialKernel, axis: usize) -> Built<LoweredKernel> {
    let [view, chosen] = &kernel.inputs[..] else {
        return Err(BuildError::Structure { what: "a gather has two operands" });
    };
    let (size, stride) = (view.layout.shape[axis], view.layout.strides()[axis]);
    // The same axes as the result but for the one that is chosen from, where every line begins at its start.
    let lines = view.layout.slice(axis, 0, 0, kernel.shape[axis]);
    each(kernel, &kernel.inputs, "gather", kernel.shape.numel(), |b, given, number| {
        let mut indices = Indices::default();
        let place = indices.place(b, &Axes::of(&chosen.layout, all), number)?;
        let place = sum(b, &[place], chosen.layout.offset)?;
        let index = load_at(b, DType::I64, given.inputs[1], place)?;
        let index = checked(b, kernel, given.flags, index, size)?;
        let start = indices.place(b, &Axes::of(&lines, all), number)?;
        let along = times(b, index, stride)?;
        let place = sum(b, &[start, Some(along)], lines.offset)?;
        let value = load_at(b, view.dtype, given.inputs[0], place)?;
        store_at(b, kernel.dtype, value, given.to, number)
    })
}

/// The sum and an element, rounded as often as it is on a CPU.
pub(super) fn add_element(b: &mut KernelBuilder, dtype: DType, sum: Value, element: Value) -> Built<Value> {
    let mut numbers = Numbers { b };
    let after = numbers.add(Class::of(dtype), sum, element)?;
    match dtype {
        DType::U8 => numbers.cast(DType::I32, dtype, after),
        DType::F16 | DType::BF16 => numbers.cast(DType::F32, dtype, after),
        DType::Bool | DType::I32 | DType::I64 | DType::F32 | DType::F64 => Ok(after),
    }
}

// ---- elements that are put somewhere else

/// Each input at its corner, and zeros where there is none.
fn place(kernel: &SpecialKernel, corners: &[[usize; RANK_MAX]]) -> Built<Vec<LoweredKernel>> {
    let covered: usize = kernel.inputs.iter().map(|view| view.layout.shape.numel()).sum();
    let mut kernels = Vec::new();
    if covered != kernel.shape.numel() {
        kernels.push(each(kernel, &[], "zeros", kernel.shape.numel(), |b, given, number| {
            let zero = Numbers { b: &mut *b }.number(Class::of(kernel.dtype), 0.0)?;
            store_at(b, kernel.dtype, zero, given.to, number)
        })?);
    }
    let strides = kernel.shape.strides();
    for (view, corner) in kernel.inputs.iter().zip(corners) {
        let shape = view.layout.shape;
        if shape.numel() == 0 {
            continue;
        }
        let start: isize =
            corner.iter().zip(strides).take(shape.rank()).map(|(at, stride)| at.cast_signed() * stride).sum();
        // The corner of the result as a view of it.
        let whole = Layout::contiguous(kernel.shape);
        let part = (0..shape.rank()).fold(whole, |layout, axis| layout.slice(axis, 0, 1, shape[axis]));
        kernels.push(each(kernel, std::slice::from_ref(view), "place", shape.numel(), |b, given, number| {
            let mut indices = Indices::default();
            let from = indices.place(b, &Axes::of(&view.layout, all), number)?;
            let from = sum(b, &[from], view.layout.offset)?;
            let value = load_at(b, view.dtype, given.inputs[0], from)?;
            let to = indices.place(b, &Axes::of(&part, all), number)?;
            let to = sum(b, &[to], start)?;
            store_at(b, kernel.dtype, value, given.to, to)
        })?);
    }
    Ok(kernels)
}

/// A work item for each element of the result adds up the windows that it is in.
fn fold(kernel: &SpecialKernel, last: FoldedAxis, before: Option<FoldedAxis>) -> Built<LoweredKernel> {
    let view = &kernel.inputs[0];
    let (shape, rank) = (view.layout.shape, view.layout.shape.rank());
    let class = Class::of(kernel.dtype);
    // The axis of the input that the elements of an axis's windows are.
    let folded: Vec<(FoldedAxis, usize)> =
        [before.map(|before| (before, rank - 2)), Some((last, rank - 1))].into_iter().flatten().collect();
    let strides = view.layout.strides();
    let steps: usize = folded.iter().map(|(_, window)| shape[*window]).product();
    each(kernel, &kernel.inputs, "fold", kernel.shape.numel(), |b, given, number| {
        let mut indices = Indices::default();
        let mut left = number;
        let mut at = vec![number; kernel.shape.rank()];
        for axis in (0..kernel.shape.rank()).rev() {
            (left, at[axis]) = indices.divide(b, left, small(kernel.shape[axis]))?;
        }
        let mut start = sum(b, &[], view.layout.offset)?;
        for (axis, index) in at.iter().enumerate() {
            if folded.iter().all(|(folded, _)| folded.axis != axis) {
                let place = times(b, *index, strides[axis])?;
                start = b.binary(B::I32Add, start, place)?;
            }
        }
        let zero = Numbers { b: &mut *b }.number(class, 0.0)?;
        let total = b.variable(zero)?;
        let count = number_of(b, steps)?;
        b.count_to::<BuildError>(count, &[total], |b, step| {
            let mut indices = Indices::default();
            let (mut left, mut place) = (step, start);
            let mut is_inside = b.i32(1)?;
            for (folded, window) in folded.iter().rev() {
                let (outer, within) = indices.divide(b, left, small(shape[*window]))?;
                left = outer;
                // The window that has this element as its `within`th begins so far before it.
                let back = times(b, within, folded.dilation.cast_signed())?;
                let is_after = b.binary(B::I32LeU, back, at[folded.axis])?;
                let from = b.binary(B::I32Sub, at[folded.axis], back)?;
                let none = b.i32(0)?;
                let from = b.select(is_after, from, none)?;
                let (window_number, rest) = indices.divide(b, from, small(folded.step))?;
                let is_start = b.unary(U::I32Eqz, rest)?;
                let windows = number_of(b, shape[folded.axis])?;
                let is_window = b.binary(B::I32LtU, window_number, windows)?;
                let is_own = b.binary(B::I32And, is_after, is_start)?;
                let is_own = b.binary(B::I32And, is_own, is_window)?;
                is_inside = b.binary(B::I32And, is_inside, is_own)?;
                let along = times(b, window_number, strides[folded.axis])?;
                place = b.binary(B::I32Add, place, along)?;
                let along = times(b, within, strides[*window])?;
                place = b.binary(B::I32Add, place, along)?;
            }
            b.begin_if(is_inside, &[total])?;
            let value = load_at(b, view.dtype, given.inputs[0], place)?;
            let before = b.get(total)?;
            let after = add_element(b, view.dtype, before, value)?;
            b.set(total, after)?;
            b.end()
        })?;
        let total = b.get(total)?;
        store_at(b, kernel.dtype, total, given.to, number)
    })
}
