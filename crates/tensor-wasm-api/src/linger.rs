//! Staying awake for a moment after an answer.
//!
//! A client that sends its next request as soon as it has the last answer does so within some tens of microseconds.
//! Waking a sleeping thread takes about as long on a virtual machine, and the caches are cold then. So a serving thread
//! looks for the next request without sleeping, but only while at most half the cores have a connection to serve, and
//! only as long as looking pays: with clients far away it hardly ever does, and is hardly ever tried.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// How long to look for the next request after an answer.
const LINGER: Duration = Duration::from_micros(80);

/// While it does not pay, only one answer in this many is followed by a look.
const TRIED_EVERY: u32 = 64;

/// How sure one can be that it pays.
const TRUST_MAX: u32 = 8;

thread_local! {
    static THREAD: Cell<Thread> = const { Cell::new(Thread { answered: None, trust: Trust { level: 0, answers: 0 } }) };
    /// Wakes `watch`.
    static WATCH: RefCell<Option<Waker>> = const { RefCell::new(None) };
}

#[derive(Clone, Copy)]
struct Thread {
    /// Set by an answer that is worth lingering after; taken by the request that comes.
    answered: Option<Instant>,
    trust: Trust,
}

/// Whether lingering has paid lately.
#[derive(Debug, Clone, Copy)]
struct Trust {
    level: u32,
    answers: u32,
}

impl Trust {
    fn is_worth_it(&mut self) -> bool {
        self.answers = self.answers.wrapping_add(1);
        self.level > 0 || self.answers.is_multiple_of(TRIED_EVERY)
    }

    fn learn(&mut self, paid: bool) {
        self.level = if paid { (self.level + 2).min(TRUST_MAX) } else { self.level.saturating_sub(1) };
    }
}

/// A request has arrived on this thread.
pub(crate) fn request() {
    let mut thread = THREAD.get();
    if let Some(answered) = thread.answered.take() {
        thread.trust.learn(answered.elapsed() < LINGER);
        THREAD.set(thread);
    }
}

/// A request was answered on this thread.
pub(crate) fn answer() {
    let mut thread = THREAD.get();
    if thread.trust.is_worth_it() {
        thread.answered = Some(Instant::now());
        WATCH.with_borrow_mut(|watch| watch.take().into_iter().for_each(Waker::wake));
    }
    THREAD.set(thread);
}

/// Keeps this thread's runtime looking for events while it lingers; runs for ever.
pub(crate) async fn watch() {
    loop {
        poll_fn(|cx| match THREAD.get().answered {
            Some(_) => Poll::Ready(()),
            None => {
                WATCH.set(Some(cx.waker().clone()));
                Poll::Pending
            }
        })
        .await;
        // Yielding lets everything else run, and the runtime look for events without waiting for one.
        while THREAD.get().answered.is_some_and(|answered| answered.elapsed() < LINGER) {
            tokio::task::yield_now().await;
        }
        let mut thread = THREAD.get();
        if thread.answered.take().is_some() {
            thread.trust.learn(false);
            THREAD.set(thread);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_pay_is_rarely_tried_and_what_pays_always() {
        let mut trust = Trust { level: 0, answers: 0 };
        let mut tried = 0;
        for _ in 0..6_400 {
            if trust.is_worth_it() {
                tried += 1;
                trust.learn(false);
            }
        }
        assert_eq!(tried, 100);
        while !trust.is_worth_it() {}
        trust.learn(true);
        for n in 0..1_000 {
            assert!(trust.is_worth_it());
            trust.learn(n % 3 != 0);
        }
    }
}
