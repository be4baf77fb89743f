//! Ports: who sends to actors and receives from them. A port has a queue of messages that came for it, and a table of
//! calls of which somebody waits for the answer.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::clock::{self, HybridClock};
use crate::error::ActorError;
use crate::layout::{ACTORS_MAX, Address};
use crate::message::{Message, REPLY};
use crate::runtime::Inner;
use crate::runtime::executor::Credit;
use crate::runtime::replies::Waiting;
use crate::sync::Ordering;
use crate::wait::{ANSWER_SPIN, SUPERVISION_PERIOD, Spin};

/// A port with so many messages unread sends nothing more: 6 MiB.
pub const UNREAD_MAX: usize = 1 << 16;

/// Ports at once: what an address has bits for, but for the one of dead letters.
const PORTS_MAX: usize = ACTORS_MAX as usize - 1;

/// Sends to actors and receives from them. Closed when dropped; what comes for it later is counted. Messages that
/// several threads send by one port at once have no order among each other.
pub struct Port {
    pub(super) shared: Arc<PortShared>,
    pub(super) inner: Arc<Inner>,
}

pub(crate) struct PortShared {
    pub(super) address: Address,
    is_read: bool,
    sequence: AtomicU32,
    clock: Mutex<HybridClock>,
    state: Mutex<PortState>,
    arrived: Condvar,
}

#[derive(Default)]
struct PortState {
    unread: VecDeque<Message>,
    calls: HashMap<u64, CallSlot, foldhash::fast::FixedState>,
    /// Threads that have parked.
    parked: usize,
}

struct CallSlot {
    answer: Option<Message>,
    waker: Option<Waker>,
    _credit: Option<Credit>,
}

impl Inner {
    /// `is_read` is whether anybody can read what comes for it and was not waited for.
    pub(super) fn open_port(inner: &Arc<Inner>, is_read: bool) -> Result<Port, ActorError> {
        let mut ports = inner.ports.write();
        if ports.len() >= PORTS_MAX {
            return Err(ActorError::TooMany { what: "ports", max: PORTS_MAX });
        }
        // Numbers come round only after all others, so that a late answer finds nobody rather than somebody else.
        let number = loop {
            let next = inner.last_port.fetch_add(1, Ordering::Relaxed) % PORTS_MAX as u64 + 1;
            let number = u32::try_from(next).unwrap_or(u32::MAX);
            if !ports.contains_key(&number) {
                break number;
            }
        };
        let shared = Arc::new(PortShared {
            address: Address::port(number),
            is_read,
            sequence: AtomicU32::new(0),
            clock: Mutex::default(),
            state: Mutex::default(),
            arrived: Condvar::new(),
        });
        ports.insert(number, shared.clone());
        Ok(Port { shared, inner: inner.clone() })
    }
}

impl Port {
    pub fn address(&self) -> Address {
        self.shared.address
    }

    /// The next message that came for it, if there is one now.
    pub fn try_receive(&self) -> Option<Message> {
        if let Some(message) = self.shared.pop() {
            return Some(message);
        }
        self.inner.drain_all();
        self.shared.pop()
    }

    /// Moves all that came for it to the end of a list. Returns how many.
    pub fn receive_all(&self, into: &mut Vec<Message>) -> usize {
        self.inner.drain_all();
        let mut state = self.shared.state.lock();
        let before = into.len();
        into.extend(state.unread.drain(..));
        into.len() - before
    }

    /// The next message that comes for it; none if none has come for so long.
    pub fn receive(&self, limit: Duration) -> Option<Message> {
        self.shared.wait(&self.inner, limit, || self.try_receive(), |state| state.unread.pop_front())
    }

    pub fn unread(&self) -> usize {
        self.shared.unread()
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.inner.ports.write().remove(&self.shared.address.index());
        // What is there goes where it would have gone if it had come now.
        let unread = std::mem::take(&mut self.shared.state.lock().unread);
        unread.into_iter().for_each(|message| self.inner.keep_unclaimed(message));
    }
}

impl PortShared {
    /// Gives a message its sender, number and time. Returns its id.
    pub(super) fn sign(&self, message: &mut Message) -> u64 {
        let number = self.sequence.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        message.id = u64::from(self.address.0) << 32 | u64::from(number);
        message.clock = self.clock.lock().tick(clock::wall());
        message.id
    }

