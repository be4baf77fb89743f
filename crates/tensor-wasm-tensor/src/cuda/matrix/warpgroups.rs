//! A product by warpgroups, on a Hopper: two of them compute a tile of 128 by 256 elements, 64 rows each. Tensor cores
//! read both operands from shared memory, by descriptors of how they lie there, and go on while the items copy.
//!
//! Of four tiles in shared memory one is multiplied, one may still be, and two are under way.

use tensor_wasm_jit::MatrixElement;
use tensor_wasm_jit::build::{BinaryOp as B, BuildError, KernelBuilder, UnaryOp as U, Value, Variable};

use super::super::index::{Indices, scaled, small};
use super::super::map::LoweredKernel;
use super::super::numbers::Built;
use super::super::tile::{CHUNK_BYTES, FRAGMENT, WARP, warp_and_lane};
use super::operand::{BLOCK_BYTES, Copies, CopyShape, Operand};
use super::store::StoreShape;
use super::{Product, next_stage};

/// Items of a group: two warpgroups.
pub(super) const ITEMS: u32 = 256;

/// Rows and columns of a group's tile; and rows of a warpgroup's.
const ROWS: u32 = 128;
const COLUMNS: u32 = 256;
const WARPGROUP_ROWS: u32 = 64;
const WARPS_PER_GROUP: u32 = 4;

/// Lines of 128 bytes, which is as much as is swizzled together.
const LEFT: CopyShape = CopyShape { items: ITEMS, along: ROWS, depth_bytes: BLOCK_BYTES, is_blocked: true };
const RIGHT: CopyShape = CopyShape { along: COLUMNS, ..LEFT };

/// Bytes of the depth that one instruction multiplies, and elements of halves.
const STEP_BYTES: u32 = 32;
const STEP: u32 = STEP_BYTES / 2;
const STEPS: u32 = BLOCK_BYTES / STEP_BYTES;

/// Stages of both operands' tiles: 192 KiB.
const STAGES: u32 = 4;
const LEFT_BYTES: u32 = ROWS * BLOCK_BYTES;
const STAGE_BYTES: u32 = (ROWS + COLUMNS) * BLOCK_BYTES;

/// Tiles that are under way when one is multiplied.
const AHEAD: u32 = STAGES - 2;

/// Bytes of eight lines: what is one swizzled block, and begins at a multiple of it.
const ATOM_BYTES: u32 = 8 * BLOCK_BYTES;

/// All of a warp's rows are stored at once.
const STORE: StoreShape = StoreShape { rows: FRAGMENT, columns: COLUMNS };
const _: () = assert!(ITEMS / WARP * STORE.warp_bytes() <= STAGES * STAGE_BYTES);

/// Tiles below which a device has more multiprocessors than work: smaller tiles are shared out better. Tests run them
/// one by one.
const TILES_MIN: usize = if cfg!(test) { 1 } else { 64 };

/// Whether it is the quicker way for such a product.
pub(super) fn pays(rows: usize, columns: usize, batches: usize) -> bool {
    batches * rows.div_ceil(ROWS as usize) * columns.div_ceil(COLUMNS as usize) >= TILES_MIN
}

pub(super) fn build(mut product: Product<'_>, element: MatrixElement) -> Built<LoweredKernel> {
    let windows = product.windows()?;
    product.epilogue.begin()?;
    let (tile, groups) = product.position(ROWS, COLUMNS)?;
    let b = product.epilogue.builder();
    let (warp, _) = warp_and_lane(b)?;
    let (warpgroup, in_group) = Indices::default().divide(b, warp, WARPS_PER_GROUP)?;
    let shared = b.shared_on_gpu(STAGES * STAGE_BYTES)?;
    let left = Copies::new(b, &product.operands[0], LEFT, (windows[0], tile.batch, tile.row))?;
    let right = Copies::new(b, &product.operands[1], RIGHT, (windows[1], tile.batch, tile.column))?;
    let operands = [&product.operands[0], &product.operands[1]];
    let tiles = small(operands[0].depth.div_ceil(LEFT.depth(operands[0]) as usize));
    let pipeline = Pipeline { element, shared, warpgroup, copies: [left, right], operands };
    let sums = pipeline.run(b, tiles)?;
    let rows = scaled(b, warpgroup, WARPGROUP_ROWS)?;
    let row = scaled(b, in_group, FRAGMENT)?;
    let row = b.binary(B::I32Add, row, rows)?;
    let column = b.i32(0)?;
    product.store_rows(STORE, &tile, shared, (row, column), &sums)?;
    product.epilogue.finish(groups)
}

struct Pipeline<'k> {
    element: MatrixElement,
    shared: Value,
    warpgroup: Value,
    copies: [Copies; 2],
    operands: [&'k Operand; 2],
}

