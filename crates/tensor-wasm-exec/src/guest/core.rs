//! Calling the exports of a core module.

use serde_json::Value;
use wasmtime::{Extern, ExternType, FuncType, Instance, Module, ModuleExport, Store, Val, ValType};

use super::GuestError;
use super::component::missing;
use super::state::State;
use super::value::{Path, decode_core, encode_core};
use crate::failure::{Bug, Rejection};

/// An exported function, known before there is an instance.
pub(crate) struct CoreExport {
    pub name: String,
    pub ty: FuncType,
    params: Vec<ValType>,
    index: ModuleExport,
}

pub(crate) fn exports(module: &Module) -> Vec<CoreExport> {
    let function = |export: wasmtime::ExportType<'_>| match export.ty() {
        ExternType::Func(ty) => {
            let index = module.get_export_index(export.name())?;
            Some(CoreExport { name: export.name().to_owned(), params: ty.params().collect(), ty, index })
        }
        _ => None,
    };
    module.exports().filter_map(function).collect()
}

/// Finds the export to call and reads its arguments; nothing has been instantiated yet.
pub(crate) fn prepare(
    exports: &[CoreExport],
    name: Option<&str>,
    args: &Value,
) -> Result<(usize, Vec<Val>), Rejection> {
    let names = || exports.iter().map(|e| e.name.as_str());
    let at = match name {
        Some(name) => names().position(|n| n == name).ok_or_else(|| missing(name, names()))?,
        None if exports.len() == 1 => 0,
        None => return Err(missing("", names())),
    };
    let export = &exports[at];
    let values = match args {
        Value::Null => &[][..],
        Value::Array(values) => values,
        _ => return Err(Rejection::InvalidArgs { why: "args: expected an array of arguments".to_owned() }),
    };
    if values.len() != export.params.len() {
        let (expected, given) = (export.params.len(), values.len());
        return Err(Rejection::WrongArgCount { export: export.name.clone(), expected, given });
    }
    let root = Path::root("args");
    let decoded = values.iter().zip(&export.params).enumerate().map(|(i, (v, ty))| decode_core(v, ty, root.index(i)));
    let decoded = decoded.collect::<Result<_, _>>().map_err(|e| Rejection::InvalidArgs { why: e.to_string() })?;
    Ok((at, decoded))
}

pub(crate) async fn call(
    store: &mut Store<State>,
    instance: &Instance,
    export: &CoreExport,
    args: &[Val],
) -> Result<Value, GuestError> {
    let Some(Extern::Func(function)) = instance.get_module_export(&mut *store, &export.index) else {
        return Err(Bug(format!("an instance lacks export {:?} of its module", export.name)).into());
    };
    let mut results = vec![Val::I32(0); export.ty.results().len()];
    let called = function.call_async(&mut *store, args, &mut results).await;
    called.map_err(|e| store.data().failed(&e))?;
    Ok(match results.as_slice() {
        [] => Value::Null,
        [one] => encode_core(one),
        many => many.iter().map(encode_core).collect(),
    })
}
