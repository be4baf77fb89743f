//! Arrays as NumPy writes them: `.npy`, a header that says type and shape and then the elements, and `.npz`, an archive
//! of those. Written by hand: `docs/DESIGN.md` says what the crates for it do with headers that lie.

use std::collections::BTreeMap;
use std::io::{Read, Seek, Write};
use std::panic::Location;
use std::path::Path;
use std::sync::Arc;

use super::zip::{Archive, ArchiveWriter, INFLATED_BYTES_MAX};
use super::{FileCall, Order, Parsed, Why, bytes_of, element_bytes, open, read_exactly, save, shortened, tensor_of};
use crate::cpu::memory::FileBytes;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{Caller, Tensor};

/// What every file begins with; two bytes of version follow.
const MAGIC: &[u8] = b"\x93NUMPY";

/// Where elements begin in files written here is a multiple of this.
const DATA_ALIGN: usize = 64;

/// As many axes as NumPy itself allows.
const AXES_MAX: usize = 64;

/// Bytes of a header. Those of arrays with a single element type have some hundred; NumPy itself stops at 10,000.
const HEADER_BYTES_MAX: usize = 1 << 16;

/// What a file of the first version has before its header.
const PREFIX_BYTES: usize = MAGIC.len() + 4;

/// Element types that `.npy` can say, as headers have them without the byte order.
const CODES: [(DType, &str); 7] = [
    (DType::Bool, "b1"),
    (DType::U8, "u1"),
    (DType::I32, "i4"),
    (DType::I64, "i8"),
    (DType::F16, "f2"),
    (DType::F32, "f4"),
    (DType::F64, "f8"),
];

/// Reads a `.npy` file. Elements in Fortran order are not moved: the tensor is a transposed view of them.
#[track_caller]
pub fn load_npy(path: impl AsRef<Path>) -> Result<Tensor> {
    let path = path.as_ref();
    FileCall::on("load_npy", path, Location::caller()).run(|at| {
        let (mut file, len) = open(path)?;
        read(&mut file, len, at)
    })
}

/// Reads what is in a `.npy` file, and copies its elements.
#[track_caller]
pub fn read_npy(mut bytes: &[u8]) -> Result<Tensor> {
    let len = bytes.len() as u64;
    FileCall::on_bytes("read_npy", Location::caller()).run(|at| read(&mut bytes, len, at))
}

/// Writes a `.npy` file, as a whole or not at all.
#[track_caller]
pub fn save_npy(path: impl AsRef<Path>, tensor: &Tensor) -> Result<()> {
    let path = path.as_ref();
    FileCall::on("save_npy", path, Location::caller()).run(|_| save(path, |file| write(file, tensor)))
}

/// Writes what a `.npy` file has.
#[track_caller]
pub fn write_npy(mut writer: impl Write, tensor: &Tensor) -> Result<()> {
    FileCall::on_bytes("write_npy", Location::caller()).run(|_| write(&mut writer, tensor))
}

/// Reads all arrays of an `.npz` file, by name. Together they have at most [`INFLATED_BYTES_MAX`] more bytes than the
/// file.
#[track_caller]
pub fn load_npz(path: impl AsRef<Path>) -> Result<BTreeMap<String, Tensor>> {
    let path = path.as_ref();
    FileCall::on("load_npz", path, Location::caller()).run(|at| load_archive(path, INFLATED_BYTES_MAX, at))
}

/// [`load_npz`] with another limit, for files that are known to be large and are trusted.
#[track_caller]
pub fn load_npz_within(path: impl AsRef<Path>, inflated_bytes_max: u64) -> Result<BTreeMap<String, Tensor>> {
    let path = path.as_ref();
    FileCall::on("load_npz_within", path, Location::caller()).run(|at| load_archive(path, inflated_bytes_max, at))
}

