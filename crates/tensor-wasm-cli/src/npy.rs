//! Arrays in files, as NumPy writes them (`.npy`): a header that says type and shape, then the elements. Files come
//! from anywhere, so nothing in a header is believed before the file's own size agrees with it. Why this is not a crate
//! of the field is in `docs/DESIGN.md`.

use std::fmt;

/// What every file begins with; two bytes of version follow.
const MAGIC: &[u8] = b"\x93NUMPY";

/// As many as NumPy itself allows.
pub(crate) const DIMENSIONS_MAX: usize = 64;

/// Where data begins in files written here is a multiple of this.
const DATA_ALIGN: usize = 64;

/// The type of an array's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dtype {
    pub(crate) name: &'static str,
    /// As headers have it, without the byte order.
    code: &'static str,
    pub(crate) bytes: u64,
}

const DTYPES: [Dtype; 10] = [
    Dtype { name: "i8", code: "i1", bytes: 1 },
    Dtype { name: "u8", code: "u1", bytes: 1 },
    Dtype { name: "i16", code: "i2", bytes: 2 },
    Dtype { name: "u16", code: "u2", bytes: 2 },
    Dtype { name: "i32", code: "i4", bytes: 4 },
    Dtype { name: "u32", code: "u4", bytes: 4 },
    Dtype { name: "i64", code: "i8", bytes: 8 },
    Dtype { name: "u64", code: "u8", bytes: 8 },
    Dtype { name: "f32", code: "f4", bytes: 4 },
    Dtype { name: "f64", code: "f8", bytes: 8 },
];

impl Dtype {
    pub(crate) fn named(name: &str) -> Option<Dtype> {
        DTYPES.into_iter().find(|dtype| dtype.name == name)
    }

    /// The names of all types.
    pub(crate) fn names() -> String {
        DTYPES.map(|dtype| dtype.name).join(" ")
    }

    /// The type that a header names.
    fn described(text: &str) -> Result<Dtype, String> {
        let unknown = || format!("its elements are {text:?}; known are {}", Dtype::names());
        let order = text.chars().next().ok_or_else(unknown)?;
        let code = text.strip_prefix(['<', '>', '|', '=']).ok_or_else(unknown)?;
        if code.starts_with('O') {
            return Err("its elements are Python objects, which are not numbers".to_owned());
        }
        let dtype = DTYPES.into_iter().find(|dtype| dtype.code == code).ok_or_else(unknown)?;
        match order {
            // A single byte has no order.
            _ if dtype.bytes == 1 => Ok(dtype),
            '<' => Ok(dtype),
            '>' => Err(format!(
                "its elements are big-endian ({text:?}); convert them with array.astype(\"<{code}\") in NumPy"
            )),
            _ => Err(unknown()),
        }
    }
}

/// What an array is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
}

impl Layout {
    /// The size of its elements together, if that is a number at all.
    pub(crate) fn bytes(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape.iter().try_fold(self.dtype.bytes, |bytes, n| bytes.checked_mul(*n))
    }

    /// The shape as people write it; a single value has none.
    pub(crate) fn shape_text(&self) -> String {
        self.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
    }

    /// What a file of version 1.0 has before the elements.
    pub(crate) fn header(&self) -> Vec<u8> {
        let order = if self.dtype.bytes == 1 { '|' } else { '<' };
        // A tuple of one has a comma.
        let comma = if self.shape.len() == 1 { "," } else { "" };
        let shape = self.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let code = self.dtype.code;
        let mut text = format!("{{'descr': '{order}{code}', 'fortran_order': False, 'shape': ({shape}{comma}), }}");
        let before = MAGIC.len() + 4;
        let end = (before + text.len() + 1).next_multiple_of(DATA_ALIGN);
        text.extend(std::iter::repeat_n(' ', end - before - text.len() - 1));
        text.push('\n');
        let mut header = MAGIC.to_vec();
        header.extend([1, 0]);
        // At most 64 numbers of 20 digits.
        header.extend(u16::try_from(text.len()).unwrap_or(u16::MAX).to_le_bytes());
        header.extend(text.as_bytes());
        header
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.dtype.name, self.shape_text())
    }
}

