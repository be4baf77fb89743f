//! Programs that nobody wrote: generated modules, of anything and of loops that count, each function of which is run by Wasmtime and as a kernel, with the same
//! arguments. Results, traps and memory must be the same to the last bit.
//!
//! `TENSOR_WASM_TEST_PROGRAMS` says how many; `TENSOR_WASM_TEST_SEED` where to begin.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    reason = "a test that goes wrong says so"
)]

mod device;
mod host;

use std::collections::BTreeMap;
use std::process::ExitCode;

use device::{Arg, Gpu};
use host::{Host, HostArg};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use tensor_wasm_gpu::Param;
use tensor_wasm_jit::emulate::{DeviceMemory, Emulator, ParamBlock};
use tensor_wasm_jit::{CONTROL, KernelImage, Program, RECORD, Trap, TrapKind, Ty, budget_ticks};
use wasm_smith::{Config, Module};
use wasmtime::{Engine, Extern, Instance, Store, Val, ValType};

const RESULTS: u64 = 0x10_0000_0000;
const MEMORY: u64 = 0x20_0000_0000;
const CONTROL_AT: u64 = 0x30_0000_0000;
const RECORD_AT: u64 = 0x40_0000_0000;
/// Nowhere that a generator thinks of.
const RESULTS_START: u32 = 0xdead_5430;

/// Instructions of a function at most, so that most programs are small.
const FUEL: u32 = 1_000;

/// What a call left behind.
#[derive(Debug, PartialEq)]
enum Left {
    Done { results: Vec<u64>, memory: Vec<u8> },
    Trapped(String),
}

fn config() -> Config {
    Config {
        min_funcs: 1,
        max_funcs: 6,
        max_imports: 0,
        min_exports: 1,
        export_everything: true,
        min_memories: 1,
        max_memories: 1,
        max_memory32_bytes: 1 << 16,
        max_tables: 1,
        max_table_elements: 20,
        max_instructions: 200,
        allow_start_export: false,
        bulk_memory_enabled: false,
        reference_types_enabled: false,
        simd_enabled: false,
        relaxed_simd_enabled: false,
        gc_enabled: false,
        exceptions_enabled: false,
        tail_call_enabled: false,
        threads_enabled: false,
        memory64_enabled: false,
        multi_value_enabled: true,
        saturating_float_to_int_enabled: true,
        sign_extension_ops_enabled: true,
        extended_const_enabled: false,
        wide_arithmetic_enabled: false,
        memory_max_size_required: false,
        disallow_traps: false,
        ..Config::default()
    }
}

fn generate(seed: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 4096];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    let mut source = arbitrary::Unstructured::new(&bytes);
    let mut module = Module::new(config(), &mut source).ok()?;
    module.ensure_termination(FUEL).ok()?;
    Some(module.to_bytes())
}

