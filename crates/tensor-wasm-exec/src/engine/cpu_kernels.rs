//! Kernels on the CPU device, compiled and run by Wasmtime. Groups of a launch are run by as many threads as there are
//! cores, each with an instance of its own; all of them see the launch's buffers in place, mapped into one address
//! space.
//!
//! What keeps a kernel inside its buffers is its own code, as on a GPU. Beyond that, the address space holds nothing
//! but those buffers, whole pages of them, and Wasmtime keeps it from everything else.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tensor_wasm_gpu::{HostCode, HostKernels, HostLaunch, HostMemory, HostModule};
use tensor_wasm_jit::{CALL, CONTROL, HostLayout, Param, RECORD, TrapKind, Ty};
use wasmtime::{Caller, Engine, InstancePre, Linker, Memory, MemoryType, Module, SharedMemory, Store, TypedFunc};

const PAGE: u64 = 4096;

/// Launches of fewer work items than this are run by one thread: waking others takes longer.
const ITEMS_PER_THREAD_MIN: u64 = 1 << 10;

/// Into how many chunks a thread's part of a launch is cut, for those that are done sooner to help the others.
const CHUNKS_PER_THREAD: u64 = 16;

/// Memory that the threads of a launch may have together for themselves. One always works.
const OWN_BYTES_MAX: u64 = 256 << 20;

/// Instances of kernels that are kept, of all kernels in this process, and the memory that one may have to be kept.
const IDLE_INSTANCES_MAX: usize = 512;
const IDLE_INSTANCE_BYTES_MAX: usize = 1 << 20;
static IDLE_INSTANCES: AtomicUsize = AtomicUsize::new(0);

/// Compiles and runs kernels; one for each worker.
struct CpuRunner {
    engine: Engine,
    helpers: HelperThreads,
    /// The address spaces of streams that have kernels.
    spaces: Mutex<HashMap<usize, Weak<AddressSpace>>>,
}

/// What a CPU device is given to run kernels with. Made when the first kernel is loaded.
pub fn host_kernels() -> HostKernels {
    HostKernels(Some(Arc::new(LazyRunner(OnceLock::new()))))
}

struct LazyRunner(OnceLock<Result<CpuRunner, String>>);

impl HostCode for LazyRunner {
    fn load(&self, stream: usize, image: &[u8]) -> Result<Arc<dyn HostModule>, String> {
        let host = self.0.get_or_init(|| CpuRunner::new().map_err(|e| format!("{e:#}")));
        host.as_ref().map_err(Clone::clone)?.load(stream, image)
    }

    fn forget(&self, stream: usize) {
        if let Some(Ok(host)) = self.0.get() {
            let space = host.spaces.lock().get(&stream).and_then(Weak::upgrade);
            if let Some(space) = space {
                space.forget();
            }
        }
    }
}

impl CpuRunner {
    fn new() -> wasmtime::Result<CpuRunner> {
        let mut config = wasmtime::Config::new();
        // A fused multiplication is one, on every machine.
        config.relaxed_simd_deterministic(true).shared_memory(true);
        Ok(CpuRunner { engine: Engine::new(&config)?, helpers: HelperThreads::new(), spaces: Mutex::default() })
    }

    fn load(&self, stream: usize, image: &[u8]) -> Result<Arc<dyn HostModule>, String> {
        let layout = HostLayout::read(image).ok_or("it is not a kernel that was compiled for a CPU")?;
        let module = Module::new(&self.engine, image).map_err(|e| format!("{e:#}"))?;
        let space = {
            let mut spaces = self.spaces.lock();
            spaces.retain(|_, space| space.strong_count() > 0);
            match spaces.get(&stream).and_then(Weak::upgrade) {
                Some(space) => space,
                None => {
                    let space = Arc::new(AddressSpace::new(&self.engine).map_err(|e| format!("{e:#}"))?);
                    spaces.insert(stream, Arc::downgrade(&space));
                    space
                }
            }
        };
        // Whoever links it needs a store of the right type; nothing is looked up in it.
        let mut linker = Linker::new(&self.engine);
        let store = Store::new(&self.engine, None);
        linker.define(&store, "host", "windows", space.memory.clone()).map_err(|e| format!("{e:#}"))?;
        let poll = |caller: Caller<'_, CurrentLaunch>| {
            let verdict = caller.data().as_ref().and_then(|launch| launch.verdict());
            verdict.map_or(0, |kind| (kind as u32).cast_signed())
        };
        linker.func_wrap("host", "poll", poll).map_err(|e| format!("{e:#}"))?;
        let pre = linker.instantiate_pre(&module).map_err(|e| format!("{e:#}"))?;
        let params = params(&layout);
        let helpers = self.helpers.clone();
        let kernel = Kernel { pre, layout, params, space, helpers, idle: Mutex::default() };
        Ok(Arc::new(CpuModule(Arc::new(kernel))))
    }
}

