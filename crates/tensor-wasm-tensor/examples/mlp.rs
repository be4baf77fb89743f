//! A perceptron of two layers that reads digits.
//!
//! `cargo run --release -p tensor-wasm-tensor --example mlp`
#![expect(clippy::print_stdout, reason = "printing is what an example does")]

use std::process::ExitCode;

use tensor_wasm_tensor::Adam;
use tensor_wasm_tensor::nn::{Module, Schedule, Sequential};

mod support;

use support::Outcome;
use support::digits::{self, Batches, Digits};
use support::models;
use support::options::{Command, Options};
use support::training::{History, Training};

const COMMAND: Command = Command {
    name: "mlp",
    about: "Trains a perceptron of two layers (784, 128, 10) to read digits.",
    steps: 3_750,
    flags: digits::FLAGS,
};

const BATCH: usize = 64;

fn main() -> ExitCode {
    support::run(&COMMAND, train)
}

fn train(options: &Options) -> Outcome<()> {
    let (trained, judged) = Digits::of_options(options)?;
    let model = models::mlp(options.seed);
    let training = Training {
        name: COMMAND.name,
        batch: BATCH,
        epoch_steps: (trained.count() / BATCH).max(1) as u64,
        schedule: Schedule::Cosine { rate: 2e-3, end: 2e-5, steps: options.steps, warmup: 0 },
        norm_max: None,
        precision: options.precision,
        is_shown: true,
    };
    let history = fit(&training, options, &model, &trained, &judged)?;
    training.report(&history, options)?;
    support::save(&model, Vec::new(), options)?;
    // What the layer in between is good for.
    let linear = models::linear(options.seed);
    let other = fit(&Training { name: "linear", is_shown: false, ..training }, options, &linear, &trained, &judged)?;
    let (own, other) = (history.accuracy() * 100.0, other.accuracy() * 100.0);
    println!("on {} digits it has not seen: {own:.2} %; a linear model: {other:.2} %", judged.count());
    Ok(())
}

fn fit(
    training: &Training<'_>,
    options: &Options,
    model: &Sequential,
    trained: &Digits,
    judged: &Digits,
) -> Outcome<History> {
    let mut optimizer = Adam::new(&model.parameters(), 1e-3);
    let mut batches = Batches::new(trained, BATCH, options.seed);
    let loss = |_| {
        let (pixels, labels) = batches.next();
        Ok(model.forward(&pixels).cross_entropy(&labels))
    };
    training.run(options.steps, &mut optimizer, &model.parameters(), loss, || judged.judge(model))
}
