//! What the spine costs: `invoke` of an empty export in process, against instantiate + call on bare Wasmtime from a
//! pool configured alike.

use std::time::Instant;

use anyhow::Context;
use tensor_wasm_exec::engine::{EngineKind, Engines};
use tensor_wasm_exec::{Call, Config, Invocation, Runtime};
use wasmtime::{Linker, Module, Store};

use crate::report::{Goal, Report, median};

const EMPTY: &str = r#"(module (memory 1) (func (export "empty")))"#;
const CALLS: usize = 2_000;
const ROUNDS: usize = 41;

pub(crate) fn compare() -> anyhow::Result<()> {
    let wasm = wat::parse_str(EMPTY)?;
    let data = tempfile::tempdir()?;
    let (runtime, _) = Runtime::open(data.path(), Config::default(), None)?;
    let threads = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let deployed = threads.block_on(runtime.deploy_bytes("default", "empty", &wasm, Default::default()));
    deployed.map_err(|failure| anyhow::anyhow!("{failure}"))?;

    let wasm_error = |e: wasmtime::Error| anyhow::anyhow!("{e:#}");
    let engines = Engines::new(&Config::default()).map_err(wasm_error)?;
    let plain = engines.get(EngineKind::Plain);
    let module = Module::new(plain, &wasm).map_err(wasm_error)?;
    let bare = Linker::<()>::new(plain).instantiate_pre(&module).map_err(wasm_error)?;

    let invoke = async || {
        let started = Instant::now();
        for _ in 0..CALLS {
            let invocation = Invocation {
                id: 1,
                tenant: "default".to_owned(),
                function: "empty".to_owned(),
                call: Call::Export { export: None, args: serde_json::Value::Null, stdin: Default::default() },
                deadline: None,
            };
            runtime.invoke(invocation).await.map_err(|failure| anyhow::anyhow!("{failure}"))?;
        }
        anyhow::Ok(started.elapsed().as_secs_f64() * 1e6 / CALLS as f64)
    };
    let instantiate = async || {
        let started = Instant::now();
        for _ in 0..CALLS {
            let mut store = Store::new(plain, ());
            store.set_epoch_deadline(1_000_000);
            let instance = bare.instantiate_async(&mut store).await.map_err(wasm_error)?;
            let function = instance.get_func(&mut store, "empty").context("the export")?;
            function.call_async(&mut store, &[], &mut []).await.map_err(wasm_error)?;
        }
        anyhow::Ok(started.elapsed().as_secs_f64() * 1e6 / CALLS as f64)
    };
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    threads.block_on(async {
        invoke().await?;
        instantiate().await?;
        for _ in 0..ROUNDS {
            ours.push(invoke().await?);
            theirs.push(instantiate().await?);
        }
        anyhow::Ok(())
    })?;
    let mut report = Report::new("invoke");
    report.ratio(
        "invoke/empty_export",
        "admission, lease, call, settlement and usage of an empty export, in process",
        median(ours),
        (median(theirs), "bare Wasmtime"),
        "µs",
        Goal::AtMost(1.2),
    );
    report.save()
}
