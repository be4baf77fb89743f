//! Concurrent calls of one tenant on a GPU, over HTTP: what sixteen connections get of it against one, and four tenants
//! together; and what a tenant with sixteen streams gets of a full device beside one with a single stream.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::json;
use tensor_wasm_gpu::{
    Device, DeviceChoice, DeviceError, Grid, OpenOptions, Param, Params, Placement, Stream, Tenant, TenantLimits,
};

use crate::report::{Goal, Report, median};
use crate::served::{self, Client, serve};

/// What a call's kernel takes, on sixteen groups: an eighth of a GPU of 132 multiprocessors.
const KERNEL: Duration = Duration::from_micros(900);

/// How long each measurement takes, and how many of each there are.
const MEASURED: Duration = Duration::from_secs(3);
const ROUNDS: usize = 3;

/// Jobs that each side of the contended device has outstanding.
const OUTSTANDING: usize = 32;

/// Tenants of the last measurement over HTTP.
const TENANTS: [&str; 4] = ["one", "two", "three", "four"];

/// A kernel that is busy for so many rounds, and keeps its loop because its result is stored.
const BUSY: &str = r#"(module
  (memory 1)
  (func (export "busy") (param $out i32) (param $rounds i32)
    (local $x i32)
    (loop $again
      (local.set $x (i32.add (i32.mul (local.get $x) (i32.const 1664525)) (local.get $rounds)))
      (local.set $rounds (i32.sub (local.get $rounds) (i32.const 1)))
      (br_if $again (i32.gt_s (local.get $rounds) (i32.const 0))))
    (i32.store (local.get $out) (local.get $x))))"#;

const SPIN_PTX: &str = r"
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 nanos)
{
    .reg .pred %p; .reg .u64 %d<4>;
    ld.param.u64 %d1, [nanos]; mov.u64 %d2, %globaltimer;
AGAIN:
    mov.u64 %d3, %globaltimer; sub.u64 %d3, %d3, %d2; setp.lt.u64 %p, %d3, %d1;
    @%p bra AGAIN;
    ret;
}
";

