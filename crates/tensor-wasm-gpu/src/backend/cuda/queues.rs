//! The driver's streams, each on a hardware queue of its own. A driver makes as many streams as one likes, but beyond
//! the number of hardware queues two of them share one, and then what is on the one waits for what is on the other:
//! behind a resident kernel for ever. So there are never more driver's streams than queues, and our streams, of which
//! there are many, share them.

use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys as cu;

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
static OF_PROCESS: QueueCounts = QueueCounts { shared: AtomicUsize::new(0), residents: AtomicUsize::new(0) };

struct QueueCounts {
    shared: AtomicUsize,
    residents: AtomicUsize,
}

impl QueueCounts {
    fn of(&self, kind: QueueKind) -> Option<&AtomicUsize> {
        match kind {
            QueueKind::Control => None,
            QueueKind::Shared => Some(&self.shared),
            QueueKind::Resident => Some(&self.residents),
        }
    }
}

/// What makes and destroys streams: the driver, or a test.
pub(super) trait StreamMaker {
    /// A stream on all multiprocessors, or on those of a green context.
    fn make(&self, green: Option<cu::CUgreenCtx>, is_low: bool) -> Result<cu::CUstream, DeviceError>;

    /// Of a stream that nobody uses any more; one that still has work goes when that is done.
    fn destroy(&self, stream: cu::CUstream);

    /// Has one stream begin what comes next after everything that the other was given so far.
    fn order(&self, before: cu::CUstream, after: cu::CUstream) -> Result<(), DeviceError>;
}

pub(super) struct Driver;

impl StreamMaker for Driver {
    fn make(&self, green: Option<cu::CUgreenCtx>, is_low: bool) -> Result<cu::CUstream, DeviceError> {
        new_stream(green, if is_low { LOW } else { HIGH })
    }

    fn destroy(&self, stream: cu::CUstream) {
        destroy(stream);
    }

    fn order(&self, before: cu::CUstream, after: cu::CUstream) -> Result<(), DeviceError> {
        super::streams::order(before, after)
    }
}

pub(super) struct HardwareQueues<M: StreamMaker = Driver> {
    maker: M,
    queues: slab::Slab<Queue>,
    /// Which queue each user has.
    uses: slab::Slab<usize>,
    counts: &'static QueueCounts,
    shared_max: usize,
    residents_max: usize,
}

struct Queue {
    stream: cu::CUstream,
    green: Option<cu::CUgreenCtx>,
    is_low: bool,
    kind: QueueKind,
    users: usize,
}

/// What a queue is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum QueueKind {
    /// The control stream, for which the worker waits.
    Control,
    /// Streams of tenants.
    Shared,
    /// One resident kernel and nothing else.
    Resident,
}

/// One who uses a queue. Which that is may change, for what is sent later.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueUse(usize);

impl HardwareQueues {
    pub(super) fn new() -> HardwareQueues {
        let said = std::env::var(QUEUES_VARIABLE).ok().and_then(|text| text.trim().parse().ok());
        HardwareQueues::of(Driver, said.unwrap_or(QUEUES_DEFAULT).clamp(1, QUEUES_MAX), &OF_PROCESS)
    }
}

impl<M: StreamMaker> HardwareQueues<M> {
    fn of(maker: M, queues: usize, counts: &'static QueueCounts) -> HardwareQueues<M> {
        let residents_max = queues / 4;
        // One is the control stream's.
        let shared_max = (queues - residents_max).saturating_sub(1).max(1);
        HardwareQueues { maker, queues: slab::Slab::new(), uses: slab::Slab::new(), counts, shared_max, residents_max }
    }

    /// Where a user's jobs go.
    pub(super) fn stream(&self, user: QueueUse) -> cu::CUstream {
        self.queues[self.uses[user.0]].stream
    }

