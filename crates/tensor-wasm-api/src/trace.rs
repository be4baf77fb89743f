//! Trace context: W3C `traceparent` and `tracestate` in, `x-trace-id` and `traceparent` out, spans to an OTLP collector
//! where `TENSOR_WASM_OTLP_ENDPOINT` names one, and the process's own log (`TENSOR_WASM_LOG`).

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState, TracerProvider};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_otlp::{WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

pub(crate) const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";
pub(crate) const TRACE_ID: &str = "x-trace-id";

/// Ends telemetry: what is still in memory is exported.
pub struct Telemetry {
    provider: Option<SdkTracerProvider>,
}

impl Telemetry {
    /// Sets up the log on stderr and, with an endpoint, the export of spans. Once per process.
    pub fn start(filter: &str, otlp_endpoint: Option<&str>) -> Result<Telemetry, String> {
        // A lone word is a level; as the name of a module it would silence everything.
        let is_word = filter.chars().all(char::is_alphanumeric);
        if is_word && !["error", "warn", "info", "debug", "trace", "off"].contains(&filter.to_lowercase().as_str()) {
            return Err(format!("TENSOR_WASM_LOG: {filter:?} is not error, warn, info, debug, trace or off"));
        }
        let filter = EnvFilter::try_new(filter).map_err(|e| format!("TENSOR_WASM_LOG: {e}"))?;
        let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
        let log = fmt::layer().with_writer(std::io::stderr).with_ansi(colours).with_target(false).with_filter(filter);
        let provider = otlp_endpoint.map(exporting).transpose()?;
        let export = provider.as_ref().map(|provider| {
            let ours = tracing_subscriber::filter::filter_fn(|meta| meta.target().starts_with("tensor_wasm"));
            tracing_opentelemetry::layer().with_tracer(provider.tracer("tensor-wasm")).with_filter(ours)
        });
        let registry = tracing_subscriber::registry().with(export).with(log);
        registry.try_init().map_err(|e| e.to_string())?;
        Ok(Telemetry { provider })
    }

    pub fn is_exporting(&self) -> bool {
        self.provider.is_some()
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(provider) = &self.provider
            && let Err(error) = provider.shutdown()
        {
            tracing::warn!(%error, "the last spans could not be exported");
        }
    }
}

fn exporting(endpoint: &str) -> Result<SdkTracerProvider, String> {
    let url = match endpoint.trim_end_matches('/') {
        url if url.ends_with("/v1/traces") => url.to_owned(),
        base => format!("{base}/v1/traces"),
    };
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_endpoint(&url)
        .with_headers(Default::default())
        .build()
        .map_err(|e| format!("TENSOR_WASM_OTLP_ENDPOINT {endpoint:?}: {e}"))?;
    let resource = opentelemetry_sdk::Resource::builder().with_service_name("tensor-wasm").build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}

/// The trace a request belongs to, and our own span in it.
#[derive(Debug, Clone)]
pub(crate) struct Trace {
    pub trace_id: u128,
    /// As guests and callers are told.
    traceparent: HeaderValue,
    /// The caller's, which is not ours to change; guests are told, callers know.
    tracestate: Option<HeaderValue>,
}

/// Where the trace's id is in a `traceparent`, whose version and lengths are ours.
const ID_IN_TRACEPARENT: std::ops::Range<usize> = 3..35;

impl Trace {
    /// Continues the caller's trace, or begins one. A malformed header begins a new one, as the standard asks.
    /// `exported` is the request's span where spans are exported: it joins the caller's trace, and the ids are the
    /// exporter's.
    pub(crate) fn begin(headers: &HeaderMap, exported: Option<&Span>) -> Trace {
        let parent = headers.contains_key(TRACEPARENT).then(|| {
            let context =
                TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
            context.span().span_context().clone()
        });
        let parent = parent.filter(SpanContext::is_valid);
        let own = exported.and_then(|span| join(span, parent.as_ref())).unwrap_or_else(|| child(parent.as_ref()));
        let state = parent.map(|parent| parent.trace_state().header()).filter(|state| !state.is_empty());
        let text = format!("00-{:032x}-{:016x}-{:02x}", own.trace_id(), own.span_id(), own.trace_flags());
        Trace {
            trace_id: u128::from_be_bytes(own.trace_id().to_bytes()),
            traceparent: HeaderValue::from_maybe_shared(Bytes::from(text)).unwrap_or(HeaderValue::from_static("")),
            tracestate: state.and_then(|state| HeaderValue::try_from(state).ok()),
        }
    }

    pub(crate) fn id_hex(&self) -> &str {
        self.traceparent.to_str().ok().and_then(|text| text.get(ID_IN_TRACEPARENT)).unwrap_or_default()
    }

    pub(crate) fn id(&self) -> HeaderValue {
        HeaderValue::from_str(self.id_hex()).unwrap_or(HeaderValue::from_static(""))
    }

    pub(crate) fn traceparent(&self) -> HeaderValue {
        self.traceparent.clone()
    }

    /// Replaces what the caller sent by what the guest is to continue.
    pub(crate) fn hand_on(&self, headers: &mut HeaderMap) {
        headers.insert(TRACEPARENT, self.traceparent.clone());
        match &self.tracestate {
            Some(state) => drop(headers.insert(TRACESTATE, state.clone())),
            None => drop(headers.remove(TRACESTATE)),
        }
    }
}

/// Makes `span` part of the caller's trace for the exporter; the ids the exporter gave it.
fn join(span: &Span, parent: Option<&SpanContext>) -> Option<SpanContext> {
    if let Some(parent) = parent {
        let _ = span.set_parent(Context::new().with_remote_span_context(parent.clone()));
    }
    let own = span.context().span().span_context().clone();
    own.is_valid().then_some(own)
}

/// A span of our own that nobody exports.
fn child(parent: Option<&SpanContext>) -> SpanContext {
    let span_id = SpanId::from(rand::random::<u64>() | 1);
    match parent {
        Some(parent) => {
            SpanContext::new(parent.trace_id(), span_id, parent.trace_flags(), true, parent.trace_state().clone())
        }
        None => {
            let trace_id = TraceId::from(rand::random::<u128>() | 1);
            SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, true, TraceState::default())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traceparent() {
        let begin = |parent: &str, state: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(TRACEPARENT, parent.parse().unwrap());
            headers.insert(TRACESTATE, state.parse().unwrap());
            let trace = Trace::begin(&headers, None);
            trace.hand_on(&mut headers);
            (trace, headers)
        };
        let (trace, told) = begin("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=1");
        assert_eq!(trace.id_hex(), "4bf92f3577b34da6a3ce929d0e0e4736");
        let parent = told[TRACEPARENT].to_str().unwrap();
        assert!(parent.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && parent.ends_with("-01"), "{parent}");
        assert!(!parent.contains("00f067aa0ba902b7"), "a span of our own: {parent}");
        assert_eq!(told[TRACESTATE], "vendor=1");
        for bad in [
            "",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        ] {
            let (trace, told) = begin(bad, "vendor=1");
            assert_ne!(trace.id_hex(), "4bf92f3577b34da6a3ce929d0e0e4736", "{bad}");
            assert_eq!(trace.id_hex().len(), 32);
            assert!(!told.contains_key(TRACESTATE), "the state of a trace that is none: {bad}");
        }
    }
}
