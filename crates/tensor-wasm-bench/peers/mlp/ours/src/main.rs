//! A perceptron (784, 128, 10) trained for some steps on numbers made by chance. Prints the first loss and the last.

use tensor_wasm_tensor::nn::{Linear, Module, Sequential, function};
use tensor_wasm_tensor::{DType, Optimizer, Result, Sgd, Tensor};

fn main() -> Result<()> {
    let model = Sequential::new()
        .then(Linear::new(784, 128, 1))
        .then(function(|x| x.relu()))
        .then(Linear::new(128, 10, 2));
    let mut optimizer = Sgd::new(&model.parameters(), 0.05);
    let inputs = Tensor::uniform(&[64, 784], 3, DType::F32);
    let targets = (Tensor::uniform(&[64], 4, DType::F32) * 10.0).cast(DType::I64);
    let mut losses = Vec::new();
    for _ in 0..100 {
        let loss = model.forward(&inputs).cross_entropy(&targets);
        loss.backward()?;
        optimizer.step()?;
        losses.push(loss.item::<f32>()?);
    }
    println!("{} {}", losses[0], losses[losses.len() - 1]);
    Ok(())
}
