//! Whose job goes to the device next: deficit round robin by measured device time. The decision alone, without clocks,
//! threads or devices; `link.rs` wraps it.
//!
//! Each tenant has a line of its own, however many streams it has: what it gets is the line's, so more streams are
//! more parallelism and no larger part of the device. Tenants take turns; one may send jobs while its deficit is
//! positive, each send takes what its jobs have cost on average, and what the job really took is settled when it is
//! done, in whatever order the jobs of a line end. When everybody who waits has used up its deficit, all of them get a
//! quantum by weight.

use std::collections::VecDeque;

use slab::Slab as Slots;

/// What a tenant of weight 1 may use before the next has its turn.
const QUANTUM_NS: i64 = 500_000;

/// The window: work on the device at once, by estimate, while several tenants have some, and while one is alone.
/// Somebody who comes finds that much before its own, because what is on the device is beyond our control. One who is
/// alone may have a job on each of its streams beyond that: jobs on different streams do not queue behind each other,
/// they share the device.
const WINDOW_NS: i64 = 1_500_000;
const WINDOW_ALONE_NS: i64 = 10_000_000;

/// Tenants that take turns this closely are not alone in between.
const COMPANY_NS: u64 = 100_000_000;

/// The estimate for a tenant's first job.
const FIRST_ESTIMATE_NS: i64 = 10_000;

/// Until so many of a line's jobs have been seen, nothing is known about them, and only a few are sent beside others'.
const STRANGER_JOBS: u32 = 8;
const STRANGER_RUNNING_MAX: usize = 2;

/// Jobs from this length on make way for shorter ones.
const LONG_NS: i64 = 200_000;

/// A job counts for at least this much, so that jobs that take no time at all still take turns.
const COST_MIN_NS: i64 = 1_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    /// 0 for what is nobody's: always sent next, and no company to anybody.
    pub weight: u32,
    /// Jobs on the device at once.
    pub running_max: usize,
    /// Jobs in line.
    pub waiting_max: usize,
}

struct Line<J> {
    share: Share,
    waiting: VecDeque<J>,
    /// Jobs on the device.
    running: usize,
    deficit_ns: i64,
    estimate_ns: i64,
    seen: u32,
    has_turn: bool,
}

impl<J> Line<J> {
    fn has_room(&self, crowded: bool) -> bool {
        let is_stranger = crowded && self.seen < STRANGER_JOBS;
        self.running < if is_stranger { STRANGER_RUNNING_MAX } else { self.share.running_max }
    }
}

pub(crate) struct Fair<J> {
    lines: Slots<Line<J>>,
    /// Lines with jobs waiting, in the order of their turns.
    turns: VecDeque<usize>,
    /// Lines with jobs waiting or running.
    active: usize,
    running_ns: i64,
    /// Whose job came last, and when a job last came of another than the one before.
    last: Option<usize>,
    company_ns: Option<u64>,
}

/// A job to send now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Turn<J> {
    pub line: usize,
    pub job: J,
    /// What it was taken to cost; `done` wants to know.
    pub estimate_ns: i64,
}

/// The line is full; how many wait in it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full(pub usize);

impl<J> Fair<J> {
    pub(crate) fn new() -> Fair<J> {
        Fair { lines: Slots::new(), turns: VecDeque::new(), active: 0, running_ns: 0, last: None, company_ns: None }
    }

    pub(crate) fn open(&mut self, share: Share) -> usize {
        let estimate_ns = FIRST_ESTIMATE_NS;
        self.lines.insert(Line {
            share,
            waiting: VecDeque::new(),
            running: 0,
            deficit_ns: QUANTUM_NS,
            estimate_ns,
            seen: 0,
            has_turn: false,
        })
    }

    /// Closes a line that has nothing waiting or running.
    pub(crate) fn close(&mut self, line: usize) {
        if self.lines.contains(line) && self.is_idle(line) {
            self.lines.remove(line);
            self.turns.retain(|n| *n != line);
        }
    }

    fn is_idle(&self, line: usize) -> bool {
        self.lines[line].waiting.is_empty() && self.lines[line].running == 0
    }

    /// Whether anybody's job waits.
    pub(crate) fn has_waiting(&self) -> bool {
        self.turns.iter().any(|line| !self.lines[*line].waiting.is_empty())
    }

    pub(crate) fn waiting(&self, line: usize) -> usize {
        self.lines[line].waiting.len()
    }

    /// Whether a line's jobs are so long that others should go first where the device can choose.
    pub(crate) fn is_long(&self, line: usize) -> bool {
        self.lines[line].estimate_ns >= LONG_NS
    }

