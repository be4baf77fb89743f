//! Lanes on a GPU: the kernel that a behaviour's handler becomes, and what it has of the device's memory.
//!
//! A handler is Wasm, compiled by `tensor-wasm-jit` with a lane around it, which does what `lane.rs` does (its text is
//! `lane.ptx` there). What of the layouts it has in numbers of its own is compared here when this is compiled, and by
//! the handshake when it is started.

use std::mem::{offset_of, size_of};

use tensor_wasm_gpu::{Buffer, Param, Params, Tenant};
use tensor_wasm_jit::{Program, actor};

use crate::behaviour::{Behaviour, OUTBOX_MAX, Outbox};
use crate::builtin::Builtin;
use crate::clock;
use crate::error::ActorError;
use crate::layout::{
    Address, ControlBlock, HEADER_BYTES, Handshake, MESSAGE_BYTES, SLOT_BYTES, Shape, TelemetryBlock, VERSION,
};
use crate::message::{
    ActorFault, ActorState, CONTROL, Control, FAULT, Message, REFERENCE, REPLY, Reason, TrapKind, URGENT,
};

/// Messages between actors that wait for a lane: 1 MiB of the device's memory for each. One more goes back.
const INBOX_SLOTS: u32 = 8192;

/// What an actor's state begins at a multiple of.
const STATE_ALIGN: u32 = 16;

/// Replies that one message may lead to; a ring that has fewer slots would never have room.
const REPLIES_MIN: u32 = actor::OUTBOX_MESSAGES;

/// A handler as a module of Wasm.
fn text(builtin: Builtin) -> &'static str {
    match builtin {
        Builtin::Echo => include_str!("builtin/echo.wat"),
        Builtin::Counter => include_str!("builtin/counter.wat"),
        Builtin::KeyValue => include_str!("builtin/key_value.wat"),
        Builtin::Reduce => include_str!("builtin/reduce.wat"),
        Builtin::Relay => include_str!("builtin/relay.wat"),
        Builtin::Spin => include_str!("builtin/spin.wat"),
    }
}

/// Compiles a behaviour's lanes.
pub(crate) fn compile(behaviour: Behaviour) -> Result<actor::ActorImage, ActorError> {
    let Behaviour::Builtin(builtin) = behaviour;
    let failed = |why: String| ActorError::Unsupported { what: format!("{:?} on a GPU: {why}", builtin.name()) };
    let wasm = wat::parse_str(text(builtin)).map_err(|error| failed(error.to_string()))?;
    let program = Program::read(&wasm).map_err(|refusal| failed(refusal.to_string()))?;
    program.compile_actor("handle", 1).map_err(|refusal| failed(refusal.to_string()))
}

/// What an executor has of a GPU's memory: what its lanes remember when they make way, and what actors keep.
pub(crate) struct GpuMemory {
    actors: Buffer,
    states: Buffer,
    lanes: Buffer,
    inboxes: Buffer,
    holds: Buffer,
}

fn state_stride(shape: &Shape) -> u32 {
    shape.state_bytes.next_multiple_of(STATE_ALIGN).max(STATE_ALIGN)
}

/// Messages that a paused actor may have waiting, as a power of two.
fn hold_slots(shape: &Shape) -> u32 {
    shape.held_max.max(1).next_power_of_two()
}

