//! Products on tensor cores as kernels, run by the emulator and assembled for devices: what tensors alone do not reach,
//! tf32 without asking all threads for it and warpgroups without a Hopper.

use std::process::Command;

use tensor_wasm_jit::emulate::{DeviceMemory, Emulator};
use tensor_wasm_jit::{KernelImage, MatrixElement, Target};

use super::super::map::{Argument, LoweredStep, Program};
use super::{Units, build, nothing_after, small, with_product};
use crate::cpu::math::Float;
use crate::cuda::{attention, special};
use crate::dtype::DType;
use crate::graph::op::{ATTENTION_ROWS, AttentionInput, BinaryOp, Op, UnaryOp, packed_values_start};
use crate::schedule::plan::{BufferView, Level, MapKernel, MapValue, Source, SpecialKernel, ValueKind};
use crate::shape::{Layout, Shape};

/// Where buffers are, each far from the next.
const BUFFERS_AT: u64 = 1 << 32;

pub(in crate::cuda) fn image(program: &Program) -> KernelImage {
    match program {
        Program::Built(built) => built.compile_trusted().unwrap(),
        Program::Product(_) => panic!("no library is asked"),
    }
}

/// Assembles a kernel, where there is an assembler, and says what it makes of it.
pub(in crate::cuda) fn assemble(image: &KernelImage, name: &str, may_spill: bool) {
    let installed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/ptxas/ptxas");
    let is_there = |ptxas: &&str| Command::new(ptxas).arg("--version").output().is_ok_and(|out| out.status.success());
    let Some(ptxas) = [installed, "ptxas"].into_iter().find(is_there) else {
        return println!("skipped: no ptxas; `cargo xtask ptxas` installs it");
    };
    let folder = std::env::temp_dir().join("tensor-wasm-cores");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join(format!("{name}.ptx"));
    std::fs::write(&file, &image.ptx).unwrap();
    let devices = if image.target == Target::Hopper { vec!["sm_90a"] } else { vec!["sm_80", "sm_90"] };
    for device in devices {
        let output = Command::new(ptxas)
            .args(["-v", "-arch", device, "-o"])
            .arg(file.with_extension(device))
            .arg(&file)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        println!("{name} {device}: {said}");
        assert!(output.status.success(), "{name} for {device}: {said}");
        let is_kept = said.contains("0 bytes spill stores, 0 bytes spill loads");
        assert!(is_kept || may_spill, "{name} for {device}: {said}");
        assert!(!said.contains("serialized"), "{name} for {device}: {said}");
    }
}

/// Runs a step's kernels over leaves, and returns what is in slot 0.
fn run(step: &LoweredStep, leaves: &[Vec<u8>], out_bytes: usize) -> Vec<u8> {
    let mut memory = DeviceMemory::default();
    let address = |argument: &Argument| {
        let number = match argument {
            Argument::Buffer(Source::Leaf(leaf)) => *leaf as u64,
            Argument::Buffer(Source::Slot(slot)) => 10 + *slot as u64,
            Argument::Scratch(scratch) => 20 + *scratch as u64,
            Argument::Parameters(_) => 30,
            Argument::Flags => 31,
            Argument::Part(..) | Argument::Workspace => panic!("only a library takes that"),
        };
        BUFFERS_AT * (1 + number)
    };
    for (n, leaf) in leaves.iter().enumerate() {
        memory.add(address(&Argument::Buffer(Source::Leaf(n))), leaf.clone());
    }
    let out = address(&Argument::Buffer(Source::Slot(0)));
    memory.add(out, vec![0xff; out_bytes]);
    memory.add(address(&Argument::Parameters(0)), GELU.iter().flat_map(|own| parameter(*own)).collect());
    for (n, bytes) in step.scratch_bytes.iter().enumerate() {
        memory.add(address(&Argument::Scratch(n)), vec![0xff; usize::try_from(*bytes).unwrap()]);
    }
    for kernel in &step.kernels {
        let emulator = Emulator::new(&image(&kernel.program).ptx).unwrap();
        let params: Vec<u8> = kernel.arguments.iter().flat_map(|own| address(own).to_le_bytes()).collect();
        emulator.run(&mut memory, &params, [kernel.groups, 1, 1], [kernel.items, 1, 1]).unwrap();
    }
    memory.bytes(out).to_vec()
}

