//! Matrix products by the device's library: which it can do, and what it is told of them.

use std::f64::consts::FRAC_2_PI;

use tensor_wasm_gpu::{Product, ProductElement, ProductEpilogue, ProductOperand};

use super::map::{Argument, LoweredKernel, Program};
use crate::cpu::register_of;
use crate::dtype::{DType, Scalar};
use crate::graph::op::{BinaryOp, Op, UnaryOp};
use crate::schedule::plan::{BufferView, MapKernel, Source, SpecialKernel, ValueKind};
use crate::shape::{Layout, Shape};

/// What a library may use beside the operands, on a device that has a stream for all plans: as much as the makers
/// recommend for the largest products.
pub(super) const WORKSPACE_BYTES: u64 = 32 << 20;

/// A product, a bias and a residual.
const TERMS_MAX: usize = 3;

/// Buffers begin at multiples of this.
const BUFFER_ALIGNMENT: u64 = 256;

/// What follows a product, as far as the library does it on the way: everything that is stored is the epilogue of the
/// sums with what is added to them.
#[derive(Debug, PartialEq)]
pub(super) struct Following {
    bias: Option<BufferView>,
    residual: Option<BufferView>,
    epilogue: ProductEpilogue,
    /// Where the result goes.
    slot: usize,
    /// The numbers of each run that it is only with these what it is: a rectifier is the larger of two, of which one is
    /// zero.
    pub assumed: Vec<usize>,
}

/// A product as the library does it, with what follows it or by itself. None where the types are not its own, or
/// matrices lie neither by rows nor by columns.
pub(super) fn of(kernel: &SpecialKernel, following: Option<&Following>) -> Option<LoweredKernel> {
    let (Op::Matmul, [left, right]) = (&kernel.op, &kernel.inputs[..]) else { return None };
    let element = match kernel.dtype {
        DType::F16 => ProductElement::F16,
        DType::BF16 => ProductElement::BF16,
        DType::F32 if super::is_tf32() => ProductElement::Tf32,
        DType::F32 => ProductElement::F32,
        DType::F64 => ProductElement::F64,
        DType::Bool | DType::U8 | DType::I32 | DType::I64 => return None,
    };
    let rank = kernel.shape.rank();
    let (rows, columns, depth) = (kernel.shape[rank - 2], kernel.shape[rank - 1], left.layout.shape[rank - 1]);
    let batches: usize = kernel.shape[..rank - 2].iter().product();
    if rows == 0 || columns == 0 || depth == 0 || batches == 0 {
        return None;
    }
    let (left_operand, right_operand) = (operand(left)?, operand(right)?);
    let (mut rows, mut batches) = (rows as u64, batches as u64);
    // The same matrix for all of them, and rows that go on from one to the next: one product of all rows.
    let goes_on = !left_operand.is_by_columns && left_operand.batch_stride == rows * left_operand.stride;
    if batches > 1 && right_operand.batch_stride == 0 && goes_on {
        (rows, batches) = (rows * batches, 1);
    }
    let product = Product {
        element,
        rows,
        columns: columns as u64,
        depth: depth as u64,
        batches,
        left: left_operand,
        right: right_operand,
        has_bias: following.is_some_and(|following| following.bias.is_some()),
        has_residual: following.is_some_and(|following| following.residual.is_some()),
        epilogue: following.map_or(ProductEpilogue::None, |following| following.epilogue),
        workspace_bytes: WORKSPACE_BYTES,
    };
    let part = |view: &BufferView| Argument::Part(view.source, view.layout.offset.unsigned_abs() * view.dtype.size());
    let added = |view: Option<&BufferView>| view.map_or(Argument::Workspace, part);
    let slot = following.map_or(kernel.slot, |following| following.slot);
    let arguments = vec![
        part(left),
        part(right),
        Argument::Buffer(Source::Slot(slot)),
        added(following.and_then(|following| following.bias.as_ref())),
        added(following.and_then(|following| following.residual.as_ref())),
        Argument::Workspace,
    ];
    Product::from_image(&product.to_image())?;
    Some(LoweredKernel { program: Program::Product(product), groups: 1, items: 1, arguments })
}

