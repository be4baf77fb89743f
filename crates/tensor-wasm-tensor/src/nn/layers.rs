//! The usual layers. What is wrong with what they are given is said of the line that made them, which says which one
//! it is.

use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Module, Parts};
use crate::autograd::no_grad;
use crate::dtype::DType;
use crate::error::{ErrorKind, asked_at, caller};
use crate::random;
use crate::tensor::{Caller, Convolution, Tensor};
use crate::train::Variable;

impl Tensor {
    /// Numbers spread evenly around zero, as wide as suits layers with rectifiers that have so many inputs.
    #[track_caller]
    pub fn kaiming(sizes: &[usize], inputs: usize, seed: u64, dtype: DType) -> Tensor {
        Tensor::around_zero(sizes, (6.0 / inputs.max(1) as f64).sqrt(), seed, dtype)
    }

    /// The same for layers whose functions are about straight near zero.
    #[track_caller]
    pub fn xavier(sizes: &[usize], inputs: usize, outputs: usize, seed: u64, dtype: DType) -> Tensor {
        Tensor::around_zero(sizes, (6.0 / (inputs + outputs).max(1) as f64).sqrt(), seed, dtype)
    }

    #[track_caller]
    fn around_zero(sizes: &[usize], bound: f64, seed: u64, dtype: DType) -> Tensor {
        (Tensor::uniform(sizes, seed, dtype) * 2.0 - 1.0) * bound
    }
}

fn named(name: &str, variable: &Variable) -> (String, Variable) {
    (name.to_owned(), variable.clone())
}

/// Says of a norm's input that an axis has not the size that the norm was made for. It would be broadcast otherwise,
/// and a single feature become as many as there are weights.
fn misfit(norm: &'static str, input: &Tensor, axis: Option<usize>, weight: &Tensor, made_at: Caller) -> Option<Tensor> {
    let size = weight.numel();
    input.check().ok()?;
    let found = axis.and_then(|axis| input.shape().get(axis).copied());
    if found == Some(size) || weight.check().is_err() {
        return None;
    }
    let axis = axis.map_or("a last axis".to_owned(), |axis| format!("axis {axis}"));
    let expected = format!("{axis} of size {size}, as this layer was made for,");
    let what = ErrorKind::WrongShape { found: input.shape().to_vec(), expected };
    Some(Tensor::failed(norm, what, caller(made_at)))
}

/// `x · weight + bias`; the weight is `[inputs, outputs]`.
pub struct Linear {
    pub weight: Variable,
    pub bias: Option<Variable>,
    made_at: Caller,
}

impl Linear {
    #[track_caller]
    pub fn new(inputs: usize, outputs: usize, seed: u64) -> Linear {
        let bound = 1.0 / (inputs.max(1) as f64).sqrt();
        let weight = Variable::new(&Tensor::around_zero(&[inputs, outputs], bound, seed, DType::F32));
        let bias = Tensor::around_zero(&[outputs], bound, random::split(seed, 1), DType::F32);
        Linear { weight, bias: Some(Variable::new(&bias)), made_at: Location::caller() }
    }

    #[track_caller]
    pub fn without_bias(inputs: usize, outputs: usize, seed: u64) -> Linear {
        Linear { bias: None, ..Linear::new(inputs, outputs, seed) }
    }
}

impl Module for Linear {
    fn forward(&self, input: &Tensor) -> Tensor {
        asked_at(self.made_at, || {
            let product = input.matmul(&self.weight.get());
            self.bias.as_ref().map_or_else(|| product.clone(), |bias| &product + bias.get())
        })
    }

    fn variables(&self) -> Vec<(String, Variable)> {
        let bias = self.bias.iter().map(|bias| named("bias", bias));
        [named("weight", &self.weight)].into_iter().chain(bias).collect()
    }
}

/// A convolution of images, and a bias for each filter.
pub struct Conv2d {
    pub weight: Variable,
    pub bias: Variable,
    pub options: Convolution,
    made_at: Caller,
}

impl Conv2d {
    /// Filters have as many rows as columns.
    #[track_caller]
    pub fn new(channels: usize, filters: usize, size: usize, options: Convolution, seed: u64) -> Conv2d {
        let depth = channels / options.groups.max(1);
        let bound = 1.0 / ((depth * size * size).max(1) as f64).sqrt();
        let weight = Tensor::around_zero(&[filters, depth, size, size], bound, seed, DType::F32);
        let bias = Tensor::around_zero(&[filters, 1, 1], bound, random::split(seed, 1), DType::F32);
        let made_at = Location::caller();
        Conv2d { weight: Variable::new(&weight), bias: Variable::new(&bias), options, made_at }
    }
}

