//! Barriers on a CPU. A work item that comes to one stores what it still needs and leaves the function; when every
//! other item of its group has come to a barrier or to its end, it is called again and finds its way back: control flow
//! that does not lead to its barrier is skipped, and branches on the way are taken whatever their conditions were. What
//! the items of a subgroup do together (`subgroups.rs`) is a barrier here, from which they go on first.

use std::collections::HashMap;

use wasm_encoder::{BlockType, Instruction, MemArg};

use super::emit::HostEmitter;
use super::locals::Locals;
use super::memory::{OWN, store};
use super::subgroups::{Meeting, head_bytes};
use crate::ir::{Access, Body, Flow, Reg};

/// A context begins with the number of the barrier an item waits at, 0 for one that has not begun. Registers follow, of
/// kernels with functions of subgroups after what those need.
pub(super) const DONE: i32 = -1;
const SAVED_AT: u32 = 8;

/// The numbers of the barriers in a stretch of operations, from the first on, without the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BarrierRange {
    from: u32,
    to: u32,
}

/// Where a kernel's barriers are.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    pub numbers: HashMap<usize, u32>,
    /// For each block that has some: its barriers, and those before its `else`.
    within: HashMap<usize, (BarrierRange, BarrierRange)>,
    /// Blocks and barriers with no other beside them, in the block around them: nothing has to be skipped to come
    /// there.
    alone: HashMap<usize, bool>,
    /// Stretches of plain operations, by where they begin, that are skipped on the way to a barrier after them; and
    /// where they end.
    skipped: HashMap<usize, usize>,
    /// Where registers are in a context.
    saved_at: u32,
}

struct BarrierScope {
    start: Option<usize>,
    first: u32,
    middle: Option<u32>,
    /// What this block, or this half of it, has on its own level that contains barriers.
    children: Vec<usize>,
    /// Where a stretch of plain operations began.
    plain: usize,
}

impl Barriers {
    pub(super) fn of(body: &Body) -> Barriers {
        let saved_at = if body.has_subgroups() { head_bytes(body) } else { SAVED_AT };
        let mut barriers = Barriers { saved_at, ..Barriers::default() };
        if !has_any(body) {
            return barriers;
        }
        let mut count = 1;
        let mut open = vec![BarrierScope { start: None, first: count, middle: None, children: Vec::new(), plain: 0 }];
        for (n, op) in body.ops.iter().enumerate() {
            match op.flow() {
                Flow::Wait => {
                    barriers.numbers.insert(n, count);
                    count += 1;
                    barriers.child(&mut open, n, n);
                }
                Flow::Open(..) => {
                    open.push(BarrierScope {
                        start: Some(n),
                        first: count,
                        middle: None,
                        children: Vec::new(),
                        plain: n + 1,
                    });
                }
                Flow::Else(_) => {
                    if let Some(own) = open.last_mut() {
                        own.middle = Some(count);
                        let children = std::mem::take(&mut own.children);
                        own.plain = n + 1;
                        barriers.settle(&children);
                    }
                }
                Flow::Close(_) => {
                    let Some(own) = open.pop() else { continue };
                    barriers.settle(&own.children);
                    let Some(start) = own.start.filter(|_| count > own.first) else { continue };
                    let all = BarrierRange { from: own.first, to: count };
                    let before_else = BarrierRange { from: own.first, to: own.middle.unwrap_or(count) };
                    barriers.within.insert(start, (all, before_else));
                    barriers.child(&mut open, start, n);
                }
                Flow::Straight | Flow::Leave => {}
            }
        }
        let children = open.pop().map(|own| own.children).unwrap_or_default();
        barriers.settle(&children);
        barriers
    }

    /// Something with barriers lies on the level of the block around it, from one operation to another.
    fn child(&mut self, open: &mut [BarrierScope], from: usize, to: usize) {
        let Some(around) = open.last_mut() else { return };
        if around.plain < from {
            self.skipped.insert(around.plain, from);
        }
        around.plain = to + 1;
        around.children.push(from);
    }

    fn settle(&mut self, children: &[usize]) {
        for child in children {
            self.alone.insert(*child, children.len() == 1);
        }
    }

    /// What an item has to remember at most.
    pub(super) fn context_bytes(&self, body: &Body, locals: &Locals) -> u32 {
        let most = self.numbers.keys().map(|at| locals.live_across(body, *at).count()).max().unwrap_or(0);
        self.saved_at + 8 * u32::try_from(most).unwrap_or(u32::MAX / 16)
    }

