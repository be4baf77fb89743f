//! Fused expressions on a CPU. A kernel is a list of operations on tiles: pieces of its index space, in row-major
//! order, that fit into the first-level cache with everything computed from them. Nothing goes through memory in
//! between. Operands that lie in memory as the space does are read where they are, results are written where they
//! belong, and everything else is gathered into a tile first.

mod accumulate;
mod around;
mod compile;
mod run;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use smallvec::SmallVec;

use self::compile::Compile;
pub(super) use self::run::Run;
pub(crate) use self::run::register_of;
use super::execute::Buffers;
use super::tile::{Class, Side, TileOp};
use crate::dtype::DType;
use crate::error::ErrorKind;
use crate::graph::Storage;
use crate::graph::op::ReduceOp;
use crate::schedule::plan::{Level, MapKernel, Parameter};
use crate::shape::{AxisSet, Layout, RANK_MAX};

/// Bytes of tiles that a thread works on: they stay in the first-level cache, beside what is read and written.
const TILES_BYTES: usize = 24 << 10;

/// Elements of a tile at most; more would not be faster.
const TILE_MAX: usize = 2048;

/// Bytes of a result from which on it is written past the caches: it would not stay there until it is read, and a line
/// that is written through a cache is read first. A bare loop that adds two matrices of 4096² took 6.3 ms this way and
/// 9.2 ms the other on the machine this was tried on.
const STREAM_BYTES_MIN: usize = 32 << 20;

/// Elements that one thread takes at once.
const CHUNK: usize = 32 << 10;

/// Work, in simple operations on elements, below which nobody else is asked: waking somebody and waiting for them
/// takes as long as this.
const WORK_MIN: usize = 64 << 10;

/// A kernel, ready to run.
#[derive(Debug)]
pub(crate) struct MapProgram {
    /// For each tile, in this order.
    instructions: Vec<Instruction>,
    /// Numbers that are the same for all elements.
    singles: Vec<Single>,
    /// Registers that are filled with such numbers before the first tile: not every operation takes a single one.
    constants: Vec<(Register, usize, DType)>,
    /// Bytes of an element of each register.
    registers: Vec<usize>,
    row_registers: usize,
    loads: Vec<Load>,
    strategy: Strategy,
    /// Whether it writes past the caches.
    is_streamed: bool,
    /// What an element costs, in simple operations.
    cost: usize,
}

type Register = usize;

/// A number that is the same for all elements, as an element of a type.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Single {
    number: SingleNumber,
    dtype: DType,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum SingleNumber {
    /// One that comes with each run, by its number.
    Given(usize),
    Negated(usize),
    Constant(f64),
}

/// How the space is walked through.
#[derive(Debug, Clone, PartialEq)]
enum Strategy {
    /// Piece by piece.
    Linear { count: usize },
    /// The same in blocks of rows and columns: something that is read lies the other way round, and the cache lines
    /// that one row touches are used by the next.
    Blocks { rows: usize, columns: usize },
    /// Whole rows, some at a time: what is reduced from a row is used on it.
    Rows { rows: usize, inner: usize },
    /// The same for rows whose elements lie apart: the first elements of some rows, then their second ones, and so on.
    Planes { rows: usize, inner: usize },
    /// Everything reduced is a result.
    Accumulate(Accumulate),
}

