//! Counted loops: how often they go round (the trip count), and which addresses are induction variables, that is,
//! advance by the same stride each time. For those the fence checks once, before the loop, and the loop itself runs
//! without it (`ptx/counted.rs`). Found on a legalised kernel.
//!
//! Such a loop has no loop inside, goes round only from its end, and ends when its counter, an induction variable of
//! constant stride, reaches a loop-invariant number. Compilers leave loops in this form after strength reduction.

use std::collections::{HashMap, HashSet};

use crate::facts::Facts;
use crate::ir::{Bin, BinaryClass, Body, Flow, Label, Op, Reg, Region, Structure, low_half};
use crate::legalize::Legal;

/// Loops of more operations gain little and would be there twice.
const OPS_MAX: usize = 400;

/// The stride of an induction variable: what is added to it each time round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stride {
    Constant(i32),
    /// A loop invariant, shifted left.
    Register(Reg, u32),
}

/// Registers that are moved to, and from what.
pub(crate) type Moves = Vec<(Reg, Reg)>;

/// A register, how far it is shifted left, and whether it is subtracted.
pub(crate) type Term = (Reg, u32, bool);

/// An address that is an induction variable.
#[derive(Debug, Clone)]
pub(crate) struct InductionPointer {
    /// The register that accesses are a fixed distance from.
    pub address: Reg,
    /// Where they all go: what is a fixed distance from one address comes from the same.
    pub region: Region,
    /// Its value before the loop is the sum of these.
    pub terms: Vec<Term>,
    pub step: Stride,
    /// The lowest byte that is accessed and the end of the highest, relative to the address.
    pub low: i32,
    pub high: i32,
}

/// A counted loop.
#[derive(Debug, Clone)]
pub(crate) struct CountedLoop {
    pub label: Label,
    /// The operations of its body, without those that go round.
    pub body: std::ops::Range<usize>,
    /// What is moved before it goes round.
    pub moves: Moves,
    /// The operations that do so.
    pub moves_at: std::ops::Range<usize>,
    /// Where its end is.
    pub end: usize,
    pub counter: Reg,
    pub counter_step: i32,
    /// What the counter is compared with; zero if with nothing.
    pub until: Option<Reg>,
    /// Whether it is the counter before the step that is compared.
    pub is_before_step: bool,
    pub pointers: Vec<InductionPointer>,
    /// Labels of blocks inside.
    pub labels: HashSet<u32>,
}

/// The counted loop that begins with an operation, if it is one.
pub(crate) fn counted(legal: &Legal, start: usize) -> Option<CountedLoop> {
    let (body, facts) = (&legal.body, &legal.facts);
    let Op::Loop { label } = body.ops[start] else { return None };
    let (end, labels) = end_of(legal, start, label)?;
    let (tail, condition, moves) = tail_of(body, start, end, label)?;
    let mut inside: HashMap<Reg, Assignment> = HashMap::new();
    for (n, op) in body.ops.iter().enumerate().take(end).skip(start + 1) {
        for to in op.assigned() {
            let often = |own: &mut Assignment| *own = Assignment::Often;
            inside.entry(to).and_modify(often).or_insert(Assignment::Once(n));
        }
    }
    let headers: HashMap<Reg, Reg> = moves.iter().copied().collect();
    // Moved to twice, or from what is moved to: such a loop is not simple.
    if headers.len() != moves.len() || moves.iter().any(|(_, from)| headers.contains_key(from)) {
        return None;
    }
    let view = LoopView { body, facts, inside, moves: &moves, headers };
    let (counter, counter_step, until, is_before_step) = view.condition(condition)?;
    let mut pointers: HashMap<Reg, InductionPointer> = HashMap::new();
    let mut failed: HashSet<Reg> = HashSet::new();
    for op in &body.ops[start + 1..tail] {
        let (Op::Load { at, access, .. } | Op::Store { at, access, .. }) = op else { continue };
        let (address, distance) = facts.root(at.base);
        if failed.contains(&address) {
            continue;
        }
        let offset = if at.may_wrap() { None } else { i32::try_from(at.offset).ok() };
        let low = offset.map(|offset| distance + offset);
        let (Some(low), Ok(bytes)) = (low, i32::try_from(access.bytes)) else {
            // So far away it cannot be inside with the rest, and the whole address is left to the fence.
            pointers.remove(&address);
            failed.insert(address);
            continue;
        };
        let high = low + bytes;
        match pointers.entry(address) {
            std::collections::hash_map::Entry::Occupied(mut own) => {
                let own = own.get_mut();
                (own.low, own.high) = (own.low.min(low), own.high.max(high));
            }
            std::collections::hash_map::Entry::Vacant(place) => match view.pointer(address) {
                Some((terms, step)) => {
                    place.insert(InductionPointer { address, region: at.region, terms, step, low, high });
                }
                None => {
                    failed.insert(address);
                }
            },
        }
    }
    let mut pointers: Vec<InductionPointer> = pointers.into_values().collect();
    pointers.sort_unstable_by_key(|pointer| pointer.address);
    Some(CountedLoop {
        label,
        body: start + 1..tail,
        moves_at: if moves.is_empty() { tail..tail } else { tail + 1..tail + 1 + moves.len() },
        moves,
        end,
        counter,
        counter_step,
        until,
        is_before_step,
        pointers,
        labels,
    })
}

