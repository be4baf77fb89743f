//! What the items of a subgroup do together, on a CPU. An item that comes to such a function leaves in its context what
//! it has and at which function it is, and waits, as at a barrier (`barriers.rs`). When all items of the group wait or
//! have ended, those at functions of subgroups go on, in their order, and those at barriers stay. An item that goes on
//! finds the others of its subgroup that came to the same function in the same turn; the first of them computes what
//! all of them get.
//!
//! There are two places in a context, used by turns: an item that has gone on and waits again does not overwrite what
//! those after it are still to read.
//!
//! Of matrices that a subgroup multiplies its first item puts both operands together, row by row, and leaves every item
//! its sums (`products.rs`).

use wasm_encoder::{BlockType, Function, Instruction, MemArg, ValType};

use super::emit::HostEmitter;
use super::memory::OWN;
use super::products::{PRODUCT_LOCALS, PRODUCT_PLACE_BYTES, PRODUCT_SCRATCH_BYTES, SUMS_AT};
use super::{OwnMemory, subgroup_number};
use crate::gpu::HalfType;
use crate::ir::{Body, Op, Product, REDUCTION_STEPS, Reduction, Reg, SUBGROUP, SubgroupOp, Ty};

/// In a context: whether the item waits at a function of subgroups, and not at a barrier.
pub(super) const AT_FUNCTION: u32 = 4;

/// Where the two places begin, and what each has: a turn and a key, the value, and the item's operand.
const PLACES_AT: u32 = 8;
const PLACE_BYTES: u32 = 24;
pub(super) const VALUE_AT: u32 = 8;
const OPERAND_AT: u32 = 16;

/// Bytes of a place. Products need more, of kernels that have some.
fn place_bytes(body: &Body) -> u32 {
    if body.has_products() { PRODUCT_PLACE_BYTES } else { PLACE_BYTES }
}

/// What a context has before the registers that are kept.
pub(super) fn head_bytes(body: &Body) -> u32 {
    PLACES_AT + 2 * place_bytes(body)
}

/// Where values are put together: for each of a subgroup whether there is one, and its bits.
const ENTRY_BYTES: u32 = 16;
const SCRATCH_BYTES: u32 = SUBGROUP * ENTRY_BYTES;
const BITS_AT: u32 = 8;

pub(super) fn scratch_bytes(body: &Body) -> u32 {
    match (body.has_subgroups(), body.has_products()) {
        (false, _) => 0,
        (true, false) => SCRATCH_BYTES,
        (true, true) => PRODUCT_SCRATCH_BYTES.max(SCRATCH_BYTES),
    }
}

/// What an item comes to, and what it brings.
#[derive(Debug, Clone, Copy)]
pub(super) enum Meeting<'b> {
    Function { op: SubgroupOp, to: Reg, value: Reg },
    Product(&'b Product),
}

/// Locals that only kernels with such functions have.
#[derive(Debug, Clone, Copy)]
pub(super) struct SubgroupLocals {
    /// Counts how often items have gone on, from 1.
    pub turn: u32,
    /// Whether any item has come to a function in this turn, or had in the last.
    pub is_meeting: u32,
    pub had_met: u32,
}

