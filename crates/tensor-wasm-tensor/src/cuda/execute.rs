//! Runs plans on a GPU.

use std::cell::Cell;
use std::sync::Arc;

use parking_lot::Mutex;
use tensor_wasm_gpu::{Completion, Graph, GraphStep, Handle, Param, Params, Stream, block_on};

use super::map::FLAGS_BYTES;
use super::plan::{CudaLaunch, CudaPlan, LaunchArgument, output_of};
use super::{CudaBuffer, CudaDevice, Pending, failed};
use crate::account;
use crate::cpu::register_of;
use crate::dtype::DType;
use crate::error::ErrorKind;
use crate::graph::{Storage, Value};
use crate::schedule::plan::{BufferView, Parameter, Plan, Source, Step, ValueKind};

/// Graphs that are kept of a plan: its buffers lie in some few ways, one after the other.
const GRAPHS_MAX: usize = 4;

/// What a number that comes with a run takes.
const WORD_BYTES: usize = 8;

/// Launches that are sent at once.
const BATCH_MAX: usize = 512;

/// The same for a plan under a supervisor, which is asked in between.
const SUPERVISED_BATCH_MAX: usize = 64;

/// What a thread had of devices so far.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    pub graphs_made: u64,
    pub graphs_replayed: u64,
    pub round_trips: u64,
}

thread_local! {
    static COUNTS: Cell<Counts> = const { Cell::new(Counts { graphs_made: 0, graphs_replayed: 0, round_trips: 0 }) };
}

pub(super) fn count(change: impl FnOnce(&mut Counts)) {
    let mut counts = COUNTS.get();
    change(&mut counts);
    COUNTS.set(counts);
}

/// Graphs of plans that were recorded for this thread. A loop that does the same in every step records none after its
/// first few, in which its buffers come to lie as they will.
pub fn graphs_made() -> u64 {
    COUNTS.get().graphs_made
}

/// Runs of plans, for this thread, that were the replay of a graph recorded in an earlier run.
pub fn graphs_replayed() -> u64 {
    COUNTS.get().graphs_replayed
}

/// How often this thread has waited for a device: for what it read, for kernels to be loaded, for a graph to be
/// recorded.
pub fn round_trips() -> u64 {
    COUNTS.get().round_trips
}

/// A plan as a device has it, once it has run there.
#[derive(Default)]
pub(crate) struct CudaKernels(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    state: Option<PlanState>,
    /// Whether numbers that a library was told of have changed from run to run: it is not told again.
    numbers_change: bool,
}

/// A plan's launches as they were recorded.
struct PlanGraph {
    graph: Graph,
    /// For each argument of each launch which of the run's buffers it is. Leaves may share one, others in each run:
    /// that all buffers lie where they lay does not say that each is what it was.
    buffers: Vec<u16>,
}

/// What a plan keeps on the device between two runs.
struct PlanState {
    device: CudaDevice,
    lowered: CudaPlan,
    block: Option<CudaBuffer>,
    /// Flags, and then the numbers that come with each run.
    words: CudaBuffer,
    written: Vec<u8>,
    graphs: Vec<PlanGraph>,
    runs: usize,
    /// What [`super::set_tf32`] said when it was lowered.
    is_tf32: bool,
    /// Numbers that it was lowered for.
    assumed: Vec<(usize, [u8; WORD_BYTES])>,
}

/// Runs a plan, and returns what its outputs are, or the node that could not be computed. Where there is no memory,
/// other plans give back what they keep, and it is tried again.
pub(crate) fn execute(
    device: &CudaDevice,
    plan: &Plan,
    kernels: &CudaKernels,
    leaves: &[Value],
    parameters: &[Parameter],
) -> Result<Vec<Value>, (usize, ErrorKind)> {
    match try_execute(device, plan, kernels, leaves, parameters) {
        Err((_, ErrorKind::DeviceMemory { .. })) => {
            crate::schedule::give_back();
            let again = try_execute(device, plan, kernels, leaves, parameters);
            if let Err((_, ErrorKind::DeviceMemory { .. })) = again {
                kernels.give_back();
            }
            again
        }
        done => done,
    }
}

