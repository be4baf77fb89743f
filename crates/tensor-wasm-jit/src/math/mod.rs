//! Functions of module `kernel` that no device has to the last bit: exponentials, logarithms, sine and cosine, the
//! hyperbolic tangent, powers. Each is inlined as a polynomial in ordinary operations, every one of them rounded the
//! same everywhere, so that the result has the same bits in the emulator, on every GPU and on a CPU.
//!
//! There are no tables in memory and no fused multiply-adds, which a CPU may have to put together from many
//! instructions: where twice the precision is needed, numbers are cut so that products are exact. Coefficients are
//! minimax fits of our own; how far the results are from the truth is measured, and said in `docs/KERNELS.md`.

mod trigonometry;

use crate::assemble::Assembler;
use crate::ir::{Bin, Op, Reg, Site, Ty, Un};

/// One of the functions, in one of the two precisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TypedFunction {
    pub what: MathFunction,
    pub ty: Ty,
}

/// A function that is expanded into a polynomial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MathFunction {
    Exp,
    Exp2,
    Log,
    Log2,
    Sin,
    Cos,
    Tanh,
    Pow,
}

impl MathFunction {
    pub const ALL: [MathFunction; 8] = [
        MathFunction::Exp,
        MathFunction::Exp2,
        MathFunction::Log,
        MathFunction::Log2,
        MathFunction::Sin,
        MathFunction::Cos,
        MathFunction::Tanh,
        MathFunction::Pow,
    ];

    pub fn name(self) -> &'static str {
        match self {
            MathFunction::Exp => "exp",
            MathFunction::Exp2 => "exp2",
            MathFunction::Log => "log",
            MathFunction::Log2 => "log2",
            MathFunction::Sin => "sin",
            MathFunction::Cos => "cos",
            MathFunction::Tanh => "tanh",
            MathFunction::Pow => "pow",
        }
    }

    pub fn operands(self) -> usize {
        if self == MathFunction::Pow { 2 } else { 1 }
    }
}

impl TypedFunction {
    pub(crate) fn named(name: &str) -> Option<TypedFunction> {
        let (what, ty) = name.split_once('_')?;
        let what = MathFunction::ALL.into_iter().find(|function| function.name() == what)?;
        match ty {
            "f32" => Some(TypedFunction { what, ty: Ty::F32 }),
            "f64" => Some(TypedFunction { what, ty: Ty::F64 }),
            _ => None,
        }
    }

    pub(crate) fn operands(self) -> usize {
        self.what.operands()
    }
}

impl Assembler {
    /// Inlines a function. `x` and `y` are the same where there is one operand.
    pub(crate) fn expand(&mut self, function: TypedFunction, x: Reg, y: Reg, site: Site) -> Reg {
        let numbers = if function.ty == Ty::F32 { &SINGLE } else { &DOUBLE };
        let mut expand = Expand { asm: self, site, n: numbers };
        match function.what {
            MathFunction::Exp => expand.exp(x),
            MathFunction::Exp2 => expand.exp2(x),
            MathFunction::Log => expand.log(x),
            MathFunction::Log2 => expand.log2(x),
            MathFunction::Sin => expand.sin_or_cos(x, false),
            MathFunction::Cos => expand.sin_or_cos(x, true),
            MathFunction::Tanh => expand.tanh(x),
            MathFunction::Pow if function.ty == Ty::F32 => expand.pow_single(x, y),
            MathFunction::Pow => expand.pow_double(x, y),
        }
    }
}

