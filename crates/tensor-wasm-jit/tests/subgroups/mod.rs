//! What the items of a subgroup do together, in the emulator and on the CPU, against a model that is written down here:
//! groups of every shape, items that are not there, and control flow in which they do not meet. And halves.
//! `TENSOR_WASM_TEST_PROGRAMS` says how many programs are made by chance; `TENSOR_WASM_TEST_SEED` of which numbers.

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tensor_wasm_jit::{Program, SUBGROUP, TrapKind};

use super::host::{Host, HostArg};
use super::{Arg, Launched, assemble, compare_with_host, emulate, launch, launch_within, products};

const LANES: usize = SUBGROUP as usize;

/// Groups of which some have subgroups that are not whole, in one to three dimensions.
pub(super) const SHAPES: [[u32; 3]; 9] =
    [[1, 1, 1], [31, 1, 1], [32, 1, 1], [33, 1, 1], [96, 1, 1], [8, 6, 2], [5, 7, 3], [1, 1, 40], [1024, 1, 1]];

const TYPES: [&str; 4] = ["i32", "i64", "f32", "f64"];

/// A module with every import of subgroups.
pub(super) fn module(body: &str) -> Vec<u8> {
    let mut text = String::from("(module ");
    let mut import = |name: &str, ty: &str| text += &format!(r#"(import "kernel" "{name}" (func ${name} {ty}))"#);
    for name in ["global_id", "local_id", "local_size", "shared"] {
        import(name, "(param i32) (result i32)");
    }
    import("barrier", "");
    import("subgroup_size", "(result i32)");
    import("subgroup_lane", "(result i32)");
    for name in ["ballot", "any", "all"] {
        import(&format!("subgroup_{name}"), "(param i32) (result i32)");
    }
    for ty in TYPES {
        for name in ["shuffle", "shuffle_xor"] {
            import(&format!("{name}_{ty}"), &format!("(param {ty} i32) (result {ty})"));
        }
        for name in ["add", "min", "max"] {
            import(&format!("subgroup_{name}_{ty}"), &format!("(param {ty}) (result {ty})"));
        }
    }
    for name in ["f16_to_f32", "bf16_to_f32"] {
        import(name, "(param i32) (result f32)");
    }
    for name in ["f32_to_f16", "f32_to_bf16"] {
        import(name, "(param f32) (result i32)");
    }
    for name in ["mma_f16_f32", "mma_bf16_f32"] {
        import(name, "(param i32 i32 i32 i32 i32 i32 f32 f32 f32 f32)");
    }
    import("mma_sum", "(param i32) (result f32)");
    text += &format!(
        r#"(memory 1)
           (func $number (result i32)
             (i32.add (call $local_id (i32.const 0)) (i32.mul (call $local_size (i32.const 0))
               (i32.add (call $local_id (i32.const 1)) (i32.mul (call $local_size (i32.const 1))
                 (call $local_id (i32.const 2)))))))
           {}{}{body})"#,
        products::multiplying("f16"),
        products::multiplying("bf16")
    );
    wat::parse_str(text).unwrap()
}

/// Exports `name`, which does something with the item's value and its operand, and stores what comes out, if anything.
fn kernel(name: &str, from: &str, to: &str, result: &str) -> String {
    format!(
        r#"(func (export "{name}") (param $values i32) (param $operands i32) (param $out i32)
             (local $i i32) (local $v {from}) (local $o i32)
             (local.set $i (call $number))
             (local.set $v ({from}.load (i32.add (local.get $values) (i32.shl (local.get $i) (i32.const 3)))))
             (local.set $o (i32.load (i32.add (local.get $operands) (i32.shl (local.get $i) (i32.const 2)))))
             ({to}.store (i32.add (local.get $out) (i32.shl (local.get $i) (i32.const 3))) {result}))"#
    )
}

pub(super) fn items(shape: [u32; 3]) -> usize {
    shape.iter().product::<u32>() as usize
}

fn words(words: &[u64]) -> Arg {
    Arg::Buffer(words.iter().flat_map(|word| word.to_le_bytes()).collect())
}

fn ints(ints: &[i32]) -> Arg {
    Arg::Buffer(ints.iter().flat_map(|int| int.to_le_bytes()).collect())
}

