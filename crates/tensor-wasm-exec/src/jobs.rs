//! Asynchronous invocations: accepted, kept, run, answered for. Not to be confused with device jobs or with the queue
//! of calls waiting for admission, both of which live in memory only.
//!
//! A job is acknowledged once it is on disk. It runs at least once: a crash between running and recording the result
//! runs it again, and one that was running at too many crashes is failed rather than tried for ever. Tenants take
//! turns, so one tenant's backlog delays no other's job.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{Notify, watch};

use crate::catalog::store::{Change, Read, Table};
use crate::catalog::{Kind, now_ms, storage};
use crate::failure::{Failure, Fault, Rejection};
use crate::invoke::{Call, Invocation, Output};
use crate::runtime::Runtime;

/// A job found running at this many starts of the server is taken to be what stopped it.
const INTERRUPTED_MAX: u32 = 3;

/// Attempts one request may ask for.
pub const ATTEMPTS_MAX: u32 = 10;

/// Waiting before another attempt: doubled each time, up to the maximum.
const BACKOFF_MS: u64 = 100;
const BACKOFF_MS_MAX: u64 = 30_000;

/// Expired jobs are looked for this often.
const SWEEP_EVERY: Duration = Duration::from_secs(60);

pub const IDEMPOTENCY_KEY_BYTES_MAX: usize = 255;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    Queued,
    Running,
    Succeeded,
    Failed,
    Cancelled,
}

impl JobState {
    pub fn is_final(self) -> bool {
        !matches!(self, JobState::Queued | JobState::Running)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            JobState::Queued => "queued",
            JobState::Running => "running",
            JobState::Succeeded => "succeeded",
            JobState::Failed => "failed",
            JobState::Cancelled => "cancelled",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    pub id: String,
    pub tenant: String,
    pub function: String,
    pub export: Option<String>,
    pub args: Value,
    pub stdin: String,
    pub state: JobState,
    /// Times the guest was started for it.
    pub attempts: u32,
    /// Of those, how often the server stopped before it was done.
    pub interrupted: u32,
    pub attempts_max: u32,
    pub created_ms: u64,
    pub started_ms: Option<u64>,
    pub finished_ms: Option<u64>,
    pub result: Option<Value>,
    pub error: Option<JobError>,
    pub idempotency_key: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobError {
    pub kind: String,
    pub message: String,
}

/// What a caller asks for.
#[derive(Debug, Clone)]
pub struct Submission {
    pub tenant: String,
    pub function: String,
    pub export: Option<String>,
    pub args: Value,
    pub stdin: String,
    pub attempts_max: Option<u32>,
    pub idempotency_key: Option<String>,
}

/// Which job an idempotency key stands for, and for which request.
#[derive(Serialize, Deserialize)]
struct Keyed {
    job: String,
    request: String,
}

pub(crate) struct Jobs {
    line: Mutex<Line>,
    arrived: Notify,
    /// Serialises submissions that carry an idempotency key, so that two at once make one job.
    keyed: tokio::sync::Mutex<()>,
    stopping: AtomicBool,
}

/// What was found in the store at start.
pub(crate) struct Recovered {
    pub jobs: Jobs,
    /// Records to write back: those that were running.
    pub changed: Vec<Job>,
    /// Key, bytes and fault of records that cannot be read.
    pub damaged: Vec<(String, Vec<u8>, String)>,
}

struct Running {
    tenant: String,
    /// Told to stop; dropped once the job's record says what became of it.
    signal: watch::Sender<Option<Stop>>,
}

/// Why a running job is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Cancelled,
    /// The server shuts down. The job goes back to the queue as if this attempt had not been.
    Suspended,
}

#[derive(Default)]
struct Line {
    /// Waiting jobs by tenant, each tenant's in order; tenants take turns.
    waiting: HashMap<String, VecDeque<String>>,
    turns: VecDeque<String>,
    running: HashMap<String, Running>,
    /// Workers one tenant's jobs may hold while others wait.
    running_per_tenant_max: usize,
    /// Cancelled between two attempts: not to be queued again.
    cancelled: HashSet<String>,
    /// Queued, running or waiting for another attempt.
    unfinished: HashMap<String, usize>,
    unfinished_total: usize,
    /// Finished jobs by time, oldest first.
    finished: VecDeque<(u64, String, String)>,
}

fn key(tenant: &str, id: &str) -> String {
    format!("{tenant}\0{id}")
}

/// Takes up what an earlier server left, one record at a time.
#[derive(Default)]
pub(crate) struct Recovery {
    line: Line,
    changed: Vec<Job>,
    damaged: Vec<(String, Vec<u8>, String)>,
    finished: Vec<(u64, String, String)>,
}

impl Recovery {
    pub(crate) fn take(&mut self, key: String, read: Read<Job>) {
        let mut job = match read {
            Read::Good(job) => job,
            Read::Damaged(bytes, why) => return self.damaged.push((key, bytes, why)),
        };
        if job.state == JobState::Running {
            job.interrupted = job.interrupted.saturating_add(1);
            job.state = JobState::Queued;
            if job.interrupted >= INTERRUPTED_MAX {
                let message = format!("the server stopped {} times while it ran", job.interrupted);
                job.fail("internal", message);
            }
            self.changed.push(job.clone());
        }
        match job.finished_ms {
            Some(at) => self.finished.push((at, job.tenant, job.id)),
            None => {
                self.line.count(&job.tenant, 1);
                self.line.push(&job.tenant, job.id);
            }
        }
    }

