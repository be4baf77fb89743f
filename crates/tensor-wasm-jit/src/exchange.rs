//! Registers that the items of whole subgroups exchange, for a CPU: there they wait for each other, as items do that
//! may not all be there.

use crate::assemble::SHARED_BYTES_MAX;
use crate::ir::{Body, Op, Reg, SubgroupOp, Ty};
use crate::refusal::Refusal;

/// Replaces exchanges of whole subgroups by those that wait. Refuses what only a GPU does.
pub(crate) fn for_cpu(mut body: Body) -> Result<Body, Refusal> {
    let is_gpus = |op: &Op| matches!(op, Op::Gpu { .. });
    if body.shared_bytes > SHARED_BYTES_MAX || body.ops.iter().any(is_gpus) {
        let why = "it has instructions, or shared memory, that only a GPU has".to_owned();
        return Err(Refusal::NotAKernel { name: body.name, why });
    }
    for op in std::mem::take(&mut body.ops) {
        let Op::Shuffle { to, value, mask, site } = op else {
            body.ops.push(op);
            continue;
        };
        body.types.push(Ty::I32);
        let bits = Reg(u32::try_from(body.types.len() - 1).unwrap_or(u32::MAX));
        body.ops.push(Op::Const { to: bits, bits: u64::from(mask) });
        body.ops.push(Op::Subgroup { op: SubgroupOp::ShuffleXor(bits), to, value, site });
    }
    Ok(body)
}
