//! The memory and tables an instance may take, charged to its tenant where they are taken: Wasmtime asks before every
//! memory is created or grown.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use wasmtime::ResourceLimiter;

use super::running::RunningCall;
use crate::engine;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    InstanceLimit { asked_bytes: u64 },
    TenantLimit,
}

pub(crate) struct Budget {
    /// The call it is spent for; its account is the tenant's.
    pub call: Arc<RunningCall>,
    memory_bytes_max: u64,
    memory_bytes: u64,
    /// The last growth, taken back if it fails after we agreed to it.
    last_growth_bytes: u64,
    pub refused: Option<Refused>,
}

impl Budget {
    pub(crate) fn new(call: Arc<RunningCall>) -> Budget {
        let memory_bytes_max = call.memory_bytes_max();
        Budget { call, memory_bytes_max, memory_bytes: 0, last_growth_bytes: 0, refused: None }
    }

    /// Hands a reused instance to its next call, of the same function.
    pub(crate) fn rebind(&mut self, call: Arc<RunningCall>) {
        call.used.memory_peak_bytes.store(self.memory_bytes, Ordering::Relaxed);
        // The tenant's account is the same one: it is not forgotten while an instance holds it.
        self.call = call;
        self.refused = None;
    }

    fn give_back(&mut self, bytes: u64) {
        self.memory_bytes -= bytes;
        self.call.account.memory_used_bytes.fetch_sub(bytes, Ordering::Relaxed);
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
        let account = &self.call.account;
        let limit = account.limits.tenant_memory_bytes_max;
        let charge = |used: u64| used.checked_add(more).filter(|sum| *sum <= limit);
        if account.memory_used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charge).is_err() {
            self.refused = Some(Refused::TenantLimit);
            return Ok(false);
        }
        self.memory_bytes = total;
        self.last_growth_bytes = more;
        self.call.used.memory_peak_bytes.fetch_max(total, Ordering::Relaxed);
        Ok(true)
    }

    fn memory_grow_failed(&mut self, _error: wasmtime::Error) -> wasmtime::Result<()> {
        let bytes = std::mem::take(&mut self.last_growth_bytes);
        self.give_back(bytes);
        Ok(())
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _max: Option<usize>) -> wasmtime::Result<bool> {
        Ok(desired <= self.call.account.limits.table_elements_max as usize)
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
