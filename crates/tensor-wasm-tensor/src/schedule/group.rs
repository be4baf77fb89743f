//! Which operations are computed together. Nodes are taken in the order they were made; each joins the kernel of one of
//! its inputs where that is possible, or begins one.

use std::collections::HashMap;

use super::Mode;
use super::plan::{
    BufferView, Level, MapKernel, MapValue, Plan, Slot, Source, SpecialKernel, Step, ValueKind, has_planes,
    is_trailing, rows,
};
use super::snapshot::PlanGraph;
use crate::graph::op::{BinaryOp, Op};
use crate::shape::{AxisSet, Layout, Shape};

/// Elements of a row that is computed at once, so that what is reduced from it can be used on it: some such rows fit
/// into the second-level cache.
const ROW_MAX: usize = 16_384;

/// Operations of one kernel: beyond this, what it keeps does not fit into the first-level cache.
const MEMBERS_MAX: usize = 64;

pub(super) struct Grouping<'s> {
    graph: &'s PlanGraph,
    mode: Mode,
    places: Vec<Place>,
    groups: Vec<Group>,
    /// Slots by the nodes that are stored in them.
    slots: HashMap<usize, usize>,
    stored: Vec<usize>,
}

/// Where a node is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It is there.
    Leaf,
    /// Wherever it is used.
    Everywhere,
    /// Nowhere: it is a layout.
    View,
    In(usize, Level),
}

/// Why an operation is not computed with its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WhyNot {
    Eager,
    /// Its input is made by a kernel of its own.
    Alone,
    Full,
    OtherSize,
    OtherOrder,
    LongRows,
    OtherRows,
    Waits,
    Left,
}

impl WhyNot {
    pub(super) fn reason(self) -> &'static str {
        match self {
            WhyNot::Eager => "nothing is fused in eager mode",
            WhyNot::Alone => "its input comes from a kernel of its own",
            WhyNot::Full => "the kernel of its input has as many operations as a kernel may have",
            WhyNot::OtherSize => "its input's kernel goes over another number of elements",
            WhyNot::OtherOrder => "it reads its input in another order than that is computed in",
            WhyNot::LongRows => "rows are too long to be kept until they are reduced",
            WhyNot::OtherRows => "the kernel of its input reduces along other axes",
            WhyNot::Waits => "it needs something that waits for its input's kernel",
            WhyNot::Left => "its input's kernel made what a product reads, and is not held up for what comes later",
        }
    }
}

struct Group {
    kind: GroupKind,
    /// The operation it began with, and why that is not part of another.
    began: Option<(usize, WhyNot)>,
    /// Groups that come before it, as a set of bits.
    before: Vec<u64>,
    /// It is a part of that group now.
    merged: Option<usize>,
    /// Whether an operation that is a kernel by itself comes after it. What is made later than that (going backwards,
    /// above all) would only have it store more, for a kernel that can read the same inputs again.
    is_left: bool,
}

enum GroupKind {
    Map { space: Shape, reduced: AxisSet, members: Vec<usize> },
    Special(usize),
}

/// A node seen through views: what it is, and the views in the order they are applied.
struct Path {
    base: usize,
    views: Vec<usize>,
}

fn is_in(set: &[u64], group: usize) -> bool {
    set.get(group / 64).is_some_and(|word| word >> (group % 64) & 1 == 1)
}

fn insert(set: &mut Vec<u64>, group: usize) {
    if set.len() <= group / 64 {
        set.resize(group / 64 + 1, 0);
    }
    set[group / 64] |= 1 << (group % 64);
}

fn unite(set: &mut Vec<u64>, other: &[u64]) {
    if set.len() < other.len() {
        set.resize(other.len(), 0);
    }
    set.iter_mut().zip(other).for_each(|(own, other)| *own |= other);
}

/// Whether rows are small enough to be computed at once.
fn has_short_rows(space: Shape, reduced: AxisSet) -> bool {
    let first = (0..space.rank()).find(|axis| reduced.contains(*axis)).unwrap_or(space.rank());
    let is_short = space[first..].iter().product::<usize>() <= ROW_MAX;
    is_trailing(space, reduced) && is_short || has_planes(space, reduced)
}

