//! A region of the slab that somebody asked for by name: memory that server, worker and device see in place. What lies
//! in it, and who may touch it when, is the business of whoever asked for it.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::device::Device;
use crate::error::DeviceError;
use crate::slab::{PINNED, Region, STAGING, Slab};
use crate::sync::doorbell::Doorbell;

/// A named region of the memory that a device's worker shares with this process. It is the worker's of the moment:
/// another worker has another, of the same name and size, zeroed.
#[derive(Clone)]
pub struct SharedRegion {
    slab: Arc<Slab>,
    region: Region,
    device_address: u64,
}

impl Device {
    /// A region that the device was opened with ([`crate::SlabPlan::regions`]).
    pub fn region(&self, name: &str) -> Option<SharedRegion> {
        let bound = self.bound();
        // Those are handed out in parts.
        let region =
            bound.link.slab.region(name).filter(|region| ![STAGING, PINNED].contains(&region.name.as_str()))?;
        let device_address = bound.info.slab_address + region.offset;
        Some(SharedRegion { slab: bound.link.slab.clone(), region: region.clone(), device_address })
    }
}

impl SharedRegion {
    #[expect(clippy::len_without_is_empty, reason = "an empty one is of no use to anybody")]
    pub fn len(&self) -> u64 {
        self.region.bytes
    }

    /// Where the device sees it.
    pub fn device_address(&self) -> u64 {
        self.device_address
    }

    /// A word of it; none if the offset is no multiple of 8, or beyond its end.
    pub fn word(&self, offset: u64) -> Option<&AtomicU64> {
        self.slab.region_word(&self.region, offset)
    }

    /// So many words of it from there on, for as long as the caller likes; none if the offset is no multiple of 8, or
    /// they do not all lie in it.
    pub fn words(&self, offset: u64, count: usize) -> Option<SharedWords> {
        let end = u64::try_from(count).ok()?.checked_mul(8)?.checked_add(offset)?;
        if count == 0 || end > self.region.bytes {
            return None;
        }
        Some(SharedWords::new(self.slab.clone(), self.word(offset)?, count))
    }

    /// Copies bytes in. What the device reads or writes of it meanwhile is undefined bytes, not undefined behaviour.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.slab.copy_in(self.at(offset, bytes.len() as u64)?, bytes);
        Ok(())
    }

    /// Copies bytes out.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.slab.copy_out(self.at(offset, bytes.len() as u64)?, bytes);
        Ok(())
    }

    fn at(&self, offset: u64, len: u64) -> Result<u64, DeviceError> {
        let size = self.region.bytes;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(DeviceError::OutOfRange { offset, len, size });
        }
        Ok(self.region.offset + offset)
    }
}

/// Words of memory that is shared with a worker. They are there for as long as this is, whatever becomes of the worker.
#[derive(Clone)]
pub struct SharedWords {
    first: NonNull<AtomicU64>,
    count: usize,
    /// Whose mapping they lie in.
    slab: Arc<Slab>,
}

// SAFETY: a shared reference to atomics, whose mapping is kept by what is held beside it.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// `first` and the words that follow it lie in the slab.
    pub(crate) fn new(slab: Arc<Slab>, first: &AtomicU64, count: usize) -> SharedWords {
        let first = NonNull::from(first);
        let (start, end) = (first.as_ptr() as usize, first.as_ptr().wrapping_add(count) as usize);
        let base = slab.address(0) as usize;
        assert!(base <= start && start <= end && end <= base + slab.len(), "{count} words are not in the slab");
        SharedWords { first, count, slab }
    }

    /// A part of them.
    pub fn part(&self, at: usize, count: usize) -> Option<SharedWords> {
        let first = self.get(at..at.checked_add(count)?)?.first()?;
        Some(SharedWords::new(self.slab.clone(), first, count))
    }
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `new` checked that they lie in the slab, which stays mapped while it is held; it is aligned because
        // the first was a reference, and everybody accesses them atomically or, as bulk bytes, by agreement.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

/// A word that one thread parks on and others ring, of this process or of another that maps it. The word is the bell's
/// alone; it begins as zero.
pub struct Bell<'a>(Doorbell<'a, AtomicU64>);

impl<'a> Bell<'a> {
    pub fn of(word: &'a AtomicU64) -> Bell<'a> {
        Bell(Doorbell(word))
    }

    /// Wakes who is parked, if anybody is. What it is woken for was published before.
    pub fn ring(&self) {
        self.0.ring();
    }

    /// Parks until rung, unless `ready` says that there is something to do already. May return early. With a limit, no
    /// longer than that.
    pub fn park_unless(&self, ready: impl Fn() -> bool, limit: Option<Duration>) {
        self.0.park_unless(ready, limit);
    }
}
