//! Runs programs: piece by piece, or whole rows at a time.
#![expect(unsafe_code, reason = "threads read and write parts of the same buffers, each its own")]

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::super::affine::NUMBER_BYTES;
use super::super::execute::FEW;
use super::super::gemm::Multiply;
use super::super::memory::ALIGN;
use super::super::threads::parallel;
use super::super::tile::{self, Class, Side, TileArgs, TileOp};
use super::{
    CHUNK, InstructionKind, Load, MapProgram, Register, Single, SingleNumber, Source, Strategy, Strides, TILE_MAX,
    WORK_MIN, signed,
};
use crate::dtype::{DType, Scalar};
use crate::error::ErrorKind;
use crate::random;
use crate::schedule::plan::{Level, Parameter};

/// Rows of a block: as many as a cache line has elements of single precision.
const BLOCK_ROWS: usize = 16;

/// One run of a program.
pub(in crate::cpu) struct Run<'r> {
    pub(super) program: &'r MapProgram,
    pub(super) loads: SmallVec<[*const u8; FEW]>,
    pub(super) results: SmallVec<[*mut u8; FEW]>,
    /// Bytes of an element of each result.
    pub(super) sizes: SmallVec<[usize; FEW]>,
    pub(super) parameters: &'r [Parameter],
    pub(super) is_defined: AtomicBool,
}

// SAFETY: buffers outlive the run; loads are only read, and each part of a result is written by one thread.
unsafe impl Sync for Run<'_> {}

/// What a thread works on.
pub(super) struct Tiles {
    start: *mut u8,
    /// Where each register begins, and each register of rows.
    registers: Vec<usize>,
    row_registers: usize,
    row_bytes: usize,
    singles: usize,
}

/// Words that a thread keeps for its next kernel: long rows take more, and give it back.
const SCRATCH_KEPT: usize = 1 << 18;

