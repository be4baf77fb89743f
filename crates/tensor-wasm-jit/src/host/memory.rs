//! Accesses to memory, each of them fenced.

use wasm_encoder::{BlockType, Function, Instruction, MemArg, ValType};

use super::emit::{Class, Emitter};
use super::{CALL, FIND, Plan};
use crate::facts::Source;
use crate::groups::Member;
use crate::ir::{Access, Address, Body, Reg, Rmw, Site, TrapKind, Ty};
use crate::lower::SHARED_ADDRESS;

/// Offsets from this on may carry an address beyond the address space into a window. No window begins below it.
const OFFSET_WRAPS: u32 = 1 << 16;

/// The memories, by their numbers.
pub(super) const WINDOWS: u32 = 0;
pub(super) const OWN: u32 = 1;

/// What `find` looks for, as bits: places that may be written, and those that no other work item sees.
const WRITE: i32 = 1;
const PRIVATE: i32 = 2;

/// What `find` returns where there is nothing, and where it is constant. Otherwise the address, and above it which memory.
const NOTHING: i64 = -1;
const CONSTANT: i64 = -2;

/// Memory that an access goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Region {
    Window(u16),
    Stack,
    Shared,
}

/// What is done at an address.
#[derive(Debug, Clone, Copy)]
pub(super) enum What {
    Load { to: Reg, access: Access },
    Store { value: Reg, access: Access },
    AtomicLoad { to: Reg, access: Access },
    AtomicStore { value: Reg, access: Access },
    Atomic { op: Rmw, to: Reg, access: Access, value: Reg, expected: Reg },
}

impl What {
    fn bytes(self) -> u32 {
        match self {
            What::Load { access, .. }
            | What::Store { access, .. }
            | What::AtomicLoad { access, .. }
            | What::AtomicStore { access, .. }
            | What::Atomic { access, .. } => access.bytes,
        }
    }

    fn is_atomic(self) -> bool {
        matches!(self, What::AtomicLoad { .. } | What::AtomicStore { .. } | What::Atomic { .. })
    }

    fn is_write(self) -> bool {
        // As in PTX: an atomic of any kind is where writing is possible.
        !matches!(self, What::Load { .. })
    }
}

