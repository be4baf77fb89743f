//! The parameters of a kernel launch: typed values, laid out as the device expects and checked against its signature.

use std::sync::Arc;

use crate::device::arena::Handle;
use crate::device::pinned::Pinned;
use crate::error::DeviceError;
use crate::slab::{PAYLOAD_BYTES_MAX, Slab};

#[derive(Debug, Clone, PartialEq)]
pub enum Param {
    I32(i32),
    U32(u32),
    I64(i64),
    U64(u64),
    F32(f32),
    F64(f64),
    /// The address of a buffer, from an offset on.
    Buffer {
        handle: Handle,
        offset: u64,
    },
    /// The address of pinned memory, from an offset on. It stays until the launch is done.
    Pinned {
        memory: Pinned,
        offset: u64,
    },
}

/// Parameters in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Params(Vec<Param>);

impl Param {
    fn bytes(&self) -> u32 {
        match self {
            Param::I32(_) | Param::U32(_) | Param::F32(_) => 4,
            Param::I64(_) | Param::U64(_) | Param::F64(_) | Param::Buffer { .. } | Param::Pinned { .. } => 8,
        }
    }
}

impl Params {
    pub fn new(params: impl IntoIterator<Item = Param>) -> Params {
        Params(params.into_iter().collect())
    }

    /// The same, and some more after them.
    pub(crate) fn followed_by(&self, more: impl IntoIterator<Item = Param>) -> Params {
        Params(self.0.iter().cloned().chain(more).collect())
    }

    /// Offset and size of each, naturally aligned.
    fn layout(&self) -> impl Iterator<Item = (u32, u32)> {
        let mut end = 0_u32;
        self.0.iter().map(move |param| {
            let (offset, bytes) = (end.next_multiple_of(param.bytes()), param.bytes());
            end = offset + bytes;
            (offset, bytes)
        })
    }

    /// The buffers among them, with their offsets.
    pub(crate) fn spans(&self) -> impl Iterator<Item = (Handle, u64)> {
        let buffer = |param: &Param| match param {
            Param::Buffer { handle, offset } => Some((*handle, *offset)),
            _ => None,
        };
        self.0.iter().filter_map(buffer)
    }

    /// The pinned memories among them, all of which must be this slab's.
    pub(crate) fn pinned(&self, slab: &Arc<Slab>) -> Result<Vec<Pinned>, DeviceError> {
        let mut held = Vec::new();
        for param in &self.0 {
            if let Param::Pinned { memory, offset } = param {
                memory.check_worker(slab)?;
                memory.check(*offset, 0)?;
                held.push(memory.clone());
            }
        }
        Ok(held)
    }

    /// Compares with what the kernel takes.
    pub(crate) fn check(&self, expected: &[(u32, u32)]) -> Result<(), DeviceError> {
        let bad = |why: String| Err(DeviceError::BadParams { why });
        if self.0.len() != expected.len() {
            return bad(format!("it takes {}, and {} were given", expected.len(), self.0.len()));
        }
        let bytes = expected.last().map_or(0, |(offset, size)| *offset as usize + *size as usize);
        if bytes > PAYLOAD_BYTES_MAX {
            return bad(format!("it takes {bytes} bytes of them, and {PAYLOAD_BYTES_MAX} are possible"));
        }
        for (n, (given, expected)) in self.layout().zip(expected).enumerate() {
            if given != *expected {
                let (kind, given, expected) = (&self.0[n], given.1, expected.1);
                return bad(format!("parameter {n} has {expected} bytes, and {kind:?} has {given}"));
            }
        }
        Ok(())
    }

    /// The parameter block, with the addresses of the buffers in the order of `spans`.
    pub(crate) fn block(&self, addresses: impl IntoIterator<Item = u64>) -> Vec<u8> {
        let mut addresses = addresses.into_iter();
        let mut block = Vec::with_capacity(8 * self.0.len());
        for (param, (offset, _)) in self.0.iter().zip(self.layout()) {
            block.resize(offset as usize, 0);
            match param {
                Param::I32(value) => block.extend_from_slice(&value.to_le_bytes()),
                Param::U32(value) => block.extend_from_slice(&value.to_le_bytes()),
                Param::I64(value) => block.extend_from_slice(&value.to_le_bytes()),
                Param::U64(value) => block.extend_from_slice(&value.to_le_bytes()),
                Param::F32(value) => block.extend_from_slice(&value.to_le_bytes()),
                Param::F64(value) => block.extend_from_slice(&value.to_le_bytes()),
                Param::Pinned { memory, offset } => {
                    block.extend_from_slice(&(memory.device_address() + offset).to_le_bytes());
                }
                Param::Buffer { .. } => {
                    block.extend_from_slice(&addresses.next().unwrap_or(0).to_le_bytes());
                }
            }
        }
        block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laid_out_and_checked() {
        let buffer = Param::Buffer { handle: Handle(9), offset: 4 };
        let params = Params::new([Param::I32(-1), buffer, Param::F32(1.0), Param::F64(2.0)]);
        let expected = [(0, 4), (8, 8), (16, 4), (24, 8)];
        assert_eq!(params.layout().collect::<Vec<_>>(), expected);
        assert_eq!(params.spans().collect::<Vec<_>>(), [(Handle(9), 4)]);
        params.check(&expected).unwrap();
        let block = params.block([0x1122]);
        assert_eq!(block.len(), 32);
        assert_eq!(block[..16], [255, 255, 255, 255, 0, 0, 0, 0, 0x22, 0x11, 0, 0, 0, 0, 0, 0]);
        let message = |expected: &[(u32, u32)]| params.check(expected).unwrap_err().to_string();
        assert!(message(&expected[..3]).contains("it takes 3, and 4 were given"));
        assert!(message(&[(0, 4), (8, 8), (16, 8), (24, 8)]).contains("parameter 2 has 8 bytes"));
        let many = Params::new((0..PAYLOAD_BYTES_MAX / 8 + 1).map(|_| Param::U64(1)));
        let expected: Vec<_> = many.layout().collect();
        assert!(many.check(&expected).unwrap_err().to_string().contains("4096 are possible"));
        assert!(Params::default().block([]).is_empty());
    }
}
