//! Memory that host and device both see in place: parts of the slab's pinned region, registered once with the device.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};

use crate::error::DeviceError;
use crate::number::index;
use crate::slab::{PINNED, Slab};

/// Parts begin and end at multiples of this, a page.
const PART_ALIGN: u64 = 4096;

/// One part in so many of the region is for those that take a page.
const RESERVED_PART: u64 = 32;

/// Hands out the pinned region, first fit.
pub(crate) struct PinnedPool {
    slab: Arc<Slab>,
    /// Of the region.
    bytes: u64,
    /// The free list: free parts by offset, and their sizes. Neighbours are always merged.
    free: Mutex<BTreeMap<u64, u64>>,
}

/// A part of the pinned region. Cloning shares it; it goes back with the last clone, and with the last job that uses
/// it.
#[derive(Clone)]
pub struct Pinned(Arc<Part>);

impl PartialEq for Pinned {
    fn eq(&self, other: &Pinned) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pinned({} bytes)", self.0.len)
    }
}

struct Part {
    pool: Arc<PinnedPool>,
    offset: u64,
    len: u64,
    device_address: u64,
}

impl PinnedPool {
    pub(crate) fn new(slab: Arc<Slab>) -> Arc<PinnedPool> {
        let (begin, len) = slab.region_range(PINNED);
        let free = if len > 0 { BTreeMap::from([(begin, len)]) } else { BTreeMap::new() };
        Arc::new(PinnedPool { slab, bytes: len, free: Mutex::new(free) })
    }

    /// A part of at least `len` bytes, zeroed.
    pub(crate) fn take(self: &Arc<Self>, len: u64, slab_address: u64) -> Result<Pinned, DeviceError> {
        if len == 0 {
            return Err(DeviceError::ZeroSize);
        }
        let none = DeviceError::OutOfMemory { asked_bytes: len };
        let Some(bytes) = len.checked_next_multiple_of(PART_ALIGN) else { return Err(none) };
        let offset = {
            let mut free = self.free.lock();
            // A page is always to be had, whoever takes the rest: launches of every tenant need one.
            let left = free.values().sum::<u64>();
            if bytes > PART_ALIGN && left < bytes + self.bytes / RESERVED_PART {
                return Err(none);
            }
            let (offset, size) = free.iter().find(|(_, size)| **size >= bytes).map(|(o, s)| (*o, *s)).ok_or(none)?;
            free.remove(&offset);
            if size > bytes {
                free.insert(offset + bytes, size - bytes);
            }
            offset
        };
        let device_address = slab_address + offset;
        let pinned = Pinned(Arc::new(Part { pool: self.clone(), offset, len: bytes, device_address }));
        pinned.zero();
        Ok(pinned)
    }
}

impl Pinned {
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Where the device sees it.
    pub fn device_address(&self) -> u64 {
        self.0.device_address
    }

    pub(crate) fn slab_offset(&self) -> u64 {
        self.0.offset
    }

    /// Whether it is a part of this slab, and not of an earlier worker's.
    pub(crate) fn check_worker(&self, slab: &Arc<Slab>) -> Result<(), DeviceError> {
        if Arc::ptr_eq(&self.0.pool.slab, slab) {
            return Ok(());
        }
        Err(DeviceError::DeviceLost { why: "the pinned memory was an earlier worker's".to_owned() })
    }

    /// Copies bytes in. What a job under way reads or writes of it meanwhile is undefined bytes, not undefined
    /// behaviour.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, bytes.len() as u64)?;
        self.0.pool.slab.copy_in(self.0.offset + offset, bytes);
        Ok(())
    }

    /// Copies bytes out.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.check(offset, bytes.len() as u64)?;
        self.0.pool.slab.copy_out(self.0.offset + offset, bytes);
        Ok(())
    }

    pub(crate) fn check(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.0.len) {
            return Ok(());
        }
        Err(DeviceError::OutOfRange { offset, len, size: self.0.len })
    }

    fn zero(&self) {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let mut at = 0;
        while at < self.0.len {
            let len = (self.0.len - at).min(ZEROS.len() as u64);
            self.0.pool.slab.copy_in(self.0.offset + at, &ZEROS[..index(len)]);
            at += len;
        }
    }
}

