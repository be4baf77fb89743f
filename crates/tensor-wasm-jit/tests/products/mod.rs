//! Products of matrices by subgroups, in the emulator and on the CPU, against a model that is written down here: what
//! the items bring, as PTX lays out the fragments of `mma.m16n8k16`, with zeros for those that are not there. In which
//! control flow items come to them is tested with the other functions of subgroups (`subgroups`).

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tensor_wasm_jit::{Program, SUBGROUP, Target};

use super::device::{self, Gpu};
use super::subgroups::{SHAPES, items, module, parting};
use super::{Arg, Launched, assemble, compare_with_host, emulate, launch};

const LANES: usize = SUBGROUP as usize;

/// What an item brings: four words of the left operand, two of the right one, four sums.
#[derive(Debug, Clone, Copy)]
struct Fragment {
    words: [u32; 6],
    sums: [f32; 4],
}

fn number(half: &str, bits: u16) -> f32 {
    if half == "f16" { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() }
}

/// For each sum of a lane, the sixteen pairs that are multiplied for it, in their order.
fn pairs(half: &str, items: &[Option<Fragment>], lane: usize, sum: usize) -> Vec<(f32, f32)> {
    let (row, column) = (lane / 4 + 8 * (sum / 2), 2 * (lane % 4) + sum % 2);
    let of = |lane: usize, word: usize, part: usize| {
        let item = items.get(lane).copied().flatten();
        item.map_or(0.0, |item| number(half, (item.words[word] >> (16 * part)) as u16))
    };
    let pair = |step: usize| {
        let (upper, part, among) = (step / 8, step % 2, step % 8 / 2);
        let left = of(row % 8 * 4 + among, row / 8 + 2 * upper, part);
        (left, of(column * 4 + among, 4 + upper, part))
    };
    (0..16).map(pair).collect()
}

/// What a CPU computes, and a GPU where not all lanes are there.
fn multiplied(half: &str, items: &[Option<Fragment>]) -> Vec<Option<[f32; 4]>> {
    let sum = |lane: usize, n: usize, start: f32| {
        pairs(half, items, lane, n).into_iter().fold(start, |sum, (a, b)| a.mul_add(b, sum))
    };
    let of =
        |(lane, item): (usize, &Option<Fragment>)| item.map(|item| [0, 1, 2, 3].map(|n| sum(lane, n, item.sums[n])));
    items.iter().enumerate().map(of).collect()
}

/// A function that multiplies what it makes of a number, of which all sums are exact, and makes one number of them.
pub(super) fn multiplying(half: &str) -> String {
    let (one, shift) = if half == "f16" { (0x3c00_3c00, 8) } else { (0x3f80_3f80, 5) };
    let word = |n: u32| {
        format!(
            "(i32.or (i32.const {one}) (i32.shl (i32.and (i32.shr_u (local.get $x) (i32.const {n}))
               (i32.const 0x00030003)) (i32.const {shift})))"
        )
    };
    let start =
        |n: u32| format!("(f32.convert_i32_u (i32.and (i32.shr_u (local.get $x) (i32.const {n})) (i32.const 255)))");
    let part = |n: u32| format!("(f32.mul (call $mma_sum (i32.const {n})) (f32.const {}))", 16 * (2 * n + 1));
    format!(
        r#"(func $multiply_{half} (param $x i32) (result i32)
             (call $mma_{half}_f32 {} {})
             (i32.trunc_sat_f32_s (f32.add (f32.add {} {}) (f32.add {} {}))))"#,
        (0..6).map(word).collect::<String>(),
        (0..4).map(start).collect::<String>(),
        part(0),
        part(1),
        part(2),
        part(3)
    )
}

/// The same by the model.
pub(super) fn of_numbers(half: &str, numbers: &[Option<u32>]) -> Vec<u64> {
    let (one, shift) = if half == "f16" { (0x3c00_3c00, 8) } else { (0x3f80_3f80, 5) };
    let fragment = |x: u32| Fragment {
        words: [0, 1, 2, 3, 4, 5].map(|n| one | (x >> n & 0x0003_0003) << shift),
        sums: [0, 1, 2, 3].map(|n| (x >> n & 255) as f32),
    };
    let items: Vec<Option<Fragment>> = numbers.iter().map(|x| x.map(fragment)).collect();
    let one_of = |sums: [f32; 4]| {
        let total: f32 = (0_u8..).zip(sums).map(|(n, sum)| sum * 16.0 * f32::from(2 * n + 1)).sum();
        u64::from((total as i32).cast_unsigned())
    };
    multiplied(half, &items).into_iter().map(|sums| sums.map_or(0, one_of)).collect()
}

