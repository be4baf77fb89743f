//! Operands of products, and how their tiles come to shared memory: in chunks of 16 bytes, from multiples of 16. An
//! operand that does not lie so is copied first, to lines that do.

use tensor_wasm_jit::Ty;
use tensor_wasm_jit::build::{Axis, BinaryOp as B, IdKind, KernelBuilder, Value, Variable};

use super::super::index::{Axes, Indices, scaled, small, sum, times};
use super::super::map::{Argument, GROUP, LoweredKernel, Program};
use super::super::numbers::Built;
use super::super::tile::{CHUNK_BYTES, SharedTile, Side};
use crate::schedule::plan::BufferView;

/// Lines along the result that are in one block: as many bytes as are swizzled together.
pub(super) const BLOCK_BYTES: u32 = 128;

/// Lines of a tile beyond the first are a fixed distance away, which is part of an instruction: rows of a tile at most.
const LINES_MAX: usize = 256;

/// An operand whose tiles can be copied in chunks, and where it is.
pub(in crate::cuda) struct Operand {
    side: Side,
    pub(in crate::cuda) argument: Argument,
    /// Whether elements lie side by side along the depth, and not along rows or columns of the result.
    pub(in crate::cuda) is_by_depth: bool,
    /// From one such line to the next, in elements.
    pub(in crate::cuda) stride: usize,
    /// The first matrix, and where those of the batches are.
    pub(in crate::cuda) offset: usize,
    pub(in crate::cuda) heads: Axes,
    /// Elements along the result and along the depth.
    pub(in crate::cuda) along: usize,
    pub(in crate::cuda) depth: usize,
    pub(in crate::cuda) bytes: usize,
}

impl Operand {
    /// An operand as it lies, if it can be copied in chunks.
    pub(in crate::cuda) fn of(view: &BufferView, side: Side, allows_turned: bool) -> Option<Operand> {
        let layout = &view.layout;
        let (rank, strides) = (layout.shape.rank(), layout.strides());
        let (along_axis, depth_axis) = match side {
            Side::Left => (rank - 2, rank - 1),
            Side::Right => (rank - 1, rank - 2),
        };
        let (along, depth) = (layout.shape[along_axis], layout.shape[depth_axis]);
        let bytes = view.dtype.size();
        let is_by_depth = strides[depth_axis] == 1;
        let lies_along = allows_turned && strides[along_axis] == 1;
        if !is_by_depth && !lies_along {
            return None;
        }
        let (stride, len) = if is_by_depth { (strides[along_axis], depth) } else { (strides[depth_axis], along) };
        let stride = usize::try_from(stride).ok().filter(|stride| *stride >= len)?;
        let offset = usize::try_from(layout.offset).ok()?;
        let heads = Axes::of(layout, |axis| axis < rank - 2);
        let is_chunked = |elements: usize| (elements * bytes).is_multiple_of(CHUNK_BYTES as usize);
        let is_aligned = is_chunked(stride)
            && is_chunked(offset)
            && heads.0.iter().all(|(_, stride)| *stride >= 0 && is_chunked(stride.unsigned_abs()));
        // What is added to an address is part of an instruction.
        let is_near = stride.checked_mul(bytes * LINES_MAX).is_some_and(|far| i32::try_from(far).is_ok());
        let argument = Argument::Buffer(view.source);
        (is_aligned && is_near).then_some(Operand {
            side,
            argument,
            is_by_depth,
            stride,
            offset,
            heads,
            along,
            depth,
            bytes,
        })
    }

    /// The same copied to scratch memory of its own, in rows that begin at multiples of a chunk; and how many bytes
    /// that takes.
    pub(in crate::cuda) fn packed(
        view: &BufferView,
        side: Side,
        allows_turned: bool,
        scratch: usize,
    ) -> (Operand, u64) {
        let (rank, strides, shape) = (view.layout.shape.rank(), view.layout.strides(), view.layout.shape);
        let (along_axis, depth_axis) = match side {
            Side::Left => (rank - 2, rank - 1),
            Side::Right => (rank - 1, rank - 2),
        };
        let (along, depth) = (shape[along_axis], shape[depth_axis]);
        let is_by_depth = !allows_turned || strides[depth_axis].unsigned_abs() <= strides[along_axis].unsigned_abs();
        let bytes = view.dtype.size();
        let (lines, len) = if is_by_depth { (along, depth) } else { (depth, along) };
        let stride = len.next_multiple_of(CHUNK_BYTES as usize / bytes);
        let batches: usize = shape[..rank - 2].iter().product();
        let heads = if batches > 1 { vec![(batches, (lines * stride).cast_signed())] } else { Vec::new() };
        let argument = Argument::Scratch(scratch);
        let operand =
            Operand { side, argument, is_by_depth, stride, offset: 0, heads: Axes(heads), along, depth, bytes };
        (operand, (batches * lines * stride * bytes) as u64)
    }
}

