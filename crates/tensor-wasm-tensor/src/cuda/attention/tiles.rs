//! Products of tiles in single precision, by a group of 256 items, 16 in a line: what attention without tensor cores
//! is made of. One kind multiplies rows of two operands with each other (scores), the other multiplies such a tile,
//! which lies in shared memory by then, with rows of an operand, and adds that to sums in registers. Operands come in
//! slices, however they lie: the next one is loaded to registers while one is multiplied, and stored to the other of
//! two places in shared memory then. Sums are added up in a fixed order.

use tensor_wasm_jit::Ty;
use tensor_wasm_jit::build::{Axis, BinaryOp as B, BuildError, IdKind, KernelBuilder, Value, Variable};

use super::super::index::{Axes, Indices, scaled, small, sum, times};
use super::super::map::{Argument, LoweredKernel, Program, load_one, store_one};
use super::super::numbers::Built;
use crate::dtype::DType;
use crate::schedule::plan::BufferView;

/// Items of a group, and those of a line, which have the same rows.
const ITEMS: u32 = 256;
const LINE: u32 = 16;

/// Rows and columns of a tile.
pub(super) const SIDE: u32 = 64;

/// Rows and columns of a tile that an item has, side by side.
pub(super) const EACH: u32 = SIDE / LINE;

/// Elements of a width that are in shared memory at once.
const DEPTH: u32 = 16;

/// Elements of a slice of rows at most: as many as one for the other kind of product has.
const SLICE_ELEMENTS_MAX: u32 = 2 * DEPTH * SIDE;

/// Bytes of a line of a tile: four floats more than it has, so that what is stored across lines is in more banks.
const LINE_BYTES: u32 = (SIDE + 4) * 4;

/// Bytes of the slices of both operands.
const STAGE_BYTES: u32 = 2 * DEPTH * LINE_BYTES;

const _: () = assert!(SLICE_ELEMENTS_MAX * 4 <= STAGE_BYTES);

/// Elements of a row at most: beyond, an item's sums are more than its registers.
pub(super) const WIDTH_MAX: usize = 256;

/// Matrices that an operand has, one for each head, however it lies.
pub(super) struct Matrices {
    dtype: DType,
    window: Value,
    /// The place of the head's first element.
    start: Value,
    rows: usize,
    width: usize,
    strides: [isize; 2],
}

/// A part of a matrix that is loaded at once, and how it lies in shared memory: so many bytes from one row, and from
/// one column, to the next.
#[derive(Debug, Clone, Copy)]
struct Slice {
    rows: u32,
    columns: u32,
    row_bytes: u32,
    column_bytes: u32,
}

/// Where an item's elements of a slice are: the first, and how many rows and columns come from one to the next.
struct SlicePlaces {
    row: Value,
    column: Value,
    apart: [u32; 2],
}

impl Slice {
    fn elements(self) -> u32 {
        self.rows * self.columns / ITEMS
    }

    /// Neighbouring items have neighbours along rows, or along columns.
    fn places(self, b: &mut KernelBuilder, is_along_rows: bool) -> Built<SlicePlaces> {
        let item = b.id(IdKind::Local, Axis::X)?;
        if !is_along_rows {
            let (column, row) = Indices::default().divide(b, item, self.rows)?;
            return Ok(SlicePlaces { row, column, apart: [0, ITEMS / self.rows] });
        }
        // Whole rows, or else a part of each.
        let is_whole = ITEMS.is_multiple_of(self.columns);
        let len = if is_whole { self.columns } else { ITEMS / self.rows };
        let (row, column) = Indices::default().divide(b, item, len)?;
        Ok(SlicePlaces { row, column, apart: if is_whole { [ITEMS / len, 0] } else { [0, len] } })
    }
}

