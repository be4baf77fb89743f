//! What can go wrong with actors, for whoever sends them messages or starts them.

use std::time::Duration;

use tensor_wasm_gpu::{DeviceError, Unavailable};

use crate::layout::Address;
use crate::message::{ActorFault, ActorState, Reason, TrapKind};

/// Why an actor did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ActorError {
    #[error("{what} is full: it has room for {slots}")]
    Full { what: &'static str, slots: u64 },
    #[error("{to} had as many messages waiting as it may")]
    Crowded { to: Address },
    #[error("{port} has {unread} messages that nobody has received, which is the most; receive some")]
    Unread { port: Address, unread: usize },
    #[error("{to} is not there: it was never activated")]
    Absent { to: Address },
    #[error("{to} was terminated")]
    Terminated { to: Address },
    #[error("{to} has faulted; restart it")]
    Faulted { to: Address },
    #[error("{to} faulted at this message: {}", trap_text(*.trap, *.site, *.offset))]
    Trapped { to: Address, trap: Option<TrapKind>, site: u32, offset: u64 },
    #[error("the deadline of the message had passed when {to} came to it")]
    Expired { to: Address },
    #[error("{to} knows no message of kind {kind} and {length} bytes")]
    Refused { to: Address, kind: u16, length: u32 },
    #[error("{to} is no actor here")]
    Foreign { to: Address },
    #[error("{port} is another runtime's")]
    ForeignPort { port: Address },
    #[error("{to} was sent something that is no message")]
    Malformed { to: Address },
    #[error("{to} answered with kind {kind} and {length} bytes, which is not what was asked for")]
    BadAnswer { to: Address, kind: u16, length: u8 },
    #[error("{to} did not answer within {after:?}")]
    Timeout { to: Address, after: Duration },
    #[error("{to} cannot be {wanted:?} now: it is {found:?}")]
    BadState { to: Address, wanted: ActorState, found: ActorState },
    #[error("lane {lane} does not go on: position {position} of its mailbox was begun and never finished")]
    Torn { lane: u32, position: u64 },
    #[error("lane {lane} says that it has taken messages that were never sent: its memory is damaged")]
    Corrupt { lane: u32 },
    #[error("the device was lost, and its actors with it: {why}")]
    DeviceLost { why: String },
    #[error("the executor {name:?} has ended")]
    Ended { name: String },
    #[error("there can be no such executor: {why}")]
    BadShape { why: String },
    #[error("{what} is not supported")]
    Unsupported { what: String },
    #[error("lane {lane} and this program do not agree on how memory is laid out: they are of different versions")]
    Handshake { lane: u32 },
    #[error("the lanes ended as soon as they had begun: they found no executor's header where it should be")]
    NotStarted,
    #[error("the runtime has {max} {what}, which is the most")]
    TooMany { what: &'static str, max: usize },
    #[error("the region for rings has no {bytes} bytes left, of {of}")]
    NoRoom { bytes: u64, of: u64 },
    #[error("the device cannot be opened: {why}")]
    NoDevice { why: String },
    #[error("the device refused: {why}")]
    Device { why: String },
}

fn trap_text(trap: Option<TrapKind>, site: u32, offset: u64) -> String {
    let what = match trap {
        Some(TrapKind::Deadline) => "it took longer than it may".to_owned(),
        Some(TrapKind::Overflow) => "a number did not fit".to_owned(),
        Some(TrapKind::BadOutbox) => "it sent what cannot be sent".to_owned(),
        Some(TrapKind::Panic) => "its handler has a bug".to_owned(),
        None => "for a reason that is not known here".to_owned(),
    };
    if (site, offset) == (0, 0) { what } else { format!("{what}, in function {site} at {offset}") }
}

impl ActorError {
    /// What a fault says.
    pub fn of(fault: &ActorFault) -> ActorError {
        let to = Address(fault.to);
        match fault.reason() {
            Some(Reason::Absent) => ActorError::Absent { to },
            Some(Reason::Terminated) => ActorError::Terminated { to },
            Some(Reason::Faulted) => ActorError::Faulted { to },
            Some(Reason::Trapped) => {
                ActorError::Trapped { to, trap: fault.trap(), site: fault.site, offset: fault.offset }
            }
            Some(Reason::Expired) => ActorError::Expired { to },
            Some(Reason::Refused) => ActorError::Refused { to, kind: fault.kind, length: fault.length },
            Some(Reason::Full) => ActorError::Crowded { to },
            Some(Reason::Foreign) => ActorError::Foreign { to },
            Some(Reason::Malformed) | None => ActorError::Malformed { to },
        }
    }
}

impl From<DeviceError> for ActorError {
    fn from(error: DeviceError) -> ActorError {
        match error {
            DeviceError::DeviceLost { why } => ActorError::DeviceLost { why },
            other => ActorError::Device { why: other.to_string() },
        }
    }
}

impl From<Unavailable> for ActorError {
    fn from(why: Unavailable) -> ActorError {
        ActorError::NoDevice { why: why.to_string() }
    }
}
