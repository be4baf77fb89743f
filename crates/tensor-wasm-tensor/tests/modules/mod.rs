//! Modules that are made of others, and what is said about what they are given.

use tensor_wasm_tensor::nn::{self, Module};
use tensor_wasm_tensor::{DType, Optimizer, Sgd, Tensor, Variable, check_gradients, grad, plans_made};

/// A model whose parts have something to remember.
struct Parted {
    first: nn::Linear,
    norm: nn::BatchNorm,
    dropout: nn::Dropout,
    rest: Vec<nn::Linear>,
}

impl Module for Parted {
    fn forward(&self, input: &Tensor) -> Tensor {
        let x = self.dropout.forward(&self.norm.forward(&self.first.forward(input)));
        self.rest.iter().fold(x, |x, layer| layer.forward(&x))
    }

    fn parts(&self) -> nn::Parts<'_> {
        let parts = nn::Parts::new().with("first", &self.first).with("norm", &self.norm).with("dropout", &self.dropout);
        parts.with_each("rest", &self.rest)
    }
}

#[test]
fn a_module_is_what_its_parts_are() {
    let model = Parted {
        first: nn::Linear::new(3, 8, 1),
        norm: nn::BatchNorm::new(8),
        dropout: nn::Dropout::new(0.5, 2),
        rest: vec![nn::Linear::new(8, 8, 3), nn::Linear::without_bias(8, 2, 4)],
    };
    let names: Vec<String> = model.state_dict().into_iter().map(|(name, _)| name).collect();
    let expected = "first.weight first.bias norm.weight norm.bias rest.0.weight rest.0.bias rest.1.weight \
                    norm.running_mean norm.running_var";
    assert_eq!(names.join(" "), expected);
    let x = Tensor::normal(&[16, 3], 5, DType::F32);
    let twice = |model: &Parted| [0, 1].map(|_| model.forward(&x).to_vec::<f32>().unwrap());
    let [one, other] = twice(&model);
    assert_ne!(one, other, "dropout is on while it is trained");
    model.set_training(false);
    let [one, other] = twice(&model);
    assert_eq!(one, other, "and off afterwards");
}

#[test]
fn what_a_layer_is_given_wrongly_is_said_of_the_line_that_made_it() {
    let (layer, line) = (nn::Linear::new(7, 2, 1), line!());
    let message = layer.forward(&Tensor::ones(&[4, 3], DType::F32)).realize().expect_err("3 are not 7").to_string();
    assert!(
        message.starts_with("matmul: [4, 3] times [7, 2]: the left has 3 columns and the right 7 rows"),
        "{message}"
    );
    assert!(message.contains(&format!("modules/mod.rs:{line}:")), "{message}");
    // A class that there is not is found when it is computed, and still said of whoever asked.
    let logits = Tensor::ones(&[2, 3], DType::F32);
    let (loss, line) = (logits.cross_entropy(&Tensor::from_slice(&[0_i64, 7], &[2])), line!());
    let message = loss.item::<f32>().expect_err("there are three classes").to_string();
    assert!(
        message.contains("class 7, and there are 3") && message.contains(&format!("modules/mod.rs:{line}:")),
        "{message}"
    );
    assert_eq!(format!("{:?}", loss.item::<f32>().expect_err("the same")), message, "what a main prints is for people");
    let (x, y) = (logits.with_grad(), logits.with_grad());
    let message = grad(&x.square().sum(()), &[&x, &logits]).expect_err("the one without").to_string();
    assert!(message.contains("input 1 is nothing that gradients are asked for"), "{message}");
    assert!(grad(&x.square().sum(()), &[&y]).is_ok(), "it does not depend on it: zeros");
}

/// Errors of what is composed name what was asked for, also on the way back.
#[test]
fn a_loss_says_what_is_wrong_with_its_targets() {
    let logits = Variable::new(&Tensor::normal(&[2, 3], 1, DType::F32));
    for (class, expected) in [
        (-1_i64, "cross_entropy: class -1, and there are 3, from 0 on"),
        (3, "cross_entropy: class 3, and there are 3, from 0 on"),
        (-100, "cross_entropy: class -100, and there are 3, from 0 on"),
    ] {
        let targets = Tensor::from_slice(&[0, class], &[2]);
        let read = logits.get().cross_entropy(&targets).item::<f32>().expect_err("there is no such class");
        let back = logits.get().cross_entropy(&targets).backward().expect_err("nor on the way back");
        for message in [read.to_string(), back.to_string()] {
            assert!(message.contains(expected) && message.contains("tests/modules/mod.rs:"), "{message}");
        }
    }
    let table = Variable::new(&Tensor::normal(&[5, 2], 1, DType::F32));
    let chosen = table.get().embedding(&Tensor::from_slice(&[7_i64], &[1]));
    let message = chosen.sum(()).backward().expect_err("it has five rows").to_string();
    assert!(message.contains("embedding: row 7 of a table of 5 rows"), "{message}");

    let (column, row) = (Tensor::ones(&[4, 1], DType::F32), Tensor::ones(&[4], DType::F32));
    for (loss, name) in
        [(column.mse_loss(&row), "mse_loss"), (column.binary_cross_entropy(&row), "binary_cross_entropy")]
    {
        let message = loss.item::<f32>().expect_err("each would be compared with each").to_string();
        let expected = format!("{name}: [4, 1] is compared with targets of shape [4]; they must be the same");
        assert!(message.contains(&expected), "{message}");
    }
    let message = row.mse_loss(&row.cast(DType::F64)).item::<f32>().expect_err("of other types").to_string();
    assert!(message.contains("mse_loss: operands are f32 and f64"), "{message}");
}

