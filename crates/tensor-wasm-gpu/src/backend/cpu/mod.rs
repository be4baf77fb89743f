//! The CPU as a device: the same jobs over memory of the worker's process. A device address is an address of this
//! process.

pub(crate) mod memory;
mod modules;
mod recording;
mod streams;

use std::collections::HashMap;
use std::sync::Arc;

use self::memory::HostMemory;
use self::modules::{CpuKernel, CpuLoader};
use self::recording::Recording;
use self::streams::{CpuStream, StreamLaunch, StreamOp};
use super::execute::{DeviceOps, Executor, LaunchShape};
use super::{Backend, already_recording, not_recording};
use crate::choice::DeviceKind;
use crate::error::DeviceError;
use crate::info::DeviceInfo;
use crate::queue::link::CONTROL;
use crate::slab::{STREAMS, Slab};
use crate::worker::host::HostKernels;

/// What a group and a grid may have. The runner counts in 64 bits and has no limits of its own; these are what every
/// CUDA device has, so that what runs here runs there.
const GROUP_ITEMS_MAX: u32 = 1024;
const GROUP_MAX: [u32; 3] = [GROUP_ITEMS_MAX, GROUP_ITEMS_MAX, 64];
const GRID_MAX: [u32; 3] = [i32::MAX.cast_unsigned(), 65_535, 65_535];
const GROUP_SHARED_BYTES_MAX: u32 = 48 << 10;

pub(super) fn open(slab: &Arc<Slab>, kernels: HostKernels) -> Box<dyn Backend> {
    let loader = CpuLoader { kernels: kernels.clone() };
    Box::new(Executor::new(slab.clone(), CpuDevice::new(slab.clone(), kernels), loader))
}

struct CpuDevice {
    slab: Arc<Slab>,
    memory: Arc<HostMemory>,
    kernels: HostKernels,
    streams: Vec<CpuStream>,
    /// By address: size, and the stream it belongs to.
    reserved: HashMap<u64, (u64, usize)>,
}

impl CpuDevice {
    fn new(slab: Arc<Slab>, kernels: HostKernels) -> CpuDevice {
        let mut streams: Vec<CpuStream> = (0..STREAMS).map(|_| CpuStream::default()).collect();
        streams[CONTROL].is_open = true;
        let memory = Arc::new(HostMemory::new(slab.clone()));
        CpuDevice { slab, memory, kernels, streams, reserved: HashMap::new() }
    }

    fn put(&mut self, on: usize, op: StreamOp) -> Result<(), DeviceError> {
        self.streams[on].put(on, op, &self.slab, &self.memory);
        Ok(())
    }

    /// Gives memory back once everything before on the stream is done.
    fn free(&mut self, on: usize, owner: usize, address: u64) -> Result<(), DeviceError> {
        let kernels = self.kernels.clone();
        self.put(on, StreamOp::Free { address, owner, kernels })
    }
}

impl DeviceOps for CpuDevice {
    type Loader = CpuLoader;
    type Graph = Vec<StreamOp>;

    fn info(&self) -> DeviceInfo {
        let (memory_total_bytes, memory_free_bytes) = memory::machine();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        DeviceInfo {
            kind: DeviceKind::Cpu,
            name: "CPU".to_owned(),
            multiprocessors: u32::try_from(cores).unwrap_or(u32::MAX),
            memory_total_bytes,
            memory_free_bytes,
            threads_per_block_max: GROUP_ITEMS_MAX,
            block_max: GROUP_MAX,
            grid_max: GRID_MAX,
            shared_bytes_per_block_max: GROUP_SHARED_BYTES_MAX,
            slab_address: self.slab.address(0) as u64,
            ..DeviceInfo::default()
        }
    }

    fn is_open(&self, stream: usize) -> bool {
        self.streams[stream].is_open
    }

    fn open_stream(&mut self, stream: usize, memory_bytes_max: u64, _multiprocessors: u32) -> Result<(), DeviceError> {
        let own = &mut self.streams[stream];
        own.is_open = true;
        own.owner = stream;
        own.memory_bytes_max = memory_bytes_max;
        Ok(())
    }

    fn open_more(&mut self, stream: usize, owner: usize) -> Result<(), DeviceError> {
        self.streams[stream].is_open = true;
        self.streams[stream].owner = owner;
        Ok(())
    }

    fn open_resident(&mut self, stream: usize, owner: usize, _words: usize) -> Result<(), DeviceError> {
        // Nothing here waits for a kernel that stays: it has a thread of its own.
        self.open_more(stream, owner)
    }

    fn owner(&self, stream: usize) -> usize {
        self.streams[stream].owner
    }

