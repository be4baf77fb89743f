//! Layers without parameters of their own: convolutions, pools, norms, attention, losses. All of them are composed, so
//! their gradients come with what they are composed of.

use std::panic::Location;

use super::{Caller, Tensor};
use crate::dtype::DType;
use crate::error::{ErrorKind, TensorError, asked_as};
use crate::graph::op::{FoldedAxis, Movement, Op, ReduceOp};
use crate::precision::{is_cast, product};
use crate::shape::{AxisSet, RANK_MAX, Shape};

/// Rows and columns of windows that do not overlap and are computed side by side.
const POOL_MAX: usize = 8;

/// Scores from which on attention in single precision is one kernel where there is one: from 32 MiB on, they and their
/// powers are more than second-level caches have (50 MiB on a Hopper), and would go through memory several times.
/// Composed, smaller ones are products of a library, which are at least as fast as ours. Not measured. Fewer in tests,
/// which run kernels item by item.
const SINGLE_SCORES_MIN: usize = if cfg!(test) { 1 << 7 } else { 8 << 20 };

/// Queries from which on it is: a group of the kernel has 64 of them, and of fewer most of its work is for nothing. A
/// token that comes alone looks at all keys once, which products do as well. Fewer in tests.
const SINGLE_QUERIES_MIN: usize = if cfg!(test) { 1 } else { 32 };

/// Scores from which on attention in half precision with gradients is not composed on a GPU. Kernels of its gradients
/// multiply in single precision, where composed ones have tensor cores: those are used as long as they can be computed.
/// Beyond, scores have the 4 GiB in single precision that are too many for a tensor on a GPU. Fewer in tests.
const HALF_GRADIENT_SCORES_MIN: usize = if cfg!(test) { 1 << 9 } else { 1 << 30 };

/// How a window moves over one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    pub stride: usize,
    /// Zeros on each side.
    pub padding: usize,
    /// Distance of a window's elements.
    pub dilation: usize,
}

impl Default for Window {
    fn default() -> Window {
        Window { stride: 1, padding: 0, dilation: 1 }
    }
}

/// How a convolution moves over rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution {
    pub rows: Window,
    pub columns: Window,
    /// Channels are divided into so many groups, which know nothing of each other.
    pub groups: usize,
}

impl Default for Convolution {
    fn default() -> Convolution {
        Convolution::new(1, 0)
    }
}

impl Convolution {
    /// The same stride and padding for rows and columns.
    pub fn new(stride: usize, padding: usize) -> Convolution {
        let window = Window { stride, padding, dilation: 1 };
        Convolution { rows: window, columns: window, groups: 1 }
    }
}

fn shape_of(sizes: &[usize], operation: &'static str, at: Caller) -> Result<Shape, TensorError> {
    let shape = Shape::new(sizes).filter(|shape| shape.checked_numel().is_some());
    shape.ok_or_else(|| TensorError::new(operation, ErrorKind::TooLarge { shape: sizes.to_vec() }, at))
}

impl Tensor {
    /// The sizes of as many axes as it must have.
    fn sizes<const N: usize>(
        &self,
        operation: &'static str,
        what: &str,
        at: Caller,
    ) -> Result<[usize; N], TensorError> {
        self.check()?;
        <[usize; N]>::try_from(&self.shape()[..]).map_err(|_| {
            let what = ErrorKind::WrongShape { found: self.shape().to_vec(), expected: what.to_owned() };
            TensorError::new(operation, what, at)
        })
    }

    /// Windows of `size` elements along an axis; their elements are a new last axis.
    fn windows(
        &self,
        axis: usize,
        size: usize,
        window: Window,
        operation: &'static str,
        at: Caller,
    ) -> Result<Tensor, TensorError> {
        let Window { stride, dilation, .. } = window;
        let along = self.shape()[axis];
        let reach = size.checked_sub(1).and_then(|steps| steps.checked_mul(dilation)).and_then(|n| n.checked_add(1));
        let Some(reach) = reach.filter(|reach| stride > 0 && dilation > 0 && *reach <= along) else {
            let why = format!(
                "a window of {size} in steps of {stride}, its elements {dilation} apart, over {along} elements (with padding) of \
                 shape {}",
                self.shape()
            );
            return Err(TensorError::new(operation, ErrorKind::BadArgument { why }, at));
        };
        let mut sizes = self.shape().to_vec();
        sizes[axis] = (along - reach) / stride + 1;
        sizes.push(size);
        Ok(self.moved(Movement::Windows { axis, step: stride, dilation }, shape_of(&sizes, operation, at)?, at))
    }

    /// The sum of windows, which are the last axis, at their places along an axis of `size`.
    fn fold(&self, axis: usize, size: usize, window: Window, at: Caller) -> Tensor {
        let Window { stride, dilation, .. } = window;
        self.folded(FoldedAxis { axis, step: stride, dilation, size }, at)
    }