fn read(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Bits of a type: those where things go wrong, and others.
fn bits(ty: &str, rng: &mut StdRng) -> u64 {
    let odd: &[u64] = match ty {
        "i32" => &[0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff],
        "i64" => &[0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, 1 << 31, 1 << 32],
        // Zeros of both signs, infinities, NaNs of both kinds, the least there is, the most, and 1.
        "f32" => &[0, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc0_1234, 0xff80_0001, 1, 0x7f7f_ffff, 0x3f80_0000],
        _ => &[0, 1 << 63, 0x7ff << 52, 0xfff << 52, 0x7ff8_0000_0000_1234, 0xfff0_0000_0000_0001, 1, 0x3ff << 52],
    };
    match rng.random_range(0..4) {
        0 => odd[rng.random_range(0..odd.len())],
        // Of one size, so that sums depend on their order.
        _ if ty == "f32" => u64::from(rng.random_range(-100.0_f32..100.0).to_bits()),
        _ if ty == "f64" => rng.random_range(-100.0_f64..100.0).to_bits(),
        _ if ty == "i32" => u64::from(rng.random::<u32>()),
        _ => rng.random(),
    }
}

/// What Wasm's instructions make of two values.
fn combine(name: &str, ty: &str, a: u64, b: u64) -> u64 {
    let (x, y) = (a as u32 as i32, b as u32 as i32);
    let (wide_x, wide_y) = (a as i64, b as i64);
    match (name, ty) {
        ("add", "i32") => u64::from(x.wrapping_add(y) as u32),
        ("min", "i32") => u64::from(x.min(y) as u32),
        ("max", "i32") => u64::from(x.max(y) as u32),
        ("add", "i64") => wide_x.wrapping_add(wide_y) as u64,
        ("min", "i64") => wide_x.min(wide_y) as u64,
        ("max", "i64") => wide_x.max(wide_y) as u64,
        (_, "f32") => {
            let (x, y) = (f32::from_bits(a as u32), f32::from_bits(b as u32));
            let is_first = x.is_nan() || !y.is_nan() && (name == "min") == x.total_cmp(&y).is_lt();
            u64::from(
                (if name == "add" {
                    x + y
                } else if is_first {
                    x
                } else {
                    y
                })
                .to_bits(),
            )
        }
        _ => {
            let (x, y) = (f64::from_bits(a), f64::from_bits(b));
            let is_first = x.is_nan() || !y.is_nan() && (name == "min") == x.total_cmp(&y).is_lt();
            (if name == "add" {
                x + y
            } else if is_first {
                x
            } else {
                y
            })
            .to_bits()
        }
    }
}

/// The one NaN, where it is one.
fn canonical(ty: &str, bits: u64) -> u64 {
    match ty {
        "f32" if f32::from_bits(bits as u32).is_nan() => 0x7fc0_0000,
        "f64" if f64::from_bits(bits).is_nan() => 0x7ff8_0000_0000_0000,
        _ => bits,
    }
}

/// A butterfly over those that are there.
fn reduced(name: &str, ty: &str, values: &[Option<u64>]) -> u64 {
    let mut totals: Vec<Option<u64>> = values.to_vec();
    totals.resize(LANES, None);
    for step in [16, 8, 4, 2, 1] {
        let other = |lane: usize| totals[lane ^ step];
        totals = (0..LANES)
            .map(|lane| match (totals[lane], other(lane)) {
                (Some(a), Some(b)) => Some(combine(name, ty, a, b)),
                (a, b) => a.or(b),
            })
            .collect();
    }
    canonical(ty, totals[0].unwrap())
}

/// What every item of a subgroup gets, of whom those take part who have a value.
fn together(name: &str, ty: &str, values: &[Option<u64>], operands: &[i32]) -> Vec<u64> {
    if name == "mma" {
        let number = |value: &u64| *value as u32;
        return products::of_numbers(ty, &values.iter().map(|value| value.as_ref().map(number)).collect::<Vec<_>>());
    }
    let value = |lane: u32| values.get(lane as usize).copied().flatten().unwrap_or(0);
    let votes = |holds: &dyn Fn(u64) -> bool| {
        values
            .iter()
            .enumerate()
            .fold(0_u64, |votes, (lane, value)| votes | u64::from(value.is_some_and(holds)) << lane)
    };
    (0_u32..)
        .zip(operands)
        .map(|(lane, operand)| match name {
            "shuffle" => value(operand.cast_unsigned()),
            "shuffle_xor" => value(lane ^ operand.cast_unsigned()),
            "ballot" => votes(&|value| value != 0),
            "any" => u64::from(votes(&|value| value != 0) != 0),
            "all" => u64::from(votes(&|value| value == 0) == 0),
            _ if values[lane as usize].is_none() => 0,
            _ => reduced(name, ty, values),
        })
        .collect()
}

#[test]
fn items_of_a_subgroup_do_together_what_they_should() {
    // Each function, and exchanges with constants.
    let mut kernels = Vec::new();
    for ty in TYPES {
        for name in ["shuffle", "shuffle_xor"] {
            kernels.push((format!("{name}_{ty}"), name, ty, None));
            for constant in [0, 5, 31, 32, -1] {
                kernels.push((format!("{name}_{ty}"), name, ty, Some(constant)));
            }
        }
        kernels.extend(["add", "min", "max"].map(|name| (format!("subgroup_{name}_{ty}"), name, ty, None)));
    }
    kernels.extend(["ballot", "any", "all"].map(|name| (format!("subgroup_{name}"), name, "i32", None)));
    let mut rng = StdRng::seed_from_u64(1);
    for (n, (function, name, ty, constant)) in kernels.into_iter().enumerate() {
        let operand = match constant {
            Some(constant) => format!("(i32.const {constant})"),
            None => "(local.get $o)".to_owned(),
        };
        let operand = if name.starts_with("shuffle") { operand } else { String::new() };
        let wasm = module(&kernel("k", ty, ty, &format!("(call ${function} (local.get $v) {operand})")));
        // A constant is another kernel of the same kind: fewer groups will do.
        let shapes = if constant.is_some() { &SHAPES[2..4] } else { &SHAPES[..] };
        for shape in shapes {
            let count = items(*shape);
            let mut values: Vec<u64> = (0..count).map(|_| bits(ty, &mut rng)).collect();
            // Votes that are not all the same, or are.
            if matches!(name, "any" | "all") {
                let (every, but_one) = (u64::from(name == "all"), u64::from(name == "any"));
                values = vec![every; count];
                if n % 2 == 0 && count > 5 {
                    values[5] = but_one;
                }
            }
            let lanes = [0, 1, 17, 31, 32, 63, 64, -1, i32::MIN, i32::MAX, 1 << 16];
            let any = |rng: &mut StdRng| match rng.random_range(0..3) {
                0 => lanes[rng.random_range(0..lanes.len())],
                _ => rng.random_range(0..32),
            };
            let operands: Vec<i32> = (0..count).map(|_| constant.unwrap_or_else(|| any(&mut rng))).collect();
            let args = [words(&values), ints(&operands), Arg::Buffer(vec![0; 8 * count])];
            let done = launch(&wasm, "k", [2, 1, 1], *shape, &args);
            assert_eq!(done.trap, None, "{function}");
            let found = read(&done.buffers[2]);
            for (first, own) in (0..count).step_by(LANES).zip(values.chunks(LANES)) {
                let own: Vec<Option<u64>> = own.iter().copied().map(Some).collect();
                let expected = together(name, ty, &own, &operands[first..first + own.len()]);
                let at = |n: usize| (n, values[first + n], operands[first + n], found[first + n]);
                for (n, expected) in expected.into_iter().enumerate() {
                    assert_eq!(found[first + n], expected, "{function} {constant:?} in {shape:?}: {:x?}", at(n));
                }
            }
        }
    }
}

#[test]
fn an_item_knows_its_place_in_its_subgroup() {
    let lane = "(i32.add (call $subgroup_lane) (i32.mul (i32.const 100) (call $subgroup_size)))";
    let wasm = module(&kernel("k", "i32", "i32", lane));
    for shape in SHAPES {
        let count = items(shape);
        let args = [words(&vec![0; count]), ints(&vec![0; count]), Arg::Buffer(vec![0; 8 * count])];
        let done = launch(&wasm, "k", [3, 1, 1], shape, &args);
        assert_eq!(done.trap, None);
        let expected: Vec<u64> = (0..count).map(|n| (n % LANES + 100 * LANES) as u64).collect();
        assert_eq!(read(&done.buffers[2]), expected, "{shape:?}");
    }
}

/// Something that the items of a group do, each as its number says.
#[derive(Debug, Clone)]
enum Act {
    /// A function, of which the accumulator gets what comes out.
    Function(&'static str, &'static str),
    Barrier,
    /// One or the other, by a mask of the item's hash.
    Either(u32, Vec<Act>, Vec<Act>),
    /// As often as the item's hash says.
    Repeat(u32, Vec<Act>),
    /// Ends the item, if the mask of its hash says so.
    End(u32),
}

/// What control flow depends on: of an item's number and a mask, so that items of a subgroup part.
fn hash(item: u32, mask: u32) -> u32 {
    (item.wrapping_mul(0x9e37_79b1) ^ item >> 3).wrapping_add(mask) & mask
}

fn acts(rng: &mut StdRng, depth: u32) -> Vec<Act> {
    const FUNCTIONS: [(&str, &str); 12] = [
        ("mma", "f16"),
        ("mma", "bf16"),
        ("add", "i32"),
        ("min", "i32"),
        ("max", "i64"),
        ("add", "f32"),
        ("max", "f64"),
        ("ballot", "i32"),
        ("any", "i32"),
        ("all", "i32"),
        ("shuffle", "i32"),
        ("shuffle_xor", "i64"),
    ];
    let count = rng.random_range(1..4);
    (0..count)
        .map(|_| match rng.random_range(0..10) {
            0..5 => {
                let (name, ty) = FUNCTIONS[rng.random_range(0..FUNCTIONS.len())];
                Act::Function(name, ty)
            }
            5 => Act::Barrier,
            6 | 7 if depth > 0 => Act::Either(1 << rng.random_range(0..6), acts(rng, depth - 1), acts(rng, depth - 1)),
            8 if depth > 0 => Act::Repeat([1, 3, 7][rng.random_range(0..3)], acts(rng, depth - 1)),
            9 => Act::End([0x15, 0x38, 0x7][rng.random_range(0..3)]),
            _ => Act::Function("add", "i32"),
        })
        .collect()
}

/// The accumulator as a function takes it, and what comes out as the accumulator adds it.
fn call(name: &str, ty: &str) -> String {
    if name == "mma" {
        return format!("(call $multiply_{ty} (local.get $acc))");
    }
    let function = if name.starts_with("shuffle") { format!("{name}_{ty}") } else { format!("subgroup_{name}_{ty}") };
    let function = if matches!(name, "ballot" | "any" | "all") { format!("subgroup_{name}") } else { function };
    let small = "(i32.and (local.get $acc) (i32.const 0xffff))";
    let value = match ty {
        "i64" => "(i64.extend_i32_s (local.get $acc))".to_owned(),
        "f32" => format!("(f32.convert_i32_u {small})"),
        "f64" => format!("(f64.convert_i32_u {small})"),
        _ if name == "all" || name == "any" => "(i32.and (local.get $acc) (i32.const 3))".to_owned(),
        _ => "(local.get $acc)".to_owned(),
    };
    let lane = if name.starts_with("shuffle") { "(i32.rem_u (local.get $acc) (i32.const 37))" } else { "" };
    let called = format!("(call ${function} {value} {lane})");
    match ty {
        "i64" => format!("(i32.wrap_i64 {called})"),
        "f32" => format!("(i32.trunc_sat_f32_s {called})"),
        "f64" => format!("(i32.trunc_sat_f64_s {called})"),
        _ => called,
    }
}

fn text(acts: &[Act], counters: &mut usize) -> String {
    let hash = |mask: u32| {
        format!(
            "(i32.and (i32.const {mask}) (i32.add (i32.const {mask}) (i32.xor (i32.mul (local.get $i)
              (i32.const 0x9e3779b1)) (i32.shr_u (local.get $i) (i32.const 3)))))"
        )
    };
    let mut all = String::new();
    for act in acts {
        all += &match act {
            Act::Function(name, ty) => {
                format!("(local.set $acc (i32.add (i32.mul (local.get $acc) (i32.const 31)) {}))", call(name, ty))
            }
            Act::Barrier => "(call $barrier)".to_owned(),
            Act::Either(mask, one, other) => {
                format!("(if {} (then {}) (else {}))", hash(*mask), text(one, counters), text(other, counters))
            }
            Act::Repeat(mask, inner) => {
                *counters += 1;
                let n = *counters;
                format!(
                    "(local.set $n{n} {}) (block $out{n} (loop $again{n} (br_if $out{n} (i32.eqz (local.get $n{n})))
                     (local.set $n{n} (i32.sub (local.get $n{n}) (i32.const 1))) {} (br $again{n})))",
                    hash(*mask),
                    text(inner, counters)
                )
            }
            Act::End(mask) => {
                format!(
                    "(if (i32.eq {} (i32.const {mask})) (then (call $leave (local.get $out) (local.get $i) (local.get $acc)) (return)))",
                    hash(*mask)
                )
            }
        };
    }
    all
}