/// Axes that are kept and reduced take turns: sizes and strides of each kind, outermost first.
#[derive(Debug, Clone, PartialEq)]
struct Accumulate {
    kept: Vec<(usize, usize)>,
    reduced: Vec<(usize, usize)>,
    /// Elements that lie together at the end of the space, and whether they are reduced.
    inner: usize,
    is_inner_reduced: bool,
    /// The reductions: where the operand is, and which of the results it becomes.
    results: Vec<(ReduceOp, DType, Source, usize)>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Source {
    Register(Register),
    RowRegister(Register),
    /// A number that is the same for all elements.
    Single(usize),
    /// A load that lies in memory as the space does.
    Memory(usize),
    /// What was stored already.
    Result(usize),
}

#[derive(Debug, Clone, PartialEq)]
struct Instruction {
    kind: InstructionKind,
    level: Level,
    to: Source,
}

#[derive(Debug, Clone, PartialEq)]
enum InstructionKind {
    Tile(TileOp, [Source; 3]),
    /// A load that lies otherwise.
    Gather(usize),
    Iota(Strides),
    Random(usize, Strides),
    /// With floats of which one operand is one a row: which operation, which operand, what there is for each point, and
    /// what there is for each row.
    WithRows(TileOp, Side, Source, Source),
    /// From one element a row to one a point.
    Repeat(Class, Source),
    /// From one element a point to one a row.
    Reduce(ReduceOp, Class, Source),
    /// From a register to a result that does not lie as registers do.
    Scatter(Source, usize, Strides),
}

impl InstructionKind {
    /// What it costs for an element, in simple operations.
    fn cost(&self) -> usize {
        match self {
            InstructionKind::Tile(op, _) | InstructionKind::WithRows(op, ..) => op.cost(),
            InstructionKind::Gather(_) | InstructionKind::Scatter(..) => 4,
            InstructionKind::Iota(_) | InstructionKind::Repeat(..) | InstructionKind::Reduce(..) => 1,
            InstructionKind::Random(..) => 40,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Load {
    strides: Strides,
    /// By rows of a matrix: where they begin, and how far its columns are apart.
    rows: (Strides, isize),
    is_direct: bool,
    bytes: usize,
}

/// Where elements lie, in as few axes as can say it.
#[derive(Debug, Clone, PartialEq)]
struct Strides {
    axes: Vec<(usize, isize)>,
    offset: isize,
    /// How far each plane is from the first; one if rows are not computed in planes.
    planes: Vec<isize>,
}

impl Strides {
    fn of(layout: &Layout) -> Strides {
        let mut axes: Vec<(usize, isize)> = Vec::with_capacity(RANK_MAX);
        for (size, stride) in layout.shape.iter().zip(layout.strides()).filter(|(size, _)| **size != 1) {
            match axes.last_mut() {
                Some((last, step)) if *step == stride * signed(*size) => (*last, *step) = (*last * size, *stride),
                _ => axes.push((*size, *stride)),
            }
        }
        Strides { axes, offset: layout.offset, planes: vec![0] }
    }

    /// The same by planes: one for each element of a row, in which there is an element for each row.
    fn planes(layout: &Layout, reduced: AxisSet) -> Strides {
        let shape = layout.shape;
        let mut planes = vec![0];
        for axis in (0..shape.rank()).filter(|axis| reduced.contains(*axis)) {
            let along = |plane: isize| (0..shape[axis]).map(move |n| plane + signed(n) * layout.strides()[axis]);
            planes = planes.into_iter().flat_map(along).collect();
        }
        let kept = (0..shape.rank()).filter(|axis| reduced.contains(*axis));
        let kept = kept.fold(*layout, |layout, axis| layout.slice(axis, 0, 1, 1));
        Strides { planes, ..Strides::of(&kept) }
    }

    /// The runs of all planes, each of which has `count` elements from `start` on.
    fn runs_of_planes(&self, start: usize, count: usize, mut each: impl FnMut(usize, isize, isize, usize)) {
        for (n, plane) in self.planes.iter().enumerate() {
            let mut of_plane = |done, position, step, run| each(n * count + done, position + plane, step, run);
            self.runs(start, count, &mut of_plane);
        }
    }

    /// Calls with the position of each run of elements from `start` on: position, step, how many.
    #[inline]
    fn runs(&self, start: usize, count: usize, mut each: impl FnMut(usize, isize, isize, usize)) {
        let Some(((inner, step), outer)) = self.axes.split_last() else {
            // The same element over and over, of which there is one.
            return each(0, self.offset, 0, count);
        };
        if count == 0 {
            return;
        }
        if let [(_, stride)] = outer {
            // Rows of a matrix, as the windows of a pool are.
            let (mut done, mut within) = (0, start % inner);
            let mut row = self.offset + signed(start / inner) * stride;
            while done < count {
                let run = (inner - within).min(count - done);
                each(done, row + signed(within) * step, *step, run);
                (done, within, row) = (done + run, 0, row + stride);
            }
            return;
        }
        // Divided once, then counted: the windows of a convolution have runs of ten elements.
        let (mut rest, mut within) = (start / inner, start % inner);
        let (mut index, mut row) = ([0; RANK_MAX], self.offset);
        for (axis, (size, stride)) in outer.iter().enumerate().rev() {
            index[axis] = rest % size;
            row += signed(index[axis]) * stride;
            rest /= size;
        }
        let mut done = 0;
        loop {
            let run = (inner - within).min(count - done);
            each(done, row + signed(within) * step, *step, run);
            (done, within) = (done + run, 0);
            if done == count {
                return;
            }
            for (axis, (size, stride)) in outer.iter().enumerate().rev() {
                index[axis] += 1;
                row += stride;
                if index[axis] < *size {
                    break;
                }
                row -= signed(*size) * stride;
                index[axis] = 0;
            }
        }
    }
}

fn signed(size: usize) -> isize {
    isize::try_from(size).unwrap_or(isize::MAX)
}

impl MapProgram {
    pub(crate) fn compile(kernel: &MapKernel) -> MapProgram {
        Compile::new(kernel).finish()
    }

    /// A run of it, with everything that it reads and writes.
    pub(super) fn prepare<'r>(
        &'r self,
        kernel: &MapKernel,
        buffers: &Buffers<'_>,
        made: &'r [Arc<Storage>],
        parameters: &'r [Parameter],
    ) -> Result<Run<'r>, ErrorKind> {
        let loads = kernel.loads.iter().map(|view| Ok(buffers.view(view)?.as_ptr().cast_const()));
        let loads = loads.collect::<Result<SmallVec<_>, ErrorKind>>()?;
        let results = made.iter().map(|storage| Ok(storage.cpu()?.as_ptr()));
        let results = results.collect::<Result<SmallVec<_>, ErrorKind>>()?;
        let sizes = kernel.stores.iter().map(|(value, _)| kernel.values[*value].dtype.size()).collect();
        Ok(Run { program: self, loads, results, sizes, parameters, is_defined: AtomicBool::new(true) })
    }

    /// Elements of a tile.
    fn tile(&self, most: usize) -> usize {
        let bytes: usize = self.registers.iter().sum::<usize>().max(4);
        // Nothing is kept from one operation for another: a tile is what is cheap to begin.
        if self.registers.is_empty() && self.instructions.len() <= 1 {
            return CHUNK.min(most.max(1));
        }
        // Whole vectors, but for the last tile.
        ((TILES_BYTES / bytes).clamp(64, TILE_MAX) & !63).min(most.max(1))
    }
}
