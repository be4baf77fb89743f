//! Waiting: spin for a moment, then park. Every spin time on a job's way is here, beside what it was weighed against.
//!
//! Spinning costs a core, parking costs a wake-up: some 10 µs within a process on a quiet core, 50 µs on a virtual
//! machine whose core went idle, and 200 µs for the end of a GPU's job, which goes through an interrupt and three
//! threads. Whoever waits spins for about as long as its wake-up costs, so it never pays more than twice the better of
//! the two.

use std::time::{Duration, Instant};

use crate::choice::DeviceKind;

/// A guest's thread spins this long for the end of its launch before it yields to other tasks: launching and completing
/// an empty kernel takes 10 µs (`device/launch_round_trip`), and yielding as much again.
pub const LAUNCH_SPIN: Duration = Duration::from_micros(12);

/// A guest's thread spins this long for elements that it reads before it yields: a product of 256² with its softmax and
/// the copy of 256 KiB take 45 µs (`tensors_cuda/guest/256`), and a thread that it was handed to costs two wake-ups.
pub const READ_SPIN: Duration = Duration::from_micros(60);

/// A task polls its job this long, yielding in between, before it registers its waker with the completion thread: five
/// empty kernels, and the price of waking a thread on an idle core.
pub(crate) const TASK_SPIN: Duration = Duration::from_micros(50);

/// A waiting thread and the completion thread spin this long before they park. The end of a GPU's job takes 200 µs to
/// wake them, and the jobs that matter end within milliseconds. Where the CPU does the work, spinning takes a core from
/// it.
const THREAD_SPIN_DEVICE: Duration = Duration::from_millis(6);
const THREAD_SPIN_CPU: Duration = Duration::from_micros(100);

/// A worker with an empty ring spins this long before it parks. A worker of a GPU has a core to itself; one of a CPU
/// shares the cores with the kernels it runs.
const WORKER_SPIN_DEVICE: Duration = Duration::from_millis(2);
const WORKER_SPIN_CPU: Duration = Duration::from_micros(50);

/// `PAUSE` instructions of the completion thread between two looks, together about a microsecond: whoever sends jobs
/// needs the lock and the core's other half.
pub(crate) const COMPLETION_PAUSES: u32 = 16;

/// The keeper looks at its worker this often. It is the watchdog, no part of any job's latency.
pub(crate) const KEEPER_PERIOD: Duration = Duration::from_millis(10);

/// Whoever tidies up looks this often whether the line of jobs has room again, and whether tenants that are going are
/// gone: rare, off every call's way, and about what a job of the kind they wait for takes.
pub(crate) const ROOM_PERIOD: Duration = Duration::from_micros(50);
pub(crate) const CLOSING_PERIOD: Duration = Duration::from_micros(100);

/// Between two looks at whether a resident kernel that was told to leave has begun: it may wait for seconds.
pub(crate) const RESIDENT_PERIOD: Duration = Duration::from_millis(20);

const fn is_less(a: Duration, b: Duration) -> bool {
    a.as_nanos() < b.as_nanos()
}

// Who waits longest parks last: a launch's spin ends in the task's, the task's in the completion thread's, which is
// awake then.
const _: () = assert!(is_less(LAUNCH_SPIN, TASK_SPIN));
// No serving thread is kept for longer by one who waits than by two wake-ups.
const _: () = assert!(is_less(LAUNCH_SPIN, READ_SPIN) && is_less(READ_SPIN, THREAD_SPIN_CPU));
const _: () = assert!(is_less(TASK_SPIN, THREAD_SPIN_CPU) && is_less(THREAD_SPIN_CPU, THREAD_SPIN_DEVICE));
// Of two sides of one ring the worker parks first: an answer is seen at once, the next job may cost a doorbell.
const _: () = assert!(is_less(WORKER_SPIN_CPU, THREAD_SPIN_CPU) && is_less(WORKER_SPIN_DEVICE, THREAD_SPIN_DEVICE));
// The watchdog wakes nobody who would spin anyway.
const _: () = assert!(is_less(THREAD_SPIN_DEVICE, KEEPER_PERIOD));

/// How long a thread that waits for a job of such a device spins.
pub(crate) fn thread_spin(kind: DeviceKind) -> Duration {
    if kind == DeviceKind::Cpu { THREAD_SPIN_CPU } else { THREAD_SPIN_DEVICE }
}

/// How long a worker of such a device spins when it has nothing to do.
pub(crate) fn worker_spin(kind: DeviceKind) -> Duration {
    if kind == DeviceKind::Cpu { WORKER_SPIN_CPU } else { WORKER_SPIN_DEVICE }
}

/// Spins until something is over, for so long at most. Returns whether it is.
pub fn spin_until(is_over: impl Fn() -> bool, limit: Duration) -> bool {
    if is_over() {
        return true;
    }
    let until = Instant::now() + limit;
    while Instant::now() < until {
        std::hint::spin_loop();
        if is_over() {
            return true;
        }
    }
    false
}

/// How a thread that serves others waits between two looks: it spins for a while after it last had something to do, and
/// then parks.
pub(crate) struct SpinThenPark {
    spin: Duration,
    pauses: u32,
    idle_since: Option<Instant>,
}

impl SpinThenPark {
    pub(crate) fn new(spin: Duration, pauses: u32) -> SpinThenPark {
        SpinThenPark { spin, pauses, idle_since: None }
    }

    /// There was something to do, or the thread was parked: the time runs from the next look that finds nothing.
    pub(crate) fn reset(&mut self) {
        self.idle_since = None;
    }

    /// There is nothing to do: whether to pause and look again. If not, it is time to park.
    pub(crate) fn is_spinning(&mut self) -> bool {
        self.idle_since.get_or_insert_with(Instant::now).elapsed() < self.spin
    }

    /// Between two looks.
    pub(crate) fn pause(&self) {
        (0..self.pauses).for_each(|_| std::hint::spin_loop());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn spinning_ends_with_the_event_or_with_the_time() {
        let looks = Cell::new(0);
        let third = || {
            looks.set(looks.get() + 1);
            looks.get() == 3
        };
        assert!(spin_until(third, Duration::from_secs(60)));
        let began = Instant::now();
        assert!(!spin_until(|| false, Duration::from_millis(2)));
        assert!(began.elapsed() >= Duration::from_millis(2));
    }

    #[test]
    fn a_thread_parks_after_its_spin_and_spins_again_after_work() {
        let mut idle = SpinThenPark::new(Duration::from_millis(5), 1);
        let began = Instant::now();
        while idle.is_spinning() {
            idle.pause();
        }
        assert!(began.elapsed() >= Duration::from_millis(5));
        assert!(!idle.is_spinning(), "it is time still");
        idle.reset();
        assert!(idle.is_spinning(), "from the beginning");
    }
}
