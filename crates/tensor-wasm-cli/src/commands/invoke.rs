use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};
use ureq::http::Method;

use crate::client::{ANSWER_BYTES_MAX, Client, segment};
use crate::output::{outln, write, write_bytes};
use crate::progress::Waiting;
use crate::table::{field, print_json};
use crate::{Ended, Failed, Global};

/// Call a function and print its result.
///
/// The result is printed as JSON; a command's output goes to stdout and stderr. Exit code 1 if the function returns
/// `err`, traps or runs past its deadline; a command's own exit code becomes this one's.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    tensor-wasm invoke shapes --export area --args '[{\"rect\":[6,7]}]'\n  \
    tensor-wasm invoke shapes --export centroid --args @points.json\n  \
    tensor-wasm invoke report --args '[\"May\"]' --async")]
pub(crate) struct Invoke {
    /// The function's name or id.
    name: String,
    /// The export to call, where there is more than one.
    #[arg(long)]
    export: Option<String>,
    /// Arguments: a JSON array, or an object by parameter name; for a command, an array of strings. @FILE reads them
    /// from a file, - from stdin.
    #[arg(long, value_name = "JSON|@FILE|-", default_value = "null", hide_default_value = true)]
    args: String,
    /// Give the bytes of a file (- for stdin) to an export that takes bytes, or to a command as its stdin.
    /// The bytes that come back go to stdout.
    #[arg(long = "in", value_name = "FILE|-", conflicts_with_all = ["args", "in_background", "deadline_ms"])]
    input: Option<PathBuf>,
    /// With --in: write the bytes that come back to this file.
    #[arg(long = "out", value_name = "FILE", requires = "input")]
    output: Option<PathBuf>,
    /// Stop it after this long.
    #[arg(long, value_name = "N")]
    deadline_ms: Option<u64>,
    /// Do not wait: print the id of a job that makes the call.
    #[arg(long = "async", conflicts_with = "deadline_ms")]
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
        let client = Client::new(global);
        if let Some(input) = &self.input {
            return self.octets(&client, input);
        }
        let args = parse_args(&read_args(&self.args)?)?;
        let name = segment(&self.name);
        if self.in_background {
            let key = self.idempotency_key.unwrap_or_default();
            let headers = [("idempotency-key", key.as_str())];
            let headers = if key.is_empty() { &[][..] } else { &headers[..] };
            let body = json!({ "export": self.export, "args": args, "attempts": self.attempts });
            let job = client.with_json(Method::POST, &format!("/functions/{name}/invoke-async"), headers, &body)?;
            if global.json {
                print_json(&job);
            } else {
                outln!("{}", field(&job, "job_id"));
            }
            return Ok(ExitCode::SUCCESS);
        }
        let body = json!({ "export": self.export, "args": args, "deadline_ms": self.deadline_ms });
        let waiting = Waiting::new(format!("calling {}", self.name));
        let answer = client.with_json(Method::POST, &format!("/functions/{name}/invoke"), &[], &body);
        drop(waiting);
        let answer = answer.map_err(|failed| self.explained(failed))?;
        let result = &answer["result"];
        // A command's result is its output and its exit code, as if it had run here.
        let is_command = answer["kind"].as_str().is_some_and(|kind| kind.ends_with("_command"));
        if global.json {
            print_json(&answer);
        } else if is_command {
            write(format_args!("{}", field(result, "stdout")));
            eprint!("{}", field(result, "stderr"));
        } else {
            outln!("{result}");
        }
        Ok(if is_command {
            let code = result["exit_code"].as_i64().unwrap_or(1);
            ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1))
        } else {
            ExitCode::from(u8::from(answer["is_err"] == true))
        })
    }

    fn octets(&self, client: &Client, input: &Path) -> Ended {
        let bytes = read_all(input).map_err(|why| Failed::Usage(format!("--in {}: {why}", input.display())))?;
        let export = self.export.as_ref().map(|export| format!("?export={}", segment(export)));
        let path = format!("/functions/{}/invoke{}", segment(&self.name), export.unwrap_or_default());
        let waiting = Waiting::new(format!("calling {}", self.name));
        let answer = client.octets(&path, &bytes);
        drop(waiting);
        let answer = answer.map_err(|failed| self.explained(failed))?;
        match &self.output {
            Some(file) => {
                std::fs::write(file, &answer).map_err(|e| Failed::No(format!("--out {}: {e}", file.display())))?;
            }
            None => write_bytes(&answer),
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Invoke {
    /// Where to look for what can be called, if what was asked for cannot.
    fn explained(&self, failed: Failed) -> Failed {
        match failed {
            Failed::Server { kind, message } if kind == "missing_export" => {
                let message = format!("{message}; `tensor-wasm show {}` says how it is called", self.name);
                Failed::Server { kind, message }
            }
            other => other,
        }
    }
}

/// What `--args` stands for.
fn read_args(text: &str) -> Result<String, Failed> {
    let file = match text.strip_prefix('@') {
        Some("") => return Err(Failed::Usage("--args @: the name of a file is missing".to_owned())),
        Some(file) => file,
        None if text == "-" => text,
        None => return Ok(text.to_owned()),
    };
    let wrong = |why: String| Failed::Usage(format!("--args {text}: {why}"));
    String::from_utf8(read_all(Path::new(file)).map_err(wrong)?).map_err(|_| wrong("it is not text".to_owned()))
}

/// A file, or stdin for `-`; no more than a server would take.
fn read_all(file: &Path) -> Result<Vec<u8>, String> {
    let read = |from: &mut dyn Read| {
        let mut bytes = Vec::new();
        from.take(ANSWER_BYTES_MAX + 1).read_to_end(&mut bytes).map(|_| bytes)
    };
    let bytes = if file == Path::new("-") {
        read(&mut std::io::stdin().lock())
    } else {
        std::fs::File::open(file).and_then(|mut file| read(&mut file))
    };
    let bytes = bytes.map_err(|e| e.to_string())?;
    if bytes.len() as u64 > ANSWER_BYTES_MAX {
        return Err(format!("it has more than {ANSWER_BYTES_MAX} bytes"));
    }
    Ok(bytes)
}

fn parse_args(text: &str) -> Result<Value, Failed> {
    serde_json::from_str(text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let why = error.to_string();
        let why = why.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&why);
        // Columns count bytes from 1, and point at the last one that was looked at.
        let rest = text.lines().nth(line.saturating_sub(1)).unwrap_or_default().as_bytes();
        let rest = String::from_utf8_lossy(rest.get(column.saturating_sub(1)..).unwrap_or_default());
        let near = match rest.chars().take(20).collect::<String>() {
            near if near.is_empty() => "the end".to_owned(),
            near => format!("{near:?}"),
        };
        let expected = "expected JSON such as '[1,\"two\"]', @FILE or - for stdin";
        Failed::Usage(format!("--args: {why} at line {line}, column {column}, near {near}; {expected}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_in_json_are_pointed_at() {
        let check = |text: &str, expected: &str| match parse_args(text) {
            Err(Failed::Usage(message)) => {
                assert!(message.contains(expected), "{message:?} does not say {expected:?}");
                assert!(!message.contains('\n'), "{message:?}");
            }
            _ => panic!("{text} was understood"),
        };
        check("[1 2]", "at line 1, column 4, near \"2]\"");
        check("{", "line 1, column 1, near \"{\"");
        check("[1,\n  2,\n  three]", "at line 3, column 4, near \"hree]\"");
        check("hello", "expected value at line 1, column 1, near \"hello\"; expected JSON such as '[1,\"two\"]'");
        check("", "EOF while parsing a value at line 1, column 0, near the end");
        check("[\"é\" x]", "near \"x]\"");
        assert!(parse_args(r#"["two", 2]"#).is_ok());
    }
}
