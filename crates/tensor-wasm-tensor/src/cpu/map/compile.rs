//! From a kernel to a program: where every value is, and in which order it gets there.

use super::super::tile::{self, Class, Side, TileOp};
use super::around::Affine;
use super::{
    Accumulate, Instruction, InstructionKind, Load, MapProgram, Register, STREAM_BYTES_MIN, Single, SingleNumber,
    Source, Strategy, Strides, TILE_MAX,
};
use crate::dtype::DType;
use crate::graph::op::BinaryOp;
use crate::schedule::plan::{BufferView, Level, MapKernel, ValueKind, has_planes, is_trailing};
use crate::shape::Layout;

/// Elements from which on it matters how a matrix is walked through.
const BLOCKS_MIN: usize = 4096;

/// Elements of a row from which on it is an operation by itself.
const ROW_MIN: usize = 64;

/// Makes a program from a kernel.
pub(super) struct Compile<'k> {
    pub(super) kernel: &'k MapKernel,
    strategy: Strategy,
    pub(super) loads: Vec<Load>,
    instructions: Vec<Instruction>,
    pub(super) singles: Vec<Single>,
    constants: Vec<(Register, usize, DType)>,
    registers: Vec<usize>,
    row_registers: usize,
    /// Registers by the size of their elements that are not used at the moment.
    free: Vec<Register>,
    /// Where values are, at their own level and repeated.
    pub(super) at: Vec<Option<Source>>,
    repeated: Vec<Option<Source>>,
    /// How many operands are still to be read from a value.
    pub(super) uses: Vec<usize>,
    /// Operations that are left to their user, which may take them along.
    pub(super) waiting: Vec<Option<Affine>>,
}

