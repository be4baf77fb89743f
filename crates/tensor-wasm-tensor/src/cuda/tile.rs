//! Tiles of matrices in shared memory, and the fragments of them that matrix instructions take.
//!
//! A tile has rows of 16-byte chunks. Which chunk is where in a row depends on the row (it is swizzled), so that the
//! eight rows of one column of chunks, which are loaded together, are in all 32 banks.

use tensor_wasm_jit::build::{Axis, BinaryOp as B, IdKind, KernelBuilder, Value};

use super::index::{scaled, times};
use super::numbers::Built;

/// What is copied, and swizzled, as a whole.
pub(super) const CHUNK_BYTES: u32 = 16;

/// Rows of a tile, or columns of it, that one load of fragments takes.
pub(super) const FRAGMENT: u32 = 16;

/// Chunks that lie in all banks.
const LINE_CHUNKS: u32 = 8;

/// Items of a warp.
pub(super) const WARP: u32 = 32;

/// How a tile lies in shared memory: rows of so many bytes, a power of two and at least 32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SharedTile {
    pub row_bytes: u32,
}

impl SharedTile {
    /// How far a chunk of a row is from the tile's beginning.
    pub(super) fn offset(self, b: &mut KernelBuilder, row: Value, chunk: Value) -> Built<Value> {
        let chunks = self.row_bytes / CHUNK_BYTES;
        // Rows that share a line of all banks are swizzled alike.
        let shift = (LINE_CHUNKS / chunks.min(LINE_CHUNKS)).trailing_zeros();
        let (shift, mask) = (b.i32(shift.cast_signed())?, b.i32(chunks.min(LINE_CHUNKS).cast_signed() - 1)?);
        let swizzle = b.binary(B::I32ShrU, row, shift)?;
        let swizzle = b.binary(B::I32And, swizzle, mask)?;
        let chunk = b.binary(B::I32Xor, chunk, swizzle)?;
        let start = scaled(b, row, self.row_bytes)?;
        let within = scaled(b, chunk, CHUNK_BYTES)?;
        b.binary(B::I32Add, start, within)
    }
}

/// Which operand of a matrix instruction fragments are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

/// Where a warp's fragments of a tile are: 16 rows of the left operand, or 16 columns of the right one, by 32 bytes of
/// depth each.
pub(super) struct Fragments {
    tile: SharedTile,
    /// Whether rows of the tile lie along the depth: then chunks are part of one row of the operand, and fragments are
    /// loaded as they are, not transposed.
    is_by_depth: bool,
    /// From the tile's beginning, for each step of the depth, or for each 16 rows or columns: as far as they are not a
    /// fixed distance apart.
    offsets: Vec<Value>,
}

impl Fragments {
    /// Fragments of so many times 16 rows or columns from a multiple of 16 on, and of so many steps.
    pub(super) fn new(
        b: &mut KernelBuilder,
        tile: SharedTile,
        (side, is_by_depth): (Side, bool),
        from: Value,
        (count, steps): (u32, u32),
    ) -> Built<Fragments> {
        // Each item says where a row of one of four 8 by 8 tiles is.
        let item = b.id(IdKind::Local, Axis::X)?;
        let (seven, one, three, four) = (b.i32(7)?, b.i32(1)?, b.i32(3)?, b.i32(4)?);
        let row = b.binary(B::I32And, item, seven)?;
        let first = b.binary(B::I32ShrU, item, three)?;
        let first = b.binary(B::I32And, first, one)?;
        let second = b.binary(B::I32ShrU, item, four)?;
        let second = b.binary(B::I32And, second, one)?;
        // The left one has its rows first, the right one its depth.
        let (along, deep) = match side {
            Side::Left => (first, second),
            Side::Right => (second, first),
        };
        let mut offsets = Vec::new();
        if is_by_depth {
            let eight = times(b, along, 8)?;
            let row = b.binary(B::I32Add, row, eight)?;
            let row = b.binary(B::I32Add, row, from)?;
            for step in 0..steps {
                let chunk = b.i32((2 * step).cast_signed())?;
                let chunk = b.binary(B::I32Add, deep, chunk)?;
                offsets.push(tile.offset(b, row, chunk)?);
            }
        } else {
            let eight = times(b, deep, 8)?;
            let row = b.binary(B::I32Add, row, eight)?;
            let first = b.binary(B::I32ShrU, from, three)?;
            let first = b.binary(B::I32Add, first, along)?;
            for n in 0..count {
                let more = b.i32((2 * n).cast_signed())?;
                let chunk = b.binary(B::I32Add, first, more)?;
                offsets.push(tile.offset(b, row, chunk)?);
            }
        }
        Ok(Fragments { tile, is_by_depth, offsets })
    }

    /// Loads those of one step, of the `n`th 16 rows or columns, from a tile that begins there. Of the right operand
    /// the first two are of eight columns, and the other two of the next eight.
    pub(super) fn load(&self, b: &mut KernelBuilder, tile: Value, n: u32, step: u32) -> Built<[Value; 4]> {
        let (own, distance) = if self.is_by_depth { (step, n) } else { (n, step) };
        let at = b.binary(B::I32Add, tile, self.offsets[own as usize])?;
        b.load_tiles(at, distance * FRAGMENT * self.tile.row_bytes, !self.is_by_depth)
    }
}

/// The number of the item's warp, and the item's number in it.
pub(super) fn warp_and_lane(b: &mut KernelBuilder) -> Built<(Value, Value)> {
    let item = b.id(IdKind::Local, Axis::X)?;
    let (shift, mask) = (b.i32(WARP.trailing_zeros().cast_signed())?, b.i32(WARP.cast_signed() - 1)?);
    Ok((b.binary(B::I32ShrU, item, shift)?, b.binary(B::I32And, item, mask)?))
}
