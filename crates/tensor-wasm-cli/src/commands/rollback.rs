use std::process::ExitCode;

use serde_json::json;
use ureq::http::Method;

use crate::client::{Client, segment};
use crate::output::outln;
use crate::table::{field, print_json, short};
use crate::{Ended, Global};

/// Give all traffic back to an earlier revision.
#[derive(clap::Args)]
pub(crate) struct Rollback {
    /// The function's name or id.
    name: String,
    /// The revision, or the beginning of it; without one, the revision before the current.
    revision: Option<String>,
}

impl Rollback {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let path = format!("/functions/{}/rollback", segment(&self.name));
        let function =
            Client::new(global).with_json(Method::POST, &path, &[], &json!({ "revision": self.revision }))?;
        if global.json {
            print_json(&function);
        } else {
            outln!("{} is at revision {}", field(&function, "name"), short(&field(&function, "revision")));
        }
        Ok(ExitCode::SUCCESS)
    }
}
