//! Optimizers. A step is one plan over all variables: new values and new state are computed together. Learning rates
//! and counts of steps are parameters of that plan, so the second step finds it made.

use std::panic::Location;

use super::Variable;
use super::variable::HeldVariables;
use crate::autograd::no_grad;
use crate::error::{ErrorKind, Result, TensorError, asked_at, caller};
use crate::graph::Node;
use crate::tensor::Tensor;

/// Makes variables better, by their gradients.
pub trait Optimizer {
    /// One step. Variables without a gradient stay as they are; gradients are forgotten.
    #[track_caller]
    fn step(&mut self) -> Result<()>;

    /// One step where a single truth is so, and none where it is not: then everything stays as it is, but for the count
    /// of steps, by which [`Adam`] corrects its means. Where that is decided on a device, nobody waits for it.
    #[track_caller]
    fn step_if(&mut self, is_taken: &Tensor) -> Result<()>;

    /// What it makes better.
    fn variables(&self) -> &[Variable];

    /// Forgets the gradients of its variables without a step.
    fn zero_grad(&self) {
        self.variables().iter().for_each(Variable::zero_grad);
    }

    fn learning_rate(&self) -> f64;

    fn set_learning_rate(&mut self, rate: f64);

    /// What it remembers of each variable, by name and number, for [`Optimizer::load_state`].
    fn state(&self) -> Vec<(String, Tensor)>;

    /// Takes back what [`Optimizer::state`] gave.
    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()>;
}

/// Variables, and tensors that are remembered of each.
struct Memory {
    variables: Vec<Variable>,
    names: &'static [&'static str],
    /// For each variable, as many as there are names, once it was stepped.
    kept: Vec<Option<Vec<Tensor>>>,
    steps: i64,
    /// Whether the step that is being made is taken; always if nobody says.
    is_taken: Option<Tensor>,
}

impl Memory {
    fn new(variables: &[Variable], names: &'static [&'static str]) -> Memory {
        Memory { variables: variables.to_vec(), names, kept: vec![None; variables.len()], steps: 0, is_taken: None }
    }

    /// One step: `update` makes the new value and what is remembered from the old value, its gradient, and what was
    /// remembered.
    ///
    /// What is new takes the place of what is old where nobody else holds that: at ten million parameters a step is
    /// bound by memory, and memory that was just read is in a cache when it is written.
    #[track_caller]
    fn step(&mut self, update: impl Fn(&Tensor, &Tensor, &[Tensor]) -> (Tensor, Vec<Tensor>)) -> Result<()> {
        if self.variables.is_empty() {
            let why = "there are no variables to train; a module of your own names its layers and variables in parts()";
            let what = ErrorKind::BadArgument { why: why.to_owned() };
            return Err(TensorError::new("step", what, caller(Location::caller())));
        }
        let mut variables = HeldVariables::new(&self.variables);
        let mut given_up = Vec::new();
        for n in 0..self.variables.len() {
            let value = variables.tensor(n);
            if let Some(gradient) = value.grad().filter(|gradient| gradient.shape() != value.shape()) {
                let expected = format!("a gradient of shape {} for variable {n}", value.shape());
                let what = ErrorKind::WrongShape { found: gradient.shape().to_vec(), expected };
                return Err(TensorError::new("step", what, gradient.node.at));
            }
            // Before anything is made of them, which would refer to them.
            let old = self.kept[n].iter().flatten().chain([value]);
            given_up.extend(old.filter_map(|old| Node::sole_storage(&old.node)));
        }
        let mut made: Vec<(usize, Tensor, Vec<Tensor>)> = Vec::new();
        no_grad(|| {
            for n in 0..self.variables.len() {
                let value = variables.tensor(n);
                let Some(gradient) = value.grad() else { continue };
                let zeros = || self.names.iter().map(|_| Tensor::zeros(&value.shape(), value.dtype())).collect();
                let kept = self.kept[n].clone().unwrap_or_else(zeros);
                let (mut new, mut next) = update(&value.detach(), &gradient, &kept);
                if let Some(is_taken) = &self.is_taken {
                    new = is_taken.where_(&new, value.detach());
                    let both = next.iter().zip(&kept);
                    next = both.map(|(next, kept)| is_taken.where_(next, kept)).collect();
                }
                made.push((n, new, next));
            }
        });
        let all: Vec<&Tensor> = made.iter().flat_map(|(_, new, kept)| kept.iter().chain([new])).collect();
        Tensor::realize_over(&all, &given_up)?;
        for (n, new, kept) in made {
            variables.set(n, &new);
            self.kept[n] = Some(kept);
        }
        Ok(())
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        let mut all = vec![("steps".to_owned(), Tensor::scalar(self.steps, crate::dtype::DType::I64))];
        for (n, kept) in self.kept.iter().enumerate() {
            for (name, tensor) in self.names.iter().zip(kept.iter().flatten()) {
                all.push((format!("{n}.{name}"), tensor.clone()));
            }
        }
        all
    }

    #[track_caller]
    fn load(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let at = Location::caller();
        let wrong = |why: String| Err(TensorError::new("load_state", ErrorKind::BadArgument { why }, at));
        let find = |name: &str| state.iter().find(|(own, _)| own == name).map(|(_, tensor)| tensor);
        let Some(steps) = find("steps") else { return wrong("there is no \"steps\"".to_owned()) };
        let steps = steps.item::<i64>()?;
        let mut all = Vec::new();
        for (n, variable) in self.variables.iter().enumerate() {
            let found: Option<Vec<Tensor>> =
                self.names.iter().map(|name| find(&format!("{n}.{name}")).cloned()).collect();
            let shape = variable.get().shape();
            if let Some(other) = found.iter().flatten().find(|tensor| tensor.shape() != shape) {
                return wrong(format!(
                    "variable {n} has shape {shape}, and what is remembered of it {}",
                    other.shape()
                ));
            }
            all.push(found.filter(|found| !found.is_empty()));
        }
        (self.kept, self.steps) = (all, steps);
        Ok(())
    }
}

