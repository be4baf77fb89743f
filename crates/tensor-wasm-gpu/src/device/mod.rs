//! A device as its users see it: tenants, buffers, copies, kernels, graphs. Handles here are cheap, `Send` and `Sync`, and
//! can do nothing but send jobs; the worker that does them is started, watched and replaced by `worker/keeper.rs`.
//!
//! Everything of a tenant is on one stream, in the order it was asked for. What is asked for is checked here, against the
//! tenant's own buffers, before a job is sent.

pub(crate) mod arena;
pub(crate) mod copy;
pub(crate) mod launch;
pub(crate) mod params;
pub(crate) mod pinned;
pub(crate) mod staging;

use std::collections::HashMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use prometheus_client::registry::Registry;

use crate::choice::{DeviceChoice, Unavailable};
use crate::device::arena::{Arena, Handle, MemoryStats, Origin, Shortage, Span};
use crate::device::launch::Loaded;
use crate::device::params::Param;
use crate::device::pinned::{Pinned, PinnedPool};
use crate::error::DeviceError;
use crate::info::{DeviceInfo, DeviceKind};
use crate::metrics::{Gauges, Metrics, Reading};
use crate::number::half;
use crate::queue::fair::Share;
use crate::queue::job::{Answer, Job};
use crate::queue::link::{CONTROL, Link, Order, Ticket};
use crate::slab::{SEATS, SlabPlan};
use crate::worker::host::HostKernels;
use crate::worker::keeper::{self, Keeper, Opened};

/// A tenant's memory pool in the driver may hold this much more than the tenant's quota: chunks are not always full.
const POOL_SLACK_BYTES: u64 = 128 << 20;

/// How to open a device.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    pub choice: DeviceChoice,
    pub placement: Placement,
    pub memory: SlabPlan,
    /// A worker that does not take a job for this long is taken to hang.
    pub hang: Duration,
    /// A job that is not done after this long is taken to be stuck, and the worker with it.
    pub job_max: Duration,
    /// Told when a worker was lost, and when another has taken its place.
    pub events: Events,
    /// What runs kernels where the device is the CPU. A worker process is given its own.
    pub host: HostKernels,
}

/// Something happened to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceEvent {
    Lost { why: String },
    Restored { after: Duration },
}

/// Who is told.
#[derive(Clone, Default)]
pub struct Events(pub Option<Arc<dyn Fn(DeviceEvent) + Send + Sync>>);

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Events(…)" } else { "Events(none)" })
    }
}

impl Events {
    pub(crate) fn tell(&self, event: DeviceEvent) {
        if let Some(listener) = &self.0 {
            listener(event);
        }
    }
}

/// Where the worker runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// A thread of this process: quick to start, but a fault of the device is a fault of this process.
    Thread,
    /// A process of its own, started as `EXE ARGS…` followed by the worker's arguments. It calls
    /// [`crate::worker_main`].
    Process { exe: PathBuf, args: Vec<String> },
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            choice: DeviceChoice::Auto,
            placement: Placement::Thread,
            memory: SlabPlan { staging_bytes: 64 << 20, pinned_bytes: 64 << 20 },
            hang: Duration::from_secs(5),
            job_max: Duration::from_secs(60),
            events: Events::default(),
            host: HostKernels::default(),
        }
    }
}

/// A device that is open. Cloning is cheap and shares it.
#[derive(Clone)]
pub struct Device(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    current: RwLock<Arc<Bound>>,
    pub metrics: Arc<Metrics>,
    tenants: Mutex<Tenants>,
    fallback: Option<Unavailable>,
    keeper: Mutex<Option<Keeper>>,
}

#[derive(Default)]
struct Tenants {
    by_name: HashMap<Arc<str>, Weak<Seat>>,
    /// Stream numbers that are free; 0 is the control stream.
    unused: Vec<u32>,
    /// Counts those there have been.
    seats: u64,
    /// Tenants that are gone and whose streams are not free yet.
    closing: Vec<Closing>,
}

/// The end of a tenant, in steps, each sent once the one before is done. Nobody waits for it.
struct Closing {
    bound: Arc<Bound>,
    stream: u32,
    sent: Option<Ticket>,
    left: Vec<(usize, Job)>,
}

impl Closing {
    fn new(bound: Arc<Bound>, stream: u32) -> Closing {
        // Last first. Modules go when nothing that runs can need them.
        let left =
            vec![(CONTROL, Job::CloseStream { stream }), (lane(stream), Job::Clear), (stream as usize, Job::Clear)];
        Closing { bound, stream, sent: None, left }
    }

