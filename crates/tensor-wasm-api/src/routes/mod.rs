//! The routes, one file per noun. Each handler reads its request, makes one call of the runtime and shapes the answer.

pub(crate) mod functions;
pub(crate) mod invoke;
pub(crate) mod jobs;
pub(crate) mod run;
pub(crate) mod secrets;
pub(crate) mod stream;
pub(crate) mod system;

use axum::Router;
use axum::routing::{any, get, post, put};

use crate::gateway::{self, Shared};

/// Every route of the server. `openapi.rs` describes the same list; a test holds the two together.
pub(crate) fn router(gateway: Shared) -> Router {
    Router::new()
        .route("/", get(system::dashboard))
        .route("/healthz", get(system::healthz))
        .route("/readyz", get(system::readyz))
        .route("/metrics", get(system::metrics))
        .route("/openapi.json", get(system::openapi))
        .route("/limits", get(system::limits))
        .route("/functions", get(functions::list).post(functions::deploy))
        .route("/functions/{f}", get(functions::show).delete(functions::delete))
        .route("/functions/{f}/revisions", get(functions::revisions))
        .route("/functions/{f}/rollback", post(functions::rollback))
        .route("/functions/{f}/traffic", put(functions::traffic))
        .route("/functions/{f}/secrets", get(secrets::list))
        .route("/functions/{f}/secrets/{key}", put(secrets::set).delete(secrets::delete))
        .route("/functions/{f}/logs", get(system::logs))
        .route("/functions/{f}/invoke", post(invoke::invoke))
        .route("/functions/{f}/invoke-async", post(jobs::submit))
        .route("/functions/{f}/invoke-stream", post(stream::invoke))
        .route("/jobs", get(jobs::list))
        .route("/jobs/{id}", get(jobs::show).delete(jobs::cancel))
        .route("/run/{name}", any(run::root))
        .route("/run/{name}/", any(run::root))
        .route("/run/{name}/{*path}", any(run::path))
        .fallback(gateway::not_found)
        .method_not_allowed_fallback(gateway::method_not_allowed)
        .layer(axum::middleware::from_fn_with_state(gateway.clone(), gateway::around))
        .with_state(gateway)
}
