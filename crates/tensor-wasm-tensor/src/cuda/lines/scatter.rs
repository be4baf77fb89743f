//! Sums of what indices choose, in the same order every time: no two work items add to one place. Where indices are
//! few, whoever has an element of the result looks through all of them. Otherwise they are sorted, together with where
//! they are, and each element of the result finds its own one after the other.

use tensor_wasm_jit::Ty;
use tensor_wasm_jit::build::{BinaryOp as B, BuildError, KernelBuilder, Value, Variable};

use super::sort::{Kind, Sort};
use super::{EACH, Line, Units, lines_of};
use crate::cuda::index::{Axes, Indices, small, sum, times};
use crate::cuda::map::{Argument, LoweredKernel, LoweredStep};
use crate::cuda::numbers::{Built, Class, Numbers, Registers};
use crate::cuda::special::{add_element, checked, load_at, number_of, store_at};
use crate::dtype::DType;
use crate::schedule::plan::{BufferView, Source, SpecialKernel};
use crate::shape::Layout;

/// Indices of a line that are looked through rather than sorted, which takes several kernels: in any case, and where
/// there are no more comparisons than this.
const FEW: usize = 64;
const FEW_MAX: usize = 512;
const COMPARISONS_MAX: usize = 1 << 24;

/// Elements in order that are summed beforehand where all of them have one index: an index that is everywhere (that of
/// padding) would otherwise be one item's to add up.
const CHUNK: usize = 128;

/// Bytes of a sorted index with where it is.
const ENTRY_BYTES: usize = 8;

/// What is added up where. Axes along which indices are repeated have one line of them.
struct Scatter<'k> {
    kernel: &'k SpecialKernel,
    values: &'k BufferView,
    /// The indices, each once.
    chosen: Layout,
    /// For a line of values, the number of its line of indices.
    index_lines: Layout,
    axis: usize,
    size: usize,
    /// Elements of a line, and how many lines of values and of indices there are.
    count: usize,
    lines: usize,
    own_lines: usize,
}

pub(in crate::cuda) fn scatter_add(kernel: &SpecialKernel, axis: usize, size: usize) -> Built<LoweredStep> {
    let [values, chosen] = &kernel.inputs[..] else {
        return Err(BuildError::Structure { what: "a scatter has two operands" });
    };
    let shape = values.layout.shape;
    let repeated = |other: &usize| *other != axis && chosen.layout.strides()[*other] == 0 && shape[*other] > 1;
    let own = (0..shape.rank()).filter(repeated).fold(chosen.layout, |layout, other| layout.slice(other, 0, 1, 1));
    let index_lines = Layout::contiguous(own.shape.with(axis, 1)).expand(shape.with(axis, 1));
    let scatter = Scatter {
        kernel,
        values,
        chosen: own,
        index_lines,
        axis,
        size,
        count: shape[axis],
        lines: lines_of(&shape, axis),
        own_lines: lines_of(&own.shape, axis),
    };
    if scatter.are_few() {
        return Ok(LoweredStep { kernels: vec![scatter.few()?], scratch_bytes: Vec::new() });
    }
    scatter.sorted()
}

