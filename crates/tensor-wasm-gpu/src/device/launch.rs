//! Kernels of a tenant: loading modules, finding kernels, launching them, recording graphs.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::device::arena::{Access, Handle, Part, Span};
use crate::device::params::Params;
use crate::device::pinned::Pinned;
use crate::device::staging::{BLOCK_BYTES, Keep};
use crate::device::stream::{Stream, StreamSlot};
use crate::device::{Bound, Completion, Garbage, TenantMemory};
use crate::error::DeviceError;
use crate::info::DeviceInfo;
use crate::number;
use crate::queue::job::{Answer, Cell, Job};
use crate::queue::link::{CONTROL, Order, Ticket};
use crate::slab::{PAYLOAD_BYTES_MAX, lane_of};

/// A loaded kernel module of a tenant. Cloning shares it; it is unloaded with the last clone and the last kernel of it.
#[derive(Clone)]
pub struct Module(Arc<LoadedModule>);

pub(crate) struct LoadedModule {
    worker: u32,
    tenant: u64,
    lane: usize,
    number: u32,
    garbage: Arc<Garbage>,
    /// Kernels that were asked for before.
    kernels: Mutex<HashMap<String, Arc<KernelInfo>>>,
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        self.garbage.push(self.lane, Job::Unload { module: self.number });
    }
}

impl PartialEq for Module {
    fn eq(&self, other: &Module) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Module({})", self.0.number)
    }
}

/// A kernel, ready to be launched.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    module: Module,
    info: Arc<KernelInfo>,
}

impl Kernel {
    pub(crate) fn module(&self) -> &Arc<LoadedModule> {
        &self.module.0
    }
}

impl std::ops::Deref for Kernel {
    type Target = KernelInfo;

    fn deref(&self) -> &KernelInfo {
        &self.info
    }
}

/// What a device says about a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelInfo {
    number: u32,
    pub name: String,
    pub threads_max: u32,
    pub shared_bytes: u32,
    pub registers: u32,
    /// Blocks of `threads_max` threads that one multiprocessor holds at once.
    pub blocks_per_multiprocessor: u32,
    /// Offset and size of each parameter.
    params: Vec<(u32, u32)>,
}

/// A sequence that was recorded once and runs as one. Forgotten when dropped.
pub struct Graph(Arc<Recorded>);

pub(crate) struct Recorded {
    worker: u32,
    tenant: u64,
    /// Held for as long as the graph is there: its number means the same stream that long. Not the tenant: a job that
    /// keeps the graph lets go of it under the link's lock.
    slot: Arc<StreamSlot>,
    number: u32,
    garbage: Arc<Garbage>,
    used: Used,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.garbage.push(self.slot.number as usize, Job::ForgetGraph { graph: self.number });
    }
}

/// What a recorded sequence uses.
#[derive(Default)]
struct Used {
    /// All of them must be there still when it is replayed, or others in their place.
    buffers: Vec<Handle>,
    /// Where they are, and how large.
    places: Vec<(u64, u64)>,
    #[expect(dead_code, reason = "held, not read")]
    pinned: Vec<Pinned>,
    #[expect(dead_code, reason = "held, not read")]
    modules: Vec<Module>,
}

/// Steps as jobs.
struct Sequence {
    /// With which of the parameter blocks, and of the modules.
    jobs: Vec<(Job, Option<usize>)>,
    blocks: Vec<Vec<u8>>,
    /// Each buffer once, in the order they are named.
    parts: Vec<Part>,
    pinned: Vec<Pinned>,
    modules: Vec<Module>,
}

/// How many threads a kernel runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    pub blocks: [u32; 3],
    pub threads: [u32; 3],
    pub shared_bytes: u32,
}

/// A step of a graph.
pub enum GraphStep<'a> {
    Launch { kernel: &'a Kernel, grid: Grid, params: &'a Params },
    Copy { from: (Handle, u64), to: (Handle, u64), bytes: u64 },
    Fill { buffer: Handle, offset: u64, bytes: u64, value: u8 },
}

