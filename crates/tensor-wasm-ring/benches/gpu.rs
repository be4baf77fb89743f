//! What messages cost that a kernel answers which stays on a GPU: `cargo bench -p tensor-wasm-ring --bench gpu`. Every
//! time is of a round trip that a running handler answered, and every answer is looked at. Beside it, in turns in the
//! same run, a kernel of ten instructions that repeats a word, and the driver's own launch and wait. Results go to
//! `bench-results/h200/`, or to the folder named by `TENSOR_WASM_RESULTS`.

#![allow(clippy::cast_precision_loss, reason = "it averages")]
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
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tensor_wasm_gpu::baseline::Baseline;
use tensor_wasm_gpu::{Device, DeviceChoice, Grid, OpenOptions, Param, Params, SlabPlan, TenantLimits, block_on};
use tensor_wasm_ring::builtin::{Builtin, relay};
use tensor_wasm_ring::{Behaviour, Executor, ExecutorOptions, Message, Runtime};

use crate::report::{Goal, Report, median};

const LONG: Duration = Duration::from_secs(10);
const ROUNDS: usize = 7;
const ECHOES: usize = 5_000;

/// Repeats a word of the host's memory to another, until it is told to end.
const RAW_ECHO: &str = r"
.version 7.0
.target sm_75
.address_size 64
.visible .entry raw(.param .u64 in, .param .u64 out, .param .u64 beat, .param .u64 stop)
{
    .reg .pred %p; .reg .b64 %in, %out, %beat, %stop, %value, %last, %beats; .reg .b32 %looks;
    ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; ld.param.u64 %beat, [beat]; ld.param.u64 %stop, [stop];
    mov.u64 %last, 0; mov.u64 %beats, 1; mov.u32 %looks, 0;
    st.volatile.global.u64 [%beat], %beats;
LOOK:
    ld.volatile.global.u64 %value, [%in];
    setp.eq.u64 %p, %value, %last; @%p bra SAME;
    mov.u64 %last, %value; st.volatile.global.u64 [%out], %value; bra LOOK;
SAME:
    add.u32 %looks, %looks, 1; and.b32 %looks, %looks, 1023; setp.ne.u32 %p, %looks, 0; @%p bra LOOK;
    add.u64 %beats, %beats, 1; st.volatile.global.u64 [%beat], %beats;
    ld.volatile.global.u64 %value, [%stop]; setp.eq.u64 %p, %value, 0; @%p bra LOOK;
    ret;
}
";

