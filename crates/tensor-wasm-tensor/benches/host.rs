//! What plans that were run before cost on the host: the device computes nothing, so what is measured is making the
//! graph, finding its plan, sending it and, where elements are read, waiting for a worker that is done at once.
//! `cargo bench -p tensor-wasm-tensor --features cuda --bench host`; names of rows, or parts of them, choose some.
//! Without `--bench` each runs a few times.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for people")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensor_wasm_gpu::{
    Device as Gpu, DeviceChoice, HostCode, HostKernels, HostLaunch, HostModule, OpenOptions, Product, TenantLimits,
};
use tensor_wasm_jit::emulate::Emulator;
use tensor_wasm_tensor::nn::{Embedding, KvCache, LayerNorm, Linear, Module, Sequential, function};
use tensor_wasm_tensor::{CudaDevice, DType, Device, Optimizer, Sgd, Tensor, graphs_made, no_grad, plans_made};

/// How long a row is measured, in runs of so many between two waits.
const SLICE: Duration = Duration::from_millis(500);
const BATCH: usize = 10;

/// Runs before measuring: plans are made in the first, graphs recorded in those that follow.
const WARM_UP: usize = 8;

/// The same where a text begins anew in between: that has a plan of its own.
const WARM_UP_DECODE: usize = 5 * CONTEXT;

/// Of the device, which holds next to nothing.
const MEMORY_BYTES: u64 = 1 << 30;

/// Kernels that do nothing, and products that nobody computes.
struct Idle;

struct IdleModule(Vec<(u32, u32)>);

impl HostCode for Idle {
    fn load(&self, _stream: usize, image: &[u8]) -> Result<Arc<dyn HostModule>, String> {
        if Product::is_image(image) {
            return Ok(Arc::new(IdleModule(Product::PARAMS.to_vec())));
        }
        let text = std::str::from_utf8(image).map_err(|error| error.to_string())?;
        Ok(Arc::new(IdleModule(Emulator::new(text)?.params())))
    }

    fn forget(&self, _stream: usize) {}
}

impl HostModule for IdleModule {
    fn params(&self, _kernel: &str) -> Option<Vec<(u32, u32)>> {
        Some(self.0.clone())
    }

