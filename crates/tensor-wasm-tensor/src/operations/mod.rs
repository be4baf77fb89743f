//! The table of operations: one row for each, with what it takes, whether gradients flow through it, and how it is
//! computed. The guide's table, expressions on the command line and the tests that go through all operations read it.

mod argument;
#[cfg(test)]
mod tests;

use std::fmt::Write;

pub(crate) use self::argument::Arguments;
pub use self::argument::{Argument, Parameter, ParameterKind};
use crate::dtype::DType;
use crate::tensor::Tensor;

/// How an operation is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Computed {
    /// Element by element, in the kernel of its inputs or of whoever reads it.
    Elementwise,
    /// In the kernel of its input, where what comes of it can be used on the same rows.
    Reduction,
    /// Of other operations, which are fused as if they had been written out.
    Composed,
    /// Not at all: the elements are seen under other indices.
    View,
    /// By a kernel of its own.
    Alone,
    /// Wherever it is used, from the number of each element.
    Made,
}

/// Which elements an operation computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    Any,
    Numbers,
    Floats,
    Bools,
}

impl Takes {
    pub fn has(self, dtype: DType) -> bool {
        match self {
            Takes::Any => true,
            Takes::Numbers => dtype != DType::Bool,
            Takes::Floats => dtype.is_float(),
            Takes::Bools => dtype == DType::Bool,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Takes::Any => "all",
            Takes::Numbers => "all but bool",
            Takes::Floats => "floats",
            Takes::Bools => "bool",
        }
    }
}

impl Computed {
    fn name(self) -> &'static str {
        match self {
            Computed::Elementwise => "element by element, with its neighbours",
            Computed::Reduction => "with what it reduces, and with what is done to the rows",
            Computed::Composed => "its parts are fused",
            Computed::View => "a view: nothing is computed",
            Computed::Alone => "a kernel of its own",
            Computed::Made => "made where it is used",
        }
    }
}

/// A row of the table.
pub struct Operation {
    pub name: &'static str,
    pub parameters: &'static [Parameter],
    pub computed: Computed,
    /// Whether gradients flow through it, to its first tensor at least.
    pub has_gradient: bool,
    pub takes: Takes,
    pub about: &'static str,
    /// An expression with it, of the tensors that [`examples`] has.
    pub example: &'static str,
    apply: fn(&Arguments<'_>) -> Result<Tensor, String>,
}

impl Operation {
    pub fn named(name: &str) -> Option<&'static Operation> {
        OPERATIONS.iter().find(|operation| operation.name == name)
    }

    /// `softmax(x, axis=-1)`
    pub fn signature(&self) -> String {
        let mut text = format!("{}(", self.name);
        for (at, Parameter { name, default, .. }) in self.parameters.iter().enumerate() {
            let separator = if at == 0 { "" } else { ", " };
            let _ = match default {
                None => write!(text, "{separator}{name}"),
                Some("") => write!(text, "{separator}{name}=…"),
                Some(default) => write!(text, "{separator}{name}={default}"),
            };
        }
        text.push(')');
        text
    }

    /// Calls it with arguments as they come, and others by name. `dtype` is what floats are that come from nowhere. An
    /// error says what does not fit; what is wrong with the tensors themselves the result says when it is read.
    pub fn call(&self, unnamed: &[Argument], named: &[(String, Argument)], dtype: DType) -> Result<Tensor, String> {
        let arguments = Arguments::bind(self.parameters, unnamed, named, dtype);
        arguments
            .and_then(|arguments| (self.apply)(&arguments))
            .map_err(|why| format!("{why}; it is {}", self.signature()))
    }
}

/// The operations as a table for people.
pub fn markdown() -> String {
    let mut text =
        "| operation | what it is | gradient | elements | how it is computed |\n|---|---|---|---|---|\n".to_owned();
    for operation in OPERATIONS {
        let gradient = if operation.has_gradient { "yes" } else { "no" };
        let (takes, computed) = (operation.takes.name(), operation.computed.name());
        let signature = operation.signature();
        let _ = writeln!(text, "| `{signature}` | {} | {gradient} | {takes} | {computed} |", operation.about);
    }
    text
}

