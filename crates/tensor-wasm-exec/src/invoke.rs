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

use crate::admission::{Account, Admitted, Permit};
use crate::catalog::{FunctionRecord, Revision, RevisionRecord, Serving};
use crate::config::Limits;
use crate::engine::pool::{Entry, Instance, Lease, Loaded, Pool};
use crate::failure::{Bug, Failure, Fault, Rejection};
use crate::guest::component::Args;
use crate::guest::http::{self, Exchange};
use crate::guest::running::{Given, RunningCall, Surroundings, Used};
use crate::guest::stdio::Sink;
use crate::guest::supervise::{Stopped, Supervised};
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
    /// CPU time of the guest, of the host functions it called and of what was done to start it. Exact once a call has moved
    /// to the background; before, the time its slices took on the serving thread.
    pub cpu_us: u64,
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
}

impl Runtime {
    /// Runs one call. Dropping the future stops it.
    pub async fn invoke(&self, invocation: Invocation) -> Result<Outcome, Failure> {
        let arrived = Instant::now();
        let function = self.catalog.resolve(&invocation.tenant, &invocation.function)?;
        let serving = serving(function)?;
        let revision = serving.revision();

        let patience = invocation.deadline.unwrap_or(DEADLINE_MAX).min(DEADLINE_MAX);
        let admitted = self.admission.admit(&invocation.tenant, arrived, arrived + patience).await?;
        let Admitted { permit, account, waited } = admitted;

        let mut begun = waited.is_zero().then_some(arrived);
        let loaded = match self.pool.loaded(&revision.source, revision.settings.memory) {
            Some(loaded) => loaded,
            None => {
                begun = None;
                self.load_within(&serving, &account, arrived + patience).await?
            }
        };
        let (entered, given) = prepare(&loaded.entry, invocation.call, &account.limits)?;
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
        });
        let guest = Guest { pool: self.pool.clone(), loaded, permit, call: call.clone(), given };
        let ended = match entered {
            Entered::Http(request) => Box::pin(self.exchange(guest, request, begun)).await,
            Entered::Call(entered) => self.call(guest, entered, begun).await,
        };
        match ended {
            Ok(output @ Output::Response(_)) => Ok(Outcome { output, usage: call.usage_now(), call }),
            Ok(output) => Ok(Outcome { output, usage: call.usage(), call }),
            Err(failed) => Err(failed.into_failure(call.usage_now())),
        }
    }

    /// Loads on the background runtime: it reads and may compile, which a serving thread must not; and a caller who leaves
    /// does not undo it for the next.
    async fn load_within(
        &self,
        serving: &Serving,
        account: &Arc<Account>,
        deadline: Instant,
    ) -> Result<Arc<Loaded>, Failure> {
        let (runtime, serving, account) = (self.shared()?, serving.clone(), account.clone());
        let deadline = deadline.min(Instant::now() + Duration::from_millis(account.limits.deadline_ms_max));
        let loading = self
            .background
            .spawn(async move { runtime.load(&serving.function.name, serving.revision(), &account).await });
        match tokio::time::timeout_at(deadline.into(), loading).await {
            Ok(loaded) => loaded.map_err(|e| Bug(e.to_string()))?,
            Err(_) => {
                let depth = self.admission.depth();
                Err(Failure::Rejected(Rejection::ServerBusy {
                    running: depth.running,
                    queued: depth.waiting,
                    why: "the function is still being compiled",
                    retry_after: Duration::from_secs(1),
                }))
            }
        }
    }

    async fn call(&self, guest: Guest, entered: GuestCall, begun: Option<Instant>) -> Result<Output, http::Failed> {
        let call = guest.call.clone();
        let deadline_ms = call.deadline_ms;
        match Supervised::new(Box::pin(guest.run(entered)), call, begun).await {
            Ok(result) => Ok(result?),
            Err(Stopped::AtDeadline) => Err(GuestError::from(Fault::Deadline { deadline_ms }).into()),
            Err(Stopped::Panicked(message)) => Err(http::Failed::Panicked(message)),
        }
    }

    async fn exchange(
        &self,
        guest: Guest,
        request: http::Request,
        begun: Option<Instant>,
    ) -> Result<Output, http::Failed> {
        let (head, response) = oneshot::channel();
        let failed = Arc::new(AtomicBool::new(false));
        let call = guest.call.clone();
        let deadline_ms = call.deadline_ms;
        let running = Box::pin(guest.exchange(Exchange { request, head, failed: failed.clone() }));
        let supervised = Supervised::new(running, call, begun);
        http::respond(supervised, response, failed, deadline_ms)
            .await
            .map(|response| Output::Response(Box::new(response)))
    }
}

