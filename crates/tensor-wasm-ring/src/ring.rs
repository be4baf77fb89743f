//! Rings of slots: messages from many senders, or from one, to one receiver, in memory that both see. No locks, and no
//! fences: whether a slot is there is in the slot itself.
//!
//! A slot is eight chunks of 16 bytes, each 12 bytes of the message and a tag of four that says for which lap of the
//! ring it was written. A device may see the chunks of a slot in any order, but a chunk only whole, so the reader takes
//! a slot when all of its tags are those of the lap; the same read that finds a message fetches it. Laps count from 1,
//! so a ring of zeros is empty.
//!
//! A position is how many slots came before it, ever. Senders that are many take positions from a counter that only
//! they see ([`Reservations`]); how far the receiver is it says in a word of its own, which senders look at only when
//! the ring seems full.
//!
//! Invariant: the slot of a position is written by the one who reserved it, and by nobody else until the receiver has
//! said that it is done with it.

use std::ops::Deref;

use crate::sync::{AtomicU64, Ordering, OwnLine};

/// Chunks of a slot. The model checker takes rings of fewer.
pub const CHUNKS: usize = 8;

/// A message as chunks have it.
pub type Chunks<const N: usize> = [[u32; 3]; N];

/// Laps have as many tags; 0 is none.
const TAGS: u64 = u32::MAX as u64;

/// Why nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    Full,
    /// The receiver says that it has taken what was never sent.
    Corrupt,
}

/// What stands at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    Empty,
    /// Begun and not finished.
    Torn,
    Whole,
}

/// The slots of a ring, as a power of two.
pub struct Slots<W, const N: usize = CHUNKS> {
    words: W,
    mask: u64,
    lap_shift: u32,
}

impl<W: Deref<Target = [AtomicU64]>, const N: usize> Slots<W, N> {
    /// None if the words are not those of a ring.
    pub fn new(words: W) -> Option<Slots<W, N>> {
        let count = words.len() / (2 * N);
        let is_whole = count * 2 * N == words.len() && count.is_power_of_two();
        is_whole.then(|| Slots { words, mask: count as u64 - 1, lap_shift: count.trailing_zeros() })
    }

    #[expect(clippy::len_without_is_empty, reason = "there is no ring without slots")]
    pub fn len(&self) -> u64 {
        self.mask + 1
    }

    #[inline]
    fn tag(&self, position: u64) -> u64 {
        let lap = position >> self.lap_shift;
        // A remainder takes longer than all the rest of a slot, and four billion laps take longer than most machines.
        if lap < TAGS { lap + 1 } else { lap % TAGS + 1 }
    }

    #[inline]
    fn slot(&self, position: u64) -> &[[AtomicU64; 2]] {
        #[expect(clippy::cast_possible_truncation, reason = "less than the number of slots, which is a usize")]
        let first = (position & self.mask) as usize * 2 * N;
        self.words[first..first + 2 * N].as_chunks().0
    }

    /// Writes a slot that is the caller's.
    #[inline]
    pub fn write(&self, position: u64, message: &Chunks<N>) {
        let tag = self.tag(position) << 32;
        for (chunk, data) in self.slot(position).iter().zip(message) {
            chunk[0].store(u64::from(data[0]) | u64::from(data[1]) << 32, Ordering::Relaxed);
            chunk[1].store(u64::from(data[2]) | tag, Ordering::Release);
        }
    }

    /// Reads a slot, if all of it is there.
    #[inline]
    pub fn read(&self, position: u64) -> Option<Chunks<N>> {
        let tag = self.tag(position);
        let mut message = [[0; 3]; N];
        // From the last to the first, as they come: who waits for a slot looks at its second line only, and does not
        // take the first from a writer that is in the middle of it.
        for (chunk, data) in self.slot(position).iter().zip(&mut message).rev() {
            let second = chunk[1].load(Ordering::Acquire);
            if second >> 32 != tag {
                return None;
            }
            let first = chunk[0].load(Ordering::Relaxed);
            *data = [low(first), low(first >> 32), low(second)];
        }
        Some(message)
    }

