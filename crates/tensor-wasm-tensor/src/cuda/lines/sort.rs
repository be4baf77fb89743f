//! Sorting by merging. Each team sorts a tile: an item sorts neighbours in registers, then runs of items are merged in
//! shared memory. Where a line has several tiles, kernels merge pairs of runs until one is left. Each team makes a tile
//! of the result, and searches where both runs are cut for it (the merge path), so that all have as much to do.
//!
//! What is sorted are entries: a key, which is compared as an integer, and the number of the element in its line. No
//! two are equal, so that whatever sorts them keeps the order of equal elements.

use tensor_wasm_jit::Ty;
use tensor_wasm_jit::build::{BinaryOp as B, BuildError, KernelBuilder, UnaryOp as U, Value, Variable};

use super::{EACH, Line, Member, Units, lines_of, team};
use crate::cuda::index::{Indices, small, times};
use crate::cuda::map::{Argument, GROUP, LoweredKernel, LoweredStep};
use crate::cuda::numbers::{Built, Class, Numbers, Registers};
use crate::cuda::special::{load_at, number_of, store_at};
use crate::cuda::tile::WARP;
use crate::schedule::plan::{Source, SpecialKernel};
use crate::shape::Layout;

/// Elements of a tile that a whole group has.
const TILE: usize = GROUP as usize * EACH;

/// Which of an item's elements are compared and exchanged, one pair after the other, until they are sorted: Batcher's
/// network.
const NETWORK: [(usize, usize); 19] = [
    (0, 1),
    (2, 3),
    (4, 5),
    (6, 7),
    (0, 2),
    (1, 3),
    (4, 6),
    (5, 7),
    (1, 2),
    (5, 6),
    (0, 4),
    (1, 5),
    (2, 6),
    (3, 7),
    (2, 4),
    (3, 5),
    (1, 2),
    (3, 4),
    (5, 6),
];
const _: () = assert!(EACH == 8);

pub(in crate::cuda) fn arg_sort(kernel: &SpecialKernel, axis: usize, is_descending: bool) -> Built<LoweredStep> {
    let view = &kernel.inputs[0];
    let class = Class::of(view.dtype);
    let sort =
        Sort { name: "arg_sort", lines: lines_of(&kernel.shape, axis), len: kernel.shape[axis], kind: Kind::of(class) };
    let result = Layout::contiguous(kernel.shape);
    let load = |b: &mut KernelBuilder, windows: &[Value], member: &Member, n: Value| {
        let line = Line::of(b, &view.layout, axis, member.line)?;
        let place = line.place(b, n)?;
        let value = load_at(b, view.dtype, windows[0], place)?;
        let key = key(b, class, value)?;
        let key = if is_descending { inverted(b, class, key)? } else { key };
        sort.kind.entry(b, key, n)
    };
    let store = |b: &mut KernelBuilder, window: Value, member: &Member, n: Value, entry: Entry| {
        let line = Line::of(b, &result, axis, member.line)?;
        let place = line.place(b, n)?;
        let at = sort.kind.number(b, entry)?;
        let at = b.unary(U::I64ExtendI32U, at)?;
        store_at(b, kernel.dtype, at, window, place)
    };
    sort.lower(&[Argument::Buffer(view.source)], &load, Argument::Buffer(Source::Slot(kernel.slot)), &store, 0)
}

/// An integer that is as large among others as an element is: NaN is larger than everything, and both zeros are one.
fn key(b: &mut KernelBuilder, class: Class, value: Value) -> Built<Value> {
    if !class.is_float() {
        return Ok(value);
    }
    let mut numbers = Numbers { b: &mut *b };
    let (zero, is_nan) = (numbers.number(class, 0.0)?, numbers.is_nan(class, value)?);
    let value = numbers.add(class, value, zero)?;
    // Negative ones are the larger the smaller their other bits are.
    if class == Class::F32 {
        let (shift, mask, most) = (b.i32(31)?, b.i32(i32::MAX)?, b.i32(i32::MAX)?);
        let bits = b.unary(U::I32ReinterpretF32, value)?;
        let sign = b.binary(B::I32ShrS, bits, shift)?;
        let turned = b.binary(B::I32And, sign, mask)?;
        let key = b.binary(B::I32Xor, bits, turned)?;
        return b.select(is_nan, most, key);
    }
    let (shift, mask, most) = (b.i64(63)?, b.i64(i64::MAX)?, b.i64(i64::MAX)?);
    let bits = b.unary(U::I64ReinterpretF64, value)?;
    let sign = b.binary(B::I64ShrS, bits, shift)?;
    let turned = b.binary(B::I64And, sign, mask)?;
    let key = b.binary(B::I64Xor, bits, turned)?;
    b.select(is_nan, most, key)
}

