//! Reduce: sum, least and greatest of all the numbers it was sent. Kind 1 has 1 to 16 of them as `f32` and is not
//! answered; [`Get`] asks for what they come to, and [`Reset`] for the same before all is forgotten: [`Total`]. Numbers
//! are added one after the other in the order in which they came, so the sum is the same everywhere; a NaN is in the
//! sum and neither least nor greatest.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::behaviour::{Call, Failure};
use crate::builtin::state;
use crate::message::Payload;

/// The kind of messages with numbers.
pub const NUMBERS: u16 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Get;

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Reset;

/// The answer, and the state. Without numbers, least and greatest are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Total {
    pub count: u64,
    pub sum: f32,
    pub min: f32,
    pub max: f32,
    pub spare: u32,
}

pub(crate) const STATE_BYTES: u32 = 24;
const _: () = assert!(size_of::<Total>() == STATE_BYTES as usize);

impl Payload for Get {
    const KIND: u16 = 2;
}

impl Payload for Reset {
    const KIND: u16 = 3;
}

impl Payload for Total {
    const KIND: u16 = 4;
}

pub(crate) fn handle(call: &mut Call<'_>) -> Result<(), Failure> {
    let total: &mut Total = state(call.state)?;
    if call.message.kind == NUMBERS {
        let bytes = call.message.payload().ok_or(Failure::Refused)?;
        let (numbers, rest) = bytes.as_chunks();
        if numbers.is_empty() || !rest.is_empty() {
            return Err(Failure::Refused);
        }
        for number in numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)) {
            let is_first = total.count == 0;
            total.count += 1;
            total.sum += number;
            total.min = if is_first || number < total.min { number } else { total.min };
            total.max = if is_first || number > total.max { number } else { total.max };
        }
    } else if call.message.read::<Get>().is_some() {
        call.outbox.reply(total);
    } else if call.message.read::<Reset>().is_some() {
        call.outbox.reply(total);
        *total = Total::default();
    } else {
        return Err(Failure::Refused);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::Builtin;
    use crate::builtin::testing::Tried;

    #[test]
    fn numbers_come_to_a_total_and_are_forgotten() {
        let mut reduce = Tried::new(Builtin::Reduce, 24);
        let bytes: Vec<u8> = [3.0_f32, -1.5, 7.25].iter().flat_map(|n| n.to_le_bytes()).collect();
        assert_eq!(reduce.raw(NUMBERS, &bytes).unwrap(), []);
        let expected = Total { count: 3, sum: 8.75, min: -1.5, max: 7.25, spare: 0 };
        assert_eq!(reduce.ask(3, &[]), (4, expected.as_bytes().to_vec()));
        assert_eq!(reduce.ask(2, &[]), (4, Total::default().as_bytes().to_vec()));
        for (kind, payload) in [(1, &[0; 3][..]), (1, &[]), (2, &[0; 4]), (7, &[])] {
            assert_eq!(reduce.raw(kind, payload), Err(Failure::Refused), "{kind}");
        }
    }
}