impl GpuMemory {
    pub(crate) fn new(tenant: &Tenant, shape: &Shape) -> Result<GpuMemory, ActorError> {
        if shape.reply_slots < REPLIES_MIN {
            let why = format!("{} slots for replies; a lane of a GPU needs {REPLIES_MIN}", shape.reply_slots);
            return Err(ActorError::BadShape { why });
        }
        let (actors, lanes) = (u64::from(shape.actors), u64::from(shape.lanes));
        let held = actors * u64::from(hold_slots(shape)) * MESSAGE_BYTES as u64;
        // Memory that nobody had before is zeros.
        let memory = GpuMemory {
            actors: tenant.buffer(actors * u64::from(actor::ACTOR_BYTES))?,
            states: tenant.buffer(actors * u64::from(state_stride(shape)))?,
            lanes: tenant.buffer(lanes * u64::from(actor::LANE_STATE_BYTES))?,
            inboxes: tenant.buffer(lanes * u64::from(INBOX_SLOTS) * SLOT_BYTES as u64)?,
            holds: tenant.buffer(held)?,
        };
        let mut table = vec![0; shape.actors as usize * actor::ACTOR_BYTES as usize];
        for (index, entry) in (0..shape.actors).zip(table.chunks_exact_mut(actor::ACTOR_BYTES as usize)) {
            put(entry, actor::ACTOR_LANE, index % shape.lanes);
        }
        tenant.write_blocking(memory.actors.handle(), 0, &table)?;
        let mut table = vec![0; shape.lanes as usize * actor::LANE_STATE_BYTES as usize];
        for entry in table.chunks_exact_mut(actor::LANE_STATE_BYTES as usize) {
            put(entry, actor::LANE_STATE_RESUMING, u32::MAX);
        }
        tenant.write_blocking(memory.lanes.handle(), 0, &table)?;
        Ok(memory)
    }

    /// The parameters of the kernel, for a span that the device sees at an address.
    pub(crate) fn params(&self, shape: &Shape, span: u64) -> Params {
        let whole = |buffer: &Buffer| Param::Buffer { handle: buffer.handle(), offset: 0 };
        let wall = u64::try_from(clock::wall().as_nanos()).unwrap_or(u64::MAX);
        Params::new([
            Param::U64(span + shape.control_at(0)),
            whole(&self.actors),
            Param::U64(span + shape.telemetry_at(0)),
            whole(&self.states),
            whole(&self.lanes),
            whole(&self.inboxes),
            whole(&self.holds),
            Param::U64(shape.handler_ns),
            Param::U64(wall),
            Param::U32(shape.state_bytes),
            Param::U32(state_stride(shape)),
            Param::U32(shape.actors),
            Param::U32(shape.mailbox_slots.trailing_zeros()),
            Param::U32(shape.reply_slots.trailing_zeros()),
            Param::U32(INBOX_SLOTS.trailing_zeros()),
            Param::U32(hold_slots(shape).trailing_zeros()),
            Param::U32(Address::actor(shape.executor, 0).0),
        ])
    }
}

/// Writes a word of an entry.
fn put(entry: &mut [u8], at: u32, value: u32) {
    let places = entry.iter_mut().skip(at as usize);
    places.zip(value.to_le_bytes()).for_each(|(place, byte)| *place = byte);
}

const fn is(offset: usize, number: u32) -> bool {
    offset == number as usize
}

