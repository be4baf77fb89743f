//! The driver's streams, each on a hardware queue of its own. A driver makes as many streams as one likes, but beyond
//! the number of hardware queues two of them share one, and then what is on the one waits for what is on the other:
//! behind a resident kernel for ever. So there are never more driver's streams than queues, and our streams, of which
//! there are many, share them.

use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys as cu;
use slab::Slab;

use super::driver::check;
use crate::error::DeviceError;

/// Stream priorities; every device that has any has these two.
const HIGH: c_int = -1;
const LOW: c_int = 0;

const NON_BLOCKING: c_uint = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;

/// How many hardware queues there are, where it is not said otherwise, and at most.
const QUEUES_VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
const QUEUES_DEFAULT: usize = 8;
const QUEUES_MAX: usize = 32;

/// Queues that nobody uses are kept for the next user, up to so many.
const IDLE_MAX: usize = 4;

/// Queues of this process, of all devices that its threads have open: they share the device's primary context, and with
/// it the hardware queues.
static SHARED: AtomicUsize = AtomicUsize::new(0);
static RESIDENTS: AtomicUsize = AtomicUsize::new(0);

pub(super) struct HardwareQueues {
    queues: Slab<Queue>,
    /// Which queue each user has.
    uses: Slab<usize>,
    shared_max: usize,
    residents_max: usize,
}

struct Queue {
    stream: cu::CUstream,
    green: Option<cu::CUgreenCtx>,
    is_low: bool,
    /// Has one resident kernel and nothing else.
    is_resident: bool,
    users: usize,
}

/// One who uses a queue. Which that is may change, for what is sent later.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueUse(usize);

impl HardwareQueues {
    pub(super) fn new() -> HardwareQueues {
        let said = std::env::var(QUEUES_VARIABLE).ok().and_then(|text| text.trim().parse().ok());
        let queues = said.unwrap_or(QUEUES_DEFAULT).clamp(1, QUEUES_MAX);
        let residents_max = queues / 4;
        let shared_max = queues - residents_max;
        HardwareQueues { queues: Slab::new(), uses: Slab::new(), shared_max, residents_max }
    }

    /// Where a user's jobs go.
    pub(super) fn stream(&self, user: QueueUse) -> cu::CUstream {
        self.queues[self.uses[user.0]].stream
    }

    /// A queue for jobs, on all multiprocessors or those of a green context: one that nobody uses, a new one, or the
    /// one that the fewest use.
    pub(super) fn take(&mut self, green: Option<cu::CUgreenCtx>, is_low: bool) -> Result<QueueUse, DeviceError> {
        let shared = |queue: &Queue| !queue.is_resident;
        let is_same = |queue: &Queue| shared(queue) && queue.green == green && queue.is_low == is_low;
        if let Some(idle) = self.find(|queue| queue.users == 0 && is_same(queue)) {
            return Ok(self.join(idle));
        }
        if self.is_full()
            && let Some(idle) = self.find(|queue| queue.users == 0 && shared(queue))
        {
            self.remove(idle);
        }
        let alike = |queue: &Queue| shared(queue) && queue.green == green;
        if self.is_full() && self.find(alike).is_none() {
            self.merge()?;
        }
        let mut refused = None;
        // The first is the control stream's, without which there is no device.
        if !self.is_full() || self.queues.is_empty() {
            match self.add(green, is_low, false) {
                Ok(new) => return Ok(self.join(new)),
                Err(lost @ DeviceError::DeviceLost { .. }) => return Err(lost),
                Err(error) => refused = Some(error),
            }
        }
        let alike = self.queues.iter().filter(|(_, queue)| alike(queue));
        match alike.min_by_key(|(_, queue)| (queue.is_low != is_low, queue.users)).map(|(at, _)| at) {
            Some(at) => Ok(self.join(at)),
            None => Err(refused.unwrap_or_else(|| DeviceError::Refused {
                why: format!(
                    "all {} hardware queues are used by tenants that each have multiprocessors of their own",
                    self.shared_max
                ),
            })),
        }
    }

    /// A queue for one resident kernel.
    pub(super) fn take_alone(&mut self, green: Option<cu::CUgreenCtx>) -> Result<QueueUse, DeviceError> {
        let (used, max) = (RESIDENTS.load(Ordering::Relaxed), self.residents_max);
        if used >= max {
            let why = format!("{used} resident kernels are on the device, which has hardware queues for {max}");
            return Err(DeviceError::BadLaunch { why });
        }
        let at = self.add(green, true, true)?;
        Ok(self.join(at))
    }