/// What runs give to the kernel of `with_bias_and_gelu`.
const GELU: [f32; 3] = [0.5, std::f32::consts::FRAC_1_SQRT_2, 1.0];

/// A product of which a bias, leaf 2, and `x * 0.5 * (erf(x / √2) + 1)` are made, by warpgroups.
fn with_bias_and_gelu(sizes: (usize, usize, usize), dtype: DType) -> LoweredStep {
    let (element, product_slot) = (if dtype == DType::F16 { MatrixElement::F16 } else { MatrixElement::BF16 }, 5);
    let kernel = SpecialKernel { slot: product_slot, ..of_matrices(sizes, dtype, [false, false]) };
    let bias = Layout::contiguous(Shape::new(&[1, sizes.1]).unwrap()).expand(kernel.shape);
    let product = Layout::contiguous(kernel.shape);
    let values = [
        ValueKind::Load(0),
        ValueKind::Load(1),
        ValueKind::Fill(0),
        ValueKind::Fill(1),
        ValueKind::Fill(2),
        ValueKind::Binary(BinaryOp::Add, 0, 1),
        ValueKind::Binary(BinaryOp::Mul, 5, 2),
        ValueKind::Binary(BinaryOp::Mul, 5, 3),
        ValueKind::Unary(UnaryOp::Erf, 7),
        ValueKind::Binary(BinaryOp::Add, 8, 4),
        ValueKind::Binary(BinaryOp::Mul, 6, 9),
    ];
    let after = MapKernel {
        loads: vec![
            BufferView { source: Source::Slot(product_slot), layout: product, dtype },
            BufferView { source: Source::Leaf(2), layout: bias, dtype },
        ],
        values: values.into_iter().map(|kind| MapValue { kind, dtype, level: Level::Full }).collect(),
        stores: vec![(10, 0)],
        in_place: vec![None],
        ..nothing_after(&kernel)
    };
    let inputs = [&kernel.inputs[0], &kernel.inputs[1]];
    build(Units::TensorCores(element), &kernel, &inputs, &after, Target::Hopper).unwrap()
}

/// A parameter's place has eight bytes.
fn parameter(own: f32) -> [u8; 8] {
    let [a, b, c, d] = own.to_le_bytes();
    [a, b, c, d, 0, 0, 0, 0]
}

/// Small numbers that every type has.
fn number(seed: usize, n: usize) -> f32 {
    ((((n + seed) * 2_654_435_761) >> 7) % 17) as f32 / 8.0 - 1.0
}

fn bytes_of(dtype: DType, x: f32) -> Vec<u8> {
    match dtype {
        DType::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    }
}

fn number_of(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        DType::BF16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        _ => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
    }
}

/// A matrix that is there, or is the transposition of what is.
fn operand(leaf: usize, (rows, columns): (usize, usize), dtype: DType, is_turned: bool) -> BufferView {
    let shape = |a, b| Shape::new(&[a, b]).unwrap();
    let layout = if is_turned {
        Layout::contiguous(shape(columns, rows)).permute(&[1, 0])
    } else {
        Layout::contiguous(shape(rows, columns))
    };
    BufferView { source: Source::Leaf(leaf), layout, dtype }
}

/// A product without anything that follows it, for a device.
fn product(
    units: Units,
    (m, n, k): (usize, usize, usize),
    is_turned: [bool; 2],
    target: Target,
) -> (LoweredStep, DType) {
    let dtype = match units {
        Units::TensorCores(MatrixElement::F16) => DType::F16,
        Units::TensorCores(MatrixElement::BF16) => DType::BF16,
        Units::TensorCores(MatrixElement::Tf32) | Units::Single => DType::F32,
    };
    let kernel = of_matrices((m, n, k), dtype, is_turned);
    let after = with_product(&kernel, &nothing_after(&kernel), true);
    let step = build(units, &kernel, &[&kernel.inputs[0], &kernel.inputs[1]], &after, target).unwrap();
    (step, dtype)
}