    /// A queue for jobs, on all multiprocessors or those of a green context: one that nobody uses, a new one, or the
    /// one that the fewest use.
    pub(super) fn take(&mut self, green: Option<cu::CUgreenCtx>, is_low: bool) -> Result<QueueUse, DeviceError> {
        let shared = |queue: &Queue| queue.kind == QueueKind::Shared;
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
        // Tenants on multiprocessors of their own have no queue in common; more of them than there are queues are
        // slower only, where no resident kernel is that they could wait behind for ever.
        let is_crowded = self.is_full() && (self.find(alike).is_some() || self.has_residents());
        if !is_crowded {
            match self.add(green, is_low, QueueKind::Shared) {
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
        let (used, max) = (self.counts.residents.load(Ordering::Relaxed), self.residents_max);
        if used >= max {
            let why = format!("{used} resident kernels are on the device, which has hardware queues for {max}");
            return Err(DeviceError::BadLaunch { why });
        }
        if self.counts.shared.load(Ordering::Relaxed) > self.shared_max {
            let why = "tenants on multiprocessors of their own use the hardware queues for resident kernels".to_owned();
            return Err(DeviceError::BadLaunch { why });
        }
        let at = self.add(green, true, QueueKind::Resident)?;
        Ok(self.join(at))
    }

    /// The control stream's queue.
    pub(super) fn take_control(&mut self) -> Result<QueueUse, DeviceError> {
        let at = self.add(None, false, QueueKind::Control)?;
        Ok(self.join(at))
    }

    /// A user is done with its queue. What it has there still is done all the same.
    pub(super) fn give_back(&mut self, user: QueueUse) {
        let at = self.uses.remove(user.0);
        self.queues[at].users -= 1;
        let queue = &self.queues[at];
        let idle = self.queues.iter().filter(|(_, queue)| queue.users == 0).count();
        // A green context goes with its tenant.
        let is_kept = queue.kind == QueueKind::Shared && queue.green.is_none() && idle <= IDLE_MAX;
        if queue.users == 0 && !is_kept {
            self.remove(at);
        }
    }

    fn is_full(&self) -> bool {
        self.counts.shared.load(Ordering::Relaxed) >= self.shared_max
    }

    fn has_residents(&self) -> bool {
        self.counts.residents.load(Ordering::Relaxed) > 0
    }

    fn remove(&mut self, at: usize) {
        let queue = self.queues.remove(at);
        if let Some(count) = self.counts.of(queue.kind) {
            count.fetch_sub(1, Ordering::Relaxed);
        }
        self.maker.destroy(queue.stream);
    }

    fn find(&self, is_it: impl Fn(&Queue) -> bool) -> Option<usize> {
        self.queues.iter().find(|(_, queue)| is_it(queue)).map(|(at, _)| at)
    }

    fn add(&mut self, green: Option<cu::CUgreenCtx>, is_low: bool, kind: QueueKind) -> Result<usize, DeviceError> {
        let stream = self.maker.make(green, is_low)?;
        if let Some(count) = self.counts.of(kind) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(self.queues.insert(Queue { stream, green, is_low, kind, users: 0 }))
    }

    fn join(&mut self, at: usize) -> QueueUse {
        self.queues[at].users += 1;
        QueueUse(self.uses.insert(at))
    }

    /// Makes room for a queue: the users of one go on on another with the same multiprocessors, in order. Does nothing
    /// where there are no two such queues.
    fn merge(&mut self) -> Result<(), DeviceError> {
        let is_free = |queue: &Queue| queue.kind == QueueKind::Shared;
        let pairs = self.queues.iter().filter(|(_, queue)| is_free(queue)).filter_map(|(from, queue)| {
            let is_alike = |at: usize, other: &Queue| at != from && is_free(other) && other.green == queue.green;
            let others = self.queues.iter().filter(|(at, other)| is_alike(*at, other));
            let to = others.min_by_key(|(_, other)| (other.is_low != queue.is_low, other.users))?;
            Some((queue.users, from, to.0))
        });
        let Some((users, from, to)) = pairs.min() else { return Ok(()) };
        self.maker.order(self.queues[from].stream, self.queues[to].stream)?;
        self.uses.iter_mut().filter(|(_, at)| **at == from).for_each(|(_, at)| *at = to);
        self.queues[to].users += users;
        self.remove(from);
        Ok(())
    }
}

impl<M: StreamMaker> Drop for HardwareQueues<M> {
    fn drop(&mut self) {
        let all: Vec<usize> = self.queues.iter().map(|(at, _)| at).collect();
        all.into_iter().for_each(|at| self.remove(at));
    }
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashSet;
    use std::rc::Rc;

    use super::*;

    /// Streams that are there, by number.
    #[derive(Default, Clone)]
    struct Made(Rc<RefCell<(usize, HashSet<usize>)>>);

    impl StreamMaker for Made {
        fn make(&self, _green: Option<cu::CUgreenCtx>, _is_low: bool) -> Result<cu::CUstream, DeviceError> {
            let (last, live) = &mut *self.0.borrow_mut();
            *last += 1;
            live.insert(*last);
            Ok(*last as cu::CUstream)
        }

        fn destroy(&self, stream: cu::CUstream) {
            assert!(self.0.borrow_mut().1.remove(&(stream as usize)), "destroyed twice");
        }

        fn order(&self, before: cu::CUstream, after: cu::CUstream) -> Result<(), DeviceError> {
            let live = &self.0.borrow().1;
            assert!(before != after && live.contains(&(before as usize)) && live.contains(&(after as usize)));
            Ok(())
        }
    }

    fn counts() -> &'static QueueCounts {
        Box::leak(Box::new(QueueCounts { shared: AtomicUsize::new(0), residents: AtomicUsize::new(0) }))
    }

    fn green(n: usize) -> Option<cu::CUgreenCtx> {
        Some(n as cu::CUgreenCtx)
    }

    #[test]
    fn no_more_streams_than_queues_and_nobody_shares_what_is_alone() {
        let made = Made::default();
        let live = || made.0.borrow().1.len();
        let mut queues = HardwareQueues::of(made.clone(), 32, counts());
        let control = queues.take_control().unwrap();
        let residents: Vec<QueueUse> = (0..8).map(|_| queues.take_alone(None).unwrap()).collect();
        assert!(matches!(queues.take_alone(None), Err(DeviceError::BadLaunch { .. })), "eight of 32");
        let users: Vec<QueueUse> = (0..500).map(|n| queues.take(None, n % 3 == 0).unwrap()).collect();
        assert_eq!(live(), 32);
        let alone: Vec<cu::CUstream> = residents.iter().chain([&control]).map(|own| queues.stream(*own)).collect();
        assert_eq!(alone.iter().collect::<HashSet<_>>().len(), 9);
        assert!(users.iter().all(|user| !alone.contains(&queues.stream(*user))));
        // They are spread evenly: as many queues as there are, none with many more users than another.
        let mut load = std::collections::HashMap::new();
        users.iter().for_each(|user| *load.entry(queues.stream(*user)).or_insert(0) += 1);
        assert_eq!(load.len(), 23);
        // Tenants on multiprocessors of their own get queues of their own, also where all are in use; others move on.
        let parts: Vec<QueueUse> = (1..=10).map(|n| queues.take(green(n), false).unwrap()).collect();
        assert_eq!(live(), 32);
        let own: HashSet<cu::CUstream> = parts.iter().map(|user| queues.stream(*user)).collect();
        assert_eq!(own.len(), 10);
        assert!(
            users.iter().all(|user| !own.contains(&queues.stream(*user)) && !alone.contains(&queues.stream(*user)))
        );
        let refused = (11..40).map(|n| queues.take(green(n), false)).find_map(Result::err);
        assert!(
            matches!(refused, Some(DeviceError::Refused { .. })),
            "behind a resident kernel they would wait for ever"
        );
        assert_eq!(live(), 32);
        users.into_iter().chain(parts).chain(residents).for_each(|user| queues.give_back(user));
        drop(queues);
        assert_eq!(live(), 0);
    }

    #[test]
    fn without_resident_kernels_tenants_on_parts_of_the_device_are_not_refused() {
        let made = Made::default();
        let mut queues = HardwareQueues::of(made.clone(), 8, counts());
        let parts: Vec<QueueUse> = (1..=40).map(|n| queues.take(green(n), false).unwrap()).collect();
        let own: HashSet<cu::CUstream> = parts.iter().map(|user| queues.stream(*user)).collect();
        assert_eq!(own.len(), 40);
        let refused = queues.take_alone(None).err();
        assert!(matches!(refused, Some(DeviceError::BadLaunch { .. })), "its queue might be another's too");
        parts.into_iter().for_each(|user| queues.give_back(user));
        assert_eq!(made.0.borrow().1.len(), 0, "a green context's streams go with their users");
        queues.take_alone(None).unwrap();
    }

    #[test]
    fn random_use_keeps_to_the_queues() {
        use rand::{Rng, SeedableRng};
        let mut rng = rand::rngs::StdRng::seed_from_u64(7);
        let made = Made::default();
        let mut queues = HardwareQueues::of(made.clone(), 32, counts());
        queues.take_control().unwrap();
        let (mut users, mut residents) = (Vec::new(), Vec::new());
        for _ in 0..20_000 {
            match rng.random_range(0..10) {
                0..5 => users.push(queues.take(None, rng.random()).unwrap()),
                5 => residents.extend(queues.take_alone(None).ok()),
                6 if !residents.is_empty() => queues.give_back(residents.swap_remove(0)),
                _ if !users.is_empty() => queues.give_back(users.swap_remove(rng.random_range(0..users.len()))),
                _ => {}
            }
            assert!(made.0.borrow().1.len() <= 32);
            let alone: Vec<cu::CUstream> = residents.iter().map(|own| queues.stream(*own)).collect();
            assert!(users.iter().take(50).all(|user| !alone.contains(&queues.stream(*user))));
        }
    }
}
