//! The operations of fused kernels, each a loop over one tile of elements that stays in the first-level cache. The
//! loops are written once and compiled for several sets of vector instructions; which one runs is decided when the
//! first kernel does. A result never overlaps an operand, so that the compiler makes vectors without asking.
#![expect(
    unsafe_code,
    reason = "tiles are parts of buffers that other threads use too; instruction sets are chosen at run time"
)]

use std::mem::MaybeUninit;
use std::sync::LazyLock;

use super::affine::{AffineOp, Around, affine};
use super::math::{self, Float};
use crate::dtype::DType;
use crate::graph::op::{BinaryOp, ReduceOp, UnaryOp};

/// Sums that are kept side by side: four of the widest vectors, as many as hide the latency of an addition. With half
/// of them the compiler unrolls the loop over lanes before it makes vectors of it, and sums take twice as long.
pub(super) const LANES: usize = 64;

/// What elements are computed as. Half precision is computed in single precision, truth in bytes of 0 and 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    U8,
    I32,
    I64,
    F32,
    F64,
}

impl Class {
    pub(crate) fn of(dtype: DType) -> Class {
        match dtype {
            DType::Bool | DType::U8 => Class::U8,
            DType::I32 => Class::I32,
            DType::I64 => Class::I64,
            DType::F16 | DType::BF16 | DType::F32 => Class::F32,
            DType::F64 => Class::F64,
        }
    }

