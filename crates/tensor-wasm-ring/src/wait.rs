//! How long anybody here spins before it parks, and how often who is parked looks of itself, all in one place. As with
//! jobs (`wait.rs` of `tensor-wasm-gpu`), whoever waits spins for about as long as its wake-up would take.

use std::time::Duration;

/// A lane of a CPU spins this long without a message before it parks. A wake-up takes 50 µs on a virtual machine whose
/// core went idle; an answer comes within one.
pub(crate) const LANE_SPIN: Duration = Duration::from_micros(60);

/// Who waits for an answer spins this long: through the wake-up of a lane that has parked, and its answer.
pub(crate) const ANSWER_SPIN: Duration = Duration::from_micros(120);

/// Who has spun this long lets others have its core now and then: whom it waits for may stand in line for that very
/// core, which cost 200 µs a round trip on two cores that six threads wanted. An answer comes within one.
const YIELD_AFTER: Duration = Duration::from_micros(4);

/// Looks of a spinning thread between two at the clock: one takes 25 ns, as much as a look at a ring.
pub(crate) const LOOKS_PER_TIME: u32 = 32;

/// A parked lane shows its heartbeat this often. A device's watchdog is told to be patient for two seconds.
pub(crate) const BEAT_PERIOD: Duration = Duration::from_millis(100);

/// How often an executor's lanes are looked at together, and its own heartbeat is shown.
pub(crate) const WATCH_PERIOD: Duration = Duration::from_millis(150);

/// The runtime's own thread looks this often for actors that have faulted and for lanes that are gone. It is no part of
/// any message's latency.
pub(crate) const SUPERVISION_PERIOD: Duration = Duration::from_millis(10);

/// Where lanes cannot ring, because they are on a GPU, replies are looked for this often once nobody spins any more.
pub(crate) const POLL_PERIOD: Duration = Duration::from_micros(50);

/// A slot that was begun and is not finished after this long never will be: whoever writes one does nothing else
/// meanwhile, and would have to be kept from running for as long.
pub(crate) const TORN_MAX: Duration = Duration::from_millis(500);

// A lane that spins is awake when whoever sent it something looks for the answer.
const _: () = assert!(LANE_SPIN.as_nanos() < ANSWER_SPIN.as_nanos());
const _: () = assert!(BEAT_PERIOD.as_nanos() < WATCH_PERIOD.as_nanos());

/// Spins for a while, and then says that it is time to park.
pub(crate) struct Spin {
    limit: Duration,
    looks: u32,
    since: Option<std::time::Instant>,
}

impl Spin {
    pub(crate) fn new(limit: Duration) -> Spin {
        Spin { limit, looks: 0, since: None }
    }

    /// There was something to do.
    pub(crate) fn reset(&mut self) {
        (self.looks, self.since) = (0, None);
    }

    /// Pauses, unless it has been for long enough.
    pub(crate) fn pause(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(LOOKS_PER_TIME) {
            let now = std::time::Instant::now();
            let spun = now - *self.since.get_or_insert(now);
            if spun >= self.limit {
                return false;
            }
            if spun >= YIELD_AFTER {
                std::thread::yield_now();
            }
        }
        std::hint::spin_loop();
        true
    }
}
