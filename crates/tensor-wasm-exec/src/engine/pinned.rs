//! Linear memories that the device sees in place, for functions that ask for it: a kernel is passed a pointer into the
//! guest's own memory, and nothing is copied. They come from the device's pinned memory, of which there is little, and
//! not from the engine's pool: starting such a function takes longer.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tensor_wasm_gpu::{Device, Pinned, PinnedMapping};
use wasmtime::{LinearMemory, MemoryCreator, MemoryType};

use crate::HashMap;

/// What a memory can grow to, unless it begins with more. The device must see all of it from the start.
const MEMORY_BYTES_MAX: usize = 16 << 20;

thread_local! {
    /// Why the last memory could not be made on this thread.
    static REFUSED: Cell<Option<PinnedRefusal>> = const { Cell::new(None) };
}

/// Why a memory cannot be made. Wasmtime hands on no more than a text of what a creator of memories says, so it is left
/// beside: instantiation fails without giving its thread away in between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PinnedRefusal {
    NoDevice,
    Short {
        asked_bytes: u64,
    },
    /// The host's address space or its kernel refused.
    Host(String),
}

impl PinnedRefusal {
    /// What refused the memory of the instance that could not be made just now, on this thread.
    pub(crate) fn take() -> Option<PinnedRefusal> {
        REFUSED.take()
    }

    fn leave(self) -> String {
        let text = match &self {
            PinnedRefusal::NoDevice => "no device is open".to_owned(),
            PinnedRefusal::Short { asked_bytes } => format!("no {asked_bytes} bytes of pinned memory are free"),
            PinnedRefusal::Host(why) => why.clone(),
        };
        REFUSED.set(Some(self));
        text
    }
}

/// The pinned memories of a runtime's guests.
#[derive(Default)]
pub(crate) struct PinnedMemories {
    device: OnceLock<Device>,
    /// By the address a guest's memory begins at.
    live: Mutex<HashMap<usize, Pinned>>,
}

impl PinnedMemories {
    pub(crate) fn attach(&self, device: Device) {
        let _ = self.device.set(device);
    }

    /// The pinned memory that begins at an address, if that is a guest's.
    pub(crate) fn find(&self, base: usize) -> Option<Pinned> {
        self.live.lock().get(&base).cloned()
    }
}

/// Makes an engine's memories.
pub(crate) struct Creator(pub Arc<PinnedMemories>);

// SAFETY: each memory is a mapping of its own that nobody else writes while a guest runs, but for kernels that the
// guest itself launched, whose writes are bytes like any others. The reservation is as large as asked for and faults
// where nothing was opened; it does not move.
#[expect(unsafe_code, reason = "the device sees these memories")]
unsafe impl MemoryCreator for Creator {
    fn new_memory(
        &self,
        _ty: MemoryType,
        minimum: usize,
        maximum: Option<usize>,
        reserved: Option<usize>,
        guard: usize,
    ) -> Result<Box<dyn LinearMemory>, String> {
        let host = |why: String| PinnedRefusal::Host(why).leave();
        let device = self.0.device.get().ok_or_else(|| PinnedRefusal::NoDevice.leave())?;
        let bytes_max = maximum.unwrap_or(usize::MAX).min(MEMORY_BYTES_MAX).max(minimum).max(1);
        let asked_bytes = bytes_max as u64;
        let pinned = device.pinned(asked_bytes).map_err(|_| PinnedRefusal::Short { asked_bytes }.leave())?;
        let reserved = reserved.unwrap_or(bytes_max).checked_add(guard);
        let reserved = reserved.ok_or_else(|| host("the reservation is too large".to_owned()))?;
        let mapping = pinned.map(reserved.max(bytes_max)).map_err(|e| host(e.to_string()))?;
        mapping.open(minimum as u64).map_err(|e| host(e.to_string()))?;
        self.0.live.lock().insert(mapping.as_ptr() as usize, pinned);
        Ok(Box::new(PinnedMemory { mapping, bytes: minimum, bytes_max, owner: self.0.clone() }))
    }
}

struct PinnedMemory {
    mapping: PinnedMapping,
    bytes: usize,
    bytes_max: usize,
    owner: Arc<PinnedMemories>,
}

// SAFETY: the address stays the same; as many bytes as it says can be touched.
#[expect(unsafe_code, reason = "the device sees these memories")]
unsafe impl LinearMemory for PinnedMemory {
    fn byte_size(&self) -> usize {
        self.bytes
    }

    fn byte_capacity(&self) -> usize {
        self.bytes_max
    }

    fn grow_to(&mut self, bytes: usize) -> wasmtime::Result<()> {
        if bytes > self.bytes_max {
            let why = format!("{bytes} bytes; a pinned memory has at most {}", self.bytes_max);
            return Err(wasmtime::Error::msg(why));
        }
        self.mapping.open(bytes as u64)?;
        self.bytes = bytes;
        Ok(())
    }

    fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        self.owner.live.lock().remove(&(self.mapping.as_ptr() as usize));
    }
}
