//! The driver and its contexts: whether there is one, what its errors mean, and the context that several threads share.

use std::ffi::{CStr, c_int};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::sys as cu;
use cudarc::driver::sys::CUresult;

use crate::choice::Unavailable;
use crate::error::DeviceError;

/// The oldest CUDA a driver may be for: what we ask kernels about their parameters came with 12.4.
const DRIVER_VERSION_MIN: i32 = 12_040;

/// Finds out, without keeping anything, whether a device can be opened.
pub(crate) fn probe(index: u32) -> Result<(cu::CUdevice, i32), Unavailable> {
    // SAFETY: opening the driver's library runs its initialisers, which is what anybody who uses CUDA does.
    if let Err(error) = unsafe { libloading::Library::new("libcuda.so.1") } {
        // What went wrong is in the cause; the error itself says only that something did.
        let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        return Err(Unavailable::NoDriver { why });
    }
    let failed = |result: CUresult| Unavailable::DriverFailed { why: explain(result) };
    // SAFETY: initialising the driver has no preconditions.
    match unsafe { cu::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        none @ CUresult::CUDA_ERROR_NO_DEVICE => return Err(Unavailable::NoDevice { why: explain(none) }),
        other => return Err(failed(other)),
    }
    let (mut version, mut count, mut device) = (0, 0, 0);
    // SAFETY: each call writes one integer to a variable of ours.
    let asked = unsafe { (cu::cuDriverGetVersion(&mut version), cu::cuDeviceGetCount(&mut count)) };
    if asked.0 != CUresult::CUDA_SUCCESS || asked.1 != CUresult::CUDA_SUCCESS {
        return Err(failed(if asked.0 == CUresult::CUDA_SUCCESS { asked.1 } else { asked.0 }));
    }
    if version < DRIVER_VERSION_MIN {
        let text = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        return Err(Unavailable::DriverTooOld { found: text(version), needed: text(DRIVER_VERSION_MIN) });
    }
    let known = u32::try_from(count).unwrap_or(0);
    if index >= known {
        return Err(Unavailable::NoSuchDevice { index, count: known });
    }
    // SAFETY: writes one integer to a variable of ours.
    match unsafe { cu::cuDeviceGet(&mut device, c_int::try_from(index).unwrap_or(c_int::MAX)) } {
        CUresult::CUDA_SUCCESS => Ok((device, version)),
        other => Err(failed(other)),
    }
}

/// The device's primary context, which several threads make their own. Released with the last of them.
pub(super) struct Context {
    context: cu::CUcontext,
    device: cu::CUdevice,
}

// SAFETY: a context may be current to several threads at once; the driver serialises what needs it.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn retain(device: cu::CUdevice) -> Result<Arc<Context>, DeviceError> {
        let mut context = null_mut();
        // SAFETY: the device is valid; `Drop` releases what is retained here.
        check(unsafe { cu::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        Ok(Arc::new(Context { context, device }))
    }

    /// Makes it the calling thread's context.
    pub(super) fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained while `self` lives.
        check(unsafe { cu::cuCtxSetCurrent(self.context) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained by `retain`, once; nobody who has entered it is left but whoever is leaving.
        let _ = unsafe { cu::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// What the driver says about an error.
fn explain(result: CUresult) -> String {
    let mut text = null();
    // SAFETY: the driver writes a pointer to a static string, or leaves null.
    let known = unsafe { cu::cuGetErrorString(result, &mut text) };
    let name = format!("{result:?}");
    if known != CUresult::CUDA_SUCCESS || text.is_null() {
        return name;
    }
    // SAFETY: a string of the driver's that lives as long as the process.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{} ({name})", text.to_string_lossy())
}

/// Whether an error is sticky: every later call on the context returns it again, so that only a new process helps.
fn is_sticky(result: CUresult) -> bool {
    matches!(
        result,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

pub(super) fn check(result: CUresult) -> Result<(), DeviceError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        sticky if is_sticky(sticky) => Err(DeviceError::DeviceLost { why: explain(sticky) }),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(DeviceError::OutOfMemory { asked_bytes: 0 }),
        other => Err(DeviceError::Refused { why: explain(other) }),
    }
}

/// An attribute of a device; 0 where the driver does not know it.
pub(super) fn attribute(device: cu::CUdevice, attribute: cu::CUdevice_attribute) -> u32 {
    let mut value = 0;
    // SAFETY: writes one integer to a variable of ours.
    let result = unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, device) };
    if result == CUresult::CUDA_SUCCESS { u32::try_from(value).unwrap_or(0) } else { 0 }
}
