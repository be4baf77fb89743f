//! A stream of the CPU device. Short operations are done by the worker itself; long ones, kernels, and what comes after
//! them, by a thread of the stream, so that one tenant's large copy does not hold up another's small one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use super::memory::HostMemory;
use super::modules::CpuKernel;
use super::recording::Recording;
use crate::backend::execute::LaunchShape;
use crate::error::DeviceError;
use crate::slab::Slab;
use crate::worker::host::{HostKernels, HostLaunch};

/// Copies up to this are done at once: handing one over takes longer.
const INLINE_BYTES_MAX: usize = 64 << 10;

#[derive(Default)]
pub(super) struct CpuStream {
    pub is_open: bool,
    /// The first stream of its tenant.
    pub owner: usize,
    pub memory_bytes_max: u64,
    pub memory_bytes: u64,
    /// The graph that is being recorded.
    pub recording: Option<Recording>,
    /// The stream's thread, from its first long operation on.
    thread: Option<Sender<StreamTask>>,
    /// Tasks handed to it and not done.
    handed: Arc<AtomicUsize>,
}

/// An operation on memory, with addresses of this process.
#[derive(Clone)]
pub(super) enum StreamOp {
    Copy {
        from: u64,
        to: u64,
        bytes: usize,
    },
    Fill {
        to: u64,
        bytes: usize,
        value: u8,
    },
    /// Of the stream that it belonged to.
    Free {
        address: u64,
        owner: usize,
        kernels: HostKernels,
    },
    Launch(Arc<StreamLaunch>),
}

pub(super) struct StreamLaunch {
    pub kernel: Arc<CpuKernel>,
    pub shape: LaunchShape,
    pub params: Vec<u8>,
}

enum StreamTask {
    Op(StreamOp),
    Flag(u32),
    Ring,
    /// Lets another stream go on that waits for this one.
    Open(Arc<OnceLock<()>>),
    Await(Arc<OnceLock<()>>),
}

impl StreamOp {
    /// Whether the worker does it itself. A kernel may take as long as it is allowed to.
    fn is_short(&self) -> bool {
        match self {
            StreamOp::Copy { bytes, .. } | StreamOp::Fill { bytes, .. } => *bytes <= INLINE_BYTES_MAX,
            StreamOp::Free { .. } => true,
            StreamOp::Launch(_) => false,
        }
    }

    fn run(&self, memory: &Arc<HostMemory>) {
        match self {
            // SAFETY: the server checked both ranges against live buffers or the slab before sending the job, and
            // keeps them until its flag is set; a copy within one buffer may overlap, which `copy` allows.
            StreamOp::Copy { from, to, bytes } => unsafe {
                std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes);
            },
            // SAFETY: as above.
            StreamOp::Fill { to, bytes, value } => unsafe { std::ptr::write_bytes(*to as *mut u8, *value, *bytes) },
            StreamOp::Free { address, owner, kernels } => {
                memory.release(*address);
                if let Some(code) = &kernels.0 {
                    code.forget(*owner);
                }
            }
            StreamOp::Launch(launch) => {
                let StreamLaunch { kernel, shape, params } = &**launch;
                kernel.module.launch(&HostLaunch {
                    kernel: &kernel.name,
                    groups: shape.grid,
                    items: shape.block,
                    params,
                    memory,
                });
            }
        }
    }
}

impl StreamTask {
    fn run(&self, slab: &Slab, memory: &Arc<HostMemory>, stream: usize) {
        match self {
            StreamTask::Op(op) => op.run(memory),
            StreamTask::Flag(number) => {
                slab.flag(stream).store(*number, Ordering::Release);
                slab.done_bell().ring();
            }
            StreamTask::Ring => slab.done_bell().ring(),
            StreamTask::Open(latch) => drop(latch.set(())),
            StreamTask::Await(latch) => {
                latch.wait();
            }
        }
    }
}

impl CpuStream {
    /// Whether its thread has nothing to do.
    pub(super) fn is_quiet(&self) -> bool {
        self.handed.load(Ordering::Acquire) == 0
    }

    /// Ends the stream's thread once it has done what it was handed.
    pub(super) fn close(&mut self) {
        self.is_open = false;
        self.recording = None;
        self.thread = None;
    }

    /// Records an operation, does it, or has it done.
    pub(super) fn put(&mut self, own: usize, op: StreamOp, slab: &Arc<Slab>, memory: &Arc<HostMemory>) {
        if let Some(recording) = &mut self.recording {
            recording.put(op);
        } else if op.is_short() && self.is_quiet() {
            op.run(memory);
        } else {
            self.hand(own, StreamTask::Op(op), slab, memory);
        }
    }

    pub(super) fn flag(&mut self, own: usize, number: u32, slab: &Arc<Slab>, memory: &Arc<HostMemory>) {
        self.after_all(own, StreamTask::Flag(number), slab, memory);
    }

    pub(super) fn ring(&mut self, own: usize, slab: &Arc<Slab>, memory: &Arc<HostMemory>) {
        self.after_all(own, StreamTask::Ring, slab, memory);
    }

    /// What another stream waits for that is to begin after what this one was handed so far; none if that is done.
    pub(super) fn latch(
        &mut self,
        own: usize,
        slab: &Arc<Slab>,
        memory: &Arc<HostMemory>,
    ) -> Option<Arc<OnceLock<()>>> {
        if self.is_quiet() {
            return None;
        }
        let latch = Arc::new(OnceLock::new());
        self.hand(own, StreamTask::Open(latch.clone()), slab, memory);
        Some(latch)
    }

    /// Does what comes next once another stream has come to its latch.
    pub(super) fn wait_for(
        &mut self,
        own: usize,
        latch: Arc<OnceLock<()>>,
        slab: &Arc<Slab>,
        memory: &Arc<HostMemory>,
    ) {
        self.hand(own, StreamTask::Await(latch), slab, memory);
    }

    fn after_all(&mut self, own: usize, task: StreamTask, slab: &Arc<Slab>, memory: &Arc<HostMemory>) {
        if self.is_quiet() {
            task.run(slab, memory, own);
        } else {
            self.hand(own, task, slab, memory);
        }
    }

    /// Hands a task to the stream's thread. Where none can be started, the worker does it.
    fn hand(&mut self, own: usize, task: StreamTask, slab: &Arc<Slab>, memory: &Arc<HostMemory>) {
        if self.thread.is_none() {
            self.thread = start(own, self.handed.clone(), slab.clone(), memory.clone());
        }
        match &self.thread {
            Some(thread) => {
                self.handed.fetch_add(1, Ordering::Relaxed);
                // It ends only when this sender does.
                let _ = thread.send(task);
            }
            None => task.run(slab, memory, own),
        }
    }
}

fn start(own: usize, handed: Arc<AtomicUsize>, slab: Arc<Slab>, memory: Arc<HostMemory>) -> Option<Sender<StreamTask>> {
    let (sender, tasks) = channel::<StreamTask>();
    let run = move || {
        for task in tasks {
            let run = || task.run(&slab, &memory, own);
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
                let why = "what runs kernels on this CPU panicked".to_owned();
                return crate::worker::lost(&slab, &DeviceError::DeviceLost { why });
            }
            handed.fetch_sub(1, Ordering::Release);
        }
    };
    std::thread::Builder::new().name(format!("cpu-stream-{own}")).spawn(run).is_ok().then_some(sender)
}
