//! The arguments of `kernel run`, from what a person wrote to numbers and the contents of files.

use std::fmt::Display;
use std::io::Read;
use std::path::{Path, PathBuf};

use tensor_wasm_jit::{SHARED_ADDRESS, Ty};

use crate::Failed;
use crate::npy::{self, Dtype, Layout};

/// More than this has no place in a kernel's addresses, whatever the device.
const BYTES_MAX: u64 = SHARED_ADDRESS as u64;

const FORMS: &str = "i32:N, i64:N, f32:X, f64:X, in:FILE, inout:FILE=OUT or out:TYPE[SHAPE]=OUT";

/// An `--arg`, understood but with nothing read yet.
pub(crate) struct Given {
    text: String,
    pub(crate) value: Value,
}

pub(crate) enum Value {
    I32(i32),
    I64(i64),
    F32(f32),
    F64(f64),
    In(PathBuf),
    InOut { from: PathBuf, to: PathBuf },
    Out { array: Layout, to: PathBuf },
}

/// What a buffer begins with, and what becomes of it.
pub(crate) struct Content {
    /// None for a buffer that begins as zeros.
    pub(crate) file: Option<Vec<u8>>,
    /// Where in the file the elements begin.
    pub(crate) begins: usize,
    pub(crate) bytes: u64,
    pub(crate) output: Option<Output>,
}

/// A file to be written.
pub(crate) struct Output {
    pub(crate) file: PathBuf,
    /// None where nothing is known but bytes.
    pub(crate) layout: Option<Layout>,
}

impl Output {
    /// What the file has before the elements.
    pub(crate) fn header(&self) -> Vec<u8> {
        match &self.layout {
            Some(layout) if is_npy(&self.file) => layout.header(),
            _ => Vec::new(),
        }
    }
}

fn is_npy(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npy"))
}

impl Given {
    pub(crate) fn parse(text: &str) -> Result<Given, Failed> {
        let given = |value| Given { text: text.to_owned(), value };
        value(text).map(given).map_err(|why| Failed::Usage(format!("--arg {text}: {why}")))
    }

    /// A mistake in this argument.
    pub(crate) fn wrong(&self, why: impl Display) -> Failed {
        Failed::Usage(format!("--arg {}: {why}", self.text))
    }

    /// The type of parameter it can be given for. Memory is given for an address.
    pub(crate) fn ty(&self) -> Ty {
        match self.value {
            Value::I64(_) => Ty::I64,
            Value::F32(_) => Ty::F32,
            Value::F64(_) => Ty::F64,
            Value::I32(_) | Value::In(_) | Value::InOut { .. } | Value::Out { .. } => Ty::I32,
        }
    }

    /// Reads what is to be read. None for a number.
    pub(crate) fn content(&self) -> Result<Option<Content>, Failed> {
        Ok(Some(match &self.value {
            Value::I32(_) | Value::I64(_) | Value::F32(_) | Value::F64(_) => return Ok(None),
            Value::In(from) => self.read(from, None)?,
            Value::InOut { from, to } => self.read(from, Some(to))?,
            Value::Out { array, to } => {
                self.check_output(to)?;
                // Found to be a number when it was understood.
                let bytes = array.bytes().unwrap_or(u64::MAX);
                let output = Some(Output { file: to.clone(), layout: Some(array.clone()) });
                Content { file: None, begins: 0, bytes, output }
            }
        }))
    }

