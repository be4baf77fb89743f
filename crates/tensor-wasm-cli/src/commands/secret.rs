#![expect(clippy::print_stdout, reason = "names, and what changed, are the command's result")]

use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;

use crate::client::{Client, segment};
use crate::table::print_json;
use crate::{Ended, Failed, Global};

/// Longer values are refused by any server; this only bounds what is read here.
const VALUE_BYTES_MAX: u64 = 1 << 20;

/// Give a function secrets: environment variables that nobody can read back.
///
/// They belong to the function, not to a revision: they survive redeploys, and a rollback does not bring back a secret
/// that was deleted, nor an old value. The server needs a key to seal them with (TENSOR_WASM_SECRETS_KEY).
#[derive(clap::Args)]
pub(crate) struct Secret {
    #[command(subcommand)]
    command: SecretCommand,
}

#[derive(Subcommand)]
enum SecretCommand {
    /// Set a secret; calls that begin afterwards see it.
    ///
    /// The value is read from stdin (asked for without echo on a terminal), so that it is in no shell history and no
    /// list of processes. One newline at its end is left out.
    Set {
        /// The function.
        name: String,
        /// The environment variable.
        key: String,
        /// Read the value from this file, whole, instead of stdin.
        #[arg(long, value_name = "FILE")]
        value_file: Option<PathBuf>,
    },
    /// List the names of a function's secrets.
    List {
        /// The function.
        name: String,
    },
    /// Delete a secret.
    Delete {
        /// The function.
        name: String,
        /// The environment variable.
        key: String,
    },
}

impl Secret {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let client = Client::new(global);
        match self.command {
            SecretCommand::Set { name, key, value_file } => {
                let value = match value_file {
                    Some(file) => {
                        std::fs::read(&file).map_err(|e| Failed::Usage(format!("{}: {e}", file.display())))?
                    }
                    None => typed(&name, &key)?,
                };
                client.put(&path(&name, &key), &value)?;
                println!("set {key} of {name}");
            }
            SecretCommand::List { name } => {
                let names = client.get(&format!("/functions/{}/secrets", segment(&name)))?;
                if global.json {
                    print_json(&names);
                } else {
                    for name in names.as_array().into_iter().flatten().filter_map(|name| name.as_str()) {
                        println!("{name}");
                    }
                }
            }
            SecretCommand::Delete { name, key } => {
                client.delete(&path(&name, &key))?;
                println!("deleted {key} of {name}");
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn path(name: &str, key: &str) -> String {
    format!("/functions/{}/secrets/{}", segment(name), segment(key))
}

fn typed(name: &str, key: &str) -> Result<Vec<u8>, Failed> {
    let cannot = |e: std::io::Error| Failed::Usage(format!("the value cannot be read from stdin: {e}"));
    if std::io::stdin().is_terminal() {
        return Ok(rpassword::prompt_password(format!("{key} of {name}: ")).map_err(cannot)?.into_bytes());
    }
    let mut value = Vec::new();
    std::io::stdin().take(VALUE_BYTES_MAX).read_to_end(&mut value).map_err(cannot)?;
    // `echo` and here-strings add one; a value that ends in a newline comes from a file.
    if value.last() == Some(&b'\n') {
        value.pop();
    }
    Ok(value)
}
