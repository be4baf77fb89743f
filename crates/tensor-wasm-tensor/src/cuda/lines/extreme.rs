//! Where the largest or the smallest element of each line is: the first of them, and the first NaN before anything
//! else, as on a CPU.

use tensor_wasm_jit::Ty;
use tensor_wasm_jit::build::{BinaryOp as B, BuildError, KernelBuilder, UnaryOp as U, Value};

use super::{EACH, ITEMS_ENOUGH, Line, Member, Units, lines_of, runs_along, team};
use crate::cuda::index::{Indices, small, times};
use crate::cuda::map::{Argument, LoweredStep};
use crate::cuda::numbers::{Built, Class, Numbers, Registers};
use crate::cuda::special::{load_at, number_of, store_at};
use crate::cuda::tile::WARP;
use crate::schedule::plan::{Source, SpecialKernel};

/// An element and its number in its line.
#[derive(Debug, Clone, Copy)]
struct Found {
    value: Value,
    at: Value,
}

/// What is looked for.
#[derive(Debug, Clone, Copy)]
struct Extreme {
    class: Class,
    is_largest: bool,
}

/// The elements that a team goes through: of each part so many, of the line no more than there are.
struct Search {
    team: usize,
    len: usize,
    part_len: usize,
}

pub(in crate::cuda) fn arg_reduce(kernel: &SpecialKernel, axis: usize, is_largest: bool) -> Built<LoweredStep> {
    let view = &kernel.inputs[0];
    let extreme = Extreme { class: Class::of(view.dtype), is_largest };
    let (lines, len) = (lines_of(&kernel.shape, axis), view.layout.shape[axis]);
    let team = if runs_along(&view.layout, axis) { team(len) } else { 1 };
    let parts = (ITEMS_ENOUGH / (lines * team).max(1)).min(len / (team * EACH)).max(1);
    let part_len = len.div_ceil(parts).next_multiple_of(team);
    let units = Units { lines, parts: len.div_ceil(part_len), team };
    let search = Search { team, len, part_len };
    let (from, to) = (Argument::Buffer(view.source), Argument::Buffer(Source::Slot(kernel.slot)));
    let find = |b: &mut KernelBuilder, window: Value, member: &Member| {
        let line = Line::of(b, &view.layout, axis, member.line)?;
        let found = search.find(b, extreme, member, |b, n| {
            let place = line.place(b, n)?;
            Ok(Found { value: load_at(b, view.dtype, window, place)?, at: n })
        })?;
        extreme.of_team(b, member, units, found)
    };
    // Lines are counted as the elements of the result are.
    let store = |b: &mut KernelBuilder, window: Value, member: &Member, found: Found| {
        let at = b.unary(U::I64ExtendI32U, found.at)?;
        member.begin_store(b)?;
        store_at(b, kernel.dtype, at, window, member.line)?;
        b.end()
    };
    if units.parts == 1 {
        let only = super::kernel("arg_reduce", vec![from, to], units, |b, windows, member| {
            let found = find(b, windows[0], member)?;
            store(b, windows[1], member, found)
        })?;
        return Ok(LoweredStep { kernels: vec![only], scratch_bytes: Vec::new() });
    }
    // What the parts of a line have lies together.
    let (values, numbers) = (Argument::Scratch(0), Argument::Scratch(1));
    let bytes = extreme.class.bytes();
    let of_parts = super::kernel("arg_reduce_parts", vec![from, values, numbers], units, |b, windows, member| {
        let found = find(b, windows[0], member)?;
        let place = times(b, member.line, units.parts.cast_signed())?;
        let place = b.binary(B::I32Add, place, member.part)?;
        member.begin_store(b)?;
        let address = b.element(windows[1], place, bytes)?;
        b.store(found.value, address, 0)?;
        let address = b.element(windows[2], place, 4)?;
        b.store(found.at, address, 0)?;
        b.end()
    })?;
    let after = Units { lines, parts: 1, team: super::team(units.parts) };
    let search = Search { team: after.team, len: units.parts, part_len: units.parts };
    let of_lines = super::kernel("arg_reduce", vec![values, numbers, to], after, |b, windows, member| {
        let first = times(b, member.line, units.parts.cast_signed())?;
        let found = search.find(b, extreme, member, |b, n| {
            let place = b.binary(B::I32Add, first, n)?;
            let address = b.element(windows[0], place, bytes)?;
            let value = b.load(extreme.class.ty(), address, 0)?;
            let address = b.element(windows[1], place, 4)?;
            Ok(Found { value, at: b.load(Ty::I32, address, 0)? })
        })?;
        let found = extreme.of_team(b, member, after, found)?;
        store(b, windows[2], member, found)
    })?;
    let count = units.count() as u64;
    Ok(LoweredStep { kernels: vec![of_parts, of_lines], scratch_bytes: vec![u64::from(bytes) * count, 4 * count] })
}

