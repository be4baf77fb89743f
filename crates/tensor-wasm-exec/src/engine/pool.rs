//! From a revision to a running instance: the step from `Permit` to `Lease`.
//!
//! A revision is loaded once (its artifact mapped, its imports resolved, its exports listed) and stays loaded while it is
//! among the most recently used. A lease is an instance of it, fresh from Wasmtime's pool of memories, or, where the
//! function's author allows reuse, one that served an earlier call of the same function. A faulted instance never goes
//! back, and instances are never shared between functions, even of the same bytes: they may belong to two tenants.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::OnceCell;
use wasmtime::{PoolConcurrencyLimitError, Store, component};
use wasmtime_wasi::{p2, p3};
use wasmtime_wasi_http::{p2 as http_p2, p3 as http_p3};

use crate::HashMap;
use crate::admission::Permit;
use crate::catalog::{Catalog, Flavor, Kind, MemoryKind, Serving, SourceHash};
use crate::engine::Engines;
use crate::engine::compile::{self, Code};
use crate::failure::{Bug, Failure, Rejection};
use crate::guest::budget::Refused;
use crate::guest::component::ComponentExport;
use crate::guest::core::CoreExport;
use crate::guest::running::{Given, RunningCall};
use crate::guest::state::State;
use crate::guest::{GuestError, fault, gpu, state};
use crate::metrics::Metrics;

/// Host memory a component's call may fill with lifted values before it is stopped. A `list<u8>` result costs some
/// thirty times its size as values, so this must not follow the guest's memory limit.
const LIFTED_BYTES_MAX: usize = 64 << 20;

/// A call may be served by an instance this often before a new one takes its place: a slow leak in a guest stays small.
const REUSES_MAX: u32 = 10_000;

pub(crate) struct Pool {
    pub engines: Arc<Engines>,
    linkers: Linkers,
    loaded: Table,
    /// Those whose memories the device sees.
    loaded_pinned: Table,
    loaded_max: usize,
    idle_max: usize,
    idle: Arc<AtomicUsize>,
    uses: AtomicU64,
    background: Handle,
    metrics: Arc<Metrics>,
}

type Table = Mutex<HashMap<SourceHash, Arc<Slot>>>;

struct Linkers {
    core: wasmtime::Linker<State>,
    core_on_device: wasmtime::Linker<State>,
    plain: component::Linker<State>,
    concurrent: component::Linker<State>,
}

#[derive(Default)]
struct Slot {
    loaded: OnceCell<Arc<Loaded>>,
    last_use: AtomicU64,
}

/// A revision ready to be instantiated.
pub(crate) struct Loaded {
    pub entry: Entry,
    flavor: Flavor,
    memory: MemoryKind,
    /// Kept instances by function id, for functions that allow it.
    idle: Mutex<HashMap<String, Vec<Kept>>>,
}

/// How a revision is entered, with its imports already resolved.
pub(crate) enum Entry {
    Core { pre: wasmtime::InstancePre<State>, exports: Vec<CoreExport> },
    CoreCommand(wasmtime::InstancePre<State>),
    Component { pre: component::InstancePre<State>, exports: Vec<ComponentExport> },
    CommandP2(p2::bindings::CommandPre<State>),
    CommandP3(p3::bindings::CommandPre<State>),
    HttpP2(http_p2::bindings::ProxyPre<State>),
    HttpP3(http_p3::bindings::ServicePre<State>),
}

pub(crate) enum Instance {
    Core(wasmtime::Instance),
    Component(component::Instance),
    CommandP2(p2::bindings::Command),
    CommandP3(p3::bindings::Command),
    HttpP2(http_p2::bindings::Proxy),
    /// Taken while a call runs in it.
    HttpP3(Option<http_p3::bindings::Service>),
}

/// An instance waiting for its function's next call.
struct Kept {
    store: Store<State>,
    instance: Instance,
    reuses: u32,
    _counted: Counted,
}

/// An instance to run one call in, and the permit to do so.
pub(crate) struct Lease {
    // Dropped in this order: the store gives its memory back before the permit lets the next call in.
    pub store: Store<State>,
    pub instance: Instance,
    reuses: u32,
    _permit: Permit,
}

impl Entry {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Entry::Core { .. } => "core module",
            Entry::CoreCommand(_) | Entry::CommandP2(_) | Entry::CommandP3(_) => "command",
            Entry::Component { .. } => "component",
            Entry::HttpP2(_) | Entry::HttpP3(_) => "wasi:http",
        }
    }
}

