//! Why a tensor was not computed.

use std::fmt;

use super::raw;

/// The text says what was wrong and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The function's settings do not name the model, or the tenant may not use what was asked for.
    Denied(String),
    /// There is no such operation, or its arguments, shapes, types or bytes do not fit it.
    Invalid(String),
    /// More memory than the tenant may have.
    OutOfMemory(String),
    /// More tensors, nodes or computations than an instance may have at once.
    TooMany(String),
    /// The call's deadline would pass, or has passed.
    Deadline(String),
    /// The device was lost. What was on it alone is gone; a new call finds a new device.
    DeviceLost(String),
    /// There is no such model, or it cannot be read.
    NoSuchModel(String),
    /// It could not be computed: an index out of range, an integer divided by zero.
    Failed(String),
}

impl From<raw::Error> for Error {
    fn from(error: raw::Error) -> Error {
        match error {
            raw::Error::Denied(why) => Error::Denied(why),
            raw::Error::Invalid(why) => Error::Invalid(why),
            raw::Error::OutOfMemory(why) => Error::OutOfMemory(why),
            raw::Error::TooMany(why) => Error::TooMany(why),
            raw::Error::Deadline(why) => Error::Deadline(why),
            raw::Error::DeviceLost(why) => Error::DeviceLost(why),
            raw::Error::NoSuchModel(why) => Error::NoSuchModel(why),
            raw::Error::Failed(why) => Error::Failed(why),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Denied(why) => write!(f, "not permitted: {why}"),
            Error::Invalid(why) => write!(f, "not possible: {why}"),
            Error::OutOfMemory(why) => write!(f, "out of memory: {why}"),
            Error::TooMany(why) => write!(f, "too many: {why}"),
            Error::Deadline(why) => write!(f, "no time: {why}"),
            Error::DeviceLost(why) => write!(f, "the device was lost: {why}"),
            Error::NoSuchModel(why) => write!(f, "no such model: {why}"),
            Error::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

impl std::error::Error for Error {}
