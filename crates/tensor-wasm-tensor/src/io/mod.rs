//! Tensors in files. Files come from anywhere: nothing that one says of itself is believed before the file's own size
//! agrees with it, and nothing is allocated by a number that a file merely declares.
//!
//! | format | element types | several tensors | note |
//! |---|---|---|---|
//! | [`.npy`](load_npy) | all but bf16 | no | either byte order; columns first is a view |
//! | [`.npz`](load_npz) | all but bf16 | by name | stored or deflated |
//! | [safetensors](load_safetensors) | all | by name, with metadata | mapped, not copied |
//! | [JSON](from_json) | all | no | nested lists; no NaN and no infinities |
//! | [CSV](load_csv) | all | no | always two axes |
//! | [IDX](load_idx) | u8, i32, f32, f64 | no | reading only; the format of MNIST |
//!
//! ```
//! use tensor_wasm_tensor::{DType, Tensor, io};
//!
//! let folder = std::env::temp_dir().join(format!("tensor-wasm-doc-{}", std::process::id()));
//! std::fs::create_dir_all(&folder)?;
//! let path = folder.join("x.npy");
//! io::save_npy(&path, &Tensor::arange(0, 6, 1, DType::F32).reshape(&[2, 3]))?;
//! assert_eq!(io::load_npy(&path)?.shape()[..], [2, 3]);
//! std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Reading a file of `n` bytes takes at most [`READ_BYTES_PER_FILE_BYTE_MAX`] times `n` bytes of memory and
//! [`READ_BYTES_MIN`]; for an `.npz`, what its members are inflated to comes on top, which is bounded by
//! [`INFLATED_BYTES_MAX`] and by [`INFLATED_PER_BYTE_MAX`] times `n`.
//!
//! What is saved is written beside its path and then renamed: a file is there whole or not at all, and tensors that are
//! mapped from the file it replaces stay what they were.

mod csv;
mod idx;
mod json;
mod npy;
mod safetensors;
#[cfg(test)]
mod tests;
mod zip;

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use self::csv::{CsvFormat, load_csv, read_csv, save_csv, write_csv};
pub use self::idx::{load_idx, read_idx};
pub use self::json::{from_json, to_json};
pub use self::npy::{load_npy, load_npz, load_npz_within, read_npy, read_npz, save_npy, save_npz, write_npy};
pub use self::safetensors::{
    Safetensors, SafetensorsEntry, SafetensorsHeader, load_safetensors, read_safetensors, save_safetensors,
    save_safetensors_with, write_safetensors,
};
pub use self::zip::{INFLATED_BYTES_MAX, INFLATED_PER_BYTE_MAX};
use crate::cpu::memory::{CpuBuffer, FileBytes};
use crate::dtype::{DType, Scalar};
use crate::error::{ErrorKind, Result, TensorError};
use crate::graph::{Node, Storage, Value};
use crate::shape::{Layout, RANK_MAX, Shape};
use crate::tensor::{Caller, Tensor};

// Elements are copied as they lie in files, which are little-endian.
#[cfg(target_endian = "big")]
compile_error!("files are read and written on little-endian machines only");

/// Bytes of memory that reading takes for a byte of a file: `1,` of a text becomes an element of eight bytes in a
/// vector that has doubled, and a name in a header a node of the graph.
pub const READ_BYTES_PER_FILE_BYTE_MAX: usize = 64;

/// Bytes of memory that reading takes however small a file is: buffers, and the tables of what inflates.
pub const READ_BYTES_MIN: usize = 1 << 18;

/// What files that are given as bytes are called in errors.
const IN_MEMORY: &str = "the bytes given";

/// Why something is no tensor, or no file.
enum Why {
    /// What was found, and what to do.
    Wrong(String),
    Memory {
        bytes: usize,
    },
    /// A tensor that cannot be computed, which knows why.
    Tensor(TensorError),
}

impl From<String> for Why {
    fn from(why: String) -> Why {
        Why::Wrong(why)
    }
}

