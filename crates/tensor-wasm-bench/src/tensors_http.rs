//! What a function pays for its tensors on a GPU, beside a program that uses the library: `softmax(a @ b)` of 256²,
//! read back by both. The server is the real one, its function that of `guests/tensor-examples`.

use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tensor_wasm_tensor::{DType, Device, Tensor, with_device};

use crate::report::{Goal, Report, root};
use crate::served::{self, Client, serve};
use crate::tensors::middle;

const SIZE: usize = 256;

/// Products within one call, where that is measured without what is around it.
const WITHIN: usize = 200;

/// Requests of one round, and rounds, of both sides in turns.
const CALLS: usize = 100;
const ROUNDS: usize = 5;

const TENANT: &str = "default";

/// The same as the function's `rounds`, in a program: the sum of the last row, and microseconds of each.
fn by_library(seed: u64, times: usize) -> tensor_wasm_tensor::Result<(f32, Vec<f64>)> {
    let [a, b] = [seed, seed + 1].map(|seed| Tensor::normal(&[SIZE, SIZE], seed, DType::F32));
    a.realize()?;
    b.realize()?;
    let (mut sum, mut took) = (0.0, Vec::with_capacity(times));
    for _ in 0..times {
        let one = Instant::now();
        let all = std::hint::black_box(a.matmul(&b).softmax(-1).to_vec::<f32>()?);
        took.push(one.elapsed().as_nanos() as f64 / 1e3);
        sum = all.rchunks_exact(SIZE).next().map_or(0.0, |row| row.iter().sum());
    }
    Ok((sum, took))
}

/// Rows of a softmax sum up to one. Both sides look at one of them: adding up all elements takes as long as computing
/// them.
fn check_row(sum: f64) -> anyhow::Result<()> {
    ensure!((sum - 1.0).abs() < 1e-4, "a row does not sum up to one: {sum}");
    Ok(())
}

/// A call of the function: what it says of each of its products, in microseconds, and what the whole call took.
fn by_function(client: &mut Client, seed: u64, times: usize) -> anyhow::Result<(Vec<f64>, f64)> {
    let began = Instant::now();
    let result = client.call(TENANT, "tensors", "rounds", &json!([SIZE, seed, times]))?;
    let whole = began.elapsed().as_nanos() as f64 / 1e3;
    let ok = result.get("ok").with_context(|| result.to_string())?;
    let sum = ok.get(0).and_then(Value::as_f64).with_context(|| result.to_string())?;
    check_row(sum)?;
    let took = ok.get(1).and_then(Value::as_array).with_context(|| result.to_string())?;
    Ok((took.iter().filter_map(Value::as_f64).map(|nanos| nanos / 1e3).collect(), whole))
}

pub(crate) fn compare(device: &Device, report: &mut Report) -> anyhow::Result<()> {
    let exe = served::exe()?;
    let data = tempfile::tempdir()?;
    let server = serve(&exe, &data.path().join("data"))?;
    let file = root().join("target/guests/tensor-examples.wasm");
    served::deploy(&exe, &server.addr, TENANT, "tensors", &file)?;
    let mut client = Client::connect(&server.addr)?;
    let (mut within, mut whole, mut own_within, mut own_whole) = (vec![], vec![], vec![], vec![]);
    for round in 0..=ROUNDS {
        let mut calls = Vec::new();
        for call in 0..CALLS {
            calls.push(by_function(&mut client, 2 * call as u64, 1)?.1);
        }
        let (mut took, _) = by_function(&mut client, 1, WITHIN)?;
        let mut own_calls = Vec::new();
        for call in 0..CALLS {
            let began = Instant::now();
            check_row(with_device(device, || by_library(2 * call as u64, 1))?.0.into())?;
            own_calls.push(began.elapsed().as_nanos() as f64 / 1e3);
        }
        let (_, mut own_took) = with_device(device, || by_library(1, WITHIN))?;
        // The first one warms up.
        if round > 0 {
            within.push(middle(&mut took));
            whole.push(middle(&mut calls));
            own_within.push(middle(&mut own_took));
            own_whole.push(middle(&mut own_calls));
        }
    }
    let what = "softmax(a @ b) of 256² by a function, read back by it, against the same by a program";
    let baseline = (middle(&mut own_within), "library");
    report.ratio("tensors_cuda/guest/256", what, middle(&mut within), baseline, "us", Goal::AtMost(1.3));
    let what =
        "a whole request over HTTP for one of them, its matrices made from a seed, against the same by a program";
    let baseline = (middle(&mut own_whole), "library");
    report.ratio("tensors_cuda/guest_http/256", what, middle(&mut whole), baseline, "us", Goal::AtMost(1.3));
    Ok(())
}
