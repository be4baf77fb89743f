//! What is known about registers, whatever path was taken (a dataflow analysis to a fixed point): the provenance of an
//! address, that is, which window it comes from; how it is aligned; whether a float's NaN is one that was computed;
//! constants. Legalisation decides by it, and the emitters ask it what a register is a fixed distance from.
//!
//! Nothing here is needed for safety: the fence checks every access in any case, against the window that is named here
//! or against all of them. Where an address comes from must be right for results to be right: an access through the
//! wrong window would trap.

use std::collections::HashMap;

use crate::ir::{Bin, BinaryClass, Body, Op, Reg, Ty, UnaryClass, low_half};

/// Operations that assign no register, of which there is nothing to know. One that is added has to be put here, or into
/// the matches that use this.
macro_rules! assigns_nothing {
    () => {
        Op::Barrier { .. }
            | Op::Store { .. }
            | Op::AtomicStore { .. }
            | Op::CheckRange { .. }
            | Op::Fence
            | Op::Trap { .. }
            | Op::TrapIf { .. }
            | Op::Block { .. }
            | Op::Loop { .. }
            | Op::If { .. }
            | Op::Else { .. }
            | Op::End { .. }
            | Op::Branch { .. }
            | Op::BranchIf { .. }
            | Op::BranchTable { .. }
            | Op::Return
    };
}

/// Going over the operations this often finds nearly everything; what still changes then is taken to be unknown. Code
/// that needs more is made to.
const ROUNDS_MAX: usize = 12;

/// What an address is computed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddressSource {
    Param(u16),
    Stack,
    Shared,
}

/// A sum of addresses and numbers: which addresses, and how often each. `p + (q - p)` comes from `q`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// Not assigned yet, as far as is known.
    Unset,
    Sum([Option<(AddressSource, i8)>; 2]),
    Unknown,
}

const NUMBER: Origin = Origin::Sum([None, None]);

impl Origin {
    fn from(source: AddressSource) -> Origin {
        Origin::Sum([Some((source, 1)), None])
    }

    fn join(self, other: Origin) -> Origin {
        match (self, other) {
            (Origin::Unset, other) | (other, Origin::Unset) => other,
            (a, b) if a == b => a,
            _ => Origin::Unknown,
        }
    }

    fn plus(self, other: Origin, sign: i8) -> Origin {
        let (Origin::Sum(a), Origin::Sum(b)) = (self, other) else {
            return if self == Origin::Unset || other == Origin::Unset { Origin::Unset } else { Origin::Unknown };
        };
        let mut terms: Vec<(AddressSource, i8)> = a.into_iter().flatten().collect();
        for (source, times) in b.into_iter().flatten() {
            match terms.iter_mut().find(|(own, _)| *own == source) {
                Some((_, own)) => *own += times * sign,
                None => terms.push((source, times * sign)),
            }
        }
        terms.retain(|(_, times)| *times != 0);
        match terms.as_slice() {
            [] => NUMBER,
            [one] if one.1.abs() <= 2 => Origin::Sum([Some(*one), None]),
            [one, two] if one.1.abs() <= 2 && two.1.abs() <= 2 => {
                // In one order, so that equal sums are equal.
                let in_order = order(one.0) < order(two.0);
                let (first, second) = if in_order { (one, two) } else { (two, one) };
                Origin::Sum([Some(*first), Some(*second)])
            }
            _ => Origin::Unknown,
        }
    }
}

fn order(source: AddressSource) -> u32 {
    match source {
        AddressSource::Param(n) => u32::from(n),
        AddressSource::Stack => 1 << 16,
        AddressSource::Shared => 1 << 17,
    }
}

/// Whether a float's bits can be a NaN, and of which kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Nan {
    /// One whose bits must be kept: it was loaded, or made from an integer.
    raw: bool,
    /// One that an operation made, whose bits are whatever the device makes them until they are looked at.
    computed: bool,
}

