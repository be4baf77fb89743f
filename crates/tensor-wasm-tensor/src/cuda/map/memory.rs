//! Elements in memory: where those of a work item are under a layout, and how they are loaded and stored, several at
//! once where they lie together.

use tensor_wasm_jit::build::{BinaryOp as B, KernelBuilder, Value};
use tensor_wasm_jit::{Target, Ty};

use super::super::index::{Axes, small, some_axes, sum};
use super::super::numbers::{Built, Class, Numbers, Registers, half_type};
use super::evaluate::Point;
use super::{Argument, Emit, Frame};
use crate::dtype::DType;
use crate::schedule::plan::{BufferView, Level, Source};
use crate::shape::Layout;

/// Where some elements are: all in one place, one after the other, or each somewhere else.
pub(super) enum Places {
    One(Value),
    Run(Value),
    Each(Vec<Value>),
}

impl Emit<'_> {
    /// Where the lanes of a point or of the rows are under a layout; and whether the first is a multiple of as many as
    /// there are.
    pub(super) fn places(&mut self, layout: &Layout, level: Level, point: Option<&mut Point>) -> Built<(Places, bool)> {
        let Frame { reduced, is_along_rows, .. } = self.frame;
        let kept = Axes::of(layout, some_axes(reduced, false));
        let within = Axes::of(layout, some_axes(reduced, true));
        let row = self.row_number()?;
        let (row, in_row, indices) = match point {
            Some(point) => (point.row, point.within, &mut point.indices),
            None => (row, None, &mut self.row_indices),
        };
        let lanes = match level {
            Level::Full => self.frame.lanes,
            Level::Row => self.frame.lanes_of_rows(),
        };
        let b = &mut self.b;
        let own = if is_along_rows { &kept } else { &within };
        let other = if is_along_rows { &within } else { &kept };
        let (number, other_number) = if is_along_rows { (Some(row), in_row) } else { (in_row, Some(row)) };
        let elsewhere = match other_number {
            Some(other_number) => indices.place(b, other, other_number)?,
            None => None,
        };
        let number = match number {
            Some(number) => number,
            None => b.i32(0)?,
        };
        let (run, stride) = own.inner();
        if lanes > 1 && !own.0.is_empty() && !run.is_multiple_of(lanes) {
            let mut each = Vec::with_capacity(lanes);
            for lane in 0..lanes {
                let lane = b.i32(small(lane).cast_signed())?;
                let number = b.binary(B::I32Add, number, lane)?;
                let place = indices.place(b, own, number)?;
                each.push(sum(b, &[place, elsewhere], layout.offset)?);
            }
            return Ok((Places::Each(each), false));
        }
        let place = indices.place(b, own, number)?;
        let first = sum(b, &[place, elsewhere], layout.offset)?;
        let is_multiple = |stride: &isize| stride.unsigned_abs().is_multiple_of(lanes);
        let is_aligned = own.is_aligned(lanes)
            && other.0.iter().all(|(_, stride)| is_multiple(stride))
            && is_multiple(&layout.offset);
        Ok(match stride {
            _ if lanes == 1 => (Places::Run(first), true),
            0 => (Places::One(first), false),
            1 => (Places::Run(first), is_aligned),
            _ => {
                let mut each = vec![first];
                for lane in 1..lanes.cast_signed() {
                    let more = b.i32(i32::try_from(lane * stride).unwrap_or(i32::MAX))?;
                    each.push(b.binary(B::I32Add, first, more)?);
                }
                (Places::Each(each), false)
            }
        })
    }

    pub(super) fn each_place(&mut self, layout: &Layout, level: Level, point: Option<&mut Point>) -> Built<Vec<Value>> {
        let count = self.count_of(level);
        Ok(match self.places(layout, level, point)?.0 {
            Places::One(place) => vec![place; count],
            Places::Each(places) => places,
            Places::Run(first) => {
                let mut all = vec![first];
                for lane in 1..count {
                    let lane = self.b.i32(small(lane).cast_signed())?;
                    all.push(self.b.binary(B::I32Add, first, lane)?);
                }
                all
            }
        })
    }

    pub(super) fn load(
        &mut self,
        view: &BufferView,
        places: &Places,
        is_aligned: bool,
        lanes: usize,
    ) -> Built<Vec<Value>> {
        let window = self.windows.get(Argument::Buffer(view.source))?;
        let (dtype, bytes) = (view.dtype, small(view.dtype.size()));
        match places {
            Places::One(place) => {
                let address = self.b.element(window, *place, bytes)?;
                Ok(vec![load_one(&mut self.b, dtype, address, 0)?])
            }
            Places::Each(places) => {
                let mut all = Vec::with_capacity(places.len());
                for place in places {
                    let address = self.b.element(window, *place, bytes)?;
                    all.push(load_one(&mut self.b, dtype, address, 0)?);
                }
                Ok(all)
            }
            Places::Run(first) => {
                let address = self.b.element(window, *first, bytes)?;
                let per_word = 4 / bytes.min(4);
                if per_word > 1 && is_aligned && lanes >= per_word as usize {
                    let words = small(lanes) / per_word;
                    let loaded: Vec<Value> =
                        (0..words).map(|word| self.b.load(Ty::I32, address, 4 * word)).collect::<Built<_>>()?;
                    return loaded.into_iter().try_fold(Vec::new(), |mut all, word| {
                        all.extend(unpack(&mut self.b, dtype, word)?);
                        Ok(all)
                    });
                }
                (0..small(lanes)).map(|lane| load_one(&mut self.b, dtype, address, bytes * lane)).collect()
            }
        }
    }

    pub(super) fn store(
        &mut self,
        lanes: &[Value],
        dtype: DType,
        slot: usize,
        places: &Places,
        is_aligned: bool,
    ) -> Built<()> {
        let window = self.windows.get(Argument::Buffer(Source::Slot(slot)))?;
        let bytes = small(dtype.size());
        match places {
            Places::One(place) => {
                let address = self.b.element(window, *place, bytes)?;
                store_one(&mut self.b, dtype, lanes[0], address, 0)
            }
            Places::Each(places) => {
                for (place, value) in places.iter().zip(lanes) {
                    let address = self.b.element(window, *place, bytes)?;
                    store_one(&mut self.b, dtype, *value, address, 0)?;
                }
                Ok(())
            }
            Places::Run(first) => {
                let address = self.b.element(window, *first, bytes)?;
                let per_word = 4 / bytes.min(4) as usize;
                if per_word > 1 && is_aligned && lanes.len() >= per_word {
                    let mut words = Vec::new();
                    for lanes in lanes.chunks(per_word) {
                        words.push(pack(&mut self.b, dtype, lanes)?);
                    }
                    return (0..).zip(words).try_for_each(|(n, word)| self.b.store(word, address, 4 * n));
                }
                for (lane, value) in (0..).zip(lanes) {
                    store_one(&mut self.b, dtype, *value, address, bytes * lane)?;
                }
                Ok(())
            }
        }
    }
}

