//! Walks over the points of an index space with the positions that several layouts have for them. Axes that lie behind
//! each other in all layouts are one, so that inner loops are long, and nothing is divided for a point: dividing for
//! each axis of each element was half of the step of an MLP that chooses its batch by `index_select`.

use std::ops::Range;

use super::threads::parallel;
use crate::shape::RANK_MAX;

/// Elements that are worth a thread.
pub(super) const CHUNK: usize = 16 << 10;

/// Points by rows, for `N` layouts at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Walk<const N: usize> {
    /// At least one, of which the last is along the rows.
    rank: usize,
    sizes: [usize; RANK_MAX],
    strides: [[isize; N]; RANK_MAX],
    start: [isize; N],
}

impl<const N: usize> Walk<N> {
    /// Of axes with their sizes and strides, the outermost first.
    pub(super) fn new(start: [isize; N], axes: impl Iterator<Item = (usize, [isize; N])>) -> Walk<N> {
        let mut walk = Walk { rank: 0, sizes: [1; RANK_MAX], strides: [[0; N]; RANK_MAX], start };
        for (size, strides) in axes.filter(|(size, _)| *size != 1) {
            let is_behind = walk
                .rank
                .checked_sub(1)
                .filter(|last| (0..N).all(|n| walk.strides[*last][n] == strides[n].wrapping_mul(size.cast_signed())));
            let at = is_behind.unwrap_or(walk.rank);
            walk.sizes[at] *= size;
            walk.strides[at] = strides;
            walk.rank = at + 1;
        }
        walk.rank = walk.rank.max(1);
        walk
    }

    pub(super) fn rows(&self) -> usize {
        self.sizes[..self.rank - 1].iter().product()
    }

    /// Points of a row.
    pub(super) fn len(&self) -> usize {
        self.sizes[self.rank - 1]
    }

    /// From one point of a row to the next.
    pub(super) fn steps(&self) -> [isize; N] {
        self.strides[self.rank - 1]
    }

    /// The same from somewhere else.
    pub(super) fn from(mut self, start: [isize; N]) -> Walk<N> {
        self.start = start;
        self
    }

    /// Calls with the positions of each row's first point.
    #[inline(always)]
    pub(super) fn each_row(&self, rows: Range<usize>, mut work: impl FnMut([isize; N])) {
        let outer = self.rank - 1;
        let mut index = [0_usize; RANK_MAX];
        let mut at = self.start;
        let mut rest = rows.start;
        for axis in (0..outer).rev() {
            index[axis] = rest % self.sizes[axis].max(1);
            rest /= self.sizes[axis].max(1);
            (0..N).for_each(|n| at[n] += index[axis].cast_signed() * self.strides[axis][n]);
        }
        for _ in rows {
            work(at);
            for axis in (0..outer).rev() {
                index[axis] += 1;
                (0..N).for_each(|n| at[n] += self.strides[axis][n]);
                if index[axis] < self.sizes[axis] {
                    break;
                }
                (0..N).for_each(|n| at[n] -= index[axis].cast_signed() * self.strides[axis][n]);
                index[axis] = 0;
            }
        }
    }

    /// Shares all rows between threads, long ones in pieces: calls with positions and how many points there are.
    pub(super) fn share(&self, work: &(dyn Fn([isize; N], usize) + Sync)) {
        let (rows, len, steps) = (self.rows(), self.len(), self.steps());
        if rows == 0 || len == 0 {
            return;
        }
        let pieces = len.div_ceil(CHUNK);
        let at_once = (CHUNK / len).max(1);
        parallel(rows.div_ceil(at_once) * pieces, &|item| {
            let (first, piece) = (item / pieces * at_once, item % pieces);
            let (begin, end) = (piece * len / pieces, (piece + 1) * len / pieces);
            self.each_row(first..(first + at_once).min(rows), |mut at| {
                (0..N).for_each(|n| at[n] += begin.cast_signed() * steps[n]);
                work(at, end - begin);
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn every_point_is_met_once_whatever_axes_are_one() {
        for (sizes, strides) in [
            (vec![], vec![]),
            (vec![5], vec![[1, 2]]),
            (vec![3, 1, 4], vec![[4, 4], [7, 9], [1, 1]]),
            (vec![3, 4, 5], vec![[20, 0], [5, 0], [1, 1]]),
            (vec![2, 3, 4], vec![[1, -12], [2, 4], [6, 1]]),
            (vec![2, 40_000], vec![[40_000, 1], [1, 2]]),
            (vec![2, 0, 3], vec![[0, 3], [3, 3], [1, 1]]),
        ] {
            let walk = Walk::new([100, 100], sizes.iter().copied().zip(strides.iter().copied()));
            let found = Mutex::new(Vec::new());
            walk.share(&|at, count| {
                let step = walk.steps();
                let points = (0..count.cast_signed()).map(|n| [at[0] + n * step[0], at[1] + n * step[1]]);
                found.lock().extend(points);
            });
            let mut expected = vec![[100, 100]];
            for (size, stride) in sizes.iter().zip(&strides) {
                let along = |from: &[isize; 2]| {
                    let from = *from;
                    (0..size.cast_signed()).map(move |n| [from[0] + n * stride[0], from[1] + n * stride[1]])
                };
                expected = expected.iter().flat_map(along).collect();
            }
            let mut found = found.into_inner();
            found.sort_unstable();
            expected.sort_unstable();
            assert_eq!(found, expected, "{sizes:?} {strides:?}");
        }
    }
}
