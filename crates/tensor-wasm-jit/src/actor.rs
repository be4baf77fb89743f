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

/// Flags of a message, as they lie in the word that says what it is.
pub const FLAG_REPLY: u32 = 1 << 16;
pub const FLAG_FAULT: u32 = 4 << 16;
pub const FLAG_CONTROL: u32 = 8 << 16;

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

/// Why a message comes back: the first word of the payload. Then the actor's state, and of a trap its kind, its site,
/// which window it was, the offset there and the work item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Refused {
    Trapped = 1,
    Absent = 2,
    Terminated = 3,
    Faulted = 4,
    Expired = 5,
    Full = 6,
    NotPossible = 7,
}

/// Bytes of a refusal's payload.
pub const REFUSAL_BYTES: u32 = 28;

/// A lane's part of the rings: its control block, then its mailbox, then its replies.
pub const LANE_CONTROL_BYTES: u32 = 128;
/// What the host writes there: replies that it has taken; and the lane: messages that it is done with.
pub const LANE_REPLIES_TAKEN: u32 = 0;
pub const LANE_MAILBOX_TAKEN: u32 = 64;

/// What is kept of an actor, on the device, and for the host to read: a telemetry block.
pub const ACTOR_BYTES: u32 = 64;
pub const ACTOR_STATE: u32 = 0;
pub const ACTOR_RESTARTS: u32 = 4;
pub const ACTOR_HANDLED: u32 = 8;
pub const ACTOR_SENT: u32 = 16;
pub const ACTOR_FAULTS: u32 = 24;
pub const ACTOR_CLOCK: u32 = 32;
/// Cycles of the multiprocessor that its messages took, from when they were taken up until they were answered.
pub const ACTOR_BUSY_CYCLES: u32 = 40;
/// Messages ever held while it was paused, and of those the ones that were handled or returned since.
pub const ACTOR_HELD: u32 = 48;
pub const ACTOR_UNHELD: u32 = 52;

/// The lane that it belongs to, which the host says before the first launch.
pub const ACTOR_LANE: u32 = 56;

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

/// What a handshake answers, as 32-bit words.
pub const HANDSHAKE: [u32; 12] = [
    LANE_VERSION,
    SLOT_BYTES,
    MESSAGE_BYTES,
    MESSAGE_PAYLOAD,
    OUTBOX_BYTES,
    LANE_CONTROL_BYTES,
    LANE_REPLIES_TAKEN,
    LANE_MAILBOX_TAKEN,
    ACTOR_BYTES,
    ACTOR_STATE,
    ACTOR_HANDLED,
    ACTOR_FAULTS,
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
    /// Compiles a handler, to be called by so many work items together: one, or a multiple of 32.
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
