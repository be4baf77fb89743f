//! Running one file in the foreground, as `tensor-wasm run` does: no tenants, no limits but those asked for, the
//! caller's own stdin, stdout and stderr. The engine differs from the server's (no interruption checks unless there is
//! a time limit, so CPU-bound programs run at full speed), the linkers are the server's. What reaches outside the
//! process (directories, sockets, HTTP, a device) is closed unless asked for.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use tensor_wasm_gpu::Device;
use tensor_wasm_launch::Kernels;
use tokio::sync::SetOnce;
use wasmtime::component::types::Type;
use wasmtime::component::{self, Component};
use wasmtime::{Engine, Module, Store, UpdateDeadline};
use wasmtime_wasi::sockets::SocketAddrUse;
use wasmtime_wasi::{FsPerms, WasiCtx, WasiCtxBuilder};

use crate::admission::Account;
use crate::catalog::{Flavor, FunctionRecord, Kind, Revision, RevisionRecord, Serving, Settings, Share, SourceHash};
use crate::config::{GPU_KERNEL_MS_MAX, Limits};
use crate::engine::pool::{component_linker, core_linker};
use crate::failure::{Bug, Fault};
use crate::guest::http::Outbound;
use crate::guest::running::{RunningCall, Surroundings, Used};
use crate::guest::state::{State, foreground_store};
use crate::guest::tensor::plan::PlanLines;
use crate::guest::value::{Path, decode_core, encode_core};
use crate::guest::{GuestError, component as exports, core, failed_in_guest, gpu, guest_error, tensor};

/// How often a program with a time limit is interrupted to look at the clock.
const TICK: Duration = Duration::from_millis(5);

/// The time limit of launches where the program has none.
const NO_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// More than any device has, and small enough to be added up.
const DEVICE_MEMORY_BYTES_MAX: u64 = 1 << 48;

/// Allows every address (`--net` without a value).
pub const ANY_ADDRESS: &str = "*";

/// What to run and what to give it.
#[derive(Default)]
pub struct LocalRun {
    pub file: PathBuf,
    /// The program's arguments, or the export's.
    pub args: Vec<String>,
    pub invoke: Option<String>,
    pub env: Vec<(String, String)>,
    /// Host directory and the name the guest knows it by.
    pub dirs: Vec<(PathBuf, String)>,
    pub timeout: Option<Duration>,
    /// Keep compiled code in the user's cache directory, as `wasmtime run` does and in the same place.
    pub cache: bool,
    /// Addresses it may use sockets for: `HOST:PORT`, or [`ANY_ADDRESS`].
    pub net: Vec<String>,
    /// Hosts it may send HTTP requests to: `HOST`, `HOST:PORT` or `*`.
    pub allow_http: Vec<String>,
    /// Opens the device, for programs that import it.
    pub device: Option<Box<dyn FnOnce() -> Result<Device, String>>>,
}

/// How it ended.
#[derive(Debug, PartialEq, Eq)]
pub enum LocalOutcome {
    Exit(i32),
    /// What the export returned, one line per value.
    Returned {
        values: Vec<String>,
        is_err: bool,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The caller's mistake: no such file, not Wasm, wrong arguments.
    #[error("{0}")]
    Input(String),
    /// The guest's.
    #[error("{0}")]
    Guest(Fault),
    #[error("a bug of TensorWasm: {0}")]
    Bug(Bug),
}

/// What was asked for and not allowed, for a hint. The guest itself is told no more than that it was denied.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Denied {
    pub http: Option<String>,
    pub address: Option<String>,
}

fn input(error: impl std::fmt::Display) -> LocalError {
    LocalError::Input(format!("{error:#}"))
}

fn guest(error: &wasmtime::Error) -> LocalError {
    match guest_error(error, usize::MAX) {
        GuestError::Faulted(fault) => LocalError::Guest(fault),
        GuestError::Rejected(rejection) => input(rejection),
        GuestError::Bug(bug) => LocalError::Bug(bug),
    }
}

/// What is checked whenever a guest's socket is about to use an address.
#[derive(Default)]
struct SocketRules {
    any: bool,
    allowed: Vec<SocketAddr>,
    denied: OnceLock<SocketAddr>,
}

