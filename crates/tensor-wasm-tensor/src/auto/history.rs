//! Where a plan ran, how long that took, and where it runs next.

use super::Processor;

/// Runs of a plan on a processor whose time counts: the first of them still find memory that nobody has touched, or
/// threads that sleep, so that one alone says nothing.
const SAMPLES_MIN: usize = 2;
const SAMPLES_MAX: usize = 4;

/// Runs before them, which make everything ready: on a GPU one compiles the kernels, and the next records its graph.
fn ready_after(processor: Processor) -> usize {
    match processor {
        Processor::Cpu => 1,
        Processor::Gpu => 2,
    }
}

/// Another processor has to be better than the present one by so much: below that, a change costs more than it brings.
const GAIN_MIN: f64 = 0.1;

/// A processor that was never measured is tried if it should take no more than this many times as long.
const TRIAL_FACTOR: f64 = 3.0;

/// Seconds that a plan must have taken before another processor is tried: compiling its kernels takes about as long.
const TRIAL_COST: f64 = 5e-3;

/// What is known of a plan on one processor.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Measured {
    runs: usize,
    samples: usize,
    /// The shortest of them, in seconds.
    best: Option<f64>,
}

impl Measured {
    /// What a run takes, once there are enough to tell.
    fn time(&self) -> Option<f64> {
        self.best.filter(|_| self.samples >= SAMPLES_MIN)
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct History {
    cpu: Measured,
    gpu: Measured,
    last: Option<Processor>,
    /// Seconds of all runs so far, as far as they were measured.
    spent: f64,
    /// The buffers of the last run's leaves: those that come again stay where they were copied to.
    leaves: Vec<u64>,
}

/// What a plan should take on each processor, in seconds, and what copying what it reads takes before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Estimates {
    pub cpu: f64,
    pub gpu: f64,
    pub to_cpu: f64,
    pub to_gpu: f64,
    /// Where what it reads lies, if that is one of them alone.
    pub lies: Option<Processor>,
}

/// Where a plan runs, and why: both times, with the copies that count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    pub on: Processor,
    pub cpu: f64,
    pub gpu: f64,
    pub is_cpu_measured: bool,
    pub is_gpu_measured: bool,
    pub is_trial: bool,
}

impl History {
    fn of(&mut self, processor: Processor) -> &mut Measured {
        match processor {
            Processor::Cpu => &mut self.cpu,
            Processor::Gpu => &mut self.gpu,
        }
    }

    /// Over how many runs the copy of a leaf is spread. One that was there the last time will be there again, as often
    /// as it has been so far; so will one that another plan makes, which goes where it is used.
    pub(crate) fn spread(&self, leaf: u64, is_computed: bool) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let runs = (self.cpu.runs + self.gpu.runs) as f64;
        if is_computed || self.leaves.contains(&leaf) { 1.0 + runs } else { 1.0 }
    }

    pub(crate) fn choose(&self, estimates: &Estimates) -> Choice {
        let (own_cpu, own_gpu) = (self.cpu.time(), self.gpu.time());
        let (is_cpu_measured, is_gpu_measured) = (own_cpu.is_some(), own_gpu.is_some());
        let cpu = own_cpu.unwrap_or(estimates.cpu) + estimates.to_cpu;
        let gpu = own_gpu.unwrap_or(estimates.gpu) + estimates.to_gpu;
        let better = if gpu < cpu { Processor::Gpu } else { Processor::Cpu };
        let time = |processor: Processor| if processor == Processor::Gpu { gpu } else { cpu };
        let mut choice = Choice { on: better, cpu, gpu, is_cpu_measured, is_gpu_measured, is_trial: false };
        let Some(last) = self.last.or(estimates.lies) else { return choice };
        let other = last.other();
        let (is_last_known, is_other_known) = match last {
            Processor::Cpu => (is_cpu_measured, is_gpu_measured),
            Processor::Gpu => (is_gpu_measured, is_cpu_measured),
        };
        let is_worth_a_trial = time(other) < TRIAL_FACTOR * time(last) && self.spent >= TRIAL_COST;
        if is_last_known && !is_other_known && is_worth_a_trial {
            return Choice { on: other, is_trial: true, ..choice };
        }
        // A trial goes on until it is measured.
        let is_tried = !is_last_known && is_other_known && time(last) < TRIAL_FACTOR * time(other);
        if is_tried || time(better) > (1.0 - GAIN_MIN) * time(last) {
            choice.on = last;
            choice.is_trial = is_tried;
        }
        choice
    }

    /// Whether the next run on a processor is measured. On a GPU somebody has to wait for that.
    pub(crate) fn is_measured_next(&self, on: Processor) -> bool {
        let known = if on == Processor::Gpu { &self.gpu } else { &self.cpu };
        known.runs >= ready_after(on) && known.samples < SAMPLES_MAX
    }

    /// A run is over, or was sent.
    pub(crate) fn ran(&mut self, on: Processor, leaves: Vec<u64>, seconds: Option<f64>) {
        self.last = Some(on);
        self.leaves = leaves;
        let known = self.of(on);
        known.runs += 1;
        if let Some(seconds) = seconds {
            known.samples += 1;
            known.best = Some(known.best.map_or(seconds, |best| best.min(seconds)));
        }
        self.spent += seconds.or(self.of(on).best).unwrap_or(0.0);
    }
}