    /// How many more jobs may wait in a line.
    pub(crate) fn room(&self, line: usize) -> usize {
        let own = &self.lines[line];
        own.share.waiting_max.saturating_sub(own.waiting.len())
    }

    /// Puts a job in line, at a time in nanoseconds.
    pub(crate) fn submit(&mut self, line: usize, job: J, now_ns: u64) -> Result<(), (Full, J)> {
        let is_somebody = self.lines[line].share.weight > 0;
        if is_somebody && self.last.replace(line).is_some_and(|last| last != line) {
            self.company_ns = Some(now_ns);
        }
        let was_idle = self.is_idle(line) && is_somebody;
        let own = &mut self.lines[line];
        if own.waiting.len() >= own.share.waiting_max {
            return Err((Full(own.waiting.len()), job));
        }
        own.waiting.push_back(job);
        self.active += usize::from(was_idle);
        if !own.has_turn {
            own.has_turn = true;
            self.turns.push_back(line);
        }
        Ok(())
    }

    /// Whether more than one tenant has work, or had some a moment ago.
    pub(crate) fn is_crowded(&self, now_ns: u64) -> bool {
        self.active > 1 || self.company_ns.is_some_and(|then| now_ns.saturating_sub(then) < COMPANY_NS)
    }

    /// The next job to send, if one may be sent now. `has_idle_stream`: nothing is on the device before the job on its
    /// stream.
    pub(crate) fn next(&mut self, now_ns: u64, has_idle_stream: impl Fn(&J) -> bool) -> Option<Turn<J>> {
        let crowded = self.is_crowded(now_ns);
        let is_full = self.running_ns >= if crowded { WINDOW_NS } else { WINDOW_ALONE_NS };
        // Once round without quanta, and once more after giving them.
        for _ in 0..2 {
            let mut is_owed = false;
            for _ in 0..self.turns.len() {
                let line = *self.turns.front()?;
                let own = &mut self.lines[line];
                let Some(first) = own.waiting.front() else {
                    own.has_turn = false;
                    self.turns.pop_front();
                    continue;
                };
                // Whoever has nothing on the device may always have one thing there.
                let is_nobody = own.share.weight == 0;
                let is_beside = is_nobody || own.running == 0 || !crowded && has_idle_stream(first);
                let has_room = own.has_room(crowded && !is_nobody) && (!is_full || is_beside);
                let may_use = !crowded || is_nobody || own.deficit_ns > 0;
                if !has_room || !may_use {
                    is_owed |= may_use && !is_nobody;
                    self.turns.rotate_left(1);
                    continue;
                }
                let job = own.waiting.pop_front()?;
                let estimate_ns = if is_nobody { 0 } else { own.estimate_ns };
                own.deficit_ns -= estimate_ns;
                own.running += 1;
                self.running_ns += estimate_ns;
                return Some(Turn { line, job, estimate_ns });
            }
            // Somebody with time left has as many jobs on the device as it may; the others wait for it, not it for
            // them.
            if is_owed {
                return None;
            }
            self.give_quanta();
        }
        None
    }

    /// Gives as many quanta as it takes until somebody who could send may.
    fn give_quanta(&mut self) {
        let quantum = |own: &Line<J>| QUANTUM_NS * i64::from(own.share.weight.max(1));
        let could_send = |own: &&Line<J>| !own.waiting.is_empty() && own.share.weight > 0 && own.has_room(true);
        let lines = self.turns.iter().filter_map(|line| self.lines.get(*line));
        let rounds = lines.filter(could_send).map(|own| (-own.deficit_ns).max(0) / quantum(own) + 1).min();
        let Some(rounds) = rounds else { return };
        for line in &self.turns {
            let own = &mut self.lines[*line];
            own.deficit_ns += rounds * quantum(own);
        }
    }

