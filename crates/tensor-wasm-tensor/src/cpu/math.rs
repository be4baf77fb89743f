//! Functions of floats. Those of single precision are written without branches, so that the compiler makes vectors of
//! them. Fused multiply-adds are written where they are meant, so that results have the same bits whatever vectors
//! there are (a machine without them computes them slowly). Polynomials are minimax fits of our own. Those of double
//! precision are the system's.

/// A float that kernels compute with.
pub(crate) trait Float: Copy + Default + PartialOrd + Send + Sync + 'static {
    fn exp(self) -> Self;
    fn expm1(self) -> Self;
    fn ln(self) -> Self;
    fn ln1p(self) -> Self;
    /// Of several at once: those that are far from zero are no vector's business.
    fn sin<const N: usize>(x: [Self; N]) -> [Self; N];
    fn cos<const N: usize>(x: [Self; N]) -> [Self; N];
    fn tanh(self) -> Self;
    fn erf(self) -> Self;
    fn pow(self, exponent: Self) -> Self;
}

/// Beyond this, sine and cosine are reduced by the system: a product with π/2 in two parts is not exact enough.
const REDUCED_MAX: f32 = 100_000.0;

const ROUND: f32 = 12_582_912.0;
const LN_2: (f32, f32) = (0.693_145_75, 1.428_606_8e-6);

#[inline(always)]
fn polynomial<const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut sum = coefficients[N - 1];
    let mut n = N - 1;
    while n > 0 {
        n -= 1;
        // Rounded once: every machine of ten years and younger does it in one instruction.
        sum = sum.mul_add(x, coefficients[n]);
    }
    sum
}

/// `(e^r - 1 - r) / r²` for `|r| <= ln(2) / 2`.
#[inline(always)]
fn exp_polynomial(r: f32) -> f32 {
    polynomial(r, EXP)
}

const EXP: [f32; 5] = [0.5, 0.166_665_18, 0.041_666_206, 0.008_368_918, 0.001_395_055_4];

/// `(ln(1 + f) - f + f²/2) / f³` for `|f| <= 1/3`.
#[inline(always)]
fn log_polynomial(f: f32) -> f32 {
    polynomial(
        f,
        [
            0.333_332_24,
            -0.249_996_89,
            0.200_100_44,
            -0.166_854_66,
            0.140_109_29,
            -0.121_151_03,
            0.139_624_13,
            -0.131_917_7,
        ],
    )
}

/// `2^n` for an exponent of normal numbers.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23).cast_unsigned())
}

