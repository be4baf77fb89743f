//! Which operations on floats are one pass over a tile: an operation with the numbers that its operands are multiplied
//! by before and its result is multiplied by and shifted by after. One that only its user needs waits for that user,
//! which takes it along or has it computed.

use super::super::affine::{AffineOp, Around, NUMBERS};
use super::super::tile::TileOp;
use super::compile::Compile;
use super::{InstructionKind, Single, SingleNumber, Source};
use crate::dtype::DType;
use crate::graph::op::{BinaryOp, UnaryOp};
use crate::schedule::plan::ValueKind;

const ONE: SingleNumber = SingleNumber::Constant(1.0);
const MINUS_ONE: SingleNumber = SingleNumber::Constant(-1.0);

/// Added to anything, it leaves it as it is; the other zero would change a negative one.
const NOTHING: SingleNumber = SingleNumber::Constant(-0.0);

/// An operation with the numbers around it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Affine {
    op: AffineOp,
    /// The second is looked at where the operation has two.
    operands: [usize; 2],
    scales: [SingleNumber; 2],
    by: SingleNumber,
    added: [SingleNumber; 2],
    /// How many of the kernel's operations it is.
    steps: usize,
}

impl Affine {
    fn new(op: AffineOp, operands: [usize; 2]) -> Affine {
        Affine { op, operands, scales: [ONE; 2], by: ONE, added: [NOTHING; 2], steps: 1 }
    }

    fn same(operand: usize) -> Affine {
        Affine { steps: 0, ..Affine::new(AffineOp::Same, [operand; 2]) }
    }

    fn operands(&self) -> &[usize] {
        let count = if matches!(self.op, AffineOp::Sqrt | AffineOp::Same) { 1 } else { 2 };
        &self.operands[..count]
    }

    /// What is multiplied by what, if it is no more than that.
    fn scaled(&self) -> Option<(usize, SingleNumber)> {
        let is_all = self.op == AffineOp::Same && self.by == ONE && self.added == [NOTHING; 2];
        is_all.then_some((self.operands[0], self.scales[0]))
    }

    /// It and an operation with a number after it, if there is room for that.
    fn then(mut self, op: BinaryOp, number: SingleNumber, is_number_left: bool) -> Option<Affine> {
        self.steps += 1;
        let is_shifted = self.added != [NOTHING; 2];
        match (op, is_number_left) {
            (BinaryOp::Mul, _) if is_shifted => return None,
            (BinaryOp::Mul, _) if self.op == AffineOp::Same && self.scales[0] == ONE && self.by == ONE => {
                self.scales[0] = number;
            }
            (BinaryOp::Mul, _) => self.by = self.by.times(number)?,
            (BinaryOp::Add, _) => self.add(number)?,
            (BinaryOp::Sub, false) => self.add(number.negated())?,
            (BinaryOp::Sub, true) if !is_shifted => {
                self.by = self.by.negated();
                self.add(number)?;
            }
            _ => return None,
        }
        Some(self)
    }

    fn add(&mut self, number: SingleNumber) -> Option<()> {
        *self.added.iter_mut().find(|added| **added == NOTHING)? = number;
        Some(())
    }

    fn around(&self) -> Around {
        Around { is_scaled: self.scales != [ONE; 2], is_shifted: self.by != ONE || self.added != [NOTHING; 2] }
    }

    fn numbers(&self) -> [SingleNumber; NUMBERS] {
        let ([left, right], [first, second]) = (self.scales, self.added);
        [left, right, self.by, first, second]
    }
}

impl SingleNumber {
    fn negated(self) -> SingleNumber {
        match self {
            SingleNumber::Given(parameter) => SingleNumber::Negated(parameter),
            SingleNumber::Negated(parameter) => SingleNumber::Given(parameter),
            SingleNumber::Constant(number) => SingleNumber::Constant(-number),
        }
    }

    /// Their product, if that is exact: one of them is one or its negative.
    fn times(self, other: SingleNumber) -> Option<SingleNumber> {
        match self {
            ONE => Some(other),
            MINUS_ONE => Some(other.negated()),
            _ => None,
        }
    }
}