/// Loads a fragment, ten words each, multiplies, and stores four sums.
fn kernel(half: &str) -> Vec<u8> {
    let words: String = (0..6).map(|n| format!("(i32.load offset={} (local.get $at))", 4 * n)).collect();
    let sums: String = (6..10).map(|n| format!("(f32.load offset={} (local.get $at))", 4 * n)).collect();
    let stores: String = (0..4)
        .map(|n| format!("(f32.store offset={} (local.get $to) (call $mma_sum (i32.const {n})))", 4 * n))
        .collect();
    module(&format!(
        r#"(func (export "k") (param $in i32) (param $out i32) (local $at i32) (local $to i32)
             (local.set $at (i32.add (local.get $in) (i32.mul (call $number) (i32.const 40))))
             (local.set $to (i32.add (local.get $out) (i32.mul (call $number) (i32.const 16))))
             (call $mma_{half}_f32 {words} {sums})
             {stores})"#
    ))
}

fn buffers(items: &[Fragment]) -> [Arg; 2] {
    let words = |item: &Fragment| item.words.into_iter().chain(item.sums.map(f32::to_bits)).collect::<Vec<u32>>();
    let bytes = items.iter().flat_map(words).flat_map(u32::to_le_bytes).collect();
    [Arg::Buffer(bytes), Arg::Buffer(vec![0; 16 * items.len()])]
}

fn read(bytes: &[u8]) -> Vec<[f32; 4]> {
    let four = |four: &[u8]| [0, 4, 8, 12].map(|at| f32::from_le_bytes(four[at..at + 4].try_into().unwrap()));
    bytes.chunks(16).map(four).collect()
}

/// What a group of items gets, subgroup by subgroup, with the one NaN there is.
fn expected(half: &str, group: &[Fragment]) -> Vec<[f32; 4]> {
    let canonical = |x: f32| if x.is_nan() { f32::from_bits(0x7fc0_0000) } else { x };
    let subgroup = |items: &[Fragment]| {
        let items: Vec<Option<Fragment>> = items.iter().copied().map(Some).collect();
        multiplied(half, &items).into_iter().flatten().map(|sums| sums.map(canonical)).collect::<Vec<_>>()
    };
    group.chunks(LANES).flat_map(subgroup).collect()
}

fn bits(sums: &[[f32; 4]]) -> Vec<u32> {
    sums.iter().flatten().map(|x| x.to_bits()).collect()
}

/// A fragment of which every number is made by a function.
fn fragment(half: &str, mut number: impl FnMut() -> f32) -> Fragment {
    let bits = |x: f32| if half == "f16" { f16::from_f32(x).to_bits() } else { bf16::from_f32(x).to_bits() };
    let mut word = || u32::from(bits(number())) | u32::from(bits(number())) << 16;
    let words = [0; 6].map(|_| word());
    Fragment { words, sums: [0; 4].map(|_| number()) }
}

/// A group's fragments of small whole numbers, so that every sum is exact in every order.
fn exact(half: &str, shape: [u32; 3], rng: &mut StdRng) -> Vec<Fragment> {
    (0..items(shape)).map(|_| fragment(half, || rng.random_range(-15_i16..16).into())).collect()
}

/// Two subgroups whose numbers are of very different sizes.
fn of_many_sizes(half: &str, rng: &mut StdRng) -> Vec<Fragment> {
    let size = [0.001_f32, 1.0, 100.0][rng.random_range(0..3)];
    let mut any = || rng.random_range(-size..size) * [1.0, 0.01][rng.random_range(0..2)];
    (0..2 * LANES).map(|_| fragment(half, &mut any)).collect()
}

