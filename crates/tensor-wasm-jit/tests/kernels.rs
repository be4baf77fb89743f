//! Kernels in the emulator: what they compute, and what happens to those that misbehave. Where `ptxas` is found,
//! everything that is compiled here is assembled too, for every supported device.

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

mod actors;
mod build;
#[expect(dead_code, reason = "what is run on a GPU here is given windows and no numbers")]
mod device;
mod gpu;
mod host;
mod math;
mod products;
mod snapshots;
mod subgroups;

use std::process::Command;

use host::{Host, HostArg};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tensor_wasm_jit::emulate::{DeviceMemory, Emulator, ParamBlock};
use tensor_wasm_jit::{
    CONTROL, HostImage, KernelImage, Memory, Program, RECORD, Refusal, Target, Trap, TrapKind, budget_ticks,
};

const CONTROL_AT: u64 = 0x30_0000_0000;
const RECORD_AT: u64 = 0x40_0000_0000;

/// Devices that kernels are assembled for.
const DEVICES: [&str; 7] = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"];

#[derive(Clone)]
enum Arg {
    I32(i32),
    F32(f32),
    Buffer(Vec<u8>),
}

struct Launched {
    trap: Option<Trap>,
    buffers: Vec<Vec<u8>>,
}

/// Compiles a kernel for the given arguments and runs it; then assembles it.
fn launch(wasm: &[u8], kernel: &str, groups: [u32; 3], items: [u32; 3], args: &[Arg]) -> Launched {
    launch_within(wasm, kernel, groups, items, args, 10_000_000_000)
}

fn launch_within(wasm: &[u8], kernel: &str, groups: [u32; 3], items: [u32; 3], args: &[Arg], nanos: u64) -> Launched {
    let windows: Vec<bool> = args.iter().map(|arg| matches!(arg, Arg::Buffer(_))).collect();
    let program = Program::read(wasm).unwrap();
    let mut image = program.compile(kernel, &windows).unwrap_or_else(|why| panic!("{kernel}: {why}"));
    let size = |arg: &Arg| if let Arg::Buffer(bytes) = arg { bytes.len() as u64 } else { 0 };
    if !image.fits(args.iter().map(size)) {
        assemble(&image);
        image = program.compile_small(kernel, &windows).unwrap();
    }
    assemble(&image);
    let launched = emulate(&image, groups, items, args, nanos);
    if launched.trap.as_ref().is_none_or(|trap| trap.kind != TrapKind::Deadline) {
        let image = program.compile_host(kernel, &windows).unwrap_or_else(|why| panic!("{kernel}: {why}"));
        compare_with_host(&image, groups, items, args, &launched);
    }
    launched
}

/// Runs a kernel in the emulator.
fn emulate(image: &KernelImage, groups: [u32; 3], items: [u32; 3], args: &[Arg], nanos: u64) -> Launched {
    let emulator = Emulator::new(&image.ptx).unwrap();
    let mut memory = DeviceMemory::default();
    memory.add(CONTROL_AT, vec![0; CONTROL.bytes as usize]);
    memory.add(RECORD_AT, vec![0; RECORD.bytes as usize]);
    let mut block = ParamBlock::new(&emulator);
    let (mut start, mut at) = (0x10_0000_u64, Vec::new());
    for (n, arg) in args.iter().enumerate() {
        match arg {
            Arg::I32(value) => drop(block.set(&format!("p{n}"), u64::from(value.cast_unsigned()))),
            Arg::F32(value) => drop(block.set(&format!("p{n}"), u64::from(value.to_bits()))),
            Arg::Buffer(bytes) => {
                // Exactly as large as it is: the emulator sees every access beyond.
                let address = 0x100_0000_0000 + 0x1_0000_0000 * n as u64;
                block.set(&format!("window{n}"), address).set(&format!("start{n}"), start);
                block.set(&format!("size{n}"), bytes.len() as u64);
                start += (bytes.len() as u64 + 0x1_0000).next_multiple_of(0x1_0000);
                memory.add(address, bytes.clone());
                at.push(address);
            }
        }
    }
    block.set("control", CONTROL_AT).set("record", RECORD_AT).set("launch", 7);
    block.set("budget", u64::from(budget_ticks(nanos)));
    let params = block.bytes();
    if let Err(why) = emulator.run(&mut memory, &params, groups, items) {
        panic!("{}: {why}\n{}", image.name, image.ptx);
    }
    let trap = Trap::read(memory.bytes(RECORD_AT), 7, &image.sites);
    Launched { trap, buffers: at.iter().map(|at| memory.bytes(*at).to_vec()).collect() }
}

