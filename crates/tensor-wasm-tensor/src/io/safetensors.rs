//! Safetensors: a header in JSON that says of each tensor its type, shape and span, and then the elements of all. The
//! spans cover what follows the header exactly, in any order, without gaps.

use std::collections::BTreeMap;
use std::io::Write;
use std::panic::Location;
use std::path::Path;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use super::{FileCall, Order, Parsed, Why, bytes_of, element_bytes, open, save, shortened, tensor_of};
use crate::cpu::memory::FileBytes;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{Caller, Tensor};

/// Bytes of the length that a file begins with.
const PREFIX_BYTES: usize = 8;

/// Bytes of a header, as in the format's own library.
const HEADER_BYTES_MAX: usize = 100_000_000;

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

/// A header. The entries stay in the order in which they are written: then two of one name are seen.
struct Header {
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

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Header, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object with a tensor for each name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Header, A::Error> {
                let mut header = Header { entries: Vec::new(), metadata: BTreeMap::new() };
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
    let cut = || Why::Wrong(format!("it is cut off, or no safetensors file: it has {} bytes", all.len()));
    let (len, rest) = all.split_first_chunk().ok_or_else(cut)?;
    let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
    if len > rest.len() {
        let has = rest.len();
        let why = format!("it says that its header has {len} bytes, and {has} are there");
        return Err(format!("{why}: it is cut off, or no safetensors file").into());
    }
    if len > HEADER_BYTES_MAX {
        return Err(format!("its header has {len} bytes, and at most {HEADER_BYTES_MAX} are read").into());
    }
    // A copy: what is mapped could become something else between two looks at it.
    let text = String::from_utf8(rest[..len].to_vec()).map_err(|error| {
        format!("its header is not UTF-8, from byte {} on", PREFIX_BYTES + error.utf8_error().valid_up_to())
    })?;
    let Header { entries, metadata } =
        serde_json::from_str(&text).map_err(|error| format!("its header is no such thing: {error}"))?;
    let data = PREFIX_BYTES + len;
    check(&entries, all.len() - data)?;
    let mut tensors = BTreeMap::new();
    for (name, Entry { dtype, shape, data_offsets: [start, end] }) in entries {
        let of = |why: Why| why.of(&format!("{:?}", shortened(name.as_bytes())));
        let dtype = named(&dtype).map_err(of)?;
        let tensor = tensor_of(file, data + start..data + end, dtype, &shape, Order::RowsFirst, at).map_err(of)?;
        if tensors.contains_key(&name) {
            return Err(of("there are two of that name".into()));
        }
        tensors.insert(name, tensor);
    }
    Ok(Safetensors { tensors, metadata })
}

fn named(name: &str) -> Parsed<DType> {
    let found = NAMES.into_iter().find(|(_, known)| *known == name).map(|(dtype, _)| dtype);
    let known = NAMES.map(|(_, name)| name).join(" ");
    found.ok_or_else(|| Why::Wrong(format!("its elements are {:?}; known are {known}", shortened(name.as_bytes()))))
}

/// Whether every tensor has the bytes of its shape, and all of them together what is there, each byte once.
fn check(entries: &[(String, Entry)], has: usize) -> Parsed<()> {
    let mut spans: Vec<(usize, usize, &str)> = Vec::new();
    for (name, Entry { dtype, shape, data_offsets: [start, end] }) in entries {
        let of = |why: Why| why.of(&format!("{:?}", shortened(name.as_bytes())));
        let dtype = named(dtype).map_err(of)?;
        let bytes = bytes_of(shape, dtype).map_err(of)?;
        if *start > *end || *end > has {
            let why = format!("it says bytes {start} to {end} of {has}: the file is cut off, or damaged");
            return Err(of(why.into()));
        }
        if end - start != bytes {
            let why = format!("shape {shape:?} of {dtype} has {bytes} bytes, and it says {}", end - start);
            return Err(of(why.into()));
        }
        spans.push((*start, *end, name));
    }
    spans.sort_unstable();
    let mut covered = 0;
    for (start, end, name) in spans {
        if start != covered {
            let what = if start < covered { "overlaps with another tensor" } else { "leaves a gap before it" };
            return Err(
                Why::Wrong(format!("it {what}, at byte {start}")).of(&format!("{:?}", shortened(name.as_bytes())))
            );
        }
        covered = end;
    }
    if covered != has {
        return Err(format!("{} bytes at its end belong to no tensor", has - covered).into());
    }
    Ok(())
}
