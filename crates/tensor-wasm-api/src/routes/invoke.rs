//! Calling a function and waiting for what it returns.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tensor_wasm_exec::{Call, Failure, Fault, Invocation, Outcome, Output, Usage};
use utoipa::ToSchema;

use crate::body;
use crate::error::ApiError;
use crate::extract::{Path, Query, whole_if_any};
use crate::gateway::{INVOKE_EVENT, ServedRevision, Shared, audited};
use crate::trace::Trace;

pub(crate) const OCTETS: &str = "application/octet-stream";

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct InvokeRequest {
    /// The export to call; may be left out where there is only one. A command has none.
    pub export: Option<String>,
    /// Arguments in order, or by parameter name for components; for commands, the command line.
    pub args: Value,
    /// Standard input of a command.
    pub stdin: String,
    /// A tighter deadline than the function's own.
    #[serde(deserialize_with = "whole_if_any")]
    pub deadline_ms: Option<u64>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InvokeResponse {
    pub function_id: String,
    pub revision: String,
    /// What the function is, as in its description. The result of a command is its output and its exit code.
    pub kind: &'static str,
    pub result: Value,
    /// The export returned the error case of its `result`: `{"err": …}` is an error and not a record of that field.
    pub is_err: bool,
    pub usage: UsageView,
}

/// What the call cost.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct UsageView {
    pub cpu_us: u64,
    /// Time of the GPU, or of the CPU in its place: kernels and copies that it launched, tensors that it computed.
    pub gpu_us: u64,
    pub wall_us: u64,
    pub queue_us: u64,
    pub memory_peak_bytes: u64,
}

impl From<Usage> for UsageView {
    fn from(usage: Usage) -> UsageView {
        let Usage { cpu_us, gpu_us, wall_us, queue_us, memory_peak_bytes } = usage;
        UsageView { cpu_us, gpu_us, wall_us, queue_us, memory_peak_bytes }
    }
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct InvokeQuery {
    export: Option<String>,
}

/// Calls an export or a command. With an `application/octet-stream` body, bytes in and bytes out.
#[utoipa::path(post, path = "/functions/{f}/invoke", params(("f" = String, Path, description = "name or id"),
        ("export" = Option<String>, Query, description = "with an application/octet-stream body")),
    request_body = InvokeRequest,
    responses((status = 200, body = InvokeResponse), (status = 400), (status = 404), (status = 422), (status = 429),
              (status = 503), (status = 504)))]
pub(crate) async fn invoke(
    State(gateway): State<Shared>,
    Path(f): Path<String>,
    Query(query): Query<InvokeQuery>,
    Extension(trace): Extension<Trace>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let tenant = match gateway.tokens.tenant(&headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let result = async {
        // Known before the body is read: a flood of calls to nothing costs little.
        gateway.runtime.catalog.resolve(&tenant, &f)?;
        let body = body::read_call(&gateway, &tenant, body).await?;
        let is_bytes = headers.get(header::CONTENT_TYPE).is_some_and(|v| v.as_bytes().starts_with(OCTETS.as_bytes()));
        let (call, deadline_ms) = if is_bytes {
            (Call::Bytes { export: query.export, body: body.bytes.clone() }, None)
        } else {
            let request: InvokeRequest = parse_json(&body.bytes)?;
            let InvokeRequest { export, args, stdin, deadline_ms } = request;
            (Call::Export { export: export.or(query.export), args, stdin: Bytes::from(stdin) }, deadline_ms)
        };
        let invocation = Invocation {
            id: trace.trace_id,
            tenant: tenant.clone(),
            function: f.clone(),
            call,
            deadline: deadline_ms.map(Duration::from_millis),
        };
        let outcome = gateway.runtime.invoke(invocation).await?;
        let revision = ServedRevision(outcome.revision().as_str().to_owned());
        let mut response = answer(outcome, gateway.runtime.config.limits_of(&tenant).output_bytes_max)?;
        response.extensions_mut().insert(revision);
        Ok(response)
    };
    audited(INVOKE_EVENT, &tenant, &f, result.await)
}

fn answer(outcome: Outcome, output_bytes_max: usize) -> Result<Response, ApiError> {
    let usage = outcome.usage;
    let too_large = || Failure::Faulted(Fault::OutputTooLarge { bytes_max: output_bytes_max }, usage);
    match outcome.output {
        Output::Value(_) => {
            let json = serde_json::to_vec(&done(outcome));
            let json = json.map_err(|e| ApiError::from(Failure::Bug(tensor_wasm_exec::Bug(e.to_string()))))?;
            if json.len() > output_bytes_max {
                return Err(too_large().into());
            }
            Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], json).into_response())
        }
        Output::Bytes(bytes) if bytes.len() > output_bytes_max => Err(too_large().into()),
        Output::Bytes(bytes) => Ok(([(header::CONTENT_TYPE, HeaderValue::from_static(OCTETS))], bytes).into_response()),
        Output::Response(response) => Ok((*response).map(Body::new)),
    }
}

/// Reads a JSON body; none at all stands for an empty object.
pub(crate) fn parse_json<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = if bytes.iter().all(u8::is_ascii_whitespace) { b"{}" } else { bytes };
    serde_json::from_slice(bytes).map_err(|e| ApiError::bad_request("invalid_json", format!("the request body: {e}")))
}

/// What a call amounted to, for routes that end with a result. What was bytes is said elsewhere.
pub(crate) fn done(outcome: Outcome) -> InvokeResponse {
    let (function_id, revision) = (outcome.function_id().to_owned(), outcome.revision().as_str().to_owned());
    let kind = outcome.kind();
    let Outcome { output, is_err, usage, .. } = outcome;
    let result = match output {
        Output::Value(value) => value,
        Output::Bytes(_) | Output::Response(_) => Value::Null,
    };
    InvokeResponse { function_id, revision, kind, result, is_err, usage: usage.into() }
}
