//! From a revision to a running instance: the step from `Permit` to `Lease`.
//!
//! A revision is loaded once (its artifact mapped, its imports resolved, its exports listed) and stays loaded while it
//! is among the most recently used. A lease is an instance of it, fresh from Wasmtime's pool of memories, or, where the
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
use crate::engine::compile::{self, Code, Unloaded};
use crate::engine::pinned::PinnedRefusal;
use crate::engine::{ByEngine, EngineKind, Engines};
use crate::failure::{Bug, Failure, Rejection, Shortage};
use crate::guest::budget::{MemoryRefusal, tenant_memory_short};
use crate::guest::component::ComponentExport;
use crate::guest::core::CoreExport;
use crate::guest::running::{Given, RunningCall};
use crate::guest::state::State;
use crate::guest::{GuestError, failed_in_guest, gpu, state, tensor};
use crate::metrics::Metrics;

/// A call may be served by an instance this often before a new one takes its place: a slow leak in a guest stays small.
const REUSES_MAX: u32 = 10_000;

pub(crate) struct Pool {
    pub engines: Arc<Engines>,
    linkers: ByEngine<Linkers>,
    loaded: ByEngine<Cache>,
    loaded_max: usize,
    idle_max: usize,
    /// How many instances are kept.
    pub(crate) idle: Arc<AtomicUsize>,
    uses: AtomicU64,
    background: Handle,
    metrics: Arc<Metrics>,
}

/// Linked sources, least recently used out first.
type Cache = Mutex<HashMap<SourceHash, Arc<CacheSlot>>>;

/// What guests of one engine may import: `None` where it runs no guests of that sort.
struct Linkers {
    core: Option<wasmtime::Linker<State>>,
    component: Option<component::Linker<State>>,
}

impl Linkers {
    fn new(engine: &wasmtime::Engine, kind: EngineKind) -> wasmtime::Result<Linkers> {
        let (core, component) = match kind {
            EngineKind::Plain => (Some(core_linker(engine)?), Some(component_linker(engine)?)),
            EngineKind::Pinned => (Some(core_linker(engine)?), None),
            EngineKind::Concurrent => {
                let mut linker = component_linker(engine)?;
                p3::add_to_linker(&mut linker)?;
                http_p3::add_to_linker(&mut linker)?;
                (None, Some(linker))
            }
        };
        Ok(Linkers { core, component })
    }
}

/// What every core module may import.
pub(crate) fn core_linker(engine: &wasmtime::Engine) -> wasmtime::Result<wasmtime::Linker<State>> {
    let mut linker = wasmtime::Linker::new(engine);
    wasmtime_wasi::p1::add_to_linker_async(&mut linker, State::p1)?;
    gpu::flat::add_to_linker(&mut linker)?;
    Ok(linker)
}

/// What every component may import but for WASI 0.3.
pub(crate) fn component_linker(engine: &wasmtime::Engine) -> wasmtime::Result<component::Linker<State>> {
    let mut linker = component::Linker::new(engine);
    p2::add_to_linker_async(&mut linker)?;
    http_p2::add_only_http_to_linker_async(&mut linker)?;
    gpu::component::add_to_linker(&mut linker)?;
    tensor::component::add_to_linker(&mut linker)?;
    Ok(linker)
}

#[derive(Default)]
struct CacheSlot {
    linked: OnceCell<Arc<LinkedRevision>>,
    last_use: AtomicU64,
}

/// A revision ready to be instantiated.
pub(crate) struct LinkedRevision {
    pub entry: EntryPoint,
    engine: EngineKind,
    /// Kept instances by function id, for functions that allow it.
    idle: Mutex<HashMap<String, Vec<IdleInstance>>>,
}

