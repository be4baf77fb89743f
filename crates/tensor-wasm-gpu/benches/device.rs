//! What a device costs: `cargo bench -p tensor-wasm-gpu --bench device -- [cpu|cuda]`. On CUDA, raw driver calls stand
//! beside ours in the same process, interleaved. Results go to `bench-results/`, or to the folder named by
//! `TENSOR_WASM_RESULTS`.

#![allow(
    clippy::disallowed_methods,
    clippy::cast_precision_loss,
    reason = "a test sleeps to let things happen, and averages"
)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "it fails by panicking, and says what runs"
)]
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "numbers of its own, all of them small")]
#![allow(dead_code, reason = "the report's file belongs to another program too")]

#[path = "../../tensor-wasm-bench/src/report.rs"]
mod report;

// What the shared report needs.
use anyhow as _;
use serde_json as _;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tensor_wasm_gpu::baseline::Baseline;
use tensor_wasm_gpu::{
    Device, DeviceChoice, DeviceError, Grid, HostKernels, Kernel, OpenOptions, Param, Params, Placement, SlabPlan,
    Tenant, TenantLimits,
};

use crate::report::{Goal, Report, median};

const PTX: &str = r"
.version 7.0
.target sm_75
.address_size 64
.visible .entry nothing() { ret; }
.visible .entry spin(.param .u64 ns)
{
    .reg .pred %p; .reg .u64 %d<4>;
    ld.param.u64 %d1, [ns];
    mov.u64 %d2, %globaltimer;
AGAIN:
    mov.u64 %d3, %globaltimer;
    sub.u64 %d3, %d3, %d2;
    setp.lt.u64 %p, %d3, %d1;
    @%p bra AGAIN;
    ret;
}
.visible .entry wild()
{
    .reg .u64 %d; .reg .u32 %r;
    mov.u64 %d, 16; mov.u32 %r, 7; st.global.u32 [%d], %r;
    ret;
}
";

const ONE: Grid = Grid { blocks: [1, 1, 1], threads: [1, 1, 1], shared_bytes: 0 };

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if let [_, command, _, fd, _, choice] = args.as_slice()
        && command == "device-worker"
    {
        return tensor_wasm_gpu::worker_main(fd.parse().unwrap(), choice.parse().unwrap(), HostKernels::default());
    }
    // `cargo test --benches` runs this too, to see that it can.
    let is_test = args.iter().any(|arg| arg == "--test");
    let choice = args.iter().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(DeviceChoice::Cpu);
    let process = Placement::Process { exe: std::env::current_exe().unwrap(), args: vec!["device-worker".to_owned()] };
    let memory = SlabPlan { staging_bytes: 64 << 20, pinned_bytes: 320 << 20, ..SlabPlan::default() };
    let placement = if choice == DeviceChoice::Cpu { Placement::Thread } else { process };
    let device = match Device::open(&OpenOptions { choice, placement, memory, ..OpenOptions::default() }) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: {error}");
            return ExitCode::SUCCESS;
        }
    };
    match (choice, is_test) {
        (_, true) => println!("ok: {}", device.info().name),
        (DeviceChoice::Cpu, _) => cpu(&device),
        _ => cuda(&device),
    }
    ExitCode::SUCCESS
}

fn us(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn async_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().unwrap()
}

fn tenant(device: &Device, name: &str) -> Tenant {
    let limits =
        TenantLimits { memory_bytes_max: 8 << 30, waiting_max: 1024, running_max: 1024, ..TenantLimits::default() };
    device.tenant(name, limits).unwrap()
}

/// Nanoseconds to allocate and free a buffer from a warm pool.
fn alloc_free(tenant: &Tenant) -> f64 {
    const PAIRS: u32 = 100_000;
    drop(tenant.buffer(4096).unwrap());
    let round = |_| {
        let started = Instant::now();
        for _ in 0..PAIRS {
            let handle = tenant.alloc(4096).unwrap();
            tenant.free(handle).unwrap();
        }
        started.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
    };
    median((0..15).map(round).collect())
}

fn cpu(device: &Device) {
    let mut report = Report::new("device");
    let tenant = tenant(device, "bench");
    report.bound(
        "cpu_device/alloc_free",
        "a buffer from the warm pool and back, quota included",
        alloc_free(&tenant),
        "ns",
        Goal::AtMost(150.0),
    );
    let buffer = tenant.buffer(64).unwrap();
    let trip = |_| {
        let started = Instant::now();
        tenant.fill(buffer.handle(), 0, 64, 1).unwrap().wait().unwrap();
        us(started.elapsed())
    };
    let samples: Vec<f64> = (0..20_000).map(trip).collect();
    report.bound(
        "cpu_device/round_trip",
        "a small job sent to the worker and seen done",
        median(samples),
        "µs",
        Goal::AtMost(5.0),
    );
    let size = 256 << 20;
    let (a, b) = (tenant.buffer(size).unwrap(), tenant.buffer(size).unwrap());
    let (from, mut to) = (vec![1_u8; size as usize], vec![2_u8; size as usize]);
    tenant.fill(a.handle(), 0, size, 3).unwrap().wait().unwrap();
    tenant.fill(b.handle(), 0, size, 4).unwrap().wait().unwrap();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..9 {
        let started = Instant::now();
        tenant.copy((a.handle(), 0), (b.handle(), 0), size).unwrap().wait().unwrap();
        ours.push(size as f64 / started.elapsed().as_secs_f64() / 1e9);
        let started = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        theirs.push(size as f64 / started.elapsed().as_secs_f64() / 1e9);
        std::hint::black_box(&to);
    }
    report.ratio(
        "cpu_device/copy",
        "a copy of 256 MiB between buffers",
        median(ours),
        (median(theirs), "memcpy"),
        "GB/s",
        Goal::AtLeast(0.9),
    );
    report.save().unwrap();
}

