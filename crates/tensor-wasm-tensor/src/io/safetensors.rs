//! Safetensors: a header in JSON that says of each tensor its type, shape and span, and then the elements of all. The
//! spans cover what follows the header exactly, in any order, without gaps.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::panic::Location;
use std::path::Path;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use super::{
    FileCall, Order, Parsed, Why, bools, bytes_of, check_bools, element_bytes, finish, open, read_exactly, save,
    shape_of, shortened, tensor_of,
};
use crate::cpu::memory::FileBytes;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{Caller, Tensor};

/// Bytes of the length that a file begins with.
const PREFIX_BYTES: usize = 8;

/// Bytes of a header, as in the format's own library.
const HEADER_BYTES_MAX: usize = 100_000_000;

/// Bools that are checked at once.
const CHECKED_BYTES: usize = 64 << 10;

const CUT: &str = "it became shorter while it was read";

/// Where elements begin in files written here is a multiple of this: they are aligned in a mapping.
const DATA_ALIGN: usize = 64;

/// What is in a header beside tensors.
const METADATA: &str = "__metadata__";

const NAMES: [(DType, &str); 8] = [
    (DType::Bool, "BOOL"),
    (DType::U8, "U8"),
    (DType::I32, "I32"),
    (DType::I64, "I64"),
    (DType::F16, "F16"),
    (DType::BF16, "BF16"),
    (DType::F32, "F32"),
    (DType::F64, "F64"),
];

/// What a safetensors file holds.
#[derive(Debug, Clone, Default)]
pub struct Safetensors {
    pub tensors: BTreeMap<String, Tensor>,
    /// Whatever somebody wanted to say about them.
    pub metadata: BTreeMap<String, String>,
}

/// Maps a safetensors file: its elements are read from the disk when they are used, and not copied. Copied are only
/// bools, and elements that are not aligned in the file; in files written here all are.
///
/// The file must stay as it is while a tensor of it lives. Where it is written to, elements become others; where it is
/// cut off, reading them ends the process (`SIGBUS`). Replacing it is safe: [`save_safetensors`] writes another file
/// and renames it. For a file that somebody may write to in place, use [`read_safetensors`] on `std::fs::read(path)?`.
#[track_caller]
pub fn load_safetensors(path: impl AsRef<Path>) -> Result<Safetensors> {
    let path = path.as_ref();
    FileCall::on("load_safetensors", path, Location::caller()).run(|at| {
        let (file, len) = open(path)?;
        // An empty file cannot be mapped.
        let bytes = if len == 0 { FileBytes::Read(Vec::new()) } else { FileBytes::map(&file)? };
        read(&Arc::new(bytes), at)
    })
}

/// Reads what is in a safetensors file, and copies it.
#[track_caller]
pub fn read_safetensors(bytes: &[u8]) -> Result<Safetensors> {
    FileCall::on_bytes("read_safetensors", Location::caller()).run(|at| {
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes.len()).map_err(|_| Why::Memory { bytes: bytes.len() })?;
        copy.extend_from_slice(bytes);
        read(&Arc::new(FileBytes::Read(copy)), at)
    })
}

/// Writes tensors with names: a module's `state_dict()`, an optimizer's `state()`, or any others. The file is there
/// whole or not at all.
///
/// ```
/// use tensor_wasm_tensor::nn::{Linear, Module};
/// use tensor_wasm_tensor::{DType, io};
///
/// # let folder = std::env::temp_dir().join(format!("tensor-wasm-state-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// # let path = folder.join("model.safetensors");
/// let model = Linear::new(3, 2, 7);
/// io::save_safetensors(&path, model.state_dict())?;
/// let other = Linear::new(3, 2, 8);
/// other.load_state_dict(&io::load_safetensors(&path)?.into_state())?;
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[track_caller]
pub fn save_safetensors(
    path: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = (impl Into<String>, Tensor)>,
) -> Result<()> {
    let path = path.as_ref();
    let call = FileCall::on("save_safetensors", path, Location::caller());
    let tensors = owned(tensors);
    call.run(|_| save(path, |file| write(file, &tensors, &BTreeMap::new())))
}

