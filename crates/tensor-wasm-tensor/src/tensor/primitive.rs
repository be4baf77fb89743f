//! Primitive operations as they are made: which shapes and types they take, and what they make of them.

use std::sync::atomic::Ordering;

use super::{Caller, Tensor};
use crate::account;
use crate::autograd;
use crate::dtype::{DType, Scalar};
use crate::error::{ErrorKind, TensorError};
use crate::graph::op::{BinaryOp, FoldedAxis, Movement, Op, ReduceOp, UnaryOp};
use crate::graph::{Inputs, Node, Recipe};
use crate::schedule::{self, Mode};
use crate::shape::{AxisSet, RANK_MAX, Shape};

/// Operations that wait for each other at most: who goes on for ever without reading has them computed in between.
const QUEUE_DEPTH_MAX: u32 = 4096;

impl Tensor {
    /// Whether so many operations wait for each other that it should be computed now. Where nobody is charged for
    /// tensors that happens by itself.
    pub fn is_deep(&self) -> bool {
        self.node.depth.load(Ordering::Relaxed) >= QUEUE_DEPTH_MAX
    }

    /// A node over inputs, or the first error that one of them holds.
    pub(crate) fn make(op: Op, inputs: &[&Tensor], shape: Shape, dtype: DType, at: Caller) -> Tensor {
        for input in inputs {
            if let Err(error) = input.check() {
                return Tensor::holding(error);
            }
        }
        if shape.checked_numel().is_none() {
            return Tensor::failed(op.name(), ErrorKind::TooLarge { shape: shape.to_vec() }, at);
        }
        if let Err(what) = account::check_node(&shape) {
            return Tensor::failed(op.name(), what, at);
        }
        let flows = dtype.is_float() && autograd::is_recording() && inputs.iter().any(|input| input.requires_grad());
        let nodes: Inputs = inputs.iter().map(|input| input.node.clone()).collect();
        let node = Node::new(op, nodes, shape, dtype, flows, at);
        if node.depth.load(Ordering::Relaxed) >= QUEUE_DEPTH_MAX && !account::is_charged() {
            // What is wrong with it is said to whoever reads it; it is not tried again for each operation that follows.
            drop(schedule::realize(std::slice::from_ref(&node), Mode::Fused));
            node.depth.store(0, Ordering::Relaxed);
        }
        Tensor { node }
    }

    pub(crate) fn fill(value: Scalar, shape: Shape, dtype: DType, at: Caller) -> Tensor {
        Tensor::make(Op::Fill(value), &[], shape, dtype, at)
    }

    /// A number as a tensor of its own shape that goes with this one.
    pub(crate) fn scalar_like(&self, value: impl Into<Scalar>, at: Caller) -> Tensor {
        Tensor::fill(value.into(), Shape::SCALAR, self.dtype(), at)
    }

    pub(crate) fn unary(&self, op: UnaryOp, at: Caller) -> Tensor {
        if !op.takes(self.dtype()) {
            let takes = match op {
                UnaryOp::Not => "bool",
                UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign | UnaryOp::Floor | UnaryOp::Round => "numbers",
                _ => "floats",
            };
            return self.wrong_dtype(op.name(), takes, at);
        }
        Tensor::make(Op::Unary(op), &[self], self.shape(), self.dtype(), at)
    }

    pub(crate) fn wrong_dtype(&self, operation: &'static str, takes: &'static str, at: Caller) -> Tensor {
        if let Err(error) = self.check() {
            return Tensor::holding(error);
        }
        Tensor::failed(operation, ErrorKind::WrongDType { found: self.dtype(), takes }, at)
    }

    pub(crate) fn binary(&self, op: BinaryOp, other: &Tensor, at: Caller) -> Tensor {
        let (left, right) = match self.broadcast_with(other, op.name(), at) {
            Ok(both) => both,
            Err(error) => return Tensor::holding(error),
        };
        if !op.takes(self.dtype()) {
            let takes = if matches!(op, BinaryOp::And | BinaryOp::Or) {
                "bool"
            } else if op == BinaryOp::Pow {
                "floats"
            } else {
                "numbers"
            };
            return self.wrong_dtype(op.name(), takes, at);
        }
        let dtype = if op.is_comparison() { DType::Bool } else { self.dtype() };
        Tensor::make(Op::Binary(op), &[&left, &right], left.shape(), dtype, at)
    }