fn load(tenant: &Tenant, name: &str) -> Kernel {
    let runtime = async_runtime();
    let module = runtime.block_on(tenant.load(PTX.as_bytes())).unwrap();
    runtime.block_on(tenant.kernel(&module, name)).unwrap()
}

fn cuda(device: &Device) {
    let info = device.info();
    let driver = format!("{}.{}", info.driver_version / 1000, info.driver_version % 1000 / 10);
    let mut report = Report::new("h200/device").on(&format!("{}, CUDA {driver} driver", info.name));
    let raw = Baseline::open(0).unwrap();
    let tenant = tenant(device, "bench");
    let nothing = load(&tenant, "nothing");
    let none = Params::default();

    // In turns of two hundred, the first of each left out: the GPU belongs to one process at a time, and changing
    // hands takes it some seventy microseconds.
    let runtime = async_runtime();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        runtime.block_on(async {
            for n in 0..200 {
                let started = Instant::now();
                tenant.launch(&nothing, ONE, &none).unwrap().await.unwrap();
                if n >= 10 {
                    ours.push(us(started.elapsed()));
                }
            }
        });
        theirs.extend((0..200).map(|_| us(raw.launches(1))).skip(10));
    }
    report.ratio(
        "device/launch_round_trip",
        "an empty kernel launched by an async task and seen done by it, through the worker process",
        median(ours),
        (median(theirs), "raw launch + synchronize, in process"),
        "µs",
        Goal::AtMost(1.1),
    );

    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..61 {
        let started = Instant::now();
        let mut last = None;
        for _ in 0..1000 {
            last = Some(tenant.launch(&nothing, ONE, &none).unwrap());
        }
        last.unwrap().wait().unwrap();
        ours.push(1000.0 / started.elapsed().as_secs_f64());
        theirs.push(1000.0 / raw.launches(1000).as_secs_f64());
    }
    report.ratio(
        "device/launch_throughput",
        "1,000 empty kernels queued, then waited for",
        median(ours),
        (median(theirs), "raw"),
        "launches/s",
        Goal::AtLeast(0.95),
    );
    report.bound(
        "device/alloc_free",
        "a buffer from the warm pool and back, quota included",
        alloc_free(&tenant),
        "ns",
        Goal::AtMost(150.0),
    );
    copies(device, &tenant, &raw, &mut report);
    neighbours(device, &mut report);
    recovery(device, &mut report);
    report.save().unwrap();
}

fn copies(device: &Device, tenant: &Tenant, raw: &Baseline, report: &mut Report) {
    for (bytes, name) in [(1_u64 << 20, "1MiB"), (256 << 20, "256MiB")] {
        let rounds = if bytes > 1 << 24 { 15 } else { 300 };
        let pinned = device.pinned(bytes).unwrap();
        let buffer = tenant.buffer(bytes).unwrap();
        pinned.write(0, &vec![7; bytes as usize]).unwrap();
        for to_device in [true, false] {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                let started = Instant::now();
                let (buffer, pinned) = ((buffer.handle(), 0), (&pinned, 0));
                let copy = if to_device {
                    tenant.write_pinned(pinned, buffer, bytes)
                } else {
                    tenant.read_pinned(buffer, pinned, bytes)
                };
                copy.unwrap().wait().unwrap();
                ours.push(us(started.elapsed()));
            }
            theirs.extend(raw.copies(bytes as usize, to_device, true, rounds).into_iter().map(us));
            report.ratio(
                &format!("device/{}_pinned_{name}", if to_device { "h2d" } else { "d2h" }),
                "a copy of pinned memory",
                median(ours),
                (median(theirs), "raw"),
                "µs",
                Goal::AtMost(1.05),
            );
        }
    }
    let bytes = 256 << 20;
    let buffer = tenant.buffer(bytes as u64).unwrap();
    let mut host = vec![7_u8; bytes];
    let mut ours = Vec::new();
    for _ in 0..9 {
        let started = Instant::now();
        tenant.write_blocking(buffer.handle(), 0, &host).unwrap();
        ours.push(bytes as f64 / started.elapsed().as_secs_f64() / 1e9);
    }
    let theirs = raw.copies(bytes, true, false, 9).into_iter().map(|d| bytes as f64 / d.as_secs_f64() / 1e9);
    report.ratio(
        "device/h2d_pageable_256MiB",
        "a copy of ordinary memory",
        median(ours.clone()),
        (median(theirs.collect()), "raw pageable"),
        "GB/s",
        Goal::AtLeast(3.0),
    );
    let pinned = raw.copies(bytes, true, true, 9).into_iter().map(|d| bytes as f64 / d.as_secs_f64() / 1e9);
    report.ratio(
        "device/h2d_pageable_of_pinned",
        "the same, against what pinned memory does",
        median(ours),
        (median(pinned.collect()), "raw pinned"),
        "GB/s",
        Goal::AtLeast(0.7),
    );
    let mut ours = Vec::new();
    for _ in 0..9 {
        let started = Instant::now();
        tenant.read_blocking(buffer.handle(), 0, &mut host).unwrap();
        ours.push(bytes as f64 / started.elapsed().as_secs_f64() / 1e9);
    }
    let theirs = raw.copies(bytes, false, false, 9).into_iter().map(|d| bytes as f64 / d.as_secs_f64() / 1e9);
    report.ratio(
        "device/d2h_pageable_256MiB",
        "a copy to ordinary memory",
        median(ours),
        (median(theirs.collect()), "raw pageable"),
        "GB/s",
        Goal::AtLeast(1.0),
    );
}

