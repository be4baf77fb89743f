//! Numbers of nodes by their ids: whether a node was met before is asked of every input of every node, each time a
//! graph is taken.

/// Ids, each with a number: an open-addressed table. Most graphs have some ten to some hundred nodes and are taken anew
/// in each step of a loop, where the standard library's set took a third of the time (benchmark `host`).
#[derive(Default)]
pub(crate) struct Numbers {
    /// A power of two of them.
    slots: Vec<(u64, u32)>,
    count: usize,
}

impl Numbers {
    const EMPTY: (u64, u32) = (0, u32::MAX);
    const SLOTS_MIN: usize = 128;

    /// Ids are different, and need no more than to be spread.
    fn place(&self, id: u64) -> usize {
        let spread = id.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        usize::try_from(spread).unwrap_or(0) & (self.slots.len() - 1)
    }

    /// The number of an id, which is `next` if it is new.
    pub(crate) fn of(&mut self, id: u64, next: u32) -> u32 {
        if 2 * self.count >= self.slots.len() {
            self.grow();
        }
        let mut at = self.place(id);
        loop {
            let slot = &mut self.slots[at];
            if *slot == Numbers::EMPTY {
                *slot = (id, next);
                self.count += 1;
                return next;
            }
            if slot.0 == id {
                return slot.1;
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    pub(crate) fn find(&self, id: u64) -> Option<u32> {
        let mut at = self.place(id);
        while self.slots[at] != Numbers::EMPTY {
            if self.slots[at].0 == id {
                return Some(self.slots[at].1);
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
        None
    }

    fn grow(&mut self) {
        let slots = vec![Numbers::EMPTY; (2 * self.slots.len()).max(Numbers::SLOTS_MIN)];
        let before = std::mem::replace(&mut self.slots, slots);
        self.count = 0;
        before.into_iter().filter(|slot| *slot != Numbers::EMPTY).for_each(|(id, number)| {
            self.of(id, number);
        });
    }

    pub(crate) fn clear(&mut self) {
        self.slots.fill(Numbers::EMPTY);
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_keeps_its_number_while_the_table_grows() {
        let mut numbers = Numbers::default();
        // Ids that are far apart, and some that are close.
        let ids: Vec<u64> = (0..500).map(|n| if n % 2 == 0 { n } else { n << 32 }).collect();
        for (id, number) in ids.iter().zip(0..) {
            assert_eq!(numbers.of(*id, number), number);
            assert_eq!(numbers.of(*id, number + 1), number, "it is known");
        }
        assert!(ids.iter().zip(0..).all(|(id, number)| numbers.find(*id) == Some(number)));
        assert_eq!(numbers.find(u64::MAX), None);
        numbers.clear();
        assert_eq!((numbers.find(ids[0]), numbers.of(ids[0], 7)), (None, 7));
    }
}