impl Matrices {
    pub(super) fn new(b: &mut KernelBuilder, view: &BufferView, window: Value, head: Value) -> Built<Matrices> {
        let (layout, rank) = (&view.layout, view.layout.shape.rank());
        let place = Indices::default().place(b, &Axes::of(layout, |axis| axis + 2 < rank), head)?;
        let start = sum(b, &[place], layout.offset)?;
        let strides = [layout.strides()[rank - 2], layout.strides()[rank - 1]];
        let (rows, width) = (layout.shape[rank - 2], layout.shape[rank - 1]);
        Ok(Matrices { dtype: view.dtype, window, start, rows, width, strides })
    }

    fn bytes(&self) -> u32 {
        small(self.dtype.size())
    }

    fn is_along_rows(&self) -> bool {
        self.strides[1].unsigned_abs() <= self.strides[0].unsigned_abs()
    }

    fn address(&self, b: &mut KernelBuilder, row: Value, column: Value) -> Built<Value> {
        let (row, column) = (times(b, row, self.strides[0])?, times(b, column, self.strides[1])?);
        let place = sum(b, &[Some(self.start), Some(row), Some(column)], 0)?;
        b.element(self.window, place, self.bytes())
    }

    /// An element in single precision; zero where there is none.
    pub(super) fn element(&self, b: &mut KernelBuilder, row: Value, column: Value) -> Built<Value> {
        let (rows, width) = (b.i32(small(self.rows).cast_signed())?, b.i32(small(self.width).cast_signed())?);
        let (is_row, is_column) = (b.binary(B::I32LtU, row, rows)?, b.binary(B::I32LtU, column, width)?);
        let is_there = b.binary(B::I32And, is_row, is_column)?;
        let first = b.i32(0)?;
        let (row, column) = (b.select(is_there, row, first)?, b.select(is_there, column, first)?);
        let at = self.address(b, row, column)?;
        let value = load_one(b, self.dtype, at, 0)?;
        let nothing = b.f32(0.0)?;
        b.select(is_there, value, nothing)
    }

    /// The item's elements of a slice from a row and a column on; zeros where there are none.
    fn load(&self, b: &mut KernelBuilder, slice: Slice, (row, column): (Value, Value)) -> Built<Vec<Value>> {
        let places = slice.places(b, self.is_along_rows())?;
        let (row, column) = (b.binary(B::I32Add, row, places.row)?, b.binary(B::I32Add, column, places.column)?);
        let at = self.address(b, row, column)?;
        let is_whole = self.rows.is_multiple_of(SIDE as usize) && self.width.is_multiple_of(slice.columns as usize);
        // Bytes from one element to the next: addresses have 32 bits.
        let [rows, columns] = places.apart.map(|count| (count as usize).cast_signed());
        let apart = rows.wrapping_mul(self.strides[0]).wrapping_add(columns.wrapping_mul(self.strides[1]));
        let bytes = |n: u32| (n as usize * self.dtype.size()).cast_signed();
        let far = |n: u32| apart.checked_mul(bytes(n));
        let is_near = |n: u32| far(n).is_some_and(|far| (0..=i32::MAX as isize).contains(&far));
        let mut loaded = Vec::new();
        if is_whole && is_near(slice.elements()) {
            for n in 0..slice.elements() {
                let offset = far(n).and_then(|far| u32::try_from(far).ok()).unwrap_or_default();
                loaded.push(load_one(b, self.dtype, at, offset)?);
            }
            return Ok(loaded);
        }
        let first = b.element(self.window, self.start, self.bytes())?;
        let (end, line_end) = (b.i32(small(self.rows).cast_signed())?, b.i32(small(self.width).cast_signed())?);
        let nothing = b.f32(0.0)?;
        for n in 0..slice.elements() {
            let [more_rows, more] = places.apart.map(|count| (n * count).cast_signed());
            let (more_rows, more) = (b.i32(more_rows)?, b.i32(more)?);
            let (own_row, own) = (b.binary(B::I32Add, row, more_rows)?, b.binary(B::I32Add, column, more)?);
            let (is_row, is_column) = (b.binary(B::I32LtU, own_row, end)?, b.binary(B::I32LtU, own, line_end)?);
            let is_there = b.binary(B::I32And, is_row, is_column)?;
            let far = apart.wrapping_mul(bytes(n));
            #[expect(clippy::cast_possible_truncation, reason = "addresses have 32 bits")]
            let far = b.i32(far as i32)?;
            let at = b.binary(B::I32Add, at, far)?;
            // What is not there is not read.
            let at = b.select(is_there, at, first)?;
            let value = load_one(b, self.dtype, at, 0)?;
            loaded.push(b.select(is_there, value, nothing)?);
        }
        Ok(loaded)
    }

