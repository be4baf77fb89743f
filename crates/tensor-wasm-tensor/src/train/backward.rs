//! Going backwards: the gradients of a number, added to what variables have already. Hooks see gradients on the way.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::autograd;
use crate::error::{ErrorKind, Result, TensorError};
use crate::graph::Node;
use crate::tensor::Tensor;

/// What a hook does with a gradient: another one in its place, or nothing.
pub(super) type Hook = Arc<dyn Fn(&Tensor) -> Option<Tensor> + Send + Sync>;

/// What a node keeps for gradients, if it keeps anything.
#[derive(Default)]
pub(crate) struct Gradients {
    /// The sum of the gradients so far, of what gradients are asked for.
    sum: Mutex<Option<Tensor>>,
    hooks: Mutex<Vec<(u64, Hook)>>,
}

/// Names a hook, so that it can be taken away again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HookId(u64);

impl HookId {
    pub(super) fn new() -> HookId {
        static HOOKS: AtomicU64 = AtomicU64::new(0);
        HookId(HOOKS.fetch_add(1, Ordering::Relaxed))
    }
}

/// Has a node's hooks see its gradient, in the order they were added; what one returns is what the next one sees.
pub(crate) fn fire(node: &Node, gradient: Tensor) -> Tensor {
    let Some(gradients) = node.gradients.get() else { return gradient };
    let hooks: Vec<Hook> = gradients.hooks.lock().iter().map(|(_, hook)| hook.clone()).collect();
    hooks.into_iter().fold(gradient, |gradient, hook| hook(&gradient).unwrap_or(gradient))
}

impl Tensor {
    /// Computes a single number and its gradients with respect to everything that asks for them, in one plan, and adds
    /// them to what is there. The graph is freed: what was computed keeps its value, but not how.
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.backward_with(&[])
    }

    /// The same, and other tensors in the same plan: what is computed on the way to the number, such as the logits
    /// that a loss is made of, and would be computed again by whoever reads it later.
    #[track_caller]
    pub fn backward_with(&self, others: &[&Tensor]) -> Result<()> {
        let at = Location::caller();
        self.check()?;
        if self.node.requires_grad && self.node.state.lock().recipe.is_none() {
            return Err(TensorError::new("backward", ErrorKind::GraphFreed, at));
        }
        let gradients = autograd::NodeGradients::of(autograd::reachable(&self.node));
        let gradients = gradients.of_number(self, "backward", at)?;
        let asked = gradients.nodes().iter().filter(|node| node.is_asked());
        let asked: Vec<Tensor> = asked.map(|node| Tensor { node: node.clone() }).collect();
        let new = gradients.found(&asked.iter().collect::<Vec<_>>(), "backward", at)?;
        let new: Vec<Tensor> = new.iter().map(Tensor::detach).collect();
        let known: Vec<Option<Tensor>> = asked.iter().map(Tensor::grad).collect();
        let add = |known: Option<&Tensor>, new: &Tensor| {
            autograd::no_grad(|| known.map_or_else(|| new.clone(), |known| known + new))
        };
        let sums: Vec<Tensor> = known.iter().zip(&new).map(|(known, new)| add(known.as_ref(), new)).collect();
        let all: Vec<&Tensor> = sums.iter().chain([self]).chain(others.iter().copied()).collect();
        Tensor::realize_all(&all)?;
        for ((asked, sum), (known, new)) in asked.iter().zip(sums).zip(known.iter().zip(&new)) {
            let Some(gradients) = asked.node.gradients.get() else { continue };
            let mut kept = gradients.sum.lock();
            // Another thread may have added its own meanwhile.
            let id = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.node.id);
            *kept = Some(if id(&kept) == id(known) { sum } else { add(kept.as_ref(), new) });
        }
        // What nobody else holds goes with the recipes that referred to it.
        for node in gradients.nodes().iter().filter(|node| !node.is_asked()) {
            let mut state = node.state.lock();
            let gone = if state.value.is_some() { state.recipe.take() } else { None };
            drop(state);
            drop(gone);
        }
        Ok(())
    }

    /// The sum of the gradients that going backwards found, if it did.
    pub fn grad(&self) -> Option<Tensor> {
        self.node.gradients.get()?.sum.lock().clone()
    }

    /// Forgets the gradients.
    pub fn zero_grad(&self) {
        self.set_grad(None);
    }

    /// Puts another gradient in the place of what was found.
    pub fn set_grad(&self, gradient: Option<Tensor>) {
        if let Some(gradients) = self.node.gradients.get() {
            *gradients.sum.lock() = gradient;
        }
    }

    /// Calls `hook` each time going backwards has the whole gradient of this tensor: once, before it is used any
    /// further. What the hook returns takes its place.
    ///
    /// A hook belongs to this tensor. One that stays with what is trained is [`Variable::register_hook`]'s.
    ///
    /// [`Variable::register_hook`]: crate::Variable::register_hook
    pub fn register_hook(&self, hook: impl Fn(&Tensor) -> Option<Tensor> + Send + Sync + 'static) -> HookId {
        let id = HookId::new();
        self.add_hook(id, Arc::new(hook));
        id
    }

    pub(super) fn add_hook(&self, id: HookId, hook: Hook) {
        self.node.gradients.get_or_init(Arc::default).hooks.lock().push((id.0, hook));
    }

    pub fn remove_hook(&self, id: HookId) {
        if let Some(gradients) = self.node.gradients.get() {
            gradients.hooks.lock().retain(|(own, _)| *own != id.0);
        }
    }
}
