//! CUDA as a device. Fused kernels are built with the kernel compiler's own operations and compiled by it without a
//! fence: every access is inside by how the kernel is made (`map/mod.rs`, `special.rs`, `lines/mod.rs`, with `index.rs`
//! and `numbers.rs`). Matrix products are done by the device's library where there is one (`product.rs`), or else on
//! tensor cores (`matrix/mod.rs`, with `tile.rs`), and those of half precision as they are (`halves.rs`). A plan
//! becomes a list of launches over one block of memory (`plan.rs`), sent together and replayed as a graph from its
//! second run on (`execute.rs`), with branches where it has no order (`order.rs`).

mod attention;
pub(crate) mod execute;
mod halves;
mod index;
mod lines;
mod map;
mod matrix;
mod numbers;
mod order;
pub(crate) mod plan;
mod product;
mod special;
#[cfg(test)]
pub(crate) mod tests;
mod tile;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tensor_wasm_gpu::{
    Buffer, Completion, Device, DeviceChoice, DeviceError, DeviceKind, OpenOptions, ReadUnderWay, Stream, Tenant,
    TenantLimits,
};
use tensor_wasm_jit::Target;

use crate::account;
use crate::cpu::memory::CpuBuffer;
use crate::dtype::DType;
use crate::error::ErrorKind;
use crate::graph::Node;

/// Jobs that may wait for the device: whoever is ahead of it by more waits.
const JOBS_MAX: usize = 1_024;

/// How long somebody sleeps who has to wait until there is room in the line.
const ROOM_PERIOD: Duration = Duration::from_micros(50);

/// Whether products of `f32` may be less precise than that.
static IS_TF32: AtomicBool = AtomicBool::new(false);

/// Has matrices of `f32` multiplied on tensor cores from now on, by a device's library or by our own kernels: operands
/// have ten bits of mantissa (tf32), to which the library rounds them and a Hopper's warpgroups cut them off; sums have
/// all of theirs. Off unless somebody asks for it.
pub fn set_tf32(is_allowed: bool) {
    IS_TF32.store(is_allowed, Ordering::Relaxed);
}

fn is_tf32() -> bool {
    IS_TF32.load(Ordering::Relaxed)
}

/// Devices that are open, by their numbers: whoever opens one again shares it, and what lies on it.
static OPENED: Mutex<Vec<(u32, Weak<Opened>)>> = Mutex::new(Vec::new());

/// A GPU that tensors are computed on. Cloning shares it.
#[derive(Clone)]
pub struct CudaDevice(Arc<Opened>);

struct Opened {
    name: String,
    tenant: Tenant,
    /// Of plans, and of what is read back.
    stream: Stream,
    /// Of what is copied to the device, beside kernels that run there; from the first such copy on.
    uploads: OnceLock<Stream>,
    /// The last such copy, if nobody has waited for it. There is one at a time, for each thread that copies: it holds
    /// blocks of staging, which all tenants share, until what used its buffer's memory before is over.
    upload: Mutex<Option<Arc<Pending>>>,
    memory_bytes_max: u64,
    /// Whether others have a part of it whom this one is to know nothing of.
    is_shared: bool,
    /// What the device's library works in, while a plan has it: the stream's products are done one after the other.
    workspace: Mutex<Weak<CudaBuffer>>,
    /// What plans under a supervisor have sent and nobody has waited for, with the time it takes.
    ahead: Mutex<VecDeque<(Arc<Pending>, Duration)>>,
}

impl Opened {
    fn new(name: String, tenant: Tenant, stream: Stream, memory_bytes_max: u64, is_shared: bool) -> Opened {
        let (uploads, upload) = (OnceLock::new(), Mutex::default());
        let (workspace, ahead) = (Mutex::default(), Mutex::default());
        Opened { name, tenant, stream, uploads, upload, memory_bytes_max, is_shared, workspace, ahead }
    }
}

