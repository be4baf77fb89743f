//! Sockets and threads: connections are accepted on one thread and served on one thread per core.
//!
//! A connection stays on the serving thread it was given, and so do the guests its requests start (unless they turn out
//! to be long; see `tensor-wasm-exec/src/guest/supervise.rs`): an instance's memory is touched, reset and touched again
//! by the same core. Connections go to the thread that has the fewest.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tensor_wasm_exec::Runtime;
use tensor_wasm_gpu::DeviceEvent;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::task::TaskTracker;

use crate::audit::{Audit, Line, Target};
use crate::auth::Tokens;
use crate::body::HeldBodies;
use crate::gateway::Gateway;
use crate::hosts::Hosts;
use crate::linger;
use crate::metrics::HttpMetrics;
use crate::routes::Dispatch;

/// Request heads larger than this are refused by the HTTP parser.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Streams one HTTP/2 connection may have open.
const HTTP2_STREAMS_MAX: u32 = 256;

/// After an error such as "too many open files", accepting is tried again this much later.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// How long the last audit lines may take to be written.
const AUDIT_FLUSH: Duration = Duration::from_secs(2);

/// What every HTTP/2 connection begins with.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Between two looks at a connection that has sent a part of that.
const PREFACE_POLL: Duration = Duration::from_millis(10);

pub struct ServerOptions {
    /// `HOST:PORT`. A name is resolved, and every address it has is listened on.
    pub addr: String,
    pub tokens: Tokens,
    pub audit: Target,
    /// Whether spans are exported, so that each request takes its ids from the exporter.
    pub exporting: bool,
    /// What happens to the device, for the audit log.
    pub device_events: Option<std::sync::mpsc::Receiver<DeviceEvent>>,
}

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(
        "{addr} can be reached from other machines and no tokens are configured; set TENSOR_WASM_API_TOKENS, or bind a \
         loopback address such as 127.0.0.1:8080"
    )]
    PublicWithoutTokens { addr: SocketAddr },
    #[error("cannot listen on {addr}: {why}")]
    Listen { addr: SocketAddr, why: std::io::Error },
    #[error("--addr {addr:?}: {why}; give it as ADDRESS:PORT, such as 127.0.0.1:8080 or localhost:8080")]
    Address { addr: String, why: String },
    #[error("the configuration: {0}")]
    Config(String),
    #[error("cannot open the audit log: {0}")]
    Audit(std::io::Error),
    #[error("cannot start serving threads: {0}")]
    Threads(std::io::Error),
}

/// A bound server; [`Server::run`] serves until told to stop.
pub struct Server {
    listeners: Vec<std::net::TcpListener>,
    gateway: Arc<Gateway>,
    audit_thread: Option<JoinHandle<()>>,
}

struct Worker {
    connections: mpsc::UnboundedSender<std::net::TcpStream>,
    open: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

impl Server {
    pub fn bind(runtime: Arc<Runtime>, options: ServerOptions) -> Result<Server, ServeError> {
        let addrs = resolve(&options.addr)?;
        if options.tokens.is_empty() {
            if let Some(addr) = addrs.iter().copied().find(|addr| !addr.ip().is_loopback()) {
                return Err(ServeError::PublicWithoutTokens { addr });
            }
            tracing::warn!("no tokens are configured: every local process may deploy and call functions of any tenant");
        }
        let listening = options.addr.rsplit_once(':').map(|(host, _)| host);
        let hosts = Hosts::new(&runtime.config.server, listening).map_err(ServeError::Config)?;
        let listeners = listen(&addrs)?;
        let (audit, audit_thread) = Audit::open(&options.audit).map_err(ServeError::Audit)?;
        if let Some(events) = options.device_events {
            let audit = audit.clone();
            let follow = move || events.into_iter().for_each(|event| record(&audit, &event));
            std::thread::Builder::new().name("device-events".to_owned()).spawn(follow).map_err(ServeError::Threads)?;
        }
        let metrics = HttpMetrics::new(&runtime);
        let (tokens, exporting) = (options.tokens, options.exporting);
        let bodies = Arc::new(HeldBodies::new(runtime.config.clone()));
        let gateway = Gateway {
            runtime,
            tokens,
            metrics,
            audit,
            bodies,
            uploads: Default::default(),
            open: AtomicUsize::new(0),
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            exporting,
            hosts,
            followers: Default::default(),
            closing: watch::Sender::new(false),
        };
        Ok(Server { listeners, gateway: Arc::new(gateway), audit_thread })
    }

