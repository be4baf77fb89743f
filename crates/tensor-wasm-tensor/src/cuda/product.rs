//! Matrix products by the device's library: which it can do, and what it is told of them.

use tensor_wasm_gpu::{Product, ProductElement, ProductEpilogue, ProductOperand};

use super::map::{Argument, LoweredKernel, Program};
use crate::dtype::DType;
use crate::graph::op::{BinaryOp, Op};
use crate::schedule::plan::{BufferView, MapKernel, Source, SpecialKernel, ValueKind};
use crate::shape::Layout;

/// What a library may use beside the operands, on a device that has a stream for all plans: as much as the makers
/// recommend for the largest products.
pub(super) const WORKSPACE_BYTES: u64 = 32 << 20;

/// Buffers begin at multiples of this.
const BUFFER_ALIGNMENT: u64 = 256;

/// A product as the library does it, with what follows it if that is a bias and nobody else wants to know the product.
/// None where the types are not its own, or matrices lie neither by rows nor by columns.
pub(super) fn of(kernel: &SpecialKernel, is_product_needed: bool) -> Option<LoweredKernel> {
    let (Op::Matmul, [left, right]) = (&kernel.op, &kernel.inputs[..]) else { return None };
    let element = match kernel.dtype {
        DType::F16 => ProductElement::F16,
        DType::BF16 => ProductElement::BF16,
        DType::F32 if super::is_tf32() => ProductElement::Tf32,
        DType::F32 => ProductElement::F32,
        DType::F64 => ProductElement::F64,
        DType::Bool | DType::U8 | DType::I32 | DType::I64 => return None,
    };
    let rank = kernel.shape.rank();
    let (rows, columns, depth) = (kernel.shape[rank - 2], kernel.shape[rank - 1], left.layout.shape[rank - 1]);
    let batches: usize = kernel.shape[..rank - 2].iter().product();
    if rows == 0 || columns == 0 || depth == 0 || batches == 0 {
        return None;
    }
    let (left_operand, right_operand) = (operand(left)?, operand(right)?);
    let (mut rows, mut batches) = (rows as u64, batches as u64);
    // The same matrix for all of them, and rows that go on from one to the next: one product of all rows.
    let goes_on = !left_operand.is_by_columns && left_operand.batch_stride == rows * left_operand.stride;
    if batches > 1 && right_operand.batch_stride == 0 && goes_on {
        (rows, batches) = (rows * batches, 1);
    }
    let bias = kernel.epilogue.as_ref().filter(|_| !is_product_needed).and_then(|after| bias(kernel, after));
    let product = Product {
        element,
        rows,
        columns: columns as u64,
        depth: depth as u64,
        batches,
        left: left_operand,
        right: right_operand,
        has_bias: bias.is_some(),
        epilogue: ProductEpilogue::None,
        workspace_bytes: WORKSPACE_BYTES,
    };
    let part = |view: &BufferView| Argument::Part(view.source, view.layout.offset.unsigned_abs() * view.dtype.size());
    let (bias, slot) = bias.map_or((Argument::Workspace, kernel.slot), |(view, slot)| (part(view), slot));
    let arguments = vec![part(left), part(right), Argument::Buffer(Source::Slot(slot)), bias, Argument::Workspace];
    Product::from_image(&product.to_image())?;
    Some(LoweredKernel { program: Program::Product(product), groups: 1, items: 1, arguments })
}

/// How a matrix lies, or many of them; none if in no way that a library knows.
fn operand(view: &BufferView) -> Option<ProductOperand> {
    let layout = &view.layout;
    let rank = layout.shape.rank();
    let (rows, columns) = (layout.shape[rank - 2], layout.shape[rank - 1]);
    let apart =
        |stride: isize, least: usize| u64::try_from(stride).ok().filter(|stride| *stride >= least.max(1) as u64);
    let (row, column) = (layout.strides()[rank - 2], layout.strides()[rank - 1]);
    // Along an axis of one element nothing is stepped over.
    let (is_by_columns, stride) = if column == 1 || columns == 1 {
        (false, if rows == 1 { columns as u64 } else { apart(row, columns)? })
    } else if row == 1 || rows == 1 {
        (true, apart(column, rows)?)
    } else {
        return None;
    };
    let batch_stride = u64::try_from(batch_stride(layout)?).ok()?;
    let offset = u64::try_from(layout.offset).ok()?.checked_mul(view.dtype.size() as u64)?;
    let alignment = if offset == 0 { BUFFER_ALIGNMENT } else { 1 << offset.trailing_zeros().min(8) };
    Some(ProductOperand { is_by_columns, stride, batch_stride, alignment })
}

/// From one matrix to the next, if that is always as far.
fn batch_stride(layout: &Layout) -> Option<isize> {
    let heads = layout.shape.rank() - 2;
    let mut apart = None;
    let mut count = 1_isize;
    for axis in (0..heads).rev() {
        let (size, stride) = (layout.shape[axis], layout.strides()[axis]);
        if size == 1 {
            continue;
        }
        match apart {
            None => apart = Some(stride),
            Some(first) if stride == first * count => {}
            Some(_) => return None,
        }
        count = count.checked_mul(size.cast_signed())?;
    }
    Some(apart.unwrap_or(0))
}

/// The bias and the slot of the sum, if that is what follows a product: one number for each of its columns, of its own
/// type.
fn bias<'a>(kernel: &SpecialKernel, after: &'a MapKernel) -> Option<(&'a BufferView, usize)> {
    let [(stored, slot)] = after.stores[..] else { return None };
    let ValueKind::Binary(BinaryOp::Add, a, b) = after.values.get(stored)?.kind else { return None };
    // Of values that nobody uses there may be more.
    let columns = kernel.shape[kernel.shape.rank() - 1];
    let is_by_columns = after.space.numel() == kernel.shape.numel() && after.space.last() == Some(&columns);
    if !is_by_columns || after.values.iter().any(|value| value.dtype != kernel.dtype) {
        return None;
    }
    let loaded = |value: usize| match after.values.get(value)?.kind {
        ValueKind::Load(load) => after.loads.get(load),
        _ => None,
    };
    let (a, b) = (loaded(a)?, loaded(b)?);
    let is_product = |view: &BufferView| view.source == Source::Slot(kernel.slot) && view.layout.is_contiguous();
    let bias = if is_product(a) { b } else { a };
    let last = after.space.rank() - 1;
    let is_for_columns = bias
        .layout
        .strides()
        .iter()
        .enumerate()
        .all(|(axis, stride)| *stride == isize::from(axis == last) || after.space[axis] == 1);
    let is_one = is_product(a) != is_product(b);
    // The library reads as many at once as it likes, from a multiple of 16 bytes on.
    let is_aligned = usize::try_from(bias.layout.offset).ok()?.wrapping_mul(bias.dtype.size()).is_multiple_of(16);
    (is_one && is_for_columns && is_aligned && bias.dtype == kernel.dtype).then_some((bias, slot))
}
