//! Sine and cosine, of every finite number: what is left of it after quarter turns, and which quarter that is. Small
//! ones are reduced by a quarter turn in several parts, the products of which are exact; large ones by as many bits of
//! 2/π as matter, in integers, on a path of its own.

use super::{DOUBLE, Expand};
use crate::ir::{Bin, Op, Reg, Ty, Un};

/// A quarter turn in parts of 33 bits each, and the rest.
const QUARTER: [f64; 4] =
    [1.570_796_326_734_125_6, 6.077_100_506_303_966e-11, 2.022_266_248_711_166_5e-21, 8.478_427_660_368_9e-32];

/// The same with a rest after the first part only.
const QUARTER_REST: f64 = 6.077_100_506_506_192e-11;

/// What is beyond the 53 bits of π/2.
const QUARTER_LOW: f64 = 6.123_233_995_736_766e-17;

/// Quarter turns up to here have no more than 19 bits, so that the products are exact.
const LARGE: f64 = 524_288.0;

/// 2/π, with 64 zeros before it.
const QUARTERS: [u64; 20] = [
    0x0000_0000_0000_0000,
    0xa2f9_836e_4e44_1529,
    0xfc27_57d1_f534_ddc0,
    0xdb62_9599_3c43_9041,
    0xfe51_63ab_debb_c561,
    0xb724_6e3a_424d_d2e0,
    0x0649_2eea_09d1_921c,
    0xfe1d_eb1c_b129_a73e,
    0xe882_35f5_2ebb_4484,
    0xe99c_7026_b45f_7e41,
    0x3991_d639_8353_39f4,
    0x9c84_5f8b_bdf9_283b,
    0x1ff8_97ff_de05_980f,
    0xef2f_118b_5a0a_6d1f,
    0x6d36_7ecf_27cb_09b7,
    0x4f46_3f66_9e5f_ea2d,
    0x7527_bac7_ebe5_f17b,
    0x3d07_39f7_8a52_92ea,
    0x6bfb_5fb1_1f8d_5d08,
    0x5603_3046_fc7b_6bab,
];

/// `(sin(r) / r - 1) / r²` and `(cos(r) - 1) / r²` of the square, for a result in single precision.
const SIN_SINGLE: [f64; 4] =
    [-0.166_666_666_416_062_93, 0.008_333_329_383_491_435, -0.000_198_393_340_540_902_03, 2.718_303_965_672_374e-6];
const COS_SINGLE: [f64; 4] =
    [-0.499_999_997_248_811_4, 0.041_666_623_297_414_25, -0.001_388_676_291_593_247_3, 2.439_036_612_289_047_7e-5];

/// `(sin(r) / r - 1) / r²` and `(cos(r) - 1 + r²/2) / r⁴`.
const SIN_DOUBLE: [f64; 6] = [
    -0.166_666_666_666_666_32,
    0.008_333_333_333_322_413,
    -0.000_198_412_698_298_077_78,
    2.755_731_369_191_555e-6,
    -2.505_075_811_569_819_2e-8,
    1.589_679_571_348_956_8e-10,
];
const COS_DOUBLE: [f64; 6] = [
    0.041_666_666_666_666_6,
    -0.001_388_888_888_887_412_5,
    2.480_158_728_948_234e-5,
    -2.755_731_435_237_217_3e-7,
    2.087_572_327_813_223_5e-9,
    -1.135_964_804_227_16e-11,
];

