//! Products in half precision, everything else in single: what trains as well as single precision does, and is what
//! GPUs multiply fastest.

use std::cell::Cell;

use crate::dtype::DType;
use crate::tensor::{Caller, Tensor};

thread_local! {
    static CAST: Cell<Option<DType>> = const { Cell::new(None) };
}

/// Has products of `f32` tensors that are made inside of a function (`matmul`, attention, convolutions) take operands
/// of another type: [`DType::BF16`] or [`DType::F16`]. They add up in single precision, are rounded once, and are `f32`
/// again. Sums, norms, softmax and losses stay in single precision, and so do variables and what optimizers remember.
/// [`DType::F32`] leaves everything as it is.
///
/// Gradients flow through the casts, so those of products are rounded to the same type. In `f16` small ones are lost:
/// [`GradScaler`](crate::GradScaler) is for that.
///
/// ```
/// use tensor_wasm_tensor::{DType, Tensor, autocast};
///
/// let x = Tensor::full(&[2, 2], 1.0 / 3.0, DType::F32);
/// let y = autocast(DType::BF16, || x.matmul(&x));
/// assert_eq!(y.dtype(), DType::F32);
/// assert_eq!(y.to_vec::<f32>()?[0], 0.222_656_25);
/// # Ok::<(), tensor_wasm_tensor::TensorError>(())
/// ```
pub fn autocast<R>(dtype: DType, run: impl FnOnce() -> R) -> R {
    struct Before(Option<DType>);
    impl Drop for Before {
        fn drop(&mut self) {
            CAST.set(self.0);
        }
    }
    let _before = Before(CAST.replace(Some(dtype)));
    run()
}

/// The type that products of these take instead of their own, if somebody asked for another.
fn asked(operands: &[&Tensor]) -> Option<DType> {
    let dtype = CAST.get().filter(|dtype| *dtype != DType::F32)?;
    operands.iter().all(|operand| operand.dtype() == DType::F32).then_some(dtype)
}

/// Whether products of these take another type than their own.
pub(crate) fn is_cast<const N: usize>(operands: [&Tensor; N]) -> bool {
    asked(&operands).is_some()
}

/// Makes a product from operands, which are cast first if somebody asked for it.
pub(crate) fn product<const N: usize>(
    operands: [&Tensor; N],
    at: Caller,
    make: impl FnOnce([&Tensor; N]) -> Tensor,
) -> Tensor {
    let Some(dtype) = asked(&operands) else { return make(operands) };
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return operands[0].wrong_dtype("autocast", "f16, bf16 or f32 as the type of products", at);
    }
    let cast = operands.map(|operand| operand.cast_to(dtype, at));
    make(cast.each_ref()).cast_to(DType::F32, at)
}
