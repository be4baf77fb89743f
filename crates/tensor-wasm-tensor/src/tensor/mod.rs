//! The tensor that users hold: a handle to a node. Making one costs an allocation; computing happens when somebody
//! reads.

mod compose;
mod create;
mod display;
#[cfg(feature = "ndarray")]
mod ndarray;
mod neural;
mod operators;
mod primitive;
mod views;

#[cfg(any(feature = "io", feature = "cuda"))]
use std::ops::Range;
use std::panic::Location;
#[cfg(feature = "cuda")]
use std::pin::Pin;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::task::{Context, Poll};

pub use self::neural::{Convolution, Window};
pub use self::operators::Operand;
pub use self::views::Axes;
#[cfg(any(feature = "io", feature = "cuda"))]
use crate::cpu::memory::CpuBuffer;
use crate::cpu::{memory_limit, used_bytes};
#[cfg(feature = "cuda")]
use crate::cuda::CudaRead;
use crate::device::{Device, with_device};
use crate::dtype::{DType, Element};
use crate::error::{ErrorKind, Result, TensorError};
use crate::graph::op::Op;
use crate::graph::{Inputs, Node, Storage, Value};
use crate::schedule::{self, Explanation, Mode};
use crate::shape::{Layout, Shape};

/// Elements of one type in a shape, computed when they are read. Cloning it clones the handle.
#[derive(Clone)]
pub struct Tensor {
    pub(crate) node: Arc<Node>,
}

/// Where a user called.
pub(crate) type Caller = &'static Location<'static>;

impl Tensor {
    pub fn shape(&self) -> Shape {
        self.node.shape
    }

    pub fn rank(&self) -> usize {
        self.node.shape.rank()
    }

    pub fn numel(&self) -> usize {
        self.node.shape.numel()
    }

    pub fn dtype(&self) -> DType {
        self.node.dtype
    }

    /// Whether gradients flow through it.
    pub fn requires_grad(&self) -> bool {
        self.node.requires_grad
    }

    /// The error of an operation that made no sense, if it is the result of one.
    pub fn check(&self) -> Result<()> {
        if !self.node.is_failed {
            return Ok(());
        }
        let state = self.node.state.lock();
        match &state.recipe {
            Some(recipe) => match &recipe.op {
                Op::Failed(error) => Err(error.clone()),
                _ => Ok(()),
            },
            None => Ok(()),
        }
    }

    pub(crate) fn failed(operation: &'static str, what: ErrorKind, at: Caller) -> Tensor {
        Tensor::holding(TensorError::new(operation, what, at))
    }

    /// A tensor of no shape that holds an error.
    pub(crate) fn holding(error: TensorError) -> Tensor {
        let at = error.at;
        Tensor { node: Node::new(Op::Failed(error), Inputs::new(), Shape::SCALAR, DType::F32, false, at) }
    }

    /// Computes it now, with everything it needs.
    pub fn realize(&self) -> Result<()> {
        schedule::realize(std::slice::from_ref(&self.node), Mode::Fused)
    }

    /// Computes several at once: what they share is computed once.
    pub fn realize_all(tensors: &[&Tensor]) -> Result<()> {
        Tensor::realize_in(tensors, Mode::Fused)
    }

    /// The same, fused or one operation after the other.
    pub fn realize_in(tensors: &[&Tensor], mode: Mode) -> Result<()> {
        let nodes: Vec<Arc<Node>> = tensors.iter().map(|tensor| tensor.node.clone()).collect();
        schedule::realize(&nodes, mode)
    }

    /// The same, where results may take the place of what is given up.
    pub(crate) fn realize_over(tensors: &[&Tensor], given_up: &[Arc<Storage>]) -> Result<()> {
        let nodes: Vec<Arc<Node>> = tensors.iter().map(|tensor| tensor.node.clone()).collect();
        schedule::realize_over(&nodes, Mode::Fused, given_up)
    }

    /// What computing it amounts to: kernels, bytes, operations, and what was not fused, and why not.
    pub fn explain(&self) -> Result<Explanation> {
        schedule::explain(std::slice::from_ref(&self.node), Mode::Fused)
    }

    /// The same for several that are computed at once.
    pub fn explain_all(tensors: &[&Tensor]) -> Result<Explanation> {
        let nodes: Vec<Arc<Node>> = tensors.iter().map(|tensor| tensor.node.clone()).collect();
        schedule::explain(&nodes, Mode::Fused)
    }

