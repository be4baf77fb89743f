//! The `tensor-wasm` binary: the command line is in `cli.rs`, one file per command under `commands/`, the HTTP client
//! in `client.rs`. Exit codes: 0 it worked, 1 the function or the server said no, 2 bad usage or input.

mod cli;
mod client;
mod commands;
mod failed;
mod npy;
mod output;
mod progress;
mod table;
mod upload;

use std::process::ExitCode;

pub(crate) use cli::Global;
pub(crate) use failed::Failed;

/// Requests allocate some hundreds of small objects each; glibc's allocator showed up as a tenth of their CPU time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What a command ends with: the process's exit code, which `run` passes through from the guest.
pub(crate) type Ended = Result<ExitCode, Failed>;

fn main() -> ExitCode {
    if let Some(worker) = commands::worker::Worker::asked_for() {
        return worker.execute().unwrap_or_else(|failed| failed.report(false));
    }
    let cli = match cli::parse() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let is_json = cli.is_json();
    cli.execute().unwrap_or_else(|failed| failed.report(is_json))
}
