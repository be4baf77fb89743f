//! Memory of the CPU device: what was reserved for tenants, and the slab.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::RwLock;

use crate::device::region::SharedWords;
use crate::slab::Slab;

/// The memory of a CPU device: everything that was reserved, and the slab. All of it is mapped shared, so that it can
/// be mapped again somewhere else.
pub struct HostMemory {
    slab: Arc<Slab>,
    /// Sizes, by address.
    regions: RwLock<BTreeMap<u64, u64>>,
}

pub(crate) const PAGE: u64 = 4096;

impl HostMemory {
    pub(crate) fn new(slab: Arc<Slab>) -> HostMemory {
        HostMemory { slab, regions: RwLock::default() }
    }

    pub(crate) fn reserve(&self, bytes: u64) -> Option<u64> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let len = bytes.checked_next_multiple_of(PAGE).and_then(|bytes| usize::try_from(bytes).ok())?;
        if len == 0 {
            return None;
        }
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED) };
        let address = address.ok()? as u64;
        self.regions.write().insert(address, len as u64);
        Some(address)
    }

    /// Gives back what was reserved; nobody uses it any more.
    pub(crate) fn release(&self, address: u64) {
        let Some(bytes) = self.regions.write().remove(&address) else { return };
        // Mapped, so it is a length of this process.
        let len = usize::try_from(bytes).unwrap_or(0);
        // SAFETY: mapped by `reserve`, and taken out of the regions just now, so that it is unmapped once.
        let _ = unsafe { rustix::mm::munmap(address as *mut c_void, len) };
    }

    fn is_inside(&self, regions: &BTreeMap<u64, u64>, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let is_inside_slab = self.is_slab(address) && end <= self.slab.address(0) as u64 + self.slab.len() as u64;
        let region = regions.range(..=address).next_back();
        is_inside_slab || region.is_some_and(|(start, size)| end <= start + size)
    }

    /// Whether an address is the slab's, which is shared out to others again and again.
    pub fn is_slab(&self, address: u64) -> bool {
        let start = self.slab.address(0) as u64;
        (start..start + self.slab.len() as u64).contains(&address)
    }

    /// Words of the slab at an address, for a kernel that stays and shares them with the server; none if they do not
    /// all lie there, or not where words do.
    pub fn slab_words(&self, address: u64, count: usize) -> Option<SharedWords> {
        let offset = address.checked_sub(self.slab.address(0) as u64)?;
        let end = u64::try_from(count).ok()?.checked_mul(8)?.checked_add(offset)?;
        if count == 0 || !offset.is_multiple_of(8) || end > self.slab.len() as u64 {
            return None;
        }
        // SAFETY: inside the mapping and aligned by the lines above; the mapping begins at a page.
        let first = unsafe { &*self.slab.address(offset).cast::<AtomicU64>() };
        Some(SharedWords::new(self.slab.clone(), first, count))
    }

    /// Copies bytes out; false if there is no such memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let regions = self.regions.read();
        if !self.is_inside(&regions, address, bytes.len() as u64) {
            return false;
        }
        // SAFETY: inside a live mapping, which stays while the lock is held. Who writes to it meanwhile is a kernel or
        // a tenant whose own bytes they are: bytes of any value are fine.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        true
    }

    /// Copies bytes in; false if there is no such memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let regions = self.regions.read();
        if !self.is_inside(&regions, address, bytes.len() as u64) {
            return false;
        }
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        true
    }

    /// Maps whole pages once more, at another place.
    ///
    /// # Safety
    ///
    /// So many bytes from `at` on are address space that belongs to the caller and that nothing refers to.
    pub unsafe fn alias(&self, address: u64, bytes: u64, at: *mut u8) -> io::Result<()> {
        let regions = self.regions.read();
        let len = usize::try_from(bytes).map_err(io::Error::other)?;
        if !address.is_multiple_of(PAGE) || !bytes.is_multiple_of(PAGE) || !self.is_inside(&regions, address, bytes) {
            return Err(io::Error::other("there is no such memory"));
        }
        // SAFETY: the source is a live shared mapping: of length 0 it is not moved but mapped again. The target is the
        // caller's to give.
        unsafe {
            rustix::mm::mremap_fixed(address as *mut c_void, 0, len, rustix::mm::MremapFlags::MAYMOVE, at.cast())
        }?;
        Ok(())
    }

    /// Takes away what is mapped there; an access faults.
    ///
    /// # Safety
    ///
    /// As for [`HostMemory::alias`].
    pub unsafe fn hide(bytes: u64, at: *mut u8) -> io::Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let len = usize::try_from(bytes).map_err(io::Error::other)?;
        // SAFETY: the caller's address space to give.
        unsafe { mmap_anonymous(at.cast(), len, ProtFlags::empty(), flags) }?;
        Ok(())
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let all: Vec<u64> = self.regions.read().keys().copied().collect();
        all.into_iter().for_each(|address| self.release(address));
    }
}

/// The machine's memory, total and available.
pub(super) fn machine() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let find = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
    };
    (find("MemTotal:").unwrap_or(0), find("MemAvailable:").unwrap_or(0))
}
