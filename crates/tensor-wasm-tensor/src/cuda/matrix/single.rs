//! A product in single precision, without tensor cores: a group of 256 items computes a tile of 128 by 128 elements,
//! each of them 8 by 8, in registers. The next tiles of the operands are loaded to registers while one is multiplied,
//! and stored to the other of two places in shared memory then: one barrier for each 16 steps.

use tensor_wasm_jit::Ty;
use tensor_wasm_jit::build::{Axis, BinaryOp as B, BuildError, IdKind, KernelBuilder, Value, Variable};

use super::super::index::{Indices, scaled, small, sum, times};
use super::super::map::LoweredKernel;
use super::super::numbers::Built;
use super::operand::Operand;
use super::store::SharedRows;
use super::{Product, TilePosition, next_stage};

/// Items of a group.
pub(super) const ITEMS: u32 = 256;

/// Rows and columns of a group's tile, and steps of the depth.
const TILE: u32 = 128;
const DEPTH: u32 = 16;

/// Rows and columns of an item: four and four, half a tile apart, which are loaded at once.
const EACH: u32 = 8;
const FOUR: u32 = 4;
const HALF: u32 = TILE / 2;

/// Bytes of one step of a tile: four floats more than it has, so that what lies along the depth is stored to more
/// banks.
const STEP_BYTES: u32 = (TILE + 4) * 4;
const TILE_BYTES: u32 = DEPTH * STEP_BYTES;
const STAGE_BYTES: u32 = 2 * TILE_BYTES;
const STAGES: u32 = 2;

/// Pieces of four elements that an item loads of a tile.
const PIECES: u32 = TILE * DEPTH / FOUR / ITEMS;

const _: () = assert!(HALF * STEP_BYTES <= STAGES * STAGE_BYTES);

/// Whether an operand's lines end with a piece: then none goes beyond the last element.
pub(super) fn is_whole(operand: &Operand) -> bool {
    let len = if operand.is_by_depth { operand.depth } else { operand.along };
    len.is_multiple_of(FOUR as usize)
}

pub(super) fn build(mut product: Product<'_>) -> Built<LoweredKernel> {
    let windows = product.windows()?;
    product.epilogue.begin()?;
    let (tile, groups) = product.position(TILE, TILE)?;
    let b = product.epilogue.builder();
    let shared = b.shared(STAGES * STAGE_BYTES)?;
    let item = b.id(IdKind::Local, Axis::X)?;
    let (row, column) = Indices::default().divide(b, item, TILE / EACH)?;
    let (row, column) = (scaled(b, row, FOUR)?, scaled(b, column, FOUR)?);
    let firsts = [tile.row, tile.column];
    let mut loads = Vec::new();
    for ((operand, window), first) in product.operands.iter().zip(windows).zip(firsts) {
        loads.push(Loads::new(b, operand, (window, tile.batch, first))?);
    }
    let tiles = small(product.operands[0].depth.div_ceil(DEPTH as usize));
    let sums = run(b, shared, &loads, (row, column), tiles)?;
    store(&mut product, &tile, shared, (item, row, column), &sums)?;
    product.epilogue.finish(groups)
}

/// Stores the tile, half of its rows at a time, by way of shared memory.
fn store(
    product: &mut Product<'_>,
    tile: &TilePosition,
    shared: Value,
    (item, row, column): (Value, Value, Value),
    sums: &[Value],
) -> Built<()> {
    for half in 0..2 {
        let b = product.epilogue.builder();
        b.barrier()?;
        let to = scaled(b, row, STEP_BYTES)?;
        let to = b.binary(B::I32Add, to, shared)?;
        let to = b.element(to, column, 4)?;
        for own in 0..FOUR {
            for n in 0..EACH {
                let sum = sums[((half * FOUR + own) * EACH + n) as usize];
                b.store(sum, to, own * STEP_BYTES + (n / FOUR * HALF + n % FOUR) * 4)?;
            }
        }
        b.barrier()?;
        let shift = b.i32((half * HALF).cast_signed())?;
        let first = b.binary(B::I32Add, tile.row, shift)?;
        let from = SharedRows { start: shared, pitch: STEP_BYTES, rows: HALF, columns: TILE };
        product.store_shared(&from, (item, ITEMS), tile.batch, (first, tile.column))?;
    }
    Ok(())
}

