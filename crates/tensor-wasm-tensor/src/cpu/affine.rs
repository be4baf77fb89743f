//! Sums, products, quotients and roots of floats together with the numbers around them, in one pass over a tile. Each
//! operation is rounded by itself, so the result is that of one pass for each of them: `1.0 * x` and `x + -0.0` are
//! `x`, whatever it is, and a difference is the sum with what is negated.
#![expect(unsafe_code, reason = "tiles are parts of buffers that other threads use too")]

use super::tile::{FloatNumber, LANES, TileArgs};
use crate::graph::op::UnaryOp;

/// Which operation the numbers are around.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AffineOp {
    Add,
    Mul,
    Div,
    /// Of the first operand.
    Sqrt,
    /// The first operand as it is.
    Same,
}

/// What is done besides the operation. Numbers that are not there are those that change nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Around {
    /// Operands are multiplied first, each by its own number.
    pub is_scaled: bool,
    /// The result is multiplied, and two numbers are added one after the other.
    pub is_shifted: bool,
}

/// The numbers, as `c` of [`TileArgs`] points to them: by what the first and the second operand are multiplied, by what
/// the result is, and what is added to it.
pub(crate) const NUMBERS: usize = 5;

/// Bytes from one number to the next.
pub(crate) const NUMBER_BYTES: usize = 8;

/// # Safety
///
/// As for [`super::tile::run`], but that the result may be exactly where an operand is: as many elements as are written
/// at once are read before.
#[inline(always)]
pub(super) unsafe fn affine<T: FloatNumber>(op: AffineOp, around: Around, args: &TileArgs) {
    // SAFETY: the caller's promise.
    unsafe {
        match (around.is_scaled, around.is_shifted) {
            (false, false) => each::<T, false, false>(op, args),
            (false, true) => each::<T, false, true>(op, args),
            (true, false) => each::<T, true, false>(op, args),
            (true, true) => each::<T, true, true>(op, args),
        }
    }
}

#[inline(always)]
unsafe fn each<T: FloatNumber, const SCALED: bool, const SHIFTED: bool>(op: AffineOp, args: &TileArgs) {
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            AffineOp::Add => pairs::<T, SCALED, SHIFTED>(args, T::plus),
            AffineOp::Mul => pairs::<T, SCALED, SHIFTED>(args, T::times),
            AffineOp::Div => pairs::<T, SCALED, SHIFTED>(args, T::over),
            AffineOp::Sqrt => pairs::<T, SCALED, SHIFTED>(args, |a, _| a.unary(UnaryOp::Sqrt)),
            AffineOp::Same => pairs::<T, SCALED, SHIFTED>(args, |a, _| a),
        }
    }
}

#[inline(always)]
unsafe fn pairs<T: FloatNumber, const SCALED: bool, const SHIFTED: bool>(args: &TileArgs, f: impl Fn(T, T) -> T) {
    // SAFETY: there are so many numbers.
    let number = |n: usize| unsafe { args.c.add(n * NUMBER_BYTES).cast::<T>().read() };
    let [left, right, by, first, second]: [T; NUMBERS] = std::array::from_fn(number);
    let one = |a: T, b: T| {
        let made = if SCALED { f(a.times(left), b.times(right)) } else { f(a, b) };
        if SHIFTED { made.times(by).plus(first).plus(second) } else { made }
    };
    let (to, a, b) = (args.to.cast::<T>(), args.a.cast::<T>(), args.b.cast::<T>());
    let mut i = 0;
    // SAFETY: `i` stays below `n`, and so many elements are there. They need not be aligned.
    unsafe {
        while i + LANES <= args.n {
            let a = a.add(i).cast::<[T; LANES]>().read_unaligned();
            let b = b.add(i).cast::<[T; LANES]>().read_unaligned();
            let mut made = [T::default(); LANES];
            for n in 0..LANES {
                made[n] = one(a[n], b[n]);
            }
            to.add(i).cast::<[T; LANES]>().write_unaligned(made);
            i += LANES;
        }
        while i < args.n {
            to.add(i).write_unaligned(one(a.add(i).read_unaligned(), b.add(i).read_unaligned()));
            i += 1;
        }
    }
}
