//! Attention in half precision, on tensor cores.
//!
//! A group of four warps has 64 queries, a warp 16 of them, in registers; so are its results. Tiles of keys and of
//! values come by turns, two ahead of the one that is used, through three places in shared memory.

use tensor_wasm_jit::build::{Axis, BinaryOp as B, BuildError, IdKind, KernelBuilder, Value, Variable};
use tensor_wasm_jit::{MatrixElement, Target};

use super::super::index::{Indices, scaled, small, sum, times};
use super::super::map::{Argument, LoweredKernel, LoweredStep, Program};
use super::super::matrix::{Operand, clamped, four, pack};
use super::super::numbers::{Built, half_type};
use super::super::tile::{CHUNK_BYTES, FRAGMENT, Fragments, SharedTile, Side, WARP, warp_and_lane};
use super::{Sight, corrected, scale_of};
use crate::dtype::DType;
use crate::schedule::plan::{Source, SpecialKernel};

/// Items of a group, and queries.
const ITEMS: u32 = 128;
const QUERIES: u32 = ITEMS / WARP * FRAGMENT;

/// Keys, or values, of a tile; and bytes of one at most.
const KEYS_MAX: u32 = 64;
const TILE_BYTES_MAX: u32 = 16 << 10;

/// Tiles in shared memory at once: 48 KiB at most.
const STAGES: u32 = 3;

/// Elements of a query, of a key and of a value at most: beyond, a warp's results are more than its registers.
const WIDTH_MAX: usize = 256;

const ELEMENT_BYTES: u32 = 2;

/// Whether there is a kernel for such queries, keys and values.
pub(super) fn fits(dtype: DType, widths: [usize; 2]) -> bool {
    // A tile has at least as many rows as the group copies at once.
    let fits = || {
        let tiles = widths.map(tile_of);
        let keys = keys_of(tiles);
        tiles.iter().all(|tile| ITEMS / (tile.row_bytes / CHUNK_BYTES) <= keys)
    };
    let is_narrow = widths.iter().all(|width| *width <= WIDTH_MAX);
    half_type(dtype).is_some() && is_narrow && fits()
}

/// Keys of a tile, and values.
fn keys_of(tiles: [SharedTile; 2]) -> u32 {
    (TILE_BYTES_MAX / tiles[0].row_bytes.max(tiles[1].row_bytes)).min(KEYS_MAX)
}

pub(super) fn lower(kernel: &SpecialKernel, is_causal: bool) -> Built<LoweredStep> {
    let mut step = LoweredStep::default();
    let mut operands = Vec::new();
    for view in &kernel.inputs {
        if let Some(operand) = Operand::of(view, Side::Left, false) {
            operands.push(operand);
            continue;
        }
        let (operand, bytes) = Operand::packed(view, Side::Left, false, step.scratch_bytes.len());
        if bytes > u64::from(u32::MAX) {
            return Err(BuildError::Structure { what: "a copy of attention's operands has more than 4 GiB" });
        }
        step.kernels.push(pack(view, &operand)?);
        step.scratch_bytes.push(bytes);
        operands.push(operand);
    }
    let [query, key, value] = &operands[..] else {
        return Err(BuildError::Structure { what: "attention has three operands" });
    };
    step.kernels.push(Attention::new(kernel, [query, key, value], is_causal).build()?);
    Ok(step)
}

struct Attention<'k> {
    kernel: &'k SpecialKernel,
    operands: [&'k Operand; 3],
    element: MatrixElement,
    sight: Sight,
    /// Rows of tiles of keys, and of values.
    key_tile: SharedTile,
    value_tile: SharedTile,
    /// Keys of a tile.
    keys: u32,
    stage_bytes: u32,
}

/// Rows of so many elements, as a tile has them: chunks of zeros at the end make them a power of two.
fn tile_of(width: usize) -> SharedTile {
    SharedTile { row_bytes: (small(width) * ELEMENT_BYTES).next_power_of_two().max(2 * CHUNK_BYTES) }
}

/// Steps of 16 elements of a row.
fn steps_of(width: usize) -> u32 {
    small(width).div_ceil(FRAGMENT)
}

