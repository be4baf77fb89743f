//! What operations are called with when the caller is a text: values, and how they become parameters.

use crate::dtype::{DType, Scalar};
use crate::tensor::{Convolution, Tensor, Window};

/// A value that an operation is given, or that an expression amounts to.
#[derive(Debug, Clone)]
pub enum Argument {
    Tensor(Tensor),
    Number(Scalar),
    List(Vec<Argument>),
    DType(DType),
}

impl Argument {
    /// In words, for errors.
    pub(crate) fn describe(&self) -> String {
        match self {
            Argument::Tensor(tensor) => format!("a tensor of shape {} of {}", tensor.shape(), tensor.dtype()),
            Argument::Number(Scalar::Bool(value)) => value.to_string(),
            Argument::Number(Scalar::Int(value)) => value.to_string(),
            Argument::Number(Scalar::Float(value)) => value.to_string(),
            Argument::List(items) => format!("a list of {}", items.len()),
            Argument::DType(dtype) => format!("the type {dtype}"),
        }
    }

    /// A tensor of what it is made of. Numbers by themselves become elements of `dtype`, or integers where they are.
    pub(crate) fn to_tensor(&self, dtype: DType) -> Option<Tensor> {
        match self {
            Argument::Tensor(tensor) => Some(tensor.clone()),
            Argument::Number(number) => Some(Tensor::scalar(*number, literal_dtype([*number], dtype))),
            Argument::List(_) => {
                let (mut sizes, mut numbers) = (Vec::new(), Vec::new());
                self.flatten(0, &mut sizes, &mut numbers)?;
                let dtype = literal_dtype(numbers.iter().copied(), dtype);
                let elements: Vec<f64> = numbers.iter().map(|number| number.as_f64()).collect();
                if dtype == DType::I64 {
                    let elements = numbers.iter().map(|number| number.as_i64()).collect();
                    return Some(Tensor::from_vec::<i64>(elements, &sizes));
                }
                Some(Tensor::from_vec(elements, &sizes).cast(dtype))
            }
            Argument::DType(_) => None,
        }
    }

    /// The numbers of a list of lists, which all have the same lengths.
    fn flatten(&self, depth: usize, sizes: &mut Vec<usize>, numbers: &mut Vec<Scalar>) -> Option<()> {
        match self {
            Argument::Number(number) if depth == sizes.len() => numbers.push(*number),
            Argument::List(items) => {
                // The first list on each depth says how long its siblings are.
                if numbers.is_empty() && depth == sizes.len() {
                    sizes.push(items.len());
                }
                if sizes.get(depth) != Some(&items.len()) {
                    return None;
                }
                for item in items {
                    item.flatten(depth + 1, sizes, numbers)?;
                }
            }
            _ => return None,
        }
        Some(())
    }
}

/// What literals are elements of: true and false, whole numbers, and everything else.
fn literal_dtype(numbers: impl IntoIterator<Item = Scalar>, floats: DType) -> DType {
    let (mut is_bool, mut is_int) = (true, true);
    for number in numbers {
        is_bool &= matches!(number, Scalar::Bool(_));
        is_int &= matches!(number, Scalar::Int(_));
    }
    match (is_bool, is_int) {
        (true, true) => floats,
        (true, false) => DType::Bool,
        (false, true) => DType::I64,
        (false, false) => floats,
    }
}

/// What a parameter takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterKind {
    Tensor,
    /// A tensor, or a number that becomes what it meets.
    Operand,
    /// A list of tensors.
    Tensors,
    Int,
    Float,
    Bool,
    /// One number or a list of them.
    Ints,
    DType,
}

impl ParameterKind {
    fn takes(self, argument: &Argument) -> bool {
        let is_int = |argument: &Argument| matches!(argument, Argument::Number(Scalar::Int(_)));
        match (self, argument) {
            (ParameterKind::Tensor, Argument::Tensor(_)) => true,
            (ParameterKind::Operand, Argument::Tensor(_) | Argument::Number(_)) => true,
            // A list of numbers is a tensor that was written down.
            (ParameterKind::Tensor | ParameterKind::Operand, Argument::List(_)) => {
                argument.to_tensor(DType::F32).is_some()
            }
            (ParameterKind::Tensors, Argument::List(items)) => {
                items.iter().all(|item| matches!(item, Argument::Tensor(_) | Argument::List(_)))
            }
            (ParameterKind::Int, argument) => is_int(argument),
            (ParameterKind::Float, Argument::Number(Scalar::Int(_) | Scalar::Float(_))) => true,
            (ParameterKind::Bool, Argument::Number(Scalar::Bool(_))) => true,
            (ParameterKind::Ints, Argument::List(items)) => items.iter().all(is_int),
            (ParameterKind::Ints, argument) => is_int(argument),
            (ParameterKind::DType, Argument::DType(_)) => true,
            _ => false,
        }
    }

