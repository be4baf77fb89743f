//! Memory of a CUDA device: a pool per stream with a true cap, and the slab as the device sees it.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use cudarc::driver::sys as cu;

use super::driver::check;
use crate::error::DeviceError;
use crate::slab::Slab;

/// Registers the slab with the device, for copies at full speed and for kernels. Returns its address there.
pub(super) fn register(slab: &Slab) -> Result<u64, DeviceError> {
    // Huge pages, touched before they are registered: fifteen times quicker than without.
    slab.populate();
    let flags = cu::CU_MEMHOSTREGISTER_PORTABLE | cu::CU_MEMHOSTREGISTER_DEVICEMAP;
    let (base, mut address) = (slab.address(0).cast::<c_void>(), 0);
    // SAFETY: the range is our mapping of the slab, which outlives the context's use of it: `unregister` comes first.
    unsafe {
        check(cu::cuMemHostRegister_v2(base, slab.len(), flags))?;
        check(cu::cuMemHostGetDevicePointer_v2(&mut address, base, 0))?;
    }
    Ok(address)
}

pub(super) fn unregister(slab: &Slab) {
    // SAFETY: registered by `register`; nothing on the device uses it any more.
    let _ = unsafe { cu::cuMemHostUnregister(slab.address(0).cast()) };
}

/// A memory pool that refuses what goes beyond its cap.
pub(super) fn new_pool(device: cu::CUdevice, bytes_max: u64) -> Result<cu::CUmemoryPool, DeviceError> {
    // SAFETY: all fields are numbers or pointers for which zero means "none".
    let mut props: cu::CUmemPoolProps = unsafe { MaybeUninit::zeroed().assume_init() };
    props.allocType = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type_ = cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    props.location.id = device;
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes two integers to variables of ours.
    check(unsafe { cu::cuMemGetInfo_v2(&mut free, &mut total) })?;
    // A pool larger than the device is refused.
    props.maxSize = usize::try_from(bytes_max).unwrap_or(usize::MAX).min(total);
    let mut pool = null_mut();
    // SAFETY: writes a handle to a variable of ours.
    check(unsafe { cu::cuMemPoolCreate(&mut pool, &props) })?;
    let (mut no, attribute) = (0_u32, cu::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES);
    // Memory that a tenant's stream is still to free must not be handed out again with a dependency on that stream: we
    // wait for what is handed out.
    // SAFETY: an integer of ours, of the size the attribute has.
    check(unsafe { cu::cuMemPoolSetAttribute(pool, attribute, (&raw mut no).cast()) })?;
    Ok(pool)
}

/// Takes memory from a pool. Waiting for the control stream, which is otherwise idle, makes it usable on every stream.
pub(super) fn reserve(pool: cu::CUmemoryPool, control: cu::CUstream, bytes: u64) -> Result<u64, DeviceError> {
    let size = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut address = 0;
    // SAFETY: pool and stream are ours.
    let result = unsafe {
        check(cu::cuMemAllocFromPoolAsync(&mut address, size, pool, control))
            .and_then(|()| check(cu::cuStreamSynchronize(control)))
    };
    match result {
        Ok(()) => Ok(address),
        Err(DeviceError::OutOfMemory { .. }) => Err(DeviceError::OutOfMemory { asked_bytes: bytes }),
        Err(error) => Err(error),
    }
}

/// The device's memory, total and free.
pub(super) fn device_memory() -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes two integers to variables of ours.
    let _ = unsafe { cu::cuMemGetInfo_v2(&mut free, &mut total) };
    (total as u64, free as u64)
}
