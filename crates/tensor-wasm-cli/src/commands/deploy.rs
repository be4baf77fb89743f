#![expect(clippy::print_stdout, reason = "the deployed function is the command's result")]

use std::collections::BTreeMap;
use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::client::{Client, segment};
use crate::table::{field, print_json, short};
use crate::{Ended, Failed, Global};

/// Deploy a module or component as a function.
///
/// FILE is a `.wasm` (or a `.wat`, which is converted here). Deploying under an existing name makes a new revision and
/// gives it all the traffic; `rollback` goes back.
#[derive(clap::Args)]
pub(crate) struct Deploy {
    /// The module or component.
    file: PathBuf,
    /// The function's name: letters, digits, '-', '_' and '.'.
    #[arg(long)]
    name: String,
    /// Keep instances and call them again: you promise that a call leaves nothing behind for the next.
    #[arg(long)]
    reuse: bool,
    /// Let /run/NAME be called without a token.
    #[arg(long)]
    public: bool,
    /// Stop calls after this long, if that is sooner than the tenant's limit.
    #[arg(long, value_name = "N")]
    deadline_ms: Option<u64>,
    /// Limit the memory of an instance, if that is less than the tenant's limit.
    #[arg(long, value_name = "N")]
    memory_bytes: Option<u64>,
    /// Let it use the GPU.
    #[arg(long)]
    gpu: bool,
    /// Where a core module's linear memory comes from: `pinned` is seen by the GPU in place. Needs --gpu.
    #[arg(long, value_name = "KIND", value_parser = ["pooled", "pinned"])]
    memory: Option<String>,
    /// An environment variable of the function.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
}

impl Deploy {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let wasm = std::fs::read(&self.file).map_err(|e| Failed::Usage(format!("{}: {e}", self.file.display())))?;
        let wasm = tensor_wasm_exec::local::binary(&wasm)
            .map_err(|e| Failed::Usage(format!("{}: {e}", self.file.display())))?;
        let mut env = BTreeMap::new();
        for text in &self.env {
            let pair = text.split_once('=');
            let (name, value) = pair.ok_or_else(|| Failed::Usage(format!("--env {text}: give it as NAME=VALUE")))?;
            env.insert(name, value);
        }
        let settings = json!({
            "reuse": self.reuse,
            "public": self.public,
            "deadline_ms": self.deadline_ms,
            "memory_bytes": self.memory_bytes,
            "env": env,
            "gpu": self.gpu,
            "memory": self.memory,
        });
        let path = format!("/functions?name={}&settings={}", segment(&self.name), segment(&settings.to_string()));
        let bytes = wasm.len() as u64;
        let progress = Progress::new(bytes);
        let answer = Client::new(global).upload(&path, bytes, Uploading { bytes: &wasm, progress: &progress });
        progress.bar.finish_and_clear();
        let function = answer?;
        if global.json {
            print_json(&function);
            return Ok(ExitCode::SUCCESS);
        }
        println!(
            "deployed {} ({}), revision {}",
            field(&function, "name"),
            field(&function, "kind"),
            short(&field(&function, "revision"))
        );
        match function["address"].as_str() {
            Some(address) => println!("{address}"),
            None if field(&function, "kind").ends_with("_exports") => {
                println!("try: tensor-wasm invoke {} --export NAME", field(&function, "name"));
            }
            None => println!("try: tensor-wasm invoke {}", field(&function, "name")),
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Bytes sent, then a spinner while the server compiles. Silent where stderr is no terminal.
struct Progress {
    bar: ProgressBar,
}

impl Progress {
    fn new(bytes: u64) -> Progress {
        if !std::io::stderr().is_terminal() {
            return Progress { bar: ProgressBar::hidden() };
        }
        let bar = ProgressBar::new(bytes);
        let style = ProgressStyle::with_template("uploading {bar:30} {bytes}/{total_bytes}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Progress { bar }
    }

    fn sent(&self, bytes: usize) {
        self.bar.inc(bytes as u64);
        if self.bar.length() == Some(self.bar.position()) {
            let style = ProgressStyle::with_template("{spinner} compiling, {elapsed}");
            self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            self.bar.enable_steady_tick(Duration::from_millis(100));
        }
    }
}

struct Uploading<'a> {
    bytes: &'a [u8],
    progress: &'a Progress,
}

impl Read for Uploading<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.bytes.read(buffer)?;
        self.progress.sent(read);
        Ok(read)
    }
}
