//! What the items of a subgroup do together, as PTX. A subgroup is a warp: a group's items are in warps by their
//! numbers, and an item's number in its subgroup is the device's number of its lane.
//!
//! An item may come to a function of subgroups while others of its warp have ended, are somewhere else, or never come.
//! Exchanges and votes name the lanes that take part, and each of those has to do the very same: otherwise results are
//! undefined, and where one lane is at an exchange and another at a barrier, both wait for ever, beyond any deadline.
//! So lanes that are not all together agree first. `match.sync` waits for all lanes that have not exited, whichever of
//! these instructions they are at, and tells each who came with the same key:
//!
//! - at a function, the lanes of its key go on to do it, as it is for those lanes alone;
//! - at a barrier, whose key is 0, lanes wait in hardware when no other of the warp is at a function; until then they
//!   agree anew.
//!
//! So lanes wait only for lanes that come, exit, or compute, and what computes polls (`control.rs`): when the deadline
//! ends that, its exit lets the others go on.
//!
//! Mostly all lanes are here already, which `activemask` says. Then nothing has to be agreed on: what each lane does
//! next is the same instruction. A matrix instruction is for such lanes only: it is one that all of a warp have to come
//! to at one place in the code, and lanes that have agreed may be at several. Those multiply what they fetch from each
//! other.

use std::fmt::Write as _;

use super::table::binary;
use super::{PtxEmitter, mov_type};
use crate::gpu::HalfType;
use crate::ir::{Bin, Product, REDUCTION_STEPS, Reduction, Reg, SUBGROUP, SubgroupOp, Ty};

/// All lanes of a warp.
const EVERYBODY: &str = "-1";

/// The key of lanes that are at a barrier.
const BARRIER_KEY: u32 = 0;