/// Where each parameter is in a launch's block: one after the other, naturally aligned, as in PTX.
fn params(layout: &HostLayout) -> Vec<(u32, u32)> {
    let own = layout.params.iter().flat_map(|param| match param {
        Param::Window => &[8, 4, 4][..],
        Param::Scalar(Ty::I32 | Ty::F32) => &[4],
        Param::Scalar(Ty::I64 | Ty::F64) => &[8],
    });
    let mut end = 0_u32;
    own.chain(&[8, 8, 8, 4])
        .map(|bytes| {
            let offset = end.next_multiple_of(*bytes);
            end = offset + bytes;
            (offset, *bytes)
        })
        .collect()
}

struct CpuModule(Arc<Kernel>);

/// A kernel of a tenant. An image has one.
struct Kernel {
    pre: InstancePre<CurrentLaunch>,
    layout: HostLayout,
    params: Vec<(u32, u32)>,
    space: Arc<AddressSpace>,
    helpers: HelperThreads,
    /// Instances that are not in use.
    idle: Mutex<Vec<KernelInstance>>,
}

/// An address space that kernels of one stream see their buffers in.
struct AddressSpace {
    memory: SharedMemory,
    mapped: Mutex<MappedWindows>,
    is_stale: AtomicBool,
}

#[derive(Default)]
struct MappedWindows {
    /// Pages of the device, and where they are here.
    windows: Vec<Window>,
    end: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Window {
    address: u64,
    size: u64,
    /// In the kernel's address space.
    start: u32,
}

impl AddressSpace {
    fn new(engine: &Engine) -> wasmtime::Result<AddressSpace> {
        // All of a kernel's addresses are reserved; what can be touched is mapped for each launch.
        let memory = SharedMemory::new(engine, MemoryType::shared(1, 1 << 16))?;
        Ok(AddressSpace { memory, mapped: Mutex::default(), is_stale: AtomicBool::new(false) })
    }

    /// Where an address of the kernel's is.
    fn at(&self, address: u64) -> *mut u8 {
        let base: *mut u8 = self.memory.data().as_ptr().cast_mut().cast();
        base.wrapping_add(usize::try_from(address).unwrap_or(0))
    }

    /// Has the windows mapped and nothing else. Returns where they begin, or why it cannot be done. What was mapped for
    /// the launch before stays if it is the same.
    fn map(
        &self,
        mapped: &mut MappedWindows,
        memory: &HostMemory,
        wanted: &[(u64, u64)],
        from: u64,
        to: u64,
    ) -> Result<Vec<u32>, String> {
        let mut next = from.next_multiple_of(PAGE);
        let mut windows = Vec::with_capacity(wanted.len());
        for (address, size) in wanted {
            let start = next + address % PAGE;
            // A page between two of them belongs to neither.
            next = (start + size).next_multiple_of(PAGE) + PAGE;
            let fits = u32::try_from(start).ok().filter(|_| next <= to);
            let start = fits.ok_or("its buffers do not fit into 32-bit addresses")?;
            windows.push(Window { address: *address, size: *size, start });
        }
        let starts = windows.iter().map(|window| window.start).collect();
        if windows == mapped.windows && !self.is_stale.swap(false, Ordering::Relaxed) {
            return Ok(starts);
        }
        self.clear(mapped)?;
        mapped.end = next;
        for Window { address, size, start } in &windows {
            let low = address - address % PAGE;
            let len = (address + size).next_multiple_of(PAGE) - low;
            if *size == 0 {
                continue;
            }
            let at = self.at(u64::from(*start) - address % PAGE);
            // SAFETY: the range lies within the address space that Wasmtime reserved for this memory, below its end
            // (`to`), beyond the page that it knows about. No kernel runs on it: the lock is held.
            #[expect(unsafe_code, reason = "buffers are seen in place")]
            let aliased = unsafe { memory.alias(low, len, at) };
            aliased.map_err(|e| format!("its buffers cannot be mapped: {e}"))?;
        }
        mapped.windows = windows;
        Ok(starts)
    }

