//! Runs plans on a GPU.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tensor_wasm_gpu::{Graph, GraphStep, Handle, Param, Params, Stream, block_on, buffer_bytes};

use super::map::FLAGS_BYTES;
use super::plan::{CudaLaunch, CudaPlan, LaunchArgument, output_of};
use super::product::WORKSPACE_BYTES;
use super::{CudaBuffer, CudaDevice, Pending, failed};
use crate::account;
use crate::cpu::register_of;
use crate::dtype::DType;
use crate::error::ErrorKind;
use crate::graph::numbers::Numbers;
use crate::graph::{Storage, Value};
use crate::schedule::plan::{BufferView, Parameter, Plan, Source, Step, ValueKind};

#[cfg(test)]
mod tests;

/// Graphs that are kept of a plan: its buffers lie in some few ways, one after the other.
const GRAPHS_MAX: usize = 4;

/// What a number that comes with a run takes.
const WORD_BYTES: usize = 8;

/// Launches that are sent at once.
const BATCH_MAX: usize = 512;

/// What is sent at once of a plan under a supervisor, and what such a plan may take to be replayed as a graph: nobody
/// can stop what was sent, and a call's deadline is to hold. A wait between two batches is some 20 µs of this.
const SUPERVISED_AT_ONCE: Duration = Duration::from_millis(5);

/// What such plans may have sent and not waited for: enough for the device to have work while the next is made.
const SUPERVISED_AHEAD: Duration = Duration::from_millis(20);

/// Launches that are sent at once of such a plan, however little they take.
const SUPERVISED_BATCH_MAX: usize = 64;

/// How long a thread waits for another that runs the same plan before it looks whether it is to stop.
const LOCK_PERIOD: Duration = Duration::from_millis(5);

const _: () = assert!(SUPERVISED_AT_ONCE.as_nanos() <= SUPERVISED_AHEAD.as_nanos());

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
pub(crate) struct CudaKernels {
    kept: Mutex<Kept>,
    /// What the numbers that come with a run are read as.
    word_types: OnceLock<Vec<DType>>,
}

#[derive(Default)]
struct Kept {
    state: Option<PlanState>,
    /// Whether numbers that a library was told of have changed from run to run: it is not told again.
    numbers_change: bool,
}

/// A plan's launches as they were recorded.
struct PlanGraph {
    graph: Graph,
    /// For each buffer that the plan names which of the run's it is. Leaves may share one, others in each run: that all
    /// buffers lie where they lay does not say that each is what it was.
    buffers: Vec<u32>,
}

/// A buffer as a plan names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlanBuffer {
    Leaf(usize),
    Output(usize),
    Block,
    Words,
    Workspace,
}

/// The buffer that an argument is in, and where.
fn named_by(argument: &LaunchArgument) -> (PlanBuffer, u64) {
    match *argument {
        LaunchArgument::Leaf(leaf, from) => (PlanBuffer::Leaf(leaf), from),
        LaunchArgument::Output(at, from) => (PlanBuffer::Output(at), from),
        LaunchArgument::Block(offset) => (PlanBuffer::Block, offset),
        LaunchArgument::Parameters(first) => (PlanBuffer::Words, (FLAGS_BYTES + WORD_BYTES * first) as u64),
        LaunchArgument::Flags => (PlanBuffer::Words, 0),
        LaunchArgument::Workspace => (PlanBuffer::Workspace, 0),
    }
}