impl SocketRules {
    async fn resolve(net: &[String]) -> Result<SocketRules, LocalError> {
        let mut rules = SocketRules::default();
        for rule in net {
            if rule == ANY_ADDRESS {
                rules.any = true;
                continue;
            }
            let found = tokio::net::lookup_host(rule).await;
            let found = found.map_err(|e| input(format!("--net={rule}: {e}; give HOST:PORT, or --net for any")))?;
            rules.allowed.extend(found);
        }
        Ok(rules)
    }

    fn allows(&self, address: SocketAddr, used: SocketAddrUse) -> bool {
        let is_allowed = self.any
            || self.allowed.contains(&address)
            || match used {
                // What the system chooses for a connection; nothing listens there.
                SocketAddrUse::TcpBind | SocketAddrUse::UdpBind => address.ip().is_unspecified() && address.port() == 0,
                // It listens at an address that is allowed.
                SocketAddrUse::TcpAccept => true,
                _ => false,
            };
        if !is_allowed {
            self.denied.get_or_init(|| address);
        }
        is_allowed
    }
}

impl LocalRun {
    /// Runs it. What it was denied is told beside, whichever way it ended.
    pub async fn run(mut self) -> (Result<LocalOutcome, LocalError>, Denied) {
        let outbound = Outbound::new(&self.allow_http);
        let opener = self.device.take();
        let call = Arc::new(self.foreground(outbound, opener.is_some()));
        let sockets = match SocketRules::resolve(&self.net).await {
            Ok(rules) => Arc::new(rules),
            Err(error) => return (Err(error), Denied::default()),
        };
        let outcome = self.run_for(&call, &sockets, opener).await;
        let http = call.surroundings.outbound.denied().map(str::to_owned);
        (outcome, Denied { http, address: sockets.denied.get().map(SocketAddr::to_string) })
    }

    async fn run_for(
        &self,
        call: &Arc<RunningCall>,
        sockets: &Arc<SocketRules>,
        opener: Option<Box<dyn FnOnce() -> Result<Device, String>>>,
    ) -> Result<LocalOutcome, LocalError> {
        let name = self.file.display().to_string();
        let bytes = std::fs::read(&self.file).map_err(|e| input(format!("{name}: {e}")))?;
        let bytes = wat::parse_bytes(&bytes).map_err(|e| input(format!("{name}: {e}")))?;
        let mut config = wasmtime::Config::new();
        config.epoch_interruption(self.timeout.is_some());
        if self.cache {
            // Without a place to keep it, it is compiled every time.
            config.cache(wasmtime::Cache::from_file(None).ok());
        }
        let engine = Engine::new(&config).map_err(input)?;
        let code = if wasmparser::Parser::is_component(&bytes) {
            Component::new(&engine, &bytes).map(LocalCode::Component)
        } else {
            Module::new(&engine, &bytes).map(LocalCode::Module)
        };
        let code = code.map_err(|e| input(format!("{name}: {e:#}")))?;
        match (code.imports_device(), opener) {
            (Some(import), None) => {
                return Err(input(format!(
                    "{name}: it imports the GPU ({import}); give it one with --device auto (or cpu, cuda, cuda:N)"
                )));
            }
            (import, Some(open)) if import.is_some() || code.imports_tensors() => {
                let device = open().map_err(input)?;
                let kernels = Kernels::new(device, None, call.surroundings.background.clone());
                let _ = call.surroundings.kernels.set(Ok(Arc::new(kernels)));
            }
            // Tensors are computed on the CPU then.
            (None, _) | (Some(_), Some(_)) => {}
        }
        let mut store = foreground_store(&engine, call, self.wasi(sockets)?);
        self.limit(&mut store);
        let time_limit = TimeLimit::start(&engine, self.timeout);
        let running = async {
            match code {
                LocalCode::Component(component) => self.component(&mut store, &component, &name).await,
                LocalCode::Module(module) => self.module(&mut store, &module, &name).await,
            }
        };
        let outcome = match self.timeout {
            None => running.await,
            Some(limit) => tokio::time::timeout(limit, running)
                .await
                .unwrap_or_else(|_| Err(LocalError::Guest(Fault::Deadline { deadline_ms: millis(limit) }))),
        };
        drop(time_limit);
        outcome
    }

