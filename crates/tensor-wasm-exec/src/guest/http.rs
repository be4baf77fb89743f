//! Handing an HTTP request to a `wasi:http` component and its response to the client, bodies streamed both ways.
//!
//! The guest's future is driven on the connection's own task until the response head is there. Most handlers are then
//! done, body and all, and nothing was spawned. One that goes on (streaming, or working after the response) is
//! detached: it runs by itself under its deadline, and dropping the response body before its end, which is what a
//! vanished client amounts to, stops it.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::sync::oneshot;
use wasmtime::{AsContextMut, Store};
use wasmtime_wasi_http::p2::bindings::http::types::Scheme;
use wasmtime_wasi_http::{WasiHttpView, handler};

use super::state::State;
use super::supervise::Supervised;
use super::{GuestError, guest_error};
use crate::failure::{Bug, Fault};

/// A request body as the gateway hands it over.
pub type RequestBody = UnsyncBoxBody<Bytes, BoxError>;
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
pub type Request = http::Request<RequestBody>;
pub type Response = http::Response<GuestBody>;

/// Which hosts guests may call.
#[derive(Debug, Default)]
pub struct Outbound {
    allowed: Vec<String>,
    /// The first host that was refused.
    denied: OnceLock<String>,
}

impl Outbound {
    pub fn new(allowed: &[String]) -> Outbound {
        Outbound { allowed: allowed.to_vec(), denied: OnceLock::new() }
    }

    pub(crate) fn allows(&self, uri: &http::Uri) -> bool {
        let Some(authority) = uri.authority() else { return false };
        let matches = |rule: &String| match rule.as_str() {
            "*" => true,
            rule => rule.eq_ignore_ascii_case(authority.host()) || rule.eq_ignore_ascii_case(authority.as_str()),
        };
        let is_allowed = self.allowed.iter().any(matches);
        if !is_allowed {
            self.denied.get_or_init(|| authority.to_string());
        }
        is_allowed
    }

    pub(crate) fn denied(&self) -> Option<&str> {
        self.denied.get().map(String::as_str)
    }
}

/// Where the guest's response head arrives.
pub(crate) type Head = Result<http::Response<wasmtime_wasi_http::WasiBody>, GuestError>;

/// What the exchange looks like from the guest's side.
pub(crate) struct Exchange {
    pub request: Request,
    pub head: oneshot::Sender<Head>,
    /// Set before the store is dropped when the guest failed, so that a body cut short is not taken for a whole one.
    pub failed: Arc<AtomicBool>,
}

/// Says that the guest failed unless told otherwise, whichever way its call ends: also by being dropped at its
/// deadline.
struct FailedUnlessDone {
    failed: Arc<AtomicBool>,
    is_done: bool,
}

impl Drop for FailedUnlessDone {
    fn drop(&mut self) {
        self.failed.store(!self.is_done, Ordering::Release);
    }
}

pub(crate) async fn p2(
    store: &mut Store<State>,
    proxy: &wasmtime_wasi_http::p2::bindings::Proxy,
    exchange: Exchange,
) -> Result<(), GuestError> {
    let Exchange { request, head, failed } = exchange;
    let mut outcome = FailedUnlessDone { failed, is_done: false };
    let head = Arc::new(parking_lot::Mutex::new(Some(head)));
    let hostcall_bytes_max = store.data().call().account.limits.hostcall_bytes_max;
    let mut view = store.data_mut().http();
    let request = request.map(|body| body.map_err(body_error));
    let request = view.new_incoming_request(Scheme::Http, request).map_err(|e| guest_error(&e, hostcall_bytes_max))?;
    let sender = head.clone();
    let outparam = view
        .new_response_outparam_from_callback(move |response| {
            let sent = response.map_err(|code| Fault::BadResponse { why: format!("error code {code:?}") }.into());
            if let Some(head) = sender.lock().take() {
                let _ = head.send(sent);
            }
        })
        .map_err(|e| guest_error(&e, hostcall_bytes_max))?;
    let handled = proxy.wasi_http_incoming_handler().call_handle(&mut *store, request, outparam).await;
    outcome.is_done = handled.is_ok();
    let result = handled.map_err(|e| store.data().failed(&e));
    if let Some(head) = head.lock().take() {
        let why = "it returned without setting a response".to_owned();
        let _ = head.send(match &result {
            Ok(()) => Err(Fault::BadResponse { why }.into()),
            Err(error) => Err(error.clone()),
        });
    }
    result
}

