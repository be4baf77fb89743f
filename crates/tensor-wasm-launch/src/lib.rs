//! Launches of kernels: the compiler and the device joined. A kernel module is compiled for the device there is, loaded
//! by its worker, launched with buffers of one tenant under a deadline, and what it trapped with is turned into words.
//!
//! ```text
//! bytes or a BuiltKernel → KernelModule (module) → Image (cache) → LaunchStream (tenant) → Launch (launch) → Trap
//! ```
//!
//! The crate knows neither guests nor tenancy policy nor an engine: what runs kernels where the device is a CPU is
//! handed to the device as [`tensor_wasm_gpu::HostKernels`].

pub mod cache;
mod launch;
mod module;
mod tenant;

pub use crate::launch::{Argument, Canceller, Launch};
pub use crate::module::{Code, KernelModule};
pub use crate::tenant::{Kernels, LaunchStream, Opener, TenantKernels, ended};

use tensor_wasm_gpu::DeviceError;
use tensor_wasm_jit::Refusal;

/// Maps on the path of every launch: seeded at random per process, quicker than the default.
pub(crate) type HashMap<K, V> = std::collections::HashMap<K, V, foldhash::quality::RandomState>;

/// Why a kernel was not run, or did not end as it should.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum KernelError {
    #[error("{0}")]
    Refused(#[from] Refusal),
    #[error("{0}")]
    Device(#[from] DeviceError),
    #[error("{0}")]
    Arguments(String),
    #[error("{0}")]
    Trap(String),
    #[error("{0}")]
    Deadline(String),
    #[error("{0}")]
    Denied(String),
    #[error("{0}")]
    Busy(String),
    /// A mistake of ours, whoever asked.
    #[error("{0}")]
    Bug(String),
}
