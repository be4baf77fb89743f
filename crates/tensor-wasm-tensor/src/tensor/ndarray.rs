//! Arrays of the crate `ndarray`, there and back.

use std::panic::Location;
use std::sync::Arc;

use ndarray::{ArrayD, IxDyn};

use super::Tensor;
use crate::cpu::memory::CpuBuffer;
use crate::dtype::Element;
use crate::error::{ErrorKind, Result, TensorError};
use crate::graph::{Node, Storage, Value};
use crate::shape::{Layout, Shape};

impl Tensor {
    /// Takes over an array with its memory and its strides: whatever layout it has, no element is moved.
    #[track_caller]
    pub fn from_ndarray<T: Element>(array: ArrayD<T>) -> Tensor {
        let at = Location::caller();
        let shape = Shape::new(array.shape()).filter(|shape| shape.checked_numel().is_some());
        let Some(shape) = shape else {
            return Tensor::failed("from_ndarray", ErrorKind::TooLarge { shape: array.shape().to_vec() }, at);
        };
        let strides = array.strides().to_vec();
        let (elements, offset) = array.into_raw_vec_and_offset();
        // Without elements there is no first one, and no stride means anything.
        let layout = match offset {
            Some(offset) if shape.numel() > 0 => Layout::strided(shape, &strides, offset.cast_signed()),
            _ => Some(Layout::contiguous(shape)),
        };
        // An array that owns its memory stays inside of it.
        let count = elements.len();
        let is_inside =
            |layout: &Layout| layout.reach().is_none_or(|(first, last)| first >= 0 && last.unsigned_abs() < count);
        let Some(layout) = layout.filter(is_inside) else {
            let why = format!("an array of shape {shape} has strides {strides:?} in {count} elements");
            return Tensor::failed("from_ndarray", ErrorKind::BadArgument { why }, at);
        };
        let Some(buffer) = CpuBuffer::of_vec(elements) else {
            return Tensor::failed("from_ndarray", ErrorKind::OutOfMemory { bytes: count * size_of::<T>() }, at);
        };
        let value = Value { storage: Arc::new(Storage::of_cpu(buffer)), layout };
        Tensor { node: Node::of_value(value, T::DTYPE, false, at) }
    }

    /// Computes it, and copies its elements into an array in row-major order.
    #[track_caller]
    pub fn to_ndarray<T: Element>(&self) -> Result<ArrayD<T>> {
        let at = Location::caller();
        let elements = self.to_vec::<T>()?;
        ArrayD::from_shape_vec(IxDyn(&self.shape()), elements).map_err(|error| {
            let why = format!("shape {}: {error}", self.shape());
            TensorError::new("to_ndarray", ErrorKind::BadArgument { why }, at)
        })
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array, Array2, Axis, s};

    use super::*;
    use crate::dtype::DType;

    #[test]
    fn arrays_of_any_layout_are_taken_over_without_a_copy_and_given_back() {
        let base = Array::from_iter(0..24).into_shape_with_order((4, 6)).unwrap();
        let mut turned = base.clone().reversed_axes();
        turned.invert_axis(Axis(0));
        let arrays = [
            base.clone().into_dyn(),
            turned.into_dyn(),
            base.clone().slice_move(s![1..;2, ..;-2]).into_dyn(),
            base.slice_move(s![2, 3]).into_dyn(),
            Array2::<i32>::zeros((0, 3)).into_dyn(),
            Array2::<i32>::zeros((3, 0)).into_dyn(),
        ];
        for array in arrays {
            let start = array.as_ptr();
            let tensor = Tensor::from_ndarray(array.clone());
            assert_eq!((tensor.dtype(), &tensor.shape()[..]), (DType::I32, array.shape()));
            assert_eq!(tensor.to_ndarray::<i32>().unwrap(), array);
            assert_eq!((&tensor + 1).to_ndarray::<i32>().unwrap(), array.mapv(|x| x + 1));
            // Moved in, it stays where it is, if its vector is as large as it has to be.
            let value = Tensor::from_ndarray(array).value().unwrap();
            let buffer = value.storage.cpu().unwrap();
            let first = buffer.elements::<i32>().as_ptr().wrapping_offset(value.layout.offset);
            assert!(value.layout.shape.numel() == 0 || first == start);
        }
        let deep = ArrayD::<f32>::zeros(IxDyn(&[1; 9]));
        assert!(Tensor::from_ndarray(deep).to_f64().unwrap_err().to_string().contains("at most 8 axes"));
        assert!(Tensor::ones(&[2], DType::F32).to_ndarray::<i32>().is_err());
    }
}
