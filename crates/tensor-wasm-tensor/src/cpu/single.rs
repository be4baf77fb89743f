//! Single numbers, computed where they are: making and running a plan costs more than what it does for one element.
#![expect(unsafe_code, reason = "elements are read from buffers, and written to one")]

use std::sync::Arc;

use super::map::register_of;
use super::memory::CpuBuffer;
use super::tile::{self, Class, TileArgs, TileOp};
use crate::dtype::{DType, Scalar};
use crate::graph::op::Op;
use crate::graph::{Storage, Value};
use crate::shape::{Layout, Shape};

/// An element that can be read as what it is.
#[repr(align(8))]
struct Aligned([u8; 8]);

/// An operand of one element.
pub(crate) enum Single {
    Value(Value),
    Scalar(Scalar),
}

impl Single {
    /// The element, in as many bytes as it has.
    fn bytes(&self, dtype: DType) -> Option<Aligned> {
        match self {
            Single::Scalar(scalar) => Some(Aligned(register_of(*scalar, dtype))),
            Single::Value(Value { storage, layout }) => {
                let buffer = storage.here()?;
                let (size, at) = (dtype.size(), usize::try_from(layout.offset).ok()?);
                if buffer.bytes() < (at + 1) * size {
                    return None;
                }
                let mut bytes = [0; 8];
                // SAFETY: the element is inside of the buffer, and no larger than eight bytes.
                unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(buffer.as_ptr().add(at * size), size) };
                Some(Aligned(bytes))
            }
        }
    }
}

/// One operation on single elements of a type. None where it takes more than that: half precision, other operations,
/// and whatever fails, which is for a plan to say.
pub(crate) fn compute(op: &Op, of: DType, to: DType, shape: Shape, operands: &[Single]) -> Option<Value> {
    let op = match (op, operands.len()) {
        (Op::Unary(op), 1) => TileOp::Unary(*op, Class::of(of)),
        (Op::Binary(op), 2) => TileOp::Binary(*op, Class::of(of)),
        _ => return None,
    };
    if [of, to].iter().any(|dtype| matches!(dtype, DType::F16 | DType::BF16)) {
        return None;
    }
    let first = operands[0].bytes(of)?;
    let second = operands.last()?.bytes(of)?;
    let buffer = CpuBuffer::uninitialized(to.size())?;
    let (a, b) = (first.0.as_ptr(), second.0.as_ptr());
    let args = TileArgs { to: buffer.as_ptr(), a, b, c: a, n: 1, count: 1 };
    // SAFETY: operands are elements of their class, and there is room for one.
    let is_defined = unsafe { tile::run(op, &args) };
    is_defined.then(|| Value { storage: Arc::new(Storage::of_cpu(buffer)), layout: Layout::contiguous(shape) })
}
