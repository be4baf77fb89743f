//! The runtime as a whole: what it is made of, how it opens, how functions are deployed, how it stops. The path of one
//! call is `invoke.rs`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use tensor_wasm_gpu::Device;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SetOnce};

use crate::admission::{Account, Admission};
use crate::catalog::store::{Change, Table};
use crate::catalog::upload::{Upload, UploadKind, Uploaded};
use crate::catalog::{
    Catalog, Damage, FunctionRecord, Kind, MemoryKind, Revision, RevisionRecord, Secret, SecretsAccess, Settings,
    SettingsPatch, SourceError, SourceHash, StoreError, Traffic, check_name, now_ms,
};
use crate::config::Config;
use crate::engine::compile::{CompileCost, Compiler};
use crate::engine::pool::{EntryPoint, LinkedRevision, Pool};
use crate::engine::{EngineKind, Engines};
use crate::failure::{Bug, Failure, Rejection};
use crate::guest::http::Outbound;
use crate::guest::running::Surroundings;
use crate::guest::signature::{self, ExportSignature};
use crate::guest::tensor::plan::PlanLines;
use crate::jobs::{Jobs, Recovered, Recovery};
use crate::logs::Logs;
use crate::metrics::Metrics;
use crate::models::{INSPECTIONS_MAX, ModelCache, Models};
use tensor_wasm_launch::{Kernels, Opener};

/// How much nicer background threads are than serving ones: about a tenth of the CPU when both want all of it.
const BACKGROUND_NICE: i32 = 10;

/// The check of everything on disk begins this long after the start, so that it does not compete with first calls.
const SCRUB_AFTER: Duration = Duration::from_secs(2);

/// While shutting down, jobs that are not done after this go back to the queue: they will be run again anyway, and a
/// supervisor may not wait as long as a caller would.
const JOBS_DRAIN_MAX: Duration = Duration::from_secs(5);

/// Between two looks at whether running calls are done, while shutting down.
const DRAIN_POLL: Duration = Duration::from_millis(5);

pub struct Runtime {
    pub config: Arc<Config>,
    pub catalog: Arc<Catalog>,
    pub admission: Arc<Admission>,
    pub logs: Arc<Logs>,
    pub metrics: Arc<Metrics>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) surroundings: Arc<Surroundings>,
    pub(crate) background: Handle,
    pub(crate) models: Arc<ModelCache>,
    /// Turns to parse the header of a model.
    pub(crate) inspections: Semaphore,
    engines: Arc<Engines>,
    compiler: Compiler,
    threads: Option<tokio::runtime::Runtime>,
    device: OnceLock<Device>,
    /// Itself, for work that must outlive the call that wants it.
    me: Weak<Runtime>,
}

/// Why a runtime does not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the engine cannot be set up: {0}")]
    Engine(String),
    #[error("cannot start threads: {0}")]
    Threads(#[from] std::io::Error),
}

/// A function as it stands after a deploy.
pub struct Deployed {
    pub function: Arc<FunctionRecord>,
    /// What compiling it took; `None` where the same bytes had been compiled before.
    pub cost: Option<CompileCost>,
}

impl Runtime {
    /// Opens a data directory. `worker_exe` is the binary whose `compile-worker` command compiles modules; without one
    /// they are compiled in this process. Must not be called from an async task: recovery blocks.
    pub fn open(
        data_dir: &Path,
        config: Config,
        worker_exe: Option<PathBuf>,
    ) -> Result<(Arc<Runtime>, Vec<Damage>), OpenError> {
        Runtime::open_with(data_dir, config, worker_exe, SecretsAccess::default())
    }

