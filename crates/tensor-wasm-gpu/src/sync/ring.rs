//! The ring that carries jobs from the server to the worker: one writer, one reader, in shared memory, without locks.
//!
//! Its entries are the numbers of cells, where the jobs themselves are (`queue/job.rs`). An entry is published by the
//! release store to `tail` and taken by the release store to `head`; everything the writer did to the cell before is
//! visible to the reader. Writers take turns under the scheduler's lock, so there is one at a time.

use crate::sync::{AtomicU32, Ordering};

/// A view of the ring. `head` and `tail` count entries ever taken and ever written, modulo 2³².
#[derive(Clone, Copy)]
pub(crate) struct Ring<'a> {
    head: &'a AtomicU32,
    tail: &'a AtomicU32,
    entries: &'a [AtomicU32],
}

impl<'a> Ring<'a> {
    /// The number of entries is a power of two.
    pub(crate) fn new(head: &'a AtomicU32, tail: &'a AtomicU32, entries: &'a [AtomicU32]) -> Ring<'a> {
        debug_assert!(entries.len().is_power_of_two());
        Ring { head, tail, entries }
    }

    fn entry(&self, at: u32) -> &'a AtomicU32 {
        &self.entries[at as usize & (self.entries.len() - 1)]
    }

    /// Writes an entry; false if the ring is full. Only one thread writes at a time. `head_seen` is what the writers
    /// last saw of `head`: its line belongs to the reader's core and is fetched only when the ring looks full.
    pub(crate) fn push(&self, value: u32, head_seen: &mut u32) -> bool {
        let tail = self.tail.load(Ordering::Relaxed);
        if tail.wrapping_sub(*head_seen) as usize >= self.entries.len() {
            *head_seen = self.head.load(Ordering::Acquire);
            if tail.wrapping_sub(*head_seen) as usize >= self.entries.len() {
                return false;
            }
        }
        self.entry(tail).store(value, Ordering::Relaxed);
        self.tail.store(tail.wrapping_add(1), Ordering::Release);
        true
    }

    /// Takes the oldest entry. Only one thread reads. `tail_seen` is what it last saw of `tail`, as above.
    pub(crate) fn pop(&self, tail_seen: &mut u32) -> Option<u32> {
        let head = self.head.load(Ordering::Relaxed);
        if head == *tail_seen {
            *tail_seen = self.tail.load(Ordering::Acquire);
            if head == *tail_seen {
                return None;
            }
        }
        let value = self.entry(head).load(Ordering::Relaxed);
        self.head.store(head.wrapping_add(1), Ordering::Release);
        Some(value)
    }

    /// An entry that `pop` will take, so many after the next, of those it has seen already.
    pub(crate) fn peek(&self, tail_seen: u32, after: u32) -> Option<u32> {
        let head = self.head.load(Ordering::Relaxed);
        (tail_seen.wrapping_sub(head) > after).then(|| self.entry(head.wrapping_add(after)).load(Ordering::Relaxed))
    }

    /// Where both ends stand at first.
    pub(crate) fn start(&self) -> u32 {
        self.head.load(Ordering::Relaxed)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head.load(Ordering::Relaxed) == self.tail.load(Ordering::Acquire)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn full_and_empty_are_told_apart_across_the_wrap() {
        let (head, tail) = (AtomicU32::new(u32::MAX - 5), AtomicU32::new(u32::MAX - 5));
        let entries: Vec<AtomicU32> = (0..4).map(|_| AtomicU32::new(0)).collect();
        let ring = Ring::new(&head, &tail, &entries);
        let (mut head_seen, mut tail_seen) = (ring.start(), ring.start());
        for round in 0..10 {
            assert!(ring.is_empty() && ring.pop(&mut tail_seen).is_none());
            for n in 0..4 {
                assert!(ring.push(round * 4 + n, &mut head_seen));
            }
            assert!(!ring.push(99, &mut head_seen), "full");
            for n in 0..4 {
                assert!(n == 0 || ring.peek(tail_seen, 0) == Some(round * 4 + n));
                assert_eq!(ring.pop(&mut tail_seen), Some(round * 4 + n));
            }
            assert_eq!((ring.peek(tail_seen, 0), ring.peek(tail_seen, 1)), (None, None));
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Every interleaving of a writer and a reader: entries arrive once, in order, with what was written before them.
    #[test]
    fn entries_arrive_once_in_order_with_their_cells() {
        loom::model(|| {
            let head = Arc::new(AtomicU32::new(0));
            let tail = Arc::new(AtomicU32::new(0));
            let entries: Arc<Vec<AtomicU32>> = Arc::new((0..2).map(|_| AtomicU32::new(0)).collect());
            let cells: Arc<Vec<AtomicU32>> = Arc::new((0..3).map(|_| AtomicU32::new(0)).collect());
            let writer = {
                let (head, tail, entries, cells) = (head.clone(), tail.clone(), entries.clone(), cells.clone());
                thread::spawn(move || {
                    let ring = Ring::new(&head, &tail, &entries);
                    let mut head_seen = 0;
                    for n in 0..3_u32 {
                        cells[n as usize].store(n + 10, Ordering::Relaxed);
                        while !ring.push(n, &mut head_seen) {
                            thread::yield_now();
                        }
                    }
                })
            };
            let ring = Ring::new(&head, &tail, &entries);
            let (mut next, mut tail_seen) = (0, 0);
            while next < 3 {
                match ring.pop(&mut tail_seen) {
                    Some(n) => {
                        assert_eq!(n, next);
                        assert_eq!(cells[n as usize].load(Ordering::Relaxed), n + 10);
                        next += 1;
                    }
                    None => thread::yield_now(),
                }
            }
            writer.join().unwrap();
        });
    }
}