pub(crate) struct Facts {
    origins: Vec<Origin>,
    /// The number of low bits that are zero.
    zeros: Vec<u8>,
    nans: Vec<Nan>,
    /// Of registers that are assigned once, and a constant then.
    constants: Vec<Option<u64>>,
    /// What a register is the sum of: another, and a number.
    roots: Vec<(Reg, i32)>,
    /// Whether one operation assigns it, and no other.
    singles: Vec<bool>,
    /// What is added to the address of a window to make a register.
    beyond: HashMap<Reg, (u16, Reg)>,
}

impl Facts {
    /// `windows` are the parameters that are addresses of windows, all of them aligned to 16 bytes.
    pub(crate) fn of(body: &Body, windows: &[bool]) -> Facts {
        let count = body.types.len();
        let mut facts = Facts {
            origins: vec![Origin::Unset; count],
            zeros: vec![32; count],
            nans: vec![Nan::default(); count],
            constants: constants(body),
            roots: Vec::new(),
            singles: singles(body),
            beyond: beyond(body, windows),
        };
        facts.roots = facts.find_roots(body);
        for (n, reg) in body.params.iter().enumerate() {
            let is_window = windows.get(n).copied().unwrap_or(false);
            let at = reg.0 as usize;
            facts.origins[at] = match u16::try_from(n) {
                Ok(n) if is_window => Origin::from(AddressSource::Param(n)),
                _ => NUMBER,
            };
            facts.zeros[at] = if is_window { 4 } else { 0 };
            facts.nans[at].raw = body.ty(*reg).is_float();
        }
        let mut rounds = 0;
        while facts.round(body) {
            rounds += 1;
            if rounds == ROUNDS_MAX {
                facts.give_up(body);
                break;
            }
        }
        facts
    }

    /// Goes over the operations once. Whether anything changed.
    fn round(&mut self, body: &Body) -> bool {
        let mut has_changed = false;
        for op in &body.ops {
            for to in op.assigned() {
                let at = to.0 as usize;
                let origin = if body.stack_pointer == Some(to) {
                    Origin::from(AddressSource::Stack)
                } else {
                    self.origins[at].join(self.origin(op))
                };
                let zeros = self.zeros[at].min(self.low_zeros(op));
                let (nan, more) = (self.nans[at], self.nan(body, op));
                let nan = Nan { raw: nan.raw | more.raw, computed: nan.computed | more.computed };
                has_changed |= origin != self.origins[at] || zeros != self.zeros[at] || nan != self.nans[at];
                (self.origins[at], self.zeros[at], self.nans[at]) = (origin, zeros, nan);
            }
        }
        has_changed
    }

    /// What has not settled is taken to be unknown, until that has settled.
    fn give_up(&mut self, body: &Body) {
        let before = (self.origins.clone(), self.zeros.clone());
        self.round(body);
        for at in 0..self.origins.len() {
            if self.origins[at] != before.0[at] || self.zeros[at] != before.1[at] {
                (self.origins, self.zeros) = (vec![Origin::Unknown; self.origins.len()], vec![0; self.zeros.len()]);
                break;
            }
        }
        // Only ever more; a register has two of them, so that this ends.
        for nan in &mut self.nans {
            *nan = Nan { raw: true, computed: true };
        }
    }

    fn origin(&self, op: &Op) -> Origin {
        let of = |reg: &Reg| self.origins[reg.0 as usize];
        match op {
            Op::Move { from, .. } => of(from),
            Op::Bin { op, a, b, .. } => match op.class() {
                BinaryClass::Add => of(a).plus(of(b), 1),
                BinaryClass::Sub => of(a).plus(of(b), -1),
                // Rounding an address down leaves it the same address's.
                BinaryClass::And => match (of(a), of(b)) {
                    (Origin::Unset, _) | (_, Origin::Unset) => Origin::Unset,
                    (pointer, NUMBER) | (NUMBER, pointer) => pointer,
                    _ => Origin::Unknown,
                },
                BinaryClass::Or
                | BinaryClass::Mul
                | BinaryClass::Shl
                | BinaryClass::Integer
                | BinaryClass::Divide
                | BinaryClass::DivideSigned
                | BinaryClass::Float
                | BinaryClass::Copysign => NUMBER,
            },
            Op::Select { a, b, .. } => of(a).join(of(b)),
            Op::Shared { .. } => Origin::from(AddressSource::Shared),
            Op::Const { .. }
            | Op::Canonical { .. }
            | Op::Un { .. }
            | Op::Math { .. }
            | Op::Id { .. }
            | Op::Shuffle { .. }
            | Op::Subgroup { .. }
            | Op::Product { .. }
            | Op::Gpu { .. }
            | Op::Load { .. }
            | Op::AtomicLoad { .. }
            | Op::Atomic { .. } => NUMBER,
            assigns_nothing!() => NUMBER,
        }
    }

