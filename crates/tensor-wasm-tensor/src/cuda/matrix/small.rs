//! A product in single precision that is too small to be cut into large tiles: of one row, of a layer that is trained
//! in batches, of a head of attention. Few groups would have all the work, and a library is not made for it either (256
//! by 256 by 256 takes cuBLASLt 16 µs on an H200, most of it in one group after the other's loads).
//!
//! A group of 256 items has a tile of 4 or 16 rows by 32 columns, of which an item adds up 4 by 4. What is left of the
//! items cuts the depth into slices, four steps at a time by turns, so that all of them have loads under way; the
//! operands come straight from memory and its caches. The slices' sums meet in shared memory.

use tensor_wasm_jit::build::{Axis, BinaryOp as B, BuildError, IdKind, KernelBuilder, Value, Variable};
use tensor_wasm_jit::{Target, Ty};

use super::super::index::{Axes, Indices, scaled, small, sum, times};
use super::super::map::{Argument, Epilogue, LoweredKernel, LoweredStep};
use super::super::numbers::Built;
use super::{Product, batches, sizes};
use crate::dtype::DType;
use crate::schedule::plan::{BufferView, MapKernel, SpecialKernel};

const ITEMS: u32 = 256;

/// Rows, columns and steps of the depth that an item has at once.
const EACH: u32 = 4;

/// Columns of a tile, and items side by side.
const COLUMNS: u32 = 32;
const ACROSS: u32 = COLUMNS / EACH;

/// Multiplications up to which it should pay: 256 by 256 by 1024. Beyond, what items load again and again is too much.
/// Fewer in tests, so that other kernels and the library are there to be compared.
const WORK_MAX: usize = if cfg!(test) { 1 << 10 } else { 1 << 26 };

/// Steps of the depth up to which it should pay: one group has all of them, one after the other. A library cuts what is
/// deeper among groups.
const DEPTH_MAX: usize = 4096;

/// The largest stride of an operand: an item's steps are 256 of them apart at most, which in bytes has to be a number
/// of 32 bits.
const STRIDE_MAX: isize = (i32::MAX / (4 * ITEMS.cast_signed())) as isize;

/// Groups that a device should have: fewer, and tiles have fewer rows and depths more slices.
const GROUPS_MIN: usize = 132;

/// Steps of four that are loaded together, where they divide a slice.
const UNROLLED: u32 = 2;

/// Whether a product is one of these.
pub(super) fn pays(kernel: &SpecialKernel) -> bool {
    let [left, right] = &kernel.inputs[..] else { return false };
    let (m, n) = sizes(kernel);
    let depth = left.layout.shape[kernel.shape.rank() - 1];
    let work = [m, n, depth].into_iter().try_fold(batches(kernel), usize::checked_mul);
    // Offsets from an address have no sign.
    let is_forward = |view: &BufferView| view.layout.strides().iter().all(|stride| (0..=STRIDE_MAX).contains(stride));
    kernel.dtype == DType::F32
        && !super::super::is_tf32()
        && work.is_some_and(|work| (1..=WORK_MAX).contains(&work))
        && depth <= DEPTH_MAX
        && is_forward(left)
        && is_forward(right)
}

/// Rows of a tile in items, and slices of the depth.
#[derive(Debug, Clone, Copy)]
struct Tile {
    down: u32,
}

impl Tile {
    fn of(kernel: &SpecialKernel) -> Tile {
        let (m, n) = sizes(kernel);
        let columns = n.div_ceil(COLUMNS as usize) * batches(kernel);
        let is_large = m > EACH as usize && columns * m.div_ceil(16) >= GROUPS_MIN;
        Tile { down: if is_large { 4 } else { 1 } }
    }

    fn rows(self) -> u32 {
        EACH * self.down
    }

    fn slices(self) -> u32 {
        ITEMS / (ACROSS * self.down)
    }

    fn outputs(self) -> u32 {
        self.rows() * COLUMNS
    }
}

pub(super) fn lower(kernel: &SpecialKernel, after: &MapKernel, target: Target) -> Built<LoweredStep> {
    let tile = Tile::of(kernel);
    let (_, n) = sizes(kernel);
    let lanes = if tile.outputs() >= 2 * ITEMS && n.is_multiple_of(2) { 2 } else { 1 };
    let arguments = kernel.inputs.iter().map(|view| Argument::Buffer(view.source)).collect();
    let epilogue = Epilogue::new(after, kernel.slot, lanes, ITEMS, arguments, target)?;
    let product = Product { kernel, operands: Vec::new(), epilogue, lanes };
    Ok(LoweredStep { kernels: vec![build(product, tile)?], scratch_bytes: Vec::new() })
}