/// [`save_safetensors`], with metadata.
#[track_caller]
pub fn save_safetensors_with(
    path: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = (impl Into<String>, Tensor)>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let path = path.as_ref();
    let call = FileCall::on("save_safetensors_with", path, Location::caller());
    let tensors = owned(tensors);
    call.run(|_| save(path, |file| write(file, &tensors, metadata)))
}

/// Writes what a safetensors file has.
#[track_caller]
pub fn write_safetensors(
    mut writer: impl Write,
    tensors: impl IntoIterator<Item = (impl Into<String>, Tensor)>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let call = FileCall::on_bytes("write_safetensors", Location::caller());
    let tensors = owned(tensors);
    call.run(|_| write(&mut writer, &tensors, metadata))
}

impl Safetensors {
    /// The tensors as [`load_state_dict`](crate::nn::Module::load_state_dict) and
    /// [`load_state`](crate::Optimizer::load_state) take them.
    pub fn into_state(self) -> Vec<(String, Tensor)> {
        self.tensors.into_iter().collect()
    }
}

fn owned(tensors: impl IntoIterator<Item = (impl Into<String>, Tensor)>) -> Vec<(String, Tensor)> {
    tensors.into_iter().map(|(name, tensor)| (name.into(), tensor)).collect()
}

fn write(to: &mut impl Write, tensors: &[(String, Tensor)], metadata: &BTreeMap<String, String>) -> Parsed<()> {
    Tensor::realize_all(&tensors.iter().map(|(_, tensor)| tensor).collect::<Vec<_>>())?;
    // The widest first: then all are aligned.
    let mut sorted: Vec<&(String, Tensor)> = tensors.iter().collect();
    sorted.sort_by_key(|(name, tensor)| (std::cmp::Reverse(tensor.dtype().size()), name));
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA.to_owned(), metadata.iter().map(|(key, value)| (key.clone(), value.clone())).collect());
    }
    let mut at = 0;
    for (name, tensor) in &sorted {
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let start = at;
        at += shape.numel() * dtype.size();
        let (_, code) = NAMES[NAMES.iter().position(|(known, _)| *known == dtype).unwrap_or_default()];
        let entry = serde_json::json!({ "dtype": code, "shape": shape.to_vec(), "data_offsets": [start, at] });
        if name == METADATA || header.insert(name.clone(), entry).is_some() {
            let why = if name == METADATA { "that name has another meaning" } else { "there are two of that name" };
            return Err(Why::from(why).of(&format!("{name:?}")));
        }
    }
    let mut text = serde_json::Value::Object(header).to_string().into_bytes();
    text.resize((PREFIX_BYTES + text.len()).next_multiple_of(DATA_ALIGN) - PREFIX_BYTES, b' ');
    to.write_all(&(text.len() as u64).to_le_bytes())?;
    to.write_all(&text)?;
    for (_, tensor) in sorted {
        to.write_all(&element_bytes(&tensor.value()?, tensor.dtype())?)?;
    }
    Ok(())
}

/// What a safetensors file says that it holds, checked against its size: every tensor has the bytes of its shape, and
/// all of them together are what follows the header, each byte once. The elements are not read.
///
/// ```
/// use tensor_wasm_tensor::{DType, Tensor, io};
///
/// let mut file = Vec::new();
/// io::write_safetensors(&mut file, [("w", Tensor::zeros(&[2, 3], DType::F32))], &Default::default())?;
/// let mut reader = &file[..];
/// let header = io::SafetensorsHeader::read(&mut reader, file.len() as u64, 1 << 20)?;
/// assert_eq!(header.tensors()[0].shape, [2, 3]);
/// // The reader is now where the elements begin.
/// assert_eq!(header.read_elements(reader)?.tensors["w"].shape()[..], [2, 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct SafetensorsHeader {
    /// In the order in which elements follow each other.
    tensors: Vec<SafetensorsEntry>,
    metadata: BTreeMap<String, String>,
    /// Where elements begin.
    data: u64,
}

/// A tensor that a header names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SafetensorsEntry {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Of what follows the header.
    span: Range<usize>,
}

