//! From a kernel's operations to those that both emitters translate as they stand. What Wasm says implicitly is said
//! here in operations and facts of their own, once for every device:
//!
//! - A division or conversion that may trap is preceded by checks ([`Op::TrapIf`]); so is an atomic that may be
//!   unaligned.
//! - Of the NaNs that operations make there is only one. It becomes that one ([`Op::Canonical`]) where its bits are
//!   looked at: before a store, a reinterpretation, a change of sign, and where it meets NaNs whose bits are kept
//!   (`facts.rs`).
//! - An access says which region it goes to and whether it is aligned ([`Address`]): the window its address comes from,
//!   the stack, shared memory, or any of them. Atomics on the private stack are looked up among the others, and not
//!   found. A window that may be smaller than an access, or empty, is a region of another kind.
//! - Where an address may be of any region, which ones an access may find is decided here too ([`Lookup`]).
//!
//! Accesses that are checked together are found on the result (`groups.rs`). What stays in the emitters, because it is
//! how a device is fenced rather than what a kernel means: PTX clamps an offset and traps later (`ptx/memory.rs`),
//! checks counted loops before they begin (`ptx/counted.rs`), and polls; Wasm traps at once.

use crate::facts::{AddressSource, Facts};
use crate::gpu::COPY_BYTES;
use crate::groups::{self, AccessGroups};
use crate::ir::{
    Address, BinaryClass, Body, Op, PRODUCT_COST, Reg, Region, SHARED_ADDRESS, SUBGROUP_COST, Site, Test, TrapKind, Ty,
    UnaryClass,
};

/// What is known about the sizes of windows before a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowSizes {
    /// A launch sees to it that each has room for what is accessed together.
    FitAccesses,
    /// Any, even none.
    Any,
    /// Whatever is accessed is inside: whoever built the kernel sees to that, and to everything else that would trap.
    /// Nothing is checked, nothing polls, and a NaN has whatever bits the device makes. Never for what a guest wrote.
    Trusted,
}

/// A kernel that emitters can translate.
pub(crate) struct Legal {
    pub body: Body,
    /// About the registers that the kernel had before; of those that were added nothing is known.
    pub facts: Facts,
    pub windows: Vec<bool>,
    pub groups: AccessGroups,
    /// Whether there is no fence.
    pub is_trusted: bool,
    /// For each operation, and for the end, the operations before it that the kernel itself has: what a loop costs does
    /// not depend on its checks.
    costs: Vec<u32>,
}

impl Legal {
    /// Operations of the kernel itself from one to another, without the last.
    pub(crate) fn cost(&self, from: usize, to: usize) -> usize {
        let at = |n: usize| self.costs.get(n).or(self.costs.last()).copied().unwrap_or(0);
        at(to).saturating_sub(at(from)) as usize
    }

    /// The regions that an access by an address of unknown origin may find.
    pub(crate) fn candidates(&self, lookup: Lookup) -> Vec<Candidate> {
        let numbers = (0..u16::MAX).zip(&self.windows).filter(|(_, is_window)| **is_window);
        let mut candidates: Vec<Candidate> = numbers.map(|(n, _)| Candidate::Window(n)).collect();
        let body = &self.body;
        if body.shared_bytes > 0 {
            candidates.push(Candidate::Shared);
        }
        // What no other work item sees has no atomics.
        let is_private = lookup != Lookup::Atomic;
        if body.stack_bytes > 0 && is_private {
            candidates.push(Candidate::Stack);
        }
        if !body.data.is_empty() && lookup == Lookup::Read {
            candidates.push(Candidate::Data);
        }
        candidates
    }

    /// Whether an access that finds nothing has to be told apart from one to constant data.
    pub(crate) fn may_write_data(&self, lookup: Lookup) -> bool {
        !self.body.data.is_empty() && lookup != Lookup::Read
    }

    /// Where a region that is no window begins, in the kernel's addresses, and how many bytes it has.
    pub(crate) fn extent(&self, candidate: Candidate) -> (u32, u32) {
        let body = &self.body;
        match candidate {
            Candidate::Shared => (SHARED_ADDRESS, body.shared_bytes),
            Candidate::Stack => (body.stack_top - body.stack_bytes, body.stack_bytes),
            Candidate::Data => (body.data_address, u32::try_from(body.data.len()).unwrap_or(u32::MAX)),
            // Told by a launch.
            Candidate::Window(_) => (0, 0),
        }
    }
}

/// What an access by an address of unknown origin does there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lookup {
    Read,
    Write,
    /// An atomic of any kind, even one that only reads: it needs memory that others may write.
    Atomic,
}

impl Lookup {
    pub(crate) const ALL: [Lookup; 3] = [Lookup::Read, Lookup::Write, Lookup::Atomic];
}