/// What all optimizers do alike.
macro_rules! optimizer {
    ($name:ident, $step:expr) => {
        impl Optimizer for $name {
            #[track_caller]
            fn step(&mut self) -> Result<()> {
                let step: fn(&mut $name) -> Result<()> = $step;
                self.memory.steps += 1;
                // A step that failed was none.
                asked_at(Location::caller(), || step(self)).inspect_err(|_| self.memory.steps -= 1)
            }

            #[track_caller]
            fn step_if(&mut self, is_taken: &Tensor) -> Result<()> {
                self.memory.is_taken = Some(is_taken.clone());
                let stepped = self.step();
                self.memory.is_taken = None;
                stepped
            }

            fn variables(&self) -> &[Variable] {
                &self.memory.variables
            }

            fn learning_rate(&self) -> f64 {
                self.learning_rate
            }

            fn set_learning_rate(&mut self, rate: f64) {
                self.learning_rate = rate;
            }

            fn state(&self) -> Vec<(String, Tensor)> {
                self.memory.state()
            }

            #[track_caller]
            fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()> {
                self.memory.load(state)
            }
        }
    };
}

/// Against the gradient, with momentum if asked for.
pub struct Sgd {
    pub learning_rate: f64,
    pub momentum: f64,
    pub nesterov: bool,
    /// Added to the gradient, as a part of the value.
    pub weight_decay: f64,
    memory: Memory,
}

impl Sgd {
    pub fn new(variables: &[Variable], learning_rate: f64) -> Sgd {
        Sgd { learning_rate, momentum: 0.0, nesterov: false, weight_decay: 0.0, memory: Memory::new(variables, &[]) }
    }

    pub fn with_momentum(variables: &[Variable], learning_rate: f64, momentum: f64, nesterov: bool) -> Sgd {
        let memory = Memory::new(variables, &["velocity"]);
        Sgd { learning_rate, momentum, nesterov, weight_decay: 0.0, memory }
    }
}

/// The gradient, and a part of the value if weights are to decay.
fn decayed(gradient: &Tensor, value: &Tensor, decay: f64) -> Tensor {
    if decay == 0.0 { gradient.clone() } else { gradient + value * decay }
}

