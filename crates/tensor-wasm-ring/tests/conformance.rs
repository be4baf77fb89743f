//! What actors must do, in one body per promise, run on every backend and placement there is: the CPU always, CUDA
//! where there is a driver. A program of its own, so that it can be its own worker process and be carried to a machine
//! without a toolchain. Prints what it ran; `conformance NAME` runs the cases whose name contains NAME.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "it fails by panicking, and says what runs"
)]
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "numbers of its own, all of them small")]

#[path = "conformance/delivery.rs"]
mod delivery;

use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tensor_wasm_gpu::{Device, DeviceChoice, DeviceKind, HostKernels, OpenOptions, Placement, SlabPlan};
use tensor_wasm_ring::builtin::{Builtin, counter, key_value, reduce, relay, spin};
use tensor_wasm_ring::{
    ActorError, ActorState, Behaviour, Executor, ExecutorOptions, FAULT, Message, Payload, REGION, REPLY, Reason,
    Runtime, TrapKind, UNREAD_MAX, host_kernels,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The argument of a worker process.
const WORKER: &str = "actor-worker";

/// How many hardware queues the driver gives a process: of every four, one is for a kernel that stays.
const QUEUES_VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Longer than anything here takes on a machine that is busy.
const LONG: Duration = Duration::from_secs(30);

/// Where a case runs.
struct Setup {
    choice: DeviceChoice,
    placement: Placement,
    runtime: Runtime,
}

type Case = (&'static str, fn(&Setup));

const CASES: &[Case] = &[
    ("an_echo_comes_back_as_it_was_sent", echo),
    ("built_in_behaviours_answer", builtins),
    ("every_transition_is_acknowledged", lifecycle),
    ("messages_wait_for_a_paused_actor_and_go_back_from_a_terminated_one", pause_and_terminate),
    ("a_handler_that_fails_costs_nobody_but_its_actor", faults),
    ("a_faulted_actor_is_restarted_as_often_as_it_may", supervision),
    ("a_full_mailbox_says_so_and_recovers", overflow),
    ("a_lane_whose_replies_nobody_takes_waits_and_loses_nothing", untaken_replies),
    ("a_batch_is_sent_whole_or_not_at_all", batches),
    ("a_port_that_nobody_reads_sends_nothing_more", unread),
    ("late_messages_go_back", deadlines),
    ("who_is_not_answered_gives_up_and_what_comes_later_is_the_ports", unanswered),
    ("answers_can_be_awaited", awaiting),
    ("actors_send_each_other_messages_whatever_lanes_they_have", token_rings),
    ("the_same_topology_gives_the_same_results_on_any_number_of_lanes", same_results),
    ("a_parked_lane_beats_and_wakes", parked),
    ("what_was_sent_is_handled_when_drained", draining),
    ("executors_come_and_go_and_leave_nothing", come_and_go),
    ("shapes_that_cannot_be_are_refused", bad_shapes),
    ("terminating_races_a_burst_of_sends", terminate_race),
    ("no_message_is_lost_duplicated_or_reordered", delivery::checked),
    ("damaged_memory_is_an_error_for_whoever_meets_it", damage),
    ("a_killed_worker_is_told_to_whoever_waits_and_the_next_start_is_clean", killed_worker),
    ("a_device_with_a_region_can_be_brought_along", own_device),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if let [_, command, _, fd, _, choice] = args.as_slice()
        && command == WORKER
    {
        let host = host_kernels(HostKernels::default());
        return tensor_wasm_gpu::worker_main(fd.parse().unwrap(), choice.parse().unwrap(), host);
    }
    // Threads of this process have as many hardware queues as a worker process: that is settled when it starts.
    if std::env::var_os(QUEUES_VARIABLE).is_none() {
        let again = std::process::Command::new(std::env::current_exe().unwrap())
            .args(&args[1..])
            .env(QUEUES_VARIABLE, "32")
            .exec();
        panic!("this program cannot be started again: {again}");
    }
    let filter = args.iter().skip(1).find(|arg| !arg.starts_with('-')).cloned().unwrap_or_default();
    std::panic::set_hook(Box::new(|info| eprintln!("    {info}")));
    let exe = std::env::current_exe().unwrap();
    let (mut passed, mut failed) = (0, Vec::new());
    for choice in [DeviceChoice::Cpu, DeviceChoice::Cuda(0)] {
        for is_process in [false, true] {
            let process = Placement::Process { exe: exe.clone(), args: vec![WORKER.to_owned()] };
            let placement = if is_process { process } else { Placement::Thread };
            let place = format!("{choice} in a {}", if is_process { "process" } else { "thread" });
            let runtime = match Runtime::builder().device(choice).placement(placement.clone()).build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    assert_ne!(choice, DeviceChoice::Cpu, "the CPU is always there: {error}");
                    println!("skipped: no CUDA device ({place}): {error}");
                    continue;
                }
            };
            if let Err(ActorError::Unsupported { what }) = runtime.launch("probe", ECHO, &ExecutorOptions::default()) {
                println!("skipped: {what} ({place})");
                continue;
            }
            let setup = Setup { choice, placement, runtime };
            for (name, case) in CASES.iter().filter(|(name, _)| name.contains(&filter)) {
                let started = Instant::now();
                let ok = catch_unwind(AssertUnwindSafe(|| case(&setup))).is_ok();
                println!("{} {place}: {name} ({:.0?})", if ok { "ok    " } else { "FAILED" }, started.elapsed());
                if ok { passed += 1 } else { failed.push(format!("{place}: {name}")) }
            }
        }
    }
    println!("{passed} passed, {} failed", failed.len());
    failed.iter().for_each(|name| println!("    {name}"));
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

const ECHO: Behaviour = Behaviour::Builtin(Builtin::Echo);
const COUNTER: Behaviour = Behaviour::Builtin(Builtin::Counter);
const SPIN: Behaviour = Behaviour::Builtin(Builtin::Spin);

impl Setup {
    fn launch(&self, behaviour: Behaviour, options: &ExecutorOptions) -> Executor {
        self.runtime.launch("test", behaviour, options).unwrap()
    }

    /// Another runtime of the same kind.
    fn another(&self) -> Runtime {
        Runtime::builder().device(self.choice).placement(self.placement.clone()).build().unwrap()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Numbered {
    number: u64,
    check: u64,
}

impl Numbered {
    fn new(number: u64) -> Numbered {
        Numbered { number, check: number.wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }
}

impl Payload for Numbered {
    const KIND: u16 = 77;
}

fn options(lanes: u32, actors: u32) -> ExecutorOptions {
    ExecutorOptions { lanes, actors, ..ExecutorOptions::default() }
}

fn echo(setup: &Setup) {
    let executor = setup.launch(ECHO, &options(2, 5));
    for index in 0..5 {
        let actor = executor.actor(index).unwrap();
        assert_eq!(actor.status(), ActorState::Active);
        for number in 0..200 {
            let sent = Numbered::new(number << 32 | u64::from(index));
            let limit = if number % 2 == 0 { LONG } else { Duration::MAX };
            assert_eq!(actor.call::<_, Numbered>(&sent, limit).unwrap(), sent);
        }
        let mut before = 0;
        // Every length, byte for byte.
        for length in 0..=64 {
            let bytes: Vec<u8> = (0..length).map(|n| n ^ 0x5a).collect();
            let sent = Message::of_bytes(actor.address(), 9, &bytes).unwrap();
            let answer = actor.request_message(sent).unwrap().wait(LONG).unwrap();
            assert_eq!((answer.payload(), answer.kind, answer.flags), (Some(&bytes[..]), 9, REPLY));
            assert_eq!(answer.sender(), actor.address());
            assert!(answer.clock > before, "what was caused is later");
            before = answer.clock;
        }
        assert_eq!(actor.telemetry().unwrap().handled, 265);
    }
    assert!(matches!(executor.actor(5), Err(ActorError::Foreign { .. })));
}

fn builtins(setup: &Setup) {
    let counters = setup.launch(COUNTER, &options(1, 2));
    let (a, b) = (counters.actor(0).unwrap(), counters.actor(1).unwrap());
    for n in 1..=10 {
        assert_eq!(a.call::<_, counter::Value>(&counter::Add(2), LONG).unwrap(), counter::Value(2 * n));
    }
    assert_eq!(b.call::<_, counter::Value>(&counter::Get, LONG).unwrap(), counter::Value(0), "each has its own");
    let odd = Message::of_bytes(a.address(), 1, &[0; 3]).unwrap();
    let refused = a.request_message(odd).unwrap().wait(LONG).unwrap_err();
    assert_eq!(refused, ActorError::Refused { to: a.address(), kind: 1, length: 3 });
    assert_eq!(a.call::<_, counter::Value>(&counter::Get, LONG).unwrap(), counter::Value(20), "it goes on");

    let shape = ExecutorOptions { state_bytes: 64 * key_value::ENTRY_BYTES, ..options(1, 1) };
    let table = setup.launch(Behaviour::Builtin(Builtin::KeyValue), &shape);
    let table = table.actor(0).unwrap();
    let ask = |kind, key: u64, value: &[u8]| {
        let bytes = [&key.to_le_bytes()[..], value].concat();
        let message = Message::of_bytes(table.address(), kind, &bytes).unwrap();
        let answer = table.request_message(message).unwrap().wait(LONG).unwrap();
        (answer.kind, answer.payload().unwrap().to_vec())
    };
    assert_eq!(ask(key_value::PUT, 7, b"seven"), (key_value::PUT, vec![1, 0, 0, 0]));
    assert_eq!(ask(key_value::GET, 7, b""), (key_value::GET, b"seven".to_vec()));
    assert_eq!(ask(key_value::DELETE, 7, b""), (key_value::DELETE, vec![1, 0, 0, 0]));
    assert_eq!(ask(key_value::GET, 7, b""), (key_value::MISSING, vec![]));

    let sums = setup.launch(Behaviour::Builtin(Builtin::Reduce), &options(1, 1));
    let sums = sums.actor(0).unwrap();
    for n in 0..100_u8 {
        let bytes: Vec<u8> = [f32::from(n), 0.5].iter().flat_map(|n| n.to_le_bytes()).collect();
        sums.send_message(Message::of_bytes(sums.address(), reduce::NUMBERS, &bytes).unwrap()).unwrap();
    }
    let total: reduce::Total = sums.call(&reduce::Get, LONG).unwrap();
    assert_eq!(total, reduce::Total { count: 200, sum: 5000.0, min: 0.0, max: 99.0, spare: 0 });
}

fn lifecycle(setup: &Setup) {
    let executor = setup.launch(COUNTER, &options(1, 1));
    let actor = executor.actor(0).unwrap();
    let add = || actor.call::<_, counter::Value>(&counter::Add(1), LONG);
    assert_eq!(add().unwrap(), counter::Value(1));
    actor.pause().unwrap();
    assert_eq!(actor.status(), ActorState::Paused);
    actor.resume().unwrap();
    assert_eq!(add().unwrap(), counter::Value(2), "its state was kept");
    let refused = actor.restart();
    assert!(refused.is_ok(), "it is active already: {refused:?}");
    assert_eq!(add().unwrap(), counter::Value(3), "and was not begun anew");
    actor.terminate().unwrap();
    assert_eq!(actor.ping().unwrap(), ActorState::Terminated);
    assert_eq!(add().unwrap_err(), ActorError::Terminated { to: actor.address() });
    for refused in [actor.pause(), actor.resume(), actor.restart()] {
        assert!(matches!(refused, Err(ActorError::BadState { found: ActorState::Terminated, .. })), "{refused:?}");
    }
    actor.activate().unwrap();
    actor.wait_for_status(ActorState::Active, LONG).unwrap();
    assert_eq!(add().unwrap(), counter::Value(1), "begun anew");
    let never = actor.wait_for_status(ActorState::Faulted, Duration::from_millis(5));
    assert!(matches!(never, Err(ActorError::BadState { .. })), "{never:?}");
    drop(executor);
    assert_eq!(add().unwrap_err(), ActorError::Ended { name: "test".to_owned() });
}

fn pause_and_terminate(setup: &Setup) {
    let executor = setup.launch(ECHO, &ExecutorOptions { mailbox_slots: 8, ..options(1, 2) });
    let port = Arc::new(setup.runtime.port().unwrap());
    let actor = executor.actor(0).unwrap().by(&port);
    let numbers = |count: usize| -> Vec<(u64, u8)> {
        let received = (0..count).map(|_| port.receive(LONG).unwrap());
        received.map(|message| (message.about & 0xffff_ffff, message.flags)).collect()
    };
    actor.pause().unwrap();
    let sent: Vec<u64> = (0..8).map(|n| actor.send(&Numbered::new(n)).unwrap() & 0xffff_ffff).collect();
    // Others are not held up.
    executor.actor(1).unwrap().call::<_, Numbered>(&Numbered::new(1), LONG).unwrap();
    assert!(port.try_receive().is_none());
    // One more than it may have waiting goes back.
    let one_more = actor.send(&Numbered::new(8)).unwrap();
    let back = port.receive(LONG).unwrap();
    assert_eq!((back.about, back.flags), (one_more, FAULT | REPLY));
    assert_eq!(back.fault().unwrap().reason(), Some(Reason::Full));
    actor.resume().unwrap();
    assert_eq!(numbers(8), sent.iter().map(|id| (*id, REPLY)).collect::<Vec<_>>());
    assert_eq!(actor.telemetry().unwrap().held_max, 8);

    actor.pause().unwrap();
    let sent: Vec<u64> = (0..5).map(|n| actor.send(&Numbered::new(n)).unwrap() & 0xffff_ffff).collect();
    actor.terminate().unwrap();
    assert_eq!(numbers(5), sent.iter().map(|id| (*id, FAULT | REPLY)).collect::<Vec<_>>());
}

fn faults(setup: &Setup) {
    let executor = setup.launch(COUNTER, &options(1, 2));
    let (actor, other) = (executor.actor(0).unwrap(), executor.actor(1).unwrap());
    actor.call::<_, counter::Value>(&counter::Add(5), LONG).unwrap();
    other.call::<_, counter::Value>(&counter::Add(7), LONG).unwrap();
    let error = actor.call::<_, counter::Value>(&counter::Add(u64::MAX), LONG).unwrap_err();
    assert!(matches!(error, ActorError::Trapped { trap: Some(TrapKind::Overflow), .. }), "{error}");
    assert_eq!(actor.status(), ActorState::Faulted);
    assert_eq!(actor.telemetry().unwrap().faults, 1);
    let error = actor.call::<_, counter::Value>(&counter::Get, LONG).unwrap_err();
    assert_eq!(error, ActorError::Faulted { to: actor.address() });
    assert_eq!(other.call::<_, counter::Value>(&counter::Get, LONG).unwrap(), counter::Value(7), "nobody else");
    actor.restart().unwrap();
    assert_eq!(actor.call::<_, counter::Value>(&counter::Get, LONG).unwrap(), counter::Value(0));
    assert_eq!(actor.telemetry().unwrap().restarts, 1);

    // One that takes too long.
    let slow = setup.launch(SPIN, &ExecutorOptions { handler_max: Duration::from_millis(20), ..options(1, 2) });
    let (actor, other) = (slow.actor(0).unwrap(), slow.actor(1).unwrap());
    let began = Instant::now();
    let error = actor.call::<_, spin::Work>(&spin::Work { us: u32::MAX }, LONG).unwrap_err();
    assert!(matches!(error, ActorError::Trapped { trap: Some(TrapKind::Deadline), .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5));
    other.call::<_, spin::Work>(&spin::Work { us: 10 }, LONG).unwrap();
}

fn supervision(setup: &Setup) {
    let executor = setup.launch(COUNTER, &ExecutorOptions { restarts_max: 2, ..options(1, 1) });
    let actor = executor.actor(0).unwrap();
    for restarts in 1..=2 {
        actor.call::<_, counter::Value>(&counter::Add(1), LONG).unwrap();
        actor.call::<_, counter::Value>(&counter::Add(u64::MAX), LONG).unwrap_err();
        actor.wait_for_status(ActorState::Active, LONG).unwrap();
        assert_eq!(actor.telemetry().unwrap().restarts, restarts);
        assert_eq!(actor.call::<_, counter::Value>(&counter::Get, LONG).unwrap(), counter::Value(0), "fresh");
    }
    actor.call::<_, counter::Value>(&counter::Add(1), LONG).unwrap();
    actor.call::<_, counter::Value>(&counter::Add(u64::MAX), LONG).unwrap_err();
    let again = actor.wait_for_status(ActorState::Active, Duration::from_millis(100));
    assert!(again.is_err(), "that was the last time");
}

fn overflow(setup: &Setup) {
    let executor = setup.launch(SPIN, &ExecutorOptions { mailbox_slots: 16, ..options(1, 1) });
    let port = Arc::new(setup.runtime.port().unwrap());
    let actor = executor.actor(0).unwrap().by(&port);
    actor.send(&spin::Work { us: 50_000 }).unwrap();
    let mut accepted = 1;
    let full = loop {
        match actor.try_send(&spin::Work { us: 0 }) {
            Ok(_) => accepted += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full, ActorError::Full { what: "the mailbox", slots: 16 });
    assert!(accepted >= 16);
    // Waiting for room helps, and everything that was accepted is answered.
    actor.send(&spin::Work { us: 1 }).unwrap();
    for _ in 0..=accepted {
        assert_eq!(port.receive(LONG).unwrap().flags, REPLY);
    }
    // So many calls at once, and no more.
    actor.pause().unwrap();
    let calls: Vec<_> = (0..16).map(|_| actor.request(&spin::Work { us: 0 }).unwrap()).collect();
    let refused = actor.request(&spin::Work { us: 0 }).err();
    assert!(matches!(refused, Some(ActorError::Full { slots: 16, .. })), "{refused:?}");
    actor.resume().unwrap();
    assert!(calls.into_iter().all(|call| call.wait(LONG).is_ok()));
    actor.call::<_, spin::Work>(&spin::Work { us: 0 }, LONG).unwrap();
}

fn untaken_replies(setup: &Setup) {
    let executor = setup.launch(ECHO, &ExecutorOptions { mailbox_slots: 64, reply_slots: 4, ..options(1, 1) });
    let port = Arc::new(setup.runtime.port().unwrap());
    let actor = executor.actor(0).unwrap().by(&port);
    for round in 0..200 {
        let sent: Vec<u64> = (0..50).map(|n| actor.send(&Numbered::new(round * 50 + n)).unwrap()).collect();
        for id in sent {
            assert_eq!(port.receive(LONG).unwrap().about, id);
        }
    }
    assert_eq!(executor.actor(0).unwrap().telemetry().unwrap().handled, 10_000);
}

fn batches(setup: &Setup) {
    let executor = setup.launch(ECHO, &ExecutorOptions { mailbox_slots: 64, ..options(2, 4) });
    let port = Arc::new(setup.runtime.port().unwrap());
    let actor = executor.actor(3).unwrap().by(&port);
    for round in 0..200_u64 {
        let numbers = round * 40..round * 40 + 40;
        let mut batch: Vec<Message> =
            numbers.clone().map(|number| Message::to(actor.address(), &Numbered::new(number))).collect();
        actor.try_send_all(&mut batch).unwrap();
        for (number, sent) in numbers.zip(&batch) {
            let answer = port.receive(LONG).unwrap();
            assert_eq!((answer.about, answer.read()), (sent.id, Some(Numbered::new(number))));
        }
        executor.drain(LONG).unwrap();
    }
    let mut large = vec![Message::to(actor.address(), &Numbered::new(1)); 65];
    assert_eq!(actor.try_send_all(&mut large), Err(ActorError::Full { what: "the mailbox", slots: 64 }));
    actor.ping().unwrap();
    assert!(port.try_receive().is_none(), "none of them");
    // What an address says is for whom the handle is.
    let mut others = [Message::to(executor.actor(0).unwrap().address(), &Numbered::new(5))];
    actor.try_send_all(&mut others).unwrap();
    assert_eq!(port.receive(LONG).unwrap().sender(), actor.address());
}

fn unread(setup: &Setup) {
    let executor = setup.launch(ECHO, &options(1, 1));
    let port = Arc::new(setup.runtime.port().unwrap());
    let actor = executor.actor(0).unwrap().by(&port);
    let mut sent = 0;
    let refused = loop {
        match actor.send(&Numbered::new(sent)) {
            Ok(_) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 2 * UNREAD_MAX as u64);
    };
    assert!(matches!(refused, ActorError::Unread { unread, .. } if unread >= UNREAD_MAX), "{refused}");
    // Others of the same lane are not held up, and nothing was lost.
    executor.actor(0).unwrap().call::<_, Numbered>(&Numbered::new(1), LONG).unwrap();
    for number in 0..sent {
        assert_eq!(port.receive(LONG).unwrap().read(), Some(Numbered::new(number)));
    }
    actor.call::<_, Numbered>(&Numbered::new(2), LONG).unwrap();
}

fn deadlines(setup: &Setup) {
    let executor = setup.launch(ECHO, &options(1, 1));
    let actor = executor.actor(0).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let send = |about| {
        let message = Message { about, ..Message::to(actor.address(), &Numbered::new(1)) };
        actor.request_message(message).unwrap().wait(LONG)
    };
    assert_eq!(send(now - 1_000_000).unwrap_err(), ActorError::Expired { to: actor.address() });
    assert_eq!(send(now + 60_000_000_000).unwrap().read(), Some(Numbered::new(1)));
}

fn unanswered(setup: &Setup) {
    let executor = setup.launch(SPIN, &options(1, 1));
    let port = Arc::new(setup.runtime.port().unwrap());
    let actor = executor.actor(0).unwrap().by(&port);
    let after = Duration::from_millis(1);
    let error = actor.call::<_, spin::Work>(&spin::Work { us: 30_000 }, after).unwrap_err();
    assert_eq!(error, ActorError::Timeout { to: actor.address(), after });
    // Dropped before it was answered, and one that nobody ever answers.
    drop(actor.request(&spin::Work { us: 1 }).unwrap());
    for us in [30_000, 1] {
        assert_eq!(port.receive(LONG).unwrap().read(), Some(spin::Work { us }));
    }
    let sums = setup.launch(Behaviour::Builtin(Builtin::Reduce), &options(1, 1));
    let sums = sums.actor(0).unwrap().by(&port);
    let numbers = Message::of_bytes(sums.address(), reduce::NUMBERS, &[0; 8]).unwrap();
    let error = sums.request_message(numbers).unwrap().wait(Duration::from_millis(5)).unwrap_err();
    assert!(matches!(error, ActorError::Timeout { .. }), "{error}");
    assert!(port.receive(Duration::from_millis(5)).is_none());
    // A port of somebody else's could not be answered.
    let stranger = Arc::new(setup.another().port().unwrap());
    let refused = sums.by(&stranger).send(&reduce::Get).unwrap_err();
    assert_eq!(refused, ActorError::ForeignPort { port: stranger.address() });
    assert!(matches!(sums.by(&stranger).ping(), Err(ActorError::ForeignPort { .. })));
}

fn awaiting(setup: &Setup) {
    let executor = setup.launch(ECHO, &options(2, 4));
    let actors: Vec<_> = (0..4).map(|n| executor.actor(n).unwrap()).collect();
    let tokio = tokio::runtime::Builder::new_current_thread().build().unwrap();
    tokio.block_on(async {
        for number in 0..200 {
            // From parked lanes too.
            if number % 50 == 0 {
                std::thread::park_timeout(Duration::from_millis(2));
            }
            let pending: Vec<_> = actors.iter().map(|actor| actor.request(&Numbered::new(number)).unwrap()).collect();
            for answer in pending {
                assert_eq!(answer.await.unwrap().read(), Some(Numbered::new(number)));
            }
        }
    });
}

/// Sends tokens round rings of relays, and returns how often each was passed on.
fn pass_tokens(setup: &Setup, lanes: u32, actors: u32, tokens: u64, hops: u32) -> Vec<u64> {
    let executor = setup.launch(Behaviour::Builtin(Builtin::Relay), &options(lanes, actors));
    let port = Arc::new(setup.runtime.port().unwrap());
    let relays: Vec<_> = (0..actors).map(|n| executor.actor(n).unwrap().by(&port)).collect();
    for (n, actor) in relays.iter().enumerate() {
        let next = relay::Next(relays[(n + 1) % relays.len()].address().0);
        assert_eq!(actor.call::<_, relay::Next>(&next, LONG).unwrap(), next);
    }
    for tag in 0..tokens {
        let token = relay::Token { hops, home: port.address().0, tag };
        relays[tag as usize % relays.len()].send(&token).unwrap();
    }
    let mut home: Vec<u64> =
        (0..tokens).map(|_| port.receive(LONG).unwrap().read::<relay::Arrived>().unwrap().tag).collect();
    home.sort_unstable();
    assert_eq!(home, (0..tokens).collect::<Vec<_>>(), "each once");
    relays.iter().map(|actor| actor.telemetry().unwrap().handled).collect()
}

fn token_rings(setup: &Setup) {
    pass_tokens(setup, 1, 64, 1, 6_400);
    pass_tokens(setup, 3, 64, 1, 6_400);
    // More than rings between lanes have room for.
    pass_tokens(setup, 4, 8, 5_000, 16);
    // To nobody, and to somebody else's: it is said, not forgotten.
    let executor = setup.launch(Behaviour::Builtin(Builtin::Relay), &options(1, 1));
    let actor = executor.actor(0).unwrap();
    drop(setup.runtime.dead_letters());
    let total = setup.runtime.dead_letters_total();
    actor.call::<_, relay::Next>(&relay::Next(actor.address().0 + 9), LONG).unwrap();
    actor.send(&relay::Token { hops: 3, home: 0, tag: 5 }).unwrap();
    actor.ping().unwrap();
    let letters = setup.runtime.dead_letters();
    assert_eq!((letters.len(), setup.runtime.dead_letters_total()), (1, total + 1));
    let fault = letters[0].fault().unwrap();
    assert_eq!((fault.reason(), fault.to), (Some(Reason::Foreign), actor.address().0 + 9));
}

fn same_results(setup: &Setup) {
    let results = |lanes| {
        let relays = pass_tokens(setup, lanes, 12, 100, 37);
        let sums = setup.launch(Behaviour::Builtin(Builtin::Reduce), &options(lanes, 12));
        let totals: Vec<reduce::Total> = (0..12)
            .map(|index| {
                let actor = sums.actor(index).unwrap();
                for n in 0..200_u16 {
                    let bytes = (0.1 * f32::from(n) + index as f32).to_le_bytes();
                    actor.send_message(Message::of_bytes(actor.address(), reduce::NUMBERS, &bytes).unwrap()).unwrap();
                }
                actor.call(&reduce::Get, LONG).unwrap()
            })
            .collect();
        (relays, totals)
    };
    let one = results(1);
    for lanes in [2, 3, 12] {
        assert!(results(lanes) == one, "{lanes} lanes");
    }
}

fn parked(setup: &Setup) {
    if setup.runtime.kind() != DeviceKind::Cpu {
        return;
    }
    let executor = setup.launch(ECHO, &options(2, 2));
    let actor = executor.actor(1).unwrap();
    actor.call::<_, Numbered>(&Numbered::new(1), LONG).unwrap();
    let until = Instant::now() + LONG;
    while !executor.beats().iter().all(|(_, is_asleep)| *is_asleep) {
        assert!(Instant::now() < until, "a lane without messages parks");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let before: Vec<u64> = executor.beats().iter().map(|(beats, _)| *beats).collect();
    std::thread::park_timeout(Duration::from_millis(500));
    let after: Vec<u64> = executor.beats().iter().map(|(beats, _)| *beats).collect();
    assert!(before.iter().zip(&after).all(|(before, after)| after > before && after - before < 2_000), "{after:?}");
    actor.call::<_, Numbered>(&Numbered::new(2), LONG).unwrap();
}

fn draining(setup: &Setup) {
    let executor = setup.launch(COUNTER, &ExecutorOptions { reply_slots: 16, ..options(2, 4) });
    let port = Arc::new(setup.runtime.port().unwrap());
    let actors: Vec<_> = (0..4).map(|n| executor.actor(n).unwrap().by(&port)).collect();
    for n in 0..4_000 {
        actors[n % 4].send(&counter::Add(1)).unwrap();
    }
    executor.drain(LONG).unwrap();
    for actor in &actors {
        assert_eq!(actor.telemetry().unwrap().handled, 1_000);
    }
    let slow = setup.launch(SPIN, &options(1, 1));
    slow.actor(0).unwrap().send(&spin::Work { us: 50_000 }).unwrap();
    let late = slow.drain(Duration::from_millis(1));
    assert!(matches!(late, Err(ActorError::Timeout { .. })), "{late:?}");
}

fn come_and_go(setup: &Setup) {
    // Many times what the region has room for.
    for round in 0..60 {
        let shape = ExecutorOptions { mailbox_slots: 1 << 14, reply_slots: 1 << 14, ..options(4, 16) };
        let executors: Vec<Executor> = (0..3).map(|_| setup.launch(ECHO, &shape)).collect();
        let actor = executors[round % 3].actor(15).unwrap();
        actor.call::<_, Numbered>(&Numbered::new(1), LONG).unwrap();
    }
    let threads = |name: &str| -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|own| own.starts_with(name)).count()
    };
    // The system shows a thread for a moment after it has ended.
    let gone = |name: &str, count: usize| {
        let until = Instant::now() + LONG;
        while threads(name) > count {
            assert!(Instant::now() < until, "{name}: {} threads", threads(name));
            std::thread::park_timeout(Duration::from_millis(1));
        }
    };
    gone("actor-", 0);
    let own = threads("actors");
    let runtime = setup.another();
    let executor = runtime.launch("left behind", ECHO, &options(2, 2)).unwrap();
    let actor = executor.actor(0).unwrap();
    drop(runtime);
    gone("actor-", 0);
    gone("actors", own);
    assert!(matches!(actor.send(&Numbered::new(1)), Err(ActorError::Ended { .. })));
}

fn bad_shapes(setup: &Setup) {
    let launch = |options: &ExecutorOptions| setup.runtime.launch("bad", COUNTER, options).err();
    for bad in [
        options(0, 1),
        options(1, 0),
        options(2, 1),
        options(1_000, 2_000),
        options(1, 1 << 24),
        ExecutorOptions { mailbox_slots: 100, ..options(1, 1) },
        ExecutorOptions { reply_slots: 1, ..options(1, 1) },
        ExecutorOptions { state_bytes: 4, ..options(1, 1) },
        ExecutorOptions { state_bytes: u32::MAX, ..options(1, 1) },
    ] {
        let refused = launch(&bad);
        assert!(matches!(refused, Some(ActorError::BadShape { .. })), "{bad:?}: {refused:?}");
    }
    let large = ExecutorOptions { mailbox_slots: 1 << 16, ..options(200, 200) };
    assert!(matches!(launch(&large), Some(ActorError::NoRoom { .. })));
    setup.launch(COUNTER, &options(1, 1));
}

fn terminate_race(setup: &Setup) {
    const BURST_MAX: usize = 500;
    let rounds = std::env::var("TENSOR_WASM_TEST_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let executor = setup.launch(ECHO, &ExecutorOptions { mailbox_slots: 64, ..options(2, 2) });
    let (go, ended_rounds) = (AtomicU64::new(0), AtomicU64::new(0));
    let (mut sent_total, mut returned) = (0, 0);
    let (sending, ending) = (Arc::new(setup.runtime.port().unwrap()), Arc::new(setup.runtime.port().unwrap()));
    std::thread::scope(|scope| {
        let actor = executor.actor(1).unwrap();
        let ended = actor.by(&ending);
        let (go, ended_rounds) = (&go, &ended_rounds);
        scope.spawn(move || {
            for round in 1..=rounds {
                while go.load(Ordering::Acquire) < round {
                    std::thread::yield_now();
                }
                ended.terminate().unwrap();
                ended.activate().unwrap();
                ended_rounds.store(round, Ordering::Release);
            }
        });
        let sender = actor.by(&sending);
        for round in 1..=rounds {
            go.store(round, Ordering::Release);
            let mut sent = Vec::new();
            // The actor ends and begins anew somewhere in the middle.
            while ended_rounds.load(Ordering::Acquire) < round {
                if sent.len() < BURST_MAX {
                    sent.push(sender.send(&Numbered::new(sent.len() as u64)).unwrap());
                } else {
                    std::thread::yield_now();
                }
            }
            // Every one is answered or comes back, in order.
            sent_total += sent.len();
            for id in sent {
                let answer = sending.receive(LONG).unwrap();
                assert_eq!(answer.about, id, "round {round}");
                match answer.fault() {
                    None => assert_eq!(answer.flags, REPLY),
                    Some(fault) => {
                        assert_eq!(fault.reason(), Some(Reason::Terminated));
                        returned += 1;
                    }
                }
            }
        }
    });
    println!("    {returned} of {sent_total} came back");
    assert!(sending.try_receive().is_none(), "and nothing else comes");
}

/// Damage to what host and lanes share, done while a lane is busy: where the words are is counted from the layout.
fn damage(setup: &Setup) {
    const HEADER: u64 = 128;
    let shape = ExecutorOptions { mailbox_slots: 8, ..options(1, 1) };
    let control = HEADER + 128;
    let mailbox = control + 128;
    // A lane of a GPU has fetched what follows, and does not say so when it stands.
    let is_cpu = setup.runtime.kind() == DeviceKind::Cpu;
    for is_torn in [true, false].into_iter().filter(|is_torn| is_cpu || !is_torn) {
        let runtime = setup.another();
        let region = runtime.device().region(REGION).unwrap();
        let executor = runtime.launch("damaged", SPIN, &shape).unwrap();
        let port = Arc::new(runtime.port().unwrap());
        let actor = executor.actor(0).unwrap().by(&port);
        // A handshake and an activation came before.
        actor.send(&spin::Work { us: 80_000 }).unwrap();
        if is_torn {
            let call = actor.request(&spin::Work { us: 1 }).unwrap();
            region.word(mailbox + 3 * 128 + 5 * 16 + 8).unwrap().store(0, Ordering::Release);
            let error = call.wait(Duration::from_secs(2)).unwrap_err();
            assert_eq!(error, ActorError::Torn { lane: 0, position: 3 });
        } else {
            region.word(control + 64).unwrap().store(1 << 50, Ordering::Release);
            let error = (0..100).find_map(|_| actor.try_send(&spin::Work { us: 1 }).err()).unwrap();
            assert_eq!(error, ActorError::Corrupt { lane: 0 });
        }
    }
}

fn killed_worker(setup: &Setup) {
    if setup.placement == Placement::Thread {
        return;
    }
    let runtime = setup.another();
    for round in 1..=3 {
        let executor = runtime.launch("doomed", SPIN, &options(2, 2)).unwrap();
        let actor = executor.actor(1).unwrap();
        let (call, waits) = (actor.request(&spin::Work { us: 90_000 }).unwrap(), actor.request(&spin::Work { us: 1 }));
        let pid = runtime.device().worker_pid().unwrap().to_string();
        assert!(std::process::Command::new("kill").args(["-9", &pid]).status().unwrap().success());
        for lost in [call.wait(LONG).map(drop), waits.and_then(|call| call.wait(LONG).map(drop))] {
            assert!(matches!(lost, Err(ActorError::DeviceLost { .. })), "{lost:?}");
        }
        assert!(matches!(actor.send(&spin::Work { us: 1 }), Err(ActorError::DeviceLost { .. })));
        let until = Instant::now() + LONG;
        while runtime.device().restarts() < round {
            assert!(Instant::now() < until);
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
    let executor = runtime.launch("after", COUNTER, &options(1, 1)).unwrap();
    assert_eq!(executor.actor(0).unwrap().call::<_, counter::Value>(&counter::Get, LONG).unwrap(), counter::Value(0));
}

fn own_device(setup: &Setup) {
    let memory = SlabPlan { staging_bytes: 2 << 20, pinned_bytes: 0, regions: vec![(REGION.to_owned(), 4 << 20)] };
    let host = host_kernels(HostKernels::default());
    let options = OpenOptions {
        choice: setup.choice,
        placement: setup.placement.clone(),
        memory,
        host,
        ..OpenOptions::default()
    };
    let runtime = Runtime::builder().on(Device::open(&options).unwrap()).build().unwrap();
    let executor = runtime.launch("brought", ECHO, &self::options(1, 1)).unwrap();
    executor.actor(0).unwrap().call::<_, Numbered>(&Numbered::new(1), LONG).unwrap();
    let without = OpenOptions { memory: SlabPlan { staging_bytes: 2 << 20, ..SlabPlan::default() }, ..options };
    let refused = Runtime::builder().on(Device::open(&without).unwrap()).build().err();
    assert!(matches!(refused, Some(ActorError::Unsupported { .. })), "{refused:?}");
}
