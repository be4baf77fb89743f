//! `make run`: the main job end to end on embedded defaults. Starts the real server in a temporary directory, deploys
//! four functions through the real client, calls each and prints a table; then leaves the server running.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};

use crate::{guests, root, target};

/// Calls per example; the table shows the first (cold) and the median of all.
const CALLS: usize = 200;

struct Example {
    name: &'static str,
    file: &'static str,
    what: &'static str,
    path: &'static str,
    body: Option<&'static str>,
    expect: &'static str,
}

const EXAMPLES: [Example; 4] = [
    Example {
        name: "hello",
        file: "hello.wasm",
        what: "wasi:http handler",
        path: "/run/hello/",
        body: None,
        expect: "Hello from TensorWasm!",
    },
    Example {
        name: "shapes",
        file: "typed.wasm",
        what: "component, typed exports",
        path: "/functions/shapes/invoke",
        body: Some(r#"{"export":"area","args":[{"rect":[6,7]}]}"#),
        expect: "\"result\":42.0",
    },
    Example {
        name: "math",
        file: "math.wasm",
        what: "core module",
        path: "/functions/math/invoke",
        body: Some(r#"{"export":"fib","args":[50]}"#),
        expect: "\"result\":12586269025",
    },
    Example {
        name: "gpu",
        file: "gpu-examples.wasm",
        what: "component, its own kernel",
        path: "/functions/gpu/invoke",
        body: Some(r#"{"export":"saxpy","args":[2.0,[1,2,3],[10,20,30]]}"#),
        expect: "[12.0,24.0,36.0]",
    },
];

/// The server, stopped when the demo ends however it ends.
struct Server {
    child: Child,
    addr: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn run() -> anyhow::Result<()> {
    guests::build()?;
    let exe = target().join("release/tensor-wasm");
    ensure!(exe.is_file(), "{} is missing; `make run` builds it", exe.display());
    let data = std::env::temp_dir().join(format!("tensor-wasm-demo-{}", std::process::id()));
    let result = demo(&exe, &data);
    let _ = std::fs::remove_dir_all(&data);
    result
}

fn demo(exe: &Path, data: &Path) -> anyhow::Result<()> {
    let mut server = start(exe, data)?;
    println!("server at http://{} with data in {}\n", server.addr, data.display());
    let mut rows = Vec::new();
    for example in &EXAMPLES {
        let file = root().join("target/guests").join(example.file);
        let started = Instant::now();
        deploy(exe, &server.addr, &file, example.name)?;
        let deploy_ms = started.elapsed().as_secs_f64() * 1e3;
        let mut connection = Connection::open(&server.addr)?;
        let mut times_us = Vec::with_capacity(CALLS);
        let mut answer = String::new();
        for _ in 0..CALLS {
            let started = Instant::now();
            answer = connection.call(example.path, example.body)?;
            times_us.push(started.elapsed().as_secs_f64() * 1e6);
            ensure!(answer.contains(example.expect), "{}: unexpected answer {answer}", example.name);
        }
        let first_us = times_us[0];
        times_us.sort_by(f64::total_cmp);
        rows.push((example, deploy_ms, first_us, times_us[CALLS / 2], times_us[CALLS * 99 / 100], shown(&answer)));
    }
    println!(
        "{:<8} {:<26} {:>10} {:>11} {:>11} {:>10}  result",
        "function", "kind", "deploy ms", "first µs", "median µs", "p99 µs"
    );
    for (example, deploy_ms, first, median, p99, result) in rows {
        println!(
            "{:<8} {:<26} {deploy_ms:>10.0} {first:>11.0} {median:>11.0} {p99:>10.0}  {result}",
            example.name, example.what
        );
    }
    println!("\n{CALLS} calls each over one connection, every answer checked.");
    // Nobody is there to try anything.
    if std::env::var("CI").is_ok_and(|ci| ci == "true") {
        return Ok(());
    }
    println!("Try:  curl http://{}/run/hello/", server.addr);
    println!("      {} --server http://{} functions", exe.display(), server.addr);
    println!("      {} --server http://{} invoke gpu --export device", exe.display(), server.addr);
    println!("      open http://{}/ in a browser", server.addr);
    println!("\nCtrl-C stops the server.");
    std::io::stdout().flush()?;
    // Ctrl-C reaches the server too, which drains and exits.
    server.child.wait()?;
    Ok(())
}

fn start(exe: &Path, data: &Path) -> anyhow::Result<Server> {
    let mut child = Command::new(exe)
        .args(["serve", "--addr", "127.0.0.1:0", "--data-dir"])
        .arg(data)
        .env("TENSOR_WASM_API_AUDIT_LOG", "none")
        .env("TENSOR_WASM_LOG", "error")
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| exe.display().to_string())?;
    let mut lines = BufReader::new(child.stderr.take().context("stderr")?).lines();
    for line in lines.by_ref() {
        let line = line?;
        if let Some(rest) = line.strip_prefix("listening on http://") {
            let addr = rest.split(' ').next().unwrap_or_default().to_owned();
            std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("server: {line}")));
            return Ok(Server { child, addr });
        }
        eprintln!("server: {line}");
    }
    bail!("the server did not start")
}

fn deploy(exe: &Path, addr: &str, file: &PathBuf, name: &str) -> anyhow::Result<()> {
    let server = format!("http://{addr}");
    let status = Command::new(exe)
        .args(["--server", &server, "deploy"])
        .arg(file)
        // What may use the GPU is said for each function.
        .args(["--name", name])
        .args((name == "gpu").then_some("--gpu"))
        .stdout(Stdio::null())
        .status()?;
    ensure!(status.success(), "deploying {name} failed");
    Ok(())
}

/// Just enough HTTP to time a call without a client's start-up in it.
struct Connection {
    addr: String,
    stream: BufReader<TcpStream>,
}

impl Connection {
    fn open(addr: &str) -> anyhow::Result<Connection> {
        let stream = TcpStream::connect(addr)?;
        stream.set_nodelay(true)?;
        Ok(Connection { addr: addr.to_owned(), stream: BufReader::new(stream) })
    }

    fn call(&mut self, path: &str, body: Option<&str>) -> anyhow::Result<String> {
        let method = if body.is_some() { "POST" } else { "GET" };
        let body = body.unwrap_or("");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.addr,
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        let (mut length, mut chunked) = (0, false);
        loop {
            let mut line = String::new();
            ensure!(self.stream.read_line(&mut line)? > 0, "the server closed the connection");
            let line = line.trim_end().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.parse()?;
            }
            chunked |= line == "transfer-encoding: chunked";
        }
        let mut content = Vec::new();
        while chunked {
            let mut size = String::new();
            self.stream.read_line(&mut size)?;
            let size = usize::from_str_radix(size.trim_end(), 16)?;
            let mut piece = vec![0; size + 2];
            self.stream.read_exact(&mut piece)?;
            content.extend_from_slice(&piece[..size]);
            chunked = size > 0;
        }
        let mut rest = vec![0; length];
        self.stream.read_exact(&mut rest)?;
        content.extend(rest);
        Ok(String::from_utf8(content)?)
    }
}

/// The interesting part of an answer, on one line.
fn shown(answer: &str) -> String {
    let parsed: Option<serde_json::Value> = serde_json::from_str(answer).ok();
    parsed.map_or_else(|| answer.trim().to_owned(), |json| json["result"].to_string())
}
