//! What messages cost: `cargo bench -p tensor-wasm-ring --bench ring`. Our rings beside the queues that others use, in
//! the same process, interleaved, with the same 96 bytes in each; then messages that a running lane answered. Results
//! go to `bench-results/`, or to the folder named by `TENSOR_WASM_RESULTS`.

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
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use tensor_wasm_gpu::DeviceChoice;
use tensor_wasm_ring::builtin::Builtin;
use tensor_wasm_ring::ring::{CHUNKS, Chunks, Receiver, Senders, Slots, ordinary_words};
use tensor_wasm_ring::{Actor, Behaviour, ExecutorOptions, Message, Payload, Runtime};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::report::{Goal, Report, median};

/// Slots of every queue here.
const SLOTS: usize = 1024;

/// Threads that send at once, beside the one that receives.
const SENDERS: u64 = 4;

const LONG: Duration = Duration::from_secs(10);

type Words = Arc<[AtomicU64]>;

struct Ring {
    senders: Arc<Senders<Words>>,
    taken: Arc<AtomicU64>,
    receiver: Receiver<Words>,
}

fn ring() -> Ring {
    let words: Words = Arc::from(ordinary_words(SLOTS));
    let senders = Arc::new(Senders::new(Slots::new(words.clone()).unwrap()));
    Ring { senders, taken: Arc::default(), receiver: Receiver::new(Slots::new(words).unwrap()) }
}

/// Both ends of a queue, the sending one as a function that threads share.
struct Ends<'q> {
    send: Box<dyn Fn(&Chunks<CHUNKS>) -> bool + Sync + Send + 'q>,
    receive: Box<dyn FnMut() -> Option<Chunks<CHUNKS>> + Send + 'q>,
}

/// The same queues without a call through a pointer, for what takes nanoseconds.
macro_rules! alone {
    ($rounds:expr, $send:expr, $receive:expr) => {{
        let message: Chunks<CHUNKS> = [[7; 3]; CHUNKS];
        let began = Instant::now();
        for _ in 0..$rounds {
            assert!($send(black_box(&message)));
            black_box($receive().unwrap());
        }
        began.elapsed().as_nanos() as f64 / f64::from($rounds)
    }};
}

/// Nanoseconds to send and receive one message, with nobody else there: ours, `ArrayQueue`, flume, tokio.
fn uncontended(rounds: u32) -> [f64; 4] {
    let mut own = ring();
    let array = ArrayQueue::new(SLOTS);
    let (flume_in, flume_out) = flume::bounded(SLOTS);
    let (tokio_in, mut tokio_out) = tokio::sync::mpsc::channel(SLOTS);
    let receive = |receiver: &mut Receiver<Words>, taken: &AtomicU64| {
        let message = receiver.receive();
        receiver.release(taken);
        message
    };
    [
        alone!(rounds, |m| own.senders.send(m, &own.taken).is_ok(), || receive(&mut own.receiver, &own.taken)),
        alone!(rounds, |m: &Chunks<CHUNKS>| array.push(*m).is_ok(), || array.pop()),
        alone!(rounds, |m: &Chunks<CHUNKS>| flume_in.try_send(*m).is_ok(), || flume_out.try_recv().ok()),
        alone!(rounds, |m: &Chunks<CHUNKS>| tokio_in.try_send(*m).is_ok(), || tokio_out.try_recv().ok()),
    ]
}

