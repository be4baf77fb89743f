//! A doorbell: a word of shared memory and a futex, to wake a thread of this or another process that has parked.
//!
//! Who parks says so in the word, looks once more for work, and only then waits on the futex. Who rings makes work
//! visible and then looks whether anybody is parked. Both orders are sequentially consistent, so one of the two sees
//! the other: no wake-up is lost, and ringing for somebody who is awake costs one load.

use std::time::Duration;

use crate::sync::{AtomicU32, Ordering};

const AWAKE: u32 = 0;
const PARKED: u32 = 1;

#[derive(Clone, Copy)]
pub(crate) struct Doorbell<'a>(pub &'a AtomicU32);

impl Doorbell<'_> {
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
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use rustix::thread::futex as os;

    // Not the private kind: the other side may be another process.
    pub(super) fn wait(word: &AtomicU32, expected: u32, limit: Option<Duration>) {
        let limit = limit.and_then(|limit| rustix::time::Timespec::try_from(limit).ok());
        // Every reason to return (rung, changed already, interrupted, timed out) means the same: look again.
        let _ = os::wait(word, os::Flags::empty(), expected, limit.as_ref());
    }

    pub(super) fn wake(word: &AtomicU32) {
        let _ = os::wake(word, os::Flags::empty(), 1);
    }
}

/// A futex for the model checker: it may wake for no reason, which is allowed, and yields instead of waiting.
#[cfg(loom)]
mod futex {
    use std::time::Duration;

    use crate::sync::{AtomicU32, Ordering};

    pub(super) fn wait(word: &AtomicU32, expected: u32, _limit: Option<Duration>) {
        while word.load(Ordering::SeqCst) == expected {
            loom::thread::yield_now();
        }
    }

    pub(super) fn wake(_word: &AtomicU32) {}
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    use super::*;

    #[test]
    fn who_is_parked_is_woken_and_nobody_parks_on_work() {
        let (word, work) = (AtomicU32::new(0), AtomicBool::new(false));
        let bell = Doorbell(&word);
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
                    Doorbell(&word).ring();
                })
            };
            while work.load(Ordering::Acquire) == 0 {
                Doorbell(&word).park_unless(|| work.load(Ordering::Acquire) == 1, None);
            }
            waker.join().unwrap();
        });
    }
}
