//! The server about itself: health, readiness, metrics, limits, its description and the dashboard page.

use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::State;
use axum::response::{Html, IntoResponse, Response};
use http::{HeaderMap, header};
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::gateway::Shared;

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
    if gateway.runtime.admission.is_closed() {
        return Err(tensor_wasm_exec::Rejection::ShuttingDown.into());
    }
    Ok(Json(Health { status: "ready" }))
}

#[utoipa::path(get, path = "/metrics", responses((status = 200, description = "Prometheus text")))]
pub(crate) async fn metrics(State(gateway): State<Shared>, headers: HeaderMap) -> Result<Response, ApiError> {
    // They name every tenant, so they are for those who may speak for every tenant.
    gateway.tokens.operator(&headers)?;
    let page = gateway.metrics.page(&gateway.runtime);
    Ok(([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], page).into_response())
}

#[utoipa::path(get, path = "/openapi.json", responses((status = 200, description = "this description")))]
pub(crate) async fn openapi(State(gateway): State<Shared>) -> Response {
    Json(crate::openapi::document(!gateway.tokens.is_empty())).into_response()
}

#[utoipa::path(get, path = "/", responses((status = 200, description = "the dashboard page")))]
pub(crate) async fn dashboard() -> Response {
    // Only the page's own script runs, and only in the page's own window.
    let nonce = format!("{:032x}", rand::random::<u128>());
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    );
    let page = include_str!("../dashboard.html").replace("NONCE", &nonce);
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(page)).into_response()
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