/// The key by which the largest is the first.
fn inverted(b: &mut KernelBuilder, class: Class, key: Value) -> Built<Value> {
    if Kind::of(class) == Kind::Wide {
        let ones = b.i64(-1)?;
        return b.binary(B::I64Xor, key, ones);
    }
    let ones = b.i32(-1)?;
    b.binary(B::I32Xor, key, ones)
}

/// How an entry is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A key of 32 bits above the number of the element: one integer, which is compared as a whole.
    Packed,
    /// A key of 64 bits, and the number beside it.
    Wide,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    key: Value,
    beside: Option<Value>,
}

impl Kind {
    fn of(class: Class) -> Kind {
        match class {
            Class::U8 | Class::I32 | Class::F32 => Kind::Packed,
            Class::I64 | Class::F64 => Kind::Wide,
        }
    }

    /// Bytes of what entries are kept in: keys, and the numbers beside them.
    fn bytes(self) -> &'static [u32] {
        match self {
            Kind::Packed => &[8],
            Kind::Wide => &[8, 4],
        }
    }

    pub(super) fn entry(self, b: &mut KernelBuilder, key: Value, number: Value) -> Built<Entry> {
        if self == Kind::Wide {
            return Ok(Entry { key, beside: Some(number) });
        }
        let (key, number, shift) = (b.unary(U::I64ExtendI32U, key)?, b.unary(U::I64ExtendI32U, number)?, b.i64(32)?);
        let key = b.binary(B::I64Shl, key, shift)?;
        Ok(Entry { key: b.binary(B::I64Or, key, number)?, beside: None })
    }

    /// An entry behind all that are there, of a number beyond theirs.
    fn beyond(self, b: &mut KernelBuilder, number: Value) -> Built<Entry> {
        let most = if self == Kind::Wide { b.i64(i64::MAX)? } else { b.i32(i32::MAX)? };
        self.entry(b, most, number)
    }

    /// The number of the element in its line.
    pub(super) fn number(self, b: &mut KernelBuilder, entry: Entry) -> Built<Value> {
        match entry.beside {
            Some(number) => Ok(number),
            None => b.unary(U::I32WrapI64, entry.key),
        }
    }

    fn load(self, b: &mut KernelBuilder, windows: &[Value], at: Value) -> Built<Entry> {
        let address = b.element(windows[0], at, 8)?;
        let key = b.load(Ty::I64, address, 0)?;
        let Some(beside) = windows.get(1) else { return Ok(Entry { key, beside: None }) };
        let address = b.element(*beside, at, 4)?;
        Ok(Entry { key, beside: Some(b.load(Ty::I32, address, 0)?) })
    }

    pub(super) fn store(self, b: &mut KernelBuilder, entry: Entry, windows: &[Value], at: Value) -> Built<()> {
        let address = b.element(windows[0], at, 8)?;
        b.store(entry.key, address, 0)?;
        let Some((beside, window)) = entry.beside.zip(windows.get(1)) else { return Ok(()) };
        let address = b.element(*window, at, 4)?;
        b.store(beside, address, 0)
    }
}

impl Entry {
    fn is_before(self, b: &mut KernelBuilder, other: Entry) -> Built<Value> {
        let is_less = b.binary(B::I64LtS, self.key, other.key)?;
        let Some((own, other_number)) = self.beside.zip(other.beside) else { return Ok(is_less) };
        let (is_same, is_earlier) = (b.binary(B::I64Eq, self.key, other.key)?, b.binary(B::I32LtU, own, other_number)?);
        let is_first = b.binary(B::I32And, is_same, is_earlier)?;
        b.binary(B::I32Or, is_less, is_first)
    }

    fn select(b: &mut KernelBuilder, condition: Value, one: Entry, other: Entry) -> Built<Entry> {
        let key = b.select(condition, one.key, other.key)?;
        let beside = match one.beside.zip(other.beside) {
            Some((one, other)) => Some(b.select(condition, one, other)?),
            None => None,
        };
        Ok(Entry { key, beside })
    }
}