impl PartialEq for CudaDevice {
    fn eq(&self, other: &CudaDevice) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.name)
    }
}

impl CudaDevice {
    /// Opens a GPU by its number, with its worker as a thread of this process.
    pub(crate) fn open(number: u32) -> Result<CudaDevice, ErrorKind> {
        // Held meanwhile: of two who ask at once, one opens it.
        let mut opened = OPENED.lock();
        opened.retain(|(_, device)| device.strong_count() > 0);
        let known = opened.iter().find(|(own, _)| *own == number).and_then(|(_, device)| device.upgrade());
        if let Some(known) = known {
            return Ok(CudaDevice(known));
        }
        let name = format!("cuda:{number}");
        let options = OpenOptions { choice: DeviceChoice::Cuda(number), ..OpenOptions::default() };
        let no_device = |why: String| ErrorKind::NoDevice { name: name.clone(), why };
        let device = Device::open(&options).map_err(|why| no_device(why.to_string()))?;
        let device = CudaDevice::of(device, &name)?;
        opened.push((number, Arc::downgrade(&device.0)));
        Ok(device)
    }

    /// A device that is open already, as a tenant of its own that may have all of its memory.
    pub(crate) fn of(device: Device, name: &str) -> Result<CudaDevice, ErrorKind> {
        let memory_bytes_max = device.info().memory_total_bytes;
        CudaDevice::within(device, name, memory_bytes_max)
    }

    /// The same with so much of it.
    fn within(device: Device, name: &str, memory_bytes_max: u64) -> Result<CudaDevice, ErrorKind> {
        let limits =
            TenantLimits { memory_bytes_max, running_max: JOBS_MAX, waiting_max: JOBS_MAX, ..TenantLimits::default() };
        let tenant = device.tenant("tensors", limits).map_err(|error| failed(&error))?;
        let stream = tenant.stream();
        Ok(CudaDevice(Arc::new(Opened::new(name.to_owned(), tenant, stream, memory_bytes_max, false))))
    }

    /// A device for tensors of somebody who is a tenant of it already, on a stream of its own: the tenant's quota and
    /// its part of the device's time are theirs.
    pub fn of_tenant(tenant: Tenant, memory_bytes_max: u64) -> CudaDevice {
        let (name, stream) = (format!("cuda, {}", tenant.name()), tenant.stream());
        CudaDevice(Arc::new(Opened::new(name, tenant, stream, memory_bytes_max, true)))
    }

    /// Bytes of its memory that tensors have, and what plans keep for their next run.
    pub fn used_bytes(&self) -> u64 {
        self.0.tenant.memory().used_bytes
    }

    /// What it is called, as `cuda:0`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Waits until everything that was asked for is done.
    pub fn synchronize(&self) -> Result<(), crate::TensorError> {
        let wait = || {
            account::check_hurry()?;
            execute::count(|counts| counts.round_trips += 1);
            let mut streams = [self.0.uploads.get(), Some(self.stream())].into_iter().flatten();
            streams.try_for_each(Stream::synchronize).map_err(|error| failed(&error))
        };
        wait().map_err(|what| crate::TensorError::new("synchronize", what, std::panic::Location::caller()))
    }

    /// Memory for the device's library, which all plans share that are there.
    fn workspace(&self) -> Result<Arc<CudaBuffer>, ErrorKind> {
        let Some(mut workspace) = self.0.workspace.try_lock().or_else(|| {
            // Whoever has it may wait for memory.
            (!account::is_hurried()).then(|| self.0.workspace.lock())
        }) else {
            return Err(ErrorKind::WouldWait);
        };
        if let Some(made) = workspace.upgrade().filter(|made| made.is_there()) {
            return Ok(made);
        }
        let bytes = usize::try_from(product::WORKSPACE_BYTES).unwrap_or(usize::MAX);
        let made = Arc::new(CudaBuffer::new(self, bytes)?);
        *workspace = Arc::downgrade(&made);
        Ok(made)
    }

