//! Running one file in the foreground, as `tensor-wasm run` does: no tenants, no limits but those asked for, the
//! caller's own stdin, stdout and stderr. Nothing here is on the server's path; the engine differs too (no interruption
//! checks unless there is a time limit, so CPU-bound programs run at full speed).

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use wasmtime::component::types::Type;
use wasmtime::component::{self, Component, ResourceTable};
use wasmtime::{Engine, Module, Store, UpdateDeadline};
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::{FsPerms, WasiCtx, WasiCtxBuilder, WasiCtxView, WasiView};
use wasmtime_wasi_http::{WasiHttpCtx, WasiHttpCtxView, WasiHttpView};

use crate::failure::Fault;
use crate::guest::value::{Path, decode_core, encode_core};
use crate::guest::{component as exports, core, fault};

/// How often a program with a time limit is interrupted to look at the clock.
const TICK: Duration = Duration::from_millis(5);

/// What to run and what to give it.
#[derive(Debug, Default)]
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
}

/// How it ended.
#[derive(Debug, PartialEq, Eq)]
pub enum LocalOutcome {
    Exit(i32),
    /// What the export returned, one line per value.
    Returned(Vec<String>),
}

#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The caller's mistake: no such file, not Wasm, wrong arguments.
    #[error("{0}")]
    Input(String),
    /// The guest's.
    #[error("{0}")]
    Guest(Fault),
}

struct State {
    wasi: WasiCtx,
    table: ResourceTable,
    http: WasiHttpCtx,
}

impl WasiView for State {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

impl WasiHttpView for State {
    fn http(&mut self) -> WasiHttpCtxView<'_> {
        WasiHttpCtxView { ctx: &mut self.http, table: &mut self.table, hooks: wasmtime_wasi_http::default_hooks() }
    }
}

fn input(error: impl std::fmt::Display) -> LocalError {
    LocalError::Input(format!("{error:#}"))
}

fn guest(error: &wasmtime::Error) -> LocalError {
    LocalError::Guest(fault(error))
}

