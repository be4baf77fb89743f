//! Products, attention and softmax on a GPU: what is measured is checked first, elements of it against sums in double
//! precision. `cargo bench -p tensor-wasm-tensor --features cuda --bench cores`, and the same with
//! `TENSOR_WASM_CUBLASLT=none` for what our own kernels do; names of rows, or parts of them, choose some.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::cast_precision_loss, reason = "a program for people")]

use std::time::{Duration, Instant};

use tensor_wasm_tensor::{DType, Device, Result, Tensor, set_tf32};

/// How long each row is measured, and how many runs are sent before waiting for them.
const SLICE: Duration = Duration::from_millis(300);
const BATCH: u32 = 10;

/// Elements that are compared.
const SAMPLES: usize = 200;

struct Row {
    name: String,
    run: Box<dyn Fn() -> Tensor>,
    /// What an element is, in double precision, by its row and column of the last matrix.
    exact: Box<dyn Fn(usize, usize) -> f64>,
    tolerance: f64,
    flops: f64,
    bytes: f64,
    is_tf32: bool,
}

fn main() {
    let device = match Device::named("cuda") {
        Ok(device) => device,
        Err(error) => return println!("skipped: {error}"),
    };
    let chosen: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let mut is_right = true;
    for row in rows(&device) {
        if !chosen.is_empty() && !chosen.iter().any(|part| row.name.contains(part)) {
            continue;
        }
        match measure(&row, &device) {
            Ok(right) => is_right &= right,
            Err(error) => {
                is_right = false;
                println!("{:<34} failed: {error}", row.name);
            }
        }
    }
    assert!(is_right, "some results are wrong");
}