    fn low_zeros(&self, op: &Op) -> u8 {
        let of = |reg: &Reg| self.zeros[reg.0 as usize];
        match op {
            Op::Const { bits, .. } => u8::try_from((*bits | 1 << 32).trailing_zeros()).unwrap_or(0),
            Op::Move { from, .. } => of(from),
            Op::Bin { op, a, b, .. } => match op.class() {
                BinaryClass::Add | BinaryClass::Sub | BinaryClass::Or => of(a).min(of(b)),
                BinaryClass::And => of(a).max(of(b)),
                BinaryClass::Mul => of(a).saturating_add(of(b)).min(32),
                BinaryClass::Shl => match self.constant(*b) {
                    Some(by) => of(a).saturating_add((by & 31) as u8).min(32),
                    None => of(a),
                },
                BinaryClass::Integer
                | BinaryClass::Divide
                | BinaryClass::DivideSigned
                | BinaryClass::Float
                | BinaryClass::Copysign => 0,
            },
            Op::Select { a, b, .. } => of(a).min(of(b)),
            Op::Shared { .. } => 4,
            Op::Canonical { .. }
            | Op::Un { .. }
            | Op::Math { .. }
            | Op::Id { .. }
            | Op::Shuffle { .. }
            | Op::Subgroup { .. }
            | Op::Product { .. }
            | Op::Gpu { .. }
            | Op::Load { .. }
            | Op::AtomicLoad { .. }
            | Op::Atomic { .. } => 0,
            assigns_nothing!() => 0,
        }
    }

    fn nan(&self, body: &Body, op: &Op) -> Nan {
        let of = |reg: &Reg| self.nans[reg.0 as usize];
        let (raw, computed) = (Nan { raw: true, computed: false }, Nan { raw: false, computed: true });
        match op {
            Op::Const { to, bits } => match body.ty(*to) {
                Ty::F32 if f32::from_bits(low_half(*bits)).is_nan() => raw,
                Ty::F64 if f64::from_bits(*bits).is_nan() => raw,
                Ty::I32 | Ty::I64 | Ty::F32 | Ty::F64 => Nan::default(),
            },
            // Another item's, as it is there.
            Op::Move { from, .. } | Op::Shuffle { value: from, .. } => of(from),
            Op::Select { a, b, .. } => Nan { raw: of(a).raw | of(b).raw, computed: of(a).computed | of(b).computed },
            Op::Un { op, a, .. } => match op.class() {
                UnaryClass::Abs => of(a),
                // Its sign is seen.
                UnaryClass::Neg | UnaryClass::FromBits => raw,
                UnaryClass::Float => computed,
                UnaryClass::Integer | UnaryClass::ToBits | UnaryClass::Convert(..) => Nan::default(),
            },
            Op::Bin { op, .. } => match op.class() {
                BinaryClass::Copysign => raw,
                BinaryClass::Float => computed,
                BinaryClass::Add
                | BinaryClass::Sub
                | BinaryClass::And
                | BinaryClass::Or
                | BinaryClass::Mul
                | BinaryClass::Shl
                | BinaryClass::Integer
                | BinaryClass::Divide
                | BinaryClass::DivideSigned => Nan::default(),
            },
            Op::Subgroup { op, value, .. } if op.hands_on() => of(value),
            Op::Subgroup { to, .. } | Op::Math { to, .. } if !body.ty(*to).is_float() => Nan::default(),
            Op::Subgroup { .. } | Op::Product { .. } | Op::Math { .. } | Op::Gpu { .. } => computed,
            Op::Canonical { .. } => raw,
            Op::Load { to, .. } if body.ty(*to).is_float() => raw,
            Op::Load { .. } | Op::Id { .. } | Op::Shared { .. } | Op::AtomicLoad { .. } | Op::Atomic { .. } => {
                Nan::default()
            }
            assigns_nothing!() => Nan::default(),
        }
    }