/// Copies rows of an operand to a tile, from one tile to the next.
struct RowCopies<'k> {
    operand: &'k Operand,
    tile: SharedTile,
    rows: u32,
    from: Variable,
    /// The item's first row in a tile, and bytes of its chunk.
    row: Value,
    bytes: Value,
    /// Where chunks of the first rows are in a tile; those that follow lie as these do.
    to: Vec<Value>,
}

impl<'k> RowCopies<'k> {
    /// From a row of a matrix on.
    fn new(
        b: &mut KernelBuilder,
        operand: &'k Operand,
        (tile, rows): (SharedTile, u32),
        window: Value,
        batch: Value,
        first: Option<Value>,
    ) -> Built<RowCopies<'k>> {
        let chunks = tile.row_bytes / CHUNK_BYTES;
        let elements = CHUNK_BYTES / ELEMENT_BYTES;
        let mut indices = Indices::default();
        let item = b.id(IdKind::Local, Axis::X)?;
        let (row, chunk) = indices.divide(b, item, chunks)?;
        // Rows are swizzled by eights.
        let lines = ITEMS / chunks;
        let mut to = Vec::new();
        for n in 0..(8 / lines).max(1) {
            let more = b.i32((n * lines).cast_signed())?;
            let own = b.binary(B::I32Add, row, more)?;
            to.push(tile.offset(b, own, chunk)?);
        }
        let within = scaled(b, chunk, elements)?;
        let bytes = if operand.depth == (tile.row_bytes / ELEMENT_BYTES) as usize {
            b.i32(CHUNK_BYTES.cast_signed())?
        } else {
            let end = b.i32(small(operand.depth).cast_signed())?;
            clamped(b, end, within, ELEMENT_BYTES)?
        };
        let head = indices.place(b, &operand.heads, batch)?;
        let at = match first {
            Some(first) => b.binary(B::I32Add, row, first)?,
            None => row,
        };
        let line = times(b, at, operand.stride.cast_signed())?;
        let place = sum(b, &[head, Some(line), Some(within)], operand.offset.cast_signed())?;
        let from = b.element(window, place, ELEMENT_BYTES)?;
        Ok(RowCopies { operand, tile, rows, from: b.variable(from)?, row: at, bytes, to })
    }

    /// Begins to copy a tile to a place in shared memory; `before` rows were copied.
    fn copy(&self, b: &mut KernelBuilder, shared: Value, before: Option<Value>) -> Built<()> {
        let lines = ITEMS / (self.tile.row_bytes / CHUNK_BYTES);
        let line_bytes = small(self.operand.stride) * ELEMENT_BYTES;
        let from = b.get(self.from)?;
        let is_cut = !self.operand.along.is_multiple_of(self.rows as usize);
        let first = match before {
            Some(before) => b.binary(B::I32Add, self.row, before)?,
            None => self.row,
        };
        let (end, none) = (b.i32(small(self.operand.along).cast_signed())?, b.i32(0)?);
        let variants = small(self.to.len());
        for n in 0..self.rows / lines {
            let to = b.binary(B::I32Add, shared, self.to[(n % variants) as usize])?;
            let offset = n / variants * variants * lines * self.tile.row_bytes;
            let bytes = if is_cut {
                let more = b.i32((n * lines).cast_signed())?;
                let row = b.binary(B::I32Add, first, more)?;
                let is_inside = b.binary(B::I32LtU, row, end)?;
                b.select(is_inside, self.bytes, none)?
            } else {
                self.bytes
            };
            b.copy_async((to, offset), (from, n * lines * line_bytes), bytes)?;
        }
        let advance = b.i32((self.rows * line_bytes).cast_signed())?;
        let next = b.binary(B::I32Add, from, advance)?;
        b.set(self.from, next)
    }
}

/// What a warp has of its 16 queries: an item of two of them, eight apart.
struct Rows {
    /// Sums of values, for each eight columns.
    sums: Vec<[Variable; 4]>,
    /// The largest score so far, and the item's part of the sum of all powers.
    largest: [Variable; 2],
    total: [Variable; 2],
}

