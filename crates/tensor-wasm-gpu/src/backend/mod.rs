//! What can run jobs: a CUDA device or the CPU. A backend belongs to one worker thread.

pub(crate) mod cpu;
pub(crate) mod cuda;
mod lane;

use std::sync::atomic::Ordering;

use crate::error::DeviceError;
use crate::info::DeviceInfo;
use crate::queue::job::{Answer, Cell, Job, Sent};
use crate::slab::Slab;

pub(crate) trait Backend {
    fn info(&self) -> DeviceInfo;

    /// Does a job, or puts it on its stream to be done in order. An error is the job's alone, unless the device is lost.
    /// `cell` is where the job lies in the slab, for copies inside its payload.
    fn execute(&mut self, stream: usize, job: Job, payload: &[u8], cell: u32) -> Result<Answer, DeviceError>;

    /// Has a job done on its lane, which answers it and sets its flag. It may take long and must not keep the worker.
    fn in_lane(&mut self, sent: Sent, payload: &[u8], cell: u32);

    /// Has the stream's flag show `number` once everything before is done.
    fn flag(&mut self, stream: usize, number: u32) -> Result<(), DeviceError>;

    /// Sets a stream's priority for what comes from here on: low, or back to high.
    fn prioritize(&mut self, stream: usize, low: bool) -> Result<(), DeviceError>;

    /// Rings the server's bell once everything on the stream so far is done.
    fn notify(&mut self, stream: usize) -> Result<(), DeviceError>;
}

/// Answers a job of a lane, and says that it is done.
fn finish(slab: &Slab, sent: &Sent, cell: u32, answer: &Result<Answer, DeviceError>) {
    Cell(slab.cell(cell)).answer(answer);
    slab.flag(sent.stream).store(sent.number, Ordering::Release);
    slab.done_bell().ring();
}
