//! Actors that stay on a device: state and a handler, which a kernel that never ends runs for every message. Usable on
//! its own; it knows nothing of Wasm engines or HTTP.
//!
//! ```no_run
//! use std::time::Duration;
//! use tensor_wasm_ring::builtin::{Builtin, counter};
//! use tensor_wasm_ring::{Behaviour, ExecutorOptions, Runtime};
//!
//! let runtime = Runtime::builder().build()?;
//! let counters = runtime.launch("hits", Behaviour::Builtin(Builtin::Counter), &ExecutorOptions::default())?;
//! let value: counter::Value = counters.actor(0)?.call(&counter::Add(1), Duration::from_secs(1))?;
//! # Ok::<(), tensor_wasm_ring::ActorError>(())
//! ```
//!
//! A message goes through memory that the host and the device both see, and through nobody's code but theirs:
//!
//! ```text
//! Actor ─ runtime/ → mailbox ─ ring.rs, span.rs, layout.rs → lane ─ lane.rs → handler ─ behaviour.rs, builtin/
//!                                                              │
//! Port ← runtime/replies.rs  ←  ring of replies  ←─────────────┘
//! ```
//!
//! An *executor* is a resident kernel that runs the actors of one behaviour. A *lane* of it is a thread of a CPU
//! (`cpu.rs`) or a block of a GPU, and handles one message at a time; `backend.rs` is what differs between devices.

// Under the model checker only the rings are built, over its own atomics: `make model`.
#[doc(hidden)]
pub mod ring;
mod sync;

// The host's side.
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod runtime;

// What both sides agree on.
#[cfg(not(loom))]
mod clock;
#[cfg(not(loom))]
mod layout;
#[cfg(not(loom))]
mod message;
#[cfg(not(loom))]
mod span;
#[cfg(not(loom))]
mod wait;

// The device's side.
#[cfg(not(loom))]
mod backend;
#[cfg(not(loom))]
mod behaviour;
#[cfg(not(loom))]
pub mod builtin;
#[cfg(not(loom))]
mod cpu;
#[cfg(all(not(loom), feature = "cuda"))]
mod gpu;
#[cfg(not(loom))]
mod lane;

#[cfg(not(loom))]
pub use crate::exports::*;

#[cfg(not(loom))]
mod exports {
    pub use crate::behaviour::{Behaviour, OUTBOX_MAX};
    pub use crate::cpu::host_kernels;
    pub use crate::error::ActorError;
    pub use crate::layout::{
        ACTORS_MAX, Address, EXECUTORS_MAX, HEADER_BYTES, LANES_MAX, MESSAGE_BYTES, PAYLOAD_BYTES_MAX, SLOT_BYTES,
        SLOTS_MAX, SLOTS_MIN, STATE_BYTES_MAX, STATE_TOTAL_BYTES_MAX,
    };
    pub use crate::message::{
        ActorFault, ActorState, CONTROL, FAULT, Message, Payload, REFERENCE, REPLY, Reason, TrapKind, URGENT,
    };
    pub use crate::runtime::{
        Actor, ActorTelemetry, Builder, DEAD_LETTERS_MAX, Executor, ExecutorOptions, Pending, Port, REGION,
        RESTART_WINDOW, Runtime, SEND_MAX, UNREAD_MAX,
    };
}
