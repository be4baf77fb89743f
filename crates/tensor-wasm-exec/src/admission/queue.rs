//! Who may run now, who waits, who is refused: the decision alone, as a state machine without clocks, threads or
//! futures. `admission/mod.rs` wraps it for the server; the simulator in `admission/simulation.rs` drives it in virtual
//! time. Not to be confused with the job queue (`jobs.rs`), which is durable.
//!
//! Fairness is stride scheduling: each tenant carries a `pass` that advances by `STRIDE / weight` when one of its calls
//! starts, and a freed place goes to the waiting tenant with the smallest pass. A tenant that was quiet re-enters at
//! the pass of the last start, so silence earns no credit and a newcomer waits for no backlog but its own.
//!
//! Invariants: `running ≤ running_max`, each tenant's `running` ≤ its own limit, and a call waits only while no place
//! is free that its tenant may use.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use slab::Slab;

use crate::HashMap;
use crate::config::Limits;
use crate::failure::Rejection;
use crate::guest::tensor::tenant_account;

/// Pass added per start at weight 1; divisible by small weights without rounding.
const STRIDE: u64 = 1 << 20;

/// Idle tenants are forgotten beyond this many, so that made-up tenant names cannot grow the map without bound.
const TENANTS_MAX: usize = 10_000;

/// When full, ask again after this long: a typical call is over by then.
const BUSY_RETRY: Duration = Duration::from_secs(1);

/// Models that a tenant opens at once: each takes one of the background's 512 threads, also when the call that asked
/// has ended.
const MODEL_OPENINGS_MAX: usize = 4;

/// A tenant's name, limits and the memory its running instances hold; shared by its permits.
#[derive(Debug)]
pub struct Account {
    pub name: Arc<str>,
    pub limits: Limits,
    pub memory_used_bytes: AtomicU64,
    /// What its functions' tensors on the CPU have.
    pub tensors: Arc<tensor_wasm_tensor::Account>,
    /// Who opens models for it: each has a thread, which it keeps until a file is read.
    pub(crate) model_openings: Arc<tokio::sync::Semaphore>,
    /// Where the queue keeps the tenant, for as long as somebody holds the account or a call of it runs.
    pub(super) slot: Slot,
}

impl Account {
    /// An account that no queue knows, for a program in the foreground.
    pub(crate) fn foreground(limits: Limits) -> Account {
        Account::new("foreground".into(), limits, Slot::MAX)
    }

    fn new(name: Arc<str>, limits: Limits, slot: Slot) -> Account {
        let tensors = tenant_account(&limits);
        let model_openings = Arc::new(tokio::sync::Semaphore::new(MODEL_OPENINGS_MAX));
        Account { name, limits, memory_used_bytes: AtomicU64::new(0), tensors, model_openings, slot }
    }
}

pub(super) type Slot = usize;
pub(super) type Ticket = u64;

/// What becomes of an arriving call.
#[derive(Debug)]
pub(super) enum Decision {
    Admitted(Arc<Account>),
    Waiting(Ticket, Arc<Account>),
    Rejected(Rejection),
}

/// A waiting call whose turn has come.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Granted<W> {
    pub ticket: Ticket,
    pub waiter: W,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Depth {
    pub running: usize,
    pub waiting: usize,
}

struct Tenant<W> {
    account: Arc<Account>,
    bucket: Bucket,
    running: usize,
    waiting: VecDeque<Granted<W>>,
    pass: u64,
}

impl<W> Tenant<W> {
    /// Counts a call that starts; returns where the queue's pass stands then.
    fn start(&mut self, pass_now: u64) -> u64 {
        self.running += 1;
        let pass = self.pass.max(pass_now);
        self.pass = pass + STRIDE / u64::from(self.account.limits.weight);
        pass
    }
}

pub(super) struct Queue<W> {
    running_max: usize,
    waiting_max: usize,
    slots: HashMap<Arc<str>, Slot>,
    tenants: Slab<Tenant<W>>,
    /// Tenants with someone waiting, smallest pass first, and their slots.
    order: BTreeSet<(u64, Slot)>,
    total: Depth,
    /// Pass of the most recent start: where newcomers enter.
    pass_now: u64,
    next_ticket: Ticket,
    limits_of: Box<dyn Fn(&str) -> Limits + Send>,
}

