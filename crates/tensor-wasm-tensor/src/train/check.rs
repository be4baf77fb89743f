//! Gradients against slopes.

use std::panic::Location;

use crate::autograd;
use crate::dtype::DType;
use crate::error::{ErrorKind, Result, TensorError};
use crate::tensor::Tensor;

/// How far an element is moved to each side.
const STEP: f64 = 1e-5;

/// How much a gradient and a slope may differ, as a part of the larger or of one.
const TOLERANCE: f64 = 1e-6;

/// Compares the gradients of a function with its slopes, element by element, and returns the largest difference that
/// there was. Inputs are double precision: slopes of anything else are too coarse to tell. What the function returns
/// may have any shape; its elements are added up with weights made by chance.
///
/// ```
/// use tensor_wasm_tensor::{DType, Tensor, check_gradients};
///
/// let x = Tensor::normal(&[3, 4], 1, DType::F64);
/// check_gradients(|inputs| inputs[0].softmax(1), &[x])?;
/// # Ok::<(), tensor_wasm_tensor::TensorError>(())
/// ```
#[track_caller]
pub fn check_gradients(function: impl Fn(&[Tensor]) -> Tensor, inputs: &[Tensor]) -> Result<f64> {
    let at = Location::caller();
    let error = |what| Err(TensorError::new("check_gradients", what, at));
    for input in inputs {
        input.check()?;
        if input.dtype() != DType::F64 {
            return error(ErrorKind::WrongDType { found: input.dtype(), takes: "f64" });
        }
    }
    let weighted = |inputs: &[Tensor]| {
        let made = function(inputs);
        let weights = Tensor::normal(&made.shape(), 0, DType::F64);
        (made.cast(DType::F64) * weights).sum(())
    };
    let asked: Vec<Tensor> = inputs.iter().map(Tensor::with_grad).collect();
    let gradients = autograd::grad(&weighted(&asked), &asked.iter().collect::<Vec<_>>())?;
    let mut largest = 0.0_f64;
    for (number, (input, gradient)) in inputs.iter().zip(gradients).enumerate() {
        let (elements, gradient) = (input.to_f64()?, gradient.to_f64()?);
        for (element, gradient) in gradient.into_iter().enumerate() {
            let moved = |by: f64| -> Result<f64> {
                let mut elements = elements.clone();
                elements[element] += by;
                let mut inputs = inputs.to_vec();
                inputs[number] = Tensor::from_vec(elements, &input.shape());
                // The function may ask for gradients itself.
                let inputs: Vec<Tensor> = inputs.iter().map(Tensor::with_grad).collect();
                weighted(&inputs).item::<f64>()
            };
            let slope = (moved(STEP)? - moved(-STEP)?) / (2.0 * STEP);
            let difference = (gradient - slope).abs() / gradient.abs().max(slope.abs()).max(1.0);
            if difference > TOLERANCE || difference.is_nan() {
                return error(ErrorKind::WrongGradient { input: number, element, gradient, slope });
            }
            largest = largest.max(difference);
        }
    }
    Ok(largest)
}
