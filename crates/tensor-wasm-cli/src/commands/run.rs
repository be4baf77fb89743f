#![expect(clippy::print_stdout, reason = "the export's results go to stdout")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use tensor_wasm_exec::local::{LocalError, LocalOutcome, LocalRun};

use crate::{Ended, Failed};

/// Run a module or component here, with this terminal's stdin, stdout and stderr.
///
/// FILE is a `.wat` or `.wasm`: a core module (WASI preview 1) or a component (WASI 0.2 or 0.3). A command's exit code
/// becomes this command's. With --invoke, an export is called instead and its results are printed, one per line;
/// arguments of a component's export are in WAVE syntax, where strings may go without quotes.
#[derive(clap::Args)]
pub(crate) struct Run {
    /// The module or component.
    file: PathBuf,
    /// Call this export instead of running the program.
    #[arg(long, value_name = "EXPORT")]
    invoke: Option<String>,
    /// An environment variable for the guest; without =VALUE, the one of this process.
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// A directory the guest may read and write, by its own name or as GUEST.
    #[arg(long, value_name = "HOST[::GUEST]")]
    dir: Vec<String>,
    /// Stop it after this long.
    #[arg(long, value_name = "N")]
    timeout_ms: Option<u64>,
    /// Compile anew, and keep nothing in the cache directory.
    #[arg(long)]
    no_cache: bool,
    /// Arguments of the program or of the export.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

impl Run {
    pub(crate) fn execute(self) -> Ended {
        let env = self.env.iter().map(|text| environment(text)).collect::<Result<_, _>>()?;
        let dir = |text: &String| match text.split_once("::") {
            Some((host, guest)) => (PathBuf::from(host), guest.to_owned()),
            None => (PathBuf::from(text), text.clone()),
        };
        let run = LocalRun {
            file: self.file,
            args: self.args,
            invoke: self.invoke,
            env,
            dirs: self.dir.iter().map(dir).collect(),
            timeout: self.timeout_ms.map(Duration::from_millis),
            cache: !self.no_cache,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| Failed::No(e.to_string()))?;
        let outcome = runtime.block_on(run.run());
        // A guest's read of stdin may still block a helper thread; it must not keep the process.
        runtime.shutdown_background();
        match outcome {
            Ok(LocalOutcome::Exit(code)) => Ok(ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1))),
            Ok(LocalOutcome::Returned(values)) => {
                values.iter().for_each(|value| println!("{value}"));
                Ok(ExitCode::SUCCESS)
            }
            Err(LocalError::Input(message)) => Err(Failed::Usage(message)),
            Err(LocalError::Guest(fault)) => Err(Failed::No(fault.to_string())),
        }
    }
}

fn environment(text: &str) -> Result<(String, String), Failed> {
    match text.split_once('=') {
        Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
        None => match std::env::var(text) {
            Ok(value) => Ok((text.to_owned(), value)),
            Err(_) => Err(Failed::Usage(format!("--env {text}: no such variable here; give it as {text}=VALUE"))),
        },
    }
}
