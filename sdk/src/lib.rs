//! Launches of Wasm kernels from components, safe and typed, and tensors ([`tensor`]). What follows is the README.

#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod buffer;
mod error;
mod launch;
pub mod tensor;

pub use buffer::{Buffer, Pod};
pub use error::Error;
pub use launch::{Argument, Grid, Kernels, Launch};

/// What launches are waited for with, together with anything else of WASI.
pub use wasip2::io::poll::Pollable;

#[allow(unsafe_code, clippy::all, reason = "generated")]
mod bindings {
    wit_bindgen::generate!({
        path: "../wit/gpu",
        world: "imports",
        with: { "wasi:io/poll@0.2.12": wasip2::io::poll },
    });
}

use bindings::tensor_wasm::gpu::compute;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    Cuda,
}

/// The device that this function's launches run on.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    pub kind: DeviceKind,
    pub name: String,
    pub multiprocessors: u32,
    /// Work items that a group may have.
    pub group_items_max: u32,
    /// What the tenant may allocate, and what it has allocated.
    pub memory_bytes_max: u64,
    pub memory_bytes_used: u64,
}

pub fn device_info() -> Result<DeviceInfo> {
    let info = compute::device_info()?;
    let kind = match info.kind {
        compute::Kind::Cpu => DeviceKind::Cpu,
        compute::Kind::Cuda => DeviceKind::Cuda,
    };
    Ok(DeviceInfo {
        kind,
        name: info.name,
        multiprocessors: info.multiprocessors,
        group_items_max: info.group_items_max,
        memory_bytes_max: info.memory_bytes_max,
        memory_bytes_used: info.memory_bytes_used,
    })
}