/// Microseconds of each, sorted.
fn timed(rounds: usize, mut once: impl FnMut(u64)) -> Vec<f64> {
    let mut times: Vec<f64> = (0..rounds as u64)
        .map(|n| {
            let began = Instant::now();
            once(n);
            began.elapsed().as_nanos() as f64 / 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times
}

fn at(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

fn launch(runtime: &Runtime, builtin: Builtin, options: ExecutorOptions) -> Executor {
    runtime.launch("bench", Behaviour::Builtin(builtin), &options).unwrap()
}

/// Messages of so many bytes answered in a second, as many under way as the rings take.
fn throughput(runtime: &Runtime, lanes: u32, total: u64) -> f64 {
    let slots = 1 << 12;
    let options =
        ExecutorOptions { lanes, actors: lanes, mailbox_slots: slots, reply_slots: slots, ..Default::default() };
    let executor = launch(runtime, Builtin::Echo, options);
    let port = Arc::new(runtime.port().unwrap());
    let actors: Vec<_> = (0..lanes).map(|index| executor.actor(index).unwrap().by(&port)).collect();
    let mut answers: Vec<Message> = Vec::new();
    let (mut sent, mut answered) = (0_u64, 0_u64);
    let mut last = vec![0_u64; lanes as usize];
    let began = Instant::now();
    while answered < total {
        for actor in &actors {
            if sent >= total || sent - answered > 40_000 {
                break;
            }
            let mut batch = [(); 64].map(|()| {
                sent += 1;
                let mut payload = [0; 64];
                payload[..8].copy_from_slice(&sent.to_le_bytes());
                Message::of_bytes(actor.address(), 7, &payload).unwrap()
            });
            if actor.try_send_all(&mut batch).is_err() {
                sent -= batch.len() as u64;
            }
        }
        answers.clear();
        answered += port.receive_all(&mut answers) as u64;
        for answer in &answers {
            let lane = answer.sender().index() as usize;
            let number = u64::from_le_bytes(answer.payload().unwrap()[..8].try_into().unwrap());
            assert!(number > last[lane], "in the order in which they were sent");
            last[lane] = number;
        }
        assert!(began.elapsed() < LONG, "{answered} of {sent} answered");
    }
    answered as f64 / began.elapsed().as_secs_f64() / 1e6
}

/// Microseconds of a hop of a token that goes round 64 actors.
fn hop(runtime: &Runtime, lanes: u32) -> f64 {
    const ACTORS: u32 = 64;
    const HOPS: u32 = 6_400;
    let executor = launch(runtime, Builtin::Relay, ExecutorOptions { lanes, actors: ACTORS, ..Default::default() });
    for index in 0..ACTORS {
        let next = executor.actor((index + 1) % ACTORS).unwrap().address();
        let told: relay::Next = executor.actor(index).unwrap().call(&relay::Next(next.0), LONG).unwrap();
        assert_eq!(told.0, next.0);
    }
    let port = Arc::new(runtime.port().unwrap());
    let actor = executor.actor(0).unwrap().by(&port);
    let round = |hops: u32| {
        let began = Instant::now();
        actor.send(&relay::Token { hops, home: port.address().0, tag: u64::from(hops) }).unwrap();
        let arrived = port.receive(LONG).unwrap().read::<relay::Arrived>().unwrap();
        assert_eq!(arrived.tag, u64::from(hops));
        began.elapsed().as_nanos() as f64 / 1e3
    };
    let of = |hops: u32| median((0..ROUNDS).map(|_| round(hops)).collect());
    (of(HOPS) - of(0)) / f64::from(HOPS)
}

/// How many hardware queues the driver gives a process: of every four, one is for a kernel that stays.
const QUEUES_VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

fn main() -> ExitCode {
    if std::env::var_os(QUEUES_VARIABLE).is_none() {
        let args = std::env::args().skip(1);
        let again = Command::new(std::env::current_exe().unwrap()).args(args).env(QUEUES_VARIABLE, "32").exec();
        panic!("this program cannot be started again: {again}");
    }
    let opened = Baseline::open(0).map_err(|why| why.to_string()).and_then(|baseline| {
        let runtime = Runtime::builder().device(DeviceChoice::Cuda(0)).build().map_err(|why| why.to_string())?;
        Ok((baseline, runtime))
    });
    let (baseline, runtime) = match opened {
        Ok(opened) => opened,
        Err(why) => {
            println!("skipped: {why}");
            return ExitCode::SUCCESS;
        }
    };
    let mut report = Report::new("h200/ring").on(&runtime.device().info().name);

    // A device of its own for the raw kernel: the region of the runtime's is its own.
    let memory = SlabPlan { staging_bytes: 2 << 20, pinned_bytes: 0, regions: vec![("raw".to_owned(), 2 << 20)] };
    let options = OpenOptions { choice: DeviceChoice::Cuda(0), memory, ..OpenOptions::default() };
    let device = Device::open(&options).unwrap();
    let tenant = device.tenant("raw", TenantLimits { residents_max: 1, ..TenantLimits::default() }).unwrap();
    let region = device.region("raw").unwrap();
    let module = block_on(tenant.load(RAW_ECHO.as_bytes())).unwrap();
    let kernel = block_on(tenant.kernel(&module, "raw")).unwrap();
    let words = [0, 128].map(|offset| Param::U64(region.device_address() + offset));
    let grid = Grid { blocks: [1, 1, 1], threads: [1, 1, 1], shared_bytes: 0 };
    let raw = tenant.resident(&kernel, grid, &Params::new(words)).unwrap();
    let (asked, answered) = (region.words(0, 1).unwrap(), region.words(128, 1).unwrap());

    let executor = launch(&runtime, Builtin::Echo, ExecutorOptions::default());
    let actor = executor.actor(0).unwrap();
    let mut number = 0_u64;
    let (mut own, mut raws, mut launches) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS + 1 {
        let echoed = timed(ECHOES, |n| {
            let message = Message::of_bytes(actor.address(), 7, &n.to_le_bytes()).unwrap();
            let answer = actor.request_message(message).unwrap().wait(LONG).unwrap();
            assert_eq!(answer.payload(), Some(&n.to_le_bytes()[..]));
        });
        let repeated = timed(ECHOES, |_| {
            number += 1;
            asked[0].store(number, Ordering::Release);
            while answered[0].load(Ordering::Acquire) != number {
                std::hint::spin_loop();
            }
        });
        // Beside two kernels that stay: the driver launches a third.
        let launched = timed(500, |_| {
            baseline.launches(1);
        });
        // The first is for warming up.
        if round > 0 {
            own.push(echoed);
            raws.push(repeated);
            launches.push(at(&launched, 0.5));
        }
    }
    let of = |all: &[Vec<f64>], part: f64| median(all.iter().map(|sorted| at(sorted, part)).collect());
    let (raw_p50, raw_p99) = ((of(&raws, 0.5), "raw echo"), (of(&raws, 0.99), "raw echo"));
    let what = "a message of 8 bytes to an actor and its answer, seen by the thread that sent it, median";
    report.bound("ring/echo_p50", what, of(&own, 0.5), "us", Goal::AtMost(2.0));
    report.ratio("ring/echo_p50_of_raw", what, of(&own, 0.5), raw_p50, "us", Goal::AtMost(1.2));
    report.bound("ring/echo_p99", "the same, of a hundred the slowest", of(&own, 0.99), "us", Goal::AtMost(3.0));
    report.ratio("ring/echo_p99_of_raw", "the same, beside raw", of(&own, 0.99), raw_p99, "us", Goal::AtMost(1.2));
    let launch_wait = (median(launches), "launch + synchronize");
    report.ratio(
        "ring/echo_of_launch",
        "the same beside an empty launch",
        of(&own, 0.5),
        launch_wait,
        "us",
        Goal::AtMost(0.25),
    );
    raw.stop();
    raw.wait().unwrap();
    drop(executor);

    for lanes in [1, 8] {
        let rate = median((0..3).map(|_| throughput(&runtime, lanes, 1 << 20)).collect());
        let id = if lanes == 1 { "ring/throughput/1" } else { "ring/throughput/8" };
        report.bound(id, "messages of 64 bytes, in batches of 64, answered", rate, "M/s", Goal::AtLeast(10.0));
    }
    for lanes in [1, 8] {
        let id = if lanes == 1 { "ring/hop/1" } else { "ring/hop/8" };
        report.bound(id, "a hop of a token round 64 actors", hop(&runtime, lanes), "us", Goal::AtMost(1.2));
    }
    // Uniform load over a thousand actors, one message at a time.
    let options = ExecutorOptions { lanes: 8, actors: 1_000, mailbox_slots: 64, ..ExecutorOptions::default() };
    let many = launch(&runtime, Builtin::Echo, options);
    let actors: Vec<_> = (0..1_000).map(|index| many.actor(index).unwrap()).collect();
    let times = timed(20_000, |n| {
        let actor = &actors[(n * 7919 % 1_000) as usize];
        let message = Message::of_bytes(actor.address(), 7, &n.to_le_bytes()).unwrap();
        let answer = actor.request_message(message).unwrap().wait(LONG).unwrap();
        assert_eq!(answer.payload(), Some(&n.to_le_bytes()[..]));
    });
    let what = "a round trip to any of 1,000 actors on 8 lanes, of a hundred the slowest";
    report.bound("ring/thousand_p99", what, at(&times, 0.99), "us", Goal::AtMost(50.0));
    report.save().unwrap();
    ExitCode::SUCCESS
}
