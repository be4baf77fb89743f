#![expect(clippy::print_stdout, reason = "the deployed function is the command's result")]

use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value};

use crate::client::{Client, segment};
use crate::table::{field, print_json, short};
use crate::{Ended, Failed, Global};

/// Deploy a module or component as a function.
///
/// FILE is a `.wasm` (or a `.wat`, which is converted here). Deploying under an existing name makes a new revision and
/// gives it all the traffic; `rollback` goes back. Settings that are not mentioned stay as the serving revision has them.
#[derive(clap::Args)]
pub(crate) struct Deploy {
    file: PathBuf,
    /// The function's name: letters, digits, '-', '_' and '.'.
    #[arg(long)]
    name: String,
    /// Keep instances and call them again: you promise that a call leaves nothing behind for the next.
    #[arg(long, overrides_with = "no_reuse")]
    reuse: bool,
    /// A fresh instance for every call.
    #[arg(long)]
    no_reuse: bool,
    /// Let it be called over HTTP without a token.
    #[arg(long, overrides_with = "no_public")]
    public: bool,
    /// Let it be called with a token only.
    #[arg(long)]
    no_public: bool,
    /// Stop calls after this long, if that is sooner than the tenant's limit; `default`: the tenant's.
    #[arg(long, value_name = "N|default", value_parser = number_or_default)]
    deadline_ms: Option<NumberOrDefault>,
    /// Limit the memory of an instance, if that is less than the tenant's limit; `default`: the tenant's.
    #[arg(long, value_name = "N|default", value_parser = number_or_default)]
    memory_bytes: Option<NumberOrDefault>,
    /// Let it use the GPU.
    #[arg(long, overrides_with = "no_gpu")]
    gpu: bool,
    /// Deny it the GPU.
    #[arg(long)]
    no_gpu: bool,
    /// Where a core module's linear memory comes from: `pinned` is seen by the GPU in place. Needs --gpu.
    #[arg(long, value_name = "KIND", value_parser = ["pooled", "pinned"])]
    memory: Option<String>,
    /// An environment variable of the function. For what must stay secret use `tensor-wasm secret set`.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Take an environment variable away.
    #[arg(long, value_name = "NAME")]
    unset_env: Vec<String>,
}

/// A limit of the function's own, or the tenant's.
#[derive(Clone, Copy)]
struct NumberOrDefault(Option<u64>);

fn number_or_default(text: &str) -> Result<NumberOrDefault, String> {
    if text == "default" {
        return Ok(NumberOrDefault(None));
    }
    text.parse().map(|n| NumberOrDefault(Some(n))).map_err(|_| "give a number, or `default`".to_owned())
}

impl Deploy {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let wasm = std::fs::read(&self.file).map_err(|e| Failed::Usage(format!("{}: {e}", self.file.display())))?;
        let wasm = tensor_wasm_exec::local::binary(&wasm)
            .map_err(|e| Failed::Usage(format!("{}: {e}", self.file.display())))?;
        let settings = self.settings()?;
        let path = format!("/functions?name={}&settings={}", segment(&self.name), segment(&Value::Object(settings).to_string()));
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
        match function["url"].as_str() {
            Some(url) => println!("{}{url}", global.server.trim_end_matches('/')),
            None if field(&function, "kind").ends_with("_exports") => {
                println!("try: tensor-wasm invoke {} --export NAME", field(&function, "name"));
            }
            None => println!("try: tensor-wasm invoke {}", field(&function, "name")),
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Deploy {
    /// What was mentioned, and only that.
    fn settings(&self) -> Result<Map<String, Value>, Failed> {
        let mut settings = Map::new();
        for (key, on, off) in [
            ("reuse", self.reuse, self.no_reuse),
            ("public", self.public, self.no_public),
            ("gpu", self.gpu, self.no_gpu),
        ] {
            if on || off {
                settings.insert(key.to_owned(), on.into());
            }
        }
        for (key, number) in [("deadline_ms", self.deadline_ms), ("memory_bytes", self.memory_bytes)] {
            if let Some(NumberOrDefault(number)) = number {
                settings.insert(key.to_owned(), number.into());
            }
        }
        if let Some(memory) = &self.memory {
            settings.insert("memory".to_owned(), memory.as_str().into());
        }
        let mut env = Map::new();
        for name in &self.unset_env {
            env.insert(name.clone(), Value::Null);
        }
        for text in &self.env {
            let pair = text.split_once('=');
            let (name, value) = pair.ok_or_else(|| Failed::Usage(format!("--env {text}: give it as NAME=VALUE")))?;
            env.insert(name.to_owned(), value.into());
        }
        if !env.is_empty() {
            settings.insert("env".to_owned(), env.into());
        }
        Ok(settings)
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
