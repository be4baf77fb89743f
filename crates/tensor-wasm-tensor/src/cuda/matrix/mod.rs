//! Matrix products, on tensor cores where there are some for the type. A group of items computes a tile of the result,
//! in registers; the operands' tiles come to shared memory by asynchronous copies (`operand.rs`) ahead of what is
//! multiplied. Every device that has what it takes multiplies by warps (`warps.rs`), a Hopper by warpgroups, whose
//! tensor cores read shared memory themselves (`warpgroups.rs`). Single precision has no tensor cores unless somebody
//! asks for tf32 (`single.rs`), nor have products that are too small for tiles of that size (`small.rs`). What follows
//! the product is computed on its elements before they are stored (`store.rs`).

mod operand;
mod single;
mod small;
mod store;
#[cfg(test)]
pub(super) mod tests;
mod warpgroups;
mod warps;

use tensor_wasm_jit::build::{Axis, BinaryOp as B, BuildError, IdKind, KernelBuilder, Value, Variable};
use tensor_wasm_jit::{MatrixElement, Target};

pub(super) use self::operand::{Operand, clamped, pack};
use super::index::{self, Indices, scaled, times};
use super::map::{Epilogue, LoweredStep};
use super::numbers::Built;
use super::tile::Side;
use crate::dtype::DType;
use crate::graph::op::Op;
use crate::schedule::plan::{BufferView, Level, MapKernel, MapValue, Source, SpecialKernel, ValueKind};
use crate::shape::{AxisSet, Layout};

/// Rows of tiles that are computed before the next column: what they read stays in the second-level cache.
const GROUPED_ROWS: usize = 8;

/// Multiplications from which on it pays to copy an operand first, or to compute a whole tile; fewer in tests, which
/// run them one by one.
const WORK_MIN: usize = if cfg!(test) { 1 << 10 } else { 1 << 18 };

/// What multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Units {
    TensorCores(MatrixElement),
    /// Those for single precision.
    Single,
}

/// The product with what follows it, or why it has no such kernel. The product itself is stored where somebody else
/// needs it, or nothing follows.
pub(super) fn lower(
    kernel: &SpecialKernel,
    is_product_needed: bool,
    target: Target,
) -> Result<Built<LoweredStep>, &'static str> {
    let (Op::Matmul, [left, right]) = (&kernel.op, &kernel.inputs[..]) else { return Err("it is no product") };
    let units = match kernel.dtype {
        DType::F16 => Units::TensorCores(MatrixElement::F16),
        DType::BF16 => Units::TensorCores(MatrixElement::BF16),
        DType::F32 if super::is_tf32() && target >= Target::Ampere => Units::TensorCores(MatrixElement::Tf32),
        DType::F32 => Units::Single,
        DType::F64 | DType::Bool | DType::U8 | DType::I32 | DType::I64 => {
            return Err("tensor cores do not have its type");
        }
    };
    if units != Units::Single && target < Target::Ampere {
        return Err("the device's tensor cores are too old");
    }
    let (m, n) = sizes(kernel);
    let k = left.layout.shape[kernel.shape.rank() - 1];
    let work = [m, n, k].into_iter().try_fold(batches(kernel), usize::checked_mul).unwrap_or(usize::MAX);
    let is_small = units == Units::Single && small::pays(kernel);
    if work < WORK_MIN && !is_small {
        return Err("it is too small for large tiles");
    }
    let after = match &kernel.epilogue {
        Some(after) => with_product(kernel, after, is_product_needed),
        None => with_product(kernel, &nothing_after(kernel), true),
    };
    if is_small {
        return Ok(small::lower(kernel, &after, target));
    }
    Ok(build(units, kernel, &[left, right], &after, target))
}

/// Whether a product is so small that a kernel of our own is quicker than a library's, and computes what follows.
pub(super) fn is_small(kernel: &SpecialKernel) -> bool {
    matches!(kernel.op, Op::Matmul) && small::pays(kernel)
}

/// Rows and columns of the result.
fn sizes(kernel: &SpecialKernel) -> (usize, usize) {
    let rank = kernel.shape.rank();
    (kernel.shape[rank - 2], kernel.shape[rank - 1])
}

fn batches(kernel: &SpecialKernel) -> usize {
    kernel.shape[..kernel.shape.rank() - 2].iter().product()
}

/// The kernels of the step: operands that have to be copied, and the product.
fn build(
    units: Units,
    kernel: &SpecialKernel,
    views: &[&BufferView; 2],
    after: &MapKernel,
    target: Target,
) -> Built<LoweredStep> {
    // Only pairs of bytes can be transposed on the way to a tensor core.
    let allows_turned = units != Units::TensorCores(MatrixElement::Tf32);
    let is_whole = |operand: &Operand| units != Units::Single || single::is_whole(operand);
    let mut step = LoweredStep::default();
    let mut operands = Vec::new();
    for (view, side) in views.iter().zip([Side::Left, Side::Right]) {
        if let Some(operand) = Operand::of(view, side, allows_turned).filter(is_whole) {
            operands.push(operand);
            continue;
        }
        let (operand, bytes) = Operand::packed(view, side, allows_turned, step.scratch_bytes.len());
        if bytes > u64::from(u32::MAX) {
            return Err(BuildError::Structure { what: "a copy of a product's operand has more than 4 GiB" });
        }
        step.kernels.push(pack(view, &operand)?);
        step.scratch_bytes.push(bytes);
        operands.push(operand);
    }
    let (m, columns) = sizes(kernel);
    let lanes = 1 << columns.trailing_zeros().min(3);
    let is_large = target == Target::Hopper && warpgroups::pays(m, columns, batches(kernel));
    let items = match units {
        Units::Single => single::ITEMS,
        Units::TensorCores(_) if is_large => warpgroups::ITEMS,
        Units::TensorCores(_) => warps::ITEMS,
    };
    let arguments = operands.iter().map(|operand| operand.argument).collect();
    let epilogue = Epilogue::new(after, kernel.slot, lanes, items, arguments, target)?;
    let product = Product { kernel, operands, epilogue, lanes };
    step.kernels.push(match units {
        Units::Single => single::build(product)?,
        Units::TensorCores(element) if is_large => warpgroups::build(product, element)?,
        Units::TensorCores(element) => warps::build(product, element)?,
    });
    Ok(step)
}