optimizer!(Sgd, |own| {
    let Sgd { learning_rate: rate, momentum, nesterov, weight_decay, .. } = *own;
    own.memory.step(|value, gradient, kept| {
        let gradient = decayed(gradient, value, weight_decay);
        let Some(velocity) = kept.first() else { return (value - gradient * rate, Vec::new()) };
        let velocity = settled(&(velocity * momentum + &gradient));
        let direction = if nesterov { gradient + &velocity * momentum } else { velocity.clone() };
        (value - direction * rate, vec![velocity])
    })
});

/// Means of gradients and of their squares, corrected for their beginning.
pub struct Adam {
    pub learning_rate: f64,
    pub betas: (f64, f64),
    pub epsilon: f64,
    /// Added to the gradient, as a part of the value.
    pub weight_decay: f64,
    memory: Memory,
}

impl Adam {
    pub fn new(variables: &[Variable], learning_rate: f64) -> Adam {
        let memory = Memory::new(variables, &["mean", "square"]);
        Adam { learning_rate, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.0, memory }
    }
}

/// A running mean, or about zero where it is too small to matter. The mean of what has no gradient any more shrinks
/// until it is subnormal, and stays there; arithmetic on such numbers is slow. The example `mlp` had 4,770 of them
/// after 3,700 steps, and made 400 steps a second where it now makes 750.
fn settled(mean: &Tensor) -> Tensor {
    // Beside this, nothing below the smallest normal number is left; a root of it is far below any epsilon.
    const LOST: f64 = 1e-30;
    mean + LOST - LOST
}

/// How Adam goes on.
struct AdamRates {
    rate: f64,
    betas: (f64, f64),
    epsilon: f64,
    steps: i64,
}

/// The new means, and how far they go.
fn adam(gradient: &Tensor, kept: &[Tensor], rates: &AdamRates) -> (Tensor, Vec<Tensor>) {
    let AdamRates { rate, betas, epsilon, steps } = *rates;
    let power = i32::try_from(steps).unwrap_or(i32::MAX);
    let mean = settled(&(&kept[0] * betas.0 + gradient * (1.0 - betas.0)));
    let square = settled(&(&kept[1] * betas.1 + gradient * gradient * (1.0 - betas.1)));
    // Both means are too small in the beginning; what makes up for it is one number for each.
    let root = square.sqrt() * (1.0 / (1.0 - betas.1.powi(power)).sqrt()) + epsilon;
    (&mean * (rate / (1.0 - betas.0.powi(power))) / root, vec![mean, square])
}

optimizer!(Adam, |own| {
    let Adam { learning_rate: rate, betas, epsilon, weight_decay, .. } = *own;
    let rates = AdamRates { rate, betas, epsilon, steps: own.memory.steps };
    own.memory.step(|value, gradient, kept| {
        let (way, kept) = adam(&decayed(gradient, value, weight_decay), kept, &rates);
        (value - way, kept)
    })
});

/// [`Adam`], with weights that decay by themselves.
pub struct AdamW {
    pub learning_rate: f64,
    pub betas: (f64, f64),
    pub epsilon: f64,
    pub weight_decay: f64,
    memory: Memory,
}

impl AdamW {
    pub fn new(variables: &[Variable], learning_rate: f64) -> AdamW {
        let memory = Memory::new(variables, &["mean", "square"]);
        AdamW { learning_rate, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.01, memory }
    }
}

optimizer!(AdamW, |own| {
    let AdamW { learning_rate: rate, betas, epsilon, weight_decay, .. } = *own;
    let rates = AdamRates { rate, betas, epsilon, steps: own.memory.steps };
    own.memory.step(|value, gradient, kept| {
        let (way, kept) = adam(gradient, kept, &rates);
        (value * (1.0 - rate * weight_decay) - way, kept)
    })
});

/// By the root of the sum of all squares so far.
pub struct AdaGrad {
    pub learning_rate: f64,
    pub epsilon: f64,
    memory: Memory,
}

impl AdaGrad {
    pub fn new(variables: &[Variable], learning_rate: f64) -> AdaGrad {
        AdaGrad { learning_rate, epsilon: 1e-10, memory: Memory::new(variables, &["sum"]) }
    }
}

optimizer!(AdaGrad, |own| {
    let AdaGrad { learning_rate: rate, epsilon, .. } = *own;
    own.memory.step(|value, gradient, kept| {
        let sum = &kept[0] + gradient * gradient;
        (value - gradient * rate / (sum.sqrt() + epsilon), vec![sum])
    })
});