/// What differs between the precisions.
struct Numbers {
    ty: Ty,
    /// Bits after the point.
    mantissa: u32,
    bias: u64,
    smallest_normal: f64,
    /// Brings what is smaller up to it, and the power of two that it is.
    up: (f64, u64),
    /// Added to a number, it leaves the nearest integer in the last bits.
    round: f64,
    /// All but the lower half of the bits after the point: the product of two numbers cut so is exact.
    cut: u64,
    /// What `exp` and `exp2` make zero of, and what infinity.
    exp_ends: (f64, f64),
    exp2_ends: (f64, f64),
    /// Its first part times an exponent is exact.
    ln_2: (f64, f64),
    /// Its first part is cut.
    log2_e: (f64, f64),
    /// `(e^r - 1 - r) / r²` for `|r| <= ln(2) / 2`.
    exp: &'static [f64],
    /// `(2^r - 1 - r * ln(2)) / r²` for `|r| <= 1/2`.
    exp2: &'static [f64],
    /// Bits of the smallest number that a mantissa is made; the largest is less than twice as large.
    log_from: u64,
    /// Below this it is a polynomial, and so more than half of 1 beyond.
    tanh_small: f64,
    /// `(tanh(x) / x - 1) / x²`, of the square.
    tanh: &'static [f64],
    /// Beyond this it is 1.
    tanh_end: f64,
}

/// Coefficients of single precision.
const fn wide<const N: usize>(numbers: [f32; N]) -> [f64; N] {
    let mut wide = [0.0; N];
    let mut n = 0;
    while n < N {
        wide[n] = numbers[n] as f64;
        n += 1;
    }
    wide
}

static SINGLE: Numbers = Numbers {
    ty: Ty::F32,
    mantissa: 23,
    bias: 127,
    smallest_normal: f32::MIN_POSITIVE as f64,
    up: (8_388_608.0, 23),
    round: 12_582_912.0,
    cut: 0xffff_f000,
    exp_ends: (-104.0, 89.0),
    exp2_ends: (-151.0, 129.0),
    ln_2: (0.693_145_75_f32 as f64, 1.428_606_8e-6_f32 as f64),
    log2_e: (1.442_382_8_f32 as f64, 3.122_284e-4_f32 as f64),
    exp: &wide([0.5, 0.166_665_18, 0.041_666_206, 0.008_368_918, 0.001_395_055_4]),
    exp2: &wide([0.240_226_5, 0.055_503_614, 0.009_618_022_5, 0.001_339_048_3, 0.000_154_719_06]),
    log_from: 0x3f2a_aaab,
    tanh_small: 0.55,
    tanh: &wide([-0.333_333_2, 0.133_326, -0.053_853_55, 0.021_076_389, -0.006_280_403]),
    tanh_end: 10.0,
};

static DOUBLE: Numbers = Numbers {
    ty: Ty::F64,
    mantissa: 52,
    bias: 1023,
    smallest_normal: f64::MIN_POSITIVE,
    up: (18_014_398_509_481_984.0, 54),
    round: 6_755_399_441_055_744.0,
    cut: 0xffff_ffff_f800_0000,
    exp_ends: (-746.0, 710.0),
    exp2_ends: (-1_076.0, 1_025.0),
    ln_2: (0.693_147_180_559_208_2, 7.371_002_565_167_799e-13),
    log2_e: (1.442_695_021_629_333_5, 1.925_962_991_126_617_5e-8),
    exp: &[
        0.500_000_000_000_001_3,
        0.166_666_666_666_667,
        0.041_666_666_666_514_96,
        0.008_333_333_333_307_009,
        0.001_388_888_894_714_996_6,
        0.000_198_412_699_177_894_8,
        2.480_148_979_148_870_4e-5,
        2.755_721_595_773_562e-6,
        2.763_133_790_119_859e-7,
        2.511_796_377_536_027e-8,
    ],
    exp2: &[
        0.240_226_506_959_101_33,
        0.055_504_108_664_821_69,
        0.009_618_129_107_593_486,
        0.001_333_355_814_638_635_7,
        0.000_154_035_304_579_575_66,
        1.525_273_386_284_810_9e-5,
        1.321_543_485_281_695_7e-6,
        1.017_804_788_388_836_6e-7,
        7.073_857_250_429_811_5e-9,
        4.457_222_082_352_122e-10,
    ],
    log_from: 0x3fe6_a09e_667f_3bcd,
    tanh_small: 0.55,
    tanh: &[
        -0.333_333_333_333_323_43,
        0.133_333_333_331_723_95,
        -0.053_968_253_877_708_92,
        0.021_869_486_010_053_3,
        -0.008_863_194_934_852_782,
        0.003_591_722_872_313_407,
        -0.001_453_231_150_980_802,
        0.000_579_176_278_971_679_6,
        -0.000_210_361_482_214_842_5,
        5.105_914_756_612_089e-5,
    ],
    tanh_end: 22.0,
};

