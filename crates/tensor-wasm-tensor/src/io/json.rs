//! Nested lists of numbers in JSON, as Python's `array.tolist()` has them. Written by hand: the parser of `serde_json`
//! is off by the last bit of some floats unless a feature is set, for everybody who uses it; and a list of numbers
//! needs no more than this.

use std::fmt::Write;
use std::panic::Location;

use super::{FileCall, Parsed, TextElements, Why, for_each_text, shortened};
use crate::dtype::DType;
use crate::error::Result;
use crate::shape::RANK_MAX;
use crate::tensor::{Caller, Tensor};

/// Lists that a tensor without elements is written as: `[2, 0]` is `[[],[]]`, and the 2 may be anything.
const EMPTY_LISTS_MAX: usize = 1 << 20;

/// Writes a tensor as nested lists. What is read again with [`from_json`] is the same to the bit; but JSON has no NaN
/// and no infinities, which are an error, and of a shape such as `[0, 3]` only that it is empty is seen.
#[track_caller]
pub fn to_json(tensor: &Tensor) -> Result<String> {
    FileCall::on_bytes("to_json", Location::caller()).run(|_| write(tensor))
}

/// Reads nested lists of numbers, or a single number. All lists of one depth have the same length.
#[track_caller]
pub fn from_json(text: &str, dtype: DType) -> Result<Tensor> {
    FileCall::on_bytes("from_json", Location::caller()).run(|at| Json { all: text, at: 0 }.tensor(dtype, at))
}

fn write(tensor: &Tensor) -> Parsed<String> {
    let (shape, value) = (tensor.shape(), tensor.value()?);
    let mut text = String::new();
    if shape.contains(&0) {
        return empty(&shape);
    }
    let mut count = 0_usize;
    for_each_text(&value, tensor.dtype(), |element| {
        let lists = boundaries(&shape, count);
        if count > 0 {
            text.extend(std::iter::repeat_n(']', lists));
            text.push(',');
        }
        text.extend(std::iter::repeat_n('[', lists));
        let start = text.len();
        write!(text, "{element}").map_err(|_| "it cannot be written")?;
        if matches!(&text[start..], "NaN" | "inf" | "-inf") {
            let found = &text[start..];
            let why = format!("element {count} is {found}, which JSON cannot say; save it as .npy or safetensors");
            return Err(why.into());
        }
        count += 1;
        Ok(())
    })?;
    text.extend(std::iter::repeat_n(']', shape.rank()));
    Ok(text)
}

/// How many lists begin at the element of that number: as many as its last indices are all zero.
fn boundaries(sizes: &[usize], n: usize) -> usize {
    let mut whole = 1;
    let is_first = |size: &&usize| {
        whole *= **size;
        n.is_multiple_of(whole)
    };
    sizes.iter().rev().take_while(is_first).count()
}

/// Lists up to the first axis that has nothing.
fn empty(sizes: &[usize]) -> Parsed<String> {
    let outer: Vec<usize> = sizes.iter().copied().take_while(|size| *size > 0).collect();
    let lists = outer.iter().try_fold(1_usize, |all, size| all.checked_mul(*size));
    if lists.is_none_or(|lists| lists > EMPTY_LISTS_MAX) {
        return Err(format!("shape {sizes:?} is more than {EMPTY_LISTS_MAX} lists of nothing").into());
    }
    let text = |inside: String, size: &usize| format!("[{}]", vec![inside; *size].join(","));
    Ok(outer.iter().rev().fold("[]".to_owned(), text))
}

struct Json<'a> {
    all: &'a str,
    at: usize,
}