thread_local! {
    static SCRATCH: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// A part of a matrix of `width` columns.
struct Block {
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
    width: usize,
}

/// A part of the space.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) start: usize,
    pub(super) count: usize,
    /// The rows it is, if it is whole rows.
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

impl Run<'_> {
    /// Whether elements are computed one after the other, so that it can be run on some of them.
    pub(in crate::cpu) fn is_linear(&self) -> bool {
        matches!(self.program.strategy, Strategy::Linear { .. })
    }

    pub(in crate::cpu) fn whole(&self) -> Result<(), ErrorKind> {
        match &self.program.strategy {
            Strategy::Linear { count } => self.linear(*count),
            Strategy::Blocks { rows, columns } => self.blocks(*rows, *columns),
            Strategy::Rows { rows, inner } | Strategy::Planes { rows, inner } => self.rows(*rows, *inner),
            Strategy::Accumulate(accumulate) => self.accumulate(accumulate)?,
        }
        Ok(())
    }

    /// Whether everything that was computed has a value.
    pub(in crate::cpu) fn check(&self) -> Result<(), ErrorKind> {
        if self.is_defined.load(Ordering::Relaxed) { Ok(()) } else { Err(ErrorKind::DivisionByZero) }
    }

    /// Computes some elements, on this thread.
    pub(in crate::cpu) fn range(&self, start: usize, count: usize) {
        let (tile, end) = (self.program.tile(count), start + count);
        self.with_tiles(tile, 1, |tiles| {
            for start in (start..end).step_by(tile) {
                self.part(tiles, Part { start, count: tile.min(end - start), first_row: 0, rows: 0 });
            }
        });
    }

    fn linear(&self, count: usize) {
        let chunk = CHUNK.next_multiple_of(self.program.tile(count));
        let work = |n: usize| self.range(n * chunk, chunk.min(count - n * chunk));
        self.share(count, count.div_ceil(chunk), &work);
    }

    /// Does items of a space of so many elements, with others if it is worth it.
    pub(super) fn share(&self, count: usize, items: usize, work: &(dyn Fn(usize) + Sync)) {
        if count.saturating_mul(self.program.cost) < WORK_MIN {
            (0..items).for_each(work)
        } else {
            parallel(items, work)
        }
    }

    fn blocks(&self, rows: usize, columns: usize) {
        // As many columns as a tile has room for in sixteen rows, in whole vectors.
        let wide = (self.program.tile(TILE_MAX) / BLOCK_ROWS).max(1);
        let wide = if wide >= 16 { wide & !15 } else { wide };
        let bands = rows.div_ceil(BLOCK_ROWS);
        let work = |band: usize| {
            self.with_tiles(wide * BLOCK_ROWS, 1, |tiles| {
                let band = band * BLOCK_ROWS..((band + 1) * BLOCK_ROWS).min(rows);
                for first in (0..columns).step_by(wide) {
                    let block =
                        Block { rows: band.clone(), columns: first..(first + wide).min(columns), width: columns };
                    self.block(tiles, &block);
                }
            });
        };
        self.share(rows * columns, bands, &work);
    }

    /// Computes one block of a matrix: registers have its rows, one after the other.
    fn block(&self, tiles: &Tiles, block: &Block) {
        let (high, wide) = (block.rows.len(), block.columns.len());
        for instruction in &self.program.instructions {
            let at = |source: Source| self.address(tiles, source, 0);
            let start = |row: usize| (block.rows.start + row) * block.width + block.columns.start;
            match &instruction.kind {
                InstructionKind::Tile(op, from) => {
                    let [a, b, c] = from.map(|from| at(from).cast_const());
                    let args = TileArgs { to: at(instruction.to), a, b, c, n: high * wide, count: 1 };
                    // SAFETY: registers have room for a block; nothing else is read or written.
                    if !unsafe { tile::run(*op, &args) } {
                        self.is_defined.store(false, Ordering::Relaxed);
                    }
                }
                InstructionKind::Gather(load) => {
                    let Load { rows, bytes, .. } = &self.program.loads[*load];
                    let (from, to) = (self.loads[*load], at(instruction.to));
                    // SAFETY: the layout was checked to stay inside of the buffer, and the register has room.
                    unsafe {
                        match bytes {
                            1 => gather_block::<u8>(rows, from, to, block),
                            2 => gather_block::<u16>(rows, from, to, block),
                            4 => gather_block::<u32>(rows, from, to, block),
                            _ => gather_block::<u64>(rows, from, to, block),
                        }
                    }
                }
                InstructionKind::Scatter(from, result, _) => {
                    let (from, bytes) = (at(*from).cast_const(), self.sizes[*result]);
                    for row in 0..high {
                        let from = from.wrapping_add(row * wide * bytes);
                        let to = self.results[*result].wrapping_add(start(row) * bytes);
                        // SAFETY: the result has an element for each point of the space.
                        unsafe {
                            if self.program.is_streamed {
                                tile::stream(to, from, wide * bytes);
                            } else {
                                to.copy_from_nonoverlapping(from, wide * bytes);
                            }
                        }
                    }
                }
                InstructionKind::Iota(strides) => {
                    let to = at(instruction.to).cast::<i64>();
                    for row in 0..high {
                        strides.runs(start(row), wide, |done, position, step, run| {
                            for i in 0..run {
                                // SAFETY: the register has room for all of them.
                                unsafe { to.add(row * wide + done + i).write((position + signed(i) * step) as i64) };
                            }
                        });
                    }
                }
                InstructionKind::Random(parameter, strides) => {
                    let Some(Parameter::Seed(seed)) = self.parameters.get(*parameter) else { continue };
                    let to = at(instruction.to).cast::<f32>();
                    for row in 0..high {
                        strides.runs(start(row), wide, |done, position, step, run| {
                            for i in 0..run {
                                let number = (position + signed(i) * step).unsigned_abs() as u64;
                                // SAFETY: the register has room for all of them.
                                unsafe { to.add(row * wide + done + i).write(random::uniform(*seed, number)) };
                            }
                        });
                    }
                }
                // There are no rows that are reduced.
                InstructionKind::Repeat(..) | InstructionKind::Reduce(..) | InstructionKind::WithRows(..) => {}
            }
        }
    }

    fn rows(&self, rows: usize, inner: usize) {
        let tile = self.program.tile(rows * inner);
        let at_once = (tile / inner.max(1)).clamp(1, rows.max(1));
        let chunk = (CHUNK / inner.max(1)).max(1).next_multiple_of(at_once);
        let work = |n: usize| {
            let end = ((n + 1) * chunk).min(rows);
            self.with_tiles((at_once * inner).max(at_once), at_once, |tiles| {
                let mut row = n * chunk;
                while row < end {
                    let count = at_once.min(end - row);
                    let part = Part { start: row * inner, count: count * inner, first_row: row, rows: count };
                    self.part(tiles, part);
                    row += at_once;
                }
            });
        };
        let chunks = rows.div_ceil(chunk);
        self.share(rows * inner, chunks, &work);
    }

    /// Has a thread's tiles ready, with constants in them.
    pub(super) fn with_tiles(&self, tile: usize, rows: usize, work: impl FnOnce(&Tiles)) {
        let program = self.program;
        let mut registers = Vec::with_capacity(program.registers.len());
        let mut bytes = 0;
        for size in &program.registers {
            registers.push(bytes);
            bytes += (size * tile).next_multiple_of(ALIGN);
        }
        let row_bytes = (8 * rows).next_multiple_of(ALIGN);
        let row_registers = bytes;
        bytes += row_bytes * program.row_registers;
        let singles = bytes;
        bytes += NUMBER_BYTES * program.singles.len();
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.resize((bytes + ALIGN) / 8 + 1, 0);
            let start = scratch.as_mut_ptr().cast::<u8>();
            // SAFETY: there is room for one line more.
            let start = unsafe { start.add(start.align_offset(ALIGN)) };
            let tiles = Tiles { start, registers, row_registers, row_bytes, singles };
            for (n, Single { number, dtype }) in program.singles.iter().enumerate() {
                let Some(scalar) = self.scalar(*number) else { continue };
                // SAFETY: there is room for them behind the registers.
                unsafe { tiles.single(n).cast::<[u8; NUMBER_BYTES]>().write(register_of(scalar, *dtype)) };
            }
            for (register, parameter, dtype) in &program.constants {
                let Some(Parameter::Scalar(scalar)) = self.parameters.get(*parameter) else { continue };
                let one = register_of(*scalar, *dtype);
                let to = tiles.register(*register);
                let (a, n) = (one.as_ptr(), tile);
                let args = TileArgs { to, a, b: a, c: a, n, count: 1 };
                // SAFETY: the register has room for a tile, and `one` is an element.
                unsafe { tile::run(TileOp::Repeat(Class::of(*dtype)), &args) };
            }
            work(&tiles);
            if program.is_streamed {
                tile::end_stream();
            }
            if scratch.len() > SCRATCH_KEPT {
                *scratch = Vec::new();
            }
        });
    }

    fn scalar(&self, number: SingleNumber) -> Option<Scalar> {
        let given = |parameter: usize| match self.parameters.get(parameter) {
            Some(Parameter::Scalar(scalar)) => Some(*scalar),
            _ => None,
        };
        match number {
            SingleNumber::Given(parameter) => given(parameter),
            SingleNumber::Negated(parameter) => given(parameter).map(|scalar| Scalar::Float(-scalar.as_f64())),
            SingleNumber::Constant(number) => Some(Scalar::Float(number)),
        }
    }

    /// Computes one part of the space.
    pub(super) fn part(&self, tiles: &Tiles, part: Part) {
        let has_planes = matches!(self.program.strategy, Strategy::Planes { .. });
        for instruction in &self.program.instructions {
            let level = instruction.level;
            let (start, n) = if level == Level::Full { (part.start, part.count) } else { (part.first_row, part.rows) };
            // Of each plane, what is made from positions.
            let (first, each) = if has_planes { (part.first_row, part.rows) } else { (start, n) };
            let at = |source: Source| self.address(tiles, source, start);
            let to = at(instruction.to);
            let args_to = |to: *mut u8, op: TileOp, from: [*const u8; 3], n: usize, count: usize| {
                let args = TileArgs { to, a: from[0], b: from[1], c: from[2], n, count };
                // SAFETY: registers have room for a part; loads and results have as many elements as the space or its
                // rows, of which this is a part; and results are where operands are only by design of the compiler.
                if !unsafe { tile::run(op, &args) } {
                    self.is_defined.store(false, Ordering::Relaxed);
                }
            };
            let args = |op: TileOp, from: [*const u8; 3], n: usize, count: usize| args_to(to, op, from, n, count);
            let planes = part.count / part.rows.max(1);
            match &instruction.kind {
                InstructionKind::Tile(op, from) => args(*op, from.map(|from| at(from).cast_const()), n, 1),
                InstructionKind::WithRows(op, single, full, row) => {
                    let TileOp::BinaryWith(_, class, _) = op else { continue };
                    let (full, row) = (at(*full), self.address(tiles, *row, part.first_row));
                    let (size, result) = (class.size(), self.size(instruction.to));
                    for n in 0..part.rows {
                        let full = full.wrapping_add(n * planes * size).cast_const();
                        let row = row.wrapping_add(n * size).cast_const();
                        let from = if *single == Side::Left { [row, full, row] } else { [full, row, row] };
                        args_to(to.wrapping_add(n * planes * result), *op, from, planes, 1);
                    }
                }
                InstructionKind::Repeat(class, from) => {
                    let from = self.address(tiles, *from, part.first_row).cast_const();
                    if has_planes {
                        let plane = |n: usize| to.wrapping_add(n * part.rows * class.size());
                        (0..planes).for_each(|n| args_to(plane(n), TileOp::Copy(*class), [from; 3], part.rows, 1));
                    } else {
                        args(TileOp::Repeat(*class), [from; 3], planes, part.rows);
                    }
                }
                InstructionKind::Reduce(op, class, from) => {
                    let from = self.address(tiles, *from, part.start).cast_const();
                    if has_planes {
                        for n in 0..planes {
                            let op = if n == 0 { TileOp::Copy(*class) } else { TileOp::Accumulate(*op, *class) };
                            args(op, [from.wrapping_add(n * part.rows * class.size()); 3], part.rows, 1);
                        }
                    } else {
                        args(TileOp::Reduce(*op, *class), [from; 3], planes, part.rows);
                    }
                }
                InstructionKind::Scatter(from, result, strides) => {
                    let (from, bytes) = (at(*from).cast_const(), self.sizes[*result]);
                    let to = self.results[*result];
                    for (n, plane) in strides.planes.iter().enumerate() {
                        let (from, to) =
                            (from.wrapping_add(n * each * bytes), to.wrapping_offset(plane * signed(bytes)));
                        // SAFETY: the result has an element for each point of the space, and the register a part's.
                        unsafe {
                            match bytes {
                                1 => scatter::<u8>(strides, from, to, first, each),
                                2 => scatter::<u16>(strides, from, to, first, each),
                                4 => scatter::<u32>(strides, from, to, first, each),
                                _ => scatter::<u64>(strides, from, to, first, each),
                            }
                        }
                    }
                }
                InstructionKind::Gather(load) => {
                    let Load { strides, bytes, .. } = &self.program.loads[*load];
                    for (n, plane) in strides.planes.iter().enumerate() {
                        let from = self.loads[*load].wrapping_offset(plane * signed(*bytes));
                        let to = to.wrapping_add(n * each * bytes);
                        // SAFETY: the layout was checked to stay inside of the buffer, and the register has room.
                        unsafe {
                            match bytes {
                                1 => gather::<u8>(strides, from, to, first, each),
                                2 => gather::<u16>(strides, from, to, first, each),
                                4 => gather::<u32>(strides, from, to, first, each),
                                _ => gather::<u64>(strides, from, to, first, each),
                            }
                        }
                    }
                }
                InstructionKind::Iota(strides) => strides.runs_of_planes(first, each, |done, position, step, run| {
                    let to = to.cast::<i64>();
                    for i in 0..run {
                        // SAFETY: the register has room for all of them.
                        unsafe { to.add(done + i).write((position + signed(i) * step) as i64) };
                    }
                }),
                InstructionKind::Random(parameter, strides) => {
                    let Some(Parameter::Seed(seed)) = self.parameters.get(*parameter) else { continue };
                    strides.runs_of_planes(first, each, |done, position, step, run| {
                        let to = to.cast::<f32>();
                        for i in 0..run {
                            let number = (position + signed(i) * step).unsigned_abs() as u64;
                            // SAFETY: the register has room for all of them.
                            unsafe { to.add(done + i).write(random::uniform(*seed, number)) };
                        }
                    });
                }
            }
        }
    }

    /// Bytes of an element of what an instruction writes.
    fn size(&self, to: Source) -> usize {
        match to {
            Source::Register(register) => self.program.registers[register],
            Source::Result(result) => self.sizes[result],
            Source::RowRegister(_) | Source::Single(_) | Source::Memory(_) => 0,
        }
    }

    /// Where something begins, for an instruction that works on elements from `start` on.
    pub(super) fn address(&self, tiles: &Tiles, source: Source, start: usize) -> *mut u8 {
        match source {
            Source::Register(register) => tiles.register(register),
            Source::RowRegister(register) => {
                // SAFETY: it is inside of the thread's tiles.
                unsafe { tiles.start.add(tiles.row_registers + register * tiles.row_bytes) }
            }
            Source::Single(single) => tiles.single(single),
            Source::Memory(load) => {
                let Load { strides, bytes, .. } = &self.program.loads[load];
                let elements = start + strides.offset.unsigned_abs();
                // SAFETY: the load lies as the space does, and `start` is inside of that.
                unsafe { self.loads[load].add(elements * bytes).cast_mut() }
            }
            // SAFETY: the result has an element for each of the space or of its rows.
            Source::Result(result) => unsafe { self.results[result].add(start * self.sizes[result]) },
        }
    }
}

