//! Operations along lines: extremes, running sums, sorting, and sums of what indices choose. Lengths are those around
//! which teams, parts and tiles change.

use super::*;
use crate::cuda::matrix::tests::{assemble, image};
use crate::graph::op::Op;
use crate::schedule::plan::{BufferView, Source, SpecialKernel};
use crate::shape::{Layout, Shape};

const TYPES: [DType; 7] = [DType::U8, DType::I32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];

/// The same on both devices. Kernels by themselves are what they are whether others are fused or not.
fn same(what: &str, tolerance: f64, make: impl Fn() -> Tensor) {
    same_in(&[Mode::Fused], &DEVICE, what, tolerance, make);
}

/// Two types, of which the next has others; of what is long, one of 32 bits and one of 64.
fn types(sizes: &[usize], seed: u64) -> [DType; 2] {
    if sizes.iter().product::<usize>() > 2_000 {
        return [DType::F32, DType::I64];
    }
    [0, 1].map(|more| TYPES[(2 * usize::try_from(seed).unwrap() + more) % TYPES.len()])
}

/// Elements of which many are the same, and of floats some no numbers.
fn elements(sizes: &[usize], seed: u64, dtype: DType) -> Tensor {
    let count: usize = sizes.iter().product();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let numbers: Vec<f64> = (0..count)
        .map(|_| match random() % 97 {
            0 if dtype.is_float() => f64::NAN,
            1 if dtype.is_float() => f64::NEG_INFINITY,
            2 => -0.0,
            n => f64::from(u32::try_from(n).unwrap()) - if dtype == DType::U8 { 0.0 } else { 40.0 },
        })
        .collect();
    let made = Tensor::from_slice(&numbers, sizes).cast(dtype);
    made.realize().unwrap();
    made
}

#[test]
fn extremes_are_where_they_are_on_a_cpu() {
    let sizes: [&[usize]; 13] = [
        &[1],
        &[7],
        &[8],
        &[9],
        &[3, 31],
        &[33, 5],
        &[2, 65, 3],
        &[5, 257],
        &[1, 2049],
        &[5000, 2],
        &[2, 4099],
        &[300, 40],
        &[0, 3],
    ];
    for (seed, sizes) in (1..).zip(sizes) {
        for dtype in types(sizes, seed) {
            let x = elements(sizes, seed, dtype);
            for axis in 0..sizes.len().cast_signed() {
                if sizes[axis.unsigned_abs()] == 0 {
                    continue;
                }
                same(&format!("argmax {sizes:?} {dtype} {axis}"), 0.0, || x.argmax(axis));
                same(&format!("argmin {sizes:?} {dtype} {axis}"), 0.0, || x.argmin(axis));
            }
        }
    }
    // However a line lies.
    let x = elements(&[40, 3, 70], 99, DType::F32);
    same("turned", 0.0, || x.permute(&[2, 0, 1]).argmax(0));
    same("backwards", 0.0, || x.flip(2).argmax(2));
    same("every third", 0.0, || x.slice(2, None, None, 3).argmin(-1));
    same("of one element", 0.0, || x.narrow(2, 5, 1).expand(&[40, 3, 3000]).argmax(-1));
    // All the same, and nothing but NaN.
    same("equal", 0.0, || Tensor::ones(&[3, 5000], DType::F32).argmax(1));
    same("none is a number", 0.0, || Tensor::full(&[3, 5000], f64::NAN, DType::F64).argmin(1));
    let least = Tensor::full(&[2, 5000], f64::NEG_INFINITY, DType::F32);
    same("the least", 0.0, || least.argmax(1));
    let lowest = Tensor::from_slice(&[i64::MIN, i64::MAX, i64::MAX, i64::MIN], &[4]);
    same("the ends of integers", 0.0, || lowest.argmax(0) * 10 + lowest.argmin(0));
}

/// Integers that small halves have too, so that whoever adds them up in another order has the same.
fn small(sizes: &[usize], seed: u64, dtype: DType) -> Tensor {
    let made = (Tensor::uniform(sizes, seed, DType::F32) * 5.0).floor().cast(dtype);
    made.realize().unwrap();
    made
}