/// Reads what is in an `.npz` file, and copies it, within the same limit.
#[track_caller]
pub fn read_npz(bytes: &[u8]) -> Result<BTreeMap<String, Tensor>> {
    FileCall::on_bytes("read_npz", Location::caller())
        .run(|at| read_archive(std::io::Cursor::new(bytes), bytes.len() as u64, INFLATED_BYTES_MAX, at))
}

/// Writes an `.npz` file of arrays with names, uncompressed as `numpy.savez` does.
#[track_caller]
pub fn save_npz(path: impl AsRef<Path>, tensors: impl IntoIterator<Item = (impl Into<String>, Tensor)>) -> Result<()> {
    let path = path.as_ref();
    let tensors: Vec<(String, Tensor)> = tensors.into_iter().map(|(name, tensor)| (name.into(), tensor)).collect();
    FileCall::on("save_npz", path, Location::caller()).run(|_| {
        Tensor::realize_all(&tensors.iter().map(|(_, tensor)| tensor).collect::<Vec<_>>())?;
        save(path, |file| {
            let mut archive = ArchiveWriter::new(file);
            for (name, tensor) in &tensors {
                let of = |why: Why| why.of(&format!("{name:?}"));
                let value = tensor.value()?;
                let header = header(tensor).map_err(of)?;
                let elements = element_bytes(&value, tensor.dtype())?;
                archive.add(&format!("{name}.npy"), &[&header, &elements]).map_err(of)?;
            }
            archive.finish()
        })
    })
}

fn load_archive(path: &Path, inflated_bytes_max: u64, at: Caller) -> Parsed<BTreeMap<String, Tensor>> {
    let (file, len) = open(path)?;
    read_archive(file, len, inflated_bytes_max, at)
}

fn read_archive(
    file: impl Read + Seek,
    len: u64,
    inflated_bytes_max: u64,
    at: Caller,
) -> Parsed<BTreeMap<String, Tensor>> {
    let mut archive = Archive::open(file, len, inflated_bytes_max)?;
    let mut tensors = BTreeMap::new();
    for member in archive.members() {
        let of = |why: Why| why.of(&format!("{:?}", member.name));
        let name = member.name.strip_suffix(".npy").ok_or_else(|| of("it is no .npy, and not read here".into()))?;
        let tensor = archive.read(&member, |source| read(source, member.bytes, at)).map_err(of)?;
        tensors.insert(name.to_owned(), tensor);
    }
    Ok(tensors)
}

fn header(tensor: &Tensor) -> Parsed<Vec<u8>> {
    let dtype = tensor.dtype();
    let (_, code) = CODES.into_iter().find(|(known, _)| *known == dtype).ok_or_else(|| {
        format!("NumPy has no {dtype}; make it f32 with .cast(DType::F32), or save it as safetensors")
    })?;
    let order = if dtype.size() == 1 { '|' } else { '<' };
    let sizes: Vec<String> = tensor.shape().iter().map(usize::to_string).collect();
    // A tuple of one has a comma.
    let comma = if sizes.len() == 1 { "," } else { "" };
    let sizes = sizes.join(", ");
    let mut text = format!("{{'descr': '{order}{code}', 'fortran_order': False, 'shape': ({sizes}{comma}), }}");
    let end = (PREFIX_BYTES + text.len() + 1).next_multiple_of(DATA_ALIGN);
    text.extend(std::iter::repeat_n(' ', end - PREFIX_BYTES - text.len() - 1));
    text.push('\n');
    let mut header = MAGIC.to_vec();
    header.extend([1, 0]);
    // Eight numbers of 20 digits at most.
    header.extend(u16::try_from(text.len()).unwrap_or(u16::MAX).to_le_bytes());
    header.extend(text.as_bytes());
    Ok(header)
}

fn write(to: &mut impl Write, tensor: &Tensor) -> Parsed<()> {
    let header = header(tensor)?;
    let value = tensor.value()?;
    to.write_all(&header)?;
    Ok(to.write_all(&element_bytes(&value, tensor.dtype())?)?)
}