const _: () = assert!(INBOX_SLOTS.is_power_of_two());
const _: () = assert!(is(SLOT_BYTES, actor::SLOT_BYTES) && is(MESSAGE_BYTES, actor::MESSAGE_BYTES));
const _: () = assert!(is(HEADER_BYTES, actor::MESSAGE_PAYLOAD) && is(offset_of!(Message, id), actor::MESSAGE_ID));
const _: () = assert!(is(offset_of!(Message, about), actor::MESSAGE_ABOUT));
const _: () = assert!(is(offset_of!(Message, clock), actor::MESSAGE_CLOCK));
const _: () = assert!(is(offset_of!(Message, to), actor::MESSAGE_TO));
const _: () = assert!(is(offset_of!(Message, kind), actor::MESSAGE_WHAT));
const _: () = assert!(is(size_of::<Outbox>(), actor::OUTBOX_BYTES) && is(OUTBOX_MAX, actor::OUTBOX_MESSAGES));
const _: () = assert!(is(offset_of!(Outbox, messages), actor::OUTBOX_FIRST));
const _: () = assert!(is(size_of::<ControlBlock>(), actor::LANE_CONTROL_BYTES));
const _: () = assert!(is(offset_of!(ControlBlock, replies_taken), actor::LANE_REPLIES_TAKEN));
const _: () = assert!(is(offset_of!(ControlBlock, mailbox_taken), actor::LANE_MAILBOX_TAKEN));
const _: () = assert!(is(offset_of!(ControlBlock, replies_written), actor::LANE_REPLIES_WRITTEN));
const _: () = assert!(is(offset_of!(ControlBlock, beats), actor::LANE_BEATS));
const _: () = assert!(is(size_of::<TelemetryBlock>(), actor::TELEMETRY_BYTES));
const _: () = assert!(is(offset_of!(TelemetryBlock, state), actor::ACTOR_STATE));
const _: () = assert!(is(offset_of!(TelemetryBlock, restarts), actor::ACTOR_RESTARTS));
const _: () = assert!(is(offset_of!(TelemetryBlock, handled), actor::ACTOR_HANDLED));
const _: () = assert!(is(offset_of!(TelemetryBlock, sent), actor::ACTOR_SENT));
const _: () = assert!(is(offset_of!(TelemetryBlock, faults), actor::ACTOR_FAULTS));
const _: () = assert!(is(offset_of!(TelemetryBlock, clock), actor::ACTOR_CLOCK));
const _: () = assert!(is(offset_of!(TelemetryBlock, busy_ns), actor::ACTOR_BUSY_NANOS));
const _: () = assert!(is(offset_of!(TelemetryBlock, queue_depth_max), actor::ACTOR_HELD_MAX));
const _: () = assert!(is(size_of::<ActorFault>(), actor::REFUSAL_BYTES) && VERSION == actor::LANE_VERSION);
const _: () = assert!(size_of::<Handshake>() == 4 * actor::HANDSHAKE.len());

// Numbers that both sides have a name for.
const _: () = {
    use tensor_wasm_jit::actor::{ActorState as S, Control as C, Refused as R};
    assert!((REPLY as u32) << 16 == actor::FLAG_REPLY && (REFERENCE as u32) << 16 == actor::FLAG_REFERENCE);
    assert!((FAULT as u32) << 16 == actor::FLAG_FAULT && (CONTROL as u32) << 16 == actor::FLAG_CONTROL);
    assert!((URGENT as u32) << 16 == actor::FLAG_URGENT);
    assert!(Control::Activate as u16 == C::Activate as u16 && Control::Pause as u16 == C::Pause as u16);
    assert!(Control::Resume as u16 == C::Resume as u16 && Control::Terminate as u16 == C::Terminate as u16);
    assert!(Control::Restart as u16 == C::Restart as u16 && Control::Handshake as u16 == C::Handshake as u16);
    assert!(Control::Ping as u16 == C::Ping as u16);
    assert!(ActorState::Absent as u32 == S::Absent as u32 && ActorState::Active as u32 == S::Active as u32);
    assert!(ActorState::Paused as u32 == S::Paused as u32 && ActorState::Terminated as u32 == S::Terminated as u32);
    assert!(ActorState::Faulted as u32 == S::Faulted as u32);
    assert!(Reason::Absent as u32 == R::Absent as u32 && Reason::Terminated as u32 == R::Terminated as u32);
    assert!(Reason::Faulted as u32 == R::Faulted as u32 && Reason::Trapped as u32 == R::Trapped as u32);
    assert!(Reason::Expired as u32 == R::Expired as u32 && Reason::Refused as u32 == R::Refused as u32);
    assert!(Reason::Full as u32 == R::Full as u32 && Reason::Foreign as u32 == R::Foreign as u32);
    assert!(Reason::Malformed as u32 == R::Malformed as u32);
    assert!(TrapKind::Deadline as u32 == actor::TRAP_DEADLINE && TrapKind::BadOutbox as u32 == actor::TRAP_BAD_OUTBOX);
};

#[cfg(test)]
mod tests;
