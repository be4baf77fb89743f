//! A tenant's device memory: size classes over chunks that the worker reserved, handles with generations, and the
//! quota.
//!
//! Pure bookkeeping under one lock, without a device: the worker is asked only when a chunk is missing, so allocating
//! and freeing from a warm arena are a few operations on free lists. Blocks are never shared between tenants.
//!
//! A block remembers the jobs that used it last, on each stream, through being freed and handed out again: so a freed
//! block may be handed out at once, and the first job of its next owner is sent to begin after those of the last,
//! where they are on another stream and not over. The same order holds for two uses of one buffer on different
//! streams, unless both only read.
//!
//! A block is zeroed before its first use, not when it is allocated: what is overwritten as a whole never needs it.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use slab::Slab as Slots;

use crate::error::DeviceError;
use crate::number::{half, index};
use crate::queue::link::StreamUse;

/// Four classes per doubling: a block is at most a quarter larger than what was asked for, from a kilobyte on.
const CLASSES: usize = 4 * 33 + 1;

/// Blocks begin at multiples of this, as kernels expect of an allocation.
const BLOCK_ALIGN: u64 = 256;

/// Chunks grow with the tenant, from the first to the second. Larger blocks get a chunk of their own.
const CHUNK_BYTES_MIN: u64 = 2 << 20;
const CHUNK_BYTES_MAX: u64 = 64 << 20;
const OWN_CHUNK_BYTES: u64 = 16 << 20;

/// Bits of a handle, from the top: tenant, generation of the device's worker, generation of the slot, slot.
const TENANT_BITS: u32 = 9;
const WORKER_BITS: u32 = 13;
const GENERATION_BITS: u32 = 20;
const INDEX_BITS: u32 = 22;
const HANDLES_MAX: usize = 1 << INDEX_BITS;
const _: () = assert!(TENANT_BITS + WORKER_BITS + GENERATION_BITS + INDEX_BITS == 64);
const _: () = assert!(crate::slab::TENANTS <= 1 << TENANT_BITS);

/// Names a buffer of a tenant. Any number may be tried as one; a wrong one is an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block {
    address: u64,
    chunk: u32,
    class: u8,
}

/// Who used a block last.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    /// The last job that may have written it.
    write: Option<StreamUse>,
    /// Jobs that have read it since, the last on each stream.
    reads: Vec<StreamUse>,
    /// Resident jobs that use the buffer.
    held: Vec<StreamUse>,
}

/// A block that nobody has, with who used it last. The greatest is the one of the lowest address: a heap hands it out
/// first.
struct FreeBlock {
    block: Block,
    uses: Uses,
}

impl Ord for FreeBlock {
    fn cmp(&self, other: &FreeBlock) -> Ordering {
        other.block.address.cmp(&self.block.address)
    }
}

impl PartialOrd for FreeBlock {
    fn partial_cmp(&self, other: &FreeBlock) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for FreeBlock {
    fn eq(&self, other: &FreeBlock) -> bool {
        self.block.address == other.block.address
    }
}

impl Eq for FreeBlock {}

impl Uses {
    /// What a job on a stream must come after, on other streams.
    fn before(&self, stream: u32, writes: bool) -> impl Iterator<Item = StreamUse> {
        let reads = if writes { &self.reads[..] } else { &[] };
        self.write.iter().chain(reads).copied().filter(move |other| other.stream != stream)
    }

    /// A job uses it now, and begins after what it must come after.
    fn add(&mut self, own: StreamUse, writes: bool) {
        if writes {
            self.reads.clear();
            self.write = Some(own);
        } else if self.write.is_none_or(|write| write.stream != own.stream) {
            put(&mut self.reads, own);
        } else {
            // Both on one stream: the later stands for both. Whoever reads on another stream must come after the
            // write, and after this read it does.
            self.write = Some(own);
        }
    }

    /// A job uses it that does not end before it is told to, and that others need not come after.
    fn hold(&mut self, own: StreamUse) {
        put(&mut self.held, own);
    }