    /// A number on each side of the last two axes.
    fn padded(
        &self,
        value: f64,
        (rows, columns): (usize, usize),
        operation: &'static str,
        at: Caller,
    ) -> Result<Tensor, TensorError> {
        if rows == 0 && columns == 0 {
            return Ok(self.clone());
        }
        let rank = self.rank();
        let mut sizes = self.shape().to_vec();
        for (axis, padding) in [(rank - 2, rows), (rank - 1, columns)] {
            let wide = padding.checked_mul(2).and_then(|both| both.checked_add(sizes[axis]));
            sizes[axis] = wide.ok_or_else(|| {
                let why = format!("a padding of {padding} elements on each side");
                TensorError::new(operation, ErrorKind::BadArgument { why }, at)
            })?;
        }
        let wide = shape_of(&sizes, operation, at)?;
        let mut corner = [0; RANK_MAX];
        (corner[rank - 2], corner[rank - 1]) = (rows, columns);
        let placed = Tensor::place(&[self], &[corner], wide, at);
        if value == 0.0 {
            return Ok(placed);
        }
        let inside = Tensor::fill(true.into(), self.shape(), DType::Bool, at);
        let inside = Tensor::place(&[&inside], &[corner], wide, at);
        Ok(Tensor::choose(&inside, &placed, &self.scalar_like(value, at), at))
    }

    /// A convolution of images `[batch, channels, rows, columns]` with filters `[filters, channels / groups, rows,
    /// columns]`.
    #[track_caller]
    pub fn conv2d(&self, filters: &Tensor, options: Convolution) -> Tensor {
        let at = Location::caller();
        self.convolution(filters, options, "conv2d", at).unwrap_or_else(Tensor::holding)
    }

    fn convolution(
        &self,
        filters: &Tensor,
        options: Convolution,
        operation: &'static str,
        at: Caller,
    ) -> Result<Tensor, TensorError> {
        let [batch, channels, ..] = self.sizes::<4>(operation, "[batch, channels, rows, columns]", at)?;
        let what = "filters [filters, channels / groups, rows, columns]";
        let [count, depth, height, width] = filters.sizes(operation, what, at)?;
        let Convolution { rows, columns, groups } = options;
        let fits = groups > 0 && depth.checked_mul(groups) == Some(channels) && count.is_multiple_of(groups);
        if !fits {
            let (images, shape) = (self.shape(), filters.shape());
            let why = format!(
                "images {images} have {channels} channels, and {count} filters {shape} of {depth} channels in {groups} groups need \
                 {}",
                depth.saturating_mul(groups)
            );
            return Err(TensorError::new(operation, ErrorKind::BadArgument { why }, at));
        }
        filters.same_numbers(self, operation, at)?;
        if matches!(self.dtype(), DType::F16 | DType::BF16) {
            // In single precision, and rounded once.
            let wide = self.cast_to(DType::F32, at);
            let result = wide.convolution(&filters.cast_to(DType::F32, at), options, operation, at)?;
            return Ok(result.cast_to(self.dtype(), at));
        }
        let padded = self.padded(0.0, (rows.padding, columns.padding), operation, at)?;
        let windows = padded.windows(2, height, rows, operation, at)?.windows(3, width, columns, operation, at)?;
        let (high, wide) = (windows.shape()[2], windows.shape()[3]);
        let of = |sizes: &[usize]| shape_of(sizes, operation, at);
        let order = of(&[batch, channels, height, width, high, wide])?;
        let windows = windows.moved(Movement::Permute([0, 1, 4, 5, 2, 3, 0, 0]), order, at);
        let windows = windows.reshape_to(of(&[batch, groups, depth, height, width, 1, high, wide])?, at);
        let matrix = filters.reshape_to(of(&[groups, count / groups, depth * height * width])?, at).t();
        let matrix = matrix.reshape_to(of(&[1, groups, depth, height, width, count / groups, 1, 1])?, at);
        let product = product([&matrix, &windows], at, |[a, b]| a.contract(b, AxisSet::of([2, 3, 4]), at));
        product.check()?;
        Ok(product.reshape_to(of(&[batch, count, high, wide])?, at))
    }

    /// Whether it can be multiplied with another.
    fn same_numbers(&self, other: &Tensor, operation: &'static str, at: Caller) -> Result<(), TensorError> {
        let (left, right) = (other.dtype(), self.dtype());
        if left != right {
            return Err(TensorError::new(operation, ErrorKind::MixedDTypes { left, right }, at));
        }
        if left == DType::Bool {
            return Err(TensorError::new(operation, ErrorKind::WrongDType { found: left, takes: "numbers" }, at));
        }
        Ok(())
    }

