//! What only GPUs do, for kernels that a host vouches for: see `gpu.rs`, which says what each of them means.

use super::{BinaryOp, BuildError, KernelBuilder, UnaryOp, Value};
use crate::assemble::GPU_SHARED_BYTES_MAX;
use crate::gpu::{GpuOp, HalfType, MatrixElement};
use crate::ir::{Op, Reg, Ty};

/// Groups of copies, or of products, that may be under way when somebody waits.
const PENDING_MAX: u32 = 7;

/// Sums of an item that one instruction adds to: 256 columns of 64 rows, shared by 128 items.
const ACCUMULATORS_MAX: u32 = 128;

/// Sums that tensor cores add to in place. They are no values while products are under way.
#[derive(Debug, Clone)]
pub struct Accumulators {
    builder: u32,
    scope: u32,
    regs: Vec<Reg>,
}

impl KernelBuilder {
    /// As [`KernelBuilder::shared`], with as much as a GPU has: a launch has to ask for it
    /// ([`KernelImage::dynamic_shared_bytes`](crate::KernelImage::dynamic_shared_bytes)). Not zero at first.
    pub fn shared_on_gpu(&mut self, bytes: u32) -> Result<Value, BuildError> {
        self.take_shared(bytes, GPU_SHARED_BYTES_MAX)
    }

    /// `a * b + sums` of a warp: each item has a fragment of the tiles. Operands are words of packed halves, or of tf32
    /// ([`KernelBuilder::round_tf32`]). Every item of the warp comes here.
    pub fn multiply_tiles(
        &mut self,
        element: MatrixElement,
        a: [Value; 4],
        b: [Value; 2],
        sums: [Value; 4],
    ) -> Result<[Value; 4], BuildError> {
        self.begin("a product of tiles")?;
        let a = self.operands("a product of tiles", a, Ty::I32)?;
        let b = self.operands("a product of tiles", b, Ty::I32)?;
        let sums = self.operands("a product of tiles", sums, Ty::F32)?;
        let to: [Reg; 4] = std::array::from_fn(|_| self.asm.register(Ty::F32));
        self.gpu(GpuOp::Multiply { element, to, a, b, sums });
        Ok(to.map(|reg| self.value(reg)))
    }

    /// Four tiles of eight rows of 16 bytes from shared memory, as fragments. Each item says where one row is, a
    /// multiple of 16. Every item of the warp comes here.
    pub fn load_tiles(&mut self, base: Value, offset: u32, is_transposed: bool) -> Result<[Value; 4], BuildError> {
        self.begin("a load of tiles")?;
        let at = self.address("a load of tiles", base, offset)?;
        let to: [Reg; 4] = std::array::from_fn(|_| self.asm.register(Ty::I32));
        self.gpu(GpuOp::LoadTiles { to, at, is_transposed });
        Ok(to.map(|reg| self.value(reg)))
    }

    /// Begins to copy 16 bytes from a window to shared memory, both at multiples of 16: addresses and offsets. Only the
    /// first `bytes` are read, and the rest are zeros. Nobody looks at them before the item has waited for them, and
    /// then a barrier.
    pub fn copy_async(&mut self, to: (Value, u32), from: (Value, u32), bytes: Value) -> Result<(), BuildError> {
        self.begin("a copy")?;
        let (to, from) = (self.address("a copy", to.0, to.1)?, self.address("a copy", from.0, from.1)?);
        let bytes = self.operand("a copy", bytes, Ty::I32)?;
        self.gpu(GpuOp::Copy { to, from, bytes });
        Ok(())
    }

    /// The item's copies since the last time are a group.
    pub fn commit_copies(&mut self) -> Result<(), BuildError> {
        self.begin("a group of copies")?;
        self.gpu(GpuOp::CommitCopies);
        Ok(())
    }

    /// Waits for the item's groups of copies, but for so many of the last.
    pub fn await_copies(&mut self, pending: u32) -> Result<(), BuildError> {
        self.begin("waiting for copies")?;
        if pending > PENDING_MAX {
            return Err(BuildError::Limit { what: "groups of copies under way", max: PENDING_MAX as usize });
        }
        self.gpu(GpuOp::AwaitCopies { pending });
        Ok(())
    }

    /// Where something is in shared memory, as a device counts: for descriptors of what tensor cores read themselves.
    pub fn shared_address(&mut self, at: Value) -> Result<Value, BuildError> {
        self.begin("an address")?;
        let at = self.address("an address", at, 0)?;
        let to = self.asm.register(Ty::I32);
        self.gpu(GpuOp::SharedAddress { to, at });
        Ok(self.value(to))
    }

    /// So many sums of an item, zeros at first.
    pub fn accumulators(&mut self, count: u32) -> Result<Accumulators, BuildError> {
        self.begin("sums")?;
        if !count.is_multiple_of(4) || count == 0 || count > ACCUMULATORS_MAX {
            return Err(BuildError::Limit { what: "sums, a multiple of four", max: ACCUMULATORS_MAX as usize });
        }
        let scope = self.scope();
        let regs: Vec<Reg> = (0..count).map(|_| self.asm.register(Ty::F32)).collect();
        regs.iter().for_each(|to| self.asm.push(Op::Const { to: *to, bits: 0 }));
        Ok(Accumulators { builder: self.builder, scope, regs })
    }

