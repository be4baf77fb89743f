//! Instructions that only GPUs have, as PTX. What accesses memory has no fence: `check_trusted` refused the rest.

use std::fmt::Write as _;

use super::PtxEmitter;
use crate::gpu::{COPY_BYTES, GpuOp, HalfType, MatrixElement};
use crate::ir::{Address, Reg};

impl PtxEmitter<'_> {
    pub(super) fn gpu(&mut self, op: &GpuOp) {
        match op {
            GpuOp::Multiply { element, to, a, b, sums } => {
                self.multiply_tiles(*element, to, (a, b), sums);
            }
            GpuOp::LoadTiles { to, at, is_transposed } => {
                let (to, at) = (self.list(to), self.unfenced(*at));
                let how = if *is_transposed { ".trans" } else { "" };
                put!(self, "ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {to}, [{at}];");
            }
            GpuOp::Copy { to, from, bytes } => {
                let is_whole = self.facts.constant(*bytes) == Some(u64::from(COPY_BYTES));
                let bytes = if is_whole { String::new() } else { format!(", {}", self.reg(*bytes)) };
                let (to, from) = (self.unfenced(*to), self.unfenced(*from));
                put!(self, "cp.async.cg.shared.global [{to}], [{from}], {COPY_BYTES}{bytes};");
            }
            GpuOp::CommitCopies => put!(self, "cp.async.commit_group;"),
            GpuOp::AwaitCopies { pending } => put!(self, "cp.async.wait_group {pending};"),
            GpuOp::SharedAddress { to, at } => {
                let (to, address) = (self.reg(*to), self.unfenced(Address { offset: 0, ..*at }));
                put!(self, "cvt.u32.u64 {to}, {};", address.trim_end_matches("+0"));
            }
            GpuOp::MultiplyShared { element, sums, left, right, is_turned } => {
                let (ty, shape) = element.spelling();
                let depth = shape.trim_start_matches("m16n8");
                let (columns, sums) = (2 * sums.len(), self.list(sums));
                let (left, right) = (self.reg(*left), self.reg(*right));
                // Only halves can be turned on the way.
                let turned = is_turned.map(|is_turned| format!(", {}", u8::from(is_turned))).concat();
                let turned = if *element == MatrixElement::Tf32 { "" } else { &turned };
                let what = format!("wgmma.mma_async.sync.aligned.m64n{columns}{depth}.f32.{ty}.{ty}");
                put!(self, "{what} {sums}, {left}, {right}, 1, 1, 1{turned};");
            }
            GpuOp::FenceMultiply => put!(self, "wgmma.fence.sync.aligned;"),
            GpuOp::CommitMultiply => put!(self, "wgmma.commit_group.sync.aligned;"),
            GpuOp::AwaitMultiply { pending } => put!(self, "wgmma.wait_group.sync.aligned {pending};"),
            GpuOp::FenceAsync => put!(self, "fence.proxy.async.shared::cta;"),
            GpuOp::Pack { half, to, low, high } => {
                let ty = match half {
                    HalfType::F16 => "f16x2",
                    HalfType::BF16 => "bf16x2",
                };
                let (to, low, high) = (self.reg(*to), self.reg(*low), self.reg(*high));
                put!(self, "cvt.rn.{ty}.f32 {to}, {high}, {low};");
            }
            GpuOp::Unpack { to, word, is_high } => {
                let (low, high) = (self.b16(), self.b16());
                let (to, word) = (self.reg(*to), self.reg(*word));
                put!(self, "mov.b32 {{{low}, {high}}}, {word};");
                put!(self, "cvt.f32.f16 {to}, {};", if *is_high { high } else { low });
            }
            GpuOp::RoundTf32 { to, from } => {
                let (to, from) = (self.reg(*to), self.reg(*from));
                put!(self, "cvt.rna.tf32.f32 {to}, {from};");
            }
            GpuOp::Max { to, a, b } => {
                let (to, a, b) = (self.reg(*to), self.reg(*a), self.reg(*b));
                put!(self, "max.NaN.f32 {to}, {a}, {b};");
            }
            GpuOp::Exp2 { to, from } => {
                let (to, from) = (self.reg(*to), self.reg(*from));
                put!(self, "ex2.approx.ftz.f32 {to}, {from};");
            }
        }
    }

    /// A matrix instruction, which all lanes of a warp come to.
    pub(super) fn multiply_tiles(
        &mut self,
        element: MatrixElement,
        to: &[Reg; 4],
        (a, b): (&[Reg; 4], &[Reg; 2]),
        sums: &[Reg; 4],
    ) {
        let (ty, shape) = element.spelling();
        let [to, a, b, sums] = [&to[..], a, b, sums].map(|regs| self.list(regs));
        put!(self, "mma.sync.aligned.{shape}.row.col.f32.{ty}.{ty}.f32 {to}, {a}, {b}, {sums};");
    }

    fn list(&self, regs: &[Reg]) -> String {
        let names: Vec<String> = regs.iter().map(|reg| self.reg(*reg)).collect();
        format!("{{{}}}", names.join(", "))
    }

    fn unfenced(&mut self, at: Address) -> String {
        self.trusted(at.base, at.region, i64::from(at.offset)).address
    }
}