#[test]
fn running_sums_are_those_of_a_cpu() {
    let sizes: [&[usize]; 14] = [
        &[1],
        &[7],
        &[8],
        &[9],
        &[3, 31],
        &[33, 5],
        &[2, 65, 3],
        &[5, 257],
        &[1, 2049],
        &[5000, 2],
        &[2, 8193],
        &[300, 40],
        &[0, 3],
        &[4, 0],
    ];
    for (seed, sizes) in (1..).zip(sizes) {
        for dtype in types(sizes, seed) {
            let x = small(sizes, seed, dtype);
            for axis in 0..sizes.len().cast_signed() {
                same(&format!("{sizes:?} {dtype} {axis}"), 0.0, || x.cumsum(axis));
            }
        }
        let x = normal(sizes, seed, DType::F64);
        let axis = sizes.len().cast_signed() - 1;
        same(&format!("{sizes:?} fractions"), 1e-13, || x.cumsum(axis));
        let at = std::panic::Location::caller();
        same(&format!("{sizes:?} from the end"), 1e-13, || x.running_sum(axis.unsigned_abs(), true, at));
        same(&format!("{sizes:?} from the end, along the first"), 1e-13, || x.running_sum(0, true, at));
    }
    let x = small(&[40, 3, 70], 99, DType::F32);
    same("turned", 0.0, || x.permute(&[2, 0, 1]).cumsum(0));
    same("turned, along the last", 0.0, || x.permute(&[2, 0, 1]).cumsum(2));
    same("backwards", 0.0, || x.flip(2).cumsum(2));
    same("of one element", 0.0, || x.narrow(2, 5, 1).expand(&[40, 3, 300]).cumsum(-1));
    // What is no number stays from there on, and what comes before knows nothing of it.
    for (place, what) in [(0, f32::NAN), (2_500, f32::INFINITY), (9_000, f32::NAN), (12_287, f32::NEG_INFINITY)] {
        let mut elements = vec![1.0_f32; 12_288];
        elements[place] = what;
        let x = Tensor::from_slice(&elements, &[12_288]);
        same(&format!("{what} at {place}"), 0.0, || x.cumsum(0));
    }
    // Large ones that others take away again: there is double precision in between.
    let x = Tensor::from_slice(&[1.0_f32, 1e9, 1.0, -1e9, 1.0], &[5]);
    same("in double precision", 0.0, || x.cumsum(0));
}

#[test]
fn what_is_sorted_is_in_the_order_of_a_cpu() {
    let sizes: [&[usize]; 12] =
        [&[1], &[7], &[8], &[9], &[3, 31], &[33, 5], &[2, 65, 3], &[2, 2047], &[2049, 2], &[6000], &[0, 3], &[4, 0]];
    for (seed, sizes) in (1..).zip(sizes) {
        for dtype in types(sizes, seed) {
            let x = elements(sizes, seed, dtype);
            for axis in 0..sizes.len().cast_signed() {
                same(&format!("{sizes:?} {dtype} {axis}"), 0.0, || x.argsort(axis, false));
                same(&format!("{sizes:?} {dtype} {axis} descending"), 0.0, || x.argsort(axis, true));
            }
        }
    }
    let x = elements(&[40, 3, 70], 99, DType::F32);
    same("turned", 0.0, || x.permute(&[2, 0, 1]).argsort(0, false));
    same("backwards", 0.0, || x.flip(2).argsort(2, true));
    same("of one element", 0.0, || x.narrow(2, 5, 1).expand(&[40, 3, 300]).argsort(-1, true));
    let ends = Tensor::from_slice(&[i64::MIN, -1, 0, i64::MAX, 1, i64::MIN, i64::MAX], &[7]);
    let narrow = Tensor::from_slice(&[i32::MIN, -1, 0, i32::MAX, 1, i32::MIN, i32::MAX], &[7]);
    let tiny = Tensor::from_slice(&[-1e-42_f32, 1e-42, 0.0, -0.0, f32::MIN_POSITIVE, -1e-45, f32::INFINITY], &[7]);
    for is_descending in [false, true] {
        same("ends of wide integers", 0.0, || ends.argsort(0, is_descending));
        same("ends of integers", 0.0, || narrow.argsort(0, is_descending));
        same("next to nothing", 0.0, || tiny.argsort(0, is_descending));
        same("whether it is so", 0.0, || ends.lt(0_i64).argsort(0, is_descending));
    }
    // Runs that do not overlap at all, that are one after the other already, and several passes over an odd number.
    let up = Tensor::arange(0, 5_000, 1, DType::I32);
    same("sorted", 0.0, || up.argsort(0, false));
    same("turned round", 0.0, || up.argsort(0, true));
    same("all the same", 0.0, || Tensor::ones(&[5_000], DType::F32).argsort(0, true));
}

/// Indices of which some are counted from the end, and every other one is the same.
fn chosen(sizes: &[usize], seed: u64, size: usize) -> Tensor {
    let x = Tensor::uniform(sizes, seed, DType::F64);
    let some = ((&x * (2 * size) as f64).floor() - size as f64).cast(DType::I64);
    let is_some = ((&x * 64.0).floor() % 2.0).lt(1.0);
    let made = is_some.where_(&some, i64::try_from(size / 2).unwrap());
    made.realize().unwrap();
    made
}

