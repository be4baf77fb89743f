//! Tensors as text, as NumPy prints arrays: columns are aligned, floats have as few digits as say which they are and at
//! most eight behind the point, and of large ones only the edges are shown. NumPy's own output, for a few hundred
//! arrays, is what the tests compare with.

use std::fmt;

use half::{bf16, f16};

use super::Tensor;
use crate::cpu::memory::CpuBuffer;
use crate::dtype::DType;
use crate::shape::Layout;

/// Beyond so many elements only edges are shown.
const ELEMENTS_MAX: usize = 1000;

/// Elements that are shown at both ends of an axis, if not all are.
const EDGE: usize = 3;

const LINE_COLUMNS: usize = 75;

/// Digits behind the point.
const DIGITS_MAX: usize = 8;

/// Below this, numbers are written with an exponent.
const SMALL: f64 = 1e-4;

/// And from here on, where the type keeps so many digits: those of an array, and a single one.
const LARGE: f64 = 1e8;
const LARGE_SCALAR: f64 = 1e16;

/// Numbers of one array have exponents if one is so much larger than another.
const SPREAD_MAX: f64 = 1e3;

/// Digits of a half that always say which it is, without the first.
const HALF_DIGITS: usize = 4;

impl fmt::Display for Tensor {
    /// Computes it. If that fails, the error is what is printed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = match self.value() {
            Ok(value) => value,
            Err(error) => return write!(f, "{error}"),
        };
        let buffer = match value.storage.cpu() {
            Ok(buffer) => buffer,
            Err(what) => return write!(f, "{what}"),
        };
        let elements = Elements { buffer, dtype: self.dtype(), layout: value.layout };
        if value.layout.shape.contains(&0) {
            return f.write_str("[]");
        }
        if value.layout.shape.rank() == 0 {
            return f.write_str(&elements.scalar());
        }
        let format = ElementFormat::of(&elements);
        f.write_str(&elements.nested(&format, 0, value.layout.offset, 1, LINE_COLUMNS))
    }
}

struct Elements<'a> {
    buffer: &'a CpuBuffer,
    dtype: DType,
    layout: Layout,
}

impl Elements<'_> {
    fn at(&self, position: isize) -> (f64, i64) {
        self.buffer.at(self.dtype, position.unsigned_abs())
    }

    /// What is shown along an axis: that many from the beginning, if not all are, and that many from the end.
    fn shown(&self, axis: usize) -> (usize, usize) {
        let size = self.layout.shape[axis];
        let is_summary = self.layout.shape.numel() > ELEMENTS_MAX && size > 2 * EDGE;
        if is_summary { (EDGE, EDGE) } else { (0, size) }
    }

    fn for_each_shown(&self, axis: usize, position: isize, each: &mut impl FnMut(f64, i64)) {
        if axis == self.layout.shape.rank() {
            let (float, int) = self.at(position);
            return each(float, int);
        }
        let (first, last) = self.shown(axis);
        let size = self.layout.shape[axis];
        for n in (0..first).chain(size - last..size) {
            self.for_each_shown(axis + 1, position + n.cast_signed() * self.layout.strides()[axis], each);
        }
    }

    /// The text of everything from an axis on, in lines of so many columns that begin with an indent.
    fn nested(&self, format: &ElementFormat, axis: usize, position: isize, indent: usize, columns: usize) -> String {
        let rank = self.layout.shape.rank();
        if axis == rank {
            let (float, int) = self.at(position);
            return format.element(self.dtype, float, int);
        }
        let (first, last) = self.shown(axis);
        let size = self.layout.shape[axis];
        let parts = (0..first).map(Some).chain((first > 0).then_some(None)).chain((size - last..size).map(Some));
        let part = |n: Option<usize>| match n {
            Some(n) => {
                let position = position + n.cast_signed() * self.layout.strides()[axis];
                self.nested(format, axis + 1, position, indent + 1, columns.saturating_sub(1))
            }
            None => "...".to_owned(),
        };
        let mut text = "[".to_owned();
        if axis + 1 == rank {
            // The bracket needs a column too.
            let most = columns.saturating_sub(1);
            let mut line = indent;
            for (n, word) in parts.map(part).enumerate() {
                if n > 0 {
                    text.push(' ');
                    line += 1;
                }
                if line + word.len() > most && line > indent {
                    text.truncate(text.trim_end_matches(' ').len());
                    text.push('\n');
                    text.extend(std::iter::repeat_n(' ', indent));
                    line = indent;
                }
                line += word.len();
                text.push_str(&word);
            }
        } else {
            for (n, word) in parts.map(part).enumerate() {
                if n > 0 {
                    text.extend(std::iter::repeat_n('\n', rank - axis - 1));
                    text.extend(std::iter::repeat_n(' ', indent));
                }
                text.push_str(&word);
            }
        }
        text.push(']');
        text
    }

    /// The only element, which is not cut.
    fn scalar(&self) -> String {
        let (x, int) = self.at(self.layout.offset);
        match self.dtype {
            DType::Bool => truth(int).to_owned(),
            DType::U8 | DType::I32 | DType::I64 => int.to_string(),
            _ if !x.is_finite() => not_finite(x).to_owned(),
            _ => {
                let decimal = Decimal::shortest(self.dtype, x);
                if x == 0.0 || (SMALL..large(self.dtype, LARGE_SCALAR)).contains(&x.abs()) {
                    let (whole, fraction) = decimal.positional(x);
                    format!("{whole}.{}", if fraction.is_empty() { "0" } else { &fraction })
                } else {
                    let point = if decimal.digits.len() > 1 { "." } else { "" };
                    let (sign, (one, rest)) = (sign(x), decimal.digits.split_at(1));
                    format!("{sign}{one}{point}{rest}{}", exponent(decimal.exponent, 2))
                }
            }
        }
    }
}