    fn all(self) -> impl Iterator<Item = StreamUse> {
        self.write.into_iter().chain(self.reads)
    }
}

/// The last use on each stream: one before it on the same stream is over when it is.
fn put(uses: &mut Vec<StreamUse>, own: StreamUse) {
    match uses.iter_mut().find(|other| other.stream == own.stream) {
        Some(other) => *other = own,
        None => uses.push(own),
    }
}

/// What a job does with a part of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    /// Writes all of that part before anything reads it.
    Overwrite,
    /// Reads and writes.
    Update,
}

/// A part of a buffer that a job uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub handle: Handle,
    pub offset: u64,
    pub len: u64,
    pub access: Access,
}

/// A chunk to give back.
#[derive(Debug)]
pub(crate) struct Trimmed {
    pub address: u64,
    pub bytes: u64,
    /// What must be over before it goes.
    pub uses: Vec<StreamUse>,
}

#[derive(Debug)]
struct Chunk {
    address: u64,
    bytes: u64,
    /// Bytes from here on have never been handed out.
    fresh: u64,
    blocks_used: u32,
}

#[derive(Debug, Default)]
struct Entry {
    generation: u32,
    block: Option<Block>,
    size: u64,
    needs_zero: bool,
    uses: Uses,
}

/// What an allocation takes besides a lock.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// A chunk of this size, given by `add_chunk`; then try again.
    Chunk {
        bytes: u64,
    },
    Refused(DeviceError),
}

/// A part of a buffer, found good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub address: u64,
    pub bytes: u64,
    /// The whole buffer must be zeroed before this part is used; its address and size.
    pub zero_first: Option<(u64, u64)>,
}

/// Numbers about a tenant's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// In buffers, rounded up to their classes: what the quota limits.
    pub used_bytes: u64,
    pub used_bytes_peak: u64,
    /// Taken from the device.
    pub reserved_bytes: u64,
    pub buffers: u64,
}

/// Where handles come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The tenant's stream.
    pub tenant: u32,
    /// Counts the workers of the device. Memory of an earlier one is gone.
    pub worker: u32,
}

pub(crate) struct Arena {
    tenant: String,
    origin: Origin,
    bytes_max: u64,
    /// The free blocks of each class by their addresses, with who used each last. The lowest is taken first: whoever
    /// does the same again and again then soon gets the same blocks again, and replays the graph that it recorded over
    /// them. A stack turns what was freed around, and a loop over it takes many rounds to come back to where it was.
    free: Vec<BinaryHeap<FreeBlock>>,
    chunks: Slots<Chunk>,
    /// The chunk that blocks are cut from.
    cutting: Option<usize>,
    /// Blocks of buffers that were freed and that a resident job uses.
    held: Vec<(Block, Uses)>,
    entries: Vec<Entry>,
    unused: Vec<u32>,
    stats: MemoryStats,
}

fn class_of(size: u64) -> usize {
    if size <= BLOCK_ALIGN {
        return 0;
    }
    let last = size - 1;
    let log = last.ilog2();
    (log as usize - 8) * 4 + (last >> (log - 2) & 3) as usize + 1
}

fn class_bytes(class: usize) -> u64 {
    if class == 0 {
        return BLOCK_ALIGN;
    }
    let (log, quarter) = ((class - 1) / 4 + 8, (class - 1) % 4);
    ((4 + quarter as u64 + 1) << (log - 2)).next_multiple_of(BLOCK_ALIGN)
}

/// What a buffer of so many bytes takes of its tenant's quota.
pub fn buffer_bytes(bytes: u64) -> u64 {
    let class = class_of(bytes);
    if class < CLASSES { class_bytes(class) } else { bytes }
}

impl Arena {
    pub(crate) fn new(tenant: &str, origin: Origin, bytes_max: u64) -> Arena {
        Arena {
            tenant: tenant.to_owned(),
            origin,
            bytes_max,
            free: std::iter::repeat_with(BinaryHeap::new).take(CLASSES).collect(),
            chunks: Slots::new(),
            cutting: None,
            entries: Vec::new(),
            held: Vec::new(),
            unused: Vec::new(),
            stats: MemoryStats::default(),
        }
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.stats
    }

