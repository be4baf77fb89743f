//! The server's end of a slab: sends jobs, watches flags, wakes who waits. One link per worker; when the worker is
//! gone the link is lost, everything on it fails with the reason, and a new worker gets a new link.
//!
//! A job is numbered on its stream and written into a cell; `fair.rs` decides when the cell goes into the ring. The
//! stream's flag passing the number says that it is done. Streams of a tenant share its line and its part of the
//! cells, and are done with their jobs in any order among each other. Whoever awaits a job polls the flag itself for a
//! short while, yielding to other tasks in between, and only then registers its waker with the completion thread. That
//! thread in turn spins for a short while, then asks the worker to ring the doorbell and parks: no timers, and nobody
//! spins for long (`wait.rs`).

mod ticket;

pub(crate) use self::ticket::Ticket;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::device::staging::{Keep, Staging};
use crate::error::DeviceError;
use crate::metrics::Metrics;
use crate::number::half;
use crate::queue::fair::{Fair, Full, Share, Turn};
use crate::queue::job::{Cell, Job};
use crate::slab::{CELLS, RESIDENTS, STOP_END, STOP_LEAVE, STOP_NO, STREAMS, Slab, WorkerState, is_lane};
use crate::sync::waiters::{Waiter, Waiters};
use crate::wait::{COMPLETION_PAUSES, SpinThenPark, thread_spin};
use crate::worker::STOP;

/// Cells that one batch leaves to others.
const CELLS_RESERVED: usize = 64;

/// Ring entries with this bit are not cells but streams whose completion the worker is to announce by the bell.
pub(crate) const NOTIFY: u32 = 1 << 31;

/// Ring entries with this bit tell the priority of a stream from here on: low with `LOW`, else high.
pub(crate) const PRIORITY: u32 = 1 << 30;
pub(crate) const LOW: u32 = 1 << 29;

/// Beside a cell: the worker has the stream's flag written right behind this job.
pub(crate) const FLAGGED: u32 = 1 << 28;

/// While tenants share the device, no flag of a stream lags behind more work than this: whoever is seen done pays for
/// the time since something was last seen done, and would pay for jobs that are done and not seen.
const FLAG_NS: i64 = 50_000;

/// A job that is stuck beside others of its tenant that are not is found after so many times the limit of a job.
const STUCK_PART: u32 = 16;

/// Jobs on a resident job's stream: itself, the zeroing of its buffers, and its end.
const RESIDENT_JOBS_MAX: usize = 4;

/// The stream for what belongs to no tenant: modules and streams themselves.
pub(crate) const CONTROL: usize = 0;

/// Who is charged for jobs, besides the tenant's line. It is told of each when that is seen done, under the line's
/// lock: it counts, and neither waits nor lets go of anything that belongs to a device.
pub trait Payer: Send + Sync {
    /// What a job took of the device: the time since something was last seen done, of whomever. What all are told of
    /// never adds up to more than the time that passed.
    fn pay(&self, took: Duration);
}

pub(crate) struct Link {
    pub slab: Arc<Slab>,
    /// Counts the workers of a device.
    pub worker: u32,
    pub metrics: Arc<Metrics>,
    pub staging: Arc<Staging>,
    /// How long a thread that waits spins before it parks.
    spin: Duration,
    state: Mutex<LinkState>,
    waiters: Waiters,
    /// By the number of their words in the slab.
    residents: Mutex<[Option<ResidentJob>; RESIDENTS]>,
    lost: OnceLock<String>,
}

/// A resident kernel, as the keeper sees it.
struct ResidentJob {
    /// Of the tenant.
    owner: u64,
    /// Its launch; none while it is being sent.
    own: Option<StreamUse>,
    /// What was last seen of its heartbeat, and since when; when it was sent, at first.
    beat: u64,
    since: Instant,
    told: Option<Instant>,
}

struct LinkState {
    fair: Fair<Batch>,
    cells: Vec<CellState>,
    unused: Vec<u32>,
    /// By the number of the first stream of each.
    lines: Vec<Option<TenantLine>>,
    streams: Vec<Option<StreamQueue>>,
    /// Streams with jobs on the device.
    active: Vec<usize>,
    /// What their flags showed when they were last looked at; kept for its memory.
    seen: Vec<u32>,
    /// When a job was last seen done, of whichever stream.
    last_done: Instant,
    /// What was last seen of the ring's reading end.
    ring_head: u32,
    /// What the line's times count from.
    began: Instant,
}

