//! The CPU as a device: the same jobs over memory of the worker's process. Short jobs are done by the worker itself;
//! long ones, kernels, and what comes after them on the same stream, by a thread of that stream, so that one tenant's large
//! copy does not hold up another's small one.

mod modules;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use parking_lot::Mutex;

use self::modules::Modules;
use super::Backend;
use super::lane::{Lane, uploaded};
use crate::error::DeviceError;
use crate::info::{DeviceInfo, DeviceKind};
use crate::queue::job::{Answer, Job, Sent};
use crate::slab::{PAYLOAD_BYTES_MAX, SEATS, Slab};
use crate::worker::host::{HostKernels, HostLaunch, HostMemory, HostModule};

/// Copies up to this are done at once: handing one over takes longer.
const INLINE_BYTES_MAX: u64 = 64 << 10;

/// What a group may have: as much as on any GPU.
const GROUP_ITEMS_MAX: u32 = 1024;
const GROUP_SHARED_BYTES_MAX: u32 = 48 << 10;

pub(crate) struct CpuBackend {
    slab: Arc<Slab>,
    memory: Arc<HostMemory>,
    streams: Vec<StreamState>,
    modules: Arc<Modules>,
    lanes: HashMap<usize, Lane>,
    /// By address: size, and the stream it belongs to.
    reserved: HashMap<u64, (u64, usize)>,
    /// By their numbers, with the streams they belong to.
    graphs: HashMap<u32, (usize, Vec<Step>)>,
    next_graph: u32,
}

#[derive(Default)]
struct StreamState {
    is_open: bool,
    memory_bytes_max: u64,
    memory_bytes: u64,
    /// The stream's thread, from its first long job on.
    thread: Option<Sender<Task>>,
    /// Tasks handed to it and not done.
    handed: Arc<AtomicUsize>,
    recording: Option<Vec<Step>>,
}

/// A piece of work on memory, with host addresses.
#[derive(Clone)]
enum Step {
    Copy {
        from: usize,
        to: usize,
        bytes: usize,
    },
    Fill {
        to: usize,
        bytes: usize,
        value: u8,
    },
    /// Of the stream that it belonged to.
    Free {
        address: u64,
        owner: usize,
        kernels: HostKernels,
    },
    Launch(Arc<Launch>),
}

struct Launch {
    module: Arc<dyn HostModule>,
    kernel: String,
    groups: [u32; 3],
    items: [u32; 3],
    params: Vec<u8>,
}

enum Task {
    Step(Step),
    Flag(u32),
    Ring,
}

impl Step {
    /// What decides whether it is done at once. A kernel may take as long as it is allowed to.
    fn bytes(&self) -> u64 {
        match self {
            Step::Copy { bytes, .. } | Step::Fill { bytes, .. } => *bytes as u64,
            Step::Free { .. } => 0,
            Step::Launch(_) => u64::MAX,
        }
    }

    fn run(&self, memory: &Arc<HostMemory>) {
        match self {
            // SAFETY: the server checked both ranges against live buffers or the slab before sending the job, and keeps them
            // until its flag is set; a copy within one buffer may overlap, which `copy` allows.
            Step::Copy { from, to, bytes } => unsafe {
                std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes);
            },
            // SAFETY: as above.
            Step::Fill { to, bytes, value } => unsafe { std::ptr::write_bytes(*to as *mut u8, *value, *bytes) },
            Step::Free { address, owner, kernels } => {
                memory.release(*address);
                if let Some(code) = &kernels.0 {
                    code.forget(*owner);
                }
            }
            Step::Launch(launch) => {
                let Launch { module, kernel, groups, items, params } = &**launch;
                module.launch(&HostLaunch { kernel, groups: *groups, items: *items, params, memory });
            }
        }
    }
}

impl CpuBackend {
    pub(crate) fn new(slab: Arc<Slab>, kernels: HostKernels) -> CpuBackend {
        let streams: Vec<StreamState> = (0..SEATS).map(|_| StreamState::default()).collect();
        let memory = Arc::new(HostMemory::new(slab.clone()));
        let modules = Arc::new(Modules { kernels, table: Mutex::default() });
        let (lanes, reserved, graphs) = (HashMap::new(), HashMap::new(), HashMap::new());
        let mut backend = CpuBackend { slab, memory, streams, modules, lanes, reserved, graphs, next_graph: 0 };
        backend.streams[crate::queue::link::CONTROL].is_open = true;
        backend
    }

    /// Hands a task to the stream's thread. Where none can be started, the worker does it.
    fn hand(&mut self, stream: usize, task: Task) {
        let (slab, memory) = (&self.slab, &self.memory);
        let own = &mut self.streams[stream];
        if own.thread.is_none() {
            let (sender, tasks) = channel::<Task>();
            let (slab, memory, handed) = (slab.clone(), memory.clone(), own.handed.clone());
            let run = move || {
                for task in tasks {
                    task.run(&slab, &memory, stream);
                    handed.fetch_sub(1, Ordering::Release);
                }
            };
            let spawned = std::thread::Builder::new().name(format!("cpu-stream-{stream}")).spawn(run);
            own.thread = spawned.is_ok().then_some(sender);
        }
        match &own.thread {
            Some(thread) => {
                own.handed.fetch_add(1, Ordering::Relaxed);
                // It ends only when this sender does.
                let _ = thread.send(task);
            }
            None => task.run(slab, memory, stream),
        }
    }

