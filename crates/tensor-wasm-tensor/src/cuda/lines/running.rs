//! Running sums, in as much precision as there is. A team takes tiles of a line one after the other: each of its items
//! adds up neighbours, then items and warps add up what they have. Of a line that is cut into parts, these are summed
//! first, their sums become running ones, and each part goes on from its own.

use tensor_wasm_jit::build::{BinaryOp as B, BuildError, KernelBuilder, UnaryOp as U, Value};

use super::{EACH, ITEMS_ENOUGH, Line, Member, Units, lines_of, runs_along, team};
use crate::cuda::index::{Indices, small, times};
use crate::cuda::map::{Argument, GROUP, LoweredStep};
use crate::cuda::numbers::{Built, Class, Numbers, Registers};
use crate::cuda::special::{load_at, number_of, store_at};
use crate::cuda::tile::WARP;
use crate::dtype::DType;
use crate::schedule::plan::{Source, SpecialKernel};
use crate::shape::Layout;

/// Tiles of a part: fewer are sooner done by a team that has all of them than by two more kernels.
const PART_TILES_MIN: usize = 2;

/// Parts of a line: one team makes their sums running ones.
const PARTS_MAX: usize = 4_096;

/// Bytes of a number in shared memory and between two kernels.
const BYTES: u32 = 8;

/// Elements of an item lie together in shared memory, with a gap behind them: a distance that is odd leads neighbouring
/// items to different banks.
const PADDED: usize = EACH + 1;

/// What is added up, and how the lines are shared.
#[derive(Debug, Clone, Copy)]
struct Running {
    class: Class,
    units: Units,
    len: usize,
    part_len: usize,
    /// Whether an element's own number is not in its sum.
    is_exclusive: bool,
}

