//! `tensor-wasm run` against `wasmtime run` on a CPU-bound program: whole processes, interleaved, medians. Start is
//! included; both keep a cache of compiled modules.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::ensure;

use crate::peers;
use crate::report::{Goal, Report, median};

const ROUNDS: usize = 9;
const STARTS: usize = 41;
/// Primes below this: some seconds of arithmetic and memory.
const LIMIT: &str = "200000000";

pub(crate) fn compare() -> anyhow::Result<()> {
    let (ours, theirs, guest) = (peers::ours()?, peers::wasmtime()?, peers::guest("command-p1.wasm")?);
    let time = |exe: &std::path::Path| {
        let started = Instant::now();
        let output = Command::new(exe).arg("run").arg(&guest).args(["primes", LIMIT]).stderr(Stdio::null()).output()?;
        ensure!(output.status.success() && output.stdout == b"11078937\n", "{} gave a wrong answer", exe.display());
        Ok(started.elapsed().as_secs_f64())
    };
    let (mut us, mut them) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        us.push(time(&ours)?);
        them.push(time(&theirs)?);
    }
    let mut report = Report::new("run");
    report.ratio(
        "run/primes",
        "a sieve in a core module, process start included",
        median(us),
        (median(them), "wasmtime run"),
        "s",
        Goal::AtMost(1.03),
    );
    let (mut us, mut them) = (Vec::new(), Vec::new());
    let start = |exe: &std::path::Path| {
        let started = Instant::now();
        let output = Command::new(exe).arg("run").arg(&guest).args(["args", "x"]).output()?;
        ensure!(output.status.success() && output.stdout == b"x\n", "{} gave a wrong answer", exe.display());
        Ok(started.elapsed().as_secs_f64() * 1e3)
    };
    for _ in 0..STARTS {
        us.push(start(&ours)?);
        them.push(start(&theirs)?);
    }
    // No goal was set; the same, give or take what process start varies by, is the natural one.
    report.ratio(
        "run/start",
        "a command that prints one word, its code in the cache",
        median(us),
        (median(them), "wasmtime run"),
        "ms",
        Goal::AtMost(1.05),
    );
    report.save()
}