fn build(mut product: Product<'_>, shape: Tile) -> Built<LoweredKernel> {
    let kernel = product.kernel;
    let [left, right] = &kernel.inputs[..] else {
        return Err(BuildError::Structure { what: "a product has two operands" });
    };
    let rank = kernel.shape.rank();
    let depth = left.layout.shape[rank - 1];
    let windows = [
        product.epilogue.window(Argument::Buffer(left.source))?,
        product.epilogue.window(Argument::Buffer(right.source))?,
    ];
    product.epilogue.begin()?;
    let (tile, groups) = product.position(shape.rows(), COLUMNS)?;
    let b = product.epilogue.builder();
    let item = b.id(IdKind::Local, Axis::X)?;
    let mut indices = Indices::default();
    let (slice, within) = indices.divide(b, item, ACROSS * shape.down)?;
    let (down, across) = indices.divide(b, within, ACROSS)?;
    let (row, column) = (scaled(b, down, EACH)?, scaled(b, across, EACH)?);
    let (first_row, first_column) = (b.binary(B::I32Add, tile.row, row)?, b.binary(B::I32Add, tile.column, column)?);
    let slices = Slices { count: shape.slices(), own: slice, depth };
    let rows = Side { view: left, along: rank - 2, deep: rank - 1, tile: shape.rows() };
    let columns = Side { view: right, along: rank - 1, deep: rank - 2, tile: COLUMNS };
    let left = rows.blocks(b, windows[0], tile.batch, first_row, &slices)?;
    let right = columns.blocks(b, windows[1], tile.batch, first_column, &slices)?;
    let sums = run(b, &slices, &left, &right)?;
    // Where the slices meet.
    let shared = b.shared(4 * shape.slices() * shape.outputs())?;
    let own = scaled(b, slice, 4 * shape.outputs())?;
    let line = scaled(b, row, 4 * COLUMNS)?;
    let to = sum(b, &[Some(shared), Some(own), Some(line)], 0)?;
    let to = b.element(to, column, 4)?;
    for (n, value) in (0..).zip(&sums) {
        b.store(*value, to, n / EACH * 4 * COLUMNS + n % EACH * 4)?;
    }
    b.barrier()?;
    let lanes = small(product.lanes);
    let count = shape.outputs() / lanes;
    for turn in 0..count.div_ceil(ITEMS) {
        let b = product.epilogue.builder();
        let more = b.i32((turn * ITEMS).cast_signed())?;
        let number = b.binary(B::I32Add, item, more)?;
        let end = b.i32(count.cast_signed())?;
        let is_one = b.binary(B::I32LtU, number, end)?;
        b.begin_if(is_one, &[])?;
        let first = scaled(b, number, lanes)?;
        let from = b.element(shared, first, 4)?;
        let mut totals = Vec::new();
        for lane in 0..lanes {
            let mut parts = Vec::new();
            for slice in 0..shape.slices() {
                parts.push(b.load(Ty::F32, from, 4 * (slice * shape.outputs() + lane))?);
            }
            totals.push(added(b, parts)?);
        }
        let (own_row, own_column) = Indices::default().divide(b, first, COLUMNS)?;
        product.store_elements((tile.batch, tile.row, tile.column), (own_row, own_column), &totals)?;
        product.epilogue.builder().end()?;
    }
    product.epilogue.finish(groups)
}

/// Neighbours first, so that sums do not wait for each other.
fn added(b: &mut KernelBuilder, mut parts: Vec<Value>) -> Built<Value> {
    while parts.len() > 1 {
        let mut halves = Vec::with_capacity(parts.len().div_ceil(2));
        for pair in parts.chunks(2) {
            halves.push(if let [a, c] = pair { b.binary(B::F32Add, *a, *c)? } else { pair[0] });
        }
        parts = halves;
    }
    parts.first().copied().ok_or(BuildError::Structure { what: "a sum of nothing" })
}