    /// The same, with a key for functions' secrets.
    pub fn open_with(
        data_dir: &Path,
        config: Config,
        worker_exe: Option<PathBuf>,
        secrets: SecretsAccess,
    ) -> Result<(Arc<Runtime>, Vec<Damage>), OpenError> {
        let config = Arc::new(config);
        let threads = tokio::runtime::Builder::new_multi_thread()
            .thread_name("background")
            .enable_all()
            .on_thread_start(|| {
                // Refused only in odd sandboxes, where everything then has the same priority.
                let _ = rustix::process::setpriority_process(None, BACKGROUND_NICE);
            })
            .build()?;
        let background = threads.handle().clone();
        let metrics = Arc::new(Metrics::new(config.server.metrics_functions_max));
        // A thousand guard pages and as many imports on one side, a database's files on the other: half of a start
        // each, and neither needs the other.
        let (made, opened) = std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                let engines = Arc::new(Engines::new(&config)?);
                let pool = Pool::new(engines.clone(), &config, background.clone(), metrics.clone())?;
                wasmtime::Result::<_>::Ok((engines, pool))
            });
            let opened = Catalog::open(data_dir, secrets);
            (made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), opened)
        });
        let (catalog, mut damages) = opened?;
        let (engines, pool) = made.map_err(|e| OpenError::Engine(format!("{e:#}")))?;
        let mut recovery = Recovery::default();
        catalog.store.each(Table::Jobs, |key, read| recovery.take(key, read))?;
        let Recovered { jobs, changed, damaged } = recovery.finish(config.jobs.concurrency_max);
        let mut changes: Vec<Change> =
            changed.iter().map(|job| Change::put(Table::Jobs, format!("{}\0{}", job.tenant, job.id), job)).collect();
        for (key, bytes, why) in damaged {
            let what = format!("record of job {}", key.replace('\0', "/"));
            tracing::error!(what, why, "quarantined");
            catalog.files.quarantine_bytes(&format!("job-{}", key.replace(['\0', '/'], "-")), &bytes, &why);
            damages.push(Damage { what, why });
            changes.push(Change::Delete(Table::Jobs, key));
        }
        if !changes.is_empty() {
            catalog.store.write_blocking(changes)?;
        }
        metrics.quarantined.inc_by(damages.len() as u64);
        let compiler = match worker_exe {
            Some(exe) => Compiler::with_worker(exe, &config),
            None => Compiler::in_process(&config),
        };
        let logs = Arc::<Logs>::default();
        let catalog = Arc::new(catalog);
        let models = ModelCache::new(catalog.clone(), config.clone(), metrics.clone(), background.clone());
        let runtime = Arc::new_cyclic(|me| Runtime {
            me: me.clone(),
            catalog,
            admission: Admission::new(config.clone()),
            logs: logs.clone(),
            pool: Arc::new(pool),
            jobs: Arc::new(jobs),
            surroundings: Arc::new(Surroundings {
                outbound: Outbound::new(&config.server.outbound_http),
                background: background.clone(),
                metrics: metrics.clone(),
                logs,
                kernels: SetOnce::new(),
                pinned: engines.pinned.clone(),
                plans: PlanLines::new(config.server.tensor_plans_max),
                models: OnceLock::from(models.clone() as Arc<dyn Models>),
            }),
            models,
            inspections: Semaphore::new(INSPECTIONS_MAX),
            metrics,
            config,
            background,
            engines,
            compiler,
            threads: Some(threads),
            device: OnceLock::new(),
        });
        runtime.start_jobs();
        runtime.start_scrub();
        Ok((runtime, damages))
    }

    pub(crate) fn shared(&self) -> Result<Arc<Runtime>, Rejection> {
        self.me.upgrade().ok_or(Rejection::ShuttingDown)
    }

    /// Gives the runtime its device. Opening one takes a moment, which functions that need none do not wait for. The
    /// first one given stays.
    pub fn attach(&self, device: Device) {
        self.attach_with(device, None);
    }

    /// The same, with a way to open other workers of the device, for tenants that are trusted with it.
    pub fn attach_with(&self, device: Device, opener: Option<Opener>) {
        self.engines.pinned.attach(device.clone());
        let folder = self.catalog.files.kernels();
        let kernels = Kernels::new(device.clone(), Some(folder), self.background.clone());
        let kernels = match opener {
            Some(opener) => kernels.with_opener(opener),
            None => kernels,
        };
        if self.surroundings.kernels.set(Ok(Arc::new(kernels))).is_ok() {
            let _ = self.device.set(device);
        }
    }

    /// Tells functions that want a device that there is none.
    pub fn without_device(&self, why: &str) {
        let _ = self.surroundings.kernels.set(Err(format!("there is no device: {why}")));
    }

    /// Plans of guests' tensors that are computed now, and that wait.
    pub fn tensor_plans(&self) -> (usize, usize) {
        self.surroundings.plans.depth()
    }

    pub fn device(&self) -> Option<&Device> {
        self.device.get()
    }

    /// Where work goes that must not delay requests: deploys, long guests, jobs.
    pub fn background(&self) -> &Handle {
        &self.background
    }

    /// Begins to receive a module or component for [`Runtime::deploy`], of at most the size its tenant may deploy.
    pub fn upload(&self, tenant: &str) -> Result<Upload, Rejection> {
        let bytes_max = UploadKind::Module.bytes_max(&self.config.limits_of(tenant));
        Upload::begin(&self.catalog.files, UploadKind::Module, bytes_max)
    }

    /// [`Runtime::deploy`] of bytes that are here already.
    pub async fn deploy_bytes(
        &self,
        tenant: &str,
        name: &str,
        wasm: &[u8],
        patch: SettingsPatch,
    ) -> Result<Deployed, Failure> {
        let mut upload = self.upload(tenant)?;
        upload.write(wasm).await?;
        self.deploy(tenant, name, upload.finish().await?, patch).await
    }

    /// Compiles a module or component, keeps it and gives it the function's traffic. Settings that the patch does not
    /// mention are the serving revision's. Nothing is changed unless all of it succeeds. Call it on the background
    /// runtime: it syncs files.
    pub async fn deploy(
        &self,
        tenant: &str,
        name: &str,
        wasm: Uploaded,
        patch: SettingsPatch,
    ) -> Result<Deployed, Failure> {
        check_name(name)?;
        let account = self.admission.account(tenant);
        let limits = &account.limits;
        let known = self.catalog.resolve(tenant, name).ok().filter(|f| f.name == name);
        if known.is_none() {
            // Before it is compiled for nothing. What counts is asked again when it is added: others may be faster.
            self.catalog.check_room(tenant, limits.functions_max)?;
        }
        let settings = patch.over(&known.as_ref().map(|f| f.serving_settings()).unwrap_or_default());
        settings.check()?;
        // Those that are mentioned: one that went since an earlier deploy is said when it is opened.
        let mentioned = || self.catalog.check_models(tenant, patch.models.as_ref().unwrap_or(&BTreeSet::new()));
        mentioned()?;
        let source = wasm.source();
        let _pinned = self.catalog.pin_source(&wasm)?;
        let (kind, flavor, cost) = match self.catalog.shape(&source) {
            Some((kind, flavor)) => (kind, flavor, None),
            None => {
                let compiled = self.compile(&source, &account, settings.memory).await?;
                (compiled.kind, compiled.flavor, Some(compiled.cost))
            }
        };
        let revise = |settings: Settings| -> Result<RevisionRecord, Rejection> {
            settings.check()?;
            check_memory(&settings, kind)?;
            let revision = Revision::of(&source, &settings);
            let (bytes, created_ms) = (wasm.bytes() as u64, now_ms());
            let source = source.clone();
            Ok(RevisionRecord { revision, source, kind, flavor, bytes, created_ms, settings, quarantined: None })
        };
        let (memory, record) = (settings.memory, revise(settings)?);
        let loaded = self.load(name, &record, &account).await?;
        check_gpu(&loaded.entry, &record.settings, &patch)?;
        let revise_again = |old: Option<&FunctionRecord>| {
            let settings = patch.over(&old.map(FunctionRecord::serving_settings).unwrap_or_default());
            if settings.memory != memory {
                let why = "another deploy changed where the function's memory comes from meanwhile; deploy it again";
                return Err(Rejection::Conflict { why: why.to_owned() });
            }
            mentioned()?;
            revise(settings)
        };
        let function = self.catalog.deploy(tenant, name, limits, revise_again).await?;
        self.pool.forget(&function.id);
        Ok(Deployed { function, cost })
    }

    pub async fn delete(&self, tenant: &str, name: &str) -> Result<(), Rejection> {
        let function = self.catalog.delete(tenant, name).await?;
        self.pool.forget(&function.id);
        self.logs.forget(&function.id);
        self.metrics.functions.forget(&function.id);
        Ok(())
    }

    /// Sends a function's traffic elsewhere.
    pub async fn set_traffic(&self, tenant: &str, name: &str, to: &Traffic) -> Result<Arc<FunctionRecord>, Rejection> {
        let function = self.catalog.set_traffic(tenant, name, to).await?;
        self.pool.forget(&function.id);
        Ok(function)
    }

    /// Gives a function a secret. Calls that begin after this see it.
    pub async fn set_secret(&self, tenant: &str, name: &str, key: &str, value: Secret) -> Result<(), Rejection> {
        let account = self.admission.account(tenant);
        let function = self.catalog.set_secret(tenant, name, key, value, &account.limits).await?;
        self.pool.forget(&function.id);
        Ok(())
    }

    pub async fn delete_secret(&self, tenant: &str, name: &str, key: &str) -> Result<(), Rejection> {
        let function = self.catalog.delete_secret(tenant, name, key).await?;
        self.pool.forget(&function.id);
        Ok(())
    }

    /// What the revision with (most of) a function's traffic exports; of a function that cannot run, why. For its
    /// owner. Loads it, so call it on the background runtime.
    pub async fn exports(&self, function: &FunctionRecord) -> Result<Vec<ExportSignature>, Failure> {
        let Some(revision) = function.current() else { return Ok(Vec::new()) };
        if let Some(why) = function.cannot_run(revision) {
            return Err(why.into());
        }
        let account = self.admission.account(&function.tenant);
        let loaded = self.load(&function.name, revision, &account).await?;
        Ok(signature::exports(&loaded.entry))
    }

    /// The revision ready to be instantiated; compiled again from its source where its artifact is missing, damaged or
    /// of another engine.
    pub(crate) async fn load(
        &self,
        name: &str,
        revision: &RevisionRecord,
        account: &Account,
    ) -> Result<Arc<LinkedRevision>, Failure> {
        let source = &revision.source;
        let recompile = async || {
            let (catalog, wanted) = (self.catalog.clone(), source.clone());
            let checked = self.background.spawn_blocking(move || catalog.check_source(&wanted));
            match checked.await.map_err(|e| Bug(e.to_string()))? {
                Ok(()) => {}
                Err(SourceError::Unreadable(why)) => return Err(Rejection::Storage { why }.into()),
                Err(SourceError::Damaged(why)) => {
                    self.quarantine(source, &why).await;
                    let (name, revision) = (name.to_owned(), revision.revision.short().to_owned());
                    return Err(Rejection::Quarantined { name, revision, why }.into());
                }
            }
            self.compile(source, account, revision.settings.memory).await.map(drop)
        };
        self.pool.load(&self.catalog, source, revision.kind, revision.flavor, revision.settings.memory, recompile).await
    }

    async fn quarantine(&self, source: &SourceHash, why: &str) {
        self.metrics.quarantined.inc();
        for function in self.catalog.quarantine(source, why).await {
            self.pool.forget(&function.id);
        }
    }

    async fn compile(
        &self,
        source: &SourceHash,
        account: &Account,
        memory: MemoryKind,
    ) -> Result<crate::engine::compile::Compiled, Failure> {
        let compiled =
            self.compiler.compile(&self.catalog, &self.engines, &self.config.engine, source, account, memory).await;
        match &compiled {
            Ok(_) => self.metrics.compiles.inc(),
            Err(_) => self.metrics.compile_failures.inc(),
        };
        compiled
    }

    /// Checks everything on disk against its hash and brings artifacts up to date with this engine, in the background.
    fn start_scrub(self: &Arc<Self>) {
        let runtime = Arc::downgrade(self);
        self.background.spawn(async move {
            tokio::time::sleep(SCRUB_AFTER).await;
            let Some(runtime) = runtime.upgrade() else { return };
            runtime.scrub().await;
        });
    }

    pub(crate) async fn scrub(&self) {
        self.catalog.sweep_sources();
        for function in self.catalog.everything() {
            for revision in function.revisions.iter().filter(|r| r.quarantined.is_none()) {
                if self.admission.is_closed() {
                    return;
                }
                let (catalog, wanted) = (self.catalog.clone(), revision.source.clone());
                let checked = self.background.spawn_blocking(move || catalog.check_source(&wanted)).await;
                if let Ok(Err(SourceError::Damaged(why))) = checked
                    && self
                        .catalog
                        .resolve(&function.tenant, &function.name)
                        .is_ok_and(|f| f.revision(&revision.revision).is_some())
                {
                    self.quarantine(&revision.source, &why).await;
                    continue;
                }
                let memory = revision.settings.memory;
                let engine = self.engines.id(EngineKind::of(revision.flavor, memory));
                if self.catalog.artifact_digest(&revision.source, engine).is_none() {
                    let account = self.admission.account(&function.tenant);
                    if let Err(error) = self.compile(&revision.source, &account, memory).await {
                        tracing::error!(function = function.name, %error, "could not compile it for this engine");
                    }
                }
            }
        }
        self.scrub_models().await;
        tracing::debug!("everything on disk was checked");
    }

    /// Refuses new calls and waits for the running ones, up to the limit. Jobs that take longer are left for the next
    /// server. Returns how many calls were still running.
    pub async fn drain(&self, limit: Duration) -> usize {
        self.admission.close();
        self.jobs.stop();
        let begun = Instant::now();
        let jobs_until = begun + JOBS_DRAIN_MAX.min(limit / 2);
        let mut suspended = false;
        loop {
            let running = self.admission.depth().running.max(self.jobs.running());
            if running == 0 || begun.elapsed() >= limit {
                return running;
            }
            if !suspended && Instant::now() >= jobs_until {
                self.jobs.suspend();
                suspended = true;
            }
            tokio::time::sleep(DRAIN_POLL).await;
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.jobs.stop();
        // Dropping a Tokio runtime blocks, which a task may not do.
        if let Some(threads) = self.threads.take() {
            threads.shutdown_background();
        }
    }
}