/// Whether sums are as near to the truth as docs/KERNELS.md says: 2⁻¹⁸ of what they are made of, without signs.
fn check_near(half: &str, group: &[Fragment], found: &[[f32; 4]]) {
    for (n, found) in found.iter().enumerate() {
        let subgroup: Vec<Option<Fragment>> = group[n / LANES * LANES..][..LANES].iter().copied().map(Some).collect();
        for (sum, found) in found.iter().enumerate() {
            let products = pairs(half, &subgroup, n % LANES, sum);
            let products = products.iter().map(|(a, b)| f64::from(*a) * f64::from(*b));
            let start = f64::from(group[n].sums[sum]);
            let (truth, sizes) =
                (start + products.clone().sum::<f64>(), start.abs() + products.map(f64::abs).sum::<f64>());
            let error = (f64::from(*found) - truth).abs();
            assert!(error <= sizes / f64::from(1 << 18), "{half}: {found} and {truth}");
        }
    }
}

/// Runs a kernel on a GPU as the emulator does.
fn on_gpu(gpu: &Gpu, wasm: &[u8], shape: [u32; 3], args: &[Arg]) -> Vec<Vec<u8>> {
    let windows = vec![true; args.len()];
    let image = Program::read(wasm).unwrap().compile("k", &windows).unwrap();
    let kernel = gpu.load(image.ptx.as_bytes(), &image.entry).unwrap();
    let given = args.iter().filter_map(|arg| if let Arg::Buffer(bytes) = arg { Some(bytes) } else { None });
    let uploaded: Vec<_> = given
        .map(|bytes| {
            let buffer = gpu.tenant.buffer(bytes.len() as u64).unwrap();
            gpu.tenant.write_blocking(buffer.handle(), 0, bytes).unwrap();
            (buffer, bytes.len())
        })
        .collect();
    let starts = (0x10_0000..).step_by(0x10_0000);
    let given: Vec<device::Arg<'_>> = uploaded
        .iter()
        .zip(starts)
        .map(|((buffer, len), start)| device::Arg::Window(buffer, start, *len as u32))
        .collect();
    gpu.launch(&kernel, [2, 1, 1], shape, &given).wait().unwrap();
    assert_eq!(gpu.trap(&image), None);
    let download = |(buffer, len): &(tensor_wasm_gpu::Buffer, usize)| {
        let mut bytes = vec![0; *len];
        gpu.tenant.read_blocking(buffer.handle(), 0, &mut bytes).unwrap();
        bytes
    };
    uploaded.iter().map(download).collect()
}

/// On a GPU, where there is one: the same bits where sums are exact or not all lanes are there, as near as promised
/// where they are, and in control flow in which items part.
#[test]
fn a_gpu_multiplies_as_the_model_does() {
    let Some(opened) = device::open() else { return };
    let gpu = Gpu::new(&opened, "products");
    let mut rng = StdRng::seed_from_u64(14);
    for half in ["f16", "bf16"] {
        let wasm = kernel(half);
        for shape in SHAPES {
            let group = exact(half, shape, &mut rng);
            let found = on_gpu(&gpu, &wasm, shape, &buffers(&group));
            assert_eq!(read(&found[1]), expected(half, &group), "{half} in {shape:?}");
        }
        for _ in 0..200 {
            let group = of_many_sizes(half, &mut rng);
            let found = on_gpu(&gpu, &wasm, [32, 2, 1], &buffers(&group));
            check_near(half, &group, &read(&found[1]));
            let few = &group[..31];
            let found = on_gpu(&gpu, &wasm, [31, 1, 1], &buffers(few));
            assert_eq!(bits(&read(&found[1])), bits(&expected(half, few)), "{half}");
        }
        let nan = Fragment { words: [0x7fc1_7fc1; 6], sums: [f32::INFINITY; 4] };
        let found = on_gpu(&gpu, &wasm, [32, 1, 1], &buffers(&[nan; LANES]));
        assert!(bits(&read(&found[1])).iter().all(|bits| *bits == 0x7fc0_0000));
    }
    for (wasm, shape, expected) in parting(200) {
        let found = on_gpu(&gpu, &wasm, shape, &[Arg::Buffer(vec![0; 4 * items(shape)])]);
        let found: Vec<u32> = found[0].chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(found, expected, "{shape:?}");
    }
}

