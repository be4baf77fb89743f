#![expect(clippy::print_stdout, reason = "the log goes to stdout")]

use std::process::ExitCode;

use crate::client::{Client, segment};
use crate::table::{ago, field, print_json, short};
use crate::{Ended, Global};

/// Show what a function's recent calls wrote to stdout and stderr.
#[derive(clap::Args)]
pub(crate) struct Logs {
    name: String,
    /// How many calls to show.
    #[arg(long, default_value_t = 20)]
    limit: usize,
}

impl Logs {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let path = format!("/functions/{}/logs?limit={}", segment(&self.name), self.limit);
        let answer = Client::new(global).get(&path)?;
        if global.json {
            print_json(&answer);
            return Ok(ExitCode::SUCCESS);
        }
        for entry in answer["logs"].as_array().into_iter().flatten() {
            println!(
                "--- {}, trace {}, revision {}",
                ago(&entry["at_ms"]),
                field(entry, "trace_id"),
                short(&field(entry, "revision"))
            );
            for stream in ["stdout", "stderr"] {
                for line in entry[stream].as_str().unwrap_or_default().lines() {
                    println!("{stream}: {line}");
                }
            }
            if let Some(dropped) = entry["dropped_bytes"].as_u64().filter(|n| *n > 0) {
                println!("({dropped} bytes more were not kept)");
            }
            if let Some(fault) = entry["fault"].as_str() {
                println!("fault: {fault}");
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
