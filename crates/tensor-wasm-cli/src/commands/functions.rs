use std::process::ExitCode;

use crate::client::Client;
use crate::table::{ago, field, print, print_json, short};
use crate::{Ended, Global};

/// List the functions of the tenant.
#[derive(clap::Args)]
pub(crate) struct Functions {}

impl Functions {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let functions = Client::new(global).get("/functions")?;
        if global.json {
            print_json(&functions);
            return Ok(ExitCode::SUCCESS);
        }
        let row = |f: &serde_json::Value| {
            // An address by host name, where the server has one for it; else its path on the server.
            let address = if f["address"].is_null() { "url" } else { "address" };
            vec![
                field(f, "name"),
                field(f, "kind"),
                short(&field(f, "revision")),
                ago(&f["created_ms"]),
                field(f, address),
            ]
        };
        let rows: Vec<_> = functions.as_array().into_iter().flatten().map(row).collect();
        print(&["NAME", "KIND", "REVISION", "CREATED", "ADDRESS"], &rows);
        Ok(ExitCode::SUCCESS)
    }
}
