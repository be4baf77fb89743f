//! Tensors: operations record what is to be computed, reading computes it, on the GPU if the function may use it and
//! there is one, and else on the CPU.
//!
//! ```no_run
//! use tensor_wasm_sdk::tensor::{Result, Tensor};
//!
//! fn probabilities(x: &[f32], w: &[f32], classes: usize) -> Result<Vec<f32>> {
//!     let x = Tensor::from_slice(x, &[1, x.len()]);
//!     let w = Tensor::from_slice(w, &[x.shape()?[1], classes]);
//!     x.matmul(&w).softmax(-1).to_vec()
//! }
//! ```
//!
//! Building an expression does not fail: an operation that makes no sense makes a tensor that holds the error, and
//! whoever reads something that depends on it gets that error.

mod argument;
mod element;
mod error;
mod operations;

use std::fmt;
use std::rc::Rc;

pub use self::argument::{Argument, Value, named};
pub use self::element::{DType, Element};
pub use self::error::Error;
pub use self::operations::Operand;
use crate::{DeviceKind, Pollable};

#[allow(unsafe_code, clippy::all, reason = "generated")]
mod bindings {
    wit_bindgen::generate!({
        path: "../wit/tensor",
        world: "imports",
        with: { "wasi:io/poll@0.2.12": wasip2::io::poll },
    });
}

use bindings::tensor_wasm::tensor::tensors as raw;

pub type Result<T> = std::result::Result<T, Error>;

/// What is read at once: a host bounds what it hands out in one call.
const PIECE_BYTES: u64 = 16 << 20;

/// Elements of one type in a shape. Cloning it clones the handle.
#[derive(Clone)]
pub struct Tensor(Rc<Result<raw::Tensor>>);

impl Tensor {
    fn of(made: std::result::Result<raw::Tensor, raw::Error>) -> Tensor {
        Tensor(Rc::new(made.map_err(Error::from)))
    }

    fn holding(error: Error) -> Tensor {
        Tensor(Rc::new(Err(error)))
    }

    /// The host's handle, or the error that it holds.
    fn raw(&self) -> Result<&raw::Tensor> {
        self.0.as_ref().as_ref().map_err(Clone::clone)
    }

    /// Copies elements, which are in row-major order.
    pub fn from_slice<T: Element>(elements: &[T], shape: &[usize]) -> Tensor {
        Tensor::from_bytes(&T::to_bytes(elements), shape, T::DTYPE)
    }

    /// The same of elements that Rust has no type for, as the bytes they are, little endian.
    pub fn from_bytes(bytes: &[u8], shape: &[usize], dtype: DType) -> Tensor {
        let shape: Vec<u64> = shape.iter().map(|size| *size as u64).collect();
        Tensor::of(raw::Tensor::from_bytes(bytes, &shape, dtype.raw()))
    }

    /// The error of an operation that made no sense, if it is the result of one.
    pub fn check(&self) -> Result<()> {
        self.raw().map(drop)
    }

    pub fn shape(&self) -> Result<Vec<usize>> {
        Ok(self.raw()?.shape().into_iter().map(|size| size as usize).collect())
    }

    pub fn dtype(&self) -> Result<DType> {
        Ok(DType::of(self.raw()?.dtype()))
    }

    /// Computes it now, with everything it needs.
    pub fn realize(&self) -> Result<()> {
        Ok(self.raw()?.realize()?)
    }

    /// The bytes of its elements in row-major order.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let raw = self.raw()?;
        let count: u64 = raw.shape().iter().product();
        let bytes = count * self.dtype()?.size() as u64;
        let mut all = raw.read(0, bytes.min(PIECE_BYTES))?;
        while (all.len() as u64) < bytes {
            let left = bytes - all.len() as u64;
            all.extend(raw.read(all.len() as u64, left.min(PIECE_BYTES))?);
        }
        Ok(all)
    }

    /// All elements in row-major order.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let raw = self.raw()?;
        let piece = |first: usize| {
            T::of(raw.elements(first as u64)?).ok_or_else(|| {
                let dtype = DType::of(raw.dtype());
                Error::Invalid(format!("elements are {dtype:?}, and {:?} was asked for; cast first", T::DTYPE))
            })
        };
        let at_once = PIECE_BYTES as usize / T::DTYPE.size();
        let mut all = piece(0)?;
        // Whoever hands out all that it may at once has more, or an end there.
        let mut last = all.len();
        while last == at_once {
            let more = piece(all.len())?;
            last = more.len();
            all.extend(more);
        }
        Ok(all)
    }

    /// The only element.
    pub fn item<T: Element>(&self) -> Result<T> {
        match self.to_vec::<T>()?[..] {
            [one] => Ok(one),
            _ => Err(Error::Invalid(format!("a tensor of shape {:?} is not a single number", self.shape()?))),
        }
    }

    /// The same elements, as something that gradients are asked for.
    pub fn with_grad(&self) -> Tensor {
        match self.raw() {
            Ok(raw) => Tensor::of(raw.with_grad()),
            Err(error) => Tensor::holding(error),
        }
    }

    /// An operation of the table in `docs/TENSORS.md` by its name, with this tensor as the first argument:
    /// `x.apply("cumsum", &[named("axis", 1)])`.
    pub fn apply(&self, operation: &str, arguments: &[Argument<'_>]) -> Tensor {
        let own = [Argument::from(self)];
        apply_chained(operation, own.iter().chain(arguments))
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.raw() {
            Ok(raw) => write!(f, "Tensor({:?} of {:?})", raw.shape(), DType::of(raw.dtype())),
            Err(error) => write!(f, "Tensor({error})"),
        }
    }
}

