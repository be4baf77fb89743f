//! Why something was not done.

use std::fmt;

use crate::compute;

/// The text says what was wrong and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The function was not deployed with permission to use the GPU, or asks for what only trusted tenants may do.
    Denied(String),
    /// The tenant's limit, or the device's: so many bytes were asked for.
    OutOfMemory(u64),
    /// An offset or a size beyond a buffer.
    OutOfRange(String),
    /// Not a kernel module: what is refused, in which function, at which byte.
    InvalidModule(String),
    /// The module does not export a kernel of that name.
    NoSuchKernel(String),
    /// The arguments do not fit the kernel, or the sizes do not fit the device.
    InvalidLaunch(String),
    /// The kernel trapped: what happened, where, and in which work item.
    Trap(String),
    /// The launch took longer than it may.
    Deadline(String),
    /// The device was lost. What was on it is gone; a new call finds a new device.
    DeviceLost(String),
    /// Too much is waiting already; try again when something is done.
    Busy(String),
    Failed(String),
}

impl From<compute::Error> for Error {
    fn from(error: compute::Error) -> Error {
        match error {
            compute::Error::Denied(why) => Error::Denied(why),
            compute::Error::OutOfMemory(bytes) => Error::OutOfMemory(bytes),
            compute::Error::OutOfRange(why) => Error::OutOfRange(why),
            compute::Error::InvalidModule(why) => Error::InvalidModule(why),
            compute::Error::NoSuchKernel(why) => Error::NoSuchKernel(why),
            compute::Error::InvalidLaunch(why) => Error::InvalidLaunch(why),
            compute::Error::Trap(why) => Error::Trap(why),
            compute::Error::Deadline(why) => Error::Deadline(why),
            compute::Error::DeviceLost(why) => Error::DeviceLost(why),
            compute::Error::Busy(why) => Error::Busy(why),
            compute::Error::Failed(why) => Error::Failed(why),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Denied(why) => write!(f, "not permitted: {why}"),
            Error::OutOfMemory(bytes) => write!(f, "out of device memory: {bytes} bytes were asked for"),
            Error::OutOfRange(why) => write!(f, "out of range: {why}"),
            Error::InvalidModule(why) => write!(f, "not a kernel module: {why}"),
            Error::NoSuchKernel(why) => write!(f, "no such kernel: {why}"),
            Error::InvalidLaunch(why) => write!(f, "the launch is not possible: {why}"),
            Error::Trap(why) => write!(f, "the kernel trapped: {why}"),
            Error::Deadline(why) => write!(f, "the launch took too long: {why}"),
            Error::DeviceLost(why) => write!(f, "the device was lost: {why}"),
            Error::Busy(why) => write!(f, "the device is busy: {why}"),
            Error::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

impl std::error::Error for Error {}