/// How a matrix lies, or many of them; none if in no way that a library knows.
fn operand(view: &BufferView) -> Option<ProductOperand> {
    let layout = &view.layout;
    let rank = layout.shape.rank();
    let (rows, columns) = (layout.shape[rank - 2], layout.shape[rank - 1]);
    let apart =
        |stride: isize, least: usize| u64::try_from(stride).ok().filter(|stride| *stride >= least.max(1) as u64);
    let (row, column) = (layout.strides()[rank - 2], layout.strides()[rank - 1]);
    // Along an axis of one element nothing is stepped over.
    let (is_by_columns, stride) = if column == 1 || columns == 1 {
        (false, if rows == 1 { columns as u64 } else { apart(row, columns)? })
    } else if row == 1 || rows == 1 {
        (true, apart(column, rows)?)
    } else {
        return None;
    };
    let batch_stride = u64::try_from(batch_stride(layout)?).ok()?;
    let offset = u64::try_from(layout.offset).ok()?.checked_mul(view.dtype.size() as u64)?;
    let alignment = if offset == 0 { BUFFER_ALIGNMENT } else { 1 << offset.trailing_zeros().min(8) };
    Some(ProductOperand { is_by_columns, stride, batch_stride, alignment })
}

/// From one matrix to the next, if that is always as far.
fn batch_stride(layout: &Layout) -> Option<isize> {
    let heads = layout.shape.rank() - 2;
    let mut apart = None;
    let mut count = 1_isize;
    for axis in (0..heads).rev() {
        let (size, stride) = (layout.shape[axis], layout.strides()[axis]);
        if size == 1 {
            continue;
        }
        match apart {
            None => apart = Some(stride),
            Some(first) if stride == first * count => {}
            Some(_) => return None,
        }
        count = count.checked_mul(size.cast_signed())?;
    }
    Some(apart.unwrap_or(0))
}

/// What follows a product, if the library can do all of it, given the numbers that come with a run, eight bytes each;
/// without them, what is the same whatever they are. None if nothing follows, or somebody wants to know the product.
pub(super) fn following(kernel: &SpecialKernel, is_product_needed: bool, words: Option<&[u8]>) -> Option<Following> {
    let after = kernel.epilogue.as_ref().filter(|_| !is_product_needed)?;
    let [(stored, slot)] = after.stores[..] else { return None };
    let columns = kernel.shape[kernel.shape.rank() - 1];
    let is_by_columns = after.space.numel() == kernel.shape.numel() && after.space.last() == Some(&columns);
    // Of values that nobody uses there may be more.
    if !is_by_columns || after.values.iter().any(|value| value.dtype != kernel.dtype) {
        return None;
    }
    let expression = Expression { after, words, dtype: kernel.dtype };
    let activated = expression.rectified(stored).or_else(|| expression.approximate_gelu(stored));
    let (sum, epilogue, assumed) = activated.unwrap_or((stored, ProductEpilogue::None, Vec::new()));
    let mut following = Following { bias: None, residual: None, epilogue, slot, assumed };
    let mut is_there = false;
    for view in expression.terms(sum)? {
        if view.source == Source::Slot(kernel.slot) {
            if is_there || !view.layout.is_contiguous() {
                return None;
            }
            is_there = true;
        } else if following.bias.is_none() && is_for_columns(view, after.space) {
            following.bias = Some(*view);
        } else if following.residual.is_none() && is_for_all(view, after.space) {
            following.residual = Some(*view);
        } else {
            return None;
        }
    }
    is_there.then_some(following)
}

/// Whether a bias can be read there: one number for each column.
fn is_for_columns(view: &BufferView, space: Shape) -> bool {
    let last = space.rank() - 1;
    let mut strides = view.layout.strides().iter().enumerate();
    is_aligned(view) && strides.all(|(axis, stride)| *stride == isize::from(axis == last) || space[axis] == 1)
}