/// A number as an element of a register.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a scalar becomes an element as a cast does it"
)]
pub(crate) fn register_of(scalar: Scalar, dtype: DType) -> [u8; 8] {
    let float = scalar.as_f64();
    let is_float = matches!(scalar, Scalar::Float(_));
    let mut to = [0; 8];
    match dtype {
        DType::Bool => to[0] = u8::from(float != 0.0),
        // Floats go to the nearest there is, integers wrap.
        DType::U8 => to[0] = if is_float { float as u8 } else { scalar.as_i64() as u8 },
        DType::I32 => {
            let value = if is_float { float as i32 } else { scalar.as_i64() as i32 };
            to[..4].copy_from_slice(&value.to_ne_bytes());
        }
        DType::I64 => to = scalar.as_i64().to_ne_bytes(),
        DType::F16 => to[..4].copy_from_slice(&half::f16::from_f64(float).to_f32().to_ne_bytes()),
        DType::BF16 => to[..4].copy_from_slice(&half::bf16::from_f64(float).to_f32().to_ne_bytes()),
        DType::F32 => to[..4].copy_from_slice(&(float as f32).to_ne_bytes()),
        DType::F64 => to = float.to_ne_bytes(),
    }
    to
}

impl Tiles {
    fn single(&self, single: usize) -> *mut u8 {
        self.start.wrapping_add(self.singles + NUMBER_BYTES * single)
    }

