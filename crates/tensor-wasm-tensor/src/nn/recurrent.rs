//! Cells that remember.

use super::{Linear, Module, Parts};
use crate::random;
use crate::tensor::Tensor;

/// A cell with a memory and gates that open it: input, forget, candidate, output, in this order.
pub struct Lstm {
    pub input: Linear,
    pub hidden: Linear,
    size: usize,
}

impl Lstm {
    pub fn new(inputs: usize, size: usize, seed: u64) -> Lstm {
        let hidden = Linear::without_bias(size, 4 * size, random::split(seed, 7));
        Lstm { input: Linear::new(inputs, 4 * size, seed), hidden, size }
    }

    /// One step of `[batch, inputs]`: what comes out, and what is remembered.
    pub fn step(&self, input: &Tensor, hidden: &Tensor, memory: &Tensor) -> (Tensor, Tensor) {
        let gates = self.input.forward(input) + self.hidden.forward(hidden);
        let gate = |n: usize| gates.narrow(-1, n * self.size, self.size);
        let memory = gate(1).sigmoid() * memory + gate(0).sigmoid() * gate(2).tanh();
        (gate(3).sigmoid() * memory.tanh(), memory)
    }
}

/// A cell with two gates: reset and update, then the candidate.
pub struct Gru {
    pub input: Linear,
    pub hidden: Linear,
    size: usize,
}

impl Gru {
    pub fn new(inputs: usize, size: usize, seed: u64) -> Gru {
        let hidden = Linear::new(size, 3 * size, random::split(seed, 7));
        Gru { input: Linear::new(inputs, 3 * size, seed), hidden, size }
    }

    /// One step of `[batch, inputs]`: what comes out, which is also what is remembered.
    pub fn step(&self, input: &Tensor, hidden: &Tensor) -> Tensor {
        let (new, old) = (self.input.forward(input), self.hidden.forward(hidden));
        let part = |tensor: &Tensor, n: usize| tensor.narrow(-1, n * self.size, self.size);
        let reset = (part(&new, 0) + part(&old, 0)).sigmoid();
        let update = (part(&new, 1) + part(&old, 1)).sigmoid();
        let candidate = (part(&new, 2) + reset * part(&old, 2)).tanh();
        &candidate + update * (hidden - &candidate)
    }
}

/// Runs a cell over `[batch, steps, inputs]`, and stacks what comes out: `[batch, steps, size]`.
fn over_steps(input: &Tensor, mut step: impl FnMut(&Tensor) -> Tensor) -> Tensor {
    let steps = input.split(1, 1);
    let outputs: Vec<Tensor> = steps.iter().map(|each| step(&each.squeeze(1))).collect();
    Tensor::stack(&outputs.iter().collect::<Vec<_>>(), 1)
}

fn nothing(input: &Tensor, size: usize) -> Tensor {
    Tensor::zeros(&[input.shape().first().copied().unwrap_or(1), size], input.dtype())
}

impl Module for Lstm {
    /// Over `[batch, steps, inputs]`, beginning with nothing.
    fn forward(&self, input: &Tensor) -> Tensor {
        let (mut hidden, mut memory) = (nothing(input, self.size), nothing(input, self.size));
        over_steps(input, |each| {
            (hidden, memory) = self.step(each, &hidden, &memory);
            hidden.clone()
        })
    }

    fn parts(&self) -> Parts<'_> {
        Parts::new().with("input", &self.input).with("hidden", &self.hidden)
    }
}

impl Module for Gru {
    /// Over `[batch, steps, inputs]`, beginning with nothing.
    fn forward(&self, input: &Tensor) -> Tensor {
        let mut hidden = nothing(input, self.size);
        over_steps(input, |each| {
            hidden = self.step(each, &hidden);
            hidden.clone()
        })
    }

    fn parts(&self) -> Parts<'_> {
        Parts::new().with("input", &self.input).with("hidden", &self.hidden)
    }
}