impl HostEmitter<'_> {
    /// Leaves behind what an item brings to a function. It is about to wait.
    pub(super) fn leave_for_subgroup(&mut self, op: SubgroupOp, value: Reg) {
        let Some(own) = self.own.subgroups else { return };
        let ty = self.body.ty(value);
        self.begin_place(own, op.key(ty));
        self.local_get(self.own.offset);
        self.get(value);
        self.bits_of(ty);
        self.put(Instruction::I64Store(number(VALUE_AT)));
        if let Some(operand) = op.operand() {
            self.local_get(self.own.offset);
            self.get(operand);
            self.put(Instruction::I32Store(word(OPERAND_AT)));
        }
    }

    /// What an item brings to a product.
    pub(super) fn leave_for_product(&mut self, product: &Product) {
        let Some(own) = self.own.subgroups else { return };
        self.begin_place(own, product.key());
        for (n, reg) in (0..).zip(product.a.iter().chain(&product.b)) {
            self.local_get(self.own.offset);
            self.get(*reg);
            self.put(Instruction::I32Store(word(VALUE_AT + 4 * n)));
        }
        for (n, reg) in (0..).zip(&product.sums) {
            self.local_get(self.own.offset);
            self.get(*reg);
            self.put(Instruction::F32Store(word(SUMS_AT + 4 * n)));
        }
    }

    /// Sets a local to the place of this turn, in which the item leaves at which function it is.
    fn begin_place(&mut self, own: SubgroupLocals, key: u32) {
        self.local_get(self.own.context);
        self.i32(1);
        self.put(Instruction::I32Store(word(AT_FUNCTION)));
        self.i32(1);
        self.local_set(own.is_meeting);
        self.push_place(own.turn);
        self.local_tee(self.own.offset);
        self.push_key(own.turn, key);
        self.put(Instruction::I64Store(number(0)));
    }

    /// Computes what an item gets that has just come back.
    pub(super) fn take_from_subgroup(&mut self, op: SubgroupOp, to: Reg, value: Reg) {
        let Some(own) = self.own.subgroups else { return };
        let ty = self.body.ty(value);
        self.push_meeting(own, op.key(ty));
        match op {
            SubgroupOp::Shuffle(_) | SubgroupOp::ShuffleXor(_) => {
                self.push_place(self.own.which);
                self.put(Instruction::I32Load(word(OPERAND_AT)));
                if let SubgroupOp::ShuffleXor(_) = op {
                    self.push_lane();
                    self.put(Instruction::I32Xor);
                }
            }
            SubgroupOp::Reduce(_) | SubgroupOp::Ballot | SubgroupOp::Any | SubgroupOp::All => self.i32(0),
        }
        self.call_helper(SubgroupHelper::of(op, ty));
        match op {
            SubgroupOp::Any | SubgroupOp::All => {
                // Any that is not zero, or none that is.
                self.put(Instruction::I64Eqz);
                if op == SubgroupOp::Any {
                    self.put(Instruction::I32Eqz);
                }
            }
            SubgroupOp::Ballot => self.put(Instruction::I32WrapI64),
            SubgroupOp::Shuffle(_) | SubgroupOp::ShuffleXor(_) | SubgroupOp::Reduce(_) => {
                from_bits(ty).iter().cloned().for_each(|instruction| self.put(instruction));
            }
        }
        self.set(to);
    }

    /// The sums of an item that has just come back from a product: in its own place.
    pub(super) fn take_from_product(&mut self, product: &Product) {
        let Some(own) = self.own.subgroups else { return };
        self.push_meeting(own, product.key());
        self.i32(0);
        self.call_helper(SubgroupHelper::Multiply(product.half));
        self.put(Instruction::Drop);
        self.push_place(self.own.which);
        self.local_set(self.own.offset);
        for (n, to) in (0..).zip(product.to) {
            self.local_get(self.own.offset);
            self.put(Instruction::F32Load(word(SUMS_AT + 4 * n)));
            self.set(to);
        }
    }

    /// Begins what an item does that has come back: pushes where the others of its subgroup are, and what they came to.
    fn push_meeting(&mut self, own: SubgroupLocals, key: u32) {
        self.local_get(self.own.context);
        self.i32(0);
        self.put(Instruction::I32Store(word(AT_FUNCTION)));
        // What was left in the turn before.
        self.local_get(own.turn);
        self.i32(1);
        self.put(Instruction::I32Sub);
        self.local_set(self.own.which);
        // The place of the first item of the subgroup, the item's number in it, and how many there are.
        self.push_place(self.own.which);
        self.push_lane();
        self.i32(self.context_bytes.cast_signed());
        self.put(Instruction::I32Mul);
        self.put(Instruction::I32Sub);
        self.push_lane();
        self.local_get(self.own.count);
        self.local_get(self.own.number);
        self.push_lane();
        self.put(Instruction::I32Sub);
        self.put(Instruction::I32Sub);
        self.push_key(self.own.which, key);
    }

    fn call_helper(&mut self, helper: SubgroupHelper) {
        let at = SubgroupHelper::all(self.body).iter().position(|own| *own == helper).unwrap_or(0);
        self.put(Instruction::Call(subgroup_number(at)));
    }

    /// Pushes the address of the place that is used in a turn.
    fn push_place(&mut self, turn: u32) {
        self.local_get(self.own.context);
        self.local_get(turn);
        self.i32(1);
        self.put(Instruction::I32And);
        self.i32(place_bytes(self.body).cast_signed());
        self.put(Instruction::I32Mul);
        self.i32(PLACES_AT.cast_signed());
        self.put(Instruction::I32Add);
        self.put(Instruction::I32Add);
    }

    /// Pushes what those have in common who came to a function in a turn.
    fn push_key(&mut self, turn: u32, key: u32) {
        self.local_get(turn);
        self.put(Instruction::I64ExtendI32U);
        self.put(Instruction::I64Const(32));
        self.put(Instruction::I64Shl);
        self.put(Instruction::I64Const(i64::from(key)));
        self.put(Instruction::I64Or);
    }

    fn push_lane(&mut self) {
        self.local_get(self.own.number);
        self.i32((SUBGROUP - 1).cast_signed());
        self.put(Instruction::I32And);
    }

    fn bits_of(&mut self, ty: Ty) {
        to_bits(ty).iter().cloned().for_each(|instruction| self.put(instruction));
    }

    /// Empties both places of the context at hand: what is there is another group's.
    pub(super) fn empty_places(&mut self) {
        for at in [PLACES_AT, PLACES_AT + place_bytes(self.body)] {
            self.local_get(self.own.context);
            self.put(Instruction::I64Const(0));
            self.put(Instruction::I64Store(number(at)));
        }
        self.local_get(self.own.context);
        self.i32(0);
        self.put(Instruction::I32Store(word(AT_FUNCTION)));
    }
}

