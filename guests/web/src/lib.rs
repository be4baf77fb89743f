//! What the examples that are `wasi:http` handlers share: parameters, bodies, answers whole or piece by piece, images,
//! and refusals with a status.

mod image;

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use tensor_wasm_sdk::{Error, tensor};
use wasip2::http::types::{Fields, IncomingRequest, OutgoingBody, OutgoingResponse, ResponseOutparam};
use wasip2::io::streams::{OutputStream, StreamError};

pub use crate::image::Image;

const BODY_BYTES_MAX: usize = 16 << 20;

/// Why there is no answer: the status of the response and its text.
pub struct Refusal {
    pub status: u16,
    pub why: String,
}

pub fn refuse<T>(status: u16, why: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { status, why: why.into() })
}

impl Refusal {
    pub fn respond(&self, out: ResponseOutparam) {
        respond(out, self.status, "text/plain", format!("{}\n", self.why).as_bytes());
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        let status = if matches!(error, Error::Busy(_)) { 503 } else { 500 };
        Refusal { status, why: error.to_string() }
    }
}

impl From<tensor::Error> for Refusal {
    fn from(error: tensor::Error) -> Refusal {
        let is_ours = matches!(error, tensor::Error::Invalid(_) | tensor::Error::Failed(_));
        Refusal { status: if is_ours { 500 } else { 503 }, why: error.to_string() }
    }
}

/// `name=value` pairs.
pub struct Query<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Query<'a> {
    pub fn read(text: &'a str) -> Result<Query<'a>, Refusal> {
        let mut pairs = Vec::new();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(pair) => pairs.push(pair),
                None => return refuse(400, format!("{pair} has no value: write {pair}=NUMBER")),
            }
        }
        Ok(Query(pairs))
    }

    pub fn knows(&self, names: &[&str]) -> Result<(), Refusal> {
        match self.0.iter().find(|(name, _)| !names.contains(name)) {
            Some((name, _)) => refuse(400, format!("there is no parameter {name}, only {}", names.join(", "))),
            None => Ok(()),
        }
    }

    pub fn number<T>(&self, name: &str, default: T, range: RangeInclusive<T>) -> Result<T, Refusal>
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

/// The whole body of a request.
pub fn body(request: &IncomingRequest) -> Result<Vec<u8>, Refusal> {
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

/// Answers with something that is whole.
pub fn respond(out: ResponseOutparam, status: u16, content_type: &str, content: &[u8]) {
    let answer =
        Answer::begin(out, status, &[("content-type", content_type), ("content-length", &content.len().to_string())]);
    // A client that left needs no more.
    if answer.send(content).is_ok() {
        answer.finish();
    }
}

/// An answer that is sent piece by piece.
pub struct Answer {
    // Dropped before the body, whose child it is.
    stream: OutputStream,
    body: OutgoingBody,
}

/// The client has left.
pub struct Left;

impl Answer {
    pub fn begin(out: ResponseOutparam, status: u16, headers: &[(&str, &str)]) -> Answer {
        let fields = Fields::new();
        for (name, value) in headers {
            let _ = fields.append(name, value.as_bytes());
        }
        let response = OutgoingResponse::new(fields);
        let _ = response.set_status_code(status);
        let body = response.body().expect("the body is taken once");
        ResponseOutparam::set(out, Ok(response));
        Answer { stream: body.write().expect("the stream is taken once"), body }
    }

    /// Sends a piece, and returns when it is on its way.
    pub fn send(&self, piece: &[u8]) -> Result<(), Left> {
        send(&self.stream, piece).map_err(|_| Left)
    }

    /// Says that it is whole.
    pub fn finish(self) {
        drop(self.stream);
        let _ = OutgoingBody::finish(self.body, None);
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