/// Rows and columns of the square that a group turns round, and the rows of it that it has items for.
const SIDE: u32 = 32;
const SIDE_ROWS: u32 = GROUP / SIDE;

/// Copies an operand to lines that begin at multiples of a chunk: a square of 32 by 32 elements for each group, by way
/// of shared memory, so that neighbours load and store side by side whichever way the operand lies. What fills a line
/// up is not written.
pub(in crate::cuda) fn pack(view: &BufferView, to: &Operand) -> Built<LoweredKernel> {
    let (rank, shape) = (view.layout.shape.rank(), view.layout.shape);
    let depth_axis = if to.side == Side::Left { rank - 1 } else { rank - 2 };
    let along_axis = if to.side == Side::Left { rank - 2 } else { rank - 1 };
    let (line_axis, own_axis) = if to.is_by_depth { (along_axis, depth_axis) } else { (depth_axis, along_axis) };
    let strides = view.layout.strides();
    let mut b = KernelBuilder::new("pack");
    let arguments = vec![Argument::Buffer(view.source), to.argument];
    let (from, target) = (b.window()?, b.window()?);
    let b = &mut b;
    let batches: usize = shape[..rank - 2].iter().product();
    let (lines, len) = (shape[line_axis], shape[own_axis]);
    let squares = [lines, len].map(|size| small(size.div_ceil(SIDE as usize)));
    let mut indices = Indices::default();
    let (item, group) = (b.id(IdKind::Local, Axis::X)?, b.id(IdKind::Group, Axis::X)?);
    let (group, own_square) = indices.divide(b, group, squares[1])?;
    let (batch, line_square) = indices.divide(b, group, squares[0])?;
    let (first_line, first_own) = (scaled(b, line_square, SIDE)?, scaled(b, own_square, SIDE)?);
    let (y, x) = indices.divide(b, item, SIDE)?;
    // One more word in a row, so that a column is in all banks.
    let square = b.shared(SIDE * (SIDE + 1) * 4)?;
    let head = indices.place(b, &Axes::of(&view.layout, |axis| axis < rank - 2), batch)?;
    let (line_end, own_end) = (b.i32(small(lines).cast_signed())?, b.i32(small(len).cast_signed())?);
    let bytes = small(view.dtype.size());
    // Neighbours load along whichever axis elements are nearer, and store along lines.
    let is_turned = strides[line_axis].unsigned_abs() < strides[own_axis].unsigned_abs();
    let place = |b: &mut KernelBuilder, row: u32, is_turned: bool| {
        let more = b.i32((row * SIDE_ROWS).cast_signed())?;
        let down = b.binary(B::I32Add, y, more)?;
        let (line, own) = if is_turned { (x, down) } else { (down, x) };
        let slot = scaled(b, line, SIDE + 1)?;
        let slot = b.binary(B::I32Add, slot, own)?;
        let slot = b.element(square, slot, 4)?;
        let (line, own) = (b.binary(B::I32Add, first_line, line)?, b.binary(B::I32Add, first_own, own)?);
        let (is_line, is_own) = (b.binary(B::I32LtU, line, line_end)?, b.binary(B::I32LtU, own, own_end)?);
        Built::Ok((slot, line, own, b.binary(B::I32And, is_line, is_own)?))
    };
    for row in 0..SIDE / SIDE_ROWS {
        let (slot, line, own, is_inside) = place(b, row, is_turned)?;
        b.begin_if(is_inside, &[])?;
        let (line, own) = (times(b, line, strides[line_axis])?, times(b, own, strides[own_axis])?);
        let at = sum(b, &[head, Some(line), Some(own)], view.layout.offset)?;
        let at = b.element(from, at, bytes)?;
        let word = if bytes == 4 { b.load(Ty::I32, at, 0)? } else { b.load_narrow(Ty::I32, bytes, false, at, 0)? };
        b.store(word, slot, 0)?;
        b.end()?;
    }
    b.barrier()?;
    for row in 0..SIDE / SIDE_ROWS {
        let (slot, line, own, is_inside) = place(b, row, false)?;
        b.begin_if(is_inside, &[])?;
        let word = b.load(Ty::I32, slot, 0)?;
        let matrix = times(b, batch, (lines * to.stride).cast_signed())?;
        let line = times(b, line, to.stride.cast_signed())?;
        let at = sum(b, &[Some(matrix), Some(line), Some(own)], 0)?;
        let at = b.element(target, at, bytes)?;
        b.store_narrow(bytes, word, at, 0)?;
        b.end()?;
    }
    let groups = small(batches) * squares[0] * squares[1];
    let program = Program::Built(std::mem::replace(b, KernelBuilder::new("")).finish()?);
    Ok(LoweredKernel { program, groups, items: GROUP, arguments })
}