    pub(crate) fn finish(mut self, workers: usize) -> Recovered {
        self.finished.sort();
        self.line.finished = self.finished.into();
        self.line.running_per_tenant_max = (workers * 3 / 4).max(1);
        let jobs = Jobs {
            line: Mutex::new(self.line),
            arrived: Notify::new(),
            keyed: tokio::sync::Mutex::default(),
            stopping: AtomicBool::new(false),
        };
        Recovered { jobs, changed: self.changed, damaged: self.damaged }
    }
}

/// A job handed to a worker; already among the running.
struct Popped {
    tenant: String,
    id: String,
    stop: watch::Receiver<Option<Stop>>,
}

impl Jobs {
    /// No job starts after this; those running go on.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.arrived.notify_waiters();
    }

    pub(crate) fn running(&self) -> usize {
        self.line.lock().running.len()
    }

    /// Puts the running ones back into the queue, for the next server to run.
    pub(crate) fn suspend(&self) {
        for running in self.line.lock().running.values() {
            running.signal.send_if_modified(|stop| stop.is_none() && stop.replace(Stop::Suspended).is_none());
        }
    }

    async fn next(&self) -> Option<Popped> {
        loop {
            let arrived = self.arrived.notified();
            if self.stopping.load(Ordering::Acquire) {
                return None;
            }
            if let Some(next) = self.line.lock().pop() {
                return Some(next);
            }
            arrived.await;
        }
    }

    fn enqueue(&self, tenant: &str, id: String) {
        self.line.lock().push(tenant, id);
        self.arrived.notify_one();
    }
}

impl Line {
    fn push(&mut self, tenant: &str, id: String) {
        let waiting = self.waiting.entry(tenant.to_owned()).or_default();
        if waiting.is_empty() {
            self.turns.push_back(tenant.to_owned());
        }
        waiting.push_back(id);
    }

    /// The next job of the next tenant that holds no more than its part of the workers.
    fn pop(&mut self) -> Option<Popped> {
        let busy = |tenant: &String| {
            self.running.values().filter(|r| r.tenant == *tenant).count() >= self.running_per_tenant_max
        };
        let at = self.turns.iter().position(|tenant| !busy(tenant))?;
        let tenant = self.turns.remove(at)?;
        let waiting = self.waiting.get_mut(&tenant)?;
        let id = waiting.pop_front()?;
        if waiting.is_empty() {
            self.waiting.remove(&tenant);
        } else {
            self.turns.push_back(tenant.clone());
        }
        let (signal, stop) = watch::channel(None);
        self.running.insert(id.clone(), Running { tenant: tenant.clone(), signal });
        Some(Popped { tenant, id, stop })
    }

