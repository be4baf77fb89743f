//! Request bodies as we are willing to take them: bounded in size, and never waited for without end.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt, Empty};
use parking_lot::Mutex;
use tensor_wasm_exec::failure::Shortage;
use tensor_wasm_exec::guest::http::{BoxError, RequestBody};
use tensor_wasm_exec::{Config, Rejection};
use tokio::time::Sleep;

use crate::error::ApiError;
use crate::gateway::Gateway;

/// Bodies this small are not counted: ten thousand connections may hold one each.
const UNCOUNTED_BYTES: usize = 64 << 10;

const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The memory that request bodies may take, charged before it is taken: all tenants together, and each.
pub(crate) struct HeldBodies {
    by_tenant: Mutex<HashMap<String, usize>>,
    config: Arc<Config>,
}

/// A body in memory, and its part of what may be held.
pub(crate) struct Whole {
    pub bytes: Bytes,
    _share: Option<Share>,
}

/// Memory that counts as held until this is dropped.
pub(crate) struct Share {
    held: Arc<HeldBodies>,
    tenant: String,
    bytes: usize,
}

impl HeldBodies {
    pub(crate) fn new(config: Arc<Config>) -> HeldBodies {
        HeldBodies { by_tenant: Mutex::default(), config }
    }

    /// A share for what is about to be held; none is needed for little.
    pub(crate) fn counted(self: &Arc<Self>, tenant: &str, bytes: usize) -> Result<Option<Share>, Rejection> {
        if bytes > UNCOUNTED_BYTES { self.share(tenant, bytes).map(Some) } else { Ok(None) }
    }

    fn share(self: &Arc<Self>, tenant: &str, bytes: usize) -> Result<Share, Rejection> {
        const WHAT: &str = "memory for request bodies";
        const INSTEAD: &str = "send fewer large bodies at once, or raise the limit";
        let tenant_max = self.config.limits_of(tenant).bodies_bytes_max;
        let server_max = self.config.server.bodies_bytes_max;
        let mut by_tenant = self.by_tenant.lock();
        let total: usize = by_tenant.values().sum();
        let own = by_tenant.get(tenant).copied().unwrap_or(0);
        if own.saturating_add(bytes) > tenant_max {
            let (max, limit) = (format!("{tenant_max} bytes"), "[limits] bodies_bytes_max");
            let shortage = Shortage { what: WHAT, max, limit, instead: INSTEAD };
            return Err(Rejection::TenantShort { tenant: tenant.to_owned(), shortage, retry_after: RETRY_AFTER });
        }
        if total.saturating_add(bytes) > server_max {
            let (max, limit) = (format!("{server_max} bytes"), "[server] bodies_bytes_max");
            let shortage = Shortage { what: WHAT, max, limit, instead: INSTEAD };
            return Err(Rejection::ServerShort { shortage, retry_after: RETRY_AFTER });
        }
        *by_tenant.entry(tenant.to_owned()).or_default() += bytes;
        Ok(Share { held: self.clone(), tenant: tenant.to_owned(), bytes })
    }
}