/// Reads an array of which `len` bytes are there.
fn read(source: &mut (impl Read + ?Sized), len: u64, at: Caller) -> Parsed<Tensor> {
    let cut = || Why::Wrong(format!("it is cut off: it ends in its header, after {len} bytes"));
    let mut left = usize::try_from(len).map_err(|_| Why::Memory { bytes: usize::MAX })?;
    // Takes as many bytes as there must be, if there are so many.
    let mut next = |bytes: usize| {
        left = left.checked_sub(bytes).ok_or_else(cut)?;
        Ok::<_, Why>((read_exactly(source, bytes)?.ok_or_else(cut)?, left))
    };
    let (magic, _) = next(MAGIC.len().min(usize::try_from(len).unwrap_or(usize::MAX)))?;
    if magic != MAGIC {
        return Err("it is not an .npy file: it does not begin with \\x93NUMPY".into());
    }
    let (version, _) = next(2)?;
    let header_bytes = match version[..] {
        [1, 0] => next(2)?.0,
        [2 | 3, 0] => next(4)?.0,
        _ => {
            let version: Vec<String> = version.iter().map(u8::to_string).collect();
            return Err(format!("it is .npy of version {}; known are 1.0, 2.0 and 3.0", version.join(".")).into());
        }
    };
    let header_bytes = header_bytes.iter().rev().fold(0_usize, |all, byte| all << 8 | usize::from(*byte));
    if header_bytes > HEADER_BYTES_MAX && header_bytes as u64 <= len {
        return Err(format!("its header has {header_bytes} bytes, and at most {HEADER_BYTES_MAX} are read").into());
    }
    let (text, left) = next(header_bytes)?;
    let Header { dtype, is_big_endian, order, sizes } = HeaderText { rest: &text }.header()?;
    let bytes = bytes_of(&sizes, dtype)?;
    if bytes > left {
        let cut = format!("it is cut off: it says shape {sizes:?} of {dtype}, {bytes} bytes, and {left} are there");
        return Err(cut.into());
    }
    if bytes < left {
        let more = left - bytes;
        return Err(format!("it says shape {sizes:?} of {dtype}, {bytes} bytes, and {more} more are there").into());
    }
    let mut elements = next(bytes)?.0;
    if is_big_endian {
        elements.chunks_exact_mut(dtype.size()).for_each(<[u8]>::reverse);
    }
    tensor_of(&Arc::new(FileBytes::Read(elements)), 0..bytes, dtype, &sizes, order, at)
}

/// What a header says.
struct Header {
    dtype: DType,
    is_big_endian: bool,
    order: Order,
    sizes: Vec<usize>,
}

/// A header being read: a dictionary as Python writes it.
struct HeaderText<'a> {
    rest: &'a [u8],
}