/// How a group copies tiles: so many items, so many rows or columns of the result, so many bytes of the depth.
#[derive(Debug, Clone, Copy)]
pub(super) struct CopyShape {
    pub items: u32,
    pub along: u32,
    pub depth_bytes: u32,
    /// Whether lines along the result are cut into blocks of 128 bytes, one behind the other: a tensor core that reads
    /// shared memory itself wants them so.
    pub is_blocked: bool,
}

impl CopyShape {
    /// Elements of the depth that a tile has.
    pub(super) fn depth(self, operand: &Operand) -> u32 {
        self.depth_bytes / small(operand.bytes)
    }

    pub(super) fn tile_bytes(self) -> u32 {
        self.along * self.depth_bytes
    }

    /// How an operand's tile lies in shared memory, or a block of it.
    pub(super) fn tile(self, operand: &Operand) -> SharedTile {
        let along = if self.is_blocked { BLOCK_BYTES } else { self.along * small(operand.bytes) };
        SharedTile { row_bytes: if operand.is_by_depth { self.depth_bytes } else { along } }
    }

    /// From one block of lines along the result to the next.
    pub(super) fn block_bytes(self, operand: &Operand) -> u32 {
        self.depth(operand) * BLOCK_BYTES
    }
}

/// Where a work item copies an operand's tiles from and to.
pub(super) struct Copies {
    /// The address of its first chunk: goes on with the depth.
    pub(super) from: Variable,
    /// From its first chunk to the next: in memory, and in shared memory.
    apart: u32,
    apart_shared: u32,
    count: u32,
    /// The first chunk in shared memory, from the operand's tile on.
    to: Value,
    /// Bytes of each chunk as far as rows and columns decide it.
    bytes: Vec<Value>,
    /// Elements of the depth before the item's first chunk in a tile, and from one chunk to the next.
    depth_from: Value,
    depth_apart: u32,
    /// How far one tile is from the next, in bytes.
    advance: u32,
    /// Elements of the depth in all, and of one tile.
    depth: usize,
    tile_depth: u32,
}