    fn remove(&mut self, tenant: &str, id: &str) -> bool {
        let Some(waiting) = self.waiting.get_mut(tenant) else { return false };
        let Some(at) = waiting.iter().position(|waiting| waiting == id) else { return false };
        waiting.remove(at);
        if waiting.is_empty() {
            self.waiting.remove(tenant);
            self.turns.retain(|t| t != tenant);
        }
        true
    }

    fn count(&mut self, tenant: &str, by: isize) {
        let own = self.unfinished.entry(tenant.to_owned()).or_default();
        *own = own.saturating_add_signed(by);
        if *own == 0 {
            self.unfinished.remove(tenant);
        }
        self.unfinished_total = self.unfinished_total.saturating_add_signed(by);
    }
}

impl Job {
    fn fail(&mut self, kind: &str, message: String) {
        self.state = JobState::Failed;
        self.error = Some(JobError { kind: kind.to_owned(), message });
        self.finished_ms = Some(now_ms());
    }

    fn record(&self) -> Change {
        Change::put(Table::Jobs, key(&self.tenant, &self.id), self)
    }
}

impl Runtime {
    /// Accepts a job; it is on disk when this returns. A known idempotency key answers with the job it made.
    pub async fn submit(&self, submission: Submission) -> Result<Job, Rejection> {
        if self.admission.is_closed() {
            return Err(Rejection::ShuttingDown);
        }
        let function = self.catalog.resolve(&submission.tenant, &submission.function)?;
        if function.current().is_some_and(|r| r.kind == Kind::HttpHandler) {
            let instead = "jobs call exports and commands; send a request to /run/NAME/…".to_owned();
            return Err(Rejection::WrongKind { kind: "wasi:http", instead });
        }
        let attempts_max = submission.attempts_max.unwrap_or(self.config.jobs.attempts);
        if !(1..=ATTEMPTS_MAX).contains(&attempts_max) {
            return Err(Rejection::InvalidArgs { why: format!("attempts: between 1 and {ATTEMPTS_MAX}") });
        }
        let bytes = serde_json::to_vec(&submission.args).map_or(0, |json| json.len()) + submission.stdin.len();
        if bytes > self.config.jobs.record_bytes_max {
            let bytes_max = self.config.jobs.record_bytes_max;
            return Err(Rejection::TooLarge { what: "a job's request", bytes_max, limit: "[jobs] record_bytes_max" });
        }
        let Some(idempotency_key) = submission.idempotency_key.clone() else {
            return self.accept(submission, attempts_max, None).await;
        };
        if idempotency_key.is_empty() || idempotency_key.len() > IDEMPOTENCY_KEY_BYTES_MAX {
            let why = format!("Idempotency-Key: between 1 and {IDEMPOTENCY_KEY_BYTES_MAX} bytes");
            return Err(Rejection::InvalidArgs { why });
        }
        let request =
            serde_json::to_vec(&(&submission.function, &submission.export, &submission.args, &submission.stdin));
        let request = blake3::hash(&request.unwrap_or_default()).to_hex().to_string();
        let _one_at_a_time = self.jobs.keyed.lock().await;
        let stored_key = key(&submission.tenant, &idempotency_key);
        if let Some(Read::Good(known)) =
            self.catalog.store.get::<Keyed>(Table::IdempotencyKeys, &stored_key).map_err(storage)?
        {
            if known.request != request {
                let why = format!("Idempotency-Key {idempotency_key:?} was used for a different request");
                return Err(Rejection::Conflict { why });
            }
            return self.job(&submission.tenant, &known.job);
        }
        self.accept(submission, attempts_max, Some((stored_key, request))).await
    }