    pub(crate) fn size(self) -> usize {
        match self {
            Class::U8 => 1,
            Class::I32 | Class::F32 => 4,
            Class::I64 | Class::F64 => 8,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileOp {
    Unary(UnaryOp, Class),
    Binary(BinaryOp, Class),
    /// The same with floats, of which one operand is a single element.
    BinaryWith(BinaryOp, Class, Side),
    /// An operation on floats and the numbers around it, which are where `c` is. The result may be where an operand is.
    Affine(AffineOp, Class, Around),
    Where(Class),
    /// From one type to another, as they are computed.
    Cast(DType, DType),
    /// Half precision in memory from and to single precision.
    LoadHalf(DType),
    StoreHalf(DType),
    /// `count` rows of `n` elements to one each.
    Reduce(ReduceOp, Class),
    /// `count` rows of `n` elements into as many results.
    Accumulate(ReduceOp, Class),
    /// The same into results of double precision, or the widest integers.
    AccumulateWide(ReduceOp, Class),
    /// `count` elements, each `n` times.
    Repeat(Class),
    /// `n` elements as they are.
    Copy(Class),
    /// The same past the caches. [`end_stream`] comes after the last.
    Stream(Class),
}

impl TileOp {
    /// What it costs for an element, in simple operations.
    pub(crate) fn cost(self) -> usize {
        match self {
            TileOp::Unary(op, _) => match op {
                UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign | UnaryOp::Floor | UnaryOp::Round | UnaryOp::Not => 1,
                UnaryOp::Recip | UnaryOp::Sqrt | UnaryOp::Rsqrt => 4,
                _ => 12,
            },
            TileOp::Binary(op, _) | TileOp::BinaryWith(op, ..) => match op {
                BinaryOp::Div => 4,
                BinaryOp::Rem | BinaryOp::Pow => 40,
                _ => 1,
            },
            TileOp::Affine(AffineOp::Div | AffineOp::Sqrt, ..) => 5,
            TileOp::Affine(..) => 2,
            _ => 1,
        }
    }
}

/// Which of two operands is a single element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Where operands and the result of an operation are. Pointers that an operation does not use are dangling.
#[derive(Clone, Copy)]
pub(crate) struct TileArgs {
    pub to: *mut u8,
    pub a: *const u8,
    pub b: *const u8,
    pub c: *const u8,
    pub n: usize,
    pub count: usize,
}

/// Whether every element could be computed: an integer cannot be divided by zero.
pub(crate) type IsDefined = bool;

/// Runs one operation over one tile.
///
/// # Safety
///
/// Operands are readable and the result is writable for as many elements as the operation has, of the sizes of their
/// classes, and the result overlaps no operand (but for [`TileOp::Affine`], whose result may be where one is).
pub(crate) unsafe fn run(op: TileOp, args: &TileArgs) -> IsDefined {
    // SAFETY: the caller's promise, and the instructions are there.
    unsafe { (CHOSEN.0)(op, args) }
}

/// The instructions that [`run`] uses.
pub(crate) fn instructions() -> &'static str {
    CHOSEN.1
}

/// Whether there are vectors of sixteen numbers.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx512() -> bool {
    std::is_x86_feature_detected!("avx512f")
}

type Runner = unsafe fn(TileOp, &TileArgs) -> IsDefined;

static CHOSEN: LazyLock<(Runner, &str)> = LazyLock::new(choose);

fn choose() -> (Runner, &'static str) {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f")
            && std::is_x86_feature_detected!("avx512bw")
            && std::is_x86_feature_detected!("avx512dq")
            && std::is_x86_feature_detected!("avx512vl")
        {
            return (run_avx512, "AVX-512");
        }
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            return (run_avx2, "AVX2");
        }
    }
    (run_baseline, if cfg!(target_arch = "aarch64") { "NEON" } else { "the target's own" })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512(op: TileOp, args: &TileArgs) -> IsDefined {
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            TileOp::Unary(UnaryOp::Exp, Class::F32) => {
                math::x86::exp_avx512(args.to.cast(), args.a.cast(), args.n);
                true
            }
            TileOp::Stream(class) => {
                stream_avx512(args.to, args.a, args.n * class.size());
                true
            }
            _ => run_any(op, args),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2(op: TileOp, args: &TileArgs) -> IsDefined {
    // SAFETY: the caller's promise.
    unsafe { run_any(op, args) }
}

/// What the compiler may use for this target without asking: NEON where that is there.
unsafe fn run_baseline(op: TileOp, args: &TileArgs) -> IsDefined {
    // SAFETY: the caller's promise.
    unsafe { run_any(op, args) }
}

#[inline(always)]
unsafe fn run_any(op: TileOp, args: &TileArgs) -> IsDefined {
    // SAFETY: the caller's promise; every arm reads and writes elements of its classes, as many as there are.
    unsafe {
        match op {
            TileOp::Unary(op, class) => match class {
                Class::F32 => float_unary::<f32>(op, args),
                Class::F64 => float_unary::<f64>(op, args),
                Class::I32 => int_unary::<i32>(op, args),
                Class::I64 => int_unary::<i64>(op, args),
                Class::U8 => byte_unary(op, args),
            },
            TileOp::Binary(op, class) => match class {
                Class::F32 => float_binary::<f32>(op, args),
                Class::F64 => float_binary::<f64>(op, args),
                Class::I32 => return int_binary::<i32>(op, args),
                Class::I64 => return int_binary::<i64>(op, args),
                Class::U8 => return int_binary::<u8>(op, args),
            },
            TileOp::BinaryWith(op, class, single) => match class {
                Class::F32 => float_binary_with::<f32>(op, single, args),
                Class::F64 => float_binary_with::<f64>(op, single, args),
                _ => debug_assert!(false, "single elements are for floats"),
            },
            TileOp::Affine(op, class, around) => match class {
                Class::F32 => affine::<f32>(op, around, args),
                Class::F64 => affine::<f64>(op, around, args),
                _ => debug_assert!(false, "numbers around an operation are for floats"),
            },
            TileOp::Where(class) => match class.size() {
                1 => choose_by::<u8>(args),
                4 => choose_by::<u32>(args),
                _ => choose_by::<u64>(args),
            },
            TileOp::Cast(from, to) => cast(from, to, args),
            TileOp::LoadHalf(DType::BF16) => map(args, bf16_to_f32),
            TileOp::LoadHalf(_) => map(args, f16_to_f32),
            TileOp::StoreHalf(DType::BF16) => map(args, f32_to_bf16),
            TileOp::StoreHalf(_) => map(args, f32_to_f16),
            TileOp::Reduce(op, class) => match class {
                Class::F32 => reduce::<f32>(op, args),
                Class::F64 => reduce::<f64>(op, args),
                Class::I32 => reduce::<i32>(op, args),
                Class::I64 => reduce::<i64>(op, args),
                Class::U8 => reduce::<u8>(op, args),
            },
            TileOp::Accumulate(op, class) => match class {
                Class::F32 => accumulate::<f32, f32>(op, args),
                Class::F64 => accumulate::<f64, f64>(op, args),
                Class::I32 => accumulate::<i32, i32>(op, args),
                Class::I64 => accumulate::<i64, i64>(op, args),
                Class::U8 => accumulate::<u8, u8>(op, args),
            },
            TileOp::AccumulateWide(op, class) => match class {
                Class::F32 => accumulate::<f32, f64>(op, args),
                Class::F64 => accumulate::<f64, f64>(op, args),
                Class::I32 => accumulate::<i32, i64>(op, args),
                Class::I64 => accumulate::<i64, i64>(op, args),
                Class::U8 => accumulate::<u8, i64>(op, args),
            },
            TileOp::Repeat(class) => match class.size() {
                1 => repeat::<u8>(args),
                4 => repeat::<u32>(args),
                _ => repeat::<u64>(args),
            },
            TileOp::Copy(class) => args.to.copy_from_nonoverlapping(args.a, args.n * class.size()),
            TileOp::Stream(class) => stream(args.to, args.a, args.n * class.size()),
        }
    }
    true
}

/// Copies bytes past the caches, where whole lines are written.
///
/// # Safety
///
/// There are so many bytes of both, which do not overlap; [`end_stream`] comes after the last.
#[inline(always)]
pub(crate) unsafe fn stream(to: *mut u8, from: *const u8, bytes: usize) {
    let head = to.align_offset(64).min(bytes);
    let lines = (bytes - head) / 64;
    let tail = head + 64 * lines;
    // SAFETY: the caller has so many bytes of both, and what is streamed is aligned.
    unsafe {
        to.copy_from_nonoverlapping(from, head);
        #[cfg(target_arch = "x86_64")]
        for quarter in 0..4 * lines {
            use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
            let at = head + 16 * quarter;
            _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast()));
        }
        #[cfg(not(target_arch = "x86_64"))]
        to.add(head).copy_from_nonoverlapping(from.add(head), 64 * lines);
        to.add(tail).copy_from_nonoverlapping(from.add(tail), bytes - tail);
    }
}

