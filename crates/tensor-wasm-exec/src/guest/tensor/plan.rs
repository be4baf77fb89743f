//! A guest's plan while it runs: off the serving threads, when its tenant's turn has come, under the call's deadline.
//! Whatever ends the call stops the plan before its next kernel, or in the middle of one on the CPU, and everything it
//! has goes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
    is_stopped: AtomicBool,
    /// None once it is over.
    turn: Mutex<Option<Turn>>,
}

impl PlanWatch {
    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Counts what was computed on the CPU, which is the device of a function that may use one if there is no GPU. A
    /// GPU's time is counted where its line is.
    fn add_cpu(&self, used: Duration) {
        let call = &self.context.call;
        if self.context.device == Device::Cpu {
            call.add_cpu(used, Instant::now());
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
        self.context.call.surroundings.metrics.tensor_plans.inc();
        let (estimate, left) = (estimate(need, &self.context.device), self.left());
        if estimate > left {
            return Err(ErrorKind::NoTime { estimate_ms: millis(estimate), left_ms: millis(left) });
        }
        Ok(())
    }

    fn between(&self) -> Result<(), ErrorKind> {
        if self.is_stopped() {
            return Err(ErrorKind::Stopped);
        }
        // On a GPU its own line does that.
        if self.context.device == Device::Cpu
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

impl PlanContext {
    /// Computes something when its turn has come. Whoever stops waiting for it stops it.
    pub(super) async fn run<R: Send + 'static>(
        self,
        work: impl FnOnce() -> Result<R, TensorError> + Send + 'static,
    ) -> Result<R, TensorFailure> {
        let account = &self.call.account;
        let surroundings = self.call.surroundings.clone();
        let turn = surroundings.plans.of(&self.device).take(&account.name, account.limits.weight).await;
        let deadline = self.call.deadline();
        let turn = Mutex::new(Some(turn));
        let watch = Arc::new(PlanWatch { context: self, deadline, is_stopped: AtomicBool::new(false), turn });
        let _stop = StopOnDrop(watch.clone());
        let computing = move || {
            let PlanContext { account, device, .. } = &watch.context;
            let done = supervised(account, watch.clone(), || with_device(device, work));
            // Given back now, and not when somebody hears of the end.
            if let Some(turn) = watch.turn.lock().take() {
                watch.add_cpu(turn.elapsed());
            }
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
}
