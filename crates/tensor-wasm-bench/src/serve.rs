//! Requests per second and tail latency of a hello, loaded with `wrk` from one thread of this machine.

use std::process::Command;

use anyhow::{Context, ensure};

use crate::peers::{self, Process};
use crate::report::{Goal, Report, median};

const CONNECTIONS: [u32; 3] = [1, 16, 64];

#[derive(Default)]
struct Samples {
    per_second: Vec<f64>,
    p99_us: Vec<f64>,
}

impl Samples {
    fn add(&mut self, (per_second, p99_us): (f64, f64)) {
        self.per_second.push(per_second);
        self.p99_us.push(p99_us);
    }
}

pub(crate) fn compare(seconds: u32, rounds: usize) -> anyhow::Result<()> {
    let (data, scratch) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let guest = peers::guest("hello.wasm")?;
    let ours = peers::serve_ours(data.path())?;
    deploy(&ours, &guest, "hello", &[])?;
    deploy(&ours, &guest, "hello-reuse", &["--reuse"])?;
    let wasmtime = peers::serve_wasmtime(&guest)?;
    let workerd = peers::serve_workerd(scratch.path())?;
    let sides = [
        format!("http://{}/run/hello/", ours.addr),
        format!("http://{}/", wasmtime.addr),
        format!("http://{}/run/hello-reuse/", ours.addr),
        format!("http://{}/", workerd.addr),
    ];
    for url in &sides {
        wrk(url, 4, 1).with_context(|| url.clone())?;
    }
    let mut report = Report::new("serve");
    for connections in CONNECTIONS {
        let mut samples: [Samples; 4] = Default::default();
        for round in 0..rounds {
            // Interleaved, and starting with another side each round.
            for at in 0..sides.len() {
                let side = (at + round) % sides.len();
                samples[side].add(wrk(&sides[side], connections, seconds)?);
            }
        }
        let [fresh, wasmtime, reused, workerd] = samples.map(|s| (median(s.per_second), median(s.p99_us)));
        let (rate_goal, p99_goal) = match connections {
            1 => (1.2, None),
            _ => (2.0, Some(0.7)),
        };
        let id = |what: &str| format!("serve/{what}/{connections}");
        report.ratio(
            &id("hello_per_second"),
            "wasi:http hello, a fresh instance per request",
            fresh.0,
            (wasmtime.0, "wasmtime serve"),
            "requests/s",
            Goal::AtLeast(rate_goal),
        );
        // At one connection no goal was set for the tail; being no worse is the natural one.
        report.ratio(
            &id("hello_p99"),
            "the same, 99th percentile",
            fresh.1,
            (wasmtime.1, "wasmtime serve"),
            "µs",
            Goal::AtMost(p99_goal.unwrap_or(1.0)),
        );
        report.ratio(
            &id("reuse_per_second"),
            "wasi:http hello, instances reused, against a JavaScript hello",
            reused.0,
            (workerd.0, "workerd"),
            "requests/s",
            Goal::AtLeast(2.0),
        );
    }
    report.save()
}

fn deploy(server: &Process, guest: &std::path::Path, name: &str, flags: &[&str]) -> anyhow::Result<()> {
    let status = Command::new(peers::ours()?)
        .args(["--server", &format!("http://{}", server.addr), "deploy"])
        .arg(guest)
        .args(["--name", name])
        .args(flags)
        .status()?;
    ensure!(status.success(), "deploying failed");
    Ok(())
}

/// Requests per second and p99 in microseconds; fails if any response was not a success.
fn wrk(url: &str, connections: u32, seconds: u32) -> anyhow::Result<(f64, f64)> {
    let output = Command::new("wrk")
        .args(["-t1", &format!("-c{connections}"), &format!("-d{seconds}s"), "--latency", url])
        .output()
        .context("wrk is needed (Debian package wrk)")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success() && !text.contains("Non-2xx") && !text.contains("Socket errors"), "{text}");
    let after = |label: &str| text.lines().find_map(|line| line.trim().strip_prefix(label)).map(str::trim);
    let rate = after("Requests/sec:").and_then(|v| v.parse().ok()).with_context(|| text.clone())?;
    let p99 = after("99%").and_then(microseconds).with_context(|| text.clone())?;
    Ok((rate, p99))
}

fn microseconds(text: &str) -> Option<f64> {
    let split = text.find(|c: char| c.is_ascii_alphabetic())?;
    let value: f64 = text[..split].parse().ok()?;
    match &text[split..] {
        "us" => Some(value),
        "ms" => Some(value * 1e3),
        "s" => Some(value * 1e6),
        _ => None,
    }
}