    pub(crate) fn allocate(&mut self, size: u64) -> Result<Handle, Shortage> {
        if size == 0 {
            return Err(Shortage::Refused(DeviceError::ZeroSize));
        }
        let room = self.bytes_max - self.stats.used_bytes;
        // Compared first as asked: the largest sizes have no class.
        if size > room || class_bytes(class_of(size).min(CLASSES - 1)) > room {
            return Err(self.over_quota(size));
        }
        let class = class_of(size);
        if class >= CLASSES {
            return Err(Shortage::Refused(DeviceError::OutOfMemory { asked_bytes: size }));
        }
        let bytes = class_bytes(class);
        let (block, uses) = match self.free[class].pop() {
            Some(FreeBlock { block, uses }) => (block, uses),
            None => (self.cut(class)?, Uses::default()),
        };
        let index = match self.unused.pop() {
            Some(index) => index,
            None if self.entries.len() < HANDLES_MAX => {
                self.entries.push(Entry::default());
                half(self.entries.len() - 1)
            }
            None => {
                self.free[class].push(FreeBlock { block, uses });
                return Err(self.over_quota(size));
            }
        };
        self.chunks[block.chunk as usize].blocks_used += 1;
        self.stats.used_bytes += bytes;
        self.stats.used_bytes_peak = self.stats.used_bytes_peak.max(self.stats.used_bytes);
        self.stats.buffers += 1;
        let entry = &mut self.entries[index as usize];
        *entry = Entry { generation: entry.generation, block: Some(block), size, needs_zero: true, uses };
        Ok(handle(self.origin, entry.generation, index))
    }

    fn over_quota(&self, asked_bytes: u64) -> Shortage {
        let (tenant, used_bytes, bytes_max) = (self.tenant.clone(), self.stats.used_bytes, self.bytes_max);
        Shortage::Refused(DeviceError::OverQuota { tenant, asked_bytes, used_bytes, bytes_max })
    }

    pub(crate) fn free(&mut self, handle: Handle) -> Result<(), DeviceError> {
        let index = self.index(handle)?;
        let entry = &mut self.entries[index as usize];
        let block = entry.block.take().ok_or(DeviceError::StaleHandle)?;
        // A generation that comes round again after a million frees of one slot retires the slot instead.
        entry.generation += 1;
        if entry.generation < 1 << GENERATION_BITS {
            self.unused.push(index);
        }
        let uses = std::mem::take(&mut entry.uses);
        self.stats.buffers -= 1;
        if uses.held.is_empty() {
            self.release(block, uses);
        } else {
            self.held.push((block, uses));
        }
        Ok(())
    }

    fn release(&mut self, block: Block, uses: Uses) {
        self.free[usize::from(block.class)].push(FreeBlock { block, uses });
        self.chunks[block.chunk as usize].blocks_used -= 1;
        self.stats.used_bytes -= class_bytes(usize::from(block.class));
    }

    /// Blocks of buffers that were freed while a resident job used them are free once it has ended: it comes and goes,
    /// so nothing can be ordered after it that is not after its end.
    pub(crate) fn release_held(&mut self, is_past: impl Fn(StreamUse) -> bool) {
        for at in (0..self.held.len()).rev() {
            if self.held[at].1.held.iter().all(|held| is_past(*held)) {
                let (block, mut uses) = self.held.swap_remove(at);
                uses.held.clear();
                self.release(block, uses);
            }
        }
    }

