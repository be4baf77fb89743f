//! The spine: one call from arrival to result, top to bottom.
//!
//! ```text
//! Invocation → Permit → Lease → Outcome
//! ```
//!
//! Whatever ends a call early (a limit, a fault, its deadline, a caller who went away) ends it by dropping what it
//! holds, in order: the instance, then the permit. What it used is settled in each case.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tracing::{Instrument, Span};

use crate::admission::{Account, Admitted, Permit};
use crate::catalog::{FunctionRecord, Revision, RevisionRecord, Serving};
use crate::config::Limits;
use crate::engine::EngineKind;
use crate::engine::pool::{EntryPoint, Instance, Lease, LinkedRevision, Pool};
use crate::failure::{Bug, Failure, Fault, OUR_BUG, Rejection};
use crate::function_metrics::{CallOutcome, FunctionSeries};
use crate::guest::http::{self, Exchange};
use crate::guest::running::{Given, RunningCall, Surroundings, Used};
use crate::guest::stdio::Sink;
use crate::guest::supervise::Supervised;
use crate::guest::{GuestError, command, component, core};
use crate::runtime::Runtime;

/// No call waits in line longer than this, whatever its own deadline.
const DEADLINE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Who wants what, with what, until when.
pub struct Invocation {
    /// Ties the call to its trace, its logs and its audit line.
    pub id: u128,
    pub tenant: String,
    /// Name or id.
    pub function: String,
    pub call: Call,
    /// A tighter deadline than the function's and the tenant's.
    pub deadline: Option<Duration>,
}

pub enum Call {
    /// An export (or a command) with JSON arguments.
    Export { export: Option<String>, args: Value, stdin: Bytes },
    /// An export that takes and returns bytes, or a command's stdin and stdout.
    Bytes { export: Option<String>, body: Bytes },
    /// Like `Export`, with stdout sent on as it is written.
    Stream { export: Option<String>, args: Value, stdin: Bytes, stdout: mpsc::Sender<Bytes> },
    /// A request for a `wasi:http` handler.
    Http(http::Request),
}

pub struct Outcome {
    call: Arc<RunningCall>,
    pub output: Output,
    /// The export returned the error case of its `result`. The call itself went well.
    pub is_err: bool,
    pub usage: Usage,
}

pub enum Output {
    Value(Value),
    Bytes(Bytes),
    Response(Box<http::Response>),
}

/// What a call cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time of the guest, of the host functions it called and of what was done to start it. Exact once a call has
    /// moved to the background; before, the time its slices took on the serving thread.
    pub cpu_us: u64,
    /// What the device, a GPU or the CPU in its place, did for the call and was seen done with while it lasted: kernels
    /// and copies that it launched, tensors that it computed. Where that is the CPU, tensors count as `cpu_us` too.
    pub gpu_us: u64,
    /// From arrival to the end (to the response's head, for HTTP), waiting included.
    pub wall_us: u64,
    /// Waiting for a permit.
    pub queue_us: u64,
    pub memory_peak_bytes: u64,
}

impl Outcome {
    pub fn function_id(&self) -> &str {
        &self.call.serving.function.id
    }

    pub fn revision(&self) -> &Revision {
        &self.call.serving.revision().revision
    }

    /// The kind of the revision that served it.
    pub fn kind(&self) -> &'static str {
        self.call.serving.revision().kind.as_str()
    }
}

