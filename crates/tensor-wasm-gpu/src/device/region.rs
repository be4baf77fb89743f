//! A region of the slab that somebody asked for by name: memory that server, worker and device see in place. What lies
//! in it, and who may touch it when, is the business of whoever asked for it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::device::Device;
use crate::error::DeviceError;
use crate::slab::{PINNED, Region, STAGING, Slab};

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
