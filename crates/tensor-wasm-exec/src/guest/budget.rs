//! The memory and tables an instance may take, charged to its tenant where they are taken: Wasmtime asks before every
//! memory is created or grown.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wasmtime::ResourceLimiter;

use super::stdio::Captured;
use crate::admission::Account;
use crate::engine;

/// What one call used and wrote, readable while it runs and after its store is gone.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    pub cpu_ns: AtomicU64,
    pub memory_peak_bytes: AtomicU64,
    pub captured: Captured,
}

impl Meter {
    pub(crate) fn add_cpu(&self, spent: std::time::Duration) {
        self.cpu_ns.fetch_add(u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    InstanceLimit { asked_bytes: u64 },
    TenantLimit,
}

pub(crate) struct Budget {
    account: Arc<Account>,
    memory_bytes_max: u64,
    memory_bytes: u64,
    /// The last growth, taken back if it fails after we agreed to it.
    last_growth_bytes: u64,
    pub meter: Arc<Meter>,
    pub refused: Option<Refused>,
}

impl Budget {
    pub(crate) fn new(account: Arc<Account>, memory_bytes_max: u64, meter: Arc<Meter>) -> Budget {
        Budget { account, memory_bytes_max, memory_bytes: 0, last_growth_bytes: 0, meter, refused: None }
    }

    /// Hands a reused instance to its next call.
    pub(crate) fn rebind(&mut self, meter: Arc<Meter>) {
        meter.memory_peak_bytes.store(self.memory_bytes, Ordering::Relaxed);
        self.meter = meter;
        self.refused = None;
    }

    fn give_back(&mut self, bytes: u64) {
        self.memory_bytes -= bytes;
        self.account.memory_used_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl ResourceLimiter for Budget {
    fn memory_growing(&mut self, current: usize, desired: usize, _max: Option<usize>) -> wasmtime::Result<bool> {
        let more = desired.saturating_sub(current) as u64;
        let total = self.memory_bytes.saturating_add(more);
        if total > self.memory_bytes_max {
            self.refused = Some(Refused::InstanceLimit { asked_bytes: total });
            return Ok(false);
        }
        let limit = self.account.limits.tenant_memory_bytes_max;
        let charge = |used: u64| used.checked_add(more).filter(|sum| *sum <= limit);
        if self.account.memory_used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charge).is_err() {
            self.refused = Some(Refused::TenantLimit);
            return Ok(false);
        }
        self.memory_bytes = total;
        self.last_growth_bytes = more;
        self.meter.memory_peak_bytes.fetch_max(total, Ordering::Relaxed);
        Ok(true)
    }

    fn memory_grow_failed(&mut self, _error: wasmtime::Error) -> wasmtime::Result<()> {
        let bytes = std::mem::take(&mut self.last_growth_bytes);
        self.give_back(bytes);
        Ok(())
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _max: Option<usize>) -> wasmtime::Result<bool> {
        Ok(desired <= self.account.limits.table_elements_max as usize)
    }

    fn instances(&self) -> usize {
        engine::CORE_INSTANCES_PER_CALL as usize
    }

    fn memories(&self) -> usize {
        engine::MEMORIES_PER_CALL as usize
    }

    fn tables(&self) -> usize {
        engine::TABLES_PER_CALL as usize
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.give_back(self.memory_bytes);
    }
}