    /// Goes on as far as it can. True when the stream is free.
    fn advance(&mut self) -> bool {
        let link = &self.bound.link;
        loop {
            if link.lost().is_some() {
                return true;
            }
            if self.sent.as_ref().is_some_and(|ticket| !ticket.is_over()) {
                return false;
            }
            self.sent = None;
            let Some((stream, job)) = self.left.last() else {
                return link.close(self.stream as usize) && link.close(lane(self.stream));
            };
            match link.send(*stream, vec![(*job).into()]) {
                Ok(ticket) => self.sent = Some(ticket),
                Err(DeviceError::Busy { .. }) => return false,
                // It was never opened, or is lost.
                Err(_) => {}
            }
            self.left.pop();
        }
    }
}

impl Tenants {
    fn reap(&mut self) {
        let Tenants { unused, closing, .. } = self;
        closing.retain_mut(|closing| {
            let is_over = closing.advance();
            if is_over {
                unused.push(closing.stream);
            }
            !is_over
        });
    }
}

/// Loads that a tenant may have waiting; the images wait in the worker's memory.
const LOADS_WAITING_MAX: usize = 8;

/// Things that the worker is told to forget at once.
const GARBAGE_MAX: usize = 32;

/// How long an allocation waits for tenants that are gone to give back what they had.
const CLOSING_MAX: Duration = Duration::from_millis(500);

/// Everything that lives and dies with one worker.
pub(crate) struct Bound {
    pub link: Arc<Link>,
    pub info: DeviceInfo,
    pinned: Arc<PinnedPool>,
    pub garbage: Arc<Garbage>,
}

/// What the worker may forget, told when there is an occasion: whoever lets go of something need not wait for room in a
/// line, and may hold locks.
#[derive(Default)]
pub(crate) struct Garbage(Mutex<Vec<(usize, Job)>>);

impl Garbage {
    pub(crate) fn push(&self, stream: usize, job: Job) {
        self.0.lock().push((stream, job));
    }
}

/// The lane of a tenant's stream, on which its modules are loaded.
pub(crate) fn lane(stream: u32) -> usize {
    SEATS + stream as usize
}

impl Bound {
    pub(crate) fn new(link: Arc<Link>) -> Bound {
        let info = crate::info::get(&link.slab);
        let pinned = PinnedPool::new(link.slab.clone());
        Bound { link, info, pinned, garbage: Arc::default() }
    }

    /// Has the worker forget what nobody uses any more, as far as there is room for it.
    pub(crate) fn collect(&self) {
        let mut garbage = std::mem::take(&mut *self.garbage.0.lock());
        garbage.sort_by_key(|(stream, _)| *stream);
        let mut left = Vec::new();
        for together in garbage.chunk_by(|a, b| a.0 == b.0).flat_map(|own| own.chunks(GARBAGE_MAX)) {
            // One place in the line, however many they are.
            let orders = together.iter().map(|(_, job)| (*job).into()).collect();
            if let Err(DeviceError::Busy { .. }) = self.link.send(together[0].0, orders) {
                left.extend_from_slice(together);
            }
        }
        self.garbage.0.lock().extend(left);
    }
}

/// What a tenant may take of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TenantLimits {
    pub memory_bytes_max: u64,
    /// Its part of the device's time, relative to the others'.
    pub weight: u32,
    /// Jobs on the device at once, and jobs waiting to be sent.
    pub running_max: usize,
    pub waiting_max: usize,
    /// Multiprocessors its kernels may use; 0 for all.
    pub multiprocessors: u32,
}

impl Default for TenantLimits {
    fn default() -> TenantLimits {
        TenantLimits { memory_bytes_max: 1 << 30, weight: 1, running_max: 256, waiting_max: 256, multiprocessors: 0 }
    }
}

/// A tenant of a device. Cloning shares it; with the last clone everything it holds goes back.
#[derive(Clone)]
pub struct Tenant(pub(crate) Arc<Seat>);

pub(crate) struct Seat {
    device: Device,
    /// Never used again, unlike the stream's number.
    pub id: u64,
    name: Arc<str>,
    pub stream: u32,
    limits: TenantLimits,
    pub place: Mutex<Place>,
}

/// A tenant's memory with the worker of the moment.
pub(crate) struct Place {
    /// Of which worker; none yet at first.
    pub worker: Option<u32>,
    pub arena: Arena,
    pub modules: HashMap<blake3::Hash, Weak<Loaded>>,
}

