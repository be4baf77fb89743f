//! How fast this machine is, measured with tensors: some tens of milliseconds, besides what compiling kernels and
//! loading the GPU's library take.

use std::time::Instant;

use super::Machine;
use super::cost::{COPIES, Link, RATES, Speeds};
use crate::cuda::{CudaBuffer, CudaDevice};
use crate::device::{Device, with_device};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

/// Runs of something short; the shortest counts.
const SHORT_RUNS: usize = 20;
const LONG_RUNS: usize = 4;

/// Elements of sums from which rates of moving bytes are known: three times as many floats are moved.
const CPU_ELEMENTS: [usize; RATES] = [1 << 16, 1 << 20, 1 << 22];
const GPU_ELEMENTS: [usize; RATES] = [1 << 18, 1 << 21, 1 << 25];

/// Sizes of products, as large as they have to be to be as fast as products are.
const CPU_PRODUCT: usize = 512;
const GPU_PRODUCT: usize = 2048;

/// Elements of the copies that say how fast the link is.
const COPIED: [usize; COPIES] = [1 << 8, 1 << 15, 1 << 19, 1 << 22];

pub(super) fn machine(device: &CudaDevice) -> Result<Machine> {
    let cpu = with_device(&Device::Cpu, || speeds(&CPU_ELEMENTS, CPU_PRODUCT))?;
    let gpu = with_device(&Device::Cuda(device.clone()), || speeds(&GPU_ELEMENTS, GPU_PRODUCT))?;
    Ok(Machine { cpu, gpu, link: link(device)? })
}

/// Seconds of the shortest of some runs, after one that makes everything ready and one more, from which on a GPU has a
/// graph.
fn shortest(runs: usize, make: impl Fn() -> Tensor) -> Result<f64> {
    let mut best = f64::INFINITY;
    for n in 0..runs + 2 {
        let made = make();
        let begun = Instant::now();
        made.value()?.storage.wait().map_err(|what| crate::TensorError::new("auto", what, made.node.at))?;
        if n > 1 {
            best = best.min(begun.elapsed().as_secs_f64());
        }
    }
    Ok(best)
}

fn random(sizes: &[usize], dtype: DType) -> Result<Tensor> {
    let made = Tensor::uniform(sizes, 1, dtype);
    made.realize()?;
    Ok(made)
}

#[expect(clippy::cast_precision_loss, reason = "a measurement")]
fn speeds(elements: &[usize; RATES], product: usize) -> Result<Speeds> {
    let (one, square) = (random(&[64], DType::F32)?, random(&[32, 32], DType::F32)?);
    let run = shortest(SHORT_RUNS, || &one + 1.0)?;
    // None of them can be part of another.
    let chain = || (0..4).fold(&square + 1.0, |x, _| (&x + 1.0).t() + &x);
    let count = chain().explain()?.kernels.len().max(2) as f64;
    let kernel = ((shortest(SHORT_RUNS, chain)? - run) / (count - 1.0)).max(1e-8);
    let run = (run - kernel).max(1e-8);
    let mut rates = [(0.0, 0.0); RATES];
    for (rate, count) in rates.iter_mut().zip(elements) {
        let (a, b) = (random(&[*count], DType::F32)?, random(&[*count], DType::F32)?);
        let bytes = 3.0 * 4.0 * *count as f64;
        let seconds = shortest(LONG_RUNS, || &a + &b)?;
        *rate = (bytes, bytes / (seconds - run).max(1e-9));
    }
    // Eight functions that cost twelve simple operations each, beside which bytes do not matter; of so many elements
    // that all threads of a CPU are at work.
    let x = random(&[elements[1]], DType::F32)?;
    let functions = shortest(LONG_RUNS, || (0..8).fold(x.clone(), |x, _| x.tanh()))?;
    let operations = 8.0 * 12.0 * elements[1] as f64 / (functions - run).max(1e-9);
    let products = |dtype: DType, size: usize| {
        let (a, b) = (random(&[size, size], dtype)?, random(&[size, size], dtype)?);
        let seconds = shortest(LONG_RUNS, || a.matmul(&b))?;
        Ok(2.0 * (size as f64).powi(3) / (seconds - run).max(1e-9))
    };
    Ok(Speeds {
        run,
        kernel,
        rates,
        operations,
        products_f32: products(DType::F32, product)?,
        products_f64: products(DType::F64, product / 2)?,
        products_half: products(DType::BF16, product)?,
    })
}

#[expect(clippy::cast_precision_loss, reason = "a measurement")]
fn link(device: &CudaDevice) -> Result<Link> {
    let mut link = Link { to_gpu: [(0.0, 0.0); COPIES], from_gpu: [(0.0, 0.0); COPIES] };
    for (n, elements) in COPIED.into_iter().enumerate() {
        let here = with_device(&Device::Cpu, || random(&[elements], DType::F32))?;
        let value = here.value()?;
        let failed = |what| crate::TensorError::new("auto", what, here.node.at);
        let mut best = [f64::INFINITY; 2];
        for _ in 0..LONG_RUNS + 1 {
            let begun = Instant::now();
            let there = CudaBuffer::write(device, value.storage.cpu().map_err(failed)?).map_err(failed)?;
            there.wait().map_err(failed)?;
            best[0] = best[0].min(begun.elapsed().as_secs_f64());
            let begun = Instant::now();
            there.read().map_err(failed)?;
            best[1] = best[1].min(begun.elapsed().as_secs_f64());
        }
        let bytes = 4.0 * elements as f64;
        (link.to_gpu[n], link.from_gpu[n]) = ((bytes, best[0]), (bytes, best[1]));
    }
    Ok(link)
}
