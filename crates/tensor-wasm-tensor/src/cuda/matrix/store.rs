//! From sums in registers to what is stored. A warp's sums lie in registers as matrix instructions leave them; they go
//! through shared memory, so that neighbouring items have neighbouring elements of a row, and compute and store what
//! follows of several at once.

use tensor_wasm_jit::Ty;
use tensor_wasm_jit::build::{BinaryOp as B, Value};

use super::super::index::{Indices, scaled, small, times};
use super::super::numbers::Built;
use super::super::tile::{FRAGMENT, WARP, warp_and_lane};
use super::{Product, TilePosition, sizes};

/// Rows and columns of a warp that are in shared memory at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoreShape {
    pub rows: u32,
    pub columns: u32,
}

impl StoreShape {
    /// Bytes of a row there: eight floats more than it has, so that four rows are in all banks.
    const fn pitch(self) -> u32 {
        (self.columns + 8) * 4
    }

    /// Bytes that a warp needs.
    pub(super) const fn warp_bytes(self) -> u32 {
        self.rows * self.pitch()
    }
}

/// Rows of sums in shared memory.
pub(super) struct SharedRows {
    pub start: Value,
    /// From one row to the next, in bytes.
    pub pitch: u32,
    pub rows: u32,
    pub columns: u32,
}

impl Product<'_> {
    /// Stores rows of a warp, from some on and of the group's tile: the sums of each 16 by 8 elements, row by row.
    /// Shared memory is nobody's before, and after.
    pub(super) fn store_rows(
        &mut self,
        shape: StoreShape,
        tile: &TilePosition,
        shared: Value,
        (row, column): (Value, Value),
        sums: &[[Value; 4]],
    ) -> Built<()> {
        let b = self.epilogue.builder();
        let mut indices = Indices::default();
        let (warp, lane) = warp_and_lane(b)?;
        let own = scaled(b, warp, shape.warp_bytes())?;
        let own = b.binary(B::I32Add, shared, own)?;
        let (group, pair) = indices.divide(b, lane, 4)?;
        let (to_row, to_column) = (scaled(b, group, shape.pitch())?, times(b, pair, 8)?);
        let to = b.binary(B::I32Add, own, to_row)?;
        let to = b.binary(B::I32Add, to, to_column)?;
        b.barrier()?;
        for (number, [a, c, d, e]) in (0..).zip(sums) {
            let (part, column) = (number / (shape.columns / 8), number % (shape.columns / 8));
            let at = part * FRAGMENT * shape.pitch() + column * 32;
            let below = at + 8 * shape.pitch();
            b.store(*a, to, at)?;
            b.store(*c, to, at + 4)?;
            b.store(*d, to, below)?;
            b.store(*e, to, below + 4)?;
        }
        b.barrier()?;
        let (row, column) = (b.binary(B::I32Add, tile.row, row)?, b.binary(B::I32Add, tile.column, column)?);
        let from = SharedRows { start: own, pitch: shape.pitch(), rows: shape.rows, columns: shape.columns };
        self.store_shared(&from, (lane, WARP), tile.batch, (row, column))
    }

    /// Computes and stores what follows elements that are in shared memory: those from a row and a column of the result
    /// on. Some items share the work; which of them this one is.
    pub(super) fn store_shared(
        &mut self,
        from: &SharedRows,
        (item, items): (Value, u32),
        batch: Value,
        (first_row, first_column): (Value, Value),
    ) -> Built<()> {
        let (m, n) = sizes(self.kernel);
        let lanes = self.lanes;
        let b = self.epilogue.builder();
        let matrix = times(b, batch, (m * n).cast_signed())?;
        let size = b.i32(small(n).cast_signed())?;
        let per_row = from.columns / small(lanes);
        let count = b.i32((from.rows * per_row / items).cast_signed())?;
        let zero = b.i32(0)?;
        let counter = b.variable(zero)?;
        let again = b.begin_loop(&[counter])?;
        let turn = b.get(counter)?;
        let chunk = scaled(b, turn, items)?;
        let chunk = b.binary(B::I32Add, chunk, item)?;
        let (row, column) = Indices::default().divide(b, chunk, per_row)?;
        let column = times(b, column, lanes.cast_signed())?;
        let at = scaled(b, row, from.pitch)?;
        let at = b.binary(B::I32Add, at, from.start)?;
        let at = b.element(at, column, 4)?;
        let elements: Vec<Value> = (0..small(lanes)).map(|lane| b.load(Ty::F32, at, 4 * lane)).collect::<Built<_>>()?;
        let (row, column) = (b.binary(B::I32Add, row, first_row)?, b.binary(B::I32Add, column, first_column)?);
        let last = b.i32(small(m).cast_signed())?;
        let (is_row, is_column) = (b.binary(B::I32LtU, row, last)?, b.binary(B::I32LtU, column, size)?);
        let is_inside = b.binary(B::I32And, is_row, is_column)?;
        b.begin_if(is_inside, &[])?;
        let number = b.binary(B::I32Mul, row, size)?;
        let number = b.binary(B::I32Add, number, column)?;
        let number = b.binary(B::I32Add, number, matrix)?;
        self.epilogue.store(number, &elements)?;
        let b = self.epilogue.builder();
        b.end()?;
        let one = b.i32(1)?;
        let next = b.binary(B::I32Add, turn, one)?;
        b.set(counter, next)?;
        let has_more = b.binary(B::I32Ne, next, count)?;
        b.branch_if(has_more, again)?;
        b.end()
    }
}
