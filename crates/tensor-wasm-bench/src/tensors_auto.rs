//! The device `auto` on a machine with a GPU: a grid of operations, sizes and places, each on both devices and then as
//! `auto` has it. Whoever compares tensors on a GPU gets the share of decisions that were right.

use std::time::{Duration, Instant};

use tensor_wasm_tensor::{CudaDevice, DType, Device, Tensor, with_device};

use crate::tensors::middle;

/// Runs before a decision counts: `auto` has measured by then what it wants to know.
const WARM: usize = 24;

/// How long one side of a point is measured.
const SLICE: Duration = Duration::from_millis(20);

const SIZES: [usize; 6] = [16, 64, 256, 1024, 2048, 4096];

type Operation = (&'static str, fn(&Tensor, &Tensor) -> Tensor);

const OPERATIONS: [Operation; 6] = [
    ("add", |a, b| a + b),
    ("chain", |a, b| ((a * 2.0 + b) * a - 1.0).relu() * 0.5),
    ("gelu", |a, _| a.gelu()),
    ("softmax", |a, _| a.softmax(1)),
    ("sum", |a, _| a.sum(0)),
    ("matmul", |a, b| a.matmul(b)),
];

/// Where operands are before each run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    /// On the host, anew.
    New,
    /// On both sides, from earlier runs.
    Known,
    /// On the GPU alone, anew.
    There,
}

struct Point {
    name: &'static str,
    size: usize,
    place: Place,
    /// Microseconds.
    cpu: f64,
    gpu: f64,
    is_on_gpu: bool,
}

impl Point {
    fn is_right(&self) -> bool {
        let taken = if self.is_on_gpu { self.gpu } else { self.cpu };
        taken <= 1.1 * self.cpu.min(self.gpu)
    }
}

/// Operands as a place says.
fn operands(size: usize, place: Place, known: &[Tensor; 2], cuda: &Device) -> anyhow::Result<[Tensor; 2]> {
    let new = |n: usize| -> anyhow::Result<Tensor> {
        Ok(match place {
            Place::Known => known[n].clone(),
            Place::New => Tensor::from_vec(known[n].to_vec::<f32>()?, &[size, size]),
            Place::There => known[n].to(cuda),
        })
    };
    Ok([new(0)?, new(1)?])
}

/// The median of runs on a device, in microseconds, until the result is there.
fn time(
    make: impl Fn() -> anyhow::Result<[Tensor; 2]>,
    run: Operation,
    on: &Device,
    cuda: &CudaDevice,
) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    let begun = Instant::now();
    for n in 0.. {
        let [a, b] = make()?;
        cuda.synchronize()?;
        let one = Instant::now();
        // What is on a GPU is computed there unless somebody fetches it.
        with_device(on, || run.1(&a.to(on), &b.to(on)).realize())?;
        if *on != Device::Cpu {
            cuda.synchronize()?;
        }
        if n >= 3 {
            times.push(one.elapsed().as_nanos() as f64 / 1e3);
        }
        if begun.elapsed() > SLICE && times.len() >= 5 {
            break;
        }
    }
    Ok(middle(&mut times))
}

fn grid(cuda: &CudaDevice) -> anyhow::Result<Vec<Point>> {
    let gpu = Device::Cuda(cuda.clone());
    let mut points = Vec::new();
    // So much that `auto` opens the GPU for it.
    let large = Tensor::ones(&[8192, 8192], DType::F32);
    with_device(&Device::Auto, || large.matmul(&large).realize())?;
    for size in SIZES {
        let known = [1, 2].map(|seed| Tensor::uniform(&[size, size], seed, DType::F32));
        for tensor in &known {
            with_device(&Device::Cpu, || tensor.realize())?;
            // A copy on both sides.
            with_device(&gpu, || (tensor + 1.0).realize())?;
        }
        for run in OPERATIONS {
            for place in [Place::New, Place::Known, Place::There] {
                let make = || operands(size, place, &known, &gpu);
                let (on_cpu, on_gpu) = (time(make, run, &Device::Cpu, cuda)?, time(make, run, &gpu, cuda)?);
                // A plan of its own for each place: an operation more that changes nothing is not fused away.
                let mark = [Place::New, Place::Known, Place::There].iter().position(|known| *known == place);
                let marked = |a: &Tensor, b: &Tensor| {
                    let sizes = [1, 1, 1].map(|n: isize| n);
                    run.1(a, b).reshape(&[&sizes[..mark.unwrap_or(0)], &[-1]].concat())
                };
                let mut is_on_gpu = false;
                for n in 0..=WARM {
                    let [a, b] = make()?;
                    let result = marked(&a, &b);
                    is_on_gpu = with_device(&Device::Auto, || result.explain())?.device.starts_with("cuda");
                    if n < WARM {
                        with_device(&Device::Auto, || result.realize())?;
                    }
                }
                points.push(Point { name: run.0, size, place, cpu: on_cpu, gpu: on_gpu, is_on_gpu });
            }
        }
    }
    Ok(points)
}

fn share_of(points: &[Point]) -> f64 {
    points.iter().filter(|point| point.is_right()).count() as f64 / points.len().max(1) as f64
}

pub(crate) fn share(cuda: &CudaDevice) -> anyhow::Result<f64> {
    Ok(share_of(&grid(cuda)?))
}

pub(crate) fn print() -> anyhow::Result<()> {
    let cuda = match Device::named("cuda") {
        Ok(Device::Cuda(cuda)) => cuda,
        Ok(other) => anyhow::bail!("{other:?} is no GPU"),
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let points = grid(&cuda)?;
    println!("operation    size  operands       cpu µs       gpu µs  taken");
    for point in &points {
        let Point { name, size, place, cpu, gpu, is_on_gpu } = point;
        let (on, wrong) = (if *is_on_gpu { "gpu" } else { "cpu" }, if point.is_right() { "" } else { "  wrong" });
        println!("{name:<10} {size:>6}  {:<8} {cpu:>12.1} {gpu:>12.1}  {on}{wrong}", format!("{place:?}"));
    }
    println!("{:.3} of the decisions are within a tenth of the better device", share_of(&points));
    Ok(())
}
