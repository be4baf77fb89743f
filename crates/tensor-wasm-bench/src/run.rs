//! `tensor-wasm run` against `wasmtime run` on a CPU-bound program: whole processes, interleaved, medians. Start and compile
//! are included; `wasmtime run` keeps a cache of compiled modules and we do not, which costs us some 50 ms here.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::ensure;

use crate::peers;
use crate::report::{Goal, Report, median};

const ROUNDS: usize = 9;
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
        "a sieve in a core module, process start and compile included",
        median(us),
        (median(them), "wasmtime run"),
        "s",
        Goal::AtMost(1.03),
    );
    report.save()
}
