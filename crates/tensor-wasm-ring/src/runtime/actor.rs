//! A handle of an actor: what it is sent, asked and told by one port.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::error::ActorError;
use crate::layout::Address;
use crate::message::{ActorState, CONTROL, Control, FAULT, Message, Payload};
use crate::runtime::Inner;
use crate::runtime::executor::ExecutorShared;
use crate::runtime::port::{Port, UNREAD_MAX};
use crate::runtime::replies::Waiting;
use crate::wait::POLL_PERIOD;

/// How long [`Actor::send`] waits for room in a mailbox: longer than a handler may take.
pub const SEND_MAX: Duration = Duration::from_secs(1);

/// How long a lane may take to acknowledge what it is told about an actor.
const CONTROL_MAX: Duration = Duration::from_secs(10);

/// An actor. Cloning it is cheap.
#[derive(Clone)]
pub struct Actor {
    inner: Arc<Inner>,
    executor: Arc<ExecutorShared>,
    index: u32,
    port: Arc<Port>,
}

/// What an actor has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActorTelemetry {
    pub state: ActorState,
    pub restarts: u32,
    pub handled: u64,
    pub sent: u64,
    pub faults: u64,
    pub busy: Duration,
    /// Most messages that waited while it was paused.
    pub held_max: u64,
}

impl Actor {
    pub(super) fn new(inner: &Arc<Inner>, executor: &Arc<ExecutorShared>, index: u32, port: &Arc<Port>) -> Actor {
        Actor { inner: inner.clone(), executor: executor.clone(), index, port: port.clone() }
    }

    /// The same actor, sent to by another port of the same runtime; others are refused when they send.
    pub fn by(&self, port: &Arc<Port>) -> Actor {
        Actor { port: port.clone(), ..self.clone() }
    }

    pub fn address(&self) -> Address {
        self.executor.address(self.index)
    }

    /// Sends a message, now or not at all. What it answers comes to the port. Returns the message's id.
    pub fn try_send<P: Payload>(&self, payload: &P) -> Result<u64, ActorError> {
        self.try_send_message(Message::to(self.address(), payload))
    }

    /// The same, waiting for room in the mailbox for [`SEND_MAX`] at most.
    pub fn send<P: Payload>(&self, payload: &P) -> Result<u64, ActorError> {
        self.send_message(Message::to(self.address(), payload))
    }

    /// Sends a message that was made by hand; who it is from and for is filled in.
    pub fn try_send_message(&self, message: Message) -> Result<u64, ActorError> {
        let message = self.sign(message)?;
        self.executor.enqueue(&message)?;
        Ok(message.id)
    }

    pub fn send_message(&self, message: Message) -> Result<u64, ActorError> {
        let message = self.sign(message)?;
        self.executor.enqueue_within(&self.inner, &message, SEND_MAX)?;
        Ok(message.id)
    }

    /// Sends several with nothing in between, or none of them.
    pub fn try_send_all(&self, messages: &mut [Message]) -> Result<(), ActorError> {
        for message in messages.iter_mut() {
            *message = self.sign(*message)?;
        }
        self.executor.enqueue_all(messages)
    }

    fn check_port(&self) -> Result<(), ActorError> {
        let is_own = Arc::ptr_eq(&self.port.inner, &self.inner);
        if is_own { Ok(()) } else { Err(ActorError::ForeignPort { port: self.port.address() }) }
    }

    fn sign(&self, message: Message) -> Result<Message, ActorError> {
        self.check_port()?;
        let unread = self.port.unread();
        if unread >= UNREAD_MAX {
            return Err(ActorError::Unread { port: self.port.address(), unread });
        }
        // What only lanes and this handle say is not the caller's to say.
        let flags = message.flags & !(CONTROL | FAULT | crate::message::REPLY);
        let mut message = Message { to: self.address().0, flags, ..message };
        self.port.shared.sign(&mut message);
        Ok(message)
    }

    /// Sends a message of which one answer is expected, and returns what waits for it.
    pub fn request<P: Payload>(&self, payload: &P) -> Result<Pending, ActorError> {
        self.request_message(Message::to(self.address(), payload))
    }

    pub fn request_message(&self, message: Message) -> Result<Pending, ActorError> {
        let message = self.sign(message)?;
        let credit = self.executor.credit(self.index)?;
        self.port.shared.expect(message.id, Some(credit));
        let pending = Pending { actor: self.clone(), id: message.id, is_over: false, waiting: None };
        self.executor.enqueue_within(&self.inner, &message, SEND_MAX)?;
        Ok(pending)
    }

    /// Sends a message and waits in this thread for the answer.
    pub fn call<P: Payload, A: Payload>(&self, payload: &P, limit: Duration) -> Result<A, ActorError> {
        let answer = self.request(payload)?.wait(limit)?;
        let bad = ActorError::BadAnswer { to: self.address(), kind: answer.kind, length: answer.length };
        answer.read().ok_or(bad)
    }

    /// Makes it active with fresh state, if it is absent or was terminated.
    pub fn activate(&self) -> Result<(), ActorError> {
        self.control(Control::Activate, ActorState::Active)
    }

    /// Has messages wait from here on.
    pub fn pause(&self) -> Result<(), ActorError> {
        self.control(Control::Pause, ActorState::Paused)
    }

