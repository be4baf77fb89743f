//! JSON ↔ guest values, typed by the export's signature: the language in which exports are called.
//!
//! | WIT or Wasm type | JSON |
//! |---|---|
//! | integers | number, or a string for those that do not fit a double |
//! | `f32`, `f64` | number, or `"NaN"`, `"Infinity"`, `"-Infinity"` |
//! | `char`, `string` | string |
//! | `list`, `tuple` | array |
//! | `record` | object; fields of option type may be left out |
//! | `variant` | `{"case": payload}`, or `"case"` where there is none |
//! | `enum` | `"case"` |
//! | `option<T>` | `null` or the value; nested options as `{"some": value}` |
//! | `result` | `{"ok": value}` or `{"err": value}` |
//! | `flags` | array of names |
//!
//! Errors carry the path of the value that is wrong, as `args[1].name`.

use serde_json::{Map, Number, Value, json};
use wasmtime::component::types::Type;
use wasmtime::component::{Val, types};
use wasmtime::{Val as CoreVal, ValType};

/// Where a value stands and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    pub path: String,
    pub why: String,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path, self.why)
    }
}

type Decoded<T> = Result<T, Mismatch>;

/// A path that is only written out when something is wrong.
#[derive(Clone, Copy)]
pub struct Path<'a> {
    parent: Option<&'a Path<'a>>,
    step: PathStep<'a>,
}