/// What an item does, one after the other. Whether it goes on.
fn unrolled(acts: &[Act], item: u32, all: &mut Vec<Act>) -> bool {
    acts.iter().all(|act| match act {
        Act::Function(..) | Act::Barrier => {
            all.push(act.clone());
            true
        }
        Act::Either(mask, one, other) => unrolled(if hash(item, *mask) != 0 { one } else { other }, item, all),
        Act::Repeat(mask, inner) => (0..hash(item, *mask)).all(|_| unrolled(inner, item, all)),
        Act::End(mask) => hash(item, *mask) != *mask,
    })
}

/// What every item of a group has in the end: items of a subgroup that are at one function do it, until none is at any;
/// then all go on from the barrier.
fn model(acts: &[Act], count: usize) -> Vec<u32> {
    let mut left: Vec<Vec<Act>> = Vec::new();
    for item in 0..count as u32 {
        let mut all = Vec::new();
        unrolled(acts, item, &mut all);
        all.reverse();
        left.push(all);
    }
    let mut accs: Vec<u32> = (0..count as u32).map(|item| item * 3 + 1).collect();
    while left.iter().any(|own| !own.is_empty()) {
        let mut has_met = false;
        for first in (0..count).step_by(LANES) {
            let own = first..count.min(first + LANES);
            let mut done = vec![false; LANES];
            for lead in own.clone() {
                let Some(Act::Function(name, ty)) = left[lead].last().cloned() else { continue };
                if done[lead - first] {
                    continue;
                }
                has_met = true;
                let is_there = |item: usize, done: &[bool]| {
                    !done[item - first]
                        && matches!(left[item].last(), Some(Act::Function(n, t)) if *n == name && *t == ty)
                };
                let there: Vec<bool> = own.clone().map(|item| is_there(item, &done)).collect();
                let value = |acc: u32| match ty {
                    "i64" => i64::from(acc.cast_signed()).cast_unsigned(),
                    "f32" => u64::from(((acc & 0xffff) as f32).to_bits()),
                    "f64" => f64::from(acc & 0xffff).to_bits(),
                    _ if name == "all" || name == "any" => u64::from(acc & 3),
                    _ => u64::from(acc),
                };
                let values: Vec<Option<u64>> =
                    own.clone().map(|item| there[item - first].then(|| value(accs[item]))).collect();
                let operands: Vec<i32> = own.clone().map(|item| (accs[item] % 37) as i32).collect();
                let found = together(name, ty, &values, &operands);
                for item in own.clone().filter(|item| there[item - first]) {
                    let found = found[item - first];
                    let found = match ty {
                        "f32" => (f32::from_bits(found as u32) as i32).cast_unsigned(),
                        "f64" => (f64::from_bits(found) as i32).cast_unsigned(),
                        _ => found as u32,
                    };
                    accs[item] = accs[item].wrapping_mul(31).wrapping_add(found);
                    done[item - first] = true;
                }
            }
            for item in own.filter(|item| done[item - first]) {
                left[item].pop();
            }
        }
        if !has_met {
            left.iter_mut().for_each(|own| drop(own.pop()));
        }
    }
    accs
}