/// Runs the same kernel on the CPU: it must end the same, and leave the same bytes behind.
fn compare_with_host(image: &HostImage, groups: [u32; 3], items: [u32; 3], args: &[Arg], expected: &Launched) {
    let kernel = &image.name;
    let mut buffers: Vec<Vec<u8>> = Vec::new();
    for arg in args {
        if let Arg::Buffer(bytes) = arg {
            buffers.push(bytes.clone());
        }
    }
    let (mut start, mut own) = (image.layout.windows_from, buffers.iter_mut());
    let host_arg = |arg: &Arg| match arg {
        Arg::I32(value) => HostArg::Bits(u64::from(value.cast_unsigned())),
        Arg::F32(value) => HostArg::Bits(u64::from(value.to_bits())),
        Arg::Buffer(bytes) => {
            let at = start.next_multiple_of(16);
            start = at + bytes.len() as u32 + 64;
            HostArg::Window(at, own.next().unwrap())
        }
    };
    let host = Host::new();
    let trap = host.run(image, &host.compile(image), groups, items, args.iter().map(host_arg).collect());
    let kind = |trap: &Option<Trap>| trap.as_ref().map(|trap| trap.kind);
    assert_eq!(kind(&trap), kind(&expected.trap), "{kernel}: {trap:?} on the CPU, {:?} in the emulator", expected.trap);
    if trap.is_none() {
        assert!(buffers == expected.buffers, "{kernel} computes something else on the CPU");
    }
}

/// Has the device's assembler look at a kernel, where there is one: from `cargo xtask ptxas`, or on the path.
fn assemble(image: &KernelImage) {
    assemble_text(&image.name, &image.ptx, image.target);
}

fn assemble_text(what: &str, ptx: &str, target: Target) {
    let Some(ptxas) = ptxas() else { return println!("skipped: no ptxas; `cargo xtask ptxas` installs it") };
    let folder = std::env::temp_dir().join(format!("tensor-wasm-ptx-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let name = hash(ptx);
    let file = folder.join(format!("{name:x}.ptx"));
    if file.exists() {
        return;
    }
    std::fs::write(&file, ptx).unwrap();
    let (major, minor) = target.capability();
    let is_enough = |device: &&str| device[3..].parse::<u32>().unwrap() >= 10 * major + minor;
    let newer: Vec<&str> = DEVICES.into_iter().filter(is_enough).collect();
    // What only one device has is not for those that came after it.
    let devices = if target == Target::Hopper { vec!["sm_90a"] } else { newer };
    for device in devices {
        let output = Command::new(ptxas).args(["-arch", device, "-o", "/dev/null"]).arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{what} for {device}: {said}\n{ptx}");
    }
}

fn ptxas() -> Option<&'static str> {
    let installed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/ptxas/ptxas");
    let found = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    [installed, "ptxas"].into_iter().find(found)
}

fn hash(text: &str) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

fn guest() -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/guests/kernels.wasm");
    std::fs::read(path).expect("run `cargo xtask guests` first")
}

fn floats(seed: u64, count: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..count).map(|_| rng.random_range(-10.0..10.0)).collect()
}

fn bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|f| f.to_le_bytes()).collect()
}

fn read(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn poison(count: usize) -> Vec<u8> {
    vec![0xff; count * 4]
}

#[test]
fn saxpy_computes_and_stops_where_it_should() {
    let (wasm, n) = (guest(), 1000);
    let (x, y) = (floats(1, n), floats(2, n));
    let args = |x: &[f32], y: &[f32]| [Arg::I32(n as i32), Arg::F32(2.5), Arg::Buffer(bytes(x)), Arg::Buffer(bytes(y))];
    let done = launch(&wasm, "saxpy", [8, 1, 1], [128, 1, 1], &args(&x, &y));
    assert_eq!(done.trap, None);
    let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 2.5_f32.mul_add(*x, *y)).collect();
    assert_eq!(read(&done.buffers[1]), expected);
    // One element too few, of either.
    for (x, y, which) in [(&x[..n - 1], &y[..], 2), (&x[..], &y[..n - 1], 3)] {
        let trap = launch(&wasm, "saxpy", [8, 1, 1], [128, 1, 1], &args(x, y)).trap.unwrap();
        assert_eq!(trap.kind, TrapKind::OutOfBounds);
        assert_eq!(trap.outside, Some((Memory::Argument(which), 4 * (n as u32 - 1))));
        assert_eq!((trap.group, trap.item), ([7, 0, 0], [103, 0, 0]), "the item that did it");
        let text = trap.to_string();
        assert!(text.contains("at byte 3996 of argument") && text.contains("in saxpy at byte 0x"), "{text}");
    }
}

