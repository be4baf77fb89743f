//! What a transformer that makes one token at a time keeps of those before.

use std::panic::Location;

use crate::autograd::no_grad;
use crate::dtype::DType;
use crate::error::{ErrorKind, Result, TensorError};
use crate::tensor::Tensor;

/// Keys and values of all tokens so far, for each layer of a model. Room for all of them is there from the beginning,
/// and how many there are is a tensor: every token is computed by the same plan, which a GPU replays as one graph.
///
/// ```
/// # use tensor_wasm_tensor::{DType, Tensor, nn::KvCache};
/// // One layer with two heads of size 4, for a text of up to 16 tokens.
/// let mut cache = KvCache::new(1, &[1, 2, 16, 4], DType::F32);
/// for seed in 0..3 {
///     let [q, k, v] = [0, 1, 2].map(|n| Tensor::normal(&[1, 2, 1, 4], 3 * seed + n, DType::F32));
///     let seen = cache.attend(0, &q, &k, &v);
///     cache.advance(&[&seen])?;
/// }
/// assert_eq!(cache.len(), 3);
/// # Ok::<(), tensor_wasm_tensor::TensorError>(())
/// ```
pub struct KvCache {
    layers: Vec<[Tensor; 2]>,
    /// How many tokens there are, as the plan sees it.
    position: Tensor,
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// An empty one for so many layers; `sizes` are those of a layer's keys: batch, heads, tokens, size of a head.
    pub fn new(layers: usize, sizes: &[usize; 4], dtype: DType) -> KvCache {
        let layer = |_| [0, 1].map(|_| Tensor::zeros(sizes, dtype));
        let cache = KvCache {
            layers: (0..layers).map(layer).collect(),
            position: Tensor::scalar(0_i64, DType::I64),
            len: 0,
            capacity: sizes[2],
        };
        // In memory, so that the plan of the first token is that of the others. What is wrong with it is said when they
        // are computed.
        let all: Vec<&Tensor> = cache.layers.iter().flatten().chain([&cache.position]).collect();
        let _ = Tensor::realize_all(&all);
        cache
    }

    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The number of the token that comes now, one number of `i64`: what a model looks up its place by.
    pub fn position(&self) -> &Tensor {
        &self.position
    }

    /// This token's row of a table that has one for each place. A sum over all rows of which one counts: nothing has to
    /// be looked at to know that there is such a row.
    #[track_caller]
    pub fn place(&self, table: &Tensor) -> Tensor {
        let rows = table.shape().first().copied().unwrap_or(0);
        if rows < self.capacity {
            let what = format!("a row for each of {} places, which", self.capacity);
            let what = ErrorKind::WrongShape { found: table.shape().to_vec(), expected: what };
            return table
                .check()
                .err()
                .map_or_else(|| Tensor::failed("place", what, Location::caller()), Tensor::holding);
        }
        let places = Tensor::arange(0, i64::try_from(rows).unwrap_or(i64::MAX), 1, DType::I64);
        let is_now = places.unsqueeze(1).eq(&self.position);
        is_now.where_(table, 0.0).sum(0)
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        (self.position, self.len) = (Tensor::scalar(0_i64, DType::I64), 0);
        // What is not seen counts zero times, and zero times infinity is no number.
        for kept in self.layers.iter_mut().flatten() {
            *kept = Tensor::zeros(&kept.shape(), kept.dtype());
            let _ = kept.realize();
        }
        let _ = self.position.realize();
    }

