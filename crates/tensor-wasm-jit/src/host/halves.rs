//! Halves and floats as Wasm, which has no instruction that makes one of the other.

use wasm_encoder::Instruction;

use super::emit::HostEmitter;
use crate::ir::Reg;

/// The bits of the least float that is a normal half, and of the least that is beyond all of them however it is
/// rounded.
const HALF_NORMAL_MIN: u32 = 113 << 23;
const HALF_BEYOND: u32 = 143 << 23;

/// Pushes a float from the bits of a half, which are the lower half of a local: its magnitude's, moved to where a float
/// has them, are those of a float that is too small by a power of two, also where the half is subnormal.
pub(super) fn widening(bits: u32) -> [Instruction<'static>; 27] {
    [
        // No number: all bits of the exponent, in the one as in the other.
        Instruction::LocalGet(bits),
        Instruction::I32Const(0x7fff),
        Instruction::I32And,
        Instruction::I32Const(13),
        Instruction::I32Shl,
        Instruction::I32Const(0x7f80_0000),
        Instruction::I32Or,
        Instruction::F32ReinterpretI32,
        Instruction::LocalGet(bits),
        Instruction::I32Const(0x7fff),
        Instruction::I32And,
        Instruction::I32Const(13),
        Instruction::I32Shl,
        Instruction::F32ReinterpretI32,
        Instruction::F32Const(2.0_f32.powi(112).into()),
        Instruction::F32Mul,
        Instruction::LocalGet(bits),
        Instruction::I32Const(0x7c00),
        Instruction::I32And,
        Instruction::I32Const(0x7c00),
        Instruction::I32Eq,
        Instruction::Select,
        Instruction::LocalGet(bits),
        Instruction::I32Const(16),
        Instruction::I32Shl,
        Instruction::F32ReinterpretI32,
        Instruction::F32Copysign,
    ]
}

impl HostEmitter<'_> {
    /// A float from the bits of a half.
    pub(super) fn widen_half(&mut self, to: Reg, bits: Reg) {
        self.get(bits);
        self.local_set(self.own.offset);
        self.all(&widening(self.own.offset));
        self.set(to);
    }

    /// The bits of a half from a float, rounded to the nearest, ties to even.
    pub(super) fn round_to_half(&mut self, to: Reg, x: Reg) {
        let magnitude = |emitter: &mut Self| {
            emitter.get(x);
            emitter.all(&[Instruction::I32ReinterpretF32, Instruction::I32Const(0x7fff_ffff), Instruction::I32And]);
        };
        // Small ones have the last bit of a half where a float from 1/2 on has its own: adding that rounds.
        magnitude(self);
        self.all(&[
            Instruction::F32ReinterpretI32,
            Instruction::F32Const(0.5_f32.into()),
            Instruction::F32Add,
            Instruction::I32ReinterpretF32,
            Instruction::I32Const(0.5_f32.to_bits().cast_signed()),
            Instruction::I32Sub,
        ]);
        // Others lose thirteen bits: nearly half of what they stand for is added, and all of it where the last bit that
        // stays is odd. The exponent counts from elsewhere.
        magnitude(self);
        self.i32((15 - 127) << 23 | 0xfff);
        self.put(Instruction::I32Add);
        magnitude(self);
        self.all(&[
            Instruction::I32Const(13),
            Instruction::I32ShrU,
            Instruction::I32Const(1),
            Instruction::I32And,
            Instruction::I32Add,
            Instruction::I32Const(13),
            Instruction::I32ShrU,
        ]);
        magnitude(self);
        self.i32(HALF_NORMAL_MIN.cast_signed());
        self.all(&[Instruction::I32LtU, Instruction::Select, Instruction::I32Const(0x7c00)]);
        magnitude(self);
        self.i32(HALF_BEYOND.cast_signed());
        self.all(&[Instruction::I32LtU, Instruction::Select]);
        self.get(x);
        self.all(&[
            Instruction::I32ReinterpretF32,
            Instruction::I32Const(16),
            Instruction::I32ShrU,
            Instruction::I32Const(0x8000),
            Instruction::I32And,
            Instruction::I32Or,
            Instruction::I32Const(0x7e00),
        ]);
        self.get(x);
        self.get(x);
        self.all(&[Instruction::F32Eq, Instruction::Select]);
        self.set(to);
    }
}
