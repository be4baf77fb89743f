//! The function that runs work items: loops over groups and over the items of each, around the kernel's operations.

use std::collections::HashMap;

use wasm_encoder::{BlockType, Function, Instruction, MemArg, ValType};

use super::barriers::{Barriers, DONE};
use super::locals::Locals;
use super::memory::{AccessKind, OWN, load};
use super::subgroups::{AT_FUNCTION, Meeting, SubgroupLocals};
use super::{CALL, OwnMemory, POLL};
use crate::facts::Facts;
use crate::image::RECORD;
use crate::ir::{
    Access, Axis, Bin, Body, Flow, Id, Label, Least, Math, Op, Reg, Region, SHARED_ADDRESS, Site, Structure, Test,
    TrapKind, Ty, Un, low_half,
};
use crate::legalize::Legal;

/// Operations that are done between two polls: about a millisecond.
const FUEL: i32 = 1 << 21;

/// Limits of windows that are computed before the first item; others are computed where they are needed.
const LIMITS_MAX: usize = 64;

/// Filling memory is a call, which costs as much as this many bytes one by one.
const ZEROED_BY_STORES_MAX: u32 = 256;

/// Traps that end up at the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrapClass {
    Kind(TrapKind),
    Outside(Region),
}

/// Locals that belong to no register.
pub(super) struct ReservedLocals {
    item: [u32; 3],
    group: [u32; 3],
    items: [u32; 3],
    groups: [u32; 3],
    /// The first item's number in the launch, of this group.
    base: [u32; 3],
    /// The item's number in its group, and how many there are.
    pub number: u32,
    pub count: u32,
    left: u32,
    /// Operations until the next poll.
    fuel: u32,
    site: u32,
    kind: u32,
    pub which: u32,
    pub offset: u32,
    pub found: u32,
    pub stack: u32,
    /// Of a kernel with barriers: where the item's context is, the barrier it is on its way to, whether any item waits.
    pub context: u32,
    pub resume: u32,
    pub waiting: u32,
    pub subgroups: Option<SubgroupLocals>,
}

pub(super) struct HostEmitter<'b> {
    pub legal: &'b Legal,
    pub body: &'b Body,
    pub facts: &'b Facts,
    pub locals: Locals,
    pub own: ReservedLocals,
    pub barriers: Barriers,
    /// Where shared memory is in the thread's own memory.
    pub shared: u32,
    pub context_bytes: u32,
    /// Ends of stretches and blocks that are skipped on the way to a barrier.
    pub skips: Vec<usize>,
    pub guarded: Vec<usize>,
    code: Vec<Instruction<'static>>,
    /// What a branch may go to, from the outermost in.
    open: Vec<BranchTarget>,
    classes: Vec<TrapClass>,
    /// Windows' sizes less what an access needs, in locals.
    limits: HashMap<(u16, u32), u32>,
    limits_order: Vec<(u16, u32)>,
    starts: HashMap<u32, usize>,
    /// Operations of each loop.
    lengths: HashMap<u32, i32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BranchTarget {
    Label(u32),
    TrapClass(usize),
    Record,
    /// The end of an item, and of its turn.
    Item,
    Turn,
    /// The loops over items, by what they count.
    Items(u32),
    Phases,
    Groups,
    Nothing,
}

/// The function, and the bytes of a context.
pub(super) fn run(legal: &Legal, plan: &OwnMemory) -> (Function, u32) {
    let Legal { body, facts, windows, .. } = legal;
    let mut locals = Locals::of(body, facts);
    let mut i32s = || locals.own(ValType::I32);
    let mut three = || [i32s(), i32s(), i32s()];
    let (item, group, items, groups, base) = (three(), three(), three(), three(), three());
    let own = ReservedLocals {
        item,
        group,
        items,
        groups,
        base,
        number: i32s(),
        count: i32s(),
        fuel: i32s(),
        site: i32s(),
        kind: i32s(),
        which: i32s(),
        offset: i32s(),
        stack: i32s(),
        context: i32s(),
        resume: i32s(),
        waiting: i32s(),
        subgroups: body.has_subgroups().then(|| SubgroupLocals { turn: i32s(), is_meeting: i32s(), had_met: i32s() }),
        left: locals.own(ValType::I64),
        found: locals.own(ValType::I64),
    };
    let mut classes: Vec<TrapClass> = TrapKind::ALL.into_iter().map(TrapClass::Kind).collect();
    let numbers = (0..u16::MAX).zip(windows).filter(|(_, is_window)| **is_window);
    classes.extend(numbers.map(|(n, _)| TrapClass::Outside(Region::Window(n))));
    classes.extend([TrapClass::Outside(Region::Stack), TrapClass::Outside(Region::Shared)]);
    let barriers = Barriers::of(body);
    let mut emitter = HostEmitter {
        legal,
        body,
        facts,
        context_bytes: barriers.context_bytes(body, &locals),
        locals,
        own,
        barriers,
        shared: plan.shared,
        skips: Vec::new(),
        guarded: Vec::new(),
        code: Vec::new(),
        open: Vec::new(),
        classes,
        limits: HashMap::new(),
        limits_order: Vec::new(),
        starts: HashMap::new(),
        lengths: lengths(legal),
    };
    emitter.whole();
    let body_code = std::mem::take(&mut emitter.code);
    emitter.prologue();
    let HostEmitter { locals, code: prologue, context_bytes, .. } = emitter;
    let mut function = Function::new(locals.types.iter().map(|ty| (1, *ty)));
    for instruction in prologue.iter().chain(&body_code) {
        function.instruction(instruction);
    }
    function.instruction(&Instruction::End);
    (function, context_bytes)
}

