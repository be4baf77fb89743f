//! An executor as the host has it: the span with its rings, a lock for each lane's replies, and the kernel that stays.

use std::collections::HashMap;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tensor_wasm_gpu::{Grid, Resident, SharedWords, block_on};

use crate::backend::LaneMemory;
use crate::behaviour::Behaviour;
use crate::error::ActorError;
use crate::layout::{Address, HOST_BELL_AT, Handshake, Shape};
use crate::message::{ActorState, CONTROL, Control, Message};
use crate::ring::{Chunks, Receiver, Refusal, Senders};
use crate::runtime::actor::Actor;
use crate::runtime::port::Port;
use crate::runtime::room::Room;
use crate::runtime::{Inner, Lease};
use crate::span::{self, Span, Telemetry};
use crate::sync::Ordering;
use crate::wait::POLL_PERIOD;

/// An actor's restarts are counted for so long: it may fault now and then for ever, but not again and again.
pub const RESTART_WINDOW: Duration = Duration::from_secs(60);

/// Lanes have begun, and answered, within this; a GPU may have to finish other kernels first.
const START_MAX: Duration = Duration::from_secs(20);

/// How large an executor is, and what its actors may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutorOptions {
    /// Threads of a CPU, or blocks of a GPU, that its actors share: actor n belongs to lane n modulo the lanes.
    pub lanes: u32,
    pub actors: u32,
    /// State of each actor; 0 for as much as its behaviour needs at least.
    pub state_bytes: u32,
    /// Slots of each lane's mailbox and of its replies, powers of two. An actor may have as many calls outstanding, and
    /// as many messages waiting while it is paused, as its lane's mailbox has slots.
    pub mailbox_slots: u32,
    pub reply_slots: u32,
    /// A handler that takes longer faults its actor.
    pub handler_max: Duration,
    /// How often an actor that has faulted is restarted, with fresh state, within [`RESTART_WINDOW`].
    pub restarts_max: u32,
}

impl Default for ExecutorOptions {
    fn default() -> ExecutorOptions {
        ExecutorOptions {
            lanes: 1,
            actors: 1,
            state_bytes: 0,
            mailbox_slots: 1024,
            reply_slots: 4096,
            handler_max: Duration::from_millis(100),
            restarts_max: 0,
        }
    }
}

/// Actors of one behaviour. Dropping it ends them; what they had not handled is lost, which [`Executor::drain`] avoids.
pub struct Executor {
    shared: Arc<ExecutorShared>,
    inner: Arc<Inner>,
    /// Whom its actors are sent messages by, if nobody says otherwise.
    port: Arc<Port>,
}

/// A lane from here.
pub(super) struct LaneLink {
    senders: Senders<SharedWords>,
    pub control: span::Control,
    pub replies: Mutex<Receiver<SharedWords>>,
}

pub(crate) struct ExecutorShared {
    pub name: String,
    span: Span,
    pub(super) lanes: Vec<LaneLink>,
    /// Whether lanes park and are rung for.
    pub rings: bool,
    /// Calls that each actor has not answered.
    outstanding: Vec<AtomicU32>,
    /// The kernel, and what it has of the device's memory.
    resident: Mutex<Option<(Resident, LaneMemory)>>,
    gone: OnceLock<ActorError>,
    restarts_max: u32,
    /// Since when an actor's restarts are counted, and how many there were.
    restarts: Mutex<HashMap<u32, (Instant, u32)>>,
    room: Room,
    worker: u32,
}

/// A call that an actor has not answered. Dropping it lets the next one be made.
pub(crate) struct Credit {
    executor: Arc<ExecutorShared>,
    index: u32,
}