/// Nanoseconds for each message of several threads that send to one, as fast as they can. Every message is checked.
fn contended(each: u64, ends: Ends<'_>) -> f64 {
    let Ends { send, mut receive } = ends;
    let began = Instant::now();
    std::thread::scope(|scope| {
        for sender in 0..SENDERS {
            let send = &send;
            scope.spawn(move || {
                for n in 0..each {
                    let message = [[n as u32, sender as u32, 7]; CHUNKS];
                    while !send(&message) {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut next = [0; SENDERS as usize];
        let mut left = SENDERS * each;
        while left > 0 {
            let Some(message) = receive() else {
                std::thread::yield_now();
                continue;
            };
            let [n, sender, _] = message[0];
            assert!(n == next[sender as usize] && message == [message[0]; CHUNKS], "lost or damaged");
            next[sender as usize] += 1;
            left -= 1;
        }
    });
    began.elapsed().as_nanos() as f64 / (SENDERS * each) as f64
}

fn contended_all(each: u64) -> [f64; 4] {
    let Ring { senders, taken, mut receiver } = ring();
    let told = taken.clone();
    let receive = move || {
        let message = receiver.receive();
        // Once for a quarter of the ring, or when there is nothing left.
        if message.is_none() || receiver.received().is_multiple_of(SLOTS as u64 / 4) {
            receiver.release(&told);
        }
        message
    };
    let own = Ends { send: Box::new(move |m| senders.send(m, &taken).is_ok()), receive: Box::new(receive) };
    let array = Arc::new(ArrayQueue::new(SLOTS));
    let other = array.clone();
    let array = Ends { send: Box::new(move |m| array.push(*m).is_ok()), receive: Box::new(move || other.pop()) };
    let (flume_in, flume_out) = flume::bounded(SLOTS);
    let flume = Ends {
        send: Box::new(move |m| flume_in.try_send(*m).is_ok()),
        receive: Box::new(move || flume_out.try_recv().ok()),
    };
    let (tokio_in, mut tokio_out) = tokio::sync::mpsc::channel(SLOTS);
    let tokio = Ends {
        send: Box::new(move |m| tokio_in.try_send(*m).is_ok()),
        receive: Box::new(move || tokio_out.try_recv().ok()),
    };
    [own, array, flume, tokio].map(|ends| contended(each, ends))
}

/// Takes the medians of several numbers, measured in turn so many times.
fn medians<const N: usize>(times: usize, measure: impl Fn() -> [f64; N]) -> [f64; N] {
    measure();
    let all: Vec<[f64; N]> = (0..times).map(|_| measure()).collect();
    std::array::from_fn(|n| median(all.iter().map(|row| row[n]).collect()))
}

#[derive(Debug, Clone, Copy, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Sixteen([f32; 16]);

impl Payload for Sixteen {
    const KIND: u16 = 5;
}

/// A typed message of a thousand floats, which travels by reference.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Thousand {
    id: u64,
    floats: [f32; 1000],
}

/// Nanoseconds to write such a message into a buffer, to copy as many bytes, and to get at a field without copying.
fn thousand_floats(rounds: u32) -> [f64; 3] {
    let message = Thousand { id: 7, floats: std::array::from_fn(|n| n as f32) };
    let mut buffer = vec![0_u64; size_of::<Thousand>() / 8];
    let mut time = |step: &mut dyn FnMut(&mut [u8])| {
        let began = Instant::now();
        (0..rounds).for_each(|_| step(buffer.as_mut_bytes()));
        began.elapsed().as_nanos() as f64 / f64::from(rounds)
    };
    let serialize = time(&mut |bytes| black_box(&message).write_to(black_box(bytes)).unwrap());
    let plain = vec![3_u8; size_of::<Thousand>()];
    let copy = time(&mut |bytes| black_box(bytes).copy_from_slice(black_box(&plain)));
    message.write_to(buffer.as_mut_bytes()).unwrap();
    let bytes = buffer.as_bytes();
    let mut sum = 0.0;
    let began = Instant::now();
    for n in 0..rounds {
        let there = Thousand::ref_from_bytes(black_box(bytes)).unwrap();
        sum += there.floats[n as usize % 1000];
    }
    black_box(sum);
    [serialize, copy, began.elapsed().as_nanos() as f64 / f64::from(rounds)]
}

/// Microseconds of round trips that a lane answered: median, and the one in a hundred.
fn round_trips(actor: &Actor, rounds: usize) -> (f64, f64) {
    let sent = Sixteen([1.5; 16]);
    let mut took: Vec<f64> = (0..rounds)
        .map(|_| {
            let began = Instant::now();
            assert_eq!(actor.call::<_, Sixteen>(&sent, LONG).unwrap(), sent);
            began.elapsed().as_nanos() as f64 / 1e3
        })
        .collect();
    took.sort_by(f64::total_cmp);
    (took[rounds / 2], took[rounds * 99 / 100])
}

/// Answered messages in a second, sent 64 at a time.
fn throughput(runtime: &Runtime, actor: &Actor, count: usize) -> f64 {
    let port = Arc::new(runtime.port().unwrap());
    let actor = actor.by(&port);
    let mut batch = [Message::to(actor.address(), &Sixteen([2.5; 16])); 64];
    let mut received = Vec::new();
    let began = Instant::now();
    let (mut sent, mut answered) = (0, 0);
    while answered < count {
        if sent < count && sent - answered < 768 && actor.try_send_all(&mut batch).is_ok() {
            sent += batch.len();
        }
        received.clear();
        let came = port.receive_all(&mut received);
        answered += came;
        if came == 0 {
            std::thread::yield_now();
        }
    }
    answered as f64 / began.elapsed().as_secs_f64()
}

/// The same round trip through two channels of tokio and a thread that sends back what it gets, both sides looking.
fn tokio_round_trip(rounds: usize) -> f64 {
    let (there, mut there_out) = tokio::sync::mpsc::channel::<Chunks<CHUNKS>>(SLOTS);
    let (back, mut back_out) = tokio::sync::mpsc::channel::<Chunks<CHUNKS>>(SLOTS);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            loop {
                match there_out.try_recv() {
                    Ok(message) => assert!(back.try_send(message).is_ok()),
                    Err(tokio::sync::mpsc::error::TryRecvError::Empty) => std::hint::spin_loop(),
                    Err(_) => return,
                }
            }
        });
        let took = (0..rounds).map(|_| {
            let began = Instant::now();
            assert!(there.try_send([[1; 3]; CHUNKS]).is_ok());
            while back_out.try_recv().is_err() {
                std::hint::spin_loop();
            }
            began.elapsed().as_nanos() as f64 / 1e3
        });
        let median = median(took.collect());
        drop(there);
        median
    })
}