/// A function with loops that count, in every shape a compiler might leave them: with steps and bounds of all kinds, values of
/// this round and of the last, exits in the middle. All its locals are its results.
fn generate_loops(seed: u64) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(seed);
    let locals = 6_u32;
    // Local 4 is the counter, local 5 what it goes to.
    let statement = |rng: &mut StdRng| {
        let any = |rng: &mut StdRng| format!("(local.get {})", rng.random_range(0..5));
        let value = match rng.random_range(0..7) {
            0 => any(rng),
            1 => format!("(i32.add {} {})", any(rng), any(rng)),
            2 => format!("(i32.mul {} (i32.const {}))", any(rng), rng.random_range(-3..9)),
            3 => format!("(i32.xor {} {})", any(rng), any(rng)),
            4 => format!("(i32.sub {} (i32.const {}))", any(rng), rng.random_range(-9..9)),
            5 => format!("(i32.load offset={} (i32.and {} (i32.const 1020)))", rng.random_range(0..3) * 4, any(rng)),
            _ => format!("(select {} {} {})", any(rng), any(rng), any(rng)),
        };
        match rng.random_range(0..6) {
            0 => format!("(i32.store (i32.and {} (i32.const 1020)) {value})", any(rng)),
            1 => format!("(if {value} (then (local.set {} {})))", rng.random_range(0..4), any(rng)),
            _ => format!("(local.set {} {value})", rng.random_range(0..4)),
        }
    };
    let mut body = String::new();
    for n in 0..rng.random_range(1..4) {
        let step = [1, 1, 1, -1, 2, 4, -4, 8, 3][rng.random_range(0..9)];
        let rounds = rng.random_range(0..40);
        let from: i32 = rng.random_range(-20..20);
        let start = format!("(local.set 4 (i32.const {from}))");
        let until = format!("(local.set 5 (i32.const {}))", from.wrapping_add(step * rounds));
        let next = format!("(i32.add (local.get 4) (i32.const {step}))");
        let block = |rng: &mut StdRng, count: u32| (0..count).map(|_| statement(rng)).collect::<String>();
        let (before, after) = (rng.random_range(0..4), rng.random_range(0..4));
        let (before, after) = (block(&mut rng, before), block(&mut rng, after));
        let exit = match rng.random_range(0..3) {
            0 => format!("(br_if $out{n} (i32.eq (local.get 0) (i32.const {})))", rng.random_range(-5..5)),
            _ => String::new(),
        };
        let shape = rng.random_range(0..3);
        let tail = match shape {
            0 => format!("(local.set 4 {next}) {after} (br_if $again{n} (i32.ne (local.get 4) (local.get 5)))"),
            1 => format!("{after} (br_if $again{n} (i32.ne (local.tee 4 {next}) (local.get 5)))"),
            _ => format!(
                "(local.set 0 (local.get 4)) {after} (local.set 4 {next}) (br_if $again{n} (i32.ne (local.get 0) (local.get 5)))"
            ),
        };
        // Those that would never end end somewhere.
        let budget =
            "(if (i32.eqz (global.get 0)) (then unreachable)) (global.set 0 (i32.sub (global.get 0) (i32.const 1)))";
        let budget = if rounds > 0 && step != 3 && shape != 2 && rng.random_range(0..2) == 0 { "" } else { budget };
        body += &format!("{start} {until} (block $out{n} (loop $again{n} {budget} {before} {exit} {tail}))");
    }
    let results: String = (0..locals).map(|n| format!("(local.get {n})")).collect();
    let text = format!(
        r#"(module (memory (export "m") 1) (global (mut i32) (i32.const 300))
            (func (export "f") (param i32 i32 i32 i32) (result i32 i32 i32 i32 i32 i32) (local i32 i32) {body} {results}))"#
    );
    wat::parse_str(text).unwrap()
}

fn trap_name(kind: TrapKind) -> &'static str {
    match kind {
        TrapKind::NoSuchFunction | TrapKind::WrongFunctionType => "call",
        other => other.what(),
    }
}

/// What Wasmtime makes of a call; none if the module is not for it.
fn oracle(engine: &Engine, wasm: &[u8], name: &str, arguments: &[u64]) -> Option<Left> {
    let module = wasmtime::Module::new(engine, wasm).ok()?;
    let mut store = Store::new(engine, ());
    let instance = Instance::new(&mut store, &module, &[]).ok()?;
    let function = instance.get_func(&mut store, name)?;
    let ty = function.ty(&store);
    let values: Vec<Val> = ty.params().zip(arguments).map(|(ty, bits)| value(&ty, *bits)).collect();
    let mut results = vec![Val::I32(0); ty.results().len()];
    match function.call(&mut store, &values, &mut results) {
        Ok(()) => {
            let results = results.iter().map(bits).collect();
            let memory = instance.exports(&mut store).find_map(|export| match export.into_extern() {
                Extern::Memory(memory) => Some(memory),
                _ => None,
            });
            let memory = memory.map_or_else(Vec::new, |memory| memory.data(&store).to_vec());
            Some(Left::Done { results, memory })
        }
        Err(error) => {
            use wasmtime::Trap as Why;
            Some(Left::Trapped(
                match error.downcast_ref::<Why>()? {
                    Why::UnreachableCodeReached => TrapKind::Unreachable.what(),
                    Why::IntegerDivisionByZero => TrapKind::DivideByZero.what(),
                    Why::IntegerOverflow => TrapKind::IntegerOverflow.what(),
                    Why::BadConversionToInteger => TrapKind::BadConversion.what(),
                    Why::MemoryOutOfBounds => TrapKind::OutOfBounds.what(),
                    Why::TableOutOfBounds | Why::IndirectCallToNull | Why::BadSignature => "call",
                    Why::StackOverflow => TrapKind::Recursion.what(),
                    other => panic!("{other:?}"),
                }
                .to_owned(),
            ))
        }
    }
}

fn value(ty: &ValType, bits: u64) -> Val {
    match ty {
        ValType::I32 => Val::I32((bits as u32).cast_signed()),
        ValType::I64 => Val::I64(bits.cast_signed()),
        ValType::F32 => Val::F32(bits as u32),
        _ => Val::F64(bits),
    }
}

