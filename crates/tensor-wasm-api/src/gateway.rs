//! What every request has in common, around its route: a trace, a span, the guard, metrics and an audit line.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tensor_wasm_exec::{Bug, Failure, Runtime};
use tokio::sync::watch;
use tracing::field::Empty;
use tracing::{Instrument, Span};

use crate::audit::{Audit, Line};
use crate::auth::Tokens;
use crate::body::{self, HeldBodies};
use crate::error::{ApiError, ErrorKind, OurFault};
use crate::guard;
use crate::hosts::{Host, Hosts};
use crate::linger;
use crate::metrics::HttpMetrics;
use crate::routes::Reached;
use crate::routes::logs::Followers;
use crate::trace::{TRACE_ID, TRACEPARENT, Trace};
use crate::upload::Uploads;

/// What the routes share.
pub(crate) struct Gateway {
    pub runtime: Arc<Runtime>,
    pub tokens: Tokens,
    pub metrics: HttpMetrics,
    pub audit: Audit,
    pub bodies: Arc<HeldBodies>,
    pub uploads: Arc<Uploads>,
    /// Connections open now.
    pub open: AtomicUsize,
    pub cores: usize,
    pub exporting: bool,
    pub hosts: Hosts,
    /// Who follows a log.
    pub followers: Arc<Followers>,
    /// True once the server shuts down: what would otherwise go on without end then ends.
    pub closing: watch::Sender<bool>,
}

pub(crate) type Shared = Arc<Gateway>;

impl Gateway {
    pub(crate) fn body_limit(&self) -> Duration {
        Duration::from_millis(self.runtime.config.server.body_ms_max)
    }

    /// The revision that must have served a call that failed, where only one has traffic. A change that was refused
    /// served and made none, and a job is served when it runs.
    fn only_revision(&self, audited: &Audited) -> Option<ServedRevision> {
        let is_call = matches!(audited.event, INVOKE_EVENT | INVOKE_STREAM_EVENT | RUN_EVENT);
        if !is_call {
            return None;
        }
        let function = self.runtime.catalog.resolve(&audited.tenant, &audited.subject).ok()?;
        match function.traffic.as_slice() {
            [only] => Some(ServedRevision(only.revision.as_str().to_owned())),
            _ => None,
        }
    }

    pub(crate) fn body_idle(&self) -> Duration {
        Duration::from_millis(self.runtime.config.server.body_idle_ms_max)
    }
}

/// The events of calls that are answered at once.
pub(crate) const INVOKE_EVENT: &str = "function.invoke";
pub(crate) const INVOKE_STREAM_EVENT: &str = "function.invoke_stream";
pub(crate) const RUN_EVENT: &str = "function.run";

/// Put into a response by its route: what the audit log is to say.
#[derive(Debug, Clone)]
pub(crate) struct Audited {
    pub event: &'static str,
    pub tenant: String,
    pub subject: String,
}

impl Audited {
    pub(crate) fn new(event: &'static str, tenant: &str, subject: &str) -> Audited {
        Audited { event, tenant: tenant.to_owned(), subject: subject.chars().take(128).collect() }
    }
}

/// The revision that a route served or made, for the audit log; rides along with its response.
#[derive(Debug, Clone)]
pub(crate) struct ServedRevision(pub String);

/// What a request is answered with, and what the audit log is to say of it.
pub(crate) struct Answered {
    pub response: Response,
    pub audited: Option<Audited>,
    pub revision: Option<ServedRevision>,
}

impl From<Response> for Answered {
    /// The API's routes let the rest ride along with their response.
    fn from(mut response: Response) -> Answered {
        let audited = response.extensions_mut().remove::<Audited>();
        let revision = response.extensions_mut().remove::<ServedRevision>();
        Answered { response, audited, revision }
    }
}

/// Who answers a request, and who sent it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exchange<'a> {
    /// The pattern that its path matched.
    pub route: &'a str,
    /// The answer is a function's own: so are its headers and its status.
    pub is_functions: bool,
    pub client: IpAddr,
}

/// Runs a route of the API with everything around it.
pub(crate) async fn around_route(State(gateway): State<Shared>, mut request: Request, next: Next) -> Response {
    let Some(Reached { host, client }) = request.extensions_mut().remove::<Reached>() else {
        return ApiError::from(Failure::Bug(Bug("a request that was not dispatched".to_owned()))).into_response();
    };
    let matched = request.extensions().get::<MatchedPath>().cloned();
    let route = matched.as_ref().map(MatchedPath::as_str);
    let exchange = Exchange { route: route.unwrap_or("unmatched"), is_functions: false, client };
    let answer = async |mut request: Request, trace: Trace| {
        let cors = guard::allowed_origin(&gateway.hosts, request.headers());
        let mut response = match guarded(&gateway, host, route, &mut request) {
            Ok(Guarded::Route) => {
                request.extensions_mut().insert(trace);
                next.run(request).await
            }
            Ok(Guarded::Preflight) => empty(StatusCode::NO_CONTENT),
            Err(error) => error.into_response(),
        };
        guard::seal(response.headers_mut(), cors);
        response.into()
    };
    around(&gateway, exchange, request, answer).await
}

