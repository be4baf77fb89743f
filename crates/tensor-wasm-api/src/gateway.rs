//! What every request has in common, around its route: a trace, a span, metrics and an audit line.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderValue, StatusCode};
use tensor_wasm_exec::Runtime;
use tracing::Instrument;

use crate::audit::{Audit, Line};
use crate::auth::Tokens;
use crate::body::{self, Held};
use crate::error::{ApiError, ErrorKind};
use crate::linger;
use crate::metrics::HttpMetrics;
use crate::trace::{TRACE_ID, TRACEPARENT, Trace};
use crate::upload::Uploads;

/// What the routes share.
pub(crate) struct Gateway {
    pub runtime: Arc<Runtime>,
    pub tokens: Tokens,
    pub metrics: HttpMetrics,
    pub audit: Audit,
    pub bodies: Arc<Held>,
    pub uploads: Arc<Uploads>,
    /// Connections open now.
    pub open: AtomicUsize,
    pub cores: usize,
    pub exporting: bool,
}

pub(crate) type Shared = Arc<Gateway>;

impl Gateway {
    pub(crate) fn body_limit(&self) -> Duration {
        Duration::from_millis(self.runtime.config.server.body_ms_max)
    }

    pub(crate) fn body_idle(&self) -> Duration {
        Duration::from_millis(self.runtime.config.server.body_idle_ms_max)
    }
}

/// Put into a response by its route: what the audit log is to say.
#[derive(Debug, Clone)]
pub(crate) struct Audited {
    pub event: &'static str,
    pub tenant: String,
    pub subject: String,
}

/// Runs a route with everything around it.
pub(crate) async fn around(State(gateway): State<Shared>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    linger::request();
    let mut trace = Trace::from_headers(request.headers());
    let method = request.method().clone();
    let matched = request.extensions().get::<MatchedPath>().cloned();
    let route = matched.as_ref().map_or("unmatched", MatchedPath::as_str);
    let span =
        tracing::info_span!("request", otel.name = route, http.method = %method, http.status = tracing::field::Empty);
    if gateway.exporting {
        trace.adopt(&span);
    }
    request.extensions_mut().insert(trace);
    let unread = body::lend(&mut request);
    let in_flight = InFlight::new(&gateway);
    let mut response = next.run(request).instrument(span.clone()).await;
    drop(in_flight);

    let status = response.status();
    span.record("http.status", status.as_u16());
    let took = started.elapsed();
    gateway.metrics.answered(route, &method, status.as_u16(), took);
    let trace_id = trace.id_hex();
    if let Ok(value) = HeaderValue::from_str(&trace_id) {
        response.headers_mut().insert(TRACE_ID, value);
    }
    response.headers_mut().insert(TRACEPARENT, trace.traceparent());
    let audited = response.extensions_mut().remove::<Audited>();
    let error = response.extensions().get::<ErrorKind>().map(|kind| kind.0);
    if let Some(line) = worth_a_line(audited.as_ref(), status) {
        let (event, tenant, subject) = line;
        let duration_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let status = status.as_u16();
        gateway.audit.line(&Line { event, tenant, subject, trace_id: &trace_id, status, error, duration_us });
    }
    let left = unread.and_then(|unread| unread.lock().take());
    if let Some(body) = left {
        body::discard(&gateway, body).await;
    }
    // With more connections the other cores are in use, or about to be.
    if gateway.open.load(Ordering::Relaxed) <= gateway.cores / 2 {
        linger::answer();
    }
    response
}

/// State changes and invocations say so themselves; refused tokens are recognised by their status.
fn worth_a_line(audited: Option<&Audited>, status: StatusCode) -> Option<(&'static str, &str, &str)> {
    match (audited, status) {
        (Some(Audited { event, tenant, subject }), _) => Some((event, tenant, subject)),
        (None, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => Some(("token.refused", "", "")),
        _ => None,
    }
}

/// Attaches what the audit log is to say, whether the route succeeded or not.
pub(crate) fn audited(
    event: &'static str,
    tenant: &str,
    subject: &str,
    result: Result<Response, ApiError>,
) -> Response {
    use axum::response::IntoResponse;
    let mut response = result.unwrap_or_else(IntoResponse::into_response);
    let line = Audited { event, tenant: tenant.to_owned(), subject: subject.chars().take(128).collect() };
    response.extensions_mut().insert(line);
    response
}

pub(crate) async fn not_found() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is no such route; GET /openapi.json lists them")
}

pub(crate) async fn method_not_allowed() -> ApiError {
    let message = "this route does not take that method; GET /openapi.json lists them";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// An empty answer with a status.
pub(crate) fn empty(status: StatusCode) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

struct InFlight<'a>(&'a Gateway);

impl InFlight<'_> {
    fn new(gateway: &Gateway) -> InFlight<'_> {
        gateway.metrics.in_flight.inc();
        InFlight(gateway)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.metrics.in_flight.dec();
    }
}