    fn register(&self, register: Register) -> *mut u8 {
        // SAFETY: it is inside of the thread's tiles.
        unsafe { self.start.add(self.registers[register]) }
    }
}

/// Collects the elements of a block, row by row; where its columns are what lies together, sixteen of them at a time.
///
/// # Safety
///
/// Every position is inside of what `from` is the beginning of, and there is room for the block.
unsafe fn gather_block<T: Copy>((rows, step): &(Strides, isize), from: *const u8, to: *mut u8, block: &Block) {
    let (from, to) = (from.cast::<T>(), to.cast::<T>());
    let (high, wide) = (block.rows.len(), block.columns.len());
    let mut starts = [0_isize; BLOCK_ROWS];
    rows.runs(block.rows.start, high, |done, position, row_step, run| {
        for (n, start) in starts[done..done + run].iter_mut().enumerate() {
            *start = position + signed(n) * row_step + signed(block.columns.start) * step;
        }
    });
    let lies_by_column = high == BLOCK_ROWS && starts.windows(2).all(|pair| pair[1] == pair[0] + 1);
    let turned = if lies_by_column && size_of::<T>() == 4 && *step != 1 { wide & !15 } else { 0 };
    // SAFETY: the caller's promise.
    unsafe {
        f32::turn(from.offset(starts[0]).cast(), *step, turned, to.cast(), wide);
        for (row, start) in starts[..high].iter().enumerate() {
            let (from, to) = (from.offset(*start), to.add(row * wide));
            match step {
                1 => to.copy_from_nonoverlapping(from, wide),
                step => (turned..wide).for_each(|n| to.add(n).write(from.offset(signed(n) * step).read())),
            }
        }
    }
}