    /// Whether anything of a slot is there.
    pub fn standing(&self, position: u64) -> Standing {
        let tag = self.tag(position);
        let there = self.slot(position).iter().filter(|chunk| chunk[1].load(Ordering::Acquire) >> 32 == tag).count();
        match there {
            0 => Standing::Empty,
            there if there == N => Standing::Whole,
            _ => Standing::Torn,
        }
    }
}

#[inline]
fn low(word: u64) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "the half that is wanted")]
    let half = word as u32;
    half
}

/// Who writes where, among many senders of one process.
pub struct Reservations {
    /// The next position that is nobody's.
    next: OwnLine<AtomicU64>,
    /// What a sender last saw of how far the receiver is; at most that.
    taken_seen: OwnLine<AtomicU64>,
}

impl Default for Reservations {
    fn default() -> Reservations {
        Reservations { next: OwnLine(AtomicU64::new(0)), taken_seen: OwnLine(AtomicU64::new(0)) }
    }
}

impl Reservations {
    /// Positions that were given out.
    pub fn reserved(&self) -> u64 {
        self.next.0.load(Ordering::Relaxed)
    }

    /// Reserves so many positions that follow each other, in a ring of so many slots, and returns the first. Whoever
    /// has them writes all of them, soon: the receiver waits there.
    #[inline]
    pub fn reserve(&self, count: u64, slots: u64, taken: &AtomicU64) -> Result<u64, Refusal> {
        loop {
            // In this order: what was seen of the receiver is never more than what had been reserved.
            let seen = self.taken_seen.0.load(Ordering::Acquire);
            let next = self.next.0.load(Ordering::Relaxed);
            if next.wrapping_sub(seen).saturating_add(count) > slots {
                self.look(count, slots, taken)?;
                continue;
            }
            let after = next.wrapping_add(count);
            // Release: who sees this, in `look`, sees how far the receiver had to be for it.
            if self.next.0.compare_exchange_weak(next, after, Ordering::Release, Ordering::Relaxed).is_ok() {
                return Ok(next);
            }
        }
    }

    /// Looks how far the receiver is. An error if that leaves no room.
    #[cold]
    fn look(&self, count: u64, slots: u64, taken: &AtomicU64) -> Result<(), Refusal> {
        let fresh = taken.load(Ordering::Acquire);
        let next = self.next.0.load(Ordering::Acquire);
        let used = next.wrapping_sub(fresh);
        if used > slots {
            // Others may have gone on between the two looks, if the receiver has too.
            return if taken.load(Ordering::Acquire) == fresh { Err(Refusal::Corrupt) } else { Ok(()) };
        }
        self.taken_seen.0.fetch_max(fresh, Ordering::AcqRel);
        if used + count > slots { Err(Refusal::Full) } else { Ok(()) }
    }
}

/// The end of a ring that many write to.
pub struct Senders<W, const N: usize = CHUNKS> {
    slots: Slots<W, N>,
    reservations: Reservations,
}

impl<W: Deref<Target = [AtomicU64]>, const N: usize> Senders<W, N> {
    pub fn new(slots: Slots<W, N>) -> Senders<W, N> {
        Senders { slots, reservations: Reservations::default() }
    }

    /// Slots that were sent or are about to be.
    pub fn sent(&self) -> u64 {
        self.reservations.reserved()
    }

    pub fn slots(&self) -> &Slots<W, N> {
        &self.slots
    }

    /// Sends a message if there is room. `taken` is the receiver's word. Returns its position.
    #[inline]
    pub fn send(&self, message: &Chunks<N>, taken: &AtomicU64) -> Result<u64, Refusal> {
        let position = self.reservations.reserve(1, self.slots.len(), taken)?;
        self.slots.write(position, message);
        Ok(position)
    }

