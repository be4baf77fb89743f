//! Accesses of a legalised kernel that are checked together: those of one width whose addresses are a fixed distance
//! apart, with nothing between them that could keep the later ones from being reached. And loads among them that are
//! done at once, as a vector.

use std::collections::HashMap;

use crate::facts::Facts;
use crate::ir::{Body, Flow, Op, Reg, Ty};

/// How far apart they may be, in bytes. A window must have as much as the group reaches over.
const REACH_MAX: i64 = 1 << 10;

/// Each may need registers of its own, and the device's compiler has only so many.
const GROUPS_MAX: usize = 48;

/// The longest vector that a device loads at once.
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

/// A load's part in a vector.
#[derive(Debug, Clone)]
pub(crate) enum VectorPart {
    /// It loads all of them, from the lowest on.
    Lead { registers: Vec<Reg>, distance: u32, from_root: i32 },
    /// It was loaded before.
    Rest,
}

#[derive(Debug, Default)]
pub(crate) struct AccessGroups {
    pub members: HashMap<usize, GroupMember>,
    pub vectors: HashMap<usize, VectorPart>,
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
    /// What is loaded, if it is a load of whole registers.
    loaded: Option<Reg>,
    /// How many stores came before.
    epoch: usize,
}

/// Finds the groups, for operations by their numbers.
pub(crate) fn groups(body: &Body, facts: &Facts) -> AccessGroups {
    let mut groups = AccessGroups::default();
    let mut open: HashMap<(Reg, u32), OpenGroup> = HashMap::new();
    let mut epoch = 0;
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
            epoch += usize::from(matches!(op, Op::Fence));
            continue;
        };
        let (is_load, is_store) = (matches!(op, Op::Load { .. }), matches!(op, Op::Store { .. }));
        // Loads are done at once only where nothing but loads is between them.
        epoch += usize::from(!is_load);
        let bytes = access.bytes;
        if !(is_load || is_store) || !at.is_aligned || at.may_wrap() || !at.region.can_clamp() {
            continue;
        }
        let loaded = op.to().filter(|to| is_load && body.ty(*to).bytes() == bytes);
        let (root, distance) = facts.root(at.base);
        let distance = i64::from(distance) + i64::from(at.offset);
        let (low, high) = (distance, distance + i64::from(bytes));
        let fresh = || OpenGroup { root, bytes, low, high, accesses: Vec::new() };
        let group = open.entry((root, bytes)).or_insert_with(fresh);
        if high.max(group.high) - low.min(group.low) > REACH_MAX {
            groups.close(std::mem::replace(group, fresh()), body, facts);
        }
        (group.low, group.high) = (group.low.min(low), group.high.max(high));
        group.accesses.push(GroupedAccess { operation: n, distance, loaded, epoch });
    }
    groups
}

impl AccessGroups {
    fn close(&mut self, group: OpenGroup, body: &Body, facts: &Facts) {
        let OpenGroup { root, bytes, mut low, high, accesses } = group;
        if accesses.len() < 2 || self.count >= GROUPS_MAX {
            return;
        }
        self.count += 1;
        let vectors = vectors(root, bytes, &accesses, facts, |reg| body.ty(reg));
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
            let Some(lead) = vector.iter().map(|access| access.operation).min() else { continue };
            let distance = vector.first().map_or(0, |access| access.distance);
            for access in &vector {
                self.vectors.insert(access.operation, VectorPart::Rest);
            }
            let registers = vector.iter().filter_map(|access| access.loaded).collect();
            self.vectors
                .insert(lead, VectorPart::Lead { registers, distance: near(distance), from_root: small(distance) });
        }
    }
}

fn length(count: usize, bytes: u32) -> i64 {
    i64::try_from(count).unwrap_or(0) * i64::from(bytes)
}

/// Loads that lie side by side and begin at a multiple of their size, with no store between them: twos and fours.
fn vectors(
    root: Reg,
    bytes: u32,
    accesses: &[GroupedAccess],
    facts: &Facts,
    ty: impl Fn(Reg) -> Ty,
) -> Vec<Vec<GroupedAccess>> {
    let mut loads: Vec<GroupedAccess> = accesses.iter().filter(|access| access.loaded.is_some()).copied().collect();
    if bytes < 4 {
        return Vec::new();
    }
    // Of one type: those of the first.
    let first = loads.first().and_then(|access| access.loaded).map(&ty);
    loads.retain(|access| access.loaded.map(&ty) == first);
    loads.sort_unstable_by_key(|access| (access.epoch, access.distance, access.operation));
    loads.dedup_by_key(|access| (access.epoch, access.distance));
    let width = i64::from(bytes);
    let (mut found, mut at) = (Vec::new(), 0);
    while at < loads.len() {
        let fits = |count: &usize| {
            let whole = length(*count, bytes);
            let Some(run) = loads.get(at..at + count) else { return false };
            let is_row =
                run.windows(2).all(|two| two[1].distance == two[0].distance + width && two[1].epoch == two[0].epoch);
            let is_aligned = u32::try_from(whole).is_ok_and(|whole| facts.is_aligned(root, whole));
            whole <= VECTOR_BYTES_MAX && is_row && is_aligned && run[0].distance.rem_euclid(whole) == 0
        };
        let count = [4, 2].into_iter().find(fits).unwrap_or(1);
        if count > 1 {
            found.push(loads[at..at + count].to_vec());
        }
        at += count;
    }
    found
}
