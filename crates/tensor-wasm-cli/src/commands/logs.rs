use std::process::ExitCode;

use serde_json::Value;

use crate::client::{Client, segment};
use crate::output::{outln, printable};
use crate::table::{ago, field, print_json, short};
use crate::{Ended, Failed, Global};

/// Show what a function's recent calls wrote to stdout and stderr.
///
/// Each line is tagged with the stream it was written to; control characters are shown escaped.
#[derive(clap::Args)]
pub(crate) struct Logs {
    /// The function's name or id.
    name: String,
    /// How many calls to show.
    #[arg(long, default_value_t = 20, value_name = "N")]
    limit: usize,
    /// Go on and show calls as they end, until Ctrl-C. With --json, an object per line.
    #[arg(long, short)]
    follow: bool,
}

impl Logs {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let path = format!("/functions/{}/logs?limit={}", segment(&self.name), self.limit);
        let client = Client::new(global);
        if self.follow {
            end_at_interrupt()?;
            for entry in client.lines(&format!("{path}&follow=true"))? {
                let entry = entry?;
                if global.json {
                    outln!("{entry}");
                } else {
                    print_entry(&entry);
                }
            }
            let message = format!("the log of {} ended: the server stops, or the function was deleted", self.name);
            return Err(Failed::Server { kind: "broken_answer".to_owned(), message });
        }
        let answer = client.get(&path)?;
        if global.json {
            print_json(&answer);
        } else {
            answer["logs"].as_array().into_iter().flatten().for_each(print_entry);
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn print_entry(entry: &Value) {
    if let Some(missed) = entry["missed"].as_u64().filter(|n| *n > 0) {
        outln!("({missed} calls were not shown: they came faster than they could be followed)");
    }
    outln!(
        "--- {}, trace {}, revision {}",
        ago(&entry["at_ms"]),
        field(entry, "trace_id"),
        short(&field(entry, "revision"))
    );
    for stream in ["stdout", "stderr"] {
        for line in entry[stream].as_str().unwrap_or_default().lines() {
            outln!("{stream}: {}", printable(line));
        }
    }
    if let Some(dropped) = entry["dropped_bytes"].as_u64().filter(|n| *n > 0) {
        outln!("({dropped} bytes more were not kept)");
    }
    if let Some(fault) = entry["fault"].as_str() {
        outln!("fault: {}", printable(fault));
    }
}

/// Ctrl-C is how one stops following: it is no failure.
fn end_at_interrupt() -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failed::No(e.to_string()))?;
    let (armed, is_armed) = std::sync::mpsc::channel();
    let wait = move || {
        runtime.block_on(async {
            let interrupt = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt());
            drop(armed);
            if let Ok(mut interrupt) = interrupt {
                interrupt.recv().await;
                std::process::exit(0);
            }
        });
    };
    let spawned = std::thread::Builder::new().name("interrupt".to_owned()).spawn(wait);
    spawned.map_err(|e| Failed::No(e.to_string()))?;
    // Until its handler stands, a signal would still kill this process.
    let _: Result<(), _> = is_armed.recv();
    Ok(())
}
