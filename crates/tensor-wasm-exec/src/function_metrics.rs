//! What each function does, counted by tenant and function.
//!
//! Label sets are what a metrics server pays for, and functions are made by strangers: at most `[server]
//! metrics_functions_max` have series of their own, the rest are counted together as `other`. A function's series go
//! with the function.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use crate::HashMap;
use crate::catalog::FunctionRecord;
use crate::failure::Fault;

/// Bucket bounds of a call's duration in seconds. Fewer than the server's own: each function has them all.
const DURATION_BUCKETS_S: [f64; 9] = [0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 2.5, 10.0];
const BUCKETS: usize = DURATION_BUCKETS_S.len() + 1;

const OTHER: &str = "other";

/// How a call ended.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CallOutcome {
    Ok,
    Fault,
    /// Refused, or given up while it waited.
    Rejected,
    /// Its caller went away while it ran.
    Cancelled,
    /// Ours.
    Bug,
}

const OUTCOMES: [&str; 5] = ["ok", "fault", "rejected", "cancelled", "bug"];
const FAULT_KINDS: [&str; 4] = ["guest_trap", "invoke_timeout", "guest_bad_response", "hostcall_too_large"];

/// One function's numbers. Relaxed: each is read by itself.
#[derive(Debug, Default)]
pub(crate) struct FunctionSeries {
    tenant: String,
    function: String,
    outcomes: [AtomicU64; OUTCOMES.len()],
    faults: [AtomicU64; FAULT_KINDS.len()],
    cpu_ns: AtomicU64,
    gpu_ns: AtomicU64,
    duration_ns: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

#[derive(Debug)]
pub(crate) struct FunctionMetrics {
    functions_max: usize,
    listed: RwLock<Listed>,
    other: Arc<FunctionSeries>,
}

/// The functions that have series of their own.
#[derive(Debug, Default)]
struct Listed {
    by_id: HashMap<String, Arc<FunctionSeries>>,
    /// How many of them each tenant has; none has zero.
    by_tenant: HashMap<String, usize>,
    /// The largest of those numbers.
    most: usize,
}

impl Listed {
    /// Whether a function of this tenant gets a place: there is one, or the tenant that has the most would still have
    /// no fewer. A tenant with thousands of functions does not hide everybody else's.
    fn has_room(&self, functions_max: usize, tenant: &str) -> bool {
        self.by_id.len() < functions_max || self.most > self.by_tenant.get(tenant).copied().unwrap_or(0) + 1
    }

    fn add(&mut self, id: &str, series: Arc<FunctionSeries>) {
        let count = self.by_tenant.entry(series.tenant.clone()).or_default();
        *count += 1;
        self.most = self.most.max(*count);
        self.by_id.insert(id.to_owned(), series);
    }

    fn remove(&mut self, id: &str) -> Option<Arc<FunctionSeries>> {
        let series = self.by_id.remove(id)?;
        if let Some(count) = self.by_tenant.get_mut(&series.tenant) {
            *count -= 1;
            if *count == 0 {
                self.by_tenant.remove(&series.tenant);
            }
        }
        self.most = self.by_tenant.values().copied().max().unwrap_or(0);
        Some(series)
    }

    /// Of the tenant that has the most, the function that was called least.
    fn least_of_most(&self) -> Option<String> {
        let (most, _) = self.by_tenant.iter().find(|(_, count)| **count == self.most)?;
        let calls = |s: &FunctionSeries| s.outcomes.iter().map(|n| n.load(Ordering::Relaxed)).sum::<u64>();
        let of_most = self.by_id.iter().filter(|(_, s)| s.tenant == *most);
        of_most.min_by_key(|(_, s)| calls(s)).map(|(id, _)| id.clone())
    }
}

impl FunctionSeries {
    fn new(tenant: &str, function: &str) -> FunctionSeries {
        FunctionSeries { tenant: tenant.to_owned(), function: function.to_owned(), ..FunctionSeries::default() }
    }

    pub(crate) fn add_cpu(&self, spent_ns: u64) {
        self.cpu_ns.fetch_add(spent_ns, Ordering::Relaxed);
    }

    pub(crate) fn add_gpu(&self, spent_ns: u64) {
        self.gpu_ns.fetch_add(spent_ns, Ordering::Relaxed);
    }

