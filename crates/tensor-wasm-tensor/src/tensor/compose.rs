//! Operations as users know them, each primitive or composed of primitives, which are fused back into few kernels.

use std::panic::Location;

use super::{Axes, Operand, Tensor};
use crate::dtype::DType;
use crate::error::{ErrorKind, TensorError};
use crate::graph::op::{Op, ReduceOp, UnaryOp};
use crate::precision::product;
use crate::shape::{RANK_MAX, Shape};

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident $op:ident;)*) => {
        impl Tensor {
            $($(#[$doc])*
            #[track_caller]
            pub fn $name(&self) -> Tensor {
                self.unary(UnaryOp::$op, Location::caller())
            })*
        }
    };
}

unary! {
    abs Abs;
    /// -1, 0 or 1; NaN stays NaN.
    sign Sign;
    recip Recip;
    sqrt Sqrt;
    /// One over the square root.
    rsqrt Rsqrt;
    exp Exp;
    /// `e^x - 1`, precise near zero.
    expm1 Expm1;
    ln Ln;
    /// `ln(1 + x)`, precise near zero.
    ln1p Ln1p;
    sin Sin;
    cos Cos;
    tanh Tanh;
    erf Erf;
    floor Floor;
    /// To the nearest; halves to the even one.
    round Round;
    logical_not Not;
}

