//! Echo: answers every message with its own kind and payload. No state.

use crate::behaviour::{Call, Failure};
use crate::message::{Message, REFERENCE};

pub(crate) fn handle(call: &mut Call<'_>) -> Result<(), Failure> {
    let Message { kind, flags, length, payload, .. } = *call.message;
    call.outbox.put(Message { kind, flags: flags & REFERENCE, length, payload, ..Message::EMPTY });
    Ok(())
}