impl Stream {
    /// Loads a kernel module (PTX text or a cubin), or finds it loaded by this tenant: same bytes, same module.
    pub async fn load(&self, image: &[u8]) -> Result<Module, DeviceError> {
        let bound = self.state.bound()?;
        let hash = blake3::hash(image);
        if let Some(loaded) = self.state.memory.lock().modules.get(&hash).and_then(Weak::upgrade) {
            return Ok(Module(loaded));
        }
        bound.collect();
        if image.is_empty() || image.len() as u64 >= BLOCK_BYTES {
            let why = format!("it has {} bytes; between 1 and {} are possible", image.len(), BLOCK_BYTES - 1);
            return Err(DeviceError::BadModule { why });
        }
        let block = bound.link.staging.block().await?;
        block.slab().copy_in(block.offset, image);
        // PTX ends with a NUL.
        block.slab().copy_in(block.offset + image.len() as u64, &[0]);
        let lane = lane_of(self.state.number() as usize);
        let job = Job::Upload { lane: number::half(lane), offset: block.offset, bytes: image.len() as u64 };
        let order = Order::new(job, &[], Some(Keep::Block(block)));
        let answer = bound.link.send(CONTROL, vec![order])?.await?;
        let image = half(answer.values[0]);
        // Who gives up while it is loaded leaves it to the end of the tenant.
        let answer = match bound.link.send(lane, vec![Job::Load { image }.into()]) {
            Ok(ticket) => ticket.await?,
            Err(error) => {
                bound.garbage.push(lane, Job::ForgetImage { image });
                return Err(error);
            }
        };
        let loaded = Arc::new(LoadedModule {
            worker: bound.link.worker,
            tenant: self.state.id,
            lane,
            number: half(answer.values[0]),
            garbage: bound.garbage.clone(),
            kernels: Mutex::default(),
        });
        let mut memory = self.state.memory.lock();
        memory.modules.retain(|_, loaded| loaded.strong_count() > 0);
        // Not if another worker has come meanwhile.
        if memory.worker == Some(bound.link.worker) {
            memory.modules.insert(hash, Arc::downgrade(&loaded));
        }
        Ok(Module(loaded))
    }

    /// A kernel of a module.
    pub async fn kernel(&self, module: &Module, name: &str) -> Result<Kernel, DeviceError> {
        let bound = self.state.bound()?;
        self.check_module(module, &bound)?;
        if let Some(info) = module.0.kernels.lock().get(name).cloned() {
            return Ok(Kernel { module: module.clone(), info });
        }
        if name.is_empty() || name.len() >= PAYLOAD_BYTES_MAX || name.contains('\0') {
            return Err(DeviceError::NoSuchKernel { name: name.chars().take(64).collect() });
        }
        let job = Job::Kernel { module: module.0.number };
        let keeps = Some(Keep::Kernel(module.0.clone(), Vec::new()));
        let order = Order::new(job, name.as_bytes(), keeps);
        let mut ticket = bound.link.send(lane_of(self.state.number() as usize), vec![order])?;
        let cell = ticket.cell();
        let mut layout = vec![0; PAYLOAD_BYTES_MAX];
        let link = bound.link.clone();
        let answer =
            std::future::poll_fn(|cx| ticket.poll_with(cx, |_| Cell(link.slab.cell(cell)).payload(&mut layout)));
        let Answer { values: [number, count, threads, shared, registers, resident] } = answer.await?;
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
        let pairs = layout.chunks_exact(8).map(|pair| (word(&pair[..4]), word(&pair[4..])));
        let info = Arc::new(KernelInfo {
            number: half(number),
            name: name.to_owned(),
            threads_max: half(threads),
            shared_bytes: half(shared),
            registers: half(registers),
            blocks_per_multiprocessor: half(resident),
            params: pairs.take(usize::try_from(count).unwrap_or(0)).collect(),
        });
        module.0.kernels.lock().insert(name.to_owned(), info.clone());
        Ok(Kernel { module: module.clone(), info })
    }

    fn check_module(&self, module: &Module, bound: &Bound) -> Result<(), DeviceError> {
        same_worker(module.0.worker, bound)?;
        // A module's variables are its tenant's.
        if module.0.tenant == self.state.id { Ok(()) } else { Err(DeviceError::ForeignHandle) }
    }

    /// Launches a kernel. Its parameters are checked against its signature, its buffers against the tenant's.
    pub fn launch(&self, kernel: &Kernel, grid: Grid, params: &Params) -> Result<Completion, DeviceError> {
        let bound = self.state.bound()?;
        let pinned = self.check_launch(kernel, grid, params, &bound)?;
        let mut memory = self.state.memory.lock();
        let parts = whole_parts(&memory, params)?;
        let (mut orders, spans) = self.before(&bound, &memory, &parts)?;
        let block = params.block(addresses(&spans, params));
        let keeps = Some(Keep::Kernel(kernel.module.0.clone(), pinned));
        orders.push(Order::new(launch_job(kernel, grid), &block, keeps));
        self.open(&bound, &mut memory)?;
        let ticket = self.send_orders(&bound, orders)?;
        parts.iter().for_each(|part| memory.arena.touch(*part, ticket.as_use()));
        Ok(Completion(ticket))
    }

