//! A table from keys of 64 bits to values of up to 48 bytes, in the state itself: entries of 64 bytes, open addressing,
//! linear probing. Payloads are a key, and a value behind it where there is one.
//!
//! | kind | payload | answer |
//! |---|---|---|
//! | 1 put | key, value | 1: u32, whether there was room |
//! | 2 get | key | 2: the value; 4 without payload if there is none |
//! | 3 delete | key | 3: u32, whether it was there |

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::behaviour::{Call, Failure};
use crate::message::Message;

pub const PUT: u16 = 1;
pub const GET: u16 = 2;
pub const DELETE: u16 = 3;
pub const MISSING: u16 = 4;

/// Bytes of a value.
pub const VALUE_BYTES_MAX: usize = 48;

/// State for one key; a table has as many entries as fit.
pub const ENTRY_BYTES: u32 = 64;

/// An entry's `mark`: never used, in use, used before.
const EMPTY: u32 = 0;
const USED: u32 = 1;
const DELETED: u32 = 2;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Entry {
    key: u64,
    mark: u32,
    length: u32,
    value: [u8; VALUE_BYTES_MAX],
}

const _: () = assert!(size_of::<Entry>() == ENTRY_BYTES as usize);

/// Spreads keys over the table: Fibonacci hashing, the high half of the product.
fn place(key: u64, entries: usize) -> usize {
    let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    usize::try_from(hash).unwrap_or(0) % entries
}

/// Where a key is, and where it could be put.
fn find(table: &[Entry], key: u64) -> (Option<usize>, Option<usize>) {
    let mut room = None;
    let first = place(key, table.len());
    for at in (first..table.len()).chain(0..first) {
        match table[at].mark {
            USED if table[at].key == key => return (Some(at), None),
            USED => {}
            EMPTY => return (None, room.or(Some(at))),
            _ => room = room.or(Some(at)),
        }
    }
    (None, room)
}

pub(crate) fn handle(call: &mut Call<'_>) -> Result<(), Failure> {
    let entries = call.state.len() / ENTRY_BYTES as usize;
    let (table, _) = <[Entry]>::mut_from_prefix_with_elems(call.state, entries).map_err(|_| Failure::Refused)?;
    let (key, value) = call.message.payload().and_then(|p| p.split_first_chunk()).ok_or(Failure::Refused)?;
    let key = u64::from_le_bytes(*key);
    if table.is_empty() || value.len() > VALUE_BYTES_MAX || (call.message.kind != PUT && !value.is_empty()) {
        return Err(Failure::Refused);
    }
    let (found, room) = find(table, key);
    let mut answer = Message { kind: call.message.kind, ..Message::EMPTY };
    match call.message.kind {
        PUT => {
            let at = found.or(room);
            if let Some(at) = at {
                let mut bytes = [0; VALUE_BYTES_MAX];
                bytes[..value.len()].copy_from_slice(value);
                table[at] = Entry { key, mark: USED, length: u32::from(call.message.length) - 8, value: bytes };
            }
            answer.set(&u32::from(at.is_some()));
        }
        GET => match found {
            Some(at) => answer.set(&table[at].value[..(table[at].length as usize).min(VALUE_BYTES_MAX)]),
            None => answer.kind = MISSING,
        },
        DELETE => {
            if let Some(at) = found {
                table[at].mark = DELETED;
            }
            answer.set(&u32::from(found.is_some()));
        }
        _ => return Err(Failure::Refused),
    }
    call.outbox.put(answer);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::Builtin;
    use crate::builtin::testing::Tried;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};
    use std::collections::HashMap;

    fn payload(key: u64, value: &[u8]) -> Vec<u8> {
        [&key.to_le_bytes()[..], value].concat()
    }

    #[test]
    fn a_table_does_what_a_map_does() {
        const ENTRIES: usize = 16;
        let mut table = Tried::new(Builtin::KeyValue, ENTRIES * ENTRY_BYTES as usize);
        let mut model: HashMap<u64, Vec<u8>> = HashMap::new();
        let mut rng = StdRng::seed_from_u64(5);
        for _ in 0..20_000 {
            let key = rng.random_range(0..24_u64) * 0x1_0000_0001;
            match rng.random_range(0..3) {
                0 => {
                    let value: Vec<u8> = (0..rng.random_range(0..=VALUE_BYTES_MAX)).map(|_| rng.random()).collect();
                    let fits = model.contains_key(&key) || model.len() < ENTRIES;
                    let answer = table.ask(PUT, &payload(key, &value));
                    assert_eq!(answer, (PUT, u32::from(fits).to_le_bytes().to_vec()));
                    if fits {
                        model.insert(key, value);
                    }
                }
                1 => {
                    let expected = model.get(&key).map_or((MISSING, Vec::new()), |value| (GET, value.clone()));
                    assert_eq!(table.ask(GET, &payload(key, &[])), expected);
                }
                _ => {
                    let was = u32::from(model.remove(&key).is_some());
                    assert_eq!(table.ask(DELETE, &payload(key, &[])), (DELETE, was.to_le_bytes().to_vec()));
                }
            }
        }
        for (kind, payload) in [(PUT, vec![0; 57]), (GET, vec![0; 9]), (GET, vec![0; 7]), (9, vec![0; 8])] {
            assert_eq!(table.raw(kind, &payload), Err(Failure::Refused), "{kind}");
        }
    }
}
