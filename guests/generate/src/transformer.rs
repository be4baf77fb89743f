//! The transformer that `crates/tensor-wasm-tensor/examples/transformer.rs` trains, from the host's models, letter by
//! letter: keys and values of the letters before are kept, so that a new letter costs one row of each product.
//!
//! Every letter is computed by a graph of the same structure, whatever its place: the cache has always the whole
//! context, and a letter's place is an element of a tensor, not a part of a shape. So there is one plan for reading a
//! text and one for a letter, and a GPU replays it.

use guest_web::{Refusal, refuse};
use tensor_wasm_sdk::tensor::{DType, Model, Tensor, compute, named};

pub(crate) struct Transformer {
    alphabet: Vec<char>,
    letters: Tensor,
    places: Tensor,
    blocks: Vec<Block>,
    norm: Norm,
    head: Linear,
    context: usize,
    /// 0, 1, 2, … up to the context.
    numbers: Tensor,
    shape: Heads,
}

#[derive(Clone, Copy)]
struct Heads {
    count: usize,
    /// Columns of each.
    size: usize,
}

/// What is kept of the letters so far: for each block keys and values, `[heads, context, size]`. What is in the rows
/// after them is nobody's.
pub(crate) struct Cache {
    blocks: Vec<(Tensor, Tensor)>,
    length: usize,
}

impl Cache {
    /// Letters in it.
    pub(crate) fn length(&self) -> usize {
        self.length
    }
}

/// Attention, then a network for each place; each is added to what it was given.
struct Block {
    first_norm: Norm,
    /// To queries, keys and values at once.
    project: Linear,
    merge: Linear,
    second_norm: Norm,
    widen: Linear,
    narrow: Linear,
}

struct Linear {
    weight: Tensor,
    bias: Tensor,
}

struct Norm(Linear);

impl Linear {
    fn of(model: &Model, name: &str) -> Linear {
        let part = |part: &str| model.get(&format!("{name}.{part}")).cast(DType::F32);
        Linear { weight: part("weight"), bias: part("bias") }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        x.matmul(&self.weight) + &self.bias
    }
}

impl Norm {
    fn forward(&self, x: &Tensor) -> Tensor {
        x.layer_norm(-1, 1e-5) * &self.0.weight + &self.0.bias
    }
}

impl Block {
    fn of(model: &Model, number: usize) -> Block {
        let part = |name: &str| Linear::of(model, &format!("block.{number}.{name}"));
        Block {
            first_norm: Norm(part("first_norm")),
            project: part("project"),
            merge: part("merge"),
            second_norm: Norm(part("second_norm")),
            widen: part("widen"),
            narrow: part("narrow"),
        }
    }

    /// Queries, keys and values of rows `[count, width]`, each `[heads, count, size]`.
    fn projected(&self, x: &Tensor, count: usize, heads: Heads) -> [Tensor; 3] {
        let shape = [count, 3, heads.count, heads.size].map(|size| size as i64);
        let all = self.project.forward(&self.first_norm.forward(x)).reshape(&shape).permute(&[1, 2, 0, 3]);
        [0, 1, 2].map(|n| all.select(0, n))
    }

    /// The rest of it, once it is known what each row saw, `[heads, count, size]`.
    fn finished(&self, x: &Tensor, seen: &Tensor, count: usize, heads: Heads) -> Tensor {
        let seen = seen.permute(&[1, 0, 2]).reshape(&[count as i64, (heads.count * heads.size) as i64]);
        let x = x + self.merge.forward(&seen);
        &x + self.narrow.forward(&self.widen.forward(&self.second_norm.forward(&x)).gelu())
    }

    fn weights(&self) -> [&Linear; 6] {
        [&self.first_norm.0, &self.project, &self.merge, &self.second_norm.0, &self.widen, &self.narrow]
    }
}

