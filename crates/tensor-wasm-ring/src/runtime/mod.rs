//! The host's side of actors: a runtime starts executors on a device, ports of it send and receive, and a thread of its
//! own takes replies for those who have parked and looks after actors that have faulted.
//!
//! Handles are cheap and `Send`. What ends an executor, dropping it or the runtime, or the loss of its device, ends it
//! for all handles: they say so and do nothing.

mod actor;
mod executor;
mod port;
mod replies;
mod room;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use parking_lot::{Mutex, RwLock};
use tensor_wasm_gpu::{
    Device, DeviceChoice, DeviceKind, HostKernels, OpenOptions, Placement, SharedRegion, SharedWords, SlabPlan, Tenant,
    TenantLimits,
};

use crate::backend::{LaneMaker, lane_image};
use crate::behaviour::Behaviour;
use crate::cpu::host_kernels;
use crate::error::ActorError;
use crate::layout::{Address, EXECUTORS_MAX, HOST_BELL_AT};
use crate::message::Message;
use crate::runtime::executor::ExecutorShared;
use crate::runtime::port::PortShared;
use crate::runtime::replies::DeadLetterBox;
use crate::runtime::room::Rooms;
use crate::sync::Ordering;

pub use crate::runtime::actor::{Actor, ActorTelemetry, Pending, SEND_MAX};
pub use crate::runtime::executor::{Executor, ExecutorOptions, RESTART_WINDOW};
pub use crate::runtime::port::{Port, UNREAD_MAX};
pub use crate::runtime::replies::DEAD_LETTERS_MAX;

/// The region of the device's slab that rings lie in.
pub const REGION: &str = "actors";

/// What a runtime takes for rings unless told otherwise: a hundred lanes of the default size.
const REGION_BYTES: u64 = 64 << 20;

/// Kernels that stay, of one runtime: as many as a device has words for.
const RESIDENTS_MAX: usize = 64;

/// How to make a runtime.
pub struct Builder {
    choice: DeviceChoice,
    placement: Placement,
    region_bytes: u64,
    host: HostKernels,
    device: Option<Device>,
    lanes: LaneMaker,
}

impl Builder {
    /// On which device; unless said otherwise, CUDA where there is a driver and the CPU where there is none.
    pub fn device(self, choice: DeviceChoice) -> Builder {
        Builder { choice, ..self }
    }

    /// Where its worker runs; unless said otherwise, in a thread of this process. A process gives its
    /// [`tensor_wasm_gpu::worker_main`] what [`host_kernels`] returns.
    pub fn placement(self, placement: Placement) -> Builder {
        Builder { placement, ..self }
    }

    /// How much memory there is for rings.
    pub fn region_bytes(self, region_bytes: u64) -> Builder {
        Builder { region_bytes, ..self }
    }

    /// What runs kernels that are no lanes, on a CPU.
    pub fn host(self, host: HostKernels) -> Builder {
        Builder { host, ..self }
    }

    /// A device that is open. It has a region called [`REGION`], which is this runtime's alone, and its kernels are run
    /// by [`host_kernels`].
    pub fn on(self, device: Device) -> Builder {
        Builder { device: Some(device), ..self }
    }

    /// Lanes of another kind than the device's own.
    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn lanes(self, lanes: LaneMaker) -> Builder {
        Builder { lanes, ..self }
    }

    pub fn build(self) -> Result<Runtime, ActorError> {
        let open = || {
            let regions = vec![(REGION.to_owned(), self.region_bytes)];
            let memory = SlabPlan { staging_bytes: 2 << 20, pinned_bytes: 0, regions };
            let (choice, placement) = (self.choice, self.placement.clone());
            let host = host_kernels(self.host.clone());
            Device::open(&OpenOptions { choice, placement, memory, host, ..OpenOptions::default() })
        };
        let device = self.device.clone().map_or_else(open, Ok)?;
        let limits = TenantLimits { residents_max: RESIDENTS_MAX, ..TenantLimits::default() };
        let tenant = device.tenant(REGION, limits)?;
        let inner = Arc::new(Inner {
            lease: Mutex::new(Lease::of(&device)?),
            lanes: self.lanes,
            device,
            tenant,
            executors: RwLock::default(),
            numbers: Mutex::new(0),
            ports: RwLock::default(),
            last_port: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            dead: Mutex::default(),
            unclaimed: AtomicU64::new(0),
            faulted: Mutex::default(),
            is_closed: AtomicBool::new(false),
            thread: OnceLock::new(),
        });
        let thread = replies::start(&inner)?;
        // Its handles are for calls and for what needs no answer.
        let port = Arc::new(Inner::open_port(&inner, false)?);
        Ok(Runtime { inner, port, thread: Some(thread) })
    }
}

