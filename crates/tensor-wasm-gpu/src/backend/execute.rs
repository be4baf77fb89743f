//! From a job to a call of a backend: the one `match` over all jobs. What a number stands for, and whose it is, is
//! settled here; a backend gets streams that are open, kernels and graphs that exist, and pointers into the slab.

use std::sync::Arc;

use super::graphs::GraphTable;
use super::lane::Lanes;
use super::modules::{ModuleLoader, Modules};
use super::{Backend, no_stream, unknown};
use crate::error::DeviceError;
use crate::info::DeviceInfo;
use crate::queue::job::{Answer, Job, SentJob};
use crate::slab::{PAYLOAD_BYTES_MAX, RESIDENTS, STREAMS, Slab, is_lane, lane_of};

/// What a backend's folder has: the operations of its device. They are done at once or put on the stream `on`, in
/// order.
///
/// Device addresses were checked by the server against the tenant's live buffers, which stay reserved until the job is
/// done; pointers into the slab were checked here, and are the job's until its flag is set.
pub(super) trait DeviceOps {
    type Loader: ModuleLoader;
    type Graph;

    fn info(&self) -> DeviceInfo;

    /// Whether jobs may be put on a stream. The control stream always takes them.
    fn is_open(&self, stream: usize) -> bool;

    fn open_stream(&mut self, stream: usize, memory_bytes_max: u64, multiprocessors: u32) -> Result<(), DeviceError>;

    /// Makes one more stream for the tenant whose first stream is `owner`, which is open. Never refuses for want of
    /// streams: it then shares one that others use, in its order.
    fn open_more(&mut self, stream: usize, owner: usize) -> Result<(), DeviceError>;

    /// Makes a stream for one resident kernel, which is what is launched on it, of the tenant whose first stream is
    /// `owner`. Its words in the slab are `words`.
    fn open_resident(&mut self, stream: usize, owner: usize, words: usize) -> Result<(), DeviceError>;

    /// The first stream of the tenant that a stream belongs to.
    fn owner(&self, stream: usize) -> usize;

    /// Has what comes next on a stream begin after everything that another, which is open, was given so far.
    fn order_after(&mut self, on: usize, before: usize) -> Result<(), DeviceError>;

    fn close_stream(&mut self, stream: usize) -> Result<(), DeviceError>;

    /// Takes memory for a stream's owner. Returns its address, which is usable on every stream.
    fn reserve(&mut self, stream: usize, bytes: u64) -> Result<u64, DeviceError>;

    /// Gives back what was reserved for `owner`. False if that is not so.
    fn release(&mut self, on: usize, owner: usize, address: u64, bytes: u64) -> Result<bool, DeviceError>;

    /// Gives back everything that was reserved for a stream, on that stream.
    fn release_all(&mut self, stream: usize) -> Result<(), DeviceError>;

    fn fill(&mut self, on: usize, address: u64, bytes: usize, value: u8) -> Result<(), DeviceError>;

    fn write(&mut self, on: usize, from: *const u8, to_address: u64, bytes: usize) -> Result<(), DeviceError>;

    fn read(&mut self, on: usize, from_address: u64, to: *mut u8, bytes: usize) -> Result<(), DeviceError>;

    fn copy(&mut self, on: usize, from_address: u64, to_address: u64, bytes: usize) -> Result<(), DeviceError>;

    fn launch(
        &mut self,
        on: usize,
        kernel: <Self::Loader as ModuleLoader>::Kernel,
        shape: LaunchShape,
        params: &[u8],
    ) -> Result<(), DeviceError>;

    fn begin_graph(&mut self, on: usize) -> Result<(), DeviceError>;

    /// The next step of a recording comes after some of its steps before, by their numbers, and may run beside the
    /// others. A recording has this before each of its steps or before none.
    fn branch_graph(&mut self, on: usize, after: &[usize]) -> Result<(), DeviceError>;

    fn end_graph(&mut self, on: usize) -> Result<Self::Graph, DeviceError>;

    fn replay(&mut self, on: usize, graph: &Self::Graph) -> Result<(), DeviceError>;

    fn destroy_graph(&mut self, graph: Self::Graph) -> Result<(), DeviceError>;

    fn flag(&mut self, stream: usize, number: u32) -> Result<bool, DeviceError>;

    fn prioritize(&mut self, stream: usize, low: bool) -> Result<(), DeviceError>;

    fn notify(&mut self, stream: usize) -> Result<(), DeviceError>;

    /// Waits for everything that is under way: what it uses is about to go.
    fn finish(&mut self);
}

