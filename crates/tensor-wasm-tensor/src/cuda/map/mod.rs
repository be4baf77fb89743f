//! Fused expressions as kernels. A work item has a row of the space (the points that differ in the reduced axes only),
//! or a part of one, or some rows side by side; a team of items has a row together. Neighbouring items have
//! neighbouring elements, and each has as many at once as a device moves at once. What is computed of them is in
//! `evaluate.rs`, where they are in memory in `memory.rs`.

mod epilogue;
mod evaluate;
mod memory;
mod turned;

pub(super) use self::epilogue::Epilogue;
pub(super) use self::memory::{load_one, store_one};

use tensor_wasm_gpu::Product;
use tensor_wasm_jit::build::{Axis, BinaryOp as B, BuildError, BuiltKernel, IdKind, KernelBuilder, Value};
use tensor_wasm_jit::{Target, Ty};

use super::index::{Axes, Indices, count, small, some_axes};
use super::numbers::{Built, Class, Numbers, Registers};
use crate::schedule::plan::{BufferView, Level, MapKernel, Source, ValueKind};
use crate::shape::AxisSet;

/// Work items of a group.
pub(super) const GROUP: u32 = 256;

/// Bytes that a work item moves at once.
const VECTOR_BYTES: usize = 16;

/// Elements of a row that a work item keeps in registers, so that a row is read once however often it is gone over.
const KEPT_MAX: usize = 32;

/// Work items that fill a device: fewer elements each, rather than fewer items.
const ITEMS_MIN: usize = 16_384;

/// Groups that fill a device, with some for each multiprocessor.
const GROUPS_MIN: usize = 1_056;

/// Bytes that a work item has asked for before it uses the first of them, where there is enough to do: with more in
/// flight, memory is busy from one end of a kernel to the other.
const FLIGHT_BYTES: usize = 128;

/// Work items that fill a device twice over, beyond which each does more rather than there being more of them; fewer
/// in tests, which run them one by one.
const ITEMS_MANY: usize = if cfg!(test) { 64 } else { 2 * 132 * 2_048 };

/// Elements that a part of a long row has at least, for each work item.
const PART_MIN: usize = 8;

/// A kernel and how it is launched.
#[derive(Debug)]
pub(super) struct LoweredKernel {
    pub program: Program,
    pub groups: u32,
    pub items: u32,
    pub arguments: Vec<Argument>,
}

impl LoweredKernel {
    /// The same as a part of a step that has other scratch memory before.
    pub(super) fn with_scratch_from(mut self, first: usize) -> LoweredKernel {
        for argument in &mut self.arguments {
            if let Argument::Scratch(n) = argument {
                *n += first;
            }
        }
        self
    }
}

/// What is launched.
#[derive(Debug)]
pub(super) enum Program {
    Built(BuiltKernel),
    /// By the device's library.
    Product(Product),
}

/// What a window of a kernel is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Argument {
    Buffer(Source),
    /// A buffer from a byte on.
    Part(Source, usize),
    /// What a library needs beside its operands.
    Workspace,
    /// Memory between two kernels of one step, by its number.
    Scratch(usize),
    /// The numbers that come with each run, eight bytes each, from one on: kernels that differ only in which they take
    /// are the same.
    Parameters(usize),
    /// Where a kernel says that something could not be computed.
    Flags,
}

/// Scratch memory, and the kernels of one step.
#[derive(Debug, Default)]
pub(super) struct LoweredStep {
    pub kernels: Vec<LoweredKernel>,
    pub scratch_bytes: Vec<u64>,
}

/// What a kernel writes to the flags: an integer was divided by zero, or an index is beyond the end. Then comes the
/// node that could not be computed, and then the index, in eight bytes.
pub(super) const DIVIDED_BY_ZERO: u32 = 1;
pub(super) const OUT_OF_RANGE: u32 = 2;
pub(super) const FLAGS_BYTES: usize = 16;

/// How work is shared out.
#[derive(Debug, Clone, Copy)]
struct Frame {
    rows: usize,
    row_len: usize,
    /// Work items that share a row.
    team: usize,
    /// Elements that one has at once: of neighbouring rows, or of its row.
    lanes: usize,
    is_along_rows: bool,
    /// How often an item does the same, as far apart as the space is long divided by that; only without reductions.
    repeats: usize,
    /// Parts that rows are cut into, and elements of a part.
    parts: usize,
    part_len: usize,
    /// Whether an item has all of its elements in registers.
    is_kept: bool,
    reduced: AxisSet,
    group: usize,
    /// What the device has.
    target: Target,
}