/// The same by stores of whole lines.
///
/// # Safety
///
/// As for [`stream`]; and the instructions are there.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    let head = to.align_offset(64).min(bytes);
    let lines = (bytes - head) / 64;
    let tail = head + 64 * lines;
    // SAFETY: the caller has so many bytes of both, and what is streamed is aligned.
    unsafe {
        to.copy_from_nonoverlapping(from, head);
        for at in (head..tail).step_by(64) {
            _mm512_stream_si512(to.add(at).cast(), _mm512_loadu_si512(from.add(at).cast()));
        }
        to.add(tail).copy_from_nonoverlapping(from.add(tail), bytes - tail);
    }
}

/// Has everything that was streamed seen by whoever is told later that it is there.
pub(crate) fn end_stream() {
    // SAFETY: every machine of this kind has it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Applies a function to arrays of elements, and to the rest one by one.
#[inline(always)]
unsafe fn map_arrays<A: Copy, D: Copy>(args: &TileArgs, many: impl Fn([A; LANES]) -> [D; LANES], one: impl Fn(A) -> D) {
    let (to, a) = (args.to.cast::<D>(), args.a.cast::<A>());
    let mut i = 0;
    // SAFETY: `i` stays below `n`, and so many elements are there. They need not be aligned.
    unsafe {
        while i + LANES <= args.n {
            let x = a.add(i).cast::<[A; LANES]>().read_unaligned();
            to.add(i).cast::<[D; LANES]>().write_unaligned(many(x));
            i += LANES;
        }
        while i < args.n {
            to.add(i).write_unaligned(one(a.add(i).read_unaligned()));
            i += 1;
        }
    }
}

/// Elements at an address.
#[inline(always)]
unsafe fn elements<'a, T>(at: *const u8, n: usize) -> &'a [T] {
    // SAFETY: the caller's promise. Buffers and registers are aligned to more than any element, and parts of them begin
    // at whole elements.
    unsafe { std::slice::from_raw_parts(at.cast::<T>(), n) }
}

/// Room for elements at an address.
#[inline(always)]
unsafe fn room<'a, T>(at: *mut u8, n: usize) -> &'a mut [MaybeUninit<T>] {
    // SAFETY: as above, and nobody else has it now.
    unsafe { std::slice::from_raw_parts_mut(at.cast::<MaybeUninit<T>>(), n) }
}

#[inline(always)]
unsafe fn map<A: Copy, D: Copy>(args: &TileArgs, f: impl Fn(A) -> D) {
    // SAFETY: the caller's promise.
    let (to, a) = unsafe { (room::<D>(args.to, args.n), elements::<A>(args.a, args.n)) };
    for (to, a) in to.iter_mut().zip(a) {
        to.write(f(*a));
    }
}

#[inline(always)]
unsafe fn map2<A: Copy, D: Copy>(args: &TileArgs, f: impl Fn(A, A) -> D) {
    // SAFETY: the caller's promise.
    let to = unsafe { room::<D>(args.to, args.n) };
    // SAFETY: as above.
    let (a, b) = unsafe { (elements::<A>(args.a, args.n), elements::<A>(args.b, args.n)) };
    for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
        to.write(f(*a, *b));
    }
}