    async fn accept(
        &self,
        submission: Submission,
        attempts_max: u32,
        keyed: Option<(String, String)>,
    ) -> Result<Job, Rejection> {
        let job = Job {
            id: uuid::Uuid::now_v7().to_string(),
            tenant: submission.tenant,
            function: submission.function,
            export: submission.export,
            args: submission.args,
            stdin: submission.stdin,
            state: JobState::Queued,
            attempts: 0,
            interrupted: 0,
            attempts_max,
            created_ms: now_ms(),
            started_ms: None,
            finished_ms: None,
            result: None,
            error: None,
            idempotency_key: submission.idempotency_key,
        };
        self.reserve(&job.tenant)?;
        let mut changes = vec![job.record()];
        if let Some((stored_key, request)) = keyed {
            changes.push(Change::put(Table::IdempotencyKeys, stored_key, &Keyed { job: job.id.clone(), request }));
        }
        if let Err(error) = self.catalog.store.write(changes).await {
            self.jobs.line.lock().count(&job.tenant, -1);
            return Err(storage(error));
        }
        self.metrics.jobs_queued.inc();
        self.jobs.enqueue(&job.tenant, job.id.clone());
        Ok(job)
    }

    fn reserve(&self, tenant: &str) -> Result<(), Rejection> {
        let tenant_max = self.config.limits_of(tenant).jobs_max;
        let mut line = self.jobs.line.lock();
        let own = line.unfinished.get(tenant).copied().unwrap_or(0);
        let retry_after = Duration::from_secs(1);
        if own >= tenant_max {
            return Err(Rejection::TooManyJobs { tenant: tenant.to_owned(), queued: own, retry_after });
        }
        if line.unfinished_total >= self.config.jobs.queue_max {
            let (running, queued) = (line.running.len(), line.unfinished_total);
            let why = "the job queue is full ([jobs] queue_max)";
            return Err(Rejection::ServerBusy { running, queued, why, retry_after });
        }
        line.count(tenant, 1);
        Ok(())
    }

    pub fn job(&self, tenant: &str, id: &str) -> Result<Job, Rejection> {
        match self.catalog.store.get(Table::Jobs, &key(tenant, id)).map_err(storage)? {
            Some(Read::Good(job)) => Ok(job),
            _ => {
                Err(Rejection::NotFound { what: "job", name: id.chars().take(64).collect(), tenant: tenant.to_owned() })
            }
        }
    }

    /// A tenant's jobs, newest first.
    pub fn jobs(&self, tenant: &str, limit: usize) -> Result<Vec<Job>, Rejection> {
        let records = self.catalog.store.newest(Table::Jobs, &key(tenant, ""), limit).map_err(storage)?;
        let good = |(_, read)| match read {
            Read::Good(job) => Some(job),
            Read::Damaged(..) => None,
        };
        Ok(records.into_iter().filter_map(good).collect())
    }

    /// Stops a job that has not finished.
    pub async fn cancel(&self, tenant: &str, id: &str) -> Result<Job, Rejection> {
        let mut job = self.job(tenant, id)?;
        if job.state.is_final() {
            return Err(Rejection::Conflict { why: format!("job {id} is {} already", job.state.as_str()) });
        }
        let running = {
            let mut line = self.jobs.line.lock();
            match line.running.get(id) {
                Some(running) => {
                    running.signal.send_replace(Some(Stop::Cancelled));
                    Some(running.signal.subscribe())
                }
                None => {
                    // Waiting its turn, or for another attempt.
                    if line.remove(tenant, id) {
                        self.metrics.jobs_queued.dec();
                    } else {
                        line.cancelled.insert(id.to_owned());
                    }
                    None
                }
            }
        };
        let Some(mut running) = running else {
            job.state = JobState::Cancelled;
            job.finished_ms = Some(now_ms());
            self.conclude(&job).await;
            return Ok(job);
        };
        // The worker drops its end once the record is written.
        while running.changed().await.is_ok() {}
        self.job(tenant, id)
    }

