//! The memory a server and its device worker share: job ring, cells, completion flags, then regions by name (staging,
//! pinned memory, and what else was asked for), in one memfd that both map and that the worker registers with the
//! device once.
//!
//! Where a region is, is said by a table in the header, which the side that maps the slab reads once and checks before
//! it maps the rest: a table that is wrong is an error.
//!
//! Everything small in it is read and written as atomics, so a torn or hostile value is a wrong number, never
//! undefined behaviour; bulk bytes are copied in and out by the two methods at the end. Who may touch which bytes when
//! is settled by the protocol: a cell or a staging block belongs to whoever was handed it last through the ring or a
//! flag.

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
pub(crate) const TENANTS: usize = 512;

/// Streams that tenants share out among their instances, beyond the one that each has from the beginning. They are
/// entries of a table and an order; a driver has fewer, which they share. The hardware runs 128 kernels at once.
pub(crate) const POOL_STREAMS: usize = 512;

/// Things that are done in order: the control stream, the first stream of each tenant, then a lane for each of them,
/// on which modules are loaded, then the pool.
pub(crate) const STREAMS: usize = 2 * TENANTS + POOL_STREAMS;

/// The first stream of the pool.
pub(crate) const POOL_FIRST: usize = 2 * TENANTS;

/// The lane of the tenant whose first stream this is.
pub(crate) const fn lane_of(home: usize) -> usize {
    TENANTS + home
}

pub(crate) const fn is_lane(stream: usize) -> bool {
    stream >= TENANTS && stream < POOL_FIRST
}

/// Resident kernels at once, of all tenants: each takes a stream, and a part of the device for as long as it stays.
pub(crate) const RESIDENTS: usize = 64;

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

/// Regions of a slab.
pub const REGIONS_MAX: usize = 16;

/// All regions together: more than any machine has pinned memory for.
pub const REGIONS_BYTES_MAX: u64 = 1 << 40;

/// A region's name: so many letters, digits and dashes.
pub const REGION_NAME_MAX: usize = 16;

/// Regions that every slab has.
pub(crate) const STAGING: &str = "staging";
pub(crate) const PINNED: &str = "pinned";

const MAGIC: u64 = u64::from_le_bytes(*b"twgpu\0\0\x02");

/// Byte offsets of the header. Words that different sides write are a cache line apart.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const REGION_COUNT: usize = 8;
    pub(super) const HEARTBEAT: usize = 64;
    pub(super) const STATE: usize = 72;
    pub(super) const RING_HEAD: usize = 128;
    pub(super) const RING_TAIL: usize = 192;
    pub(super) const WORKER_BELL: usize = 256;
    pub(super) const DONE_BELL: usize = 320;
    pub(super) const INFO: usize = 384;
    pub(super) const REGIONS: usize = 2048;
    pub(super) const FLAGS: usize = 4096;
    pub(super) const RESIDENTS: usize = FLAGS + super::STREAMS * super::LINE;
    pub(super) const RING: usize = RESIDENTS + super::RESIDENTS * super::RESIDENT_BYTES;
    pub(super) const CELLS: usize = RING + super::RING_ENTRIES * 4;
    pub(super) const END: usize = CELLS + super::CELLS * super::CELL_WORDS * 8;
}

/// A flag has a cache line to itself: the device writes it while others are read.
const LINE: usize = 64;

/// A resident kernel's words: its heartbeat, which the device writes, and a line further its stop word, which the
/// server and the worker do.
const RESIDENT_BYTES: usize = 2 * LINE;

/// What a stop word says: to stay, to end, or to make way and be launched again.
pub(crate) const STOP_NO: u64 = 0;
pub(crate) const STOP_END: u64 = 1;
pub(crate) const STOP_LEAVE: u64 = 2;

/// Words of an entry of the region table: the name, where it begins, how large it is.
const REGION_WORDS: usize = REGION_NAME_MAX / 8 + 2;

/// Words of the header that describe the device.
pub(crate) const INFO_WORDS: usize = 160;

const _: () = assert!(RING_ENTRIES.is_power_of_two());
const _: () = assert!(at::INFO + INFO_WORDS * 8 <= at::REGIONS);
const _: () = assert!(at::REGIONS + REGIONS_MAX * REGION_WORDS * 8 <= at::FLAGS);
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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlabPlan {
    /// For copies to and from ordinary memory.
    pub staging_bytes: u64,
    /// For memories that the device reads and writes in place.
    pub pinned_bytes: u64,
    /// Further regions, by their names.
    pub regions: Vec<(String, u64)>,
}