    /// The same elements on a device, computed by now: what is made of them is computed there, unless another device
    /// was set. Gradients do not flow through it.
    #[track_caller]
    pub fn to(&self, device: &Device) -> Tensor {
        let at = Location::caller();
        let value = match with_device(device, || self.value()) {
            Ok(value) => value,
            Err(error) => return Tensor::holding(error),
        };
        let storage = match device {
            Device::Cpu => value.storage.cpu().map(|_| value.storage.clone()),
            // Where it is, there is nothing to choose.
            Device::Auto => Ok(value.storage.clone()),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => value.storage.cuda(device).map(|buffer| Arc::new(Storage::of_cuda(buffer))),
        };
        match storage {
            Ok(storage) => Tensor { node: Node::of_value(Value { storage, ..value }, self.dtype(), false, at) },
            Err(what) => Tensor::failed("to", what, at),
        }
    }

    pub(crate) fn value(&self) -> Result<Value> {
        if let Some(value) = &self.node.state.lock().value {
            return Ok(Value::clone(value));
        }
        self.realize()?;
        let value = self.node.state.lock().value.as_deref().cloned();
        value.ok_or_else(|| {
            TensorError::new("realize", ErrorKind::Bug { why: "nothing was computed".to_owned() }, self.node.at)
        })
    }

