//! Imports with which the items of a subgroup work together: who they are, exchanges, reductions and votes.

use super::{Frame, Lower};
use crate::assemble::SUBGROUPS_MAX;
use crate::ir::{Reduction, SUBGROUP, SubgroupOp, Ty};
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
}

impl SubgroupFunction {
    pub(super) fn named(name: &str) -> Option<SubgroupFunction> {
        match name {
            "subgroup_size" => return Some(SubgroupFunction::Size),
            "subgroup_lane" => return Some(SubgroupFunction::Lane),
            "subgroup_ballot" => return Some(SubgroupFunction::Ballot),
            "subgroup_any" => return Some(SubgroupFunction::Any),
            "subgroup_all" => return Some(SubgroupFunction::All),
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
    pub(super) fn signature(self) -> (Vec<Ty>, Ty) {
        match self {
            SubgroupFunction::Size | SubgroupFunction::Lane => (Vec::new(), Ty::I32),
            SubgroupFunction::Shuffle(ty) | SubgroupFunction::ShuffleXor(ty) => (vec![ty, Ty::I32], ty),
            SubgroupFunction::Reduce(_, ty) => (vec![ty], ty),
            SubgroupFunction::Ballot | SubgroupFunction::Any | SubgroupFunction::All => (vec![Ty::I32], Ty::I32),
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
        };
        let value = frame.pop();
        let (_, ty) = function.signature();
        let Some(to) = self.asm.subgroup(op, value, ty, site) else {
            let instruction = format!("more than {SUBGROUPS_MAX} functions of subgroups");
            return Err(Refusal::Instruction { instruction, place: self.place(frame) });
        };
        frame.operands.push(to);
        Ok(())
    }
}