    fn is_quiet(&self, stream: usize) -> bool {
        self.streams[stream].handed.load(Ordering::Acquire) == 0
    }

    fn step(&mut self, stream: usize, step: Step) -> Result<Answer, DeviceError> {
        if let Some(recording) = &mut self.streams[stream].recording {
            recording.push(step);
            return Ok(Answer::default());
        }
        match step.bytes() <= INLINE_BYTES_MAX && self.is_quiet(stream) {
            true => step.run(&self.memory),
            false => self.hand(stream, Task::Step(step)),
        }
        Ok(Answer::default())
    }

    fn slab_range(&self, offset: u64, bytes: u64) -> Result<usize, DeviceError> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.slab.len() as u64);
        match end {
            Some(_) => Ok(self.slab.address(offset) as usize),
            None => Err(DeviceError::OutOfRange { offset, len: bytes, size: self.slab.len() as u64 }),
        }
    }

    fn reserve(&mut self, stream: u32, bytes: u64) -> Result<Answer, DeviceError> {
        let out_of_memory = || DeviceError::OutOfMemory { asked_bytes: bytes };
        let own = self.streams.get_mut(stream as usize).ok_or_else(unknown)?;
        let after = own.memory_bytes.checked_add(bytes).filter(|after| *after <= own.memory_bytes_max);
        let after = after.ok_or_else(out_of_memory)?;
        let address = self.memory.reserve(bytes).ok_or_else(out_of_memory)?;
        own.memory_bytes = after;
        self.reserved.insert(address, (bytes, stream as usize));
        Ok(Answer { values: [address, 0, 0, 0, 0, 0] })
    }

    /// Gives memory back once everything before on the stream is done.
    fn free(&mut self, stream: usize, owner: usize, address: u64) -> Result<Answer, DeviceError> {
        let kernels = self.modules.kernels.clone();
        self.step(stream, Step::Free { address, owner, kernels })
    }
}

impl Task {
    fn run(&self, slab: &Slab, memory: &Arc<HostMemory>, stream: usize) {
        match self {
            Task::Step(step) => step.run(memory),
            Task::Flag(number) => set_flag(slab, stream, *number),
            Task::Ring => slab.done_bell().ring(),
        }
    }
}

fn set_flag(slab: &Slab, stream: usize, number: u32) {
    slab.flag(stream).store(number, Ordering::Release);
    slab.done_bell().ring();
}

fn unknown() -> DeviceError {
    DeviceError::Refused { why: "the worker does not know what the job is about".to_owned() }
}

fn no_kernels() -> DeviceError {
    DeviceError::Unsupported { what: "running kernels".to_owned() }
}

impl Backend for CpuBackend {
    fn info(&self) -> DeviceInfo {
        let (total, free) = memory();
        DeviceInfo {
            kind: DeviceKind::Cpu,
            name: "CPU".to_owned(),
            multiprocessors: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
            memory_total_bytes: total,
            memory_free_bytes: free,
            threads_per_block_max: GROUP_ITEMS_MAX,
            shared_bytes_per_block_max: GROUP_SHARED_BYTES_MAX,
            slab_address: self.slab.address(0) as u64,
            ..DeviceInfo::default()
        }
    }

