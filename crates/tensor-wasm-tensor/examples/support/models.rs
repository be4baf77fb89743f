//! The models of the examples.

use tensor_wasm_tensor::nn::{
    Conv2d, Embedding, KvCache, LayerNorm, Linear, Lstm, Module, Parts, Sequential, function,
};
use tensor_wasm_tensor::{Convolution, DType, Tensor};

use super::digits::{CLASSES, PIXELS, SIDE};

/// Digits: 784 pixels, 128 in between, 10 classes.
pub(crate) fn mlp(seed: u64) -> Sequential {
    let seeds = seeds(seed);
    Sequential::new().then(Linear::new(PIXELS, 128, seeds(0))).then(function(Tensor::relu)).then(Linear::new(
        128,
        CLASSES,
        seeds(1),
    ))
}

/// Digits without anything in between: what a network has to beat.
pub(crate) fn linear(seed: u64) -> Sequential {
    Sequential::new().then(Linear::new(PIXELS, CLASSES, seed))
}

/// Digits: two convolutions of 5 by 5, each followed by the largest of 2 by 2.
pub(crate) fn cnn(seed: u64) -> Sequential {
    let seeds = seeds(seed);
    let pool = || function(|x: &Tensor| x.relu().max_pool2d(2));
    Sequential::new()
        .then(function(|x: &Tensor| x.reshape(&[-1, 1, SIDE.cast_signed(), SIDE.cast_signed()])))
        .then(Conv2d::new(1, 16, 5, Convolution::default(), seeds(0)))
        .then(pool())
        .then(Conv2d::new(16, 32, 5, Convolution::default(), seeds(1)))
        .then(pool())
        .then(function(|x: &Tensor| x.flatten(1)))
        .then(Linear::new(32 * 4 * 4, CLASSES, seeds(2)))
}

/// A number from a number.
pub(crate) fn sine(seed: u64) -> Sequential {
    let seeds = seeds(seed);
    Sequential::new()
        .then(Linear::new(1, 32, seeds(0)))
        .then(function(Tensor::tanh))
        .then(Linear::new(32, 32, seeds(1)))
        .then(function(Tensor::tanh))
        .then(Linear::new(32, 1, seeds(2)))
}

/// A seed for each part of a model.
fn seeds(seed: u64) -> impl Fn(u64) -> u64 {
    move |part| seed.wrapping_mul(1_000).wrapping_add(part)
}

/// Variables of a part of a model, with its name before theirs.
/// The next letter, by what an LSTM remembers of those before.
pub(crate) struct CharLstm {
    table: Embedding,
    pub cell: Lstm,
    head: Linear,
}

impl CharLstm {
    pub(crate) const SIZE: usize = 128;

    pub(crate) fn new(letters: usize, seed: u64) -> CharLstm {
        let seeds = seeds(seed);
        let cell = Lstm::new(32, CharLstm::SIZE, seeds(1));
        CharLstm {
            table: Embedding::new(letters, 32, seeds(0)),
            cell,
            head: Linear::new(CharLstm::SIZE, letters, seeds(2)),
        }
    }

    /// One letter of each of several texts: what may come next, and what is remembered.
    pub(crate) fn step(&self, letters: &Tensor, hidden: &Tensor, memory: &Tensor) -> (Tensor, Tensor, Tensor) {
        let (hidden, memory) = self.cell.step(&self.table.forward(letters), hidden, memory);
        (self.head.forward(&hidden), hidden, memory)
    }
}

impl Module for CharLstm {
    /// Letters `[batch, length]` to `[batch, length, letters]`.
    fn forward(&self, input: &Tensor) -> Tensor {
        self.head.forward(&self.cell.forward(&self.table.forward(input)))
    }

    fn parts(&self) -> Parts<'_> {
        Parts::new().with("table", &self.table).with("cell", &self.cell).with("head", &self.head)
    }
}

/// The next letter, by attention to those before: embeddings of letters and places, blocks with residuals, a norm.
pub(crate) struct Transformer {
    letters: Embedding,
    places: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

/// Attention, then a network for each place; each is added to what it was given.
struct Block {
    first_norm: LayerNorm,
    /// To queries, keys and values at once.
    project: Linear,
    merge: Linear,
    second_norm: LayerNorm,
    widen: Linear,
    narrow: Linear,
}

impl Transformer {
    /// Letters that it looks back at.
    pub(crate) const CONTEXT: usize = 64;

    const WIDTH: usize = 64;
    const HEADS: usize = 4;
    const BLOCKS: u64 = 2;