/// A region that a lookup may find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Candidate {
    Window(u16),
    Shared,
    Stack,
    /// The module's constant data.
    Data,
}

pub(crate) fn legalize(mut body: Body, windows: &[bool], sizes: WindowSizes) -> Legal {
    let facts = Facts::of(&body, windows);
    let ops = std::mem::take(&mut body.ops);
    let mut legalizer = Legalizer { body, facts, windows, sizes, costs: Vec::with_capacity(ops.len()), cost: 0 };
    for op in ops {
        let cost = if matches!(op, Op::Subgroup { .. }) { SUBGROUP_COST } else { 1 };
        let cost = if matches!(op, Op::Product { .. }) { PRODUCT_COST } else { cost };
        legalizer.operation(op);
        legalizer.cost += cost;
    }
    let Legalizer { body, facts, mut costs, cost, .. } = legalizer;
    costs.push(cost);
    let is_trusted = sizes == WindowSizes::Trusted;
    let groups = groups::groups(&body, &facts, is_trusted);
    Legal { body, facts, windows: windows.to_vec(), groups, is_trusted, costs }
}

struct Legalizer<'w> {
    /// What was made so far.
    body: Body,
    facts: Facts,
    windows: &'w [bool],
    sizes: WindowSizes,
    costs: Vec<u32>,
    /// The operations of the kernel itself before the one at hand.
    cost: u32,
}

