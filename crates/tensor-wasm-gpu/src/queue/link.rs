//! The server's end of a slab: sends jobs, watches flags, wakes who waits. One link per worker; when the worker is gone the
//! link is lost, everything on it fails with the reason, and a new worker gets a new link.
//!
//! A job is numbered on its stream and written into a cell; `fair.rs` decides when the cell goes into the ring. The
//! stream's flag passing the number says that it is done. Whoever awaits a job polls the flag itself for a short while,
//! yielding to other tasks in between, and only then registers its waker with the completion thread. That thread in turn
//! spins for a short while, then asks the worker to ring the doorbell and parks: no timers, and nobody spins for long
//! (`wait.rs`).

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::device::staging::{Keep, Staging};
use crate::error::DeviceError;
use crate::metrics::Metrics;
use crate::number::half;
use crate::queue::fair::{Fair, Full, Share};
use crate::queue::job::{Answer, Cell, Job};
use crate::slab::{CELLS, SEATS, STREAMS, Slab, WorkerState};
use crate::sync::waiters::{Waiter, Waiters};
use crate::wait::{COMPLETION_PAUSES, SpinThenPark, TASK_SPIN, spin_until, thread_spin};
use crate::worker::STOP;

/// Cells that one batch leaves to others.
const CELLS_RESERVED: usize = 64;

/// Ring entries with this bit are not cells but streams whose completion the worker is to announce by the bell.
pub(crate) const NOTIFY: u32 = 1 << 31;

/// Ring entries with this bit tell the priority of a stream from here on: low with `LOW`, else high.
pub(crate) const PRIORITY: u32 = 1 << 30;
pub(crate) const LOW: u32 = 1 << 29;

/// The stream for what belongs to no tenant: modules and streams themselves.
pub(crate) const CONTROL: usize = 0;

pub(crate) struct Link {
    pub slab: Arc<Slab>,
    /// Counts the workers of a device.
    pub worker: u32,
    pub metrics: Arc<Metrics>,
    pub staging: Arc<Staging>,
    /// How long a thread that waits spins before it parks.
    spin: Duration,
    state: Mutex<State>,
    waiters: Waiters,
    lost: OnceLock<String>,
}

struct State {
    fair: Fair<Batch>,
    cells: Vec<CellState>,
    unused: Vec<u32>,
    streams: Vec<Option<Stream>>,
    /// Streams with jobs on the device.
    active: Vec<usize>,
    /// When a job was last seen done, of whichever stream.
    last_done: Instant,
    /// What was last seen of the ring's reading end.
    ring_head: u32,
    /// What the line's times count from.
    began: Instant,
}

impl State {
    fn nanos(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.began).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Jobs that are sent together or not at all: the end of a recording must not wait for its beginning to be done.
enum Batch {
    One(u32),
    Many(Vec<u32>),
}

impl Batch {
    fn cells(&self) -> &[u32] {
        match self {
            Batch::One(cell) => std::slice::from_ref(cell),
            Batch::Many(cells) => cells,
        }
    }
}

/// What the server knows of a cell that is in use.
#[derive(Default)]
struct CellState {
    stream: usize,
    number: u32,
    sent: Option<Instant>,
    /// Memory of the slab that the job reads or writes.
    keeps: Option<Keep>,
    is_launch: bool,
    is_read: bool,
    /// The last of its batch.
    is_last: bool,
    is_done: bool,
    is_released: bool,
}

struct Stream {
    line: usize,
    tenant: Arc<str>,
    next_number: u32,
    running: VecDeque<u32>,
    /// Cells in use, also for answers that nobody has asked for yet.
    cells: usize,
    /// The worker was asked to announce this much.
    announced: u32,
    is_low: bool,
    last_done: Instant,
}

/// A job to send, with what it needs.
pub(crate) struct Order<'a> {
    pub job: Job,
    pub payload: &'a [u8],
    pub keeps: Option<Keep>,
}

impl Order<'_> {
    fn is_read(&self) -> bool {
        matches!(self.job, Job::Read { .. })
    }
}

impl<'a> From<Job> for Order<'a> {
    fn from(job: Job) -> Order<'a> {
        Order { job, payload: &[], keeps: None }
    }
}

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

