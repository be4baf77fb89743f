//! What lies in memory that host and lanes share, byte for byte: the header of an executor, control blocks, telemetry
//! blocks, and where each of them is. Messages are in `message.rs`, the slots of rings in `ring.rs`. Nothing else says
//! where anything is; code for a GPU is made from these constants, and a start-up handshake compares what a lane
//! believes with what the host does.
//!
//! An executor has one span of the region, its parts one after the other:
//!
//! ```text
//! header │ lane 0: control block, mailbox, replies │ lane 1: … │ telemetry block of actor 0 │ of actor 1 │ …
//! ```
//!
//! Invariant: no cache line has two writers, apart from a word that says that somebody has parked.

use std::mem::{align_of, offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::message::Message;

/// Lanes that do not agree are refused.
pub(crate) const VERSION: u32 = 1;

pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"twactor\x01");

/// Bytes of a slot: eight chunks of 16, so that a message of 96 bytes and its tags fit, and a whole pair of lines.
pub const SLOT_BYTES: usize = 128;

/// The data of a slot.
pub const MESSAGE_BYTES: usize = size_of::<Message>();

/// Bytes in front of a message's payload.
pub const HEADER_BYTES: usize = offset_of!(Message, payload);

/// What a message carries itself.
pub const PAYLOAD_BYTES_MAX: usize = 64;

/// Actors of one executor: what an address has bits for.
pub const ACTORS_MAX: u32 = (1 << INDEX_BITS) - 1;

/// Lanes of one executor. A GPU of today has fewer multiprocessors.
pub const LANES_MAX: u32 = 256;

/// Slots of a mailbox or of a ring of replies: a power of two in these bounds. The most is 8 MiB of each lane.
pub const SLOTS_MIN: u32 = 2;
pub const SLOTS_MAX: u32 = 1 << 16;

/// State of an actor; all actors of an executor have as much.
pub const STATE_BYTES_MAX: u32 = 1 << 24;

/// State of all actors of an executor together: what a worker can be asked for without a thought for what it has.
pub const STATE_TOTAL_BYTES_MAX: u64 = 1 << 30;

/// A handler may take this long at most: a lane that handles one neither beats nor makes way, and what watches it takes
/// it for dead after two seconds.
pub(crate) const HANDLER_NS_MAX: u64 = 1_000_000_000;

/// Bits of an address that say which actor of an executor, or which port of the host.
pub(crate) const INDEX_BITS: u32 = 24;

/// The executor whose indices are ports.
pub(crate) const HOST: u32 = 255;

/// Executors of a runtime at once: 0 is none, so that an address of zeros is nobody's, and the last is the host.
pub const EXECUTORS_MAX: usize = HOST as usize - 1;

/// Who a message is for, and who sent it: an actor, or a port of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(pub u32);

impl Address {
    pub(crate) fn actor(executor: u32, index: u32) -> Address {
        Address(executor << INDEX_BITS | index & ACTORS_MAX)
    }

    pub(crate) fn port(port: u32) -> Address {
        Address::actor(HOST, port)
    }

    pub(crate) fn executor(self) -> u32 {
        self.0 >> INDEX_BITS
    }

    pub fn index(self) -> u32 {
        self.0 & ACTORS_MAX
    }

    pub(crate) fn is_host(self) -> bool {
        self.executor() == HOST
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_host() {
            write!(f, "port {}", self.index())
        } else {
            write!(f, "actor {}.{}", self.executor(), self.index())
        }
    }
}

/// What lies in front of all spans of a region, in a line pair of its own: the bell that the host parks on. Lanes of a
/// CPU ring it when they have written replies.
pub(crate) const SPANS_AT: u64 = 128;
pub(crate) const HOST_BELL_AT: u64 = 0;

