//! Kernels on the CPU device against the same loops in Rust, built for the same instructions and run by as many
//! threads; and where there is a GPU, what a guest waits for a launch against what a program waits that has the GPU to
//! itself.

#![allow(unsafe_code, reason = "native loops for the instructions that the kernels are compiled for")]
#![allow(clippy::cast_possible_wrap, reason = "sizes of the benchmarks")]

use std::time::{Duration, Instant};

use anyhow::Context;
use tensor_wasm_exec::catalog::SettingsPatch;
use tensor_wasm_exec::{Call, Config, Invocation, Output, Runtime};
use tensor_wasm_gpu::{Buffer, Device, DeviceChoice, OpenOptions, Placement, TenantLimits};
use tensor_wasm_launch::{Argument, KernelModule, Kernels, LaunchStream};

use crate::report::{Goal, Report, median, root};

const ROUNDS: usize = 15;

/// A device, a tenant of it, and the kernels of the examples.
struct Bench {
    stream: LaunchStream,
    module: std::sync::Arc<KernelModule>,
    threads: tokio::runtime::Runtime,
}

impl Bench {
    fn open() -> anyhow::Result<Bench> {
        let threads = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let host = tensor_wasm_exec::engine::cpu_kernels::host_kernels();
        let device = Device::open(&OpenOptions { choice: DeviceChoice::Cpu, host, ..OpenOptions::default() })?;
        let kernels = Kernels::new(device, None, threads.handle().clone());
        let wasm = std::fs::read(root().join("target/guests/example-kernels.wasm")).context("cargo xtask guests")?;
        let module = kernels.module(wasm)?;
        let limits = TenantLimits { memory_bytes_max: 8 << 30, ..TenantLimits::default() };
        let stream = kernels.tenant("bench", limits)?.stream();
        Ok(Bench { stream, module, threads })
    }

    fn upload(&self, floats: &[f32]) -> anyhow::Result<Buffer> {
        let bytes: Vec<u8> = floats.iter().flat_map(|x| x.to_le_bytes()).collect();
        let buffer = self.stream.kernels.tenant.buffer(bytes.len() as u64)?;
        self.stream.stream.write_blocking(buffer.handle(), 0, &bytes)?;
        Ok(buffer)
    }

    fn download(&self, buffer: &Buffer, words: usize) -> anyhow::Result<Vec<[u8; 4]>> {
        let mut bytes = vec![0; 4 * words];
        self.stream.stream.read_blocking(buffer.handle(), 0, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]).collect())
    }

    /// Milliseconds of a launch, from asking for it to seeing it done.
    fn launch(&self, kernel: &str, groups: [u32; 3], items: [u32; 3], arguments: &[Argument]) -> anyhow::Result<f64> {
        let began = Instant::now();
        self.threads.block_on(async {
            let budget = Duration::from_secs(30);
            self.stream.launch(&self.module, kernel, groups, items, arguments, budget).await?.wait().await
        })?;
        Ok(began.elapsed().as_secs_f64() * 1e3)
    }
}

/// Milliseconds of a loop over parts of a slice, one part for each core.
fn native<T: Send>(out: &mut [T], part: impl Fn(usize, &mut [T]) + Sync) -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let len = out.len().div_ceil(cores);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (n, own) in out.chunks_mut(len).enumerate() {
            let part = &part;
            scope.spawn(move || part(n * len, own));
        }
    });
    began.elapsed().as_secs_f64() * 1e3
}

#[target_feature(enable = "avx2,fma")]
fn saxpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(*x, *y);
    }
}

#[target_feature(enable = "avx2,fma")]
fn mandelbrot(from: usize, width: usize, left: f64, top: f64, step: f64, iterations_max: u32, out: &mut [u32]) {
    for (n, pixel) in out.iter_mut().enumerate() {
        let (column, row) = ((from + n) % width, (from + n) / width);
        let (cx, cy) = (left + column as f64 * step, top - row as f64 * step);
        let (mut x, mut y, mut iterations) = (0.0, 0.0, 0);
        while iterations < iterations_max {
            let (xx, yy) = (x * x, y * y);
            if xx + yy > 4.0 {
                break;
            }
            y = 2.0 * x * y + cy;
            x = xx - yy + cx;
            iterations += 1;
        }
        let t = iterations as f32 / iterations_max as f32;
        let s = 1.0 - t;
        let channel = |value: f32| (value * 255.0) as u32;
        let [r, g, b] = [9.0 * s * t * t * t, 15.0 * s * s * t * t, 8.5 * s * s * s * t].map(channel);
        *pixel = r | g << 8 | b << 16 | 255 << 24;
    }
}