    /// Adds the product of 64 rows and twice as many columns as there are sums, by a depth of 32 bytes, of a
    /// warpgroup: four warps, all of which come here. Operands are in shared memory, where descriptors of 64 bits say;
    /// each is turned where its elements lie side by side along the result and not along the depth.
    pub fn multiply_shared(
        &mut self,
        element: MatrixElement,
        sums: &Accumulators,
        descriptors: [Value; 2],
        is_turned: [bool; 2],
    ) -> Result<(), BuildError> {
        self.begin("a product of shared tiles")?;
        if element == MatrixElement::Tf32 && is_turned != [false; 2] {
            return Err(BuildError::Structure { what: "tf32 lies along the depth" });
        }
        let regs = self.registers(sums)?;
        let [left, right] = self.operands("a product of shared tiles", descriptors, Ty::I64)?;
        self.gpu(GpuOp::MultiplyShared { element, sums: regs, left, right, is_turned });
        Ok(())
    }

    /// What sums have become, once all products were waited for. Products change their registers, so these are others:
    /// stores of them are known to be of what they are now, and may be done as vectors.
    pub fn sums(&mut self, sums: &Accumulators) -> Result<Vec<Value>, BuildError> {
        self.begin("sums")?;
        let mut values = Vec::new();
        for from in self.registers(sums)? {
            let to = self.asm.register(Ty::F32);
            self.asm.push(Op::Move { to, from });
            values.push(self.value(to));
        }
        Ok(values)
    }

    fn registers(&self, sums: &Accumulators) -> Result<Vec<Reg>, BuildError> {
        match sums {
            Accumulators { builder, .. } if *builder != self.builder => Err(BuildError::Foreign),
            Accumulators { scope, .. } if !self.is_open(*scope) => Err(BuildError::OutOfScope),
            Accumulators { regs, .. } => Ok(regs.clone()),
        }
    }

    /// Before the first of some products of a warpgroup.
    pub fn fence_multiply(&mut self) -> Result<(), BuildError> {
        self.begin("a fence")?;
        self.gpu(GpuOp::FenceMultiply);
        Ok(())
    }

    /// The warpgroup's products since the last time are a group.
    pub fn commit_multiply(&mut self) -> Result<(), BuildError> {
        self.begin("a group of products")?;
        self.gpu(GpuOp::CommitMultiply);
        Ok(())
    }

    /// Waits for the warpgroup's groups of products, but for so many of the last.
    pub fn await_multiply(&mut self, pending: u32) -> Result<(), BuildError> {
        self.begin("waiting for products")?;
        if pending > PENDING_MAX {
            return Err(BuildError::Limit { what: "groups of products under way", max: PENDING_MAX as usize });
        }
        self.gpu(GpuOp::AwaitMultiply { pending });
        Ok(())
    }

    /// What the item wrote to shared memory, copies it waited for too, is seen by tensor cores that read it themselves.
    pub fn fence_async(&mut self) -> Result<(), BuildError> {
        self.begin("a fence")?;
        self.gpu(GpuOp::FenceAsync);
        Ok(())
    }

    /// Two numbers of single precision as halves in one word, rounded to the nearest.
    pub fn pack_halves(&mut self, half: HalfType, low: Value, high: Value) -> Result<Value, BuildError> {
        self.begin("packed halves")?;
        let [low, high] = self.operands("packed halves", [low, high], Ty::F32)?;
        let to = self.asm.register(Ty::I32);
        self.gpu(GpuOp::Pack { half, to, low, high });
        Ok(self.value(to))
    }

    /// One of the two halves of a word.
    pub fn unpack_half(&mut self, half: HalfType, word: Value, is_high: bool) -> Result<Value, BuildError> {
        if half == HalfType::BF16 {
            // The upper half of single precision as it is.
            let (mask, shift) = (self.i32(-1 << 16)?, self.i32(16)?);
            let bits = if is_high {
                self.binary(BinaryOp::I32And, word, mask)?
            } else {
                self.binary(BinaryOp::I32Shl, word, shift)?
            };
            return self.unary(UnaryOp::F32ReinterpretI32, bits);
        }
        self.begin("packed halves")?;
        let word = self.operand("packed halves", word, Ty::I32)?;
        let to = self.asm.register(Ty::F32);
        self.gpu(GpuOp::Unpack { to, word, is_high });
        Ok(self.value(to))
    }

    /// The bits of the nearest tf32.
    pub fn round_tf32(&mut self, x: Value) -> Result<Value, BuildError> {
        self.begin("rounding to tf32")?;
        let from = self.operand("rounding to tf32", x, Ty::F32)?;
        let to = self.asm.register(Ty::I32);
        self.gpu(GpuOp::RoundTf32 { to, from });
        Ok(self.value(to))
    }

    /// As [`BinaryOp::F32Max`], in one instruction.
    pub fn max_single(&mut self, a: Value, b: Value) -> Result<Value, BuildError> {
        self.begin("max")?;
        let [a, b] = self.operands("max", [a, b], Ty::F32)?;
        let to = self.asm.register(Ty::F32);
        self.gpu(GpuOp::Max { to, a, b });
        Ok(self.value(to))
    }

    /// Two to the power, by the device's own instruction: at most 2 ulp from the truth, without subnormal numbers.
    pub fn exp2_approximate(&mut self, x: Value) -> Result<Value, BuildError> {
        self.begin("exp2")?;
        let from = self.operand("exp2", x, Ty::F32)?;
        let to = self.asm.register(Ty::F32);
        self.gpu(GpuOp::Exp2 { to, from });
        Ok(self.value(to))
    }

    fn operands<const N: usize>(
        &self,
        what: &'static str,
        values: [Value; N],
        expected: Ty,
    ) -> Result<[Reg; N], BuildError> {
        let mut regs = [Reg(0); N];
        for (reg, value) in regs.iter_mut().zip(values) {
            *reg = self.operand(what, value, expected)?;
        }
        Ok(regs)
    }

    fn gpu(&mut self, op: GpuOp) {
        let site = self.site();
        self.asm.push(Op::Gpu { op: Box::new(op), site });
    }
}
