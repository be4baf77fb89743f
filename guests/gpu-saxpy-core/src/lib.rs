//! A core module that launches kernels, and looks at every element of what comes out. Numbers below zero are errors.

use tensor_wasm_flat::{Arguments, Buffer, Error, Kernel, sync};

const KERNELS: &[u8] = include_bytes!(env!("EXAMPLE_KERNELS"));

/// Four elements: memory that is passed to a kernel starts at a multiple of 16.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Lane([f32; 4]);

/// How many elements are wrong, computed in buffers of the device.
#[unsafe(no_mangle)]
pub extern "C" fn saxpy_check(n: i32, a: f32) -> i32 {
    answer(buffers(n, a))
}

/// The same, computed in this module's own memory.
#[unsafe(no_mangle)]
pub extern "C" fn saxpy_pinned(n: i32, a: f32) -> i32 {
    answer(pinned(n, a))
}

fn answer(wrong: Result<i32, Error>) -> i32 {
    // Errors of the host are small numbers.
    wrong.unwrap_or_else(|error| i32::try_from(error.code).unwrap_or(i32::MIN))
}

fn buffers(n: i32, a: f32) -> Result<i32, Error> {
    if n <= 0 {
        return Ok(0);
    }
    let kernel = Kernel::load(KERNELS, "saxpy")?;
    let pack = |element: fn(i32) -> f32| -> Vec<u8> { (0..n).flat_map(|i| element(i).to_le_bytes()).collect() };
    let (x, y) = (Buffer::from_bytes(&pack(x_of))?, Buffer::from_bytes(&pack(y_of))?);
    let arguments = Arguments::new().i32(n).f32(a).buffer(&x).buffer(&y);
    kernel.launch(groups(n), [256, 1, 1], &arguments)?;
    sync()?;
    let mut found = pack(|_| f32::NAN);
    y.read(0, &mut found)?;
    let (found, _) = found.as_chunks();
    Ok(wrong(a, found.iter().map(|bytes| f32::from_le_bytes(*bytes))))
}

fn pinned(n: i32, a: f32) -> Result<i32, Error> {
    if n <= 0 {
        return Ok(0);
    }
    let kernel = Kernel::load(KERNELS, "saxpy")?;
    let lanes = |element: fn(i32) -> f32| -> Vec<Lane> {
        (0..n).step_by(4).map(|i| Lane(std::array::from_fn(|k| element(i + k as i32)))).collect()
    };
    let (mut x, mut y) = (lanes(x_of), lanes(y_of));
    // SAFETY: both live, and nothing looks at them, until `sync` has returned.
    let arguments = unsafe { Arguments::new().i32(n).f32(a).memory(&raw mut x[..]).memory(&raw mut y[..]) };
    let launched = kernel.launch(groups(n), [256, 1, 1], &arguments);
    // Even where the launch is refused: what was asked before may still be at work on them.
    sync()?;
    launched?;
    Ok(wrong(a, y.iter().flat_map(|lane| lane.0).take(n as usize)))
}

fn groups(n: i32) -> [u32; 3] {
    [n.cast_unsigned().div_ceil(256), 1, 1]
}

fn x_of(i: i32) -> f32 {
    (i % 1000) as f32 * 0.5
}

fn y_of(i: i32) -> f32 {
    (i % 777) as f32 - 300.0
}

/// The kernel rounds once, and so does this: they agree to the last bit.
fn wrong(a: f32, found: impl Iterator<Item = f32>) -> i32 {
    let is_wrong = |(i, found): &(i32, f32)| *found != a.mul_add(x_of(*i), y_of(*i));
    (0..).zip(found).filter(is_wrong).count() as i32
}
