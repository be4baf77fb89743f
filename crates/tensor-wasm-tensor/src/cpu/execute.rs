//! Runs plans.

use std::sync::Arc;

use super::map::MapProgram;
use super::memory::CpuBuffer;
use super::special;
use crate::error::ErrorKind;
use crate::graph::{Storage, Value};
use crate::schedule::CompiledPlan;
use crate::schedule::plan::{BufferView, Parameter, Plan, Source, Step};

/// What this device has made of a plan's kernels, one for each step.
pub(crate) struct CpuKernels(Vec<Option<MapProgram>>);

impl CpuKernels {
    pub(crate) fn compile(plan: &Plan) -> CpuKernels {
        let program = |step: &Step| match step {
            Step::Map(kernel) => Some(MapProgram::compile(kernel)),
            Step::Special(_) => None,
        };
        CpuKernels(plan.steps.iter().map(program).collect())
    }
}

/// The buffers of one run.
pub(super) struct Buffers<'r> {
    leaves: &'r [Value],
    slots: Vec<Option<Arc<Storage>>>,
}

impl Buffers<'_> {
    fn storage(&self, source: Source) -> Result<&Arc<Storage>, ErrorKind> {
        let found = match source {
            Source::Leaf(leaf) => self.leaves.get(leaf).map(|value| &value.storage),
            Source::Slot(slot) => self.slots.get(slot).and_then(Option::as_ref),
        };
        found.ok_or_else(|| ErrorKind::Bug { why: format!("{source:?} is not there") })
    }

    pub(super) fn get(&self, source: Source) -> Result<&CpuBuffer, ErrorKind> {
        let Storage::Cpu(buffer) = &**self.storage(source)?;
        Ok(buffer)
    }

    /// A buffer that is read under a layout, if the layout stays inside of it.
    pub(super) fn view(&self, view: &BufferView) -> Result<&CpuBuffer, ErrorKind> {
        let buffer = self.get(view.source)?;
        let count = buffer.bytes() / view.dtype.size();
        let is_inside = view.layout.reach().is_none_or(|(first, last)| first >= 0 && last.unsigned_abs() < count);
        if is_inside {
            Ok(buffer)
        } else {
            Err(ErrorKind::Bug { why: format!("{view:?} is outside of its {count} elements") })
        }
    }
}

/// Runs a plan, and returns what its outputs are, or the node that could not be computed.
pub(crate) fn execute(
    compiled: &CompiledPlan,
    leaves: &[Value],
    parameters: &[Parameter],
) -> Result<Vec<Value>, (usize, ErrorKind)> {
    let CompiledPlan { plan, kernels } = compiled;
    let mut buffers = Buffers { leaves, slots: plan.slots.iter().map(|_| None).collect() };
    let allocate = |slot: usize| {
        let slot = &plan.slots[slot];
        let bytes = slot.shape.numel() * slot.dtype.size();
        CpuBuffer::uninitialized(bytes).ok_or(ErrorKind::OutOfMemory { bytes })
    };
    for (n, step) in plan.steps.iter().enumerate() {
        let failed = |what: ErrorKind| (step.node(), what);
        match (step, &kernels.0[n]) {
            (Step::Map(kernel), Some(program)) => {
                let made = kernel.stores.iter().map(|(_, slot)| allocate(*slot)).collect::<Result<Vec<_>, _>>();
                let made = made.map_err(failed)?;
                program.run(kernel, &buffers, &made, parameters).map_err(failed)?;
                for ((_, slot), buffer) in kernel.stores.iter().zip(made) {
                    buffers.slots[*slot] = Some(Arc::new(Storage::Cpu(buffer)));
                }
            }
            (Step::Special(kernel), _) => {
                let made = allocate(kernel.slot).map_err(failed)?;
                special::run(kernel, &buffers, &made).map_err(failed)?;
                buffers.slots[kernel.slot] = Some(Arc::new(Storage::Cpu(made)));
            }
            (Step::Map(_), None) => return Err(failed(ErrorKind::Bug { why: "a kernel was not compiled".to_owned() })),
        }
        for (slot, buffer) in plan.slots.iter().zip(&mut buffers.slots) {
            if slot.last_step == Some(n) {
                *buffer = None;
            }
        }
    }
    let value = |view: &BufferView| Ok(Value { storage: buffers.storage(view.source)?.clone(), layout: view.layout });
    let last = plan.steps.last().map_or(0, Step::node);
    plan.outputs.iter().map(value).collect::<Result<_, _>>().map_err(|what| (last, what))
}
