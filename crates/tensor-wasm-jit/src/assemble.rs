//! Writes a kernel's operations, one at a time: what lowering from Wasm (`lower/`) and a host that builds a kernel
//! (`build.rs`) have in common. It gives out registers and labels, remembers where in the source an operation comes
//! from, and knows what is written as several operations. It does not check types: Wasm's validator has, or the builder
//! does.

use std::collections::HashMap;

use crate::ir::{Access, Address, Axis, Bin, Body, Id, Label, Op, Product, Reg, SUBGROUP, Site, SubgroupOp, Ty, Un};
use crate::refusal::SourceLocation;

/// Operations of one kernel, with everything it calls. NVIDIA's assembler takes ten to twenty seconds for as many.
pub const OPS_MAX: usize = 100_000;

/// Shared memory a group may have: what every supported device gives without being asked for more.
pub const SHARED_BYTES_MAX: u32 = 48 << 10;

/// The most that a device gives to one that asks for more: 227 KiB on a Hopper.
pub(crate) const GPU_SHARED_BYTES_MAX: u32 = 227 << 10;

/// Barriers of one kernel, each counted wherever it is inlined: a CPU has to find its way back to every one of them.
pub(crate) const BARRIERS_MAX: usize = 1_000;

/// Functions of subgroups in one kernel of a guest, counted in the same way. As many reductions, each with what is done
/// where some lanes are missing, take NVIDIA's assembler ten seconds for an older device, and a thousand take it
/// minutes and gigabytes of memory.
pub(crate) const SUBGROUPS_MAX: usize = 128;

const BYTE: Access = Access { bytes: 1, is_signed: false };

/// What is known about the value of a register that is assigned once.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum KnownValue {
    Nothing,
    Constant(u64),
    /// The stack pointer as it was at first, less this.
    Stack(u32),
}

/// A block that has begun; of an `if`, which side of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockKind {
    Block,
    Loop,
    If,
    Else,
}

/// A branch, and the registers it assigns on the way: where paths meet, each of them moves what it has into the same
/// ones.
pub(crate) struct Jump {
    pub label: Label,
    pub to: Vec<Reg>,
    pub from: Vec<Reg>,
}

#[derive(Default)]
pub(crate) struct Assembler {
    pub ops: Vec<Op>,
    pub types: Vec<Ty>,
    pub sites: Vec<SourceLocation>,
    pub known: Vec<KnownValue>,
    labels: u32,
    shared_bytes: u32,
    barriers: usize,
    subgroups: usize,
}

impl Assembler {
    pub(crate) fn register(&mut self, ty: Ty) -> Reg {
        self.types.push(ty);
        self.known.push(KnownValue::Nothing);
        Reg(u32::try_from(self.types.len() - 1).unwrap_or(u32::MAX))
    }

    pub(crate) fn ty(&self, reg: Reg) -> Ty {
        self.types[reg.0 as usize]
    }

    pub(crate) fn constant(&mut self, ty: Ty, bits: u64) -> Reg {
        let to = self.register(ty);
        self.known[to.0 as usize] = KnownValue::Constant(bits);
        self.push(Op::Const { to, bits });
        to
    }

    pub(crate) fn known(&self, reg: Reg) -> KnownValue {
        self.known[reg.0 as usize]
    }

    pub(crate) fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    pub(crate) fn label(&mut self) -> Label {
        self.labels += 1;
        Label(self.labels)
    }

    pub(crate) fn site(&mut self, place: SourceLocation) -> Site {
        if self.sites.last() != Some(&place) {
            self.sites.push(place);
        }
        Site(u32::try_from(self.sites.len() - 1).unwrap_or(u32::MAX))
    }

    /// Whether it has become longer than a kernel may be.
    pub(crate) fn is_too_long(&self) -> bool {
        self.ops.len() > OPS_MAX || self.types.len() > 4 * OPS_MAX
    }

