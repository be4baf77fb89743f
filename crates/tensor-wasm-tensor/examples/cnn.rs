//! A network of convolutions that reads digits.
//!
//! `cargo run --release -p tensor-wasm-tensor --example cnn`
#![expect(clippy::print_stdout, reason = "printing is what an example does")]

use std::process::ExitCode;

use tensor_wasm_tensor::Adam;
use tensor_wasm_tensor::nn::{Module, Schedule};

mod support;

use support::Outcome;
use support::digits::{self, Batches, Digits};
use support::models;
use support::options::{Command, Options};
use support::training::Training;

const COMMAND: Command = Command {
    name: "cnn",
    about: "Trains two convolutions (16 and 32 filters of 5 × 5) and a linear layer to read digits.",
    steps: 1_500,
    flags: digits::FLAGS,
};

const BATCH: usize = 64;

fn main() -> ExitCode {
    support::run(&COMMAND, train)
}

fn train(options: &Options) -> Outcome<()> {
    let (trained, judged) = Digits::of_options(options)?;
    let model = models::cnn(options.seed);
    let training = Training {
        name: COMMAND.name,
        batch: BATCH,
        epoch_steps: (trained.count() / BATCH).max(1) as u64,
        schedule: Schedule::Cosine { rate: 2e-3, end: 2e-5, steps: options.steps, warmup: 0 },
        norm_max: None,
        precision: options.precision,
        is_shown: true,
    };
    let mut optimizer = Adam::new(&model.parameters(), 1e-3);
    let mut batches = Batches::new(&trained, BATCH, options.seed);
    let loss = |_| {
        let (pixels, labels) = batches.next();
        Ok(model.forward(&pixels).cross_entropy(&labels))
    };
    let history = training.run(options.steps, &mut optimizer, &model.parameters(), loss, || judged.judge(&model))?;
    training.report(&history, options)?;
    support::save(&model, Vec::new(), options)?;
    println!("on {} digits it has not seen: {:.2} %", judged.count(), history.accuracy() * 100.0);
    Ok(())
}
