//! Operands that lie along another axis than the result does, as in a transposition: a group reads a square of them as
//! they lie, and uses it as the result lies. In between it is in shared memory, in rows that are one element longer, so
//! that a column of it is in all banks.

use tensor_wasm_jit::Target;
use tensor_wasm_jit::build::{Axis, BinaryOp as B, IdKind, KernelBuilder, Value};

use super::super::index::{Axes, Indices, small, sum, times};
use super::super::numbers::{Built, Class, Registers};
use super::memory::load_one;
use super::{Argument, Emit, Frame, GROUP, LoweredKernel};
use crate::schedule::plan::{BufferView, Level, MapKernel, ValueKind};
use crate::shape::{AxisSet, Layout};

/// Rows and columns of a square.
const SIDE: u32 = 32;

/// Squares in shared memory.
const SQUARES_MAX: usize = 4;

/// Elements from which on it matters; fewer in tests, which run them one by one.
const ELEMENTS_MIN: usize = if cfg!(test) { 1 << 11 } else { 1 << 16 };

/// Which axis operands lie along, which one the result, and which operands do.
pub(super) struct Turned {
    along: usize,
    inner: usize,
    loads: Vec<usize>,
}

impl Turned {
    /// None where every operand lies as the result does, or what is computed is not of that kind.
    pub(super) fn of(kernel: &MapKernel) -> Option<Turned> {
        let space = kernel.space;
        let has_rows = kernel.values.iter().any(|value| value.level == Level::Row);
        if has_rows || space.numel() < ELEMENTS_MIN {
            return None;
        }
        let inner = (0..space.rank()).rfind(|axis| space[*axis] != 1)?;
        let along = |view: &BufferView| {
            let strides = view.layout.strides();
            let is_turned = strides[inner].unsigned_abs() > 1;
            (0..inner).find(|axis| is_turned && strides[*axis] == 1 && space[*axis] >= SIDE as usize)
        };
        let first = kernel.loads.iter().find_map(along).filter(|_| space[inner] >= SIDE as usize)?;
        let is_own = |(_, view): &(usize, &BufferView)| along(view) == Some(first);
        let loads = kernel.loads.iter().enumerate().filter(is_own).map(|(n, _)| n).take(SQUARES_MAX).collect();
        Some(Turned { along: first, inner, loads })
    }
}