impl Module for Conv2d {
    fn forward(&self, input: &Tensor) -> Tensor {
        asked_at(self.made_at, || input.conv2d(&self.weight.get(), self.options) + self.bias.get())
    }

    fn variables(&self) -> Vec<(String, Variable)> {
        vec![named("weight", &self.weight), named("bias", &self.bias)]
    }
}

/// Rows of a table.
pub struct Embedding {
    pub weight: Variable,
    made_at: Caller,
}

impl Embedding {
    #[track_caller]
    pub fn new(rows: usize, columns: usize, seed: u64) -> Embedding {
        let weight = Variable::new(&Tensor::normal(&[rows, columns], seed, DType::F32));
        Embedding { weight, made_at: Location::caller() }
    }
}

impl Module for Embedding {
    /// The input is indices.
    fn forward(&self, input: &Tensor) -> Tensor {
        asked_at(self.made_at, || self.weight.get().embedding(input))
    }

    fn variables(&self) -> Vec<(String, Variable)> {
        vec![named("weight", &self.weight)]
    }
}

/// Norms along the last axis, with a scale and a shift.
pub struct LayerNorm {
    pub weight: Variable,
    pub bias: Variable,
    pub epsilon: f64,
    made_at: Caller,
}

impl LayerNorm {
    #[track_caller]
    pub fn new(size: usize) -> LayerNorm {
        let (weight, bias) = (Tensor::ones(&[size], DType::F32), Tensor::zeros(&[size], DType::F32));
        let (weight, bias) = (Variable::new(&weight), Variable::new(&bias));
        LayerNorm { weight, bias, epsilon: 1e-5, made_at: Location::caller() }
    }
}

impl Module for LayerNorm {
    fn forward(&self, input: &Tensor) -> Tensor {
        let weight = self.weight.get();
        let last = input.rank().checked_sub(1);
        misfit("layer_norm", input, last, &weight, self.made_at)
            .unwrap_or_else(|| asked_at(self.made_at, || input.layer_norm(-1, self.epsilon) * weight + self.bias.get()))
    }

    fn variables(&self) -> Vec<(String, Variable)> {
        vec![named("weight", &self.weight), named("bias", &self.bias)]
    }
}

/// The same by the mean square alone.
pub struct RmsNorm {
    pub weight: Variable,
    pub epsilon: f64,
    made_at: Caller,
}

impl RmsNorm {
    #[track_caller]
    pub fn new(size: usize) -> RmsNorm {
        let weight = Variable::new(&Tensor::ones(&[size], DType::F32));
        RmsNorm { weight, epsilon: 1e-6, made_at: Location::caller() }
    }
}

impl Module for RmsNorm {
    fn forward(&self, input: &Tensor) -> Tensor {
        let weight = self.weight.get();
        let last = input.rank().checked_sub(1);
        misfit("rms_norm", input, last, &weight, self.made_at)
            .unwrap_or_else(|| asked_at(self.made_at, || input.rms_norm(-1, self.epsilon) * weight))
    }

    fn variables(&self) -> Vec<(String, Variable)> {
        vec![named("weight", &self.weight)]
    }
}

/// Norms of each channel of `[batch, channels, …]`: by the batch while it is trained, by running means afterwards.
pub struct BatchNorm {
    pub weight: Variable,
    pub bias: Variable,
    pub running_mean: Variable,
    made_at: Caller,
    pub running_variance: Variable,
    pub momentum: f64,
    pub epsilon: f64,
    is_training: AtomicBool,
}

impl BatchNorm {
    #[track_caller]
    pub fn new(channels: usize) -> BatchNorm {
        let of = |value: i64| Variable::new(&Tensor::full(&[channels], value, DType::F32));
        let (momentum, epsilon, is_training) = (0.1, 1e-5, AtomicBool::new(true));
        let (running_mean, running_variance) = (of(0), of(1));
        let (weight, bias, made_at) = (of(1), of(0), Location::caller());
        BatchNorm { weight, bias, running_mean, running_variance, momentum, epsilon, is_training, made_at }
    }
}