    /// A part of a buffer. Once it is sure to be used so, `touch` the buffer.
    pub(crate) fn peek(&self, part: Part) -> Result<Span, DeviceError> {
        let Part { handle, offset, len, access } = part;
        let index = self.index(handle)?;
        let entry = &self.entries[index as usize];
        let block = entry.block.ok_or(DeviceError::StaleHandle)?;
        let size = entry.size;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(DeviceError::OutOfRange { offset, len, size });
        }
        let is_whole = access == Access::Overwrite && len == size;
        let zero_first = (entry.needs_zero && !is_whole && len > 0).then_some((block.address, size));
        Ok(Span { address: block.address + offset, bytes: len, zero_first })
    }

    /// What a job on a stream that uses a part must come after, on other streams.
    pub(crate) fn before(&self, part: Part, stream: u32) -> impl Iterator<Item = StreamUse> {
        let entry = self.index(part.handle).ok().map(|index| &self.entries[index as usize]);
        // Zeroing it first is writing, whatever comes then.
        entry
            .into_iter()
            .flat_map(move |entry| entry.uses.before(stream, part.access != Access::Read || entry.needs_zero))
    }

    /// A job was sent that uses a part: the buffer has been zeroed by then, or is written as a whole.
    pub(crate) fn touch(&mut self, part: Part, own: StreamUse) {
        if part.len > 0
            && let Ok(index) = self.index(part.handle)
        {
            let entry = &mut self.entries[index as usize];
            let writes = part.access != Access::Read || entry.needs_zero;
            entry.needs_zero = false;
            entry.uses.add(own, writes);
        }
    }

    /// A resident job was sent that uses a part: the buffer may be used by others meanwhile, and its memory not before
    /// the end.
    pub(crate) fn hold(&mut self, part: Part, own: StreamUse) {
        if let Ok(index) = self.index(part.handle) {
            self.entries[index as usize].needs_zero = false;
            self.entries[index as usize].uses.hold(own);
        }
    }

    pub(crate) fn size(&self, handle: Handle) -> Result<u64, DeviceError> {
        let entry = &self.entries[self.index(handle)? as usize];
        entry.block.map(|_| entry.size).ok_or(DeviceError::StaleHandle)
    }

    /// Takes memory that the worker reserved.
    pub(crate) fn add_chunk(&mut self, address: u64, bytes: u64) {
        let chunk = self.chunks.insert(Chunk { address, bytes, fresh: 0, blocks_used: 0 });
        self.stats.reserved_bytes += bytes;
        if let Some(old) = self.cutting.replace(chunk) {
            self.cut_up(old);
        }
    }

    /// Gives back chunks of which nothing is in use.
    pub(crate) fn trim(&mut self) -> Vec<Trimmed> {
        let idle: Vec<usize> = self.chunks.iter().filter(|(_, c)| c.blocks_used == 0).map(|(n, _)| n).collect();
        self.cutting = self.cutting.filter(|n| !idle.contains(n));
        let mut trimmed = Vec::new();
        for n in idle {
            let mut uses = Vec::new();
            for free in &mut self.free {
                let is_gone = |free: &FreeBlock| free.block.chunk as usize == n;
                let (gone, left): (Vec<FreeBlock>, Vec<FreeBlock>) =
                    std::mem::take(free).into_iter().partition(is_gone);
                *free = left.into();
                uses.extend(gone.into_iter().flat_map(|free| free.uses.all()));
            }
            let chunk = self.chunks.remove(n);
            self.stats.reserved_bytes -= chunk.bytes;
            trimmed.push(Trimmed { address: chunk.address, bytes: chunk.bytes, uses });
        }
        trimmed
    }

    /// Cuts a block off the current chunk.
    fn cut(&mut self, class: usize) -> Result<Block, Shortage> {
        let bytes = class_bytes(class);
        if let Some(n) = self.cutting
            && let Some(block) = self.cut_from(n, class)
        {
            return Ok(block);
        }
        let chunk = if bytes >= OWN_CHUNK_BYTES {
            bytes
        } else {
            self.stats.reserved_bytes.next_power_of_two().clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX).max(bytes)
        };
        Err(Shortage::Chunk { bytes: chunk })
    }

    fn cut_from(&mut self, n: usize, class: usize) -> Option<Block> {
        let chunk = &mut self.chunks[n];
        let bytes = class_bytes(class);
        let address = chunk.address + chunk.fresh;
        (chunk.bytes - chunk.fresh >= bytes).then(|| {
            chunk.fresh += bytes;
            Block { address, chunk: half(n), class: u8::try_from(class).unwrap_or(u8::MAX) }
        })
    }

    /// Turns the rest of a chunk into free blocks, largest first, so that nothing of it is lost.
    fn cut_up(&mut self, n: usize) {
        for class in (0..CLASSES).rev() {
            if class_bytes(class) >= OWN_CHUNK_BYTES {
                continue;
            }
            while let Some(block) = self.cut_from(n, class) {
                self.free[class].push(FreeBlock { block, uses: Uses::default() });
            }
        }
    }

    fn index(&self, handle: Handle) -> Result<u32, DeviceError> {
        let (origin, generation, index) = parts(handle);
        if origin.tenant != self.origin.tenant {
            return Err(DeviceError::ForeignHandle);
        }
        if origin.worker != self.origin.worker & ((1 << WORKER_BITS) - 1) {
            return Err(DeviceError::DeviceLost {
                why: "the buffer was in the memory of an earlier worker".to_owned(),
            });
        }
        match self.entries.get(index as usize) {
            Some(entry) if entry.generation == generation => Ok(index),
            _ => Err(DeviceError::StaleHandle),
        }
    }
}