    /// Where it listens; never empty.
    pub fn local_addrs(&self) -> std::io::Result<Vec<SocketAddr>> {
        self.listeners.iter().map(std::net::TcpListener::local_addr).collect()
    }

    /// Serves until `stop` completes, then drains: stops accepting, lets running calls finish up to the configured
    /// limit, and returns how many had to be abandoned.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<usize, ServeError> {
        let limits = &self.gateway.runtime.config.server;
        let watch_closing = self.gateway.closing.subscribe();
        let workers: Vec<Worker> = (0..self.gateway.cores)
            .map(|n| Worker::start(n, self.gateway.clone(), watch_closing.clone()))
            .collect::<Result<_, _>>()
            .map_err(ServeError::Threads)?;
        let listeners: Vec<TcpListener> = self
            .listeners
            .into_iter()
            .map(TcpListener::from_std)
            .collect::<Result<_, _>>()
            .map_err(ServeError::Threads)?;
        let accepting = listeners.iter().map(|l| accept(l, &workers, limits.connections_max, &self.gateway));

        tokio::select! {
            _ = futures_util::future::join_all(accepting) => {}
            () = stop => {}
        }
        drop(listeners);
        let drain = Duration::from_millis(limits.drain_ms_max);
        let until = tokio::time::Instant::now() + drain;
        tracing::info!(limit_ms = limits.drain_ms_max, "shutting down: finishing running calls");
        self.gateway.closing.send_replace(true);
        let abandoned = self.gateway.runtime.drain(drain).await;
        let senders: Vec<_> = workers.into_iter().map(|w| (w.connections, w.thread)).collect();
        let joined = tokio::task::spawn_blocking(move || {
            for (connections, thread) in senders {
                drop(connections);
                let _ = thread.join();
            }
        });
        // Responses that are still being read by slow clients get what is left of the time.
        let _ = tokio::time::timeout_at(until.max(tokio::time::Instant::now() + ACCEPT_RETRY), joined).await;
        self.gateway.audit.close();
        if let Some(thread) = self.audit_thread {
            // A reader of our stdout that has stopped reading must not keep us.
            let joined = tokio::task::spawn_blocking(move || thread.join());
            let _ = tokio::time::timeout(AUDIT_FLUSH, joined).await;
        }
        Ok(abandoned)
    }
}

/// The addresses of `HOST:PORT`, IPv4 first: that is what is printed.
fn resolve(addr: &str) -> Result<Vec<SocketAddr>, ServeError> {
    let wrong = |why: String| ServeError::Address { addr: addr.to_owned(), why };
    let mut addrs: Vec<SocketAddr> = addr.to_socket_addrs().map_err(|e| wrong(e.to_string()))?.collect();
    addrs.sort_by_key(SocketAddr::is_ipv6);
    addrs.dedup();
    if addrs.is_empty() { Err(wrong("the name has no address".to_owned())) } else { Ok(addrs) }
}

/// Listens on all of them, on one port. An address this machine does not have (`::1` where IPv6 is off) is left out as
/// long as there is another.
fn listen(addrs: &[SocketAddr]) -> Result<Vec<std::net::TcpListener>, ServeError> {
    let mut listeners: Vec<std::net::TcpListener> = Vec::new();
    let mut refused = None;
    for addr in addrs {
        let mut addr = *addr;
        if let Some(first) = listeners.first().filter(|_| addr.port() == 0) {
            addr.set_port(first.local_addr().map_err(|why| ServeError::Listen { addr, why })?.port());
        }
        let listening = std::net::TcpListener::bind(addr).and_then(|l| l.set_nonblocking(true).map(|()| l));
        match listening {
            Ok(listener) => listeners.push(listener),
            Err(why) if why.kind() == std::io::ErrorKind::AddrNotAvailable && addrs.len() > 1 => {
                tracing::warn!(%addr, "this machine does not have that address");
                refused = Some(ServeError::Listen { addr, why });
            }
            Err(why) => return Err(ServeError::Listen { addr, why }),
        }
    }
    match refused {
        Some(error) if listeners.is_empty() => Err(error),
        _ => Ok(listeners),
    }
}

fn record(audit: &Audit, event: &DeviceEvent) {
    let (event, subject, duration) = match event {
        DeviceEvent::Lost { why } => ("device.lost", why.as_str(), Duration::ZERO),
        DeviceEvent::Restored { after } => ("device.restored", "", *after),
    };
    let duration_us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    let (revision, token, client) = ("", "", "");
    audit.line(&Line {
        event,
        tenant: "",
        subject,
        revision,
        token,
        client,
        trace_id: "",
        status: 0,
        error: None,
        duration_us,
    });
}