#[test]
fn a_subgroup_multiplies_matrices_whoever_is_there() {
    let mut rng = StdRng::seed_from_u64(11);
    for half in ["f16", "bf16"] {
        let wasm = kernel(half);
        for shape in SHAPES {
            let group = exact(half, shape, &mut rng);
            let done = launch(&wasm, "k", [2, 1, 1], shape, &buffers(&group));
            assert_eq!(done.trap, None);
            assert_eq!(read(&done.buffers[1]), expected(half, &group), "{half} in {shape:?}");
        }
    }
}

#[test]
fn sums_are_as_near_to_the_truth_as_is_promised_and_a_cpus_to_the_bit() {
    let mut rng = StdRng::seed_from_u64(12);
    for half in ["f16", "bf16"] {
        let wasm = kernel(half);
        let program = Program::read(&wasm).unwrap();
        let (image, host) = (program.compile("k", &[true; 2]).unwrap(), program.compile_host("k", &[true; 2]).unwrap());
        assemble(&image);
        for _ in 0..20 {
            let group = of_many_sizes(half, &mut rng);
            let (shape, args) = ([32, 2, 1], buffers(&group));
            let cpu = expected(half, &group);
            let found = emulate(&image, [1; 3], shape, &args, 10_000_000_000);
            check_near(half, &group, &read(&found.buffers[1]));
            check_near(half, &group, &cpu);
            let bytes = cpu.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
            let Arg::Buffer(given) = &args[0] else { unreachable!() };
            let as_modelled = Launched { trap: None, buffers: vec![given.clone(), bytes] };
            compare_with_host(&host, [1; 3], shape, &args, &as_modelled);
        }
    }
}

#[test]
fn numbers_of_every_kind_are_multiplied_where_not_all_are_there() {
    let mut rng = StdRng::seed_from_u64(13);
    for half in ["f16", "bf16"] {
        let wasm = kernel(half);
        for shape in [[31, 1, 1], [7, 3, 1], [1, 1, 1]] {
            for _ in 0..4 {
                // Zeros, subnormal numbers, infinities and NaNs among them; and few of those, or all sums are NaNs.
                let odd = [0, 0x8000, 1, 0x83ff, 0x7c00, 0xfc00, 0x7e01, 0x7d55, 0x7f80, 0xff80, 0x7fc1, 0x0080];
                let word = |rng: &mut StdRng| match rng.random_range(0..40) {
                    0 => odd[rng.random_range(0..odd.len())] | odd[rng.random_range(0..odd.len())] << 16,
                    1 => rng.random(),
                    _ => rng.random::<u32>() & 0x9fff_9fff,
                };
                let mut any = || Fragment {
                    words: [0; 6].map(|_| word(&mut rng)),
                    sums: [0.0, -0.0, 1e-40, f32::NEG_INFINITY].map(|x| if rng.random() { x } else { 1.5 }),
                };
                let group: Vec<Fragment> = (0..items(shape)).map(|_| any()).collect();
                let done = launch(&wasm, "k", [1; 3], shape, &buffers(&group));
                assert_eq!(done.trap, None);
                assert_eq!(bits(&read(&done.buffers[1])), bits(&expected(half, &group)), "{half} in {shape:?}");
            }
        }
        // Where all are, a NaN is the one NaN too.
        let nan = Fragment { words: [0x7fc1_7fc1; 6], sums: [f32::INFINITY; 4] };
        let done = launch(&wasm, "k", [1; 3], [32, 1, 1], &buffers(&[nan; LANES]));
        assert!(bits(&read(&done.buffers[1])).iter().all(|bits| *bits == 0x7fc0_0000));
    }
}

