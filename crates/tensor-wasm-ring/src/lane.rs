//! A lane: takes the messages of its actors one after the other, has their behaviour handle them, and sends what comes
//! of it. What a lane does is said here once, for lanes that are threads; a lane of a GPU does the same.
//!
//! All that leaves a lane goes through [`Outgoing`], in the order in which it was sent. A lane whose ring of replies is
//! full takes no further message until the host has taken replies; it beats and listens meanwhile. Lanes send each
//! other messages through rings in ordinary memory, and each takes what others send it even while it waits for them, so
//! no two wait for each other.
//!
//! Invariant: of every message that it takes, a lane says what became of it: it is handled, it is held for an actor
//! that is paused, or it goes back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensor_wasm_gpu::{Bell, SharedWords};
use zerocopy::{FromZeros, IntoBytes};

use crate::behaviour::{Call, Failure, Handler, HandlerDeadline, Outbox};
use crate::clock::{self, HybridClock};
use crate::layout::{Address, Handshake, PAYLOAD_BYTES_MAX, TelemetryBlock};
use crate::message::{
    ActorFault, ActorState, CONTROL, Control, FAULT, Message, REFERENCE, REPLY, Reason, TrapKind, URGENT,
};
use crate::ring::{Chunks, Receiver, Refusal, Sender, Senders, Slots, Standing, ordinary_words};
use crate::span::{self, Span, Telemetry};
use crate::sync::{AtomicU64, Ordering, OwnLine};
use crate::wait::{BEAT_PERIOD, LANE_SPIN, Spin, TORN_MAX};

/// Messages that a lane takes before it tells senders how far it is: the word's line goes to their core and back.
const BATCH: usize = 32;

/// Slots of the ring through which the other lanes send a lane messages.
const PEER_SLOTS: usize = 1024;

/// Messages between actors that a lane has waiting, for its own and for others: 6 MiB. One more goes back.
const WAITING_MAX: usize = 1 << 16;

/// The port that is told of what went wrong with messages that no port sent.
pub(crate) const DEAD_LETTERS: Address = Address(u32::MAX << 24);

/// What a handler may say of a message that it sends.
const HANDLER_FLAGS: u8 = REFERENCE | URGENT;

/// How lanes of one executor send each other messages.
pub(crate) struct Peer {
    words: Arc<[AtomicU64]>,
    senders: Senders<Arc<[AtomicU64]>>,
    taken: OwnLine<AtomicU64>,
    control: span::Control,
}

impl Peer {
    /// One for each lane of a span.
    pub(crate) fn all(span: &Span) -> Result<Vec<Peer>, String> {
        let slots = if span.shape.lanes == 1 { 1 } else { PEER_SLOTS };
        let peer = |lane| {
            let words: Arc<[AtomicU64]> = Arc::from(ordinary_words(slots));
            let senders = Senders::new(Slots::new(words.clone())?);
            Some(Peer { words, senders, taken: OwnLine(AtomicU64::new(0)), control: span.control(lane)? })
        };
        (0..span.shape.lanes).map(peer).collect::<Option<_>>().ok_or_else(no_room)
    }

    /// Has the lane look around.
    pub(crate) fn ring(&self) {
        self.control.bell().ring();
    }

    pub(crate) fn beats(&self) -> u64 {
        self.control.beats().load(Ordering::Relaxed)
    }
}

fn no_room() -> String {
    "the span is smaller than its parts".to_owned()
}

fn chunks(message: &Message) -> Chunks<8> {
    zerocopy::transmute!(*message)
}

fn message(chunks: Chunks<8>) -> Message {
    zerocopy::transmute!(chunks)
}

/// An actor as its lane has it.
struct LaneActor {
    state: ActorState,
    /// Words, so that whatever a handler keeps there is aligned.
    memory: Vec<u64>,
    /// Messages that came while it was paused.
    held: VecDeque<Message>,
    /// What its telemetry block shows.
    told: TelemetryBlock,
    block: Telemetry,
    /// Counts what it sends.
    sequence: u32,
}

/// What a lane has sent and others have no room for yet.
struct Outgoing {
    replies: Sender<SharedWords>,
    control: span::Control,
    to_host: VecDeque<Message>,
    to_peers: VecDeque<Message>,
    /// For actors of this lane.
    own: VecDeque<Message>,
    has_told_host: bool,
}

