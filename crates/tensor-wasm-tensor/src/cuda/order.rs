//! Which launches of a plan have to come after which: those that touch the same memory, one of them writing it. The
//! rest are branches of its graph, and the device runs them side by side: the gradients of a layer's weights and of its
//! input, the parts of an optimizer's step. A small kernel takes a microsecond or two, most of it waiting for the one
//! before, so that what counts is the longest chain and not the sum.

use std::ops::Range;

use super::map::Argument;
use super::plan::SlotPlace;
use crate::schedule::plan::{BufferView, Step};

/// Launches of a graph with branches; a longer one is a chain, whose kernels fill the device by their number.
pub(super) const BRANCHED_MAX: usize = 256;

const WORDS: usize = BRANCHED_MAX / 64;

/// A part of memory that more than one step may touch. Leaves are not among them: nobody writes those.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// Bytes of the plan's block.
    Block(Range<u64>),
    Output(usize),
    /// What a library works in, one product at a time.
    Workspace,
    /// Where a step says that it could not be computed: a record of several words, written by one at a time.
    Flags,
}

impl Place {
    fn overlaps(&self, other: &Place) -> bool {
        match (self, other) {
            (Place::Block(own), Place::Block(other)) => own.start < other.end && other.start < own.end,
            _ => self == other,
        }
    }
}

/// What a step does with memory, and its launches.
pub(super) struct StepUse {
    read: Vec<Place>,
    written: Vec<Place>,
    launches: Range<usize>,
}

/// Where slots lie, how many bytes each has, and which bytes of the block a step has to itself.
pub(super) struct Layouts<'a> {
    pub slots: &'a [SlotPlace],
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
        let place = |slot: usize| match layouts.slots[slot] {
            SlotPlace::Block(from) => Place::Block(from..from + (layouts.slot_bytes)(slot).max(1)),
            SlotPlace::Output(output) => Place::Output(output),
        };
        let read = step.reads().filter_map(BufferView::slot).map(place).collect();
        let mut written: Vec<Place> = step.writes().map(place).collect();
        written.extend(layouts.scratch.into_iter().map(Place::Block));
        if arguments.clone().any(|argument| *argument == Argument::Workspace) {
            written.push(Place::Workspace);
        }
        if can_fail {
            written.push(Place::Flags);
        }
        StepUse { read, written, launches }
    }

    fn comes_after(&self, before: &StepUse) -> bool {
        let overlap = |a: &[Place], b: &[Place]| a.iter().any(|own| b.iter().any(|other| own.overlaps(other)));
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

    fn step(read: &[Place], written: &[Place], launches: Range<usize>) -> StepUse {
        StepUse { read: read.to_vec(), written: written.to_vec(), launches }
    }

    #[test]
    fn only_what_touches_the_same_memory_is_in_order() {
        let part = |from: u64| Place::Block(from..from + 10);
        let steps = [
            step(&[], &[part(0)], 0..1),
            // Two that read what the first wrote, of two launches and of one; and one that reads both.
            step(&[part(0)], &[part(10)], 1..3),
            step(&[part(0)], &[part(20)], 3..4),
            step(&[part(10), part(20)], &[Place::Output(0)], 4..5),
            // Takes the place of what the first wrote, once both have read it.
            step(&[], &[Place::Block(0..5)], 5..6),
            step(&[], &[Place::Output(1)], 6..7),
            step(&[], &[], 7..7),
            step(&[], &[Place::Workspace, Place::Output(2)], 7..8),
            step(&[], &[Place::Workspace, Place::Output(3)], 8..9),
        ];
        let expected: [&[u16]; 9] = [&[], &[0], &[1], &[0], &[3, 2], &[3, 2], &[], &[], &[7]];
        assert_eq!(order(&steps), expected);
    }

    #[test]
    fn what_is_long_is_a_chain() {
        let steps: Vec<StepUse> = (0..=BRANCHED_MAX).map(|n| step(&[], &[Place::Output(n)], n..n + 1)).collect();
        assert!(order(&steps).is_empty());
        assert!(order(&steps[1..]).is_empty());
        assert_eq!(order(&steps[..BRANCHED_MAX]), vec![Vec::<u16>::new(); BRANCHED_MAX]);
    }
}