    /// Stores them to shared memory.
    fn store(&self, b: &mut KernelBuilder, slice: Slice, to: Value, loaded: &[Value]) -> Built<()> {
        let SlicePlaces { row, column, apart } = slice.places(b, self.is_along_rows())?;
        let (row, column) = (scaled(b, row, slice.row_bytes)?, scaled(b, column, slice.column_bytes)?);
        let at = sum(b, &[Some(to), Some(row), Some(column)], 0)?;
        let apart = apart[0] * slice.row_bytes + apart[1] * slice.column_bytes;
        (0..).zip(loaded).try_for_each(|(n, value)| b.store(*value, at, n * apart))
    }
}

/// How the columns of sums are shared out: an item has pieces of some side by side, one for each 16 pieces.
#[derive(Debug, Clone, Copy)]
pub(super) struct Columns {
    width: usize,
    piece: u32,
    pieces: u32,
}

impl Columns {
    /// With as few columns too many as possible, and then in large pieces. Slices are multiples of the group.
    pub(super) fn of(width: usize) -> Columns {
        let pieces = |piece: u32| small(width).div_ceil(LINE * piece);
        let piece_min = if width > (SLICE_ELEMENTS_MAX / DEPTH) as usize { 2 } else { 1 };
        let possible = [4, 2, 1].into_iter().filter(|piece| *piece >= piece_min);
        let piece = possible.min_by_key(|piece| pieces(*piece) * piece).unwrap_or(4);
        Columns { width, piece, pieces: pieces(piece) }
    }

    /// Those of an item.
    fn own(self) -> u32 {
        self.piece * self.pieces
    }

    /// Of all items.
    fn all(self) -> u32 {
        self.own() * LINE
    }

    /// How far an item's column is from its first.
    fn offset(self, n: u32) -> u32 {
        n / self.piece * self.piece * LINE + n % self.piece
    }

    /// Rows of an operand that are in shared memory at once.
    fn slice(self) -> Slice {
        let rows = if self.all() * DEPTH <= SLICE_ELEMENTS_MAX { DEPTH } else { DEPTH / 2 };
        Slice { rows, columns: self.all(), row_bytes: self.all() * 4, column_bytes: 4 }
    }
}

/// What an item has of sums over tiles: four rows, of each the columns that are its own.
pub(super) struct TileSums {
    pub(super) columns: Columns,
    pub(super) sums: Vec<Variable>,
}

impl TileSums {
    pub(super) fn new(b: &mut KernelBuilder, width: usize) -> Built<TileSums> {
        let (columns, zero) = (Columns::of(width), b.f32(0.0)?);
        let sums = (0..EACH * columns.own()).map(|_| b.variable(zero)).collect::<Built<_>>()?;
        Ok(TileSums { columns, sums })
    }

    /// Those of each row.
    pub(super) fn rows(&self) -> impl Iterator<Item = &[Variable]> {
        self.sums.chunks(self.columns.own() as usize)
    }
}

/// A kernel of one group for each tile of rows of each head.
pub(super) struct TileKernel {
    arguments: Vec<Argument>,
    windows: Vec<Value>,
    groups: u32,
    /// Which head the group's tile is in, and its number there.
    pub(super) head: Value,
    pub(super) block: Value,
    /// The item's first row and column in a tile, and its place in a line.
    pub(super) row: Value,
    pub(super) column: Value,
    lane: Value,
    stages: Value,
    tile: Value,
}