    /// The call that the program runs for: nobody's but the caller's, without limits.
    fn foreground(&self, outbound: Outbound, has_device: bool) -> RunningCall {
        let settings = Settings { gpu: has_device, ..Settings::default() };
        let source = SourceHash::of(b"");
        let revision = Revision::of(&source, &settings);
        let record = RevisionRecord {
            revision: revision.clone(),
            source,
            kind: Kind::CoreCommand,
            flavor: Flavor::Plain,
            bytes: 0,
            created_ms: 0,
            settings,
            quarantined: None,
        };
        let function = FunctionRecord {
            id: String::new(),
            tenant: String::new(),
            name: String::new(),
            created_ms: 0,
            revisions: vec![record],
            traffic: vec![Share { revision, weight: 1 }],
            secret_names: Default::default(),
            secrets: Default::default(),
            superseded: Default::default(),
        };
        let limits = Limits {
            memory_bytes_max: u64::MAX,
            tenant_memory_bytes_max: u64::MAX,
            hostcall_bytes_max: usize::MAX,
            gpu_memory_bytes_max: DEVICE_MEMORY_BYTES_MAX,
            tensor_memory_bytes_max: u64::MAX,
            tensor_elements_max: u64::MAX,
            gpu_kernel_ms_max: GPU_KERNEL_MS_MAX,
            ..Limits::default()
        };
        RunningCall {
            id: 0,
            serving: Serving::only(Arc::new(function)),
            account: Arc::new(Account::foreground(limits)),
            surroundings: Arc::new(Surroundings {
                outbound,
                background: tokio::runtime::Handle::current(),
                metrics: Arc::default(),
                logs: Arc::default(),
                kernels: SetOnce::new(),
                pinned: Arc::default(),
                plans: PlanLines::new(0),
                models: OnceLock::new(),
            }),
            arrived: Instant::now(),
            queued: Duration::ZERO,
            deadline_ms: millis(self.timeout.unwrap_or(NO_LIMIT).min(NO_LIMIT)),
            may_reuse: false,
            used: Used::default(),
            series: Arc::default(),
            span: tracing::Span::none().into(),
        }
    }

    async fn module(&self, store: &mut Store<State>, module: &Module, name: &str) -> Result<LocalOutcome, LocalError> {
        let linker = core_linker(store.engine()).map_err(input)?;
        let instance = linker.instantiate_async(&mut *store, module).await.map_err(|e| starting(name, &e))?;
        let Some(export) = &self.invoke else {
            let start = instance.get_typed_func::<(), ()>(&mut *store, "_start").map_err(|_| {
                let names = core::exports(module).into_iter().map(|e| e.name).collect::<Vec<_>>().join(", ");
                input(format!("{name}: it is no command (no _start); choose an export with --invoke: {names}"))
            })?;
            return exited(start.call_async(&mut *store, ()).await.map(|()| 0));
        };
        let all = core::exports(module);
        let Some(found) = all.iter().find(|e| e.name == *export) else {
            return Err(input(exports::missing(export, all.iter().map(|e| e.name.as_str()))));
        };
        self.check_count(export, found.ty.params().len())?;
        let root = Path::root("arguments");
        let decode = |(i, (arg, ty)): (usize, (&String, wasmtime::ValType))| {
            decode_core(&number(arg), &ty, root.index(i)).map_err(input)
        };
        let args = self.args.iter().zip(found.ty.params()).enumerate().map(decode).collect::<Result<Vec<_>, _>>()?;
        let mut results = vec![wasmtime::Val::I32(0); found.ty.results().len()];
        let function = instance.get_func(&mut *store, export).ok_or_else(vanished)?;
        match function.call_async(&mut *store, &args, &mut results).await {
            Ok(()) => {
                let values = results.iter().map(|v| encode_core(v).to_string()).collect();
                Ok(LocalOutcome::Returned { values, is_err: false })
            }
            Err(error) => exited(Err(error)),
        }
    }

