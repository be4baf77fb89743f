//! A guest's plan while it runs: when its tenant's turn has come, under the call's deadline, and off the serving
//! threads unless it takes no more than a moment. Whatever ends the call stops the plan before its next kernel, or in
//! the middle of one on the CPU, and everything it has goes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tensor_wasm_gpu::Payer;
use tensor_wasm_tensor::{Account, Device, ErrorKind, PlanNeed, Supervisor, TensorError, supervised, with_device};

use super::error::TensorFailure;
use super::turns::{Turn, Turns};
use crate::guest::running::RunningCall;

/// What a device does in a second at best: bytes that it moves, and operations on numbers. They are for refusing what
/// is hopeless, so they are what the best of machines do: a socket of a server's CPU, of which a core's part counts,
/// and an H200 with its tensor cores.
struct Roofline {
    bytes_per_s: u64,
    flops_per_s: u64,
}

/// What the least of cores does alone, with what no compiler makes vectors of: whatever takes a moment by this does.
const SLOW_CORE: Roofline = Roofline { bytes_per_s: 4_000_000_000, flops_per_s: 1_000_000_000 };

/// A serving thread computes this much itself: handing a plan to another thread and hearing of its end costs two
/// wake-ups, which are as much.
const AT_ONCE: Duration = Duration::from_micros(50);

const CORE: Roofline = Roofline { bytes_per_s: 30_000_000_000, flops_per_s: 200_000_000_000 };
const GPU: Roofline = Roofline { bytes_per_s: 5_000_000_000_000, flops_per_s: 1_000_000_000_000_000 };

impl Roofline {
    /// The least that a plan takes.
    fn estimate(&self, need: &PlanNeed, cores: u64) -> Duration {
        let ns = |amount: u64, per_s: u64| u128::from(amount) * 1_000_000_000 / u128::from(per_s.saturating_mul(cores));
        let moved = ns(need.moved_bytes as u64, self.bytes_per_s);
        let computed = ns(need.flops, self.flops_per_s);
        Duration::from_nanos(u64::try_from(moved.max(computed)).unwrap_or(u64::MAX))
    }
}

fn estimate(need: &PlanNeed, device: &Device) -> Duration {
    match device {
        // No session has `auto`: what a guest is charged for is known before it computes.
        Device::Cpu | Device::Auto => CORE.estimate(need, tensor_wasm_tensor::threads() as u64),
        Device::Cuda(_) => GPU.estimate(need, 1),
    }
}

/// What a plan runs for, and with.
#[derive(Clone)]
pub(super) struct PlanContext {
    pub call: Arc<RunningCall>,
    pub account: Arc<Account>,
    pub device: Device,
}

/// Watches one plan.
struct PlanWatch {
    context: PlanContext,
    deadline: Instant,
    /// It runs on a serving thread, which does not wait.
    is_hurried: bool,
    /// Plans of a hurry, which are counted once they are done.
    plans: AtomicU64,
    is_stopped: AtomicBool,
    /// None once it is over.
    turn: Mutex<Option<Turn>>,
}