impl From<&str> for Why {
    fn from(why: &str) -> Why {
        Why::Wrong(why.to_owned())
    }
}

impl From<TensorError> for Why {
    fn from(error: TensorError) -> Why {
        Why::Tensor(error)
    }
}

impl From<std::io::Error> for Why {
    fn from(error: std::io::Error) -> Why {
        Why::Wrong(error.to_string())
    }
}

impl Why {
    /// The same, with which part of a file it is about.
    fn of(self, part: &str) -> Why {
        match self {
            Why::Wrong(why) => Why::Wrong(format!("{part}: {why}")),
            other => other,
        }
    }
}

/// A call of one of the functions here, for its errors.
struct FileCall {
    operation: &'static str,
    file: String,
    at: Caller,
}

impl FileCall {
    fn on(operation: &'static str, path: &Path, at: Caller) -> FileCall {
        FileCall { operation, file: path.display().to_string(), at }
    }

    fn on_bytes(operation: &'static str, at: Caller) -> FileCall {
        FileCall { operation, file: IN_MEMORY.to_owned(), at }
    }

    fn run<T>(self, call: impl FnOnce(Caller) -> std::result::Result<T, Why>) -> Result<T> {
        call(self.at).map_err(|why| match why {
            Why::Wrong(why) => TensorError::new(self.operation, ErrorKind::File { file: self.file, why }, self.at),
            Why::Memory { bytes } => TensorError::new(self.operation, ErrorKind::OutOfMemory { bytes }, self.at),
            Why::Tensor(error) => error,
        })
    }
}

type Parsed<T> = std::result::Result<T, Why>;

/// Opens a file that has a size; a pipe has none, and opening it waits for whoever writes it.
fn open(path: &Path) -> Parsed<(File, u64)> {
    let not_regular = || Why::from("it is not a regular file; read it into memory, and give the bytes");
    if !std::fs::metadata(path)?.is_file() {
        return Err(not_regular());
    }
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_file() { Ok((file, metadata.len())) } else { Err(not_regular()) }
}

/// A whole file, of the size that it has.
fn read_all(path: &Path) -> Parsed<Vec<u8>> {
    let (mut file, len) = open(path)?;
    let len = usize::try_from(len).map_err(|_| Why::Memory { bytes: usize::MAX })?;
    read_exactly(&mut file, len)?.ok_or_else(|| Why::from("it became shorter while it was read"))
}

/// As many bytes as are asked for, which the caller has compared with what is there; none if there are fewer.
fn read_exactly(source: &mut (impl Read + ?Sized), len: usize) -> Parsed<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| Why::Memory { bytes: len })?;
    let mut source = source;
    Read::take(&mut source, len as u64).read_to_end(&mut bytes)?;
    Ok((bytes.len() == len).then_some(bytes))
}

/// Writes a file beside its path, and puts it there once it is whole and on the disk.
fn save(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> Parsed<()>) -> Parsed<()> {
    static SAVED: AtomicU64 = AtomicU64::new(0);
    // Where a link leads, so that it stays a link.
    let path = std::fs::canonicalize(path).map_or_else(|_| Cow::Borrowed(path), Cow::Owned);
    if std::fs::metadata(&path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err("it is there and is not a regular file; use a function that takes a writer".into());
    }
    let name = path.file_name().ok_or("it names no file")?.to_string_lossy();
    let number = SAVED.fetch_add(1, Ordering::Relaxed);
    let beside: PathBuf = path.with_file_name(format!(".{name}.{}.{number}", std::process::id()));
    let mut file = BufWriter::new(File::create_new(&beside)?);
    let is_done = write(&mut file)
        .and_then(|()| Ok(file.flush()?))
        .and_then(|()| Ok(file.get_ref().sync_all()?))
        .and_then(|()| Ok(std::fs::rename(&beside, &path)?));
    is_done.inspect_err(|_| drop(std::fs::remove_file(&beside)))
}

