//! A CUDA device, through the driver API. The driver's library is opened at run time; without it, or with too old a
//! one, opening says so.
//!
//! The worker's thread owns the context. Three other kinds of threads touch CUDA, all started when first needed: a
//! stream's that waits for events (`streams.rs`), a tenant's that loads modules (`modules.rs`), and a resident kernel's
//! that launches it again after it made way (`residents.rs`).

mod driver;
mod memory;
mod modules;
mod products;
mod queues;
mod recording;
mod residents;
mod streams;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys as cu;

pub(crate) use self::driver::probe;
use self::driver::{Context, attribute, check};
use self::modules::{CudaKernel, CudaLoader};
use self::queues::HardwareQueues;
use self::recording::Recording;
use self::residents::CudaResident;
use self::streams::CudaStream;
use super::execute::{DeviceOps, Executor, LaunchShape};
use super::residents::Residents;
use super::{Backend, already_recording, no_stream, not_recording};
use crate::choice::{DeviceKind, Unavailable};
use crate::error::DeviceError;
use crate::info::DeviceInfo;
use crate::queue::link::CONTROL;
use crate::slab::{STREAMS, Slab};

pub(super) fn open(slab: &Arc<Slab>, index: u32) -> Result<Box<dyn Backend>, Unavailable> {
    let (device, _) = probe(index)?;
    let failed = |error: DeviceError| Unavailable::DriverFailed { why: error.to_string() };
    let context = Context::retain(device).map_err(failed)?;
    context.enter().map_err(failed)?;
    let slab_address = memory::register(slab).map_err(failed)?;
    let residents = Residents::of_process();
    let loader = CudaLoader::new(device, context.clone(), residents.clone());
    let streams = (0..STREAMS).map(|_| None).collect();
    let queues = HardwareQueues::new();
    let mut opened = CudaDevice { slab: slab.clone(), device, context, slab_address, streams, queues, residents };
    opened.streams[CONTROL] = Some(CudaStream::control(CONTROL, &mut opened.queues).map_err(failed)?);
    Ok(Box::new(Executor::new(slab.clone(), opened, loader)))
}

struct CudaDevice {
    slab: Arc<Slab>,
    device: cu::CUdevice,
    context: Arc<Context>,
    slab_address: u64,
    streams: Vec<Option<CudaStream>>,
    queues: HardwareQueues,
    residents: Arc<Residents>,
}

/// A graph, instantiated.
struct CudaGraph(cu::CUgraphExec);

impl CudaDevice {
    fn stream(&self, stream: usize) -> Result<&CudaStream, DeviceError> {
        self.streams[stream].as_ref().ok_or_else(|| no_stream(stream))
    }

    /// Where a stream's work goes on the device.
    fn on_device(&self, stream: usize) -> Result<cu::CUstream, DeviceError> {
        Ok(self.queues.stream(self.stream(stream)?.queue))
    }

    /// The same for what may be recorded.
    fn target(&self, stream: usize) -> Result<cu::CUstream, DeviceError> {
        self.stream(stream)?.recording.as_ref().map_or_else(|| self.on_device(stream), |recording| Ok(recording.stream))
    }

    fn stream_mut(&mut self, stream: usize) -> Result<&mut CudaStream, DeviceError> {
        self.streams[stream].as_mut().ok_or_else(|| no_stream(stream))
    }

    /// Puts a stream in its place.
    fn put_stream(&mut self, stream: usize, opened: CudaStream) -> Result<(), DeviceError> {
        self.close_stream(stream)?;
        self.streams[stream] = Some(opened);
        Ok(())
    }

    fn name(&self) -> String {
        const NAME_BYTES: c_int = 128;
        let mut name = [0; NAME_BYTES.cast_unsigned() as usize];
        // SAFETY: writes a string no longer than its buffer.
        let _ = unsafe { cu::cuDeviceGetName(name.as_mut_ptr(), NAME_BYTES - 1, self.device) };
        let name: Vec<u8> = name.iter().take_while(|c| **c != 0).map(|c| c.cast_unsigned()).collect();
        String::from_utf8_lossy(&name).into_owned()
    }
}