impl Pool {
    pub(crate) fn new(
        engines: Arc<Engines>,
        config: &crate::config::Config,
        background: Handle,
        metrics: Arc<Metrics>,
    ) -> wasmtime::Result<Pool> {
        let core = |engine: &wasmtime::Engine| -> wasmtime::Result<_> {
            let mut linker = wasmtime::Linker::new(engine);
            wasmtime_wasi::p1::add_to_linker_async(&mut linker, State::p1)?;
            gpu::flat::add_to_linker(&mut linker)?;
            Ok(linker)
        };
        let (core, core_on_device) = (core(&engines.plain)?, core(&engines.on_device)?);
        let mut plain = component::Linker::new(&engines.plain);
        p2::add_to_linker_async(&mut plain)?;
        http_p2::add_only_http_to_linker_async(&mut plain)?;
        gpu::component::add_to_linker(&mut plain)?;
        let mut concurrent = component::Linker::new(&engines.concurrent);
        p2::add_to_linker_async(&mut concurrent)?;
        http_p2::add_only_http_to_linker_async(&mut concurrent)?;
        p3::add_to_linker(&mut concurrent)?;
        http_p3::add_to_linker(&mut concurrent)?;
        gpu::component::add_to_linker(&mut concurrent)?;
        Ok(Pool {
            engines,
            linkers: Linkers { core, core_on_device, plain, concurrent },
            loaded: Mutex::default(),
            loaded_pinned: Mutex::default(),
            loaded_max: config.engine.loaded_max,
            idle_max: config.server.concurrency_max,
            idle: Arc::default(),
            uses: AtomicU64::new(0),
            background,
            metrics,
        })
    }