impl LinkState {
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
    /// What the line took its batch to cost; of the last of a batch.
    estimate_ns: i64,
    /// It only waits for this stream to have come so far.
    awaits: Option<(usize, u32)>,
    /// Memory of the slab that the job reads or writes.
    keeps: Option<Keep>,
    /// Of the last of a batch: who is charged for it.
    payer: Option<Arc<dyn Payer>>,
    is_launch: bool,
    is_read: bool,
    /// The last of its batch.
    is_last: bool,
    is_done: bool,
    is_released: bool,
}

/// What the streams of a tenant share.
struct TenantLine {
    /// Its line in `fair.rs`.
    line: usize,
    tenant: Arc<str>,
    /// Cells in use, also for answers that nobody has asked for yet.
    cells: usize,
    /// When a job was last seen done, on whichever of its streams.
    last_done: Instant,
}

struct StreamQueue {
    /// The tenant's first stream, which its line goes by.
    home: usize,
    line: usize,
    /// Its one job runs for as long as it likes, and shows by a heartbeat that it does.
    is_resident: bool,
    next_number: u32,
    running: VecDeque<u32>,
    /// Cells in use on this stream.
    cells: usize,
    /// The worker was asked to announce this much.
    announced: u32,
    is_low: bool,
    /// What was sent since its flag was last asked for, by estimate.
    unflagged_ns: i64,
    last_done: Instant,
}

/// A job to send, with what it needs.
pub(crate) struct Order<'a> {
    pub job: Job,
    pub payload: &'a [u8],
    pub keeps: Option<Keep>,
    /// Of a job that waits for another stream: the number it waits for.
    pub after: u32,
}

impl Order<'_> {
    fn is_read(&self) -> bool {
        matches!(self.job, Job::Read { .. })
    }
}

impl<'a> From<Job> for Order<'a> {
    fn from(job: Job) -> Order<'a> {
        Order { job, payload: &[], keeps: None, after: 0 }
    }
}

impl<'a> Order<'a> {
    pub(crate) fn new(job: Job, payload: &'a [u8], keeps: Option<Keep>) -> Order<'a> {
        Order { job, payload, keeps, after: 0 }
    }

    /// What follows begins once another stream has come so far.
    pub(crate) fn after(before: StreamUse) -> Order<'a> {
        Order { after: before.number, ..Job::Await { stream: before.stream }.into() }
    }
}

/// A job on a stream, by its number: a use of memory that others may have to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamUse {
    pub stream: u32,
    pub number: u32,
}

/// Whether a flag that shows `flag` has passed `number`; both wrap around.
pub(crate) fn has_passed(flag: u32, number: u32) -> bool {
    flag.wrapping_sub(number) < 1 << 31
}

