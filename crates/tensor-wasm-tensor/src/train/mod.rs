//! Training: variables, going backwards, hooks, and optimizers.

mod backward;
mod optim;
mod variable;

pub use backward::HookId;
pub(crate) use backward::{Gradients, fire};
pub use optim::{AdaGrad, Adam, AdamW, Optimizer, RmsProp, Sgd, clip_grad_norm, clip_grad_value};
pub use variable::Variable;