/// Lines of entries that are to be sorted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sort {
    pub name: &'static str,
    pub lines: usize,
    pub len: usize,
    pub kind: Kind,
}

/// Makes the entry of the element with a number of a line, from windows.
pub(super) type LoadEntry<'l> = &'l dyn Fn(&mut KernelBuilder, &[Value], &Member, Value) -> Built<Entry>;

/// Stores the entry that has come to a place of a line.
pub(super) type StoreEntry<'s> = &'s dyn Fn(&mut KernelBuilder, Value, &Member, Value, Entry) -> Built<()>;

/// Two runs in shared memory, the second anywhere after the first: where each begins, and how many it has.
struct Runs {
    first: Value,
    first_len: Value,
    second: Value,
    second_len: Value,
}

impl Sort {
    /// The kernels that sort, with scratch memory from a number on.
    pub(super) fn lower(
        self,
        from: &[Argument],
        load: LoadEntry<'_>,
        to: Argument,
        store: StoreEntry<'_>,
        first_scratch: usize,
    ) -> Built<LoweredStep> {
        let passes = self.len.div_ceil(TILE).next_power_of_two().trailing_zeros() as usize;
        let arrays = self.kind.bytes();
        // Of two places for entries, each pass reads one and writes the other.
        let place = |pass: usize| -> Vec<Argument> {
            let first = first_scratch + pass % 2 * arrays.len();
            (first..first + arrays.len()).map(Argument::Scratch).collect()
        };
        let written = |pass: usize| if pass == passes { vec![to] } else { place(pass) };
        let mut kernels = vec![self.tiles(from, load, (written(0), passes == 0), store)?];
        for pass in 0..passes {
            kernels.push(self.merge(TILE << pass, &place(pass), (written(pass + 1), pass + 1 == passes), store)?);
        }
        let count = (self.lines * self.len) as u64;
        let scratch_bytes =
            (0..passes.min(2)).flat_map(|_| arrays.iter().map(|bytes| u64::from(*bytes) * count)).collect();
        Ok(LoweredStep { kernels, scratch_bytes })
    }

    /// Stores what has come to a place: a result, or an entry.
    fn put(
        self,
        b: &mut KernelBuilder,
        member: &Member,
        (windows, is_last): (&[Value], bool),
        (n, entry): (Value, Entry),
        store: StoreEntry<'_>,
    ) -> Built<()> {
        if is_last {
            return store(b, windows[0], member, n, entry);
        }
        let line = times(b, member.line, self.len.cast_signed())?;
        let at = b.binary(B::I32Add, line, n)?;
        self.kind.store(b, entry, windows, at)
    }

    /// Sorts each tile by itself.
    fn tiles(
        self,
        from: &[Argument],
        load: LoadEntry<'_>,
        (to, is_last): (Vec<Argument>, bool),
        store: StoreEntry<'_>,
    ) -> Built<LoweredKernel> {
        let team = team(self.len);
        let units = Units { lines: self.lines, parts: self.len.div_ceil(team * EACH), team };
        let arguments = from.iter().copied().chain(to).collect();
        super::kernel(self.name, arguments, units, |b, windows, member| {
            let (from, to) = windows.split_at(from.len());
            let shared = Shared::new(b, self.kind, units)?;
            let (end, last) = (number_of(b, self.len)?, number_of(b, self.len - 1)?);
            let first = times(b, member.part, (team * EACH).cast_signed())?;
            let (mut places, mut entries) = (Vec::with_capacity(EACH), Vec::with_capacity(EACH));
            for n in 0..EACH {
                let shift = number_of(b, n * team)?;
                let within = b.binary(B::I32Add, member.in_team, shift)?;
                let n = b.binary(B::I32Add, first, within)?;
                let is_inside = b.binary(B::I32LtU, n, end)?;
                let at = b.select(is_inside, n, last)?;
                let (entry, beyond) = (load(b, from, member, at)?, self.kind.beyond(b, n)?);
                entries.push(Entry::select(b, is_inside, entry, beyond)?);
                places.push((within, n, is_inside));
            }
            // Where an element comes from does not matter before they are sorted: each item takes those it has loaded.
            for (low, high) in NETWORK {
                let is_before = entries[high].is_before(b, entries[low])?;
                let (one, other) = (entries[low], entries[high]);
                entries[low] = Entry::select(b, is_before, other, one)?;
                entries[high] = Entry::select(b, is_before, one, other)?;
            }
            if let Some(shared) = shared {
                entries = self.merge_items(b, member, &shared, team, entries)?;
                shared.put_own(b, member, &entries)?;
                b.barrier()?;
                entries.clear();
                for (within, ..) in &places {
                    entries.push(shared.load(b, member, *within)?);
                }
            }
            for ((_, n, is_inside), entry) in places.into_iter().zip(entries) {
                let is_stored = b.binary(B::I32And, is_inside, member.is_unit)?;
                b.begin_if(is_stored, &[])?;
                self.put(b, member, (to, is_last), (n, entry), store)?;
                b.end()?;
            }
            Ok(())
        })
    }

