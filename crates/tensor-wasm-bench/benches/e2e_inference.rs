//! Over HTTP, one connection, the real server process.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run should stop")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use criterion::{Criterion, criterion_group, criterion_main};

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn request(stream: &mut TcpStream, head: &str, body: &[u8], expect: &str) {
    let fixed = "host: localhost\r\ncontent-type: application/json";
    let head = format!("{head} HTTP/1.1\r\n{fixed}\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut buffer = [0; 16384];
    let read = stream.read(&mut buffer).unwrap();
    let answer = String::from_utf8_lossy(&buffer[..read]);
    assert!(answer.starts_with(expect), "{answer}");
}

fn e2e(c: &mut Criterion) {
    let exe = std::env::current_exe().unwrap();
    let exe = exe.ancestors().find_map(|dir| Some(dir.join("tensor-wasm")).filter(|p| p.is_file()));
    let Some(exe) = exe else {
        eprintln!("skipped: build the binary first (cargo build --release -p tensor-wasm-cli)");
        return;
    };
    let data = tempfile::tempdir().unwrap();
    let mut command = Command::new(exe);
    command.args(["serve", "--addr", "127.0.0.1:0", "--data-dir"]).arg(data.path());
    command.env("TENSOR_WASM_API_AUDIT_LOG", "none").stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    let _server = Server(child);
    let mut lines = stderr.lines().map_while(Result::ok);
    let addr =
        lines.find_map(|l| l.strip_prefix("listening on http://").map(|r| r.split(' ').next().unwrap().to_owned()));
    std::thread::spawn(move || lines.for_each(drop));
    let mut stream = TcpStream::connect(addr.unwrap()).unwrap();
    stream.set_nodelay(true).unwrap();
    c.bench_function("e2e/healthz/get", |b| b.iter(|| request(&mut stream, "GET /healthz", b"", "HTTP/1.1 200")));
    let wasm = wat::parse_str("(module (func (export \"f\")))").unwrap();
    let deploy = "POST /functions?name=f HTTP/1.1\r\ncontent-type: application/wasm";
    c.bench_function("e2e/create_function/post", |b| {
        b.iter(|| {
            let head = format!("{deploy}\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", wasm.len());
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&wasm).unwrap();
            let mut buffer = [0; 16384];
            let read = stream.read(&mut buffer).unwrap();
            assert!(buffer[..read].starts_with(b"HTTP/1.1 201"));
        });
    });
    c.bench_function("e2e/invoke_not_found/post", |b| {
        b.iter(|| request(&mut stream, "POST /functions/nobody/invoke", b"{}", "HTTP/1.1 404"));
    });
}

criterion_group!(benches, e2e);
criterion_main!(benches);
