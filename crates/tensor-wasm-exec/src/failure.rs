//! The three ways a request can fail, and no others.
//!
//! A [`Rejection`] is decided before any guest code runs: the caller's input or a limit. A [`Fault`] is the guest's: it
//! trapped, overran a budget or answered nonsense. A [`Bug`] is ours, and is reported for one request without taking
//! the process with it. Operands sit in the variants, so that a message can say what was asked, what was found and
//! what to do. Which HTTP status each becomes is not decided here but in `tensor-wasm-api/src/error.rs`.

use std::time::Duration;

use crate::invoke::Usage;

/// Why a request has no result.
#[derive(Debug)]
pub enum Failure {
    Rejected(Rejection),
    /// The guest ran and failed; what it used up to then is settled all the same.
    Faulted(Fault, Usage),
    Bug(Bug),
}

/// Refused before running.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Rejection {
    #[error("there is no {what} {name:?} for tenant {tenant:?}")]
    NotFound { what: &'static str, name: String, tenant: String },
    #[error("name {name:?} is not allowed: {why}")]
    InvalidName { name: String, why: String },
    #[error("this is not a WebAssembly module or component we can run: {why}")]
    InvalidWasm { why: String },
    #[error("this is not a model we can use, which is a safetensors file: {why}")]
    InvalidModel { why: String },
    #[error("{why}")]
    InvalidArgs { why: String },
    #[error("export {export:?} takes {expected} argument(s), {given} were given")]
    WrongArgCount { export: String, expected: usize, given: usize },
    #[error("there is no export {export:?}; this function has: {available}")]
    MissingExport { export: String, available: String },
    #[error("a {kind} function cannot be called this way: {instead}")]
    WrongKind { kind: &'static str, instead: String },
    #[error("the module has {bytes} bytes; the limit is {bytes_max} ([limits] module_bytes_max)")]
    ModuleTooLarge { bytes: usize, bytes_max: usize },
    #[error(
        "the module asks for {bytes} bytes of memory at start; the limit is {bytes_max} ([limits] memory_bytes_max, or \
         the function's own memory_bytes)"
    )]
    ModuleMemoryTooLarge { bytes: u64, bytes_max: u64 },
    #[error("the module cannot be instantiated within the limits: {why}")]
    ModuleOverLimits { why: String },
    #[error("compiling took longer than {limit_ms} ms ([limits] compile_ms_max), so the module was refused")]
    CompileTooLong { limit_ms: u64 },
    #[error("{what} has more than {bytes_max} bytes ({limit})")]
    TooLarge { what: &'static str, bytes_max: usize, limit: &'static str },
    #[error("tenant {tenant:?} exceeds its rate of {per_second} requests per second")]
    RateLimited { tenant: String, per_second: f64, retry_after: Duration },
    #[error(
        "tenant {tenant:?} has {running} calls running and {queued} waiting, which is its limit ([limits] \
         concurrency_max, queue_max); {why}"
    )]
    TenantBusy { tenant: String, running: usize, queued: usize, why: &'static str, retry_after: Duration },
    #[error("the server is full: {running} calls running, {queued} waiting; {why}")]
    ServerBusy { running: usize, queued: usize, why: &'static str, retry_after: Duration },
    #[error("tenant {tenant:?} is short of {shortage}")]
    TenantShort { tenant: String, shortage: Shortage, retry_after: Duration },
    #[error("the server is short of {shortage}")]
    ServerShort { shortage: Shortage, retry_after: Duration },
    #[error("the function is still being compiled; ask again in a moment")]
    StillCompiling { retry_after: Duration },
    #[error("tenant {tenant:?} has {queued} unfinished jobs, which is its limit ([limits] jobs_max)")]
    TooManyJobs { tenant: String, queued: usize, retry_after: Duration },
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("{why}")]
    Conflict { why: String },
    #[error("the data directory cannot take it: {why}; nothing was changed")]
    Storage { why: String },
    #[error("{name:?} revision {revision} is quarantined: {why}; deploy it again to bring it back")]
    Quarantined { name: String, revision: String, why: String },
    /// Said to callers, who may be strangers: the reason may name files and secrets.
    #[error(
        "function {name:?} cannot be run at present; its owner finds the reason with `tensor-wasm show {name}` (GET \
         /functions/{name}) and in the server's log"
    )]
    Unavailable { name: String },
}

/// Something that others hold at the moment: what, how much of it there is, the limit's name, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {max} is all there may be at once ({limit}); {instead}")]
pub struct Shortage {
    pub what: &'static str,
    /// With its unit.
    pub max: String,
    pub limit: &'static str,
    pub instead: &'static str,
}