    /// Merges what the items of a team have, until they have one run together.
    fn merge_items(
        self,
        b: &mut KernelBuilder,
        member: &Member,
        shared: &Shared,
        team: usize,
        entries: Vec<Entry>,
    ) -> Built<Vec<Entry>> {
        let variables: Vec<(Variable, Option<Variable>)> = entries
            .into_iter()
            .map(|entry| Ok((b.variable(entry.key)?, entry.beside.map(|beside| b.variable(beside)).transpose()?)))
            .collect::<Built<_>>()?;
        let carried: Vec<Variable> =
            variables.iter().flat_map(|(key, beside)| [Some(*key), *beside]).flatten().collect();
        let get = |b: &KernelBuilder| -> Built<Vec<Entry>> {
            let one = |(key, beside): &(Variable, Option<Variable>)| {
                Ok(Entry { key: b.get(*key)?, beside: beside.map(|beside| b.get(beside)).transpose()? })
            };
            variables.iter().map(one).collect()
        };
        let levels = b.i32(team.trailing_zeros().cast_signed())?;
        b.count_to::<BuildError>(levels, &carried, |b, level| {
            let own = get(b)?;
            shared.put_own(b, member, &own)?;
            b.barrier()?;
            let (each, one) = (number_of(b, EACH)?, b.i32(1)?);
            let run = b.binary(B::I32Shl, each, level)?;
            let both = b.binary(B::I32Shl, run, one)?;
            let mask = b.binary(B::I32Sub, both, one)?;
            let own = times(b, member.in_team, EACH.cast_signed())?;
            let within = b.binary(B::I32And, own, mask)?;
            let first = b.binary(B::I32Sub, own, within)?;
            let second = b.binary(B::I32Add, first, run)?;
            let runs = Runs { first, first_len: run, second, second_len: run };
            // Of a run's length and one possible numbers.
            let first_rounds = b.i32(1 + EACH.trailing_zeros().cast_signed())?;
            let rounds = b.binary(B::I32Add, first_rounds, level)?;
            let merged = shared.merge(b, member, &runs, within, rounds)?;
            // Nobody writes before everybody has read.
            b.barrier()?;
            for ((key, beside), entry) in variables.iter().zip(merged) {
                b.set(*key, entry.key)?;
                if let Some((beside, value)) = beside.zip(entry.beside) {
                    b.set(beside, value)?;
                }
            }
            Ok(())
        })?;
        get(b)
    }

