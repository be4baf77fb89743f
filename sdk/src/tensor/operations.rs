//! Operations as methods. Those that are not here are reached by [`Tensor::apply`].

use std::ops::{Add, Div, Mul, Neg, Rem, Sub};

use super::{Argument, DType, Tensor, apply, named};

/// Methods of one tensor that take nothing else.
macro_rules! unary {
    ($($(#[$about:meta])+ $name:ident;)*) => {
        impl Tensor {
            $($(#[$about])+
            pub fn $name(&self) -> Tensor {
                self.apply(stringify!($name), &[])
            })*
        }
    };
}

unary! {
    /// The distance from zero.
    abs;
    /// e to the power of each element.
    exp;
    /// The natural logarithm.
    ln;
    /// The square root.
    sqrt;
    /// One over the square root.
    rsqrt;
    /// Each element times itself.
    square;
    /// The sine.
    sin;
    /// The cosine.
    cos;
    /// The hyperbolic tangent.
    tanh;
    /// 1 / (1 + exp(-x)).
    sigmoid;
    /// Each element, or zero where it is less.
    relu;
    /// Exact, by the error function.
    gelu;
    /// x * sigmoid(x).
    silu;
    /// The last two axes change places.
    transpose;
    /// Elements that are one after the other in memory.
    contiguous;
}

/// Methods of a tensor and an operand, which is a tensor or a number.
macro_rules! binary {
    ($($(#[$about:meta])+ $name:ident;)*) => {
        impl Tensor {
            $($(#[$about])+
            pub fn $name<'a>(&'a self, other: impl Into<Argument<'a>>) -> Tensor {
                self.apply(stringify!($name), &[other.into()])
            })*
        }
    };
}

binary! {
    /// To the power of the other.
    pow;
    /// The larger of both.
    maximum;
    /// The smaller of both.
    minimum;
    /// Where both are equal.
    eq;
    /// Where they are not.
    ne;
    /// Where this is less.
    lt;
    /// Where this is not larger.
    le;
    /// Where this is larger.
    gt;
    /// Where this is not less.
    ge;
}

/// Reductions, over all elements or along an axis.
macro_rules! reductions {
    ($($(#[$about:meta])+ $name:ident, $along:ident;)*) => {
        impl Tensor {
            $($(#[$about])+
            pub fn $name(&self) -> Tensor {
                self.apply(stringify!($name), &[])
            }

            /// The same along an axis, which is gone then; from the end where it is negative.
            pub fn $along(&self, axis: i64) -> Tensor {
                self.apply(stringify!($name), &[named("axis", axis)])
            })*
        }
    };
}

reductions! {
    /// The sum of all elements.
    sum, sum_along;
    /// The mean of all elements.
    mean, mean_along;
    /// The largest element.
    max, max_along;
    /// The smallest element.
    min, min_along;
    /// The index of the first largest of all elements.
    argmax, argmax_along;
}

impl Tensor {
    pub fn zeros(shape: &[usize], dtype: DType) -> Tensor {
        apply("zeros", &[shape.into(), dtype.into()])
    }

    pub fn ones(shape: &[usize], dtype: DType) -> Tensor {
        apply("ones", &[shape.into(), dtype.into()])
    }

    pub fn full(shape: &[usize], value: f64, dtype: DType) -> Tensor {
        apply("full", &[shape.into(), value.into(), dtype.into()])
    }

    /// From `start` up to and without `end`.
    pub fn arange(start: f64, end: f64, step: f64, dtype: DType) -> Tensor {
        apply("arange", &[named("start", start), named("end", end), named("step", step), dtype.into()])
    }

    /// Numbers from 0 up to and without 1, the same everywhere for a seed.
    pub fn uniform(shape: &[usize], seed: i64, dtype: DType) -> Tensor {
        apply("uniform", &[shape.into(), named("seed", seed), dtype.into()])
    }

    /// Normally distributed numbers with mean 0 and deviation 1.
    pub fn normal(shape: &[usize], seed: i64, dtype: DType) -> Tensor {
        apply("normal", &[shape.into(), named("seed", seed), dtype.into()])
    }

    /// The product of matrices in the last two axes; those before broadcast.
    pub fn matmul(&self, other: &Tensor) -> Tensor {
        self.apply("matmul", &[other.into()])
    }

    pub fn softmax(&self, axis: i64) -> Tensor {
        self.apply("softmax", &[named("axis", axis)])
    }

    pub fn log_softmax(&self, axis: i64) -> Tensor {
        self.apply("log_softmax", &[named("axis", axis)])
    }

    pub fn layer_norm(&self, axis: i64, epsilon: f64) -> Tensor {
        self.apply("layer_norm", &[named("axis", axis), named("epsilon", epsilon)])
    }

    pub fn rms_norm(&self, axis: i64, epsilon: f64) -> Tensor {
        self.apply("rms_norm", &[named("axis", axis), named("epsilon", epsilon)])
    }

    /// Of queries, over keys and values; causal: no row sees a later one.
    pub fn attention(&self, keys: &Tensor, values: &Tensor, causal: bool) -> Tensor {
        self.apply("attention", &[keys.into(), values.into(), named("causal", causal)])
    }

    /// Rows of this table.
    pub fn embedding(&self, index: &Tensor) -> Tensor {
        self.apply("embedding", &[index.into()])
    }

    /// The loss of [batch, classes] logits, where targets are numbers of classes.
    pub fn cross_entropy(&self, target: &Tensor) -> Tensor {
        self.apply("cross_entropy", &[target.into()])
    }

    pub fn mse_loss(&self, target: &Tensor) -> Tensor {
        self.apply("mse_loss", &[target.into()])
    }

    /// The same numbers as elements of another type.
    pub fn cast(&self, dtype: DType) -> Tensor {
        self.apply("cast", &[dtype.into()])
    }

    /// The same elements in another shape; one size may be -1.
    pub fn reshape(&self, shape: &[i64]) -> Tensor {
        self.apply("reshape", &[shape.into()])
    }

    /// Axes in another order.
    pub fn permute(&self, axes: &[i64]) -> Tensor {
        self.apply("permute", &[axes.into()])
    }

    /// Axes of size 1 and new ones, repeated.
    pub fn expand(&self, shape: &[usize]) -> Tensor {
        self.apply("expand", &[shape.into()])
    }

    /// With a new axis of size 1.
    pub fn unsqueeze(&self, axis: i64) -> Tensor {
        self.apply("unsqueeze", &[axis.into()])
    }

    /// Without an axis of size 1.
    pub fn squeeze(&self, axis: i64) -> Tensor {
        self.apply("squeeze", &[axis.into()])
    }

    /// The elements from `start` up to and without `end` of an axis.
    pub fn slice(&self, axis: i64, start: i64, end: i64) -> Tensor {
        self.apply("slice", &[named("axis", axis), named("start", start), named("end", end)])
    }

    /// The elements at one index of an axis.
    pub fn select(&self, axis: i64, index: i64) -> Tensor {
        self.apply("select", &[named("axis", axis), named("index", index)])
    }

    /// One after the other along an axis.
    pub fn concat(tensors: &[&Tensor], axis: i64) -> Tensor {
        apply("concat", &[tensors.into(), named("axis", axis)])
    }

    /// One after the other along a new axis.
    pub fn stack(tensors: &[&Tensor], axis: i64) -> Tensor {
        apply("stack", &[tensors.into(), named("axis", axis)])
    }

    /// This where the condition is true, and the other elsewhere.
    pub fn where_(condition: &Tensor, this: &Tensor, other: &Tensor) -> Tensor {
        apply("where", &[condition.into(), this.into(), other.into()])
    }
}

/// What stands on the right of an operator: a tensor, or a number that becomes what it meets.
#[derive(Debug, Clone)]
pub enum Operand {
    Tensor(Tensor),
    Number(f64),
    Integer(i64),
}

impl Operand {
    fn argument(&self) -> Argument<'_> {
        match self {
            Operand::Tensor(tensor) => tensor.into(),
            Operand::Number(value) => (*value).into(),
            Operand::Integer(value) => (*value).into(),
        }
    }
}

macro_rules! operands {
    ($($from:ty, $variant:ident, |$value:ident| $made:expr;)*) => {
        $(impl From<$from> for Operand {
            fn from($value: $from) -> Operand {
                Operand::$variant($made)
            }
        })*
    };
}

operands! {
    Tensor, Tensor, |tensor| tensor;
    &Tensor, Tensor, |tensor| tensor.clone();
    f64, Number, |value| value;
    f32, Number, |value| value.into();
    i64, Integer, |value| value;
    i32, Integer, |value| value.into();
}

/// Operators between tensors, and between tensors and numbers. On the left of a tensor a number is an `f64` or an
/// `i64`: with more, the type of a literal would have to be written.
macro_rules! operators {
    ($($operator:ident, $method:ident, $name:literal;)*) => {
        $(
            impl<R: Into<Operand>> $operator<R> for &Tensor {
                type Output = Tensor;

                fn $method(self, other: R) -> Tensor {
                    self.apply($name, &[other.into().argument()])
                }
            }

            impl<R: Into<Operand>> $operator<R> for Tensor {
                type Output = Tensor;

                fn $method(self, other: R) -> Tensor {
                    self.apply($name, &[other.into().argument()])
                }
            }

            operators!(@left $operator, $method, $name, f64);
            operators!(@left $operator, $method, $name, i64);
        )*
    };
    (@left $operator:ident, $method:ident, $name:literal, $number:ident) => {
        impl $operator<&Tensor> for $number {
            type Output = Tensor;

            fn $method(self, other: &Tensor) -> Tensor {
                apply($name, &[self.into(), other.into()])
            }
        }

        impl $operator<Tensor> for $number {
            type Output = Tensor;

            fn $method(self, other: Tensor) -> Tensor {
                apply($name, &[self.into(), (&other).into()])
            }
        }
    };
}

operators! {
    Add, add, "add";
    Sub, sub, "sub";
    Mul, mul, "mul";
    Div, div, "div";
    Rem, rem, "rem";
}

impl Neg for &Tensor {
    type Output = Tensor;

    fn neg(self) -> Tensor {
        self.apply("neg", &[])
    }
}

impl Neg for Tensor {
    type Output = Tensor;

    fn neg(self) -> Tensor {
        self.apply("neg", &[])
    }
}