pub(in crate::cuda) fn cumsum(kernel: &SpecialKernel, axis: usize, is_reverse: bool) -> Built<LoweredStep> {
    let view = &kernel.inputs[0];
    let wide = if kernel.dtype.is_float() { DType::F64 } else { DType::I64 };
    let (class, result) = (Class::of(wide), Layout::contiguous(kernel.shape));
    let (lines, len) = (lines_of(&kernel.shape, axis), kernel.shape[axis]);
    let team = if runs_along(&result, axis) { team(len) } else { 1 };
    let tile = team * EACH;
    let tiles = len.div_ceil(tile);
    // Items of a smaller team would wait for those of another one that has fewer tiles.
    let can_be_cut = team == 1 || team == GROUP as usize;
    let enough = if can_be_cut { 2 * ITEMS_ENOUGH / (lines * team).max(1) } else { 1 };
    let part_tiles = tiles.div_ceil(enough.min(tiles / PART_TILES_MIN).clamp(1, PARTS_MAX));
    let part_len = part_tiles * tile;
    let units = Units { lines, parts: len.div_ceil(part_len), team };
    let running = Running { class, units, len, part_len, is_exclusive: false };
    let (from, to) = (Argument::Buffer(view.source), Argument::Buffer(Source::Slot(kernel.slot)));
    let turned = |b: &mut KernelBuilder, n: Value| {
        let last = number_of(b, len - 1)?;
        if is_reverse { b.binary(B::I32Sub, last, n) } else { Ok(n) }
    };
    let load = |b: &mut KernelBuilder, window: Value, line: Line, n: Value| {
        let n = turned(b, n)?;
        let place = line.place(b, n)?;
        let value = load_at(b, view.dtype, window, place)?;
        Numbers { b }.cast(view.dtype, wide, value)
    };
    let scan = |b: &mut KernelBuilder, [from, to]: [Value; 2], member: &Member, start: Option<Value>| {
        let line = Line::of(b, &view.layout, axis, member.line)?;
        let results = Line::of(b, &result, axis, member.line)?;
        running.scan(b, member, start, &|b, n| load(b, from, line, n), &|b, n, value| {
            let n = turned(b, n)?;
            let place = results.place(b, n)?;
            let value = Numbers { b: &mut *b }.cast(wide, kernel.dtype, value)?;
            store_at(b, kernel.dtype, value, to, place)
        })
    };
    if units.parts == 1 {
        let only = super::kernel("cumsum", vec![from, to], units, |b, windows, member| {
            scan(b, [windows[0], windows[1]], member, None)
        })?;
        return Ok(LoweredStep { kernels: vec![only], scratch_bytes: Vec::new() });
    }
    let sums = Argument::Scratch(0);
    let number = |b: &mut KernelBuilder, member: &Member| {
        let place = times(b, member.line, units.parts.cast_signed())?;
        b.binary(B::I32Add, place, member.part)
    };
    let of_parts = super::kernel("cumsum_parts", vec![from, sums], units, |b, windows, member| {
        let line = Line::of(b, &view.layout, axis, member.line)?;
        let sum = running.sum(b, member, &|b, n| load(b, windows[0], line, n))?;
        let place = number(b, member)?;
        member.begin_store(b)?;
        let address = b.element(windows[1], place, BYTES)?;
        b.store(sum, address, 0)?;
        b.end()
    })?;
    // In their place: a tile is loaded before any of it is stored.
    let after = Units { lines, parts: 1, team: super::team(units.parts) };
    let starts = Running {
        class,
        units: after,
        len: units.parts,
        part_len: units.parts.next_multiple_of(after.team * EACH),
        is_exclusive: true,
    };
    let of_sums = super::kernel("cumsum_starts", vec![sums], after, |b, windows, member| {
        let first = times(b, member.line, units.parts.cast_signed())?;
        let address = |b: &mut KernelBuilder, n: Value| {
            let place = b.binary(B::I32Add, first, n)?;
            b.element(windows[0], place, BYTES)
        };
        let load = |b: &mut KernelBuilder, n: Value| {
            let address = address(b, n)?;
            b.load(class.ty(), address, 0)
        };
        starts.scan(b, member, None, &load, &|b, n, value| {
            let address = address(b, n)?;
            b.store(value, address, 0)
        })
    })?;
    let of_elements = super::kernel("cumsum", vec![from, to, sums], units, |b, windows, member| {
        let place = number(b, member)?;
        let address = b.element(windows[2], place, BYTES)?;
        let start = b.load(class.ty(), address, 0)?;
        scan(b, [windows[0], windows[1]], member, Some(start))
    })?;
    let scratch_bytes = vec![u64::from(BYTES) * units.count() as u64];
    Ok(LoweredStep { kernels: vec![of_parts, of_sums, of_elements], scratch_bytes })
}

type Load<'l> = &'l dyn Fn(&mut KernelBuilder, Value) -> Built<Value>;
type Store<'s> = &'s dyn Fn(&mut KernelBuilder, Value, Value) -> Built<()>;

impl Running {
    fn zero(self, b: &mut KernelBuilder) -> Built<Value> {
        Numbers { b }.number(self.class, 0.0)
    }

    fn add(self, b: &mut KernelBuilder, x: Value, y: Value) -> Built<Value> {
        Numbers { b }.add(self.class, x, y)
    }

    /// The element with a number in its line, and nothing beyond the end; and whether it is there.
    fn load(self, b: &mut KernelBuilder, n: Value, load: Load<'_>) -> Built<(Value, Value)> {
        let (end, last) = (number_of(b, self.len)?, number_of(b, self.len - 1)?);
        let is_inside = b.binary(B::I32LtU, n, end)?;
        let n = b.select(is_inside, n, last)?;
        let (value, zero) = (load(b, n)?, self.zero(b)?);
        Ok((b.select(is_inside, value, zero)?, is_inside))
    }

    fn start(self, b: &mut KernelBuilder, member: &Member) -> Built<Value> {
        times(b, member.part, self.part_len.cast_signed())
    }

