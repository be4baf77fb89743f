//! Memory on the device.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use crate::{Error, Result, compute};

mod sealed {
    pub trait Sealed {}
}

/// What a buffer holds: numbers, and arrays of them. In kernels they have the same layout, little endian.
pub trait Pod: sealed::Sealed + bytemuck::Pod {}

macro_rules! numbers {
    ($($number:ty)*) => {
        $(
            impl sealed::Sealed for $number {}
            impl Pod for $number {}
        )*
    };
}

numbers!(i8 u8 i16 u16 i32 u32 i64 u64 f32 f64);

impl<T: Pod, const N: usize> sealed::Sealed for [T; N] {}
impl<T: Pod, const N: usize> Pod for [T; N] {}

/// What is copied at once: a host bounds what it takes of a guest's memory in one call.
const PIECE_BYTES: usize = 16 << 20;

/// `len` elements on the device. It is freed when it is dropped; launches that were asked for before still find it.
///
/// Everything that is asked of the device is done in the order it was asked, so a read after a launch sees what the
/// launch wrote.
pub struct Buffer<T: Pod> {
    pub(crate) raw: compute::Buffer,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// All bytes are zero.
    pub fn zeroed(len: usize) -> Result<Buffer<T>> {
        const { assert!(size_of::<T>() > 0, "an array of nothing takes no place") }
        let raw = compute::Buffer::allocate(bytes::<T>(len))?;
        Ok(Buffer { raw, len, element: PhantomData })
    }

    pub fn from_slice(elements: &[T]) -> Result<Buffer<T>> {
        let buffer = Buffer::zeroed(elements.len())?;
        buffer.write(0, elements)?;
        Ok(buffer)
    }

    /// In elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes elements from the `at`-th on. The slice may be changed as soon as this returns.
    pub fn write(&self, at: usize, elements: &[T]) -> Result<()> {
        let mut offset = bytes::<T>(at);
        for piece in bytemuck::cast_slice::<T, u8>(elements).chunks(PIECE_BYTES) {
            self.raw.write(offset, piece)?;
            offset += piece.len() as u64;
        }
        Ok(())
    }

    /// Waits for everything that was asked before.
    pub fn read(&self, elements: Range<usize>) -> Result<Vec<T>> {
        let (offset, bytes) = span::<T>(elements)?;
        let mut all = Vec::new();
        while (all.len() as u64) < bytes {
            let piece = (bytes - all.len() as u64).min(PIECE_BYTES as u64);
            all.extend(self.raw.read(offset + all.len() as u64, piece)?);
        }
        Ok(bytemuck::pod_collect_to_vec(&all))
    }

    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.read(0..self.len)
    }

    /// Copies elements of another buffer to the `at`-th and those after it, on the device.
    pub fn copy_from(&self, at: usize, source: &Buffer<T>, elements: Range<usize>) -> Result<()> {
        let (offset, count) = span::<T>(elements)?;
        Ok(self.raw.copy_from(bytes::<T>(at), &source.raw, offset, count)?)
    }

    /// Sets every byte of some elements.
    pub fn fill(&self, elements: Range<usize>, byte: u8) -> Result<()> {
        let (offset, count) = span::<T>(elements)?;
        Ok(self.raw.fill(offset, count, byte)?)
    }
}

impl<T: Pod> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer<{}>[{}]", std::any::type_name::<T>(), self.len)
    }
}

/// Cannot overflow: a guest has 32 bits for the count.
fn bytes<T>(elements: usize) -> u64 {
    elements as u64 * size_of::<T>() as u64
}

/// Where elements begin, and how much they are, in bytes. Whether the buffer has them, the host says.
fn span<T>(elements: Range<usize>) -> Result<(u64, u64)> {
    match elements.end.checked_sub(elements.start) {
        Some(count) => Ok((bytes::<T>(elements.start), bytes::<T>(count))),
        None => Err(Error::OutOfRange(format!("elements {}..{} end before they begin", elements.start, elements.end))),
    }
}