fn bits(value: &Val) -> u64 {
    match value {
        Val::I32(value) => u64::from(value.cast_unsigned()),
        Val::I64(value) => value.cast_unsigned(),
        Val::F32(bits) => u64::from(*bits),
        Val::F64(bits) => *bits,
        other => panic!("{other:?}"),
    }
}

/// The memory and the globals that a module begins with.
fn beginnings(program: &Program<'_>) -> (Vec<u8>, Vec<u8>) {
    let (size, data) = program.memory();
    let mut memory = vec![0; size as usize];
    for (address, segment) in data {
        memory[address as usize..address as usize + segment.len()].copy_from_slice(segment);
    }
    let mut results = vec![0xa5; 4096];
    for (n, bits) in program.globals().enumerate() {
        results[512 + 8 * n..520 + 8 * n].copy_from_slice(&bits.to_le_bytes());
    }
    (memory, results)
}

fn left(results: &[u8], memory: Vec<u8>, types: &[ValType]) -> Left {
    let word = |n: usize| u64::from_le_bytes(results[8 * n..8 * n + 8].try_into().unwrap());
    let cut = |(n, ty): (usize, &ValType)| match ty {
        ValType::I32 | ValType::F32 => word(n) & u64::from(u32::MAX),
        _ => word(n),
    };
    Left::Done { results: types.iter().enumerate().map(cut).collect(), memory }
}

fn emulated(image: &KernelImage, program: &Program<'_>, arguments: &[u64], types: &[ValType]) -> Left {
    let (memory, results) = beginnings(program);
    let size = memory.len() as u64;
    let emulator = Emulator::new(&image.ptx).unwrap();
    let mut device = DeviceMemory::default();
    device.add(MEMORY, memory);
    device.add(RESULTS, results);
    device.add(CONTROL_AT, vec![0; CONTROL.bytes as usize]);
    device.add(RECORD_AT, vec![0; RECORD.bytes as usize]);
    let mut block = ParamBlock::new(&emulator);
    block.set("window0", RESULTS).set("start0", u64::from(RESULTS_START)).set("size0", 4096);
    block.set("window1", MEMORY).set("start1", 0).set("size1", size);
    for (n, bits) in arguments.iter().enumerate() {
        block.set(&format!("p{}", n + 2), *bits);
    }
    block.set("control", CONTROL_AT).set("record", RECORD_AT).set("launch", 1);
    block.set("budget", u64::from(budget_ticks(10_000_000_000)));
    let params = block.bytes();
    emulator.run(&mut device, &params, [1; 3], [1; 3]).unwrap_or_else(|why| panic!("{why}\n{}", image.ptx));
    match Trap::read(device.bytes(RECORD_AT), 1, &image.sites) {
        Some(trap) => Left::Trapped(trap_name(trap.kind).to_owned()),
        None => left(device.bytes(RESULTS), device.bytes(MEMORY).to_vec(), types),
    }
}

fn on_host(host: &Host, program: &Program<'_>, name: &str, arguments: &[u64], types: &[ValType]) -> Left {
    let image = program.compile_host_call(name).unwrap_or_else(|why| panic!("{why}"));
    let (mut memory, mut results) = beginnings(program);
    let windows = [HostArg::Window(RESULTS_START, &mut results), HostArg::Window(0, &mut memory)];
    let args = windows.into_iter().chain(arguments.iter().map(|bits| HostArg::Bits(*bits))).collect();
    match host.run(&image, &host.compile(&image), [1; 3], [1; 3], args) {
        Some(trap) => Left::Trapped(trap_name(trap.kind).to_owned()),
        None => left(&results, memory, types),
    }
}