impl Emitter<'_> {
    pub(super) fn region(&self, base: Reg) -> Option<Region> {
        match self.facts.source(base)? {
            Source::Param(n) => self.windows.get(usize::from(n)).copied().unwrap_or(false).then_some(Region::Window(n)),
            Source::Stack => (self.body.stack_bytes > 0).then_some(Region::Stack),
            Source::Shared => (self.body.shared_bytes > 0).then_some(Region::Shared),
        }
    }

    pub(super) fn access(&mut self, n: usize, what: What, at: Address, site: Site) {
        let bytes = what.bytes();
        if what.is_atomic() && !(self.facts.is_aligned(at.base, bytes) && at.offset.is_multiple_of(bytes)) {
            self.set_site(site);
            self.get(at.base);
            self.i32(at.offset.cast_signed());
            self.put(Instruction::I32Add);
            self.i32((bytes - 1).cast_signed());
            self.put(Instruction::I32And);
            self.trap_if(Class::Kind(TrapKind::UnalignedAtomic));
        }
        if let Some(member) = self.groups.members.get(&n).copied()
            && let Some(region) = self.region(at.base)
        {
            if member.is_first {
                self.check_group(region, member, site);
            }
            let distance = member.low.wrapping_add(member.distance.cast_signed());
            return self.inside(region, what, at, (member.root, distance));
        }
        match self.region(at.base) {
            // Private memory has no atomics.
            Some(Region::Stack) if what.is_atomic() => self.looked_up(what, at, site),
            Some(region) => {
                self.offset(region, at.base, at.offset.cast_signed());
                if at.offset >= OFFSET_WRAPS {
                    // Beyond the address space nothing is.
                    self.local_set(self.own.offset);
                    self.i32(-1);
                    self.local_get(self.own.offset);
                    self.get(at.base);
                    self.i32((u32::MAX - at.offset).cast_signed());
                    self.put(Instruction::I32GtU);
                    self.put(Instruction::Select);
                }
                self.check(region, bytes, site);
                self.inside(region, what, at, (at.base, at.offset.cast_signed()));
            }
            None => self.looked_up(what, at, site),
        }
    }

    /// Pushes the offset in a region of a register and a number.
    fn offset(&mut self, region: Region, base: Reg, distance: i32) {
        if let Region::Window(window) = region
            && let Some(beyond) = self.facts.beyond(base, window)
        {
            // What was added to the window's address is the offset.
            self.get(beyond);
            if distance != 0 {
                self.i32(distance);
                self.put(Instruction::I32Add);
            }
            return;
        }
        self.get(base);
        match region {
            Region::Window(window) => {
                if distance != 0 {
                    self.i32(distance);
                    self.put(Instruction::I32Add);
                }
                self.get(self.body.params[usize::from(window)]);
                self.put(Instruction::I32Sub);
            }
            Region::Stack | Region::Shared => {
                let start = match region {
                    Region::Stack => self.body.stack_top - self.body.stack_bytes,
                    _ => SHARED_ADDRESS,
                };
                self.i32(distance.wrapping_sub(start.cast_signed()));
                self.put(Instruction::I32Add);
            }
        }
    }

    fn check_group(&mut self, region: Region, member: Member, site: Site) {
        self.offset(region, member.root, member.low);
        self.check(region, member.reach, site);
    }

    /// Takes an offset and traps unless so many bytes from there on are inside.
    fn check(&mut self, region: Region, bytes: u32, site: Site) {
        self.local_tee(self.own.offset);
        self.set_site(site);
        match region {
            Region::Window(window) => {
                self.put(Instruction::I64ExtendI32U);
                let limit = self.limit(window, bytes);
                self.local_get(limit);
                // A window that is too small has a negative limit.
                self.put(Instruction::I64GtS);
            }
            Region::Stack | Region::Shared => {
                let size = if region == Region::Stack { self.body.stack_bytes } else { self.body.shared_bytes };
                match size.checked_sub(bytes) {
                    Some(limit) => {
                        self.i32(limit.cast_signed());
                        self.put(Instruction::I32GtU);
                    }
                    None => {
                        self.put(Instruction::Drop);
                        self.i32(1);
                    }
                }
            }
        }
        self.trap_if(Class::Outside(region));
    }

    /// An access that was checked.
    fn inside(&mut self, region: Region, what: What, at: Address, (root, distance): (Reg, i32)) {
        match region {
            Region::Window(_) => self.perform(what, WINDOWS, at.offset, |emitter| emitter.get(at.base)),
            Region::Stack => self.perform(what, OWN, 0, |emitter| {
                emitter.offset(region, root, distance);
                emitter.local_get(emitter.own.stack);
                emitter.put(Instruction::I32Add);
            }),
            Region::Shared => {
                self.perform(what, OWN, self.shared, |emitter| emitter.offset(region, root, distance));
            }
        }
    }

    /// An access by an address that may be of any region.
    fn looked_up(&mut self, what: What, at: Address, site: Site) {
        let mode = if what.is_write() { WRITE } else { 0 } | if what.is_atomic() { 0 } else { PRIVATE };
        self.set_site(site);
        self.get(at.base);
        self.put(Instruction::I64ExtendI32U);
        self.put(Instruction::I64Const(i64::from(at.offset)));
        self.put(Instruction::I64Add);
        self.put(Instruction::I64Const(i64::from(what.bytes())));
        self.call_find(mode);
        self.local_get(self.own.found);
        self.put(Instruction::I64Const(CONSTANT));
        self.put(Instruction::I64Eq);
        self.trap_if(Class::Kind(TrapKind::WriteToConstant));
        self.trap_if_nothing();
        self.local_get(self.own.found);
        self.put(Instruction::I64Const(32));
        self.put(Instruction::I64ShrU);
        self.put(Instruction::I32WrapI64);
        self.open(Instruction::If(BlockType::Empty), None);
        self.perform(what, OWN, 0, Emitter::found_address);
        self.put(Instruction::Else);
        self.perform(what, WINDOWS, 0, Emitter::found_address);
        self.close();
    }

    fn found_address(&mut self) {
        self.local_get(self.own.found);
        self.put(Instruction::I32WrapI64);
    }

    fn call_find(&mut self, mode: i32) {
        self.i32(mode);
        self.local_get(self.own.stack);
        self.put(Instruction::Call(FIND));
        self.local_set(self.own.found);
    }

    fn trap_if_nothing(&mut self) {
        self.local_get(self.own.found);
        self.put(Instruction::I64Const(0));
        self.put(Instruction::I64LtS);
        self.trap_if(Class::Kind(TrapKind::OutOfBounds));
    }

    pub(super) fn check_range(&mut self, start: Reg, count: Reg, is_write: bool, site: Site) {
        self.set_site(site);
        self.get(count);
        self.open(Instruction::If(BlockType::Empty), None);
        self.get(start);
        self.put(Instruction::I64ExtendI32U);
        self.get(count);
        self.put(Instruction::I64ExtendI32U);
        self.call_find(if is_write { WRITE | PRIVATE } else { PRIVATE });
        self.trap_if_nothing();
        self.close();
    }

    fn perform(&mut self, what: What, memory: u32, offset: u32, address: impl FnOnce(&mut Self)) {
        let align = if what.is_atomic() { what.bytes().trailing_zeros() } else { 0 };
        let at = MemArg { offset: u64::from(offset), align, memory_index: memory };
        address(self);
        match what {
            What::Load { to, access } => {
                self.load_to(to, access, at);
            }
            What::Store { value, access } => {
                self.get_observed(value);
                self.put(store(self.body.ty(value), access, at));
            }
            What::AtomicLoad { to, access } => {
                self.put(match (self.body.ty(to), access.bytes) {
                    (Ty::I32, _) => Instruction::I32AtomicLoad(at),
                    (_, 4) => Instruction::I64AtomicLoad32U(at),
                    _ => Instruction::I64AtomicLoad(at),
                });
                self.set(to);
            }
            What::AtomicStore { value, access } => {
                self.get(value);
                self.put(match (self.body.ty(value), access.bytes) {
                    (Ty::I32, _) => Instruction::I32AtomicStore(at),
                    (_, 4) => Instruction::I64AtomicStore32(at),
                    _ => Instruction::I64AtomicStore(at),
                });
            }
            What::Atomic { op, to, value, expected, .. } => {
                if op == Rmw::CompareExchange {
                    self.get(expected);
                }
                self.get(value);
                let (narrow, wide) = match op {
                    Rmw::Add => (Instruction::I32AtomicRmwAdd(at), Instruction::I64AtomicRmwAdd(at)),
                    Rmw::Sub => (Instruction::I32AtomicRmwSub(at), Instruction::I64AtomicRmwSub(at)),
                    Rmw::And => (Instruction::I32AtomicRmwAnd(at), Instruction::I64AtomicRmwAnd(at)),
                    Rmw::Or => (Instruction::I32AtomicRmwOr(at), Instruction::I64AtomicRmwOr(at)),
                    Rmw::Xor => (Instruction::I32AtomicRmwXor(at), Instruction::I64AtomicRmwXor(at)),
                    Rmw::Exchange => (Instruction::I32AtomicRmwXchg(at), Instruction::I64AtomicRmwXchg(at)),
                    Rmw::CompareExchange => {
                        (Instruction::I32AtomicRmwCmpxchg(at), Instruction::I64AtomicRmwCmpxchg(at))
                    }
                };
                self.put(if self.body.ty(to) == Ty::I32 { narrow } else { wide });
                self.set(to);
            }
        }
    }
}