fn main() -> ExitCode {
    // `cargo test --benches` runs this too, to see that it can; only `cargo bench` says what it is.
    let is_test = !std::env::args().any(|arg| arg == "--bench");
    let scale = |count: usize| if is_test { count / 100 } else { count };
    let mut report = Report::new("ring");

    let times = if is_test { 1 } else { 15 };
    let [serialize, copy, access] = medians(times, || thousand_floats(scale(200_000) as u32));
    let what = "typed message of 1,000 floats into a buffer, beside a copy of as many bytes";
    report.ratio("ring/serialize_1k", what, serialize, (copy, "memcpy"), "ns", Goal::AtMost(1.1));
    report.bound("ring/access_1k", "a field of it, in place", access, "ns", Goal::AtMost(2.0));

    let names = ["ring", "ArrayQueue", "flume", "tokio mpsc"];
    let [own, others @ ..] = medians(times, || uncontended(scale(400_000) as u32));
    let what = "96 bytes in and out, nobody else there";
    for (other, name) in others.into_iter().zip(&names[1..]) {
        let id = format!("ring/queue_enqueue/{}", name.replace(' ', "_").to_lowercase());
        report.ratio(&id, what, own, (other, name), "ns", Goal::AtMost(1.0));
    }
    report.bound("ring/queue_enqueue", what, own, "ns", Goal::AtMost(25.0));
    let [own, others @ ..] = medians(if is_test { 1 } else { 9 }, || contended_all(scale(200_000) as u64));
    let what = "a message of four threads that send to one, each checked";
    for (other, name) in others.into_iter().zip(&names[1..]) {
        let id = format!("ring/queue_contended_4_threads/{}", name.replace(' ', "_").to_lowercase());
        report.ratio(&id, what, own, (other, name), "ns", Goal::AtMost(1.0));
    }

    let starts = (0..scale(500).max(1)).map(|_| {
        let began = Instant::now();
        let runtime = Runtime::builder().device(DeviceChoice::Cpu).build().unwrap();
        let took = began.elapsed().as_nanos() as f64 / 1e3;
        drop(runtime);
        took
    });
    report.bound("ring/runtime_start", "a runtime on a CPU, ready", median(starts.collect()), "us", Goal::AtMost(1e3));

    let runtime = Runtime::builder().device(DeviceChoice::Cpu).build().unwrap();
    let executor = runtime.launch("echo", Behaviour::Builtin(Builtin::Echo), &ExecutorOptions::default()).unwrap();
    let actor = executor.actor(0).unwrap();
    round_trips(&actor, scale(20_000));
    let trips: Vec<(f64, f64, f64)> = (0..if is_test { 1 } else { 9 })
        .map(|_| {
            let (p50, p99) = round_trips(&actor, scale(50_000));
            (p50, p99, tokio_round_trip(scale(50_000)))
        })
        .collect();
    let of = |part: fn(&(f64, f64, f64)) -> f64| median(trips.iter().map(part).collect());
    let what = "echo between two threads, 64 bytes, answered by a lane, p50";
    let beside = (of(|t| t.2), "two tokio channels");
    report.beside("ring/round_trip_latency", what, of(|t| t.0), beside, "us", Goal::AtMost(1.0));
    report.bound("ring/round_trip_latency_p99", "the same, p99", of(|t| t.1), "us", Goal::AtMost(10.0));

    let parked = (0..scale(300).max(1)).map(|_| {
        while !executor.beats()[0].1 {
            std::thread::park_timeout(Duration::from_micros(200));
        }
        round_trips(&actor, 1).0
    });
    let what = "a round trip to a lane that has parked";
    report.bound("ring/parked_round_trip", what, median(parked.collect()), "us", Goal::AtMost(50.0));
    let rates = (0..if is_test { 1 } else { 5 }).map(|_| throughput(&runtime, &actor, scale(1_000_000)) / 1e6);
    let what = "messages of 64 bytes, sent 64 at a time, answered";
    report.bound("ring/throughput", what, median(rates.collect()), "M/s", Goal::AtLeast(1.0));

    if !is_test && let Err(error) = report.save() {
        println!("{error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
