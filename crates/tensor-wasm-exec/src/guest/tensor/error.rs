//! What a guest is told when tensors are not what it asked for. A bug of ours is not the guest's to handle: it ends the
//! call.

use tensor_wasm_tensor::{ErrorKind, TensorError};

use super::component::Error;
use crate::failure::Bug;
use crate::models::ModelError;

/// An error of the guest's to handle, or one that ends it.
#[derive(Debug, Clone)]
pub(super) enum TensorFailure {
    Guest(Error),
    Bug(Bug),
}

impl TensorFailure {
    pub(super) fn invalid(why: impl Into<String>) -> TensorFailure {
        TensorFailure::Guest(Error::Invalid(why.into()))
    }

    pub(super) fn too_many(why: impl Into<String>) -> TensorFailure {
        TensorFailure::Guest(Error::TooMany(why.into()))
    }

    pub(super) fn denied(why: impl Into<String>) -> TensorFailure {
        TensorFailure::Guest(Error::Denied(why.into()))
    }

    /// A task of ours that did not come to its end.
    pub(super) fn ended(error: &tokio::task::JoinError) -> TensorFailure {
        if error.is_cancelled() {
            let why = "it was stopped when the call that began it ended".to_owned();
            return TensorFailure::Guest(Error::Deadline(why));
        }
        TensorFailure::Bug(Bug(format!("computing tensors: {error}")))
    }

    /// The guest's error, or the bug that ends its call.
    pub(super) fn answer(self) -> wasmtime::Result<Error> {
        match self {
            TensorFailure::Guest(error) => Ok(error),
            TensorFailure::Bug(bug) => Err(wasmtime::Error::new(bug)),
        }
    }
}

impl From<TensorError> for TensorFailure {
    /// Without the line that asked for it, which is one of ours.
    fn from(TensorError { operation, what, .. }: TensorError) -> TensorFailure {
        let named = |limit: &str| format!("{operation}: {what} ([limits] {limit})");
        let plain = format!("{operation}: {what}");
        TensorFailure::Guest(match &*what {
            ErrorKind::Bug { why } => return TensorFailure::Bug(Bug(format!("tensors: {why}"))),
            // Nobody is in a hurry but who can ask again.
            ErrorKind::WouldWait => return TensorFailure::Bug(Bug(format!("tensors: {plain}"))),
            ErrorKind::OverBudget { .. } => Error::OutOfMemory(named("tensor_memory_bytes_max")),
            ErrorKind::OutOfMemory { bytes } => {
                let why = format!("{operation}: {bytes} bytes of memory are needed, which the tenant's limit does not");
                Error::OutOfMemory(format!(
                    "{why} leave or the server does not have ([limits] tensor_memory_bytes_max)"
                ))
            }
            ErrorKind::DeviceMemory { .. } => Error::OutOfMemory(named("gpu_memory_bytes_max")),
            ErrorKind::TooManyNodes { .. } => Error::TooMany(named("tensor_nodes_max")),
            ErrorKind::TooManyElements { .. } => Error::Invalid(named("tensor_elements_max")),
            ErrorKind::NoTime { .. } => Error::Deadline(plain),
            ErrorKind::Stopped => Error::Deadline(format!("{operation}: it was stopped at the call's deadline")),
            ErrorKind::DeviceLost { .. } => Error::DeviceLost(plain),
            // The device is there, and did not do it.
            ErrorKind::Device { .. } | ErrorKind::NoDevice { .. } => Error::Failed(plain),
            ErrorKind::OutOfRange { .. } | ErrorKind::DivisionByZero | ErrorKind::WrongGradient { .. } => {
                Error::Failed(plain)
            }
            ErrorKind::NoBroadcast { .. }
            | ErrorKind::NoSuchAxis { .. }
            | ErrorKind::AxisTwice { .. }
            | ErrorKind::MixedDTypes { .. }
            | ErrorKind::WrongDType { .. }
            | ErrorKind::Reshape { .. }
            | ErrorKind::TooLarge { .. }
            | ErrorKind::WrongShape { .. }
            | ErrorKind::BadArgument { .. }
            | ErrorKind::NotScalar { .. }
            | ErrorKind::GraphFreed
            | ErrorKind::NoGradient
            | ErrorKind::NotAsked { .. }
            | ErrorKind::ElementType { .. }
            | ErrorKind::File { .. } => Error::Invalid(plain),
        })
    }
}

impl From<ModelError> for TensorFailure {
    fn from(error: ModelError) -> TensorFailure {
        let text = error.to_string();
        TensorFailure::Guest(match error {
            ModelError::NoSuchModel { .. } | ModelError::Damaged { .. } => Error::NoSuchModel(text),
            ModelError::TooLarge { .. } => Error::OutOfMemory(text),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::panic::Location;
    use std::sync::Arc;

    use tensor_wasm_tensor::{Account, AccountLimits, DType, Tensor, charged_to};

    use super::*;

    fn told(tensor: &Tensor) -> Error {
        let error = tensor.realize().unwrap_err();
        TensorFailure::from(error).answer().unwrap()
    }

    #[test]
    fn limits_are_named_and_our_own_files_are_not() {
        let limits = AccountLimits { bytes_max: 100, nodes_max: 8, elements_max: 1000 };
        let account = Account::new(limits);
        charged_to(&account, || {
            let memory = told(&Tensor::ones(&[100], DType::F32));
            let named = |text: &str, what: &str| text.contains(what) && !text.contains(".rs:");
            assert!(
                matches!(&memory, Error::OutOfMemory(text) if named(text, "tensor_memory_bytes_max")),
                "{memory:?}"
            );
            let elements = told(&Tensor::ones(&[1001], DType::F32));
            assert!(matches!(&elements, Error::Invalid(text) if named(text, "tensor_elements_max")), "{elements:?}");
            let deep = (0..10).fold(Tensor::ones(&[1], DType::F32), |x, _| x.exp());
            let nodes = told(&deep);
            assert!(matches!(&nodes, Error::TooMany(text) if named(text, "tensor_nodes_max")), "{nodes:?}");
        });
        let shapes = told(&(Tensor::ones(&[2], DType::F32) + Tensor::ones(&[3], DType::F32)));
        assert!(matches!(&shapes, Error::Invalid(text) if text.contains("[2] and [3]")), "{shapes:?}");
        let of_device =
            |what| TensorFailure::from(TensorError { operation: "add", what: Arc::new(what), at: Location::caller() });
        let why = || "gone".to_owned();
        let lost = of_device(ErrorKind::DeviceLost { why: why() }).answer().unwrap();
        assert!(matches!(&lost, Error::DeviceLost(text) if text == "add: the device was lost: gone"), "{lost:?}");
        let refused = of_device(ErrorKind::Device { why: why() }).answer().unwrap();
        assert!(matches!(&refused, Error::Failed(text) if text == "add: the device: gone"), "{refused:?}");
        let short = ErrorKind::DeviceMemory { bytes: 5, used: 2, limit: 4, free: 9 };
        let short = of_device(short).answer().unwrap();
        let has_all = |text: &str| {
            ["5 bytes", "2 of 4 are used", "9 free", "gpu_memory_bytes_max"].iter().all(|part| text.contains(part))
        };
        assert!(matches!(&short, Error::OutOfMemory(text) if has_all(text)), "{short:?}");
        let divided = told(&(Tensor::ones(&[2], DType::I64) / Tensor::zeros(&[2], DType::I64)));
        assert!(matches!(&divided, Error::Failed(_)), "{divided:?}");
    }
}
