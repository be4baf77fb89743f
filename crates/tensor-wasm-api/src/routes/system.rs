//! The server about itself: health, readiness, metrics, limits, logs, its description and the dashboard page.

use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::response::{Html, IntoResponse, Response};
use http::{HeaderMap, header};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::gateway::Shared;

const LOGS_DEFAULT: usize = 20;

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    status: &'static str,
}

#[utoipa::path(get, path = "/healthz", responses((status = 200, body = Health)))]
pub(crate) async fn healthz() -> Json<Health> {
    Json(Health { status: "ok" })
}

/// Ready only while calls are accepted.
#[utoipa::path(get, path = "/readyz", responses((status = 200, body = Health), (status = 503)))]
pub(crate) async fn readyz(State(gateway): State<Shared>) -> Result<Json<Health>, ApiError> {
    match gateway.runtime.admission.is_closed() {
        true => Err(tensor_wasm_exec::Rejection::ShuttingDown.into()),
        false => Ok(Json(Health { status: "ready" })),
    }
}

#[utoipa::path(get, path = "/metrics", responses((status = 200, description = "Prometheus text")))]
pub(crate) async fn metrics(State(gateway): State<Shared>, headers: HeaderMap) -> Result<Response, ApiError> {
    // They name every tenant, so they are for those who may speak for every tenant.
    gateway.tokens.operator(&headers)?;
    let page = gateway.metrics.page(&gateway.runtime);
    Ok(([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], page).into_response())
}

#[utoipa::path(get, path = "/openapi.json", responses((status = 200, description = "this description")))]
pub(crate) async fn openapi() -> Response {
    Json(crate::openapi::document()).into_response()
}

#[utoipa::path(get, path = "/", responses((status = 200, description = "the dashboard page")))]
pub(crate) async fn dashboard() -> Html<&'static str> {
    Html(include_str!("../dashboard.html"))
}

/// The caller's limits and what it uses of them now.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LimitsView {
    tenant: String,
    #[schema(value_type = Object)]
    limits: serde_json::Value,
    running: usize,
    queued: usize,
    memory_used_bytes: u64,
    functions: usize,
}

#[utoipa::path(get, path = "/limits", responses((status = 200, body = LimitsView)))]
pub(crate) async fn limits(State(gateway): State<Shared>, headers: HeaderMap) -> Result<Json<LimitsView>, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    let runtime = &gateway.runtime;
    let limits = serde_json::to_value(runtime.config.limits_of(&tenant)).unwrap_or_default();
    let account = runtime.admission.accounts().into_iter().find(|(a, _)| *a.name == *tenant);
    let (memory, depth) = match &account {
        Some((account, depth)) => (account.memory_used_bytes.load(Ordering::Relaxed), *depth),
        None => Default::default(),
    };
    let functions = runtime.catalog.list(&tenant).len();
    let (running, queued) = (depth.running, depth.waiting);
    Ok(Json(LimitsView { tenant, limits, running, queued, memory_used_bytes: memory, functions }))
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LogView {
    at_ms: u64,
    trace_id: String,
    revision: String,
    stdout: String,
    stderr: String,
    /// Bytes beyond `[limits] log_bytes_max`, not kept.
    dropped_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LogsView {
    logs: Vec<LogView>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct LogsQuery {
    limit: Option<usize>,
}

/// What the function's recent calls wrote, oldest first.
#[utoipa::path(get, path = "/functions/{f}/logs", params(("f" = String, Path, description = "name or id"),
        ("limit" = Option<usize>, Query, description = "calls to show, 20 by default")),
    responses((status = 200, body = LogsView), (status = 404)))]
pub(crate) async fn logs(
    State(gateway): State<Shared>,
    Path(f): Path<String>,
    Query(query): Query<LogsQuery>,
    headers: HeaderMap,
) -> Result<Json<LogsView>, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    let function = gateway.runtime.catalog.resolve(&tenant, &f)?;
    let view = |entry: tensor_wasm_exec::logs::Entry| LogView {
        at_ms: entry.at_ms,
        trace_id: entry.invocation,
        revision: entry.revision,
        stdout: entry.stdout,
        stderr: entry.stderr,
        dropped_bytes: entry.dropped_bytes,
        fault: entry.fault,
    };
    let logs = gateway.runtime.logs.tail(&function.id, query.limit.unwrap_or(LOGS_DEFAULT));
    Ok(Json(LogsView { logs: logs.into_iter().map(view).collect() }))
}
