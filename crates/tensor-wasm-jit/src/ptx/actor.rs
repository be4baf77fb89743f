//! A handler inside of its lane: what the emitter does otherwise there, and the text around it (`lane.ptx`).
//!
//! The handler's items never exit. One that traps goes to the end of the handler and waits there for the others, which
//! may still meet at barriers: so a barrier is a vote on whether all are at the end, and whoever is there takes part
//! in it until all are. No item is waited for that does not come.

use std::fmt::Write as _;

use super::{FUEL, PtxEmitter};
use crate::actor::{self, ActorState, Control, Refused};
use crate::assemble::SHARED_BYTES_MAX;
use crate::ir::{Axis, Body, Id, Op, SHARED_ADDRESS, TrapKind};
use crate::refusal::Refusal;

const LANE: &str = include_str!("lane.ptx");

/// Messages that a poller has fetched and the handler has not had: two bursts and more, so that the next message is
/// there when one is done. A power of two.
const QUEUE_MESSAGES: u32 = 16;

/// A poller beats once in so many looks, each about a microsecond long. A power of two.
const POLLS_PER_BEAT: u32 = 64;

/// A poller looks at the clock once in so many looks. A power of two.
const POLLS_PER_LOOK: u32 = 8;

/// A poller that found nothing so often, for some milliseconds, sleeps this long between two looks: it costs less
/// power, and the first message a little more.
const POLLS_BEFORE_SLEEP: u32 = 4096;
const SLEEP_NANOS: u32 = 500;

/// Windows of a handler begin at multiples of this, in its addresses.
const WINDOW_ALIGN: u32 = 256;

/// What a lane has of its group's shared memory, by offsets: behind what the handler has.
mod area {
    use super::{QUEUE_MESSAGES, actor};

    pub(super) const TAILS: u32 = 0;
    pub(super) const HEADS: u32 = 8;
    pub(super) const LEAVE: u32 = 16;
    pub(super) const VERDICT: u32 = 20;
    /// Whether there was a trap, then what a refusal says of it.
    pub(super) const FAULT: u32 = 24;
    pub(super) const FAULT_KIND: u32 = 28;
    pub(super) const FAULT_WORDS: u32 = 6;
    pub(super) const CURRENT: u32 = 48;
    pub(super) const PLACE: u32 = 56;
    /// What time it is, as the mailbox's poller saw it.
    pub(super) const NOW: u32 = 64;
    pub(super) const OUTBOX: u32 = 80;
    pub(super) const SCRATCH: u32 = OUTBOX + actor::OUTBOX_BYTES;
    pub(super) const QUEUES: u32 = (SCRATCH + actor::MESSAGE_BYTES).next_multiple_of(16);
    pub(super) const QUEUE_BYTES: u32 = QUEUE_MESSAGES * actor::MESSAGE_BYTES;
    pub(super) const BYTES: u32 = QUEUES + 2 * QUEUE_BYTES;

    const _: () = assert!(FAULT_KIND + 4 * (FAULT_WORDS - 1) <= CURRENT && OUTBOX.is_multiple_of(16));
    const _: () = assert!(actor::OUTBOX_BYTES.is_multiple_of(16) && PLACE.is_multiple_of(8));
}

const _: () =
    assert!(QUEUE_MESSAGES.is_power_of_two() && POLLS_PER_BEAT.is_power_of_two() && POLLS_PER_LOOK.is_power_of_two());

/// What a handler is compiled for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Handler {
    /// Work items that run it.
    pub items: u32,
}

impl Handler {
    /// Work items of the warps that run it.
    fn warp_items(self) -> u32 {
        self.items.next_multiple_of(32)
    }
}

/// What there is no way to have in a handler.
pub(super) fn check_handler(body: &Body) -> Result<(), Refusal> {
    let refused = |why: &str| Err(Refusal::NotAKernel { name: body.name.clone(), why: why.to_owned() });
    let is_gpu = |op: &Op| matches!(op, Op::Gpu { .. } | Op::Shuffle { .. });
    if body.has_subgroups() || body.ops.iter().any(is_gpu) {
        return refused("a handler's items cannot exchange registers: one that trapped would be waited for");
    }
    if body.shared_bytes.next_multiple_of(16) + area::BYTES > SHARED_BYTES_MAX {
        return refused("it has more shared memory than is left beside a lane's own");
    }
    Ok(())
}

