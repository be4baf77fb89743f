//! The routes, one file per noun. Each handler reads its request, makes one call of the runtime and shapes the answer.

pub(crate) mod functions;
pub(crate) mod invoke;
pub(crate) mod jobs;
pub(crate) mod logs;
pub(crate) mod models;
pub(crate) mod run;
pub(crate) mod secrets;
pub(crate) mod stream;
pub(crate) mod system;

use std::convert::Infallible;
use std::net::IpAddr;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use axum::routing::future::RouteFuture;
use axum::routing::{get, post, put};
use futures_util::future::{BoxFuture, Either, FutureExt};
use http::{HeaderValue, header};
use hyper::body::{Body as _, Incoming};

use crate::gateway::{self, Shared};
use crate::hosts::{self, Host};
use crate::routes::run::Destination;

/// Every route of the API but the functions' own paths. `openapi.rs` describes the same list; a test holds the two
/// together.
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
        .route("/models", get(models::list))
        .route("/models/{name}", get(models::show).put(models::add).delete(models::remove))
        .route("/jobs", get(jobs::list))
        .route("/jobs/{id}", get(jobs::show).delete(jobs::cancel))
        .fallback(gateway::not_found)
        .method_not_allowed_fallback(gateway::method_not_allowed)
        .layer(axum::middleware::from_fn_with_state(gateway.clone(), gateway::around_route))
        .with_state(gateway)
}

/// Whom a request is for and where it came from, beside it in its extensions.
#[derive(Debug, Clone)]
pub(crate) struct Reached {
    /// Or why that cannot be said.
    pub host: Result<Host, String>,
    pub client: IpAddr,
}

/// Decides by its host and path whether a request is for the API or for a function. A function's requests do not pass
/// the router, which has nothing to decide for them: it, boxed futures, extensions and a span nobody read took a fifth
/// of the CPU time of a hello.
#[derive(Clone)]
pub(crate) struct Dispatch {
    gateway: Shared,
    api: Router,
    client: IpAddr,
}

impl Dispatch {
    pub(crate) fn new(gateway: Shared) -> Dispatch {
        Dispatch { api: api(gateway.clone()), gateway, client: IpAddr::from([0, 0, 0, 0]) }
    }

    /// The same for one connection.
    pub(crate) fn for_client(&self, client: IpAddr) -> Dispatch {
        Dispatch { client, ..self.clone() }
    }
}

impl hyper::service::Service<http::Request<Incoming>> for Dispatch {
    type Response = Response;
    type Error = Infallible;
    type Future = Either<RouteFuture<Infallible>, BoxFuture<'static, Result<Response, Infallible>>>;

    fn call(&self, request: http::Request<Incoming>) -> Self::Future {
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
        let destination = match &host {
            Ok(Host::Function(function)) => Some(Destination::of_host(function)),
            Ok(Host::Api) => Destination::of_path(parts.uri.path()),
            _ => None,
        };
        let body = if body.is_end_stream() { Body::empty() } else { Body::new(body) };
        let mut request = Request::from_parts(parts, body);
        if let Some(destination) = destination {
            let answer = run::answer(self.gateway.clone(), destination, self.client, request);
            return Either::Right(answer.map(Ok).boxed());
        }
        request.extensions_mut().insert(Reached { host, client: self.client });
        Either::Left(tower::Service::call(&mut self.api.clone(), request))
    }
}
