//! Says which commit is built, for `tensor_wasm_build_info`: `TENSOR_WASM_GIT_SHA` where the environment has it (a
//! build from an archive), else what git says, with `-dirty` for a tree that differs from its commit, else `unknown`.

use std::process::Command;

/// Digits of a commit: enough to be unique in any repository.
const SHA_DIGITS: usize = 12;

/// What is linked into one binary with this crate; a change there may make a clean tree dirty.
const WATCHED: [&str; 7] = [
    "src",
    "../tensor-wasm-cli/src",
    "../tensor-wasm-exec/src",
    "../tensor-wasm-launch/src",
    "../tensor-wasm-gpu/src",
    "../tensor-wasm-jit/src",
    "../tensor-wasm-tensor/src",
];

fn main() {
    println!("cargo::rerun-if-env-changed=TENSOR_WASM_GIT_SHA");
    let given = std::env::var("TENSOR_WASM_GIT_SHA").ok().filter(|sha| !sha.is_empty());
    let sha = given.or_else(commit).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=TENSOR_WASM_GIT_SHA={sha}");
}

fn commit() -> Option<String> {
    // The log of HEAD changes with every commit. Not the index: `git status` writes it.
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", name])?;
        if std::path::Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    WATCHED.iter().for_each(|path| println!("cargo::rerun-if-changed={path}"));
    let sha = git(&["rev-parse", &format!("--short={SHA_DIGITS}"), "HEAD"])?;
    let is_dirty = git(&["--no-optional-locks", "status", "--porcelain", "--untracked-files=no"])
        .is_some_and(|changes| !changes.is_empty());
    Some(if is_dirty { format!("{sha}-dirty") } else { sha })
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
