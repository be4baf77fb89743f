//! Programs that nobody wrote: generated modules, of anything and of counted loops, each function of which is run by
//! Wasmtime and as a kernel, with the same arguments. Results, traps and memory must be the same to the last bit.
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
mod programs;

use std::collections::BTreeMap;
use std::process::ExitCode;

use device::{Arg, Gpu};
use host::{Host, HostArg};
use programs::{Left, RESULTS_START, beginnings, emulated, left, oracle, trap_name};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use tensor_wasm_gpu::Param;
use tensor_wasm_jit::{KernelImage, Program, TrapKind, Ty};
use wasmtime::ValType;

/// Calls of each function that is compared between the emulator and a GPU.
const FUNCTION_CALLS: usize = 200;

fn generate(seed: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 4096];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    programs::generate(&bytes)
}

/// A function with counted loops, in every shape a compiler might leave them: with steps and bounds of all kinds,
/// values of this round and of the last, exits in the middle. All its locals are its results.
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

/// The functions that are polynomials in kernels have the same bits on a GPU as in the emulator. Returns how many were
/// compared.
fn functions(gpu: &Gpu, seed: u64) -> Result<u64, String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut count = 0;
    for ty in ["f32", "f64"] {
        for name in ["exp", "exp2", "log", "log2", "sin", "cos", "tanh", "pow"] {
            let params = if name == "pow" { format!("{ty} {ty}") } else { ty.to_owned() };
            let arguments = if name == "pow" { "(local.get 0) (local.get 1)" } else { "(local.get 0)" };
            let wasm = wat::parse_str(format!(
                r#"(module (import "kernel" "{name}_{ty}" (func $f (param {params}) (result {ty}))) (memory 1)
                    (func (export "f") (param {params}) (result {ty}) (call $f {arguments})))"#
            ))
            .unwrap();
            let program = Program::read(&wasm).unwrap();
            let image = program.compile_call("f").unwrap();
            let types = [if ty == "f32" { ValType::F32 } else { ValType::F64 }];
            for _ in 0..FUNCTION_CALLS {
                // Of all sizes, and as often such as people use.
                let any = |rng: &mut StdRng| {
                    let usual: f64 = rng.random_range(-20.0..20.0);
                    match (rng.random(), ty) {
                        (true, _) => rng.random(),
                        (false, "f32") => u64::from((usual as f32).to_bits()),
                        _ => usual.to_bits(),
                    }
                };
                let arguments: Vec<u64> = (0..image.params.len() - 2).map(|_| any(&mut rng)).collect();
                let expected = emulated(&image, &program, &arguments, &types);
                let found = on_gpu(gpu, &image, &program, &arguments, &types);
                if found != expected {
                    return Err(format!("{name}_{ty}({arguments:x?}): {} and {}", short(&expected), short(&found)));
                }
                count += 1;
            }
        }
    }
    Ok(count)
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn main() -> ExitCode {
    let (programs, seed) = (number("TENSOR_WASM_TEST_PROGRAMS", 400), number("TENSOR_WASM_TEST_SEED", 1));
    let engine = programs::engine();
    let device = device::open();
    let gpu = device.as_ref().map(|device| Gpu::new(device, "generated"));
    let host = Host::new();
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let mut count = |what: &'static str| *counts.entry(what).or_default() += 1;
    for seed in seed..seed + programs {
        // Half of them with counted loops, which a generator of anything hardly ever makes.
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
    match gpu.as_ref().map(|gpu| functions(gpu, seed)) {
        Some(Ok(compared)) => drop(counts.insert("calls of functions on the GPU", compared)),
        Some(Err(why)) => {
            println!("emulator and GPU: {why}");
            return ExitCode::FAILURE;
        }
        None => {}
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
