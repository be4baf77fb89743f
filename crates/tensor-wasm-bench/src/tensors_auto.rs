//! The device `auto` on a machine with a GPU: a grid of operations, sizes and places, each on both devices and then as
//! `auto` has it. Whoever compares tensors on a GPU gets the share of decisions that were right.

use std::time::{Duration, Instant};

use tensor_wasm_tensor::{CudaDevice, DType, Device, Tensor, with_device};

use crate::tensors::middle;

/// Runs before a decision counts: `auto` has measured by then what it wants to know.
const WARM: usize = 24;

/// Runs more while it is measuring.
const TRIALS_MAX: usize = 8;

/// How long one side of a point is measured.
const SLICE: Duration = Duration::from_millis(20);

const SIZES: [usize; 6] = [16, 64, 256, 1024, 2048, 4096];

/// A name, and what is made of one operand or of two. Only what is used is copied.
#[derive(Clone, Copy)]
enum Operation {
    OfOne(&'static str, fn(&Tensor) -> Tensor),
    OfTwo(&'static str, fn(&Tensor, &Tensor) -> Tensor),
}

const OPERATIONS: [Operation; 6] = [
    Operation::OfTwo("add", |a, b| a + b),
    Operation::OfTwo("chain", |a, b| ((a * 2.0 + b) * a - 1.0).relu() * 0.5),
    Operation::OfOne("gelu", |a| a.gelu()),
    Operation::OfOne("softmax", |a| a.softmax(1)),
    Operation::OfOne("sum", |a| a.sum(0)),
    Operation::OfTwo("matmul", |a, b| a.matmul(b)),
];

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Operation::OfOne(name, _) | Operation::OfTwo(name, _) => name,
        }
    }

    fn count(self) -> usize {
        match self {
            Operation::OfOne(..) => 1,
            Operation::OfTwo(..) => 2,
        }
    }

    fn of(self, operands: &[Tensor]) -> Tensor {
        match self {
            Operation::OfOne(_, make) => make(&operands[0]),
            Operation::OfTwo(_, make) => make(&operands[0], &operands[1]),
        }
    }
}

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
    /// Of what is taken, as `explain` says it.
    why: String,
}

impl Point {
    fn is_right(&self) -> bool {
        let taken = if self.is_on_gpu { self.gpu } else { self.cpu };
        taken <= 1.1 * self.cpu.min(self.gpu)
    }
}

/// So many operands as a place says.
fn operands(size: usize, count: usize, place: Place, known: &[Tensor], cuda: &Device) -> anyhow::Result<Vec<Tensor>> {
    let new = |known: &Tensor| -> anyhow::Result<Tensor> {
        Ok(match place {
            Place::Known => known.clone(),
            Place::New => Tensor::from_vec(known.to_vec::<f32>()?, &[size, size]),
            Place::There => known.to(cuda),
        })
    };
    known.iter().take(count).map(new).collect()
}

/// The median of runs on a device, in microseconds, until the result is there.
fn time(
    make: impl Fn() -> anyhow::Result<Vec<Tensor>>,
    run: Operation,
    on: &Device,
    cuda: &CudaDevice,
) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    let begun = Instant::now();
    for n in 0.. {
        let operands = make()?;
        cuda.synchronize()?;
        let one = Instant::now();
        // What is on a GPU is computed there unless somebody fetches it.
        let there = || operands.iter().map(|own| own.to(on)).collect::<Vec<_>>();
        with_device(on, || run.of(&there()).realize())?;
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
                let make = || operands(size, run.count(), place, &known, &gpu);
                let (on_cpu, on_gpu) = (time(make, run, &Device::Cpu, cuda)?, time(make, run, &gpu, cuda)?);
                // A plan of its own for each place: an operation more that changes nothing is not fused away.
                let mark = [Place::New, Place::Known, Place::There].iter().position(|known| *known == place);
                let marked = |operands: &[Tensor]| {
                    let sizes = [1, 1, 1].map(|n: isize| n);
                    run.of(operands).reshape(&[&sizes[..mark.unwrap_or(0)], &[-1]].concat())
                };
                let (mut is_on_gpu, mut why) = (false, String::new());
                for n in 0..WARM + TRIALS_MAX {
                    let result = marked(&make()?);
                    let explained = with_device(&Device::Auto, || result.explain())?;
                    is_on_gpu = explained.device.starts_with("cuda");
                    why = explained.choice.unwrap_or_default();
                    if n >= WARM && !why.contains("to measure it") {
                        break;
                    }
                    with_device(&Device::Auto, || result.realize())?;
                }
                points.push(Point { name: run.name(), size, place, cpu: on_cpu, gpu: on_gpu, is_on_gpu, why });
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
        let Point { name, size, place, cpu, gpu, is_on_gpu, why } = point;
        let on = if *is_on_gpu { "gpu" } else { "cpu" };
        let wrong = if point.is_right() { String::new() } else { format!("  wrong: {why}") };
        println!("{name:<10} {size:>6}  {:<8} {cpu:>12.1} {gpu:>12.1}  {on}{wrong}", format!("{place:?}"));
    }
    println!("{:.3} of the decisions are within a tenth of the better device", share_of(&points));
    Ok(())
}