/// Whether a flag that shows `flag` has passed `number`; both wrap around.
fn has_passed(flag: u32, number: u32) -> bool {
    flag.wrapping_sub(number) < 1 << 31
}

impl Link {
    pub(crate) fn new(slab: Arc<Slab>, worker: u32, metrics: Arc<Metrics>) -> Arc<Link> {
        let state = State {
            fair: Fair::new(),
            cells: (0..CELLS).map(|_| CellState::default()).collect(),
            unused: (0..half(CELLS)).rev().collect(),
            streams: (0..STREAMS).map(|_| None).collect(),
            active: Vec::new(),
            last_done: Instant::now(),
            ring_head: slab.ring().start(),
            began: Instant::now(),
        };
        let link = Arc::new(Link {
            staging: Staging::new(slab.clone()),
            spin: thread_spin(crate::info::get(&slab).kind),
            slab,
            worker,
            metrics,
            state: Mutex::new(state),
            waiters: Waiters::default(),
            lost: OnceLock::new(),
        });
        link.open(CONTROL, "", Share { weight: 0, running_max: CELLS, waiting_max: CELLS });
        let weak = Arc::downgrade(&link);
        let slab = link.slab.clone();
        std::thread::Builder::new()
            .name("completions".to_owned())
            .spawn(move || watch(&weak, &slab))
            .map_err(|error| link.lose(&format!("no thread can be started: {error}")))
            .ok();
        link
    }

    /// Gives a stream a line of its own.
    pub(crate) fn open(&self, stream: usize, tenant: &str, share: Share) {
        let mut state = self.state.lock();
        let line = state.fair.open(share);
        // Numbers go on where the flag stands: a stream may have been used before.
        let flag = self.slab.flag(stream).load(Ordering::Acquire);
        state.streams[stream] = Some(Stream {
            line,
            tenant: tenant.into(),
            next_number: flag.wrapping_add(1),
            running: VecDeque::new(),
            cells: 0,
            announced: flag,
            is_low: false,
            last_done: Instant::now(),
        });
    }

    /// Takes a stream's line away, if everything on it is done. Returns whether it is gone.
    pub(crate) fn close(&self, stream: usize) -> bool {
        let mut state = self.state.lock();
        self.settle(&mut state, Instant::now());
        let State { fair, streams, .. } = &mut *state;
        if let Some(own) = streams[stream].take_if(|own| own.cells == 0) {
            fair.close(own.line);
        }
        streams[stream].is_none()
    }

    /// How long the oldest job on the device has been there.
    pub(crate) fn oldest(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        let now = Instant::now();
        self.settle(&mut state, now);
        let first = |n: &usize| {
            let stream = state.streams[*n].as_ref()?;
            let cell = stream.running.front()?;
            Some(now.saturating_duration_since(state.cells[*cell as usize].sent?.max(stream.last_done)))
        };
        // How long a module takes to compile is its tenant's affair alone.
        state.active.iter().filter(|n| **n < SEATS).filter_map(first).max()
    }

    pub(crate) fn lost(&self) -> Option<DeviceError> {
        self.lost.get().map(|why| DeviceError::DeviceLost { why: why.clone() })
    }

    /// Fails everything that is under way and everything that comes.
    pub(crate) fn lose(&self, why: &str) {
        if self.lost.set(why.to_owned()).is_ok() {
            self.waiters.wake(|_, _| true);
            // Blocks of jobs that will never be done do not come back.
            self.staging.close(DeviceError::DeviceLost { why: why.to_owned() });
            self.slab.done_bell().ring();
        }
    }

    pub(crate) fn queued(&self) -> usize {
        let state = self.state.lock();
        state.streams.iter().flatten().map(|stream| state.fair.waiting(stream.line)).sum()
    }

