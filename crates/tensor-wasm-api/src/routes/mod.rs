//! The routes, one file per noun. Each handler reads its request, makes one call of the runtime and shapes the answer.

pub(crate) mod functions;
pub(crate) mod invoke;
pub(crate) mod jobs;
pub(crate) mod logs;
pub(crate) mod run;
pub(crate) mod secrets;
pub(crate) mod stream;
pub(crate) mod system;

use std::convert::Infallible;
use std::net::IpAddr;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::future::RouteFuture;
use axum::routing::{any, get, post, put};
use http::{HeaderValue, header};
use tower::Service;

use crate::gateway::{self, Shared};
use crate::hosts::{self, Host};

/// Every route of the API. `openapi.rs` describes the same list; a test holds the two together.
fn api(gateway: Shared) -> Router {
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
        .route("/functions/{f}/logs", get(logs::show))
        .route("/functions/{f}/invoke", post(invoke::invoke))
        .route("/functions/{f}/invoke-async", post(jobs::submit))
        .route("/functions/{f}/invoke-stream", post(stream::invoke))
        .route("/jobs", get(jobs::list))
        .route("/jobs/{id}", get(jobs::show).delete(jobs::cancel))
        .route("/run/{name}", any(run::root))
        .route("/run/{name}/", any(run::root))
        .route("/run/{name}/{*path}", any(run::path))
        .route("/t/{tenant}/{name}", any(run::tenants_root))
        .route("/t/{tenant}/{name}/", any(run::tenants_root))
        .route("/t/{tenant}/{name}/{*path}", any(run::tenants_path))
        .fallback(gateway::not_found)
        .method_not_allowed_fallback(gateway::method_not_allowed)
        .layer(axum::middleware::from_fn_with_state(gateway.clone(), gateway::around))
        .with_state(gateway)
}

/// What is served on a function's own host: nothing but the function.
fn functions_own(gateway: Shared) -> Router {
    Router::new()
        .fallback(run::host)
        .layer(axum::middleware::from_fn_with_state(gateway.clone(), gateway::around))
        .with_state(gateway)
}

/// Where a request came from, beside it in its extensions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientAddress(pub IpAddr);

/// Decides by its host whether a request is for the API or for a function, before anything looks at its path.
#[derive(Clone)]
pub(crate) struct Dispatch {
    gateway: Shared,
    api: Router,
    functions: Router,
    client: Option<ClientAddress>,
}

impl Dispatch {
    pub(crate) fn new(gateway: Shared) -> Dispatch {
        Dispatch { api: api(gateway.clone()), functions: functions_own(gateway.clone()), gateway, client: None }
    }

    /// The same for one connection.
    pub(crate) fn for_client(&self, client: IpAddr) -> Dispatch {
        Dispatch { client: Some(ClientAddress(client)), ..self.clone() }
    }
}

impl Service<http::Request<hyper::body::Incoming>> for Dispatch {
    type Response = axum::response::Response;
    type Error = Infallible;
    type Future = RouteFuture<Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<hyper::body::Incoming>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let host = match hosts::authority(&parts) {
            Ok(authority) => Ok(self.gateway.hosts.of(authority, parts.uri.path())),
            Err(error) => Err(error.message),
        };
        if !parts.headers.contains_key(header::HOST)
            && let Some(authority) = parts.uri.authority()
            && let Ok(value) = HeaderValue::from_str(authority.as_str())
        {
            // HTTP/2 has it in the URI; routes and guests look for it here.
            parts.headers.insert(header::HOST, value);
        }
        parts.extensions.insert(self.client.unwrap_or(ClientAddress(IpAddr::from([0, 0, 0, 0]))));
        let is_function = matches!(host, Ok(Host::Function(_)));
        parts.extensions.insert(host);
        let request = Request::from_parts(parts, Body::new(body));
        if is_function { self.functions.call(request) } else { self.api.call(request) }
    }
}
