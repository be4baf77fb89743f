//! What follows a product, computed where the product's elements are: an expression without reductions over all of
//! them, evaluated on registers and stored, in the kernel that has added them up.

use tensor_wasm_jit::Target;
use tensor_wasm_jit::build::{KernelBuilder, Value};

use super::super::numbers::Built;
use super::{Argument, Emit, Frame, LoweredKernel};
use crate::schedule::plan::{MapKernel, Source, ValueKind};
use crate::shape::AxisSet;

pub(in crate::cuda) struct Epilogue<'k> {
    emit: Emit<'k>,
    /// Values that are elements of the product.
    products: Vec<usize>,
}

impl<'k> Epilogue<'k> {
    /// The expression of a kernel whose product would be in a slot, for so many elements at once that lie side by side;
    /// the kernel has windows of its own before.
    pub(in crate::cuda) fn new(
        kernel: &'k MapKernel,
        product: usize,
        lanes: usize,
        items: u32,
        arguments: Vec<Argument>,
        target: Target,
    ) -> Built<Epilogue<'k>> {
        let frame = Frame {
            rows: kernel.space.numel(),
            row_len: 1,
            team: 1,
            lanes,
            is_along_rows: true,
            repeats: 1,
            parts: 1,
            part_len: 1,
            is_kept: true,
            reduced: AxisSet::default(),
            group: items as usize,
            target,
        };
        let is_product = |kind: &ValueKind| match kind {
            ValueKind::Load(load) => kernel.loads[*load].source == Source::Slot(product),
            _ => false,
        };
        let products = (0..kernel.values.len()).filter(|n| is_product(&kernel.values[*n].kind)).collect();
        Ok(Epilogue { emit: Emit::with(kernel, frame, "matmul", arguments)?, products })
    }

    pub(in crate::cuda) fn builder(&mut self) -> &mut KernelBuilder {
        &mut self.emit.b
    }

    pub(in crate::cuda) fn window(&self, argument: Argument) -> Built<Value> {
        self.emit.windows.get(argument)
    }

    /// Loads the numbers that come with each run: before anything else.
    pub(in crate::cuda) fn begin(&mut self) -> Built<()> {
        self.emit.load_fills()
    }

    /// Computes and stores what follows some elements of the product, from a number on.
    pub(in crate::cuda) fn store(&mut self, number: Value, elements: &[Value]) -> Built<()> {
        self.emit.at_row = Some(number);
        let mut point = self.emit.point(number, None);
        for product in &self.products {
            point.full[*product] = Some(elements.to_vec());
        }
        let stores = self.emit.stores_of(0);
        self.emit.visit(&mut point, &[], &stores).map(drop)
    }

    pub(in crate::cuda) fn finish(self, groups: u32) -> Built<LoweredKernel> {
        self.emit.finish(groups)
    }
}
