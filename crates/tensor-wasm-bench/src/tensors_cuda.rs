//! Tensors on a GPU against PyTorch, eager and compiled, both sides in turns. Runs are sent one after the other and
//! waited for together, on both sides: that is how programs use a GPU. The peer is the `python3` of the machine.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, ensure};
use tensor_wasm_tensor::nn::{Linear, Module, Sequential, function};
use tensor_wasm_tensor::{
    Adam, CudaDevice, DType, Device, Optimizer, Sgd, Tensor, Variable, set_device, set_tf32, with_device,
};

use crate::decode::Decoder;
use crate::report::{Goal, Report, root};
use crate::tensors::{Peer, SLICE, middle};
use crate::{tensors_auto, tensors_http};

/// Sent before anybody waits.
const BATCH: usize = 40;

type Run = Box<dyn FnMut() -> tensor_wasm_tensor::Result<()>>;

struct Row {
    name: &'static str,
    run: Run,
    batch: usize,
}

fn row(name: &'static str, make: impl Fn() -> Tensor + 'static) -> Row {
    Row { name, run: Box::new(move || make().realize()), batch: BATCH }
}

fn ours(device: &Device) -> anyhow::Result<Vec<Row>> {
    let random = |sizes: &[usize], seed: u64, dtype: DType| {
        let made = Tensor::normal(sizes, seed, dtype).to(device);
        made.realize().map(|()| made)
    };
    let (f32, bf16) = (DType::F32, DType::BF16);
    let (a, b) = (random(&[4096, 4096], 1, f32)?, random(&[4096, 4096], 2, f32)?);
    let (s, t) = (random(&[256, 256], 3, f32)?, random(&[256, 256], 4, f32)?);
    let small = random(&[4096, 10], 5, f32)?;
    let (h, g) = (random(&[4096, 4096], 6, bf16)?, random(&[4096, 4096], 7, bf16)?);
    let bias = random(&[4096], 8, bf16)?;
    let wide = random(&[8192, 4096], 9, bf16)?;
    let [q, k, v] = [10, 11, 12].map(|seed| random(&[16, 4096, 128], seed, bf16));
    let (q, k, v) = (q?, k?, v?);
    let two = |name, (x, y): (&Tensor, &Tensor), f: fn(&Tensor, &Tensor) -> Tensor| {
        let (x, y) = (x.clone(), y.clone());
        row(name, move || f(&x, &y))
    };
    let mut rows = vec![
        two("add/4096", (&a, &b), |a, b| a + b),
        two("relu/4096", (&a, &b), |a, _| a.relu()),
        two("transpose/4096", (&a, &b), |a, _| a.t().contiguous()),
        two("sum/4096", (&a, &b), |a, _| a.sum(())),
        two("chain6/4096", (&a, &b), |a, _| ((a * 2.0 + 1.0) * a - 1.0).relu() * 0.5),
        two("add/256", (&s, &t), |s, t| s + t),
        two("sum/256", (&s, &t), |s, _| s.sum(())),
        two("softmax/256", (&s, &t), |s, _| s.softmax(1)),
        two("matmul/256", (&s, &t), |s, t| s.matmul(t)),
        two("log_softmax/4096x10", (&small, &small), |x, _| x.log_softmax(1)),
        two("softmax/8192x4096", (&wide, &wide), |x, _| x.softmax(1)),
        two("layer_norm/8192x4096", (&wide, &wide), |x, _| x.layer_norm(1, 1e-5)),
        two("argmax/4096", (&a, &b), |a, _| a.argmax(1)),
        two("matmul/4096/f32", (&a, &b), |a, b| a.matmul(b)),
        two("matmul/4096/bf16", (&h, &g), |h, g| h.matmul(g)),
    ];
    let million = random(&[1_000_000], 16, f32)?;
    rows.push(row("argsort/1M", move || million.argsort(0, false)));
    let long = random(&[16 << 20], 17, f32)?;
    rows.push(row("cumsum/16M", move || long.cumsum(0)));
    // What an embedding of 10,000 words of 256 numbers gets back from 50,000 tokens.
    let words = (Tensor::uniform(&[50_000, 1], 18, f32) * 10_000.0).floor().cast(DType::I64).to(device);
    words.realize()?;
    let gradient = random(&[50_000, 256], 19, f32)?;
    rows.push(row("embedding_gradient/50k", move || gradient.scatter_add(0, &words.expand(&[50_000, 256]), 10_000)));
    let (x, y) = (h.clone(), g.clone());
    rows.push(row("matmul_bias_gelu/4096/bf16", move || (x.matmul(&y) + &bias).gelu()));
    rows.push(row("attention/16x4096x128", move || q.attention(&k, &v, false)));
    let host: Run = Box::new(move || small.log_softmax(1).to_vec::<f32>().map(drop));
    rows.push(Row { name: "log_softmax_to_host/4096x10", run: host, batch: 1 });
    let tf32: Run = Box::new(move || {
        set_tf32(true);
        let made = a.matmul(&b).realize();
        set_tf32(false);
        made
    });
    rows.push(Row { name: "matmul/4096/tf32", run: tf32, batch: BATCH });
    let (weights, gradient) = (Variable::new(&random(&[10_000_000], 13, f32)?), random(&[10_000_000], 14, f32)?);
    let mut adam = Adam::new(std::slice::from_ref(&weights), 0.001);
    let step: Run = Box::new(move || {
        weights.get().set_grad(Some(gradient.clone()));
        adam.step()
    });
    rows.push(Row { name: "adam/10M", run: step, batch: BATCH });
    rows.push(Row { name: "mlp_step", run: mlp_step(random(&[64, 784], 15, f32)?)?, batch: BATCH });
    let mut decoder = Decoder::new()?;
    rows.push(Row { name: "decode/4x512", run: Box::new(move || decoder.step()), batch: BATCH });
    Ok(rows)
}

