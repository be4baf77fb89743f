//! What runs jobs: a CUDA device or the CPU. A backend belongs to one worker thread.
//!
//! Shared by all of them: which job is which call (`execute.rs`), modules and kernels (`modules.rs`), the threads that
//! load them (`lane.rs`), recorded graphs (`graphs.rs`), resident kernels that make way (`residents.rs`). A folder each
//! for what differs, with the same files in all: `cuda/mod.rs` (the device and its operations), `cuda/streams.rs`,
//! `cuda/memory.rs`, `cuda/modules.rs`. How to add another is in ARCHITECTURE.md.

pub(crate) mod cpu;
pub(crate) mod cuda;
mod execute;
mod graphs;
mod lane;
mod modules;
mod residents;

use std::sync::Arc;

use crate::choice::{DeviceChoice, Unavailable};
use crate::error::DeviceError;
use crate::info::DeviceInfo;
use crate::queue::job::{Answer, Job, SentJob};
use crate::slab::Slab;
use crate::worker::host::HostKernels;

/// Opens a device. `host` is what runs kernels where the device is a CPU.
pub(crate) fn open(slab: &Arc<Slab>, choice: DeviceChoice, host: HostKernels) -> Result<Box<dyn Backend>, Unavailable> {
    match choice {
        DeviceChoice::Auto | DeviceChoice::Cpu => Ok(cpu::open(slab, host)),
        DeviceChoice::Cuda(index) => cuda::open(slab, index),
    }
}

/// A device as its worker sees it. `Executor` is the one implementation, over what a backend's folder has.
pub(crate) trait Backend {
    fn info(&self) -> DeviceInfo;

    /// Does a job, or puts it on its stream to be done in order. An error is the job's alone, unless the device is
    /// lost.
    /// `cell` is where the job lies in the slab, for copies inside its payload.
    fn execute(&mut self, stream: usize, job: Job, payload: &[u8], cell: u32) -> Result<Answer, DeviceError>;

    /// Has a job done on its lane, which answers it and sets its flag. It may take long and must not keep the worker.
    fn in_lane(&mut self, sent: SentJob, payload: &[u8], cell: u32);

    /// Has the stream's flag show `number` once everything before is done. True if that is an operation of the stream,
    /// for which the device stops between what comes before and what comes after.
    fn flag(&mut self, stream: usize, number: u32) -> Result<bool, DeviceError>;

    /// Sets a stream's priority for what comes from here on: low, or back to high.
    fn prioritize(&mut self, stream: usize, low: bool) -> Result<(), DeviceError>;

    /// Rings the server's doorbell once everything on the stream so far is done.
    fn notify(&mut self, stream: usize) -> Result<(), DeviceError>;
}

/// A job about something that is not there, or not its sender's: a bug of the server's, never a tenant's doing.
fn unknown(job: Job) -> DeviceError {
    DeviceError::Refused { why: format!("the worker does not know what {} is about: {job:?}", job.name()) }
}

/// A stream that is not open.
fn no_stream(stream: usize) -> DeviceError {
    DeviceError::Refused { why: format!("the worker has no stream {stream}") }
}

fn already_recording() -> DeviceError {
    DeviceError::BadLaunch { why: "a graph is being recorded already".to_owned() }
}

fn no_such_step(step: usize, recorded: usize) -> DeviceError {
    DeviceError::BadLaunch { why: format!("a step of a graph comes after step {step}, and {recorded} are recorded") }
}

fn not_recording() -> DeviceError {
    DeviceError::BadLaunch { why: "no graph is being recorded".to_owned() }
}
