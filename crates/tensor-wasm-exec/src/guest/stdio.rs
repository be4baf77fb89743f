//! Where a guest's stdout and stderr go. Never to the server's own: they are kept for `logs` up to a limit, or they are
//! the result of a command, or they are streamed to the caller as they come. Of the latter two the log has the
//! beginning, up to the same limit.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::AsyncWrite;
use tokio::sync::mpsc;
use wasmtime_wasi::cli::{IsTerminal, StdoutStream};
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamError, StreamResult};

use super::running::RunningCall;
use crate::failure::Fault;

/// What a guest may write at once; it asks again for more.
const WRITE_BYTES_MAX: usize = 64 << 10;

/// Everything kept of a call's output.
#[derive(Debug, Default)]
pub(crate) struct Captured {
    /// Something was written; looked at after every call, where two locks would be felt.
    has_output: AtomicBool,
    pub stdout: Mutex<Vec<u8>>,
    pub stderr: Mutex<Vec<u8>>,
    /// stdout was sent on as it came: what is kept of it is for the log, and is not the result.
    pub is_streamed: AtomicBool,
    /// Bytes beyond the limit, counted and dropped.
    pub dropped_bytes: AtomicU64,
}

impl Captured {
    pub(crate) fn is_empty(&self) -> bool {
        !self.has_output.load(Ordering::Acquire)
    }
}

/// What becomes of what the guest writes to one stream.
#[derive(Clone)]
pub(crate) enum Sink {
    /// Kept for the log, up to a limit; the rest is dropped and counted, and the guest is none the wiser.
    Log { bytes_max: usize },
    /// The call's result: exceeding the limit is a fault, because cutting a result would be a lie.
    Result { bytes_max: usize },
    /// Sent on as it comes; the guest waits for a slow reader.
    Stream(mpsc::Sender<Bytes>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Stdout,
    Stderr,
}

/// One of a guest's output streams. Cloned freely: all clones write to the same place.
#[derive(Clone)]
pub(crate) struct Output {
    pub sink: Sink,
    pub which: Which,
    /// The call it writes for; swapped when a reused instance gets its next one.
    pub call: Arc<Mutex<Arc<RunningCall>>>,
}

impl Output {
    fn accept(&self, bytes: &[u8]) -> Result<(), Fault> {
        let call = self.call.lock().clone();
        let captured = &call.used.captured;
        captured.has_output.store(true, Ordering::Release);
        let mut kept = match self.which {
            Which::Stdout => captured.stdout.lock(),
            Which::Stderr => captured.stderr.lock(),
        };
        let (bytes_max, strict) = match &self.sink {
            Sink::Log { bytes_max } => (*bytes_max, false),
            Sink::Result { bytes_max } => (*bytes_max, true),
            Sink::Stream(_) => {
                captured.is_streamed.store(true, Ordering::Relaxed);
                (call.account.limits.log_bytes_max, false)
            }
        };
        let room = bytes_max.saturating_sub(kept.len()).min(bytes.len());
        kept.extend_from_slice(&bytes[..room]);
        if room < bytes.len() {
            if strict {
                return Err(Fault::OutputTooLarge { bytes_max });
            }
            captured.dropped_bytes.fetch_add((bytes.len() - room) as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl IsTerminal for Output {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for Output {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(Writer { output: self.clone(), sending: None })
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }
}

impl OutputStream for Output {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        if let Sink::Stream(sender) = &self.sink {
            match sender.try_send(bytes.clone()) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Closed(_)) => return Err(StreamError::Closed),
                Err(mpsc::error::TrySendError::Full(_)) => return Err(StreamError::trap("write exceeded budget")),
            }
        }
        self.accept(&bytes).map_err(|fault| StreamError::Trap(wasmtime::Error::new(fault)))
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        match &self.sink {
            Sink::Stream(sender) if sender.is_closed() => Err(StreamError::Closed),
            Sink::Stream(sender) if sender.capacity() == 0 => Ok(0),
            _ => Ok(WRITE_BYTES_MAX),
        }
    }
}

#[wasmtime_wasi::async_trait]
impl Pollable for Output {
    async fn ready(&mut self) {
        if let Sink::Stream(sender) = &self.sink {
            let _ = sender.reserve().await;
        }
    }
}

type Sending = Pin<Box<dyn Future<Output = Result<(), mpsc::error::SendError<Bytes>>> + Send + Sync>>;

/// The same for WASI 0.3, which writes through `AsyncWrite`.
struct Writer {
    output: Output,
    sending: Option<Sending>,
}

impl AsyncWrite for Writer {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.as_mut().poll_flush(cx) {
            Poll::Ready(Ok(())) => {}
            Poll::Ready(Err(e)) => return Poll::Ready(Err(e)),
            Poll::Pending => return Poll::Pending,
        }
        let chunk = &buf[..buf.len().min(WRITE_BYTES_MAX)];
        if let Sink::Stream(sender) = &self.output.sink {
            let (sender, bytes) = (sender.clone(), Bytes::copy_from_slice(chunk));
            self.sending = Some(Box::pin(async move { sender.send(bytes).await }));
        }
        self.output.accept(chunk).map_err(io::Error::other)?;
        Poll::Ready(Ok(chunk.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(sending) = &mut self.sending else { return Poll::Ready(Ok(())) };
        let sent = std::task::ready!(sending.as_mut().poll(cx));
        self.sending = None;
        Poll::Ready(sent.map_err(|_| io::ErrorKind::BrokenPipe.into()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(cx)
    }
}
