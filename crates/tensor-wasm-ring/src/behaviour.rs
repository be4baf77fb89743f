//! What an actor does: its handler, and the windows that a handler is given: its state, a message, an outbox.
//!
//! A handler sees nothing else, so the same messages in the same order give the same state and the same answers on
//! every device. It fills in what a message says and to whom; who sent it, and when, is for the lane to say.

use std::time::{Duration, Instant};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::builtin::Builtin;
use crate::layout::Address;
use crate::message::{Message, Payload, TrapKind};

/// Messages that a handler may send for one that it handles.
pub const OUTBOX_MAX: usize = 4;

/// What the actors of an executor do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    Builtin(Builtin),
}

impl Behaviour {
    pub fn name(self) -> &'static str {
        match self {
            Behaviour::Builtin(builtin) => builtin.name(),
        }
    }

    pub(crate) fn named(name: &str) -> Option<Behaviour> {
        Builtin::ALL.into_iter().find(|own| own.name() == name).map(Behaviour::Builtin)
    }

    /// State that one actor needs at least.
    pub(crate) fn state_bytes_min(self) -> u32 {
        match self {
            Behaviour::Builtin(builtin) => builtin.state_bytes_min(),
        }
    }

    /// What runs it on a CPU.
    pub(crate) fn handler(self) -> Handler {
        match self {
            Behaviour::Builtin(builtin) => builtin.handler(),
        }
    }
}

/// A handler in Rust.
pub(crate) type Handler = fn(&mut Call<'_>) -> Result<(), Failure>;

/// A message that is being handled.
pub(crate) struct Call<'c> {
    pub state: &'c mut [u8],
    pub message: &'c Message,
    pub outbox: &'c mut Outbox,
    pub deadline: HandlerDeadline,
}

/// Why a handler did not do what it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// It knows no such messages. The message goes back, and nothing else happens.
    Refused,
    /// It failed: the actor is faulted.
    Trap { kind: TrapKind, site: u32, offset: u64 },
}

impl Failure {
    /// A trap of a native handler, which has no sites.
    pub(crate) fn trap(kind: TrapKind) -> Failure {
        Failure::Trap { kind, site: 0, offset: 0 }
    }
}

/// Until when a handler may take. One that loops asks; of one that does not, it is found out afterwards.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandlerDeadline {
    pub began: Instant,
    pub limit: Duration,
}

impl HandlerDeadline {
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.began.elapsed() > self.limit { Err(Failure::trap(TrapKind::Deadline)) } else { Ok(()) }
    }
}

/// The window that a handler writes its messages to.
#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Outbox {
    pub count: u32,
    pub spare: [u32; 3],
    pub messages: [Message; OUTBOX_MAX],
}

const _: () = assert!(size_of::<Outbox>() == 16 + OUTBOX_MAX * 96);

impl Outbox {
    pub(crate) fn new() -> Outbox {
        Outbox { count: 0, spare: [0; 3], messages: [Message::EMPTY; OUTBOX_MAX] }
    }

    /// What the handler said that it sent; none if that is more than there is room for.
    pub(crate) fn sent(&self) -> Option<&[Message]> {
        self.messages.get(..usize::try_from(self.count).ok()?)
    }

    /// Answers whoever sent the message.
    pub(crate) fn reply<P: Payload>(&mut self, payload: &P) {
        self.send(Address(0), payload);
    }

    pub(crate) fn send<P: Payload>(&mut self, to: Address, payload: &P) {
        self.put(Message::to(to, payload));
    }

    /// One more; beyond the last it is counted, which is a trap.
    pub(crate) fn put(&mut self, message: Message) {
        if let Some(place) = self.messages.get_mut(self.count as usize) {
            *place = message;
        }
        self.count += 1;
    }
}
