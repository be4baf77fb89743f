//! A product by warps: four of them compute a tile of 128 by 128 elements, each a quarter of it, from fragments that
//! they load to registers.

use tensor_wasm_jit::MatrixElement;
use tensor_wasm_jit::build::{BinaryOp as B, BuildError, KernelBuilder, UnaryOp, Value, Variable};

use super::super::index::{Indices, scaled, small};
use super::super::map::LoweredKernel;
use super::super::numbers::Built;
use super::super::tile::{FRAGMENT, Fragments, Side, WARP, warp_and_lane};
use super::operand::{Copies, CopyShape};
use super::store::StoreShape;
use super::{Product, four, next_stage};

/// Items of a group.
pub(super) const ITEMS: u32 = 128;

/// Rows and columns of a group's tile, and of a warp's.
const TILE: u32 = 128;
const WARP_TILE: u32 = 64;

/// A tile has two steps of 32 bytes of the depth.
const COPY: CopyShape = CopyShape { items: ITEMS, along: TILE, depth_bytes: 64, is_blocked: false };
const STEPS: u32 = COPY.depth_bytes / 32;

/// Tiles that are in shared memory at once. Two of them are under way while one is multiplied; 48 KiB in all, so that
/// two groups share a multiprocessor.
const STAGES: u32 = 3;
const TILE_BYTES: u32 = TILE * COPY.depth_bytes;
const STAGE_BYTES: u32 = 2 * TILE_BYTES;

/// Fragments of 16 by 16 that a warp has in each direction.
const FRAGMENTS: u32 = WARP_TILE / FRAGMENT;

/// Half of a warp's rows are stored at once: more do not fit where the tiles were.
const STORE: StoreShape = StoreShape { rows: 2 * FRAGMENT, columns: WARP_TILE };
const _: () = assert!(ITEMS / WARP * STORE.warp_bytes() <= STAGES * STAGE_BYTES);

pub(super) fn build(mut product: Product<'_>, element: MatrixElement) -> Built<LoweredKernel> {
    let windows = product.windows()?;
    product.epilogue.begin()?;
    let (tile, groups) = product.position(TILE, TILE)?;
    let b = product.epilogue.builder();
    let (warp, _) = warp_and_lane(b)?;
    let (row, column) = Indices::default().divide(b, warp, TILE / WARP_TILE)?;
    let (row, column) = (scaled(b, row, WARP_TILE)?, scaled(b, column, WARP_TILE)?);
    let shared = b.shared(STAGES * STAGE_BYTES)?;
    let (mut copies, mut fragments) = (Vec::new(), Vec::new());
    let sides = [(tile.row, row, Side::Left), (tile.column, column, Side::Right)];
    for ((operand, window), (first, within, side)) in product.operands.iter().zip(windows).zip(sides) {
        copies.push(Copies::new(b, operand, COPY, (window, tile.batch, first))?);
        let lies = (side, operand.is_by_depth);
        fragments.push(Fragments::new(b, COPY.tile(operand), lies, within, (FRAGMENTS, STEPS))?);
    }
    let operand = &product.operands[0];
    let tiles = small(operand.depth.div_ceil(COPY.depth(operand) as usize));
    let depth = COPY.depth(operand);
    let pipeline = Pipeline { element, shared, copies, fragments, depth };
    let sums = pipeline.run(b, tiles)?;
    let per_pass = (STORE.rows / FRAGMENT * WARP_TILE / 8) as usize;
    for (pass, sums) in (0..).zip(sums.chunks(per_pass)) {
        let b = product.epilogue.builder();
        let shift = b.i32(pass * STORE.rows.cast_signed())?;
        let row = b.binary(B::I32Add, row, shift)?;
        product.store_rows(STORE, &tile, shared, (row, column), sums)?;
    }
    product.epilogue.finish(groups)
}

/// Tiles on their way to shared memory, and products of those that are there.
struct Pipeline {
    element: MatrixElement,
    shared: Value,
    /// Of the left operand and of the right one.
    copies: Vec<Copies>,
    fragments: Vec<Fragments>,
    /// Elements of the depth that a tile has.
    depth: u32,
}

