//! Fenced kernels beside the same written by hand in CUDA C++ and compiled with `nvcc -O3`, on one GPU in one run:
//! `cargo bench -p tensor-wasm-jit --bench kernels -- target/guests/kernels.wasm
//! crates/tensor-wasm-jit/benches/kernels.cu`. Both sides get the same random inputs and poisoned outputs, and their
//! outputs are compared. Results go to `bench-results/`, or to the folder named by `TENSOR_WASM_RESULTS`.

#![allow(dead_code, reason = "the report's file belongs to another program too")]
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

#[path = "../../tensor-wasm-bench/src/report.rs"]
mod report;

#[path = "../tests/device/mod.rs"]
mod device;

use std::process::Command;
use std::time::Instant;

// What the report's file uses, which is another crate's.
use anyhow as _;
use serde_json as _;

use device::{Arg, Gpu};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use report::{Goal, Report, median};
use tensor_wasm_gpu::{Buffer, Grid, Kernel, Param, Params};
use tensor_wasm_jit::Program;

/// Something that is launched, with arguments in order: buffers by their number.
struct Case {
    name: &'static str,
    what: &'static str,
    goal: f64,
    grid: [u32; 3],
    block: [u32; 3],
    args: Vec<Value>,
    buffers: Vec<Vec<u8>>,
    /// The buffer that is written.
    out: usize,
    /// How far results may be apart, relative; nothing for bits that must be the same.
    tolerance: f32,
    batch: usize,
}

#[derive(Clone, Copy)]
enum Value {
    I32(i32),
    F32(f32),
    Buffer(usize),
}

use Value::{Buffer as B, F32, I32};

fn floats(rng: &mut StdRng, count: usize) -> Vec<u8> {
    (0..count).flat_map(|_| rng.random_range(-1.0_f32..1.0).to_le_bytes()).collect()
}