/// Programs in which items part, groups that run them, and what every item has in the end.
pub(super) fn parting(made: usize) -> Vec<(Vec<u8>, [u32; 3], Vec<u32>)> {
    let mut rng = StdRng::seed_from_u64(8);
    let mut programs: Vec<Vec<Act>> =
        [("add", "i32"), ("mma", "f16"), ("mma", "bf16")].into_iter().flat_map(by_hand).collect();
    programs.extend((0..made).map(|_| acts(&mut rng, 3)));
    let with_shapes = programs.iter().flat_map(|program| {
        [[31, 1, 1], [33, 1, 1], [96, 1, 1], [4, 4, 8]]
            .map(|shape| (of_acts(program), shape, model(program, items(shape))))
    });
    with_shapes.collect()
}

/// A kernel in which every item does that.
fn of_acts(acts: &[Act]) -> Vec<u8> {
    let mut counters = 0;
    let body = text(acts, &mut counters);
    let locals: String = (1..=counters).map(|n| format!("(local $n{n} i32)")).collect();
    module(&format!(
        r#"(func $leave (param $out i32) (param $i i32) (param $acc i32)
             (i32.store (i32.add (local.get $out) (i32.shl (local.get $i) (i32.const 2))) (local.get $acc)))
           (func (export "k") (param $out i32) (local $i i32) (local $acc i32) {locals}
             (local.set $i (call $number))
             (local.set $acc (i32.add (i32.mul (local.get $i) (i32.const 3)) (i32.const 1)))
             {body}
             (call $leave (local.get $out) (local.get $i) (local.get $acc)))"#
    ))
}

