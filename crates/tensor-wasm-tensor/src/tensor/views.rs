//! The same elements under other indices.

use std::panic::Location;

use super::{Caller, Tensor};
use crate::error::{ErrorKind, TensorError};
use crate::graph::op::{Movement, Op};
use crate::shape::{AxisSet, RANK_MAX, Shape};

/// Some of a tensor's axes; negative ones count from the end. `()` is all of them.
pub trait Axes {
    /// None for all.
    fn axes(&self) -> Option<Vec<isize>>;
}

impl Axes for () {
    fn axes(&self) -> Option<Vec<isize>> {
        None
    }
}

impl Axes for Option<Vec<isize>> {
    fn axes(&self) -> Option<Vec<isize>> {
        self.clone()
    }
}

impl Axes for isize {
    fn axes(&self) -> Option<Vec<isize>> {
        Some(vec![*self])
    }
}

impl Axes for i32 {
    fn axes(&self) -> Option<Vec<isize>> {
        Some(vec![isize::try_from(*self).unwrap_or(isize::MAX)])
    }
}

impl Axes for &[isize] {
    fn axes(&self) -> Option<Vec<isize>> {
        Some(self.to_vec())
    }
}

impl<const N: usize> Axes for [isize; N] {
    fn axes(&self) -> Option<Vec<isize>> {
        Some(self.to_vec())
    }
}

impl<const N: usize> Axes for &[isize; N] {
    fn axes(&self) -> Option<Vec<isize>> {
        Some(self.to_vec())
    }
}

impl Tensor {
    /// An axis as it may be given, as a number from zero on.
    pub(crate) fn axis(&self, axis: isize, operation: &'static str, at: Caller) -> Result<usize, TensorError> {
        self.check()?;
        let rank = isize::try_from(self.rank()).unwrap_or(isize::MAX);
        let from_start = if axis < 0 { axis + rank } else { axis };
        match usize::try_from(from_start) {
            Ok(found) if from_start < rank => Ok(found),
            _ => Err(TensorError::new(operation, ErrorKind::NoSuchAxis { axis, shape: self.shape().to_vec() }, at)),
        }
    }

    pub(crate) fn axis_set(
        &self,
        axes: &impl Axes,
        operation: &'static str,
        at: Caller,
    ) -> Result<AxisSet, TensorError> {
        self.check()?;
        let mut set = AxisSet::default();
        match axes.axes() {
            None => {
                for axis in 0..self.rank() {
                    set.insert(axis);
                }
            }
            Some(axes) => {
                for axis in axes {
                    if !set.insert(self.axis(axis, operation, at)?) {
                        return Err(TensorError::new(operation, ErrorKind::AxisTwice { axis }, at));
                    }
                }
            }
        }
        Ok(set)
    }

    /// The same elements in the same order. One size may be -1: what is left.
    #[track_caller]
    pub fn reshape(&self, sizes: &[isize]) -> Tensor {
        let at = Location::caller();
        if let Err(error) = self.check() {
            return Tensor::holding(error);
        }
        let count = self.numel();
        let known: Option<usize> = sizes
            .iter()
            .filter(|size| **size != -1)
            .try_fold(1_usize, |product, size| product.checked_mul(usize::try_from(*size).ok()?));
        let unknown = sizes.iter().filter(|size| **size == -1).count();
        let rest = known.and_then(|known| match unknown {
            0 => (known == count).then_some(1),
            1 => {
                if known > 0 && count.is_multiple_of(known) {
                    Some(count / known)
                } else {
                    None
                }
            }
            _ => None,
        });
        let shape = rest.and_then(|rest| {
            let sizes: Vec<usize> = sizes.iter().map(|size| usize::try_from(*size).unwrap_or(rest)).collect();
            Shape::new(&sizes)
        });
        match shape {
            Some(shape) => self.reshape_to(shape, at),
            None => {
                Tensor::failed("reshape", ErrorKind::Reshape { from: self.shape().to_vec(), to: sizes.to_vec() }, at)
            }
        }
    }

    pub(crate) fn reshape_to(&self, shape: Shape, at: Caller) -> Tensor {
        if self.shape() == shape {
            return self.clone();
        }
        if self.check().is_ok() && self.numel() != shape.numel() {
            let to = shape.iter().map(|size| size.cast_signed()).collect();
            return Tensor::failed("reshape", ErrorKind::Reshape { from: self.shape().to_vec(), to }, at);
        }
        self.moved(Movement::Reshape, shape, at)
    }

