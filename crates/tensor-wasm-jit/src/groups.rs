//! Accesses of a legalised kernel that are checked together: those of one width whose addresses are a fixed distance
//! apart, with nothing between them that could keep the later ones from being reached. And loads or stores among them
//! that are done at once, as a vector.

use std::collections::HashMap;

use crate::facts::Facts;
use crate::ir::{Body, Flow, Op, Reg, Ty};

/// What a check asks of groups. A kernel that is trusted has no checks, only vectors.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    /// How far apart accesses may be, in bytes. A window must have as much as the group reaches over.
    reach: i64,
    /// Each may need registers of its own, and the device's compiler has only so many.
    groups: usize,
}

const CHECKED: Bounds = Bounds { reach: 1 << 10, groups: 48 };
const TRUSTED: Bounds = Bounds { reach: 1 << 30, groups: usize::MAX };

/// The longest vector that a device loads or stores at once.
const VECTOR_BYTES_MAX: i64 = 16;

/// What an access has in common with others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupMember {
    pub group: usize,
    /// The register that all of them are a fixed distance from.
    pub root: Reg,
    /// From the lowest of them, the distance of this one.
    pub distance: u32,
    /// From the root, the distance of the lowest.
    pub low: i32,
    /// From the beginning of the lowest to the end of the highest.
    pub reach: u32,
    /// What the lowest is a multiple of.
    pub multiple: u32,
    pub is_first: bool,
}

/// The part of a load or store in a vector.
#[derive(Debug, Clone)]
pub(crate) enum VectorPart {
    /// It loads or stores all of them, from the lowest on. Of loads it is the first, of stores the last.
    Lead { registers: Vec<Reg>, distance: u32, from_root: i32 },
    /// It was loaded before, or is stored later.
    Rest,
}

#[derive(Debug)]
pub(crate) struct AccessGroups {
    pub members: HashMap<usize, GroupMember>,
    pub vectors: HashMap<usize, VectorPart>,
    bounds: Bounds,
    count: usize,
}

#[derive(Debug)]
struct OpenGroup {
    root: Reg,
    bytes: u32,
    low: i64,
    high: i64,
    accesses: Vec<GroupedAccess>,
}

#[derive(Debug, Clone, Copy)]
struct GroupedAccess {
    operation: usize,
    /// From the root.
    distance: i64,
    /// What is loaded or stored, if whole registers are.
    moved: Option<Reg>,
    is_load: bool,
    /// Counts what must not be moved across: for loads whatever is no load, for stores whatever is no store of the
    /// group.
    epoch: usize,
}

/// Finds the groups, for operations by their numbers.
pub(crate) fn groups(body: &Body, facts: &Facts, is_trusted: bool) -> AccessGroups {
    let bounds = if is_trusted { TRUSTED } else { CHECKED };
    let mut groups = AccessGroups { members: HashMap::new(), vectors: HashMap::new(), bounds, count: 0 };
    let mut open: HashMap<(Reg, u32), OpenGroup> = HashMap::new();
    let (mut load_epoch, mut store_epoch) = (0, 0);
    let mut last_stored: Option<(Reg, u32)> = None;
    for (n, op) in body.ops.iter().enumerate() {
        // A check that traps does not end a group: the launch has failed then, whichever check finds it first.
        if op.flow() != Flow::Straight {
            // In one order, so that the same kernel is always compiled the same.
            let mut ended: Vec<OpenGroup> = open.drain().map(|(_, group)| group).collect();
            ended.sort_unstable_by_key(|group| group.accesses.first().map_or(0, |access| access.operation));
            ended.into_iter().for_each(|group| groups.close(group, body, facts));
            continue;
        }
        let Some((at, access)) = op.access() else {
            let is_ordered = |op: &Op| matches!(op, Op::Gpu { op, .. } if op.orders_memory());
            let is_fence = usize::from(matches!(op, Op::Fence) || is_ordered(op));
            (load_epoch, store_epoch) = (load_epoch + is_fence, store_epoch + is_fence);
            continue;
        };
        let (is_load, is_store) = (matches!(op, Op::Load { .. }), matches!(op, Op::Store { .. }));
        // Loads are done at once only where nothing but loads is between them.
        load_epoch += usize::from(!is_load);
        let bytes = access.bytes;
        // Stores only where nothing but stores next to them is.
        let stored = (facts.root(at.base).0, bytes);
        if !is_store || last_stored != Some(stored) {
            store_epoch += 1;
            last_stored = is_store.then_some(stored);
        }
        let epoch = if is_load { load_epoch } else { store_epoch };
        if !(is_load || is_store) || !at.is_aligned || at.may_wrap() || !at.region.can_clamp() {
            // It may lie across those beside it: they are not stored after it.
            store_epoch += usize::from(is_store);
            continue;
        }
        let value = if let Op::Store { value, .. } = op { Some(*value) } else { op.to() };
        // What is stored later must still be what it was.
        let moved = value.filter(|reg| body.ty(*reg).bytes() == bytes && (is_load || facts.is_single_or_added(*reg)));
        let (root, distance) = facts.root(at.base);
        let distance = i64::from(distance) + i64::from(at.offset);
        let (low, high) = (distance, distance + i64::from(bytes));
        let fresh = || OpenGroup { root, bytes, low, high, accesses: Vec::new() };
        let group = open.entry((root, bytes)).or_insert_with(fresh);
        if high.max(group.high) - low.min(group.low) > bounds.reach {
            groups.close(std::mem::replace(group, fresh()), body, facts);
        }
        (group.low, group.high) = (group.low.min(low), group.high.max(high));
        group.accesses.push(GroupedAccess { operation: n, distance, moved, is_load, epoch });
    }
    groups
}

