//! What every device must do, in one body per promise, run on every backend and placement there is: the CPU always,
//! CUDA where there is a driver. A program of its own, so that it can be its own worker process and be carried to a
//! machine without a toolchain. Prints what it ran; `conformance NAME` runs the cases whose name contains NAME.

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

#[path = "conformance/streams.rs"]
mod streams;

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tensor_wasm_gpu::{
    Device, DeviceChoice, DeviceError, DeviceEvent, DeviceKind, Events, GraphStep, Grid, Handle, HostCode, HostKernels,
    HostLaunch, HostModule, Kernel, OpenOptions, Param, Params, Pinned, Placement, SlabPlan, Stream, Tenant,
    TenantLimits,
};

/// How many hardware queues the driver gives a process.
const QUEUES_VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Where a case runs.
struct Setup {
    options: OpenOptions,
    device: Device,
    is_process: bool,
}

type Case = (&'static str, fn(&Setup));

const CASES: &[Case] = &[
    ("buffers_read_as_zeros_also_where_others_wrote", buffers_read_as_zeros),
    ("writes_come_back_at_every_size_and_offset", writes_come_back),
    ("copies_and_fills_do_what_they_say", copies_and_fills),
    ("bad_sizes_and_ranges_are_refused", bad_sizes_and_ranges),
    ("stale_and_foreign_handles_are_refused", stale_and_foreign_handles),
    ("quota_limits_what_a_tenant_holds", quota_limits),
    ("memory_the_device_does_not_have_is_refused", out_of_memory),
    ("pinned_memory_is_seen_by_the_device", pinned_memory),
    ("pinned_ranges_are_checked", pinned_ranges),
    ("work_of_a_tenant_is_done_in_order", order_is_kept),
    ("ten_thousand_leaked_handles_come_back_with_their_tenant", leaked_handles),
    ("dropped_completions_leak_nothing", dropped_completions),
    ("a_full_line_pushes_back_and_recovers", back_pressure),
    ("random_use_by_many_tenants_matches_a_model", random_use),
    ("random_use_on_many_streams_matches_a_model", streams::random_streams),
    ("a_module_that_the_compiler_fails_on_costs_nobody_the_lane", streams::failing_compiler),
    ("streams_of_a_tenant_run_side_by_side", streams::side_by_side),
    ("a_buffer_is_used_in_the_order_asked_for_on_whatever_streams", streams::buffers_across_streams),
    ("copies_that_nobody_waits_for_have_the_bytes_there_were", streams::writes_ahead),
    ("a_stream_is_awaited_without_sending_anything", streams::synchronized),
    ("reads_that_are_begun_wait_for_nothing_and_have_what_was_there", streams::reads_begun),
    ("steps_of_a_graph_that_depend_on_others_come_after_those", streams::branched_graphs),
    ("more_streams_than_there_are_is_sharing_not_failing", streams::shared_streams),
    ("sixteen_streams_get_no_more_of_a_contended_device_than_one", streams::contended_streams),
    ("tenants_come_and_go_beyond_the_maximum", streams::many_tenants),
    ("a_named_region_is_seen_by_worker_and_device", streams::named_region),
    ("a_resident_kernel_beats_until_it_is_told_to_end", streams::resident),
    ("a_resident_kernel_that_neither_beats_nor_ends_costs_its_worker", streams::mute_resident),
    ("graphs_replay_what_was_recorded", graphs),
    ("sequences_run_at_once_and_graphs_with_other_buffers_in_the_same_places", sequences),
    ("kernels_run_or_are_refused", kernels),
    ("bad_modules_kernels_parameters_and_grids_are_refused", bad_kernels),
    ("a_modules_variables_are_its_tenants_own", own_globals),
    ("a_slow_compilation_holds_up_nobody", slow_compiling),
    ("hoarded_completions_starve_nobody", hoarded_completions),
    ("awaiting_and_waiting_see_the_same", awaiting_and_waiting),
    ("a_lost_device_says_so_and_comes_back", lost_and_back),
    ("a_killed_worker_is_replaced_under_load", killed_worker),
    ("a_hanging_worker_is_replaced", hanging_worker),
    ("a_faulting_kernel_costs_its_worker_and_nothing_else", faulting_kernel),
    ("statistics_and_metrics_follow", statistics),
    ("who_sends_is_charged_for_no_more_than_the_time_that_passed", streams::who_sends_is_charged),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if let [_, command, _, fd, _, choice] = args.as_slice()
        && command.starts_with("device-worker")
    {
        let host = if command == streams::WITH_KERNELS { streams::TestKernels::host() } else { HostKernels::default() };
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
    let mut failed = Vec::new();
    let mut passed = 0;
    for choice in [DeviceChoice::Cpu, DeviceChoice::Cuda(0)] {
        for is_process in [false, true] {
            let process = Placement::Process { exe: exe.clone(), args: vec!["device-worker".to_owned()] };
            let placement = if is_process { process } else { Placement::Thread };
            let memory = SlabPlan { staging_bytes: 16 << 20, pinned_bytes: 16 << 20, ..SlabPlan::default() };
            let hang = Duration::from_millis(500);
            let options = OpenOptions { choice, placement, memory, hang, ..OpenOptions::default() };
            let place = format!("{choice} in a {}", if is_process { "process" } else { "thread" });
            let device = match Device::open(&options) {
                Ok(device) => device,
                Err(error) => {
                    assert_ne!(choice, DeviceChoice::Cpu, "the CPU is always there: {error}");
                    println!("skipped: no CUDA device ({place}): {error}");
                    continue;
                }
            };
            let setup = Setup { options, device, is_process };
            for (name, case) in CASES.iter().filter(|(name, _)| name.contains(&filter)) {
                let started = Instant::now();
                let ok = catch_unwind(AssertUnwindSafe(|| case(&setup))).is_ok();
                println!("{} {place}: {name} ({:.0?})", if ok { "ok    " } else { "FAILED" }, started.elapsed());
                if ok {
                    passed += 1;
                } else {
                    failed.push(format!("{place}: {name}"));
                }
            }
        }
    }
    println!("{passed} passed, {} failed", failed.len());
    for name in &failed {
        println!("    {name}");
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

impl Setup {
    fn tenant(&self, name: &str) -> Tenant {
        self.device.tenant(name, TenantLimits::default()).unwrap()
    }

    fn is_cuda(&self) -> bool {
        self.device.kind() == DeviceKind::Cuda
    }
}

fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    StdRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}

fn read(tenant: &Tenant, buffer: Handle, offset: u64, len: usize) -> Vec<u8> {
    // Poisoned: what is not written shows.
    let mut bytes = vec![0xa5; len];
    tenant.read_blocking(buffer, offset, &mut bytes).unwrap();
    bytes
}

fn write(tenant: &Tenant, buffer: Handle, offset: u64, bytes: &[u8]) {
    tenant.write_blocking(buffer, offset, bytes).unwrap();
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn buffers_read_as_zeros(setup: &Setup) {
    let tenant = setup.tenant("zeros");
    for size in [1, 100, 5_000, 3 << 20] {
        for _ in 0..3 {
            let buffer = tenant.buffer(size).unwrap();
            assert!(read(&tenant, buffer.handle(), 0, size as usize).iter().all(|byte| *byte == 0), "{size}");
            write(&tenant, buffer.handle(), 0, &vec![0xff; size as usize]);
        }
    }
    // A part written first leaves the rest zero.
    let buffer = tenant.buffer(9_000).unwrap();
    write(&tenant, buffer.handle(), 100, &[7; 10]);
    let seen = read(&tenant, buffer.handle(), 0, 9_000);
    assert!(seen[100..110].iter().all(|byte| *byte == 7));
    assert!(seen[..100].iter().chain(&seen[110..]).all(|byte| *byte == 0));
}

fn writes_come_back(setup: &Setup) {
    let tenant = setup.tenant("writes");
    for (seed, size) in [1, 2, 4095, 4096, 4097, 65_537, (2 << 20) + 5, 20 << 20].into_iter().enumerate() {
        let bytes = random_bytes(seed as u64, size);
        let buffer = tenant.buffer(size as u64 + 13).unwrap();
        write(&tenant, buffer.handle(), 13, &bytes);
        assert!(read(&tenant, buffer.handle(), 13, size) == bytes, "{size} bytes, blocking");
        let other = tenant.buffer(size as u64 + 3).unwrap();
        block_on(async {
            tenant.write(other.handle(), 3, &bytes).await.unwrap();
            let mut seen = vec![0xa5; size];
            tenant.read(other.handle(), 3, &mut seen).await.unwrap();
            assert!(seen == bytes, "{size} bytes, async");
        });
        let begun = tenant.try_read(other.handle(), 3, size).unwrap();
        assert_eq!(begun.is_some(), size <= 2 << 20, "{size} bytes pass in one piece or not");
        if let Some(begun) = begun {
            let mut seen = vec![0xa5; size];
            begun.finish(&mut seen).unwrap();
            assert!(seen == bytes, "{size} bytes, begun before");
            let begun = tenant.try_read(other.handle(), 3, size).unwrap().unwrap();
            assert!(matches!(begun.finish(&mut seen[1..]), Err(DeviceError::BadLaunch { .. })));
        }
    }
    let empty = tenant.buffer(8).unwrap();
    write(&tenant, empty.handle(), 8, &[]);
    assert_eq!(read(&tenant, empty.handle(), 3, 0), []);
}

fn copies_and_fills(setup: &Setup) {
    let tenant = setup.tenant("copies");
    let (a, b) = (tenant.buffer(100_000).unwrap(), tenant.buffer(100_000).unwrap());
    let bytes = random_bytes(1, 100_000);
    write(&tenant, a.handle(), 0, &bytes);
    tenant.copy((a.handle(), 10), (b.handle(), 20), 90_000).unwrap().wait().unwrap();
    let seen = read(&tenant, b.handle(), 0, 100_000);
    assert!(seen[20..90_020] == bytes[10..90_010]);
    assert!(seen[..20].iter().chain(&seen[90_020..]).all(|byte| *byte == 0));
    tenant.fill(b.handle(), 50, 1_000, 0x5a).unwrap().wait().unwrap();
    assert!(read(&tenant, b.handle(), 50, 1_000).iter().all(|byte| *byte == 0x5a));
    tenant.copy((a.handle(), 0), (a.handle(), 50_000), 40_000).unwrap().wait().unwrap();
    assert!(read(&tenant, a.handle(), 50_000, 40_000) == bytes[..40_000]);
    tenant.copy((a.handle(), 0), (b.handle(), 0), 0).unwrap().wait().unwrap();
}

fn bad_sizes_and_ranges(setup: &Setup) {
    let tenant = setup.tenant("ranges");
    assert_eq!(tenant.alloc(0), Err(DeviceError::ZeroSize));
    let buffer = tenant.buffer(1_000).unwrap();
    let handle = buffer.handle();
    let out =
        |result: Result<(), DeviceError>| assert!(matches!(result, Err(DeviceError::OutOfRange { .. })), "{result:?}");
    for (offset, len) in [(0, 1_001), (1_000, 1), (u64::MAX, 1), (1, usize::MAX)] {
        out(tenant.fill(handle, offset, len as u64, 1).map(drop));
        out(tenant.copy((handle, offset), (handle, 0), len as u64).map(drop));
        out(tenant.copy((handle, 0), (handle, offset), len as u64).map(drop));
        if len < 1 << 20 {
            out(tenant.write_blocking(handle, offset, &vec![1; len]));
            out(tenant.read_blocking(handle, offset, &mut vec![1; len]));
        }
    }
    out(tenant.write_blocking(handle, 0, &vec![1; 30 << 20]));
    out(tenant.read_blocking(handle, 0, &mut vec![1; 30 << 20]));
    assert!(read(&tenant, handle, 0, 1_000).iter().all(|byte| *byte == 0), "nothing was written");
}

fn stale_and_foreign_handles(setup: &Setup) {
    let (tenant, other) = (setup.tenant("mine"), setup.tenant("theirs"));
    let handle = tenant.alloc(100).unwrap();
    let theirs = other.alloc(100).unwrap();
    assert_eq!(tenant.read_blocking(theirs, 0, &mut [0; 4]), Err(DeviceError::ForeignHandle));
    assert_eq!(tenant.free(theirs), Err(DeviceError::ForeignHandle));
    assert_eq!(tenant.copy((theirs, 0), (handle, 0), 4).err(), Some(DeviceError::ForeignHandle));
    tenant.free(handle).unwrap();
    assert_eq!(tenant.free(handle), Err(DeviceError::StaleHandle), "double free");
    assert_eq!(tenant.write_blocking(handle, 0, &[1]), Err(DeviceError::StaleHandle), "use after free");
    let again = tenant.alloc(100).unwrap();
    assert_ne!(again, handle);
    assert_eq!(tenant.size(handle), Err(DeviceError::StaleHandle), "the slot's next buffer is another one");
    let mut rng = StdRng::seed_from_u64(7);
    for _ in 0..10_000 {
        let made_up = Handle(rng.random());
        assert!(made_up == again || tenant.read_blocking(made_up, 0, &mut [0; 4]).is_err());
    }
    other.free(theirs).unwrap();
    tenant.free(again).unwrap();
}

fn quota_limits(setup: &Setup) {
    let limits = TenantLimits { memory_bytes_max: 1 << 20, ..TenantLimits::default() };
    let tenant = setup.device.tenant("small", limits).unwrap();
    let half = tenant.buffer(512 << 10).unwrap();
    let error = tenant.alloc(768 << 10).unwrap_err();
    assert!(
        matches!(&error, DeviceError::OverQuota { tenant, used_bytes: 524_288, .. } if tenant == "small"),
        "{error}"
    );
    assert!(matches!(tenant.alloc(u64::MAX), Err(DeviceError::OverQuota { .. })));
    drop(half);
    drop(tenant.buffer(1 << 20).unwrap());
}

fn out_of_memory(setup: &Setup) {
    let limits = TenantLimits { memory_bytes_max: 1 << 60, ..TenantLimits::default() };
    let tenant = setup.device.tenant("greedy", limits).unwrap();
    let error = tenant.alloc(1 << 50).unwrap_err();
    assert_eq!(error, DeviceError::OutOfMemory { asked_bytes: 1 << 50 });
    // It was that one allocation's error.
    let buffer = tenant.buffer(100).unwrap();
    write(&tenant, buffer.handle(), 0, &[1, 2, 3]);
    assert_eq!(read(&tenant, buffer.handle(), 0, 3), [1, 2, 3]);
}

fn pinned_memory(setup: &Setup) {
    let tenant = setup.tenant("pinned");
    let (from, to) = (setup.device.pinned(1 << 20).unwrap(), setup.device.pinned(1 << 20).unwrap());
    let bytes = random_bytes(3, 1 << 20);
    from.write(0, &bytes).unwrap();
    let buffer = tenant.buffer(1 << 20).unwrap();
    tenant.write_pinned((&from, 0), (buffer.handle(), 0), 1 << 20).unwrap().wait().unwrap();
    tenant.read_pinned((buffer.handle(), 0), (&to, 0), 1 << 20).unwrap().wait().unwrap();
    let mut seen = vec![0xa5; 1 << 20];
    to.read(0, &mut seen).unwrap();
    assert!(seen == bytes, "through the device and back");
    // The part stays while a job uses it, whoever lets go of it.
    let completion = tenant.write_pinned((&from, 7), (buffer.handle(), 0), 1 << 19).unwrap();
    drop(from);
    completion.wait().unwrap();
    assert!(read(&tenant, buffer.handle(), 0, 1 << 19) == bytes[7..7 + (1 << 19)]);
}

fn pinned_ranges(setup: &Setup) {
    let tenant = setup.tenant("pinned-ranges");
    let pinned = setup.device.pinned(4096).unwrap();
    let buffer = tenant.buffer(1 << 20).unwrap();
    let to = (buffer.handle(), 0);
    for (offset, bytes) in [(0, 4097), (4096, 1), (u64::MAX, 1), (1, u64::MAX)] {
        let refused = tenant.write_pinned((&pinned, offset), to, bytes);
        assert!(matches!(refused.err(), Some(DeviceError::OutOfRange { .. })));
        let refused = tenant.read_pinned(to, (&pinned, offset), bytes);
        assert!(matches!(refused.err(), Some(DeviceError::OutOfRange { .. })));
    }
    assert_eq!(setup.device.pinned(0).err(), Some(DeviceError::ZeroSize));
    assert!(matches!(setup.device.pinned(1 << 40).err(), Some(DeviceError::OutOfMemory { .. })));
}

fn order_is_kept(setup: &Setup) {
    let tenant = setup.tenant("order");
    let buffer = tenant.buffer(1 << 20).unwrap();
    let mut last = None;
    for n in 0..500_u32 {
        // Alternately slow and quick: order is not a matter of luck.
        let len = if n.is_multiple_of(7) { 1 << 20 } else { 16 };
        last = Some(retry(|| tenant.fill(buffer.handle(), 0, len, n as u8)));
    }
    last.unwrap().wait().unwrap();
    assert_eq!(read(&tenant, buffer.handle(), 0, 16), [499_u32 as u8; 16]);
    assert_eq!(read(&tenant, buffer.handle(), 16, 16), [497_u32 as u8; 16]);
}

/// Sends again while the line is full, as a caller who feels back-pressure does.
fn retry<T>(mut send: impl FnMut() -> Result<T, DeviceError>) -> T {
    loop {
        match send() {
            Ok(sent) => return sent,
            Err(DeviceError::Busy { .. }) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

fn leaked_handles(setup: &Setup) {
    for _ in 0..3 {
        let tenant = setup.tenant("leaky");
        for _ in 0..10_000 {
            tenant.alloc(300).unwrap();
        }
        assert_eq!(tenant.memory().buffers, 10_000);
        drop(tenant);
    }
    assert_eq!(setup.tenant("leaky").memory().used_bytes, 0);
}

fn dropped_completions(setup: &Setup) {
    let tenant = setup.tenant("careless");
    let buffer = tenant.buffer(64).unwrap();
    for n in 0..5_000_u32 {
        drop(retry(|| tenant.fill(buffer.handle(), 0, 64, n as u8)));
    }
    retry(|| tenant.fill(buffer.handle(), 0, 64, 9)).wait().unwrap();
    assert_eq!(read(&tenant, buffer.handle(), 0, 64), [9; 64]);
}

fn back_pressure(setup: &Setup) {
    let limits = TenantLimits { running_max: 2, waiting_max: 3, ..TenantLimits::default() };
    let tenant = setup.device.tenant("eager", limits).unwrap();
    let buffer = tenant.buffer(64 << 20).unwrap();
    write(&tenant, buffer.handle(), 0, &[1]);
    let mut sent = Vec::new();
    let refused = loop {
        match tenant.fill(buffer.handle(), 0, 64 << 20, 1) {
            Ok(completion) => sent.push(completion),
            Err(error) => break error,
        }
        assert!(sent.len() < 100_000, "never full");
    };
    assert!(matches!(&refused, DeviceError::Busy { queued: 3, .. }), "{refused}");
    sent.into_iter().for_each(|completion| completion.wait().unwrap());
    tenant.fill(buffer.handle(), 0, 1, 1).unwrap().wait().unwrap();
}

fn random_use(setup: &Setup) {
    std::thread::scope(|scope| {
        for seed in 0..6 {
            scope.spawn(move || {
                let tenant = setup.tenant(&format!("random-{seed}"));
                let mut rng = StdRng::seed_from_u64(seed);
                let mut model: BTreeMap<Handle, Vec<u8>> = BTreeMap::new();
                for _ in 0..300 {
                    let choice = rng.random_range(0..10);
                    let picked = model.keys().copied().nth(rng.random_range(0..model.len().max(1)));
                    match (choice, picked) {
                        (0..3, _) | (_, None) => {
                            let size = rng.random_range(1..200_000);
                            model.insert(tenant.alloc(size as u64).unwrap(), vec![0; size]);
                        }
                        (3, Some(handle)) => {
                            tenant.free(handle).unwrap();
                            model.remove(&handle);
                        }
                        (4..7, Some(handle)) => {
                            let bytes = model.get_mut(&handle).unwrap();
                            let at = rng.random_range(0..bytes.len());
                            let len = rng.random_range(0..=bytes.len() - at);
                            rng.fill(&mut bytes[at..at + len]);
                            write(&tenant, handle, at as u64, &bytes[at..at + len]);
                        }
                        (7, Some(handle)) => {
                            let other = *model.keys().next_back().unwrap();
                            let source = model[&handle].clone();
                            let len = source.len().min(model[&other].len()) / 2;
                            if handle != other {
                                tenant.copy((handle, 0), (other, 0), len as u64).unwrap().wait().unwrap();
                                model.get_mut(&other).unwrap()[..len].copy_from_slice(&source[..len]);
                            }
                        }
                        (_, Some(handle)) => {
                            let bytes = &model[&handle];
                            let at = rng.random_range(0..bytes.len());
                            assert!(read(&tenant, handle, at as u64, bytes.len() - at) == bytes[at..], "seed {seed}");
                        }
                    }
                }
                for (handle, bytes) in &model {
                    assert!(read(&tenant, *handle, 0, bytes.len()) == *bytes, "seed {seed}");
                }
            });
        }
    });
}

fn graphs(setup: &Setup) {
    let tenant = setup.tenant("graphs");
    let (a, b) = (tenant.buffer(1_000).unwrap(), tenant.buffer(1_000).unwrap());
    write(&tenant, a.handle(), 0, &random_bytes(5, 1_000));
    let steps = [
        GraphStep::Copy { from: (a.handle(), 0), to: (b.handle(), 500), bytes: 500 },
        GraphStep::Fill { buffer: b.handle(), offset: 0, bytes: 500, value: 3 },
    ];
    let graph = block_on(tenant.graph(&steps)).unwrap();
    assert!(read(&tenant, b.handle(), 0, 1_000).iter().all(|byte| *byte == 0), "recorded, not run");
    for seed in 0..20 {
        let bytes = random_bytes(seed, 1_000);
        write(&tenant, a.handle(), 0, &bytes);
        tenant.replay(&graph).unwrap().wait().unwrap();
        let seen = read(&tenant, b.handle(), 0, 1_000);
        assert!(seen[..500] == [3; 500] && seen[500..] == bytes[..500]);
    }
    // A graph is its tenant's, and only while its buffers are there.
    assert_eq!(setup.tenant("other").replay(&graph).err(), Some(DeviceError::ForeignHandle));
    let gone = tenant.alloc(100).unwrap();
    let short_lived =
        block_on(tenant.graph(&[GraphStep::Fill { buffer: gone, offset: 0, bytes: 100, value: 1 }])).unwrap();
    tenant.free(gone).unwrap();
    assert_eq!(tenant.replay(&short_lived).err(), Some(DeviceError::StaleHandle));
    // A recording that is refused zeroes nothing and promises nothing.
    let fresh = tenant.alloc(5_000).unwrap();
    write(&tenant, fresh, 0, &[0xff; 5_000]);
    tenant.free(fresh).unwrap();
    let again = tenant.alloc(5_000).unwrap();
    let refused = [
        GraphStep::Fill { buffer: again, offset: 0, bytes: 1, value: 1 },
        GraphStep::Fill { buffer: gone, offset: 0, bytes: 1, value: 1 },
    ];
    assert!(block_on(tenant.graph(&refused)).is_err());
    assert!(read(&tenant, again, 0, 5_000).iter().all(|byte| *byte == 0), "never bytes from before");
    tenant.free(again).unwrap();
    let bad = [GraphStep::Fill { buffer: b.handle(), offset: 999, bytes: 2, value: 3 }];
    assert!(matches!(block_on(tenant.graph(&bad)), Err(DeviceError::OutOfRange { .. })));
}

fn sequences(setup: &Setup) {
    let tenant = setup.tenant("sequences");
    let a = tenant.buffer(1_000).unwrap();
    let bytes = random_bytes(6, 1_000);
    write(&tenant, a.handle(), 0, &bytes);
    let steps = |to: Handle| {
        [
            GraphStep::Copy { from: (a.handle(), 0), to: (to, 0), bytes: 1_000 },
            GraphStep::Fill { buffer: to, offset: 10, bytes: 20, value: 7 },
        ]
    };
    let expected: Vec<u8> =
        bytes.iter().enumerate().map(|(n, byte)| if (10..30).contains(&n) { 7 } else { *byte }).collect();
    let first = tenant.alloc(1_000).unwrap();
    tenant.run(&steps(first), &[first]).unwrap().wait().unwrap();
    assert_eq!(read(&tenant, first, 0, 1_000), expected);
    // What a sequence does not say that it overwrites reads as zeros before it.
    tenant.free(first).unwrap();
    let second = tenant.alloc(1_000).unwrap();
    let part = [GraphStep::Fill { buffer: second, offset: 0, bytes: 10, value: 9 }];
    tenant.run(&part, &[]).unwrap().wait().unwrap();
    let seen = read(&tenant, second, 0, 1_000);
    assert!(seen[..10] == [9; 10] && seen[10..].iter().all(|byte| *byte == 0), "never bytes from before");
    // A block that was freed is the next that is handed out: the graph takes it for the other.
    let graph = block_on(tenant.graph_over(&steps(second), &[second])).unwrap();
    tenant.free(second).unwrap();
    let third = tenant.alloc(1_000).unwrap();
    let replayed = tenant.replay_over(&graph, &[a.handle(), third], &[third]).unwrap();
    replayed.expect("it lies where the other lay").wait().unwrap();
    assert_eq!(read(&tenant, third, 0, 1_000), expected);
    // In another place, or of another size, it is not the same.
    let elsewhere = tenant.alloc(1_000).unwrap();
    assert!(tenant.replay_over(&graph, &[a.handle(), elsewhere], &[]).unwrap().is_none());
    assert!(tenant.replay_over(&graph, &[a.handle()], &[]).unwrap().is_none());
    tenant.free(third).unwrap();
    let smaller = tenant.alloc(999).unwrap();
    assert!(tenant.replay_over(&graph, &[a.handle(), smaller], &[]).unwrap().is_none());
    assert_eq!(tenant.replay_over(&graph, &[a.handle(), third], &[]).err(), Some(DeviceError::StaleHandle));
    let other = setup.tenant("other sequences");
    let own = other.alloc(1_000).unwrap();
    assert_eq!(other.replay_over(&graph, &[own, own], &[]).err(), Some(DeviceError::ForeignHandle));
    // A few bytes travel with their job, in its place among the others.
    let small = tenant.alloc(5_000).unwrap();
    let sent: Vec<_> = (0..50).map(|n| tenant.write_small(small, n, &[7, n as u8]).unwrap()).collect();
    assert!(matches!(tenant.write_small(small, 0, &[0; 4_097]), Err(DeviceError::BadLaunch { .. })));
    assert!(matches!(tenant.write_small(small, 4_999, &[0; 2]), Err(DeviceError::OutOfRange { .. })));
    sent.into_iter().for_each(|sent| sent.wait().unwrap());
    let seen = read(&tenant, small, 0, 60);
    assert!(seen[..50].iter().all(|byte| *byte == 7) && seen[50] == 49 && seen[51..].iter().all(|byte| *byte == 0));
    // What is wrong with one step is wrong with all.
    let bad = [
        GraphStep::Fill { buffer: elsewhere, offset: 0, bytes: 1_000, value: 1 },
        GraphStep::Fill { buffer: elsewhere, offset: 999, bytes: 2, value: 1 },
    ];
    assert!(matches!(tenant.run(&bad, &[elsewhere]), Err(DeviceError::OutOfRange { .. })));
    assert!(read(&tenant, elsewhere, 0, 1_000).iter().all(|byte| *byte == 0));
}

const PTX: &str = r"
.version 7.0
.target sm_75
.address_size 64
.visible .entry add(.param .u64 a, .param .u64 b, .param .u64 out, .param .u32 n)
{
    .reg .pred %p; .reg .u32 %r<6>; .reg .u64 %d<8>; .reg .f32 %f<4>;
    ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; ld.param.u64 %d3, [out]; ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p, %r5, %r1;
    @%p ret;
    mul.wide.u32 %d4, %r5, 4;
    add.u64 %d5, %d1, %d4; add.u64 %d6, %d2, %d4; add.u64 %d7, %d3, %d4;
    ld.global.f32 %f1, [%d5]; ld.global.f32 %f2, [%d6]; add.rn.f32 %f3, %f1, %f2; st.global.f32 [%d7], %f3;
    ret;
}
.visible .entry wild()
{
    .reg .u64 %d; .reg .u32 %r;
    mov.u64 %d, 16; mov.u32 %r, 7; st.global.u32 [%d], %r;
    ret;
}
.visible .entry nothing() { ret; }
";

fn kernels(setup: &Setup) {
    let tenant = setup.tenant("kernels");
    let loaded = block_on(tenant.load(PTX.as_bytes()));
    if !setup.is_cuda() {
        assert!(matches!(&loaded, Err(DeviceError::Unsupported { what }) if what.contains("kernels")), "{loaded:?}");
        return;
    }
    let module = loaded.unwrap();
    assert_eq!(block_on(tenant.load(PTX.as_bytes())).unwrap(), module, "same bytes, same module");
    let add = block_on(tenant.kernel(&module, "add")).unwrap();
    assert!(add.threads_max >= 256 && add.registers > 0 && add.blocks_per_multiprocessor > 0, "{add:?}");
    let n = 100_003_u32;
    let float = |seed| -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(seed);
        (0..n).map(|_| rng.random_range(-1e3..1e3)).collect()
    };
    let bytes = |floats: &[f32]| -> Vec<u8> { floats.iter().flat_map(|f| f.to_le_bytes()).collect() };
    let (a, b) = (float(1), float(2));
    let size = u64::from(n) * 4;
    let buffers: Vec<_> = (0..3).map(|_| tenant.buffer(size).unwrap()).collect();
    write(&tenant, buffers[0].handle(), 0, &bytes(&a));
    write(&tenant, buffers[1].handle(), 0, &bytes(&b));
    tenant.fill(buffers[2].handle(), 0, size, 0xff).unwrap();
    let params = Params::new(buffers.iter().map(Param::from).chain([Param::U32(n)]));
    let grid = Grid { blocks: [n.div_ceil(256), 1, 1], threads: [256, 1, 1], shared_bytes: 0 };
    tenant.launch(&add, grid, &params).unwrap().wait().unwrap();
    let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert!(read(&tenant, buffers[2].handle(), 0, size as usize) == bytes(&expected));
    // The same as a graph, and with a part of the multiprocessors.
    tenant.fill(buffers[2].handle(), 0, size, 0xff).unwrap();
    let graph = block_on(tenant.graph(&[GraphStep::Launch { kernel: &add, grid, params: &params }])).unwrap();
    tenant.replay(&graph).unwrap().wait().unwrap();
    assert!(read(&tenant, buffers[2].handle(), 0, size as usize) == bytes(&expected));
    let limits = TenantLimits { multiprocessors: 8, ..TenantLimits::default() };
    let part = setup.device.tenant("part", limits).unwrap();
    assert_eq!(block_on(part.kernel(&module, "nothing")).err(), Some(DeviceError::ForeignHandle));
    let own = block_on(part.load(PTX.as_bytes())).unwrap();
    let nothing = block_on(part.kernel(&own, "nothing")).unwrap();
    part.launch(&nothing, grid, &Params::default()).unwrap().wait().unwrap();
    // A launch keeps what it uses: pinned memory read and written in place, the module, the kernel.
    let (from, to) = (setup.device.pinned(size).unwrap(), setup.device.pinned(size).unwrap());
    from.write(0, &bytes(&b)).unwrap();
    let place = |memory: &Pinned| Param::Pinned { memory: memory.clone(), offset: 0 };
    let params = Params::new([Param::from(&buffers[0]), place(&from), place(&to), Param::U32(n)]);
    let completion = tenant.launch(&add, grid, &params).unwrap();
    drop((from, params, add, module, graph));
    completion.wait().unwrap();
    let mut seen = vec![0xa5; size as usize];
    to.read(0, &mut seen).unwrap();
    assert!(seen == bytes(&expected), "in place");
    // Modules and graphs come and go.
    for n in 0..40 {
        let text = PTX.replace("%r, 7", &format!("%r, {n}"));
        let module = block_on(tenant.load(text.as_bytes())).unwrap();
        let nothing = block_on(tenant.kernel(&module, "nothing")).unwrap();
        let step = GraphStep::Launch { kernel: &nothing, grid, params: &Params::default() };
        let graph = block_on(tenant.graph(&[step])).unwrap();
        drop(tenant.replay(&graph).unwrap());
    }
}

const COUNTER: &str = r"
.version 7.0
.target sm_75
.address_size 64
.visible .global .u32 count;
.visible .entry next(.param .u64 out)
{
    .reg .u32 %r<3>; .reg .u64 %d<3>;
    ld.param.u64 %d1, [out]; mov.u64 %d2, count;
    ld.global.u32 %r1, [%d2]; add.u32 %r2, %r1, 1; st.global.u32 [%d2], %r2; st.global.u32 [%d1], %r2;
    ret;
}
";

fn own_globals(setup: &Setup) {
    if !setup.is_cuda() {
        return;
    }
    let grid = Grid { blocks: [1, 1, 1], threads: [1, 1, 1], shared_bytes: 0 };
    let count = |tenant: &Tenant, times: u32| {
        let module = block_on(tenant.load(COUNTER.as_bytes())).unwrap();
        let next = block_on(tenant.kernel(&module, "next")).unwrap();
        let out = tenant.buffer(4).unwrap();
        for _ in 0..times {
            tenant.launch(&next, grid, &Params::new([Param::from(&out)])).unwrap().wait().unwrap();
        }
        let seen = read(tenant, out.handle(), 0, 4);
        (module, u32::from_le_bytes(seen.try_into().unwrap()))
    };
    let (mine, theirs) = (setup.tenant("counts"), setup.tenant("counts-too"));
    // A kernel is of no use to whoever has its tenant's number next.
    let gone = setup.tenant("gone");
    let kept = block_on(gone.kernel(&block_on(gone.load(PTX.as_bytes())).unwrap(), "nothing")).unwrap();
    drop(gone);
    std::thread::sleep(Duration::from_millis(50));
    let heirs: Vec<Tenant> = (0..3).map(|n| setup.tenant(&format!("heir-{n}"))).collect();
    for heir in &heirs {
        assert_eq!(heir.launch(&kept, grid, &Params::default()).err(), Some(DeviceError::ForeignHandle));
    }
    let held = count(&mine, 5);
    assert_eq!(held.1, 5);
    assert_eq!(count(&theirs, 1).1, 1, "not what another tenant counted");
    assert_eq!(count(&mine, 1).1, 6, "still loaded");
}

fn slow_compiling(setup: &Setup) {
    if !setup.is_cuda() {
        return;
    }
    // More values at once than there are registers: the compiler takes a second, and for twice as many a minute.
    let mut slow =
        ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry slow(.param .u64 out)\n{\n".to_owned();
    slow += ".reg .f32 %f<1010>; .reg .u64 %d; ld.param.u64 %d, [out]; ld.global.f32 %f0, [%d];\n";
    for n in 0..1_000 {
        slow += &format!("fma.rn.f32 %f{}, %f{n}, %f{}, %f{};\n", n + 1, n / 2, n / 3);
    }
    slow += "st.global.f32 [%d], %f1000; ret;\n}\n";
    // The driver keeps what it compiled before; this it has not seen.
    slow += &format!("// {:?}\n", Instant::now());
    let (patient, hasty) = (setup.tenant("patient"), [setup.tenant("hasty"), setup.tenant("hastier")]);
    let restarts = setup.device.restarts();
    let is_loaded = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            block_on(patient.load(slow.as_bytes())).unwrap();
            is_loaded.store(true, Ordering::Release);
        });
        // Another waits behind it.
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            block_on(patient.load(PTX.as_bytes())).unwrap();
        });
        let mut slowest = Duration::ZERO;
        let mut rounds = 0;
        while !is_loaded.load(Ordering::Acquire) {
            let started = Instant::now();
            for tenant in &hasty {
                let buffer = tenant.buffer(100_000).unwrap();
                write(tenant, buffer.handle(), 0, &[7; 100_000]);
            }
            slowest = slowest.max(started.elapsed());
            rounds += 1;
        }
        assert!(rounds > 10 && slowest < Duration::from_millis(200), "{rounds} rounds, one of them {slowest:?}");
    });
    assert_eq!(setup.device.restarts(), restarts, "no worker was lost");
}

fn hoarded_completions(setup: &Setup) {
    let hoarders: Vec<Tenant> = (0..3).map(|n| setup.tenant(&format!("hoarder-{n}"))).collect();
    let mut hoard = Vec::new();
    for hoarder in &hoarders {
        let buffer = hoarder.alloc(100).unwrap();
        for _ in 0..2_000 {
            match hoarder.fill(buffer, 0, 100, 1) {
                Ok(completion) => hoard.push(completion),
                Err(DeviceError::Busy { .. }) => std::thread::sleep(Duration::from_micros(100)),
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(hoard.len() > 500, "{}", hoard.len());
    // Newcomers are served all the same.
    for n in 0..20 {
        let tenant = setup.tenant(&format!("newcomer-{n}"));
        let buffer = tenant.buffer(5_000).unwrap();
        write(&tenant, buffer.handle(), 0, &[n; 5_000]);
        assert_eq!(read(&tenant, buffer.handle(), 0, 5_000), [n; 5_000]);
    }
    let first = hoard.len();
    hoard.into_iter().for_each(|completion| completion.wait().unwrap());
    let buffer = hoarders[0].alloc(100).unwrap();
    let again: Vec<_> = (0..200).map(|_| retry(|| hoarders[0].fill(buffer, 0, 100, 1))).collect();
    assert_eq!(again.len(), 200, "after {first}");
}

fn bad_kernels(setup: &Setup) {
    if !setup.is_cuda() {
        return;
    }
    let tenant = setup.tenant("bad-kernels");
    for bad in ["", "this is not PTX", ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k() { blah; }"] {
        let error = block_on(tenant.load(bad.as_bytes())).unwrap_err();
        assert!(matches!(error, DeviceError::BadModule { .. }), "{bad:?}: {error}");
    }
    let huge = block_on(tenant.load(&vec![b' '; 3 << 20])).unwrap_err();
    assert!(matches!(huge, DeviceError::BadModule { .. }), "{huge}");
    let module = block_on(tenant.load(PTX.as_bytes())).unwrap();
    let missing = block_on(tenant.kernel(&module, "subtract")).unwrap_err();
    assert_eq!(missing, DeviceError::NoSuchKernel { name: "subtract".to_owned() });
    let add = block_on(tenant.kernel(&module, "add")).unwrap();
    let buffer = tenant.buffer(4_000).unwrap();
    let pointer = || Param::from(&buffer);
    let grid = Grid { blocks: [1, 1, 1], threads: [32, 1, 1], shared_bytes: 0 };
    let refused =
        |grid, params: &[Param]| tenant.launch(&add, grid, &Params::new(params.iter().cloned())).err().unwrap();
    let bad = refused(grid, &[pointer(), pointer(), pointer()]);
    assert!(matches!(&bad, DeviceError::BadParams { why } if why.contains("it takes 4, and 3")), "{bad}");
    let bad = refused(grid, &[pointer(), pointer(), Param::F32(1.0), Param::U32(1)]);
    assert!(matches!(&bad, DeviceError::BadParams { why } if why.contains("parameter 2")), "{bad}");
    let good = [pointer(), pointer(), pointer(), Param::U32(0)];
    for (blocks, threads, shared_bytes) in [
        ([0, 1, 1], [1, 1, 1], 0),
        ([1, 1, 1], [1, 0, 1], 0),
        ([1, 1, 1], [1025, 1, 1], 0),
        ([1, 1, 1], [u32::MAX, u32::MAX, 1], 0),
        ([1, 65_536, 1], [1, 1, 1], 0),
        ([u32::MAX, 1, 1], [1, 1, 1], 0),
        ([1, 1, 1], [1, 1, 1], 10 << 20),
    ] {
        let bad = refused(Grid { blocks, threads, shared_bytes }, &good);
        assert!(matches!(bad, DeviceError::BadLaunch { .. }), "{bad}");
    }
    let stale = tenant.alloc(10).unwrap();
    tenant.free(stale).unwrap();
    let gone = Param::Buffer { handle: stale, offset: 0 };
    assert_eq!(refused(grid, &[gone, pointer(), pointer(), Param::U32(0)]), DeviceError::StaleHandle);
    let beyond = Param::Buffer { handle: buffer.handle(), offset: 4_001 };
    assert!(matches!(refused(grid, &[beyond, pointer(), pointer(), Param::U32(0)]), DeviceError::OutOfRange { .. }));
    // After all that the device is well.
    tenant.launch(&add, grid, &Params::new(good)).unwrap().wait().unwrap();
}

fn awaiting_and_waiting(setup: &Setup) {
    let tenant = setup.tenant("waiters");
    let large = tenant.buffer(32 << 20).unwrap();
    // Long enough that whoever waits is put to sleep and woken.
    block_on(async {
        for _ in 0..5 {
            let sent: Vec<_> = (0..8).map(|n| tenant.fill(large.handle(), 0, 32 << 20, n).unwrap()).collect();
            for completion in sent {
                completion.await.unwrap();
            }
        }
    });
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for n in 0..20 {
                    retry(|| tenant.fill(large.handle(), 0, 8 << 20, n)).wait().unwrap();
                }
            });
        }
    });
}

