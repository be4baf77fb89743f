//! Devices: everything the rest of the system may ask of a GPU, on CUDA where there is a driver and on the CPU where there
//! is none, from one binary. The only crate that calls the CUDA driver. It knows nothing of Wasm, HTTP or policy.
//!
//! A device belongs to a worker, in a process of its own or in a thread. Handles ([`Device`], [`Tenant`]) only send it
//! jobs, through memory both sides share:
//!
//! ```text
//! Tenant → Job → fair line → ring → worker → backend → stream → flag → Completion
//! ```
//!
//! The folders below are listed in that order, after the lock-free parts that several of them use.

// Under the model checker only the lock-free parts are built, over its own atomics: `make model`.
mod sync;

#[cfg(not(loom))]
mod backend;
#[cfg(not(loom))]
mod device;
#[cfg(not(loom))]
mod queue;
#[cfg(not(loom))]
mod slab;
#[cfg(not(loom))]
mod worker;

#[cfg(not(loom))]
#[doc(hidden)]
pub mod baseline;
#[cfg(not(loom))]
mod choice;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod info;
#[cfg(not(loom))]
mod metrics;

#[cfg(not(loom))]
pub use crate::exports::*;

#[cfg(not(loom))]
mod exports {
    pub use crate::choice::{DeviceChoice, Unavailable, optional_libraries};
    pub use crate::device::arena::{Handle, MemoryStats};
    pub use crate::device::launch::{Graph, Grid, Kernel, KernelInfo, Module, Step};
    pub use crate::device::params::{Param, Params};
    pub use crate::device::pinned::{Pinned, PinnedMapping};
    pub use crate::device::{
        Buffer, Completion, Device, DeviceEvent, Events, OpenOptions, Placement, Tenant, TenantLimits,
    };
    pub use crate::error::DeviceError;
    pub use crate::info::{DeviceInfo, DeviceKind};
    pub use crate::slab::SlabPlan;
    pub use crate::worker::host::{HostCode, HostKernels, HostLaunch, HostMemory, HostModule};
    pub use crate::worker::keeper::worker_main;
    pub use crate::worker::lifeline::end_with_server;
}
