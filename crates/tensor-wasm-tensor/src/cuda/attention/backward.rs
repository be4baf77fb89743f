//! Going back through attention without a score in memory. All is multiplied in single precision, of halves too. Powers
//! are computed again, tile by tile, from queries, keys and three numbers of each query, which are computed first. They
//! are not what going forwards leaves: a forward kernel on tensor cores keeps nothing, and whoever reads the result
//! before its gradients would have it computed twice. That costs one product of eight.
//!
//! With `P` the powers, each over the sum of its row, and `g` the result's gradient: the values' gradient is `Pᵀ g`.
//! That of a score is `P (g Vᵀ - d)`, where `d` is the sum of `g` times the result over a row; queries and keys have
//! theirs from products of it with each other.

use tensor_wasm_jit::Target;
use tensor_wasm_jit::build::{BinaryOp as B, BuildError, KernelBuilder, Value, Variable};

use super::super::index::{Indices, scaled, small, sum, times};
use super::super::map::{LoweredKernel, LoweredStep};
use super::super::numbers::Built;
use super::single::{SeenScores, arguments, first_query, only_seen, seen_scores, sight_of};
use super::tiles::{EACH, Matrices, SIDE, TileKernel, TileSums, numbered};
use super::{Sight, for_heads, scale_of};
use crate::graph::op::{ATTENTION_ROWS, AttentionInput, packed_values_start};
use crate::schedule::plan::{BufferView, SpecialKernel};
use crate::shape::Shape;

/// Elements of a key and of a value together whose sums an item has in its registers: where there are more, each has a
/// kernel of its own, which computes the powers for itself.
const TOGETHER_MAX: usize = 320;

/// Bytes of each of a query's numbers.
const NUMBER_BYTES: u32 = 4;

/// The same kernel with its first operands as all heads see them, and how many heads there are.
fn of_heads(kernel: &SpecialKernel, heads: Shape) -> (SpecialKernel, usize) {
    let heads = &heads[..heads.rank() - 2];
    let inputs = kernel.inputs.iter().map(|view| for_heads(view, heads)).collect();
    (SpecialKernel { inputs, ..kernel.clone() }, heads.iter().product())
}

fn width(view: &BufferView) -> usize {
    view.layout.shape.last().copied().unwrap_or(0)
}

/// Three numbers of each query, from queries, keys, the result and its gradient: what is added to its scaled scores,
/// one over the sum of their powers, and the sum of the gradient times the result.
pub(in crate::cuda) fn rows(special: &SpecialKernel, is_causal: bool) -> Built<LoweredStep> {
    let (special, heads) = of_heads(special, special.shape);
    let [query, key, result, gradient] = &special.inputs[..] else {
        return Err(BuildError::Structure { what: "rows of attention have four operands" });
    };
    let sight = sight_of(query, key, is_causal);
    let mut builder = KernelBuilder::on("attention_rows", Target::Ampere);
    let b = &mut builder;
    let kernel = TileKernel::new(b, arguments(&special), (heads, sight.queries))?;
    let first = first_query(b, &kernel, sight.queries)?;
    let (queries, keys) = (kernel.matrices(b, query, 0)?, kernel.matrices(b, key, 1)?);
    let (results, gradients) = (kernel.matrices(b, result, 2)?, kernel.matrices(b, gradient, 3)?);
    let seen = SeenScores::new(b)?;
    let carried: Vec<Variable> = seen.variables().collect();
    let tiles = sight.tiles(b, (first, SIDE), SIDE)?;
    b.count_to::<BuildError>(tiles, &carried, |b, tile| {
        let key = scaled(b, tile, SIDE)?;
        let mut scores = seen_scores(b, &kernel, sight, (&queries, first), (&keys, key))?;
        seen.take(b, &mut scores, width(query)).map(drop)
    })?;
    let less = seen.less(b, width(query))?;
    let parts = seen.parts(b)?;
    let sums = kernel.row_products(b, (&results, &gradients), first)?;
    let to = kernel.window(4);
    let matrix = times(b, kernel.head, (ATTENTION_ROWS * sight.queries).cast_signed())?;
    for row in 0..EACH {
        let number = numbered(b, first, kernel.row, row)?;
        let (end, zero) = (b.i32(small(sight.queries).cast_signed())?, b.i32(0)?);
        let (is_row, is_first) = (b.binary(B::I32LtU, number, end)?, b.binary(B::I32Eq, kernel.column, zero)?);
        let is_own = b.binary(B::I32And, is_row, is_first)?;
        b.begin_if(is_own, &[])?;
        for (n, values) in [&less, &parts, &sums].into_iter().enumerate() {
            let place = sum(b, &[Some(matrix), Some(number)], (n * sight.queries).cast_signed())?;
            let at = b.element(to, place, NUMBER_BYTES)?;
            b.store(values[row as usize], at, 0)?;
        }
        b.end()?;
    }
    Ok(LoweredStep { kernels: vec![kernel.finish(builder)?], scratch_bytes: Vec::new() })
}