#[target_feature(enable = "avx2,fma")]
fn nbody(from: usize, bodies: &[[f32; 4]], out: &mut [[f32; 4]]) {
    for (n, out) in out.iter_mut().enumerate() {
        let me = bodies[from + n];
        let mut pull = [0.0_f32; 3];
        for other in bodies {
            let (dx, dy, dz) = (other[0] - me[0], other[1] - me[1], other[2] - me[2]);
            let inverse = 1.0 / dx.mul_add(dx, dy.mul_add(dy, dz.mul_add(dz, 1e-3))).sqrt();
            let s = other[3] * (inverse * inverse * inverse);
            pull = [s.mul_add(dx, pull[0]), s.mul_add(dy, pull[1]), s.mul_add(dz, pull[2])];
        }
        let v = [0.01_f32 * pull[0], 0.01 * pull[1], 0.01 * pull[2]];
        *out = [v[0].mul_add(0.01, me[0]), v[1].mul_add(0.01, me[1]), v[2].mul_add(0.01, me[2]), me[3]];
    }
}

pub(crate) fn compare() -> anyhow::Result<()> {
    anyhow::ensure!(
        std::is_x86_feature_detected!("fma") && std::is_x86_feature_detected!("avx2"),
        "the native side needs a CPU with AVX2 and FMA"
    );
    let mut report = Report::new("kernels");
    let bench = Bench::open()?;
    compare_saxpy(&bench, &mut report)?;
    compare_mandelbrot(&bench, &mut report)?;
    compare_nbody(&bench, &mut report)?;
    report.save()
}

fn compare_saxpy(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    const N: usize = 32 << 20;
    let xs: Vec<f32> = (0..N).map(|i| (i % 1000) as f32).collect();
    let mut ys: Vec<f32> = (0..N).map(|i| (i % 77) as f32).collect();
    let (x, y) = (bench.upload(&xs)?, bench.upload(&ys)?);
    let arguments =
        [Argument::I32(N as i32), Argument::F32(0.5), Argument::Buffer(x.handle()), Argument::Buffer(y.handle())];
    let ours = |_| bench.launch("saxpy", [(N / 256) as u32, 1, 1], [256, 1, 1], &arguments);
    let first = ours(0)?;
    // SAFETY: the instructions were seen to be there.
    let mut theirs = || native(&mut ys, |from, own| unsafe { saxpy(0.5, &xs[from..from + own.len()], own) });
    theirs();
    let (mut own, mut native) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        own.push(ours(round)?);
        native.push(theirs());
    }
    let found = bench.download(&y, N)?;
    anyhow::ensure!(found.iter().zip(&ys).all(|(a, b)| *a == b.to_le_bytes()), "saxpy is wrong");
    println!("(the first launch, with compiling and mapping: {first:.1} ms)");
    let what = "32 Mi elements, against a Rust loop over slices with as many threads";
    report.ratio("cpu_kernels/saxpy", what, median(own), (median(native), "Rust"), "ms", Goal::AtMost(1.5));
    Ok(())
}

fn compare_mandelbrot(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    const WIDTH: usize = 1024;
    const HEIGHT: usize = 768;
    let (left, top, step, iterations_max) = (-2.2, 1.2, 3.0 / WIDTH as f64, 500);
    let out = bench.stream.kernels.tenant.buffer((4 * WIDTH * HEIGHT) as u64)?;
    let arguments = [
        Argument::I32(WIDTH as i32),
        Argument::I32(HEIGHT as i32),
        Argument::F64(left),
        Argument::F64(top),
        Argument::F64(step),
        Argument::I32(iterations_max),
        Argument::Buffer(out.handle()),
    ];
    let ours = || bench.launch("mandelbrot", [(WIDTH / 16) as u32, (HEIGHT / 16) as u32, 1], [16, 16, 1], &arguments);
    let mut pixels = vec![0_u32; WIDTH * HEIGHT];
    // In as many pieces as there are rows, so that both sides' threads end together.
    let mut theirs = || {
        let next = std::sync::atomic::AtomicUsize::new(0);
        let rows: Vec<std::sync::Mutex<&mut [u32]>> = pixels.chunks_mut(WIDTH).map(std::sync::Mutex::new).collect();
        let began = Instant::now();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        std::thread::scope(|scope| {
            for _ in 0..cores {
                scope.spawn(|| {
                    loop {
                        let row = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        let Some(Ok(mut own)) = rows.get(row).map(|own| own.lock()) else { return };
                        // SAFETY: the instructions were seen to be there.
                        unsafe {
                            mandelbrot(row * WIDTH, WIDTH, left, top, step, iterations_max.cast_unsigned(), &mut own);
                        }
                    }
                });
            }
        });
        began.elapsed().as_secs_f64() * 1e3
    };
    let (mut own, mut native) = (Vec::new(), Vec::new());
    ours()?;
    theirs();
    for _ in 0..ROUNDS {
        own.push(ours()?);
        native.push(theirs());
    }
    let found = bench.download(&out, WIDTH * HEIGHT)?;
    anyhow::ensure!(found.iter().zip(&pixels).all(|(a, b)| *a == b.to_le_bytes()), "the Mandelbrot set is wrong");
    let what = "1024 by 768, 500 iterations, f64, against the same loop in Rust";
    report.ratio("cpu_kernels/mandelbrot", what, median(own), (median(native), "Rust"), "ms", Goal::AtMost(1.3));
    Ok(())
}

