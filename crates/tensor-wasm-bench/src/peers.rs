//! The peers, installed into `bench-cache/` on first use, and our own server as a process.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::report::root;

const WASMTIME: &str = "48.0.8";
const WORKERD: &str = "workerd@1";

/// A server process, killed at the end.
pub(crate) struct Process {
    pub child: Child,
    pub addr: String,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn wasmtime() -> anyhow::Result<PathBuf> {
    let cache = root().join("bench-cache/wasmtime");
    let exe = cache.join("bin/wasmtime");
    if !exe.is_file() {
        println!("installing wasmtime-cli {WASMTIME} into {} (some minutes)", cache.display());
        let status = Command::new("cargo")
            .args(["install", "wasmtime-cli", "--version", WASMTIME, "--locked", "--root"])
            .arg(&cache)
            .status()?;
        ensure!(status.success(), "installing wasmtime-cli failed");
    }
    Ok(exe)
}

pub(crate) fn workerd() -> anyhow::Result<PathBuf> {
    let cache = root().join("bench-cache/workerd");
    let exe = cache.join("node_modules/.bin/workerd");
    if !exe.is_file() {
        println!("installing {WORKERD} into {}", cache.display());
        std::fs::create_dir_all(&cache)?;
        let status =
            Command::new("npm").args(["install", "--no-audit", "--no-fund", WORKERD]).current_dir(&cache).status()?;
        ensure!(status.success(), "installing workerd with npm failed");
    }
    Ok(exe)
}

/// Our binary, as `make build` leaves it.
pub(crate) fn ours() -> anyhow::Result<PathBuf> {
    let exe = root().join("target/release/tensor-wasm");
    ensure!(exe.is_file(), "{} is missing; `make build` builds it", exe.display());
    Ok(exe)
}

pub(crate) fn guest(name: &str) -> anyhow::Result<PathBuf> {
    let path = root().join("target/guests").join(name);
    if !path.is_file() {
        let status = Command::new("cargo").args(["xtask", "guests"]).current_dir(root()).status()?;
        ensure!(status.success(), "building guests failed");
    }
    Ok(path)
}

/// Waits until nothing holds a data directory any more: a runtime's tasks end in their own time.
pub(crate) fn settled(data: &std::path::Path) -> anyhow::Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    while serve_ours(data).is_err() {
        ensure!(Instant::now() < until, "{} is still in use", data.display());
    }
    Ok(())
}

/// Starts our server on defaults: metrics, tracing, admission and the audit log (to /dev/null) are on.
pub(crate) fn serve_ours(data: &std::path::Path) -> anyhow::Result<Process> {
    let mut child = Command::new(ours()?)
        .args(["serve", "--addr", "127.0.0.1:0", "--data-dir"])
        .arg(data)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(child.stderr.take().context("stderr")?).lines();
    for line in lines.by_ref() {
        if let Some(rest) = line?.strip_prefix("listening on http://") {
            let addr = rest.split(' ').next().unwrap_or_default().to_owned();
            std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
            return Ok(Process { child, addr });
        }
    }
    bail!("our server did not start")
}

pub(crate) fn serve_wasmtime(guest: &std::path::Path) -> anyhow::Result<Process> {
    let addr = free_addr()?;
    let child = Command::new(wasmtime()?)
        .args(["serve", "-S", "cli", "-O", "pooling-allocator=y", "--addr", &addr])
        .arg(guest)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    ready(Process { child, addr })
}

pub(crate) fn serve_workerd(dir: &std::path::Path) -> anyhow::Result<Process> {
    let addr = free_addr()?;
    let script = "export default { fetch() { return new Response('Hello from workerd!\\n'); } };\n";
    std::fs::write(dir.join("hello.js"), script)?;
    let config = format!(
        "using Workerd = import \"/workerd/workerd.capnp\";\n\
         const config :Workerd.Config = (services = [(name = \"main\", worker = .hello)],\n\
           sockets = [(name = \"http\", address = \"{addr}\", http = (), service = \"main\")]);\n\
         const hello :Workerd.Worker = (modules = [(name = \"hello.js\", esModule = embed \"hello.js\")],\n\
           compatibilityDate = \"2024-09-01\");\n"
    );
    let path = dir.join("hello.capnp");
    std::fs::write(&path, config)?;
    let child = Command::new(workerd()?).arg("serve").arg(&path).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    ready(Process { child, addr })
}

fn free_addr() -> anyhow::Result<String> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

fn ready(process: Process) -> anyhow::Result<Process> {
    let until = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(&process.addr).is_err() {
        ensure!(Instant::now() < until, "{} did not start", process.addr);
        std::thread::yield_now();
    }
    Ok(process)
}
