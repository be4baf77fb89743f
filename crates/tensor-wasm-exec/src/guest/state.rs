//! What a store holds besides the instance: its WASI context, its budget and its deadline.
//!
//! WASI contexts are built on the first WASI call, not before: many functions never make one, and building one costs
//! more than an empty call.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use wasmtime::component::ResourceTable;
use wasmtime::{Store, UpdateDeadline};
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::p2::pipe::MemoryInputPipe;
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};
use wasmtime_wasi_http::{WasiHttpCtx, WasiHttpCtxView, WasiHttpHooks, WasiHttpView};

use super::budget::Budget;
use super::gpu::Session;
use super::running::{Given, RunningCall, Surroundings};
use super::stdio::{Output, Sink, Which};
use super::tensor::TensorSession;
use super::{GuestError, supervise};
use crate::failure::Fault;

/// Handles (streams, pollables, headers, files…) a component may hold at once: they are host memory.
const HANDLES_MAX: usize = 10_000;

/// Bytes of HTTP header fields a guest may build.
const HEADER_BYTES_MAX: usize = 64 << 10;

/// The data of every store, whatever the guest.
pub(crate) struct State {
    pub budget: Budget,
    deadline: Instant,
    /// The call the output streams write for, once there are any; swapped when a reused instance gets its next one.
    writing_for: Option<Arc<Mutex<Arc<RunningCall>>>>,
    /// None: no arguments, no input, output to the log.
    given: Option<Box<Given>>,
    /// The WASI context of a program in the foreground, until its first WASI call.
    foreground: Option<Box<wasmtime_wasi::WasiCtxBuilder>>,
    // Boxed: a store's data is moved into place, and most guests have neither.
    p1: Option<Box<WasiP1Ctx>>,
    wasi: Option<Box<WasiCtx>>,
    table: ResourceTable,
    http: WasiHttpCtx,
    hooks: Hooks,
    /// What it has of the device, once it has asked for it.
    pub session: Option<Box<Session>>,
    /// The same of tensors.
    pub tensors: Option<Box<TensorSession>>,
    is_counted: bool,
}

/// Decides which outgoing requests a guest may make.
#[derive(Default)]
struct Hooks(Option<Arc<Surroundings>>);

/// A store for a program in the foreground, which nothing bounds but what the caller sets on it.
pub(crate) fn foreground_store(
    engine: &wasmtime::Engine,
    call: &Arc<RunningCall>,
    wasi: wasmtime_wasi::WasiCtxBuilder,
) -> Store<State> {
    let mut state = State::new(call);
    state.foreground = Some(Box::new(wasi));
    let mut store = Store::new(engine, state);
    store.set_hostcall_fuel(call.account.limits.hostcall_bytes_max);
    store
}

/// A store whose guest is interrupted every tick and stopped at its deadline.
pub(crate) fn store(engine: &wasmtime::Engine, call: &Arc<RunningCall>, given: Option<Box<Given>>) -> Store<State> {
    let mut state = State::new(call);
    state.given = given;
    state.http.set_field_size_limit(HEADER_BYTES_MAX);
    state.table.set_max_capacity(HANDLES_MAX);
    let mut store = Store::new(engine, state);
    store.limiter(|state| &mut state.budget);
    store.set_hostcall_fuel(call.account.limits.hostcall_bytes_max);
    store.set_epoch_deadline(1);
    store.epoch_deadline_callback(|context| {
        let state = context.data();
        if Instant::now() >= state.deadline {
            return Err(wasmtime::Error::new(Fault::Deadline { deadline_ms: state.call().deadline_ms }));
        }
        supervise::slice_ended();
        Ok(UpdateDeadline::Yield(1))
    });
    store
}

impl State {
    fn new(call: &Arc<RunningCall>) -> State {
        State {
            budget: Budget::new(call.clone()),
            deadline: call.deadline(),
            writing_for: None,
            given: None,
            foreground: None,
            p1: None,
            wasi: None,
            table: ResourceTable::new(),
            http: WasiHttpCtx::new(),
            hooks: Hooks::default(),
            session: None,
            tensors: None,
            is_counted: false,
        }
    }

    /// Counts the instance, which now exists, until its store is gone.
    pub(crate) fn count(&mut self) {
        let metrics = &self.call().surroundings.metrics;
        metrics.instance_spawns.inc();
        metrics.active_instances.inc();
        self.is_counted = true;
    }

    /// The call it runs, or ran last.
    pub(crate) fn call(&self) -> &Arc<RunningCall> {
        &self.budget.call
    }

    /// What an error of its guest amounts to.
    pub(crate) fn failed(&self, error: &wasmtime::Error) -> GuestError {
        super::guest_error(error, self.call().account.limits.hostcall_bytes_max)
    }

    /// Takes back what a store was given whose instance could not be made.
    pub(crate) fn take_given(&mut self) -> Option<Box<Given>> {
        self.given.take()
    }

    /// Lets go of what was the call's alone, before the instance waits for another.
    pub(crate) fn end_call(&mut self) {
        *self.call().span.lock() = tracing::Span::none();
        if let Some(session) = &mut self.session {
            session.end_call();
        }
        if let Some(tensors) = &mut self.tensors {
            tensors.end_call();
        }
    }

    /// Hands a reused instance to its next call.
    pub(crate) fn rebind(&mut self, call: &Arc<RunningCall>) {
        self.deadline = call.deadline();
        if let Some(writing_for) = &self.writing_for {
            *writing_for.lock() = call.clone();
        }
        self.budget.rebind(call.clone());
    }

    pub(crate) fn p1(&mut self) -> &mut WasiP1Ctx {
        if self.p1.is_none() {
            self.p1 = Some(Box::new(self.builder().build_p1()));
        }
        self.p1.get_or_insert_with(|| Box::new(WasiCtx::builder().build_p1()))
    }

    fn builder(&mut self) -> wasmtime_wasi::WasiCtxBuilder {
        if let Some(foreground) = self.foreground.take() {
            return *foreground;
        }
        let call = &self.budget.call;
        let writing_for = self.writing_for.get_or_insert_with(|| Arc::new(Mutex::new(call.clone())));
        let output = |which, sink: Sink| Output { sink, which, call: writing_for.clone() };
        let mut builder = WasiCtx::builder();
        builder.stderr(output(Which::Stderr, call.log_sink()));
        match self.given.take() {
            None => drop(builder.stdout(output(Which::Stdout, call.log_sink()))),
            Some(given) => {
                let Given { args, stdin, stdout } = *given;
                builder.stdout(output(Which::Stdout, stdout)).args(&args);
                if !stdin.is_empty() {
                    builder.stdin(MemoryInputPipe::new(stdin));
                }
            }
        }
        // A secret hides a variable of the same name.
        let secrets = &call.serving.function.secrets;
        for (name, value) in &call.serving.revision().settings.env {
            if !secrets.contains_key(name) {
                builder.env(name, value);
            }
        }
        for (name, secret) in secrets.iter() {
            builder.env(name, secret.expose());
        }
        builder
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if self.is_counted {
            let metrics = &self.call().surroundings.metrics;
            metrics.instance_terminations.inc();
            metrics.active_instances.dec();
        }
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
        self.hooks.0.get_or_insert_with(|| self.budget.call.surroundings.clone());
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
        let allowed = self.0.as_ref().is_some_and(|surroundings| surroundings.outbound.allows(request.uri()));
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
