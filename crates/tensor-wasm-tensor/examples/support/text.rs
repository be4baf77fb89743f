//! Text for models that guess the next letter: a story written for this, or any file.

use rand::Rng;
use rand::rngs::StdRng;
use tensor_wasm_tensor::nn::Module;
use tensor_wasm_tensor::{Tensor, no_grad};

use super::Outcome;
use super::options::{Flag, Options};
use super::training::Score;

pub(crate) const STORY: &str = include_str!("text.txt");

/// What examples with text take.
pub(crate) const FLAGS: &[Flag] = &[
    Flag { name: "text", value: "FILE", about: "what is learned, in UTF-8 (a story of 6,000 letters)" },
    Flag { name: "temperature", value: "X", about: "how daring the sample is (0.7)" },
];

/// Letters that are sampled.
const SAMPLED: usize = 400;

/// Letters by number, the last tenth of them to be judged by.
pub(crate) struct Text {
    letters: Vec<char>,
    trained: Vec<i64>,
    judged: Vec<i64>,
}

impl Text {
    /// The story.
    pub(crate) fn story(length: usize) -> Outcome<Text> {
        Text::new(STORY, length)
    }

    pub(crate) fn of_options(options: &Options, length: usize) -> Outcome<Text> {
        match options.get("text") {
            None => Text::story(length),
            Some(file) => {
                let text = std::fs::read_to_string(file).map_err(|why| format!("{file}: {why}"))?;
                Text::new(&text, length).map_err(|why| format!("{file}: {why}").into())
            }
        }
    }

    /// `length` is that of the pieces to come.
    pub(crate) fn new(text: &str, length: usize) -> Outcome<Text> {
        let mut letters: Vec<char> = text.chars().collect();
        letters.sort_unstable();
        letters.dedup();
        let number = |letter: char| i64::try_from(letters.binary_search(&letter).unwrap_or(0)).unwrap_or(0);
        let mut trained: Vec<i64> = text.chars().map(number).collect();
        let count = trained.len();
        let least = 10 * (length + 2);
        if count < least {
            return Err(format!("{count} letters are too few; {least} are needed").into());
        }
        let judged = trained.split_off(count - count / 10);
        Ok(Text { letters, trained, judged })
    }

    /// How many different letters there are.
    pub(crate) fn letters(&self) -> usize {
        self.letters.len()
    }

    /// The letters by number, as a tensor that goes with a model: code points, which say what its numbers mean.
    pub(crate) fn alphabet(&self) -> (String, Tensor) {
        let points: Vec<i64> = self.letters.iter().map(|letter| i64::from(u32::from(*letter))).collect();
        ("alphabet".to_owned(), Tensor::from_slice(&points, &[points.len()]))
    }

    /// Pieces from anywhere, `[batch, length]`, and the letter after each of theirs, `[batch * length]`.
    pub(crate) fn batch(&self, random: &mut StdRng, batch: usize, length: usize) -> (Tensor, Tensor) {
        let last = self.trained.len() - length - 1;
        let starts: Vec<usize> = (0..batch).map(|_| random.random_range(0..=last)).collect();
        pieces(&self.trained, &starts, length)
    }

    /// How well a model does on pieces that are spread over what it is not trained with.
    pub(crate) fn judge(&self, model: &dyn Module, batch: usize, length: usize) -> Outcome<Score> {
        let last = self.judged.len() - length - 1;
        let starts: Vec<usize> = (0..batch).map(|n| n * last / batch.max(2).saturating_sub(1)).collect();
        let (input, target) = pieces(&self.judged, &starts, length);
        let logits = no_grad(|| model.forward(&input)).reshape(&[-1, self.letters().cast_signed()]);
        let hits = logits.argmax(1).eq(&target).sum(());
        let accuracy = hits.item::<i64>()? as f64 / target.numel() as f64;
        Ok(Score { loss: f64::from(logits.cross_entropy(&target).item::<f32>()?), accuracy: Some(accuracy) })
    }

    /// The beginning of the text, for a sample to go on from.
    pub(crate) fn prompt(&self, length: usize) -> &[i64] {
        &self.trained[..length.min(self.trained.len())]
    }

    /// The numbers of letters, if it has all of them.
    pub(crate) fn numbers(&self, text: &str) -> Option<Vec<i64>> {
        text.chars().map(|letter| i64::try_from(self.letters.binary_search(&letter).ok()?).ok()).collect()
    }

    pub(crate) fn shown(&self, numbers: &[i64]) -> String {
        numbers.iter().filter_map(|n| self.letters.get(usize::try_from(*n).ok()?)).collect()
    }

    /// Prints what a model makes of a prompt: `next` gives the logits of the letter after those so far.
    pub(crate) fn sample(
        &self,
        options: &Options,
        prompt: &[i64],
        random: &mut StdRng,
        mut next: impl FnMut(&[i64]) -> Outcome<Vec<f32>>,
    ) -> Outcome<()> {
        let temperature = options.get("temperature").map_or(Ok(0.7), str::parse::<f32>);
        let temperature = temperature.ok().filter(|t| t.is_finite() && *t >= 0.0);
        let temperature = temperature.ok_or("--temperature takes a number from 0 on")?;
        let mut all = prompt.to_vec();
        for _ in 0..SAMPLED {
            let chosen = choose(&next(&all)?, temperature, random);
            all.push(i64::try_from(chosen)?);
        }
        println!("a sample at temperature {temperature}, after what it was given:");
        println!("{}|{}", self.shown(prompt), self.shown(&all[prompt.len()..]));
        Ok(())
    }
}

fn pieces(text: &[i64], starts: &[usize], length: usize) -> (Tensor, Tensor) {
    let from = |shift: usize| -> Vec<i64> {
        starts.iter().flat_map(|start| &text[start + shift..start + shift + length]).copied().collect()
    };
    let count = starts.len();
    (Tensor::from_vec(from(0), &[count, length]), Tensor::from_vec(from(1), &[count * length]))
}

/// One of several, by logits: always the largest at temperature 0, and any at a high one.
fn choose(logits: &[f32], temperature: f32, random: &mut StdRng) -> usize {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = logits.iter().map(|x| ((x - most) / temperature.max(1e-3)).exp()).collect();
    let mut left = random.random_range(0.0..weights.iter().sum::<f32>());
    for (n, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return n;
        }
    }
    weights.len() - 1
}
