//! Admission: the step from [`crate::Invocation`] to [`Permit`].
//!
//! A permit is the right to run one call. It is RAII: dropping it, for whatever reason and on whatever thread, gives
//! the place to the next in line. The decision itself is `queue.rs`; here are only the lock, the clock and the waiting.

mod queue;
#[cfg(test)]
mod simulation;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::oneshot;

pub use self::queue::{Account, Depth};
use self::queue::{Decision, Queue, Slot, Ticket};
use crate::config::Config;
use crate::failure::Rejection;

type Waiter = oneshot::Sender<()>;

pub struct Admission {
    queue: Mutex<Queue<Waiter>>,
    started: Instant,
    wait_max: Duration,
    closed: AtomicBool,
}

/// The right to run one call now.
pub struct Permit {
    admission: Arc<Admission>,
    slot: Slot,
}

/// A call that may run, for whom, and how long it waited for that.
pub struct Admitted {
    pub permit: Permit,
    pub account: Arc<Account>,
    pub waited: Duration,
}

impl Admission {
    pub fn new(config: Arc<Config>) -> Arc<Admission> {
        let (running_max, waiting_max) = (config.server.concurrency_max, config.server.queue_max);
        let wait_max = config.server.queue_wait();
        let queue = Queue::new(running_max, waiting_max, Box::new(move |tenant| config.limits_of(tenant)));
        Arc::new(Admission {
            queue: Mutex::new(queue),
            started: Instant::now(),
            wait_max,
            closed: AtomicBool::new(false),
        })
    }

    /// Waits for a place for a call that arrived just now, but no longer than `[server] queue_wait_ms_max` nor past
    /// `deadline`.
    pub async fn admit(
        self: &Arc<Self>,
        tenant: &str,
        arrived: Instant,
        deadline: Instant,
    ) -> Result<Admitted, Rejection> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Rejection::ShuttingDown);
        }
        let mut turn = None;
        let decision = self.queue.lock().arrive(tenant, arrived.saturating_duration_since(self.started), || {
            let (waiter, receiver) = oneshot::channel();
            turn = Some(receiver);
            waiter
        });
        let (ticket, account) = match decision {
            Decision::Admitted(account) => return Ok(self.admitted(account, Duration::ZERO)),
            Decision::Rejected(rejection) => return Err(rejection),
            Decision::Waiting(ticket, account) => (ticket, account),
        };
        // Boxed, as is every rare branch of a call: a future is as large as its largest branch, and moved into place
        // whole.
        Box::pin(self.wait(ticket, account, turn, arrived, deadline)).await
    }

    async fn wait(
        self: &Arc<Self>,
        ticket: Ticket,
        account: Arc<Account>,
        turn: Option<oneshot::Receiver<()>>,
        arrived: Instant,
        deadline: Instant,
    ) -> Result<Admitted, Rejection> {
        let mut place = InLine { admission: self.clone(), account: account.clone(), ticket: Some(ticket) };
        let until = deadline.min(arrived + self.wait_max);
        let granted = match turn {
            Some(receiver) => tokio::time::timeout_at(until.into(), receiver).await,
            None => return Err(Rejection::ShuttingDown),
        };
        match granted {
            Ok(Ok(())) => {
                place.ticket = None;
                Ok(self.admitted(account, arrived.elapsed()))
            }
            Ok(Err(_)) => Err(Rejection::ShuttingDown),
            Err(_) => Err(self.waited_too_long(&account)),
        }
    }

    /// From now on every call is refused; those running keep their permits.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub fn depth(&self) -> Depth {
        self.queue.lock().depth()
    }

    pub fn account(&self, tenant: &str) -> Arc<Account> {
        self.queue.lock().account(tenant, self.started.elapsed())
    }

    pub fn accounts(&self) -> Vec<(Arc<Account>, Depth)> {
        self.queue.lock().accounts()
    }

    fn admitted(self: &Arc<Self>, account: Arc<Account>, waited: Duration) -> Admitted {
        Admitted { permit: Permit { admission: self.clone(), slot: account.slot }, account, waited }
    }

    fn release(&self, slot: Slot) {
        // The lock is let go before the waiter is woken. A waiter that vanished meanwhile finds itself granted when its
        // `InLine` drops, and departs from there.
        let granted = self.queue.lock().depart(slot);
        if let Some(granted) = granted {
            let _ = granted.waiter.send(());
        }
    }

    fn waited_too_long(&self, account: &Account) -> Rejection {
        let why = "the call waited as long as it may";
        let retry_after = Duration::from_secs(1);
        let queue = self.queue.lock();
        let own = queue.accounts().into_iter().find(|(a, _)| a.name == account.name).map(|(_, d)| d);
        let Depth { running, waiting } = queue.depth();
        match own {
            Some(own) if own.running >= account.limits.concurrency_max => Rejection::TenantBusy {
                tenant: account.name.to_string(),
                running: own.running,
                queued: own.waiting,
                why,
                retry_after,
            },
            _ => Rejection::ServerBusy { running, queued: waiting, why, retry_after },
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.release(self.slot);
    }
}

/// A place in the line; leaving it early (timeout, client gone) must neither keep it nor lose a grant.
struct InLine {
    admission: Arc<Admission>,
    account: Arc<Account>,
    ticket: Option<Ticket>,
}

impl Drop for InLine {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let still_waiting = self.admission.queue.lock().give_up(&self.account, ticket);
        if !still_waiting {
            self.admission.release(self.account.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Limits, Server};

    fn admission(running_max: usize, wait_ms: u64) -> Arc<Admission> {
        let server = Server { concurrency_max: running_max, queue_wait_ms_max: wait_ms, ..Server::default() };
        let limits = Limits { concurrency_max: 4, ..Limits::default() };
        Admission::new(Arc::new(Config { server, limits, ..Config::default() }))
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn permits_return_when_holders_and_waiters_vanish() {
        let admission = admission(1, 60_000);
        let first = admission.admit("a", Instant::now(), soon()).await.ok().unwrap();
        for _ in 0..100 {
            let waiting = admission.admit("b", Instant::now(), soon());
            assert!(tokio::time::timeout(Duration::from_micros(10), waiting).await.is_err());
        }
        assert_eq!(admission.depth(), Depth { running: 1, waiting: 0 });

        // A waiter that is granted and dropped without ever being polled again gives the place back.
        let mut granted = Box::pin(admission.admit("b", Instant::now(), soon()));
        let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(granted.as_mut().poll(cx))).await;
        assert!(polled.is_pending());
        drop(first);
        assert_eq!(admission.depth(), Depth { running: 1, waiting: 0 });
        drop(granted);
        assert_eq!(admission.depth(), Depth::default());
        drop(admission.admit("c", Instant::now(), soon()).await.ok().unwrap());
    }

    #[tokio::test]
    async fn waiting_ends_with_a_reason() {
        let admission = admission(1, 5);
        let _held = admission.admit("a", Instant::now(), soon()).await.ok().unwrap();
        let refused = admission.admit("b", Instant::now(), soon()).await.err().unwrap();
        assert!(matches!(refused, Rejection::ServerBusy { running: 1, .. }), "{refused}");
        admission.close();
        assert!(matches!(admission.admit("b", Instant::now(), soon()).await.err().unwrap(), Rejection::ShuttingDown));
    }
}