/// By the root of a running mean of squares.
pub struct RmsProp {
    pub learning_rate: f64,
    pub alpha: f64,
    pub epsilon: f64,
    memory: Memory,
}

impl RmsProp {
    pub fn new(variables: &[Variable], learning_rate: f64) -> RmsProp {
        RmsProp { learning_rate, alpha: 0.99, epsilon: 1e-8, memory: Memory::new(variables, &["square"]) }
    }
}

optimizer!(RmsProp, |own| {
    let RmsProp { learning_rate: rate, alpha, epsilon, .. } = *own;
    own.memory.step(|value, gradient, kept| {
        let square = settled(&(&kept[0] * alpha + gradient * gradient * (1.0 - alpha)));
        (value - gradient * rate / (square.sqrt() + epsilon), vec![square])
    })
});

/// Makes all gradients together no longer than `most`. Returns how long they were.
pub fn clip_grad_norm(variables: &[Variable], most: f64) -> Result<f64> {
    let tensors: Vec<Tensor> = variables.iter().map(Variable::get).filter(|tensor| tensor.grad().is_some()).collect();
    let squares = tensors.iter().filter_map(Tensor::grad).map(|gradient| gradient.square().sum(()));
    let squares: Vec<Tensor> = squares.collect();
    Tensor::realize_all(&squares.iter().collect::<Vec<_>>())?;
    let mut sum = 0.0;
    for square in &squares {
        sum += square.to_f64()?.iter().sum::<f64>();
    }
    let norm = sum.sqrt();
    // By one where they are short enough: otherwise there would be two graphs, and two plans.
    let by = (most / norm).min(1.0);
    tensors.iter().for_each(|tensor| tensor.set_grad(tensor.grad().map(|gradient| gradient * by)));
    Ok(norm)
}

