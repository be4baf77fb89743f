//! When a stream's flag is written. The flag in the slab is how the server sees jobs done, and a write of it is an
//! operation of the stream: the device finishes what came before, writes, and only then begins what comes after, which
//! keeps apart two kernels that would follow each other at once. So jobs that are found in the ring
//! together share one write, and while a stream is busy with something long its next write waits.
//!
//! Invariant: a stream with jobs that no flag was written behind is in `unflagged`, and either the ring is being
//! emptied or the stream has not passed a flag that was written before, which it will.

use std::time::{Duration, Instant};

use crate::error::DeviceError;

/// Jobs of a stream share one write of its flag, up to this many: the write costs as much as a launch.
const JOBS_PER_FLAG: usize = 128;

/// A stream that has not passed a flag for this long is busy with something long: what is behind it is not done
/// before that, so its flag may wait until then. Short kernels pass in less, and whoever waits for one gets its flag
/// at once. A launch and the write of its flag take 9 µs when nothing is before them.
const BUSY_AFTER: Duration = Duration::from_micros(12);

/// Flags that were written to a stream and not passed when it was last looked at.
#[derive(Clone, Copy)]
struct Ahead {
    /// The first of them, and since when it is there.
    first: u32,
    since: Instant,
    /// The last of them, and when it was written.
    last: u32,
    written: Instant,
}

pub(super) struct Flags {
    unflagged: Vec<(usize, u32)>,
    jobs: usize,
    /// By stream.
    ahead: Vec<Option<Ahead>>,
}

/// What writes flags, and knows which were passed.
pub(super) trait FlagStreams {
    /// Has a stream pass a flag. False if that is no operation of the stream: it costs nothing, or it is not known when
    /// it will be passed.
    fn write(&mut self, stream: usize, number: u32) -> Result<bool, DeviceError>;

    fn has_passed(&self, stream: usize, number: u32) -> bool;
}

impl Flags {
    pub(super) fn new(streams: usize) -> Flags {
        Flags { unflagged: Vec::with_capacity(streams), jobs: 0, ahead: vec![None; streams] }
    }

    /// A job was given to the device.
    pub(super) fn add(&mut self, stream: usize, number: u32, to: &mut impl FlagStreams) -> Result<(), DeviceError> {
        match self.unflagged.iter_mut().find(|(own, _)| *own == stream) {
            Some((_, last)) => *last = number,
            None => self.unflagged.push((stream, number)),
        }
        self.jobs += 1;
        if self.jobs >= JOBS_PER_FLAG { self.write_all(to) } else { Ok(()) }
    }

    /// A job was given to the device whose end the server wants to see.
    pub(super) fn write(&mut self, stream: usize, number: u32, to: &mut impl FlagStreams) -> Result<(), DeviceError> {
        self.unflagged.retain(|(own, _)| *own != stream);
        self.write_now(stream, number, Instant::now(), to)
    }

    /// The ring is empty: writes the flags of streams that are not busy with something long.
    pub(super) fn write_due(&mut self, to: &mut impl FlagStreams) -> Result<(), DeviceError> {
        if self.unflagged.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let mut at = 0;
        while let Some((stream, number)) = self.unflagged.get(at).copied() {
            if self.is_busy(stream, now, to) {
                at += 1;
                continue;
            }
            self.unflagged.swap_remove(at);
            self.write_now(stream, number, now, to)?;
        }
        Ok(())
    }

    /// Writes all of them: nobody will look again soon.
    pub(super) fn write_all(&mut self, to: &mut impl FlagStreams) -> Result<(), DeviceError> {
        self.jobs = 0;
        let now = Instant::now();
        while let Some((stream, number)) = self.unflagged.pop() {
            self.write_now(stream, number, now, to)?;
        }
        Ok(())
    }

    fn write_now(
        &mut self,
        stream: usize,
        number: u32,
        now: Instant,
        to: &mut impl FlagStreams,
    ) -> Result<(), DeviceError> {
        if self.unflagged.is_empty() {
            self.jobs = 0;
        }
        let is_operation = to.write(stream, number)?;
        if let Some(own) = self.ahead.get_mut(stream).filter(|_| is_operation) {
            match own {
                Some(ahead) => (ahead.last, ahead.written) = (number, now),
                None => *own = Some(Ahead { first: number, since: now, last: number, written: now }),
            }
        }
        Ok(())
    }