fn compare_nbody(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    const N: usize = 8 << 10;
    let bodies: Vec<[f32; 4]> =
        (0..N).map(|i| [(i % 97) as f32, (i % 89) as f32 * 0.5, (i % 83) as f32 * 0.25, 1.0]).collect();
    let (from, velocities) = (bench.upload(bodies.as_flattened())?, bench.upload(&vec![0.0; 4 * N])?);
    let to = bench.stream.kernels.tenant.buffer((16 * N) as u64)?;
    let arguments = [
        Argument::I32(N as i32),
        Argument::F32(0.01),
        Argument::Buffer(from.handle()),
        Argument::Buffer(velocities.handle()),
        Argument::Buffer(to.handle()),
    ];
    let zero = |buffer: &Buffer| bench.stream.stream.fill(buffer.handle(), 0, (16 * N) as u64, 0).map(drop);
    let ours = || {
        zero(&velocities)?;
        bench.launch("nbody", [(N / 256) as u32, 1, 1], [256, 1, 1], &arguments)
    };
    let mut out = vec![[0.0; 4]; N];
    // SAFETY: the instructions were seen to be there.
    let mut theirs = || native(&mut out, |from, own| unsafe { nbody(from, &bodies, own) });
    let (mut own, mut native) = (Vec::new(), Vec::new());
    ours()?;
    theirs();
    for _ in 0..ROUNDS {
        own.push(ours()?);
        native.push(theirs());
    }
    let found = bench.download(&to, 4 * N)?;
    let worst =
        found.iter().zip(out.as_flattened()).map(|(a, b)| (f32::from_le_bytes(*a) - b).abs()).fold(0.0, f32::max);
    anyhow::ensure!(worst < 1e-3, "n-body is off by {worst}");
    let what = "8192 bodies, one step, in tiles with barriers, against two loops in Rust";
    report.ratio("cpu_kernels/nbody", what, median(own), (median(native), "Rust"), "ms", Goal::AtMost(1.3));
    Ok(())
}

/// What a guest sees of a launch, through the server's own path, against raw driver calls in this process.
pub(crate) fn guest() -> anyhow::Result<()> {
    let baseline = match tensor_wasm_gpu::baseline::Baseline::open(0) {
        Ok(baseline) => baseline,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    // The binary that lies beside this one has the worker in it.
    let exe = std::env::current_exe()?.with_file_name("tensor-wasm");
    anyhow::ensure!(exe.is_file(), "{} is not there; build it first", exe.display());
    let placement = Placement::Process { exe, args: vec!["device-worker".to_owned()] };
    let device = Device::open(&OpenOptions { choice: DeviceChoice::Cuda(0), placement, ..OpenOptions::default() })?;
    let mut report = Report::new("h200/guest").on(&device.info().name);
    let data = tempfile::tempdir()?;
    let (runtime, _) = Runtime::open(data.path(), Config::default(), None)?;
    runtime.attach(device);
    let wasm = std::fs::read(root().join("target/guests/gpu-examples.wasm")).context("cargo xtask guests")?;
    let threads = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let settings = SettingsPatch { gpu: Some(true), ..SettingsPatch::default() };
    let deployed = threads.block_on(runtime.deploy_bytes("default", "gpu", &wasm, settings));
    deployed.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    const LAUNCHES: usize = 500;
    let guest = || {
        let invocation = Invocation {
            id: 1,
            tenant: "default".to_owned(),
            function: "gpu".to_owned(),
            call: Call::Export {
                export: Some("launch-latency".to_owned()),
                args: serde_json::json!([LAUNCHES]),
                stdin: Default::default(),
            },
            deadline: None,
        };
        let outcome = threads.block_on(runtime.invoke(invocation)).map_err(|failure| anyhow::anyhow!("{failure}"))?;
        let Output::Value(value) = outcome.output else { anyhow::bail!("no value") };
        let nanos = value["ok"].as_array().with_context(|| value.to_string())?;
        anyhow::Ok(median(nanos.iter().filter_map(serde_json::Value::as_f64).collect()) / 1e3)
    };
    guest()?;
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for _ in 0..21 {
        ours.push(guest()?);
        raw.push(median((0..LAUNCHES).map(|_| baseline.launches(1).as_secs_f64() * 1e6).collect()));
    }
    let what = "an empty kernel launched by a guest and seen done by it, against raw launch + synchronize";
    report.ratio("guest/launch", what, median(ours), (median(raw), "raw"), "us", Goal::AtMost(1.3));
    report.save()
}
