//! Imports with which the items of a subgroup work together: who they are, exchanges, reductions and votes.

use super::{Frame, Lower};
use crate::assemble::{KnownValue, SUBGROUPS_MAX};
use crate::gpu::HalfType;
use crate::ir::{Op, Product, Reduction, SUBGROUP, SubgroupOp, Ty};
use crate::refusal::Refusal;

/// A function of module `kernel` on a subgroup, of a type where it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SubgroupFunction {
    Size,
    Lane,
    Shuffle(Ty),
    ShuffleXor(Ty),
    Reduce(Reduction, Ty),
    Ballot,
    Any,
    All,
    /// A product of matrices, whose four sums the item keeps, and one of those it keeps.
    Multiply(HalfType),
    Sum,
}

impl SubgroupFunction {
    pub(super) fn named(name: &str) -> Option<SubgroupFunction> {
        match name {
            "subgroup_size" => return Some(SubgroupFunction::Size),
            "subgroup_lane" => return Some(SubgroupFunction::Lane),
            "subgroup_ballot" => return Some(SubgroupFunction::Ballot),
            "subgroup_any" => return Some(SubgroupFunction::Any),
            "subgroup_all" => return Some(SubgroupFunction::All),
            "mma_f16_f32" => return Some(SubgroupFunction::Multiply(HalfType::F16)),
            "mma_bf16_f32" => return Some(SubgroupFunction::Multiply(HalfType::BF16)),
            "mma_sum" => return Some(SubgroupFunction::Sum),
            _ => {}
        }
        let (name, ty) = name.rsplit_once('_')?;
        let ty = match ty {
            "i32" => Ty::I32,
            "i64" => Ty::I64,
            "f32" => Ty::F32,
            "f64" => Ty::F64,
            _ => return None,
        };
        Some(match name {
            "shuffle" => SubgroupFunction::Shuffle(ty),
            "shuffle_xor" => SubgroupFunction::ShuffleXor(ty),
            "subgroup_add" => SubgroupFunction::Reduce(Reduction::Add, ty),
            "subgroup_min" => SubgroupFunction::Reduce(Reduction::Min, ty),
            "subgroup_max" => SubgroupFunction::Reduce(Reduction::Max, ty),
            _ => return None,
        })
    }

    /// The types of what it takes, and of what it returns.
    pub(super) fn signature(self) -> (Vec<Ty>, Option<Ty>) {
        match self {
            SubgroupFunction::Size | SubgroupFunction::Lane => (Vec::new(), Some(Ty::I32)),
            SubgroupFunction::Shuffle(ty) | SubgroupFunction::ShuffleXor(ty) => (vec![ty, Ty::I32], Some(ty)),
            SubgroupFunction::Reduce(_, ty) => (vec![ty], Some(ty)),
            SubgroupFunction::Ballot | SubgroupFunction::Any | SubgroupFunction::All => (vec![Ty::I32], Some(Ty::I32)),
            SubgroupFunction::Multiply(_) => ([[Ty::I32; 6].as_slice(), &[Ty::F32; 4]].concat(), None),
            SubgroupFunction::Sum => (vec![Ty::I32], Some(Ty::F32)),
        }
    }
}

impl Lower<'_, '_> {
    pub(super) fn subgroup(&mut self, frame: &mut Frame, function: SubgroupFunction) -> Result<(), Refusal> {
        let site = self.site(frame);
        let op = match function {
            SubgroupFunction::Size => {
                let to = self.asm.constant(Ty::I32, u64::from(SUBGROUP));
                frame.operands.push(to);
                return Ok(());
            }
            SubgroupFunction::Lane => {
                let to = self.asm.lane(site);
                frame.operands.push(to);
                return Ok(());
            }
            SubgroupFunction::Shuffle(_) => SubgroupOp::Shuffle(frame.pop()),
            SubgroupFunction::ShuffleXor(_) => SubgroupOp::ShuffleXor(frame.pop()),
            SubgroupFunction::Reduce(reduction, _) => SubgroupOp::Reduce(reduction),
            SubgroupFunction::Ballot => SubgroupOp::Ballot,
            SubgroupFunction::Any => SubgroupOp::Any,
            SubgroupFunction::All => SubgroupOp::All,
            SubgroupFunction::Multiply(half) => return self.multiply(frame, half),
            SubgroupFunction::Sum => return self.sum(frame),
        };
        let value = frame.pop();
        let (_, ty) = function.signature();
        let to = ty.and_then(|ty| self.asm.subgroup(op, value, ty, site));
        let Some(to) = to else { return Err(self.too_many_subgroups(frame)) };
        frame.operands.push(to);
        Ok(())
    }

    fn multiply(&mut self, frame: &mut Frame, half: HalfType) -> Result<(), Refusal> {
        let site = self.site(frame);
        let mut four = || {
            let [d, c, b, a] = [0; 4].map(|_| frame.pop());
            [a, b, c, d]
        };
        let sums = four();
        let [b1, b0] = [frame.pop(), frame.pop()];
        let [a3, a2, a1, a0] = [0; 4].map(|_| frame.pop());
        let to = sums.map(|_| self.asm.register(Ty::F32));
        let product = Product { half, to, a: [a0, a1, a2, a3], b: [b0, b1], sums };
        if !self.asm.product(product, site) {
            return Err(self.too_many_subgroups(frame));
        }
        for (kept, from) in self.kept_sums.into_iter().flatten().zip(to) {
            self.asm.push(Op::Move { to: kept, from });
        }
        Ok(())
    }

    /// One of the sums of the item's last product.
    fn sum(&mut self, frame: &mut Frame) -> Result<(), Refusal> {
        let which = frame.pop();
        let known =
            if let KnownValue::Constant(bits) = self.asm.known(which) { usize::try_from(bits).ok() } else { None };
        let kept = known.and_then(|n| self.kept_sums?.get(n).copied());
        let Some(from) = kept else {
            let instruction = "kernel.mma_sum of anything but a constant from 0 to 3".to_owned();
            return Err(Refusal::Instruction { instruction, place: self.place(frame) });
        };
        let to = self.asm.register(Ty::F32);
        self.asm.push(Op::Move { to, from });
        frame.operands.push(to);
        Ok(())
    }

    /// Before anything else, the sums of an item that has multiplied nothing. Of a kernel without products, none.
    pub(super) fn make_sums(&mut self) {
        let mut imports = self.program.imports.iter().filter(|import| import.module == "kernel");
        if imports.any(|import| matches!(SubgroupFunction::named(import.name), Some(SubgroupFunction::Sum))) {
            let zero = self.asm.constant(Ty::F32, 0);
            let kept = [0; 4].map(|_| self.asm.register(Ty::F32));
            kept.into_iter().for_each(|to| self.asm.push(Op::Move { to, from: zero }));
            self.kept_sums = Some(kept);
        }
    }

    fn too_many_subgroups(&self, frame: &Frame) -> Refusal {
        let instruction = format!("more than {SUBGROUPS_MAX} functions of subgroups");
        Refusal::Instruction { instruction, place: self.place(frame) }
    }
}