/// The shape with these sizes, if a tensor can have it.
fn shape_of(sizes: &[usize]) -> Parsed<Shape> {
    if sizes.len() > RANK_MAX {
        return Err(format!("it has {} axes, and a tensor at most {RANK_MAX}; reshape it first", sizes.len()).into());
    }
    let shape = Shape::new(sizes).filter(|shape| shape.checked_numel().is_some());
    shape.ok_or_else(|| Why::Wrong(format!("it says shape {sizes:?}, which is more than any memory holds")))
}

/// Bytes of a shape's elements; that they are there is for the caller to see.
fn bytes_of(sizes: &[usize], dtype: DType) -> Parsed<usize> {
    Ok(shape_of(sizes)?.numel() * dtype.size())
}

/// The order in which elements follow each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    RowsFirst,
    ColumnsFirst,
}

/// A tensor of a part of a file, without a copy where that can be.
fn tensor_of(
    file: &Arc<FileBytes>,
    span: std::ops::Range<usize>,
    dtype: DType,
    sizes: &[usize],
    order: Order,
    at: Caller,
) -> Parsed<Tensor> {
    let shape = shape_of(sizes)?;
    let bytes = span.len();
    if shape.numel() * dtype.size() != bytes {
        return Err(format!("shape {shape} of {dtype} does not have {bytes} bytes").into());
    }
    let part = file.get().get(span.clone()).ok_or("it says that elements are where there is no file")?;
    if dtype == DType::Bool {
        // What is mapped may change after it was checked; and not every byte is a bool.
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes).map_err(|_| Why::Memory { bytes })?;
        copy.extend_from_slice(part);
        return finish(bools(copy)?, dtype, shape, order, at);
    }
    let buffer = CpuBuffer::of_file(file, span, dtype).ok_or(Why::Memory { bytes })?;
    finish(buffer, dtype, shape, order, at)
}

/// Bytes as bools, which not all bytes are.
fn bools(bytes: Vec<u8>) -> Parsed<CpuBuffer> {
    check_bools(&bytes, 0)?;
    let count = bytes.len();
    CpuBuffer::of_vec(bytes).ok_or(Why::Memory { bytes: count })
}

/// Whether bytes are bools; `first` is the number of the first of them in its tensor.
fn check_bools(bytes: &[u8], first: usize) -> Parsed<()> {
    match bytes.iter().position(|byte| *byte > 1) {
        Some(n) => Err(format!("element {} is the byte {}, and a bool is 0 or 1", first + n, bytes[n]).into()),
        None => Ok(()),
    }
}

fn finish(buffer: CpuBuffer, dtype: DType, shape: Shape, order: Order, at: Caller) -> Parsed<Tensor> {
    if order == Order::RowsFirst {
        return Ok(Tensor::of_buffer(buffer, shape, dtype, at));
    }
    let rank = shape.rank();
    let mut sizes = [0; RANK_MAX];
    sizes.iter_mut().zip(shape.iter().rev()).for_each(|(to, from)| *to = *from);
    let axes: Vec<usize> = (0..rank).rev().collect();
    let layout = Layout::contiguous(shape_of(&sizes[..rank])?).permute(&axes);
    let value = Value { storage: Arc::new(Storage::of_cpu(buffer)), layout };
    Ok(Tensor { node: Node::of_value(value, dtype, false, at) })
}

/// The elements of a tensor in row-major order, as they lie in files: borrowed where they already lie so.
fn element_bytes<'v>(value: &'v Value, dtype: DType) -> Parsed<Cow<'v, [u8]>> {
    let buffer = value.storage.cpu().map_err(|what| what.to_string())?;
    let (all, size) = (buffer.as_bytes(), dtype.size());
    let bytes = value.layout.shape.numel() * size;
    if value.layout.is_contiguous()
        && let Some(first) = all.get(..bytes)
    {
        return Ok(Cow::Borrowed(first));
    }
    let mut copy = Vec::new();
    copy.try_reserve_exact(bytes).map_err(|_| Why::Memory { bytes })?;
    value.layout.for_each_position(|position| copy.extend_from_slice(&all[position * size..][..size]));
    Ok(Cow::Owned(copy))
}