impl Compile<'_> {
    /// Makes a value by an operation with numbers around it, now or when its user is made. False if it is none.
    pub(super) fn arithmetic(&mut self, n: usize) -> bool {
        let made = match self.kernel.values[n].kind {
            _ if !matches!(self.kernel.values[n].dtype, DType::F32 | DType::F64) => None,
            ValueKind::Unary(UnaryOp::Sqrt, a) => Some(Affine::new(AffineOp::Sqrt, [a; 2])),
            ValueKind::Binary(op @ (BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div), a, b) => {
                self.affine(n, op, a, b)
            }
            _ => None,
        };
        let Some(affine) = made else {
            let operands: Vec<usize> = self.kernel.values[n].kind.operands().collect();
            operands.into_iter().for_each(|operand| self.compute(operand));
            return false;
        };
        if self.can_wait(n, &affine) {
            self.waiting[n] = Some(affine);
            return true;
        }
        self.emit(n, &affine)
    }

    fn affine(&mut self, n: usize, op: BinaryOp, a: usize, b: usize) -> Option<Affine> {
        let (value, number, is_number_left) = match (self.number(a), self.number(b)) {
            (None, Some(number)) => (a, number, false),
            (Some(number), None) => (b, number, true),
            (Some(_), Some(_)) => return None,
            (None, None) => return self.affine_of_two(n, op, a, b),
        };
        if op == BinaryOp::Div || self.kernel.values[value].level != self.kernel.values[n].level {
            return None;
        }
        let taken = self.waiting[value].and_then(|waiting| waiting.then(op, number, is_number_left));
        if taken.is_some() {
            self.waiting[value] = None;
            return taken;
        }
        self.compute(value);
        Affine::same(value).then(op, number, is_number_left)
    }

    fn affine_of_two(&mut self, n: usize, op: BinaryOp, a: usize, b: usize) -> Option<Affine> {
        let level = self.kernel.values[n].level;
        if [a, b].iter().any(|operand| self.kernel.values[*operand].level != level) {
            return None;
        }
        let kind = match op {
            BinaryOp::Mul => AffineOp::Mul,
            BinaryOp::Div => AffineOp::Div,
            _ => AffineOp::Add,
        };
        let mut affine = Affine::new(kind, [a, b]);
        for (side, operand) in [a, b].into_iter().enumerate() {
            match self.waiting[operand].and_then(|waiting| waiting.scaled()) {
                Some((scaled, by)) => {
                    self.waiting[operand] = None;
                    (affine.operands[side], affine.scales[side]) = (scaled, by);
                    affine.steps += 1;
                }
                None => self.compute(operand),
            }
        }
        if op == BinaryOp::Sub {
            affine.scales[1] = affine.scales[1].negated();
        }
        Some(affine)
    }

    fn number(&self, value: usize) -> Option<SingleNumber> {
        match self.at[value] {
            Some(Source::Single(single)) => Some(self.singles[single].number),
            _ => None,
        }
    }

    /// Whether a value has one user, which takes it along as far as can be told before that is made.
    fn can_wait(&self, n: usize, affine: &Affine) -> bool {
        let is_stored = self.kernel.stores.iter().any(|(stored, _)| *stored == n);
        if self.uses[n] != 1 || is_stored {
            return false;
        }
        let values = &self.kernel.values;
        let mut users = values.iter().filter(|user| user.kind.operands().any(|operand| operand == n));
        let Some(user) = users.next() else { return false };
        let ValueKind::Binary(op, p, q) = user.kind else { return false };
        let other = if p == n { q } else { p };
        let takes_numbers = matches!(op, BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul);
        let takes = match values[other].kind {
            ValueKind::Fill(_) => takes_numbers,
            _ => (takes_numbers || op == BinaryOp::Div) && affine.scaled().is_some(),
        };
        let is_same = user.level == values[n].level && values[other].level == user.level;
        takes && (is_same || matches!(values[other].kind, ValueKind::Fill(_)) && user.level == values[n].level)
    }

    /// Computes what waits for its user, if it does.
    fn compute(&mut self, value: usize) {
        if let Some(affine) = self.waiting[value].take()
            && !self.emit(value, &affine)
        {
            self.plain(value);
        }
    }

    /// One pass for all of it. False if it is a single operation that has a loop of its own.
    fn emit(&mut self, n: usize, affine: &Affine) -> bool {
        let in_place = self.result_in_place(n, affine.operands());
        if affine.steps == 1 && in_place.is_none() {
            return false;
        }
        let (class, level, dtype) = (self.class(n), self.kernel.values[n].level, self.kernel.values[n].dtype);
        let [a, b] = affine.operands.map(|operand| self.operand(operand, level));
        let numbers = Source::Single(self.singles.len());
        self.singles.extend(affine.numbers().map(|number| Single { number, dtype }));
        let to = match in_place.or_else(|| self.result(n)) {
            Some(store) => Source::Result(store),
            None => self.register(level, class.size()),
        };
        affine.operands().iter().for_each(|operand| self.done_with(*operand));
        self.push(InstructionKind::Tile(TileOp::Affine(affine.op, class, affine.around()), [a, b, numbers]), level, to);
        self.at[n] = Some(to);
        true
    }

    /// The result whose place is an operand's that nobody reads after this, if the value is such a result.
    fn result_in_place(&self, n: usize, operands: &[usize]) -> Option<usize> {
        if self.is_apart() {
            return None;
        }
        let store = self.kernel.stores.iter().position(|(stored, _)| *stored == n)?;
        let load = self.kernel.in_place.get(store).copied().flatten()?;
        let is_read_later = |value: usize| {
            let own = operands.iter().filter(|operand| **operand == value).count();
            self.kernel.values[value].kind == ValueKind::Load(load) && self.uses[value] > own
        };
        let is_last = !(0..self.kernel.values.len()).any(is_read_later);
        (self.loads[load].is_direct && is_last).then_some(store)
    }
}
