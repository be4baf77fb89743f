//! What a guest is told when the device did not do what it asked: one map from errors to kinds, for components, whose
//! `error` has a case for each, and for core modules, which get the kind's number. A bug of ours is not the guest's to
//! handle: it ends the call.

use tensor_wasm_gpu::DeviceError;
use tensor_wasm_jit::Refusal;
use tensor_wasm_launch::KernelError;

use crate::failure::Bug;

/// What went wrong; the numbers are what core modules see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum ErrorKind {
    Denied = -1,
    OutOfMemory = -2,
    OutOfRange = -3,
    InvalidModule = -4,
    NoSuchKernel = -5,
    InvalidLaunch = -6,
    Trap = -7,
    Deadline = -8,
    DeviceLost = -9,
    Busy = -10,
    NoSuchHandle = -11,
    Failed = -12,
}

/// An error of the guest's to handle.
#[derive(Debug)]
pub(super) struct GpuError {
    pub kind: ErrorKind,
    pub text: String,
    /// Of [`ErrorKind::OutOfMemory`].
    pub asked_bytes: u64,
}

impl GpuError {
    pub(super) fn new(kind: ErrorKind, text: impl Into<String>) -> GpuError {
        GpuError { kind, text: text.into(), asked_bytes: 0 }
    }

    /// The guest's error, or the bug that ends its call.
    pub(super) fn of(error: impl Into<KernelError>) -> wasmtime::Result<GpuError> {
        let error = error.into();
        let text = error.to_string();
        let (kind, asked_bytes) = match &error {
            KernelError::Bug(why) => return Err(wasmtime::Error::new(Bug(why.clone()))),
            KernelError::Refused(Refusal::NoSuchKernel { .. }) => (ErrorKind::NoSuchKernel, 0),
            KernelError::Refused(_) => (ErrorKind::InvalidModule, 0),
            KernelError::Arguments(_) => (ErrorKind::InvalidLaunch, 0),
            KernelError::Trap(_) => (ErrorKind::Trap, 0),
            KernelError::Deadline(_) => (ErrorKind::Deadline, 0),
            KernelError::Denied(_) => (ErrorKind::Denied, 0),
            KernelError::Busy(_) => (ErrorKind::Busy, 0),
            KernelError::Device(error) => match error {
                DeviceError::OutOfMemory { asked_bytes } | DeviceError::OverQuota { asked_bytes, .. } => {
                    (ErrorKind::OutOfMemory, *asked_bytes)
                }
                DeviceError::OutOfRange { .. } | DeviceError::ZeroSize => (ErrorKind::OutOfRange, 0),
                DeviceError::BadModule { .. } => (ErrorKind::InvalidModule, 0),
                DeviceError::NoSuchKernel { .. } => (ErrorKind::NoSuchKernel, 0),
                DeviceError::BadParams { .. } | DeviceError::BadLaunch { .. } => (ErrorKind::InvalidLaunch, 0),
                DeviceError::DeviceLost { .. } => (ErrorKind::DeviceLost, 0),
                DeviceError::Busy { .. } => (ErrorKind::Busy, 0),
                DeviceError::StaleHandle
                | DeviceError::ForeignHandle
                | DeviceError::Unsupported { .. }
                | DeviceError::Refused { .. } => (ErrorKind::Failed, 0),
            },
        };
        Ok(GpuError { kind, text, asked_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_of_ours_is_no_error_of_the_guests() {
        fn broken() {
            panic!("out of order");
        }
        let panicked = tokio::task::spawn_blocking(broken).await.unwrap_err();
        let ended = GpuError::of(tensor_wasm_launch::ended(panicked)).unwrap_err();
        assert!(ended.is::<Bug>(), "{ended:#}");
        let denied = GpuError::of(KernelError::Denied("no".to_owned())).unwrap();
        assert_eq!((denied.kind, denied.text.as_str()), (ErrorKind::Denied, "no"));
        let quota = GpuError::of(DeviceError::OutOfMemory { asked_bytes: 9 }).unwrap();
        assert_eq!((quota.kind, quota.asked_bytes), (ErrorKind::OutOfMemory, 9));
    }
}