/// A region of a slab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Region {
    pub name: String,
    pub offset: u64,
    pub bytes: u64,
}

pub(crate) struct Slab {
    base: NonNull<u8>,
    len: usize,
    regions: Vec<Region>,
    file: OwnedFd,
}

/// Whether a region may be called so.
fn is_region_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=REGION_NAME_MAX).contains(&name.len()) && name.bytes().all(is_plain)
}

/// Where the first region begins.
const REGIONS_FROM: u64 = (at::END as u64).next_multiple_of(REGION_ALIGN);

/// Lays a plan's regions out, one after the other.
fn lay_out(plan: &SlabPlan) -> Result<Vec<Region>, String> {
    let own = [(STAGING, plan.staging_bytes), (PINNED, plan.pinned_bytes)];
    let further = plan.regions.iter().map(|(name, bytes)| (name.as_str(), *bytes));
    let mut regions: Vec<Region> = Vec::new();
    let mut end = REGIONS_FROM;
    for (name, bytes) in own.into_iter().chain(further) {
        let bytes = bytes.checked_next_multiple_of(REGION_ALIGN).filter(|bytes| *bytes <= REGIONS_BYTES_MAX);
        let bytes = bytes.ok_or_else(|| format!("region {name:?} is larger than {REGIONS_BYTES_MAX} bytes"))?;
        regions.push(Region { name: name.to_owned(), offset: end, bytes });
        end += bytes;
    }
    check_regions(&regions)?;
    Ok(regions)
}

/// Whether regions are what a slab may have: few, well named, each name once, aligned, one after the other without a
/// gap. Returns where the last ends.
fn check_regions(regions: &[Region]) -> Result<u64, String> {
    if regions.len() > REGIONS_MAX {
        return Err(format!("it has {} regions, and at most {REGIONS_MAX} are possible", regions.len()));
    }
    let mut end = REGIONS_FROM;
    for (n, Region { name, offset, bytes }) in regions.iter().enumerate() {
        if !is_region_name(name) {
            return Err(format!("{name:?} is no name of a region: 1 to {REGION_NAME_MAX} of a-z, 0-9 and -"));
        }
        if regions[..n].iter().any(|other| other.name == *name) {
            return Err(format!("two of its regions are called {name:?}"));
        }
        if *offset != end || !bytes.is_multiple_of(REGION_ALIGN) || *bytes > REGIONS_BYTES_MAX {
            return Err(format!("region {name:?} of {bytes} bytes at {offset} does not follow the one before"));
        }
        end += bytes;
    }
    if end > REGIONS_FROM + REGIONS_BYTES_MAX {
        return Err(format!("its regions have more than {REGIONS_BYTES_MAX} bytes together"));
    }
    Ok(end)
}

