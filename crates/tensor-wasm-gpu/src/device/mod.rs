//! A device as its users see it: tenants, buffers, copies, kernels, graphs. Handles here are cheap, `Send` and `Sync`,
//! and can do nothing but send jobs; the worker that does them is started, watched and replaced by `worker/keeper.rs`.
//!
//! A tenant has a stream from the beginning, and takes more from a pool (`stream.rs`): what is asked for on one stream
//! is done in that order, and what two streams do with one buffer too. What is asked for is checked here, against the
//! tenant's own buffers, before a job is sent.

pub(crate) mod arena;
pub(crate) mod copy;
pub(crate) mod launch;
pub(crate) mod params;
pub(crate) mod pinned;
pub(crate) mod region;
pub(crate) mod resident;
pub(crate) mod staging;
pub(crate) mod stream;

use std::collections::HashMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use prometheus_client::registry::Registry;

use crate::choice::{DeviceChoice, Unavailable};
use crate::device::arena::{Arena, Handle, MemoryStats, Origin, Shortage, Trimmed};
use crate::device::launch::LoadedModule;
use crate::device::params::Param;
use crate::device::pinned::{Pinned, PinnedPool};
use crate::device::stream::{Stream, StreamSlot, TenantStreams, last_of_each_stream};
use crate::error::DeviceError;
use crate::info::{DeviceInfo, DeviceKind};
use crate::metrics::{Gauges, Metrics, Reading};
use crate::number::half;
use crate::queue::fair::Share;
use crate::queue::job::{Answer, Job};
use crate::queue::link::{CONTROL, Link, Order, StreamUse, Ticket};
use crate::slab::{POOL_FIRST, POOL_STREAMS, SlabPlan, TENANTS, lane_of};
use crate::wait::{CLOSING_PERIOD, ROOM_PERIOD};
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
    /// A resident kernel that has not beaten for this long is taken to hang, and the worker is replaced.
    pub beat_max: Duration,
    /// A resident kernel that has not ended this long after it was told to is taken to hang, whether it beats or not.
    pub stop_max: Duration,
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
    /// A thread of this process: quick to start, but a fault of the device is a fault of this process, and the
    /// driver's hardware queues are shared with whatever else in this process uses CUDA. There are eight, and 32 if
    /// `CUDA_DEVICE_MAX_CONNECTIONS` says so when the process starts, as a worker process does.
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
            memory: SlabPlan { staging_bytes: 64 << 20, pinned_bytes: 64 << 20, ..SlabPlan::default() },
            hang: Duration::from_secs(5),
            job_max: Duration::from_secs(60),
            beat_max: Duration::from_secs(2),
            stop_max: Duration::from_secs(10),
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
    by_name: HashMap<Arc<str>, Weak<TenantState>>,
    /// Numbers of first streams that are free, which are tenants' numbers; 0 is the control stream.
    unused: Vec<u32>,
    /// Streams of the pool that are free.
    unused_streams: Vec<u32>,
    /// Counts those there have been.
    count: u64,
    /// Tenants and streams that are gone and whose numbers are not free yet.
    closing: Vec<Closing>,
}

/// The end of a tenant or of one of its streams, in stages, each sent once the one before is done. Nobody waits for it.
struct Closing {
    bound: Arc<Bound>,
    /// The tenant's number; whether it is the end of that too.
    owner: u32,
    home: Option<u32>,
    /// Of the pool.
    streams: Vec<u32>,
    sent: Vec<Ticket>,
    /// Last first.
    stages: Vec<Vec<(usize, Job)>>,
}

impl Closing {
    fn new(bound: Arc<Bound>, owner: u32, is_tenant: bool, streams: Vec<u32>) -> Closing {
        let home = is_tenant.then_some(owner);
        let all = |job: fn(u32) -> (usize, Job)| streams.iter().map(|stream| job(*stream)).collect();
        // The tenant's other streams go before its first, and its modules when nothing that runs can need them.
        let mut stages: Vec<Vec<(usize, Job)>> = Vec::new();
        if let Some(home) = home {
            stages.push(vec![(CONTROL, Job::CloseStream { stream: home })]);
            stages.push(vec![(lane_of(home as usize), Job::Clear)]);
            stages.push(vec![(home as usize, Job::Clear)]);
        }
        stages.push(all(|stream| (CONTROL, Job::CloseStream { stream })));
        stages.push(all(|stream| (stream as usize, Job::Clear)));
        Closing { bound, owner, home, streams, sent: Vec::new(), stages }
    }