#[inline(always)]
unsafe fn map2_with<A: Copy, D: Copy>(args: &TileArgs, single: Side, f: impl Fn(A, A) -> D) {
    // SAFETY: the caller's promise.
    unsafe {
        match single {
            Side::Left => {
                let a = args.a.cast::<A>().read();
                map::<A, D>(&TileArgs { a: args.b, ..*args }, |b| f(a, b));
            }
            Side::Right => {
                let b = args.b.cast::<A>().read();
                map::<A, D>(args, |a| f(a, b));
            }
        }
    }
}

#[inline(always)]
unsafe fn choose_by<T: Copy>(args: &TileArgs) {
    // SAFETY: the caller's promise.
    let to = unsafe { room::<T>(args.to, args.n) };
    // SAFETY: as above.
    let (a, b) = unsafe { (elements::<T>(args.b, args.n), elements::<T>(args.c, args.n)) };
    // SAFETY: as above.
    let condition = unsafe { elements::<u8>(args.a, args.n) };
    for (((to, condition), a), b) in to.iter_mut().zip(condition).zip(a).zip(b) {
        // Both are read, so that it is a choice and no branch.
        let (a, b) = (*a, *b);
        to.write(if *condition != 0 { a } else { b });
    }
}

#[inline(always)]
unsafe fn repeat<T: Copy>(args: &TileArgs) {
    let (to, a) = (args.to.cast::<T>(), args.a.cast::<T>());
    // SAFETY: there are `count` elements, and room for `n` times as many.
    unsafe {
        for row in 0..args.count {
            let value = a.add(row).read_unaligned();
            let to = to.add(row * args.n);
            for n in 0..args.n {
                to.add(n).write_unaligned(value);
            }
        }
    }
}

/// Numbers that can be summed up.
pub(super) trait Number: Copy + Default + PartialOrd {
    const ONE: Self;
    const LEAST: Self;
    const MOST: Self;
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// The larger; NaN if one is.
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
}

macro_rules! floats {
    ($($ty:ident)*) => { $(
        impl Number for $ty {
            const ONE: $ty = 1.0;
            const LEAST: $ty = $ty::NEG_INFINITY;
            const MOST: $ty = $ty::INFINITY;

            #[inline(always)]
            fn plus(self, other: $ty) -> $ty {
                self + other
            }

            #[inline(always)]
            fn times(self, other: $ty) -> $ty {
                self * other
            }

            #[inline(always)]
            fn larger(self, other: $ty) -> $ty {
                if other > self || other.is_nan() { other } else { self }
            }

            #[inline(always)]
            fn smaller(self, other: $ty) -> $ty {
                if other < self || other.is_nan() { other } else { self }
            }
        }

        impl FloatNumber for $ty {
            #[inline(always)]
            fn unary(self, op: UnaryOp) -> $ty {
                match op {
                    UnaryOp::Neg => -self,
                    UnaryOp::Abs => self.abs(),
                    UnaryOp::Sign => if self > 0.0 { 1.0 } else if self < 0.0 { -1.0 } else { self + 0.0 },
                    UnaryOp::Recip => 1.0 / self,
                    UnaryOp::Sqrt => self.sqrt(),
                    UnaryOp::Rsqrt => 1.0 / self.sqrt(),
                    UnaryOp::Exp => Float::exp(self),
                    UnaryOp::Expm1 => Float::expm1(self),
                    UnaryOp::Ln => Float::ln(self),
                    UnaryOp::Ln1p => Float::ln1p(self),
                    UnaryOp::Tanh => Float::tanh(self),
                    UnaryOp::Erf => Float::erf(self),
                    UnaryOp::Floor => self.floor(),
                    UnaryOp::Round => self.round_ties_even(),
                    UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Not => self,
                }
            }

            #[inline(always)]
            fn over(self, other: $ty) -> $ty {
                self / other
            }

            #[inline(always)]
            fn minus(self, other: $ty) -> $ty {
                self - other
            }

            /// The sign is the divisor's.
            #[inline(always)]
            fn modulo(self, other: $ty) -> $ty {
                let rest = self % other;
                if rest != 0.0 && (rest < 0.0) != (other < 0.0) { rest + other } else { rest }
            }
        }
    )* };
}

