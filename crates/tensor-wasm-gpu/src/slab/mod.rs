//! The memory a server and its device worker share: job ring, cells, completion flags, staging and pinned memory, in one
//! memfd that both map and that the worker registers with the device once.
//!
//! Everything small in it is read and written as atomics, so a torn or hostile value is a wrong number, never undefined
//! behaviour; bulk bytes are copied in and out by the two methods at the end. Who may touch which bytes when is settled
//! by the protocol: a cell or a staging block belongs to whoever was handed it last through the ring or a flag.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::number::index;
use crate::sync::doorbell::Doorbell;
use crate::sync::ring::Ring;

/// Jobs that may be under way at once, all tenants together.
pub(crate) const CELLS: usize = 2048;

/// Entries of the ring: one for every cell, and as many for what else the worker is told. It is never full of cells.
const RING_ENTRIES: usize = 4 * CELLS;

/// Tenants of one device, and the control stream.
pub(crate) const SEATS: usize = 512;

/// Things that are done in order: the control stream, a stream per tenant, and then a lane for each of them, on which
/// modules are loaded.
pub(crate) const STREAMS: usize = 2 * SEATS;

/// Words of a cell: the job, its payload, and the answer.
pub(crate) const CELL_WORDS: usize = JOB_WORDS + PAYLOAD_BYTES_MAX / 8 + ANSWER_WORDS;
pub(crate) const JOB_WORDS: usize = 16;
pub(crate) const ANSWER_WORDS: usize = 8 + TEXT_BYTES_MAX / 8;

/// Kernel parameters, kernel names and small copies travel inside a cell. CUDA allows a kernel 4 KiB of parameters.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 4096;

/// The text of an error: a compiler's first complaint fits.
pub(crate) const TEXT_BYTES_MAX: usize = 1024;

/// Large regions begin at a multiple of this, the size of a huge page.
pub(crate) const REGION_ALIGN: u64 = 2 << 20;

const MAGIC: u64 = u64::from_le_bytes(*b"twgpu\0\0\x01");

/// Byte offsets of the header. Words that different sides write are a cache line apart.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const STAGING_BYTES: usize = 8;
    pub(super) const PINNED_BYTES: usize = 16;
    pub(super) const HEARTBEAT: usize = 64;
    pub(super) const STATE: usize = 72;
    pub(super) const RING_HEAD: usize = 128;
    pub(super) const RING_TAIL: usize = 192;
    pub(super) const WORKER_BELL: usize = 256;
    pub(super) const DONE_BELL: usize = 320;
    pub(super) const INFO: usize = 384;
    pub(super) const FLAGS: usize = 4096;
    pub(super) const RING: usize = FLAGS + super::STREAMS * super::LINE;
    pub(super) const CELLS: usize = RING + super::RING_ENTRIES * 4;
    pub(super) const END: usize = CELLS + super::CELLS * super::CELL_WORDS * 8;
}

/// A flag has a cache line to itself: the device writes it while others are read.
const LINE: usize = 64;

/// Words of the header that describe the device.
pub(crate) const INFO_WORDS: usize = 160;

const _: () = assert!(RING_ENTRIES.is_power_of_two());
const _: () = assert!(at::INFO + INFO_WORDS * 8 <= at::FLAGS);
const _: () = assert!(at::RING.is_multiple_of(8) && at::CELLS.is_multiple_of(8));

/// How a worker is doing, as it says itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum WorkerState {
    Starting = 0,
    Ready = 1,
    /// It could not open its device; the reason is in the info words.
    Failed = 2,
    /// The device is broken for this process; only a new one helps.
    Lost = 3,
}

/// How much of what a slab has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlabPlan {
    /// For copies to and from ordinary memory.
    pub staging_bytes: u64,
    /// For memories that the device reads and writes in place.
    pub pinned_bytes: u64,
}

pub(crate) struct Slab {
    base: NonNull<u8>,
    len: usize,
    plan: SlabPlan,
    file: OwnedFd,
}