/// Runs a program on every item of a group, in the emulator and on the CPU.
fn ran(acts: &[Act], shape: [u32; 3], is_assembled: bool) -> Launched {
    let wasm = of_acts(acts);
    let program = Program::read(&wasm).unwrap();
    let image = program.compile("k", &[true]).unwrap();
    if is_assembled {
        assemble(&image);
    }
    let args = [Arg::Buffer(vec![0; 4 * items(shape)])];
    let done = emulate(&image, [2, 1, 1], shape, &args, 10_000_000_000);
    compare_with_host(&program.compile_host("k", &[true]).unwrap(), [2, 1, 1], shape, &args, &done);
    done
}

#[test]
fn items_that_do_not_come_are_not_there_and_hold_up_nobody() {
    let mut programs: Vec<Vec<Act>> = [("add", "i32"), ("mma", "f16")].into_iter().flat_map(by_hand).collect();
    let by_hand = programs.len();
    let setting = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let mut rng = StdRng::seed_from_u64(setting("TENSOR_WASM_TEST_SEED").unwrap_or(7));
    let made = setting("TENSOR_WASM_TEST_PROGRAMS").unwrap_or(100);
    programs.extend((0..made).map(|_| acts(&mut rng, 3)));
    for (n, program) in programs.iter().enumerate() {
        for shape in [[1, 1, 1], [31, 1, 1], [33, 1, 1], [96, 1, 1], [7, 3, 2], [4, 4, 8]] {
            let done = ran(program, shape, n < by_hand + 5);
            assert_eq!(done.trap, None);
            let found: Vec<u32> =
                done.buffers[0].chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
            assert_eq!(found, model(program, items(shape)), "{program:?} in {shape:?}");
        }
    }
}