    fn read(&self, from: &Path, to: Option<&PathBuf>) -> Result<Content, Failed> {
        let bad = |why: &dyn Display| self.wrong(format!("{}: {why}", from.display()));
        if let Some(to) = to {
            self.check_output(to)?;
            if is_npy(to) && !is_npy(from) {
                let why =
                    "it is raw bytes, so the type and shape for an .npy file are not known; give OUT another name";
                return Err(bad(&why));
            }
        }
        let file = std::fs::File::open(from).map_err(|e| bad(&e))?;
        let too_large = "it is too large: the buffers of a launch must fit into 32-bit addresses together";
        let len = file.metadata().map_or(0, |metadata| metadata.len());
        if len > BYTES_MAX {
            return Err(bad(&too_large));
        }
        // One byte more, so that the end is seen without asking for memory again.
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(usize::try_from(len + 1).unwrap_or(usize::MAX)).map_err(|e| bad(&e))?;
        // Not all files say how long they are, or end.
        file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|e| bad(&e))?;
        if bytes.len() as u64 > BYTES_MAX {
            return Err(bad(&too_large));
        }
        let (layout, begins) = if is_npy(from) {
            npy::read(&bytes).map(|(layout, begins)| (Some(layout), begins)).map_err(|why| bad(&why))?
        } else {
            (None, 0)
        };
        let len = (bytes.len() - begins) as u64;
        let output = to.map(|to| Output { file: to.clone(), layout });
        Ok(Content { file: Some(bytes), begins, bytes: len, output })
    }

    /// Finds out before the launch what would keep its output from being written after it.
    fn check_output(&self, to: &Path) -> Result<(), Failed> {
        let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match (to.is_dir(), folder.is_dir()) {
            (true, _) => Err(self.wrong(format!("{} is a folder, and a file is to be written", to.display()))),
            (_, false) => Err(self.wrong(format!("there is no folder {} to write into", folder.display()))),
            _ => Ok(()),
        }
    }
}

/// Two outputs in one file would be one lost.
pub(crate) fn check_outputs(all: &[Given]) -> Result<(), Failed> {
    let output = |given: &Given| match &given.value {
        Value::InOut { to, .. } | Value::Out { to, .. } => Some(to.clone()),
        _ => None,
    };
    for (n, given) in all.iter().enumerate() {
        let Some(to) = output(given) else { continue };
        if all[..n].iter().filter_map(output).any(|other| other == to) {
            return Err(given.wrong(format!("another argument is written to {} already", to.display())));
        }
    }
    Ok(())
}

fn value(text: &str) -> Result<Value, String> {
    let (kind, rest) = text.split_once(':').ok_or_else(|| format!("expected {FORMS}"))?;
    let file = |file: &str| match file {
        "" => Err("the name of a file is missing".to_owned()),
        file => Ok(PathBuf::from(file)),
    };
    match kind {
        "i32" => whole(rest, i64::from(i32::MIN), u64::from(u32::MAX)).map(|bits| Value::I32(low(bits))),
        "i64" => whole(rest, i64::MIN, u64::MAX).map(|bits| Value::I64(bits.cast_signed())),
        "f32" => real(rest, rest.parse::<f32>().ok().filter(|x| x.is_finite() || is_special(rest))).map(Value::F32),
        "f64" => real(rest, rest.parse::<f64>().ok().filter(|x| x.is_finite() || is_special(rest))).map(Value::F64),
        "in" => Ok(Value::In(file(rest)?)),
        "inout" => {
            let (from, to) = rest.split_once('=').ok_or("expected inout:FILE=OUT, where OUT is written")?;
            Ok(Value::InOut { from: file(from)?, to: file(to)? })
        }
        "out" => {
            let (array, to) =
                rest.split_once('=').ok_or("expected out:TYPE[SHAPE]=OUT, such as out:f32[1024]=y.npy")?;
            Ok(Value::Out { array: array_of(array)?, to: file(to)? })
        }
        _ => Err(format!("{kind:?} is no kind of argument; expected {FORMS}")),
    }
}

/// A whole number, as the 64 bits of it. Both signed and unsigned ones are numbers of the type, as in Wasm.
fn whole(text: &str, min: i64, max: u64) -> Result<u64, String> {
    let (is_negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let (digits, radix) = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None => (digits, 10),
    };
    // What is parsed next may not have a sign of its own.
    let has_digits = digits.starts_with(|c: char| c.is_digit(radix));
    let magnitude = u64::from_str_radix(digits, radix).ok().filter(|_| has_digits);
    let bits = match (is_negative, magnitude) {
        (false, Some(n)) if n <= max => Some(n),
        (true, Some(n)) if n <= min.unsigned_abs() => Some(n.wrapping_neg()),
        _ => None,
    };
    bits.ok_or_else(|| format!("expected a whole number from {min} to {max}, found {text:?}"))
}

/// The low half of the bits of a number that fits.
fn low(bits: u64) -> i32 {
    let [a, b, c, d, ..] = bits.to_le_bytes();
    i32::from_le_bytes([a, b, c, d])
}

