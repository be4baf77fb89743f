//! What a device counts about itself, for whoever keeps a registry.

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

#[derive(Debug)]
pub(crate) struct Metrics {
    pub kernel_dispatches: Counter,
    /// From sending a kernel to the device to seeing it done.
    pub kernel_latency: Histogram,
    pub bytes_to_device: Counter,
    pub bytes_from_device: Counter,
    pub device_lost: Counter,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            kernel_dispatches: Counter::default(),
            kernel_latency: Histogram::new(exponential_buckets(2e-6, 2.0, 22)),
            bytes_to_device: Counter::default(),
            bytes_from_device: Counter::default(),
            device_lost: Counter::default(),
        }
    }
}

/// Numbers that are read off the device when somebody asks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reading {
    pub memory_used_bytes: u64,
    pub by_tenant: Vec<(String, u64)>,
    pub queue_depth: usize,
}

pub(crate) type Reader = Box<dyn Fn() -> Reading + Send + Sync>;

/// Reads the gauges at scrape time, so that no allocation has to keep them.
pub(crate) struct Gauges(pub Arc<Mutex<Reader>>);

impl std::fmt::Debug for Gauges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gauges")
    }
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let reading = (self.0.lock())();
        let number = |n: u64| ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX));
        let mut one = |name: &str, help: &str, value: u64| {
            let gauge = number(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
        };
        one("gpu_memory_used_bytes", "Device memory in buffers", reading.memory_used_bytes)?;
        one("gpu_queue_depth", "Device jobs waiting to be sent", reading.queue_depth as u64)?;
        let family = number(0).metric_type();
        let mut tenants = encoder.encode_descriptor(
            "gpu_memory_bytes_per_tenant",
            "Device memory in buffers, by tenant",
            None,
            family,
        )?;
        for (tenant, bytes) in &reading.by_tenant {
            number(*bytes).encode(tenants.encode_family(&[("tenant_id", tenant.as_str())])?)?;
        }
        Ok(())
    }
}

impl Metrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        // The encoder appends `_total`.
        let counters = [
            ("kernel_dispatches", "Kernels sent to a device", &self.kernel_dispatches),
            ("gpu_bytes_to_device", "Bytes copied to the device", &self.bytes_to_device),
            ("gpu_bytes_from_device", "Bytes copied from the device", &self.bytes_from_device),
            ("gpu_device_lost", "Times a device worker was lost", &self.device_lost),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        registry.register(
            "kernel_latency_seconds",
            "From sending a kernel to seeing it done",
            self.kernel_latency.clone(),
        );
    }
}