    /// Unmaps everything.
    fn clear(&self, mapped: &mut MappedWindows) -> Result<(), String> {
        let first = 1 << 16;
        mapped.windows.clear();
        self.is_stale.store(false, Ordering::Relaxed);
        if mapped.end > first {
            let at = self.at(first);
            // SAFETY: as in `map`; the first pages, which Wasmtime mapped, stay.
            #[expect(unsafe_code, reason = "buffers that are not passed are not there")]
            let hidden = unsafe { HostMemory::hide(mapped.end - first, at) };
            hidden.map_err(|e| format!("its buffers cannot be unmapped: {e}"))?;
        }
        mapped.end = 0;
        Ok(())
    }

    /// Some memory was given back.
    fn forget(&self) {
        self.is_stale.store(true, Ordering::Relaxed);
        // While a launch is under way the next one sees to it, or the next time that memory is given back.
        if let Some(mut mapped) = self.mapped.try_lock() {
            let _ = self.clear(&mut mapped);
        }
    }
}

/// An instance of a kernel, for one thread.
struct KernelInstance {
    store: Store<CurrentLaunch>,
    own: Memory,
    run: TypedFunc<(), i32>,
}

/// The launch that an instance works on.
type CurrentLaunch = Option<Arc<RunningLaunch>>;

/// A launch, which several threads work on.
struct RunningLaunch {
    next: AtomicU64,
    groups: u64,
    chunk: u64,
    is_over: AtomicBool,
    until: Instant,
    /// What every thread's own memory begins with.
    call: Vec<u8>,
    items: u32,
    /// Where whoever launched it says that it is not wanted any more.
    memory: Arc<HostMemory>,
    record: u64,
    launch: u64,
    /// The first trap: kind, site, which memory, offset, then six numbers of group and item.
    trap: Mutex<Option<[u32; 10]>>,
    /// Helpers at work on it, and whether no more may begin; and who waits for them.
    helping: AtomicUsize,
    waiting: Thread,
}

impl RunningLaunch {
    fn stop(&self, trap: [u32; 10]) {
        self.trap.lock().get_or_insert(trap);
        self.is_over.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> Option<(u64, u64)> {
        if self.is_over.load(Ordering::Relaxed) {
            return None;
        }
        let first = self.next.fetch_add(self.chunk, Ordering::Relaxed);
        (first < self.groups).then(|| (first, self.chunk.min(self.groups - first)))
    }

    /// Begins to help, unless the launch is over: nobody waits for helpers that are busy with another one.
    fn join(&self) -> bool {
        let more = |n: usize| (n & CLOSED == 0).then_some(n + 1);
        self.helping.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    fn leave(&self) {
        if self.helping.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1 {
            self.waiting.unpark();
        }
    }

    /// Lets no more helpers begin and waits for those at work.
    fn close(&self) {
        self.helping.fetch_or(CLOSED, Ordering::AcqRel);
        while self.helping.load(Ordering::Acquire) != CLOSED {
            std::thread::park();
        }
    }

    /// Why the launch has to end now.
    fn verdict(&self) -> Option<TrapKind> {
        let mut cancelled = [0; 8];
        let is_read = self.memory.read(self.record + u64::from(RECORD.cancelled), &mut cancelled);
        if is_read && u64::from_le_bytes(cancelled) == self.launch {
            return Some(TrapKind::Cancelled);
        }
        if Instant::now() > self.until {
            return Some(TrapKind::Deadline);
        }
        // Another thread trapped, and what it left is the launch's trap.
        self.is_over.load(Ordering::Relaxed).then_some(TrapKind::Cancelled)
    }
}

/// Leaves, whatever happens.
struct LeaveOnDrop<'a>(&'a RunningLaunch);

impl Drop for LeaveOnDrop<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// In the number of helpers: no more may begin.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// A trap without a place.
fn bare(kind: TrapKind) -> [u32; 10] {
    [kind as u32, 0, RECORD.nothing, 0, 0, 0, 0, 0, 0, 0]
}

impl HostModule for CpuModule {
    fn params(&self, _kernel: &str) -> Option<Vec<(u32, u32)>> {
        Some(self.0.params.clone())
    }