/// Programs in which items part around a function, and around another.
fn by_hand((name, ty): (&'static str, &'static str)) -> Vec<Vec<Act>> {
    let add = || Act::Function(name, ty);
    let max = || Act::Function("min", "i32");
    let some = |acts: Vec<Act>, others: Vec<Act>| vec![Act::Either(8, acts, others)];
    vec![
        // Different functions, and the same one in two places.
        some(vec![add()], vec![max()]),
        some(vec![add(), max()], vec![max(), add()]),
        some(vec![add()], vec![add()]),
        some(vec![add()], vec![]),
        // A barrier on the one side, a function on the other, in both orders.
        some(vec![Act::Barrier, add()], vec![add(), Act::Barrier]),
        some(vec![Act::Barrier, Act::Barrier], vec![add(), add(), add()]),
        // Loops that end for one item after the other, with what they then wait at.
        vec![Act::Repeat(7, vec![add()]), Act::Barrier, max()],
        vec![Act::Repeat(7, vec![add(), Act::Barrier, max()])],
        vec![Act::Repeat(7, vec![Act::Either(16, vec![add()], vec![Act::Barrier])])],
        // Some have ended.
        vec![Act::End(0x7), add(), Act::End(0x15), max(), Act::Barrier, add()],
        vec![Act::Repeat(7, vec![add(), Act::End(0x38)]), max()],
    ]
}

#[test]
fn loops_that_are_counted_and_subgroups_keep_out_of_each_others_way() {
    // Each item adds up a row, the subgroup adds up the items, over and over: as many loops as functions.
    let (rounds, row) = (6, 4);
    let sum = |n: usize| {
        format!(
            r#"(local.set $at (i32.add (local.get $x) (i32.mul (local.get $i) (i32.const {bytes}))))
               (local.set $end (i32.add (local.get $at) (i32.const {bytes})))
               (loop $l{n}
                 (local.set $sum (i32.add (local.get $sum) (i32.load (local.get $at))))
                 (br_if $l{n} (i32.ne (local.tee $at (i32.add (local.get $at) (i32.const 4))) (local.get $end))))
               (local.set $sum (call $subgroup_add_i32 (local.get $sum)))"#,
            bytes = 4 * row
        )
    };
    let wasm = module(&format!(
        r#"(func (export "k") (param $x i32) (param $out i32)
             (local $i i32) (local $at i32) (local $end i32) (local $sum i32)
             (local.set $i (call $number)) {}
             (i32.store (i32.add (local.get $out) (i32.shl (local.get $i) (i32.const 2))) (local.get $sum)))"#,
        (0..rounds).map(sum).collect::<String>()
    ));
    for count in [32_usize, 45] {
        let x: Vec<i32> = (0..(row * count) as i32).map(|n| n * n % 113).collect();
        let done = launch(&wasm, "k", [1; 3], [count as u32, 1, 1], &[ints(&x), ints(&vec![0; count])]);
        assert_eq!(done.trap, None);
        let mut sums = vec![0_i32; count];
        for _ in 0..rounds {
            for (sum, own) in sums.iter_mut().zip(x.chunks(row)) {
                *sum = own.iter().fold(*sum, |sum, x| sum.wrapping_add(*x));
            }
            for subgroup in sums.chunks_mut(LANES) {
                let all = subgroup.iter().fold(0_i32, |all, sum| all.wrapping_add(*sum));
                subgroup.fill(all);
            }
        }
        let expected: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        assert!(done.buffers[1] == expected, "{count} items");
    }
}