floats! { f32 f64 }

pub(super) trait FloatNumber: Number + Float {
    fn unary(self, op: UnaryOp) -> Self;
    fn over(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn modulo(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($ty:ident $abs:expr, $sign:expr, $modulo:expr;)*) => { $(
        impl Number for $ty {
            const ONE: $ty = 1;
            const LEAST: $ty = $ty::MIN;
            const MOST: $ty = $ty::MAX;

            #[inline(always)]
            fn plus(self, other: $ty) -> $ty {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn times(self, other: $ty) -> $ty {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn larger(self, other: $ty) -> $ty {
                self.max(other)
            }

            #[inline(always)]
            fn smaller(self, other: $ty) -> $ty {
                self.min(other)
            }
        }

        impl Integer for $ty {
            #[inline(always)]
            fn minus(self, other: $ty) -> $ty {
                self.wrapping_sub(other)
            }

            #[inline(always)]
            fn over(self, other: $ty) -> $ty {
                self.wrapping_div(other)
            }

            #[inline(always)]
            fn modulo(self, other: $ty) -> $ty {
                $modulo(self, other)
            }

            #[inline(always)]
            fn size(self) -> $ty {
                $abs(self)
            }

            #[inline(always)]
            fn sign(self) -> $ty {
                $sign(self)
            }
        }
    )* };
}

integers! {
    i32 i32::wrapping_abs, i32::signum, i32_modulo;
    i64 i64::wrapping_abs, i64::signum, i64_modulo;
    u8 std::convert::identity, |x: u8| x.min(1), u8::wrapping_rem;
}

/// The sign is the divisor's.
#[inline(always)]
fn i32_modulo(a: i32, b: i32) -> i32 {
    let rest = a.wrapping_rem(b);
    if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
}

#[inline(always)]
fn i64_modulo(a: i64, b: i64) -> i64 {
    let rest = a.wrapping_rem(b);
    if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
}

trait Integer: Number + Eq {
    fn minus(self, other: Self) -> Self;
    fn over(self, other: Self) -> Self;
    fn modulo(self, other: Self) -> Self;
    fn size(self) -> Self;
    fn sign(self) -> Self;
}

#[inline(always)]
unsafe fn float_unary<T: FloatNumber>(op: UnaryOp, args: &TileArgs) {
    // A loop for each, so that the operation is known inside of it.
    macro_rules! each {
        ($($name:ident)*) => {
            match op {
                $(UnaryOp::$name => map::<T, T>(args, |x| x.unary(UnaryOp::$name)),)*
                UnaryOp::Sin => map_arrays::<T, T>(args, T::sin, |x| T::sin([x])[0]),
                UnaryOp::Cos => map_arrays::<T, T>(args, T::cos, |x| T::cos([x])[0]),
                // Not for numbers.
                UnaryOp::Not => {}
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe { each!(Neg Abs Sign Recip Sqrt Rsqrt Exp Expm1 Ln Ln1p Tanh Erf Floor Round) }
}

#[inline(always)]
unsafe fn float_binary<T: FloatNumber>(op: BinaryOp, args: &TileArgs) {
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            BinaryOp::Add => map2::<T, T>(args, T::plus),
            BinaryOp::Sub => map2::<T, T>(args, T::minus),
            BinaryOp::Mul => map2::<T, T>(args, T::times),
            BinaryOp::Div => map2::<T, T>(args, T::over),
            BinaryOp::Rem => map2::<T, T>(args, T::modulo),
            BinaryOp::Pow => map2::<T, T>(args, T::pow),
            BinaryOp::Max => map2::<T, T>(args, T::larger),
            BinaryOp::Min => map2::<T, T>(args, T::smaller),
            BinaryOp::Eq => map2::<T, u8>(args, |a, b| u8::from(a == b)),
            BinaryOp::Lt => map2::<T, u8>(args, |a, b| u8::from(a < b)),
            BinaryOp::Le => map2::<T, u8>(args, |a, b| u8::from(a <= b)),
            // Not for numbers.
            BinaryOp::And | BinaryOp::Or => {}
        }
    }
}

/// Operations that take a single element as one operand.
pub(crate) fn takes_single(op: BinaryOp, class: Class) -> bool {
    // Those that `float_binary_with` computes: what is neither there nor here is not written.
    let is_known = match op {
        BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div | BinaryOp::Max | BinaryOp::Min => true,
        BinaryOp::Eq | BinaryOp::Lt | BinaryOp::Le => true,
        BinaryOp::Rem | BinaryOp::Pow | BinaryOp::And | BinaryOp::Or => false,
    };
    is_known && matches!(class, Class::F32 | Class::F64)
}

#[inline(always)]
unsafe fn float_binary_with<T: FloatNumber>(op: BinaryOp, single: Side, args: &TileArgs) {
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            BinaryOp::Add => map2_with::<T, T>(args, single, T::plus),
            BinaryOp::Sub => map2_with::<T, T>(args, single, T::minus),
            BinaryOp::Mul => map2_with::<T, T>(args, single, T::times),
            BinaryOp::Div => map2_with::<T, T>(args, single, T::over),
            BinaryOp::Max => map2_with::<T, T>(args, single, T::larger),
            BinaryOp::Min => map2_with::<T, T>(args, single, T::smaller),
            BinaryOp::Eq => map2_with::<T, u8>(args, single, |a, b| u8::from(a == b)),
            BinaryOp::Lt => map2_with::<T, u8>(args, single, |a, b| u8::from(a < b)),
            BinaryOp::Le => map2_with::<T, u8>(args, single, |a, b| u8::from(a <= b)),
            // As `takes_single` says.
            BinaryOp::Rem | BinaryOp::Pow | BinaryOp::And | BinaryOp::Or => {}
        }
    }
}

#[inline(always)]
unsafe fn int_unary<T: Integer>(op: UnaryOp, args: &TileArgs) {
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            UnaryOp::Neg => map::<T, T>(args, |x| T::default().minus(x)),
            UnaryOp::Abs => map::<T, T>(args, T::size),
            UnaryOp::Sign => map::<T, T>(args, T::sign),
            // Whole numbers are rounded already; the rest is not for integers.
            _ => map::<T, T>(args, |x| x),
        }
    }
}