/// What a reduction leaves.
macro_rules! reductions {
    ($($(#[$doc:meta])* $name:ident $keep:ident $op:ident;)*) => {
        impl Tensor {
            $($(#[$doc])*
            #[track_caller]
            pub fn $name(&self, axes: impl Axes) -> Tensor {
                self.reduced(ReduceOp::$op, axes, false)
            }

            /// The same, and the axes stay with size 1.
            #[track_caller]
            pub fn $keep(&self, axes: impl Axes) -> Tensor {
                self.reduced(ReduceOp::$op, axes, true)
            })*
        }
    };
}

reductions! {
    /// The sum over axes; `()` is all of them. Sums of integers are i64.
    sum sum_keepdims Sum;
    /// The product over axes. Products of integers are i64.
    prod prod_keepdims Prod;
    /// The largest over axes; NaN if one is.
    max max_keepdims Max;
    /// The smallest over axes; NaN if one is.
    min min_keepdims Min;
}

impl Tensor {
    #[track_caller]
    fn reduced(&self, op: ReduceOp, axes: impl Axes, keepdims: bool) -> Tensor {
        let at = Location::caller();
        match self.axis_set(&axes, op.name(), at) {
            Ok(set) => self.reduce(op, set, at).drop_axes(set, keepdims, at),
            Err(error) => Tensor::holding(error),
        }
    }

    /// Elements that a reduction over axes takes together.
    fn count_along(&self, axes: &impl Axes) -> f64 {
        let set = self.axis_set(axes, "count", Location::caller()).unwrap_or_default();
        let shape = self.shape();
        (0..shape.rank()).filter(|axis| set.contains(*axis)).map(|axis| shape[axis]).product::<usize>() as f64
    }

    /// The mean over axes. Of floats.
    #[track_caller]
    pub fn mean(&self, axes: impl Axes) -> Tensor {
        self.means("mean", axes, false)
    }

    #[track_caller]
    pub fn mean_keepdims(&self, axes: impl Axes) -> Tensor {
        self.means("mean", axes, true)
    }

    #[track_caller]
    fn means(&self, operation: &'static str, axes: impl Axes, keepdims: bool) -> Tensor {
        let at = Location::caller();
        if !self.dtype().is_float() {
            return self.wrong_dtype(operation, "floats", at);
        }
        let count = self.count_along(&axes);
        self.reduced(ReduceOp::Sum, axes, keepdims) * (1.0 / count)
    }

    /// The variance over axes: the mean of squared distances from the mean, or with `ddof` 1 their sum over one less.
    #[track_caller]
    pub fn var(&self, axes: impl Axes, ddof: usize) -> Tensor {
        let at = Location::caller();
        let set = match self.axis_set(&axes, "var", at) {
            Ok(set) => set,
            Err(error) => return Tensor::holding(error),
        };
        if !self.dtype().is_float() {
            return self.wrong_dtype("var", "floats", at);
        }
        let count = self.count_along(&axes);
        let mean = self.reduce(ReduceOp::Sum, set, at) * (1.0 / count);
        let squares = (self - mean).square().reduce(ReduceOp::Sum, set, at) * (1.0 / (count - ddof as f64));
        squares.drop_axes(set, false, at)
    }

    /// The logarithm of the sum of exponentials, without overflow.
    #[track_caller]
    pub fn logsumexp(&self, axes: impl Axes) -> Tensor {
        let at = Location::caller();
        match self.axis_set(&axes, "logsumexp", at) {
            Ok(set) => {
                let most = self.reduce(ReduceOp::Max, set, at).detach();
                // Where everything is infinite, the distance is not a number; the result is the infinity.
                let most = most.eq(f64::INFINITY).or(most.eq(f64::NEG_INFINITY)).where_like(0.0, &most);
                let sum = (self - &most).exp().reduce(ReduceOp::Sum, set, at);
                (sum.ln() + most).drop_axes(set, false, at)
            }
            Err(error) => Tensor::holding(error),
        }
    }

    /// A number where this is true, another tensor's elements elsewhere.
    #[track_caller]
    fn where_like(&self, value: f64, other: &Tensor) -> Tensor {
        let at = Location::caller();
        Tensor::choose(self, &other.scalar_like(value, at), other, at)
    }

    /// The first index of the largest element along an axis.
    #[track_caller]
    pub fn argmax(&self, axis: isize) -> Tensor {
        self.arg_reduced(axis, true, false)
    }

    #[track_caller]
    pub fn argmin(&self, axis: isize) -> Tensor {
        self.arg_reduced(axis, false, false)
    }

    #[track_caller]
    pub(crate) fn arg_reduced(&self, axis: isize, largest: bool, keepdims: bool) -> Tensor {
        let at = Location::caller();
        let name = if largest { "argmax" } else { "argmin" };
        let made = || {
            let set = self.axis_set(&axis, name, at)?;
            let axis = self.axis(axis, name, at)?;
            if self.shape()[axis] == 0 && self.shape().with(axis, 1).numel() > 0 {
                let why = format!("shape {}: there is no extreme of no elements", self.shape());
                return Err(TensorError::new(name, ErrorKind::BadArgument { why }, at));
            }
            let shape = self.shape().with(axis, 1);
            let found = Tensor::make(Op::ArgReduce { axis, largest }, &[self], shape, DType::I64, at);
            Ok(found.drop_axes(set, keepdims, at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// Running sums along an axis.
    #[track_caller]
    pub fn cumsum(&self, axis: isize) -> Tensor {
        let at = Location::caller();
        match self.axis(axis, "cumsum", at) {
            Ok(axis) => self.cast_to(ReduceOp::Sum.result(self.dtype()), at).running_sum(axis, false, at),
            Err(error) => Tensor::holding(error),
        }
    }

    pub(crate) fn running_sum(&self, axis: usize, is_reverse: bool, at: super::Caller) -> Tensor {
        Tensor::make(Op::Cumsum { axis, is_reverse }, &[self], self.shape(), self.dtype(), at)
    }

    #[track_caller]
    pub fn square(&self) -> Tensor {
        self.mul(self)
    }

    #[track_caller]
    pub fn tan(&self) -> Tensor {
        self.sin() / self.cos()
    }

    #[track_caller]
    pub fn sigmoid(&self) -> Tensor {
        ((-self).exp() + 1.0).recip()
    }

    /// `ln(1 + e^x)`
    #[track_caller]
    pub fn softplus(&self) -> Tensor {
        self.maximum(0.0) + (-self.abs()).exp().ln1p()
    }

    #[track_caller]
    pub fn relu(&self) -> Tensor {
        self.maximum(0)
    }

    /// `x` where it is above zero, `alpha * (e^x - 1)` elsewhere.
    #[track_caller]
    pub fn elu(&self, alpha: f64) -> Tensor {
        self.gt(0).where_(self, self.minimum(0).expm1() * alpha)
    }

    /// `x * Φ(x)`, with the error function.
    #[track_caller]
    pub fn gelu(&self) -> Tensor {
        self * 0.5 * ((self * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0)
    }

    /// The form of `gelu` that is made with the hyperbolic tangent.
    #[track_caller]
    pub fn gelu_approximate(&self) -> Tensor {
        let inner = (self + self * self * self * 0.044_715) * (std::f64::consts::FRAC_2_PI.sqrt());
        self * 0.5 * (inner.tanh() + 1.0)
    }

    #[track_caller]
    pub fn silu(&self) -> Tensor {
        self * self.sigmoid()
    }

    /// No less than one number and no more than another.
    #[track_caller]
    pub fn clip(&self, min: impl Operand, max: impl Operand) -> Tensor {
        self.maximum(min).minimum(max)
    }

    #[track_caller]
    pub fn softmax(&self, axis: isize) -> Tensor {
        let at = Location::caller();
        match self.axis_set(&axis, "softmax", at) {
            Ok(set) => {
                let powers = (self - self.reduce(ReduceOp::Max, set, at).detach()).exp();
                // One division a row, not one an element.
                let part = powers.reduce(ReduceOp::Sum, set, at).unary(UnaryOp::Recip, at);
                powers * part
            }
            Err(error) => Tensor::holding(error),
        }
    }

    #[track_caller]
    pub fn log_softmax(&self, axis: isize) -> Tensor {
        let at = Location::caller();
        match self.axis_set(&axis, "log_softmax", at) {
            Ok(set) => {
                let shifted = self - self.reduce(ReduceOp::Max, set, at).detach();
                let sum = shifted.exp().reduce(ReduceOp::Sum, set, at);
                shifted - sum.ln()
            }
            Err(error) => Tensor::holding(error),
        }
    }

    /// Distances from the mean along an axis, in deviations.
    #[track_caller]
    pub fn layer_norm(&self, axis: isize, epsilon: f64) -> Tensor {
        let at = Location::caller();
        match self.axis_set(&axis, "layer_norm", at) {
            Ok(set) => {
                let part = 1.0 / self.count_along(&axis);
                let centered = self - self.reduce(ReduceOp::Sum, set, at) * part;
                let variance = centered.square().reduce(ReduceOp::Sum, set, at) * part;
                centered * (variance + epsilon).rsqrt()
            }
            Err(error) => Tensor::holding(error),
        }
    }

    /// Divided by the root of the mean square along an axis.
    #[track_caller]
    pub fn rms_norm(&self, axis: isize, epsilon: f64) -> Tensor {
        let at = Location::caller();
        match self.axis_set(&axis, "rms_norm", at) {
            Ok(set) => {
                let squares = self.square().reduce(ReduceOp::Sum, set, at) * (1.0 / self.count_along(&axis));
                self * (squares + epsilon).rsqrt()
            }
            Err(error) => Tensor::holding(error),
        }
    }

    /// The product of matrices in the last two axes; those before are broadcast. A vector is a row on the left and a
    /// column on the right.
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Tensor {
        let at = Location::caller();
        let (is_row, is_column) = (self.rank() == 1, other.rank() == 1);
        if self.check().is_err() || other.check().is_err() || !(is_row || is_column) {
            return product([self, other], at, |[left, right]| left.matrix_product(right, at));
        }
        let left = if is_row { self.unsqueeze(0) } else { self.clone() };
        let right = if is_column { other.unsqueeze(1) } else { other.clone() };
        let product = product([&left, &right], at, |[left, right]| left.matrix_product(right, at));
        let product = if is_column { product.squeeze(-1) } else { product };
        match (is_row, is_column) {
            (true, true) => product.squeeze(-1),
            (true, false) => product.squeeze(-2),
            _ => product,
        }
    }

    /// One after the other along an axis.
    #[track_caller]
    pub fn concat(tensors: &[&Tensor], axis: isize) -> Tensor {
        let at = Location::caller();
        let made = || {
            let Some(first) = tensors.first() else {
                let why = "no tensors are given".to_owned();
                return Err(TensorError::new("concat", ErrorKind::BadArgument { why }, at));
            };
            let axis = first.axis(axis, "concat", at)?;
            let mut corners = Vec::new();
            let mut size = 0_usize;
            for tensor in tensors {
                tensor.check()?;
                let error = |what| TensorError::new("concat", what, at);
                if tensor.dtype() != first.dtype() {
                    return Err(error(ErrorKind::MixedDTypes { left: first.dtype(), right: tensor.dtype() }));
                }
                let is_same =
                    tensor.rank() == first.rank() && tensor.shape().with(axis, 1) == first.shape().with(axis, 1);
                if !is_same {
                    let expected = format!("{} but for axis {axis}", first.shape());
                    return Err(error(ErrorKind::WrongShape { found: tensor.shape().to_vec(), expected }));
                }
                let mut corner = [0; RANK_MAX];
                corner[axis] = size;
                corners.push(corner);
                size = size.saturating_add(tensor.shape()[axis]);
            }
            Ok(Tensor::place(tensors, &corners, first.shape().with(axis, size), at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// Side by side along a new axis.
    #[track_caller]
    pub fn stack(tensors: &[&Tensor], axis: isize) -> Tensor {
        let with_axis: Vec<Tensor> = tensors.iter().map(|tensor| tensor.unsqueeze(axis)).collect();
        Tensor::concat(&with_axis.iter().collect::<Vec<_>>(), axis)
    }

    /// Zeros before and after along each axis.
    #[track_caller]
    pub fn pad(&self, before: &[usize], after: &[usize]) -> Tensor {
        let at = Location::caller();
        if let Err(error) = self.check() {
            return Tensor::holding(error);
        }
        if before.len() != self.rank() || after.len() != self.rank() {
            let why = format!("{} and {} sizes for a tensor of shape {}", before.len(), after.len(), self.shape());
            return Tensor::failed("pad", ErrorKind::BadArgument { why }, at);
        }
        let shape = self.shape();
        let sizes = shape.iter().zip(before.iter().zip(after));
        let sizes: Vec<usize> = sizes.map(|(size, (a, b))| size.saturating_add(*a).saturating_add(*b)).collect();
        let mut corner = [0; RANK_MAX];
        corner[..before.len()].copy_from_slice(before);
        match Shape::new(&sizes).filter(|shape| shape.checked_numel().is_some()) {
            Some(shape) => Tensor::place(&[self], &[corner], shape, at),
            None => Tensor::failed("pad", ErrorKind::TooLarge { shape: sizes }, at),
        }
    }

    /// `out[i, j, k] = self[i, index[i, j, k], k]` for axis 1, and so on. Indices are i64; negative ones count from the
    /// end.
    #[track_caller]
    pub fn gather(&self, axis: isize, index: &Tensor) -> Tensor {
        self.gathered(axis, index, Location::caller())
    }

    fn gathered(&self, axis: isize, index: &Tensor, at: super::Caller) -> Tensor {
        let made = || {
            let axis = self.check_index(axis, index, "gather", at)?;
            let expected = self.shape().with(axis, index.shape()[axis]);
            if index.shape() != expected {
                let expected = format!("an index of shape {expected}");
                let what = ErrorKind::WrongShape { found: index.shape().to_vec(), expected };
                return Err(TensorError::new("gather", what, at));
            }
            Ok(Tensor::make(Op::Gather { axis }, &[self, index], index.shape(), self.dtype(), at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// `out[i, index[i, j, k], k] += self[i, j, k]` for axis 1, and so on, into zeros; the axis has `size` there.
    #[track_caller]
    pub fn scatter_add(&self, axis: isize, index: &Tensor, size: usize) -> Tensor {
        let at = Location::caller();
        let made = || {
            let axis = self.check_index(axis, index, "scatter_add", at)?;
            if self.dtype() == DType::Bool {
                let what = ErrorKind::WrongDType { found: DType::Bool, takes: "numbers" };
                return Err(TensorError::new("scatter_add", what, at));
            }
            if index.shape() != self.shape() {
                let expected = format!("an index of shape {}", self.shape());
                let what = ErrorKind::WrongShape { found: index.shape().to_vec(), expected };
                return Err(TensorError::new("scatter_add", what, at));
            }
            let shape = self.shape().with(axis, size);
            Ok(Tensor::make(Op::ScatterAdd { axis, size }, &[self, index], shape, self.dtype(), at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    fn check_index(
        &self,
        axis: isize,
        index: &Tensor,
        operation: &'static str,
        at: super::Caller,
    ) -> Result<usize, TensorError> {
        index.check()?;
        let axis = self.axis(axis, operation, at)?;
        if index.dtype() != DType::I64 {
            let what = ErrorKind::WrongDType { found: index.dtype(), takes: "an index of i64" };
            return Err(TensorError::new(operation, what, at));
        }
        if index.rank() != self.rank() {
            let expected = format!("an index of {} axes", self.rank());
            return Err(TensorError::new(
                operation,
                ErrorKind::WrongShape { found: index.shape().to_vec(), expected },
                at,
            ));
        }
        Ok(axis)
    }

    /// Slices along an axis, chosen by a list of indices.
    #[track_caller]
    pub fn index_select(&self, axis: isize, index: &Tensor) -> Tensor {
        let at = Location::caller();
        let made = || {
            index.check()?;
            let found = self.axis(axis, "index_select", at)?;
            if index.rank() != 1 {
                let expected = "a list of indices".to_owned();
                return Err(TensorError::new(
                    "index_select",
                    ErrorKind::WrongShape { found: index.shape().to_vec(), expected },
                    at,
                ));
            }
            let mut sizes = vec![1; self.rank()];
            sizes[found] = index.numel();
            let shape = Shape::new(&sizes).unwrap_or(Shape::SCALAR);
            let spread = index.reshape_to(shape, at).expand_to(self.shape().with(found, index.numel()), at);
            Ok(self.gathered(axis, &spread, at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// The indices that sort along an axis. Equal elements keep their order; NaN is larger than everything.
    #[track_caller]
    pub fn argsort(&self, axis: isize, is_descending: bool) -> Tensor {
        let at = Location::caller();
        match self.axis(axis, "argsort", at) {
            Ok(axis) => Tensor::make(Op::ArgSort { axis, is_descending }, &[self], self.shape(), DType::I64, at),
            Err(error) => Tensor::holding(error),
        }
    }

    /// Sorted along an axis.
    #[track_caller]
    pub fn sort(&self, axis: isize, is_descending: bool) -> Tensor {
        self.gather(axis, &self.argsort(axis, is_descending))
    }
}