/// `(log(1 + f) - f + f²/2) / f³` for `|f| <= 1/3`, in single precision.
const LOG_SINGLE: [f64; 8] = wide([
    0.333_332_24,
    -0.249_996_89,
    0.200_100_44,
    -0.166_854_66,
    0.140_109_29,
    -0.121_151_03,
    0.139_624_13,
    -0.131_917_7,
]);

/// `(log((1 + s) / (1 - s)) / s - 2) / s²` of the square, for mantissas from √½ to √2.
const LOG_DOUBLE: [f64; 7] = [
    0.666_666_666_666_673_4,
    0.399_999_999_994_139_4,
    0.285_714_287_425_663_9,
    0.222_221_985_534_191_95,
    0.181_835_654_243_040_5,
    0.153_140_207_084_446_42,
    0.147_962_651_646_937_4,
];

/// `log2((1 + s) / (1 - s)) / s` of the square.
const POW_SINGLE: [f64; 5] = [
    2.885_390_081_790_092,
    0.961_796_673_333_422_2,
    0.577_083_586_671_359_5,
    0.411_672_610_847_979_96,
    0.340_732_205_244_135_56,
];

/// `(2^r - 1) / r`, close enough for a power in single precision.
const POW_SINGLE_EXP2: [f64; 7] = [
    0.693_147_180_541_600_2,
    0.240_226_510_767_555_9,
    0.055_504_109_628_121_38,
    0.009_618_036_764_580_618,
    0.001_333_343_056_606_453_8,
    0.000_154_671_608_924_929_84,
    1.531_500_168_436_812_4e-5,
];

/// The same of which the first two terms, `2 / ln(2)` and a third of it, are in twice the precision. The first is cut.
const POW_DOUBLE_FIRST: (f64, f64) = (2.885_390_043_258_667, 3.851_925_982_253_235e-8);
const POW_DOUBLE_SECOND: (f64, f64) = (0.961_796_693_925_975_6, 5.057_761_664_812_590_7e-17);
const POW_DOUBLE: [f64; 7] = [
    0.577_078_016_355_618,
    0.412_198_583_091_943_57,
    0.320_598_902_273_060_26,
    0.262_307_701_157_370_34,
    0.221_983_996_837_544_97,
    0.191_255_170_138_318_58,
    0.190_385_450_731_805_27,
];

/// Writes the operations of one function. Integers are as wide as the floats.
struct Expand<'l> {
    asm: &'l mut Assembler,
    site: Site,
    n: &'static Numbers,
}

/// An operation in the precision at hand.
macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident $single:ident $double:ident;)*) => {
        $($(#[$doc])* fn $name(&mut self, a: Reg, b: Reg) -> Reg {
            self.bin(if self.n.ty == Ty::F32 { Bin::$single } else { Bin::$double }, a, b)
        })*
    };
}

