//! Expressions as text: every operation of the table, as one would write it in Python.
//!
//! ```
//! use tensor_wasm_tensor::{DType, Tensor, expression};
//!
//! let a = Tensor::arange(0, 6, 1, DType::F32).reshape(&[2, 3]);
//! let result = expression::evaluate("softmax(a @ a.transpose(), axis=1)[:, 0]", &[("a", a)], DType::F32).unwrap();
//! assert_eq!(result.shape()[..], [2]);
//! ```

mod tokens;

use self::tokens::{Symbol, Token, TokenKind};
use crate::dtype::{DType, Scalar};
use crate::operations::{Argument, OPERATIONS, Operation};
use crate::tensor::Tensor;

/// Bytes of an expression.
const TEXT_BYTES_MAX: usize = 1 << 16;

/// Parentheses, lists and signs inside each other. Each is some stack frames.
const DEPTH_MAX: usize = 100;

/// Why an expression has no value, and where in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpressionError {
    text: String,
    /// Byte of the text.
    pub at: usize,
    pub why: String,
}

impl std::fmt::Display for ExpressionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let line_start = self.text[..self.at].rfind('\n').map_or(0, |at| at + 1);
        let line = self.text[line_start..].lines().next().unwrap_or_default();
        let column = self.text[line_start..self.at].chars().count();
        write!(f, "{}\n  {line}\n  {:column$}^", self.why, "")
    }
}

impl std::error::Error for ExpressionError {}

/// The tensor that an expression describes. Names are those of `inputs`; `dtype` is what floats are that come from
/// nowhere.
pub fn evaluate(text: &str, inputs: &[(&str, Tensor)], dtype: DType) -> Result<Tensor, ExpressionError> {
    let error = |(at, why)| ExpressionError { text: text.to_owned(), at, why };
    if text.len() > TEXT_BYTES_MAX {
        return Err(error((
            0,
            format!("an expression has at most {TEXT_BYTES_MAX} bytes, and this one {}", text.len()),
        )));
    }
    let tokens = tokens::split(text).map_err(error)?;
    let mut evaluator = Evaluator { tokens, next: 0, depth: 0, inputs, dtype };
    let value = evaluator.whole().map_err(error)?;
    value.to_tensor(dtype).ok_or_else(|| error((0, format!("the result is {}, and not a tensor", value.describe()))))
}

/// What was wrong, after where.
type Failed = (usize, String);

type Evaluated = Result<Argument, Failed>;

/// Reads and computes at once: an expression is read once, and building a graph costs next to nothing.
struct Evaluator<'e> {
    tokens: Vec<Token<'e>>,
    next: usize,
    depth: usize,
    inputs: &'e [(&'e str, Tensor)],
    dtype: DType,
}

/// Operators of two sides, by how tightly they bind: as in Python, where `&` binds more tightly than `<`.
const LEVELS: [&[(Symbol, &str)]; 5] = [
    &[
        (Symbol::Equal, "eq"),
        (Symbol::NotEqual, "ne"),
        (Symbol::Less, "lt"),
        (Symbol::LessEqual, "le"),
        (Symbol::Greater, "gt"),
        (Symbol::GreaterEqual, "ge"),
    ],
    &[(Symbol::Or, "or")],
    &[(Symbol::And, "and")],
    &[(Symbol::Plus, "add"), (Symbol::Minus, "sub")],
    &[(Symbol::Star, "mul"), (Symbol::Slash, "div"), (Symbol::Percent, "rem"), (Symbol::At, "matmul")],
];

/// One part of what is between brackets.
enum Index {
    At(isize),
    Range {
        start: Option<isize>,
        end: Option<isize>,
        step: isize,
    },
    /// As many whole axes as there are left.
    Rest,
}

