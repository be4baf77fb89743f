//! The delivery checker: many senders, actors that are paused, resumed, terminated and activated at random, senders
//! that go away in the middle. Of every message it must be known what became of it: each that was accepted is answered
//! or comes back exactly once, in its sender's order, with what was sent in it.

use std::sync::atomic::AtomicUsize;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tensor_wasm_ring::{Actor, Port};

use super::*;

const SENDERS: u64 = 4;
const ACTORS: u32 = 6;

/// How many a sender has unanswered before it looks for answers.
const WINDOW: u64 = 512;

/// One life of a sender: what it still expects of each actor.
struct Sender {
    port: Arc<Port>,
    actors: Vec<Actor>,
    /// For each actor, the ids of what was accepted and not answered.
    expected: Vec<std::collections::VecDeque<(u64, u64)>>,
    outstanding: u64,
    answered: u64,
    returned: u64,
}

impl Sender {
    fn new(setup: &Setup, executor: &Executor) -> Sender {
        let port = Arc::new(setup.runtime.port().unwrap());
        let actors: Vec<Actor> = (0..ACTORS).map(|n| executor.actor(n).unwrap().by(&port)).collect();
        let expected = actors.iter().map(|_| std::collections::VecDeque::new()).collect();
        Sender { port, actors, expected, outstanding: 0, answered: 0, returned: 0 }
    }

    fn send(&mut self, to: usize, number: u64) -> bool {
        match self.actors[to].try_send(&Numbered::new(number)) {
            Ok(id) => {
                self.expected[to].push_back((id, number));
                self.outstanding += 1;
                true
            }
            Err(ActorError::Full { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }

    fn check(&mut self, message: &Message) {
        let fault = message.fault();
        let of = fault.map_or(message.sender().0, |fault| fault.to);
        let to = self.actors.iter().position(|actor| actor.address().0 == of).unwrap();
        // One for which there is no room while its actor is paused goes back at once, past those that wait.
        let is_crowded = fault.is_some_and(|fault| fault.reason() == Some(Reason::Full));
        let expected = &mut self.expected[to];
        let at = if is_crowded { expected.iter().position(|(id, _)| *id == message.about) } else { Some(0) };
        let (id, number) = at.and_then(|at| expected.remove(at)).expect("nothing was sent that this answers");
        assert_eq!(message.about, id, "lost, duplicated or reordered");
        match fault {
            None => {
                assert_eq!(message.read(), Some(Numbered::new(number)), "damaged");
                self.answered += 1;
            }
            Some(fault) => {
                assert!(matches!(fault.reason(), Some(Reason::Terminated | Reason::Full)), "{fault:?}");
                self.returned += 1;
            }
        }
        self.outstanding -= 1;
    }

    fn take(&mut self, messages: &mut Vec<Message>) -> bool {
        messages.clear();
        self.port.receive_all(messages);
        messages.iter().for_each(|message| self.check(message));
        !messages.is_empty()
    }
}

/// A sender that ends, however it does.
struct Leaves<'l>(&'l AtomicUsize);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

pub(super) fn checked(setup: &Setup) {
    let wanted = std::env::var("TENSOR_WASM_TEST_MESSAGES").ok().and_then(|n| n.parse().ok()).unwrap_or(2_000_000_u64);
    let runtime = setup.another();
    let own = Setup { choice: setup.choice, placement: setup.placement.clone(), runtime };
    let executor = own.launch(ECHO, &ExecutorOptions { mailbox_slots: 256, reply_slots: 256, ..options(3, ACTORS) });
    let (senders_left, abandoned) = (AtomicUsize::new(SENDERS as usize), AtomicU64::new(0));
    let totals: Vec<(u64, u64, u64)> = std::thread::scope(|scope| {
        let (own, executor, senders_left, abandoned) = (&own, &executor, &senders_left, &abandoned);
        // Somebody who changes the actors' states all the time.
        scope.spawn(move || {
            let mut rng = StdRng::seed_from_u64(11);
            let port = Arc::new(own.runtime.port().unwrap());
            let actors: Vec<Actor> = (0..ACTORS).map(|n| executor.actor(n).unwrap().by(&port)).collect();
            while senders_left.load(Ordering::Acquire) > 0 {
                let actor = &actors[rng.random_range(0..actors.len())];
                if rng.random_range(0..4) > 0 {
                    actor.pause().unwrap();
                    std::thread::park_timeout(Duration::from_micros(rng.random_range(0..300)));
                    actor.resume().unwrap();
                } else {
                    actor.terminate().unwrap();
                    actor.activate().unwrap();
                }
                std::thread::park_timeout(Duration::from_micros(rng.random_range(0..2_000)));
            }
        });
        let threads: Vec<_> = (0..SENDERS)
            .map(|seed| {
                scope.spawn(move || {
                    let _leaves = Leaves(senders_left);
                    let mut rng = StdRng::seed_from_u64(seed);
                    let mut messages = Vec::new();
                    let (mut sent, mut answered, mut returned) = (0, 0, 0);
                    let mut sender = Sender::new(own, executor);
                    while sent < wanted / SENDERS {
                        let mut burst = 0;
                        while burst < 64 && sender.send(rng.random_range(0..ACTORS as usize), seed << 56 | sent) {
                            burst += 1;
                            sent += 1;
                        }
                        while sender.outstanding > WINDOW || burst == 0 && sender.outstanding > 0 {
                            burst = 1;
                            if !sender.take(&mut messages) {
                                std::thread::yield_now();
                            }
                        }
                        // It dies, and another takes its place.
                        if rng.random_range(0..2_000) == 0 {
                            answered += sender.answered;
                            returned += sender.returned;
                            abandoned.fetch_add(sender.outstanding, Ordering::Relaxed);
                            sender = Sender::new(own, executor);
                        }
                    }
                    let until = Instant::now() + LONG;
                    while sender.outstanding > 0 {
                        assert!(Instant::now() < until, "{} are lost", sender.outstanding);
                        if !sender.take(&mut messages) {
                            std::thread::yield_now();
                        }
                    }
                    (sent, answered + sender.answered, returned + sender.returned)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    executor.drain(LONG).unwrap();
    assert!((0..ACTORS).all(|n| executor.actor(n).unwrap().ping().is_ok()));
    drop(own.runtime.dead_letters());
    let sum = |part: fn(&(u64, u64, u64)) -> u64| totals.iter().map(part).sum::<u64>();
    let (sent, answered, returned) = (sum(|t| t.0), sum(|t| t.1), sum(|t| t.2));
    let abandoned = abandoned.load(Ordering::Relaxed);
    assert_eq!(sent, answered + returned + abandoned, "each exactly once");
    // What came for those who had died is counted: as unclaimed if it was an answer, as a dead letter if it came back.
    let dead = own.runtime.dead_letters_total() - returned;
    assert_eq!(own.runtime.unclaimed_total() + dead, abandoned);
    println!("    {sent} sent, {answered} answered, {returned} came back, {abandoned} of senders that had died");
}
