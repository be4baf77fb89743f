//! Shapes, and layouts: how the elements of a tensor lie in a buffer. Strides are signed and count elements, so that
//! transposing, slicing, flipping and broadcasting only make another layout.

use std::ops::Deref;

/// Axes of a tensor.
pub const RANK_MAX: usize = 8;

/// Elements along each axis.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    rank: u8,
    /// Beyond the rank they are 1, so that equal shapes are equal.
    sizes: [usize; RANK_MAX],
}

impl Shape {
    pub const SCALAR: Shape = Shape { rank: 0, sizes: [1; RANK_MAX] };

    /// None if there are more than [`RANK_MAX`] axes.
    pub fn new(sizes: &[usize]) -> Option<Shape> {
        let mut shape = Shape::SCALAR;
        shape.sizes.get_mut(..sizes.len())?.copy_from_slice(sizes);
        shape.rank = u8::try_from(sizes.len()).ok()?;
        Some(shape)
    }

    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }

    /// None if nothing could hold so many elements of eight bytes.
    pub fn checked_numel(&self) -> Option<usize> {
        // Zero elements are zero, whatever the other axes are; what a stride is computed from must still fit.
        let product = self.iter().try_fold(1_usize, |product, size| product.checked_mul((*size).max(1)))?;
        let limit = isize::MAX.unsigned_abs() / 8;
        (product <= limit).then(|| if self.contains(&0) { 0 } else { product })
    }

    /// How many elements a shape has that was checked when it was made.
    pub fn numel(&self) -> usize {
        self.iter().product()
    }

    /// The same with another size of one axis.
    pub fn with(mut self, axis: usize, size: usize) -> Shape {
        self.sizes[..usize::from(self.rank)][axis] = size;
        self
    }

    /// The shape of two that are broadcast against each other; none if they cannot be.
    pub fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let rank = self.rank().max(other.rank());
        let mut shape = Shape { rank: self.rank.max(other.rank), sizes: [1; RANK_MAX] };
        for axis in 0..rank {
            let of = |shape: &Shape| (axis + shape.rank()).checked_sub(rank).map_or(1, |axis| shape[axis]);
            shape.sizes[axis] = match (of(self), of(other)) {
                (a, b) if a == b => a,
                (1, b) => b,
                (a, 1) => a,
                _ => return None,
            };
        }
        Some(shape)
    }

    /// Strides of elements that lie one after the other.
    pub(crate) fn strides(&self) -> [isize; RANK_MAX] {
        let mut strides = [0; RANK_MAX];
        let mut next = 1_isize;
        for axis in (0..self.rank()).rev() {
            strides[axis] = next;
            next = next.wrapping_mul(isize::try_from(self[axis].max(1)).unwrap_or(isize::MAX));
        }
        strides
    }
}

impl Deref for Shape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.sizes[..usize::from(self.rank)]
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.deref().fmt(f)
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.deref())
    }
}

/// A set of axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct AxisSet(u8);

impl AxisSet {
    pub(crate) fn of<const N: usize>(axes: [usize; N]) -> AxisSet {
        let mut set = AxisSet::default();
        axes.into_iter().for_each(|axis| {
            set.insert(axis);
        });
        set
    }

    pub(crate) fn insert(&mut self, axis: usize) -> bool {
        let is_new = !self.contains(axis);
        self.0 |= 1 << axis;
        is_new
    }

    pub(crate) fn contains(self, axis: usize) -> bool {
        self.0 >> axis & 1 == 1
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn bits(self) -> u64 {
        u64::from(self.0)
    }
}

/// Where the element at each index lies, counted in elements from the beginning of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub shape: Shape,
    strides: [isize; RANK_MAX],
    pub offset: isize,
}

/// A size as the distance that it is. Shapes are checked when they are made.
fn signed(size: usize) -> isize {
    isize::try_from(size).unwrap_or(isize::MAX)
}

impl Layout {
    pub(crate) fn contiguous(shape: Shape) -> Layout {
        Layout { shape, strides: shape.strides(), offset: 0 }
    }

    /// Any strides. None if there are not as many as axes.
    #[cfg(feature = "ndarray")]
    pub(crate) fn strided(shape: Shape, strides: &[isize], offset: isize) -> Option<Layout> {
        let mut all = [0; RANK_MAX];
        all.get_mut(..shape.rank()).filter(|own| own.len() == strides.len())?.copy_from_slice(strides);
        Some(Layout { shape, strides: all, offset })
    }

