//! Cases about streams, resident kernels and named regions, with the kernels they run: Rust for a CPU, PTX for CUDA.

use std::sync::atomic::AtomicU64;

use tensor_wasm_gpu::{Buffer, Payer};

use super::*;

/// The argument of a worker process that has the kernels below.
pub(super) const WITH_KERNELS: &str = "device-worker-with-kernels";

/// A module that the CPU's compiler panics on, and that no driver takes.
const PANICS: &[u8] = b".version 7.0 .target panic";

/// Kernels in Rust, for a CPU device, under the names of those in [`TEST_PTX`].
pub(super) struct TestKernels;

/// Held by a kernel of more than one group: such grids fill a device.
static WHOLE_DEVICE: std::sync::Mutex<()> = std::sync::Mutex::new(());

impl TestKernels {
    pub(super) fn host() -> HostKernels {
        HostKernels(Some(Arc::new(TestKernels)))
    }
}

impl HostCode for TestKernels {
    fn load(&self, _stream: usize, image: &[u8]) -> Result<Arc<dyn HostModule>, String> {
        assert_ne!(image, PANICS, "a compiler with a bug");
        Ok(Arc::new(TestKernels))
    }

    fn forget(&self, _stream: usize) {}
}

impl HostModule for TestKernels {
    fn params(&self, kernel: &str) -> Option<Vec<(u32, u32)>> {
        let words = match kernel {
            "spin" => 1,
            "increment" | "frame" | "stay" | "mute" => 2,
            _ => return None,
        };
        Some((0..words).map(|n| (8 * n, 8)).collect())
    }

