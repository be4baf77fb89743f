use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use serde_json::Value;
use ureq::http::Method;

use crate::client::{Client, OCTETS, segment};
use crate::output::{outln, printable};
use crate::table::{ago, field, print, print_json, short};
use crate::upload::{Progress, Uploading};
use crate::{Ended, Failed, Global};

/// Keep models on the server: tensors that functions open by name.
///
/// A model is a safetensors file. The server checks it, keeps it, and loads it once for all instances that use it. A
/// function opens those that it was deployed with: `tensor-wasm deploy --model NAME`.
#[derive(clap::Args)]
pub(crate) struct Model {
    #[command(subcommand)]
    command: ModelCommand,
}

#[derive(Subcommand)]
enum ModelCommand {
    /// Add a model, or another file under the name of one; calls that begin afterwards see it.
    Add {
        /// What functions open it by: letters, digits, '-', '_' and '.'.
        name: String,
        /// The safetensors file.
        file: PathBuf,
    },
    /// List the models of the tenant.
    List,
    /// Show a model and the functions that use it.
    Show {
        /// The model.
        name: String,
    },
    /// Remove a model that no function uses.
    Remove {
        /// The model.
        name: String,
        /// Also where functions use it; they are told so when they open it.
        #[arg(long)]
        force: bool,
    },
}

impl Model {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let client = Client::new(global);
        match self.command {
            ModelCommand::Add { name, file } => {
                let model = add(&client, &name, &file)?;
                if global.json {
                    print_json(&model);
                } else {
                    let (tensors, bytes) = (field(&model, "tensors"), field(&model, "bytes"));
                    outln!("added {name}: {tensors} tensors, {bytes} bytes, {}", short(&field(&model, "hash")));
                    outln!("try: tensor-wasm deploy FILE.wasm --name NAME --model {name}");
                }
            }
            ModelCommand::List => {
                let models = client.get("/models")?;
                if global.json {
                    print_json(&models);
                } else {
                    let rows: Vec<_> = models.as_array().into_iter().flatten().map(row).collect();
                    print(&["NAME", "TENSORS", "BYTES", "HASH", "ADDED", "STATE"], &rows);
                }
            }
            ModelCommand::Show { name } => {
                let model = client.get(&path(&name))?;
                if global.json {
                    print_json(&model);
                } else {
                    show(&model);
                }
            }
            ModelCommand::Remove { name, force } => {
                let query = if force { "?force=true" } else { "" };
                client.delete(&format!("{}{query}", path(&name)))?;
                if global.json {
                    outln!("{{\"removed\":true}}");
                } else {
                    outln!("removed {name}");
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn path(name: &str) -> String {
    format!("/models/{}", segment(name))
}

fn add(client: &Client, name: &str, path_of_file: &Path) -> Result<Value, Failed> {
    let wrong = |why: &dyn std::fmt::Display| Failed::Usage(format!("{}: {why}", path_of_file.display()));
    let file = File::open(path_of_file).map_err(|e| wrong(&e))?;
    let metadata = file.metadata().map_err(|e| wrong(&e))?;
    if !metadata.is_file() {
        return Err(wrong(&"it is no file of a size; write the model into one first"));
    }
    let progress = Progress::new(metadata.len(), "checking");
    let body = Uploading { from: file, progress: &progress };
    let answer = client.upload(Method::PUT, &path(name), OCTETS, metadata.len(), body);
    progress.end();
    answer
}

fn row(model: &Value) -> Vec<String> {
    let mut row: Vec<String> = ["name", "tensors", "bytes"].iter().map(|name| field(model, name)).collect();
    row.extend([short(&field(model, "hash")), ago(&model["created_ms"]), state(model).to_owned()]);
    row
}

fn state(model: &Value) -> &'static str {
    if model["quarantined"].is_null() { "good" } else { "damaged" }
}

fn show(model: &Value) {
    let functions = model["functions"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let functions: Vec<&str> = functions.collect();
    let mut facts: Vec<(&str, String)> =
        ["name", "tenant", "hash", "bytes", "tensors"].iter().map(|name| (*name, field(model, name))).collect();
    facts.push(("added", ago(&model["created_ms"])));
    facts.push(("functions", functions.join(" ")));
    facts.push(("damaged", field(model, "quarantined")));
    for (label, text) in facts.iter().filter(|(_, text)| !text.is_empty()) {
        outln!("{label:<10}{}", printable(text));
    }
}
