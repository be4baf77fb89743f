//! The functions that are polynomials in kernels, against others that are closer to the truth: of double precision for
//! those of single, and numbers of 128 bits for those of double.

use astro_float_num::{BigFloat, Consts, RoundingMode};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{Arg, launch};

/// Inputs that are tried of each function, besides the special ones. Numbers of many bits take their time.
const INPUTS_SINGLE: usize = 20_000;
const INPUTS_DOUBLE: usize = 5_000;

/// Bits of the numbers that double precision is compared with.
const PRECISION: usize = 128;

/// Units in the last place that a result may be off by.
const ULPS_SINGLE: f64 = 1.0;
const ULPS_DOUBLE: f64 = 1.1;

const FUNCTIONS: [&str; 8] = ["exp", "exp2", "log", "log2", "sin", "cos", "tanh", "pow"];

const SPECIAL: [f64; 34] = [
    0.0,
    -0.0,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    -1.5,
    2.0,
    3.0,
    -3.0,
    1e22,
    -1e22,
    16_777_215.0,
    -16_777_215.0,
    9_007_199_254_740_991.0,
    9_007_199_254_740_993.0,
    -9_007_199_254_740_991.0,
    0.999_999_9,
    1.000_000_1,
    88.722_84,
    88.722_85,
    -103.972_08,
    -103.972_09,
    709.782_712_893_384,
    -745.133_219_101_941_2,
    1_024.0,
    -1_074.0,
    -1_075.0,
    // As close to a multiple of π/2 as there is, in single and in double precision.
    5_711_873_360_000_000.0,
    5.319_372_648_326_541e255,
];

/// What a platform's own functions make of it: right about what is special, and to nearly all bits.
fn native(name: &str, x: f64, y: f64) -> f64 {
    match name {
        "exp" => x.exp(),
        "exp2" => x.exp2(),
        "log" => x.ln(),
        "log2" => x.log2(),
        "sin" => x.sin(),
        "cos" => x.cos(),
        "tanh" => x.tanh(),
        _ => x.powf(y),
    }
}

/// By way of a larger one: of the smallest it would take fewer bits for none.
fn big(x: f64) -> BigFloat {
    let up = 2_f64.powi(100);
    if !x.is_subnormal() {
        return BigFloat::from_f64(x, PRECISION);
    }
    BigFloat::from_f64(x * up, PRECISION).div(&BigFloat::from_f64(up, PRECISION), PRECISION, RoundingMode::None)
}

fn exact(name: &str, x: f64, y: f64, constants: &mut Consts) -> BigFloat {
    let is_odd = y % 2.0 != 0.0;
    let (x, y) = (big(x), big(y));
    let (p, round) = (PRECISION, RoundingMode::None);
    match name {
        "exp" => x.exp(p, round, constants),
        "exp2" => BigFloat::from_f64(2.0, p).pow(&x, p, round, constants),
        "log" => x.ln(p, round, constants),
        "log2" => x.log2(p, round, constants),
        "sin" => x.sin(p, round, constants),
        "cos" => x.cos(p, round, constants),
        "tanh" => x.tanh(p, round, constants),
        // An odd power has the sign.
        _ => {
            if x.is_negative() && is_odd {
                x.abs().pow(&y, p, round, constants).neg()
            } else {
                x.abs().pow(&y, p, round, constants)
            }
        }
    }
}

/// Numbers that a function has something to do for, as often as any.
fn number(name: &str, is_single: bool, rng: &mut StdRng) -> f64 {
    let any = |rng: &mut StdRng| {
        if is_single { f64::from(f32::from_bits(rng.random())) } else { f64::from_bits(rng.random()) }
    };
    let ends = if is_single { 110.0 } else { 750.0 };
    match (name, rng.random_range(0..4)) {
        (_, 0) => any(rng),
        ("exp", 1) => rng.random_range(-ends..ends),
        ("exp2", 1) => rng.random_range(-1.5 * ends..1.5 * ends),
        ("log" | "log2" | "pow", 1 | 2) => any(rng).abs(),
        ("log" | "log2" | "pow", _) => rng.random_range(0.4..2.5),
        ("sin" | "cos", 1) => f64::from(rng.random_range(0..400_000)) * std::f64::consts::FRAC_PI_2,
        ("sin" | "cos", 2) => rng.random_range(-1e6..1e6),
        _ => rng.random_range(-2.0..2.0),
    }
}

fn pairs(name: &str, is_single: bool) -> Vec<(f64, f64)> {
    let mut rng = StdRng::seed_from_u64(17);
    let mut pairs: Vec<(f64, f64)> = match name {
        "pow" => SPECIAL.iter().flat_map(|x| SPECIAL.map(|y| (*x, y))).collect(),
        _ => SPECIAL.map(|x| (x, x)).to_vec(),
    };
    for _ in 0..if is_single { INPUTS_SINGLE } else { INPUTS_DOUBLE } {
        let x = number(name, is_single, &mut rng);
        // A power that is a number, mostly.
        let ends = if is_single { 160.0 } else { 1_100.0 };
        let y = match rng.random_range(0..8) {
            0 => f64::from(rng.random_range(-40..40)),
            _ => rng.random_range(-ends..ends) / x.abs().log2(),
        };
        let x = if name == "pow" && y.fract() == 0.0 && rng.random() { -x } else { x };
        pairs.push((x, y));
    }
    if is_single {
        pairs.iter_mut().for_each(|(x, y)| (*x, *y) = (f64::from(*x as f32), f64::from(*y as f32)));
    }
    pairs
}

