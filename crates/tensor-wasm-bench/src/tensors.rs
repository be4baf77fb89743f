//! Tensors on the CPU against NumPy, PyTorch, ndarray, candle and burn: every row measured in turns, all cores, f32.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tensor_wasm_tensor::nn::{Conv2d, Hooked, Linear, Module, Sequential, function};
use tensor_wasm_tensor::{Adam, Convolution, DType, Optimizer, Sgd, Tensor, Variable, grad};

use crate::report::{Goal, Report, root};

/// How long one side of a row is measured in one round: short, so that all sides meet the same neighbours on a machine
/// that is not ours alone.
pub(crate) const SLICE: Duration = Duration::from_millis(60);

type Run = Box<dyn FnMut() -> tensor_wasm_tensor::Result<()>>;

fn random(sizes: &[usize], seed: u64) -> Tensor {
    let tensor = Tensor::uniform(sizes, seed, DType::F32);
    let _ = tensor.realize();
    tensor
}

fn computes(make: impl Fn() -> Tensor + 'static) -> Run {
    Box::new(move || make().realize())
}

/// What is measured of ours, by the names that peers know.
fn ours() -> Vec<(String, Run)> {
    let mut rows: Vec<(String, Run)> = Vec::new();
    for n in [256, 1024, 4096] {
        let (a, b, c) = (random(&[n, n], 1), random(&[n, n], 2), random(&[n, 10], 3));
        let mut row = |name: &str, run: Run| rows.push((format!("{name}/{n}"), run));
        let two = |f: fn(&Tensor, &Tensor) -> Tensor| {
            let (a, b) = (a.clone(), b.clone());
            computes(move || f(&a, &b))
        };
        row("matmul", two(|a, b| a.matmul(b)));
        row("add", two(|a, b| a + b));
        row("sub", two(|a, b| a - b));
        row("mul", two(|a, b| a * b));
        row("div", two(|a, b| a / b));
        row("relu", two(|a, _| a.relu()));
        row("sum", two(|a, _| a.sum(())));
        row("mean", two(|a, _| a.mean(())));
        row("sum_axis0", two(|a, _| a.sum(0)));
        row("sum_axis1", two(|a, _| a.sum(1)));
        row("mean_axis0", two(|a, _| a.mean(0)));
        row("mean_axis1", two(|a, _| a.mean(1)));
        // A view by itself is not computed: the copy is.
        row("transpose", two(|a, _| a.t().contiguous()));
        rows.push((format!("log_softmax/{n}x10"), computes(move || c.log_softmax(1))));
    }
    let (a, b) = (random(&[4096, 4096], 1), random(&[4096, 4096], 2));
    let both = (a.clone(), b.clone());
    rows.push(("chain6/4096".to_owned(), computes(move || ((&both.0 * 2.0 + &both.1) * &both.0 - 1.0).relu() * 0.5)));
    let (x, w) = (random(&[64, 784], 4), random(&[784, 128], 5));
    rows.push(("matmul/64x784x128".to_owned(), computes(move || x.matmul(&w))));
    let (images, filters) = (random(&[32, 1, 28, 28], 6), random(&[16, 1, 5, 5], 7));
    rows.push(("conv2d/32x1x28x28".to_owned(), computes(move || images.conv2d(&filters, Convolution::default()))));
    let maps = random(&[32, 16, 24, 24], 8);
    rows.push(("max_pool2d/32x16x24x24".to_owned(), computes(move || maps.max_pool2d(2))));
    let wide = random(&[4096, 1024], 9);
    let other = wide.clone();
    rows.push(("softmax/4096x1024".to_owned(), computes(move || wide.softmax(1))));
    rows.push(("layer_norm/4096x1024".to_owned(), computes(move || other.layer_norm(1, 1e-5))));
    let one = random(&[], 10);
    rows.push(("scalar".to_owned(), Box::new(move || (&one + 1.0).item::<f32>().map(drop))));
    rows.push(("mlp_step".to_owned(), trainer(mlp(), random(&[64, 784], 11))));
    let pool = || function(|x| x.max_pool2d(2));
    let cnn = Sequential::new()
        .then(Conv2d::new(1, 16, 5, Convolution::default(), 3))
        .then(relu())
        .then(pool())
        .then(Conv2d::new(16, 32, 5, Convolution::default(), 4))
        .then(relu())
        .then(pool())
        .then(function(|x| x.flatten(1)))
        .then(Linear::new(512, 10, 5));
    rows.push(("cnn_step".to_owned(), trainer(cnn, random(&[64, 1, 28, 28], 12))));
    let (weights, gradient) = (Variable::new(&random(&[10_000_000], 13)), random(&[10_000_000], 14));
    let mut adam = Adam::new(std::slice::from_ref(&weights), 0.001);
    rows.push((
        "adam/10M".to_owned(),
        Box::new(move || {
            weights.get().set_grad(Some(gradient.clone()));
            adam.step()
        }),
    ));
    let [q, k, v] = [15, 16, 17].map(|seed| random(&[8, 512, 64], seed));
    rows.push((
        "attention/8x512x64".to_owned(),
        Box::new(move || {
            let [q, k, v] = [&q, &k, &v].map(Tensor::with_grad);
            let gradients = grad(&q.attention(&k, &v, false).sum(()), &[&q, &k, &v])?;
            Tensor::realize_all(&gradients.iter().collect::<Vec<_>>())
        }),
    ));
    rows
}

