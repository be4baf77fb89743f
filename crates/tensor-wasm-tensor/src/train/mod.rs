//! Training: variables, going backwards, hooks, and optimizers.

mod backward;
mod check;
mod optim;
mod scaler;
mod variable;

pub use backward::HookId;
pub(crate) use backward::{Gradients, fire};
pub use check::check_gradients;
pub use optim::{AdaGrad, Adam, AdamW, Optimizer, RmsProp, Sgd, clip_grad_norm, clip_grad_value};
pub use scaler::GradScaler;
pub use variable::Variable;