/// Makes no element of a gradient larger than `most`.
pub fn clip_grad_value(variables: &[Variable], most: f64) {
    for tensor in variables.iter().map(Variable::get) {
        tensor.set_grad(tensor.grad().map(|gradient| gradient.clip(-most, most)));
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::device::{Device, OwnDevice};
    use crate::dtype::DType;

    fn variable(count: usize, seed: u64) -> Variable {
        let tensor = Tensor::uniform(&[count], seed, DType::F32);
        tensor.realize().unwrap();
        Variable::new(&tensor)
    }

    /// Where the elements of a variable are.
    fn address(variable: &Variable) -> usize {
        variable.get().value().unwrap().storage.cpu().unwrap().as_ptr().addr()
    }

    fn step(optimizer: &mut dyn Optimizer, variable: &Variable, gradient: &Tensor) {
        variable.get().set_grad(Some(gradient.clone()));
        optimizer.step().unwrap();
    }

    #[test]
    fn a_step_takes_the_place_of_what_nobody_holds() {
        let _cpu = OwnDevice::set(&Device::Cpu);
        let (variable, gradient) = (variable(5000, 1), Tensor::uniform(&[5000], 2, DType::F32));
        gradient.realize().unwrap();
        let mut adam = Adam::new(std::slice::from_ref(&variable), 0.1);
        step(&mut adam, &variable, &gradient);
        let place = address(&variable);
        let mut plans = 0;
        for n in 0..4 {
            step(&mut adam, &variable, &gradient);
            assert_eq!(address(&variable), place, "nobody holds it");
            if n == 0 {
                plans = crate::plans_made();
            }
        }
        assert_eq!(crate::plans_made(), plans);
        let (held, state) = (variable.get(), adam.state());
        let before: Vec<Vec<f32>> = [&held, &state[1].1, &state[2].1].map(|held| held.to_vec().unwrap()).to_vec();
        step(&mut adam, &variable, &gradient);
        assert_ne!(address(&variable), place, "somebody holds it");
        let after: Vec<Vec<f32>> = [&held, &state[1].1, &state[2].1].map(|held| held.to_vec().unwrap()).to_vec();
        assert_eq!(before, after);
        drop((held, state));
        let place = address(&variable);
        step(&mut adam, &variable, &gradient);
        assert_eq!(address(&variable), place, "nobody holds it any more");
    }

    #[test]
    fn a_step_that_finds_no_memory_was_none() {
        let _cpu = OwnDevice::set(&Device::Cpu);
        // The second one is a number for all of its elements, until it is stepped.
        let many = crate::memory_limit() / 4 * 2;
        let variables = [variable(5000, 1), Variable::new(&Tensor::ones(&[many], DType::F32))];
        let before = variables[0].get().to_vec::<f32>().unwrap();
        let mut sgd = Sgd::new(&variables, 0.1);
        for variable in &variables {
            let value = variable.get();
            value.set_grad(Some(Tensor::ones(&value.shape(), DType::F32)));
        }
        let failed = sgd.step().expect_err("too much");
        assert!(matches!(*failed.what, ErrorKind::OutOfMemory { .. }), "{failed}");
        assert_eq!(variables[0].get().to_vec::<f32>().unwrap(), before);
    }

    /// What somebody may hold of a variable, with the elements that it has now.
    fn held(rng: &mut SmallRng, variable: &Variable, optimizer: &dyn Optimizer) -> Vec<(Tensor, Vec<f64>)> {
        let value = variable.get();
        let tensors: Vec<Tensor> = match rng.random_range(0..7) {
            0 => vec![value],
            1 => vec![value.slice(0, Some(3), Some(9), 2)],
            // Computed later, from what it was made of.
            2 => vec![value.detach() * 2.0 + 1.0],
            3 => vec![(&value * &value).sum(())],
            4 => optimizer.state().into_iter().skip(1).map(|(_, tensor)| tensor).collect(),
            _ => Vec::new(),
        };
        let same = |tensor: &Tensor| {
            // The elements, without computing it where that is what it is about.
            let value = variable.get().to_f64().unwrap();
            if tensor.requires_grad() && tensor.numel() == 1 {
                vec![value.iter().map(|x| x * x).sum()]
            } else if tensor.node.state.lock().value.is_none() && tensor.numel() == value.len() {
                let is_sum = !tensor.requires_grad();
                value.iter().map(|x| if is_sum { x * 2.0 + 1.0 } else { *x }).collect()
            } else {
                tensor.to_f64().unwrap()
            }
        };
        tensors.into_iter().map(|tensor| (tensor.clone(), same(&tensor))).collect()
    }

    #[test]
    fn what_somebody_holds_is_never_overwritten() {
        for seed in 0..120 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let count = [11, 64, 1000, 70_000][rng.random_range(0..4)];
            let make = |variables: &[Variable]| -> Box<dyn Optimizer> {
                match seed % 6 {
                    0 => Box::new(Sgd::new(variables, 0.1)),
                    1 => Box::new(Sgd::with_momentum(variables, 0.1, 0.9, true)),
                    2 => Box::new(Adam { weight_decay: 0.1, ..Adam::new(variables, 0.1) }),
                    3 => Box::new(AdamW::new(variables, 0.1)),
                    4 => Box::new(AdaGrad::new(variables, 0.1)),
                    _ => Box::new(RmsProp::new(variables, 0.1)),
                }
            };
            // The same twice: of the other one, everything is held.
            let (own, other) = (variable(count, seed), variable(count, seed));
            let (mut optimizer, mut twin) = (make(std::slice::from_ref(&own)), make(std::slice::from_ref(&other)));
            let (mut kept, mut all) = (Vec::new(), Vec::new());
            for n in 0..5 {
                let gradient = Tensor::normal(&[count], seed * 100 + n, DType::F32);
                kept.extend(held(&mut rng, &own, &*optimizer));
                all.push((other.get(), twin.state()));
                step(&mut *optimizer, &own, &gradient);
                step(&mut *twin, &other, &gradient);
                assert_eq!(own.get().to_vec::<f32>().unwrap(), other.get().to_vec::<f32>().unwrap(), "seed {seed}");
                if rng.random_bool(0.3) {
                    kept.clear();
                }
            }
            for (tensor, before) in &kept {
                let after = tensor.to_f64().unwrap();
                let is_same = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-4 * b.abs().max(1.0);
                assert!(after.iter().zip(before).all(is_same), "seed {seed}: {tensor:?}");
            }
        }
    }
}