/// Opens another device of the same kind, with a list of what happened to it.
fn another(setup: &Setup) -> (Device, Arc<std::sync::Mutex<Vec<DeviceEvent>>>) {
    let events = Arc::new(std::sync::Mutex::new(Vec::new()));
    let sink = events.clone();
    let listener = move |event| sink.lock().unwrap().push(event);
    let options = OpenOptions { events: Events(Some(Arc::new(listener))), ..setup.options.clone() };
    (Device::open(&options).unwrap(), events)
}

/// Waits until the device works again; returns how long that took.
fn recovery(device: &Device, restarts: u32) -> Duration {
    let began = Instant::now();
    while device.restarts() < restarts || device.tenant("probe", TenantLimits::default()).unwrap().alloc(10).is_err() {
        assert!(began.elapsed() < Duration::from_secs(20), "it does not come back");
        std::thread::sleep(Duration::from_millis(1));
    }
    began.elapsed()
}

fn lost_and_back(setup: &Setup) {
    if setup.is_cuda() && !setup.is_process {
        return;
    }
    let (device, events) = another(setup);
    let tenant = device.tenant("unlucky", TenantLimits::default()).unwrap();
    let handle = tenant.alloc(1 << 20).unwrap();
    tenant.write_blocking(handle, 0, &[1; 100]).unwrap();
    device.lose("on purpose");
    let lost =
        |result: Result<(), DeviceError>| assert!(matches!(result, Err(DeviceError::DeviceLost { .. })), "{result:?}");
    lost(tenant.write_blocking(handle, 0, &[1; 100]));
    recovery(&device, 1);
    lost(tenant.read_blocking(handle, 0, &mut [0; 100]));
    // What it holds now is new, and zero.
    let fresh = tenant.alloc(1 << 20).unwrap();
    lost(tenant.free(handle));
    assert_eq!(read(&tenant, fresh, 0, 100), [0; 100]);
    let seen = events.lock().unwrap().clone();
    assert!(
        matches!(&seen[..], [DeviceEvent::Lost { why }, DeviceEvent::Restored { .. }] if why.contains("on purpose")),
        "{seen:?}"
    );
}

fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

fn killed_worker(setup: &Setup) {
    if !setup.is_process {
        return;
    }
    let (device, _) = another(setup);
    let (stop, errors, good) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for n in 0..4 {
            let (device, stop, errors, good) = (&device, &stop, &errors, &good);
            scope.spawn(move || {
                let tenant = device.tenant(&format!("worker-{n}"), TenantLimits::default()).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let bytes = random_bytes(n, 50_000);
                    let round = || {
                        let buffer = tenant.buffer(50_000)?;
                        tenant.write_blocking(buffer.handle(), 0, &bytes)?;
                        let mut seen = vec![0; 50_000];
                        tenant.read_blocking(buffer.handle(), 0, &mut seen)?;
                        assert!(seen == bytes, "never wrong bytes");
                        Ok(())
                    };
                    match round() {
                        Ok(()) => good.fetch_add(1, Ordering::Relaxed),
                        Err(DeviceError::DeviceLost { .. }) => errors.fetch_add(1, Ordering::Relaxed),
                        Err(error) => panic!("{error}"),
                    };
                }
            });
        }
        for round in 1..=5 {
            std::thread::sleep(Duration::from_millis(100));
            let before = device.worker_pid().unwrap();
            signal(before, rustix::process::Signal::KILL);
            let took = recovery(&device, round);
            assert!(took < Duration::from_secs(5), "{took:?}");
            assert_ne!(device.worker_pid().unwrap(), before);
        }
        std::thread::sleep(Duration::from_millis(50));
        stop.store(true, Ordering::Relaxed);
    });
    assert!(errors.load(Ordering::Relaxed) > 0 && good.load(Ordering::Relaxed) > 0);
}