/// An element as it is computed with.
pub(in crate::cuda) fn load_one(b: &mut KernelBuilder, dtype: DType, address: Value, offset: u32) -> Built<Value> {
    match dtype {
        DType::Bool | DType::U8 => b.load_narrow(Ty::I32, 1, false, address, offset),
        DType::F16 | DType::BF16 => {
            let bits = b.load_narrow(Ty::I32, 2, false, address, offset)?;
            Numbers { b }.half_to_single(dtype, bits)
        }
        DType::I32 | DType::I64 | DType::F32 | DType::F64 => b.load(Class::of(dtype).ty(), address, offset),
    }
}

/// And as it is kept.
pub(in crate::cuda) fn store_one(
    b: &mut KernelBuilder,
    dtype: DType,
    value: Value,
    address: Value,
    offset: u32,
) -> Built<()> {
    match dtype {
        DType::Bool | DType::U8 => b.store_narrow(1, value, address, offset),
        DType::F16 | DType::BF16 => {
            let bits = Numbers { b: &mut *b }.single_to_half(dtype, value)?;
            b.store_narrow(2, bits, address, offset)
        }
        DType::I32 | DType::I64 | DType::F32 | DType::F64 => b.store(value, address, offset),
    }
}

/// The elements of a word, the lowest first.
fn unpack(b: &mut KernelBuilder, dtype: DType, word: Value) -> Built<Vec<Value>> {
    if let Some(half) = half_type(dtype) {
        return [false, true].into_iter().map(|is_high| b.unpack_half(half, word, is_high)).collect();
    }
    let bits = 8 * small(dtype.size());
    let mask = b.i32(((1_u32 << bits) - 1).cast_signed())?;
    let mut all = Vec::new();
    for n in 0..32 / bits {
        let shift = b.i32((n * bits).cast_signed())?;
        let part = b.binary(B::I32ShrU, word, shift)?;
        all.push(b.binary(B::I32And, part, mask)?);
    }
    Ok(all)
}

/// As many elements as a word has.
fn pack(b: &mut KernelBuilder, dtype: DType, lanes: &[Value]) -> Built<Value> {
    if let (Some(half), [low, high], true) = (half_type(dtype), lanes, b.target() >= Target::Ampere) {
        return b.pack_halves(half, *low, *high);
    }
    let bits = 8 * small(dtype.size());
    let mut word = b.i32(0)?;
    for (n, lane) in (0..).zip(lanes) {
        let is_half = half_type(dtype).is_some();
        let part = if is_half { Numbers { b: &mut *b }.single_to_half(dtype, *lane)? } else { *lane };
        let shift = b.i32((n * bits).cast_signed())?;
        let part = b.binary(B::I32Shl, part, shift)?;
        word = b.binary(B::I32Or, word, part)?;
    }
    Ok(word)
}