impl Module for BatchNorm {
    fn forward(&self, input: &Tensor) -> Tensor {
        let (weight, bias) = (self.weight.get(), self.bias.get());
        if let Some(failed) = misfit("batch_norm", input, Some(1), &weight, self.made_at) {
            return failed;
        }
        if !self.is_training.load(Ordering::Relaxed) {
            let (mean, variance) = (self.running_mean.get().detach(), self.running_variance.get().detach());
            return asked_at(self.made_at, || input.batch_norm(&mean, &variance, &weight, &bias, self.epsilon));
        }
        let axes: Vec<isize> = (0..input.rank()).filter(|axis| *axis != 1).map(usize::cast_signed).collect();
        let (mean, variance) = (input.mean(&axes[..]), input.var(&axes[..], 0));
        let channels = input.shape().get(1).copied().unwrap_or(1).max(1);
        let count = (input.numel() / channels) as f64;
        // Its variance is zero, and so is what comes of it: that teaches nothing, and spoils the running one.
        if input.numel() == channels && input.check().is_ok() {
            let expected = "more than one element of each channel, while it is trained,".to_owned();
            let what = ErrorKind::WrongShape { found: input.shape().to_vec(), expected };
            return Tensor::failed("batch_norm", what, caller(self.made_at));
        }
        no_grad(|| {
            let blend = |old: &Variable, new: &Tensor, by: f64| {
                old.get().detach() * (1.0 - self.momentum) + new.detach() * (self.momentum * by)
            };
            let mean = blend(&self.running_mean, &mean, 1.0);
            // The estimate that is right on average.
            let variance = blend(&self.running_variance, &variance, count / (count - 1.0).max(1.0));
            // Computed now, or each step would hold the graph of all steps before.
            if Tensor::realize_all(&[&mean, &variance]).is_ok() {
                self.running_mean.set(&mean);
                self.running_variance.set(&variance);
            }
        });
        asked_at(self.made_at, || input.batch_norm(&mean, &variance, &weight, &bias, self.epsilon))
    }

    fn variables(&self) -> Vec<(String, Variable)> {
        vec![named("weight", &self.weight), named("bias", &self.bias)]
    }

    fn buffers(&self) -> Vec<(String, Variable)> {
        vec![named("running_mean", &self.running_mean), named("running_var", &self.running_variance)]
    }

    fn set_training(&self, is_training: bool) {
        self.is_training.store(is_training, Ordering::Relaxed);
    }
}

/// Sets elements to zero by chance while it is trained.
pub struct Dropout {
    probability: f64,
    seed: u64,
    calls: AtomicU64,
    is_training: AtomicBool,
}

impl Dropout {
    pub fn new(probability: f64, seed: u64) -> Dropout {
        Dropout { probability, seed, calls: AtomicU64::new(0), is_training: AtomicBool::new(true) }
    }
}

impl Module for Dropout {
    fn forward(&self, input: &Tensor) -> Tensor {
        if !self.is_training.load(Ordering::Relaxed) {
            return input.clone();
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        input.dropout(self.probability, random::split(self.seed, call))
    }

    fn set_training(&self, is_training: bool) {
        self.is_training.store(is_training, Ordering::Relaxed);
    }
}

/// A function without variables, as a module.
struct Function<F>(F);

impl<F: Fn(&Tensor) -> Tensor + Send + Sync> Module for Function<F> {
    fn forward(&self, input: &Tensor) -> Tensor {
        (self.0)(input)
    }
}

/// A function without variables, as a module: `function(Tensor::relu)`.
pub fn function(f: impl Fn(&Tensor) -> Tensor + Send + Sync + 'static) -> impl Module {
    Function(f)
}

/// One module after the other; names begin with their numbers.
#[derive(Default)]
pub struct Sequential(Vec<Box<dyn Module>>);

impl Sequential {
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// With one more at the end.
    #[must_use]
    pub fn then(mut self, module: impl Module + 'static) -> Sequential {
        self.0.push(Box::new(module));
        self
    }
}

impl Module for Sequential {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.0.iter().fold(input.clone(), |value, module| module.forward(&value))
    }

    fn parts(&self) -> Parts<'_> {
        let modules = self.0.iter().enumerate();
        modules.fold(Parts::new(), |parts, (n, module)| parts.with(&n.to_string(), module.as_ref()))
    }
}