#[inline(always)]
fn exp(x: f32) -> f32 {
    // Written so that NaN stays NaN.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let sum = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = sum.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let whole = sum - ROUND;
    let r = whole.mul_add(-LN_2.1, whole.mul_add(-LN_2.0, x));
    let y = 1.0 + (r * r).mul_add(exp_polynomial(r), r);
    // In two steps, so that what is not normal is rounded once.
    let half = n >> 1;
    y * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// The same for vectors, operation by operation, but for one that scales by a power of two by itself.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "reads and writes elements that the caller promises")]
pub(super) mod x86 {
    use std::arch::x86_64::*;

    use super::{EXP, LN_2, ROUND};

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn exp(x: __m512) -> __m512 {
        let all = |x: f32| _mm512_set1_ps(x);
        // In this order: the second operand is the result where one is NaN.
        let x = _mm512_min_ps(all(89.0), _mm512_max_ps(all(-104.0), x));
        let whole = _mm512_sub_ps(_mm512_fmadd_ps(x, all(std::f32::consts::LOG2_E), all(ROUND)), all(ROUND));
        let r = _mm512_fmadd_ps(whole, all(-LN_2.1), _mm512_fmadd_ps(whole, all(-LN_2.0), x));
        let add = |sum: __m512, coefficient: &f32| _mm512_fmadd_ps(sum, r, all(*coefficient));
        let sum = EXP[..EXP.len() - 1].iter().rev().fold(all(EXP[EXP.len() - 1]), add);
        let y = _mm512_add_ps(all(1.0), _mm512_fmadd_ps(_mm512_mul_ps(r, r), sum, r));
        _mm512_scalef_ps(y, whole)
    }

    /// # Safety
    ///
    /// There are so many elements, and there is room for as many.
    #[target_feature(enable = "avx512f")]
    pub(in crate::cpu) unsafe fn exp_avx512(to: *mut f32, from: *const f32, n: usize) {
        let whole = n & !15;
        for at in (0..whole).step_by(16) {
            // SAFETY: so many are there.
            unsafe { _mm512_storeu_ps(to.add(at), exp(_mm512_loadu_ps(from.add(at)))) };
        }
        let mask: __mmask16 = (1 << (n - whole)) - 1;
        // SAFETY: nothing behind the last is read or written.
        unsafe { _mm512_mask_storeu_ps(to.add(whole), mask, exp(_mm512_maskz_loadu_ps(mask, from.add(whole)))) };
    }
}

#[inline(always)]
fn ln(x: f32) -> f32 {
    const FROM: u32 = 0x3f2a_aaab;
    let is_small = x < f32::MIN_POSITIVE;
    let scaled = if is_small { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits();
    let exponent = bits.wrapping_sub(FROM).cast_signed() >> 23;
    let f = f32::from_bits(bits.wrapping_sub((exponent << 23).cast_unsigned())) - 1.0;
    let e = exponent as f32 - if is_small { 23.0 } else { 0.0 };
    let y = f - (0.5 * f * f - f * f * f * log_polynomial(f));
    let y = e * LN_2.0 + (y + e * LN_2.1);
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x < 0.0 || x.is_nan() { f32::NAN } else { y }
}

/// Sine, or cosine as the sine of a quarter more.
#[inline(always)]
fn sin_or_cos(x: f32, quarters: i32) -> f32 {
    const HIGH: f64 = 1.570_796_326_734_125_6;
    const LOW: f64 = 6.077_100_506_506_192e-11;
    const WIDE_ROUND: f64 = 6_755_399_441_055_744.0;
    let wide = f64::from(x);
    let sum = wide * std::f64::consts::FRAC_2_PI + WIDE_ROUND;
    #[expect(clippy::cast_possible_truncation, reason = "the quarters are in the lowest two bits")]
    let quarter = (sum.to_bits() as u32).cast_signed().wrapping_add(quarters);
    let whole = sum - WIDE_ROUND;
    #[expect(clippy::cast_possible_truncation, reason = "the angle is computed in single precision from here on")]
    let r = ((wide - whole * HIGH) - whole * LOW) as f32;
    let s = r * r;
    let sine = r + r * s * polynomial(s, [-0.166_666_67, 0.008_333_332, -0.000_198_400_4, 2.724_389e-6]);
    let cosine = 1.0 - 0.5 * s + s * s * polynomial(s, [0.041_666_668, -0.001_388_888_8, 2.480_056e-5, -2.729_591e-7]);
    let y = if quarter & 1 == 0 { sine } else { cosine };
    if quarter & 2 == 0 { y } else { -y }
}

/// One function near zero, another one elsewhere.
#[inline(always)]
fn reduced<const N: usize>(x: [f32; N], near: impl Fn(f32) -> f32, far: fn(f32) -> f32) -> [f32; N] {
    let mut y = [0.0; N];
    let mut is_far = false;
    for n in 0..N {
        y[n] = near(x[n]);
        is_far |= x[n].abs() > REDUCED_MAX;
    }
    if is_far {
        for n in 0..N {
            if x[n].abs() > REDUCED_MAX {
                y[n] = far(x[n]);
            }
        }
    }
    y
}

#[inline(always)]
fn tanh(x: f32) -> f32 {
    let size = x.abs();
    let s = x * x;
    let small = x + x * s * polynomial(s, [-0.333_333_2, 0.133_326, -0.053_853_55, 0.021_076_389, -0.006_280_403]);
    let end = if size > 10.0 { 10.0 } else { size };
    let large = (1.0 - 2.0 / (exp(2.0 * end) + 1.0)).copysign(x);
    if size < 0.55 { small } else { large }
}

/// `erf(x) / x` of the square, below 1.
pub(crate) const ERF_SMALL: [f32; 7] = [
    std::f32::consts::FRAC_2_SQRT_PI,
    -0.376_126_26,
    0.112_836,
    -0.026_854_444,
    0.005_189_535,
    -0.000_802_084_1,
    7.889_119e-5,
];

/// `-ln(1 - erf(x))` from 1 to 4; beyond, the result is 1.
pub(crate) const ERF_LARGE: [f32; 8] = [
    -0.000_188_040_24,
    1.129_578_5,
    0.633_219_9,
    0.108_418_58,
    -0.025_208_257,
    0.004_204_562,
    -0.000_441_336_4,
    0.000_021_686_85,
];

#[inline(always)]
fn erf(x: f32) -> f32 {
    let size = x.abs();
    let s = x * x;
    let small = x * polynomial(s, ERF_SMALL);
    let t = if size > 4.0 { 4.0 } else { size };
    let exponent = polynomial(t, ERF_LARGE);
    let large = (1.0 - exp(-exponent)).copysign(x);
    let large = if size > 4.0 { 1_f32.copysign(x) } else { large };
    if size < 1.0 || x.is_nan() { small } else { large }
}

impl Float for f32 {
    #[inline(always)]
    fn exp(self) -> f32 {
        exp(self)
    }

    #[inline(always)]
    fn expm1(self) -> f32 {
        let small = self + self * self * exp_polynomial(self);
        if self.abs() < 0.34 { small } else { exp(self) - 1.0 }
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        ln(self)
    }

    #[inline(always)]
    fn ln1p(self) -> f32 {
        let f = self;
        let small = f - (0.5 * f * f - f * f * f * log_polynomial(f));
        if f.abs() < 0.33 { small } else { ln(1.0 + f) }
    }

    #[inline(always)]
    fn sin<const N: usize>(x: [f32; N]) -> [f32; N] {
        reduced(x, |x| sin_or_cos(x, 0), f32::sin)
    }

    #[inline(always)]
    fn cos<const N: usize>(x: [f32; N]) -> [f32; N] {
        reduced(x, |x| sin_or_cos(x, 1), f32::cos)
    }

    #[inline(always)]
    fn tanh(self) -> f32 {
        tanh(self)
    }

    #[inline(always)]
    fn erf(self) -> f32 {
        erf(self)
    }

    #[inline(always)]
    fn pow(self, exponent: f32) -> f32 {
        self.powf(exponent)
    }
}

impl Float for f64 {
    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn expm1(self) -> f64 {
        self.exp_m1()
    }

    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }

    #[inline(always)]
    fn ln1p(self) -> f64 {
        self.ln_1p()
    }

    #[inline(always)]
    fn sin<const N: usize>(x: [f64; N]) -> [f64; N] {
        x.map(f64::sin)
    }

    #[inline(always)]
    fn cos<const N: usize>(x: [f64; N]) -> [f64; N] {
        x.map(f64::cos)
    }

    #[inline(always)]
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }

    #[inline(always)]
    fn erf(self) -> f64 {
        wide_erf(self)
    }

    #[inline(always)]
    fn pow(self, exponent: f64) -> f64 {
        self.powf(exponent)
    }
}

