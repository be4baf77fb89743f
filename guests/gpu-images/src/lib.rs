//! A `wasi:http` handler that draws and blurs images on the device: `GET /mandelbrot` and `POST /blur`.

use guest_web::{Image, Query, Refusal, body, refuse, respond};
use tensor_wasm_sdk::{Buffer, Grid, Kernels};
use wasip2::exports::http::incoming_handler::Guest;
use wasip2::http::types::{IncomingRequest, Method, ResponseOutparam};

struct Images;

const KERNELS: &[u8] = include_bytes!(env!("EXAMPLE_KERNELS"));

/// Of an image, each way. Four thousand squared are 64 MiB of pixels.
const SIDE_MAX: u32 = 4096;

impl Guest for Images {
    fn handle(request: IncomingRequest, out: ResponseOutparam) {
        match answer(&request) {
            Ok(image) => respond(out, 200, "image/png", &image),
            Err(refusal) => refusal.respond(out),
        }
    }
}

/// The bytes of a PNG.
fn answer(request: &IncomingRequest) -> Result<Vec<u8>, Refusal> {
    let path = request.path_with_query().unwrap_or_default();
    let (path, query) = path.split_once('?').unwrap_or((&path, ""));
    let image = match (path, request.method()) {
        ("/mandelbrot", Method::Get) => mandelbrot(&Query::read(query)?)?,
        ("/blur", Method::Post) => blur(&Query::read(query)?, request)?,
        ("/mandelbrot", _) => return refuse(405, "/mandelbrot is for GET"),
        ("/blur", _) => return refuse(405, "/blur is for POST, with a PNG as the body"),
        _ => return refuse(404, format!("there is no {path}, only /mandelbrot and /blur")),
    };
    image.encode().map_err(|why| Refusal { status: 500, why })
}

fn mandelbrot(query: &Query<'_>) -> Result<Image, Refusal> {
    query.knows(&["width", "height", "x", "y", "scale", "iterations"])?;
    let width = query.number("width", 800, 1..=SIDE_MAX)?;
    let height = query.number("height", 600, 1..=SIDE_MAX)?;
    let x = query.number("x", -0.6, -4.0..=4.0)?;
    let y = query.number("y", 0.0, -4.0..=4.0)?;
    // How much of the plane the image is wide. Below that neighbours are the same number.
    let scale = query.number("scale", 3.5, 1e-12..=16.0)?;
    let iterations = query.number("iterations", 300, 1..=10_000_u32)?;
    let step = scale / f64::from(width);
    let (left, top) = (x - step * f64::from(width) / 2.0, y + step * f64::from(height) / 2.0);
    let kernels = Kernels::load(KERNELS)?;
    let out = Buffer::<[u8; 4]>::zeroed(width as usize * height as usize)?;
    let arguments =
        [width.into(), height.into(), left.into(), top.into(), step.into(), iterations.into(), (&out).into()];
    kernels.launch("mandelbrot", Grid::plane(width, height, [16, 16]), &arguments)?.wait()?;
    Ok(Image { width, height, pixels: out.to_vec()? })
}

fn blur(query: &Query<'_>, request: &IncomingRequest) -> Result<Image, Refusal> {
    query.knows(&["radius"])?;
    let radius = query.number("radius", 4, 1..=64_u32)?;
    let Image { width, height, pixels } =
        Image::decode(&body(request)?, SIDE_MAX).map_err(|why| Refusal { status: 400, why })?;
    let kernels = Kernels::load(KERNELS)?;
    let (image, rows) = (Buffer::from_slice(&pixels)?, Buffer::<[u8; 4]>::zeroed(pixels.len())?);
    let grid = Grid::plane(width, height, [16, 16]);
    let pass = |down: u32, from, to| {
        let arguments = [width.into(), height.into(), radius.into(), down.into(), from, to];
        kernels.launch("blur", grid, &arguments)
    };
    // Both are asked for before either is waited for.
    let passes = [pass(0, (&image).into(), (&rows).into())?, pass(1, (&rows).into(), (&image).into())?];
    passes.iter().try_for_each(|launch| launch.wait())?;
    Ok(Image { width, height, pixels: image.to_vec()? })
}

wasip2::http::proxy::export!(Images);