impl<'s> Grouping<'s> {
    pub(super) fn of(graph: &'s PlanGraph, mode: Mode) -> Grouping<'s> {
        let count = graph.nodes.len();
        let mut grouping = Grouping {
            graph,
            mode,
            places: Vec::with_capacity(count),
            groups: Vec::new(),
            slots: HashMap::new(),
            stored: Vec::new(),
        };
        for node in 0..count {
            let place = grouping.place(node);
            grouping.places.push(place);
        }
        for output in &graph.outputs {
            grouping.make_readable(*output);
        }
        grouping
    }

    fn shape(&self, node: usize) -> Shape {
        self.graph.nodes[node].node.shape
    }

    fn place(&mut self, node: usize) -> Place {
        let inputs = self.graph.inputs(node);
        match &self.graph.nodes[node].op {
            Op::Data => Place::Leaf,
            op if op.is_generated() => Place::Everywhere,
            Op::Move(_) => {
                // Strides cannot say every reshape: then the elements are copied.
                if self.layout(&self.path_over(node, inputs[0])).is_some() {
                    return Place::View;
                }
                let why = self.group_of(self.path(inputs[0]).base).map(|_| WhyNot::OtherOrder);
                let group = self.begin(self.shape(inputs[0]), AxisSet::default(), why.map(|why| (node, why)));
                self.join(node, group, Level::Full)
            }
            Op::Reduce(_, axes) => {
                let (input, axes) = (inputs[0], *axes);
                let why = match self.group_to_reduce(input, axes) {
                    Ok(group) => return self.join(node, group, Level::Row),
                    Err(why) => why,
                };
                let group = self.begin(self.shape(input), axes, why.map(|why| (node, why)));
                self.join(node, group, Level::Row)
            }
            op if op.is_elementwise() => {
                let why = match self.group_to_join(node) {
                    Ok((group, level)) => return self.join(node, group, level),
                    Err(why) => why,
                };
                let group = self.begin(self.shape(node), AxisSet::default(), why.map(|why| (node, why)));
                self.join(node, group, Level::Full)
            }
            _ => {
                let kind = GroupKind::Special(node);
                self.groups.push(Group { kind, began: None, before: Vec::new(), merged: None, is_left: false });
                let group = self.groups.len() - 1;
                for input in inputs.iter().copied() {
                    let base = self.make_readable(input);
                    self.depend(group, base);
                }
                let before = self.groups[group].before.clone();
                (0..group).filter(|other| is_in(&before, *other)).for_each(|other| self.groups[other].is_left = true);
                Place::In(group, Level::Full)
            }
        }
    }

    fn begin(&mut self, space: Shape, reduced: AxisSet, began: Option<(usize, WhyNot)>) -> usize {
        let kind = GroupKind::Map { space, reduced, members: Vec::new() };
        self.groups.push(Group { kind, began, before: Vec::new(), merged: None, is_left: false });
        self.groups.len() - 1
    }

    /// The group that one has become a part of.
    fn group(&self, mut group: usize) -> usize {
        while let Some(other) = self.groups[group].merged {
            group = other;
        }
        group
    }

    /// The group that one who uses a node has to join or wait for. What is made from its index alone is made again
    /// wherever it is used, also where it is stored for somebody who needs a buffer.
    fn group_of(&self, node: usize) -> Option<(usize, Level)> {
        if self.graph.nodes[node].op.is_generated() { None } else { self.maker_of(node) }
    }

    /// The group that computes a node.
    fn maker_of(&self, node: usize) -> Option<(usize, Level)> {
        match self.places.get(node)? {
            Place::In(group, level) => Some((self.group(*group), *level)),
            _ => None,
        }
    }

    fn path(&self, node: usize) -> Path {
        let mut views = Vec::new();
        let mut base = node;
        while self.places[base] == Place::View {
            views.push(base);
            base = self.graph.inputs(base)[0];
        }
        views.reverse();
        Path { base, views }
    }

    /// The path of a view that has no place yet.
    fn path_over(&self, view: usize, input: usize) -> Path {
        let mut path = self.path(input);
        path.views.push(view);
        path
    }

    /// The layout under which a path reads its base.
    fn layout(&self, path: &Path) -> Option<Layout> {
        let base = &self.graph.nodes[path.base];
        let mut layout = match self.places[path.base] {
            Place::Leaf => self.graph.snapshot.leaves[base.number].layout,
            _ => Layout::contiguous(base.node.shape),
        };
        for view in &path.views {
            let Op::Move(movement) = &self.graph.nodes[*view].op else { return None };
            layout = movement.apply(&layout, self.shape(*view))?;
        }
        Some(layout)
    }

    /// What a member of a group has to read, under which layout. None if the group's indices cannot say it.
    fn read(&self, node: usize, target: Shape) -> Option<(usize, Layout)> {
        let path = self.path(node);
        if matches!(self.graph.nodes[path.base].op, Op::Fill(_)) {
            return Some((path.base, Layout::contiguous(target)));
        }
        Some((path.base, self.layout(&path)?.reshape(target)?))
    }

    /// Whether a node can be computed in a group at a level.
    fn can_take(&self, group: usize, node: usize, level: Level) -> Result<(), WhyNot> {
        let GroupKind::Map { space, reduced, members } = &self.groups[group].kind else { return Err(WhyNot::Alone) };
        let (space, reduced) = (*space, *reduced);
        if members.len() >= MEMBERS_MAX {
            return Err(WhyNot::Full);
        }
        if level == Level::Row && !has_short_rows(space, reduced) {
            return Err(WhyNot::LongRows);
        }
        let row = rows(space, reduced);
        let target = if level == Level::Full { space } else { row };
        if self.shape(node).numel() != target.numel() {
            return Err(WhyNot::OtherSize);
        }
        for input in self.graph.inputs(node) {
            let (base, layout) = self.read(*input, target).ok_or(WhyNot::OtherOrder)?;
            match self.group_of(base) {
                Some((own, from)) if own == group => {
                    let is_same = match (from, level) {
                        (Level::Full, Level::Full) => layout.has_strides(&space.strides()),
                        (Level::Row, Level::Row) => layout.has_strides(&row.strides()),
                        (Level::Row, Level::Full) => {
                            let mut strides = row.strides();
                            (0..space.rank()).filter(|axis| reduced.contains(*axis)).for_each(|axis| strides[axis] = 0);
                            has_short_rows(space, reduced) && layout.has_strides(&strides)
                        }
                        (Level::Full, Level::Row) => false,
                    };
                    if (from, level) == (Level::Row, Level::Full) && !has_short_rows(space, reduced) {
                        return Err(WhyNot::LongRows);
                    }
                    if !is_same || layout.offset != 0 {
                        return Err(WhyNot::OtherOrder);
                    }
                }
                // What it makes would be needed before it is made.
                Some((other, _)) if is_in(&self.groups[other].before, group) => return Err(WhyNot::Waits),
                _ => {}
            }
        }
        Ok(())
    }

    /// The group that an elementwise operation can join; where there is none, why not, if there is a reason.
    fn group_to_join(&mut self, node: usize) -> Result<(usize, Level), Option<WhyNot>> {
        if self.mode == Mode::Eager {
            return Err(Some(WhyNot::Eager));
        }
        let mut why = None;
        let inputs = self.graph.inputs(node).to_vec();
        let mut candidates: Vec<usize> = Vec::new();
        for input in inputs {
            let base = self.path(input).base;
            match self.group_of(base) {
                Some((group, _)) if matches!(self.groups[group].kind, GroupKind::Special(_)) => {
                    why = Some(WhyNot::Alone);
                }
                Some((group, _)) if self.groups[group].is_left => why = Some(WhyNot::Left),
                Some((group, _)) if !candidates.contains(&group) => candidates.push(group),
                _ => {}
            }
        }
        // Those that were begun last are the closest.
        candidates.sort_unstable_by(|a, b| b.cmp(a));
        for at in 1..candidates.len() {
            self.merge(candidates[0], candidates[at]);
        }
        candidates.iter_mut().for_each(|group| *group = self.group(*group));
        candidates.dedup();
        for group in candidates {
            for level in [Level::Full, Level::Row] {
                match self.can_take(group, node, level) {
                    Ok(()) => return Ok((group, level)),
                    // Of another size at one level it is at the other, or not at all.
                    Err(WhyNot::OtherSize) if why.is_some() => {}
                    Err(reason) => why = Some(reason),
                }
            }
        }
        Err(why)
    }

    /// Makes two groups one, if they have the same space and neither waits for the other.
    fn merge(&mut self, a: usize, b: usize) {
        let (a, b) = (self.group(a), self.group(b));
        let is_apart = !is_in(&self.groups[a].before, b) && !is_in(&self.groups[b].before, a);
        let (
            GroupKind::Map { space, reduced, members },
            GroupKind::Map { space: other_space, reduced: other_reduced, members: others },
        ) = (&self.groups[a].kind, &self.groups[b].kind)
        else {
            return;
        };
        let is_one = reduced == other_reduced || reduced.is_empty() || other_reduced.is_empty();
        if a == b || !is_apart || space != other_space || !is_one || members.len() + others.len() > MEMBERS_MAX {
            return;
        }
        let space = *space;
        let reduced = if reduced.is_empty() { *other_reduced } else { *reduced };
        let mut members: Vec<usize> = members.iter().chain(others).copied().collect();
        members.sort_unstable();
        self.groups[a].kind = GroupKind::Map { space, reduced, members };
        self.groups[b].merged = Some(a);
        self.groups[a].is_left |= self.groups[b].is_left;
        let before = std::mem::take(&mut self.groups[b].before);
        unite(&mut self.groups[a].before, &before);
        // Who came after the one comes after both.
        let before = self.groups[a].before.clone();
        for (n, group) in self.groups.iter_mut().enumerate() {
            if n != a && (is_in(&group.before, a) || is_in(&group.before, b)) {
                insert(&mut group.before, a);
                unite(&mut group.before, &before);
            }
        }
    }

    /// The group that computes what is reduced, if it can reduce it too.
    fn group_to_reduce(&self, input: usize, axes: AxisSet) -> Result<usize, Option<WhyNot>> {
        if self.mode == Mode::Eager {
            return Err(Some(WhyNot::Eager));
        }
        let path = self.path(input);
        let (group, level) = self.group_of(path.base).ok_or(None)?;
        let GroupKind::Map { space, reduced, members } = &self.groups[group].kind else {
            return Err(Some(WhyNot::Alone));
        };
        let layout = self.layout(&path).ok_or(Some(WhyNot::OtherOrder))?;
        let why = if level != Level::Full || layout.shape.numel() != space.numel() {
            WhyNot::OtherSize
        } else if layout.shape != *space || !layout.is_contiguous() {
            WhyNot::OtherOrder
        } else if !reduced.is_empty() && *reduced != axes {
            WhyNot::OtherRows
        } else if members.len() >= MEMBERS_MAX {
            WhyNot::Full
        } else {
            return Ok(group);
        };
        Err(Some(why))
    }

    /// Operations that began a kernel though an input of theirs comes from another, and why.
    pub(super) fn apart(&self) -> impl Iterator<Item = (usize, WhyNot)> {
        let is_whole = |group: &&Group| group.merged.is_none();
        self.groups.iter().filter(is_whole).filter_map(|group| group.began)
    }

    /// Groups in an order in which they can be computed.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> =
            (0..self.groups.len()).filter(|group| self.groups[*group].merged.is_none()).collect();
        // Whatever comes before a group has fewer groups before it.
        let before = |group: &usize| {
            let own = &self.groups[*group].before;
            let known = (0..self.groups.len()).filter(|other| is_in(own, *other));
            let mut roots: Vec<usize> = known.map(|other| self.group(other)).collect();
            roots.sort_unstable();
            roots.dedup();
            roots.len()
        };
        order.sort_by_cached_key(|group| (before(group), *group));
        order
    }

