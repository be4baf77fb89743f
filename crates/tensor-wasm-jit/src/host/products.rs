//! Products of matrices by the items of a subgroup, on a CPU: the function that the first item that takes part calls
//! for all of them (`subgroups.rs`). It unpacks what they have brought into two matrices of single precision, in which
//! zeros stand for those who are not there, goes along every row, and leaves each item its four sums.
//!
//! A sum is begun with the item's own, and each product is added to it with one rounding, in the order of the depth.
//! Vectors are used because only they can multiply and add at once; an element is computed as if there were no others.

use wasm_encoder::{Instruction, MemArg, ValType};

use super::halves::widening;
use super::memory::OWN;
use super::subgroups::{AT, HelperWriter, LANE, N, NEXT, OTHER, VALUE_AT, number, word};
use crate::gpu::HalfType;

/// In a place: six words of both operands where others have their value, then four sums.
const WORDS: [(u32, u32, [u32; 2]); 6] = [
    (VALUE_AT, LEFT_AT, [0, 4]),
    (VALUE_AT + 4, LEFT_AT, [8 * LEFT_ROW, 8 * LEFT_ROW + 4]),
    (VALUE_AT + 8, LEFT_AT, [32, 36]),
    (VALUE_AT + 12, LEFT_AT, [8 * LEFT_ROW + 32, 8 * LEFT_ROW + 36]),
    (VALUE_AT + 16, RIGHT_AT, [0, RIGHT_ROW]),
    (VALUE_AT + 20, RIGHT_AT, [8 * RIGHT_ROW, 9 * RIGHT_ROW]),
];
pub(super) const SUMS_AT: u32 = VALUE_AT + 24;
pub(super) const PRODUCT_PLACE_BYTES: u32 = SUMS_AT + 16;

/// The matrices in the scratch memory, row by row: 16 by 16, 16 by 8, and the sums, 16 by 8.
const ROWS: i32 = 16;
const DEPTH: u32 = 16;
const LEFT_ROW: u32 = 64;
const RIGHT_ROW: u32 = 32;
const LEFT_AT: u32 = 0;
const RIGHT_AT: u32 = LEFT_AT + 16 * LEFT_ROW;
const TOTALS_AT: u32 = RIGHT_AT + 16 * RIGHT_ROW;
pub(super) const PRODUCT_SCRATCH_BYTES: u32 = TOTALS_AT + 16 * RIGHT_ROW;

/// Locals of the function, after those that all such functions have: both halves of a row of sums, and a number as
/// often as a vector has it.
pub(super) const PRODUCT_LOCALS: (u32, ValType) = (3, ValType::V128);
const HALVES: [u32; 2] = [10, 11];
const FACTOR: u32 = 12;

impl HelperWriter {
    pub(super) fn multiply(&mut self, half: HalfType) {
        self.all(&[
            Instruction::I32Const(self.scratch),
            Instruction::I32Const(0),
            Instruction::I32Const(PRODUCT_SCRATCH_BYTES.cast_signed()),
            Instruction::MemoryFill(OWN),
        ]);
        self.for_each(|helper| helper.of_those_who_take_part(|helper| helper.put_together(half)));
        self.rows();
        // From the first on again, which is the one that calls.
        self.all(&[Instruction::LocalGet(LANE), Instruction::LocalSet(N)]);
        self.for_each(|helper| helper.of_those_who_take_part(Self::hand_out));
    }

    fn of_those_who_take_part(&mut self, body: impl FnOnce(&mut Self)) {
        self.takes_part();
        self.put(Instruction::If(wasm_encoder::BlockType::Empty));
        body(self);
        self.put(Instruction::End);
    }

    /// Sets `NEXT` to where the numbers of the item `N` begin in a matrix: a row for each four items, so far on for the
    /// next four and for the next item.
    fn corner(&mut self, matrix: u32, next_four: u32, next_item: u32) {
        self.all(&[
            Instruction::LocalGet(N),
            Instruction::I32Const(2),
            Instruction::I32ShrU,
            Instruction::I32Const(next_four.cast_signed()),
            Instruction::I32Mul,
            Instruction::LocalGet(N),
            Instruction::I32Const(3),
            Instruction::I32And,
            Instruction::I32Const(next_item.cast_signed()),
            Instruction::I32Mul,
            Instruction::I32Add,
            Instruction::I32Const(self.scratch + matrix.cast_signed()),
            Instruction::I32Add,
            Instruction::LocalSet(NEXT),
        ]);
    }