impl<W> Queue<W> {
    pub(super) fn new(running_max: usize, waiting_max: usize, limits_of: Box<dyn Fn(&str) -> Limits + Send>) -> Self {
        Queue {
            running_max,
            waiting_max,
            slots: HashMap::default(),
            tenants: Slab::new(),
            order: BTreeSet::new(),
            total: Depth::default(),
            pass_now: 0,
            next_ticket: 0,
            limits_of,
        }
    }

    /// A call of `tenant` arrives at `now` (any monotonic time). `waiter` is made only if it must wait.
    pub(super) fn arrive(&mut self, tenant: &str, now: Duration, waiter: impl FnOnce() -> W) -> Decision {
        let (total, running_max, waiting_max) = (self.total, self.running_max, self.waiting_max);
        let (pass_now, ticket) = (self.pass_now, self.next_ticket);
        let state = self.tenant(tenant, now);
        let limits = &state.account.limits;
        if let Err(retry_after) = state.bucket.take(limits, now) {
            return Decision::Rejected(Rejection::RateLimited {
                tenant: tenant.to_owned(),
                per_second: limits.rate_per_second,
                retry_after,
            });
        }
        if state.waiting.is_empty() && state.running < limits.concurrency_max && total.running < running_max {
            let account = state.account.clone();
            self.pass_now = state.start(pass_now);
            self.total.running += 1;
            return Decision::Admitted(account);
        }
        if state.waiting.len() >= limits.queue_max {
            // A tenant that runs less than it may is short of nothing of its own: the server is full.
            if state.waiting.is_empty() && state.running < limits.concurrency_max {
                return Decision::Rejected(Rejection::ServerBusy {
                    running: total.running,
                    queued: total.waiting,
                    why: "and this tenant's calls do not wait ([limits] queue_max is 0)",
                    retry_after: BUSY_RETRY,
                });
            }
            return Decision::Rejected(Rejection::TenantBusy {
                tenant: tenant.to_owned(),
                running: state.running,
                queued: state.waiting.len(),
                why: "its queue is full",
                retry_after: BUSY_RETRY,
            });
        }
        if total.waiting >= waiting_max {
            return Decision::Rejected(Rejection::ServerBusy {
                running: total.running,
                queued: total.waiting,
                why: "the queue is full",
                retry_after: BUSY_RETRY,
            });
        }
        if state.waiting.is_empty() {
            state.pass = state.pass.max(pass_now);
        }
        state.waiting.push_back(Granted { ticket, waiter: waiter() });
        let account = state.account.clone();
        let entry = (state.pass, account.slot);
        self.next_ticket += 1;
        self.order.insert(entry);
        self.total.waiting += 1;
        Decision::Waiting(ticket, account)
    }

    /// A running call of the tenant ended. Its place goes to the returned waiter, if any may use it.
    pub(super) fn depart(&mut self, slot: Slot) -> Option<Granted<W>> {
        let state = self.tenants.get_mut(slot)?;
        state.running = state.running.saturating_sub(1);
        self.total.running = self.total.running.saturating_sub(1);
        self.grant()
    }

    /// A waiting call gave up. Returns whether it was still waiting; if not, it was granted and must depart.
    pub(super) fn give_up(&mut self, account: &Account, ticket: Ticket) -> bool {
        let Some(state) = self.tenants.get_mut(account.slot) else { return false };
        let Some(at) = state.waiting.iter().position(|w| w.ticket == ticket) else { return false };
        state.waiting.remove(at);
        if state.waiting.is_empty() {
            self.order.remove(&(state.pass, account.slot));
        }
        self.total.waiting -= 1;
        true
    }

    pub(super) fn depth(&self) -> Depth {
        self.total
    }

    /// The account of a tenant, made on first sight.
    pub(super) fn account(&mut self, tenant: &str, now: Duration) -> Arc<Account> {
        self.tenant(tenant, now).account.clone()
    }

    /// Each known tenant with its depth and memory, for the API and metrics.
    pub(super) fn accounts(&self) -> Vec<(Arc<Account>, Depth)> {
        let depth = |t: &Tenant<W>| Depth { running: t.running, waiting: t.waiting.len() };
        self.tenants.iter().map(|(_, t)| (t.account.clone(), depth(t))).collect()
    }