/// What a lane has to know, at the beginning of its executor's span. Written by the host before the lane begins, and
/// never again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(128))]
pub(crate) struct ExecutorHeader {
    pub magic: u64,
    pub version: u32,
    pub executor: u32,
    pub lanes: u32,
    pub actors: u32,
    pub state_bytes: u32,
    pub mailbox_slots: u32,
    pub reply_slots: u32,
    /// Messages that a paused actor may have waiting.
    pub held_max: u32,
    /// A handler that takes longer is stopped.
    pub handler_ns: u64,
    /// Offsets within the span, and from one lane to the next.
    pub lanes_at: u64,
    pub lane_stride: u64,
    pub telemetry_at: u64,
    pub span_bytes: u64,
    pub spare: [u64; 6],
}

/// What host and lane tell each other all the time. The first half is written by the host, the second by the lane.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(128))]
pub(crate) struct ControlBlock {
    /// Positions of the ring of replies below this have been taken, and their slots are free.
    pub replies_taken: u64,
    /// A lane of a CPU parks on this; whoever sends rings it.
    pub bell: u64,
    pub host_spare: [u64; 6],
    /// Positions of the mailbox below this have been handled, and their slots are free.
    pub mailbox_taken: u64,
    pub replies_written: u64,
    /// Counted up for as long as the lane is well.
    pub beats: u64,
    /// 1 while the lane has parked.
    pub asleep: u64,
    /// 1 + the position of a slot that was begun and never finished, and at which the lane stands; 0 if there is none.
    pub torn: u64,
    pub lane_spare: [u64; 3],
}

/// What an actor has done, written by its lane alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
pub(crate) struct TelemetryBlock {
    pub state: u32,
    pub restarts: u32,
    pub handled: u64,
    pub sent: u64,
    pub faults: u64,
    pub clock: u64,
    pub busy_ns: u64,
    pub queue_depth_max: u64,
    pub spare: u64,
}

const _: () = assert!(MESSAGE_BYTES == 96 && HEADER_BYTES == 32 && SLOT_BYTES / 16 * 12 == MESSAGE_BYTES);
const _: () = assert!(HEADER_BYTES + PAYLOAD_BYTES_MAX == MESSAGE_BYTES);
const _: () = assert!(size_of::<ExecutorHeader>() == 128 && align_of::<ExecutorHeader>() == 128);
const _: () = assert!(offset_of!(ExecutorHeader, handler_ns) == 40 && offset_of!(ExecutorHeader, span_bytes) == 72);
const _: () = assert!(size_of::<ControlBlock>() == 128 && align_of::<ControlBlock>() == 128);
const _: () = assert!(offset_of!(ControlBlock, bell) == 8 && offset_of!(ControlBlock, mailbox_taken) == 64);
const _: () = assert!(offset_of!(ControlBlock, torn) == 96);
const _: () = assert!(size_of::<TelemetryBlock>() == 64 && align_of::<TelemetryBlock>() == 64);
const _: () = assert!(offset_of!(TelemetryBlock, handled) == 8 && offset_of!(TelemetryBlock, queue_depth_max) == 48);

/// How large an executor is: what the host asked for, or a header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub executor: u32,
    pub lanes: u32,
    pub actors: u32,
    pub state_bytes: u32,
    pub mailbox_slots: u32,
    pub reply_slots: u32,
    pub held_max: u32,
    pub handler_ns: u64,
}