fn handle(origin: Origin, generation: u32, index: u32) -> Handle {
    let fields = [
        (origin.tenant, TENANT_BITS),
        (origin.worker, WORKER_BITS),
        (generation, GENERATION_BITS),
        (index, INDEX_BITS),
    ];
    Handle(fields.iter().fold(0, |bits, (value, count)| bits << count | u64::from(*value) & ((1 << count) - 1)))
}

fn parts(Handle(mut bits): Handle) -> (Origin, u32, u32) {
    let mut take = |count: u32| {
        let low = half(index(bits & ((1 << count) - 1)));
        bits >>= count;
        low
    };
    let (index, generation, worker) = (take(INDEX_BITS), take(GENERATION_BITS), take(WORKER_BITS));
    (Origin { tenant: take(TENANT_BITS), worker }, generation, index)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Allocates, giving chunks from an endless device.
    fn allocate(arena: &mut Arena, next: &mut u64, size: u64) -> Result<Handle, DeviceError> {
        loop {
            match arena.allocate(size) {
                Ok(handle) => return Ok(handle),
                Err(Shortage::Refused(error)) => return Err(error),
                Err(Shortage::Chunk { bytes }) => {
                    arena.add_chunk(*next, bytes);
                    *next += bytes.next_multiple_of(2 << 20);
                }
            }
        }
    }

    impl Arena {
        /// Looks and touches at once, as a job that is sent does.
        fn span(&mut self, handle: Handle, offset: u64, len: u64, overwrites: bool) -> Result<Span, DeviceError> {
            let access = if overwrites { Access::Overwrite } else { Access::Read };
            self.span_on(Part { handle, offset, len, access }, StreamUse { stream: 1, number: 1 })
        }

        fn span_on(&mut self, part: Part, own: StreamUse) -> Result<Span, DeviceError> {
            let span = self.peek(part)?;
            self.touch(part, own);
            Ok(span)
        }
    }

    #[test]
    fn classes_hold_what_they_are_for_and_waste_little() {
        let mut last = 0;
        for class in 0..CLASSES {
            let bytes = class_bytes(class);
            assert!(bytes >= last && bytes.is_multiple_of(BLOCK_ALIGN), "{class}");
            assert_eq!(class_bytes(class_of(bytes)), bytes);
            last = bytes;
        }
        for size in (1..5000).chain([1 << 20, (1 << 20) + 1, 1 << 40, (1 << 40) - 1]) {
            let bytes = class_bytes(class_of(size));
            assert!(bytes >= size, "{size} in {bytes}");
            assert!(size < 1024 || bytes <= size + size / 4 + BLOCK_ALIGN, "{size} in {bytes}");
        }
    }

    #[test]
    fn random_use_never_overlaps_and_everything_comes_back() {
        // Miri takes thousands of times as long.
        let (seeds, steps) = if cfg!(miri) { (2, 60) } else { (20, 2000) };
        for seed in 0..seeds {
            let mut rng = StdRng::seed_from_u64(seed);
            let (mut arena, mut next) = (Arena::new("t", Origin { tenant: 1, worker: 3 }, 1 << 30), 1 << 30);
            let mut live: BTreeMap<u64, (u64, Handle)> = BTreeMap::new();
            let mut handles: Vec<Handle> = Vec::new();
            for _ in 0..steps {
                if rng.random_bool(0.6) || handles.is_empty() {
                    let bits = rng.random_range(1..26);
                    let size = rng.random_range(1..1_u64 << bits);
                    let Ok(handle) = allocate(&mut arena, &mut next, size) else { continue };
                    let span = arena.span(handle, 0, size, false).unwrap();
                    assert_eq!(span.zero_first, Some((span.address, size)));
                    let before = live.range(..=span.address).next_back().map(|(a, (s, _))| a + s);
                    let after = live.range(span.address..).next().map(|(a, _)| *a);
                    assert!(before.is_none_or(|end| end <= span.address), "overlaps the one before");
                    assert!(after.is_none_or(|start| span.address + size <= start), "overlaps the next");
                    assert!(span.address.is_multiple_of(BLOCK_ALIGN));
                    live.insert(span.address, (size, handle));
                    handles.push(handle);
                } else {
                    let handle = handles.swap_remove(rng.random_range(0..handles.len()));
                    live.retain(|_, (_, h)| *h != handle);
                    arena.free(handle).unwrap();
                    assert_eq!(arena.free(handle), Err(DeviceError::StaleHandle), "twice");
                    assert_eq!(arena.span(handle, 0, 1, false), Err(DeviceError::StaleHandle), "after free");
                }
                assert_eq!(index(arena.stats().buffers), handles.len());
            }
            handles.drain(..).for_each(|handle| arena.free(handle).unwrap());
            let stats = arena.stats();
            assert_eq!((stats.used_bytes, stats.buffers), (0, 0));
            let given: u64 = arena.trim().iter().map(|trimmed| trimmed.bytes).sum();
            assert_eq!((given, arena.stats().reserved_bytes), (stats.reserved_bytes, 0));
            assert!(arena.free.iter().all(BinaryHeap::is_empty), "no block of a chunk that is gone");
        }
    }

    #[test]
    fn warm_memory_is_reused_and_trimmed_memory_is_not() {
        let (mut arena, mut next) = (Arena::new("t", Origin { tenant: 1, worker: 3 }, 1 << 30), 1 << 30);
        let first = allocate(&mut arena, &mut next, 1000).unwrap();
        let address = arena.span(first, 0, 1000, false).unwrap().address;
        arena.free(first).unwrap();
        let again = allocate(&mut arena, &mut next, 1000).unwrap();
        let span = arena.span(again, 0, 1000, false).unwrap();
        assert_eq!((span.address, span.zero_first), (address, Some((address, 1000))), "the same block, zeroed again");
        assert_ne!(first, again);
        assert!(arena.trim().is_empty(), "in use");
        arena.free(again).unwrap();
        let trimmed = arena.trim();
        assert_eq!(trimmed.len(), 1);
        assert_eq!((trimmed[0].address, trimmed[0].bytes), (1 << 30, CHUNK_BYTES_MIN));
        assert!(matches!(arena.allocate(1000), Err(Shortage::Chunk { .. })));
    }

    #[test]
    fn a_freed_block_is_used_again_after_whoever_used_it_last() {
        let (mut arena, mut next) = (Arena::new("t", Origin { tenant: 1, worker: 3 }, 1 << 30), 1 << 30);
        let part = |handle, access| Part { handle, offset: 0, len: 1000, access };
        let at = |stream, number| StreamUse { stream, number };
        let before = |arena: &Arena, part, stream| arena.before(part, stream).collect::<Vec<_>>();
        let old = allocate(&mut arena, &mut next, 1000).unwrap();
        assert_eq!(before(&arena, part(old, Access::Update), 7), [], "nobody used it");
        let address = arena.span_on(part(old, Access::Overwrite), at(7, 1)).unwrap().address;
        assert_eq!(before(&arena, part(old, Access::Update), 7), [], "its own stream is in order");
        assert_eq!(before(&arena, part(old, Access::Read), 8), [at(7, 1)], "read after write");
        arena.span_on(part(old, Access::Read), at(8, 5)).unwrap();
        arena.span_on(part(old, Access::Read), at(9, 6)).unwrap();
        assert_eq!(before(&arena, part(old, Access::Read), 10), [at(7, 1)], "readers do not wait for readers");
        assert_eq!(before(&arena, part(old, Access::Update), 8), [at(7, 1), at(9, 6)], "write after read");
        arena.free(old).unwrap();
        // The next owner of the block reads it first, which zeroes it.
        let new = allocate(&mut arena, &mut next, 1000).unwrap();
        assert_eq!(arena.peek(part(new, Access::Read)).unwrap().address, address);
        assert_eq!(before(&arena, part(new, Access::Read), 8), [at(7, 1), at(9, 6)]);
        arena.span_on(part(new, Access::Read), at(8, 7)).unwrap();
        assert_eq!(before(&arena, part(new, Access::Update), 9), [at(8, 7)], "which came after the others");
        arena.span_on(part(new, Access::Read), at(9, 8)).unwrap();
        arena.free(new).unwrap();
        let trimmed = arena.trim();
        assert_eq!(trimmed.len(), 1);
        assert_eq!(trimmed[0].uses, [at(8, 7), at(9, 8)]);
    }

    #[test]
    fn a_block_that_a_resident_job_uses_is_free_when_that_has_ended() {
        let (mut arena, mut next) = (Arena::new("t", Origin { tenant: 1, worker: 3 }, 1 << 30), 1 << 30);
        let resident = StreamUse { stream: 7, number: 1 };
        let buffer = allocate(&mut arena, &mut next, 1000).unwrap();
        let part = Part { handle: buffer, offset: 0, len: 1000, access: Access::Update };
        let address = arena.peek(part).unwrap().address;
        arena.hold(part, resident);
        let used = arena.stats().used_bytes;
        arena.free(buffer).unwrap();
        arena.release_held(|_| false);
        assert_eq!((arena.stats().used_bytes, arena.stats().buffers), (used, 0), "it is its tenant's still");
        assert!(arena.trim().is_empty());
        let other = allocate(&mut arena, &mut next, 1000).unwrap();
        assert_ne!(arena.span(other, 0, 1000, true).unwrap().address, address);
        arena.release_held(|held| held == resident);
        let third = allocate(&mut arena, &mut next, 1000).unwrap();
        assert_eq!(arena.span(third, 0, 1000, true).unwrap().address, address);
    }

    #[test]
    fn zeroing_happens_once_and_not_before_a_whole_overwrite() {
        let (mut arena, mut next) = (Arena::new("t", Origin { tenant: 1, worker: 3 }, 1 << 30), 1 << 30);
        let buffer = allocate(&mut arena, &mut next, 1000).unwrap();
        assert!(arena.span(buffer, 0, 0, false).unwrap().zero_first.is_none(), "nothing is not a use");
        assert!(arena.span(buffer, 8, 8, true).unwrap().zero_first.is_some(), "a part leaves the rest");
        assert!(arena.span(buffer, 0, 1000, false).unwrap().zero_first.is_none());
        let other = allocate(&mut arena, &mut next, 1000).unwrap();
        assert!(arena.span(other, 0, 1000, true).unwrap().zero_first.is_none());
        assert!(arena.span(other, 0, 1000, false).unwrap().zero_first.is_none());
    }

    #[test]
    fn bad_sizes_ranges_and_handles_are_refused() {
        let (mut arena, mut next) = (Arena::new("t", Origin { tenant: 1, worker: 3 }, 4096), 1 << 30);
        let refused = |arena: &mut Arena, size| match arena.allocate(size) {
            Err(Shortage::Refused(error)) => error,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&mut arena, 0), DeviceError::ZeroSize);
        assert!(matches!(refused(&mut arena, 4097), DeviceError::OverQuota { used_bytes: 0, .. }));
        assert!(matches!(refused(&mut arena, u64::MAX), DeviceError::OverQuota { .. }));
        let buffer = allocate(&mut arena, &mut next, 3000).unwrap();
        assert!(matches!(refused(&mut arena, 2000), DeviceError::OverQuota { used_bytes: 3072, .. }));
        for (offset, len) in [(0, 3001), (3000, 1), (u64::MAX, 1), (1, u64::MAX), (3001, 0)] {
            let range = arena.span(buffer, offset, len, false);
            assert_eq!(range, Err(DeviceError::OutOfRange { offset, len, size: 3000 }));
        }
        let mut stranger = Arena::new("u", Origin { tenant: 2, worker: 3 }, 4096);
        assert_eq!(stranger.span(buffer, 0, 1, false), Err(DeviceError::ForeignHandle));
        assert_eq!(stranger.free(buffer), Err(DeviceError::ForeignHandle));
        let mut later = Arena::new("t", Origin { tenant: 1, worker: 4 }, 4096);
        assert!(matches!(later.span(buffer, 0, 1, false), Err(DeviceError::DeviceLost { .. })));
        for made_up in [0, 1, u64::MAX, buffer.0 + 1, buffer.0 | 1 << INDEX_BITS] {
            assert!(arena.span(Handle(made_up), 0, 1, false).is_err(), "{made_up:x}");
        }
    }
}