/// An operation of the table by its name: `apply("linspace", &[0.0.into(), 1.0.into(), named("count", 5)])`.
pub fn apply(operation: &str, arguments: &[Argument<'_>]) -> Tensor {
    apply_chained(operation, arguments.iter())
}

fn apply_chained<'a>(operation: &str, arguments: impl Iterator<Item = &'a Argument<'a>>) -> Tensor {
    let arguments: Result<Vec<raw::Argument<'_>>> = arguments.map(Argument::raw).collect();
    match arguments {
        Ok(arguments) => Tensor::of(raw::apply(operation, &arguments)),
        Err(error) => Tensor::holding(error),
    }
}

/// A whole expression, as one would write it in Python: `evaluate("softmax(x @ w + b)[:, 0]", &[("x", &x), …])`.
pub fn evaluate(expression: &str, names: &[(&str, &Tensor)]) -> Tensor {
    let held: Result<Vec<(String, &raw::Tensor)>> =
        names.iter().map(|(name, tensor)| Ok(((*name).to_owned(), tensor.raw()?))).collect();
    match held {
        Ok(names) => Tensor::of(raw::evaluate(expression, &names)),
        Err(error) => Tensor::holding(error),
    }
}

/// The gradients of a single number with respect to tensors that [`Tensor::with_grad`] made.
pub fn gradient(of: &Tensor, with_respect_to: &[&Tensor]) -> Result<Vec<Tensor>> {
    let inputs: Vec<&raw::Tensor> = with_respect_to.iter().map(|tensor| tensor.raw()).collect::<Result<_>>()?;
    let gradients = raw::gradient(of.raw()?, &inputs)?;
    Ok(gradients.into_iter().map(|gradient| Tensor::of(Ok(gradient))).collect())
}

/// Begins to compute tensors, all in one plan: what they share is computed once.
pub fn compute(tensors: &[&Tensor]) -> Result<Computation> {
    let tensors: Vec<&raw::Tensor> = tensors.iter().map(|tensor| tensor.raw()).collect::<Result<_>>()?;
    Ok(Computation { raw: raw::compute(&tensors)? })
}

/// Tensors that are being computed. Dropping it does not stop that.
#[derive(Debug)]
#[must_use = "how a computation ended is learned by waiting for it"]
pub struct Computation {
    raw: raw::Computation,
}

impl Computation {
    /// Waits for the end and says how it ended.
    pub fn wait(&self) -> Result<()> {
        Ok(self.raw.wait()?)
    }

    /// Becomes ready at the end.
    pub fn pollable(&self) -> Pollable {
        self.raw.subscribe()
    }
}

/// The tensors of a safetensors file, by name.
pub fn load_safetensors(bytes: &[u8]) -> Result<Vec<(String, Tensor)>> {
    let tensors = raw::load_safetensors(bytes)?;
    Ok(tensors.into_iter().map(|(name, tensor)| (name, Tensor::of(Ok(tensor)))).collect())
}

/// A model of the host's, which the function was deployed with permission to open.
#[derive(Debug)]
pub struct Model {
    raw: raw::Model,
}

impl Model {
    pub fn open(name: &str) -> Result<Model> {
        Ok(Model { raw: raw::Model::open(name)? })
    }

    pub fn names(&self) -> Vec<String> {
        self.raw.names()
    }

    /// One of its tensors.
    pub fn get(&self, name: &str) -> Tensor {
        Tensor::of(self.raw.get(name))
    }
}

/// What tensors are computed on.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    pub kind: DeviceKind,
    pub name: String,
    /// What the tenant's tensors may have of its memory, and what they have.
    pub memory_bytes_max: u64,
    pub memory_bytes_used: u64,
}

pub fn device() -> Result<DeviceInfo> {
    let raw::DeviceInfo { kind, name, memory_bytes_max, memory_bytes_used } = raw::device()?;
    let kind = match kind {
        raw::DeviceKind::Cpu => DeviceKind::Cpu,
        raw::DeviceKind::Cuda => DeviceKind::Cuda,
    };
    Ok(DeviceInfo { kind, name, memory_bytes_max, memory_bytes_used })
}