impl Runtime {
    /// Runs one call. Dropping the future stops it.
    pub async fn invoke(&self, invocation: Invocation) -> Result<Outcome, Failure> {
        let arrived = Instant::now();
        let function = self.catalog.resolve(&invocation.tenant, &invocation.function)?;
        let counted = CountedCall::new(self.metrics.functions.of(&function));
        let serving = serving(function)?;
        let revision = serving.revision();

        let patience = invocation.deadline.unwrap_or(DEADLINE_MAX).min(DEADLINE_MAX);
        let queue = tracing::debug_span!("queue", tenant = invocation.tenant);
        let admitted = self.admission.admit(&invocation.tenant, arrived, arrived + patience).instrument(queue).await?;
        let Admitted { permit, account, waited } = admitted;

        let mut begun = waited.is_zero().then_some(arrived);
        let engine = EngineKind::of(revision.flavor, revision.settings.memory);
        let linked = match self.pool.loaded(&revision.source, engine) {
            Some(linked) => linked,
            None => {
                begun = None;
                self.load_within(&serving, &account, arrived + patience).await?
            }
        };
        let (prepared, given) = prepare(&linked.entry, invocation.call, &account.limits)?;
        let call = Arc::new(RunningCall {
            id: invocation.id,
            surroundings: self.surroundings.clone(),
            arrived,
            queued: waited,
            deadline_ms: deadline_ms(invocation.deadline, revision, &account),
            // A command's instance is used up, and a streamed call's writes to its own caller.
            may_reuse: given.is_none(),
            account,
            serving,
            used: Used::default(),
            series: counted.run(),
            span: parking_lot::Mutex::new(parent_span()),
        });
        let run = GuestRun { pool: self.pool.clone(), linked, permit, call: call.clone(), given };
        let ended = match prepared {
            PreparedCall::Http(request) => {
                let response = Box::pin(self.exchange(run, request, begun)).await;
                response.map(|output| Returned { output, is_err: false })
            }
            PreparedCall::Guest(prepared) => self.call(run, prepared, begun).await,
        };
        let Returned { output, is_err } = ended.map_err(|error| error.into_failure(call.usage_now()))?;
        let usage = if matches!(output, Output::Response(_)) { call.usage_now() } else { call.usage() };
        Ok(Outcome { output, is_err, usage, call })
    }

    /// Loads on the background runtime: it reads and may compile, which a serving thread must not; and a caller who
    /// leaves does not undo it for the next.
    async fn load_within(
        &self,
        serving: &Serving,
        account: &Arc<Account>,
        deadline: Instant,
    ) -> Result<Arc<LinkedRevision>, Failure> {
        let (runtime, account) = (self.shared()?, account.clone());
        let deadline = deadline.min(Instant::now() + Duration::from_millis(account.limits.deadline_ms_max));
        let wanted = serving.clone();
        let loading = self
            .background
            .spawn(async move { runtime.load(&wanted.function.name, wanted.revision(), &account).await });
        match tokio::time::timeout_at(deadline.into(), loading).await {
            Ok(loaded) => match loaded.map_err(|e| Bug(e.to_string()))? {
                Err(Failure::Rejected(why @ Rejection::Quarantined { .. })) => {
                    Err(unavailable(&serving.function, &why).into())
                }
                loaded => loaded,
            },
            Err(_) => Err(Rejection::StillCompiling { retry_after: Duration::from_secs(1) }.into()),
        }
    }

    async fn call(&self, run: GuestRun, prepared: GuestCall, begun: Option<Instant>) -> Result<Returned, GuestError> {
        let call = run.call.clone();
        let deadline_ms = call.deadline_ms;
        let ended = Supervised::new(Box::pin(run.run(prepared)), call, begun).await;
        ended.unwrap_or_else(|stopped| Err(stopped.into_error(deadline_ms)))
    }

    async fn exchange(
        &self,
        run: GuestRun,
        request: http::Request,
        begun: Option<Instant>,
    ) -> Result<Output, GuestError> {
        let (head, response) = oneshot::channel();
        let failed = Arc::new(AtomicBool::new(false));
        let call = run.call.clone();
        let deadline_ms = call.deadline_ms;
        let running = Box::pin(run.exchange(Exchange { request, head, failed: failed.clone() }));
        let supervised = Supervised::new(running, call, begun);
        http::respond(supervised, response, failed, deadline_ms)
            .await
            .map(|response| Output::Response(Box::new(response)))
    }
}

/// A call that is counted as refused unless it comes to run; from then on its settlement counts it.
struct CountedCall(Option<Arc<FunctionSeries>>);

impl CountedCall {
    fn new(series: Arc<FunctionSeries>) -> CountedCall {
        CountedCall(Some(series))
    }

    fn run(mut self) -> Arc<FunctionSeries> {
        self.0.take().unwrap_or_default()
    }
}

impl Drop for CountedCall {
    fn drop(&mut self) {
        if let Some(series) = &self.0 {
            series.count(CallOutcome::Rejected);
        }
    }
}

/// What a call's own spans are children of. A guest may go on in another thread, where nothing is current.
fn parent_span() -> Span {
    // Spans below the request's are made at this level, which only an exporter asks for: without one they cost a load.
    if tracing::enabled!(tracing::Level::DEBUG) { Span::current() } else { Span::none() }
}