fn of_matrices((m, n, k): (usize, usize, usize), dtype: DType, is_turned: [bool; 2]) -> SpecialKernel {
    let inputs = vec![operand(0, (m, k), dtype, is_turned[0]), operand(1, (k, n), dtype, is_turned[1])];
    let shape = Shape::new(&[m, n]).unwrap();
    SpecialKernel { op: Op::Matmul, inputs, shape, dtype, slot: 0, node: 0, epilogue: None }
}

/// The same in tiles for small ones.
fn small_product(sizes: (usize, usize, usize), is_turned: [bool; 2]) -> LoweredStep {
    let kernel = of_matrices(sizes, DType::F32, is_turned);
    let after = with_product(&kernel, &nothing_after(&kernel), true);
    small::lower(&kernel, &after, Target::Turing).unwrap()
}

fn check(units: Units, sizes: (usize, usize, usize), is_turned: [bool; 2], target: Target) {
    let (step, dtype) = product(units, sizes, is_turned, target);
    check_step(&step, dtype, sizes, is_turned, &format!("{units:?} {target:?}"));
}

/// Compares what a step makes with sums of numbers.
fn check_step(step: &LoweredStep, dtype: DType, sizes: (usize, usize, usize), is_turned: [bool; 2], what: &str) {
    let (m, n, k) = sizes;
    let leaf = |seed: usize, count: usize| (0..count).flat_map(|at| bytes_of(dtype, number(seed, at))).collect();
    let size = dtype.size();
    let made = run(step, &[leaf(1, m * k), leaf(5, k * n)], m * n * size);
    let at = |is_turned: bool, rows: usize, columns: usize, row: usize, column: usize| {
        if is_turned { column * rows + row } else { row * columns + column }
    };
    for row in 0..m {
        for column in 0..n {
            let sum: f64 = (0..k)
                .map(|step| {
                    let left = number(1, at(is_turned[0], m, k, row, step));
                    let right = number(5, at(is_turned[1], k, n, step, column));
                    f64::from(left) * f64::from(right)
                })
                .sum();
            let from = (row * n + column) * size;
            let found = number_of(dtype, &made[from..from + size]);
            let near = if size == 2 { 8e-3 * sum.abs() + 1e-2 } else { 1e-4 };
            assert!((found - sum).abs() <= near, "{what} {sizes:?} {is_turned:?} at {row} {column}: {found} {sum}");
        }
    }
}

const LIES: [[bool; 2]; 4] = [[false, false], [false, true], [true, false], [true, true]];

#[test]
fn products_by_warps_are_those_of_numbers() {
    for is_turned in LIES {
        check(Units::TensorCores(MatrixElement::BF16), (136, 144, 200), is_turned, Target::Ampere);
        check(Units::TensorCores(MatrixElement::F16), (40, 24, 32), is_turned, Target::Ampere);
        check(Units::TensorCores(MatrixElement::Tf32), (132, 36, 52), is_turned, Target::Ampere);
        // In smaller tiles, of which there are few.
        check(Units::TensorCores(MatrixElement::BF16), (72, 136, 136), is_turned, Target::Ampere);
    }
    // Lines that no chunk begins at are copied first.
    check(Units::TensorCores(MatrixElement::BF16), (33, 45, 71), [false, false], Target::Ampere);
    check(Units::TensorCores(MatrixElement::BF16), (33, 45, 71), [true, true], Target::Ampere);
    check(Units::TensorCores(MatrixElement::Tf32), (9, 7, 35), [false, true], Target::Ampere);
}

#[test]
fn products_in_single_precision_are_those_of_numbers() {
    for is_turned in LIES {
        check(Units::Single, (132, 140, 36), is_turned, Target::Turing);
    }
    check(Units::Single, (128, 128, 48), [false, false], Target::Turing);
    check(Units::Single, (33, 45, 7), [false, false], Target::Turing);
    check(Units::Single, (33, 45, 7), [true, true], Target::Turing);
}

/// Tiles of few rows and of many, with every remainder of rows, columns and depth.
#[test]
fn small_products_are_those_of_numbers() {
    let sizes = [
        (1, 1, 1),
        (1, 40, 300),
        (3, 33, 7),
        (5, 31, 4),
        (4, 32, 256),
        (64, 10, 128),
        (10, 20, 640),
        (63, 65, 66),
        (16, 4300, 8),
        (19, 4321, 5),
    ];
    for sizes in sizes {
        for is_turned in LIES {
            let step = small_product(sizes, is_turned);
            check_step(&step, DType::F32, sizes, is_turned, "small");
        }
    }
}