/// Numbers as they are in memory, of which any type has a whole one.
fn to_bits(ty: Ty) -> &'static [Instruction<'static>] {
    match ty {
        Ty::I32 => &[Instruction::I64ExtendI32U],
        Ty::I64 => &[],
        Ty::F32 => &[Instruction::I32ReinterpretF32, Instruction::I64ExtendI32U],
        Ty::F64 => &[Instruction::I64ReinterpretF64],
    }
}

fn from_bits(ty: Ty) -> &'static [Instruction<'static>] {
    match ty {
        Ty::I32 => &[Instruction::I32WrapI64],
        Ty::I64 => &[],
        Ty::F32 => &[Instruction::I32WrapI64, Instruction::F32ReinterpretI32],
        Ty::F64 => &[Instruction::F64ReinterpretI64],
    }
}

/// A function of the module that computes what an item gets. It takes the place of the subgroup's first item, the
/// item's own number, how many there are, the key, and the number of the item that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SubgroupHelper {
    /// What another item has, or zero.
    Fetch,
    Reduce(Reduction, Ty),
    /// A bit for each whose value is not zero, or is.
    Vote {
        of_zeros: bool,
    },
    /// Leaves the sums of a product in the place of every item that takes part.
    Multiply(HalfType),
}

/// Its parameters, and locals.
const FIRST: u32 = 0;
pub(super) const LANE: u32 = 1;
const COUNT: u32 = 2;
const KEY: u32 = 3;
pub(super) const OTHER: u32 = 4;
const PARAMS: [ValType; 5] = [ValType::I32, ValType::I32, ValType::I32, ValType::I64, ValType::I32];
pub(super) const N: u32 = 5;
pub(super) const AT: u32 = 6;
const FOUND: u32 = 7;
pub(super) const NEXT: u32 = 8;
const VOTES: u32 = 9;

