//! What operations are given.

use super::{DType, Result, Tensor, raw};

/// An argument: with a name it goes to that parameter, without one to the first that is free and takes such a thing.
#[derive(Debug, Clone)]
pub struct Argument<'a> {
    name: Option<&'a str>,
    value: Value<'a>,
}

#[derive(Debug, Clone)]
pub enum Value<'a> {
    Tensor(&'a Tensor),
    Tensors(Vec<&'a Tensor>),
    Integer(i64),
    Number(f64),
    Bool(bool),
    Integers(Vec<i64>),
    DType(DType),
}

/// An argument for the parameter of that name: `named("axis", -1)`.
pub fn named<'a>(name: &'a str, value: impl Into<Value<'a>>) -> Argument<'a> {
    Argument { name: Some(name), value: value.into() }
}

impl<'a> Argument<'a> {
    pub(super) fn raw(&self) -> Result<raw::Argument<'_>> {
        let value = match &self.value {
            Value::Tensor(tensor) => raw::Value::Tensor(tensor.raw()?),
            Value::Tensors(tensors) => {
                raw::Value::Tensors(tensors.iter().map(|tensor| tensor.raw()).collect::<Result<_>>()?)
            }
            Value::Integer(value) => raw::Value::Integer(*value),
            Value::Number(value) => raw::Value::Number(*value),
            Value::Bool(value) => raw::Value::Boolean(*value),
            Value::Integers(values) => raw::Value::Integers(values.clone()),
            Value::DType(dtype) => raw::Value::Dtype(dtype.raw()),
        };
        Ok(raw::Argument { name: self.name.map(str::to_owned), value })
    }
}

impl<'a, V: Into<Value<'a>>> From<V> for Argument<'a> {
    fn from(value: V) -> Argument<'a> {
        Argument { name: None, value: value.into() }
    }
}

macro_rules! values {
    ($($from:ty, $variant:ident, |$value:ident| $made:expr;)*) => {
        $(impl<'a> From<$from> for Value<'a> {
            fn from($value: $from) -> Value<'a> {
                Value::$variant($made)
            }
        })*
    };
}

values! {
    &'a Tensor, Tensor, |tensor| tensor;
    &[&'a Tensor], Tensors, |tensors| tensors.to_vec();
    i32, Integer, |value| value.into();
    i64, Integer, |value| value;
    f32, Number, |value| value.into();
    f64, Number, |value| value;
    bool, Bool, |value| value;
    &[i64], Integers, |values| values.to_vec();
    &[usize], Integers, |sizes| sizes.iter().map(|size| *size as i64).collect();
    DType, DType, |dtype| dtype;
}
