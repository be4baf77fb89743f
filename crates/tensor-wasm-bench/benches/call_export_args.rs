//! Calling exports in process: with and without arguments.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run should stop")]

use criterion::{Criterion, criterion_group, criterion_main};
use serde_json::{Value, json};
use tensor_wasm_exec::{Call, Config, Invocation, Output, Runtime};

const MODULE: &str = r#"(module
  (func (export "empty"))
  (func (export "add") (param i32 i32) (result i32) (i32.add (local.get 0) (local.get 1))))"#;

fn call_export(c: &mut Criterion) {
    let data = tempfile::tempdir().unwrap();
    let (runtime, _) = Runtime::open(data.path(), Config::default(), None).unwrap();
    let threads = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let wasm = wat::parse_str(MODULE).unwrap();
    threads.block_on(runtime.deploy_bytes("default", "f", &wasm, Default::default())).ok().unwrap();
    let call = async |export: &str, args: Value, expect: Value| {
        let invocation = Invocation {
            id: 1,
            tenant: "default".to_owned(),
            function: "f".to_owned(),
            call: Call::Export { export: Some(export.to_owned()), args, stdin: Default::default() },
            deadline: None,
        };
        let outcome = runtime.invoke(invocation).await.ok().unwrap();
        assert!(matches!(outcome.output, Output::Value(value) if value == expect));
    };
    c.bench_function("call_export/noargs/empty", |b| {
        b.to_async(&threads).iter(|| call("empty", Value::Null, Value::Null));
    });
    c.bench_function("call_export/args/two_i32", |b| {
        b.to_async(&threads).iter(|| call("add", json!([20, 22]), json!(42)));
    });
}

criterion_group!(benches, call_export);
criterion_main!(benches);