impl TileKernel {
    pub(super) fn new(
        b: &mut KernelBuilder,
        arguments: Vec<Argument>,
        (heads, rows): (usize, usize),
    ) -> Built<TileKernel> {
        let windows = arguments.iter().map(|_| b.window()).collect::<Built<_>>()?;
        let blocks = small(rows.div_ceil(SIDE as usize));
        let group = b.id(IdKind::Group, Axis::X)?;
        let (head, block) = Indices::default().divide(b, group, blocks)?;
        let (stages, tile) = (b.shared(2 * STAGE_BYTES)?, b.shared(SIDE * LINE_BYTES)?);
        let item = b.id(IdKind::Local, Axis::X)?;
        let (line, lane) = Indices::default().divide(b, item, LINE)?;
        let (row, column) = (scaled(b, line, EACH)?, scaled(b, lane, EACH)?);
        let groups = small(heads) * blocks;
        Ok(TileKernel { arguments, windows, groups, head, block, row, column, lane, stages, tile })
    }

    /// The matrices of the group's head of what a window is given.
    pub(super) fn matrices(&self, b: &mut KernelBuilder, view: &BufferView, window: usize) -> Built<Matrices> {
        Matrices::new(b, view, self.windows[window], self.head)
    }

    pub(super) fn window(&self, number: usize) -> Value {
        self.windows[number]
    }

    /// Sums of products of two operands over each of the item's rows of a tile that begins there: all items of a line
    /// have them.
    pub(super) fn row_products(
        &self,
        b: &mut KernelBuilder,
        (left, right): (&Matrices, &Matrices),
        first: Value,
    ) -> Built<Vec<Value>> {
        let mut sums = Vec::new();
        for row in 0..EACH {
            let row = numbered(b, first, self.row, row)?;
            let mut sum = b.f32(0.0)?;
            for n in 0..small(left.width).div_ceil(LINE) {
                let zero = b.i32(0)?;
                let column = numbered(b, self.lane, zero, n * LINE)?;
                let (left, right) = (left.element(b, row, column)?, right.element(b, row, column)?);
                sum = b.fma(left, right, sum)?;
            }
            sums.push(of_line(b, sum, |b, x, y| b.binary(B::F32Add, x, y))?);
        }
        Ok(sums)
    }

    pub(super) fn finish(self, b: KernelBuilder) -> Built<LoweredKernel> {
        let program = Program::Built(b.finish()?);
        Ok(LoweredKernel { program, groups: self.groups, items: ITEMS, arguments: self.arguments })
    }

    /// Multiplies slices one after the other.
    fn sliced(
        &self,
        b: &mut KernelBuilder,
        count: u32,
        carried: &[Variable],
        (load, store, multiply): (
            impl Fn(&mut KernelBuilder, Value) -> Built<Vec<Value>>,
            impl Fn(&mut KernelBuilder, Value, &[Value]) -> Built<()>,
            impl Fn(&mut KernelBuilder, Value, Value) -> Built<()>,
        ),
    ) -> Built<()> {
        let stages = self.stages;
        let stage = |b: &mut KernelBuilder, number: Value| {
            let one = b.i32(1)?;
            let odd = b.binary(B::I32And, number, one)?;
            let from = scaled(b, odd, STAGE_BYTES)?;
            b.binary(B::I32Add, stages, from)
        };
        let zero = b.i32(0)?;
        let first = load(b, zero)?;
        // Nobody reads any more what was there before.
        b.barrier()?;
        store(b, stages, &first)?;
        b.barrier()?;
        let last = b.i32((count - 1).cast_signed())?;
        b.count_to::<BuildError>(last, carried, |b, number| {
            let one = b.i32(1)?;
            let next = b.binary(B::I32Add, number, one)?;
            let loaded = load(b, next)?;
            let from = stage(b, number)?;
            multiply(b, from, number)?;
            let to = stage(b, next)?;
            store(b, to, &loaded)?;
            b.barrier()
        })?;
        let from = stage(b, last)?;
        multiply(b, from, last)
    }

