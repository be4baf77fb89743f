//! What stands around a kernel's operations: its parameters, declarations, what each work item does first, and where
//! traps end up.

use std::fmt::Write as _;

use super::{FUEL, GROUPS_PER_POLL, PtxEmitter, RegionLimit, TEMPS, entry_name, is_dynamic, param_type, target};
use crate::image::{CONTROL, RECORD};
use crate::ir::{Region, TrapKind};
use crate::legalize::Candidate;

impl PtxEmitter<'_> {
    pub(super) fn finish(mut self) -> String {
        let body = self.body;
        let code = std::mem::take(&mut self.out);
        let asides = std::mem::take(&mut self.aside);
        match self.handler {
            Some(handler) => self.handler_prologue(handler),
            None => self.prologue(),
        }
        let prologue = std::mem::take(&mut self.out);
        let check = self.check_text();
        self.epilogue();
        let epilogue = std::mem::take(&mut self.out);
        let whole = prologue + &code.replace("\tCHECK;\n", &check) + &asides.replace("\tCHECK;\n", &check) + &epilogue;
        let whole = match self.handler {
            Some(handler) => self.lane_around(handler, &whole),
            None => whole,
        };
        let mut text = String::with_capacity(whole.len() + whole.len() / 4);
        let _ = writeln!(text, "// {}", body.name.escape_default());
        let _ = writeln!(text, "{}\n.address_size 64\n", target(body).header());
        if is_dynamic(body) {
            // How much is a comment to a device, and read by the emulator.
            let _ = writeln!(text, ".extern .shared .align 1024 .b8 shared[]; // {} bytes", body.shared_bytes);
        }
        if !body.data.is_empty() {
            let bytes: Vec<String> = body.data.iter().map(u8::to_string).collect();
            let _ = writeln!(text, ".global .align 16 .b8 data[{}] = {{{}}};", bytes.len(), bytes.join(", "));
        }
        let _ = writeln!(text, ".visible .entry {}(\n{}\n)\n{{", entry_name(&body.name), self.param_list());
        self.declarations(&mut text);
        text.push_str(&whole);
        text.push_str("}\n");
        text
    }

    fn param_list(&self) -> String {
        if self.handler.is_some() {
            return Self::executor_params();
        }
        let mut params = Vec::new();
        for (n, (reg, is_window)) in self.body.params.iter().zip(self.windows).enumerate() {
            if *is_window && self.legal.is_trusted {
                params.push(format!("\t.param .u64 window{n}"));
            } else if *is_window {
                params.push(format!("\t.param .u64 window{n}"));
                params.push(format!("\t.param .u32 start{n}"));
                params.push(format!("\t.param .u32 size{n}"));
            } else {
                params.push(format!("\t.param .{} p{n}", param_type(self.body.ty(*reg))));
            }
        }
        let fixed = [".u64 control", ".u64 record", ".u64 launch", ".u32 budget"];
        for fixed in fixed.iter().filter(|_| !self.legal.is_trusted) {
            params.push(format!("\t.param {fixed}"));
        }
        params.join(",\n")
    }

    fn declarations(&self, text: &mut String) {
        let body = self.body;
        let shared_bytes = if self.handler.is_some() { self.actor_shared_bytes() } else { body.shared_bytes };
        if shared_bytes > 0 && !is_dynamic(body) {
            let _ = writeln!(text, "\t.shared .align 16 .b8 shared[{}];", shared_bytes.next_multiple_of(16));
        }
        if body.stack_bytes > 0 {
            let _ = writeln!(text, "\t.local .align 16 .b8 stack[{}];", body.stack_bytes);
        }
        let count = body.types.len();
        let _ = writeln!(text, "\t.reg .b32 %r<{count}>;\n\t.reg .b64 %l<{count}>;");
        let _ = writeln!(text, "\t.reg .f32 %f<{count}>;\n\t.reg .f64 %d<{count}>;");
        for ((prefix, ty), count) in TEMPS.iter().zip(self.temps) {
            let _ = writeln!(text, "\t.reg {ty} {prefix}<{}>;", count.max(1));
        }
        let limits = self.limits.len().max(1);
        let windows = self.windows.len().max(1);
        let _ = writeln!(text, "\t.reg .b32 %base<{limits}>, %limit<{limits}>, %worst<{limits}>;");
        let _ = writeln!(text, "\t.reg .b64 %window<{windows}>, %start<{windows}>, %size<{windows}>;");
        let _ = writeln!(
            text,
            "\t.reg .b64 %control, %record, %launch, %stop, %stack, %shared, %gstack, %gshared, %gdata;"
        );
        let _ = writeln!(text, "\t.reg .b32 %fuel, %budget, %kind, %site, %which;");
        if self.handler.is_some() {
            let _ = writeln!(text, "\t.reg .b64 %gwindow<{windows}>;");
        }
    }

    fn prologue(&mut self) {
        let body = self.body;
        if self.legal.is_trusted {
            return self.trusted_prologue();
        }
        put!(self, "ld.param.u64 %control, [control];");
        put!(self, "ld.param.u64 %record, [record];");
        put!(self, "ld.param.u64 %launch, [launch];");
        put!(self, "ld.param.u32 %budget, [budget];");
        if self.look_before < body.ops.len() {
            // One of several copies: every warp of a launch reads it.
            let (copy, address) = (self.b32(), self.b64());
            put!(self, "mov.u32 {copy}, %ctaid.x;");
            put!(self, "and.b32 {copy}, {copy}, {};", CONTROL.stop_copies - 1);
            put!(self, "mul.wide.u32 {address}, {copy}, {};", CONTROL.stop_stride);
            put!(self, "add.s64 {address}, {address}, %control;");
            put!(self, "ld.relaxed.gpu.global.u64 %stop, [{address}+{}];", CONTROL.stop);
        }
        put!(self, "mov.b32 %fuel, {FUEL};");
        for (n, (reg, is_window)) in body.params.iter().zip(self.windows).enumerate() {
            let name = self.reg(*reg);
            if *is_window {
                let size = self.b32();
                put!(self, "ld.param.u64 %window{n}, [window{n}];");
                put!(self, "ld.param.u32 {name}, [start{n}];");
                put!(self, "cvt.u64.u32 %start{n}, {name};");
                put!(self, "ld.param.u32 {size}, [size{n}];");
                put!(self, "cvt.u64.u32 %size{n}, {size};");
            } else {
                put!(self, "ld.param.{} {name}, [p{n}];", param_type(body.ty(*reg)));
            }
        }
        if body.stack_bytes > 0 {
            put!(self, "mov.u64 %stack, stack;");
            put!(self, "cvta.local.u64 %gstack, %stack;");
        }
        if body.shared_bytes > 0 {
            put!(self, "mov.u64 %shared, shared;");
            put!(self, "cvta.shared.u64 %gshared, %shared;");
        }
        if !body.data.is_empty() {
            put!(self, "mov.u64 %gdata, data;");
        }
        self.zero();
        for n in 0..self.limits.len() {
            self.set_limit(n);
        }
        if self.look_before < body.ops.len() {
            self.first_poll();
        }
    }

    /// Windows begin at 0 of their own: no address is of any other.
    fn trusted_prologue(&mut self) {
        let body = self.body;
        for (n, (reg, is_window)) in body.params.iter().zip(self.windows).enumerate() {
            let name = self.reg(*reg);
            if *is_window {
                put!(self, "ld.param.u64 %window{n}, [window{n}];");
                put!(self, "mov.b32 {name}, 0;");
            } else {
                put!(self, "ld.param.{} {name}, [p{n}];", param_type(body.ty(*reg)));
            }
        }
        if body.shared_bytes > 0 {
            put!(self, "mov.u64 %shared, shared;");
        }
    }

    /// Shared memory and the stack hold what an earlier launch left there, anybody's: they begin as zeros.
    fn zero(&mut self) {
        self.zero_stack();
        if self.body.shared_bytes > 0 {
            // The items of a group share the work.
            let (number, count, part, at, step) = (self.b32(), self.b32(), self.b32(), self.b64(), self.b64());
            put!(self, "mov.u32 {number}, %tid.z;");
            put!(self, "mov.u32 {count}, %ntid.z;");
            for axis in ['y', 'x'] {
                let size = self.b32();
                put!(self, "mov.u32 {size}, %ntid.{axis};");
                put!(self, "mov.u32 {part}, %tid.{axis};");
                put!(self, "mad.lo.s32 {number}, {number}, {size}, {part};");
                put!(self, "mul.lo.s32 {count}, {count}, {size};");
            }
            put!(self, "mul.wide.u32 {at}, {number}, 8;");
            put!(self, "mul.wide.u32 {step}, {count}, 8;");
            self.zero_shared(&at, &step);
            put!(self, "barrier.sync 0;");
        }
    }

    pub(super) fn zero_stack(&mut self) {
        let bytes = self.body.stack_bytes;
        if bytes == 0 {
            return;
        }
        let (at, here, q) = (self.b64(), self.b64(), self.pred());
        put!(self, "mov.b64 {at}, 0;");
        let _ = writeln!(self.out, "ZERO_STACK:");
        put!(self, "add.s64 {here}, {at}, %stack;");
        put!(self, "st.local.u64 [{here}], 0;");
        put!(self, "add.s64 {at}, {at}, 8;");
        put!(self, "setp.lt.u64 {q}, {at}, {bytes};");
        put!(self, "@{q} bra ZERO_STACK;");
    }

    /// The part of the group's shared memory that is this item's: from an offset on, in steps.
    pub(super) fn zero_shared(&mut self, at: &str, step: &str) {
        let (here, q, bytes) = (self.b64(), self.pred(), self.body.shared_bytes);
        put!(self, "setp.lt.u64 {q}, {at}, {bytes};");
        put!(self, "@!{q} bra ZEROED;");
        let _ = writeln!(self.out, "ZERO_SHARED:");
        put!(self, "add.s64 {here}, {at}, %shared;");
        put!(self, "st.shared.u64 [{here}], 0;");
        put!(self, "add.s64 {at}, {at}, {step};");
        put!(self, "setp.lt.u64 {q}, {at}, {bytes};");
        put!(self, "@{q} bra ZERO_SHARED;");
        let _ = writeln!(self.out, "ZEROED:");
    }

    pub(super) fn set_limit(&mut self, n: usize) {
        let RegionLimit { region, bytes, multiple, .. } = self.limits[n];
        put!(self, "mov.b32 %worst{n}, 0;");
        let (start, size) = match region {
            Region::Window(window) | Region::SmallWindow(window) => {
                let size = self.b32();
                put!(self, "cvt.u32.u64 %base{n}, %start{window};");
                put!(self, "cvt.u32.u64 {size}, %size{window};");
                // A launch sees to it that this much is there.
                put!(self, "sub.s32 %limit{n}, {size}, {bytes};");
                if multiple > 1 {
                    put!(self, "and.b32 %limit{n}, %limit{n}, {};", (!(multiple - 1)).cast_signed());
                }
                return;
            }
            Region::Stack => self.legal.extent(Candidate::Stack),
            Region::Shared => self.legal.extent(Candidate::Shared),
            // Has no limit of its own.
            Region::Any => (0, 0),
        };
        // Where nothing fits, every offset is too large.
        let (start, limit) = match size.checked_sub(bytes) {
            Some(limit) => (start, limit & !(multiple - 1)),
            None => (start ^ 1 << 31, 0),
        };
        put!(self, "mov.b32 %base{n}, {};", start.cast_signed());
        put!(self, "mov.b32 %limit{n}, {};", limit.cast_signed());
    }

    /// The first work item of some groups polls as it begins; of a small launch none does.
    fn first_poll(&mut self) {
        let (x, y, z, q) = (self.b32(), self.b32(), self.b32(), self.pred());
        put!(self, "mov.u32 {x}, %tid.x;");
        put!(self, "mov.u32 {y}, %tid.y;");
        put!(self, "mov.u32 {z}, %tid.z;");
        put!(self, "or.b32 {x}, {x}, {y};");
        put!(self, "or.b32 {x}, {x}, {z};");
        put!(self, "mov.u32 {y}, %ctaid.x;");
        put!(self, "and.b32 {y}, {y}, {};", GROUPS_PER_POLL - 1);
        put!(self, "xor.b32 {y}, {y}, {};", GROUPS_PER_POLL - 1);
        put!(self, "or.b32 {x}, {x}, {y};");
        put!(self, "setp.ne.s32 {q}, {x}, 0;");
        put!(self, "@{q} bra BEGIN;");
        self.poll();
        let _ = writeln!(self.out, "BEGIN:");
    }

    fn check_text(&mut self) -> String {
        let mut text = String::new();
        if self.limits.is_empty() {
            return text;
        }
        for n in 0..self.limits.len() {
            let q = self.pred();
            let _ = writeln!(text, "\tsetp.gt.u32 {q}, %worst{n}, %limit{n};\n\t@{q} bra BAD_{n};");
        }
        text
    }

    /// Where traps end up: one of a launch writes the record.
    fn epilogue(&mut self) {
        if self.legal.is_trusted {
            for n in 0..self.traps.len() {
                let _ = writeln!(self.out, "TRAP_{n}:");
            }
            put!(self, "exit;");
            return;
        }
        for n in 0..self.limits.len() {
            let RegionLimit { region, site, .. } = self.limits[n];
            let which = match region {
                Region::Window(window) | Region::SmallWindow(window) => u32::from(window),
                Region::Stack => RECORD.stack,
                Region::Shared => RECORD.shared,
                Region::Any => RECORD.nothing,
            };
            let _ = writeln!(self.out, "BAD_{n}:");
            put!(self, "mov.b32 %kind, {};", TrapKind::OutOfBounds as u32);
            put!(self, "mov.b32 %site, {};", site.0);
            put!(self, "mov.b32 %which, {which};");
            put!(self, "mov.b32 %fuel, %worst{n};");
            put!(self, "bra TRAP;");
        }
        let traps = std::mem::take(&mut self.traps);
        for (n, (kind, site)) in traps.iter().enumerate() {
            let _ = writeln!(self.out, "TRAP_{n}:");
            put!(self, "mov.b32 %kind, {};", *kind as u32);
            put!(self, "mov.b32 %site, {};", site.0);
            put!(self, "mov.b32 %which, {};", RECORD.nothing.cast_signed());
            put!(self, "bra TRAP;");
        }
        for (label, kind) in [("LATE", TrapKind::Deadline), ("CANCELLED", TrapKind::Cancelled)] {
            let _ = writeln!(self.out, "{label}:");
            put!(self, "mov.b32 %kind, {};", kind as u32);
            put!(self, "mov.b32 %site, 0;");
            put!(self, "mov.b32 %which, {};", RECORD.nothing.cast_signed());
            put!(self, "bra TRAP;");
        }
        let _ = writeln!(self.out, "TRAP:");
        if self.handler.is_some() {
            return self.handler_trap();
        }
        let (old, q, part) = (self.b64(), self.pred(), self.b32());
        // Only the first writes the record; everybody is told to stop.
        put!(self, "atom.relaxed.gpu.global.exch.b64 {old}, [%control+{}], %launch;", CONTROL.trapped);
        for copy in 0..CONTROL.stop_copies {
            let at = CONTROL.stop + copy * CONTROL.stop_stride;
            put!(self, "st.relaxed.gpu.global.u64 [%control+{at}], %launch;");
        }
        put!(self, "setp.eq.u64 {q}, {old}, %launch;");
        put!(self, "@{q} bra STOPPED;");
        put!(self, "st.global.u32 [%record+{}], %kind;", RECORD.kind);
        put!(self, "st.global.u32 [%record+{}], %site;", RECORD.site);
        put!(self, "st.global.u32 [%record+{}], %which;", RECORD.which);
        put!(self, "st.global.u32 [%record+{}], %fuel;", RECORD.offset);
        let axes = ['x', 'y', 'z'];
        for (n, (register, axis)) in ["ctaid", "tid"].iter().flat_map(|r| axes.map(|axis| (r, axis))).enumerate() {
            put!(self, "mov.u32 {part}, %{register}.{axis};");
            put!(self, "st.global.u32 [%record+{}], {part};", RECORD.ids + 4 * u32::try_from(n).unwrap_or(0));
        }
        put!(self, "fence.sc.sys;");
        put!(self, "st.relaxed.sys.global.u64 [%record+{}], %launch;", RECORD.launch);
        let _ = writeln!(self.out, "STOPPED:");
        put!(self, "exit;");
    }
}
