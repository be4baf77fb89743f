//! Calling the exported functions of a component.

use bytes::Bytes;
use serde_json::Value;
use wasmtime::Store;
use wasmtime::component::types::{ComponentFunc, ComponentItem, Type};
use wasmtime::component::{Component, ComponentExportIndex, Instance, Val};

use super::state::State;
use super::value::{Path, decode, encode};
use super::{GuestError, fault};
use crate::failure::{Fault, Rejection};

/// An exported function, known before there is an instance.
pub(crate) struct ComponentExport {
    /// `function`, or `interface#function` as in `demo:math/vectors#dot`.
    pub name: String,
    pub ty: ComponentFunc,
    pub index: ComponentExportIndex,
}

/// Every function a component exports, those inside exported interfaces included.
pub(crate) fn exports(component: &Component) -> Vec<ComponentExport> {
    let engine = component.engine();
    let ty = component.component_type();
    let mut found = Vec::new();
    for (name, item) in ty.exports(engine) {
        match item.ty {
            ComponentItem::ComponentFunc(ty) => {
                let index = component.get_export_index(None, name);
                found.extend(index.map(|index| ComponentExport { name: name.to_owned(), ty, index }));
            }
            ComponentItem::ComponentInstance(instance) => {
                let Some(parent) = component.get_export_index(None, name) else { continue };
                for (function, item) in instance.exports(engine) {
                    if let ComponentItem::ComponentFunc(ty) = item.ty {
                        let index = component.get_export_index(Some(&parent), function);
                        let name = format!("{name}#{function}");
                        found.extend(index.map(|index| ComponentExport { name, ty, index }));
                    }
                }
            }
            _ => {}
        }
    }
    found
}

/// What an export is called with.
pub(crate) enum Args {
    Json(Value),
    /// For exports of one `list<u8>` parameter.
    Bytes(Bytes),
}

/// Finds the export to call and reads its arguments; nothing has been instantiated yet.
pub(crate) fn prepare(
    exports: &[ComponentExport],
    name: Option<&str>,
    args: &Args,
) -> Result<(usize, Vec<Val>), Rejection> {
    let at = find(exports, name)?;
    let export = &exports[at];
    let params: Vec<(&str, Type)> = export.ty.params().collect();
    let count = |given| Rejection::WrongArgCount { export: export.name.clone(), expected: params.len(), given };
    let invalid = |e: super::value::Mismatch| Rejection::InvalidArgs { why: e.to_string() };
    let root = Path::root("args");
    let values = match args {
        Args::Bytes(bytes) => match params.as_slice() {
            [(_, Type::List(list))] if list.ty() == Type::U8 => {
                vec![Val::List(bytes.iter().map(|b| Val::U8(*b)).collect())]
            }
            _ => {
                let why = format!("export {:?} does not take bytes (one list<u8>); call it with JSON", export.name);
                return Err(Rejection::InvalidArgs { why });
            }
        },
        Args::Json(Value::Null) if params.is_empty() => Vec::new(),
        Args::Json(Value::Null) => return Err(count(0)),
        Args::Json(Value::Array(values)) => {
            if values.len() != params.len() {
                return Err(count(values.len()));
            }
            let one = |(i, (v, (_, ty))): (usize, (&Value, &(&str, Type)))| decode(v, ty, root.index(i));
            values.iter().zip(&params).enumerate().map(one).collect::<Result<_, _>>().map_err(invalid)?
        }
        Args::Json(Value::Object(named)) => {
            if let Some(unknown) = named.keys().find(|key| !params.iter().any(|(name, _)| name == key)) {
                let known = params.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
                let why = format!("args: no parameter {unknown:?}; {:?} has: {known}", export.name);
                return Err(Rejection::InvalidArgs { why });
            }
            if named.len() != params.len() {
                return Err(count(named.len()));
            }
            let one = |(name, ty): &(&str, Type)| decode(&named[*name], ty, root.field(name));
            params.iter().map(one).collect::<Result<_, _>>().map_err(invalid)?
        }
        Args::Json(_) => {
            let why = "args: expected an array of arguments, or an object by parameter name".to_owned();
            return Err(Rejection::InvalidArgs { why });
        }
    };
    Ok((at, values))
}

/// By full name, or by function name alone where only one interface has it.
pub(crate) fn find(exports: &[ComponentExport], name: Option<&str>) -> Result<usize, Rejection> {
    let names = || exports.iter().map(|e| e.name.as_str());
    let Some(name) = name else {
        return if exports.len() == 1 { Ok(0) } else { Err(missing("", names())) };
    };
    if let Some(exact) = names().position(|n| n == name) {
        return Ok(exact);
    }
    let mut by_function = names().enumerate().filter(|(_, n)| n.rsplit('#').next() == Some(name));
    match (by_function.next(), by_function.next()) {
        (Some((only, _)), None) => Ok(only),
        _ => Err(missing(name, names())),
    }
}

pub(crate) fn missing<'a>(name: &str, available: impl Iterator<Item = &'a str>) -> Rejection {
    const SHOWN: usize = 20;
    let mut names: Vec<&str> = available.take(SHOWN + 1).collect();
    if names.len() > SHOWN {
        names[SHOWN] = "…";
    }
    let available = if names.is_empty() { "no function exports".to_owned() } else { names.join(", ") };
    Rejection::MissingExport { export: name.to_owned(), available }
}

pub(crate) async fn call(
    store: &mut Store<State>,
    instance: &Instance,
    export: &ComponentExport,
    args: &[Val],
) -> Result<Vec<Val>, GuestError> {
    let function =
        instance.get_func(&mut *store, export.index).ok_or_else(|| missing(&export.name, std::iter::empty()))?;
    let mut results = vec![Val::Bool(false); export.ty.results().len()];
    function.call_async(store, args, &mut results).await.map_err(|e| fault(&e))?;
    Ok(results)
}

pub(crate) fn to_json(results: &[Val]) -> Value {
    match results {
        [] => Value::Null,
        [one] => encode(one),
        many => many.iter().map(encode).collect(),
    }
}

/// The bytes of a `list<u8>` or `string`, or of the ok case of a result of one.
pub(crate) fn to_bytes(results: &[Val]) -> Result<Bytes, GuestError> {
    let not_bytes = || Fault::Trap { message: "the export did not return bytes (list<u8> or string)".to_owned() };
    match results {
        [Val::String(text)] => Ok(Bytes::from(text.clone())),
        [Val::List(items)] => {
            let byte = |item: &Val| match item {
                Val::U8(b) => Some(*b),
                _ => None,
            };
            Ok(items.iter().map(byte).collect::<Option<Vec<u8>>>().map(Bytes::from).ok_or_else(not_bytes)?)
        }
        [Val::Result(Ok(Some(value)))] => to_bytes(std::slice::from_ref(value)),
        [Val::Result(Err(error))] => {
            let error = error.as_deref().map_or(Value::Null, encode);
            Err(Fault::Trap { message: format!("the export returned an error: {error}") }.into())
        }
        _ => Err(not_bytes().into()),
    }
}