impl Product<'_> {
    /// Computes and stores what follows some elements of a row, if the result has them.
    fn store_elements(
        &mut self,
        (batch, first_row, first_column): (Value, Value, Value),
        (row, column): (Value, Value),
        elements: &[Value],
    ) -> Built<()> {
        let (m, n) = sizes(self.kernel);
        let b = self.epilogue.builder();
        let (row, column) = (b.binary(B::I32Add, row, first_row)?, b.binary(B::I32Add, column, first_column)?);
        let (rows, columns) = (b.i32(small(m).cast_signed())?, b.i32(small(n).cast_signed())?);
        let (is_row, is_column) = (b.binary(B::I32LtU, row, rows)?, b.binary(B::I32LtU, column, columns)?);
        let is_inside = b.binary(B::I32And, is_row, is_column)?;
        b.begin_if(is_inside, &[])?;
        let matrix = times(b, batch, (m * n).cast_signed())?;
        let line = b.binary(B::I32Mul, row, columns)?;
        let number = sum(b, &[Some(matrix), Some(line), Some(column)], 0)?;
        self.epilogue.store(number, elements)?;
        self.epilogue.builder().end()
    }
}

/// How the depth is shared out.
struct Slices {
    count: u32,
    own: Value,
    depth: usize,
}

impl Slices {
    /// Steps of four, the last perhaps of fewer.
    fn chunks(&self) -> u32 {
        small(self.depth).div_ceil(EACH)
    }

    /// Steps that are loaded together; none if slices are not all as long.
    fn unrolled(&self) -> Option<u32> {
        let is_whole = self.depth.is_multiple_of(EACH as usize);
        [UNROLLED, 1].into_iter().find(|by| is_whole && self.chunks().is_multiple_of(self.count * by))
    }
}

/// An operand: which of its axes is the result's, and which the depth.
struct Side<'v> {
    view: &'v BufferView,
    along: usize,
    deep: usize,
    /// How many of the result's rows or columns a tile has.
    tile: u32,
}

/// Where an item's block of an operand is, four along the result by four steps.
struct Blocks {
    /// The first element of the block, or of each of its lines where they are not always next to each other.
    at: Vec<Variable>,
    /// In bytes.
    along: u32,
    deep: u32,
}

impl Side<'_> {
    fn blocks(
        &self,
        b: &mut KernelBuilder,
        window: Value,
        batch: Value,
        first: Value,
        slices: &Slices,
    ) -> Built<Blocks> {
        let layout = &self.view.layout;
        let (len, rank) = (layout.shape[self.along], layout.shape.rank());
        let strides = [self.along, self.deep].map(|axis| layout.strides()[axis]);
        let heads = Axes::of(layout, |axis| axis < rank - 2);
        let head = Indices::default().place(b, &heads, batch)?;
        let own = scaled(b, slices.own, EACH)?;
        let deep = times(b, own, strides[1])?;
        let is_whole = len.is_multiple_of(EACH as usize);
        let mut at = Vec::new();
        for n in 0..if is_whole { 1 } else { EACH } {
            let mut place = first;
            if n > 0 {
                let more = b.i32(n.cast_signed())?;
                place = b.binary(B::I32Add, first, more)?;
            }
            // What is beyond the end is computed of what is there, and not stored.
            if !len.is_multiple_of(self.tile as usize) {
                let last = b.i32((small(len) - if is_whole { EACH } else { 1 }).cast_signed())?;
                let is_less = b.binary(B::I32LtU, place, last)?;
                place = b.select(is_less, place, last)?;
            }
            let line = times(b, place, strides[0])?;
            let place = sum(b, &[head, Some(line), Some(deep)], layout.offset)?;
            let address = b.element(window, place, 4)?;
            at.push(b.variable(address)?);
        }
        let [along, deep] = strides.map(|stride| 4 * small(stride.unsigned_abs()));
        Ok(Blocks { at, along, deep })
    }
}

