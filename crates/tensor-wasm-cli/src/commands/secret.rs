use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;

use crate::client::{Client, segment};
use crate::output::outln;
use crate::table::print_json;
use crate::{Ended, Failed, Global};

/// No server takes longer values, unless its operator insists; this bounds what is read here.
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
                        let wrong = |why: String| Failed::Usage(format!("{}: {why}", file.display()));
                        let opened = std::fs::File::open(&file).map_err(|e| wrong(e.to_string()))?;
                        read(opened).and_then(bounded).map_err(wrong)?
                    }
                    None => typed(&name, &key)?,
                };
                client.put(&path(&name, &key), &value)?;
                if global.json {
                    outln!("{{\"set\":true}}");
                } else {
                    outln!("set {key} of {name}");
                }
            }
            SecretCommand::List { name } => {
                let names = client.get(&format!("/functions/{}/secrets", segment(&name)))?;
                if global.json {
                    print_json(&names);
                } else {
                    for name in names.as_array().into_iter().flatten().filter_map(|name| name.as_str()) {
                        outln!("{name}");
                    }
                }
            }
            SecretCommand::Delete { name, key } => {
                client.delete(&path(&name, &key))?;
                if global.json {
                    outln!("{{\"deleted\":true}}");
                } else {
                    outln!("deleted {key} of {name}");
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn path(name: &str, key: &str) -> String {
    format!("/functions/{}/secrets/{}", segment(name), segment(key))
}

fn typed(name: &str, key: &str) -> Result<Vec<u8>, Failed> {
    let cannot = |why: String| Failed::Usage(format!("the value cannot be read from stdin: {why}"));
    if std::io::stdin().is_terminal() {
        let typed = rpassword::prompt_password(format!("{key} of {name}: "));
        return Ok(typed.map_err(|e| cannot(e.to_string()))?.into_bytes());
    }
    let mut value = read(std::io::stdin()).map_err(cannot)?;
    // `echo` and here-strings add one; a value that ends in a newline comes from a file.
    if value.last() == Some(&b'\n') {
        value.pop();
    }
    bounded(value).map_err(cannot)
}

/// A value and the newline that may be after it, with one byte more where there are more.
fn read(from: impl Read) -> Result<Vec<u8>, String> {
    let mut value = Vec::new();
    from.take(VALUE_BYTES_MAX + 2).read_to_end(&mut value).map_err(|e| e.to_string())?;
    Ok(value)
}

fn bounded(value: Vec<u8>) -> Result<Vec<u8>, String> {
    if value.len() as u64 > VALUE_BYTES_MAX {
        return Err(format!("it has more than {VALUE_BYTES_MAX} bytes, which is too long for a secret"));
    }
    Ok(value)
}
