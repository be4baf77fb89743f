//! Instructions that only GPUs have: what the emulator makes of them, that a device's assembler takes them, and who is
//! refused.

use tensor_wasm_jit::build::{Axis, BinaryOp, BuildError, BuiltKernel, IdKind, KernelBuilder, UnaryOp, Value};
use tensor_wasm_jit::emulate::{DeviceMemory, Emulator};
use tensor_wasm_jit::{HalfType, KernelImage, MatrixElement, Target, Ty};

use super::{assemble, floats};

const WINDOWS_AT: u64 = 0x10_0000;
const WINDOW_BYTES: u64 = 0x1_0000;

/// Runs a group of one warp or more over windows with these bytes, and returns them.
fn run(image: &KernelImage, items: u32, windows: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, String> {
    assemble(image);
    let mut memory = DeviceMemory::default();
    let addresses: Vec<u64> = (0..windows.len() as u64).map(|n| WINDOWS_AT + n * WINDOW_BYTES).collect();
    addresses.iter().zip(windows).for_each(|(at, bytes)| memory.add(*at, bytes.clone()));
    let params: Vec<u8> = addresses.iter().flat_map(|address| address.to_le_bytes()).collect();
    Emulator::new(&image.ptx)?.run(&mut memory, &params, [1; 3], [items, 1, 1])?;
    Ok(addresses.iter().map(|at| memory.bytes(*at).to_vec()).collect())
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(4).map(|four| u32::from_le_bytes(four.try_into().unwrap())).collect()
}

fn singles(bytes: &[u8]) -> Vec<f32> {
    words(bytes).into_iter().map(f32::from_bits).collect()
}

/// Loads fragments that lie as registers do: eight words an item.
fn fragment<const N: usize>(b: &mut KernelBuilder, ty: Ty, from: Value) -> Result<[Value; N], BuildError> {
    let item = b.id(IdKind::Local, Axis::X)?;
    let at = b.element(from, item, 16)?;
    let mut values = [at; N];
    for (n, value) in (0..).zip(&mut values) {
        *value = b.load(ty, at, 4 * n)?;
    }
    Ok(values)
}

fn product(element: MatrixElement) -> Result<BuiltKernel, BuildError> {
    let mut b = KernelBuilder::on("product", Target::Ampere);
    let (left, right, sums, to) = (b.window()?, b.window()?, b.window()?, b.window()?);
    let (left, right) = (fragment::<4>(&mut b, Ty::I32, left)?, fragment::<2>(&mut b, Ty::I32, right)?);
    let sums = fragment::<4>(&mut b, Ty::F32, sums)?;
    let made = b.multiply_tiles(element, left, right, sums)?;
    let item = b.id(IdKind::Local, Axis::X)?;
    let at = b.element(to, item, 16)?;
    (0..).zip(made).try_for_each(|(n, value)| b.store(value, at, 4 * n))?;
    b.finish()
}

/// Where an element of an operand is among the warp's registers, as PTX documents it: item, register, part of it.
fn place(row: usize, step: usize, depth: usize, is_left: bool) -> (usize, usize, usize) {
    let per_register = depth / 8;
    let (upper, within) = (step / (depth / 2), step % (depth / 2));
    let item = (row % 8) * 4 + within / per_register;
    let register = if is_left { row / 8 + 2 * upper } else { upper };
    (item, register, within % per_register)
}

#[test]
fn a_warp_multiplies_tiles() {
    for element in [MatrixElement::F16, MatrixElement::BF16, MatrixElement::Tf32] {
        let depth = if element == MatrixElement::Tf32 { 8 } else { 16 };
        // Numbers that each of the types has.
        let number = |n: usize| ((n * 7 + 3) % 31) as f32 / 4.0 - 3.0;
        let bits = |x: f32| match element {
            MatrixElement::F16 => u32::from(half::f16::from_f32(x).to_bits()),
            MatrixElement::BF16 => u32::from(half::bf16::from_f32(x).to_bits()),
            MatrixElement::Tf32 => x.to_bits(),
        };
        let (mut left, mut right) = (vec![0_u32; 32 * 4], vec![0_u32; 32 * 4]);
        for row in 0..16 {
            for step in 0..depth {
                let (item, register, part) = place(row, step, depth, true);
                left[item * 4 + register] |= bits(number(row * depth + step)) << (16 * part);
                if row < 8 {
                    let (item, register, part) = place(row, step, depth, false);
                    right[item * 4 + register] |= bits(number(row * 3 + step * 5)) << (16 * part);
                }
            }
        }
        let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let sums = floats(5, 128);
        let start: Vec<u32> = sums.iter().map(|x| x.to_bits()).collect();
        let image = product(element).unwrap().compile_trusted().unwrap();
        assert_eq!(image.target, Target::Ampere);
        assert!(image.ptx.contains(".target sm_80"), "{}", image.ptx);
        let windows = [bytes(&left), bytes(&right), bytes(&start), vec![0; 512]];
        let made = singles(&run(&image, 32, &windows).unwrap()[3]);
        for row in 0..16 {
            for column in 0..8 {
                let at = ((row % 8) * 4 + column / 2) * 4 + row / 8 * 2 + column % 2;
                let steps = 0..depth;
                let exact: f64 = steps
                    .map(|step| f64::from(number(row * depth + step)) * f64::from(number(column * 3 + step * 5)))
                    .sum();
                let expected = f64::from(sums[at]) + exact;
                assert!((f64::from(made[at]) - expected).abs() <= 1e-4, "{element:?} {row} {column}");
            }
        }
    }
}

/// 32 rows of 16 bytes are copied to shared memory, of the last few only some bytes, and loaded as four tiles.
fn copied(is_transposed: bool, waits: bool) -> Result<BuiltKernel, BuildError> {
    let mut b = KernelBuilder::on("copied", Target::Ampere);
    let (from, to) = (b.window()?, b.window()?);
    let shared = b.shared(512)?;
    let item = b.id(IdKind::Local, Axis::X)?;
    let (from, row) = (b.element(from, item, 16)?, b.element(shared, item, 16)?);
    // Bytes of row n: 16, and of the last 30 - n or none.
    let (end, whole, none) = (b.i32(30)?, b.i32(16)?, b.i32(0)?);
    let left = b.binary(BinaryOp::I32Sub, end, item)?;
    let is_whole = b.binary(BinaryOp::I32GeS, left, whole)?;
    let is_any = b.binary(BinaryOp::I32GtS, left, none)?;
    let bytes = b.select(is_whole, whole, left)?;
    let bytes = b.select(is_any, bytes, none)?;
    b.copy_async((row, 0), (from, 0), bytes)?;
    b.commit_copies()?;
    if waits {
        b.await_copies(0)?;
    }
    b.barrier()?;
    let tiles = b.load_tiles(row, 0, is_transposed)?;
    let at = b.element(to, item, 16)?;
    (0..).zip(tiles).try_for_each(|(n, word)| b.store(word, at, 4 * n))?;
    assert!(matches!(b.await_copies(99), Err(BuildError::Limit { .. })));
    b.finish()
}

#[test]
fn copies_beside_a_kernel_are_there_once_they_were_waited_for() {
    // Element n of row r is 256 r + n.
    let halves: Vec<u16> = (0..32_u16).flat_map(|row| (0..8_u16).map(move |n| 256 * row + n)).collect();
    let bytes: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
    let mut expected = bytes.clone();
    for row in 0..32 {
        let kept = 30_usize.saturating_sub(row).min(16);
        expected[row * 16 + kept..row * 16 + 16].fill(0);
    }
    let half = |row: usize, column: usize| {
        let at = row * 16 + 2 * column;
        u32::from(u16::from_le_bytes([expected[at], expected[at + 1]]))
    };
    for is_transposed in [false, true] {
        let image = copied(is_transposed, true).unwrap().compile_trusted().unwrap();
        let made = words(&run(&image, 32, &[bytes.clone(), vec![0; 512]]).unwrap()[1]);
        for (item, four) in made.chunks(4).enumerate() {
            for (tile, word) in four.iter().enumerate() {
                let (group, pair) = (item / 4, 2 * (item % 4));
                let of = |n: usize| {
                    let (row, column) = if is_transposed { (pair + n, group) } else { (group, pair + n) };
                    half(8 * tile + row, column)
                };
                assert_eq!(*word, of(0) | of(1) << 16, "{is_transposed} {item} {tile}");
            }
        }
        // Who does not wait finds something else.
        let image = copied(is_transposed, false).unwrap().compile_trusted().unwrap();
        let made = run(&image, 32, &[bytes.clone(), vec![0; 512]]).unwrap();
        assert!(words(&made[1]).iter().all(|word| *word == u32::MAX));
    }
}

#[test]
fn halves_and_tf32_are_converted_and_powers_of_two_are_near() {
    let mut b = KernelBuilder::on("halves", Target::Ampere);
    let (from, to) = (b.window().unwrap(), b.window().unwrap());
    let item = b.id(IdKind::Global, Axis::X).unwrap();
    let (from, at) = (b.element(from, item, 8).unwrap(), b.element(to, item, 32).unwrap());
    let (low, high) = (b.load(Ty::F32, from, 0).unwrap(), b.load(Ty::F32, from, 4).unwrap());
    for (n, half) in [(0, HalfType::F16), (8, HalfType::BF16)] {
        let word = b.pack_halves(half, low, high).unwrap();
        for (part, is_high) in [(0, false), (4, true)] {
            let back = b.unpack_half(half, word, is_high).unwrap();
            b.store(back, at, n + part).unwrap();
        }
    }
    let rounded = b.round_tf32(low).unwrap();
    b.store(rounded, at, 16).unwrap();
    let power = b.exp2_approximate(low).unwrap();
    b.store(power, at, 20).unwrap();
    assert!(matches!(b.exp2_approximate(item), Err(BuildError::Type { .. })));
    let kernel = b.finish().unwrap();
    let mut numbers = floats(9, 60);
    numbers.extend([f32::NAN, f32::INFINITY, -0.0, 70_000.0]);
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let made = run(&kernel.compile_trusted().unwrap(), 32, &[bytes, vec![0; 32 * 32]]).unwrap();
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    for (pair, row) in numbers.chunks(2).zip(singles(&made[1]).chunks(8)) {
        for n in 0..2 {
            assert!(same(row[n], half::f16::from_f32(pair[n]).to_f32()), "{pair:?} {row:?}");
            assert!(same(row[2 + n], half::bf16::from_f32(pair[n]).to_f32()), "{pair:?} {row:?}");
        }
        assert!((row[4] - pair[0]).abs() <= pair[0].abs() / 2048.0 || !pair[0].is_finite(), "{pair:?} {row:?}");
        assert!((row[5] - pair[0].exp2()).abs() <= pair[0].exp2() * 3e-7 || !pair[0].is_finite(), "{pair:?} {row:?}");
    }
}

#[test]
fn what_only_a_gpu_has_is_refused_elsewhere() {
    let no_fence = |kernel: &BuiltKernel| kernel.compile().unwrap_err().to_string();
    let copied = copied(false, true).unwrap();
    assert!(no_fence(&copied).contains("no fence"), "{}", no_fence(&copied));
    assert!(copied.compile_host().unwrap_err().to_string().contains("only a GPU"));
    // A product of registers needs no fence, and still no CPU has it.
    let product = product(MatrixElement::BF16).unwrap();
    assemble(&product.compile().unwrap());
    assert!(product.compile_host().unwrap_err().to_string().contains("only a GPU"));
    // Copies go from a window to shared memory, and from nowhere else.
    let mut b = KernelBuilder::on("within", Target::Ampere);
    let window = b.window().unwrap();
    let bytes = b.i32(16).unwrap();
    let shared = b.shared(64).unwrap();
    b.copy_async((shared, 0), (shared, 16), bytes).unwrap();
    let zero = b.i32(0).unwrap();
    b.store(zero, window, 0).unwrap();
    assert!(b.finish().unwrap().compile_trusted().unwrap_err().to_string().contains("without a fence"));
}

#[test]
fn shared_memory_beyond_what_every_device_gives_is_asked_for_at_launch() {
    let mut b = KernelBuilder::new("large");
    let to = b.window().unwrap();
    assert!(matches!(b.shared(64 << 10), Err(BuildError::Limit { .. })));
    let shared = b.shared_on_gpu(64 << 10).unwrap();
    let item = b.id(IdKind::Local, Axis::X).unwrap();
    let number = b.unary(UnaryOp::F32ConvertI32U, item).unwrap();
    let (own, at) = (b.element(shared, item, 4).unwrap(), b.element(to, item, 4).unwrap());
    b.store(number, own, 65_000).unwrap();
    b.barrier().unwrap();
    let back = b.load(Ty::F32, own, 65_000).unwrap();
    b.store(back, at, 0).unwrap();
    let kernel = b.finish().unwrap();
    let image = kernel.compile_trusted().unwrap();
    assert_eq!((image.dynamic_shared_bytes, image.target), (64 << 10, Target::Turing));
    let made = singles(&run(&image, 32, &[vec![0; 128]]).unwrap()[0]);
    assert_eq!(made, (0..32_u8).map(f32::from).collect::<Vec<f32>>());
    assert!(kernel.compile_host().is_err() && kernel.compile().is_err());
    assert!(matches!(KernelBuilder::new("more").shared_on_gpu(228 << 10), Err(BuildError::Limit { .. })));
}
