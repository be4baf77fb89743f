//! Accesses to memory as Wasm, each of them fenced: a check that traps at once, then the access. Which region it is,
//! the access itself says (`legalize.rs`).

use wasm_encoder::{BlockType, Function, Instruction, MemArg, ValType};

use super::emit::{HostEmitter, TrapClass};
use super::{CALL, OwnMemory, find_number};
use crate::ir::{Access, Address, Reg, Region, Rmw, Site, TrapKind, Ty};
use crate::legalize::{Candidate, Legal, Lookup};

/// The memories, by their numbers.
pub(super) const WINDOWS: u32 = 0;
pub(super) const OWN: u32 = 1;

/// What `find` returns where there is nothing, and where it is constant. Otherwise the address, and above it which
/// memory.
const NOTHING: i64 = -1;
const CONSTANT: i64 = -2;

/// What is done at an address.
#[derive(Debug, Clone, Copy)]
pub(super) enum AccessKind {
    Load { to: Reg, access: Access },
    Store { value: Reg, access: Access },
    AtomicLoad { to: Reg, access: Access },
    AtomicStore { value: Reg, access: Access },
    Atomic { op: Rmw, to: Reg, access: Access, value: Reg, expected: Reg },
}

impl AccessKind {
    fn bytes(self) -> u32 {
        match self {
            AccessKind::Load { access, .. }
            | AccessKind::Store { access, .. }
            | AccessKind::AtomicLoad { access, .. }
            | AccessKind::AtomicStore { access, .. }
            | AccessKind::Atomic { access, .. } => access.bytes,
        }
    }

    fn is_atomic(self) -> bool {
        matches!(self, AccessKind::AtomicLoad { .. } | AccessKind::AtomicStore { .. } | AccessKind::Atomic { .. })
    }

    fn lookup(self) -> Lookup {
        match self {
            AccessKind::Load { .. } => Lookup::Read,
            AccessKind::Store { .. } => Lookup::Write,
            AccessKind::AtomicLoad { .. } | AccessKind::AtomicStore { .. } | AccessKind::Atomic { .. } => {
                Lookup::Atomic
            }
        }
    }
}