impl Frame {
    fn of(kernel: &MapKernel, target: Target) -> Frame {
        let reduces = |kind: &ValueKind| matches!(kind, ValueKind::Reduce(..));
        let has_rows = kernel.values.iter().any(|value| reduces(&value.kind));
        let reduced = if has_rows { kernel.reduced } else { AxisSet::default() };
        let space = kernel.space;
        let (rows, row_len) = (count(space, some_axes(reduced, false)), count(space, some_axes(reduced, true)));
        let is_inner_reduced =
            (0..space.rank()).rfind(|axis| space[*axis] != 1).is_some_and(|axis| reduced.contains(axis));
        let is_along_rows = !is_inner_reduced;
        let mut frame = Frame {
            rows,
            row_len,
            team: 1,
            lanes: 1,
            is_along_rows,
            repeats: 1,
            parts: 1,
            part_len: row_len,
            is_kept: true,
            reduced,
            group: GROUP as usize,
            target,
        };
        frame.lanes = frame.vector(kernel);
        let operand = |n: usize| kernel.values.iter().any(|value| value.kind.operands().any(|operand| operand == n));
        let mut reductions = kernel.values.iter().enumerate().filter(|(_, value)| reduces(&value.kind));
        let is_chained = reductions.any(|(n, _)| operand(n));
        if is_inner_reduced {
            let chunks = row_len.div_ceil(frame.lanes);
            frame.team = if chunks <= 8 { 1 } else { chunks.div_ceil(2).next_power_of_two().min(GROUP as usize) };
            // Rows that one group has together.
            if frame.team > 32 && frame.team < GROUP as usize && rows.saturating_mul(frame.team) < ITEMS_MIN {
                frame.team = GROUP as usize;
            }
        }
        frame.repeats = frame.repeated(kernel);
        let in_row = frame.lanes_in_row();
        // No larger groups than there is something to do for.
        let items = (rows / frame.lanes_of_rows()).saturating_mul(frame.team);
        frame.group = items.next_power_of_two().clamp(32.max(frame.team), GROUP as usize);
        let each = row_len.div_ceil(frame.team * in_row) * in_row * frame.lanes_of_rows();
        frame.is_kept = each <= KEPT_MAX && (frame.team > 1 || row_len == 1 || is_chained || each <= 8);
        let groups = rows.div_ceil(frame.rows_per_group());
        if has_rows && !is_chained && groups < GROUPS_MIN && row_len > 1 {
            let per_part = frame.team * frame.lanes_in_row() * PART_MIN;
            let parts = GROUPS_MIN.div_ceil(groups.max(1)).min(row_len / per_part.max(1)).max(1);
            if parts > 1 {
                frame.part_len = row_len.div_ceil(parts).next_multiple_of(frame.team * frame.lanes_in_row());
                frame.parts = row_len.div_ceil(frame.part_len);
                frame.is_kept = false;
            }
        }
        frame
    }

    /// Elements that are moved at once, as far as shapes allow it and there is enough to do.
    fn vector(&self, kernel: &MapKernel) -> usize {
        let along = if self.is_along_rows { self.rows } else { self.row_len };
        let own = some_axes(self.reduced, !self.is_along_rows);
        let runs = |view: &&BufferView| Axes::of(&view.layout, own).inner().1 == 1;
        let read = kernel.loads.iter().filter(runs).map(|view| view.dtype.size());
        let written = kernel.stores.iter().map(|(value, _)| kernel.values[*value].dtype.size());
        let largest = read.chain(written).max().unwrap_or(4);
        let mut lanes = (VECTOR_BYTES / largest).clamp(1, 8);
        let total = self.rows.saturating_mul(self.row_len);
        while lanes > 1 && (!along.is_multiple_of(lanes) || total / lanes < ITEMS_MIN) {
            lanes /= 2;
        }
        lanes
    }

