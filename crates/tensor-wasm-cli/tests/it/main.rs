//! The integration tests: the real binary, the real server, real sockets and files. One test binary for the whole
//! system; each module below is a capability.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests fail by panicking")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "statistics of small samples"
)]
#![allow(unreachable_pub, reason = "helpers are shared between the modules of one binary")]
#![allow(clippy::cast_possible_wrap, reason = "process ids")]
#![allow(clippy::disallowed_methods, reason = "a test may wait for a moment that it then measures")]

mod address;
mod admission;
mod built;
mod client;
mod deploy;
mod device;
mod durability;
#[path = "../../../tensor-wasm-tensor/examples/support/mod.rs"]
mod examples;
mod gpu;
mod hostile;
mod http;
mod inference;
mod invoke;
mod jobs;
mod kernel;
mod lifetime;
mod models;
mod readme;
mod run;
mod secrets;
mod shutdown;
mod support;
mod telemetry;
mod tensor;
mod tensors;