fn relu() -> impl Module {
    function(|x| x.relu())
}

fn mlp() -> Sequential {
    Sequential::new().then(Linear::new(784, 128, 1)).then(relu()).then(Linear::new(128, 10, 2))
}

fn trainer(model: impl Module + 'static, inputs: Tensor) -> Run {
    let mut optimizer = Sgd::with_momentum(&model.parameters(), 0.01, 0.9, false);
    let targets = (random(&[inputs.shape()[0]], 18) * 10.0).cast(DType::I64);
    let _ = targets.realize();
    Box::new(move || {
        model.forward(&inputs).cross_entropy(&targets).backward()?;
        optimizer.step()
    })
}

/// The median of runs in a slice of time, in nanoseconds.
fn median(run: &mut Run) -> anyhow::Result<f64> {
    run()?;
    let mut times = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < SLICE || times.len() < 3 {
        let one = Instant::now();
        run()?;
        times.push(one.elapsed().as_nanos() as f64);
    }
    Ok(middle(&mut times))
}

pub(crate) fn middle(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A library in a process of its own, which measures what it is asked to.
pub(crate) struct Peer {
    name: &'static str,
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    pub(crate) fn start(name: &'static str, command: &mut Command) -> anyhow::Result<Peer> {
        let mut child = command.arg(name).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let to = child.stdin.take().context("no stdin")?;
        let from = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut peer = Peer { name, child, to, from };
        let ready = peer.line()?;
        ensure!(ready == "ready", "{name} says {ready:?}");
        Ok(peer)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        ensure!(self.from.read_line(&mut line)? > 0, "{} ended", self.name);
        Ok(line.trim().to_owned())
    }

    /// The median of runs in a slice of time, in nanoseconds, if it has that row.
    pub(crate) fn measure(&mut self, row: &str) -> anyhow::Result<Option<f64>> {
        writeln!(self.to, "{row} {}", SLICE.as_millis())?;
        self.to.flush()?;
        let line = self.line()?;
        Ok(if line == "none" { None } else { Some(line.parse()?) })
    }
}

/// NumPy and PyTorch in an environment of their own.
fn python() -> anyhow::Result<PathBuf> {
    let cache = root().join("bench-cache/tensors-python");
    let exe = cache.join("bin/python");
    if !cache.join("installed").is_file() {
        println!("installing numpy and torch into {} (some minutes, some gigabytes)", cache.display());
        let made = Command::new("python3").args(["-m", "venv"]).arg(&cache).status()?;
        ensure!(made.success(), "python3 -m venv failed");
        let installed = Command::new(&exe).args(["-m", "pip", "install", "--quiet", "numpy", "torch"]).status()?;
        ensure!(installed.success(), "pip install numpy torch failed");
        std::fs::write(cache.join("installed"), "")?;
    }
    Ok(exe)
}

/// ndarray, candle and burn in one program, which is no part of the workspace: nobody builds them who does not compare.
fn rust_peers() -> anyhow::Result<PathBuf> {
    let (source, cache) =
        (root().join("crates/tensor-wasm-bench/peers/tensors"), root().join("bench-cache/tensors-rust"));
    println!("building ndarray, candle and burn into {} (some minutes the first time)", cache.display());
    let built = Command::new("cargo")
        .args(["build", "--release", "--locked", "--manifest-path"])
        .arg(source.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&cache)
        .env("RUSTFLAGS", "-C target-cpu=native")
        .status()?;
    ensure!(built.success(), "building the peers failed");
    Ok(cache.join("release/tensor-peers"))
}

/// How often a row at 4096² reads or writes as many elements, if it does nothing that takes longer.
fn passes(row: &str) -> Option<f64> {
    let name = row.strip_suffix("/4096")?;
    match name {
        "add" | "sub" | "mul" | "div" => Some(3.0),
        "relu" | "transpose" => Some(2.0),
        "sum" | "mean" | "sum_axis0" | "sum_axis1" | "mean_axis0" | "mean_axis1" => Some(1.0),
        _ => None,
    }
}

/// What a program of three lines costs, and what a hook does: ours against ours.
fn own(report: &mut Report, rounds: usize) -> anyhow::Result<()> {
    let hooked = Hooked::new(mlp()).on_forward(|_, output| {
        std::hint::black_box(output.numel());
    });
    let sides = [trainer(mlp(), random(&[64, 784], 11)), trainer(hooked, random(&[64, 784], 11))];
    let [plain, hooked] = in_turns(sides, 3 * rounds)?;
    let what = "µs a step of the MLP, with a hook on its forward against without";
    report.ratio("tensors/hook", what, hooked / 1e3, (plain / 1e3, "without"), "µs", Goal::AtMost(1.02));
    let (a, b) = (random(&[64], 1), random(&[64], 2));
    let form = |f: fn(&Tensor, &Tensor) -> Tensor| {
        let (a, b) = (a.clone(), b.clone());
        computes(move || f(&a, &b))
    };
    let sides = [form(|a, b| a + b), form(|a, b| a.add(b)), form(|a, b| Tensor::add(a, b))];
    let [operator, method, call] = in_turns(sides, 3 * rounds)?;
    let what = "ns for 64 elements: `Tensor::add(&a, &b)` and `a.add(&b)`, the slower of them, against `&a + &b`";
    report.ratio("tensors/forms", what, method.max(call), (operator, "operator"), "ns", Goal::AtMost(1.05));
    Ok(())
}

/// The middle of medians that were measured one after the other, over and over.
fn in_turns<const N: usize>(mut sides: [Run; N], rounds: usize) -> anyhow::Result<[f64; N]> {
    let mut times = [const { Vec::new() }; N];
    for _ in 0..rounds {
        for (side, times) in sides.iter_mut().zip(&mut times) {
            times.push(median(side)?);
        }
    }
    Ok(times.map(|mut times| middle(&mut times)))
}

/// How long it takes to build a perceptron with each library from nothing, and how large the program is.
fn programs(report: &mut Report) -> anyhow::Result<()> {
    let mut found: Vec<(&str, f64, f64)> = Vec::new();
    for name in ["ours", "candle", "burn"] {
        let source = root().join("crates/tensor-wasm-bench/peers/mlp").join(name);
        let cache = root().join("bench-cache/mlp").join(name);
        let cargo = |command: &str| {
            let mut cargo = Command::new("cargo");
            cargo.args([command, "--locked", "--manifest-path"]).arg(source.join("Cargo.toml"));
            for name in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "RUSTC_WRAPPER", "CARGO_TARGET_DIR"] {
                cargo.env_remove(name);
            }
            cargo
        };
        ensure!(cargo("fetch").status()?.success(), "cannot fetch what {name} needs");
        let _ = std::fs::remove_dir_all(&cache);
        println!("building a perceptron with {name} from nothing");
        let begun = Instant::now();
        let built = cargo("build").args(["--release", "--quiet", "--target-dir"]).arg(&cache).status()?;
        ensure!(built.success(), "building a perceptron with {name} failed");
        let seconds = begun.elapsed().as_secs_f64();
        let program = cache.join("release").join(format!("mlp-{name}"));
        let losses = Command::new(&program).output()?.stdout;
        let losses: Vec<f64> =
            String::from_utf8_lossy(&losses).split_whitespace().filter_map(|text| text.parse().ok()).collect();
        let learns = matches!(losses[..], [first, last] if last < 0.9 * first);
        ensure!(learns, "the perceptron with {name} does not learn: {losses:?}");
        found.push((name, seconds, std::fs::metadata(&program)?.len() as f64 / 1e6));
    }
    let best = |of: fn(&(&str, f64, f64)) -> f64| {
        let least = found[1..].iter().min_by(|a, b| of(a).total_cmp(&of(b)));
        least.map_or((f64::INFINITY, "none"), |row| (of(row), ["candle", "burn"][usize::from(row.0 == "burn")]))
    };
    let all: Vec<String> =
        found.iter().map(|(name, seconds, size)| format!("{name} {seconds:.1} s, {size:.2} MB")).collect();
    let what = format!("of `cargo build --release` of a perceptron that trains; {}", all.join("; "));
    let (seconds, size) = (best(|row| row.1), best(|row| row.2));
    report.ratio("tensors/mlp_build", &format!("time {what}"), found[0].1, seconds, "s", Goal::AtMost(1.0));
    report.ratio("tensors/mlp_size", &format!("size {what}"), found[0].2, size, "MB", Goal::AtMost(1.0));
    Ok(())
}

