//! One call while it runs: who it is for, what its guest is given, what it used. One allocation, shared by everything
//! that takes part in the call, because counting a dozen references for each of a dozen parts took longer than the
//! parts themselves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::SetOnce;
use tracing::Span;

use super::http::Outbound;
use super::stdio::{Captured, Sink};
use super::tensor::plan::PlanLines;
use crate::admission::Account;
use crate::catalog::Serving;
use crate::engine::pinned::PinnedMemories;
use crate::function_metrics::FunctionSeries;
use crate::invoke::Usage;
use crate::logs::Logs;
use crate::metrics::Metrics;
use crate::models::Models;
use tensor_wasm_gpu::Payer;
use tensor_wasm_launch::Kernels;

/// What all calls of a runtime share and their guests may reach. Not the pool: kept instances hold their last call, so
/// that would be a circle.
pub(crate) struct Surroundings {
    /// Which outgoing requests guests may make.
    pub outbound: Outbound,
    /// Where a guest goes on that computes for long.
    pub background: Handle,
    pub metrics: Arc<Metrics>,
    pub logs: Arc<Logs>,
    /// Kernels on the device, once it is open, or why there is none.
    pub kernels: SetOnce<Result<Arc<Kernels>, String>>,
    pub pinned: Arc<PinnedMemories>,
    /// Where plans of guests' tensors wait for their turns.
    pub plans: PlanLines,
    /// Models that functions open, once there is somebody who keeps them.
    pub models: OnceLock<Arc<dyn Models>>,
}

pub(crate) struct RunningCall {
    /// Ties the call to its trace, its logs and its audit line.
    pub id: u128,
    pub serving: Serving,
    pub account: Arc<Account>,
    pub surroundings: Arc<Surroundings>,
    pub arrived: Instant,
    /// Waiting for a permit.
    pub queued: Duration,
    pub deadline_ms: u64,
    /// Whether an instance of an earlier call will do, and this one's for a later call.
    pub may_reuse: bool,
    pub used: Used,
    /// Where it is counted by tenant and function.
    pub series: Arc<FunctionSeries>,
    /// The request's, where spans are exported, until the call ends: an instance that is kept for a later call keeps
    /// this record, and no span is exported as long as somebody has it.
    pub span: parking_lot::Mutex<Span>,
}

/// What a call brings for its guest's WASI context. Held by the guest's store alone: a stream ends when its writer
/// goes.
pub(crate) struct Given {
    pub args: Vec<String>,
    pub stdin: Bytes,
    pub stdout: Sink,
}

/// What a call used and wrote, readable while it runs and after its store is gone.
#[derive(Debug, Default)]
pub(crate) struct Used {
    cpu_ns: AtomicU64,
    /// Of calls that use the device.
    gpu: OnceLock<Arc<GpuTime>>,
    /// From arrival to when the guest last gave its thread back.
    seen_ns: AtomicU64,
    pub memory_peak_bytes: AtomicU64,
    pub captured: Captured,
}

/// What the device did for a call. Its own allocation, which only calls have that use the device: jobs hold on to it
/// that outlast the call, and let go of it under the device's locks. What is seen done after the call is the function's
/// still.
#[derive(Debug)]
pub(crate) struct GpuTime {
    ns: AtomicU64,
    series: Arc<FunctionSeries>,
}

impl Payer for GpuTime {
    fn pay(&self, took: Duration) {
        self.ns.fetch_add(nanos(took), Ordering::Relaxed);
        self.series.add_gpu(nanos(took));
    }
}

impl RunningCall {
    /// Who pays for what the device does for the call.
    pub(crate) fn gpu_time(&self) -> Arc<GpuTime> {
        let new = || Arc::new(GpuTime { ns: AtomicU64::new(0), series: self.series.clone() });
        self.used.gpu.get_or_init(new).clone()
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.arrived + Duration::from_millis(self.deadline_ms)
    }

    pub(crate) fn memory_bytes_max(&self) -> u64 {
        let asked = self.serving.revision().settings.memory_bytes.unwrap_or(u64::MAX);
        asked.min(self.account.limits.memory_bytes_max)
    }

    /// A command's stdout, where that is its result. The log keeps the beginning of it.
    pub(crate) fn take_stdout(&self) -> Vec<u8> {
        if self.used.captured.is_streamed.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let mut kept = self.used.captured.stdout.lock();
        let stdout = std::mem::take(&mut *kept);
        let room = stdout.len().min(self.account.limits.log_bytes_max);
        kept.extend_from_slice(&stdout[..room]);
        self.used.captured.dropped_bytes.fetch_add((stdout.len() - room) as u64, Ordering::Relaxed);
        stdout
    }

    /// stderr, and stdout where it is not the result.
    pub(crate) fn log_sink(&self) -> Sink {
        Sink::Log { bytes_max: self.account.limits.log_bytes_max }
    }

    /// While its instance is made.
    pub(crate) fn instance_span(&self) -> Span {
        tracing::debug_span!(parent: &*self.span.lock(), "instance")
    }

    /// While its guest runs, by OpenTelemetry's semantic conventions for functions.
    pub(crate) fn call_span(&self) -> Span {
        let function = &self.serving.function;
        tracing::debug_span!(
            parent: &*self.span.lock(),
            "call",
            faas.name = function.name,
            faas.version = self.serving.revision().revision.as_str(),
            faas.invocation_id = format!("{:032x}", self.id),
            tensor_wasm.tenant = function.tenant,
        )
    }

    /// Counts what the guest computed until `now`, when it gave its thread back.
    pub(crate) fn add_cpu(&self, spent: Duration, now: Instant) {
        self.used.cpu_ns.fetch_add(nanos(spent), Ordering::Relaxed);
        self.series.add_cpu(nanos(spent));
        self.used.seen_ns.store(nanos(now.saturating_duration_since(self.arrived)), Ordering::Relaxed);
    }

    /// The usage of a call that ended when its guest did.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            cpu_us: self.used.cpu_ns.load(Ordering::Relaxed) / 1000,
            gpu_us: self.used.gpu.get().map_or(0, |gpu| gpu.ns.load(Ordering::Relaxed) / 1000),
            wall_us: self.used.seen_ns.load(Ordering::Relaxed) / 1000,
            queue_us: nanos(self.queued) / 1000,
            memory_peak_bytes: self.used.memory_peak_bytes.load(Ordering::Relaxed),
        }
    }

    /// The usage of a call that was ended just now, whatever its guest was doing.
    pub(crate) fn usage_now(&self) -> Usage {
        Usage { wall_us: nanos(self.arrived.elapsed()) / 1000, ..self.usage() }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
