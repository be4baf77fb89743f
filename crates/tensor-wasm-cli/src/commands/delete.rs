use std::process::ExitCode;

use crate::client::{Client, segment};
use crate::output::outln;
use crate::{Ended, Global};

/// Delete a function with all its revisions.
#[derive(clap::Args)]
pub(crate) struct Delete {
    /// The function's name or id.
    name: String,
}

impl Delete {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        Client::new(global).delete(&format!("/functions/{}", segment(&self.name)))?;
        if global.json {
            outln!("{{\"deleted\":true}}");
        } else {
            outln!("deleted {}", self.name);
        }
        Ok(ExitCode::SUCCESS)
    }
}
