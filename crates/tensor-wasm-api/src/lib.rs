//! The HTTP gateway. A request passes through these files in this order:
//!
//! 1. `server.rs` accepts the connection and gives it to a serving thread;
//! 2. `hosts.rs` tells by its host whether it is for the API or for a function;
//! 3. `gateway.rs` opens its trace, routes it, and afterwards counts and audits it;
//! 4. `guard.rs` refuses hosts, pages and bodies that have no business with the API;
//! 5. `auth.rs` decides which tenant it speaks for;
//! 6. `routes/` turns it into a call of the runtime (`tensor-wasm-exec`) and the result into a response;
//! 7. `error.rs` decides the status of everything that failed.
//!
//! No rule about functions, tenants or limits lives here; those are the runtime's.

mod audit;
mod auth;
mod body;
mod error;
mod extract;
mod gateway;
mod guard;
mod hosts;
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
