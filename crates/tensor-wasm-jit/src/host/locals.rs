//! Which local of the emitted function holds which register: a linear scan over live ranges. A register is live from
//! where it is assigned first to where it is read last, and to the end of every loop around that reading which began
//! after it was assigned. Registers that are not live at the same time share a local.

use wasm_encoder::ValType;

use crate::facts::Facts;
use crate::ir::{Body, Flow, Math, Op, Reg, Structure, Ty};

/// From the first operation that assigns a register to the last before which it is needed.
#[derive(Debug, Clone, Copy)]
struct LiveRange {
    from: usize,
    to: usize,
}

pub(super) struct Locals {
    spans: Vec<Option<LiveRange>>,
    slots: Vec<Option<u32>>,
    /// The types of all locals, in order.
    pub types: Vec<ValType>,
    pub wide: VectorFloats,
}

/// Which floats are held as vectors of as many as fit, all of them the same. Where numbers are multiplied and added at
/// once, which is possible for vectors only, making vectors of them every time would take longer than everything else.
#[derive(Debug, Clone, Copy)]
pub(super) struct VectorFloats {
    f32: bool,
    f64: bool,
}

impl VectorFloats {
    fn of(body: &Body) -> VectorFloats {
        let has = |math: Math| body.ops.iter().any(|op| matches!(op, Op::Math { op, .. } if *op == math));
        VectorFloats { f32: has(Math::FmaF32), f64: has(Math::FmaF64) }
    }

    pub(super) fn is(self, ty: Ty) -> bool {
        match ty {
            Ty::F32 => self.f32,
            Ty::F64 => self.f64,
            Ty::I32 | Ty::I64 => false,
        }
    }

    fn value_type(self, ty: Ty) -> ValType {
        match ty {
            _ if self.is(ty) => ValType::V128,
            Ty::I32 => ValType::I32,
            Ty::I64 => ValType::I64,
            Ty::F32 => ValType::F32,
            Ty::F64 => ValType::F64,
        }
    }
}

impl Locals {
    /// Parameters keep theirs: they are the same for every work item. Constants have none.
    pub(super) fn of(body: &Body, facts: &Facts) -> Locals {
        let (spans, wide) = (spans(body, facts), VectorFloats::of(body));
        let mut types = Vec::new();
        let mut slots = vec![None; body.types.len()];
        let number = |types: &Vec<ValType>| u32::try_from(types.len()).unwrap_or(u32::MAX);
        for reg in &body.params {
            slots[reg.0 as usize] = Some(number(&types));
            types.push(wide.value_type(body.ty(*reg)));
        }
        let is_param = |reg: &usize| body.params.iter().any(|param| param.0 as usize == *reg);
        let mut order: Vec<usize> = (0..spans.len()).filter(|reg| spans[*reg].is_some() && !is_param(reg)).collect();
        order.sort_by_key(|reg| spans[*reg].map_or(0, |span| span.from));
        // Locals that are free again, by type, and those that will be.
        let mut free: [Vec<u32>; 4] = Default::default();
        let mut ends: std::collections::BinaryHeap<std::cmp::Reverse<(usize, usize, u32)>> = Default::default();
        for reg in order {
            let (Some(span), ty) = (spans[reg], body.types[reg]) else { continue };
            while let Some(std::cmp::Reverse((to, kind, slot))) = ends.peek().copied()
                && to < span.from
            {
                free[kind].push(slot);
                ends.pop();
            }
            let kind = ty as usize;
            let slot = free[kind].pop().unwrap_or_else(|| {
                types.push(wide.value_type(ty));
                number(&types) - 1
            });
            slots[reg] = Some(slot);
            ends.push(std::cmp::Reverse((span.to, kind, slot)));
        }
        Locals { spans, slots, types, wide }
    }

    /// None for what nothing assigns, which nothing reads that is ever reached.
    pub(super) fn slot(&self, reg: Reg) -> Option<u32> {
        self.slots[reg.0 as usize]
    }

    /// A local that belongs to no register.
    pub(super) fn own(&mut self, ty: ValType) -> u32 {
        self.types.push(ty);
        u32::try_from(self.types.len() - 1).unwrap_or(u32::MAX)
    }

    /// Registers whose values are needed after an operation and were assigned before it.
    pub(super) fn live_across<'b>(&'b self, body: &'b Body, at: usize) -> impl Iterator<Item = Reg> + 'b {
        let is_param = move |reg: Reg| body.params.contains(&reg);
        let registers = self.spans.iter().zip(0..).filter_map(move |(span, n)| {
            let is_live = span.is_some_and(|span| span.from < at && span.to > at);
            is_live.then_some(Reg(n))
        });
        registers.filter(move |reg| !is_param(*reg))
    }
}

/// What the fence reads for an access, besides its address: what that is computed from.
fn fence_reads(op: &Op, facts: &Facts) -> [Option<Reg>; 3] {
    let Some((at, _)) = op.access() else { return [None; 3] };
    let base = at.base;
    let (root, _) = facts.root(base);
    [Some(root), facts.beyond_any(base), facts.beyond_any(root)]
}

fn spans(body: &Body, facts: &Facts) -> Vec<Option<LiveRange>> {
    let mut spans: Vec<Option<LiveRange>> = vec![None; body.types.len()];
    let mut loops: Vec<(usize, u32)> = Vec::new();
    // For each loop that is open: registers from before it that it reads.
    let mut carried: Vec<Vec<Reg>> = Vec::new();
    for (n, op) in body.ops.iter().enumerate() {
        let reads = op.read().chain(fence_reads(op, facts).into_iter().flatten());
        for reg in reads.filter(|reg| facts.constant(*reg).is_none()) {
            let Some(span) = &mut spans[reg.0 as usize] else { continue };
            span.to = n;
            // The innermost loop that it is from before; those around that hear of it when that ends.
            if let Some(last) = carried.last_mut()
                && loops.last().is_some_and(|(start, _)| span.from < *start)
            {
                last.push(reg);
            }
        }
        match op.flow() {
            Flow::Open(label, Structure::Loop) => {
                loops.push((n, label.0));
                carried.push(Vec::new());
            }
            Flow::Close(label) if loops.last().is_some_and(|(_, own)| *own == label.0) => {
                loops.pop();
                let mut ended = carried.pop().unwrap_or_default();
                ended.sort_unstable();
                ended.dedup();
                for reg in ended {
                    let Some(span) = &mut spans[reg.0 as usize] else { continue };
                    span.to = n;
                    if let Some(last) = carried.last_mut()
                        && loops.last().is_some_and(|(start, _)| span.from < *start)
                    {
                        last.push(reg);
                    }
                }
            }
            Flow::Open(_, Structure::Block | Structure::If)
            | Flow::Close(_)
            | Flow::Else(_)
            | Flow::Straight
            | Flow::Leave
            | Flow::Wait => {}
        }
        for to in op.assigned().filter(|reg| facts.constant(*reg).is_none()) {
            let span = spans[to.0 as usize].get_or_insert(LiveRange { from: n, to: n });
            // Assigned again, for instance at the end of a loop that it was made for.
            span.to = span.to.max(n);
            if let Some(last) = carried.last_mut()
                && loops.last().is_some_and(|(start, _)| span.from < *start)
            {
                last.push(to);
            }
        }
    }
    spans
}
