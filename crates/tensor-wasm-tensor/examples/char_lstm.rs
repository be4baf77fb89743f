//! An LSTM that guesses the next letter of a text.
//!
//! `cargo run --release -p tensor-wasm-tensor --example char_lstm`

use std::process::ExitCode;

use rand::SeedableRng;
use rand::rngs::StdRng;
use tensor_wasm_tensor::nn::{Module, Schedule};
use tensor_wasm_tensor::{Adam, DType, Tensor, no_grad};

mod support;

use support::Outcome;
use support::models::CharLstm;
use support::options::{Command, Options};
use support::text::{self, Text};
use support::training::Training;

const COMMAND: Command = Command {
    name: "char_lstm",
    about: "Trains an LSTM to guess the next letter of a text, and lets it write.",
    steps: 600,
    flags: text::FLAGS,
};

const BATCH: usize = 32;
const LENGTH: usize = 48;

/// Letters of the text that a sample goes on from.
const PROMPT: usize = 24;

fn main() -> ExitCode {
    support::run(&COMMAND, train)
}

fn train(options: &Options) -> Outcome<()> {
    let text = Text::of_options(options, LENGTH)?;
    let model = CharLstm::new(text.letters(), options.seed);
    let mut optimizer = Adam::new(&model.parameters(), 1e-3);
    let mut random = StdRng::seed_from_u64(options.seed);
    let training = Training {
        name: COMMAND.name,
        batch: BATCH,
        epoch_steps: options.steps.div_ceil(10),
        schedule: Schedule::Cosine { rate: 8e-3, end: 4e-4, steps: options.steps, warmup: 20 },
        norm_max: Some(1.0),
        precision: options.precision,
        is_shown: true,
    };
    let loss = |_| {
        let (input, target) = text.batch(&mut random, BATCH, LENGTH);
        Ok(model.forward(&input).reshape(&[-1, text.letters().cast_signed()]).cross_entropy(&target))
    };
    let judge = || text.judge(&model, BATCH, LENGTH);
    let history = training.run(options.steps, &mut optimizer, &model.parameters(), loss, judge)?;
    training.report(&history, options)?;
    support::save(&model, vec![text.alphabet()], options)?;

    let nothing = || Tensor::zeros(&[1, CharLstm::SIZE], DType::F32);
    let (mut hidden, mut memory, mut read) = (nothing(), nothing(), 0);
    let next = |letters: &[i64]| {
        // What was read is remembered: only the rest is new.
        let mut logits = Vec::new();
        for letter in &letters[read..] {
            let letter = Tensor::from_slice(&[*letter], &[1]);
            let (output, new_hidden, new_memory) = no_grad(|| model.step(&letter, &hidden, &memory));
            // All three at once: what is not computed here would be computed from the first letter on at every letter.
            Tensor::realize_all(&[&output, &new_hidden, &new_memory])?;
            logits = output.to_vec()?;
            (hidden, memory) = (new_hidden, new_memory);
        }
        read = letters.len();
        Ok(logits)
    };
    text.sample(options, text.prompt(PROMPT), &mut random, next)
}