    /// The sum of a part, which every item of its team gets.
    fn sum(self, b: &mut KernelBuilder, member: &Member, load: Load<'_>) -> Built<Value> {
        let team = self.units.team;
        let start = self.start(b, member)?;
        let start = b.binary(B::I32Add, start, member.in_team)?;
        let zero = self.zero(b)?;
        let total = b.variable(zero)?;
        let rounds = number_of(b, self.part_len / (team * EACH))?;
        b.count_to::<BuildError>(rounds, &[total], |b, round| {
            let round = times(b, round, (team * EACH).cast_signed())?;
            let from = b.binary(B::I32Add, start, round)?;
            let mut loaded = Vec::with_capacity(EACH);
            for n in 0..EACH {
                let shift = number_of(b, n * team)?;
                let n = b.binary(B::I32Add, from, shift)?;
                loaded.push(self.load(b, n, load)?.0);
            }
            let mut sum = b.get(total)?;
            for value in loaded {
                sum = self.add(b, sum, value)?;
            }
            b.set(total, sum)
        })?;
        let own = b.get(total)?;
        // Nothing is turned.
        let shared = Shared { tiles: None, warps: Shared::warps(b, self.units)? };
        Ok(self.before(b, member, &shared, own)?.1)
    }

    /// What the items of a team before one have, and what all of them have.
    fn before(self, b: &mut KernelBuilder, member: &Member, shared: &Shared, own: Value) -> Built<(Value, Value)> {
        let team = small(self.units.team);
        let (mut before, mut all) = (self.zero(b)?, own);
        let mut distance = 1;
        while distance < team.min(WARP) {
            let other = b.shuffle(all, distance)?;
            let bit = b.i32(distance.cast_signed())?;
            let is_after = b.binary(B::I32And, member.in_team, bit)?;
            let more = self.add(b, other, before)?;
            before = b.select(is_after, more, before)?;
            all = self.add(b, all, other)?;
            distance *= 2;
        }
        let Some(warps) = shared.warps else { return Ok((before, all)) };
        let mut indices = Indices::default();
        let (warp, lane) = indices.divide(b, member.item, WARP)?;
        let is_first = b.unary(U::I32Eqz, lane)?;
        b.begin_if(is_first, &[])?;
        let address = b.element(warps, warp, BYTES)?;
        b.store(all, address, 0)?;
        b.end()?;
        b.barrier()?;
        let first = b.binary(B::I32Sub, member.item, member.in_team)?;
        let (first, _) = indices.divide(b, first, WARP)?;
        let own = b.binary(B::I32Sub, warp, first)?;
        let address = b.element(warps, first, BYTES)?;
        let (mut warps_before, mut total) = (self.zero(b)?, self.zero(b)?);
        for n in 0..team / WARP {
            let number = b.i32(n.cast_signed())?;
            let is_own = b.binary(B::I32Eq, own, number)?;
            warps_before = b.select(is_own, total, warps_before)?;
            let sum = b.load(self.class.ty(), address, BYTES * n)?;
            total = self.add(b, total, sum)?;
        }
        Ok((self.add(b, warps_before, before)?, total))
    }

