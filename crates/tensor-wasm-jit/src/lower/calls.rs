//! Calls: of other functions, which are put in their place, of imports, through the table; and the instructions on ranges of
//! memory, which are loops here.

use super::math::Function;
use super::{Frame, Known, Lower, SHARED_BYTES_MAX};
use crate::ir::{Access, Address, Bin, Id, Label, Math, Op, Reg, Site, TrapKind, Ty};
use crate::refusal::Refusal;

const BYTE: Access = Access { bytes: 1, is_signed: false };

/// Barriers of one kernel, each counted wherever it is put: a CPU has to find its way back to every one of them.
const BARRIERS_MAX: usize = 1_000;

/// Types of values; none for what is not a number.
type Types = Vec<Option<Ty>>;

/// What an import of module `kernel` takes and returns; none if there is no such import.
fn signature(name: &str) -> Option<(Types, Types)> {
    if let Some(op) = Math::named(name) {
        return Some((vec![Some(op.from()); op.operands()], vec![Some(op.to())]));
    }
    if let Some(function) = Function::named(name) {
        return Some((vec![Some(function.ty); function.operands()], vec![Some(function.ty)]));
    }
    match name {
        "barrier" => Some((Vec::new(), Vec::new())),
        "shared" => Some((vec![Some(Ty::I32)], vec![Some(Ty::I32)])),
        _ => Id::named(name).map(|_| (vec![Some(Ty::I32)], vec![Some(Ty::I32)])),
    }
}

impl Lower<'_, '_> {
    pub(super) fn call(&mut self, frame: &mut Frame, function: u32) -> Result<(), Refusal> {
        if let Some(import) = self.program.imports.get(function as usize) {
            let (module, name) = (import.module, import.name);
            let found = self.program.type_of(function).map(|(_, ty)| {
                let all = |types: &[wasmparser::ValType]| types.iter().map(|ty| Ty::of(*ty)).collect::<Vec<_>>();
                (all(ty.params()), all(ty.results()))
            });
            if module == "kernel" && !found.is_some_and(|found| signature(name).is_some_and(|own| own == found)) {
                let import = format!("{module}.{name} of this type");
                return Err(Refusal::Import { import, place: self.place(frame) });
            }
            return self.call_import(frame, module, name);
        }
        let params = self.program.type_of(function).map_or(0, |(_, ty)| ty.params().len());
        let arguments = frame.operands.split_off(frame.operands.len() - params);
        let results = self.inline(function, &arguments, frame.offset)?;
        frame.operands.extend(results);
        Ok(())
    }

    pub(super) fn call_import(&mut self, frame: &mut Frame, module: &str, name: &str) -> Result<(), Refusal> {
        let unknown = |place| Err(Refusal::Import { import: format!("{module}.{name}"), place });
        if module != "kernel" {
            return unknown(self.place(frame));
        }
        if let Some(id) = Id::named(name) {
            let dimension = frame.pop();
            let to = self.register(Ty::I32);
            self.push(Op::Id { id, to, dimension });
            frame.operands.push(to);
            return Ok(());
        }
        if let Some(op) = Math::named(name) {
            let operands = frame.operands.split_off(frame.operands.len().saturating_sub(op.operands()));
            let Some(first) = operands.first() else { return unknown(self.place(frame)) };
            let at = |n: usize| operands.get(n).copied().unwrap_or(*first);
            let to = self.register(op.to());
            self.push(Op::Math { op, to, operands: [at(0), at(1), at(2)] });
            frame.operands.push(to);
            return Ok(());
        }
        if let Some(function) = Function::named(name) {
            let y = frame.pop();
            let x = if function.operands() == 2 { frame.pop() } else { y };
            let site = self.site(frame);
            let to = self.expand(function, x, y, site);
            frame.operands.push(to);
            return Ok(());
        }
        match name {
            "barrier" => {
                self.barriers += 1;
                if self.barriers > BARRIERS_MAX {
                    let instruction = format!("more than {BARRIERS_MAX} barriers");
                    return Err(Refusal::Instruction { instruction, place: self.place(frame) });
                }
                let site = self.site(frame);
                self.push(Op::Barrier { site });
            }
            "shared" => {
                let bytes = frame.pop();
                let Known::Constant(bytes) = self.known(bytes) else {
                    return Err(Refusal::Shared { bytes_max: SHARED_BYTES_MAX, place: self.place(frame) });
                };
                let from = self.shared_bytes.next_multiple_of(16);
                let end = u32::try_from(bytes).ok().and_then(|bytes| from.checked_add(bytes));
                let Some(end) = end.filter(|end| *end <= SHARED_BYTES_MAX) else {
                    return Err(Refusal::Shared { bytes_max: SHARED_BYTES_MAX, place: self.place(frame) });
                };
                self.shared_bytes = end;
                let (base, to) = (self.register(Ty::I32), self.register(Ty::I32));
                self.push(Op::Shared { to: base });
                let from = self.constant(Ty::I32, u64::from(from));
                let site = self.site(frame);
                self.push(Op::Bin { op: Bin::I32Add, to, a: base, b: from, site });
                frame.operands.push(to);
            }
            _ => return unknown(self.place(frame)),
        }
        Ok(())
    }

