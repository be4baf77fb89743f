//! Drives a guest's future: under a deadline, accounting its CPU time, and away from the serving threads once it turns
//! out to be long.
//!
//! A guest starts on the thread that serves its request, because most are done before anything else could have been
//! arranged. One that is still computing when its time slice ends moves to the background runtime, whose threads have a
//! lower priority, so that a serving thread answers the next short request at once: the kernel preempts the long guest
//! for it. A guest that waits for I/O is not computing and stays where it is.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tokio::task::JoinHandle;
use tokio::time::Sleep;

use super::GuestError;
use super::running::RunningCall;
use crate::failure::{Bug, Fault};

/// Time slices (of `engine::TICK`) a guest may compute on a serving thread. The first tick may come at once, so two
/// mean between one and two milliseconds.
const SLICES_IN_PLACE: u32 = 2;

thread_local! {
    /// Set by the epoch callback when the guest polled on this thread was interrupted, as opposed to waiting.
    static SLICE_ENDED: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn slice_ended() {
    SLICE_ENDED.set(true);
}

pub(crate) type GuestFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Why a guest has no result of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// It was still running at its deadline and has been dropped.
    AtDeadline,
    /// Host code panicked under it: a bug of ours, for this one call.
    Panicked(String),
}

impl Stopped {
    pub(crate) fn into_error(self, deadline_ms: u64) -> GuestError {
        match self {
            Stopped::AtDeadline => Fault::Deadline { deadline_ms }.into(),
            Stopped::Panicked(message) => Bug(message).into(),
        }
    }
}

/// A guest being driven. Dropping it stops the guest, wherever it runs.
pub(crate) struct Supervised<T> {
    driven: DrivenOn<T>,
    timer: Option<Pin<Box<Sleep>>>,
    /// When what leads up to the first poll began, if nothing was waited for since.
    begun: Option<Instant>,
    slices: u32,
    call: Arc<RunningCall>,
}

/// Which runtime polls the guest.
enum DrivenOn<T> {
    Here(GuestFuture<T>),
    Moved(AbortOnDrop<Result<T, Stopped>>),
    Over,
}

impl<T: Send + 'static> Supervised<T> {
    pub(crate) fn new(guest: GuestFuture<T>, call: Arc<RunningCall>, begun: Option<Instant>) -> Self {
        Supervised { driven: DrivenOn::Here(guest), timer: None, begun, slices: 0, call }
    }

    /// Lets the guest go on by itself on the background runtime, until it ends, meets its deadline or `self` is
    /// dropped.
    pub(crate) fn detach(&mut self) {
        if let DrivenOn::Here(_) = &self.driven {
            let DrivenOn::Here(guest) = std::mem::replace(&mut self.driven, DrivenOn::Over) else { return };
            let call = self.call.clone();
            let task = async move {
                let mut guest = guest;
                let driven = poll_fn(|cx| {
                    let before = thread_cpu();
                    let poll = poll_caught(&mut guest, cx);
                    call.add_cpu(thread_cpu().saturating_sub(before), Instant::now());
                    poll
                });
                tokio::time::timeout_at(call.deadline().into(), driven).await.unwrap_or(Err(Stopped::AtDeadline))
            };
            self.driven = DrivenOn::Moved(AbortOnDrop(Some(self.call.surroundings.background.spawn(task))));
        }
    }

    /// Lets a detached guest run to its end even though nobody waits for it any more.
    pub(crate) fn outlive(&mut self) {
        if let DrivenOn::Moved(task) = std::mem::replace(&mut self.driven, DrivenOn::Over) {
            task.release();
        }
    }
}

impl<T: Send + 'static> Future for Supervised<T> {
    type Output = Result<T, Stopped>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let done = match &mut this.driven {
            DrivenOn::Here(guest) => {
                SLICE_ENDED.set(false);
                // The clock of the thread is a system call, a tenth of an empty call. Here a poll is at most a slice
                // long and hardly ever preempted, so the time it took is the time it computed. Reading the other clock
                // is felt too.
                let before = this.begun.take().unwrap_or_else(Instant::now);
                let poll = poll_caught(guest, cx);
                let now = Instant::now();
                this.call.add_cpu(now - before, now);
                poll
            }
            DrivenOn::Moved(AbortOnDrop(None)) => Poll::Pending,
            DrivenOn::Moved(AbortOnDrop(Some(task))) => {
                let joined = std::task::ready!(Pin::new(task).poll(cx));
                return Poll::Ready(joined.unwrap_or_else(|error| Err(Stopped::Panicked(error.to_string()))));
            }
            DrivenOn::Over => Poll::Pending,
        };
        if let Poll::Ready(done) = done {
            this.driven = DrivenOn::Over;
            return Poll::Ready(done);
        }
        if SLICE_ENDED.get() {
            this.slices += 1;
            if this.slices >= SLICES_IN_PLACE {
                this.detach();
                return self.poll(cx);
            }
        }
        // Armed only now: most guests never wait.
        let deadline = this.call.deadline();
        let timer = this.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline.into())));
        timer.as_mut().poll(cx).map(|()| {
            this.driven = DrivenOn::Over;
            Err(Stopped::AtDeadline)
        })
    }
}

fn poll_caught<T>(guest: &mut GuestFuture<T>, cx: &mut Context<'_>) -> Poll<Result<T, Stopped>> {
    // After a panic the guest is dropped without being polled again, so a torn state is never seen.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| guest.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(payload) => Poll::Ready(Err(Stopped::Panicked(panic_message(&*payload)))),
    }
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a message".to_owned())
}

fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// A task that ends with its handle.
struct AbortOnDrop<T>(Option<JoinHandle<T>>);

impl<T> AbortOnDrop<T> {
    fn release(mut self) {
        self.0 = None;
    }
}

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_a_bug_of_ours() {
        async fn broken() {
            panic!("a host function is wrong");
        }
        let mut guest: GuestFuture<()> = Box::pin(broken());
        let stopped = poll_fn(|cx| poll_caught(&mut guest, cx)).await.unwrap_err();
        assert_eq!(stopped, Stopped::Panicked("a host function is wrong".to_owned()));
        let error = stopped.into_error(10);
        assert!(matches!(&error, GuestError::Bug(Bug(why)) if why == "a host function is wrong"), "{error:?}");
        assert!(matches!(Stopped::AtDeadline.into_error(10), GuestError::Faulted(Fault::Deadline { deadline_ms: 10 })));
    }
}