#[inline(always)]
unsafe fn byte_unary(op: UnaryOp, args: &TileArgs) {
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            UnaryOp::Not => map::<u8, u8>(args, |x| x ^ 1),
            op => int_unary::<u8>(op, args),
        }
    }
}

#[inline(always)]
unsafe fn int_binary<T: Integer>(op: BinaryOp, args: &TileArgs) -> IsDefined {
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            BinaryOp::Add => map2::<T, T>(args, T::plus),
            BinaryOp::Sub => map2::<T, T>(args, T::minus),
            BinaryOp::Mul => map2::<T, T>(args, T::times),
            BinaryOp::Div | BinaryOp::Rem => {
                let divisors = std::slice::from_raw_parts(args.b.cast::<T>(), args.n);
                if divisors.contains(&T::default()) {
                    return false;
                }
                match op {
                    BinaryOp::Div => map2::<T, T>(args, T::over),
                    _ => map2::<T, T>(args, T::modulo),
                }
            }
            BinaryOp::Max | BinaryOp::Or => map2::<T, T>(args, T::larger),
            BinaryOp::Min | BinaryOp::And => map2::<T, T>(args, T::smaller),
            BinaryOp::Eq => map2::<T, u8>(args, |a, b| u8::from(a == b)),
            BinaryOp::Lt => map2::<T, u8>(args, |a, b| u8::from(a < b)),
            BinaryOp::Le => map2::<T, u8>(args, |a, b| u8::from(a <= b)),
            // Not for integers.
            BinaryOp::Pow => {}
        }
    }
    true
}

