//! Hybrid logical clocks: times that agree with the wall clock to within a millisecond or so and with causality always.
//! What was caused by a message has a later time than the message, on whatever machine's clock.
//!
//! A time is microseconds since the epoch << 16 | a counter, so times compare as numbers. The counter runs where the
//! wall clock stands still, or is behind what a message said; past its end it carries into the microseconds.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const COUNTER_BITS: u32 = 16;

/// A message whose time is further ahead of the wall clock than this does not move ours: one sender with a broken
/// clock must not set everybody's.
const AHEAD_MAX: Duration = Duration::from_secs(60);

const AHEAD_MAX_TICKS: u64 = {
    let micros = AHEAD_MAX.as_micros();
    assert!(micros < 1 << 40);
    #[expect(clippy::cast_possible_truncation, reason = "checked by the line above, when this is compiled")]
    let micros = micros as u64;
    micros << COUNTER_BITS
};

/// A clock of one sender.
#[derive(Debug, Default)]
pub(crate) struct HybridClock {
    last: u64,
}

impl HybridClock {
    /// The time of something that happens now, at `wall` since the epoch.
    pub(crate) fn tick(&mut self, wall: Duration) -> u64 {
        self.last = physical(wall).max(self.last + 1);
        self.last
    }

    /// Takes note of the time of a message that has come.
    pub(crate) fn observe(&mut self, time: u64, wall: Duration) {
        if time <= physical(wall).saturating_add(AHEAD_MAX_TICKS) {
            self.last = self.last.max(time);
        }
    }
}

fn physical(wall: Duration) -> u64 {
    // Good for 280,000 years.
    u64::try_from(wall.as_micros()).unwrap_or(0) << COUNTER_BITS
}

/// Since the epoch. A clock that was set before it reads as the epoch: order does not depend on it.
pub(crate) fn wall() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_grow_and_follow_what_came() {
        let (mut a, mut b) = (HybridClock::default(), HybridClock::default());
        let now = Duration::from_secs(1_000);
        let first = a.tick(now);
        assert_eq!(first >> COUNTER_BITS, 1_000_000_000);
        assert!(a.tick(now) > first, "the wall clock stands still");
        assert!(a.tick(now - Duration::from_secs(5)) > first, "or goes back");
        // `b` is a second behind, and hears of `a`.
        let behind = now - Duration::from_secs(1);
        let sent = a.tick(now);
        b.observe(sent, behind);
        assert!(b.tick(behind) > sent);
        b.observe(u64::MAX, behind);
        assert!(b.tick(behind) < u64::MAX / 2, "nobody's broken clock sets ours");
        for _ in 0..70_000 {
            a.tick(now);
        }
        assert!(a.tick(now) >> COUNTER_BITS > 1_000_000_000, "the counter carries");
    }
}