    /// A call through the table: one case for each function in it that has the type.
    pub(super) fn call_indirect(&mut self, frame: &mut Frame, type_index: u32) -> Result<(), Refusal> {
        let program = self.program;
        let index = frame.pop();
        let Some(ty) = program.ty(type_index) else {
            return Err(Refusal::Module { what: format!("type {type_index}, which is not there,") });
        };
        let arguments = frame.operands.split_off(frame.operands.len() - ty.params().len());
        let mut results = Vec::new();
        for ty in ty.results() {
            let Some(ty) = Ty::of(*ty) else {
                let instruction = "call_indirect of a result that is not a number".to_owned();
                return Err(Refusal::Instruction { instruction, place: self.place(frame) });
            };
            results.push(self.register(ty));
        }
        // What is in the table that can be called so; everything else has a case that traps.
        let mut cases: Vec<u32> = Vec::new();
        let done = self.label();
        let (none, wrong) = (self.label(), self.label());
        for function in program.table.iter().flatten() {
            let is_same = program.type_of(*function).is_some_and(|(_, own)| own == ty);
            if is_same && !cases.contains(function) {
                cases.push(*function);
            }
        }
        let case_labels: Vec<Label> = cases.iter().map(|_| self.label()).collect();
        let label_of = |entry: &Option<u32>| match entry {
            None => none,
            Some(function) => match cases.iter().position(|case| case == function) {
                Some(at) => case_labels[at],
                None => wrong,
            },
        };
        let mut labels: Vec<Label> = program.table.iter().map(label_of).collect();
        labels.push(none);
        self.push(Op::Block { label: done });
        for label in case_labels.iter().rev() {
            self.push(Op::Block { label: *label });
        }
        self.push(Op::Block { label: wrong });
        self.push(Op::Block { label: none });
        self.push(Op::BranchTable { index, labels });
        let site = self.site(frame);
        self.push(Op::End { label: none });
        self.push(Op::Trap { kind: TrapKind::NoSuchFunction, site });
        self.push(Op::End { label: wrong });
        self.push(Op::Trap { kind: TrapKind::WrongFunctionType, site });
        for (function, label) in cases.into_iter().zip(case_labels) {
            self.push(Op::End { label });
            if program.imports.get(function as usize).is_some() {
                let instruction = "call_indirect of an import".to_owned();
                return Err(Refusal::Instruction { instruction, place: self.place(frame) });
            }
            // A table may hold what would call itself without ever doing so.
            if self.calls.contains(&function) {
                self.push(Op::Trap { kind: TrapKind::Recursion, site });
                continue;
            }
            let from = self.inline(function, &arguments, frame.offset)?;
            self.move_all(&results, &from);
            self.push(Op::Branch { label: done });
        }
        self.push(Op::End { label: done });
        frame.operands.extend(results);
        Ok(())
    }

    /// `for n in 0..count { to[n] = value }`, a byte at a time.
    pub(super) fn memory_fill(&mut self, frame: &mut Frame) {
        let (count, value, to) = (frame.pop(), frame.pop(), frame.pop());
        let site = self.site(frame);
        self.push(Op::CheckRange { start: to, count, is_write: true, site });
        let n = self.register(Ty::I32);
        self.push(Op::Const { to: n, bits: 0 });
        self.counted(n, count, site, |lower| {
            let at = lower.add(to, n, site);
            lower.push(Op::Store { access: BYTE, at: Address { base: at, offset: 0 }, value, site });
        });
    }

    /// A byte at a time, from the end that does not overwrite what is still to be read.
    pub(super) fn memory_copy(&mut self, frame: &mut Frame) {
        let (count, from, to) = (frame.pop(), frame.pop(), frame.pop());
        let site = self.site(frame);
        self.push(Op::CheckRange { start: from, count, is_write: false, site });
        self.push(Op::CheckRange { start: to, count, is_write: true, site });
        let (n, is_upward) = (self.register(Ty::I32), self.register(Ty::I32));
        self.push(Op::Const { to: n, bits: 0 });
        self.push(Op::Bin { op: Bin::I32LeU, to: is_upward, a: to, b: from, site });
        let one = self.constant(Ty::I32, 1);
        let last = self.register(Ty::I32);
        self.push(Op::Bin { op: Bin::I32Sub, to: last, a: count, b: one, site });
        self.counted(n, count, site, |lower| {
            let (down, at) = (lower.register(Ty::I32), lower.register(Ty::I32));
            lower.push(Op::Bin { op: Bin::I32Sub, to: down, a: last, b: n, site });
            lower.push(Op::Select { to: at, condition: is_upward, a: n, b: down });
            let byte = lower.register(Ty::I32);
            let source = lower.add(from, at, site);
            lower.push(Op::Load { to: byte, access: BYTE, at: Address { base: source, offset: 0 }, site });
            let target = lower.add(to, at, site);
            lower.push(Op::Store { access: BYTE, at: Address { base: target, offset: 0 }, value: byte, site });
        });
    }

    pub(super) fn add(&mut self, a: Reg, b: Reg, site: Site) -> Reg {
        let to = self.register(Ty::I32);
        self.push(Op::Bin { op: Bin::I32Add, to, a, b, site });
        to
    }

    /// A loop with a counter `n`, from what it is to `count`.
    pub(super) fn counted(&mut self, n: Reg, count: Reg, site: Site, body: impl FnOnce(&mut Self)) {
        let (out, again) = (self.label(), self.label());
        self.push(Op::Block { label: out });
        self.push(Op::Loop { label: again });
        let is_over = self.register(Ty::I32);
        self.push(Op::Bin { op: Bin::I32GeU, to: is_over, a: n, b: count, site });
        self.push(Op::BranchIf { condition: is_over, label: out });
        body(self);
        let one = self.constant(Ty::I32, 1);
        let next = self.add(n, one, site);
        self.push(Op::Move { to: n, from: next });
        self.push(Op::Branch { label: again });
        self.push(Op::End { label: again });
        self.push(Op::End { label: out });
    }
}