    /// Sends jobs, in this order and with nothing of their stream between them. The ticket is the last one's.
    pub(crate) fn send(self: &Arc<Self>, stream: usize, orders: Vec<Order<'_>>) -> Result<Ticket, DeviceError> {
        if let Some(lost) = self.lost() {
            return Err(lost);
        }
        if orders.len() > CELLS / 2 {
            return Err(DeviceError::BadLaunch {
                why: format!("{} steps at once; {} are possible", orders.len(), CELLS / 2),
            });
        }
        let now = Instant::now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        self.settle(state, now);
        let line = state.streams[stream].as_ref().ok_or(DeviceError::StaleHandle)?.line;
        if state.fair.room(line) < 1 || !state.has_cells(stream, orders.len()) {
            // Who is refused and asks again and again must see the line move.
            self.pump(state, now);
        }
        let now_ns = state.nanos(now);
        let has_cells = state.has_cells(stream, orders.len());
        let own = state.streams[stream].as_mut().ok_or(DeviceError::StaleHandle)?;
        let queued = state.fair.waiting(own.line);
        let busy = |queued| DeviceError::Busy { tenant: own.tenant.to_string(), queued };
        if state.fair.room(own.line) < 1 || !has_cells {
            return Err(busy(queued));
        }
        let count = orders.len();
        let has_kept = orders.last().is_some_and(|order| order.is_read());
        let mut last = None;
        let mut cells = Vec::with_capacity(if count > 1 { count } else { 0 });
        for (at, order) in orders.into_iter().enumerate() {
            let Some(cell) = state.unused.pop() else { return Err(busy(queued)) };
            let number = own.next_number;
            let is_last = at + 1 == count;
            Cell(self.slab.cell(cell)).put(order.job, stream, number, order.payload, is_last);
            state.cells[cell as usize] = CellState {
                is_read: order.is_read(),
                stream,
                number,
                keeps: order.keeps,
                is_launch: matches!(order.job, Job::Launch { .. } | Job::Replay { .. }),
                is_last,
                // Nobody holds a ticket for any but the last.
                is_released: !is_last,
                ..CellState::default()
            };
            own.next_number = number.wrapping_add(1);
            last = Some((cell, number));
            if count > 1 {
                cells.push(cell);
            }
        }
        let (cell, number) = last.ok_or(DeviceError::ZeroSize)?;
        let batch = if count > 1 { Batch::Many(cells) } else { Batch::One(cell) };
        if let Err((Full(queued), batch)) = state.fair.submit(own.line, batch, now_ns) {
            state.unused.extend(batch.cells());
            own.next_number = own.next_number.wrapping_sub(half(count));
            return Err(busy(queued));
        }
        own.cells += count;
        self.pump(state, now);
        let has_backlog = state.streams[stream].as_ref().is_some_and(|own| state.fair.waiting(own.line) > 0);
        drop(guard);
        if has_backlog {
            // Somebody has to send the rest, also if nobody waits for it.
            self.waiters.tell(self.slab.done_bell());
        }
        Ok(Ticket {
            link: self.clone(),
            cell,
            stream,
            number,
            spin_until: None,
            has_kept,
            registered: None,
            is_taken: false,
        })
    }

    /// Takes note of what is done.
    fn settle(&self, state: &mut State, now: Instant) {
        let State { fair, cells, unused, streams, active, last_done, .. } = state;
        active.retain(|n| {
            let Some(stream) = streams[*n].as_mut() else { return false };
            let flag = self.slab.flag(*n).load(Ordering::Acquire);
            // A device does one thing after another, more or less: what came before, of whomever, is not this job's cost. So what
            // is charged never adds up to more than the time that passed. Jobs seen done together share it.
            let is_done = |cell: &&u32| has_passed(flag, cells[**cell as usize].number);
            let together = stream.running.iter().take_while(is_done).filter(|cell| cells[**cell as usize].is_last);
            let (count, first) = (together.count(), stream.running.front());
            let since = first.and_then(|cell| cells[*cell as usize].sent).unwrap_or(now).max(*last_done);
            let took = now.saturating_duration_since(since) / u32::try_from(count.max(1)).unwrap_or(u32::MAX);
            if count > 0 {
                (*last_done, stream.last_done) = (now, now);
            }
            // Numbers wrap; what was announced long ago must not seem to lie ahead.
            if !has_passed(stream.announced, flag) {
                stream.announced = flag;
            }
            while let Some(cell) = stream.running.front().copied()
                && has_passed(flag, cells[cell as usize].number)
            {
                stream.running.pop_front();
                let own = &mut cells[cell as usize];
                let sent = own.sent.unwrap_or(now);
                if own.is_last {
                    fair.done(stream.line, i64::try_from(took.as_nanos()).unwrap_or(i64::MAX));
                }
                if own.is_launch {
                    self.metrics.kernel_latency.observe(now.saturating_duration_since(sent).as_secs_f64());
                }
                own.is_done = true;
                // Who asks for the answer of a read wants what it brought too; else nothing is kept for longer than the job.
                if own.is_released || !own.is_read {
                    own.keeps = None;
                }
                if own.is_released {
                    unused.push(cell);
                    stream.cells -= 1;
                }
            }
            !stream.running.is_empty()
        });
    }

