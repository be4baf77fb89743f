//! Any bytes as a kernel module: read, and every export compiled in every way there is. Nothing may panic or take long;
//! the time is the fuzzer's `-timeout`.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tensor_wasm_jit::Program;
use wasmtime::{Config, Engine};

static ENGINE: LazyLock<Engine> = LazyLock::new(|| {
    let mut config = Config::new();
    config.wasm_threads(true).shared_memory(true);
    Engine::new(&config).expect("an engine")
});

fuzz_target!(|bytes: &[u8]| {
    let Ok(program) = Program::read(bytes) else { return };
    for (name, params) in program.exports() {
        if params.is_ok()
            && let Ok(windows) = program.pointers(name)
        {
            // A refusal is an answer, and always the same one.
            let refused = program.compile(name, &windows).err();
            assert_eq!(refused, program.compile_small(name, &windows).err());
            // What is emitted for a CPU is Wasm.
            if let Ok(image) = program.compile_host(name, &windows) {
                wasmtime::Module::validate(&ENGINE, &image.wasm).expect("it is valid");
            }
        }
        drop(program.compile_call(name));
    }
});
