//! Which parts of the region are whose: executors come and go, each with a span. First fit; spans are few and large.

use crate::error::ActorError;
use crate::layout::{SLOT_BYTES, SPANS_AT};

/// A part of the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    pub offset: u64,
    pub bytes: u64,
}

pub(super) struct Rooms {
    bytes: u64,
    /// In the order in which they lie.
    taken: Vec<Room>,
}

impl Rooms {
    pub(super) fn new(bytes: u64) -> Rooms {
        Rooms { bytes, taken: Vec::new() }
    }

    pub(super) fn take(&mut self, bytes: u64) -> Result<Room, ActorError> {
        let none = ActorError::NoRoom { bytes, of: self.bytes };
        let Some(bytes) = bytes.checked_next_multiple_of(SLOT_BYTES as u64) else { return Err(none) };
        let mut offset = SPANS_AT;
        let mut at = 0;
        for room in &self.taken {
            if room.offset - offset >= bytes {
                break;
            }
            offset = room.offset + room.bytes;
            at += 1;
        }
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(none);
        }
        let room = Room { offset, bytes };
        self.taken.insert(at, room);
        Ok(room)
    }

    pub(super) fn give_back(&mut self, room: Room) {
        self.taken.retain(|taken| *taken != room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_do_not_overlap_and_come_back() {
        let mut rooms = Rooms::new(128 + 1_000 * 128);
        let take = |rooms: &mut Rooms, slots: u64| rooms.take(slots * 128 - 1);
        let held: Vec<Room> = (0..10).map(|_| take(&mut rooms, 100).unwrap()).collect();
        assert_eq!((held[0].offset, held[9].offset + held[9].bytes), (128, 128 + 1_000 * 128));
        assert!(matches!(take(&mut rooms, 1), Err(ActorError::NoRoom { .. })));
        rooms.give_back(held[3]);
        rooms.give_back(held[4]);
        assert_eq!(take(&mut rooms, 150).unwrap().offset, held[3].offset);
        assert!(take(&mut rooms, 51).is_err());
        assert_eq!(take(&mut rooms, 50).unwrap().offset, held[3].offset + 150 * 128);
        assert!(rooms.take(u64::MAX).is_err());
    }
}