    /// Merges runs of so many entries, two by two.
    fn merge(
        self,
        run: usize,
        from: &[Argument],
        (to, is_last): (Vec<Argument>, bool),
        store: StoreEntry<'_>,
    ) -> Built<LoweredKernel> {
        let units = Units { lines: self.lines, parts: self.len.div_ceil(TILE), team: GROUP as usize };
        let arguments = from.iter().copied().chain(to).collect();
        let name = format!("{}_merge", self.name);
        super::kernel(&name, arguments, units, |b, windows, member| {
            let (from, to) = windows.split_at(from.len());
            let missing = BuildError::Structure { what: "a group that merges has shared memory" };
            let shared = Shared::new(b, self.kind, units)?.ok_or(missing)?;
            let cuts = b.shared(8)?;
            let line = times(b, member.line, self.len.cast_signed())?;
            let end = number_of(b, self.len)?;
            // The pair of runs that the tile is of.
            let begin = times(b, member.part, TILE.cast_signed())?;
            let mask = b.i32(!(small(2 * run) - 1).cast_signed())?;
            let first = b.binary(B::I32And, begin, mask)?;
            let run_len = number_of(b, run)?;
            let second = b.binary(B::I32Add, first, run_len)?;
            let second = least(b, second, end)?;
            let after = b.binary(B::I32Add, second, run_len)?;
            let after = least(b, after, end)?;
            let (first_len, second_len) = (b.binary(B::I32Sub, second, first)?, b.binary(B::I32Sub, after, second)?);
            let tile = number_of(b, TILE)?;
            let tile_end = b.binary(B::I32Add, begin, tile)?;
            let tile_end = least(b, tile_end, end)?;
            let count = b.binary(B::I32Sub, tile_end, begin)?;
            // Odd warps look for the tile's end, even ones for its beginning, both at the same time.
            let one = b.i32(1)?;
            let (warp, lane) = Indices::default().divide(b, member.item, WARP)?;
            let is_odd = b.binary(B::I32And, warp, one)?;
            let merged = b.select(is_odd, tile_end, begin)?;
            let merged = b.binary(B::I32Sub, merged, first)?;
            let (first_at, second_at) = (b.binary(B::I32Add, line, first)?, b.binary(B::I32Add, line, second)?);
            let last = b.binary(B::I32Add, line, end)?;
            let last = b.binary(B::I32Sub, last, one)?;
            let found = cut(b, (first_len, second_len), merged, (lane, run), |b, n, m| {
                let (x, y) = (b.binary(B::I32Add, first_at, n)?, b.binary(B::I32Add, second_at, m)?);
                let (x, y) = (least(b, x, last)?, least(b, y, last)?);
                let (x, y) = (self.kind.load(b, from, x)?, self.kind.load(b, from, y)?);
                x.is_before(b, y)
            })?;
            // One item of each of two warps.
            let others = b.i32(!WARP.cast_signed())?;
            let others = b.binary(B::I32And, member.item, others)?;
            let is_one = b.unary(U::I32Eqz, others)?;
            b.begin_if(is_one, &[])?;
            let address = b.element(cuts, warp, 4)?;
            b.store(found, address, 0)?;
            b.end()?;
            b.barrier()?;
            let (from_first, to_first) = (b.load(Ty::I32, cuts, 0)?, b.load(Ty::I32, cuts, 4)?);
            let in_first = b.binary(B::I32Sub, to_first, from_first)?;
            let in_second = b.binary(B::I32Sub, count, in_first)?;
            // What is of the second run begins where the rest of the tile does.
            let before = b.binary(B::I32Sub, begin, first)?;
            let from_second = b.binary(B::I32Sub, before, from_first)?;
            let first_at = b.binary(B::I32Add, first_at, from_first)?;
            let second_at = b.binary(B::I32Add, second_at, from_second)?;
            let second_at = b.binary(B::I32Sub, second_at, in_first)?;
            let mut places = Vec::with_capacity(EACH);
            let mut entries = Vec::with_capacity(EACH);
            for n in 0..EACH {
                let shift = number_of(b, n * units.team)?;
                let within = b.binary(B::I32Add, member.in_team, shift)?;
                let is_first = b.binary(B::I32LtU, within, in_first)?;
                let start = b.select(is_first, first_at, second_at)?;
                let at = b.binary(B::I32Add, start, within)?;
                let is_inside = b.binary(B::I32LtU, within, count)?;
                let at = b.select(is_inside, at, line)?;
                entries.push(self.kind.load(b, from, at)?);
                places.push((within, is_inside));
            }
            for ((within, _), entry) in places.iter().zip(entries) {
                shared.store(b, member, *within, entry)?;
            }
            b.barrier()?;
            let own = times(b, member.in_team, EACH.cast_signed())?;
            let own = least(b, own, count)?;
            let zero = b.i32(0)?;
            let runs = Runs { first: zero, first_len: in_first, second: in_first, second_len: in_second };
            let rounds = b.i32(1 + TILE.trailing_zeros().cast_signed())?;
            let merged = shared.merge(b, member, &runs, own, rounds)?;
            b.barrier()?;
            shared.put_own(b, member, &merged)?;
            b.barrier()?;
            for (within, is_inside) in places {
                let entry = shared.load(b, member, within)?;
                let n = b.binary(B::I32Add, begin, within)?;
                b.begin_if(is_inside, &[])?;
                self.put(b, member, (to, is_last), (n, entry), store)?;
                b.end()?;
            }
            Ok(())
        })
    }
}

