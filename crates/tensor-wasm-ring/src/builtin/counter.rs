//! Counter: a number of 64 bits. [`Add`] adds to it, [`Get`] asks for it; both are answered by a [`Value`]. A sum that
//! does not fit is a trap, and the number stays.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::behaviour::{Call, Failure};
use crate::builtin::state;
use crate::message::{Payload, TrapKind};

/// The number.
pub(crate) const STATE_BYTES: u32 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Add(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Get;

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Value(pub u64);

impl Payload for Add {
    const KIND: u16 = 1;
}

impl Payload for Get {
    const KIND: u16 = 2;
}

impl Payload for Value {
    const KIND: u16 = 3;
}

pub(crate) fn handle(call: &mut Call<'_>) -> Result<(), Failure> {
    let number: &mut u64 = state(call.state)?;
    if let Some(Add(more)) = call.message.read() {
        *number = number.checked_add(more).ok_or(Failure::trap(TrapKind::Overflow))?;
    } else if call.message.read::<Get>().is_none() {
        return Err(Failure::Refused);
    }
    call.outbox.reply(&Value(*number));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::Builtin;
    use crate::builtin::testing::Tried;

    #[test]
    fn it_counts_and_does_not_wrap() {
        let mut counter = Tried::new(Builtin::Counter, 8);
        assert_eq!(counter.ask(1, &5_u64.to_le_bytes()), (3, vec![5, 0, 0, 0, 0, 0, 0, 0]));
        assert_eq!(counter.ask(2, &[]), (3, vec![5, 0, 0, 0, 0, 0, 0, 0]));
        assert_eq!(counter.raw(1, &u64::MAX.to_le_bytes()), Err(Failure::trap(TrapKind::Overflow)));
        assert_eq!(counter.ask(2, &[]).1[0], 5, "as it was");
        for (kind, payload) in [(1, &[0; 7][..]), (2, &[0; 1]), (9, &[])] {
            assert_eq!(counter.raw(kind, payload), Err(Failure::Refused), "{kind}");
        }
    }
}