    /// Whether a kernel may be launched so; the pinned memory among its parameters.
    pub(crate) fn check_launch(
        &self,
        kernel: &Kernel,
        grid: Grid,
        params: &Params,
        bound: &Bound,
    ) -> Result<Vec<Pinned>, DeviceError> {
        self.check_module(&kernel.module, bound)?;
        check_grid(kernel, grid, &bound.info)?;
        params.check(&kernel.params)?;
        params.pinned(&bound.link.slab)
    }

    /// Runs a sequence, sent together. `overwritten` are buffers that it writes as wholes before anything reads them,
    /// by the caller's word: they are not zeroed first. A part that is never written holds what the tenant had there.
    pub fn run(&self, steps: &[GraphStep<'_>], overwritten: &[Handle]) -> Result<Completion, DeviceError> {
        let bound = self.state.bound()?;
        let mut memory = self.state.memory.lock();
        let Sequence { jobs, blocks, parts, pinned, modules } = self.sequence(&bound, &memory, steps, overwritten)?;
        let (mut orders, _) = self.before(&bound, &memory, &parts)?;
        let last = modules.len().saturating_sub(1);
        for (job, at) in &jobs {
            let payload = at.map_or(&[][..], |at| &blocks[at]);
            // They are done in order, so the last launch keeps the memory that any of them uses.
            let held = |at: usize| if at == last { pinned.clone() } else { Vec::new() };
            let keeps = at.map(|at| Keep::Kernel(modules[at].0.clone(), held(at)));
            orders.push(Order::new(*job, payload, keeps));
        }
        self.open(&bound, &mut memory)?;
        let ticket = self.send_orders(&bound, orders)?;
        parts.iter().for_each(|part| memory.arena.touch(*part, ticket.as_use()));
        Ok(Completion(ticket))
    }

    /// Records a sequence that can then be replayed as one.
    pub async fn graph(&self, steps: &[GraphStep<'_>]) -> Result<Graph, DeviceError> {
        self.graph_over(steps, &[]).await
    }

    /// The same for a sequence that writes some buffers as wholes before anything reads them, as for [`Stream::run`].
    pub async fn graph_over(&self, steps: &[GraphStep<'_>], overwritten: &[Handle]) -> Result<Graph, DeviceError> {
        self.graph_branched(steps, overwritten, &[]).await
    }

    /// The same for a sequence of which `after` says for each step which of those before it comes after: by the
    /// caller's word it may run beside the others. With nothing said, steps come one after the other.
    pub async fn graph_branched(
        &self,
        steps: &[GraphStep<'_>],
        overwritten: &[Handle],
        after: &[Vec<u16>],
    ) -> Result<Graph, DeviceError> {
        let bound = self.state.bound()?;
        bound.collect();
        let is_before = |(step, after): (usize, &Vec<u16>)| after.iter().all(|before| usize::from(*before) < step);
        let fits = after.iter().all(|steps| steps.len() <= PAYLOAD_BYTES_MAX / 2);
        let has_all = fits && after.len() == steps.len() && after.iter().enumerate().all(is_before);
        if !after.is_empty() && !has_all {
            let why = "a step of a graph comes after one that is not before it".to_owned();
            return Err(DeviceError::BadLaunch { why });
        }
        let (ticket, used) = self.record(&bound, steps, overwritten, after)?;
        let number = u32::try_from(ticket.await?.values[0]).unwrap_or(u32::MAX);
        let (worker, garbage) = (bound.link.worker, bound.garbage.clone());
        Ok(Graph(Arc::new(Recorded { worker, tenant: self.state.id, slot: self.slot.clone(), number, garbage, used })))
    }

    /// What steps are as jobs, each of them checked, and what they use.
    fn sequence(
        &self,
        bound: &Bound,
        memory: &TenantMemory,
        steps: &[GraphStep<'_>],
        overwritten: &[Handle],
    ) -> Result<Sequence, DeviceError> {
        let mut blocks: Vec<Vec<u8>> = Vec::new();
        let mut jobs: Vec<(Job, Option<usize>)> = Vec::new();
        let (mut parts, mut pinned, mut modules): (Vec<Part>, Vec<Pinned>, Vec<Module>) = Default::default();
        // A buffer that is used is zeroed as a whole, whatever the steps do with it, unless they write all of it.
        let mut span = |memory: &TenantMemory, handle: Handle, offset: u64, len: u64| {
            let address = memory.arena.peek(Part { handle, offset, len, access: Access::Update })?.address;
            if parts.iter().all(|part| part.handle != handle) {
                let access = if overwritten.contains(&handle) { Access::Overwrite } else { Access::Update };
                parts.push(Part { handle, offset: 0, len: memory.arena.size(handle)?, access });
            }
            Ok::<u64, DeviceError>(address)
        };
        for step in steps {
            match step {
                GraphStep::Copy { from, to, bytes } => {
                    let from_address = span(memory, from.0, from.1, *bytes)?;
                    let to_address = span(memory, to.0, to.1, *bytes)?;
                    jobs.push((Job::Copy { from_address, to_address, bytes: *bytes }, None));
                }
                GraphStep::Fill { buffer, offset, bytes, value } => {
                    let address = span(memory, *buffer, *offset, *bytes)?;
                    jobs.push((Job::Fill { address, bytes: *bytes, value: *value }, None));
                }
                GraphStep::Launch { kernel, grid, params } => {
                    pinned.extend(self.check_launch(kernel, *grid, params, bound)?);
                    modules.push(kernel.module.clone());
                    let mut addresses = Vec::new();
                    for (handle, offset) in params.spans() {
                        let size = memory.arena.size(handle)?;
                        let out = DeviceError::OutOfRange { offset, len: 0, size };
                        let len = size.checked_sub(offset).ok_or(out)?;
                        addresses.push(span(memory, handle, offset, len)?);
                    }
                    jobs.push((launch_job(kernel, *grid), Some(blocks.len())));
                    blocks.push(params.block(addresses));
                }
            }
        }
        Ok(Sequence { jobs, blocks, parts, pinned, modules })
    }

    /// Sends the steps to be recorded; also returns what they use.
    fn record(
        &self,
        bound: &Bound,
        steps: &[GraphStep<'_>],
        overwritten: &[Handle],
        after: &[Vec<u16>],
    ) -> Result<(Ticket, Used), DeviceError> {
        let mut memory = self.state.memory.lock();
        let Sequence { jobs, blocks, parts, pinned, modules } = self.sequence(bound, &memory, steps, overwritten)?;
        let payload = |at: &Option<usize>| at.map_or(&[][..], |at| &blocks[at]);
        let (mut orders, spans) = self.before(bound, &memory, &parts)?;
        orders.push(Job::GraphBegin.into());
        // A kernel is there until it is recorded, also if whoever asked for that gives up; then the recording keeps it.
        let keep = |at: &Option<usize>| at.map(|at| Keep::Kernel(modules[at].0.clone(), Vec::new()));
        let after: Vec<Vec<u8>> =
            after.iter().map(|steps| steps.iter().flat_map(|step| step.to_le_bytes()).collect()).collect();
        for (n, (job, at)) in jobs.iter().enumerate() {
            orders.extend(after.get(n).map(|steps| Order::new(Job::GraphAfter, steps, None)));
            orders.push(Order::new(*job, payload(at), keep(at)));
        }
        orders.push(Job::GraphEnd.into());
        self.open(bound, &mut memory)?;
        let ticket = self.send_orders(bound, orders)?;
        parts.iter().for_each(|part| memory.arena.touch(*part, ticket.as_use()));
        let places = spans.iter().map(|span| (span.address, span.bytes)).collect();
        Ok((ticket, Used { buffers: parts.iter().map(|part| part.handle).collect(), places, pinned, modules }))
    }

    /// Runs a recorded sequence with other buffers, if they lie where those did that it was recorded with, each as
    /// large: a buffer that was freed and one that was allocated then often do. They are in the order in which the
    /// steps named them first. None if one does not.
    pub fn replay_over(
        &self,
        graph: &Graph,
        buffers: &[Handle],
        overwritten: &[Handle],
    ) -> Result<Option<Completion>, DeviceError> {
        let bound = self.state.bound()?;
        self.check_graph(graph, &bound)?;
        let mut memory = self.state.memory.lock();
        let mut parts = Vec::with_capacity(buffers.len());
        for handle in buffers {
            let access = if overwritten.contains(handle) { Access::Overwrite } else { Access::Update };
            parts.push(Part { handle: *handle, offset: 0, len: memory.arena.size(*handle)?, access });
        }
        let (mut orders, spans) = self.before(&bound, &memory, &parts)?;
        let places = spans.iter().map(|span| (span.address, span.bytes));
        if !places.eq(graph.0.used.places.iter().copied()) {
            return Ok(None);
        }
        let job = Job::Replay { graph: graph.0.number };
        orders.push(Order::new(job, &[], Some(Keep::Graph(graph.0.clone()))));
        self.open(&bound, &mut memory)?;
        let ticket = self.send_orders(&bound, orders)?;
        parts.iter().for_each(|part| memory.arena.touch(*part, ticket.as_use()));
        Ok(Some(Completion(ticket)))
    }

    fn check_graph(&self, graph: &Graph, bound: &Bound) -> Result<(), DeviceError> {
        same_worker(graph.0.worker, bound)?;
        let is_own = graph.0.tenant == self.state.id && Arc::ptr_eq(&graph.0.slot, &self.slot);
        if is_own { Ok(()) } else { Err(DeviceError::ForeignHandle) }
    }

    /// Runs a recorded sequence, on the stream it was recorded on. The buffers it was recorded with must not have been
    /// freed.
    pub fn replay(&self, graph: &Graph) -> Result<Completion, DeviceError> {
        let bound = self.state.bound()?;
        self.check_graph(graph, &bound)?;
        let parts = {
            let memory = self.state.memory.lock();
            let part = |handle: &Handle| {
                Ok(Part { handle: *handle, offset: 0, len: memory.arena.size(*handle)?, access: Access::Update })
            };
            graph.0.used.buffers.iter().map(part).collect::<Result<Vec<Part>, DeviceError>>()?
        };
        self.send(&parts, |_| {
            let job = Job::Replay { graph: graph.0.number };
            Ok(vec![Order::new(job, &[], Some(Keep::Graph(graph.0.clone())))])
        })
    }
}

/// The buffers among the parameters of a launch, as wholes: the kernel may reach all of each, whatever is left after
/// its offset.
pub(crate) fn whole_parts(memory: &TenantMemory, params: &Params) -> Result<Vec<Part>, DeviceError> {
    let part = |(handle, offset): (Handle, u64)| {
        let size = memory.arena.size(handle)?;
        if offset > size {
            return Err(DeviceError::OutOfRange { offset, len: 0, size });
        }
        Ok(Part { handle, offset: 0, len: size, access: Access::Update })
    };
    params.spans().map(part).collect()
}

/// The addresses of the buffers among the parameters, with their offsets.
pub(crate) fn addresses(spans: &[Span], params: &Params) -> impl Iterator<Item = u64> {
    spans.iter().zip(params.spans()).map(|(span, (_, offset))| span.address + offset)
}

pub(crate) fn launch_job(kernel: &Kernel, grid: Grid) -> Job {
    let Grid { blocks, threads, shared_bytes } = grid;
    Job::Launch { kernel: kernel.number, grid: blocks, block: threads, shared_bytes }
}

fn half(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn same_worker(worker: u32, bound: &Bound) -> Result<(), DeviceError> {
    if worker == bound.link.worker {
        return Ok(());
    }
    Err(DeviceError::DeviceLost { why: "it belonged to an earlier worker".to_owned() })
}

fn check_grid(kernel: &Kernel, grid: Grid, info: &DeviceInfo) -> Result<(), DeviceError> {
    let bad = |why: String| Err(DeviceError::BadLaunch { why });
    let Grid { blocks, threads, shared_bytes } = grid;
    if blocks.contains(&0) || threads.contains(&0) {
        return bad(format!("grid {blocks:?} of blocks {threads:?} is empty"));
    }
    let per_block = threads.iter().try_fold(1_u32, |product, n| product.checked_mul(*n));
    let threads_max = kernel.threads_max.min(info.threads_per_block_max);
    let exceeds = |asked: [u32; 3], max: [u32; 3]| asked.iter().zip(max).any(|(asked, max)| *asked > max);
    if per_block.is_none_or(|n| n > threads_max) || exceeds(threads, info.block_max) {
        let [x, y, z] = info.block_max;
        return bad(format!(
            "a block of {threads:?} threads; this kernel allows {threads_max}, at most {x} by {y} by {z}"
        ));
    }
    if exceeds(blocks, info.grid_max) {
        let [x, y, z] = info.grid_max;
        return bad(format!("a grid of {blocks:?} blocks; the device allows {x} by {y} by {z}"));
    }
    let shared = u64::from(shared_bytes) + u64::from(kernel.shared_bytes);
    if shared > u64::from(info.shared_bytes_per_block_max) {
        let max = info.shared_bytes_per_block_max;
        return bad(format!("{shared} bytes of shared memory; the device has {max} for a block"));
    }
    Ok(())
}