    /// How many vectors an item has, all of which it loads before it stores the first.
    fn repeated(&self, kernel: &MapKernel) -> usize {
        if self.row_len > 1 || self.team > 1 || kernel.values.iter().any(|value| value.level == Level::Row) {
            return 1;
        }
        let loaded: usize = kernel.loads.iter().map(|view| view.dtype.size() * self.lanes).sum();
        let mut repeats = 4;
        while repeats > 1
            && (loaded * repeats > FLIGHT_BYTES
                || !self.rows.is_multiple_of(repeats * self.lanes)
                || self.rows / (repeats * self.lanes) < ITEMS_MANY)
        {
            repeats /= 2;
        }
        repeats
    }

    /// How many steps of a pass over a row are one round of its loop: as many as always divide it, so that none of
    /// their loads waits for a sum before.
    fn unrolled(&self) -> usize {
        let len = if self.parts > 1 { self.part_len } else { self.row_len };
        let step = self.team * self.lanes_in_row();
        let divides = |count: &usize| self.row_len.is_multiple_of(len) && len.is_multiple_of(step * count);
        [8, 4, 2].into_iter().find(divides).unwrap_or(1)
    }

    fn lanes_in_row(&self) -> usize {
        if self.is_along_rows { 1 } else { self.lanes }
    }

    fn lanes_of_rows(&self) -> usize {
        if self.is_along_rows { self.lanes } else { 1 }
    }

    fn rows_per_group(&self) -> usize {
        self.group / self.team * self.lanes_of_rows()
    }

    fn row_groups(&self) -> usize {
        (self.rows / self.repeats).div_ceil(self.rows_per_group())
    }
}

/// How many reductions have to be done, one after the other, before a value can be computed.
fn rounds(kernel: &MapKernel) -> Vec<usize> {
    let mut rounds = vec![0; kernel.values.len()];
    for (n, value) in kernel.values.iter().enumerate() {
        let before = value.kind.operands().map(|operand| rounds[operand]).max().unwrap_or(0);
        rounds[n] = before + usize::from(matches!(value.kind, ValueKind::Reduce(..)));
    }
    rounds
}

/// Lowers a fused expression.
pub(super) fn lower(kernel: &MapKernel, target: Target) -> Built<LoweredStep> {
    let frame = Frame::of(kernel, target);
    if frame.rows == 0 {
        return Ok(LoweredStep::default());
    }
    if let Some(turned) = turned::Turned::of(kernel) {
        return Ok(LoweredStep { kernels: vec![turned::lower(kernel, &turned, target)?], scratch_bytes: Vec::new() });
    }
    let reductions: Vec<usize> =
        (0..kernel.values.len()).filter(|n| matches!(kernel.values[*n].kind, ValueKind::Reduce(..))).collect();
    if frame.parts == 1 {
        return Ok(LoweredStep { kernels: vec![Emit::whole(kernel, frame)?], scratch_bytes: Vec::new() });
    }
    let bytes = |n: &usize| u64::from(Class::of(kernel.values[*n].dtype).bytes());
    let scratch_bytes = reductions.iter().map(|n| bytes(n) * (frame.parts * frame.rows) as u64).collect();
    let parts = Emit::parts(kernel, frame, &reductions)?;
    let after = Frame {
        row_len: frame.parts,
        part_len: frame.parts,
        parts: 1,
        lanes: 1,
        is_along_rows: true,
        team: if frame.parts > 32 && frame.rows < 4_096 { GROUP as usize } else { 1 },
        is_kept: false,
        group: GROUP as usize,
        ..frame
    };
    let sums = Emit::sums(kernel, after, &reductions)?;
    Ok(LoweredStep { kernels: vec![parts, sums], scratch_bytes })
}

/// Windows that are given buffers, each once.
struct Windows {
    arguments: Vec<Argument>,
    values: Vec<Value>,
}

impl Windows {
    fn get(&self, argument: Argument) -> Built<Value> {
        let found = self.arguments.iter().position(|own| *own == argument);
        let found = found.and_then(|at| self.values.get(at)).copied();
        found.ok_or(BuildError::Structure { what: "a buffer was not made a window" })
    }
}

struct Emit<'k> {
    b: KernelBuilder,
    kernel: &'k MapKernel,
    frame: Frame,
    rounds: Vec<usize>,
    windows: Windows,
    /// The first of the numbers that come with each run, and what they are.
    first_parameter: usize,
    fills: Vec<Option<Value>>,
    /// Values of rows, one for each lane that is a row.
    row: Vec<Option<Vec<Value>>>,
    row_indices: Indices,
    /// The first of the item's rows, and its number in the team.
    at_row: Option<Value>,
    in_team: Option<Value>,
    item: Option<Value>,
    part: Option<Value>,
    /// Of a team, whether it is the item that stores what the row has; none where every item has rows of its own.
    is_writer: Option<Value>,
    scratch: Option<Value>,
}

