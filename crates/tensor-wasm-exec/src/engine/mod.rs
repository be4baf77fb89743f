//! The Wasmtime engines: how guests are compiled, where their memory comes from, and the clock that interrupts them.
//!
//! There are three, one for each [`EngineKind`]. Concurrency support (WASI 0.3, component-model async) makes every
//! component call keep task bookkeeping, so components that do not use it run on the engine without. Core modules that
//! pass kernels pointers into their own memory run on a third, whose memories the device sees.
//!
//! But for that third, memory comes from Wasmtime's pooling allocator with copy-on-write images. A slot is reset by
//! scanning which of its pages were touched (`PAGEMAP_SCAN`) and copying those back, so that between two guests on the
//! same slot nothing is unmapped, no page faults again and no other core's TLB is flushed.

pub mod compile;
pub mod cpu_kernels;
pub(crate) mod pinned;
pub mod pool;

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use wasmtime::{Enabled, InstanceAllocationStrategy, OptLevel, PoolingAllocationConfig, RegallocAlgorithm};

use crate::catalog::{Flavor, MemoryKind};
use crate::config::{Config, Optimize, SLOT_MEMORY_BYTES};
use crate::engine::pinned::{Creator, PinnedMemories};

/// How often running guests are interrupted: the granularity of deadlines and of time-slicing between guests. A tick
/// costs one store per engine.
pub const TICK: Duration = Duration::from_millis(1);

/// Without a guest running for this long, the clock stops ticking until the next one starts.
const IDLE_TICKS: u32 = 100;

/// What one call may take of the pool: a component from today's compilers has four core instances, one or two memories
/// and three tables. The pool holds this much for every call that may run and for every instance that may be kept, so
/// no tenant can take it from another. Slots cost address space only: 512 × 4 × 4 GiB are 8 of the 128 TiB there are.
pub(crate) const CORE_INSTANCES_PER_CALL: u32 = 16;
pub(crate) const MEMORIES_PER_CALL: u32 = 4;
pub(crate) const TABLES_PER_CALL: u32 = 8;

/// Room that Rust host functions need on the guest's stack beyond what the guest itself may use.
const HOST_STACK_BYTES: usize = 512 << 10;

/// Which engine a guest is compiled for and runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// Core modules, and components without WASI 0.3.
    Plain,
    /// Components of WASI 0.3.
    Concurrent,
    /// Core modules whose memories the device sees, instead of a pool's.
    Pinned,
}

impl EngineKind {
    pub const ALL: [EngineKind; 3] = [EngineKind::Plain, EngineKind::Concurrent, EngineKind::Pinned];

    pub fn of(flavor: Flavor, memory: MemoryKind) -> EngineKind {
        match (flavor, memory) {
            (Flavor::Plain, MemoryKind::Pooled) => EngineKind::Plain,
            (Flavor::Plain, MemoryKind::Pinned) => EngineKind::Pinned,
            (Flavor::Concurrent, _) => EngineKind::Concurrent,
        }
    }
}

/// One of each kind of something.
pub(crate) struct ByEngine<T>([T; EngineKind::ALL.len()]);

impl<T> ByEngine<T> {
    pub(crate) fn try_new(mut make: impl FnMut(EngineKind) -> wasmtime::Result<T>) -> wasmtime::Result<ByEngine<T>> {
        let [plain, concurrent, pinned] = EngineKind::ALL;
        Ok(ByEngine([make(plain)?, make(concurrent)?, make(pinned)?]))
    }

    pub(crate) fn get(&self, kind: EngineKind) -> &T {
        &self.0[kind as usize]
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }
}

pub struct Engines {
    engines: ByEngine<Identified>,
    pub(crate) pinned: Arc<PinnedMemories>,
    clock: Arc<Clock>,
}

struct Identified {
    engine: wasmtime::Engine,
    id: String,
}

impl Engines {
    /// The engines guests run on.
    pub fn new(config: &Config) -> wasmtime::Result<Engines> {
        let pinned = Arc::<PinnedMemories>::default();
        let engines = ByEngine::try_new(|kind| {
            let mut settings = compiler_config(&config.engine, kind);
            match kind {
                EngineKind::Plain | EngineKind::Concurrent => {
                    settings.allocation_strategy(InstanceAllocationStrategy::Pooling(pool(config)))
                }
                EngineKind::Pinned => settings.with_host_memory(Arc::new(Creator(pinned.clone()))),
            };
            let engine = wasmtime::Engine::new(&settings)?;
            Ok(Identified { id: identity(&engine), engine })
        })?;
        let clock = Clock::start(engines.iter().map(|made| made.engine.weak()).collect())?;
        Ok(Engines { engines, pinned, clock })
    }

    pub fn get(&self, kind: EngineKind) -> &wasmtime::Engine {
        &self.engines.get(kind).engine
    }

    /// A name for everything that compiled code depends on: version, target, flags. Artifacts are kept under it.
    pub fn id(&self, kind: EngineKind) -> &str {
        &self.engines.get(kind).id
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }
}