    /// Goes on as far as it can. True when all of it is free.
    fn advance(&mut self) -> bool {
        let link = &self.bound.link;
        loop {
            if link.lost().is_some() {
                return true;
            }
            self.sent.retain(|ticket| !ticket.is_over());
            let Some(stage) = self.stages.last_mut() else {
                let are_closed = self.streams.iter().all(|stream| link.close(*stream as usize));
                let is_closed = |home| link.close(home as usize) && link.close(lane_of(home as usize));
                return self.sent.is_empty() && are_closed && self.home.is_none_or(is_closed);
            };
            if stage.is_empty() {
                if !self.sent.is_empty() {
                    return false;
                }
                self.stages.pop();
                continue;
            }
            while let Some((stream, job)) = stage.pop() {
                match link.send(stream, vec![job.into()]) {
                    Ok(ticket) => self.sent.push(ticket),
                    Err(DeviceError::Busy { .. }) => {
                        stage.push((stream, job));
                        return false;
                    }
                    // It was never opened, or is lost.
                    Err(_) => {}
                }
            }
        }
    }
}

impl Tenants {
    fn reap(&mut self) {
        let Tenants { unused, unused_streams, closing, .. } = self;
        // A tenant's memory, modules and multiprocessors go when all of its streams have.
        let with_streams: Vec<u32> = closing.iter().filter(|own| own.home.is_none()).map(|own| own.owner).collect();
        closing.retain_mut(|closing| {
            if closing.home.is_some_and(|home| with_streams.contains(&home)) && closing.bound.link.lost().is_none() {
                return true;
            }
            let is_over = closing.advance();
            if is_over {
                unused.extend(closing.home);
                unused_streams.append(&mut closing.streams);
            }
            !is_over
        });
    }
}

/// Loads that a tenant may have waiting; the images wait in the worker's memory.
const LOADS_WAITING_MAX: usize = 8;

/// Things that the worker is told to forget at once.
const GARBAGE_MAX: usize = 32;

/// How long an allocation, or a tenant that comes, waits for tenants that are gone to give back what they had.
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
    /// Resident kernels it may have at once. They take a part of the device for as long as they stay, which no line
    /// shares out.
    pub residents_max: usize,
}

impl Default for TenantLimits {
    fn default() -> TenantLimits {
        TenantLimits {
            memory_bytes_max: 1 << 30,
            weight: 1,
            running_max: 256,
            waiting_max: 256,
            multiprocessors: 0,
            residents_max: 0,
        }
    }
}

/// A tenant of a device. Cloning shares it; with the last clone, and the last of its streams and buffers, everything
/// it holds goes back. Used as a [`Stream`], it is its first one.
#[derive(Clone)]
pub struct Tenant(Stream);

impl std::ops::Deref for Tenant {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.0
    }
}

pub(crate) struct TenantState {
    pub device: Device,
    /// Never used again, unlike the number of its first stream.
    pub id: u64,
    pub name: Arc<str>,
    pub limits: TenantLimits,
    /// Its first stream.
    pub home: Arc<StreamSlot>,
    pub streams: Mutex<TenantStreams>,
    pub memory: Mutex<TenantMemory>,
}

/// A tenant's memory, modules and streams with the worker of the moment.
pub(crate) struct TenantMemory {
    /// Of which worker; none yet at first.
    pub worker: Option<u32>,
    pub arena: Arena,
    pub modules: HashMap<blake3::Hash, Weak<LoadedModule>>,
    /// Its streams that the worker knows, as bits by their indices.
    pub opened: u64,
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
        let first = half(POOL_FIRST);
        let streams_max = half(POOL_STREAMS).min(stream::pool_max(crate::info::get(&link.slab).kind));
        let tenants = Tenants {
            unused: (1..half(TENANTS)).rev().collect(),
            unused_streams: (first..first + streams_max).rev().collect(),
            ..Tenants::default()
        };
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