#[inline(always)]
unsafe fn reduce<T: Number>(op: ReduceOp, args: &TileArgs) {
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            ReduceOp::Sum => reduce_by(args, T::default(), T::plus),
            ReduceOp::Prod => reduce_by(args, T::ONE, T::times),
            ReduceOp::Max => reduce_by(args, T::LEAST, T::larger),
            ReduceOp::Min => reduce_by(args, T::MOST, T::smaller),
        }
    }
}

#[inline(always)]
unsafe fn accumulate<A: Copy + Into<T>, T: Number>(op: ReduceOp, args: &TileArgs) {
    // SAFETY: the caller's promise; the results were initialised.
    let to = unsafe { std::slice::from_raw_parts_mut(args.to.cast::<T>(), args.n) };
    // SAFETY: the caller's promise.
    let a = unsafe { elements::<A>(args.a, args.n * args.count) };
    match op {
        ReduceOp::Sum => accumulate_by(to, a, T::plus),
        ReduceOp::Prod => accumulate_by(to, a, T::times),
        ReduceOp::Max => accumulate_by(to, a, T::larger),
        ReduceOp::Min => accumulate_by(to, a, T::smaller),
    }
}

/// Row after row, as many columns at once as stay in registers.
#[inline(always)]
fn accumulate_by<A: Copy + Into<T>, T: Copy>(to: &mut [T], a: &[A], f: impl Fn(T, T) -> T) {
    const COLUMNS: usize = 64;
    let width = to.len();
    let (whole, rest) = to.as_chunks_mut::<COLUMNS>();
    let first = width - rest.len();
    for (n, to) in whole.iter_mut().enumerate() {
        let mut sums = *to;
        for row in a.chunks_exact(width) {
            let row = &row[n * COLUMNS..(n + 1) * COLUMNS];
            sums.iter_mut().zip(row).for_each(|(sum, a)| *sum = f(*sum, (*a).into()));
        }
        *to = sums;
    }
    if !rest.is_empty() {
        for row in a.chunks_exact(width) {
            rest.iter_mut().zip(&row[first..]).for_each(|(to, a)| *to = f(*to, (*a).into()));
        }
    }
}

/// In a fixed order, whatever vectors there are: lane by lane, then the lanes by halves.
#[inline(always)]
unsafe fn reduce_by<T: Number>(args: &TileArgs, start: T, f: impl Fn(T, T) -> T) {
    let (to, a) = (args.to.cast::<T>(), args.a.cast::<T>());
    for row in 0..args.count {
        // SAFETY: there are `count` rows of `n` elements, and room for `count` results.
        unsafe {
            let a = a.add(row * args.n);
            let mut i = 0;
            let mut result = start;
            if args.n >= LANES {
                let mut lanes = [start; LANES];
                while i + LANES <= args.n {
                    let x = a.add(i).cast::<[T; LANES]>().read_unaligned();
                    for n in 0..LANES {
                        lanes[n] = f(lanes[n], x[n]);
                    }
                    i += LANES;
                }
                let mut width = LANES / 2;
                while width > 0 {
                    for n in 0..width {
                        lanes[n] = f(lanes[n], lanes[n + width]);
                    }
                    width /= 2;
                }
                result = lanes[0];
            }
            while i < args.n {
                result = f(result, a.add(i).read_unaligned());
                i += 1;
            }
            to.add(row).write_unaligned(result);
        }
    }
}

#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "casts of elements do what `as` does: floats go to the nearest integer there is, integers wrap"
)]
unsafe fn cast(from: DType, to: DType, args: &TileArgs) {
    macro_rules! to {
        ($from:ty) => {
            match to {
                DType::Bool => map::<$from, u8>(args, |x| u8::from(x != <$from>::default())),
                DType::U8 => map::<$from, u8>(args, |x| x as u8),
                DType::I32 => map::<$from, i32>(args, |x| x as i32),
                DType::I64 => map::<$from, i64>(args, |x| x as i64),
                DType::F16 => map::<$from, f32>(args, |x| f16_to_f32(f32_to_f16(x as f32))),
                DType::BF16 => map::<$from, f32>(args, |x| bf16_to_f32(f32_to_bf16(x as f32))),
                DType::F32 => map::<$from, f32>(args, |x| x as f32),
                DType::F64 => map::<$from, f64>(args, |x| x as f64),
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        match Class::of(from) {
            Class::U8 => to!(u8),
            Class::I32 => to!(i32),
            Class::I64 => to!(i64),
            Class::F32 => to!(f32),
            Class::F64 => to!(f64),
        }
    }
}

#[inline(always)]
fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// To the nearest, ties to even.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the upper half is moved down before it is taken")]
fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    (if x.is_nan() { quiet } else { rounded }) as u16
}

#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    let bits = u32::from(bits);
    // The exponent is moved by a multiplication, which is exact and does subnormal numbers too.
    let size = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((254 - 15) << 23);
    let is_special = bits & 0x7c00 == 0x7c00;
    let size = if is_special { size.to_bits() | 0x7f80_0000 } else { size.to_bits() };
    f32::from_bits(size | (bits & 0x8000) << 16)
}