impl DeviceOps for CudaDevice {
    type Loader = CudaLoader;
    type Graph = CudaGraph;

    fn info(&self) -> DeviceInfo {
        use cu::CUdevice_attribute as Attribute;
        let of = |name: Attribute| attribute(self.device, name);
        let mut version = 0;
        // SAFETY: writes one integer to a variable of ours.
        let _ = unsafe { cu::cuDriverGetVersion(&mut version) };
        let (memory_total_bytes, memory_free_bytes) = memory::device_memory();
        DeviceInfo {
            kind: DeviceKind::Cuda,
            name: self.name(),
            multiprocessors: of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            memory_total_bytes,
            memory_free_bytes,
            compute_capability: (
                of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            driver_version: u32::try_from(version).unwrap_or(0),
            threads_per_block_max: of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
            block_max: [
                of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
                of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
                of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z),
            ],
            grid_max: [
                of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
                of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
                of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z),
            ],
            shared_bytes_per_block_max: of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            slab_address: self.slab_address,
        }
    }

    fn is_open(&self, stream: usize) -> bool {
        self.streams[stream].is_some()
    }

    fn open_stream(&mut self, stream: usize, memory_bytes_max: u64, multiprocessors: u32) -> Result<(), DeviceError> {
        let green = match multiprocessors {
            0 => None,
            count => {
                let _pause = self.residents.pause()?;
                Some(streams::new_green(self.device, count)?)
            }
        };
        let opened = CudaStream::new(stream, green, &mut self.queues).and_then(|mut opened| {
            match memory::new_pool(self.device, memory_bytes_max) {
                Ok(pool) => opened.pool = Some(pool),
                Err(error) => {
                    opened.destroy(stream, &mut self.queues);
                    return Err(error);
                }
            }
            Ok(opened)
        });
        match opened {
            Ok(opened) => self.put_stream(stream, opened),
            Err(error) => {
                if let Some(green) = green {
                    let _pause = self.residents.pause()?;
                    streams::destroy_green(green);
                }
                Err(error)
            }
        }
    }

    fn open_more(&mut self, stream: usize, owner: usize) -> Result<(), DeviceError> {
        let green = self.stream(owner)?.green;
        let opened = CudaStream::new(owner, green, &mut self.queues)?;
        self.put_stream(stream, opened)
    }

    fn open_resident(&mut self, stream: usize, owner: usize, words: usize) -> Result<(), DeviceError> {
        let green = self.stream(owner)?.green;
        let opened = CudaStream::resident(owner, green, words, &mut self.queues)?;
        self.put_stream(stream, opened)
    }

    fn owner(&self, stream: usize) -> usize {
        self.streams[stream].as_ref().map_or(stream, |own| own.owner)
    }

    fn order_after(&mut self, on: usize, before: usize) -> Result<(), DeviceError> {
        streams::order(self.on_device(before)?, self.on_device(on)?)
    }

    fn close_stream(&mut self, stream: usize) -> Result<(), DeviceError> {
        if stream == CONTROL {
            return Err(no_stream(stream));
        }
        if let Some(own) = self.streams[stream].take()
            && let Some(green) = own.destroy(stream, &mut self.queues)
        {
            let _pause = self.residents.pause()?;
            streams::destroy_green(green);
        }
        Ok(())
    }

    fn reserve(&mut self, stream: usize, bytes: u64) -> Result<u64, DeviceError> {
        let pool = self.stream(stream)?.pool.ok_or_else(|| no_stream(stream))?;
        let address = memory::reserve(pool, self.on_device(CONTROL)?, bytes)?;
        self.stream_mut(stream)?.reserved.insert(address);
        Ok(address)
    }

    fn release(&mut self, on: usize, owner: usize, address: u64, _bytes: u64) -> Result<bool, DeviceError> {
        if !self.stream_mut(owner)?.reserved.remove(&address) {
            return Ok(false);
        }
        // SAFETY: the address came from `reserve`, and is forgotten above.
        check(unsafe { cu::cuMemFreeAsync(address, self.on_device(on)?) }).map(|()| true)
    }

    fn release_all(&mut self, stream: usize) -> Result<(), DeviceError> {
        let on_device = self.on_device(stream)?;
        for address in self.stream_mut(stream)?.reserved.drain() {
            // SAFETY: an address from `reserve`, forgotten here.
            check(unsafe { cu::cuMemFreeAsync(address, on_device) })?;
        }
        Ok(())
    }

    fn fill(&mut self, on: usize, address: u64, bytes: usize, value: u8) -> Result<(), DeviceError> {
        // SAFETY: a stream of ours and a range that `DeviceOps` says is the job's.
        check(unsafe { cu::cuMemsetD8Async(address, value, bytes, self.target(on)?) })
    }

    fn write(&mut self, on: usize, from: *const u8, to_address: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: as in `fill`.
        check(unsafe { cu::cuMemcpyHtoDAsync_v2(to_address, from.cast(), bytes, self.target(on)?) })
    }

    fn read(&mut self, on: usize, from_address: u64, to: *mut u8, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: as in `fill`.
        check(unsafe { cu::cuMemcpyDtoHAsync_v2(to.cast(), from_address, bytes, self.target(on)?) })
    }

    fn copy(&mut self, on: usize, from_address: u64, to_address: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: as in `fill`.
        check(unsafe { cu::cuMemcpyDtoDAsync_v2(to_address, from_address, bytes, self.target(on)?) })
    }

    fn launch(&mut self, on: usize, kernel: CudaKernel, shape: LaunchShape, params: &[u8]) -> Result<(), DeviceError> {
        let (own, target) = (self.stream(on)?, self.target(on)?);
        let kernel = match kernel {
            CudaKernel::Compiled(kernel) => kernel,
            CudaKernel::Product(_) if own.resident.is_some() => {
                return Err(DeviceError::BadLaunch { why: "a product does not stay on the device".to_owned() });
            }
            CudaKernel::Product(product) => return product.launch(target, params),
        };
        // A function belongs to one context, a kernel to all: a green one, too.
        let function = if own.green.is_some() { kernel.kernel.cast() } else { kernel.function };
        let Some(resident) = &own.resident else { return launch_kernel(function, target, shape, params) };
        if resident.ending.is_some() {
            return Err(DeviceError::BadLaunch { why: "the stream has its resident kernel already".to_owned() });
        }
        let kernel = CudaResident::new(self.context.clone(), function, target, shape, params)?;
        let ending = self.residents.stay(&self.slab, resident.words, on, kernel)?;
        if let Some(resident) = &mut self.stream_mut(on)?.resident {
            resident.ending = Some(ending);
        }
        Ok(())
    }

    fn begin_graph(&mut self, on: usize) -> Result<(), DeviceError> {
        let own = self.stream_mut(on)?;
        if own.recording.is_some() {
            return Err(already_recording());
        }
        own.recording = Some(Recording::begin(own.green)?);
        Ok(())
    }

    fn branch_graph(&mut self, on: usize, after: &[usize]) -> Result<(), DeviceError> {
        self.stream_mut(on)?.recording.as_mut().ok_or_else(not_recording)?.branch(after)
    }

    fn end_graph(&mut self, on: usize) -> Result<CudaGraph, DeviceError> {
        self.stream_mut(on)?.recording.take().ok_or_else(not_recording)?.end().map(CudaGraph)
    }

    fn replay(&mut self, on: usize, graph: &CudaGraph) -> Result<(), DeviceError> {
        // SAFETY: a graph and a stream of ours.
        check(unsafe { cu::cuGraphLaunch(graph.0, self.on_device(on)?) })
    }

    fn destroy_graph(&mut self, graph: CudaGraph) -> Result<(), DeviceError> {
        // SAFETY: a graph of ours that nobody can name any more; the driver keeps it while it runs.
        check(unsafe { cu::cuGraphExecDestroy(graph.0) })
    }

    fn flag(&mut self, stream: usize, number: u32) -> Result<bool, DeviceError> {
        let Some(own) = &self.streams[stream] else {
            // A job for a stream that is not open has failed already; its answer is in its cell.
            self.slab.flag(stream).store(number, Ordering::Release);
            return Ok(false);
        };
        if own.recording.is_some() {
            // The job that ends the recording has a later number and is flagged for all of them.
            return Ok(false);
        }
        if let Some(ending) = own.resident.as_ref().and_then(|resident| resident.ending.as_ref()) {
            ending.flag(number);
            return Ok(false);
        }
        let address = self.slab_address + Slab::flag_offset(stream);
        // SAFETY: an aligned word of the slab, which is registered and mapped.
        check(unsafe { cu::cuStreamWriteValue32_v2(self.queues.stream(own.queue), address, number, 0) }).map(|()| true)
    }

    fn prioritize(&mut self, stream: usize, low: bool) -> Result<(), DeviceError> {
        let CudaDevice { streams, queues, .. } = self;
        streams[stream].as_mut().ok_or_else(|| no_stream(stream))?.prioritize(low, queues)
    }

    fn notify(&mut self, stream: usize) -> Result<(), DeviceError> {
        let (context, slab) = (self.context.clone(), self.slab.clone());
        let CudaDevice { streams, queues, .. } = self;
        streams[stream].as_mut().ok_or_else(|| no_stream(stream))?.notify(stream, queues, &context, &slab)
    }

    fn finish(&mut self) {
        self.residents.close(&self.slab);
        // Other workers' resident kernels in this process are in the same context.
        let _pause = self.residents.pause();
        // SAFETY: the worker's context is current. After a sticky error this fails, and the process is about to end.
        let _ = unsafe { cu::cuCtxSynchronize() };
    }
}