    pub(crate) fn strides(&self) -> &[isize] {
        &self.strides[..self.shape.rank()]
    }

    /// Whether the elements lie one after the other from the beginning of the buffer.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.offset == 0 && self.has_strides(&self.shape.strides())
    }

    /// Whether it has these strides, but for axes along which there is nothing to step over.
    pub(crate) fn has_strides(&self, strides: &[isize]) -> bool {
        let axes = self.shape.iter().zip(self.strides()).zip(strides);
        self.shape.contains(&0) || axes.into_iter().all(|((size, own), other)| *size == 1 || own == other)
    }

    pub(crate) fn permute(&self, axes: &[usize]) -> Layout {
        let mut moved = *self;
        for (to, from) in axes.iter().enumerate() {
            moved.shape = moved.shape.with(to, self.shape[*from]);
            moved.strides[to] = self.strides[*from];
        }
        moved
    }

    /// Repeats along new axes in front and along those of size 1. The shapes were checked.
    pub(crate) fn expand(&self, shape: Shape) -> Layout {
        let new = shape.rank() - self.shape.rank();
        let mut strides = [0; RANK_MAX];
        for (axis, (size, stride)) in self.shape.iter().zip(self.strides()).enumerate() {
            strides[new + axis] = if *size == 1 { 0 } else { *stride };
        }
        Layout { shape, strides, offset: self.offset }
    }

    /// Every `step`th element along an axis from `start` on, `len` of them.
    pub(crate) fn slice(&self, axis: usize, start: usize, step: isize, len: usize) -> Layout {
        let stride = self.strides[axis];
        let mut sliced = Layout { shape: self.shape.with(axis, len), ..*self };
        // Along an axis of one element the stride is never used, however large.
        sliced.strides[axis] = stride.wrapping_mul(step);
        if len > 0 {
            sliced.offset += signed(start) * stride;
        }
        sliced
    }

    /// Windows along an axis: where there were elements, there are windows, and their elements are a new last axis.
    pub(crate) fn windows(
        &self,
        axis: usize,
        size: usize,
        step: usize,
        dilation: usize,
        count: usize,
    ) -> Option<Layout> {
        let mut sizes = [1; RANK_MAX];
        let rank = self.shape.rank();
        *sizes.get_mut(rank)? = size;
        sizes[..rank].copy_from_slice(&self.shape);
        sizes[axis] = count;
        let mut strides = self.strides;
        strides[rank] = strides[axis].wrapping_mul(signed(dilation));
        strides[axis] = strides[axis].wrapping_mul(signed(step));
        Some(Layout { shape: Shape::new(&sizes[..=rank])?, strides, offset: self.offset })
    }

    /// The same elements in the same order under another shape, if one set of strides can say that.
    pub(crate) fn reshape(&self, shape: Shape) -> Option<Layout> {
        if self.shape.contains(&0) {
            return Some(Layout { shape, strides: shape.strides(), offset: 0 });
        }
        let (merged, count) = self.merged();
        let mut strides = [0; RANK_MAX];
        // From the last axis to the first, each of the new axes takes its part of an old one.
        let mut old = merged[..count].iter().rev();
        let (mut left, mut stride) = (1, 0);
        for axis in (0..shape.rank()).rev() {
            let size = shape[axis];
            if size == 1 {
                continue;
            }
            if left == 1 {
                (left, stride) = *old.next()?;
            }
            if left % size != 0 {
                return None;
            }
            strides[axis] = stride;
            stride *= signed(size);
            left /= size;
        }
        (left == 1).then_some(Layout { shape, strides, offset: self.offset })
    }

    /// Its axes, those of size 1 left out and those that continue each other made one.
    fn merged(&self) -> ([(usize, isize); RANK_MAX], usize) {
        let mut merged = [(1, 0); RANK_MAX];
        let mut count = 0;
        for (size, stride) in self.shape.iter().zip(self.strides()).filter(|(size, _)| **size != 1) {
            match merged[..count].last_mut() {
                Some((last, step)) if *step == stride * signed(*size) => (*last, *step) = (*last * size, *stride),
                _ => {
                    merged[count] = (*size, *stride);
                    count += 1;
                }
            }
        }
        (merged, count)
    }

    /// Every element's position, in row-major order.
    pub(crate) fn for_each_position(&self, mut each: impl FnMut(usize)) {
        let mut index = [0_usize; RANK_MAX];
        let mut position = self.offset;
        for _ in 0..self.shape.numel() {
            each(position.unsigned_abs());
            // The next one, the last axis first.
            for axis in (0..self.shape.rank()).rev() {
                index[axis] += 1;
                position = position.wrapping_add(self.strides[axis]);
                if index[axis] < self.shape[axis] {
                    break;
                }
                position = position.wrapping_sub(self.strides[axis].wrapping_mul(signed(self.shape[axis])));
                index[axis] = 0;
            }
        }
    }

    /// The first and the last element of the buffer that it reaches; none if it has no elements.
    pub(crate) fn reach(&self) -> Option<(isize, isize)> {
        if self.shape.contains(&0) {
            return None;
        }
        let mut reach = (self.offset, self.offset);
        for (size, stride) in self.shape.iter().zip(self.strides()) {
            let far = signed(size - 1) * stride;
            if far < 0 {
                reach.0 += far;
            } else {
                reach.1 += far;
            }
        }
        Some(reach)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(sizes: &[usize]) -> Shape {
        Shape::new(sizes).unwrap()
    }

    /// The positions of all elements, in order.
    fn positions(layout: &Layout) -> Vec<isize> {
        let mut all = vec![layout.offset];
        for (size, stride) in layout.shape.iter().zip(layout.strides()) {
            all = all.iter().flat_map(|at| (0..signed(*size)).map(move |n| at + n * stride)).collect();
        }
        all
    }

    #[test]
    fn shapes_broadcast_as_they_do_everywhere() {
        for (a, b, both) in [
            (&[2, 3][..], &[3][..], Some(&[2, 3][..])),
            (&[2, 1], &[1, 3], Some(&[2, 3])),
            (&[], &[4, 0], Some(&[4, 0])),
            (&[1], &[0], Some(&[0])),
            (&[2], &[3], None),
            (&[2, 3], &[2], None),
        ] {
            let (a, b) = (shape(a), shape(b));
            assert_eq!(a.broadcast(&b), both.map(shape), "{a} and {b}");
            assert_eq!(b.broadcast(&a), both.map(shape), "{b} and {a}");
        }
        assert_eq!(Shape::new(&[1; 9]), None);
        assert_eq!(shape(&[1 << 32, 1 << 31]).checked_numel(), None);
        assert_eq!(shape(&[0, 1 << 62, 1 << 62]).checked_numel(), None);
        assert_eq!(shape(&[0, 7]).checked_numel(), Some(0));
    }

    #[test]
    fn a_reshaped_layout_has_the_same_elements_in_the_same_order() {
        let base = Layout::contiguous(shape(&[4, 6, 5]));
        let views = [
            base,
            base.permute(&[1, 0, 2]),
            base.permute(&[2, 1, 0]),
            base.slice(1, 1, 2, 3),
            base.slice(0, 3, -1, 4),
            base.slice(2, 0, 1, 1).expand(shape(&[4, 6, 3])),
            base.windows(1, 3, 1, 1, 4).unwrap(),
        ];
        let mut done = 0;
        for view in views {
            let count = view.shape.numel();
            for a in 1..=count {
                for b in (1..=count / a).filter(|b| count.is_multiple_of(a * b)) {
                    let target = shape(&[a, b, count / a / b]);
                    if let Some(reshaped) = view.reshape(target) {
                        assert_eq!(positions(&reshaped), positions(&view), "{view:?} as {target}");
                        done += 1;
                    }
                }
            }
        }
        assert!(done > 100, "{done}");
        // What no strides can say.
        assert_eq!(base.permute(&[1, 0, 2]).reshape(shape(&[120])), None);
        // And what they can.
        assert!(base.permute(&[1, 0, 2]).reshape(shape(&[3, 2, 4, 1, 5])).is_some());
        assert_eq!(base.slice(0, 3, -1, 4).reshape(shape(&[4, 30])).unwrap().strides(), [-30, 1]);
    }
}