/// Lowers a kernel that has such operands.
pub(super) fn lower(kernel: &MapKernel, turned: &Turned, target: Target) -> Built<LoweredKernel> {
    let space = kernel.space;
    let (along, inner) = (turned.along, turned.inner);
    let frame = Frame {
        rows: space.numel(),
        row_len: 1,
        team: 1,
        lanes: 1,
        is_along_rows: true,
        repeats: 1,
        parts: 1,
        part_len: 1,
        is_kept: true,
        reduced: AxisSet::default(),
        group: GROUP as usize,
        target,
    };
    let mut emit = Emit::new(kernel, frame, "map_turned", 0)?;
    let squares = [along, inner].map(|axis| small(space[axis].div_ceil(SIDE as usize)));
    let rest = space.numel() / space[along] / space[inner];
    let (item, group) = (emit.b.id(IdKind::Local, Axis::X)?, emit.b.id(IdKind::Group, Axis::X)?);
    let mut indices = Indices::default();
    let (group, square_inner) = indices.divide(&mut emit.b, group, squares[1])?;
    let (number, square_along) = indices.divide(&mut emit.b, group, squares[0])?;
    let (y, x) = indices.divide(&mut emit.b, item, SIDE)?;
    let side = (SIDE as usize).cast_signed();
    let (from_along, from_inner) = (times(&mut emit.b, square_along, side)?, times(&mut emit.b, square_inner, side)?);
    emit.at_row = Some(number);
    emit.load_fills()?;
    let is_other = |axis: usize| axis != along && axis != inner;
    let ends = [along, inner].map(|axis| small(space[axis]).cast_signed());
    // As they lie: neighbours along their own axis.
    let mut shared = Vec::new();
    for load in &turned.loads {
        let view = kernel.loads[*load];
        let class = Class::of(view.dtype);
        let square = emit.b.shared(SIDE * (SIDE + 1) * class.bytes())?;
        shared.push((*load, class, square));
        let window = emit.windows.get(Argument::Buffer(view.source))?;
        let place = indices.place(&mut emit.b, &Axes::of(&view.layout, is_other), number)?;
        let start = sum(&mut emit.b, &[place], view.layout.offset)?;
        for row in 0..SIDE * SIDE / GROUP {
            let b = &mut emit.b;
            let own = plus(b, y, row * GROUP / SIDE)?;
            let (at, at_inner) = (b.binary(B::I32Add, from_along, x)?, b.binary(B::I32Add, from_inner, own)?);
            let is_inside = both_below(b, [at, at_inner], ends)?;
            let far = times(b, at_inner, view.layout.strides()[inner])?;
            let place = b.binary(B::I32Add, start, at)?;
            let place = b.binary(B::I32Add, place, far)?;
            b.begin_if(is_inside, &[])?;
            let address = b.element(window, place, small(view.dtype.size()))?;
            let value = load_one(b, view.dtype, address, 0)?;
            let slot = times(b, own, side + 1)?;
            let slot = b.binary(B::I32Add, slot, x)?;
            let address = b.element(square, slot, class.bytes())?;
            b.store(value, address, 0)?;
            b.end()?;
        }
    }
    emit.b.barrier()?;
    // And as the result lies.
    let whole = Layout::contiguous(space);
    let place = indices.place(&mut emit.b, &Axes::of(&whole, is_other), number)?;
    let start = sum(&mut emit.b, &[place], 0)?;
    let stores = emit.stores_of(0);
    for row in 0..SIDE * SIDE / GROUP {
        let b = &mut emit.b;
        let own = plus(b, y, row * GROUP / SIDE)?;
        let (at, at_inner) = (b.binary(B::I32Add, from_along, own)?, b.binary(B::I32Add, from_inner, x)?);
        let is_inside = both_below(b, [at, at_inner], ends)?;
        b.begin_if(is_inside, &[])?;
        let (far, near) = (times(b, at, whole.strides()[along])?, times(b, at_inner, whole.strides()[inner])?);
        let point_number = b.binary(B::I32Add, start, far)?;
        let point_number = b.binary(B::I32Add, point_number, near)?;
        let slot = times(b, x, side + 1)?;
        let slot = b.binary(B::I32Add, slot, own)?;
        let mut point = emit.point(point_number, None);
        for (n, value) in kernel.values.iter().enumerate() {
            let ValueKind::Load(load) = value.kind else { continue };
            let Some((_, class, square)) = shared.iter().find(|(own, ..)| *own == load) else { continue };
            let address = emit.b.element(*square, slot, class.bytes())?;
            point.full[n] = Some(vec![emit.b.load(class.ty(), address, 0)?]);
        }
        emit.visit(&mut point, &[], &stores)?;
        emit.b.end()?;
    }
    let groups = small(rest).saturating_mul(squares[0]).saturating_mul(squares[1]);
    emit.finish(groups)
}

fn plus(b: &mut KernelBuilder, value: Value, more: u32) -> Built<Value> {
    let more = b.i32(more.cast_signed())?;
    b.binary(B::I32Add, value, more)
}

fn both_below(b: &mut KernelBuilder, values: [Value; 2], ends: [i32; 2]) -> Built<Value> {
    let ends = [b.i32(ends[0])?, b.i32(ends[1])?];
    let first = b.binary(B::I32LtU, values[0], ends[0])?;
    let second = b.binary(B::I32LtU, values[1], ends[1])?;
    b.binary(B::I32And, first, second)
}