pub(super) fn load(ty: Ty, access: Access, at: MemArg) -> Instruction<'static> {
    match (ty, access.bytes, access.is_signed) {
        (Ty::F32, ..) => Instruction::F32Load(at),
        (Ty::F64, ..) => Instruction::F64Load(at),
        (Ty::I32, 1, false) => Instruction::I32Load8U(at),
        (Ty::I32, 1, true) => Instruction::I32Load8S(at),
        (Ty::I32, 2, false) => Instruction::I32Load16U(at),
        (Ty::I32, 2, true) => Instruction::I32Load16S(at),
        (Ty::I32, ..) => Instruction::I32Load(at),
        (Ty::I64, 1, false) => Instruction::I64Load8U(at),
        (Ty::I64, 1, true) => Instruction::I64Load8S(at),
        (Ty::I64, 2, false) => Instruction::I64Load16U(at),
        (Ty::I64, 2, true) => Instruction::I64Load16S(at),
        (Ty::I64, 4, false) => Instruction::I64Load32U(at),
        (Ty::I64, 4, true) => Instruction::I64Load32S(at),
        (Ty::I64, ..) => Instruction::I64Load(at),
    }
}

pub(super) fn store(ty: Ty, access: Access, at: MemArg) -> Instruction<'static> {
    match (ty, access.bytes) {
        (Ty::F32, _) => Instruction::F32Store(at),
        (Ty::F64, _) => Instruction::F64Store(at),
        (Ty::I32, 1) => Instruction::I32Store8(at),
        (Ty::I32, 2) => Instruction::I32Store16(at),
        (Ty::I32, _) => Instruction::I32Store(at),
        (Ty::I64, 1) => Instruction::I64Store8(at),
        (Ty::I64, 2) => Instruction::I64Store16(at),
        (Ty::I64, 4) => Instruction::I64Store32(at),
        (Ty::I64, _) => Instruction::I64Store(at),
    }
}

