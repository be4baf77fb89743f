//! Operations along the lines of an axis: extremes, running sums, sorting, and sums of what indices choose. A team of
//! work items, a power of two of them, shares a line or a part of one; long lines that are few are cut into parts, so
//! that there are enough teams to fill a device, and what the parts have is put together by a further kernel.

mod extreme;
mod running;
mod scatter;
mod sort;

pub(super) use self::extreme::arg_reduce;
pub(super) use self::running::cumsum;
pub(super) use self::scatter::scatter_add;
pub(super) use self::sort::arg_sort;

use tensor_wasm_jit::build::{Axis, BinaryOp as B, IdKind, KernelBuilder, UnaryOp as U, Value};

use super::index::{Axes, Indices, scaled, small, sum, times};
use super::map::{Argument, GROUP, LoweredKernel, Program};
use super::numbers::Built;
use super::special::number_of;
use super::tile::WARP;
use crate::shape::{Layout, Shape};

/// Work items that keep a device's memory busy, each with some loads in flight: half of what the multiprocessors of an
/// H200 hold.
const ITEMS_ENOUGH: usize = 132 * 1_024;

/// Elements that an item has asked for before it uses the first of them, and that it has at least of its line: of
/// shorter lines a team is smaller.
const EACH: usize = 8;

/// Who has what: a unit is a part of a line, and has a team.
#[derive(Debug, Clone, Copy)]
struct Units {
    lines: usize,
    parts: usize,
    /// Work items of a team: a power of two, at most [`GROUP`].
    team: usize,
}

impl Units {
    fn count(self) -> usize {
        self.lines * self.parts
    }

    /// Work items of a group: no more than there is something to do for.
    fn group(self) -> usize {
        let items = self.count().saturating_mul(self.team);
        items.next_power_of_two().clamp(self.team.max(WARP as usize), GROUP as usize)
    }
}

/// A work item of a team.
struct Member {
    item: Value,
    in_team: Value,
    line: Value,
    part: Value,
    /// Whether its unit is one: the items of a group that have none go along with the last one, as teams wait for each
    /// other, and store nothing.
    is_unit: Value,
}

impl Member {
    /// What one item of a team stores for its unit, up to the block's end.
    fn begin_store(&self, b: &mut KernelBuilder) -> Built<()> {
        let is_first = b.unary(U::I32Eqz, self.in_team)?;
        let is_writer = b.binary(B::I32And, self.is_unit, is_first)?;
        b.begin_if(is_writer, &[])?;
        Ok(())
    }
}

/// A kernel with a team for each unit. Units that differ in their line only are neighbours.
fn kernel(
    name: &str,
    arguments: Vec<Argument>,
    units: Units,
    body: impl FnOnce(&mut KernelBuilder, &[Value], &Member) -> Built<()>,
) -> Built<LoweredKernel> {
    let mut b = KernelBuilder::new(name);
    let windows: Vec<Value> = arguments.iter().map(|_| b.window()).collect::<Built<_>>()?;
    let (item, group) = (b.id(IdKind::Local, Axis::X)?, b.id(IdKind::Group, Axis::X)?);
    let mut indices = Indices::default();
    let (in_group, in_team) = indices.divide(&mut b, item, small(units.team))?;
    let per_group = units.group() / units.team;
    let first = scaled(&mut b, group, small(per_group))?;
    let unit = b.binary(B::I32Add, first, in_group)?;
    let (end, last) = (number_of(&mut b, units.count())?, number_of(&mut b, units.count() - 1)?);
    let is_unit = b.binary(B::I32LtU, unit, end)?;
    let unit = b.select(is_unit, unit, last)?;
    let (part, line) =
        if units.parts == 1 { (b.i32(0)?, unit) } else { indices.divide(&mut b, unit, small(units.lines))? };
    body(&mut b, &windows, &Member { item, in_team, line, part, is_unit })?;
    let groups = small(units.count().div_ceil(per_group));
    Ok(LoweredKernel { program: Program::Built(b.finish()?), groups, items: small(units.group()), arguments })
}

/// Where a line of a view begins, and how far apart its elements are.
#[derive(Debug, Clone, Copy)]
struct Line {
    first: Value,
    stride: isize,
}

impl Line {
    fn of(b: &mut KernelBuilder, layout: &Layout, axis: usize, number: Value) -> Built<Line> {
        let lines = layout.slice(axis, 0, 1, 1);
        let place = Indices::default().place(b, &Axes::of(&lines, |other| other != axis), number)?;
        Ok(Line { first: sum(b, &[place], layout.offset)?, stride: layout.strides()[axis] })
    }

    fn place(self, b: &mut KernelBuilder, n: Value) -> Built<Value> {
        let along = times(b, n, self.stride)?;
        b.binary(B::I32Add, self.first, along)
    }
}

/// Work items that share a line of so many elements which lie together.
fn team(len: usize) -> usize {
    len.div_ceil(EACH).next_power_of_two().min(GROUP as usize)
}

fn lines_of(shape: &Shape, axis: usize) -> usize {
    shape.with(axis, 1).numel()
}

/// Whether the elements of a line are nearer to each other than to those of the next line: then neighbouring work items
/// have neighbours of one line, and otherwise neighbouring lines.
fn runs_along(layout: &Layout, axis: usize) -> bool {
    let (_, next) = Axes::of(layout, |other| other != axis).inner();
    next == 0 || layout.strides()[axis].unsigned_abs() <= next.unsigned_abs()
}
