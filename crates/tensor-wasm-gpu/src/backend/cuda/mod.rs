//! A CUDA device, through the driver API. The driver's library is opened at run time; without it, or with too old a one,
//! opening says so.
//!
//! The worker's thread owns the context. Two other kinds of threads touch CUDA, both per tenant and started when first
//! needed: one that sleeps in the driver until an event and then rings the server's bell, and one that loads modules
//! (`modules.rs`).

mod modules;

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use cudarc::driver::sys as cu;
use cudarc::driver::sys::CUresult;

use self::modules::Modules;
use super::Backend;
use super::lane::Lane;
use crate::choice::Unavailable;
use crate::error::DeviceError;
use crate::info::{DeviceInfo, DeviceKind};
use crate::queue::job::{Answer, Job, Sent};
use crate::queue::link::CONTROL;
use crate::slab::{PAYLOAD_BYTES_MAX, SEATS, Slab};

/// The oldest CUDA a driver may be for: what we ask kernels about their parameters came with 12.4.
const DRIVER_VERSION_MIN: i32 = 12_040;

/// Stream priorities; every device that has any has these two.
const HIGH: c_int = -1;
const LOW: c_int = 0;

pub(crate) struct CudaBackend {
    slab: Arc<Slab>,
    device: cu::CUdevice,
    context: Arc<Context>,
    slab_address: u64,
    streams: Vec<Option<Stream>>,
    modules: Arc<Modules>,
    lanes: HashMap<usize, Lane>,
    /// By their numbers, with the streams they belong to.
    graphs: HashMap<u32, (usize, cu::CUgraphExec)>,
    next_graph: u32,
}

struct Stream {
    /// What jobs go to: of high priority, or of low.
    stream: cu::CUstream,
    /// The other of the two, once there was need for it.
    other: Option<cu::CUstream>,
    is_low: bool,
    pool: Option<cu::CUmemoryPool>,
    green: Option<cu::CUgreenCtx>,
    is_recording: bool,
    waiter: Option<Sender<Event>>,
    /// Memory taken from the pool.
    reserved: HashSet<u64>,
}

/// The device's primary context, which several threads make their own. Released with the last of them.
pub(super) struct Context {
    context: cu::CUcontext,
    device: cu::CUdevice,
}