/// What a plan keeps on the device between two runs.
struct PlanState {
    device: CudaDevice,
    lowered: CudaPlan,
    /// The buffers of its launches, each once, in the order they are named first.
    named: Vec<PlanBuffer>,
    /// Of a run's buffers, while it is sent: some of those named may be the same.
    numbers: Numbers,
    block: Option<CudaBuffer>,
    /// Flags, and then the numbers that come with each run.
    words: CudaBuffer,
    written: Vec<u8>,
    graphs: Vec<PlanGraph>,
    runs: usize,
    /// Kept for as long as the plan is, where it has products that a library does.
    workspace: Option<Arc<CudaBuffer>>,
    /// The least that it took on the device, as seen from here, if a supervisor has had it measured; and what each of
    /// its launches takes.
    takes: Option<Duration>,
    launches_take: Vec<Duration>,
    /// A run was stopped in the middle, or nobody heard of its end: its flags may be set.
    is_torn: bool,
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
        Err((node, ErrorKind::DeviceMemory { .. })) => {
            account::check_hurry().map_err(|what| (node, what))?;
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
    let words = kernels.words_of(plan, parameters);
    let mut kept = loop {
        // Whoever has it may wait for the device, for as long as a plan takes.
        let kept = if account::is_hurried() { kernels.kept.try_lock() } else { kernels.kept.try_lock_for(LOCK_PERIOD) };
        if kept.is_none() {
            account::check_hurry().map_err(|what| (last, what))?;
        }
        match kept {
            Some(kept) => break kept,
            None => account::check_stopped().map_err(|what| (last, what))?,
        }
    };
    let Kept { state, numbers_change } = &mut *kept;
    *numbers_change |= state.as_ref().is_some_and(|state| !state.is_for(&words));
    let is_ready = |state: &PlanState| {
        state.device == *device && state.words.is_there() && state.is_tf32 == super::is_tf32() && state.is_for(&words)
    };
    if !state.as_ref().is_some_and(is_ready) {
        account::check_hurry().map_err(|what| (last, what))?;
        *state = None;
        *state = Some(PlanState::new(device, plan, leaves, &words, *numbers_change)?);
    }
    match state.as_mut() {
        // What it holds is of a worker that may have gone meanwhile.
        Some(state) => state.run(plan, leaves, words, last).map_err(|(node, what)| (node, state.words.if_lost(what))),
        None => Err((last, ErrorKind::Bug { why: "a plan was not made".to_owned() })),
    }
}

impl CudaKernels {
    /// Lets go of what is kept for the next run, unless there is one now.
    pub(crate) fn give_back(&self) {
        let kept = self.kept.try_lock().and_then(|mut kept| kept.state.take());
        drop(kept);
    }

    /// The numbers of a run that the plan would be lowered for.
    pub(crate) fn words(&self, plan: &Plan, parameters: &[Parameter]) -> Option<Vec<u8>> {
        (!self.kept.lock().numbers_change).then(|| self.words_of(plan, parameters))
    }

    /// Numbers that come with a run, as a kernel reads them.
    fn words_of(&self, plan: &Plan, parameters: &[Parameter]) -> Vec<u8> {
        let types = self.word_types.get_or_init(|| word_types(plan, parameters.len()));
        let mut words = Vec::with_capacity(WORD_BYTES * parameters.len());
        for (parameter, dtype) in parameters.iter().zip(types) {
            words.extend_from_slice(&match parameter {
                Parameter::Scalar(scalar) => register_of(*scalar, *dtype),
                Parameter::Seed(seed) => seed.to_le_bytes(),
            });
        }
        words
    }
}

/// The type of each number that comes with a run.
fn word_types(plan: &Plan, parameters: usize) -> Vec<DType> {
    let mut types = vec![DType::I64; parameters];
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
    types
}

fn word_at(words: &[u8], number: usize) -> Option<[u8; WORD_BYTES]> {
    words.chunks_exact(WORD_BYTES).nth(number)?.try_into().ok()
}

/// What a run of a plan takes of the device's memory, besides the leaves that lie there.
#[derive(Clone, Copy, Default)]
struct MemoryNeed {
    /// All of it, and what of it is not there from an earlier run.
    bytes: u64,
    missing_bytes: u64,
}

impl MemoryNeed {
    fn of(device: &CudaDevice, lowered: &CudaPlan, leaves: &[Value], words: usize, is_made: bool) -> MemoryNeed {
        let mut need = MemoryNeed::default();
        let mut uploaded: Vec<&Arc<Storage>> = Vec::new();
        for Value { storage, .. } in leaves {
            if !storage.is_on(device) && uploaded.iter().all(|other| !Arc::ptr_eq(other, storage)) {
                uploaded.push(storage);
                need.add(storage.bytes(), true);
            }
        }
        for output in lowered.outputs.iter().filter(|output| output.over.is_none()) {
            need.add(output.bytes, true);
        }
        if lowered.block_bytes > 0 {
            need.add(usize::try_from(lowered.block_bytes).unwrap_or(usize::MAX), !is_made);
        }
        need.add(words_bytes(words), !is_made);
        if is_by_library(lowered) {
            need.add(usize::try_from(WORKSPACE_BYTES).unwrap_or(usize::MAX), !device.has_workspace());
        }
        need
    }

    /// As much as the device takes of a quota for it.
    fn add(&mut self, bytes: usize, is_missing: bool) {
        let bytes = buffer_bytes(bytes.max(1) as u64);
        self.bytes = self.bytes.saturating_add(bytes);
        if is_missing {
            self.missing_bytes = self.missing_bytes.saturating_add(bytes);
        }
    }

    /// Refuses what does not fit before any of it is taken.
    fn check(self, device: &CudaDevice) -> Result<(), ErrorKind> {
        if self.missing_bytes > device.0.memory_bytes_max.saturating_sub(device.used_bytes()) {
            return Err(device.short_of(self.bytes));
        }
        Ok(())
    }