/// Pinned memory at the beginning of a larger range of addresses of its own, the rest of which faults.
pub struct PinnedMapping {
    pinned: Pinned,
    base: *mut c_void,
    reserved: usize,
}

// SAFETY: a mapping may be used and undone by any thread; what is written to it is bytes that others may see.
unsafe impl Send for PinnedMapping {}
// SAFETY: as above; nothing is written through a shared reference.
unsafe impl Sync for PinnedMapping {}

impl Pinned {
    /// Maps it once more, with `reserved` bytes of addresses. None of it can be touched at first.
    pub fn map(&self, reserved: usize) -> io::Result<PinnedMapping> {
        let len = usize::try_from(self.0.len).map_err(io::Error::other)?;
        if reserved < len {
            return Err(io::Error::other("the reservation is smaller than the memory"));
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), reserved, ProtFlags::empty(), flags) }?;
        let mapping = PinnedMapping { pinned: self.clone(), base, reserved };
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: over the first part of what was just reserved; the slab's file is as long as the slab.
        unsafe { mm::mmap(base, len, ProtFlags::empty(), flags, self.0.pool.slab.fd(), self.0.offset) }?;
        Ok(mapping)
    }
}

impl PinnedMapping {
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.cast()
    }

    pub fn pinned(&self) -> &Pinned {
        &self.pinned
    }

    /// Lets the first bytes be touched, whole pages of them.
    pub fn open(&self, bytes: u64) -> io::Result<()> {
        let bytes = bytes.next_multiple_of(PART_ALIGN);
        self.pinned.check(0, bytes).map_err(io::Error::other)?;
        let len = usize::try_from(bytes).map_err(io::Error::other)?;
        let both = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: inside the mapping, which is this value's own.
        unsafe { mm::mprotect(self.base, len, both) }?;
        Ok(())
    }
}

impl Drop for PinnedMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and undone once.
        let _ = unsafe { mm::munmap(self.base, self.reserved) };
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock();
        let (mut offset, mut len) = (self.offset, self.len);
        if let Some((before, size)) = free.range(..offset).next_back().map(|(o, s)| (*o, *s))
            && before + size == offset
        {
            free.remove(&before);
            (offset, len) = (before, len + size);
        }
        if let Some(size) = free.remove(&(offset + len)) {
            len += size;
        }
        free.insert(offset, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::SlabPlan;

    #[test]
    fn parts_do_not_overlap_are_zeroed_and_merge_again() {
        let slab = Arc::new(Slab::create(&SlabPlan { pinned_bytes: 4 << 20, ..SlabPlan::default() }).unwrap());
        let pool = PinnedPool::new(slab);
        let parts: Vec<Pinned> = (0..3).map(|_| pool.take(1 << 20, 0).unwrap()).collect();
        // The last of it is for those that take a page.
        assert_eq!(pool.take(1 << 20, 0).err(), Some(DeviceError::OutOfMemory { asked_bytes: 1 << 20 }));
        let pages: Vec<Pinned> = std::iter::from_fn(|| pool.take(1, 0).ok()).collect();
        assert_eq!(pages.len(), 256);
        drop(pages);
        for (n, part) in parts.iter().enumerate() {
            part.write(0, &vec![u8::try_from(n).unwrap() + 1; 1 << 20]).unwrap();
        }
        let mut seen = vec![0; 1 << 20];
        parts[2].read(0, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == 3));
        assert!(parts[0].write((1 << 20) - 1, b"ab").is_err() && parts[0].read(u64::MAX, &mut seen).is_err());
        for part in [1, 0, 2] {
            drop(parts.get(part).cloned());
        }
        drop(parts);
        let whole = pool.take(3 << 20, 0).unwrap();
        whole.read(2 << 20, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == 0), "what was there is gone");
        assert_eq!(pool.take(0, 0).err(), Some(DeviceError::ZeroSize));
    }
}