impl Blocks {
    /// Loads the block that is so many bytes further, step by step of the depth; `is_step` says which steps there are,
    /// if not all.
    fn load(&self, b: &mut KernelBuilder, further: u32, is_step: Option<&[Value]>) -> Built<Vec<Value>> {
        let mut loaded = vec![None; (EACH * EACH) as usize];
        // Those that lie together one after the other: they are loaded at once.
        let is_deep_inner = self.deep <= self.along;
        for n in 0..EACH * EACH {
            let (outer, inner) = (n / EACH, n % EACH);
            let (line, step) = if is_deep_inner { (outer, inner) } else { (inner, outer) };
            let (at, across) = match &self.at[..] {
                [whole] => (*whole, line * self.along),
                lines => (lines[line as usize], 0),
            };
            let at = b.get(at)?;
            let offset = further + across + step * self.deep;
            let value = match is_step {
                None => b.load(Ty::F32, at, offset)?,
                Some(is_step) => {
                    let more = b.i32((step * self.deep).cast_signed())?;
                    let there = b.binary(B::I32Add, at, more)?;
                    let there = b.select(is_step[step as usize], there, at)?;
                    let (value, nothing) = (b.load(Ty::F32, there, further + across)?, b.f32(0.0)?);
                    b.select(is_step[step as usize], value, nothing)?
                }
            };
            loaded[(step * EACH + line) as usize] = Some(value);
        }
        loaded.into_iter().map(|value| value.ok_or(BuildError::Structure { what: "an element is missing" })).collect()
    }

    fn advance(&self, b: &mut KernelBuilder, steps: u32) -> Built<()> {
        let bytes = b.i32((steps * self.deep).cast_signed())?;
        for at in &self.at {
            let now = b.get(*at)?;
            let next = b.binary(B::I32Add, now, bytes)?;
            b.set(*at, next)?;
        }
        Ok(())
    }
}

/// Adds up the item's slice: its sums, row by row.
fn run(b: &mut KernelBuilder, slices: &Slices, left: &Blocks, right: &Blocks) -> Built<Vec<Value>> {
    let zero = b.f32(0.0)?;
    let sums: Vec<Variable> = (0..EACH * EACH).map(|_| b.variable(zero)).collect::<Built<_>>()?;
    let mut carried = sums.clone();
    carried.extend(left.at.iter().chain(&right.at));
    let apart = slices.count * EACH;
    match slices.unrolled() {
        Some(unrolled) => {
            let rounds = b.i32((slices.chunks() / (slices.count * unrolled)).cast_signed())?;
            b.count_to::<BuildError>(rounds, &carried, |b, _| {
                let mut loaded = Vec::new();
                for n in 0..unrolled {
                    let rows = left.load(b, n * apart * left.deep, None)?;
                    loaded.push((rows, right.load(b, n * apart * right.deep, None)?));
                }
                loaded.iter().try_for_each(|(rows, columns)| multiply(b, &sums, rows, columns))?;
                left.advance(b, unrolled * apart)?;
                right.advance(b, unrolled * apart)
            })?;
        }
        None => {
            let rounds = b.i32(slices.chunks().div_ceil(slices.count).cast_signed())?;
            b.count_to::<BuildError>(rounds, &carried, |b, round| {
                let before = scaled(b, round, slices.count)?;
                let chunk = b.binary(B::I32Add, before, slices.own)?;
                let end = b.i32(slices.chunks().cast_signed())?;
                let is_chunk = b.binary(B::I32LtU, chunk, end)?;
                b.begin_if(is_chunk, &carried)?;
                let mut is_step = Vec::new();
                if !slices.depth.is_multiple_of(EACH as usize) {
                    let first = scaled(b, chunk, EACH)?;
                    let end = b.i32(small(slices.depth).cast_signed())?;
                    for n in 0..EACH {
                        let more = b.i32(n.cast_signed())?;
                        let step = b.binary(B::I32Add, first, more)?;
                        is_step.push(b.binary(B::I32LtU, step, end)?);
                    }
                }
                let is_step = (!is_step.is_empty()).then_some(&is_step[..]);
                let (rows, columns) = (left.load(b, 0, is_step)?, right.load(b, 0, is_step)?);
                multiply(b, &sums, &rows, &columns)?;
                left.advance(b, apart)?;
                right.advance(b, apart)?;
                b.end()
            })?;
        }
    }
    sums.iter().map(|sum| b.get(*sum)).collect()
}

/// Adds the products of four steps.
fn multiply(b: &mut KernelBuilder, sums: &[Variable], rows: &[Value], columns: &[Value]) -> Built<()> {
    let each = EACH as usize;
    let mut now: Vec<Value> = sums.iter().map(|sum| b.get(*sum)).collect::<Built<_>>()?;
    for (rows, columns) in rows.chunks(each).zip(columns.chunks(each)) {
        for (n, sum) in now.iter_mut().enumerate() {
            *sum = b.fma(rows[n / each], columns[n % each], *sum)?;
        }
    }
    sums.iter().zip(now).try_for_each(|(variable, value)| b.set(*variable, value))
}