impl SubgroupHelper {
    fn of(op: SubgroupOp, ty: Ty) -> SubgroupHelper {
        match op {
            SubgroupOp::Shuffle(_) | SubgroupOp::ShuffleXor(_) => SubgroupHelper::Fetch,
            SubgroupOp::Reduce(reduction) => SubgroupHelper::Reduce(reduction, ty),
            SubgroupOp::Ballot | SubgroupOp::Any => SubgroupHelper::Vote { of_zeros: false },
            SubgroupOp::All => SubgroupHelper::Vote { of_zeros: true },
        }
    }

    /// Those that a kernel needs, in one order.
    pub(super) fn all(body: &Body) -> Vec<SubgroupHelper> {
        let mut all = Vec::new();
        for op in &body.ops {
            let helper = if let Op::Subgroup { op, value, .. } = op {
                SubgroupHelper::of(*op, body.ty(*value))
            } else if let Op::Product { product, .. } = op {
                SubgroupHelper::Multiply(product.half)
            } else {
                continue;
            };
            if !all.contains(&helper) {
                all.push(helper);
            }
        }
        all
    }

    pub(super) fn params() -> [ValType; 5] {
        PARAMS
    }

    pub(super) fn function(self, plan: &OwnMemory, context_bytes: u32) -> Function {
        let locals = [(4, ValType::I32), (1, ValType::I64), PRODUCT_LOCALS];
        let has_vectors = matches!(self, SubgroupHelper::Multiply(_));
        let mut helper = HelperWriter {
            function: Function::new(locals.into_iter().take(if has_vectors { 3 } else { 2 })),
            stride: context_bytes.cast_signed(),
            scratch: plan.scratch.cast_signed(),
        };
        match self {
            SubgroupHelper::Fetch => helper.fetch(),
            SubgroupHelper::Reduce(reduction, ty) => {
                helper.once(|helper| helper.reduce(reduction, ty));
            }
            SubgroupHelper::Vote { of_zeros } => helper.once(|helper| helper.vote(of_zeros)),
            SubgroupHelper::Multiply(half) => helper.once(|helper| helper.multiply(half)),
        }
        helper.put(Instruction::End);
        helper.function
    }
}

pub(super) struct HelperWriter {
    function: Function,
    /// From one item's place to the next one's.
    stride: i32,
    pub scratch: i32,
}

impl HelperWriter {
    pub(super) fn put(&mut self, instruction: Instruction<'static>) {
        self.function.instruction(&instruction);
    }