impl<'e> Evaluator<'e> {
    fn peek(&self) -> TokenKind<'e> {
        self.tokens[self.next].kind
    }

    fn at(&self) -> usize {
        self.tokens[self.next].at
    }

    fn take(&mut self) -> Token<'e> {
        let token = self.tokens[self.next];
        // The last one is the end, which stays.
        self.next = (self.next + 1).min(self.tokens.len() - 1);
        token
    }

    fn takes(&mut self, symbol: Symbol) -> bool {
        let is_it = self.peek() == TokenKind::Symbol(symbol);
        if is_it {
            self.take();
        }
        is_it
    }

    fn expect(&mut self, symbol: Symbol) -> Result<(), Failed> {
        if self.takes(symbol) { Ok(()) } else { Err(self.unexpected(&format!("{symbol:?}").to_lowercase())) }
    }

    fn unexpected(&self, wanted: &str) -> Failed {
        (self.at(), format!("{} where {wanted} should be", self.peek().describe()))
    }

    fn whole(&mut self) -> Evaluated {
        let value = self.expression()?;
        match self.peek() {
            TokenKind::End => Ok(value),
            _ => Err(self.unexpected("the end or an operator")),
        }
    }

    fn expression(&mut self) -> Evaluated {
        self.level(0)
    }

    /// Runs a part that may contain itself.
    fn deeper(&mut self, part: impl FnOnce(&mut Self) -> Evaluated) -> Evaluated {
        if self.depth == DEPTH_MAX {
            return Err((self.at(), format!("more than {DEPTH_MAX} parts inside each other")));
        }
        self.depth += 1;
        let value = part(self);
        self.depth -= 1;
        value
    }

    fn level(&mut self, level: usize) -> Evaluated {
        let Some(operators) = LEVELS.get(level) else { return self.sign() };
        let mut left = self.level(level + 1)?;
        while let TokenKind::Symbol(symbol) = self.peek()
            && let Some((_, name)) = operators.iter().find(|(known, _)| *known == symbol)
        {
            let at = self.take().at;
            let right = self.level(level + 1)?;
            left = self.apply(name, at, &[left, right])?;
        }
        Ok(left)
    }

    fn sign(&mut self) -> Evaluated {
        self.deeper(|evaluator| {
            let at = evaluator.at();
            let name = match evaluator.peek() {
                TokenKind::Symbol(Symbol::Minus) => "neg",
                TokenKind::Symbol(Symbol::Not) => "not",
                TokenKind::Symbol(Symbol::Plus) => {
                    evaluator.take();
                    return evaluator.sign();
                }
                _ => return evaluator.power(),
            };
            evaluator.take();
            let value = evaluator.sign()?;
            evaluator.apply(name, at, &[value])
        })
    }

    /// `a ** b`, whose right side may have a sign: `a ** -1`. It binds more tightly than a sign on its left.
    fn power(&mut self) -> Evaluated {
        let base = self.postfix()?;
        let at = self.at();
        if !self.takes(Symbol::Power) {
            return Ok(base);
        }
        let exponent = self.sign()?;
        self.apply("pow", at, &[base, exponent])
    }

    fn postfix(&mut self) -> Evaluated {
        let mut value = self.primary()?;
        loop {
            let at = self.at();
            if self.takes(Symbol::Dot) {
                let TokenKind::Name(name) = self.peek() else {
                    return Err(self.unexpected("the name of an operation"));
                };
                let at = self.take().at;
                self.expect(Symbol::Open)?;
                value = self.call(name, at, Some(value))?;
            } else if self.takes(Symbol::OpenBracket) {
                value = self.indexed(&value, at)?;
            } else {
                return Ok(value);
            }
        }
    }

    fn primary(&mut self) -> Evaluated {
        let Token { kind, at } = self.take();
        match kind {
            TokenKind::Number(number) => Ok(Argument::Number(number)),
            TokenKind::Text(text) => match DType::named(text) {
                Some(dtype) => Ok(Argument::DType(dtype)),
                None => Err((at, format!("{text:?} is not a type; {}", dtypes()))),
            },
            TokenKind::Name(name) => self.named(name, at),
            TokenKind::Symbol(Symbol::Open) => self.deeper(|evaluator| {
                let value = evaluator.expression()?;
                // (1, 2) is a list too; (1) is a number.
                if evaluator.peek() == TokenKind::Symbol(Symbol::Comma) {
                    return evaluator.list(Symbol::Close, vec![value]);
                }
                evaluator.expect(Symbol::Close)?;
                Ok(value)
            }),
            TokenKind::Symbol(Symbol::OpenBracket) => {
                self.deeper(|evaluator| evaluator.list(Symbol::CloseBracket, Vec::new()))
            }
            _ => {
                self.next -= usize::from(kind != TokenKind::End);
                Err(self.unexpected("a value"))
            }
        }
    }

    /// What is left of a list, after some items.
    fn list(&mut self, close: Symbol, mut items: Vec<Argument>) -> Evaluated {
        loop {
            if !items.is_empty() && !self.takes(Symbol::Comma) {
                self.expect(close)?;
                return Ok(Argument::List(items));
            }
            if self.takes(close) {
                return Ok(Argument::List(items));
            }
            items.push(self.expression()?);
        }
    }

    fn named(&mut self, name: &str, at: usize) -> Evaluated {
        if self.takes(Symbol::Open) {
            return self.call(name, at, None);
        }
        if let Some((_, tensor)) = self.inputs.iter().find(|(known, _)| *known == name) {
            return Ok(Argument::Tensor(tensor.clone()));
        }
        match name {
            "true" | "True" => return Ok(Argument::Number(Scalar::Bool(true))),
            "false" | "False" => return Ok(Argument::Number(Scalar::Bool(false))),
            "inf" => return Ok(Argument::Number(Scalar::Float(f64::INFINITY))),
            "nan" => return Ok(Argument::Number(Scalar::Float(f64::NAN))),
            "pi" => return Ok(Argument::Number(Scalar::Float(std::f64::consts::PI))),
            _ => {}
        }
        if let Some(dtype) = DType::named(name) {
            return Ok(Argument::DType(dtype));
        }
        if Operation::named(name).is_some() {
            return Err((at, format!("{name} is an operation: call it, {name}(…)")));
        }
        let known: Vec<&str> = self.inputs.iter().map(|(name, _)| *name).collect();
        let known =
            if known.is_empty() { "nothing is given".to_owned() } else { format!("given are {}", known.join(", ")) };
        Err((at, format!("there is no {name:?}; {known}; give it as {name}=FILE.npy")))
    }

    /// A call, after its parenthesis was opened.
    fn call(&mut self, name: &str, at: usize, first: Option<Argument>) -> Evaluated {
        let Some(operation) = Operation::named(name) else { return Err((at, unknown(name))) };
        let (mut unnamed, mut named): (Vec<Argument>, Vec<(String, Argument)>) =
            (first.into_iter().collect(), Vec::new());
        let mut is_first = true;
        loop {
            if self.takes(Symbol::Close) {
                break;
            }
            if !is_first {
                self.expect(Symbol::Comma)?;
                if self.takes(Symbol::Close) {
                    break;
                }
            }
            is_first = false;
            let keyword = match (self.peek(), self.tokens.get(self.next + 1).map(|token| token.kind)) {
                (TokenKind::Name(keyword), Some(TokenKind::Symbol(Symbol::Assign))) => Some(keyword),
                _ => None,
            };
            match keyword {
                Some(keyword) => {
                    self.take();
                    self.take();
                    let value = self.deeper(Evaluator::expression)?;
                    named.push((keyword.to_owned(), value));
                }
                None if named.is_empty() => {
                    let value = self.deeper(Evaluator::expression)?;
                    unnamed.push(value);
                }
                None => return Err((self.at(), "arguments without a name come before those with one".to_owned())),
            }
        }
        self.checked(operation, at, operation.call(&unnamed, &named, self.dtype))
    }

    /// An operator, or a call by a name that is known.
    fn apply(&self, name: &str, at: usize, operands: &[Argument]) -> Evaluated {
        if let Some(number) = folded(name, operands) {
            return Ok(Argument::Number(number));
        }
        let Some(operation) = Operation::named(name) else { return Err((at, unknown(name))) };
        self.checked(operation, at, operation.call(operands, &[], self.dtype))
    }

    fn checked(&self, operation: &Operation, at: usize, made: Result<Tensor, String>) -> Evaluated {
        let tensor = made.map_err(|why| (at, format!("{}: {why}", operation.name)))?;
        match tensor.check() {
            Ok(()) => Ok(Argument::Tensor(tensor)),
            Err(error) => Err((at, format!("{}: {}", operation.name, error.what))),
        }
    }

    /// `a[1:, ::-2, 0]`, after its bracket was opened.
    fn indexed(&mut self, value: &Argument, at: usize) -> Evaluated {
        let mut indices = Vec::new();
        loop {
            if self.takes(Symbol::CloseBracket) {
                break;
            }
            if !indices.is_empty() {
                self.expect(Symbol::Comma)?;
                if self.takes(Symbol::CloseBracket) {
                    break;
                }
            }
            let index = self.index()?;
            indices.push(index);
        }
        let Some(tensor) = value.to_tensor(self.dtype) else {
            return Err((at, format!("{} has no elements to choose", value.describe())));
        };
        let rests = indices.iter().filter(|index| matches!(index, Index::Rest)).count();
        let named = indices.len() - rests;
        if rests > 1 || named > tensor.rank() {
            let why = format!("{named} indices for a tensor of shape {}, and ... once at most", tensor.shape());
            return Err((at, why));
        }
        let (mut result, mut axis) = (tensor.clone(), 0_isize);
        for index in indices {
            match index {
                Index::Rest => axis += (tensor.rank() - named).cast_signed(),
                Index::Range { start, end, step } => {
                    result = result.slice(axis, start, end, step);
                    axis += 1;
                }
                Index::At(index) => {
                    let size = usize::try_from(axis).map_or(0, |axis| result.shape().get(axis).copied().unwrap_or(0));
                    let from_start = if index < 0 { index + size.cast_signed() } else { index };
                    if !(0..size.cast_signed()).contains(&from_start) {
                        return Err((at, format!("index {index} of an axis of size {size}")));
                    }
                    result = result.slice(axis, Some(from_start), Some(from_start + 1), 1).squeeze(axis);
                }
            }
        }
        match result.check() {
            Ok(()) => Ok(Argument::Tensor(result)),
            Err(error) => Err((at, error.what.to_string())),
        }
    }

    fn index(&mut self) -> Result<Index, Failed> {
        if self.takes(Symbol::Ellipsis) {
            return Ok(Index::Rest);
        }
        let start = self.bound()?;
        if !self.takes(Symbol::Colon) {
            return start.map(Index::At).ok_or_else(|| self.unexpected("an index"));
        }
        let end = self.bound()?;
        let step = if self.takes(Symbol::Colon) { self.bound()?.unwrap_or(1) } else { 1 };
        Ok(Index::Range { start, end, step })
    }

    /// A whole number, or nothing.
    fn bound(&mut self) -> Result<Option<isize>, Failed> {
        if let TokenKind::Symbol(Symbol::Colon | Symbol::Comma | Symbol::CloseBracket) = self.peek() {
            return Ok(None);
        }
        let at = self.at();
        match self.deeper(Evaluator::expression)? {
            Argument::Number(Scalar::Int(value)) => {
                let value = isize::try_from(value).map_err(|_| (at, format!("{value} is too large for an index")))?;
                Ok(Some(value))
            }
            other => Err((at, format!("{} is not an index; use index_select or gather", other.describe()))),
        }
    }
}