#[test]
fn matrices_are_multiplied_both_ways_at_every_size() {
    let wasm = guest();
    for n in [1, 2, 3, 4, 5, 7, 8, 13, 16, 32] {
        let (a, b) = (floats(n as u64, n * n), floats(n as u64 + 1, n * n));
        let args = [Arg::I32(n as i32), Arg::Buffer(bytes(&a)), Arg::Buffer(bytes(&b)), Arg::Buffer(poison(n * n))];
        let mut expected = vec![0.0_f32; n * n];
        for (at, out) in expected.iter_mut().enumerate() {
            for k in 0..n {
                *out = a[at / n * n + k].mul_add(b[k * n + at % n], *out);
            }
        }
        let side = n.div_ceil(8) as u32;
        let done = launch(&wasm, "matmul", [side, side, 1], [8, 8, 1], &args);
        assert_eq!(done.trap, None);
        assert_eq!(read(&done.buffers[2]), expected, "{n}");
        if n % 16 == 0 {
            let side = n as u32 / 16;
            let done = launch(&wasm, "matmul_tiled", [side, side, 1], [16, 16, 1], &args);
            assert_eq!(done.trap, None);
            assert_eq!(read(&done.buffers[2]), expected, "{n}, tiled");
        }
        // One element too few, where only the last round of a loop gets there.
        for short in [1, 2] {
            let mut args = args.clone();
            let Arg::Buffer(bytes) = &mut args[short] else { unreachable!() };
            bytes.truncate(bytes.len() - 4);
            let trap = launch(&wasm, "matmul", [side, side, 1], [8, 8, 1], &args).trap.unwrap();
            assert_eq!(trap.kind, TrapKind::OutOfBounds, "{n}");
            let names = matches!(trap.outside, Some((Memory::Argument(which), _)) if which as usize == short);
            assert!(names || n == 1, "{trap}");
        }
    }
}

#[test]
fn the_rest_of_the_guests_kernels_compute_what_they_should() {
    let wasm = guest();
    let (width, height) = (37, 21);
    let from = floats(3, width * height);
    let args = [
        Arg::I32(width as i32),
        Arg::I32(height as i32),
        Arg::Buffer(bytes(&from)),
        Arg::Buffer(poison(width * height)),
    ];
    let done = launch(&wasm, "stencil", [5, 3, 1], [8, 8, 1], &args);
    assert_eq!(done.trap, None);
    let out = read(&done.buffers[1]);
    for y in 0..height {
        for x in 0..width {
            let at = y * width + x;
            if x == 0 || y == 0 || x == width - 1 || y == height - 1 {
                assert!(out[at].is_nan(), "the edge is left alone");
            } else {
                let sum = from[at - 1] + from[at + 1] + from[at - width] + from[at + width];
                assert_eq!(out[at], 0.1_f32.mul_add(sum - 4.0 * from[at], from[at]));
            }
        }
    }
    let mut rng = StdRng::seed_from_u64(5);
    let rows = 100;
    let mut starts = vec![0_i32];
    for _ in 0..rows {
        starts.push(starts[starts.len() - 1] + rng.random_range(0..9));
    }
    let entries = starts[rows] as usize;
    let columns: Vec<i32> = (0..entries).map(|_| rng.random_range(0..rows as i32)).collect();
    let (values, x) = (floats(6, entries), floats(7, rows));
    let ints = |ints: &[i32]| Arg::Buffer(ints.iter().flat_map(|i| i.to_le_bytes()).collect());
    let args = [
        Arg::I32(rows as i32),
        ints(&starts),
        ints(&columns),
        Arg::Buffer(bytes(&values)),
        Arg::Buffer(bytes(&x)),
        Arg::Buffer(poison(rows)),
    ];
    let done = launch(&wasm, "spmv", [4, 1, 1], [32, 1, 1], &args);
    assert_eq!(done.trap, None);
    for (row, found) in read(&done.buffers[4]).into_iter().enumerate() {
        let own = starts[row] as usize..starts[row + 1] as usize;
        assert_eq!(found, own.fold(0.0, |sum, at| values[at].mul_add(x[columns[at] as usize], sum)), "row {row}");
    }
    // A column that is not there.
    let mut bad = columns.clone();
    bad[entries / 2] = rows as i32;
    let mut wrong = args.clone();
    wrong[2] = ints(&bad);
    let trap = launch(&wasm, "spmv", [4, 1, 1], [32, 1, 1], &wrong).trap.unwrap();
    assert_eq!(trap.outside, Some((Memory::Argument(4), 4 * rows as u32)));
    let bodies = 256;
    let all = floats(8, bodies * 4);
    let args = [Arg::I32(bodies as i32), Arg::Buffer(bytes(&all)), Arg::Buffer(poison(bodies * 4))];
    let done = launch(&wasm, "nbody", [1, 1, 1], [256, 1, 1], &args);
    assert_eq!(done.trap, None);
    for (i, found) in read(&done.buffers[1]).chunks(4).enumerate() {
        let mut expected = [0.0_f64; 3];
        for other in all.chunks(4) {
            let d: Vec<f64> = (0..3).map(|axis| f64::from(other[axis]) - f64::from(all[4 * i + axis])).collect();
            let inverse = (d[0] * d[0] + d[1] * d[1] + d[2] * d[2] + 1e-3).sqrt().recip();
            (0..3).for_each(|axis| expected[axis] += f64::from(other[3]) * inverse.powi(3) * d[axis]);
        }
        for axis in 0..3 {
            let error = (f64::from(found[axis]) - expected[axis]).abs();
            assert!(error <= 1e-3 * expected[axis].abs().max(1.0), "body {i}: {found:?} and {expected:?}");
        }
    }
    // A table of pairs, open addressing.
    let (slots, mut table) = (64_usize, vec![[0_u32; 2]; 64]);
    let keys: Vec<u32> = (0..40).map(|_| rng.random_range(1..u32::MAX)).collect();
    for key in &keys {
        let mut at = key.wrapping_mul(2_654_435_761) as usize & (slots - 1);
        while table[at][0] != 0 {
            at = (at + 1) & (slots - 1);
        }
        table[at] = [*key, key ^ 0x55];
    }
    let words = |words: Vec<u32>| Arg::Buffer(words.into_iter().flat_map(u32::to_le_bytes).collect());
    let asked: Vec<u32> = keys.iter().copied().chain([3, 5, 7]).collect();
    let count = asked.len();
    let args = [
        Arg::I32(count as i32),
        Arg::I32(slots as i32 - 1),
        words(asked.clone()),
        words(table.into_iter().flatten().collect()),
        Arg::Buffer(poison(count)),
    ];
    let done = launch(&wasm, "probe", [2, 1, 1], [32, 1, 1], &args);
    assert_eq!(done.trap, None);
    for (key, found) in asked.iter().zip(done.buffers[2].chunks(4)) {
        let expected = if keys.contains(key) { key ^ 0x55 } else { 0 };
        assert_eq!(u32::from_le_bytes(found.try_into().unwrap()), expected);
    }
}

