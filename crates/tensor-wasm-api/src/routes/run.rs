//! The HTTP endpoint of a `wasi:http` function: the request handed over, the response handed back, bodies streamed.
//!
//! A function is reached on a host of its own (`hosts.rs`), which is what browsers are meant for, or below a path of
//! the API's host, which is what programs use. On the API's host its answers are sandboxed (`guard.rs`).

use std::net::IpAddr;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Uri, header, uri};
use tensor_wasm_exec::catalog::{FunctionRecord, check_name};
use tensor_wasm_exec::{Call, Invocation, Output};

use crate::auth::{DEFAULT_TENANT, TENANT_HEADER};
use crate::error::ApiError;
use crate::gateway::{Answered, Audited, Exchange, Gateway, RUN_EVENT, ServedRevision, Shared, around};
use crate::hosts::FunctionHost;
use crate::trace::Trace;
use crate::{body, guard};

/// The function a request is for, and where it is reached.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    /// Where the address says so; otherwise the caller does.
    tenant: Option<String>,
    name: String,
    mount: Mount,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mount {
    /// On the API's host, below `/run/NAME`.
    Run,
    /// There too, below `/t/TENANT/NAME`.
    Tenant,
    Host {
        prefix_bytes: usize,
        is_shared: bool,
    },
}

impl Destination {
    /// `None` for paths that are no function's.
    pub(crate) fn of_path(path: &str) -> Option<Destination> {
        match path.strip_prefix("/run/") {
            Some(rest) => below_run(rest),
            None => below_tenant(path.strip_prefix("/t/")?),
        }
    }

    /// Every path on a function's own host is the function's.
    pub(crate) fn of_host(host: &FunctionHost) -> Destination {
        let FunctionHost { tenant, name, prefix_bytes, is_shared } = host;
        let mount = Mount::Host { prefix_bytes: *prefix_bytes, is_shared: *is_shared };
        Destination { tenant: Some(tenant.clone()), name: name.clone(), mount }
    }

    /// As metrics and traces name it.
    fn route(&self) -> &'static str {
        match self.mount {
            Mount::Run => "/run/{name}/{path}",
            Mount::Tenant => "/t/{tenant}/{name}/{path}",
            Mount::Host { .. } => "{function}",
        }
    }
}

/// Hands a request to the function; the guest sees the path below its name. The tenant is the token's, or named in the
/// header `X-TensorWasm-Tenant`.
#[utoipa::path(method(get, head, post, put, delete, patch, options, trace), path = "/run/{name}/{path}",
    params(("name" = String, Path,), ("path" = String, Path,)),
    responses((status = 200, description = "whatever the function answers")))]
pub(crate) fn below_run(rest: &str) -> Option<Destination> {
    Some(Destination { tenant: None, name: segment(rest.split('/').next())?, mount: Mount::Run })
}

/// Hands a request to a function of the tenant in the path: public ones to everyone, others to who has its token.
#[utoipa::path(method(get, head, post, put, delete, patch, options, trace), path = "/t/{tenant}/{name}/{path}",
    params(("tenant" = String, Path,), ("name" = String, Path,), ("path" = String, Path,)),
    responses((status = 200, description = "whatever the function answers")))]
pub(crate) fn below_tenant(rest: &str) -> Option<Destination> {
    let mut segments = rest.split('/');
    let tenant = Some(segment(segments.next())?);
    Some(Destination { tenant, name: segment(segments.next())?, mount: Mount::Tenant })
}

/// A name in a path. One that is not text is nobody's.
fn segment(encoded: Option<&str>) -> Option<String> {
    let encoded = encoded.filter(|segment| !segment.is_empty())?;
    Some(percent_encoding::percent_decode_str(encoded).decode_utf8_lossy().into_owned())
}

/// Answers a request that is a function's, however the function was reached.
pub(crate) async fn answer(gateway: Shared, destination: Destination, client: IpAddr, request: Request) -> Response {
    let exchange = Exchange { route: destination.route(), is_functions: true, client };
    around(&gateway, exchange, request, |request, trace| run(&gateway, &destination, trace, request)).await
}

async fn run(gateway: &Gateway, destination: &Destination, trace: Trace, request: Request) -> Answered {
    let mut answer = match tenant(gateway, destination, request.headers()) {
        Ok(tenant) => {
            let audited = (!gateway.audit.is_off()).then(|| Audited::new(RUN_EVENT, &tenant, &destination.name));
            let served = serve(gateway, tenant, destination, trace, request).await;
            let (response, revision) = match served {
                Ok((response, revision)) => (response, Some(revision)),
                Err(error) => (error.into_response(), None),
            };
            Answered { response, audited, revision }
        }
        Err(error) => error.into_response().into(),
    };
    let headers = answer.response.headers_mut();
    match destination.mount {
        Mount::Run | Mount::Tenant => guard::sandbox(headers),
        Mount::Host { is_shared: true, .. } => guard::host_only(headers),
        Mount::Host { is_shared: false, .. } => {}
    }
    answer
}