/// Where an item loads its pieces of an operand from, and where it stores them.
struct Loads<'k> {
    operand: &'k Operand,
    /// The first piece: goes on with the depth.
    from: Variable,
    start: Value,
    /// Where it is in the first tile: along the result, and along the depth.
    along: Value,
    deep: Value,
    /// In a tile in shared memory.
    to: Value,
}

impl<'k> Loads<'k> {
    fn new(
        b: &mut KernelBuilder,
        operand: &'k Operand,
        (window, batch, first): (Value, Value, Value),
    ) -> Built<Loads<'k>> {
        let mut indices = Indices::default();
        let item = b.id(IdKind::Local, Axis::X)?;
        let pieces = if operand.is_by_depth { DEPTH / FOUR } else { TILE / FOUR };
        let (line, piece) = indices.divide(b, item, pieces)?;
        let piece = scaled(b, piece, FOUR)?;
        let (own, deep) = if operand.is_by_depth { (line, piece) } else { (piece, line) };
        let along = b.binary(B::I32Add, first, own)?;
        let head = indices.place(b, &operand.heads, batch)?;
        let start = sum(b, &[head], operand.offset.cast_signed())?;
        let stride = operand.stride.cast_signed();
        let place = if operand.is_by_depth {
            let line = times(b, along, stride)?;
            sum(b, &[Some(start), Some(line), Some(deep)], 0)?
        } else {
            let line = times(b, deep, stride)?;
            sum(b, &[Some(start), Some(line), Some(along)], 0)?
        };
        let (from, start) = (b.element(window, place, 4)?, b.element(window, start, 4)?);
        let to = scaled(b, deep, STEP_BYTES)?;
        let to = b.element(to, own, 4)?;
        Ok(Loads { operand, from: b.variable(from)?, start, along, deep, to })
    }

    /// Lines from one piece of the item to the next.
    fn apart(&self) -> u32 {
        if self.operand.is_by_depth { ITEMS * FOUR / DEPTH } else { ITEMS * FOUR / TILE }
    }

    /// Loads the item's pieces of the next tile; so much of the depth came before.
    fn load(&self, b: &mut KernelBuilder, before: Value) -> Built<Vec<Value>> {
        let operand = self.operand;
        let from = b.get(self.from)?;
        let line_bytes = small(operand.stride * operand.bytes);
        let is_cut = !operand.along.is_multiple_of(TILE as usize) || !operand.depth.is_multiple_of(DEPTH as usize);
        let deep = b.binary(B::I32Add, self.deep, before)?;
        let (along_end, depth_end) =
            (b.i32(small(operand.along).cast_signed())?, b.i32(small(operand.depth).cast_signed())?);
        let mut loaded = Vec::new();
        for n in 0..PIECES {
            let distance = n * self.apart() * line_bytes;
            if !is_cut {
                for part in 0..FOUR {
                    loaded.push(b.load(Ty::F32, from, distance + 4 * part)?);
                }
                continue;
            }
            let (shift, far) = (b.i32((n * self.apart()).cast_signed())?, b.i32(distance.cast_signed())?);
            let (mut along, mut own_deep) = (self.along, deep);
            if operand.is_by_depth {
                along = b.binary(B::I32Add, along, shift)?;
            } else {
                own_deep = b.binary(B::I32Add, own_deep, shift)?;
            }
            let (is_along, is_deep) =
                (b.binary(B::I32LtU, along, along_end)?, b.binary(B::I32LtU, own_deep, depth_end)?);
            let is_inside = b.binary(B::I32And, is_along, is_deep)?;
            // What is outside is nothing, and not read.
            let at = b.binary(B::I32Add, from, far)?;
            let at = b.select(is_inside, at, self.start)?;
            let four: Vec<Value> = (0..FOUR).map(|part| b.load(Ty::F32, at, 4 * part)).collect::<Built<_>>()?;
            let nothing = b.f32(0.0)?;
            for (part, value) in (0..).zip(four) {
                let mut is_there = is_inside;
                // A line that was copied ends with whatever was behind it.
                if operand.is_by_depth && !operand.depth.is_multiple_of(FOUR as usize) {
                    let shift = b.i32(part)?;
                    let own = b.binary(B::I32Add, own_deep, shift)?;
                    is_there = b.binary(B::I32LtU, own, depth_end)?;
                    is_there = b.binary(B::I32And, is_inside, is_there)?;
                }
                loaded.push(b.select(is_there, value, nothing)?);
            }
        }
        let advance = if operand.is_by_depth { DEPTH * 4 } else { DEPTH * line_bytes };
        let advance = b.i32(advance.cast_signed())?;
        let next = b.binary(B::I32Add, from, advance)?;
        b.set(self.from, next)?;
        Ok(loaded)
    }

    /// Stores them to a tile: a line for each step of the depth.
    fn store(&self, b: &mut KernelBuilder, tile: Value, loaded: &[Value]) -> Built<()> {
        let to = b.binary(B::I32Add, tile, self.to)?;
        for (n, four) in (0..).zip(loaded.chunks(FOUR as usize)) {
            for (part, value) in (0..).zip(four) {
                let offset = if self.operand.is_by_depth {
                    n * self.apart() * 4 + part * STEP_BYTES
                } else {
                    n * self.apart() * STEP_BYTES + part * 4
                };
                b.store(*value, to, offset)?;
            }
        }
        Ok(())
    }
}