fn least(b: &mut KernelBuilder, x: Value, y: Value) -> Built<Value> {
    let is_less = b.binary(B::I32LtU, x, y)?;
    b.select(is_less, x, y)
}

/// From how many to how many of the first run can be among so many of the two merged.
fn possible(b: &mut KernelBuilder, (first_len, second_len): (Value, Value), merged: Value) -> Built<(Value, Value)> {
    let (zero, high) = (b.i32(0)?, least(b, merged, first_len)?);
    let is_beyond = b.binary(B::I32LtU, second_len, merged)?;
    let low = b.binary(B::I32Sub, merged, second_len)?;
    Ok((b.select(is_beyond, low, zero)?, high))
}

/// The entry of the second run that comes before an entry of the first, if that is not among so many of the two merged.
fn other_side(b: &mut KernelBuilder, merged: Value, n: Value) -> Built<Value> {
    let (other, one) = (b.binary(B::I32Sub, merged, n)?, b.i32(1)?);
    let is_none = b.unary(U::I32Eqz, other)?;
    let below = b.binary(B::I32Sub, other, one)?;
    b.select(is_none, other, below)
}

/// The same as [`bisect`] by a whole warp, for runs in the device's memory: its items ask at as many places at once, as
/// each answer takes some hundreds of cycles. Neither run has more than `longest`.
fn cut(
    b: &mut KernelBuilder,
    lens: (Value, Value),
    merged: Value,
    (lane, longest): (Value, usize),
    is_before: impl Fn(&mut KernelBuilder, Value, Value) -> Built<Value>,
) -> Built<Value> {
    let (mut low, mut high) = possible(b, lens, merged)?;
    let places = WARP as usize;
    let mut step = 1;
    while step * places < longest {
        step *= places;
    }
    while step > 0 {
        // The last entry of each of as many parts as there are items: all of a part are among those merged, or it is
        // the last that is looked through.
        let (more, size) = (number_of(b, step - 1)?, number_of(b, step)?);
        let n = times(b, lane, step.cast_signed())?;
        let n = b.binary(B::I32Add, n, more)?;
        let n = b.binary(B::I32Add, low, n)?;
        let is_possible = b.binary(B::I32LtU, n, high)?;
        let n = b.select(is_possible, n, low)?;
        let other = other_side(b, merged, n)?;
        let is_whole = is_before(b, n, other)?;
        let mut count = b.binary(B::I32And, is_whole, is_possible)?;
        let mut half = WARP / 2;
        while half > 0 {
            let other = b.shuffle(count, half)?;
            count = b.binary(B::I32Add, count, other)?;
            half /= 2;
        }
        let whole = b.binary(B::I32Mul, count, size)?;
        low = b.binary(B::I32Add, low, whole)?;
        let end = b.binary(B::I32Add, low, more)?;
        high = least(b, end, high)?;
        step /= places;
    }
    Ok(low)
}

/// How many of the first run are among so many of the two merged: halved so often, one number is left. `is_before`
/// says whether an entry of the first run is before one of the second; it is also asked about entries next to those of
/// the runs, whatever it answers then.
fn bisect(
    b: &mut KernelBuilder,
    (first_len, second_len): (Value, Value),
    merged: Value,
    rounds: Value,
    is_before: impl Fn(&mut KernelBuilder, Value, Value) -> Built<Value>,
) -> Built<Value> {
    let (low, high) = possible(b, (first_len, second_len), merged)?;
    let (low, high) = (b.variable(low)?, b.variable(high)?);
    b.count_to::<BuildError>(rounds, &[low, high], |b, _| {
        let (from, to, one) = (b.get(low)?, b.get(high)?, b.i32(1)?);
        let sum = b.binary(B::I32Add, from, to)?;
        let middle = b.binary(B::I32ShrU, sum, one)?;
        let other = other_side(b, merged, middle)?;
        let is_more = is_before(b, middle, other)?;
        let is_open = b.binary(B::I32LtU, from, to)?;
        let is_more = b.binary(B::I32And, is_more, is_open)?;
        let next = b.binary(B::I32Add, middle, one)?;
        let from = b.select(is_more, next, from)?;
        let below = b.select(is_open, middle, to)?;
        let to = b.select(is_more, to, below)?;
        b.set(low, from)?;
        b.set(high, to)
    })?;
    b.get(low)
}