    /// Starts the workers that run jobs, and the sweep that forgets old ones.
    pub(crate) fn start_jobs(self: &Arc<Self>) {
        let waiting: usize = self.jobs.line.lock().waiting.values().map(VecDeque::len).sum();
        self.metrics.jobs_queued.set(i64::try_from(waiting).unwrap_or(i64::MAX));
        for _ in 0..self.config.jobs.concurrency_max {
            let (runtime, jobs) = (Arc::downgrade(self), self.jobs.clone());
            self.background.spawn(async move {
                while let Some(popped) = jobs.next().await {
                    let Some(runtime) = runtime.upgrade() else { return };
                    runtime.metrics.jobs_queued.dec();
                    runtime.metrics.jobs_active.inc();
                    runtime.run_job(popped).await;
                    runtime.metrics.jobs_active.dec();
                    // A place among its tenant's may be what another job waited for.
                    runtime.jobs.arrived.notify_one();
                }
            });
        }
        let runtime = Arc::downgrade(self);
        self.background.spawn(async move {
            loop {
                tokio::time::sleep(SWEEP_EVERY).await;
                let Some(runtime) = runtime.upgrade() else { return };
                runtime.sweep_jobs().await;
            }
        });
    }

    async fn run_job(self: &Arc<Self>, popped: Popped) {
        let Popped { tenant, id, mut stop } = popped;
        let mut job = match self.job(&tenant, &id) {
            Ok(job) => job,
            Err(error) => {
                let mut line = self.jobs.line.lock();
                line.running.remove(&id);
                match error {
                    Rejection::NotFound { .. } => line.count(&tenant, -1),
                    // The disk, not the job: it keeps its place.
                    error => {
                        tracing::error!(job = id, %error, "a job cannot be read; trying again");
                        drop(line);
                        self.requeue_later(tenant, id, Duration::from_secs(1));
                    }
                }
                return;
            }
        };
        job.state = JobState::Running;
        job.attempts = job.attempts.saturating_add(1);
        job.started_ms = Some(now_ms());
        self.record(&job).await;
        let invocation = Invocation {
            id: uuid::Uuid::parse_str(&id).map_or(0, |id| id.as_u128()),
            tenant: tenant.clone(),
            function: job.function.clone(),
            call: Call::Export {
                export: job.export.clone(),
                args: job.args.clone(),
                stdin: Bytes::from(job.stdin.clone()),
            },
            deadline: None,
        };
        let result = tokio::select! {
            biased;
            result = self.invoke(invocation) => Ok(result),
            stop = stop.wait_for(Option::is_some) => Err(stop.ok().and_then(|stop| *stop).unwrap_or(Stop::Suspended)),
        };
        if let Err(Stop::Suspended) = result {
            job.state = JobState::Queued;
            job.attempts -= 1;
            job.started_ms = None;
            self.record(&job).await;
            let running = self.jobs.line.lock().running.remove(&id);
            // Whoever cancelled it meanwhile waits for the signal to go, and reads the record then.
            if let Some(running) = running
                && *running.signal.borrow() == Some(Stop::Cancelled)
            {
                job.state = JobState::Cancelled;
                job.finished_ms = Some(now_ms());
                self.conclude(&job).await;
            }
            return;
        }
        let again = self.judge(&mut job, result.ok());
        match again {
            Some(_) => self.record(&job).await,
            None => self.conclude(&job).await,
        }
        drop(self.jobs.line.lock().running.remove(&id));
        if let Some(after) = again {
            self.requeue_later(tenant, id, after);
        }
    }