    fn launch(&self, launch: &HostLaunch<'_>) {
        let param = |n: usize| u64::from_le_bytes(launch.params[8 * n..][..8].try_into().unwrap());
        let read = |address: u64| {
            let mut word = [0; 8];
            assert!(launch.memory.read(address, &mut word));
            u64::from_le_bytes(word)
        };
        let write = |address: u64, value: u64| assert!(launch.memory.write(address, &value.to_le_bytes()));
        let spin = |nanos| {
            let began = Instant::now();
            while began.elapsed() < Duration::from_nanos(nanos) {
                std::thread::yield_now();
            }
        };
        match launch.kernel {
            "spin" if launch.groups == [1; 3] => std::thread::sleep(Duration::from_nanos(param(0))),
            "spin" => {
                let _held = WHOLE_DEVICE.lock().unwrap();
                spin(param(0));
            }
            "increment" | "frame" => write(param(1), read(param(0)) + 1),
            "stay" => {
                let mut beats = 0;
                while read(param(1)) == 0 {
                    beats += 1;
                    write(param(0), beats);
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            _ => {
                write(param(0), 1);
                while read(param(1)) == 0 || launch.kernel == "mute" {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
}

const TEST_PTX: &str = r"
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
.visible .entry increment(.param .u64 from, .param .u64 to)
{
    .reg .u64 %d<4>;
    ld.param.u64 %d1, [from]; ld.param.u64 %d2, [to];
    ld.volatile.global.u64 %d3, [%d1]; add.u64 %d3, %d3, 1; st.volatile.global.u64 [%d2], %d3;
    ret;
}
.visible .entry frame(.param .u64 from, .param .u64 to)
{
    .local .align 8 .b8 slots[8192];
    .reg .u64 %d<8>;
    ld.param.u64 %d1, [from]; ld.param.u64 %d2, [to];
    ld.volatile.global.u64 %d3, [%d1]; and.b64 %d4, %d3, 4088;
    mov.u64 %d5, slots; add.u64 %d5, %d5, %d4; add.u64 %d6, %d3, 1; st.local.u64 [%d5+4096], %d3;
    st.local.u64 [%d5], %d6; ld.local.u64 %d7, [%d5]; st.volatile.global.u64 [%d2], %d7;
    ret;
}
.visible .entry stay(.param .u64 beat, .param .u64 stop)
{
    .reg .pred %p; .reg .u64 %d<5>;
    ld.param.u64 %d1, [beat]; ld.param.u64 %d2, [stop]; mov.u64 %d3, 0;
AGAIN:
    add.u64 %d3, %d3, 1; st.volatile.global.u64 [%d1], %d3;
    nanosleep.u32 10000;
    ld.volatile.global.u64 %d4, [%d2]; setp.eq.u64 %p, %d4, 0;
    @%p bra AGAIN;
    ret;
}
.visible .entry mute(.param .u64 beat, .param .u64 stop)
{
    .reg .pred %p; .reg .u64 %d<5>;
    ld.param.u64 %d1, [beat]; ld.param.u64 %d2, [stop]; mov.u64 %d3, 1; st.volatile.global.u64 [%d1], %d3;
AGAIN:
    nanosleep.u32 10000;
    ld.volatile.global.u64 %d4, [%d2]; setp.ne.u64 %p, %d4, 77;
    @%p bra AGAIN;
    ret;
}
";

const ONE: Grid = Grid { blocks: [1, 1, 1], threads: [1, 1, 1], shared_bytes: 0 };

/// Another device of the same kind, which has the test kernels and a region of its own.
fn with_kernels(setup: &Setup, change: impl FnOnce(&mut OpenOptions)) -> Device {
    let mut options = OpenOptions { host: TestKernels::host(), ..setup.options.clone() };
    if let Placement::Process { args, .. } = &mut options.placement {
        *args = vec![WITH_KERNELS.to_owned()];
    }
    options.memory.regions = vec![("test-rings".to_owned(), 4 << 20)];
    change(&mut options);
    Device::open(&options).unwrap()
}

fn test_kernel(tenant: &Tenant, name: &str) -> Kernel {
    let module = block_on(tenant.load(TEST_PTX.as_bytes())).unwrap();
    block_on(tenant.kernel(&module, name)).unwrap()
}

fn spin(stream: &Stream, kernel: &Kernel, time: Duration) -> tensor_wasm_gpu::Completion {
    let params = Params::new([Param::U64(time.as_nanos() as u64)]);
    retry(|| stream.launch(kernel, ONE, &params))
}

pub(super) fn failing_compiler(setup: &Setup) {
    let device = with_kernels(setup, |_| ());
    let tenant = device.tenant("unlucky", TenantLimits::default()).unwrap();
    for _ in 0..2 {
        let refused = block_on(tenant.load(PANICS)).unwrap_err();
        assert!(matches!(refused, DeviceError::BadModule { .. }), "{refused}");
    }
    // The same lane loads the next one.
    let kernel = test_kernel(&tenant, "spin");
    spin(&tenant.stream(), &kernel, Duration::from_millis(1)).wait().unwrap();
}

pub(super) fn side_by_side(setup: &Setup) {
    let device = with_kernels(setup, |_| ());
    let tenant = device.tenant("parallel", TenantLimits::default()).unwrap();
    let kernel = test_kernel(&tenant, "spin");
    let time = Duration::from_millis(50);
    let streams: Vec<Stream> = (0..8).map(|_| tenant.stream()).collect();
    let run = |streams: &[Stream]| {
        let began = Instant::now();
        let sent: Vec<_> = (0..8).map(|n| spin(&streams[n % streams.len()], &kernel, time)).collect();
        sent.into_iter().for_each(|completion| completion.wait().unwrap());
        began.elapsed()
    };
    run(&streams);
    let (one, eight) = (run(&streams[..1]), run(&streams));
    assert!(one >= 8 * time, "on one stream they run one after the other: {one:?}");
    assert!(eight < one / 3, "{eight:?} on eight streams, {one:?} on one");
}

pub(super) fn buffers_across_streams(setup: &Setup) {
    let device = with_kernels(setup, |_| ());
    let tenant = device.tenant("across", TenantLimits::default()).unwrap();
    let kernel = test_kernel(&tenant, "spin");
    let (a, b) = (tenant.stream(), tenant.stream());
    assert_ne!(a.index(), b.index());
    let pause = Duration::from_millis(30);
    for round in 0..5_u8 {
        // Read after write, and write after read, on another stream.
        let (from, to) = (tenant.buffer(5_000).unwrap(), tenant.buffer(5_000).unwrap());
        drop(spin(&a, &kernel, pause));
        drop(a.fill(from.handle(), 0, 5_000, 7).unwrap());
        drop(b.copy((from.handle(), 0), (to.handle(), 0), 5_000).unwrap());
        drop(a.fill(from.handle(), 0, 5_000, round).unwrap());
        assert_eq!(read(&tenant, to.handle(), 0, 5_000), [7; 5_000], "written before it is read");
        assert_eq!(read(&tenant, from.handle(), 0, 5_000), [round; 5_000]);
        // A block that is freed and handed out again is written by its next owner after its last.
        drop(spin(&a, &kernel, pause));
        drop(a.fill(from.handle(), 0, 5_000, 0xff).unwrap());
        drop(from);
        let again = tenant.buffer(5_000).unwrap();
        drop(b.fill(again.handle(), 0, 100, round).unwrap());
        spin(&a, &kernel, Duration::ZERO).wait().unwrap();
        let seen = read(&tenant, again.handle(), 0, 5_000);
        assert!(seen[..100].iter().all(|byte| *byte == round) && seen[100..].iter().all(|byte| *byte == 0), "{seen:?}");
    }
    // A graph is replayed on its own stream, and nowhere else.
    let buffer = tenant.buffer(100).unwrap();
    let graph =
        block_on(a.graph(&[GraphStep::Fill { buffer: buffer.handle(), offset: 0, bytes: 100, value: 9 }])).unwrap();
    assert_eq!(b.replay(&graph).err(), Some(DeviceError::ForeignHandle));
    drop(b.fill(buffer.handle(), 0, 100, 1).unwrap());
    drop(a.replay(&graph).unwrap());
    assert_eq!(read(&tenant, buffer.handle(), 0, 100), [9; 100]);
    assert_eq!(device.restarts(), 0);
}

pub(super) fn reads_begun(setup: &Setup) {
    let tenant = setup.tenant("reads begun");
    assert!(tenant.try_buffer(100).unwrap().is_none(), "the worker does not know the tenant");
    drop(tenant.buffer(100).unwrap());
    let Some(buffer) = tenant.try_buffer(100_000).unwrap() else { panic!("the pool is warm") };
    let begin = |offset: u64, len: usize| tenant.try_read(buffer.handle(), offset, len).unwrap().unwrap();
    let wait = |offset: u64, len: usize| {
        let (mut read, mut bytes) = (begin(offset, len), vec![0xa5; len + 1]);
        block_on(std::future::poll_fn(|cx| read.poll_to(cx, &mut bytes))).unwrap();
        assert!(read.is_over() && bytes.pop() == Some(0xa5), "no more than was asked for");
        bytes
    };
    let first = random_bytes(7, 100_000);
    write(&tenant, buffer.handle(), 0, &first);
    for (offset, len) in [(0, 1), (5, 4_000), (0, 100_000), (99_990, 10), (17, 65_537)] {
        assert_eq!(wait(offset as u64, len), first[offset..offset + len], "{len} from {offset} on");
    }
    // What is written after it was begun is not in it, and dropping one stops nothing.
    let mut before = begin(0, 100_000);
    drop(begin(0, 100_000));
    write(&tenant, buffer.handle(), 0, &[0; 100_000]);
    let mut bytes = vec![0; 100_000];
    block_on(std::future::poll_fn(|cx| before.poll_to(cx, &mut bytes))).unwrap();
    assert!(bytes == first && wait(0, 100_000).iter().all(|byte| *byte == 0));
    let mut short = begin(0, 100);
    assert!(block_on(std::future::poll_fn(|cx| short.poll_to(cx, &mut [0; 99]))).is_err());
    let large = tenant.buffer(3 << 20).unwrap();
    assert!(tenant.try_read(large.handle(), 0, 3 << 20).unwrap().is_none(), "more than a block of staging");
    assert!(tenant.try_read(buffer.handle(), 99_999, 2).is_err());
}

/// Copies that nobody waits for, more than staging has blocks, each behind a kernel on another stream.
pub(super) fn writes_ahead(setup: &Setup) {
    const BYTES: usize = 3 << 20;
    let device = with_kernels(setup, |_| ());
    let tenant = device.tenant("ahead", TenantLimits::default()).unwrap();
    let kernel = test_kernel(&tenant, "spin");
    let (a, b) = (tenant.stream(), tenant.stream());
    let buffers: Vec<Buffer> = (0..8).map(|_| tenant.buffer(BYTES as u64).unwrap()).collect();
    let mut bytes = vec![0; BYTES];
    for round in 0..3 {
        for (n, buffer) in (10 * round..).zip(&buffers) {
            drop(spin(&a, &kernel, Duration::from_millis(2)));
            drop(a.fill(buffer.handle(), 0, 1_000, 0xff).unwrap());
            bytes.fill(n);
            drop(b.write_ahead(buffer.handle(), 0, &bytes).unwrap().unwrap());
            // They have been read.
            bytes.fill(0xee);
        }
        for (n, buffer) in (10 * round..).zip(&buffers) {
            assert!(read(&tenant, buffer.handle(), 0, BYTES).iter().all(|byte| *byte == n), "round {round}");
        }
    }
    let (few, many) = (random_bytes(1, 100), random_bytes(2, 9 << 20));
    b.write_ahead(buffers[0].handle(), 50, &few).unwrap().unwrap().wait().unwrap();
    assert_eq!(read(&tenant, buffers[0].handle(), 50, 100), few);
    let large = tenant.buffer(9 << 20).unwrap();
    assert!(b.write_ahead(large.handle(), 0, &many).unwrap().is_none(), "it is done");
    assert!(read(&tenant, large.handle(), 0, 9 << 20) == many);
    let beyond = b.write_ahead(buffers[0].handle(), 1, &bytes).err();
    assert!(matches!(beyond, Some(DeviceError::OutOfRange { .. })), "{beyond:?}");
    assert_eq!(device.restarts(), 0);
}

pub(super) fn branched_graphs(setup: &Setup) {
    const BYTES: u64 = 100_000;
    let tenant = setup.tenant("branches");
    let [a, b, c] = [(); 3].map(|()| tenant.buffer(BYTES).unwrap());
    let all = |buffer: &Buffer| read(&tenant, buffer.handle(), 0, 100_000);
    let fill = |buffer: &Buffer, value| GraphStep::Fill { buffer: buffer.handle(), offset: 0, bytes: BYTES, value };
    let half = |from: &Buffer, at| GraphStep::Copy { from: (from.handle(), 0), to: (c.handle(), at), bytes: BYTES / 2 };
    // Two branches that meet in `c`, each read before it is filled anew; and a step that nothing comes after.
    let steps = [fill(&a, 1), fill(&b, 2), half(&a, 0), half(&b, BYTES / 2), fill(&a, 3), fill(&b, 4)];
    let after: [&[u16]; 6] = [&[], &[], &[0], &[1], &[2], &[3]];
    let after = after.map(<[u16]>::to_vec);
    let graph = block_on(tenant.graph_branched(&steps, &[], &after)).unwrap();
    for round in 0..20 {
        drop(tenant.fill(c.handle(), 0, BYTES, round).unwrap());
        drop(tenant.replay(&graph).unwrap());
        let seen = all(&c);
        let (first, second) = seen.split_at(seen.len() / 2);
        assert!(first.iter().all(|byte| *byte == 1) && second.iter().all(|byte| *byte == 2));
        assert!(all(&a).iter().all(|byte| *byte == 3));
        assert!(all(&b).iter().all(|byte| *byte == 4));
    }
    // An order that is none: of another number of steps, after a later step, after itself.
    for bad in [vec![vec![]; 5], vec![vec![1], vec![], vec![], vec![], vec![], vec![]], vec![vec![0]; 6]] {
        let refused = block_on(tenant.graph_branched(&steps, &[], &bad)).err();
        assert!(matches!(refused, Some(DeviceError::BadLaunch { .. })), "{refused:?}");
    }
    drop(tenant.replay(&graph).unwrap());
    assert_eq!(read(&tenant, a.handle(), 0, 1), [3]);
}

pub(super) fn shared_streams(setup: &Setup) {
    let tenant = setup.tenant("many-streams");
    let streams: Vec<Stream> = (0..200).map(|_| tenant.stream()).collect();
    let mut indices: Vec<usize> = streams.iter().map(Stream::index).collect();
    indices.sort_unstable();
    indices.dedup();
    assert!((8..Stream::INDEX_MAX).contains(&indices.len()), "bounded: {indices:?}");
    let buffers: Vec<_> = streams.iter().map(|_| tenant.buffer(1_000).unwrap()).collect();
    for (n, (stream, buffer)) in streams.iter().zip(&buffers).enumerate() {
        drop(retry(|| stream.fill(buffer.handle(), 0, 1_000, n as u8)));
    }
    for (n, buffer) in buffers.iter().enumerate() {
        assert_eq!(read(&tenant, buffer.handle(), 0, 1_000), [n as u8; 1_000]);
    }
    drop(streams);
    // Other tenants get streams too, those that nobody uses any more in the end.
    for n in 0..100 {
        let other = setup.tenant(&format!("other-{n}"));
        let streams: Vec<Stream> = (0..8).map(|_| other.stream()).collect();
        let buffer = other.buffer(100).unwrap();
        streams.iter().for_each(|stream| drop(retry(|| stream.fill(buffer.handle(), 0, 100, n))));
        assert_eq!(read(&other, buffer.handle(), 0, 100), [n; 100]);
    }
}

pub(super) fn contended_streams(setup: &Setup) {
    let device = with_kernels(setup, |_| ());
    let grid = Grid { blocks: [device.info().multiprocessors * 2, 1, 1], threads: [1024, 1, 1], shared_bytes: 0 };
    let stop = AtomicBool::new(false);
    let done: Vec<usize> = std::thread::scope(|scope| {
        let run = |streams: usize| {
            let (device, stop) = (&device, &stop);
            scope.spawn(move || {
                let tenant = device.tenant(&format!("with-{streams}"), TenantLimits::default()).unwrap();
                let kernel = test_kernel(&tenant, "spin");
                let streams: Vec<Stream> = (0..streams).map(|_| tenant.stream()).collect();
                let params = Params::new([Param::U64(300_000)]);
                let mut sent = std::collections::VecDeque::new();
                let mut done = 0;
                let mut next = 0;
                while !stop.load(Ordering::Relaxed) {
                    while sent.len() < 32 {
                        next += 1;
                        sent.push_back(retry(|| streams[next % streams.len()].launch(&kernel, grid, &params)));
                    }
                    // In whatever order they end: jobs that are over are no backlog.
                    let before = sent.len();
                    sent.retain(|completion: &tensor_wasm_gpu::Completion| !completion.is_over());
                    if sent.len() == before {
                        sent.pop_front().unwrap().wait().unwrap();
                    }
                    done += before - sent.len();
                }
                sent.into_iter().for_each(|completion| completion.wait().unwrap());
                done
            })
        };
        let threads = [run(1), run(16)];
        std::thread::sleep(Duration::from_secs(2));
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let ratio = done[1] as f64 / done[0] as f64;
    println!("    {} with one stream, {} with sixteen: {ratio:.2}", done[0], done[1]);
    // A machine that is busy with other things measures badly; one that shared by streams would give sixteen times as
    // much, and one that takes several jobs of one stream for one would give half.
    let (least, most) = if setup.is_cuda() { (0.85, 1.15) } else { (0.4, 1.6) };
    assert!(least < ratio && ratio < most, "{done:?}");
}

pub(super) fn many_tenants(setup: &Setup) {
    let use_once = |name: &str| {
        let tenant = setup.device.tenant(name, TenantLimits::default())?;
        let stream = tenant.stream();
        let buffer = tenant.buffer(100)?;
        stream.write_blocking(buffer.handle(), 0, &[7; 100])?;
        assert_eq!(read(&tenant, buffer.handle(), 0, 100), [7; 100]);
        Ok::<(), DeviceError>(())
    };
    for n in 0..600 {
        use_once(&format!("once-{n}")).unwrap();
    }
    std::thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || (0..100).for_each(|n| use_once(&format!("once-{thread}-{n}")).unwrap()));
        }
    });
    // As many as there can be at once, and then one more.
    let mut held = Vec::new();
    let refused = loop {
        match setup.device.tenant(&format!("held-{}", held.len()), TenantLimits::default()) {
            Ok(tenant) => held.push(tenant),
            Err(error) => break error,
        }
    };
    assert!(matches!(&refused, DeviceError::Refused { why } if why.contains("tenants already")), "{refused}");
    assert!(held.len() > 400, "{}", held.len());
    held.pop();
    use_once("another").unwrap();
}

pub(super) fn named_region(setup: &Setup) {
    let device = with_kernels(setup, |_| ());
    assert!(device.region("staging").is_none() && device.region("nothing").is_none());
    let region = device.region("test-rings").unwrap();
    assert_eq!(region.len(), 4 << 20);
    let tenant = device.tenant("rings", TenantLimits::default()).unwrap();
    let kernel = test_kernel(&tenant, "increment");
    let last = region.len() - 8;
    for n in 0..100_u64 {
        region.word(0).unwrap().store(n, Ordering::Release);
        let params = Params::new([0, last].map(|offset| Param::U64(region.device_address() + offset)));
        tenant.launch(&kernel, ONE, &params).unwrap().wait().unwrap();
        assert_eq!(region.word(last).unwrap().load(Ordering::Acquire), n + 1, "from here to there and back");
    }
    let mut bytes = [0; 8];
    region.read(last, &mut bytes).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 100);
    assert!(region.word(last + 8).is_none() && region.word(4).is_none());
    let words = region.words(last - 8, 2).unwrap();
    assert_eq!(words[1].load(Ordering::Acquire), 100);
    assert_eq!(words.part(1, 1).unwrap()[0].load(Ordering::Acquire), 100);
    assert!(words.part(1, 2).is_none() && words.part(usize::MAX, 2).is_none());
    for (offset, count) in [(last, 2), (4, 1), (0, 0), (0, usize::MAX), (u64::MAX - 7, 1)] {
        assert!(region.words(offset, count).is_none(), "{count} at {offset}");
    }
    assert!(matches!(region.write(last + 1, &bytes), Err(DeviceError::OutOfRange { .. })));
}

pub(super) fn resident(setup: &Setup) {
    let limit = Duration::from_millis(400);
    let device = with_kernels(setup, |options| (options.job_max, options.beat_max) = (limit, limit));
    let limits = TenantLimits { residents_max: 2, ..TenantLimits::default() };
    let tenant = device.tenant("stays", limits).unwrap();
    let kernel = test_kernel(&tenant, "stay");
    let none = Params::default();
    let (mut first, second) =
        (tenant.resident(&kernel, ONE, &none).unwrap(), tenant.resident(&kernel, ONE, &none).unwrap());
    assert!(matches!(tenant.resident(&kernel, ONE, &none), Err(DeviceError::BadLaunch { .. })), "two is its limit");
    let stranger = device.tenant("stranger", TenantLimits::default()).unwrap();
    let theirs = test_kernel(&stranger, "stay");
    assert!(matches!(stranger.resident(&theirs, ONE, &none), Err(DeviceError::BadLaunch { .. })), "it may have none");
    // For much longer than a job may take, and nobody else is held up: not by what a driver does only when nothing
    // runs (loading and unloading modules, more memory for threads, a part of the multiprocessors), nor by sharing a
    // queue.
    let began = Instant::now();
    let buffer = stranger.buffer(1_000).unwrap();
    let mut rounds = 0;
    while began.elapsed() < 3 * limit || rounds < 5 {
        rounds += 1;
        write(&stranger, buffer.handle(), 0, &[1; 1_000]);
        let increment = test_kernel(&stranger, if rounds % 2 == 0 { "frame" } else { "increment" });
        let streams: Vec<Stream> = (0..40).map(|_| stranger.stream()).collect();
        for stream in &streams {
            let params = Params::new([0, 8].map(|offset| Param::Buffer { handle: buffer.handle(), offset }));
            retry(|| stream.launch(&increment, ONE, &params)).wait().unwrap();
        }
        assert_eq!(read(&stranger, buffer.handle(), 8, 8), 0x0101_0101_0101_0102_u64.to_le_bytes());
        let limits = TenantLimits { multiprocessors: 8, ..TenantLimits::default() };
        let part = device.tenant(&format!("part-{rounds}"), limits).unwrap();
        let own = part.buffer(1_000).unwrap();
        write(&part, own.handle(), 0, &[1; 1_000]);
        let frame = test_kernel(&part, "frame");
        let params = Params::new([0, 8].map(|offset| Param::Buffer { handle: own.handle(), offset }));
        retry(|| part.launch(&frame, ONE, &params)).wait().unwrap();
        assert_eq!(read(&part, own.handle(), 8, 1), [2]);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!first.is_over() && !second.is_over() && first.beats() > 10, "{}", first.beats());
    first.stop();
    block_on(first.ended()).unwrap();
    assert!(first.is_over() && !second.is_over());
    drop(second);
    // Their places are free again, in time.
    let third = loop {
        match tenant.resident(&kernel, ONE, &none) {
            Ok(third) => break third,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    third.stop();
    third.wait().unwrap();
    assert_eq!(device.restarts(), 0);
}

pub(super) fn mute_resident(setup: &Setup) {
    // What does not end cannot be taken from a thread.
    if !setup.is_process {
        return;
    }
    let limit = Duration::from_millis(400);
    for (name, told) in [("mute", false), ("mute", true)] {
        let (beat_max, stop_max) = if told { (Duration::from_secs(60), limit) } else { (limit, limit) };
        let device = with_kernels(setup, |options| (options.beat_max, options.stop_max) = (beat_max, stop_max));
        let limits = TenantLimits { residents_max: 1, ..TenantLimits::default() };
        let tenant = device.tenant("mute", limits).unwrap();
        let resident = tenant.resident(&test_kernel(&tenant, name), ONE, &Params::default()).unwrap();
        if told {
            resident.stop();
        }
        let error = resident.wait().unwrap_err();
        let why = if told { "told to end" } else { "no heartbeat" };
        assert!(matches!(&error, DeviceError::DeviceLost { why: found } if found.contains(why)), "{error}");
        recovery(&device, 1);
        let buffer = tenant.buffer(100).unwrap();
        assert_eq!(read(&tenant, buffer.handle(), 0, 100), [0; 100]);
    }
}

/// Several streams use the same buffers, one job after the other is asked for, and nobody waits until the end.
pub(super) fn random_streams(setup: &Setup) {
    for seed in 0..10 {
        let tenant = setup.tenant(&format!("random-streams-{seed}"));
        let streams: Vec<Stream> = (0..5).map(|_| tenant.stream()).collect();
        let mut rng = StdRng::seed_from_u64(seed);
        let mut model: Vec<(Handle, Vec<u8>)> = Vec::new();
        for _ in 0..400 {
            let stream = &streams[rng.random_range(0..streams.len())];
            let at = rng.random_range(0..model.len().max(1));
            match (rng.random_range(0..10), model.get_mut(at)) {
                (0..2, _) | (_, None) => {
                    let size = rng.random_range(1..200_000);
                    model.push((tenant.alloc(size as u64).unwrap(), vec![0; size]));
                }
                (2, Some(_)) => tenant.free(model.swap_remove(at).0).unwrap(),
                (3..7, Some((handle, bytes))) => {
                    let from = rng.random_range(0..bytes.len());
                    let len = rng.random_range(0..=bytes.len() - from);
                    let value = rng.random();
                    bytes[from..from + len].fill(value);
                    drop(retry(|| stream.fill(*handle, from as u64, len as u64, value)));
                }
                (_, Some((handle, bytes))) => {
                    let (handle, bytes) = (*handle, bytes.clone());
                    let other = rng.random_range(0..model.len());
                    let len = bytes.len().min(model[other].1.len());
                    if other != at {
                        model[other].1[..len].copy_from_slice(&bytes[..len]);
                        let to = model[other].0;
                        drop(retry(|| stream.copy((handle, 0), (to, 0), len as u64)));
                    }
                }
            }
        }
        for (n, (handle, bytes)) in model.iter().enumerate() {
            let mut seen = vec![0xa5; bytes.len()];
            retry(|| streams[n % streams.len()].read_blocking(*handle, 0, &mut seen));
            assert!(seen == *bytes, "seed {seed}, buffer {n}");
        }
    }
}

pub(super) fn synchronized(setup: &Setup) {
    let tenant = setup.tenant("synchronized");
    let streams = [tenant.stream(), tenant.stream()];
    let buffers = [tenant.buffer(32 << 20).unwrap(), tenant.buffer(32 << 20).unwrap()];
    // A stream that was sent nothing.
    streams[0].synchronize().unwrap();
    for round in 0..20 {
        let sent: Vec<_> =
            (0..4).map(|n| retry(|| streams[0].fill(buffers[0].handle(), 0, 32 << 20, round * 4 + n))).collect();
        let other = retry(|| streams[1].fill(buffers[1].handle(), 0, 32 << 20, round));
        // Whoever holds the completions, or has let go of them.
        let last = sent.into_iter().last().unwrap();
        streams[0].synchronize().unwrap();
        assert!(last.is_over());
        drop(other);
        streams[1].synchronize().unwrap();
        let began = Instant::now();
        (0..1_000).for_each(|_| streams[0].synchronize().unwrap());
        assert!(began.elapsed() < Duration::from_millis(100), "nothing is sent: {:?}", began.elapsed());
    }
    assert_eq!(read(&tenant, buffers[0].handle(), (32 << 20) - 1, 1), [79]);
    assert_eq!(read(&tenant, buffers[1].handle(), 0, 1), [19]);
}

/// Nanoseconds that somebody was charged for.
#[derive(Default)]
struct Paid(AtomicU64);

impl Payer for Paid {
    fn pay(&self, took: Duration) {
        self.0.fetch_add(u64::try_from(took.as_nanos()).unwrap(), Ordering::Relaxed);
    }
}

pub(super) fn who_sends_is_charged(setup: &Setup) {
    let tenant = setup.device.tenant("charged", TenantLimits::default()).unwrap();
    let buffers = [tenant.buffer(1 << 20).unwrap(), tenant.buffer(1 << 20).unwrap()];
    let payers = [Arc::new(Paid::default()), Arc::new(Paid::default())];
    let read = || payers.each_ref().map(|paid| paid.0.load(Ordering::Relaxed));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (buffer, payer) in buffers.iter().zip(&payers) {
            let stream = tenant.stream().paid_by(payer.clone());
            scope.spawn(move || {
                for n in 0..50 {
                    stream.write_blocking(buffer.handle(), 0, &vec![n; 1 << 20]).unwrap();
                }
            });
        }
    });
    let (passed, paid) = (u64::try_from(began.elapsed().as_nanos()).unwrap(), read());
    // All that is charged is no more than the time that passed, however many send at once.
    assert!(paid.iter().all(|paid| *paid > 0) && paid.iter().sum::<u64>() <= passed, "{paid:?} of {passed} ns");
    tenant.write_blocking(buffers[0].handle(), 0, &[1; 60_000]).unwrap();
    assert_eq!(read(), paid, "what others send is not theirs");
}