impl PtxEmitter<'_> {
    /// Bytes of shared memory that the group has.
    pub(super) fn actor_shared_bytes(&self) -> u32 {
        self.area_at() + area::BYTES
    }

    fn area_at(&self) -> u32 {
        self.body.shared_bytes.next_multiple_of(16)
    }

    /// Items of the handler meet. A vote, of which the answer is known: not all are at the end.
    pub(super) fn handler_barrier(&mut self, handler: Handler) {
        if handler.items > 1 {
            put!(self, "barrier.red.and.pred %all, 1, {}, %false;", handler.items);
        }
    }

    /// A handler sees one group, of its own items.
    pub(super) fn handler_id(&mut self, handler: Handler, id: Id, to: &str, axis: Axis) {
        match (id, axis) {
            (Id::Local | Id::Global, Axis::X) => put!(self, "mov.u32 {to}, %tid.x;"),
            (Id::Local | Id::Global, Axis::Y | Axis::Z) | (Id::Group, _) => put!(self, "mov.b32 {to}, 0;"),
            (Id::LocalSize | Id::GlobalSize, Axis::X) => put!(self, "mov.b32 {to}, {};", handler.items),
            (Id::LocalSize | Id::GlobalSize, Axis::Y | Axis::Z) | (Id::Groups, _) => put!(self, "mov.b32 {to}, 1;"),
        }
    }

    /// Ends the handler if another of its items has trapped, or its time is over.
    pub(super) fn handler_poll(&mut self) {
        let (word, now, q) = (self.b32(), self.b64(), self.pred());
        put!(self, "ld.volatile.shared.u32 {word}, [%area+{}];", area::FAULT);
        put!(self, "setp.ne.s32 {q}, {word}, 0;");
        put!(self, "@{q} bra DONE;");
        put!(self, "mov.u64 {now}, %globaltimer;");
        put!(self, "setp.gt.u64 {q}, {now}, %until;");
        put!(self, "@{q} bra LATE;");
    }

    /// What the handler has at the beginning of a message.
    pub(super) fn handler_prologue(&mut self, handler: Handler) {
        let body = self.body;
        put!(self, "mov.b32 %fuel, {FUEL};");
        for (n, reg) in body.params.iter().enumerate() {
            let name = self.reg(*reg);
            put!(self, "cvt.u32.u64 {name}, %start{n};");
        }
        put!(self, "mov.b64 %gwindow0, %window0;");
        put!(self, "cvta.shared.u64 %gwindow1, %window1;");
        put!(self, "cvta.shared.u64 %gwindow2, %window2;");
        if body.stack_bytes > 0 {
            put!(self, "mov.u64 %stack, stack;");
            put!(self, "cvta.local.u64 %gstack, %stack;");
        }
        if body.shared_bytes > 0 {
            put!(self, "cvta.shared.u64 %gshared, %shared;");
        }
        if !body.data.is_empty() {
            put!(self, "mov.u64 %gdata, data;");
        }
        self.zero_stack();
        if body.shared_bytes > 0 {
            let (at, step) = (self.b64(), self.b64());
            put!(self, "mul.wide.u32 {at}, %item, 8;");
            put!(self, "mov.b64 {step}, {};", 8 * handler.items);
            self.zero_shared(&at, &step);
            self.handler_barrier(handler);
        }
        for n in 0..self.limits.len() {
            self.set_limit(n);
        }
    }

    /// One item's trap is the message's. The first of them is told.
    pub(super) fn handler_trap(&mut self) {
        let (old, q) = (self.b32(), self.pred());
        put!(self, "atom.relaxed.cta.shared.exch.b32 {old}, [%area+{}], 1;", area::FAULT);
        put!(self, "setp.ne.s32 {q}, {old}, 0;");
        put!(self, "@{q} bra DONE;");
        for (n, word) in ["%kind", "%site", "%which", "%fuel", "%item"].iter().enumerate() {
            put!(self, "st.shared.u32 [%area+{}], {word};", area::FAULT_KIND as usize + 4 * n);
        }
        put!(self, "bra DONE;");
    }

    /// The lane's text, around the handler's.
    pub(super) fn lane_around(&self, handler: Handler, handler_code: &str) -> String {
        let start1 = self.body.windows_from().next_multiple_of(WINDOW_ALIGN);
        let start2 = start1 + actor::MESSAGE_BYTES.next_multiple_of(WINDOW_ALIGN);
        let start0 = start2 + actor::OUTBOX_BYTES.next_multiple_of(WINDOW_ALIGN);
        let items = handler.warp_items();
        let together = if items > 32 { format!("barrier.sync 2, {items};") } else { "bar.warp.sync -1;".to_owned() };
        let gather = if handler.items > 1 {
            format!("barrier.red.and.pred %all, 1, {items}, %true;\n\t@!%all bra DONE;")
        } else {
            "bar.warp.sync -1;".to_owned()
        };
        let first_out = area::OUTBOX + actor::OUTBOX_FIRST;
        let mut handshake = String::new();
        for (n, word) in (0..).zip(actor::HANDSHAKE) {
            let at = first_out + actor::MESSAGE_PAYLOAD + 4 * n;
            let _ = write!(handshake, "mov.b32 %word, {word};\n\tst.shared.u32 [%area+{at}], %word;\n\t");
        }
        let length = |bytes: usize| u32::try_from(bytes).unwrap_or(0) << 24;
        let numbers = [
            ("area", self.area_at()),
            ("items", items),
            ("area_words", area::BYTES / 4),
            ("handler_items", handler.items),
            // Where a message comes from.
            ("nothing", 0),
            ("from_mailbox", 1),
            ("from_inbox", 2),
            ("from_hold", 3),
            ("leaving", 4),
            ("start0", start0),
            ("start1", start1),
            ("start2", start2),
            ("tails", area::TAILS),
            ("heads", area::HEADS),
            ("leave", area::LEAVE),
            ("verdict", area::VERDICT),
            ("fault", area::FAULT),
            ("fault_kind", area::FAULT_KIND),
            ("fault_words", area::FAULT_WORDS),
            ("current", area::CURRENT),
            ("place", area::PLACE),
            ("now", area::NOW),
            ("outbox", area::OUTBOX),
            ("first_out", first_out),
            ("scratch", area::SCRATCH),
            ("queues", area::QUEUES),
            ("queue_bytes", area::QUEUE_BYTES),
            ("queue_messages", QUEUE_MESSAGES),
            ("queue_mask", QUEUE_MESSAGES - 1),
            ("message_bytes", actor::MESSAGE_BYTES),
            ("message_words", actor::MESSAGE_BYTES / 4),
            ("m_id", actor::MESSAGE_ID),
            ("m_about", actor::MESSAGE_ABOUT),
            ("m_clock", actor::MESSAGE_CLOCK),
            ("m_to", actor::MESSAGE_TO),
            ("m_what", actor::MESSAGE_WHAT),
            ("m_payload", actor::MESSAGE_PAYLOAD),
            ("payload_max", actor::PAYLOAD_BYTES_MAX),
            ("outbox_bytes", actor::OUTBOX_BYTES),
            ("outbox_vectors", actor::OUTBOX_BYTES / 16),
            ("outbox_messages", actor::OUTBOX_MESSAGES),
            ("outbox_max", actor::OUTBOX_MESSAGES),
            ("outbox_verdict", actor::OUTBOX_VERDICT),
            ("traps_from", actor::TRAPS_FROM),
            ("bad_outbox", actor::TRAP_BAD_OUTBOX),
            ("trap_deadline", actor::TRAP_DEADLINE),
            ("deadline_kind", TrapKind::Deadline as u32),
            ("flag_reply", actor::FLAG_REPLY),
            ("flag_control", actor::FLAG_CONTROL),
            ("flag_reply_or_fault", actor::FLAG_REPLY | actor::FLAG_FAULT),
            ("handler_says", 0xff00_ffff | actor::FLAG_REFERENCE | actor::FLAG_URGENT),
            ("control_answer", actor::FLAG_REPLY | actor::FLAG_CONTROL | length(4)),
            (
                "handshake_answer",
                actor::FLAG_REPLY
                    | actor::FLAG_CONTROL
                    | Control::Handshake as u32
                    | length(4 * actor::HANDSHAKE.len()),
            ),
            ("returned", actor::FLAG_REPLY | actor::FLAG_FAULT | length(actor::REFUSAL_BYTES as usize)),
            ("dead_letter", actor::FLAG_FAULT | length(actor::REFUSAL_BYTES as usize)),
            // Port 0 of the host.
            ("dead_letters", 0xff00_0000),
            ("activate", Control::Activate as u32),
            ("pause", Control::Pause as u32),
            ("resume", Control::Resume as u32),
            ("terminate", Control::Terminate as u32),
            ("restart", Control::Restart as u32),
            ("handshake", Control::Handshake as u32),
            ("ping", Control::Ping as u32),
            ("absent_state", ActorState::Absent as u32),
            ("active", ActorState::Active as u32),
            ("paused", ActorState::Paused as u32),
            ("terminated", ActorState::Terminated as u32),
            ("faulted", ActorState::Faulted as u32),
            ("trapped", Refused::Trapped as u32),
            ("absent", Refused::Absent as u32),
            ("terminated_letter", Refused::Terminated as u32),
            ("faulted_letter", Refused::Faulted as u32),
            ("expired", Refused::Expired as u32),
            ("refused", Refused::Refused as u32),
            ("full", Refused::Full as u32),
            ("foreign", Refused::Foreign as u32),
            ("malformed", Refused::Malformed as u32),
            ("control_bytes", actor::LANE_CONTROL_BYTES),
            ("control_replies_taken", actor::LANE_REPLIES_TAKEN),
            ("control_mailbox_taken", actor::LANE_MAILBOX_TAKEN),
            ("control_replies_written", actor::LANE_REPLIES_WRITTEN),
            ("control_beats", actor::LANE_BEATS),
            ("actor_bytes", actor::ACTOR_BYTES),
            ("telemetry_bytes", actor::TELEMETRY_BYTES),
            ("telemetry_words", actor::TELEMETRY_BYTES / 4),
            ("actor_state", actor::ACTOR_STATE),
            ("actor_restarts", actor::ACTOR_RESTARTS),
            ("actor_handled", actor::ACTOR_HANDLED),
            ("actor_sent", actor::ACTOR_SENT),
            ("actor_faults", actor::ACTOR_FAULTS),
            ("actor_clock", actor::ACTOR_CLOCK),
            ("actor_busy", actor::ACTOR_BUSY_NANOS),
            ("actor_lane", actor::ACTOR_LANE),
            ("actor_held_max", actor::ACTOR_HELD_MAX),
            ("actor_hold_tail", actor::ACTOR_HELD),
            ("actor_hold_head", actor::ACTOR_UNHELD),
            ("lane_state_bytes", actor::LANE_STATE_BYTES),
            ("ls_taken", actor::LANE_STATE_TAKEN),
            ("ls_replied", actor::LANE_STATE_REPLIED),
            ("ls_clock", actor::LANE_STATE_CLOCK),
            ("ls_inbox_taken", actor::LANE_STATE_INBOX_TAKEN),
            ("ls_clock_offset", actor::LANE_STATE_CLOCK_OFFSET),
            ("ls_resuming", actor::LANE_STATE_RESUMING),
            ("ls_inbox_tail", actor::LANE_STATE_INBOX_TAIL),
        ];
        let known = |name: &str| match name {
            "together" => Some(together.clone()),
            "gather" => Some(gather.clone()),
            "handshake_words" => Some(handshake.trim_end().to_owned()),
            "beat_mask" => Some((POLLS_PER_BEAT - 1).to_string()),
            "clock_mask" => Some((POLLS_PER_LOOK - 1).to_string()),
            "polls_before_sleep" => Some(POLLS_BEFORE_SLEEP.to_string()),
            "verdict_refused" => Some(actor::VERDICT_REFUSED.cast_signed().to_string()),
            "sleep_nanos" => Some(SLEEP_NANOS.to_string()),
            // 2⁶⁴ over 1,000, rounded up: the upper half of a product with it is a thousandth.
            "per_thousand" => Some(u64::MAX.div_ceil(1000).to_string()),
            _ => numbers.iter().find(|(own, _)| *own == name).map(|(_, number)| number.to_string()),
        };
        let mut text = String::with_capacity(LANE.len() + handler_code.len());
        // What is said there is for people, who use letters that PTX has not.
        for line in LANE.lines().filter(|line| !line.trim_start().starts_with("//")) {
            if line == "HANDLER;" {
                text.push_str(handler_code);
                continue;
            }
            let _ = writeln!(text, "{}", sums(&filled(line, known)));
        }
        text
    }

    /// Parameters of an executor; those of every resident kernel follow.
    pub(super) fn executor_params() -> String {
        let wide = ["rings", "actors", "telemetry", "states", "lanes", "inboxes", "holds", "budget_nanos", "wall"];
        let narrow = [
            "state_bytes",
            "state_stride",
            "actor_count",
            "mailbox_log2",
            "replies_log2",
            "inbox_log2",
            "hold_log2",
            "own_address",
        ];
        let param = |bits: u32| move |name: &&str| format!("\t.param .u{bits} {name}");
        let params = wide.iter().map(param(64)).chain(narrow.iter().map(param(32)));
        params.chain(["beat", "stop"].iter().map(param(64))).collect::<Vec<_>>().join(",\n")
    }
}

