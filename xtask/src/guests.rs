//! Builds the guests: Rust ones for wasm32 targets, text ones by the `wat` crate.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

use crate::root;

/// What is built for which target, and the name it gets under target/guests.
const BUILT: [(&str, &str, &str); 18] = [
    ("wasm32-wasip2", "hello.wasm", "hello.wasm"),
    ("wasm32-wasip2", "http_lab.wasm", "http-lab.wasm"),
    ("wasm32-wasip2", "typed.wasm", "typed.wasm"),
    ("wasm32-wasip2", "hello_p3.wasm", "hello-p3.wasm"),
    ("wasm32-wasip2", "command.wasm", "command.wasm"),
    ("wasm32-wasip2", "command-p3.wasm", "command-p3.wasm"),
    ("wasm32-wasip2", "net.wasm", "net.wasm"),
    ("wasm32-wasip1", "command.wasm", "command-p1.wasm"),
    ("wasm32-unknown-unknown", "kernels.wasm", "kernels.wasm"),
    ("wasm32-unknown-unknown", "example_kernels.wasm", "example-kernels.wasm"),
    ("wasm32-wasip2", "gpu_examples.wasm", "gpu-examples.wasm"),
    ("wasm32-wasip2", "gpu_images.wasm", "gpu-images.wasm"),
    ("wasm32-wasip2", "gpu_hostile.wasm", "gpu-hostile.wasm"),
    ("wasm32-wasip2", "tensor_examples.wasm", "tensor-examples.wasm"),
    ("wasm32-wasip2", "tensor_hostile.wasm", "tensor-hostile.wasm"),
    ("wasm32-wasip2", "classify.wasm", "classify.wasm"),
    ("wasm32-wasip2", "generate.wasm", "generate.wasm"),
    ("wasm32-unknown-unknown", "gpu_saxpy_core.wasm", "gpu-saxpy-core.wasm"),
];

/// How each is built: a command of cargo, the target, and the rest. Kernels come first: other guests have them inside.
const BUILDS: [(&str, &str, &[&str]); 5] = [
    ("build", "wasm32-unknown-unknown", &["--package", "kernels"]),
    // Atomic operations of Rust are plain ones without this. Only this package is compiled with it.
    ("rustc", "wasm32-unknown-unknown", &["--package", "example-kernels", "--", "-C", "target-feature=+atomics"]),
    ("build", "wasm32-wasip2", &[]),
    ("build", "wasm32-wasip1", &["--package", "command"]),
    ("build", "wasm32-unknown-unknown", &["--package", "gpu-saxpy-core"]),
];

pub(crate) fn build() -> anyhow::Result<()> {
    let (guests, output) = (root().join("guests"), root().join("target/guests"));
    std::fs::create_dir_all(&output)?;
    for (command, target, rest) in BUILDS {
        install(target)?;
        cargo(&guests, &[&[command, "--release", "--locked", "--target", target], rest].concat())?;
    }
    for (target, built, name) in BUILT {
        let from = guests.join("target").join(target).join("release").join(built);
        std::fs::copy(&from, output.join(name)).with_context(|| from.display().to_string())?;
    }
    for text in std::fs::read_dir(guests.join("wat"))? {
        let text = text?.path();
        let binary = wat::parse_file(&text).with_context(|| text.display().to_string())?;
        let name = text.file_stem().unwrap_or_default();
        std::fs::write(output.join(name).with_extension("wasm"), binary)?;
    }
    println!("guests are in {}", output.display());
    Ok(())
}

/// Adds a target, where rustup has it not yet. Without rustup the toolchain must come with it.
fn install(target: &str) -> anyhow::Result<()> {
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).output().context("rustc")?;
    let sysroot = String::from_utf8(sysroot.stdout)?;
    if Path::new(sysroot.trim()).join("lib/rustlib").join(target).join("lib").is_dir() {
        return Ok(());
    }
    println!("adding the target {target}");
    let added = Command::new("rustup").args(["target", "add", target]).status();
    match added {
        Ok(status) if status.success() => Ok(()),
        _ => bail!("the target {target} is missing; install it with `rustup target add {target}`"),
    }
}

fn cargo(dir: &Path, args: &[&str]) -> anyhow::Result<()> {
    // The outer cargo's settings are for the host.
    let status = Command::new("cargo")
        .args(args)
        .current_dir(dir)
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()
        .context("cargo")?;
    if !status.success() {
        bail!("cargo {} failed in {}", args.join(" "), dir.display());
    }
    Ok(())
}