impl Share {
    /// Gives back what turned out not to be needed.
    fn shrink(&mut self, bytes: usize) {
        let unused = self.bytes.saturating_sub(bytes);
        self.bytes -= unused;
        let mut by_tenant = self.held.by_tenant.lock();
        if let Some(own) = by_tenant.get_mut(&self.tenant) {
            *own -= unused;
            if *own == 0 {
                by_tenant.remove(&self.tenant);
            }
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

/// Reads the whole body of a call, at most `[server] body_bytes_max` of it.
pub(crate) async fn read_call(gateway: &Gateway, tenant: &str, body: Body) -> Result<Whole, ApiError> {
    let bytes_max = gateway.runtime.config.server.body_bytes_max;
    let mut read = read(gateway, tenant, body, bytes_max).await;
    if let Err(error) = &mut read
        && error.status == StatusCode::PAYLOAD_TOO_LARGE
    {
        error.message.push_str(" ([server] body_bytes_max)");
    }
    read
}

/// Reads a whole body, at most `bytes_max` of it.
pub(crate) async fn read(gateway: &Gateway, tenant: &str, body: Body, bytes_max: usize) -> Result<Whole, ApiError> {
    let too_large = || {
        let message = format!("the request body has more than {bytes_max} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    };
    let announced = usize::try_from(body.size_hint().upper().unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
    if announced > bytes_max && body.size_hint().lower() > bytes_max as u64 {
        return Err(too_large());
    }
    // Without an announced length (chunked), it may become as long as it may be.
    let mut share = gateway.bodies.counted(tenant, announced.min(bytes_max))?;
    let mut first = None;
    let mut rest = BytesMut::new();
    let mut total = 0;
    let mut pieces = Pieces::of(gateway, body);
    while let Some(data) = pieces.next().await? {
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
    let bytes = if rest.is_empty() { first.unwrap_or_default() } else { rest.freeze() };
    // The call may take long, and only what came is held meanwhile.
    if let Some(share) = &mut share {
        share.shrink(total);
    }
    Ok(Whole { bytes, _share: share })
}

/// A body piece by piece, as it comes. Who sends too slowly is refused.
pub(crate) struct Pieces {
    body: Patient,
    // A byte now and then is never a long pause; the body as a whole has a limit too.
    limit: Duration,
    until: tokio::time::Instant,
}

impl Pieces {
    pub(crate) fn of(gateway: &Gateway, body: Body) -> Pieces {
        let limit = gateway.body_limit();
        let until = tokio::time::Instant::now() + limit;
        Pieces { body: Patient::new(body, gateway.body_idle()), limit, until }
    }

    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        let limit_ms = self.limit.as_millis();
        let too_slow = |_| {
            let message = format!("the request body was not there within {limit_ms} ms ([server] body_ms_max)");
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_too_slow", message)
        };
        loop {
            let frame = tokio::time::timeout_at(self.until, self.body.frame()).await.map_err(too_slow)?;
            let Some(frame) = frame else { return Ok(None) };
            let frame =
                frame.map_err(|e| ApiError::bad_request("invalid_body", format!("the request body broke off: {e}")))?;
            // Trailers are not for us.
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
    }
}

/// A body as the routes get it. What a route leaves unread comes back when the route drops it, because a client that is
/// still sending hears no answer: its connection would break off under it.
struct Lent {
    body: Body,
    unread: Unread,
}

/// Where a body comes back that was not read to its end.
pub(crate) type Unread = Arc<Mutex<Option<Body>>>;

/// Takes the body's end into account; `None` for requests without one.
pub(crate) fn lend(request: &mut axum::extract::Request) -> Option<Unread> {
    if request.body().is_end_stream() {
        return None;
    }
    let unread = Unread::default();
    let body = std::mem::take(request.body_mut());
    *request.body_mut() = Body::new(Lent { body, unread: unread.clone() });
    Some(unread)
}

impl Drop for Lent {
    fn drop(&mut self) {
        if !self.body.is_end_stream() {
            *self.unread.lock() = Some(std::mem::take(&mut self.body));
        }
    }
}

impl http_body::Body for Lent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Reads a body to its end, or as much of it as a module may have, and forgets it.
pub(crate) async fn discard(gateway: &Gateway, body: Body) {
    const DISCARDED_BYTES_MAX: usize = 64 << 20;
    // Who pauses is not in the middle of a write, and may be waiting for the answer.
    const PAUSE_MAX: Duration = Duration::from_secs(1);
    let mut body = Patient::new(body, gateway.body_idle().min(PAUSE_MAX));
    let mut total = 0;
    let until = tokio::time::Instant::now() + gateway.body_limit();
    while let Ok(Some(Ok(frame))) = tokio::time::timeout_at(until, body.frame()).await {
        total += frame.data_ref().map_or(0, Bytes::len);
        if total > DISCARDED_BYTES_MAX {
            return;
        }
    }
}

/// A body for a guest to read as it comes.
pub(crate) fn for_guest(body: Body, idle: Duration) -> RequestBody {
    if body.is_end_stream() {
        return Empty::new().map_err(|never| match never {}).boxed_unsync();
    }
    Patient::new(body, idle).boxed_unsync()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_bodies_is_shared_out_and_comes_back() {
        let config = "[server]\nbodies_bytes_max = 4000\n[limits]\nbodies_bytes_max = 1000\n";
        let held = Arc::new(HeldBodies::new(Arc::new(Config::parse(config).unwrap())));
        let refused = |tenant: &str| held.share(tenant, 1).err().unwrap().to_string();
        let first = held.share("a", 1000).ok().unwrap();
        let short = refused("a");
        assert_eq!(
            short,
            "tenant \"a\" is short of memory for request bodies: 1000 bytes is all there may be at once ([limits] \
             bodies_bytes_max); send fewer large bodies at once, or raise the limit"
        );
        let others: Vec<_> = (0..3).map(|n| held.share(&format!("t{n}"), 1000).ok().unwrap()).collect();
        let short = refused("late");
        assert!(short.starts_with("the server is short of memory") && short.contains("[server] bodies_bytes_max"));
        drop((first, others));
        let mut shrunk = held.share("a", 1000).ok().unwrap();
        shrunk.shrink(100);
        shrunk.shrink(500);
        let rest = held.share("a", 900).ok().unwrap();
        refused("a");
        drop((shrunk, rest));
        assert!(held.share("a", 1).is_ok());
        assert!(held.by_tenant.lock().is_empty());
    }
}
