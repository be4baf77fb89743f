//! Attention in single precision: a group of 256 items has 64 queries, and goes over the keys that they see, 64 at a
//! time.

use tensor_wasm_jit::Target;
use tensor_wasm_jit::build::{BinaryOp as B, BuildError, KernelBuilder, Value, Variable};

use super::super::index::{scaled, small};
use super::super::map::{Argument, LoweredKernel, LoweredStep};
use super::super::numbers::Built;
use super::tiles::{EACH, Matrices, SIDE, TileKernel, TileSums, WIDTH_MAX, numbered, of_line};
use super::{Sight, corrected, lowered, scale_of};
use crate::schedule::plan::{BufferView, Source, SpecialKernel};

/// Whether there is a kernel for queries, keys and values of such widths.
pub(super) fn fits(widths: [usize; 2]) -> bool {
    widths.iter().all(|width| *width <= WIDTH_MAX)
}

/// The kernel's windows: what it is given, and what it makes.
pub(super) fn arguments(kernel: &SpecialKernel) -> Vec<Argument> {
    let inputs = kernel.inputs.iter().map(|view| Argument::Buffer(view.source));
    inputs.chain([Argument::Buffer(Source::Slot(kernel.slot))]).collect()
}

pub(super) fn sight_of(queries: &BufferView, keys: &BufferView, is_causal: bool) -> Sight {
    let rows = |view: &BufferView| view.layout.shape[view.layout.shape.rank() - 2];
    Sight { queries: rows(queries), keys: rows(keys), is_causal }
}

/// What each of the item's rows has seen: its largest score, and the item's part of the sum of all powers.
pub(super) struct SeenScores {
    largest: Vec<Variable>,
    totals: Vec<Variable>,
}

impl SeenScores {
    pub(super) fn new(b: &mut KernelBuilder) -> Built<SeenScores> {
        let (zero, lowest) = (b.f32(0.0)?, b.f32(f32::NEG_INFINITY)?);
        let all = |b: &mut KernelBuilder, value: Value| (0..EACH).map(|_| b.variable(value)).collect::<Built<_>>();
        Ok(SeenScores { largest: all(b, lowest)?, totals: all(b, zero)? })
    }

    pub(super) fn variables(&self) -> impl Iterator<Item = Variable> {
        self.largest.iter().chain(&self.totals).copied()
    }

    /// Takes in the scores of a tile, which become powers. By what each row's sums so far are multiplied.
    pub(super) fn take(&self, b: &mut KernelBuilder, scores: &mut [Value], width: usize) -> Built<Vec<Value>> {
        let scale = b.f32(scale_of(width))?;
        let mut corrections = Vec::new();
        for (row, scores) in scores.chunks_mut(EACH as usize).enumerate() {
            let before = b.get(self.largest[row])?;
            let mut largest = before;
            for score in scores.iter() {
                largest = b.max_single(largest, *score)?;
            }
            let largest = of_line(b, largest, KernelBuilder::max_single)?;
            b.set(self.largest[row], largest)?;
            let (less, correction) = corrected(b, before, largest, scale)?;
            let total = b.get(self.totals[row])?;
            let mut total = b.binary(B::F32Mul, total, correction)?;
            for score in scores {
                let power = b.fma(*score, scale, less)?;
                *score = b.exp2_approximate(power)?;
                total = b.binary(B::F32Add, total, *score)?;
            }
            b.set(self.totals[row], total)?;
            corrections.push(correction);
        }
        Ok(corrections)
    }

    /// What is added to each row's scaled scores so that the largest is zero.
    pub(super) fn less(&self, b: &mut KernelBuilder, width: usize) -> Built<Vec<Value>> {
        let scale = b.f32(scale_of(width))?;
        let less = |largest: &Variable| {
            let largest = b.get(*largest)?;
            lowered(b, largest, scale)
        };
        self.largest.iter().map(less).collect()
    }

    /// One over the sum of each row's powers.
    pub(super) fn parts(&self, b: &mut KernelBuilder) -> Built<Vec<Value>> {
        let mut parts = Vec::new();
        for total in &self.totals {
            let total = b.get(*total)?;
            let total = of_line(b, total, |b, x, y| b.binary(B::F32Add, x, y))?;
            let one = b.f32(1.0)?;
            parts.push(b.binary(B::F32Div, one, total)?);
        }
        Ok(parts)
    }
}

