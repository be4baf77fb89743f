//! Starting: a server with many functions deployed, its first answers, and what idle functions cost.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use tensor_wasm_exec::{Call, Config, Invocation, Runtime};

use crate::peers::{self, Process};
use crate::report::{Goal, Report, median};

const STARTS: usize = 11;
const LOOKUPS: usize = 200_000;

pub(crate) fn compare() -> anyhow::Result<()> {
    let mut report = Report::new("cold");
    let hello = std::fs::read(peers::guest("hello.wasm")?)?;

    let data = tempfile::tempdir()?;
    fill(data.path(), 1_000, &hello)?;
    peers::settled(data.path())?;
    let (mut start_ms, mut first_ms) = (Vec::new(), Vec::new());
    for round in 0..STARTS {
        let started = Instant::now();
        let server = peers::serve_ours(data.path())?;
        let mut connection = TcpStream::connect(&server.addr)?;
        connection.set_nodelay(true)?;
        ensure!(call(&mut connection, "GET", "/healthz", "")?.contains("200 OK"), "not healthy");
        start_ms.push(started.elapsed().as_secs_f64() * 1e3);
        let called = Instant::now();
        let answer = call(&mut connection, "GET", "/run/hello/", "")?;
        first_ms.push(called.elapsed().as_secs_f64() * 1e3);
        ensure!(answer.contains("Hello from TensorWasm!"), "{answer}");
        let called = Instant::now();
        let body = r#"{"export":"which"}"#;
        let answer = call(&mut connection, "POST", &format!("/functions/f{}/invoke", round * 17), body)?;
        first_ms.push(called.elapsed().as_secs_f64() * 1e3);
        ensure!(answer.contains("\"result\":"), "{answer}");
    }
    let what = "process start to the first answer, 1,000 functions deployed, files in the page cache";
    report.bound("cold/start_1000_functions", what, median(start_ms), "ms", Goal::AtMost(300.0));
    let slowest = first_ms.iter().copied().fold(0.0, f64::max);
    let what = "first call of a function after a start, median of 22";
    report.bound("cold/first_call", what, median(first_ms), "ms", Goal::AtMost(5.0));
    let what = "the slowest of the same 22";
    report.bound("cold/first_call_slowest", what, slowest, "ms", Goal::AtMost(5.0));

    let few = tempfile::tempdir()?;
    fill(few.path(), 100, &hello)?;
    let many = tempfile::tempdir()?;
    fill(many.path(), 10_000, &hello)?;
    peers::settled(few.path())?;
    peers::settled(many.path())?;
    let (few_ns, many_ns) = lookups(few.path(), many.path())?;
    let what = "resolving a function by name, 10,000 deployed, against 100 deployed";
    report.ratio("cold/lookup_10000", what, many_ns, (few_ns, "100 functions"), "ns", Goal::AtMost(1.5));

    peers::settled(many.path())?;
    let empty = tempfile::tempdir()?;
    let base = resident_kib(&peers::serve_ours(empty.path())?)?;
    let server = peers::serve_ours(many.path())?;
    let idle = (resident_kib(&server)? - base) / 10_000.0;
    let what = "resident memory per idle function, 10,000 deployed";
    report.bound("cold/resident_per_function", what, idle, "KiB", Goal::AtMost(64.0));
    report.save()
}

/// Deploys functions of distinct content through the library, which is quicker than over HTTP and ends with the same
/// files.
fn fill(data: &Path, functions: usize, hello: &[u8]) -> anyhow::Result<()> {
    let mut config = Config::default();
    config.limits.functions_max = usize::MAX;
    let (runtime, _) = Runtime::open(data, config, Some(peers::ours()?))?;
    let threads = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    threads.block_on(async {
        let deploy = async |name: String, wasm: Vec<u8>| {
            let deployed = runtime.deploy_bytes("default", &name, &wasm, Default::default()).await;
            deployed.map(drop).map_err(|failure| anyhow::anyhow!("{failure}"))
        };
        deploy("hello".to_owned(), hello.to_vec()).await?;
        for n in 0..functions {
            // Distinct contents up to a thousand; beyond, names share them, as versions of one template would.
            let n_content = n % 1_000;
            let wasm =
                wat::parse_str(format!(r#"(module (func (export "which") (result i32) i32.const {n_content}))"#))?;
            deploy(format!("f{n}"), wasm).await?;
        }
        runtime.drain(std::time::Duration::from_secs(1)).await;
        anyhow::Ok(())
    })
}

/// Median time of resolving a name with few and with many functions, interleaved.
fn lookups(few: &Path, many: &Path) -> anyhow::Result<(f64, f64)> {
    let open = |data| anyhow::Ok(Runtime::open(data, Config::default(), None)?.0);
    let (few, many) = (open(few)?, open(many)?);
    let time = |runtime: &Runtime, functions: usize| {
        let names: Vec<String> = (0..functions).map(|n| format!("f{n}")).collect();
        let started = Instant::now();
        for n in 0..LOOKUPS {
            let name = &names[n.wrapping_mul(7919) % functions];
            assert!(std::hint::black_box(runtime.catalog.resolve("default", name)).is_ok());
        }
        started.elapsed().as_secs_f64() * 1e9 / LOOKUPS as f64
    };
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for _ in 0..15 {
        a.push(time(&few, 100));
        // The same number of distinct names, so that the processor's caches see the same working set.
        b.push(time(&many, 100));
    }
    let check = Invocation {
        id: 1,
        tenant: "default".to_owned(),
        function: "f9999".to_owned(),
        call: Call::Export { export: None, args: serde_json::Value::Null, stdin: Default::default() },
        deadline: None,
    };
    let threads = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = threads.block_on(many.invoke(check)).map_err(|failure| anyhow::anyhow!("{failure}"))?;
    ensure!(matches!(outcome.output, tensor_wasm_exec::Output::Value(ref v) if *v == 999), "the last function answers");
    // Draining is what ends a runtime: its workers hold it until then.
    threads
        .block_on(async { (few.drain(std::time::Duration::ZERO).await, many.drain(std::time::Duration::ZERO).await) });
    Ok((median(a), median(b)))
}

fn resident_kib(server: &Process) -> anyhow::Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

fn call(connection: &mut TcpStream, method: &str, path: &str, body: &str) -> anyhow::Result<String> {
    let head = "host: localhost\r\ncontent-type: application/json";
    let request = format!("{method} {path} HTTP/1.1\r\n{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    connection.write_all(request.as_bytes())?;
    let mut answer = vec![0; 65536];
    let mut length = 0;
    loop {
        let read = connection.read(&mut answer[length..])?;
        ensure!(read > 0, "the server hung up");
        length += read;
        let text = String::from_utf8_lossy(&answer[..length]);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        // A guest that is slow to finish, as on a first call, is streamed.
        let is_whole = match head.lines().find_map(|l| l.strip_prefix("content-length: ")) {
            Some(expected) => body.len() >= expected.parse()?,
            None => body.ends_with("0\r\n\r\n"),
        };
        if is_whole {
            return Ok(text.into_owned());
        }
    }
}