    fn launch(&self, _launch: &HostLaunch<'_>) {}
}

/// What one run took, by its stages.
struct Stages(Instant, Vec<(&'static str, Duration)>);

impl Stages {
    fn done(&mut self, stage: &'static str) {
        let now = Instant::now();
        self.1.push((stage, now - self.0));
        self.0 = now;
    }
}

type Run = Box<dyn FnMut(&mut Stages)>;

/// What is measured, and after how many runs.
struct Row {
    name: &'static str,
    warm_up: usize,
    make: fn() -> Run,
}

const ROWS: [Row; 3] = [
    Row { name: "log_softmax", warm_up: WARM_UP, make: log_softmax },
    Row { name: "mlp_step", warm_up: WARM_UP, make: mlp_step },
    Row { name: "decode", warm_up: WARM_UP_DECODE, make: decode },
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_bench = arguments.iter().any(|argument| argument == "--bench");
    let chosen: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with("--")).collect();
    let host = HostKernels(Some(Arc::new(Idle)));
    let gpu = Gpu::open(&OpenOptions { choice: DeviceChoice::Cpu, host, ..OpenOptions::default() }).unwrap();
    let limits = TenantLimits { memory_bytes_max: MEMORY_BYTES, ..TenantLimits::default() };
    let device = CudaDevice::of_tenant(gpu.tenant("host", limits).unwrap(), MEMORY_BYTES);
    tensor_wasm_tensor::set_device(Device::Cuda(device.clone()));
    for Row { name, warm_up, make } in ROWS {
        if chosen.is_empty() || chosen.iter().any(|part| name.contains(part.as_str())) {
            measure(name, warm_up, make(), &device, is_bench);
        }
    }
}

fn measure(name: &str, warm_up: usize, mut run: Run, device: &CudaDevice, is_bench: bool) {
    let mut stages = Stages(Instant::now(), Vec::new());
    for _ in 0..warm_up {
        run(&mut stages);
    }
    device.synchronize().unwrap();
    let made = (plans_made(), graphs_made());
    let (begun, mut all) = (Instant::now(), Vec::<(&str, Vec<Duration>)>::new());
    while all.first().is_none_or(|(_, times)| times.len() < WARM_UP) || (is_bench && begun.elapsed() < SLICE) {
        for _ in 0..BATCH {
            stages = Stages(Instant::now(), Vec::new());
            one(&mut run, &mut stages);
            for (stage, time) in stages.1.drain(..) {
                match all.iter_mut().find(|(own, _)| *own == stage) {
                    Some((_, times)) => times.push(time),
                    None => all.push((stage, vec![time])),
                }
            }
        }
        device.synchronize().unwrap();
    }
    assert_eq!((plans_made(), graphs_made()), made, "{name}: what was measured was not found");
    let median = |(stage, mut times): (&str, Vec<Duration>)| {
        times.sort_unstable();
        (times[times.len() / 2].as_secs_f64() * 1e6, stage.to_owned())
    };
    let medians: Vec<(f64, String)> = all.into_iter().map(median).collect();
    let sum: f64 = medians.iter().map(|(time, _)| time).sum();
    let parts: Vec<String> = medians.iter().map(|(time, stage)| format!("{stage} {time:.1}")).collect();
    println!("{name:<14} {sum:>8.1} µs: {}", parts.join(", "));
}

/// A run that is measured, by a name of its own: what else profilers are to leave out.
#[inline(never)]
fn one(run: &mut Run, stages: &mut Stages) {
    run(stages);
}

fn random(sizes: &[usize]) -> Tensor {
    let made = Tensor::normal(sizes, 1, DType::F32);
    made.realize().unwrap();
    made
}

fn log_softmax() -> Run {
    let x = random(&[4096, 10]);
    Box::new(move |stages| {
        let made = x.log_softmax(1);
        stages.done("graph");
        made.realize().unwrap();
        stages.done("sent");
        assert_eq!(made.to_vec::<f32>().unwrap().len(), 40_960);
        stages.done("read");
    })
}

fn mlp_step() -> Run {
    let model =
        Sequential::new().then(Linear::new(784, 128, 1)).then(function(Tensor::relu)).then(Linear::new(128, 10, 2));
    let mut optimizer = Sgd::with_momentum(&model.parameters(), 0.01, 0.9, false);
    let labels = Tensor::from_vec((0..64_i64).map(|n| n % 10).collect::<Vec<_>>(), &[64]);
    let images = random(&[64, 784]);
    Box::new(move |stages| {
        let loss = model.forward(&images).cross_entropy(&labels);
        stages.done("forward");
        loss.backward().unwrap();
        stages.done("backward");
        drop(loss);
        stages.done("freed");
        optimizer.step().unwrap();
        stages.done("step");
    })
}

const WIDTH: usize = 512;
const HEADS: usize = 8;
const LAYERS: usize = 4;
const TOKENS: usize = 1024;
const CONTEXT: usize = 32;

/// A block of a transformer: what it projects, merges, widens and narrows by, and its two norms.
struct Block {
    layers: [Linear; 4],
    norms: [LayerNorm; 2],
}

fn decode() -> Run {
    let block = |n: u64| {
        let sizes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)];
        let layers = sizes.map(|(from, to)| Linear::new(from, to, n));
        Block { layers, norms: [0, 1].map(|_| LayerNorm::new(WIDTH)) }
    };
    let blocks: Vec<Block> = (0..LAYERS as u64).map(block).collect();
    let [tokens, places] = [TOKENS, CONTEXT].map(|count| Embedding::new(count, WIDTH, 1));
    let (norm, head) = (LayerNorm::new(WIDTH), Linear::new(WIDTH, TOKENS, 3));
    let mut cache = KvCache::new(LAYERS, &[1, HEADS, CONTEXT, WIDTH / HEADS], DType::F32);
    let mut last = random(&[1, 1, WIDTH]);
    let (heads, size) = (HEADS.cast_signed(), (WIDTH / HEADS).cast_signed());
    Box::new(move |stages| {
        if cache.len() == cache.capacity() {
            cache.clear();
        }
        let (token, row) = no_grad(|| {
            let mut x = &last + cache.place(&places.weight.get());
            for (n, Block { layers: [project, merge, widen, narrow], norms }) in blocks.iter().enumerate() {
                let all = project.forward(&norms[0].forward(&x)).reshape(&[1, 1, 3, heads, size]);
                let all = all.permute(&[2, 0, 3, 1, 4]);
                let [q, k, v] = [0, 1, 2].map(|n| all.narrow(0, n, 1).squeeze(0));
                let seen = cache.attend(n, &q, &k, &v).transpose(1, 2).reshape(&[1, 1, heads * size]);
                x = x + merge.forward(&seen);
                x = &x + narrow.forward(&widen.forward(&norms[1].forward(&x)).gelu());
            }
            let token = head.forward(&norm.forward(&x)).argmax(-1);
            let row = tokens.forward(&token);
            (token, row)
        });
        stages.done("graph");
        cache.advance(&[&token, &row]).unwrap();
        stages.done("sent");
        last = row;
        stages.done("freed");
    })
}