fn wat(body: &str) -> Vec<u8> {
    let text = format!(
        r#"(module
            (import "kernel" "global_id" (func $global_id (param i32) (result i32)))
            (import "kernel" "local_id" (func $local_id (param i32) (result i32)))
            (import "kernel" "group_id" (func $group_id (param i32) (result i32)))
            (import "kernel" "barrier" (func $barrier))
            (import "kernel" "shared" (func $shared (param i32) (result i32)))
            (memory 1)
            {body})"#
    );
    wat::parse_str(text).unwrap()
}

/// A kernel of one item that accesses `width` bytes at an offset in its only argument.
fn access(width: u32, is_store: bool) -> Vec<u8> {
    let instruction = match (width, is_store) {
        (1, false) => "(drop (i32.load8_u (local.get $p)))",
        (2, false) => "(drop (i32.load16_u (local.get $p)))",
        (4, false) => "(drop (i32.load (local.get $p)))",
        (8, false) => "(drop (f64.load (local.get $p)))",
        (1, true) => "(i32.store8 (local.get $p) (i32.const 1))",
        (2, true) => "(i32.store16 (local.get $p) (i32.const 1))",
        (4, true) => "(f32.store (local.get $p) (f32.const 1))",
        _ => "(i64.store (local.get $p) (i64.const 1))",
    };
    wat(&format!(
        r#"(func (export "k") (param $at i32) (param $a i32) (local $p i32)
            (local.set $p (i32.add (local.get $a) (local.get $at))) {instruction})"#
    ))
}