    /// A job of a line that was on the device is done, whichever: what it was estimated at, and how long it took.
    pub(crate) fn done(&mut self, line: usize, estimate_ns: i64, took_ns: i64) {
        let own = &mut self.lines[line];
        let Some(running) = own.running.checked_sub(1) else { return };
        own.running = running;
        let cost = took_ns.max(COST_MIN_NS);
        self.running_ns -= estimate_ns;
        if own.share.weight == 0 {
            return;
        }
        own.deficit_ns += estimate_ns - cost;
        // The first ones count for much, then the average settles.
        own.seen = own.seen.saturating_add(1);
        let inertia = i64::from(own.seen.min(8));
        own.estimate_ns = (own.estimate_ns * (inertia - 1) + cost) / inertia;
        if self.is_idle(line) {
            self.active -= 1;
            // Silence earns nothing: nobody saves up more than one turn.
            let own = &mut self.lines[line];
            own.deficit_ns = own.deficit_ns.min(QUANTUM_NS * i64::from(own.share.weight.max(1)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: Share = Share { weight: 1, running_max: 64, waiting_max: 10_000 };

    /// A line of the simulation.
    #[derive(Clone, Copy)]
    struct Simulated {
        share: Share,
        /// What a job takes, once it runs.
        job_ns: i64,
        streams: usize,
        /// Jobs that are kept waiting or running.
        backlog: usize,
    }

    fn line(share: Share, job_ns: i64) -> Simulated {
        Simulated { share, job_ns, streams: 1, backlog: 200 }
    }

    /// A job of the simulation: when it was submitted, and the stream it is on.
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Simulation {
        since: i64,
        stream: usize,
    }

    /// What came of a simulation.
    struct Outcome {
        /// The time that each line's jobs ran.
        got: Vec<i64>,
        /// The longest that a job of the first line was there.
        longest: i64,
        /// When the last job ended.
        now: i64,
    }

    /// A device that runs so many jobs at a time, those of a stream one after another. Costs are charged as `link.rs`
    /// does: who is done pays for the time since something was last done. `steps`: how often something is.
    fn simulate_on(slots: usize, lines: &[Simulated], steps: usize) -> Outcome {
        let mut fair: Fair<Simulation> = Fair::new();
        let ids: Vec<usize> = lines.iter().map(|own| fair.open(own.share)).collect();
        let (mut now, mut got, mut longest, mut last_done) = (0_i64, vec![0; lines.len()], 0, 0);
        // On the device: line, job, estimate, and when it ends if it runs already.
        let mut on_device: Vec<(usize, Simulation, i64, Option<i64>)> = Vec::new();
        let mut next_stream = vec![0; lines.len()];
        let mut submit = |fair: &mut Fair<Simulation>, at: usize, now: i64| {
            next_stream[at] = (next_stream[at] + 1) % lines[at].streams;
            let job = Simulation { since: now, stream: at * 1000 + next_stream[at] };
            fair.submit(ids[at], job, now.cast_unsigned()).unwrap();
        };
        for (at, own) in lines.iter().enumerate() {
            (0..own.backlog).for_each(|_| submit(&mut fair, at, now));
        }
        for _ in 0..steps {
            while let Some(turn) = {
                let is_idle = |job: &Simulation| on_device.iter().all(|(_, other, ..)| other.stream != job.stream);
                fair.next(now.cast_unsigned(), is_idle)
            } {
                let at = ids.iter().position(|id| *id == turn.line).unwrap();
                on_device.push((at, turn.job, turn.estimate_ns, None));
            }
            // The first of each stream run, as many as there is room for.
            let mut busy: Vec<usize> = Vec::new();
            for (at, job, _, ends) in &mut on_device {
                if !busy.contains(&job.stream) && (ends.is_some() || busy.len() < slots) {
                    ends.get_or_insert(now + lines[*at].job_ns);
                    busy.push(job.stream);
                }
            }
            now = on_device.iter().filter_map(|(.., ends)| *ends).min().unwrap();
            let done: Vec<_> = on_device.extract_if(.., |(.., ends)| *ends == Some(now)).collect();
            let took = (now - last_done) / i64::try_from(done.len()).unwrap();
            last_done = now;
            for (at, job, estimate, _) in done {
                got[at] += lines[at].job_ns;
                fair.done(ids[at], estimate, took);
                if at == 0 {
                    longest = longest.max(now - job.since);
                }
                submit(&mut fair, at, now);
            }
        }
        Outcome { got, longest, now }
    }

    /// The same on a device that runs one job at a time, with one job at a time of the first line.
    fn simulate(lines: &[(Share, i64)], jobs: usize) -> (Vec<i64>, i64) {
        let mut lines: Vec<Simulated> = lines.iter().map(|(share, job_ns)| line(*share, *job_ns)).collect();
        lines[0].backlog = 1;
        let Outcome { got, longest, .. } = simulate_on(1, &lines, jobs);
        (got, longest)
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs many jobs to settle")]
    fn sixteen_streams_get_no_more_of_a_contended_device_than_one() {
        for job_ns in [20_000, 200_000, 900_000] {
            let many = Simulated { streams: 16, ..line(SHARE, job_ns) };
            // Jobs that fill the device: the same number of each are done.
            let Outcome { got, .. } = simulate_on(1, &[line(SHARE, job_ns), many], 40_000);
            let ratio = got[1] as f64 / got[0] as f64;
            assert!((0.9..1.1).contains(&ratio), "{job_ns} ns: {ratio}");
            // Where eight run side by side, the one with a single stream can use one slot, and has it. The other has
            // what is left.
            let Outcome { got, now, .. } = simulate_on(8, &[line(SHARE, job_ns), many], 40_000);
            let slot = got[0] as f64 / now as f64;
            assert!(slot > 0.9, "{job_ns} ns: {slot} of its slot");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs many jobs to settle")]
    fn alone_sixteen_streams_fill_the_device_however_long_their_jobs() {
        for job_ns in [20_000, 900_000, 30_000_000] {
            let many = Simulated { streams: 16, backlog: 16, ..line(SHARE, job_ns) };
            let rate = |own| {
                let Outcome { got, now, .. } = simulate_on(8, &[own], 2_000);
                got[0] as f64 / now as f64
            };
            let speedup = rate(many) / rate(Simulated { streams: 1, ..many });
            assert!(speedup > 7.5, "{job_ns} ns: {speedup}");
        }
    }

    #[test]
    fn a_flood_of_long_jobs_does_not_keep_a_short_one_waiting() {
        let (_, longest) = simulate(&[(SHARE, 10_000), (SHARE, 1_000_000)], if cfg!(miri) { 200 } else { 5_000 });
        assert!(longest <= 4_000_000, "{longest} ns");
        let (_, longest) =
            simulate(&[(SHARE, 10_000), (SHARE, 1_000_000), (SHARE, 1_000_000)], if cfg!(miri) { 200 } else { 5_000 });
        assert!(longest <= 6_000_000, "{longest} ns");
    }

    #[test]
    #[cfg_attr(miri, ignore = "needs many jobs to settle")]
    fn device_time_is_shared_by_weight_whatever_the_jobs_take() {
        for (short, long) in [(50_000, 50_000), (20_000, 400_000), (5_000, 900_000)] {
            let heavy = Share { weight: 3, ..SHARE };
            let (got, _) = simulate(&[(SHARE, 1_000), (heavy, short), (SHARE, long)], 100_000);
            let ratio = got[1] as f64 / got[2] as f64;
            assert!((2.6..3.4).contains(&ratio), "{short} and {long} ns: {ratio}");
        }
    }

    #[test]
    fn alone_one_sends_as_much_as_it_may() {
        let mut fair: Fair<u32> = Fair::new();
        let line = fair.open(Share { running_max: 100, waiting_max: 150, ..SHARE });
        (0..150).for_each(|n| fair.submit(line, n, u64::from(n) * 1_000_000_000).unwrap());
        assert_eq!(fair.submit(line, 150, 0), Err((Full(150), 150)));
        let sent: Vec<u32> = std::iter::from_fn(|| fair.next(u64::MAX, |_| false).map(|turn| turn.job)).collect();
        assert_eq!(sent, (0..100).collect::<Vec<_>>());
        fair.done(line, FIRST_ESTIMATE_NS, 10_000_000_000);
        assert_eq!(fair.next(u64::MAX, |_| false).map(|turn| turn.job), Some(100), "a debt to nobody");
    }

    #[test]
    fn a_full_line_of_nobodys_holds_up_nobody() {
        let mut fair: Fair<u32> = Fair::new();
        let lane = fair.open(Share { weight: 0, running_max: 1, waiting_max: 10 });
        (0..3).for_each(|n| fair.submit(lane, n, 0).unwrap());
        let next = |fair: &mut Fair<u32>, now| fair.next(now, |_| false).map(|turn| (turn.line, turn.job));
        assert_eq!(next(&mut fair, 0), Some((lane, 0)));
        let others = [fair.open(SHARE), fair.open(SHARE)];
        let mut done = [0; 2];
        for now in 0..2_000_u64 {
            let at = (now % 2) as usize;
            fair.submit(others[at], 9, now).unwrap();
            while let Some(Turn { line, estimate_ns, .. }) = fair.next(now, |_| false) {
                assert_ne!(line, lane, "one at a time");
                fair.done(line, estimate_ns, 50_000);
                done[usize::from(line == others[1])] += 1;
            }
        }
        assert!(done.iter().sum::<u32>() > 1_990, "{done:?}");
        fair.done(lane, 0, 1);
        assert_eq!(next(&mut fair, 3_000), Some((lane, 1)));
    }

    #[test]
    fn lines_come_and_go() {
        let mut fair: Fair<u32> = Fair::new();
        for n in 0..1000 {
            let line = fair.open(SHARE);
            fair.submit(line, n, u64::from(n) * 1_000_000_000).unwrap();
            let turn = fair.next(u64::MAX, |_| true).unwrap();
            assert_eq!((turn.line, turn.job), (line, n));
            fair.done(line, turn.estimate_ns, 5);
            assert_eq!(fair.next(u64::MAX, |_| true), None);
            fair.close(line);
        }
        assert_eq!((fair.lines.len(), fair.turns.len(), fair.active, fair.running_ns), (0, 0, 0, 0));
    }
}