impl Expand<'_> {
    fn un(&mut self, op: Un, a: Reg) -> Reg {
        let to = self.asm.register(op.to());
        self.asm.push(Op::Un { op, to, a, site: self.site });
        to
    }

    fn bin(&mut self, op: Bin, a: Reg, b: Reg) -> Reg {
        let to = self.asm.register(op.to());
        self.asm.push(Op::Bin { op, to, a, b, site: self.site });
        to
    }

    binary! {
        add F32Add F64Add;
        sub F32Sub F64Sub;
        mul F32Mul F64Mul;
        div F32Div F64Div;
        eq F32Eq F64Eq;
        ne F32Ne F64Ne;
        lt F32Lt F64Lt;
        gt F32Gt F64Gt;
        copysign F32Copysign F64Copysign;
        int_add I32Add I64Add;
        int_sub I32Sub I64Sub;
        int_and I32And I64And;
        int_or I32Or I64Or;
        int_xor I32Xor I64Xor;
        int_shl I32Shl I64Shl;
        int_shr_s I32ShrS I64ShrS;
        int_lt_u I32LtU I64LtU;
    }

    fn abs(&mut self, a: Reg) -> Reg {
        self.un(if self.n.ty == Ty::F32 { Un::F32Abs } else { Un::F64Abs }, a)
    }

    fn trunc(&mut self, a: Reg) -> Reg {
        self.un(if self.n.ty == Ty::F32 { Un::F32Trunc } else { Un::F64Trunc }, a)
    }

    fn bits(&mut self, a: Reg) -> Reg {
        self.un(if self.n.ty == Ty::F32 { Un::I32ReinterpretF32 } else { Un::I64ReinterpretF64 }, a)
    }

    fn of_bits(&mut self, a: Reg) -> Reg {
        self.un(if self.n.ty == Ty::F32 { Un::F32ReinterpretI32 } else { Un::F64ReinterpretI64 }, a)
    }

    fn of_int(&mut self, a: Reg) -> Reg {
        self.un(if self.n.ty == Ty::F32 { Un::F32ConvertI32S } else { Un::F64ConvertI64S }, a)
    }

    fn select(&mut self, condition: Reg, a: Reg, b: Reg) -> Reg {
        let to = self.asm.register(self.asm.types[a.0 as usize]);
        self.asm.push(Op::Select { to, condition, a, b });
        to
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "constants of single precision are numbers of single precision"
    )]
    fn bits_of(&self, number: f64) -> u64 {
        if self.n.ty == Ty::F32 { u64::from((number as f32).to_bits()) } else { number.to_bits() }
    }

    fn number(&mut self, number: f64) -> Reg {
        let bits = self.bits_of(number);
        self.asm.constant(self.n.ty, bits)
    }

    fn int(&mut self, bits: u64) -> Reg {
        self.asm.constant(if self.n.ty == Ty::F32 { Ty::I32 } else { Ty::I64 }, bits)
    }

    fn small(&mut self, number: u32) -> Reg {
        self.asm.constant(Ty::I32, u64::from(number))
    }

    /// The bits of 1.
    fn one_bits(&self) -> u64 {
        self.n.bias << self.n.mantissa
    }

    fn times(&mut self, a: Reg, number: f64) -> Reg {
        let number = self.number(number);
        self.mul(a, number)
    }

    /// `coefficients[0] + x * (coefficients[1] + x * …)`
    fn polynomial(&mut self, x: Reg, coefficients: &[f64]) -> Reg {
        let mut coefficients = coefficients.iter().rev();
        let mut sum = self.number(coefficients.next().copied().unwrap_or(0.0));
        for coefficient in coefficients {
            let (product, next) = (self.mul(sum, x), self.number(*coefficient));
            sum = self.add(product, next);
        }
        sum
    }

    /// Within these; a NaN stays one.
    fn clamp(&mut self, x: Reg, (low, high): (f64, f64)) -> Reg {
        let (low, high) = (self.number(low), self.number(high));
        let is_low = self.lt(x, low);
        let x = self.select(is_low, low, x);
        let is_high = self.gt(x, high);
        self.select(is_high, high, x)
    }

    /// The nearest integer, as an integer and as a float. Of no more than the bits after the point.
    fn nearest(&mut self, x: Reg) -> (Reg, Reg) {
        let round = self.number(self.n.round);
        let sum = self.add(x, round);
        let (bits, from) = (self.bits(sum), self.int(self.bits_of(self.n.round)));
        (self.int_sub(bits, from), self.sub(sum, round))
    }

    /// `2^n` for an exponent of normal numbers.
    fn power_of_two(&mut self, n: Reg) -> Reg {
        let (bias, mantissa) = (self.int(self.n.bias), self.int(u64::from(self.n.mantissa)));
        let biased = self.int_add(n, bias);
        let bits = self.int_shl(biased, mantissa);
        self.of_bits(bits)
    }

    /// `y * 2^n` for `y` about 1, rounded once: in two steps, of which the first is exact.
    fn scale(&mut self, y: Reg, n: Reg) -> Reg {
        let one = self.int(1);
        let half = self.int_shr_s(n, one);
        let rest = self.int_sub(n, half);
        let (half, rest) = (self.power_of_two(half), self.power_of_two(rest));
        let y = self.mul(y, half);
        self.mul(y, rest)
    }

    /// `1 + first + rest` as a sum of two numbers, for `first` below 1.
    fn one_and(&mut self, first: Reg, rest: Reg) -> (Reg, Reg) {
        let one = self.number(1.0);
        let sum = self.add(one, first);
        let kept = self.sub(sum, one);
        let lost = self.sub(first, kept);
        (sum, self.add(lost, rest))
    }

    /// `e^x` as `2^n` and the sum of two numbers that it is to be multiplied with, for `x` that has been clamped.
    fn exp_parts(&mut self, x: Reg) -> (Reg, Reg, Reg) {
        let quotient = self.times(x, std::f64::consts::LOG2_E);
        let (n, whole) = self.nearest(quotient);
        let (high, low) = (self.times(whole, self.n.ln_2.0), self.times(whole, self.n.ln_2.1));
        let r = self.sub(x, high);
        let r = self.sub(r, low);
        let square = self.mul(r, r);
        let rest = self.polynomial(r, self.n.exp);
        let rest = self.mul(square, rest);
        let (high, low) = self.one_and(r, rest);
        (n, high, low)
    }

    fn exp(&mut self, x: Reg) -> Reg {
        let x = self.clamp(x, self.n.exp_ends);
        let (n, high, low) = self.exp_parts(x);
        let y = self.add(high, low);
        self.scale(y, n)
    }

    /// `2^r` for `|r| <= 1/2`.
    fn exp2_near(&mut self, r: Reg) -> Reg {
        let first = self.times(r, std::f64::consts::LN_2);
        let square = self.mul(r, r);
        let rest = self.polynomial(r, self.n.exp2);
        let rest = self.mul(square, rest);
        let (high, low) = self.one_and(first, rest);
        self.add(high, low)
    }

    fn exp2(&mut self, x: Reg) -> Reg {
        let x = self.clamp(x, self.n.exp2_ends);
        let (n, whole) = self.nearest(x);
        let r = self.sub(x, whole);
        let y = self.exp2_near(r);
        self.scale(y, n)
    }

    /// A positive number as `2^e * (1 + f)`, of which `f` is exact. Both are floats.
    fn exponent_and_rest(&mut self, x: Reg) -> (Reg, Reg) {
        let n = self.n;
        let smallest = self.number(n.smallest_normal);
        let is_small = self.lt(x, smallest);
        let larger = self.times(x, n.up.0);
        let (x, zero) = (self.select(is_small, larger, x), self.int(0));
        let (up, from) = (self.int(n.up.1.wrapping_neg()), self.int(n.log_from));
        let up = self.select(is_small, up, zero);
        let bits = self.bits(x);
        let above = self.int_sub(bits, from);
        let mantissa = self.int(u64::from(n.mantissa));
        let e = self.int_shr_s(above, mantissa);
        let e = self.int_add(e, up);
        let below = self.int((1 << n.mantissa) - 1);
        let rest = self.int_and(above, below);
        let rest = self.int_add(rest, from);
        let (rest, one) = (self.of_bits(rest), self.number(1.0));
        (self.of_int(e), self.sub(rest, one))
    }

    /// `log(1 + f)` as `f - half + rest`; `half` is half of the square.
    fn log_near(&mut self, f: Reg) -> (Reg, Reg) {
        let square = self.mul(f, f);
        let half = self.times(square, 0.5);
        if self.n.ty == Ty::F32 {
            let rest = self.polynomial(f, &LOG_SINGLE);
            let cube = self.mul(square, f);
            return (half, self.mul(cube, rest));
        }
        let two = self.number(2.0);
        let below = self.add(two, f);
        let s = self.div(f, below);
        let square = self.mul(s, s);
        let rest = self.polynomial(square, &LOG_DOUBLE);
        let rest = self.mul(square, rest);
        let rest = self.add(half, rest);
        (half, self.mul(s, rest))
    }

    /// What a logarithm is where it is not `found`: of zero, of what is negative, of infinity and of a NaN.
    fn log_ends(&mut self, x: Reg, found: Reg) -> Reg {
        let (infinity, minus_infinity, zero) =
            (self.number(f64::INFINITY), self.number(-f64::INFINITY), self.number(0.0));
        let nan = self.sub(infinity, infinity);
        let twice = self.add(x, x);
        let is_negative = self.lt(x, zero);
        let end = self.select(is_negative, nan, twice);
        let is_zero = self.eq(x, zero);
        let end = self.select(is_zero, minus_infinity, end);
        // Positive and finite, as integers.
        let (bits, one, last) = (self.bits(x), self.int(1), self.bits(infinity));
        let (bits, last) = (self.int_sub(bits, one), self.int_sub(last, one));
        let is_number = self.int_lt_u(bits, last);
        self.select(is_number, found, end)
    }

    fn log(&mut self, x: Reg) -> Reg {
        let (e, f) = self.exponent_and_rest(x);
        let (half, rest) = self.log_near(f);
        let (high, low) = (self.times(e, self.n.ln_2.0), self.times(e, self.n.ln_2.1));
        let rest = self.add(rest, low);
        let rest = self.sub(half, rest);
        let near = self.sub(f, rest);
        let found = self.add(high, near);
        self.log_ends(x, found)
    }

    fn cut(&mut self, x: Reg) -> Reg {
        let (bits, cut) = (self.bits(x), self.int(self.n.cut));
        let bits = self.int_and(bits, cut);
        self.of_bits(bits)
    }

    fn log2(&mut self, x: Reg) -> Reg {
        let (e, f) = self.exponent_and_rest(x);
        let (half, rest) = self.log_near(f);
        let near = self.sub(f, half);
        let high = self.cut(near);
        let low = self.sub(f, high);
        let low = self.sub(low, half);
        let low = self.add(low, rest);
        let both = self.add(low, high);
        let far = self.times(both, self.n.log2_e.1);
        let middle = self.times(low, self.n.log2_e.0);
        let low = self.add(far, middle);
        let high = self.times(high, self.n.log2_e.0);
        let sum = self.add(e, high);
        let lost = self.sub(e, sum);
        let lost = self.add(lost, high);
        let low = self.add(low, lost);
        let found = self.add(sum, low);
        self.log_ends(x, found)
    }

    fn tanh(&mut self, x: Reg) -> Reg {
        let (size, one) = (self.abs(x), self.number(1.0));
        // Near zero.
        let square = self.mul(size, size);
        let near = self.polynomial(square, self.n.tanh);
        let near = self.mul(square, near);
        let near = self.mul(size, near);
        let near = self.add(size, near);
        // Elsewhere it is 1 - 2 / (e^2x + 1), with what rounding loses on the way.
        let (end, two) = (self.number(self.n.tanh_end), self.number(2.0));
        let is_beyond = self.gt(size, end);
        let within = self.select(is_beyond, end, size);
        let twice = self.add(within, within);
        let (n, high, low) = self.exp_parts(twice);
        let y = self.add(high, low);
        let kept = self.sub(y, high);
        let low = self.sub(low, kept);
        let power = self.power_of_two(n);
        let (high, low) = (self.mul(y, power), self.mul(low, power));
        let below = self.add(high, one);
        let lost = self.sub(below, high);
        let lost = self.sub(one, lost);
        let below_low = self.add(low, lost);
        let rest = self.div(two, below);
        let square = self.mul(rest, rest);
        let more = self.mul(square, below_low);
        let more = self.times(more, 0.5);
        let first = self.sub(one, rest);
        let lost = self.sub(one, first);
        let lost = self.sub(lost, rest);
        let more = self.add(more, lost);
        let far = self.add(first, more);
        let limit = self.number(self.n.tanh_small);
        let is_near = self.lt(size, limit);
        let found = self.select(is_near, near, far);
        let sign = self.copysign(one, x);
        self.mul(found, sign)
    }

    /// A power in single precision, by way of double.
    fn pow_single(&mut self, x: Reg, y: Reg) -> Reg {
        self.n = &DOUBLE;
        let (x, y) = (self.un(Un::F64PromoteF32, x), self.un(Un::F64PromoteF32, y));
        let size = self.abs(x);
        // What was single is normal here.
        let (from, mantissa, below) = (self.int(self.n.log_from), self.int(52), self.int((1 << 52) - 1));
        let bits = self.bits(size);
        let above = self.int_sub(bits, from);
        let e = self.int_shr_s(above, mantissa);
        let e = self.of_int(e);
        let rest = self.int_and(above, below);
        let rest = self.int_add(rest, from);
        let (rest, one, two) = (self.of_bits(rest), self.number(1.0), self.number(2.0));
        let f = self.sub(rest, one);
        let below = self.add(f, two);
        let s = self.div(f, below);
        let square = self.mul(s, s);
        let log = self.polynomial(square, &POW_SINGLE);
        let log = self.mul(log, s);
        let log = self.add(log, e);
        // An infinite one times the logarithm of 1 is zero.
        let finite = self.clamp(y, (-1e40, 1e40));
        let product = self.mul(finite, log);
        let product = self.clamp(product, (-200.0, 200.0));
        let (n, whole) = self.nearest(product);
        let r = self.sub(product, whole);
        let rest = self.polynomial(r, &POW_SINGLE_EXP2);
        let rest = self.mul(r, rest);
        let near = self.add(one, rest);
        let power = self.power_of_two(n);
        let found = self.mul(near, power);
        let found = self.pow_ends(x, y, size, found);
        self.un(Un::F32DemoteF64, found)
    }

    /// A power in double precision. The logarithm is a sum of two numbers of which the first is cut, with about 65
    /// bits.
    fn pow_double(&mut self, x: Reg, y: Reg) -> Reg {
        let size = self.abs(x);
        let (e, f) = self.exponent_and_rest(size);
        let (one, two) = (self.number(1.0), self.number(2.0));
        // s = f / (2 + f) as a sum.
        let below = self.add(f, two);
        let inverse = self.div(one, below);
        let s = self.mul(f, inverse);
        let s_high = self.cut(s);
        let below_high = self.cut(below);
        let below_low = self.sub(below_high, two);
        let below_low = self.sub(f, below_low);
        let left = self.mul(s_high, below_high);
        let left = self.sub(f, left);
        let more = self.mul(s_high, below_low);
        let left = self.sub(left, more);
        let s_low = self.mul(left, inverse);
        // Its square, exactly at first.
        let square_high = self.mul(s_high, s_high);
        let both = self.add(s_high, s_high);
        let both = self.add(both, s_low);
        let square_low = self.mul(s_low, both);
        let square = self.add(square_high, square_low);
        let cut = self.cut(square);
        let square_low = {
            let rest = self.sub(square_high, cut);
            self.add(rest, square_low)
        };
        let square_high = cut;
        // The second term with all after it.
        let tail = self.polynomial(square, &POW_DOUBLE);
        let tail = self.mul(tail, square);
        let second = self.number(POW_DOUBLE_SECOND.0);
        let c = self.add(second, tail);
        let c_high = self.cut(c);
        let c_low = self.sub(c_high, second);
        let c_low = self.sub(tail, c_low);
        let second_low = self.number(POW_DOUBLE_SECOND.1);
        let c_low = self.add(c_low, second_low);
        let u_high = self.mul(c_high, square_high);
        let u_low = self.mul(c_high, square_low);
        let more = self.mul(c_low, square);
        let u_low = self.add(u_low, more);
        // All of it.
        let first = self.number(POW_DOUBLE_FIRST.0);
        let g = self.add(first, u_high);
        let g_high = self.cut(g);
        let g_low = self.sub(g_high, first);
        let g_low = self.sub(u_high, g_low);
        let first_low = self.number(POW_DOUBLE_FIRST.1);
        let u_low = self.add(u_low, first_low);
        let g_low = self.add(g_low, u_low);
        let t_high = self.mul(s_high, g_high);
        let t_low = self.mul(s_high, g_low);
        let g = self.add(g_high, g_low);
        let more = self.mul(s_low, g);
        let t_low = self.add(t_low, more);
        // The logarithm, and its product with y.
        let sum = self.add(e, t_high);
        let lost = self.sub(sum, e);
        let lost = self.sub(t_high, lost);
        let log_low = self.add(lost, t_low);
        let log_high = self.cut(sum);
        let rest = self.sub(sum, log_high);
        let log_low = self.add(rest, log_low);
        // Larger ones make zero or infinity of everything but 1.
        let large = 18_446_744_073_709_551_616.0;
        let finite = self.clamp(y, (-large, large));
        let y_high = self.cut(finite);
        let y_low = self.sub(finite, y_high);
        let product = self.mul(y_high, log_high);
        let low = self.mul(y_high, log_low);
        let log = self.add(log_high, log_low);
        let more = self.mul(y_low, log);
        let low = self.add(low, more);
        let whole = self.add(product, low);
        // Beyond the ends only the sign counts.
        let near = self.clamp(whole, self.n.exp2_ends);
        let is_near = self.eq(whole, near);
        let (n, whole) = self.nearest(near);
        let r = self.sub(product, whole);
        let r = self.add(r, low);
        let zero = self.number(0.0);
        let r = self.select(is_near, r, zero);
        let near = self.exp2_near(r);
        let found = self.scale(near, n);
        self.pow_ends(x, y, size, found)
    }

    /// The rest of what C says about powers, `found` being that of a positive finite number.
    fn pow_ends(&mut self, x: Reg, y: Reg, size: Reg, found: Reg) -> Reg {
        let (zero, one, infinity) = (self.number(0.0), self.number(1.0), self.number(f64::INFINITY));
        // Of zero and infinity.
        let (is_zero, is_infinite, is_up) = (self.eq(size, zero), self.eq(size, infinity), self.gt(y, zero));
        let is_end = self.bin(Bin::I32Or, is_zero, is_infinite);
        let becomes_infinite = self.bin(Bin::I32Xor, is_zero, is_up);
        let end = self.select(becomes_infinite, infinity, zero);
        let found = self.select(is_end, end, found);
        // An odd power has the sign, and one that is no integer does not exist.
        let whole = self.trunc(y);
        let is_broken = self.ne(whole, y);
        let half = self.times(y, 0.5);
        let half_whole = self.trunc(half);
        let has_half = self.ne(half_whole, half);
        let nothing = self.small(0);
        let is_odd = self.select(is_broken, nothing, has_half);
        let signed = self.copysign(one, x);
        let sign = self.select(is_odd, signed, one);
        let found = self.mul(found, sign);
        let minus_infinity = self.number(-f64::INFINITY);
        let (is_negative, is_finite) = (self.lt(x, zero), self.gt(x, minus_infinity));
        let is_bad = self.bin(Bin::I32And, is_negative, is_finite);
        let is_bad = self.bin(Bin::I32And, is_bad, is_broken);
        let (is_nan_x, is_nan_y) = (self.ne(x, x), self.ne(y, y));
        let is_nan = self.bin(Bin::I32Or, is_nan_x, is_nan_y);
        let is_nan = self.bin(Bin::I32Or, is_nan, is_bad);
        let nan = self.sub(infinity, infinity);
        let found = self.select(is_nan, nan, found);
        let (is_one, is_none) = (self.eq(x, one), self.eq(y, zero));
        let is_one = self.bin(Bin::I32Or, is_one, is_none);
        self.select(is_one, one, found)
    }
}
