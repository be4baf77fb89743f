//! Runs plans.

use std::sync::Arc;

use smallvec::SmallVec;

use super::map::MapProgram;
use super::memory::CpuBuffer;
use super::special;
use crate::account;
use crate::error::ErrorKind;
use crate::graph::{Storage, Value};
use crate::schedule::CompiledPlan;
use crate::schedule::plan::{BufferView, MapKernel, Parameter, Plan, Slot, Source, Step};

/// What this device has made of a plan's kernels, one for each step: the step itself, or what follows it.
pub(crate) struct CpuKernels(Vec<Option<MapProgram>>);

impl CpuKernels {
    pub(crate) fn compile(plan: &Plan) -> CpuKernels {
        let program = |step: &Step| match step {
            Step::Map(kernel) => Some(MapProgram::compile(kernel)),
            Step::Special(kernel) => kernel.epilogue.as_ref().map(MapProgram::compile),
        };
        CpuKernels(plan.steps.iter().map(program).collect())
    }
}

/// Buffers and kernels of this number are kept without asking for memory: one operation by itself has no more.
pub(super) const FEW: usize = 4;

/// Results of a kernel.
pub(super) type Results = SmallVec<[Arc<Storage>; FEW]>;

/// The buffers of one run.
pub(super) struct Buffers<'r> {
    leaves: &'r [Value],
    slots: SmallVec<[Option<Arc<Storage>>; FEW]>,
    /// Memory of slots that are still to be filled, where all of it has to be there before the first step.
    reserved: Vec<Option<Arc<Storage>>>,
}

impl Buffers<'_> {
    fn storage(&self, source: Source) -> Result<&Arc<Storage>, ErrorKind> {
        let found = match source {
            Source::Leaf(leaf) => self.leaves.get(leaf).map(|value| &value.storage),
            Source::Slot(slot) => self.slots.get(slot).and_then(Option::as_ref),
        };
        found.ok_or_else(|| ErrorKind::Bug { why: format!("{source:?} is not there") })
    }

    /// Asks for the memory of all slots that take over no other.
    fn reserve(&mut self, plan: &Plan) -> Result<(), (usize, ErrorKind)> {
        self.reserved = plan.slots.iter().map(|_| None).collect();
        for step in &plan.steps {
            let Step::Map(kernel) = step else { continue };
            for ((_, slot), _) in kernel.stores.iter().zip(&kernel.in_place).filter(|(_, load)| load.is_none()) {
                self.reserved[*slot] = Some(allocate(&plan.slots[*slot]).map_err(|what| (step.node(), what))?);
            }
        }
        Ok(())
    }

    /// Where a kernel's results go: into new buffers, or into those that it takes over.
    fn results(&mut self, plan: &Plan, kernel: &MapKernel) -> Result<Results, ErrorKind> {
        let result = |(store, (_, slot)): (usize, &(usize, usize))| match kernel.in_place.get(store).copied().flatten()
        {
            Some(load) => {
                let storage = self.storage(kernel.loads[load].source)?;
                storage.cpu()?;
                storage.forget_copies();
                Ok(storage.clone())
            }
            None => match self.reserved.get_mut(*slot).and_then(Option::take) {
                Some(reserved) => Ok(reserved),
                None => allocate(&plan.slots[*slot]),
            },
        };
        kernel.stores.iter().enumerate().map(result).collect()
    }

    fn keep(&mut self, kernel: &MapKernel, made: Results) {
        for ((_, slot), storage) in kernel.stores.iter().zip(made) {
            self.slots[*slot] = Some(storage);
        }
    }

    pub(super) fn get(&self, source: Source) -> Result<&CpuBuffer, ErrorKind> {
        self.storage(source)?.cpu()
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

fn allocate(slot: &Slot) -> Result<Arc<Storage>, ErrorKind> {
    let bytes = slot.shape.numel() * slot.dtype.size();
    CpuBuffer::uninitialized(bytes)
        .map(|buffer| Arc::new(Storage::of_cpu(buffer).computed()))
        .ok_or(ErrorKind::OutOfMemory { bytes })
}

/// Runs a plan, and returns what its outputs are, or the node that could not be computed.
pub(crate) fn execute(
    compiled: &CompiledPlan,
    leaves: &[Value],
    parameters: &[Parameter],
) -> Result<Vec<Value>, (usize, ErrorKind)> {
    let CompiledPlan { plan, kernels, .. } = compiled;
    if kernels.get().is_none() {
        let last = plan.steps.last().map_or(0, Step::node);
        account::check_hurry().map_err(|what| (last, what))?;
    }
    let kernels = kernels.get_or_init(|| CpuKernels::compile(plan));
    let mut buffers = Buffers { leaves, slots: plan.slots.iter().map(|_| None).collect(), reserved: Vec::new() };
    if plan.takes_leaves {
        buffers.reserve(plan)?;
    }
    for (n, step) in plan.steps.iter().enumerate() {
        let failed = |what: ErrorKind| (step.node(), what);
        if n > 0 {
            account::between_kernels().map_err(failed)?;
        }
        match (step, &kernels.0[n]) {
            (Step::Map(kernel), Some(program)) => {
                let made = buffers.results(plan, kernel).map_err(failed)?;
                let run = program.prepare(kernel, &buffers, &made, parameters).map_err(failed)?;
                run.whole().and_then(|()| run.check()).map_err(failed)?;
                buffers.keep(kernel, made);
            }
            (Step::Special(kernel), program) => {
                buffers.slots[kernel.slot] = Some(allocate(&plan.slots[kernel.slot]).map_err(failed)?);
                match kernel.epilogue.as_ref().zip(program.as_ref()) {
                    None => special::run(kernel, &buffers, None).map_err(failed)?,
                    Some((after, program)) => {
                        let made = buffers.results(plan, after).map_err(failed)?;
                        let run = program.prepare(after, &buffers, &made, parameters).map_err(failed)?;
                        let finish = |start: usize, count: usize| run.range(start, count);
                        // What is not computed in the order of its elements waits until all are there.
                        let is_inside = run.is_linear() && special::finishes(kernel);
                        special::run(kernel, &buffers, is_inside.then_some(&finish)).map_err(failed)?;
                        let rest = if is_inside { Ok(()) } else { run.whole() };
                        rest.and_then(|()| run.check()).map_err(|what| (after.node, what))?;
                        buffers.keep(after, made);
                    }
                }
            }
            (Step::Map(_), None) => return Err(failed(ErrorKind::Bug { why: "a kernel was not compiled".to_owned() })),
        }
        for slot in step.slots().filter(|slot| plan.slots[*slot].last_step == Some(n)) {
            buffers.slots[slot] = None;
        }
    }
    let value = |view: &BufferView| Ok(Value { storage: buffers.storage(view.source)?.clone(), layout: view.layout });
    let last = plan.steps.last().map_or(0, Step::node);
    // Threads may have left a kernel that was to stop.
    account::check_stopped().map_err(|what| (last, what))?;
    plan.outputs.iter().map(value).collect::<Result<_, _>>().map_err(|what| (last, what))
}