    /// Has messages handled again, first those that waited.
    pub fn resume(&self) -> Result<(), ActorError> {
        self.control(Control::Resume, ActorState::Active)
    }

    /// Ends it: what waits, and whatever comes later, goes back.
    pub fn terminate(&self) -> Result<(), ActorError> {
        self.control(Control::Terminate, ActorState::Terminated)
    }

    /// Makes it active again with fresh state after a fault.
    pub fn restart(&self) -> Result<(), ActorError> {
        self.control(Control::Restart, ActorState::Active)
    }

    /// Has its lane say how it is, behind all messages that this port has sent it.
    pub fn ping(&self) -> Result<ActorState, ActorError> {
        self.acknowledged(Control::Ping)
    }

    fn control(&self, what: Control, wanted: ActorState) -> Result<(), ActorError> {
        let found = self.acknowledged(what)?;
        let to = self.address();
        if found == wanted { Ok(()) } else { Err(ActorError::BadState { to, wanted, found }) }
    }

    fn acknowledged(&self, what: Control) -> Result<ActorState, ActorError> {
        let answer = self.ask(what, CONTROL_MAX)?;
        let state = answer.payload().and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
        let bad = ActorError::BadAnswer { to: self.address(), kind: answer.kind, length: answer.length };
        state.and_then(ActorState::of).ok_or(bad)
    }

    /// Tells its lane something, and waits for the acknowledgement.
    pub(super) fn ask(&self, what: Control, limit: Duration) -> Result<Message, ActorError> {
        self.check_port()?;
        let mut message = Message { to: self.address().0, kind: what as u16, flags: CONTROL, ..Message::EMPTY };
        let id = self.port.shared.sign(&mut message);
        self.port.shared.expect(id, None);
        let pending = Pending { actor: self.clone(), id, is_over: false, waiting: None };
        self.executor.enqueue_within(&self.inner, &message, limit)?;
        pending.wait(limit)
    }

    /// How it is, by a plain read of what its lane wrote last.
    pub fn status(&self) -> ActorState {
        let number = self.executor.telemetry(self.index).map_or(0, |block| block.state());
        ActorState::of(number).unwrap_or(ActorState::Absent)
    }

    /// Waits until it is in a state.
    pub fn wait_for_status(&self, wanted: ActorState, limit: Duration) -> Result<(), ActorError> {
        let began = Instant::now();
        while self.status() != wanted {
            self.executor.check_there()?;
            if began.elapsed() > limit {
                return Err(ActorError::BadState { to: self.address(), wanted, found: self.status() });
            }
            std::thread::park_timeout(POLL_PERIOD);
        }
        Ok(())
    }

    pub fn telemetry(&self) -> Option<ActorTelemetry> {
        let block = self.executor.telemetry(self.index)?.load();
        Some(ActorTelemetry {
            state: ActorState::of(block.state)?,
            restarts: block.restarts,
            handled: block.handled,
            sent: block.sent,
            faults: block.faults,
            busy: Duration::from_nanos(block.busy_ns),
            held_max: block.queue_depth_max,
        })
    }
}

/// A call that has not been answered. Wait for it or await it; dropped, the answer is the port's to receive.
#[must_use = "dropped, nobody waits for the answer"]
pub struct Pending {
    actor: Actor,
    id: u64,
    is_over: bool,
    /// While it is awaited.
    waiting: Option<Waiting>,
}

impl Pending {
    /// Waits in this thread: for a moment looking, then parked.
    pub fn wait(mut self, limit: Duration) -> Result<Message, ActorError> {
        let Actor { inner, executor, index, port } = &self.actor;
        let lane = executor.lane_of(*index);
        let look = || inner.drain(executor, lane);
        let is_gone = || executor.check_there().is_err();
        let answer = port.shared.wait_for_answer(inner, self.id, limit, look, is_gone);
        let (to, torn) = (self.actor.address(), executor.torn(lane));
        let Some(answer) = answer else {
            executor.check_there()?;
            let lane = u32::try_from(lane).unwrap_or(u32::MAX);
            return Err(match torn {
                Some(position) => ActorError::Torn { lane, position },
                None => ActorError::Timeout { to, after: limit },
            });
        };
        self.is_over = true;
        settle(answer)
    }
}

/// An answer that tells of a fault is an error.
fn settle(answer: Message) -> Result<Message, ActorError> {
    match answer.fault() {
        Some(fault) => Err(ActorError::of(&fault)),
        None if answer.has(FAULT) => Err(ActorError::Malformed { to: answer.sender() }),
        None => Ok(answer),
    }
}

impl Future for Pending {
    type Output = Result<Message, ActorError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let own = &mut *self;
        let Actor { inner, executor, index, port } = &own.actor;
        own.waiting.get_or_insert_with(|| Waiting::new(inner));
        inner.drain(executor, executor.lane_of(*index));
        if let Some(answer) = port.shared.answer(own.id, Some(cx.waker())) {
            own.is_over = true;
            own.waiting = None;
            return Poll::Ready(settle(answer));
        }
        if let Err(gone) = executor.check_there() {
            return Poll::Ready(Err(gone));
        }
        Poll::Pending
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.is_over {
            self.actor.port.shared.give_up(self.id);
        }
    }
}
