//! A perceptron (784, 128, 10) trained for some steps on numbers made by chance. Prints the first loss and the last.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Distribution, Int, Tensor};

#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    activation: Relu,
    second: Linear,
}

fn main() {
    let device = Device::flex().autodiff();
    let mut model = Mlp {
        first: LinearConfig::new(784, 128).init(&device),
        activation: Relu::new(),
        second: LinearConfig::new(128, 10).init(&device),
    };
    let mut optimizer = SgdConfig::new().init();
    let criterion = CrossEntropyLossConfig::new().init(&device);
    let inputs = Tensor::<2>::random([64, 784], Distribution::Default, &device);
    let targets = Tensor::<1, Int>::random([64], Distribution::Uniform(0.0, 10.0), &device);
    let mut losses = Vec::new();
    for _ in 0..100 {
        let hidden = model.activation.forward(model.first.forward(inputs.clone()));
        let loss = criterion.forward(model.second.forward(hidden), targets.clone());
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.05, model, gradients);
    }
    println!("{} {}", losses[0], losses[losses.len() - 1]);
}
