//! Why a command did not do what it was asked, as a line for people or, with `--json`, an object for programs:
//! `{"error":{"kind":"…","message":"…"}}` on stderr. The exit code is the same for both.

use std::process::ExitCode;

use serde_json::json;

use crate::output::printable;

pub(crate) enum Failed {
    /// The guest or this machine said no.
    No(String),
    /// Bad usage or input.
    Usage(String),
    /// A server said no, and what kind of no; or there is none.
    Server { kind: String, message: String },
}

impl Failed {
    /// Prints it and says which exit code it has.
    pub(crate) fn report(self, is_json: bool) -> ExitCode {
        let (kind, message, code) = match self {
            Failed::No(message) => ("failed".to_owned(), message, 1),
            Failed::Usage(message) => ("usage".to_owned(), message, 2),
            Failed::Server { kind, message } => (kind, message, 1),
        };
        if is_json {
            eprintln!("{}", json!({ "error": { "kind": kind, "message": message } }));
        } else {
            // A trap's message is the guest's to choose.
            eprintln!("error: {}", printable(&message));
        }
        ExitCode::from(code)
    }
}