    /// What was refused is all that the plan needs, not only the part that did not fit.
    fn of_all<T>(self, device: &CudaDevice, taken: Result<T, ErrorKind>) -> Result<T, ErrorKind> {
        taken.map_err(|what| match what {
            ErrorKind::DeviceMemory { .. } => device.short_of(self.bytes),
            other => other,
        })
    }

    fn take(self, device: &CudaDevice, bytes: usize) -> Result<CudaBuffer, ErrorKind> {
        self.of_all(device, CudaBuffer::new(device, bytes))
    }
}

/// Flags, and behind them numbers that take so many bytes.
fn words_bytes(words: usize) -> usize {
    FLAGS_BYTES + words.max(WORD_BYTES)
}

fn is_by_library(lowered: &CudaPlan) -> bool {
    lowered.launches.iter().any(|launch| launch.arguments.contains(&LaunchArgument::Workspace))
}

/// Launches, from the first on, that take no longer than what may be sent at once; one in any case.
fn fitting(launches_take: &[Duration]) -> usize {
    let mut all = Duration::ZERO;
    let fits = |takes: &&Duration| {
        all += **takes;
        all <= SUPERVISED_AT_ONCE
    };
    launches_take.iter().take(SUPERVISED_BATCH_MAX).take_while(fits).count().max(1)
}

impl PlanState {
    fn new(
        device: &CudaDevice,
        plan: &Plan,
        leaves: &[Value],
        words: &[u8],
        numbers_change: bool,
    ) -> Result<PlanState, (usize, ErrorKind)> {
        let last = plan.steps.last().map_or(0, Step::node);
        let at_end = |what: ErrorKind| (last, what);
        let is_tf32 = super::is_tf32();
        let lowered = CudaPlan::new(device, plan, (!numbers_change).then_some(words))?;
        let assumed = lowered.assumed.iter().filter_map(|number| Some((*number, word_at(words, *number)?))).collect();
        let need = MemoryNeed::of(device, &lowered, leaves, words.len(), false);
        need.check(device).map_err(at_end)?;
        let block_bytes = usize::try_from(lowered.block_bytes).unwrap_or(usize::MAX);
        let block = if block_bytes > 0 { Some(need.take(device, block_bytes).map_err(at_end)?) } else { None };
        let words = need.take(device, words_bytes(words.len())).map_err(at_end)?;
        let mut named: Vec<PlanBuffer> = Vec::new();
        for (buffer, _) in lowered.launches.iter().flat_map(|launch| &launch.arguments).map(named_by) {
            if !named.contains(&buffer) {
                named.push(buffer);
            }
        }
        Ok(PlanState {
            device: device.clone(),
            lowered,
            named,
            numbers: Numbers::default(),
            block,
            words,
            written: Vec::new(),
            graphs: Vec::new(),
            runs: 0,
            workspace: None,
            takes: None,
            launches_take: Vec::new(),
            is_torn: false,
            is_tf32,
            assumed,
        })
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
        if account::is_hurried() && self.is_waited_for(leaves, &words) {
            account::check_hurry().map_err(at_end)?;
        }
        let need = MemoryNeed::of(&device, &self.lowered, leaves, words.len(), true);
        need.check(&device).map_err(at_end)?;
        if is_by_library(&self.lowered) && !self.workspace.as_ref().is_some_and(|own| own.is_there()) {
            self.workspace = Some(need.of_all(&device, device.workspace()).map_err(at_end)?);
        }
        let mut inputs: Vec<Arc<CudaBuffer>> = Vec::with_capacity(leaves.len());
        let mut before: Vec<Arc<Pending>> = Vec::new();
        // Copies are the leaves' once the plan is sent: of one that fails nothing is left.
        let mut copies: Vec<(&Arc<Storage>, Arc<CudaBuffer>)> = Vec::new();
        for Value { storage, .. } in leaves {
            let copied = copies.iter().find(|(of, _)| Arc::ptr_eq(of, storage)).map(|(_, copy)| copy.clone());
            let there = if copied.is_some() { copied } else { storage.on(&device).map_err(at_end)? };
            let buffer = match there {
                Some(buffer) => buffer,
                None => {
                    let from = storage.cpu().map_err(at_end)?;
                    let copy = need.of_all(&device, CudaBuffer::write(&device, from)).map_err(at_end)?;
                    let copy = Arc::new(copy);
                    copies.push((storage, copy.clone()));
                    copy
                }
            };
            if buffer.pending.is_waited_for() {
                account::check_hurry().map_err(at_end)?;
            }
            if !buffer.pending.is_over().map_err(at_end)? && before.iter().all(|own| !Arc::ptr_eq(own, &buffer.pending))
            {
                before.push(buffer.pending.clone());
            }
            inputs.push(buffer);
        }
        let mut outputs: Vec<CudaBuffer> = Vec::with_capacity(self.lowered.outputs.len());
        for output in &self.lowered.outputs {
            // All memory is there before anything is overwritten: what fails fails before.
            let made = match output.over.and_then(|leaf| inputs.get(leaf)) {
                Some(leaf) if leaf.bytes == output.bytes => leaf.taken_over(),
                _ => need.take(&device, output.bytes).map_err(at_end)?,
            };
            outputs.push(made);
        }
        if self.is_torn {
            let handle = self.words.buffer.handle();
            device.when_possible(|stream| stream.write_small(handle, 0, &[0; FLAGS_BYTES])).map_err(at_end)?;
            self.is_torn = false;
        }
        if self.written != words {
            // On the stream, before what reads them; after what read those of the run before. Until all of them are
            // sent, nobody knows what is there.
            self.written.clear();
            for (n, part) in words.chunks(Stream::SMALL_BYTES_MAX).enumerate() {
                let offset = (FLAGS_BYTES + n * Stream::SMALL_BYTES_MAX) as u64;
                let handle = self.words.buffer.handle();
                device.when_possible(|stream| stream.write_small(handle, offset, part)).map_err(at_end)?;
            }
            self.written = words;
        }
        // Of what was in too much of a hurry nothing was sent.
        let tears = |what: &ErrorKind| !matches!(what, ErrorKind::WouldWait);
        let sent = self.send(&inputs, &outputs, before).inspect_err(|what| self.is_torn |= tears(what));
        let sent = sent.map_err(at_end)?;
        if let Some(pending) = sent {
            outputs.iter_mut().for_each(|output| output.pending = pending.clone());
        }
        copies.iter().for_each(|(storage, copy)| storage.keep(copy));
        if !self.lowered.check.is_passed(leaves, &self.written) {
            self.check(plan).inspect_err(|_| self.is_torn = true)?;
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

    /// Whether whoever runs it has to wait for the device: for its kernels one by one, or to hear whether everything
    /// could be computed.
    fn is_waited_for(&self, leaves: &[Value], words: &[u8]) -> bool {
        let is_long = self.takes.is_none_or(|takes| takes > SUPERVISED_AT_ONCE);
        // What takes several batches may find the line full after the first.
        is_long || self.lowered.launches.len() > BATCH_MAX || !self.lowered.check.is_passed(leaves, words)
    }

    /// Sends the launches, as a graph if they were sent before.
    fn send(
        &mut self,
        inputs: &[Arc<CudaBuffer>],
        outputs: &[CudaBuffer],
        before: Vec<Arc<Pending>>,
    ) -> Result<Option<Arc<Pending>>, ErrorKind> {
        let launches = self.lowered.launches.len();
        if launches == 0 {
            return Ok(None);
        }
        let missing = || ErrorKind::Bug { why: "a buffer of a plan is not there".to_owned() };
        let mut handles: Vec<Handle> = Vec::with_capacity(self.named.len());
        let mut buffers: Vec<u32> = Vec::with_capacity(self.named.len());
        self.numbers.clear();
        for named in &self.named {
            let buffer = match named {
                PlanBuffer::Leaf(leaf) => inputs.get(*leaf).map(|leaf| &**leaf),
                PlanBuffer::Output(at) => outputs.get(*at),
                PlanBuffer::Block => self.block.as_ref(),
                PlanBuffer::Words => Some(&self.words),
                PlanBuffer::Workspace => self.workspace.as_deref(),
            };
            let buffer = &buffer.ok_or_else(missing)?.buffer;
            let next = u32::try_from(handles.len()).unwrap_or(u32::MAX);
            let number = self.numbers.of(Arc::as_ptr(buffer).addr() as u64, next);
            buffers.push(number);
            if number == next {
                handles.push(buffer.handle());
            }
        }
        let own = outputs.iter().chain(&self.block).chain(self.workspace.as_deref());
        let overwritten: Vec<Handle> = own.map(|own| own.buffer.handle()).collect();
        self.runs += 1;
        let is_supervised = account::supervisor().is_some();
        let is_watched = is_supervised && self.takes.is_none_or(|takes| takes > SUPERVISED_AT_ONCE);
        let is_graph = !is_watched && self.runs > 1 && (2..=BATCH_MAX).contains(&launches);
        if is_supervised && !is_watched {
            self.device.catch_up(SUPERVISED_AHEAD)?;
            account::between_kernels()?;
        }
        let device = &self.device;
        let mut replayed = None;
        for PlanGraph { graph, .. } in self.graphs.iter().filter(|recorded| is_graph && recorded.buffers == buffers) {
            replayed = device.when_possible(|stream| stream.replay_over(graph, &handles, &overwritten))?;
            if replayed.is_some() {
                count(|counts| counts.graphs_replayed += 1);
                break;
            }
        }
        let completion = match replayed {
            Some(completion) => completion,
            None => {
                let params = self.params(&handles, &buffers).ok_or_else(missing)?;
                let step = |(launch, params)| {
                    let CudaLaunch { kernel, grid, .. }: &CudaLaunch = launch;
                    GraphStep::Launch { kernel, grid: *grid, params }
                };
                let steps: Vec<GraphStep<'_>> = self.lowered.launches.iter().zip(&params).map(step).collect();
                if is_watched {
                    let took = send_watched(&self.device, &steps, &overwritten, &mut self.launches_take)?;
                    self.takes = Some(self.takes.map_or(took, |before| before.min(took)));
                    return Ok(Some(Pending::over(before)));
                }
                if is_graph {
                    let after = &self.lowered.after;
                    let record = |stream: &Stream| block_on(stream.graph_branched(&steps, &overwritten, after));
                    let graph = device.when_done(record)?;
                    count(|counts| counts.graphs_made += 1);
                    let sent = device.when_possible(|stream| stream.replay_over(&graph, &handles, &overwritten))?;
                    self.graphs.insert(0, PlanGraph { graph, buffers });
                    self.graphs.truncate(GRAPHS_MAX);
                    sent.ok_or_else(missing)?
                } else {
                    let mut last = None;
                    for batch in steps.chunks(BATCH_MAX) {
                        last = Some(device.when_possible(|stream| stream.run(batch, &overwritten))?);
                    }
                    last.ok_or_else(missing)?
                }
            }
        };
        let sent = Pending::new(completion, before);
        if is_supervised {
            device.add_ahead(&sent, self.takes.unwrap_or_default());
            account::check_stopped()?;
        }
        Ok(Some(sent))
    }

    /// What each launch is given. None if one names a buffer that is not there.
    fn params(&self, handles: &[Handle], buffers: &[u32]) -> Option<Vec<Params>> {
        let param = |argument: &LaunchArgument| {
            let (buffer, offset) = named_by(argument);
            let at = self.named.iter().position(|named| *named == buffer)?;
            let handle = *handles.get(*buffers.get(at)? as usize)?;
            Some(Param::Buffer { handle, offset })
        };
        let params =
            |launch: &CudaLaunch| launch.arguments.iter().map(param).collect::<Option<Vec<_>>>().map(Params::new);
        self.lowered.launches.iter().map(params).collect()
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

/// Sends the launches of a plan whose supervisor is to be asked in between, and waits for them: one by one until it is
/// known what each takes, and then as many as take little together. What was quick says nothing of what comes after it:
/// a product after twenty sums may take seconds. How long all of them took.
fn send_watched(
    device: &CudaDevice,
    steps: &[GraphStep<'_>],
    overwritten: &[Handle],
    launches_take: &mut Vec<Duration>,
) -> Result<Duration, ErrorKind> {
    // What others have sent is not this plan's time.
    device.catch_up(Duration::ZERO)?;
    let is_known = launches_take.len() == steps.len();
    if !is_known {
        launches_take.clear();
    }
    let mut took = Duration::ZERO;
    let mut left = steps;
    while !left.is_empty() {
        account::between_kernels()?;
        let first = steps.len() - left.len();
        let launches = if is_known { fitting(&launches_take[first..]) } else { 1 };
        let (batch, rest) = left.split_at(launches);
        let began = Instant::now();
        let sent = device.when_possible(|stream| stream.run(batch, overwritten))?;
        count(|counts| counts.round_trips += 1);
        sent.wait().map_err(|error| failed(&error))?;
        let own = began.elapsed();
        took += own;
        left = rest;
        if is_known {
            // Each has its part in what was wrong: that they were waited for one by one, or that others were there.
            let expected: Duration = launches_take[first..first + launches].iter().sum();
            let ratio = own.as_secs_f64() / expected.as_secs_f64().max(1e-9);
            launches_take[first..first + launches].iter_mut().for_each(|takes| *takes = takes.mul_f64(ratio));
        } else {
            launches_take.push(own);
        }
    }
    account::check_stopped()?;
    Ok(took)
}
