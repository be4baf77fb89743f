//! Products of half-precision matrices. Their meaning is a product in single precision that is rounded once, and a plan
//! has just that: casts before and after. A GPU multiplies halves as they are, adds them up in single precision and
//! rounds the sum: the same result without the passes over memory.

use crate::dtype::DType;
use crate::graph::op::Op;
use crate::schedule::plan::{BufferView, Level, MapKernel, Plan, Source, SpecialKernel, Step, ValueKind};
use crate::shape::Layout;

/// A plan's steps as a GPU runs them. Those that nobody needs any more are gone.
pub(super) struct HalvedPlan {
    pub steps: Vec<Option<Step>>,
    /// For each slot the step after which nobody reads it; none if it is an output.
    pub last_steps: Vec<Option<usize>>,
}

impl HalvedPlan {
    pub(super) fn of(plan: &Plan) -> HalvedPlan {
        let steps = plan.steps.iter().cloned().map(Some).collect();
        let mut halved = HalvedPlan { steps, last_steps: plan.slots.iter().map(|slot| slot.last_step).collect() };
        for n in 0..plan.steps.len() {
            if let Step::Special(kernel) = &plan.steps[n]
                && let Some(made) = halved.halve(plan, n, kernel)
            {
                halved.steps[n] = Some(Step::Special(made));
            }
        }
        halved.forget_unread();
        halved
    }

    /// The product with its operands and its result in half precision, if that is what its casts come to.
    fn halve(&mut self, plan: &Plan, step: usize, kernel: &SpecialKernel) -> Option<SpecialKernel> {
        if !matches!(kernel.op, Op::Matmul) || kernel.dtype != DType::F32 {
            return None;
        }
        let inputs: Vec<BufferView> =
            kernel.inputs.iter().map(|view| self.narrow(plan, step, view)).collect::<Option<_>>()?;
        let dtype = inputs.first()?.dtype;
        if inputs.iter().any(|view| view.dtype != dtype) || self.last_steps[kernel.slot] != Some(step) {
            return None;
        }
        let epilogue = rounded(kernel, kernel.epilogue.as_ref()?, dtype)?;
        for view in &inputs {
            // What is read instead has to be there for longer.
            if let Source::Slot(slot) = view.source {
                self.last_steps[slot] = self.last_steps[slot].map(|last| last.max(step));
            }
        }
        let epilogue = Some(epilogue);
        Some(SpecialKernel { op: kernel.op.clone(), inputs, dtype, epilogue, shape: kernel.shape, ..*kernel })
    }

    /// The halves that an operand is made from, seen the same way.
    fn narrow(&self, plan: &Plan, step: usize, view: &BufferView) -> Option<BufferView> {
        let Source::Slot(slot) = view.source else { return None };
        let makes = |step: &&Step| step.writes().any(|written| written == slot);
        let Step::Map(map) = plan.steps.get(..step)?.iter().find(makes)? else { return None };
        let (value, _) = map.stores.iter().find(|(_, stored)| *stored == slot)?;
        let ValueKind::Cast(from) = map.values.get(*value)?.kind else { return None };
        let ValueKind::Load(load) = map.values.get(from)?.kind else { return None };
        let made = map.loads.get(load)?;
        let is_half = matches!(made.dtype, DType::F16 | DType::BF16);
        if !is_half || !map.reduced.is_empty() || map.values.get(*value)?.level != Level::Full {
            return None;
        }
        let layout = through(&made.layout, map, &view.layout)?;
        Some(BufferView { source: made.source, layout, dtype: made.dtype })
    }

    /// Leaves out steps whose results nobody reads.
    fn forget_unread(&mut self) {
        let read: Vec<Source> =
            self.steps.iter().flatten().flat_map(|step| step.reads().map(|view| view.source)).collect();
        for step in &mut self.steps {
            let is_unread = |slot: usize| self.last_steps[slot].is_some() && !read.contains(&Source::Slot(slot));
            if let Some(Step::Map(map)) = step
                && map.stores.iter().all(|(_, slot)| is_unread(*slot))
            {
                *step = None;
            }
        }
    }
}

/// A view of what a map makes, as a view of what it makes it from. A map goes over its space, and what it makes lies in
/// that order.
fn through(from: &Layout, map: &MapKernel, view: &Layout) -> Option<Layout> {
    let is_straight = from.has_strides(&map.space.strides()) && from.offset == 0;
    if is_straight {
        return Some(*view);
    }
    // Seen as it is, it is seen as what it is made from.
    (view.is_contiguous() && view.shape == map.space).then_some(*from)
}

/// What follows a product of halves, from where it is rounded on: the product's elements are loaded as they are.
fn rounded(kernel: &SpecialKernel, after: &MapKernel, dtype: DType) -> Option<MapKernel> {
    let is_product = |view: &BufferView| view.source == Source::Slot(kernel.slot);
    let mut loads = after.loads.iter().enumerate().filter(|(_, view)| is_product(view));
    let (Some((load, _)), None) = (loads.next(), loads.next()) else { return None };
    let mut own = (0..after.values.len()).filter(|value| after.values[*value].kind == ValueKind::Load(load));
    let (Some(loaded), None) = (own.next(), own.next()) else { return None };
    let is_stored = after.stores.iter().any(|(value, _)| *value == loaded);
    let users = || after.values.iter().filter(|value| value.kind.operands().any(|operand| operand == loaded));
    let rounds = |kind: &ValueKind, to: DType| *kind == ValueKind::Cast(loaded) && to == dtype;
    if is_stored || users().count() == 0 || !users().all(|value| rounds(&value.kind, value.dtype)) {
        return None;
    }
    let mut rounded = after.clone();
    rounded.loads[load].dtype = dtype;
    rounded.values[loaded].dtype = dtype;
    for value in &mut rounded.values {
        if rounds(&value.kind, value.dtype) {
            value.kind = ValueKind::Load(load);
        }
    }
    Some(rounded)
}
