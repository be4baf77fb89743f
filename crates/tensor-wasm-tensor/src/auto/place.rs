//! Decides for each plan, and runs it there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::cost::Work;
use super::history::{Choice, Estimates};
use super::{Machine, Processor, measure};
use crate::account;
use crate::cuda::CudaDevice;
use crate::error::ErrorKind;
use crate::graph::Value;
use crate::schedule::plan::Parameter;
use crate::schedule::{CompiledPlan, explained_kernels};

/// What opening a GPU and measuring it takes: the driver's context, its library, some kernels.
const OPENING: Duration = Duration::from_millis(900);

/// Rough speeds of any CPU of today, to tell whether a GPU is worth opening: bytes and operations of products a
/// second.
const ROUGH_BYTES: f64 = 1e10;
const ROUGH_FLOPS: f64 = 5e10;

static AUTO: Mutex<Auto> = Mutex::new(Auto::Closed { spent: Duration::ZERO });

/// What is known of the machine.
#[derive(Clone)]
pub(crate) enum Auto {
    /// The GPU was not opened yet: nothing was worth it. How long plans have taken so far.
    Closed {
        spent: Duration,
    },
    /// There is none, and why.
    None {
        why: Arc<str>,
    },
    Open {
        device: CudaDevice,
        machine: Arc<Machine>,
    },
}

/// What is known by now, once there is `next` to compute.
pub(crate) fn auto(next: Duration) -> Auto {
    let mut auto = AUTO.lock();
    if let Auto::Closed { spent } = &*auto
        && spent.saturating_add(next) >= OPENING
    {
        // The machine is measured for everybody, whoever happens to be first.
        *auto = account::uncharged(open);
    }
    auto.clone()
}

fn open() -> Auto {
    let device = match CudaDevice::open(0) {
        Ok(device) => device,
        Err(why) => return Auto::None { why: why.to_string().into() },
    };
    match measure::machine(&device) {
        Ok(machine) => Auto::Open { device, machine: Arc::new(machine) },
        Err(why) => Auto::None { why: format!("{} could not be measured: {why}", device.name()).into() },
    }
}

/// Has everybody see another machine.
#[cfg(test)]
pub(crate) fn set(auto: Auto) {
    *AUTO.lock() = auto;
}

/// What a plan should take on a CPU as far as anybody can tell who has measured nothing.
fn rough(work: &Work) -> Duration {
    let flops: f64 = work.kernels.iter().map(|kernel| kernel.flops + kernel.operations).sum();
    Duration::try_from_secs_f64(work.bytes() / ROUGH_BYTES + flops / ROUGH_FLOPS).unwrap_or(Duration::MAX)
}

fn work(compiled: &CompiledPlan) -> &Work {
    compiled.work.get_or_init(|| Work::of(&explained_kernels(&compiled.plan)))
}

fn name_of(leaf: &Value) -> u64 {
    leaf.storage.id()
}

/// What a plan takes, with copies of what it reads.
fn choose(compiled: &CompiledPlan, device: &CudaDevice, machine: &Machine, leaves: &[Value]) -> Choice {
    let work = work(compiled);
    let history = compiled.history.lock();
    let (mut to_cpu, mut to_gpu) = (0.0, 0.0);
    for leaf in leaves {
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let bytes = leaf.storage.bytes() as f64;
        let spread = history.spread(name_of(leaf), leaf.storage.is_computed());
        if leaf.storage.here().is_none() {
            to_cpu += machine.link.time(1, bytes, Processor::Cpu) / spread;
        }
        if !leaf.storage.is_on(device) {
            to_gpu += machine.link.time(1, bytes, Processor::Gpu) / spread;
        }
    }
    let lies = match (to_cpu > 0.0, to_gpu > 0.0) {
        (true, false) => Some(Processor::Gpu),
        (false, true) => Some(Processor::Cpu),
        _ => None,
    };
    let estimates = Estimates { cpu: work.time(&machine.cpu), gpu: work.time(&machine.gpu), to_cpu, to_gpu, lies };
    history.choose(&estimates)
}

