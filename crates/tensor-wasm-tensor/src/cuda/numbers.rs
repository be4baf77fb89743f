//! Elements as a kernel computes with them: what each operation is in the compiler's own, for every type. Results are
//! those of the CPU (`cpu/tile.rs`, `cpu/math.rs`) within the tolerance that the tests state; integers are the same.

use tensor_wasm_jit::build::{BinaryOp as B, BuildError, KernelBuilder, MathFunction, UnaryOp as U, Value};
use tensor_wasm_jit::{HalfType, Target, Ty};

pub(super) use crate::cpu::Class;
use crate::cpu::{ERF_LARGE, ERF_SMALL};
use crate::dtype::DType;
use crate::graph::op::{BinaryOp, ReduceOp, UnaryOp};

pub(super) type Built<T> = Result<T, BuildError>;

/// Elements as registers: half precision in single precision; truth and bytes in 32 bits, of which the upper ones are
/// zero.
pub(super) trait Registers {
    fn ty(self) -> Ty;

    /// Bytes of a register, which is what is kept of one between two kernels.
    fn bytes(self) -> u32;

    fn is_float(&self) -> bool;
}

impl Registers for Class {
    fn ty(self) -> Ty {
        match self {
            Class::U8 | Class::I32 => Ty::I32,
            Class::I64 => Ty::I64,
            Class::F32 => Ty::F32,
            Class::F64 => Ty::F64,
        }
    }

    fn bytes(self) -> u32 {
        match self {
            Class::U8 | Class::I32 | Class::F32 => 4,
            Class::I64 | Class::F64 => 8,
        }
    }

    fn is_float(&self) -> bool {
        matches!(self, Class::F32 | Class::F64)
    }
}

/// A type of half precision as the compiler calls it.
pub(super) fn half_type(dtype: DType) -> Option<HalfType> {
    match dtype {
        DType::F16 => Some(HalfType::F16),
        DType::BF16 => Some(HalfType::BF16),
        DType::Bool | DType::U8 | DType::I32 | DType::I64 | DType::F32 | DType::F64 => None,
    }
}

/// Writes operations of numbers.
pub(super) struct Numbers<'b> {
    pub(super) b: &'b mut KernelBuilder,
}

/// The operation of a class among those of integers and floats of both widths.
macro_rules! by_class {
    ($class:expr, $i32:ident $i64:ident $f32:ident $f64:ident) => {
        match $class {
            Class::U8 | Class::I32 => B::$i32,
            Class::I64 => B::$i64,
            Class::F32 => B::$f32,
            Class::F64 => B::$f64,
        }
    };
}

