//! From a deployed module to an artifact that loads by mapping.
//!
//! Compiling untrusted code is the one step whose cost the guest's author chooses, so it happens in a process of its
//! own: with a time limit, a memory limit and a lower priority, killed when it overruns, and unable to take the server
//! down with it. The same binary is started as `tensor-wasm compile-worker`, which calls [`worker`]. Library users who
//! have no such binary compile on a thread instead ([`Compiler::in_process`]) and forgo the limits.
//!
//! Loading maps the artifact into memory as executable code. That is sound only for bytes that Wasmtime itself
//! produced, so an artifact is checked against the digest recorded when it was made before it is mapped.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use wasmtime::component::Component;
use wasmtime::{Module, Precompiled};

use crate::HashMap;
use crate::admission::Account;
use crate::catalog::{Catalog, Flavor, Kind, MemoryKind, SourceHash, hash_of_file, write_private};
use crate::config::{self, Config, Limits};
use crate::engine::{EngineKind, Engines, compiler_config};
use crate::failure::{Bug, Failure, Rejection};

/// CPU seconds beyond the wall-clock limit times the cores it may use: a second net under the parent's timeout.
const CPU_SLACK_S: u64 = 5;

/// How much of a compiler's complaint is passed on.
const MESSAGE_BYTES_MAX: usize = 2_000;

/// Said of a module that imports `kernel`, which no function has.
const KERNEL_MODULE: &str = "it is a kernel module (it imports \"kernel\"), which runs on a device and is no function: try \
                             it with `tensor-wasm kernel run FILE`, or deploy a function with --gpu that loads it";

/// What the compile worker is told.
#[derive(Debug, Serialize, Deserialize)]
pub struct Order {
    pub source: PathBuf,
    pub output: PathBuf,
    pub engine: config::Engine,
    pub memory: MemoryKind,
    pub time_ms_max: u64,
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum CompileAnswer {
    Compiled {
        kind: Kind,
        flavor: Flavor,
        memory_bytes_min: u64,
        cost: CompileCost,
    },
    /// What is wrong with the module.
    Refused {
        why: String,
    },
    /// A file that could not be read or written, which says nothing about the module.
    Unstored {
        file: PathBuf,
        why: String,
    },
    /// A failure of ours, which says nothing about it either.
    Broken {
        why: String,
    },
}

/// What a compilation took, in its worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompileCost {
    pub wall_ms: u64,
    /// On all cores together.
    pub cpu_ms: u64,
}

/// A module or component found fit to compile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Compiled {
    pub kind: Kind,
    pub flavor: Flavor,
    pub cost: CompileCost,
}

pub struct Compiler {
    exe: Option<PathBuf>,
    slots: Semaphore,
    /// One compilation at a time per tenant, so that one tenant's bombs do not hold every slot.
    tenants: Mutex<HashMap<Arc<str>, Arc<Semaphore>>>,
}

/// Code ready to be instantiated.
pub(crate) enum Code {
    Module(Module),
    Component(Component),
}

impl Compiler {
    /// Compiles in worker processes of the given binary.
    pub fn with_worker(exe: PathBuf, config: &Config) -> Compiler {
        Compiler { exe: Some(exe), ..Compiler::in_process(config) }
    }

    /// Compiles on a thread of this process, without time or memory limits.
    pub fn in_process(config: &Config) -> Compiler {
        let slots = Semaphore::new(config.engine.compile_concurrency_max);
        Compiler { exe: None, slots, tenants: Mutex::default() }
    }

    /// Compiles a source that is in the catalog and installs the artifact.
    pub(crate) async fn compile(
        &self,
        catalog: &Catalog,
        engines: &Engines,
        engine_config: &config::Engine,
        source: &SourceHash,
        account: &Account,
        memory: MemoryKind,
    ) -> Result<Compiled, Failure> {
        let limits = &account.limits;
        let turn =
            self.tenants.lock().entry(account.name.clone()).or_insert_with(|| Arc::new(Semaphore::new(1))).clone();
        let turn = Turn { compiler: self, name: account.name.clone(), semaphore: turn };
        let _turn = turn.semaphore.acquire().await.map_err(|e| Bug(e.to_string()))?;
        let _slot = self.slots.acquire().await.map_err(|e| Bug(e.to_string()))?;
        let scratch = catalog.files.scratch();
        let order = Order {
            source: catalog.files.source(source),
            output: scratch.clone(),
            engine: engine_config.clone(),
            memory,
            time_ms_max: limits.compile_ms_max,
        };
        let answer = match &self.exe {
            Some(exe) => ask_worker(exe, &order).await,
            None => tokio::task::spawn_blocking(move || execute(&order)).await.map_err(|e| Bug(e.to_string()).into()),
        };
        let result = install(catalog, engines, (source, memory), limits, &scratch, answer).await;
        if result.is_err() {
            let _ = std::fs::remove_file(&scratch);
        }
        result
    }
}

