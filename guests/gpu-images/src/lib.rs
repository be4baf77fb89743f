//! A `wasi:http` handler that draws and blurs images on the device: `GET /mandelbrot` and `POST /blur`.

mod image;

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use image::Image;
use tensor_wasm_sdk::{Buffer, Error, Grid, Kernels};
use wasip2::exports::http::incoming_handler::Guest;
use wasip2::http::types::{Fields, IncomingRequest, Method, OutgoingBody, OutgoingResponse, ResponseOutparam};
use wasip2::io::streams::{OutputStream, StreamError};

struct Images;

const KERNELS: &[u8] = include_bytes!(env!("EXAMPLE_KERNELS"));

/// Of an image, each way. Four thousand squared are 64 MiB of pixels.
const SIDE_MAX: u32 = 4096;

const BODY_BYTES_MAX: usize = 16 << 20;

/// Why there is no image: the status of the response and its text.
struct Refusal {
    status: u16,
    why: String,
}

fn refuse<T>(status: u16, why: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { status, why: why.into() })
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        let status = if matches!(error, Error::Busy(_)) { 503 } else { 500 };
        Refusal { status, why: error.to_string() }
    }
}

impl Guest for Images {
    fn handle(request: IncomingRequest, out: ResponseOutparam) {
        match answer(&request) {
            Ok(image) => respond(out, 200, "image/png", &image),
            Err(refusal) => respond(out, refusal.status, "text/plain", format!("{}\n", refusal.why).as_bytes()),
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

/// `name=value` pairs.
struct Query<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Query<'a> {
    fn read(text: &'a str) -> Result<Query<'a>, Refusal> {
        let mut pairs = Vec::new();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(pair) => pairs.push(pair),
                None => return refuse(400, format!("{pair} has no value: write {pair}=NUMBER")),
            }
        }
        Ok(Query(pairs))
    }

    fn knows(&self, names: &[&str]) -> Result<(), Refusal> {
        match self.0.iter().find(|(name, _)| !names.contains(name)) {
            Some((name, _)) => refuse(400, format!("there is no parameter {name}, only {}", names.join(", "))),
            None => Ok(()),
        }
    }

    fn number<T>(&self, name: &str, default: T, range: RangeInclusive<T>) -> Result<T, Refusal>
    where
        T: FromStr + PartialOrd + Display,
    {
        let Some((_, value)) = self.0.iter().find(|(own, _)| *own == name) else { return Ok(default) };
        match value.parse() {
            Ok(number) if range.contains(&number) => Ok(number),
            _ => {
                let why =
                    format!("{name} is {value}, and it should be a number from {} to {}", range.start(), range.end());
                refuse(400, why)
            }
        }
    }
}

fn body(request: &IncomingRequest) -> Result<Vec<u8>, Refusal> {
    let lost = |_| Refusal { status: 400, why: "the body did not arrive".to_owned() };
    let incoming = request.consume().map_err(lost)?;
    let stream = incoming.stream().map_err(lost)?;
    let mut body = Vec::new();
    loop {
        match stream.blocking_read(1 << 20) {
            Ok(piece) => body.extend(piece),
            Err(StreamError::Closed) => return Ok(body),
            Err(StreamError::LastOperationFailed(_)) => return Err(lost(())),
        }
        if body.len() > BODY_BYTES_MAX {
            return refuse(413, format!("the body has more than {BODY_BYTES_MAX} bytes"));
        }
    }
}

fn respond(out: ResponseOutparam, status: u16, content_type: &str, content: &[u8]) {
    let headers = Fields::new();
    let _ = headers.append("content-type", content_type.as_bytes());
    let _ = headers.append("content-length", content.len().to_string().as_bytes());
    let response = OutgoingResponse::new(headers);
    let _ = response.set_status_code(status);
    let body = response.body().expect("the body is taken once");
    ResponseOutparam::set(out, Ok(response));
    let stream = body.write().expect("the stream is taken once");
    // A client that left needs no more.
    if send(&stream, content).is_ok() {
        drop(stream);
        let _ = OutgoingBody::finish(body, None);
    }
}

fn send(stream: &OutputStream, mut rest: &[u8]) -> Result<(), StreamError> {
    let ready = stream.subscribe();
    while !rest.is_empty() {
        ready.block();
        let room = usize::try_from(stream.check_write()?).unwrap_or(usize::MAX);
        let (piece, later) = rest.split_at(room.min(rest.len()));
        stream.write(piece)?;
        rest = later;
    }
    stream.flush()?;
    ready.block();
    stream.check_write().map(drop)
}

wasip2::http::proxy::export!(Images);