impl Link {
    pub(crate) fn new(slab: Arc<Slab>, worker: u32, metrics: Arc<Metrics>) -> Arc<Link> {
        let state = LinkState {
            fair: Fair::new(),
            cells: (0..CELLS).map(|_| CellState::default()).collect(),
            unused: (0..half(CELLS)).rev().collect(),
            lines: (0..STREAMS).map(|_| None).collect(),
            streams: (0..STREAMS).map(|_| None).collect(),
            active: Vec::new(),
            seen: Vec::new(),
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
            residents: Mutex::new([const { None }; RESIDENTS]),
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
        state.lines[stream] = Some(TenantLine { line, tenant: tenant.into(), cells: 0, last_done: Instant::now() });
        self.open_queue(&mut state, stream, stream, line, false);
    }

    /// Opens one more stream for a tenant, on its line. False if the tenant is not known.
    pub(crate) fn open_more(&self, stream: usize, home: usize) -> bool {
        let mut state = self.state.lock();
        let Some(line) = state.lines[home].as_ref().map(|own| own.line) else { return false };
        self.open_queue(&mut state, stream, home, line, false);
        true
    }

    /// Opens a stream for one job that stays: in nobody's line, because it is not work that ends and makes room.
    pub(crate) fn open_resident(&self, stream: usize, tenant: &str) {
        let share = Share { weight: 0, running_max: RESIDENT_JOBS_MAX, waiting_max: RESIDENT_JOBS_MAX };
        let mut state = self.state.lock();
        let line = state.fair.open(share);
        state.lines[stream] = Some(TenantLine { line, tenant: tenant.into(), cells: 0, last_done: Instant::now() });
        self.open_queue(&mut state, stream, stream, line, true);
    }

    fn open_queue(&self, state: &mut LinkState, stream: usize, home: usize, line: usize, is_resident: bool) {
        // Numbers go on where the flag stands: a stream may have been used before.
        let flag = self.slab.flag(stream).load(Ordering::Acquire);
        state.streams[stream] = Some(StreamQueue {
            home,
            line,
            is_resident,
            next_number: flag.wrapping_add(1),
            running: VecDeque::new(),
            cells: 0,
            announced: flag,
            is_low: false,
            unflagged_ns: 0,
            last_done: Instant::now(),
        });
    }

    /// Closes a stream, and its line if it has one of its own, if everything on it is done. Returns whether it is
    /// gone. A tenant's first stream is closed after its others.
    pub(crate) fn close(&self, stream: usize) -> bool {
        let mut state = self.state.lock();
        self.settle_for_others(&mut state, Instant::now());
        let LinkState { fair, streams, lines, .. } = &mut *state;
        // A line goes after everybody who sends in it.
        let mut others = streams.iter().enumerate().filter(|(n, _)| *n != stream);
        if lines[stream].is_some() && others.any(|(_, other)| other.as_ref().is_some_and(|own| own.home == stream)) {
            return false;
        }
        if streams[stream].take_if(|own| own.cells == 0).is_some()
            && let Some(own) = lines[stream].take()
        {
            fair.close(own.line);
        }
        streams[stream].is_none()
    }

    /// How long the oldest job on the device has been there, of those that are bound to end, since its tenant was last
    /// seen to make progress; and at the least a part of how long it has been there at all.
    pub(crate) fn oldest(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        let now = Instant::now();
        self.settle_for_others(&mut state, now);
        let first = |n: &usize| {
            let stream = state.streams[*n].as_ref().filter(|stream| !stream.is_resident)?;
            let cell = &state.cells[*stream.running.front()? as usize];
            let mut since = cell.sent?.max(stream.last_done);
            if let Some((before, number)) = cell.awaits {
                // What it waits for has a limit of its own; its own time begins after that.
                if !self.is_done(before, number) {
                    return None;
                }
                since = since.max(state.streams[before].as_ref().map_or(now, |before| before.last_done));
            }
            // Jobs of the tenant's other streams may have run before it: a full device, or a CPU, runs one after the
            // other. But not for ever.
            let progress = since.max(state.lines[stream.home].as_ref()?.last_done);
            let since_progress = now.saturating_duration_since(progress);
            Some(since_progress.max(now.saturating_duration_since(since) / STUCK_PART))
        };
        // How long a module takes to compile is its tenant's affair alone.
        state.active.iter().filter(|n| !is_lane(**n)).filter_map(first).max()
    }

    /// Whether nothing is on a stream or in line for it.
    pub(crate) fn is_idle(&self, stream: usize) -> bool {
        let mut state = self.state.lock();
        self.settle_for_others(&mut state, Instant::now());
        state.streams[stream].as_ref().is_none_or(|own| own.cells == 0)
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
            // A worker that is a thread ends with the last of its jobs.
            self.stop_residents();
            self.slab.done_bell().ring();
        }
    }

    fn stop_residents(&self) {
        let residents = self.residents.lock();
        let held = residents.iter().enumerate().filter(|(_, resident)| resident.is_some());
        held.for_each(|(n, _)| self.slab.stop(n).store(STOP_END, Ordering::Release));
    }

    /// Takes words of the slab for a resident kernel of a tenant that may have so many. An error says how many it has.
    pub(crate) fn take_resident(&self, owner: u64, max: usize) -> Result<usize, usize> {
        let mut residents = self.residents.lock();
        for resident in residents.iter_mut() {
            resident.take_if(|own| own.own.is_some_and(|own| self.is_past(own)));
        }
        let held = residents.iter().flatten().filter(|resident| resident.owner == owner).count();
        let free = residents.iter().position(Option::is_none).filter(|_| held < max).ok_or(held)?;
        self.slab.beat(free).store(0, Ordering::Relaxed);
        self.slab.stop(free).store(STOP_NO, Ordering::Relaxed);
        residents[free] = Some(ResidentJob { owner, own: None, beat: 0, since: Instant::now(), told: None });
        Ok(free)
    }

    /// Gives words back that were taken for a kernel that was not launched.
    pub(crate) fn end_resident(&self, words: usize) {
        self.residents.lock()[words].take_if(|resident| resident.own.is_none());
    }

