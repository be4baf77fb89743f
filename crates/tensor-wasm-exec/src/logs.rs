//! The last lines guests wrote, per function, in memory: bounded in entries, in bytes per entry (`[limits]
//! log_bytes_max`) and in functions. A record of what happened recently, not an archive; ship stdout of the audit log
//! for that.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use crate::guest::running::RunningCall;

/// Calls remembered per function.
const ENTRIES_MAX: usize = 100;

/// Bytes remembered per function.
const FUNCTION_BYTES_MAX: usize = 1 << 20;

/// Functions remembered; beyond it the one that wrote longest ago is forgotten.
const FUNCTIONS_MAX: usize = 1_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub at_ms: u64,
    pub invocation: String,
    pub revision: String,
    pub stdout: String,
    pub stderr: String,
    /// Bytes beyond the limit that were not kept.
    pub dropped_bytes: u64,
    /// What the call failed with, if it did.
    pub fault: Option<String>,
}

#[derive(Default)]
pub struct Logs {
    functions: Mutex<HashMap<String, Function>>,
}

#[derive(Default)]
struct Function {
    entries: VecDeque<Entry>,
    bytes: usize,
    written_ms: u64,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.stdout.len() + self.stderr.len() + self.fault.as_ref().map_or(0, String::len) + 200
    }
}

impl Logs {
    /// Keeps what a call wrote; a silent call without a fault leaves no entry.
    pub(crate) fn keep(&self, call: &RunningCall, fault: Option<String>) {
        let (captured, bytes_max) = (&call.used.captured, call.account.limits.log_bytes_max);
        if fault.is_none()
            && (captured.is_empty() || captured.stdout.lock().is_empty() && captured.stderr.lock().is_empty())
        {
            return;
        }
        let take = |buffer: &Mutex<Vec<u8>>| {
            let mut bytes = std::mem::take(&mut *buffer.lock());
            // A result that never became one may be larger than a log.
            let excess = bytes.len().saturating_sub(bytes_max);
            captured.dropped_bytes.fetch_add(excess as u64, Ordering::Relaxed);
            bytes.truncate(bytes_max);
            bytes.shrink_to_fit();
            String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
        };
        let (stdout, stderr) = (take(&captured.stdout), take(&captured.stderr));
        let entry = Entry {
            at_ms: crate::catalog::now_ms(),
            invocation: format!("{:032x}", call.id),
            revision: call.serving.revision().revision.short().to_owned(),
            stdout,
            stderr,
            dropped_bytes: captured.dropped_bytes.swap(0, Ordering::Relaxed),
            fault,
        };
        self.push(&call.serving.function.id, entry);
    }

    fn push(&self, function: &str, entry: Entry) {
        let mut functions = self.functions.lock();
        if !functions.contains_key(function) && functions.len() >= FUNCTIONS_MAX {
            let oldest = functions.iter().min_by_key(|(_, f)| f.written_ms).map(|(id, _)| id.clone());
            oldest.and_then(|id| functions.remove(&id));
        }
        let log = functions.entry(function.to_owned()).or_default();
        log.written_ms = entry.at_ms;
        log.bytes += entry.bytes();
        log.entries.push_back(entry);
        while log.entries.len() > ENTRIES_MAX || (log.bytes > FUNCTION_BYTES_MAX && log.entries.len() > 1) {
            let Some(gone) = log.entries.pop_front() else { break };
            log.bytes -= gone.bytes();
        }
    }

    /// The most recent entries, oldest first.
    pub fn tail(&self, function: &str, limit: usize) -> Vec<Entry> {
        let functions = self.functions.lock();
        let Some(log) = functions.get(function) else { return Vec::new() };
        let skip = log.entries.len().saturating_sub(limit);
        log.entries.iter().skip(skip).cloned().collect()
    }

    pub(crate) fn forget(&self, function: &str) {
        self.functions.lock().remove(function);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(bytes: usize, at_ms: u64) -> Entry {
        Entry {
            at_ms,
            invocation: String::new(),
            revision: String::new(),
            stdout: "x".repeat(bytes),
            stderr: String::new(),
            dropped_bytes: 0,
            fault: None,
        }
    }

    #[test]
    fn bounded_in_every_direction() {
        let logs = Logs::default();
        for n in 0..500 {
            logs.push("small", entry(1, n));
            logs.push("large", entry(FUNCTION_BYTES_MAX / 4, n));
        }
        assert_eq!(logs.tail("small", 1000).len(), ENTRIES_MAX);
        assert_eq!(logs.tail("small", 1)[0].at_ms, 499);
        assert_eq!(logs.tail("large", 1000).len(), 3);
        for n in 0..FUNCTIONS_MAX as u64 * 2 {
            logs.push(&format!("f{n}"), entry(1, 1000 + n));
        }
        assert_eq!(logs.functions.lock().len(), FUNCTIONS_MAX);
        assert!(logs.tail("small", 1).is_empty(), "the oldest was forgotten");
    }
}