/// Reads a file: what the array is like, and where in the file its elements begin. They are the rest of it.
pub(crate) fn read(file: &[u8]) -> Result<(Layout, usize), String> {
    let rest = file.strip_prefix(MAGIC).ok_or("it is not an .npy file: it does not begin with \\x93NUMPY")?;
    let cut = || format!("it is cut off: it ends in its header, after {} bytes", file.len());
    let ([major, minor], rest) = rest.split_first_chunk().ok_or_else(cut)?;
    let (len, rest) = match (major, minor) {
        (1, 0) => rest.split_first_chunk().map(|(len, rest)| (usize::from(u16::from_le_bytes(*len)), rest)),
        (2 | 3, 0) => {
            let len = |len: &[u8; 4]| usize::try_from(u32::from_le_bytes(*len)).unwrap_or(usize::MAX);
            rest.split_first_chunk().map(|(bytes, rest)| (len(bytes), rest))
        }
        _ => return Err(format!("it is .npy of version {major}.{minor}; known are 1.0, 2.0 and 3.0")),
    }
    .ok_or_else(cut)?;
    let header = rest.get(..len).ok_or_else(cut)?;
    let layout = Header { rest: header }.layout()?;
    let has = (rest.len() - len) as u64;
    match layout.bytes() {
        None => Err(format!("its header says {layout}, which is more than any memory holds")),
        Some(bytes) if bytes > has => {
            Err(format!("it is cut off: its header says {layout}, {bytes} bytes, and {has} are there"))
        }
        Some(bytes) if bytes < has => {
            Err(format!("its header says {layout}, {bytes} bytes, and {} more are there", has - bytes))
        }
        Some(_) => Ok((layout, file.len() - rest.len() + len)),
    }
}

/// A header being read: a dictionary as Python writes it.
struct Header<'a> {
    rest: &'a [u8],
}

impl<'a> Header<'a> {
    fn layout(mut self) -> Result<Layout, String> {
        let (mut dtype, mut is_fortran, mut shape) = (None, None, None);
        self.expect(b'{')?;
        while !self.eat(b'}') {
            let key = self.string()?;
            self.expect(b':')?;
            let is_again = match key {
                "descr" if matches!(self.peek(), Some(b'[' | b'(')) => {
                    return Err(format!("its elements are records of several fields; known are {}", Dtype::names()));
                }
                "descr" => dtype.replace(Dtype::described(self.string()?)?).is_some(),
                "fortran_order" => is_fortran.replace(self.boolean()?).is_some(),
                "shape" => shape.replace(self.tuple()?).is_some(),
                _ => return Err(format!("its header has {:?}, which means nothing", shortened(key.as_bytes()))),
            };
            if is_again {
                return Err(format!("its header says {key} twice"));
            }
            if !self.eat(b',') {
                self.expect(b'}')?;
                break;
            }
        }
        if self.peek().is_some() {
            return Err(self.unexpected("its end"));
        }
        let missing = |key: &str| format!("its header does not say {key}");
        let (dtype, is_fortran) =
            (dtype.ok_or_else(|| missing("descr"))?, is_fortran.ok_or_else(|| missing("fortran_order"))?);
        let shape: Vec<u64> = shape.ok_or_else(|| missing("shape"))?;
        // With one dimension there is only one order.
        if is_fortran && shape.len() > 1 {
            return Err(
                "its elements are in Fortran order; convert them with numpy.ascontiguousarray(array)".to_owned()
            );
        }
        Ok(Layout { dtype, shape })
    }

    /// The next byte that is no space.
    fn peek(&mut self) -> Option<u8> {
        self.rest = self.rest.trim_ascii_start();
        self.rest.first().copied()
    }

    fn eat(&mut self, byte: u8) -> bool {
        let is_there = self.peek() == Some(byte);
        if is_there {
            self.rest = &self.rest[1..];
        }
        is_there
    }

    fn expect(&mut self, byte: u8) -> Result<(), String> {
        if self.eat(byte) { Ok(()) } else { Err(self.unexpected(&format!("'{}'", char::from(byte)))) }
    }

    fn unexpected(&self, wanted: &str) -> String {
        format!("its header is damaged: {wanted} was expected at {:?}", shortened(self.rest))
    }

