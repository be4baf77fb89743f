//! Messages: a header and up to 64 bytes of payload, plain data of 96 bytes that host and lanes read in place. What a
//! slot of a ring adds to that is in `ring.rs`.
//!
//! Any 96 bytes are a message as far as memory is concerned; whether they make sense is asked by whoever reads them
//! ([`Message::payload`], [`Message::read`]).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::layout::{Address, PAYLOAD_BYTES_MAX};

/// It answers the message whose id is in `about`.
pub const REPLY: u8 = 1;
/// Its payload says where the bytes are.
pub const REFERENCE: u8 = 2;
/// It came back, or what it answers failed; its payload is an [`ActorFault`].
pub const FAULT: u8 = 4;
/// It is for the lane, about an actor.
pub const CONTROL: u8 = 8;
/// It may be handled before others that came first; a lane need not.
pub const URGENT: u8 = 16;

/// A message as it lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Message {
    /// The sender's address << 32 | a number that the sender counts up.
    pub id: u64,
    /// Of a reply: the id of what it answers. Of another: until when it is of use, in nanoseconds since the epoch; 0
    /// for ever.
    pub about: u64,
    /// When it was sent, by the sender's hybrid logical clock.
    pub clock: u64,
    pub to: u32,
    pub kind: u16,
    pub flags: u8,
    /// Bytes of payload.
    pub length: u8,
    pub payload: [u8; PAYLOAD_BYTES_MAX],
}

impl Message {
    pub const EMPTY: Message =
        Message { id: 0, about: 0, clock: 0, to: 0, kind: 0, flags: 0, length: 0, payload: [0; PAYLOAD_BYTES_MAX] };

    /// A message to somebody; who sends it, and when, is filled in on the way.
    pub fn to<P: Payload>(to: Address, payload: &P) -> Message {
        let () = P::FITS;
        let mut message = Message { to: to.0, kind: P::KIND, ..Message::EMPTY };
        message.set(payload);
        message
    }

    /// Who sent it.
    pub fn sender(&self) -> Address {
        Address(u32::try_from(self.id >> 32).unwrap_or(0))
    }

    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Its payload as bytes; none if its length is none that a message has.
    pub fn payload(&self) -> Option<&[u8]> {
        self.payload.get(..usize::from(self.length))
    }

    /// Its payload as a type, in place; none if it is of another kind or size.
    pub fn read<P: Payload>(&self) -> Option<P> {
        let is_one = self.kind == P::KIND && !self.has(FAULT | REFERENCE);
        is_one.then(|| P::read_from_bytes(self.payload()?).ok()).flatten()
    }

    /// Whose fault it tells of, if it does.
    pub fn fault(&self) -> Option<ActorFault> {
        self.has(FAULT).then(|| ActorFault::read_from_bytes(self.payload()?).ok()).flatten()
    }

    /// A message of bytes; none if there are more than a message carries.
    pub fn of_bytes(to: Address, kind: u16, bytes: &[u8]) -> Option<Message> {
        let mut message = Message { to: to.0, kind, ..Message::EMPTY };
        (bytes.len() <= PAYLOAD_BYTES_MAX).then(|| message.set(bytes))?;
        Some(message)
    }

    /// Replaces its payload. There is no more of it than a message carries: types are checked when they are compiled
    /// ([`Payload`]), slices by the caller.
    pub(crate) fn set(&mut self, payload: &(impl IntoBytes + Immutable + ?Sized)) {
        let bytes = payload.as_bytes();
        debug_assert!(bytes.len() <= PAYLOAD_BYTES_MAX);
        self.payload.iter_mut().zip(bytes).for_each(|(place, byte)| *place = *byte);
        self.length = u8::try_from(bytes.len()).unwrap_or(0);
    }
}

/// A type that messages carry: plain data, of a kind that says what it is to whoever receives it.
pub trait Payload: FromBytes + IntoBytes + Immutable + KnownLayout + Sized {
    const KIND: u16;

    /// Evaluated where a message is made: what does not fit does not compile.
    const FITS: () = assert!(size_of::<Self>() <= PAYLOAD_BYTES_MAX, "a message carries 64 bytes");
}

/// Messages for a lane, about an actor. Each is acknowledged by a reply of the same kind that has the actor's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Control {
    Activate = 1,
    Pause = 2,
    Resume = 3,
    Terminate = 4,
    Restart = 5,
    Handshake = 6,
    Ping = 7,
}