/// Has a request answered, with everything around it.
pub(crate) async fn around<F>(
    gateway: &Gateway,
    exchange: Exchange<'_>,
    mut request: Request,
    answer: impl FnOnce(Request, Trace) -> F,
) -> Response
where
    F: Future<Output = Answered>,
{
    let Exchange { route, is_functions, client } = exchange;
    let started = Instant::now();
    linger::request();
    let method = request.method().clone();
    let span = if gateway.exporting { exported_span(&request, route, client) } else { plain_span(&method, route) };
    let trace = Trace::begin(request.headers(), gateway.exporting.then_some(&span));
    let token = if gateway.audit.is_off() { None } else { gateway.tokens.name(request.headers()) };
    let unread = body::lend(&mut request);
    let in_flight = InFlight::new(gateway);
    let answered = answer(request, trace.clone()).instrument(span.clone()).await;
    drop(in_flight);
    let Answered { mut response, audited, revision } = answered;

    let status = response.status();
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
    let took = started.elapsed();
    gateway.metrics.answered(route, &method, status.as_u16(), is_functions, took);
    response.headers_mut().insert(TRACE_ID, trace.id());
    response.headers_mut().insert(TRACEPARENT, trace.traceparent());
    if let Some(OurFault(bug)) = response.extensions_mut().remove::<OurFault>() {
        tracing::error!(trace_id = trace.id_hex(), %method, route, %bug, "internal error");
    }
    let error = response.extensions().get::<ErrorKind>().map(|kind| kind.0);
    if !gateway.audit.is_off()
        && let Some((event, tenant, subject)) = worth_a_line(audited.as_ref(), error)
    {
        let revision = revision.or_else(|| gateway.only_revision(audited.as_ref()?));
        gateway.audit.line(&Line {
            event,
            tenant,
            subject,
            revision: revision.as_ref().map_or("", |revision| &revision.0),
            token: token.unwrap_or(""),
            client: &client.to_string(),
            trace_id: trace.id_hex(),
            status: status.as_u16(),
            error,
            duration_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        });
    }
    let left = unread.and_then(|unread| unread.lock().take());
    if let Some(body) = left {
        body::discard(gateway, body).await;
    }
    // With more connections the other cores are in use, or about to be.
    if gateway.open.load(Ordering::Relaxed) <= gateway.cores / 2 {
        linger::answer();
    }
    response
}

/// The span of a request, as far as the server's own log shows it: at a level that is off unless somebody asks, since
/// making one takes longer than all the rest here.
fn plain_span(method: &http::Method, route: &str) -> Span {
    tracing::debug_span!(
        "request",
        http.request.method = %method,
        http.route = route,
        http.response.status_code = Empty,
        otel.status_code = Empty
    )
}

/// The same for a collector, by OpenTelemetry's semantic conventions for HTTP servers.
fn exported_span(request: &Request, route: &str, client: IpAddr) -> Span {
    let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    let authority = header(http::header::HOST).unwrap_or_default();
    let (host, port) = authority.rsplit_once(':').unwrap_or((authority, "80"));
    tracing::info_span!(
        "request",
        otel.name = format!("{} {route}", request.method()),
        otel.kind = "server",
        otel.status_code = Empty,
        http.request.method = %request.method(),
        http.route = route,
        http.response.status_code = Empty,
        url.scheme = "http",
        url.path = request.uri().path(),
        server.address = host,
        server.port = port.parse::<u16>().ok(),
        client.address = client.to_string(),
        network.protocol.version = protocol_version(request.version()),
        user_agent.original = header(http::header::USER_AGENT),
    )
}

fn protocol_version(version: http::Version) -> &'static str {
    match version {
        http::Version::HTTP_2 => "2",
        http::Version::HTTP_10 => "1.0",
        _ => "1.1",
    }
}

/// What the guard has to say about a request.
enum Guarded {
    Route,
    /// A browser asks what a page of an allowed origin may send.
    Preflight,
}

fn guarded(
    gateway: &Gateway,
    host: Result<Host, String>,
    route: Option<&str>,
    request: &mut Request,
) -> Result<Guarded, ApiError> {
    let host = host.map_err(|why| ApiError::bad_request("invalid_host", why))?;
    let (parts, body) = std::mem::take(request).into_parts();
    let checked = if host == Host::Api && guard::is_preflight(&gateway.hosts, &parts) {
        Ok(Guarded::Preflight)
    } else {
        guard::check(&gateway.hosts, &host, &parts, route).map(|()| Guarded::Route)
    };
    *request = Request::from_parts(parts, body);
    checked
}

/// State changes and invocations say so themselves; who was refused before a route came to that is recognised by the
/// kind of error.
fn worth_a_line<'a>(
    audited: Option<&'a Audited>,
    error: Option<&'static str>,
) -> Option<(&'static str, &'a str, &'a str)> {
    match (audited, error) {
        (Some(Audited { event, tenant, subject }), _) => Some((event, tenant, subject)),
        (None, Some("unauthorized" | "tenant_scope_denied" | "permission_denied")) => Some(("token.refused", "", "")),
        (None, Some("origin_denied")) => Some(("origin.refused", "", "")),
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
    let mut response = result.unwrap_or_else(IntoResponse::into_response);
    response.extensions_mut().insert(Audited::new(event, tenant, subject));
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
