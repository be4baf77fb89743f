//! Calling a function and hearing from it while it runs: what it writes to stdout, as server-sent events (`chunk`, then
//! `done` or `error`), or as the raw bytes with `Accept: application/octet-stream`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use http_body::Frame;
use serde_json::{Value, json};
use tensor_wasm_exec::{Call, Failure, Invocation, Outcome, Runtime};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::invoke::{InvokeRequest, OCTETS, done, parse_json};
use crate::body;
use crate::error::ApiError;
use crate::extract::Path;
use crate::gateway::{INVOKE_STREAM_EVENT, Shared, audited};
use crate::trace::Trace;

/// Pieces between the guest and a slow client; a full line makes the guest wait.
const CHUNKS_WAITING_MAX: usize = 16;

#[utoipa::path(post, path = "/functions/{f}/invoke-stream", params(("f" = String, Path, description = "name or id")),
    request_body = InvokeRequest,
    responses((status = 200, description = "text/event-stream of chunk, done and error; or raw bytes")))]
pub(crate) async fn invoke(
    State(gateway): State<Shared>,
    Path(f): Path<String>,
    Extension(trace): Extension<Trace>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let tenant = match gateway.tokens.tenant(&headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let result = async {
        gateway.runtime.catalog.resolve(&tenant, &f)?;
        let body = body::read_call(&gateway, &tenant, body).await?;
        let InvokeRequest { export, args, stdin, deadline_ms } = parse_json(&body.bytes)?;
        let (stdout, chunks) = mpsc::channel(CHUNKS_WAITING_MAX);
        let invocation = Invocation {
            id: trace.trace_id,
            tenant: tenant.clone(),
            function: f.clone(),
            call: Call::Stream { export, args, stdin: Bytes::from(stdin), stdout },
            deadline: deadline_ms.map(Duration::from_millis),
        };
        let runtime = gateway.runtime.clone();
        // Spawned, so that its deadline holds even while the client reads nothing.
        let call = gateway.runtime.background().spawn(async move { runtime.invoke(invocation).await });
        let raw = headers.get(header::ACCEPT).is_some_and(|v| v.as_bytes().starts_with(OCTETS.as_bytes()));
        let (call, runtime) = (Some(Aborting(call)), gateway.runtime.clone());
        let stream = Stream { chunks, call, raw, tail: Vec::new(), runtime };
        let content_type = HeaderValue::from_static(if raw { OCTETS } else { "text/event-stream" });
        let no_store = HeaderValue::from_static("no-store");
        let headers = [(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, no_store)];
        Ok((headers, Body::new(stream)).into_response())
    };
    audited(INVOKE_STREAM_EVENT, &tenant, &f, result.await)
}

/// A call that ends with the response it belongs to.
struct Aborting(JoinHandle<Result<Outcome, Failure>>);

impl Drop for Aborting {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Stream {
    chunks: mpsc::Receiver<Bytes>,
    call: Option<Aborting>,
    raw: bool,
    /// The beginning of a character whose rest has not come yet.
    tail: Vec<u8>,
    runtime: Arc<Runtime>,
}

impl http_body::Body for Stream {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let this = &mut *self;
        if let Some(chunk) = std::task::ready!(this.chunks.poll_recv(cx)) {
            this.runtime.metrics.streaming_chunks_emitted.inc();
            let bytes = if this.raw { chunk } else { event("chunk", &this.text(&chunk)) };
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        // The guest's end of the channel is gone; what it amounts to follows at once.
        let Some(call) = &mut this.call else { return Poll::Ready(None) };
        let ended = std::task::ready!(Pin::new(&mut call.0).poll(cx));
        this.call = None;
        let ended = ended.unwrap_or_else(|e| Err(Failure::Bug(tensor_wasm_exec::Bug(e.to_string()))));
        Poll::Ready(match (this.raw, ended) {
            (true, Ok(_)) => None,
            (true, Err(failure)) => Some(Err(failure.to_string().into())),
            (false, Ok(outcome)) => Some(Ok(Frame::data(event("done", &json!(done(outcome)))))),
            (false, Err(failure)) => Some(Ok(Frame::data(event("error", &ApiError::from(failure).body())))),
        })
    }
}

impl Stream {
    /// `{"text": …}`, or `{"base64": …}` for what is not text. A character cut in two waits for its second half.
    fn text(&mut self, chunk: &[u8]) -> Value {
        let mut bytes = std::mem::take(&mut self.tail);
        bytes.extend_from_slice(chunk);
        match std::str::from_utf8(&bytes) {
            Ok(text) => json!({ "text": text }),
            Err(error) if error.error_len().is_none() => {
                self.tail = bytes.split_off(error.valid_up_to());
                json!({ "text": String::from_utf8_lossy(&bytes) })
            }
            Err(_) => json!({ "base64": BASE64.encode(&bytes) }),
        }
    }
}

fn event(name: &str, data: &Value) -> Bytes {
    Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
}