/// A tenant's place among those that compile; the last to leave takes its entry along.
struct Turn<'a> {
    compiler: &'a Compiler,
    name: Arc<str>,
    semaphore: Arc<Semaphore>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut tenants = self.compiler.tenants.lock();
        // The map's and ours.
        if Arc::strong_count(&self.semaphore) <= 2 {
            tenants.remove(&self.name);
        }
    }
}

async fn install(
    catalog: &Catalog,
    engines: &Engines,
    (source, memory): (&SourceHash, MemoryKind),
    limits: &Limits,
    scratch: &Path,
    answer: Result<CompileAnswer, Failure>,
) -> Result<Compiled, Failure> {
    let compiled = judge(answer?, limits)?;
    let storage = |e: std::io::Error| Rejection::Storage { why: e.to_string() };
    let engine = engines.id(EngineKind::of(compiled.flavor, memory));
    let digest = hash_of_file(scratch).map_err(storage)?.to_hex().to_string();
    // The digest is committed first: a crash in between leaves an old or absent file that does not match, which is
    // compiled again; never a file that is trusted without having been checked.
    catalog.set_artifact_digest(source, engine, &digest).await?;
    catalog.files.install(scratch, &catalog.files.artifact(source, engine)).map_err(storage)?;
    Ok(compiled)
}

/// Whose fault it is where there is no artifact.
fn judge(answer: CompileAnswer, limits: &Limits) -> Result<Compiled, Failure> {
    match answer {
        CompileAnswer::Compiled { memory_bytes_min, .. } if memory_bytes_min > limits.memory_bytes_max => {
            let bytes_max = limits.memory_bytes_max;
            Err(Rejection::ModuleMemoryTooLarge { bytes: memory_bytes_min, bytes_max }.into())
        }
        CompileAnswer::Compiled { kind, flavor, cost, .. } => Ok(Compiled { kind, flavor, cost }),
        CompileAnswer::Refused { why } => Err(Rejection::InvalidWasm { why }.into()),
        CompileAnswer::Unstored { file, why } => {
            // The path is the operator's business, not the caller's.
            tracing::error!(file = %file.display(), why, "a compile worker could not read or write a file");
            Err(Rejection::Storage { why }.into())
        }
        CompileAnswer::Broken { why } => Err(Bug(why).into()),
    }
}