impl<'k> Compile<'k> {
    pub(super) fn new(kernel: &'k MapKernel) -> Compile<'k> {
        let mut uses = vec![0; kernel.values.len()];
        kernel.values.iter().flat_map(|value| value.kind.operands()).for_each(|operand| uses[operand] += 1);
        // What is stored is copied at the end, unless it was computed where it belongs.
        kernel.stores.iter().for_each(|(value, _)| uses[*value] += 1);
        let levels = kernel.values.iter().filter(|value| matches!(value.kind, ValueKind::Load(_)));
        let mut level_of = vec![Level::Full; kernel.loads.len()];
        levels.for_each(|value| {
            if let ValueKind::Load(load) = value.kind {
                level_of[load] = value.level;
            }
        });
        let strategy = Compile::strategy(kernel);
        let has_planes = matches!(strategy, Strategy::Planes { .. });
        let has_blocks = matches!(strategy, Strategy::Blocks { .. });
        let load = |(n, view): (usize, &BufferView)| {
            let is_full = level_of[n] == Level::Full;
            let shape = if is_full { kernel.space } else { kernel.rows() };
            let in_planes = has_planes && is_full;
            let is_direct = view.layout.has_strides(&shape.strides()) && !in_planes && !has_blocks;
            let strides =
                if in_planes { Strides::planes(&view.layout, kernel.reduced) } else { Strides::of(&view.layout) };
            let last = view.layout.shape.rank().saturating_sub(1);
            let step = view.layout.strides().last().copied().unwrap_or(0);
            let rows = if has_blocks { Strides::of(&view.layout.slice(last, 0, 1, 1)) } else { strides.clone() };
            Load { strides, rows: (rows, step), is_direct, bytes: view.dtype.size() }
        };
        Compile {
            kernel,
            strategy,
            loads: kernel.loads.iter().enumerate().map(load).collect(),
            instructions: Vec::new(),
            singles: Vec::new(),
            constants: Vec::new(),
            registers: Vec::new(),
            row_registers: 0,
            free: Vec::new(),
            at: vec![None; kernel.values.len()],
            repeated: vec![None; kernel.values.len()],
            uses,
            waiting: vec![None; kernel.values.len()],
        }
    }

    fn strategy(kernel: &MapKernel) -> Strategy {
        let space = kernel.space;
        let has_rows = kernel.values.iter().any(|value| matches!(value.kind, ValueKind::Reduce(..)));
        if !has_rows {
            let columns = space.last().copied().unwrap_or(1).max(1);
            let rows = space.numel() / columns;
            let is_turned = |view: &BufferView| {
                let strides = view.layout.strides();
                let inner = strides.last().map_or(0, |stride| stride.unsigned_abs());
                inner > 1 && strides.iter().zip(space.iter()).any(|(stride, size)| stride.abs() == 1 && *size > 1)
            };
            let is_large = rows > 1 && columns > 1 && space.numel() >= BLOCKS_MIN;
            if is_large && kernel.loads.iter().any(is_turned) {
                return Strategy::Blocks { rows, columns };
            }
            return Strategy::Linear { count: space.numel() };
        }
        // What is reduced is used again, or the scheduler would not have put rows into one kernel.
        let is_used = |n: usize| kernel.values.iter().any(|value| value.kind.operands().any(|operand| operand == n));
        let reduces = |n: &usize| matches!(kernel.values[*n].kind, ValueKind::Reduce(..));
        let (rows, count) = (kernel.rows().numel(), space.numel());
        let inner = count.checked_div(rows).unwrap_or(0);
        let is_chained = (0..kernel.values.len()).filter(reduces).any(is_used);
        if is_trailing(space, kernel.reduced) && (is_chained || inner <= TILE_MAX) {
            return Strategy::Rows { rows, inner };
        }
        // Results that lie together are quicker added up row by row.
        let is_inner_reduced =
            (0..space.rank()).rfind(|axis| space[*axis] != 1).is_some_and(|axis| kernel.reduced.contains(axis));
        if has_planes(space, kernel.reduced) && (is_chained || is_inner_reduced) {
            return Strategy::Planes { rows, inner };
        }
        // Axes next to each other that have the same fate are one.
        let mut axes: Vec<(bool, usize)> = Vec::new();
        for axis in (0..space.rank()).filter(|axis| space[*axis] != 1) {
            let is_reduced = kernel.reduced.contains(axis);
            match axes.last_mut() {
                Some((last, size)) if *last == is_reduced => *size *= space[axis],
                _ => axes.push((is_reduced, space[axis])),
            }
        }
        let (is_inner_reduced, inner) = axes.pop().unwrap_or((true, 1));
        let (mut kept, mut reduced) = (Vec::new(), Vec::new());
        let mut stride = inner;
        for (is_reduced, size) in axes.into_iter().rev() {
            (if is_reduced { &mut reduced } else { &mut kept }).push((size, stride));
            stride *= size;
        }
        kept.reverse();
        reduced.reverse();
        Strategy::Accumulate(Accumulate { kept, reduced, inner, is_inner_reduced, results: Vec::new() })
    }

    pub(super) fn class(&self, value: usize) -> Class {
        Class::of(self.kernel.values[value].dtype)
    }

    pub(super) fn register(&mut self, level: Level, bytes: usize) -> Source {
        if level == Level::Row {
            self.row_registers += 1;
            return Source::RowRegister(self.row_registers - 1);
        }
        let found = self.free.iter().position(|register| self.registers[*register] == bytes);
        Source::Register(match found {
            Some(at) => self.free.swap_remove(at),
            None => {
                self.registers.push(bytes);
                self.registers.len() - 1
            }
        })
    }

    /// An operand has been read: its register is free if it was the last time.
    pub(super) fn done_with(&mut self, value: usize) {
        self.uses[value] -= 1;
        if self.uses[value] == 0 {
            for source in [self.at[value], self.repeated[value]].into_iter().flatten() {
                let is_constant =
                    |register: Register| self.constants.iter().any(|(constant, ..)| *constant == register);
                if let Source::Register(register) = source
                    && !is_constant(register)
                    && !self.free.contains(&register)
                {
                    self.free.push(register);
                }
            }
        }
    }

    /// The result that a value can be written to where it is made.
    pub(super) fn result(&self, value: usize) -> Option<usize> {
        let is_half = matches!(self.kernel.values[value].dtype, DType::F16 | DType::BF16);
        let store = self.kernel.stores.iter().position(|(stored, _)| *stored == value)?;
        // Where it takes the place of an operand, that may still be read: it is copied at the end.
        let is_in_place = self.kernel.in_place.get(store).copied().flatten().is_some();
        let is_apart = self.is_apart() && self.kernel.values[value].level == Level::Full;
        (!is_half && !is_in_place && !is_apart && !self.is_streamed(store)).then_some(store)
    }

    /// Whether a result is written past the caches. One that takes the place of an operand is there already.
    fn is_streamed(&self, store: usize) -> bool {
        let (value, _) = self.kernel.stores[store];
        let is_in_place = self.kernel.in_place.get(store).copied().flatten().is_some();
        let bytes = self.kernel.space.numel().saturating_mul(self.kernel.values[value].dtype.size());
        let is_full = self.kernel.values[value].level == Level::Full;
        let is_half = matches!(self.kernel.values[value].dtype, DType::F16 | DType::BF16);
        bytes >= STREAM_BYTES_MIN && is_full && !is_in_place && !is_half && !self.has_planes()
    }

    /// Whether registers do not lie as results do.
    pub(super) fn is_apart(&self) -> bool {
        matches!(self.strategy, Strategy::Planes { .. } | Strategy::Blocks { .. })
    }

    fn has_planes(&self) -> bool {
        matches!(self.strategy, Strategy::Planes { .. })
    }

    /// Where elements of a level lie.
    fn strides(&self, layout: &Layout, level: Level) -> Strides {
        if self.has_planes() && level == Level::Full {
            Strides::planes(layout, self.kernel.reduced)
        } else {
            Strides::of(layout)
        }
    }

    pub(super) fn push(&mut self, kind: InstructionKind, level: Level, to: Source) {
        self.instructions.push(Instruction { kind, level, to });
    }

    /// Where an operand is for an instruction of a level: one a row is repeated for each point.
    pub(super) fn operand(&mut self, value: usize, level: Level) -> Source {
        let own = self.kernel.values[value].level;
        let at = self.at[value].unwrap_or(Source::Register(0));
        let is_single = matches!(at, Source::Single(_));
        if !is_single && (own == level || level == Level::Row) {
            return at;
        }
        if let Some(repeated) = self.repeated[value] {
            return repeated;
        }
        let class = self.class(value);
        if let Source::Single(single) = at {
            // Never freed, so that it stays what it was before the first tile.
            self.registers.push(class.size());
            let register = self.registers.len() - 1;
            if let Single { number: SingleNumber::Given(parameter), dtype } = self.singles[single] {
                self.constants.push((register, parameter, dtype));
            }
            self.repeated[value] = Some(Source::Register(register));
            return Source::Register(register);
        }
        let to = self.register(Level::Full, class.size());
        self.push(InstructionKind::Repeat(class, at), Level::Full, to);
        self.repeated[value] = Some(to);
        to
    }

    pub(super) fn finish(mut self) -> MapProgram {
        for value in 0..self.kernel.values.len() {
            self.value(value);
        }
        // What is stored in half precision, or more than once, or was never computed, is copied.
        for (store, (value, _)) in self.kernel.stores.iter().enumerate() {
            let dtype = self.kernel.values[*value].dtype;
            let level = self.kernel.values[*value].level;
            let at = self.operand(*value, level);
            let is_reduction = matches!(self.kernel.values[*value].kind, ValueKind::Reduce(..));
            if at == Source::Result(store) || is_reduction && matches!(self.strategy, Strategy::Accumulate(_)) {
                continue;
            }
            let is_half = matches!(dtype, DType::F16 | DType::BF16);
            let op = match Class::of(dtype) {
                _ if is_half => TileOp::StoreHalf(dtype),
                class if self.is_streamed(store) => TileOp::Stream(class),
                class => TileOp::Copy(class),
            };
            if !(self.is_apart() && level == Level::Full) {
                self.push(InstructionKind::Tile(op, [at; 3]), level, Source::Result(store));
                continue;
            }
            let mut from = at;
            if is_half {
                from = self.register(level, dtype.size());
                self.push(InstructionKind::Tile(op, [at; 3]), level, from);
            }
            let strides = self.strides(&Layout::contiguous(self.kernel.space), level);
            self.push(InstructionKind::Scatter(from, store, strides), level, Source::Result(store));
        }
        let is_streamed = (0..self.kernel.stores.len()).any(|store| self.is_streamed(store));
        let cost = self.instructions.iter().map(|instruction| instruction.kind.cost()).sum::<usize>().max(1);
        let Compile { strategy, loads, instructions, singles, constants, registers, row_registers, .. } = self;
        MapProgram { instructions, singles, constants, registers, row_registers, loads, strategy, is_streamed, cost }
    }

    fn value(&mut self, n: usize) {
        if !self.arithmetic(n) {
            self.plain(n);
        }
    }

    /// Makes a value by itself.
    pub(super) fn plain(&mut self, n: usize) {
        let value = self.kernel.values[n].clone();
        let (class, level) = (self.class(n), value.level);
        let at = match value.kind {
            ValueKind::Fill(parameter) => {
                self.singles.push(Single { number: SingleNumber::Given(parameter), dtype: value.dtype });
                Source::Single(self.singles.len() - 1)
            }
            ValueKind::Load(load) => {
                let is_half = matches!(value.dtype, DType::F16 | DType::BF16);
                let mut at = Source::Memory(load);
                if !self.loads[load].is_direct {
                    at = self.register(level, self.loads[load].bytes);
                    self.push(InstructionKind::Gather(load), level, at);
                }
                if is_half {
                    let to = self.register(level, 4);
                    self.push(InstructionKind::Tile(TileOp::LoadHalf(value.dtype), [at; 3]), level, to);
                    if let Source::Register(register) = at {
                        self.free.push(register);
                    }
                    at = to;
                }
                at
            }
            ValueKind::Iota(layout) => {
                let to = self.register(level, 8);
                let strides = self.strides(&layout, level);
                self.push(InstructionKind::Iota(strides), level, to);
                to
            }
            ValueKind::Random(parameter, layout) => {
                let to = self.register(level, 4);
                let strides = self.strides(&layout, level);
                self.push(InstructionKind::Random(parameter, strides), level, to);
                to
            }
            ValueKind::Reduce(op, operand) => {
                let from = self.operand(operand, Level::Full);
                if let Strategy::Accumulate(accumulate) = &mut self.strategy {
                    // Two nodes that are the same value are both stored. The operand is read after the tile, so its
                    // register stays.
                    let stores = self.kernel.stores.iter().enumerate().filter(|(_, (stored, _))| *stored == n);
                    accumulate.results.extend(stores.map(|(result, _)| (op, value.dtype, from, result)));
                    return;
                }
                let to = self.register(Level::Row, class.size());
                self.push(InstructionKind::Reduce(op, class, from), Level::Row, to);
                self.done_with(operand);
                self.rounded(n, to)
            }
            ValueKind::Unary(op, a) => {
                let class = self.class(a);
                self.tile(n, TileOp::Unary(op, class), &[a])
            }
            ValueKind::Binary(op, a, b) => {
                let class = self.class(a);
                let is_single = |value: usize| matches!(self.at[value], Some(Source::Single(_)));
                let single = match (is_single(a), is_single(b)) {
                    _ if !tile::takes_single(op, class) => None,
                    (true, false) => Some(Side::Left),
                    (false, true) => Some(Side::Right),
                    _ => None,
                };
                if single.is_none()
                    && let Some(at) = self.with_rows(n, op, a, b)
                {
                    self.at[n] = Some(at);
                    return;
                }
                let op = match single {
                    Some(single) => TileOp::BinaryWith(op, class, single),
                    None => TileOp::Binary(op, class),
                };
                self.tile(n, op, &[a, b])
            }
            ValueKind::Where(condition, a, b) => self.tile(n, TileOp::Where(class), &[condition, a, b]),
            ValueKind::Cast(a) => {
                let from = self.kernel.values[a].dtype;
                self.tile(n, TileOp::Cast(from, value.dtype), &[a])
            }
        };
        self.at[n] = Some(at);
    }

    /// An operation on whole rows and what is one a row, which need not be repeated then. Short rows are not worth it.
    fn with_rows(&mut self, n: usize, op: BinaryOp, a: usize, b: usize) -> Option<Source> {
        let Strategy::Rows { inner, .. } = self.strategy else { return None };
        let of = |value: usize| (self.kernel.values[value].level, self.repeated[value].is_none());
        let (single, full, row) = match (of(a), of(b)) {
            ((Level::Row, true), (Level::Full, _)) => (Side::Left, b, a),
            ((Level::Full, _), (Level::Row, true)) => (Side::Right, a, b),
            _ => return None,
        };
        let (operand, class) = (self.class(a), self.class(n));
        if inner < ROW_MIN || self.kernel.values[n].level != Level::Full || !tile::takes_single(op, operand) {
            return None;
        }
        let (from, by) = (self.operand(full, Level::Full), self.at[row]?);
        let to = match self.result(n) {
            Some(store) => Source::Result(store),
            None => self.register(Level::Full, class.size()),
        };
        [a, b].into_iter().for_each(|operand| self.done_with(operand));
        let kind = InstructionKind::WithRows(TileOp::BinaryWith(op, operand, single), single, from, by);
        self.push(kind, Level::Full, to);
        Some(self.rounded(n, to))
    }

    /// Half precision is rounded after each operation: a value is the same whether it was stored in between or not.
    fn rounded(&mut self, n: usize, at: Source) -> Source {
        let dtype = self.kernel.values[n].dtype;
        let is_cast = matches!(self.kernel.values[n].kind, ValueKind::Cast(_));
        if is_cast || !matches!(dtype, DType::F16 | DType::BF16) {
            return at;
        }
        let level = self.kernel.values[n].level;
        let to = self.register(level, Class::F32.size());
        self.push(InstructionKind::Tile(TileOp::Cast(dtype, dtype), [at; 3]), level, to);
        if let Source::Register(register) = at {
            self.free.push(register);
        }
        to
    }

    fn tile(&mut self, n: usize, op: TileOp, operands: &[usize]) -> Source {
        let (class, level) = (self.class(n), self.kernel.values[n].level);
        // Operations of fewer than three operands do not look at the rest.
        let mut from = [Source::Register(0); 3];
        for (n, operand) in operands.iter().enumerate() {
            let is_single = match op {
                TileOp::BinaryWith(_, _, Side::Left) => n == 0,
                TileOp::BinaryWith(_, _, Side::Right) => n == 1,
                _ => false,
            };
            let single = self.at[*operand].filter(|_| is_single);
            from[n] = single.unwrap_or_else(|| self.operand(*operand, level));
        }
        (operands.len()..3).for_each(|n| from[n] = from[0]);
        // A register of its own: the loops rely on it.
        let to = match self.result(n) {
            Some(store) => Source::Result(store),
            None => self.register(level, class.size()),
        };
        operands.iter().for_each(|operand| self.done_with(*operand));
        self.push(InstructionKind::Tile(op, from), level, to);
        self.rounded(n, to)
    }
}
