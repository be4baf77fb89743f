//! Who waits for what: the wakers between the flag that says a job is done and the task that awaits it.
//!
//! Whoever waits registers its waker and then looks at the flag once more; the completion thread takes note of how much
//! news there is, wakes everybody whose flag is set, and parks only if there is no more news than that and no flag of a
//! waiter is set. So whichever comes last, the flag or the waker, somebody sees both.

use std::task::Waker;

use crate::sync::doorbell::Doorbell;
use crate::sync::{AtomicU64, Mutex, Ordering};

#[derive(Default)]
pub(crate) struct Waiters {
    list: Mutex<Vec<Waiter>>,
    /// Counts what the completion thread is woken for, so that it sees what came while it was about to park.
    news: AtomicU64,
}

pub(crate) struct Waiter {
    pub stream: usize,
    pub number: u32,
    pub waker: Waker,
}

/// How much news the completion thread has seen before it parks.
pub(crate) struct NewsSeen(u64);

impl Waiters {
    /// Has somebody woken once its job is over, or at once if it is.
    pub(crate) fn register(&self, waiter: Waiter, is_over: impl Fn(usize, u32) -> bool, bell: Doorbell<'_>) {
        let (stream, number) = (waiter.stream, waiter.number);
        self.list.lock().push(waiter);
        self.news.fetch_add(1, Ordering::SeqCst);
        if is_over(stream, number) {
            self.wake(is_over);
        } else {
            bell.ring();
        }
    }

    /// Tells the completion thread to look again.
    pub(crate) fn tell(&self, bell: Doorbell<'_>) {
        self.news.fetch_add(1, Ordering::SeqCst);
        bell.ring();
    }

    pub(crate) fn look(&self) -> NewsSeen {
        NewsSeen(self.news.load(Ordering::SeqCst))
    }

    /// Whether there is a reason not to park after what was seen.
    pub(crate) fn has_news(&self, seen: &NewsSeen, is_over: impl Fn(usize, u32) -> bool) -> bool {
        self.news.load(Ordering::SeqCst) != seen.0 || self.list.lock().iter().any(|w| is_over(w.stream, w.number))
    }

    /// Wakes everybody whose job is over. Returns whether there was anybody, and whether anybody is left.
    pub(crate) fn wake(&self, is_over: impl Fn(usize, u32) -> bool) -> (bool, bool) {
        let mut over = Vec::new();
        let is_left = {
            let mut list = self.list.lock();
            over.extend(list.extract_if(.., |w| is_over(w.stream, w.number)));
            !list.is_empty()
        };
        let is_woken = !over.is_empty();
        // Outside the lock: who is woken may run at once, and register again.
        over.into_iter().for_each(|waiter| waiter.waker.wake());
        (is_woken, is_left)
    }

    /// What is waited for.
    pub(crate) fn wanted(&self) -> Vec<(usize, u32)> {
        self.list.lock().iter().map(|w| (w.stream, w.number)).collect()
    }
}

#[cfg(all(test, loom))]
mod model {
    use std::task::Wake;

    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sync::AtomicU32;

    /// Somebody who waits. Woken, it lets the completion thread of this model end.
    struct Woken(AtomicU32, Arc<AtomicU32>);

    impl Wake for Woken {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.store(1, Ordering::Release);
            Doorbell(&*self.1).ring();
        }
    }

    /// A device that sets a flag and rings, a completion thread, and somebody who waits: in every order it is woken,
    /// and the completion thread never parks with nobody left to wake it.
    #[test]
    fn a_waiter_is_woken_in_every_order() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let waiters = Arc::new(Waiters::default());
            let (flag, bell) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
            let woken = std::sync::Arc::new(Woken(AtomicU32::new(0), bell.clone()));
            let device = {
                let (flag, bell) = (flag.clone(), bell.clone());
                thread::spawn(move || {
                    flag.store(1, Ordering::Release);
                    Doorbell(&*bell).ring();
                })
            };
            let completions = {
                let (waiters, flag, bell, woken) = (waiters.clone(), flag.clone(), bell.clone(), woken.clone());
                thread::spawn(move || {
                    let is_over = |_: usize, number: u32| flag.load(Ordering::Acquire) >= number;
                    while woken.0.load(Ordering::Acquire) == 0 {
                        let seen = waiters.look();
                        waiters.wake(is_over);
                        let is_news = || waiters.has_news(&seen, is_over) || woken.0.load(Ordering::Acquire) == 1;
                        Doorbell(&*bell).park_unless(is_news, None);
                    }
                })
            };
            let waker = Waker::from(woken.clone());
            let is_over = |_: usize, number: u32| flag.load(Ordering::Acquire) >= number;
            waiters.register(Waiter { stream: 0, number: 1, waker }, is_over, Doorbell(&*bell));
            device.join().unwrap();
            completions.join().unwrap();
            assert_eq!(woken.0.load(Ordering::Acquire), 1);
        });
    }
}
