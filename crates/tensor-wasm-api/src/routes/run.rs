//! The HTTP endpoint of a `wasi:http` function: the request handed over, the response handed back, bodies streamed.
//!
//! A function is reached on a host of its own (`hosts.rs`), which is what browsers are meant for, or below a path of
//! the API's host, which is what programs use. On the API's host its answers are sandboxed (`guard.rs`).

use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, Uri, header, uri};
use tensor_wasm_exec::catalog::{FunctionRecord, check_name};
use tensor_wasm_exec::{Call, Invocation, Output};

use crate::auth::{DEFAULT_TENANT, TENANT_HEADER};
use crate::error::ApiError;
use crate::extract::Path;
use crate::gateway::{Gateway, RUN_EVENT, ServedRevision, Shared, audited};
use crate::hosts::FunctionHost;
use crate::trace::Trace;
use crate::{body, guard};

/// Hands a request to the function; the guest sees the path below its name. The tenant is the token's, or named in the
/// header `X-TensorWasm-Tenant`.
#[utoipa::path(method(get, head, post, put, delete, patch, options, trace), path = "/run/{name}/{path}",
    params(("name" = String, Path,), ("path" = String, Path,)),
    responses((status = 200, description = "whatever the function answers")))]
pub(crate) async fn path(
    State(gateway): State<Shared>,
    Path((name, _)): Path<(String, String)>,
    Extension(trace): Extension<Trace>,
    request: Request,
) -> Response {
    run(&gateway, Destination { tenant: None, name: &name, mount: Mount::Segments(2) }, trace, request).await
}

pub(crate) async fn root(
    State(gateway): State<Shared>,
    Path(name): Path<String>,
    Extension(trace): Extension<Trace>,
    request: Request,
) -> Response {
    run(&gateway, Destination { tenant: None, name: &name, mount: Mount::Segments(2) }, trace, request).await
}

/// Hands a request to a function of the tenant in the path: public ones to everyone, others to who has its token.
#[utoipa::path(method(get, head, post, put, delete, patch, options, trace), path = "/t/{tenant}/{name}/{path}",
    params(("tenant" = String, Path,), ("name" = String, Path,), ("path" = String, Path,)),
    responses((status = 200, description = "whatever the function answers")))]
pub(crate) async fn tenants_path(
    State(gateway): State<Shared>,
    Path((tenant, name, _)): Path<(String, String, String)>,
    Extension(trace): Extension<Trace>,
    request: Request,
) -> Response {
    run(&gateway, Destination { tenant: Some(&tenant), name: &name, mount: Mount::Segments(3) }, trace, request).await
}

pub(crate) async fn tenants_root(
    State(gateway): State<Shared>,
    Path((tenant, name)): Path<(String, String)>,
    Extension(trace): Extension<Trace>,
    request: Request,
) -> Response {
    run(&gateway, Destination { tenant: Some(&tenant), name: &name, mount: Mount::Segments(3) }, trace, request).await
}

/// Every request on a function's own host.
pub(crate) async fn host(
    State(gateway): State<Shared>,
    Extension(host): Extension<FunctionHost>,
    Extension(trace): Extension<Trace>,
    request: Request,
) -> Response {
    let mount = Mount::Host { prefix_bytes: host.prefix_bytes, is_shared: host.is_shared };
    run(&gateway, Destination { tenant: Some(&host.tenant), name: &host.name, mount }, trace, request).await
}

/// The function a request is for, and where it is reached.
struct Destination<'a> {
    /// Where the address says so; otherwise the caller does.
    tenant: Option<&'a str>,
    name: &'a str,
    mount: Mount,
}

#[derive(Debug, Clone, Copy)]
enum Mount {
    /// On the API's host, below this many segments of the path.
    Segments(usize),
    Host {
        prefix_bytes: usize,
        is_shared: bool,
    },
}

async fn run(gateway: &Shared, destination: Destination<'_>, trace: Trace, request: Request) -> Response {
    let mut response = match tenant(gateway, &destination, request.headers()) {
        Ok(tenant) => {
            let result = serve(gateway, &tenant, &destination, trace, request).await;
            audited(RUN_EVENT, &tenant, destination.name, result)
        }
        Err(error) => error.into_response(),
    };
    match destination.mount {
        Mount::Segments(_) => guard::sandbox(response.headers_mut()),
        Mount::Host { is_shared: true, .. } => guard::host_only(response.headers_mut()),
        Mount::Host { is_shared: false, .. } => {}
    }
    response
}

async fn serve(
    gateway: &Shared,
    tenant: &str,
    destination: &Destination<'_>,
    trace: Trace,
    request: Request,
) -> Result<Response, ApiError> {
    let id = trace.trace_id;
    let call = Call::Http(for_guest(gateway, destination.mount, &trace, request)?);
    let (tenant, function) = (tenant.to_owned(), destination.name.to_owned());
    let outcome = gateway.runtime.invoke(Invocation { id, tenant, function, call, deadline: None }).await?;
    let revision = ServedRevision(outcome.revision().as_str().to_owned());
    let Output::Response(response) = outcome.output else {
        return Err(ApiError::bad_request("missing_export", "not an HTTP function"));
    };
    let mut response = (*response).map(Body::new);
    response.extensions_mut().insert(revision);
    Ok(response)
}

