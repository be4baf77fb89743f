//! Waiting for what was sent: a job, by the ticket that sending it returned, or all that a stream was sent so far.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

use super::{Link, StreamUse};
use crate::device::staging::Keep;
use crate::error::DeviceError;
use crate::number::half;
use crate::queue::job::{Answer, Cell};
use crate::wait::{TASK_SPIN, spin_until};

/// A job that was sent. A future; dropping it does not stop the job.
pub(crate) struct Ticket {
    link: Arc<Link>,
    cell: u32,
    stream: usize,
    number: u32,
    spin_until: Option<Instant>,
    has_kept: bool,
    registered: Option<Waker>,
    is_taken: bool,
}

/// Wakes a thread that has parked.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl Link {
    /// Waits in this thread until the stream has come so far, or never will.
    fn park_until(&self, stream: usize, number: u32) {
        if spin_until(|| self.is_over(stream, number), self.spin) {
            return;
        }
        self.register(stream, number, Waker::from(Arc::new(Unpark(std::thread::current()))));
        while !self.is_over(stream, number) {
            std::thread::park();
        }
    }

    /// Waits in this thread until all that the stream was sent so far is done. Sends nothing: who waits for an idle
    /// stream has waited for a load.
    pub(crate) fn synchronize(&self, stream: usize) -> Result<(), DeviceError> {
        let last = self.state.lock().streams[stream].as_ref().map(|own| own.next_number.wrapping_sub(1));
        let Some(last) = last else { return Ok(()) };
        if !self.is_done(stream, last) {
            self.park_until(stream, last);
            self.settle_for_others(&mut self.state.lock(), Instant::now());
        }
        if self.is_done(stream, last) { Ok(()) } else { Err(self.lost().unwrap_or(DeviceError::StaleHandle)) }
    }
}

impl Ticket {
    /// Of a job in this cell, with this number on its stream; whether it brings something that is kept for it.
    pub(super) fn new(link: Arc<Link>, cell: u32, stream: usize, number: u32, has_kept: bool) -> Ticket {
        Ticket { link, cell, stream, number, spin_until: None, has_kept, registered: None, is_taken: false }
    }

    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    pub(crate) fn cell(&self) -> u32 {
        self.cell
    }

    pub(crate) fn is_over(&self) -> bool {
        self.link.is_over(self.stream, self.number)
    }

    /// Has the completion thread see that it is over, also if nobody waits for it.
    pub(crate) fn notice(&self) {
        self.link.register(self.stream, self.number, Waker::noop().clone());
    }

    /// The job, for whoever has to come after it.
    pub(crate) fn as_use(&self) -> StreamUse {
        StreamUse { stream: half(self.stream), number: self.number }
    }

    /// The answer of a job that is over. What the job kept (staging) is handed to `last_look` before it goes.
    fn take(&mut self, last_look: impl FnOnce(Option<&Keep>)) -> Result<Answer, DeviceError> {
        if self.is_taken {
            return Err(DeviceError::StaleHandle);
        }
        if !self.link.is_done(self.stream, self.number) {
            return Err(self.link.lost().unwrap_or(DeviceError::StaleHandle));
        }
        // The cell is this ticket's until it is released: everything in it is looked at before.
        let answer = Cell(self.link.slab.cell(self.cell)).answered();
        let kept = if self.has_kept { self.link.state.lock().cells[self.cell as usize].keeps.take() } else { None };
        // A job that was refused left there what somebody else had.
        if answer.is_ok() {
            last_look(kept.as_ref());
        }
        self.is_taken = true;
        let now = Instant::now();
        let mut state = self.link.state.lock();
        self.link.settle(&mut state, now);
        state.release(self.cell);
        let sent = self.link.pump(&mut state, now);
        drop(state);
        if sent > 0 {
            self.link.waiters.tell(self.link.slab.done_bell());
        }
        answer
    }

    /// Waits in this thread, at the same latency as an async task.
    pub(crate) fn wait(mut self, last_look: impl FnOnce(Option<&Keep>)) -> Result<Answer, DeviceError> {
        self.link.park_until(self.stream, self.number);
        self.take(last_look)
    }

    /// Polls for the answer, with a last look at what the job kept.
    pub(crate) fn poll_with(
        &mut self,
        cx: &mut Context<'_>,
        last_look: impl FnOnce(Option<&Keep>),
    ) -> Poll<Result<Answer, DeviceError>> {
        if self.is_over() {
            return Poll::Ready(self.take(last_look));
        }
        let now = Instant::now();
        let until = *self.spin_until.get_or_insert(now + TASK_SPIN);
        if now < until {
            // Other tasks of this thread run in between.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if !self.registered.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.registered = Some(cx.waker().clone());
            self.link.register(self.stream, self.number, cx.waker().clone());
        }
        Poll::Pending
    }
}

impl Future for Ticket {
    type Output = Result<Answer, DeviceError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_with(cx, |_| ())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.is_taken {
            self.link.state.lock().release(self.cell);
        }
    }
}