    /// What was deployed, if it is loaded already.
    pub(crate) fn loaded(&self, source: &SourceHash, memory: MemoryKind) -> Option<Arc<Loaded>> {
        let loaded = self.table(memory).lock();
        let slot = loaded.get(source)?;
        slot.last_use.store(self.uses.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        slot.loaded.get().cloned()
    }

    /// The revision, loaded; `recompile` is asked for its artifact where there is none that fits.
    pub(crate) async fn load<R>(
        self: &Arc<Self>,
        catalog: &Arc<Catalog>,
        source: &SourceHash,
        kind: Kind,
        flavor: Flavor,
        memory: MemoryKind,
        recompile: R,
    ) -> Result<Arc<Loaded>, Failure>
    where
        R: AsyncFnOnce() -> Result<(), Failure>,
    {
        let slot = self.slot(source, memory);
        if let Some(loaded) = slot.loaded.get() {
            return Ok(loaded.clone());
        }
        let map = || {
            let (pool, catalog, source) = (self.clone(), catalog.clone(), source.clone());
            let work = move || {
                let code = compile::load(&catalog, &pool.engines, &source, flavor, memory)?;
                Some(pool.link(code, kind, flavor, memory))
            };
            let joined = self.background.spawn_blocking(work);
            async { joined.await.map_err(|e| Failure::from(Bug(e.to_string()))) }
        };
        let loaded = slot
            .loaded
            .get_or_try_init(async || {
                if let Some(linked) = map().await? {
                    return linked.map(Arc::new).map_err(Failure::from);
                }
                recompile().await?;
                let linked =
                    map().await?.ok_or_else(|| Bug("an artifact vanished after it was compiled".to_owned()))?;
                linked.map(Arc::new).map_err(Failure::from)
            })
            .await?;
        Ok(loaded.clone())
    }

    /// Resolves imports and lists exports. An import nobody provides is named in the rejection.
    pub(crate) fn link(&self, code: Code, kind: Kind, flavor: Flavor, memory: MemoryKind) -> Result<Loaded, Rejection> {
        let unlinked = |e: wasmtime::Error| Rejection::InvalidWasm { why: format!("{e:#}") };
        let entry = match code {
            Code::Module(module) => {
                let linker = match memory {
                    MemoryKind::Pooled => &self.linkers.core,
                    MemoryKind::Pinned => &self.linkers.core_on_device,
                };
                let pre = linker.instantiate_pre(&module).map_err(unlinked)?;
                match kind {
                    Kind::CoreCommand => Entry::CoreCommand(pre),
                    _ => Entry::Core { pre, exports: crate::guest::core::exports(&module) },
                }
            }
            Code::Component(component) => {
                let linker = match flavor {
                    Flavor::Plain => &self.linkers.plain,
                    Flavor::Concurrent => &self.linkers.concurrent,
                };
                let pre = linker.instantiate_pre(&component).map_err(unlinked)?;
                match kind {
                    Kind::HttpHandler => match http_p2::bindings::ProxyPre::new(pre.clone()) {
                        Ok(proxy) => Entry::HttpP2(proxy),
                        Err(_) => Entry::HttpP3(http_p3::bindings::ServicePre::new(pre).map_err(unlinked)?),
                    },
                    Kind::ComponentCommand => match p2::bindings::CommandPre::new(pre.clone()) {
                        Ok(command) => Entry::CommandP2(command),
                        Err(_) => Entry::CommandP3(p3::bindings::CommandPre::new(pre).map_err(unlinked)?),
                    },
                    _ => Entry::Component { pre, exports: crate::guest::component::exports(&component) },
                }
            }
        };
        self.metrics.artifact_loads.inc();
        Ok(Loaded { entry, flavor, memory, idle: Mutex::default() })
    }

    /// An instance for one call.
    pub(crate) async fn lease(
        &self,
        loaded: &Loaded,
        permit: Permit,
        call: &Arc<RunningCall>,
        given: Option<Box<Given>>,
    ) -> Result<Lease, GuestError> {
        let function = &call.serving.function;
        let kept = match call.may_reuse {
            true => loaded.idle.lock().get_mut(function.id.as_str()).and_then(|waiting| take_kept(waiting, call)),
            false => None,
        };
        if let Some(mut kept) = kept.filter(|kept| kept.fits(call)) {
            kept.store.data_mut().rebind(call);
            kept.store.set_epoch_deadline(1);
            let Kept { store, instance, reuses, .. } = kept;
            return Ok(Lease { store, instance, reuses, _permit: permit });
        }
        let engine = self.engines.get(loaded.flavor, loaded.memory);
        let had_given = given.is_some();
        let mut store = state::store(engine, call, given);
        // Boxed but for the cheapest kind: a future is as large as its largest branch, and moved into place whole.
        let mut instance = match &loaded.entry {
            Entry::Core { pre, .. } => pre.instantiate_async(&mut store).await.map(Instance::Core),
            entry => Box::pin(instantiate(entry, &mut store)).await,
        };
        // Kept instances hold memory and slots; they give way to a call that needs them.
        if let Err(error) = &instance
            && self.idle.load(Ordering::Relaxed) > 0
            && (error.is::<PoolConcurrencyLimitError>() || store.data().budget.refused == Some(Refused::TenantLimit))
        {
            self.drop_idle();
            let given = store.data_mut().take_given();
            // Start code that has read its input already cannot be started again.
            if given.is_some() == had_given {
                store = state::store(engine, call, given);
                instance = Box::pin(instantiate(&loaded.entry, &mut store)).await;
            }
        }
        let instance = instance.map_err(|error| cannot_start(&store, &error))?;
        store.data_mut().count();
        Ok(Lease { store, instance, reuses: 0, _permit: permit })
    }

    /// Takes an instance back for the function's next call, if there is room. Only for calls that ended well.
    pub(crate) fn keep(&self, loaded: &Loaded, function: &str, lease: Lease) {
        // Pinned memory is scarce, and gone with the worker whose it was.
        if loaded.memory == MemoryKind::Pinned {
            return;
        }
        let Some(counted) = Counted::take(&self.idle, self.idle_max) else { return };
        if lease.reuses >= REUSES_MAX {
            return;
        }
        let Lease { store, instance, reuses, _permit } = lease;
        let kept = Kept { store, instance, reuses: reuses + 1, _counted: counted };
        let mut idle = loaded.idle.lock();
        match idle.get_mut(function) {
            Some(waiting) => waiting.push(kept),
            None => drop(idle.insert(function.to_owned(), vec![kept])),
        }
    }

    /// Forgets the kept instances of a function: its settings changed or it is gone.
    pub(crate) fn forget(&self, function: &str) {
        for loaded in self.slots().iter().filter_map(|slot| slot.loaded.get()) {
            let gone = loaded.idle.lock().remove(function);
            drop(gone);
        }
    }

    fn drop_idle(&self) {
        for loaded in self.slots().iter().filter_map(|slot| slot.loaded.get()) {
            let gone = std::mem::take(&mut *loaded.idle.lock());
            drop(gone);
        }
    }

    fn table(&self, memory: MemoryKind) -> &Table {
        match memory {
            MemoryKind::Pooled => &self.loaded,
            MemoryKind::Pinned => &self.loaded_pinned,
        }
    }

    fn slots(&self) -> Vec<Arc<Slot>> {
        let of = |table: &Table| table.lock().values().cloned().collect::<Vec<_>>();
        [of(&self.loaded), of(&self.loaded_pinned)].concat()
    }

    fn slot(&self, source: &SourceHash, memory: MemoryKind) -> Arc<Slot> {
        let now = self.uses.fetch_add(1, Ordering::Relaxed);
        let mut evicted = None;
        let mut loaded = self.table(memory).lock();
        if let Some(slot) = loaded.get(source) {
            slot.last_use.store(now, Ordering::Relaxed);
            return slot.clone();
        }
        if loaded.len() >= self.loaded_max {
            let oldest = loaded.iter().min_by_key(|(_, slot)| slot.last_use.load(Ordering::Relaxed));
            let oldest = oldest.map(|(source, _)| source.clone());
            evicted = oldest.and_then(|source| loaded.remove(&source));
        }
        let slot = loaded.entry(source.clone()).or_default().clone();
        slot.last_use.store(now, Ordering::Relaxed);
        drop(loaded);
        // Unmapping code is a system call; not under the lock.
        drop(evicted);
        slot
    }
}

/// The kept instance used last that has this call's settings; where there is none, one that no call will ever fit. One
/// that was made before the function last changed has the settings of then; where traffic is split, two revisions of
/// the same bytes have settings of their own.
fn take_kept(waiting: &mut Vec<Kept>, call: &RunningCall) -> Option<Kept> {
    match waiting.iter().rposition(|kept| kept.fits(call)) {
        Some(at) => Some(waiting.remove(at)),
        None => waiting.pop_if(|kept| !Arc::ptr_eq(&kept.made_for().function, &call.serving.function)),
    }
}

impl Kept {
    fn made_for(&self) -> &Serving {
        &self.store.data().call().serving
    }

