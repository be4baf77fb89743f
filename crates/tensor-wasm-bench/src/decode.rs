//! A small transformer that makes one token after the other: what `decode` rows measure. The peer's is the same.

use tensor_wasm_tensor::nn::{Embedding, KvCache, LayerNorm, Linear, Module};
use tensor_wasm_tensor::{DType, Tensor, no_grad};

const WIDTH: usize = 512;
const HEADS: usize = 8;
const LAYERS: usize = 4;
const TOKENS: usize = 1024;
const CONTEXT: usize = 512;

struct Block {
    first_norm: LayerNorm,
    project: Linear,
    merge: Linear,
    second_norm: LayerNorm,
    widen: Linear,
    narrow: Linear,
}

pub(crate) struct Decoder {
    tokens: Embedding,
    places: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    cache: KvCache,
    /// The last token's row of the table.
    last: Tensor,
}

impl Decoder {
    pub(crate) fn new() -> tensor_wasm_tensor::Result<Decoder> {
        let block = |n: u64| Block {
            first_norm: LayerNorm::new(WIDTH),
            project: Linear::new(WIDTH, 3 * WIDTH, 10 * n),
            merge: Linear::new(WIDTH, WIDTH, 10 * n + 1),
            second_norm: LayerNorm::new(WIDTH),
            widen: Linear::new(WIDTH, 4 * WIDTH, 10 * n + 2),
            narrow: Linear::new(4 * WIDTH, WIDTH, 10 * n + 3),
        };
        let last = Tensor::zeros(&[1, 1, WIDTH], DType::F32);
        let decoder = Decoder {
            tokens: Embedding::new(TOKENS, WIDTH, 1),
            places: Embedding::new(CONTEXT, WIDTH, 2),
            blocks: (1..=LAYERS as u64).map(block).collect(),
            norm: LayerNorm::new(WIDTH),
            head: Linear::new(WIDTH, TOKENS, 3),
            cache: KvCache::new(LAYERS, &[1, HEADS, CONTEXT, WIDTH / HEADS], DType::F32),
            last,
        };
        let Decoder { tokens, places, blocks, norm, head, last, .. } = &decoder;
        let mut modules: Vec<&dyn Module> = vec![tokens, places, norm, head];
        for Block { first_norm, project, merge, second_norm, widen, narrow } in blocks {
            modules.extend([first_norm as &dyn Module, project, merge, second_norm, widen, narrow]);
        }
        modules.iter().flat_map(|module| module.parameters()).try_for_each(|variable| variable.realize())?;
        last.realize()?;
        Ok(decoder)
    }

    /// The next token, the most probable one. Nothing is read back.
    pub(crate) fn step(&mut self) -> tensor_wasm_tensor::Result<()> {
        if self.cache.len() == self.cache.capacity() {
            self.cache.clear();
        }
        let (token, row) = no_grad(|| self.next());
        self.cache.advance(&[&token, &row])?;
        self.last = row;
        Ok(())
    }

    /// The token and its row. That is looked up here, where it is known to be one of the table's: nothing has to be
    /// checked later.
    fn next(&mut self) -> (Tensor, Tensor) {
        let Decoder { tokens, places, blocks, norm, head, cache, last } = self;
        let mut x = &*last + cache.place(&places.weight.get());
        for (n, block) in blocks.iter().enumerate() {
            let (heads, size) = (HEADS.cast_signed(), (WIDTH / HEADS).cast_signed());
            let all = block.project.forward(&block.first_norm.forward(&x)).reshape(&[1, 1, 3, heads, size]);
            let all = all.permute(&[2, 0, 3, 1, 4]);
            let [q, k, v] = [0, 1, 2].map(|n| all.narrow(0, n, 1).squeeze(0));
            let seen = cache.attend(n, &q, &k, &v).transpose(1, 2).reshape(&[1, 1, heads * size]);
            x = x + block.merge.forward(&seen);
            x = &x + block.narrow.forward(&block.widen.forward(&block.second_norm.forward(&x)).gelu());
        }
        let token = head.forward(&norm.forward(&x)).argmax(-1);
        let row = tokens.forward(&token);
        (token, row)
    }
}