    /// Decides what an attempt amounts to: finished, or another one after a while.
    fn judge(&self, job: &mut Job, result: Option<Result<crate::Outcome, Failure>>) -> Option<Duration> {
        let failure = match result {
            None => {
                job.state = JobState::Cancelled;
                job.finished_ms = Some(now_ms());
                return None;
            }
            Some(Ok(outcome)) => {
                let result = match outcome.output {
                    Output::Value(value) => value,
                    Output::Bytes(_) | Output::Response(_) => Value::Null,
                };
                let bytes_max = self.config.jobs.record_bytes_max;
                if serde_json::to_vec(&result).map_or(0, |json| json.len()) > bytes_max {
                    let fault = Fault::OutputTooLarge { bytes_max };
                    job.fail(
                        fault.kind(),
                        format!("the result has more than {bytes_max} bytes ([jobs] record_bytes_max)"),
                    );
                    return None;
                }
                job.state = JobState::Succeeded;
                job.finished_ms = Some(now_ms());
                job.result = Some(result);
                return None;
            }
            Some(Err(failure)) => failure,
        };
        let busy = match &failure {
            Failure::Rejected(rejection) => rejection.retry_after(),
            _ => None,
        };
        if let Some(after) = busy {
            // Nothing ran, so it does not count as an attempt.
            job.attempts -= 1;
            job.state = JobState::Queued;
            return Some(after);
        }
        let can_retry =
            matches!(failure, Failure::Faulted(..)) && job.attempts.saturating_sub(job.interrupted) < job.attempts_max;
        if can_retry {
            job.state = JobState::Queued;
            job.error = Some(JobError { kind: failure.kind().to_owned(), message: failure.told() });
            let doubled = BACKOFF_MS.saturating_mul(1 << job.attempts.min(20));
            return Some(Duration::from_millis(doubled.min(BACKOFF_MS_MAX)));
        }
        if let Failure::Bug(bug) = &failure {
            tracing::error!(job = job.id, %bug, "a job met a bug");
        }
        job.fail(failure.kind(), failure.told());
        None
    }

    fn requeue_later(self: &Arc<Self>, tenant: String, id: String, after: Duration) {
        let runtime = self.clone();
        self.background.spawn(async move {
            tokio::time::sleep(after).await;
            if !runtime.jobs.line.lock().cancelled.remove(&id) {
                runtime.metrics.jobs_queued.inc();
                runtime.jobs.enqueue(&tenant, id);
            }
        });
    }

    /// Writes a job's record, however long the disk takes to accept it: a result once computed is not thrown away.
    async fn record(&self, job: &Job) {
        while let Err(error) = self.catalog.store.write(vec![job.record()]).await {
            tracing::error!(job = job.id, %error, "could not record a job; trying again");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    async fn conclude(&self, job: &Job) {
        self.record(job).await;
        let mut line = self.jobs.line.lock();
        line.count(&job.tenant, -1);
        line.finished.push_back((job.finished_ms.unwrap_or_default(), job.tenant.clone(), job.id.clone()));
    }

    pub(crate) async fn sweep_jobs(&self) {
        let oldest_kept = now_ms().saturating_sub(self.config.jobs.keep_s.saturating_mul(1000));
        loop {
            let expired = {
                let mut line = self.jobs.line.lock();
                let too_many = line.finished.len() > self.config.jobs.keep_max;
                match line.finished.front() {
                    Some((at, _, _)) if too_many || *at < oldest_kept => line.finished.pop_front(),
                    _ => None,
                }
            };
            let Some((_, tenant, id)) = expired else { return };
            let mut changes = vec![Change::Delete(Table::Jobs, key(&tenant, &id))];
            if let Ok(Job { idempotency_key: Some(used), .. }) = self.job(&tenant, &id) {
                changes.push(Change::Delete(Table::IdempotencyKeys, key(&tenant, &used)));
            }
            if let Err(error) = self.catalog.store.write(changes).await {
                tracing::warn!(%error, "could not forget an old job");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_take_turns() {
        let mut line = Line { running_per_tenant_max: 2, ..Line::default() };
        for id in ["a1", "a2", "a3"] {
            line.push("a", id.to_owned());
        }
        line.push("b", "b1".to_owned());
        let order: Vec<String> = std::iter::from_fn(|| line.pop()).map(|popped| popped.id).collect();
        assert_eq!(order, ["a1", "b1", "a2"], "a third worker is not for the same tenant");
        line.running.remove("a1");
        assert_eq!(line.pop().map(|popped| popped.id).as_deref(), Some("a3"));
    }

    #[test]
    fn removing_the_last_of_a_tenant_ends_its_turn() {
        let mut line = Line { running_per_tenant_max: 1, ..Line::default() };
        line.push("a", "a1".to_owned());
        line.push("b", "b1".to_owned());
        assert!(line.remove("a", "a1"));
        assert!(!line.remove("a", "a1"));
        assert_eq!(line.pop().map(|popped| popped.id).as_deref(), Some("b1"));
        assert!(line.pop().is_none());
    }
}