    /// Sends several, one behind the other with nobody else's in between, or none of them.
    pub fn send_all(&self, messages: &[Chunks<N>], taken: &AtomicU64) -> Result<u64, Refusal> {
        let first = self.reservations.reserve(messages.len() as u64, self.slots.len(), taken)?;
        (first..).zip(messages).for_each(|(position, message)| self.slots.write(position, message));
        Ok(first)
    }
}

/// The end of a ring that one writes to.
pub struct Sender<W, const N: usize = CHUNKS> {
    slots: Slots<W, N>,
    next: u64,
    taken_seen: u64,
}

impl<W: Deref<Target = [AtomicU64]>, const N: usize> Sender<W, N> {
    pub fn new(slots: Slots<W, N>) -> Sender<W, N> {
        Sender { slots, next: 0, taken_seen: 0 }
    }

    /// How many it has sent.
    pub fn sent(&self) -> u64 {
        self.next
    }

    /// Whether the next message would be sent.
    pub fn has_room(&self, taken: &AtomicU64) -> bool {
        self.next.wrapping_sub(taken.load(Ordering::Acquire)) < self.slots.len()
    }

    #[inline]
    pub fn send(&mut self, message: &Chunks<N>, taken: &AtomicU64) -> Result<(), Refusal> {
        if self.next.wrapping_sub(self.taken_seen) >= self.slots.len() {
            let fresh = taken.load(Ordering::Acquire);
            if self.next.wrapping_sub(fresh) > self.slots.len() {
                return Err(Refusal::Corrupt);
            }
            self.taken_seen = fresh;
            if self.next - fresh >= self.slots.len() {
                return Err(Refusal::Full);
            }
        }
        self.slots.write(self.next, message);
        self.next += 1;
        Ok(())
    }
}

/// The end of a ring that is read.
pub struct Receiver<W, const N: usize = CHUNKS> {
    slots: Slots<W, N>,
    next: u64,
}

impl<W: Deref<Target = [AtomicU64]>, const N: usize> Receiver<W, N> {
    pub fn new(slots: Slots<W, N>) -> Receiver<W, N> {
        Receiver { slots, next: 0 }
    }

    /// How many it has received.
    pub fn received(&self) -> u64 {
        self.next
    }

    /// The next message, if it is there. Its slot is the sender's again when [`Receiver::release`] has been called.
    #[inline]
    pub fn receive(&mut self) -> Option<Chunks<N>> {
        let message = self.slots.read(self.next)?;
        self.next += 1;
        Some(message)
    }

    /// Lets senders have the slots of everything that was received. Once for many: the word's line goes to the other
    /// side and back.
    #[inline]
    pub fn release(&self, taken: &AtomicU64) {
        taken.store(self.next, Ordering::Release);
    }

    /// Whether the next message is there.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.standing() == Standing::Whole
    }

    pub fn standing(&self) -> Standing {
        self.slots.standing(self.next)
    }
}