    fn has_workspace(&self) -> bool {
        // Who holds it makes it.
        let Some(workspace) = self.0.workspace.try_lock() else { return false };
        workspace.upgrade().is_some_and(|made| made.is_there())
    }

    /// Remembers what a plan under a supervisor has sent.
    fn add_ahead(&self, sent: &Arc<Pending>, takes: Duration) {
        let mut ahead = self.0.ahead.lock();
        forget_over(&mut ahead);
        ahead.push_back((sent.clone(), takes));
    }

    /// Waits until what such plans have sent by now and nobody has waited for takes no longer than this. It cannot be
    /// taken back, so a supervisor is not to be ahead of the device by more. What others send meanwhile is theirs to
    /// wait for, or who comes later would never be done.
    fn catch_up(&self, ahead_max: Duration) -> Result<(), ErrorKind> {
        let Some(last) = self.0.ahead.lock().back().map(|(last, _)| last.clone()) else { return Ok(()) };
        loop {
            let oldest = {
                let mut ahead = self.0.ahead.lock();
                forget_over(&mut ahead);
                let Some(end) = ahead.iter().position(|(sent, _)| Arc::ptr_eq(sent, &last)) else { return Ok(()) };
                let all: Duration = ahead.iter().take(end + 1).map(|(_, takes)| *takes).sum();
                ahead.front().filter(|_| all > ahead_max).map(|(oldest, _)| oldest.clone())
            };
            let Some(oldest) = oldest else { return Ok(()) };
            account::check_hurry()?;
            account::between_kernels()?;
            // Whoever has it hears of its failure.
            let _ = oldest.wait();
            let mut ahead = self.0.ahead.lock();
            if ahead.front().is_some_and(|(first, _)| Arc::ptr_eq(first, &oldest)) {
                ahead.pop_front();
            }
        }
    }

    /// That it has no room for so much, and what it has. Of a device that several share, what is free says what the
    /// others do, which is not for everybody to see: there it is what is left of the quota.
    fn short_of(&self, bytes: u64) -> ErrorKind {
        let (used, limit) = (self.used_bytes(), self.0.memory_bytes_max);
        let free =
            if self.0.is_shared { limit.saturating_sub(used) } else { self.stream().device().memory_free_bytes() };
        ErrorKind::DeviceMemory { bytes, used, limit, free }
    }

    /// What it is, for people.
    pub(crate) fn description(&self) -> String {
        format!("{}, {}", self.0.name, self.stream().device().info().name)
    }

    /// What its kernels may use. Where it is a CPU they are emulated, which has no more shared
    /// memory than every device.
    fn target(&self) -> Target {
        let info = self.stream().device().info();
        if info.kind == DeviceKind::Cpu { Target::Ampere } else { Target::of(info.compute_capability) }
    }

    /// Counts the workers that the device has had: what one had is gone with it.
    fn worker(&self) -> u32 {
        self.stream().device().restarts()
    }

    fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// The stream that elements are copied to the device on, unless they are so few that they travel with a job.
    fn uploads(&self) -> &Stream {
        self.0.uploads.get_or_init(|| self.0.tenant.stream())
    }

    /// Sends something, waiting while the line is full.
    fn when_possible<T>(&self, send: impl FnMut(&Stream) -> Result<T, DeviceError>) -> Result<T, ErrorKind> {
        when_possible(self.stream(), send)
    }

    /// The same for what is waited for.
    fn when_done<T>(&self, run: impl FnMut(&Stream) -> Result<T, DeviceError>) -> Result<T, ErrorKind> {
        account::check_hurry()?;
        execute::count(|counts| counts.round_trips += 1);
        self.when_possible(run)
    }
}

/// Lets go of what is done: each holds a place in the device's line until somebody has looked.
fn forget_over(ahead: &mut VecDeque<(Arc<Pending>, Duration)>) {
    while ahead.front().is_some_and(|(sent, _)| sent.is_known_to_be_over()) {
        ahead.pop_front();
    }
}

