//! What most operations are in PTX. Where an instruction of PTX is not quite the operation (`rem` by -1, `min` of a
//! NaN, a conversion of one), its row says what is done about it; what is the same for every device is in
//! `legalize.rs`.

use crate::ir::{Bin, Math, Un};

/// What an operation is in PTX. `D` is what it assigns, `A` and `B` are its operands; `T`, `S`, `U`, `V`, `F`, `G`,
/// `H` and `Q` are registers of its own, of 32, 32, 64 and 64 bits, floats of 32 and 64 bits, 16 bits, and a predicate.
pub(super) fn unary(op: Un) -> &'static str {
    match op {
        Un::I32Clz => "clz.b32 D, A;",
        Un::I32Ctz => "brev.b32 T, A; clz.b32 D, T;",
        Un::I32Popcnt => "popc.b32 D, A;",
        Un::I32Eqz => "setp.eq.s32 Q, A, 0; selp.b32 D, 1, 0, Q;",
        Un::I32Extend8S => "shl.b32 T, A, 24; shr.s32 D, T, 24;",
        Un::I32Extend16S => "shl.b32 T, A, 16; shr.s32 D, T, 16;",
        Un::I64Clz => "clz.b64 T, A; cvt.u64.u32 D, T;",
        Un::I64Ctz => "brev.b64 U, A; clz.b64 T, U; cvt.u64.u32 D, T;",
        Un::I64Popcnt => "popc.b64 T, A; cvt.u64.u32 D, T;",
        Un::I64Eqz => "setp.eq.s64 Q, A, 0; selp.b32 D, 1, 0, Q;",
        Un::I64Extend8S => "shl.b64 U, A, 56; shr.s64 D, U, 56;",
        Un::I64Extend16S => "shl.b64 U, A, 48; shr.s64 D, U, 48;",
        Un::I64Extend32S => "shl.b64 U, A, 32; shr.s64 D, U, 32;",
        Un::F32Abs => "mov.b32 T, A; and.b32 T, T, 0x7fffffff; mov.b32 D, T;",
        Un::F32Neg => "mov.b32 T, A; xor.b32 T, T, 0x80000000; mov.b32 D, T;",
        Un::F32Ceil => "cvt.rpi.f32.f32 D, A;",
        Un::F32Floor => "cvt.rmi.f32.f32 D, A;",
        Un::F32Trunc => "cvt.rzi.f32.f32 D, A;",
        Un::F32Nearest => "cvt.rni.f32.f32 D, A;",
        Un::F32Sqrt => "sqrt.rn.f32 D, A;",
        Un::F64Abs => "mov.b64 U, A; and.b64 U, U, 0x7fffffffffffffff; mov.b64 D, U;",
        Un::F64Neg => "mov.b64 U, A; xor.b64 U, U, 0x8000000000000000; mov.b64 D, U;",
        Un::F64Ceil => "cvt.rpi.f64.f64 D, A;",
        Un::F64Floor => "cvt.rmi.f64.f64 D, A;",
        Un::F64Trunc => "cvt.rzi.f64.f64 D, A;",
        Un::F64Nearest => "cvt.rni.f64.f64 D, A;",
        Un::F64Sqrt => "sqrt.rn.f64 D, A;",
        Un::I32WrapI64 => "cvt.u32.u64 D, A;",
        Un::I64ExtendI32S => "cvt.s64.s32 D, A;",
        Un::I64ExtendI32U => "cvt.u64.u32 D, A;",
        Un::I32TruncF32S => "cvt.rzi.s32.f32 D, A;",
        Un::I32TruncF32U => "cvt.rzi.u32.f32 D, A;",
        Un::I32TruncF64S => "cvt.rzi.s32.f64 D, A;",
        Un::I32TruncF64U => "cvt.rzi.u32.f64 D, A;",
        Un::I64TruncF32S => "cvt.rzi.s64.f32 D, A;",
        Un::I64TruncF32U => "cvt.rzi.u64.f32 D, A;",
        Un::I64TruncF64S => "cvt.rzi.s64.f64 D, A;",
        Un::I64TruncF64U => "cvt.rzi.u64.f64 D, A;",
        // What a NaN becomes differs between widths.
        Un::I32TruncSatF32S => "setp.nan.f32 Q, A, A; cvt.rzi.s32.f32 T, A; selp.b32 D, 0, T, Q;",
        Un::I32TruncSatF32U => "setp.nan.f32 Q, A, A; cvt.rzi.u32.f32 T, A; selp.b32 D, 0, T, Q;",
        Un::I32TruncSatF64S => "setp.nan.f64 Q, A, A; cvt.rzi.s32.f64 T, A; selp.b32 D, 0, T, Q;",
        Un::I32TruncSatF64U => "setp.nan.f64 Q, A, A; cvt.rzi.u32.f64 T, A; selp.b32 D, 0, T, Q;",
        Un::I64TruncSatF32S => "setp.nan.f32 Q, A, A; cvt.rzi.s64.f32 U, A; selp.b64 D, 0, U, Q;",
        Un::I64TruncSatF32U => "setp.nan.f32 Q, A, A; cvt.rzi.u64.f32 U, A; selp.b64 D, 0, U, Q;",
        Un::I64TruncSatF64S => "setp.nan.f64 Q, A, A; cvt.rzi.s64.f64 U, A; selp.b64 D, 0, U, Q;",
        Un::I64TruncSatF64U => "setp.nan.f64 Q, A, A; cvt.rzi.u64.f64 U, A; selp.b64 D, 0, U, Q;",
        Un::F32ConvertI32S => "cvt.rn.f32.s32 D, A;",
        Un::F32ConvertI32U => "cvt.rn.f32.u32 D, A;",
        Un::F32ConvertI64S => "cvt.rn.f32.s64 D, A;",
        Un::F32ConvertI64U => "cvt.rn.f32.u64 D, A;",
        Un::F64ConvertI32S => "cvt.rn.f64.s32 D, A;",
        Un::F64ConvertI32U => "cvt.rn.f64.u32 D, A;",
        Un::F64ConvertI64S => "cvt.rn.f64.s64 D, A;",
        Un::F64ConvertI64U => "cvt.rn.f64.u64 D, A;",
        Un::F32DemoteF64 => "cvt.rn.f32.f64 D, A;",
        Un::F64PromoteF32 => "cvt.f64.f32 D, A;",
        Un::I32ReinterpretF32 | Un::F32ReinterpretI32 => "mov.b32 D, A;",
        Un::I64ReinterpretF64 | Un::F64ReinterpretI64 => "mov.b64 D, A;",
    }
}

