//! Guests: what runs inside an instance and everything it is given.
//!
//! `running.rs` is the call a guest runs for, `state.rs` what its store holds, `budget.rs` the memory it may take,
//! `stdio.rs` where its output goes, `value.rs` the JSON its exports are called with. The siblings `core.rs`, `component.rs`, `command.rs` and `http.rs` each call one
//! kind of guest, `supervise.rs` drives any of them under a deadline, and `gpu/` is what they may ask of the device. Nothing here knows tenants' queues or routes.

pub(crate) mod budget;
pub(crate) mod command;
pub(crate) mod component;
pub(crate) mod core;
pub(crate) mod gpu;
pub mod http;
pub(crate) mod running;
pub mod signature;
pub(crate) mod state;
pub(crate) mod stdio;
pub(crate) mod supervise;
pub mod value;

use crate::failure::{Fault, Rejection};

/// Why a guest call has no result, before usage is added to it.
#[derive(Debug)]
pub(crate) enum GuestError {
    Rejected(Rejection),
    Faulted(Fault),
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

/// Turns what Wasmtime reports of a call into the guest's fault.
pub(crate) fn fault(error: &wasmtime::Error) -> Fault {
    if let Some(exit) = error.downcast_ref::<wasmtime_wasi::I32Exit>() {
        return Fault::Exit { code: exit.0 };
    }
    if let Some(own) = error.downcast_ref::<Fault>() {
        return own.clone();
    }
    let cause = error.root_cause().to_string();
    let message = match error.downcast_ref::<wasmtime::WasmBacktrace>() {
        Some(trace) if !trace.frames().is_empty() => format!("{cause} (in {})", where_it_was(trace)),
        _ => cause,
    };
    Fault::Trap { message }
}

/// The innermost frames, as a person would say them.
fn where_it_was(trace: &wasmtime::WasmBacktrace) -> String {
    const FRAMES: usize = 4;
    let name = |frame: &wasmtime::FrameInfo| match frame.func_name() {
        // The hash that mangled names end with means nothing to a reader.
        Some(name) => format!("{:#}", rustc_demangle::demangle(name)),
        None => format!("function {}", frame.func_index()),
    };
    trace.frames().iter().take(FRAMES).map(name).collect::<Vec<_>>().join(" < ")
}
