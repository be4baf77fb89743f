//! Everything that can go wrong with a device, for the one job or allocation it went wrong with. `DeviceLost` is the
//! only error that says something about the device itself.

/// Why a device did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    #[error("the device has no {asked_bytes} bytes left")]
    OutOfMemory { asked_bytes: u64 },
    #[error(
        "tenant {tenant:?} holds {used_bytes} of its {bytes_max} bytes of device memory, and {asked_bytes} more were \
         asked for"
    )]
    OverQuota { tenant: String, asked_bytes: u64, used_bytes: u64, bytes_max: u64 },
    #[error("a buffer has at least one byte")]
    ZeroSize,
    #[error("{len} bytes at offset {offset} do not lie within {size} bytes")]
    OutOfRange { offset: u64, len: u64, size: u64 },
    #[error("the handle is not valid any more: what it stood for was freed")]
    StaleHandle,
    #[error("the handle belongs to another tenant")]
    ForeignHandle,
    #[error("{queued} jobs of tenant {tenant:?} are waiting already, which is its limit")]
    Busy { tenant: String, queued: usize },
    #[error("the kernel module cannot be loaded: {why}")]
    BadModule { why: String },
    #[error("the module has no kernel {name:?}")]
    NoSuchKernel { name: String },
    #[error("the kernel's parameters do not fit: {why}")]
    BadParams { why: String },
    #[error("the kernel cannot be launched so: {why}")]
    BadLaunch { why: String },
    #[error("the device was lost: {why}")]
    DeviceLost { why: String },
    #[error("{what} is not supported on this device")]
    Unsupported { what: String },
    /// The driver refused, for a reason of its own.
    #[error("the device refused: {why}")]
    Refused { why: String },
}

/// The errors that a worker reports, as numbers in a response. The others are found before a job is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Code {
    Ok = 0,
    OutOfMemory = 1,
    BadModule = 2,
    NoSuchKernel = 3,
    BadParams = 4,
    BadLaunch = 5,
    Unsupported = 6,
    Refused = 7,
    DeviceLost = 8,
}

impl DeviceError {
    /// As a response carries it: a code, a number and a text.
    pub(crate) fn to_wire(&self) -> (u64, u64, &str) {
        match self {
            DeviceError::OutOfMemory { asked_bytes } => (Code::OutOfMemory as u64, *asked_bytes, ""),
            DeviceError::BadModule { why } => (Code::BadModule as u64, 0, why),
            DeviceError::NoSuchKernel { name } => (Code::NoSuchKernel as u64, 0, name),
            DeviceError::BadParams { why } => (Code::BadParams as u64, 0, why),
            DeviceError::BadLaunch { why } => (Code::BadLaunch as u64, 0, why),
            DeviceError::Unsupported { what } => (Code::Unsupported as u64, 0, what),
            DeviceError::DeviceLost { why } => (Code::DeviceLost as u64, 0, why),
            DeviceError::Refused { why } => (Code::Refused as u64, 0, why),
            DeviceError::OverQuota { .. }
            | DeviceError::ZeroSize
            | DeviceError::OutOfRange { .. }
            | DeviceError::StaleHandle
            | DeviceError::ForeignHandle
            | DeviceError::Busy { .. } => (Code::Refused as u64, 0, "an error that no worker reports"),
        }
    }

    /// The error of a response; `None` for success. A code nobody knows is an error too, never a success.
    pub(crate) fn from_wire(code: u64, number: u64, text: String) -> Option<DeviceError> {
        Some(match code {
            c if c == Code::Ok as u64 => return None,
            c if c == Code::OutOfMemory as u64 => DeviceError::OutOfMemory { asked_bytes: number },
            c if c == Code::BadModule as u64 => DeviceError::BadModule { why: text },
            c if c == Code::NoSuchKernel as u64 => DeviceError::NoSuchKernel { name: text },
            c if c == Code::BadParams as u64 => DeviceError::BadParams { why: text },
            c if c == Code::BadLaunch as u64 => DeviceError::BadLaunch { why: text },
            c if c == Code::Unsupported as u64 => DeviceError::Unsupported { what: text },
            c if c == Code::DeviceLost as u64 => DeviceError::DeviceLost { why: text },
            _ => DeviceError::Refused { why: text },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_reports_arrives() {
        for error in [
            DeviceError::OutOfMemory { asked_bytes: 7 },
            DeviceError::BadModule { why: "line 3".to_owned() },
            DeviceError::NoSuchKernel { name: "k".to_owned() },
            DeviceError::BadParams { why: "two".to_owned() },
            DeviceError::BadLaunch { why: "grid".to_owned() },
            DeviceError::Unsupported { what: "kernels".to_owned() },
            DeviceError::DeviceLost { why: "gone".to_owned() },
            DeviceError::Refused { why: "no".to_owned() },
        ] {
            let (code, number, text) = error.to_wire();
            assert_eq!(DeviceError::from_wire(code, number, text.to_owned()), Some(error));
        }
        assert_eq!(DeviceError::from_wire(0, 0, String::new()), None);
        assert!(DeviceError::from_wire(u64::MAX, 0, String::new()).is_some());
    }
}