    async fn component(
        &self,
        store: &mut Store<State>,
        component: &Component,
        name: &str,
    ) -> Result<LocalOutcome, LocalError> {
        let mut linker = component_linker(store.engine()).map_err(input)?;
        wasmtime_wasi::p3::add_to_linker(&mut linker).map_err(input)?;
        wasmtime_wasi_http::p3::add_to_linker(&mut linker).map_err(input)?;
        let pre = linker.instantiate_pre(component).map_err(|e| starting(name, &e))?;
        let Some(export) = &self.invoke else {
            return self.command(store, pre, component, name).await;
        };
        let all = exports::exports(component);
        let at = exports::find(&all, Some(export)).map_err(input)?;
        let found = &all[at];
        let params: Vec<(&str, Type)> = found.ty.params().collect();
        self.check_count(export, params.len())?;
        let args = self.args.iter().zip(&params).map(|(arg, (name, ty))| wave(arg, name, ty));
        let args = args.collect::<Result<Vec<_>, _>>()?;
        let instance = pre.instantiate_async(&mut *store).await.map_err(|e| starting(name, &e))?;
        let function = instance.get_func(&mut *store, found.index).ok_or_else(vanished)?;
        let mut results = vec![component::Val::Bool(false); found.ty.results().len()];
        if let Err(error) = function.call_async(&mut *store, &args, &mut results).await {
            return exited(Err(error));
        }
        let show = |value: &component::Val| {
            value.to_wave().unwrap_or_else(|_| exports::to_json(std::slice::from_ref(value)).to_string())
        };
        let is_err = exports::is_err(&results);
        Ok(LocalOutcome::Returned { values: results.iter().map(show).collect(), is_err })
    }

    async fn command(
        &self,
        store: &mut Store<State>,
        pre: component::InstancePre<State>,
        component: &Component,
        name: &str,
    ) -> Result<LocalOutcome, LocalError> {
        // Toolchains that target WASI 0.3 export the 0.2 `run` beside it; the newer one is what it was written for.
        if let Ok(command) = wasmtime_wasi::p3::bindings::CommandPre::new(pre.clone()) {
            let command = command.instantiate_async(&mut *store).await.map_err(|e| starting(name, &e))?;
            let ended = store.run_concurrent(async |accessor| command.wasi_cli_run().call_run(accessor).await).await;
            return exited(ended.flatten().map(|result| i32::from(result.is_err())));
        }
        if let Ok(command) = wasmtime_wasi::p2::bindings::CommandPre::new(pre) {
            let command = command.instantiate_async(&mut *store).await.map_err(|e| starting(name, &e))?;
            let ended = command.wasi_cli_run().call_run(store).await;
            return exited(ended.map(|result| i32::from(result.is_err())));
        }
        let names = exports::exports(component).into_iter().map(|e| e.name).collect::<Vec<_>>().join(", ");
        Err(input(format!(
            "{name}: it is no command (no wasi:cli/run); choose an export with --invoke ({names}), or serve it with \
             `tensor-wasm serve` and `tensor-wasm deploy` if it is a wasi:http handler"
        )))
    }

    fn wasi(&self, sockets: &Arc<SocketRules>) -> Result<WasiCtxBuilder, LocalError> {
        let mut builder = WasiCtx::builder();
        builder.inherit_stdio().envs(&self.env);
        // Sockets may always be made; what they may be used for is asked each time.
        builder.allow_tcp(true).allow_udp(true);
        // A name can carry anything to whoever answers for it: looked up only where a rule has one.
        let is_name = |rule: &String| rule.parse::<SocketAddr>().is_err();
        builder.allow_ip_name_lookup(self.net.iter().any(is_name));
        let rules = sockets.clone();
        builder.socket_addr_check(move |address, used| {
            let is_allowed = rules.allows(address, used);
            Box::pin(async move { is_allowed })
        });
        // Nothing else runs in this process, so blocking file operations need no thread of their own.
        builder.allow_blocking_current_thread(self.timeout.is_none());
        if self.invoke.is_none() {
            let program = self.file.file_name().unwrap_or_default().to_string_lossy();
            builder.arg(program).args(&self.args);
        }
        for (host, guest) in &self.dirs {
            let opened = builder.preopened_dir(host, guest, FsPerms::ReadWrite);
            opened.map_err(|e| input(format!("--dir {}: {e:#}", host.display())))?;
        }
        Ok(builder)
    }

    fn limit<T>(&self, store: &mut Store<T>) {
        if let Some(limit) = self.timeout {
            let until = Instant::now() + limit;
            store.set_epoch_deadline(1);
            store.epoch_deadline_callback(move |_| {
                if Instant::now() < until {
                    return Ok(UpdateDeadline::Yield(1));
                }
                Err(wasmtime::Error::new(Fault::Deadline { deadline_ms: millis(limit) }))
            });
        }
    }