impl Numbers<'_> {
    pub(super) fn int(&mut self, number: u32) -> Built<Value> {
        self.b.i32(number.cast_signed())
    }

    pub(super) fn number(&mut self, class: Class, number: f64) -> Built<Value> {
        match class {
            #[expect(clippy::cast_possible_truncation, reason = "a constant that its type has")]
            Class::U8 | Class::I32 => self.b.i32(number as i32),
            #[expect(clippy::cast_possible_truncation, reason = "a constant that its type has")]
            Class::I64 => self.b.i64(number as i64),
            #[expect(clippy::cast_possible_truncation, reason = "the nearest that there is")]
            Class::F32 => self.b.f32(number as f32),
            Class::F64 => self.b.f64(number),
        }
    }

    fn un(&mut self, op: U, a: Value) -> Built<Value> {
        self.b.unary(op, a)
    }

    fn bin(&mut self, op: B, a: Value, b: Value) -> Built<Value> {
        self.b.binary(op, a, b)
    }

    pub(super) fn add(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        self.bin(by_class!(class, I32Add I64Add F32Add F64Add), a, b)
    }

    pub(super) fn sub(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        self.bin(by_class!(class, I32Sub I64Sub F32Sub F64Sub), a, b)
    }

    pub(super) fn mul(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        self.bin(by_class!(class, I32Mul I64Mul F32Mul F64Mul), a, b)
    }

    fn div(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        self.bin(if class == Class::F32 { B::F32Div } else { B::F64Div }, a, b)
    }

    pub(super) fn lt(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        self.bin(by_class!(class, I32LtS I64LtS F32Lt F64Lt), a, b)
    }

    fn le(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        self.bin(by_class!(class, I32LeS I64LeS F32Le F64Le), a, b)
    }

    pub(super) fn eq(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        self.bin(by_class!(class, I32Eq I64Eq F32Eq F64Eq), a, b)
    }

    pub(super) fn ne(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        self.bin(by_class!(class, I32Ne I64Ne F32Ne F64Ne), a, b)
    }

    pub(super) fn is_nan(&mut self, class: Class, a: Value) -> Built<Value> {
        if class.is_float() { self.ne(class, a, a) } else { self.int(0) }
    }

    /// What is left of an integer of eight bits.
    fn cut(&mut self, class: Class, value: Value) -> Built<Value> {
        if class != Class::U8 {
            return Ok(value);
        }
        let mask = self.int(0xff)?;
        self.bin(B::I32And, value, mask)
    }

    fn abs(&mut self, class: Class, x: Value) -> Built<Value> {
        match class {
            Class::U8 => Ok(x),
            Class::F32 => self.un(U::F32Abs, x),
            Class::F64 => self.un(U::F64Abs, x),
            Class::I32 | Class::I64 => {
                let zero = self.number(class, 0.0)?;
                let (less, is_less) = (self.sub(class, zero, x)?, self.lt(class, x, zero)?);
                self.b.select(is_less, less, x)
            }
        }
    }

    fn math(&mut self, function: MathFunction, operands: &[Value]) -> Built<Value> {
        self.b.math(function, operands)
    }

    /// `((… * x + c[1]) * x) + c[0]`.
    fn polynomial(&mut self, x: Value, coefficients: &[f32]) -> Built<Value> {
        let (last, rest) = coefficients.split_last().unwrap_or((&0.0, &[]));
        let mut sum = self.b.f32(*last)?;
        for coefficient in rest.iter().rev() {
            let next = self.b.f32(*coefficient)?;
            sum = self.b.fma(sum, x, next)?;
        }
        Ok(sum)
    }

    pub(super) fn unary(&mut self, op: UnaryOp, class: Class, x: Value) -> Built<Value> {
        let is_single = class == Class::F32;
        match (op, class.is_float()) {
            (UnaryOp::Neg, true) => self.un(if is_single { U::F32Neg } else { U::F64Neg }, x),
            (UnaryOp::Neg, false) => {
                let zero = self.number(class, 0.0)?;
                let less = self.sub(class, zero, x)?;
                self.cut(class, less)
            }
            (UnaryOp::Abs, _) => self.abs(class, x),
            (UnaryOp::Sign, _) => {
                let (zero, one) = (self.number(class, 0.0)?, self.number(class, 1.0)?);
                let is_more = self.lt(class, zero, x)?;
                if class == Class::U8 {
                    return Ok(is_more);
                }
                let (less, is_less) = (self.number(class, -1.0)?, self.lt(class, x, zero)?);
                // Of a NaN it is a NaN, and of a zero the positive one.
                let neither = if class.is_float() { self.add(class, x, zero)? } else { zero };
                let below = self.b.select(is_less, less, neither)?;
                self.b.select(is_more, one, below)
            }
            (UnaryOp::Not, _) => {
                let one = self.int(1)?;
                self.bin(B::I32Xor, x, one)
            }
            // Whole numbers are rounded already; the rest is not for integers.
            (_, false) => Ok(x),
            (UnaryOp::Floor, true) => self.un(if is_single { U::F32Floor } else { U::F64Floor }, x),
            (UnaryOp::Round, true) => self.un(if is_single { U::F32Nearest } else { U::F64Nearest }, x),
            (UnaryOp::Recip, true) => {
                let one = self.number(class, 1.0)?;
                self.div(class, one, x)
            }
            (UnaryOp::Sqrt, true) => self.un(if is_single { U::F32Sqrt } else { U::F64Sqrt }, x),
            (UnaryOp::Rsqrt, true) => {
                let root = self.un(if is_single { U::F32Sqrt } else { U::F64Sqrt }, x)?;
                let one = self.number(class, 1.0)?;
                self.div(class, one, root)
            }
            (UnaryOp::Exp, true) => self.math(MathFunction::Exp, &[x]),
            (UnaryOp::Ln, true) => self.math(MathFunction::Log, &[x]),
            (UnaryOp::Sin, true) => self.math(MathFunction::Sin, &[x]),
            (UnaryOp::Cos, true) => self.math(MathFunction::Cos, &[x]),
            (UnaryOp::Tanh, true) => self.math(MathFunction::Tanh, &[x]),
            (UnaryOp::Expm1, true) => self.expm1(class, x),
            (UnaryOp::Ln1p, true) => self.ln1p(class, x),
            (UnaryOp::Erf, true) => {
                if is_single {
                    self.erf_single(x)
                } else {
                    self.erf_double(x)
                }
            }
        }
    }

    /// `e^x` of single precision whose result is kept in half precision: by the device's own power of two. What is lost
    /// is at most 2 ulp of single precision and a rounding of the exponent, 2^-17 of the result where that is not zero.
    pub(super) fn exp_to_half(&mut self, x: Value) -> Built<Value> {
        let scale = self.b.f32(std::f32::consts::LOG2_E)?;
        let power = self.mul(Class::F32, x, scale)?;
        self.b.exp2_approximate(power)
    }

    /// The error function where the result is kept in half precision: one less a power of two, whose exponent is a
    /// polynomial. Its relative error is below 1e-4, and so is that of its complement. Products are followed by it,
    /// so it is short.
    pub(super) fn erf_to_half(&mut self, x: Value) -> Built<Value> {
        // Of log2(erfc(-z)) / z, for z from -4 on; before, one is nearer than half precision can tell.
        const EXPONENT: [f32; 6] =
            [1.627_776_5, -0.919_320_5, 0.148_100_38, 0.030_368_954, 0.003_810_133_6, 0.000_213_613_98];
        let (size, end) = (self.abs(Class::F32, x)?, self.b.f32(-4.0)?);
        let below = self.un(U::F32Neg, size)?;
        // The larger of a NaN and a number is a NaN, which stays one to the end.
        let near = self.larger(Class::F32, below, end)?;
        let exponent = self.polynomial(near, &EXPONENT)?;
        let exponent = self.mul(Class::F32, exponent, near)?;
        let rest = self.b.exp2_approximate(exponent)?;
        let one = self.b.f32(1.0)?;
        let large = self.sub(Class::F32, one, rest)?;
        let large = self.bin(B::F32Copysign, large, x)?;
        // What is left of a small one is a straight line.
        let (small_end, slope) = (self.b.f32(1.0 / 256.0)?, self.b.f32(std::f32::consts::FRAC_2_SQRT_PI)?);
        let (is_small, small) = (self.lt(Class::F32, size, small_end)?, self.mul(Class::F32, x, slope)?);
        self.b.select(is_small, small, large)
    }

    /// `e^x - 1`: what is lost by the subtraction is made good by what the logarithm says the exponential was of.
    fn expm1(&mut self, class: Class, x: Value) -> Built<Value> {
        let (one, infinity) = (self.number(class, 1.0)?, self.number(class, f64::INFINITY)?);
        let exp = self.math(MathFunction::Exp, &[x])?;
        let less = self.sub(class, exp, one)?;
        let log = self.math(MathFunction::Log, &[exp])?;
        let (part, minus_one) = (self.div(class, x, log)?, self.number(class, -1.0)?);
        let mended = self.mul(class, less, part)?;
        let is_tiny = self.eq(class, exp, one)?;
        let mended = self.b.select(is_tiny, x, mended)?;
        let is_low = self.eq(class, less, minus_one)?;
        let mended = self.b.select(is_low, minus_one, mended)?;
        let is_high = self.eq(class, exp, infinity)?;
        self.b.select(is_high, infinity, mended)
    }

    /// `ln(1 + x)`, likewise.
    fn ln1p(&mut self, class: Class, x: Value) -> Built<Value> {
        let (one, infinity) = (self.number(class, 1.0)?, self.number(class, f64::INFINITY)?);
        let more = self.add(class, one, x)?;
        let log = self.math(MathFunction::Log, &[more])?;
        let seen = self.sub(class, more, one)?;
        let part = self.div(class, x, seen)?;
        let mended = self.mul(class, log, part)?;
        let is_tiny = self.eq(class, more, one)?;
        let mended = self.b.select(is_tiny, x, mended)?;
        let is_high = self.eq(class, more, infinity)?;
        self.b.select(is_high, infinity, mended)
    }

    fn erf_single(&mut self, x: Value) -> Built<Value> {
        let class = Class::F32;
        let size = self.abs(class, x)?;
        let square = self.mul(class, x, x)?;
        let small = self.polynomial(square, &ERF_SMALL)?;
        let small = self.mul(class, x, small)?;
        let (one, end) = (self.b.f32(1.0)?, self.b.f32(4.0)?);
        let is_beyond = self.lt(class, end, size)?;
        let near = self.b.select(is_beyond, end, size)?;
        let exponent = self.polynomial(near, &ERF_LARGE)?;
        let exponent = self.un(U::F32Neg, exponent)?;
        let rest = self.math(MathFunction::Exp, &[exponent])?;
        let large = self.sub(class, one, rest)?;
        let large = self.b.select(is_beyond, one, large)?;
        let large = self.bin(B::F32Copysign, large, x)?;
        let (is_small, is_nan) = (self.lt(class, size, one)?, self.is_nan(class, x)?);
        let is_small = self.bin(B::I32Or, is_small, is_nan)?;
        self.b.select(is_small, small, large)
    }

    /// A series where it converges fast, a continued fraction of the complement where that does.
    fn erf_double(&mut self, x: Value) -> Built<Value> {
        const TERMS: u32 = 70;
        const FRACTIONS: u32 = 60;
        let class = Class::F64;
        let size = self.abs(class, x)?;
        let (end, one, two) = (self.b.f64(6.0)?, self.b.f64(1.0)?, self.b.f64(2.0)?);
        let is_beyond = self.lt(class, end, size)?;
        let size = self.b.select(is_beyond, end, size)?;
        let square = self.mul(class, size, size)?;
        let negative = self.un(U::F64Neg, square)?;
        let exp = self.math(MathFunction::Exp, &[negative])?;
        let middle = self.b.f64(2.5)?;
        let is_near = self.lt(class, size, middle)?;
        let small = self.b.select(is_near, size, one)?;
        let twice = self.mul(class, small, small)?;
        let twice = self.mul(class, twice, two)?;
        let (term, sum) = (self.b.variable(small)?, self.b.variable(small)?);
        let count = self.int(TERMS)?;
        self.b.count_to::<BuildError>(count, &[term, sum], |b, n| {
            let n = b.unary(U::F64ConvertI32U, n)?;
            let (two, three) = (b.f64(2.0)?, b.f64(3.0)?);
            let below = b.fma(n, two, three)?;
            let (old, before) = (b.get(term)?, b.get(sum)?);
            let next = b.binary(B::F64Mul, old, twice)?;
            let next = b.binary(B::F64Div, next, below)?;
            let more = b.binary(B::F64Add, before, next)?;
            b.set(term, next)?;
            b.set(sum, more)
        })?;
        let sum = self.b.get(sum)?;
        let scale = self.b.f64(std::f64::consts::FRAC_2_SQRT_PI)?;
        let series = self.mul(class, exp, sum)?;
        let series = self.mul(class, series, scale)?;
        let zero = self.b.f64(0.0)?;
        let fraction = self.b.variable(zero)?;
        let count = self.int(FRACTIONS)?;
        self.b.count_to::<BuildError>(count, &[fraction], |b, n| {
            let n = b.unary(U::F64ConvertI32U, n)?;
            let (from, half) = (b.f64(f64::from(FRACTIONS))?, b.f64(0.5)?);
            let above = b.binary(B::F64Sub, from, n)?;
            let above = b.binary(B::F64Mul, above, half)?;
            let old = b.get(fraction)?;
            let below = b.binary(B::F64Add, size, old)?;
            let next = b.binary(B::F64Div, above, below)?;
            b.set(fraction, next)
        })?;
        let fraction = self.b.get(fraction)?;
        let below = self.add(class, size, fraction)?;
        let complement = self.div(class, exp, below)?;
        let half = self.b.f64(std::f64::consts::FRAC_2_SQRT_PI / 2.0)?;
        let complement = self.mul(class, complement, half)?;
        let large = self.sub(class, one, complement)?;
        let found = self.b.select(is_near, series, large)?;
        let found = self.b.select(is_beyond, one, found)?;
        let found = self.bin(B::F64Copysign, found, x)?;
        let is_nan = self.is_nan(class, x)?;
        self.b.select(is_nan, x, found)
    }

    /// Also comparisons, which are 1 or 0. An integer divided by zero calls `failed`.
    pub(super) fn binary(
        &mut self,
        op: BinaryOp,
        class: Class,
        a: Value,
        b: Value,
        failed: &mut dyn FnMut(&mut Numbers<'_>, Value) -> Built<()>,
    ) -> Built<Value> {
        match op {
            BinaryOp::Add => {
                let sum = self.add(class, a, b)?;
                self.cut(class, sum)
            }
            BinaryOp::Sub => {
                let difference = self.sub(class, a, b)?;
                self.cut(class, difference)
            }
            BinaryOp::Mul => {
                let product = self.mul(class, a, b)?;
                self.cut(class, product)
            }
            BinaryOp::Div if class.is_float() => self.div(class, a, b),
            BinaryOp::Rem if class.is_float() => self.float_modulo(class, a, b),
            BinaryOp::Div | BinaryOp::Rem => self.int_divide(op, class, a, b, failed),
            BinaryOp::Pow => self.math(MathFunction::Pow, &[a, b]),
            BinaryOp::Max | BinaryOp::Or => self.larger(class, a, b),
            BinaryOp::Min | BinaryOp::And => self.smaller(class, a, b),
            BinaryOp::Eq => self.eq(class, a, b),
            BinaryOp::Lt => self.lt(class, a, b),
            BinaryOp::Le => self.le(class, a, b),
        }
    }

    pub(super) fn larger(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        match class {
            Class::F32 if self.b.target() >= Target::Ampere => self.b.max_single(a, b),
            Class::F32 => self.bin(B::F32Max, a, b),
            Class::F64 => self.bin(B::F64Max, a, b),
            Class::U8 | Class::I32 | Class::I64 => {
                let is_less = self.lt(class, a, b)?;
                self.b.select(is_less, b, a)
            }
        }
    }

    pub(super) fn smaller(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        match class {
            Class::F32 => self.bin(B::F32Min, a, b),
            Class::F64 => self.bin(B::F64Min, a, b),
            Class::U8 | Class::I32 | Class::I64 => {
                let is_less = self.lt(class, a, b)?;
                self.b.select(is_less, a, b)
            }
        }
    }

    /// The quotient, cut towards zero, or what is left, with the divisor's sign. The smallest integer by -1 wraps.
    fn int_divide(
        &mut self,
        op: BinaryOp,
        class: Class,
        a: Value,
        b: Value,
        failed: &mut dyn FnMut(&mut Numbers<'_>, Value) -> Built<()>,
    ) -> Built<Value> {
        let (zero, one, less_one) = (self.number(class, 0.0)?, self.number(class, 1.0)?, self.number(class, -1.0)?);
        let is_zero = self.eq(class, b, zero)?;
        failed(self, is_zero)?;
        let is_less_one = self.eq(class, b, less_one)?;
        let is_easy = self.bin(B::I32Or, is_zero, is_less_one)?;
        // Neither of them is divided by.
        let divisor = self.b.select(is_easy, one, b)?;
        if op == BinaryOp::Div {
            let quotient = self.bin(if class == Class::I64 { B::I64DivS } else { B::I32DivS }, a, divisor)?;
            let negative = self.sub(class, zero, a)?;
            return self.b.select(is_less_one, negative, quotient);
        }
        let rest = self.bin(if class == Class::I64 { B::I64RemS } else { B::I32RemS }, a, divisor)?;
        self.with_sign_of(class, rest, b)
    }

    /// What is left of a division, with the divisor's sign.
    fn with_sign_of(&mut self, class: Class, rest: Value, divisor: Value) -> Built<Value> {
        let zero = self.number(class, 0.0)?;
        let (is_left, is_below) = (self.ne(class, rest, zero)?, self.lt(class, rest, zero)?);
        let other_below = self.lt(class, divisor, zero)?;
        let differ = self.bin(B::I32Xor, is_below, other_below)?;
        let differ = self.bin(B::I32And, is_left, differ)?;
        let more = self.add(class, rest, divisor)?;
        self.b.select(differ, more, rest)
    }

    /// Exact, however far apart they are: multiples of the divisor are taken off from the largest on.
    fn float_modulo(&mut self, class: Class, a: Value, b: Value) -> Built<Value> {
        const STEP: f64 = 67_108_864.0;
        let wide = Class::F64;
        let widen = |n: &mut Self, x: Value| if class == Class::F32 { n.un(U::F64PromoteF32, x) } else { Ok(x) };
        let (wide_a, wide_b) = (widen(self, a)?, widen(self, b)?);
        let (size, divisor) = (self.abs(wide, wide_a)?, self.abs(wide, wide_b)?);
        let (zero, infinity) = (self.b.f64(0.0)?, self.b.f64(f64::INFINITY)?);
        let (is_divisor, is_finite) = (self.lt(wide, zero, divisor)?, self.lt(wide, size, infinity)?);
        let is_possible = self.bin(B::I32And, is_divisor, is_finite)?;
        let is_smaller = self.lt(wide, divisor, infinity)?;
        let goes = self.bin(B::I32And, is_possible, is_smaller)?;
        let rest = self.b.variable(size)?;
        self.b.begin_if(goes, &[rest])?;
        let again = self.b.begin_loop(&[rest])?;
        let left = self.b.get(rest)?;
        let has_more = self.le(wide, divisor, left)?;
        self.b.begin_if(has_more, &[rest])?;
        // The largest of the multiples that is no larger.
        let multiple = self.b.variable(divisor)?;
        let larger = self.b.begin_loop(&[multiple])?;
        let now = self.b.get(multiple)?;
        let step = self.b.f64(STEP)?;
        let next = self.mul(wide, now, step)?;
        let fits = self.le(wide, next, left)?;
        let kept = self.b.select(fits, next, now)?;
        self.b.set(multiple, kept)?;
        self.b.branch_if(fits, larger)?;
        self.b.end()?;
        let multiple = self.b.get(multiple)?;
        let quotient = self.div(wide, left, multiple)?;
        let quotient = self.un(U::F64Trunc, quotient)?;
        let negative = self.un(U::F64Neg, quotient)?;
        let now_left = self.b.fma(negative, multiple, left)?;
        // One too many, by the quotient's rounding.
        let zero = self.b.f64(0.0)?;
        let is_too_many = self.lt(wide, now_left, zero)?;
        let mended = self.add(wide, now_left, multiple)?;
        let now_left = self.b.select(is_too_many, mended, now_left)?;
        self.b.set(rest, now_left)?;
        self.b.branch(again)?;
        self.b.end()?;
        self.b.end()?;
        self.b.end()?;
        let rest = self.b.get(rest)?;
        let rest = self.bin(B::F64Copysign, rest, wide_a)?;
        let nan = self.b.f64(f64::NAN)?;
        let rest = self.b.select(is_possible, rest, nan)?;
        let (a_nan, b_nan) = (self.is_nan(wide, wide_a)?, self.is_nan(wide, wide_b)?);
        let is_nan = self.bin(B::I32Or, a_nan, b_nan)?;
        let rest = self.b.select(is_nan, nan, rest)?;
        let rest = if class == Class::F32 { self.un(U::F32DemoteF64, rest)? } else { rest };
        self.with_sign_of(class, rest, b)
    }

    /// What a reduction begins with.
    pub(super) fn start(&mut self, op: ReduceOp, class: Class) -> Built<Value> {
        match (op, class) {
            (ReduceOp::Sum, _) => self.number(class, 0.0),
            (ReduceOp::Prod, _) => self.number(class, 1.0),
            (ReduceOp::Max, Class::U8) => self.int(0),
            (ReduceOp::Min, Class::U8) => self.int(0xff),
            (ReduceOp::Max, Class::I32) => self.b.i32(i32::MIN),
            (ReduceOp::Min, Class::I32) => self.b.i32(i32::MAX),
            (ReduceOp::Max, Class::I64) => self.b.i64(i64::MIN),
            (ReduceOp::Min, Class::I64) => self.b.i64(i64::MAX),
            (ReduceOp::Max, Class::F32 | Class::F64) => self.number(class, f64::NEG_INFINITY),
            (ReduceOp::Min, Class::F32 | Class::F64) => self.number(class, f64::INFINITY),
        }
    }

    pub(super) fn reduce(&mut self, op: ReduceOp, class: Class, a: Value, b: Value) -> Built<Value> {
        match op {
            ReduceOp::Sum => self.add(class, a, b),
            ReduceOp::Prod => self.mul(class, a, b),
            ReduceOp::Max => self.larger(class, a, b),
            ReduceOp::Min => self.smaller(class, a, b),
        }
    }

    /// Floats go to the nearest integer there is, NaN to zero; integers wrap.
    pub(super) fn cast(&mut self, from: DType, to: DType, x: Value) -> Built<Value> {
        let class = Class::of(from);
        match to {
            DType::Bool => {
                let zero = self.number(class, 0.0)?;
                self.ne(class, x, zero)
            }
            DType::U8 => match class {
                Class::U8 => Ok(x),
                Class::I32 => self.cut(Class::U8, x),
                Class::I64 => {
                    let low = self.un(U::I32WrapI64, x)?;
                    self.cut(Class::U8, low)
                }
                Class::F32 | Class::F64 => {
                    let whole =
                        self.un(if class == Class::F32 { U::I32TruncSatF32S } else { U::I32TruncSatF64S }, x)?;
                    let (zero, most) = (self.int(0)?, self.int(0xff)?);
                    let whole = self.larger(Class::I32, whole, zero)?;
                    self.smaller(Class::I32, whole, most)
                }
            },
            DType::I32 => match class {
                Class::U8 | Class::I32 => Ok(x),
                Class::I64 => self.un(U::I32WrapI64, x),
                Class::F32 => self.un(U::I32TruncSatF32S, x),
                Class::F64 => self.un(U::I32TruncSatF64S, x),
            },
            DType::I64 => match class {
                Class::U8 | Class::I32 => self.un(U::I64ExtendI32S, x),
                Class::I64 => Ok(x),
                Class::F32 => self.un(U::I64TruncSatF32S, x),
                Class::F64 => self.un(U::I64TruncSatF64S, x),
            },
            DType::F16 | DType::BF16 => {
                let single = self.cast(from, DType::F32, x)?;
                let half = self.single_to_half(to, single)?;
                self.half_to_single(to, half)
            }
            DType::F32 => match class {
                Class::U8 | Class::I32 => self.un(U::F32ConvertI32S, x),
                Class::I64 => self.un(U::F32ConvertI64S, x),
                Class::F32 => Ok(x),
                Class::F64 => self.un(U::F32DemoteF64, x),
            },
            DType::F64 => match class {
                Class::U8 | Class::I32 => self.un(U::F64ConvertI32S, x),
                Class::I64 => self.un(U::F64ConvertI64S, x),
                Class::F32 => self.un(U::F64PromoteF32, x),
                Class::F64 => Ok(x),
            },
        }
    }

    /// Half precision, in the lower half of an integer whose upper half is zero, as single precision.
    pub(super) fn half_to_single(&mut self, dtype: DType, bits: Value) -> Built<Value> {
        if dtype == DType::BF16 {
            let shift = self.int(16)?;
            let bits = self.bin(B::I32Shl, bits, shift)?;
            return self.un(U::F32ReinterpretI32, bits);
        }
        self.b.unpack_half(HalfType::F16, bits, false)
    }

    /// To the nearest, ties to even; in the lower half of an integer whose upper half is zero.
    pub(super) fn single_to_half(&mut self, dtype: DType, x: Value) -> Built<Value> {
        if let Some(half) = half_type(dtype).filter(|_| self.b.target() >= Target::Ampere) {
            let zero = self.b.f32(0.0)?;
            return self.b.pack_halves(half, x, zero);
        }
        let is_nan = self.is_nan(Class::F32, x)?;
        let bits = self.un(U::I32ReinterpretF32, x)?;
        let (one, sixteen) = (self.int(1)?, self.int(16)?);
        if dtype == DType::BF16 {
            let (half, quiet) = (self.int(0x7fff)?, self.int(0x40)?);
            let upper = self.bin(B::I32ShrU, bits, sixteen)?;
            let odd = self.bin(B::I32And, upper, one)?;
            let more = self.bin(B::I32Add, bits, half)?;
            let more = self.bin(B::I32Add, more, odd)?;
            let rounded = self.bin(B::I32ShrU, more, sixteen)?;
            let nan = self.bin(B::I32Or, upper, quiet)?;
            return self.b.select(is_nan, nan, rounded);
        }
        let sign_mask = self.int(0x8000)?;
        let sign = self.bin(B::I32ShrU, bits, sixteen)?;
        let sign = self.bin(B::I32And, sign, sign_mask)?;
        let size = self.un(U::F32Abs, x)?;
        let size_bits = self.un(U::I32ReinterpretF32, size)?;
        let (shift, bias, half) = (self.int(13)?, self.int(112 << 23)?, self.int(0xfff)?);
        let odd = self.bin(B::I32ShrU, size_bits, shift)?;
        let odd = self.bin(B::I32And, odd, one)?;
        let normal = self.bin(B::I32Add, size_bits, half)?;
        let normal = self.bin(B::I32Add, normal, odd)?;
        let normal = self.bin(B::I32Sub, normal, bias)?;
        let normal = self.bin(B::I32ShrU, normal, shift)?;
        // Adding one half leaves the bits of a subnormal number at the end, rounded.
        let (point_five, small_mask) = (self.b.f32(0.5)?, self.int(0x7ff)?);
        let small = self.add(Class::F32, size, point_five)?;
        let small = self.un(U::I32ReinterpretF32, small)?;
        let small = self.bin(B::I32And, small, small_mask)?;
        let (least, most) = (self.b.f32(6.103_515_6e-5)?, self.b.f32(65_520.0)?);
        let is_small = self.lt(Class::F32, size, least)?;
        let finite = self.b.select(is_small, small, normal)?;
        let (is_large, infinity) = (self.le(Class::F32, most, size)?, self.int(0x7c00)?);
        let found = self.b.select(is_large, infinity, finite)?;
        let nan = self.int(0x7e00)?;
        let found = self.b.select(is_nan, nan, found)?;
        self.bin(B::I32Or, found, sign)
    }

    /// A random number from 0 up to 1, from a seed of 64 bits and an element's number, as `random.rs` makes it.
    pub(super) fn uniform(&mut self, seed: Value, element: Value) -> Built<Value> {
        const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
        const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
        let (two, three, half) = (self.int(2)?, self.int(3)?, self.b.i64(32)?);
        let block = self.bin(B::I32ShrU, element, two)?;
        let lane = self.bin(B::I32And, element, three)?;
        let high = self.bin(B::I64ShrU, seed, half)?;
        let mut key = [self.un(U::I32WrapI64, seed)?, self.un(U::I32WrapI64, high)?];
        let zero = self.int(0)?;
        let mut counter = [block, zero, zero, zero];
        for _ in 0..10 {
            let mut products = [(zero, zero); 2];
            for (n, product) in products.iter_mut().enumerate() {
                let by = self.b.i64(i64::from(MULTIPLIERS[n]))?;
                let wide = self.un(U::I64ExtendI32U, counter[2 * n])?;
                let wide = self.bin(B::I64Mul, wide, by)?;
                let upper = self.bin(B::I64ShrU, wide, half)?;
                *product = (self.un(U::I32WrapI64, upper)?, self.un(U::I32WrapI64, wide)?);
            }
            let [(a_high, a_low), (b_high, b_low)] = products;
            let first = self.bin(B::I32Xor, b_high, counter[1])?;
            let first = self.bin(B::I32Xor, first, key[0])?;
            let third = self.bin(B::I32Xor, a_high, counter[3])?;
            let third = self.bin(B::I32Xor, third, key[1])?;
            counter = [first, b_low, third, a_low];
            for (key, weyl) in key.iter_mut().zip(WEYL) {
                let weyl = self.int(weyl)?;
                *key = self.bin(B::I32Add, *key, weyl)?;
            }
        }
        let mut bits = counter[0];
        for (n, word) in (1..).zip(&counter[1..]) {
            let number = self.int(n)?;
            let is_it = self.bin(B::I32Eq, lane, number)?;
            bits = self.b.select(is_it, *word, bits)?;
        }
        let eight = self.int(8)?;
        let bits = self.bin(B::I32ShrU, bits, eight)?;
        let whole = self.un(U::F32ConvertI32U, bits)?;
        let scale = self.b.f32(1.0 / 16_777_216.0)?;
        self.mul(Class::F32, whole, scale)
    }
}