    /// Adds a node to a group, which can take it.
    fn join(&mut self, node: usize, group: usize, level: Level) -> Place {
        let inputs = self.graph.inputs(node).to_vec();
        if let (GroupKind::Map { reduced, .. }, Op::Reduce(_, axes)) =
            (&mut self.groups[group].kind, &self.graph.nodes[node].op)
        {
            *reduced = *axes;
        }
        for input in inputs {
            let base = self.path(input).base;
            if self.group_of(base).is_some_and(|(other, _)| other != group) {
                self.store(base);
                self.depend(group, base);
            }
        }
        if let GroupKind::Map { members, .. } = &mut self.groups[group].kind {
            members.push(node);
        }
        Place::In(group, level)
    }

    /// A group comes after the one that computes a node.
    fn depend(&mut self, group: usize, node: usize) {
        let Some((other, _)) = self.maker_of(node) else { return };
        let before = self.groups[other].before.clone();
        insert(&mut self.groups[group].before, other);
        unite(&mut self.groups[group].before, &before);
        let before = self.groups[group].before.clone();
        for later in 0..self.groups.len() {
            if is_in(&self.groups[later].before, group) {
                unite(&mut self.groups[later].before, &before);
            }
        }
    }

    /// Has a node's elements in a buffer, and returns what is in that buffer: the node, or what it is a view of.
    fn make_readable(&mut self, node: usize) -> usize {
        let base = self.path(node).base;
        if self.places[base] == Place::Everywhere {
            let group = self.begin(self.shape(base), AxisSet::default(), None);
            self.places[base] = self.join(base, group, Level::Full);
        }
        if self.places[base] != Place::Leaf {
            self.store(base);
        }
        base
    }