/// The revision that serves this call.
fn serving(function: Arc<FunctionRecord>) -> Result<Serving, Rejection> {
    let serving = Serving::of(function).map_err(|function| Rejection::NotFound {
        what: "revision with traffic of function",
        name: function.name.clone(),
        tenant: function.tenant.clone(),
    })?;
    match serving.function.cannot_run(serving.revision()) {
        None => Ok(serving),
        Some(why) => Err(unavailable(&serving.function, &why)),
    }
}

/// What a caller learns of a function that cannot run. It may be public: the reason is for the log, and for the routes
/// that ask for its owner's token.
fn unavailable(function: &FunctionRecord, why: &Rejection) -> Rejection {
    let FunctionRecord { tenant, name, .. } = function;
    // Whoever calls it decides how often: the operator was told once, when it was found damaged.
    tracing::debug!(tenant, function = name, %why, "a call was refused: the function cannot run");
    Rejection::Unavailable { name: name.clone() }
}

/// The tightest of what the caller, the function and the tenant allow.
fn deadline_ms(asked: Option<Duration>, revision: &RevisionRecord, account: &Account) -> u64 {
    let asked = asked.map_or(u64::MAX, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
    let function = revision.settings.deadline_ms.unwrap_or(u64::MAX);
    asked.min(function).min(account.limits.deadline_ms_max)
}

/// A call that fits its function: the export exists and the arguments have its types. Nothing is instantiated yet.
enum PreparedCall {
    Guest(GuestCall),
    Http(http::Request),
}

enum GuestCall {
    Core { export: usize, args: Vec<wasmtime::Val> },
    Component { export: usize, args: Vec<wasmtime::component::Val> },
    Octets { export: usize, octets: component::Octets, body: Bytes },
    Command { bytes_out: bool },
}

/// What an export is called with.
enum Args {
    Json(Value),
    /// For exports of one `list<u8>` parameter, and commands.
    Bytes(Bytes),
}

/// What a guest's call amounts to.
struct Returned {
    output: Output,
    is_err: bool,
}

impl From<Output> for Returned {
    fn from(output: Output) -> Returned {
        Returned { output, is_err: false }
    }
}

/// Reads a call as one of its function's, with what its guest gets besides (most get nothing).
fn prepare(entry: &EntryPoint, call: Call, limits: &Limits) -> Result<(PreparedCall, Option<Box<Given>>), Rejection> {
    let (export, args, stdin, stdout) = match call {
        Call::Http(request) => {
            return match entry {
                EntryPoint::HttpP2(_) | EntryPoint::HttpP3(_) => Ok((PreparedCall::Http(request), None)),
                _ => Err(Rejection::WrongKind {
                    kind: entry.kind(),
                    instead: "it has no wasi:http handler; use POST /functions/NAME/invoke".to_owned(),
                }),
            };
        }
        Call::Export { export, args, stdin } => (export, Args::Json(args), stdin, None),
        Call::Stream { export, args, stdin, stdout } => (export, Args::Json(args), stdin, Some(stdout)),
        Call::Bytes { export, body } => (export, Args::Bytes(body), Bytes::new(), None),
    };
    let as_command = |args, stdin, bytes_out, stdout: Option<mpsc::Sender<Bytes>>| {
        let result = Sink::Result { bytes_max: limits.output_bytes_max };
        let given = Given { args, stdin, stdout: stdout.map_or(result, Sink::Stream) };
        Ok((PreparedCall::Guest(GuestCall::Command { bytes_out }), Some(Box::new(given))))
    };
    let call = match (entry, args) {
        (EntryPoint::HttpP2(_) | EntryPoint::HttpP3(_), _) => {
            let instead = "send a request to /run/NAME/…".to_owned();
            return Err(Rejection::WrongKind { kind: entry.kind(), instead });
        }
        (EntryPoint::Core { exports, .. }, Args::Json(args)) => {
            let (export, args) = core::prepare(exports, export.as_deref(), &args)?;
            GuestCall::Core { export, args }
        }
        (EntryPoint::Core { .. }, Args::Bytes(_)) => {
            let why = "exports of a core module take numbers; call it with JSON".to_owned();
            return Err(Rejection::InvalidArgs { why });
        }
        (EntryPoint::Component { exports, .. }, Args::Json(args)) => {
            let (export, args) = component::prepare(exports, export.as_deref(), &args)?;
            GuestCall::Component { export, args }
        }
        (EntryPoint::Component { exports, .. }, Args::Bytes(body)) => {
            let (export, octets) = component::prepare_octets(exports, export.as_deref(), &body, limits)?;
            GuestCall::Octets { export, octets, body }
        }
        (EntryPoint::CoreCommand(_) | EntryPoint::CommandP2(_) | EntryPoint::CommandP3(_), Args::Bytes(body)) => {
            return as_command(Vec::new(), body, true, stdout);
        }
        (EntryPoint::CoreCommand(_) | EntryPoint::CommandP2(_) | EntryPoint::CommandP3(_), Args::Json(args)) => {
            return as_command(command::args(&args)?, stdin, false, stdout);
        }
    };
    let streamed = |stdout| Box::new(Given { args: Vec::new(), stdin: Bytes::new(), stdout: Sink::Stream(stdout) });
    Ok((PreparedCall::Guest(call), stdout.map(streamed)))
}

/// Everything a guest needs to run by itself, on whatever thread.
struct GuestRun {
    pool: Arc<Pool>,
    linked: Arc<LinkedRevision>,
    permit: Permit,
    call: Arc<RunningCall>,
    given: Option<Box<Given>>,
}

impl GuestRun {
    async fn run(self, prepared: GuestCall) -> Result<Returned, GuestError> {
        let GuestRun { pool, linked, permit, call, given } = self;
        let mut settlement = Settlement::new(&call);
        let result = async {
            let _ticking = pool.engines.clock().ticking();
            let mut lease = pool.lease(&linked, permit, &call, given).instrument(call.instance_span()).await?;
            let returned = call_in(&mut lease, &linked.entry, prepared, &call).instrument(call.call_span()).await?;
            if call.serving.revision().settings.reuse && call.may_reuse {
                pool.keep(&linked, lease);
            }
            Ok(returned)
        }
        .await;
        settlement.end(&result);
        result
    }

    async fn exchange(self, exchange: Exchange) -> Result<(), GuestError> {
        let GuestRun { pool, linked, permit, call, given } = self;
        let mut settlement = Settlement::new(&call);
        let result = async {
            let _ticking = pool.engines.clock().ticking();
            let mut lease = pool.lease(&linked, permit, &call, given).instrument(call.instance_span()).await?;
            let span = call.call_span();
            match &mut lease.instance {
                Instance::HttpP2(proxy) => http::p2(&mut lease.store, proxy, exchange).instrument(span).await?,
                Instance::HttpP3(service) => {
                    Box::pin(http::p3(&mut lease.store, service, exchange)).instrument(span).await?;
                }
                _ => return Err(mismatched()),
            }
            if call.serving.revision().settings.reuse {
                pool.keep(&linked, lease);
            } else {
                // Resetting an instance takes about a tenth of a hello's time. On this thread's queue it happens after
                // the response has left.
                drop(tokio::spawn(async move { drop(lease) }));
            }
            Ok(())
        }
        .await;
        settlement.end(&result);
        result
    }
}

async fn call_in(
    lease: &mut Lease,
    entry: &EntryPoint,
    prepared: GuestCall,
    call: &RunningCall,
) -> Result<Returned, GuestError> {
    let Lease { store, instance, .. } = lease;
    match (prepared, &*instance, entry) {
        (GuestCall::Core { export, args }, Instance::Core(instance), EntryPoint::Core { exports, .. }) => {
            let value = core::call(store, instance, &exports[export], &args).await?;
            Ok(Output::Value(value).into())
        }
        (
            GuestCall::Component { export, args },
            Instance::Component(instance),
            EntryPoint::Component { exports, .. },
        ) => {
            let results = Box::pin(component::call(store, instance, &exports[export], &args)).await?;
            let is_err = component::is_err(&results);
            Ok(Returned { output: Output::Value(component::to_json(&results)), is_err })
        }
        (
            GuestCall::Octets { export, octets, body },
            Instance::Component(instance),
            EntryPoint::Component { exports, .. },
        ) => {
            let called = component::call_octets(store, instance, &exports[export], octets, &body);
            Ok(Output::Bytes(Box::pin(called).await?).into())
        }
        (GuestCall::Command { bytes_out }, instance, _) => {
            let exit_code = match instance {
                Instance::Core(instance) => Box::pin(command::core(store, instance)).await?,
                Instance::CommandP2(command) => Box::pin(command::p2(store, command)).await?,
                Instance::CommandP3(command) => Box::pin(command::p3(store, command)).await?,
                _ => return Err(mismatched()),
            };
            let stdout = call.take_stdout();
            if bytes_out && exit_code != 0 {
                return Err(Fault::Exit { code: exit_code }.into());
            }
            if bytes_out {
                return Ok(Output::Bytes(Bytes::from(stdout)).into());
            }
            let stdout = String::from_utf8_lossy(&stdout);
            let stderr = call.used.captured.stderr.lock();
            let stderr = String::from_utf8_lossy(&stderr);
            Ok(Output::Value(json!({ "exit_code": exit_code, "stdout": stdout, "stderr": stderr })).into())
        }
        _ => Err(mismatched()),
    }
}

/// The entry point and the instance made from it disagree: cannot happen, and harms only this call if it does.
fn mismatched() -> GuestError {
    Bug("the instance is not of the kind its revision was deployed as".to_owned()).into()
}

/// Settles a call when it is over, however it ended: keeps its output for `logs` and counts its fault.
struct Settlement<'a> {
    call: &'a RunningCall,
    ended: Option<Result<(), GuestError>>,
}

