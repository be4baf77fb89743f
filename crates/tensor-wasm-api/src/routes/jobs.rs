//! Asynchronous invocations.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tensor_wasm_exec::jobs::{Job, Submission};
use utoipa::ToSchema;

use super::invoke::parse_json;
use crate::body;
use crate::error::{ApiError, internal};
use crate::extract::{Path, Query, whole_if_any};
use crate::gateway::{Shared, audited};

pub(crate) const IDEMPOTENCY_KEY: &str = "idempotency-key";

const LISTED_DEFAULT: usize = 50;
const LISTED_MAX: usize = 200;

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct SubmitRequest {
    export: Option<String>,
    args: Value,
    stdin: String,
    /// How often to try if the guest faults; `[jobs] attempts` by default.
    #[serde(deserialize_with = "whole_if_any")]
    attempts: Option<u32>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct JobAccepted {
    job_id: String,
    state: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct JobView {
    id: String,
    function: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    export: Option<String>,
    /// `queued`, `running`, `succeeded`, `failed` or `cancelled`.
    state: &'static str,
    attempts: u32,
    /// Of those, how often the server stopped before it was done.
    interrupted: u32,
    attempts_max: u32,
    created_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    started_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    finished_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Object)]
    error: Option<Value>,
}

impl From<Job> for JobView {
    fn from(job: Job) -> JobView {
        JobView {
            id: job.id,
            function: job.function,
            export: job.export,
            state: job.state.as_str(),
            // What the server's own restarts cost is not an attempt that failed.
            attempts: job.attempts,
            interrupted: job.interrupted,
            attempts_max: job.attempts_max,
            created_ms: job.created_ms,
            started_ms: job.started_ms,
            finished_ms: job.finished_ms,
            result: job.result,
            error: job.error.map(|e| json!({ "kind": e.kind, "message": e.message })),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct JobsView {
    jobs: Vec<JobView>,
}

/// Accepts a call to be made later; the job is on disk when this answers.
#[utoipa::path(post, path = "/functions/{f}/invoke-async", params(("f" = String, Path, description = "name or id"),
        ("idempotency-key" = Option<String>, Header, description = "the same key and request make one job")),
    request_body = SubmitRequest,
    responses((status = 202, body = JobAccepted)))]
pub(crate) async fn submit(
    State(gateway): State<Shared>,
    Path(f): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let tenant = match gateway.tokens.tenant(&headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let result = async {
        let body = body::read_call(&gateway, &tenant, body).await?;
        let SubmitRequest { export, args, stdin, attempts } = parse_json(&body.bytes)?;
        let idempotency_key = match headers.get(IDEMPOTENCY_KEY).map(|v| v.to_str()) {
            None => None,
            Some(Ok(key)) => Some(key.to_owned()),
            Some(Err(_)) => return Err(ApiError::bad_request("invalid_args", "Idempotency-Key: it is not text")),
        };
        let submission = Submission {
            tenant: tenant.clone(),
            function: f.clone(),
            export,
            args,
            stdin,
            attempts_max: attempts,
            idempotency_key,
        };
        // Not in this connection's own future: a client that leaves must neither lose the job nor leave it
        // half-counted.
        let runtime = gateway.runtime.clone();
        let submitted = gateway.runtime.background().spawn(async move { runtime.submit(submission).await });
        let job = submitted.await.map_err(internal)??;
        let accepted = JobAccepted { job_id: job.id, state: job.state.as_str() };
        Ok((StatusCode::ACCEPTED, Json(accepted)).into_response())
    };
    audited("job.submit", &tenant, &f, result.await)
}

#[derive(Debug, Deserialize)]
pub(crate) struct ListQuery {
    limit: Option<usize>,
}

#[utoipa::path(get, path = "/jobs",
    params(("limit" = Option<usize>, Query, description = "50 by default, 200 at most")),
    responses((status = 200, body = JobsView)))]
pub(crate) async fn list(
    State(gateway): State<Shared>,
    Query(query): Query<ListQuery>,
    headers: HeaderMap,
) -> Result<Json<JobsView>, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    let (runtime, limit) = (gateway.runtime.clone(), query.limit.unwrap_or(LISTED_DEFAULT).min(LISTED_MAX));
    let listed = gateway.runtime.background().spawn_blocking(move || runtime.jobs(&tenant, limit));
    let jobs = listed.await.map_err(internal)??;
    Ok(Json(JobsView { jobs: jobs.into_iter().map(JobView::from).collect() }))
}

#[utoipa::path(get, path = "/jobs/{id}", params(("id" = String, Path,)),
    responses((status = 200, body = JobView), (status = 404)))]
pub(crate) async fn show(
    State(gateway): State<Shared>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<JobView>, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    Ok(Json(gateway.runtime.job(&tenant, &id)?.into()))
}

/// Cancels a job that has not finished.
#[utoipa::path(delete, path = "/jobs/{id}", params(("id" = String, Path,)),
    responses((status = 200, body = JobView), (status = 404), (status = 409)))]
pub(crate) async fn cancel(State(gateway): State<Shared>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    let tenant = match gateway.tokens.tenant(&headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let (runtime, owner, job) = (gateway.runtime.clone(), tenant.clone(), id.clone());
    let cancelled = gateway.runtime.background().spawn(async move { runtime.cancel(&owner, &job).await });
    let result = match cancelled.await.map_err(internal) {
        Ok(Ok(job)) => Ok(Json(JobView::from(job)).into_response()),
        Ok(Err(rejection)) => Err(rejection.into()),
        Err(error) => Err(error),
    };
    audited("job.cancel", &tenant, &id, result)
}