fn mlp_step(images: Tensor) -> anyhow::Result<Run> {
    let model =
        Sequential::new().then(Linear::new(784, 128, 1)).then(function(|x| x.relu())).then(Linear::new(128, 10, 2));
    let mut optimizer = Sgd::with_momentum(&model.parameters(), 0.01, 0.9, false);
    // From the host, as those of a file are.
    let labels = Tensor::from_vec((0..64_i64).map(|n| n * 7 % 10).collect::<Vec<_>>(), &[64]);
    Ok(Box::new(move || {
        model.forward(&images).cross_entropy(&labels).backward()?;
        optimizer.step()
    }))
}

/// The median of runs in a slice of time, in nanoseconds.
fn median(row: &mut Row, cuda: &CudaDevice) -> anyhow::Result<f64> {
    for _ in 0..3 {
        (row.run)()?;
    }
    cuda.synchronize()?;
    let mut times = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < SLICE || times.len() < 3 {
        let one = Instant::now();
        for _ in 0..row.batch {
            (row.run)()?;
        }
        if row.batch > 1 {
            cuda.synchronize()?;
        }
        times.push(one.elapsed().as_nanos() as f64 / row.batch as f64);
    }
    Ok(middle(&mut times))
}

/// What is known after the rounds: medians in microseconds, ours and the peer's.
struct Times(Vec<(String, Vec<f64>)>);

impl Times {
    fn add(&mut self, name: &str, nanos: f64) {
        match self.0.iter_mut().find(|(own, _)| own == name) {
            Some((_, times)) => times.push(nanos / 1e3),
            None => self.0.push((name.to_owned(), vec![nanos / 1e3])),
        }
    }

    fn get(&mut self, name: &str) -> anyhow::Result<f64> {
        let found = self.0.iter_mut().find(|(own, _)| own == name);
        Ok(middle(&mut found.with_context(|| format!("{name} was not measured"))?.1))
    }

    /// The quicker of what PyTorch does at once and what it compiles.
    fn peer(&mut self, name: &str) -> anyhow::Result<(f64, &'static str)> {
        let (eager, compiled) = (self.get(&format!("torch {name}"))?, self.get(&format!("torch {name}@compile"))?);
        Ok(if compiled < eager { (compiled, "torch.compile") } else { (eager, "torch") })
    }
}

/// Products of our own on tensor cores or without: the same row in a process that knows no library.
fn without_library() -> anyhow::Result<f64> {
    let exe = std::env::current_exe()?;
    let mut run = Command::new(exe);
    run.args(["tensors-cuda", "--raw", "matmul/4096/bf16"]).env("TENSOR_WASM_CUBLASLT", "none");
    let output = run.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().parse()?)
}

