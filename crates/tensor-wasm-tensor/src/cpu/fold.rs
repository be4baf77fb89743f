//! Puts windows back into the axes they are from, and sums up where they overlap: what the gradient of a convolution
//! does.
#![expect(unsafe_code, reason = "threads write parts of one result")]

use super::special::{Number, Special, position};
use super::threads::parallel;
use super::walk::{CHUNK, Walk};
use crate::graph::op::FoldedAxis;
use crate::shape::Shape;

fn signed(size: usize) -> isize {
    isize::try_from(size).unwrap_or(isize::MAX)
}

pub(super) fn fold<T: Number>(run: &Special<'_>, last: FoldedAxis, before: Option<FoldedAxis>) {
    let input = &run.inputs[0];
    let (elements, shape) = (input.elements::<T>(), input.layout.shape);
    let strides = run.shape.strides();
    // What lies before the axes is folded apart from each other.
    let axis = before.map_or(last.axis, |before| before.axis.min(last.axis));
    let apart = Shape::new(&shape[..axis]).unwrap_or(Shape::SCALAR);
    let (count, own): (usize, usize) = (apart.numel(), run.shape[axis..].iter().product());
    // Axes of the input with their strides in the result.
    let mut to = strides;
    for (n, folded) in [Some(last), before].into_iter().flatten().enumerate() {
        to[shape.rank() - 1 - n] = strides[folded.axis] * signed(folded.dilation);
        to[folded.axis] = strides[folded.axis] * signed(folded.step);
    }
    let along = |other: usize| (shape[other], [to[other], input.layout.strides()[other]]);
    let mut inner: Vec<(usize, [isize; 2])> = (axis..shape.rank()).map(along).collect();
    let inner_count: usize = inner.iter().map(|(size, _)| size).product();
    // The longest as the rows: windows are short. By the shape alone, or the order of sums would depend on layouts.
    inner.sort_by_key(|(size, _)| *size);
    let walk = Walk::new([0, 0], inner.into_iter());
    let ([to_step, from_step], rows) = (walk.steps(), if inner_count == 0 { 0 } else { walk.rows() });
    let at_once = (CHUNK / inner_count.max(1)).max(1);
    #[cfg(target_arch = "x86_64")]
    let images = images::<T>(run, last, before);
    parallel(count.div_ceil(at_once), &|item| {
        for n in item * at_once..((item + 1) * at_once).min(count) {
            let from = signed(position(&input.layout, &apart, n));
            #[cfg(target_arch = "x86_64")]
            if let Some(images) = &images {
                let (from, to) = (elements.as_ptr().wrapping_offset(from), run.to.0.cast::<T>().wrapping_add(n * own));
                // SAFETY: the instructions are there, the layout stays inside of what is read, and this part of the
                // result is nobody else's.
                unsafe { images.fold(from.cast(), to.cast()) };
                continue;
            }
            run.to.clear::<T>(n * own, own);
            walk.from([signed(n * own), from]).each_row(0..rows, |[to, from]| {
                run.to.add(to, to_step, (elements, from, from_step), walk.len());
            });
        }
    });
}

/// Windows of images in single precision, whose columns lie together.
#[cfg(target_arch = "x86_64")]
struct Images {
    high: usize,
    wide: usize,
    rows: Windows,
    columns: Windows,
}

/// The windows along one axis: how many, and of how many elements; and how far they are apart in what is read.
#[cfg(target_arch = "x86_64")]
struct Windows {
    folded: FoldedAxis,
    count: usize,
    size: usize,
    stride: isize,
    size_stride: isize,
}

/// What is folded, if there is a quick way.
#[cfg(target_arch = "x86_64")]
fn images<T: Number>(run: &Special<'_>, last: FoldedAxis, before: Option<FoldedAxis>) -> Option<Images> {
    let (rank, layout) = (run.shape.rank(), &run.inputs[0].layout);
    let rows = before.filter(|rows| (rows.axis + 2, last.axis + 1) == (rank, rank))?;
    let windows = |folded: FoldedAxis, window: usize| Windows {
        folded,
        count: layout.shape[folded.axis],
        size: layout.shape[window],
        stride: layout.strides()[folded.axis],
        size_stride: layout.strides()[window],
    };
    let (rows, columns) = (windows(rows, rank), windows(last, rank + 1));
    let is_single = T::DTYPE == crate::dtype::DType::F32 && super::tile::has_avx512();
    let lies = last.step == 1 && (columns.stride == 1 || columns.count == 1);
    let images = Images { high: run.shape[rank - 2], wide: run.shape[rank - 1], rows, columns };
    (is_single && lies).then_some(images)
}

/// The first so many of sixteen.
#[cfg(target_arch = "x86_64")]
fn lanes_below(count: usize) -> u16 {
    if count == 0 { 0 } else { u16::MAX >> (16 - count) }
}

#[cfg(target_arch = "x86_64")]
impl Images {
    /// One image. A row of the result stays in registers until all windows are in it, and is written once: adding rows
    /// in memory would wait for each store before the next load.
    ///
    /// # Safety
    ///
    /// The instructions are there, and so are all elements that windows have, and room for the image.
    #[target_feature(enable = "avx512f")]
    unsafe fn fold(&self, from: *const f32, to: *mut f32) {
        use std::arch::x86_64::*;
        let Images { high, wide, rows, columns } = self;
        for first in (0..*wide).step_by(16) {
            let lanes = (wide - first).min(16);
            for y in 0..*high {
                let mut sum = _mm512_setzero_ps();
                for i in 0..rows.size {
                    let Some(at) = y.checked_sub(i * rows.folded.dilation) else { break };
                    let row = at / rows.folded.step;
                    if !at.is_multiple_of(rows.folded.step) || row >= rows.count {
                        continue;
                    }
                    let row = from.wrapping_offset(signed(row) * rows.stride + signed(i) * rows.size_stride);
                    for j in 0..columns.size {
                        // Columns from `shift` on are in the window; of these, as many as there are here.
                        let shift = j * columns.folded.dilation;
                        let begin = shift.saturating_sub(first).min(lanes);
                        let end = (shift + columns.count).saturating_sub(first).min(lanes);
                        let mask = lanes_below(end) & !lanes_below(begin);
                        let place = signed(first) - signed(shift) + signed(j) * columns.size_stride;
                        // SAFETY: only lanes that the window has are read.
                        let window = unsafe { _mm512_maskz_loadu_ps(mask, row.wrapping_offset(place)) };
                        sum = _mm512_add_ps(sum, window);
                    }
                }
                // SAFETY: there is room for the image.
                unsafe { _mm512_mask_storeu_ps(to.add(y * wide + first), 0xffff >> (16 - lanes), sum) };
            }
        }
    }
}