    /// Of registers that legalisation adds nothing is known, here and below.
    pub(crate) fn constant(&self, reg: Reg) -> Option<u64> {
        self.constants.get(reg.0 as usize).copied().flatten()
    }

    pub(crate) fn is_single(&self, reg: Reg) -> bool {
        self.singles.get(reg.0 as usize).copied().unwrap_or(false)
    }

    /// The same of a legalised kernel, whose own registers each get what one operation makes canonical.
    pub(crate) fn is_single_or_added(&self, reg: Reg) -> bool {
        self.singles.get(reg.0 as usize).copied().unwrap_or(true)
    }

    /// The register that another is a fixed distance from, and that distance.
    pub(crate) fn root(&self, reg: Reg) -> (Reg, i32) {
        self.roots.get(reg.0 as usize).copied().unwrap_or((reg, 0))
    }

    /// What a register is beyond the address of a window, if that is a register too.
    pub(crate) fn beyond(&self, reg: Reg, window: u16) -> Option<Reg> {
        self.beyond.get(&reg).filter(|(own, _)| *own == window).map(|(_, beyond)| *beyond)
    }

    /// The same for whichever window it is.
    pub(crate) fn beyond_any(&self, reg: Reg) -> Option<Reg> {
        self.beyond.get(&reg).map(|(_, beyond)| *beyond)
    }

    /// A register that is computed from another always belongs to the other's value of the moment: where paths meet, it
    /// would be another register. So what holds where it is assigned holds wherever it is used.
    fn find_roots(&self, body: &Body) -> Vec<(Reg, i32)> {
        let count = u32::try_from(body.types.len()).unwrap_or(u32::MAX);
        let mut roots: Vec<(Reg, i32)> = (0..count).map(|n| (Reg(n), 0)).collect();
        let number = |reg: &Reg| self.constant(*reg).map(|bits| low_half(bits).cast_signed());
        for op in &body.ops {
            let Op::Bin { op, to, a, b, .. } = op else { continue };
            let (to, from, by) = match (op.class(), number(a), number(b)) {
                (BinaryClass::Add, None, Some(by)) => (*to, *a, by),
                (BinaryClass::Add, Some(by), None) => (*to, *b, by),
                (BinaryClass::Sub, None, Some(by)) => (*to, *a, by.wrapping_neg()),
                _ => continue,
            };
            let (root, distance) = roots[from.0 as usize];
            // Near ones only: what is far apart is not checked together anyway.
            if let Some(distance) = distance.checked_add(by).filter(|distance| distance.unsigned_abs() < 1 << 16) {
                roots[to.0 as usize] = (root, distance);
            }
        }
        roots
    }

    /// Where an address comes from, if from one place only.
    pub(crate) fn source(&self, reg: Reg) -> Option<AddressSource> {
        match self.origins[reg.0 as usize] {
            Origin::Sum([Some((source, 1)), None]) => Some(source),
            Origin::Sum(_) | Origin::Unset | Origin::Unknown => None,
        }
    }

    pub(crate) fn is_aligned(&self, reg: Reg, bytes: u32) -> bool {
        1_u64 << self.zeros[reg.0 as usize].min(32) >= u64::from(bytes)
    }

    /// Whether a NaN in the register has to be made the one NaN before its bits are looked at.
    pub(crate) fn is_computed(&self, reg: Reg) -> bool {
        let nan = self.nans[reg.0 as usize];
        nan.computed && !nan.raw
    }

