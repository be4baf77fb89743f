//! Registers that items of a subgroup exchange, for a CPU, where items are not side by side: each stores what it has in
//! shared memory, and reads the other's when all have.

use crate::assemble::SHARED_BYTES_MAX;
use crate::ir::{Access, Address, Axis, Bin, Body, Id, Op, Reg, Site, Ty};
use crate::refusal::Refusal;

/// Items that a group may have.
const ITEMS_MAX: u32 = 1024;

/// Bytes that each has in shared memory.
const BYTES: u32 = 8;

/// Replaces exchanges by stores and loads, with barriers between them. Refuses what only a GPU does.
pub(crate) fn by_memory(mut body: Body) -> Result<Body, Refusal> {
    let is_gpus = |op: &Op| matches!(op, Op::Gpu { .. });
    if body.shared_bytes > SHARED_BYTES_MAX || body.ops.iter().any(is_gpus) {
        let why = "it has instructions, or shared memory, that only a GPU has".to_owned();
        return Err(Refusal::NotAKernel { name: body.name, why });
    }
    let Some(site) = body.ops.iter().find_map(|op| if let Op::Shuffle { site, .. } = op { Some(*site) } else { None })
    else {
        return Ok(body);
    };
    let from = body.shared_bytes.next_multiple_of(16);
    let end = from + ITEMS_MAX * BYTES;
    if end > SHARED_BYTES_MAX {
        let place = body.sites.get(site.0 as usize).cloned();
        let place = place.unwrap_or_else(|| crate::SourceLocation { function: body.name.clone(), offset: None });
        return Err(Refusal::Shared { bytes_max: SHARED_BYTES_MAX, place });
    }
    body.shared_bytes = end;
    for op in std::mem::take(&mut body.ops) {
        let Op::Shuffle { to, value, mask, site } = op else {
            body.ops.push(op);
            continue;
        };
        let item = number(&mut body, site);
        let mask = constant(&mut body, mask);
        let other = binary(&mut body, Bin::I32Xor, item, mask, site);
        let access = Access { bytes: body.ty(value).bytes(), is_signed: false };
        let (own, there) = (place(&mut body, item, from, site), place(&mut body, other, from, site));
        body.ops.push(Op::Store { access, at: own, value, site });
        body.ops.push(Op::Barrier { site });
        body.ops.push(Op::Load { to, access, at: there, site });
        body.ops.push(Op::Barrier { site });
    }
    Ok(body)
}

fn register(body: &mut Body, ty: Ty) -> Reg {
    body.types.push(ty);
    Reg(u32::try_from(body.types.len() - 1).unwrap_or(u32::MAX))
}

fn constant(body: &mut Body, number: u32) -> Reg {
    let to = register(body, Ty::I32);
    body.ops.push(Op::Const { to, bits: u64::from(number) });
    to
}

fn binary(body: &mut Body, op: Bin, a: Reg, b: Reg, site: Site) -> Reg {
    let to = register(body, Ty::I32);
    body.ops.push(Op::Bin { op, to, a, b, site });
    to
}

fn id(body: &mut Body, id: Id, axis: Axis) -> Reg {
    let to = register(body, Ty::I32);
    body.ops.push(Op::Id { id, to, axis });
    to
}

/// The item's number in its group, counted along x first.
fn number(body: &mut Body, site: Site) -> Reg {
    let mut number = id(body, Id::Local, Axis::Z);
    for axis in [Axis::Y, Axis::X] {
        let (size, own) = (id(body, Id::LocalSize, axis), id(body, Id::Local, axis));
        number = binary(body, Bin::I32Mul, number, size, site);
        number = binary(body, Bin::I32Add, number, own, site);
    }
    number
}

/// Where an item's bytes are.
fn place(body: &mut Body, item: Reg, from: u32, site: Site) -> Address {
    let shift = constant(body, BYTES.trailing_zeros());
    let offset = binary(body, Bin::I32Shl, item, shift, site);
    let start = register(body, Ty::I32);
    body.ops.push(Op::Shared { to: start });
    Address::new(binary(body, Bin::I32Add, start, offset, site), from)
}
