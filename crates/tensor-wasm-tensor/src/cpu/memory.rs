//! Memory of the CPU device. Freed blocks are kept for the next tensor of their size: memory that is fresh from the
//! system costs a page fault for each page, which is three times what computing the elements of a simple expression
//! costs.
#![expect(unsafe_code, reason = "buffers are written by many threads at once, each its own part")]

use std::alloc::Layout as AllocLayout;
#[cfg(feature = "io")]
use std::ops::Range;
use std::ptr::NonNull;
#[cfg(feature = "io")]
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use parking_lot::Mutex;

use crate::account::Charge;
use crate::dtype::{DType, Element};

/// A cache line, and the widest vector.
pub(crate) const ALIGN: usize = 64;

/// Bytes of a huge page, and of the blocks that are made of such pages where the system has them. A matrix of 4096²
/// takes 16,384 pages otherwise, eight times what a second-level TLB knows.
const HUGE_PAGE: usize = 2 << 20;

/// Blocks of one size and the next are this part of the size apart: a fifth is wasted at most.
const CLASSES_PER_DOUBLING: u32 = 4;

/// Bytes of freed blocks that are kept.
const KEPT_BYTES_MAX: usize = 1 << 30;

static KEPT: Mutex<Kept> = Mutex::new(Kept { blocks: Vec::new(), bytes: 0 });

/// Bytes that tensors have now, without what is kept.
static USED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// What [`set_memory_limit`] was given; zero until somebody asks.
static LIMIT_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Freed blocks by class.
struct Kept {
    blocks: Vec<Vec<Block>>,
    bytes: usize,
}

struct Block(NonNull<u8>);

// SAFETY: a block that nobody uses is memory and an address.
unsafe impl Send for Block {}

/// Bytes that tensors hold at this moment.
pub fn used_bytes() -> usize {
    USED_BYTES.load(Ordering::Relaxed)
}

/// The most bytes that tensors may have at once: as much as the machine has, unless somebody says otherwise. A system
/// that promises more memory than there is would end the process when it is used.
pub fn memory_limit() -> usize {
    match LIMIT_BYTES.load(Ordering::Relaxed) {
        0 => {
            let limit = machine_bytes().unwrap_or(usize::MAX);
            LIMIT_BYTES.store(limit, Ordering::Relaxed);
            limit
        }
        limit => limit,
    }
}

/// Beyond this, computing is an error that says how many bytes were missing; nothing that is there is lost.
pub fn set_memory_limit(bytes: usize) {
    LIMIT_BYTES.store(bytes.max(1), Ordering::Relaxed);
}

fn machine_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kilobytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// What a buffer of that size takes, or nothing if there is none so large.
pub(crate) fn block_bytes(bytes: usize) -> usize {
    class(bytes).map_or(usize::MAX, |(_, block_bytes)| block_bytes)
}

/// The class of a size, and the bytes of its blocks.
fn class(bytes: usize) -> Option<(usize, usize)> {
    let bytes = bytes.max(ALIGN);
    let doublings = (bytes - 1).ilog2();
    let step = (1_usize << doublings).checked_shr(CLASSES_PER_DOUBLING.ilog2()).filter(|step| *step > 0)?;
    let rounded = bytes.checked_next_multiple_of(step.max(ALIGN))?;
    if rounded > isize::MAX.unsigned_abs() - HUGE_PAGE {
        return None;
    }
    let within = (rounded - 1) >> (doublings - CLASSES_PER_DOUBLING.ilog2()) & (CLASSES_PER_DOUBLING as usize - 1);
    Some(((doublings * CLASSES_PER_DOUBLING) as usize + within, rounded))
}

fn layout_of(block_bytes: usize) -> Option<AllocLayout> {
    let align = if block_bytes >= HUGE_PAGE { HUGE_PAGE } else { ALIGN };
    AllocLayout::from_size_align(block_bytes, align).ok()
}

/// Asks for huge pages, for as much of a block as is made of whole ones.
fn advise_huge(start: NonNull<u8>, block_bytes: usize) {
    #[cfg(target_os = "linux")]
    if block_bytes >= HUGE_PAGE {
        let bytes = block_bytes / HUGE_PAGE * HUGE_PAGE;
        // SAFETY: this changes how memory that was just allocated is mapped, and nothing that is in it. A system that
        // has no such pages says so, and the block is what it would have been.
        unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, block_bytes);
}

/// Elements of a tensor, or of a part of a plan. What is in it was written by whoever allocated it.
pub(crate) struct CpuBuffer {
    start: NonNull<u8>,
    bytes: usize,
    owner: Owner,
    /// Who pays for it, as long as it lives.
    #[expect(dead_code, reason = "held for its end")]
    charge: Charge,
}