fn words(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn cases(rng: &mut StdRng) -> Vec<Case> {
    let many = 32 << 20;
    let case = |name, what, goal, grid, block, args, buffers, out| Case {
        name,
        what,
        goal,
        grid,
        block,
        args,
        buffers,
        out,
        tolerance: 0.0,
        batch: 5,
    };
    let n = 2048_usize;
    let squares = |rng: &mut StdRng| vec![floats(rng, n * n), floats(rng, n * n), vec![0xff; n * n * 4]];
    let side = (n as u32) / 16;
    // Sixteen numbers a row on average, anywhere.
    let rows = 1 << 20;
    let mut starts = vec![0_u32];
    for _ in 0..rows {
        starts.push(starts[starts.len() - 1] + rng.random_range(8..25));
    }
    let entries = starts[rows] as usize;
    let columns = words((0..entries).map(|_| rng.random_range(0..rows as u32)));
    let sparse = vec![words(starts), columns, floats(rng, entries), floats(rng, rows), vec![0xff; rows * 4]];
    // A table half full.
    let (slots, keys) = (1_usize << 22, 1_usize << 21);
    let mut table = vec![[0_u32; 2]; slots];
    let mut stored = Vec::new();
    for _ in 0..keys {
        let key: u32 = rng.random_range(1..u32::MAX);
        let mut at = key.wrapping_mul(2_654_435_761) as usize & (slots - 1);
        while table[at][0] != 0 && table[at][0] != key {
            at = (at + 1) & (slots - 1);
        }
        table[at] = [key, rng.random()];
        stored.push(key);
    }
    let lookups = 1 << 22;
    let asked = words(
        (0..lookups)
            .map(|n| if n % 2 == 0 { stored[rng.random_range(0..keys)] } else { rng.random_range(1..u32::MAX) }),
    );
    let hash = vec![asked, words(table.into_iter().flatten()), vec![0xff; lookups * 4]];
    let bodies = 65_536_usize;
    let nbody = Case {
        tolerance: 1e-3,
        batch: 1,
        ..case(
            "nbody",
            "65,536 bodies, all pairs, tiles in shared memory",
            1.25,
            [256, 1, 1],
            [256, 1, 1],
            vec![I32(bodies as i32), B(0), B(1)],
            vec![floats(rng, bodies * 4), vec![0xff; bodies * 16]],
            1,
        )
    };
    let (wide, high) = (8192, 4096);
    vec![
        case(
            "saxpy",
            "32 Mi elements",
            1.05,
            [many / 256, 1, 1],
            [256, 1, 1],
            vec![I32(many as i32), F32(1.5), B(0), B(1)],
            vec![floats(rng, many as usize), floats(rng, many as usize)],
            1,
        ),
        case(
            "stencil",
            "five points, 32 Mi elements",
            1.05,
            [wide / 32, high / 8, 1],
            [32, 8, 1],
            vec![I32(wide as i32), I32(high as i32), B(0), B(1)],
            vec![floats(rng, (wide * high) as usize), vec![0xff; (wide * high * 4) as usize]],
            1,
        ),
        case(
            "matmul_naive",
            "2048 by 2048, a loop",
            1.1,
            [side, side, 1],
            [16, 16, 1],
            vec![I32(n as i32), B(0), B(1), B(2)],
            squares(rng),
            2,
        ),
        case(
            "matmul_tiled",
            "2048 by 2048, tiles of 16 by 16 in shared memory",
            1.25,
            [side, side, 1],
            [16, 16, 1],
            vec![I32(n as i32), B(0), B(1), B(2)],
            squares(rng),
            2,
        ),
        nbody,
        case(
            "spmv",
            "a sparse matrix of 1 Mi rows times a vector",
            1.4,
            [rows as u32 / 256, 1, 1],
            [256, 1, 1],
            vec![I32(rows as i32), B(0), B(1), B(2), B(3), B(4)],
            sparse,
            4,
        ),
        case(
            "hash_probe",
            "4 Mi lookups in a table of 4 Mi slots, half full",
            1.4,
            [lookups as u32 / 256, 1, 1],
            [256, 1, 1],
            vec![I32(lookups as i32), I32(slots as i32 - 1), B(0), B(1), B(2)],
            hash,
            2,
        ),
    ]
}

/// The name of a case's kernel.
fn kernel_name(case: &str) -> &str {
    match case {
        "matmul_naive" => "matmul",
        "hash_probe" => "probe",
        other => other,
    }
}

fn upload(gpu: &Gpu, buffers: &[Vec<u8>]) -> Vec<Buffer> {
    let one = |bytes: &Vec<u8>| {
        let buffer = gpu.tenant.buffer(bytes.len() as u64).unwrap();
        gpu.tenant.write_blocking(buffer.handle(), 0, bytes).unwrap();
        buffer
    };
    buffers.iter().map(one).collect()
}

/// Microseconds from a module's bytes to PTX, for a kernel of a hundred instructions.
fn compile_us() -> f64 {
    let sum = "(local.set $x (f32.add (local.get $x) (f32.mul (f32.load (local.get $p)) (f32.load offset=4 (local.get $p)))))";
    let step = "(local.set $p (i32.add (local.get $p) (i32.const 8)))";
    let body = format!("{sum}{step}").repeat(8);
    let text = format!(
        r#"(module (memory 1) (func (export "k") (param $p i32) (param $out i32) (local $x f32)
            {body} (f32.store (local.get $out) (local.get $x))))"#
    );
    let wasm = wat::parse_str(text).unwrap();
    let once = |_| {
        let began = Instant::now();
        let image = Program::read(&wasm).and_then(|program| program.compile("k", &[true, true])).unwrap();
        assert!(!image.ptx.is_empty());
        began.elapsed().as_secs_f64() * 1e6
    };
    median((0..1000).map(once).collect())
}