/// Sends something on a stream, waiting while the line is full, and has it charged to whoever this thread works for.
fn when_possible<T>(stream: &Stream, mut send: impl FnMut(&Stream) -> Result<T, DeviceError>) -> Result<T, ErrorKind> {
    let paid = account::payer().map(|payer| stream.paid_by(payer));
    let stream = paid.as_ref().unwrap_or(stream);
    loop {
        match send(stream) {
            Err(DeviceError::Busy { .. }) => {
                account::check_hurry()?;
                account::check_stopped()?;
                std::thread::park_timeout(ROOM_PERIOD);
            }
            sent => return sent.map_err(|error| failed(&error)),
        }
    }
}

/// Whether a device computes attention over queries, keys and values as one kernel.
pub(crate) fn has_attention(device: &CudaDevice, operands: &[Arc<Node>]) -> bool {
    let [queries, _, values] = operands else { return false };
    let widths = [queries, values].map(|node| node.shape.last().copied().unwrap_or(0));
    // Tensor cores multiply composed ones in tf32 much faster than anything does in single precision.
    if queries.dtype == DType::F32 && is_tf32() {
        return false;
    }
    attention::is_possible(device.target(), queries.dtype, widths)
}

fn failed(error: &DeviceError) -> ErrorKind {
    match error {
        DeviceError::DeviceLost { why } => ErrorKind::DeviceLost { why: why.clone() },
        other => ErrorKind::Device { why: other.to_string() },
    }
}

/// Something that was sent to a device, and what it waits for. Nobody waits for it before somebody reads.
#[derive(Default)]
pub(crate) struct Pending(Mutex<PendingState>);

#[derive(Default)]
struct PendingState {
    completion: Option<Completion>,
    /// What was not over when this was sent.
    before: Vec<Arc<Pending>>,
    failed: Option<DeviceError>,
}

impl Pending {
    fn new(completion: Completion, before: Vec<Arc<Pending>>) -> Arc<Pending> {
        Arc::new(Pending(Mutex::new(PendingState { completion: Some(completion), before, failed: None })))
    }

    /// Of something that was waited for.
    fn over(before: Vec<Arc<Pending>>) -> Arc<Pending> {
        Arc::new(Pending(Mutex::new(PendingState { before, ..PendingState::default() })))
    }

    /// Whether it is over without anybody waiting; an error if it failed.
    fn is_over(&self) -> Result<bool, ErrorKind> {
        // Who waits for it has the lock meanwhile.
        let Some(state) = self.0.try_lock().or_else(|| (!account::is_hurried()).then(|| self.0.lock())) else {
            return Err(ErrorKind::WouldWait);
        };
        let is_over = state.completion.as_ref().is_none_or(Completion::is_over);
        drop(state);
        if is_over { self.settle().map(|()| true) } else { Ok(false) }
    }

    /// The same without waiting for somebody who waits for it.
    fn is_known_to_be_over(&self) -> bool {
        let is_over = |state: &PendingState| state.completion.as_ref().is_none_or(Completion::is_over);
        self.0.try_lock().is_some_and(|state| is_over(&state))
            && !matches!(self.is_over(), Ok(false) | Err(ErrorKind::WouldWait))
    }

    /// Whether somebody waits for it now, so that whoever asks about it may wait too.
    fn is_waited_for(&self) -> bool {
        self.0.is_locked()
    }

    /// Whether it could not be done, as far as somebody has looked.
    fn has_failed(&self) -> bool {
        self.0.try_lock().is_some_and(|state| state.failed.is_some())
    }

    /// Waits until it is over.
    fn wait(&self) -> Result<(), ErrorKind> {
        execute::count(|counts| counts.round_trips += 1);
        self.settle()
    }

