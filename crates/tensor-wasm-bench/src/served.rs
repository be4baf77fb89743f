//! Our own server on a GPU, as a process, and a connection to it that is kept.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::peers::Process;

/// The binary that lies beside this one: the server, with the device worker in it.
pub(crate) fn exe() -> anyhow::Result<PathBuf> {
    let exe = std::env::current_exe()?.with_file_name("tensor-wasm");
    ensure!(exe.is_file(), "{} is not there; build it first", exe.display());
    Ok(exe)
}

pub(crate) fn serve(exe: &Path, data: &Path) -> anyhow::Result<Process> {
    let mut child = Command::new(exe)
        .args(["serve", "--addr", "127.0.0.1:0", "--device", "cuda:0", "--data-dir"])
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
    anyhow::bail!("our server did not start")
}

/// Deploys a file under a name, for a tenant, with the device.
pub(crate) fn deploy(exe: &Path, addr: &str, tenant: &str, name: &str, file: &Path) -> anyhow::Result<()> {
    let status = Command::new(exe)
        .args(["--server", &format!("http://{addr}"), "--tenant", tenant, "deploy"])
        .arg(file)
        .args(["--name", name, "--gpu"])
        .status()?;
    ensure!(status.success(), "deploying {name} for {tenant} failed");
    Ok(())
}

/// A connection that is kept.
pub(crate) struct Client {
    addr: String,
    stream: BufReader<TcpStream>,
}

impl Client {
    pub(crate) fn connect(addr: &str) -> anyhow::Result<Client> {
        let stream = TcpStream::connect(addr)?;
        stream.set_nodelay(true)?;
        Ok(Client { addr: addr.to_owned(), stream: BufReader::new(stream) })
    }

    /// What an export returns.
    pub(crate) fn call(&mut self, tenant: &str, name: &str, export: &str, args: &Value) -> anyhow::Result<Value> {
        let body = json!({ "export": export, "args": args }).to_string();
        let request = format!(
            "POST /functions/{name}/invoke HTTP/1.1\r\nHost: {}\r\nX-TensorWasm-Tenant: {tenant}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.addr,
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let is_ok = line.contains(" 200 ");
        let mut length = 0;
        loop {
            line.clear();
            self.stream.read_line(&mut line)?;
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let mut answer = vec![0; length];
        self.stream.read_exact(&mut answer)?;
        ensure!(is_ok, "{}", String::from_utf8_lossy(&answer));
        let answer: Value = serde_json::from_slice(&answer)?;
        Ok(answer.get("result").context("an answer without a result")?.clone())
    }
}