/// Collects elements that do not lie as the space does.
///
/// # Safety
///
/// Every position is inside of what `from` is the beginning of, and there is room for `count` elements.
unsafe fn gather<T: Copy>(strides: &Strides, from: *const u8, to: *mut u8, start: usize, count: usize) {
    #[cfg(target_arch = "x86_64")]
    if size_of::<T>() == 4 && strides.axes.last().is_some_and(|(_, step)| *step == 2) && tile::has_avx512() {
        // SAFETY: the caller's promise, and the instructions are there.
        return unsafe { gather_pairs_avx512(strides, from.cast(), to.cast(), start, count) };
    }
    let (from, to) = (from.cast::<T>(), to.cast::<T>());
    strides.runs(start, count, |done, position, step, run| {
        // SAFETY: the caller's promise.
        unsafe {
            let (from, to) = (from.offset(position), to.add(done));
            match step {
                1 => to.copy_from_nonoverlapping(from, run),
                0 => {
                    let value = from.read();
                    (0..run).for_each(|i| to.add(i).write(value));
                }
                step => (0..run).for_each(|i| to.add(i).write(from.offset(signed(i) * step).read())),
            }
        }
    });
}

/// Every second element: sixteen at a time out of two vectors. Nothing is read behind the last.
///
/// # Safety
///
/// As for [`gather`]; all runs have a step of two.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn gather_pairs_avx512(strides: &Strides, from: *const f32, to: *mut f32, start: usize, count: usize) {
    use std::arch::x86_64::*;
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    strides.runs(start, count, |done, position, _, run| {
        for first in (0..run).step_by(16) {
            let many = (run - first).min(16);
            // Of 32 elements all up to the last that is wanted.
            let wanted = u32::MAX >> (33 - 2 * many);
            // SAFETY: the caller's promise.
            unsafe {
                let (from, to) = (from.offset(position).add(2 * first), to.add(done + first));
                let low = _mm512_maskz_loadu_ps((wanted & 0xffff) as __mmask16, from);
                let high = _mm512_maskz_loadu_ps((wanted >> 16) as __mmask16, from.wrapping_add(16));
                let pairs = _mm512_permutex2var_ps(low, even, high);
                _mm512_mask_storeu_ps(to, 0xffff >> (16 - many), pairs);
            }
        }
    });
}