    fn order_after(&mut self, on: usize, before: usize) -> Result<(), DeviceError> {
        if let Some(latch) = self.streams[before].latch(before, &self.slab, &self.memory) {
            self.streams[on].wait_for(on, latch, &self.slab, &self.memory);
        }
        Ok(())
    }

    fn close_stream(&mut self, stream: usize) -> Result<(), DeviceError> {
        self.streams[stream].close();
        Ok(())
    }

    fn reserve(&mut self, stream: usize, bytes: u64) -> Result<u64, DeviceError> {
        let out_of_memory = || DeviceError::OutOfMemory { asked_bytes: bytes };
        let own = &mut self.streams[stream];
        let after = own.memory_bytes.checked_add(bytes).filter(|after| *after <= own.memory_bytes_max);
        let after = after.ok_or_else(out_of_memory)?;
        let address = self.memory.reserve(bytes).ok_or_else(out_of_memory)?;
        own.memory_bytes = after;
        self.reserved.insert(address, (bytes, stream));
        Ok(address)
    }

    fn release(&mut self, on: usize, owner: usize, address: u64, bytes: u64) -> Result<bool, DeviceError> {
        if self.reserved.get(&address) != Some(&(bytes, owner)) {
            return Ok(false);
        }
        self.reserved.remove(&address);
        self.streams[owner].memory_bytes -= bytes;
        self.free(on, owner, address).map(|()| true)
    }

    fn release_all(&mut self, stream: usize) -> Result<(), DeviceError> {
        let own = self.reserved.extract_if(|_, (_, owner)| *owner == stream);
        let own: Vec<u64> = own.map(|(address, _)| address).collect();
        self.streams[stream].memory_bytes = 0;
        own.into_iter().try_for_each(|address| self.free(stream, stream, address))
    }

    fn fill(&mut self, on: usize, address: u64, bytes: usize, value: u8) -> Result<(), DeviceError> {
        self.put(on, StreamOp::Fill { to: address, bytes, value })
    }

    fn write(&mut self, on: usize, from: *const u8, to_address: u64, bytes: usize) -> Result<(), DeviceError> {
        self.put(on, StreamOp::Copy { from: from as u64, to: to_address, bytes })
    }

    fn read(&mut self, on: usize, from_address: u64, to: *mut u8, bytes: usize) -> Result<(), DeviceError> {
        self.put(on, StreamOp::Copy { from: from_address, to: to as u64, bytes })
    }

    fn copy(&mut self, on: usize, from_address: u64, to_address: u64, bytes: usize) -> Result<(), DeviceError> {
        self.put(on, StreamOp::Copy { from: from_address, to: to_address, bytes })
    }

    fn launch(
        &mut self,
        on: usize,
        kernel: Arc<CpuKernel>,
        shape: LaunchShape,
        params: &[u8],
    ) -> Result<(), DeviceError> {
        self.put(on, StreamOp::Launch(Arc::new(StreamLaunch { kernel, shape, params: params.to_vec() })))
    }

    fn begin_graph(&mut self, on: usize) -> Result<(), DeviceError> {
        match &mut self.streams[on].recording {
            Some(_) => Err(already_recording()),
            none => {
                *none = Some(Recording::default());
                Ok(())
            }
        }
    }

    fn branch_graph(&mut self, on: usize, after: &[usize]) -> Result<(), DeviceError> {
        self.streams[on].recording.as_mut().ok_or_else(not_recording)?.branch(after)
    }

    fn end_graph(&mut self, on: usize) -> Result<Vec<StreamOp>, DeviceError> {
        self.streams[on].recording.take().ok_or_else(not_recording).map(Recording::end)
    }

    fn replay(&mut self, on: usize, graph: &Vec<StreamOp>) -> Result<(), DeviceError> {
        graph.iter().try_for_each(|op| self.put(on, op.clone()))
    }

    fn destroy_graph(&mut self, _graph: Vec<StreamOp>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn flag(&mut self, stream: usize, number: u32) -> Result<bool, DeviceError> {
        self.streams[stream].flag(stream, number, &self.slab, &self.memory);
        Ok(false)
    }

    fn prioritize(&mut self, _stream: usize, _low: bool) -> Result<(), DeviceError> {
        // The operating system shares out the CPU among the streams' threads.
        Ok(())
    }

    fn notify(&mut self, stream: usize) -> Result<(), DeviceError> {
        self.streams[stream].ring(stream, &self.slab, &self.memory);
        Ok(())
    }

    fn finish(&mut self) {
        while self.streams.iter().any(|stream| !stream.is_quiet()) {
            std::thread::yield_now();
        }
    }
}