    /// How many heads there are, as a tensor that goes with a model: the shapes of the others do not say it.
    pub(crate) fn heads() -> (String, Tensor) {
        ("heads".to_owned(), Tensor::from_slice(&[i64::try_from(Transformer::HEADS).unwrap_or_default()], &[1]))
    }

    pub(crate) fn new(letters: usize, seed: u64) -> Transformer {
        let seeds = seeds(seed);
        let width = Transformer::WIDTH;
        // Small, so that what blocks add counts from the beginning.
        let small = |table: Embedding| {
            table.weight.set(&(table.weight.get().detach() * 0.1));
            table
        };
        let block = |n: u64| Block {
            first_norm: LayerNorm::new(width),
            project: Linear::new(width, 3 * width, seeds(10 * n)),
            merge: Linear::new(width, width, seeds(10 * n + 1)),
            second_norm: LayerNorm::new(width),
            widen: Linear::new(width, 4 * width, seeds(10 * n + 2)),
            narrow: Linear::new(4 * width, width, seeds(10 * n + 3)),
        };
        Transformer {
            letters: small(Embedding::new(letters, width, seeds(1))),
            places: small(Embedding::new(Transformer::CONTEXT, width, seeds(2))),
            blocks: (1..=Transformer::BLOCKS).map(block).collect(),
            norm: LayerNorm::new(width),
            head: Linear::new(width, letters, seeds(3)),
        }
    }
}

impl Transformer {
    /// Room for what it keeps of the letters before.
    pub(crate) fn cache(&self) -> KvCache {
        let (heads, size) = (Transformer::HEADS, Transformer::WIDTH / Transformer::HEADS);
        KvCache::new(self.blocks.len(), &[1, heads, Transformer::CONTEXT, size], DType::F32)
    }

    /// What may come after a letter and those in the cache: letter `[1, 1]` to `[1, 1, letters]`.
    pub(crate) fn next(&self, letter: &Tensor, cache: &mut KvCache) -> tensor_wasm_tensor::Result<Tensor> {
        let place = self.places.forward(&cache.position().reshape(&[1, 1]));
        let start = self.letters.forward(letter) + place;
        let end = self.blocks.iter().enumerate().fold(start, |x, (n, block)| {
            block.with_attention(&x, |[queries, keys, values]| cache.attend(n, queries, keys, values))
        });
        let logits = self.head.forward(&self.norm.forward(&end));
        cache.advance(&[&logits])?;
        Ok(logits)
    }
}

impl Block {
    /// `attention` is that of queries, keys and values `[batch, heads, length, size]`.
    fn with_attention(&self, x: &Tensor, attention: impl FnOnce([&Tensor; 3]) -> Tensor) -> Tensor {
        let normed = self.first_norm.forward(x);
        let (batch, length) = (x.shape()[0].cast_signed(), x.shape()[1].cast_signed());
        let (heads, size) = (Transformer::HEADS.cast_signed(), (Transformer::WIDTH / Transformer::HEADS).cast_signed());
        // [batch, length, 3, heads, size] to [3, batch, heads, length, size]
        let all = self.project.forward(&normed).reshape(&[batch, length, 3, heads, size]).permute(&[2, 0, 3, 1, 4]);
        let each = [0, 1, 2].map(|n| all.narrow(0, n, 1).squeeze(0));
        let seen = attention(each.each_ref());
        let x = x + self.merge.forward(&seen.transpose(1, 2).reshape(&[batch, length, heads * size]));
        &x + self.narrow.forward(&self.widen.forward(&self.second_norm.forward(&x)).gelu())
    }
}

impl Module for Block {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.with_attention(input, |[queries, keys, values]| queries.attention(keys, values, true))
    }

    fn parts(&self) -> Parts<'_> {
        let parts = Parts::new().with("first_norm", &self.first_norm).with("project", &self.project);
        let parts = parts.with("merge", &self.merge).with("second_norm", &self.second_norm);
        parts.with("widen", &self.widen).with("narrow", &self.narrow)
    }
}

impl Module for Transformer {
    /// Letters `[batch, length]` to `[batch, length, letters]`.
    fn forward(&self, input: &Tensor) -> Tensor {
        let length = i64::try_from(input.shape()[1]).unwrap_or(i64::MAX);
        let places = self.places.forward(&Tensor::arange(0, length, 1, DType::I64));
        let start = self.letters.forward(input) + places;
        let end = self.blocks.iter().fold(start, |x, block| block.forward(&x));
        self.head.forward(&self.norm.forward(&end))
    }

    fn parts(&self) -> Parts<'_> {
        let parts = Parts::new().with("letters", &self.letters).with("places", &self.places);
        parts.with_each("block", &self.blocks).with("norm", &self.norm).with("head", &self.head)
    }
}