    fn launch(&self, launch: &HostLaunch<'_>) {
        let Some(block) = LaunchParams::read(&self.0.layout, &self.0.params, launch.params) else { return };
        let trap = self.0.launch(launch, &block).unwrap_or_else(|why| {
            tracing::error!(why, "a kernel could not be run on the CPU");
            Some(bare(TrapKind::Unreachable))
        });
        let Some(trap) = trap else { return };
        let bytes: Vec<u8> = trap.into_iter().flat_map(u32::to_le_bytes).collect();
        launch.memory.write(block.record + u64::from(RECORD.kind), &bytes);
        launch.memory.write(block.record + u64::from(RECORD.launch), &block.launch.to_le_bytes());
    }
}

/// A launch's parameters, read.
struct LaunchParams {
    own: Vec<Argument>,
    record: u64,
    launch: u64,
    budget: Duration,
}

#[derive(Clone, Copy)]
enum Argument {
    Bits(u64),
    Window { address: u64, size: u64 },
}

impl LaunchParams {
    fn read(layout: &HostLayout, places: &[(u32, u32)], bytes: &[u8]) -> Option<LaunchParams> {
        let mut places = places.iter();
        let mut number = || {
            let (offset, size) = places.next()?;
            let field = bytes.get(*offset as usize..(*offset + *size) as usize)?;
            let mut whole = [0; 8];
            whole[..field.len()].copy_from_slice(field);
            Some(u64::from_le_bytes(whole))
        };
        let mut own = Vec::with_capacity(layout.params.len());
        for param in &layout.params {
            own.push(match param {
                Param::Scalar(_) => Argument::Bits(number()?),
                Param::Window => {
                    let address = number()?;
                    // Where the window begins is decided here, by how its pages lie.
                    number()?;
                    Argument::Window { address, size: number()? }
                }
            });
        }
        let (_control, record, launch, budget) = (number()?, number()?, number()?, number()?);
        Some(LaunchParams { own, record, launch, budget: Duration::from_nanos(budget << CONTROL.tick_shift) })
    }
}

impl Kernel {
    fn launch(self: &Arc<Self>, launch: &HostLaunch<'_>, block: &LaunchParams) -> Result<Option<[u32; 10]>, String> {
        // Held while the kernel runs: what it sees stays where it is.
        let mut mapped = self.space.mapped.lock();
        let window = |argument: &Argument| match argument {
            Argument::Window { address, size } => Some((*address, *size)),
            Argument::Bits(_) => None,
        };
        let windows: Vec<(u64, u64)> = block.own.iter().filter_map(window).collect();
        let (from, to) = (u64::from(self.layout.windows_from), u64::from(self.layout.windows_to));
        let starts = self.space.map(&mut mapped, launch.memory, &windows, from, to)?;
        let groups: u64 = launch.groups.iter().map(|n| u64::from(*n)).product();
        let items: u32 = launch.items.iter().product();
        let threads = groups.saturating_mul(u64::from(items)) / ITEMS_PER_THREAD_MIN;
        // Stacks and contexts of a group are each thread's own.
        let affordable = OWN_BYTES_MAX / self.layout.memory(items).0.max(1);
        let threads = threads.min(affordable).clamp(1, self.helpers.threads() as u64).min(groups);
        let running = Arc::new(RunningLaunch {
            next: AtomicU64::new(0),
            groups,
            chunk: (groups / (threads * CHUNKS_PER_THREAD)).max(1),
            is_over: AtomicBool::new(false),
            until: Instant::now() + block.budget,
            call: self.call_block(block, launch, &starts),
            items,
            memory: launch.memory.clone(),
            record: block.record,
            launch: block.launch,
            trap: Mutex::new(None),
            helping: AtomicUsize::new(0),
            waiting: std::thread::current(),
        });
        self.helpers.help(self, &running, usize::try_from(threads - 1).unwrap_or(0));
        self.work(&running);
        running.close();
        // Pinned memory may be another guest's by the next launch.
        let is_lent = windows.iter().any(|(address, _)| launch.memory.is_slab(*address));
        if is_lent || self.space.is_stale.load(Ordering::Relaxed) {
            self.space.clear(&mut mapped)?;
        }
        Ok(*running.trap.lock())
    }

    fn call_block(&self, block: &LaunchParams, launch: &HostLaunch<'_>, starts: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0; CALL.params as usize + CALL.param_bytes as usize * block.own.len()];
        let mut put = |at: u32, value: &[u8]| bytes[at as usize..at as usize + value.len()].copy_from_slice(value);
        for axis in 0..3 {
            put(CALL.items + 4 * axis, &launch.items[axis as usize].to_le_bytes());
            put(CALL.groups + 4 * axis, &launch.groups[axis as usize].to_le_bytes());
        }
        let (_, stacks, contexts) = self.layout.memory(launch.items.iter().product());
        put(CALL.stacks, &stacks.to_le_bytes());
        put(CALL.contexts, &contexts.to_le_bytes());
        let mut starts = starts.iter();
        for (argument, at) in block.own.iter().zip((CALL.params..).step_by(CALL.param_bytes as usize)) {
            match argument {
                Argument::Bits(bits) => put(at, &bits.to_le_bytes()),
                Argument::Window { size, .. } => {
                    put(at, &starts.next().copied().unwrap_or(0).to_le_bytes());
                    put(at + 4, &u32::try_from(*size).unwrap_or(u32::MAX).to_le_bytes());
                }
            }
        }
        bytes
    }