/// Numbers among themselves stay numbers.
fn folded(name: &str, operands: &[Argument]) -> Option<Scalar> {
    use Scalar::{Bool, Float, Int};
    match *operands {
        [Argument::Number(a)] => match (name, a) {
            ("neg", Int(a)) => a.checked_neg().map(Int),
            ("neg", Float(a)) => Some(Float(-a)),
            ("not", Bool(a)) => Some(Bool(!a)),
            _ => None,
        },
        [Argument::Number(a), Argument::Number(b)] => {
            if let (Int(a), Int(b)) = (a, b) {
                match name {
                    "add" => return a.checked_add(b).map(Int),
                    "sub" => return a.checked_sub(b).map(Int),
                    "mul" => return a.checked_mul(b).map(Int),
                    "rem" => return a.checked_rem_euclid(b).filter(|_| b > 0).map(Int),
                    "pow" if b >= 0 => return u32::try_from(b).ok().and_then(|b| a.checked_pow(b)).map(Int),
                    _ => {}
                }
            }
            let (x, y) = (a.as_f64(), b.as_f64());
            Some(match name {
                "add" => Float(x + y),
                "sub" => Float(x - y),
                "mul" => Float(x * y),
                "div" => Float(x / y),
                "pow" => Float(x.powf(y)),
                "eq" => Bool(x == y),
                "ne" => Bool(x != y),
                "lt" => Bool(x < y),
                "le" => Bool(x <= y),
                "gt" => Bool(x > y),
                "ge" => Bool(x >= y),
                _ => return None,
            })
        }
        _ => None,
    }
}