impl Pipeline<'_> {
    /// Multiplies all tiles. The sums of each 16 by 8 elements of the warp.
    fn run(&self, b: &mut KernelBuilder, tiles: u32) -> Built<Vec<[Value; 4]>> {
        let sums = b.accumulators(COLUMNS / 2)?;
        let start = b.i32(0)?;
        let (write, read, depth) = (b.variable(start)?, b.variable(start)?, b.variable(start)?);
        for n in 0..AHEAD {
            if n < tiles {
                self.copy(b, write, depth)?;
            }
            b.commit_copies()?;
        }
        let carried = [write, read, depth, self.copies[0].from, self.copies[1].from];
        let rounds = b.i32(tiles.cast_signed())?;
        b.count_to::<BuildError>(rounds, &carried, |b, round| {
            b.await_copies(AHEAD - 1)?;
            // What this item has copied is seen by tensor cores; then what everybody has. Whoever is here has also
            // waited for the products of the tile before the last, whose place is free.
            b.fence_async()?;
            b.barrier()?;
            let ahead = b.i32(AHEAD.cast_signed())?;
            let next = b.binary(B::I32Add, round, ahead)?;
            let has_next = b.binary(B::I32LtU, next, rounds)?;
            b.begin_if(has_next, &[write, depth, self.copies[0].from, self.copies[1].from])?;
            self.copy(b, write, depth)?;
            b.end()?;
            b.commit_copies()?;
            let stage = next_stage(b, self.shared, read, STAGE_BYTES, STAGES)?;
            let shift = b.i32(LEFT_BYTES.cast_signed())?;
            let right = b.binary(B::I32Add, stage, shift)?;
            // The warpgroup's rows: as many bytes further, whichever way they lie.
            let rows = scaled(b, self.warpgroup, WARPGROUP_ROWS * BLOCK_BYTES)?;
            let left = b.binary(B::I32Add, stage, rows)?;
            let left = descriptor(b, left, self.operands[0], LEFT)?;
            let right = descriptor(b, right, self.operands[1], RIGHT)?;
            b.fence_multiply()?;
            for step in 0..STEPS {
                let (left, right) =
                    (advanced(b, left, self.operands[0], step)?, advanced(b, right, self.operands[1], step)?);
                let is_turned = self.operands.map(|operand| !operand.is_by_depth);
                b.multiply_shared(self.element, &sums, [left, right], is_turned)?;
            }
            b.commit_multiply()?;
            b.await_multiply(1)
        })?;
        b.await_multiply(0)?;
        let sums = b.sums(&sums)?;
        let fours = sums.chunks_exact(4).map(|four| [four[0], four[1], four[2], four[3]]);
        Ok(fours.collect())
    }

    /// Begins to copy the next tile of both operands.
    fn copy(&self, b: &mut KernelBuilder, write: Variable, depth: Variable) -> Built<()> {
        let stage = next_stage(b, self.shared, write, STAGE_BYTES, STAGES)?;
        let before = b.get(depth)?;
        for (copies, shift) in self.copies.iter().zip([0, LEFT_BYTES]) {
            let shift = b.i32(shift.cast_signed())?;
            let tile = b.binary(B::I32Add, stage, shift)?;
            copies.copy(b, tile, before)?;
        }
        let more = b.i32(LEFT.depth(self.operands[0]).cast_signed())?;
        let next = b.binary(B::I32Add, before, more)?;
        b.set(depth, next)
    }
}

/// Tells tensor cores where a tile begins and how it lies: in chunks, from bit 0 where it is, from bit 16 how far apart
/// blocks along the result are, from bit 32 how far apart eight lines are, and above that 128 bytes are swizzled.
fn descriptor(b: &mut KernelBuilder, at: Value, operand: &Operand, shape: CopyShape) -> Built<Value> {
    let chunks = |bytes: u32| i64::from(bytes / CHUNK_BYTES);
    // Along the depth there is one block.
    let blocks = if operand.is_by_depth { 1 } else { chunks(shape.block_bytes(operand)) };
    let lies = 1 << 62 | chunks(ATOM_BYTES) << 32 | blocks << 16;
    let address = b.shared_address(at)?;
    let shift = b.i32(CHUNK_BYTES.trailing_zeros().cast_signed())?;
    let chunk = b.binary(B::I32ShrU, address, shift)?;
    let (chunk, lies) = (b.unary(U::I64ExtendI32U, chunk)?, b.i64(lies)?);
    b.binary(B::I64Or, chunk, lies)
}

/// The same some steps of the depth further.
fn advanced(b: &mut KernelBuilder, descriptor: Value, operand: &Operand, step: u32) -> Built<Value> {
    let bytes = if operand.is_by_depth { STEP_BYTES } else { STEP * BLOCK_BYTES };
    let more = b.i64(i64::from(step * bytes / CHUNK_BYTES))?;
    b.binary(B::I64Add, descriptor, more)
}
