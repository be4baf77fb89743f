use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Map, Value};
use ureq::http::Method;

use crate::client::{Client, segment};
use crate::output::outln;
use crate::table::{field, print_json, short};
use crate::upload::{Progress, Uploading};
use crate::{Ended, Failed, Global};

/// Compilations shorter than this are not worth a line.
const NOTED_MS_MIN: u64 = 1_000;

/// Deploy a module or component as a function.
///
/// FILE is a `.wasm` (or a `.wat`, which is converted here). Deploying under an existing name makes a new revision and
/// gives it all the traffic; `rollback` goes back. Settings that are not mentioned stay as the serving revision has
/// them.
#[derive(clap::Args)]
pub(crate) struct Deploy {
    /// The module or component.
    file: PathBuf,
    /// The function's name: letters, digits, '-', '_' and '.'.
    #[arg(long)]
    name: String,
    /// Keep instances and call them again: you promise that a call leaves nothing behind for the next.
    #[arg(long, overrides_with = "no_reuse")]
    reuse: bool,
    /// A fresh instance for every call.
    #[arg(long, overrides_with = "reuse")]
    no_reuse: bool,
    /// Let it be called over HTTP without a token.
    #[arg(long, overrides_with = "no_public")]
    public: bool,
    /// Let it be called with a token only.
    #[arg(long, overrides_with = "public")]
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
    #[arg(long, overrides_with = "gpu")]
    no_gpu: bool,
    /// Where a core module's linear memory comes from: `pinned` is seen by the GPU in place. Needs --gpu.
    #[arg(long, value_name = "KIND", value_parser = ["pooled", "pinned"])]
    memory: Option<String>,
    /// A model that it may open; those not named any more it may not. `tensor-wasm model list` lists them.
    #[arg(long = "model", value_name = "NAME", overrides_with = "no_models")]
    models: Vec<String>,
    /// Let it open no models.
    #[arg(long, overrides_with = "models")]
    no_models: bool,
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
        let (wasm, bytes) = open(&self.file)?;
        let settings = self.settings()?;
        let path = format!(
            "/functions?name={}&settings={}",
            segment(&self.name),
            segment(&Value::Object(settings).to_string())
        );
        let progress = Progress::new(bytes, "compiling");
        let body = Uploading { from: wasm, progress: &progress };
        let answer = Client::new(global).upload(Method::POST, &path, "application/wasm", bytes, body);
        progress.end();
        let function = answer?;
        if global.json {
            print_json(&function);
            return Ok(ExitCode::SUCCESS);
        }
        outln!(
            "deployed {} ({}), revision {}",
            field(&function, "name"),
            field(&function, "kind"),
            short(&field(&function, "revision"))
        );
        if let Some(wall_ms) = function["compiled"]["wall_ms"].as_u64().filter(|ms| *ms >= NOTED_MS_MIN) {
            let cpu_ms = function["compiled"]["cpu_ms"].as_u64().unwrap_or(0);
            outln!("compiled in {:.1} s ({:.1} s of CPU time)", wall_ms as f64 / 1e3, cpu_ms as f64 / 1e3);
        }
        match function["address"].as_str() {
            Some(address) => outln!("{address}"),
            None if field(&function, "kind").ends_with("_exports") => {
                outln!("try: tensor-wasm invoke {} --export NAME", field(&function, "name"));
            }
            None => outln!("try: tensor-wasm invoke {}", field(&function, "name")),
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
        if !self.models.is_empty() || self.no_models {
            settings.insert("models".to_owned(), self.models.as_slice().into());
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

/// The module to send and its size. A binary is read as it is sent; text is converted first.
fn open(path: &Path) -> Result<(Box<dyn Read>, u64), Failed> {
    let wrong = |e: &dyn std::fmt::Display| Failed::Usage(format!("{}: {e}", path.display()));
    let mut file = File::open(path).map_err(|e| wrong(&e))?;
    let metadata = file.metadata().map_err(|e| wrong(&e))?;
    let mut magic = [0; 4];
    // A pipe can be read once and has no size.
    if metadata.is_file() && file.read_exact(&mut magic).is_ok() && magic == *b"\0asm" {
        file.rewind().map_err(|e| wrong(&e))?;
        return Ok((Box::new(file), metadata.len()));
    }
    let text = std::fs::read(path).map_err(|e| wrong(&e))?;
    let wasm = tensor_wasm_exec::local::binary(&text).map_err(|e| wrong(&e))?.into_owned();
    let bytes = wasm.len() as u64;
    Ok((Box::new(std::io::Cursor::new(wasm)), bytes))
}
