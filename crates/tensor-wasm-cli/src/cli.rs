//! The command line: which commands there are, and the options that several of them share.
//!
//! Commands that talk to a server are wrapped in [`OnServer`], which adds `--server`, `--tenant` and `--json`; all
//! others in [`Here`], which adds `--json` alone. Both may also be given before the command. Worker processes are not
//! commands (`commands/worker.rs`), so no help text, completion or suggestion names them.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands::*;
use crate::{Ended, Failed};

const SERVER_DEFAULT: &str = "http://127.0.0.1:8080";

/// Local commands that print nothing a program would want as JSON; they take `--json` for their errors, silently.
const WITHOUT_JSON_RESULT: [&str; 4] = ["run", "serve", "completions", "man"];

/// Serve WebAssembly functions of many tenants, deploy and call them, and run their kernels on a GPU.
#[derive(Parser)]
#[command(
    name = "tensor-wasm",
    version,
    max_term_width = 100,
    after_help = "To begin: `tensor-wasm serve`, and `tensor-wasm deploy FILE.wasm --name NAME` in another terminal.\n\
                  Exit codes: 0 it worked; 1 the function or the server said no; 2 bad usage or input."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    before: ClientOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(Here<serve::Serve>),
    Deploy(OnServer<deploy::Deploy>),
    Invoke(OnServer<invoke::Invoke>),
    Functions(OnServer<functions::Functions>),
    Show(OnServer<show::Show>),
    Logs(OnServer<logs::Logs>),
    Jobs(OnServer<jobs::Jobs>),
    Revisions(OnServer<revisions::Revisions>),
    Rollback(OnServer<rollback::Rollback>),
    Split(OnServer<split::Split>),
    Secret(OnServer<secret::Secret>),
    Model(OnServer<model::Model>),
    Delete(OnServer<delete::Delete>),
    Metrics(OnServer<metrics::Metrics>),
    Run(Here<run::Run>),
    Kernel(Here<kernel::Kernel>),
    Tensor(Here<tensor::TensorCommand>),
    Devices(Here<devices::Devices>),
    Completions(Here<completions::Completions>),
    Man(Here<man::Man>),
}

// Doc comments here would become the help text of every command.
//
// A command that talks to a server.
#[derive(Args)]
struct OnServer<C: Args> {
    #[command(flatten)]
    command: C,
    #[command(flatten)]
    after: ClientOptions,
}

// A command that does its work on this machine.
#[derive(Args)]
struct Here<C: Args> {
    #[command(flatten)]
    command: C,
    #[command(flatten)]
    after: JsonOption,
}

#[derive(Args)]
struct ClientOptions {
    /// Talk to this server [env: TENSOR_WASM_SERVER] [default: http://127.0.0.1:8080].
    #[arg(long, global = true, value_name = "URL", help_heading = "Client options")]
    server: Option<String>,
    /// Act for this tenant, if the token in TENSOR_WASM_TOKEN may [env: TENSOR_WASM_TENANT].
    #[arg(long, global = true, value_name = "ID", help_heading = "Client options")]
    tenant: Option<String>,
    /// Print the result, or the error on stderr, as JSON.
    #[arg(long, global = true, help_heading = "Client options")]
    json: bool,
}

#[derive(Args)]
struct JsonOption {
    /// Print the result, or the error on stderr, as JSON.
    #[arg(long, global = true, display_order = 900)]
    json: bool,
}

/// What client commands are given besides their own options.
pub(crate) struct Global {
    pub(crate) server: String,
    pub(crate) tenant: Option<String>,
    pub(crate) json: bool,
}

/// The command line as clap knows it, for parsing, completions and manual pages.
pub(crate) fn command() -> clap::Command {
    let mut command = Cli::command();
    // What stands before the command is not handed down to it: each has its own, or none.
    for option in ["server", "tenant", "json"] {
        command = command.mut_arg(option, |arg| arg.global(false));
    }
    for name in WITHOUT_JSON_RESULT {
        command = command.mut_subcommand(name, |command| command.mut_arg("json", |arg| arg.hide(true)));
    }
    command
}

/// What this process was asked to do; or the exit code, if that was help or cannot be understood.
pub(crate) fn parse() -> Result<Cli, ExitCode> {
    let args: Vec<OsString> = std::env::args_os().collect();
    let parsed = command().try_get_matches_from(&args).and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map_err(|error| {
        // Where parsing stopped short, whether there was a --json is for us to find.
        let is_json = args.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--json");
        if error.use_stderr() && is_json {
            return Failed::Usage(one_line(&error)).report(true);
        }
        let _ = error.print();
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
    })
}

/// What clap has to say, without the usage that follows it.
fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.split("\n\nUsage:").next().unwrap_or_default();
    let text = text.split("\n\nFor more information").next().unwrap_or_default();
    let paragraphs = text.strip_prefix("error:").unwrap_or(text).split("\n\n");
    let lines = paragraphs.map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join("; ")
}