fn hanging_worker(setup: &Setup) {
    if !setup.is_process {
        return;
    }
    let (device, events) = another(setup);
    let tenant = device.tenant("patient", TenantLimits::default()).unwrap();
    let buffer = tenant.alloc(100).unwrap();
    signal(device.worker_pid().unwrap(), rustix::process::Signal::STOP);
    let error = tenant.write_blocking(buffer, 0, &[1]).unwrap_err();
    assert!(matches!(&error, DeviceError::DeviceLost { why } if why.contains("no job")), "{error}");
    recovery(&device, 1);
    tenant.alloc(100).unwrap();
    assert!(matches!(&events.lock().unwrap()[0], DeviceEvent::Lost { .. }));
}

fn faulting_kernel(setup: &Setup) {
    if !setup.is_cuda() || !setup.is_process {
        return;
    }
    let (device, _) = another(setup);
    let (guilty, innocent) = (
        device.tenant("guilty", TenantLimits::default()).unwrap(),
        device.tenant("innocent", TenantLimits::default()).unwrap(),
    );
    let module = block_on(guilty.load(PTX.as_bytes())).unwrap();
    let wild = block_on(guilty.kernel(&module, "wild")).unwrap();
    let grid = Grid { blocks: [1, 1, 1], threads: [1, 1, 1], shared_bytes: 0 };
    let error = guilty.launch(&wild, grid, &Params::default()).unwrap().wait().unwrap_err();
    assert!(matches!(&error, DeviceError::DeviceLost { why } if why.contains("ILLEGAL_ADDRESS")), "{error}");
    let took = recovery(&device, 1);
    let module = block_on(innocent.load(PTX.as_bytes())).unwrap();
    let nothing = block_on(innocent.kernel(&module, "nothing")).unwrap();
    innocent.launch(&nothing, grid, &Params::default()).unwrap().wait().unwrap();
    assert!(guilty.launch(&wild, grid, &Params::default()).is_err(), "a kernel of the lost worker");
    println!("    back after {took:.0?}");
}