    fn store(&mut self, node: usize) {
        self.slots.entry(node).or_insert_with(|| {
            self.stored.push(node);
            self.stored.len() - 1
        });
    }

    pub(super) fn plan(&self) -> Plan {
        let steps: Vec<Step> = self.order().iter().filter_map(|group| self.step(*group)).collect();
        let outputs: Vec<BufferView> = self.graph.outputs.iter().filter_map(|node| self.view(*node)).collect();
        let slots: Vec<Slot> = self
            .stored
            .iter()
            .map(|node| Slot { shape: self.shape(*node), dtype: self.graph.nodes[*node].node.dtype, last_step: None })
            .collect();
        Plan::new(steps, slots, outputs, &self.graph.given_up, self.mode)
    }

    /// A node as a buffer read under a layout.
    fn view(&self, node: usize) -> Option<BufferView> {
        let path = self.path(node);
        Some(self.buffer(path.base, self.layout(&path)?))
    }

    fn buffer(&self, base: usize, layout: Layout) -> BufferView {
        let node = &self.graph.nodes[base];
        let source = match self.slots.get(&base) {
            Some(slot) => Source::Slot(*slot),
            None => Source::Leaf(node.number),
        };
        BufferView { source, layout, dtype: node.node.dtype }
    }

    fn step(&self, group: usize) -> Option<Step> {
        match &self.groups[group].kind {
            GroupKind::Special(node) => {
                let SpecialNode { op, inputs, shape, dtype } = self.special(*node);
                let inputs = inputs.iter().filter_map(|input| self.view(*input)).collect();
                self.slots.get(node).map(|slot| {
                    let (slot, node, op) = (*slot, *node, op.clone());
                    Step::Special(SpecialKernel { op, inputs, shape, dtype, slot, node, epilogue: None })
                })
            }
            GroupKind::Map { space, reduced, members } => {
                self.map_kernel(group, *space, *reduced, members).map(Step::Map)
            }
        }
    }

