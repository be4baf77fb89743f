//! Where elements are: numbers of points taken apart into indices, and indices put together to places in buffers.
//! Shapes are part of a kernel, so divisions are by constants.

use tensor_wasm_jit::build::{BinaryOp as B, KernelBuilder, UnaryOp as U, Value};

use super::numbers::Built;
use crate::shape::{AxisSet, Layout, Shape};

/// Axes that are counted through together, the last one fastest: the size of each, and its stride in a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Axes(pub(super) Vec<(usize, isize)>);

impl Axes {
    /// Some axes of a layout, those of size 1 left out and those that continue each other made one.
    pub(super) fn of(layout: &Layout, is_own: impl Fn(usize) -> bool) -> Axes {
        let mut merged: Vec<(usize, isize)> = Vec::new();
        let all = layout.shape.iter().zip(layout.strides()).enumerate();
        for (_, (size, stride)) in all.filter(|(axis, (size, _))| is_own(*axis) && **size != 1) {
            match merged.last_mut() {
                Some((last, step)) if *step == stride * size.cast_signed() => (*last, *step) = (*last * size, *stride),
                _ => merged.push((*size, *stride)),
            }
        }
        Axes(merged)
    }

    /// How far apart neighbours are, and how many of them are that far apart.
    pub(super) fn inner(&self) -> (usize, isize) {
        self.0.last().copied().unwrap_or((usize::MAX, 0))
    }

    /// Whether every place is a multiple of so many, if the first is.
    pub(super) fn is_aligned(&self, count: usize) -> bool {
        let outer = self.0.split_last().map_or(&[][..], |(_, outer)| outer);
        outer.iter().all(|(_, stride)| stride.unsigned_abs().is_multiple_of(count))
    }
}

/// The axes of a space that are reduced, or those that are not.
pub(super) fn some_axes(reduced: AxisSet, is_reduced: bool) -> impl Fn(usize) -> bool + Copy {
    move |axis| reduced.contains(axis) == is_reduced
}

/// The size of some axes of a space.
pub(super) fn count(space: Shape, is_own: impl Fn(usize) -> bool) -> usize {
    space.iter().enumerate().filter(|(axis, _)| is_own(*axis)).map(|(_, size)| *size).product()
}

/// Writes arithmetic of indices, and remembers what was divided by what: several buffers are often read alike.
#[derive(Default)]
pub(super) struct Indices {
    divided: Vec<(Value, u32, (Value, Value))>,
}

impl Indices {
    /// The quotient of a number below 2³¹ and a constant, and what is left.
    pub(super) fn divide(&mut self, b: &mut KernelBuilder, number: Value, by: u32) -> Built<(Value, Value)> {
        if let Some((.., found)) = self.divided.iter().find(|(known, other, _)| *known == number && *other == by) {
            return Ok(*found);
        }
        let found = if by <= 1 {
            (number, b.i32(0)?)
        } else if by.is_power_of_two() {
            let (shift, mask) = (b.i32(by.trailing_zeros().cast_signed())?, b.i32((by - 1).cast_signed())?);
            (b.binary(B::I32ShrU, number, shift)?, b.binary(B::I32And, number, mask)?)
        } else {
            // Multiplied by what is a little more than one over it: exact for numbers of 31 bits.
            let shift = 31 + (u32::BITS - (by - 1).leading_zeros());
            let factor = (1_u64 << shift) / u64::from(by) + 1;
            let (factor, shift) = (b.i64(factor.cast_signed())?, b.i64(i64::from(shift))?);
            let wide = b.unary(U::I64ExtendI32U, number)?;
            let wide = b.binary(B::I64Mul, wide, factor)?;
            let wide = b.binary(B::I64ShrU, wide, shift)?;
            let quotient = b.unary(U::I32WrapI64, wide)?;
            let by = b.i32(by.cast_signed())?;
            let whole = b.binary(B::I32Mul, quotient, by)?;
            (quotient, b.binary(B::I32Sub, number, whole)?)
        };
        self.divided.push((number, by, found));
        Ok(found)
    }

    /// How far from the first element the one with a number is. None where all are in one place.
    pub(super) fn place(&mut self, b: &mut KernelBuilder, axes: &Axes, number: Value) -> Built<Option<Value>> {
        let mut place = None;
        let mut left = number;
        for (n, (size, stride)) in axes.0.iter().enumerate().rev() {
            let index = if n == 0 {
                left
            } else {
                let (outer, index) = self.divide(b, left, small(*size))?;
                left = outer;
                index
            };
            if *stride == 0 {
                continue;
            }
            let term = times(b, index, *stride)?;
            place = Some(match place {
                None => term,
                Some(sum) => b.binary(B::I32Add, sum, term)?,
            });
        }
        Ok(place)
    }
}

/// Numbers of elements are below 2³¹: `lower` has looked.
pub(super) fn small(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

pub(super) fn times(b: &mut KernelBuilder, value: Value, by: isize) -> Built<Value> {
    if by == 1 {
        return Ok(value);
    }
    let by = i32::try_from(by).unwrap_or(i32::MAX);
    if by > 0 && by.cast_unsigned().is_power_of_two() {
        let shift = b.i32(by.trailing_zeros().cast_signed())?;
        return b.binary(B::I32Shl, value, shift);
    }
    let by = b.i32(by)?;
    b.binary(B::I32Mul, value, by)
}

/// The same for numbers that have no sign: of items, of bytes.
pub(super) fn scaled(b: &mut KernelBuilder, value: Value, by: u32) -> Built<Value> {
    times(b, value, (by as usize).cast_signed())
}

/// The sum of places that may not be there, and a number.
pub(super) fn sum(b: &mut KernelBuilder, places: &[Option<Value>], offset: isize) -> Built<Value> {
    let mut whole = None;
    for place in places.iter().flatten() {
        whole = Some(match whole {
            None => *place,
            Some(sum) => b.binary(B::I32Add, sum, *place)?,
        });
    }
    let offset = i32::try_from(offset).unwrap_or(i32::MAX);
    match whole {
        None => b.i32(offset),
        Some(sum) if offset == 0 => Ok(sum),
        Some(sum) => {
            let offset = b.i32(offset)?;
            b.binary(B::I32Add, sum, offset)
        }
    }
}
