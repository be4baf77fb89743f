use std::process::ExitCode;

use crate::client::{Client, segment};
use crate::table::{ago, field, print, print_json};
use crate::{Ended, Global};

/// List jobs, newest first; or show or cancel one.
#[derive(clap::Args)]
pub(crate) struct Jobs {
    /// How many to list.
    #[arg(long, default_value_t = 20, value_name = "N")]
    limit: usize,
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Show one job with its result.
    Show {
        /// As `invoke --async` printed it.
        id: String,
    },
    /// Stop a job that has not finished.
    Cancel {
        /// As `invoke --async` printed it.
        id: String,
    },
}

impl Jobs {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let client = Client::new(global);
        match self.action {
            Some(Action::Show { id }) => print_json(&client.get(&format!("/jobs/{}", segment(&id)))?),
            Some(Action::Cancel { id }) => print_json(&client.delete(&format!("/jobs/{}", segment(&id)))?),
            None => {
                let answer = client.get(&format!("/jobs?limit={}", self.limit))?;
                if global.json {
                    print_json(&answer);
                    return Ok(ExitCode::SUCCESS);
                }
                let row = |job: &serde_json::Value| {
                    let count = |name: &str| job[name].as_u64().unwrap_or(0);
                    let own = count("attempts").saturating_sub(count("interrupted"));
                    let attempts = format!("{own} of {}", count("attempts_max"));
                    let outcome = match &job["error"]["message"] {
                        serde_json::Value::String(message) => message.clone(),
                        _ => field(job, "result"),
                    };
                    let outcome: String = outcome.chars().take(60).collect();
                    vec![
                        field(job, "id"),
                        field(job, "function"),
                        field(job, "state"),
                        attempts,
                        ago(&job["created_ms"]),
                        outcome,
                    ]
                };
                let rows: Vec<_> = answer["jobs"].as_array().into_iter().flatten().map(row).collect();
                print(&["JOB", "FUNCTION", "STATE", "ATTEMPTS", "CREATED", "OUTCOME"], &rows);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