#[test]
fn what_is_not_trained_is_left_alone() {
    let model = nn::Sequential::new().then(nn::Linear::new(4, 4, 1)).then(nn::Linear::new(4, 1, 2));
    let x = Tensor::normal(&[8, 4], 3, DType::F32);
    model.set_requires_grad(false);
    let message = model.forward(&x).mean(()).backward().expect_err("all of it is frozen").to_string();
    assert!(message.contains("nothing it depends on asks for gradients"), "{message}");
    model.set_requires_grad(true);
    model.forward(&x).mean(()).backward().unwrap();
    assert!(model.parameters().iter().all(|variable| variable.grad().is_some()));
    model.zero_grad();
    assert!(model.parameters().iter().all(|variable| variable.grad().is_none()));

    let (mut nothing, line) = (Sgd::new(&[], 0.1), line!() + 1);
    let message = nothing.step().expect_err("there is nothing to train").to_string();
    assert!(message.contains("step: there are no variables to train"), "{message}");
    assert!(message.contains(&format!("modules/mod.rs:{line}:")), "{message}");
}

/// What a norm is given has the size that it was made for: it is not broadcast, and no running mean takes another
/// shape.
#[test]
fn a_norm_is_given_what_it_was_made_for() {
    let (layer, rms, batch) = (nn::LayerNorm::new(5), nn::RmsNorm::new(1), nn::BatchNorm::new(1));
    let ones = |sizes: &[usize]| Tensor::ones(sizes, DType::F32);
    for (made, expected) in [
        (layer.forward(&ones(&[3, 1])), "layer_norm: shape [3, 1], and axis 1 of size 5"),
        (layer.forward(&ones(&[])), "layer_norm: shape [], and a last axis of size 5"),
        (rms.forward(&ones(&[3, 4])), "rms_norm: shape [3, 4], and axis 1 of size 1"),
        (batch.forward(&ones(&[3, 4])), "batch_norm: shape [3, 4], and axis 1 of size 1"),
        (batch.forward(&ones(&[3])), "batch_norm: shape [3], and axis 1 of size 1"),
        (batch.forward(&ones(&[1, 1])), "more than one element of each channel, while it is trained"),
        (batch.forward(&ones(&[2, 3]).matmul(&ones(&[2, 3]))), "matmul: "),
    ] {
        let message = made.realize().expect_err("it does not fit").to_string();
        assert!(message.contains(expected) && message.contains("modules/mod.rs:"), "{message}");
    }
    assert_eq!(&batch.running_mean.get().shape()[..], [1]);
    batch.forward(&ones(&[3, 1])).realize().unwrap();
    batch.set_training(false);
    batch.forward(&ones(&[1, 1])).realize().unwrap();
    let count: usize = 3;
    assert_eq!(Tensor::arange(0, count, 1, DType::I64).to_vec::<i64>().unwrap(), [0, 1, 2]);
}

#[test]
fn what_is_computed_with_a_loss_is_not_computed_again() {
    let w = Variable::new(&Tensor::normal(&[3, 3], 1, DType::F32));
    let logits = Tensor::normal(&[2, 3], 2, DType::F32).matmul(&w.get());
    logits.cross_entropy(&Tensor::from_slice(&[0_i64, 2], &[2])).backward_with(&[&logits]).unwrap();
    let before = plans_made();
    logits.to_vec::<f32>().unwrap();
    assert_eq!(plans_made(), before);
}

#[test]
fn gradients_of_gradients_are_checked_too() {
    let x = Tensor::normal(&[3, 2], 1, DType::F64);
    let penalty = |x: &[Tensor]| grad(&x[0].tanh().square().sum(()), &[&x[0]]).unwrap().remove(0).square();
    check_gradients(penalty, &[x]).unwrap();
}
