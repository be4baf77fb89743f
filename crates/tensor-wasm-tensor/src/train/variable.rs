//! What is trained: a tensor that is replaced by a better one, step by step.

use std::sync::Arc;

use parking_lot::RwLock;

use crate::error::Result;
use crate::tensor::Tensor;

/// A place for a tensor that gradients are asked for. Cloning it clones the handle: a model and its optimizer have the
/// same.
#[derive(Clone)]
pub struct Variable(Arc<RwLock<Tensor>>);

impl Variable {
    #[track_caller]
    pub fn new(value: &Tensor) -> Variable {
        Variable(Arc::new(RwLock::new(value.detach().with_grad())))
    }

    /// The tensor of this moment. Gradients that flow through it are found by [`Variable::grad`] until the next one.
    pub fn get(&self) -> Tensor {
        self.0.read().clone()
    }

    /// Replaces it. The gradient of the old one goes with it.
    #[track_caller]
    pub fn set(&self, value: &Tensor) {
        let new = value.detach().with_grad();
        *self.0.write() = new;
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
