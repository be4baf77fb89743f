#![expect(clippy::print_stdout, reason = "the result goes to stdout")]

use std::process::ExitCode;

use serde_json::{Value, json};
use ureq::http::Method;

use crate::client::{Client, segment};
use crate::table::{field, print_json};
use crate::{Ended, Failed, Global};

/// Call a function and print its result.
#[derive(clap::Args)]
pub(crate) struct Invoke {
    name: String,
    /// The export to call, where there is more than one.
    #[arg(long)]
    export: Option<String>,
    /// Arguments as a JSON array, or an object by parameter name; for a command, an array of strings.
    #[arg(long, value_name = "JSON", default_value = "null", hide_default_value = true)]
    args: String,
    /// Stop it after this long.
    #[arg(long, value_name = "N")]
    deadline_ms: Option<u64>,
    /// Do not wait: print the id of a job that makes the call.
    #[arg(long = "async")]
    in_background: bool,
    /// With --async: the same key and request make only one job.
    #[arg(long, value_name = "KEY", requires = "in_background")]
    idempotency_key: Option<String>,
    /// With --async: how often to try if the guest faults.
    #[arg(long, value_name = "N", requires = "in_background")]
    attempts: Option<u32>,
}

impl Invoke {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let args: Value = serde_json::from_str(&self.args)
            .map_err(|e| Failed::Usage(format!("--args {}: {e} (a JSON array, such as '[1,\"two\"]')", self.args)))?;
        let client = Client::new(global);
        let name = segment(&self.name);
        if self.in_background {
            let key = self.idempotency_key.unwrap_or_default();
            let headers = [("idempotency-key", key.as_str())];
            let headers = if key.is_empty() { &[][..] } else { &headers[..] };
            let body = json!({ "export": self.export, "args": args, "attempts": self.attempts });
            let job = client.with_json(Method::POST, &format!("/functions/{name}/invoke-async"), headers, &body)?;
            match global.json {
                true => print_json(&job),
                false => println!("{}", field(&job, "job_id")),
            }
            return Ok(ExitCode::SUCCESS);
        }
        let body = json!({ "export": self.export, "args": args, "deadline_ms": self.deadline_ms });
        let answer = client.with_json(Method::POST, &format!("/functions/{name}/invoke"), &[], &body)?;
        if global.json {
            print_json(&answer);
            return Ok(ExitCode::SUCCESS);
        }
        // A command's result is its output and its exit code, as if it had run here.
        if let (Some(code), Some(stdout)) =
            (answer["result"]["exit_code"].as_i64(), answer["result"]["stdout"].as_str())
        {
            print!("{stdout}");
            eprint!("{}", answer["result"]["stderr"].as_str().unwrap_or_default());
            return Ok(ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1)));
        }
        println!("{}", answer["result"]);
        Ok(ExitCode::SUCCESS)
    }
}
