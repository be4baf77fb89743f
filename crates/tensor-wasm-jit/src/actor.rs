//! Handlers that stay on a GPU: a Wasm function that is called once per message, inside of a lane that fetches messages
//! and sends what the handler leaves in its outbox. Here is what the lane (`ptx/lane.ptx`) shares with whoever feeds
//! it, in numbers; the layouts of memory that a host sees too are the ring crate's, which asserts that they are these.
//!
//! A handler has three windows: its actor's state, the message, its outbox. It is fenced as any kernel is, with two
//! differences: a trap ends the message and not the launch, and its deadline counts from when its message was taken up.

use crate::build::BuiltKernel;
use crate::gpu::Target;
use crate::legalize::{self, WindowSizes};
use crate::refusal::{Refusal, SourceLocation};
use crate::{Program, ptx};

/// Bytes of a slot of a ring, and of the message in it: eight chunks, each twelve bytes of message and a tag.
pub const SLOT_BYTES: u32 = 128;
pub const MESSAGE_BYTES: u32 = 96;

/// Offsets in a message.
pub const MESSAGE_ID: u32 = 0;
pub const MESSAGE_ABOUT: u32 = 8;
pub const MESSAGE_CLOCK: u32 = 16;
pub const MESSAGE_TO: u32 = 24;
/// A word: the kind in its lower half, then flags, then the length of the payload.
pub const MESSAGE_WHAT: u32 = 28;
pub const MESSAGE_PAYLOAD: u32 = 32;
pub const PAYLOAD_BYTES_MAX: u32 = MESSAGE_BYTES - MESSAGE_PAYLOAD;

/// An outbox: how many messages, then from here on the messages.
pub const OUTBOX_FIRST: u32 = 16;
pub const OUTBOX_MESSAGES: u32 = 4;
pub const OUTBOX_BYTES: u32 = OUTBOX_FIRST + OUTBOX_MESSAGES * MESSAGE_BYTES;

/// A word of an outbox with which a handler says that it did not do what it was asked: [`VERDICT_REFUSED`], or a number
/// for its failure, which whoever asked is told. What it has put into the outbox besides is forgotten.
pub const OUTBOX_VERDICT: u32 = 4;
pub const VERDICT_REFUSED: u32 = u32::MAX;

/// A word of an outbox in which the lane says how many bytes of state the actor has.
pub const OUTBOX_STATE_BYTES: u32 = 8;

/// How a handler failed, in a refusal: it overran its deadline, it sent what cannot be sent, what it says itself, or
/// the number of a [`TrapKind`](crate::TrapKind) behind so many others.
pub const TRAP_DEADLINE: u32 = 1;
pub const TRAP_BAD_OUTBOX: u32 = 3;
pub const TRAPS_FROM: u32 = 16;

/// Flags of a message, as they lie in the word that says what it is.
pub const FLAG_REPLY: u32 = 1 << 16;
pub const FLAG_REFERENCE: u32 = 2 << 16;
pub const FLAG_FAULT: u32 = 4 << 16;
pub const FLAG_CONTROL: u32 = 8 << 16;
pub const FLAG_URGENT: u32 = 16 << 16;

/// What a control message asks for: its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Control {
    Activate = 1,
    Pause = 2,
    Resume = 3,
    Terminate = 4,
    Restart = 5,
    Handshake = 6,
    Ping = 7,
}

/// What an actor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum ActorState {
    Absent = 0,
    Active = 1,
    Paused = 2,
    Terminated = 3,
    Faulted = 4,
}

/// Why a message comes back: the first word of the payload. Then how its handler failed, at which site, whom the
/// message was for, at which offset of a window (64 bits); the message's id (64 bits), its kind and flags, its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Refused {
    Absent = 1,
    Terminated = 2,
    Faulted = 3,
    Trapped = 4,
    Expired = 5,
    Refused = 6,
    Full = 7,
    Foreign = 8,
    Malformed = 9,
}

/// Bytes of a refusal's payload.
pub const REFUSAL_BYTES: u32 = 40;

/// A lane's part of the rings: its control block, then its mailbox, then its replies.
pub const LANE_CONTROL_BYTES: u32 = 128;
/// What the host writes there: replies that it has taken; and the lane: messages that it is done with.
pub const LANE_REPLIES_TAKEN: u32 = 0;
pub const LANE_MAILBOX_TAKEN: u32 = 64;
pub const LANE_REPLIES_WRITTEN: u32 = 72;
pub const LANE_BEATS: u32 = 80;