// SAFETY: the mapping is shared memory that lives as long as the `Slab`; every access through it is atomic or, for bulk
// bytes, ordered by the protocol described above.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    pub(crate) fn create(plan: SlabPlan) -> Result<Slab, String> {
        let plan = SlabPlan {
            staging_bytes: plan.staging_bytes.next_multiple_of(REGION_ALIGN),
            pinned_bytes: plan.pinned_bytes.next_multiple_of(REGION_ALIGN),
        };
        // Huge pages where the operator has set some aside (`vm.nr_hugepages`): a device copies to and from them a twentieth
        // faster, and registers them fifteen times faster.
        Slab::create_with(plan, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)
            .or_else(|_| Slab::create_with(plan, MemfdFlags::empty()))
    }

    fn create_with(plan: SlabPlan, pages: MemfdFlags) -> Result<Slab, String> {
        let why = |what: &str, e: rustix::io::Errno| format!("{what}: {e}");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | pages;
        let file = rustix::fs::memfd_create("tensor-wasm-device", flags).map_err(|e| why("memfd_create", e))?;
        rustix::fs::ftruncate(&file, total_bytes(plan)).map_err(|e| why("ftruncate", e))?;
        // Nobody can shrink it under the other side, which would turn a read into a crash.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| why("sealing", e))?;
        let slab = Slab::map(file, plan)?;
        slab.word(at::STAGING_BYTES).store(plan.staging_bytes, Ordering::Relaxed);
        slab.word(at::PINNED_BYTES).store(plan.pinned_bytes, Ordering::Relaxed);
        slab.word(at::MAGIC).store(MAGIC, Ordering::Release);
        Ok(slab)
    }

    /// Maps a slab that another process made.
    pub(crate) fn open(file: OwnedFd) -> Result<Slab, String> {
        let len = rustix::fs::fstat(&file).map_err(|e| format!("fstat: {e}"))?.st_size;
        let len = u64::try_from(len).unwrap_or(0);
        if len < at::END as u64 {
            return Err(format!("it is no device slab: it has {len} bytes"));
        }
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|e| format!("its seals cannot be read: {e}"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err("it is no device slab: it may shrink".to_owned());
        }
        // The regions' sizes are in the header; map that much first.
        let smallest = SlabPlan { staging_bytes: 0, pinned_bytes: 0 };
        let header = Slab::map(file.try_clone().map_err(|e| e.to_string())?, smallest)?;
        if header.word(at::MAGIC).load(Ordering::Acquire) != MAGIC {
            return Err("it is no device slab, or one of another version".to_owned());
        }
        let plan = SlabPlan {
            staging_bytes: header.word(at::STAGING_BYTES).load(Ordering::Relaxed),
            pinned_bytes: header.word(at::PINNED_BYTES).load(Ordering::Relaxed),
        };
        let regions = plan.staging_bytes.checked_add(plan.pinned_bytes).ok_or("its regions are too large")?;
        if regions > len || total_bytes(plan) != len {
            return Err(format!("it has {len} bytes, which its header does not explain"));
        }
        Slab::map(file, plan)
    }

    fn map(file: OwnedFd, plan: SlabPlan) -> Result<Slab, String> {
        let len = usize::try_from(total_bytes(plan)).map_err(|_| "too large for this machine".to_owned())?;
        // SAFETY: a new mapping at an address of the kernel's choosing aliases nothing of ours.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                // Reserved: huge pages that are not there are missed now, not at the first touch.
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )
        };
        let base = base.map_err(|e| format!("mmap of {len} bytes: {e}"))?;
        let base = NonNull::new(base.cast::<u8>()).ok_or("mmap returned nothing")?;
        Ok(Slab { base, len, plan, file })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn plan(&self) -> SlabPlan {
        self.plan
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of an offset in this process.
    pub(crate) fn address(&self, offset: u64) -> *mut u8 {
        assert!(offset <= self.len as u64, "{offset} is not in the slab");
        // SAFETY: within the mapping, or one past its end, by the line above.
        unsafe { self.base.as_ptr().add(index(offset)) }
    }

    /// Where the staging region begins.
    pub(crate) fn staging(&self) -> u64 {
        (at::END as u64).next_multiple_of(REGION_ALIGN)
    }

    /// Where the pinned region begins.
    pub(crate) fn pinned(&self) -> u64 {
        self.staging() + self.plan.staging_bytes
    }

    /// Takes memory for the large regions now, in huge pages where the system has them: registering it with a device is
    /// then some fifteen times quicker.
    pub(crate) fn populate(&self) {
        let from = self.staging();
        let len = self.len - index(from);
        // SAFETY: advice about our own mapping, none of which changes what its bytes are. Refusal only costs time later.
        unsafe {
            let _ = rustix::mm::madvise(self.address(from).cast(), len, Advice::LinuxHugepage);
            let _ = rustix::mm::madvise(self.address(from).cast(), len, Advice::LinuxPopulateWrite);
        }
    }

    pub(crate) fn ring(&self) -> Ring<'_> {
        Ring::new(self.half(at::RING_HEAD), self.half(at::RING_TAIL), self.halves(at::RING, RING_ENTRIES))
    }

    /// Rung when the worker has something to do.
    pub(crate) fn worker_bell(&self) -> Doorbell<'_> {
        Doorbell(self.half(at::WORKER_BELL))
    }

    /// Rung when the server has something to look at.
    pub(crate) fn done_bell(&self) -> Doorbell<'_> {
        Doorbell(self.half(at::DONE_BELL))
    }

    pub(crate) fn heartbeat(&self) -> &AtomicU64 {
        self.word(at::HEARTBEAT)
    }

    pub(crate) fn state(&self) -> WorkerState {
        match self.half(at::STATE).load(Ordering::Acquire) {
            0 => WorkerState::Starting,
            1 => WorkerState::Ready,
            2 => WorkerState::Failed,
            _ => WorkerState::Lost,
        }
    }

    pub(crate) fn set_state(&self, state: WorkerState) {
        self.half(at::STATE).store(state as u32, Ordering::Release);
    }

    /// The number of the last job of a stream that is done.
    pub(crate) fn flag(&self, stream: usize) -> &AtomicU32 {
        assert!(stream < STREAMS, "stream {stream}");
        self.half(at::FLAGS + stream * LINE)
    }

    pub(crate) fn flag_offset(stream: usize) -> u64 {
        (at::FLAGS + stream * LINE) as u64
    }

    pub(crate) fn info(&self) -> &[AtomicU64] {
        self.words(at::INFO, INFO_WORDS)
    }

    pub(crate) fn cell(&self, cell: u32) -> &[AtomicU64] {
        assert!((cell as usize) < CELLS, "cell {cell}");
        self.words(at::CELLS + cell as usize * CELL_WORDS * 8, CELL_WORDS)
    }

    /// Has the job of a cell fetched into this core's cache.
    pub(crate) fn prefetch(&self, cell: u32) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let words = self.cell(cell);
            // SAFETY: a hint about an address that is valid; it reads nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(words.as_ptr().cast());
                _mm_prefetch::<_MM_HINT_T0>(words[8..].as_ptr().cast());
                _mm_prefetch::<_MM_HINT_T0>(words[JOB_WORDS..].as_ptr().cast());
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = cell;
    }

    /// Where the payload of a cell lies, for copies of a few bytes.
    pub(crate) fn payload_offset(cell: u32) -> u64 {
        (at::CELLS + (cell as usize * CELL_WORDS + JOB_WORDS) * 8) as u64
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        &self.words(offset, 1)[0]
    }

    fn half(&self, offset: usize) -> &AtomicU32 {
        &self.halves(offset, 1)[0]
    }

    fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        assert!(offset.is_multiple_of(8) && offset + count * 8 <= at::END);
        // SAFETY: aligned and within the mapping by the line above (the mapping is at least `at::END` long and page-aligned);
        // the memory is only ever accessed atomically, here and by the other side.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast::<AtomicU64>(), count) }
    }

    fn halves(&self, offset: usize, count: usize) -> &[AtomicU32] {
        assert!(offset.is_multiple_of(4) && offset + count * 4 <= at::END);
        // SAFETY: as in `words`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast::<AtomicU32>(), count) }
    }

    /// Copies bytes into the slab. The range belongs to the caller by the protocol.
    pub(crate) fn copy_in(&self, offset: u64, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: both ranges are valid (checked above); the slab's is the caller's until it hands it on, and a private slice
        // does not overlap a shared mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address(offset), bytes.len()) }
    }

    /// Copies bytes out of the slab. The range belongs to the caller by the protocol.
    pub(crate) fn copy_out(&self, offset: u64, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        // SAFETY: as in `copy_in`.
        unsafe { std::ptr::copy_nonoverlapping(self.address(offset), bytes.as_mut_ptr(), bytes.len()) }
    }

    fn check(&self, offset: u64, len: usize) {
        let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(len));
        assert!(end.is_some_and(|end| end <= self.len), "{len} bytes at {offset} are not in the slab");
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing borrowed from it outlives `self`.
        unsafe {
            let _ = rustix::mm::munmap(self.base.as_ptr().cast(), self.len);
        }
    }
}

