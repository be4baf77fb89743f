//! Which launches of a plan have to come after which: those that touch the same memory, one of them writing it. The
//! rest are branches of its graph, and the device runs them side by side: the gradients of a layer's weights and of its
//! input, the parts of an optimizer's step. A small kernel takes a microsecond or two, most of it waiting for the one
//! before, so that what counts is the longest chain and not the sum.

use std::ops::Range;

use super::map::Argument;
use super::plan::{PlanOutput, SlotPlace};
use crate::schedule::plan::{BufferView, Source, Step};

/// Launches of a graph with branches; a longer one is a chain, whose kernels fill the device by their number.
pub(super) const BRANCHED_MAX: usize = 256;

const WORDS: usize = BRANCHED_MAX / 64;

/// A part of memory that more than one step may touch.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Region {
    /// Bytes of the plan's block.
    Block(Range<u64>),
    Output(usize),
    /// A leaf's buffer: written where a result takes it over, which those that read the leaf come before.
    Leaf(usize),
    /// What a library works in, one product at a time.
    Workspace,
    /// Where a step says that it could not be computed: a record of several words, written by one at a time.
    Flags,
}

impl Region {
    fn overlaps(&self, other: &Region) -> bool {
        match (self, other) {
            (Region::Block(own), Region::Block(other)) => own.start < other.end && other.start < own.end,
            _ => self == other,
        }
    }
}

/// What a step does with memory, and its launches.
pub(super) struct StepUse {
    read: Vec<Region>,
    written: Vec<Region>,
    launches: Range<usize>,
}

/// Where slots lie, how many bytes each has, and which bytes of the block a step has to itself.
pub(super) struct Layouts<'a> {
    pub slots: &'a [SlotPlace],
    pub outputs: &'a [PlanOutput],
    pub slot_bytes: &'a dyn Fn(usize) -> u64,
    pub scratch: Vec<Range<u64>>,
}

impl StepUse {
    pub(super) fn of<'a>(
        step: &Step,
        layouts: Layouts<'_>,
        arguments: impl Iterator<Item = &'a Argument> + Clone,
        can_fail: bool,
        launches: Range<usize>,
    ) -> StepUse {
        let region = |slot: usize| match layouts.slots[slot] {
            SlotPlace::Block(from) => Region::Block(from..from + (layouts.slot_bytes)(slot).max(1)),
            SlotPlace::Output(output) => Region::Output(output),
        };
        let taken_over = |slot: usize| match layouts.slots[slot] {
            SlotPlace::Block(_) => None,
            SlotPlace::Output(output) => layouts.outputs[output].over.map(Region::Leaf),
        };
        let source = |view: &BufferView| match view.source {
            Source::Slot(slot) => region(slot),
            Source::Leaf(leaf) => Region::Leaf(leaf),
        };
        let read = step.reads().map(source).collect();
        let mut written: Vec<Region> = step.writes().map(region).collect();
        written.extend(step.writes().filter_map(taken_over));
        written.extend(layouts.scratch.into_iter().map(Region::Block));
        if arguments.clone().any(|argument| *argument == Argument::Workspace) {
            written.push(Region::Workspace);
        }
        if can_fail {
            written.push(Region::Flags);
        }
        StepUse { read, written, launches }
    }

    fn comes_after(&self, before: &StepUse) -> bool {
        let overlap = |a: &[Region], b: &[Region]| a.iter().any(|own| b.iter().any(|other| own.overlaps(other)));
        overlap(&self.read, &before.written)
            || overlap(&self.written, &before.written)
            || overlap(&self.written, &before.read)
    }
}

/// For each launch those that it comes directly after; nothing if there are too many for branches to matter.
pub(super) fn order(steps: &[StepUse]) -> Vec<Vec<u16>> {
    let count = steps.iter().map(|step| step.launches.end).max().unwrap_or(0);
    if count > BRANCHED_MAX {
        return Vec::new();
    }
    let mut after: Vec<Vec<u16>> = vec![Vec::new(); count];
    // For each step its launches' and all that come before them.
    let mut known: Vec<[u64; WORDS]> = Vec::with_capacity(steps.len());
    for (n, step) in steps.iter().enumerate() {
        let mut own = [0; WORDS];
        let mut direct = Vec::new();
        // From the last on: what it comes after is known through it.
        for (before, earlier) in steps[..n].iter().enumerate().rev() {
            let Some(last) = earlier.launches.clone().next_back() else { continue };
            if own[last / 64] >> (last % 64) & 1 == 0 && step.comes_after(earlier) {
                direct.push(u16::try_from(last).unwrap_or(u16::MAX));
                own.iter_mut().zip(known[before]).for_each(|(own, other)| *own |= other);
            }
        }
        for (launch, at) in step.launches.clone().enumerate() {
            // The kernels of a step follow one another.
            after[at] = if launch == 0 { direct.clone() } else { vec![u16::try_from(at - 1).unwrap_or(u16::MAX)] };
            own[at / 64] |= 1 << (at % 64);
        }
        known.push(own);
    }
    after
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(read: &[Region], written: &[Region], launches: Range<usize>) -> StepUse {
        StepUse { read: read.to_vec(), written: written.to_vec(), launches }
    }

    #[test]
    fn only_what_touches_the_same_memory_is_in_order() {
        let part = |from: u64| Region::Block(from..from + 10);
        let steps = [
            step(&[], &[part(0)], 0..1),
            // Two that read what the first wrote, of two launches and of one; and one that reads both.
            step(&[part(0)], &[part(10)], 1..3),
            step(&[part(0)], &[part(20)], 3..4),
            step(&[part(10), part(20)], &[Region::Output(0)], 4..5),
            // Takes the place of what the first wrote, once both have read it.
            step(&[], &[Region::Block(0..5)], 5..6),
            step(&[], &[Region::Output(1)], 6..7),
            step(&[], &[], 7..7),
            step(&[], &[Region::Workspace, Region::Output(2)], 7..8),
            step(&[], &[Region::Workspace, Region::Output(3)], 8..9),
            // Two that read a leaf, and one that takes its memory over.
            step(&[Region::Leaf(0)], &[Region::Output(4)], 9..10),
            step(&[Region::Leaf(0)], &[Region::Output(5)], 10..11),
            step(&[Region::Leaf(0)], &[Region::Output(6), Region::Leaf(0)], 11..12),
        ];
        let expected: [&[u16]; 12] = [&[], &[0], &[1], &[0], &[3, 2], &[3, 2], &[], &[], &[7], &[], &[], &[10, 9]];
        assert_eq!(order(&steps), expected);
    }

    #[test]
    fn what_is_long_is_a_chain() {
        let steps: Vec<StepUse> = (0..=BRANCHED_MAX).map(|n| step(&[], &[Region::Output(n)], n..n + 1)).collect();
        assert!(order(&steps).is_empty());
        assert!(order(&steps[1..]).is_empty());
        assert_eq!(order(&steps[..BRANCHED_MAX]), vec![Vec::<u16>::new(); BRANCHED_MAX]);
    }
}