/// What follows a product, on every element of cut tiles, and where few columns leave smaller chunks.
#[test]
fn what_follows_a_product_is_computed_on_its_elements() {
    for (dtype, sizes) in [(DType::BF16, (136, 264, 40)), (DType::F16, (130, 520, 72)), (DType::BF16, (66, 258, 24))] {
        let (m, n, k) = sizes;
        let step = with_bias_and_gelu(sizes, dtype);
        let leaf = |seed: usize, count: usize| (0..count).flat_map(|at| bytes_of(dtype, number(seed, at))).collect();
        let made = run(&step, &[leaf(1, m * k), leaf(5, k * n), leaf(9, n)], m * n * 2);
        for at in 0..m * n {
            let (row, column) = (at / n, at % n);
            let product: f64 =
                (0..k).map(|step| f64::from(number(1, row * k + step)) * f64::from(number(5, step * n + column))).sum();
            let x = product + f64::from(number(9, column));
            let expected = x * 0.5 * (1.0 + Float::erf(x * std::f64::consts::FRAC_1_SQRT_2));
            let found = number_of(dtype, &made[2 * at..2 * at + 2]);
            let near = 4e-3 * expected.abs() + 1e-4;
            assert!((found - expected).abs() <= near, "{dtype} {sizes:?} at {row} {column}: {found} {expected}");
        }
    }
}

/// Every element of two by two tiles, each but the first cut, with more tiles of the depth than are under way.
#[test]
fn products_by_warpgroups_are_those_of_numbers() {
    for is_turned in LIES {
        check(Units::TensorCores(MatrixElement::BF16), (136, 264, 328), is_turned, Target::Hopper);
    }
    check(Units::TensorCores(MatrixElement::F16), (130, 260, 16), [false, true], Target::Hopper);
    // A right operand that lies along columns is turned round first.
    check(Units::TensorCores(MatrixElement::Tf32), (132, 40, 100), [false, true], Target::Hopper);
    check(Units::TensorCores(MatrixElement::Tf32), (132, 40, 100), [true, false], Target::Hopper);
    check(Units::TensorCores(MatrixElement::BF16), (127, 33, 65), [false, false], Target::Hopper);
}

fn attended((queries, keys, width): (usize, usize, usize), dtype: DType, is_causal: bool) -> LoweredStep {
    let inputs = [(0, queries), (1, keys), (2, keys)];
    let inputs = inputs.map(|(leaf, rows)| operand(leaf, (rows, width), dtype, false)).to_vec();
    let shape = Shape::new(&[queries, width]).unwrap();
    let op = Op::Attention { is_causal };
    let kernel = SpecialKernel { op, inputs, shape, dtype, slot: 0, node: 0, epilogue: None };
    attention::lower(&kernel, is_causal).unwrap()
}

/// The kernels of attention's gradients, of one width.
fn attention_back((queries, keys, width): (usize, usize, usize), dtype: DType, is_causal: bool) -> Vec<LoweredStep> {
    let shape = |sizes: &[usize]| Shape::new(sizes).unwrap();
    let of = |leaf: usize, rows: usize| operand(leaf, (rows, width), dtype, false);
    let layout = Layout::contiguous(shape(&[ATTENTION_ROWS, queries]));
    let rows = BufferView { source: Source::Leaf(4), layout, dtype: DType::F32 };
    let kernel = |op: Op, inputs: Vec<BufferView>, shape: Shape, dtype: DType| {
        let kernel = SpecialKernel { op, inputs, shape, dtype, slot: 0, node: 0, epilogue: None };
        special::lower(&kernel).unwrap()
    };
    let operands = [of(0, queries), of(1, keys), of(2, keys), of(3, queries)];
    let [query, key, _, gradient] = operands;
    let all = [&operands[..], &[rows]].concat();
    let back =
        |of: AttentionInput, shape: Shape| kernel(Op::AttentionGradient { is_causal, of }, all.clone(), shape, dtype);
    vec![
        kernel(Op::AttentionRows { is_causal }, vec![query, key, gradient, gradient], layout.shape, DType::F32),
        back(AttentionInput::Queries, shape(&[queries, width])),
        back(AttentionInput::KeysAndValues, shape(&[packed_values_start(keys * width) + keys * width])),
    ]
}