/// What the examples of the table are made of, by name, with floats of one type.
pub fn examples(dtype: DType) -> Vec<(&'static str, Tensor)> {
    let normal = |sizes: &[usize], seed| Tensor::normal(sizes, seed, DType::F64).cast(dtype);
    let whole = |sizes: &[usize], below: f64, seed| (Tensor::uniform(sizes, seed, DType::F64) * below).cast(DType::I64);
    vec![
        ("x", normal(&[3, 4], 1)),
        ("y", normal(&[3, 4], 2)),
        ("p", (Tensor::uniform(&[3, 4], 3, DType::F64) + 0.5).cast(dtype)),
        ("c", Tensor::bernoulli(&[3, 4], 0.5, 4)),
        ("m", normal(&[4, 2], 5)),
        ("index", whole(&[3, 4], 3.0, 6)),
        ("rows", whole(&[5], 3.0, 7)),
        ("classes", whole(&[3], 4.0, 8)),
        ("image", normal(&[2, 4, 6, 5], 9)),
        ("filters", normal(&[6, 2, 3, 2], 10)),
        ("signal", normal(&[2, 4, 9], 11)),
        ("taps", normal(&[6, 2, 3], 12)),
        ("q", normal(&[2, 5, 4], 13)),
        ("k", normal(&[2, 6, 4], 14)),
        ("v", normal(&[2, 6, 3], 15)),
        ("channel", (Tensor::uniform(&[4], 16, DType::F64) + 0.5).cast(dtype)),
        ("chance", (Tensor::uniform(&[3, 4], 17, DType::F64) * 0.8 + 0.1).cast(dtype)),
    ]
}

/// The sizes of `x` with those of some axes one.
fn kept(x: &Tensor, axes: Option<&[isize]>) -> Vec<isize> {
    let rank = x.rank().cast_signed();
    let is_reduced = |axis: isize| axes.is_none_or(|axes| axes.contains(&axis) || axes.contains(&(axis - rank)));
    (0..rank).zip(x.shape().iter()).map(|(axis, size)| if is_reduced(axis) { 1 } else { size.cast_signed() }).collect()
}

/// A reduction over some axes, which stay with size 1 where that is asked for.
fn reduction(a: &Arguments<'_>, reduce: impl Fn(&Tensor, Option<Vec<isize>>) -> Tensor) -> Result<Tensor, String> {
    let (x, axes) = (a.tensor("x")?, a.ints("axis")?);
    let reduced = reduce(&x, axes.clone());
    let is_kept = a.flag("keepdims")? && reduced.check().is_ok();
    Ok(if is_kept { reduced.reshape(&kept(&x, axes.as_deref())) } else { reduced })
}

/// The same where it is one axis, or all elements in a row.
fn position(a: &Arguments<'_>, find: impl Fn(&Tensor, isize) -> Tensor) -> Result<Tensor, String> {
    reduction(a, |x, axes| match axes.as_deref() {
        None => find(&x.reshape(&[-1]), 0),
        Some([axis]) => find(x, *axis),
        Some(_) => find(x, isize::MAX),
    })
}

/// Rows of the table: name, parameters with defaults, how it is computed, whether it has a gradient, elements, what it
/// is, an example, and what it does.
macro_rules! operations {
    ($($name:literal ($($parameter:ident : $kind:ident $(= $default:literal)?),*) $computed:ident $gradient:ident
       $takes:ident, $about:literal, $example:literal, |$a:ident| $apply:expr;)*) => {
        &[$(Operation {
            name: $name,
            parameters: &[$(Parameter {
                name: stringify!($parameter),
                kind: ParameterKind::$kind,
                default: operations!(@default $($default)?),
            }),*],
            computed: Computed::$computed,
            has_gradient: operations!(@gradient $gradient),
            takes: Takes::$takes,
            about: $about,
            example: $example,
            apply: |$a| $apply,
        }),*]
    };
    (@default) => { None };
    (@default $default:literal) => { Some($default) };
    (@gradient differentiable) => { true };
    (@gradient flat) => { false };
}

/// Operations of one and of two tensors that are a method of the same name.
macro_rules! method {
    ($a:ident, $name:ident) => {
        Ok($a.tensor("x")?.$name())
    };
    ($a:ident, $name:ident, 2) => {{
        let (x, y) = $a.operands("x", "y")?;
        Ok(x.$name(&y))
    }};
}