impl PlanWatch {
    fn new(context: PlanContext, turn: Turn, is_hurried: bool) -> Arc<PlanWatch> {
        let deadline = context.call.deadline();
        let (plans, is_stopped, turn) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::new(Some(turn)));
        Arc::new(PlanWatch { context, deadline, is_hurried, plans, is_stopped, turn })
    }

    /// Runs a plan in this thread. With what comes of it is its turn, which has not ended.
    fn run<R>(
        self: &Arc<Self>,
        work: impl FnOnce() -> Result<R, TensorError>,
    ) -> (Result<R, TensorError>, Option<Turn>) {
        let PlanContext { account, device, .. } = &self.context;
        let done = supervised(account, self.clone(), || with_device(device, work));
        let turn = self.turn.lock().take();
        if let Some(turn) = &turn {
            self.add_cpu(turn.elapsed());
        }
        (done, turn)
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Counts what was computed on the CPU, which is the device of a function that may use one if there is no GPU. A
    /// GPU's time is counted where its line is.
    fn add_cpu(&self, used: Duration) {
        let call = &self.context.call;
        if self.context.device == Device::Cpu {
            // What a serving thread does is counted with what its guest does.
            if !self.is_hurried {
                call.add_cpu(used, Instant::now());
            }
            if call.serving.revision().settings.gpu {
                call.gpu_time().pay(used);
            }
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Supervisor for PlanWatch {
    fn admit(&self, need: &PlanNeed) -> Result<(), ErrorKind> {
        let device = &self.context.device;
        if self.is_hurried {
            self.plans.fetch_add(1, Ordering::Relaxed);
        } else {
            self.context.call.surroundings.metrics.tensor_plans.inc();
        }
        // A GPU computes it while the thread goes on.
        let work = PlanNeed { flops: need.work, ..*need };
        if self.is_hurried && *device == Device::Cpu && SLOW_CORE.estimate(&work, 1) > AT_ONCE {
            return Err(ErrorKind::WouldWait);
        }
        let (estimate, left) = (estimate(need, device), self.left());
        if estimate > left {
            return Err(ErrorKind::NoTime { estimate_ms: millis(estimate), left_ms: millis(left) });
        }
        Ok(())
    }

    fn between(&self) -> Result<(), ErrorKind> {
        if self.is_stopped() {
            return Err(ErrorKind::Stopped);
        }
        // On a GPU its own line does that. What takes a moment is not interrupted.
        if self.context.device == Device::Cpu
            && !self.is_hurried
            && let Some(turn) = self.turn.lock().as_mut()
            && let Some(used) = turn.let_others(&self.context.call.surroundings.background)
        {
            self.add_cpu(used);
        }
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed) || Instant::now() >= self.deadline
    }

    fn is_hurried(&self) -> bool {
        self.is_hurried
    }

    fn payer(&self) -> Option<Arc<dyn Payer>> {
        Some(self.context.call.gpu_time())
    }
}

/// Stops a plan that nobody waits for any more.
struct StopOnDrop(Arc<PlanWatch>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.is_stopped.store(true, Ordering::Relaxed);
    }
}

/// Where plans wait for their turns: on the CPU one for each core, on a GPU as many as keep it busy while others are
/// sent or read.
pub(crate) struct PlanLines {
    cpu: Arc<Turns>,
    gpu: Arc<Turns>,
}

/// Plans on a GPU at once, each with a thread that sends and waits; and those of one tenant, which may be many calls of
/// one function that wait for each other.
const GPU_PLANS_MAX: usize = 64;
const GPU_PLANS_OF_TENANT_MAX: usize = 16;

impl PlanLines {
    /// With so many plans on the CPU at once; zero: as many as there are cores.
    pub(crate) fn new(plans_max: usize) -> PlanLines {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let plans_max = if plans_max == 0 { cores() } else { plans_max };
        PlanLines { cpu: Turns::new(plans_max, plans_max), gpu: Turns::new(GPU_PLANS_MAX, GPU_PLANS_OF_TENANT_MAX) }
    }

    /// Plans that run now, and that wait.
    pub(crate) fn depth(&self) -> (usize, usize) {
        let ((a, b), (c, d)) = (self.cpu.depth(), self.gpu.depth());
        (a + c, b + d)
    }

    fn of(&self, device: &Device) -> &Arc<Turns> {
        match device {
            Device::Cpu | Device::Auto => &self.cpu,
            Device::Cuda(_) => &self.gpu,
        }
    }
}

/// What was computed at once. Of what a GPU still does for it the turn is held for as long as this is: a tenant has so
/// many plans there, whoever waits for them.
pub(super) struct Now<R> {
    pub done: R,
    pub turn: Option<Turn>,
}

impl PlanContext {
    /// Computes something: at once, where that takes a moment, and else when its turn has come. Whoever stops waiting
    /// for it stops it.
    pub(super) async fn run_soon<R: Send + 'static>(
        self,
        work: impl Fn() -> Result<R, TensorError> + Send + 'static,
    ) -> Result<R, TensorFailure> {
        match self.try_run(&work)? {
            Some(now) => Ok(now.done),
            None => self.run(work).await,
        }
    }

    /// Computes something in this thread, which serves others too, if there is a place for it and it takes a moment:
    /// a small plan that has run before, on a CPU, or sending any such plan to a GPU. None if it has to be `run`.
    pub(super) fn try_run<R>(
        &self,
        work: impl FnOnce() -> Result<R, TensorError>,
    ) -> Result<Option<Now<R>>, TensorFailure> {
        let account = &self.call.account;
        let surroundings = &self.call.surroundings;
        let turn = surroundings.plans.of(&self.device).try_take(&account.name, account.limits.weight);
        let Some(turn) = turn else { return Ok(None) };
        let watch = PlanWatch::new(self.clone(), turn, true);
        let (done, turn) = watch.run(work);
        if let Err(error) = &done
            && matches!(*error.what, ErrorKind::WouldWait)
        {
            return Ok(None);
        }
        surroundings.metrics.tensor_plans.inc_by(watch.plans.load(Ordering::Relaxed));
        Ok(Some(Now { done: done?, turn }))
    }

    /// Computes something in a thread of its own when its turn has come. Whoever stops waiting for it stops it.
    pub(super) async fn run<R: Send + 'static>(
        self,
        work: impl FnOnce() -> Result<R, TensorError> + Send + 'static,
    ) -> Result<R, TensorFailure> {
        let account = &self.call.account;
        let surroundings = self.call.surroundings.clone();
        let turn = surroundings.plans.of(&self.device).take(&account.name, account.limits.weight).await;
        let watch = PlanWatch::new(self, turn, false);
        let _stop = StopOnDrop(watch.clone());
        let computing = move || {
            let (done, turn) = watch.run(work);
            // Given back now, and not when somebody hears of the end.
            drop(turn);
            done
        };
        let done = surroundings.background.spawn_blocking(computing).await;
        done.map_err(|error| TensorFailure::ended(&error))?.map_err(TensorFailure::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hopeless_plan_is_known_by_its_need() {
        let need = |moved_bytes, flops| PlanNeed { moved_bytes, flops, ..PlanNeed::default() };
        assert_eq!(CORE.estimate(&need(30_000_000_000, 0), 1), Duration::from_secs(1));
        assert_eq!(CORE.estimate(&need(0, 4_000_000_000_000), 2), Duration::from_secs(10));
        assert_eq!(GPU.estimate(&need(0, 0), 1), Duration::ZERO);
        assert!(GPU.estimate(&need(usize::MAX, u64::MAX), 1) > Duration::from_secs(3600));
    }

    #[test]
    fn what_takes_a_moment_takes_no_more_on_any_core() {
        let is_at_once = |moved_bytes, flops| {
            let need = PlanNeed { moved_bytes, flops, ..PlanNeed::default() };
            SLOW_CORE.estimate(&need, 1) <= AT_ONCE
        };
        assert!(is_at_once(3 * 16 * 16 * 4, 2 * 16 * 16 * 16), "a product of 16²");
        assert!(!is_at_once(3 * 64 * 64 * 4, 2 * 64 * 64 * 64), "a product of 64²");
        assert!(!is_at_once(1 << 20, 0), "a copy of a mebibyte");
    }
}