fn dtypes() -> String {
    format!("types are {}", DType::ALL.map(DType::name).join(" "))
}

fn unknown(name: &str) -> String {
    // Names that begin alike, or that differ by a letter or two.
    let is_close = |known: &&&Operation| {
        let prefix = known.name.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
        known.name.contains(name)
            || prefix >= 4.min(known.name.len())
            || distance(known.name, name) <= 1 + name.len() / 5
    };
    let close: Vec<&str> =
        OPERATIONS.iter().collect::<Vec<_>>().iter().filter(is_close).map(|o| o.name).take(5).collect();
    match close[..] {
        [] => format!(
            "there is no operation {name:?}; the guide and `tensor-wasm tensor ops` have the {} there are",
            OPERATIONS.len()
        ),
        _ => format!("there is no operation {name:?}; there is {}", close.join(", ")),
    }
}

/// Letters to change, add or leave out until one name is the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(32).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let changed = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given() -> Vec<(&'static str, Tensor)> {
        vec![
            ("a", Tensor::arange(0, 6, 1, DType::F32).reshape(&[2, 3])),
            ("n", Tensor::from_slice(&[7_i64, -7, 3], &[3])),
        ]
    }

    fn elements(text: &str) -> Vec<f64> {
        evaluate(text, &given(), DType::F32).unwrap_or_else(|e| panic!("{e}")).to_f64().unwrap()
    }

    #[test]
    fn operators_bind_and_calls_bind_as_they_do_in_python() {
        for (text, expect) in [
            ("1 + 2 * 3", &[7.0][..]),
            ("-2 ** 2", &[-4.0]),
            ("2 ** -1", &[0.5]),
            ("7 / 2", &[3.5]),
            ("[1, 2] * 2 + 1", &[3.0, 5.0]),
            ("sum(a)", &[15.0]),
            ("a.sum(axis=0)", &[3.0, 5.0, 7.0]),
            ("a.sum(1, keepdims=true).reshape([-1])", &[3.0, 12.0]),
            ("sum(a, axis=(0, 1))", &[15.0]),
            ("a[1:, ::-2].reshape([2])", &[5.0, 3.0]),
            ("a[..., 0]", &[0.0, 3.0]),
            ("a[-1, 1]", &[4.0]),
            ("(a > 1) & (a < 4)", &[0.0, 0.0, 1.0, 1.0, 0.0, 0.0]),
            ("~(a >= 1) | (a == 5)", &[1.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
            ("n / 2", &[3.0, -3.0, 1.0]),
            ("n % 4", &[3.0, 1.0, 3.0]),
            ("a @ a.transpose()", &[5.0, 14.0, 14.0, 50.0]),
            ("where(a > 2, a, 0)[1]", &[3.0, 4.0, 5.0]),
            ("10 - a[0]", &[10.0, 9.0, 8.0]),
            ("concat([a[0], a[1]])", &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
            ("gather(a, 1, [[2], [0]])", &[2.0, 3.0]),
            ("gather(a, [[2], [0]], 1)", &[2.0, 3.0]),
            ("cast(a * 1.5, dtype=i32)[0]", &[0.0, 1.0, 3.0]),
            ("cast(a, \"u8\")[0]", &[0.0, 1.0, 2.0]),
            ("arange(3)", &[0.0, 1.0, 2.0]),
            ("full([2], 1e3)", &[1000.0, 1000.0]),
            (".5 + 3. * 1_0", &[30.5]),
            ("topk(a, 1, indices=true).reshape([2])", &[2.0, 2.0]),
            // Padding is less than anything, whatever elements are.
            ("max_pool2d(full([1, 1, 1, 1], -5, i32), 3, padding=1).reshape([1])", &[-5.0]),
            ("max_pool2d(full([1, 1, 1, 1], -5, i64), 3, padding=1).reshape([1])", &[-5.0]),
            ("max_pool2d(full([1, 1, 1, 1], -5, f16), 3, padding=1).reshape([1])", &[-5.0]),
        ] {
            assert_eq!(elements(text), expect, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_read_says_where_and_why() {
        for (text, at, why) in [
            ("", 0, "the end where a value"),
            ("a +", 3, "the end where a value"),
            ("a b", 2, "\"b\" where the end or an operator"),
            ("b + 1", 0, "there is no \"b\"; given are a, n; give it as b=FILE.npy"),
            ("sofmax(a)", 0, "there is softmax"),
            ("1 + softmax(a, axis=5)", 4, "axis 5 of a tensor of shape [2, 3]"),
            ("a @ a", 2, "matmul"),
            ("softmax(a, axes=1)", 0, "there is no parameter \"axes\"; it is softmax(x, axis=-1)"),
            ("softmax(a, axis=1.5)", 0, "axis is 1.5, and takes a whole number"),
            ("sum(a, 1, true, 3)", 0, "one argument too many"),
            ("reshape(a)", 0, "shape is missing"),
            ("a[5]", 1, "index 5 of an axis of size 2"),
            ("a[0, 0, 0]", 1, "3 indices for a tensor of shape [2, 3]"),
            ("a $ 2", 2, "'$' means nothing here"),
            ("relu", 0, "relu is an operation: call it, relu(…)"),
            ("f32", 0, "the result is the type f32"),
            ("cast(a, 'f31')", 8, "types are bool u8"),
            ("n + 0.5", 2, "use cast"),
            ("sum(axis=1, a)", 12, "before those with one"),
            ("'a", 0, "not closed"),
            ("[[1, 2], [3]]", 0, "the result is a list of 2"),
        ] {
            let error = evaluate(text, &given(), DType::F32).expect_err(text);
            assert!(error.why.contains(why), "{text}: {error}");
            assert_eq!(error.at, at, "{text}: {error}");
        }
        let error = evaluate("1 +\n  bé * 2", &given(), DType::F32).unwrap_err();
        assert!(error.to_string().ends_with("\n    bé * 2\n    ^"), "{error}");
        for deep in ["(".repeat(5_000), "-".repeat(5_000), "[".repeat(5_000), "a[".repeat(5_000), "sum(".repeat(5_000)]
        {
            let error = evaluate(&deep, &given(), DType::F32).unwrap_err();
            assert!(error.why.contains("inside each other"), "{error}");
        }
        assert!(evaluate(&"1+".repeat(40_000), &[], DType::F32).unwrap_err().why.contains("at most"));
    }

    #[test]
    fn no_text_is_too_odd_to_be_refused() {
        use rand::{Rng, SeedableRng, seq::IndexedRandom};
        let mut random = rand::rngs::StdRng::seed_from_u64(1);
        let words = [
            "a",
            "n",
            "(",
            ")",
            "[",
            "]",
            ",",
            ":",
            ".",
            "+",
            "-",
            "**",
            "@",
            "%",
            "/",
            "==",
            "&",
            "~",
            "=",
            "1",
            "0",
            "-1",
            "2.5",
            "1e9",
            "9223372036854775807",
            "axis",
            "softmax",
            "sum",
            "slice",
            "reshape",
            "conv2d",
            "topk",
            "é",
            "'",
            "f32",
            "true",
            "...",
            "where",
            "x",
            "split",
            "zeros",
            "pad",
            "expand",
            "0.",
            "cast",
            "gather",
            "stack",
        ];
        let mut values = 0;
        for _ in 0..20_000 {
            let text: Vec<&str> =
                (0..random.random_range(1..12)).filter_map(|_| words.choose(&mut random).copied()).collect();
            values += usize::from(evaluate(&text.join(" "), &given(), DType::F32).is_ok());
        }
        assert!(values > 100, "{values}");
    }
}