/// How all elements of a tensor are written, so that columns are aligned.
enum ElementFormat {
    Bool,
    Int { columns: usize },
    Float(FloatFormat),
}

struct FloatFormat {
    /// With exponents of so many digits; none have any otherwise.
    exponent: Option<usize>,
    /// Digits behind the point.
    fraction: usize,
    /// Columns before the point, and behind it.
    left: usize,
    right: usize,
}

impl ElementFormat {
    fn of(elements: &Elements<'_>) -> ElementFormat {
        match elements.dtype {
            DType::Bool => ElementFormat::Bool,
            DType::U8 | DType::I32 | DType::I64 => {
                let mut columns = 0;
                let position = elements.layout.offset;
                elements.for_each_shown(0, position, &mut |_, int| columns = columns.max(int.to_string().len()));
                ElementFormat::Int { columns }
            }
            dtype => {
                let mut all = Vec::new();
                elements.for_each_shown(0, elements.layout.offset, &mut |x, _| all.push(x));
                ElementFormat::Float(FloatFormat::of(dtype, &all))
            }
        }
    }

    fn element(&self, dtype: DType, x: f64, int: i64) -> String {
        match self {
            ElementFormat::Bool => format!("{:>5}", truth(int)),
            ElementFormat::Int { columns } => format!("{int:>columns$}"),
            ElementFormat::Float(format) => format.element(dtype, x),
        }
    }
}

impl FloatFormat {
    fn of(dtype: DType, all: &[f64]) -> FloatFormat {
        let finite: Vec<f64> = all.iter().copied().filter(|x| x.is_finite()).collect();
        let mut format = FloatFormat { exponent: None, fraction: 0, left: 0, right: 0 };
        let is_scientific = needs_exponents(dtype, &finite);
        let mut exponent_digits = 0;
        for x in &finite {
            let (whole, fraction) = if is_scientific {
                let decimal = Decimal::shortest(dtype, *x).cut_scientific(*x, DIGITS_MAX);
                exponent_digits = exponent_digits.max(exponent(decimal.exponent, 2).len() - 2);
                let (one, rest) = decimal.digits.split_at(1);
                (format!("{}{one}", sign(*x)), rest.to_owned())
            } else {
                Decimal::shortest(dtype, *x).cut_positional(*x)
            };
            format.left = format.left.max(whole.len());
            format.fraction = format.fraction.max(fraction.len());
        }
        format.right = format.fraction;
        if is_scientific {
            format.exponent = Some(exponent_digits);
            format.right = exponent_digits + 2 + format.fraction;
        }
        for x in all.iter().filter(|x| !x.is_finite()) {
            format.left = format.left.max(not_finite(*x).len().saturating_sub(format.right + 1));
        }
        // As NumPy has it: a NaN takes as much as an infinity.
        if finite.len() < all.len() {
            format.left = format.left.max(3_usize.saturating_sub(format.right + 1));
        }
        format
    }

    fn element(&self, dtype: DType, x: f64) -> String {
        let &FloatFormat { left, right, fraction, .. } = self;
        if !x.is_finite() {
            return format!("{:>1$}", not_finite(x), left + right + 1);
        }
        if let Some(digits) = self.exponent {
            // All have as many digits as one of them needs, and where that is more than it takes, they are exact.
            let mut decimal = Decimal::shortest(dtype, x);
            if decimal.digits.len() != fraction + 1 {
                decimal = Decimal::read(&format!("{:.fraction$e}", x.abs()));
            }
            let (one, rest) = decimal.digits.split_at(1);
            let whole = format!("{}{one}", sign(x));
            return format!("{whole:>left$}.{rest:0<fraction$}{}", exponent(decimal.exponent, digits));
        }
        let (whole, rest) = Decimal::shortest(dtype, x).cut_positional(x);
        format!("{whole:>left$}.{rest:<right$}")
    }
}