#[test]
fn items_that_trap_or_never_come_end_a_launch_within_its_deadline() {
    let kernel = |body: &str| {
        module(&format!(
            r#"(func (export "k") (param $out i32) (local $i i32) (local $n i32)
                 (local.set $i (call $number)) {body}
                 (i32.store (i32.add (local.get $out) (i32.shl (local.get $i) (i32.const 2))) (local.get $n)))"#
        ))
    };
    for function in ["subgroup_add_i32", "multiply_f16"] {
        let add = format!("(local.set $n (call ${function} (local.get $i)))");
        for (body, expected) in cases_of_trouble(&add) {
            let wasm = kernel(&body);
            for shape in [[33, 1, 1], [4, 3, 1]] {
                let args = [Arg::Buffer(vec![0; 4 * items(shape)])];
                let done = launch_within(&wasm, "k", [1; 3], shape, &args, 5_000_000);
                assert_eq!(done.trap.map(|trap| trap.kind), expected, "{body} in {shape:?}");
                if expected == Some(TrapKind::Deadline) {
                    let image = Program::read(&wasm).unwrap().compile_host("k", &[true]).unwrap();
                    let (host, mut bytes) = (Host::new(), vec![0; 4 * items(shape)]);
                    let window = HostArg::Window(image.layout.windows_from, &mut bytes);
                    let trap = host.run_within(&image, &host.compile(&image), [1; 3], shape, vec![window], 3);
                    assert_eq!(trap.map(|trap| trap.kind), expected, "{body} in {shape:?} on the CPU");
                }
            }
        }
    }
}

/// What some items do that are not there when the others are, and how that ends.
fn cases_of_trouble(add: &str) -> Vec<(String, Option<TrapKind>)> {
    let odd = "(i32.and (local.get $i) (i32.const 1))";
    let forever = "(loop $l (br $l))";
    let adding = format!("(loop $l {add} (br $l))");
    let trap = "(drop (i32.div_u (i32.const 1) (i32.const 0)))";
    let outside = "(i32.store offset=0x10000 (local.get $out) (i32.const 1))";
    let divides = Some(TrapKind::DivideByZero);
    vec![
        // One traps before, in the middle, or instead.
        (format!("(if {odd} (then {trap})) {add} (call $barrier) {add}"), divides),
        (format!("{add} (if {odd} (then {trap})) {add}"), divides),
        (format!("(if {odd} (then {add}) (else {trap}))"), divides),
        (format!("(if {odd} (then {outside})) {add} (call $barrier) {add}"), Some(TrapKind::OutOfBounds)),
        // Some never come, or come for ever, whatever the others wait at.
        (format!("(if {odd} (then {forever})) {add}"), Some(TrapKind::Deadline)),
        (format!("(if {odd} (then {forever})) (call $barrier)"), Some(TrapKind::Deadline)),
        (format!("(if {odd} (then {adding})) (call $barrier)"), Some(TrapKind::Deadline)),
        (format!("(if {odd} (then {adding}) (else {add} {forever}))"), Some(TrapKind::Deadline)),
        (
            format!("(if {odd} (then (loop $l {add} (call $barrier) (br $l))) (else {adding}))"),
            Some(TrapKind::Deadline),
        ),
        (adding.clone(), Some(TrapKind::Deadline)),
    ]
}