    pub(crate) fn count(&self, outcome: CallOutcome) {
        self.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_fault(&self, fault: &Fault) {
        self.count(CallOutcome::Fault);
        let kind = fault.kind();
        let at = FAULT_KINDS.iter().position(|known| *known == kind).unwrap_or(0);
        self.faults[at].fetch_add(1, Ordering::Relaxed);
    }

    /// How long a call that ran took, from arrival to end.
    pub(crate) fn took(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let at = DURATION_BUCKETS_S.iter().position(|bound| seconds <= *bound).unwrap_or(BUCKETS - 1);
        self.buckets[at].fetch_add(1, Ordering::Relaxed);
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.duration_ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn add(&self, from: &FunctionSeries) {
        for (own, more) in self.numbers().zip(from.numbers()) {
            own.fetch_add(more.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    fn numbers(&self) -> impl Iterator<Item = &AtomicU64> {
        let single = [&self.cpu_ns, &self.gpu_ns, &self.duration_ns];
        self.outcomes.iter().chain(&self.faults).chain(&self.buckets).chain(single)
    }
}

impl FunctionMetrics {
    pub(crate) fn new(functions_max: usize) -> FunctionMetrics {
        let other = Arc::new(FunctionSeries::new(OTHER, OTHER));
        FunctionMetrics { functions_max, listed: RwLock::default(), other }
    }

    /// Where a call of this function is counted. The exclusive lock is taken only to give a function its place, not by
    /// each call of one that gets none.
    pub(crate) fn of(&self, function: &FunctionRecord) -> Arc<FunctionSeries> {
        {
            let listed = self.listed.read();
            if let Some(series) = listed.by_id.get(&function.id) {
                return series.clone();
            }
            if !listed.has_room(self.functions_max, &function.tenant) {
                return self.other.clone();
            }
        }
        let mut listed = self.listed.write();
        // Another call may have been faster.
        if let Some(series) = listed.by_id.get(&function.id) {
            return series.clone();
        }
        if !listed.has_room(self.functions_max, &function.tenant) {
            return self.other.clone();
        }
        if listed.by_id.len() >= self.functions_max
            && let Some(least) = listed.least_of_most()
            && let Some(gone) = listed.remove(&least)
        {
            self.other.add(&gone);
        }
        let series = Arc::new(FunctionSeries::new(&function.tenant, &function.name));
        listed.add(&function.id, series.clone());
        series
    }

    pub(crate) fn forget(&self, function_id: &str) {
        self.listed.write().remove(function_id);
    }
}

impl Collector for FunctionMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut all: Vec<_> = self.listed.read().by_id.values().cloned().collect();
        all.push(self.other.clone());
        all.sort_by(|a, b| (&a.tenant, &a.function).cmp(&(&b.tenant, &b.function)));
        // A series begins with its first call.
        all.retain(|s| s.outcomes.iter().any(|n| n.load(Ordering::Relaxed) > 0));
        let load = |n: &AtomicU64| n.load(Ordering::Relaxed);

        let help = "Calls by how they ended";
        let mut metric = encoder.encode_descriptor("function_invocations", help, None, MetricType::Counter)?;
        for s in &all {
            for (outcome, n) in OUTCOMES.iter().zip(&s.outcomes).filter(|(_, n)| load(n) > 0) {
                let labels =
                    [("tenant_id", s.tenant.as_str()), ("function", s.function.as_str()), ("outcome", *outcome)];
                metric.encode_family(&labels)?.encode_counter::<NoLabelSet, u64, u64>(&load(n), None)?;
            }
        }
        let help = "Calls that ended in a guest's fault, by its kind";
        let mut metric = encoder.encode_descriptor("function_faults", help, None, MetricType::Counter)?;
        for s in &all {
            for (kind, n) in FAULT_KINDS.iter().zip(&s.faults).filter(|(_, n)| load(n) > 0) {
                let labels = [("tenant_id", s.tenant.as_str()), ("function", s.function.as_str()), ("kind", *kind)];
                metric.encode_family(&labels)?.encode_counter::<NoLabelSet, u64, u64>(&load(n), None)?;
            }
        }
        let help = "CPU time of a function's calls";
        let mut metric = encoder.encode_descriptor("function_cpu_seconds", help, None, MetricType::Counter)?;
        for s in &all {
            let labels = [("tenant_id", s.tenant.as_str()), ("function", s.function.as_str())];
            let seconds = Duration::from_nanos(load(&s.cpu_ns)).as_secs_f64();
            metric.encode_family(&labels)?.encode_counter::<NoLabelSet, f64, f64>(&seconds, None)?;
        }
        let help = "Time of the GPU, or of the CPU in its place, for a function's calls";
        let mut metric = encoder.encode_descriptor("function_gpu_seconds", help, None, MetricType::Counter)?;
        for s in all.iter().filter(|s| load(&s.gpu_ns) > 0) {
            let labels = [("tenant_id", s.tenant.as_str()), ("function", s.function.as_str())];
            let seconds = Duration::from_nanos(load(&s.gpu_ns)).as_secs_f64();
            metric.encode_family(&labels)?.encode_counter::<NoLabelSet, f64, f64>(&seconds, None)?;
        }
        let help = "Time from a call's arrival to its end";
        let mut metric = encoder.encode_descriptor("function_duration_seconds", help, None, MetricType::Histogram)?;
        for s in &all {
            let labels = [("tenant_id", s.tenant.as_str()), ("function", s.function.as_str())];
            let bounds = DURATION_BUCKETS_S.into_iter().chain([f64::MAX]);
            let buckets: Vec<(f64, u64)> = bounds.zip(s.buckets.iter().map(load)).collect();
            let count = buckets.iter().map(|(_, n)| n).sum();
            let sum = Duration::from_nanos(load(&s.duration_ns)).as_secs_f64();
            metric.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(tenant: &str, name: &str) -> FunctionRecord {
        FunctionRecord {
            id: format!("{tenant}-{name}"),
            tenant: tenant.to_owned(),
            name: name.to_owned(),
            created_ms: 0,
            revisions: Vec::new(),
            traffic: Vec::new(),
            secret_names: Default::default(),
            secrets: Default::default(),
            superseded: Default::default(),
        }
    }

    fn page(metrics: Arc<FunctionMetrics>) -> String {
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register_collector(Box::new(metrics));
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        page
    }

    #[test]
    fn label_sets_are_bounded_shared_between_tenants_and_go_with_their_function() {
        let metrics = Arc::new(FunctionMetrics::new(4));
        for n in 0..50 {
            metrics.of(&function("flood", &format!("f{n}"))).count(CallOutcome::Ok);
        }
        let own = metrics.of(&function("small", "f"));
        own.count(CallOutcome::Ok);
        own.took(Duration::from_millis(7));
        own.count_fault(&Fault::Deadline { deadline_ms: 1 });
        own.add_cpu(1_500_000_000);
        own.add_gpu(250_000_000);
        let text = page(metrics.clone());
        let has = |line: &str| assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        has(r#"function_invocations_total{tenant_id="small",function="f",outcome="ok"} 1"#);
        has(r#"function_faults_total{tenant_id="small",function="f",kind="invoke_timeout"} 1"#);
        has(r#"function_cpu_seconds_total{tenant_id="small",function="f"} 1.5"#);
        has(r#"function_gpu_seconds_total{tenant_id="small",function="f"} 0.25"#);
        assert_eq!(text.lines().filter(|l| l.starts_with("function_gpu_seconds_total")).count(), 1, "{text}");
        has(r#"function_duration_seconds_bucket{le="0.005",tenant_id="small",function="f"} 0"#);
        has(r#"function_duration_seconds_bucket{le="0.01",tenant_id="small",function="f"} 1"#);
        has(r#"function_duration_seconds_bucket{le="+Inf",tenant_id="small",function="f"} 1"#);
        has(r#"function_invocations_total{tenant_id="other",function="other",outcome="ok"} 47"#);
        assert_eq!(text.lines().filter(|l| l.starts_with("function_cpu_seconds_total")).count(), 5, "{text}");
        let (listed, most) = (metrics.listed.read().by_tenant.clone(), metrics.listed.read().most);
        assert_eq!((listed["flood"], listed["small"], most), (3, 1, 3));
        metrics.forget("small-f");
        own.count(CallOutcome::Ok);
        assert!(!page(metrics).contains("small"), "also where a call is still under way");
    }

    #[test]
    fn a_call_of_an_unlisted_function_waits_for_no_exclusive_lock() {
        let metrics = Arc::new(FunctionMetrics::new(4));
        for n in 0..5 {
            metrics.of(&function("flood", &format!("f{n}"))).count(CallOutcome::Ok);
        }
        let (done, counted) = std::sync::mpsc::channel();
        let reader = metrics.listed.read();
        let shared = metrics.clone();
        std::thread::spawn(move || {
            shared.of(&function("flood", "f4")).count(CallOutcome::Ok);
            let _ = done.send(());
        });
        counted.recv_timeout(Duration::from_secs(10)).expect("counted while another reads");
        drop(reader);
        assert!(page(metrics).contains(r#"{tenant_id="other",function="other",outcome="ok"} 2"#));
    }
}