impl<'k> Attention<'k> {
    fn new(kernel: &'k SpecialKernel, operands: [&'k Operand; 3], is_causal: bool) -> Attention<'k> {
        let (key_tile, value_tile) = (tile_of(operands[1].depth), tile_of(operands[2].depth));
        let row_bytes = key_tile.row_bytes.max(value_tile.row_bytes);
        let keys = keys_of([key_tile, value_tile]);
        // The queries are there before anything else is.
        let stage_bytes = (keys * row_bytes).max((QUERIES * key_tile.row_bytes).div_ceil(STAGES).next_multiple_of(128));
        let element = if kernel.dtype == DType::F16 { MatrixElement::F16 } else { MatrixElement::BF16 };
        let sight = Sight { queries: operands[0].along, keys: operands[1].along, is_causal };
        Attention { kernel, operands, element, sight, key_tile, value_tile, keys, stage_bytes }
    }

    fn build(&self) -> Built<LoweredKernel> {
        let [query, key, value] = self.operands;
        let rank = self.kernel.shape.rank();
        let batches: usize = self.kernel.shape[..rank - 2].iter().product();
        let mut b = KernelBuilder::on("attention", Target::Ampere);
        let mut arguments: Vec<Argument> = self.operands.iter().map(|operand| operand.argument).collect();
        arguments.push(Argument::Buffer(Source::Slot(self.kernel.slot)));
        let windows: Vec<Value> = arguments.iter().map(|_| b.window()).collect::<Built<_>>()?;
        let b = &mut b;
        let blocks = query.along.div_ceil(QUERIES as usize);
        let group = b.id(IdKind::Group, Axis::X)?;
        let (batch, block) = Indices::default().divide(b, group, small(blocks))?;
        // The last queries see the most keys: they begin first.
        let last = b.i32(small(blocks - 1).cast_signed())?;
        let block = b.binary(B::I32Sub, last, block)?;
        let first = scaled(b, block, QUERIES)?;
        let (warp, lane) = warp_and_lane(b)?;
        let shared = b.shared(STAGES * self.stage_bytes)?;
        let queries = self.queries(b, shared, (windows[0], batch), first, warp)?;
        let keys = RowCopies::new(b, key, (self.key_tile, self.keys), windows[1], batch, None)?;
        let values = RowCopies::new(b, value, (self.value_tile, self.keys), windows[2], batch, None)?;
        let (zero, lowest) = (b.f32(0.0)?, b.f32(f32::NEG_INFINITY)?);
        let columns = 2 * steps_of(value.depth);
        let rows = Rows {
            sums: (0..columns).map(|_| four(b, zero)).collect::<Built<_>>()?,
            largest: [b.variable(lowest)?, b.variable(lowest)?],
            total: [b.variable(zero)?, b.variable(zero)?],
        };
        // The number of the item's first query.
        let (group, pair) = Indices::default().divide(b, lane, 4)?;
        let in_tile = scaled(b, warp, FRAGMENT)?;
        let query_number = b.binary(B::I32Add, first, in_tile)?;
        let query_number = b.binary(B::I32Add, query_number, group)?;
        self.run(b, shared, (&keys, &values), &queries, &rows, (first, query_number, pair))?;
        self.store(b, windows[3], batch, &rows, (query_number, pair))?;
        let program = std::mem::replace(b, KernelBuilder::new("")).finish()?;
        let groups = small(batches * blocks);
        Ok(LoweredKernel { program: Program::Built(program), groups, items: ITEMS, arguments })
    }

    /// The warp's queries as fragments, one for each step.
    fn queries(
        &self,
        b: &mut KernelBuilder,
        shared: Value,
        (window, batch): (Value, Value),
        first: Value,
        warp: Value,
    ) -> Built<Vec<[Value; 4]>> {
        let query = self.operands[0];
        let copies = RowCopies::new(b, query, (self.key_tile, QUERIES), window, batch, Some(first))?;
        copies.copy(b, shared, None)?;
        b.commit_copies()?;
        b.await_copies(0)?;
        b.barrier()?;
        let steps = steps_of(query.depth);
        let from = scaled(b, warp, FRAGMENT)?;
        let fragments = Fragments::new(b, self.key_tile, (Side::Left, true), from, (1, steps))?;
        let queries = (0..steps).map(|step| fragments.load(b, shared, 0, step)).collect::<Built<_>>()?;
        // Keys come where they were.
        b.barrier()?;
        Ok(queries)
    }

    fn run(
        &self,
        b: &mut KernelBuilder,
        shared: Value,
        (keys, values): (&RowCopies<'_>, &RowCopies<'_>),
        queries: &[[Value; 4]],
        rows: &Rows,
        (first, query, pair): (Value, Value, Value),
    ) -> Built<()> {
        let zero = b.i32(0)?;
        let key_fragments =
            Fragments::new(b, self.key_tile, (Side::Right, true), zero, (self.keys / FRAGMENT, small(queries.len())))?;
        let value_fragments = Fragments::new(
            b,
            self.value_tile,
            (Side::Right, false),
            zero,
            (steps_of(self.operands[2].depth), self.keys / FRAGMENT),
        )?;
        let tiles = self.sight.tiles(b, (first, QUERIES), self.keys)?;
        let (write, read) = (b.variable(zero)?, b.variable(zero)?);
        for copies in [keys, values] {
            let to = self.next_stage(b, shared, write)?;
            copies.copy(b, to, None)?;
            b.commit_copies()?;
        }
        let mut carried: Vec<Variable> = rows.sums.iter().flatten().copied().collect();
        carried.extend(rows.largest.iter().chain(&rows.total));
        carried.extend([write, read, keys.from, values.from]);
        b.count_to::<BuildError>(tiles, &carried, |b, tile| {
            let one = b.i32(1)?;
            let next = b.binary(B::I32Add, tile, one)?;
            let has_next = b.binary(B::I32LtU, next, tiles)?;
            let first_key = scaled(b, tile, self.keys)?;
            let from = self.arrived(b, shared, (write, read), keys, (next, has_next))?;
            let scores = self.scores(b, from, queries, &key_fragments)?;
            let scores = self.masked(b, scores, first_key, (first, query, pair))?;
            let powers = self.softmax(b, scores, rows)?;
            let from = self.arrived(b, shared, (write, read), values, (next, has_next))?;
            self.add_values(b, from, &powers, &value_fragments, rows)
        })
    }

    /// Waits for the next tile, and begins to copy the one after the next if there is one. Where the tile is.
    fn arrived(
        &self,
        b: &mut KernelBuilder,
        shared: Value,
        (write, read): (Variable, Variable),
        copies: &RowCopies<'_>,
        (next, has_next): (Value, Value),
    ) -> Built<Value> {
        b.await_copies(STAGES - 2)?;
        // Everybody's part is there, and nobody reads the tile before any more.
        b.barrier()?;
        let to = self.next_stage(b, shared, write)?;
        b.begin_if(has_next, &[copies.from])?;
        let before = scaled(b, next, self.keys)?;
        copies.copy(b, to, Some(before))?;
        b.end()?;
        b.commit_copies()?;
        self.next_stage(b, shared, read)
    }

    /// The place of a tile; the variable goes on to the next.
    fn next_stage(&self, b: &mut KernelBuilder, shared: Value, stage: Variable) -> Built<Value> {
        let now = b.get(stage)?;
        let (more, end, start) =
            (b.i32(self.stage_bytes.cast_signed())?, b.i32((STAGES * self.stage_bytes).cast_signed())?, b.i32(0)?);
        let next = b.binary(B::I32Add, now, more)?;
        let is_end = b.binary(B::I32Eq, next, end)?;
        let next = b.select(is_end, start, next)?;
        b.set(stage, next)?;
        b.binary(B::I32Add, shared, now)
    }

    /// Queries times keys, for each eight keys.
    fn scores(
        &self,
        b: &mut KernelBuilder,
        tile: Value,
        queries: &[[Value; 4]],
        keys: &Fragments,
    ) -> Built<Vec<[Value; 4]>> {
        let zero = b.f32(0.0)?;
        let mut scores = vec![[zero; 4]; (self.keys / 8) as usize];
        for (step, query) in (0..).zip(queries) {
            for n in 0..self.keys / FRAGMENT {
                let [a, c, d, e] = keys.load(b, tile, n, step)?;
                for (half, key) in [[a, c], [d, e]].into_iter().enumerate() {
                    let own = &mut scores[2 * n as usize + half];
                    *own = b.multiply_tiles(self.element, *query, key, *own)?;
                }
            }
        }
        Ok(scores)
    }

    /// Scores of keys that are not there, or not to be seen, are the lowest.
    fn masked(
        &self,
        b: &mut KernelBuilder,
        scores: Vec<[Value; 4]>,
        first_key: Value,
        (first, query, pair): (Value, Value, Value),
    ) -> Built<Vec<[Value; 4]>> {
        let Sight { keys, is_causal, .. } = self.sight;
        let is_cut = !keys.is_multiple_of(self.keys as usize);
        if !is_cut && !is_causal {
            return Ok(scores);
        }
        // Whole tiles that all of the group's queries see are left as they are.
        let more = b.i32(self.keys.cast_signed())?;
        let end = b.binary(B::I32Add, first_key, more)?;
        let all_keys = b.i32(small(keys).cast_signed())?;
        let mut needs_mask = b.binary(B::I32GtU, end, all_keys)?;
        if is_causal {
            let behind_more = b.i32(self.sight.behind() + 1)?;
            let seen = b.binary(B::I32Add, first, behind_more)?;
            let is_later = b.binary(B::I32GtS, end, seen)?;
            needs_mask = b.binary(B::I32Or, needs_mask, is_later)?;
        }
        let variables: Vec<[Variable; 4]> = scores
            .iter()
            .map(|four| Ok([b.variable(four[0])?, b.variable(four[1])?, b.variable(four[2])?, b.variable(four[3])?]))
            .collect::<Built<_>>()?;
        let carried: Vec<Variable> = variables.iter().flatten().copied().collect();
        b.begin_if(needs_mask, &carried)?;
        let lowest = b.f32(f32::NEG_INFINITY)?;
        let twice = times(b, pair, 2)?;
        let own_first = b.binary(B::I32Add, first_key, twice)?;
        // How many keys each of the item's two queries sees.
        let eight = b.i32(8)?;
        let below = b.binary(B::I32Add, query, eight)?;
        let ends = [self.sight.end(b, query)?, self.sight.end(b, below)?];
        for (n, four) in (0..).zip(&variables) {
            for (part, variable) in four.iter().enumerate() {
                let shift = b.i32(8 * n + i32::try_from(part % 2).unwrap_or(0))?;
                let key = b.binary(B::I32Add, own_first, shift)?;
                let is_seen = b.binary(B::I32LtS, key, ends[part / 2])?;
                let score = b.get(*variable)?;
                let score = b.select(is_seen, score, lowest)?;
                b.set(*variable, score)?;
            }
        }
        b.end()?;
        let get = |four: &[Variable; 4]| Ok([b.get(four[0])?, b.get(four[1])?, b.get(four[2])?, b.get(four[3])?]);
        variables.iter().map(get).collect()
    }

    /// Powers of the scores less the largest, as fragments of the next product; what was added up before is corrected.
    fn softmax(&self, b: &mut KernelBuilder, mut scores: Vec<[Value; 4]>, rows: &Rows) -> Built<Vec<[Value; 4]>> {
        let scale = b.f32(scale_of(self.operands[0].depth))?;
        for row in 0..2 {
            let before = b.get(rows.largest[row])?;
            let mut largest = before;
            for four in &scores {
                largest = b.max_single(largest, four[2 * row])?;
                largest = b.max_single(largest, four[2 * row + 1])?;
            }
            // The four items that have the same query.
            for mask in [1, 2] {
                let other = b.shuffle(largest, mask)?;
                largest = b.max_single(largest, other)?;
            }
            b.set(rows.largest[row], largest)?;
            let (less, correction) = corrected(b, before, largest, scale)?;
            let total = b.get(rows.total[row])?;
            let mut total = b.binary(B::F32Mul, total, correction)?;
            for four in &mut scores {
                for score in &mut four[2 * row..2 * row + 2] {
                    let power = b.fma(*score, scale, less)?;
                    *score = b.exp2_approximate(power)?;
                    total = b.binary(B::F32Add, total, *score)?;
                }
            }
            b.set(rows.total[row], total)?;
            for four in &rows.sums {
                for variable in &four[2 * row..2 * row + 2] {
                    let value = b.get(*variable)?;
                    let value = b.binary(B::F32Mul, value, correction)?;
                    b.set(*variable, value)?;
                }
            }
        }
        // Scores of 16 keys lie as a left operand's fragment does.
        let half = half_type(self.kernel.dtype).ok_or(BuildError::Structure { what: "attention is of halves" })?;
        let mut fragments = Vec::new();
        for two in scores.chunks(2) {
            let [low, high] = two else { return Err(BuildError::Structure { what: "keys come by sixteens" }) };
            fragments.push([
                b.pack_halves(half, low[0], low[1])?,
                b.pack_halves(half, low[2], low[3])?,
                b.pack_halves(half, high[0], high[1])?,
                b.pack_halves(half, high[2], high[3])?,
            ]);
        }
        Ok(fragments)
    }

    fn add_values(
        &self,
        b: &mut KernelBuilder,
        tile: Value,
        powers: &[[Value; 4]],
        values: &Fragments,
        rows: &Rows,
    ) -> Built<()> {
        for (step, power) in (0..).zip(powers) {
            for n in 0..steps_of(self.operands[2].depth) {
                let [a, c, d, e] = values.load(b, tile, n, step)?;
                for (half, value) in [[a, c], [d, e]].into_iter().enumerate() {
                    let own = &rows.sums[2 * n as usize + half];
                    let before = [b.get(own[0])?, b.get(own[1])?, b.get(own[2])?, b.get(own[3])?];
                    let after = b.multiply_tiles(self.element, *power, value, before)?;
                    own.iter().zip(after).try_for_each(|(variable, value)| b.set(*variable, value))?;
                }
            }
        }
        Ok(())
    }

    /// Divides by the sums of powers, and stores.
    fn store(
        &self,
        b: &mut KernelBuilder,
        to: Value,
        batch: Value,
        rows: &Rows,
        (query, pair): (Value, Value),
    ) -> Built<()> {
        let (queries, width) = (self.operands[0].along, self.operands[2].depth);
        let half = half_type(self.kernel.dtype).ok_or(BuildError::Structure { what: "attention is of halves" })?;
        let end = b.i32(small(queries).cast_signed())?;
        let matrix = times(b, batch, (queries * width).cast_signed())?;
        let column = times(b, pair, 2)?;
        for row in 0..2 {
            let mut total = b.get(rows.total[row])?;
            for mask in [1, 2] {
                let other = b.shuffle(total, mask)?;
                total = b.binary(B::F32Add, total, other)?;
            }
            let one = b.f32(1.0)?;
            let part = b.binary(B::F32Div, one, total)?;
            let shift = b.i32(8 * i32::try_from(row).unwrap_or(0))?;
            let number = b.binary(B::I32Add, query, shift)?;
            let is_row = b.binary(B::I32LtU, number, end)?;
            b.begin_if(is_row, &[])?;
            let line = times(b, number, width.cast_signed())?;
            let place = sum(b, &[Some(matrix), Some(line), Some(column)], 0)?;
            let at = b.element(to, place, ELEMENT_BYTES)?;
            for (n, four) in (0..).zip(&rows.sums) {
                let (low, high) = (b.get(four[2 * row])?, b.get(four[2 * row + 1])?);
                let (low, high) = (b.binary(B::F32Mul, low, part)?, b.binary(B::F32Mul, high, part)?);
                let word = b.pack_halves(half, low, high)?;
                self.store_pair(b, word, at, 8 * n, column)?;
            }
            b.end()?;
        }
        Ok(())
    }

    /// Two elements from a column on, as far as the result has them.
    fn store_pair(&self, b: &mut KernelBuilder, word: Value, at: Value, from: u32, column: Value) -> Built<()> {
        let width = small(self.operands[2].depth);
        let offset = from * ELEMENT_BYTES;
        if from + 8 <= width && width.is_multiple_of(2) {
            return b.store(word, at, offset);
        }
        let end = b.i32(width.cast_signed() - from.cast_signed())?;
        let (one, shift) = (b.i32(1)?, b.i32(16)?);
        let second = b.binary(B::I32Add, column, one)?;
        let high = b.binary(B::I32ShrU, word, shift)?;
        for (column, half, offset) in [(column, word, offset), (second, high, offset + ELEMENT_BYTES)] {
            let is_column = b.binary(B::I32LtS, column, end)?;
            b.begin_if(is_column, &[])?;
            b.store_narrow(ELEMENT_BYTES, half, at, offset)?;
            b.end()?;
        }
        Ok(())
    }
}