    /// The same where it is known to be over, which takes no time.
    fn settle(&self) -> Result<(), ErrorKind> {
        let mut left = Vec::new();
        {
            let mut state = self.0.lock();
            if let Some(completion) = state.completion.take()
                && let Err(error) = completion.wait()
            {
                state.failed = Some(error);
            }
            if let Some(error) = &state.failed {
                return Err(failed(error));
            }
            left.append(&mut state.before);
        }
        // Those are over by now: this came after them. What they were themselves after is over too.
        while let Some(pending) = left.pop() {
            let mut state = pending.0.lock();
            if let Some(completion) = state.completion.take()
                && let Err(error) = completion.wait()
            {
                state.failed = Some(error);
            }
            if let Some(error) = state.failed.clone() {
                let told = failed(&error);
                self.0.lock().failed = Some(error);
                return Err(told);
            }
            left.append(&mut state.before);
        }
        Ok(())
    }
}

/// Elements on a GPU.
pub(crate) struct CudaBuffer {
    device: CudaDevice,
    /// Shared for as long as a result that has taken its place and what it was before are both there.
    buffer: Arc<Buffer>,
    bytes: usize,
    pending: Arc<Pending>,
    /// Which of the device's workers it is of.
    worker: u32,
}

impl CudaBuffer {
    /// Memory with anything in it, which whoever asks for it writes.
    fn new(device: &CudaDevice, bytes: usize) -> Result<CudaBuffer, ErrorKind> {
        let (tenant, size) = (&device.0.tenant, bytes.max(1) as u64);
        let there = tenant.try_buffer(size).map_err(|error| memory_failed(device, &error, bytes))?;
        let buffer = match there {
            Some(buffer) => buffer,
            None => {
                account::check_hurry()?;
                tenant.buffer(size).map_err(|error| memory_failed(device, &error, bytes))?
            }
        };
        let (worker, buffer) = (device.worker(), Arc::new(buffer));
        Ok(CudaBuffer { device: device.clone(), buffer, bytes, pending: Arc::default(), worker })
    }

    /// The same memory for what is computed next: nobody looks at what is in it now once that is sent.
    fn taken_over(&self) -> CudaBuffer {
        let CudaBuffer { device, buffer, bytes, worker, .. } = self;
        let (device, buffer, pending) = (device.clone(), buffer.clone(), Arc::default());
        CudaBuffer { device, buffer, bytes: *bytes, pending, worker: *worker }
    }

    /// What went wrong with it: whatever that was, it was lost if its device was meanwhile.
    fn if_lost(&self, what: ErrorKind) -> ErrorKind {
        match what {
            ErrorKind::Device { why } if !self.is_there() => ErrorKind::DeviceLost { why },
            other => other,
        }
    }