    pub(super) fn all(&mut self, instructions: &[Instruction<'static>]) {
        instructions.iter().for_each(|instruction| {
            self.function.instruction(instruction);
        });
    }

    /// Sets `AT` to the place of an item.
    fn place(&mut self, lane: u32) {
        self.all(&[
            Instruction::LocalGet(FIRST),
            Instruction::LocalGet(lane),
            Instruction::I32Const(self.stride),
            Instruction::I32Mul,
            Instruction::I32Add,
            Instruction::LocalSet(AT),
        ]);
    }

    /// Pushes whether the item at `AT` came to the same function in the same turn.
    pub(super) fn takes_part(&mut self) {
        self.all(&[
            Instruction::LocalGet(AT),
            Instruction::I64Load(number(0)),
            Instruction::LocalGet(KEY),
            Instruction::I64Eq,
        ]);
    }

    fn fetch(&mut self) {
        self.all(&[Instruction::LocalGet(OTHER), Instruction::I32Const(SUBGROUP.cast_signed()), Instruction::I32LtU]);
        self.all(&[Instruction::LocalGet(OTHER), Instruction::LocalGet(COUNT), Instruction::I32LtU]);
        self.all(&[Instruction::I32And, Instruction::If(BlockType::Empty)]);
        self.place(OTHER);
        self.takes_part();
        self.all(&[
            Instruction::If(BlockType::Empty),
            Instruction::LocalGet(AT),
            Instruction::I64Load(number(VALUE_AT)),
            Instruction::Return,
            Instruction::End,
            Instruction::End,
            Instruction::I64Const(0),
        ]);
    }

    /// Has the first item that takes part compute what all get, which it leaves in the place of its value, in `FOUND`.
    fn once(&mut self, compute: impl FnOnce(&mut Self)) {
        // The item itself takes part, so that one is found.
        self.put(Instruction::Loop(BlockType::Empty));
        self.place(N);
        self.takes_part();
        self.all(&[
            Instruction::I32Eqz,
            Instruction::If(BlockType::Empty),
            Instruction::LocalGet(N),
            Instruction::I32Const(1),
            Instruction::I32Add,
            Instruction::LocalTee(N),
            Instruction::LocalGet(LANE),
            Instruction::I32LeU,
            Instruction::BrIf(1),
            Instruction::End,
            Instruction::End,
            Instruction::LocalGet(AT),
            Instruction::LocalSet(FOUND),
            Instruction::LocalGet(N),
            Instruction::LocalGet(LANE),
            Instruction::I32Eq,
            Instruction::If(BlockType::Empty),
        ]);
        compute(self);
        self.all(&[Instruction::End, Instruction::LocalGet(FOUND), Instruction::I64Load(number(VALUE_AT))]);
    }

    /// Goes over the items that there are from the first that takes part, which is `N`.
    pub(super) fn for_each(&mut self, body: impl FnOnce(&mut Self)) {
        self.put(Instruction::Loop(BlockType::Empty));
        self.place(N);
        body(self);
        self.all(&[
            Instruction::LocalGet(N),
            Instruction::I32Const(1),
            Instruction::I32Add,
            Instruction::LocalTee(N),
            Instruction::LocalGet(COUNT),
            Instruction::I32LtU,
            Instruction::LocalGet(N),
            Instruction::I32Const(SUBGROUP.cast_signed()),
            Instruction::I32LtU,
            Instruction::I32And,
            Instruction::BrIf(0),
            Instruction::End,
        ]);
    }

    fn vote(&mut self, of_zeros: bool) {
        self.for_each(|helper| {
            helper.takes_part();
            helper.all(&[
                Instruction::LocalGet(AT),
                Instruction::I64Load(number(VALUE_AT)),
                Instruction::I64Eqz,
                Instruction::I32Const(i32::from(!of_zeros)),
                Instruction::I32Xor,
                Instruction::I32And,
                Instruction::I64ExtendI32U,
                Instruction::LocalGet(N),
                Instruction::I64ExtendI32U,
                Instruction::I64Shl,
                Instruction::LocalGet(VOTES),
                Instruction::I64Or,
                Instruction::LocalSet(VOTES),
            ]);
        });
        self.all(&[
            Instruction::LocalGet(FOUND),
            Instruction::LocalGet(VOTES),
            Instruction::I64Store(number(VALUE_AT)),
        ]);
    }

    /// A tree, in whose lowest nodes are those whose numbers differ in the first bit: what lanes of a GPU compute by
    /// exchanging, each the same.
    fn reduce(&mut self, reduction: Reduction, ty: Ty) {
        self.all(&[
            Instruction::I32Const(self.scratch),
            Instruction::I32Const(0),
            Instruction::I32Const(SCRATCH_BYTES.cast_signed()),
            Instruction::MemoryFill(OWN),
        ]);
        self.for_each(|helper| {
            helper.entry(N, NEXT);
            helper.put(Instruction::LocalGet(NEXT));
            helper.takes_part();
            helper.all(&[
                Instruction::I32Store(word(0)),
                Instruction::LocalGet(NEXT),
                Instruction::LocalGet(AT),
                Instruction::I64Load(number(VALUE_AT)),
                Instruction::I64Store(number(BITS_AT)),
            ]);
        });
        for step in REDUCTION_STEPS {
            self.all(&[Instruction::I32Const(0), Instruction::LocalSet(N), Instruction::Loop(BlockType::Empty)]);
            self.entry(N, AT);
            let partner = (step * ENTRY_BYTES).cast_signed();
            self.all(&[
                Instruction::LocalGet(AT),
                Instruction::I32Const(partner),
                Instruction::I32Add,
                Instruction::LocalTee(NEXT),
                Instruction::I32Load(word(0)),
                Instruction::If(BlockType::Empty),
                Instruction::LocalGet(AT),
                Instruction::LocalGet(AT),
                Instruction::I32Load(word(0)),
                Instruction::If(BlockType::Result(ValType::I64)),
            ]);
            self.combine(reduction, ty);
            self.all(&[
                Instruction::Else,
                Instruction::LocalGet(NEXT),
                Instruction::I64Load(number(BITS_AT)),
                Instruction::End,
                Instruction::I64Store(number(BITS_AT)),
                Instruction::LocalGet(AT),
                Instruction::I32Const(1),
                Instruction::I32Store(word(0)),
                Instruction::End,
                Instruction::LocalGet(N),
                Instruction::I32Const(1),
                Instruction::I32Add,
                Instruction::LocalTee(N),
                Instruction::I32Const(step.cast_signed()),
                Instruction::I32LtU,
                Instruction::BrIf(0),
                Instruction::End,
            ]);
        }
        self.all(&[
            Instruction::LocalGet(FOUND),
            Instruction::I32Const(self.scratch),
            Instruction::I64Load(number(BITS_AT)),
            Instruction::I64Store(number(VALUE_AT)),
        ]);
    }

    /// Sets a local to the address of an entry.
    fn entry(&mut self, n: u32, to: u32) {
        self.all(&[
            Instruction::LocalGet(n),
            Instruction::I32Const(ENTRY_BYTES.cast_signed()),
            Instruction::I32Mul,
            Instruction::I32Const(self.scratch),
            Instruction::I32Add,
            Instruction::LocalSet(to),
        ]);
    }

    /// Pushes what the values of the entries at `AT` and `NEXT` make together, as bits.
    fn combine(&mut self, reduction: Reduction, ty: Ty) {
        let push = |helper: &mut Self| {
            for at in [AT, NEXT] {
                helper.all(&[Instruction::LocalGet(at), Instruction::I64Load(number(BITS_AT))]);
                helper.all(from_bits(ty));
            }
        };
        push(self);
        let is_less = match (reduction, ty) {
            (Reduction::Add, Ty::I32) => return self.all(&[Instruction::I32Add, Instruction::I64ExtendI32U]),
            (Reduction::Add, Ty::I64) => return self.put(Instruction::I64Add),
            (Reduction::Add, Ty::F32) => return self.finish(Instruction::F32Add, ty),
            (Reduction::Add, Ty::F64) => return self.finish(Instruction::F64Add, ty),
            (Reduction::Min, Ty::F32) => return self.finish(Instruction::F32Min, ty),
            (Reduction::Min, Ty::F64) => return self.finish(Instruction::F64Min, ty),
            (Reduction::Max, Ty::F32) => return self.finish(Instruction::F32Max, ty),
            (Reduction::Max, Ty::F64) => return self.finish(Instruction::F64Max, ty),
            (Reduction::Min, Ty::I32) => Instruction::I32LtS,
            (Reduction::Min, Ty::I64) => Instruction::I64LtS,
            (Reduction::Max, Ty::I32) => Instruction::I32GtS,
            (Reduction::Max, Ty::I64) => Instruction::I64GtS,
        };
        push(self);
        self.put(is_less);
        self.put(Instruction::Select);
        self.all(to_bits(ty));
    }

    fn finish(&mut self, instruction: Instruction<'static>, ty: Ty) {
        self.put(instruction);
        self.all(to_bits(ty));
    }
}

pub(super) fn number(at: u32) -> MemArg {
    MemArg { offset: u64::from(at), align: 3, memory_index: OWN }
}

pub(super) fn word(at: u32) -> MemArg {
    MemArg { offset: u64::from(at), align: 2, memory_index: OWN }
}
