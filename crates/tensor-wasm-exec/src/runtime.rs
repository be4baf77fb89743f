//! The runtime as a whole: what it is made of, how it opens, how functions are deployed, how it stops. The path of one
//! call is `invoke.rs`.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use tensor_wasm_gpu::Device;
use tokio::runtime::Handle;
use tokio::sync::SetOnce;

use crate::admission::{Account, Admission};
use crate::catalog::store::{Change, Table};
use crate::catalog::upload::{Upload, Uploaded};
use crate::catalog::{
    Catalog, Damage, FunctionRecord, Kind, MemoryKind, Revision, RevisionRecord, Secret, SecretsAccess, Settings,
    SettingsPatch, SourceError, SourceHash, StoreError, check_name, now_ms,
};
use crate::config::Config;
use crate::engine::compile::{CompileCost, Compiler};
use crate::engine::pool::{EntryPoint, LinkedRevision, Pool};
use crate::engine::{EngineKind, Engines};
use crate::failure::{Bug, Failure, Rejection};
use crate::guest::http::Outbound;
use crate::guest::running::Surroundings;
use crate::guest::signature::{self, ExportSignature};
use crate::jobs::{Jobs, Recovered, Recovery};
use crate::logs::Logs;
use crate::metrics::Metrics;
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
        let (catalog, mut damages) = Catalog::open(data_dir, secrets)?;
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
        let metrics = Arc::new(Metrics::new(config.server.metrics_functions_max));
        metrics.quarantined.inc_by(damages.len() as u64);
        let engines = Arc::new(Engines::new(&config).map_err(|e| OpenError::Engine(format!("{e:#}")))?);
        let pool = Pool::new(engines.clone(), &config, background.clone(), metrics.clone())
            .map_err(|e| OpenError::Engine(format!("{e:#}")))?;
        let compiler = match worker_exe {
            Some(exe) => Compiler::with_worker(exe, &config),
            None => Compiler::in_process(&config),
        };
        let logs = Arc::<Logs>::default();
        let runtime = Arc::new_cyclic(|me| Runtime {
            me: me.clone(),
            catalog: Arc::new(catalog),
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
            }),
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

    pub fn device(&self) -> Option<&Device> {
        self.device.get()
    }

    /// Where work goes that must not delay requests: deploys, long guests, jobs.
    pub fn background(&self) -> &Handle {
        &self.background
    }

    /// Begins to receive a module or component for [`Runtime::deploy`], of at most the size its tenant may deploy.
    pub fn upload(&self, tenant: &str) -> Result<Upload, Rejection> {
        Upload::begin(&self.catalog.files, self.config.limits_of(tenant).module_bytes_max)
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
        if known.is_none() && self.catalog.count(tenant) >= limits.functions_max {
            let why = format!(
                "tenant {tenant:?} has {} functions, which is its limit ([limits] functions_max)",
                limits.functions_max
            );
            return Err(Rejection::Conflict { why }.into());
        }
        let settings = patch.over(&known.as_ref().map(|f| f.serving_settings()).unwrap_or_default());
        settings.check()?;
        let source = wasm.source().clone();
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
            revise(settings)
        };
        let function = self.catalog.deploy(tenant, name, limits.revisions_max, revise_again).await?;
        self.pool.forget(&function.id);
        Ok(Deployed { function, cost })
    }

    pub async fn delete(&self, tenant: &str, name: &str) -> Result<(), Rejection> {
        let function = self.catalog.resolve(tenant, name)?;
        self.catalog.delete(tenant, name).await?;
        self.pool.forget(&function.id);
        self.logs.forget(&function.id);
        self.metrics.functions.forget(&function.id);
        Ok(())
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

    /// What the revision with (most of) a function's traffic exports. Loads it, so call it on the background runtime.
    pub async fn exports(&self, function: &FunctionRecord) -> Result<Vec<ExportSignature>, Failure> {
        let Some(revision) = function.current() else { return Ok(Vec::new()) };
        if let Some(why) = &revision.quarantined {
            let (name, revision) = (function.name.clone(), revision.revision.short().to_owned());
            return Err(Rejection::Quarantined { name, revision, why: why.clone() }.into());
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
                    self.metrics.quarantined.inc();
                    self.catalog.quarantine(source, &why).await;
                    let (name, revision) = (name.to_owned(), revision.revision.short().to_owned());
                    return Err(Rejection::Quarantined { name, revision, why }.into());
                }
            }
            self.compile(source, account, revision.settings.memory).await.map(drop)
        };
        self.pool.load(&self.catalog, source, revision.kind, revision.flavor, revision.settings.memory, recompile).await
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
                    self.metrics.quarantined.inc();
                    self.catalog.quarantine(&revision.source, &why).await;
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