/// Every operation there is.
pub static OPERATIONS: &[Operation] = operations! {
    "add"(x: Operand, y: Operand) Elementwise differentiable Numbers, "x + y", "add(x, y)", |a| method!(a, add, 2);
    "sub"(x: Operand, y: Operand) Elementwise differentiable Numbers, "x - y", "x - y", |a| method!(a, sub, 2);
    "mul"(x: Operand, y: Operand) Elementwise differentiable Numbers, "x * y", "x * y", |a| method!(a, mul, 2);
    "div"(x: Operand, y: Operand) Elementwise differentiable Numbers,
        "x / y; of integers cut towards zero, and an error by zero", "x / p", |a| method!(a, div, 2);
    "rem"(x: Operand, y: Operand) Elementwise differentiable Numbers,
        "what is left of a division, with the sign of the divisor: x % y", "x % p", |a| method!(a, rem, 2);
    "pow"(x: Operand, y: Operand) Elementwise differentiable Floats, "x to the power of y: x ** y", "p ** y",
        |a| method!(a, pow, 2);
    "maximum"(x: Operand, y: Operand) Elementwise differentiable Any, "the larger; NaN if one is", "maximum(x, y)",
        |a| method!(a, maximum, 2);
    "minimum"(x: Operand, y: Operand) Elementwise differentiable Any, "the smaller; NaN if one is", "minimum(x, y)",
        |a| method!(a, minimum, 2);
    "eq"(x: Operand, y: Operand) Elementwise flat Any, "x == y", "x == y", |a| method!(a, eq, 2);
    "ne"(x: Operand, y: Operand) Elementwise flat Any, "x != y", "x != y", |a| method!(a, ne, 2);
    "lt"(x: Operand, y: Operand) Elementwise flat Any, "x < y", "x < y", |a| method!(a, lt, 2);
    "le"(x: Operand, y: Operand) Elementwise flat Any, "x <= y", "x <= y", |a| method!(a, le, 2);
    "gt"(x: Operand, y: Operand) Elementwise flat Any, "x > y", "x > y", |a| method!(a, gt, 2);
    "ge"(x: Operand, y: Operand) Elementwise flat Any, "x >= y", "x >= y", |a| method!(a, ge, 2);
    "and"(x: Operand, y: Operand) Elementwise flat Bools, "both: x & y", "(x > 0) & c", |a| method!(a, and, 2);
    "or"(x: Operand, y: Operand) Elementwise flat Bools, "one of them at least: x \\| y", "(x > 0) | c",
        |a| method!(a, or, 2);
    "not"(x: Tensor) Elementwise flat Bools, "~x", "~c", |a| method!(a, logical_not);
    "where"(condition: Tensor, x: Operand, y: Operand) Elementwise differentiable Any,
        "x where the condition is true, y elsewhere", "where(c, x, y)", |a| {
            let (x, y) = a.operands("x", "y")?;
            Ok(a.tensor("condition")?.where_(&x, &y))
        };
    "neg"(x: Tensor) Elementwise differentiable Numbers, "-x", "-x", |a| Ok(-a.tensor("x")?);
    "abs"(x: Tensor) Elementwise differentiable Numbers, "the distance from zero", "abs(x)", |a| method!(a, abs);
    "sign"(x: Tensor) Elementwise differentiable Numbers, "-1, 0 or 1; NaN stays NaN", "sign(x)", |a| method!(a, sign);
    "recip"(x: Tensor) Elementwise differentiable Floats, "1 / x", "recip(p)", |a| method!(a, recip);
    "sqrt"(x: Tensor) Elementwise differentiable Floats, "the square root", "sqrt(p)", |a| method!(a, sqrt);
    "rsqrt"(x: Tensor) Elementwise differentiable Floats, "one over the square root", "rsqrt(p)", |a| method!(a, rsqrt);
    "square"(x: Tensor) Elementwise differentiable Numbers, "x * x", "square(x)", |a| method!(a, square);
    "exp"(x: Tensor) Elementwise differentiable Floats, "e to the power of x", "exp(x)", |a| method!(a, exp);
    "expm1"(x: Tensor) Elementwise differentiable Floats, "exp(x) - 1, precise near zero", "expm1(x)",
        |a| method!(a, expm1);
    "ln"(x: Tensor) Elementwise differentiable Floats, "the natural logarithm", "ln(p)", |a| method!(a, ln);
    "ln1p"(x: Tensor) Elementwise differentiable Floats, "ln(1 + x), precise near zero", "ln1p(p)", |a| method!(a, ln1p);
    "sin"(x: Tensor) Elementwise differentiable Floats, "the sine", "sin(x)", |a| method!(a, sin);
    "cos"(x: Tensor) Elementwise differentiable Floats, "the cosine", "cos(x)", |a| method!(a, cos);
    "tan"(x: Tensor) Elementwise differentiable Floats, "the tangent", "tan(x * 0.4)", |a| method!(a, tan);
    "tanh"(x: Tensor) Elementwise differentiable Floats, "the hyperbolic tangent", "tanh(x)", |a| method!(a, tanh);
    "erf"(x: Tensor) Elementwise differentiable Floats, "the error function", "erf(x)", |a| method!(a, erf);
    "sigmoid"(x: Tensor) Elementwise differentiable Floats, "1 / (1 + exp(-x))", "sigmoid(x)", |a| method!(a, sigmoid);
    "softplus"(x: Tensor) Elementwise differentiable Floats, "ln(1 + exp(x))", "softplus(x)", |a| method!(a, softplus);
    "relu"(x: Tensor) Elementwise differentiable Any, "x, or zero where it is less", "relu(x)", |a| method!(a, relu);
    "elu"(x: Tensor, alpha: Float = "1") Elementwise differentiable Floats,
        "x, or alpha * (exp(x) - 1) where it is less than zero", "elu(x, alpha=0.5)",
        |a| Ok(a.tensor("x")?.elu(a.float("alpha", 1.0)?));
    "gelu"(x: Tensor, approximate: Bool = "false") Elementwise differentiable Floats,
        "x * Φ(x), by erf; approximately by tanh", "gelu(x)", |a| {
            let x = a.tensor("x")?;
            Ok(if a.flag("approximate")? { x.gelu_approximate() } else { x.gelu() })
        };
    "silu"(x: Tensor) Elementwise differentiable Floats, "x * sigmoid(x)", "silu(x)", |a| method!(a, silu);
    "clip"(x: Tensor, min: Operand = "", max: Operand = "") Elementwise differentiable Any,
        "not below min, and not above max", "clip(x, -0.5, max=0.7)", |a| {
            let mut x = a.tensor("x")?;
            if a.has("min") {
                x = x.maximum(a.operand("min", &x)?);
            }
            Ok(if a.has("max") { x.minimum(a.operand("max", &x)?) } else { x })
        };
    "floor"(x: Tensor) Elementwise differentiable Numbers, "the next whole number below", "floor(x)",
        |a| method!(a, floor);
    "round"(x: Tensor) Elementwise differentiable Numbers, "the nearest whole number; halves to the even one", "round(x)",
        |a| method!(a, round);
    "cast"(x: Tensor, dtype: DType) Elementwise differentiable Any, "the same numbers as elements of another type",
        "cast(x, f64)", |a| Ok(a.tensor("x")?.cast(a.dtype("dtype")?));
    "sum"(x: Tensor, axis: Ints = "", keepdims: Bool = "false") Reduction differentiable Any,
        "the sum over axes, or over all; of integers in i64", "sum(x, axis=1)", |a| reduction(a, |x, axes| x.sum(axes));
    "mean"(x: Tensor, axis: Ints = "", keepdims: Bool = "false") Reduction differentiable Floats, "the mean",
        "mean(x, axis=[0, 1])", |a| reduction(a, |x, axes| x.mean(axes));
    "max"(x: Tensor, axis: Ints = "", keepdims: Bool = "false") Reduction differentiable Any,
        "the largest; NaN if one is", "max(x, axis=-1, keepdims=true)", |a| reduction(a, |x, axes| x.max(axes));
    "min"(x: Tensor, axis: Ints = "", keepdims: Bool = "false") Reduction differentiable Any,
        "the smallest; NaN if one is", "min(x, axis=0)", |a| reduction(a, |x, axes| x.min(axes));
    "prod"(x: Tensor, axis: Ints = "", keepdims: Bool = "false") Reduction differentiable Any,
        "the product; of integers in i64", "prod(x, axis=1)", |a| reduction(a, |x, axes| x.prod(axes));
    "logsumexp"(x: Tensor, axis: Ints = "", keepdims: Bool = "false") Composed differentiable Floats,
        "ln(sum(exp(x))), without overflow", "logsumexp(x, axis=1)", |a| reduction(a, |x, axes| x.logsumexp(axes));
    "var"(x: Tensor, axis: Ints = "", keepdims: Bool = "false", ddof: Int = "0") Composed differentiable Floats,
        "the variance: mean squared distances from the mean, divided by n - ddof", "var(x, axis=1, ddof=1)", |a| {
            let ddof = a.count("ddof", 0)?;
            reduction(a, |x, axes| x.var(axes, ddof))
        };
    "argmax"(x: Tensor, axis: Int = "", keepdims: Bool = "false") Alone flat Any,
        "the index of the first largest, along an axis or of all", "argmax(x, axis=1)", |a| position(a, Tensor::argmax);
    "argmin"(x: Tensor, axis: Int = "", keepdims: Bool = "false") Alone flat Any,
        "the index of the first smallest", "argmin(x)", |a| position(a, Tensor::argmin);
    "cumsum"(x: Tensor, axis: Int) Alone differentiable Any, "running sums along an axis", "cumsum(x, axis=1)",
        |a| Ok(a.tensor("x")?.cumsum(a.int("axis", 0)?));
    "matmul"(x: Tensor, y: Tensor) Alone differentiable Numbers,
        "the product of matrices in the last two axes, those before broadcast: x @ y", "x @ m",
        |a| Ok(a.tensor("x")?.matmul(&a.tensor("y")?));
    "softmax"(x: Tensor, axis: Int = "-1") Composed differentiable Floats, "exp(x), divided by their sum",
        "softmax(x, axis=1)", |a| Ok(a.tensor("x")?.softmax(a.int("axis", -1)?));
    "log_softmax"(x: Tensor, axis: Int = "-1") Composed differentiable Floats, "ln(softmax(x)), precisely",
        "log_softmax(x, axis=1)", |a| Ok(a.tensor("x")?.log_softmax(a.int("axis", -1)?));
    "layer_norm"(x: Tensor, axis: Int = "-1", epsilon: Float = "1e-5") Composed differentiable Floats,
        "distances from the mean in deviations", "layer_norm(x)",
        |a| Ok(a.tensor("x")?.layer_norm(a.int("axis", -1)?, a.float("epsilon", 1e-5)?));
    "rms_norm"(x: Tensor, axis: Int = "-1", epsilon: Float = "1e-5") Composed differentiable Floats,
        "x, divided by the root of its mean square", "rms_norm(x)",
        |a| Ok(a.tensor("x")?.rms_norm(a.int("axis", -1)?, a.float("epsilon", 1e-5)?));
    "batch_norm"(x: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, shift: Tensor, epsilon: Float = "1e-5")
        Composed differentiable Floats, "distances from means in deviations for each channel of [batch, channels, …]",
        "batch_norm(image, channel, channel, channel, channel)", |a| {
            let (mean, variance) = (a.tensor("mean")?, a.tensor("variance")?);
            let epsilon = a.float("epsilon", 1e-5)?;
            Ok(a.tensor("x")?.batch_norm(&mean, &variance, &a.tensor("scale")?, &a.tensor("shift")?, epsilon))
        };
    "dropout"(x: Tensor, probability: Float = "0.5", seed: Int = "0") Composed differentiable Floats,
        "some elements zero, the others larger to make up for it", "dropout(x, 0.5, seed=3)",
        |a| Ok(a.tensor("x")?.dropout(a.float("probability", 0.5)?, a.int("seed", 0)?.cast_unsigned() as u64));
    "embedding"(x: Tensor, index: Tensor) Alone differentiable Any, "rows of a table", "embedding(x, rows)",
        |a| Ok(a.tensor("x")?.embedding(&a.tensor("index")?));
    "attention"(q: Tensor, k: Tensor, v: Tensor, causal: Bool = "false") Composed differentiable Floats,
        "softmax(q @ k.transpose() / sqrt(n)) @ v; causal: no row sees a later one", "attention(q, k, v)",
        |a| Ok(a.tensor("q")?.attention(&a.tensor("k")?, &a.tensor("v")?, a.flag("causal")?));
    "conv1d"(x: Tensor, w: Tensor, stride: Int = "1", padding: Int = "0", dilation: Int = "1", groups: Int = "1")
        Composed differentiable Numbers, "a convolution of [batch, channels, length]",
        "conv1d(signal, taps, stride=2, padding=1, groups=2)",
        |a| Ok(a.tensor("x")?.conv1d(&a.tensor("w")?, a.window(1)?, a.count("groups", 1)?));
    "conv2d"(x: Tensor, w: Tensor, stride: Ints = "1", padding: Ints = "0", dilation: Ints = "1", groups: Int = "1")
        Composed differentiable Numbers, "a convolution of [batch, channels, rows, columns]",
        "conv2d(image, filters, padding=[1, 0], groups=2)",
        |a| Ok(a.tensor("x")?.conv2d(&a.tensor("w")?, a.convolution()?));
    "conv_transpose2d"(x: Tensor, w: Tensor, stride: Ints = "1", padding: Ints = "0", dilation: Ints = "1",
        groups: Int = "1") Composed differentiable Numbers, "what a convolution's gradient is: each element spreads filters",
        "conv_transpose2d(image, filters.reshape([4, 3, 3, 2]), stride=2, groups=2)",
        |a| Ok(a.tensor("x")?.conv_transpose2d(&a.tensor("w")?, a.convolution()?));
    "max_pool2d"(x: Tensor, size: Int, stride: Int = "", padding: Int = "0") Composed differentiable Any,
        "the largest of each window of rows and columns, size apart unless stride says otherwise",
        "max_pool2d(image, 2)", |a| {
            let size = a.count("size", 1)?;
            Ok(a.tensor("x")?.max_pool2d_with(size, a.window(size)?))
        };
    "avg_pool2d"(x: Tensor, size: Int, stride: Int = "", padding: Int = "0") Composed differentiable Floats,
        "the mean of each window, padding included", "avg_pool2d(image, 3, stride=1, padding=1)", |a| {
            let size = a.count("size", 1)?;
            Ok(a.tensor("x")?.avg_pool2d_with(size, a.window(size)?))
        };
    "mse_loss"(x: Tensor, target: Tensor) Composed differentiable Floats, "the mean of squared differences",
        "mse_loss(x, y)", |a| Ok(a.tensor("x")?.mse_loss(&a.tensor("target")?));
    "binary_cross_entropy"(x: Tensor, target: Tensor) Composed differentiable Floats,
        "the loss of logits, where targets are 0 or 1", "binary_cross_entropy(x, chance)",
        |a| Ok(a.tensor("x")?.binary_cross_entropy(&a.tensor("target")?));
    "cross_entropy"(x: Tensor, target: Tensor) Composed differentiable Floats,
        "the loss of [batch, classes] logits, where targets are numbers of classes", "cross_entropy(x, classes)",
        |a| Ok(a.tensor("x")?.cross_entropy(&a.tensor("target")?));
    "reshape"(x: Tensor, shape: Ints) View differentiable Any, "the same elements in another shape; one size may be -1",
        "reshape(x, [2, -1])", |a| Ok(a.tensor("x")?.reshape(&a.ints("shape")?.unwrap_or_default()));
    "transpose"(x: Tensor, a: Int = "-2", b: Int = "-1") View differentiable Any, "two axes change places",
        "transpose(x)", |a| Ok(a.tensor("x")?.transpose(a.int("a", -2)?, a.int("b", -1)?));
    "contiguous"(x: Tensor) Elementwise differentiable Any, "the same elements one after the other in memory",
        "contiguous(transpose(x))", |a| method!(a, contiguous);
    "permute"(x: Tensor, axes: Ints) View differentiable Any, "axes in another order", "permute(image, [2, 0, 3, 1])",
        |a| Ok(a.tensor("x")?.permute(&a.ints("axes")?.unwrap_or_default()));
    "expand"(x: Tensor, shape: Ints) View differentiable Any, "axes of size 1 and new ones, repeated",
        "expand(reshape(x, [3, 1, 4]), [2, 3, 5, 4])", |a| Ok(a.tensor("x")?.expand(&a.sizes("shape")?));
    "squeeze"(x: Tensor, axis: Ints = "") View differentiable Any, "without axes of size 1",
        "squeeze(reshape(x, [3, 1, 4]), 1)", |a| Ok(a.tensor("x")?.squeeze(a.ints("axis")?));
    "unsqueeze"(x: Tensor, axis: Int) View differentiable Any, "with a new axis of size 1", "unsqueeze(x, 1)",
        |a| Ok(a.tensor("x")?.unsqueeze(a.int("axis", 0)?));
    "flip"(x: Tensor, axis: Ints = "") View differentiable Any, "backwards along axes", "flip(x, 1)",
        |a| Ok(a.tensor("x")?.flip(a.ints("axis")?));
    "select"(x: Tensor, axis: Int, index: Int) View differentiable Any, "the elements at one index of an axis, as in x[0]",
        "select(x, 1, -2)", |a| Ok(a.tensor("x")?.select(a.int("axis", 0)?, a.int("index", 0)?));
    "slice"(x: Tensor, axis: Int, start: Int = "", end: Int = "", step: Int = "1") View differentiable Any,
        "some elements of an axis, as in x[1:, ::-2]", "x[1:, ::-2]", |a| {
            let bound = |name: &str| a.has(name).then(|| a.int(name, 0)).transpose();
            Ok(a.tensor("x")?.slice(a.int("axis", 0)?, bound("start")?, bound("end")?, a.int("step", 1)?))
        };
    "flatten"(x: Tensor, from: Int = "0") View differentiable Any, "the axes from one on as one", "flatten(image, 1)",
        |a| Ok(a.tensor("x")?.flatten(a.count("from", 0)?));
    "concat"(tensors: Tensors, axis: Int = "0") Alone differentiable Any, "one after the other along an axis",
        "concat([x, y], axis=1)", |a| {
            let tensors = a.tensors("tensors")?;
            Ok(Tensor::concat(&tensors.iter().collect::<Vec<_>>(), a.int("axis", 0)?))
        };
    "stack"(tensors: Tensors, axis: Int = "0") Alone differentiable Any, "one after the other along a new axis",
        "stack([x, y], axis=1)", |a| {
            let tensors = a.tensors("tensors")?;
            Ok(Tensor::stack(&tensors.iter().collect::<Vec<_>>(), a.int("axis", 0)?))
        };
    "split"(x: Tensor, size: Int, axis: Int = "0", part: Int = "0") View differentiable Any,
        "a part of an axis that is cut into parts of a size", "split(x, 2, axis=1, part=1)", |a| {
            let (x, size, axis, part) = (a.tensor("x")?, a.count("size", 1)?, a.int("axis", 0)?, a.count("part", 0)?);
            let from_front = if axis < 0 { axis + x.rank().cast_signed() } else { axis };
            let along = usize::try_from(from_front).ok().and_then(|axis| x.shape().get(axis).copied());
            match along.filter(|_| size > 0) {
                // Only the part that is asked for is made: there may be as many as there are elements.
                Some(along) => match part.checked_mul(size).filter(|start| *start < along.max(1)) {
                    Some(start) => Ok(x.narrow(axis, start, size.min(along - start))),
                    None => Err(format!("part is {part}, and there are {}", along.div_ceil(size))),
                },
                // What is wrong with it is said by what makes all of them.
                None => x.split(size, axis).into_iter().next().ok_or_else(|| "there are no parts".to_owned()),
            }
        };
    "pad"(x: Tensor, before: Ints, after: Ints) Alone differentiable Any, "zeros before and after each axis",
        "pad(x, [1, 0], [0, 2])", |a| Ok(a.tensor("x")?.pad(&a.sizes("before")?, &a.sizes("after")?));
    "repeat"(x: Tensor, times: Ints) Alone differentiable Any, "each axis several times over", "repeat(x, [2, 3])",
        |a| Ok(a.tensor("x")?.repeat(&a.sizes("times")?));
    "gather"(x: Tensor, axis: Int, index: Tensor) Alone differentiable Any, "out[i, j] = x[index[i, j], j], for axis 0",
        "gather(x, 0, index)", |a| Ok(a.tensor("x")?.gather(a.int("axis", 0)?, &a.tensor("index")?));
    "scatter_add"(x: Tensor, axis: Int, index: Tensor, size: Int) Alone differentiable Numbers,
        "out[index[i, j], j] += x[i, j], for axis 0, into zeros of a size", "scatter_add(x, 0, index, size=5)",
        |a| Ok(a.tensor("x")?.scatter_add(a.int("axis", 0)?, &a.tensor("index")?, a.count("size", 0)?));
    "index_select"(x: Tensor, axis: Int, index: Tensor) Alone differentiable Any, "the elements of an axis at some indices",
        "index_select(x, 0, rows)", |a| Ok(a.tensor("x")?.index_select(a.int("axis", 0)?, &a.tensor("index")?));
    "topk"(x: Tensor, k: Int, axis: Int = "-1", indices: Bool = "false") Alone differentiable Any,
        "the k largest along an axis, the largest first, or their indices", "topk(x, 2)", |a| {
            let (largest, index) = a.tensor("x")?.topk(a.count("k", 1)?, a.int("axis", -1)?);
            Ok(if a.flag("indices")? { index } else { largest })
        };
    "sort"(x: Tensor, axis: Int = "-1", descending: Bool = "false") Alone differentiable Any,
        "in order along an axis; equal ones keep theirs", "sort(x, axis=0)",
        |a| Ok(a.tensor("x")?.sort(a.int("axis", -1)?, a.flag("descending")?));
    "argsort"(x: Tensor, axis: Int = "-1", descending: Bool = "false") Alone flat Any, "the indices that sort", "argsort(x)",
        |a| Ok(a.tensor("x")?.argsort(a.int("axis", -1)?, a.flag("descending")?));
    "zeros"(shape: Ints, dtype: DType = "f32") Made flat Any, "zeros", "zeros([2, 3])",
        |a| Ok(Tensor::zeros(&a.sizes("shape")?, a.dtype("dtype")?));
    "ones"(shape: Ints, dtype: DType = "f32") Made flat Any, "ones", "ones([2, 3])",
        |a| Ok(Tensor::ones(&a.sizes("shape")?, a.dtype("dtype")?));
    "full"(shape: Ints, value: Float, dtype: DType = "f32") Made flat Any, "a number everywhere", "full([2, 3], 7)",
        |a| Ok(Tensor::full(&a.sizes("shape")?, a.float("value", 0.0)?, a.dtype("dtype")?));
    "arange"(start: Float, end: Float = "", step: Float = "1", dtype: DType = "f32") Made flat Any,
        "from start up to and without end; with one number, from 0 up to it", "arange(1, 7, 2)", |a| {
            let (start, end) = (a.float("start", 0.0)?, a.float("end", 0.0)?);
            let (start, end) = if a.has("end") { (start, end) } else { (0.0, start) };
            Ok(Tensor::arange(start, end, a.float("step", 1.0)?, a.dtype("dtype")?))
        };
    "linspace"(start: Float, end: Float, count: Int, dtype: DType = "f32") Made flat Floats,
        "numbers the same distance apart, both ends included", "linspace(0, 1, 5)", |a| {
            let (start, end) = (a.float("start", 0.0)?, a.float("end", 0.0)?);
            Ok(Tensor::linspace(start, end, a.count("count", 0)?, a.dtype("dtype")?))
        };
    "eye"(n: Int, dtype: DType = "f32") Made flat Any, "ones on the diagonal", "eye(3)",
        |a| Ok(Tensor::eye(a.count("n", 0)?, a.dtype("dtype")?));
    "uniform"(shape: Ints, seed: Int = "0", dtype: DType = "f32") Made flat Floats,
        "numbers from 0 up to and without 1, the same everywhere for a seed", "uniform([2, 3], seed=1)",
        |a| Ok(Tensor::uniform(&a.sizes("shape")?, a.int("seed", 0)?.cast_unsigned() as u64, a.dtype("dtype")?));
    "normal"(shape: Ints, seed: Int = "0", dtype: DType = "f32") Made flat Floats,
        "normally distributed numbers with mean 0 and deviation 1", "normal([2, 3], seed=1)",
        |a| Ok(Tensor::normal(&a.sizes("shape")?, a.int("seed", 0)?.cast_unsigned() as u64, a.dtype("dtype")?));
    "bernoulli"(shape: Ints, probability: Float = "0.5", seed: Int = "0") Made flat Any, "true with a probability",
        "bernoulli([2, 3], 0.2, seed=1)", |a| {
            let seed = a.int("seed", 0)?.cast_unsigned() as u64;
            Ok(Tensor::bernoulli(&a.sizes("shape")?, a.float("probability", 0.5)?, seed))
        };
};