async fn ask_worker(exe: &Path, order: &Order) -> Result<CompileAnswer, Failure> {
    let order_json = serde_json::to_string(order).map_err(|e| Bug(e.to_string()))?;
    let broken = |e: std::io::Error| Bug(format!("{}: {e}", exe.display()));
    let mut child = tokio::process::Command::new(exe)
        .arg("compile-worker")
        .arg(order_json)
        // What compiles strangers' code has no use for keys.
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(broken)?;
    // The worker ends when this does; waiting would close it first if the child had it still.
    let _lifeline = child.stdin.take();
    let limit = Duration::from_millis(order.time_ms_max);
    let output = match tokio::time::timeout(limit, child.wait_with_output()).await {
        Ok(output) => output.map_err(broken)?,
        Err(_) => return Err(Rejection::CompileTooLong { limit_ms: order.time_ms_max }.into()),
    };
    if let Ok(answer) = serde_json::from_slice(&output.stdout) {
        return Ok(answer);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
    let why = format!("the compiler gave up on it ({}): {}", output.status, clip(last));
    Ok(if died_of_the_module(output.status) { CompileAnswer::Refused { why } } else { CompileAnswer::Broken { why } })
}

/// Whether the worker died of what it compiled: out of memory, out of CPU time, or a crash of the compiler. One that
/// exits without an answer, or is told to stop, failed for a reason of ours.
fn died_of_the_module(status: std::process::ExitStatus) -> bool {
    use rustix::process::Signal;
    let deadly = [Signal::XCPU, Signal::ABORT, Signal::KILL, Signal::SEGV, Signal::ILL];
    status.signal().is_some_and(|signal| deadly.iter().any(|deadly| deadly.as_raw() == signal))
}

/// The compile worker's whole life: tie itself to its server, limit itself, compile, answer on stdout.
pub fn worker(order_json: &str) -> Result<String, String> {
    tensor_wasm_gpu::end_with_server().map_err(|e| format!("the server cannot be watched: {e}"))?;
    let order: Order = serde_json::from_str(order_json).map_err(|e| e.to_string())?;
    limit_self(&order);
    serde_json::to_string(&execute(&order)).map_err(|e| e.to_string())
}

fn limit_self(order: &Order) {
    use rustix::process::{Resource, Rlimit, setpriority_process, setrlimit};
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let cpu_s = order.time_ms_max.div_ceil(1000) * cores + CPU_SLACK_S;
    let limit = |n| Rlimit { current: Some(n), maximum: Some(n) };
    // Each of these may be refused in a restricted container; the parent's timeout holds regardless.
    let _ = setrlimit(Resource::Cpu, limit(cpu_s));
    let _ = setrlimit(Resource::Data, limit(order.engine.compile_memory_bytes_max));
    let _ = setrlimit(Resource::Core, limit(0));
    let _ = setpriority_process(None, 10);
}

fn execute(order: &Order) -> CompileAnswer {
    try_execute(order).unwrap_or_else(|failed| failed)
}

fn try_execute(order: &Order) -> Result<CompileAnswer, CompileAnswer> {
    let refused = |why: String| CompileAnswer::Refused { why: clip(&why) };
    let (begun, cpu_begun) = (Instant::now(), cpu_time());
    let source = std::fs::read(&order.source).map_err(|e| unstored(&order.source, &e))?;
    let shape = shape_of(&source).map_err(refused)?;
    let settings = compiler_config(&order.engine, EngineKind::of(shape.flavor, order.memory));
    let engine = wasmtime::Engine::new(&settings)
        .map_err(|e| CompileAnswer::Broken { why: clip(&format!("the compiler cannot be set up: {e:#}")) })?;
    let code = if shape.component { engine.precompile_component(&source) } else { engine.precompile_module(&source) };
    let code = code.map_err(|e| refused(format!("{e:#}")))?;
    write_private(&order.output, &code).map_err(|e| unstored(&order.output, &e))?;
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let cost = CompileCost { wall_ms: millis(begun.elapsed()), cpu_ms: millis(cpu_time().saturating_sub(cpu_begun)) };
    let Shape { kind, flavor, memory_bytes_min, .. } = shape;
    Ok(CompileAnswer::Compiled { kind, flavor, memory_bytes_min, cost })
}

fn unstored(file: &Path, error: &std::io::Error) -> CompileAnswer {
    if error.kind() == std::io::ErrorKind::OutOfMemory {
        return CompileAnswer::Refused { why: "it does not fit into the memory for compiling it".to_owned() };
    }
    CompileAnswer::Unstored { file: file.to_owned(), why: error.to_string() }
}

/// CPU time of this process so far, all threads together.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

struct Shape {
    component: bool,
    kind: Kind,
    flavor: Flavor,
    /// The largest memory any of its modules starts with.
    memory_bytes_min: u64,
}

/// Looks at a binary before compiling it. Messages name what is wrong and where. Code is left alone: Wasmtime validates
/// it on all cores while it compiles, and here it would be one core's work.
fn shape_of(source: &[u8]) -> Result<Shape, String> {
    use wasmparser::{Encoding, Parser, Payload, Validator, WasmFeatures};
    if !source.starts_with(b"\0asm") {
        return Err("it does not begin with the WebAssembly magic number".to_owned());
    }
    let mut shape = Shape { component: false, kind: Kind::CoreExports, flavor: Flavor::Plain, memory_bytes_min: 0 };
    let mut without_async = Validator::new_with_features(WasmFeatures::default().difference(WasmFeatures::CM_ASYNC));
    let mut needs_async = false;
    let mut depth = 0_usize;
    for payload in Parser::new(0).parse_all(source) {
        let payload = payload.map_err(|e| e.to_string())?;
        // Once it has failed, its state means nothing.
        needs_async = needs_async || without_async.payload(&payload).is_err();
        match payload {
            Payload::Version { encoding, .. } => {
                if depth == 0 && encoding == Encoding::Component {
                    (shape.component, shape.kind) = (true, Kind::ComponentExports);
                }
                depth += 1;
            }
            Payload::End(_) => depth -= 1,
            Payload::ImportSection(imports) if depth == 1 => {
                for import in imports.into_imports() {
                    if import.map_err(|e| e.to_string())?.module == "kernel" {
                        return Err(KERNEL_MODULE.to_owned());
                    }
                }
            }
            Payload::MemorySection(memories) => {
                for memory in memories {
                    let memory = memory.map_err(|e| e.to_string())?;
                    let page_bytes = 1_u64 << memory.page_size_log2.unwrap_or(16);
                    shape.memory_bytes_min = shape.memory_bytes_min.max(memory.initial.saturating_mul(page_bytes));
                }
            }
            Payload::ExportSection(exports) if depth == 1 => {
                for export in exports {
                    if export.map_err(|e| e.to_string())?.name == "_start" {
                        shape.kind = Kind::CoreCommand;
                    }
                }
            }
            Payload::ComponentExportSection(exports) if depth == 1 => {
                for export in exports {
                    let export = export.map_err(|e| e.to_string())?;
                    // A handler may have a `run` besides; it is served as a handler.
                    match export.name.name.split('@').next() {
                        Some("wasi:http/incoming-handler" | "wasi:http/handler") => shape.kind = Kind::HttpHandler,
                        Some("wasi:cli/run") if shape.kind != Kind::HttpHandler => shape.kind = Kind::ComponentCommand,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    // What is not valid at all fails on the other engine, with the compiler's own words.
    if shape.component && needs_async {
        shape.flavor = Flavor::Concurrent;
    }
    Ok(shape)
}

fn clip(message: &str) -> String {
    let mut end = message.len().min(MESSAGE_BYTES_MAX);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message[..end].to_owned()
}

/// Why an artifact cannot be had.
pub(crate) enum Unloaded {
    /// It is absent, damaged or of another engine: to be compiled again.
    Stale,
    /// It is the one we made, and the engine does not take it: of another machine, or more than an instance may have.
    Refused { why: String },
}

/// Maps an artifact after checking that it is the one we made.
pub(crate) fn load(
    catalog: &Catalog,
    engines: &Engines,
    source: &SourceHash,
    flavor: Flavor,
    memory: MemoryKind,
) -> Result<Code, Unloaded> {
    let kind = EngineKind::of(flavor, memory);
    let (engine, id) = (engines.get(kind), engines.id(kind));
    let expected = catalog.artifact_digest(source, id).ok_or(Unloaded::Stale)?;
    let path = catalog.files.artifact(source, id);
    let found = hash_of_file(&path).map_err(|_| Unloaded::Stale)?.to_hex();
    if found.as_str() != expected {
        let why = format!("the compiled artifact's digest is {found}, expected {expected}");
        tracing::error!(source = source.as_str(), file = %path.display(), why, "quarantined; compiling it again");
        catalog.files.quarantine(&path, &why);
        return Err(Unloaded::Stale);
    }
    // SAFETY: the bytes hash to the digest recorded when Wasmtime produced them, so they are a valid artifact. The file
    // is replaced only by rename and never written in place, so the mapping cannot change underneath.
    #[expect(unsafe_code, reason = "mapping compiled code is what makes a start take microseconds")]
    let loaded = unsafe {
        match wasmtime::Engine::detect_precompiled_file(&path) {
            Ok(Some(Precompiled::Module)) => Module::deserialize_file(engine, &path).map(Code::Module),
            Ok(Some(Precompiled::Component)) => Component::deserialize_file(engine, &path).map(Code::Component),
            Ok(None) | Err(_) => return Err(Unloaded::Stale),
        }
    };
    loaded.map_err(|error| {
        tracing::warn!(source = source.as_str(), %error, "an artifact does not load");
        if error.chain().any(<dyn std::error::Error>::is::<std::io::Error>) {
            return Unloaded::Stale;
        }
        Unloaded::Refused { why: format!("{error:#}") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(wasm: &[u8]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let (source, output) = (dir.path().join("in"), dir.path().join("out"));
        std::fs::write(&source, wasm).unwrap();
        let order =
            Order { source, output, engine: config::Engine::default(), memory: MemoryKind::Pooled, time_ms_max: 1000 };
        match execute(&order) {
            CompileAnswer::Refused { why } => why,
            other => panic!("should be refused: {other:?}"),
        }
    }

    #[test]
    fn what_fails_on_our_side_is_not_blamed_on_the_module() {
        let dir = tempfile::tempdir().unwrap();
        let (source, output) = (dir.path().join("in"), dir.path().join("out"));
        std::fs::write(&source, wat::parse_str("(module)").unwrap()).unwrap();
        let engine = config::Engine::default();
        let good = Order { source, output, engine, memory: MemoryKind::Pooled, time_ms_max: 1000 };
        let failure = |order: Order| judge(execute(&order), &Limits::default()).unwrap_err();
        let nowhere = dir.path().join("no-such-folder/file");
        let again = |order: &Order| Order {
            source: order.source.clone(),
            output: order.output.clone(),
            engine: order.engine.clone(),
            ..*order
        };
        for order in
            [Order { source: nowhere.clone(), ..again(&good) }, Order { output: nowhere.clone(), ..again(&good) }]
        {
            let failure = failure(order);
            assert!(matches!(&failure, Failure::Rejected(Rejection::Storage { .. })), "{failure}");
            assert!(!failure.to_string().contains("no-such-folder"), "{failure}");
        }
        let engine = config::Engine { stack_bytes_max: 0, ..config::Engine::default() };
        let failure = failure(Order { engine, ..again(&good) });
        assert!(matches!(&failure, Failure::Bug(_)), "{failure}");
        assert!(matches!(execute(&good), CompileAnswer::Compiled { .. }));
    }

    #[tokio::test]
    async fn a_worker_that_dies_of_the_module_is_told_from_one_that_fails() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let exe = dir.path().join("worker");
        let order = Order {
            source: PathBuf::new(),
            output: PathBuf::new(),
            engine: config::Engine::default(),
            memory: MemoryKind::Pooled,
            time_ms_max: 10_000,
        };
        let cases = [
            ("kill -ABRT $$", true),
            ("kill -XCPU $$", true),
            ("kill -KILL $$", true),
            ("echo the server cannot be watched >&2; exit 2", false),
            ("kill -TERM $$", false),
            ("echo nonsense", false),
        ];
        for (script, is_the_modules) in cases {
            std::fs::write(&exe, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&exe, std::fs::Permissions::from_mode(0o755)).unwrap();
            let answer = ask_worker(&exe, &order).await.unwrap();
            assert_eq!(matches!(answer, CompileAnswer::Refused { .. }), is_the_modules, "{script}: {answer:?}");
            assert_eq!(matches!(answer, CompileAnswer::Broken { .. }), !is_the_modules, "{script}: {answer:?}");
        }
    }

    #[test]
    fn bad_input_is_named() {
        assert!(refused(b"hello").contains("magic number"));
        let good = wat::parse_str("(module (func (export \"f\") (result i32) i32.const 1))").unwrap();
        // Cut at a section's end it would be a module still, only a smaller one.
        for cut in [5, 7, 9, good.len() - 1, good.len() - 3] {
            assert!(refused(&good[..cut]).contains("unexpected end"), "truncated to {cut}: {}", refused(&good[..cut]));
        }
        let invalid = wat::parse_str("(module (func (result i32)))").unwrap();
        assert!(refused(&invalid).contains("type mismatch"), "{}", refused(&invalid));
        let shared = wat::parse_str("(module (memory 1 1 shared))").unwrap();
        assert!(refused(&shared).contains("threads"), "{}", refused(&shared));
    }

    #[test]
    fn the_worker_compiles_for_the_serving_engine() {
        let engines = Engines::new(&Config::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (source, output) = (dir.path().join("in"), dir.path().join("out"));
        std::fs::write(&source, wat::parse_str("(module (memory 3) (func (export \"_start\")))").unwrap()).unwrap();
        let order = Order {
            source,
            output: output.clone(),
            engine: config::Engine::default(),
            memory: MemoryKind::Pooled,
            time_ms_max: 1000,
        };
        let CompileAnswer::Compiled { kind, flavor, memory_bytes_min, .. } = execute(&order) else {
            panic!("should compile")
        };
        assert_eq!((kind, flavor, memory_bytes_min), (Kind::CoreCommand, Flavor::Plain, 3 << 16));
        // SAFETY: produced by `execute` above.
        #[expect(unsafe_code, reason = "the point of the test")]
        let module = unsafe { Module::deserialize_file(engines.get(EngineKind::Plain), &output) };
        assert!(module.is_ok(), "{:?}", module.err());
    }
}