#[test]
fn accesses_at_and_beyond_each_end_at_every_alignment() {
    for width in [1, 2, 4, 8_u32] {
        for is_store in [false, true] {
            let wasm = access(width, is_store);
            for size in [1, 7, 8, 16, 37, 64_u32] {
                for at in (-9..9).chain(size as i32 - 9..size as i32 + 9).chain([i32::MIN, i32::MAX, i32::MIN + 3]) {
                    let args = [Arg::I32(at), Arg::Buffer(vec![0; size as usize])];
                    let trap = launch(&wasm, "k", [1; 3], [1; 3], &args).trap;
                    let fits = at >= 0 && at as u64 + u64::from(width) <= u64::from(size);
                    match trap {
                        None => assert!(fits, "{width} bytes at {at} of {size}"),
                        Some(trap) => {
                            assert!(!fits, "{width} bytes at {at} of {size}");
                            assert_eq!(trap.kind, TrapKind::OutOfBounds);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn traps_say_what_and_where() {
    let wasm = wat(r#"(func $divide (param i32 i32) (result i32) (i32.div_s (local.get 0) (local.get 1)))
           (func (export "divide") (param i32 i32) (param $out i32)
             (i32.store (local.get $out) (call $divide (local.get 0) (local.get 1))))
           (func (export "forever") (loop $l (br $l)))
           (func (export "unreachable") unreachable)
           (func (export "convert") (param f32) (param $out i32)
             (i32.store (local.get $out) (i32.trunc_f32_s (local.get 0))))"#);
    let divide = |a, b| launch(&wasm, "divide", [1; 3], [1; 3], &[Arg::I32(a), Arg::I32(b), Arg::Buffer(vec![0; 4])]);
    assert_eq!(divide(7, 2).buffers[0], [3, 0, 0, 0]);
    let zero = divide(7, 0).trap.unwrap();
    assert_eq!(zero.kind, TrapKind::DivideByZero);
    assert!(zero.to_string().contains("integer divide by zero (in divide at byte"), "{zero}");
    assert_eq!(divide(i32::MIN, -1).trap.unwrap().kind, TrapKind::IntegerOverflow);
    assert_eq!(launch(&wasm, "unreachable", [1; 3], [1; 3], &[]).trap.unwrap().kind, TrapKind::Unreachable);
    let convert = |x| launch(&wasm, "convert", [1; 3], [1; 3], &[Arg::F32(x), Arg::Buffer(vec![0; 4])]);
    assert_eq!(convert(-1.5).buffers[0], (-1_i32).to_le_bytes());
    assert_eq!(convert(f32::NAN).trap.unwrap().kind, TrapKind::BadConversion);
    assert_eq!(convert(3e9).trap.unwrap().kind, TrapKind::IntegerOverflow);
    let late = launch_within(&wasm, "forever", [2, 1, 1], [3, 1, 1], &[], 50_000_000).trap.unwrap();
    assert_eq!(late.kind, TrapKind::Deadline);
    assert!(late.to_string().starts_with("the deadline passed, in work item"), "{late}");
}

#[test]
fn every_way_back_to_a_loop_is_stopped_and_polls_in_one_place() {
    let continues: String =
        (0..40).map(|n| format!("(br_if $l (i32.eq (local.get $which) (i32.const {n})))")).collect();
    let table = "$l $out ".repeat(20);
    let wasm = wat(&format!(
        r#"(func (export "k") (param $which i32) (param $n i32)
             (block $out (loop $l {continues} (br_table {table} $l $out (local.get $n)))))"#
    ));
    for (which, n, stops) in
        [(0, 0, true), (39, 1, true), (40, 0, true), (40, 38, true), (40, 1, false), (40, 77, false)]
    {
        let trap = launch_within(&wasm, "k", [1; 3], [1; 3], &[Arg::I32(which), Arg::I32(n)], 50_000_000).trap;
        assert_eq!(trap.map(|trap| trap.kind), stops.then_some(TrapKind::Deadline), "{which}, {n}");
    }
    let image = Program::read(&wasm).unwrap().compile("k", &[false, false]).unwrap();
    // One for the loop, one as the kernel begins.
    assert_eq!(image.ptx.matches("%globaltimer").count(), 2);
}

#[test]
fn items_that_trap_before_a_barrier_hold_up_nobody() {
    // Every third item divides by zero; the others meet at the barrier.
    let wasm = wat(r#"(func (export "k") (param $out i32) (local $i i32) (local $s i32)
            (local.set $s (call $shared (i32.const 256)))
            (local.set $i (call $local_id (i32.const 0)))
            (if (i32.eqz (i32.rem_u (local.get $i) (i32.const 3)))
              (then (drop (i32.div_u (i32.const 1) (i32.const 0)))))
            (i32.store (i32.add (local.get $s) (i32.shl (local.get $i) (i32.const 2))) (local.get $i))
            (call $barrier)
            (i32.store (i32.add (local.get $out) (i32.shl (local.get $i) (i32.const 2)))
              (i32.load (i32.add (local.get $s) (i32.shl (i32.xor (local.get $i) (i32.const 1)) (i32.const 2))))))"#);
    let done = launch(&wasm, "k", [2, 1, 1], [64, 1, 1], &[Arg::Buffer(vec![0; 256])]);
    assert_eq!(done.trap.unwrap().kind, TrapKind::DivideByZero);
}

#[test]
fn an_empty_buffer_reaches_into_no_other() {
    for len in [0, 1, 3] {
        let args = [Arg::I32(5), Arg::F32(2.0), Arg::Buffer(vec![0; len]), Arg::Buffer(vec![0; 64])];
        let done = launch(&guest(), "saxpy", [1; 3], [8, 1, 1], &args);
        assert_eq!(done.trap.map(|trap| trap.kind), Some(TrapKind::OutOfBounds), "{len} bytes");
    }
}

#[test]
fn shared_memory_and_the_stack_begin_as_zeros() {
    // Each item stores what it finds in shared memory and on its stack, then fills both.
    let wasm = wat(r#"(global $sp (mut i32) (i32.const 65536))
          (func (export "k") (param $out i32) (local $i i32) (local $s i32) (local $f i32)
            (global.set $sp (local.tee $f (i32.sub (global.get $sp) (i32.const 48))))
            (local.set $s (i32.add (call $shared (i32.const 1000))
              (i32.shl (local.tee $i (call $local_id (i32.const 0))) (i32.const 2))))
            (i32.store (i32.add (local.get $out) (i32.shl (call $global_id (i32.const 0)) (i32.const 2)))
              (i32.or (i32.load (local.get $s)) (i32.load offset=44 (local.get $f))))
            (i32.store (local.get $s) (i32.const -1))
            (i32.store offset=44 (local.get $f) (i32.const -1))
            (call $barrier)
            (global.set $sp (i32.add (local.get $f) (i32.const 48))))"#);
    let done = launch(&wasm, "k", [3, 1, 1], [250, 1, 1], &[Arg::Buffer(vec![0xee; 3000])]);
    assert_eq!(done.trap, None);
    assert!(done.buffers[0].iter().all(|byte| *byte == 0));
}

#[test]
fn a_stack_pointer_that_is_moved_anywhere_is_an_access_out_of_bounds() {
    // By all that there is, by more, and to where nobody knows.
    for moved in ["(i32.const -1)", "(i32.const 65537)", "(local.get $out)"] {
        let wasm = wat(&format!(
            r#"(global $sp (mut i32) (i32.const 65536))
              (func (export "k") (param $out i32)
                (global.set $sp (i32.sub (global.get $sp) {moved}))
                (global.set $sp (i32.sub (global.get $sp) (i32.load (local.get $out))))
                (i32.store (global.get $sp) (i32.const 1)))"#
        ));
        let done = launch(&wasm, "k", [1; 3], [1; 3], &[Arg::Buffer(vec![0; 64])]);
        assert_eq!(done.trap.map(|trap| trap.kind), Some(TrapKind::OutOfBounds), "{moved}");
        assert_eq!(done.buffers[0], [0; 64]);
    }
}

#[test]
fn barriers_in_any_control_flow_bring_items_together() {
    // In both arms of an `if`, in a loop whose length is the group's, and after a branch out of a block: each time an
    // item reads what its neighbour wrote before.
    let neighbour =
        "(i32.load (i32.add (local.get $s) (i32.and (i32.add (local.get $at) (i32.const 4)) (i32.const 127))))";
    let store = "(i32.store (i32.add (local.get $s) (local.get $at)) (local.get $sum))";
    let wasm = wat(&format!(
        r#"(func (export "k") (param $out i32) (local $i i32) (local $at i32) (local $s i32) (local $n i32) (local $sum i32)
            (local.set $s (call $shared (i32.const 128)))
            (local.set $at (i32.shl (local.tee $i (call $local_id (i32.const 0))) (i32.const 2)))
            (local.set $sum (i32.add (local.get $i) (i32.const 1)))
            {store}
            (if (i32.and (call $group_id (i32.const 0)) (i32.const 1))
              (then (call $barrier) (local.set $sum (i32.mul (local.get $sum) {neighbour})) (call $barrier))
              (else (call $barrier) (local.set $sum (i32.sub (local.get $sum) {neighbour})) (call $barrier)))
            (block $out
              (loop $again
                {store}
                (call $barrier)
                (local.set $sum (i32.add (i32.mul (local.get $sum) (i32.const 31)) {neighbour}))
                (call $barrier)
                (br_if $out (i32.gt_u (local.tee $n (i32.add (local.get $n) (i32.const 1))) (call $group_id (i32.const 0))))
                (if (i32.eq (local.get $n) (i32.const 2)) (then (call $barrier)))
                (br $again)))
            (if (i32.lt_u (local.get $i) (i32.const 7)) (then return))
            (call $barrier)
            (i32.store (i32.add (local.get $out)
              (i32.shl (call $global_id (i32.const 0)) (i32.const 2))) (local.get $sum)))"#
    ));
    let (groups, items) = (5_usize, 32_usize);
    let done = launch(&wasm, "k", [5, 1, 1], [32, 1, 1], &[Arg::Buffer(vec![0; 4 * groups * items])]);
    assert_eq!(done.trap, None);
    for group in 0..groups {
        let next = |sums: &[i32], i: usize| sums[(i + 1) % items];
        let mut sums: Vec<i32> = (1..=items as i32).collect();
        let first = sums.clone();
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = if group % 2 == 1 { *sum * next(&first, i) } else { *sum - next(&first, i) };
        }
        for _ in 0..=group {
            let before = sums.clone();
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = sum.wrapping_mul(31).wrapping_add(next(&before, i));
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            let at = 4 * (group * items + i);
            let found = i32::from_le_bytes(done.buffers[0][at..at + 4].try_into().unwrap());
            assert_eq!(found, if i < 7 { 0 } else { *sum }, "item {i} of group {group}");
        }
    }
}

#[test]
fn what_kernels_cannot_do_is_refused_by_name() {
    let refused = |body: &str| {
        let wasm = wat(body);
        Program::read(&wasm).and_then(|program| program.compile("k", &[]).map(drop)).unwrap_err()
    };
    let grow = refused(r#"(func $f (drop (memory.grow (i32.const 1)))) (func (export "k") (call $f))"#);
    assert!(
        matches!(&grow, Refusal::Instruction { instruction, place } if instruction == "memory.grow" && place.function == "f"),
        "{grow}"
    );
    let vector = refused(r#"(func (export "k") (drop (v128.const i64x2 0 0)))"#);
    assert!(vector.to_string().contains("v128.const is not possible in a kernel (in k at byte 0x"), "{vector}");
    let recursion = refused(r#"(func $f (call $g)) (func $g (call $f)) (func (export "k") (call $f))"#);
    assert!(recursion.to_string().contains("f calls g calls f"), "{recursion}");
    let shared = refused(r#"(func (export "k") (drop (call $shared (call $local_id (i32.const 0)))))"#);
    assert!(matches!(shared, Refusal::Shared { .. }), "{shared}");
    let returns = refused(r#"(func (export "k") (result i32) (i32.const 1))"#);
    assert!(returns.to_string().contains("it returns a value"), "{returns}");
    let other = refused(r#"(func (export "other")) "#);
    assert!(other.to_string().contains("there is no kernel \"k\"; there are: other"), "{other}");
    assert!(matches!(Program::read(b"hello").err(), Some(Refusal::NotWasm { .. })));
    assert!(matches!(Program::read(&vec![0; 10 << 20]).err(), Some(Refusal::TooLarge { .. })));
    // Each calls the next twice: thirty of them would be a billion.
    let mut text = String::new();
    for n in 0..30 {
        text += &format!("(func $f{n} (call $f{}) (call $f{}))", n + 1, n + 1);
    }
    let blow_up = refused(&format!(r#"{text} (func $f30 (drop (i32.const 1))) (func (export "k") (call $f0))"#));
    assert!(matches!(blow_up, Refusal::TooLong { .. }), "{blow_up}");
}

#[test]
fn kernels_that_keep_too_many_values_are_refused() {
    // So many values, each of which is used to the end, and operations on them in a loop.
    let kernel = |values: usize, ops: usize| {
        let locals = "(local i32)".repeat(values);
        let load = |n| format!("(local.set {} (i32.load offset={} (local.get 0)))", n + 2, 4 * n);
        let store = |n| format!("(i32.store offset={} (local.get 0) (local.get {}))", 4 * n, n + 2);
        let mix = |n| {
            let (a, b) = (n % values + 2, n * 7 % values + 2);
            format!("(local.set {a} (i32.add (local.get {a}) (local.get {b})))")
        };
        let (loads, stores): (String, String) = ((0..values).map(load).collect(), (0..values).map(store).collect());
        let mixes: String = (0..ops).map(mix).collect();
        let wasm = wat(&format!(
            r#"(func $mix (export "k") (param i32 i32) {locals} {loads} (loop $l {mixes} (br_if $l (local.get 1))) {stores})"#
        ));
        Program::read(&wasm).and_then(|program| program.compile("k", &[true, false]).map(drop))
    };
    assert_eq!(kernel(200, 20_000), Ok(()));
    // Short ones may have more.
    assert_eq!(kernel(300, 1_000), Ok(()));
    let refused = kernel(400, 20_000).unwrap_err();
    assert!(matches!(refused, Refusal::TooManyValues { values_max: 250..300, .. }), "{refused}");
    assert!(refused.to_string().contains("values alive at once (in mix at byte 0x"), "{refused}");
    assert!(refused.to_string().contains("keep some of them in memory"), "{refused}");
}

#[test]
fn compiling_is_deterministic_and_takes_time_in_proportion() {
    let straight = |n: usize| {
        let adds = "(local.set $x (i32.add (local.get $x) (i32.load (local.get $p))))".repeat(n);
        wat(&format!(
            r#"(func (export "k") (param $p i32) (local $x i32) {adds} (i32.store (local.get $p) (local.get $x)))"#
        ))
    };
    let time = |wasm: &[u8]| {
        let program = Program::read(wasm).unwrap();
        let runs = (0..5).map(|_| {
            let started = std::time::Instant::now();
            let image = program.compile("k", &[true]).unwrap();
            (started.elapsed(), image)
        });
        let mut runs: Vec<_> = runs.collect();
        assert!(runs.windows(2).all(|pair| pair[0].1 == pair[1].1));
        runs.sort_by_key(|(elapsed, _)| *elapsed);
        runs[0].0.as_secs_f64()
    };
    let (short, long) = (time(&straight(1_000)), time(&straight(10_000)));
    // Ten times would be in proportion, a hundred times would be its square.
    assert!(long < 50.0 * short, "{short} s and {long} s");
}

#[test]
fn what_was_tried_to_get_around_the_fence_does_not() {
    let one = |wasm: &[u8], args: &[Arg]| launch(wasm, "k", [1; 3], [1; 3], args);
    let counted = |body: &str| {
        wat(&format!(
            r#"(func (export "k") (param $p i32) (param $n i32) (local $i i32) (local $a i32)
                (loop $l {body}
                  (local.set $p (i32.add (local.get $p) (i32.const 4)))
                  (br_if $l (i32.ne (local.tee $i (i32.add (local.get $i) (i32.const 1))) (local.get $n)))))"#
        ))
    };
    // In a counted loop, beside an access that is inside, one that is far away.
    for offset in ["0x7ffffffc", "0xfffffff0", "0x10000", "256"] {
        let wasm = counted(&format!(
            "(drop (i32.load (local.get $p))) (i32.store offset={offset} (local.get $p) (i32.const 1))"
        ));
        let trap = one(&wasm, &[Arg::Buffer(vec![0; 64]), Arg::I32(16)]).trap.unwrap();
        assert_eq!(trap.kind, TrapKind::OutOfBounds, "{offset}");
    }
    // An address that is one of two things.
    let wasm = counted(
        "(if (i32.and (local.get $i) (i32.const 1)) (then (local.set $a (local.get $p))) \
         (else (local.set $a (i32.add (local.get $p) (i32.const 64))))) \
         (i32.store (local.get $a) (local.get $i))",
    );
    let done = one(&wasm, &[Arg::Buffer(vec![0xff; 128]), Arg::I32(16)]);
    assert_eq!(done.trap, None);
    for i in 0..16_usize {
        let at = if i % 2 == 1 { 4 * i } else { 4 * i + 64 };
        assert_eq!(done.buffers[0][at..at + 4], (i as u32).to_le_bytes(), "{i}");
    }
    // Shared memory that is smaller than what is accessed together.
    let wasm = wat(r#"(func (export "k") (param $p i32) (local $s i32) (local.set $s (call $shared (i32.const 16)))
            (i32.store (local.get $p) (i32.load (local.get $s)))
            (i32.store offset=1020 (local.get $s) (i32.const 1)))"#);
    assert_eq!(one(&wasm, &[Arg::Buffer(vec![0; 64])]).trap.unwrap().kind, TrapKind::OutOfBounds);
    // Data and a stack at odd addresses.
    let wasm = wat(r#"(data (i32.const 1025) "abcdefgh")
           (func (export "k") (param $p i32) (i32.store (local.get $p) (i32.load (i32.const 1028))))"#);
    assert_eq!(one(&wasm, &[Arg::Buffer(vec![0; 4])]).buffers[0], b"defg");
    let wasm = wat(r#"(global $sp (mut i32) (i32.const 0x10001))
           (func (export "k") (param $p i32) (local $f i32)
             (global.set $sp (local.tee $f (i32.and (i32.sub (global.get $sp) (i32.const 64)) (i32.const -16))))
             (i32.store (local.get $f) (i32.const 7))
             (i32.store (local.get $p) (i32.load (local.get $f))))"#);
    assert_eq!(one(&wasm, &[Arg::Buffer(vec![0; 4])]).buffers[0], [7, 0, 0, 0]);
    // What the last round was, after the loop, as an address.
    let wasm = wat(r#"(func (export "k") (param $p i32) (local $i i32) (local $a i32)
            (local.set $i (i32.const 1))
            (loop $l
              (local.set $a (i32.add (local.get $p) (i32.shl (local.get $i) (i32.const 2))))
              (br_if $l (i32.ne (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 9))))
            (drop (i32.atomic.rmw.add (local.get $a) (i32.const 5))))"#);
    let done = one(&wasm, &[Arg::Buffer(vec![0; 64])]);
    assert_eq!((done.trap, done.buffers[0][32]), (None, 5));
    // Modules that are only there to be large, or that say what is not so.
    let refused = |text: &str| {
        let wasm = wat::parse_str(text).unwrap();
        Program::read(&wasm).and_then(|program| program.compile("k", &[]).map(drop)).unwrap_err()
    };
    let spread =
        refused(r#"(module (memory 65536) (data (i32.const 0) "a") (data (i32.const -2) "b") (func (export "k")))"#);
    assert!(matches!(spread, Refusal::Module { .. }), "{spread}");
    let lying = refused(
        r#"(module (import "kernel" "barrier" (func (result i32))) (func (export "k") (drop (block (result i32) (call 0)))))"#,
    );
    assert!(lying.to_string().contains("kernel.barrier of this type"), "{lying}");
    let nops = "nop ".repeat(100_000);
    let calls = "(call $f)".repeat(1_000);
    let reading = refused(&format!(r#"(module (func $f {nops}) (func (export "k") {calls}))"#));
    assert!(matches!(reading, Refusal::TooLong { .. }), "{reading}");
}