    fn fits(&self, call: &RunningCall) -> bool {
        Arc::ptr_eq(&self.made_for().function, &call.serving.function)
            && self.made_for().revision().revision == call.serving.revision().revision
    }
}

async fn instantiate(entry: &Entry, store: &mut Store<State>) -> wasmtime::Result<Instance> {
    Ok(match entry {
        Entry::Core { pre, .. } | Entry::CoreCommand(pre) => Instance::Core(pre.instantiate_async(store).await?),
        Entry::Component { pre, .. } => {
            store.set_hostcall_fuel(LIFTED_BYTES_MAX);
            Instance::Component(pre.instantiate_async(store).await?)
        }
        Entry::CommandP2(pre) => Instance::CommandP2(pre.instantiate_async(store).await?),
        Entry::CommandP3(pre) => Instance::CommandP3(pre.instantiate_async(store).await?),
        Entry::HttpP2(pre) => Instance::HttpP2(pre.instantiate_async(store).await?),
        Entry::HttpP3(pre) => Instance::HttpP3(Some(pre.instantiate_async(store).await?)),
    })
}

/// Instantiation failed: a limit was in the way, or the guest's own start code failed.
fn cannot_start(store: &Store<State>, error: &wasmtime::Error) -> GuestError {
    let account = &store.data().call().account;
    match store.data().budget.refused {
        Some(Refused::TenantLimit) => {
            return GuestError::Rejected(Rejection::TenantBusy {
                tenant: account.name.to_string(),
                running: 0,
                queued: 0,
                why: "its instances hold all the memory it may have ([limits] tenant_memory_bytes_max)",
                retry_after: std::time::Duration::from_secs(1),
            });
        }
        Some(Refused::InstanceLimit { asked_bytes }) => {
            let bytes_max = store.data().call().memory_bytes_max();
            return GuestError::Rejected(Rejection::ModuleMemoryTooLarge { bytes: asked_bytes, bytes_max });
        }
        None => {}
    }
    if error.is::<PoolConcurrencyLimitError>() {
        return GuestError::Rejected(Rejection::ServerBusy {
            running: 0,
            queued: 0,
            why: "no pooled instance is free",
            retry_after: std::time::Duration::from_secs(1),
        });
    }
    // Wasmtime hands on what a memory's creator says as text.
    if format!("{error:#}").contains(crate::engine::pinned::SHORTAGE) {
        return GuestError::Rejected(Rejection::ServerBusy {
            running: 0,
            queued: 0,
            why: crate::engine::pinned::SHORTAGE,
            retry_after: std::time::Duration::from_secs(1),
        });
    }
    match error.is::<wasmtime::Trap>() || error.is::<crate::failure::Fault>() || error.is::<wasmtime_wasi::I32Exit>() {
        true => fault(error).into(),
        false => GuestError::Rejected(Rejection::ModuleOverLimits { why: format!("{error:#}") }),
    }
}

/// A place among the kept instances.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn take(count: &Arc<AtomicUsize>, max: usize) -> Option<Counted> {
        let more = |n: usize| (n < max).then_some(n + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Counted(count.clone()))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