    fn execute(&mut self, stream: usize, job: Job, payload: &[u8], cell: u32) -> Result<Answer, DeviceError> {
        if !self.streams[stream].is_open {
            return Err(unknown());
        }
        let len = |bytes: u64| usize::try_from(bytes).map_err(|_| DeviceError::OutOfMemory { asked_bytes: bytes });
        match job {
            Job::OpenStream { stream, memory_bytes_max, .. } => {
                let own = self.streams.get_mut(stream as usize).ok_or_else(unknown)?;
                own.is_open = true;
                own.memory_bytes_max = memory_bytes_max;
                Ok(Answer::default())
            }
            Job::CloseStream { stream } => {
                let own = self.streams.get_mut(stream as usize).ok_or_else(unknown)?;
                own.is_open = false;
                own.recording = None;
                own.thread = None;
                self.lanes.remove(&(SEATS + stream as usize));
                Ok(Answer::default())
            }
            Job::Clear => {
                let own = self.reserved.extract_if(|_, (_, owner)| *owner == stream);
                let own: Vec<u64> = own.map(|(address, _)| address).collect();
                self.streams[stream].memory_bytes = 0;
                self.graphs.retain(|_, (owner, _)| *owner != stream);
                for address in own {
                    self.free(stream, stream, address)?;
                }
                Ok(Answer::default())
            }
            Job::Reserve { stream, bytes } => self.reserve(stream, bytes),
            Job::Release { stream: owner, address, bytes } => {
                if self.reserved.remove(&address) != Some((bytes, owner as usize)) {
                    return Err(unknown());
                }
                if let Some(own) = self.streams.get_mut(owner as usize) {
                    own.memory_bytes -= bytes;
                }
                self.free(stream, owner as usize, address)
            }
            Job::Fill { address, bytes, value } => {
                self.step(stream, Step::Fill { to: address as usize, bytes: len(bytes)?, value })
            }
            Job::Write { from_offset, to_address, bytes } => {
                let from = self.slab_range(from_offset, bytes)?;
                self.step(stream, Step::Copy { from, to: to_address as usize, bytes: len(bytes)? })
            }
            Job::Read { from_address, to_offset, bytes } => {
                let to = self.slab_range(to_offset, bytes)?;
                self.step(stream, Step::Copy { from: from_address as usize, to, bytes: len(bytes)? })
            }
            Job::WriteInline { to_address } => {
                let from = self.slab.address(Slab::payload_offset(cell)) as usize;
                self.step(stream, Step::Copy { from, to: to_address as usize, bytes: payload.len() })
            }
            Job::ReadInline { from_address, bytes } => {
                let to = self.slab.address(Slab::payload_offset(cell)) as usize;
                let bytes = len(bytes)?.min(PAYLOAD_BYTES_MAX);
                self.step(stream, Step::Copy { from: from_address as usize, to, bytes })
            }
            Job::Copy { from_address, to_address, bytes } => {
                let (from, to) = (from_address as usize, to_address as usize);
                self.step(stream, Step::Copy { from, to, bytes: len(bytes)? })
            }
            Job::GraphBegin => match self.streams[stream].recording.replace(Vec::new()) {
                None => Ok(Answer::default()),
                Some(_) => Err(DeviceError::BadLaunch { why: "a graph is being recorded already".to_owned() }),
            },
            Job::GraphEnd => {
                let recorded = self.streams[stream].recording.take();
                let Some(steps) = recorded else {
                    return Err(DeviceError::BadLaunch { why: "no graph is being recorded".to_owned() });
                };
                let graph = self.next_graph;
                self.next_graph = graph.wrapping_add(1);
                self.graphs.insert(graph, (stream, steps));
                Ok(Answer { values: [u64::from(graph), 0, 0, 0, 0, 0] })
            }
            Job::Replay { graph } => {
                let (_, steps) = self.graphs.get(&graph).filter(|(owner, _)| *owner == stream).ok_or_else(unknown)?;
                let steps = steps.clone();
                steps.into_iter().try_for_each(|step| self.step(stream, step).map(drop))?;
                Ok(Answer::default())
            }
            Job::ForgetGraph { graph } => self.graphs.remove(&graph).map(|_| Answer::default()).ok_or_else(unknown),
            Job::Upload { lane, offset, bytes } => {
                let image = uploaded(&self.slab, offset, bytes, 0).ok_or_else(unknown)?;
                let mut table = self.modules.table.lock();
                let number = table.number();
                table.images.insert(number, (lane as usize, image));
                Ok(Answer { values: [u64::from(number), 0, 0, 0, 0, 0] })
            }
            Job::Launch { kernel, grid, block, .. } => {
                let (module, kernel) = self.modules.kernel(SEATS + stream, kernel).ok_or_else(unknown)?;
                let launch = Launch { module, kernel, groups: grid, items: block, params: payload.to_vec() };
                self.step(stream, Step::Launch(Arc::new(launch)))
            }
            Job::Load { .. } | Job::ForgetImage { .. } | Job::Unload { .. } | Job::Kernel { .. } => Err(unknown()),
        }
    }

    fn in_lane(&mut self, sent: Sent, payload: &[u8], cell: u32) {
        let start = || Lane::start(sent.stream, self.modules.clone(), self.slab.clone());
        let lane = self.lanes.entry(sent.stream).or_insert_with(start);
        lane.hand(sent, payload, cell);
    }

    fn flag(&mut self, stream: usize, number: u32) -> Result<(), DeviceError> {
        match self.is_quiet(stream) {
            true => set_flag(&self.slab, stream, number),
            false => self.hand(stream, Task::Flag(number)),
        }
        Ok(())
    }

    fn prioritize(&mut self, _stream: usize, _low: bool) -> Result<(), DeviceError> {
        // The operating system shares out the CPU among the streams' threads.
        Ok(())
    }

    fn notify(&mut self, stream: usize) -> Result<(), DeviceError> {
        // A lane rings the bell itself.
        match stream >= SEATS || self.is_quiet(stream) {
            true => self.slab.done_bell().ring(),
            false => self.hand(stream, Task::Ring),
        }
        Ok(())
    }
}

impl Drop for CpuBackend {
    fn drop(&mut self) {
        // What streams still work on must be done before their memory goes.
        while (0..SEATS).any(|stream| !self.is_quiet(stream)) {
            std::thread::yield_now();
        }
    }
}

/// The machine's memory, total and available.
fn memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let find = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
    };
    (find("MemTotal:").unwrap_or(0), find("MemAvailable:").unwrap_or(0))
}
