use std::process::ExitCode;

use crate::client::{Client, segment};
use crate::table::{ago, field, print, print_json, short};
use crate::{Ended, Global};

/// List a function's revisions, newest first.
#[derive(clap::Args)]
pub(crate) struct Revisions {
    /// The function's name or id.
    name: String,
}

impl Revisions {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let revisions = Client::new(global).get(&format!("/functions/{}/revisions", segment(&self.name)))?;
        if global.json {
            print_json(&revisions);
            return Ok(ExitCode::SUCCESS);
        }
        let row = |r: &serde_json::Value| {
            let traffic = format!("{:.0} %", r["traffic_percent"].as_f64().unwrap_or(0.0));
            let state = if r["quarantined"].is_null() { "good" } else { "quarantined" };
            let revision = short(&field(r, "revision"));
            vec![revision, traffic, field(r, "kind"), field(r, "bytes"), ago(&r["created_ms"]), state.to_owned()]
        };
        let rows: Vec<_> = revisions.as_array().into_iter().flatten().map(row).collect();
        print(&["REVISION", "TRAFFIC", "KIND", "BYTES", "DEPLOYED", "STATE"], &rows);
        Ok(ExitCode::SUCCESS)
    }
}