    /// Sends what may be sent.
    fn pump(&self, state: &mut State, now: Instant) {
        let ring = self.slab.ring();
        let mut has_sent = false;
        let now_ns = state.nanos(now);
        while let Some((line, batch)) = state.fair.next(now_ns) {
            let State { fair, cells, streams, active, ring_head, .. } = state;
            let n = cells[batch.cells()[0] as usize].stream;
            let Some(stream) = streams[n].as_mut() else { continue };
            // Long kernels make way for short ones where the device has a choice: on a low priority.
            if fair.is_long(line) != stream.is_low {
                stream.is_low = !stream.is_low;
                ring.push(PRIORITY | if stream.is_low { LOW } else { 0 } | half(n), ring_head);
            }
            if stream.running.is_empty() && !active.contains(&n) {
                active.push(n);
            }
            for cell in batch.cells() {
                let own = &mut cells[*cell as usize];
                own.sent = Some(now);
                if own.is_launch {
                    self.metrics.kernel_dispatches.inc();
                }
                stream.running.push_back(*cell);
                // It has an entry for every cell.
                has_sent |= ring.push(*cell, ring_head);
            }
        }
        if has_sent {
            self.slab.worker_bell().ring();
        }
    }

    fn is_done(&self, stream: usize, number: u32) -> bool {
        has_passed(self.slab.flag(stream).load(Ordering::Acquire), number)
    }

    /// Whether something is done that nobody has taken note of.
    fn has_news(&self) -> bool {
        let state = self.state.lock();
        let is_news = |n: &usize| {
            let front = state.streams[*n].as_ref().and_then(|stream| stream.running.front());
            front.is_some_and(|cell| self.is_done(*n, state.cells[*cell as usize].number))
        };
        state.active.iter().any(is_news)
    }

    /// Whether a job is done, or never will be.
    fn is_over(&self, stream: usize, number: u32) -> bool {
        self.is_done(stream, number) || self.lost.get().is_some()
    }

    fn register(&self, stream: usize, number: u32, waker: Waker) {
        let waiter = Waiter { stream, number, waker };
        self.waiters.register(waiter, |stream, number| self.is_over(stream, number), self.slab.done_bell());
    }