impl HostEmitter<'_> {
    pub(super) fn put(&mut self, instruction: Instruction<'static>) {
        self.code.push(instruction);
    }

    pub(super) fn i32(&mut self, value: i32) {
        self.put(Instruction::I32Const(value));
    }

    pub(super) fn local_get(&mut self, local: u32) {
        self.put(Instruction::LocalGet(local));
    }

    pub(super) fn local_set(&mut self, local: u32) {
        self.put(Instruction::LocalSet(local));
    }

    pub(super) fn local_tee(&mut self, local: u32) {
        self.put(Instruction::LocalTee(local));
    }

    /// Pushes a register, as one number.
    pub(super) fn get(&mut self, reg: Reg) {
        let (known, ty) = (self.facts.constant(reg), self.body.ty(reg));
        let Some(local) = self.locals.slot(reg).filter(|_| known.is_none()) else {
            return self.constant(ty, known.unwrap_or(0));
        };
        self.local_get(local);
        match ty {
            Ty::F32 if self.is_wide(ty) => self.put(Instruction::F32x4ExtractLane(0)),
            Ty::F64 if self.is_wide(ty) => self.put(Instruction::F64x2ExtractLane(0)),
            Ty::I32 | Ty::I64 | Ty::F32 | Ty::F64 => {}
        }
    }

    fn is_wide(&self, ty: Ty) -> bool {
        self.locals.wide.is(ty)
    }

    /// Pushes a register as it is held.
    fn get_held(&mut self, reg: Reg) {
        let (known, ty) = (self.facts.constant(reg), self.body.ty(reg));
        match self.locals.slot(reg).filter(|_| known.is_none()) {
            Some(local) => self.local_get(local),
            None if self.is_wide(ty) => {
                let bits = known.unwrap_or(0);
                let half = u128::from(bits) & u128::from(u32::MAX);
                let all = match ty {
                    Ty::F32 => half | half << 32 | half << 64 | half << 96,
                    Ty::I32 | Ty::I64 | Ty::F64 => u128::from(bits) | u128::from(bits) << 64,
                };
                self.put(Instruction::V128Const(all.cast_signed()));
            }
            None => self.constant(ty, known.unwrap_or(0)),
        }
    }

    /// Sets a register to what was pushed as it is held.
    fn set_held(&mut self, reg: Reg) {
        match self.locals.slot(reg) {
            Some(local) => self.local_set(local),
            None => self.put(Instruction::Drop),
        }
    }

    fn constant(&mut self, ty: Ty, bits: u64) {
        match ty {
            Ty::I32 => self.i32(low_half(bits).cast_signed()),
            Ty::I64 => self.put(Instruction::I64Const(bits.cast_signed())),
            Ty::F32 => self.put(Instruction::F32Const(f32::from_bits(low_half(bits)).into())),
            Ty::F64 => self.put(Instruction::F64Const(f64::from_bits(bits).into())),
        }
    }

    /// Sets a register to one number, which was pushed.
    pub(super) fn set(&mut self, reg: Reg) {
        match self.body.ty(reg) {
            Ty::F32 if self.is_wide(Ty::F32) => self.put(Instruction::F32x4Splat),
            Ty::F64 if self.is_wide(Ty::F64) => self.put(Instruction::F64x2Splat),
            Ty::I32 | Ty::I64 | Ty::F32 | Ty::F64 => {}
        }
        self.set_held(reg);
    }

    /// Sets a register to what is loaded from an address, which was pushed.
    pub(super) fn load_to(&mut self, reg: Reg, access: Access, at: MemArg) {
        match self.body.ty(reg) {
            Ty::F32 if self.is_wide(Ty::F32) => self.put(Instruction::V128Load32Splat(at)),
            Ty::F64 if self.is_wide(Ty::F64) => self.put(Instruction::V128Load64Splat(at)),
            ty @ (Ty::I32 | Ty::I64 | Ty::F32 | Ty::F64) => self.put(load(ty, access, at)),
        }
        self.set_held(reg);
    }

    /// Opens a block that branches to a label may go to.
    pub(super) fn open(&mut self, instruction: Instruction<'static>, label: Option<Label>) {
        self.put(instruction);
        self.open.push(label.map_or(BranchTarget::Nothing, |label| BranchTarget::Label(label.0)));
    }

    fn open_as(&mut self, instruction: Instruction<'static>, target: BranchTarget) {
        self.put(instruction);
        self.open.push(target);
    }

    pub(super) fn close(&mut self) {
        self.put(Instruction::End);
        self.open.pop();
    }

    fn depth(&self, target: BranchTarget) -> u32 {
        let found = self.open.iter().rev().position(|open| *open == target);
        u32::try_from(found.unwrap_or(0)).unwrap_or(0)
    }

    pub(super) fn set_site(&mut self, site: Site) {
        self.i32(site.0.cast_signed());
        self.local_set(self.own.site);
    }

    /// Traps if what was pushed is not zero, at the site that was set.
    pub(super) fn trap_if(&mut self, class: TrapClass) {
        let at = self.classes.iter().position(|own| *own == class).unwrap_or(0);
        let depth = self.depth(BranchTarget::TrapClass(at));
        self.put(Instruction::BrIf(depth));
    }

    fn trap(&mut self, kind: TrapKind, site: Site) {
        self.set_site(site);
        self.i32(1);
        self.trap_if(TrapClass::Kind(kind));
        self.put(Instruction::Unreachable);
    }

    /// Ends the turn of an item that waits.
    pub(super) fn suspend(&mut self) {
        let depth = self.depth(BranchTarget::Turn);
        self.put(Instruction::Br(depth));
    }

    /// The local with a window's size less what an access needs.
    pub(super) fn limit(&mut self, window: u16, bytes: u32) -> u32 {
        if let Some(local) = self.limits.get(&(window, bytes)) {
            return *local;
        }
        if self.limits.len() < LIMITS_MAX {
            let local = self.locals.own(ValType::I64);
            self.limits.insert((window, bytes), local);
            self.limits_order.push((window, bytes));
            return local;
        }
        self.push_limit(window, bytes);
        self.local_set(self.own.found);
        self.own.found
    }

    fn push_limit(&mut self, window: u16, bytes: u32) {
        self.i32(0);
        let at = CALL.params + CALL.param_bytes * u32::from(window) + 4;
        self.put(Instruction::I64Load32U(word(at)));
        self.put(Instruction::I64Const(i64::from(bytes)));
        self.put(Instruction::I64Sub);
    }

    /// Loads a number of what the function is called with.
    fn load_call(&mut self, at: u32, local: u32) {
        self.i32(0);
        self.put(Instruction::I32Load(word(at)));
        self.local_set(local);
    }

    fn prologue(&mut self) {
        for axis in 0..3 {
            let at = u32::try_from(4 * axis).unwrap_or(0);
            self.load_call(CALL.items + at, self.own.items[axis]);
            self.load_call(CALL.groups + at, self.own.groups[axis]);
        }
        for (n, reg) in self.body.params.iter().enumerate() {
            let at = CALL.params + CALL.param_bytes * u32::try_from(n).unwrap_or(0);
            self.i32(0);
            let ty = self.body.ty(*reg);
            let place = MemArg { offset: u64::from(at), align: ty.bytes().trailing_zeros(), memory_index: OWN };
            self.put(match ty {
                Ty::I32 => Instruction::I32Load(place),
                Ty::I64 => Instruction::I64Load(place),
                Ty::F32 => Instruction::F32Load(place),
                Ty::F64 => Instruction::F64Load(place),
            });
            self.set(*reg);
        }
        for (window, bytes) in std::mem::take(&mut self.limits_order) {
            self.push_limit(window, bytes);
            if let Some(local) = self.limits.get(&(window, bytes)).copied() {
                self.local_set(local);
            }
        }
        self.i32(FUEL);
        self.local_set(self.own.fuel);
        self.load_call(CALL.stacks, self.own.stack);
        // How many items a group has, and how many groups there are to be run.
        let [x, y, z] = self.own.items;
        self.local_get(x);
        self.local_get(y);
        self.put(Instruction::I32Mul);
        self.local_get(z);
        self.put(Instruction::I32Mul);
        self.local_set(self.own.count);
        self.i32(0);
        self.put(Instruction::I64Load(MemArg { offset: u64::from(CALL.count), align: 3, memory_index: OWN }));
        self.local_set(self.own.left);
        // The first group's three numbers.
        let [nx, ny, _] = self.own.groups;
        let [gx, gy, gz] = self.own.group;
        let first = MemArg { offset: u64::from(CALL.first), align: 3, memory_index: OWN };
        for (sizes, local) in [(&[][..], gx), (&[nx], gy), (&[nx, ny], gz)] {
            self.i32(0);
            self.put(Instruction::I64Load(first));
            for size in sizes {
                self.local_get(*size);
                self.put(Instruction::I64ExtendI32U);
                self.put(Instruction::I64DivU);
            }
            if local != gz {
                self.local_get(if local == gx { nx } else { ny });
                self.put(Instruction::I64ExtendI32U);
                self.put(Instruction::I64RemU);
            }
            self.put(Instruction::I32WrapI64);
            self.local_set(local);
        }
    }

    fn whole(&mut self) {
        self.open_as(Instruction::Block(BlockType::Empty), BranchTarget::Record);
        for class in (0..self.classes.len()).rev() {
            self.open_as(Instruction::Block(BlockType::Empty), BranchTarget::TrapClass(class));
        }
        self.groups();
        self.i32(0);
        self.put(Instruction::Return);
        for (n, class) in self.classes.clone().into_iter().enumerate() {
            debug_assert_eq!(self.open.last(), Some(&BranchTarget::TrapClass(n)));
            self.close();
            let (kind, which) = match class {
                TrapClass::Kind(kind) => (kind, RECORD.nothing),
                TrapClass::Outside(Region::Window(n) | Region::SmallWindow(n)) => (TrapKind::OutOfBounds, u32::from(n)),
                TrapClass::Outside(Region::Stack) => (TrapKind::OutOfBounds, RECORD.stack),
                TrapClass::Outside(Region::Shared) => (TrapKind::OutOfBounds, RECORD.shared),
                TrapClass::Outside(Region::Any) => (TrapKind::OutOfBounds, RECORD.nothing),
            };
            self.i32((kind as u32).cast_signed());
            self.local_set(self.own.kind);
            self.i32(which.cast_signed());
            self.local_set(self.own.which);
            let depth = self.depth(BranchTarget::Record);
            self.put(Instruction::Br(depth));
        }
        self.close();
        let ([gx, gy, gz], [x, y, z]) = (self.own.group, self.own.item);
        let written = [self.own.kind, self.own.site, self.own.which, self.own.offset, gx, gy, gz, x, y, z];
        for (local, at) in written.into_iter().zip((CALL.trap..).step_by(4)) {
            self.i32(0);
            self.local_get(local);
            self.put(Instruction::I32Store(word(at)));
        }
        self.i32(1);
    }

    /// Pays for operations, and when that is due asks whether the launch has to end.
    fn pay(&mut self, push_cost: impl FnOnce(&mut Self)) {
        self.local_get(self.own.fuel);
        push_cost(self);
        self.put(Instruction::I32Sub);
        self.local_tee(self.own.fuel);
        self.i32(0);
        self.put(Instruction::I32LtS);
        self.open(Instruction::If(BlockType::Empty), None);
        self.i32(FUEL);
        self.local_set(self.own.fuel);
        self.i32(RECORD.nothing.cast_signed());
        self.local_set(self.own.which);
        self.put(Instruction::Call(POLL));
        self.local_tee(self.own.kind);
        let depth = self.depth(BranchTarget::Record);
        self.put(Instruction::BrIf(depth));
        self.close();
    }

    fn groups(&mut self) {
        self.open_as(Instruction::Loop(BlockType::Empty), BranchTarget::Groups);
        let ops = i32::try_from(self.legal.cost(0, self.body.ops.len())).unwrap_or(i32::MAX).min(FUEL);
        self.pay(|emitter| {
            emitter.local_get(emitter.own.count);
            emitter.i32(ops);
            emitter.put(Instruction::I32Mul);
        });
        for axis in 0..3 {
            self.local_get(self.own.group[axis]);
            self.local_get(self.own.items[axis]);
            self.put(Instruction::I32Mul);
            self.local_set(self.own.base[axis]);
        }
        if self.body.shared_bytes > 0 {
            self.i32(self.shared.cast_signed());
            self.i32(0);
            self.i32(self.body.shared_bytes.cast_signed());
            self.put(Instruction::MemoryFill(OWN));
        }
        if self.barriers.are_none() {
            self.items()
        } else {
            self.phases()
        }
        // On to the next group.
        let ([gx, gy, gz], [nx, ny, _]) = (self.own.group, self.own.groups);
        self.advance([gx, gy, gz], [nx, ny]);
        self.local_get(self.own.left);
        self.put(Instruction::I64Const(1));
        self.put(Instruction::I64Sub);
        self.local_tee(self.own.left);
        self.put(Instruction::I64Eqz);
        self.put(Instruction::I32Eqz);
        let depth = self.depth(BranchTarget::Groups);
        self.put(Instruction::BrIf(depth));
        self.close();
    }

    /// Counts on by one in three dimensions; the last has no end.
    fn advance(&mut self, [x, y, z]: [u32; 3], [nx, ny]: [u32; 2]) {
        let increment = |emitter: &mut Self, local: u32| {
            emitter.local_get(local);
            emitter.i32(1);
            emitter.put(Instruction::I32Add);
            emitter.local_tee(local);
        };
        let begin = |emitter: &mut Self, local: u32| {
            emitter.i32(0);
            emitter.local_set(local);
        };
        increment(self, x);
        self.local_get(nx);
        self.put(Instruction::I32Eq);
        self.open(Instruction::If(BlockType::Empty), None);
        begin(self, x);
        increment(self, y);
        self.local_get(ny);
        self.put(Instruction::I32Eq);
        self.open(Instruction::If(BlockType::Empty), None);
        begin(self, y);
        increment(self, z);
        self.put(Instruction::Drop);
        self.close();
        self.close();
    }

    /// Items take turns until none waits at a barrier.
    fn phases(&mut self) {
        // Nobody has begun, and nothing is on the stacks.
        self.load_call(CALL.contexts, self.own.context);
        self.load_call(CALL.stacks, self.own.stack);
        self.i32(0);
        self.local_set(self.own.number);
        let state = MemArg { offset: 0, align: 2, memory_index: OWN };
        self.open_as(Instruction::Loop(BlockType::Empty), BranchTarget::Nothing);
        self.local_get(self.own.context);
        self.i32(0);
        self.put(Instruction::I32Store(state));
        if self.own.subgroups.is_some() {
            self.empty_places();
        }
        self.next_context();
        self.local_get(self.own.number);
        self.i32(1);
        self.put(Instruction::I32Add);
        self.local_tee(self.own.number);
        self.local_get(self.own.count);
        self.put(Instruction::I32LtU);
        self.put(Instruction::BrIf(0));
        self.close();
        if self.body.stack_bytes > 0 {
            self.local_get(self.own.stack);
            self.i32(0);
            self.local_get(self.own.count);
            self.i32(self.body.stack_bytes.cast_signed());
            self.put(Instruction::I32Mul);
            self.put(Instruction::MemoryFill(OWN));
        }
        if let Some(own) = self.own.subgroups {
            for local in [own.turn, own.is_meeting] {
                self.i32(0);
                self.local_set(local);
            }
        }
        self.open_as(Instruction::Loop(BlockType::Empty), BranchTarget::Phases);
        if let Some(own) = self.own.subgroups {
            self.local_get(own.turn);
            self.i32(1);
            self.put(Instruction::I32Add);
            self.local_set(own.turn);
            self.local_get(own.is_meeting);
            self.local_set(own.had_met);
            for local in [own.is_meeting, self.own.number] {
                self.i32(0);
                self.local_set(local);
            }
        }
        self.i32(0);
        self.local_set(self.own.waiting);
        self.load_call(CALL.contexts, self.own.context);
        self.load_call(CALL.stacks, self.own.stack);
        self.items();
        self.local_get(self.own.waiting);
        let depth = self.depth(BranchTarget::Phases);
        self.put(Instruction::BrIf(depth));
        self.close();
    }

    fn next_context(&mut self) {
        self.local_get(self.own.context);
        self.i32(self.context_bytes.cast_signed());
        self.put(Instruction::I32Add);
        self.local_set(self.own.context);
    }

    fn items(&mut self) {
        let state = MemArg { offset: 0, align: 2, memory_index: OWN };
        let has_barriers = !self.barriers.are_none();
        let [x, y, z] = self.own.item;
        for local in [z, y, x] {
            self.i32(0);
            self.local_set(local);
            self.open_as(Instruction::Loop(BlockType::Empty), BranchTarget::Items(local));
        }
        self.open_as(Instruction::Block(BlockType::Empty), BranchTarget::Turn);
        if has_barriers {
            self.local_get(self.own.context);
            self.put(Instruction::I32Load(state));
            self.local_tee(self.own.resume);
            self.i32(DONE);
            self.put(Instruction::I32Eq);
            let depth = self.depth(BranchTarget::Turn);
            self.put(Instruction::BrIf(depth));
        }
        if let Some(own) = self.own.subgroups {
            self.stay_at_barrier(own);
        }
        self.open_as(Instruction::Block(BlockType::Empty), BranchTarget::Item);
        let body = self.body;
        if !has_barriers {
            self.zero_stack();
        }
        for (n, op) in body.ops.iter().enumerate() {
            self.skip_after(n);
            self.skip_before(n);
            self.operation(n, op);
        }
        self.close();
        if has_barriers {
            self.local_get(self.own.context);
            self.i32(DONE);
            self.put(Instruction::I32Store(state));
        }
        self.close();
        if self.own.subgroups.is_some() {
            self.local_get(self.own.number);
            self.i32(1);
            self.put(Instruction::I32Add);
            self.local_set(self.own.number);
        }
        if has_barriers {
            self.next_context();
            self.local_get(self.own.stack);
            self.i32(body.stack_bytes.cast_signed());
            self.put(Instruction::I32Add);
            self.local_set(self.own.stack);
        }
        for (local, size) in [x, y, z].into_iter().zip(self.own.items) {
            self.local_get(local);
            self.i32(1);
            self.put(Instruction::I32Add);
            self.local_tee(local);
            self.local_get(size);
            self.put(Instruction::I32LtU);
            let depth = self.depth(BranchTarget::Items(local));
            self.put(Instruction::BrIf(depth));
            self.close();
        }
    }

    /// An item at a barrier stays there for as long as others meet at functions of subgroups.
    fn stay_at_barrier(&mut self, own: SubgroupLocals) {
        self.local_get(own.had_met);
        self.open(Instruction::If(BlockType::Empty), None);
        self.local_get(self.own.context);
        self.put(Instruction::I32Load(word(AT_FUNCTION)));
        self.put(Instruction::I32Eqz);
        self.open(Instruction::If(BlockType::Empty), None);
        self.i32(1);
        self.local_set(self.own.waiting);
        self.suspend();
        self.close();
        self.close();
    }

    /// The stack of the item before was another's.
    fn zero_stack(&mut self) {
        if self.body.stack_bytes > ZEROED_BY_STORES_MAX {
            self.local_get(self.own.stack);
            self.i32(0);
            self.i32(self.body.stack_bytes.cast_signed());
            return self.put(Instruction::MemoryFill(OWN));
        }
        for at in (0..self.body.stack_bytes).step_by(8) {
            self.local_get(self.own.stack);
            self.put(Instruction::I64Const(0));
            self.put(Instruction::I64Store(MemArg { offset: u64::from(at), align: 3, memory_index: OWN }));
        }
    }

    fn operation(&mut self, n: usize, op: &Op) {
        match op {
            // Where it is the only value, it is pushed where it is read.
            Op::Const { to, bits } if self.facts.constant(*to).is_none() => {
                self.constant(self.body.ty(*to), *bits);
                self.set(*to);
            }
            Op::Const { .. } => {}
            Op::Move { to, from } => {
                self.get_held(*from);
                self.set_held(*to);
            }
            Op::Un { op, to, a, .. } => self.unary(*op, *to, *a),
            Op::Bin { op, to, a, b, .. } => {
                if let Some(instruction) = wide_binary(*op).filter(|_| self.is_wide(op.to())) {
                    self.get_held(*a);
                    self.get_held(*b);
                    self.put(instruction);
                    return self.set_held(*to);
                }
                self.get(*a);
                self.get(*b);
                self.put(op.instruction());
                self.set(*to);
            }
            Op::Math { op, to, operands } => self.math(*op, *to, operands),
            Op::Select { to, condition, a, b } => {
                self.get_held(*a);
                self.get_held(*b);
                self.get(*condition);
                self.put(Instruction::Select);
                self.set_held(*to);
            }
            Op::Id { id, to, axis } => {
                self.push_id(*id, *axis);
                self.set(*to);
            }
            Op::Shared { to } => {
                self.i32(SHARED_ADDRESS.cast_signed());
                self.set(*to);
            }
            Op::Barrier { .. } => self.barrier(n, None),
            Op::Subgroup { op, to, value, .. } => {
                self.barrier(n, Some(Meeting::Function { op: *op, to: *to, value: *value }));
            }
            Op::Product { product, .. } => self.barrier(n, Some(Meeting::Product(product))),
            // Those of whole subgroups wait too: `exchange.rs` has left none, and refuses what only a GPU does.
            Op::Shuffle { .. } | Op::Gpu { .. } => {}
            Op::Load { to, access, at, site } => {
                self.access(n, AccessKind::Load { to: *to, access: *access }, *at, *site)
            }
            Op::Store { access, at, value, site } => {
                self.access(n, AccessKind::Store { value: *value, access: *access }, *at, *site);
            }
            Op::AtomicLoad { to, access, at, site } => {
                self.access(n, AccessKind::AtomicLoad { to: *to, access: *access }, *at, *site);
            }
            Op::AtomicStore { access, at, value, site } => {
                self.access(n, AccessKind::AtomicStore { value: *value, access: *access }, *at, *site);
            }
            Op::Atomic { op, to, access, at, value, expected, site } => {
                let what = AccessKind::Atomic { op: *op, to: *to, access: *access, value: *value, expected: *expected };
                self.access(n, what, *at, *site);
            }
            Op::CheckRange { start, count, is_write, site } => self.check_range(*start, *count, *is_write, *site),
            Op::Fence => self.put(Instruction::AtomicFence),
            Op::Trap { kind, site } => self.trap(*kind, *site),
            Op::TrapIf { test, kind, site } => {
                self.set_site(*site);
                self.push_test(*test);
                self.trap_if(TrapClass::Kind(*kind));
            }
            Op::Canonical { to, from } => {
                let is_double = self.body.ty(*from) == Ty::F64;
                let nan = if is_double { 0x7ff8_0000_0000_0000 } else { 0x7fc0_0000 };
                self.constant(self.body.ty(*from), nan);
                self.get(*from);
                self.get(*from);
                self.get(*from);
                self.put(if is_double { Instruction::F64Ne } else { Instruction::F32Ne });
                self.put(Instruction::Select);
                self.set(*to);
            }
            Op::Block { label } => self.begin(n, Instruction::Block(BlockType::Empty), *label),
            Op::Loop { label } => {
                self.begin(n, Instruction::Loop(BlockType::Empty), *label);
                let cost = self.lengths.get(&label.0).copied().unwrap_or(FUEL);
                self.pay(|emitter| emitter.i32(cost));
            }
            Op::If { condition, label } => {
                self.condition(n, *condition);
                self.begin(n, Instruction::If(BlockType::Empty), *label);
            }
            Op::Else { .. } => self.put(Instruction::Else),
            Op::End { label } => {
                self.close();
                let start = self.starts.remove(&label.0);
                if start.is_some() && self.guarded.last().copied() == start {
                    self.guarded.pop();
                    self.close();
                }
            }
            Op::Branch { label } => {
                let depth = self.depth(BranchTarget::Label(label.0));
                self.put(Instruction::Br(depth));
            }
            Op::BranchIf { condition, label } => {
                self.get(*condition);
                let depth = self.depth(BranchTarget::Label(label.0));
                self.put(Instruction::BrIf(depth));
            }
            Op::BranchTable { index, labels } => {
                self.get(*index);
                let depths: Vec<u32> = labels.iter().map(|label| self.depth(BranchTarget::Label(label.0))).collect();
                if let Some((default, cases)) = depths.split_last() {
                    self.put(Instruction::BrTable(cases.to_vec().into(), *default));
                }
            }
            Op::Return => {
                let depth = self.depth(BranchTarget::Item);
                self.put(Instruction::Br(depth));
            }
        }
    }

    fn begin(&mut self, n: usize, instruction: Instruction<'static>, label: Label) {
        self.open(instruction, Some(label));
        self.starts.insert(label.0, n);
    }

    fn unary(&mut self, op: Un, to: Reg, a: Reg) {
        if let Some(instruction) = wide_unary(op).filter(|_| self.is_wide(op.to())) {
            self.get_held(a);
            self.put(instruction);
            return self.set_held(to);
        }
        self.get(a);
        self.put(op.instruction());
        self.set(to);
    }

    /// Pushes whether a test is true.
    fn push_test(&mut self, test: Test) {
        match test {
            Test::IsZero(a) => {
                self.get(a);
                self.put(if self.body.ty(a) == Ty::I64 { Instruction::I64Eqz } else { Instruction::I32Eqz });
            }
            Test::Overflows(a, b) => {
                let ty = self.body.ty(a);
                let (lowest, equal) = match ty {
                    Ty::I64 => (i64::MIN.cast_unsigned(), Instruction::I64Eq),
                    Ty::I32 | Ty::F32 | Ty::F64 => (u64::from(i32::MIN.cast_unsigned()), Instruction::I32Eq),
                };
                for (reg, bits) in [(a, lowest), (b, u64::MAX)] {
                    self.get(reg);
                    self.constant(ty, bits);
                    self.put(equal.clone());
                }
                self.put(Instruction::I32And);
            }
            Test::IsNan(a) => {
                self.get(a);
                self.get(a);
                self.put(if self.body.ty(a) == Ty::F64 { Instruction::F64Ne } else { Instruction::F32Ne });
            }
            Test::IsOutside(a, least, below) => {
                let is_double = self.body.ty(a) == Ty::F64;
                let either =
                    |wide: Instruction<'static>, narrow: Instruction<'static>| if is_double { wide } else { narrow };
                let float = |value: f64| {
                    #[expect(
                        clippy::cast_possible_truncation,
                        reason = "a power of two, or next to one, as f32 has them"
                    )]
                    either(Instruction::F64Const(value.into()), Instruction::F32Const((value as f32).into()))
                };
                let (low, is_below) = match least {
                    Least::At(low) => (low, either(Instruction::F64Lt, Instruction::F32Lt)),
                    Least::Above(low) => (low, either(Instruction::F64Le, Instruction::F32Le)),
                };
                self.get(a);
                self.put(float(low));
                self.put(is_below);
                self.get(a);
                self.put(float(below));
                self.put(either(Instruction::F64Ge, Instruction::F32Ge));
                self.put(Instruction::I32Or);
            }
            Test::IsUnaligned(base, offset, bytes) => {
                self.get(base);
                self.i32(offset.cast_signed());
                self.put(Instruction::I32Add);
                self.i32((bytes - 1).cast_signed());
                self.put(Instruction::I32And);
            }
        }
    }

    fn math(&mut self, op: Math, to: Reg, operands: &[Reg; 3]) {
        match op {
            // Wasm has no fused multiplication of single numbers, but of vectors, which whoever compiles this is told
            // to round once.
            Math::FmaF32 | Math::FmaF64 => {
                operands.iter().for_each(|reg| self.get_held(*reg));
                let is_single = op == Math::FmaF32;
                self.put(if is_single { Instruction::F32x4RelaxedMadd } else { Instruction::F64x2RelaxedMadd });
                self.set_held(to);
            }
            Math::RsqrtF32 => {
                self.put(Instruction::F32Const(1.0_f32.into()));
                self.get(operands[0]);
                self.put(Instruction::F32Sqrt);
                self.put(Instruction::F32Div);
                self.set(to);
            }
            Math::F16ToF32 => self.widen_half(to, operands[0]),
            Math::F32ToF16 => self.round_to_half(to, operands[0]),
        }
    }

    pub(super) fn all(&mut self, instructions: &[Instruction<'static>]) {
        self.code.extend(instructions.iter().cloned());
    }

    fn push_id(&mut self, id: Id, axis: Axis) {
        let axis = axis as usize;
        let ReservedLocals { item, group, items, groups, base, .. } = &self.own;
        let (item, group, items, groups, base) = (item[axis], group[axis], items[axis], groups[axis], base[axis]);
        match id {
            Id::Local => self.local_get(item),
            Id::Group => self.local_get(group),
            Id::LocalSize => self.local_get(items),
            Id::Groups => self.local_get(groups),
            Id::Global => {
                self.local_get(base);
                self.local_get(item);
                self.put(Instruction::I32Add);
            }
            Id::GlobalSize => {
                self.local_get(items);
                self.local_get(groups);
                self.put(Instruction::I32Mul);
            }
        }
    }
}