#[derive(Clone, Copy)]
enum PathStep<'a> {
    Root(&'a str),
    Index(usize),
    Field(&'a str),
}

impl<'a> Path<'a> {
    pub fn root(name: &'a str) -> Path<'a> {
        Path { parent: None, step: PathStep::Root(name) }
    }

    pub fn index(&'a self, index: usize) -> Path<'a> {
        Path { parent: Some(self), step: PathStep::Index(index) }
    }

    pub fn field(&'a self, name: &'a str) -> Path<'a> {
        Path { parent: Some(self), step: PathStep::Field(name) }
    }

    fn write(&self) -> String {
        let mut text = self.parent.map_or_else(String::new, |parent| parent.write());
        match self.step {
            PathStep::Root(name) => text.push_str(name),
            PathStep::Index(index) => text.push_str(&format!("[{index}]")),
            PathStep::Field(name) => text.push_str(&format!(".{name}")),
        }
        text
    }

    fn wrong<T>(&self, why: impl Into<String>) -> Decoded<T> {
        Err(Mismatch { path: self.write(), why: why.into() })
    }

    fn expected<T>(&self, what: &str, found: &Value) -> Decoded<T> {
        self.wrong(format!("expected {what}, found {}", describe(found)))
    }
}

/// A JSON value for a parameter of a component function.
pub fn decode(value: &Value, ty: &Type, at: Path<'_>) -> Decoded<Val> {
    Ok(match ty {
        Type::Bool => match value {
            Value::Bool(b) => Val::Bool(*b),
            other => return at.expected("true or false", other),
        },
        Type::S8 => Val::S8(integer(value, "s8", at)?),
        Type::U8 => Val::U8(integer(value, "u8", at)?),
        Type::S16 => Val::S16(integer(value, "s16", at)?),
        Type::U16 => Val::U16(integer(value, "u16", at)?),
        Type::S32 => Val::S32(integer(value, "s32", at)?),
        Type::U32 => Val::U32(integer(value, "u32", at)?),
        Type::S64 => Val::S64(integer(value, "s64", at)?),
        Type::U64 => Val::U64(integer(value, "u64", at)?),
        Type::Float32 => Val::Float32(float32(value, at)?),
        Type::Float64 => Val::Float64(float(value, at)?),
        Type::Char => match value.as_str().map(|s| (s, s.chars().next())) {
            Some((s, Some(c))) if s.len() == c.len_utf8() => Val::Char(c),
            _ => return at.expected("a string of one character", value),
        },
        Type::String => match value {
            Value::String(s) => Val::String(s.clone()),
            other => return at.expected("a string", other),
        },
        Type::List(list) => Val::List(items(value, &list.ty(), at)?),
        Type::FixedLengthList(list) => {
            let items = items(value, &list.ty(), at)?;
            if items.len() != list.len() as usize {
                return at.wrong(format!("expected {} items, found {}", list.len(), items.len()));
            }
            Val::FixedLengthList(items)
        }
        Type::Map(map) => Val::Map(pairs(value, map, at)?),
        Type::Record(record) => Val::Record(fields(value, record, at)?),
        Type::Tuple(tuple) => {
            let types: Vec<Type> = tuple.types().collect();
            let Value::Array(values) = value else { return at.expected("an array", value) };
            if values.len() != types.len() {
                return at.wrong(format!("expected {} items, found {}", types.len(), values.len()));
            }
            let item = |(i, (v, t)): (usize, (&Value, &Type))| decode(v, t, at.index(i));
            Val::Tuple(values.iter().zip(&types).enumerate().map(item).collect::<Decoded<_>>()?)
        }
        Type::Variant(variant) => case(value, variant, at)?,
        Type::Enum(names) => match value.as_str().filter(|s| names.names().any(|n| n == *s)) {
            Some(name) => Val::Enum(name.to_owned()),
            None => return at.expected(&format!("one of {}", quoted(names.names())), value),
        },
        Type::Option(option) => match (value, option.ty()) {
            (Value::Null, _) => Val::Option(None),
            (value, inner @ Type::Option(_)) => match single(value) {
                Some(("some", value)) => Val::Option(Some(Box::new(decode(value, &inner, at.field("some"))?))),
                _ => return at.expected("null or {\"some\": value}", value),
            },
            (value, inner) => Val::Option(Some(Box::new(decode(value, &inner, at)?))),
        },
        Type::Result(result) => {
            let payload = |ty: Option<Type>, value: &Value, at: Path<'_>| match ty {
                Some(ty) => decode(value, &ty, at).map(|v| Some(Box::new(v))),
                None if value.is_null() => Ok(None),
                None => at.expected("null", value),
            };
            match single(value) {
                Some(("ok", value)) => Val::Result(Ok(payload(result.ok(), value, at.field("ok"))?)),
                Some(("err", value)) => Val::Result(Err(payload(result.err(), value, at.field("err"))?)),
                _ => return at.expected("{\"ok\": value} or {\"err\": value}", value),
            }
        }
        Type::Flags(flags) => {
            let Value::Array(values) = value else { return at.expected("an array of names", value) };
            let mut set = Vec::with_capacity(values.len());
            for (i, value) in values.iter().enumerate() {
                match value.as_str().filter(|s| flags.names().any(|n| n == *s)) {
                    Some(name) => set.push(name.to_owned()),
                    None => return at.index(i).expected(&format!("one of {}", quoted(flags.names())), value),
                }
            }
            Val::Flags(set)
        }
        Type::Own(_) | Type::Borrow(_) | Type::Future(_) | Type::Stream(_) | Type::ErrorContext => {
            return at.wrong("its type is a handle, which JSON cannot carry");
        }
    })
}

fn items(value: &Value, ty: &Type, at: Path<'_>) -> Decoded<Vec<Val>> {
    let Value::Array(values) = value else { return at.expected("an array", value) };
    values.iter().enumerate().map(|(i, v)| decode(v, ty, at.index(i))).collect()
}

fn pairs(value: &Value, map: &types::Map, at: Path<'_>) -> Decoded<Vec<(Val, Val)>> {
    let (key, item) = (map.key(), map.value());
    match value {
        Value::Object(object) if matches!(key, Type::String) => object
            .iter()
            .map(|(name, value)| Ok((Val::String(name.clone()), decode(value, &item, at.field(name))?)))
            .collect(),
        Value::Array(values) => values
            .iter()
            .enumerate()
            .map(|(i, pair)| match pair.as_array().map(Vec::as_slice) {
                Some([k, v]) => Ok((decode(k, &key, at.index(i))?, decode(v, &item, at.index(i))?)),
                _ => at.index(i).expected("a [key, value] pair", pair),
            })
            .collect(),
        other => at.expected("an array of [key, value] pairs", other),
    }
}

fn fields(value: &Value, record: &types::Record, at: Path<'_>) -> Decoded<Vec<(String, Val)>> {
    let Value::Object(object) = value else { return at.expected("an object", value) };
    if let Some(unknown) = object.keys().find(|key| !record.fields().any(|f| f.name == key.as_str())) {
        return at.wrong(format!("no field {unknown:?}; it has {}", quoted(record.fields().map(|f| f.name))));
    }
    let mut decoded = Vec::with_capacity(record.fields().len());
    for field in record.fields() {
        let value = match (object.get(field.name), &field.ty) {
            (Some(value), ty) => decode(value, ty, at.field(field.name))?,
            (None, Type::Option(_)) => Val::Option(None),
            (None, _) => return at.wrong(format!("field {:?} is missing", field.name)),
        };
        decoded.push((field.name.to_owned(), value));
    }
    Ok(decoded)
}

fn case(value: &Value, variant: &types::Variant, at: Path<'_>) -> Decoded<Val> {
    let (name, payload) = match value {
        Value::String(name) => (name.as_str(), None),
        other => match single(other) {
            Some((name, payload)) => (name, Some(payload)),
            None => return at.expected("\"case\" or {\"case\": payload}", other),
        },
    };
    let Some(case) = variant.cases().find(|c| c.name == name) else {
        return at.wrong(format!("no case {name:?}; it has {}", quoted(variant.cases().map(|c| c.name))));
    };
    let payload = match (case.ty, payload) {
        (Some(ty), Some(value)) => Some(Box::new(decode(value, &ty, at.field(name))?)),
        (None, None | Some(Value::Null)) => None,
        (Some(_), None) => return at.wrong(format!("case {name:?} needs a payload: {{{name:?}: …}}")),
        (None, Some(_)) => return at.wrong(format!("case {name:?} has no payload")),
    };
    Ok(Val::Variant(name.to_owned(), payload))
}

/// A value a component function returned.
pub fn encode(value: &Val) -> Value {
    match value {
        Val::Bool(b) => json!(b),
        Val::S8(n) => json!(n),
        Val::U8(n) => json!(n),
        Val::S16(n) => json!(n),
        Val::U16(n) => json!(n),
        Val::S32(n) => json!(n),
        Val::U32(n) => json!(n),
        Val::S64(n) => json!(n),
        Val::U64(n) => json!(n),
        Val::Float32(x) => encode_f32(*x),
        Val::Float64(x) => encode_float(*x),
        Val::Char(c) => json!(c),
        Val::String(s) => json!(s),
        Val::List(items) | Val::Tuple(items) | Val::FixedLengthList(items) => items.iter().map(encode).collect(),
        Val::Map(pairs) => pairs.iter().map(|(k, v)| json!([encode(k), encode(v)])).collect(),
        Val::Record(fields) => {
            Value::Object(fields.iter().map(|(name, value)| (name.clone(), encode(value))).collect::<Map<_, _>>())
        }
        Val::Variant(name, None) | Val::Enum(name) => json!(name),
        Val::Variant(name, Some(payload)) => one(name, encode(payload)),
        Val::Option(None) => Value::Null,
        Val::Option(Some(inner)) if matches!(**inner, Val::Option(_)) => one("some", encode(inner)),
        Val::Option(Some(inner)) => encode(inner),
        Val::Result(Ok(payload)) => one("ok", payload.as_deref().map_or(Value::Null, encode)),
        Val::Result(Err(payload)) => one("err", payload.as_deref().map_or(Value::Null, encode)),
        Val::Flags(names) => json!(names),
        Val::Resource(_) => json!({"handle": "resource"}),
        Val::Future(_) => json!({"handle": "future"}),
        Val::Stream(_) => json!({"handle": "stream"}),
        Val::ErrorContext(_) => json!({"handle": "error-context"}),
    }
}

/// A JSON value for a parameter of a core function.
pub fn decode_core(value: &Value, ty: &ValType, at: Path<'_>) -> Decoded<CoreVal> {
    Ok(match ty {
        // Core integers have no sign, so both readings of the bits are accepted.
        ValType::I32 => match integer::<i32>(value, "i32", at) {
            Ok(n) => CoreVal::I32(n),
            Err(e) => CoreVal::I32(integer::<u32>(value, "i32", at).map_err(|_| e)?.cast_signed()),
        },
        ValType::I64 => match integer::<i64>(value, "i64", at) {
            Ok(n) => CoreVal::I64(n),
            Err(e) => CoreVal::I64(integer::<u64>(value, "i64", at).map_err(|_| e)?.cast_signed()),
        },
        ValType::F32 => CoreVal::F32(float32(value, at)?.to_bits()),
        ValType::F64 => CoreVal::F64(float(value, at)?.to_bits()),
        other => return at.wrong(format!("its type is {other}, which JSON cannot carry")),
    })
}

/// A value a core function returned.
pub fn encode_core(value: &CoreVal) -> Value {
    match value {
        CoreVal::I32(n) => json!(n),
        CoreVal::I64(n) => json!(n),
        CoreVal::F32(bits) => encode_f32(f32::from_bits(*bits)),
        CoreVal::F64(bits) => encode_float(f64::from_bits(*bits)),
        CoreVal::V128(v) => json!(format!("{:#034x}", v.as_u128())),
        _ => Value::Null,
    }
}

fn integer<T: TryFrom<i128>>(value: &Value, ty: &str, at: Path<'_>) -> Decoded<T> {
    let whole = match value {
        Value::Number(n) => whole(n),
        Value::String(s) => s.parse::<i128>().ok(),
        _ => None,
    };
    let Some(whole) = whole else { return at.expected(&format!("a whole number ({ty})"), value) };
    T::try_from(whole).or_else(|_| at.wrong(format!("{whole} does not fit {ty}")))
}

fn whole(n: &Number) -> Option<i128> {
    if let Some(n) = n.as_i64() {
        return Some(n.into());
    }
    if let Some(n) = n.as_u64() {
        return Some(n.into());
    }
    // 1e3 and 5.0 are whole numbers too, as far as a double is exact.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    #[expect(clippy::cast_possible_truncation, reason = "checked to be whole and within 2^53")]
    n.as_f64().filter(|x| x.fract() == 0.0 && x.abs() <= EXACT).map(|x| x as i128)
}

fn float(value: &Value, at: Path<'_>) -> Decoded<f64> {
    match value {
        Value::Number(n) => n.as_f64().map_or_else(|| at.wrong("the number does not fit"), Ok),
        Value::String(s) => match s.as_str() {
            "NaN" => Ok(f64::NAN),
            "Infinity" => Ok(f64::INFINITY),
            "-Infinity" => Ok(f64::NEG_INFINITY),
            _ => at.expected("a number, \"NaN\", \"Infinity\" or \"-Infinity\"", value),
        },
        other => at.expected("a number", other),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "rounding to f32 is what passing an f32 means; overflow is refused"
)]
fn float32(value: &Value, at: Path<'_>) -> Decoded<f32> {
    let wide = float(value, at)?;
    let narrow = wide as f32;
    if wide.is_finite() && narrow.is_infinite() {
        return at.wrong(format!("{wide:e} does not fit f32"));
    }
    Ok(narrow)
}

fn encode_float(x: f64) -> Value {
    match Number::from_f64(x) {
        Some(n) => Value::Number(n),
        None if x.is_nan() => json!("NaN"),
        None if x > 0.0 => json!("Infinity"),
        None => json!("-Infinity"),
    }
}

/// The shortest decimal that reads back as the same f32, so that 0.1 is answered as 0.1.
fn encode_f32(x: f32) -> Value {
    if !x.is_finite() {
        return encode_float(x.into());
    }
    x.to_string().parse().map_or(Value::Null, encode_float)
}

fn single(value: &Value) -> Option<(&str, &Value)> {
    let object = value.as_object().filter(|object| object.len() == 1)?;
    object.iter().next().map(|(name, value)| (name.as_str(), value))
}

fn one(name: &str, value: Value) -> Value {
    Value::Object(Map::from_iter([(name.to_owned(), value)]))
}

fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
}

