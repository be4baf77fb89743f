//! The loop that trains, with what a person sees of it: a progress bar, a table with a row for each epoch, and a chart
//! of the losses.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tensor_wasm_tensor::nn::Schedule;
use tensor_wasm_tensor::{DType, GradScaler, Optimizer, Tensor, Variable, autocast, clip_grad_norm, plans_made};

use super::Outcome;
use super::chart::{Chart, Look, Series};
use super::options::Options;

/// Points of the training curve: each is the mean of the steps between two of them.
const POINTS_MAX: usize = 100;

/// How a model is trained.
pub(crate) struct Training<'t> {
    pub name: &'t str,
    /// Examples in each step.
    pub batch: usize,
    /// Steps between two rows of the table.
    pub epoch_steps: u64,
    pub schedule: Schedule,
    /// The longest that gradients may be together.
    pub norm_max: Option<f64>,
    /// What products are computed in; losses are scaled for `f16`.
    pub precision: DType,
    /// Whether anything is printed.
    pub is_shown: bool,
}

/// How well a model does on what it is not trained with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Score {
    pub loss: f64,
    /// From 0 to 1, where there is such a thing.
    pub accuracy: Option<f64>,
}

/// What became of a training.
pub(crate) struct History {
    /// Of each step.
    pub losses: Vec<f64>,
    /// With the number of steps before, from none on.
    pub scores: Vec<(u64, Score)>,
    /// Time of the steps, without judging.
    pub elapsed: Duration,
    /// Plans that were made after the first two steps.
    pub later_plans: u64,
}

impl Training<'_> {
    /// Trains for so many steps: `loss` is that of a step's batch, by its number; `judge` is asked once an epoch.
    pub(crate) fn run(
        &self,
        steps: u64,
        optimizer: &mut dyn Optimizer,
        parameters: &[Variable],
        mut loss: impl FnMut(u64) -> Outcome<Tensor>,
        judge: impl Fn() -> Outcome<Score>,
    ) -> Outcome<History> {
        let bar = self.bar(steps);
        let mut scaler = (self.precision == DType::F16).then(GradScaler::new);
        let mut history =
            History { losses: Vec::new(), scores: vec![(0, judge()?)], elapsed: Duration::ZERO, later_plans: 0 };
        if self.is_shown {
            println!("epoch    step  train loss  valid loss  accuracy   steps/s  examples/s");
        }
        for step in 0..steps {
            let begun = Instant::now();
            let plans = plans_made();
            optimizer.set_learning_rate(self.schedule.rate(step));
            let loss = autocast(self.precision, || loss(step))?;
            match &mut scaler {
                Some(scaler) => {
                    scaler.scale(&loss).backward()?;
                    scaler.unscale(optimizer)?;
                }
                None => loss.backward()?,
            }
            if let Some(most) = self.norm_max {
                clip_grad_norm(parameters, most)?;
            }
            match &mut scaler {
                Some(scaler) => scaler.step(optimizer)?,
                None => optimizer.step()?,
            }
            let value = f64::from(loss.item::<f32>()?);
            if !value.is_finite() {
                return Err(format!("step {step}: the loss is {value}").into());
            }
            history.losses.push(value);
            history.elapsed += begun.elapsed();
            // The first step has no state of the optimizer yet.
            history.later_plans += if step < 2 { 0 } else { plans_made() - plans };
            bar.inc(1);
            if (step + 1) % self.epoch_steps == 0 || step + 1 == steps {
                history.scores.push((step + 1, judge()?));
                if self.is_shown {
                    bar.suspend(|| println!("{}", self.row(&history)));
                }
            }
        }
        bar.finish_and_clear();
        Ok(history)
    }

    fn bar(&self, steps: u64) -> ProgressBar {
        if !self.is_shown {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}, {per_sec}, {eta} left");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::new(steps).with_style(style).with_message(self.name.to_owned())
    }

    /// The last epoch's row of the table.
    fn row(&self, history: &History) -> String {
        let Some((step, score)) = history.scores.last().copied() else { return String::new() };
        let epoch = step.div_ceil(self.epoch_steps);
        let before = history.scores.iter().rev().nth(1).map_or(0, |(step, _)| *step);
        let train = mean(&history.losses[usize::try_from(before).unwrap_or(0)..]);
        let accuracy = score.accuracy.map_or("-".to_owned(), |part| format!("{:.2} %", part * 100.0));
        let rate = history.steps_per_s();
        let examples = rate * self.batch as f64;
        format!("{epoch:5}  {step:6}  {train:10.4}  {:10.4}  {accuracy:>8}  {rate:8.1}  {examples:10.0}", score.loss)
    }

    /// Says how fast it was, and draws the losses.
    pub(crate) fn report(&self, history: &History, options: &Options) -> Outcome<()> {
        let rate = history.steps_per_s();
        println!(
            "{} steps in {:.1} s: {rate:.1} steps/s, {:.0} examples/s; plans after the second step: {}",
            history.losses.len(),
            history.elapsed.as_secs_f64(),
            rate * self.batch as f64,
            history.later_plans
        );
        let (first, last) = (history.losses.first().copied().unwrap_or(0.0), history.last_loss());
        println!("training loss: {first:.4} at first, {last:.4} at last");
        write_chart(&history.chart(&format!("{}: loss", self.name)), &format!("{}-loss.svg", self.name), options)
    }
}

/// Writes a chart into the directory for files.
pub(crate) fn write_chart(chart: &Chart<'_>, file: &str, options: &Options) -> Outcome<()> {
    let path = options.out.join(file);
    let written = std::fs::create_dir_all(&options.out).and_then(|()| std::fs::write(&path, chart.svg()));
    written.map_err(|why| format!("{}: {why}", path.display()))?;
    println!("written: {}", path.display());
    Ok(())
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

impl History {
    fn steps_per_s(&self) -> f64 {
        self.losses.len() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// The mean of the last tenth of the steps: one batch says little.
    pub(crate) fn last_loss(&self) -> f64 {
        let count = self.losses.len();
        mean(&self.losses[count - count.div_ceil(10)..])
    }

    pub(crate) fn accuracy(&self) -> f64 {
        self.scores.last().and_then(|(_, score)| score.accuracy).unwrap_or(0.0)
    }

    pub(crate) fn chart<'c>(&self, title: &'c str) -> Chart<'c> {
        let size = self.losses.len().div_ceil(POINTS_MAX).max(1);
        let parts = self.losses.chunks(size).enumerate();
        // In the middle of the steps that it is the mean of.
        let train = parts.map(|(n, part)| ((n * size) as f64 + part.len() as f64 / 2.0, mean(part))).collect();
        let valid = self.scores.iter().map(|(step, score)| (*step as f64, score.loss)).collect();
        let series = vec![
            Series { name: "training", points: train, look: Look::Line },
            Series { name: "validation", points: valid, look: Look::Marked },
        ];
        Chart { title, x: "step", y: "loss", series }
    }
}