impl LocalRun {
    pub async fn run(self) -> Result<LocalOutcome, LocalError> {
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
        let time_limit = TimeLimit::start(&engine, self.timeout);
        let running = async {
            match wasmparser::Parser::is_component(&bytes) {
                true => self.component(&engine, &bytes, &name).await,
                false => self.module(&engine, &bytes, &name).await,
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

    async fn module(&self, engine: &Engine, bytes: &[u8], name: &str) -> Result<LocalOutcome, LocalError> {
        let module = Module::new(engine, bytes).map_err(|e| input(format!("{name}: {e:#}")))?;
        let mut linker = wasmtime::Linker::<WasiP1Ctx>::new(engine);
        wasmtime_wasi::p1::add_to_linker_async(&mut linker, |ctx| ctx).map_err(input)?;
        let mut store = Store::new(engine, self.wasi()?.build_p1());
        self.limit(&mut store);
        let instance = linker.instantiate_async(&mut store, &module).await.map_err(|e| starting(name, &e))?;
        let Some(export) = &self.invoke else {
            let start = instance.get_typed_func::<(), ()>(&mut store, "_start").map_err(|_| {
                let names = core::exports(&module).into_iter().map(|e| e.name).collect::<Vec<_>>().join(", ");
                input(format!("{name}: it is no command (no _start); choose an export with --invoke: {names}"))
            })?;
            return exited(start.call_async(&mut store, ()).await.map(|()| 0));
        };
        let all = core::exports(&module);
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
        let function = instance.get_func(&mut store, export).ok_or_else(|| input("the export vanished"))?;
        match function.call_async(&mut store, &args, &mut results).await {
            Ok(()) => Ok(LocalOutcome::Returned(results.iter().map(|v| encode_core(v).to_string()).collect())),
            Err(error) => exited(Err(error)),
        }
    }

    async fn component(&self, engine: &Engine, bytes: &[u8], name: &str) -> Result<LocalOutcome, LocalError> {
        let component = Component::new(engine, bytes).map_err(|e| input(format!("{name}: {e:#}")))?;
        let mut linker = component::Linker::<State>::new(engine);
        wasmtime_wasi::p2::add_to_linker_async(&mut linker).map_err(input)?;
        wasmtime_wasi::p3::add_to_linker(&mut linker).map_err(input)?;
        wasmtime_wasi_http::p2::add_only_http_to_linker_async(&mut linker).map_err(input)?;
        wasmtime_wasi_http::p3::add_to_linker(&mut linker).map_err(input)?;
        let pre = linker.instantiate_pre(&component).map_err(|e| starting(name, &e))?;
        let state = State { wasi: self.wasi()?.build(), table: ResourceTable::new(), http: WasiHttpCtx::new() };
        let mut store = Store::new(engine, state);
        self.limit(&mut store);
        let Some(export) = &self.invoke else {
            return self.command(&mut store, pre, &component, name).await;
        };
        let all = exports::exports(&component);
        let at = exports::find(&all, Some(export)).map_err(input)?;
        let found = &all[at];
        let params: Vec<(&str, Type)> = found.ty.params().collect();
        self.check_count(export, params.len())?;
        let args = self.args.iter().zip(&params).map(|(arg, (name, ty))| wave(arg, name, ty));
        let args = args.collect::<Result<Vec<_>, _>>()?;
        let instance = pre.instantiate_async(&mut store).await.map_err(|e| starting(name, &e))?;
        let function = instance.get_func(&mut store, found.index).ok_or_else(|| input("the export vanished"))?;
        let mut results = vec![component::Val::Bool(false); found.ty.results().len()];
        if let Err(error) = function.call_async(&mut store, &args, &mut results).await {
            return exited(Err(error));
        }
        let show = |value: &component::Val| {
            value.to_wave().unwrap_or_else(|_| exports::to_json(std::slice::from_ref(value)).to_string())
        };
        Ok(LocalOutcome::Returned(results.iter().map(show).collect()))
    }

    async fn command(
        &self,
        store: &mut Store<State>,
        pre: component::InstancePre<State>,
        component: &Component,
        name: &str,
    ) -> Result<LocalOutcome, LocalError> {
        if let Ok(command) = wasmtime_wasi::p2::bindings::CommandPre::new(pre.clone()) {
            let command = command.instantiate_async(&mut *store).await.map_err(|e| starting(name, &e))?;
            let ended = command.wasi_cli_run().call_run(store).await;
            return exited(ended.map(|result| i32::from(result.is_err())));
        }
        if let Ok(command) = wasmtime_wasi::p3::bindings::CommandPre::new(pre) {
            let command = command.instantiate_async(&mut *store).await.map_err(|e| starting(name, &e))?;
            let ended = store.run_concurrent(async |accessor| command.wasi_cli_run().call_run(accessor).await).await;
            return exited(ended.flatten().map(|result| i32::from(result.is_err())));
        }
        let names = exports::exports(component).into_iter().map(|e| e.name).collect::<Vec<_>>().join(", ");
        Err(input(format!(
            "{name}: it is no command (no wasi:cli/run); choose an export with --invoke ({names}), or serve it with \
             `tensor-wasm serve` and `tensor-wasm deploy` if it is a wasi:http handler"
        )))
    }

    fn wasi(&self) -> Result<WasiCtxBuilder, LocalError> {
        let mut builder = WasiCtx::builder();
        builder.inherit_stdio().envs(&self.env);
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
            let until = std::time::Instant::now() + limit;
            store.set_epoch_deadline(1);
            store.epoch_deadline_callback(move |_| match std::time::Instant::now() < until {
                true => Ok(UpdateDeadline::Yield(1)),
                false => Err(wasmtime::Error::new(Fault::Deadline { deadline_ms: millis(limit) })),
            });
        }
    }

    fn check_count(&self, export: &str, expected: usize) -> Result<(), LocalError> {
        let given = self.args.len();
        match given == expected {
            true => Ok(()),
            false => Err(input(format!("export {export:?} takes {expected} argument(s), {given} were given"))),
        }
    }
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
        Err(error) => match fault(&error) {
            Fault::Exit { code } => Ok(LocalOutcome::Exit(code)),
            other => Err(LocalError::Guest(other)),
        },
    }
}

/// Not linkable is the caller's mistake; a trap while starting is the guest's.
fn starting(name: &str, error: &wasmtime::Error) -> LocalError {
    match error.is::<wasmtime::Trap>() || error.is::<Fault>() || error.is::<wasmtime_wasi::I32Exit>() {
        true => guest(error),
        false => input(format!("{name}: {error:#}")),
    }
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