/// One tenant launches kernels of 1 ms on every multiprocessor without end; the other's 10 µs kernel, from launch to
/// done.
fn neighbours(device: &Device, report: &mut Report) {
    let (flood, quiet) = (device.tenant("flood", TenantLimits::default()).unwrap(), tenant(device, "quiet"));
    let (long, short) = (load(&flood, "spin"), load(&quiet, "spin"));
    let whole = Grid { blocks: [device.info().multiprocessors * 2, 1, 1], threads: [1024, 1, 1], shared_bytes: 0 };
    let stop = AtomicBool::new(false);
    let mut samples = std::thread::scope(|scope| {
        scope.spawn(|| {
            let params = Params::new([Param::U64(1_000_000)]);
            while !stop.load(Ordering::Relaxed) {
                match flood.launch(&long, whole, &params) {
                    Ok(_) => {}
                    Err(DeviceError::Busy { .. }) => std::thread::sleep(Duration::from_micros(100)),
                    Err(error) => panic!("{error}"),
                }
            }
        });
        std::thread::sleep(Duration::from_millis(300));
        let params = Params::new([Param::U64(10_000)]);
        let sample = |_| {
            let started = Instant::now();
            quiet.launch(&short, ONE, &params).unwrap().wait().unwrap();
            us(started.elapsed()) / 1e3
        };
        let samples: Vec<f64> = (0..1000).map(sample).collect();
        stop.store(true, Ordering::Relaxed);
        samples
    });
    samples.sort_by(f64::total_cmp);
    report.bound(
        "device/neighbour_p99",
        "a 10 µs kernel beside another tenant's endless 1 ms kernels, 99th percentile",
        samples[samples.len() * 99 / 100],
        "ms",
        Goal::AtMost(3.0),
    );
}

/// From the fault to the next kernel that ran.
fn recovery(device: &Device, report: &mut Report) {
    let until_well = |restarts: u32| {
        let began = Instant::now();
        loop {
            let probe = || {
                let tenant = device.tenant("probe", TenantLimits::default())?;
                let runtime = async_runtime();
                let module = runtime.block_on(tenant.load(PTX.as_bytes()))?;
                let kernel = runtime.block_on(tenant.kernel(&module, "nothing"))?;
                tenant.launch(&kernel, ONE, &Params::default())?.wait()
            };
            if device.restarts() >= restarts && probe().is_ok() {
                return began.elapsed().as_secs_f64();
            }
            assert!(began.elapsed() < Duration::from_secs(30), "it does not come back");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let mut samples = Vec::new();
    for _ in 0..3 {
        let restarts = device.restarts();
        let faulty = tenant(device, "wild");
        let wild = load(&faulty, "wild");
        let _ = faulty.launch(&wild, ONE, &Params::default()).unwrap().wait();
        samples.push(until_well(restarts + 1));
    }
    report.bound(
        "device/recovery_fault",
        "from a kernel's illegal access to the next kernel done",
        median(samples),
        "s",
        Goal::AtMost(1.0),
    );
    let mut samples = Vec::new();
    for _ in 0..3 {
        let (restarts, pid) = (device.restarts(), device.worker_pid().unwrap());
        let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        samples.push(until_well(restarts + 1));
    }
    report.bound(
        "device/recovery_kill",
        "from kill -9 of the worker to the next kernel done",
        median(samples),
        "s",
        Goal::AtMost(1.0),
    );
}