/// How a revision is entered, with its imports already resolved.
pub(crate) enum EntryPoint {
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
struct IdleInstance {
    store: Store<State>,
    instance: Instance,
    reuses: u32,
    _counted: IdlePlace,
}

/// An instance to run one call in, and the permit to do so.
pub(crate) struct Lease {
    // Dropped in this order: the store gives its memory back before the permit lets the next call in.
    pub store: Store<State>,
    pub instance: Instance,
    reuses: u32,
    _permit: Permit,
}

impl EntryPoint {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            EntryPoint::Core { .. } => "core module",
            EntryPoint::CoreCommand(_) | EntryPoint::CommandP2(_) | EntryPoint::CommandP3(_) => "command",
            EntryPoint::Component { .. } => "component",
            EntryPoint::HttpP2(_) | EntryPoint::HttpP3(_) => "wasi:http",
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
        let linkers = ByEngine::try_new(|kind| Linkers::new(engines.get(kind), kind))?;
        Ok(Pool {
            engines,
            linkers,
            loaded: ByEngine::try_new(|_| Ok(Mutex::default()))?,
            loaded_max: config.engine.loaded_max,
            idle_max: config.server.concurrency_max,
            idle: Arc::default(),
            uses: AtomicU64::new(0),
            background,
            metrics,
        })
    }