/// Work that was sent to a device. Await it, or wait for it in a thread; dropping it does not stop the work.
pub struct Completion(pub(crate) Ticket);

/// A buffer that goes back when dropped.
pub struct Buffer {
    tenant: Tenant,
    handle: Handle,
}

impl Device {
    /// Opens a device. Blocks until it is ready: some hundred milliseconds for CUDA.
    pub fn open(options: &OpenOptions) -> Result<Device, Unavailable> {
        let metrics = Arc::new(Metrics::default());
        let Opened { link, fallback, keeper } = keeper::open(options, &metrics)?;
        let unused = (1..half(SEATS)).rev().collect();
        let tenants = Tenants { by_name: HashMap::new(), unused, seats: 0, closing: Vec::new() };
        let inner = Arc::new(Inner {
            current: RwLock::new(Arc::new(Bound::new(link))),
            metrics,
            tenants: Mutex::new(tenants),
            fallback,
            keeper: Mutex::new(None),
        });
        keeper.watch(Arc::downgrade(&inner));
        *inner.keeper.lock() = Some(keeper);
        Ok(Device(inner))
    }

    pub fn info(&self) -> DeviceInfo {
        self.0.current.read().info.clone()
    }

    pub fn kind(&self) -> DeviceKind {
        self.0.current.read().info.kind
    }

    /// Why `auto` did not choose CUDA.
    pub fn fallback(&self) -> Option<&Unavailable> {
        self.0.fallback.as_ref()
    }

    /// The process id of the worker, where it is a process.
    pub fn worker_pid(&self) -> Option<u32> {
        self.0.keeper.lock().as_ref().and_then(Keeper::pid)
    }

    /// How many workers the device has had before this one.
    pub fn restarts(&self) -> u32 {
        self.0.current.read().link.worker
    }

    /// Adds the device's metrics to a registry.
    pub fn register(&self, registry: &mut Registry) {
        self.0.metrics.register(registry);
        let weak = Arc::downgrade(&self.0);
        let read = move || weak.upgrade().map_or_else(Reading::default, |inner| Device(inner).reading());
        registry.register_collector(Box::new(Gauges(Arc::new(Mutex::new(Box::new(read))))));
    }

    fn reading(&self) -> Reading {
        let seats = self.seats();
        let used = |seat: &Arc<Seat>| (seat.name.to_string(), seat.place.lock().arena.stats().used_bytes);
        let by_tenant: Vec<(String, u64)> = seats.iter().map(used).collect();
        Reading {
            memory_used_bytes: by_tenant.iter().map(|(_, bytes)| bytes).sum(),
            by_tenant,
            queue_depth: self.0.current.read().link.queued(),
        }
    }

    /// The tenant of that name, with these limits if it is new.
    pub fn tenant(&self, name: &str, limits: TenantLimits) -> Result<Tenant, DeviceError> {
        let mut tenants = self.0.tenants.lock();
        if let Some(seat) = tenants.by_name.get(name).and_then(Weak::upgrade) {
            return Ok(Tenant(seat));
        }
        tenants.reap();
        let Some(stream) = tenants.unused.pop() else {
            return Err(DeviceError::Refused { why: format!("it has {} tenants already", SEATS - 1) });
        };
        // Nothing could ever be sent with less.
        let limits =
            TenantLimits { running_max: limits.running_max.max(1), waiting_max: limits.waiting_max.max(1), ..limits };
        let name: Arc<str> = name.into();
        let origin = Origin { tenant: stream, worker: 0 };
        let arena = Arena::new(&name, origin, limits.memory_bytes_max);
        let place = Mutex::new(Place { worker: None, arena, modules: HashMap::new() });
        tenants.seats += 1;
        let id = tenants.seats;
        let seat = Arc::new(Seat { device: self.clone(), id, name: name.clone(), stream, limits, place });
        tenants.by_name.insert(name, Arc::downgrade(&seat));
        drop(tenants);
        Ok(Tenant(seat))
    }

    /// Memory that host and device both see in place, zeroed.
    pub fn pinned(&self, bytes: u64) -> Result<Pinned, DeviceError> {
        let bound = self.0.current.read().clone();
        bound.pinned.take(bytes, bound.info.slab_address)
    }

    /// Fails everything on the worker of the moment; the keeper starts another. For tests of what depends on it.
    pub fn lose(&self, why: &str) {
        self.0.current.read().link.lose(why);
    }