impl PtxEmitter<'_> {
    pub(super) fn subgroup(&mut self, op: SubgroupOp, to: Reg, value: Reg) {
        let key = op.key(self.body.ty(value));
        self.meeting(key, |emitter, here| emitter.together(op, to, value, here));
    }

    pub(super) fn product(&mut self, product: &Product) {
        self.meeting(product.key(), |emitter, here| match here {
            Some(here) => emitter.product_among(here, product),
            None => emitter.multiply_tiles(product.element(), &product.to, (&product.a, &product.b), &product.sums),
        });
    }

    /// What lanes do together: all of them, and aside those that are here once they have agreed.
    fn meeting(&mut self, key: u32, together: impl Fn(&mut Self, Option<&str>)) {
        let (aside, back) = self.unless_all_are_here();
        together(self, None);
        let _ = writeln!(self.out, "{back}:");
        let main = std::mem::take(&mut self.out);
        let _ = writeln!(self.out, "{aside}:");
        let (here, own, q) = (self.b32(), self.b32(), self.pred());
        put!(self, "mov.b32 {own}, {key};");
        put!(self, "match.all.sync.b32 {here}, {own}, {EVERYBODY};");
        put!(self, "setp.eq.s32 {q}, {here}, 0;");
        // Whether all have one key is known to all.
        put!(self, "@{q} match.any.sync.b32 {here}, {own}, {EVERYBODY};");
        together(self, Some(&here));
        put!(self, "bra {back};");
        self.aside.push_str(&std::mem::replace(&mut self.out, main));
    }

    /// A barrier of a kernel that has functions of subgroups too.
    pub(super) fn barrier_among_subgroups(&mut self) {
        let (aside, back) = self.unless_all_are_here();
        let _ = writeln!(self.out, "{back}:");
        put!(self, "barrier.sync 0;");
        let main = std::mem::take(&mut self.out);
        let _ = writeln!(self.out, "{aside}:");
        let (here, key, q) = (self.b32(), self.b32(), self.pred());
        put!(self, "mov.b32 {key}, {BARRIER_KEY};");
        put!(self, "match.all.sync.b32 {here}, {key}, {EVERYBODY};");
        put!(self, "setp.ne.s32 {q}, {here}, 0;");
        put!(self, "@{q} bra {back};");
        put!(self, "match.any.sync.b32 {here}, {key}, {EVERYBODY};");
        put!(self, "bra {aside};");
        self.aside.push_str(&std::mem::replace(&mut self.out, main));
    }

    /// Goes aside unless the whole warp is at this instruction. The names of that place and of the way back.
    fn unless_all_are_here(&mut self) -> (String, String) {
        self.asides += 1;
        let (aside, back) = (format!("W{}", self.asides), format!("Y{}", self.asides));
        let (active, q) = (self.b32(), self.pred());
        put!(self, "activemask.b32 {active};");
        put!(self, "setp.ne.s32 {q}, {active}, {EVERYBODY};");
        put!(self, "@{q} bra {aside};");
        (aside, back)
    }

    /// What the lanes of a mask do together, or all.
    fn together(&mut self, op: SubgroupOp, to: Reg, value: Reg, here: Option<&str>) {
        let ty = self.body.ty(value);
        let (to, value) = (self.reg(to), self.reg(value));
        match op {
            SubgroupOp::Shuffle(lane) => {
                let is_inside = self.is_lane(lane);
                let lane = self.reg(lane);
                match here {
                    Some(here) => self.exchange_among(here, ty, &to, &value, &lane),
                    None => self.exchange_among_all("idx", ty, &to, &value, &lane, is_inside),
                }
            }
            SubgroupOp::ShuffleXor(bits) => {
                let is_inside = self.is_lane(bits);
                let bits = self.reg(bits);
                match here {
                    Some(here) => {
                        let lane = self.lane();
                        let other = self.b32();
                        put!(self, "xor.b32 {other}, {lane}, {bits};");
                        self.exchange_among(here, ty, &to, &value, &other);
                    }
                    None => self.exchange_among_all("bfly", ty, &to, &value, &bits, is_inside),
                }
            }
            SubgroupOp::Reduce(reduction) => {
                let total = match here {
                    Some(here) => self.reduce_among(here, reduction, ty, &value),
                    None => self.reduce_among_all(reduction, ty, &value),
                };
                put!(self, "mov.{} {to}, {total};", mov_type(ty));
            }
            SubgroupOp::Ballot | SubgroupOp::Any | SubgroupOp::All => {
                let (votes, q) = (self.b32(), self.pred());
                let how = if op == SubgroupOp::All { "eq" } else { "ne" };
                put!(self, "setp.{how}.s32 {q}, {value}, 0;");
                put!(self, "vote.sync.ballot.b32 {votes}, {q}, {};", here.unwrap_or(EVERYBODY));
                if op == SubgroupOp::Ballot {
                    put!(self, "mov.b32 {to}, {votes};");
                    return;
                }
                // Any that is not zero, or none that is.
                put!(self, "setp.{how}.s32 {q}, {votes}, 0;");
                put!(self, "selp.b32 {to}, 1, 0, {q};");
            }
        }
    }

    /// Whether a register is known to hold the number of a lane.
    fn is_lane(&self, reg: Reg) -> bool {
        self.facts.constant(reg).is_some_and(|lane| lane < u64::from(SUBGROUP))
    }

    fn lane(&mut self) -> String {
        let lane = self.b32();
        put!(self, "mov.u32 {lane}, %laneid;");
        lane
    }

    /// What another lane has, where all are here. A device takes a lane's number by its low bits.
    fn exchange_among_all(&mut self, mode: &str, ty: Ty, to: &str, value: &str, operand: &str, is_inside: bool) {
        if is_inside {
            return self.exchange(mode, ty, to, value, operand, EVERYBODY);
        }
        let (moved, q) = (self.temp_of(ty), self.pred());
        self.exchange(mode, ty, &moved, value, operand, EVERYBODY);
        put!(self, "setp.lt.u32 {q}, {operand}, {SUBGROUP};");
        put!(self, "selp.{} {to}, {moved}, {}, {q};", mov_type(ty), zero(ty));
    }

    /// What a lane has if it is one of those in the mask. A lane that is not is never read: it reads its own instead.
    fn exchange_among(&mut self, here: &str, ty: Ty, to: &str, value: &str, lane: &str) {
        let (bit, q, from, own, moved) = (self.b32(), self.pred(), self.b32(), self.lane(), self.temp_of(ty));
        // Of lanes that there are not, no bit is left.
        put!(self, "shr.u32 {bit}, {here}, {lane};");
        put!(self, "and.b32 {bit}, {bit}, 1;");
        put!(self, "setp.ne.s32 {q}, {bit}, 0;");
        put!(self, "selp.b32 {from}, {lane}, {own}, {q};");
        self.exchange("idx", ty, &moved, value, &from, here);
        put!(self, "selp.{} {to}, {moved}, {}, {q};", mov_type(ty), zero(ty));
    }

    /// Each step adds what the lane has that differs in one bit. In the end every lane has the same.
    fn reduce_among_all(&mut self, reduction: Reduction, ty: Ty, value: &str) -> String {
        let mut total = value.to_owned();
        for step in REDUCTION_STEPS {
            let (other, next) = (self.temp_of(ty), self.temp_of(ty));
            self.exchange("bfly", ty, &other, &total, &step.to_string(), EVERYBODY);
            self.fill(combining(reduction, ty), &next, &[&total, &other]);
            total = next;
        }
        total
    }

    /// The same, of lanes in a mask. After each step a lane has the total of all that agree with it in the bits that
    /// are not done yet, so that instead of its partner any of those will do that agree with the partner in them.
    fn reduce_among(&mut self, here: &str, reduction: Reduction, ty: Ty, value: &str) -> String {
        let own = self.lane();
        let mut total = value.to_owned();
        for step in REDUCTION_STEPS {
            let (rest, others, q, from) = (self.b32(), self.b32(), self.pred(), self.b32());
            let (other, both, next) = (self.temp_of(ty), self.temp_of(ty), self.temp_of(ty));
            let agreeing = (0..SUBGROUP).step_by(2 * step as usize).fold(0_u32, |lanes, lane| lanes | 1 << lane);
            put!(self, "xor.b32 {rest}, {own}, {step};");
            put!(self, "and.b32 {rest}, {rest}, {};", 2 * step - 1);
            put!(self, "mov.b32 {others}, {};", agreeing.cast_signed());
            put!(self, "shl.b32 {others}, {others}, {rest};");
            put!(self, "and.b32 {others}, {others}, {here};");
            put!(self, "setp.ne.s32 {q}, {others}, 0;");
            put!(self, "brev.b32 {from}, {others};");
            put!(self, "clz.b32 {from}, {from};");
            put!(self, "selp.b32 {from}, {from}, {own}, {q};");
            self.exchange("idx", ty, &other, &total, &from, here);
            self.fill(combining(reduction, ty), &both, &[&total, &other]);
            put!(self, "selp.{} {next}, {both}, {total}, {q};", mov_type(ty));
            total = next;
        }
        total
    }

    /// The product of what the lanes of a mask have: each goes along two rows and two columns, and fetches two numbers
    /// of each at a time. A loop, so that many products do not become long.
    fn product_among(&mut self, here: &str, product: &Product) {
        let Product { half, to, a, b, sums } = product;
        let (to, sums) = (to.map(|reg| self.reg(reg)), sums.map(|reg| self.reg(reg)));
        let ([a0, a1, a2, a3], [b0, b1]) = (a.map(|reg| self.reg(reg)), b.map(|reg| self.reg(reg)));
        let own = self.lane();
        let (row, column, step, q) = (self.b32(), self.b32(), self.b32(), self.pred());
        let (upper, lower, side) = (self.b32(), self.b32(), self.b32());
        self.asides += 1;
        let again = format!("W{}", self.asides);
        for (to, sum) in to.iter().zip(&sums) {
            put!(self, "mov.f32 {to}, {sum};");
        }
        // The first of the four lanes that have the row of this one, and of those that have its first column.
        put!(self, "and.b32 {row}, {own}, 28;");
        put!(self, "and.b32 {column}, {own}, 3;");
        put!(self, "shl.b32 {column}, {column}, 3;");
        for (word, first) in [(&upper, a0), (&lower, a1), (&side, b0)] {
            put!(self, "mov.b32 {word}, {first};");
        }
        put!(self, "mov.b32 {step}, 0;");
        let _ = writeln!(self.out, "{again}:");
        put!(self, ".pragma \"nounroll\";");
        let next = self.b32();
        put!(self, "add.s32 {next}, {column}, 4;");
        let [x0, x1, y0, y1] =
            [(&upper, &row), (&lower, &row), (&side, &column), (&side, &next)].map(|(word, lane)| {
                let moved = self.b32();
                self.exchange_among(here, Ty::I32, &moved, word, lane);
                self.widened(*half, &moved)
            });
        for n in 0..2 {
            for (to, (x, y)) in to.iter().zip([(&x0, &y0), (&x0, &y1), (&x1, &y0), (&x1, &y1)]) {
                put!(self, "fma.rn.f32 {to}, {}, {}, {to};", x[n], y[n]);
            }
        }
        put!(self, "add.s32 {row}, {row}, 1;");
        put!(self, "add.s32 {column}, {column}, 1;");
        put!(self, "add.s32 {step}, {step}, 1;");
        // Halfway, the other half of what each lane has.
        put!(self, "setp.eq.s32 {q}, {step}, 4;");
        for (word, second) in [(&upper, a2), (&lower, a3), (&side, b1)] {
            put!(self, "@{q} mov.b32 {word}, {second};");
        }
        for lane in [&row, &column] {
            put!(self, "@{q} sub.s32 {lane}, {lane}, 4;");
        }
        put!(self, "setp.lt.s32 {q}, {step}, 8;");
        put!(self, "@{q} bra {again};");
    }

    /// Both numbers of a word in single precision, the lower one first.
    fn widened(&mut self, half: HalfType, word: &str) -> [String; 2] {
        let [low, high] = [0, 1].map(|_| self.temp_of(Ty::F32));
        match half {
            HalfType::F16 => {
                let (lower, upper) = (self.b16(), self.b16());
                put!(self, "mov.b32 {{{lower}, {upper}}}, {word};");
                put!(self, "cvt.f32.f16 {low}, {lower};");
                put!(self, "cvt.f32.f16 {high}, {upper};");
            }
            HalfType::BF16 => {
                let (lower, upper) = (self.b32(), self.b32());
                put!(self, "shl.b32 {lower}, {word}, 16;");
                put!(self, "mov.b32 {low}, {lower};");
                put!(self, "and.b32 {upper}, {word}, -65536;");
                put!(self, "mov.b32 {high}, {upper};");
            }
        }
        [low, high]
    }

    /// Exchanges a register among the lanes of a mask, of 64 bits by halves.
    pub(super) fn exchange(&mut self, mode: &str, ty: Ty, to: &str, value: &str, operand: &str, lanes: &str) {
        if ty.bytes() == 4 {
            put!(self, "shfl.sync.{mode}.b32 {to}, {value}, {operand}, 31, {lanes};");
            return;
        }
        let (low, high) = (self.b32(), self.b32());
        put!(self, "mov.b64 {{{low}, {high}}}, {value};");
        put!(self, "shfl.sync.{mode}.b32 {low}, {low}, {operand}, 31, {lanes};");
        put!(self, "shfl.sync.{mode}.b32 {high}, {high}, {operand}, 31, {lanes};");
        put!(self, "mov.b64 {to}, {{{low}, {high}}};");
    }

    fn temp_of(&mut self, ty: Ty) -> String {
        self.temp(match ty {
            Ty::I32 => 0,
            Ty::I64 => 1,
            Ty::F32 => 2,
            Ty::F64 => 3,
        })
    }
}

fn zero(ty: Ty) -> &'static str {
    match ty {
        Ty::I32 | Ty::I64 => "0",
        Ty::F32 => "0f00000000",
        Ty::F64 => "0d0000000000000000",
    }
}

fn combining(reduction: Reduction, ty: Ty) -> &'static str {
    match (reduction, ty) {
        (Reduction::Add, Ty::I32) => binary(Bin::I32Add),
        (Reduction::Add, Ty::I64) => binary(Bin::I64Add),
        (Reduction::Add, Ty::F32) => binary(Bin::F32Add),
        (Reduction::Add, Ty::F64) => binary(Bin::F64Add),
        (Reduction::Min, Ty::I32) => "min.s32 D, A, B;",
        (Reduction::Min, Ty::I64) => "min.s64 D, A, B;",
        (Reduction::Min, Ty::F32) => binary(Bin::F32Min),
        (Reduction::Min, Ty::F64) => binary(Bin::F64Min),
        (Reduction::Max, Ty::I32) => "max.s32 D, A, B;",
        (Reduction::Max, Ty::I64) => "max.s64 D, A, B;",
        (Reduction::Max, Ty::F32) => binary(Bin::F32Max),
        (Reduction::Max, Ty::F64) => binary(Bin::F64Max),
    }
}
