//! Operators and the methods of the same meaning: both make the same node.

use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Rem, Sub};
use std::panic::Location;

use super::{Caller, Tensor};
use crate::dtype::{DType, Scalar};
use crate::graph::op::{BinaryOp, UnaryOp};

/// What a tensor can be combined with: another one, or a number, which becomes an element of the same type.
pub trait Operand {
    /// Whether it becomes whatever type it meets.
    fn is_number(&self) -> bool {
        false
    }

    /// As a tensor that goes with `other`.
    fn into_tensor(self, other: Option<&Tensor>, at: Caller) -> Tensor;
}

impl Operand for Tensor {
    fn into_tensor(self, _: Option<&Tensor>, _: Caller) -> Tensor {
        self
    }
}

impl Operand for &Tensor {
    fn into_tensor(self, _: Option<&Tensor>, _: Caller) -> Tensor {
        self.clone()
    }
}

macro_rules! numbers {
    ($($ty:ty)*) => { $(
        impl Operand for $ty {
            fn is_number(&self) -> bool {
                true
            }

            fn into_tensor(self, other: Option<&Tensor>, at: Caller) -> Tensor {
                let scalar = Scalar::from(self);
                let dtype = other.map_or(scalar.dtype(), Tensor::dtype);
                // A number that no element of the type can be would be cut in silence.
                let is_cut = matches!(scalar, Scalar::Float(x) if !dtype.is_float() && x.fract() != 0.0);
                if let Some(other) = other.filter(|_| is_cut) {
                    return other.wrong_dtype("a number with a fraction", "floats", at);
                }
                Tensor::fill(scalar, crate::shape::Shape::SCALAR, dtype, at)
            }
        }

    )* };
}

numbers! { f32 f64 i32 i64 }

/// Numbers on the left: one type of each kind, so that the compiler knows what a literal is.
macro_rules! numbers_on_the_left {
    ($($ty:ty)*) => { $(
        numbers_on_the_left!(@operator Add add $ty);
        numbers_on_the_left!(@operator Sub sub $ty);
        numbers_on_the_left!(@operator Mul mul $ty);
        numbers_on_the_left!(@operator Div div $ty);
        numbers_on_the_left!(@operator Rem rem $ty);
    )* };
    (@operator $trait:ident $method:ident $ty:ty) => {
        impl $trait<&Tensor> for $ty {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, other: &Tensor) -> Tensor {
                let own = self.into_tensor(Some(other), Location::caller());
                Tensor::$method(&own, other)
            }
        }

        impl $trait<Tensor> for $ty {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, other: Tensor) -> Tensor {
                let own = self.into_tensor(Some(&other), Location::caller());
                Tensor::$method(&own, &other)
            }
        }
    };
}

numbers_on_the_left! { f64 i64 }

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident $op:ident;)*) => {
        impl Tensor {
            $($(#[$doc])*
            #[track_caller]
            pub fn $name(&self, other: impl Operand) -> Tensor {
                let at = Location::caller();
                self.binary(BinaryOp::$op, &other.into_tensor(Some(self), at), at)
            })*
        }
    };
}

binary! {
    add Add;
    sub Sub;
    mul Mul;
    /// Integers are cut towards zero.
    div Div;
    /// What is left of a division, with the sign of the divisor.
    rem Rem;
    /// To a power. Of floats.
    pow Pow;
    /// The larger of two; NaN if one is.
    maximum Max;
    /// The smaller of two; NaN if one is.
    minimum Min;
    eq Eq;
    lt Lt;
    le Le;
    and And;
    or Or;
}

impl Tensor {
    #[track_caller]
    pub fn ne(&self, other: impl Operand) -> Tensor {
        let at = Location::caller();
        self.binary(BinaryOp::Eq, &other.into_tensor(Some(self), at), at).unary(UnaryOp::Not, at)
    }

    #[track_caller]
    pub fn gt(&self, other: impl Operand) -> Tensor {
        let at = Location::caller();
        other.into_tensor(Some(self), at).binary(BinaryOp::Lt, self, at)
    }

    #[track_caller]
    pub fn ge(&self, other: impl Operand) -> Tensor {
        let at = Location::caller();
        other.into_tensor(Some(self), at).binary(BinaryOp::Le, self, at)
    }

    /// The first where this is true, the second elsewhere.
    #[track_caller]
    pub fn where_(&self, a: impl Operand, b: impl Operand) -> Tensor {
        let at = Location::caller();
        // A number becomes what the other one is.
        let (a, b) = if a.is_number() {
            let b = b.into_tensor(None, at);
            (a.into_tensor(Some(&b), at), b)
        } else {
            let a = a.into_tensor(None, at);
            let b = b.into_tensor(Some(&a), at);
            (a, b)
        };
        Tensor::choose(self, &a, &b, at)
    }

    /// The same numbers as elements of another type. Floats become integers by being cut towards zero, to the nearest
    /// there is; integers wrap; what is not zero is true.
    #[track_caller]
    pub fn cast(&self, dtype: DType) -> Tensor {
        let at = Location::caller();
        match self.check() {
            Ok(()) => self.cast_to(dtype, at),
            Err(error) => Tensor::holding(error),
        }
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $named:ident;)*) => { $(
        impl<O: Operand> $trait<O> for &Tensor {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, other: O) -> Tensor {
                self.$named(other)
            }
        }

        impl<O: Operand> $trait<O> for Tensor {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, other: O) -> Tensor {
                Tensor::$named(&self, other)
            }
        }
    )* };
}

operators! {
    Add add add;
    Sub sub sub;
    Mul mul mul;
    Div div div;
    Rem rem rem;
    BitAnd bitand and;
    BitOr bitor or;
}

impl Neg for &Tensor {
    type Output = Tensor;

    #[track_caller]
    fn neg(self) -> Tensor {
        self.unary(UnaryOp::Neg, Location::caller())
    }
}

impl Neg for Tensor {
    type Output = Tensor;

    #[track_caller]
    fn neg(self) -> Tensor {
        self.unary(UnaryOp::Neg, Location::caller())
    }
}

impl Not for &Tensor {
    type Output = Tensor;

    #[track_caller]
    fn not(self) -> Tensor {
        self.unary(UnaryOp::Not, Location::caller())
    }
}
