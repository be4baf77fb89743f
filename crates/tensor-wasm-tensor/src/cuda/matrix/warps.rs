//! A product by warps: four of them compute a tile of 128 by 128 elements, or of 64 by 64 where there are few, each a
//! quarter of it, from fragments that they load to registers.

use tensor_wasm_jit::MatrixElement;
use tensor_wasm_jit::build::{BinaryOp as B, BuildError, KernelBuilder, UnaryOp, Value, Variable};

use super::super::index::{Indices, scaled, small};
use super::super::map::LoweredKernel;
use super::super::numbers::Built;
use super::super::tile::{FRAGMENT, Fragments, Side, WARP, warp_and_lane};
use super::operand::{Copies, CopyShape};
use super::store::StoreShape;
use super::{Product, batches, four, next_stage, sizes};

/// Items of a group.
pub(super) const ITEMS: u32 = 128;

/// Bytes of the depth that a tile has: two steps of 32.
const DEPTH_BYTES: u32 = 64;
const STEPS: u32 = DEPTH_BYTES / 32;

/// Tiles that are in shared memory at once. Two of them are under way while one is multiplied; 48 KiB in all at most,
/// so that two groups share a multiprocessor.
const STAGES: u32 = 3;

/// Groups from which on a device is full, more or less: with fewer, smaller tiles are shared out better. Tests have
/// few.
const GROUPS_MIN: usize = if cfg!(test) { 4 } else { 128 };

/// The sizes of what a group and its warps compute.
#[derive(Debug, Clone, Copy)]
struct WarpTiles {
    /// Rows and columns of a group's tile; a warp has half as many of each.
    side: u32,
}

/// What most products are computed by, and small ones.
const LARGE: WarpTiles = WarpTiles { side: 128 };
const SMALL: WarpTiles = WarpTiles { side: 64 };

impl WarpTiles {
    fn of(product: &Product<'_>) -> WarpTiles {
        let (m, n) = sizes(product.kernel);
        let tiles = |size: usize| size.div_ceil(LARGE.side as usize);
        if tiles(m) * tiles(n) * batches(product.kernel) < GROUPS_MIN { SMALL } else { LARGE }
    }

    const fn copy(self) -> CopyShape {
        CopyShape { items: ITEMS, along: self.side, depth_bytes: DEPTH_BYTES, is_blocked: false }
    }

    const fn warp_side(self) -> u32 {
        self.side / 2
    }

    /// Fragments of 16 by 16 that a warp has in each direction.
    const fn fragments(self) -> u32 {
        self.warp_side() / FRAGMENT
    }

    const fn tile_bytes(self) -> u32 {
        self.side * DEPTH_BYTES
    }

    const fn stage_bytes(self) -> u32 {
        2 * self.tile_bytes()
    }

    /// Rows that are stored at once: more do not fit where the tiles were.
    const fn store(self) -> StoreShape {
        StoreShape { rows: 2 * FRAGMENT, columns: self.warp_side() }
    }

    const fn has_room(self) -> bool {
        ITEMS / WARP * self.store().warp_bytes() <= STAGES * self.stage_bytes()
    }
}

const _: () = assert!(LARGE.has_room() && SMALL.has_room());

pub(super) fn build(mut product: Product<'_>, element: MatrixElement) -> Built<LoweredKernel> {
    let sizes = WarpTiles::of(&product);
    let windows = product.windows()?;
    product.epilogue.begin()?;
    let (tile, groups) = product.position(sizes.side, sizes.side)?;
    let b = product.epilogue.builder();
    let (warp, _) = warp_and_lane(b)?;
    let (row, column) = Indices::default().divide(b, warp, 2)?;
    let (row, column) = (scaled(b, row, sizes.warp_side())?, scaled(b, column, sizes.warp_side())?);
    let shared = b.shared(STAGES * sizes.stage_bytes())?;
    let (mut copies, mut fragments) = (Vec::new(), Vec::new());
    let sides = [(tile.row, row, Side::Left), (tile.column, column, Side::Right)];
    for ((operand, window), (first, within, side)) in product.operands.iter().zip(windows).zip(sides) {
        copies.push(Copies::new(b, operand, sizes.copy(), (window, tile.batch, first))?);
        let lies = (side, operand.is_by_depth);
        let count = (sizes.fragments(), STEPS);
        fragments.push(Fragments::new(b, sizes.copy().tile(operand), lies, within, count)?);
    }
    let operand = &product.operands[0];
    let tiles = small(operand.depth.div_ceil(sizes.copy().depth(operand) as usize));
    let depth = sizes.copy().depth(operand);
    let pipeline = Pipeline { element, sizes, shared, copies, fragments, depth };
    let sums = pipeline.run(b, tiles)?;
    let store = sizes.store();
    let per_pass = (store.rows / FRAGMENT * store.columns / 8) as usize;
    for (pass, sums) in (0..).zip(sums.chunks(per_pass)) {
        let b = product.epilogue.builder();
        let shift = b.i32(pass * store.rows.cast_signed())?;
        let row = b.binary(B::I32Add, row, shift)?;
        product.store_rows(store, &tile, shared, (row, column), sums)?;
    }
    product.epilogue.finish(groups)
}

/// Tiles on their way to shared memory, and products of those that are there.
struct Pipeline {
    element: MatrixElement,
    sizes: WarpTiles,
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
        let count = self.sizes.fragments() * 2 * self.sizes.fragments();
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
        let stage = next_stage(b, self.shared, write, self.sizes.stage_bytes(), STAGES)?;
        let before = b.get(depth)?;
        for (copies, shift) in self.copies.iter().zip([0, self.sizes.tile_bytes()]) {
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
        let left = next_stage(b, self.shared, read, self.sizes.stage_bytes(), STAGES)?;
        let shift = b.i32(self.sizes.tile_bytes().cast_signed())?;
        let right = b.binary(B::I32Add, left, shift)?;
        for step in 0..STEPS {
            let mut columns = Vec::new();
            for n in 0..self.sizes.fragments() {
                let words = self.fragments[1].load(b, right, n, step)?;
                let [a, c, d, e] = self.rounded(b, words)?;
                columns.extend([[a, c], [d, e]]);
            }
            for row in 0..self.sizes.fragments() {
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