#[test]
fn an_item_keeps_the_sums_of_its_last_product() {
    // Zeros before the first; those of the last one that it came to afterwards, wherever that was.
    let wasm = module(
        r#"(func (export "k") (param $out i32) (local $i i32) (local $at i32) (local $n i32)
             (local.set $i (call $number))
             (local.set $at (i32.add (local.get $out) (i32.shl (local.get $i) (i32.const 3))))
             (f32.store (local.get $at) (call $mma_sum (i32.const 3)))
             (local.set $n (i32.and (local.get $i) (i32.const 3)))
             (block $out
               (loop $again
                 (br_if $out (i32.eqz (local.get $n)))
                 (call $mma_bf16_f32 (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
                   (f32.const 1) (f32.const 2) (f32.convert_i32_u (local.get $n))
                   (f32.add (call $mma_sum (i32.const 3)) (f32.const 10)))
                 (local.set $n (i32.sub (local.get $n) (i32.const 1)))
                 (br $again)))
             (call $barrier)
             (f32.store offset=4 (local.get $at)
               (f32.add (call $mma_sum (i32.const 3)) (call $mma_sum (i32.const 2)))))"#,
    );
    let done = launch(&wasm, "k", [1; 3], [45, 1, 1], &[Arg::Buffer(vec![0xff; 8 * 45])]);
    assert_eq!(done.trap, None);
    let found = super::read(&done.buffers[0]);
    for (i, found) in found.chunks(2).enumerate() {
        let rounds = i % 4;
        let last = if rounds > 0 { 1.0 } else { 0.0 };
        assert_eq!(found, [0.0, 10.0 * rounds as f32 + last], "{i}");
    }
}

#[test]
fn a_product_needs_a_gpu_that_has_it_and_other_kernels_do_not() {
    let wasm = kernel("f16");
    let image = Program::read(&wasm).unwrap().compile("k", &[true; 2]).unwrap();
    assert_eq!(image.target, Target::Ampere);
    assert!(image.ptx.contains(".target sm_80"), "{}", image.ptx);
    // One instruction for the four sums.
    assert_eq!(image.ptx.matches("mma.sync").count(), 1);
    let without =
        module(r#"(func (export "k") (param i32) (i32.store (local.get 0) (call $subgroup_any (i32.const 1))))"#);
    let image = Program::read(&without).unwrap().compile("k", &[true]).unwrap();
    assert_eq!(image.target, Target::Turing);
}

#[test]
fn products_of_other_types_and_sums_that_there_are_not_are_refused() {
    let refused = |wasm: &[u8]| Program::read(wasm).unwrap().compile("k", &[]).unwrap_err().to_string();
    for which in ["(i32.const 4)", "(i32.const -1)", "(call $subgroup_lane)", "(i32.add (i32.const 1) (i32.const 9))"] {
        let why = refused(&module(&format!(r#"(func (export "k") (drop (call $mma_sum {which})))"#)));
        assert!(why.contains("kernel.mma_sum of anything but a constant from 0 to 3"), "{why}");
    }
    let right = "i32 i32 i32 i32 i32 i32 f32 f32 f32 f32";
    for (name, params, result) in [
        ("mma_f16_f32", right, "(result f32)"),
        ("mma_f16_f32", "i32 i32 i32 i32 i32 i32 f32 f32 f32", ""),
        ("mma_bf16_f32", "i32 i32 i32 i32 i32 f32 f32 f32 f32 f32", ""),
        ("mma_sum", "i32", "(result i32)"),
        ("mma_sum", "", "(result f32)"),
        ("mma_f32_f32", right, ""),
        ("mma_f16_f16", right, ""),
    ] {
        let arguments: String = params.split_whitespace().map(|ty| format!("({ty}.const 0)")).collect();
        let call = format!("(call $f {arguments})");
        let call = if result.is_empty() { call } else { format!("(drop {call})") };
        let text = format!(
            r#"(module (import "kernel" "{name}" (func $f (param {params}) {result})) (func (export "k") {call}))"#
        );
        let why = refused(&wat::parse_str(text).unwrap());
        assert!(why.contains(&format!("kernel.{name}")), "{why}");
    }
    let product = "(drop (call $multiply_f16 (i32.const 1)))";
    let why = refused(&module(&format!(r#"(func (export "k") {})"#, product.repeat(129))));
    assert!(why.contains("more than 128 functions of subgroups"), "{why}");
    let enough = module(&format!(r#"(func (export "k") {})"#, product.repeat(128)));
    assert!(Program::read(&enough).unwrap().compile("k", &[]).is_ok());
}