impl<'k> Emit<'k> {
    /// With some scratch memory.
    fn new(kernel: &'k MapKernel, frame: Frame, name: &str, scratch: usize) -> Built<Emit<'k>> {
        Emit::with(kernel, frame, name, (0..scratch).map(Argument::Scratch).collect())
    }

    /// With windows besides those of the expression.
    fn with(kernel: &'k MapKernel, frame: Frame, name: &str, mut arguments: Vec<Argument>) -> Built<Emit<'k>> {
        let mut b = KernelBuilder::on(name, frame.target);
        let sources = kernel.loads.iter().map(|view| view.source);
        let stores = kernel.stores.iter().map(|(_, slot)| Source::Slot(*slot));
        for source in sources.chain(stores) {
            if !arguments.contains(&Argument::Buffer(source)) {
                arguments.push(Argument::Buffer(source));
            }
        }
        let parameters = kernel.values.iter().filter_map(|value| match value.kind {
            ValueKind::Fill(parameter) | ValueKind::Random(parameter, _) => Some(parameter),
            _ => None,
        });
        // Windows begin at multiples of sixteen bytes.
        let first_parameter = parameters.min().unwrap_or(0) & !1;
        arguments.extend([Argument::Parameters(first_parameter), Argument::Flags]);
        let values = arguments.iter().map(|_| b.window()).collect::<Built<_>>()?;
        let count = kernel.values.len();
        Ok(Emit {
            b,
            kernel,
            frame,
            rounds: rounds(kernel),
            windows: Windows { arguments, values },
            first_parameter,
            fills: vec![None; count],
            row: vec![None; count],
            row_indices: Indices::default(),
            at_row: None,
            in_team: None,
            item: None,
            part: None,
            is_writer: None,
            scratch: None,
        })
    }

    /// One kernel for everything.
    fn whole(kernel: &'k MapKernel, frame: Frame) -> Built<LoweredKernel> {
        let mut emit = Emit::new(kernel, frame, "map", 0)?;
        emit.enter()?;
        let last = emit.rounds.iter().copied().max().unwrap_or(0);
        if frame.is_kept {
            emit.kept(last)?;
        } else {
            for round in 0..=last {
                emit.round(round, last)?;
            }
        }
        emit.leave()
    }

    /// The parts of long rows, each reduced by itself.
    fn parts(kernel: &'k MapKernel, frame: Frame, reductions: &[usize]) -> Built<LoweredKernel> {
        let mut emit = Emit::new(kernel, frame, "map_parts", reductions.len())?;
        emit.enter()?;
        emit.rows_of(0)?;
        let sums = emit.accumulate(reductions, &emit.stores_of(0))?;
        let (item_row, part) = (emit.row_number()?, emit.part.ok_or(missing())?);
        let rows = emit.b.i32(small(frame.rows).cast_signed())?;
        let first = emit.b.binary(B::I32Mul, part, rows)?;
        let first = emit.b.binary(B::I32Add, first, item_row)?;
        emit.begin_row_store()?;
        for (at, (n, lanes)) in reductions.iter().zip(&sums).enumerate() {
            let class = Class::of(kernel.values[*n].dtype);
            let window = emit.windows.get(Argument::Scratch(at))?;
            let address = emit.b.element(window, first, class.bytes())?;
            for (lane, value) in (0..).zip(lanes) {
                emit.b.store(*value, address, lane * class.bytes())?;
            }
        }
        emit.end_row_store()?;
        emit.leave()
    }

    /// What the parts amount to, and what is computed of it.
    fn sums(kernel: &'k MapKernel, frame: Frame, reductions: &[usize]) -> Built<LoweredKernel> {
        let mut emit = Emit::new(kernel, frame, "map_sums", reductions.len())?;
        emit.enter()?;
        emit.rows_of(0)?;
        let row = emit.row_number()?;
        let sums = emit.each_chunk(reductions, |emit, point| {
            let rows = emit.b.i32(small(frame.rows).cast_signed())?;
            let within = point.within.ok_or(missing())?;
            let place = emit.b.binary(B::I32Mul, within, rows)?;
            let place = emit.b.binary(B::I32Add, place, row)?;
            let mut loaded = Vec::new();
            for (at, n) in reductions.iter().enumerate() {
                let class = Class::of(emit.kernel.values[*n].dtype);
                let window = emit.windows.get(Argument::Scratch(at))?;
                let address = emit.b.element(window, place, class.bytes())?;
                loaded.push(vec![emit.b.load(class.ty(), address, 0)?]);
            }
            Ok(loaded)
        })?;
        for (n, lanes) in reductions.iter().zip(sums) {
            emit.row[*n] = Some(lanes);
        }
        emit.rows_of(1)?;
        emit.store_rows(1)?;
        emit.leave()
    }

    // ---- where the item is

    fn numbers(&mut self) -> Numbers<'_> {
        Numbers { b: &mut self.b }
    }

    fn row_number(&self) -> Built<Value> {
        self.at_row.ok_or(missing())
    }

    /// Finds the item's row and its place in the team. Items that have none go no further, or, where others wait for
    /// them, go along with the last one.
    fn enter(&mut self) -> Built<()> {
        let Frame { rows, team, parts, group, .. } = self.frame;
        let (groups, lanes) = (self.frame.row_groups(), self.frame.lanes_of_rows());
        let item = self.b.id(IdKind::Local, Axis::X)?;
        let mut number = self.b.id(IdKind::Group, Axis::X)?;
        if parts > 1 {
            let (part, own) = self.row_indices.divide(&mut self.b, number, small(groups))?;
            (self.part, number) = (Some(part), own);
        }
        let (in_group, in_team) = self.row_indices.divide(&mut self.b, item, small(team))?;
        let per_group = self.b.i32(small(group / team).cast_signed())?;
        let row = self.b.binary(B::I32Mul, number, per_group)?;
        let row = self.b.binary(B::I32Add, row, in_group)?;
        let row = super::index::times(&mut self.b, row, lanes.cast_signed())?;
        let end = self.b.i32(small(rows / self.frame.repeats).cast_signed())?;
        let is_row = self.b.binary(B::I32LtU, row, end)?;
        (self.item, self.in_team) = (Some(item), Some(in_team));
        if team == 1 {
            self.b.begin_if(is_row, &[])?;
            self.at_row = Some(row);
        } else {
            let last = self.b.i32(small(rows - lanes).cast_signed())?;
            self.at_row = Some(self.b.select(is_row, row, last)?);
            let first = self.b.i32(0)?;
            let is_first = self.b.binary(B::I32Eq, in_team, first)?;
            self.is_writer = Some(self.b.binary(B::I32And, is_row, is_first)?);
        }
        self.load_fills()
    }

    fn load_fills(&mut self) -> Built<()> {
        for n in 0..self.kernel.values.len() {
            if let ValueKind::Fill(parameter) = self.kernel.values[n].kind {
                let class = Class::of(self.kernel.values[n].dtype);
                self.fills[n] = Some(self.parameter(class.ty(), parameter)?);
            }
        }
        Ok(())
    }

    /// A number that comes with each run.
    fn parameter(&mut self, ty: Ty, parameter: usize) -> Built<Value> {
        let window = self.windows.get(Argument::Parameters(self.first_parameter))?;
        self.b.load(ty, window, 8 * small(parameter - self.first_parameter))
    }

    fn leave(mut self) -> Built<LoweredKernel> {
        if self.frame.team == 1 {
            self.b.end()?;
        }
        let groups = small(self.frame.row_groups() * self.frame.parts);
        self.finish(groups)
    }

    fn finish(self, groups: u32) -> Built<LoweredKernel> {
        let items = small(self.frame.group);
        let program = Program::Built(self.b.finish()?);
        Ok(LoweredKernel { program, groups, items, arguments: self.windows.arguments })
    }

    fn begin_row_store(&mut self) -> Built<()> {
        if let Some(is_writer) = self.is_writer {
            self.b.begin_if(is_writer, &[])?;
        }
        Ok(())
    }

    fn end_row_store(&mut self) -> Built<()> {
        if self.is_writer.is_some() { self.b.end() } else { Ok(()) }
    }
}

fn missing() -> BuildError {
    BuildError::Structure { what: "the item's place was not found before it was needed" }
}