impl Legalizer<'_> {
    fn push(&mut self, op: Op) {
        self.body.ops.push(op);
        self.costs.push(self.cost);
    }

    fn is_trusted(&self) -> bool {
        self.sizes == WindowSizes::Trusted
    }

    fn trap_if(&mut self, test: Test, kind: TrapKind, site: Site) {
        if self.is_trusted() {
            return;
        }
        self.push(Op::TrapIf { test, kind, site });
    }

    fn operation(&mut self, op: Op) {
        match op {
            Op::Un { op, to, a, site } => {
                let a = self.unary_operand(op.class(), a, site);
                self.assign(Op::Un { op, to, a, site });
            }
            Op::Bin { op, to, a, b, site } => {
                let (a, b) = self.binary_operands(op.class(), a, b, site);
                self.assign(Op::Bin { op, to, a, b, site });
            }
            // Where NaNs of both kinds meet, those that were computed become the canonical one as they come.
            Op::Select { to, condition, a, b } if self.is_mixed(to) => {
                let (a, b) = (self.observed(a), self.observed(b));
                self.push(Op::Select { to, condition, a, b });
            }
            Op::Move { to, from } if self.is_mixed(to) && !self.facts.keeps_bits(&op) => {
                self.push(Op::Canonical { to, from });
            }
            Op::Load { to, access, at, site } => {
                let at = self.placed(at, access.bytes);
                self.push(Op::Load { to, access, at, site });
            }
            Op::Store { access, at, value, site } => {
                let value = self.observed(value);
                let at = self.placed(at, access.bytes);
                self.push(Op::Store { access, at, value, site });
            }
            Op::AtomicLoad { to, access, at, site } => {
                let at = self.placed_atomic(at, access.bytes, site);
                self.push(Op::AtomicLoad { to, access, at, site });
            }
            Op::AtomicStore { access, at, value, site } => {
                let at = self.placed_atomic(at, access.bytes, site);
                self.push(Op::AtomicStore { access, at, value, site });
            }
            Op::Atomic { op, to, access, at, value, expected, site } => {
                let at = self.placed_atomic(at, access.bytes, site);
                self.push(Op::Atomic { op, to, access, at, value, expected, site });
            }
            Op::Math { .. } | Op::Subgroup { .. } => self.assign(op),
            Op::Gpu { mut op, site } => {
                for address in op.addresses_mut().into_iter().flatten() {
                    *address = self.placed(*address, COPY_BYTES);
                }
                self.push(Op::Gpu { op, site });
            }
            Op::Const { .. }
            | Op::Move { .. }
            | Op::Select { .. }
            | Op::Id { .. }
            | Op::Shared { .. }
            | Op::Shuffle { .. }
            | Op::Product { .. }
            | Op::Barrier { .. }
            | Op::CheckRange { .. }
            | Op::Fence
            | Op::Trap { .. }
            | Op::TrapIf { .. }
            | Op::Canonical { .. }
            | Op::Block { .. }
            | Op::Loop { .. }
            | Op::If { .. }
            | Op::Else { .. }
            | Op::End { .. }
            | Op::Branch { .. }
            | Op::BranchIf { .. }
            | Op::BranchTable { .. }
            | Op::Return => self.push(op),
        }
    }

    /// Checks before an operation of one operand, and the register to read instead.
    fn unary_operand(&mut self, class: UnaryClass, a: Reg, site: Site) -> Reg {
        match class {
            UnaryClass::Neg | UnaryClass::ToBits => self.observed(a),
            UnaryClass::Convert(least, below) => {
                self.trap_if(Test::IsNan(a), TrapKind::BadConversion, site);
                self.trap_if(Test::IsOutside(a, least, below), TrapKind::IntegerOverflow, site);
                a
            }
            UnaryClass::Integer | UnaryClass::Float | UnaryClass::Abs | UnaryClass::FromBits => a,
        }
    }

    fn binary_operands(&mut self, class: BinaryClass, a: Reg, b: Reg, site: Site) -> (Reg, Reg) {
        match class {
            BinaryClass::Copysign => (self.observed(a), self.observed(b)),
            BinaryClass::Divide => {
                self.trap_if(Test::IsZero(b), TrapKind::DivideByZero, site);
                (a, b)
            }
            BinaryClass::DivideSigned => {
                self.trap_if(Test::IsZero(b), TrapKind::DivideByZero, site);
                self.trap_if(Test::Overflows(a, b), TrapKind::IntegerOverflow, site);
                (a, b)
            }
            BinaryClass::Add
            | BinaryClass::Sub
            | BinaryClass::And
            | BinaryClass::Or
            | BinaryClass::Mul
            | BinaryClass::Shl
            | BinaryClass::Integer
            | BinaryClass::Float => (a, b),
        }
    }

    /// An operation whose result may be a NaN that was computed, in a register that also holds others.
    fn assign(&mut self, op: Op) {
        let mixed = op.to().filter(|to| self.is_mixed(*to) && !self.facts.keeps_bits(&op));
        self.push(op);
        if let Some(to) = mixed {
            self.push(Op::Canonical { to, from: to });
        }
    }

    fn is_mixed(&self, reg: Reg) -> bool {
        !self.is_trusted() && self.body.ty(reg).is_float() && self.facts.is_mixed(reg)
    }

    /// A register with a float's bits as they are to be seen.
    fn observed(&mut self, reg: Reg) -> Reg {
        let ty = self.body.ty(reg);
        if self.is_trusted() || !ty.is_float() || !self.facts.is_computed(reg) {
            return reg;
        }
        let to = self.register(ty);
        self.push(Op::Canonical { to, from: reg });
        to
    }

    fn register(&mut self, ty: Ty) -> Reg {
        self.body.types.push(ty);
        Reg(u32::try_from(self.body.types.len() - 1).unwrap_or(u32::MAX))
    }

    fn placed(&self, at: Address, bytes: u32) -> Address {
        let is_aligned = self.facts.is_aligned(at.base, bytes) && at.offset.is_multiple_of(bytes);
        let is_aligned = is_aligned || self.is_trusted();
        Address { region: self.region(at.base), is_aligned, ..at }
    }

    fn placed_atomic(&mut self, at: Address, bytes: u32, site: Site) -> Address {
        let mut at = self.placed(at, bytes);
        if !at.is_aligned {
            self.trap_if(Test::IsUnaligned(at.base, at.offset, bytes), TrapKind::UnalignedAtomic, site);
            at.is_aligned = true;
        }
        if at.region == Region::Stack {
            at.region = Region::Any;
        }
        at
    }

    fn region(&self, base: Reg) -> Region {
        let is_window = |n: u16| self.windows.get(usize::from(n)).copied().unwrap_or(false);
        match self.facts.source(base) {
            Some(AddressSource::Param(n)) if is_window(n) => match self.sizes {
                WindowSizes::FitAccesses | WindowSizes::Trusted => Region::Window(n),
                WindowSizes::Any => Region::SmallWindow(n),
            },
            Some(AddressSource::Stack) if self.body.stack_bytes > 0 => Region::Stack,
            Some(AddressSource::Shared) if self.body.shared_bytes > 0 => Region::Shared,
            Some(AddressSource::Param(_) | AddressSource::Stack | AddressSource::Shared) | None => Region::Any,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Program;

    fn legal(text: &str, sizes: WindowSizes) -> Legal {
        let wasm = wat::parse_str(text).unwrap();
        let program = Program::read(&wasm).unwrap();
        let windows = program.pointers("k").unwrap();
        legalize(crate::lower::lower(&program, "k").unwrap(), &windows, sizes)
    }

    fn checks(legal: &Legal) -> Vec<TrapKind> {
        let kind = |op: &Op| if let Op::TrapIf { kind, .. } = op { Some(*kind) } else { None };
        legal.body.ops.iter().filter_map(kind).collect()
    }

    #[test]
    fn a_division_is_preceded_by_its_checks() {
        let legal = legal(
            r#"(module (memory 1) (func (export "k") (param i32 i32 i32)
                 (i32.store (local.get 0) (i32.div_s (local.get 1) (local.get 2)))
                 (i32.store (local.get 0) (i32.rem_s (local.get 1) (local.get 2)))))"#,
            WindowSizes::FitAccesses,
        );
        let checks = checks(&legal);
        assert_eq!(checks, [TrapKind::DivideByZero, TrapKind::IntegerOverflow, TrapKind::DivideByZero]);
        // Checks are not part of what a kernel costs.
        assert_eq!(legal.cost(0, legal.body.ops.len()), legal.body.ops.len() - checks.len());
    }

    #[test]
    fn a_conversion_looks_for_a_nan_first() {
        let legal = legal(
            r#"(module (memory 1) (func (export "k") (param i32 f32)
                 (i32.store (local.get 0) (i32.trunc_f32_s (local.get 1)))))"#,
            WindowSizes::FitAccesses,
        );
        let checks = checks(&legal);
        assert_eq!(checks, [TrapKind::BadConversion, TrapKind::IntegerOverflow]);
    }

    #[test]
    fn a_nan_is_made_canonical_where_it_is_seen_and_only_there() {
        let canonical = |value: &str| {
            let text = format!(
                r#"(module (memory 1) (func (export "k") (param i32 f32 f32) (f32.store (local.get 0) {value})))"#
            );
            let legal = legal(&text, WindowSizes::FitAccesses);
            legal.body.ops.iter().filter(|op| matches!(op, Op::Canonical { .. })).count()
        };
        let sum = "(f32.add (local.get 1) (local.get 2))";
        assert_eq!(canonical("(local.get 1)"), 0, "a parameter's bits are kept");
        assert_eq!(canonical(sum), 1);
        assert_eq!(canonical(&format!("(f32.mul {sum} {sum})")), 1, "what is computed with is not looked at");
        assert_eq!(canonical(&format!("(f32.neg {sum})")), 1, "its sign is");
        assert_eq!(canonical(&format!("(f32.copysign {sum} {sum})")), 2);
        assert_eq!(canonical(&format!("(select (local.get 1) {sum} (local.get 0))")), 1, "where both kinds meet");
    }

    #[test]
    fn accesses_say_where_they_go() {
        let text = r#"(module (import "kernel" "shared" (func $shared (param i32) (result i32))) (memory 1)
          (func (export "k") (param $p i32) (param $n i32) (local $s i32)
            (local.set $s (call $shared (i32.const 64)))
            (drop (i32.load (i32.add (local.get $p) (i32.shl (local.get $n) (i32.const 2)))))
            (drop (i32.load (i32.add (local.get $p) (local.get $n))))
            (drop (i32.load (local.get $s)))
            (drop (i32.load (i32.load (local.get $p))))))"#;
        let found = |sizes: WindowSizes| -> Vec<(Region, bool)> {
            let legal = legal(text, sizes);
            legal.body.ops.iter().filter_map(Op::access).map(|(at, _)| (at.region, at.is_aligned)).collect()
        };
        let window = |window: Region| {
            vec![(window, true), (window, false), (Region::Shared, true), (window, true), (Region::Any, false)]
        };
        assert_eq!(found(WindowSizes::FitAccesses), window(Region::Window(0)));
        assert_eq!(found(WindowSizes::Any), window(Region::SmallWindow(0)));
    }

    #[test]
    fn a_lookup_finds_only_what_it_may_use() {
        let legal = legal(
            r#"(module (import "kernel" "shared" (func $shared (param i32) (result i32))) (memory 1)
              (global $sp (mut i32) (i32.const 65536)) (data (i32.const 16) "constant")
              (func (export "k") (param $p i32) (local $f i32)
                (global.set $sp (local.tee $f (i32.sub (global.get $sp) (i32.const 16))))
                (i32.store (local.get $p) (call $shared (i32.const 64)))
                (drop (i32.atomic.load (local.get $f)))))"#,
            WindowSizes::FitAccesses,
        );
        let (window, shared, stack, data) =
            (Candidate::Window(0), Candidate::Shared, Candidate::Stack, Candidate::Data);
        assert_eq!(legal.candidates(Lookup::Read), [window, shared, stack, data]);
        assert_eq!(legal.candidates(Lookup::Write), [window, shared, stack]);
        assert_eq!(legal.candidates(Lookup::Atomic), [window, shared]);
        assert!(legal.may_write_data(Lookup::Atomic) && !legal.may_write_data(Lookup::Read));
        // The stack has no atomics: such an access goes to whatever else is there, which is nothing.
        let is_any = |op: &Op| matches!(op, Op::AtomicLoad { at, .. } if at.region == Region::Any);
        assert!(legal.body.ops.iter().any(is_any));
    }
}