    fn string(&mut self) -> Result<&'a str, String> {
        let quote = self.peek().filter(|byte| matches!(byte, b'\'' | b'"')).ok_or_else(|| self.unexpected("a text"))?;
        let inside = &self.rest[1..];
        let end = inside.iter().position(|byte| *byte == quote).ok_or_else(|| self.unexpected("a text that ends"))?;
        let text = std::str::from_utf8(&inside[..end]).map_err(|_| self.unexpected("a text"))?;
        self.rest = &inside[end + 1..];
        Ok(text)
    }

    fn boolean(&mut self) -> Result<bool, String> {
        self.peek();
        for (text, value) in [(&b"True"[..], true), (b"False", false)] {
            if let Some(rest) = self.rest.strip_prefix(text) {
                self.rest = rest;
                return Ok(value);
            }
        }
        Err(self.unexpected("True or False"))
    }

    fn tuple(&mut self) -> Result<Vec<u64>, String> {
        let mut numbers = Vec::new();
        self.expect(b'(')?;
        while !self.eat(b')') {
            numbers.push(self.number()?);
            if numbers.len() > DIMENSIONS_MAX {
                return Err(format!("its header says more than {DIMENSIONS_MAX} dimensions"));
            }
            if !self.eat(b',') {
                self.expect(b')')?;
                break;
            }
        }
        Ok(numbers)
    }

    fn number(&mut self) -> Result<u64, String> {
        self.peek();
        let digits = self.rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let text = std::str::from_utf8(&self.rest[..digits]).unwrap_or_default();
        let number = text.parse().map_err(|_| match digits {
            0 => self.unexpected("a number of elements"),
            _ => {
                format!("its header says a dimension of {}, which is more than any memory holds", shortened(self.rest))
            }
        })?;
        // Python 2 wrote long numbers with an L.
        self.rest = self.rest[digits..].strip_prefix(b"L").unwrap_or(&self.rest[digits..]);
        Ok(number)
    }
}