/// Whether numbers are so large, so small or so different that they are written with exponents.
fn needs_exponents(dtype: DType, finite: &[f64]) -> bool {
    let magnitudes = || finite.iter().map(|x| x.abs()).filter(|x| *x != 0.0);
    let (Some(most), Some(least)) = (magnitudes().reduce(f64::max), magnitudes().reduce(f64::min)) else {
        return false;
    };
    most >= large(dtype, LARGE) || least < narrowed(dtype, SMALL) || narrowed(dtype, most / least) > SPREAD_MAX
}

/// From where on numbers have exponents: ten to the power of how many digits the type keeps, or less.
fn large(dtype: DType, most: f64) -> f64 {
    match dtype {
        DType::F64 => most,
        DType::F32 => 1e6,
        _ => 1e3,
    }
}

/// A number as that type has it.
#[expect(clippy::cast_possible_truncation, reason = "that is what it is for")]
fn narrowed(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::BF16 => bf16::from_f64(x).to_f64(),
        DType::F32 => f64::from(x as f32),
        _ => x,
    }
}

/// A number without its sign: `d.ddd` times ten to the power of the exponent.
struct Decimal {
    digits: String,
    exponent: i32,
}

impl Decimal {
    /// Of a text with an exponent.
    fn read(text: &str) -> Decimal {
        let (mantissa, exponent) = text.trim_start_matches('-').split_once('e').unwrap_or((text, "0"));
        let mut digits = mantissa.replace('.', "");
        digits.truncate(digits.trim_end_matches('0').len().max(1));
        Decimal { digits, exponent: exponent.parse().unwrap_or_default() }
    }

    /// As few digits as say which number of its type it is, and of those the nearest; of two that are as near, the even
    /// one.
    #[expect(clippy::cast_possible_truncation, reason = "it was an f32")]
    fn shortest(dtype: DType, x: f64) -> Decimal {
        let text = |fraction: usize| format!("{:.fraction$e}", x.abs());
        let is_it = |text: &String| text.parse().is_ok_and(|back: f64| narrowed(dtype, back) == x.abs());
        // The next one with as many digits: below a power of two numbers lie closer, so that it may be the only one.
        let next = |fraction: usize| {
            let step = Decimal::read(&text(fraction)).exponent - i32::try_from(fraction).unwrap_or_default();
            format!("{:.fraction$e}", text(fraction).parse().unwrap_or(0.0) + 10_f64.powi(step))
        };
        let found = match dtype {
            DType::F16 | DType::BF16 => {
                let mut all = (0..HALF_DIGITS).flat_map(|fraction| [text(fraction), next(fraction)]);
                all.find(is_it).unwrap_or_else(|| text(HALF_DIGITS))
            }
            DType::F32 => format!("{:e}", x.abs() as f32),
            _ => format!("{:e}", x.abs()),
        };
        let found = Decimal::read(&found);
        // The standard library rounds up where two are as near.
        let even = text(found.digits.len() - 1);
        if is_it(&even) { Decimal::read(&even) } else { found }
    }

    /// What is before the point and what is behind it.
    fn positional(&self, x: f64) -> (String, String) {
        let sign = sign(x);
        let digits = &self.digits;
        match usize::try_from(self.exponent) {
            Ok(exponent) if exponent + 1 >= digits.len() => {
                (format!("{sign}{digits:0<0$}", exponent + 1), String::new())
            }
            Ok(exponent) => {
                let (whole, fraction) = digits.split_at(exponent + 1);
                (format!("{sign}{whole}"), fraction.to_owned())
            }
            Err(_) => {
                let zeros = self.exponent.unsigned_abs() as usize - 1;
                (format!("{sign}0"), format!("{}{digits}", "0".repeat(zeros)))
            }
        }
    }

    /// The same, with no more digits behind the point than are shown.
    fn cut_positional(&self, x: f64) -> (String, String) {
        let (whole, fraction) = self.positional(x);
        if fraction.len() <= DIGITS_MAX {
            return (whole, fraction);
        }
        let text = format!("{:.DIGITS_MAX$}", x.abs());
        let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
        (format!("{}{whole}", sign(x)), fraction.trim_end_matches('0').to_owned())
    }

    fn cut_scientific(self, x: f64, fraction: usize) -> Decimal {
        if self.digits.len() <= fraction + 1 { self } else { Decimal::read(&format!("{:.fraction$e}", x.abs())) }
    }
}

fn sign(x: f64) -> &'static str {
    if x.is_sign_negative() { "-" } else { "" }
}

fn exponent(exponent: i32, digits: usize) -> String {
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("e{sign}{:0>digits$}", exponent.unsigned_abs())
}

fn not_finite(x: f64) -> &'static str {
    if x.is_nan() {
        "nan"
    } else if x > 0.0 {
        "inf"
    } else {
        "-inf"
    }
}

fn truth(int: i64) -> &'static str {
    if int == 0 { "False" } else { "True" }
}