fn real<T>(text: &str, value: Option<T>) -> Result<T, String> {
    value.ok_or_else(|| format!("expected a number such as 2.5, -1e-3, inf or nan, found {text:?}"))
}

/// Whether infinity or NaN is what was meant, and not what came of too large a number.
fn is_special(text: &str) -> bool {
    text.trim_start_matches(['+', '-']).starts_with(['i', 'I', 'n', 'N'])
}

/// A type and shape: `f32[32,32]`.
fn array_of(text: &str) -> Result<Layout, String> {
    let expected = || format!("expected TYPE[SHAPE] such as f32[1024] or u8[32,32], found {text:?}");
    let (name, shape) = text.strip_suffix(']').and_then(|text| text.split_once('[')).ok_or_else(expected)?;
    let dtype =
        Dtype::named(name).ok_or_else(|| format!("{name:?} is no type of elements; known are {}", Dtype::names()))?;
    let number = |n: &str| n.trim().parse::<u64>().map_err(|_| expected());
    let shape = shape.split(',').map(number).collect::<Result<Vec<u64>, String>>()?;
    if shape.len() > npy::DIMENSIONS_MAX {
        return Err(format!("an array has at most {} dimensions", npy::DIMENSIONS_MAX));
    }
    let array = Layout { dtype, shape };
    match array.bytes() {
        Some(bytes) if bytes <= BYTES_MAX => Ok(array),
        _ => Err(format!("{array} is too large: the buffers of a launch must fit into 32-bit addresses together")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_what_was_written() {
        let i32 = |text: &str| match value(&format!("i32:{text}")) {
            Ok(Value::I32(value)) => Some(value),
            _ => None,
        };
        for (text, expected) in [
            ("7", 7),
            ("-7", -7),
            ("0x10", 16),
            ("-0x10", -16),
            ("0xffffffff", -1),
            ("4294967295", -1),
            ("2147483647", i32::MAX),
            ("-2147483648", i32::MIN),
        ] {
            assert_eq!(i32(text), Some(expected), "{text}");
        }
        for text in ["", "-", "0x", "+7", "--7", "0x-1", "1.5", "4294967296", "-2147483649", "7 ", "1_0", "seven"] {
            assert_eq!(i32(text), None, "{text}");
        }
        let i64 = |text: &str| match value(&format!("i64:{text}")) {
            Ok(Value::I64(value)) => Some(value),
            _ => None,
        };
        assert_eq!(i64("-9223372036854775808"), Some(i64::MIN));
        assert_eq!(i64("0xffffffffffffffff"), Some(-1));
        assert_eq!((i64("18446744073709551616"), i64("-9223372036854775809")), (None, None));
        let f32 = |text: &str| match value(&format!("f32:{text}")) {
            Ok(Value::F32(value)) => Some(value.to_bits()),
            _ => None,
        };
        for (text, expected) in
            [("2.5", 2.5), ("-1e-3", -1e-3), ("3", 3.0), ("inf", f32::INFINITY), ("-inf", f32::NEG_INFINITY)]
        {
            assert_eq!(f32(text), Some(expected.to_bits()), "{text}");
        }
        assert!(f32("nan").is_some_and(|bits| f32::from_bits(bits).is_nan()));
        for text in ["", "1e39", "0x10", "two", "1,5"] {
            assert_eq!(f32(text), None, "{text}");
        }
        assert!(matches!(value("f64:1e39"), Ok(Value::F64(1e39))));
        assert!(value("f64:1e999").is_err());
    }

    #[test]
    fn arrays_have_a_type_and_a_shape() {
        let array = array_of("u16[32, 4]").unwrap();
        assert_eq!((array.shape.as_slice(), array.bytes()), (&[32, 4][..], Some(256)));
        assert_eq!(array_of("f64[0]").unwrap().bytes(), Some(0));
        for text in ["f32", "f32[]", "f32[", "f32]", "[8]", "f16[8]", "f32[-1]", "f32[8,]", "f32[8]x", "f32[1e3]"] {
            assert!(array_of(text).is_err(), "{text}");
        }
        for text in ["f32[4294967296]", "f64[18446744073709551615,18446744073709551615]", "u8[4294967295,4294967295]"] {
            assert!(array_of(text).unwrap_err().contains("too large"), "{text}");
        }
    }
}