/// What decides the compiled code. The compile worker uses it without a pool, which does not affect code.
pub fn compiler_config(engine: &crate::config::Engine, kind: EngineKind) -> wasmtime::Config {
    let mut config = wasmtime::Config::new();
    config
        .cranelift_opt_level(match engine.optimize {
            Optimize::None => OptLevel::None,
            Optimize::Speed => OptLevel::Speed,
            Optimize::SpeedAndSize => OptLevel::SpeedAndSize,
        })
        .cranelift_regalloc_algorithm(match engine.optimize {
            Optimize::None => RegallocAlgorithm::SinglePass,
            _ => RegallocAlgorithm::Backtracking,
        })
        .epoch_interruption(true)
        .max_wasm_stack(engine.stack_bytes_max)
        .async_stack_size(engine.stack_bytes_max + HOST_STACK_BYTES)
        .memory_reservation(SLOT_MEMORY_BYTES)
        .memory_may_move(false)
        // What a pinned memory begins with is copied into it: it is not the engine's to map.
        .memory_init_cow(kind != EngineKind::Pinned)
        // Shared memory would let a guest outlive its call on another thread.
        .wasm_threads(false)
        .concurrency_support(kind == EngineKind::Concurrent);
    config
}

fn pool(config: &Config) -> PoolingAllocationConfig {
    let calls = u32::try_from(config.server.concurrency_max).unwrap_or(u32::MAX);
    // Twice: running, and kept for reuse.
    let calls = calls.saturating_mul(2).max(16);
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(calls)
        .total_core_instances(calls.saturating_mul(CORE_INSTANCES_PER_CALL))
        .total_memories(calls.saturating_mul(MEMORIES_PER_CALL))
        .total_tables(calls.saturating_mul(TABLES_PER_CALL))
        .total_stacks(calls)
        .total_gc_heaps(calls)
        .max_core_instances_per_component(CORE_INSTANCES_PER_CALL)
        .max_memories_per_component(MEMORIES_PER_CALL)
        .max_tables_per_component(TABLES_PER_CALL)
        .max_memories_per_module(MEMORIES_PER_CALL)
        .max_tables_per_module(TABLES_PER_CALL)
        .table_elements(usize::try_from(config.table_elements_max()).unwrap_or(usize::MAX))
        .max_memory_size(usize::try_from(SLOT_MEMORY_BYTES).unwrap_or(usize::MAX))
        .linear_memory_keep_resident(config.engine.keep_resident_bytes)
        .table_keep_resident(64 << 10)
        .async_stack_keep_resident(0)
        .max_unused_warm_slots(calls)
        .pagemap_scan(Enabled::Auto);
    pool
}

fn identity(engine: &wasmtime::Engine) -> String {
    struct Digest(blake3::Hasher);
    impl Hasher for Digest {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            0
        }
    }
    let mut digest = Digest(blake3::Hasher::new());
    engine.precompile_compatibility_hash().hash(&mut digest);
    digest.0.finalize().to_hex()[..16].to_owned()
}

/// Advances the engines' epochs while guests run, and rests while none do.
pub(crate) struct Clock {
    running: AtomicUsize,
    resting: AtomicBool,
    stopped: AtomicBool,
    thread: std::sync::OnceLock<Thread>,
}

/// Keeps the clock ticking while it lives.
pub(crate) struct Ticking<'a>(&'a Clock);

impl Clock {
    fn start(engines: Vec<wasmtime::EngineWeak>) -> wasmtime::Result<Arc<Clock>> {
        let clock = Arc::new(Clock {
            running: AtomicUsize::new(0),
            resting: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            thread: std::sync::OnceLock::new(),
        });
        let shared = clock.clone();
        let handle = std::thread::Builder::new().name("epoch-clock".to_owned()).spawn(move || shared.run(&engines))?;
        let _ = clock.thread.set(handle.thread().clone());
        Ok(clock)
    }

    fn run(&self, engines: &[wasmtime::EngineWeak]) {
        let mut idle_ticks = 0;
        let mut next = Instant::now() + TICK;
        while !self.stopped.load(Ordering::Relaxed) {
            if self.running.load(Ordering::SeqCst) > 0 {
                idle_ticks = 0;
            } else if idle_ticks < IDLE_TICKS {
                idle_ticks += 1;
            } else {
                self.resting.store(true, Ordering::SeqCst);
                // A guest that started between the check above and the store sees `resting` or is seen here.
                if self.running.load(Ordering::SeqCst) == 0 {
                    std::thread::park();
                }
                self.resting.store(false, Ordering::SeqCst);
                idle_ticks = 0;
                next = Instant::now() + TICK;
            }
            std::thread::park_timeout(next.saturating_duration_since(Instant::now()));
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + TICK;
            let mut alive = false;
            for engine in engines.iter().filter_map(wasmtime::EngineWeak::upgrade) {
                engine.increment_epoch();
                alive = true;
            }
            if !alive {
                return;
            }
        }
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    pub(crate) fn ticking(&self) -> Ticking<'_> {
        self.running.fetch_add(1, Ordering::SeqCst);
        if self.resting.load(Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
        Ticking(self)
    }
}

impl Drop for Ticking<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        self.clock.stop();
    }
}
