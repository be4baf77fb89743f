//! What a supervisor, a quota and a worker that goes away do to a plan, on the emulator.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tensor_wasm_gpu::{Device, Payer};

use super::super::tests::within;
use super::*;
use crate::account::{Account, AccountLimits, PlanNeed, Supervisor, supervised};
use crate::{Device as Place, Mode, Tensor, TensorError, with_device};

/// Runs that may go by until the machine was quiet for as long as a short plan takes.
const RUNS_MAX: usize = 200;

#[derive(Default)]
struct Paid(AtomicU64);

impl Payer for Paid {
    fn pay(&self, took: Duration) {
        self.0.fetch_add(u64::try_from(took.as_nanos()).unwrap(), Ordering::Relaxed);
    }
}

/// Counts how often it is asked, and does something the `nth` time.
struct Watch {
    asked: AtomicUsize,
    nth: usize,
    does: Does,
    is_hurried: bool,
    is_stopped: AtomicBool,
    paid: Arc<Paid>,
}

enum Does {
    Nothing,
    Stop,
    Lose(Device),
}

impl Watch {
    fn new(nth: usize, does: Does) -> Arc<Watch> {
        let (asked, is_stopped, paid) = (AtomicUsize::new(0), AtomicBool::new(false), Arc::default());
        Arc::new(Watch { asked, nth, does, is_hurried: false, is_stopped, paid })
    }