// SAFETY: the mapping is shared memory that lives as long as the `Slab`; every access through it is atomic or, for bulk
// bytes, ordered by the protocol described above.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    pub(crate) fn create(plan: &SlabPlan) -> Result<Slab, String> {
        let regions = lay_out(plan)?;
        // Huge pages where the operator has set some aside (`vm.nr_hugepages`): a device copies to and from them a
        // twentieth faster, and registers them fifteen times faster.
        Slab::create_with(&regions, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)
            .or_else(|_| Slab::create_with(&regions, MemfdFlags::empty()))
    }

    fn create_with(regions: &[Region], pages: MemfdFlags) -> Result<Slab, String> {
        let why = |what: &str, e: rustix::io::Errno| format!("{what}: {e}");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | pages;
        let file = rustix::fs::memfd_create("tensor-wasm-device", flags).map_err(|e| why("memfd_create", e))?;
        rustix::fs::ftruncate(&file, check_regions(regions)?).map_err(|e| why("ftruncate", e))?;
        // Nobody can shrink it under the other side, which would turn a read into a crash.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| why("sealing", e))?;
        let slab = Slab::map(file, regions.to_vec())?;
        slab.put_regions(regions);
        slab.word(at::MAGIC).store(MAGIC, Ordering::Release);
        Ok(slab)
    }

    fn put_regions(&self, regions: &[Region]) {
        self.word(at::REGION_COUNT).store(regions.len() as u64, Ordering::Relaxed);
        for (n, region) in regions.iter().enumerate() {
            let mut name = [0; REGION_NAME_MAX];
            name[..region.name.len()].copy_from_slice(region.name.as_bytes());
            let words = name.chunks_exact(8).map(|part| part.try_into().map_or(0, u64::from_le_bytes));
            let entry = self.words(at::REGIONS + n * REGION_WORDS * 8, REGION_WORDS);
            for (word, value) in entry.iter().zip(words.chain([region.offset, region.bytes])) {
                word.store(value, Ordering::Relaxed);
            }
        }
    }

    /// The table as it is there, not checked.
    fn get_regions(&self) -> Result<Vec<Region>, String> {
        let count = self.word(at::REGION_COUNT).load(Ordering::Relaxed);
        let count = usize::try_from(count).ok().filter(|count| *count <= REGIONS_MAX);
        let count = count.ok_or_else(|| format!("it has more than {REGIONS_MAX} regions"))?;
        let region = |n: usize| {
            let entry = self.words(at::REGIONS + n * REGION_WORDS * 8, REGION_WORDS);
            let value = |n: usize| entry[n].load(Ordering::Relaxed);
            let name: Vec<u8> = (0..REGION_NAME_MAX / 8).flat_map(|n| value(n).to_le_bytes()).collect();
            let len = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
            let name = String::from_utf8_lossy(&name[..len]).into_owned();
            Region { name, offset: value(REGION_WORDS - 2), bytes: value(REGION_WORDS - 1) }
        };
        Ok((0..count).map(region).collect())
    }

    /// Maps a slab that another process made.
    pub(crate) fn open(file: OwnedFd) -> Result<Slab, String> {
        let len = rustix::fs::fstat(&file).map_err(|e| format!("fstat: {e}"))?.st_size;
        let len = u64::try_from(len).unwrap_or(0);
        if len < REGIONS_FROM {
            return Err(format!("it is no device slab: it has {len} bytes"));
        }
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|e| format!("its seals cannot be read: {e}"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err("it is no device slab: it may shrink".to_owned());
        }
        // Which regions it has is in the header; map that much first.
        let header = Slab::map(file.try_clone().map_err(|e| e.to_string())?, Vec::new())?;
        if header.word(at::MAGIC).load(Ordering::Acquire) != MAGIC {
            return Err("it is no device slab, or one of another version".to_owned());
        }
        let regions = header.get_regions()?;
        if check_regions(&regions)? != len {
            return Err(format!("it has {len} bytes, which its regions do not explain"));
        }
        Slab::map(file, regions)
    }

    fn map(file: OwnedFd, regions: Vec<Region>) -> Result<Slab, String> {
        let len = usize::try_from(check_regions(&regions)?).map_err(|_| "too large for this machine".to_owned())?;
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
        Ok(Slab { base, len, regions, file })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A region by its name.
    pub(crate) fn region(&self, name: &str) -> Option<&Region> {
        self.regions.iter().find(|region| region.name == name)
    }

    /// A word of a region, if it is one.
    pub(crate) fn region_word(&self, region: &Region, offset: u64) -> Option<&AtomicU64> {
        let is_inside = offset.is_multiple_of(8) && offset.checked_add(8)? <= region.bytes;
        let at = region.offset.checked_add(offset).filter(|at| is_inside && at + 8 <= self.len as u64)?;
        // SAFETY: aligned (regions begin at multiples of `REGION_ALIGN`) and within the mapping by the lines above.
        Some(unsafe { &*self.address(at).cast::<AtomicU64>() })
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

    /// Where a region begins, and its bytes; none of them if there is no such region.
    pub(crate) fn region_range(&self, name: &str) -> (u64, u64) {
        self.region(name).map_or((REGIONS_FROM, 0), |region| (region.offset, region.bytes))
    }

    /// A resident kernel's heartbeat.
    pub(crate) fn beat(&self, resident: usize) -> &AtomicU64 {
        self.word(index(Slab::beat_offset(resident)))
    }

    /// What tells a resident kernel to leave, once it is not zero.
    pub(crate) fn stop(&self, resident: usize) -> &AtomicU64 {
        self.word(index(Slab::stop_offset(resident)))
    }

    pub(crate) fn beat_offset(resident: usize) -> u64 {
        assert!(resident < RESIDENTS, "resident {resident}");
        (at::RESIDENTS + resident * RESIDENT_BYTES) as u64
    }

    pub(crate) fn stop_offset(resident: usize) -> u64 {
        Slab::beat_offset(resident) + LINE as u64
    }

    /// Takes memory for the large regions now, in huge pages where the system has them: registering it with a device is
    /// then some fifteen times quicker.
    pub(crate) fn populate(&self) {
        let from = REGIONS_FROM;
        let len = self.len - index(from);
        // SAFETY: advice about our own mapping, none of which changes what its bytes are. Refusal only costs time
        // later.
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
        // SAFETY: aligned and within the mapping by the line above (the mapping is at least `at::END` long and
        // page-aligned); the memory is only ever accessed atomically, here and by the other side.
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
        // SAFETY: both ranges are valid (checked above); the slab's is the caller's until it hands it on, and a
        // private slice does not overlap a shared mapping.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::number::half;

    #[test]
    fn both_sides_see_the_same_bytes_and_strangers_are_refused() {
        let slab = Slab::create(&SlabPlan { staging_bytes: 1, ..SlabPlan::default() }).unwrap();
        assert_eq!(slab.region_range(STAGING), (REGIONS_FROM, REGION_ALIGN));
        let other = Slab::open(slab.fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(other.regions, slab.regions);
        slab.copy_in(REGIONS_FROM + 5, b"hello");
        let mut seen = [0; 5];
        other.copy_out(REGIONS_FROM + 5, &mut seen);
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
    fn further_regions_are_seen_by_both_sides_and_plans_that_cannot_be_are_refused() {
        let region = |name: &str, bytes| (name.to_owned(), bytes);
        let plan = |regions: Vec<(String, u64)>| SlabPlan { staging_bytes: 2 << 20, pinned_bytes: 0, regions };
        let slab = Slab::create(&plan(vec![region("actor-rings", 5 << 20), region("more", 1)])).unwrap();
        let other = Slab::open(slab.fd().try_clone_to_owned().unwrap()).unwrap();
        let rings = other.region("actor-rings").unwrap();
        assert_eq!((rings.bytes, other.region("more").unwrap().bytes), (6 << 20, 2 << 20));
        assert_eq!(rings.offset + rings.bytes, other.region("more").unwrap().offset);
        assert!(other.region("nothing").is_none());
        let own = slab.region("actor-rings").unwrap();
        slab.region_word(own, 64).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(other.region_word(rings, 64).unwrap().load(Ordering::Relaxed), 7);
        for bad in [1, 4, rings.bytes, rings.bytes - 4, u64::MAX - 7] {
            assert!(other.region_word(rings, bad).is_none(), "{bad}");
        }
        for (bad, why) in [
            (vec![region("", 1)], "no name"),
            (vec![region("Rings", 1)], "no name"),
            (vec![region("a-name-that-is-too-long", 1)], "no name"),
            (vec![region("staging", 1)], "two of its regions"),
            (vec![region("huge", u64::MAX)], "larger than"),
            (vec![region("large", REGIONS_BYTES_MAX)], "together"),
            ((0..REGIONS_MAX).map(|n| region(&format!("r{n}"), 0)).collect(), "at most"),
        ] {
            let refused = Slab::create(&plan(bad)).err().unwrap();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn a_table_that_is_wrong_is_an_error() {
        let plan = SlabPlan { staging_bytes: 2 << 20, pinned_bytes: 2 << 20, ..SlabPlan::default() };
        let open = |damage: &dyn Fn(&Slab)| {
            let slab = Slab::create(&plan).unwrap();
            damage(&slab);
            Slab::open(slab.fd().try_clone_to_owned().unwrap()).err()
        };
        assert_eq!(open(&|_| ()), None);
        let put = |word: usize, value: u64| move |slab: &Slab| slab.word(word).store(value, Ordering::Relaxed);
        let entry = |n: usize, word: usize| at::REGIONS + (n * REGION_WORDS + word) * 8;
        for (word, value) in [
            (at::REGION_COUNT, 0),
            (at::REGION_COUNT, 1),
            (at::REGION_COUNT, 3),
            (at::REGION_COUNT, u64::MAX),
            (entry(0, 0), 0),
            (entry(0, 0), u64::MAX),
            (entry(1, 0), u64::from_le_bytes(*b"staging\0")),
            (entry(0, 2), 0),
            (entry(0, 2), u64::MAX),
            (entry(1, 2), REGIONS_FROM),
            (entry(0, 3), 0),
            (entry(0, 3), 4 << 20),
            (entry(1, 3), u64::MAX),
            (entry(1, 3), (2 << 20) + 8),
        ] {
            assert!(open(&put(word, value)).is_some(), "{value:#x} at {word}");
        }
    }

    #[test]
    #[should_panic(expected = "not in the slab")]
    fn bulk_copies_stay_inside() {
        let slab = Slab::create(&SlabPlan::default()).unwrap();
        slab.copy_in(slab.len() as u64 - 2, b"abc");
    }
}