/// Registers suffice, and the products of a warpgroup do not wait for each other.
#[test]
fn kernels_on_tensor_cores_are_assembled_without_spills() {
    let large = (4096, 4096, 4096);
    for (n, is_turned) in LIES.into_iter().enumerate() {
        for (name, element) in [("bf16", MatrixElement::BF16), ("f16", MatrixElement::F16)] {
            for (by, target) in [("warps", Target::Ampere), ("warpgroups", Target::Hopper)] {
                let (step, _) = product(Units::TensorCores(element), large, is_turned, target);
                assert_eq!(step.kernels.len(), 1, "no operand is copied");
                assemble(&image(&step.kernels[0].program), &format!("product_{by}_{name}_{n}"), false);
            }
        }
    }
    let step = with_bias_and_gelu(large, DType::BF16);
    assemble(&image(&step.kernels[0].program), "product_gelu", false);
    let (step, _) = product(Units::TensorCores(MatrixElement::Tf32), large, [false, true], Target::Ampere);
    assemble(&image(&step.kernels[0].program), "product_warps_tf32", false);
    let (step, _) = product(Units::TensorCores(MatrixElement::Tf32), large, [false, true], Target::Hopper);
    assemble(&image(&step.kernels[0].program), "product_warpgroups_tf32", false);
    let (step, _) =
        product(Units::TensorCores(MatrixElement::BF16), (4001, 4003, 4005), [false, false], Target::Hopper);
    assert_eq!(step.kernels.len(), 3, "both operands are copied");
    assemble(&image(&step.kernels[2].program), "product_warpgroups_odd", false);
    for (n, is_turned) in LIES.into_iter().enumerate() {
        let (step, _) = product(Units::Single, large, is_turned, Target::Hopper);
        assemble(&image(&step.kernels[0].program), &format!("product_single_{n}"), false);
    }
    for (n, is_turned) in LIES.into_iter().enumerate() {
        for sizes in [(256, 256, 256), (64, 128, 784), (784, 128, 64), (1, 512, 2048), (63, 1001, 65)] {
            let (m, columns, k) = sizes;
            let step = small_product(sizes, is_turned);
            assert_eq!(step.kernels.len(), 1, "no operand is copied");
            assemble(&image(&step.kernels[0].program), &format!("product_small_{m}_{columns}_{k}_{n}"), false);
        }
    }
    // Together as wide as one kernel has registers for, and wider.
    for dtype in [DType::F32, DType::BF16] {
        for (width, is_causal, len) in [(16, true, 4001), (64, true, 4001), (101, false, 4001), (128, false, 4096)]
            .into_iter()
            .chain([(128, true, 4001), (160, false, 4096), (160, true, 4001), (256, true, 4001)])
        {
            let steps = attention_back((len, len, width), dtype, is_causal);
            let kernels = steps.iter().flat_map(|step| &step.kernels).enumerate();
            for (n, kernel) in kernels {
                assemble(&image(&kernel.program), &format!("attention_back_{n}_{width}_{len}_{dtype}"), false);
            }
        }
    }
    // Tiles that are cut in every way.
    let (step, name) = (attended((4001, 4003, 101), DType::F32, true), "attention_single_odd");
    assemble(&image(&step.kernels[0].program), name, false);
    for width in [16, 64, 80, 128, 256] {
        for is_causal in [false, true] {
            let sizes = (4096, 4096, width);
            let (step, name) = (attended(sizes, DType::BF16, is_causal), format!("attention_{width}_{is_causal}"));
            // The widest has 192 registers of queries and results alone: about twenty words spill.
            assemble(&image(&step.kernels[0].program), &name, width == 256);
            let (step, name) =
                (attended(sizes, DType::F32, is_causal), format!("attention_single_{width}_{is_causal}"));
            assemble(&image(&step.kernels[0].program), &name, false);
        }
    }
}