impl Shape {
    /// Why there can be no executor of this shape.
    pub(crate) fn check(&self) -> Result<(), String> {
        let within = |what: &str, value: u32, min: u32, max: u32| {
            let is_within = (min..=max).contains(&value);
            let why = || format!("{value} {what}, and {min} to {max} are possible");
            if is_within { Ok(()) } else { Err(why()) }
        };
        within("is no number of an executor", self.executor, 1, HOST - 1)?;
        within("actors", self.actors, 1, ACTORS_MAX)?;
        within("lanes", self.lanes, 1, LANES_MAX.min(self.actors))?;
        within("bytes of state", self.state_bytes, 0, STATE_BYTES_MAX)?;
        if self.handler_ns > HANDLER_NS_MAX {
            return Err(format!("a handler of {} ns, and {HANDLER_NS_MAX} are possible", self.handler_ns));
        }
        let total = u64::from(self.actors) * u64::from(self.state_bytes);
        if total > STATE_TOTAL_BYTES_MAX {
            return Err(format!("{total} bytes of state for all actors, and {STATE_TOTAL_BYTES_MAX} are possible"));
        }
        for (what, slots) in [("slots of a mailbox", self.mailbox_slots), ("slots for replies", self.reply_slots)] {
            within(what, slots, SLOTS_MIN, SLOTS_MAX)?;
            if !slots.is_power_of_two() {
                return Err(format!("{slots} {what} are no power of two"));
            }
        }
        Ok(())
    }

    /// Bytes from one lane's control block to the next's.
    fn lane_stride(&self) -> u64 {
        let slots = u64::from(self.mailbox_slots) + u64::from(self.reply_slots);
        size_of::<ControlBlock>() as u64 + slots * SLOT_BYTES as u64
    }

    pub(crate) fn control_at(&self, lane: u32) -> u64 {
        size_of::<ExecutorHeader>() as u64 + u64::from(lane) * self.lane_stride()
    }

    pub(crate) fn mailbox_at(&self, lane: u32) -> u64 {
        self.control_at(lane) + size_of::<ControlBlock>() as u64
    }

    pub(crate) fn replies_at(&self, lane: u32) -> u64 {
        self.mailbox_at(lane) + u64::from(self.mailbox_slots) * SLOT_BYTES as u64
    }

    pub(crate) fn telemetry_at(&self, actor: u32) -> u64 {
        self.control_at(self.lanes) + u64::from(actor) * size_of::<TelemetryBlock>() as u64
    }

    pub(crate) fn span_bytes(&self) -> u64 {
        self.telemetry_at(self.actors).next_multiple_of(SLOT_BYTES as u64)
    }

    pub(crate) fn header(&self) -> ExecutorHeader {
        ExecutorHeader {
            magic: MAGIC,
            version: VERSION,
            executor: self.executor,
            lanes: self.lanes,
            actors: self.actors,
            state_bytes: self.state_bytes,
            mailbox_slots: self.mailbox_slots,
            reply_slots: self.reply_slots,
            held_max: self.held_max,
            handler_ns: self.handler_ns,
            lanes_at: self.control_at(0),
            lane_stride: self.lane_stride(),
            telemetry_at: self.telemetry_at(0),
            span_bytes: self.span_bytes(),
            spare: [0; 6],
        }
    }

    /// The shape that a header says, if it is one that this code would have written for a span of this size.
    pub(crate) fn read(header: &ExecutorHeader, bytes: u64) -> Result<Shape, String> {
        if header.magic != MAGIC || header.version != VERSION {
            return Err(format!("no executor's header is here, or one of version {}", header.version));
        }
        let shape = Shape {
            executor: header.executor,
            lanes: header.lanes,
            actors: header.actors,
            state_bytes: header.state_bytes,
            mailbox_slots: header.mailbox_slots,
            reply_slots: header.reply_slots,
            held_max: header.held_max,
            handler_ns: header.handler_ns,
        };
        shape.check()?;
        if *header != shape.header() || header.span_bytes > bytes {
            return Err("the executor's header does not agree with itself".to_owned());
        }
        Ok(shape)
    }
}

/// What a lane answers to a handshake: sizes, and offsets of what it reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Handshake {
    pub slot_bytes: u32,
    pub message_bytes: u32,
    pub header_bytes: u32,
    pub control_bytes: u32,
    pub telemetry_bytes: u32,
    pub version: u32,
    pub about_at: u32,
    pub clock_at: u32,
    pub to_at: u32,
    pub kind_at: u32,
    pub flags_at: u32,
    pub length_at: u32,
    pub mailbox_taken_at: u32,
    pub beats_at: u32,
    pub handled_at: u32,
    pub busy_at: u32,
}

