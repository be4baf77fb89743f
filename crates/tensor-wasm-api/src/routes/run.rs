//! The HTTP endpoint of a `wasi:http` function: the request handed over, the response handed back, bodies streamed.

use axum::body::Body;
use axum::extract::{Extension, Path, Request, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, Uri, header, uri};
use tensor_wasm_exec::catalog::FunctionRecord;
use tensor_wasm_exec::{Call, Invocation, Output};

use crate::auth::{DEFAULT_TENANT, TENANT_HEADER};
use crate::body;
use crate::error::ApiError;
use crate::gateway::{Gateway, Shared, audited};
use crate::trace::{TRACEPARENT, Trace};

/// Hands a request to the function; the guest sees the path below its name.
#[utoipa::path(get, path = "/run/{name}/{path}", params(("name" = String, Path,), ("path" = String, Path,)),
    responses((status = 200, description = "whatever the function answers"), (status = 404), (status = 502), (status = 504)))]
pub(crate) async fn path(
    State(gateway): State<Shared>,
    Path((name, _)): Path<(String, String)>,
    Extension(trace): Extension<Trace>,
    request: Request,
) -> Response {
    run(&gateway, &name, trace, request).await
}

pub(crate) async fn root(
    State(gateway): State<Shared>,
    Path(name): Path<String>,
    Extension(trace): Extension<Trace>,
    request: Request,
) -> Response {
    run(&gateway, &name, trace, request).await
}

async fn run(gateway: &Shared, name: &str, trace: Trace, request: Request) -> Response {
    let tenant = match tenant(gateway, name, &request) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let result = async {
        let call = Call::Http(for_guest(gateway, trace, request)?);
        let function = name.to_owned();
        let invocation = Invocation { id: trace.trace_id, tenant: tenant.clone(), function, call, deadline: None };
        match gateway.runtime.invoke(invocation).await?.output {
            Output::Response(response) => Ok((*response).map(Body::new)),
            Output::Value(_) | Output::Bytes(_) => Err(ApiError::bad_request("missing_export", "not an HTTP function")),
        }
    };
    audited("function.run", &tenant, name, result.await)
}

/// The tenant whose function is meant. Public functions answer callers without a token.
fn tenant(gateway: &Gateway, name: &str, request: &Request) -> Result<String, ApiError> {
    let refused = match gateway.tokens.tenant(request.headers()) {
        Ok(tenant) => return Ok(tenant),
        Err(error) => error,
    };
    let asked = request.headers().get(TENANT_HEADER).and_then(|v| v.to_str().ok()).unwrap_or(DEFAULT_TENANT);
    // Each revision with traffic must be: any of them may serve the call.
    let is_public = |f: &FunctionRecord| {
        let revision =
            |share: &tensor_wasm_exec::catalog::Share| f.revision(&share.revision).is_some_and(|r| r.settings.public);
        !f.traffic.is_empty() && f.traffic.iter().all(revision)
    };
    match gateway.runtime.catalog.resolve(asked, name) {
        Ok(function) if is_public(&function) => Ok(asked.to_owned()),
        _ => Err(refused),
    }
}

/// The request as the guest sees it: its own path, a full URI, and none of our credentials.
fn for_guest(
    gateway: &Gateway,
    trace: Trace,
    request: Request,
) -> Result<tensor_wasm_exec::guest::http::Request, ApiError> {
    let (mut parts, body) = request.into_parts();
    if gateway.tokens.carries_token(&parts.headers) {
        parts.headers.remove(header::AUTHORIZATION);
    }
    parts.headers.insert(TRACEPARENT, trace.traceparent());
    if !parts.headers.contains_key(header::HOST) {
        // HTTP/2 has it in the URI, HTTP/1.0 nowhere; a guest expects it here.
        let host = parts.uri.authority().map_or("localhost", |a| a.as_str());
        let host = HeaderValue::from_str(host).map_err(|e| ApiError::bad_request("invalid_args", e.to_string()))?;
        parts.headers.insert(header::HOST, host);
    }
    parts.uri = below(&parts.uri)?;
    parts.extensions = http::Extensions::new();
    Ok(http::Request::from_parts(parts, body::for_guest(body, gateway.body_idle())))
}

/// `/run/NAME/a/b?c` → `/a/b?c`.
fn below(uri: &Uri) -> Result<Uri, ApiError> {
    let whole = uri.path_and_query().map_or("/", uri::PathAndQuery::as_str);
    // The name may have been sent percent-encoded, so the prefix is found by its slashes.
    let after_run = whole.get("/run/".len()..).unwrap_or("");
    let rest = after_run.find(['/', '?']).map_or("", |at| &after_run[at..]);
    let text = if rest.starts_with('/') { rest.to_owned() } else { format!("/{rest}") };
    text.parse().map_err(|e| ApiError::bad_request("invalid_args", format!("the path: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_sees_its_own_path() {
        let check = |uri: &str, expect: &str| {
            let uri: Uri = uri.parse().unwrap();
            assert_eq!(below(&uri).unwrap().to_string(), expect, "{uri}");
        };
        check("/run/hello", "/");
        check("/run/hello/", "/");
        check("/run/hello?x=1", "/?x=1");
        check("/run/hello/a/b?c=d%20e", "/a/b?c=d%20e");
        check("/run/h%65llo//a", "//a");
        check("http://h:1/run/hello/a", "/a");
    }
}
