//! The `tensor-wasm` binary: one file per command under `commands/`, the HTTP client in `client.rs`, tables in
//! `table.rs`. Exit codes: 0 it worked, 1 the guest or the server said no, 2 bad usage or input.

mod client;
mod commands;
mod npy;
mod table;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Requests allocate some hundreds of small objects each; glibc's allocator showed up as a tenth of their CPU time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Multi-tenant serverless WebAssembly.
#[derive(Parser)]
#[command(name = "tensor-wasm", version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// What every client command understands.
#[derive(Args, Clone)]
pub(crate) struct Global {
    /// The server that client commands talk to. The token comes from TENSOR_WASM_TOKEN.
    #[arg(
        long,
        global = true,
        env = "TENSOR_WASM_SERVER",
        default_value = "http://127.0.0.1:8080",
        value_name = "URL"
    )]
    server: String,
    /// Act for this tenant, where the token allows it.
    #[arg(long, global = true, env = "TENSOR_WASM_TENANT", value_name = "ID")]
    tenant: Option<String>,
    /// Print what the server answered, as JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    Run(commands::run::Run),
    Serve(commands::serve::Serve),
    Deploy(commands::deploy::Deploy),
    Invoke(commands::invoke::Invoke),
    Functions(commands::functions::Functions),
    Revisions(commands::revisions::Revisions),
    Rollback(commands::rollback::Rollback),
    Split(commands::split::Split),
    Secret(commands::secret::Secret),
    Delete(commands::delete::Delete),
    Jobs(commands::jobs::Jobs),
    Logs(commands::logs::Logs),
    Metrics(commands::metrics::Metrics),
    Devices(commands::devices::Devices),
    Kernel(commands::kernel::Kernel),
    #[command(hide = true)]
    DeviceWorker(commands::device_worker::DeviceWorker),
    #[command(hide = true)]
    CompileWorker(commands::compile_worker::CompileWorker),
}

/// Why a command did not do what it was asked.
pub(crate) enum Failed {
    /// The guest or the server said no.
    No(String),
    /// Bad usage or input.
    Usage(String),
}

/// What a command ends with: the process's exit code, which `run` passes through from the guest.
pub(crate) type Ended = Result<ExitCode, Failed>;

fn main() -> ExitCode {
    let Cli { global, command } = Cli::parse();
    let ended = match command {
        Command::Run(command) => command.execute(),
        Command::Serve(command) => command.execute(),
        Command::Deploy(command) => command.execute(&global),
        Command::Invoke(command) => command.execute(&global),
        Command::Functions(command) => command.execute(&global),
        Command::Revisions(command) => command.execute(&global),
        Command::Rollback(command) => command.execute(&global),
        Command::Split(command) => command.execute(&global),
        Command::Secret(command) => command.execute(&global),
        Command::Delete(command) => command.execute(&global),
        Command::Jobs(command) => command.execute(&global),
        Command::Logs(command) => command.execute(&global),
        Command::Metrics(command) => command.execute(&global),
        Command::Devices(command) => command.execute(&global),
        Command::Kernel(command) => command.execute(&global),
        Command::DeviceWorker(command) => command.execute(),
        Command::CompileWorker(command) => command.execute(),
    };
    match ended {
        Ok(code) => code,
        Err(Failed::No(message)) => {
            eprintln!("error: {message}");
            ExitCode::from(1)
        }
        Err(Failed::Usage(message)) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}
