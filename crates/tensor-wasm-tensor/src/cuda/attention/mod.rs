//! Attention without a score in memory: the scores of a tile of queries are computed for some keys at a time, and their
//! softmax is corrected as larger ones come up. Halves are multiplied on tensor cores (`cores.rs`). Single precision is
//! not (`single.rs`), nor are gradients (`backward.rs`): both are made of the products of tiles that `tiles.rs` has.

pub(super) mod backward;
mod cores;
mod single;
mod tiles;

use tensor_wasm_jit::Target;
use tensor_wasm_jit::build::{BinaryOp as B, KernelBuilder, UnaryOp, Value};

use super::index::{Indices, small};
use super::map::LoweredStep;
use super::numbers::{Built, half_type};
use crate::dtype::DType;
use crate::schedule::plan::{BufferView, SpecialKernel};
use crate::shape::Shape;

/// Whether there is a kernel for such queries, keys and values.
pub(super) fn is_possible(target: Target, dtype: DType, widths: [usize; 2]) -> bool {
    target >= Target::Ampere && if dtype == DType::F32 { single::fits(widths) } else { cores::fits(dtype, widths) }
}

pub(super) fn lower(kernel: &SpecialKernel, is_causal: bool) -> Built<LoweredStep> {
    let heads = &kernel.shape[..kernel.shape.rank() - 2];
    let inputs = kernel.inputs.iter().map(|view| for_heads(view, heads)).collect();
    let kernel = &SpecialKernel { inputs, ..kernel.clone() };
    if half_type(kernel.dtype).is_some() { cores::lower(kernel, is_causal) } else { single::lower(kernel, is_causal) }
}

/// By what attention is computed going forwards, or its gradients, for people.
pub(super) fn explained(dtype: DType, is_forward: bool) -> String {
    let units = if is_forward && half_type(dtype).is_some() { " on tensor cores" } else { "" };
    format!("own kernel{units} in {dtype}, no score in memory")
}

/// An operand as all heads see it.
fn for_heads(view: &BufferView, heads: &[usize]) -> BufferView {
    let own = view.layout.shape;
    let all = Shape::new(&[heads, &own[own.rank() - 2..]].concat());
    BufferView { layout: all.map_or(view.layout, |all| view.layout.expand(all)), ..*view }
}

/// Which queries see which keys: all, or, with the last query at the last key, those that are not later.
#[derive(Debug, Clone, Copy)]
struct Sight {
    queries: usize,
    keys: usize,
    is_causal: bool,
}

impl Sight {
    /// How far a query's own key is behind its number.
    fn behind(self) -> i32 {
        i32::try_from(self.keys).unwrap_or(i32::MAX) - i32::try_from(self.queries).unwrap_or(i32::MAX)
    }

    /// How many tiles of so many keys are seen by so many queries from one on.
    fn tiles(self, b: &mut KernelBuilder, (first, count): (Value, u32), tile: u32) -> Built<Value> {
        let all = small(self.keys.div_ceil(tile as usize));
        if !self.is_causal {
            return b.i32(all.cast_signed());
        }
        // One more than the last key that the last query sees.
        let (more, zero, all) = (b.i32(self.behind() + count.cast_signed())?, b.i32(0)?, b.i32(all.cast_signed())?);
        let end = b.binary(B::I32Add, first, more)?;
        let is_any = b.binary(B::I32GtS, end, zero)?;
        let end = b.select(is_any, end, zero)?;
        let round = b.i32(tile.cast_signed() - 1)?;
        let end = b.binary(B::I32Add, end, round)?;
        let (tiles, _) = Indices::default().divide(b, end, tile)?;
        let is_less = b.binary(B::I32LtU, tiles, all)?;
        b.select(is_less, tiles, all)
    }

    /// How many keys a query sees, none as a number that may be less than zero.
    fn end(self, b: &mut KernelBuilder, query: Value) -> Built<Value> {
        let all = b.i32(small(self.keys).cast_signed())?;
        if !self.is_causal {
            return Ok(all);
        }
        let more = b.i32(self.behind() + 1)?;
        let own = b.binary(B::I32Add, query, more)?;
        let is_less = b.binary(B::I32LtS, own, all)?;
        b.select(is_less, own, all)
    }
}

/// What scores are multiplied by, as exponents of two: so that the scale is that of the natural ones.
fn scale_of(width: usize) -> f32 {
    #[expect(clippy::cast_precision_loss, reason = "a width is small")]
    let scale = std::f64::consts::LOG2_E / (width as f64).sqrt();
    #[expect(clippy::cast_possible_truncation, reason = "the nearest that there is")]
    let scale = scale as f32;
    scale
}

/// What is added to scaled scores so that the largest is zero.
fn lowered(b: &mut KernelBuilder, largest: Value, scale: Value) -> Built<Value> {
    let scaled = b.binary(B::F32Mul, largest, scale)?;
    b.unary(UnaryOp::F32Neg, scaled)
}

/// The same, and by what is multiplied what was added up while
/// another was the largest.
fn corrected(b: &mut KernelBuilder, before: Value, largest: Value, scale: Value) -> Built<(Value, Value)> {
    let less = lowered(b, largest, scale)?;
    let less_before = b.fma(before, scale, less)?;
    Ok((less, b.exp2_approximate(less_before)?))
}
