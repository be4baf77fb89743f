//! Installs NVIDIA's assembler, with which the tests of the kernel compiler check what it emits. It needs no GPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::bail;

use crate::root;

/// The package that carries it. Newer ones drop older devices.
const PACKAGE: &str = "nvidia-cuda-nvcc>=13,<14";

/// Leaves a link at target/ptxas/ptxas. A machine without Python or without a network goes without: the tests say so.
pub(crate) fn install() -> anyhow::Result<()> {
    let folder = root().join("target/ptxas");
    let link = folder.join("ptxas");
    if link.exists() {
        return Ok(());
    }
    match fetch(&folder) {
        Ok(ptxas) => {
            std::os::unix::fs::symlink(&ptxas, &link)?;
            println!("ptxas is {}", link.display());
        }
        Err(why) => println!("kernels will not be assembled in the tests: {why:#}"),
    }
    Ok(())
}

fn fetch(folder: &Path) -> anyhow::Result<PathBuf> {
    let environment = folder.join("python");
    run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    let pip = environment.join("bin/pip");
    run(Command::new(pip).args(["install", "--quiet", "--disable-pip-version-check", PACKAGE]))?;
    match find(&environment.join("lib"), 8) {
        Some(ptxas) => Ok(ptxas),
        None => bail!("the package {PACKAGE} has no ptxas"),
    }
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => bail!("{}: {status}", command.get_program().display()),
        Err(error) => bail!("{}: {error}", command.get_program().display()),
    }
}

fn find(folder: &Path, depth: usize) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    let own = paths.iter().find(|path| path.file_name().is_some_and(|name| name == "ptxas") && path.is_file());
    own.cloned()
        .or_else(|| paths.iter().filter(|path| path.is_dir() && depth > 0).find_map(|path| find(path, depth - 1)))
}