impl Search {
    /// What one item of a team finds. Beyond the end it looks at the last element again, which changes nothing.
    fn find(
        &self,
        b: &mut KernelBuilder,
        extreme: Extreme,
        member: &Member,
        mut load: impl FnMut(&mut KernelBuilder, Value) -> Built<Found>,
    ) -> Built<Found> {
        let each = self.part_len.div_ceil(self.team);
        let loads = [EACH, 4, 2, 1].into_iter().find(|loads| *loads <= each).unwrap_or(1);
        let rounds = each.div_ceil(loads);
        let start = times(b, member.part, self.part_len.cast_signed())?;
        let start = b.binary(B::I32Add, start, member.in_team)?;
        let is_exact = self.len.is_multiple_of(self.part_len) && self.part_len == rounds * loads * self.team;
        let last = number_of(b, self.len - 1)?;
        let inside = |b: &mut KernelBuilder, n: Value| {
            if is_exact {
                return Ok(n);
            }
            let is_inside = b.binary(B::I32LtU, n, last)?;
            b.select(is_inside, n, last)
        };
        let at = inside(b, start)?;
        let first = load(b, at)?;
        let (value, at) = (b.variable(first.value)?, b.variable(first.at)?);
        let rounds = number_of(b, rounds)?;
        b.count_to::<BuildError>(rounds, &[value, at], |b, round| {
            let round = times(b, round, (loads * self.team).cast_signed())?;
            let from = b.binary(B::I32Add, start, round)?;
            let mut found = Vec::with_capacity(loads);
            for n in 0..loads {
                let shift = number_of(b, n * self.team)?;
                let n = b.binary(B::I32Add, from, shift)?;
                let n = inside(b, n)?;
                found.push(load(b, n)?);
            }
            let mut best = Found { value: b.get(value)?, at: b.get(at)? };
            for found in found {
                best = extreme.later(b, best, found)?;
            }
            b.set(value, best.value)?;
            b.set(at, best.at)
        })?;
        Ok(Found { value: b.get(value)?, at: b.get(at)? })
    }
}

impl Extreme {
    /// Whether one is before the other whatever their numbers.
    fn is_more(self, b: &mut KernelBuilder, new: Value, old: Value) -> Built<Value> {
        let (class, mut numbers) = (self.class, Numbers { b: &mut *b });
        let is_more = if self.is_largest { numbers.lt(class, old, new)? } else { numbers.lt(class, new, old)? };
        if !class.is_float() {
            return Ok(is_more);
        }
        // A NaN is beyond everything, and nothing is beyond a NaN.
        let (is_nan, was_number) = (numbers.is_nan(class, new)?, numbers.eq(class, old, old)?);
        let is_first_nan = b.binary(B::I32And, is_nan, was_number)?;
        b.binary(B::I32Or, is_more, is_first_nan)
    }

    /// Of two, of which the second comes later in the line: the first unless the other is more.
    fn later(self, b: &mut KernelBuilder, old: Found, new: Found) -> Built<Found> {
        let is_better = self.is_more(b, new.value, old.value)?;
        Ok(Found { value: b.select(is_better, new.value, old.value)?, at: b.select(is_better, new.at, old.at)? })
    }

    /// Of two that may be anywhere: whichever is more, or else comes first.
    fn best(self, b: &mut KernelBuilder, own: Found, other: Found) -> Built<Found> {
        let (is_more, is_less) = (self.is_more(b, other.value, own.value)?, self.is_more(b, own.value, other.value)?);
        let (is_same, is_before) = (b.unary(U::I32Eqz, is_less)?, b.binary(B::I32LtU, other.at, own.at)?);
        let is_first = b.binary(B::I32And, is_same, is_before)?;
        let is_better = b.binary(B::I32Or, is_more, is_first)?;
        Ok(Found { value: b.select(is_better, other.value, own.value)?, at: b.select(is_better, other.at, own.at)? })
    }

    /// What a team has found: in registers as far as a warp goes, then in shared memory. Every item of it gets it.
    fn of_team(self, b: &mut KernelBuilder, member: &Member, units: Units, own: Found) -> Built<Found> {
        let (mut own, team) = (own, small(units.team));
        let mut half = team.min(WARP) / 2;
        while half > 0 {
            let other = Found { value: b.shuffle(own.value, half)?, at: b.shuffle(own.at, half)? };
            own = self.best(b, own, other)?;
            half /= 2;
        }
        if team <= WARP {
            return Ok(own);
        }
        let warps = small(units.group()) / WARP;
        let (values, numbers) = (b.shared(8 * warps)?, b.shared(4 * warps)?);
        let (warp, lane) = Indices::default().divide(b, member.item, WARP)?;
        let is_first = b.unary(U::I32Eqz, lane)?;
        b.begin_if(is_first, &[])?;
        let address = b.element(values, warp, 8)?;
        b.store(own.value, address, 0)?;
        let address = b.element(numbers, warp, 4)?;
        b.store(own.at, address, 0)?;
        b.end()?;
        b.barrier()?;
        let first = b.binary(B::I32Sub, member.item, member.in_team)?;
        let (first, _) = Indices::default().divide(b, first, WARP)?;
        let (values, numbers) = (b.element(values, first, 8)?, b.element(numbers, first, 4)?);
        let mut all = None;
        for n in 0..team / WARP {
            let value = b.load(self.class.ty(), values, 8 * n)?;
            let found = Found { value, at: b.load(Ty::I32, numbers, 4 * n)? };
            all = Some(match all {
                None => found,
                Some(before) => self.best(b, before, found)?,
            });
        }
        Ok(all.unwrap_or(own))
    }
}