/// The guest's doing. The instance it happened in is never used again.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Fault {
    #[error("the guest trapped: {message}")]
    Trap { message: String },
    #[error("the call ran past its deadline of {deadline_ms} ms and was stopped")]
    Deadline { deadline_ms: u64 },
    #[error("the guest left with exit code {code}, without a result")]
    Exit { code: i32 },
    #[error("the guest's HTTP response is unusable: {why}")]
    BadResponse { why: String },
    #[error("the guest wrote more than {bytes_max} bytes of output ([limits] output_bytes_max)")]
    OutputTooLarge { bytes_max: usize },
    #[error(
        "the guest handed the host more than {bytes_max} bytes in one call ([limits] hostcall_bytes_max; each value \
         of a result counts about 40); pass it in parts, or as octets (list<u8>, application/octet-stream)"
    )]
    HostcallTooLarge { bytes_max: usize },
}

/// Ours. The message is for the log; the caller learns only that it happened.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct Bug(pub String);

/// What is said of a [`Bug`] where its message would be read by others than the operator.
pub(crate) const OUR_BUG: &str = "stopped by an internal error of the server; it is not the function's fault";

impl From<Rejection> for Failure {
    fn from(rejection: Rejection) -> Self {
        Failure::Rejected(rejection)
    }
}

impl From<Bug> for Failure {
    fn from(bug: Bug) -> Self {
        Failure::Bug(bug)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Rejected(rejection) => rejection.fmt(f),
            Failure::Faulted(fault, _) => fault.fmt(f),
            Failure::Bug(bug) => bug.fmt(f),
        }
    }
}

impl Failure {
    /// A stable name for programs; the message is for people.
    pub fn kind(&self) -> &'static str {
        match self {
            Failure::Rejected(rejection) => rejection.kind(),
            Failure::Faulted(fault, _) => fault.kind(),
            Failure::Bug(_) => "internal",
        }
    }

    /// The message for whoever asked; a bug's own is for the log.
    pub(crate) fn told(&self) -> String {
        match self {
            Failure::Rejected(_) | Failure::Faulted(..) => self.to_string(),
            Failure::Bug(_) => OUR_BUG.to_owned(),
        }
    }
}

impl Fault {
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::Deadline { .. } => "invoke_timeout",
            Fault::BadResponse { .. } => "guest_bad_response",
            Fault::HostcallTooLarge { .. } => "hostcall_too_large",
            Fault::Trap { .. } | Fault::Exit { .. } | Fault::OutputTooLarge { .. } => "guest_trap",
        }
    }
}

impl Rejection {
    /// A stable name for programs.
    pub fn kind(&self) -> &'static str {
        match self {
            Rejection::NotFound { .. } => "not_found",
            Rejection::InvalidName { .. } => "invalid_name",
            Rejection::InvalidWasm { .. } | Rejection::ModuleOverLimits { .. } | Rejection::CompileTooLong { .. } => {
                "invalid_wasm"
            }
            Rejection::InvalidModel { .. } => "invalid_model",
            Rejection::InvalidArgs { .. } => "invalid_args",
            Rejection::WrongArgCount { expected, given, .. } if given > expected => "too_many_args",
            Rejection::WrongArgCount { .. } => "invalid_args",
            Rejection::MissingExport { .. } | Rejection::WrongKind { .. } => "missing_export",
            Rejection::ModuleTooLarge { .. } => "module_too_large",
            Rejection::ModuleMemoryTooLarge { .. } => "module_memory_too_large",
            Rejection::TooLarge { .. } => "body_too_large",
            Rejection::RateLimited { .. } => "rate_limited",
            Rejection::TenantBusy { .. } | Rejection::TenantShort { .. } | Rejection::TooManyJobs { .. } => {
                "tenant_capacity_exhausted"
            }
            Rejection::ServerBusy { .. }
            | Rejection::ServerShort { .. }
            | Rejection::StillCompiling { .. }
            | Rejection::ShuttingDown
            | Rejection::Storage { .. }
            | Rejection::Unavailable { .. } => "capacity_exhausted",
            Rejection::Conflict { .. } | Rejection::Quarantined { .. } => "conflict",
        }
    }

    /// How long a polite caller waits before it asks again; `None` where asking again cannot help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Rejection::RateLimited { retry_after, .. }
            | Rejection::TenantBusy { retry_after, .. }
            | Rejection::ServerBusy { retry_after, .. }
            | Rejection::TenantShort { retry_after, .. }
            | Rejection::ServerShort { retry_after, .. }
            | Rejection::StillCompiling { retry_after }
            | Rejection::TooManyJobs { retry_after, .. } => Some(*retry_after),
            Rejection::ShuttingDown | Rejection::Storage { .. } => Some(Duration::from_secs(5)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bugs_message_is_for_the_log_only() {
        let bug = Failure::Bug(Bug("/var/lib/data: a lock was poisoned".to_owned()));
        assert_eq!((bug.kind(), bug.told().as_str()), ("internal", OUR_BUG));
        let fault = Failure::Faulted(Fault::Exit { code: 3 }, Usage::default());
        assert_eq!(fault.told(), fault.to_string());
    }
}