// SAFETY: a context may be current to several threads at once; the driver serialises what needs it.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    fn retain(device: cu::CUdevice) -> Result<Arc<Context>, DeviceError> {
        let mut context = null_mut();
        // SAFETY: the device is valid; `Drop` releases what is retained here.
        check(unsafe { cu::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        Ok(Arc::new(Context { context, device }))
    }

    /// Makes it the calling thread's context.
    pub(super) fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained while `self` lives.
        check(unsafe { cu::cuCtxSetCurrent(self.context) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained by `retain`, once; nobody who has entered it is left but whoever is leaving.
        unsafe {
            let _ = cu::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

struct Event(cu::CUevent);

// SAFETY: an event may be waited for and destroyed by any thread with its context; here exactly one does, after the worker
// recorded it and let go of it.
unsafe impl Send for Event {}

/// What the driver says about an error.
fn explain(result: CUresult) -> String {
    let mut text = null();
    // SAFETY: the driver writes a pointer to a static string, or leaves null.
    let known = unsafe { cu::cuGetErrorString(result, &mut text) };
    let name = format!("{result:?}");
    if known != CUresult::CUDA_SUCCESS || text.is_null() {
        return name;
    }
    // SAFETY: a string of the driver's that lives as long as the process.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{} ({name})", text.to_string_lossy())
}

/// Whether an error leaves nothing of the context to work with.
fn is_sticky(result: CUresult) -> bool {
    matches!(
        result,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

pub(super) fn check(result: CUresult) -> Result<(), DeviceError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        sticky if is_sticky(sticky) => Err(DeviceError::DeviceLost { why: explain(sticky) }),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(DeviceError::OutOfMemory { asked_bytes: 0 }),
        other => Err(DeviceError::Refused { why: explain(other) }),
    }
}

/// Finds out, without keeping anything, whether a device can be opened.
pub(crate) fn probe(index: u32) -> Result<(cu::CUdevice, i32), Unavailable> {
    // SAFETY: opening the driver's library runs its initialisers, which is what anybody who uses CUDA does.
    if let Err(error) = unsafe { libloading::Library::new("libcuda.so.1") } {
        // What went wrong is in the cause; the error itself says only that something did.
        let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        return Err(Unavailable::NoDriver { why });
    }
    let failed = |result: CUresult| Unavailable::DriverFailed { why: explain(result) };
    // SAFETY: initialising the driver has no preconditions.
    match unsafe { cu::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        none @ CUresult::CUDA_ERROR_NO_DEVICE => return Err(Unavailable::NoDevice { why: explain(none) }),
        other => return Err(failed(other)),
    }
    let (mut version, mut count, mut device) = (0, 0, 0);
    // SAFETY: each call writes one integer to a variable of ours.
    let asked = unsafe { (cu::cuDriverGetVersion(&mut version), cu::cuDeviceGetCount(&mut count)) };
    if asked.0 != CUresult::CUDA_SUCCESS || asked.1 != CUresult::CUDA_SUCCESS {
        return Err(failed(if asked.0 == CUresult::CUDA_SUCCESS { asked.1 } else { asked.0 }));
    }
    if version < DRIVER_VERSION_MIN {
        let text = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        return Err(Unavailable::DriverTooOld { found: text(version), needed: text(DRIVER_VERSION_MIN) });
    }
    let known = u32::try_from(count).unwrap_or(0);
    if index >= known {
        return Err(Unavailable::NoSuchDevice { index, count: known });
    }
    // SAFETY: writes one integer to a variable of ours.
    match unsafe { cu::cuDeviceGet(&mut device, index as c_int) } {
        CUresult::CUDA_SUCCESS => Ok((device, version)),
        other => Err(failed(other)),
    }
}

impl CudaBackend {
    pub(crate) fn open(slab: Arc<Slab>, index: u32) -> Result<CudaBackend, Unavailable> {
        let (device, _) = probe(index)?;
        let failed = |error: DeviceError| Unavailable::DriverFailed { why: error.to_string() };
        let context = Context::retain(device).map_err(failed)?;
        context.enter().map_err(failed)?;
        // Huge pages, touched before they are registered: fifteen times quicker than without.
        slab.populate();
        let flags = cu::CU_MEMHOSTREGISTER_PORTABLE | cu::CU_MEMHOSTREGISTER_DEVICEMAP;
        let (base, mut slab_address) = (slab.address(0).cast::<c_void>(), 0);
        // SAFETY: the range is our mapping of the slab, which outlives the context's use of it: `Drop` unregisters it first.
        unsafe {
            check(cu::cuMemHostRegister_v2(base, slab.len(), flags)).map_err(failed)?;
            check(cu::cuMemHostGetDevicePointer_v2(&mut slab_address, base, 0)).map_err(failed)?;
        }
        let mut backend = CudaBackend {
            slab,
            device,
            context: context.clone(),
            slab_address,
            streams: (0..SEATS).map(|_| None).collect(),
            modules: Arc::new(Modules::new(device, context)),
            lanes: HashMap::new(),
            graphs: HashMap::new(),
            next_graph: 0,
        };
        let stream = backend.new_stream(None).map_err(failed)?;
        backend.streams[CONTROL] = Some(stream);
        Ok(backend)
    }

    fn attribute(&self, attribute: cu::CUdevice_attribute) -> u32 {
        let mut value = 0;
        // SAFETY: writes one integer to a variable of ours.
        let result = unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, self.device) };
        if result == CUresult::CUDA_SUCCESS { u32::try_from(value).unwrap_or(0) } else { 0 }
    }

    fn new_stream(&self, green: Option<cu::CUgreenCtx>) -> Result<Stream, DeviceError> {
        const NON_BLOCKING: c_uint = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        let mut stream = null_mut();
        // SAFETY: writes a handle to a variable of ours; the context is current, and a green context is one we made.
        check(unsafe {
            match green {
                None => cu::cuStreamCreateWithPriority(&mut stream, NON_BLOCKING, HIGH),
                Some(green) => cu::cuGreenCtxStreamCreate(&mut stream, green, NON_BLOCKING, HIGH),
            }
        })?;
        Ok(Stream {
            stream,
            other: None,
            is_low: false,
            pool: None,
            green,
            is_recording: false,
            waiter: None,
            reserved: HashSet::new(),
        })
    }

    /// A context with a part of the multiprocessors.
    fn new_green(&self, multiprocessors: u32) -> Result<cu::CUgreenCtx, DeviceError> {
        const SM: cu::CUdevResourceType = cu::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        const DEFAULT_STREAM: c_uint = 1;
        let mut all = MaybeUninit::<cu::CUdevResource>::zeroed();
        let (mut part, mut rest) = (MaybeUninit::<cu::CUdevResource>::zeroed(), MaybeUninit::zeroed());
        let (mut groups, mut description, mut green) = (1, null_mut(), null_mut());
        // SAFETY: plain data that the driver fills in, each from the one before; all of it is ours.
        unsafe {
            check(cu::cuDeviceGetDevResource(self.device, all.as_mut_ptr(), SM))?;
            check(cu::cuDevSmResourceSplitByCount(
                part.as_mut_ptr(),
                &mut groups,
                all.as_ptr(),
                rest.as_mut_ptr(),
                0,
                multiprocessors,
            ))?;
            check(cu::cuDevResourceGenerateDesc(&mut description, part.as_mut_ptr(), 1))?;
            check(cu::cuGreenCtxCreate(&mut green, description, self.device, DEFAULT_STREAM))?;
        }
        Ok(green)
    }

    /// A memory pool that refuses what goes beyond its cap.
    fn new_pool(&self, bytes_max: u64) -> Result<cu::CUmemoryPool, DeviceError> {
        // SAFETY: all fields are numbers or pointers for which zero means "none".
        let mut props: cu::CUmemPoolProps = unsafe { MaybeUninit::zeroed().assume_init() };
        props.allocType = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type_ = cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        props.location.id = self.device;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers to variables of ours.
        check(unsafe { cu::cuMemGetInfo_v2(&mut free, &mut total) })?;
        // A pool larger than the device is refused.
        props.maxSize = usize::try_from(bytes_max).unwrap_or(usize::MAX).min(total);
        let mut pool = null_mut();
        // SAFETY: writes a handle to a variable of ours.
        check(unsafe { cu::cuMemPoolCreate(&mut pool, &props) })?;
        let (mut no, attribute) = (0_u32, cu::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES);
        // Memory that a tenant's stream is still to free must not be handed out again with a dependency on that stream: we wait
        // for what is handed out.
        // SAFETY: an integer of ours, of the size the attribute has.
        check(unsafe { cu::cuMemPoolSetAttribute(pool, attribute, (&raw mut no).cast()) })?;
        Ok(pool)
    }

    fn stream(&self, stream: usize) -> Result<&Stream, DeviceError> {
        self.streams[stream].as_ref().ok_or_else(unknown)
    }

    fn open_stream(&mut self, n: u32, memory_bytes_max: u64, multiprocessors: u32) -> Result<Answer, DeviceError> {
        let green = (multiprocessors > 0).then(|| self.new_green(multiprocessors)).transpose()?;
        let mut stream = self.new_stream(green).inspect_err(|_| {
            if let Some(green) = green {
                // SAFETY: just made, and not used by anything.
                unsafe { cu::cuGreenCtxDestroy(green) };
            }
        })?;
        match self.new_pool(memory_bytes_max) {
            Ok(pool) => stream.pool = Some(pool),
            Err(error) => {
                stream.destroy();
                return Err(error);
            }
        }
        let slot = self.streams.get_mut(n as usize).ok_or_else(unknown)?;
        if let Some(old) = slot.replace(stream) {
            old.destroy();
        }
        Ok(Answer::default())
    }

    fn reserve(&mut self, stream: u32, bytes: u64) -> Result<Answer, DeviceError> {
        let pool = self.streams.get(stream as usize).and_then(|s| s.as_ref()?.pool).ok_or_else(unknown)?;
        let control = self.stream(CONTROL)?.stream;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut address = 0;
        // SAFETY: pool and stream are ours. Waiting for the control stream, which is otherwise idle, makes the memory usable on
        // every stream.
        let result = unsafe {
            check(cu::cuMemAllocFromPoolAsync(&mut address, size, pool, control))
                .and_then(|()| check(cu::cuStreamSynchronize(control)))
        };
        match result {
            Ok(()) => {
                if let Some(own) = &mut self.streams[stream as usize] {
                    own.reserved.insert(address);
                }
                Ok(Answer { values: [address, 0, 0, 0, 0, 0] })
            }
            Err(DeviceError::OutOfMemory { .. }) => Err(DeviceError::OutOfMemory { asked_bytes: bytes }),
            Err(error) => Err(error),
        }
    }

    fn launch(
        &self,
        stream: usize,
        kernel: u32,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<Answer, DeviceError> {
        let (kernel, function) = self.modules.kernel(SEATS + stream, kernel).ok_or_else(unknown)?;
        let own = self.stream(stream)?;
        // A function belongs to one context, a kernel to all: a green one, too.
        let function = if own.green.is_some() { kernel.cast() } else { function };
        let stream = own.stream;
        let mut size = params.len();
        let mut extra = [
            cu::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize as *mut c_void,
            params.as_ptr().cast_mut().cast(),
            cu::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize as *mut c_void,
            (&raw mut size).cast(),
            cu::CU_LAUNCH_PARAM_END_AS_INT as usize as *mut c_void,
        ];
        let extra = if params.is_empty() { null_mut() } else { extra.as_mut_ptr() };
        let [gx, gy, gz] = grid;
        let [bx, by, bz] = block;
        // SAFETY: a kernel may be launched where a function may; the server checked the parameter block against the kernel's
        // layout and the addresses in it against the tenant's buffers. The driver copies the block before it returns.
        let result =
            unsafe { cu::cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, null_mut(), extra) };
        match check(result) {
            Err(DeviceError::Refused { why }) => Err(DeviceError::BadLaunch { why }),
            other => other.map(|()| Answer::default()),
        }
    }

    fn begin_graph(&mut self, stream: usize) -> Result<Answer, DeviceError> {
        let own = self.streams[stream].as_mut().ok_or_else(unknown)?;
        if own.is_recording {
            return Err(DeviceError::BadLaunch { why: "a graph is being recorded already".to_owned() });
        }
        const RELAXED: cu::CUstreamCaptureMode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a stream of ours that is not capturing.
        check(unsafe { cu::cuStreamBeginCapture_v2(own.stream, RELAXED) })?;
        own.is_recording = true;
        Ok(Answer::default())
    }

    fn end_graph(&mut self, stream: usize) -> Result<Answer, DeviceError> {
        let own = self.streams[stream].as_mut().ok_or_else(unknown)?;
        if !std::mem::take(&mut own.is_recording) {
            return Err(DeviceError::BadLaunch { why: "no graph is being recorded".to_owned() });
        }
        let (mut graph, mut exec) = (null_mut(), null_mut());
        // SAFETY: the stream is capturing; the graph is ours and destroyed once it has been instantiated or not.
        let made = unsafe {
            check(cu::cuStreamEndCapture(own.stream, &mut graph))?;
            let made = check(cu::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            check(cu::cuGraphDestroy(graph))?;
            made
        };
        made?;
        let number = self.next_graph;
        self.next_graph = number.wrapping_add(1);
        self.graphs.insert(number, (stream, exec));
        Ok(Answer { values: [u64::from(number), 0, 0, 0, 0, 0] })
    }

    /// Gives back everything of a stream, in its order.
    fn clear(&mut self, stream: usize) -> Result<Answer, DeviceError> {
        let own = self.streams[stream].as_mut().ok_or_else(unknown)?;
        // SAFETY: addresses from `reserve` and graphs of this stream, all of them forgotten here.
        unsafe {
            for address in own.reserved.drain() {
                check(cu::cuMemFreeAsync(address, own.stream))?;
            }
            for (_, (_, exec)) in self.graphs.extract_if(|_, (owner, _)| *owner == stream) {
                check(cu::cuGraphExecDestroy(exec))?;
            }
        }
        Ok(Answer::default())
    }

    fn host(&self, offset: u64, bytes: u64) -> Result<*mut c_void, DeviceError> {
        match offset.checked_add(bytes).is_some_and(|end| end <= self.slab.len() as u64) {
            true => Ok(self.slab.address(offset).cast()),
            false => Err(unknown()),
        }
    }
}

pub(super) fn unknown() -> DeviceError {
    DeviceError::Refused { why: "the worker does not know what the job is about".to_owned() }
}

pub(super) fn done(result: CUresult) -> Result<Answer, DeviceError> {
    check(result).map(|()| Answer::default())
}

impl Stream {
    fn destroy(self) {
        // SAFETY: handles of ours that nothing uses any more; a stream that still has work is destroyed when that is done.
        unsafe {
            let _ = cu::cuStreamDestroy_v2(self.stream);
            if let Some(other) = self.other {
                let _ = cu::cuStreamDestroy_v2(other);
            }
            if let Some(pool) = self.pool {
                let _ = cu::cuMemPoolDestroy(pool);
            }
            if let Some(green) = self.green {
                let _ = cu::cuGreenCtxDestroy(green);
            }
        }
    }
}

impl Backend for CudaBackend {
    fn info(&self) -> DeviceInfo {
        use cu::CUdevice_attribute as Attribute;
        let mut name = [0; 128];
        let (mut free, mut total, mut version) = (0, 0, 0);
        // SAFETY: each call writes to variables of ours, a string no longer than its buffer.
        unsafe {
            let _ = cu::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, self.device);
            let _ = cu::cuMemGetInfo_v2(&mut free, &mut total);
            let _ = cu::cuDriverGetVersion(&mut version);
        }
        let name: Vec<u8> = name.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
        DeviceInfo {
            kind: DeviceKind::Cuda,
            name: String::from_utf8_lossy(&name).into_owned(),
            multiprocessors: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            memory_total_bytes: total as u64,
            memory_free_bytes: free as u64,
            compute_capability: (
                self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            driver_version: u32::try_from(version).unwrap_or(0),
            threads_per_block_max: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
            shared_bytes_per_block_max: self
                .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            slab_address: self.slab_address,
        }
    }

    fn execute(&mut self, stream: usize, job: Job, payload: &[u8], cell: u32) -> Result<Answer, DeviceError> {
        let on = self.stream(stream)?.stream;
        let len = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let inline = Slab::payload_offset(cell);
        // SAFETY of the calls below: streams, graphs and libraries are ours; device addresses were checked by the server against
        // the tenant's live buffers, which stay reserved until the job is done; host addresses are inside the slab.
        match job {
            Job::OpenStream { stream, memory_bytes_max, sm_count } => {
                self.open_stream(stream, memory_bytes_max, sm_count)
            }
            Job::CloseStream { stream } => {
                let own = self.streams.get_mut(stream as usize).filter(|_| stream as usize != CONTROL);
                if let Some(own) = own.ok_or_else(unknown)?.take() {
                    own.destroy();
                }
                self.lanes.remove(&(SEATS + stream as usize));
                Ok(Answer::default())
            }
            Job::Clear => self.clear(stream),
            Job::Reserve { stream, bytes } => self.reserve(stream, bytes),
            Job::Release { stream: owner, address, .. } => {
                let own = self.streams.get_mut(owner as usize).and_then(Option::as_mut).ok_or_else(unknown)?;
                if !own.reserved.remove(&address) {
                    return Err(unknown());
                }
                // SAFETY: see above; the address came from `reserve`, and is forgotten here.
                done(unsafe { cu::cuMemFreeAsync(address, on) })
            }
            Job::Fill { address, bytes, value } => {
                // SAFETY: see above.
                done(unsafe { cu::cuMemsetD8Async(address, value, len(bytes), on) })
            }
            Job::Write { from_offset, to_address, bytes } => {
                let from = self.host(from_offset, bytes)?;
                // SAFETY: see above.
                done(unsafe { cu::cuMemcpyHtoDAsync_v2(to_address, from, len(bytes), on) })
            }
            Job::Read { from_address, to_offset, bytes } => {
                let to = self.host(to_offset, bytes)?;
                // SAFETY: see above.
                done(unsafe { cu::cuMemcpyDtoHAsync_v2(to, from_address, len(bytes), on) })
            }
            Job::WriteInline { to_address } => {
                let from = self.host(inline, payload.len() as u64)?;
                // SAFETY: see above.
                done(unsafe { cu::cuMemcpyHtoDAsync_v2(to_address, from, payload.len(), on) })
            }
            Job::ReadInline { from_address, bytes } => {
                let bytes = bytes.min(PAYLOAD_BYTES_MAX as u64);
                let to = self.host(inline, bytes)?;
                // SAFETY: see above.
                done(unsafe { cu::cuMemcpyDtoHAsync_v2(to, from_address, len(bytes), on) })
            }
            Job::Copy { from_address, to_address, bytes } => {
                // SAFETY: see above.
                done(unsafe { cu::cuMemcpyDtoDAsync_v2(to_address, from_address, len(bytes), on) })
            }
            // What belongs on a lane.
            Job::Load { .. } | Job::Unload { .. } | Job::Kernel { .. } | Job::ForgetImage { .. } => Err(unknown()),
            Job::Upload { lane, offset, bytes } => self.modules.upload(lane as usize, &self.slab, offset, bytes),
            Job::Launch { kernel, grid, block, shared_bytes } => {
                self.launch(stream, kernel, grid, block, shared_bytes, payload)
            }
            Job::GraphBegin => self.begin_graph(stream),
            Job::GraphEnd => self.end_graph(stream),
            Job::Replay { graph } => {
                let (_, exec) = *self.graphs.get(&graph).filter(|(owner, _)| *owner == stream).ok_or_else(unknown)?;
                // SAFETY: see above.
                done(unsafe { cu::cuGraphLaunch(exec, on) })
            }
            Job::ForgetGraph { graph } => {
                let (_, exec) = self.graphs.remove(&graph).ok_or_else(unknown)?;
                // SAFETY: a graph of ours, forgotten here; the driver keeps it while it runs.
                done(unsafe { cu::cuGraphExecDestroy(exec) })
            }
        }
    }

    fn in_lane(&mut self, sent: Sent, payload: &[u8], cell: u32) {
        let start = || Lane::start(sent.stream, self.modules.clone(), self.slab.clone());
        let lane = self.lanes.entry(sent.stream).or_insert_with(start);
        lane.hand(sent, payload, cell);
    }

    fn flag(&mut self, stream: usize, number: u32) -> Result<(), DeviceError> {
        let Some(own) = &self.streams[stream] else {
            // A job for a stream that is not open has failed already; its answer is in its cell.
            self.slab.flag(stream).store(number, std::sync::atomic::Ordering::Release);
            return Ok(());
        };
        if own.is_recording {
            // The job that ends the recording has a later number and is flagged for all of them.
            return Ok(());
        }
        let address = self.slab_address + Slab::flag_offset(stream);
        // SAFETY: an aligned word of the slab, which is registered and mapped.
        check(unsafe { cu::cuStreamWriteValue32_v2(own.stream, address, number, 0) })
    }

    fn prioritize(&mut self, stream: usize, low: bool) -> Result<(), DeviceError> {
        let own = self.streams.get_mut(stream).and_then(Option::as_mut);
        let Some(own) = own.filter(|own| own.is_low != low && !own.is_recording) else {
            return Ok(());
        };
        const NON_BLOCKING: c_uint = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        const UNTIMED: c_uint = cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        let priority = if low { LOW } else { HIGH };
        let mut event = null_mut();
        // SAFETY: handles are written to variables of ours. The stream that jobs go to next begins after what is on the one before,
        // so the tenant's order holds; the event may be destroyed while it is waited for.
        unsafe {
            let other = match own.other {
                Some(other) => other,
                None => {
                    let mut other = null_mut();
                    check(match own.green {
                        None => cu::cuStreamCreateWithPriority(&mut other, NON_BLOCKING, priority),
                        Some(green) => cu::cuGreenCtxStreamCreate(&mut other, green, NON_BLOCKING, priority),
                    })?;
                    other
                }
            };
            check(cu::cuEventCreate(&mut event, UNTIMED))?;
            check(cu::cuEventRecord(event, own.stream))?;
            check(cu::cuStreamWaitEvent(other, event, 0))?;
            check(cu::cuEventDestroy_v2(event))?;
            own.other = Some(std::mem::replace(&mut own.stream, other));
        }
        own.is_low = low;
        Ok(())
    }

    fn notify(&mut self, stream: usize) -> Result<(), DeviceError> {
        let (context, slab) = (self.context.clone(), self.slab.clone());
        // A lane rings by itself.
        let own = self.streams.get_mut(stream).and_then(Option::as_mut);
        let Some(own) = own.filter(|own| !own.is_recording) else {
            slab.done_bell().ring();
            return Ok(());
        };
        const FLAGS: c_uint =
            cu::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint | cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        let mut event = null_mut();
        // SAFETY: writes a handle to a variable of ours, recorded on a stream of ours.
        unsafe {
            check(cu::cuEventCreate(&mut event, FLAGS))?;
            check(cu::cuEventRecord(event, own.stream))?;
        }
        let waiter = match &own.waiter {
            Some(waiter) => waiter,
            None => {
                let (sender, events) = channel::<Event>();
                let wait = move || {
                    let current = context.enter();
                    for Event(event) in events {
                        // SAFETY: an event that was recorded, and that only this thread has.
                        let waited = unsafe { (cu::cuEventSynchronize(event), cu::cuEventDestroy_v2(event)) }.0;
                        match current.clone().and_then(|()| check(waited)) {
                            Ok(()) => slab.done_bell().ring(),
                            Err(error) => crate::worker::lost(&slab, &error),
                        }
                    }
                };
                let spawned = std::thread::Builder::new().name(format!("stream-{stream}")).spawn(wait);
                spawned.map_err(|e| DeviceError::Refused { why: format!("no thread can be started: {e}") })?;
                own.waiter.insert(sender)
            }
        };
        // The thread ends only when its sender goes.
        let _ = waiter.send(Event(event));
        Ok(())
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // SAFETY: the worker is over. Everything under way ends before what it uses goes; after a sticky fault these calls fail,
        // and the process is about to.
        unsafe {
            let _ = cu::cuCtxSynchronize();
            for (_, (_, exec)) in self.graphs.drain() {
                let _ = cu::cuGraphExecDestroy(exec);
            }
            // A lane that compiles still is not waited for; modules and context go with the last who uses them.
            self.lanes.clear();
            self.streams.iter_mut().filter_map(Option::take).for_each(Stream::destroy);
            let _ = cu::cuMemHostUnregister(self.slab.address(0).cast());
        }
    }
}