fn describe(value: &Value) -> String {
    const SHOWN: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn core(value: Value, ty: ValType) -> Result<Value, String> {
        decode_core(&value, &ty, Path::root("args").index(0)).map(|v| encode_core(&v)).map_err(|e| e.to_string())
    }

    #[test]
    fn core_values() {
        assert_eq!(core(json!(-1), ValType::I32), Ok(json!(-1)));
        assert_eq!(core(json!(4_294_967_295_u32), ValType::I32), Ok(json!(-1)));
        assert_eq!(core(json!("18446744073709551615"), ValType::I64), Ok(json!(-1)));
        assert_eq!(core(json!(0.1), ValType::F32), Ok(json!(0.1)));
        assert_eq!(core(json!("NaN"), ValType::F64), Ok(json!("NaN")));
        assert_eq!(core(json!(5.0), ValType::I32), Ok(json!(5)));
        assert_eq!(core(json!(1u64 << 32), ValType::I32), Err("args[0]: 4294967296 does not fit i32".to_owned()));
        assert_eq!(core(json!(1e39), ValType::F32), Err("args[0]: 1e39 does not fit f32".to_owned()));
        assert_eq!(
            core(json!("five"), ValType::I32),
            Err("args[0]: expected a whole number (i32), found \"five\"".to_owned())
        );
    }
}