    /// Bytes of its memory that were free when it was opened and are in nobody's buffers.
    pub fn memory_free_bytes(&self) -> u64 {
        let used = |own: &Arc<TenantState>| own.memory.lock().arena.stats().used_bytes;
        let used_bytes: u64 = self.tenants().iter().map(used).sum();
        self.info().memory_free_bytes.saturating_sub(used_bytes)
    }

    fn reading(&self) -> Reading {
        let tenants = self.tenants();
        let used = |own: &Arc<TenantState>| (own.name.to_string(), own.memory.lock().arena.stats().used_bytes);
        let by_tenant: Vec<(String, u64)> = tenants.iter().map(used).collect();
        Reading {
            memory_used_bytes: by_tenant.iter().map(|(_, bytes)| bytes).sum(),
            by_tenant,
            queue_depth: self.0.current.read().link.queued(),
        }
    }

    /// The tenant of that name, with these limits if it is new. Where there is no room for another, waits a moment for
    /// those that are gone to give back what they had.
    pub fn tenant(&self, name: &str, limits: TenantLimits) -> Result<Tenant, DeviceError> {
        let began = std::time::Instant::now();
        loop {
            if let Some(tenant) = self.try_tenant(name, limits) {
                return Ok(tenant);
            }
            if self.0.reap() || began.elapsed() >= CLOSING_MAX {
                let why = format!("it has {} tenants already, and all of them use it", TENANTS - 1);
                return self.try_tenant(name, limits).ok_or(DeviceError::Refused { why });
            }
            std::thread::park_timeout(CLOSING_PERIOD);
        }
    }

    /// The same without waiting; none if there is no room for another tenant now.
    pub fn try_tenant(&self, name: &str, limits: TenantLimits) -> Option<Tenant> {
        let mut tenants = self.0.tenants.lock();
        if let Some(state) = tenants.by_name.get(name).and_then(Weak::upgrade) {
            drop(tenants);
            let slot = state.home.clone();
            return Some(Tenant(Stream { state, slot, payer: None }));
        }
        tenants.reap();
        let number = tenants.unused.pop()?;
        // Nothing could ever be sent with less.
        let limits =
            TenantLimits { running_max: limits.running_max.max(1), waiting_max: limits.waiting_max.max(1), ..limits };
        let name: Arc<str> = name.into();
        let origin = Origin { tenant: number, worker: 0 };
        let arena = Arena::new(&name, origin, limits.memory_bytes_max);
        let memory = TenantMemory { worker: None, arena, modules: HashMap::new(), opened: 0 };
        tenants.count += 1;
        let slot = Arc::new(StreamSlot { number, index: 0 });
        let state = Arc::new(TenantState {
            device: self.clone(),
            id: tenants.count,
            name: name.clone(),
            limits,
            home: slot.clone(),
            streams: Mutex::default(),
            memory: Mutex::new(memory),
        });
        tenants.by_name.insert(name, Arc::downgrade(&state));
        Some(Tenant(Stream { state, slot, payer: None }))
    }

    /// A stream of the pool. None if there is none.
    pub(crate) fn take_stream(&self) -> Option<u32> {
        let mut tenants = self.0.tenants.lock();
        if tenants.unused_streams.is_empty() {
            tenants.reap();
        }
        tenants.unused_streams.pop()
    }

    /// Gives streams of the pool back, once everything on them is done.
    pub(crate) fn close_streams(&self, owner: u32, streams: Vec<u32>) {
        let bound = self.0.current.read().clone();
        let mut tenants = self.0.tenants.lock();
        tenants.closing.push(Closing::new(bound, owner, false, streams));
        tenants.reap();
    }

