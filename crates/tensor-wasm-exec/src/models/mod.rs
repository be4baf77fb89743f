//! Models that functions open by name. A model is the host's: it was added once, nobody can change it, and it is read
//! once and shared by every instance that opens it. Here is what functions see of that; `store.rs` adds, checks and
//! removes them, `cache.rs` reads them and keeps what is used. Not to be confused with tensors that a function loads
//! from bytes of its own (`guest/tensor`), which are charged to its tenant.
//!
//! A function opens only models that its settings name ([`crate::catalog::Settings::models`]); that is asked before
//! [`Models::open`] is called.

mod cache;
mod store;

use std::collections::BTreeMap;
use std::sync::Arc;

use tensor_wasm_tensor::{ErrorKind, Tensor, TensorError};

pub(crate) use self::cache::ModelCache;
use self::cache::ModelUse;
pub(crate) use self::store::INSPECTIONS_MAX;

/// Bytes of a model's header, which is parsed in memory at about ten times its size. Some 30,000 tensors: a language
/// model of 70 billion parameters has 723.
const HEADER_BYTES_MAX: usize = 4 << 20;

/// One opening of a model. Tensors share the model's memory, which stays charged as loaded until this is dropped: keep
/// it as long as any tensor of it.
#[derive(Debug)]
pub struct LoadedModel {
    pub name: String,
    /// By name. Elements never change, so that instances share them.
    pub tensors: Arc<BTreeMap<String, Tensor>>,
    _use: Option<ModelUse>,
}

impl LoadedModel {
    /// A model that is nobody's but the caller's.
    pub fn new(name: impl Into<String>, tensors: BTreeMap<String, Tensor>) -> LoadedModel {
        LoadedModel { name: name.into(), tensors: Arc::new(tensors), _use: None }
    }
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
    fn open(&self, tenant: &str, name: &str) -> Result<Arc<LoadedModel>, ModelError>;
}

/// What the tensor library says of a file, without the line of ours that asked it.
fn complaint(error: &TensorError) -> String {
    match &*error.what {
        ErrorKind::File { why, .. } => why.clone(),
        other => other.to_string(),
    }
}
