//! Chores of the workspace, run as `cargo xtask NAME`.

#![expect(clippy::print_stdout, reason = "a chore reports on stdout")]

mod demo;
mod deny;
mod guests;
mod ptxas;
mod results;
mod tidy;

use std::path::PathBuf;

use clap::Parser;

#[derive(Parser)]
#[command(about = "Chores of the workspace")]
enum Chore {
    /// Build the guests of tests, examples and benchmarks for wasm32, into target/guests.
    Guests,
    /// Install NVIDIA's assembler into target/ptxas, from the Python package index. Without Python it is left out.
    Ptxas,
    /// Start a server, deploy four examples, call each, print a table; then serve until Ctrl-C.
    Demo,
    /// Check that the papers match the code, and the code its own rules.
    Tidy,
    /// Check licences, bans and sources of all dependencies against deny.toml.
    Deny,
    /// Print every result file under bench-results/ as one table, shortfalls first.
    Results {
        /// As the table of docs/PERFORMANCE.md.
        #[arg(long)]
        markdown: bool,
    },
}

fn main() -> anyhow::Result<()> {
    match Chore::parse() {
        Chore::Guests => guests::build(),
        Chore::Ptxas => ptxas::install(),
        Chore::Demo => demo::run(),
        Chore::Tidy => tidy::check(),
        Chore::Deny => deny::check(),
        Chore::Results { markdown: false } => results::print(),
        Chore::Results { markdown: true } => results::markdown(),
    }
}

/// Where cargo puts what it builds.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or(here.clone(), PathBuf::from)
}