fn main() {
    println!("a kernel of a hundred instructions is compiled in {:.0} µs", compile_us());
    let args: Vec<String> = std::env::args().collect();
    let [_, wasm, cuda, ..] = args.as_slice() else {
        println!("give the guest's kernels and the file of the ones by hand");
        return;
    };
    let Some(device) = device::open() else { return };
    let gpu = Gpu::new(&device, "bench");
    let wasm = std::fs::read(wasm).unwrap();
    let program = Program::read(&wasm).unwrap();
    let cubin = std::env::temp_dir().join("kernels.cubin");
    let nvcc = ["nvcc", "/usr/local/cuda/bin/nvcc"].into_iter().find(|nvcc| {
        let compile = Command::new(nvcc).args(["-O3", "-arch=sm_90", "-cubin", "-o"]).arg(&cubin).arg(cuda).status();
        compile.is_ok_and(|status| status.success())
    });
    assert!(nvcc.is_some(), "nvcc is needed for the other side");
    let by_hand = std::fs::read(&cubin).unwrap();
    let info = device.info();
    let driver = format!("{}.{}", info.driver_version / 1000, info.driver_version % 1000 / 10);
    let mut report = Report::new("h200/kernels").on(&format!("{}, CUDA {driver} driver", info.name));
    let what = "a module with a kernel of a hundred instructions, read and compiled to PTX";
    report.bound("kernels/compile", what, compile_us(), "µs", Goal::AtMost(200.0));
    let mut rng = StdRng::seed_from_u64(7);
    for case in cases(&mut rng) {
        let is_window: Vec<bool> = case.args.iter().map(|arg| matches!(arg, B(_))).collect();
        let image = program.compile(kernel_name(case.name), &is_window).unwrap();
        let ours = gpu.load(image.ptx.as_bytes(), &image.entry).unwrap();
        let theirs = gpu.load(&by_hand, kernel_name(case.name)).unwrap();
        let (mine, other) = (upload(&gpu, &case.buffers), upload(&gpu, &case.buffers));
        let run_ours = || {
            let mut start = 0x10_0000_u32;
            let mut windows = Vec::new();
            for buffer in &case.buffers {
                windows.push((start, buffer.len() as u32));
                start += (buffer.len() as u32 + 0x1_0000).next_multiple_of(0x1_0000);
            }
            let arg = |value: &Value| match value {
                I32(value) => Arg::Scalar(Param::I32(*value)),
                F32(value) => Arg::Scalar(Param::F32(*value)),
                B(n) => Arg::Window(&mine[*n], windows[*n].0, windows[*n].1),
            };
            gpu.launch(&ours, case.grid, case.block, &case.args.iter().map(arg).collect::<Vec<_>>())
        };
        let run_theirs = |kernel: &Kernel| {
            let param = |value: &Value| match value {
                I32(value) => Param::I32(*value),
                F32(value) => Param::F32(*value),
                B(n) => Param::from(&other[*n]),
            };
            let grid = Grid { blocks: case.grid, threads: case.block, shared_bytes: 0 };
            gpu.tenant.launch(kernel, grid, &Params::new(case.args.iter().map(param))).unwrap()
        };
        run_ours().wait().unwrap();
        assert_eq!(gpu.trap(&image), None, "{}", case.name);
        run_theirs(&theirs).wait().unwrap();
        compare(&gpu, &case, &mine[case.out], &other[case.out]);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..21 {
            let started = Instant::now();
            (1..case.batch).for_each(|_| drop(run_ours()));
            run_ours().wait().unwrap();
            a.push(started.elapsed().as_secs_f64() * 1e6 / case.batch as f64);
            let started = Instant::now();
            (1..case.batch).for_each(|_| drop(run_theirs(&theirs)));
            run_theirs(&theirs).wait().unwrap();
            b.push(started.elapsed().as_secs_f64() * 1e6 / case.batch as f64);
        }
        assert_eq!(gpu.trap(&image), None, "{}", case.name);
        report.ratio(
            &format!("kernels/{}", case.name),
            case.what,
            median(a),
            (median(b), "nvcc -O3"),
            "µs",
            Goal::AtMost(case.goal),
        );
    }
    report.save().unwrap();
}

fn compare(gpu: &Gpu, case: &Case, mine: &Buffer, other: &Buffer) {
    let len = case.buffers[case.out].len();
    let (mut a, mut b) = (vec![0; len], vec![0; len]);
    gpu.tenant.read_blocking(mine.handle(), 0, &mut a).unwrap();
    gpu.tenant.read_blocking(other.handle(), 0, &mut b).unwrap();
    if case.tolerance == 0.0 {
        let differs = a.chunks(4).zip(b.chunks(4)).filter(|(a, b)| a != b).count();
        assert_eq!(differs, 0, "{}: {differs} results differ", case.name);
        return;
    }
    let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    for (n, (a, b)) in a.chunks(4).zip(b.chunks(4)).enumerate() {
        let (a, b) = (float(a), float(b));
        assert!((a - b).abs() <= case.tolerance * b.abs().max(1.0), "{}: result {n}: {a} and {b}", case.name);
    }
}