pub(crate) async fn p3(
    store: &mut Store<State>,
    slot: &mut Option<wasmtime_wasi_http::p3::bindings::Service>,
    exchange: Exchange,
) -> Result<(), GuestError> {
    let Exchange { request, head, failed } = exchange;
    let mut outcome = FailedUnlessDone { failed, is_done: false };
    let request = request.map(|body| body.map_err(body_error).boxed_unsync());
    let (sender, mut response) = futures_channel::oneshot::channel();
    let Some(service) = slot.take() else {
        return Err(Bug("an instance was leased while another call runs in it".to_owned()).into());
    };
    let hostcall_bytes_max = store.data().call().account.limits.hostcall_bytes_max;
    let proxy = handler::Proxy::P3(service);
    let run = store
        .run_concurrent(async |accessor| {
            let prepared = accessor.with(|mut access| {
                handler::Prepared::new(access.as_context_mut(), &proxy, request, State::http, sender)
            })?;
            let never = std::future::pending::<()>();
            prepared.run(accessor, never).await?;
            let produced = match (&mut response).await {
                Ok(Ok(response)) => Ok(response),
                Ok(Err(error)) => Err(bad_response(guest_error(&error, hostcall_bytes_max))),
                Err(_) => Err(Fault::BadResponse { why: "it returned without a response".to_owned() }.into()),
            };
            let _ = head.send(produced);
            // The response's body is written by tasks of the guest that run on after the handler returned.
            std::future::poll_fn(|cx| accessor.poll_no_interesting_tasks(cx)).await;
            wasmtime::error::Ok(())
        })
        .await
        .flatten();
    outcome.is_done = run.is_ok();
    if let handler::Proxy::P3(used) = proxy {
        *slot = Some(used);
    }
    run.map_err(|e| store.data().failed(&e))
}

fn bad_response(error: GuestError) -> GuestError {
    match error {
        GuestError::Faulted(Fault::Trap { message }) => Fault::BadResponse { why: message }.into(),
        other => other,
    }
}

fn body_error(error: BoxError) -> wasmtime_wasi_http::Error {
    tracing::debug!(%error, "a request body broke off");
    wasmtime_wasi_http::Error::ConnectionTerminated
}

/// Drives the guest until its response head is there, and leaves the rest of it to the response's body.
pub(crate) async fn respond(
    mut guest: Supervised<Result<(), GuestError>>,
    mut head: oneshot::Receiver<Head>,
    failed: Arc<AtomicBool>,
    deadline_ms: u64,
) -> Result<Response, GuestError> {
    // The guest is polled first: a handler that answers without waiting is over after this one poll.
    let finished = std::future::poll_fn(|cx| {
        let finished = guest.poll_unpin(cx);
        match head.poll_unpin(cx) {
            Poll::Ready(Ok(head)) => Poll::Ready((finished, Some(head))),
            Poll::Ready(Err(_)) | Poll::Pending if finished.is_ready() => Poll::Ready((finished, None)),
            _ => Poll::Pending,
        }
    });
    let (finished, head) = finished.await;
    let response = match (head, &finished) {
        // It failed before a byte of its response was sent, so the caller can still be told.
        (Some(Ok(_)), Poll::Ready(Ok(Err(error)))) => return Err(error.clone()),
        (Some(Ok(response)), _) => response,
        (_, Poll::Ready(Err(stopped))) => return Err(stopped.clone().into_error(deadline_ms)),
        (Some(Err(error)), _) => return Err(error),
        (None, Poll::Ready(Ok(Err(error)))) => return Err(error.clone()),
        (None, _) => return Err(Fault::BadResponse { why: "it ended without a response".to_owned() }.into()),
    };
    check_head(&response)?;
    if finished.is_pending() {
        guest.detach();
        return Ok(response.map(|inner| GuestBody(Content::Streamed { inner, guest: Some(guest), failed })));
    }
    let (head, inner) = response.into_parts();
    let body = match whole(inner) {
        Ok(bytes) => Content::Whole(Some(bytes).filter(|bytes| !bytes.is_empty())),
        Err(inner) => Content::Streamed { inner, guest: None, failed },
    };
    Ok(http::Response::from_parts(head, GuestBody(body)))
}