/// Multiplies all tiles: the item's sums, row by row.
fn run(
    b: &mut KernelBuilder,
    shared: Value,
    loads: &[Loads<'_>],
    (row, column): (Value, Value),
    tiles: u32,
) -> Built<Vec<Value>> {
    let (zero, start) = (b.f32(0.0)?, b.i32(0)?);
    let sums: Vec<Variable> = (0..EACH * EACH).map(|_| b.variable(zero)).collect::<Built<_>>()?;
    let (write, read, depth) = (b.variable(start)?, b.variable(start)?, b.variable(start)?);
    let places = (b.element(shared, row, 4)?, b.element(shared, column, 4)?);
    let first = load_both(b, loads, depth)?;
    store_both(b, shared, loads, write, &first)?;
    b.barrier()?;
    let mut carried = sums.clone();
    carried.extend([write, read, depth]);
    carried.extend(loads.iter().map(|loads| loads.from));
    let rounds = b.i32(tiles.cast_signed() - 1)?;
    b.count_to::<BuildError>(rounds, &carried, |b, _| {
        let next = load_both(b, loads, depth)?;
        multiply(b, places, &sums, read)?;
        store_both(b, shared, loads, write, &next)?;
        b.barrier()
    })?;
    multiply(b, places, &sums, read)?;
    sums.iter().map(|sum| b.get(*sum)).collect()
}

fn load_both(b: &mut KernelBuilder, loads: &[Loads<'_>], depth: Variable) -> Built<Vec<Vec<Value>>> {
    let before = b.get(depth)?;
    let loaded = loads.iter().map(|loads| loads.load(b, before)).collect::<Built<_>>()?;
    let more = b.i32(DEPTH.cast_signed())?;
    let next = b.binary(B::I32Add, before, more)?;
    b.set(depth, next)?;
    Ok(loaded)
}

fn store_both(
    b: &mut KernelBuilder,
    shared: Value,
    loads: &[Loads<'_>],
    write: Variable,
    loaded: &[Vec<Value>],
) -> Built<()> {
    let stage = next_stage(b, shared, write, STAGE_BYTES, STAGES)?;
    for ((loads, loaded), shift) in loads.iter().zip(loaded).zip([0, TILE_BYTES]) {
        let shift = b.i32(shift.cast_signed())?;
        let tile = b.binary(B::I32Add, stage, shift)?;
        loads.store(b, tile, loaded)?;
    }
    Ok(())
}

/// Adds the products of a stage.
fn multiply(b: &mut KernelBuilder, places: (Value, Value), sums: &[Variable], read: Variable) -> Built<()> {
    let zero = b.i32(0)?;
    let stage = next_stage(b, zero, read, STAGE_BYTES, STAGES)?;
    let (left, right) = (b.binary(B::I32Add, places.0, stage)?, b.binary(B::I32Add, places.1, stage)?);
    let mut now: Vec<Value> = sums.iter().map(|sum| b.get(*sum)).collect::<Built<_>>()?;
    for step in 0..DEPTH {
        let eight = |b: &mut KernelBuilder, at: Value, offset: u32| {
            let place = |n: u32| offset + (n / FOUR * HALF + n % FOUR) * 4;
            (0..EACH).map(|n| b.load(Ty::F32, at, place(n))).collect::<Built<Vec<Value>>>()
        };
        let rows = eight(b, left, step * STEP_BYTES)?;
        let columns = eight(b, right, TILE_BYTES + step * STEP_BYTES)?;
        for (n, sum) in now.iter_mut().enumerate() {
            *sum = b.fma(rows[n / EACH as usize], columns[n % EACH as usize], *sum)?;
        }
    }
    sums.iter().zip(now).try_for_each(|(variable, value)| b.set(*variable, value))
}