/// Elements of one type that come one by one, as text.
struct TextElements {
    dtype: DType,
    bytes: Vec<u8>,
}

impl TextElements {
    fn new(dtype: DType) -> TextElements {
        TextElements { dtype, bytes: Vec::new() }
    }

    /// Takes a number as it is written. It is the element that is nearest to it, and there is one: nothing becomes
    /// infinite, and no fraction is lost where elements have none.
    fn push(&mut self, text: &str) -> Parsed<()> {
        let wrong = || Why::Wrong(format!("{:?} is no {}", shortened(text.as_bytes()), self.dtype));
        let whole = || {
            // `3.0` is an integer, though not written as one.
            let float = || text.parse::<f64>().ok().filter(|x| x.fract() == 0.0 && x.abs() < 9e15);
            text.parse::<i64>().ok().or_else(|| float().map(|x| Scalar::Float(x).as_i64())).ok_or_else(wrong)
        };
        // Infinity and NaN may be written by name, and no other number has this letter.
        let is_named = || text.contains(['n', 'N']);
        macro_rules! float {
            ($value:expr) => {{
                let value = $value;
                if value.is_infinite() && !is_named() {
                    return Err(format!("{:?} is more than {} holds", shortened(text.as_bytes()), self.dtype).into());
                }
                self.bytes.extend(value.to_le_bytes());
            }};
        }
        let wide = || text.parse::<f64>().map_err(|_| wrong());
        match self.dtype {
            DType::Bool => match text {
                "true" | "True" | "1" => self.bytes.push(1),
                "false" | "False" | "0" => self.bytes.push(0),
                _ => return Err(wrong()),
            },
            DType::U8 => self.bytes.push(u8::try_from(whole()?).map_err(|_| wrong())?),
            DType::I32 => self.bytes.extend(i32::try_from(whole()?).map_err(|_| wrong())?.to_le_bytes()),
            DType::I64 => self.bytes.extend(whole()?.to_le_bytes()),
            DType::F16 => float!(half::f16::from_f64(wide()?)),
            DType::BF16 => float!(half::bf16::from_f64(wide()?)),
            DType::F32 => float!(text.parse::<f32>().map_err(|_| wrong())?),
            DType::F64 => float!(wide()?),
        }
        Ok(())
    }

    fn tensor(self, sizes: &[usize], at: Caller) -> Parsed<Tensor> {
        let bytes = self.bytes.len();
        let file = Arc::new(FileBytes::Read(self.bytes));
        tensor_of(&file, 0..bytes, self.dtype, sizes, Order::RowsFirst, at)
    }
}

/// The elements of a tensor in row-major order, as text that [`TextElements::push`] makes the same elements of.
fn for_each_text(
    value: &Value,
    dtype: DType,
    mut each: impl FnMut(std::fmt::Arguments<'_>) -> Parsed<()>,
) -> Parsed<()> {
    let buffer = value.storage.cpu().map_err(|what| what.to_string())?;
    let mut is_done = Ok(());
    value.layout.for_each_position(|position| {
        if is_done.is_err() {
            return;
        }
        let (float, int) = buffer.at(dtype, position);
        is_done = match dtype {
            DType::Bool => each(format_args!("{}", int != 0)),
            DType::U8 | DType::I32 | DType::I64 => each(format_args!("{int}")),
            // As few digits as say which it is; those of an f32 do so for halves too.
            DType::F16 | DType::BF16 | DType::F32 => {
                #[expect(clippy::cast_possible_truncation, reason = "it was an f32, or less")]
                let narrow = float as f32;
                each(format_args!("{narrow:?}"))
            }
            DType::F64 => each(format_args!("{float:?}")),
        };
    });
    is_done
}

/// The beginning of something that may be of any length and hold anything.
fn shortened(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(24)]).into_owned()
}