    /// Rows of one operand, from one on, times rows of another: the item's part of that tile, row by row.
    pub(super) fn scores(
        &self,
        b: &mut KernelBuilder,
        left: (&Matrices, Value),
        right: (&Matrices, Value),
    ) -> Built<Vec<Value>> {
        let slice = Slice { rows: SIDE, columns: DEPTH, row_bytes: 4, column_bytes: LINE_BYTES };
        let zero = b.f32(0.0)?;
        let sums: Vec<Variable> = (0..EACH * EACH).map(|_| b.variable(zero)).collect::<Built<_>>()?;
        let (row, column) = (self.row, self.column);
        let load = |b: &mut KernelBuilder, number: Value| {
            let from = scaled(b, number, DEPTH)?;
            let mut loaded = left.0.load(b, slice, (left.1, from))?;
            loaded.extend(right.0.load(b, slice, (right.1, from))?);
            Ok(loaded)
        };
        let store = |b: &mut KernelBuilder, to: Value, loaded: &[Value]| {
            let (own, other) = loaded.split_at(loaded.len() / 2);
            left.0.store(b, slice, to, own)?;
            let shift = b.i32((DEPTH * LINE_BYTES).cast_signed())?;
            let to = b.binary(B::I32Add, to, shift)?;
            right.0.store(b, slice, to, other)
        };
        let multiply = |b: &mut KernelBuilder, from: Value, _: Value| {
            let (left, right) = (b.element(from, row, 4)?, b.element(from, column, 4)?);
            let mut now: Vec<Value> = sums.iter().map(|sum| b.get(*sum)).collect::<Built<_>>()?;
            for step in 0..DEPTH {
                let four = |b: &mut KernelBuilder, at: Value, from: u32| {
                    (0..EACH).map(|n| b.load(Ty::F32, at, from + 4 * n)).collect::<Built<Vec<Value>>>()
                };
                let rows = four(b, left, step * LINE_BYTES)?;
                let columns = four(b, right, (DEPTH + step) * LINE_BYTES)?;
                multiply_all(b, &mut now, &rows, &columns)?;
            }
            sums.iter().zip(now).try_for_each(|(sum, value)| b.set(*sum, value))
        };
        self.sliced(b, small(left.0.width).div_ceil(DEPTH), &sums, (load, store, multiply))?;
        sums.iter().map(|sum| b.get(*sum)).collect()
    }

    /// Has everybody's part of a tile in shared memory for [`TileKernel::add`]: nobody reads what was there before.
    pub(super) fn keep(&self, b: &mut KernelBuilder, values: &[Value]) -> Built<()> {
        let to = scaled(b, self.column, LINE_BYTES)?;
        let to = b.binary(B::I32Add, self.tile, to)?;
        let to = b.element(to, self.row, 4)?;
        for column in 0..EACH {
            for row in 0..EACH {
                b.store(values[(row * EACH + column) as usize], to, column * LINE_BYTES + 4 * row)?;
            }
        }
        Ok(())
    }

    /// Adds the tile that is kept times rows of an operand, from one on: a row for each of the tile's columns.
    pub(super) fn add(&self, b: &mut KernelBuilder, to: &TileSums, (right, first): (&Matrices, Value)) -> Built<()> {
        let (columns, slice) = (to.columns, to.columns.slice());
        let (tile, row, lane) = (self.tile, self.row, self.lane);
        let none = b.i32(0)?;
        let load = |b: &mut KernelBuilder, number: Value| {
            let more = scaled(b, number, slice.rows)?;
            let from = b.binary(B::I32Add, first, more)?;
            right.load(b, slice, (from, none))
        };
        let store = |b: &mut KernelBuilder, to: Value, loaded: &[Value]| right.store(b, slice, to, loaded);
        let multiply = |b: &mut KernelBuilder, from: Value, number: Value| {
            let left = scaled(b, number, slice.rows * LINE_BYTES)?;
            let left = b.binary(B::I32Add, left, tile)?;
            let (left, column) = (b.element(left, row, 4)?, scaled(b, lane, columns.piece)?);
            let right = b.element(from, column, 4)?;
            let mut now: Vec<Value> = to.sums.iter().map(|sum| b.get(*sum)).collect::<Built<_>>()?;
            for step in 0..slice.rows {
                let own = |n: u32| step * slice.row_bytes + 4 * columns.offset(n);
                let rows: Vec<Value> =
                    (0..EACH).map(|n| b.load(Ty::F32, left, step * LINE_BYTES + 4 * n)).collect::<Built<_>>()?;
                let others: Vec<Value> =
                    (0..columns.own()).map(|n| b.load(Ty::F32, right, own(n))).collect::<Built<_>>()?;
                multiply_all(b, &mut now, &rows, &others)?;
            }
            to.sums.iter().zip(now).try_for_each(|(sum, value)| b.set(*sum, value))
        };
        self.sliced(b, SIDE / slice.rows, &to.sums, (load, store, multiply))
    }