    /// A convolution of sequences `[batch, channels, length]` with filters `[filters, channels / groups, length]`.
    #[track_caller]
    pub fn conv1d(&self, filters: &Tensor, window: Window, groups: usize) -> Tensor {
        let at = Location::caller();
        let made = || {
            self.sizes::<3>("conv1d", "[batch, channels, length]", at)?;
            filters.sizes::<3>("conv1d", "filters [filters, channels / groups, length]", at)?;
            let options = Convolution { rows: Window::default(), columns: window, groups };
            let (rows, filters) = (self.unsqueeze(2), filters.unsqueeze(2));
            Ok(rows.convolution(&filters, options, "conv1d", at)?.squeeze(2))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// What a convolution does to gradients: images `[batch, channels, rows, columns]` become larger ones. Filters are
    /// `[channels, filters / groups, rows, columns]`.
    #[track_caller]
    pub fn conv_transpose2d(&self, filters: &Tensor, options: Convolution) -> Tensor {
        let at = Location::caller();
        let operation = "conv_transpose2d";
        let made = || {
            let [batch, channels, high, wide] = self.sizes(operation, "[batch, channels, rows, columns]", at)?;
            let what = "filters [channels, filters / groups, rows, columns]";
            let [own, depth, height, width] = filters.sizes(operation, what, at)?;
            let Convolution { rows, columns, groups } = options;
            let size = |count: usize, filter: usize, window: Window| {
                let steps = count.checked_sub(1)?.checked_mul(window.stride)?;
                let reach = filter.checked_sub(1)?.checked_mul(window.dilation)?.checked_add(1)?.checked_add(steps)?;
                let size = reach.checked_sub(window.padding.checked_mul(2)?).filter(|size| *size > 0)?;
                Some((reach, size))
            };
            let sizes = size(high, height, rows).zip(size(wide, width, columns));
            let fits = groups > 0
                && channels == own
                && channels.is_multiple_of(groups)
                && rows.stride > 0
                && columns.stride > 0;
            let Some(((full_high, new_high), (full_wide, new_wide))) = sizes.filter(|_| fits) else {
                let expected = format!("filters of {channels} channels in {groups} groups, larger than the padding");
                let what = ErrorKind::WrongShape { found: filters.shape().to_vec(), expected };
                return Err(TensorError::new(operation, what, at));
            };
            filters.same_numbers(self, operation, at)?;
            let of = |sizes: &[usize]| shape_of(sizes, operation, at);
            let each = channels / groups;
            let images = self.reshape_to(of(&[batch, groups, 1, 1, 1, each, high, wide])?, at);
            let matrix = filters.reshape_to(of(&[groups, each, depth * height * width])?, at).t();
            let matrix = matrix.reshape_to(of(&[1, groups, depth, height, width, each, 1, 1])?, at);
            let patches = product([&matrix, &images], at, |[a, b]| a.contract(b, AxisSet::of([5]), at));
            patches.check()?;
            let patches = patches.reshape_to(of(&[batch, groups * depth, height, width, high, wide])?, at);
            let order = of(&[batch, groups * depth, high, wide, height, width])?;
            let patches = patches.moved(Movement::Permute([0, 1, 4, 5, 2, 3, 0, 0]), order, at);
            let whole = patches.fold(3, full_wide, columns, at).fold(2, full_high, rows, at);
            Ok(whole.narrow(2, rows.padding, new_high).narrow(3, columns.padding, new_wide))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    fn pool(
        &self,
        size: usize,
        window: Window,
        value: f64,
        op: ReduceOp,
        operation: &'static str,
        at: Caller,
    ) -> Tensor {
        let made = || {
            self.sizes::<4>(operation, "[batch, channels, rows, columns]", at)?;
            let padded = self.padded(value, (window.padding, window.padding), operation, at)?;
            let windows = padded.windows(2, size, window, operation, at)?.windows(3, size, window, operation, at)?;
            if window.stride != size || window.dilation != 1 || size > POOL_MAX {
                let last = AxisSet::of([4, 5]);
                return Ok(windows.reduce(op, last, at).drop_axes(last, false, at));
            }
            // Windows that do not overlap are the same elements under other indices, and so are their gradients.
            let (high, wide) = (windows.shape()[2], windows.shape()[3]);
            let covered = padded.narrow(2, 0, high * size).narrow(3, 0, wide * size);
            let [batch, channels, ..] = padded.sizes::<4>(operation, "[batch, channels, rows, columns]", at)?;
            let apart = shape_of(&[batch, channels, high, size, wide, size], operation, at)?;
            let within = AxisSet::of([3, 5]);
            Ok(covered.reshape_to(apart, at).reduce(op, within, at).drop_axes(within, false, at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// The largest of each window of `size` rows and columns, one window beside the other.
    #[track_caller]
    pub fn max_pool2d(&self, size: usize) -> Tensor {
        self.max_pool2d_with(size, Window { stride: size, ..Window::default() })
    }

    /// The largest of each window of `size` rows and columns.
    #[track_caller]
    pub fn max_pool2d_with(&self, size: usize, window: Window) -> Tensor {
        self.pool(size, window, f64::NEG_INFINITY, ReduceOp::Max, "max_pool2d", Location::caller())
    }

    /// The mean of each window of `size` rows and columns, one window beside the other.
    #[track_caller]
    pub fn avg_pool2d(&self, size: usize) -> Tensor {
        self.avg_pool2d_with(size, Window { stride: size, ..Window::default() })
    }

    /// The mean of each window of `size` rows and columns, its padding included.
    #[track_caller]
    pub fn avg_pool2d_with(&self, size: usize, window: Window) -> Tensor {
        let at = Location::caller();
        if !self.dtype().is_float() {
            return self.wrong_dtype("avg_pool2d", "floats", at);
        }
        self.pool(size, window, 0.0, ReduceOp::Sum, "avg_pool2d", at) * (1.0 / (size as f64 * size as f64))
    }

    /// Rows of a table, chosen by indices of any shape.
    #[track_caller]
    pub fn embedding(&self, index: &Tensor) -> Tensor {
        let at = Location::caller();
        let made = || {
            let [_, columns] = self.sizes("embedding", "a table [rows, columns]", at)?;
            index.check()?;
            let mut sizes = index.shape().to_vec();
            sizes.push(columns);
            let flat = index.reshape_to(shape_of(&[index.numel()], "embedding", at)?, at);
            Ok(self.index_select(0, &flat).reshape_to(shape_of(&sizes, "embedding", at)?, at))
        };
        asked_as("embedding", at, made).unwrap_or_else(Tensor::holding)
    }

    /// Sets elements to zero with a probability, and makes up for it in the others.
    #[track_caller]
    pub fn dropout(&self, probability: f64, seed: u64) -> Tensor {
        let at = Location::caller();
        if let Err(error) = self.check() {
            return Tensor::holding(error);
        }
        if !self.dtype().is_float() {
            return self.wrong_dtype("dropout", "floats", at);
        }
        if !(0.0..1.0).contains(&probability) {
            let why = format!("a probability of {probability}; it is at least 0 and less than 1");
            return Tensor::failed("dropout", ErrorKind::BadArgument { why }, at);
        }
        let kept = Tensor::uniform(&self.shape(), seed, DType::F32).ge(probability).cast(self.dtype());
        self * kept * (1.0 / (1.0 - probability))
    }

    /// Distances from means in deviations, for each channel of `[batch, channels, …]`; with a scale and a shift.
    #[track_caller]
    pub fn batch_norm(&self, mean: &Tensor, variance: &Tensor, scale: &Tensor, shift: &Tensor, epsilon: f64) -> Tensor {
        let mut sizes = vec![1; self.rank().max(2)];
        sizes[1] = -1;
        let of = |tensor: &Tensor| tensor.reshape(&sizes);
        (self - of(mean)) * ((of(variance) + epsilon).rsqrt() * of(scale)) + of(shift)
    }

    /// What queries `[…, length, width]` get from values, by how much keys are like them. `causal` hides what comes
    /// later.
    #[track_caller]
    pub fn attention(&self, keys: &Tensor, values: &Tensor, causal: bool) -> Tensor {
        let at = Location::caller();
        for tensor in [self, keys, values] {
            if let Err(error) = tensor.check() {
                return Tensor::holding(error);
            }
        }
        let (rank, other) = (self.rank(), keys.rank());
        if rank < 2 || other < 2 || values.rank() < 2 {
            let expected = "[…, length, width] of queries, keys and values".to_owned();
            let found = [self, keys, values].into_iter().find(|tensor| tensor.rank() < 2).unwrap_or(self).shape();
            return Tensor::failed("attention", ErrorKind::WrongShape { found: found.to_vec(), expected }, at);
        }
        let scale = 1.0 / (self.shape()[rank - 1] as f64).sqrt();
        let mut scores = product([self, &keys.t()], at, |[a, b]| a.matrix_product(b, at)) * scale;
        if causal {
            let (queries, count) = (self.shape()[rank - 2], keys.shape()[other - 2]);
            let column = Tensor::arange(0, i64::try_from(count).unwrap_or(i64::MAX), 1, DType::I64);
            let row = Tensor::arange(0, i64::try_from(queries).unwrap_or(i64::MAX), 1, DType::I64).unsqueeze(1);
            // The last query sees everything.
            let behind = i64::try_from(count).unwrap_or(i64::MAX) - i64::try_from(queries).unwrap_or(i64::MAX);
            let seen = column.le(row + behind);
            scores = Tensor::choose(&seen, &scores, &scores.scalar_like(f64::NEG_INFINITY, at), at);
        }
        let composed = product([&scores.softmax(-1), values], at, |[a, b]| a.matrix_product(b, at));
        self.attention_kernel(keys, values, causal, composed, at)
    }

    /// May be one kernel, with the composed one as what is computed elsewhere; whether it is depends on the device that
    /// computes it.
    fn attention_kernel(&self, keys: &Tensor, values: &Tensor, causal: bool, composed: Tensor, at: Caller) -> Tensor {
        let has_elements = [self, keys, values, &composed].iter().all(|tensor| tensor.numel() > 0);
        if composed.check().is_err() || !has_elements || is_cast([self, keys, values]) {
            return composed;
        }
        let shape = composed.shape();
        let scores = (shape.numel() / shape[shape.rank() - 1]).saturating_mul(keys.shape()[keys.rank() - 2]);
        let pays = match self.dtype() {
            DType::F16 | DType::BF16 => !composed.requires_grad() || scores >= HALF_GRADIENT_SCORES_MIN,
            DType::F32 => scores >= SINGLE_SCORES_MIN && self.shape()[self.rank() - 2] >= SINGLE_QUERIES_MIN,
            _ => false,
        };
        // A query that sees nothing has no gradients that are numbers: those are left as they are composed.
        let sees_nothing = causal && self.shape()[self.rank() - 2] > keys.shape()[keys.rank() - 2];
        if !pays || composed.requires_grad() && sees_nothing {
            return composed;
        }
        let op = Op::Attention { is_causal: causal };
        Tensor::make(op, &[self, keys, values, &composed], shape, self.dtype(), at)
    }

    /// The mean of squared differences.
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor) -> Tensor {
        let at = Location::caller();
        let made = || {
            self.same_shape(target, "mse_loss", at)?;
            Ok((self - target).square().mean(()))
        };
        asked_as("mse_loss", at, made).unwrap_or_else(Tensor::holding)
    }

    /// Whether targets have the shape of what is judged by them: broadcast, each would be compared with each.
    fn same_shape(&self, target: &Tensor, operation: &'static str, at: Caller) -> Result<(), TensorError> {
        self.check()?;
        target.check()?;
        if self.shape() == target.shape() {
            return Ok(());
        }
        let why =
            format!("{} is compared with targets of shape {}; they must be the same", self.shape(), target.shape());
        Err(TensorError::new(operation, ErrorKind::BadArgument { why }, at))
    }

    /// The mean of `-ln` of the probability of the truth, of logits; targets are 0 to 1.
    #[track_caller]
    pub fn binary_cross_entropy(&self, target: &Tensor) -> Tensor {
        let at = Location::caller();
        let made = || {
            self.same_shape(target, "binary_cross_entropy", at)?;
            // ln(1 + e^x) - x·t, without overflow.
            Ok((self.softplus() - self * target).mean(()))
        };
        asked_as("binary_cross_entropy", at, made).unwrap_or_else(Tensor::holding)
    }

    /// The mean of `-ln` of the probability of the right class, of logits `[batch, classes]`; targets are classes, i64.
    #[track_caller]
    pub fn cross_entropy(&self, target: &Tensor) -> Tensor {
        let at = Location::caller();
        let made = || {
            self.sizes::<2>("cross_entropy", "logits [batch, classes]", at)?;
            target.sizes::<1>("cross_entropy", "a class for each row, targets [batch],", at)?;
            if target.dtype() != DType::I64 {
                let what = ErrorKind::WrongDType { found: target.dtype(), takes: "classes as i64: use .cast()" };
                return Err(TensorError::new("cross_entropy", what, at));
            }
            let (batch, count) = (self.shape()[0], target.shape()[0]);
            if batch != count {
                let why = format!("logits of {batch} examples, and targets of {count}");
                return Err(TensorError::new("cross_entropy", ErrorKind::BadArgument { why }, at));
            }
            // Counted from the end, a class below zero would be one of the last: it is moved out of the range instead.
            let classes = i64::try_from(self.shape()[1]).unwrap_or(i64::MAX);
            let class = Tensor::choose(&target.lt(0), &(target - classes), target, at);
            let right = self.log_softmax(1).gather(1, &class.unsqueeze(1));
            Ok(-right.mean(()))
        };
        asked_as("cross_entropy", at, made).unwrap_or_else(Tensor::holding)
    }

    /// Pieces of a size along an axis; the last may be smaller.
    #[track_caller]
    pub fn split(&self, size: usize, axis: isize) -> Vec<Tensor> {
        let at = Location::caller();
        match self.axis(axis, "split", at) {
            Err(error) => vec![Tensor::holding(error)],
            Ok(_) if size == 0 => {
                let why = "pieces of no elements".to_owned();
                vec![Tensor::failed("split", ErrorKind::BadArgument { why }, at)]
            }
            Ok(found) => {
                let along = self.shape()[found];
                (0..along).step_by(size).map(|start| self.narrow(axis, start, size.min(along - start))).collect()
            }
        }
    }

    /// The whole several times along each axis.
    #[track_caller]
    pub fn repeat(&self, times: &[usize]) -> Tensor {
        let at = Location::caller();
        let made = || {
            self.check()?;
            if times.len() != self.rank() || 2 * self.rank() > RANK_MAX {
                let most = RANK_MAX / 2;
                let why = format!(
                    "{} numbers for a tensor of shape {}; one for each axis is needed, of which there are at most {most}",
                    times.len(),
                    self.shape()
                );
                return Err(TensorError::new("repeat", ErrorKind::BadArgument { why }, at));
            }
            let shape = self.shape();
            let pairs = |first: &dyn Fn(usize) -> usize| -> Vec<usize> {
                (0..shape.rank()).flat_map(|axis| [first(axis), shape[axis]]).collect()
            };
            let spread = self.reshape_to(shape_of(&pairs(&|_| 1), "repeat", at)?, at);
            let spread = spread.expand_to(shape_of(&pairs(&|axis| times[axis]), "repeat", at)?, at);
            let sizes: Vec<usize> = shape.iter().zip(times).map(|(size, times)| size.saturating_mul(*times)).collect();
            Ok(spread.reshape_to(shape_of(&sizes, "repeat", at)?, at))
        };
        made().unwrap_or_else(Tensor::holding)
    }

    /// The largest elements along an axis, the largest first, and their indices.
    #[track_caller]
    pub fn topk(&self, count: usize, axis: isize) -> (Tensor, Tensor) {
        let index = self.argsort(axis, true).narrow(axis, 0, count);
        (self.gather(axis, &index), index)
    }

    /// The axes from one on as one axis.
    #[track_caller]
    pub fn flatten(&self, from: usize) -> Tensor {
        let at = Location::caller();
        if self.check().is_err() || from >= self.rank() {
            return self.clone();
        }
        let mut sizes = self.shape()[..from].to_vec();
        sizes.push(self.shape()[from..].iter().product());
        Shape::new(&sizes).map_or_else(|| self.clone(), |shape| self.reshape_to(shape, at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A convolution by its definition.
    fn expected(x: &Tensor, w: &Tensor, options: Convolution) -> Vec<f64> {
        let (image, filter) = (x.to_f64().unwrap(), w.to_f64().unwrap());
        let (xs, ws) = (x.shape(), w.shape());
        let Convolution { rows, columns, groups } = options;
        let out = |size: usize, filter: usize, window: Window| {
            (size + 2 * window.padding - (filter - 1) * window.dilation - 1) / window.stride + 1
        };
        let (high, wide) = (out(xs[2], ws[2], rows), out(xs[3], ws[3], columns));
        let (each, depth) = (ws[0] / groups, ws[1]);
        let mut all = Vec::new();
        for batch in 0..xs[0] {
            for f in 0..ws[0] {
                for r in 0..high {
                    for c in 0..wide {
                        let mut sum = 0.0;
                        for d in 0..depth {
                            for i in 0..ws[2] {
                                for j in 0..ws[3] {
                                    let row = (r * rows.stride + i * rows.dilation).checked_sub(rows.padding);
                                    let column =
                                        (c * columns.stride + j * columns.dilation).checked_sub(columns.padding);
                                    let inside =
                                        row.zip(column).filter(|(row, column)| *row < xs[2] && *column < xs[3]);
                                    if let Some((row, column)) = inside {
                                        let channel = f / each * depth + d;
                                        let at = ((batch * xs[1] + channel) * xs[2] + row) * xs[3] + column;
                                        sum += image[at] * filter[((f * depth + d) * ws[2] + i) * ws[3] + j];
                                    }
                                }
                            }
                        }
                        all.push(sum);
                    }
                }
            }
        }
        all
    }

    #[test]
    fn convolutions_are_what_they_are_defined_to_be() {
        let window = |stride, padding, dilation| Window { stride, padding, dilation };
        for (rows, columns, groups, channels, filters) in [
            (window(1, 0, 1), window(1, 0, 1), 1, 3, 4),
            (window(2, 1, 1), window(1, 2, 1), 1, 2, 3),
            (window(1, 2, 2), window(2, 0, 3), 2, 4, 6),
            (window(3, 0, 1), window(1, 1, 2), 4, 4, 4),
        ] {
            let x = Tensor::normal(&[2, channels, 9, 10], 1, DType::F64);
            let w = Tensor::normal(&[filters, channels / groups, 3, 2], 2, DType::F64);
            let options = Convolution { rows, columns, groups };
            let (found, expected) = (x.conv2d(&w, options).to_vec::<f64>().unwrap(), expected(&x, &w, options));
            assert_eq!(found.len(), expected.len());
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12), "{options:?}");
            // Transposed, it is what makes ⟨conv(x), y⟩ = ⟨x, transposed(y)⟩, where no element is left over.
            let y = x.conv2d(&w, options);
            let back = y.conv_transpose2d(&w, options);
            let sizes = back.shape();
            assert!(sizes[2] <= 9 && sizes[3] <= 10, "{sizes}");
            let padded = back.pad(&[0; 4], &[0, 0, 9 - sizes[2], 10 - sizes[3]]);
            let (left, right) = ((&y * &y).sum(()), (&x * padded).sum(()));
            let (left, right) = (left.item::<f64>().unwrap(), right.item::<f64>().unwrap());
            assert!((left - right).abs() < 1e-9 * left, "{left} and {right}: {options:?}");
        }
        let (x, w) = (Tensor::normal(&[2, 4, 20], 1, DType::F64), Tensor::normal(&[6, 2, 5], 2, DType::F64));
        let found = x.conv1d(&w, window(2, 1, 2), 2);
        let options = Convolution { rows: Window::default(), columns: window(2, 1, 2), groups: 2 };
        assert_eq!(found.shape()[..], [2, 6, 7]);
        let expected = expected(&x.unsqueeze(2), &w.unsqueeze(2), options);
        assert!(found.to_vec::<f64>().unwrap().iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12));
    }

    #[test]
    fn pools_tables_and_pieces() {
        let x = Tensor::arange(0, 16, 1, DType::F32).reshape(&[1, 1, 4, 4]);
        let two = Window { stride: 2, ..Window::default() };
        assert_eq!(x.max_pool2d_with(2, two).to_vec::<f32>().unwrap(), [5.0, 7.0, 13.0, 15.0]);
        assert_eq!(x.avg_pool2d_with(2, two).to_vec::<f32>().unwrap(), [2.5, 4.5, 10.5, 12.5]);
        let padded = (-&x - 1.0).max_pool2d_with(3, Window { stride: 3, padding: 1, dilation: 1 });
        assert_eq!(padded.to_vec::<f32>().unwrap(), [-1.0, -3.0, -9.0, -11.0]);
        let table = Tensor::arange(0, 6, 1, DType::F32).reshape(&[3, 2]);
        let index = Tensor::from_slice(&[2_i64, 0, 0, 1], &[2, 2]);
        assert_eq!(table.embedding(&index).to_vec::<f32>().unwrap(), [4.0, 5.0, 0.0, 1.0, 0.0, 1.0, 2.0, 3.0]);
        let pieces = table.split(2, 0);
        assert_eq!(pieces.iter().map(|piece| piece.shape()[0]).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(table.repeat(&[1, 2]).to_vec::<f32>().unwrap()[..4], [0.0, 1.0, 0.0, 1.0]);
        let (values, index) = Tensor::from_slice(&[3.0_f32, 9.0, 1.0, 9.0], &[4]).topk(3, 0);
        assert_eq!(values.to_vec::<f32>().unwrap(), [9.0, 9.0, 3.0]);
        assert_eq!(index.to_vec::<i64>().unwrap(), [1, 3, 0]);
        let kept = Tensor::ones(&[10_000], DType::F32).dropout(0.25, 9);
        let zeros = kept.eq(0).sum(()).item::<i64>().unwrap();
        assert!((2_300..2_700).contains(&zeros), "{zeros}");
        assert!((kept.mean(()).item::<f32>().unwrap() - 1.0).abs() < 0.03);
        let normal = Tensor::normal(&[8, 3, 5], 4, DType::F64) * 3.0 + 2.0;
        let of = |value: f64| Tensor::full(&[3], value, DType::F64);
        let (mean, variance) = (normal.mean([0, 2]), normal.var([0, 2], 0));
        let normed = normal.batch_norm(&mean, &variance, &of(2.0), &of(1.0), 0.0);
        assert!((normed.mean([0, 2]) - 1.0).abs().max(()).item::<f64>().unwrap() < 1e-12);
        assert!((normed.var([0, 2], 0) - 4.0).abs().max(()).item::<f64>().unwrap() < 1e-12);
    }

    #[test]
    fn attention_and_losses() {
        let (q, k) = (Tensor::normal(&[2, 3, 4], 1, DType::F64), Tensor::normal(&[2, 5, 4], 2, DType::F64));
        let v = Tensor::normal(&[2, 5, 6], 3, DType::F64);
        let weights = (q.matmul(&k.t()) / 2.0).softmax(-1);
        let difference = q.attention(&k, &v, false) - weights.matmul(&v);
        assert!(difference.abs().max(()).item::<f64>().unwrap() < 1e-12);
        // With a mask, the first of three queries over five keys sees three of them.
        let first = q.narrow(1, 0, 1).attention(&k.narrow(1, 0, 3), &v.narrow(1, 0, 3), false);
        let difference = q.attention(&k, &v, true).narrow(1, 0, 1) - first;
        assert!(difference.abs().max(()).item::<f64>().unwrap() < 1e-12);
        let logits = Tensor::from_slice(&[1.0_f64, 2.0, 3.0, 1.0, 1.0, 1.0], &[2, 3]);
        let loss = logits.cross_entropy(&Tensor::from_slice(&[2_i64, 0], &[2])).item::<f64>().unwrap();
        let truth = (((1.0_f64).exp() + (2.0_f64).exp() + (3.0_f64).exp()).ln() - 3.0 + 3.0_f64.ln()) / 2.0;
        assert!((loss - truth).abs() < 1e-12, "{loss}");
        let sure = Tensor::from_slice(&[800.0_f64, -800.0], &[2]);
        let target = Tensor::from_slice(&[1.0_f64, 0.0], &[2]);
        assert_eq!(sure.binary_cross_entropy(&target).item::<f64>().unwrap(), 0.0);
        assert_eq!(sure.mse_loss(&sure).item::<f64>().unwrap(), 0.0);
    }

    #[test]
    fn single_precision_computes_what_double_precision_does() {
        // Kernels are others: vectors of sixteen, pairs, windows that are folded in registers.
        let mut seed = 1;
        let mut random = |sizes: &[usize]| {
            seed += 1;
            Tensor::normal(sizes, seed, DType::F64)
        };
        let window = |stride, padding, dilation| Window { stride, padding, dilation };
        for (size, filter, rows, columns, pool) in [
            ([3, 2, 9, 40], [4, 2, 3, 5], window(1, 0, 1), window(1, 0, 1), window(2, 0, 1)),
            ([2, 3, 20, 21], [5, 3, 2, 3], window(2, 1, 1), window(1, 2, 2), window(2, 0, 1)),
            ([1, 1, 36, 70], [2, 1, 1, 7], window(1, 0, 1), window(1, 3, 1), window(2, 1, 1)),
            ([2, 2, 12, 13], [3, 2, 3, 3], window(1, 2, 3), window(2, 1, 1), window(3, 1, 1)),
        ] {
            let (images, filters) = (random(&size), random(&filter));
            let of = |dtype: DType| {
                let both = [images.cast(dtype).with_grad(), filters.cast(dtype).with_grad()];
                let maps = both[0].conv2d(&both[1], Convolution { rows, columns, groups: 1 });
                let pooled = maps.relu().max_pool2d_with(pool.stride, pool) + maps.avg_pool2d_with(pool.stride, pool);
                let gradients = crate::autograd::grad(&pooled.square().sum(()), &[&both[0], &both[1]]).unwrap();
                [pooled, gradients[0].clone(), gradients[1].clone()].map(|tensor| tensor.to_f64().unwrap())
            };
            for (single, double) in of(DType::F32).iter().zip(&of(DType::F64)) {
                let scale = double.iter().fold(1.0_f64, |most, x| most.max(x.abs()));
                let error = single.iter().zip(double).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(
                    single.len() == double.len() && error < 2e-5 * scale,
                    "{size:?} {filter:?}: {error} of {scale}"
                );
            }
        }
    }

    #[test]
    fn large_results_are_whole_though_written_past_the_caches() {
        for (rows, columns) in [(2900, 2901), (8_400_000, 1), (8400, 1000)] {
            let (a, b) =
                (Tensor::uniform(&[rows, columns], 1, DType::F32), Tensor::uniform(&[1, columns], 2, DType::F32));
            Tensor::realize_all(&[&a, &b]).unwrap();
            let found = (&a * 2.0 + &b).to_vec::<f32>().unwrap();
            let (a, b) = (a.to_vec::<f32>().unwrap(), b.to_vec::<f32>().unwrap());
            let expected = |n: usize| a[n] * 2.0 + b[n % columns];
            assert_eq!((0..found.len()).find(|n| found[*n] != expected(*n)), None, "{rows} {columns}");
        }
    }

    #[test]
    fn what_lies_the_other_way_round_is_turned_in_blocks() {
        // Whole blocks and what is left of them; alone, with something that lies straight, and with numbers of places.
        for (rows, columns) in [(64_usize, 64_usize), (70, 131), (1, 9000), (200, 33), (35, 700)] {
            let count = i64::try_from(rows * columns).unwrap();
            let shape = [rows.cast_signed(), columns.cast_signed()];
            for dtype in [DType::F32, DType::F64, DType::I32, DType::U8, DType::F16] {
                let a = (Tensor::arange(0, count, 1, DType::I64) % 101).cast(dtype).reshape(&shape);
                a.realize().unwrap();
                let expected = |n: usize| (((n % rows) * columns + n / rows) % 101) as f64;
                let turned = a.t().contiguous().to_f64().unwrap();
                assert_eq!((0..turned.len()).find(|n| turned[*n] != expected(*n)), None, "{rows} {columns} {dtype}");
                let straight = a.reshape(&[shape[1], shape[0]]);
                let both = (straight.cast(DType::F64) + a.t().cast(DType::F64)) * 2.0;
                let places = Tensor::arange(0, count, 1, DType::I64).reshape(&[shape[1], shape[0]]).cast(DType::F64);
                let sums = (both + places).to_f64().unwrap();
                let sum = |n: usize| ((n % 101) as f64 + expected(n)) * 2.0 + n as f64;
                assert_eq!((0..sums.len()).find(|n| sums[*n] != sum(*n)), None, "{rows} {columns} {dtype}, a sum");
            }
        }
    }
}