    /// Runs chunks of a launch until there are none.
    fn work(&self, running: &Arc<RunningLaunch>) {
        let idle = self.idle.lock().pop();
        if idle.is_some() {
            IDLE_INSTANCES.fetch_sub(1, Ordering::Relaxed);
        }
        let instance = idle.map_or_else(|| self.instance(), Ok);
        let result = instance.and_then(|mut instance| {
            *instance.store.data_mut() = Some(running.clone());
            let trap = instance.run_chunks(&self.layout, running)?;
            *instance.store.data_mut() = None;
            self.keep(instance);
            Ok(trap)
        });
        match result {
            Ok(None) => {}
            Ok(Some(trap)) => running.stop(trap),
            Err(error) => {
                // The fence did not hold, and Wasmtime's did; or there was no memory for its items.
                tracing::error!(error = format!("{error:#}"), "a kernel on the CPU could not be run");
                running.stop(bare(TrapKind::OutOfBounds));
            }
        }
    }

    /// Keeps an instance for the next launch, unless it is large or there are many: each has 4 GiB of addresses.
    fn keep(&self, instance: KernelInstance) {
        let is_small = instance.own.data_size(&instance.store) <= IDLE_INSTANCE_BYTES_MAX;
        let more = |n: usize| (n < IDLE_INSTANCES_MAX).then_some(n + 1);
        if is_small && IDLE_INSTANCES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok() {
            self.idle.lock().push(instance);
        }
    }

    fn instance(&self) -> wasmtime::Result<KernelInstance> {
        let mut store: Store<CurrentLaunch> = Store::new(self.pre.module().engine(), None);
        let instance = self.pre.instantiate(&mut store)?;
        let own = instance.get_memory(&mut store, "own").ok_or_else(|| wasmtime::Error::msg("it has no memory"))?;
        let run = instance.get_typed_func::<(), i32>(&mut store, "run")?;
        Ok(KernelInstance { store, own, run })
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        IDLE_INSTANCES.fetch_sub(self.idle.lock().len(), Ordering::Relaxed);
    }
}

impl KernelInstance {
    fn run_chunks(&mut self, layout: &HostLayout, running: &RunningLaunch) -> wasmtime::Result<Option<[u32; 10]>> {
        let (bytes, ..) = layout.memory(running.items);
        let pages = bytes.div_ceil(1 << 16);
        let has = self.own.size(&self.store);
        if pages > has {
            self.own.grow(&mut self.store, pages - has)?;
        }
        self.own.write(&mut self.store, 0, &running.call)?;
        while let Some((first, count)) = running.take() {
            self.own.write(&mut self.store, CALL.first as usize, &first.to_le_bytes())?;
            self.own.write(&mut self.store, CALL.count as usize, &count.to_le_bytes())?;
            if self.run.call(&mut self.store, ())? != 0 {
                let mut trap = [0; 10];
                let left = &self.own.data(&self.store)[CALL.trap as usize..];
                for (word, bytes) in trap.iter_mut().zip(left.chunks_exact(4)) {
                    *word = bytes.try_into().map_or(0, u32::from_le_bytes);
                }
                return Ok(Some(trap));
            }
        }
        Ok(None)
    }
}

/// Threads that help with launches, shared by all streams of a device: one fewer than there are cores, because whoever
/// launches works too.
#[derive(Clone)]
struct HelperThreads(Arc<Vec<SyncSender<HelpRequest>>>);

/// A launch to help with.
type HelpRequest = (Arc<Kernel>, Arc<RunningLaunch>);

impl HelperThreads {
    fn new() -> HelperThreads {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let helper = |n: usize| {
            let (sender, tasks) = sync_channel::<HelpRequest>(1);
            let run = move || {
                for (kernel, running) in tasks {
                    if running.join() {
                        let _leaves = LeaveOnDrop(&running);
                        kernel.work(&running);
                    }
                }
            };
            let spawned = std::thread::Builder::new().name(format!("kernel-{n}")).spawn(run);
            spawned.ok().map(|_| sender)
        };
        HelperThreads(Arc::new((1..cores).filter_map(helper).collect()))
    }

    fn threads(&self) -> usize {
        self.0.len() + 1
    }

    /// Asks so many threads to help. One that is busy comes when that is done, if this launch is not; one that was
    /// asked by another meanwhile does not.
    fn help(&self, kernel: &Arc<Kernel>, running: &Arc<RunningLaunch>, threads: usize) {
        for helper in self.0.iter().take(threads) {
            let _ = helper.try_send((kernel.clone(), running.clone()));
        }
    }
}
