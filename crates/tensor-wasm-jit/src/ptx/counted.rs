//! Counted loops (`loops.rs`) as PTX: a copy without a fence around each access, unrolled, with device pointers as
//! induction variables, for when a check before the loop finds everything inside. Only this backend has it: it took the
//! naive matrix product on a GPU from 2.6 times `nvcc -O3` to 1.0, while a processor predicts the branches of its
//! fence.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::{FUEL, PtxEmitter, UnfencedCopy};
use crate::ir::{Reg, Region, low_half};
use crate::legalize::Candidate;
use crate::loops::{self, CountedLoop, InductionPointer, Stride};

/// Times that the body of a counted loop is there in its copy without a fence, if it is short.
const UNROLL: u32 = 4;
const UNROLLED_OPS_MAX: usize = 60;

/// Operations of all copies together.
const COPIED_OPS_MAX: usize = 20_000;

impl PtxEmitter<'_> {
    /// Before a counted loop, looks whether everything it will access is inside, and how often it goes round; if
    /// all is well, most of it is done without a fence. What is left, if anything, is done by the loop itself.
    pub(super) fn counted_loop(&mut self, n: usize) {
        // Without a fence there is nothing to take out of a loop.
        if self.legal.is_trusted || self.fast.is_some() || self.copied > COPIED_OPS_MAX {
            return;
        }
        let Some(counted) = loops::counted(self.legal, n) else { return };
        let cost = u32::try_from(self.legal.cost(n, counted.end)).unwrap_or(FUEL).clamp(1, FUEL);
        let body_ops = self.legal.cost(counted.body.start, counted.body.end);
        let copies = if body_ops <= UNROLLED_OPS_MAX { UNROLL } else { 1 };
        self.copied += body_ops * copies as usize;
        let (ok, rounds) = self.rounds(&counted, cost, copies);
        let mut pointers = HashMap::new();
        let mut steps = Vec::new();
        for pointer in &counted.pointers {
            if !pointer.region.can_clamp() {
                continue;
            }
            let (name, step) = self.pointer(&counted, pointer, &ok, &rounds);
            pointers.insert(pointer.address, (self.space(pointer.region), name.clone(), pointer.low));
            steps.push((name, step));
        }
        let label = counted.label.0;
        put!(self, "@!{ok} bra L{label};");
        // What it costs is paid at once; a poll may be due.
        let (price, q, left) = (self.b32(), self.pred(), self.b32());
        put!(self, "mul.lo.s32 {price}, {rounds}, {};", cost.cast_signed());
        put!(self, "sub.s32 %fuel, %fuel, {price};");
        put!(self, "setp.le.s32 {q}, %fuel, 0;");
        self.asides += 1;
        let (poll, back) = (format!("P{}", self.asides), format!("F{label}"));
        put!(self, "@{q} bra {poll};");
        self.poll_aside_to(&poll, &back);
        let _ = writeln!(self.out, "{back}:");
        put!(self, "mov.b32 {left}, {rounds};");
        let _ = writeln!(self.out, "G{label}:");
        let body = self.body;
        for copy in 0..copies {
            let labels = counted.labels.clone();
            // What another copy has checked is not checked here.
            self.checked.clear();
            self.fast = Some(UnfencedCopy { labels, copy: copy as usize, pointers: pointers.clone() });
            for at in counted.body.clone() {
                self.one(at, &body.ops[at]);
            }
            self.fast = None;
            if copy + 1 == copies {
                // What goes round is not moved where it does not: something after the loop may be what it was in the
                // last round.
                put!(self, "sub.s32 {left}, {left}, {copies};");
                put!(self, "setp.eq.s32 {q}, {left}, 0;");
                put!(self, "@{q} bra D{label};");
            }
            for at in counted.moves_at.clone() {
                self.one(at, &body.ops[at]);
            }
            for (name, step) in &steps {
                put!(self, "add.s64 {name}, {name}, {step};");
            }
        }
        self.checked.clear();
        put!(self, "setp.ge.s32 {q}, {left}, {copies};");
        put!(self, "@{q} bra G{label};");
        self.skipped.insert(label);
    }

    /// How often a loop goes round, and whether that is so few that it need not poll.
    pub(super) fn rounds(&mut self, counted: &CountedLoop, cost: u32, copies: u32) -> (String, String) {
        let (distance, ok, rounds) = (self.b32(), self.pred(), self.b32());
        let counter = self.reg(counted.counter);
        let until = counted.until.map_or_else(|| "0".to_owned(), |reg| self.fixed(reg));
        if counted.counter_step > 0 {
            put!(self, "sub.s32 {distance}, {until}, {counter};");
        } else {
            put!(self, "sub.s32 {distance}, {counter}, {until};");
        }
        let step = counted.counter_step.unsigned_abs();
        put!(self, "shr.u32 {rounds}, {distance}, {};", step.trailing_zeros());
        if counted.is_before_step {
            put!(self, "add.s32 {rounds}, {rounds}, 1;");
        }
        put!(self, "setp.ge.u32 {ok}, {rounds}, {copies};");
        put!(self, "setp.le.and.u32 {ok}, {rounds}, {}, {ok};", (FUEL / cost).max(1));
        if step > 1 {
            let rest = self.b32();
            put!(self, "and.b32 {rest}, {distance}, {};", step - 1);
            put!(self, "setp.eq.and.s32 {ok}, {rest}, 0, {ok};");
        }
        (ok, rounds)
    }

    /// A register that does not change in a loop, or the number that it is.
    pub(super) fn fixed(&self, reg: Reg) -> String {
        match self.facts.constant(reg) {
            Some(bits) => low_half(bits).cast_signed().to_string(),
            None => self.reg(reg),
        }
    }

    /// Looks whether what an address will be stays inside its region. Returns a register with the device's address, and
    /// what is added to it each time round.
    pub(super) fn pointer(
        &mut self,
        counted: &CountedLoop,
        pointer: &InductionPointer,
        ok: &str,
        rounds: &str,
    ) -> (String, String) {
        let (first, last, times) = (self.b32(), self.b64(), self.b32());
        put!(self, "mov.b32 {first}, 0;");
        for (reg, shift, is_negative) in &pointer.terms {
            // Headers hold what they hold at first.
            let mut term =
                if counted.moves.iter().any(|(to, _)| to == reg) { self.reg(*reg) } else { self.fixed(*reg) };
            if *shift > 0 {
                let shifted = self.b32();
                put!(self, "mov.b32 {shifted}, {term};");
                put!(self, "shl.b32 {shifted}, {shifted}, {shift};");
                term = shifted;
            }
            put!(self, "{}.s32 {first}, {first}, {term};", if *is_negative { "sub" } else { "add" });
        }
        let fixed = |(start, size): (u32, u32)| (start.cast_signed().to_string(), size.to_string());
        let ((start, size), device) = match pointer.region {
            Region::Window(n) | Region::SmallWindow(n) => {
                let start = self.b32();
                put!(self, "cvt.u32.u64 {start}, %start{n};");
                ((start, format!("%size{n}")), format!("%window{n}"))
            }
            Region::Stack => (fixed(self.legal.extent(Candidate::Stack)), "%stack".to_owned()),
            Region::Shared | Region::Any => (fixed(self.legal.extent(Candidate::Shared)), "%shared".to_owned()),
        };
        put!(self, "sub.s32 {first}, {first}, {start};");
        put!(self, "add.s32 {first}, {first}, {};", pointer.low);
        let (from, end, step) = (self.b64(), self.b64(), self.b64());
        put!(self, "cvt.u64.u32 {from}, {first};");
        match pointer.step {
            Stride::Constant(by) => put!(self, "mov.b64 {step}, {by};"),
            Stride::Register(reg, shift) => {
                let by = self.b32();
                let reg = self.fixed(reg);
                put!(self, "mov.b32 {by}, {reg};");
                if shift > 0 {
                    put!(self, "shl.b32 {by}, {by}, {shift};");
                }
                put!(self, "cvt.s64.s32 {step}, {by};");
            }
        }
        // Both ends of what is accessed, first and last: in between it is in between.
        put!(self, "sub.s32 {times}, {rounds}, 1;");
        put!(self, "cvt.u64.u32 {last}, {times};");
        put!(self, "mul.lo.s64 {last}, {last}, {step};");
        put!(self, "add.s64 {last}, {last}, {from};");
        for end_of in [&from, &last] {
            put!(self, "add.s64 {end}, {end_of}, {};", i64::from(pointer.high) - i64::from(pointer.low));
            put!(self, "setp.le.and.u64 {ok}, {end_of}, {size}, {ok};");
            put!(self, "setp.le.and.u64 {ok}, {end}, {size}, {ok};");
        }
        put!(self, "add.s64 {from}, {from}, {device};");
        (from, step_text(pointer.step, step))
    }
}

/// A constant can be part of the instruction.
fn step_text(step: Stride, register: String) -> String {
    match step {
        Stride::Constant(by) => by.to_string(),
        Stride::Register(..) => register,
    }
}
