//! IDX files, the format of MNIST: two zeros, an element type, the number of axes, their sizes, and the elements, all
//! big-endian. Written by hand: that is the whole format.

use std::panic::Location;
use std::path::Path;
use std::sync::Arc;

use super::{FileCall, Order, Parsed, Why, bytes_of, read_all, tensor_of};
use crate::cpu::memory::FileBytes;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{Caller, Tensor};

/// Element types: what a file says, how many bytes an element has there, and what it becomes. Those that no tensor has
/// become the next wider one.
const TYPES: [(u8, usize, DType); 6] = [
    (0x08, 1, DType::U8),
    (0x09, 1, DType::I32),
    (0x0b, 2, DType::I32),
    (0x0c, 4, DType::I32),
    (0x0d, 4, DType::F32),
    (0x0e, 8, DType::F64),
];

/// Reads an IDX file. Signed elements of one and two bytes become `i32`.
#[track_caller]
pub fn load_idx(path: impl AsRef<Path>) -> Result<Tensor> {
    let path = path.as_ref();
    FileCall::on("load_idx", path, Location::caller()).run(|at| read(&read_all(path)?, at))
}

/// Reads what is in an IDX file.
#[track_caller]
pub fn read_idx(bytes: &[u8]) -> Result<Tensor> {
    FileCall::on_bytes("read_idx", Location::caller()).run(|at| read(bytes, at))
}

fn read(file: &[u8], at: Caller) -> Parsed<Tensor> {
    if file.starts_with(&[0x1f, 0x8b]) {
        return Err("it is compressed; unpack it with gunzip first".into());
    }
    let cut = || Why::Wrong(format!("it is cut off: it ends in its header, after {} bytes", file.len()));
    let ([zero, none, code, axes], rest) = file.split_first_chunk().ok_or_else(cut)?;
    if (*zero, *none) != (0, 0) {
        return Err("it is not an IDX file: it does not begin with two zeros".into());
    }
    let known = TYPES.into_iter().find(|(known, ..)| known == code);
    let (_, size, dtype) = known.ok_or_else(|| format!("it says element type {code:#04x}, which there is not"))?;
    let (sizes, elements) = rest.split_at_checked(4 * usize::from(*axes)).ok_or_else(cut)?;
    let big = |bytes: &[u8]| bytes.iter().fold(0_usize, |all, byte| all << 8 | usize::from(*byte));
    let sizes: Vec<usize> = sizes.chunks_exact(4).map(big).collect();
    let count = bytes_of(&sizes, DType::U8)?;
    let (bytes, has) = (count * size, elements.len());
    if bytes != has {
        let what = if bytes > has { "cut off" } else { "longer than it says" };
        return Err(format!("it is {what}: shape {sizes:?} has {bytes} bytes, and {has} are there").into());
    }
    let mut turned = Vec::new();
    turned.try_reserve_exact(count * dtype.size()).map_err(|_| Why::Memory { bytes: count * dtype.size() })?;
    for element in elements.chunks_exact(size) {
        // Wider ones have the sign in front.
        let sign = if dtype == DType::I32 && element[0] >= 0x80 { 0xff } else { 0 };
        turned.extend(element.iter().rev());
        turned.extend(std::iter::repeat_n(sign, dtype.size() - size));
    }
    let span = 0..turned.len();
    tensor_of(&Arc::new(FileBytes::Read(turned)), span, dtype, &sizes, Order::RowsFirst, at)
}