impl Copies {
    /// From a row or column of the result on.
    pub(super) fn new(
        b: &mut KernelBuilder,
        operand: &Operand,
        shape: CopyShape,
        (window, batch, first): (Value, Value, Value),
    ) -> Built<Copies> {
        let tile = shape.tile(operand);
        let elements = CHUNK_BYTES / small(operand.bytes);
        let line_chunks = if operand.is_by_depth { shape.depth_bytes } else { shape.along * small(operand.bytes) };
        let line_chunks = line_chunks / CHUNK_BYTES;
        let lines = shape.items / line_chunks;
        let count = shape.tile_bytes() / CHUNK_BYTES / shape.items;
        let mut indices = Indices::default();
        let item = b.id(IdKind::Local, Axis::X)?;
        let (line, chunk) = indices.divide(b, item, line_chunks)?;
        let to = if shape.is_blocked && !operand.is_by_depth {
            let (block, within) = indices.divide(b, chunk, BLOCK_BYTES / CHUNK_BYTES)?;
            let start = scaled(b, block, shape.block_bytes(operand))?;
            let within = tile.offset(b, line, within)?;
            b.binary(B::I32Add, start, within)?
        } else {
            tile.offset(b, line, chunk)?
        };
        let within = scaled(b, chunk, elements)?;
        let head = indices.place(b, &operand.heads, batch)?;
        let along_end = b.i32(small(operand.along).cast_signed())?;
        let (whole, none) = (b.i32(CHUNK_BYTES.cast_signed())?, b.i32(0)?);
        let is_cut = !operand.along.is_multiple_of(shape.along as usize);
        let (mut bytes, place) = (
            Vec::new(),
            if operand.is_by_depth { b.binary(B::I32Add, first, line)? } else { b.binary(B::I32Add, first, within)? },
        );
        for n in 0..count {
            bytes.push(if !is_cut {
                whole
            } else if operand.is_by_depth {
                let more = b.i32((n * lines).cast_signed())?;
                let row = b.binary(B::I32Add, place, more)?;
                let is_inside = b.binary(B::I32LtU, row, along_end)?;
                b.select(is_inside, whole, none)?
            } else {
                clamped(b, along_end, place, small(operand.bytes))?
            });
        }
        let stride = operand.stride.cast_signed();
        let (line_at, in_line) = if operand.is_by_depth { (place, within) } else { (line, place) };
        let line_at = times(b, line_at, stride)?;
        let place = sum(b, &[head, Some(line_at), Some(in_line)], operand.offset.cast_signed())?;
        let (depth_from, depth_apart) = if operand.is_by_depth { (within, 0) } else { (line, lines) };
        let from = b.element(window, place, small(operand.bytes))?;
        let line_bytes = small(operand.stride * operand.bytes);
        let tile_depth = shape.depth(operand);
        Ok(Copies {
            from: b.variable(from)?,
            apart: lines * line_bytes,
            apart_shared: lines * tile.row_bytes,
            count,
            to,
            bytes,
            depth_from,
            depth_apart,
            advance: if operand.is_by_depth { shape.depth_bytes } else { tile_depth * line_bytes },
            depth: operand.depth,
            tile_depth,
        })
    }

    /// Begins to copy the next tile to a place in shared memory; so much of the depth was copied before.
    pub(super) fn copy(&self, b: &mut KernelBuilder, tile: Value, before: Value) -> Built<()> {
        let from = b.get(self.from)?;
        let to = b.binary(B::I32Add, tile, self.to)?;
        let is_cut = !self.depth.is_multiple_of(self.tile_depth as usize);
        for n in 0..self.count {
            let mut bytes = self.bytes[n as usize];
            if is_cut {
                let more = b.i32((n * self.depth_apart).cast_signed())?;
                let at = b.binary(B::I32Add, self.depth_from, more)?;
                let at = b.binary(B::I32Add, at, before)?;
                bytes = self.cut(b, bytes, at)?;
            }
            b.copy_async((to, n * self.apart_shared), (from, n * self.apart), bytes)?;
        }
        let advance = b.i32(self.advance.cast_signed())?;
        let next = b.binary(B::I32Add, from, advance)?;
        b.set(self.from, next)
    }

    /// Bytes of a chunk where the depth may end in it, or before.
    fn cut(&self, b: &mut KernelBuilder, bytes: Value, at: Value) -> Built<Value> {
        let end = b.i32(small(self.depth).cast_signed())?;
        if self.depth_apart > 0 {
            let (is_inside, none) = (b.binary(B::I32LtU, at, end)?, b.i32(0)?);
            return b.select(is_inside, bytes, none);
        }
        // A chunk along the depth has as many elements as fit; all of them are there, or those before the end.
        let element = self.advance / self.tile_depth;
        let left = clamped(b, end, at, element)?;
        let is_less = b.binary(B::I32LtU, left, bytes)?;
        b.select(is_less, left, bytes)
    }
}

/// Bytes of a chunk that begins at an element and may go beyond the last: none where it begins there.
pub(in crate::cuda) fn clamped(b: &mut KernelBuilder, end: Value, at: Value, bytes: u32) -> Built<Value> {
    let (whole, none) = (b.i32(CHUNK_BYTES.cast_signed())?, b.i32(0)?);
    let left = b.binary(B::I32Sub, end, at)?;
    let left = scaled(b, left, bytes)?;
    let is_whole = b.binary(B::I32GeS, left, whole)?;
    let is_any = b.binary(B::I32GtS, left, none)?;
    let left = b.select(is_whole, whole, left)?;
    b.select(is_any, left, none)
}