/// How many threads a kernel runs in, and the shared memory of a block beside its own.
#[derive(Clone, Copy)]
pub(super) struct LaunchShape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
}

/// A device with the tables around it. The order of the fields is the order in which they go: modules last, which the
/// streams' work used.
pub(super) struct Executor<D: DeviceOps> {
    lanes: Lanes,
    graphs: GraphTable<D::Graph>,
    device: D,
    modules: Arc<Modules<D::Loader>>,
    slab: Arc<Slab>,
}

impl<D: DeviceOps> Executor<D> {
    pub(super) fn new(slab: Arc<Slab>, device: D, loader: D::Loader) -> Executor<D> {
        let modules = Arc::new(Modules::new(loader));
        Executor { lanes: Lanes::new(), graphs: GraphTable::new(), device, modules, slab }
    }

    /// A range of the slab, as a pointer of this process and a length.
    fn range(&self, offset: u64, bytes: u64) -> Result<(*mut u8, usize), DeviceError> {
        let size = self.slab.len() as u64;
        let outside = DeviceError::OutOfRange { offset, len: bytes, size };
        match (offset.checked_add(bytes).is_some_and(|end| end <= size), usize::try_from(bytes)) {
            (true, Ok(len)) => Ok((self.slab.address(offset), len)),
            _ => Err(outside),
        }
    }

    fn destroy_graphs(&mut self, is_theirs: impl Fn(usize) -> bool) -> Result<(), DeviceError> {
        let gone = self.graphs.remove_of(is_theirs);
        gone.into_iter().try_for_each(|graph| self.device.destroy_graph(graph))
    }
}

/// The server takes what it sent for done: memory for zeroed or overwritten, streams for ordered. If that is not so,
/// a tenant might see what another left.
fn relied_on(result: Result<(), DeviceError>) -> Result<(), DeviceError> {
    result.map_err(|error| match error {
        lost @ DeviceError::DeviceLost { .. } => lost,
        other => DeviceError::DeviceLost { why: format!("what later jobs rely on was not done: {other}") },
    })
}

/// A job's number of a stream.
fn stream_of(stream: u32) -> Result<usize, DeviceError> {
    let stream = stream as usize;
    if stream < STREAMS && !is_lane(stream) { Ok(stream) } else { Err(no_stream(stream)) }
}

/// A job's number of a resident kernel's words.
fn resident_of(words: u32) -> Option<usize> {
    Some(words as usize).filter(|words| *words < RESIDENTS)
}

fn len(bytes: u64) -> Result<usize, DeviceError> {
    usize::try_from(bytes).map_err(|_| DeviceError::OutOfMemory { asked_bytes: bytes })
}

impl<D: DeviceOps> Backend for Executor<D> {
    fn info(&self) -> DeviceInfo {
        self.device.info()
    }