impl SafetensorsHeader {
    /// Reads the header of a file of so many bytes, if it has no more than those allowed: a header is parsed in memory,
    /// as about ten times of what it is in the file.
    #[track_caller]
    pub fn read(mut from: impl Read, file_bytes: u64, header_bytes_max: usize) -> Result<SafetensorsHeader> {
        let call = FileCall::on_bytes("SafetensorsHeader::read", Location::caller());
        call.run(|_| read_header(&mut from, file_bytes, header_bytes_max))
    }

    /// In the order in which their elements follow each other.
    pub fn tensors(&self) -> &[SafetensorsEntry] {
        &self.tensors
    }

    /// Whatever somebody wanted to say about them.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Reads the elements, from where they begin. Memory is taken for one tensor after the other, and for all of them
    /// together as much as they have in the file.
    #[track_caller]
    pub fn read_elements(self, mut from: impl Read) -> Result<Safetensors> {
        FileCall::on_bytes("SafetensorsHeader::read_elements", Location::caller()).run(|at| {
            let mut tensors = BTreeMap::new();
            for SafetensorsEntry { name, dtype, shape, span } in self.tensors {
                let of = |why: Why| why.of(&format!("{:?}", shortened(name.as_bytes())));
                let bytes = read_exactly(&mut from, span.len())?.ok_or_else(|| of(CUT.into()))?;
                let all = 0..bytes.len();
                let tensor = match dtype {
                    DType::Bool => finish(bools(bytes).map_err(of)?, dtype, shape_of(&shape)?, Order::RowsFirst, at),
                    _ => tensor_of(&Arc::new(FileBytes::Read(bytes)), all, dtype, &shape, Order::RowsFirst, at),
                };
                tensors.insert(name.clone(), tensor.map_err(of)?);
            }
            Ok(Safetensors { tensors, metadata: self.metadata })
        })
    }

    /// Whether the elements are what they can be, which of bools alone not every byte is. Reads those and no others.
    #[track_caller]
    pub fn check_elements(&self, mut from: impl Read + Seek) -> Result<()> {
        FileCall::on_bytes("SafetensorsHeader::check_elements", Location::caller()).run(|_| {
            for SafetensorsEntry { name, span, .. } in self.tensors.iter().filter(|entry| entry.dtype == DType::Bool) {
                let of = |why: Why| why.of(&format!("{:?}", shortened(name.as_bytes())));
                from.seek(SeekFrom::Start(self.data + span.start as u64))?;
                for start in (0..span.len()).step_by(CHECKED_BYTES) {
                    let bytes = read_exactly(&mut from, CHECKED_BYTES.min(span.len() - start))?;
                    check_bools(&bytes.ok_or_else(|| of(CUT.into()))?, start).map_err(of)?;
                }
            }
            Ok(())
        })
    }
}