    /// A resident kernel was sent.
    pub(crate) fn watch_resident(&self, words: usize, own: StreamUse) {
        if let Some(resident) = &mut self.residents.lock()[words] {
            (resident.own, resident.since) = (Some(own), Instant::now());
        }
    }

    /// Tells a resident kernel to end, if it is there still.
    pub(crate) fn stop_resident(&self, words: usize, own: StreamUse) {
        if let Some(resident) = self.residents.lock()[words].as_mut().filter(|resident| resident.own == Some(own)) {
            self.slab.stop(words).store(STOP_END, Ordering::Release);
            resident.told.get_or_insert_with(Instant::now);
        }
    }

    /// What is wrong with a resident kernel, if anything: it has not begun within a job's time, it does not beat, or
    /// it was told to end and has not.
    pub(crate) fn silent_resident(&self, job_max: Duration, beat_max: Duration, stop_max: Duration) -> Option<String> {
        let mut residents = self.residents.lock();
        for (n, resident) in residents.iter_mut().enumerate() {
            let Some(own) = resident.as_mut().filter(|own| own.own.is_some_and(|own| !self.is_past(own))) else {
                continue;
            };
            let beat = self.slab.beat(n).load(Ordering::Relaxed);
            // One that makes way has no beat; that it leaves and comes back is the worker's business.
            let is_away = self.slab.stop(n).load(Ordering::Relaxed) == STOP_LEAVE;
            if beat != own.beat || is_away {
                (own.beat, own.since) = (beat, Instant::now());
            }
            if own.told.is_some_and(|told| told.elapsed() > stop_max) {
                return Some(format!("a resident kernel was told to end and had not after {stop_max:?}"));
            }
            let max = if own.beat == 0 { job_max } else { beat_max };
            if own.since.elapsed() > max {
                return Some(format!("a resident kernel has shown no heartbeat for {max:?}"));
            }
        }
        None
    }

    pub(crate) fn queued(&self) -> usize {
        let state = self.state.lock();
        state.lines.iter().flatten().map(|own| state.fair.waiting(own.line)).sum()
    }

    /// Sends jobs, in this order and with nothing of their stream between them. The ticket is the last one's.
    pub(crate) fn send(self: &Arc<Self>, stream: usize, orders: Vec<Order<'_>>) -> Result<Ticket, DeviceError> {
        self.send_for(None, stream, orders)
    }