/// What a kernel makes of the pairs.
fn compute(name: &str, ty: &str, pairs: &[(f64, f64)]) -> Vec<u8> {
    let bytes = if ty == "f32" { 4 } else { 8 };
    let (params, second) = match name {
        "pow" => (format!("{ty} {ty}"), format!("({ty}.load (i32.add (local.get $y) (local.get $at)))")),
        _ => (ty.to_owned(), String::new()),
    };
    let wasm = wat::parse_str(format!(
        r#"(module
            (import "kernel" "global_id" (func $global_id (param i32) (result i32)))
            (import "kernel" "{name}_{ty}" (func $f (param {params}) (result {ty})))
            (memory 1)
            (func (export "k") (param $n i32) (param $x i32) (param $y i32) (param $out i32) (local $at i32)
              (if (i32.lt_u (local.tee $at (call $global_id (i32.const 0))) (local.get $n)) (then
                (local.set $at (i32.mul (local.get $at) (i32.const {bytes})))
                ({ty}.store (i32.add (local.get $out) (local.get $at))
                  (call $f ({ty}.load (i32.add (local.get $x) (local.get $at))) {second}))))))"#
    ))
    .unwrap();
    let buffer = |numbers: &mut dyn Iterator<Item = f64>| {
        Arg::Buffer(match ty {
            "f32" => numbers.flat_map(|x| (x as f32).to_le_bytes()).collect(),
            _ => numbers.flat_map(f64::to_le_bytes).collect(),
        })
    };
    let args = [
        Arg::I32(pairs.len() as i32),
        buffer(&mut pairs.iter().map(|pair| pair.0)),
        buffer(&mut pairs.iter().map(|pair| pair.1)),
        Arg::Buffer(vec![0; pairs.len() * bytes]),
    ];
    let mut done = launch(&wasm, "k", [pairs.len().div_ceil(128) as u32, 1, 1], [128, 1, 1], &args);
    assert_eq!(done.trap, None, "{name}_{ty}");
    done.buffers.pop().unwrap()
}

#[test]
fn single_precision_is_right_to_the_last_place() {
    for name in FUNCTIONS {
        let pairs = pairs(name, true);
        let found = compute(name, "f32", &pairs);
        for ((x, y), found) in pairs.iter().zip(found.chunks(4)) {
            let (found, expected) = (f32::from_le_bytes(found.try_into().unwrap()), native(name, *x, *y));
            let nearest = expected as f32;
            let is_right = match nearest {
                nan if nan.is_nan() => found.to_bits() == 0x7fc0_0000,
                0.0 | f32::INFINITY | f32::NEG_INFINITY if found == nearest => found.to_bits() == nearest.to_bits(),
                _ => (f64::from(found) - expected).abs() <= ULPS_SINGLE * ulp_single(expected),
            };
            assert!(is_right, "{name}_f32({x:e}, {y:e}) is {found:e}, and should be {expected:e}");
        }
    }
}

#[test]
fn double_precision_is_right_to_the_last_place() {
    let mut constants = Consts::new().unwrap();
    for name in FUNCTIONS {
        let pairs = pairs(name, false);
        let found = compute(name, "f64", &pairs);
        for ((x, y), found) in pairs.iter().zip(found.chunks(8)) {
            let (found, expected) = (f64::from_le_bytes(found.try_into().unwrap()), native(name, *x, *y));
            let is_right = match expected {
                nan if nan.is_nan() => found.to_bits() == 0x7ff8_0000_0000_0000,
                0.0 | f64::INFINITY | f64::NEG_INFINITY if found == expected => found.to_bits() == expected.to_bits(),
                _ if !found.is_finite() => false,
                _ if !x.is_finite() || !y.is_finite() => found == expected,
                _ => {
                    let (p, truth) = (PRECISION, exact(name, *x, *y, &mut constants));
                    let off = big(found).sub(&truth, p, RoundingMode::None).abs();
                    off.cmp(&big(ULPS_DOUBLE * ulp_double(expected))).is_some_and(|order| order <= 0)
                }
            };
            assert!(is_right, "{name}_f64({x:e}, {y:e}) is {found:e}, and should be {expected:e}");
        }
    }
}

/// A counted loop is copied, and with it what a function branches on.
#[test]
fn functions_in_counted_loops_are_the_same() {
    let pairs: Vec<(f64, f64)> = (0..64).map(|n| (f64::from(n) * 1e5 - 1e6, 0.0)).collect();
    let numbers: Vec<u8> = pairs.iter().flat_map(|(x, _)| x.to_le_bytes()).collect();
    let wasm = wat::parse_str(
        r#"(module (import "kernel" "sin_f64" (func $sin (param f64) (result f64))) (memory 1)
            (func (export "k") (param $n i32) (param $x i32) (param $out i32) (local $i i32)
              (loop $l
                (f64.store (local.get $out) (call $sin (f64.load (local.get $x))))
                (local.set $x (i32.add (local.get $x) (i32.const 8)))
                (local.set $out (i32.add (local.get $out) (i32.const 8)))
                (br_if $l (i32.ne (local.tee $i (i32.add (local.get $i) (i32.const 1))) (local.get $n))))))"#,
    )
    .unwrap();
    let args = [Arg::I32(64), Arg::Buffer(numbers.clone()), Arg::Buffer(vec![0; numbers.len()])];
    let done = launch(&wasm, "k", [1; 3], [1; 3], &args);
    assert_eq!(done.trap, None);
    assert_eq!(done.buffers[1], compute("sin", "f64", &pairs));
}

fn ulp_single(x: f64) -> f64 {
    let x = (x as f32).abs().max(f32::MIN_POSITIVE);
    f64::from(f32::from_bits(x.to_bits() + 1)) - f64::from(x)
}

fn ulp_double(x: f64) -> f64 {
    let x = x.abs().max(f64::MIN_POSITIVE);
    f64::from_bits(x.to_bits() + 1) - x
}