    /// Axes in another order.
    #[track_caller]
    pub fn permute(&self, axes: &[isize]) -> Tensor {
        self.permuted(axes, Location::caller())
    }

    fn permuted(&self, axes: &[isize], at: Caller) -> Tensor {
        let made = || {
            let set = self.axis_set(&axes, "permute", at)?;
            if axes.len() != self.rank() {
                let why = format!("{} axes are named of a tensor of shape {}", axes.len(), self.shape());
                return Err(TensorError::new("permute", ErrorKind::BadArgument { why }, at));
            }
            debug_assert!((0..self.rank()).all(|axis| set.contains(axis)));
            let mut order = [0_u8; RANK_MAX];
            let mut shape = self.shape();
            for (to, axis) in axes.iter().enumerate() {
                let from = self.axis(*axis, "permute", at)?;
                order[to] = u8::try_from(from).unwrap_or_default();
                shape = shape.with(to, self.shape()[from]);
            }
            Ok(self.moved(Movement::Permute(order), shape, at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// The same elements in a buffer of their own, one after the other in the order of their indices.
    #[track_caller]
    pub fn contiguous(&self) -> Tensor {
        let at = Location::caller();
        match self.check() {
            Ok(()) => Tensor::make(Op::Cast, &[self], self.shape(), self.dtype(), at),
            Err(error) => Tensor::holding(error),
        }
    }

    /// Two axes change places.
    #[track_caller]
    pub fn transpose(&self, a: isize, b: isize) -> Tensor {
        let at = Location::caller();
        let made = || {
            let (a, b) = (self.axis(a, "transpose", at)?, self.axis(b, "transpose", at)?);
            let mut order: Vec<isize> = (0..isize::try_from(self.rank()).unwrap_or(0)).collect();
            order.swap(a, b);
            Ok(self.permuted(&order, at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// The last two axes change places.
    #[track_caller]
    pub fn t(&self) -> Tensor {
        self.transpose(-2, -1)
    }

    /// Repeats it without copying to a shape that it broadcasts to.
    #[track_caller]
    pub fn expand(&self, sizes: &[usize]) -> Tensor {
        let at = Location::caller();
        if let Err(error) = self.check() {
            return Tensor::holding(error);
        }
        let Some(shape) = Shape::new(sizes) else {
            return Tensor::failed("expand", ErrorKind::TooLarge { shape: sizes.to_vec() }, at);
        };
        if self.shape().broadcast(&shape) == Some(shape) {
            return self.expand_to(shape, at);
        }
        Tensor::failed("expand", ErrorKind::NoBroadcast { left: self.shape().to_vec(), right: sizes.to_vec() }, at)
    }

    /// Every `step`th element along an axis, from `start` up to and without `end`; negative ones count from the end,
    /// and a negative step goes backwards. As with Python's slices, what is beyond an end is left out.
    #[track_caller]
    pub fn slice(&self, axis: isize, start: Option<isize>, end: Option<isize>, step: isize) -> Tensor {
        let at = Location::caller();
        let made = || {
            let axis = self.axis(axis, "slice", at)?;
            if step == 0 {
                let why = "a step is not zero".to_owned();
                return Err(TensorError::new("slice", ErrorKind::BadArgument { why }, at));
            }
            let size = isize::try_from(self.shape()[axis]).unwrap_or(isize::MAX);
            let (least, most) = if step > 0 { (0, size) } else { (-1, size - 1) };
            let bound = |given: Option<isize>, missing: isize| {
                given.map_or(missing, |at| (if at < 0 { at.saturating_add(size) } else { at }).clamp(least, most))
            };
            let first = bound(start, if step > 0 { 0 } else { size - 1 });
            let end = bound(end, if step > 0 { size } else { -1 });
            let span = if step > 0 { end - first } else { first - end };
            let len = if span <= 0 { 0 } else { (span.unsigned_abs() - 1) / step.unsigned_abs() + 1 };
            let start = if len == 0 { 0 } else { first.unsigned_abs() };
            Ok(self.moved(Movement::Slice { axis, start, step }, self.shape().with(axis, len), at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// The elements at one index of an axis, which is gone then.
    #[track_caller]
    pub fn select(&self, axis: isize, index: isize) -> Tensor {
        let at = Location::caller();
        let made = || {
            let axis = self.axis(axis, "select", at)?;
            let size = self.shape()[axis];
            let from_start = if index < 0 { index + size.cast_signed() } else { index };
            match usize::try_from(from_start).ok().filter(|index| *index < size) {
                Some(index) => Ok(self.narrow(axis.cast_signed(), index, 1).squeeze(axis.cast_signed())),
                None => {
                    let what = ErrorKind::OutOfRange { index: index as i64, axis, size };
                    Err(TensorError::new("select", what, at))
                }
            }
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// `len` elements along an axis from `start` on.
    #[track_caller]
    pub fn narrow(&self, axis: isize, start: usize, len: usize) -> Tensor {
        let at = Location::caller();
        let made = || {
            let axis = self.axis(axis, "narrow", at)?;
            let size = self.shape()[axis];
            if start.checked_add(len).is_none_or(|end| end > size) {
                let why = format!("{len} elements from {start} on, along an axis of {size}");
                return Err(TensorError::new("narrow", ErrorKind::BadArgument { why }, at));
            }
            // All of them: not even a view.
            if len == size {
                return Ok(self.clone());
            }
            Ok(self.moved(Movement::Slice { axis, start, step: 1 }, self.shape().with(axis, len), at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// The other way round along axes.
    #[track_caller]
    pub fn flip(&self, axes: impl Axes) -> Tensor {
        let at = Location::caller();
        match self.axis_set(&axes, "flip", at) {
            Err(error) => Tensor::holding(error),
            Ok(set) => (0..self.rank()).filter(|axis| set.contains(*axis)).fold(self.clone(), |flipped, axis| {
                let start = self.shape()[axis].saturating_sub(1);
                flipped.moved(Movement::Slice { axis, start, step: -1 }, self.shape(), at)
            }),
        }
    }

    /// Without axes of size 1.
    #[track_caller]
    pub fn squeeze(&self, axes: impl Axes) -> Tensor {
        let at = Location::caller();
        let made = || {
            let set = self.axis_set(&axes, "squeeze", at)?;
            let is_named = axes.axes().is_some();
            let mut sizes = Vec::new();
            for (axis, size) in self.shape().iter().enumerate() {
                match (set.contains(axis), *size == 1) {
                    (true, true) => {}
                    (true, false) if is_named => {
                        let why = format!("axis {axis} of shape {} has not size 1", self.shape());
                        return Err(TensorError::new("squeeze", ErrorKind::BadArgument { why }, at));
                    }
                    _ => sizes.push(*size),
                }
            }
            let shape = Shape::new(&sizes).unwrap_or(Shape::SCALAR);
            Ok(self.reshape_to(shape, at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// With a new axis of size 1 at a place, which may be after the last.
    #[track_caller]
    pub fn unsqueeze(&self, axis: isize) -> Tensor {
        let at = Location::caller();
        if let Err(error) = self.check() {
            return Tensor::holding(error);
        }
        let rank = isize::try_from(self.rank()).unwrap_or(isize::MAX);
        let place = if axis < 0 { axis + rank + 1 } else { axis };
        let mut sizes = self.shape().to_vec();
        match usize::try_from(place) {
            Ok(place) if place <= sizes.len() => {
                sizes.insert(place, 1);
                match Shape::new(&sizes) {
                    Some(shape) => self.reshape_to(shape, at),
                    None => Tensor::failed("unsqueeze", ErrorKind::TooLarge { shape: sizes }, at),
                }
            }
            _ => Tensor::failed("unsqueeze", ErrorKind::NoSuchAxis { axis, shape: self.shape().to_vec() }, at),
        }
    }

    /// Without the axes that a reduction left with size 1, unless they are to stay.
    pub(crate) fn drop_axes(&self, set: AxisSet, keepdims: bool, at: Caller) -> Tensor {
        if keepdims || self.check().is_err() {
            return self.clone();
        }
        let sizes: Vec<usize> =
            self.shape().iter().enumerate().filter(|(axis, _)| !set.contains(*axis)).map(|(_, size)| *size).collect();
        self.reshape_to(Shape::new(&sizes).unwrap_or(Shape::SCALAR), at)
    }
}