impl<'a> Settlement<'a> {
    fn new(call: &'a RunningCall) -> Self {
        Settlement { call, ended: None }
    }

    fn end<T>(&mut self, result: &Result<T, GuestError>) {
        self.ended = Some(result.as_ref().map(drop).map_err(Clone::clone));
    }
}

impl Drop for Settlement<'_> {
    fn drop(&mut self) {
        let Surroundings { metrics, logs, .. } = &*self.call.surroundings;
        let series = &self.call.series;
        series.took(self.call.arrived.elapsed());
        let fault = match self.ended.take() {
            Some(Ok(())) => {
                series.count(CallOutcome::Ok);
                None
            }
            Some(Err(GuestError::Rejected(rejection))) => {
                series.count(CallOutcome::Rejected);
                Some(rejection.to_string())
            }
            Some(Err(GuestError::Faulted(fault))) => {
                metrics.invocation_faults.inc();
                series.count_fault(&fault);
                Some(fault.to_string())
            }
            Some(Err(GuestError::Bug(_))) => {
                series.count(CallOutcome::Bug);
                Some(OUR_BUG.to_owned())
            }
            None if std::thread::panicking() => {
                series.count(CallOutcome::Bug);
                Some(OUR_BUG.to_owned())
            }
            None => {
                if Instant::now() >= self.call.deadline() {
                    series.count_fault(&Fault::Deadline { deadline_ms: self.call.deadline_ms });
                } else {
                    series.count(CallOutcome::Cancelled);
                }
                Some("stopped: it met its deadline or its caller went away".to_owned())
            }
        };
        let dropped = self.call.used.captured.dropped_bytes.load(Ordering::Relaxed);
        if dropped > 0 {
            metrics.log_bytes_dropped.inc_by(dropped);
        }
        logs.keep(self.call, fault);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_learns_neither_secrets_names_nor_paths() {
        let revision = "ab".repeat(32);
        let function = |secrets: &[&str], quarantined: Option<&str>| -> Arc<FunctionRecord> {
            let record = serde_json::from_value(json!({
                "id": "1", "tenant": "t", "name": "f", "created_ms": 1, "secret_names": secrets,
                "revisions": [{"revision": revision, "source": revision, "kind": "core_exports", "flavor": "plain",
                               "bytes": 1, "created_ms": 1, "quarantined": quarantined}],
                "traffic": [{"revision": revision, "weight": 1}],
            }));
            Arc::new(record.unwrap())
        };
        assert!(serving(function(&[], None)).is_ok());
        for bad in [function(&["API_KEY"], None), function(&[], Some("/var/lib/data/sources/ab: missing"))] {
            let why = bad.cannot_run(&bad.revisions[0]).unwrap().to_string();
            assert!(why.contains("API_KEY") || why.contains("/var/lib/data"), "its owner learns it: {why}");
            let refused = serving(bad).err().unwrap();
            assert!(matches!(refused, Rejection::Unavailable { .. }), "{refused:?}");
            let told = refused.to_string();
            assert!(!told.contains("API_KEY") && !told.contains("/var") && told.contains("show f"), "{told}");
        }
    }
}