    fn grant(&mut self) -> Option<Granted<W>> {
        if self.order.is_empty() || self.total.running >= self.running_max {
            return None;
        }
        let may_run = |slot: Slot| self.tenants.get(slot).is_some_and(|t| t.running < t.account.limits.concurrency_max);
        let (pass, slot) = self.order.iter().find(|(_, slot)| may_run(*slot)).copied()?;
        self.order.remove(&(pass, slot));
        self.total.waiting -= 1;
        let state = self.tenants.get_mut(slot)?;
        let granted = state.waiting.pop_front()?;
        self.pass_now = state.start(self.pass_now);
        self.total.running += 1;
        if !state.waiting.is_empty() {
            self.order.insert((state.pass, slot));
        }
        Some(granted)
    }

    fn tenant(&mut self, name: &str, now: Duration) -> &mut Tenant<W> {
        let slot = match self.slots.get(name) {
            Some(slot) => *slot,
            None => self.newcomer(name, now),
        };
        &mut self.tenants[slot]
    }

    fn newcomer(&mut self, name: &str, now: Duration) -> Slot {
        if self.tenants.len() >= TENANTS_MAX {
            let held = |t: &Tenant<W>| Arc::strong_count(&t.account) > 1;
            let is_busy = |t: &Tenant<W>| t.running > 0 || !t.waiting.is_empty() || held(t);
            self.tenants.retain(|_, t| is_busy(t) || !t.bucket.is_full(now));
            self.slots.retain(|_, slot| self.tenants.contains(*slot));
        }
        let name: Arc<str> = name.into();
        let limits = (self.limits_of)(&name);
        let bucket = Bucket { tokens: f64::from(limits.rate_burst), at: now, limits: limits.clone() };
        let entry = self.tenants.vacant_entry();
        let slot = entry.key();
        let account = Arc::new(Account::new(name.clone(), limits, slot));
        entry.insert(Tenant { account, bucket, running: 0, waiting: VecDeque::new(), pass: 0 });
        self.slots.insert(name, slot);
        slot
    }
}

/// Requests a tenant may still start: refilled at its rate, never above its burst.
struct Bucket {
    tokens: f64,
    at: Duration,
    limits: Limits,
}

