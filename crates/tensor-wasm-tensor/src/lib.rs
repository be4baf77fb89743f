//! Tensors: lazy, fused, differentiable. An operation makes a node of a graph; reading a value computes what it needs
//! in as few passes over memory as possible.
//!
//! ```
//! use tensor_wasm_tensor::{DType, Tensor};
//!
//! let x = Tensor::arange(0, 6, 1, DType::F32).reshape(&[2, 3]);
//! let y = (&x * 2.0 + 1.0).softmax(-1);
//! assert_eq!(y.shape()[..], [2, 3]);
//! assert!((y.sum(()).item::<f32>()? - 2.0).abs() < 1e-6);
//! # Ok::<(), tensor_wasm_tensor::TensorError>(())
//! ```
//!
//! Building an expression cannot fail: an operation that makes no sense makes a tensor that holds the error, and
//! reading anything that depends on it says what was wrong, with which shapes, and in which line.

mod account;
#[cfg(feature = "cuda")]
mod auto;
mod autograd;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod dtype;
mod error;
pub mod expression;
mod graph;
#[cfg(feature = "io")]
pub mod io;
pub mod nn;
pub mod operations;
mod precision;
mod random;
#[cfg(test)]
mod reference;
mod schedule;
mod shape;
mod tensor;
mod train;

pub use account::{Account, AccountLimits, PlanNeed, Supervisor, charged_to, supervised};
pub use autograd::{grad, no_grad};
pub use cpu::{memory_limit, set_memory_limit, set_threads, threads, used_bytes};
#[cfg(feature = "cuda")]
pub use cuda::execute::{graphs_made, graphs_replayed, round_trips};
#[cfg(feature = "cuda")]
pub use cuda::{CudaDevice, set_tf32};
pub use device::{Device, device, set_device, with_device};
pub use dtype::{DType, Element, Scalar};
pub use error::{ErrorKind, Result, TensorError};
pub use precision::autocast;
pub use schedule::{ExplainedKernel, Explanation, Mode, plans_made};
pub use shape::{RANK_MAX, Shape};
#[cfg(feature = "cuda")]
pub use tensor::TensorRead;
pub use tensor::{Axes, Convolution, Operand, Tensor, Window};
pub use train::{
    AdaGrad, Adam, AdamW, GradScaler, HookId, Optimizer, RmsProp, Sgd, Variable, check_gradients, clip_grad_norm,
    clip_grad_value,
};

/// The blocks of the guide are compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/TENSORS.md")]
struct Guide;