enum Owner {
    /// A block of that class and size.
    Cache { class: usize, block_bytes: usize },
    /// Somebody's memory, which lives as long as this.
    Other(#[expect(dead_code, reason = "held for its end")] Box<dyn Send + Sync>),
}

/// Bytes that several buffers are parts of: what was read from a file, or a file that is mapped. It is what it says as
/// long as it lives, at the same address.
#[cfg(feature = "io")]
pub(crate) enum FileBytes {
    Read(Vec<u8>),
    Mapped(memmap2::Mmap),
}

#[cfg(feature = "io")]
impl FileBytes {
    /// Maps a file. What the elements are if the file is changed later is for the caller to say: see
    /// [`crate::io::load_safetensors`].
    pub(crate) fn map(file: &std::fs::File) -> std::io::Result<FileBytes> {
        // SAFETY: nobody makes anything of these bytes that not all of them can be: headers and bools are copied before
        // they are looked at. That the file is left alone while it is mapped is the documented duty of the user.
        Ok(FileBytes::Mapped(unsafe { memmap2::Mmap::map(file) }?))
    }

    pub(crate) fn get(&self) -> &[u8] {
        match self {
            FileBytes::Read(bytes) => bytes,
            FileBytes::Mapped(bytes) => bytes,
        }
    }
}

/// What was a vector, by the pointer that everybody reads it through.
struct RawElements<T>(*mut [T]);

// SAFETY: it is read by many, and freed by the last.
unsafe impl<T: Send> Send for RawElements<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for RawElements<T> {}

impl<T> Drop for RawElements<T> {
    fn drop(&mut self) {
        // SAFETY: it was a box, and nobody reads it any more.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

// SAFETY: a buffer is written by its maker, who waits for the threads that help, and only read once others have it. It
// is written again only when nobody has it any more (`Node::sole_storage`).
unsafe impl Send for CpuBuffer {}
// SAFETY: as above.
unsafe impl Sync for CpuBuffer {}

impl CpuBuffer {
    /// Memory with anything in it. None if there is none.
    pub(crate) fn uninitialized(bytes: usize) -> Option<CpuBuffer> {
        let (class, block_bytes) = class(bytes)?;
        let charge = Charge::take(block_bytes)?;
        let used = USED_BYTES.fetch_add(block_bytes, Ordering::Relaxed);
        let made = used.checked_add(block_bytes).filter(|sum| *sum <= memory_limit());
        let made = made.and_then(|_| CpuBuffer::of_class(class, block_bytes));
        match made {
            Some(start) => Some(CpuBuffer { start, bytes, owner: Owner::Cache { class, block_bytes }, charge }),
            None => {
                USED_BYTES.fetch_sub(block_bytes, Ordering::Relaxed);
                None
            }
        }
    }

    /// A block that was freed, or a new one.
    fn of_class(class: usize, block_bytes: usize) -> Option<NonNull<u8>> {
        let kept = {
            let mut kept = KEPT.lock();
            let block = kept.blocks.get_mut(class).and_then(Vec::pop);
            if block.is_some() {
                kept.bytes -= block_bytes;
            }
            block
        };
        if let Some(Block(start)) = kept {
            return Some(start);
        }
        // SAFETY: the layout has a size.
        let start = NonNull::new(unsafe { std::alloc::alloc(layout_of(block_bytes)?) })?;
        advise_huge(start, block_bytes);
        Some(start)
    }

    /// Takes over a vector without a copy. None if nobody pays for it.
    pub(crate) fn of_vec<T: Element>(elements: Vec<T>) -> Option<CpuBuffer> {
        let bytes = size_of_val(elements.as_slice());
        let charge = Charge::take(bytes)?;
        let elements = Box::into_raw(elements.into_boxed_slice());
        let start = NonNull::new(elements.cast::<u8>()).unwrap_or(NonNull::<u64>::dangling().cast());
        Some(CpuBuffer { start, bytes, owner: Owner::Other(Box::new(RawElements(elements))), charge })
    }

    pub(crate) fn of_slice<T: Element>(elements: &[T]) -> Option<CpuBuffer> {
        let buffer = CpuBuffer::uninitialized(size_of_val(elements))?;
        // SAFETY: it has as many bytes, and nobody else knows it yet.
        unsafe { buffer.start.cast::<T>().as_ptr().copy_from_nonoverlapping(elements.as_ptr(), elements.len()) };
        Some(buffer)
    }

    /// A part of a file as elements of that type, without a copy where they are aligned. Elements that not all bytes
    /// can be were checked by the caller. None if there is no such part, or no memory for a copy.
    #[cfg(feature = "io")]
    pub(crate) fn of_file(file: &Arc<FileBytes>, span: Range<usize>, dtype: DType) -> Option<CpuBuffer> {
        let part = file.get().get(span)?;
        let start = NonNull::from(part).cast::<u8>();
        // Every element is aligned to its own size.
        if part.is_empty() || !start.addr().get().is_multiple_of(dtype.size()) {
            return CpuBuffer::of_slice(part);
        }
        let charge = Charge::take(part.len())?;
        Some(CpuBuffer { start, bytes: part.len(), owner: Owner::Other(Box::new(file.clone())), charge })
    }

    /// Whether its memory is this library's own, and not a file or something that somebody gave.
    pub(crate) fn is_own(&self) -> bool {
        matches!(self.owner, Owner::Cache { .. })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Memory that is written as bytes. None if there is none.
    #[cfg(feature = "cuda")]
    pub(crate) fn filled<E>(
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Option<CpuBuffer>, E> {
        let Some(buffer) = CpuBuffer::uninitialized(bytes) else { return Ok(None) };
        // SAFETY: it has as many bytes, nobody else knows it yet, and they are zeros before anybody looks.
        let all = unsafe {
            buffer.start.as_ptr().write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(buffer.start.as_ptr(), bytes)
        };
        fill(all)?;
        Ok(Some(buffer))
    }

    /// The same as elements of a vector that has room for them.
    #[cfg(feature = "cuda")]
    pub(crate) fn fill_vec<T: Element, E>(
        elements: &mut Vec<T>,
        count: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(elements.is_empty() && elements.capacity() >= count, "a vector has no room for its elements");
        let start = elements.as_mut_ptr().cast::<u8>();
        // SAFETY: the vector has room for so many elements, nobody else knows of it, and they are zeros before anybody
        // looks, which every type of element can be.
        let all = unsafe {
            start.write_bytes(0, count * size_of::<T>());
            std::slice::from_raw_parts_mut(start, count * size_of::<T>())
        };
        fill(all)?;
        // SAFETY: all of them are zeros, or what a buffer of such elements has.
        unsafe { elements.set_len(count) };
        Ok(())
    }

    /// Elements, as the bytes they are: whoever writes them writes elements.
    #[cfg(feature = "cuda")]
    pub(crate) fn bytes_of<T: Element>(elements: &mut [T]) -> &mut [u8] {
        // SAFETY: no element has padding. What is written is what a buffer of such elements has, and numbers may be
        // any bytes.
        unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
    }

    /// All of its elements, as the bytes they are.
    #[cfg(any(feature = "io", feature = "cuda"))]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: no element has padding, and whoever made the buffer has written it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its elements. It was written with elements of that type, which is the caller's to know.
    pub(crate) fn elements<T: Element>(&self) -> &[T] {
        debug_assert!(self.start.as_ptr().cast::<T>().is_aligned());
        // SAFETY: aligned to more than any element is, or made from elements of its own type; as long as it says; and
        // whoever made it has written it.
        unsafe { std::slice::from_raw_parts(self.start.cast::<T>().as_ptr(), self.bytes / size_of::<T>()) }
    }

    /// The element at a position, whatever its type, as the widest float and integer.
    pub(crate) fn at(&self, dtype: DType, position: usize) -> (f64, i64) {
        let float = |value: f64| (value, 0);
        let int = |value: i64| (value as f64, value);
        match dtype {
            DType::Bool | DType::U8 => int(i64::from(self.elements::<u8>()[position])),
            DType::I32 => int(i64::from(self.elements::<i32>()[position])),
            DType::I64 => int(self.elements::<i64>()[position]),
            DType::F16 => float(self.elements::<f16>()[position].to_f64()),
            DType::BF16 => float(self.elements::<bf16>()[position].to_f64()),
            DType::F32 => float(f64::from(self.elements::<f32>()[position])),
            DType::F64 => float(self.elements::<f64>()[position]),
        }
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        let Owner::Cache { class, block_bytes } = self.owner else { return };
        USED_BYTES.fetch_sub(block_bytes, Ordering::Relaxed);
        let mut kept = KEPT.lock();
        if kept.bytes + block_bytes <= KEPT_BYTES_MAX {
            kept.bytes += block_bytes;
            if kept.blocks.len() <= class {
                kept.blocks.resize_with(class + 1, Vec::new);
            }
            kept.blocks[class].push(Block(self.start));
            return;
        }
        drop(kept);
        if let Some(layout) = layout_of(block_bytes) {
            // SAFETY: it was allocated with this layout, and this was its only owner.
            unsafe { std::alloc::dealloc(self.start.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_a_class_fit_its_blocks() {
        let mut sizes: Vec<usize> =
            (0..5000).chain((12..40).flat_map(|n| [(1 << n) - 1, 1 << n, (1 << n) + 1])).collect();
        sizes.sort_unstable();
        let mut blocks = std::collections::HashMap::new();
        let mut last = 0;
        for bytes in sizes {
            let (class, block_bytes) = class(bytes).unwrap();
            assert!(block_bytes >= bytes && block_bytes <= (bytes + bytes / 4).max(bytes + ALIGN), "{bytes}");
            assert_eq!(*blocks.entry(class).or_insert(block_bytes), block_bytes, "{bytes}");
            assert!(class >= last);
            last = class;
        }
        assert_eq!(class(usize::MAX), None);
        assert!(CpuBuffer::uninitialized(1 << 60).is_none());
    }

    #[test]
    fn a_freed_block_is_used_again() {
        let bytes = 1_234_567;
        let first = CpuBuffer::uninitialized(bytes).unwrap();
        let start = first.as_ptr() as usize;
        drop(first);
        assert_eq!(CpuBuffer::uninitialized(bytes - 1).unwrap().as_ptr() as usize, start);
    }
}
