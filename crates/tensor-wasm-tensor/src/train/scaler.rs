//! Loss scaling: gradients in `f16` lose what is below 6e-8, so losses are multiplied before going backwards, and
//! gradients divided after. By how much is found out on the way.

use std::panic::Location;

use super::Optimizer;
use crate::autograd::no_grad;
use crate::dtype::DType;
use crate::error::{ErrorKind, Result, TensorError};
use crate::tensor::Tensor;

/// Bounds of the scale: beyond them, it or its inverse soon is not finite, and would never be again.
const SCALE_MAX: f64 = 1.0 / SCALE_MIN;
const SCALE_MIN: f64 = 1.0 / 18_446_744_073_709_551_616.0; // 2⁻⁶⁴

/// Scales losses as far as gradients allow. A step whose gradients are not all finite is left out, and the scale
/// becomes smaller; after some steps without any it becomes larger. All of that is part of the plan of a step: nobody
/// waits to hear whether it was left out.
///
/// ```
/// # use tensor_wasm_tensor::{Adam, DType, GradScaler, Optimizer, Tensor, Variable, autocast};
/// # let weight = Variable::new(&Tensor::ones(&[4, 1], DType::F32));
/// # let (x, y) = (Tensor::ones(&[2, 4], DType::F32), Tensor::zeros(&[2, 1], DType::F32));
/// let mut optimizer = Adam::new(&[weight.clone()], 0.01);
/// let mut scaler = GradScaler::new();
/// for _ in 0..3 {
///     let loss = autocast(DType::F16, || x.matmul(&weight.get())).mse_loss(&y);
///     scaler.scale(&loss).backward()?;
///     scaler.step(&mut optimizer)?;
/// }
/// # Ok::<(), tensor_wasm_tensor::TensorError>(())
/// ```
///
/// A scaler is for one optimizer: the scale changes with each of its steps.
pub struct GradScaler {
    /// By what the scale is multiplied after [`GradScaler::growth_steps`] without infinities.
    pub growth: f64,
    /// By what it is multiplied when there are some.
    pub backoff: f64,
    pub growth_steps: i64,
    scale: Tensor,
    /// Steps since the scale changed.
    steps: Tensor,
    /// Whether the gradients that were divided are all finite; none before the next step's are.
    is_finite: Option<Tensor>,
}

impl Default for GradScaler {
    fn default() -> GradScaler {
        GradScaler::new()
    }
}

impl GradScaler {
    pub fn new() -> GradScaler {
        GradScaler::with_scale(65_536.0)
    }

    pub fn with_scale(scale: f64) -> GradScaler {
        GradScaler {
            growth: 2.0,
            backoff: 0.5,
            growth_steps: 2000,
            scale: Tensor::scalar(scale, DType::F32),
            steps: Tensor::scalar(0_i64, DType::I64),
            is_finite: None,
        }
    }

    /// The loss to go backwards from.
    #[track_caller]
    pub fn scale(&self, loss: &Tensor) -> Tensor {
        loss * &self.scale.cast(loss.dtype())
    }

    /// Divides the gradients of an optimizer's variables again. [`GradScaler::step`] does it where nobody else did:
    /// somebody who clips gradients has to before that.
    pub fn unscale(&mut self, optimizer: &dyn Optimizer) -> Result<()> {
        if self.is_finite.is_some() {
            return Ok(());
        }
        let is_finite = no_grad(|| {
            let by = self.scale.recip();
            let mut sum = Tensor::scalar(0.0, DType::F32);
            let variables = optimizer.variables();
            for (n, variable) in variables.iter().enumerate() {
                let tensor = variable.get();
                let is_done = variables[..n].iter().any(|other| other.is(variable));
                let Some(gradient) = tensor.grad().filter(|_| !is_done) else { continue };
                // Zero where it is a number, and no number where it is not.
                sum = sum + (&gradient * 0.0).sum(()).cast(DType::F32);
                tensor.set_grad(Some(&gradient * &by.cast(gradient.dtype())));
            }
            sum.eq(0.0)
        });
        // By itself: what follows may then take the place of what is there.
        is_finite.realize()?;
        self.is_finite = Some(is_finite);
        Ok(())
    }

    /// A step of an optimizer, if all gradients are finite; the scale is made smaller or larger.
    pub fn step(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.unscale(optimizer)?;
        let Some(is_finite) = self.is_finite.clone() else { return Ok(()) };
        // A step that failed finds the gradients divided.
        optimizer.step_if(&is_finite)?;
        self.is_finite = None;
        let (scale, steps) = no_grad(|| {
            let next = &self.steps + 1;
            let is_grown = next.ge(self.growth_steps);
            let grown = is_grown.where_(&self.scale * self.growth, &self.scale).minimum(SCALE_MAX);
            let scale = is_finite.where_(&grown, &self.scale * self.backoff).maximum(SCALE_MIN);
            let is_kept = &is_finite & !&is_grown;
            (scale, is_kept.where_(&next, 0_i64))
        });
        Tensor::realize_all(&[&scale, &steps])?;
        (self.scale, self.steps) = (scale, steps);
        Ok(())
    }

    /// What losses are multiplied by now. Reading it waits for the steps so far.
    #[track_caller]
    pub fn current_scale(&self) -> Result<f64> {
        self.scale.item::<f32>().map(f64::from)
    }

    /// What it remembers, for [`GradScaler::load_state`].
    pub fn state(&self) -> Vec<(String, Tensor)> {
        vec![("scale".to_owned(), self.scale.clone()), ("steps".to_owned(), self.steps.clone())]
    }