fn try_execute(
    device: &CudaDevice,
    plan: &Plan,
    kernels: &CudaKernels,
    leaves: &[Value],
    parameters: &[Parameter],
) -> Result<Vec<Value>, (usize, ErrorKind)> {
    let last = plan.steps.last().map_or(0, Step::node);
    let words = words_of(plan, parameters);
    let mut kept = kernels.0.lock();
    let Kept { state, numbers_change } = &mut *kept;
    *numbers_change |= state.as_ref().is_some_and(|state| !state.is_for(&words));
    let is_ready = |state: &PlanState| {
        state.device == *device && state.words.is_there() && state.is_tf32 == super::is_tf32() && state.is_for(&words)
    };
    if !state.as_ref().is_some_and(is_ready) {
        *state = None;
        *state = Some(PlanState::new(device, plan, &words, *numbers_change)?);
    }
    match state {
        Some(state) => state.run(plan, leaves, words, last),
        None => Err((last, ErrorKind::Bug { why: "a plan was not made".to_owned() })),
    }
}

impl CudaKernels {
    /// Lets go of what is kept for the next run, unless there is one now.
    pub(crate) fn give_back(&self) {
        let kept = self.0.try_lock().and_then(|mut kept| kept.state.take());
        drop(kept);
    }

    /// The numbers of a run that the plan would be lowered for.
    pub(crate) fn words(&self, plan: &Plan, parameters: &[Parameter]) -> Option<Vec<u8>> {
        (!self.0.lock().numbers_change).then(|| words_of(plan, parameters))
    }
}

/// Numbers that come with a run, as a kernel reads them.
fn words_of(plan: &Plan, parameters: &[Parameter]) -> Vec<u8> {
    let mut types = vec![DType::I64; parameters.len()];
    for step in &plan.steps {
        let map = match step {
            Step::Map(kernel) => Some(kernel),
            Step::Special(kernel) => kernel.epilogue.as_ref(),
        };
        for value in map.iter().flat_map(|map| &map.values) {
            if let ValueKind::Fill(parameter) = value.kind {
                types[parameter] = value.dtype;
            }
        }
    }
    let word = |(parameter, dtype): (&Parameter, DType)| -> [u8; WORD_BYTES] {
        match parameter {
            Parameter::Scalar(scalar) => register_of(*scalar, dtype),
            Parameter::Seed(seed) => seed.to_le_bytes(),
        }
    };
    parameters.iter().zip(types).flat_map(word).collect()
}

fn word_at(words: &[u8], number: usize) -> Option<[u8; WORD_BYTES]> {
    words.chunks_exact(WORD_BYTES).nth(number)?.try_into().ok()
}

/// What a plan needs besides what it is given.
#[derive(Clone, Copy)]
struct MemoryNeed {
    block_bytes: usize,
    output_bytes: usize,
}

impl MemoryNeed {
    fn of(lowered: &CudaPlan) -> MemoryNeed {
        let new = lowered.outputs.iter().filter(|output| output.over.is_none());
        let output_bytes = new.map(|output| output.bytes).fold(0, usize::saturating_add);
        MemoryNeed { block_bytes: usize::try_from(lowered.block_bytes).unwrap_or(usize::MAX), output_bytes }
    }

    /// Refuses what does not fit before any of it is taken.
    fn check(self, device: &CudaDevice, has_block: bool) -> Result<(), ErrorKind> {
        let missing = if has_block { 0 } else { self.block_bytes }.saturating_add(self.output_bytes);
        if missing as u64 > device.0.memory_bytes_max.saturating_sub(device.used_bytes()) {
            return Err(self.refused(device));
        }
        Ok(())
    }

    /// All that the plan needs, not only the part that did not fit.
    fn refused(self, device: &CudaDevice) -> ErrorKind {
        let bytes = self.block_bytes.saturating_add(self.output_bytes);
        ErrorKind::DeviceMemory { bytes, used: device.used_bytes(), limit: device.0.memory_bytes_max }
    }

    fn take(self, device: &CudaDevice, bytes: usize) -> Result<CudaBuffer, ErrorKind> {
        CudaBuffer::new(device, bytes).map_err(|what| match what {
            ErrorKind::DeviceMemory { .. } => self.refused(device),
            other => other,
        })
    }
}