/// Where a loop ends, and the blocks inside. None if something in it keeps it from being simple.
fn end_of(legal: &Legal, start: usize, label: Label) -> Option<(usize, HashSet<u32>)> {
    let mut labels = HashSet::new();
    let is_near = |(n, _): &(usize, &Op)| legal.cost(start, *n) <= OPS_MAX;
    for (n, op) in legal.body.ops.iter().enumerate().skip(start + 1).take_while(is_near) {
        match op.flow() {
            Flow::Close(own) if own == label => return Some((n, labels)),
            Flow::Open(_, Structure::Loop) | Flow::Wait => return None,
            Flow::Leave if matches!(op, Op::BranchTable { .. } | Op::Return) => return None,
            Flow::Open(label, Structure::Block | Structure::If) => {
                labels.insert(label.0);
            }
            Flow::Straight | Flow::Else(_) | Flow::Close(_) | Flow::Leave => {}
        }
    }
    None
}

/// The end of a loop: where it begins, the condition for going round, and what is moved then.
fn tail_of(body: &Body, start: usize, end: usize, label: Label) -> Option<(usize, Reg, Moves)> {
    let rounds = |op: &&Op| matches!(op, Op::Branch { label: own } | Op::BranchIf { label: own, .. } if *own == label);
    if body.ops[start..end].iter().filter(rounds).count() != 1 {
        return None;
    }
    if let Op::BranchIf { condition, .. } = body.ops[end - 1] {
        return rounds(&&body.ops[end - 1]).then(|| (end - 1, condition, Vec::new()));
    }
    let Op::End { label: inner } = body.ops[end - 1] else { return None };
    let mut at = end - 2;
    if !rounds(&&body.ops[at]) {
        return None;
    }
    let mut moves = Vec::new();
    while at > start {
        at -= 1;
        let op = &body.ops[at];
        if let Op::Move { to, from } | Op::Canonical { to, from } = op {
            moves.push((*to, *from));
            continue;
        }
        let Op::If { condition, label } = op else { return None };
        moves.reverse();
        return (*label == inner).then_some((at, *condition, moves));
    }
    None
}

/// How a register is assigned in a loop.
enum Assignment {
    Once(usize),
    Often,
}

/// What the registers of a loop are.
struct LoopView<'b> {
    body: &'b Body,
    facts: &'b Facts,
    /// Registers that are assigned inside, and where.
    inside: HashMap<Reg, Assignment>,
    moves: &'b Moves,
    /// Registers that are moved to as it goes round, and from what.
    headers: HashMap<Reg, Reg>,
}

