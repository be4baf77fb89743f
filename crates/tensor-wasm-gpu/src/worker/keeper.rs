//! Starts a device's worker, watches it, and starts another when it is lost: when its process ended, when it says that
//! its device is broken, when it takes no jobs any more, or when a job does not end.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::choice::{DeviceChoice, DeviceKind, Unavailable};
use crate::device::{DeviceEvent, Inner, OpenOptions, Placement};
use crate::metrics::Metrics;
use crate::queue::link::Link;
use crate::slab::{Slab, WorkerState};
use crate::wait::{KEEPER_PERIOD, worker_spin};
use crate::worker::host::HostKernels;
use crate::worker::lifeline;
use crate::worker::{self, exit};

/// A worker must be ready within this; a CUDA context takes about a third of a second.
const START_MAX: Duration = Duration::from_secs(60);

/// Between two attempts to start a worker, doubled each time.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);

/// A worker that has just started, and the link to it.
struct Started {
    link: Arc<Link>,
    body: Body,
}

/// A device's first worker, and who watches it.
pub(crate) struct Opened {
    pub link: Arc<Link>,
    /// Why it is not the device that was wanted first.
    pub fallback: Option<Unavailable>,
    pub keeper: Keeper,
}

enum Body {
    Thread,
    Process(Child),
}

impl Body {
    fn end(&mut self) {
        if let Body::Process(child) = self {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// What became of it, if it is over.
    fn over(&mut self) -> Option<String> {
        match self {
            Body::Thread => None,
            Body::Process(child) => match child.try_wait() {
                Ok(None) => None,
                Ok(Some(status)) => Some(format!("the worker process ended: {status}")),
                Err(error) => Some(format!("the worker process cannot be watched: {error}")),
            },
        }
    }
}

/// Starts a worker and waits until it is ready.
fn start(
    options: &OpenOptions,
    choice: DeviceChoice,
    worker: u32,
    metrics: &Arc<Metrics>,
) -> Result<Started, Unavailable> {
    let slab = Arc::new(Slab::create(&options.memory).map_err(|why| Unavailable::Memory { why })?);
    let mut body = match &options.placement {
        Placement::Thread => {
            let own = slab.clone();
            let host = options.host.clone();
            let run = move || serve(&own, choice, host);
            let spawned = std::thread::Builder::new().name("device-worker".to_owned()).spawn(run);
            let thread = spawned.map_err(|e| Unavailable::Worker { why: e.to_string() })?;
            exit::end_before_exit(Arc::downgrade(&slab), thread);
            Body::Thread
        }
        Placement::Process { exe, args } => {
            let fd = slab.fd().as_raw_fd();
            let mut command = Command::new(exe);
            command.args(args).args(["--slab-fd", &fd.to_string(), "--device", &choice.to_string()]);
            // The lifeline: `Child` holds the write end, and lets go of it when it is waited for.
            command.stdin(Stdio::piped()).stdout(Stdio::null());
            // Only what CUDA looks at: a worker has no business with our secrets.
            command.env_clear();
            let passed = |(name, _): &(std::ffi::OsString, _)| {
                let name = name.to_string_lossy();
                ["CUDA", "NV", "LD_LIBRARY_PATH", "PATH", "HOME", "RUST_BACKTRACE"].iter().any(|p| name.starts_with(p))
            };
            // As many hardware queues as there can be: with the driver's eight, sixteen streams wait for each other.
            command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32").envs(std::env::vars_os().filter(passed));
            let keep = move || inherit(fd);
            // SAFETY: the closure makes one system call and allocates nothing, which is allowed between fork and exec.
            unsafe { command.pre_exec(keep) };
            let child = command.spawn();
            Body::Process(child.map_err(|e| Unavailable::Worker { why: format!("{}: {e}", exe.display()) })?)
        }
    };
    let until = Instant::now() + START_MAX;
    loop {
        match slab.state() {
            WorkerState::Ready => break,
            WorkerState::Failed | WorkerState::Lost => {
                body.end();
                return Err(crate::info::unavailable(&slab));
            }
            WorkerState::Starting => {}
        }
        if let Some(why) = body.over() {
            return Err(Unavailable::Worker { why });
        }
        if Instant::now() > until {
            body.end();
            return Err(Unavailable::Worker { why: format!("it was not ready after {START_MAX:?}") });
        }
        slab.done_bell().park_unless(|| slab.state() != WorkerState::Starting, Some(KEEPER_PERIOD));
    }
    Ok(Started { link: Link::new(slab, worker, metrics.clone()), body })
}

/// Lets the child keep a descriptor that would be closed when it becomes the worker.
fn inherit(fd: RawFd) -> std::io::Result<()> {
    // SAFETY: the descriptor is open: it is the slab's, which the parent holds while it spawns.
    let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) };
    rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
    Ok(())
}

