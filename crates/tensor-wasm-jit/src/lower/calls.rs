//! Calls: of other functions, which are inlined, of imports, and through the table.

use super::subgroups::SubgroupFunction;
use super::{Frame, Lower};
use crate::assemble::{BARRIERS_MAX, KnownValue, SHARED_BYTES_MAX};
use crate::ir::{Id, Label, Math, Op, Site, TrapKind, Ty, Un};
use crate::math::TypedFunction;
use crate::refusal::Refusal;

/// Types of values; none for what is not a number.
type Types = Vec<Option<Ty>>;

/// What an import of module `kernel` takes and returns; none if there is no such import.
fn signature(name: &str) -> Option<(Types, Types)> {
    if let Some(op) = Math::named(name) {
        return Some((vec![Some(op.from()); op.operands()], vec![Some(op.to())]));
    }
    if let Some(function) = TypedFunction::named(name) {
        return Some((vec![Some(function.ty); function.operands()], vec![Some(function.ty)]));
    }
    if let Some(function) = SubgroupFunction::named(name) {
        let (params, result) = function.signature();
        return Some((params.into_iter().map(Some).collect(), result.into_iter().map(Some).collect()));
    }
    match name {
        "barrier" => Some((Vec::new(), Vec::new())),
        "shared" => Some((vec![Some(Ty::I32)], vec![Some(Ty::I32)])),
        "sqrt_f32" => Some((vec![Some(Ty::F32)], vec![Some(Ty::F32)])),
        "sqrt_f64" | "rsqrt_f64" => Some((vec![Some(Ty::F64)], vec![Some(Ty::F64)])),
        "bf16_to_f32" => Some((vec![Some(Ty::I32)], vec![Some(Ty::F32)])),
        "f32_to_bf16" => Some((vec![Some(Ty::F32)], vec![Some(Ty::I32)])),
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
            let is_known = matches!(self.asm.known(dimension), KnownValue::Constant(_));
            let site = if is_known { Site(0) } else { self.site(frame) };
            let to = self.asm.id_of(id, dimension, site);
            frame.operands.push(to);
            return Ok(());
        }
        if let Some(op) = Math::named(name) {
            let operands = frame.operands.split_off(frame.operands.len().saturating_sub(op.operands()));
            let Some(first) = operands.first() else { return unknown(self.place(frame)) };
            let at = |n: usize| operands.get(n).copied().unwrap_or(*first);
            let to = self.asm.register(op.to());
            self.asm.push(Op::Math { op, to, operands: [at(0), at(1), at(2)] });
            frame.operands.push(to);
            return Ok(());
        }
        if let Some(function) = TypedFunction::named(name) {
            let y = frame.pop();
            let x = if function.operands() == 2 { frame.pop() } else { y };
            let site = self.site(frame);
            let to = self.asm.expand(function, x, y, site);
            frame.operands.push(to);
            return Ok(());
        }
        if let Some(function) = SubgroupFunction::named(name) {
            return self.subgroup(frame, function);
        }
        match name {
            "barrier" => {
                let site = self.site(frame);
                if !self.asm.barrier(site) {
                    let instruction = format!("more than {BARRIERS_MAX} barriers");
                    return Err(Refusal::Instruction { instruction, place: self.place(frame) });
                }
            }
            "shared" => {
                let (bytes, site) = (frame.pop(), self.site(frame));
                let KnownValue::Constant(bytes) = self.asm.known(bytes) else {
                    return Err(Refusal::Shared { bytes_max: SHARED_BYTES_MAX, place: self.place(frame) });
                };
                let Some(to) = self.asm.shared(bytes, SHARED_BYTES_MAX, site) else {
                    return Err(Refusal::Shared { bytes_max: SHARED_BYTES_MAX, place: self.place(frame) });
                };
                frame.operands.push(to);
            }
            "sqrt_f32" | "sqrt_f64" => {
                let (x, site) = (frame.pop(), self.site(frame));
                let to = self.asm.unary(if name == "sqrt_f32" { Un::F32Sqrt } else { Un::F64Sqrt }, x, site);
                frame.operands.push(to);
            }
            "rsqrt_f64" => {
                let (x, site) = (frame.pop(), self.site(frame));
                let to = self.asm.rsqrt_double(x, site);
                frame.operands.push(to);
            }
            "bf16_to_f32" | "f32_to_bf16" => {
                let (x, site) = (frame.pop(), self.site(frame));
                let widens = name == "bf16_to_f32";
                let to = if widens { self.asm.widen_bfloat(x, site) } else { self.asm.round_to_bfloat(x, site) };
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
            results.push(self.asm.register(ty));
        }
        // What is in the table that can be called so; everything else has a case that traps.
        let mut cases: Vec<u32> = Vec::new();
        let done = self.asm.label();
        let (none, wrong) = (self.asm.label(), self.asm.label());
        for function in program.table.iter().flatten() {
            let is_same = program.type_of(*function).is_some_and(|(_, own)| own == ty);
            if is_same && !cases.contains(function) {
                cases.push(*function);
            }
        }
        let case_labels: Vec<Label> = cases.iter().map(|_| self.asm.label()).collect();
        let label_of = |entry: &Option<u32>| match entry {
            None => none,
            Some(function) => match cases.iter().position(|case| case == function) {
                Some(at) => case_labels[at],
                None => wrong,
            },
        };
        let mut labels: Vec<Label> = program.table.iter().map(label_of).collect();
        labels.push(none);
        self.asm.push(Op::Block { label: done });
        for label in case_labels.iter().rev() {
            self.asm.push(Op::Block { label: *label });
        }
        self.asm.push(Op::Block { label: wrong });
        self.asm.push(Op::Block { label: none });
        self.asm.push(Op::BranchTable { index, labels });
        let site = self.site(frame);
        self.asm.push(Op::End { label: none });
        self.asm.push(Op::Trap { kind: TrapKind::NoSuchFunction, site });
        self.asm.push(Op::End { label: wrong });
        self.asm.push(Op::Trap { kind: TrapKind::WrongFunctionType, site });
        for (function, label) in cases.into_iter().zip(case_labels) {
            self.asm.push(Op::End { label });
            if program.imports.get(function as usize).is_some() {
                let instruction = "call_indirect of an import".to_owned();
                return Err(Refusal::Instruction { instruction, place: self.place(frame) });
            }
            // A table may hold what would call itself without ever doing so.
            if self.calls.contains(&function) {
                self.asm.push(Op::Trap { kind: TrapKind::Recursion, site });
                continue;
            }
            let from = self.inline(function, &arguments, frame.offset)?;
            self.asm.move_all(&results, &from);
            self.asm.push(Op::Branch { label: done });
        }
        self.asm.push(Op::End { label: done });
        frame.operands.extend(results);
        Ok(())
    }
}