    /// Gives back everything no tenant uses.
    fn trim_all(&self, bound: &Bound) {
        let began = std::time::Instant::now();
        while !self.0.reap() && began.elapsed() < CLOSING_MAX {
            std::thread::park_timeout(Duration::from_micros(100));
        }
        for seat in self.seats() {
            seat.trim(bound);
        }
    }

    fn seats(&self) -> Vec<Arc<Seat>> {
        let mut tenants = self.0.tenants.lock();
        tenants.reap();
        tenants.by_name.values().filter_map(Weak::upgrade).collect()
    }
}

impl Inner {
    /// Goes on with the ends of tenants that are gone. Whether all of them are over.
    pub(crate) fn reap(&self) -> bool {
        let mut tenants = self.tenants.lock();
        tenants.reap();
        tenants.closing.is_empty()
    }

    pub(crate) fn replace(&self, link: Arc<Link>) {
        *self.current.write() = Arc::new(Bound::new(link));
    }

    pub(crate) fn link(&self) -> Arc<Link> {
        self.current.read().link.clone()
    }
}

impl Seat {
    /// The worker of the moment, with the tenant known to it.
    pub(crate) fn bound(&self) -> Result<Arc<Bound>, DeviceError> {
        let bound = self.device.0.current.read().clone();
        if let Some(lost) = bound.link.lost() {
            return Err(lost);
        }
        let mut place = self.place.lock();
        if place.worker != Some(bound.link.worker) {
            self.settle_in(&bound, &mut place)?;
        }
        Ok(bound)
    }

    fn settle_in(&self, bound: &Bound, place: &mut Place) -> Result<(), DeviceError> {
        let TenantLimits { memory_bytes_max, weight, running_max, waiting_max, multiprocessors } = self.limits;
        let share = Share { weight, running_max, waiting_max };
        bound.link.open(self.stream as usize, &self.name, share);
        bound.link.open(
            lane(self.stream),
            &self.name,
            Share { weight: 0, running_max: 1, waiting_max: LOADS_WAITING_MAX },
        );
        let cap = memory_bytes_max.saturating_add(POOL_SLACK_BYTES);
        let job = Job::OpenStream { stream: self.stream, memory_bytes_max: cap, sm_count: multiprocessors };
        let opened = bound.link.send(CONTROL, vec![job.into()]).and_then(|ticket| ticket.wait(|_| ()));
        if let Err(error) = opened {
            bound.link.close(self.stream as usize);
            bound.link.close(lane(self.stream));
            return Err(error);
        }
        let origin = Origin { tenant: self.stream, worker: bound.link.worker };
        let arena = Arena::new(&self.name, origin, memory_bytes_max);
        *place = Place { worker: Some(bound.link.worker), arena, modules: HashMap::new() };
        Ok(())
    }