fn statistics(setup: &Setup) {
    let (device, _) = another(setup);
    let tenant = device.tenant("counted", TenantLimits::default()).unwrap();
    let buffer = tenant.buffer(100_000).unwrap();
    tenant.write_blocking(buffer.handle(), 0, &[1; 60_000]).unwrap();
    tenant.read_blocking(buffer.handle(), 0, &mut [0; 40_000]).unwrap();
    let stats = tenant.memory();
    assert!(stats.used_bytes >= 100_000 && stats.reserved_bytes >= stats.used_bytes && stats.buffers == 1);
    let mut registry = prometheus_client::registry::Registry::with_prefix("tensor_wasm");
    device.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} in {text}")).parse::<f64>().unwrap()
    };
    assert_eq!(value("tensor_wasm_gpu_bytes_to_device_total"), 60_000.0);
    assert_eq!(value("tensor_wasm_gpu_bytes_from_device_total"), 40_000.0);
    assert_eq!(value("tensor_wasm_gpu_memory_used_bytes"), stats.used_bytes as f64);
    assert_eq!(value("tensor_wasm_gpu_memory_bytes_per_tenant{tenant_id=\"counted\"}"), stats.used_bytes as f64);
    assert_eq!(value("tensor_wasm_gpu_queue_depth"), 0.0);
    assert_eq!(value("tensor_wasm_gpu_device_lost_total"), 0.0);
}
