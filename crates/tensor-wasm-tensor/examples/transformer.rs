//! A small transformer that guesses the next letter of a text.
//!
//! `cargo run --release -p tensor-wasm-tensor --example transformer`

use std::process::ExitCode;

use rand::SeedableRng;
use rand::rngs::StdRng;
use tensor_wasm_tensor::nn::{Module, Schedule};
use tensor_wasm_tensor::{AdamW, Tensor, no_grad};

mod support;

use support::Outcome;
use support::models::Transformer;
use support::options::{Command, Options};
use support::text::{self, Text};
use support::training::Training;

const COMMAND: Command = Command {
    name: "transformer",
    about: "Trains a decoder of two blocks to guess the next letter of a text, and lets it write.",
    steps: 800,
    flags: text::FLAGS,
};

const BATCH: usize = 16;
const LENGTH: usize = Transformer::CONTEXT;

/// Letters of the text that a sample goes on from.
const PROMPT: usize = 24;

fn main() -> ExitCode {
    support::run(&COMMAND, train)
}

fn train(options: &Options) -> Outcome<()> {
    let text = Text::of_options(options, LENGTH)?;
    let model = Transformer::new(text.letters(), options.seed);
    let mut optimizer = AdamW::new(&model.parameters(), 1e-3);
    let mut random = StdRng::seed_from_u64(options.seed);
    let training = Training {
        name: COMMAND.name,
        batch: BATCH,
        epoch_steps: options.steps.div_ceil(10),
        schedule: Schedule::Cosine { rate: 3e-3, end: 1e-4, steps: options.steps, warmup: 50 },
        norm_max: Some(1.0),
        precision: options.precision,
        is_shown: true,
    };
    let letters = text.letters();
    let loss = |_| {
        let (input, target) = text.batch(&mut random, BATCH, LENGTH);
        Ok(model.forward(&input).reshape(&[-1, letters.cast_signed()]).cross_entropy(&target))
    };
    let judge = || text.judge(&model, BATCH, LENGTH);
    let history = training.run(options.steps, &mut optimizer, &model.parameters(), loss, judge)?;
    training.report(&history, options)?;
    support::save(&model, vec![text.alphabet(), Transformer::heads()], options)?;
    let (first, last) = (history.losses.first().copied().unwrap_or(0.0), history.last_loss());
    if options.steps >= COMMAND.steps && last > first / 2.0 {
        return Err(format!("the loss did not halve: {first:.4} became {last:.4}").into());
    }

    let mut cache = model.cache();
    let next = |so_far: &[i64]| {
        // A full cache forgets the older half: what is left is read again, letter by letter.
        if cache.len() == cache.capacity() {
            cache.clear();
        }
        let new = if cache.is_empty() { so_far.len().min(LENGTH / 2) } else { 1 };
        let mut logits = Vec::new();
        for letter in &so_far[so_far.len() - new..] {
            let letter = Tensor::from_slice(&[*letter], &[1, 1]);
            logits = no_grad(|| model.next(&letter, &mut cache))?.to_vec::<f32>()?;
        }
        Ok(logits)
    };
    text.sample(options, text.prompt(PROMPT), &mut random, next)
}