/// The numbers of the queries of a tile that an item has: for each, those that [`rows`] has computed.
struct QueryNumbers {
    less: Vec<Value>,
    parts: Vec<Value>,
    sums: Vec<Value>,
}

impl QueryNumbers {
    /// Of the item's queries from one on; of one that is not there, zeros.
    fn load(b: &mut KernelBuilder, rows: &Matrices, (first, own): (Value, Value)) -> Built<QueryNumbers> {
        let mut all = Vec::new();
        for number in 0..ATTENTION_ROWS {
            let line = b.i32(small(number).cast_signed())?;
            let mut values = Vec::new();
            for n in 0..EACH {
                let query = numbered(b, first, own, n)?;
                values.push(rows.element(b, line, query)?);
            }
            all.push(values);
        }
        let [less, parts, sums] = <[Vec<Value>; ATTENTION_ROWS]>::try_from(all)
            .map_err(|_| BuildError::Structure { what: "three numbers" })?;
        Ok(QueryNumbers { less, parts, sums })
    }
}

/// Gradients of queries, or of keys and values, from queries, keys, values, the result's gradient and what [`rows`] has
/// computed.
pub(in crate::cuda) fn gradient(special: &SpecialKernel, is_causal: bool, of: AttentionInput) -> Built<LoweredStep> {
    let rows = special.inputs.last().map(|view| view.layout.shape);
    let rows = rows.ok_or(BuildError::Structure { what: "gradients of attention have operands" })?;
    let (special, heads) = of_heads(special, rows);
    let [_, key, value, ..] = &special.inputs[..] else {
        return Err(BuildError::Structure { what: "gradients of attention have operands" });
    };
    let parts: &[GradientPart] = match of {
        AttentionInput::Queries => &[GradientPart::Queries],
        AttentionInput::KeysAndValues if width(key) + width(value) <= TOGETHER_MAX => &[GradientPart::Both],
        AttentionInput::KeysAndValues => &[GradientPart::Keys, GradientPart::Values],
    };
    let kernels = parts.iter().map(|part| part_kernel(&special, heads, is_causal, *part)).collect::<Built<_>>()?;
    Ok(LoweredStep { kernels, scratch_bytes: Vec::new() })
}

/// What one kernel computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GradientPart {
    Queries,
    Keys,
    Values,
    /// Keys and values.
    Both,
}