fn total_bytes(plan: SlabPlan) -> u64 {
    (at::END as u64).next_multiple_of(REGION_ALIGN) + plan.staging_bytes + plan.pinned_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::number::half;

    #[test]
    fn both_sides_see_the_same_bytes_and_strangers_are_refused() {
        let slab = Slab::create(SlabPlan { staging_bytes: 1, pinned_bytes: 0 }).unwrap();
        assert_eq!(slab.plan().staging_bytes, REGION_ALIGN);
        let other = Slab::open(slab.fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(other.plan(), slab.plan());
        slab.copy_in(slab.staging() + 5, b"hello");
        let mut seen = [0; 5];
        other.copy_out(other.staging() + 5, &mut seen);
        assert_eq!(&seen, b"hello");
        slab.cell(half(CELLS) - 1)[CELL_WORDS - 1].store(7, Ordering::Relaxed);
        assert_eq!(other.cell(half(CELLS) - 1)[CELL_WORDS - 1].load(Ordering::Relaxed), 7);
        other.flag(STREAMS - 1).store(9, Ordering::Relaxed);
        assert_eq!(slab.flag(STREAMS - 1).load(Ordering::Relaxed), 9);

        let stranger = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&stranger, slab.len() as u64).unwrap();
        assert!(Slab::open(stranger.try_clone().unwrap()).err().unwrap().contains("shrink"));
        rustix::fs::fcntl_add_seals(&stranger, SealFlags::SHRINK).unwrap();
        assert!(Slab::open(stranger).err().unwrap().contains("version"));
        let small = rustix::fs::memfd_create("x", MemfdFlags::empty()).unwrap();
        assert!(Slab::open(small).err().unwrap().contains("0 bytes"));
    }

    #[test]
    #[should_panic(expected = "not in the slab")]
    fn bulk_copies_stay_inside() {
        let slab = Slab::create(SlabPlan { staging_bytes: 0, pinned_bytes: 0 }).unwrap();
        slab.copy_in(slab.len() as u64 - 2, b"abc");
    }
}