    /// Whether an operation hands on bits that must be kept.
    pub(crate) fn keeps_bits(&self, op: &Op) -> bool {
        match op {
            Op::Move { from, .. } | Op::Shuffle { value: from, .. } => !self.is_computed(*from),
            // Whichever was computed was seen to before.
            Op::Select { .. } => true,
            Op::Un { op, a, .. } => match op.class() {
                UnaryClass::Abs => !self.is_computed(*a),
                UnaryClass::Neg | UnaryClass::FromBits => true,
                UnaryClass::Integer | UnaryClass::Float | UnaryClass::ToBits | UnaryClass::Convert(..) => false,
            },
            Op::Bin { op, .. } => op.class() == BinaryClass::Copysign,
            // As they are in memory or in the code, or canonical.
            Op::Load { .. } | Op::Const { .. } | Op::Canonical { .. } => true,
            Op::Subgroup { op, value, .. } => op.hands_on() && !self.is_computed(*value),
            Op::Math { .. }
            | Op::Product { .. }
            | Op::Gpu { .. }
            | Op::Id { .. }
            | Op::Shared { .. }
            | Op::AtomicLoad { .. }
            | Op::Atomic { .. } => false,
            assigns_nothing!() => false,
        }
    }

    /// Whether the register also holds NaNs whose bits must be kept, so that computed ones are made the one NaN as they
    /// come.
    pub(crate) fn is_mixed(&self, reg: Reg) -> bool {
        let nan = self.nans[reg.0 as usize];
        nan.computed && nan.raw
    }
}

/// Parameters that addresses of accesses come from.
pub(crate) fn pointers(body: &Body) -> Vec<bool> {
    let possible: Vec<bool> = body.params.iter().map(|reg| body.ty(*reg) == Ty::I32).collect();
    let facts = Facts::of(body, &possible);
    let mut pointers = vec![false; possible.len()];
    for op in &body.ops {
        let range_start = if let Op::CheckRange { start, .. } = op { Some(*start) } else { None };
        let Some(address) = op.access().map(|(at, _)| at.base).or(range_start) else { continue };
        if let Some(AddressSource::Param(n)) = facts.source(address) {
            pointers[usize::from(n)] = true;
        }
    }
    pointers
}

fn beyond(body: &Body, windows: &[bool]) -> HashMap<Reg, (u16, Reg)> {
    let numbers = body.params.iter().zip(windows).zip(0_u16..);
    let windows: HashMap<Reg, u16> =
        numbers.filter(|((_, is_window), _)| **is_window).map(|((reg, _), n)| (*reg, n)).collect();
    let mut beyond = HashMap::new();
    for op in &body.ops {
        if let Op::Bin { op: Bin::I32Add, to, a, b, .. } = op {
            match (windows.get(a), windows.get(b)) {
                (Some(window), None) => drop(beyond.insert(*to, (*window, *b))),
                (None, Some(window)) => drop(beyond.insert(*to, (*window, *a))),
                _ => {}
            }
        }
    }
    beyond
}

fn singles(body: &Body) -> Vec<bool> {
    let mut counts = vec![0_u8; body.types.len()];
    body.params.iter().for_each(|reg| counts[reg.0 as usize] = 1);
    for to in body.ops.iter().flat_map(Op::assigned) {
        counts[to.0 as usize] = counts[to.0 as usize].saturating_add(1);
    }
    counts.into_iter().map(|count| count == 1).collect()
}

fn constants(body: &Body) -> Vec<Option<u64>> {
    let mut constants = vec![None; body.types.len()];
    let mut is_assigned = vec![false; body.types.len()];
    body.params.iter().for_each(|reg| is_assigned[reg.0 as usize] = true);
    for op in &body.ops {
        let bits = if let Op::Const { bits, .. } = op { Some(*bits) } else { None };
        for to in op.assigned() {
            constants[to.0 as usize] = bits.filter(|_| !is_assigned[to.0 as usize]);
            is_assigned[to.0 as usize] = true;
        }
    }
    constants
}