    /// Stores the running sums of a part, from what comes before it on.
    fn scan(
        self,
        b: &mut KernelBuilder,
        member: &Member,
        start: Option<Value>,
        load: Load<'_>,
        store: Store<'_>,
    ) -> Built<()> {
        let tile = self.units.team * EACH;
        let shared = Shared::new(b, self.units)?;
        let first = self.start(b, member)?;
        let start = start.map_or_else(|| self.zero(b), Ok)?;
        let carried = b.variable(start)?;
        let tiles = number_of(b, self.part_len / tile)?;
        b.count_to::<BuildError>(tiles, &[carried], |b, n| {
            let from = times(b, n, tile.cast_signed())?;
            let from = b.binary(B::I32Add, first, from)?;
            // Loads and stores are of neighbours, sums of what an item has.
            let mut places = Vec::with_capacity(EACH);
            let mut loaded = Vec::with_capacity(EACH);
            for n in 0..EACH {
                let shift = number_of(b, n * self.units.team)?;
                let within = b.binary(B::I32Add, member.in_team, shift)?;
                let n = b.binary(B::I32Add, from, within)?;
                let (value, is_inside) = self.load(b, n, load)?;
                loaded.push(value);
                places.push((within, n, is_inside));
            }
            let own = shared.turn(b, self, member, &places, loaded, true)?;
            let (mut sums, mut sum) = (Vec::with_capacity(EACH), None);
            for value in own {
                let before = sum;
                let after = match before {
                    None => value,
                    Some(before) => self.add(b, before, value)?,
                };
                sums.push(if self.is_exclusive { before } else { Some(after) });
                sum = Some(after);
            }
            let own = sum.map_or_else(|| self.zero(b), Ok)?;
            let (before, all) = self.before(b, member, &shared, own)?;
            let carry = b.get(carried)?;
            let before = self.add(b, carry, before)?;
            let mut results = Vec::with_capacity(EACH);
            for sum in sums {
                results.push(match sum {
                    None => before,
                    Some(sum) => self.add(b, before, sum)?,
                });
            }
            let results = shared.turn(b, self, member, &places, results, false)?;
            for ((_, n, is_inside), value) in places.iter().zip(results) {
                let is_stored = b.binary(B::I32And, *is_inside, member.is_unit)?;
                b.begin_if(is_stored, &[])?;
                store(b, *n, value)?;
                b.end()?;
            }
            let carry = self.add(b, carry, all)?;
            b.set(carried, carry)
        })
    }
}

/// A group's shared memory: the tiles of its teams, and a number for each warp. What needs none has none.
struct Shared {
    tiles: Option<Value>,
    warps: Option<Value>,
}

impl Shared {
    fn new(b: &mut KernelBuilder, units: Units) -> Built<Shared> {
        let tiles = if units.team > 1 { Some(b.shared(BYTES * small(units.group() * PADDED))?) } else { None };
        Ok(Shared { tiles, warps: Shared::warps(b, units)? })
    }

    fn warps(b: &mut KernelBuilder, units: Units) -> Built<Option<Value>> {
        if units.team <= WARP as usize {
            return Ok(None);
        }
        b.shared(BYTES * small(units.group()) / WARP).map(Some)
    }

    /// Elements that lie as far apart as the team is large become neighbours, or the other way round. An item writes
    /// only where it was the last to read.
    fn turn(
        &self,
        b: &mut KernelBuilder,
        running: Running,
        member: &Member,
        places: &[(Value, Value, Value)],
        values: Vec<Value>,
        become_neighbours: bool,
    ) -> Built<Vec<Value>> {
        let Some(tiles) = self.tiles else { return Ok(values) };
        let team = b.binary(B::I32Sub, member.item, member.in_team)?;
        let team = times(b, team, PADDED.cast_signed())?;
        let own = times(b, member.in_team, PADDED.cast_signed())?;
        let own = b.binary(B::I32Add, team, own)?;
        let own = b.element(tiles, own, BYTES)?;
        let mut apart = Vec::with_capacity(EACH);
        for (within, ..) in places {
            let (item, _) = Indices::default().divide(b, *within, small(EACH))?;
            let place = b.binary(B::I32Add, *within, item)?;
            let place = b.binary(B::I32Add, team, place)?;
            apart.push(b.element(tiles, place, BYTES)?);
        }
        let together: Vec<(Value, u32)> = (0..small(EACH)).map(|n| (own, BYTES * n)).collect();
        let apart: Vec<(Value, u32)> = apart.into_iter().map(|address| (address, 0)).collect();
        let (to, from) = if become_neighbours { (apart, together) } else { (together, apart) };
        for (value, (address, offset)) in values.into_iter().zip(to) {
            b.store(value, address, offset)?;
        }
        b.barrier()?;
        from.into_iter().map(|(address, offset)| b.load(running.class.ty(), address, offset)).collect()
    }
}