    /// What was deployed, if it is loaded already.
    pub(crate) fn loaded(&self, source: &SourceHash, engine: EngineKind) -> Option<Arc<LinkedRevision>> {
        let loaded = self.loaded.get(engine).lock();
        let slot = loaded.get(source)?;
        slot.last_use.store(self.uses.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        slot.linked.get().cloned()
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
    ) -> Result<Arc<LinkedRevision>, Failure>
    where
        R: AsyncFnOnce() -> Result<(), Failure>,
    {
        let engine = EngineKind::of(flavor, memory);
        let slot = self.slot(source, engine);
        if let Some(linked) = slot.linked.get() {
            return Ok(linked.clone());
        }
        let map = |is_fresh: bool| {
            let (pool, catalog, source) = (self.clone(), catalog.clone(), source.clone());
            let work = move || match compile::load(&catalog, &pool.engines, &source, flavor, memory) {
                Ok(code) => pool.link(code, kind, engine).map(Some),
                // Compiled for this engine a moment ago: what is left to refuse is how much an instance would take.
                Err(Unloaded::Refused { why }) if is_fresh => Err(Rejection::ModuleOverLimits { why }.into()),
                Err(Unloaded::Refused { .. } | Unloaded::Stale) => Ok(None),
            };
            let joined = self.background.spawn_blocking(work);
            async { joined.await.unwrap_or_else(|e| Err(Bug(e.to_string()).into())) }
        };
        let linked = slot
            .linked
            .get_or_try_init(async || {
                if let Some(linked) = map(false).await? {
                    return Ok(Arc::new(linked));
                }
                recompile().await?;
                let vanished = || Failure::from(Bug("an artifact vanished after it was compiled".to_owned()));
                map(true).await?.map(Arc::new).ok_or_else(vanished)
            })
            .await?;
        Ok(linked.clone())
    }

    /// Resolves imports and lists exports. An import nobody provides is named in the rejection.
    pub(crate) fn link(&self, code: Code, kind: Kind, engine: EngineKind) -> Result<LinkedRevision, Failure> {
        let unlinked = |e: wasmtime::Error| Rejection::InvalidWasm { why: format!("{e:#}") };
        let unlinkable = || Bug(format!("code for the {engine:?} engine that it runs none of"));
        let linkers = self.linkers.get(engine);
        let entry = match code {
            Code::Module(module) => {
                check_parts(&module.resources_required())?;
                let linker = linkers.core.as_ref().ok_or_else(unlinkable)?;
                let pre = linker.instantiate_pre(&module).map_err(unlinked)?;
                if kind == Kind::CoreCommand {
                    EntryPoint::CoreCommand(pre)
                } else {
                    EntryPoint::Core { pre, exports: crate::guest::core::exports(&module) }
                }
            }
            Code::Component(component) => {
                component.resources_required().as_ref().map_or(Ok(()), check_parts)?;
                let linker = linkers.component.as_ref().ok_or_else(unlinkable)?;
                let pre = linker.instantiate_pre(&component).map_err(unlinked)?;
                component_entry(pre, &component, kind).map_err(unlinked)?
            }
        };
        self.metrics.artifact_loads.inc();
        Ok(LinkedRevision { entry, engine, idle: Mutex::default() })
    }

    /// An instance for one call.
    pub(crate) async fn lease(
        &self,
        linked: &LinkedRevision,
        permit: Permit,
        call: &Arc<RunningCall>,
        given: Option<Box<Given>>,
    ) -> Result<Lease, GuestError> {
        let function = &call.serving.function;
        let kept = if call.may_reuse {
            linked.idle.lock().get_mut(function.id.as_str()).and_then(|waiting| take_kept(waiting, call))
        } else {
            None
        };
        if let Some(mut kept) = kept.filter(|kept| kept.fits(call)) {
            kept.store.data_mut().rebind(call);
            kept.store.set_epoch_deadline(1);
            let IdleInstance { store, instance, reuses, .. } = kept;
            return Ok(Lease { store, instance, reuses, _permit: permit });
        }
        let engine = self.engines.get(linked.engine);
        let had_given = given.is_some();
        let mut store = state::store(engine, call, given);
        // Boxed but for the cheapest kind: a future is as large as its largest branch, and moved into place whole.
        let mut instance = match &linked.entry {
            EntryPoint::Core { pre, .. } => pre.instantiate_async(&mut store).await.map(Instance::Core),
            entry => Box::pin(instantiate(entry, &mut store)).await,
        };
        // Kept instances hold memory and slots; they give way to a call that needs them.
        if let Err(error) = &instance
            && self.idle.load(Ordering::Relaxed) > 0
            && let Some(in_the_way) = in_the_way(error, &store)
        {
            self.drop_idle(in_the_way);
            let given = store.data_mut().take_given();
            // Start code that has read its input already cannot be started again.
            if given.is_some() == had_given {
                store = state::store(engine, call, given);
                instance = Box::pin(instantiate(&linked.entry, &mut store)).await;
            }
        }
        let instance = instance.map_err(|error| self.cannot_start(&store, &error))?;
        store.data_mut().count();
        Ok(Lease { store, instance, reuses: 0, _permit: permit })
    }

    /// Takes an instance back for the function's next call, if there is room. Only for calls that ended well, and not
    /// for a function that changed while it ran: the instance has the settings and secrets of before.
    pub(crate) fn keep(&self, linked: &LinkedRevision, lease: Lease) {
        // Pinned memory is scarce, and gone with the worker whose it was.
        if linked.engine == EngineKind::Pinned {
            return;
        }
        let Some(counted) = IdlePlace::take(&self.idle, self.idle_max) else { return };
        if lease.reuses >= REUSES_MAX {
            return;
        }
        let Lease { mut store, instance, reuses, _permit } = lease;
        store.data_mut().end_call();
        let kept = IdleInstance { store, instance, reuses: reuses + 1, _counted: counted };
        let function = kept.made_for().function.clone();
        let mut idle = linked.idle.lock();
        // Under the lock that `forget` takes after the function has changed: either it finds the instance or this does.
        if function.superseded.is_set() {
            drop(idle);
            return drop(kept);
        }
        match idle.get_mut(function.id.as_str()) {
            Some(waiting) => waiting.push(kept),
            None => drop(idle.insert(function.id.clone(), vec![kept])),
        }
    }

    /// Forgets the kept instances of a function: its settings changed or it is gone.
    pub(crate) fn forget(&self, function: &str) {
        for linked in self.slots().iter().filter_map(|slot| slot.linked.get()) {
            let gone = linked.idle.lock().remove(function);
            drop(gone);
        }
    }

    fn drop_idle(&self, which: InTheWay<'_>) {
        for linked in self.slots().iter().filter_map(|slot| slot.linked.get()) {
            let mut idle = linked.idle.lock();
            let gone: Vec<_> = match which {
                InTheWay::Everyones => idle.drain().collect(),
                InTheWay::Tenants(tenant) => idle.extract_if(|_, kept| kept.iter().any(|k| k.is_of(tenant))).collect(),
            };
            drop(idle);
            // Resetting memories takes its time; not under the lock.
            drop(gone);
        }
    }

    fn slots(&self) -> Vec<Arc<CacheSlot>> {
        self.loaded.iter().flat_map(|cache| cache.lock().values().cloned().collect::<Vec<_>>()).collect()
    }

    fn slot(&self, source: &SourceHash, engine: EngineKind) -> Arc<CacheSlot> {
        let now = self.uses.fetch_add(1, Ordering::Relaxed);
        let mut evicted = None;
        let mut loaded = self.loaded.get(engine).lock();
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

    /// Instantiation failed: a limit was in the way, or the guest's own start code failed.
    pub(crate) fn cannot_start(&self, store: &Store<State>, error: &wasmtime::Error) -> GuestError {
        let retry_after = std::time::Duration::from_secs(1);
        // Taken whatever failed: one that is left behind would be taken for the next failure's.
        let pinned = PinnedRefusal::take();
        let refused = store.data().budget.refused;
        if refused == Some(MemoryRefusal::Tenant) {
            return tenant_memory_short(&store.data().call().account).into();
        }
        if failed_in_guest(error) {
            return store.data().failed(error);
        }
        if let Some(MemoryRefusal::Instance { asked_bytes }) = refused {
            let bytes_max = store.data().call().memory_bytes_max();
            return Rejection::ModuleMemoryTooLarge { bytes: asked_bytes, bytes_max }.into();
        }
        if let Some(MemoryRefusal::Table { asked_elements }) = refused {
            let max = store.data().call().account.limits.table_elements_max;
            let why = format!("a table of {asked_elements} elements; the limit is {max} ([limits] table_elements_max)");
            return Rejection::ModuleOverLimits { why }.into();
        }
        if error.is::<PoolConcurrencyLimitError>() {
            let shortage = Shortage {
                what: "pooled instances",
                max: format!("what {} calls need", self.idle_max),
                limit: "[server] concurrency_max",
                instead: "ask again, or raise the limit",
            };
            return Rejection::ServerShort { shortage, retry_after }.into();
        }
        match pinned {
            Some(PinnedRefusal::NoDevice) => {
                let why = "memory = pinned needs a device, and none is open; deploy it with --memory pooled, or wait \
                           for the device";
                return Rejection::Conflict { why: why.to_owned() }.into();
            }
            Some(PinnedRefusal::Short { asked_bytes }) => {
                let shortage = Shortage {
                    what: "pinned memory",
                    max: format!("the device's region, of which no {asked_bytes} bytes are free,"),
                    limit: "a module takes the maximum of its memory, at most 16 MiB",
                    instead: "ask again, declare a smaller maximum, or deploy it with --memory pooled",
                };
                return Rejection::ServerShort { shortage, retry_after }.into();
            }
            Some(PinnedRefusal::Host(why)) => return Bug(format!("pinned memory cannot be mapped: {why}")).into(),
            None => {}
        }
        // Nothing that a module is known to cause: the host lacks something, or we have a bug.
        Bug(format!("an instance cannot be made: {error:#}")).into()
    }
}

/// Refuses a module that has more memories or tables than a call has room for.
fn check_parts(required: &wasmtime::ResourcesRequired) -> Result<(), Rejection> {
    let parts = [
        ("memories", required.num_memories, super::MEMORIES_PER_CALL),
        ("tables", required.num_tables, super::TABLES_PER_CALL),
    ];
    match parts.into_iter().find(|(_, count, max)| count > max) {
        Some((what, count, max)) => {
            let why = format!("{count} {what}; an instance has room for {max}");
            Err(Rejection::ModuleOverLimits { why })
        }
        None => Ok(()),
    }
}

/// Whose kept instances are in the way of a new one.
#[derive(Clone, Copy)]
enum InTheWay<'a> {
    /// Slots are everyone's.
    Everyones,
    /// What a tenant may have of memory is its own: dropping another's instances would not help it.
    Tenants(&'a str),
}

fn in_the_way<'a>(error: &wasmtime::Error, store: &'a Store<State>) -> Option<InTheWay<'a>> {
    if store.data().budget.refused == Some(MemoryRefusal::Tenant) {
        return Some(InTheWay::Tenants(&store.data().call().serving.function.tenant));
    }
    error.is::<PoolConcurrencyLimitError>().then_some(InTheWay::Everyones)
}

