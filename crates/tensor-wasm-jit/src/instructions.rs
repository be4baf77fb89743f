//! Wasm's instructions about memory, as what they do: how many bytes, and how they are extended. And the names of
//! others.

use wasmparser::Operator;

use crate::ir::{Access, Rmw, Ty};

/// What Wasm's text format calls an instruction, as near as its name tells.
pub(crate) fn instruction_name(operator: &Operator<'_>) -> String {
    let debug = format!("{operator:?}");
    let name = debug.split([' ', '{', '(']).next().unwrap_or("an instruction");
    let mut text = String::new();
    for (n, c) in name.chars().enumerate() {
        if c.is_ascii_uppercase() && n > 0 {
            text.push('_');
        }
        text.push(c.to_ascii_lowercase());
    }
    for prefix in ["i32", "i64", "f32", "f64", "v128", "memory", "table", "ref", "i8x16", "i16x8", "i32x4", "f32x4"] {
        if let Some(rest) = text.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_')) {
            return format!("{prefix}.{rest}");
        }
    }
    text
}

type MemArg = wasmparser::MemArg;

fn access(bytes: u32, is_signed: bool) -> Access {
    Access { bytes, is_signed }
}

pub(crate) fn load<'o>(operator: &'o Operator<'_>) -> Option<(Ty, Access, &'o MemArg)> {
    Some(match operator {
        Operator::I32Load { memarg } => (Ty::I32, access(4, false), memarg),
        Operator::I64Load { memarg } => (Ty::I64, access(8, false), memarg),
        Operator::F32Load { memarg } => (Ty::F32, access(4, false), memarg),
        Operator::F64Load { memarg } => (Ty::F64, access(8, false), memarg),
        Operator::I32Load8S { memarg } => (Ty::I32, access(1, true), memarg),
        Operator::I32Load8U { memarg } => (Ty::I32, access(1, false), memarg),
        Operator::I32Load16S { memarg } => (Ty::I32, access(2, true), memarg),
        Operator::I32Load16U { memarg } => (Ty::I32, access(2, false), memarg),
        Operator::I64Load8S { memarg } => (Ty::I64, access(1, true), memarg),
        Operator::I64Load8U { memarg } => (Ty::I64, access(1, false), memarg),
        Operator::I64Load16S { memarg } => (Ty::I64, access(2, true), memarg),
        Operator::I64Load16U { memarg } => (Ty::I64, access(2, false), memarg),
        Operator::I64Load32S { memarg } => (Ty::I64, access(4, true), memarg),
        Operator::I64Load32U { memarg } => (Ty::I64, access(4, false), memarg),
        _ => return None,
    })
}

pub(crate) fn store<'o>(operator: &'o Operator<'_>) -> Option<(Access, &'o MemArg)> {
    Some(match operator {
        Operator::I32Store { memarg } | Operator::F32Store { memarg } | Operator::I64Store32 { memarg } => {
            (access(4, false), memarg)
        }
        Operator::I64Store { memarg } | Operator::F64Store { memarg } => (access(8, false), memarg),
        Operator::I32Store8 { memarg } | Operator::I64Store8 { memarg } => (access(1, false), memarg),
        Operator::I32Store16 { memarg } | Operator::I64Store16 { memarg } => (access(2, false), memarg),
        _ => return None,
    })
}

pub(crate) fn atomic_load<'o>(operator: &'o Operator<'_>) -> Option<(Ty, Access, &'o MemArg)> {
    Some(match operator {
        Operator::I32AtomicLoad { memarg } => (Ty::I32, access(4, false), memarg),
        Operator::I64AtomicLoad { memarg } => (Ty::I64, access(8, false), memarg),
        Operator::I64AtomicLoad32U { memarg } => (Ty::I64, access(4, false), memarg),
        _ => return None,
    })
}

pub(crate) fn atomic_store<'o>(operator: &'o Operator<'_>) -> Option<(Access, &'o MemArg)> {
    Some(match operator {
        Operator::I32AtomicStore { memarg } | Operator::I64AtomicStore32 { memarg } => (access(4, false), memarg),
        Operator::I64AtomicStore { memarg } => (access(8, false), memarg),
        _ => return None,
    })
}

/// Atomics of one and two bytes are refused by name: GPUs have none.
pub(crate) fn read_modify_write<'o>(operator: &'o Operator<'_>) -> Option<(Rmw, Ty, Access, &'o MemArg)> {
    let (four, eight) = (access(4, false), access(8, false));
    Some(match operator {
        Operator::I32AtomicRmwAdd { memarg } => (Rmw::Add, Ty::I32, four, memarg),
        Operator::I32AtomicRmwSub { memarg } => (Rmw::Sub, Ty::I32, four, memarg),
        Operator::I32AtomicRmwAnd { memarg } => (Rmw::And, Ty::I32, four, memarg),
        Operator::I32AtomicRmwOr { memarg } => (Rmw::Or, Ty::I32, four, memarg),
        Operator::I32AtomicRmwXor { memarg } => (Rmw::Xor, Ty::I32, four, memarg),
        Operator::I32AtomicRmwXchg { memarg } => (Rmw::Exchange, Ty::I32, four, memarg),
        Operator::I32AtomicRmwCmpxchg { memarg } => (Rmw::CompareExchange, Ty::I32, four, memarg),
        Operator::I64AtomicRmwAdd { memarg } => (Rmw::Add, Ty::I64, eight, memarg),
        Operator::I64AtomicRmwSub { memarg } => (Rmw::Sub, Ty::I64, eight, memarg),
        Operator::I64AtomicRmwAnd { memarg } => (Rmw::And, Ty::I64, eight, memarg),
        Operator::I64AtomicRmwOr { memarg } => (Rmw::Or, Ty::I64, eight, memarg),
        Operator::I64AtomicRmwXor { memarg } => (Rmw::Xor, Ty::I64, eight, memarg),
        Operator::I64AtomicRmwXchg { memarg } => (Rmw::Exchange, Ty::I64, eight, memarg),
        Operator::I64AtomicRmwCmpxchg { memarg } => (Rmw::CompareExchange, Ty::I64, eight, memarg),
        _ => return None,
    })
}