    /// Writes what the item at `AT` has brought to the matrices.
    fn put_together(&mut self, half: HalfType) {
        let mut matrix = None;
        for (from, to, parts) in WORDS {
            if matrix != Some(to) {
                // The right one has a column for each four items, and two rows for an item.
                if to == LEFT_AT {
                    self.corner(to, LEFT_ROW, 8)
                } else {
                    self.corner(to, 4, 2 * RIGHT_ROW)
                }
                matrix = Some(to);
            }
            for (part, at) in (0..).zip(parts) {
                self.all(&[
                    Instruction::LocalGet(AT),
                    Instruction::I32Load(word(from)),
                    Instruction::I32Const(16 * part),
                    Instruction::I32ShrU,
                    Instruction::LocalSet(OTHER),
                    Instruction::LocalGet(NEXT),
                ]);
                match half {
                    HalfType::F16 => self.all(&widening(OTHER)),
                    HalfType::BF16 => self.all(&[
                        Instruction::LocalGet(OTHER),
                        Instruction::I32Const(16),
                        Instruction::I32Shl,
                        Instruction::F32ReinterpretI32,
                    ]),
                }
                self.put(Instruction::F32Store(word(at)));
            }
        }
        self.corner(TOTALS_AT, RIGHT_ROW, 8);
        for (pair, at) in [(SUMS_AT, 0), (SUMS_AT + 8, 8 * RIGHT_ROW)] {
            self.all(&[
                Instruction::LocalGet(NEXT),
                Instruction::LocalGet(AT),
                Instruction::I64Load(number(pair)),
                Instruction::I64Store(number(at)),
            ]);
        }
    }

    fn rows(&mut self) {
        self.all(&[Instruction::I32Const(0), Instruction::LocalSet(N)]);
        self.put(Instruction::Loop(wasm_encoder::BlockType::Empty));
        for (to, matrix, row) in [(AT, LEFT_AT, LEFT_ROW), (NEXT, TOTALS_AT, RIGHT_ROW)] {
            self.all(&[
                Instruction::LocalGet(N),
                Instruction::I32Const(row.cast_signed()),
                Instruction::I32Mul,
                Instruction::I32Const(self.scratch + matrix.cast_signed()),
                Instruction::I32Add,
                Instruction::LocalSet(to),
            ]);
        }
        for (half, at) in HALVES.into_iter().zip([0, 16]) {
            self.all(&[Instruction::LocalGet(NEXT), Instruction::V128Load(vector(at)), Instruction::LocalSet(half)]);
        }
        for step in 0..DEPTH {
            self.all(&[
                Instruction::LocalGet(AT),
                Instruction::V128Load32Splat(word(4 * step)),
                Instruction::LocalSet(FACTOR),
            ]);
            for (half, at) in HALVES.into_iter().zip([0, 16]) {
                self.all(&[
                    Instruction::LocalGet(FACTOR),
                    Instruction::I32Const(self.scratch),
                    Instruction::V128Load(vector(RIGHT_AT + RIGHT_ROW * step + at)),
                    Instruction::LocalGet(half),
                    Instruction::F32x4RelaxedMadd,
                    Instruction::LocalSet(half),
                ]);
            }
        }
        for (half, at) in HALVES.into_iter().zip([0, 16]) {
            self.all(&[Instruction::LocalGet(NEXT), Instruction::LocalGet(half), Instruction::V128Store(vector(at))]);
        }
        self.all(&[
            Instruction::LocalGet(N),
            Instruction::I32Const(1),
            Instruction::I32Add,
            Instruction::LocalTee(N),
            Instruction::I32Const(ROWS),
            Instruction::I32LtU,
            Instruction::BrIf(0),
            Instruction::End,
        ]);
    }

    /// Leaves the item at `AT` its sums.
    fn hand_out(&mut self) {
        self.corner(TOTALS_AT, RIGHT_ROW, 8);
        for (pair, at) in [(SUMS_AT, 0), (SUMS_AT + 8, 8 * RIGHT_ROW)] {
            self.all(&[
                Instruction::LocalGet(AT),
                Instruction::LocalGet(NEXT),
                Instruction::I64Load(number(at)),
                Instruction::I64Store(number(pair)),
            ]);
        }
    }
}

fn vector(at: u32) -> MemArg {
    MemArg { offset: u64::from(at), align: 4, memory_index: OWN }
}
