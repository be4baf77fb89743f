//! Points around a sine.

use tensor_wasm_tensor::{DType, Tensor};

use super::Outcome;

/// The deviation of points from the sine.
pub(crate) const NOISE: f64 = 0.15;

/// `[count, 1]` of both.
pub(crate) struct Points {
    pub x: Tensor,
    pub y: Tensor,
}

fn sine(x: &Tensor) -> Tensor {
    (x * 2.0).sin()
}

impl Points {
    /// Anywhere between -3 and 3.
    pub(crate) fn noisy(count: usize, seed: u64) -> Points {
        let x = Tensor::uniform(&[count, 1], seed, DType::F32) * 6.0 - 3.0;
        let noise = Tensor::normal(&[count, 1], seed ^ 0x5eed_0000, DType::F32) * NOISE;
        Points { y: sine(&x) + noise, x }
    }

    pub(crate) fn exact(count: usize) -> Points {
        let x = Tensor::linspace(-3.0, 3.0, count, DType::F32).unsqueeze(1);
        Points { y: sine(&x), x }
    }

    /// As a chart shows them, with other values if need be.
    pub(crate) fn pairs(&self, y: &Tensor) -> Outcome<Vec<(f64, f64)>> {
        Ok(self.x.to_f64()?.into_iter().zip(y.to_f64()?).collect())
    }
}