fn launch_kernel(
    function: cu::CUfunction,
    stream: cu::CUstream,
    shape: LaunchShape,
    params: &[u8],
) -> Result<(), DeviceError> {
    let mut size = params.len();
    let mut extra = [
        cu::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize as *mut c_void,
        params.as_ptr().cast_mut().cast(),
        cu::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize as *mut c_void,
        (&raw mut size).cast(),
        cu::CU_LAUNCH_PARAM_END_AS_INT as usize as *mut c_void,
    ];
    let extra = if params.is_empty() { null_mut() } else { extra.as_mut_ptr() };
    let ([gx, gy, gz], [bx, by, bz], shared) = (shape.grid, shape.block, shape.shared_bytes);
    // SAFETY: a kernel may be launched where a function may; the server checked the parameter block against the
    // kernel's layout and the addresses in it against the tenant's buffers. The driver copies the block before it
    // returns.
    let result = unsafe { cu::cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, null_mut(), extra) };
    match check(result) {
        Err(DeviceError::Refused { why }) => Err(DeviceError::BadLaunch { why }),
        other => other,
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Destroying contexts and unregistering memory waits for what others in this process have on the device.
        let residents = self.residents.clone();
        let _pause = residents.pause();
        // Everything on them is done (`finish`), and the graphs are gone.
        // From the last on: a green context goes after the streams in it.
        for (n, own) in self.streams.iter_mut().enumerate().rev() {
            if let Some(own) = own.take()
                && let Some(green) = own.destroy(n, &mut self.queues)
            {
                streams::destroy_green(green);
            }
        }
        memory::unregister(&self.slab);
    }
}