/// What each row is held to: a ratio to the best of the peers, as how many times as fast ours is.
fn goal(row: &str) -> f64 {
    match row.split('/').next().unwrap_or(row) {
        "chain6" => 3.0,
        "softmax" | "layer_norm" | "attention" => 1.2,
        "mlp_step" | "cnn_step" | "adam" => 1.5,
        _ => 1.0,
    }
}

pub(crate) fn compare(rounds: usize, only: Option<&str>) -> anyhow::Result<()> {
    let (python, rust) = (python()?, rust_peers()?);
    let script = root().join("crates/tensor-wasm-bench/peers/tensors.py");
    let mut peers = Vec::new();
    for name in ["numpy", "torch"] {
        peers.push(Peer::start(name, Command::new(&python).arg(&script))?);
    }
    for name in ["ndarray", "candle", "burn"] {
        peers.push(Peer::start(name, &mut Command::new(&rust))?);
    }
    let mut report = Report::new("tensors");
    let names: Vec<String> = ours().into_iter().map(|(row, _)| row).collect();
    for row in names.into_iter().filter(|row| only.is_none_or(|only| row.contains(only))) {
        // Made anew for each row, as peers make theirs: made once at the start, some rows took two or three times as
        // long in a whole run as alone. Why was not found out; the guess is memory that was idle for minutes.
        let Some((_, mut run)) = ours().into_iter().find(|(name, _)| *name == row) else { continue };
        let mut own = Vec::new();
        let mut others: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        let mut copies = Vec::new();
        for _ in 0..rounds {
            own.push(median(&mut run)?);
            for peer in &mut peers {
                if let Some(time) = peer.measure(&row)? {
                    others.entry(peer.name).or_default().push(time);
                }
                if passes(&row).is_some()
                    && let Some(time) = peer.measure("copy/4096")?
                {
                    copies.push(time);
                }
            }
        }
        let own = middle(&mut own);
        let mut others: Vec<(f64, &str)> =
            others.into_iter().map(|(name, mut times)| (middle(&mut times), name)).collect();
        others.sort_by(|a, b| a.0.total_cmp(&b.0));
        let all: Vec<String> = others.iter().map(|(time, name)| format!("{name} {:.1}", time / 1e3)).collect();
        let what = format!("µs a run, median of {rounds} rounds in turns; {}", all.join(", "));
        if row == "scalar" {
            report.bound("tensors/scalar", &what, own / 1e3, "µs", Goal::AtMost(1.0));
            continue;
        }
        let Some((best, name)) = others.first().copied() else { continue };
        // As a speed, so that more is better: how many runs a second.
        let speed = |nanoseconds: f64| 1e9 / nanoseconds;
        report.ratio(
            &format!("tensors/{row}"),
            &what,
            speed(own),
            (speed(best), name),
            "runs/s",
            Goal::AtLeast(goal(&row)),
        );
        if let Some(passes) = passes(&row) {
            let bytes = 4096.0 * 4096.0 * 4.0;
            ensure!(!copies.is_empty(), "nobody copied");
            // The quickest copy that anybody made.
            let copy = 2.0 * bytes / copies.iter().copied().fold(f64::INFINITY, f64::min);
            let what = "bytes that are read and written, against those of a copy (the best of all in the same rounds)";
            let (id, ours) = (format!("tensors/{row}/bandwidth"), passes * bytes / own);
            report.ratio(&id, what, ours, (copy, "copy"), "GB/s", Goal::AtLeast(0.9));
        }
    }
    if only.is_none_or(|only| only == "own") {
        own(&mut report, rounds)?;
    }
    if only.is_none_or(|only| only == "programs") {
        programs(&mut report)?;
    }
    // A part of the rows is no result.
    if only.is_none() { report.save() } else { Ok(()) }
}