impl PlanState {
    fn new(
        device: &CudaDevice,
        plan: &Plan,
        words: &[u8],
        numbers_change: bool,
    ) -> Result<PlanState, (usize, ErrorKind)> {
        let last = plan.steps.last().map_or(0, Step::node);
        let at_end = |what: ErrorKind| (last, what);
        let is_tf32 = super::is_tf32();
        let lowered = CudaPlan::new(device, plan, (!numbers_change).then_some(words))?;
        let assumed = lowered.assumed.iter().filter_map(|number| Some((*number, word_at(words, *number)?))).collect();
        let need = MemoryNeed::of(&lowered);
        need.check(device, false).map_err(at_end)?;
        let has_block = need.block_bytes > 0;
        let block = if has_block { Some(need.take(device, need.block_bytes).map_err(at_end)?) } else { None };
        let words = CudaBuffer::new(device, FLAGS_BYTES + words.len().max(WORD_BYTES)).map_err(at_end)?;
        let device = device.clone();
        let (written, graphs, runs) = (Vec::new(), Vec::new(), 0);
        Ok(PlanState { device, lowered, block, words, written, graphs, runs, is_tf32, assumed })
    }

    /// Whether it was lowered for these numbers, or for any.
    fn is_for(&self, words: &[u8]) -> bool {
        self.assumed.iter().all(|(number, word)| word_at(words, *number) == Some(*word))
    }

    fn run(
        &mut self,
        plan: &Plan,
        leaves: &[Value],
        words: Vec<u8>,
        last: usize,
    ) -> Result<Vec<Value>, (usize, ErrorKind)> {
        let at_end = |what: ErrorKind| (last, what);
        let device = self.device.clone();
        let mut inputs: Vec<Arc<CudaBuffer>> = Vec::with_capacity(leaves.len());
        let mut before: Vec<Arc<Pending>> = Vec::new();
        for leaf in leaves {
            let buffer = leaf.storage.cuda(&device).map_err(at_end)?;
            if !buffer.pending.is_over().map_err(at_end)? && before.iter().all(|own| !Arc::ptr_eq(own, &buffer.pending))
            {
                before.push(buffer.pending.clone());
            }
            inputs.push(buffer);
        }
        let need = MemoryNeed::of(&self.lowered);
        need.check(&device, true).map_err(at_end)?;
        let mut outputs: Vec<CudaBuffer> = Vec::with_capacity(self.lowered.outputs.len());
        for output in &self.lowered.outputs {
            // All memory is there before anything is overwritten: what fails fails before.
            let made = match output.over.and_then(|leaf| inputs.get(leaf)) {
                Some(leaf) if leaf.bytes == output.bytes => leaf.taken_over(),
                _ => need.take(&device, output.bytes).map_err(at_end)?,
            };
            outputs.push(made);
        }
        if self.written != words {
            // On the stream, before what reads them; after what read those of the run before.
            for (n, part) in words.chunks(Stream::SMALL_BYTES_MAX).enumerate() {
                let offset = (FLAGS_BYTES + n * Stream::SMALL_BYTES_MAX) as u64;
                let handle = self.words.buffer.handle();
                device.when_possible(|stream| stream.write_small(handle, offset, part)).map_err(at_end)?;
            }
            self.written = words;
        }
        if let Some(pending) = self.send(&inputs, &outputs, before).map_err(at_end)? {
            outputs.iter_mut().for_each(|output| output.pending = pending.clone());
        }
        if !self.lowered.check.is_passed(leaves) {
            self.check(plan)?;
        }
        let storages: Vec<Arc<Storage>> =
            outputs.into_iter().map(|output| Arc::new(Storage::of_cuda(Arc::new(output)).computed())).collect();
        let value = |view: &BufferView| {
            let storage = match view.source {
                Source::Leaf(leaf) => leaves.get(leaf).map(|leaf| leaf.storage.clone()),
                Source::Slot(_) => output_of(view, &self.lowered).and_then(|at| storages.get(at)).cloned(),
            };
            let storage = storage.ok_or_else(|| ErrorKind::Bug { why: format!("{view:?} is not there") })?;
            Ok(Value { storage, layout: view.layout })
        };
        plan.outputs.iter().map(value).collect::<Result<_, _>>().map_err(at_end)
    }