    fn special(&self, node: usize) -> SpecialNode<'_> {
        let found = &self.graph.nodes[node];
        SpecialNode { op: &found.op, inputs: self.graph.inputs(node), shape: found.node.shape, dtype: found.node.dtype }
    }

    fn map_kernel(&self, group: usize, space: Shape, reduced: AxisSet, members: &[usize]) -> Option<MapKernel> {
        let mut emit =
            Emit { grouping: self, group, space, reduced, kernel: Vec::new(), loads: Vec::new(), of: HashMap::new() };
        let needed = self.needed(group, members);
        for member in members.iter().filter(|member| needed.contains(member)) {
            emit.member(*member)?;
        }
        let stores: Vec<(usize, usize)> =
            members.iter().filter_map(|member| Some((*emit.of.get(member)?, *self.slots.get(member)?))).collect();
        let Emit { kernel: values, loads, .. } = emit;
        // Of what is computed element by element, only a division of integers can fail.
        let divides = |member: &&usize| {
            let node = &self.graph.nodes[**member];
            matches!(node.op, Op::Binary(BinaryOp::Div | BinaryOp::Rem)) && !node.node.dtype.is_float()
        };
        let node = needed.iter().rev().find(divides).or(members.last()).copied()?;
        (!stores.is_empty()).then_some(MapKernel { space, reduced, loads, values, stores, in_place: Vec::new(), node })
    }

    /// The members that something stored depends on.
    fn needed(&self, group: usize, members: &[usize]) -> Vec<usize> {
        let mut needed: Vec<usize> = Vec::new();
        for member in members.iter().rev() {
            let is_used = || {
                needed.iter().any(|user| {
                    let inputs = self.graph.inputs(*user);
                    inputs.iter().any(|input| self.path(*input).base == *member)
                })
            };
            if self.slots.contains_key(member) || is_used() {
                needed.push(*member);
            }
        }
        debug_assert!(needed.iter().all(|node| self.maker_of(*node).is_some_and(|(own, _)| own == group)));
        needed
    }
}