impl<'a> HeaderText<'a> {
    fn header(mut self) -> Parsed<Header> {
        let (mut dtype, mut is_fortran, mut sizes) = (None, None, None);
        self.expect(b'{')?;
        while !self.eat(b'}') {
            let key = self.string()?;
            self.expect(b':')?;
            let is_again = match key {
                "descr" if matches!(self.peek(), Some(b'[' | b'(')) => {
                    let advice = "save one field of it with numpy.save(file, array[\"field\"])";
                    return Err(format!("its elements are records of several fields; {advice}").into());
                }
                "descr" => dtype.replace(described(self.string()?)?).is_some(),
                "fortran_order" => is_fortran.replace(self.boolean()?).is_some(),
                "shape" => sizes.replace(self.tuple()?).is_some(),
                _ => {
                    return Err(format!("its header has {:?}, which means nothing", shortened(key.as_bytes())).into());
                }
            };
            if is_again {
                return Err(format!("its header says {key} twice").into());
            }
            if !self.eat(b',') {
                self.expect(b'}')?;
                break;
            }
        }
        if self.peek().is_some() {
            return Err(self.unexpected("its end"));
        }
        let missing = |key: &str| Why::Wrong(format!("its header does not say {key}"));
        let (dtype, is_big_endian) = dtype.ok_or_else(|| missing("descr"))?;
        let is_fortran = is_fortran.ok_or_else(|| missing("fortran_order"))?;
        let order = if is_fortran { Order::ColumnsFirst } else { Order::RowsFirst };
        Ok(Header { dtype, is_big_endian, order, sizes: sizes.ok_or_else(|| missing("shape"))? })
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

    fn expect(&mut self, byte: u8) -> Parsed<()> {
        if self.eat(byte) { Ok(()) } else { Err(self.unexpected(&format!("'{}'", char::from(byte)))) }
    }

    fn unexpected(&self, wanted: &str) -> Why {
        Why::Wrong(format!("its header is damaged: {wanted} was expected at {:?}", shortened(self.rest)))
    }

    fn string(&mut self) -> Parsed<&'a str> {
        let quote = self.peek().filter(|byte| matches!(byte, b'\'' | b'"')).ok_or_else(|| self.unexpected("a text"))?;
        let inside = &self.rest[1..];
        let end = inside.iter().position(|byte| *byte == quote).ok_or_else(|| self.unexpected("a text that ends"))?;
        let text = std::str::from_utf8(&inside[..end]).map_err(|_| self.unexpected("a text in UTF-8"))?;
        self.rest = &inside[end + 1..];
        Ok(text)
    }

    fn boolean(&mut self) -> Parsed<bool> {
        self.peek();
        for (text, value) in [(&b"True"[..], true), (b"False", false)] {
            if let Some(rest) = self.rest.strip_prefix(text) {
                self.rest = rest;
                return Ok(value);
            }
        }
        Err(self.unexpected("True or False"))
    }

    fn tuple(&mut self) -> Parsed<Vec<usize>> {
        let mut numbers = Vec::new();
        self.expect(b'(')?;
        while !self.eat(b')') {
            numbers.push(self.number()?);
            if numbers.len() > AXES_MAX {
                return Err(format!("its header says more than {AXES_MAX} axes").into());
            }
            if !self.eat(b',') {
                self.expect(b')')?;
                break;
            }
        }
        Ok(numbers)
    }

    fn number(&mut self) -> Parsed<usize> {
        self.peek();
        let digits = self.rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if digits == 0 {
            return Err(self.unexpected("a number of elements"));
        }
        let text = std::str::from_utf8(&self.rest[..digits]).unwrap_or_default();
        let number = text.parse().map_err(|_| {
            format!("its header says a size of {}, which is more than any memory holds", shortened(text.as_bytes()))
        })?;
        // Python 2 wrote long numbers with an L.
        self.rest = self.rest[digits..].strip_prefix(b"L").unwrap_or(&self.rest[digits..]);
        Ok(number)
    }
}

/// The type that a header names, and whether its bytes are the other way round.
fn described(text: &str) -> Parsed<(DType, bool)> {
    let known = CODES.map(|(dtype, _)| dtype.name()).join(" ");
    let unknown = || Why::Wrong(format!("its elements are {:?}; known are {known}", shortened(text.as_bytes())));
    let order = text.chars().next().ok_or_else(unknown)?;
    let code = text.strip_prefix(['<', '>', '|', '=']).ok_or_else(unknown)?;
    if code.starts_with('O') {
        return Err("its elements are Python objects, which are not numbers".into());
    }
    let Some((dtype, _)) = CODES.into_iter().find(|(_, known)| *known == code) else {
        let wider = match code {
            "i1" | "i2" | "u2" => "int32",
            "u4" | "u8" => "int64",
            _ => return Err(unknown()),
        };
        let advice = format!("convert them with array.astype(\"{wider}\") in NumPy");
        return Err(format!("its elements are {text:?}, and tensors have none of those; {advice}").into());
    };
    match order {
        // A single byte has no order.
        _ if dtype.size() == 1 => Ok((dtype, false)),
        '<' => Ok((dtype, false)),
        '>' => Ok((dtype, true)),
        _ => Err(unknown()),
    }
}