    /// What the token that comes now sees of those before and of itself, in a layer. Queries, keys and values are
    /// `[batch, heads, 1, size]`, and so is the result.
    #[track_caller]
    pub fn attend(&mut self, layer: usize, queries: &Tensor, keys: &Tensor, values: &Tensor) -> Tensor {
        let at = Location::caller();
        let layers = self.layers.len();
        let Some(kept) = self.layers.get_mut(layer) else {
            let why = format!("layer {layer} of a cache that has {layers}");
            return Tensor::failed("attend", ErrorKind::BadArgument { why }, at);
        };
        let expected = kept[0].shape().with(2, 1);
        if let Some(other) = [queries, keys, values].into_iter().find(|tensor| tensor.shape() != expected) {
            let (found, expected) = (other.shape().to_vec(), format!("{expected}, one token of this cache,"));
            return other.check().err().map_or_else(
                || Tensor::failed("attend", ErrorKind::WrongShape { found, expected }, at),
                Tensor::holding,
            );
        }
        let count = i64::try_from(self.capacity).unwrap_or(i64::MAX);
        let places = Tensor::arange(0, count, 1, DType::I64);
        let is_now = places.unsqueeze(1).eq(&self.position);
        let new: Vec<Tensor> = no_grad(|| {
            let with = |(kept, new): (&Tensor, &Tensor)| is_now.where_(new.detach(), kept);
            kept.iter().zip([keys, values]).map(with).collect()
        });
        // What cannot be kept leaves the cache as it is.
        if let Some(error) = new.iter().find_map(|tensor| tensor.check().err()) {
            return Tensor::holding(error);
        }
        kept.iter_mut().zip(new).for_each(|(kept, new)| *kept = new);
        let [keys, values] = kept;
        let scale = 1.0 / (expected[3] as f64).sqrt();
        let scores = queries.matmul(&keys.t()) * scale;
        let scores = places.le(&self.position).where_(&scores, f64::NEG_INFINITY);
        scores.softmax(-1).matmul(values)
    }

    /// Computes what is made of this token, and goes on to the next: everything in one plan.
    #[track_caller]
    pub fn advance(&mut self, outputs: &[&Tensor]) -> Result<()> {
        if self.len == self.capacity {
            let why = format!("the cache is full: it has room for {} tokens", self.capacity);
            return Err(TensorError::new("advance", ErrorKind::BadArgument { why }, Location::caller()));
        }
        let next = &self.position + 1;
        let kept = self.layers.iter().flatten().chain([&next]);
        Tensor::realize_all(&outputs.iter().copied().chain(kept).collect::<Vec<_>>())?;
        (self.position, self.len) = (next, self.len + 1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plans_made;

    #[test]
    fn tokens_one_by_one_see_what_they_see_together() {
        let sizes = [2, 3, 7, 8];
        let all: Vec<[Tensor; 3]> =
            (0..2).map(|layer| [0, 1, 2].map(|n| Tensor::normal(&sizes, 10 * layer + n, DType::F64))).collect();
        let mut cache = KvCache::new(2, &sizes, DType::F64);
        for token in 0..7 {
            let seen: Vec<Tensor> = (0..2)
                .map(|layer| {
                    let [q, k, v] = all[layer].each_ref().map(|all| all.narrow(2, token, 1).contiguous());
                    [&q, &k, &v].into_iter().for_each(|new| new.realize().unwrap());
                    cache.attend(layer, &q, &k, &v)
                })
                .collect();
            cache.advance(&seen.iter().collect::<Vec<_>>()).unwrap();
            for (seen, [q, k, v]) in seen.iter().zip(&all) {
                let together = q.attention(k, v, true).narrow(2, token, 1);
                let apart = (seen - &together).abs().max(()).item::<f64>().unwrap();
                assert!(apart < 1e-12, "token {token}: {apart}");
            }
        }
        assert_eq!((cache.len(), cache.position().item::<i64>().unwrap()), (7, 7));
        let error = cache.advance(&[]).unwrap_err().to_string();
        assert!(error.contains("room for 7 tokens"), "{error}");
        cache.clear();
        assert!(cache.is_empty());
        let wrong = cache.attend(2, &all[0][0], &all[0][1], &all[0][2]).check().unwrap_err().to_string();
        assert!(wrong.contains("layer 2 of a cache that has 2"), "{wrong}");
        let wrong = cache.attend(0, &all[0][0], &all[0][1], &all[0][2]).check().unwrap_err().to_string();
        assert!(wrong.contains("one token of this cache"), "{wrong}");
    }

    #[test]
    fn the_first_token_makes_the_last_plan() {
        let mut cache = KvCache::new(1, &[1, 2, 16, 4], DType::F32);
        let mut plans = 0;
        for token in 0..10 {
            let [q, k, v] = [0, 1, 2].map(|n| Tensor::normal(&[1, 2, 1, 4], 3 * token + n, DType::F32));
            let seen = cache.attend(0, &q, &k, &v);
            cache.advance(&[&seen]).unwrap();
            if token == 0 {
                plans = plans_made();
            }
        }
        assert_eq!(plans_made(), plans, "plans after the first token");
    }
}
