//! Calling the exported functions of a component.

use bytes::Bytes;
use serde_json::Value;
use wasmtime::Store;
use wasmtime::component::types::{ComponentFunc, ComponentItem, Type};
use wasmtime::component::{Component, ComponentExportIndex, ComponentNamedList, Func, Instance, Lift, Val};

use super::GuestError;
use super::budget::Charge;
use super::state::State;
use super::value::{Path, decode, encode};
use crate::config::Limits;
use crate::failure::{Bug, Fault, Rejection};

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

/// Finds the export to call and reads its arguments; nothing has been instantiated yet.
pub(crate) fn prepare(
    exports: &[ComponentExport],
    name: Option<&str>,
    args: &Value,
) -> Result<(usize, Vec<Val>), Rejection> {
    let at = find(exports, name)?;
    let export = &exports[at];
    let params: Vec<(&str, Type)> = export.ty.params().collect();
    let count = |given| Rejection::WrongArgCount { export: export.name.clone(), expected: params.len(), given };
    let invalid = |e: super::value::Mismatch| Rejection::InvalidArgs { why: e.to_string() };
    let root = Path::root("args");
    let values = match args {
        Value::Null if params.is_empty() => Vec::new(),
        Value::Null => return Err(count(0)),
        Value::Array(values) => {
            if values.len() != params.len() {
                return Err(count(values.len()));
            }
            let one = |(i, (v, (_, ty))): (usize, (&Value, &(&str, Type)))| decode(v, ty, root.index(i));
            values.iter().zip(&params).enumerate().map(one).collect::<Result<_, _>>().map_err(invalid)?
        }
        Value::Object(named) => {
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
        _ => {
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
    let function = function(store, instance, export)?;
    let mut results = vec![Val::Bool(false); export.ty.results().len()];
    let called = function.call_async(&mut *store, args, &mut results).await;
    called.map_err(|e| store.data().failed(&e))?;
    Ok(results)
}

fn function(store: &mut Store<State>, instance: &Instance, export: &ComponentExport) -> Result<Func, Bug> {
    let found = instance.get_func(store, export.index);
    found.ok_or_else(|| Bug(format!("an instance lacks export {:?} of its component", export.name)))
}

/// Whether an export returned the error case of its result.
pub(crate) fn is_err(results: &[Val]) -> bool {
    matches!(results, [Val::Result(Err(_))])
}

pub(crate) fn to_json(results: &[Val]) -> Value {
    match results {
        [] => Value::Null,
        [one] => encode(one),
        many => many.iter().map(encode).collect(),
    }
}

/// How an export that takes a `list<u8>` returns octets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Octets {
    List,
    Text,
    ListOrNothing,
    ListOrText,
    TextOrNothing,
    TextOrText,
    /// A result whose error is a type of the component's own. Only values can carry that.
    Values,
}

/// Finds the export to call with octets; nothing has been instantiated yet.
pub(crate) fn prepare_octets(
    exports: &[ComponentExport],
    name: Option<&str>,
    body: &Bytes,
    limits: &Limits,
) -> Result<(usize, Octets), Rejection> {
    let at = find(exports, name)?;
    let export = &exports[at];
    let refused = |what: &str| {
        Err(Rejection::InvalidArgs { why: format!("export {:?} does not {what}; call it with JSON", export.name) })
    };
    match export.ty.params().map(|(_, ty)| ty).collect::<Vec<_>>().as_slice() {
        [Type::List(list)] if list.ty() == Type::U8 => {}
        _ => return refused("take bytes (one list<u8>)"),
    }
    let is_list = |ty: &Type| matches!(ty, Type::List(list) if list.ty() == Type::U8);
    let octets = match export.ty.results().collect::<Vec<_>>().as_slice() {
        [ty] if is_list(ty) => Octets::List,
        [Type::String] => Octets::Text,
        [Type::Result(result)] => match (result.ok(), result.err()) {
            (Some(ok), None) if is_list(&ok) => Octets::ListOrNothing,
            (Some(ok), Some(Type::String)) if is_list(&ok) => Octets::ListOrText,
            (Some(Type::String), None) => Octets::TextOrNothing,
            (Some(Type::String), Some(Type::String)) => Octets::TextOrText,
            (Some(ok), _) if is_list(&ok) || ok == Type::String => Octets::Values,
            _ => return refused("return bytes (list<u8> or string, or a result of one)"),
        },
        _ => return refused("return bytes (list<u8> or string, or a result of one)"),
    };
    // As values, each byte takes forty of the host's.
    let bytes_max = limits.hostcall_bytes_max / size_of::<Val>();
    if octets == Octets::Values && body.len() > bytes_max {
        let what = "the body for an export whose error type is not a string";
        return Err(Rejection::TooLarge { what, bytes_max, limit: "[limits] hostcall_bytes_max, per value" });
    }
    Ok((at, octets))
}

/// Calls an export with octets, which are copied once each way and never become values. They are charged to the tenant
/// until they are sent.
pub(crate) async fn call_octets(
    store: &mut Store<State>,
    instance: &Instance,
    export: &ComponentExport,
    octets: Octets,
    body: &[u8],
) -> Result<Bytes, GuestError> {
    type OrNothing<T> = Result<T, ()>;
    type OrText<T> = Result<T, String>;
    let function = function(store, instance, export)?;
    let account = store.data().call().account.clone();
    let limits = &account.limits;
    // The result is bounded by its own limit, which may be the larger one.
    store.set_hostcall_fuel(limits.output_bytes_max.max(limits.hostcall_bytes_max));
    let nothing = |()| Value::Null;
    let called = match octets {
        Octets::List => typed::<Vec<u8>>(store, &function, body).await.map(Ok),
        Octets::Text => typed::<String>(store, &function, body).await.map(|text| Ok(text.into_bytes())),
        Octets::ListOrNothing => {
            typed::<OrNothing<Vec<u8>>>(store, &function, body).await.map(|result| result.map_err(nothing))
        }
        Octets::ListOrText => {
            typed::<OrText<Vec<u8>>>(store, &function, body).await.map(|result| result.map_err(Value::String))
        }
        Octets::TextOrNothing => {
            let called = typed::<OrNothing<String>>(store, &function, body).await;
            called.map(|result| result.map(String::into_bytes).map_err(nothing))
        }
        Octets::TextOrText => {
            let called = typed::<OrText<String>>(store, &function, body).await;
            called.map(|result| result.map(String::into_bytes).map_err(Value::String))
        }
        Octets::Values => {
            store.set_hostcall_fuel(limits.hostcall_bytes_max);
            let args = [Val::List(body.iter().map(|b| Val::U8(*b)).collect())];
            let mut results = [Val::Bool(false)];
            let called = function.call_async(&mut *store, &args, &mut results).await;
            called.map(|()| octets_of(results))
        }
    };
    store.set_hostcall_fuel(limits.hostcall_bytes_max);
    let too_large = Fault::OutputTooLarge { bytes_max: limits.output_bytes_max };
    let returned = called.map_err(|error| match store.data().failed(&error) {
        // A host function that was handed too much is in the trace; without one, it was the result.
        GuestError::Faulted(Fault::HostcallTooLarge { .. })
            if octets != Octets::Values && !error.is::<wasmtime::WasmBacktrace>() =>
        {
            too_large.clone().into()
        }
        other => other,
    })?;
    let bytes = returned
        .map_err(|error| GuestError::from(Fault::Trap { message: format!("the export returned an error: {error}") }))?;
    if bytes.len() > limits.output_bytes_max {
        return Err(too_large.into());
    }
    Ok(Bytes::from_owner(ChargedOctets { _charge: Charge::take(&account, bytes.len() as u64)?, bytes }))
}

async fn typed<R>(store: &mut Store<State>, function: &Func, body: &[u8]) -> wasmtime::Result<R>
where
    (R,): ComponentNamedList + Lift + Send + Sync + 'static,
{
    let function = function.typed::<(&[u8],), (R,)>(&*store)?;
    let (result,) = function.call_async(store, (body,)).await?;
    Ok(result)
}

fn octets_of(results: [Val; 1]) -> Result<Vec<u8>, Value> {
    let byte = |item: Val| match item {
        Val::U8(byte) => byte,
        _ => 0,
    };
    match results {
        [Val::Result(Ok(Some(ok)))] => match *ok {
            Val::String(text) => Ok(text.into_bytes()),
            Val::List(items) => Ok(items.into_iter().map(byte).collect()),
            _ => Err(Value::Null),
        },
        [Val::Result(Err(error))] => Err(error.as_deref().map_or(Value::Null, encode)),
        _ => Err(Value::Null),
    }
}

struct ChargedOctets {
    bytes: Vec<u8>,
    _charge: Charge,
}

impl AsRef<[u8]> for ChargedOctets {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
