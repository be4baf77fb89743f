//! Relay: hands tokens on. [`Next`] says to whom, and is answered by itself; a [`Token`] goes there with one hop less,
//! or, when it has none left, home as [`Arrived`].

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::behaviour::{Call, Failure};
use crate::builtin::state;
use crate::layout::Address;
use crate::message::Payload;

/// The address of who comes next; 0 for nobody.
pub(crate) const STATE_BYTES: u32 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Next(pub u32);

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Token {
    pub hops: u32,
    /// Who is told in the end.
    pub home: u32,
    /// Comes back as it is.
    pub tag: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Arrived {
    pub tag: u64,
}

impl Payload for Next {
    const KIND: u16 = 1;
}

impl Payload for Token {
    const KIND: u16 = 2;
}

impl Payload for Arrived {
    const KIND: u16 = 3;
}

pub(crate) fn handle(call: &mut Call<'_>) -> Result<(), Failure> {
    let next: &mut u32 = state(call.state)?;
    if let Some(told @ Next(address)) = call.message.read() {
        *next = address;
        call.outbox.reply(&told);
    } else if let Some(token @ Token { hops, home, tag }) = call.message.read() {
        match (hops, *next) {
            (0, _) => call.outbox.send(Address(home), &Arrived { tag }),
            (_, 0) => return Err(Failure::Refused),
            (_, next) => call.outbox.send(Address(next), &Token { hops: hops - 1, ..token }),
        }
    } else {
        return Err(Failure::Refused);
    }
    Ok(())
}
