//! Modules: functions of tensors with variables of their own, which have names.

mod cache;
mod layers;
mod recurrent;
mod schedule;

use std::panic::Location;

pub use cache::KvCache;
pub use layers::{BatchNorm, Conv2d, Dropout, Embedding, LayerNorm, Linear, RmsNorm, Sequential, function};
pub use recurrent::{Gru, Lstm};
pub use schedule::Schedule;

use crate::error::{ErrorKind, Result, TensorError};
use crate::tensor::Tensor;
use crate::train::Variable;

/// A function of a tensor.
pub trait Module: Send + Sync {
    fn forward(&self, input: &Tensor) -> Tensor;

    /// The modules that it is made of, by name. What they have is its own: a module that is made of others needs no
    /// more than this.
    fn parts(&self) -> Parts<'_> {
        Parts::new()
    }

    /// What is trained, by names that say where it is: `0.weight`. Those of its parts, unless it says otherwise.
    fn variables(&self) -> Vec<(String, Variable)> {
        let of = |(name, part)| match part {
            Part::Module(module) => below(name, module.variables()),
            Part::Variable(variable) => vec![(name, variable.clone())],
        };
        self.parts().0.into_iter().flat_map(of).collect()
    }

    /// What is not trained and still belongs to it: running means. Those of its parts, unless it says otherwise.
    fn buffers(&self) -> Vec<(String, Variable)> {
        self.parts().modules().flat_map(|(name, module)| below(name, module.buffers())).collect()
    }

    /// Whether it is being trained: some modules do something else then. Its parts are told, unless it says otherwise.
    fn set_training(&self, is_training: bool) {
        self.parts().modules().for_each(|(_, module)| module.set_training(is_training));
    }

    /// What optimizers take.
    fn parameters(&self) -> Vec<Variable> {
        self.variables().into_iter().map(|(_, variable)| variable).collect()
    }

    /// Forgets the gradients of its variables: those that no optimizer used stay until somebody does.
    fn zero_grad(&self) {
        self.parameters().iter().for_each(Variable::zero_grad);
    }

    /// Whether it is trained, as it is at first: see [`Variable::set_requires_grad`].
    fn set_requires_grad(&self, asks: bool) {
        self.parameters().iter().for_each(|variable| variable.set_requires_grad(asks));
    }

    /// Everything that makes it what it is, by name.
    fn state_dict(&self) -> Vec<(String, Tensor)> {
        let all = self.variables().into_iter().chain(self.buffers());
        all.map(|(name, variable)| (name, variable.get().detach())).collect()
    }

    /// Takes over what another one's [`Module::state_dict`] gave. Nothing changes unless everything fits.
    #[track_caller]
    fn load_state_dict(&self, state: &[(String, Tensor)]) -> Result<()> {
        let at = Location::caller();
        let own: Vec<(String, Variable)> = self.variables().into_iter().chain(self.buffers()).collect();
        let wrong = |why: String| TensorError::new("load_state_dict", ErrorKind::BadArgument { why }, at);
        let mut found = Vec::new();
        for (name, variable) in &own {
            let Some((_, tensor)) = state.iter().find(|(other, _)| other == name) else {
                return Err(wrong(format!("there is no {name:?}")));
            };
            let known = variable.get();
            if (tensor.shape(), tensor.dtype()) != (known.shape(), known.dtype()) {
                let (shape, dtype) = (known.shape(), known.dtype());
                let why =
                    format!("{name:?} is {shape} of {dtype}, and {} of {} is given", tensor.shape(), tensor.dtype());
                return Err(wrong(why));
            }
            found.push((variable, tensor));
        }
        if let Some((name, _)) = state.iter().find(|(name, _)| own.iter().all(|(other, _)| other != name)) {
            return Err(wrong(format!("nothing here is called {name:?}")));
        }
        found.into_iter().for_each(|(variable, tensor)| variable.set(tensor));
        Ok(())
    }
}

/// The modules that one is made of, and variables of its own, by name.
#[derive(Default)]
pub struct Parts<'m>(Vec<(String, Part<'m>)>);

enum Part<'m> {
    Module(&'m dyn Module),
    Variable(&'m Variable),
}

impl<'m> Parts<'m> {
    pub fn new() -> Parts<'m> {
        Parts::default()
    }

    /// With one more.
    #[must_use]
    pub fn with(mut self, name: &str, module: &'m dyn Module) -> Parts<'m> {
        self.0.push((name.to_owned(), Part::Module(module)));
        self
    }

    /// With some more, whose names end with their numbers: `block.0`.
    #[must_use]
    pub fn with_each<M: Module>(mut self, name: &str, modules: &'m [M]) -> Parts<'m> {
        let numbered = modules.iter().enumerate().map(|(n, module)| (format!("{name}.{n}"), Part::Module(module)));
        self.0.extend(numbered);
        self
    }

    /// With a variable that is none of its modules'.
    #[must_use]
    pub fn with_variable(mut self, name: &str, variable: &'m Variable) -> Parts<'m> {
        self.0.push((name.to_owned(), Part::Variable(variable)));
        self
    }

    fn modules(self) -> impl Iterator<Item = (String, &'m dyn Module)> {
        self.0.into_iter().filter_map(|(name, part)| match part {
            Part::Module(module) => Some((name, module)),
            Part::Variable(_) => None,
        })
    }
}

/// Names that say which part they are of: `up.weight`.
fn below(part: String, own: Vec<(String, Variable)>) -> Vec<(String, Variable)> {
    own.into_iter().map(move |(own, variable)| (format!("{part}.{own}"), variable)).collect()
}

/// What hooks of a module see: what went in, and what came out.
type ForwardHook = Box<dyn Fn(&Tensor, &Tensor) + Send + Sync>;

/// What hooks see of a gradient.
type BackwardHook = std::sync::Arc<dyn Fn(&Tensor) + Send + Sync>;

/// A module with hooks: they see each call of it, and each gradient of what it returned.
pub struct Hooked<M> {
    module: M,
    forward: Vec<ForwardHook>,
    backward: Vec<BackwardHook>,
}

impl<M: Module> Hooked<M> {
    pub fn new(module: M) -> Hooked<M> {
        Hooked { module, forward: Vec::new(), backward: Vec::new() }
    }

    /// Called once in each [`Module::forward`], after it.
    #[must_use]
    pub fn on_forward(mut self, hook: impl Fn(&Tensor, &Tensor) + Send + Sync + 'static) -> Hooked<M> {
        self.forward.push(Box::new(hook));
        self
    }

    /// Called each time going backwards has the gradient of a result.
    #[must_use]
    pub fn on_backward(mut self, hook: impl Fn(&Tensor) + Send + Sync + 'static) -> Hooked<M> {
        self.backward.push(std::sync::Arc::new(hook));
        self
    }
}

impl<M: Module> Module for Hooked<M> {
    fn forward(&self, input: &Tensor) -> Tensor {
        let output = self.module.forward(input);
        self.forward.iter().for_each(|hook| hook(input, &output));
        for hook in self.backward.iter().cloned() {
            output.register_hook(move |gradient| {
                hook(gradient);
                None
            });
        }
        output
    }

    fn parts(&self) -> Parts<'_> {
        self.module.parts()
    }

    fn variables(&self) -> Vec<(String, Variable)> {
        self.module.variables()
    }

    fn buffers(&self) -> Vec<(String, Variable)> {
        self.module.buffers()
    }

    fn set_training(&self, is_training: bool) {
        self.module.set_training(is_training);
    }
}