    /// Takes back what [`GradScaler::state`] gave.
    #[track_caller]
    pub fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let at = Location::caller();
        let find = |name: &str, dtype: DType| {
            let found = state.iter().find(|(own, _)| own == name).map(|(_, tensor)| tensor);
            let is_one = |tensor: &&Tensor| tensor.numel() == 1 && tensor.dtype() == dtype;
            found.filter(is_one).cloned().ok_or_else(|| {
                let why = format!("there is no {name:?} that is one number of {dtype}");
                TensorError::new("load_state", ErrorKind::BadArgument { why }, at)
            })
        };
        (self.scale, self.steps) = (find("scale", DType::F32)?.reshape(&[]), find("steps", DType::I64)?.reshape(&[]));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::{Adam, Sgd, Variable};
    use crate::{autocast, plans_made};

    fn realized(tensor: Tensor) -> Tensor {
        tensor.realize().unwrap();
        tensor
    }

    /// The loss of a perceptron after some steps in a precision.
    fn trained(precision: DType) -> (f64, f64) {
        let x = realized(Tensor::normal(&[64, 16], 1, DType::F32));
        let y = realized(x.matmul(&Tensor::normal(&[16, 1], 2, DType::F32)).tanh());
        let variables = [
            Variable::new(&realized(Tensor::normal(&[16, 32], 3, DType::F32) * 0.2)),
            Variable::new(&Tensor::zeros(&[32], DType::F32)),
            Variable::new(&realized(Tensor::normal(&[32, 1], 4, DType::F32) * 0.2)),
        ];
        let mut optimizer = Adam::new(&variables, 0.01);
        let mut scaler = GradScaler::new();
        let loss = || {
            let [first, bias, second] = variables.each_ref().map(Variable::get);
            let guess = autocast(precision, || (x.matmul(&first) + bias).relu().matmul(&second));
            // So small that halves would lose its gradients.
            guess.mse_loss(&y) * 1e-4
        };
        let before = f64::from(loss().item::<f32>().unwrap());
        for _ in 0..150 {
            scaler.scale(&loss()).backward().unwrap();
            scaler.step(&mut optimizer).unwrap();
        }
        (before, f64::from(loss().item::<f32>().unwrap()))
    }

    #[test]
    fn half_precision_learns_as_single_precision_does() {
        let (before, single) = trained(DType::F32);
        assert!(single < before / 30.0, "{before} became {single}");
        for precision in [DType::BF16, DType::F16] {
            let (_, half) = trained(precision);
            // A tenth of what is left, and a thousandth of what there was.
            let apart = (half - single).abs();
            assert!(apart < 0.1 * single + 1e-3 * before, "{precision}: {single} in f32, {half}; {before} before");
        }
    }

    #[test]
    fn steps_with_infinities_are_left_out_and_nothing_else_changes() {
        let variable = Variable::new(&realized(Tensor::ones(&[4], DType::F32)));
        let mut optimizer = Sgd::with_momentum(std::slice::from_ref(&variable), 0.5, 0.9, false);
        let mut scaler = GradScaler { growth_steps: 3, ..GradScaler::with_scale(1024.0) };
        let mut plans = 0;
        let mut scales = Vec::new();
        for step in 0..10 {
            let before = variable.get().to_vec::<f32>().unwrap();
            let momentum = optimizer.state().pop().map(|(_, tensor)| tensor.to_f64().unwrap());
            let large = if step == 4 || step == 5 { f64::INFINITY } else { 1.0 };
            scaler.scale(&(variable.get() * large).sum(())).backward().unwrap();
            scaler.step(&mut optimizer).unwrap();
            let is_left_out = before == variable.get().to_vec::<f32>().unwrap();
            assert_eq!(is_left_out, step == 4 || step == 5, "step {step}");
            if is_left_out {
                assert_eq!(optimizer.state().pop().map(|(_, tensor)| tensor.to_f64().unwrap()), momentum);
            }
            scales.push(scaler.current_scale().unwrap());
            if step == 3 {
                plans = plans_made();
            }
        }
        assert_eq!(scales, [1024.0, 1024.0, 2048.0, 2048.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]);
        assert_eq!(plans_made(), plans, "plans that later steps made");
        assert!(variable.get().to_vec::<f32>().unwrap().iter().all(|x| x.is_finite()));
        let mut other = GradScaler::new();
        other.load_state(&scaler.state()).unwrap();
        assert_eq!(other.current_scale().unwrap(), 1024.0);
        assert!(other.load_state(&[]).unwrap_err().to_string().contains("\"scale\""));
    }

    #[test]
    fn what_is_cast_is_said_and_only_products_are() {
        let x = Tensor::full(&[2, 2], 1.0 / 3.0, DType::F32);
        let (product, sum) = autocast(DType::F16, || (x.matmul(&x), (&x + &x).sum(())));
        assert_eq!((product.dtype(), sum.dtype()), (DType::F32, DType::F32));
        let halves = x.cast(DType::F16);
        let expected = halves.matmul(&halves).cast(DType::F32);
        assert_eq!(product.to_vec::<f32>().unwrap(), expected.to_vec::<f32>().unwrap());
        assert_eq!(sum.item::<f32>().unwrap(), (&x + &x).sum(()).item::<f32>().unwrap());
        // Outside of it, and for other types, nothing is.
        assert_ne!(x.matmul(&x).to_vec::<f32>().unwrap(), product.to_vec::<f32>().unwrap());
        let wide = x.cast(DType::F64);
        assert_eq!(autocast(DType::F16, || wide.matmul(&wide)).dtype(), DType::F64);
        let error = autocast(DType::I64, || x.matmul(&x)).check().unwrap_err().to_string();
        assert!(error.contains("autocast") && error.contains("bf16"), "{error}");
    }
}
