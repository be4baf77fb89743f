//! Running WASI commands: `_start` of a core module, or `wasi:cli/run` of a component.

use serde_json::Value;
use wasmtime::Store;

use super::GuestError;
use super::state::State;
use crate::failure::{Fault, Rejection};

/// A command's arguments: an array of strings. Numbers and booleans are taken as they are written.
pub(crate) fn args(args: &Value) -> Result<Vec<String>, Rejection> {
    let invalid = |why: String| Rejection::InvalidArgs { why };
    let values = match args {
        Value::Null => &[][..],
        Value::Array(values) => values,
        _ => return Err(invalid("args: a command takes an array of strings".to_owned())),
    };
    let word = |(i, value): (usize, &Value)| match value {
        Value::String(s) if s.contains('\0') => Err(invalid(format!("args[{i}]: it contains a NUL character"))),
        Value::String(s) => Ok(s.clone()),
        Value::Number(_) | Value::Bool(_) => Ok(value.to_string()),
        _ => Err(invalid(format!("args[{i}]: a command's arguments are strings"))),
    };
    // The first argument is the program's name by convention.
    let words = values.iter().enumerate().map(word);
    std::iter::once(Ok("function".to_owned())).chain(words).collect()
}

/// The exit code of a finished run: leaving by `exit` is how commands end, not a failure of ours to report.
fn exit_code(store: &Store<State>, result: wasmtime::Result<i32>) -> Result<i32, GuestError> {
    result.or_else(|error| match store.data().failed(&error) {
        GuestError::Faulted(Fault::Exit { code }) => Ok(code),
        other => Err(other),
    })
}

pub(crate) async fn core(store: &mut Store<State>, instance: &wasmtime::Instance) -> Result<i32, GuestError> {
    let start = instance.get_typed_func::<(), ()>(&mut *store, "_start").map_err(|e| Rejection::InvalidWasm {
        why: format!("_start is not a function without parameters and results: {e}"),
    })?;
    let result = start.call_async(&mut *store, ()).await;
    exit_code(store, result.map(|()| 0))
}

pub(crate) async fn p2(
    store: &mut Store<State>,
    command: &wasmtime_wasi::p2::bindings::Command,
) -> Result<i32, GuestError> {
    let result = command.wasi_cli_run().call_run(&mut *store).await;
    exit_code(store, result.map(|ended| i32::from(ended.is_err())))
}

pub(crate) async fn p3(
    store: &mut Store<State>,
    command: &wasmtime_wasi::p3::bindings::Command,
) -> Result<i32, GuestError> {
    let result = store.run_concurrent(async |accessor| command.wasi_cli_run().call_run(accessor).await).await;
    exit_code(store, result.flatten().map(|ended| i32::from(ended.is_err())))
}
