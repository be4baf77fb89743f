//! A `wasi:http` handler that goes on with a text: `POST /` with a prompt, and what comes back is streamed letter by
//! letter. `?tokens=200&temperature=0.7&seed=1`; temperature 0 takes the likeliest letter always. `story.safetensors`
//! beside this was made, from the repository's root, by
//! `cargo run --release -p tensor-wasm-tensor --example transformer -- --save guests/generate/story.safetensors
//! --save-dtype f16`.

mod transformer;

use guest_web::{Answer, Query, Refusal, body, refuse};
use transformer::{Cache, Transformer};
use wasip2::exports::http::incoming_handler::Guest;
use wasip2::http::types::{IncomingRequest, Method, ResponseOutparam};

struct Generate;

/// The model that is opened unless the environment variable `MODEL` names another.
const MODEL: &str = "story";

impl Guest for Generate {
    fn handle(request: IncomingRequest, out: ResponseOutparam) {
        // What may fail because of the request, or of the model, fails before the answer begins.
        let (mut writer, tokens) = match Writer::of_request(&request) {
            Ok(begun) => begun,
            Err(refusal) => return refusal.respond(out),
        };
        let answer = Answer::begin(out, 200, &[("content-type", "text/plain; charset=utf-8")]);
        for _ in 0..tokens {
            let Ok(letter) = writer.next() else { return };
            // Whoever left reads no more.
            let Ok(()) = answer.send(letter.encode_utf8(&mut [0; 4]).as_bytes()) else { return };
        }
        answer.finish();
    }
}

/// A text that grows.
struct Writer {
    model: Transformer,
    /// What the model looks at: the last letters of the text.
    window: Vec<usize>,
    cache: Cache,
    /// How likely each letter is to be the next.
    logits: Vec<f32>,
    temperature: f32,
    random: u64,
}

impl Writer {
    fn of_request(request: &IncomingRequest) -> Result<(Writer, u32), Refusal> {
        if !matches!(request.method(), Method::Post) {
            return refuse(405, "POST a prompt; ?tokens=200&temperature=0.7&seed=1");
        }
        let path = request.path_with_query().unwrap_or_default();
        let query = Query::read(path.split_once('?').map_or("", |(_, query)| query))?;
        query.knows(&["tokens", "temperature", "seed"])?;
        let tokens = query.number("tokens", 200, 1..=10_000)?;
        let temperature = query.number("temperature", 0.7, 0.0..=10.0)?;
        let random = query.number("seed", 1, 0..=u64::MAX)?;
        let prompt = String::from_utf8(body(request)?);
        let prompt = prompt.map_err(|_| Refusal { status: 400, why: "the prompt is not UTF-8".to_owned() })?;
        let model = Transformer::open(&std::env::var("MODEL").unwrap_or_else(|_| MODEL.to_owned()))?;
        let mut window = Vec::new();
        for letter in prompt.chars() {
            match model.number(letter) {
                Some(number) => window.push(number),
                None => return refuse(400, format!("the prompt has {letter:?}, a letter that the model never saw")),
            }
        }
        if window.is_empty() {
            return refuse(400, "the prompt is empty; POST the beginning of a text");
        }
        let window = model.fitting(window);
        let (logits, cache) = model.read(&window)?;
        Ok((Writer { model, window, cache, logits, temperature, random }, tokens))
    }

    /// The next letter. It is looked at when the one after it is asked for.
    fn next(&mut self) -> Result<char, Refusal> {
        if self.window.len() > self.cache.length() {
            let last = self.window[self.window.len() - 1];
            if self.window.len() > self.model.context() {
                // Places begin anew, so what was kept of the letters is no longer true of them.
                self.window = self.model.fitting(std::mem::take(&mut self.window));
                (self.logits, self.cache) = self.model.read(&self.window)?;
            } else {
                self.logits = self.model.read_one(last, &mut self.cache)?;
            }
        }
        let chosen = self.choose();
        self.window.push(chosen);
        Ok(self.model.letter(chosen))
    }

    /// One of several by how likely they are: at temperature 0 the first of the likeliest, and at a high one any.
    fn choose(&mut self) -> usize {
        let mut best = 0;
        for (n, logit) in self.logits.iter().enumerate() {
            if *logit > self.logits[best] {
                best = n;
            }
        }
        if self.temperature == 0.0 {
            return best;
        }
        let most = self.logits[best];
        let weights: Vec<f32> = self.logits.iter().map(|x| ((x - most) / self.temperature).exp()).collect();
        let mut left = self.uniform() * weights.iter().sum::<f32>();
        for (n, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return n;
            }
        }
        best
    }

    /// A number from 0 up to and without 1 (SplitMix64).
    fn uniform(&mut self) -> f32 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.random;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 40) as f32 / (1_u32 << 24) as f32
    }
}

wasip2::http::proxy::export!(Generate);