async fn serve(
    gateway: &Gateway,
    tenant: String,
    destination: &Destination,
    trace: Trace,
    request: Request,
) -> Result<(Response, ServedRevision), ApiError> {
    let id = trace.trace_id;
    let call = Call::Http(for_guest(gateway, destination.mount, &trace, request)?);
    let function = destination.name.clone();
    let outcome = gateway.runtime.invoke(Invocation { id, tenant, function, call, deadline: None }).await?;
    let revision = ServedRevision(outcome.revision().as_str().to_owned());
    match outcome.output {
        Output::Response(response) => Ok((response.map(Body::new), revision)),
        _ => Err(ApiError::bad_request("missing_export", "not an HTTP function")),
    }
}

/// The tenant whose function is meant. Public functions answer callers without a token.
fn tenant(gateway: &Gateway, destination: &Destination, headers: &HeaderMap) -> Result<String, ApiError> {
    let speaks = match destination.tenant.as_deref() {
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
    let asked = destination.tenant.as_deref().unwrap_or_else(in_header);
    // Each revision with traffic must be: any of them may serve the call.
    let is_public = |f: &FunctionRecord| {
        let revision =
            |share: &tensor_wasm_exec::catalog::Share| f.revision(&share.revision).is_some_and(|r| r.settings.public);
        !f.traffic.is_empty() && f.traffic.iter().all(revision)
    };
    match gateway.runtime.catalog.resolve(asked, &destination.name) {
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
fn below(uri: &Uri, mount: Mount) -> Result<uri::PathAndQuery, ApiError> {
    let whole = uri.path_and_query().map_or("/", uri::PathAndQuery::as_str);
    let rest = match mount {
        // Names may have been sent percent-encoded, so the prefix is found by its slashes.
        Mount::Run => after_segments(whole, 2),
        Mount::Tenant => after_segments(whole, 3),
        Mount::Host { prefix_bytes, .. } => whole.get(prefix_bytes..).unwrap_or(""),
    };
    let text = if rest.starts_with('/') { rest.to_owned() } else { format!("/{rest}") };
    uri::PathAndQuery::from_maybe_shared(Bytes::from(text))
        .map_err(|e| ApiError::bad_request("invalid_args", format!("the path: {e}")))
}

fn after_segments(path: &str, segments: usize) -> &str {
    (0..segments).fold(path, |rest, _| {
        let after = rest.strip_prefix('/').unwrap_or(rest);
        after.find(['/', '?']).map_or("", |at| &after[at..])
    })
}

/// A URI with the scheme that we speak and the host that was asked for; without them if that is no authority.
fn full(host: &HeaderValue, path: uri::PathAndQuery) -> Uri {
    let Ok(authority) = uri::Authority::try_from(host.as_bytes()) else { return Uri::from(path) };
    let mut parts = uri::Parts::default();
    parts.scheme = Some(uri::Scheme::HTTP);
    parts.authority = Some(authority);
    parts.path_and_query = Some(path);
    Uri::from_parts(parts).unwrap_or_default()
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
    fn a_path_names_a_function_or_nothing() {
        let of = |path: &str| Destination::of_path(path).map(|d| (d.tenant.unwrap_or_default(), d.name));
        let named = |tenant: &str, name: &str| Some((tenant.to_owned(), name.to_owned()));
        for path in ["/run/hello", "/run/hello/", "/run/hello/a/b", "/run/h%65llo//"] {
            assert_eq!(of(path), named("", "hello"), "{path}");
        }
        assert_eq!(of("/t/acme/hello/a"), named("acme", "hello"));
        assert_eq!(of("/run/a%2Fb"), named("", "a/b"), "no name that a function can have");
        assert_eq!(of("/run/%ff"), named("", "\u{fffd}"), "nor this one");
        for nobody in ["/run", "/run/", "/run//x", "/t/acme", "/t/acme/", "/t//x", "/runs/x", "/functions"] {
            assert_eq!(of(nobody), None, "{nobody}");
        }
    }

    #[test]
    fn the_guest_sees_its_own_path() {
        let check = |uri: &str, mount: Mount, expect: &str| {
            let uri: Uri = uri.parse().unwrap();
            assert_eq!(below(&uri, mount).unwrap().to_string(), expect, "{uri}");
        };
        let run = Mount::Run;
        check("/run/hello", run, "/");
        check("/run/hello/", run, "/");
        check("/run/hello?x=1", run, "/?x=1");
        check("/run/hello/a/b?c=d%20e", run, "/a/b?c=d%20e");
        check("/run/h%65llo//a", run, "//a");
        check("http://h:1/run/hello/a", run, "/a");
        check("/t/acme/hello/a?b=/c", Mount::Tenant, "/a?b=/c");
        check("/t/acme/hello", Mount::Tenant, "/");
        let host = |prefix_bytes| Mount::Host { prefix_bytes, is_shared: true };
        check("/a/b?c", host(0), "/a/b?c");
        check("/shop?c", host(5), "/?c");
        check("/shop/x", host(5), "/x");
    }
}