/// Runs a plan where it should be done first.
pub(crate) fn execute(
    compiled: &CompiledPlan,
    leaves: &[Value],
    parameters: &[Parameter],
) -> Result<Vec<Value>, (usize, ErrorKind)> {
    let on_cpu = || crate::cpu::execute::execute(compiled, leaves, parameters);
    match auto(rough(work(compiled))) {
        Auto::None { .. } => on_cpu(),
        Auto::Closed { .. } => {
            let begun = Instant::now();
            let done = on_cpu();
            if let Auto::Closed { spent } = &mut *AUTO.lock() {
                *spent = spent.saturating_add(begun.elapsed());
            }
            done
        }
        Auto::Open { device, machine } => {
            let on = choose(compiled, &device, &machine, leaves).on;
            let done = run(compiled, (on, &device), leaves, parameters);
            // A GPU that has no memory left, or is lost, is no reason to fail where the elements are here too.
            let is_here = || leaves.iter().all(|leaf| leaf.storage.cpu().is_ok());
            match done {
                Err((_, ErrorKind::Device { .. } | ErrorKind::DeviceLost { .. } | ErrorKind::DeviceMemory { .. }))
                    if on == Processor::Gpu && is_here() =>
                {
                    run(compiled, (Processor::Cpu, &device), leaves, parameters)
                }
                done => done,
            }
        }
    }
}

fn run(
    compiled: &CompiledPlan,
    (on, device): (Processor, &CudaDevice),
    leaves: &[Value],
    parameters: &[Parameter],
) -> Result<Vec<Value>, (usize, ErrorKind)> {
    let last = compiled.plan.steps.last().map_or(0, crate::schedule::plan::Step::node);
    let is_measured = compiled.history.lock().is_measured_next(on);
    // Copies are not what is measured: they are known from the link.
    for leaf in leaves {
        let is_copied = !leaf.storage.is_on(device);
        let copied = match on {
            Processor::Cpu => leaf.storage.cpu().map(drop),
            Processor::Gpu => match leaf.storage.cuda(device) {
                Ok(copy) if is_measured && is_copied => copy.wait(),
                copied => copied.map(drop),
            },
        };
        copied.map_err(|what| (last, what))?;
    }
    let begun = Instant::now();
    let values = match on {
        Processor::Cpu => crate::cpu::execute::execute(compiled, leaves, parameters)?,
        Processor::Gpu => {
            let CompiledPlan { plan, cuda, .. } = compiled;
            let values = crate::cuda::execute::execute(device, plan, cuda, leaves, parameters)?;
            if is_measured {
                values.iter().try_for_each(|value| value.storage.wait()).map_err(|what| (last, what))?;
            }
            values
        }
    };
    let seconds = is_measured.then(|| begun.elapsed().as_secs_f64());
    compiled.history.lock().ran(on, leaves.iter().map(name_of).collect(), seconds);
    Ok(values)
}

/// Where a plan would run now, and why, for people; with the GPU if it is that.
pub(crate) fn explain(compiled: &CompiledPlan, leaves: &[Value]) -> (Option<CudaDevice>, String) {
    match auto(rough(work(compiled))) {
        Auto::None { why } => (None, format!("auto is the cpu: {why}")),
        Auto::Closed { .. } => {
            let why = "auto is the cpu: there is too little to compute so far to open a GPU for it".to_owned();
            (None, why)
        }
        Auto::Open { device, machine } => {
            let choice = choose(compiled, &device, &machine, leaves);
            let Choice { on, cpu, gpu, is_cpu_measured, is_gpu_measured, is_trial } = choice;
            let how = |is_measured: bool| if is_measured { "measured" } else { "estimated" };
            let on_gpu = on == Processor::Gpu;
            let why = format!(
                "auto is {}{}: {:.1} µs on the cpu ({}), {:.1} µs on {} ({}), with the copies that count",
                if on_gpu { device.name() } else { "the cpu" },
                if is_trial { ", to measure it" } else { "" },
                cpu * 1e6,
                how(is_cpu_measured),
                gpu * 1e6,
                device.name(),
                how(is_gpu_measured),
            );
            (on_gpu.then_some(device), why)
        }
    }
}
