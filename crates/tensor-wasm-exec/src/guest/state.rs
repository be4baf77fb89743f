//! What a store holds besides the instance: its WASI context, its budget and its deadline.
//!
//! WASI contexts are built on the first WASI call, not before: many functions never make one, and building one costs
//! more than an empty call.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use parking_lot::Mutex;
use wasmtime::component::ResourceTable;
use wasmtime::{Store, UpdateDeadline};
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::p2::pipe::MemoryInputPipe;
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};
use wasmtime_wasi_http::{WasiHttpCtx, WasiHttpCtxView, WasiHttpHooks, WasiHttpView};

use super::budget::{Budget, Meter};
use super::http::Outbound;
use super::stdio::{Output, Sink, Which};
use super::supervise;
use crate::admission::Account;
use crate::catalog::Serving;
use crate::engine::Ticking;
use crate::failure::Fault;

/// Handles (streams, pollables, headers, files…) a component may hold at once: they are host memory.
const HANDLES_MAX: usize = 10_000;

/// Bytes of HTTP header fields a guest may build.
const HEADER_BYTES_MAX: usize = 64 << 10;

/// What a call gives its guest.
#[derive(Clone)]
pub(crate) struct Environment {
    pub account: Arc<Account>,
    pub memory_bytes_max: u64,
    pub deadline: Instant,
    pub deadline_ms: u64,
    pub serving: Serving,
    pub args: Vec<String>,
    pub stdin: Bytes,
    pub stdout: Sink,
    pub stderr: Sink,
    pub meter: Arc<Meter>,
    pub outbound: Arc<Outbound>,
    /// Whether an instance of an earlier call will do, and this one for a later call.
    pub may_reuse: bool,
}

/// The data of every store, whatever the guest.
pub(crate) struct State {
    pub budget: Budget,
    pub deadline: Instant,
    pub deadline_ms: u64,
    /// The meter the output streams write to, once there are any; swapped when a reused instance gets its next call.
    output_meter: Option<Arc<Mutex<Arc<Meter>>>>,
    pub serving: Serving,
    args: Vec<String>,
    stdin: Bytes,
    stdout: Sink,
    stderr: Sink,
    // Boxed: a store's data is moved into place, and most guests have neither.
    p1: Option<Box<WasiP1Ctx>>,
    wasi: Option<Box<WasiCtx>>,
    table: ResourceTable,
    http: WasiHttpCtx,
    hooks: Hooks,
    /// Held while a call runs; a kept instance lets the clock rest.
    pub ticking: Option<Ticking>,
}

/// Decides which outgoing requests a guest may make.
struct Hooks(Arc<Outbound>);

/// A store whose guest is interrupted every tick and stopped at its deadline.
pub(crate) fn store(engine: &wasmtime::Engine, environment: Environment, ticking: Ticking) -> Store<State> {
    let mut http = WasiHttpCtx::new();
    http.set_field_size_limit(HEADER_BYTES_MAX);
    let mut table = ResourceTable::new();
    table.set_max_capacity(HANDLES_MAX);
    let mut store = Store::new(
        engine,
        State {
            budget: Budget::new(environment.account, environment.memory_bytes_max, environment.meter.clone()),
            deadline: environment.deadline,
            deadline_ms: environment.deadline_ms,
            output_meter: None,
            serving: environment.serving,
            args: environment.args,
            stdin: environment.stdin,
            stdout: environment.stdout,
            stderr: environment.stderr,
            p1: None,
            wasi: None,
            table,
            http,
            hooks: Hooks(environment.outbound),
            ticking: Some(ticking),
        },
    );
    store.limiter(|state| &mut state.budget);
    store.set_epoch_deadline(1);
    store.epoch_deadline_callback(|context| {
        let state = context.data();
        if Instant::now() >= state.deadline {
            return Err(wasmtime::Error::new(Fault::Deadline { deadline_ms: state.deadline_ms }));
        }
        supervise::slice_ended();
        Ok(UpdateDeadline::Yield(1))
    });
    store
}

impl State {
    /// Hands a reused instance to its next call.
    pub(crate) fn rebind(&mut self, deadline: Instant, deadline_ms: u64, meter: Arc<Meter>) {
        (self.deadline, self.deadline_ms) = (deadline, deadline_ms);
        if let Some(output) = &self.output_meter {
            *output.lock() = meter.clone();
        }
        self.budget.rebind(meter);
    }

    pub(crate) fn p1(&mut self) -> &mut WasiP1Ctx {
        if self.p1.is_none() {
            self.p1 = Some(Box::new(self.builder().build_p1()));
        }
        self.p1.get_or_insert_with(|| Box::new(WasiCtx::builder().build_p1()))
    }

    fn builder(&mut self) -> wasmtime_wasi::WasiCtxBuilder {
        let current = &self.budget.meter;
        let meter = self.output_meter.get_or_insert_with(|| Arc::new(Mutex::new(current.clone())));
        let output = |which, sink: &Sink| Output { sink: sink.clone(), which, meter: meter.clone() };
        let mut builder = WasiCtx::builder();
        builder.stdout(output(Which::Stdout, &self.stdout)).stderr(output(Which::Stderr, &self.stderr));
        if !self.stdin.is_empty() {
            builder.stdin(MemoryInputPipe::new(std::mem::take(&mut self.stdin)));
        }
        for (name, value) in &self.serving.revision().settings.env {
            builder.env(name, value);
        }
        builder.args(&self.args);
        builder
    }
}

impl WasiView for State {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        if self.wasi.is_none() {
            self.wasi = Some(Box::new(self.builder().build()));
        }
        let ctx = self.wasi.get_or_insert_with(|| Box::new(WasiCtx::builder().build()));
        WasiCtxView { ctx, table: &mut self.table }
    }
}

impl WasiHttpView for State {
    fn http(&mut self) -> WasiHttpCtxView<'_> {
        WasiHttpCtxView { ctx: &mut self.http, table: &mut self.table, hooks: &mut self.hooks }
    }
}

type SentRequest = Result<
    (
        http::Response<wasmtime_wasi_http::WasiBody>,
        Box<dyn Future<Output = Result<(), wasmtime_wasi_http::Error>> + Send>,
    ),
    wasmtime_wasi_http::Error,
>;

impl WasiHttpHooks for Hooks {
    fn send_request(
        &mut self,
        request: http::Request<wasmtime_wasi_http::WasiBody>,
        options: Option<wasmtime_wasi_http::RequestOptions>,
        _done: Box<dyn Future<Output = Result<(), wasmtime_wasi_http::Error>> + Send>,
    ) -> Box<dyn Future<Output = SentRequest> + Send> {
        let allowed = self.0.allows(request.uri());
        Box::new(async move {
            use http_body_util::BodyExt;
            if !allowed {
                return Err(wasmtime_wasi_http::Error::HttpRequestDenied);
            }
            let (response, io) = wasmtime_wasi_http::default_send_request(request, options).await?;
            Ok((response.map(BodyExt::boxed_unsync), Box::new(io) as Box<dyn Future<Output = _> + Send>))
        })
    }
}