/// The tenant whose function is meant. Public functions answer callers without a token.
fn tenant(gateway: &Gateway, destination: &Destination<'_>, headers: &HeaderMap) -> Result<String, ApiError> {
    let speaks = match destination.tenant {
        Some(tenant) => {
            check_name(tenant).map_err(ApiError::from).and_then(|()| gateway.tokens.speaks_for(headers, Some(tenant)))
        }
        None => gateway.tokens.tenant(headers),
    };
    let refused = match speaks {
        Ok(tenant) => return Ok(tenant),
        Err(error) => error,
    };
    let in_header = || headers.get(TENANT_HEADER).and_then(|v| v.to_str().ok()).unwrap_or(DEFAULT_TENANT);
    let asked = destination.tenant.unwrap_or_else(in_header);
    // Each revision with traffic must be: any of them may serve the call.
    let is_public = |f: &FunctionRecord| {
        let revision =
            |share: &tensor_wasm_exec::catalog::Share| f.revision(&share.revision).is_some_and(|r| r.settings.public);
        !f.traffic.is_empty() && f.traffic.iter().all(revision)
    };
    match gateway.runtime.catalog.resolve(asked, destination.name) {
        Ok(function) if is_public(&function) => Ok(asked.to_owned()),
        _ => Err(refused),
    }
}

/// The request as the guest sees it: its own path, a full URI, and none of our credentials.
fn for_guest(
    gateway: &Gateway,
    mount: Mount,
    trace: &Trace,
    request: Request,
) -> Result<tensor_wasm_exec::guest::http::Request, ApiError> {
    let (mut parts, body) = request.into_parts();
    if gateway.tokens.carries_token(&parts.headers) {
        parts.headers.remove(header::AUTHORIZATION);
    }
    trace.hand_on(&mut parts.headers);
    // HTTP/1.0 has none; a guest expects one.
    let host = parts.headers.entry(header::HOST).or_insert(HeaderValue::from_static("localhost"));
    parts.uri = full(host, below(&parts.uri, mount)?);
    parts.extensions = http::Extensions::new();
    Ok(http::Request::from_parts(parts, body::for_guest(body, gateway.body_idle())))
}

/// `/run/NAME/a/b?c` → `/a/b?c`, `/t/TENANT/NAME/a` → `/a`; on a host of its own, what is below the route's prefix.
fn below(uri: &Uri, mount: Mount) -> Result<Uri, ApiError> {
    let whole = uri.path_and_query().map_or("/", uri::PathAndQuery::as_str);
    let rest = match mount {
        // Names may have been sent percent-encoded, so the prefix is found by its slashes.
        Mount::Segments(segments) => (0..segments).fold(whole, |rest, _| {
            let after = rest.strip_prefix('/').unwrap_or(rest);
            after.find(['/', '?']).map_or("", |at| &after[at..])
        }),
        Mount::Host { prefix_bytes, .. } => whole.get(prefix_bytes..).unwrap_or(""),
    };
    let text = if rest.starts_with('/') { rest.to_owned() } else { format!("/{rest}") };
    text.parse().map_err(|e| ApiError::bad_request("invalid_args", format!("the path: {e}")))
}

/// A URI with the scheme that we speak and the host that was asked for; without them if that is no authority.
fn full(host: &HeaderValue, path: Uri) -> Uri {
    let mut parts = path.clone().into_parts();
    parts.scheme = Some(uri::Scheme::HTTP);
    parts.authority = uri::Authority::try_from(host.as_bytes()).ok();
    Uri::from_parts(parts).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_sees_a_full_uri() {
        let full =
            |host: &'static str, path: &str| full(&HeaderValue::from_static(host), path.parse().unwrap()).to_string();
        assert_eq!(full("hello.acme.localhost:8080", "/a?b=c"), "http://hello.acme.localhost:8080/a?b=c");
        assert_eq!(full("[::1]:80", "/"), "http://[::1]:80/");
        assert_eq!(full("no authority", "/a"), "/a");
    }

    #[test]
    fn the_guest_sees_its_own_path() {
        let check = |uri: &str, mount: Mount, expect: &str| {
            let uri: Uri = uri.parse().unwrap();
            assert_eq!(below(&uri, mount).unwrap().to_string(), expect, "{uri}");
        };
        let run = Mount::Segments(2);
        check("/run/hello", run, "/");
        check("/run/hello/", run, "/");
        check("/run/hello?x=1", run, "/?x=1");
        check("/run/hello/a/b?c=d%20e", run, "/a/b?c=d%20e");
        check("/run/h%65llo//a", run, "//a");
        check("http://h:1/run/hello/a", run, "/a");
        check("/t/acme/hello/a?b=/c", Mount::Segments(3), "/a?b=/c");
        check("/t/acme/hello", Mount::Segments(3), "/");
        let host = |prefix_bytes| Mount::Host { prefix_bytes, is_shared: true };
        check("/a/b?c", host(0), "/a/b?c");
        check("/shop?c", host(5), "/?c");
        check("/shop/x", host(5), "/x");
    }
}