    fn is_busy(&mut self, stream: usize, now: Instant, to: &impl FlagStreams) -> bool {
        let Some(own) = self.ahead.get_mut(stream) else { return false };
        let Some(ahead) = own else { return false };
        if to.has_passed(stream, ahead.last) {
            *own = None;
            return false;
        }
        if to.has_passed(stream, ahead.first) {
            // Those between the two are not known any more: the last stands for them.
            (ahead.first, ahead.since) = (ahead.last, ahead.written);
        }
        now.saturating_duration_since(ahead.since) >= BUSY_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams that pass what they are told to.
    #[derive(Default)]
    struct Streams {
        written: Vec<(usize, u32)>,
        passed: u32,
        costs_nothing: bool,
    }

    impl FlagStreams for Streams {
        fn write(&mut self, stream: usize, number: u32) -> Result<bool, DeviceError> {
            self.written.push((stream, number));
            Ok(!self.costs_nothing)
        }

        fn has_passed(&self, _stream: usize, number: u32) -> bool {
            number <= self.passed
        }
    }

    fn later(flags: &mut Flags) {
        for ahead in flags.ahead.iter_mut().flatten() {
            ahead.since -= BUSY_AFTER;
            ahead.written -= BUSY_AFTER;
        }
    }

    #[test]
    fn jobs_found_together_share_a_flag() {
        let (mut flags, mut streams) = (Flags::new(4), Streams::default());
        for number in 1..=3 {
            flags.add(1, number, &mut streams).unwrap();
        }
        flags.add(2, 9, &mut streams).unwrap();
        flags.write_due(&mut streams).unwrap();
        assert_eq!(streams.written, [(1, 3), (2, 9)]);
        flags.write_due(&mut streams).unwrap();
        assert_eq!(streams.written.len(), 2, "nothing is written twice");
    }

    #[test]
    fn a_busy_stream_is_asked_again_once_it_has_passed() {
        let (mut flags, mut streams) = (Flags::new(4), Streams::default());
        flags.add(1, 1, &mut streams).unwrap();
        flags.write_due(&mut streams).unwrap();
        flags.add(1, 2, &mut streams).unwrap();
        flags.write_due(&mut streams).unwrap();
        assert_eq!(streams.written, [(1, 1), (1, 2)], "it is not known to be busy yet");
        later(&mut flags);
        flags.add(1, 3, &mut streams).unwrap();
        flags.add(2, 7, &mut streams).unwrap();
        flags.write_due(&mut streams).unwrap();
        assert_eq!(streams.written, [(1, 1), (1, 2), (2, 7)], "another stream is not concerned");
        // The second is there for as long as the first was.
        streams.passed = 1;
        flags.add(1, 4, &mut streams).unwrap();
        flags.write_due(&mut streams).unwrap();
        assert_eq!(streams.written.len(), 3);
        streams.passed = 2;
        flags.write_due(&mut streams).unwrap();
        assert_eq!(streams.written.last(), Some(&(1, 4)), "one for both");
    }

    #[test]
    fn who_asks_gets_a_flag_and_so_does_everybody_in_the_end() {
        let (mut flags, mut streams) = (Flags::new(4), Streams::default());
        flags.add(1, 1, &mut streams).unwrap();
        flags.write_due(&mut streams).unwrap();
        later(&mut flags);
        flags.write(1, 2, &mut streams).unwrap();
        flags.add(1, 3, &mut streams).unwrap();
        flags.write_due(&mut streams).unwrap();
        assert_eq!(streams.written, [(1, 1), (1, 2)]);
        flags.write_all(&mut streams).unwrap();
        assert_eq!(streams.written.last(), Some(&(1, 3)));
        let many = u32::try_from(JOBS_PER_FLAG).unwrap();
        (4..4 + many).for_each(|number| flags.add(1, number, &mut streams).unwrap());
        assert_eq!(streams.written.last(), Some(&(1, 3 + many)), "so many share one, and no more");
    }

    #[test]
    fn where_it_costs_nothing_nobody_waits_for_a_flag() {
        let mut streams = Streams { costs_nothing: true, ..Streams::default() };
        let mut flags = Flags::new(4);
        for number in 1..=3 {
            flags.add(1, number, &mut streams).unwrap();
            flags.write_due(&mut streams).unwrap();
            later(&mut flags);
        }
        assert_eq!(streams.written, [(1, 1), (1, 2), (1, 3)]);
    }
}