    pub(crate) fn unary(&mut self, op: Un, a: Reg, site: Site) -> Reg {
        let to = self.register(op.to());
        self.push(Op::Un { op, to, a, site });
        to
    }

    pub(crate) fn binary(&mut self, op: Bin, a: Reg, b: Reg, site: Site) -> Reg {
        let to = self.register(op.to());
        self.push(Op::Bin { op, to, a, b, site });
        to
    }

    pub(crate) fn select(&mut self, condition: Reg, a: Reg, b: Reg) -> Reg {
        let to = self.register(self.ty(a));
        self.push(Op::Select { to, condition, a, b });
        to
    }

    /// Where a work item is along one axis.
    pub(crate) fn id(&mut self, id: Id, axis: Axis) -> Reg {
        let to = self.register(Ty::I32);
        self.push(Op::Id { id, to, axis });
        to
    }

    /// The same in a dimension that is computed. Those other than 0, 1 and 2 have one item of number 0.
    pub(crate) fn id_of(&mut self, id: Id, dimension: Reg, site: Site) -> Reg {
        if let KnownValue::Constant(bits) = self.known(dimension) {
            let axis = usize::try_from(bits).ok().and_then(|n| Axis::ALL.get(n));
            return match axis {
                Some(axis) => self.id(id, *axis),
                None => self.constant(Ty::I32, u64::from(id.nowhere())),
            };
        }
        let mut found = self.constant(Ty::I32, u64::from(id.nowhere()));
        for (n, axis) in (0..).zip(Axis::ALL) {
            let (own, number) = (self.id(id, axis), self.constant(Ty::I32, n));
            let is_it = self.binary(Bin::I32Eq, dimension, number, site);
            found = self.select(is_it, own, found);
        }
        found
    }

    /// One over the square root, rounded twice, the same everywhere.
    pub(crate) fn rsqrt_double(&mut self, x: Reg, site: Site) -> Reg {
        let root = self.unary(Un::F64Sqrt, x, site);
        let one = self.constant(Ty::F64, 1.0_f64.to_bits());
        self.binary(Bin::F64Div, one, root, site)
    }

    /// A float from the upper half of its bits, which are the lower half of a register. A NaN is made, not kept, as
    /// multiplying makes one.
    pub(crate) fn widen_bfloat(&mut self, bits: Reg, site: Site) -> Reg {
        let half = self.constant(Ty::I32, 16);
        let whole = self.binary(Bin::I32Shl, bits, half, site);
        let float = self.unary(Un::F32ReinterpretI32, whole, site);
        let one = self.constant(Ty::F32, u64::from(1.0_f32.to_bits()));
        self.binary(Bin::F32Mul, float, one, site)
    }

    /// The upper half of a float's bits, rounded to the nearest, ties to even. A NaN becomes the one of that type.
    pub(crate) fn round_to_bfloat(&mut self, x: Reg, site: Site) -> Reg {
        let (half, one) = (self.constant(Ty::I32, 16), self.constant(Ty::I32, 1));
        let bits = self.unary(Un::I32ReinterpretF32, x, site);
        // What is nearly half of what is cut off, and all of half where the last bit that stays is odd.
        let high = self.binary(Bin::I32ShrU, bits, half, site);
        let odd = self.binary(Bin::I32And, high, one, site);
        let below_half = self.constant(Ty::I32, 0x7fff);
        let up = self.binary(Bin::I32Add, odd, below_half, site);
        let sum = self.binary(Bin::I32Add, bits, up, site);
        let rounded = self.binary(Bin::I32ShrU, sum, half, site);
        let nan = self.constant(Ty::I32, 0x7fc0);
        let is_nan = self.binary(Bin::F32Ne, x, x, site);
        self.select(is_nan, nan, rounded)
    }

