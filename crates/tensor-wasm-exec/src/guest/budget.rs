//! The memory and tables an instance may take, charged to its tenant where they are taken: Wasmtime asks before every
//! memory is created or grown. What a guest returns as octets is charged too, until it is sent.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use wasmtime::ResourceLimiter;

use super::running::RunningCall;
use crate::admission::Account;
use crate::engine;
use crate::failure::{Rejection, Shortage};

/// Whose limit refused a memory, or that it was a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryRefusal {
    Instance { asked_bytes: u64 },
    Tenant,
    Table { asked_elements: usize },
}

/// Charges a tenant, unless that is more than it may have.
fn charge(account: &Account, bytes: u64) -> bool {
    let bytes_max = account.limits.tenant_memory_bytes_max;
    let more = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= bytes_max);
    account.memory_used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}

/// The tenant's instances hold all the memory it may have.
pub(crate) fn tenant_memory_short(account: &Account) -> Rejection {
    let shortage = Shortage {
        what: "memory for its instances",
        max: format!("{} bytes", account.limits.tenant_memory_bytes_max),
        limit: "[limits] tenant_memory_bytes_max",
        instead: "wait for its calls to end, or raise the limit",
    };
    let retry_after = std::time::Duration::from_secs(1);
    Rejection::TenantShort { tenant: account.name.to_string(), shortage, retry_after }
}

/// Memory of the host that is a tenant's, for as long as this lives.
pub(crate) struct Charge {
    account: Arc<Account>,
    bytes: u64,
}

impl Charge {
    pub(crate) fn take(account: &Arc<Account>, bytes: u64) -> Result<Charge, Rejection> {
        if !charge(account, bytes) {
            return Err(tenant_memory_short(account));
        }
        Ok(Charge { account: account.clone(), bytes })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.memory_used_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

pub(crate) struct Budget {
    /// The call it is spent for; its account is the tenant's.
    pub call: Arc<RunningCall>,
    memory_bytes_max: u64,
    memory_bytes: u64,
    /// The last growth, taken back if it fails after we agreed to it.
    last_growth_bytes: u64,
    pub refused: Option<MemoryRefusal>,
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
            self.refused = Some(MemoryRefusal::Instance { asked_bytes: total });
            return Ok(false);
        }
        if !charge(&self.call.account, more) {
            self.refused = Some(MemoryRefusal::Tenant);
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
        let fits = desired <= self.call.account.limits.table_elements_max as usize;
        if !fits {
            self.refused = Some(MemoryRefusal::Table { asked_elements: desired });
        }
        Ok(fits)
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
