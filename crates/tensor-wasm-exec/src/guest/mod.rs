//! Guests: what runs inside an instance and everything it is given.
//!
//! `running.rs` is the call a guest runs for, `state.rs` what its store holds, `budget.rs` the memory it may take,
//! `hostcall.rs` what it may hand the host at once, `stdio.rs` where its output goes, `value.rs` the JSON its exports
//! are called with. The siblings `core.rs`, `component.rs`, `command.rs` and `http.rs` each call one kind of guest,
//! `supervise.rs` drives any of them under a deadline, `gpu/` is what they may ask of the device, `tensor/` tensors.
//! Nothing here knows tenants' queues or routes.

pub(crate) mod budget;
pub(crate) mod command;
pub(crate) mod component;
pub(crate) mod core;
pub(crate) mod gpu;
pub(crate) mod hostcall;
pub mod http;
pub(crate) mod running;
pub mod signature;
pub(crate) mod state;
pub(crate) mod stdio;
pub(crate) mod supervise;
pub(crate) mod tensor;
pub mod value;

use crate::failure::{Bug, Failure, Fault, Rejection};
use crate::invoke::Usage;

/// Why a guest call has no result, before usage is added to it.
#[derive(Debug, Clone)]
pub(crate) enum GuestError {
    Rejected(Rejection),
    Faulted(Fault),
    Bug(Bug),
}

impl GuestError {
    pub(crate) fn into_failure(self, usage: Usage) -> Failure {
        match self {
            GuestError::Rejected(rejection) => rejection.into(),
            GuestError::Faulted(fault) => Failure::Faulted(fault, usage),
            GuestError::Bug(bug) => bug.into(),
        }
    }
}

impl From<Bug> for GuestError {
    fn from(bug: Bug) -> Self {
        GuestError::Bug(bug)
    }
}

impl From<Rejection> for GuestError {
    fn from(rejection: Rejection) -> Self {
        GuestError::Rejected(rejection)
    }
}

impl From<Fault> for GuestError {
    fn from(fault: Fault) -> Self {
        GuestError::Faulted(fault)
    }
}

/// Turns what Wasmtime reports of a call into what it was: the guest's fault, or a bug of ours or of Wasmtime's.
pub(crate) fn guest_error(error: &wasmtime::Error, hostcall_bytes_max: usize) -> GuestError {
    if let Some(exit) = error.downcast_ref::<wasmtime_wasi::I32Exit>() {
        return Fault::Exit { code: exit.0 }.into();
    }
    if let Some(own) = error.downcast_ref::<Fault>() {
        return own.clone().into();
    }
    if let Some(bug) = error.downcast_ref::<Bug>() {
        return bug.clone().into();
    }
    if let Some(bug) = error.downcast_ref::<wasmtime::WasmtimeBug>() {
        return Bug(bug.to_string()).into();
    }
    if !error.is::<wasmtime::Trap>() && hostcall::is_exhausted(error) {
        return Fault::HostcallTooLarge { bytes_max: hostcall_bytes_max }.into();
    }
    let cause = error.root_cause().to_string();
    let message = match error.downcast_ref::<wasmtime::WasmBacktrace>() {
        Some(trace) if !trace.frames().is_empty() => format!("{cause} (in {})", where_it_was(trace)),
        _ => cause,
    };
    Fault::Trap { message }.into()
}

/// Whether an instantiation failed in code of the guest's own that ran meanwhile, and not for want of something.
pub(crate) fn failed_in_guest(error: &wasmtime::Error) -> bool {
    error.is::<wasmtime::Trap>()
        || error.is::<wasmtime::WasmBacktrace>()
        || error.is::<Fault>()
        || error.is::<wasmtime_wasi::I32Exit>()
        || error.is::<Bug>()
        || error.is::<wasmtime::WasmtimeBug>()
}

/// The innermost frames, as a person would say them.
fn where_it_was(trace: &wasmtime::WasmBacktrace) -> String {
    const FRAMES: usize = 4;
    // A guest's names may be books, and what they are printed to is kept in logs.
    const NAME_BYTES_MAX: usize = 512;
    let name = |frame: &wasmtime::FrameInfo| match frame.func_name() {
        Some(name) if name.len() > NAME_BYTES_MAX => name.chars().take(64).chain(['…']).collect(),
        // The hash that mangled names end with means nothing to a reader.
        Some(name) => format!("{:#}", rustc_demangle::demangle(name)),
        None => format!("function {}", frame.func_index()),
    };
    trace.frames().iter().take(FRAMES).map(name).collect::<Vec<_>>().join(" < ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_went_wrong_is_told_by_type() {
        let of = |error: wasmtime::Error| guest_error(&error, 7);
        let bug = of(wasmtime::Error::new(Bug("a lock was poisoned".to_owned())).context("in a host function"));
        assert!(matches!(&bug, GuestError::Bug(Bug(why)) if why == "a lock was poisoned"), "{bug:?}");
        assert!(matches!(bug.into_failure(Usage::default()), Failure::Bug(_)));
        let fault = of(Fault::OutputTooLarge { bytes_max: 1 }.into());
        assert!(matches!(fault, GuestError::Faulted(Fault::OutputTooLarge { bytes_max: 1 })), "{fault:?}");
        let trap = of(wasmtime::Trap::StackOverflow.into());
        assert!(matches!(trap, GuestError::Faulted(Fault::Trap { .. })), "{trap:?}");
        // A text that says the same as ours, without being ours.
        let forged = of(wasmtime::Error::msg("a lock was poisoned"));
        assert!(matches!(forged, GuestError::Faulted(Fault::Trap { .. })), "{forged:?}");
    }
}
