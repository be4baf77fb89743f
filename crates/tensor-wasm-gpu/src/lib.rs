//! Devices: everything the rest of the system may ask of a GPU, on CUDA where there is a driver and on the CPU where
//! there is none, from one binary. The only crate that calls the CUDA driver. It knows nothing of Wasm, HTTP or policy.
//!
//! A device belongs to a worker, in a process of its own or in a thread. Handles ([`Device`], [`Tenant`]) only send it
//! jobs, through memory both sides share:
//!
//! ```text
//! Tenant ─ device/  → Job ─ queue/job.rs  → fair line, cell, ring ─ queue/, slab/, sync/
//!                                                     │
//!           Completion ← flag ← stream ← backend/  ← worker/
//! ```
//!
//! The folders below are listed in that order, after the lock-free parts that several of them use.

#![allow(
    unsafe_code,
    reason = "the one crate that calls the CUDA driver and maps memory; each block says why it is sound"
)]

// Under the model checker only the lock-free parts are built, over its own atomics: `make model`.
mod sync;

// What a tenant may ask of a device.
#[cfg(not(loom))]
mod device;

// Jobs, whose goes next, and the server's end of the ring and the flags.
#[cfg(not(loom))]
mod queue;

// The memory that server and worker share.
#[cfg(not(loom))]
mod slab;

// The thread or process that owns a device, and who keeps it alive.
#[cfg(not(loom))]
mod worker;

// What runs jobs: CUDA, or the CPU.
#[cfg(not(loom))]
mod backend;

// Used all along the way.
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
mod number;
#[cfg(not(loom))]
mod product;
#[cfg(not(loom))]
mod wait;

#[cfg(not(loom))]
pub use crate::exports::*;

#[cfg(not(loom))]
mod exports {
    pub use crate::backend::cpu::memory::HostMemory;
    pub use crate::choice::{DeviceChoice, Unavailable, optional_libraries};
    pub use crate::device::arena::{Handle, MemoryStats, buffer_bytes};
    pub use crate::device::copy::{ReadUnderWay, block_on};
    pub use crate::device::launch::{Graph, GraphStep, Grid, Kernel, KernelInfo, Module};
    pub use crate::device::params::{Param, Params};
    pub use crate::device::pinned::{Pinned, PinnedMapping};
    pub use crate::device::region::{Bell, SharedRegion, SharedWords};
    pub use crate::device::resident::Resident;
    pub use crate::device::stream::Stream;
    pub use crate::device::{
        Buffer, Completion, Device, DeviceEvent, Events, OpenOptions, Placement, Tenant, TenantLimits,
    };
    pub use crate::error::DeviceError;
    pub use crate::info::{DeviceInfo, DeviceKind};
    pub use crate::product::{Product, ProductElement, ProductEpilogue, ProductOperand};
    pub use crate::queue::link::Payer;
    pub use crate::slab::{REGION_NAME_MAX, REGIONS_BYTES_MAX, REGIONS_MAX, SlabPlan};
    pub use crate::wait::{LAUNCH_SPIN, READ_SPIN, spin_until};
    pub use crate::worker::host::{HostCode, HostKernels, HostLaunch, HostModule};
    pub use crate::worker::keeper::worker_main;
    pub use crate::worker::lifeline::end_with_server;
}