    fn name(self) -> &'static str {
        match self {
            ParameterKind::Tensor => "a tensor",
            ParameterKind::Operand => "a tensor or a number",
            ParameterKind::Tensors => "a list of tensors",
            ParameterKind::Int => "a whole number",
            ParameterKind::Float => "a number",
            ParameterKind::Bool => "true or false",
            ParameterKind::Ints => "a whole number or a list of them",
            ParameterKind::DType => "a type such as f32",
        }
    }
}

/// What an operation is given, under which name.
#[derive(Debug, Clone, Copy)]
pub struct Parameter {
    pub name: &'static str,
    pub kind: ParameterKind,
    /// What it is where nobody says; none where somebody must. Empty where it depends on the rest.
    pub default: Option<&'static str>,
}

/// The arguments of one call, each with its parameter.
pub(crate) struct Arguments<'a> {
    parameters: &'static [Parameter],
    values: Vec<Option<&'a Argument>>,
    /// What floats that come from nowhere are.
    pub dtype: DType,
}

/// What an operation says to arguments that it cannot take.
pub(crate) type Refusal = String;

impl<'a> Arguments<'a> {
    /// Gives every argument its parameter. Those without a name go, in order, each to the first that is free and takes
    /// such a thing: so `gather(x, index, 1)` is `gather(x, 1, index)`.
    pub(crate) fn bind(
        parameters: &'static [Parameter],
        unnamed: &'a [Argument],
        named: &'a [(String, Argument)],
        dtype: DType,
    ) -> Result<Arguments<'a>, Refusal> {
        let mut values: Vec<Option<&Argument>> = vec![None; parameters.len()];
        for (name, argument) in named {
            let Some(at) = parameters.iter().position(|parameter| parameter.name == name) else {
                return Err(format!("there is no parameter {name:?}"));
            };
            let kind = parameters[at].kind;
            if !kind.takes(argument) {
                return Err(format!("{name} is {}, and takes {}", argument.describe(), kind.name()));
            }
            if values[at].replace(argument).is_some() {
                return Err(format!("{name} is given twice"));
            }
        }
        for argument in unnamed {
            let free = |at: &usize| values[*at].is_none();
            let fits = (0..parameters.len()).filter(free).find(|at| parameters[*at].kind.takes(argument));
            match (fits, (0..parameters.len()).find(free)) {
                (Some(at), _) => values[at] = Some(argument),
                (None, Some(at)) => {
                    let Parameter { name, kind, .. } = parameters[at];
                    return Err(format!("{name} is {}, and takes {}", argument.describe(), kind.name()));
                }
                (None, None) => return Err(format!("{} is one argument too many", argument.describe())),
            }
        }
        let missing = parameters.iter().zip(&values).find(|(known, value)| known.default.is_none() && value.is_none());
        match missing {
            Some((parameter, _)) => Err(format!("{} is missing: {}", parameter.name, parameter.kind.name())),
            None => Ok(Arguments { parameters, values, dtype }),
        }
    }

    fn get(&self, name: &str) -> Option<&'a Argument> {
        let at = self.parameters.iter().position(|parameter| parameter.name == name)?;
        self.values[at]
    }

    fn needed(&self, name: &str) -> Result<&'a Argument, Refusal> {
        self.get(name).ok_or_else(|| format!("{name} is missing"))
    }

    fn wrong(name: &str, argument: &Argument) -> Refusal {
        format!("{name} cannot be {}", argument.describe())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor, Refusal> {
        let argument = self.needed(name)?;
        argument.to_tensor(self.dtype).ok_or_else(|| Arguments::wrong(name, argument))
    }

    /// A number in the type that `other` has.
    pub(crate) fn operand(&self, name: &str, other: &Tensor) -> Result<Tensor, Refusal> {
        match self.needed(name)? {
            Argument::Number(Scalar::Float(number)) if !other.dtype().is_float() && number.fract() != 0.0 => {
                Err(format!("{name} is {number}, and elements are {}; use cast", other.dtype()))
            }
            Argument::Number(number) => Ok(Tensor::scalar(*number, other.dtype())),
            argument => argument.to_tensor(other.dtype()).ok_or_else(|| Arguments::wrong(name, argument)),
        }
    }

    /// Two operands; a number becomes what the other one is.
    pub(crate) fn operands(&self, left: &str, right: &str) -> Result<(Tensor, Tensor), Refusal> {
        if let (Argument::Number(_), Argument::Tensor(_) | Argument::List(_)) =
            (self.needed(left)?, self.needed(right)?)
        {
            let right = self.tensor(right)?;
            return Ok((self.operand(left, &right)?, right));
        }
        let left = self.tensor(left)?;
        let right = self.operand(right, &left)?;
        Ok((left, right))
    }

    pub(crate) fn tensors(&self, name: &str) -> Result<Vec<Tensor>, Refusal> {
        let argument = self.needed(name)?;
        let Argument::List(items) = argument else { return Err(Arguments::wrong(name, argument)) };
        let tensor = |item: &Argument| item.to_tensor(self.dtype).ok_or_else(|| Arguments::wrong(name, item));
        items.iter().map(tensor).collect()
    }

    pub(crate) fn int(&self, name: &str, default: i64) -> Result<isize, Refusal> {
        let value = match self.get(name) {
            Some(Argument::Number(Scalar::Int(value))) => *value,
            Some(other) => return Err(Arguments::wrong(name, other)),
            None => default,
        };
        isize::try_from(value).map_err(|_| format!("{name} is {value}, which is too large"))
    }

    pub(crate) fn count(&self, name: &str, default: usize) -> Result<usize, Refusal> {
        match self.get(name) {
            None => Ok(default),
            Some(_) => {
                let value = self.int(name, 0)?;
                usize::try_from(value).map_err(|_| format!("{name} is {value}, which is less than nothing"))
            }
        }
    }

    pub(crate) fn float(&self, name: &str, default: f64) -> Result<f64, Refusal> {
        match self.get(name) {
            Some(Argument::Number(number)) => Ok(number.as_f64()),
            Some(other) => Err(Arguments::wrong(name, other)),
            None => Ok(default),
        }
    }

    pub(crate) fn flag(&self, name: &str) -> Result<bool, Refusal> {
        match self.get(name) {
            Some(Argument::Number(Scalar::Bool(value))) => Ok(*value),
            Some(other) => Err(Arguments::wrong(name, other)),
            None => Ok(false),
        }
    }

    pub(crate) fn dtype(&self, name: &str) -> Result<DType, Refusal> {
        match self.get(name) {
            Some(Argument::DType(dtype)) => Ok(*dtype),
            Some(other) => Err(Arguments::wrong(name, other)),
            None => Ok(self.dtype),
        }
    }

    /// None where it is not said.
    pub(crate) fn ints(&self, name: &str) -> Result<Option<Vec<isize>>, Refusal> {
        let int = |item: &Argument| match item {
            Argument::Number(Scalar::Int(value)) => {
                isize::try_from(*value).map_err(|_| format!("{name} has {value}, which is too large"))
            }
            other => Err(Arguments::wrong(name, other)),
        };
        match self.get(name) {
            None => Ok(None),
            Some(Argument::List(items)) => items.iter().map(int).collect::<Result<_, _>>().map(Some),
            Some(one) => Ok(Some(vec![int(one)?])),
        }
    }

    pub(crate) fn sizes(&self, name: &str) -> Result<Vec<usize>, Refusal> {
        let size =
            |value: isize| usize::try_from(value).map_err(|_| format!("{name} has {value}; sizes are not negative"));
        self.ints(name)?.unwrap_or_default().into_iter().map(size).collect()
    }

    /// One number for rows and columns, or one for each.
    fn pair(&self, name: &str, default: usize) -> Result<[usize; 2], Refusal> {
        match self.sizes(name)?[..] {
            [] => Ok([default; 2]),
            [both] => Ok([both; 2]),
            [rows, columns] => Ok([rows, columns]),
            _ => Err(format!("{name} is one number, or two: for rows and for columns")),
        }
    }

    pub(crate) fn window(&self, default_stride: usize) -> Result<Window, Refusal> {
        let stride = self.count("stride", default_stride)?;
        let dilation =
            if self.parameters.iter().any(|p| p.name == "dilation") { self.count("dilation", 1)? } else { 1 };
        Ok(Window { stride, padding: self.count("padding", 0)?, dilation })
    }

    pub(crate) fn convolution(&self) -> Result<Convolution, Refusal> {
        let (stride, padding, dilation) =
            (self.pair("stride", 1)?, self.pair("padding", 0)?, self.pair("dilation", 1)?);
        let window = |axis: usize| Window { stride: stride[axis], padding: padding[axis], dilation: dilation[axis] };
        Ok(Convolution { rows: window(0), columns: window(1), groups: self.count("groups", 1)? })
    }
}