/// The error function in double precision: a series where it converges fast, a continued fraction of its complement
/// where that does.
pub(crate) fn wide_erf(x: f64) -> f64 {
    let size = x.abs();
    if x.is_nan() || size > 6.0 {
        return if x.is_nan() { x } else { 1_f64.copysign(x) };
    }
    if size < 2.5 {
        // 2/√π · e^(-x²) · Σ 2ⁿ x^(2n+1) / (1·3·…·(2n+1)): all terms have one sign.
        let (mut term, mut sum, mut n) = (size, size, 1.0);
        while term > sum * 1e-17 && n < 400.0 {
            term *= 2.0 * size * size / (2.0 * n + 1.0);
            sum += term;
            n += 1.0;
        }
        return (std::f64::consts::FRAC_2_SQRT_PI * (-size * size).exp() * sum).copysign(x);
    }
    let mut fraction = 0.0;
    for n in (1..=60).rev() {
        fraction = f64::from(n) / 2.0 / (size + fraction);
    }
    let complement = (-size * size).exp() / (size + fraction) * std::f64::consts::FRAC_2_SQRT_PI / 2.0;
    (1.0 - complement).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Units in the last place that a result is from the truth.
    fn ulps(found: f32, truth: f64) -> f64 {
        if f64::from(found) == truth || found.is_nan() && truth.is_nan() {
            return 0.0;
        }
        #[expect(clippy::cast_possible_truncation, reason = "only its size is asked for")]
        let near = truth as f32;
        if near.is_infinite() || found.is_infinite() {
            return if near == found { 0.0 } else { f64::INFINITY };
        }
        let unit = f64::from(f32::from_bits(near.abs().to_bits() + 1)) - f64::from(near.abs());
        ((f64::from(found) - truth) / unit).abs()
    }

    #[test]
    fn functions_are_within_four_units_of_the_truth() {
        type Pair = (&'static str, fn(f32) -> f32, fn(f64) -> f64, f64);
        let functions: [Pair; 8] = [
            ("exp", Float::exp, f64::exp, 2.0),
            ("expm1", Float::expm1, f64::exp_m1, 4.0),
            ("ln", Float::ln, f64::ln, 2.0),
            ("ln1p", Float::ln1p, f64::ln_1p, 4.0),
            ("sin", |x| Float::sin([x])[0], f64::sin, 2.0),
            ("cos", |x| Float::cos([x])[0], f64::cos, 2.0),
            ("tanh", Float::tanh, f64::tanh, 2.5),
            ("erf", Float::erf, wide_erf, 2.5),
        ];
        let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE, 1e-42, f32::MAX];
        for (name, found, truth, most) in functions {
            let mut worst = (0.0, 0.0);
            // Every size of number there is, and those where functions turn.
            let sizes = (0..400_000_u32).map(|n| f32::from_bits(n * 10_007 % 0x7f80_0000));
            let near = (0..400_000).map(|n| n as f32 / 400_000.0 * 20.0);
            for x in sizes.chain(near).flat_map(|x| [x, -x]).chain(special) {
                let off = ulps(found(x), truth(f64::from(x)));
                if off > worst.0 || off.is_nan() {
                    worst = (off, x);
                }
            }
            println!("{name}: {:.2} units at {}", worst.0, worst.1);
            assert!(worst.0 <= most, "{name} of {}: {} units", worst.1, worst.0);
        }
    }

    #[test]
    fn the_wide_error_function_has_its_known_values() {
        // Abramowitz and Stegun, table 7.1, and its limits.
        for (x, erf) in [(0.5, 0.520_499_877_813_046_5), (1.0, 0.842_700_792_949_714_9), (2.0, 0.995_322_265_018_952_7)]
        {
            assert!((wide_erf(x) - erf).abs() < 1e-15 && (wide_erf(-x) + erf).abs() < 1e-15, "{x}");
        }
        assert!((wide_erf(2.5 - 1e-12) - wide_erf(2.5 + 1e-12)).abs() < 1e-14);
        assert_eq!((wide_erf(f64::INFINITY), wide_erf(0.0)), (1.0, 0.0));
    }
}
