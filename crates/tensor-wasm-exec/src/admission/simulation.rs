//! A seeded simulation of admission in virtual time: seconds of traffic in milliseconds, the same every time. It drives
//! the very state machine the server uses.
//!
//! The claim under test: one tenant flooding does not move another tenant's 99th percentile by more than 2×.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::queue::{Decision, Queue};
use crate::config::Limits;

const SERVICE_US: std::ops::Range<u64> = 500..1_500;
const PLACES: usize = 16;
/// Calls of the quiet tenant per run.
const CALLS: usize = 2_000;

#[derive(PartialEq, Eq, PartialOrd, Ord, Clone, Copy, Debug)]
enum Event {
    Departure { tenant: usize },
    Arrival { tenant: usize },
}

/// Latency (wait + service) of the quiet tenant's calls, and how many of the flood's were refused.
struct Run {
    quiet_us: Vec<u64>,
    flood_refused: usize,
}

fn simulate(seed: u64, flood_every_us: Option<u64>) -> Run {
    let names = ["quiet", "flood"];
    let mut rng = StdRng::seed_from_u64(seed);
    let limits = Limits { concurrency_max: PLACES * 3 / 4, queue_max: 1000, ..Limits::default() };
    let mut queue: Queue<(usize, u64)> = Queue::new(PLACES, 10_000, Box::new(move |_| limits.clone()));
    let mut events = BinaryHeap::new();
    events.push(Reverse((0, Event::Arrival { tenant: 0 })));
    if flood_every_us.is_some() {
        events.push(Reverse((0, Event::Arrival { tenant: 1 })));
    }
    let mut run = Run { quiet_us: Vec::new(), flood_refused: 0 };
    let mut arrived: HashMap<u64, u64> = HashMap::new();
    let mut call = 0;
    while let Some(Reverse((now, event))) = events.pop() {
        let starts = match event {
            Event::Arrival { tenant } => {
                let gap = match tenant {
                    0 => rng.random_range(1_000..3_000),
                    _ => flood_every_us.unwrap_or(u64::MAX),
                };
                if run.quiet_us.len() < CALLS {
                    events.push(Reverse((now + gap, Event::Arrival { tenant })));
                }
                call += 1;
                arrived.insert(call, now);
                match queue.arrive(names[tenant], Duration::from_micros(now), || (tenant, call)) {
                    Decision::Admitted(_) => Some((tenant, call)),
                    Decision::Waiting(..) => None,
                    Decision::Rejected(_) => {
                        assert_eq!(tenant, 1, "the quiet tenant is never refused");
                        run.flood_refused += 1;
                        None
                    }
                }
            }
            Event::Departure { tenant } => {
                let account = queue.account(names[tenant], Duration::from_micros(now));
                queue.depart(account.slot).map(|granted| granted.waiter)
            }
        };
        if let Some((tenant, call)) = starts {
            let done = now + rng.random_range(SERVICE_US);
            events.push(Reverse((done, Event::Departure { tenant })));
            if tenant == 0 {
                run.quiet_us.push(done - arrived[&call]);
            }
        }
    }
    assert_eq!(queue.depth(), super::Depth::default(), "every place came back");
    run
}

fn p99(mut samples: Vec<u64>) -> u64 {
    samples.sort_unstable();
    samples[samples.len() * 99 / 100]
}

#[test]
fn a_flood_does_not_move_the_neighbours_p99_beyond_2x() {
    for seed in 0..10 {
        let alone = p99(simulate(seed, None).quiet_us);
        // Six times what the server can do.
        let flooded = simulate(seed, Some(10));
        assert!(flooded.flood_refused > 10_000, "it was a flood");
        let beside = p99(flooded.quiet_us);
        assert!(beside <= alone * 2, "seed {seed}: p99 {alone} µs alone, {beside} µs beside the flood");
    }
}
