#![expect(clippy::print_stdout, reason = "what changed is the command's result")]

use std::process::ExitCode;

use crate::client::{Client, segment};
use crate::{Ended, Global};

/// Delete a function with all its revisions.
#[derive(clap::Args)]
pub(crate) struct Delete {
    name: String,
}

impl Delete {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        Client::new(global).delete(&format!("/functions/{}", segment(&self.name)))?;
        match global.json {
            true => println!("{{\"deleted\":true}}"),
            false => println!("deleted {}", self.name),
        }
        Ok(ExitCode::SUCCESS)
    }
}