#[test]
fn too_many_functions_of_subgroups_and_other_types_are_refused() {
    let calls = "(drop (call $subgroup_any (i32.const 1)))".repeat(129);
    let many = module(&format!(r#"(func (export "k") {calls})"#));
    let enough = module(&format!(r#"(func (export "k") {})"#, "(drop (call $subgroup_any (i32.const 1)))".repeat(128)));
    assert!(Program::read(&enough).unwrap().compile("k", &[]).is_ok());
    let refused = Program::read(&many).unwrap().compile("k", &[]).unwrap_err().to_string();
    assert!(refused.contains("more than 128 functions of subgroups"), "{refused}");
    for (name, ty) in [
        ("subgroup_add_i32", "(param f32) (result i32)"),
        ("subgroup_lane", "(param i32) (result i32)"),
        ("shuffle_f32", "(param f32) (result f32)"),
        ("subgroup_add_u32", "(param i32) (result i32)"),
        ("subgroup_mul_i32", "(param i32) (result i32)"),
        ("f32_to_f16", "(param f32) (result f32)"),
    ] {
        let arguments = ty.split("(result").next().unwrap().matches("32").count();
        let arguments = if ty.contains("param f32") { "(f32.const 0)" } else { "(i32.const 0)" }.repeat(arguments);
        let text = format!(
            r#"(module (import "kernel" "{name}" (func $f {ty})) (func (export "k") (drop (call $f {arguments}))))"#
        );
        let wasm = wat::parse_str(text).unwrap();
        let refused = Program::read(&wasm).unwrap().compile("k", &[]).unwrap_err().to_string();
        assert!(refused.contains(&format!("kernel.{name}")), "{refused}");
    }
}

/// The nearest of a format's numbers, ties to the one whose last bit is zero: looked for among all of them. What is
/// nearer to the power of two after the last is infinite.
fn nearest(x: f32, numbers: &[f64]) -> u32 {
    let sign = u32::from(x.is_sign_negative()) << 15;
    let x = f64::from(x.abs());
    let above = numbers.partition_point(|number| *number < x).min(numbers.len() - 1);
    let below = above.saturating_sub(1);
    let (up, down) = (numbers[above] - x, x - numbers[below]);
    let is_up = up < down || up == down && above % 2 == 0;
    sign | if is_up { above } else { below } as u32
}

#[test]
fn halves_become_floats_and_floats_are_rounded_to_halves() {
    let wide = |name: &str| kernel(name, "i32", "f32", &format!("(call ${name} (local.get $v))"));
    let narrow = |name: &str| kernel(name, "f32", "i32", &format!("(call ${name} (local.get $v))"));
    let wasm = module(&[wide("f16_to_f32"), wide("bf16_to_f32"), narrow("f32_to_f16"), narrow("f32_to_bf16")].concat());
    let run = |name: &str, values: &[u64]| {
        // As many as an item's number goes; the operand is not looked at.
        let chunks = values.chunks(1024).map(|values| {
            let args = [words(values), ints(&vec![0; values.len()]), Arg::Buffer(vec![0; 8 * values.len()])];
            let done = launch(&wasm, name, [1; 3], [values.len() as u32, 1, 1], &args);
            assert_eq!(done.trap, None);
            read(&done.buffers[2])
        });
        chunks.flatten().collect::<Vec<u64>>()
    };
    // Every half, with whatever is above it.
    let halves: Vec<u64> = (0..1 << 16).map(|bits| bits | (bits ^ 0x5a5a) << 16).collect();
    for (name, float) in [
        ("f16_to_f32", (|bits| f16::from_bits(bits).to_f32()) as fn(u16) -> f32),
        ("bf16_to_f32", |bits| bf16::from_bits(bits).to_f32()),
    ] {
        for (bits, found) in halves.iter().zip(run(name, &halves)) {
            let expected = canonical("f32", u64::from(float(*bits as u16).to_bits()));
            assert_eq!(found, expected, "{name} of {bits:x}");
        }
    }
    // Every half's float, the one between it and the next, and their neighbours; and anything.
    let mut rng = StdRng::seed_from_u64(9);
    for (name, infinity, nan, float) in [
        ("f32_to_f16", 0x7c00_u16, 0x7e00, (|bits| f16::from_bits(bits).to_f64()) as fn(u16) -> f64),
        ("f32_to_bf16", 0x7f80, 0x7fc0, |bits| bf16::from_bits(bits).to_f64()),
    ] {
        let mut numbers: Vec<f64> = (0..infinity).map(float).collect();
        numbers.push(2.0 * numbers[usize::from(infinity) - 1] - numbers[usize::from(infinity) - 2]);
        let mut values: Vec<u64> = Vec::new();
        for pair in numbers.windows(2).step_by(3) {
            for middle in [pair[0], (pair[0] + pair[1]) / 2.0] {
                let bits = u64::from((middle as f32).to_bits());
                values
                    .extend([bits, bits.saturating_sub(1), bits + 1].map(|bits| bits | u64::from(bits & 8 == 0) << 31));
            }
        }
        values.extend((0..10_000).map(|_| u64::from(rng.random::<u32>())));
        values.extend([0, 1 << 31, 0x7f80_0000, 0xff80_0000, 0x7fc0_0001, 0xff80_0001, 0x7f7f_ffff, 1, 0x477f_efff]);
        for (bits, found) in values.iter().zip(run(name, &values)) {
            let x = f32::from_bits(*bits as u32);
            let expected = if x.is_nan() { nan } else { nearest(x, &numbers) };
            assert_eq!(found, u64::from(expected), "{name} of {bits:x}");
        }
    }
}