impl LoopView<'_> {
    fn is_fixed(&self, reg: Reg) -> bool {
        !self.inside.contains_key(&reg) || self.facts.constant(reg).is_some()
    }

    fn number(&self, reg: Reg) -> Option<i32> {
        self.facts.constant(reg).map(|bits| low_half(bits).cast_signed())
    }

    fn definition(&self, reg: Reg) -> Option<&Op> {
        match self.inside.get(&reg)? {
            Assignment::Once(at) if self.facts.is_single(reg) => Some(&self.body.ops[*at]),
            // Where paths meet it may be one thing or another.
            Assignment::Once(_) | Assignment::Often => None,
        }
    }

    /// What is added to a header each time round.
    fn step(&self, header: Reg) -> Option<Stride> {
        let next = *self.headers.get(&header)?;
        let Op::Bin { op, a, b, .. } = self.definition(next)? else { return None };
        match op.class() {
            BinaryClass::Add => {
                let other = if *a == header {
                    *b
                } else if *b == header {
                    *a
                } else {
                    return None;
                };
                match self.number(other) {
                    Some(number) => Some(Stride::Constant(number)),
                    None => self.is_fixed(other).then_some(Stride::Register(other, 0)),
                }
            }
            BinaryClass::Sub => {
                let by = self.number(*b)?.checked_neg()?;
                (*a == header).then_some(Stride::Constant(by))
            }
            BinaryClass::And
            | BinaryClass::Or
            | BinaryClass::Mul
            | BinaryClass::Shl
            | BinaryClass::Integer
            | BinaryClass::Divide
            | BinaryClass::DivideSigned
            | BinaryClass::Float
            | BinaryClass::Copysign => None,
        }
    }

    /// The counter, its step, what it is compared with, and whether before the step.
    fn condition(&self, condition: Reg) -> Option<(Reg, i32, Option<Reg>, bool)> {
        let counter = |reg: Reg| -> Option<(Reg, i32, bool)> {
            let is_header = self.headers.contains_key(&reg);
            let header = if is_header {
                reg
            } else {
                self.moves.iter().find(|(own, next)| *next == reg && self.step(*own).is_some())?.0
            };
            let Stride::Constant(step) = self.step(header)? else { return None };
            (step != 0 && step.unsigned_abs().is_power_of_two()).then_some((header, step, is_header))
        };
        if let Some((header, step, is_before)) = counter(condition) {
            return Some((header, step, None, is_before));
        }
        let Op::Bin { op: Bin::I32Ne, a, b, .. } = self.definition(condition)? else { return None };
        for (own, other) in [(*a, *b), (*b, *a)] {
            if self.is_fixed(other)
                && let Some((header, step, is_before)) = counter(own)
            {
                return Some((header, step, Some(other), is_before));
            }
        }
        None
    }

    /// An address as a sum of what does not change and at most one header.
    fn pointer(&self, address: Reg) -> Option<(Vec<Term>, Stride)> {
        let (mut terms, mut step) = (Vec::new(), Stride::Constant(0));
        self.sum(address, 0, false, &mut terms, &mut step, 0)?;
        Some((terms, step))
    }

    fn sum(
        &self,
        reg: Reg,
        shift: u32,
        is_negative: bool,
        terms: &mut Vec<Term>,
        step: &mut Stride,
        depth: u32,
    ) -> Option<()> {
        if depth > 6 || terms.len() > 6 {
            return None;
        }
        if self.headers.contains_key(&reg) {
            if *step != Stride::Constant(0) {
                return None;
            }
            *step = match (self.step(reg)?, is_negative) {
                (Stride::Constant(by), is_negative) => {
                    let by = by.checked_shl(shift).filter(|shifted| shifted >> shift == by)?;
                    Stride::Constant(if is_negative { by.checked_neg()? } else { by })
                }
                (Stride::Register(by, _), false) => Stride::Register(by, shift),
                _ => return None,
            };
            terms.push((reg, shift, is_negative));
            return Some(());
        }
        if self.is_fixed(reg) {
            terms.push((reg, shift, is_negative));
            return Some(());
        }
        let op = self.definition(reg)?;
        if let Op::Move { from, .. } = op {
            return self.sum(*from, shift, is_negative, terms, step, depth + 1);
        }
        let Op::Bin { op, a, b, .. } = op else { return None };
        match op.class() {
            class @ (BinaryClass::Add | BinaryClass::Sub) => {
                self.sum(*a, shift, is_negative, terms, step, depth + 1)?;
                self.sum(*b, shift, is_negative ^ (class == BinaryClass::Sub), terms, step, depth + 1)
            }
            BinaryClass::Shl => {
                let by = self.number(*b).and_then(|by| u32::try_from(by).ok()).filter(|by| by + shift < 31)?;
                self.sum(*a, shift + by, is_negative, terms, step, depth + 1)
            }
            BinaryClass::And
            | BinaryClass::Or
            | BinaryClass::Mul
            | BinaryClass::Integer
            | BinaryClass::Divide
            | BinaryClass::DivideSigned
            | BinaryClass::Float
            | BinaryClass::Copysign => None,
        }
    }
}