impl AccessGroups {
    fn close(&mut self, group: OpenGroup, body: &Body, facts: &Facts) {
        let OpenGroup { root, bytes, mut low, high, accesses } = group;
        if accesses.len() < 2 || self.count >= self.bounds.groups {
            return;
        }
        self.count += 1;
        let vectors: Vec<Vec<GroupedAccess>> = [true, false]
            .into_iter()
            .flat_map(|is_load| vectors(root, bytes, &accesses, is_load, facts, |reg| body.ty(reg)))
            .collect();
        let longest = vectors.iter().map(|vector| length(vector.len(), bytes)).max().unwrap_or(0);
        let multiple = i64::from(bytes).max(longest);
        // A window begins at a multiple of 16 too: going down to one never leaves it.
        low = low.div_euclid(multiple) * multiple;
        let near = |distance: i64| u32::try_from(distance - low).unwrap_or(0);
        let small = |distance: i64| i32::try_from(distance).unwrap_or(0);
        for (at, access) in accesses.iter().enumerate() {
            let member = GroupMember {
                group: self.count,
                root,
                distance: near(access.distance),
                low: small(low),
                reach: near(high),
                multiple: u32::try_from(multiple).unwrap_or(bytes),
                is_first: at == 0,
            };
            self.members.insert(access.operation, member);
        }
        for vector in vectors {
            let operations = vector.iter().map(|access| access.operation);
            let is_load = vector.first().is_some_and(|access| access.is_load);
            let Some(lead) = (if is_load { operations.min() } else { operations.max() }) else { continue };
            let distance = vector.first().map_or(0, |access| access.distance);
            for access in &vector {
                self.vectors.insert(access.operation, VectorPart::Rest);
            }
            let registers = vector.iter().filter_map(|access| access.moved).collect();
            self.vectors
                .insert(lead, VectorPart::Lead { registers, distance: near(distance), from_root: small(distance) });
        }
    }
}

fn length(count: usize, bytes: u32) -> i64 {
    i64::try_from(count).unwrap_or(0) * i64::from(bytes)
}

/// Loads, or stores, that lie side by side and begin at a multiple of their size, with nothing between them that they
/// must not be moved across: twos and fours.
fn vectors(
    root: Reg,
    bytes: u32,
    accesses: &[GroupedAccess],
    is_load: bool,
    facts: &Facts,
    ty: impl Fn(Reg) -> Ty,
) -> Vec<Vec<GroupedAccess>> {
    let is_own = |access: &&GroupedAccess| access.is_load == is_load && access.moved.is_some();
    let mut own: Vec<GroupedAccess> = accesses.iter().filter(is_own).copied().collect();
    if bytes < 4 {
        return Vec::new();
    }
    // Of one type: those of the first.
    let first = own.first().and_then(|access| access.moved).map(&ty);
    own.retain(|access| access.moved.map(&ty) == first);
    own.sort_unstable_by_key(|access| (access.epoch, access.distance, access.operation));
    if is_load {
        own.dedup_by_key(|access| (access.epoch, access.distance));
    } else {
        // What is stored twice stays in its order, also if the other store is of another type and in no vector.
        let place = |access: &GroupedAccess| (access.epoch, access.distance);
        let mut stored: Vec<_> = accesses.iter().filter(|access| !access.is_load).map(place).collect();
        stored.sort_unstable();
        own.retain(|access| {
            let from = stored.partition_point(|other| *other < place(access));
            stored.get(from + 1).is_none_or(|next| *next != place(access))
        });
    }
    let width = i64::from(bytes);
    let (mut found, mut at) = (Vec::new(), 0);
    while at < own.len() {
        let fits = |count: &usize| {
            let whole = length(*count, bytes);
            let Some(run) = own.get(at..at + count) else { return false };
            let is_row =
                run.windows(2).all(|two| two[1].distance == two[0].distance + width && two[1].epoch == two[0].epoch);
            let is_aligned = u32::try_from(whole).is_ok_and(|whole| facts.is_aligned(root, whole));
            whole <= VECTOR_BYTES_MAX && is_row && is_aligned && run[0].distance.rem_euclid(whole) == 0
        };
        let count = [4, 2].into_iter().find(fits).unwrap_or(1);
        if count > 1 {
            found.push(own[at..at + count].to_vec());
        }
        at += count;
    }
    found
}
