//! What a work item computes: values of points and of rows, and sums of them over its part of a row and over its team.

use tensor_wasm_jit::build::{BinaryOp as B, BuildError, UnaryOp, Value, Variable};
use tensor_wasm_jit::{SUBGROUP, Ty};

use super::super::index::{Indices, small, times};
use super::super::numbers::{Built, Class, Numbers, Registers, half_type};
use super::memory::Places;
use super::{Argument, DIVIDED_BY_ZERO, Emit, Frame, missing};
use crate::graph::op::{ReduceOp, UnaryOp as NumberOp};
use crate::schedule::plan::{Level, ValueKind};
use crate::shape::Layout;

/// The elements that a work item has at once: where they are, and what was computed of them.
pub(super) struct Point {
    pub(super) row: Value,
    pub(super) within: Option<Value>,
    pub(super) indices: Indices,
    pub(super) full: Vec<Option<Vec<Value>>>,
    /// Whether they are in the row at all; none if they are.
    pub(super) is_inside: Option<Value>,
}

impl Emit<'_> {
    /// Computes what rows have after so many rounds.
    pub(super) fn rows_of(&mut self, round: usize) -> Built<()> {
        for n in 0..self.kernel.values.len() {
            let is_due = self.kernel.values[n].level == Level::Row && self.rounds[n] == round && self.row[n].is_none();
            if is_due && !matches!(self.kernel.values[n].kind, ValueKind::Fill(_) | ValueKind::Reduce(..)) {
                let lanes = self.compute(n, None)?;
                self.row[n] = Some(lanes);
            }
        }
        Ok(())
    }

    /// Values of whole rows that are stored.
    pub(super) fn store_rows(&mut self, last: usize) -> Built<()> {
        let kernel = self.kernel;
        let stores: Vec<(usize, usize)> =
            kernel.stores.iter().filter(|(value, _)| kernel.values[*value].level == Level::Row).copied().collect();
        if stores.is_empty() {
            return Ok(());
        }
        for round in 0..=last {
            self.rows_of(round)?;
        }
        let row = self.row_number()?;
        self.begin_row_store()?;
        for (value, slot) in stores {
            let lanes = self.lanes(value, None)?;
            let is_aligned = self.frame.lanes_of_rows() > 1;
            self.store(&lanes, kernel.values[value].dtype, slot, &Places::Run(row), is_aligned)?;
        }
        self.end_row_store()
    }

    /// Values of points that are stored, and can be after so many rounds.
    pub(super) fn stores_of(&self, round: usize) -> Vec<(usize, usize)> {
        let is_due = |value: usize| self.kernel.values[value].level == Level::Full && self.rounds[value] == round;
        self.kernel.stores.iter().filter(|(value, _)| is_due(*value)).copied().collect()
    }

    fn reductions_of(&self, round: usize) -> Vec<usize> {
        let is_due = |n: &usize| matches!(self.kernel.values[*n].kind, ValueKind::Reduce(..));
        (0..self.kernel.values.len()).filter(is_due).filter(|n| self.rounds[*n] == round + 1).collect()
    }

    /// All elements of the item are there at once.
    pub(super) fn kept(&mut self, last: usize) -> Built<()> {
        let Frame { team, row_len, .. } = self.frame;
        let step = team * self.frame.lanes_in_row();
        let row = self.row_number()?;
        let mut points = Vec::new();
        for chunk in 0..row_len.div_ceil(step) {
            let mut point = self.point(row, None);
            if row_len > 1 {
                let own = self.first_within()?;
                let first = self.b.i32(small(chunk * step).cast_signed())?;
                let within = self.b.binary(B::I32Add, own, first)?;
                point.within = Some(within);
                if (chunk + 1) * step > row_len {
                    let (end, start) = (self.b.i32(small(row_len).cast_signed())?, self.b.i32(0)?);
                    let is_inside = self.b.binary(B::I32LtU, within, end)?;
                    // What is not there is computed of what is, and forgotten.
                    point.within = Some(self.b.select(is_inside, within, start)?);
                    point.is_inside = Some(is_inside);
                }
            }
            points.push(point);
        }
        self.repeat(row, &mut points)?;
        for round in 0..=last {
            self.rows_of(round)?;
            let (reductions, stores) = (self.reductions_of(round), self.stores_of(round));
            let mut sums = Vec::new();
            for n in &reductions {
                sums.push(self.starts(*n)?);
            }
            for point in &mut points {
                let operands = self.visit(point, &reductions, &stores)?;
                for ((n, sum), operand) in reductions.iter().zip(&mut sums).zip(operands) {
                    *sum = self.add_up(*n, sum, &operand, point.is_inside)?;
                }
            }
            for (n, sum) in reductions.iter().zip(sums) {
                let sum = self.of_team(*n, sum)?;
                self.row[*n] = Some(sum);
            }
        }
        self.store_rows(last)
    }

    /// The other points of an item that has several. What they are computed from is loaded before anything is stored:
    /// nobody can know that a load does not want what a store before it wrote, so that none would overtake it.
    fn repeat(&mut self, row: Value, points: &mut Vec<Point>) -> Built<()> {
        let Frame { rows, repeats, .. } = self.frame;
        for n in 1..repeats {
            let more = self.b.i32(small(n * (rows / repeats)).cast_signed())?;
            let row = self.b.binary(B::I32Add, row, more)?;
            points.push(self.point(row, None));
        }
        let is_load = |n: &usize| matches!(self.kernel.values[*n].kind, ValueKind::Load(_));
        let loads: Vec<usize> = (0..self.kernel.values.len()).filter(is_load).collect();
        if repeats > 1 {
            points.iter_mut().try_for_each(|point| self.evaluate(point, &loads))?;
        }
        Ok(())
    }

    /// One pass over the row.
    pub(super) fn round(&mut self, round: usize, last: usize) -> Built<()> {
        self.rows_of(round)?;
        let (reductions, stores) = (self.reductions_of(round), self.stores_of(round));
        if !reductions.is_empty() || !stores.is_empty() {
            let sums = self.accumulate(&reductions, &stores)?;
            for (n, sum) in reductions.iter().zip(sums) {
                self.row[*n] = Some(sum);
            }
        }
        if round == last { self.store_rows(last) } else { Ok(()) }
    }

    pub(super) fn accumulate(&mut self, reductions: &[usize], stores: &[(usize, usize)]) -> Built<Vec<Vec<Value>>> {
        self.each_chunk(reductions, |emit, point| emit.visit(point, reductions, stores))
    }

    /// Goes over the item's elements, and adds up what `visit` makes of them; then over the team.
    pub(super) fn each_chunk(
        &mut self,
        reductions: &[usize],
        mut visit: impl FnMut(&mut Self, &mut Point) -> Built<Vec<Vec<Value>>>,
    ) -> Built<Vec<Vec<Value>>> {
        let Frame { team, row_len, part_len, .. } = self.frame;
        let unrolled = self.frame.unrolled();
        let step_len = team * self.frame.lanes_in_row();
        let step = small(step_len * unrolled);
        let mut sums: Vec<Vec<Variable>> = Vec::new();
        for n in reductions {
            let starts = self.starts(*n)?;
            sums.push(starts.into_iter().map(|start| self.b.variable(start)).collect::<Built<_>>()?);
        }
        let mut first = self.first_within()?;
        let mut end = self.b.i32(small(row_len).cast_signed())?;
        if let Some(part) = self.part {
            let len = self.b.i32(small(part_len).cast_signed())?;
            let start = self.b.binary(B::I32Mul, part, len)?;
            first = self.b.binary(B::I32Add, first, start)?;
            let own_end = self.b.binary(B::I32Add, start, len)?;
            let is_before = self.b.binary(B::I32LtU, own_end, end)?;
            end = self.b.select(is_before, own_end, end)?;
        }
        let (zero, more) = (self.b.i32(0)?, self.b.i32(step.cast_signed() - 1)?);
        let left = self.b.binary(B::I32Sub, end, first)?;
        let left = self.b.binary(B::I32Add, left, more)?;
        let (chunks, _) = Indices::default().divide(&mut self.b, left, step)?;
        let is_any = self.b.binary(B::I32LtS, first, end)?;
        let chunks = self.b.select(is_any, chunks, zero)?;
        let carried: Vec<Variable> = sums.iter().flatten().copied().collect();
        // As `count_to` does it, with the emitter at hand.
        self.b.begin_if(chunks, &carried)?;
        let counter = self.b.variable(zero)?;
        let all: Vec<Variable> = carried.iter().copied().chain([counter]).collect();
        let again = self.b.begin_loop(&all)?;
        let number = self.b.get(counter)?;
        let place = times(&mut self.b, number, (step_len * unrolled).cast_signed())?;
        let within = self.b.binary(B::I32Add, first, place)?;
        let row = self.row_number()?;
        for n in 0..unrolled {
            let more = self.b.i32(small(n * step_len).cast_signed())?;
            let within = self.b.binary(B::I32Add, within, more)?;
            let mut point = self.point(row, Some(within));
            let operands = visit(self, &mut point)?;
            for ((n, sum), operand) in reductions.iter().zip(&sums).zip(operands) {
                let before: Vec<Value> = sum.iter().map(|variable| self.b.get(*variable)).collect::<Built<_>>()?;
                let after = self.add_up(*n, &before, &operand, None)?;
                for (variable, value) in sum.iter().zip(after) {
                    self.b.set(*variable, value)?;
                }
            }
        }
        let one = self.b.i32(1)?;
        let next = self.b.binary(B::I32Add, number, one)?;
        self.b.set(counter, next)?;
        let has_more = self.b.binary(B::I32Ne, next, chunks)?;
        self.b.branch_if(has_more, again)?;
        self.b.end()?;
        self.b.end()?;
        let mut all = Vec::new();
        for (n, sum) in reductions.iter().zip(&sums) {
            let own: Vec<Value> = sum.iter().map(|variable| self.b.get(*variable)).collect::<Built<_>>()?;
            all.push(self.of_team(*n, own)?);
        }
        Ok(all)
    }

    /// The first element of its row that is the item's, if rows are not cut.
    fn first_within(&mut self) -> Built<Value> {
        let own = self.in_team.ok_or(missing())?;
        times(&mut self.b, own, self.frame.lanes_in_row().cast_signed())
    }

    pub(super) fn point(&self, row: Value, within: Option<Value>) -> Point {
        let full = vec![None; self.kernel.values.len()];
        Point { row, within, indices: Indices::default(), full, is_inside: None }
    }

    /// Computes what is reduced and what is stored at a point; stores the one, returns the other.
    pub(super) fn visit(
        &mut self,
        point: &mut Point,
        reductions: &[usize],
        stores: &[(usize, usize)],
    ) -> Built<Vec<Vec<Value>>> {
        let kernel = self.kernel;
        let operand = |n: &usize| kernel.values[*n].kind.operands().next().unwrap_or(*n);
        let wanted: Vec<usize> = reductions.iter().map(operand).chain(stores.iter().map(|(value, _)| *value)).collect();
        self.evaluate(point, &wanted)?;
        if !stores.is_empty() {
            let layout = Layout::contiguous(kernel.space);
            let (places, is_aligned) = self.places(&layout, Level::Full, Some(&mut *point))?;
            if let Some(is_inside) = point.is_inside {
                self.b.begin_if(is_inside, &[])?;
            }
            // Of a team that has no row, what is stored is what the last row's team stores.
            for (value, slot) in stores {
                let lanes = self.lanes(*value, Some(point))?;
                self.store(&lanes, kernel.values[*value].dtype, *slot, &places, is_aligned)?;
            }
            if point.is_inside.is_some() {
                self.b.end()?;
            }
        }
        let mut operands = Vec::new();
        for n in reductions {
            let from = operand(n);
            let (from_type, to) = (kernel.values[from].dtype, kernel.values[*n].dtype);
            let mut lanes = self.lanes(from, Some(point))?;
            if Class::of(from_type) != Class::of(to) {
                for lane in &mut lanes {
                    *lane = self.numbers().cast(from_type, to, *lane)?;
                }
            }
            operands.push(lanes);
        }
        Ok(operands)
    }

    fn starts(&mut self, n: usize) -> Built<Vec<Value>> {
        let ValueKind::Reduce(op, _) = self.kernel.values[n].kind else { return Err(missing()) };
        let class = Class::of(self.kernel.values[n].dtype);
        let start = self.numbers().start(op, class)?;
        Ok(vec![start; self.frame.lanes_of_rows()])
    }

    fn add_up(&mut self, n: usize, sum: &[Value], lanes: &[Value], is_inside: Option<Value>) -> Built<Vec<Value>> {
        let ValueKind::Reduce(op, _) = self.kernel.values[n].kind else { return Err(missing()) };
        let class = Class::of(self.kernel.values[n].dtype);
        let mut added = Vec::new();
        if self.frame.is_along_rows {
            for (sum, lane) in sum.iter().zip(lanes) {
                added.push(self.numbers().reduce(op, class, *sum, *lane)?);
            }
        } else {
            // Neighbours first, so that sums do not wait for each other.
            let mut lanes = lanes.to_vec();
            while lanes.len() > 1 {
                let pairs: Vec<&[Value]> = lanes.chunks(2).collect();
                let mut halves = Vec::new();
                for pair in pairs {
                    halves.push(match pair {
                        [a, b] => self.numbers().reduce(op, class, *a, *b)?,
                        _ => pair[0],
                    });
                }
                lanes = halves;
            }
            added.push(self.numbers().reduce(op, class, sum[0], lanes[0])?);
        }
        let Some(is_inside) = is_inside else { return Ok(added) };
        added.iter().zip(sum).map(|(after, before)| self.b.select(is_inside, *after, *before)).collect()
    }

    /// What all items of a team have together. Every one of them gets it.
    fn of_team(&mut self, n: usize, sum: Vec<Value>) -> Built<Vec<Value>> {
        let team = small(self.frame.team);
        if team == 1 {
            return Ok(sum);
        }
        let ValueKind::Reduce(op, _) = self.kernel.values[n].kind else { return Err(missing()) };
        let class = Class::of(self.kernel.values[n].dtype);
        let mut all = Vec::new();
        for mut value in sum {
            // In registers as far as a subgroup goes: a butterfly, which leaves the sum with everybody.
            let mut half = team.min(SUBGROUP) / 2;
            while half > 0 {
                let other = self.b.shuffle(value, half)?;
                value = self.numbers().reduce(op, class, value, other)?;
                half /= 2;
            }
            all.push(if team > SUBGROUP { self.of_subgroups(op, class, value, team / SUBGROUP)? } else { value });
        }
        Ok(all)
    }

    /// What the subgroups of a team have together: each writes its own down, and everybody adds all of them up.
    fn of_subgroups(&mut self, op: ReduceOp, class: Class, value: Value, count: u32) -> Built<Value> {
        let (item, in_team) = (self.item.ok_or(missing())?, self.in_team.ok_or(missing())?);
        let scratch = match self.scratch {
            Some(scratch) => scratch,
            None => *self.scratch.insert(self.b.shared(8 * small(self.frame.group) / SUBGROUP)?),
        };
        let (number, in_subgroup) = Indices::default().divide(&mut self.b, item, SUBGROUP)?;
        let own = self.b.element(scratch, number, 8)?;
        let is_first = self.b.unary(UnaryOp::I32Eqz, in_subgroup)?;
        self.b.begin_if(is_first, &[])?;
        self.b.store(value, own, 0)?;
        self.b.end()?;
        self.b.barrier()?;
        let first = self.b.binary(B::I32Sub, item, in_team)?;
        let (first, _) = Indices::default().divide(&mut self.b, first, SUBGROUP)?;
        let first = self.b.element(scratch, first, 8)?;
        let mut total = self.b.load(class.ty(), first, 0)?;
        for n in 1..count {
            let next = self.b.load(class.ty(), first, 8 * n)?;
            total = self.numbers().reduce(op, class, total, next)?;
        }
        // Nobody writes there again before everybody has read.
        self.b.barrier()?;
        Ok(total)
    }

    /// Computes values of a point, with everything they need.
    fn evaluate(&mut self, point: &mut Point, wanted: &[usize]) -> Built<()> {
        let values = &self.kernel.values;
        let mut is_needed = vec![false; values.len()];
        wanted.iter().for_each(|n| is_needed[*n] = true);
        for n in (0..values.len()).rev() {
            if is_needed[n] && values[n].level == Level::Full && point.full[n].is_none() {
                values[n].kind.operands().for_each(|operand| is_needed[operand] = true);
            }
        }
        for n in 0..values.len() {
            let is_due = is_needed[n] && values[n].level == Level::Full && point.full[n].is_none();
            if is_due && !matches!(values[n].kind, ValueKind::Fill(_)) {
                let lanes = self.compute(n, Some(&mut *point))?;
                point.full[n] = Some(lanes);
            }
        }
        Ok(())
    }

    /// Lanes of a value of that level.
    pub(super) fn count_of(&self, level: Level) -> usize {
        match level {
            Level::Full => self.frame.lanes,
            Level::Row => self.frame.lanes_of_rows(),
        }
    }

    /// A value that was computed, for each lane of a point or of the rows.
    pub(super) fn lanes(&self, n: usize, point: Option<&Point>) -> Built<Vec<Value>> {
        let count = if point.is_some() { self.frame.lanes } else { self.frame.lanes_of_rows() };
        if let Some(fill) = self.fills[n] {
            return Ok(vec![fill; count]);
        }
        let own = match self.kernel.values[n].level {
            Level::Row => self.row[n].as_ref(),
            Level::Full => point.and_then(|point| point.full[n].as_ref()),
        };
        let own = own.ok_or(BuildError::Structure { what: "a value was not computed before it was needed" })?;
        Ok(if own.len() == count { own.clone() } else { vec![own[0]; count] })
    }

    /// Computes a value of a point, or of the rows.
    fn compute(&mut self, n: usize, point: Option<&mut Point>) -> Built<Vec<Value>> {
        let value = &self.kernel.values[n];
        let dtype_of = |operand: usize| self.kernel.values[operand].dtype;
        let level = value.level;
        match &value.kind {
            ValueKind::Load(load) => {
                let view = self.kernel.loads[*load];
                let count = self.count_of(level);
                let (places, is_aligned) = self.places(&view.layout, level, point)?;
                self.load(&view, &places, is_aligned, count)
            }
            ValueKind::Iota(layout) => {
                let places = self.each_place(layout, level, point)?;
                places.into_iter().map(|place| self.b.unary(UnaryOp::I64ExtendI32U, place)).collect()
            }
            ValueKind::Random(parameter, layout) => {
                let seed = self.parameter(Ty::I64, *parameter)?;
                let places = self.each_place(layout, level, point)?;
                places.into_iter().map(|place| self.numbers().uniform(seed, place)).collect()
            }
            ValueKind::Unary(op, a) => {
                let (op, class) = (*op, Class::of(dtype_of(*a)));
                let lanes = self.lanes(*a, point.as_deref())?;
                // Half precision cannot tell what is made with the device's own power of two from the exact one.
                let is_half = half_type(value.dtype).is_some();
                let mut compute = |x: Value| match op {
                    NumberOp::Exp if is_half => self.numbers().exp_to_half(x),
                    NumberOp::Erf if is_half => self.numbers().erf_to_half(x),
                    _ => self.numbers().unary(op, class, x),
                };
                lanes.into_iter().map(&mut compute).collect()
            }
            ValueKind::Cast(a) => {
                let (from, to) = (dtype_of(*a), value.dtype);
                let lanes = self.lanes(*a, point.as_deref())?;
                lanes.into_iter().map(|x| self.numbers().cast(from, to, x)).collect()
            }
            ValueKind::Binary(op, a, b) => {
                let (op, class) = (*op, Class::of(dtype_of(*a)));
                let (left, right) = (self.lanes(*a, point.as_deref())?, self.lanes(*b, point.as_deref())?);
                let flags = self.windows.get(Argument::Flags)?;
                let node = small(self.kernel.node);
                let mut failed = |numbers: &mut Numbers<'_>, is_zero: Value| {
                    numbers.b.begin_if(is_zero, &[])?;
                    let (code, node) = (numbers.int(DIVIDED_BY_ZERO)?, numbers.int(node)?);
                    numbers.b.store(code, flags, 0)?;
                    numbers.b.store(node, flags, 4)?;
                    numbers.b.end()
                };
                let mut lanes = Vec::with_capacity(left.len());
                for (x, y) in left.into_iter().zip(right) {
                    lanes.push(self.numbers().binary(op, class, x, y, &mut failed)?);
                }
                Ok(lanes)
            }
            ValueKind::Where(condition, a, b) => {
                let condition = self.lanes(*condition, point.as_deref())?;
                let (left, right) = (self.lanes(*a, point.as_deref())?, self.lanes(*b, point.as_deref())?);
                let lanes = condition.into_iter().zip(left).zip(right);
                lanes.map(|((condition, x), y)| self.b.select(condition, x, y)).collect()
            }
            ValueKind::Fill(_) => self.lanes(n, point.as_deref()),
            ValueKind::Reduce(..) => Err(BuildError::Structure { what: "a reduction is done by a whole team" }),
        }
    }
}
