//! What the runtime counts about itself. The HTTP metrics are the gateway's (`tensor-wasm-api/src/metrics.rs`); both
//! register into one registry, and `cargo xtask tidy` checks that each registered metric is written somewhere.

use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::function_metrics::FunctionMetrics;

#[derive(Debug)]
pub struct Metrics {
    /// By tenant and function.
    pub(crate) functions: Arc<FunctionMetrics>,
    /// Instances that exist now: running a call, or kept for reuse.
    pub active_instances: Gauge,
    pub instance_spawns: Counter,
    pub instance_terminations: Counter,
    pub invocation_faults: Counter,
    pub jobs_active: Gauge,
    pub jobs_queued: Gauge,
    pub compiles: Counter,
    pub compile_failures: Counter,
    pub artifact_loads: Counter,
    pub model_loads: Counter,
    /// Models in memory, used or idle.
    pub models_loaded: Gauge,
    pub models_loaded_bytes: Gauge,
    pub quarantined: Counter,
    pub log_bytes_dropped: Counter,
    pub streaming_chunks_emitted: Counter,
    pub tensor_plans: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics::new(0)
    }
}

impl Metrics {
    /// With series of their own for so many functions.
    pub fn new(functions_max: usize) -> Metrics {
        Metrics {
            functions: Arc::new(FunctionMetrics::new(functions_max)),
            active_instances: Gauge::default(),
            instance_spawns: Counter::default(),
            instance_terminations: Counter::default(),
            invocation_faults: Counter::default(),
            jobs_active: Gauge::default(),
            jobs_queued: Gauge::default(),
            compiles: Counter::default(),
            compile_failures: Counter::default(),
            artifact_loads: Counter::default(),
            model_loads: Counter::default(),
            models_loaded: Gauge::default(),
            models_loaded_bytes: Gauge::default(),
            quarantined: Counter::default(),
            log_bytes_dropped: Counter::default(),
            streaming_chunks_emitted: Counter::default(),
            tensor_plans: Counter::default(),
        }
    }

    pub fn register(&self, registry: &mut Registry) {
        let gauges = [
            ("active_instances", "Wasm instances in existence", &self.active_instances),
            ("jobs_active", "Jobs running", &self.jobs_active),
            ("jobs_queued", "Jobs waiting to run", &self.jobs_queued),
            ("models_loaded", "Models in memory", &self.models_loaded),
            ("models_loaded_bytes", "Memory of models", &self.models_loaded_bytes),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
        // The encoder appends `_total`.
        let counters = [
            ("instance_spawns", "Instances created", &self.instance_spawns),
            ("instance_terminations", "Instances ended", &self.instance_terminations),
            ("invocation_faults", "Calls that ended in a guest's fault", &self.invocation_faults),
            ("compiles", "Modules compiled", &self.compiles),
            ("compile_failures", "Modules refused by the compiler", &self.compile_failures),
            ("artifact_loads", "Compiled artifacts mapped", &self.artifact_loads),
            ("model_loads", "Models read from disk", &self.model_loads),
            ("quarantined", "Files and records set aside as damaged", &self.quarantined),
            ("log_bytes_dropped", "Guest output beyond the log limit", &self.log_bytes_dropped),
            ("tensor_plans", "Plans of guests' tensors that were to run", &self.tensor_plans),
            ("streaming_chunks_emitted", "Chunks sent by invoke-stream", &self.streaming_chunks_emitted),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        registry.register_collector(Box::new(self.functions.clone()));
    }
}