/// Whether a matrix lies as the result will.
fn is_for_all(view: &BufferView, space: Shape) -> bool {
    is_aligned(view) && view.layout.has_strides(&space.strides())
}

fn is_aligned(view: &BufferView) -> bool {
    let offset = usize::try_from(view.layout.offset).ok().and_then(|offset| offset.checked_mul(view.dtype.size()));
    offset.is_some_and(|offset| offset.is_multiple_of(Product::ADDED_ALIGNMENT as usize))
}

/// What follows a product, and the numbers that come with a run as far as they are known.
struct Expression<'a> {
    after: &'a MapKernel,
    words: Option<&'a [u8]>,
    dtype: DType,
}

/// What an activation is of, which it is, and the numbers that it is only with these.
type Activated = (usize, ProductEpilogue, Vec<usize>);

impl Expression<'_> {
    fn binary(&self, op: BinaryOp, value: usize) -> Option<(usize, usize)> {
        match self.after.values.get(value)?.kind {
            ValueKind::Binary(found, a, b) if found == op => Some((a, b)),
            _ => None,
        }
    }

    /// Which of a run's numbers a value is, if that is so much now.
    fn number(&self, value: usize, number: f64) -> Option<usize> {
        let ValueKind::Fill(parameter) = self.after.values.get(value)?.kind else { return None };
        let word = self.words?.get(8 * parameter..8 * parameter + 8)?;
        (*word == register_of(Scalar::Float(number), self.dtype)).then_some(parameter)
    }

    fn rectified(&self, value: usize) -> Option<Activated> {
        let (a, b) = self.binary(BinaryOp::Max, value)?;
        let of = |from: usize, zero: usize| Some((from, ProductEpilogue::Relu, vec![self.number(zero, 0.0)?]));
        of(a, b).or_else(|| of(b, a))
    }

    /// As `Tensor::gelu_approximate` writes it. The library's tanh is the device's own, of eleven bits: enough for
    /// halves and for tf32.
    fn approximate_gelu(&self, value: usize) -> Option<Activated> {
        if !(matches!(self.dtype, DType::F16 | DType::BF16) || self.dtype == DType::F32 && super::is_tf32()) {
            return None;
        }
        let (add, mul) = (BinaryOp::Add, BinaryOp::Mul);
        let (halved, raised) = self.binary(mul, value)?;
        let (x, half) = self.binary(mul, halved)?;
        let (tanh, one) = self.binary(add, raised)?;
        let ValueKind::Unary(UnaryOp::Tanh, inner) = self.after.values.get(tanh)?.kind else { return None };
        let (sum, scale) = self.binary(mul, inner)?;
        let (linear, cubic) = self.binary(add, sum)?;
        let (cube, factor) = self.binary(mul, cubic)?;
        let (square, third) = self.binary(mul, cube)?;
        let is_of_one = linear == x && third == x && self.binary(mul, square)? == (x, x);
        let numbers = [(half, 0.5), (one, 1.0), (scale, FRAC_2_PI.sqrt()), (factor, 0.044_715)];
        let assumed: Vec<usize> = numbers.iter().map(|(value, is)| self.number(*value, *is)).collect::<Option<_>>()?;
        is_of_one.then_some((x, ProductEpilogue::Gelu, assumed))
    }

    /// What is added up, if all of it is loaded and no more than a product, a bias and a residual.
    fn terms(&self, sum: usize) -> Option<Vec<&BufferView>> {
        let (mut left, mut terms) = (vec![sum], Vec::new());
        while let Some(value) = left.pop() {
            match self.binary(BinaryOp::Add, value) {
                Some((a, b)) if left.len() + terms.len() < TERMS_MAX => left.extend([b, a]),
                Some(_) => return None,
                None => {
                    let ValueKind::Load(load) = self.after.values.get(value)?.kind else { return None };
                    terms.push(self.after.loads.get(load)?);
                }
            }
        }
        Some(terms)
    }
}