    /// The same for somebody who is charged for it.
    pub(crate) fn send_for(
        self: &Arc<Self>,
        payer: Option<&Arc<dyn Payer>>,
        stream: usize,
        orders: Vec<Order<'_>>,
    ) -> Result<Ticket, DeviceError> {
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
        let is_full = state.fair.room(line) < 1 || !state.has_cells(stream, orders.len());
        // Who is refused and asks again and again must see the line move.
        if is_full && self.pump(state, now) > 0 {
            self.waiters.tell(self.slab.done_bell());
        }
        let now_ns = state.nanos(now);
        let has_cells = state.has_cells(stream, orders.len());
        let own = state.streams[stream].as_mut().ok_or(DeviceError::StaleHandle)?;
        let shared = state.lines[own.home].as_mut().ok_or(DeviceError::StaleHandle)?;
        let queued = state.fair.waiting(own.line);
        let tenant = shared.tenant.clone();
        let busy = |queued| DeviceError::Busy { tenant: tenant.to_string(), queued };
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
            let awaits = match order.job {
                // It may say more than is asked for: what was asked for is done no later.
                Job::Await { stream } => Some((stream as usize, order.after)),
                _ => None,
            };
            Cell(self.slab.cell(cell)).put(order.job, stream, number, order.payload, is_last);
            state.cells[cell as usize] = CellState {
                is_read: order.is_read(),
                stream,
                number,
                awaits,
                keeps: order.keeps,
                payer: payer.filter(|_| is_last).cloned(),
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
        shared.cells += count;
        let sent = self.pump(state, now);
        let has_backlog = state.streams[stream].as_ref().is_some_and(|own| state.fair.waiting(own.line) > 0);
        drop(guard);
        if has_backlog || sent > 1 {
            // Somebody has to send the rest, also if nobody waits for it, and to see the end of what others have sent.
            self.waiters.tell(self.slab.done_bell());
        }
        Ok(Ticket::new(self.clone(), cell, stream, number, has_kept))
    }

    /// Takes note of what is done, and leaves it to the completion thread to send what may be sent after it: who was
    /// seen done here is no news to that thread any more, and it would park.
    fn settle_for_others(&self, state: &mut LinkState, now: Instant) {
        if self.settle(state, now) && state.fair.has_waiting() {
            self.waiters.tell(self.slab.done_bell());
        }
    }

    /// Takes note of what is done. Returns whether anything is.
    fn settle(&self, state: &mut LinkState, now: Instant) -> bool {
        let LinkState { fair, cells, unused, streams, lines, active, seen, last_done, .. } = state;
        // Whoever comes late to the lock took its time earlier.
        let now = now.max(*last_done);
        // What is done first, and what it is charged: a device does one thing after another or some at once, and
        // whoever is done pays for the time since something was last seen done, of whomever. So what is charged never
        // adds up to more than the time that passed, and a tenant whose jobs run side by side pays for each what it
        // took of the device. Jobs seen done together, on whatever streams, share it.
        let (mut count, mut since) = (0_u32, now);
        // Looked at once: what is done is what is paid for.
        seen.clear();
        seen.extend(active.iter().map(|n| self.slab.flag(*n).load(Ordering::Acquire)));
        for (n, flag) in active.iter().zip(&*seen) {
            let Some(stream) = streams[*n].as_ref().filter(|stream| !stream.is_resident) else { continue };
            let done = stream.running.iter().map(|cell| &cells[*cell as usize]);
            for cell in done.take_while(|cell| has_passed(*flag, cell.number)).filter(|cell| cell.is_last) {
                count += 1;
                since = since.min(cell.sent.unwrap_or(now));
            }
        }
        let took = now.saturating_duration_since(since.max(*last_done)) / count.max(1);
        let took_ns = i64::try_from(took.as_nanos()).unwrap_or(i64::MAX);
        if count > 0 {
            *last_done = now;
        }
        let mut has_settled = false;
        let mut flags = seen.iter().copied();
        active.retain(|n| {
            let Some(flag) = flags.next() else { return true };
            let Some(stream) = streams[*n].as_mut() else { return false };
            // Numbers wrap; what was announced long ago must not seem to lie ahead.
            if !has_passed(stream.announced, flag) {
                stream.announced = flag;
            }
            while let Some(cell) = stream.running.front().copied()
                && has_passed(flag, cells[cell as usize].number)
            {
                stream.running.pop_front();
                has_settled = true;
                stream.last_done = now;
                if let Some(shared) = &mut lines[stream.home] {
                    shared.last_done = now;
                }
                let own = &mut cells[cell as usize];
                let sent = own.sent.unwrap_or(now);
                if own.is_last {
                    fair.done(stream.line, own.estimate_ns, took_ns);
                    if let Some(payer) = own.payer.take() {
                        payer.pay(took);
                    }
                }
                if own.is_launch && !stream.is_resident {
                    self.metrics.kernel_latency.observe(now.saturating_duration_since(sent).as_secs_f64());
                }
                own.is_done = true;
                // Who asks for the answer of a read wants what it brought too; else nothing is kept for longer than
                // the job.
                if own.is_released || !own.is_read {
                    own.keeps = None;
                }
                if own.is_released {
                    unused.push(cell);
                    stream.cells -= 1;
                    if let Some(shared) = &mut lines[stream.home] {
                        shared.cells -= 1;
                    }
                }
            }
            !stream.running.is_empty()
        });
        has_settled
    }

    /// Sends what may be sent. Returns how many batches were: whoever waits for one of them did not ask to be rung for
    /// it while it was in line, so the completion thread has to look again, unless it is the one that sends.
    fn pump(&self, state: &mut LinkState, now: Instant) -> usize {
        let ring = self.slab.ring();
        let (mut has_sent, mut count) = (false, 0);
        let now_ns = state.nanos(now);
        let LinkState { fair, cells, streams, active, ring_head, .. } = state;
        loop {
            let has_idle_stream = |batch: &Batch| {
                let stream = streams[cells[batch.cells()[0] as usize].stream].as_ref();
                stream.is_some_and(|stream| stream.running.is_empty())
            };
            let Some(Turn { line, job: batch, estimate_ns }) = fair.next(now_ns, has_idle_stream) else { break };
            let n = cells[batch.cells()[0] as usize].stream;
            let Some(stream) = streams[n].as_mut() else { continue };
            count += 1;
            // Long kernels make way for short ones where the device has a choice: on a low priority.
            if fair.is_long(line) != stream.is_low {
                stream.is_low = !stream.is_low;
                ring.push(PRIORITY | if stream.is_low { LOW } else { 0 } | half(n), ring_head);
            }
            if stream.running.is_empty() && !active.contains(&n) {
                active.push(n);
            }
            stream.unflagged_ns = stream.unflagged_ns.saturating_add(estimate_ns);
            let is_flagged = stream.unflagged_ns >= FLAG_NS && fair.is_crowded(now_ns);
            if is_flagged {
                stream.unflagged_ns = 0;
            }
            let last = batch.cells().last().copied();
            for cell in batch.cells() {
                let own = &mut cells[*cell as usize];
                own.sent = Some(now);
                own.estimate_ns = estimate_ns;
                if own.is_launch {
                    self.metrics.kernel_dispatches.inc();
                }
                stream.running.push_back(*cell);
                // It has an entry for every cell.
                let flagged = if is_flagged && last == Some(*cell) { FLAGGED } else { 0 };
                has_sent |= ring.push(*cell | flagged, ring_head);
            }
        }
        if has_sent {
            self.slab.worker_bell().ring();
        }
        count
    }

    /// Whether a use of memory is over, as far as can be seen by now.
    pub(crate) fn is_past(&self, before: StreamUse) -> bool {
        self.is_done(before.stream as usize, before.number)
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
    fn ask_to_be_rung(&self, state: &mut LinkState) {
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
                // What is not on the device yet cannot be announced; whoever sends it has this thread look again.
                let Some(last) = stream.running.back().map(|cell| state.cells[*cell as usize].number) else { continue };
                // It was asked already. Asking for as long as a job waits in line put more rings before that job than
                // a stream could work off.
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
        self.stop_residents();
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

impl LinkState {
    /// Nobody will ask for the answer any more. The cell is free once its job is done too.
    fn release(&mut self, cell: u32) {
        let own = &mut self.cells[cell as usize];
        own.is_released = true;
        if own.is_done {
            own.keeps = None;
            self.unused.push(cell);
            if let Some(stream) = &mut self.streams[own.stream] {
                stream.cells -= 1;
                if let Some(shared) = &mut self.lines[stream.home] {
                    shared.cells -= 1;
                }
            }
        }
    }

    /// Whether a tenant may have so many more cells: no more of them than it leaves to the others. So one that hoards
    /// cells gets half of them, two get a third each, and there are always some for one who has none. What is nobody's
    /// may take the last.
    fn has_cells(&self, stream: usize, count: usize) -> bool {
        let shared = self.streams[stream].as_ref().and_then(|own| self.lines[own.home].as_ref());
        let held = shared.map_or(0, |own| own.cells);
        let Some(left) = self.unused.len().checked_sub(count) else { return false };
        match held {
            _ if stream == CONTROL => true,
            // A long batch of one who holds nothing need not leave as much.
            0 => left >= CELLS_RESERVED,
            _ => held + count <= left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::SlabPlan;

    /// Nobody rings for the first job's end, as on a GPU that was not asked to: whoever sees it has the next one sent.
    #[test]
    fn whoever_sees_that_a_job_is_done_has_the_next_one_sent() {
        let errands: [fn(&Link) -> bool; 2] = [|link| link.oldest().is_some(), |link| link.is_idle(1)];
        for errand in errands {
            let slab = Arc::new(Slab::create(&SlabPlan::default()).unwrap());
            let link = Link::new(slab.clone(), 0, Arc::default());
            link.open(1, "a", Share { weight: 1, running_max: 1, waiting_max: 8 });
            let mut tail = slab.ring().start();
            let sent = std::cell::RefCell::new(Vec::new());
            let mut has_come = |wanted: &dyn Fn(&[u32]) -> bool| {
                let until = Instant::now() + Duration::from_secs(20);
                while Instant::now() < until && !wanted(&sent.borrow()) {
                    sent.borrow_mut().extend(slab.ring().pop(&mut tail));
                    std::thread::yield_now();
                }
                wanted(&sent.borrow())
            };
            let fill = || vec![Job::Fill { address: 0, bytes: 1, value: 0 }.into()];
            let (first, second) = (link.send(1, fill()).unwrap(), link.send(1, fill()).unwrap());
            let (first_number, second_cell) = (first.as_use().number, second.cell());
            drop(first);
            assert!(has_come(&|sent| sent.contains(&(NOTIFY | 1))), "the completion thread is about to park");
            slab.flag(1).store(first_number, Ordering::Release);
            assert!(!errand(&link), "one is done and the other in line");
            assert!(has_come(&|sent| sent.contains(&second_cell)), "it is in line for ever");
        }
    }
}
