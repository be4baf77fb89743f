//! Functions that compute on the device: what the papers' examples call.

wit_bindgen::generate!({ world: "examples" });

use std::fmt::{Display, Formatter};

use tensor_wasm_sdk::{Argument, Buffer, DeviceKind, Error, Grid, Kernels, Launch, device_info};
use wasip2::clocks::monotonic_clock;
use wasip2::io::poll;

struct Examples;

const KERNELS: &[u8] = include_bytes!(env!("EXAMPLE_KERNELS"));

/// Items of a group where a kernel does not say how many.
const ITEMS: u32 = 256;

fn launch_latency(rounds: u32) -> Result<Vec<u64>, Error> {
    let kernels = Kernels::load(KERNELS)?;
    let once = |_| {
        let began = monotonic_clock::now();
        kernels.launch("empty", Grid::linear(1, 1), &[])?.wait()?;
        Ok(monotonic_clock::now() - began)
    };
    (0..rounds).map(once).collect()
}

/// Launches that are waited for together. More would wait in the device's queue, which has an end.
const LAUNCHES_MAX: usize = 64;

/// How much of the warmth that differs goes over in one step. From a quarter on it would not settle.
const ALPHA: f32 = 0.2;

enum Why {
    Device(Error),
    Argument(String),
}

impl From<Error> for Why {
    fn from(error: Error) -> Why {
        Why::Device(error)
    }
}

impl Display for Why {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Why::Device(error) => error.fmt(f),
            Why::Argument(why) => why.fmt(f),
        }
    }
}

fn text(why: impl Display) -> String {
    why.to_string()
}

impl Guest for Examples {
    fn device() -> Result<String, String> {
        let info = device_info().map_err(text)?;
        let kind = match info.kind {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        };
        Ok(format!("{} ({kind}), {} multiprocessors", info.name, info.multiprocessors))
    }

    fn saxpy(a: f32, x: Vec<f32>, y: Vec<f32>) -> Result<Vec<f32>, String> {
        saxpy(a, &x, &y).map_err(text)
    }

    fn matmul(n: u32, a: Vec<f32>, b: Vec<f32>) -> Result<Vec<f32>, String> {
        matmul(n, &a, &b).map_err(text)
    }

    fn nbody(bodies: Vec<f32>, steps: u32, dt: f32) -> Result<Vec<f32>, String> {
        nbody(&bodies, steps, dt).map_err(text)
    }

    fn histogram(data: Vec<u8>) -> Result<Vec<u32>, String> {
        histogram(&data).map_err(text)
    }

    fn sum(x: Vec<f32>) -> Result<f32, String> {
        sum(&x).map_err(text)
    }

    fn heat(width: u32, height: u32, steps: u32, field: Vec<f32>) -> Result<Vec<f32>, String> {
        heat(width, height, steps, &field).map_err(text)
    }

    fn launch_latency(rounds: u32) -> Result<Vec<u64>, String> {
        launch_latency(rounds).map_err(text)
    }

    fn wait_beside(rounds: u32) -> Result<u32, String> {
        wait_beside(rounds).map_err(text)
    }
}

/// A list must have as many elements as the others say.
fn expect(name: &str, len: usize, expected: u64) -> Result<(), Why> {
    if len as u64 != expected {
        return Err(Why::Argument(format!("{name} has {len} elements, and it should have {expected}")));
    }
    Ok(())
}

fn saxpy(a: f32, xs: &[f32], ys: &[f32]) -> Result<Vec<f32>, Why> {
    expect("y", ys.len(), xs.len() as u64)?;
    if xs.is_empty() {
        return Ok(Vec::new());
    }
    let n = xs.len() as u32;
    let kernels = Kernels::load(KERNELS)?;
    let (x, y) = (Buffer::from_slice(xs)?, Buffer::from_slice(ys)?);
    kernels.launch("saxpy", Grid::linear(n, ITEMS), &[n.into(), a.into(), (&x).into(), (&y).into()])?.wait()?;
    Ok(y.to_vec()?)
}

fn matmul(n: u32, a: &[f32], b: &[f32]) -> Result<Vec<f32>, Why> {
    let square = u64::from(n) * u64::from(n);
    expect("a", a.len(), square)?;
    expect("b", b.len(), square)?;
    if n == 0 {
        return Ok(Vec::new());
    }
    let kernels = Kernels::load(KERNELS)?;
    let (a, b, c) = (Buffer::from_slice(a)?, Buffer::from_slice(b)?, Buffer::<f32>::zeroed(a.len())?);
    let arguments = [n.into(), (&a).into(), (&b).into(), (&c).into()];
    kernels.launch("matmul", Grid::plane(n, n, [16, 16]), &arguments)?.wait()?;
    Ok(c.to_vec()?)
}