/// What is kept of an actor on the device. Of that the first part is for the host to read: a telemetry block.
pub const ACTOR_BYTES: u32 = 128;
pub const TELEMETRY_BYTES: u32 = 64;
pub const ACTOR_STATE: u32 = 0;
pub const ACTOR_RESTARTS: u32 = 4;
pub const ACTOR_HANDLED: u32 = 8;
pub const ACTOR_SENT: u32 = 16;
pub const ACTOR_FAULTS: u32 = 24;
pub const ACTOR_CLOCK: u32 = 32;
/// Nanoseconds of its messages, from when its lane last looked at the clock before each.
pub const ACTOR_BUSY_NANOS: u32 = 40;
/// The most messages that were held while it was paused.
pub const ACTOR_HELD_MAX: u32 = 48;
/// Messages ever held, and of those the ones that were handled or returned since.
pub const ACTOR_HELD: u32 = 64;
pub const ACTOR_UNHELD: u32 = 68;
/// The lane that it belongs to, which the host says before the first launch.
pub const ACTOR_LANE: u32 = 72;

/// What a lane keeps on the device between two launches. Zeros at first, but for the last.
pub const LANE_STATE_BYTES: u32 = 128;
pub const LANE_STATE_TAKEN: u32 = 0;
pub const LANE_STATE_REPLIED: u32 = 8;
pub const LANE_STATE_CLOCK: u32 = 16;
pub const LANE_STATE_INBOX_TAKEN: u32 = 24;
pub const LANE_STATE_CLOCK_OFFSET: u32 = 32;
/// The actor whose held messages are being handled: at first none, all ones.
pub const LANE_STATE_RESUMING: u32 = 40;
/// Places ever taken in the lane's inbox: what other lanes add to, on a line of its own.
pub const LANE_STATE_INBOX_TAIL: u32 = 64;

/// The version of all this, part of the handshake.
pub const LANE_VERSION: u32 = 1;

/// What a handshake answers, as 32-bit words: sizes, then offsets.
pub const HANDSHAKE: [u32; 16] = [
    SLOT_BYTES,
    MESSAGE_BYTES,
    MESSAGE_PAYLOAD,
    LANE_CONTROL_BYTES,
    TELEMETRY_BYTES,
    LANE_VERSION,
    MESSAGE_ABOUT,
    MESSAGE_CLOCK,
    MESSAGE_TO,
    MESSAGE_WHAT,
    MESSAGE_WHAT + 2,
    MESSAGE_WHAT + 3,
    LANE_MAILBOX_TAKEN,
    LANE_BEATS,
    ACTOR_HANDLED,
    ACTOR_BUSY_NANOS,
];

/// Work items of a handler: the rest of a group of 1,024 polls.
pub const HANDLER_ITEMS_MAX: u32 = 1024 - POLLER_ITEMS;

/// Two warps poll: one the mailbox, one the inbox.
pub const POLLER_ITEMS: u32 = 64;

/// A compiled executor. It is launched with a group for each lane.
#[derive(Debug, Clone, PartialEq)]
pub struct ActorImage {
    pub name: String,
    pub entry: String,
    pub ptx: String,
    /// Work items of a group.
    pub group_items: u32,
    /// What an actor's state must have at least.
    pub state_bytes_min: u32,
    pub target: Target,
    /// Places that a trap's number stands for.
    pub sites: Vec<SourceLocation>,
}

impl Program<'_> {
    /// Compiles a handler, to be called by so many work items together: one, or a multiple of 32. More than one were
    /// seen to work in the emulator only.
    pub fn compile_actor(&self, handler: &str, items: u32) -> Result<ActorImage, Refusal> {
        self.built(handler, &[true; 3])?.compile_actor(items)
    }
}

impl BuiltKernel {
    /// Compiles a handler, as [`Program::compile_actor`] does.
    pub fn compile_actor(&self, items: u32) -> Result<ActorImage, Refusal> {
        let refused = |why: String| Err(Refusal::NotAKernel { name: self.name().to_owned(), why });
        if items != 1 && (items == 0 || !items.is_multiple_of(32) || items > HANDLER_ITEMS_MAX) {
            return refused(format!(
                "a handler has 1 work item, or a multiple of 32 up to {HANDLER_ITEMS_MAX}, and {items} were asked for"
            ));
        }
        if self.windows != [true; 3] {
            return refused("a handler has three parameters, all of them addresses: state, message, outbox".to_owned());
        }
        let image =
            ptx::emit_actor(&legalize::legalize(self.body.clone(), &self.windows, WindowSizes::FitAccesses), items)?;
        for (what, needed, has) in
            [("message", image.window_bytes_min[1], MESSAGE_BYTES), ("outbox", image.window_bytes_min[2], OUTBOX_BYTES)]
        {
            if needed > has {
                return refused(format!("it accesses {needed} bytes at once of its {what}, which has {has}"));
            }
        }
        Ok(ActorImage {
            name: image.name,
            entry: image.entry,
            ptx: image.ptx,
            group_items: items.next_multiple_of(32) + POLLER_ITEMS,
            state_bytes_min: image.window_bytes_min[0],
            target: image.target,
            sites: image.sites,
        })
    }
}
