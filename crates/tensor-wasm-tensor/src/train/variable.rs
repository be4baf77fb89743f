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
    /// Whether gradients are asked for.
    asks: bool,
    /// What each tensor gets that takes the place of another.
    hooks: Vec<(HookId, Hook)>,
}

impl Trained {
    #[track_caller]
    fn set(&mut self, value: &Tensor) {
        self.tensor = value.detach();
        if self.asks {
            self.tensor = self.tensor.with_grad();
            self.hooks.iter().for_each(|(id, hook)| self.tensor.add_hook(*id, hook.clone()));
        }
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
    /// The value is computed here. As a graph it would be computed again by every plan that reads the variable, until a
    /// step replaces it: two layers of 512² that nobody trained took 8 ms to make their weights in each call, and
    /// 0.1 ms to use them.
    #[track_caller]
    pub fn new(value: &Tensor) -> Variable {
        let value = value.detach();
        // Whoever reads the variable hears why it cannot be computed.
        let _ = value.realize();
        Variable(Arc::new(RwLock::new(Trained { tensor: value.with_grad(), asks: true, hooks: Vec::new() })))
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

    /// Whether gradients are asked for, as they are at first. A variable that is frozen is a constant: nothing is
    /// computed for its gradient, and optimizers leave it as it is.
    pub fn set_requires_grad(&self, asks: bool) {
        let mut trained = self.0.write();
        if trained.asks != asks {
            trained.asks = asks;
            let value = trained.tensor.clone();
            trained.set(&value);
        }
    }

    pub fn requires_grad(&self) -> bool {
        self.0.read().asks
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

    #[test]
    fn a_new_variable_is_computed_once() {
        let layer = Variable::new(&Tensor::normal(&[8, 8], 1, DType::F32));
        let used = layer.get() * 2.0;
        let explained = used.explain().unwrap();
        assert!(!explained.to_string().contains("random"), "{explained}");
    }

    #[test]
    fn a_frozen_variable_is_a_constant_until_it_is_thawed() {
        let [frozen, trained] = [2.0, 3.0].map(|value| Variable::new(&Tensor::scalar(value, DType::F32)));
        let mut optimizer = Sgd::new(&[frozen.clone(), trained.clone()], 0.1);
        let mut step = || {
            (frozen.get() * trained.get()).backward().unwrap();
            let has_gradient = frozen.grad().is_some();
            optimizer.step().unwrap();
            (has_gradient, frozen.get().item::<f32>().unwrap())
        };
        frozen.set_requires_grad(false);
        assert_eq!(step(), (false, 2.0));
        frozen.set_requires_grad(true);
        assert_eq!(step(), (true, 2.0 - 0.1 * 2.8));
    }
}
