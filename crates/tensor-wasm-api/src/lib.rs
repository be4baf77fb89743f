//! The HTTP gateway. A request passes through these files in this order:
//!
//! 1. `server.rs` accepts the connection and gives it to a serving thread;
//! 2. `gateway.rs` opens its trace, routes it, and afterwards counts and audits it;
//! 3. `auth.rs` decides which tenant it speaks for;
//! 4. `routes/` turns it into a call of the runtime (`tensor-wasm-exec`) and the result into a response;
//! 5. `error.rs` decides the status of everything that failed.
//!
//! No rule about functions, tenants or limits lives here; those are the runtime's.

mod audit;
mod auth;
mod body;
mod error;
mod gateway;
mod linger;
mod metrics;
mod openapi;
mod routes;
mod server;
mod trace;
mod upload;

pub use audit::Target as AuditTarget;
pub use auth::{DEFAULT_TENANT, TENANT_HEADER, Tokens};
pub use error::ApiError;
pub use server::{ServeError, Server, ServerOptions};
pub use trace::Telemetry;