    fn trim(&self, bound: &Bound) {
        let mut place = self.place.lock();
        if place.worker != Some(bound.link.worker) {
            return;
        }
        let release = |(address, bytes)| Job::Release { stream: self.stream, address, bytes };
        let jobs: Vec<Job> = place.arena.trim().into_iter().map(release).collect();
        drop(place);
        // On the tenant's own stream: what still uses the memory comes before.
        for job in jobs {
            if let Ok(ticket) = send_when_possible(&bound.link, self.stream as usize, job) {
                let _ = ticket.wait(|_| ());
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let bound = self.device.0.current.read().clone();
        let is_known = self.place.get_mut().worker == Some(bound.link.worker);
        let mut tenants = self.device.0.tenants.lock();
        if tenants.by_name.get(&self.name).is_some_and(|seat| seat.strong_count() == 0) {
            tenants.by_name.remove(&self.name);
        }
        // Buffers that nobody freed are free now: nobody is left to use them.
        match is_known {
            true => tenants.closing.push(Closing::new(bound, self.stream)),
            false => tenants.unused.push(self.stream),
        }
        tenants.reap();
    }
}

impl Tenant {
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub fn device(&self) -> &Device {
        &self.0.device
    }

    pub fn memory(&self) -> MemoryStats {
        self.0.place.lock().arena.stats()
    }

    /// A buffer that frees itself. From a warm pool this takes no job.
    pub fn buffer(&self, bytes: u64) -> Result<Buffer, DeviceError> {
        Ok(Buffer { tenant: self.clone(), handle: self.alloc(bytes)? })
    }

    /// A buffer by its handle, which lives until it is freed or the tenant goes. Reads as zeros until written.
    pub fn alloc(&self, bytes: u64) -> Result<Handle, DeviceError> {
        // The usual case, without asking anybody anything.
        {
            let bound = self.0.device.0.current.read();
            let mut place = self.0.place.lock();
            if place.worker == Some(bound.link.worker) && bound.link.lost().is_none() {
                match place.arena.allocate(bytes) {
                    Ok(handle) => return Ok(handle),
                    Err(Shortage::Refused(error)) => return Err(error),
                    Err(Shortage::Chunk { .. }) => {}
                }
            }
        }
        self.alloc_slowly(bytes)
    }

    fn alloc_slowly(&self, bytes: u64) -> Result<Handle, DeviceError> {
        let mut has_trimmed = false;
        loop {
            let bound = self.0.bound()?;
            let wanted = match self.0.place.lock().arena.allocate(bytes) {
                Ok(handle) => return Ok(handle),
                Err(Shortage::Refused(error)) => return Err(error),
                Err(Shortage::Chunk { bytes }) => bytes,
            };
            let reserve = Job::Reserve { stream: self.0.stream, bytes: wanted };
            match bound.link.send(CONTROL, vec![reserve.into()])?.wait(|_| ()) {
                Ok(Answer { values: [address, ..] }) => {
                    let mut place = self.0.place.lock();
                    if place.worker == Some(bound.link.worker) {
                        place.arena.add_chunk(address, wanted);
                    }
                }
                Err(DeviceError::OutOfMemory { .. }) if !has_trimmed => {
                    has_trimmed = true;
                    self.0.device.trim_all(&bound);
                }
                Err(DeviceError::OutOfMemory { .. }) => return Err(DeviceError::OutOfMemory { asked_bytes: bytes }),
                Err(error) => return Err(error),
            }
        }
    }

    pub fn free(&self, handle: Handle) -> Result<(), DeviceError> {
        self.0.place.lock().arena.free(handle)
    }

    pub fn size(&self, handle: Handle) -> Result<u64, DeviceError> {
        self.0.place.lock().arena.size(handle)
    }

    /// Sends jobs about spans of buffers. What needs zeroing first is zeroed first, and nothing comes between: the place
    /// stays locked until the jobs are in line.
    pub(crate) fn send<'a>(
        &self,
        spans: &[(Handle, u64, u64, bool)],
        make: impl FnOnce(&[Span]) -> Result<Vec<Order<'a>>, DeviceError>,
    ) -> Result<Completion, DeviceError> {
        let bound = self.0.bound()?;
        let mut place = self.0.place.lock();
        let mut found = Vec::with_capacity(spans.len());
        let mut orders: Vec<Order<'a>> = Vec::new();
        for (handle, offset, len, overwrites) in spans {
            let span = place.arena.peek(*handle, *offset, *len, *overwrites)?;
            if let Some((address, bytes)) = span.zero_first {
                orders.push(Job::Fill { address, bytes, value: 0 }.into());
            }
            found.push(span);
        }
        orders.extend(make(&found)?);
        let ticket = bound.link.send(self.0.stream as usize, orders)?;
        spans.iter().filter(|(_, _, len, _)| *len > 0).for_each(|(handle, ..)| place.arena.touch(*handle));
        Ok(Completion(ticket))
    }
}

/// Sends a job, waiting while the line is full.
fn send_when_possible(link: &Arc<Link>, stream: usize, job: Job) -> Result<Ticket, DeviceError> {
    loop {
        match link.send(stream, vec![job.into()]) {
            Err(DeviceError::Busy { .. }) => std::thread::park_timeout(Duration::from_micros(50)),
            sent => return sent,
        }
    }
}

impl Completion {
    /// Whether it is over; costs a look at memory.
    pub fn is_over(&self) -> bool {
        self.0.is_over()
    }

    /// Waits in this thread, at the same latency as an async task.
    pub fn wait(self) -> Result<(), DeviceError> {
        self.0.wait(|_| ()).map(drop)
    }
}

impl Future for Completion {
    type Output = Result<(), DeviceError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(|answer| answer.map(drop))
    }
}

impl Buffer {
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Gives the buffer away: it is freed by its handle from now on.
    pub fn into_handle(self) -> Handle {
        let handle = self.handle;
        std::mem::forget(self);
        handle
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.tenant.free(self.handle);
    }
}

impl From<&Buffer> for Param {
    fn from(buffer: &Buffer) -> Param {
        Param::Buffer { handle: buffer.handle, offset: 0 }
    }
}