impl Transformer {
    pub(crate) fn open(name: &str) -> Result<Transformer, Refusal> {
        let model = Model::open(name)?;
        let names = model.names();
        let blocks = (0..).take_while(|n| names.contains(&format!("block.{n}.project.weight"))).count();
        let (letters, places) =
            (model.get("letters.weight").cast(DType::F32), model.get("places.weight").cast(DType::F32));
        let points = model.get("alphabet").to_vec::<i64>()?;
        let alphabet: Vec<char> = points.iter().filter_map(|n| char::from_u32(u32::try_from(*n).ok()?)).collect();
        let heads = usize::try_from(model.get("heads").item::<i64>()?).unwrap_or(0);
        let (letters_shape, places_shape) = (letters.shape()?, places.shape()?);
        let (&[count, width], &[context, _]) = (&letters_shape[..], &places_shape[..]) else {
            return refuse(500, format!("model {name:?} is no transformer of letters: its tables are no matrices"));
        };
        if blocks == 0 || heads == 0 || width % heads != 0 || alphabet.len() != count || context < 2 {
            return refuse(500, format!("model {name:?} is no transformer of letters: its parts do not fit together"));
        }
        let made = Transformer {
            alphabet,
            blocks: (0..blocks).map(|n| Block::of(&model, n)).collect(),
            norm: Norm(Linear::of(&model, "norm")),
            head: Linear::of(&model, "head"),
            context,
            numbers: Tensor::from_slice(&(0..context as i64).collect::<Vec<_>>(), &[context]),
            shape: Heads { count: heads, size: width / heads },
            letters,
            places,
        };
        // Once, and not for every letter: a model may be kept in halves.
        let ends = [&made.norm.0, &made.head];
        let linears = made.blocks.iter().flat_map(Block::weights).chain(ends);
        let weights: Vec<&Tensor> = linears.flat_map(|linear| [&linear.weight, &linear.bias]).collect();
        compute(&[&[&made.letters, &made.places], &weights[..]].concat())?.wait()?;
        Ok(made)
    }

    /// Letters that it looks back at.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    pub(crate) fn number(&self, letter: char) -> Option<usize> {
        self.alphabet.iter().position(|known| *known == letter)
    }

    pub(crate) fn letter(&self, number: usize) -> char {
        self.alphabet.get(number).copied().unwrap_or(char::REPLACEMENT_CHARACTER)
    }

    /// Letters that it can look at; of too many the last ones, with room for as many more.
    pub(crate) fn fitting(&self, mut letters: Vec<usize>) -> Vec<usize> {
        if letters.len() > self.context {
            letters.drain(..letters.len() - self.context / 2);
        }
        letters
    }

    /// Reads a text, which fits: what may come next, and what is kept of it.
    pub(crate) fn read(&self, text: &[usize]) -> Result<(Vec<f32>, Cache), Refusal> {
        let mut padded: Vec<i64> = text.iter().map(|letter| *letter as i64).collect();
        // Behind the text, where nobody looks.
        padded.resize(self.context, 0);
        let mut x = self.letters.embedding(&Tensor::from_slice(&padded, &[self.context])) + &self.places;
        let mut cache = Cache { blocks: Vec::new(), length: text.len() };
        for block in &self.blocks {
            let [queries, keys, values] = block.projected(&x, self.context, self.shape);
            x = block.finished(&x, &queries.attention(&keys, &values, true), self.context, self.shape);
            cache.blocks.push((keys, values));
        }
        let last = Tensor::from_slice(&[text.len() as i64 - 1], &[1]);
        let last = x.apply("index_select", &[named("axis", 0), (&last).into()]);
        Ok((self.logits(&last, &cache)?, cache))
    }

    /// Reads one letter more: what may come next. The cache has room for it.
    pub(crate) fn read_one(&self, letter: usize, cache: &mut Cache) -> Result<Vec<f32>, Refusal> {
        let one = |n: usize| Tensor::from_slice(&[n as i64], &[1]);
        let place = one(cache.length);
        // Where it is put, by row, and what it sees, by column.
        let here = self.numbers.eq(&place).unsqueeze(1);
        let seen = self.numbers.le(&place);
        let mut x = self.letters.embedding(&one(letter)) + self.places.embedding(&place);
        for (block, (keys, values)) in self.blocks.iter().zip(&mut cache.blocks) {
            let [query, key, value] = block.projected(&x, 1, self.shape);
            *keys = Tensor::where_(&here, &key, keys);
            *values = Tensor::where_(&here, &value, values);
            let scores = query.matmul(&keys.transpose()) * (1.0 / (self.shape.size as f64).sqrt());
            let scores = seen.apply("where", &[(&scores).into(), f64::NEG_INFINITY.into()]);
            x = block.finished(&x, &scores.softmax(-1).matmul(values), 1, self.shape);
        }
        cache.length += 1;
        self.logits(&x, cache)
    }

    /// What may come after a row, computed together with the cache: what is not computed now would be computed from
    /// the first letter on at every letter.
    fn logits(&self, row: &Tensor, cache: &Cache) -> Result<Vec<f32>, Refusal> {
        let logits = self.head.forward(&self.norm.forward(row));
        let kept = cache.blocks.iter().flat_map(|(keys, values)| [keys, values]);
        compute(&[&logits].into_iter().chain(kept).collect::<Vec<_>>())?.wait()?;
        Ok(logits.to_vec()?)
    }
}
