//! Trace context: W3C `traceparent` in, `x-trace-id` and `traceparent` out, spans to an OTLP collector where
//! `TENSOR_WASM_OTLP_ENDPOINT` names one, and the process's own log (`TENSOR_WASM_LOG`).

use http::{HeaderMap, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState, TracerProvider};
use opentelemetry_otlp::{WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

pub(crate) const TRACEPARENT: &str = "traceparent";
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

/// The trace a request belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trace {
    pub trace_id: u128,
    pub parent_id: Option<u64>,
    /// Our own part of it.
    pub span_id: u64,
    pub sampled: bool,
}

impl Trace {
    /// Continues the caller's trace, or begins one. A malformed header begins a new one, as the standard asks.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Trace {
        let given = headers.get(TRACEPARENT).and_then(|v| v.to_str().ok()).and_then(parse);
        let span_id = rand::random::<u64>() | 1;
        match given {
            Some((trace_id, parent_id, sampled)) => Trace { trace_id, parent_id: Some(parent_id), span_id, sampled },
            None => Trace { trace_id: rand::random::<u128>() | 1, parent_id: None, span_id, sampled: true },
        }
    }

    /// Makes `span` part of this trace for the exporter; takes over the ids the exporter gave it.
    pub(crate) fn adopt(&mut self, span: &Span) {
        if let Some(parent_id) = self.parent_id {
            let flags = if self.sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
            let (trace_id, span_id) = (TraceId::from(self.trace_id), SpanId::from(parent_id));
            let remote = SpanContext::new(trace_id, span_id, flags, true, TraceState::default());
            let _ = span.set_parent(opentelemetry::Context::new().with_remote_span_context(remote));
        }
        let context = span.context();
        let own = context.span().span_context().clone();
        if own.is_valid() {
            self.trace_id = u128::from_be_bytes(own.trace_id().to_bytes());
            self.span_id = u64::from_be_bytes(own.span_id().to_bytes());
        }
    }

    pub(crate) fn id_hex(&self) -> String {
        format!("{:032x}", self.trace_id)
    }

    pub(crate) fn traceparent(&self) -> HeaderValue {
        let flags = u8::from(self.sampled);
        let text = format!("00-{:032x}-{:016x}-{flags:02x}", self.trace_id, self.span_id);
        HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static(""))
    }
}

fn parse(text: &str) -> Option<(u128, u64, bool)> {
    let mut parts = text.trim().split('-');
    let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let hex = |s: &str, len: usize| s.len() == len && s.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let well_formed = hex(version, 2) && version != "ff" && hex(trace, 32) && hex(parent, 16) && hex(flags, 2);
    if !well_formed || (version == "00" && parts.next().is_some()) {
        return None;
    }
    let trace_id = u128::from_str_radix(trace, 16).ok().filter(|id| *id != 0)?;
    let parent_id = u64::from_str_radix(parent, 16).ok().filter(|id| *id != 0)?;
    Some((trace_id, parent_id, u8::from_str_radix(flags, 16).ok()? & 1 == 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traceparent() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(parse(good), Some((0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, 0x00f0_67aa_0ba9_02b7, true)));
        for bad in [
            "",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, good.parse().unwrap());
        let trace = Trace::from_headers(&headers);
        assert_eq!(trace.id_hex(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert!(trace.traceparent().to_str().unwrap().starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-"));
    }
}