impl Cli {
    pub(crate) fn is_json(&self) -> bool {
        self.before.json || self.command.after().json
    }

    pub(crate) fn execute(self) -> Ended {
        let global = self.global()?;
        match self.command {
            Command::Serve(it) => it.command.execute(),
            Command::Deploy(it) => it.command.execute(&global),
            Command::Invoke(it) => it.command.execute(&global),
            Command::Functions(it) => it.command.execute(&global),
            Command::Show(it) => it.command.execute(&global),
            Command::Logs(it) => it.command.execute(&global),
            Command::Jobs(it) => it.command.execute(&global),
            Command::Revisions(it) => it.command.execute(&global),
            Command::Rollback(it) => it.command.execute(&global),
            Command::Split(it) => it.command.execute(&global),
            Command::Secret(it) => it.command.execute(&global),
            Command::Model(it) => it.command.execute(&global),
            Command::Delete(it) => it.command.execute(&global),
            Command::Metrics(it) => it.command.execute(&global),
            Command::Run(it) => it.command.execute(),
            Command::Kernel(it) => it.command.execute(&global),
            Command::Tensor(it) => it.command.execute(&global),
            Command::Devices(it) => it.command.execute(&global),
            Command::Completions(it) => it.command.execute(),
            Command::Man(it) => it.command.execute(),
        }
    }

    /// What stands after the command goes before what stands before it, and that before the environment.
    fn global(&self) -> Result<Global, Failed> {
        let (before, after) = (&self.before, self.command.after());
        if !after.is_client {
            for (option, given) in [("--server", &before.server), ("--tenant", &before.tenant)] {
                if given.is_some() {
                    let why = "it is for commands that talk to a server, and this one works on this machine";
                    return Err(Failed::Usage(format!("{option}: {why}")));
                }
            }
        }
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let server = after.server.or(before.server.as_ref()).cloned().or_else(|| variable("TENSOR_WASM_SERVER"));
        let tenant = after.tenant.or(before.tenant.as_ref()).cloned().or_else(|| variable("TENSOR_WASM_TENANT"));
        Ok(Global { server: url(server), tenant, json: self.is_json() })
    }
}

/// A server's address as the paths of requests are put after it.
fn url(server: Option<String>) -> String {
    let server = server.unwrap_or_else(|| SERVER_DEFAULT.to_owned());
    let server = server.trim_end_matches('/');
    if server.contains("://") { server.to_owned() } else { format!("http://{server}") }
}

/// The shared options that stand after a command.
#[derive(Default)]
struct After<'a> {
    is_client: bool,
    server: Option<&'a String>,
    tenant: Option<&'a String>,
    json: bool,
}

impl Command {
    fn after(&self) -> After<'_> {
        let client = match self {
            Command::Deploy(OnServer { after, .. })
            | Command::Invoke(OnServer { after, .. })
            | Command::Functions(OnServer { after, .. })
            | Command::Show(OnServer { after, .. })
            | Command::Logs(OnServer { after, .. })
            | Command::Jobs(OnServer { after, .. })
            | Command::Revisions(OnServer { after, .. })
            | Command::Rollback(OnServer { after, .. })
            | Command::Split(OnServer { after, .. })
            | Command::Secret(OnServer { after, .. })
            | Command::Model(OnServer { after, .. })
            | Command::Delete(OnServer { after, .. })
            | Command::Metrics(OnServer { after, .. }) => after,
            Command::Serve(Here { after, .. })
            | Command::Run(Here { after, .. })
            | Command::Kernel(Here { after, .. })
            | Command::Tensor(Here { after, .. })
            | Command::Devices(Here { after, .. })
            | Command::Completions(Here { after, .. })
            | Command::Man(Here { after, .. }) => return After { json: after.json, ..After::default() },
        };
        let ClientOptions { server, tenant, json } = client;
        After { is_client: true, server: server.as_ref(), tenant: tenant.as_ref(), json: *json }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn options_after_the_command_win() {
        let global = |args: &[&str]| {
            let matches = command().try_get_matches_from([&["tensor-wasm"], args].concat()).unwrap();
            let cli = Cli::from_arg_matches(&matches).unwrap();
            cli.global().map(|global| (global.server, global.tenant, global.json)).ok()
        };
        let of = |server: &str, tenant: Option<&str>, json| Some((server.to_owned(), tenant.map(str::to_owned), json));
        assert_eq!(global(&["--server", "a:1/", "--json", "functions"]), of("http://a:1", None, true));
        let twice = ["--server", "a", "jobs", "--server", "https://b", "show", "1"];
        assert_eq!(global(&twice), of("https://b", None, false));
        let nested = ["--tenant", "a", "--server", "s", "jobs", "show", "1", "--tenant", "b", "--json"];
        assert_eq!(global(&nested), of("http://s", Some("b"), true));
        assert!(global(&["kernel", "check", "x.wasm", "--json"]).is_some_and(|(.., json)| json));
        // Not for what never asks a server.
        assert_eq!(global(&["--server", "a", "devices"]), None);
    }
}
