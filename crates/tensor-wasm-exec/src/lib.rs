//! The TensorWasm runtime: everything between "this tenant wants to call this function" and "here is what it returned
//! and what it cost". It knows nothing of HTTP routes, status codes or command lines; those are `tensor-wasm-api` and
//! `tensor-wasm-cli`.
//!
//! One request is one straight path, and the modules below are listed in the order it meets them:
//!
//! ```text
//! Invocation → Permit → Lease → Outcome          (invoke.rs holds the path itself)
//! ```
//!
//! Everything that can go wrong on it is one of three things (`failure.rs`): a [`Rejection`] (refused before running),
//! a [`Fault`] (the guest's own doing) or a [`Bug`] (ours).

pub mod invoke;

pub mod admission;
pub mod catalog;
pub mod engine;
pub mod guest;
pub mod models;

pub mod jobs;
pub mod local;
pub mod logs;

pub mod config;
pub mod failure;
mod function_metrics;
pub mod metrics;
pub mod runtime;

/// Maps on the path of every call, keyed by short strings: seeded at random per process, quicker than the default.
pub(crate) type HashMap<K, V> = std::collections::HashMap<K, V, foldhash::quality::RandomState>;

pub use config::Config;
pub use failure::{Bug, Failure, Fault, Rejection};
pub use invoke::{Call, Invocation, Outcome, Output, Usage};
pub use runtime::Runtime;
