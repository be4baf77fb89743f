//! Request bodies as we are willing to take them: bounded in size, and never waited for without end.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt, Empty};
use tensor_wasm_exec::guest::http::{BoxError, RequestBody};
use tokio::time::Sleep;

use crate::error::ApiError;

/// Reads a whole body, at most `bytes_max` of it.
pub(crate) async fn read(body: Body, bytes_max: usize, idle: Duration) -> Result<Bytes, ApiError> {
    let too_large = || {
        let message = format!("the request body has more than {bytes_max} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    };
    if body.size_hint().lower() > bytes_max as u64 {
        return Err(too_large());
    }
    let mut body = Patient::new(body, idle);
    let mut first = None;
    let mut rest = BytesMut::new();
    let mut total = 0;
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|e| ApiError::bad_request("invalid_body", format!("the request body broke off: {e}")))?;
        let Ok(data) = frame.into_data() else { continue };
        total += data.len();
        if total > bytes_max {
            return Err(too_large());
        }
        match first {
            // One piece is the usual case and needs no copy.
            None => first = Some(data),
            Some(ref mut first) => {
                if rest.is_empty() {
                    rest.extend_from_slice(first);
                }
                rest.extend_from_slice(&data);
            }
        }
    }
    Ok(if rest.is_empty() { first.unwrap_or_default() } else { rest.freeze() })
}

/// A body for a guest to read as it comes.
pub(crate) fn for_guest(body: Body, idle: Duration) -> RequestBody {
    match body.is_end_stream() {
        true => Empty::new().map_err(|never| match never {}).boxed_unsync(),
        false => Patient::new(body, idle).boxed_unsync(),
    }
}

/// A body that fails when the client pauses too long.
struct Patient {
    body: Body,
    idle: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn new(body: Body, idle: Duration) -> Patient {
        Patient { body, idle, timer: None }
    }
}

impl http_body::Body for Patient {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.timer = None;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let idle = this.idle;
        let timer = this.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(idle)));
        std::task::ready!(timer.as_mut().poll(cx));
        Poll::Ready(Some(Err(format!("nothing came for {} ms", idle.as_millis()).into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