    pub(super) fn are_none(&self) -> bool {
        self.numbers.is_empty()
    }
}

/// Whether items of a kernel wait for each other.
pub(super) fn has_any(body: &Body) -> bool {
    body.ops.iter().any(|op| op.flow() == Flow::Wait)
}

impl HostEmitter<'_> {
    /// Before an operation: opens what skips it, or the stretch that begins with it, on the way to a barrier.
    pub(super) fn skip_before(&mut self, n: usize) {
        if let Some(end) = self.barriers.skipped.get(&n).copied() {
            self.local_get(self.own.resume);
            self.put(Instruction::I32Eqz);
            self.open(Instruction::If(BlockType::Empty), None);
            self.skips.push(end);
        }
        if let Some((all, _)) = self.barriers.within.get(&n).copied()
            && !self.barriers.alone.get(&n).copied().unwrap_or(true)
        {
            self.local_get(self.own.resume);
            self.put(Instruction::I32Eqz);
            self.resumes_in(all);
            self.put(Instruction::I32Or);
            self.open(Instruction::If(BlockType::Empty), None);
            self.guarded.push(n);
        }
    }

    /// A stretch that is skipped ends before this operation.
    pub(super) fn skip_after(&mut self, n: usize) {
        if self.skips.last() == Some(&n) {
            self.skips.pop();
            self.close();
        }
    }

    /// Pushes whether the item is on its way to one of these barriers.
    fn resumes_in(&mut self, range: BarrierRange) {
        self.local_get(self.own.resume);
        self.i32(range.from.cast_signed());
        self.put(Instruction::I32Sub);
        self.i32((range.to - range.from).cast_signed());
        self.put(Instruction::I32LtU);
    }

    /// The condition of an `if` that contains barriers is what leads to the barrier, for an item on its way to one.
    pub(super) fn condition(&mut self, n: usize, condition: Reg) {
        let Some((_, before_else)) = self.barriers.within.get(&n).copied() else { return self.get(condition) };
        self.resumes_in(before_else);
        self.get(condition);
        self.local_get(self.own.resume);
        self.put(Instruction::Select);
    }

    /// Leaves the function, or comes back into it: at a barrier, or at what a subgroup does together.
    pub(super) fn barrier(&mut self, n: usize, together: Option<Meeting<'_>>) {
        let number = self.barriers.numbers.get(&n).copied().unwrap_or(0).cast_signed();
        let live: Vec<Reg> = self.locals.live_across(self.body, n).collect();
        let saved_at = u64::from(self.barriers.saved_at);
        let place = |k: usize| MemArg { offset: saved_at + 8 * k as u64, align: 3, memory_index: OWN };
        let whole = |emitter: &Self, reg: Reg| Access { bytes: emitter.body.ty(reg).bytes(), is_signed: false };
        self.local_get(self.own.resume);
        self.put(Instruction::I32Eqz);
        self.open(Instruction::If(BlockType::Empty), None);
        match together {
            Some(Meeting::Function { op, value, .. }) => self.leave_for_subgroup(op, value),
            Some(Meeting::Product(product)) => self.leave_for_product(product),
            None => {}
        }
        for (k, reg) in live.iter().enumerate() {
            self.local_get(self.own.context);
            self.get(*reg);
            let instruction = store(self.body.ty(*reg), whole(self, *reg), MemArg { align: 2, ..place(k) });
            self.put(instruction);
        }
        self.local_get(self.own.context);
        self.i32(number);
        self.put(Instruction::I32Store(MemArg { offset: 0, align: 2, memory_index: OWN }));
        self.i32(1);
        self.local_set(self.own.waiting);
        self.suspend();
        self.close();
        // With several barriers in a row one may be passed on the way to another.
        let is_alone = self.barriers.alone.get(&n).copied().unwrap_or(true);
        if !is_alone {
            self.local_get(self.own.resume);
            self.i32(number);
            self.put(Instruction::I32Eq);
            self.open(Instruction::If(BlockType::Empty), None);
        }
        for (k, reg) in live.iter().enumerate() {
            self.local_get(self.own.context);
            self.load_to(*reg, whole(self, *reg), MemArg { align: 2, ..place(k) });
        }
        self.i32(0);
        self.local_set(self.own.resume);
        match together {
            Some(Meeting::Function { op, to, value }) => self.take_from_subgroup(op, to, value),
            Some(Meeting::Product(product)) => self.take_from_product(product),
            None => {}
        }
        if !is_alone {
            self.close();
        }
    }
}