struct SpecialNode<'s> {
    op: &'s Op,
    inputs: &'s [usize],
    shape: Shape,
    dtype: crate::dtype::DType,
}

/// Writes the values of one kernel.
struct Emit<'g> {
    grouping: &'g Grouping<'g>,
    group: usize,
    space: Shape,
    reduced: AxisSet,
    kernel: Vec<MapValue>,
    loads: Vec<BufferView>,
    /// Values of members.
    of: HashMap<usize, usize>,
}

impl Emit<'_> {
    fn push(&mut self, value: MapValue) -> usize {
        let same =
            |known: &MapValue| known.kind == value.kind && known.dtype == value.dtype && known.level == value.level;
        self.kernel.iter().position(same).unwrap_or_else(|| {
            self.kernel.push(value);
            self.kernel.len() - 1
        })
    }

    fn member(&mut self, member: usize) -> Option<()> {
        let grouping = self.grouping;
        let node = &grouping.graph.nodes[member];
        let (_, level) = grouping.maker_of(member)?;
        let dtype = node.node.dtype;
        let inputs = grouping.graph.inputs(member);
        let kind = match &node.op {
            Op::Unary(op) => ValueKind::Unary(*op, self.value(inputs[0], level)?),
            Op::Binary(op) => ValueKind::Binary(*op, self.value(inputs[0], level)?, self.value(inputs[1], level)?),
            Op::Where => ValueKind::Where(
                self.value(inputs[0], level)?,
                self.value(inputs[1], level)?,
                self.value(inputs[2], level)?,
            ),
            Op::Cast => {
                let value = self.value(inputs[0], level)?;
                // To what it is already: a copy, if it is stored.
                if self.kernel[value].dtype == dtype && self.kernel[value].level == level {
                    self.of.insert(member, value);
                    return Some(());
                }
                ValueKind::Cast(value)
            }
            Op::Reduce(op, _) => {
                let mut operand = self.value(inputs[0], Level::Full)?;
                if self.kernel[operand].dtype != dtype {
                    operand = self.push(MapValue { kind: ValueKind::Cast(operand), dtype, level: Level::Full });
                }
                ValueKind::Reduce(*op, operand)
            }
            Op::Move(_) => {
                let value = self.value(inputs[0], level)?;
                self.of.insert(member, value);
                return Some(());
            }
            _ => {
                let value = self.generated(member, Layout::contiguous(self.space), level)?;
                self.of.insert(member, value);
                return Some(());
            }
        };
        let value = self.push(MapValue { kind, dtype, level });
        self.of.insert(member, value);
        Some(())
    }

    fn generated(&mut self, node: usize, layout: Layout, level: Level) -> Option<usize> {
        let found = &self.grouping.graph.nodes[node];
        let kind = match found.op {
            Op::Fill(_) => ValueKind::Fill(found.number),
            Op::Iota => ValueKind::Iota(layout),
            Op::Random { .. } => ValueKind::Random(found.number, layout),
            _ => return None,
        };
        Some(self.push(MapValue { kind, dtype: found.node.dtype, level }))
    }

    /// What a member reads.
    fn value(&mut self, node: usize, level: Level) -> Option<usize> {
        let target = if level == Level::Full { self.space } else { rows(self.space, self.reduced) };
        let (base, layout) = self.grouping.read(node, target)?;
        if self.grouping.group_of(base).is_some_and(|(own, _)| own == self.group) {
            return self.of.get(&base).copied();
        }
        if self.grouping.graph.nodes[base].op.is_generated() {
            return self.generated(base, layout, level);
        }
        let view = self.grouping.buffer(base, layout);
        let load = self.loads.iter().position(|known| *known == view).unwrap_or_else(|| {
            self.loads.push(view);
            self.loads.len() - 1
        });
        Some(self.push(MapValue { kind: ValueKind::Load(load), dtype: view.dtype, level }))
    }
}
