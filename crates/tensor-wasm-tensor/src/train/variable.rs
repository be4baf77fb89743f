//! What is trained: a tensor that is replaced by a better one, step by step.

use std::sync::Arc;

use parking_lot::{RwLock, RwLockWriteGuard};

use super::backward::{Hook, HookId};
use crate::error::Result;
use crate::tensor::Tensor;

/// A place for a tensor that gradients are asked for. Cloning it clones the handle: a model and its optimizer have the
/// same.
#[derive(Clone)]
pub struct Variable(Arc<RwLock<Trained>>);

struct Trained {
    tensor: Tensor,
    /// What each tensor gets that takes the place of another.
    hooks: Vec<(HookId, Hook)>,
}

impl Trained {
    #[track_caller]
    fn set(&mut self, value: &Tensor) {
        let new = value.detach().with_grad();
        self.hooks.iter().for_each(|(id, hook)| new.add_hook(*id, hook.clone()));
        self.tensor = new;
    }
}

/// Variables that nobody else can look at or replace meanwhile. Each of them is held once, however often it is listed.
pub(super) struct HeldVariables<'v> {
    held: Vec<RwLockWriteGuard<'v, Trained>>,
    /// Which of those each of the list is.
    of: Vec<usize>,
}

impl<'v> HeldVariables<'v> {
    pub(super) fn new(variables: &'v [Variable]) -> HeldVariables<'v> {
        let address = |n: &usize| Arc::as_ptr(&variables[*n].0).addr();
        let mut order: Vec<usize> = (0..variables.len()).collect();
        // In one order everywhere: two optimizers that have some of them in common never wait for each other.
        order.sort_by_key(address);
        let (mut held, mut of) = (Vec::with_capacity(order.len()), vec![0; order.len()]);
        for (at, n) in order.iter().enumerate() {
            if at == 0 || !variables[*n].is(&variables[order[at - 1]]) {
                held.push(variables[*n].0.write());
            }
            of[*n] = held.len() - 1;
        }
        HeldVariables { held, of }
    }

    pub(super) fn tensor(&self, variable: usize) -> &Tensor {
        &self.held[self.of[variable]].tensor
    }

    #[track_caller]
    pub(super) fn set(&mut self, variable: usize, value: &Tensor) {
        self.held[self.of[variable]].set(value);
    }
}

impl Variable {
    #[track_caller]
    pub fn new(value: &Tensor) -> Variable {
        Variable(Arc::new(RwLock::new(Trained { tensor: value.detach().with_grad(), hooks: Vec::new() })))
    }

    /// The tensor of this moment. Gradients that flow through it are found by [`Variable::grad`] until the next one.
    pub fn get(&self) -> Tensor {
        self.0.read().tensor.clone()
    }

    /// Replaces it. The gradient of the old one goes with it; hooks of the variable stay.
    #[track_caller]
    pub fn set(&self, value: &Tensor) {
        self.0.write().set(value);
    }

    /// As [`Tensor::register_hook`], for the tensor of this moment and for all that come after it.
    pub fn register_hook(&self, hook: impl Fn(&Tensor) -> Option<Tensor> + Send + Sync + 'static) -> HookId {
        let (id, hook): (HookId, Hook) = (HookId::new(), Arc::new(hook));
        let mut trained = self.0.write();
        trained.tensor.add_hook(id, hook.clone());
        trained.hooks.push((id, hook));
        id
    }

    pub fn remove_hook(&self, id: HookId) {
        let mut trained = self.0.write();
        trained.tensor.remove_hook(id);
        trained.hooks.retain(|(own, _)| *own != id);
    }

    pub fn grad(&self) -> Option<Tensor> {
        self.get().grad()
    }

    pub fn zero_grad(&self) {
        self.get().zero_grad();
    }

    pub fn realize(&self) -> Result<()> {
        self.get().realize()
    }

    /// Whether two handles are of the same variable.
    pub fn is(&self, other: &Variable) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::dtype::DType;
    use crate::train::{Optimizer, Sgd};

    #[test]
    fn hooks_of_a_variable_stay_when_a_step_replaces_its_tensor() {
        let variable = Variable::new(&Tensor::ones(&[2], DType::F32));
        let (on_variable, on_tensor) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let count = |counter: &Arc<AtomicUsize>| {
            let counter = counter.clone();
            move |_: &Tensor| {
                counter.fetch_add(1, Ordering::Relaxed);
                None
            }
        };
        let id = variable.register_hook(count(&on_variable));
        variable.get().register_hook(count(&on_tensor));
        let mut optimizer = Sgd::new(std::slice::from_ref(&variable), 0.1);
        for step in 0..4 {
            if step == 3 {
                variable.remove_hook(id);
            }
            variable.get().square().sum(()).backward().unwrap();
            optimizer.step().unwrap();
        }
        assert_eq!((on_variable.load(Ordering::Relaxed), on_tensor.load(Ordering::Relaxed)), (3, 1));
    }
}