    /// Sends the launches, as a graph if they were sent before.
    fn send(
        &mut self,
        inputs: &[Arc<CudaBuffer>],
        outputs: &[CudaBuffer],
        before: Vec<Arc<Pending>>,
    ) -> Result<Option<Arc<Pending>>, ErrorKind> {
        let block = self.block.as_ref().map(|block| block.buffer.handle());
        let words = self.words.buffer.handle();
        let is_by_library = |launch: &CudaLaunch| launch.arguments.contains(&LaunchArgument::Workspace);
        let workspace = if self.lowered.launches.iter().any(is_by_library) {
            Some(self.device.workspace()?.buffer.handle())
        } else {
            None
        };
        let missing = || ErrorKind::Bug { why: "a buffer of a plan is not there".to_owned() };
        let mut handles: Vec<Handle> = Vec::new();
        let mut buffers: Vec<u16> = Vec::new();
        let mut all: Vec<Params> = Vec::with_capacity(self.lowered.launches.len());
        for launch in &self.lowered.launches {
            let mut params = Vec::with_capacity(launch.arguments.len());
            for argument in &launch.arguments {
                let (handle, offset) = match argument {
                    LaunchArgument::Leaf(leaf, from) => (inputs.get(*leaf).ok_or_else(missing)?.buffer.handle(), *from),
                    LaunchArgument::Output(at, from) => (outputs.get(*at).ok_or_else(missing)?.buffer.handle(), *from),
                    LaunchArgument::Block(offset) => (block.ok_or_else(missing)?, *offset),
                    LaunchArgument::Parameters(first) => (words, (FLAGS_BYTES + WORD_BYTES * first) as u64),
                    LaunchArgument::Flags => (words, 0),
                    LaunchArgument::Workspace => (workspace.ok_or_else(missing)?, 0),
                };
                let known = handles.iter().position(|known| *known == handle);
                buffers.push(u16::try_from(known.unwrap_or(handles.len())).unwrap_or(u16::MAX));
                if known.is_none() {
                    handles.push(handle);
                }
                params.push(Param::Buffer { handle, offset });
            }
            all.push(Params::new(params));
        }
        if all.is_empty() {
            return Ok(None);
        }
        let own = outputs.iter().map(|output| output.buffer.handle());
        let overwritten: Vec<Handle> = own.chain(block).chain(workspace).collect();
        let steps: Vec<GraphStep<'_>> = self
            .lowered
            .launches
            .iter()
            .zip(&all)
            .map(|(launch, params)| GraphStep::Launch { kernel: &launch.kernel, grid: launch.grid, params })
            .collect();
        self.runs += 1;
        let device = &self.device;
        let completion = if self.runs == 1 || steps.len() == 1 || steps.len() > BATCH_MAX {
            let mut last = None;
            // Who may end a plan between kernels must not be ahead of the device by more than some of them.
            let is_supervised = account::supervisor().is_some();
            for batch in steps.chunks(if is_supervised { SUPERVISED_BATCH_MAX } else { BATCH_MAX }) {
                if let Some(before) = last.take().filter(|_| is_supervised) {
                    count(|counts| counts.round_trips += 1);
                    Completion::wait(before).map_err(|error| failed(&error))?;
                }
                account::between_kernels()?;
                last = Some(device.when_possible(|stream| stream.run(batch, &overwritten))?);
            }
            last.ok_or_else(missing)?
        } else {
            let mut found = None;
            for PlanGraph { graph, .. } in self.graphs.iter().filter(|recorded| recorded.buffers == buffers) {
                found = device.when_possible(|stream| stream.replay_over(graph, &handles, &overwritten))?;
                if found.is_some() {
                    break;
                }
            }
            match found {
                Some(completion) => {
                    count(|counts| counts.graphs_replayed += 1);
                    completion
                }
                None => {
                    let after = &self.lowered.after;
                    let record = |stream: &Stream| block_on(stream.graph_branched(&steps, &overwritten, after));
                    let graph = device.when_done(record)?;
                    count(|counts| counts.graphs_made += 1);
                    let sent = device.when_possible(|stream| stream.replay_over(&graph, &handles, &overwritten))?;
                    self.graphs.insert(0, PlanGraph { graph, buffers });
                    self.graphs.truncate(GRAPHS_MAX);
                    sent.ok_or_else(missing)?
                }
            }
        };
        Ok(Some(Pending::new(completion, before)))
    }

    /// Looks whether everything could be computed.
    fn check(&self, plan: &Plan) -> Result<(), (usize, ErrorKind)> {
        let last = plan.steps.last().map_or(0, Step::node);
        let mut flags = [0; FLAGS_BYTES];
        let handle = self.words.buffer.handle();
        let read = self.device.when_done(|stream| stream.read_blocking(handle, 0, &mut flags));
        read.map_err(|what| (last, what))?;
        let Some(failure) = CudaPlan::failure(plan, &flags) else { return Ok(()) };
        let cleared = self.device.when_done(|stream| stream.write_blocking(handle, 0, &[0; FLAGS_BYTES]));
        cleared.map_err(|what| (last, what))?;
        Err(failure)
    }
}