    /// All elements, in row-major order.
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let at = Location::caller();
        let value = self.value()?;
        if T::DTYPE != self.dtype() {
            let what = ErrorKind::ElementType { found: self.dtype(), asked: T::DTYPE };
            return Err(TensorError::new("to_vec", what, at));
        }
        let failed = |what: ErrorKind| TensorError::new("to_vec", what, at);
        #[cfg(feature = "cuda")]
        if value.layout.is_contiguous()
            && let Some(buffer) = value.storage.only_cuda()
        {
            crate::account::check_hurry().map_err(failed)?;
            // Straight into the vector: who has that will hardly ask again, so no copy is kept beside it.
            let count = self.numel();
            let begun = buffer.read_ahead(0..count * size_of::<T>()).map_err(failed)?;
            let mut all = self.collected(count, "to_vec", at, |_| ())?;
            CpuBuffer::fill_vec(&mut all, count, |bytes| buffer.read_begun(begun, bytes)).map_err(failed)?;
            return Ok(all);
        }
        let buffer = value.storage.cpu().map_err(failed)?;
        let elements = buffer.elements::<T>();
        if value.layout.is_contiguous()
            && let Some(own) = elements.get(..self.numel())
        {
            return self.collected(own.len(), "to_vec", at, |all| all.extend_from_slice(own));
        }
        self.collect(&value.layout, "to_vec", at, |position| elements[position])
    }

    /// Whether it is computed, and its elements are in row-major order in memory.
    pub fn is_contiguous(&self) -> bool {
        self.node.state.lock().value.as_ref().is_some_and(|value| value.layout.is_contiguous())
    }

    /// Some bytes of its elements, which are little endian and in row-major order.
    #[cfg(any(feature = "io", feature = "cuda"))]
    #[track_caller]
    pub fn to_bytes(&self, bytes: Range<usize>) -> Result<Vec<u8>> {
        let at = Location::caller();
        let value = self.value()?;
        if !value.layout.is_contiguous() {
            return self.contiguous().to_bytes(bytes);
        }
        let buffer = value.storage.cpu().map_err(|what| TensorError::new("to_bytes", what, at))?;
        let count = bytes.len();
        match self.own_bytes(buffer).and_then(|own| own.get(bytes.clone())) {
            Some(part) => self.collected(count, "to_bytes", at, |all| all.extend_from_slice(part)),
            None => {
                let has = self.numel() * self.dtype().size();
                let why = format!("bytes {} to {} of {has}", bytes.start, bytes.end);
                Err(TensorError::new("to_bytes", ErrorKind::BadArgument { why }, at))
            }
        }
    }

    /// The same without computing, copying or waiting: none where any of that has to be done first.
    #[cfg(any(feature = "io", feature = "cuda"))]
    pub fn try_bytes(&self, bytes: Range<usize>) -> Option<Vec<u8>> {
        let value = self.node.state.lock().value.clone().filter(|value| value.layout.is_contiguous())?;
        let part = self.own_bytes(value.storage.here()?)?.get(bytes)?;
        Some(part.to_vec())
    }

    /// Begins to read some bytes of a tensor that was computed on a GPU, as elements of its type or as bytes, without
    /// waiting. None if it was not computed, is not in row-major order there or lies elsewhere too, or if that has to
    /// wait. Nothing is kept of what is read. Whoever this thread works for is charged.
    #[cfg(feature = "cuda")]
    #[track_caller]
    pub fn begin_read<T: Element>(&self, bytes: Range<usize>) -> Result<Option<TensorRead<T>>> {
        let at = Location::caller();
        let value = self.node.state.lock().value.clone().filter(|value| value.layout.is_contiguous());
        let Some(buffer) = value.and_then(|value| value.storage.only_cuda()) else { return Ok(None) };
        let is_inside = bytes.start < bytes.end && bytes.end <= self.numel() * self.dtype().size();
        let is_whole = bytes.len().is_multiple_of(size_of::<T>());
        if !is_inside || !is_whole || (T::DTYPE != self.dtype() && T::DTYPE != DType::U8) || T::DTYPE == DType::Bool {
            return Ok(None);
        }
        let count = bytes.len() / size_of::<T>();
        let failed = |what: ErrorKind| TensorError::new("begin_read", what, at);
        let Some(read) = buffer.begin_read(bytes).map_err(failed)? else { return Ok(None) };
        // Written before they are read into, while the device is busy.
        let elements = self.collected(count, "begin_read", at, |all| all.resize(count, T::default()))?;
        Ok(Some(TensorRead { read, elements, at }))
    }

    /// A contiguous tensor's own part of a buffer, which may be larger.
    #[cfg(any(feature = "io", feature = "cuda"))]
    fn own_bytes<'b>(&self, buffer: &'b CpuBuffer) -> Option<&'b [u8]> {
        buffer.as_bytes().get(..self.numel() * self.dtype().size())
    }

    /// The elements at each position of a layout, if there is memory for them.
    fn collect<T>(
        &self,
        layout: &Layout,
        operation: &'static str,
        at: Caller,
        element: impl Fn(usize) -> T,
    ) -> Result<Vec<T>> {
        self.collected(self.numel(), operation, at, |all| {
            layout.for_each_position(|position| all.push(element(position)));
        })
    }

    /// Room for so many elements, filled.
    fn collected<T>(
        &self,
        count: usize,
        operation: &'static str,
        at: Caller,
        fill: impl FnOnce(&mut Vec<T>),
    ) -> Result<Vec<T>> {
        let mut all = Vec::new();
        let bytes = count.saturating_mul(size_of::<T>());
        // A system may promise more than it has.
        let is_beyond = used_bytes().saturating_add(bytes) > memory_limit();
        if is_beyond || all.try_reserve_exact(count).is_err() {
            return Err(TensorError::new(operation, ErrorKind::OutOfMemory { bytes }, at));
        }
        fill(&mut all);
        Ok(all)
    }

    /// All elements as double precision, whatever they are.
    #[track_caller]
    pub fn to_f64(&self) -> Result<Vec<f64>> {
        let at = Location::caller();
        let value = self.value()?;
        let buffer = value.storage.cpu().map_err(|what| TensorError::new("to_f64", what, at))?;
        self.collect(&value.layout, "to_f64", at, |position| buffer.at(self.dtype(), position).0)
    }

    /// The only element.
    #[track_caller]
    pub fn item<T: Element>(&self) -> Result<T> {
        let at = Location::caller();
        let not_one = || TensorError::new("item", ErrorKind::NotScalar { shape: self.shape().to_vec() }, at);
        self.check()?;
        if self.numel() != 1 {
            return Err(not_one());
        }
        self.to_vec::<T>()?.first().copied().ok_or_else(not_one)
    }
}

/// What is being read of a tensor from a GPU. A future; dropping it does not stop the copy.
#[cfg(feature = "cuda")]
pub struct TensorRead<T> {
    read: CudaRead,
    elements: Vec<T>,
    at: Caller,
}

/// Nothing of it is pinned.
#[cfg(feature = "cuda")]
impl<T> Unpin for TensorRead<T> {}

#[cfg(feature = "cuda")]
impl<T> TensorRead<T> {
    /// Whether it is there, or never will be.
    pub fn is_over(&self) -> bool {
        self.read.is_over()
    }
}

#[cfg(feature = "cuda")]
impl<T: Element> Future for TensorRead<T> {
    type Output = Result<Vec<T>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let TensorRead { read, elements, at } = &mut *self;
        let done = std::task::ready!(read.poll_to(cx, CpuBuffer::bytes_of(elements)));
        let done = done.map_err(|what| TensorError::new("begin_read", what, at));
        Poll::Ready(done.map(|()| std::mem::take(elements)))
    }
}

/// What it is, and not what its elements are: nothing is computed.
impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({} of {})", self.shape(), self.dtype())
    }
}