/// Actors on a device. Dropping it ends all of them.
pub struct Runtime {
    inner: Arc<Inner>,
    /// What actors are sent messages by unless somebody has a port of their own.
    port: Arc<Port>,
    thread: Option<JoinHandle<()>>,
}

/// What of the device's memory is this runtime's, with the worker of the moment.
struct Lease {
    /// Which worker.
    worker: u32,
    region: SharedRegion,
    bell: SharedWords,
    rooms: Rooms,
}

impl Lease {
    fn of(device: &Device) -> Result<Lease, ActorError> {
        let worker = device.restarts();
        let none = || ActorError::Unsupported { what: format!("a device without a region {REGION:?}") };
        let region = device.region(REGION).ok_or_else(none)?;
        let bell = region.words(HOST_BELL_AT, 1).ok_or_else(none)?;
        let rooms = Rooms::new(region.len());
        Ok(Lease { worker, region, bell, rooms })
    }
}

pub(crate) struct Inner {
    lanes: LaneMaker,
    device: Device,
    tenant: Tenant,
    lease: Mutex<Lease>,
    executors: RwLock<Vec<Arc<ExecutorShared>>>,
    /// The number of the executor that was started last.
    numbers: Mutex<u32>,
    ports: RwLock<HashMap<u32, Arc<PortShared>, foldhash::fast::FixedState>>,
    last_port: AtomicU64,
    /// Threads and tasks that wait for replies without looking themselves.
    waiters: AtomicUsize,
    dead: Mutex<DeadLetterBox>,
    unclaimed: AtomicU64,
    /// Actors of which somebody was told that they have faulted.
    faulted: Mutex<Vec<Address>>,
    is_closed: AtomicBool,
    thread: OnceLock<std::thread::Thread>,
}

impl Runtime {
    pub fn builder() -> Builder {
        Builder {
            choice: DeviceChoice::Auto,
            placement: Placement::Thread,
            region_bytes: REGION_BYTES,
            host: HostKernels::default(),
            device: None,
            lanes: lane_image,
        }
    }

    /// Starts an executor: actors of one behaviour, all of them activated.
    pub fn launch(&self, name: &str, behaviour: Behaviour, options: &ExecutorOptions) -> Result<Executor, ActorError> {
        Executor::launch(&self.inner, &self.port, name, behaviour, options)
    }

    /// A port of one's own. Messages of one port to one actor are handled in the order in which it sent them.
    pub fn port(&self) -> Result<Port, ActorError> {
        Inner::open_port(&self.inner, true)
    }

    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    pub fn kind(&self) -> DeviceKind {
        self.inner.device.kind()
    }

    /// Takes what came back that no port had sent, or whose port is gone: at most the last [`DEAD_LETTERS_MAX`].
    pub fn dead_letters(&self) -> Vec<Message> {
        self.inner.drain_all();
        self.inner.dead.lock().take()
    }

    /// How many messages have come back, to whomever.
    pub fn dead_letters_total(&self) -> u64 {
        self.inner.dead.lock().total
    }

    /// Answers that came for ports that were closed.
    pub fn unclaimed_total(&self) -> u64 {
        self.inner.unclaimed.load(Ordering::Relaxed)
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.inner.is_closed.store(true, Ordering::Release);
        let executors: Vec<Arc<ExecutorShared>> = std::mem::take(&mut *self.inner.executors.write());
        // All are told before the first is waited for.
        executors.iter().for_each(|executor| executor.tell_to_end());
        executors.iter().for_each(|executor| executor.end(&self.inner));
        self.inner.wake_thread();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn find(&self, executor: u32) -> Option<Arc<ExecutorShared>> {
        self.executors.read().iter().find(|own| own.shape().executor == executor).cloned()
    }

    /// A number for an executor that no other has, and that none had for as long as possible: an address that somebody
    /// kept is not soon another's.
    fn take_number(&self) -> Result<u32, ActorError> {
        let mut last = self.numbers.lock();
        let max = u32::try_from(EXECUTORS_MAX).unwrap_or(u32::MAX);
        let free = (0..max).map(|n| (*last + n) % max + 1).find(|number| self.find(*number).is_none());
        *last = free.ok_or(ActorError::TooMany { what: "executors", max: EXECUTORS_MAX })?;
        Ok(*last)
    }

    fn wake_thread(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
        tensor_wasm_gpu::Bell::of(&self.lease.lock().bell[0]).ring();
    }
}
