//! A kernel of whatever the bytes say, with imports, atomics and ranges of memory, launched in the emulator on small
//! buffers. The emulator understands all that is emitted, and finds no access outside the buffers: the fence holds.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::{Corpus, fuzz_target};
use tensor_wasm_jit::emulate::{DeviceMemory, Emulator, ParamBlock};
use tensor_wasm_jit::{CONTROL, Program, RECORD, budget_ticks};
use wasm_smith::{Config, Module};

const CONTROL_AT: u64 = 0x30_0000_0000;
const RECORD_AT: u64 = 0x40_0000_0000;
const BUFFER_AT: u64 = 0x100_0000_0000;

/// Loops that do not end are stopped after so long, which the emulator takes for some ten thousand instructions.
const NANOS: u64 = 1_000_000;

/// What kernels may import, as a module that imports it.
static IMPORTS: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut text = String::from(r#"(module (import "kernel" "barrier" (func))"#);
    for name in ["global_id", "local_id", "group_id", "local_size", "global_size", "num_groups", "shared"] {
        text += &format!(r#"(import "kernel" "{name}" (func (param i32) (result i32)))"#);
    }
    for name in ["subgroup_size", "subgroup_lane"] {
        text += &format!(r#"(import "kernel" "{name}" (func (result i32)))"#);
    }
    for name in ["subgroup_ballot", "subgroup_any", "subgroup_all"] {
        text += &format!(r#"(import "kernel" "{name}" (func (param i32) (result i32)))"#);
    }
    for ty in ["i32", "i64", "f32", "f64"] {
        for name in ["shuffle", "shuffle_xor"] {
            text += &format!(r#"(import "kernel" "{name}_{ty}" (func (param {ty} i32) (result {ty})))"#);
        }
        for name in ["subgroup_add", "subgroup_min", "subgroup_max"] {
            text += &format!(r#"(import "kernel" "{name}_{ty}" (func (param {ty}) (result {ty})))"#);
        }
    }
    text += r#"(import "kernel" "mma_sum" (func (param i32) (result f32)))"#;
    for name in ["f16", "bf16"] {
        let params = "i32 i32 i32 i32 i32 i32 f32 f32 f32 f32";
        text += &format!(r#"(import "kernel" "mma_{name}_f32" (func (param {params})))"#);
        text += &format!(r#"(import "kernel" "{name}_to_f32" (func (param i32) (result f32)))"#);
        text += &format!(r#"(import "kernel" "f32_to_{name}" (func (param f32) (result i32)))"#);
    }
    for ty in ["f32", "f64"] {
        text += &format!(r#"(import "kernel" "fma_{ty}" (func (param {ty} {ty} {ty}) (result {ty})))"#);
        text += &format!(r#"(import "kernel" "pow_{ty}" (func (param {ty} {ty}) (result {ty})))"#);
        for name in ["sqrt", "rsqrt", "exp", "exp2", "log", "log2", "sin", "cos", "tanh"] {
            text += &format!(r#"(import "kernel" "{name}_{ty}" (func (param {ty}) (result {ty})))"#);
        }
    }
    wat::parse_str(text + ")").expect("the imports are a module")
});

fn config() -> Config {
    Config {
        available_imports: Some(IMPORTS.clone()),
        min_imports: 0,
        max_imports: 12,
        min_funcs: 1,
        max_funcs: 5,
        min_exports: 1,
        export_everything: true,
        min_memories: 1,
        max_memories: 1,
        max_memory32_bytes: 1 << 16,
        max_tables: 1,
        max_table_elements: 20,
        max_instructions: 200,
        allow_start_export: false,
        reference_types_enabled: false,
        simd_enabled: false,
        relaxed_simd_enabled: false,
        gc_enabled: false,
        exceptions_enabled: false,
        tail_call_enabled: false,
        threads_enabled: true,
        memory64_enabled: false,
        extended_const_enabled: false,
        wide_arithmetic_enabled: false,
        ..Config::default()
    }
}

fuzz_target!(|bytes: &[u8]| -> Corpus {
    let Some((words, bytes)) = bytes.split_at_checked(16) else { return Corpus::Reject };
    let Ok(module) = Module::new(config(), &mut arbitrary::Unstructured::new(bytes)) else { return Corpus::Reject };
    let wasm = module.to_bytes();
    let Ok(program) = Program::read(&wasm) else { return Corpus::Reject };
    for (name, params) in program.exports() {
        let (Ok(params), Ok(windows)) = (params, program.pointers(name)) else { continue };
        // Sizes and arguments from the first bytes, over and over.
        let mut numbers = words.iter().cycle();
        let mut number = || numbers.next().copied().map_or(0, usize::from);
        let sizes: Vec<usize> = windows.iter().map(|is_window| if *is_window { number() } else { 0 }).collect();
        let Ok(mut image) = program.compile(name, &windows) else { continue };
        if !image.fits(sizes.iter().map(|size| *size as u64)) {
            image = program.compile_small(name, &windows).expect("it was compiled for large ones");
        }
        let emulator = Emulator::new(&image.ptx).unwrap_or_else(|why| panic!("{why}\n{}", image.ptx));
        let mut memory = DeviceMemory::default();
        memory.add(CONTROL_AT, vec![0; CONTROL.bytes as usize]);
        memory.add(RECORD_AT, vec![0; RECORD.bytes as usize]);
        let mut block = ParamBlock::new(&emulator);
        let mut start = 0x10_0000_u64;
        for (n, (is_window, size)) in windows.iter().zip(&sizes).enumerate().take(params.len()) {
            if *is_window {
                let address = BUFFER_AT + 0x1_0000_0000 * n as u64;
                block.set(&format!("window{n}"), address).set(&format!("start{n}"), start);
                block.set(&format!("size{n}"), *size as u64);
                start += 0x1_0000;
                memory.add(address, vec![0xa5; *size]);
            } else {
                block.set(&format!("p{n}"), (0..8).fold(0, |bits, _| bits << 8 | number() as u64));
            }
        }
        block.set("control", CONTROL_AT).set("record", RECORD_AT).set("launch", 1);
        block.set("budget", u64::from(budget_ticks(NANOS)));
        let params = block.bytes();
        emulator.run(&mut memory, &params, [2, 1, 1], [3, 1, 1]).unwrap_or_else(|why| panic!("{why}\n{}", image.ptx));
    }
    Corpus::Keep
});
