//! Tensors from elements, numbers and seeds.

use std::panic::Location;
use std::sync::Arc;

use super::{Caller, Tensor};
use crate::account;
use crate::cpu::memory::CpuBuffer;
use crate::dtype::{DType, Element, Scalar};
use crate::error::ErrorKind;
use crate::graph::op::Op;
use crate::graph::{Node, Storage, Value};
use crate::random;
use crate::shape::{Layout, Shape};

fn checked(sizes: &[usize], operation: &'static str, at: Caller) -> Result<Shape, Tensor> {
    let shape = Shape::new(sizes).filter(|shape| shape.checked_numel().is_some());
    shape.ok_or_else(|| Tensor::failed(operation, ErrorKind::TooLarge { shape: sizes.to_vec() }, at))
}

impl Tensor {
    pub(crate) fn of_buffer(buffer: CpuBuffer, shape: Shape, dtype: DType, at: Caller) -> Tensor {
        let value = Value { storage: Arc::new(Storage::of_cpu(buffer)), layout: Layout::contiguous(shape) };
        Tensor { node: Node::of_value(value, dtype, false, at) }
    }

    /// Copies elements, which are in row-major order.
    #[track_caller]
    pub fn from_slice<T: Element>(elements: &[T], sizes: &[usize]) -> Tensor {
        let at = Location::caller();
        Tensor::of_elements(elements.len(), sizes, at, || CpuBuffer::of_slice(elements), T::DTYPE)
    }

    /// Takes elements over without copying them.
    #[track_caller]
    pub fn from_vec<T: Element>(elements: Vec<T>, sizes: &[usize]) -> Tensor {
        let at = Location::caller();
        Tensor::of_elements(elements.len(), sizes, at, || CpuBuffer::of_vec(elements), T::DTYPE)
    }

    /// Copies elements of any type as the bytes they are, little endian and in row-major order.
    #[track_caller]
    pub fn from_bytes(bytes: &[u8], sizes: &[usize], dtype: DType) -> Tensor {
        let at = Location::caller();
        let wrong = |why: String| Tensor::failed("from_bytes", ErrorKind::BadArgument { why }, at);
        if !bytes.len().is_multiple_of(dtype.size()) {
            return wrong(format!("{} bytes are no whole number of {dtype}, which has {}", bytes.len(), dtype.size()));
        }
        if dtype == DType::Bool
            && let Some(n) = bytes.iter().position(|byte| *byte > 1)
        {
            return wrong(format!("element {n} is the byte {}, and a bool is 0 or 1", bytes[n]));
        }
        Tensor::of_elements(bytes.len() / dtype.size(), sizes, at, || CpuBuffer::of_slice(bytes), dtype)
    }

    fn of_elements(
        count: usize,
        sizes: &[usize],
        at: Caller,
        buffer: impl FnOnce() -> Option<CpuBuffer>,
        dtype: DType,
    ) -> Tensor {
        let shape = match checked(sizes, "from", at) {
            Ok(shape) => shape,
            Err(failed) => return failed,
        };
        if let Err(what) = account::check_node(&shape) {
            return Tensor::failed("from", what, at);
        }
        if shape.numel() != count {
            let why = format!("{count} elements are given for shape {shape}, which has {}", shape.numel());
            return Tensor::failed("from", ErrorKind::BadArgument { why }, at);
        }
        match buffer() {
            Some(buffer) => Tensor::of_buffer(buffer, shape, dtype, at),
            None => Tensor::failed("from", ErrorKind::OutOfMemory { bytes: count * dtype.size() }, at),
        }
    }

    /// One number.
    #[track_caller]
    pub fn scalar(value: impl Into<Scalar>, dtype: DType) -> Tensor {
        Tensor::fill(value.into(), Shape::SCALAR, dtype, Location::caller())
    }

    #[track_caller]
    pub fn full(sizes: &[usize], value: impl Into<Scalar>, dtype: DType) -> Tensor {
        let at = Location::caller();
        match checked(sizes, "full", at) {
            Ok(shape) => Tensor::fill(value.into(), shape, dtype, at),
            Err(failed) => failed,
        }
    }

    #[track_caller]
    pub fn zeros(sizes: &[usize], dtype: DType) -> Tensor {
        Tensor::full(sizes, 0, dtype)
    }

    #[track_caller]
    pub fn ones(sizes: &[usize], dtype: DType) -> Tensor {
        Tensor::full(sizes, 1, dtype)
    }

    /// The numbers of a shape's elements: 0, 1, 2… in row-major order.
    fn iota(shape: Shape, at: Caller) -> Tensor {
        Tensor::make(Op::Iota, &[], shape, DType::I64, at)
    }