    /// Both in the shape that they have together.
    pub(crate) fn broadcast_with(
        &self,
        other: &Tensor,
        operation: &'static str,
        at: Caller,
    ) -> Result<(Tensor, Tensor), TensorError> {
        self.check()?;
        other.check()?;
        let error = |what| TensorError::new(operation, what, at);
        if self.dtype() != other.dtype() {
            return Err(error(ErrorKind::MixedDTypes { left: self.dtype(), right: other.dtype() }));
        }
        let (left, right) = (self.shape(), other.shape());
        let both = left
            .broadcast(&right)
            .ok_or_else(|| error(ErrorKind::NoBroadcast { left: left.to_vec(), right: right.to_vec() }))?;
        Ok((self.expand_to(both, at), other.expand_to(both, at)))
    }

    /// Repeats it to a shape that it broadcasts to.
    pub(crate) fn expand_to(&self, shape: Shape, at: Caller) -> Tensor {
        if self.shape() == shape {
            return self.clone();
        }
        self.moved(Movement::Expand, shape, at)
    }

    pub(crate) fn moved(&self, movement: Movement, shape: Shape, at: Caller) -> Tensor {
        Tensor::make(Op::Move(movement), &[self], shape, self.dtype(), at)
    }

    pub(crate) fn choose(condition: &Tensor, a: &Tensor, b: &Tensor, at: Caller) -> Tensor {
        let made = || {
            condition.check()?;
            let error = |what| TensorError::new("where", what, at);
            if condition.dtype() != DType::Bool {
                return Err(error(ErrorKind::WrongDType { found: condition.dtype(), takes: "a bool condition" }));
            }
            let (a, b) = a.broadcast_with(b, "where", at)?;
            let (left, right) = (condition.shape(), a.shape());
            let both = left
                .broadcast(&right)
                .ok_or_else(|| error(ErrorKind::NoBroadcast { left: left.to_vec(), right: right.to_vec() }))?;
            let (condition, a, b) = (condition.expand_to(both, at), a.expand_to(both, at), b.expand_to(both, at));
            Ok(Tensor::make(Op::Where, &[&condition, &a, &b], both, a.dtype(), at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    pub(crate) fn cast_to(&self, dtype: DType, at: Caller) -> Tensor {
        if self.dtype() == dtype {
            return self.clone();
        }
        Tensor::make(Op::Cast, &[self], self.shape(), dtype, at)
    }

    /// Over axes, which stay with size 1.
    pub(crate) fn reduce(&self, op: ReduceOp, axes: AxisSet, at: Caller) -> Tensor {
        if let Err(error) = self.check() {
            return Tensor::holding(error);
        }
        let mut shape = self.shape();
        let mut count = 1;
        for axis in (0..shape.rank()).filter(|axis| axes.contains(*axis)) {
            count *= shape[axis];
            shape = shape.with(axis, 1);
        }
        let dtype = op.result(self.dtype());
        if axes.is_empty() {
            return self.cast_to(dtype, at);
        }
        if count == 0 && matches!(op, ReduceOp::Max | ReduceOp::Min) && shape.numel() > 0 {
            let why = format!("shape {}: there is no extreme of no elements", self.shape());
            return Tensor::failed(op.name(), ErrorKind::BadArgument { why }, at);
        }
        Tensor::make(Op::Reduce(op, axes), &[self], shape, dtype, at)
    }

    pub(crate) fn matrix_product(&self, other: &Tensor, at: Caller) -> Tensor {
        let made = || {
            self.check()?;
            other.check()?;
            let error = |what| TensorError::new("matmul", what, at);
            if self.dtype() != other.dtype() {
                return Err(error(ErrorKind::MixedDTypes { left: self.dtype(), right: other.dtype() }));
            }
            if self.dtype() == DType::Bool {
                return Err(error(ErrorKind::WrongDType { found: DType::Bool, takes: "numbers" }));
            }
            let (left, right) = (self.shape(), other.shape());
            let fits = left.rank() >= 2 && right.rank() >= 2 && left[left.rank() - 1] == right[right.rank() - 2];
            let heads = |shape: &Shape| Shape::new(&shape[..shape.rank() - 2]);
            let both = if fits { heads(&left).zip(heads(&right)).and_then(|(a, b)| a.broadcast(&b)) } else { None };
            let why = || match (left.rank(), right.rank()) {
                (0, _) | (_, 0) => "a number is no matrix; multiply with *".to_owned(),
                (1, _) | (_, 1) => "both need rows and columns".to_owned(),
                (a, b) if left[a - 1] != right[b - 2] => {
                    format!("the left has {} columns and the right {} rows", left[a - 1], right[b - 2])
                }
                _ => "what comes before rows and columns does not broadcast".to_owned(),
            };
            let both =
                both.ok_or_else(|| error(ErrorKind::BadArgument { why: format!("{left} times {right}: {}", why()) }))?;
            let join = |rows: usize, columns: usize| {
                let mut sizes = both.to_vec();
                sizes.extend([rows, columns]);
                Shape::new(&sizes).ok_or_else(|| error(ErrorKind::TooLarge { shape: sizes }))
            };
            let (m, k, n) = (left[left.rank() - 2], left[left.rank() - 1], right[right.rank() - 1]);
            if matches!(self.dtype(), DType::F16 | DType::BF16) {
                // In single precision, and rounded once.
                let wide = self.cast_to(DType::F32, at).matrix_product(&other.cast_to(DType::F32, at), at);
                return Ok(wide.cast_to(self.dtype(), at));
            }
            if left.rank() > 2 && right.rank() == 2 {
                // One product of many rows, and its gradient one of many steps.
                let rows = Shape::new(&[both.numel() * m, k]).unwrap_or(Shape::SCALAR);
                return Ok(self.reshape_to(rows, at).matrix_product(other, at).reshape_to(join(m, n)?, at));
            }
            let (a, b) = (self.expand_to(join(m, k)?, at), other.expand_to(join(k, n)?, at));
            Ok(Tensor::make(Op::Matmul, &[&a, &b], join(m, n)?, self.dtype(), at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// Sums over axes of products with a tensor of as many axes; each has size 1 along those that it does not know. The
    /// caller has checked that.
    pub(crate) fn contract(&self, other: &Tensor, summed: AxisSet, at: Caller) -> Tensor {
        for tensor in [self, other] {
            if let Err(error) = tensor.check() {
                return Tensor::holding(error);
            }
        }
        let Some(both) = self.shape().broadcast(&other.shape()) else {
            let (left, right) = (self.shape().to_vec(), other.shape().to_vec());
            return Tensor::failed("contract", ErrorKind::NoBroadcast { left, right }, at);
        };
        let axes = (0..both.rank()).filter(|axis| summed.contains(*axis));
        let shape = axes.fold(both, |shape, axis| shape.with(axis, 1));
        Tensor::make(Op::Contract { summed }, &[self, other], shape, self.dtype(), at)
    }

    /// Puts windows, which are the last axis, back into the axis they are from. One after another, that is one
    /// operation.
    pub(crate) fn folded(&self, axis: FoldedAxis, at: Caller) -> Tensor {
        if let Err(error) = self.check() {
            return Tensor::holding(error);
        }
        let shape = Shape::new(&self.shape()[..self.rank() - 1]).unwrap_or(Shape::SCALAR).with(axis.axis, axis.size);
        let state = self.node.state.lock();
        let inner = match (&state.value, &state.recipe) {
            (None, Some(Recipe { op: Op::Fold { last, before: None }, inputs })) => {
                inputs.first().map(|input| (*last, Tensor { node: input.clone() }))
            }
            _ => None,
        };
        drop(state);
        // Unless it is the same axis again, or windows of windows.
        let is_apart = |last: &FoldedAxis| last.axis != axis.axis && last.axis < shape.rank();
        match inner.filter(|(last, _)| is_apart(last)) {
            Some((last, input)) => {
                let op = Op::Fold { last, before: Some(axis) };
                Tensor::make(op, &[&input], shape, self.dtype(), at)
            }
            None => Tensor::make(Op::Fold { last: axis, before: None }, &[self], shape, self.dtype(), at),
        }
    }

    /// Each at a corner of its own in zeros of that shape.
    pub(crate) fn place(parts: &[&Tensor], corners: &[[usize; RANK_MAX]], shape: Shape, at: Caller) -> Tensor {
        let dtype = parts.first().map_or(DType::F32, |part| part.dtype());
        Tensor::make(Op::Place(corners.into()), parts, shape, dtype, at)
    }
}