impl HostEmitter<'_> {
    pub(super) fn access(&mut self, n: usize, what: AccessKind, at: Address, site: Site) {
        if let Some(member) = self.legal.groups.members.get(&n).copied() {
            if member.is_first {
                self.offset(at.region, member.root, member.low);
                self.check(at.region, member.reach, site);
            }
            let distance = member.low.wrapping_add(member.distance.cast_signed());
            return self.inside(what, at, (member.root, distance));
        }
        if at.region == Region::Any {
            return self.looked_up(what, at, site);
        }
        self.offset(at.region, at.base, at.offset.cast_signed());
        if at.may_wrap() {
            // Beyond the address space nothing is.
            self.local_set(self.own.offset);
            self.i32(-1);
            self.local_get(self.own.offset);
            self.get(at.base);
            self.i32((u32::MAX - at.offset).cast_signed());
            self.put(Instruction::I32GtU);
            self.put(Instruction::Select);
        }
        self.check(at.region, what.bytes(), site);
        self.inside(what, at, (at.base, at.offset.cast_signed()));
    }

    /// Pushes the offset in a region of a register and a number.
    fn offset(&mut self, region: Region, base: Reg, distance: i32) {
        let start = match region {
            Region::Window(window) | Region::SmallWindow(window) => {
                let beyond = self.facts.beyond(base, window);
                // What was added to the window's address is the offset.
                self.get(beyond.unwrap_or(base));
                if distance != 0 {
                    self.i32(distance);
                    self.put(Instruction::I32Add);
                }
                if beyond.is_none() {
                    self.get(self.body.params[usize::from(window)]);
                    self.put(Instruction::I32Sub);
                }
                return;
            }
            Region::Stack => self.legal.extent(Candidate::Stack).0,
            Region::Shared => self.legal.extent(Candidate::Shared).0,
            // Has no offset: it is looked up.
            Region::Any => 0,
        };
        self.get(base);
        self.i32(distance.wrapping_sub(start.cast_signed()));
        self.put(Instruction::I32Add);
    }

    /// Takes an offset and traps unless so many bytes from there on are inside.
    fn check(&mut self, region: Region, bytes: u32, site: Site) {
        self.local_tee(self.own.offset);
        self.set_site(site);
        match region {
            Region::Window(window) | Region::SmallWindow(window) => {
                self.put(Instruction::I64ExtendI32U);
                let limit = self.limit(window, bytes);
                self.local_get(limit);
                // A window that is too small has a negative limit.
                self.put(Instruction::I64GtS);
            }
            Region::Stack | Region::Shared | Region::Any => {
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
        self.trap_if(TrapClass::Outside(region));
    }

    /// An access that was checked.
    fn inside(&mut self, what: AccessKind, at: Address, (root, distance): (Reg, i32)) {
        let region = at.region;
        match region {
            Region::Window(_) | Region::SmallWindow(_) => {
                self.perform(what, WINDOWS, at.offset, |emitter| emitter.get(at.base))
            }
            Region::Stack => self.perform(what, OWN, 0, |emitter| {
                emitter.offset(region, root, distance);
                emitter.local_get(emitter.own.stack);
                emitter.put(Instruction::I32Add);
            }),
            Region::Shared | Region::Any => {
                self.perform(what, OWN, self.shared, |emitter| emitter.offset(region, root, distance));
            }
        }
    }

    /// An access by an address that may be of any region.
    fn looked_up(&mut self, what: AccessKind, at: Address, site: Site) {
        let lookup = what.lookup();
        self.set_site(site);
        self.get(at.base);
        self.put(Instruction::I64ExtendI32U);
        self.put(Instruction::I64Const(i64::from(at.offset)));
        self.put(Instruction::I64Add);
        self.put(Instruction::I64Const(i64::from(what.bytes())));
        self.call_find(lookup);
        if self.legal.may_write_data(lookup) {
            self.local_get(self.own.found);
            self.put(Instruction::I64Const(CONSTANT));
            self.put(Instruction::I64Eq);
            self.trap_if(TrapClass::Kind(TrapKind::WriteToConstant));
        }
        self.trap_if_nothing();
        self.local_get(self.own.found);
        self.put(Instruction::I64Const(32));
        self.put(Instruction::I64ShrU);
        self.put(Instruction::I32WrapI64);
        self.open(Instruction::If(BlockType::Empty), None);
        self.perform(what, OWN, 0, HostEmitter::found_address);
        self.put(Instruction::Else);
        self.perform(what, WINDOWS, 0, HostEmitter::found_address);
        self.close();
    }

    fn found_address(&mut self) {
        self.local_get(self.own.found);
        self.put(Instruction::I32WrapI64);
    }

    fn call_find(&mut self, lookup: Lookup) {
        self.local_get(self.own.stack);
        self.put(Instruction::Call(find_number(lookup)));
        self.local_set(self.own.found);
    }

    fn trap_if_nothing(&mut self) {
        self.local_get(self.own.found);
        self.put(Instruction::I64Const(0));
        self.put(Instruction::I64LtS);
        self.trap_if(TrapClass::Kind(TrapKind::OutOfBounds));
    }

    pub(super) fn check_range(&mut self, start: Reg, count: Reg, is_write: bool, site: Site) {
        self.set_site(site);
        self.get(count);
        self.open(Instruction::If(BlockType::Empty), None);
        self.get(start);
        self.put(Instruction::I64ExtendI32U);
        self.get(count);
        self.put(Instruction::I64ExtendI32U);
        self.call_find(if is_write { Lookup::Write } else { Lookup::Read });
        self.trap_if_nothing();
        self.close();
    }

    fn perform(&mut self, what: AccessKind, memory: u32, offset: u32, address: impl FnOnce(&mut Self)) {
        let align = if what.is_atomic() { what.bytes().trailing_zeros() } else { 0 };
        let at = MemArg { offset: u64::from(offset), align, memory_index: memory };
        address(self);
        match what {
            AccessKind::Load { to, access } => {
                self.load_to(to, access, at);
            }
            AccessKind::Store { value, access } => {
                self.get(value);
                self.put(store(self.body.ty(value), access, at));
            }
            AccessKind::AtomicLoad { to, access } => {
                self.put(match (self.body.ty(to), access.bytes) {
                    (Ty::I32, _) => Instruction::I32AtomicLoad(at),
                    (_, 4) => Instruction::I64AtomicLoad32U(at),
                    _ => Instruction::I64AtomicLoad(at),
                });
                self.set(to);
            }
            AccessKind::AtomicStore { value, access } => {
                self.get(value);
                self.put(match (self.body.ty(value), access.bytes) {
                    (Ty::I32, _) => Instruction::I32AtomicStore(at),
                    (_, 4) => Instruction::I64AtomicStore32(at),
                    _ => Instruction::I64AtomicStore(at),
                });
            }
            AccessKind::Atomic { op, to, value, expected, .. } => {
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

/// `find(address, bytes, stack)`: where so many bytes from an address on are, looked up among all regions.
pub(super) fn find(legal: &Legal, lookup: Lookup, plan: &OwnMemory) -> Function {
    let (address, bytes, stack, offset) = (0, 1, 2, 3);
    let mut function = Function::new([(1, ValType::I64)]);
    let mut put = |instruction: Instruction<'static>| {
        function.instruction(&instruction);
    };
    let word = |at: u32| MemArg { offset: u64::from(at), align: 2, memory_index: OWN };
    let number = |n: u32| vec![Instruction::I64Const(i64::from(n))];
    for candidate in legal.candidates(lookup) {
        // Where it starts in the kernel's addresses, its size, and where it is in the thread's own memory.
        let (start, size) = legal.extent(candidate);
        let (start, size, at) = match candidate {
            Candidate::Window(n) => {
                let at = CALL.params + CALL.param_bytes * u32::from(n);
                let load = |at: u32| vec![Instruction::I32Const(0), Instruction::I64Load32U(word(at))];
                (load(at), load(at + 4), None)
            }
            Candidate::Shared => (number(start), number(size), Some(number(plan.shared))),
            Candidate::Data => (number(start), number(size), Some(number(plan.data))),
            Candidate::Stack => {
                let at = vec![Instruction::LocalGet(stack), Instruction::I64ExtendI32U];
                (number(start), number(size), Some(at))
            }
        };
        put(Instruction::LocalGet(address));
        start.into_iter().for_each(&mut put);
        put(Instruction::I64Sub);
        put(Instruction::LocalTee(offset));
        size.iter().cloned().for_each(&mut put);
        put(Instruction::I64LtU);
        put(Instruction::LocalGet(offset));
        put(Instruction::LocalGet(bytes));
        put(Instruction::I64Add);
        size.into_iter().for_each(&mut put);
        put(Instruction::I64LeU);
        put(Instruction::I32And);
        put(Instruction::If(BlockType::Empty));
        match at {
            // A window is at the kernel's own address of it.
            None => put(Instruction::LocalGet(address)),
            Some(at) => {
                at.into_iter().for_each(&mut put);
                put(Instruction::LocalGet(offset));
                put(Instruction::I64Add);
                put(Instruction::I64Const(1 << 32));
                put(Instruction::I64Or);
            }
        }
        put(Instruction::Return);
        put(Instruction::End);
    }
    if legal.may_write_data(lookup) {
        let (start, size) = legal.extent(Candidate::Data);
        put(Instruction::LocalGet(address));
        put(Instruction::I64Const(i64::from(start)));
        put(Instruction::I64Sub);
        put(Instruction::I64Const(i64::from(size)));
        put(Instruction::I64LtU);
        put(Instruction::If(BlockType::Empty));
        put(Instruction::I64Const(CONSTANT));
        put(Instruction::Return);
        put(Instruction::End);
    }
    put(Instruction::I64Const(NOTHING));
    put(Instruction::End);
    function
}