/// Scores of a tile of queries and a tile of keys; those of keys that are not there, or not to be seen, are the lowest.
pub(super) fn seen_scores(
    b: &mut KernelBuilder,
    kernel: &TileKernel,
    sight: Sight,
    queries: (&Matrices, Value),
    keys: (&Matrices, Value),
) -> Built<Vec<Value>> {
    let scores = kernel.scores(b, queries, keys)?;
    let lowest = b.f32(f32::NEG_INFINITY)?;
    only_seen(b, kernel, sight, (queries.1, keys.1), scores, lowest)
}

/// Another value in the place of those of keys that are not there, or not to be seen.
pub(super) fn only_seen(
    b: &mut KernelBuilder,
    kernel: &TileKernel,
    sight: Sight,
    (query, key): (Value, Value),
    mut values: Vec<Value>,
    other: Value,
) -> Built<Vec<Value>> {
    if !sight.is_causal && sight.keys.is_multiple_of(SIDE as usize) {
        return Ok(values);
    }
    let mut numbers = Vec::new();
    for n in 0..EACH {
        numbers.push(numbered(b, key, kernel.column, n)?);
    }
    for (row, values) in (0..).zip(values.chunks_mut(EACH as usize)) {
        let query = numbered(b, query, kernel.row, row)?;
        let end = sight.end(b, query)?;
        for (value, number) in values.iter_mut().zip(&numbers) {
            let is_seen = b.binary(B::I32LtS, *number, end)?;
            *value = b.select(is_seen, *value, other)?;
        }
    }
    Ok(values)
}

/// The group's first query: the last ones see the most keys, and begin first.
pub(super) fn first_query(b: &mut KernelBuilder, kernel: &TileKernel, queries: usize) -> Built<Value> {
    let last = queries.div_ceil(SIDE as usize) - 1;
    let last = b.i32(small(last).cast_signed())?;
    let block = b.binary(B::I32Sub, last, kernel.block)?;
    scaled(b, block, SIDE)
}

pub(super) fn lower(kernel: &SpecialKernel, is_causal: bool) -> Built<LoweredStep> {
    Ok(LoweredStep { kernels: vec![build(kernel, is_causal)?], scratch_bytes: Vec::new() })
}

fn build(special: &SpecialKernel, is_causal: bool) -> Built<LoweredKernel> {
    let [query, key, value] = &special.inputs[..] else {
        return Err(BuildError::Structure { what: "attention has three operands" });
    };
    let sight = sight_of(query, key, is_causal);
    let shape = special.shape;
    let heads = shape[..shape.rank() - 2].iter().product();
    let mut builder = KernelBuilder::on("attention", Target::Ampere);
    let b = &mut builder;
    let kernel = TileKernel::new(b, arguments(special), (heads, sight.queries))?;
    let first = first_query(b, &kernel, sight.queries)?;
    let (queries, keys, values) =
        (kernel.matrices(b, query, 0)?, kernel.matrices(b, key, 1)?, kernel.matrices(b, value, 2)?);
    let (width, out_width) = (query.layout.shape[shape.rank() - 1], shape[shape.rank() - 1]);
    let (sums, seen) = (TileSums::new(b, out_width)?, SeenScores::new(b)?);
    let carried: Vec<Variable> = sums.sums.iter().copied().chain(seen.variables()).collect();
    let tiles = sight.tiles(b, (first, SIDE), SIDE)?;
    b.count_to::<BuildError>(tiles, &carried, |b, tile| {
        let key = scaled(b, tile, SIDE)?;
        let mut scores = seen_scores(b, &kernel, sight, (&queries, first), (&keys, key))?;
        let corrections = seen.take(b, &mut scores, width)?;
        for (row, correction) in sums.rows().zip(corrections) {
            for sum in row {
                let value = b.get(*sum)?;
                let value = b.binary(B::F32Mul, value, correction)?;
                b.set(*sum, value)?;
            }
        }
        kernel.keep(b, &scores)?;
        kernel.add(b, &sums, (&values, key))
    })?;
    let parts = seen.parts(b)?;
    kernel.store(b, (3, special.dtype, 0), (first, sight.queries), &sums, &parts)?;
    kernel.finish(builder)
}