    /// Whether its device has not been lost since it was made.
    pub(crate) fn is_there(&self) -> bool {
        self.worker == self.device.worker()
    }

    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Whether its elements never came to be there.
    pub(crate) fn has_failed(&self) -> bool {
        self.pending.has_failed()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Waits until its elements are computed.
    pub(crate) fn wait(&self) -> Result<(), ErrorKind> {
        self.pending.wait()
    }

    /// Copies elements to the device.
    pub(crate) fn write(device: &CudaDevice, from: &CpuBuffer) -> Result<CudaBuffer, ErrorKind> {
        let made = CudaBuffer::new(device, from.bytes())?;
        if made.bytes == 0 {
            return Ok(made);
        }
        // A few bytes travel with their job, and nobody waits: the labels of a step, a token.
        if made.bytes <= Stream::SMALL_BYTES_MAX {
            let sent = device.when_possible(|stream| stream.write_small(made.buffer.handle(), 0, from.as_bytes()))?;
            return Ok(CudaBuffer { pending: Pending::new(sent, Vec::new()), ..made });
        }
        account::check_hurry()?;
        // On a stream of its own it runs beside the kernels of earlier plans. What reads it comes after it, and it
        // comes after what used its memory before: the device keeps that order between streams, buffer by buffer.
        let last = device.0.upload.lock().take();
        if let Some(last) = last.filter(|last| !matches!(last.is_over(), Ok(true))) {
            // If it failed, those who read it are told.
            let _ = last.wait();
        }
        let write = |stream: &Stream| stream.write_ahead(made.buffer.handle(), 0, from.as_bytes());
        let Some(sent) = when_possible(device.uploads(), write)? else { return Ok(made) };
        let pending = Pending::new(sent, Vec::new());
        *device.0.upload.lock() = Some(pending.clone());
        Ok(CudaBuffer { pending, ..made })
    }

    /// Copies them back, once they are computed.
    pub(crate) fn read(&self) -> Result<CpuBuffer, ErrorKind> {
        let buffer = CpuBuffer::filled(self.bytes, |bytes| self.read_to(bytes))?;
        buffer.ok_or(ErrorKind::OutOfMemory { bytes: self.bytes })
    }

    /// Has some of its bytes copied back once they are computed, before there is memory for them: the device does not
    /// wait for what a large vector takes to be allocated. None where [`CudaBuffer::read_to`] has to.
    pub(crate) fn read_ahead(&self, bytes: Range<usize>) -> Result<Option<ReadUnderWay>, ErrorKind> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let (from, len) = (bytes.start as u64, bytes.len());
        let read = self.device.when_possible(|stream| stream.try_read(self.buffer.handle(), from, len));
        read.map_err(|what| self.if_lost(what))
    }

    /// Copies the first of its elements, once they are computed; as was begun, if it was.
    pub(crate) fn read_begun(&self, begun: Option<ReadUnderWay>, bytes: &mut [u8]) -> Result<(), ErrorKind> {
        let Some(begun) = begun else { return self.read_to(bytes) };
        execute::count(|counts| counts.round_trips += 1);
        begun.finish(bytes).map_err(|error| self.if_lost(failed(&error)))?;
        // Over by now, as the copy came after it.
        self.pending.settle()
    }

    /// The same for whoever looks from time to time whether they are there.
    pub(crate) fn begin_read(self: &Arc<Self>, bytes: Range<usize>) -> Result<Option<CudaRead>, ErrorKind> {
        Ok(self.read_ahead(bytes)?.map(|read| CudaRead { read, of: self.clone() }))
    }

    /// Copies the first of its elements, once they are computed.
    pub(crate) fn read_to(&self, bytes: &mut [u8]) -> Result<(), ErrorKind> {
        if !bytes.is_empty() {
            let read = self.device.when_done(|stream| stream.read_blocking(self.buffer.handle(), 0, bytes));
            read.map_err(|what| self.if_lost(what))?;
        }
        // Over by now, as the copy came after it.
        self.pending.settle()
    }
}

/// Bytes that are being copied from a GPU.
pub(crate) struct CudaRead {
    read: ReadUnderWay,
    of: Arc<CudaBuffer>,
}

impl CudaRead {
    pub(crate) fn is_over(&self) -> bool {
        self.read.is_over()
    }

    pub(crate) fn poll_to(&mut self, cx: &mut Context<'_>, bytes: &mut [u8]) -> Poll<Result<(), ErrorKind>> {
        let read = std::task::ready!(self.read.poll_to(cx, bytes));
        // What was computed is over by now, as the copy came after it.
        let read = read.map_err(|error| self.of.if_lost(failed(&error)));
        Poll::Ready(read.and_then(|()| self.of.pending.settle()))
    }
}

/// An allocation that was refused: what was asked for, and what there is.
fn memory_failed(device: &CudaDevice, error: &DeviceError, bytes: usize) -> ErrorKind {
    match error {
        DeviceError::OutOfMemory { .. } | DeviceError::OverQuota { .. } => device.short_of(bytes as u64),
        other => failed(other),
    }
}
