//! The last lines guests wrote, per function, in memory: bounded in entries, in bytes per entry (`[limits]
//! log_bytes_max`) and in functions. A record of what happened recently, not an archive; ship stdout of the audit log
//! for that.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::guest::running::RunningCall;

/// Calls remembered per function.
const ENTRIES_MAX: usize = 100;

/// Bytes remembered per function.
const FUNCTION_BYTES_MAX: usize = 1 << 20;

/// Bytes of what a call failed with.
const FAULT_BYTES_MAX: usize = 4 << 10;

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
    /// How many entries there ever were: the last of `entries` is number `written`.
    written: u64,
    /// Says `written` to whoever follows; dropped with the function.
    changed: watch::Sender<u64>,
}

/// Somebody who reads a function's log as it is written.
pub struct Follower {
    logs: Arc<Logs>,
    function: String,
    changed: watch::Receiver<u64>,
    /// Entries seen, or too old to be.
    seen: u64,
}

/// What was written since a follower last asked.
#[derive(Debug, PartialEq, Eq)]
pub struct News {
    /// Never empty, oldest first.
    pub entries: Vec<Entry>,
    /// Entries that were forgotten before the follower came for them.
    pub missed: u64,
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
        // What a guest returned as its error may be in it.
        let fault = fault.map(|mut fault| {
            fault.truncate(fault.floor_char_boundary(FAULT_BYTES_MAX));
            fault
        });
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
        let log = log_of(&mut functions, function);
        log.written_ms = entry.at_ms;
        log.bytes += entry.bytes();
        log.entries.push_back(entry);
        while log.entries.len() > ENTRIES_MAX || (log.bytes > FUNCTION_BYTES_MAX && log.entries.len() > 1) {
            let Some(gone) = log.entries.pop_front() else { break };
            log.bytes -= gone.bytes();
        }
        log.written += 1;
        log.changed.send_replace(log.written);
    }

    /// Follows a function's log, beginning with its last `recent` entries.
    pub fn follow(self: &Arc<Self>, function: &str, recent: usize) -> Follower {
        let mut functions = self.functions.lock();
        let log = log_of(&mut functions, function);
        let seen = log.written - log.entries.len().min(recent) as u64;
        let changed = log.changed.subscribe();
        Follower { logs: self.clone(), function: function.to_owned(), changed, seen }
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

/// A function's log, in the place of the one that wrote longest ago if there are too many.
fn log_of<'a>(functions: &'a mut HashMap<String, Function>, function: &str) -> &'a mut Function {
    if !functions.contains_key(function) && functions.len() >= FUNCTIONS_MAX {
        let is_followed = |f: &Function| f.changed.receiver_count() > 0;
        let oldest = functions.iter().min_by_key(|(_, f)| (is_followed(f), f.written_ms)).map(|(id, _)| id.clone());
        oldest.and_then(|id| functions.remove(&id));
    }
    functions.entry(function.to_owned()).or_default()
}

impl Follower {
    /// Waits for what is written next; `None` once the function is gone.
    pub async fn next(&mut self) -> Option<News> {
        loop {
            let written = *self.changed.borrow_and_update();
            if written > self.seen
                && let Some(news) = self.take()
            {
                return Some(news);
            }
            self.changed.changed().await.ok()?;
        }
    }

    fn take(&mut self) -> Option<News> {
        let functions = self.logs.functions.lock();
        let log = functions.get(&self.function)?;
        let first = log.written - log.entries.len() as u64;
        let missed = first.saturating_sub(self.seen);
        let skip = usize::try_from(self.seen.max(first) - first).unwrap_or(usize::MAX);
        self.seen = log.written;
        let entries: Vec<_> = log.entries.iter().skip(skip).cloned().collect();
        (!entries.is_empty()).then_some(News { entries, missed })
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

    #[test]
    fn followers_see_everything_or_how_much_they_missed() {
        let logs = Arc::new(Logs::default());
        let now = |follower: &mut Follower| futures_util::FutureExt::now_or_never(follower.next());
        (0..5).for_each(|n| logs.push("f", entry(1, n)));
        let mut follower = logs.follow("f", 2);
        let times = |news: News| (news.entries.iter().map(|e| e.at_ms).collect::<Vec<_>>(), news.missed);
        assert_eq!(now(&mut follower).flatten().map(times), Some((vec![3, 4], 0)));
        assert!(now(&mut follower).is_none(), "it waits");
        logs.push("f", entry(1, 5));
        logs.push("g", entry(1, 6));
        assert_eq!(now(&mut follower).flatten().map(times), Some((vec![5], 0)));
        (0..ENTRIES_MAX as u64 + 7).for_each(|n| logs.push("f", entry(1, n)));
        let late = now(&mut follower).flatten().unwrap();
        assert_eq!((late.entries.len(), late.missed), (ENTRIES_MAX, 7));
        let mut silent = logs.follow("never-called", 20);
        assert!(now(&mut silent).is_none());
        logs.forget("f");
        assert_eq!(now(&mut follower), Some(None), "the function is gone");
    }
}
