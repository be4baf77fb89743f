//! Behaviours that every device has: their messages, their state, and their handlers in Rust. Handlers for a GPU do the
//! same to the byte; the layouts here are what both are made from. All of it is little-endian.

pub mod counter;
pub mod echo;
pub mod key_value;
pub mod reduce;
pub mod relay;
pub mod spin;

use crate::behaviour::Handler;

/// A behaviour that is built in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Builtin {
    Echo,
    Counter,
    KeyValue,
    Reduce,
    Relay,
    Spin,
}

impl Builtin {
    pub const ALL: [Builtin; 6] =
        [Builtin::Echo, Builtin::Counter, Builtin::KeyValue, Builtin::Reduce, Builtin::Relay, Builtin::Spin];

    pub fn name(self) -> &'static str {
        match self {
            Builtin::Echo => "echo",
            Builtin::Counter => "counter",
            Builtin::KeyValue => "key-value",
            Builtin::Reduce => "reduce",
            Builtin::Relay => "relay",
            Builtin::Spin => "spin",
        }
    }

    /// State that one actor needs at least.
    pub fn state_bytes_min(self) -> u32 {
        match self {
            Builtin::Echo | Builtin::Spin => 0,
            Builtin::Counter => counter::STATE_BYTES,
            Builtin::KeyValue => key_value::ENTRY_BYTES,
            Builtin::Reduce => reduce::STATE_BYTES,
            Builtin::Relay => relay::STATE_BYTES,
        }
    }

    pub(crate) fn handler(self) -> Handler {
        match self {
            Builtin::Echo => echo::handle,
            Builtin::Counter => counter::handle,
            Builtin::KeyValue => key_value::handle,
            Builtin::Reduce => reduce::handle,
            Builtin::Relay => relay::handle,
            Builtin::Spin => spin::handle,
        }
    }
}

/// The state of an actor that has one value of a type in it.
fn state<T: zerocopy::FromBytes + zerocopy::IntoBytes + zerocopy::KnownLayout>(
    bytes: &mut [u8],
) -> Result<&mut T, crate::behaviour::Failure> {
    // An executor with less state is refused when it is launched.
    T::mut_from_prefix(bytes).map(|(own, _)| own).map_err(|_| crate::behaviour::Failure::Refused)
}

#[cfg(test)]
pub(crate) mod testing {
    //! Handlers, tried without a lane.

    use std::time::{Duration, Instant};

    use zerocopy::IntoBytes;

    use super::Builtin;
    use crate::behaviour::{Call, Failure, HandlerDeadline, Outbox};
    use crate::message::Message;

    pub(crate) struct Tried {
        builtin: Builtin,
        state: Vec<u64>,
    }

    impl Tried {
        pub(crate) fn new(builtin: Builtin, state_bytes: usize) -> Tried {
            Tried { builtin, state: vec![0; state_bytes.div_ceil(8)] }
        }

        pub(crate) fn message(&mut self, message: &Message) -> Result<Vec<Message>, Failure> {
            let mut outbox = Outbox::new();
            let deadline = HandlerDeadline { began: Instant::now(), limit: Duration::from_millis(20) };
            let state = self.state.as_mut_bytes();
            self.builtin.handler()(&mut Call { state, message, outbox: &mut outbox, deadline })?;
            Ok(outbox.sent().unwrap().to_vec())
        }

        pub(crate) fn raw(&mut self, kind: u16, payload: &[u8]) -> Result<Vec<Message>, Failure> {
            let mut message = Message { kind, ..Message::EMPTY };
            message.set(payload);
            self.message(&message)
        }

        /// The only answer, as bytes, with its kind.
        pub(crate) fn ask(&mut self, kind: u16, payload: &[u8]) -> (u16, Vec<u8>) {
            let sent = self.raw(kind, payload).unwrap();
            assert_eq!((sent.len(), sent[0].to), (1, 0), "a reply");
            (sent[0].kind, sent[0].payload().unwrap().to_vec())
        }
    }
}