impl Pipeline {
    /// Multiplies all tiles. The sums of each 16 by 8 elements, row by row.
    fn run(&self, b: &mut KernelBuilder, tiles: u32) -> Built<Vec<[Value; 4]>> {
        let zero = b.f32(0.0)?;
        let count = FRAGMENTS * 2 * FRAGMENTS;
        let sums: Vec<[Variable; 4]> = (0..count).map(|_| four(b, zero)).collect::<Built<_>>()?;
        let start = b.i32(0)?;
        // Where the next tile goes, and where the one that is multiplied is; how far the copies have come.
        let (write, read, depth) = (b.variable(start)?, b.variable(start)?, b.variable(start)?);
        let ahead = tiles.min(STAGES - 1);
        for _ in 0..ahead {
            self.copy(b, write, depth)?;
        }
        let mut carried: Vec<Variable> = sums.iter().flatten().copied().collect();
        carried.extend([write, read, depth]);
        carried.extend(self.copies.iter().map(|copies| copies.from));
        let rounds = b.i32((tiles - ahead).cast_signed())?;
        b.count_to::<BuildError>(rounds, &carried, |b, _| {
            b.await_copies(STAGES - 2)?;
            // Everybody's part of the tile is there, and nobody reads the one before.
            b.barrier()?;
            self.copy(b, write, depth)?;
            self.multiply(b, &sums, read)
        })?;
        for n in 0..ahead {
            b.await_copies(ahead - 1 - n)?;
            b.barrier()?;
            self.multiply(b, &sums, read)?;
        }
        let get = |four: &[Variable; 4]| Ok([b.get(four[0])?, b.get(four[1])?, b.get(four[2])?, b.get(four[3])?]);
        sums.iter().map(get).collect()
    }

    /// Begins to copy the next tile of both operands.
    fn copy(&self, b: &mut KernelBuilder, write: Variable, depth: Variable) -> Built<()> {
        let stage = next_stage(b, self.shared, write, STAGE_BYTES, STAGES)?;
        let before = b.get(depth)?;
        for (copies, shift) in self.copies.iter().zip([0, TILE_BYTES]) {
            let shift = b.i32(shift.cast_signed())?;
            let tile = b.binary(B::I32Add, stage, shift)?;
            copies.copy(b, tile, before)?;
        }
        b.commit_copies()?;
        let more = b.i32(self.depth.cast_signed())?;
        let next = b.binary(B::I32Add, before, more)?;
        b.set(depth, next)
    }

    /// Adds the products of a stage.
    fn multiply(&self, b: &mut KernelBuilder, sums: &[[Variable; 4]], read: Variable) -> Built<()> {
        let left = next_stage(b, self.shared, read, STAGE_BYTES, STAGES)?;
        let shift = b.i32(TILE_BYTES.cast_signed())?;
        let right = b.binary(B::I32Add, left, shift)?;
        for step in 0..STEPS {
            let mut columns = Vec::new();
            for n in 0..FRAGMENTS {
                let words = self.fragments[1].load(b, right, n, step)?;
                let [a, c, d, e] = self.rounded(b, words)?;
                columns.extend([[a, c], [d, e]]);
            }
            for row in 0..FRAGMENTS {
                let rows = self.fragments[0].load(b, left, row, step)?;
                let rows = self.rounded(b, rows)?;
                for (column, right) in columns.iter().enumerate() {
                    let own = &sums[row as usize * columns.len() + column];
                    let before = [b.get(own[0])?, b.get(own[1])?, b.get(own[2])?, b.get(own[3])?];
                    let after = b.multiply_tiles(self.element, rows, *right, before)?;
                    own.iter().zip(after).try_for_each(|(variable, value)| b.set(*variable, value))?;
                }
            }
        }
        Ok(())
    }

    /// Words as a matrix instruction takes them: those of single precision are rounded to tf32.
    fn rounded(&self, b: &mut KernelBuilder, words: [Value; 4]) -> Built<[Value; 4]> {
        let mut rounded = words;
        if self.element == MatrixElement::Tf32 {
            for word in &mut rounded {
                let single = b.unary(UnaryOp::F32ReinterpretI32, *word)?;
                *word = b.round_tf32(single)?;
            }
        }
        Ok(rounded)
    }
}