    /// A user is done with its queue. What it has there still is done all the same.
    pub(super) fn give_back(&mut self, user: QueueUse) {
        let at = self.uses.remove(user.0);
        self.queues[at].users -= 1;
        let queue = &self.queues[at];
        let idle = self.queues.iter().filter(|(_, queue)| queue.users == 0).count();
        // A green context goes with its tenant.
        if queue.users == 0 && (queue.is_resident || queue.green.is_some() || idle > IDLE_MAX) {
            self.remove(at);
        }
    }

    fn is_full(&self) -> bool {
        SHARED.load(Ordering::Relaxed) >= self.shared_max
    }

    fn remove(&mut self, at: usize) {
        let queue = self.queues.remove(at);
        count(queue.is_resident).fetch_sub(1, Ordering::Relaxed);
        destroy(queue.stream);
    }

    fn find(&self, is_it: impl Fn(&Queue) -> bool) -> Option<usize> {
        self.queues.iter().find(|(_, queue)| is_it(queue)).map(|(at, _)| at)
    }

    fn add(&mut self, green: Option<cu::CUgreenCtx>, is_low: bool, is_resident: bool) -> Result<usize, DeviceError> {
        let stream = new_stream(green, if is_low { LOW } else { HIGH })?;
        count(is_resident).fetch_add(1, Ordering::Relaxed);
        Ok(self.queues.insert(Queue { stream, green, is_low, is_resident, users: 0 }))
    }

    fn join(&mut self, at: usize) -> QueueUse {
        self.queues[at].users += 1;
        QueueUse(self.uses.insert(at))
    }

    /// Makes room for a queue: the users of one go on on another with the same multiprocessors, in order. Does nothing
    /// where there are no two such queues. The control stream's is left to itself: the worker waits for it.
    fn merge(&mut self) -> Result<(), DeviceError> {
        let control = self.uses.get(0).copied();
        let is_free = |at: usize, queue: &Queue| !queue.is_resident && Some(at) != control;
        let pairs = self.queues.iter().filter(|(at, queue)| is_free(*at, queue)).filter_map(|(from, queue)| {
            let others = self
                .queues
                .iter()
                .filter(|(at, other)| *at != from && is_free(*at, other) && other.green == queue.green);
            let to = others.min_by_key(|(_, other)| (other.is_low != queue.is_low, other.users))?;
            Some((queue.users, from, to.0))
        });
        let Some((users, from, to)) = pairs.min() else { return Ok(()) };
        super::streams::order(self.queues[from].stream, self.queues[to].stream)?;
        self.uses.iter_mut().filter(|(_, at)| **at == from).for_each(|(_, at)| *at = to);
        self.queues[to].users += users;
        self.remove(from);
        Ok(())
    }
}

impl Drop for HardwareQueues {
    fn drop(&mut self) {
        let all: Vec<usize> = self.queues.iter().map(|(at, _)| at).collect();
        all.into_iter().for_each(|at| self.remove(at));
    }
}

fn count(is_resident: bool) -> &'static AtomicUsize {
    if is_resident { &RESIDENTS } else { &SHARED }
}

/// Also for what is only recorded: that needs no queue.
pub(super) fn new_recording(green: Option<cu::CUgreenCtx>) -> Result<cu::CUstream, DeviceError> {
    new_stream(green, HIGH)
}

fn new_stream(green: Option<cu::CUgreenCtx>, priority: c_int) -> Result<cu::CUstream, DeviceError> {
    let mut stream = null_mut();
    // SAFETY: writes a handle to a variable of ours; the context is current, and a green context is one we made.
    check(unsafe {
        match green {
            None => cu::cuStreamCreateWithPriority(&mut stream, NON_BLOCKING, priority),
            Some(green) => cu::cuGreenCtxStreamCreate(&mut stream, green, NON_BLOCKING, priority),
        }
    })?;
    Ok(stream)
}

pub(super) fn destroy(stream: cu::CUstream) {
    // SAFETY: a stream of ours that nobody uses any more; one that still has work is destroyed when that is done.
    let _ = unsafe { cu::cuStreamDestroy_v2(stream) };
}
