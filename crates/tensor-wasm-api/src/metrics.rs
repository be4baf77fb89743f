//! The gateway's own metrics, and the page on which all of them are read. The runtime's are in
//! `tensor-wasm-exec/src/metrics.rs`; both are registered here under the prefix `tensor_wasm`.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Duration;

use prometheus_client::encoding::text::{encode, encode_registry};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tensor_wasm_exec::Runtime;

/// Bucket bounds of request durations in seconds: from a hello's hundred microseconds to the default deadline.
const DURATION_BUCKETS_S: [f64; 15] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 10.0, 30.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: Route,
    method: Method,
    status: StatusLabel,
}

/// The route's pattern as it is registered, never the path a client sent: labels must stay few.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Route(String);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Method(http::Method);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum StatusLabel {
    Ours(u16),
    /// Of a function's answer only the class: guests choose statuses, and each would be a series for as long as the
    /// server runs.
    Class(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TenantLabel {
    tenant_id: String,
}

impl EncodeLabelValue for Route {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.as_str().encode(encoder)
    }
}

impl EncodeLabelValue for Method {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.as_str().encode(encoder)
    }
}

impl EncodeLabelValue for StatusLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        match self {
            StatusLabel::Ours(status) => status.encode(encoder),
            StatusLabel::Class(class) => class.encode(encoder),
        }
    }
}

impl StatusLabel {
    fn class(status: u16) -> StatusLabel {
        StatusLabel::Class(match status {
            200..300 => "2xx",
            300..400 => "3xx",
            400..500 => "4xx",
            500..600 => "5xx",
            _ => "other",
        })
    }
}

pub(crate) struct HttpMetrics {
    requests: Family<RequestLabels, Counter>,
    duration: Histogram,
    pub in_flight: Gauge,
    pub connections: Gauge,
    tenant_memory: Family<TenantLabel, Gauge>,
    tensor_memory: Family<TenantLabel, Gauge>,
    plans_running: Gauge,
    plans_waiting: Gauge,
    queued: Gauge,
    functions: Gauge,
    registry: Registry,
    /// The device's, once there is one: it is opened after the server has begun to serve.
    device: OnceLock<Registry>,
}

impl HttpMetrics {
    pub(crate) fn new(runtime: &Runtime) -> HttpMetrics {
        let mut registry = Registry::with_prefix("tensor_wasm");
        let requests = Family::<RequestLabels, Counter>::default();
        registry.register("http_requests", "Requests answered", requests.clone());
        let duration = Histogram::new(DURATION_BUCKETS_S);
        registry.register("http_request_duration_seconds", "Time from request head to response head", duration.clone());
        let in_flight = Gauge::default();
        registry.register("http_requests_in_flight", "Requests being handled", in_flight.clone());
        let connections = Gauge::default();
        registry.register("http_connections", "Client connections open", connections.clone());
        let tenant_memory = Family::<TenantLabel, Gauge>::default();
        let help = "Linear memory held by a tenant's instances";
        registry.register("cpu_memory_bytes_per_tenant", help, tenant_memory.clone());
        let tensor_memory = Family::<TenantLabel, Gauge>::default();
        let help = "Memory of the CPU held by a tenant's tensors";
        registry.register("tensor_memory_bytes_per_tenant", help, tensor_memory.clone());
        let (plans_running, plans_waiting) = (Gauge::default(), Gauge::default());
        registry.register("tensor_plans_running", "Plans of guests' tensors being computed", plans_running.clone());
        registry.register("tensor_plans_waiting", "Plans waiting for their turn", plans_waiting.clone());
        let queued = Gauge::default();
        registry.register("invocations_queued", "Calls waiting for admission", queued.clone());
        let functions = Gauge::default();
        registry.register("functions", "Functions deployed", functions.clone());
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION")), ("git_sha", env!("TENSOR_WASM_GIT_SHA"))]);
        registry.register("build", "The build that is running", build);
        runtime.metrics.register(&mut registry);
        HttpMetrics {
            requests,
            duration,
            in_flight,
            connections,
            tenant_memory,
            tensor_memory,
            plans_running,
            plans_waiting,
            queued,
            functions,
            registry,
            device: OnceLock::new(),
        }
    }

    /// `is_functions`: the answer is a function's, and so is its status.
    pub(crate) fn answered(&self, route: &str, method: &http::Method, status: u16, is_functions: bool, took: Duration) {
        // Methods are the client's to invent; the unusual ones are counted together.
        let method = match method.as_str() {
            "GET" | "HEAD" | "POST" | "PUT" | "DELETE" | "PATCH" | "OPTIONS" => method.clone(),
            _ => http::Method::TRACE,
        };
        let status = if is_functions { StatusLabel::class(status) } else { StatusLabel::Ours(status) };
        let labels = RequestLabels { route: Route(route.to_owned()), method: Method(method), status };
        self.requests.get_or_create(&labels).inc();
        self.duration.observe(took.as_secs_f64());
    }

    /// The Prometheus page. Gauges that mirror state elsewhere are read now.
    pub(crate) fn page(&self, runtime: &Runtime) -> String {
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.tenant_memory.clear();
        self.tensor_memory.clear();
        for (account, _) in runtime.admission.accounts() {
            let label = TenantLabel { tenant_id: account.name.to_string() };
            let bytes = account.memory_used_bytes.load(Ordering::Relaxed);
            self.tenant_memory.get_or_create(&label).set(i64::try_from(bytes).unwrap_or(i64::MAX));
            self.tensor_memory.get_or_create(&label).set(count(account.tensors.used_bytes()));
        }
        let (running, waiting) = runtime.tensor_plans();
        self.plans_running.set(count(running));
        self.plans_waiting.set(count(waiting));
        self.queued.set(count(runtime.admission.depth().waiting));
        self.functions.set(count(runtime.catalog.len()));
        let mut page = String::new();
        let device = runtime.device().map(|device| {
            self.device.get_or_init(|| {
                let mut registry = Registry::with_prefix("tensor_wasm");
                device.register(&mut registry);
                registry
            })
        });
        let encoded = device.map_or(Ok(()), |registry| encode_registry(&mut page, registry));
        match encoded.and_then(|()| encode(&mut page, &self.registry)) {
            Ok(()) => page,
            Err(error) => format!("# encoding failed: {error}\n"),
        }
    }
}