/// A line with its words in braces replaced. Vectors of registers are in braces too.
fn filled(line: &str, known: impl Fn(&str) -> Option<String>) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(at) = rest.find('{') {
        let (before, after) = rest.split_at(at);
        text.push_str(before);
        let word = after[1..].split('}').next().unwrap_or_default();
        match known(word) {
            Some(value) => {
                text.push_str(&value);
                rest = &after[word.len() + 2..];
            }
            None => {
                text.push('{');
                rest = &after[1..];
            }
        }
    }
    text.push_str(rest);
    text
}

/// Numbers that are added up in the text are one number: an address is a register and one offset.
fn sums(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut parts = line.split('+').peekable();
    let trailing = |part: &str| part.len() - part.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let mut current = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let leading = part.len() - part.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let own = trailing(&current);
        let start = current.len() - own;
        let is_number =
            own > 0 && !current[..start].ends_with(|c: char| c == '%' || c == '_' || c.is_ascii_alphabetic());
        match (current[start..].parse::<u64>(), part[..leading].parse::<u64>()) {
            (Ok(a), Ok(b)) if is_number => {
                current.truncate(start);
                let _ = write!(current, "{}{}", a + b, &part[leading..]);
            }
            _ => {
                text.push_str(&current);
                text.push('+');
                current = part.to_owned();
            }
        }
    }
    text + &current
}

// The first vector of an outbox, as a lane empties it.
const _: () = assert!(actor::OUTBOX_STATE_BYTES == 8);
const _: () = assert!(SHARED_ADDRESS > 1 << 20, "there is room for a handler's windows");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_replaced_and_numbers_added_up() {
        let known = |name: &str| (name == "at").then(|| "40".to_owned());
        assert_eq!(filled("ld.v2.u32 {%a, %b}, [%c0+{at}+{at}];", known), "ld.v2.u32 {%a, %b}, [%c0+40+40];");
        assert_eq!(sums("ld.v2.u32 {%a, %b}, [%c0+40+40+4];"), "ld.v2.u32 {%a, %b}, [%c0+84];");
        assert_eq!(sums("add.s32 %word, %a, 1+2;"), "add.s32 %word, %a, 3;");
        let is_comment = |line: &&str| line.trim_start().starts_with("//");
        assert!(LANE.lines().filter(|line| !is_comment(line)).all(|line| line.is_ascii()));
        assert!(LANE.lines().map(|line| filled(line, |_| Some(String::new()))).all(|line| !line.contains("{a")));
    }
}