impl<'a> Json<'a> {
    fn tensor(mut self, dtype: DType, caller: Caller) -> Parsed<Tensor> {
        let mut elements = TextElements::new(dtype);
        // The length of lists at each depth, once one of them has ended.
        let mut sizes: Vec<Option<usize>> = Vec::new();
        // How many elements the open lists have.
        let mut open: Vec<usize> = Vec::new();
        // How deep the numbers are.
        let mut depth = None;
        loop {
            // A value.
            if self.eat(b'[') {
                open.push(0);
                if open.len() > RANK_MAX {
                    return Err(self.wrong(&format!("lists are nested deeper than the {RANK_MAX} axes of a tensor")));
                }
                if depth.is_some_and(|depth| open.len() > depth) {
                    return Err(self.wrong("a list is where other lists have numbers"));
                }
                if sizes.len() < open.len() {
                    sizes.push(None);
                }
                if !self.eat(b']') {
                    continue;
                }
                self.close(&mut open, &mut sizes)?;
            } else {
                let token = self.token()?;
                if *depth.get_or_insert(open.len()) != open.len() || sizes.len() > open.len() {
                    return Err(self.wrong("a number is where other lists have lists"));
                }
                let is_right = match token {
                    "true" | "false" => dtype == DType::Bool,
                    _ => is_number(token) && dtype != DType::Bool,
                };
                if !is_right {
                    return Err(self.wrong(&format!("{:?} is no {dtype}", shortened(token.as_bytes()))));
                }
                elements.push(token).map_err(|why| why.of(&self.place()))?;
            }
            // What comes after it.
            loop {
                let Some(count) = open.last_mut() else {
                    if self.peek().is_some() {
                        return Err(self.wrong("there is something behind the end"));
                    }
                    let sizes: Vec<usize> = sizes.into_iter().map(Option::unwrap_or_default).collect();
                    return elements.tensor(&sizes, caller);
                };
                *count += 1;
                if self.eat(b',') {
                    break;
                }
                if !self.eat(b']') {
                    return Err(self.wrong("',' or ']' was expected"));
                }
                self.close(&mut open, &mut sizes)?;
            }
        }
    }

    /// A list has ended.
    fn close(&self, open: &mut Vec<usize>, sizes: &mut [Option<usize>]) -> Parsed<()> {
        let depth = open.len().saturating_sub(1);
        let count = open.pop().unwrap_or_default();
        match sizes.get_mut(depth) {
            Some(Some(known)) if *known != count => {
                Err(self.wrong(&format!("a list has {count} elements where others have {known}; all have the same")))
            }
            Some(size) => {
                *size = Some(count);
                Ok(())
            }
            None => Err(self.wrong("a list ends that did not begin")),
        }
    }

    fn peek(&mut self) -> Option<u8> {
        let rest = &self.all.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count();
        self.all.as_bytes().get(self.at).copied()
    }

    fn eat(&mut self, byte: u8) -> bool {
        let is_there = self.peek() == Some(byte);
        self.at += usize::from(is_there);
        is_there
    }

    /// What a number or a truth value is written with.
    fn token(&mut self) -> Parsed<&'a str> {
        self.peek();
        let rest = &self.all[self.at..];
        let len = rest.bytes().take_while(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(byte)).count();
        if len == 0 {
            let found = rest.chars().next().map_or("the end".to_owned(), |found| format!("{found:?}"));
            return Err(self.wrong(&format!("a number or a list was expected, and not {found}")));
        }
        self.at += len;
        Ok(&rest[..len])
    }

    fn place(&self) -> String {
        let before = &self.all.as_bytes()[..self.at];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let column = before.iter().rev().take_while(|byte| **byte != b'\n').count();
        format!("line {line}, column {column}")
    }

    fn wrong(&self, why: &str) -> Why {
        Why::from(why).of(&self.place())
    }
}

/// Whether a text is a number as JSON has them.
fn is_number(text: &str) -> bool {
    let text = text.strip_prefix('-').unwrap_or(text);
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent.strip_prefix(['+', '-']).unwrap_or(exponent))),
        None => (text, None),
    };
    let (whole, fraction) = match mantissa.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (mantissa, None),
    };
    let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    are_digits(whole)
        && (whole.len() == 1 || !whole.starts_with('0'))
        && fraction.is_none_or(are_digits)
        && exponent.is_none_or(are_digits)
}
