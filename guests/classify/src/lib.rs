//! A `wasi:http` handler that reads a digit: `POST /` with a PNG, or with 784 bytes of gray, 28 rows of 28. The network
//! is the one that `crates/tensor-wasm-tensor/examples/cnn.rs` trains, from the host's models. `digits.safetensors`
//! beside this was made, from the repository's root, by
//! `cargo run --release -p tensor-wasm-tensor --example cnn -- --save guests/classify/digits.safetensors`.

use guest_web::{Image, Refusal, body, refuse, respond};
use tensor_wasm_sdk::tensor::{DType, Model, Tensor, named};
use wasip2::exports::http::incoming_handler::Guest;
use wasip2::http::types::{IncomingRequest, Method, ResponseOutparam};

struct Classify;

/// The model that is opened unless the environment variable `MODEL` names another.
const MODEL: &str = "digits";

/// Rows and columns that the network looks at.
const SIDE: usize = 28;

/// Of an image, each way, before it is made small.
const SIDE_MAX: u32 = 2048;

impl Guest for Classify {
    fn handle(request: IncomingRequest, out: ResponseOutparam) {
        match answer(&request) {
            Ok(json) => respond(out, 200, "application/json", json.as_bytes()),
            Err(refusal) => refusal.respond(out),
        }
    }
}

fn answer(request: &IncomingRequest) -> Result<String, Refusal> {
    if !matches!(request.method(), Method::Post) {
        return refuse(405, "POST a PNG of a digit, or 784 bytes of gray, 28 rows of 28");
    }
    let body = body(request)?;
    let pixels = match body.len() {
        pixels if pixels == SIDE * SIDE => body.iter().map(|pixel| f32::from(*pixel) / 255.0).collect(),
        _ => shrunk(&Image::decode(&body, SIDE_MAX).map_err(|why| Refusal { status: 400, why })?),
    };
    let probabilities = probabilities(&pixels)?;
    let best = probabilities.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
    let digit = best.map_or(0, |(digit, _)| digit);
    let shown: Vec<String> = probabilities.iter().map(|p| format!("{p:.6}")).collect();
    Ok(format!("{{\"digit\":{digit},\"probabilities\":[{}]}}\n", shown.join(",")))
}

/// Two convolutions, each followed by the largest of 2 by 2, and a linear layer.
fn probabilities(pixels: &[f32]) -> Result<Vec<f32>, Refusal> {
    let name = std::env::var("MODEL").unwrap_or_else(|_| MODEL.to_owned());
    let model = Model::open(&name)?;
    let weight = |layer: &str| model.get(&format!("{layer}.weight")).cast(DType::F32);
    let bias = |layer: &str| model.get(&format!("{layer}.bias")).cast(DType::F32);
    let convolve = |x: &Tensor, layer: &str| {
        let filtered = x.apply("conv2d", &[(&weight(layer)).into()]) + bias(layer);
        filtered.relu().apply("max_pool2d", &[named("size", 2)])
    };
    let x = Tensor::from_slice(pixels, &[1, 1, SIDE, SIDE]);
    let features = convolve(&convolve(&x, "1"), "3").reshape(&[1, -1]);
    let logits = features.matmul(&weight("6")) + bias("6");
    Ok(logits.softmax(-1).to_vec()?)
}

/// An image as the network knows them: small, gray, and bright strokes on a dark ground.
fn shrunk(image: &Image) -> Vec<f32> {
    let (width, height) = (image.width as usize, image.height as usize);
    let gray = |x: usize, y: usize| {
        let [r, g, b, a] = image.pixels[y * width + x].map(f32::from);
        // What is transparent is paper.
        let luminance = (0.299 * r + 0.587 * g + 0.114 * b) / 255.0;
        luminance * (a / 255.0) + 1.0 - a / 255.0
    };
    let mut pixels = Vec::with_capacity(SIDE * SIDE);
    for row in 0..SIDE {
        for column in 0..SIDE {
            // The mean of what lies under this pixel; of a smaller image, what is nearest.
            let span = |n: usize, size: usize| {
                let start = n * size / SIDE;
                start..((n + 1) * size / SIDE).max(start + 1)
            };
            let (rows, columns) = (span(row, height), span(column, width));
            let count = (rows.len() * columns.len()) as f32;
            let sum: f32 = rows.flat_map(|y| columns.clone().map(move |x| (x, y))).map(|(x, y)| gray(x, y)).sum();
            pixels.push(sum / count);
        }
    }
    // More light than dark is ink on paper.
    if pixels.iter().sum::<f32>() > (SIDE * SIDE) as f32 / 2.0 {
        pixels.iter_mut().for_each(|pixel| *pixel = 1.0 - *pixel);
    }
    pixels
}

wasip2::http::proxy::export!(Classify);