/// Opens the device and runs jobs; what a worker does, wherever it is.
fn serve(slab: &Arc<Slab>, choice: DeviceChoice, host: HostKernels) {
    match crate::backend::open(slab, choice, host) {
        Ok(mut backend) => {
            let info = backend.info();
            if info.kind == DeviceKind::Cuda {
                exit::loaded_a_library();
            }
            crate::info::put(slab, &info);
            worker::run(slab, &mut *backend, worker_spin(info.kind));
        }
        Err(why) => {
            crate::info::put_unavailable(slab, &why);
            slab.set_state(WorkerState::Failed);
            slab.done_bell().ring();
        }
    }
}

/// The `main` of a worker process, with the arguments that [`Placement::Process`] appends and what runs kernels on a
/// CPU.
pub fn worker_main(slab_fd: i32, choice: DeviceChoice, host: HostKernels) -> ExitCode {
    if let Err(error) = lifeline::end_with_server() {
        tracing::error!(%error, "the device worker cannot watch its server, and so does not start");
        return ExitCode::from(2);
    }
    if let Err(error) = renounce() {
        tracing::warn!(%error, "the device worker keeps privileges it does not need");
    }
    if slab_fd < 3 {
        return ExitCode::from(2);
    }
    // SAFETY: the parent passed this descriptor for us alone; nothing else in this process has it.
    let fd = unsafe { OwnedFd::from_raw_fd(slab_fd) };
    let slab = match Slab::open(fd) {
        Ok(slab) => Arc::new(slab),
        Err(why) => {
            tracing::error!(why, "this is not how a device worker is started");
            return ExitCode::from(2);
        }
    };
    serve(&slab, choice, host);
    match slab.state() {
        WorkerState::Ready => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Never gains privileges, leaves no core file of tenants' memory, and gives up its capabilities.
fn renounce() -> rustix::io::Result<()> {
    use rustix::process::{Resource, Rlimit};
    use rustix::thread::{CapabilitySet, CapabilitySets};
    rustix::thread::set_no_new_privs(true)?;
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    // Registering memory with a device may need to lock more of it than a limit allows.
    let locking = CapabilitySet::IPC_LOCK;
    let kept = rustix::thread::capabilities(None)?.permitted & locking;
    rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() },
    )
}

/// Opens a device, on the thread that watches its worker from then on.
pub(crate) fn open(options: &OpenOptions, metrics: &Arc<Metrics>) -> Result<Opened, Unavailable> {
    let (tell, opened) = channel();
    let (give, device) = channel();
    let (options, metrics) = (options.clone(), metrics.clone());
    let keep = move || {
        let mut fallback = None;
        let mut started = None;
        for choice in options.choice.candidates() {
            match start(&options, choice, 0, &metrics) {
                Ok(first) => {
                    started = Some((first, choice));
                    break;
                }
                Err(why) => fallback = fallback.or(Some(why)),
            }
        }
        let Some((Started { link, body }, choice)) = started else {
            let none = || Unavailable::Worker { why: "no device is known".to_owned() };
            return drop(tell.send(Err(fallback.unwrap_or_else(none))));
        };
        let body = Arc::new(Mutex::new(body));
        drop(tell.send(Ok((link, fallback, body.clone()))));
        match device.recv() {
            Ok(device) => Watch { options, choice, metrics, device, body }.run(),
            Err(_) => body.lock().end(),
        }
    };
    let spawned = std::thread::Builder::new().name("device-keeper".to_owned()).spawn(keep);
    let thread = spawned.map_err(|e| Unavailable::Worker { why: e.to_string() })?;
    let ended = |_| Unavailable::Worker { why: "the thread that starts it ended".to_owned() };
    let (link, fallback, body) = opened.recv().map_err(ended)??;
    Ok(Opened { link, fallback, keeper: Keeper { thread, give, body } })
}

