//! Taking replies out of the rings and handing each to the port that it is for. Whoever waits for an answer does that
//! for a moment itself, for everybody; for those who have parked, a thread of the runtime does.
//!
//! That thread also notices lanes that are gone, and restarts actors that have faulted as often as they may.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tensor_wasm_gpu::Bell;

use crate::clock;
use crate::error::ActorError;
use crate::layout::Address;
use crate::message::{CONTROL, Control, FAULT, Message, Reason};
use crate::runtime::Inner;
use crate::runtime::executor::ExecutorShared;
use crate::sync::Ordering;
use crate::wait::{POLL_PERIOD, SUPERVISION_PERIOD};

/// Letters that are kept for whoever asks; of more, the oldest go, and are counted.
pub const DEAD_LETTERS_MAX: usize = 4096;

/// Replies that are taken from one lane before its word is written.
const BATCH: usize = 64;

/// Batches that somebody takes before it looks whether its own answer was among them.
const BATCHES_MAX: usize = 16;

/// Messages that came back and whose sender is not there to be told.
#[derive(Default)]
pub(super) struct DeadLetterBox {
    letters: VecDeque<Message>,
    /// All that ever came back, to ports too.
    pub total: u64,
}

impl DeadLetterBox {
    fn put(&mut self, letter: Message) {
        if self.letters.len() == DEAD_LETTERS_MAX {
            self.letters.pop_front();
        }
        self.letters.push_back(letter);
    }

    pub(super) fn take(&mut self) -> Vec<Message> {
        self.letters.drain(..).collect()
    }
}

/// Says that somebody waits for replies who does not look.
pub(super) struct Waiting(Arc<Inner>);

impl Waiting {
    pub(super) fn new(inner: &Arc<Inner>) -> Waiting {
        if inner.waiters.fetch_add(1, Ordering::SeqCst) == 0
            && let Some(thread) = inner.thread.get()
        {
            thread.unpark();
        }
        Waiting(inner.clone())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Inner {
    /// Takes what a lane has replied, unless somebody else is doing so.
    pub(super) fn drain(&self, executor: &ExecutorShared, lane: usize) {
        let link = &executor.lanes[lane];
        let Some(mut replies) = link.replies.try_lock() else { return };
        if !replies.is_ready() {
            return;
        }
        let (ports, wall) = (self.ports.read(), clock::wall());
        for _ in 0..BATCHES_MAX {
            let mut taken = 0;
            while taken < BATCH
                && let Some(chunks) = replies.receive()
            {
                taken += 1;
                let message: Message = zerocopy::transmute!(chunks);
                let to = Address(message.to);
                if message.has(FAULT) {
                    self.note_fault(&message);
                }
                let unread = match ports.get(&to.index()).filter(|_| to.is_host()) {
                    Some(port) => port.deliver(message, wall),
                    None => Some(message),
                };
                if let Some(unread) = unread {
                    self.keep_unclaimed(unread);
                }
            }
            if taken == 0 {
                return;
            }
            replies.release(link.control.replies_taken());
            // One that waits for room looks of itself after a moment; this is sooner.
            if executor.rings && link.control.asleep().load(Ordering::Relaxed) != 0 {
                link.control.bell().ring();
            }
        }
    }

    /// A message for a port that is not there, or that nobody reads.
    pub(super) fn keep_unclaimed(&self, message: Message) {
        if message.has(FAULT) {
            self.dead.lock().put(message);
        } else if !message.has(CONTROL) {
            // The supervisor is acknowledged to port 0, which nobody has.
            self.unclaimed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn note_fault(&self, message: &Message) {
        self.dead.lock().total += 1;
        if let Some(fault) = message.fault().filter(|fault| fault.reason() == Some(Reason::Trapped)) {
            self.faulted.lock().push(Address(fault.to));
        }
    }

    pub(super) fn drain_all(&self) {
        let executors = self.executors.read();
        for executor in executors.iter() {
            (0..executor.lanes.len()).for_each(|lane| self.drain(executor, lane));
        }
    }

    fn has_replies(&self) -> bool {
        let is_ready = |executor: &Arc<ExecutorShared>| {
            executor.lanes.iter().any(|lane| lane.replies.try_lock().is_some_and(|replies| replies.is_ready()))
        };
        self.executors.read().iter().any(is_ready)
    }

    /// Whether there is an executor, and whether one cannot ring.
    fn needs(&self) -> (bool, bool) {
        let executors = self.executors.read();
        (!executors.is_empty(), executors.iter().any(|executor| !executor.rings))
    }

    fn supervise(&self) {
        let executors = self.executors.read().clone();
        for executor in &executors {
            if executor.look_whether_gone(self) {
                self.ports.read().values().for_each(|port| port.wake_all());
            }
        }
        let faulted = std::mem::take(&mut *self.faulted.lock());
        for address in faulted {
            let Some(executor) = executors.iter().find(|own| own.shape().executor == address.executor()) else {
                continue;
            };
            if !executor.may_restart(address.index()) {
                continue;
            }
            let restart = Message { to: address.0, kind: Control::Restart as u16, flags: CONTROL, ..Message::EMPTY };
            let restart = Message { id: u64::from(Address::port(0).0) << 32, ..restart };
            if let Err(ActorError::Full { .. }) = executor.enqueue(&restart) {
                self.faulted.lock().push(address);
            } else {
                executor.has_restarted(address.index());
            }
        }
    }
}

pub(super) fn start(inner: &Arc<Inner>) -> Result<JoinHandle<()>, ActorError> {
    let weak = Arc::downgrade(inner);
    let spawned = std::thread::Builder::new().name("actors".to_owned()).spawn(move || run(&weak));
    let thread = spawned.map_err(|e| ActorError::Device { why: format!("no thread can be started: {e}") })?;
    let _ = inner.thread.set(thread.thread().clone());
    Ok(thread)
}

fn run(weak: &Weak<Inner>) {
    let mut supervised = Instant::now();
    while let Some(inner) = weak.upgrade() {
        if inner.is_closed.load(Ordering::Acquire) {
            return;
        }
        inner.drain_all();
        if supervised.elapsed() >= SUPERVISION_PERIOD {
            inner.supervise();
            supervised = Instant::now();
        }
        let (is_any, must_poll) = inner.needs();
        if inner.waiters.load(Ordering::SeqCst) > 0 {
            let bell = inner.lease.lock().bell.clone();
            let limit: Duration = if must_poll { POLL_PERIOD } else { SUPERVISION_PERIOD };
            let is_ready = || inner.has_replies() || inner.is_closed.load(Ordering::Acquire);
            Bell::of(&bell[0]).park_unless(is_ready, Some(limit));
        } else {
            drop(inner);
            // Who launches, waits or closes unparks it.
            if is_any {
                std::thread::park_timeout(SUPERVISION_PERIOD);
            } else {
                std::thread::park();
            }
        }
    }
}