/// Whether our own kernel is as quick as a device's library, so that what follows a product is better computed in it
/// than by another pass over memory. On an H200, 4096² of bf16: 214 µs here, 216 by cuBLASLt (`cores`).
pub(super) fn is_quick(kernel: &SpecialKernel, target: Target) -> bool {
    let (m, n) = sizes(kernel);
    let is_half = matches!(kernel.dtype, DType::F16 | DType::BF16);
    let is_aligned = kernel.inputs.iter().zip([Side::Left, Side::Right]);
    is_half
        && target == Target::Hopper
        && warpgroups::pays(m, n, batches(kernel))
        && is_aligned.into_iter().all(|(view, side)| Operand::of(view, side, true).is_some())
}

/// An expression of the product's elements that stores nothing.
fn nothing_after(kernel: &SpecialKernel) -> MapKernel {
    MapKernel {
        space: kernel.shape,
        reduced: AxisSet::default(),
        loads: Vec::new(),
        values: Vec::new(),
        stores: Vec::new(),
        in_place: Vec::new(),
        node: kernel.node,
    }
}

/// What follows, which stores the product too where it has to.
fn with_product(kernel: &SpecialKernel, after: &MapKernel, is_stored: bool) -> MapKernel {
    let mut after = after.clone();
    if is_stored {
        let layout = Layout::contiguous(after.space);
        after.loads.push(BufferView { source: Source::Slot(kernel.slot), layout, dtype: kernel.dtype });
        let kind = ValueKind::Load(after.loads.len() - 1);
        after.values.push(MapValue { kind, dtype: kernel.dtype, level: Level::Full });
        after.stores.push((after.values.len() - 1, kernel.slot));
    }
    after
}

/// A product that is being built.
struct Product<'k> {
    kernel: &'k SpecialKernel,
    operands: Vec<Operand>,
    epilogue: Epilogue<'k>,
    /// Elements that are stored at once.
    lanes: usize,
}

/// Where a group's tile begins, and in which matrix.
struct TilePosition {
    batch: Value,
    row: Value,
    column: Value,
}

impl Product<'_> {
    /// Which tile of so many rows and columns is the group's: some rows of tiles are gone through column by column. And
    /// how many groups there are.
    fn position(&mut self, rows: u32, columns: u32) -> Built<(TilePosition, u32)> {
        let (m, n) = sizes(self.kernel);
        let (row_tiles, column_tiles) = (m.div_ceil(rows as usize), n.div_ceil(columns as usize));
        let grouped = GROUPED_ROWS.min(row_tiles);
        let padded = row_tiles.next_multiple_of(grouped);
        let b = self.epilogue.builder();
        let mut indices = Indices::default();
        let group = b.id(IdKind::Group, Axis::X)?;
        let (batch, tile) = indices.divide(b, group, index::small(padded * column_tiles))?;
        let (block, within) = indices.divide(b, tile, index::small(grouped * column_tiles))?;
        let (column, row) = indices.divide(b, within, index::small(grouped))?;
        let first = times(b, block, grouped.cast_signed())?;
        let row = b.binary(B::I32Add, row, first)?;
        if padded != row_tiles {
            // Tiles that are only there to make the last rows as many as the others.
            let end = b.i32(index::small(row_tiles).cast_signed())?;
            let is_beyond = b.binary(B::I32GeU, row, end)?;
            b.begin_if(is_beyond, &[])?;
            b.finish_item()?;
            b.end()?;
        }
        let (row, column) = (scaled(b, row, rows)?, scaled(b, column, columns)?);
        Ok((TilePosition { batch, row, column }, index::small(batches(self.kernel) * padded * column_tiles)))
    }

    /// The windows of both operands.
    fn windows(&self) -> Built<[Value; 2]> {
        Ok([self.epilogue.window(self.operands[0].argument)?, self.epilogue.window(self.operands[1].argument)?])
    }
}

pub(super) fn four(b: &mut KernelBuilder, value: Value) -> Built<[Variable; 4]> {
    Ok([b.variable(value)?, b.variable(value)?, b.variable(value)?, b.variable(value)?])
}

/// Where a stage begins in shared memory; the variable goes on to the next, and from the last to the first.
fn next_stage(b: &mut KernelBuilder, shared: Value, stage: Variable, bytes: u32, count: u32) -> Built<Value> {
    let (now, more) = (b.get(stage)?, b.i32(bytes.cast_signed())?);
    let (end, first) = (b.i32((count * bytes).cast_signed())?, b.i32(0)?);
    let next = b.binary(B::I32Add, now, more)?;
    let is_end = b.binary(B::I32Eq, next, end)?;
    let next = b.select(is_end, first, next)?;
    b.set(stage, next)?;
    b.binary(B::I32Add, shared, now)
}
