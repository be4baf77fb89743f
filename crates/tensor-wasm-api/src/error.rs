//! The one place that decides which HTTP status a failure becomes. Kinds are stable names for programs, messages are
//! for people: `{"error":{"kind":"…","message":"…"}}`.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::json;
use tensor_wasm_exec::{Failure, Fault, Rejection};

/// An answer that is not the one the caller hoped for.
#[derive(Debug)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub message: String,
    pub retry_after_s: Option<u64>,
    /// What broke, where it is a fault of ours: for the operator, not for the caller.
    bug: Option<String>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, kind, message: message.into(), retry_after_s: None, bug: None }
    }

    pub(crate) fn bad_request(kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, kind, message)
    }

    /// The body of the answer, also used inside event streams.
    pub(crate) fn body(&self) -> serde_json::Value {
        json!({ "error": { "kind": self.kind, "message": self.message } })
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> ApiError {
        let (kind, message) = (failure.kind(), failure.to_string());
        match failure {
            Failure::Rejected(rejection) => rejection.into(),
            Failure::Faulted(fault, _) => ApiError::new(fault_status(&fault), kind, message),
            Failure::Bug(bug) => {
                let message = "an internal error; the server's log has the details under this trace id";
                let error = ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, kind, message);
                ApiError { bug: Some(bug.to_string()), ..error }
            }
        }
    }
}

impl From<Rejection> for ApiError {
    fn from(rejection: Rejection) -> ApiError {
        ApiError {
            status: rejection_status(&rejection),
            kind: rejection.kind(),
            message: rejection.to_string(),
            // Rounded up: asking a moment too early earns the same answer again.
            retry_after_s: rejection.retry_after().map(|after| after.as_millis().div_ceil(1000).clamp(1, 3600) as u64),
            bug: None,
        }
    }
}

fn rejection_status(rejection: &Rejection) -> StatusCode {
    match rejection {
        Rejection::InvalidName { .. }
        | Rejection::InvalidWasm { .. }
        | Rejection::ModuleOverLimits { .. }
        | Rejection::CompileTooLong { .. }
        | Rejection::InvalidModel { .. }
        | Rejection::InvalidArgs { .. }
        | Rejection::WrongArgCount { .. }
        | Rejection::MissingExport { .. }
        | Rejection::WrongKind { .. } => StatusCode::BAD_REQUEST,
        Rejection::NotFound { .. } => StatusCode::NOT_FOUND,
        Rejection::Conflict { .. } | Rejection::Quarantined { .. } => StatusCode::CONFLICT,
        Rejection::ModuleTooLarge { .. } | Rejection::ModuleMemoryTooLarge { .. } | Rejection::TooLarge { .. } => {
            StatusCode::PAYLOAD_TOO_LARGE
        }
        Rejection::RateLimited { .. }
        | Rejection::TenantBusy { .. }
        | Rejection::TenantShort { .. }
        | Rejection::TooManyJobs { .. } => StatusCode::TOO_MANY_REQUESTS,
        Rejection::ServerBusy { .. }
        | Rejection::ServerShort { .. }
        | Rejection::StillCompiling { .. }
        | Rejection::ShuttingDown
        | Rejection::Storage { .. }
        | Rejection::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
    }
}

fn fault_status(fault: &Fault) -> StatusCode {
    match fault {
        Fault::Deadline { .. } => StatusCode::GATEWAY_TIMEOUT,
        Fault::BadResponse { .. } => StatusCode::BAD_GATEWAY,
        Fault::Trap { .. } | Fault::Exit { .. } | Fault::OutputTooLarge { .. } | Fault::HostcallTooLarge { .. } => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response.extensions_mut().insert(ErrorKind(self.kind));
        if let Some(bug) = self.bug {
            response.extensions_mut().insert(OurFault(bug));
        }
        response
    }
}

/// A task of ours that ended without an answer.
pub(crate) fn internal(error: tokio::task::JoinError) -> ApiError {
    Failure::Bug(tensor_wasm_exec::Bug(error.to_string())).into()
}

/// Rides along with an error response so that the audit log can name it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ErrorKind(pub &'static str);

/// Rides along with the answer to a request that we failed, so that the log names it with the trace's id.
#[derive(Debug, Clone)]
pub(crate) struct OurFault(pub String);
