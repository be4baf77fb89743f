//! A perceptron (784, 128, 10) trained for some steps on numbers made by chance. Prints the first loss and the last.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear, loss, seq};

fn main() -> Result<()> {
    let device = Device::Cpu;
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, &device);
    let model = seq()
        .add(linear(784, 128, builder.pp("first"))?)
        .add_fn(|x| x.relu())
        .add(linear(128, 10, builder.pp("second"))?);
    let mut optimizer = SGD::new(variables.all_vars(), 0.05)?;
    let inputs = Tensor::rand(0_f32, 1_f32, (64, 784), &device)?;
    let targets = Tensor::rand(0_f32, 10_f32, 64, &device)?.to_dtype(DType::U32)?;
    let mut losses = Vec::new();
    for _ in 0..100 {
        let loss = loss::cross_entropy(&model.forward(&inputs)?, &targets)?;
        optimizer.backward_step(&loss)?;
        losses.push(loss.to_scalar::<f32>()?);
    }
    println!("{} {}", losses[0], losses[losses.len() - 1]);
    Ok(())
}