fn part_kernel(special: &SpecialKernel, heads: usize, is_causal: bool, part: GradientPart) -> Built<LoweredKernel> {
    let [query, key, value, gradient, rows] = &special.inputs[..] else {
        return Err(BuildError::Structure { what: "gradients of attention have five operands" });
    };
    let sight = sight_of(query, key, is_causal);
    let (name, lines) = match part {
        GradientPart::Queries => ("attention_queries", sight.queries),
        GradientPart::Keys | GradientPart::Values | GradientPart::Both => ("attention_keys", sight.keys),
    };
    let mut builder = KernelBuilder::on(name, Target::Ampere);
    let b = &mut builder;
    let kernel = TileKernel::new(b, arguments(special), (heads, lines))?;
    let operands = Operands {
        queries: kernel.matrices(b, query, 0)?,
        keys: kernel.matrices(b, key, 1)?,
        values: kernel.matrices(b, value, 2)?,
        gradients: kernel.matrices(b, gradient, 3)?,
        rows: kernel.matrices(b, rows, 4)?,
        widths: [width(key), width(value)],
        sight,
        scale: b.f32(scale_of(width(query)))?,
    };
    // A score is a product times this.
    let slope = b.f32(scale_of(width(query)) / std::f32::consts::LOG2_E)?;
    let (slopes, ones) = (vec![slope; EACH as usize], vec![b.f32(1.0)?; EACH as usize]);
    if part == GradientPart::Queries {
        let first = first_query(b, &kernel, sight.queries)?;
        let sums = operands.of_queries(b, &kernel, first)?;
        kernel.store(b, (5, special.dtype, 0), (first, sight.queries), &sums, &slopes)?;
        return kernel.finish(builder);
    }
    let first = scaled(b, kernel.block, SIDE)?;
    let (keys, values) = operands.of_keys_and_values(b, &kernel, first, part)?;
    if let Some(keys) = keys {
        kernel.store(b, (5, special.dtype, 0), (first, sight.keys), &keys, &slopes)?;
    }
    if let Some(values) = values {
        let from = packed_values_start(heads * sight.keys * width(key));
        kernel.store(b, (5, special.dtype, from), (first, sight.keys), &values, &ones)?;
    }
    kernel.finish(builder)
}

struct Operands {
    queries: Matrices,
    keys: Matrices,
    values: Matrices,
    gradients: Matrices,
    rows: Matrices,
    /// Of keys, and of values.
    widths: [usize; 2],
    sight: Sight,
    scale: Value,
}

impl Operands {
    /// For a tile of queries from one on: all keys that they see, tile by tile.
    fn of_queries(&self, b: &mut KernelBuilder, kernel: &TileKernel, first: Value) -> Built<TileSums> {
        let sums = TileSums::new(b, self.widths[0])?;
        let numbers = QueryNumbers::load(b, &self.rows, (first, kernel.row))?;
        let tiles = self.sight.tiles(b, (first, SIDE), SIDE)?;
        b.count_to::<BuildError>(tiles, &sums.sums, |b, tile| {
            let key = scaled(b, tile, SIDE)?;
            let scores = kernel.scores(b, (&self.queries, first), (&self.keys, key))?;
            let slopes = kernel.scores(b, (&self.gradients, first), (&self.values, key))?;
            let row = |n: usize| n / EACH as usize;
            let powers = self.powers(b, &scores, &numbers, row)?;
            let none = b.f32(0.0)?;
            let powers = only_seen(b, kernel, self.sight, (first, key), powers, none)?;
            let slopes = sloped(b, &powers, &slopes, &numbers, row)?;
            kernel.keep(b, &slopes)?;
            kernel.add(b, &sums, (&self.keys, key))
        })?;
        Ok(sums)
    }

    /// For a tile of keys from one on: all queries that see one of them, tile by tile. Tiles have a key in each row.
    fn of_keys_and_values(
        &self,
        b: &mut KernelBuilder,
        kernel: &TileKernel,
        first: Value,
        part: GradientPart,
    ) -> Built<(Option<TileSums>, Option<TileSums>)> {
        let keys = if part == GradientPart::Values { None } else { Some(TileSums::new(b, self.widths[0])?) };
        let values = if part == GradientPart::Keys { None } else { Some(TileSums::new(b, self.widths[1])?) };
        let carried: Vec<Variable> = keys.iter().chain(&values).flat_map(|sums| &sums.sums).copied().collect();
        let (from, tiles) = self.seen_by(b, first)?;
        b.count_to::<BuildError>(tiles, &carried, |b, tile| {
            let tile = b.binary(B::I32Add, from, tile)?;
            let query = scaled(b, tile, SIDE)?;
            let numbers = QueryNumbers::load(b, &self.rows, (query, kernel.column))?;
            let scores = kernel.scores(b, (&self.keys, first), (&self.queries, query))?;
            let column = |n: usize| n % EACH as usize;
            let powers = self.powers(b, &scores, &numbers, column)?;
            let powers = self.only_seeing(b, kernel, (first, query), powers)?;
            if let Some(values) = &values {
                kernel.keep(b, &powers)?;
                kernel.add(b, values, (&self.gradients, query))?;
            }
            let Some(keys) = &keys else { return Ok(()) };
            let slopes = kernel.scores(b, (&self.values, first), (&self.gradients, query))?;
            let slopes = sloped(b, &powers, &slopes, &numbers, column)?;
            kernel.keep(b, &slopes)?;
            kernel.add(b, keys, (&self.queries, query))
        })?;
        Ok((keys, values))
    }

