//! Branches as PTX, and the polls that loops pay for.

use std::fmt::Write as _;

use super::{FUEL, PtxEmitter};
use crate::image::{CONTROL, RECORD};
use crate::ir::{Label, Reg};

/// One poll in this many, or so, asks the host. A power of two.
const POLLS_PER_HOST_POLL: u32 = 16;

/// Jump tables from this length on are tables.
const TABLE_MIN: usize = 5;

impl PtxEmitter<'_> {
    /// A label's name. Those inside a loop that is there twice have another name each time.
    pub(super) fn name(&self, prefix: char, label: Label) -> String {
        match &self.fast {
            Some(fast) if fast.labels.contains(&label.0) => format!("{prefix}{}_{}", label.0, fast.copy),
            _ => format!("{prefix}{}", label.0),
        }
    }

    pub(super) fn loop_start(&self, label: Label) -> Option<usize> {
        self.loops.iter().find(|(own, _)| *own == label).map(|(_, at)| *at)
    }

    /// A branch, if the predicate holds where there is one. Back to a loop's beginning only while there is fuel.
    pub(super) fn branch(&mut self, n: usize, label: Label, predicate: Option<&str>) {
        let start = self.loop_start(label).filter(|_| !self.legal.is_trusted);
        let Some(start) = start else {
            let name = self.name('L', label);
            match predicate {
                Some(q) => put!(self, "@{q} bra {name};"),
                None => put!(self, "bra {name};"),
            }
            return;
        };
        let cost = u32::try_from(self.legal.cost(start, n)).unwrap_or(FUEL).clamp(1, FUEL);
        let poll = self.poll_aside(label);
        let go = self.pred();
        match predicate {
            Some(q) => {
                put!(self, "@{q} sub.s32 %fuel, %fuel, {cost};");
                put!(self, "setp.gt.and.s32 {go}, %fuel, 0, {q};");
                put!(self, "@{go} bra L{};", label.0);
                put!(self, "@{q} bra {poll};");
            }
            None => {
                put!(self, "sub.s32 %fuel, %fuel, {cost};");
                put!(self, "setp.gt.s32 {go}, %fuel, 0;");
                put!(self, "@{go} bra L{};", label.0);
                put!(self, "bra {poll};");
            }
        }
    }

    pub(super) fn branch_table(&mut self, n: usize, index: Reg, labels: &[Label]) {
        let index = self.reg(index);
        let Some((default, cases)) = labels.split_last() else { return };
        if labels.len() < TABLE_MIN {
            for (value, label) in cases.iter().enumerate() {
                let q = self.pred();
                put!(self, "setp.eq.s32 {q}, {index}, {value};");
                self.branch(n, *label, Some(&q));
            }
            self.branch(n, *default, None);
            return;
        }
        // Loops are reached by way of their fuel.
        let mut backward: Vec<Label> =
            labels.iter().filter(|label| self.loop_start(**label).is_some()).copied().collect();
        backward.sort_unstable_by_key(|label| label.0);
        backward.dedup();
        self.asides += 1;
        let number = self.asides;
        let name = |label: &Label| {
            if backward.contains(label) { format!("B{number}_{}", label.0) } else { format!("L{}", label.0) }
        };
        let names: Vec<String> = labels.iter().map(name).collect();
        let at = self.b32();
        put!(self, "min.u32 {at}, {index}, {};", labels.len() - 1);
        let _ = writeln!(self.out, "J{number}: .branchtargets {};", names.join(", "));
        put!(self, "brx.idx {at}, J{number};");
        for label in &backward {
            let _ = writeln!(self.out, "{}:", name(label));
            self.branch(n, *label, None);
        }
    }

    /// Code that looks whether the launch has to stop, and goes on with a loop if not: once for each loop, however many
    /// ways lead back to its beginning.
    pub(super) fn poll_aside(&mut self, label: Label) -> String {
        if let Some(name) = self.polls.get(&label.0) {
            return name.clone();
        }
        self.asides += 1;
        let name = format!("P{}", self.asides);
        self.poll_aside_to(&name, &format!("L{}", label.0));
        self.polls.insert(label.0, name.clone());
        name
    }

    pub(super) fn poll_aside_to(&mut self, name: &str, back: &str) {
        let main = std::mem::take(&mut self.out);
        let _ = writeln!(self.out, "{name}:");
        put!(self, "mov.b32 %fuel, {FUEL};");
        self.poll();
        self.check_limits();
        put!(self, "bra {back};");
        self.aside.push_str(&std::mem::replace(&mut self.out, main));
    }

    /// Ends the work item if the launch was stopped. One item of a warp looks at the clock: whether the launch has run
    /// for too long, and now and then whether whoever launched it wants it no more. The launch's start is the earliest
    /// time that anybody saw: a maximum over its number and the complement of the time, so that nothing has to be reset
    /// between launches.
    pub(super) fn poll(&mut self) {
        if self.handler.is_some() {
            return self.handler_poll();
        }
        let (now, packed, seen, stop) = (self.b64(), self.b64(), self.b64(), self.b64());
        let (t, late, lane, leader, q) = (self.b32(), self.b32(), self.b32(), self.b32(), self.pred());
        self.asides += 1;
        let number = self.asides;
        put!(self, "ld.relaxed.gpu.global.u64 {stop}, [%control+{}];", CONTROL.stop);
        put!(self, "setp.eq.u64 {q}, {stop}, %launch;");
        put!(self, "@{q} bra STOPPED;");
        put!(self, "activemask.b32 {leader};");
        put!(self, "brev.b32 {leader}, {leader};");
        put!(self, "clz.b32 {leader}, {leader};");
        put!(self, "mov.u32 {lane}, %laneid;");
        put!(self, "setp.ne.s32 {q}, {lane}, {leader};");
        put!(self, "@{q} bra Q{number};");
        put!(self, "mov.u64 {now}, %globaltimer;");
        put!(self, "shr.u64 {now}, {now}, {};", CONTROL.tick_shift);
        put!(self, "cvt.u32.u64 {t}, {now};");
        put!(self, "and.b32 {t}, {t}, {};", CONTROL.tick_mask);
        // Usually somebody has been here before.
        put!(self, "ld.relaxed.gpu.global.u64 {seen}, [%control+{}];", CONTROL.start);
        put!(self, "shr.u64 {packed}, {seen}, {};", CONTROL.launch_shift);
        put!(self, "setp.eq.u64 {q}, {packed}, %launch;");
        put!(self, "@{q} bra R{number};");
        put!(self, "xor.b32 {late}, {t}, {};", CONTROL.tick_mask);
        put!(self, "cvt.u64.u32 {packed}, {late};");
        put!(self, "shl.b64 {seen}, %launch, {};", CONTROL.launch_shift);
        put!(self, "or.b64 {packed}, {packed}, {seen};");
        put!(self, "atom.relaxed.gpu.global.max.u64 {seen}, [%control+{}], {packed};", CONTROL.start);
        put!(self, "max.u64 {seen}, {seen}, {packed};");
        let _ = writeln!(self.out, "R{number}:");
        put!(self, "cvt.u32.u64 {late}, {seen};");
        put!(self, "and.b32 {late}, {late}, {};", CONTROL.tick_mask);
        put!(self, "xor.b32 {late}, {late}, {};", CONTROL.tick_mask);
        put!(self, "sub.s32 {late}, {t}, {late};");
        put!(self, "and.b32 {late}, {late}, {};", CONTROL.tick_mask);
        // A moment before the earliest is no time at all.
        put!(self, "setp.gt.u32 {q}, {late}, {};", CONTROL.tick_mask / 2);
        put!(self, "selp.b32 {late}, 0, {late}, {q};");
        put!(self, "setp.gt.u32 {q}, {late}, %budget;");
        put!(self, "@{q} bra LATE;");
        // The host's memory is far away: groups take turns.
        put!(self, "mov.u32 {lane}, %ctaid.x;");
        put!(self, "xor.b32 {lane}, {lane}, {t};");
        put!(self, "and.b32 {lane}, {lane}, {};", POLLS_PER_HOST_POLL - 1);
        put!(self, "setp.ne.s32 {q}, {lane}, 0;");
        put!(self, "@{q} bra Q{number};");
        put!(self, "ld.relaxed.sys.global.u64 {stop}, [%record+{}];", RECORD.cancelled);
        put!(self, "setp.eq.u64 {q}, {stop}, %launch;");
        put!(self, "@{q} bra CANCELLED;");
        let _ = writeln!(self.out, "Q{number}:");
    }

    /// Whether the launch was stopped before this work item did anything that shows. It was asked for at the beginning,
    /// so that the answer is here by now.
    pub(super) fn look(&mut self) {
        let q = self.pred();
        put!(self, "setp.eq.u64 {q}, %stop, %launch;");
        put!(self, "@{q} bra STOPPED;");
    }

    /// Whether an access was outside its region.
    pub(super) fn check_limits(&mut self) {
        if self.legal.is_trusted {
            return;
        }
        self.checks += 1;
        // Filled in when all of them are known.
        put!(self, "CHECK;");
    }
}