pub(crate) struct Lane<'e> {
    span: Span,
    /// What the host parks on.
    host_bell: &'e SharedWords,
    lane: u32,
    handler: Handler,
    peers: &'e [Peer],
    mailbox: Receiver<SharedWords>,
    from_peers: Receiver<Arc<[AtomicU64]>>,
    control: span::Control,
    actors: Vec<LaneActor>,
    out: Outgoing,
    /// What actors were sent while they were paused that go on, or have ended: before anything else.
    resumed: VecDeque<Message>,
    outbox: Outbox,
    clock: HybridClock,
    /// The same moment, on the clock that only goes on and on the wall's.
    anchor: (Instant, Duration),
    now: Instant,
    /// Since when the next slot of the mailbox has been begun and not finished.
    torn_since: Option<Instant>,
}

impl<'e> Lane<'e> {
    pub(crate) fn new(
        span: &Span,
        lane: u32,
        handler: Handler,
        peers: &'e [Peer],
        host_bell: &'e SharedWords,
    ) -> Result<Lane<'e>, String> {
        let shape = span.shape;
        let state_words = (shape.state_bytes as usize).div_ceil(8);
        let actor = |index| {
            Some(LaneActor {
                state: ActorState::Absent,
                memory: vec![0; state_words],
                held: VecDeque::new(),
                told: TelemetryBlock::new_zeroed(),
                block: span.telemetry(index)?,
                sequence: 0,
            })
        };
        let build = || {
            let control = span.control(lane)?;
            let now = Instant::now();
            Some(Lane {
                span: span.clone(),
                host_bell,
                lane,
                handler,
                peers,
                mailbox: Receiver::new(span.mailbox(lane)?),
                from_peers: Receiver::new(Slots::new(peers.get(lane as usize)?.words.clone())?),
                control: control.clone(),
                actors: (lane..shape.actors).step_by(shape.lanes as usize).map(actor).collect::<Option<_>>()?,
                out: Outgoing {
                    replies: Sender::new(span.replies(lane)?),
                    control,
                    to_host: VecDeque::new(),
                    to_peers: VecDeque::new(),
                    own: VecDeque::new(),
                    has_told_host: true,
                },
                resumed: VecDeque::new(),
                outbox: Outbox::new(),
                clock: HybridClock::default(),
                anchor: (now, clock::wall()),
                now,
                torn_since: None,
            })
        };
        build().ok_or_else(no_room)
    }

    /// Works until told to stop.
    pub(crate) fn run(&mut self, is_stopped: &dyn Fn() -> bool) {
        let mut spin = Spin::new(LANE_SPIN);
        while !is_stopped() {
            let beats = self.control.beats();
            beats.store(beats.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
            if self.turn() {
                spin.reset();
            } else if !spin.pause() {
                // It spins again once there was something to do.
                self.park(is_stopped);
            }
        }
    }

    fn park(&mut self, is_stopped: &dyn Fn() -> bool) {
        self.look_for_torn();
        self.control.asleep().store(1, Ordering::Relaxed);
        let is_ready = || {
            let is_news = self.mailbox.is_ready() || self.from_peers.is_ready() || is_stopped();
            is_news || self.out.is_waiting_for_host() && self.out.has_host_room()
        };
        // Who waits for others to take something is not rung when they do, and looks often.
        let is_waiting = self.out.is_waiting() || self.mailbox.standing() == Standing::Torn;
        let limit = if is_waiting { LANE_SPIN } else { BEAT_PERIOD };
        self.control.bell().park_unless(is_ready, Some(limit));
        self.control.asleep().store(0, Ordering::Relaxed);
        // Clocks drift apart, and the wall's is set.
        self.now = Instant::now();
        self.anchor = (self.now, clock::wall());
    }

    /// Takes some messages. False if there was nothing to do.
    pub(crate) fn turn(&mut self) -> bool {
        let mut is_busy = self.out.flush(self.span.shape.lanes, self.peers);
        // What other lanes sent is taken in any case, so that they need not wait for the host.
        let mut taken = 0;
        while taken < BATCH
            && self.out.to_host.len() < WAITING_MAX
            && let Some(chunks) = self.from_peers.receive()
        {
            taken += 1;
            self.keep_own(message(chunks));
        }
        if taken > 0 {
            self.from_peers.release(&self.peers[self.lane as usize].taken.0);
            is_busy = true;
        }
        if !self.out.is_waiting_for_host() {
            let has_own = !self.resumed.is_empty() || !self.out.own.is_empty();
            self.now = if is_busy || has_own { Instant::now() } else { self.now };
            let has_resumed = !self.resumed.is_empty();
            for _ in 0..BATCH {
                let Some(message) = self.resumed.pop_front().or_else(|| self.out.own.pop_front()) else { break };
                is_busy = true;
                self.take(message);
            }
            if has_resumed && self.resumed.is_empty() {
                self.mailbox.release(self.control.mailbox_taken());
            }
            is_busy |= self.take_mail();
        }
        if is_busy {
            self.out.tell_host(self.host_bell);
        }
        is_busy
    }

    fn take_mail(&mut self) -> bool {
        let mut taken = 0;
        // One that waits for a peer goes on with what peers sent it, and with nothing new.
        while taken < BATCH && !self.out.is_waiting() && self.resumed.is_empty() {
            let Some(chunks) = self.mailbox.receive() else { break };
            if taken == 0 {
                self.now = Instant::now();
            }
            taken += 1;
            self.take(message(chunks));
        }
        if taken > 0 {
            // What was held is not handled before it is.
            if self.resumed.is_empty() {
                self.mailbox.release(self.control.mailbox_taken());
            }
            if self.torn_since.take().is_some() {
                self.control.torn().store(0, Ordering::Release);
            }
        }
        taken > 0
    }

    /// A slot that is begun and never finished holds up everything behind it. Nobody may step over it, because whoever
    /// began it may yet write to it; whoever asks why nothing goes on is told.
    fn look_for_torn(&mut self) {
        if self.mailbox.standing() != Standing::Torn {
            self.torn_since = None;
        } else if self.torn_since.get_or_insert_with(Instant::now).elapsed() > TORN_MAX {
            self.control.torn().store(self.mailbox.received() + 1, Ordering::Release);
        }
    }

    fn wall(&self) -> Duration {
        self.anchor.1 + self.now.saturating_duration_since(self.anchor.0)
    }

    /// Which of this lane's actors has an address; none if it is another's.
    fn own_index(&self, to: Address) -> Option<usize> {
        let shape = &self.span.shape;
        let index = to.index();
        let is_own = to.executor() == shape.executor && index < shape.actors && index % shape.lanes == self.lane;
        is_own.then_some((index / shape.lanes) as usize)
    }

    fn take(&mut self, message: Message) {
        // A handler may take almost as long as a lane may be silent.
        let beats = self.control.beats();
        beats.store(beats.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        if message.payload().is_none() {
            return self.give_back(&message, Reason::Malformed, None);
        }
        let Some(own) = self.own_index(Address(message.to)) else {
            return self.give_back(&message, Reason::Foreign, None);
        };
        let wall = self.wall();
        self.clock.observe(message.clock, wall);
        if message.has(CONTROL) {
            return self.obey(own, &message);
        }
        let actor = &mut self.actors[own];
        match actor.state {
            ActorState::Active => self.handle(own, &message),
            ActorState::Paused if actor.held.len() < self.span.shape.held_max as usize => {
                actor.held.push_back(message);
                actor.told.queue_depth_max = actor.told.queue_depth_max.max(actor.held.len() as u64);
                actor.tell();
            }
            ActorState::Paused => self.give_back(&message, Reason::Full, None),
            ActorState::Absent => self.give_back(&message, Reason::Absent, None),
            ActorState::Terminated => self.give_back(&message, Reason::Terminated, None),
            ActorState::Faulted => self.give_back(&message, Reason::Faulted, None),
        }
    }

    fn handle(&mut self, own: usize, message: &Message) {
        let is_late = !message.has(REPLY) && message.about != 0;
        if is_late && u128::from(message.about) < self.wall().as_nanos() {
            return self.give_back(message, Reason::Expired, None);
        }
        let began = self.now;
        let limit = Duration::from_nanos(self.span.shape.handler_ns);
        let actor = &mut self.actors[own];
        self.outbox.count = 0;
        let mut call = Call {
            state: actor.memory.as_mut_bytes(),
            message,
            outbox: &mut self.outbox,
            deadline: HandlerDeadline { began, limit },
        };
        // A panic is a bug of ours in a native handler: that actor is faulted, and its lane goes on.
        let run = std::panic::AssertUnwindSafe(|| (self.handler)(&mut call));
        let handled = std::panic::catch_unwind(run).unwrap_or(Err(Failure::trap(TrapKind::Panic)));
        self.now = Instant::now();
        let took = self.now.saturating_duration_since(began);
        let handled = match handled {
            Ok(()) if took > limit => Err(Failure::trap(TrapKind::Deadline)),
            Ok(()) => self.send_all(own, message),
            failed => failed,
        };
        let clock = self.clock.tick(self.wall());
        let actor = &mut self.actors[own];
        actor.told.busy_ns += u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        actor.told.clock = clock;
        match handled {
            Ok(()) => actor.told.handled += 1,
            Err(Failure::Refused) => {}
            Err(Failure::Trap { .. }) => {
                actor.state = ActorState::Faulted;
                actor.told.faults += 1;
            }
        }
        actor.tell();
        match handled {
            Ok(()) => {}
            Err(Failure::Refused) => self.give_back(message, Reason::Refused, None),
            Err(trap) => self.give_back(message, Reason::Trapped, Some(trap)),
        }
    }

    /// Sends what a handler has put into its outbox, all of it or nothing.
    fn send_all(&mut self, own: usize, handled: &Message) -> Result<(), Failure> {
        let Some(sent) = self.outbox.sent() else { return Err(Failure::trap(TrapKind::BadOutbox)) };
        if sent.iter().any(|message| usize::from(message.length) > PAYLOAD_BYTES_MAX) {
            return Err(Failure::trap(TrapKind::BadOutbox));
        }
        for at in 0..sent.len() {
            let mut message = self.outbox.messages[at];
            message.flags &= HANDLER_FLAGS;
            message.about = 0;
            if message.to == 0 {
                // A reply is not answered: two that answer everything would never stop.
                if handled.has(REPLY) {
                    continue;
                }
                (message.to, message.about) = (handled.sender().0, handled.id);
                message.flags |= REPLY;
            }
            self.send(own, message);
        }
        Ok(())
    }

    /// Sends a message of an actor.
    fn send(&mut self, own: usize, mut message: Message) {
        let wall = self.wall();
        message.clock = self.clock.tick(wall);
        let actor = &mut self.actors[own];
        actor.sequence = actor.sequence.wrapping_add(1);
        actor.told.sent += 1;
        let shape = &self.span.shape;
        let index = u32::try_from(own).unwrap_or(0) * shape.lanes + self.lane;
        message.id = u64::from(Address::actor(shape.executor, index).0) << 32 | u64::from(actor.sequence);
        let to = Address(message.to);
        if to.is_host() {
            self.out.post(message);
        } else if to.executor() != shape.executor || to.index() >= shape.actors {
            self.give_back(&message, Reason::Foreign, None);
        } else if self.own_index(to).is_some() {
            self.keep_own(message);
        } else if self.out.to_peers.len() >= WAITING_MAX {
            self.give_back(&message, Reason::Full, None);
        } else {
            self.out.to_peers.push_back(message);
            self.out.flush_peers(self.span.shape.lanes, self.peers);
        }
    }

    fn keep_own(&mut self, message: Message) {
        if self.out.own.len() >= WAITING_MAX {
            self.give_back(&message, Reason::Full, None);
        } else {
            self.out.own.push_back(message);
        }
    }

    /// Returns a message to the port that sent it, or tells the port for dead letters what became of it.
    fn give_back(&mut self, message: &Message, reason: Reason, trap: Option<Failure>) {
        let (kind, site, offset) = match trap {
            Some(Failure::Trap { kind, site, offset }) => (kind as u32, site, offset),
            _ => (0, 0, 0),
        };
        let fault = ActorFault {
            reason: reason as u32,
            trap: kind,
            site,
            to: message.to,
            offset,
            id: message.id,
            kind: message.kind,
            flags: u16::from(message.flags),
            length: u32::from(message.length),
        };
        let is_asked = message.sender().is_host() && !message.has(REPLY | FAULT);
        let (to, flags) = if is_asked { (message.sender(), FAULT | REPLY) } else { (DEAD_LETTERS, FAULT) };
        let mut back = Message { to: to.0, kind: message.kind, flags, about: message.id, ..Message::EMPTY };
        back.id = u64::from(message.to) << 32;
        let wall = self.wall();
        back.clock = self.clock.tick(wall);
        back.set(&fault);
        self.out.post(back);
    }

    /// Does what a control message says, and acknowledges it with the state that came of it.
    fn obey(&mut self, own: usize, message: &Message) {
        let kind = Control::of(message.kind).filter(|_| message.sender().is_host() && !message.has(REPLY | FAULT));
        let Some(kind) = kind else { return self.give_back(message, Reason::Refused, None) };
        let actor = &mut self.actors[own];
        let mut reply = Message { to: message.sender().0, kind: message.kind, ..Message::EMPTY };
        let left = match (kind, actor.state) {
            (Control::Activate, ActorState::Absent | ActorState::Terminated) => {
                actor.begin_anew();
                VecDeque::new()
            }
            (Control::Restart, ActorState::Faulted) => {
                actor.begin_anew();
                actor.told.restarts += 1;
                VecDeque::new()
            }
            (Control::Pause, ActorState::Active) => {
                actor.state = ActorState::Paused;
                VecDeque::new()
            }
            (Control::Resume, ActorState::Paused) => {
                actor.state = ActorState::Active;
                std::mem::take(&mut actor.held)
            }
            (Control::Terminate, _) => {
                actor.state = ActorState::Terminated;
                std::mem::take(&mut actor.held)
            }
            // Done already, or not possible now: the state says which.
            _ => VecDeque::new(),
        };
        actor.tell();
        match kind {
            Control::Handshake => reply.set(&Handshake::OWN),
            _ => reply.set(&(actor.state as u32)),
        }
        reply.flags = REPLY | CONTROL;
        reply.about = message.id;
        reply.id = u64::from(message.to) << 32;
        let wall = self.wall();
        reply.clock = self.clock.tick(wall);
        self.out.post(reply);
        // By the state that it has now: handled after a pause, given back after the end. One after the other, like
        // all else: each beats, and needs room for what comes of it.
        self.resumed.extend(left);
    }
}

impl LaneActor {
    fn begin_anew(&mut self) {
        self.memory.fill(0);
        self.state = ActorState::Active;
    }

    fn tell(&mut self) {
        self.told.state = self.state as u32;
        self.block.store(&self.told);
    }
}

impl Outgoing {
    /// Sends a message to the host, now or when there is room.
    fn post(&mut self, message: Message) {
        self.has_told_host = false;
        if !self.to_host.is_empty() || self.reply(&message).is_err() {
            self.to_host.push_back(message);
        }
    }

    fn reply(&mut self, message: &Message) -> Result<(), Refusal> {
        self.replies.send(&chunks(message), self.control.replies_taken())
    }

    fn is_waiting_for_host(&self) -> bool {
        !self.to_host.is_empty()
    }

    fn has_host_room(&self) -> bool {
        self.replies.has_room(self.control.replies_taken())
    }

    fn is_waiting(&self) -> bool {
        !self.to_host.is_empty() || !self.to_peers.is_empty()
    }

    /// Sends what waits. Returns whether anything went.
    fn flush(&mut self, lanes: u32, peers: &[Peer]) -> bool {
        let before = self.to_host.len() + self.to_peers.len();
        while let Some(message) = self.to_host.front().copied() {
            if self.reply(&message).is_err() {
                break;
            }
            self.has_told_host = false;
            self.to_host.pop_front();
        }
        self.flush_peers(lanes, peers);
        before != self.to_host.len() + self.to_peers.len()
    }

    fn flush_peers(&mut self, lanes: u32, peers: &[Peer]) {
        while let Some(message) = self.to_peers.front() {
            // Checked when it was sent.
            let Some(peer) = peers.get((Address(message.to).index() % lanes) as usize) else { break };
            if peer.senders.send(&chunks(message), &peer.taken.0).is_err() {
                break;
            }
            self.to_peers.pop_front();
            peer.ring();
        }
    }

    /// Wakes the host if it has parked; once for all that was sent.
    fn tell_host(&mut self, host_bell: &SharedWords) {
        if !self.has_told_host {
            self.has_told_host = true;
            self.control.replies_written().store(self.replies.sent(), Ordering::Release);
            Bell::of(&host_bell[0]).ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};
    use tensor_wasm_gpu::{Device, DeviceChoice, OpenOptions, SlabPlan};

    use super::*;
    use crate::builtin::Builtin;
    use crate::builtin::counter;
    use crate::layout::{SPANS_AT, Shape};

    const SHAPE: Shape = Shape {
        executor: 3,
        lanes: 1,
        actors: 4,
        state_bytes: 8,
        mailbox_slots: 8,
        reply_slots: 4,
        held_max: 8,
        handler_ns: 1_000_000_000,
    };

    /// Memory of a lane, and the host's ends of its rings.
    struct Host {
        span: Span,
        bell: SharedWords,
        mailbox: Senders<SharedWords>,
        replies: Receiver<SharedWords>,
        control: span::Control,
        sequence: u64,
    }

    impl Host {
        fn new() -> Host {
            let regions = vec![("lane-test".to_owned(), 2 << 20)];
            let memory = SlabPlan { staging_bytes: 2 << 20, pinned_bytes: 0, regions };
            let options = OpenOptions { choice: DeviceChoice::Cpu, memory, ..OpenOptions::default() };
            let region = Device::open(&options).unwrap().region("lane-test").unwrap();
            let words = region.words(SPANS_AT, usize::try_from(SHAPE.span_bytes() / 8).unwrap()).unwrap();
            let span = Span::create(words.clone(), SHAPE).unwrap();
            assert_eq!(Span::open(words).unwrap().shape, SHAPE);
            Host {
                bell: region.words(0, 1).unwrap(),
                mailbox: Senders::new(span.mailbox(0).unwrap()),
                replies: Receiver::new(span.replies(0).unwrap()),
                control: span.control(0).unwrap(),
                span,
                sequence: 0,
            }
        }

        fn send(&mut self, mut message: Message) {
            self.sequence += 1;
            message.id = u64::from(Address::port(9).0) << 32 | self.sequence;
            self.mailbox.send(&chunks(&message), self.control.mailbox_taken()).unwrap();
        }

        fn replies(&mut self) -> Vec<Message> {
            let replies = std::iter::from_fn(|| self.replies.receive()).map(message).collect();
            self.replies.release(self.control.replies_taken());
            replies
        }

        fn with_lane(mut self, test: impl FnOnce(&mut Host, &mut Lane<'_>)) {
            let peers = Peer::all(&self.span).unwrap();
            let (bell, span) = (self.bell.clone(), self.span.clone());
            let mut lane = Lane::new(&span, 0, Builtin::Counter.handler(), &peers, &bell).unwrap();
            for index in 0..SHAPE.actors {
                self.send(control(index, Control::Activate));
                lane.turn();
                assert_eq!(self.replies()[0].payload(), Some(&[1, 0, 0, 0][..]));
            }
            test(&mut self, &mut lane);
        }
    }

    fn actor(index: u32) -> Address {
        Address::actor(SHAPE.executor, index)
    }

    fn control(index: u32, kind: Control) -> Message {
        Message { to: actor(index).0, kind: kind as u16, flags: CONTROL, ..Message::EMPTY }
    }

    #[test]
    fn what_is_no_message_goes_back_with_the_reason() {
        Host::new().with_lane(|host, lane| {
            let add = Message::to(actor(1), &counter::Add(1));
            for (bad, reason) in [
                (Message { length: 65, ..add }, Reason::Malformed),
                (Message { length: 255, ..add }, Reason::Malformed),
                (Message { to: 0, ..add }, Reason::Foreign),
                (Message { to: u32::MAX, ..add }, Reason::Foreign),
                (Message { to: actor(4).0, ..add }, Reason::Foreign),
                (Message { kind: 99, ..add }, Reason::Refused),
                (Message { length: 7, ..add }, Reason::Refused),
                (Message { kind: 99, flags: CONTROL, ..add }, Reason::Refused),
            ] {
                host.send(bad);
                lane.turn();
                let back = host.replies();
                assert_eq!(back.len(), 1);
                let fault = back[0].fault().unwrap();
                assert_eq!((fault.reason(), fault.to, back[0].to), (Some(reason), bad.to, Address::port(9).0));
            }
            host.send(add);
            lane.turn();
            assert_eq!(host.replies()[0].read(), Some(counter::Value(1)), "and nothing was added meanwhile");
        });
    }

    /// Whatever lies in its memory, a lane neither panics nor stops.
    #[test]
    fn garbage_in_shared_memory_does_not_end_a_lane() {
        Host::new().with_lane(|host, lane| {
            let mut rng = StdRng::seed_from_u64(3);
            for _ in 0..20_000 {
                let mut garbage = Message::EMPTY;
                rng.fill(garbage.as_mut_bytes());
                // Often nearly right.
                if rng.random_bool(0.8) {
                    garbage.to = actor(rng.random_range(0..5)).0;
                }
                if rng.random_bool(0.8) {
                    (garbage.length, garbage.kind) = (rng.random_range(0..66), rng.random_range(0..8));
                }
                let words = chunks(&garbage);
                host.mailbox.send(&words, host.control.mailbox_taken()).unwrap();
                lane.turn();
                if rng.random_bool(0.1) {
                    host.control.replies_taken().store(rng.random(), Ordering::Relaxed);
                    lane.turn();
                }
                host.replies();
                lane.turn();
            }
            assert_eq!(host.control.mailbox_taken().load(Ordering::Relaxed), host.mailbox.sent());
        });
    }

    #[test]
    fn a_slot_that_is_never_finished_is_said_and_a_finished_one_goes_on() {
        Host::new().with_lane(|host, lane| {
            let add = chunks(&Message::to(actor(0), &counter::Add(1)));
            let position = host.mailbox.send(&add, host.control.mailbox_taken()).unwrap();
            // The last chunk has not come yet.
            let slot = host.span.shape.mailbox_at(0) / 8 + position % 8 * 16;
            let words = host.span.words().clone();
            let last = &words[usize::try_from(slot).unwrap() + 15];
            let whole = last.swap(0, Ordering::Relaxed);
            assert!(!lane.turn());
            assert_eq!(host.control.torn().load(Ordering::Relaxed), 0, "it may yet come");
            lane.look_for_torn();
            let until = Instant::now() + 2 * TORN_MAX;
            while Instant::now() < until {
                std::thread::park_timeout(Duration::from_millis(10));
            }
            assert!(!lane.turn());
            lane.look_for_torn();
            assert_eq!(host.control.torn().load(Ordering::Relaxed), position + 1);
            last.store(whole, Ordering::Release);
            assert!(lane.turn());
            assert_eq!(host.control.torn().load(Ordering::Relaxed), 0);
        });
    }

    #[test]
    fn a_lane_without_room_for_replies_waits_and_goes_on() {
        Host::new().with_lane(|host, lane| {
            for _ in 0..8 {
                host.send(Message::to(actor(2), &counter::Add(1)));
            }
            while lane.turn() {}
            let handled = || host.control.mailbox_taken().load(Ordering::Relaxed) - u64::from(SHAPE.actors);
            assert_eq!(handled(), 5, "four replies, and one that waits");
            let mut answers: Vec<u64> = Vec::new();
            for _ in 0..4 {
                answers.extend(host.replies().iter().map(|reply| reply.read::<counter::Value>().unwrap().0));
                lane.turn();
            }
            assert_eq!(answers, (1..=8).collect::<Vec<_>>());
        });
    }

    #[test]
    fn a_header_that_was_damaged_is_no_executor() {
        let host = Host::new();
        let words = host.span.words().clone();
        for (word, value) in [(0, 0), (1, 1 << 40), (2, 7 << 32 | 7), (3, 0), (4, u64::MAX), (6, 0), (9, u64::MAX)] {
            let was = words[word].swap(value, Ordering::Relaxed);
            assert!(Span::open(words.clone()).is_err(), "{value:#x} at {word}");
            words[word].store(was, Ordering::Relaxed);
        }
        assert!(Span::open(words.clone()).is_ok() && Span::open(words.part(0, 64).unwrap()).is_err());
    }
}