    pub(crate) fn bound(&self) -> Arc<Bound> {
        self.0.current.read().clone()
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
            std::thread::park_timeout(CLOSING_PERIOD);
        }
        for tenant in self.tenants() {
            tenant.trim(bound);
        }
    }

    pub(crate) fn tenants(&self) -> Vec<Arc<TenantState>> {
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

impl TenantState {
    /// The number of its first stream.
    pub(crate) fn number(&self) -> u32 {
        self.home.number
    }

    /// The worker of the moment, with the tenant known to it.
    pub(crate) fn bound(&self) -> Result<Arc<Bound>, DeviceError> {
        let bound = self.device.bound();
        if let Some(lost) = bound.link.lost() {
            return Err(lost);
        }
        let mut memory = self.memory.lock();
        if memory.worker != Some(bound.link.worker) {
            self.settle_in(&bound, &mut memory)?;
        }
        Ok(bound)
    }

    fn settle_in(&self, bound: &Bound, memory: &mut TenantMemory) -> Result<(), DeviceError> {
        let TenantLimits { memory_bytes_max, weight, running_max, waiting_max, multiprocessors, .. } = self.limits;
        let share = Share { weight, running_max, waiting_max };
        let (home, lane) = (self.number() as usize, lane_of(self.number() as usize));
        bound.link.open(home, &self.name, share);
        bound.link.open(lane, &self.name, Share { weight: 0, running_max: 1, waiting_max: LOADS_WAITING_MAX });
        let cap = memory_bytes_max.saturating_add(POOL_SLACK_BYTES);
        let job = Job::OpenStream { stream: self.number(), memory_bytes_max: cap, sm_count: multiprocessors };
        let opened = bound.link.send(CONTROL, vec![job.into()]).and_then(|ticket| ticket.wait(|_| ()));
        if let Err(error) = opened {
            bound.link.close(home);
            bound.link.close(lane);
            return Err(error);
        }
        let origin = Origin { tenant: self.number(), worker: bound.link.worker };
        let arena = Arena::new(&self.name, origin, memory_bytes_max);
        *memory = TenantMemory { worker: Some(bound.link.worker), arena, modules: HashMap::new(), opened: 1 };
        Ok(())
    }

    fn trim(&self, bound: &Bound) {
        let mut memory = self.memory.lock();
        if memory.worker != Some(bound.link.worker) {
            return;
        }
        memory.arena.release_held(|held| bound.link.is_past(held));
        let trimmed = memory.arena.trim();
        drop(memory);
        // On the tenant's first stream, after what still uses the memory on the others.
        for Trimmed { address, bytes, uses } in trimmed {
            let release = Job::Release { stream: self.number(), address, bytes };
            let orders = || {
                let is_left = |before: &&StreamUse| before.stream != self.number() && !bound.link.is_past(**before);
                let mut left = Vec::new();
                uses.iter().filter(is_left).for_each(|before| last_of_each_stream(&mut left, *before));
                left.into_iter().map(Order::after).chain([release.into()]).collect()
            };
            if let Ok(ticket) = send_when_possible(&bound.link, self.number() as usize, orders) {
                let _ = ticket.wait(|_| ());
            }
        }
    }
}

impl Drop for TenantState {
    fn drop(&mut self) {
        let bound = self.device.bound();
        let memory = self.memory.get_mut();
        let is_known = memory.worker == Some(bound.link.worker);
        let opened = memory.opened;
        // Streams that the worker never heard of are free at once.
        let slots = std::mem::take(&mut self.streams.get_mut().slots);
        let (closing, unused): (Vec<_>, Vec<_>) =
            slots.iter().partition(|slot| is_known && opened & 1 << slot.index != 0);
        let numbers = |slots: Vec<&Arc<StreamSlot>>| slots.iter().map(|slot| slot.number).collect::<Vec<u32>>();
        let (closing, unused) = (numbers(closing), numbers(unused));
        let mut tenants = self.device.0.tenants.lock();
        if tenants.by_name.get(&self.name).is_some_and(|own| own.strong_count() == 0) {
            tenants.by_name.remove(&self.name);
        }
        tenants.unused_streams.extend(unused);
        // Buffers that nobody freed are free now: nobody is left to use them.
        if is_known {
            tenants.closing.push(Closing::new(bound, self.home.number, true, closing));
        } else {
            tenants.unused.push(self.home.number);
        }
        tenants.reap();
    }
}

impl Tenant {
    pub fn name(&self) -> &str {
        &self.state.name
    }

    pub fn memory(&self) -> MemoryStats {
        self.state.memory.lock().arena.stats()
    }

    /// A stream for one who sends jobs: an instance, a plan. Its own while there are enough, and else one that is
    /// shared, in whose order its jobs then are. Goes back when dropped.
    pub fn stream(&self) -> Stream {
        TenantState::stream(&self.state)
    }

    /// A buffer that frees itself. From a warm pool this takes no job.
    pub fn buffer(&self, bytes: u64) -> Result<Buffer, DeviceError> {
        Ok(Buffer { tenant: self.clone(), handle: self.alloc(bytes)? })
    }

    /// The same without waiting: none where the pool is not warm.
    pub fn try_buffer(&self, bytes: u64) -> Result<Option<Buffer>, DeviceError> {
        Ok(self.try_alloc(bytes)?.map(|handle| Buffer { tenant: self.clone(), handle }))
    }

    /// A buffer by its handle, which lives until it is freed or the tenant goes. Reads as zeros until written.
    pub fn alloc(&self, bytes: u64) -> Result<Handle, DeviceError> {
        match self.try_alloc(bytes)? {
            Some(handle) => Ok(handle),
            None => self.alloc_slowly(bytes),
        }
    }

    /// The usual case, without asking anybody anything.
    fn try_alloc(&self, bytes: u64) -> Result<Option<Handle>, DeviceError> {
        let bound = self.state.device.0.current.read();
        let mut memory = self.state.memory.lock();
        if memory.worker != Some(bound.link.worker) || bound.link.lost().is_some() {
            return Ok(None);
        }
        memory.arena.release_held(|held| bound.link.is_past(held));
        match memory.arena.allocate(bytes) {
            Ok(handle) => Ok(Some(handle)),
            Err(Shortage::Refused(error)) => Err(error),
            Err(Shortage::Chunk { .. }) => Ok(None),
        }
    }

    fn alloc_slowly(&self, bytes: u64) -> Result<Handle, DeviceError> {
        let mut has_trimmed = false;
        loop {
            let bound = self.state.bound()?;
            let wanted = match self.state.memory.lock().arena.allocate(bytes) {
                Ok(handle) => return Ok(handle),
                Err(Shortage::Refused(error)) => return Err(error),
                Err(Shortage::Chunk { bytes }) => bytes,
            };
            let reserve = Job::Reserve { stream: self.state.number(), bytes: wanted };
            match bound.link.send(CONTROL, vec![reserve.into()])?.wait(|_| ()) {
                Ok(Answer { values: [address, ..] }) => {
                    let mut memory = self.state.memory.lock();
                    if memory.worker == Some(bound.link.worker) {
                        memory.arena.add_chunk(address, wanted);
                    }
                }
                Err(DeviceError::OutOfMemory { .. }) if !has_trimmed => {
                    has_trimmed = true;
                    self.state.device.trim_all(&bound);
                }
                Err(DeviceError::OutOfMemory { .. }) => return Err(DeviceError::OutOfMemory { asked_bytes: bytes }),
                Err(error) => return Err(error),
            }
        }
    }

    pub fn free(&self, handle: Handle) -> Result<(), DeviceError> {
        self.state.memory.lock().arena.free(handle)
    }

    pub fn size(&self, handle: Handle) -> Result<u64, DeviceError> {
        self.state.memory.lock().arena.size(handle)
    }
}

/// Sends jobs, waiting while the line is full.
fn send_when_possible<'a>(
    link: &Arc<Link>,
    stream: usize,
    orders: impl Fn() -> Vec<Order<'a>>,
) -> Result<Ticket, DeviceError> {
    loop {
        match link.send(stream, orders()) {
            Err(DeviceError::Busy { .. }) => std::thread::park_timeout(ROOM_PERIOD),
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