    fn check_count(&self, export: &str, expected: usize) -> Result<(), LocalError> {
        let given = self.args.len();
        if given != expected {
            return Err(input(format!("export {export:?} takes {expected} argument(s), {given} were given")));
        }
        Ok(())
    }
}

/// What was compiled.
enum LocalCode {
    Module(Module),
    Component(Component),
}

impl LocalCode {
    /// Whether it computes tensors, for which it needs no device, but uses one that it is given.
    fn imports_tensors(&self) -> bool {
        match self {
            LocalCode::Module(_) => false,
            LocalCode::Component(component) => {
                let ty = component.component_type();
                ty.imports(component.engine()).any(|(name, _)| name.starts_with(tensor::component::PACKAGE))
            }
        }
    }

    /// What it imports of the device, if it does.
    fn imports_device(&self) -> Option<String> {
        match self {
            LocalCode::Module(module) => {
                let found = module.imports().any(|import| import.module() == gpu::flat::MODULE);
                found.then(|| gpu::flat::MODULE.to_owned())
            }
            LocalCode::Component(component) => {
                let ty = component.component_type();
                let mut names = ty.imports(component.engine()).map(|(name, _)| name.to_owned());
                names.find(|name| name.starts_with(gpu::component::PACKAGE))
            }
        }
    }
}

fn vanished() -> LocalError {
    LocalError::Bug(Bug("an instance lacks an export of its code".to_owned()))
}

/// Advances the engine's epoch while a program with a time limit runs.
struct TimeLimit {
    /// Hung up when the program is done, which ends the clock.
    _alive: Option<std::sync::mpsc::Sender<()>>,
}

impl TimeLimit {
    fn start(engine: &Engine, timeout: Option<Duration>) -> TimeLimit {
        if timeout.is_none() {
            return TimeLimit { _alive: None };
        }
        let (alive, ended) = std::sync::mpsc::channel();
        let engine = engine.clone();
        std::thread::spawn(move || {
            while ended.recv_timeout(TICK) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                engine.increment_epoch();
            }
        });
        TimeLimit { _alive: Some(alive) }
    }
}

fn millis(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
}

fn exited(result: wasmtime::Result<i32>) -> Result<LocalOutcome, LocalError> {
    match result {
        Ok(code) => Ok(LocalOutcome::Exit(code)),
        Err(error) => match guest(&error) {
            LocalError::Guest(Fault::Exit { code }) => Ok(LocalOutcome::Exit(code)),
            other => Err(other),
        },
    }
}

/// Not linkable is the caller's mistake; a trap while starting is the guest's.
fn starting(name: &str, error: &wasmtime::Error) -> LocalError {
    if failed_in_guest(error) { guest(error) } else { input(format!("{name}: {error:#}")) }
}

/// An argument from the command line as JSON: a number where it reads as one.
fn number(arg: &str) -> Value {
    match serde_json::from_str(arg) {
        Ok(number @ Value::Number(_)) => number,
        _ => Value::String(arg.to_owned()),
    }
}

/// An argument from the command line for a component: WAVE syntax, where strings and characters may go without quotes.
fn wave(arg: &str, name: &str, ty: &Type) -> Result<component::Val, LocalError> {
    let parsed = component::Val::from_wave(ty, arg);
    match (ty, parsed) {
        (_, Ok(value)) => Ok(value),
        (Type::String, Err(_)) => Ok(component::Val::String(arg.to_owned())),
        (Type::Char, Err(_)) if arg.chars().count() == 1 => Ok(component::Val::Char(arg.chars().next().unwrap_or(' '))),
        (_, Err(error)) => Err(input(format!("argument {name:?}: {arg:?}: {error}"))),
    }
}

/// The binary form of a file that may be text (`.wat`).
pub fn binary(file: &[u8]) -> Result<std::borrow::Cow<'_, [u8]>, String> {
    // Only text is parsed: bytes that are neither are the server's to refuse, with its own message.
    match std::str::from_utf8(file) {
        Ok(text) if text.trim_start().starts_with(['(', ';']) => wat::parse_bytes(file).map_err(|e| e.to_string()),
        _ => Ok(file.into()),
    }
}