pub(super) fn binary(op: Bin) -> &'static str {
    match op {
        Bin::I32Add => "add.s32 D, A, B;",
        Bin::I32Sub => "sub.s32 D, A, B;",
        Bin::I32Mul => "mul.lo.s32 D, A, B;",
        Bin::I32DivS => "div.s32 D, A, B;",
        Bin::I32DivU => "div.u32 D, A, B;",
        // By -1 nothing is left; the smallest number divided by it overflows.
        Bin::I32RemS => "setp.eq.s32 Q, B, -1; selp.b32 T, 1, B, Q; rem.s32 D, A, T;",
        Bin::I32RemU => "rem.u32 D, A, B;",
        Bin::I32And => "and.b32 D, A, B;",
        Bin::I32Or => "or.b32 D, A, B;",
        Bin::I32Xor => "xor.b32 D, A, B;",
        Bin::I32Shl => "and.b32 T, B, 31; shl.b32 D, A, T;",
        Bin::I32ShrS => "and.b32 T, B, 31; shr.s32 D, A, T;",
        Bin::I32ShrU => "and.b32 T, B, 31; shr.u32 D, A, T;",
        Bin::I32Rotl => "shf.l.wrap.b32 D, A, A, B;",
        Bin::I32Rotr => "shf.r.wrap.b32 D, A, A, B;",
        Bin::I32Eq => "setp.eq.s32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I32Ne => "setp.ne.s32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I32LtS => "setp.lt.s32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I32LtU => "setp.lt.u32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I32GtS => "setp.gt.s32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I32GtU => "setp.gt.u32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I32LeS => "setp.le.s32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I32LeU => "setp.le.u32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I32GeS => "setp.ge.s32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I32GeU => "setp.ge.u32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I64Add => "add.s64 D, A, B;",
        Bin::I64Sub => "sub.s64 D, A, B;",
        Bin::I64Mul => "mul.lo.s64 D, A, B;",
        Bin::I64DivS => "div.s64 D, A, B;",
        Bin::I64DivU => "div.u64 D, A, B;",
        Bin::I64RemS => "setp.eq.s64 Q, B, -1; selp.b64 U, 1, B, Q; rem.s64 D, A, U;",
        Bin::I64RemU => "rem.u64 D, A, B;",
        Bin::I64And => "and.b64 D, A, B;",
        Bin::I64Or => "or.b64 D, A, B;",
        Bin::I64Xor => "xor.b64 D, A, B;",
        Bin::I64Shl => "cvt.u32.u64 T, B; and.b32 T, T, 63; shl.b64 D, A, T;",
        Bin::I64ShrS => "cvt.u32.u64 T, B; and.b32 T, T, 63; shr.s64 D, A, T;",
        Bin::I64ShrU => "cvt.u32.u64 T, B; and.b32 T, T, 63; shr.u64 D, A, T;",
        Bin::I64Rotl => {
            "cvt.u32.u64 T, B; and.b32 T, T, 63; sub.s32 S, 64, T; shl.b64 U, A, T; shr.u64 V, A, S; or.b64 D, U, V;"
        }
        Bin::I64Rotr => {
            "cvt.u32.u64 T, B; and.b32 T, T, 63; sub.s32 S, 64, T; shr.u64 U, A, T; shl.b64 V, A, S; or.b64 D, U, V;"
        }
        Bin::I64Eq => "setp.eq.s64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I64Ne => "setp.ne.s64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I64LtS => "setp.lt.s64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I64LtU => "setp.lt.u64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I64GtS => "setp.gt.s64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I64GtU => "setp.gt.u64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I64LeS => "setp.le.s64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I64LeU => "setp.le.u64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I64GeS => "setp.ge.s64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::I64GeU => "setp.ge.u64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F32Add => "add.rn.f32 D, A, B;",
        Bin::F32Sub => "sub.rn.f32 D, A, B;",
        Bin::F32Mul => "mul.rn.f32 D, A, B;",
        Bin::F32Div => "div.rn.f32 D, A, B;",
        // The device's own take the number where one is a NaN.
        Bin::F32Min => "setp.nan.f32 Q, A, B; add.rn.f32 F, A, B; min.f32 D, A, B; selp.f32 D, F, D, Q;",
        Bin::F32Max => "setp.nan.f32 Q, A, B; add.rn.f32 F, A, B; max.f32 D, A, B; selp.f32 D, F, D, Q;",
        Bin::F32Copysign => {
            "mov.b32 T, A; mov.b32 S, B; and.b32 T, T, 0x7fffffff; and.b32 S, S, 0x80000000; or.b32 T, T, S; mov.b32 D, T;"
        }
        Bin::F32Eq => "setp.eq.f32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F32Ne => "setp.neu.f32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F32Lt => "setp.lt.f32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F32Gt => "setp.gt.f32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F32Le => "setp.le.f32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F32Ge => "setp.ge.f32 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F64Add => "add.rn.f64 D, A, B;",
        Bin::F64Sub => "sub.rn.f64 D, A, B;",
        Bin::F64Mul => "mul.rn.f64 D, A, B;",
        Bin::F64Div => "div.rn.f64 D, A, B;",
        Bin::F64Min => "setp.nan.f64 Q, A, B; add.rn.f64 G, A, B; min.f64 D, A, B; selp.f64 D, G, D, Q;",
        Bin::F64Max => "setp.nan.f64 Q, A, B; add.rn.f64 G, A, B; max.f64 D, A, B; selp.f64 D, G, D, Q;",
        Bin::F64Copysign => {
            "mov.b64 U, A; mov.b64 V, B; and.b64 U, U, 0x7fffffffffffffff; and.b64 V, V, 0x8000000000000000; or.b64 U, U, V; mov.b64 D, U;"
        }
        Bin::F64Eq => "setp.eq.f64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F64Ne => "setp.neu.f64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F64Lt => "setp.lt.f64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F64Gt => "setp.gt.f64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F64Le => "setp.le.f64 Q, A, B; selp.b32 D, 1, 0, Q;",
        Bin::F64Ge => "setp.ge.f64 Q, A, B; selp.b32 D, 1, 0, Q;",
    }
}

/// `A`, `B` and `C` are the operands.
pub(super) fn math(op: Math) -> &'static str {
    match op {
        Math::FmaF32 => "fma.rn.f32 D, A, B, C;",
        Math::FmaF64 => "fma.rn.f64 D, A, B, C;",
        // At most 2 ulp from the truth; rounded to the last bit it takes seven times as long.
        Math::RsqrtF32 => "rsqrt.approx.f32 D, A;",
        Math::F16ToF32 => "cvt.u16.u32 H, A; cvt.f32.f16 D, H;",
        // A device's own NaN has all its bits set.
        Math::F32ToF16 => "cvt.rn.f16.f32 H, A; cvt.u32.u16 T, H; setp.nan.f32 Q, A, A; selp.b32 D, 0x7e00, T, Q;",
    }
}
