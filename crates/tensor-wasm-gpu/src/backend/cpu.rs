//! The CPU as a device: the same jobs over memory of the worker's process. Short jobs are done by the worker itself;
//! long ones, and what comes after them on the same stream, by a pool of threads, so that one tenant's large copy does not
//! hold up another's small one. A stream belongs to one thread of the pool, which keeps its order.

use std::alloc::Layout;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use super::Backend;
use crate::error::DeviceError;
use crate::info::{DeviceInfo, DeviceKind};
use crate::job::{Answer, Job, Sent};
use crate::slab::{PAYLOAD_BYTES_MAX, SEATS, Slab};

/// Copies up to this are done at once: handing one over takes longer.
const INLINE_BYTES_MAX: u64 = 64 << 10;

/// Threads for long jobs.
const THREADS_MAX: usize = 4;

const ALIGN: usize = 4096;

pub(crate) struct CpuBackend {
    slab: Arc<Slab>,
    threads: Vec<Sender<(usize, Task)>>,
    streams: Vec<StreamState>,
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
    /// Tasks handed to the pool and not done.
    handed: Arc<AtomicUsize>,
    recording: Option<Vec<Step>>,
}

/// A piece of work on memory, with host addresses.
#[derive(Debug, Clone, Copy)]
enum Step {
    Copy { from: usize, to: usize, bytes: usize },
    Fill { to: usize, bytes: usize, value: u8 },
    Free { address: usize, bytes: usize },
}

enum Task {
    Step(Step),
    Flag(u32),
    Ring,
}

impl Step {
    fn bytes(self) -> u64 {
        match self {
            Step::Copy { bytes, .. } | Step::Fill { bytes, .. } => bytes as u64,
            Step::Free { .. } => 0,
        }
    }

    fn run(self) {
        match self {
            // SAFETY: the server checked both ranges against live buffers or the slab before sending the job, and keeps them
            // until its flag is set; a copy within one buffer may overlap, which `copy` allows.
            Step::Copy { from, to, bytes } => unsafe {
                std::ptr::copy(from as *const u8, to as *mut u8, bytes);
            },
            // SAFETY: as above.
            Step::Fill { to, bytes, value } => unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes) },
            Step::Free { address, bytes } => {
                if let Ok(layout) = Layout::from_size_align(bytes, ALIGN) {
                    // SAFETY: `execute` takes this address and size out of `reserved` exactly once.
                    unsafe { std::alloc::dealloc(address as *mut u8, layout) }
                }
            }
        }
    }
}

impl CpuBackend {
    pub(crate) fn new(slab: Arc<Slab>) -> Result<CpuBackend, String> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let streams: Vec<StreamState> = (0..SEATS).map(|_| StreamState::default()).collect();
        let counts: Vec<Arc<AtomicUsize>> = streams.iter().map(|s| s.handed.clone()).collect();
        let threads = (0..cores.min(THREADS_MAX)).map(|n| {
            let (sender, tasks) = channel::<(usize, Task)>();
            let (slab, counts) = (slab.clone(), counts.clone());
            let thread = std::thread::Builder::new().name(format!("cpu-device-{n}"));
            let run = move || {
                for (stream, task) in tasks {
                    match task {
                        Task::Step(step) => step.run(),
                        Task::Flag(number) => set_flag(&slab, stream, number),
                        Task::Ring => slab.done_bell().ring(),
                    }
                    counts[stream].fetch_sub(1, Ordering::Release);
                }
            };
            thread.spawn(run).map(|_| sender).map_err(|e| format!("no thread can be started: {e}"))
        });
        let threads = threads.collect::<Result<_, _>>()?;
        let mut backend =
            CpuBackend { slab, threads, streams, reserved: HashMap::new(), graphs: HashMap::new(), next_graph: 0 };
        backend.streams[crate::link::CONTROL].is_open = true;
        Ok(backend)
    }

    /// Hands a task to the stream's thread.
    fn hand(&self, stream: usize, task: Task) {
        self.streams[stream].handed.fetch_add(1, Ordering::Relaxed);
        // The thread ends only with this backend.
        let _ = self.threads[stream % self.threads.len()].send((stream, task));
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
            true => step.run(),
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
        let out_of_memory = DeviceError::OutOfMemory { asked_bytes: bytes };
        let own = self.streams.get_mut(stream as usize).ok_or_else(unknown)?;
        let after = own.memory_bytes.checked_add(bytes).filter(|after| *after <= own.memory_bytes_max);
        let (Some(after), Ok(len)) = (after, usize::try_from(bytes)) else { return Err(out_of_memory) };
        let layout = Layout::from_size_align(len, ALIGN).map_err(|_| out_of_memory.clone())?;
        if len == 0 {
            return Err(out_of_memory);
        }
        // SAFETY: the layout's size is not zero.
        let address = unsafe { std::alloc::alloc(layout) } as u64;
        if address == 0 {
            return Err(out_of_memory);
        }
        own.memory_bytes = after;
        self.reserved.insert(address, (bytes, stream as usize));
        Ok(Answer { values: [address, 0, 0, 0, 0, 0] })
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
                Ok(Answer::default())
            }
            Job::Clear => {
                let own = self.reserved.extract_if(|_, (_, owner)| *owner == stream);
                let own: Vec<(u64, u64)> = own.map(|(address, (bytes, _))| (address, bytes)).collect();
                self.streams[stream].memory_bytes = 0;
                self.graphs.retain(|_, (owner, _)| *owner != stream);
                for (address, bytes) in own {
                    self.step(stream, Step::Free { address: address as usize, bytes: len(bytes)? })?;
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
                self.step(stream, Step::Free { address: address as usize, bytes: len(bytes)? })
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
            Job::Upload { .. }
            | Job::Load { .. }
            | Job::ForgetImage { .. }
            | Job::Unload { .. }
            | Job::Kernel { .. }
            | Job::Launch { .. } => Err(no_kernels()),
        }
    }

    fn in_lane(&mut self, sent: Sent, _payload: &[u8], cell: u32) {
        let answer = match sent.job {
            Job::Clear => Ok(Answer::default()),
            _ => Err(no_kernels()),
        };
        super::finish(&self.slab, &sent, cell, &answer);
    }

    fn flag(&mut self, stream: usize, number: u32) -> Result<(), DeviceError> {
        match self.is_quiet(stream) {
            true => set_flag(&self.slab, stream, number),
            false => self.hand(stream, Task::Flag(number)),
        }
        Ok(())
    }

    fn prioritize(&mut self, _stream: usize, _low: bool) -> Result<(), DeviceError> {
        // The kernel shares out the CPU among the pool's threads.
        Ok(())
    }

    fn notify(&mut self, stream: usize) -> Result<(), DeviceError> {
        // A lane has nothing under way: its jobs are done as they come.
        match stream >= SEATS || self.is_quiet(stream) {
            true => self.slab.done_bell().ring(),
            false => self.hand(stream, Task::Ring),
        }
        Ok(())
    }
}

impl Drop for CpuBackend {
    fn drop(&mut self) {
        // What the pool still works on must be done before its memory goes.
        while (0..SEATS).any(|stream| !self.is_quiet(stream)) {
            std::thread::yield_now();
        }
        for (address, (bytes, _)) in self.reserved.drain() {
            Step::Free { address: address as usize, bytes: bytes as usize }.run();
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