fn measure(row: &Row, device: &Device) -> Result<bool> {
    set_tf32(row.is_tf32);
    let explained = (row.run)().explain()?;
    let by = explained.kernels.iter().find_map(|kernel| kernel.by.clone()).unwrap_or_default();
    let made = (row.run)();
    let found = made.to_f64()?;
    let shape = made.shape();
    let (rows, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
    let mut worst = 0.0_f64;
    for sample in 0..SAMPLES {
        let number = sample.wrapping_mul(2_654_435_761) >> 3;
        // The last one is the last element.
        let at = if sample + 1 == SAMPLES { rows * columns - 1 } else { number % (rows * columns) };
        let exact = (row.exact)(at / columns, at % columns);
        let error = (found[at] - exact).abs() / exact.abs().max(1.0);
        worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
    }
    let synchronize = || match device {
        Device::Cuda(cuda) => cuda.synchronize(),
        Device::Cpu | Device::Auto => Ok(()),
    };
    for _ in 0..3 {
        (row.run)().realize()?;
    }
    synchronize()?;
    let (begun, mut times) = (Instant::now(), Vec::new());
    while begun.elapsed() < SLICE || times.len() < 5 {
        let one = Instant::now();
        for _ in 0..BATCH {
            (row.run)().realize()?;
        }
        synchronize()?;
        times.push(one.elapsed().as_secs_f64() / f64::from(BATCH));
    }
    times.sort_by(f64::total_cmp);
    let time = times[times.len() / 2];
    let is_right = worst <= row.tolerance;
    println!(
        "{:<34} {:>9.1} µs {:>7.1} TFLOP/s {:>6.2} TB/s  error {worst:.1e} {}  {by}",
        row.name,
        time * 1e6,
        row.flops / time / 1e12,
        row.bytes / time / 1e12,
        if is_right { "right" } else { "WRONG" },
    );
    set_tf32(false);
    Ok(is_right)
}

/// A tensor that is on the device, and its elements.
fn made(sizes: &[usize], seed: u64, dtype: DType, device: &Device) -> (Tensor, Vec<f64>) {
    let here = Tensor::normal(sizes, seed, DType::F32).cast(dtype);
    here.realize().unwrap();
    let there = here.to(device);
    there.realize().unwrap();
    (there, here.to_f64().unwrap())
}

fn gelu(x: f64) -> f64 {
    // By the series of the error function, which converges for what a sum of this size is cut to.
    let z = (x / std::f64::consts::SQRT_2).clamp(-5.0, 5.0);
    let (mut term, mut sum) = (z, z);
    for n in 1..200 {
        term *= -z * z / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    0.5 * x * (1.0 + sum * std::f64::consts::FRAC_2_SQRT_PI)
}

fn rows(device: &Device) -> Vec<Row> {
    let mut rows = Vec::new();
    let cases = [
        ("bf16", DType::BF16, false, 1e-2),
        ("f16", DType::F16, false, 3e-3),
        ("tf32", DType::F32, true, 5e-2),
        ("f32", DType::F32, false, 1e-4),
    ];
    for (name, dtype, is_tf32, tolerance) in cases {
        for (m, n, k) in [(4096, 4096, 4096), (4000, 4008, 4016), (1001, 1003, 1005), (256, 256, 256)] {
            rows.push(product(
                &format!("matmul/{m}x{n}x{k}/{name}"),
                (m, n, k),
                dtype,
                [false; 2],
                is_tf32,
                tolerance,
                device,
            ));
        }
    }
    for (name, is_turned) in [("t(x) y", [true, false]), ("x t(y)", [false, true]), ("t(x) t(y)", [true, true])] {
        rows.push(product(
            &format!("matmul/4096/bf16 {name}"),
            (4096, 4096, 4096),
            DType::BF16,
            is_turned,
            false,
            1e-2,
            device,
        ));
    }
    rows.push(with_gelu(device));
    for (causal, width) in [(false, 128), (true, 128), (false, 64), (false, 80), (true, 256)] {
        rows.push(attention(4096, width, DType::BF16, causal, device));
    }
    rows.push(attention(1000, 128, DType::BF16, true, device));
    for (causal, width) in [(false, 128), (true, 128), (false, 64)] {
        rows.push(attention(4096, width, DType::F32, causal, device));
    }
    rows.push(softmax(device));
    rows
}

fn product(
    name: &str,
    (m, n, k): (usize, usize, usize),
    dtype: DType,
    is_turned: [bool; 2],
    is_tf32: bool,
    tolerance: f64,
    device: &Device,
) -> Row {
    let sizes =
        |rows: usize, columns: usize, is_turned: bool| if is_turned { [columns, rows] } else { [rows, columns] };
    let (x, left) = made(&sizes(m, k, is_turned[0]), 1, dtype, device);
    let (y, right) = made(&sizes(k, n, is_turned[1]), 2, dtype, device);
    let run = move || {
        let turned = |tensor: &Tensor, is_turned: bool| if is_turned { tensor.t() } else { tensor.clone() };
        turned(&x, is_turned[0]).matmul(&turned(&y, is_turned[1]))
    };
    let exact = move |row: usize, column: usize| {
        let left_at = |step: usize| if is_turned[0] { step * m + row } else { row * k + step };
        let right_at = |step: usize| if is_turned[1] { column * k + step } else { step * n + column };
        (0..k).map(|step| left[left_at(step)] * right[right_at(step)]).sum()
    };
    let flops = 2.0 * (m * n * k) as f64;
    let bytes = ((m * k + k * n + m * n) * dtype.size()) as f64;
    Row { name: name.to_owned(), run: Box::new(run), exact: Box::new(exact), tolerance, flops, bytes, is_tf32 }
}

fn with_gelu(device: &Device) -> Row {
    let size = 4096;
    let (x, left) = made(&[size, size], 1, DType::BF16, device);
    let (y, right) = made(&[size, size], 2, DType::BF16, device);
    let (bias, added) = made(&[size], 3, DType::BF16, device);
    let exact = move |row: usize, column: usize| {
        let sum: f64 = (0..size).map(|step| left[row * size + step] * right[step * size + column]).sum();
        gelu(sum + added[column])
    };
    Row {
        name: "matmul_bias_gelu/4096/bf16".to_owned(),
        run: Box::new(move || (x.matmul(&y) + &bias).gelu()),
        exact: Box::new(exact),
        tolerance: 2e-2,
        flops: 2.0 * (size as f64).powi(3),
        bytes: 6.0 * (size as f64).powi(2),
        is_tf32: false,
    }
}

fn attention(length: usize, width: usize, dtype: DType, causal: bool, device: &Device) -> Row {
    let heads = 16;
    let sizes = [heads, length, width];
    let (q, queries) = made(&sizes, 1, dtype, device);
    let (k, keys) = made(&sizes, 2, dtype, device);
    let (v, values) = made(&sizes, 3, dtype, device);
    // The first head.
    let exact = move |row: usize, column: usize| {
        let seen = if causal { row + 1 } else { length };
        let dot = |key: usize| (0..width).map(|n| queries[row * width + n] * keys[key * width + n]).sum::<f64>();
        let scores: Vec<f64> = (0..seen).map(|key| dot(key) / (width as f64).sqrt()).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let powers: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let whole: f64 = powers.iter().sum();
        powers.iter().enumerate().map(|(key, power)| power / whole * values[key * width + column]).sum()
    };
    let part = if causal { 0.5 } else { 1.0 };
    Row {
        name: format!("attention/{heads}x{length}x{width}/{dtype}{}", if causal { " causal" } else { "" }),
        run: Box::new(move || q.attention(&k, &v, causal)),
        exact: Box::new(exact),
        tolerance: if dtype == DType::F32 { 1e-5 } else { 1e-2 },
        flops: 4.0 * part * (heads * length * width) as f64 * length as f64,
        bytes: (4 * dtype.size() * heads * length * width) as f64,
        is_tf32: false,
    }
}

fn softmax(device: &Device) -> Row {
    let (rows, columns) = (8192, 4096);
    let (x, elements) = made(&[rows, columns], 1, DType::BF16, device);
    let exact = move |row: usize, column: usize| {
        let row = &elements[row * columns..(row + 1) * columns];
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let whole: f64 = row.iter().map(|x| (x - largest).exp()).sum();
        (row[column] - largest).exp() / whole
    };
    Row {
        name: "softmax/8192x4096/bf16".to_owned(),
        run: Box::new(move || x.softmax(1)),
        exact: Box::new(exact),
        tolerance: 1e-4,
        flops: 0.0,
        bytes: (4 * rows * columns) as f64,
        is_tf32: false,
    }
}