fn nbody(bodies: &[f32], steps: u32, dt: f32) -> Result<Vec<f32>, Why> {
    let (bodies, rest) = bodies.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(Why::Argument(
            "a body is x, y, z and its mass: the list's length must be a multiple of 4".to_owned(),
        ));
    }
    if bodies.is_empty() {
        return Ok(Vec::new());
    }
    let n = bodies.len() as u32;
    let kernels = Kernels::load(KERNELS)?;
    let velocities = Buffer::<[f32; 4]>::zeroed(bodies.len())?;
    let planes = [Buffer::from_slice(bodies)?, Buffer::zeroed(bodies.len())?];
    repeat(&kernels, "nbody", Grid::linear(n, 256), steps, |step| {
        let [from, to] = turn(&planes, step);
        vec![n.into(), dt.into(), from.into(), (&velocities).into(), to.into()]
    })?;
    let [last, _] = turn(&planes, steps);
    Ok(last.to_vec()?.into_flattened())
}

fn histogram(data: &[u8]) -> Result<Vec<u32>, Why> {
    if data.is_empty() {
        return Ok(vec![0; 256]);
    }
    let n = data.len() as u32;
    let kernels = Kernels::load(KERNELS)?;
    let (data, bins) = (Buffer::from_slice(data)?, Buffer::<u32>::zeroed(256)?);
    // Each item looks at several bytes, so that groups do not only add up their bins.
    let grid = Grid::linear(n.div_ceil(16), ITEMS);
    kernels.launch("histogram", grid, &[n.into(), (&data).into(), (&bins).into()])?.wait()?;
    Ok(bins.to_vec()?)
}

fn sum(x: &[f32]) -> Result<f32, Why> {
    if x.is_empty() {
        return Ok(0.0);
    }
    let n = x.len() as u32;
    let kernels = Kernels::load(KERNELS)?;
    // No more groups than the one of the second launch has items: each then adds one number.
    let grid = Grid::linear(n.div_ceil(16).min(256 * 256), 256);
    let groups = grid.groups[0];
    let (x, partial, total) =
        (Buffer::from_slice(x)?, Buffer::<f32>::zeroed(groups as usize)?, Buffer::<f32>::zeroed(1)?);
    let first = kernels.launch("reduce_sum", grid, &[n.into(), (&x).into(), (&partial).into()])?;
    let arguments = [groups.into(), (&partial).into(), (&total).into()];
    let second = kernels.launch("reduce_sum", Grid::linear(1, 256), &arguments)?;
    first.wait()?;
    second.wait()?;
    Ok(total.to_vec()?.into_iter().sum())
}

fn heat(width: u32, height: u32, steps: u32, field: &[f32]) -> Result<Vec<f32>, Why> {
    expect("the field", field.len(), u64::from(width) * u64::from(height))?;
    if field.is_empty() {
        return Ok(Vec::new());
    }
    let kernels = Kernels::load(KERNELS)?;
    let planes = [Buffer::from_slice(field)?, Buffer::zeroed(field.len())?];
    repeat(&kernels, "heat", Grid::plane(width, height, [32, 8]), steps, |step| {
        let [from, to] = turn(&planes, step);
        vec![width.into(), height.into(), ALPHA.into(), from.into(), to.into()]
    })?;
    let [last, _] = turn(&planes, steps);
    Ok(last.to_vec()?)
}

/// Two buffers, of which each step reads what the one before wrote.
fn turn<T>([even, odd]: &[T; 2], step: u32) -> [&T; 2] {
    if step.is_multiple_of(2) { [even, odd] } else { [odd, even] }
}

/// Launches a kernel for every step. They run one after the other without the function in between.
fn repeat<'a>(
    kernels: &Kernels,
    kernel: &str,
    grid: Grid,
    steps: u32,
    arguments: impl Fn(u32) -> Vec<Argument<'a>>,
) -> Result<(), Why> {
    let mut waiting: Vec<Launch> = Vec::new();
    for step in 0..steps {
        waiting.push(kernels.launch(kernel, grid, &arguments(step))?);
        if waiting.len() == LAUNCHES_MAX || step + 1 == steps {
            waiting.drain(..).try_for_each(|launch| launch.wait())?;
        }
    }
    Ok(())
}

fn wait_beside(rounds: u32) -> Result<u32, Why> {
    let kernels = Kernels::load(KERNELS)?;
    let out = Buffer::<u32>::zeroed(ITEMS as usize)?;
    let launch = kernels.launch("spin", Grid::linear(ITEMS, ITEMS), &[rounds.into(), (&out).into()])?;
    let done = launch.pollable();
    let mut milliseconds = 0;
    loop {
        let tick = monotonic_clock::subscribe_duration(1_000_000);
        if poll::poll(&[&done, &tick]).contains(&0) {
            launch.wait()?;
            return Ok(milliseconds);
        }
        milliseconds += 1;
    }
}

export!(Examples);