impl Bucket {
    fn take(&mut self, limits: &Limits, now: Duration) -> Result<(), Duration> {
        if limits.rate_per_second == 0.0 {
            return Ok(());
        }
        self.refill(now);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64((1.0 - self.tokens) / limits.rate_per_second))
    }

    fn refill(&mut self, now: Duration) {
        let gained = now.saturating_sub(self.at).as_secs_f64() * self.limits.rate_per_second;
        self.tokens = (self.tokens + gained).min(f64::from(self.limits.rate_burst));
        // A call may come here after one that arrived later; no time counts twice.
        self.at = self.at.max(now);
    }

    fn is_full(&mut self, now: Duration) -> bool {
        self.refill(now);
        self.limits.rate_per_second == 0.0 || self.tokens >= f64::from(self.limits.rate_burst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(running_max: usize, limits: Limits) -> Queue<&'static str> {
        Queue::new(running_max, 100, Box::new(move |_| limits.clone()))
    }

    fn arrive(queue: &mut Queue<&'static str>, tenant: &str, waiter: &'static str) -> Decision {
        queue.arrive(tenant, Duration::ZERO, || waiter)
    }

    fn depart(queue: &mut Queue<&'static str>, tenant: &str) -> Option<Granted<&'static str>> {
        let account = queue.account(tenant, Duration::ZERO);
        queue.depart(account.slot)
    }

    #[test]
    fn a_freed_place_goes_round_the_tenants_not_down_the_line() {
        let mut q = queue(1, Limits::default());
        assert!(matches!(arrive(&mut q, "flood", ""), Decision::Admitted(_)));
        for waiter in ["f1", "f2", "f3"] {
            assert!(matches!(arrive(&mut q, "flood", waiter), Decision::Waiting(..)));
        }
        assert!(matches!(arrive(&mut q, "quiet", "q1"), Decision::Waiting(..)));
        assert_eq!(depart(&mut q, "flood").unwrap().waiter, "q1");
        assert_eq!(depart(&mut q, "quiet").unwrap().waiter, "f1");
    }

    #[test]
    fn a_tenant_that_may_not_wait_is_told_who_is_full() {
        let mut q = queue(2, Limits { queue_max: 0, concurrency_max: 1, ..Limits::default() });
        assert!(matches!(arrive(&mut q, "a", ""), Decision::Admitted(_)));
        let own = arrive(&mut q, "a", "");
        assert!(matches!(own, Decision::Rejected(Rejection::TenantBusy { running: 1, queued: 0, .. })), "{own:?}");
        assert!(matches!(arrive(&mut q, "b", ""), Decision::Admitted(_)));
        let full = arrive(&mut q, "c", "");
        assert!(matches!(full, Decision::Rejected(Rejection::ServerBusy { running: 2, queued: 0, .. })), "{full:?}");
    }

    #[test]
    fn weights_share_places() {
        let limits_of = |name: &str| Limits { weight: if name == "heavy" { 3 } else { 1 }, ..Limits::default() };
        let mut q: Queue<&'static str> = Queue::new(1, 1000, Box::new(limits_of));
        arrive(&mut q, "light", "");
        for _ in 0..40 {
            arrive(&mut q, "heavy", "heavy");
            arrive(&mut q, "light", "light");
        }
        let mut running = "light";
        let mut heavy = 0;
        for _ in 0..40 {
            running = depart(&mut q, running).unwrap().waiter;
            heavy += usize::from(running == "heavy");
        }
        assert!((29..=31).contains(&heavy), "{heavy} of 40 places went to weight 3 of 4");
    }

    #[test]
    fn a_tenant_at_its_own_limit_does_not_block_the_others() {
        let mut q = queue(10, Limits { concurrency_max: 1, queue_max: 1, ..Limits::default() });
        arrive(&mut q, "a", "");
        assert!(matches!(arrive(&mut q, "a", "a2"), Decision::Waiting(..)));
        assert!(matches!(
            arrive(&mut q, "a", "a3"),
            Decision::Rejected(Rejection::TenantBusy { running: 1, queued: 1, .. })
        ));
        assert!(matches!(arrive(&mut q, "b", ""), Decision::Admitted(_)));
        assert_eq!(depart(&mut q, "b"), None, "a is at its limit, so nobody may take the place");
        assert_eq!(depart(&mut q, "a").unwrap().waiter, "a2");
    }

    #[test]
    fn giving_up_frees_the_line_and_says_whether_it_was_too_late() {
        let mut q = queue(1, Limits::default());
        arrive(&mut q, "a", "");
        let Decision::Waiting(first, _) = arrive(&mut q, "a", "a1") else { panic!("should wait") };
        let Decision::Waiting(second, _) = arrive(&mut q, "a", "a2") else { panic!("should wait") };
        let account = q.account("a", Duration::ZERO);
        assert!(q.give_up(&account, first));
        assert_eq!(depart(&mut q, "a").unwrap().ticket, second);
        assert!(!q.give_up(&account, second), "already granted: it must depart instead");
        assert_eq!(q.depth(), Depth { running: 1, waiting: 0 });
    }

    #[test]
    fn the_rate_refills_and_says_when() {
        let mut q = queue(100, Limits { rate_per_second: 10.0, rate_burst: 2, ..Limits::default() });
        let mut at = |ms| q.arrive("a", Duration::from_millis(ms), || "");
        assert!(matches!(at(0), Decision::Admitted(_)));
        assert!(matches!(at(0), Decision::Admitted(_)));
        let Decision::Rejected(Rejection::RateLimited { retry_after, .. }) = at(50) else { panic!("over the rate") };
        assert!((45..=55).contains(&retry_after.as_millis()), "{retry_after:?}");
        assert!(matches!(at(101), Decision::Admitted(_)));
        // Out of order: the time between counts once.
        assert!(matches!(at(5), Decision::Rejected(_)));
        assert!(matches!(at(101), Decision::Rejected(_)));
    }

    #[test]
    fn made_up_tenants_are_forgotten() {
        let mut q = queue(10, Limits::default());
        for n in 0..TENANTS_MAX * 2 {
            let name = format!("t{n}");
            assert!(matches!(q.arrive(&name, Duration::ZERO, || ""), Decision::Admitted(_)));
            depart(&mut q, &name);
        }
        assert!(q.tenants.len() <= TENANTS_MAX + 1, "{}", q.tenants.len());
        assert_eq!(q.slots.len(), q.tenants.len());
    }
}
