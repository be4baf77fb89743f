use std::process::ExitCode;

use clap_complete::Shell;

use crate::output::write;
use crate::{Ended, cli};

/// Print a completion script for a shell
///
/// For bash, into a file that it reads at its next start:
///
///   tensor-wasm completions bash > ~/.local/share/bash-completion/completions/tensor-wasm
///
/// For zsh, into a file named _tensor-wasm in a folder of $fpath; for fish, into
/// ~/.config/fish/completions/tensor-wasm.fish.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Completions {
    /// The shell.
    shell: Shell,
}

impl Completions {
    pub(crate) fn execute(self) -> Ended {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut cli::command(), "tensor-wasm", &mut script);
        write(format_args!("{}", String::from_utf8_lossy(&script)));
        Ok(ExitCode::SUCCESS)
    }
}