    fn hurried() -> Arc<Watch> {
        let (asked, is_stopped, paid) = (AtomicUsize::new(0), AtomicBool::new(false), Arc::default());
        Arc::new(Watch { asked, nth: 0, does: Does::Nothing, is_hurried: true, is_stopped, paid })
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Supervisor for Watch {
    fn admit(&self, _need: &PlanNeed) -> Result<(), ErrorKind> {
        Ok(())
    }

    fn between(&self) -> Result<(), ErrorKind> {
        if self.asked.fetch_add(1, Ordering::Relaxed) + 1 == self.nth {
            match &self.does {
                Does::Nothing => {}
                Does::Stop => {
                    self.is_stopped.store(true, Ordering::Relaxed);
                    return Err(ErrorKind::Stopped);
                }
                Does::Lose(device) => device.lose("a test"),
            }
        }
        Ok(())
    }

    fn is_hurried(&self) -> bool {
        self.is_hurried
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    fn payer(&self) -> Option<Arc<dyn Payer>> {
        Some(self.paid.clone())
    }
}

fn watched<R>(device: &Place, account: &Arc<Account>, watch: &Arc<Watch>, run: impl FnOnce() -> R) -> R {
    supervised(account, watch.clone(), || with_device(device, run))
}

fn account() -> Arc<Account> {
    Account::new(AccountLimits::default())
}

fn host(elements: usize) -> Tensor {
    with_device(&Place::Cpu, || Tensor::from_slice(&vec![1_f32; elements], &[elements]))
}

/// Products one after the other, which the emulator takes long for, each of the last: all elements are ones.
fn products(x: &Tensor, times: usize) -> Tensor {
    let side = x.shape()[0] as f64;
    (0..times).fold(x.clone(), |product, _| product.matmul(x) / side)
}

fn is_all_ones(found: Result<Vec<f32>, TensorError>) -> bool {
    found.unwrap().iter().all(|element| (element - 1.0).abs() < 1e-4)
}

#[test]
fn a_long_plan_is_never_sent_at_once_and_ends_in_between() {
    let (device, account, x) = (Place::Cuda(within(1 << 24)), account(), host(96 * 96).reshape(&[96, 96]));
    for run in 0..3 {
        let (watch, graphs) = (Watch::new(0, Does::Nothing), graphs_made());
        assert!(is_all_ones(watched(&device, &account, &watch, || products(&x, 8).to_vec::<f32>())));
        assert_eq!(graphs_made(), graphs, "run {run}");
        // The first run finds out how long each launch takes, one by one; the ones behind it know.
        let least = if run == 0 { 8 } else { 4 };
        assert!(watch.asked() >= least, "run {run}: asked {} times", watch.asked());
        let paid = Duration::from_nanos(watch.paid.0.load(Ordering::Relaxed));
        assert!(paid > Duration::from_millis(5), "run {run}: {paid:?} paid");
    }
    let watch = Watch::new(3, Does::Stop);
    let stopped = watched(&device, &account, &watch, || products(&x, 8).realize()).unwrap_err();
    assert!(matches!(*stopped.what, ErrorKind::Stopped), "{stopped}");
    assert_eq!(watch.asked(), 3, "nothing is sent after that");
    let watch = Watch::new(0, Does::Nothing);
    assert!(is_all_ones(watched(&device, &account, &watch, || products(&x, 8).to_vec::<f32>())));
}

#[test]
fn a_short_plan_is_replayed_once_it_is_known_to_be_short_and_asked_for_before() {
    let (device, account, x) = (Place::Cuda(within(1 << 24)), account(), host(4));
    // Two kernels, which would be one.
    let plan = || Tensor::realize_in(&[&(&x + 1.0).exp()], Mode::Eager);
    let first = graphs_made();
    let run = |watch: &Arc<Watch>| watched(&device, &account, watch, plan);
    let replayed = (0..RUNS_MAX).find(|_| {
        run(&Watch::new(0, Does::Nothing)).unwrap();
        graphs_made() > first
    });
    assert!(replayed.is_some_and(|runs| runs > 0), "{replayed:?}");
    let watch = Watch::new(1, Does::Stop);
    let stopped = run(&watch).unwrap_err();
    assert!(matches!(*stopped.what, ErrorKind::Stopped) && watch.asked() == 1, "{stopped}");
    run(&Watch::new(0, Does::Nothing)).unwrap();
}

fn is_in_a_hurry<R>(done: Result<R, TensorError>) -> bool {
    matches!(done, Err(error) if matches!(*error.what, ErrorKind::WouldWait))
}

#[test]
fn whoever_does_not_wait_sends_a_plan_once_it_is_known_and_reads_what_comes_of_it() {
    let (device, account, x) = (Place::Cuda(within(1 << 24)), account(), host(2048));
    let plan = || {
        let made = (&x + 1.0) * 3.0;
        made.realize().map(|()| made)
    };
    let hurried = || watched(&device, &account, &Watch::hurried(), plan);
    let before = account.used_nodes();
    assert!(is_in_a_hurry(hurried()), "it was never compiled");
    assert_eq!(account.used_nodes(), before);
    let sent = (0..RUNS_MAX).find_map(|_| {
        watched(&device, &account, &Watch::new(0, Does::Nothing), plan).unwrap();
        hurried().ok()
    });
    let (sent, bytes) = (sent.expect("a short plan is sent"), 2048 * 4);
    let waited = round_trips();
    let read = sent.begin_read::<f32>(0..bytes).unwrap().unwrap();
    assert_eq!(round_trips(), waited);
    assert_eq!(block_on(read).unwrap(), [6_f32; 2048]);
    let some = sent.begin_read::<u8>(10..16).unwrap().unwrap();
    assert_eq!(block_on(some).unwrap(), [6_f32; 2].map(f32::to_le_bytes).concat()[2..]);
    let is_refused = |bytes| sent.begin_read::<f32>(bytes).unwrap().is_none();
    assert!(is_refused(0..bytes + 4) && is_refused(0..0) && is_refused(0..6));
    assert!(sent.begin_read::<i32>(0..4).unwrap().is_none(), "they are no integers");
    // What it needs has to be copied to the device first, which is more than a job carries.
    let other = host(2048);
    let made = || ((&other + 1.0) * 3.0).realize();
    assert!(is_in_a_hurry(watched(&device, &account, &Watch::hurried(), made)));
    assert!(is_all_ones(watched(&device, &account, &Watch::new(0, Does::Nothing), || (&sent / 6.0).to_vec::<f32>())));
}

/// What was quick says nothing of what comes after it.
#[test]
fn launches_are_sent_together_by_what_each_of_them_takes() {
    let takes = |millis: &[u64]| millis.iter().map(|millis| Duration::from_millis(*millis)).collect::<Vec<_>>();
    assert_eq!(fitting(&takes(&[1, 1, 1, 1, 1, 1])), 5);
    assert_eq!(fitting(&takes(&[1, 1, 60_000, 1])), 2);
    assert_eq!(fitting(&takes(&[60_000, 1, 1])), 1);
    assert_eq!(fitting(&takes(&[0; 100])), SUPERVISED_BATCH_MAX);
}

/// A place in the device's line is held until somebody looks at what was done there, and nobody reads these.
#[test]
fn what_is_dropped_unread_holds_no_place_in_the_line() {
    let cuda = within(1 << 24);
    let (device, account, x) = (Place::Cuda(cuda.clone()), account(), host(4));
    let run = || {
        let watch = Watch::new(0, Does::Nothing);
        watched(&device, &account, &watch, || Tensor::realize_in(&[&(&x + 1.0).exp()], Mode::Eager)).unwrap();
    };
    (0..RUNS_MAX).for_each(|_| run());
    cuda.synchronize().unwrap();
    run();
    let ahead = cuda.0.ahead.lock().len();
    assert!(ahead <= 1, "{ahead} runs are remembered");
}

/// What others have of a device is not for its tenants to see.
#[test]
fn a_tenant_is_told_what_is_free_of_its_own() {
    let own = within(1 << 24);
    let tenant = CudaDevice::of_tenant(own.0.tenant.clone(), 1 << 20);
    let error = with_device(&Place::Cuda(tenant), || (host(1 << 18) * 2.0).realize()).unwrap_err();
    let ErrorKind::DeviceMemory { used, limit, free, .. } = *error.what else { panic!("{error}") };
    assert_eq!((limit, free), (1 << 20, (1 << 20) - used), "{error}");
}

/// Kernels say in the plan's memory what they could not compute. Of a run that nobody hears of, the next must not.
#[test]
fn a_run_that_was_stopped_leaves_no_failure_to_the_next() {
    let (device, account, x) = (Place::Cuda(within(1 << 24)), account(), host(96 * 96).reshape(&[96, 96]));
    let numbers = |number: i64| with_device(&Place::Cpu, || Tensor::from_slice(&[number; 96 * 96], &[96, 96]));
    let (ones, zeros) = (numbers(1), numbers(0));
    let plan = |by: &Tensor| (0..4).fold((&ones / by).cast(DType::F32), |product, _| product.matmul(&x) / 96.0);
    let run = |watch: &Arc<Watch>, by: &Tensor| watched(&device, &account, watch, || plan(by).to_vec::<f32>());
    let failed = run(&Watch::new(0, Does::Nothing), &zeros).unwrap_err();
    assert!(matches!(*failed.what, ErrorKind::DivisionByZero), "{failed}");
    let stopped = run(&Watch::new(3, Does::Stop), &zeros).unwrap_err();
    assert!(matches!(*stopped.what, ErrorKind::Stopped), "{stopped}");
    assert!(is_all_ones(run(&Watch::new(0, Does::Nothing), &ones)));
}

#[test]
fn what_has_to_be_copied_counts_before_any_of_it_is() {
    let cuda = within(1 << 20);
    let device = Place::Cuda(cuda.clone());
    let double = |leaf: &Tensor| with_device(&device, || (leaf * 2.0).realize());
    let refused = |leaf: &Tensor, need: &str| {
        let before = cuda.used_bytes();
        let error = double(leaf).unwrap_err();
        let text = error.to_string();
        let ErrorKind::DeviceMemory { used, limit, free, .. } = *error.what else { panic!("{text}") };
        assert!(text.contains(need) && text.contains(" of 1048576 are used") && text.contains("free"), "{text}");
        assert!(used <= before && limit == 1 << 20 && free > 1 << 20, "{text}");
        assert!(cuda.used_bytes() <= before, "{} bytes are left, of {before} before", cuda.used_bytes());
    };
    // A copy of it and what is computed of it are all there may be, and the plan has words of its own.
    refused(&host(1 << 17), "1048832 bytes of the device's memory are needed");
    assert_eq!(cuda.used_bytes(), 0);
    // A plan that ran is checked again: there is less room now.
    double(&host(1 << 16)).unwrap();
    let held = with_device(&device, || Tensor::ones(&[(1 << 16) + (1 << 15)], DType::F32) * 1.0);
    with_device(&device, || held.realize()).unwrap();
    let other = host((1 << 16) + (1 << 15));
    refused(&other, "786688 bytes of the device's memory are needed");
    refused(&host(1 << 17), "1048832 bytes of the device's memory are needed");
    drop(held);
    double(&other).unwrap();
}

#[test]
fn a_worker_that_is_lost_in_the_middle_of_a_plan_is_said_and_the_next_plan_works() {
    let cuda = within(1 << 24);
    let (device, account, x) = (Place::Cuda(cuda.clone()), account(), host(96 * 96).reshape(&[96, 96]));
    let opened = cuda.stream().device().clone();
    let run = |watch: &Arc<Watch>| watched(&device, &account, watch, || products(&x, 8).to_vec::<f32>());
    for restarts in 0..2 {
        let watch = Watch::new(3, Does::Lose(opened.clone()));
        let lost = run(&watch).unwrap_err();
        assert!(matches!(*lost.what, ErrorKind::DeviceLost { .. }), "{lost}");
        assert!(watch.asked() >= 3 && watch.asked() < 8, "asked {} times", watch.asked());
        let until = Instant::now() + Duration::from_secs(20);
        while opened.restarts() <= restarts {
            assert!(Instant::now() < until, "there is no other worker");
            std::thread::park_timeout(Duration::from_millis(1));
        }
        assert!(is_all_ones(run(&Watch::new(0, Does::Nothing))));
    }
}