/// The other way round: sixteen elements at a time, into every second place.
///
/// # Safety
///
/// As for [`scatter`]; all runs have a step of two.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn scatter_pairs_avx512(strides: &Strides, from: *const f32, to: *mut f32, start: usize, count: usize) {
    use std::arch::x86_64::*;
    let spread = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    strides.runs(start, count, |done, position, _, run| {
        for first in (0..run).step_by(8) {
            let many = (run - first).min(8);
            // SAFETY: the caller's promise; places in between are let alone.
            unsafe {
                let (from, to) = (from.add(done + first), to.offset(position).add(2 * first));
                let eight = _mm512_maskz_loadu_ps(0xffff >> (16 - many), from);
                _mm512_mask_storeu_ps(to, 0x5555 & (0xffff >> (16 - 2 * many)), _mm512_permutexvar_ps(spread, eight));
            }
        }
    });
}

/// Puts elements where they do not lie as in a register.
///
/// # Safety
///
/// Every position is inside of what `to` is the beginning of, and there are `count` elements.
unsafe fn scatter<T: Copy>(strides: &Strides, from: *const u8, to: *mut u8, start: usize, count: usize) {
    #[cfg(target_arch = "x86_64")]
    if size_of::<T>() == 4 && strides.axes.last().is_some_and(|(_, step)| *step == 2) && tile::has_avx512() {
        // SAFETY: the caller's promise, and the instructions are there.
        return unsafe { scatter_pairs_avx512(strides, from.cast(), to.cast(), start, count) };
    }
    let (from, to) = (from.cast::<T>(), to.cast::<T>());
    strides.runs(start, count, |done, position, step, run| {
        // SAFETY: the caller's promise.
        unsafe {
            let (from, to) = (from.add(done), to.offset(position));
            match step {
                1 => to.copy_from_nonoverlapping(from, run),
                step => (0..run).for_each(|i| to.offset(signed(i) * step).write(from.add(i).read())),
            }
        }
    });
}
