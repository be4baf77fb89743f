//! A small network that learns a curve from noisy points.
//!
//! `cargo run --release -p tensor-wasm-tensor --example sine`
#![expect(clippy::print_stdout, reason = "printing is what an example does")]

use std::process::ExitCode;

use tensor_wasm_tensor::nn::{Module, Schedule};
use tensor_wasm_tensor::{Adam, no_grad};

mod support;

use support::Outcome;
use support::chart::{Chart, Look, Series};
use support::options::{Command, Options};
use support::points::Points;
use support::training::{Score, Training, write_chart};
use support::{models, points};

const COMMAND: Command = Command {
    name: "sine",
    about: "Trains a small network to be the sine that noisy points lie around.",
    steps: 2_000,
    flags: &[],
};

/// Of each step, from all points.
const BATCH: usize = 512;

fn main() -> ExitCode {
    support::run(&COMMAND, train)
}

fn train(options: &Options) -> Outcome<()> {
    let (trained, judged) = (Points::noisy(BATCH, 2 * options.seed), Points::noisy(BATCH, 2 * options.seed + 1));
    let model = models::sine(options.seed);
    let mut optimizer = Adam::new(&model.parameters(), 1e-3);
    let training = Training {
        name: COMMAND.name,
        batch: BATCH,
        epoch_steps: options.steps.div_ceil(10),
        schedule: Schedule::Cosine { rate: 1e-2, end: 1e-4, steps: options.steps, warmup: 0 },
        norm_max: None,
        precision: options.precision,
        is_shown: true,
    };
    let loss = |_| Ok(model.forward(&trained.x).mse_loss(&trained.y));
    let judge = || {
        let loss = no_grad(|| model.forward(&judged.x)).mse_loss(&judged.y);
        Ok(Score { loss: f64::from(loss.item::<f32>()?), accuracy: None })
    };
    let history = training.run(options.steps, &mut optimizer, &model.parameters(), loss, judge)?;
    training.report(&history, options)?;
    support::save(&model, Vec::new(), options)?;

    let even = Points::exact(400);
    let guess = no_grad(|| model.forward(&even.x));
    let error = f64::from((&guess - &even.y).square().mean(()).item::<f32>()?);
    println!("mean squared error against the sine itself: {error:.5}; of the noise: {:.5}", points::NOISE.powi(2));
    let series = vec![
        Series { name: "points", points: trained.pairs(&trained.y)?, look: Look::Dots },
        Series { name: "network", points: even.pairs(&guess)?, look: Look::Line },
        Series { name: "sine", points: even.pairs(&even.y)?, look: Look::Line },
    ];
    let chart = Chart { title: "sine: what was learned", x: "x", y: "y", series };
    write_chart(&chart, "sine-fit.svg", options)
}