    fn execute(&mut self, on: usize, job: Job, payload: &[u8], cell: u32) -> Result<Answer, DeviceError> {
        if !self.device.is_open(on) {
            return Err(no_stream(on));
        }
        let inline = Slab::payload_offset(cell);
        let done = |()| Answer::default();
        match job {
            // Nothing is nothing to a driver that may complain about it.
            Job::Fill { bytes: 0, .. } | Job::Write { bytes: 0, .. } | Job::Copy { bytes: 0, .. } => {
                Ok(Answer::default())
            }
            Job::WriteInline { .. } if payload.is_empty() => Ok(Answer::default()),
            Job::OpenStream { stream, memory_bytes_max, sm_count } => {
                self.device.open_stream(stream_of(stream)?, memory_bytes_max, sm_count).map(done)
            }
            Job::OpenMore { stream, owner } => {
                let owner = stream_of(owner).ok().filter(|owner| self.device.is_open(*owner));
                self.device.open_more(stream_of(stream)?, owner.ok_or_else(|| unknown(job))?).map(done)
            }
            Job::OpenResident { stream, owner, words } => {
                let owner = stream_of(owner).ok().filter(|owner| self.device.is_open(*owner));
                let (owner, words) = owner.zip(resident_of(words)).ok_or_else(|| unknown(job))?;
                self.device.open_resident(stream_of(stream)?, owner, words).map(done)
            }
            Job::Await { stream } => {
                let before = stream_of(stream)?;
                // One that was closed is done, and one that is another tenant's by now has nothing that this one could
                // wait for.
                if self.device.is_open(before) && self.device.owner(before) == self.device.owner(on) && before != on {
                    relied_on(self.device.order_after(on, before))?;
                }
                Ok(Answer::default())
            }
            Job::CloseStream { stream } => {
                let stream = stream_of(stream)?;
                self.lanes.close(lane_of(stream));
                self.device.close_stream(stream).map(done)
            }
            Job::Clear => {
                self.device.release_all(on)?;
                self.destroy_graphs(|stream| stream == on).map(done)
            }
            Job::Reserve { stream, bytes } => self.device.reserve(stream_of(stream)?, bytes).map(Answer::of),
            Job::Release { stream, address, bytes } => {
                let is_theirs = self.device.release(on, stream_of(stream)?, address, bytes)?;
                if is_theirs { Ok(Answer::default()) } else { Err(unknown(job)) }
            }
            Job::Fill { address, bytes, value } => {
                relied_on(self.device.fill(on, address, len(bytes)?, value)).map(done)
            }
            Job::Write { from_offset, to_address, bytes } => {
                let (from, len) = self.range(from_offset, bytes)?;
                relied_on(self.device.write(on, from, to_address, len)).map(done)
            }
            Job::Read { from_address, to_offset, bytes } => {
                let (to, len) = self.range(to_offset, bytes)?;
                self.device.read(on, from_address, to, len).map(done)
            }
            Job::WriteInline { to_address } => {
                let (from, len) = self.range(inline, payload.len() as u64)?;
                relied_on(self.device.write(on, from, to_address, len)).map(done)
            }
            Job::ReadInline { from_address, bytes } => {
                let (to, len) = self.range(inline, bytes.min(PAYLOAD_BYTES_MAX as u64))?;
                self.device.read(on, from_address, to, len).map(done)
            }
            Job::Copy { from_address, to_address, bytes } => {
                relied_on(self.device.copy(on, from_address, to_address, len(bytes)?)).map(done)
            }
            Job::Upload { lane, offset, bytes } => {
                self.modules.upload(lane as usize, &self.slab, offset, bytes).map(Answer::of)
            }
            // What belongs on a lane.
            Job::Load { .. } | Job::Unload { .. } | Job::Kernel { .. } | Job::ForgetImage { .. } => Err(unknown(job)),
            Job::Launch { kernel, grid, block, shared_bytes } => {
                let kernel = self.modules.kernel(lane_of(self.device.owner(on)), kernel).ok_or_else(|| unknown(job))?;
                self.device.launch(on, kernel, LaunchShape { grid, block, shared_bytes }, payload).map(done)
            }
            Job::GraphBegin => self.device.begin_graph(on).map(done),
            Job::GraphAfter => {
                let numbers = payload.chunks_exact(2).map(|two| usize::from(u16::from_le_bytes([two[0], two[1]])));
                self.device.branch_graph(on, &numbers.collect::<Vec<_>>()).map(done)
            }
            Job::GraphEnd => {
                let graph = self.device.end_graph(on)?;
                Ok(Answer::of(self.graphs.add(on, graph)))
            }
            Job::Replay { graph } => {
                let graph = self.graphs.get(on, graph).ok_or_else(|| unknown(job))?;
                self.device.replay(on, graph).map(done)
            }
            Job::ForgetGraph { graph } => {
                // One that went with its stream is forgotten already; what was sent with this is to be done.
                self.graphs.remove(graph).map_or(Ok(()), |graph| self.device.destroy_graph(graph)).map(done)
            }
        }
    }

    fn in_lane(&mut self, sent: SentJob, payload: &[u8], cell: u32) {
        self.lanes.hand(&self.modules, &self.slab, sent, payload, cell);
    }

    fn flag(&mut self, stream: usize, number: u32) -> Result<bool, DeviceError> {
        self.device.flag(stream, number)
    }

    fn prioritize(&mut self, stream: usize, low: bool) -> Result<(), DeviceError> {
        // A lane has no priority.
        if !is_lane(stream) && self.device.is_open(stream) { self.device.prioritize(stream, low) } else { Ok(()) }
    }

    fn notify(&mut self, stream: usize) -> Result<(), DeviceError> {
        if !is_lane(stream) && self.device.is_open(stream) {
            return self.device.notify(stream);
        }
        // A lane rings by itself; a stream that is not open has nothing to wait for.
        self.slab.done_bell().ring();
        Ok(())
    }
}

impl<D: DeviceOps> Drop for Executor<D> {
    fn drop(&mut self) {
        self.device.finish();
        let _ = self.destroy_graphs(|_| true);
        // A lane that compiles still is not waited for; modules go with the last who uses them.
        self.lanes.close_all();
    }
}
