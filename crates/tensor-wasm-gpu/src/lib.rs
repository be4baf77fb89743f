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
//! The modules below are listed in that order, after the lock-free parts that several of them use.

// Under the model checker only the lock-free parts are built, over its own atomics: `make model`.
mod bell;
mod ring;
mod sync;
mod waiters;

#[cfg(not(loom))]
mod arena;
#[cfg(not(loom))]
mod copy;
#[cfg(not(loom))]
mod device;
#[cfg(not(loom))]
mod launch;
#[cfg(not(loom))]
mod params;
#[cfg(not(loom))]
mod pinned;
#[cfg(not(loom))]
mod staging;

#[cfg(not(loom))]
mod fair;
#[cfg(not(loom))]
mod job;
#[cfg(not(loom))]
mod link;

#[cfg(not(loom))]
mod host;
#[cfg(not(loom))]
mod info;
#[cfg(not(loom))]
mod slab;

#[cfg(not(loom))]
mod keeper;
#[cfg(not(loom))]
mod worker;

#[cfg(not(loom))]
mod backend;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod baseline;

#[cfg(not(loom))]
mod choice;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod metrics;

#[cfg(not(loom))]
pub use crate::exports::*;

#[cfg(not(loom))]
mod exports {
    pub use crate::arena::{Handle, MemoryStats};
    pub use crate::choice::{DeviceChoice, Unavailable, optional_libraries};
    pub use crate::device::{
        Buffer, Completion, Device, DeviceEvent, Events, OpenOptions, Placement, Tenant, TenantLimits,
    };
    pub use crate::error::DeviceError;
    pub use crate::host::{HostCode, HostKernels, HostLaunch, HostMemory, HostModule};
    pub use crate::info::{DeviceInfo, DeviceKind};
    pub use crate::keeper::worker_main;
    pub use crate::launch::{Graph, Grid, Kernel, KernelInfo, Module, Step};
    pub use crate::params::{Param, Params};
    pub use crate::pinned::{Pinned, PinnedMapping};
    pub use crate::slab::SlabPlan;
}