    fn pop(&self) -> Option<Message> {
        self.state.lock().unread.pop_front()
    }

    pub(super) fn unread(&self) -> usize {
        self.state.lock().unread.len()
    }

    pub(super) fn expect(&self, id: u64, credit: Option<Credit>) {
        self.state.lock().calls.insert(id, CallSlot { answer: None, waker: None, _credit: credit });
    }

    /// Takes the answer of a call, if it has come, or leaves a waker for when it does.
    pub(super) fn answer(&self, id: u64, waker: Option<&Waker>) -> Option<Message> {
        take_answer(&mut self.state.lock(), id, waker)
    }

    /// Waits no more: an answer that comes is a message like others.
    pub(super) fn give_up(&self, id: u64) {
        let given_up = self.state.lock().calls.remove(&id);
        drop(given_up);
    }

    pub(super) fn wait_for_answer(
        &self,
        inner: &Arc<Inner>,
        id: u64,
        limit: Duration,
        look: impl Fn(),
        is_gone: impl Fn() -> bool,
    ) -> Option<Message> {
        let looked = || {
            look();
            self.answer(id, None).map(Some)
        };
        let until = |state: &mut PortState| match take_answer(state, id, None) {
            None => is_gone().then_some(None),
            answer => Some(answer),
        };
        self.wait(inner, limit, looked, until).flatten()
    }

    /// Looks for something for a moment, and then parks until it is there or the time is up.
    fn wait<T>(
        &self,
        inner: &Arc<Inner>,
        limit: Duration,
        look: impl Fn() -> Option<T>,
        mut until: impl FnMut(&mut PortState) -> Option<T>,
    ) -> Option<T> {
        let mut spin = Spin::new(ANSWER_SPIN.min(limit));
        loop {
            if let Some(found) = look() {
                return Some(found);
            }
            if !spin.pause() {
                break;
            }
        }
        let _waiting = Waiting::new(inner);
        // Whoever comes later is seen by the runtime's thread.
        if let Some(found) = look() {
            return Some(found);
        }
        // None is later than anybody waits.
        let deadline = Instant::now().checked_add(limit.saturating_sub(ANSWER_SPIN));
        let mut state = self.state.lock();
        state.parked += 1;
        let found = loop {
            if let Some(found) = until(&mut state) {
                break Some(found);
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                break None;
            }
            // What it waits for may be gone, which nothing announces but the runtime's thread.
            let look_again = now + 10 * SUPERVISION_PERIOD;
            self.arrived.wait_until(&mut state, deadline.map_or(look_again, |deadline| deadline.min(look_again)));
        };
        state.parked -= 1;
        found
    }

    /// A message has come. It is returned if nobody will read it here, or if actors have sent more of their own accord
    /// than is kept; answers are as many as the port has sent messages, which is bounded where it sends.
    pub(super) fn deliver(&self, message: Message, wall: Duration) -> Option<Message> {
        self.clock.lock().observe(message.clock, wall);
        let mut state = self.state.lock();
        let called = if message.has(REPLY) { state.calls.get_mut(&message.about) } else { None };
        let mut returned = None;
        let waker = match called {
            Some(call) => {
                call.answer = Some(message);
                call.waker.take()
            }
            None => {
                let is_too_much = !message.has(REPLY) && state.unread.len() >= UNREAD_MAX;
                if self.is_read && !is_too_much {
                    state.unread.push_back(message);
                } else {
                    returned = Some(message);
                }
                None
            }
        };
        if state.parked > 0 {
            self.arrived.notify_all();
        }
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        returned
    }

    /// Has everybody look whether what they wait for can still come.
    pub(super) fn wake_all(&self) {
        let mut state = self.state.lock();
        let wakers: Vec<Waker> = state.calls.values_mut().filter_map(|call| call.waker.take()).collect();
        self.arrived.notify_all();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

fn take_answer(state: &mut PortState, id: u64, waker: Option<&Waker>) -> Option<Message> {
    let call = state.calls.get_mut(&id)?;
    match call.answer.take() {
        Some(answer) => {
            state.calls.remove(&id);
            Some(answer)
        }
        None => {
            if let Some(waker) = waker {
                call.waker = Some(waker.clone());
            }
            None
        }
    }
}