    /// What the items of a line have, made one.
    /// Stores rows of sums, each times a factor of its row, to what a window is given: matrices of so many rows, one
    /// after the other from an element on.
    pub(super) fn store(
        &self,
        b: &mut KernelBuilder,
        (window, dtype, from): (usize, DType, usize),
        (first, rows): (Value, usize),
        sums: &TileSums,
        factors: &[Value],
    ) -> Built<()> {
        let (columns, to) = (sums.columns, self.windows[window]);
        let (width, bytes) = (columns.width, small(dtype.size()));
        let matrix = times(b, self.head, (rows * width).cast_signed())?;
        let column = scaled(b, self.lane, columns.piece)?;
        for (n, (own, factor)) in (0..).zip(sums.rows().zip(factors)) {
            let row = numbered(b, first, self.row, n)?;
            let end = b.i32(small(rows).cast_signed())?;
            let is_row = b.binary(B::I32LtU, row, end)?;
            b.begin_if(is_row, &[])?;
            let line = times(b, row, width.cast_signed())?;
            let place = sum(b, &[Some(matrix), Some(line), Some(column)], from.cast_signed())?;
            let at = b.element(to, place, bytes)?;
            for (n, value) in (0..).zip(own) {
                let value = b.get(*value)?;
                let value = b.binary(B::F32Mul, value, *factor)?;
                let offset = columns.offset(n);
                if columns.all() as usize == width {
                    store_one(b, dtype, value, at, offset * bytes)?;
                    continue;
                }
                let end = b.i32(small(width).cast_signed() - offset.cast_signed())?;
                let is_column = b.binary(B::I32LtS, column, end)?;
                b.begin_if(is_column, &[])?;
                store_one(b, dtype, value, at, offset * bytes)?;
                b.end()?;
            }
            b.end()?;
        }
        Ok(())
    }
}

/// What the items of a line have, made one.
pub(super) fn of_line(
    b: &mut KernelBuilder,
    value: Value,
    join: impl Fn(&mut KernelBuilder, Value, Value) -> Built<Value>,
) -> Built<Value> {
    let mut whole = value;
    for mask in [1, 2, 4, 8] {
        let other = b.shuffle(whole, mask)?;
        whole = join(b, whole, other)?;
    }
    Ok(whole)
}

/// The number of one of the item's rows, or columns, in a tile that begins there.
pub(super) fn numbered(b: &mut KernelBuilder, first: Value, own: Value, n: u32) -> Built<Value> {
    let more = b.i32(n.cast_signed())?;
    let number = b.binary(B::I32Add, first, own)?;
    b.binary(B::I32Add, number, more)
}

/// Adds products of rows and columns, each with each.
fn multiply_all(b: &mut KernelBuilder, sums: &mut [Value], rows: &[Value], columns: &[Value]) -> Built<()> {
    for (n, sum) in sums.iter_mut().enumerate() {
        *sum = b.fma(rows[n / columns.len()], columns[n % columns.len()], *sum)?;
    }
    Ok(())
}