    /// The item's number in its subgroup.
    pub(crate) fn lane(&mut self, site: Site) -> Reg {
        // In its group, counted along x first.
        let mut number = self.id(Id::Local, Axis::Z);
        for axis in [Axis::Y, Axis::X] {
            let (size, own) = (self.id(Id::LocalSize, axis), self.id(Id::Local, axis));
            number = self.binary(Bin::I32Mul, number, size, site);
            number = self.binary(Bin::I32Add, number, own, site);
        }
        let mask = self.constant(Ty::I32, u64::from(SUBGROUP - 1));
        self.binary(Bin::I32And, number, mask, site)
    }

    /// Takes so many bytes of the group's shared memory. None if there would be more than the most.
    pub(crate) fn shared(&mut self, bytes: u64, bytes_max: u32, site: Site) -> Option<Reg> {
        let from = self.shared_bytes.next_multiple_of(16);
        let end = u32::try_from(bytes).ok().and_then(|bytes| from.checked_add(bytes));
        self.shared_bytes = end.filter(|end| *end <= bytes_max)?;
        let base = self.register(Ty::I32);
        let to = self.register(Ty::I32);
        self.push(Op::Shared { to: base });
        let from = self.constant(Ty::I32, u64::from(from));
        self.push(Op::Bin { op: Bin::I32Add, to, a: base, b: from, site });
        Some(to)
    }

    /// Whether there may be another.
    pub(crate) fn barrier(&mut self, site: Site) -> bool {
        if self.barriers >= BARRIERS_MAX {
            return false;
        }
        self.barriers += 1;
        self.push(Op::Barrier { site });
        true
    }

    /// Whether there may be another exchange of registers, at which items wait on a CPU.
    pub(crate) fn exchange(&mut self) -> bool {
        let has_room = self.barriers < BARRIERS_MAX;
        self.barriers += usize::from(has_room);
        has_room
    }

    /// What the items of a subgroup do together, if there may be another.
    pub(crate) fn subgroup(&mut self, op: SubgroupOp, value: Reg, ty: Ty, site: Site) -> Option<Reg> {
        if self.subgroups >= SUBGROUPS_MAX {
            return None;
        }
        self.subgroups += 1;
        let to = self.register(ty);
        self.push(Op::Subgroup { op, to, value, site });
        Some(to)
    }

    /// A product of matrices by a subgroup. Whether there may be another.
    pub(crate) fn product(&mut self, product: Product, site: Site) -> bool {
        if self.subgroups >= SUBGROUPS_MAX {
            return false;
        }
        self.subgroups += 1;
        self.push(Op::Product { product: Box::new(product), site });
        true
    }

    /// Assigns several registers at once: none is read after it was written.
    pub(crate) fn move_all(&mut self, to: &[Reg], from: &[Reg]) {
        let written: HashMap<Reg, usize> = to.iter().enumerate().map(|(n, to)| (*to, n)).collect();
        let is_early = |(n, from): (usize, &Reg)| written.get(from).is_some_and(|written| *written < n);
        let is_tangled = from.iter().enumerate().any(is_early);
        let mut from = from.to_vec();
        if is_tangled {
            for reg in &mut from {
                let copy = self.register(self.ty(*reg));
                self.push(Op::Move { to: copy, from: *reg });
                *reg = copy;
            }
        }
        for (to, from) in to.iter().zip(from) {
            if *to != from {
                self.push(Op::Move { to: *to, from });
            }
        }
    }

    pub(crate) fn jump(&mut self, jump: &Jump) {
        self.move_all(&jump.to, &jump.from);
        self.push(Op::Branch { label: jump.label });
    }

    pub(crate) fn jump_if(&mut self, condition: Reg, jump: &Jump) {
        if jump.to.is_empty() {
            return self.push(Op::BranchIf { condition, label: jump.label });
        }
        let around = self.label();
        self.push(Op::If { condition, label: around });
        self.jump(jump);
        self.push(Op::End { label: around });
    }