/// The body of a guest that is done, if it is one piece without trailers, which most are: its length is then known, and
/// head and body leave in one write.
fn whole(mut body: wasmtime_wasi_http::WasiBody) -> Result<Bytes, wasmtime_wasi_http::WasiBody> {
    let next = |body: &mut wasmtime_wasi_http::WasiBody| body.frame().now_or_never();
    let first = match next(&mut body) {
        Some(None) => return Ok(Bytes::new()),
        Some(Some(Ok(frame))) => frame,
        Some(Some(Err(error))) => return Err(rejoin(Err(error), body)),
        None => return Err(body),
    };
    if !first.is_data() {
        return Err(rejoin(Ok(first), body));
    }
    match next(&mut body) {
        Some(None) => first.into_data().map_err(|frame| rejoin(Ok(frame), body)),
        Some(Some(second)) => Err(rejoin(Ok(first), rejoin(second, body))),
        None => Err(rejoin(Ok(first), body)),
    }
}

/// Puts a frame back in front of the body it was taken from.
fn rejoin(
    frame: Result<Frame<Bytes>, wasmtime_wasi_http::Error>,
    rest: wasmtime_wasi_http::WasiBody,
) -> wasmtime_wasi_http::WasiBody {
    struct Rejoined {
        frame: Option<Result<Frame<Bytes>, wasmtime_wasi_http::Error>>,
        rest: wasmtime_wasi_http::WasiBody,
    }
    impl Body for Rejoined {
        type Data = Bytes;
        type Error = wasmtime_wasi_http::Error;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            match self.frame.take() {
                Some(frame) => Poll::Ready(Some(frame)),
                None => Pin::new(&mut self.rest).poll_frame(cx),
            }
        }
    }
    Rejoined { frame: Some(frame), rest }.boxed_unsync()
}

/// Refuses heads that would corrupt the connection: the guest frames no messages, we do.
fn check_head(response: &http::Response<wasmtime_wasi_http::WasiBody>) -> Result<(), GuestError> {
    let bad = |why: String| Err(GuestError::from(Fault::BadResponse { why }));
    if response.status().is_informational() {
        return bad(format!("status {} is not a final one", response.status().as_u16()));
    }
    let lengths: Vec<_> = response.headers().get_all(http::header::CONTENT_LENGTH).iter().collect();
    match lengths.as_slice() {
        [] => Ok(()),
        [one] if one.to_str().is_ok_and(|n| n.parse::<u64>().is_ok()) => Ok(()),
        _ => bad("its content-length is not one number".to_owned()),
    }
}

/// A guest's response body.
pub struct GuestBody(Content);

enum Content {
    /// One piece, not yet sent.
    Whole(Option<Bytes>),
    /// Written by a guest that may still be running.
    Streamed {
        inner: wasmtime_wasi_http::WasiBody,
        guest: Option<Supervised<Result<(), GuestError>>>,
        failed: Arc<AtomicBool>,
    },
}

impl Body for GuestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let (inner, guest, failed) = match &mut self.0 {
            Content::Whole(bytes) => return Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Streamed { inner, guest, failed } => (inner, guest, failed),
        };
        match std::task::ready!(Pin::new(inner).poll_frame(cx)) {
            Some(Ok(frame)) => Poll::Ready(Some(Ok(frame))),
            Some(Err(error)) => Poll::Ready(Some(Err(Box::new(error)))),
            None if failed.load(Ordering::Acquire) => {
                Poll::Ready(Some(Err("the guest failed before its response was complete".into())))
            }
            None => {
                // The response is whole. What the guest still does is its own affair, until its deadline.
                if let Some(mut guest) = guest.take() {
                    guest.outlive();
                }
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.0, Content::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Content::Streamed { inner, .. } => inner.size_hint(),
        }
    }
}