impl Drop for Credit {
    fn drop(&mut self) {
        self.executor.outstanding[self.index as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

impl Executor {
    pub(super) fn launch(
        inner: &Arc<Inner>,
        port: &Arc<Port>,
        name: &str,
        behaviour: Behaviour,
        options: &ExecutorOptions,
    ) -> Result<Executor, ActorError> {
        let image = (inner.lanes)(inner.device.kind(), behaviour)?;
        let shape = shape(inner.take_number()?, behaviour, image.state_bytes_min, options)?;
        let module = block_on(inner.tenant.load(&image.image))?;
        let kernel = block_on(inner.tenant.kernel(&module, &image.kernel))?;
        let (shared, span_address, bell_address) = {
            let mut lease = inner.lease.lock();
            if lease.worker != inner.device.restarts() {
                *lease = Lease::of(&inner.device)?;
            }
            let room = lease.rooms.take(shape.span_bytes())?;
            let words = usize::try_from(room.bytes / 8).ok().and_then(|count| lease.region.words(room.offset, count));
            let made = words.and_then(|words| Span::create(words, shape)).and_then(|span| {
                ExecutorShared::new(name, span, image.rings, options.restarts_max, room, lease.worker)
            });
            let Some(shared) = made else {
                lease.rooms.give_back(room);
                return Err(ActorError::NoRoom { bytes: room.bytes, of: lease.region.len() });
            };
            let address = lease.region.device_address();
            (Arc::new(shared), address + room.offset, address + HOST_BELL_AT)
        };
        // From here on, dropping it gives back what it has.
        let executor = Executor { shared: shared.clone(), inner: inner.clone(), port: port.clone() };
        let grid = Grid { blocks: [shape.lanes, 1, 1], threads: [image.threads, 1, 1], shared_bytes: 0 };
        let memory = LaneMemory::new(&inner.tenant, &image, &shape)?;
        let params = memory.params(&shape, [span_address, shared.room.bytes, bell_address]);
        let resident = inner.tenant.resident(&kernel, grid, &params)?;
        *shared.resident.lock() = Some((resident, memory));
        inner.executors.write().push(shared);
        inner.wake_thread();
        executor.shake_hands()?;
        executor.activate_all()?;
        Ok(executor)
    }

    /// Asks every lane how it takes memory to be laid out.
    fn shake_hands(&self) -> Result<(), ActorError> {
        for lane in 0..self.shared.shape().lanes {
            // Actor n of the first so many belongs to lane n.
            let answer = self.actor(lane)?.ask(Control::Handshake, START_MAX)?;
            let told =
                answer.payload().and_then(|bytes| <Handshake as zerocopy::FromBytes>::read_from_bytes(bytes).ok());
            if told != Some(Handshake::OWN) {
                return Err(ActorError::Handshake { lane });
            }
        }
        Ok(())
    }

    fn activate_all(&self) -> Result<(), ActorError> {
        let port = Inner::open_port(&self.inner, true)?;
        let actors = self.shared.shape().actors;
        for index in 0..actors {
            let mut message = Message { kind: Control::Activate as u16, flags: CONTROL, ..Message::EMPTY };
            message.to = self.shared.address(index).0;
            port.shared.sign(&mut message);
            self.shared.enqueue_within(&self.inner, &message, START_MAX)?;
        }
        for _ in 0..actors {
            let acknowledged = port.receive(START_MAX).filter(|message| message.has(CONTROL));
            if acknowledged.is_none() {
                self.shared.check_there()?;
                return Err(ActorError::Timeout { to: self.shared.address(0), after: START_MAX });
            }
        }
        Ok(())
    }

    pub fn name(&self) -> &str {
        &self.shared.name
    }

    pub fn lanes(&self) -> u32 {
        self.shared.shape().lanes
    }

    pub fn actors(&self) -> u32 {
        self.shared.shape().actors
    }

    /// An actor by its index.
    pub fn actor(&self, index: u32) -> Result<Actor, ActorError> {
        if index >= self.actors() {
            return Err(ActorError::Foreign { to: self.shared.address(index) });
        }
        Ok(Actor::new(&self.inner, &self.shared, index, &self.port))
    }

    /// Waits until its lanes have handled everything that was sent to them from outside before this was called.
    pub fn drain(&self, limit: Duration) -> Result<(), ActorError> {
        let began = Instant::now();
        let sent: Vec<u64> = self.shared.lanes.iter().map(|lane| lane.senders.sent()).collect();
        for (lane, sent) in self.shared.lanes.iter().zip(sent) {
            while lane.control.mailbox_taken().load(Ordering::Acquire) < sent {
                self.shared.check_there()?;
                // Lanes go on only if somebody takes what they reply.
                self.inner.drain_all();
                if began.elapsed() > limit {
                    return Err(ActorError::Timeout { to: self.shared.address(0), after: limit });
                }
                std::thread::park_timeout(POLL_PERIOD);
            }
        }
        Ok(())
    }

    /// How often each lane has shown that it is well, and whether it has parked.
    pub fn beats(&self) -> Vec<(u64, bool)> {
        let beats = |lane: &LaneLink| {
            (lane.control.beats().load(Ordering::Relaxed), lane.control.asleep().load(Ordering::Relaxed) != 0)
        };
        self.shared.lanes.iter().map(beats).collect()
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.inner.executors.write().retain(|own| !Arc::ptr_eq(own, &self.shared));
        self.shared.tell_to_end();
        self.shared.end(&self.inner);
    }
}

fn shape(executor: u32, behaviour: Behaviour, least: u32, options: &ExecutorOptions) -> Result<Shape, ActorError> {
    let state_bytes = if options.state_bytes == 0 { least } else { options.state_bytes };
    let shape = Shape {
        executor,
        lanes: options.lanes,
        actors: options.actors,
        state_bytes,
        mailbox_slots: options.mailbox_slots,
        reply_slots: options.reply_slots,
        held_max: options.mailbox_slots,
        handler_ns: u64::try_from(options.handler_max.as_nanos()).unwrap_or(u64::MAX),
    };
    let too_little =
        || format!("{:?} needs {least} bytes of state, and {state_bytes} were asked for", behaviour.name());
    let checked = shape.check().and_then(|()| if state_bytes < least { Err(too_little()) } else { Ok(shape) });
    checked.map_err(|why| ActorError::BadShape { why })
}

impl ExecutorShared {
    fn new(name: &str, span: Span, rings: bool, restarts_max: u32, room: Room, worker: u32) -> Option<ExecutorShared> {
        let link = |lane| {
            let senders = Senders::new(span.mailbox(lane)?);
            let replies = Mutex::new(Receiver::new(span.replies(lane)?));
            Some(LaneLink { senders, control: span.control(lane)?, replies })
        };
        Some(ExecutorShared {
            name: name.to_owned(),
            lanes: (0..span.shape.lanes).map(link).collect::<Option<_>>()?,
            rings,
            outstanding: (0..span.shape.actors).map(|_| AtomicU32::new(0)).collect(),
            span,
            resident: Mutex::new(None),
            gone: OnceLock::new(),
            restarts_max,
            restarts: Mutex::default(),
            room,
            worker,
        })
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.span.shape
    }

    pub(super) fn address(&self, index: u32) -> Address {
        Address::actor(self.shape().executor, index)
    }

    pub(super) fn lane_of(&self, index: u32) -> usize {
        (index % self.shape().lanes) as usize
    }

    pub(super) fn telemetry(&self, index: u32) -> Option<Telemetry> {
        self.span.telemetry(index)
    }

    /// Whether it is there.
    pub(super) fn check_there(&self) -> Result<(), ActorError> {
        self.gone.get().map_or(Ok(()), |why| Err(why.clone()))
    }

    /// One more call to an actor, if it has not too many.
    pub(super) fn credit(self: &Arc<Self>, index: u32) -> Result<Credit, ActorError> {
        let max = self.shape().mailbox_slots;
        let credit = Credit { executor: self.clone(), index };
        if self.outstanding[index as usize].fetch_add(1, Ordering::Relaxed) >= max {
            return Err(ActorError::Full { what: "the actor's line of calls", slots: u64::from(max) });
        }
        Ok(credit)
    }

    /// Puts a message into the mailbox of its actor's lane, now or not at all.
    pub(super) fn enqueue(&self, message: &Message) -> Result<(), ActorError> {
        self.enqueue_all(std::slice::from_ref(message))
    }

    /// Several for actors of one lane, one behind the other, or none of them.
    pub(super) fn enqueue_all(&self, messages: &[Message]) -> Result<(), ActorError> {
        let Some(first) = messages.first() else { return Ok(()) };
        self.check_there()?;
        let lane = self.lane_of(Address(first.to).index());
        let link = &self.lanes[lane];
        let bytes = zerocopy::IntoBytes::as_bytes(messages);
        let all = <[Chunks<8>] as zerocopy::FromBytes>::ref_from_bytes(bytes).unwrap_or_default();
        match link.senders.send_all(all, link.control.mailbox_taken()) {
            Ok(_) => {
                if self.rings {
                    link.control.bell().ring();
                }
                Ok(())
            }
            Err(refusal) => Err(self.refused(lane, refusal)),
        }
    }

    #[cold]
    fn refused(&self, lane: usize, refusal: Refusal) -> ActorError {
        let lane_number = u32::try_from(lane).unwrap_or(u32::MAX);
        match (refusal, self.torn(lane)) {
            (Refusal::Corrupt, _) => ActorError::Corrupt { lane: lane_number },
            (Refusal::Full, Some(position)) => ActorError::Torn { lane: lane_number, position },
            (Refusal::Full, None) => {
                ActorError::Full { what: "the mailbox", slots: u64::from(self.shape().mailbox_slots) }
            }
        }
    }

    /// At which position a lane stands because nobody finished it.
    pub(super) fn torn(&self, lane: usize) -> Option<u64> {
        self.lanes[lane].control.torn().load(Ordering::Acquire).checked_sub(1)
    }

    /// The same, waiting for room for so long at most.
    pub(super) fn enqueue_within(&self, inner: &Inner, message: &Message, limit: Duration) -> Result<(), ActorError> {
        let mut began = None;
        let mut tries = 0_u32;
        loop {
            match self.enqueue(message) {
                Err(ActorError::Full { .. }) if began.get_or_insert_with(Instant::now).elapsed() < limit => {}
                done => return done,
            }
            // A lane whose replies nobody takes has no room for long.
            inner.drain(self, self.lane_of(Address(message.to).index()));
            tries += 1;
            if tries < 64 {
                std::thread::yield_now();
            } else {
                std::thread::park_timeout(POLL_PERIOD);
            }
        }
    }

    pub(super) fn tell_to_end(&self) {
        if let Some((resident, _)) = &*self.resident.lock() {
            resident.stop();
        }
        if self.rings {
            self.lanes.iter().for_each(|lane| lane.control.bell().ring());
        }
    }

    /// Waits until its lanes have ended, and lets others have its room.
    pub(super) fn end(&self, inner: &Inner) {
        let _ = self.gone.set(ActorError::Ended { name: self.name.clone() });
        // The device's watchdog sees to it that waiting ends. Where there is none, it was never launched, or is over.
        let resident = self.resident.lock().take();
        let (resident, _memory) = resident.unzip();
        let ended = resident.map_or(Ok(()), Resident::wait);
        let mut lease = inner.lease.lock();
        if ended.is_ok() && lease.worker == self.worker {
            lease.rooms.give_back(self.room);
        }
        drop(lease);
        inner.ports.read().values().for_each(|port| port.wake_all());
    }

    /// Looks whether its lanes are gone though nobody told them to. True once, when that is found.
    pub(super) fn look_whether_gone(&self, inner: &Inner) -> bool {
        let Some(over) = self.resident.lock().take_if(|(own, _)| own.is_over()) else { return false };
        let has_begun = self.lanes.iter().any(|lane| lane.control.beats().load(Ordering::Relaxed) != 0);
        let why = match over.0.wait() {
            Err(error) => error.into(),
            Ok(()) if self.worker != inner.device.restarts() => {
                ActorError::DeviceLost { why: "its worker was replaced".to_owned() }
            }
            Ok(()) if !has_begun => ActorError::NotStarted,
            Ok(()) => ActorError::Ended { name: self.name.clone() },
        };
        self.gone.set(why).is_ok()
    }

    /// Whether the supervisor may restart an actor now.
    pub(super) fn may_restart(&self, index: u32) -> bool {
        if self.telemetry(index).is_none_or(|block| block.state() != ActorState::Faulted as u32) {
            return false;
        }
        let restarts = self.restarts.lock();
        let (since, count) = restarts.get(&index).copied().unwrap_or((Instant::now(), 0));
        count < self.restarts_max || self.restarts_max > 0 && since.elapsed() > RESTART_WINDOW
    }

    pub(super) fn has_restarted(&self, index: u32) {
        let mut restarts = self.restarts.lock();
        let (since, count) = restarts.entry(index).or_insert((Instant::now(), 0));
        if since.elapsed() > RESTART_WINDOW {
            (*since, *count) = (Instant::now(), 0);
        }
        *count += 1;
    }
}