/// To the nearest, ties to even; beyond the largest number it is infinity.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "every case has sixteen bits")]
fn f32_to_f16(x: f32) -> u16 {
    let sign = x.to_bits() >> 16 & 0x8000;
    let size = x.abs();
    let bits = size.to_bits();
    let normal = bits.wrapping_add(0xfff + (bits >> 13 & 1)).wrapping_sub(112 << 23) >> 13;
    // Adding one half leaves the bits of a subnormal number at the end, rounded.
    let small = (size + 0.5).to_bits() & 0x7ff;
    let finite = if size < 6.103_515_6e-5 { small } else { normal };
    let large = if size >= 65_520.0 { 0x7c00 } else { finite };
    (sign | if x.is_nan() { 0x7e00 } else { large }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn half_precision_is_what_it_is_elsewhere() {
        for bits in 0..=u16::MAX {
            let (own, other) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
            assert!(own.to_bits() == other.to_bits() || own.is_nan() && other.is_nan(), "{bits:x}");
            let (own, other) = (bf16_to_f32(bits), bf16::from_bits(bits).to_f32());
            assert!(own.to_bits() == other.to_bits() || own.is_nan() && other.is_nan(), "{bits:x}");
        }
        for n in 0..3_000_000_u32 {
            let x = f32::from_bits(n.wrapping_mul(1431));
            let (own, other) = (f32_to_f16(x), f16::from_f32(x));
            assert!(own == other.to_bits() || x.is_nan() && other.is_nan(), "{x:e}: {own:x} {:x}", other.to_bits());
            let (own, other) = (f32_to_bf16(x), bf16::from_f32(x));
            assert!(own == other.to_bits() || x.is_nan() && other.is_nan(), "{x:e}");
        }
    }

    #[test]
    fn every_set_of_instructions_computes_the_same() {
        let mut x: Vec<f32> = (0..100_u8).map(|n| (f32::from(n) - 50.0) * 0.37).collect();
        // Exponentials of every size, and some numbers more than whole vectors.
        x.extend((0..40_000_u16).map(|n| (f32::from(n) - 20_000.0) * 0.0061));
        x.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e30, -1e30, 1e-42]);
        let y: Vec<f32> = x.iter().rev().copied().collect();
        let ops = [UnaryOp::Exp, UnaryOp::Ln, UnaryOp::Sin, UnaryOp::Tanh, UnaryOp::Erf, UnaryOp::Round, UnaryOp::Sign];
        let ops = ops.into_iter().map(|op| TileOp::Unary(op, Class::F32));
        let more = [BinaryOp::Add, BinaryOp::Rem, BinaryOp::Max].into_iter().map(|op| TileOp::Binary(op, Class::F32));
        for op in ops.chain(more) {
            let compute = |f: unsafe fn(TileOp, &TileArgs) -> IsDefined| {
                let mut to = vec![7.0_f32; x.len()];
                let (a, b) = (x.as_ptr().cast(), y.as_ptr().cast());
                let args = TileArgs { to: to.as_mut_ptr().cast(), a, b, c: a, n: x.len(), count: 1 };
                // SAFETY: all of them have as many elements.
                assert!(unsafe { f(op, &args) });
                to.into_iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect::<Vec<_>>()
            };
            let baseline = compute(run_baseline);
            assert_eq!(compute(run), baseline, "{op:?}");
            #[cfg(target_arch = "x86_64")]
            if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
                assert_eq!(compute(run_avx2), baseline, "{op:?}");
            }
        }
    }
}