impl Scatter<'_> {
    fn are_few(&self) -> bool {
        let comparisons = self.kernel.shape.numel().saturating_mul(self.count);
        let is_little = self.count <= FEW_MAX && comparisons <= COMPARISONS_MAX;
        // What is kept in between is addressed as buffers are.
        let (entries, starts) = (self.own_lines * self.count, self.own_lines * (self.size + 1));
        let is_too_large = entries.max(starts) > u32::MAX as usize / ENTRY_BYTES;
        self.count <= FEW || is_little || is_too_large
    }

    /// The number of a line of values, and the place along the axis, of an element of the result.
    fn own(&self, b: &mut KernelBuilder, number: Value) -> Built<(Value, Value)> {
        let inner: usize = self.kernel.shape[self.axis + 1..].iter().product();
        let mut indices = Indices::default();
        let (outer, within) = indices.divide(b, number, small(inner))?;
        let (outer, own) = indices.divide(b, outer, small(self.size))?;
        let line = times(b, outer, inner.cast_signed())?;
        Ok((b.binary(B::I32Add, line, within)?, own))
    }

    /// The number of the indices' line of a line of values.
    fn index_line(&self, b: &mut KernelBuilder, line: Value) -> Built<Value> {
        let axes = Axes::of(&self.index_lines, |other| other != self.axis);
        let place = Indices::default().place(b, &axes, line)?;
        sum(b, &[place], 0)
    }

    /// A work item for each element of the result, which looks through all indices of its line.
    fn few(&self) -> Built<LoweredKernel> {
        let Scatter { kernel, values, axis, .. } = *self;
        let chosen = &kernel.inputs[1];
        let arguments = vec![
            Argument::Buffer(values.source),
            Argument::Buffer(chosen.source),
            Argument::Flags,
            Argument::Buffer(Source::Slot(kernel.slot)),
        ];
        let units = Units { lines: kernel.shape.numel(), parts: 1, team: 1 };
        super::kernel("scatter_add", arguments, units, |b, windows, member| {
            let number = member.line;
            let (line, own) = self.own(b, number)?;
            let (from, indices) = (Line::of(b, &values.layout, axis, line)?, Line::of(b, &chosen.layout, axis, line)?);
            let zero = Numbers { b: &mut *b }.number(Class::of(kernel.dtype), 0.0)?;
            let total = b.variable(zero)?;
            let count = number_of(b, self.count)?;
            b.count_to::<BuildError>(count, &[total], |b, n| {
                let place = indices.place(b, n)?;
                let index = load_at(b, DType::I64, windows[1], place)?;
                let index = checked(b, kernel, windows[2], index, self.size)?;
                let is_own = b.binary(B::I32Eq, index, own)?;
                b.begin_if(is_own, &[total])?;
                let place = from.place(b, n)?;
                let value = load_at(b, values.dtype, windows[0], place)?;
                let before = b.get(total)?;
                let after = add_element(b, values.dtype, before, value)?;
                b.set(total, after)?;
                b.end()
            })?;
            let total = b.get(total)?;
            member.begin_store(b)?;
            store_at(b, kernel.dtype, total, windows[3], number)?;
            b.end()
        })
    }

    /// Kernels that sort the indices, find where each one begins, add up what has one index for long, and then the
    /// elements of the result.
    fn sorted(&self) -> Built<LoweredStep> {
        let [sorted, starts, sums] = [0, 1, 2].map(Argument::Scratch);
        let (kernel, chosen) = (self.kernel, &self.kernel.inputs[1]);
        let sort = Sort { name: "scatter_sort", lines: self.own_lines, len: self.count, kind: Kind::Packed };
        let mut step = sort.lower(
            &[Argument::Buffer(chosen.source), Argument::Flags],
            &|b, windows, member, n| {
                let line = Line::of(b, &self.chosen, self.axis, member.line)?;
                let place = line.place(b, n)?;
                let index = load_at(b, DType::I64, windows[0], place)?;
                let index = checked(b, kernel, windows[1], index, self.size)?;
                Kind::Packed.entry(b, index, n)
            },
            sorted,
            &|b, window, member, n, entry| {
                let line = times(b, member.line, self.count.cast_signed())?;
                let at = b.binary(B::I32Add, line, n)?;
                Kind::Packed.store(b, entry, &[window], at)
            },
            3,
        )?;
        step.kernels.push(self.starts(vec![sorted, starts])?);
        let chunks = self.count / CHUNK;
        let values = Argument::Buffer(self.values.source);
        if chunks > 0 {
            step.kernels.push(self.chunks(chunks, vec![values, sorted, sums])?);
        }
        let to = Argument::Buffer(Source::Slot(kernel.slot));
        step.kernels.push(self.sums(vec![values, sorted, starts, sums, to])?);
        let sum_bytes = Class::of(kernel.dtype).bytes() as usize;
        let own = [
            ENTRY_BYTES * self.own_lines * self.count,
            4 * self.own_lines * (self.size + 1),
            sum_bytes * chunks * self.lines,
        ];
        step.scratch_bytes.splice(0..0, own.map(|bytes| bytes as u64));
        Ok(step)
    }

    /// For each line of indices, and each number that one may be, how many are smaller.
    fn starts(&self, arguments: Vec<Argument>) -> Built<LoweredKernel> {
        let numbers = self.size + 1;
        let units = Units { lines: self.own_lines * numbers, parts: 1, team: 1 };
        super::kernel("scatter_starts", arguments, units, |b, windows, member| {
            let (line, own) = Indices::default().divide(b, member.line, small(numbers))?;
            let first = times(b, line, self.count.cast_signed())?;
            let (zero, count) = (b.i32(0)?, number_of(b, self.count)?);
            let (low, high) = (b.variable(zero)?, b.variable(count)?);
            let rounds = b.i32(1 + self.count.ilog2().cast_signed())?;
            b.count_to::<BuildError>(rounds, &[low, high], |b, _| {
                let (from, to, one) = (b.get(low)?, b.get(high)?, b.i32(1)?);
                let sum = b.binary(B::I32Add, from, to)?;
                let middle = b.binary(B::I32ShrU, sum, one)?;
                // When it is found, the last one is looked at again, which changes nothing.
                let last = number_of(b, self.count - 1)?;
                let is_inside = b.binary(B::I32LtU, middle, last)?;
                let at = b.select(is_inside, middle, last)?;
                let index = Entries { window: windows[0], first }.index(b, at)?;
                let is_less = b.binary(B::I32LtU, index, own)?;
                let is_open = b.binary(B::I32LtU, from, to)?;
                let is_less = b.binary(B::I32And, is_less, is_open)?;
                let next = b.binary(B::I32Add, middle, one)?;
                let below = b.select(is_open, middle, to)?;
                let (from, to) = (b.select(is_less, next, from)?, b.select(is_less, to, below)?);
                b.set(low, from)?;
                b.set(high, to)
            })?;
            let found = b.get(low)?;
            member.begin_store(b)?;
            let address = b.element(windows[1], member.line, 4)?;
            b.store(found, address, 0)?;
            b.end()
        })
    }

    /// For each chunk of sorted indices that are all the same, the sum for each line of values.
    fn chunks(&self, chunks: usize, arguments: Vec<Argument>) -> Built<LoweredKernel> {
        let units = Units { lines: self.lines, parts: chunks, team: 1 };
        super::kernel("scatter_chunks", arguments, units, |b, windows, member| {
            let entries = self.entries(b, windows[1], member.line)?;
            let begin = times(b, member.part, CHUNK.cast_signed())?;
            let size = number_of(b, CHUNK)?;
            let (end, last) = (b.binary(B::I32Add, begin, size)?, number_of(b, CHUNK - 1)?);
            let last = b.binary(B::I32Add, begin, last)?;
            let (first, last) = (entries.index(b, begin)?, entries.index(b, last)?);
            let is_one = b.binary(B::I32Eq, first, last)?;
            let is_one = b.binary(B::I32And, is_one, member.is_unit)?;
            b.begin_if(is_one, &[])?;
            let total = self.zero(b)?;
            self.add(b, windows[0], &entries, member.line, (begin, end), total)?;
            let total = b.get(total)?;
            let address = self.chunk_address(b, windows[2], member.part, member.line)?;
            b.store(total, address, 0)?;
            b.end()
        })
    }

    fn sums(&self, arguments: Vec<Argument>) -> Built<LoweredKernel> {
        let kernel = self.kernel;
        let units = Units { lines: kernel.shape.numel(), parts: 1, team: 1 };
        super::kernel("scatter_add", arguments, units, |b, windows, member| {
            let (line, own) = self.own(b, member.line)?;
            let index_line = self.index_line(b, line)?;
            let starts = times(b, index_line, (self.size + 1).cast_signed())?;
            let starts = b.binary(B::I32Add, starts, own)?;
            let address = b.element(windows[2], starts, 4)?;
            let (begin, end) = (b.load(Ty::I32, address, 0)?, b.load(Ty::I32, address, 4)?);
            let entries = self.entries(b, windows[1], line)?;
            let total = self.zero(b)?;
            // Chunks that are wholly between the two, and what is before and after them.
            let (shift, rest) = (b.i32(CHUNK.trailing_zeros().cast_signed())?, number_of(b, CHUNK - 1)?);
            let first_chunk = b.binary(B::I32Add, begin, rest)?;
            let first_chunk = b.binary(B::I32ShrU, first_chunk, shift)?;
            let end_chunk = b.binary(B::I32ShrU, end, shift)?;
            let has_chunks = b.binary(B::I32LtU, first_chunk, end_chunk)?;
            let (chunks_begin, chunks_end) =
                (b.binary(B::I32Shl, first_chunk, shift)?, b.binary(B::I32Shl, end_chunk, shift)?);
            let head_end = b.select(has_chunks, chunks_begin, end)?;
            self.add(b, windows[0], &entries, line, (begin, head_end), total)?;
            b.begin_if(has_chunks, &[total])?;
            let chunks = b.binary(B::I32Sub, end_chunk, first_chunk)?;
            self.add_up(b, (first_chunk, chunks), total, |b, chunk| {
                let address = self.chunk_address(b, windows[3], chunk, line)?;
                b.load(Class::of(kernel.dtype).ty(), address, 0)
            })?;
            self.add(b, windows[0], &entries, line, (chunks_end, end), total)?;
            b.end()?;
            let total = b.get(total)?;
            member.begin_store(b)?;
            store_at(b, kernel.dtype, total, windows[4], member.line)?;
            b.end()
        })
    }

    fn zero(&self, b: &mut KernelBuilder) -> Built<Variable> {
        let zero = Numbers { b: &mut *b }.number(Class::of(self.kernel.dtype), 0.0)?;
        b.variable(zero)
    }

    fn entries(&self, b: &mut KernelBuilder, window: Value, line: Value) -> Built<Entries> {
        let line = self.index_line(b, line)?;
        Ok(Entries { window, first: times(b, line, self.count.cast_signed())? })
    }

    /// Neighbouring items have neighbouring lines.
    fn chunk_address(&self, b: &mut KernelBuilder, window: Value, chunk: Value, line: Value) -> Built<Value> {
        let place = times(b, chunk, self.lines.cast_signed())?;
        let place = b.binary(B::I32Add, place, line)?;
        b.element(window, place, Class::of(self.kernel.dtype).bytes())
    }

    /// Adds the values of a line that are between two places of its sorted indices.
    fn add(
        &self,
        b: &mut KernelBuilder,
        window: Value,
        entries: &Entries,
        line: Value,
        (begin, end): (Value, Value),
        total: Variable,
    ) -> Built<()> {
        let count = b.binary(B::I32Sub, end, begin)?;
        let line = Line::of(b, &self.values.layout, self.axis, line)?;
        self.add_up(b, (begin, count), total, |b, n| {
            let number = entries.number(b, n)?;
            let place = line.place(b, number)?;
            load_at(b, self.values.dtype, window, place)
        })
    }

    /// Adds so many numbers from one on, one after the other, of which some are loaded at once.
    fn add_up(
        &self,
        b: &mut KernelBuilder,
        (begin, count): (Value, Value),
        total: Variable,
        load: impl Fn(&mut KernelBuilder, Value) -> Built<Value>,
    ) -> Built<()> {
        let (more, shift) = (number_of(b, EACH - 1)?, b.i32(EACH.trailing_zeros().cast_signed())?);
        let rounds = b.binary(B::I32Add, count, more)?;
        let rounds = b.binary(B::I32ShrU, rounds, shift)?;
        let end = b.binary(B::I32Add, begin, count)?;
        b.count_to::<BuildError>(rounds, &[total], |b, round| {
            let from = times(b, round, EACH.cast_signed())?;
            let from = b.binary(B::I32Add, begin, from)?;
            let mut loaded = Vec::with_capacity(EACH);
            for n in 0..EACH {
                let shift = number_of(b, n)?;
                let n = b.binary(B::I32Add, from, shift)?;
                let is_inside = b.binary(B::I32LtU, n, end)?;
                let n = b.select(is_inside, n, begin)?;
                loaded.push((load(b, n)?, is_inside));
            }
            let mut sum = b.get(total)?;
            for (value, is_inside) in loaded {
                let more = add_element(b, self.kernel.dtype, sum, value)?;
                sum = b.select(is_inside, more, sum)?;
            }
            b.set(total, sum)
        })
    }
}

/// The sorted indices of a line: each is the upper half of what was sorted, and the lower one says where it was.
struct Entries {
    window: Value,
    first: Value,
}

impl Entries {
    fn index(&self, b: &mut KernelBuilder, n: Value) -> Built<Value> {
        let at = b.binary(B::I32Add, self.first, n)?;
        let address = b.element(self.window, at, 8)?;
        b.load(Ty::I32, address, 4)
    }

    fn number(&self, b: &mut KernelBuilder, n: Value) -> Built<Value> {
        let at = b.binary(B::I32Add, self.first, n)?;
        let address = b.element(self.window, at, 8)?;
        b.load(Ty::I32, address, 0)
    }
}