    /// Asks the worker to ring when the streams that somebody waits for have come so far.
    fn ask_to_be_rung(&self, state: &mut State) {
        let mut wanted = self.waiters.wanted();
        // A line that could send more once something is done waits too.
        for n in &state.active {
            if let Some(stream) = &state.streams[*n]
                && let Some(cell) = stream.running.front()
                && state.fair.waiting(stream.line) > 0
            {
                wanted.push((*n, state.cells[*cell as usize].number));
            }
        }
        let ring = self.slab.ring();
        let mut has_asked = false;
        for (n, number) in wanted {
            let Some(stream) = state.streams[n].as_mut() else { continue };
            if !has_passed(stream.announced, number) {
                // What is not on the device yet cannot be announced; whoever sends it looks again.
                let Some(last) = stream.running.back().map(|cell| state.cells[*cell as usize].number) else { continue };
                // It was asked already. Asking for as long as a job waits in line put more rings before that job than a stream
                // could work off.
                if has_passed(stream.announced, last) {
                    continue;
                }
                if ring.push(NOTIFY | half(n), &mut state.ring_head) {
                    stream.announced = last;
                    has_asked = true;
                }
            }
        }
        if has_asked {
            self.slab.worker_bell().ring();
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Ends a worker that is a thread of this process; one that is a process ends with its keeper.
        let state = self.state.get_mut();
        self.slab.ring().push(STOP, &mut state.ring_head);
        self.slab.worker_bell().ring();
        self.slab.done_bell().ring();
    }
}

/// The completion thread.
fn watch(link: &Weak<Link>, slab: &Slab) {
    let Some(spin) = link.upgrade().map(|link| link.spin) else { return };
    let mut idle = SpinThenPark::new(spin, COMPLETION_PAUSES);
    loop {
        let Some(link) = link.upgrade() else { return };
        if slab.state() == WorkerState::Lost {
            link.lose(&crate::info::reason(slab));
        }
        let seen = link.waiters.look();
        let (woken, left) = link.waiters.wake(|stream, number| link.is_over(stream, number));
        let now = Instant::now();
        let backlog = {
            let mut state = link.state.lock();
            link.settle(&mut state, now);
            link.pump(&mut state, now);
            let waits = |n: &usize| state.streams[*n].as_ref().is_some_and(|s| state.fair.waiting(s.line) > 0);
            state.active.iter().any(waits)
        };
        if woken {
            idle.reset();
        }
        if (left || backlog) && idle.is_spinning() {
            drop(link);
            idle.pause();
            continue;
        }
        if left || backlog {
            link.ask_to_be_rung(&mut link.state.lock());
        }
        let lost = link.lost.get().is_some();
        // The doorbell is in the slab, which outlives the link: the last owner of a link rings it.
        let weak = Arc::downgrade(&link);
        drop(link);
        let is_news = || match weak.upgrade() {
            None => true,
            Some(link) => {
                (left || backlog) && link.has_news()
                    || link.waiters.has_news(&seen, |stream, number| link.is_done(stream, number))
                    || link.lost.get().is_some() != lost
                    || !lost && slab.state() == WorkerState::Lost
            }
        };
        slab.done_bell().park_unless(is_news, None);
        idle.reset();
    }
}

impl Ticket {
    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    pub(crate) fn cell(&self) -> u32 {
        self.cell
    }

    pub(crate) fn is_over(&self) -> bool {
        self.link.is_over(self.stream, self.number)
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
        let kept = match self.has_kept {
            true => self.link.state.lock().cells[self.cell as usize].keeps.take(),
            false => None,
        };
        // A job that was refused left there what somebody else had.
        if answer.is_ok() {
            last_look(kept.as_ref());
        }
        self.is_taken = true;
        let now = Instant::now();
        let mut state = self.link.state.lock();
        self.link.settle(&mut state, now);
        state.release(self.cell);
        self.link.pump(&mut state, now);
        answer
    }

    /// Waits in this thread, at the same latency as an async task.
    pub(crate) fn wait(mut self, last_look: impl FnOnce(Option<&Keep>)) -> Result<Answer, DeviceError> {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        if !spin_until(|| self.is_over(), self.link.spin) {
            let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
            self.link.register(self.stream, self.number, waker);
            while !self.is_over() {
                std::thread::park();
            }
        }
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

impl State {
    /// Nobody will ask for the answer any more. The cell is free once its job is done too.
    fn release(&mut self, cell: u32) {
        let own = &mut self.cells[cell as usize];
        own.is_released = true;
        if own.is_done {
            own.keeps = None;
            self.unused.push(cell);
            if let Some(stream) = &mut self.streams[own.stream] {
                stream.cells -= 1;
            }
        }
    }

    /// Whether a stream may have so many more cells: no more of them than it leaves to the others. So one that hoards cells
    /// gets half of them, two get a third each, and there are always some for one who has none. What is nobody's may take
    /// the last.
    fn has_cells(&self, stream: usize, count: usize) -> bool {
        let held = self.streams[stream].as_ref().map_or(0, |own| own.cells);
        let Some(left) = self.unused.len().checked_sub(count) else { return false };
        match held {
            _ if stream == CONTROL => true,
            // A long batch of one who holds nothing need not leave as much.
            0 => left >= CELLS_RESERVED,
            _ => held + count <= left,
        }
    }
}