/// The beginning of something that may be of any length and hold anything.
fn shortened(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(24)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(version: u8, header: &str, data: usize) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        file.extend([version, 0]);
        match version {
            1 => file.extend(u16::try_from(header.len()).unwrap().to_le_bytes()),
            _ => file.extend(u32::try_from(header.len()).unwrap().to_le_bytes()),
        }
        file.extend(header.as_bytes());
        file.extend(vec![7; data]);
        file
    }

    fn header(descr: &str, shape: &str) -> String {
        format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n")
    }

    fn layout(name: &str, shape: &[u64]) -> Layout {
        Layout { dtype: Dtype::named(name).unwrap(), shape: shape.to_vec() }
    }

    #[test]
    fn what_is_written_is_read_again() {
        for dtype in DTYPES {
            for shape in [&[][..], &[0], &[1], &[1000], &[3, 5], &[2, 0, 9], &[1; 64]] {
                let layout = Layout { dtype, shape: shape.to_vec() };
                let mut file = layout.header();
                let begins = file.len();
                assert!(begins.is_multiple_of(DATA_ALIGN) && file.ends_with(b"\n"), "{layout}");
                file.resize(begins + usize::try_from(layout.bytes().unwrap()).unwrap(), 1);
                assert_eq!(read(&file), Ok((layout, begins)));
            }
        }
    }

    #[test]
    fn the_bytes_are_those_of_numpy() {
        // numpy.save(file, numpy.zeros((3, 4), "f4")), without the elements.
        let text = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }";
        let expected = [&b"\x93NUMPY\x01\0v\0"[..], format!("{text:<117}\n").as_bytes()].concat();
        assert_eq!(layout("f32", &[3, 4]).header(), expected);
        assert_eq!(expected.len(), 128);
    }

    #[test]
    fn all_versions_and_ways_to_write_a_header_are_read() {
        for version in 1..=3 {
            let file = file(version, &header("'<i2'", "(2, 3)"), 12);
            assert_eq!(read(&file), Ok((layout("i16", &[2, 3]), file.len() - 12)), "{version}");
        }
        let tight = r#"{"shape":(3L,),"fortran_order":True,"descr":"|u1"}"#;
        assert_eq!(read(&file(1, tight, 3)).unwrap().0, layout("u8", &[3]));
        assert_eq!(read(&file(1, &header("'>i1'", "(3,)"), 3)).unwrap().0, layout("i8", &[3]));
        // A single value.
        assert_eq!(read(&file(1, &header("'<f8'", "()"), 8)).unwrap().0, layout("f64", &[]));
    }

    #[test]
    fn what_cannot_be_used_is_refused_in_words() {
        let refused = |file: &[u8], expected: &str| {
            let why = read(file).unwrap_err();
            assert!(why.contains(expected), "{why:?} does not say {expected:?}");
            assert!(!why.contains('\n') && why.len() < 200, "{why}");
        };
        refused(b"", "not an .npy file");
        refused(b"PK\x03\x04 an .npz", "not an .npy file");
        refused(MAGIC, "cut off: it ends in its header, after 6 bytes");
        refused(b"\x93NUMPY\x01\0\xff", "cut off");
        refused(b"\x93NUMPY\x02\0\xff\xff\xff\xff{", "cut off");
        refused(&file(4, "{}", 0), "version 4.0; known are 1.0, 2.0 and 3.0");
        refused(
            &file(1, &header("'>f4'", "(3,)"), 12),
            "big-endian (\">f4\"); convert them with array.astype(\"<f4\")",
        );
        refused(&file(1, &header("'|O'", "(3,)"), 12), "Python objects");
        refused(&file(1, &header("[('a', '<f4')]", "(3,)"), 12), "records of several fields");
        for descr in ["'<f2'", "'<c8'", "'|b1'", "'<U4'", "'f4'", "''", "'|f4'", "'=f4'", "'<'"] {
            refused(&file(1, &header(descr, "(3,)"), 12), "known are i8 u8 i16");
        }
        let fortran = header("'<f4'", "(3, 2)").replace("False", "True");
        refused(&file(1, &fortran, 24), "Fortran order; convert them with numpy.ascontiguousarray");
        let of = |shape: &str, data| file(1, &header("'<f4'", shape), data);
        refused(&of("(3,)", 11), "cut off: its header says f32[3], 12 bytes, and 11 are there");
        refused(&of("(3,)", 13), "f32[3], 12 bytes, and 1 more are there");
        refused(&of("(4611686018427387904, 4)", 8), "more than any memory holds");
        refused(&of("(18446744073709551615, 0)", 8), "0 bytes, and 8 more are there");
        refused(&of("(18446744073709551616,)", 8), "a dimension of 18446744073709551616");
        refused(&of(&format!("({},)", "9".repeat(5000)), 8), "a dimension of 9999");
        refused(&of("(-1,)", 8), "a number of elements was expected at \"-1,");
        refused(&of(&format!("({})", "1,".repeat(65)), 8), "more than 64 dimensions");
        for damaged in [
            "",
            "{",
            "{'descr",
            "{'descr': }",
            "{'descr': '<f4'",
            "{'descr' '<f4'}",
            "[]",
            "{'shape': (3}",
            "{'shape': (3 4)}",
            "{'shape': 3}",
            "{'fortran_order': 0}",
            "{'fortran_order': Falsehood}",
            "{,}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)} x",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}}",
        ] {
            refused(&file(1, damaged, 12), "its header is damaged");
        }
        refused(&file(1, "{}", 0), "does not say descr");
        refused(&file(1, "{'descr': '<f4', 'fortran_order': False}", 0), "does not say shape");
        refused(&file(1, "{'shape': (), 'shape': ()}", 0), "says shape twice");
        refused(&file(1, "{'more': ''}", 0), "has \"more\", which means nothing");
    }

    #[test]
    fn damage_of_any_kind_is_never_more_than_an_error() {
        let good = file(1, &header("'<f4'", "(2, 3)"), 24);
        for cut in 0..good.len() {
            assert!(read(&good[..cut]).is_err(), "{cut}");
        }
        let begins = good.len() - 24;
        for at in 0..begins {
            for value in 0..=255 {
                let mut bad = good.clone();
                bad[at] = value;
                // Whatever it says, it is about bytes that are there.
                if let Ok((layout, begins)) = read(&bad) {
                    assert_eq!(layout.bytes(), Some((bad.len() - begins) as u64));
                }
            }
        }
    }
}
