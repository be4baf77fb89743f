//! The bound on what a component hands the host in one call (`[limits] hostcall_bytes_max`): results of exports, and
//! arguments of host functions. Wasmtime counts it as it copies ("hostcall fuel") and fails the call beyond it.
//!
//! The type of that error is private to Wasmtime. So one is provoked on purpose, the first time an error of unknown
//! type is seen, and errors are recognised by being equal to it: no wording of Wasmtime's is written down here.

use std::sync::LazyLock;

use wasmtime::component::{Component, Linker};
use wasmtime::{Engine, Store};

/// A component whose export returns one byte of text.
const ONE_BYTE: &str = r#"
    (component
      (core module $m
        (memory (export "memory") 1)
        (data (i32.const 0) "\08\00\00\00\01\00\00\00x")
        (func (export "text") (result i32) (i32.const 0)))
      (core instance $i (instantiate $m))
      (func (export "text") (result string) (canon lift (core func $i "text") (memory (core memory $i "memory")))))"#;

static EXHAUSTED: LazyLock<Option<String>> = LazyLock::new(|| provoke().err().map(|e| e.root_cause().to_string()));

/// Lifts one byte where none may be: what Wasmtime says of that is the error we look for.
fn provoke() -> wasmtime::Result<()> {
    let Ok(wasm) = wat::parse_str(ONE_BYTE) else { return Ok(()) };
    let engine = Engine::default();
    let component = Component::new(&engine, wasm);
    let mut store = Store::new(&engine, ());
    let Ok(instance) = component.and_then(|c| Linker::new(&engine).instantiate(&mut store, &c)) else { return Ok(()) };
    let Ok(text) = instance.get_typed_func::<(), (String,)>(&mut store, "text") else { return Ok(()) };
    store.set_hostcall_fuel(0);
    text.call(&mut store, ()).map(drop)
}

/// Whether the call failed because the component handed the host too much at once.
pub(crate) fn is_exhausted(error: &wasmtime::Error) -> bool {
    EXHAUSTED.as_ref().is_some_and(|known| error.root_cause().to_string() == *known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_known_and_no_other_is_taken_for_it() {
        let error = provoke().unwrap_err();
        assert!(is_exhausted(&error), "{error:#}");
        assert!(is_exhausted(&error.context("calling it")));
        assert!(!is_exhausted(&wasmtime::Error::msg("out of fuel")));
        assert!(!is_exhausted(&wasmtime::Trap::OutOfFuel.into()));
    }
}
