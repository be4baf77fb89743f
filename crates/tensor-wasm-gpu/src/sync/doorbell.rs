//! A doorbell: a word of shared memory and a futex, to wake a thread of this or another process that has parked.
//!
//! Who parks says so in the word, looks once more for work, and only then waits on the futex. Who rings makes work
//! visible and then looks whether anybody is parked. Both orders are sequentially consistent, so one of the two sees
//! the other: no wake-up is lost, and ringing for somebody who is awake costs one load.

use std::time::Duration;

use crate::sync::{AtomicU32, AtomicU64, Ordering};

const AWAKE: u32 = 0;
const PARKED: u32 = 1;

/// A doorbell's word, of 32 bits or of 64. All that this process does to a word it does at the word's own size; the
/// operating system looks at half of a large one, the half that holds the value.
pub(crate) trait BellWord {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    fn swap(&self, value: u32, order: Ordering) -> u32;
    #[cfg(not(loom))]
    fn futex(&self) -> &AtomicU32;
}

impl BellWord for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }

    fn store(&self, value: u32, order: Ordering) {
        AtomicU32::store(self, value, order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        AtomicU32::swap(self, value, order)
    }

    #[cfg(not(loom))]
    fn futex(&self) -> &AtomicU32 {
        self
    }
}

impl BellWord for AtomicU64 {
    fn load(&self, order: Ordering) -> u32 {
        // What is not a value of ours is nobody who is parked.
        u32::try_from(AtomicU64::load(self, order)).unwrap_or(AWAKE)
    }

    fn store(&self, value: u32, order: Ordering) {
        AtomicU64::store(self, u64::from(value), order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        u32::try_from(AtomicU64::swap(self, u64::from(value), order)).unwrap_or(AWAKE)
    }

    #[cfg(not(loom))]
    fn futex(&self) -> &AtomicU32 {
        const { assert!(cfg!(target_endian = "little"), "the low half of a word comes first") }
        // SAFETY: the first half of a word that lives as long as `self`, aligned for it. Nothing is read or written
        // through this reference but by the operating system, which sees memory, not types.
        unsafe { &*std::ptr::from_ref(self).cast::<AtomicU32>() }
    }
}

pub(crate) struct Doorbell<'a, W = AtomicU32>(pub &'a W);

impl<W: BellWord> Doorbell<'_, W> {
    /// Wakes who is parked, if anybody is. What it is woken for must have been published before.
    pub(crate) fn ring(&self) {
        fence();
        if self.0.load(Ordering::Relaxed) == PARKED && self.0.swap(AWAKE, Ordering::SeqCst) == PARKED {
            futex::wake(self.0);
        }
    }

    /// Parks until rung, unless `ready` says that there is something to do already. May return early. With a limit, no
    /// longer than that.
    pub(crate) fn park_unless(&self, ready: impl Fn() -> bool, limit: Option<Duration>) {
        self.0.store(PARKED, Ordering::SeqCst);
        fence();
        if !ready() {
            futex::wait(self.0, PARKED, limit);
        }
        self.0.store(AWAKE, Ordering::SeqCst);
    }
}

fn fence() {
    #[cfg(not(loom))]
    std::sync::atomic::fence(Ordering::SeqCst);
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(not(loom))]
mod futex {
    use std::time::Duration;

    use rustix::thread::futex as os;

    use super::BellWord;

    // Not the private kind: the other side may be another process.
    pub(super) fn wait(word: &impl BellWord, expected: u32, limit: Option<Duration>) {
        let limit = limit.and_then(|limit| rustix::time::Timespec::try_from(limit).ok());
        // Every reason to return (rung, changed already, interrupted, timed out) means the same: look again.
        let _ = os::wait(word.futex(), os::Flags::empty(), expected, limit.as_ref());
    }

    pub(super) fn wake(word: &impl BellWord) {
        let _ = os::wake(word.futex(), os::Flags::empty(), 1);
    }
}

/// A futex for the model checker: it may wake for no reason, which is allowed, and yields instead of waiting.
#[cfg(loom)]
mod futex {
    use std::time::Duration;

    use super::BellWord;
    use crate::sync::Ordering;

    pub(super) fn wait(word: &impl BellWord, expected: u32, _limit: Option<Duration>) {
        while word.load(Ordering::SeqCst) == expected {
            loom::thread::yield_now();
        }
    }

    pub(super) fn wake(_word: &impl BellWord) {}
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    use super::*;

    #[test]
    fn who_is_parked_is_woken_and_nobody_parks_on_work() {
        check(&AtomicU32::new(0));
        check(&AtomicU64::new(0));
    }

    fn check<W: BellWord + Sync>(word: &W) {
        let work = AtomicBool::new(false);
        let bell = Doorbell(word);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::park_timeout(Duration::from_millis(20));
                work.store(true, Ordering::Release);
                bell.ring();
            });
            let started = Instant::now();
            while !work.load(Ordering::Acquire) {
                bell.park_unless(|| work.load(Ordering::Acquire), Some(Duration::from_secs(30)));
            }
            assert!(started.elapsed() < Duration::from_secs(10));
        });
        let started = Instant::now();
        bell.park_unless(|| true, None);
        assert!(started.elapsed() < Duration::from_secs(1));
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// A lost wake-up would leave a thread parked for ever, which the checker reports.
    #[test]
    fn no_wake_up_is_lost() {
        loom::model(|| {
            let word = Arc::new(AtomicU32::new(0));
            let work = Arc::new(AtomicU32::new(0));
            let waker = {
                let (word, work) = (word.clone(), work.clone());
                thread::spawn(move || {
                    work.store(1, Ordering::Release);
                    Doorbell(&*word).ring();
                })
            };
            while work.load(Ordering::Acquire) == 0 {
                Doorbell(&*word).park_unless(|| work.load(Ordering::Acquire) == 1, None);
            }
            waker.join().unwrap();
        });
    }
}
