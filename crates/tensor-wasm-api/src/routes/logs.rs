//! What a function's calls wrote: the recent ones at once, or those to come as they end.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tensor_wasm_exec::logs::{Entry, Follower};
use tokio::sync::watch;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::extract::{Path, Query};
use crate::gateway::Shared;

const SHOWN_DEFAULT: usize = 20;

/// While a function is silent, an empty line goes out this often: a client that left is noticed, and proxies keep the
/// connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

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
    /// Entries before this one that a follower was too slow for.
    #[serde(skip_serializing_if = "is_zero")]
    missed: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl LogView {
    fn of(entry: Entry, missed: u64) -> LogView {
        LogView {
            at_ms: entry.at_ms,
            trace_id: entry.invocation,
            revision: entry.revision,
            stdout: entry.stdout,
            stderr: entry.stderr,
            dropped_bytes: entry.dropped_bytes,
            fault: entry.fault,
            missed,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LogsView {
    logs: Vec<LogView>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogsQuery {
    limit: Option<usize>,
    #[serde(default)]
    follow: bool,
}

/// What the function's recent calls wrote, oldest first. With `follow=true` the answer does not end: one JSON object a
/// line (`application/x-ndjson`), first the recent ones, then each call's when it is over; empty lines mean nothing.
#[utoipa::path(get, path = "/functions/{f}/logs", params(("f" = String, Path, description = "name or id"),
        ("limit" = Option<usize>, Query, description = "recent calls to show, 20 by default"),
        ("follow" = Option<bool>, Query, description = "go on with the calls to come, one JSON object a line")),
    responses((status = 200, content((LogsView = "application/json"), (String = "application/x-ndjson")))))]
pub(crate) async fn show(
    State(gateway): State<Shared>,
    Path(f): Path<String>,
    Query(query): Query<LogsQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    let function = gateway.runtime.catalog.resolve(&tenant, &f)?;
    let limit = query.limit.unwrap_or(SHOWN_DEFAULT);
    if !query.follow {
        let logs = gateway.runtime.logs.tail(&function.id, limit);
        return Ok(
            Json(LogsView { logs: logs.into_iter().map(|entry| LogView::of(entry, 0)).collect() }).into_response()
        );
    }
    let following = Following {
        _place: gateway.followers.place(&tenant, gateway.runtime.config.server.log_followers_per_tenant_max)?,
        follower: gateway.runtime.logs.follow(&function.id, limit),
        closing: gateway.closing.subscribe(),
    };
    let lines = futures_util::stream::unfold(following, |mut following: Following| async move {
        let lines = following.next().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(lines), following))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    Ok((headers, Body::from_stream(lines)).into_response())
}

/// An open answer: its place among the tenant's, and where it is in the log.
struct Following {
    _place: FollowerPlace,
    follower: Follower,
    closing: watch::Receiver<bool>,
}

impl Following {
    /// The next lines; `None` when the function is gone or the server stops.
    async fn next(&mut self) -> Option<Bytes> {
        let news = tokio::select! {
            news = tokio::time::timeout(KEEP_ALIVE, self.follower.next()) => news,
            () = async { drop(self.closing.wait_for(|closing| *closing).await) } => return None,
        };
        let Ok(news) = news else { return Some(Bytes::from_static(b"\n")) };
        let news = news?;
        let mut lines = Vec::new();
        let mut missed = news.missed;
        for entry in news.entries {
            // Writing into memory cannot fail.
            let _ = serde_json::to_writer(&mut lines, &LogView::of(entry, std::mem::take(&mut missed)));
            lines.push(b'\n');
        }
        Some(lines.into())
    }
}

/// Who follows a log: each holds a connection, and up to a function's whole log while it is sent.
#[derive(Default)]
pub(crate) struct Followers {
    by_tenant: Mutex<HashMap<String, usize>>,
}

struct FollowerPlace {
    followers: Arc<Followers>,
    tenant: String,
}

impl Followers {
    fn place(self: &Arc<Self>, tenant: &str, places_max: usize) -> Result<FollowerPlace, ApiError> {
        let mut by_tenant = self.by_tenant.lock();
        let open = by_tenant.get(tenant).copied().unwrap_or(0);
        if open >= places_max {
            let message = format!(
                "tenant {tenant:?} follows {open} logs already, which is its limit ([server] \
                 log_followers_per_tenant_max)"
            );
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "tenant_capacity_exhausted", message));
        }
        by_tenant.insert(tenant.to_owned(), open + 1);
        Ok(FollowerPlace { followers: self.clone(), tenant: tenant.to_owned() })
    }
}

impl Drop for FollowerPlace {
    fn drop(&mut self) {
        let mut by_tenant = self.followers.by_tenant.lock();
        if let Some(open) = by_tenant.get_mut(&self.tenant) {
            *open -= 1;
            if *open == 0 {
                by_tenant.remove(&self.tenant);
            }
        }
    }
}