impl Expand<'_> {
    /// In double precision in either case: of single precision the polynomials are shorter and nothing is lost.
    pub(super) fn sin_or_cos(&mut self, x: Reg, is_cos: bool) -> Reg {
        let is_single = self.n.ty == Ty::F32;
        self.n = &DOUBLE;
        let x = if is_single { self.un(Un::F64PromoteF32, x) } else { x };
        let size = self.abs(x);
        let quotient = self.times(size, std::f64::consts::FRAC_2_PI);
        let round = self.number(self.n.round);
        let sum = self.add(quotient, round);
        let whole = self.sub(sum, round);
        // The quarters are in the last bits.
        let quarters = self.bits(sum);
        let (r, low) = if is_single {
            let first = self.times(whole, QUARTER[0]);
            let r = self.sub(size, first);
            let rest = self.times(whole, QUARTER_REST);
            (self.sub(r, rest), None)
        } else {
            let (r, low) = self.reduce(size, whole);
            (r, Some(low))
        };
        // Both ways come together in these.
        let merged = |own: &mut Self, from: Reg| {
            let to = own.asm.register(own.asm.types[from.0 as usize]);
            own.asm.push(Op::Move { to, from });
            to
        };
        let (quarters, r, low) = (merged(self, quarters), merged(self, r), low.map(|low| merged(self, low)));
        let bits = self.bits(size);
        let (large, infinity) = (self.int(LARGE.to_bits()), self.int(f64::INFINITY.to_bits() - LARGE.to_bits()));
        let beyond = self.int_sub(bits, large);
        let is_large = self.int_lt_u(beyond, infinity);
        let label = self.asm.label();
        self.asm.push(Op::If { condition: is_large, label });
        let found = match low {
            Some(low) => {
                let (found, more, less) = self.reduce_large_double(bits);
                self.asm.push(Op::Move { to: low, from: less });
                (found, more)
            }
            None => self.reduce_large_single(bits),
        };
        self.asm.push(Op::Move { to: quarters, from: found.0 });
        self.asm.push(Op::Move { to: r, from: found.1 });
        self.asm.push(Op::End { label });
        // The cosine is a quarter ahead.
        let one = self.int(1);
        let quarters = if is_cos { self.int_add(quarters, one) } else { quarters };
        let is_odd = self.int_and(quarters, one);
        let is_odd = self.un(Un::I32WrapI64, is_odd);
        let found = match low {
            Some(low) => self.near_double(r, low, is_odd),
            None => self.near_single(r, is_odd),
        };
        // Every second quarter has the other sign, and the sine that of its operand.
        let (up, top) = (self.int(62), self.int(1 << 63));
        let mut sign = self.int_shl(quarters, up);
        if !is_cos {
            let own = self.bits(x);
            sign = self.int_xor(sign, own);
        }
        let sign = self.int_and(sign, top);
        let one = self.int(self.one_bits());
        let sign = self.int_or(sign, one);
        let sign = self.of_bits(sign);
        let found = self.mul(found, sign);
        if is_single { self.un(Un::F32DemoteF64, found) } else { found }
    }

    /// A polynomial with one set of coefficients or the other.
    fn either(&mut self, x: Reg, condition: Reg, yes: &[f64], no: &[f64]) -> Reg {
        let mut sum = None;
        for (yes, no) in yes.iter().zip(no).rev() {
            let (yes, no) = (self.number(*yes), self.number(*no));
            let next = self.select(condition, yes, no);
            sum = Some(match sum {
                None => next,
                Some(sum) => {
                    let product = self.mul(sum, x);
                    self.add(product, next)
                }
            });
        }
        sum.unwrap_or(x)
    }

    /// The sine, or the cosine, of no more than half a quarter turn.
    fn near_single(&mut self, r: Reg, is_cos: Reg) -> Reg {
        let (square, one) = (self.mul(r, r), self.number(1.0));
        let rest = self.either(square, is_cos, &COS_SINGLE, &SIN_SINGLE);
        let rest = self.mul(square, rest);
        let rest = self.add(one, rest);
        let factor = self.select(is_cos, one, r);
        self.mul(factor, rest)
    }

    /// The same of a sum of two numbers. The sine is `r + (low + r³…)`, the cosine `1 - r²/2 + (lost - r * low + r⁴…)`.
    fn near_double(&mut self, r: Reg, low: Reg, is_cos: Reg) -> Reg {
        let (square, one) = (self.mul(r, r), self.number(1.0));
        let half = self.times(square, 0.5);
        let near_one = self.sub(one, half);
        let lost = self.sub(one, near_one);
        let lost = self.sub(lost, half);
        let turned = self.mul(r, low);
        let cos_low = self.sub(lost, turned);
        let sin_low = self.mul(low, near_one);
        let rest = self.either(square, is_cos, &COS_DOUBLE, &SIN_DOUBLE);
        let factor = self.select(is_cos, square, r);
        let factor = self.mul(factor, square);
        let rest = self.mul(factor, rest);
        let low = self.select(is_cos, cos_low, sin_low);
        let rest = self.add(rest, low);
        let first = self.select(is_cos, near_one, r);
        self.add(first, rest)
    }

    /// What is left of `x` after `whole` quarter turns, as a sum.
    fn reduce(&mut self, x: Reg, whole: Reg) -> (Reg, Reg) {
        let first = self.times(whole, QUARTER[0]);
        let r = self.sub(x, first);
        let second = self.times(whole, QUARTER[1]);
        let (r, lost) = self.difference(r, second);
        let third = self.times(whole, QUARTER[2]);
        let (r, more) = self.difference(r, third);
        let last = self.times(whole, QUARTER[3]);
        let low = self.add(lost, more);
        let low = self.sub(low, last);
        let sum = self.add(r, low);
        let rest = self.sub(r, sum);
        (sum, self.add(rest, low))
    }

    /// `a - b`, and what rounding lost of it: for `a` that is larger, or so small that nothing is lost.
    fn difference(&mut self, a: Reg, b: Reg) -> (Reg, Reg) {
        let difference = self.sub(a, b);
        let rest = self.sub(a, difference);
        (difference, self.sub(rest, b))
    }

    fn wide(&mut self, op: Bin, a: Reg, b: u64) -> Reg {
        let b = self.int(b);
        self.bin(op, a, b)
    }

    /// The words of 2/π from a bit on. `at` is below 64 times the number of words, less those that are asked for.
    fn window(&mut self, at: Reg, words: &[u64], count: usize) -> Vec<Reg> {
        let mut row: Vec<Reg> = words.iter().map(|word| self.int(*word)).collect();
        let index = self.wide(Bin::I64ShrU, at, 6);
        // By each bit of the index everything moves up, as far as it is still needed.
        let mut step = words.len().saturating_sub(count).next_power_of_two() / 2;
        while step > 0 {
            let bit = self.wide(Bin::I64And, index, step as u64);
            let zero = self.int(0);
            let is_set = self.bin(Bin::I64Ne, bit, zero);
            let needed = (count + step).min(row.len());
            let mut next = Vec::with_capacity(needed);
            for n in 0..needed {
                let Some(own) = row.get(n).copied() else { break };
                next.push(match row.get(n + step) {
                    Some(other) => self.select(is_set, *other, own),
                    None => own,
                });
            }
            row = next;
            step /= 2;
        }
        let by = self.wide(Bin::I64And, at, 63);
        let back = self.wide(Bin::I64Xor, by, 63);
        let mut shifted = Vec::with_capacity(count);
        for (high, low) in row.iter().zip(row.iter().skip(1)).take(count) {
            let high = self.bin(Bin::I64Shl, *high, by);
            let low = self.wide(Bin::I64ShrU, *low, 1);
            let low = self.bin(Bin::I64ShrU, low, back);
            shifted.push(self.bin(Bin::I64Or, high, low));
        }
        shifted
    }

    /// The nearest number of quarters in a product with 62 bits after the point, and how far it is from them.
    fn quarters(&mut self, product: Reg) -> (Reg, Reg) {
        let rounded = self.wide(Bin::I64Add, product, 1 << 61);
        let quarters = self.wide(Bin::I64ShrU, rounded, 62);
        let whole = self.wide(Bin::I64Shl, quarters, 62);
        (quarters, self.int_sub(product, whole))
    }

    /// The exponent of a large number, from a first one on, and its mantissa as an integer.
    fn large_parts(&mut self, bits: Reg, from: u64) -> (Reg, Reg) {
        let exponent = self.wide(Bin::I64ShrU, bits, 52);
        let at = self.wide(Bin::I64Sub, exponent, from);
        let mantissa = self.wide(Bin::I64And, bits, (1 << 52) - 1);
        (at, self.wide(Bin::I64Or, mantissa, 1 << 52))
    }

    /// Of a number with 24 bits.
    fn reduce_large_single(&mut self, bits: Reg) -> (Reg, Reg) {
        let (at, mantissa) = self.large_parts(bits, 1023 + 23 - 62);
        let mantissa = self.wide(Bin::I64ShrU, mantissa, 29);
        let words = self.window(at, &QUARTERS[..5], 2);
        let [high, low] = words[..] else { return (at, bits) };
        let high = self.bin(Bin::I64Mul, mantissa, high);
        let low = self.wide(Bin::I64ShrU, low, 32);
        let low = self.bin(Bin::I64Mul, mantissa, low);
        let low = self.wide(Bin::I64ShrU, low, 32);
        let product = self.int_add(high, low);
        let (quarters, rest) = self.quarters(product);
        let rest = self.of_int(rest);
        (quarters, self.times(rest, std::f64::consts::FRAC_PI_2 / (1_u64 << 62) as f64))
    }

    /// Of a number with 53 bits: how many quarter turns, and the rest as a sum.
    fn reduce_large_double(&mut self, bits: Reg) -> (Reg, Reg, Reg) {
        let (at, mantissa) = self.large_parts(bits, 1023 + 52 - 62);
        let words = self.window(at, &QUARTERS, 3);
        let [high, middle, low] = words[..] else { return (at, bits, bits) };
        let high = self.bin(Bin::I64Mul, mantissa, high);
        let carried = self.high_product(mantissa, middle);
        let high = self.int_add(high, carried);
        let middle = self.bin(Bin::I64Mul, mantissa, middle);
        let carried = self.high_product(mantissa, low);
        let middle = self.int_add(middle, carried);
        let carry = self.int_lt_u(middle, carried);
        let carry = self.un(Un::I64ExtendI32U, carry);
        let high = self.int_add(high, carry);
        let (quarters, rest) = self.quarters(high);
        // As a sum of what fits into a float, and of what does not with the bits after it.
        let first = self.of_int(rest);
        let back = self.un(Un::I64TruncSatF64S, first);
        let left = self.int_sub(rest, back);
        let left = self.of_int(left);
        let middle = self.un(Un::F64ConvertI64U, middle);
        let middle = self.times(middle, 1.0 / 18_446_744_073_709_551_616.0);
        let left = self.add(left, middle);
        // Times a quarter turn, in units of 2^-62.
        let unit = 1.0 / (1_u64 << 62) as f64;
        let quarter = std::f64::consts::FRAC_PI_2;
        let (first, left) = (self.times(first, unit), self.times(left, unit));
        let cut = self.cut(first);
        let rest = self.sub(first, cut);
        let quarter_high = f64::from_bits(quarter.to_bits() & self.n.cut);
        let quarter_low = quarter - quarter_high;
        let product = self.times(first, quarter);
        let lost = self.times(cut, quarter_high);
        let lost = self.sub(lost, product);
        let more = self.times(cut, quarter_low);
        let lost = self.add(lost, more);
        let more = self.times(rest, quarter_high);
        let lost = self.add(lost, more);
        let more = self.times(rest, quarter_low);
        let lost = self.add(lost, more);
        let more = self.times(first, QUARTER_LOW);
        let lost = self.add(lost, more);
        let more = self.times(left, quarter);
        let low = self.add(lost, more);
        let sum = self.add(product, low);
        let rest = self.sub(product, sum);
        (quarters, sum, self.add(rest, low))
    }

    /// The upper 64 bits of a product.
    fn high_product(&mut self, a: Reg, b: Reg) -> Reg {
        let low = u64::from(u32::MAX);
        let (a_high, a_low) = (self.wide(Bin::I64ShrU, a, 32), self.wide(Bin::I64And, a, low));
        let (b_high, b_low) = (self.wide(Bin::I64ShrU, b, 32), self.wide(Bin::I64And, b, low));
        let first = self.bin(Bin::I64Mul, a_low, b_low);
        let first = self.wide(Bin::I64ShrU, first, 32);
        let second = self.bin(Bin::I64Mul, a_low, b_high);
        // No sum here is too large for 64 bits.
        let sum = self.int_add(second, first);
        let sum_low = self.wide(Bin::I64And, sum, low);
        let third = self.bin(Bin::I64Mul, a_high, b_low);
        let other = self.int_add(third, sum_low);
        let last = self.bin(Bin::I64Mul, a_high, b_high);
        let sum = self.wide(Bin::I64ShrU, sum, 32);
        let other = self.wide(Bin::I64ShrU, other, 32);
        let last = self.int_add(last, sum);
        self.int_add(last, other)
    }
}