const _: () = assert!(size_of::<Handshake>() == PAYLOAD_BYTES_MAX);

/// A size or an offset of the layouts above.
const fn small(bytes: usize) -> u32 {
    assert!(bytes <= 4096);
    #[expect(clippy::cast_possible_truncation, reason = "checked by the line above, when this is compiled")]
    let bytes = bytes as u32;
    bytes
}

impl Handshake {
    pub(crate) const OWN: Handshake = Handshake {
        slot_bytes: small(SLOT_BYTES),
        message_bytes: small(MESSAGE_BYTES),
        header_bytes: small(HEADER_BYTES),
        control_bytes: small(size_of::<ControlBlock>()),
        telemetry_bytes: small(size_of::<TelemetryBlock>()),
        version: VERSION,
        about_at: small(offset_of!(Message, about)),
        clock_at: small(offset_of!(Message, clock)),
        to_at: small(offset_of!(Message, to)),
        kind_at: small(offset_of!(Message, kind)),
        flags_at: small(offset_of!(Message, flags)),
        length_at: small(offset_of!(Message, length)),
        mailbox_taken_at: small(offset_of!(ControlBlock, mailbox_taken)),
        beats_at: small(offset_of!(ControlBlock, beats)),
        handled_at: small(offset_of!(TelemetryBlock, handled)),
        busy_at: small(offset_of!(TelemetryBlock, busy_ns)),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape {
            executor: 3,
            lanes: 2,
            actors: 5,
            state_bytes: 64,
            mailbox_slots: 8,
            reply_slots: 16,
            held_max: 8,
            handler_ns: 1,
        }
    }

    #[test]
    fn parts_of_a_span_follow_each_other() {
        let shape = shape();
        assert_eq!(shape.control_at(0), 128);
        assert_eq!(shape.replies_at(1), shape.control_at(1) + 128 + 8 * 128);
        assert_eq!(shape.telemetry_at(0), shape.replies_at(1) + 16 * 128);
        assert_eq!(shape.span_bytes(), shape.telemetry_at(0) + 6 * 64, "rounded up to a slot");
    }

    #[test]
    fn a_header_that_is_wrong_in_any_word_is_refused() {
        let header = shape().header();
        let bytes = shape().span_bytes();
        assert_eq!(Shape::read(&header, bytes), Ok(shape()));
        assert!(Shape::read(&header, bytes - 1).is_err());
        let words: [u64; 16] = zerocopy::transmute!(header);
        for (at, bit) in (0..16).flat_map(|at| (0..64).map(move |bit| (at, bit))) {
            let mut bad = words;
            bad[at] ^= 1 << bit;
            let read = Shape::read(&zerocopy::transmute!(bad), bytes);
            // A few values may be others; sizes may not.
            assert!(read.is_err() || (1..=5).contains(&at) || at == 0, "bit {bit} of word {at}: {read:?}");
        }
    }

    #[test]
    fn shapes_that_cannot_be_are_refused() {
        assert_eq!(shape().check(), Ok(()));
        for bad in [
            Shape { executor: 0, ..shape() },
            Shape { executor: HOST, ..shape() },
            Shape { actors: 0, ..shape() },
            Shape { lanes: 6, ..shape() },
            Shape { lanes: 0, ..shape() },
            Shape { mailbox_slots: 1, ..shape() },
            Shape { reply_slots: 24, ..shape() },
            Shape { mailbox_slots: 1 << 17, ..shape() },
            Shape { state_bytes: u32::MAX, ..shape() },
            Shape { handler_ns: HANDLER_NS_MAX + 1, ..shape() },
            Shape { state_bytes: 1 << 20, actors: 1 << 20, ..shape() },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