/// A function that imports the device and does not get it fails when it is called; better it fails here. Who says
/// `gpu = false` knows.
fn check_gpu(entry: &EntryPoint, settings: &Settings, patch: &SettingsPatch) -> Result<(), Rejection> {
    if settings.gpu || patch.gpu.is_some() {
        return Ok(());
    }
    let Some(import) = signature::gpu_import(entry) else { return Ok(()) };
    let why = format!(
        "it imports {import:?}, so it needs the GPU: deploy it with --gpu (settings: gpu = true); with --no-gpu (gpu = \
         false) it is deployed all the same, and what it asks of the GPU is denied"
    );
    Err(Rejection::InvalidArgs { why })
}

/// Pinned memory is for core modules that may use the device.
fn check_memory(settings: &Settings, kind: Kind) -> Result<(), Rejection> {
    let is_core = matches!(kind, Kind::CoreExports | Kind::CoreCommand);
    let why = match settings.memory {
        MemoryKind::Pinned if !is_core => "settings: memory = pinned is for core modules, and this is a component",
        MemoryKind::Pinned if !settings.gpu => "settings: memory = pinned is of use with gpu = true only (--gpu)",
        MemoryKind::Pinned | MemoryKind::Pooled => return Ok(()),
    };
    Err(Rejection::InvalidArgs { why: why.to_owned() })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::catalog::SecretsKey;
    use crate::config::LimitsOverride;
    use crate::guest::GuestError;
    use crate::guest::running::{RunningCall, Used};
    use crate::guest::state;
    use crate::{Call, Invocation, Output};

    /// Counts its calls, which shows whether an instance was kept, and computes for a while.
    const COUNTER: &str = r#"(module (memory 1) (global $calls (mut i32) (i32.const 0))
        (func (export "count") (result i32)
            (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
            (global.get $calls))
        (func (export "spin") (param $n i32)
            (loop $again
                (local.set $n (i32.sub (local.get $n) (i32.const 1)))
                (br_if $again (local.get $n)))))"#;

    /// How long a call takes that runs while its function is changed, and how much of `spin` is timed to know what that
    /// is.
    const LONG: Duration = Duration::from_secs(1);
    const TIMED: i32 = 50_000_000;

    fn opened(config: impl FnOnce(&mut Config)) -> (Arc<Runtime>, tempfile::TempDir) {
        let mut made = Config::default();
        made.server.concurrency_max = 16;
        config(&mut made);
        let data = tempfile::tempdir().unwrap();
        let key = SecretsKey::parse(&"5a".repeat(32)).ok();
        let access = SecretsAccess { key, forget: false };
        let (runtime, damages) = Runtime::open_with(data.path(), made, None, access).unwrap();
        assert_eq!(damages, []);
        (runtime, data)
    }

    fn deploy(
        runtime: &Runtime,
        tenant: &str,
        name: &str,
        wat: &str,
        env: &str,
    ) -> Result<Arc<FunctionRecord>, Failure> {
        let env = [("E".to_owned(), Some(env.to_owned()))].into();
        let patch = SettingsPatch { reuse: Some(true), env, ..SettingsPatch::default() };
        let wasm = wat::parse_str(wat).unwrap();
        let deployed = runtime.background.block_on(runtime.deploy_bytes(tenant, name, &wasm, patch));
        deployed.map(|deployed| deployed.function)
    }

    async fn call(runtime: &Runtime, tenant: &str, name: &str, export: &str, args: Value) -> Result<Value, Failure> {
        let (tenant, function, export) = (tenant.to_owned(), name.to_owned(), Some(export.to_owned()));
        let call = Call::Export { export, args, stdin: Default::default() };
        let outcome = runtime.invoke(Invocation { id: 0, tenant, function, call, deadline: None }).await?;
        match outcome.output {
            Output::Value(value) => Ok(value),
            Output::Bytes(_) | Output::Response(_) => panic!("exports return values"),
        }
    }

    fn count(runtime: &Runtime, tenant: &str, name: &str) -> Value {
        runtime.background.block_on(call(runtime, tenant, name, "count", json!([]))).unwrap()
    }

    fn kept(runtime: &Runtime) -> usize {
        runtime.pool.idle.load(Ordering::Relaxed)
    }

    #[test]
    fn an_instance_that_runs_while_its_function_changes_is_not_kept() {
        let (runtime, _data) = opened(|_| {});
        let on = &runtime.background;
        type Change = fn(&Runtime);
        let changes: [(&str, Change); 6] = [
            ("a secret", |r| r.background.block_on(r.set_secret("t", "f", "A", Secret::new(b"1").unwrap())).unwrap()),
            ("no secret", |r| r.background.block_on(r.delete_secret("t", "f", "A")).unwrap()),
            ("a deploy", |r| drop(deploy(r, "t", "f", COUNTER, "2").unwrap())),
            ("a rollback", |r| drop(r.background.block_on(r.set_traffic("t", "f", &Traffic::Previous)).unwrap())),
            ("a quarantine", |r| {
                let source = r.catalog.resolve("t", "f").unwrap().revisions[0].source.clone();
                std::fs::remove_file(r.catalog.files.source(&source)).unwrap();
                r.background.block_on(r.quarantine(&source, "missing"));
            }),
            ("a deletion", |r| r.background.block_on(r.delete("t", "f")).unwrap()),
        ];
        deploy(&runtime, "t", "f", COUNTER, "1").unwrap();
        let began = Instant::now();
        on.block_on(call(&runtime, "t", "f", "spin", json!([TIMED]))).unwrap();
        let long = f64::from(TIMED) * LONG.as_secs_f64() / began.elapsed().as_secs_f64();
        #[expect(clippy::cast_possible_truncation, reason = "no more than an i32 has room for")]
        let long = long.min(f64::from(i32::MAX)) as i32;
        // What was timed is no longer in the way.
        on.block_on(runtime.set_secret("t", "f", "A", Secret::new(b"0").unwrap())).unwrap();
        for (what, change) in changes {
            if what == "a deletion" {
                deploy(&runtime, "t", "f", COUNTER, "1").unwrap();
            }
            assert_eq!(count(&runtime, "t", "f"), 1, "before {what}");
            assert_eq!(count(&runtime, "t", "f"), 2, "before {what}");
            let shared = runtime.clone();
            let running = on.spawn(async move { call(&shared, "t", "f", "spin", json!([long])).await });
            while kept(&runtime) > 0 {
                std::thread::yield_now();
            }
            // It has the kept instance, and another takes its place.
            assert_eq!(count(&runtime, "t", "f"), 1, "before {what}");
            assert_eq!(kept(&runtime), 1);
            change(&runtime);
            assert!(!running.is_finished(), "{what} took too long");
            assert_eq!(kept(&runtime), 0, "after {what}");
            on.block_on(running).unwrap().unwrap();
            assert_eq!(kept(&runtime), 0, "after {what} and the call that ran meanwhile");
        }
    }

    #[test]
    fn a_tenants_own_memory_limit_costs_nobody_else_a_kept_instance() {
        const PAGE: u64 = 64 << 10;
        let (runtime, _data) = opened(|config| {
            let limits = LimitsOverride { tenant_memory_bytes_max: Some(3 * PAGE), ..LimitsOverride::default() };
            config.tenant.insert("small".to_owned(), limits);
        });
        for tenant in ["small", "other"] {
            deploy(&runtime, tenant, "f", COUNTER, "").unwrap();
            assert_eq!((count(&runtime, tenant, "f"), count(&runtime, tenant, "f")), (json!(1), json!(2)));
        }
        deploy(&runtime, "small", "big", &COUNTER.replace("memory 1", "memory 3"), "").unwrap();
        assert_eq!(count(&runtime, "small", "big"), 1, "its other instance gives way");
        assert_eq!(count(&runtime, "other", "f"), 3, "the other tenant's stays");
        assert_eq!(count(&runtime, "small", "f"), 1);
    }

    #[test]
    fn deploys_that_race_do_not_exceed_the_functions_a_tenant_may_have() {
        let (runtime, _data) = opened(|config| config.limits.functions_max = 3);
        let wasm: Arc<[u8]> = wat::parse_str(COUNTER).unwrap().into();
        let racing: Vec<_> = (0..8)
            .map(|n| {
                let (runtime, wasm) = (runtime.clone(), wasm.clone());
                let on = runtime.background.clone();
                on.spawn(async move {
                    runtime.deploy_bytes("t", &format!("f{n}"), &wasm, SettingsPatch::default()).await.map(drop)
                })
            })
            .collect();
        let ended: Vec<_> = racing.into_iter().map(|one| runtime.background.block_on(one).unwrap()).collect();
        assert_eq!(ended.iter().filter(|ended| ended.is_ok()).count(), 3, "{ended:?}");
        assert_eq!(runtime.catalog.list("t").len(), 3);
        for refused in ended.into_iter().filter_map(Result::err) {
            assert!(refused.to_string().contains("functions_max"), "{refused}");
        }
        // A revision of one that is there needs no more room.
        deploy(&runtime, "t", &runtime.catalog.list("t")[0].name, COUNTER, "again").unwrap();
    }

    #[test]
    fn rollbacks_that_race_each_go_back_by_one() {
        let (runtime, _data) = opened(|_| {});
        let first = deploy(&runtime, "t", "f", COUNTER, "1").unwrap().traffic[0].revision.clone();
        for env in ["2", "3"] {
            deploy(&runtime, "t", "f", COUNTER, env).unwrap();
        }
        let back = || runtime.set_traffic("t", "f", &Traffic::Previous);
        let (one, two) = runtime.background.block_on(async { tokio::join!(back(), back()) });
        one.unwrap();
        two.unwrap();
        assert_eq!(runtime.catalog.resolve("t", "f").unwrap().traffic[0].revision, first);
        let none = runtime.background.block_on(back()).unwrap_err();
        assert!(matches!(&none, Rejection::Conflict { why } if why.contains("no revision deployed before")), "{none}");
    }

    #[test]
    fn only_what_a_module_is_known_to_cause_is_its_fault() {
        let (runtime, _data) = opened(|config| {
            let limits = LimitsOverride { table_elements_max: Some(10), ..LimitsOverride::default() };
            config.tenant.insert("t".to_owned(), limits);
        });
        let table = "(module (table 11 funcref) (func (export \"count\")))";
        let function = deploy(&runtime, "t", "table", table, "").unwrap();
        let refused = runtime.background.block_on(call(&runtime, "t", "table", "count", json!([]))).unwrap_err();
        assert!(
            matches!(&refused, Failure::Rejected(Rejection::ModuleOverLimits { why }) if why.contains("11 elements")),
            "{refused}"
        );

        let many = |part: &str, n: usize| format!("(module {} (func (export \"count\")))", part.repeat(n));
        for wide in [many("(memory 0)", 5), many("(table 0 funcref)", 9)] {
            let refused = deploy(&runtime, "t", "wide", &wide, "").unwrap_err();
            assert!(matches!(&refused, Failure::Rejected(Rejection::ModuleOverLimits { .. })), "{refused}");
        }

        let running = Arc::new(RunningCall {
            id: 0,
            serving: crate::catalog::Serving::only(function),
            account: runtime.admission.account("t"),
            surroundings: runtime.surroundings.clone(),
            arrived: Instant::now(),
            queued: Duration::ZERO,
            deadline_ms: 1000,
            may_reuse: false,
            used: Used::default(),
            series: Arc::default(),
            span: tracing::Span::none().into(),
        });
        let store = state::store(runtime.engines.get(EngineKind::Plain), &running, None);
        let ours = runtime.pool.cannot_start(&store, &wasmtime::Error::msg("/dev/shm: no space left"));
        assert!(matches!(&ours, GuestError::Bug(_)), "{ours:?}");
    }
}