    /// The first tile of queries that see one of a tile's keys, and how many come from there on.
    fn seen_by(&self, b: &mut KernelBuilder, key: Value) -> Built<(Value, Value)> {
        let (all, zero) = (b.i32(small(self.sight.queries.div_ceil(SIDE as usize)).cast_signed())?, b.i32(0)?);
        if !self.sight.is_causal {
            return Ok((zero, all));
        }
        let behind = b.i32(self.sight.behind())?;
        let query = b.binary(B::I32Sub, key, behind)?;
        let is_later = b.binary(B::I32GtS, query, zero)?;
        let query = b.select(is_later, query, zero)?;
        let (tile, _) = Indices::default().divide(b, query, SIDE)?;
        Ok((tile, b.binary(B::I32Sub, all, tile)?))
    }

    /// The powers of a tile's scores, each over the sum of all of its query's.
    fn powers(
        &self,
        b: &mut KernelBuilder,
        scores: &[Value],
        numbers: &QueryNumbers,
        query: impl Fn(usize) -> usize,
    ) -> Built<Vec<Value>> {
        let power = |(n, score): (usize, &Value)| {
            let exponent = b.fma(*score, self.scale, numbers.less[query(n)])?;
            let power = b.exp2_approximate(exponent)?;
            b.binary(B::F32Mul, power, numbers.parts[query(n)])
        };
        scores.iter().enumerate().map(power).collect()
    }

    /// As [`only_seen`], of a tile that has a key in each row.
    fn only_seeing(
        &self,
        b: &mut KernelBuilder,
        kernel: &TileKernel,
        (key, query): (Value, Value),
        mut powers: Vec<Value>,
    ) -> Built<Vec<Value>> {
        let Sight { queries, keys, is_causal } = self.sight;
        let is_whole = queries.is_multiple_of(SIDE as usize) && keys.is_multiple_of(SIDE as usize);
        if is_whole && !is_causal {
            return Ok(powers);
        }
        let (none, all) = (b.f32(0.0)?, b.i32(small(queries).cast_signed())?);
        for column in 0..EACH {
            let query = numbered(b, query, kernel.column, column)?;
            let (end, zero) = (self.sight.end(b, query)?, b.i32(0)?);
            // A query that is not there sees nothing.
            let is_query = b.binary(B::I32LtU, query, all)?;
            let end = b.select(is_query, end, zero)?;
            for row in 0..EACH {
                let key = numbered(b, key, kernel.row, row)?;
                let is_seen = b.binary(B::I32LtS, key, end)?;
                let own = &mut powers[(row * EACH + column) as usize];
                *own = b.select(is_seen, *own, none)?;
            }
        }
        Ok(powers)
    }
}

/// The gradients of a tile's scores.
fn sloped(
    b: &mut KernelBuilder,
    powers: &[Value],
    slopes: &[Value],
    numbers: &QueryNumbers,
    query: impl Fn(usize) -> usize,
) -> Built<Vec<Value>> {
    let slope = |(n, (power, slope)): (usize, (&Value, &Value))| {
        let less = b.binary(B::F32Sub, *slope, numbers.sums[query(n)])?;
        b.binary(B::F32Mul, *power, less)
    };
    powers.iter().zip(slopes).enumerate().map(slope).collect()
}