    /// The last label is where every other index goes. There is one jump for each label, however often that is listed,
    /// the innermost first.
    pub(crate) fn jump_table(&mut self, index: Reg, labels: Vec<Label>, jumps: &[Jump]) {
        if jumps.iter().all(|jump| jump.to.is_empty()) {
            return self.push(Op::BranchTable { index, labels });
        }
        // To a block each, whose end assigns what the branch carries.
        let exits: HashMap<u32, Label> = jumps.iter().map(|jump| (jump.label.0, self.label())).collect();
        let exit = |label: Label| exits.get(&label.0).copied().unwrap_or(label);
        for jump in jumps.iter().rev() {
            self.push(Op::Block { label: exit(jump.label) });
        }
        self.push(Op::BranchTable { index, labels: labels.into_iter().map(exit).collect() });
        for jump in jumps {
            self.push(Op::End { label: exit(jump.label) });
            self.jump(jump);
        }
    }

    /// `for n in 0..count { to[n] = value }`, a byte at a time.
    pub(crate) fn memory_fill(&mut self, to: Reg, value: Reg, count: Reg, site: Site) {
        self.push(Op::CheckRange { start: to, count, is_write: true, site });
        let n = self.register(Ty::I32);
        self.push(Op::Const { to: n, bits: 0 });
        self.counted(n, count, site, |asm| {
            let at = asm.binary(Bin::I32Add, to, n, site);
            asm.push(Op::Store { access: BYTE, at: Address::new(at, 0), value, site });
        });
    }

    /// A byte at a time, from the end that does not overwrite what is still to be read.
    pub(crate) fn memory_copy(&mut self, to: Reg, from: Reg, count: Reg, site: Site) {
        self.push(Op::CheckRange { start: from, count, is_write: false, site });
        self.push(Op::CheckRange { start: to, count, is_write: true, site });
        let (n, is_upward) = (self.register(Ty::I32), self.register(Ty::I32));
        self.push(Op::Const { to: n, bits: 0 });
        self.push(Op::Bin { op: Bin::I32LeU, to: is_upward, a: to, b: from, site });
        let one = self.constant(Ty::I32, 1);
        let last = self.binary(Bin::I32Sub, count, one, site);
        self.counted(n, count, site, |asm| {
            let (down, at) = (asm.register(Ty::I32), asm.register(Ty::I32));
            asm.push(Op::Bin { op: Bin::I32Sub, to: down, a: last, b: n, site });
            asm.push(Op::Select { to: at, condition: is_upward, a: n, b: down });
            let byte = asm.register(Ty::I32);
            let source = asm.binary(Bin::I32Add, from, at, site);
            asm.push(Op::Load { to: byte, access: BYTE, at: Address::new(source, 0), site });
            let target = asm.binary(Bin::I32Add, to, at, site);
            asm.push(Op::Store { access: BYTE, at: Address::new(target, 0), value: byte, site });
        });
    }

    /// A loop with a counter `n`, from what it is to `count`.
    fn counted(&mut self, n: Reg, count: Reg, site: Site, body: impl FnOnce(&mut Self)) {
        let (out, again) = (self.label(), self.label());
        self.push(Op::Block { label: out });
        self.push(Op::Loop { label: again });
        let is_over = self.binary(Bin::I32GeU, n, count, site);
        self.push(Op::BranchIf { condition: is_over, label: out });
        body(self);
        let one = self.constant(Ty::I32, 1);
        let next = self.binary(Bin::I32Add, n, one, site);
        self.push(Op::Move { to: n, from: next });
        self.push(Op::Branch { label: again });
        self.push(Op::End { label: again });
        self.push(Op::End { label: out });
    }

    /// What was made, without a stack and without data.
    pub(crate) fn body(self, name: &str, params: Vec<Reg>) -> Body {
        Body {
            name: name.to_owned(),
            params,
            types: self.types,
            ops: self.ops,
            sites: self.sites,
            shared_bytes: self.shared_bytes,
            stack_top: 0,
            stack_bytes: 0,
            stack_pointer: None,
            data: Vec::new(),
            data_address: 0,
        }
    }
}