/// Watches a device's worker for as long as the device is open.
pub(crate) struct Keeper {
    thread: JoinHandle<()>,
    give: Sender<Weak<Inner>>,
    body: Arc<Mutex<Body>>,
}

impl Keeper {
    pub(crate) fn watch(&self, device: Weak<Inner>) {
        let _ = self.give.send(device);
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        match &*self.body.lock() {
            Body::Thread => None,
            Body::Process(child) => Some(child.id()),
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // The device is gone, which the thread sees when it looks next; the process need not wait for that.
        self.body.lock().end();
        self.thread.thread().unpark();
    }
}

struct Watch {
    options: OpenOptions,
    choice: DeviceChoice,
    metrics: Arc<Metrics>,
    device: Weak<Inner>,
    body: Arc<Mutex<Body>>,
}

impl Watch {
    fn run(&self) {
        let mut beat = (0, Instant::now());
        loop {
            std::thread::park_timeout(KEEPER_PERIOD);
            let Some(device) = self.device.upgrade() else { return };
            device.reap();
            let link = device.link();
            if let Some(why) = self.trouble(&link, &mut beat) {
                link.lose(&why);
            }
            let Some(lost) = link.lost() else { continue };
            let began = Instant::now();
            self.metrics.device_lost.inc();
            self.body.lock().end();
            let worker = link.worker.wrapping_add(1);
            // Whoever has the device must be able to let go of it while this goes on.
            drop((link, device));
            self.options.events.tell(DeviceEvent::Lost { why: lost.to_string() });
            if !self.restart(worker) {
                return;
            }
            beat = (0, Instant::now());
            self.options.events.tell(DeviceEvent::Restored { after: began.elapsed() });
        }
    }

    /// Starts another worker, as often as it takes. False if the device was closed meanwhile.
    fn restart(&self, worker: u32) -> bool {
        let mut pause = RETRY_MIN;
        loop {
            let started = start(&self.options, self.choice, worker, &self.metrics);
            let Some(device) = self.device.upgrade() else {
                if let Ok(Started { mut body, .. }) = started {
                    body.end();
                }
                return false;
            };
            match started {
                Ok(Started { link, body }) => {
                    *self.body.lock() = body;
                    device.replace(link);
                    return true;
                }
                Err(error) => {
                    tracing::error!(%error, "the device worker cannot be started again; trying on");
                    drop(device);
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(RETRY_MAX);
                }
            }
        }
    }

    /// What is wrong with the worker, if anything.
    fn trouble(&self, link: &Link, beat: &mut (u64, Instant)) -> Option<String> {
        if let Some(over) = self.body.lock().over() {
            return Some(over);
        }
        if link.slab.state() == WorkerState::Lost {
            return Some(crate::info::reason(&link.slab));
        }
        let now = link.slab.heartbeat().load(Ordering::Relaxed);
        if now != beat.0 || link.slab.ring().is_empty() {
            *beat = (now, Instant::now());
        } else if beat.1.elapsed() > self.options.hang {
            return Some(format!("the worker has taken no job for {:?}", self.options.hang));
        }
        let limits = (self.options.job_max, self.options.beat_max, self.options.stop_max);
        if let Some(why) = link.silent_resident(limits.0, limits.1, limits.2) {
            return Some(why);
        }
        let oldest = link.oldest()?;
        (oldest > self.options.job_max).then(|| format!("a job was not done after {:?}", self.options.job_max))
    }
}