/// The tiles of a group's teams. Behind each item's entries there is a gap, so that those of neighbours are in
/// different banks; and behind all there is room for what is read and not used.
struct Shared {
    kind: Kind,
    windows: Vec<Value>,
}

impl Shared {
    /// None where items have nothing to merge.
    fn new(b: &mut KernelBuilder, kind: Kind, units: Units) -> Built<Option<Shared>> {
        if units.team == 1 {
            return Ok(None);
        }
        let entries = small(units.group() * (EACH + 1) + 2 * EACH);
        let windows = kind.bytes().iter().map(|bytes| b.shared(bytes * entries)).collect::<Built<_>>()?;
        Ok(Some(Shared { kind, windows }))
    }

    fn place(b: &mut KernelBuilder, member: &Member, within: Value) -> Built<Value> {
        let team = b.binary(B::I32Sub, member.item, member.in_team)?;
        let team = times(b, team, EACH.cast_signed() + 1)?;
        let shift = b.i32(EACH.trailing_zeros().cast_signed())?;
        let gaps = b.binary(B::I32ShrU, within, shift)?;
        let place = b.binary(B::I32Add, within, gaps)?;
        b.binary(B::I32Add, team, place)
    }

    fn load(&self, b: &mut KernelBuilder, member: &Member, within: Value) -> Built<Entry> {
        let place = Shared::place(b, member, within)?;
        self.kind.load(b, &self.windows, place)
    }

    fn store(&self, b: &mut KernelBuilder, member: &Member, within: Value, entry: Entry) -> Built<()> {
        let place = Shared::place(b, member, within)?;
        self.kind.store(b, entry, &self.windows, place)
    }

    /// An item's entries to where the team's tile has them.
    fn put_own(&self, b: &mut KernelBuilder, member: &Member, entries: &[Entry]) -> Built<()> {
        let first = times(b, member.in_team, EACH.cast_signed())?;
        for (n, entry) in entries.iter().enumerate() {
            let shift = number_of(b, n)?;
            let within = b.binary(B::I32Add, first, shift)?;
            self.store(b, member, within, *entry)?;
        }
        Ok(())
    }

    /// As many entries of two merged runs as an item has, from one on. Behind the end they are anything.
    fn merge(
        &self,
        b: &mut KernelBuilder,
        member: &Member,
        runs: &Runs,
        from: Value,
        rounds: Value,
    ) -> Built<Vec<Entry>> {
        let Runs { first, first_len, second, second_len } = *runs;
        let found = bisect(b, (first_len, second_len), from, rounds, |b, n, m| {
            let (x, y) = (b.binary(B::I32Add, first, n)?, b.binary(B::I32Add, second, m)?);
            let (x, y) = (self.load(b, member, x)?, self.load(b, member, y)?);
            x.is_before(b, y)
        })?;
        let rest = b.binary(B::I32Sub, from, found)?;
        let (mut at, mut other_at) = (b.binary(B::I32Add, first, found)?, b.binary(B::I32Add, second, rest)?);
        let (end, other_end) = (b.binary(B::I32Add, first, first_len)?, b.binary(B::I32Add, second, second_len)?);
        let (mut own, mut other) = (self.load(b, member, at)?, self.load(b, member, other_at)?);
        let one = b.i32(1)?;
        let mut merged = Vec::with_capacity(EACH);
        for n in 0..EACH {
            let is_left = b.binary(B::I32LtU, at, end)?;
            let is_before = own.is_before(b, other)?;
            let is_other_over = b.binary(B::I32GeU, other_at, other_end)?;
            let is_first = b.binary(B::I32Or, is_before, is_other_over)?;
            let is_first = b.binary(B::I32And, is_first, is_left)?;
            merged.push(Entry::select(b, is_first, own, other)?);
            if n + 1 == EACH {
                break;
            }
            let (next, other_next) = (b.binary(B::I32Add, at, one)?, b.binary(B::I32Add, other_at, one)?);
            (at, other_at) = (b.select(is_first, next, at)?, b.select(is_first, other_at, other_next)?);
            let place = b.select(is_first, at, other_at)?;
            let loaded = self.load(b, member, place)?;
            (own, other) = (Entry::select(b, is_first, loaded, own)?, Entry::select(b, is_first, other, loaded)?);
        }
        Ok(merged)
    }
}