/// `find(address, bytes, mode, stack)`: where so many bytes from an address on are, looked up among all regions.
pub(super) fn find(body: &Body, windows: &[bool], plan: &Plan) -> Function {
    let (address, bytes, mode, stack, offset) = (0, 1, 2, 3, 4);
    let mut function = Function::new([(1, ValType::I64)]);
    let mut put = |instruction: Instruction<'static>| {
        function.instruction(&instruction);
    };
    // If `condition` was pushed: returns what `result` pushes.
    let size = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
    let word = |at: u32| MemArg { offset: u64::from(at), align: 2, memory_index: OWN };
    let is_inside = |put: &mut dyn FnMut(Instruction<'static>), size: &[Instruction<'static>]| {
        for instruction in [
            vec![Instruction::LocalTee(offset)],
            size.to_vec(),
            vec![Instruction::I64LtU, Instruction::LocalGet(offset), Instruction::LocalGet(bytes), Instruction::I64Add],
            size.to_vec(),
            vec![Instruction::I64LeU, Instruction::I32And],
        ]
        .into_iter()
        .flatten()
        {
            put(instruction);
        }
    };
    for (n, _) in windows.iter().enumerate().filter(|(_, is_window)| **is_window) {
        let at = CALL.params + CALL.param_bytes * u32::try_from(n).unwrap_or(0);
        put(Instruction::LocalGet(address));
        put(Instruction::I32Const(0));
        put(Instruction::I64Load32U(word(at)));
        put(Instruction::I64Sub);
        is_inside(&mut put, &[Instruction::I32Const(0), Instruction::I64Load32U(word(at + 4))]);
        put(Instruction::If(BlockType::Empty));
        put(Instruction::LocalGet(address));
        put(Instruction::Return);
        put(Instruction::End);
    }
    // Fixed regions: where they begin in the kernel's addresses, their size, where they are, and the mode they need.
    let constant = |n: u32| vec![Instruction::I64Const(i64::from(n))];
    let mut regions = Vec::new();
    if body.shared_bytes > 0 {
        regions.push((SHARED_ADDRESS, i64::from(body.shared_bytes), constant(plan.shared), 0));
    }
    if body.stack_bytes > 0 {
        let at = vec![Instruction::LocalGet(stack), Instruction::I64ExtendI32U];
        regions.push((body.stack_top - body.stack_bytes, i64::from(body.stack_bytes), at, PRIVATE));
    }
    if !body.data.is_empty() {
        regions.push((body.data_address, size(body.data.len()), constant(plan.data), PRIVATE | WRITE));
    }
    for (start, size, at, needs) in regions {
        put(Instruction::LocalGet(address));
        put(Instruction::I64Const(i64::from(start)));
        put(Instruction::I64Sub);
        is_inside(&mut put, &[Instruction::I64Const(size)]);
        if needs & PRIVATE != 0 {
            // Constant data may be read; the stack may be both.
            put(Instruction::LocalGet(mode));
            put(Instruction::I32Const(needs));
            put(Instruction::I32And);
            put(Instruction::I32Const(PRIVATE));
            put(Instruction::I32Eq);
            put(Instruction::I32And);
        }
        put(Instruction::If(BlockType::Empty));
        at.into_iter().for_each(&mut put);
        put(Instruction::LocalGet(offset));
        put(Instruction::I64Add);
        put(Instruction::I64Const(1 << 32));
        put(Instruction::I64Or);
        put(Instruction::Return);
        put(Instruction::End);
    }
    if !body.data.is_empty() {
        put(Instruction::LocalGet(address));
        put(Instruction::I64Const(i64::from(body.data_address)));
        put(Instruction::I64Sub);
        put(Instruction::I64Const(size(body.data.len())));
        put(Instruction::I64LtU);
        put(Instruction::LocalGet(mode));
        put(Instruction::I32Const(WRITE));
        put(Instruction::I32And);
        put(Instruction::I32And);
        put(Instruction::If(BlockType::Empty));
        put(Instruction::I64Const(CONSTANT));
        put(Instruction::Return);
        put(Instruction::End);
    }
    put(Instruction::I64Const(NOTHING));
    put(Instruction::End);
    function
}
