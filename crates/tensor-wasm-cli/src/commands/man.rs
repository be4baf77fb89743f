use std::path::PathBuf;
use std::process::ExitCode;

use crate::output::{outln, write};
use crate::{Ended, Failed, cli};

/// Print a manual page, or write those of all commands to a folder.
///
/// To read one: tensor-wasm man deploy | man -l -
#[derive(clap::Args)]
pub(crate) struct Man {
    /// The command whose page to print; without one, the page of tensor-wasm itself.
    #[arg(value_name = "COMMAND")]
    of: Option<String>,
    /// Write the pages of all commands to this folder, as tensor-wasm.1, tensor-wasm-deploy.1 and so on.
    #[arg(long, value_name = "DIR", conflicts_with = "of")]
    dir: Option<PathBuf>,
}

/// `help` and what it can be asked have no pages: each would say what another page says.
fn without_help_command(command: clap::Command) -> clap::Command {
    command.disable_help_subcommand(true).mut_subcommands(without_help_command)
}

impl Man {
    pub(crate) fn execute(self) -> Ended {
        let mut command = without_help_command(cli::command());
        command.build();
        if let Some(dir) = self.dir {
            let wrong = |e: std::io::Error| Failed::Usage(format!("--dir {}: {e}", dir.display()));
            std::fs::create_dir_all(&dir).map_err(wrong)?;
            clap_mangen::generate_to(command, &dir).map_err(wrong)?;
            outln!("wrote the manual to {0}; read it with: man {0}/tensor-wasm.1", dir.display());
            return Ok(ExitCode::SUCCESS);
        }
        let command = match &self.of {
            None => command,
            Some(name) => {
                let found = command.find_subcommand(name).filter(|command| !command.is_hide_set()).cloned();
                let unknown = || Failed::Usage(format!("there is no command {name:?}; see tensor-wasm --help"));
                found.ok_or_else(unknown)?
            }
        };
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page).map_err(|e| Failed::No(e.to_string()))?;
        write(format_args!("{}", String::from_utf8_lossy(&page)));
        Ok(ExitCode::SUCCESS)
    }
}
