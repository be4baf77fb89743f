//! Models that functions open by name. A model is the host's: it was added once, nobody can change it, and it is read
//! once and shared by every instance that opens it. Here is what functions see of that; who keeps the files and reads
//! them implements [`Models`]. Not to be confused with tensors that a function loads from bytes of its own
//! (`guest/tensor`), which are charged to its tenant.
//!
//! A function opens only models that its settings name ([`crate::catalog::Settings::models`]); that is asked before
//! [`Models::open`] is called.

use std::collections::BTreeMap;

use tensor_wasm_tensor::Tensor;

/// A model as it lies in memory: tensors by name. Elements never change, so that instances share them.
#[derive(Debug, Default)]
pub struct LoadedModel {
    pub name: String,
    pub tensors: BTreeMap<String, Tensor>,
}

/// Why a model is not opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    #[error("the tenant has no model {name:?}; add one with: tensor-wasm model add {name} FILE.safetensors")]
    NoSuchModel { name: String },
    /// The file is not what was added, or lies about what is in it.
    #[error("model {name:?} cannot be used: {why}")]
    Damaged { name: String, why: String },
    /// A limit, named with what was asked for and what is allowed.
    #[error("model {name:?} is not loaded: {why}")]
    TooLarge { name: String, why: String },
}

/// The models of a server.
pub trait Models: Send + Sync {
    /// A tenant's model, read now or shared with whoever has it open. It may read a file: call it where blocking is
    /// allowed.
    fn open(&self, tenant: &str, name: &str) -> Result<std::sync::Arc<LoadedModel>, ModelError>;
}
