//! Modules from `wasm-smith` in the profile of kernels, and what Wasmtime and the emulator make of a call. Shared by
//! the test of generated programs and the fuzzer (`fuzz/`).

use tensor_wasm_jit::emulate::{DeviceMemory, Emulator, ParamBlock};
use tensor_wasm_jit::{CONTROL, KernelImage, Program, RECORD, Trap, TrapKind, budget_ticks};
use wasm_smith::{Config, Module};
use wasmtime::{Engine, Extern, Instance, Store, Val, ValType};

const RESULTS: u64 = 0x10_0000_0000;
const MEMORY: u64 = 0x20_0000_0000;
const CONTROL_AT: u64 = 0x30_0000_0000;
const RECORD_AT: u64 = 0x40_0000_0000;
/// Nowhere that a generator thinks of.
pub(crate) const RESULTS_START: u32 = 0xdead_5430;

/// Instructions of a function at most, so that most programs are small.
const FUEL: u32 = 1_000;

/// What a call left behind.
#[derive(Debug, PartialEq)]
pub(crate) enum Left {
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

/// A module of whatever the bytes say, that ends.
pub(crate) fn generate(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut source = arbitrary::Unstructured::new(bytes);
    let mut module = Module::new(config(), &mut source).ok()?;
    module.ensure_termination(FUEL).ok()?;
    Some(module.to_bytes())
}

/// Wasmtime, with one NaN as kernels have it.
pub(crate) fn engine() -> Engine {
    let mut settings = wasmtime::Config::new();
    settings.cranelift_nan_canonicalization(true);
    Engine::new(&settings).unwrap()
}

pub(crate) fn trap_name(kind: TrapKind) -> &'static str {
    match kind {
        TrapKind::NoSuchFunction | TrapKind::WrongFunctionType => "call",
        other => other.what(),
    }
}

/// What Wasmtime makes of a call; none if the module is not for it.
pub(crate) fn oracle(engine: &Engine, wasm: &[u8], name: &str, arguments: &[u64]) -> Option<Left> {
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
pub(crate) fn beginnings(program: &Program<'_>) -> (Vec<u8>, Vec<u8>) {
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

pub(crate) fn left(results: &[u8], memory: Vec<u8>, types: &[ValType]) -> Left {
    let word = |n: usize| u64::from_le_bytes(results[8 * n..8 * n + 8].try_into().unwrap());
    let cut = |(n, ty): (usize, &ValType)| match ty {
        ValType::I32 | ValType::F32 => word(n) & u64::from(u32::MAX),
        _ => word(n),
    };
    Left::Done { results: types.iter().enumerate().map(cut).collect(), memory }
}

pub(crate) fn emulated(image: &KernelImage, program: &Program<'_>, arguments: &[u64], types: &[ValType]) -> Left {
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