/// The kept instance used last that has this call's settings; where there is none, one that no call will ever fit. One
/// that was made before the function last changed has the settings of then; where traffic is split, two revisions of
/// the same bytes have settings of their own.
fn take_kept(waiting: &mut Vec<IdleInstance>, call: &RunningCall) -> Option<IdleInstance> {
    match waiting.iter().rposition(|kept| kept.fits(call)) {
        Some(at) => Some(waiting.remove(at)),
        None => waiting.pop_if(|kept| !Arc::ptr_eq(&kept.made_for().function, &call.serving.function)),
    }
}

impl IdleInstance {
    fn made_for(&self) -> &Serving {
        &self.store.data().call().serving
    }

    fn is_of(&self, tenant: &str) -> bool {
        self.made_for().function.tenant == tenant
    }

    fn fits(&self, call: &RunningCall) -> bool {
        Arc::ptr_eq(&self.made_for().function, &call.serving.function)
            && self.made_for().revision().revision == call.serving.revision().revision
    }
}

/// How a component is entered. Toolchains that target WASI 0.3 export the 0.2 interface beside it; the newer one is
/// what the program was written for.
fn component_entry(
    pre: component::InstancePre<State>,
    component: &component::Component,
    kind: Kind,
) -> wasmtime::Result<EntryPoint> {
    Ok(match kind {
        Kind::HttpHandler => match http_p3::bindings::ServicePre::new(pre.clone()) {
            Ok(service) => EntryPoint::HttpP3(service),
            Err(_) => EntryPoint::HttpP2(http_p2::bindings::ProxyPre::new(pre)?),
        },
        Kind::ComponentCommand => match p3::bindings::CommandPre::new(pre.clone()) {
            Ok(command) => EntryPoint::CommandP3(command),
            Err(_) => EntryPoint::CommandP2(p2::bindings::CommandPre::new(pre)?),
        },
        _ => EntryPoint::Component { pre, exports: crate::guest::component::exports(component) },
    })
}

async fn instantiate(entry: &EntryPoint, store: &mut Store<State>) -> wasmtime::Result<Instance> {
    Ok(match entry {
        EntryPoint::Core { pre, .. } | EntryPoint::CoreCommand(pre) => {
            Instance::Core(pre.instantiate_async(store).await?)
        }
        EntryPoint::Component { pre, .. } => Instance::Component(pre.instantiate_async(store).await?),
        EntryPoint::CommandP2(pre) => Instance::CommandP2(pre.instantiate_async(store).await?),
        EntryPoint::CommandP3(pre) => Instance::CommandP3(pre.instantiate_async(store).await?),
        EntryPoint::HttpP2(pre) => Instance::HttpP2(pre.instantiate_async(store).await?),
        EntryPoint::HttpP3(pre) => Instance::HttpP3(Some(pre.instantiate_async(store).await?)),
    })
}

/// A place among the kept instances.
struct IdlePlace(Arc<AtomicUsize>);

impl IdlePlace {
    fn take(count: &Arc<AtomicUsize>, max: usize) -> Option<IdlePlace> {
        let more = |n: usize| (n < max).then_some(n + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(IdlePlace(count.clone()))
    }
}

impl Drop for IdlePlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