fn on_gpu(gpu: &Gpu, image: &KernelImage, program: &Program<'_>, arguments: &[u64], types: &[ValType]) -> Left {
    let (memory, results) = beginnings(program);
    let upload = |bytes: &[u8]| {
        let buffer = gpu.tenant.buffer(bytes.len().max(16) as u64).unwrap();
        gpu.tenant.write_blocking(buffer.handle(), 0, bytes).unwrap();
        buffer
    };
    let (memory_buffer, results_buffer) = (upload(&memory), upload(&results));
    let kernel = gpu.load(image.ptx.as_bytes(), &image.entry).unwrap();
    let mut args =
        vec![Arg::Window(&results_buffer, RESULTS_START, 4096), Arg::Window(&memory_buffer, 0, memory.len() as u32)];
    for (param, bits) in image.params[2..].iter().zip(arguments) {
        args.push(Arg::Scalar(match param {
            tensor_wasm_jit::Param::Scalar(Ty::I32 | Ty::F32) => Param::U32(*bits as u32),
            _ => Param::U64(*bits),
        }));
    }
    gpu.launch(&kernel, [1; 3], [1; 3], &args).wait().unwrap();
    if let Some(trap) = gpu.trap(image) {
        return Left::Trapped(trap_name(trap.kind).to_owned());
    }
    let (mut memory, mut results) = (vec![0; memory.len()], vec![0; 512]);
    gpu.tenant.read_blocking(memory_buffer.handle(), 0, &mut memory).unwrap();
    gpu.tenant.read_blocking(results_buffer.handle(), 0, &mut results).unwrap();
    left(&results, memory, types)
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn main() -> ExitCode {
    let (programs, seed) = (number("TENSOR_WASM_TEST_PROGRAMS", 400), number("TENSOR_WASM_TEST_SEED", 1));
    let mut settings = wasmtime::Config::new();
    settings.cranelift_nan_canonicalization(true);
    let engine = Engine::new(&settings).unwrap();
    let device = device::open();
    let gpu = device.as_ref().map(|device| Gpu::new(device, "generated"));
    let host = Host::new();
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let mut count = |what: &'static str| *counts.entry(what).or_default() += 1;
    for seed in seed..seed + programs {
        // Half of them with loops that count, which a generator of anything hardly ever makes.
        let wasm = if seed % 2 == 0 { generate(seed) } else { Some(generate_loops(seed)) };
        let Some(wasm) = wasm else { continue };
        let Ok(program) = Program::read(&wasm) else {
            count("modules refused");
            continue;
        };
        count("modules");
        let module = wasmtime::Module::new(&engine, &wasm).unwrap();
        let mut rng = StdRng::seed_from_u64(seed);
        for export in module.exports() {
            let Some(ty) = export.ty().func().cloned() else { continue };
            let image = match program.compile_call(export.name()) {
                Ok(image) => image,
                Err(_) => {
                    count("functions refused");
                    continue;
                }
            };
            let types: Vec<ValType> = ty.results().collect();
            for _ in 0..3 {
                // Numbers that are near something, as often as any.
                let any = |rng: &mut StdRng| match rng.random_range(0..4) {
                    0 => rng.random(),
                    1 => rng.random_range(0..20),
                    2 => u64::from(rng.random::<f32>().to_bits()),
                    _ => [0, 1 << 31, u64::from(u32::MAX), 1 << 63, u64::MAX, 0x7fc0_0001, 0x7ff0_0000_0000_0001]
                        [rng.random_range(0..7)],
                };
                let arguments: Vec<u64> = ty.params().map(|_| any(&mut rng)).collect();
                let Some(expected) = oracle(&engine, &wasm, export.name(), &arguments) else { continue };
                if expected == Left::Trapped(TrapKind::Recursion.what().to_owned()) {
                    continue;
                }
                let found = emulated(&image, &program, &arguments, &types);
                if found == Left::Trapped(TrapKind::Recursion.what().to_owned()) {
                    count("calls left out: recursion through the table");
                    continue;
                }
                if found != expected {
                    println!("seed {seed}: {}({arguments:x?})", export.name());
                    println!("  Wasmtime: {}", short(&expected));
                    println!("  emulator: {}", short(&found));
                    return ExitCode::FAILURE;
                }
                let cpu = on_host(&host, &program, export.name(), &arguments, &types);
                if cpu != expected {
                    println!("seed {seed}: {}({arguments:x?})", export.name());
                    println!("  Wasmtime: {}\n  as a kernel on the CPU: {}", short(&expected), short(&cpu));
                    return ExitCode::FAILURE;
                }
                match found {
                    Left::Done { .. } => count("calls that returned"),
                    Left::Trapped(_) => count("calls that trapped"),
                }
                if let Some(gpu) = &gpu {
                    let found = on_gpu(gpu, &image, &program, &arguments, &types);
                    if found != expected {
                        println!("seed {seed}: {}({arguments:x?})", export.name());
                        println!("  Wasmtime: {}\n  GPU: {}", short(&expected), short(&found));
                        return ExitCode::FAILURE;
                    }
                    count("calls on the GPU");
                }
            }
        }
    }
    counts.iter().for_each(|(what, count)| println!("{count:>9} {what}"));
    let has_run = counts.get("calls that returned").is_some_and(|count| *count > programs / 4);
    if has_run { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn short(left: &Left) -> String {
    match left {
        Left::Done { results, memory, .. } => {
            let written: Vec<(usize, &u8)> =
                memory.iter().enumerate().filter(|(_, byte)| **byte != 0).take(16).collect();
            format!("{results:x?}, memory {written:x?}")
        }
        Left::Trapped(why) => why.clone(),
    }
}