fn lengths(legal: &Legal) -> HashMap<u32, i32> {
    let (mut open, mut lengths) = (HashMap::new(), HashMap::new());
    for (n, op) in legal.body.ops.iter().enumerate() {
        match op.flow() {
            Flow::Open(label, Structure::Loop) => drop(open.insert(label.0, n)),
            Flow::Close(label) => {
                if let Some(start) = open.remove(&label.0) {
                    lengths.insert(label.0, i32::try_from(legal.cost(start, n)).unwrap_or(FUEL).clamp(1, FUEL));
                }
            }
            Flow::Open(_, Structure::Block | Structure::If)
            | Flow::Else(_)
            | Flow::Straight
            | Flow::Leave
            | Flow::Wait => {}
        }
    }
    lengths
}

/// Operations that are done to vectors as to numbers. All others are done to one number.
const WIDE_UNARY: [(Un, Instruction<'static>); 4] = [
    (Un::F32Abs, Instruction::F32x4Abs),
    (Un::F32Sqrt, Instruction::F32x4Sqrt),
    (Un::F64Abs, Instruction::F64x2Abs),
    (Un::F64Sqrt, Instruction::F64x2Sqrt),
];

const WIDE_BINARY: [(Bin, Instruction<'static>); 8] = [
    (Bin::F32Add, Instruction::F32x4Add),
    (Bin::F32Sub, Instruction::F32x4Sub),
    (Bin::F32Mul, Instruction::F32x4Mul),
    (Bin::F32Div, Instruction::F32x4Div),
    (Bin::F64Add, Instruction::F64x2Add),
    (Bin::F64Sub, Instruction::F64x2Sub),
    (Bin::F64Mul, Instruction::F64x2Mul),
    (Bin::F64Div, Instruction::F64x2Div),
];

fn wide_unary(op: Un) -> Option<Instruction<'static>> {
    WIDE_UNARY.iter().find(|(own, _)| *own == op).map(|(_, instruction)| instruction.clone())
}

fn wide_binary(op: Bin) -> Option<Instruction<'static>> {
    WIDE_BINARY.iter().find(|(own, _)| *own == op).map(|(_, instruction)| instruction.clone())
}

fn word(at: u32) -> MemArg {
    MemArg { offset: u64::from(at), align: 2, memory_index: OWN }
}