impl Control {
    pub(crate) fn of(kind: u16) -> Option<Control> {
        use Control::{Activate, Handshake, Pause, Ping, Restart, Resume, Terminate};
        [Activate, Pause, Resume, Terminate, Restart, Handshake, Ping].into_iter().find(|own| *own as u16 == kind)
    }
}

/// How an actor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum ActorState {
    Absent = 0,
    Active = 1,
    Paused = 2,
    Terminated = 3,
    Faulted = 4,
}

impl ActorState {
    pub(crate) fn of(number: u32) -> Option<ActorState> {
        use ActorState::{Absent, Active, Faulted, Paused, Terminated};
        [Absent, Active, Paused, Terminated, Faulted].into_iter().find(|own| *own as u32 == number)
    }
}

/// Why a message came back, or was not answered as it should have been.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// There is no such actor.
    Absent = 1,
    Terminated = 2,
    /// Its handler failed before.
    Faulted = 3,
    /// Its handler failed at this message.
    Trapped = 4,
    /// Its deadline had passed when its turn came.
    Expired = 5,
    /// The handler does not know such messages.
    Refused = 6,
    /// Too many were waiting.
    Full = 7,
    /// It is for an actor that its lane does not have.
    Foreign = 8,
    /// It is no message: a length or a flag that none has.
    Malformed = 9,
}

impl Reason {
    pub(crate) fn of(number: u32) -> Option<Reason> {
        use Reason::{Absent, Expired, Faulted, Foreign, Full, Malformed, Refused, Terminated, Trapped};
        let all = [Absent, Terminated, Faulted, Trapped, Expired, Refused, Full, Foreign, Malformed];
        all.into_iter().find(|own| *own as u32 == number)
    }
}

/// How a handler failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum TrapKind {
    /// It overran its deadline.
    Deadline = 1,
    /// A number does not fit.
    Overflow = 2,
    /// It sent what cannot be sent.
    BadOutbox = 3,
    /// A bug in a native handler: it panicked.
    Panic = 4,
}

impl TrapKind {
    pub(crate) fn of(number: u32) -> Option<TrapKind> {
        use TrapKind::{BadOutbox, Deadline, Overflow, Panic};
        [Deadline, Overflow, BadOutbox, Panic].into_iter().find(|own| *own as u32 == number)
    }
}

/// The payload of a message with [`FAULT`]: what became of another message. Where it was sent and what it was is said
/// too, so that whoever finds it in the dead letters need not have kept it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ActorFault {
    /// A [`Reason`].
    pub reason: u32,
    /// A [`TrapKind`], if the reason is a trap.
    pub trap: u32,
    /// Where in the handler: a function and an offset, as it numbers them.
    pub site: u32,
    pub to: u32,
    pub offset: u64,
    pub id: u64,
    pub kind: u16,
    pub flags: u16,
    pub length: u32,
}

impl ActorFault {
    pub fn reason(&self) -> Option<Reason> {
        Reason::of(self.reason)
    }

    pub fn trap(&self) -> Option<TrapKind> {
        TrapKind::of(self.trap)
    }
}

const _: () = assert!(size_of::<ActorFault>() == 40);

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
    #[repr(C)]
    struct Point {
        x: f32,
        y: f32,
    }

    impl Payload for Point {
        const KIND: u16 = 9;
    }

    #[test]
    fn a_payload_is_read_as_what_it_is_and_as_nothing_else() {
        let mut message = Message::to(Address::actor(1, 2), &Point { x: 1.0, y: 2.0 });
        assert_eq!((message.to, message.kind, message.length), (0x0100_0002, 9, 8));
        assert_eq!(message.read::<Point>(), Some(Point { x: 1.0, y: 2.0 }));
        message.kind = 8;
        assert_eq!(message.read::<Point>(), None);
        (message.kind, message.length) = (9, 7);
        assert_eq!(message.read::<Point>(), None);
        message.length = 255;
        assert!(message.payload().is_none() && message.read::<Point>().is_none() && message.fault().is_none());
        (message.length, message.flags) = (8, FAULT);
        assert_eq!(message.read::<Point>(), None, "it is about a fault");
    }

    #[test]
    fn numbers_are_read_as_what_they_were_written_as() {
        assert_eq!(Control::of(Control::Ping as u16), Some(Control::Ping));
        assert_eq!(Control::of(8), None);
        assert_eq!(ActorState::of(4), Some(ActorState::Faulted));
        assert_eq!(ActorState::of(5), None);
        assert_eq!(Reason::of(Reason::Malformed as u32), Some(Reason::Malformed));
        assert_eq!((Reason::of(0), TrapKind::of(0)), (None, None));
    }
}