async fn accept(listener: &TcpListener, workers: &[Worker], connections_max: usize, gateway: &Gateway) {
    loop {
        let open: usize = workers.iter().map(|w| w.open.load(Ordering::Relaxed)).sum();
        gateway.metrics.connections.set(i64::try_from(open).unwrap_or(i64::MAX));
        if open >= connections_max {
            // The rest wait in the kernel's backlog.
            tokio::time::sleep(ACCEPT_RETRY).await;
            continue;
        }
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let Some(worker) = workers.iter().min_by_key(|w| w.open.load(Ordering::Relaxed)) else { return };
        if let Ok(stream) = stream.into_std() {
            worker.open.fetch_add(1, Ordering::Relaxed);
            let _ = worker.connections.send(stream);
        }
    }
}

impl Worker {
    fn start(n: usize, gateway: Arc<Gateway>, closing: watch::Receiver<bool>) -> std::io::Result<Worker> {
        let (connections, incoming) = mpsc::unbounded_channel();
        let open = Arc::new(AtomicUsize::new(0));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let count = open.clone();
        let thread = std::thread::Builder::new()
            .name(format!("serve-{n}"))
            .spawn(move || runtime.block_on(serve(gateway, incoming, count, closing)))?;
        Ok(Worker { connections, open, thread })
    }
}

async fn serve(
    gateway: Arc<Gateway>,
    mut incoming: mpsc::UnboundedReceiver<std::net::TcpStream>,
    open: Arc<AtomicUsize>,
    closing: watch::Receiver<bool>,
) {
    let header_read = Duration::from_millis(gateway.runtime.config.server.header_read_ms_max);
    let dispatch = Dispatch::new(gateway.clone());
    let tracker = TaskTracker::new();
    tokio::spawn(linger::watch());
    while let Some(stream) = incoming.recv().await {
        let guard = Open::new(open.clone(), gateway.clone());
        let Ok(stream) = tokio::net::TcpStream::from_std(stream) else { continue };
        let Ok(client) = stream.peer_addr() else { continue };
        tracker.spawn(connection(stream, dispatch.for_client(client.ip()), header_read, closing.clone(), guard));
    }
    tracker.close();
    tracker.wait().await;
}

async fn connection(
    stream: tokio::net::TcpStream,
    dispatch: Dispatch,
    header_read: Duration,
    mut closing: watch::Receiver<bool>,
    _open: Open,
) {
    // The HTTP library waits for a connection's first bytes without end; we do not.
    let Ok(Ok(is_http2)) = tokio::time::timeout(header_read, speaks_http2(&stream)).await else { return };
    let builder = auto::Builder::new(TokioExecutor::new());
    let mut builder = if is_http2 { builder.http2_only() } else { builder.http1_only() };
    builder.http1().timer(TokioTimer::new()).header_read_timeout(header_read).max_buf_size(HEAD_BYTES_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(HTTP2_STREAMS_MAX)
        .keep_alive_interval(Some(header_read))
        .keep_alive_timeout(header_read);
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), dispatch));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = async { drop(closing.wait_for(|closing| *closing).await) } => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(error, "a connection ended early");
    }
}

/// Looks at the first bytes without taking them.
async fn speaks_http2(stream: &tokio::net::TcpStream) -> std::io::Result<bool> {
    let mut first = [0; HTTP2_PREFACE.len()];
    loop {
        let seen = stream.peek(&mut first).await?;
        if seen == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if first[..seen] != HTTP2_PREFACE[..seen] {
            return Ok(false);
        }
        if seen == HTTP2_PREFACE.len() {
            return Ok(true);
        }
        tokio::time::sleep(PREFACE_POLL).await;
    }
}

/// Counts a connection while it is open, among its thread's and among all.
struct Open {
    own: Arc<AtomicUsize>,
    gateway: Arc<Gateway>,
}

impl Open {
    /// The thread's own count was raised when it was given the connection.
    fn new(own: Arc<AtomicUsize>, gateway: Arc<Gateway>) -> Open {
        gateway.open.fetch_add(1, Ordering::Relaxed);
        Open { own, gateway }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.own.fetch_sub(1, Ordering::Relaxed);
        self.gateway.open.fetch_sub(1, Ordering::Relaxed);
    }
}