#[test]
fn what_indices_choose_is_added_up_as_on_a_cpu() {
    // Values, the axis, and its size in the result; the second half is more than is looked through.
    let cases: [(&[usize], isize, usize); 12] = [
        (&[1], 0, 1),
        (&[64, 3], 0, 5),
        (&[2, 65, 3], 1, 7),
        (&[3, 500], 1, 4),
        (&[0, 3], 0, 2),
        (&[4, 0], 0, 2),
        (&[513], 0, 3),
        (&[600, 3], 0, 1),
        (&[2, 700, 3], 1, 900),
        (&[3, 513], 1, 40),
        (&[2, 2, 1030], 2, 5),
        (&[5, 2500], 1, 20),
    ];
    for (seed, (sizes, axis, size)) in (1..).zip(cases) {
        let index = chosen(sizes, seed, size);
        for dtype in types(sizes, seed) {
            let x = small(sizes, seed, dtype);
            // Halves are rounded each time they are added, so that those of many depend on the order: few are not zero.
            let is_half = matches!(dtype, DType::F16 | DType::BF16);
            let x = if is_half { x.gt(3.0).cast(dtype) } else { x };
            same(&format!("{sizes:?} {axis} {size} {dtype}"), 0.0, || x.scatter_add(axis, &index, size));
        }
        let x = normal(sizes, seed, DType::F64);
        same(&format!("{sizes:?} {axis} {size} fractions"), 1e-13, || x.scatter_add(axis, &index, size));
    }
}

#[test]
fn gradients_of_rows_that_are_chosen_are_those_of_a_cpu() {
    for (rows, width, words) in [(700, 5, 90), (1_300, 3, 2_000), (600, 9, 1)] {
        let (index, x) = (chosen(&[rows, 1], 7, words), normal(&[rows, width], 8, DType::F32));
        let make = || x.scatter_add(0, &index.expand(&[rows, width]), words);
        same(&format!("{rows} {width} {words}"), 1e-5, make);
        // The same bits every time.
        let bits = || with_device(&DEVICE, || make().to_vec::<f32>().unwrap()).into_iter().map(f32::to_bits);
        assert!(bits().eq(bits()), "{rows} {width} {words}");
        // Along the other axis, with one line of indices for all.
        let turned = || x.t().scatter_add(1, &index.t().expand(&[width, rows]), words);
        same(&format!("{rows} {width} {words} turned"), 1e-5, turned);
        let kernels = with_device(&DEVICE, || make().explain().unwrap().kernels);
        let launches =
            kernels.iter().find_map(|kernel| kernel.launches.clone().filter(|_| kernel.kind == "scatter_add"));
        assert!(launches.is_some_and(|launches| launches.len() > 3), "indices are sorted");
    }
    let index = Tensor::from_slice(&(0..600).map(|n| if n == 555 { 9 } else { n % 9 }).collect::<Vec<i64>>(), &[600]);
    let x = normal(&[600], 1, DType::F32);
    same("an index beyond the end", 0.0, || x.scatter_add(0, &index, 9));
    same("and none", 1e-5, || x.scatter_add(0, &index, 10));
}

#[test]
fn kernels_along_lines_are_assembled_without_spills() {
    let view = |leaf: usize, sizes: &[usize], dtype: DType| {
        let layout = Layout::contiguous(Shape::new(sizes).unwrap());
        BufferView { source: Source::Leaf(leaf), layout, dtype }
    };
    let check = |name: &str, op: Op, inputs: Vec<BufferView>, sizes: &[usize], dtype: DType| {
        let shape = Shape::new(sizes).unwrap();
        let kernel = SpecialKernel { op, inputs, shape, dtype, slot: 0, node: 0, epilogue: None };
        for (n, lowered) in special::lower(&kernel).unwrap().kernels.iter().enumerate() {
            assemble(&image(&lowered.program), &format!("{name}_{n}"), false);
        }
    };
    let lines: [(&str, &[usize], usize); 4] = [
        ("rows", &[4096, 4096], 1),
        ("columns", &[4096, 4096], 0),
        ("long", &[2, 5_000_000], 1),
        ("short", &[9999, 33], 1),
    ];
    for (name, sizes, axis) in lines {
        for dtype in [DType::F32, DType::F64, DType::F16] {
            let view = view(0, sizes, dtype);
            let mut one = sizes.to_vec();
            one[axis] = 1;
            let name = |what: &str| format!("{what}_{name}_{dtype}");
            check(&name("argmax"), Op::ArgReduce { axis, largest: true }, vec![view], &one, DType::I64);
            check(&name("cumsum"), Op::Cumsum { axis, is_reverse: true }, vec![view], sizes, dtype);
            check(&name("argsort"), Op::ArgSort { axis, is_descending: true }, vec![view], sizes, DType::I64);
        }
    }
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let (values, mut index) = (view(0, &[50_000, 256], dtype), view(1, &[50_000, 1], DType::I64));
        index.layout = index.layout.expand(values.layout.shape);
        let op = Op::ScatterAdd { axis: 0, size: 10_000 };
        check(&format!("embedding_{dtype}"), op, vec![values, index], &[10_000, 256], dtype);
    }
}
