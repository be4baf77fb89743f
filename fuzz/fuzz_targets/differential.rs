//! A module of whatever the bytes say, each function of which is run by Wasmtime and in the emulator: results, traps
//! and memory are the same to the last bit.

#![no_main]

#[path = "../../crates/tensor-wasm-jit/tests/programs/mod.rs"]
mod programs;

use std::sync::LazyLock;

use libfuzzer_sys::{Corpus, fuzz_target};
use programs::Left;
use tensor_wasm_jit::{Program, TrapKind};
use wasmtime::{Engine, ValType};

static ENGINE: LazyLock<Engine> = LazyLock::new(programs::engine);

/// Bytes at the front that are arguments.
const ARGUMENT_BYTES: usize = 32;

fuzz_target!(|bytes: &[u8]| -> Corpus {
    let Some((arguments, bytes)) = bytes.split_at_checked(ARGUMENT_BYTES) else { return Corpus::Reject };
    let words: Vec<u64> =
        arguments.chunks_exact(8).filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?))).collect();
    let Some(wasm) = programs::generate(bytes) else { return Corpus::Reject };
    let Ok(program) = Program::read(&wasm) else { return Corpus::Reject };
    let module = wasmtime::Module::new(&ENGINE, &wasm).expect("what we read is Wasm");
    let recursion = Left::Trapped(TrapKind::Recursion.what().to_owned());
    for export in module.exports() {
        let Some(ty) = export.ty().func().cloned() else { continue };
        let Ok(image) = program.compile_call(export.name()) else { continue };
        let types: Vec<ValType> = ty.results().collect();
        let arguments: Vec<u64> = words.iter().cycle().copied().take(ty.params().len()).collect();
        let Some(expected) = programs::oracle(&ENGINE, &wasm, export.name(), &arguments) else { continue };
        if expected == recursion {
            continue;
        }
        let found = programs::emulated(&image, &program, &arguments, &types);
        if found != recursion {
            assert!(found == expected, "{}({arguments:x?}): {found:?} and {expected:?}", export.name());
        }
    }
    Corpus::Keep
});
