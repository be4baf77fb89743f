use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use tensor_wasm_exec::engine::cpu_kernels;
use tensor_wasm_exec::local::{ANY_ADDRESS, Denied, LocalError, LocalOutcome, LocalRun};
use tensor_wasm_gpu::{Device, DeviceChoice, OpenOptions};

use crate::output::outln;
use crate::{Ended, Failed};

/// Run a module or component here, with this terminal's stdin, stdout and stderr.
///
/// FILE is a `.wat` or `.wasm`: a core module (WASI preview 1) or a component (WASI 0.2 or 0.3). A command's exit code
/// becomes this command's. With --invoke, an export is called instead and its results are printed, one per line;
/// arguments of a component's export are in WAVE syntax, where strings may go without quotes. A result that is `err`
/// exits with 1. Directories, sockets, HTTP and the GPU are closed unless a flag opens them.
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
    /// Let it use sockets: for any address, or for this one only (repeatable).
    #[arg(long, value_name = "HOST:PORT", num_args = 0..=1, require_equals = true, default_missing_value = ANY_ADDRESS)]
    net: Vec<String>,
    /// Let it send HTTP requests to this host (repeatable); * for any.
    #[arg(long, value_name = "HOST[:PORT]")]
    allow_http: Vec<String>,
    /// Let it use this device: auto (a GPU where there is one), cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceChoice>,
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
            net: self.net,
            allow_http: self.allow_http,
            device: self.device.map(|choice| -> Box<dyn FnOnce() -> _> { Box::new(move || open(choice)) }),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| Failed::No(e.to_string()))?;
        let (outcome, denied) = runtime.block_on(run.run());
        // A guest's read of stdin may still block a helper thread; it must not keep the process.
        runtime.shutdown_background();
        if !matches!(outcome, Ok(LocalOutcome::Exit(0))) {
            hint(&denied);
        }
        match outcome {
            Ok(LocalOutcome::Exit(code)) => Ok(ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1))),
            Ok(LocalOutcome::Returned { values, is_err }) => {
                values.iter().for_each(|value| outln!("{value}"));
                Ok(ExitCode::from(u8::from(is_err)))
            }
            Err(LocalError::Input(message)) => Err(Failed::Usage(message)),
            Err(error @ (LocalError::Guest(_) | LocalError::Bug(_))) => Err(Failed::No(error.to_string())),
        }
    }
}

/// The device in a thread of this process: there is no tenant to fence off from another.
fn open(choice: DeviceChoice) -> Result<Device, String> {
    let options = OpenOptions { choice, host: cpu_kernels::host_kernels(), ..OpenOptions::default() };
    let device = Device::open(&options).map_err(|why| format!("--device {choice}: {why}"))?;
    if let Some(why) = device.fallback() {
        eprintln!("note: running on the CPU: {why}");
    }
    Ok(device)
}

/// Which flag would have let it do what it failed at. The guest knows only that it was denied.
fn hint(denied: &Denied) {
    if let Some(host) = &denied.http {
        eprintln!("note: an HTTP request to {host} was denied; allow it with --allow-http {host}");
    }
    if let Some(address) = &denied.address {
        eprintln!("note: a socket to {address} was denied; allow it with --net={address}, or any with --net");
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
