//! Modules that are made of others, and what is said about what they are given.

use tensor_wasm_tensor::nn::{self, Module};
use tensor_wasm_tensor::{DType, Tensor, grad};

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
        message.contains("index 7 of axis 1, which has 3") && message.contains(&format!("modules/mod.rs:{line}:")),
        "{message}"
    );
    assert_eq!(format!("{:?}", loss.item::<f32>().expect_err("the same")), message, "what a main prints is for people");
    let (x, y) = (logits.with_grad(), logits.with_grad());
    let message = grad(&x.square().sum(()), &[&x, &logits]).expect_err("the one without").to_string();
    assert!(message.contains("input 1 is nothing that gradients are asked for"), "{message}");
    assert!(grad(&x.square().sum(()), &[&y]).is_ok(), "it does not depend on it: zeros");
}