/// Words of zeros, for a ring in ordinary memory.
pub fn ordinary_words(slots: usize) -> Box<[AtomicU64]> {
    (0..slots * 2 * CHUNKS).map(|_| AtomicU64::new(0)).collect()
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    fn message(n: u64) -> Chunks<CHUNKS> {
        std::array::from_fn(|chunk| [low(n), low(n >> 32), low(chunk as u64)])
    }

    type SharedSlots = Slots<Arc<[AtomicU64]>>;

    /// Two views of one ring.
    fn pair(count: usize) -> (SharedSlots, SharedSlots) {
        let words: Arc<[AtomicU64]> = Arc::from(ordinary_words(count));
        (Slots::new(words.clone()).unwrap(), Slots::new(words).unwrap())
    }

    #[test]
    fn what_is_sent_is_received_over_many_laps() {
        let (write, read) = pair(4);
        let (senders, mut receiver) = (Senders::new(write), Receiver::new(read));
        let taken = AtomicU64::new(0);
        assert_eq!(receiver.receive(), None, "zeros are nothing");
        for n in 0..1_000 {
            assert_eq!(senders.send(&message(n), &taken), Ok(n));
            assert_eq!(receiver.receive(), Some(message(n)));
            assert_eq!(receiver.receive(), None);
            receiver.release(&taken);
        }
    }

    #[test]
    fn a_full_ring_refuses_until_there_is_room() {
        let (write, read) = pair(4);
        let (senders, mut receiver) = (Senders::new(write), Receiver::new(read));
        let taken = AtomicU64::new(0);
        assert_eq!(senders.send_all(&[0, 1, 2].map(message), &taken), Ok(0));
        assert_eq!(senders.send_all(&[3, 4].map(message), &taken), Err(Refusal::Full), "both or none");
        assert_eq!(senders.send(&message(3), &taken), Ok(3));
        assert_eq!(senders.send(&message(4), &taken), Err(Refusal::Full));
        assert_eq!(receiver.receive(), Some(message(0)));
        assert_eq!(senders.send(&message(4), &taken), Err(Refusal::Full), "read, and not given back");
        receiver.release(&taken);
        assert_eq!(senders.send(&message(4), &taken), Ok(4));
        assert_eq!(
            (1..5).map(|_| receiver.receive()).collect::<Vec<_>>(),
            (1..5).map(|n| Some(message(n))).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_single_sender_does_the_same() {
        let (write, read) = pair(2);
        let (mut sender, mut receiver) = (Sender::new(write), Receiver::new(read));
        let taken = AtomicU64::new(0);
        for n in (0..100).step_by(2) {
            assert_eq!(sender.send(&message(n), &taken), Ok(()));
            assert_eq!(sender.send(&message(n + 1), &taken), Ok(()));
            assert_eq!(sender.send(&message(n + 2), &taken), Err(Refusal::Full));
            assert_eq!((receiver.receive(), receiver.receive()), (Some(message(n)), Some(message(n + 1))));
            receiver.release(&taken);
        }
        taken.store(u64::MAX, Ordering::Relaxed);
        let last = (0..3).map(|n| sender.send(&message(n), &taken)).last();
        assert_eq!(last, Some(Err(Refusal::Corrupt)), "more than was sent cannot have been taken");
    }

    #[test]
    fn tags_are_never_zero_and_tell_laps_apart() {
        let (slots, _) = pair(4);
        for position in [0, 3, 4, 4 * (TAGS - 1), 4 * TAGS, 4 * TAGS + 4, u64::MAX] {
            let tag = slots.tag(position);
            assert!((1..=TAGS).contains(&tag), "{position}: {tag}");
            assert_ne!(tag, slots.tag(position.wrapping_add(4)), "{position}");
        }
        assert_eq!((slots.tag(0), slots.tag(4), slots.tag(4 * TAGS)), (1, 2, 1));
    }

    #[test]
    fn what_is_not_whole_is_not_there_and_a_wrong_word_is_an_error() {
        let (write, read) = pair(2);
        let words = write.words.clone();
        let (senders, mut receiver) = (Senders::new(write), Receiver::new(read));
        let taken = AtomicU64::new(0);
        senders.send(&message(7), &taken).unwrap();
        for chunk in 0..CHUNKS {
            let word = &words[2 * chunk + 1];
            let tagged = word.swap(u64::from(u32::MAX) << 32, Ordering::Relaxed);
            assert_eq!((receiver.receive(), receiver.standing()), (None, Standing::Torn), "without chunk {chunk}");
            word.store(tagged, Ordering::Relaxed);
        }
        assert_eq!((receiver.standing(), receiver.receive()), (Standing::Whole, Some(message(7))));
        assert_eq!(receiver.standing(), Standing::Empty);
        senders.send(&message(8), &taken).unwrap();
        for wrong in [3, u64::MAX, 1 << 40] {
            taken.store(wrong, Ordering::Relaxed);
            assert_eq!(senders.send(&message(9), &taken), Err(Refusal::Corrupt), "{wrong}");
        }
        assert!(Slots::<_, CHUNKS>::new(ordinary_words(3)).is_none(), "no power of two");
        assert!(Slots::<_, CHUNKS>::new(ordinary_words(0)).is_none());
    }

    #[test]
    fn many_senders_lose_nothing_and_keep_their_order() {
        const EACH: u64 = 50_000;
        let (write, read) = pair(64);
        let (senders, mut receiver) = (Senders::new(write), Receiver::new(read));
        let (taken, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for sender in 0..3_u64 {
                let (senders, taken, stop) = (&senders, &taken, &stop);
                scope.spawn(move || {
                    for n in 0..EACH {
                        while senders.send(&message(sender << 48 | n), taken).is_err() {
                            assert!(!stop.load(Ordering::Relaxed));
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut next = [0; 3];
            while next.iter().sum::<u64>() < 3 * EACH {
                let Some(message) = receiver.receive() else {
                    std::thread::yield_now();
                    continue;
                };
                let n = u64::from(message[0][0]) | u64::from(message[0][1]) << 32;
                let (sender, n) = ((n >> 48) as usize, n & 0xffff_ffff_ffff);
                assert_eq!(n, next[sender], "of sender {sender}");
                assert!(message.iter().enumerate().all(|(at, chunk)| chunk[2] == low(at as u64)), "whole");
                next[sender] += 1;
                receiver.release(&taken);
            }
        });
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Rings of two slots with one chunk each: all that matters of more chunks is that each has its tag, which
    /// `a_slot_is_read_whole_or_not_at_all` tries with two.
    type Words = std::sync::Arc<[AtomicU64]>;

    fn words(count: usize) -> Words {
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    fn slots<const N: usize>(words: &Words) -> Slots<Words, N> {
        Slots::new(words.clone()).unwrap()
    }

    /// Two senders and a receiver on a ring of one lap and more: whatever was accepted arrives once, whole, and in its
    /// sender's order. Nobody waits for anybody, so that the checker has an end.
    #[test]
    fn many_senders() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let memory = words(4);
            let senders = Arc::new(Senders::<_, 1>::new(slots(&memory)));
            let taken = Arc::new(AtomicU64::new(0));
            let threads: Vec<_> = (0..2_u32)
                .map(|sender| {
                    let (senders, taken) = (senders.clone(), taken.clone());
                    thread::spawn(move || {
                        let mut accepted = 0;
                        for _ in 0..2 {
                            match senders.send(&[[sender, accepted, 7]], &taken) {
                                Ok(_) => accepted += 1,
                                Err(refusal) => assert_eq!(refusal, Refusal::Full),
                            }
                        }
                        accepted
                    })
                })
                .collect();
            let mut receiver = Receiver::<_, 1>::new(slots(&memory));
            let mut next = [0; 2];
            let mut receive = || {
                let message = receiver.receive();
                if let Some([[sender, n, seven]]) = message {
                    assert_eq!((n, seven), (next[sender as usize], 7));
                    next[sender as usize] += 1;
                    receiver.release(&taken);
                }
                message.is_some()
            };
            (0..2).for_each(|_| _ = receive());
            let accepted: Vec<u32> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            while receive() {}
            assert_eq!(next[..], accepted[..]);
        });
    }

    /// Slots of two chunks, written again while the reader looks.
    #[test]
    fn a_slot_is_read_whole_or_not_at_all() {
        loom::model(|| {
            let memory = words(4);
            let taken = Arc::new(AtomicU64::new(0));
            let writer = {
                let (slots, taken) = (slots::<2>(&memory), taken.clone());
                thread::spawn(move || {
                    let mut sender = Sender::new(slots);
                    for n in 0..2 {
                        while sender.send(&[[n, n, n], [n, n, n]], &taken).is_err() {
                            thread::yield_now();
                        }
                    }
                })
            };
            let mut receiver = Receiver::<_, 2>::new(slots(&memory));
            while receiver.received() < 2 {
                let n = receiver.received() as u32;
                match receiver.receive() {
                    Some(message) => {
                        assert_eq!(message, [[n; 3]; 2]);
                        receiver.release(&taken);
                    }
                    None => thread::yield_now(),
                }
            }
            writer.join().unwrap();
        });
    }
}