/// The entries stay in the order in which they are written: then two of one name are seen.
struct HeaderText {
    entries: Vec<(String, Entry)>,
    metadata: BTreeMap<String, String>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl<'de> Deserialize<'de> for HeaderText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<HeaderText, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = HeaderText;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object with a tensor for each name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<HeaderText, A::Error> {
                let mut header = HeaderText { entries: Vec::new(), metadata: BTreeMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    let named =
                        |error: A::Error| A::Error::custom(format!("{:?}: {error}", shortened(name.as_bytes())));
                    if name == METADATA {
                        header.metadata = map.next_value().map_err(named)?;
                    } else {
                        let entry = map.next_value().map_err(named)?;
                        header.entries.push((name, entry));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

fn read(file: &Arc<FileBytes>, at: Caller) -> Parsed<Safetensors> {
    let all = file.get();
    let header = read_header(&mut &*all, all.len() as u64, HEADER_BYTES_MAX)?;
    let data = usize::try_from(header.data).unwrap_or(usize::MAX);
    let mut tensors = BTreeMap::new();
    for SafetensorsEntry { name, dtype, shape, span } in header.tensors {
        let of = |why: Why| why.of(&format!("{:?}", shortened(name.as_bytes())));
        let span = data + span.start..data + span.end;
        let tensor = tensor_of(file, span, dtype, &shape, Order::RowsFirst, at).map_err(of)?;
        tensors.insert(name, tensor);
    }
    Ok(Safetensors { tensors, metadata: header.metadata })
}

/// Reads a header and leaves the reader where the elements begin.
fn read_header(from: &mut impl Read, file_bytes: u64, header_bytes_max: usize) -> Parsed<SafetensorsHeader> {
    let Some(rest) = file_bytes.checked_sub(PREFIX_BYTES as u64) else {
        return Err(format!("it is cut off, or no safetensors file: it has {file_bytes} bytes").into());
    };
    let mut prefix = [0; PREFIX_BYTES];
    from.read_exact(&mut prefix)?;
    let len = u64::from_le_bytes(prefix);
    if len > rest {
        let why = format!("it says that its header has {len} bytes, and {rest} are there");
        return Err(format!("{why}: it is cut off, or no safetensors file").into());
    }
    let bytes = usize::try_from(len).ok().filter(|len| *len <= header_bytes_max);
    let bytes = bytes.ok_or_else(|| format!("its header has {len} bytes, and at most {header_bytes_max} are read"))?;
    // A copy: what is mapped could become something else between two looks at it.
    let text = read_exactly(from, bytes)?.ok_or(CUT)?;
    let text = String::from_utf8(text).map_err(|error| {
        format!("its header is not UTF-8, from byte {} on", PREFIX_BYTES + error.utf8_error().valid_up_to())
    })?;
    let HeaderText { entries, metadata } =
        serde_json::from_str(&text).map_err(|error| format!("its header is no such thing: {error}"))?;
    let has = usize::try_from(rest - len).unwrap_or(usize::MAX);
    Ok(SafetensorsHeader { tensors: checked(entries, has)?, metadata, data: PREFIX_BYTES as u64 + len })
}

fn named(name: &str) -> Parsed<DType> {
    let found = NAMES.into_iter().find(|(_, known)| *known == name).map(|(dtype, _)| dtype);
    let known = NAMES.map(|(_, name)| name).join(" ");
    found.ok_or_else(|| Why::Wrong(format!("its elements are {:?}; known are {known}", shortened(name.as_bytes()))))
}

/// The entries in the order of their elements, if every tensor has the bytes of its shape, and all of them together
/// what is there, each byte once.
fn checked(entries: Vec<(String, Entry)>, has: usize) -> Parsed<Vec<SafetensorsEntry>> {
    let mut checked = Vec::new();
    for (name, Entry { dtype, shape, data_offsets: [start, end] }) in entries {
        let of = |why: Why| why.of(&format!("{:?}", shortened(name.as_bytes())));
        let dtype = named(&dtype).map_err(of)?;
        let bytes = bytes_of(&shape, dtype).map_err(of)?;
        if start > end || end > has {
            let why = format!("it says bytes {start} to {end} of {has}: the file is cut off, or damaged");
            return Err(of(why.into()));
        }
        if end - start != bytes {
            let why = format!("shape {shape:?} of {dtype} has {bytes} bytes, and it says {}", end - start);
            return Err(of(why.into()));
        }
        checked.push(SafetensorsEntry { name, dtype, shape, span: start..end });
    }
    checked.sort_unstable_by(|a, b| (a.span.start, a.span.end, &a.name).cmp(&(b.span.start, b.span.end, &b.name)));
    let mut covered = 0;
    for SafetensorsEntry { name, span, .. } in &checked {
        if span.start != covered {
            let what = if span.start < covered { "overlaps with another tensor" } else { "leaves a gap before it" };
            let why = Why::Wrong(format!("it {what}, at byte {}", span.start));
            return Err(why.of(&format!("{:?}", shortened(name.as_bytes()))));
        }
        covered = span.end;
    }
    if covered != has {
        return Err(format!("{} bytes at its end belong to no tensor", has - covered).into());
    }
    let mut names = BTreeSet::new();
    match checked.iter().find(|entry| !names.insert(&entry.name)) {
        Some(twice) => {
            Err(Why::from("there are two of that name").of(&format!("{:?}", shortened(twice.name.as_bytes()))))
        }
        None => Ok(checked),
    }
}