    /// From `start` up to and without `end`.
    #[track_caller]
    pub fn arange(start: impl Into<Scalar>, end: impl Into<Scalar>, step: impl Into<Scalar>, dtype: DType) -> Tensor {
        let at = Location::caller();
        let (start, end, step) = (start.into(), end.into(), step.into());
        let is_cut = |value: &Scalar| matches!(value, Scalar::Float(x) if x.fract() != 0.0);
        if !dtype.is_float() && [start, end, step].iter().any(is_cut) {
            let why = format!("from {start:?} to {end:?} in steps of {step:?}: fractions are not for {dtype}");
            return Tensor::failed("arange", ErrorKind::BadArgument { why }, at);
        }
        let count = match (start, end, step) {
            // Exact where floats are not.
            (Scalar::Int(start), Scalar::Int(end), Scalar::Int(step)) if step != 0 => {
                let (span, step) = (i128::from(end) - i128::from(start), i128::from(step));
                ((span + step - step.signum()) / step) as f64
            }
            _ => ((end.as_f64() - start.as_f64()) / step.as_f64()).ceil(),
        };
        if step.as_f64() == 0.0 || !count.is_finite() || count > 1e15 {
            let why = format!("from {start:?} to {end:?} in steps of {step:?}");
            return Tensor::failed("arange", ErrorKind::BadArgument { why }, at);
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is a whole number that was checked"
        )]
        let count = count.max(0.0) as usize;
        let shape = match checked(&[count], "arange", at) {
            Ok(shape) => shape,
            Err(failed) => return failed,
        };
        // Computed as widely as possible, and rounded once.
        let wide = if dtype.is_float() { DType::F64 } else { DType::I64 };
        let number = Tensor::iota(shape, at).cast_to(wide, at);
        let (step, start) = (number.scalar_like(step, at), number.scalar_like(start, at));
        (number * step + start).cast_to(dtype, at)
    }

    /// `count` numbers from `start` to `end`, both included.
    #[track_caller]
    pub fn linspace(start: f64, end: f64, count: usize, dtype: DType) -> Tensor {
        let at = Location::caller();
        let shape = match checked(&[count], "linspace", at) {
            Ok(shape) => shape,
            Err(failed) => return failed,
        };
        if !dtype.is_float() {
            return Tensor::failed("linspace", ErrorKind::WrongDType { found: dtype, takes: "floats" }, at);
        }
        let number = Tensor::iota(shape, at).cast_to(DType::F64, at);
        let last = (count.max(2) - 1) as f64;
        let part = number / last;
        // Exact at both ends.
        (start * (1.0 - &part) + end * part).cast_to(dtype, at)
    }

    /// Ones on the diagonal, zeros elsewhere.
    #[track_caller]
    pub fn eye(size: usize, dtype: DType) -> Tensor {
        let at = Location::caller();
        let shape = match checked(&[size, size], "eye", at) {
            Ok(shape) => shape,
            Err(failed) => return failed,
        };
        let number = Tensor::iota(shape, at);
        let past = i64::try_from(size).unwrap_or(i64::MAX).saturating_add(1);
        (number % past).eq(0_i64).cast_to(dtype, at)
    }

    /// Numbers spread evenly from 0 up to and without 1; the same seed makes the same numbers everywhere.
    #[track_caller]
    pub fn uniform(sizes: &[usize], seed: u64, dtype: DType) -> Tensor {
        let at = Location::caller();
        if !dtype.is_float() {
            return Tensor::failed("uniform", ErrorKind::WrongDType { found: dtype, takes: "floats" }, at);
        }
        match checked(sizes, "uniform", at) {
            Ok(shape) => Tensor::make(Op::Random { seed }, &[], shape, DType::F32, at).cast_to(dtype, at),
            Err(failed) => failed,
        }
    }

    /// Normally distributed numbers, with mean 0 and deviation 1.
    #[track_caller]
    pub fn normal(sizes: &[usize], seed: u64, dtype: DType) -> Tensor {
        let at = Location::caller();
        let radius = Tensor::uniform(sizes, random::split(seed, 0), DType::F32);
        let angle = Tensor::uniform(sizes, random::split(seed, 1), DType::F32);
        if !dtype.is_float() {
            return Tensor::failed("normal", ErrorKind::WrongDType { found: dtype, takes: "floats" }, at);
        }
        // Box and Muller: 1 - u is never zero.
        let radius = ((1.0 - radius).ln() * -2.0).sqrt();
        (radius * (angle * std::f64::consts::TAU).cos()).cast_to(dtype, at)
    }

    /// True with that probability.
    #[track_caller]
    pub fn bernoulli(sizes: &[usize], probability: f64, seed: u64) -> Tensor {
        Tensor::uniform(sizes, seed, DType::F32).lt(probability)
    }
}
