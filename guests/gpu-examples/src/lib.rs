//! Functions that compute on the device, one launch each: what the examples of the papers call.

wit_bindgen::generate!({ world: "examples" });

use tensor_wasm_sdk::{Buffer, DeviceKind, Error, Grid, Kernels, device_info};

struct Examples;

const KERNELS: &[u8] = include_bytes!(env!("EXAMPLE_KERNELS"));

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
        if x.len() != y.len() {
            return Err(format!("x has {} elements and y {}", x.len(), y.len()));
        }
        saxpy(a, &x, &y).map_err(text)
    }
}

fn text(error: Error) -> String {
    error.to_string()
}

fn saxpy(a: f32, xs: &[f32], ys: &[f32]) -> Result<Vec<f32>, Error> {
    let n = xs.len() as u32;
    let kernels = Kernels::load(KERNELS)?;
    let (x, y) = (Buffer::from_slice(xs)?, Buffer::from_slice(ys)?);
    kernels.launch("saxpy", Grid::linear(n, 256), &[n.into(), a.into(), (&x).into(), (&y).into()])?.wait()?;
    y.to_vec()
}

export!(Examples);