/// A core module whose export loads the kernel, launches it in sixteen groups and waits for it.
fn function() -> anyhow::Result<Vec<u8>> {
    let kernel = wat::parse_str(BUSY)?;
    let bytes: String = kernel.iter().map(|byte| format!("\\{byte:02x}")).collect();
    let text = format!(
        r#"(module
  (import "wasi:cuda/host@0.2.0" "wasi_cuda_load_ptx" (func $load (param i32 i32 i32 i32) (result i64)))
  (import "wasi:cuda/host@0.2.0" "wasi_cuda_alloc" (func $alloc (param i64) (result i64)))
  (import "wasi:cuda/host@0.2.0" "wasi_cuda_launch"
    (func $launch (param i64 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
  (import "wasi:cuda/host@0.2.0" "wasi_cuda_sync" (func $sync (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 64) "busy")
  (data (i32.const 1024) "{bytes}")
  (func (export "busy") (param $rounds i32) (result i32)
    (local $kernel i64) (local $sent i32)
    (local.set $kernel (call $load (i32.const 1024) (i32.const {len}) (i32.const 64) (i32.const 4)))
    (if (i64.lt_s (local.get $kernel) (i64.const 0)) (then (return (i32.wrap_i64 (local.get $kernel)))))
    (i32.store8 (i32.const 0) (i32.const 8))
    (i64.store align=1 (i32.const 1) (call $alloc (i64.const 4096)))
    (i32.store8 (i32.const 9) (i32.const 1))
    (i32.store align=1 (i32.const 10) (local.get $rounds))
    (local.set $sent (call $launch (local.get $kernel)
      (i32.const 16) (i32.const 1) (i32.const 1) (i32.const 256) (i32.const 1) (i32.const 1)
      (i32.const 0) (i32.const 0) (i32.const 14)))
    (if (local.get $sent) (then (return (local.get $sent))))
    (call $sync)))"#,
        len = kernel.len()
    );
    Ok(wat::parse_str(text)?)
}

pub(crate) fn compare() -> anyhow::Result<()> {
    let exe = served::exe()?;
    let placement = Placement::Process { exe: exe.clone(), args: vec!["device-worker".to_owned()] };
    let options = OpenOptions { choice: DeviceChoice::Cuda(0), placement, ..OpenOptions::default() };
    let device = match Device::open(&options) {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let mut report = Report::new("h200/concurrent").on(&device.info().name);
    contended(&device, &mut report)?;
    drop(device);
    over_http(&exe, &mut report)?;
    report.save()
}

fn over_http(exe: &Path, report: &mut Report) -> anyhow::Result<()> {
    let data = tempfile::tempdir()?;
    let file = data.path().join("busy.wasm");
    std::fs::write(&file, function()?)?;
    let server = serve(exe, &data.path().join("data"))?;
    for tenant in TENANTS {
        served::deploy(exe, &server.addr, tenant, "busy", &file)?;
    }
    // How many rounds the kernel takes that long: from two lengths, so that what is around it does not count.
    let mut client = Client::connect(&server.addr)?;
    let mut took = |rounds: u32| -> anyhow::Result<f64> {
        call(&mut client, TENANTS[0], rounds)?;
        let samples = (0..21).map(|_| {
            let began = Instant::now();
            call(&mut client, TENANTS[0], rounds).map(|()| began.elapsed().as_secs_f64())
        });
        Ok(median(samples.collect::<anyhow::Result<Vec<f64>>>()?))
    };
    let (short, long) = (50_000, 250_000);
    let per_round = (took(long)? - took(short)?) / f64::from(long - short);
    let rounds = (KERNEL.as_secs_f64() / per_round) as u32;
    println!("(a kernel of {KERNEL:?} is {rounds} rounds)");
    let (mut one, mut sixteen, mut four) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        one.push(rate(&server.addr, &TENANTS[..1], 1, rounds)?);
        sixteen.push(rate(&server.addr, &TENANTS[..1], 16, rounds)?);
        four.push(rate(&server.addr, &TENANTS, 4, rounds)?);
    }
    let (one, sixteen, four) = (median(one), median(sixteen), median(four));
    let what =
        "a function whose kernel takes 0.9 ms in 16 groups, over HTTP: sixteen connections of one tenant against one";
    report.ratio("concurrent/one_tenant", what, sixteen, (one, "one connection"), "calls/s", Goal::AtLeast(6.0));
    let what = "the same, sixteen connections of one tenant against four of each of four tenants";
    report.ratio(
        "concurrent/against_four_tenants",
        what,
        sixteen,
        (four, "four tenants"),
        "calls/s",
        Goal::AtLeast(0.9),
    );
    let what = "the same, four connections of each of four tenants against one connection";
    report.ratio("concurrent/four_tenants", what, four, (one, "one connection"), "calls/s", Goal::AtLeast(6.0));
    Ok(())
}

/// A call that has the kernel run for so many rounds.
fn call(client: &mut Client, tenant: &str, rounds: u32) -> anyhow::Result<()> {
    let result = client.call(tenant, "busy", "busy", &json!([rounds]))?;
    ensure!(result == 0, "{result}");
    Ok(())
}

/// Sleeps until then. The end of a scope unparks the thread that opened it, so one look at the clock is not enough.
fn wait_out(until: Instant) {
    while Instant::now() < until {
        std::thread::park_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// Calls per second of so many connections for each tenant.
fn rate(addr: &str, tenants: &[&str], connections: usize, rounds: u32) -> anyhow::Result<f64> {
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    let calls: anyhow::Result<Vec<usize>> = std::thread::scope(|scope| {
        let run = |tenant: &'static str| {
            let stop = &stop;
            scope.spawn(move || {
                let mut client = Client::connect(addr)?;
                let mut calls = 0;
                while !stop.load(Ordering::Relaxed) {
                    call(&mut client, tenant, rounds)?;
                    calls += 1;
                }
                anyhow::Ok(calls)
            })
        };
        let mut threads = Vec::new();
        for tenant in TENANTS.into_iter().filter(|tenant| tenants.contains(tenant)) {
            threads.extend((0..connections).map(|_| run(tenant)));
        }
        wait_out(Instant::now() + MEASURED);
        stop.store(true, Ordering::Relaxed);
        let join = |thread: std::thread::ScopedJoinHandle<'_, anyhow::Result<usize>>| {
            thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a client panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    Ok(calls?.iter().sum::<usize>() as f64 / began.elapsed().as_secs_f64())
}

/// Two tenants keep a device full with the same kernel, one on sixteen streams and one on a single one.
fn contended(device: &Device, report: &mut Report) -> anyhow::Result<()> {
    let grid = Grid { blocks: [device.info().multiprocessors * 2, 1, 1], threads: [1024, 1, 1], shared_bytes: 0 };
    let tenants = [("single", 1), ("many", 16)];
    let stop = AtomicBool::new(false);
    let done: anyhow::Result<Vec<f64>> = std::thread::scope(|scope| {
        let threads = tenants.map(|(name, streams)| {
            let stop = &stop;
            scope.spawn(move || {
                let tenant = device.tenant(name, TenantLimits::default())?;
                let streams: Vec<Stream> = (0..streams).map(|_| tenant.stream()).collect();
                flood(&tenant, &streams, grid, stop)
            })
        });
        wait_out(Instant::now() + MEASURED);
        stop.store(true, Ordering::Relaxed);
        let join = |thread: std::thread::ScopedJoinHandle<'_, anyhow::Result<f64>>| {
            thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a tenant panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    let done = done?;
    let what =
        "kernels of 0.3 ms on every multiprocessor, 32 outstanding each: a tenant with 16 streams beside one with 1";
    report.ratio("concurrent/contended", what, done[1], (done[0], "one stream"), "kernels", Goal::AtMost(1.1));
    Ok(())
}

fn flood(tenant: &Tenant, streams: &[Stream], grid: Grid, stop: &AtomicBool) -> anyhow::Result<f64> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let module = runtime.block_on(tenant.load(SPIN_PTX.as_bytes()))?;
    let kernel = runtime.block_on(tenant.kernel(&module, "spin"))?;
    let params = Params::new([Param::U64(300_000)]);
    let (mut sent, mut done, mut next) = (VecDeque::new(), 0, 0);
    while !stop.load(Ordering::Relaxed) {
        while sent.len() < OUTSTANDING {
            match streams[next % streams.len()].launch(&kernel, grid, &params) {
                Ok(completion) => sent.push_back(completion),
                Err(DeviceError::Busy { .. }) if !sent.is_empty() => break,
                Err(DeviceError::Busy { .. }) => std::thread::yield_now(),
                Err(error) => return Err(error.into()),
            }
            next += 1;
        }
        if let Some(oldest) = sent.pop_front() {
            oldest.wait()?;
            done += 1;
        }
    }
    for completion in sent {
        completion.wait()?;
    }
    Ok(f64::from(done))
}