/// The revision that serves this call.
fn serving(function: Arc<FunctionRecord>) -> Result<Serving, Rejection> {
    let serving = Serving::of(function).map_err(|function| Rejection::NotFound {
        what: "revision with traffic of function",
        name: function.name.clone(),
        tenant: function.tenant.clone(),
    })?;
    if let Some(secret) = serving.function.lost_secret() {
        // It would run with half of what it needs to know.
        let name = &serving.function.name;
        let why =
            format!("{name:?} has lost its secret {secret:?}; set it again: tensor-wasm secret set {name} {secret}");
        return Err(Rejection::Conflict { why });
    }
    match &serving.revision().quarantined {
        None => Ok(serving),
        Some(why) => Err(Rejection::Quarantined {
            name: serving.function.name.clone(),
            revision: serving.revision().revision.short().to_owned(),
            why: why.clone(),
        }),
    }
}

/// The tightest of what the caller, the function and the tenant allow.
fn deadline_ms(asked: Option<Duration>, revision: &RevisionRecord, account: &Account) -> u64 {
    let asked = asked.map_or(u64::MAX, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
    let function = revision.settings.deadline_ms.unwrap_or(u64::MAX);
    asked.min(function).min(account.limits.deadline_ms_max)
}

/// A call that fits its function: the export exists and the arguments have its types. Nothing is instantiated yet.
enum Entered {
    Call(GuestCall),
    Http(http::Request),
}

enum GuestCall {
    Core { export: usize, args: Vec<wasmtime::Val> },
    Component { export: usize, args: Vec<wasmtime::component::Val>, bytes_out: bool },
    Command { bytes_out: bool },
}

/// Reads a call as one of its function's, with what its guest gets besides (most get nothing).
fn prepare(entry: &Entry, call: Call, limits: &Limits) -> Result<(Entered, Option<Box<Given>>), Rejection> {
    let (export, args, stdin, stdout) = match call {
        Call::Http(request) => {
            return match entry {
                Entry::HttpP2(_) | Entry::HttpP3(_) => Ok((Entered::Http(request), None)),
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
        Ok((Entered::Call(GuestCall::Command { bytes_out }), Some(Box::new(given))))
    };
    let call = match (entry, args) {
        (Entry::HttpP2(_) | Entry::HttpP3(_), _) => {
            let instead = "send a request to /run/NAME/…".to_owned();
            return Err(Rejection::WrongKind { kind: entry.kind(), instead });
        }
        (Entry::Core { exports, .. }, Args::Json(args)) => {
            let (export, args) = core::prepare(exports, export.as_deref(), &args)?;
            GuestCall::Core { export, args }
        }
        (Entry::Core { .. }, Args::Bytes(_)) => {
            let why = "exports of a core module take numbers; call it with JSON".to_owned();
            return Err(Rejection::InvalidArgs { why });
        }
        (Entry::Component { exports, .. }, args) => {
            let bytes_out = matches!(args, Args::Bytes(_));
            let (export, args) = component::prepare(exports, export.as_deref(), &args)?;
            GuestCall::Component { export, args, bytes_out }
        }
        (Entry::CoreCommand(_) | Entry::CommandP2(_) | Entry::CommandP3(_), Args::Bytes(body)) => {
            return as_command(Vec::new(), body, true, stdout);
        }
        (Entry::CoreCommand(_) | Entry::CommandP2(_) | Entry::CommandP3(_), Args::Json(args)) => {
            return as_command(command::args(&args)?, stdin, false, stdout);
        }
    };
    let streamed = |stdout| Box::new(Given { args: Vec::new(), stdin: Bytes::new(), stdout: Sink::Stream(stdout) });
    Ok((Entered::Call(call), stdout.map(streamed)))
}

/// Everything a guest needs to run by itself, on whatever thread.
struct Guest {
    pool: Arc<Pool>,
    loaded: Arc<Loaded>,
    permit: Permit,
    call: Arc<RunningCall>,
    given: Option<Box<Given>>,
}

impl Guest {
    async fn run(self, entered: GuestCall) -> Result<Output, GuestError> {
        let Guest { pool, loaded, permit, call, given } = self;
        let mut settlement = Settlement::new(&call);
        let result = async {
            let _ticking = pool.engines.clock().ticking();
            let mut lease = pool.lease(&loaded, permit, &call, given).await?;
            let output = call_in(&mut lease, &loaded.entry, entered, &call.used).await?;
            if call.serving.revision().settings.reuse && call.may_reuse {
                pool.keep(&loaded, &call.serving.function.id, lease);
            }
            Ok(output)
        }
        .await;
        settlement.end(&result);
        result
    }

    async fn exchange(self, exchange: Exchange) -> Result<(), GuestError> {
        let Guest { pool, loaded, permit, call, given } = self;
        let mut settlement = Settlement::new(&call);
        let result = async {
            let _ticking = pool.engines.clock().ticking();
            let mut lease = pool.lease(&loaded, permit, &call, given).await?;
            match &mut lease.instance {
                Instance::HttpP2(proxy) => http::p2(&mut lease.store, proxy, exchange).await?,
                Instance::HttpP3(service) => Box::pin(http::p3(&mut lease.store, service, exchange)).await?,
                _ => return Err(mismatched()),
            }
            match call.serving.revision().settings.reuse {
                true => pool.keep(&loaded, &call.serving.function.id, lease),
                // Resetting an instance takes about a tenth of a hello's time. On this thread's queue it happens after the
                // response has left.
                false => drop(tokio::spawn(async move { drop(lease) })),
            }
            Ok(())
        }
        .await;
        settlement.end(&result);
        result
    }
}

async fn call_in(lease: &mut Lease, entry: &Entry, call: GuestCall, used: &Used) -> Result<Output, GuestError> {
    let Lease { store, instance, .. } = lease;
    match (call, &*instance, entry) {
        (GuestCall::Core { export, args }, Instance::Core(instance), Entry::Core { exports, .. }) => {
            core::call(store, instance, &exports[export], &args).await.map(Output::Value)
        }
        (
            GuestCall::Component { export, args, bytes_out },
            Instance::Component(instance),
            Entry::Component { exports, .. },
        ) => {
            let results = Box::pin(component::call(store, instance, &exports[export], &args)).await?;
            match bytes_out {
                true => component::to_bytes(&results).map(Output::Bytes),
                false => Ok(Output::Value(component::to_json(&results))),
            }
        }
        (GuestCall::Command { bytes_out }, instance, _) => {
            let exit_code = match instance {
                Instance::Core(instance) => Box::pin(command::core(store, instance)).await?,
                Instance::CommandP2(command) => Box::pin(command::p2(store, command)).await?,
                Instance::CommandP3(command) => Box::pin(command::p3(store, command)).await?,
                _ => return Err(mismatched()),
            };
            let stdout = std::mem::take(&mut *used.captured.stdout.lock());
            match bytes_out {
                true if exit_code == 0 => Ok(Output::Bytes(Bytes::from(stdout))),
                true => Err(Fault::Exit { code: exit_code }.into()),
                false => {
                    let stdout = String::from_utf8_lossy(&stdout);
                    let stderr = used.captured.stderr.lock();
                    let stderr = String::from_utf8_lossy(&stderr);
                    Ok(Output::Value(json!({ "exit_code": exit_code, "stdout": stdout, "stderr": stderr })))
                }
            }
        }
        _ => Err(mismatched()),
    }
}

/// The entry and the instance made from it disagree: cannot happen, and harms only this call if it does.
fn mismatched() -> GuestError {
    Fault::Start { why: "the instance is not of the kind its revision was deployed as".to_owned() }.into()
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
        self.ended = Some(match result {
            Ok(_) => Ok(()),
            Err(GuestError::Faulted(fault)) => Err(fault.clone().into()),
            Err(GuestError::Rejected(rejection)) => Err(rejection.clone().into()),
        });
    }
}

impl Drop for Settlement<'_> {
    fn drop(&mut self) {
        let Surroundings { metrics, logs, .. } = &*self.call.surroundings;
        let fault = match self.ended.take() {
            Some(Ok(())) => None,
            Some(Err(GuestError::Rejected(rejection))) => Some(rejection.to_string()),
            Some(Err(GuestError::Faulted(fault))) => {
                metrics.invocation_faults.inc();
                Some(fault.to_string())
            }
            None => Some("stopped: it met its deadline or its caller went away".to_owned()),
        };
        let dropped = self.call.used.captured.dropped_bytes.load(Ordering::Relaxed);
        if dropped > 0 {
            metrics.log_bytes_dropped.inc_by(dropped);
        }
        logs.keep(self.call, fault);
    }
}