pub(crate) fn compare(rounds: usize, raw: Option<&str>) -> anyhow::Result<()> {
    let device = match Device::named("cuda") {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let Device::Cuda(cuda) = &device else { anyhow::bail!("{device:?} is no GPU") };
    set_device(device.clone());
    let mut rows = ours(&device)?;
    if let Some(name) = raw {
        let row = rows.iter_mut().find(|row| row.name == name).with_context(|| format!("there is no row {name}"))?;
        println!("{}", median(row, cuda)? / 1e3);
        return Ok(());
    }
    let script = root().join("crates/tensor-wasm-bench/peers/tensors_cuda.py");
    let mut peer = Peer::start("torch", Command::new("python3").arg(script))?;
    let only_peer = ["copy/4096", "copy/8192x4096", "attention_math/16x4096x128", "attention_flash/16x4096x128"];
    let mut times = Times(Vec::new());
    for _ in 0..rounds {
        for row in &mut rows {
            let own = with_device(&device, || median(row, cuda)).with_context(|| row.name)?;
            times.add(row.name, own);
            for how in ["", "@compile"] {
                let asked = format!("{}{how}", row.name);
                if let Some(nanos) = peer.measure(&asked)? {
                    times.add(&format!("torch {asked}"), nanos);
                }
            }
        }
        for name in only_peer {
            let nanos = peer.measure(name)?.with_context(|| format!("the peer has no {name}"))?;
            times.add(&format!("torch {name}"), nanos);
        }
    }
    let mut report = Report::new("h200/tensors").on(cuda.name());
    let what = "of the decisions of the device auto are within a tenth of the better device's time";
    report.bound("tensors_cuda/auto", what, tensors_auto::share(cuda)?, "share", Goal::AtLeast(0.95));
    let us = "us";
    for (name, bound) in [
        ("add/4096", 52.0),
        ("relu/4096", 36.0),
        ("transpose/4096", 40.0),
        ("sum/4096", 22.0),
        ("add/256", 6.0),
        ("sum/256", 6.0),
        ("softmax/256", 6.0),
        ("matmul/256", 6.0),
        ("log_softmax/4096x10", 6.0),
        ("log_softmax_to_host/4096x10", 12.0),
        ("argmax/4096", 25.0),
        ("argsort/1M", 150.0),
        ("cumsum/16M", 75.0),
        ("embedding_gradient/50k", 150.0),
        ("adam/10M", 75.0),
        ("mlp_step", 40.0),
    ] {
        let (own, peer) = (times.get(name)?, times.peer(name)?);
        report.beside(
            &format!("tensors_cuda/{name}"),
            "one run, of many that are sent",
            own,
            peer,
            us,
            Goal::AtMost(bound),
        );
    }
    for name in ["matmul/4096/bf16", "matmul/4096/tf32", "matmul/4096/f32"] {
        let (own, peer) = (times.get(name)?, times.get(&format!("torch {name}"))?);
        let what = "a product, against the same by PyTorch, which calls cuBLAS";
        report.ratio(&format!("tensors_cuda/{name}"), what, own, (peer, "cuBLAS"), us, Goal::AtMost(1.03));
    }
    let (own, compiled) = (times.get("decode/4x512")?, times.get("torch decode/4x512@compile")?);
    let what = "a token of a transformer of four layers, 512 wide, with a cache of 512";
    report.ratio("tensors_cuda/decode/4x512", what, own, (compiled, "torch.compile"), us, Goal::AtMost(0.5));
    let product = times.get("matmul/4096/bf16")?;
    let (own, cublas) = (without_library()?, times.get("torch matmul/4096/bf16")?);
    let what = "products a second by our own kernel, against cuBLAS";
    let per_second = |micros: f64| 1e6 / micros;
    let baseline = (per_second(cublas), "cuBLAS");
    report.ratio("tensors_cuda/own_matmul/4096/bf16", what, per_second(own), baseline, "runs/s", Goal::AtLeast(0.7));
    let what = "with bias and GELU, against the product alone";
    let own = times.get("matmul_bias_gelu/4096/bf16")?;
    report.ratio("tensors_cuda/matmul_bias_gelu/4096/bf16", what, own, (product, "alone"), us, Goal::AtMost(1.05));
    let (own, copy) = (times.get("chain6/4096")?, times.get("torch copy/4096")?);
    let what = "six operations, against a copy: one read and one write";
    report.ratio("tensors_cuda/chain6/4096", what, own, (copy, "copy"), us, Goal::AtMost(1.15));
    let copy = times.get("torch copy/8192x4096")?;
    for name in ["softmax/8192x4096", "layer_norm/8192x4096"] {
        let own = times.get(name)?;
        let what = "runs a second in bf16, against copies a second";
        let copies = (per_second(copy), "copy");
        report.ratio(&format!("tensors_cuda/{name}"), what, per_second(own), copies, "runs/s", Goal::AtLeast(0.85));
    }
    let own = times.get("attention/16x4096x128")?;
    for (name, goal) in [("math", 1.0), ("flash", 0.6)] {
        let peer = times.get(&format!("torch attention_{name}/16x4096x128"))?;
        let what = "forward in bf16, against PyTorch's backend of that name";
        let id = format!("tensors_cuda/attention_{name}/16x4096x128");
        report.ratio(&id, what, per_second(own), (per_second(peer), "torch"), "runs/s", Goal::AtLeast(goal));
    }
    tensors_http::compare(&device, &mut report)?;
    report.save()
}
