//! Spin: keeps its lane busy for as long as a [`Work`] says and sends it back. A load to measure with, and a handler
//! that overruns its deadline when told to. On a GPU, whose kernels have no clock, it counts, and takes about as long.
//! No state.

use std::time::Duration;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::behaviour::{Call, Failure};
use crate::message::Payload;

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Work {
    pub us: u32,
}

impl Payload for Work {
    const KIND: u16 = 1;
}

pub(crate) fn handle(call: &mut Call<'_>) -> Result<(), Failure> {
    let work: Work = call.message.read().ok_or(Failure::Refused)?;
    while call.deadline.began.elapsed() < Duration::from_micros(u64::from(work.us)) {
        call.deadline.check()?;
        std::hint::spin_loop();
    }
    call.outbox.reply(&work);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::Builtin;
    use crate::builtin::testing::Tried;
    use crate::message::TrapKind;

    #[test]
    fn work_that_takes_too_long_traps() {
        let mut spin = Tried::new(Builtin::Spin, 0);
        assert_eq!(spin.ask(1, &100_u32.to_le_bytes()), (1, 100_u32.to_le_bytes().to_vec()));
        assert_eq!(spin.raw(1, &u32::MAX.to_le_bytes()), Err(Failure::trap(TrapKind::Deadline)));
    }
}
