//! A plan for a GPU: its launches in order, and where everything between them lies. Buffers that nobody sees but the
//! plan are parts of one block, which they share as their lives allow.

use tensor_wasm_gpu::{Grid, Kernel, Product, ProductElement, ProductEpilogue, block_on};
use tensor_wasm_jit::Target;

use super::halves::HalvedPlan;
use super::map::{Argument, DIVIDED_BY_ZERO, LoweredKernel, LoweredStep, OUT_OF_RANGE, Program};
use super::order::{Layouts, StepUse};
use super::{CudaDevice, attention, map, matrix, order, product, special};
use crate::dtype::DType;
use crate::error::ErrorKind;
use crate::graph::Value;
use crate::graph::op::{BinaryOp, Op};
use crate::schedule::plan::{BufferView, MapKernel, Plan, Source, SpecialKernel, Step, ValueKind};

/// Parts of a block begin at multiples of this.
const ALIGN: u64 = 256;

/// Memory up to which a plan's buffers do not take each other's places: so little is soon found, and what lies apart
/// can be written side by side (`order.rs`).
const UNSHARED_BYTES_MAX: u64 = 8 << 20;

/// Elements of a tensor, and of what a kernel goes over: indices have 31 bits. Bytes of a buffer have 32.
const ELEMENTS_MAX: usize = i32::MAX.unsigned_abs() as usize;
const BYTES_MAX: usize = u32::MAX as usize;

/// Where a slot lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotPlace {
    /// In the plan's own block, from there on.
    Block(u64),
    /// In a buffer of its own, which somebody keeps: the number of it.
    Output(usize),
}

pub(super) struct CudaLaunch {
    pub kernel: Kernel,
    pub grid: Grid,
    pub arguments: Vec<LaunchArgument>,
}

/// What a window is given: a leaf or an output from a byte on, a part of the plan's block, the plan's numbers and
/// flags, or what all plans share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LaunchArgument {
    Leaf(usize, u64),
    Block(u64),
    Output(usize, u64),
    Parameters(usize),
    Flags,
    Workspace,
}

/// A slot that somebody keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlanOutput {
    pub slot: usize,
    pub bytes: usize,
    /// The leaf whose memory it takes over, if that was given up.
    pub over: Option<usize>,
}

pub(super) struct CudaPlan {
    pub launches: Vec<CudaLaunch>,
    /// For each launch which of those before it comes after; nothing where that is the one before.
    pub after: Vec<Vec<u16>>,
    pub block_bytes: u64,
    pub outputs: Vec<PlanOutput>,
    /// What tells whether everything could be computed.
    pub check: Check,
    /// The numbers of each run that have to be what they were when it was lowered.
    pub assumed: Vec<usize>,
}

/// What has to be looked at to know that a plan could be computed: elements decide it.
pub(super) enum Check {
    /// Flags that kernels write, after they have run. Whoever looks waits for them.
    Flags,
    /// Indices, and the sizes of the axes that they are for. Where the host has what they are made of too, they are
    /// looked at there, and nobody waits. There may be none.
    Indices(Vec<(Indices, usize)>),
}

/// Indices that the host may look at.
pub(super) enum Indices {
    /// Among the leaves.
    Leaf(BufferView),
    /// What a kernel makes of leaves: a value of it. A loss moves classes that make no sense out of the range.
    Made(MapKernel, usize),
}

/// Indices that the host looks at: some microseconds, as much as a round trip takes.
const INDICES_MAX: usize = 8192;

/// The same where it computes them first.
const MADE_INDICES_MAX: usize = 1024;

impl Check {
    fn of(halved: &HalvedPlan) -> Check {
        let mut indices = Vec::new();
        for (n, step) in halved.steps.iter().enumerate() {
            let Some(step) = step else { continue };
            if divides(step) {
                return Check::Flags;
            }
            let Step::Special(kernel) = step else { continue };
            let (size, view) = match (&kernel.op, &kernel.inputs[..]) {
                (Op::Gather { axis }, [from, index]) => (from.layout.shape[*axis], index),
                (Op::ScatterAdd { size, .. }, [_, index]) => (*size, index),
                _ => continue,
            };
            match view.source {
                Source::Leaf(_) => indices.push((Indices::Leaf(*view), size)),
                Source::Slot(slot) if is_extreme(&halved.steps[..n], slot, size) => {}
                Source::Slot(slot) => match made_by(&halved.steps[..n], slot) {
                    Some((kernel, value)) => indices.push((Indices::Made(kernel.clone(), value), size)),
                    None => return Check::Flags,
                },
            }
        }
        Check::Indices(indices)
    }

    /// Whether everything can be computed, as far as the host can tell: from leaves, and the numbers that come with the
    /// run.
    pub(super) fn is_passed(&self, leaves: &[Value], words: &[u8]) -> bool {
        let is_inside = |(indices, size): &(Indices, usize)| match indices {
            Indices::Leaf(view) => is_inside(view, *size, leaves),
            Indices::Made(kernel, value) => is_made_inside(kernel, *value, *size, leaves, words),
        };
        match self {
            Check::Flags => false,
            Check::Indices(indices) => indices.iter().all(|indices| is_inside(indices).unwrap_or(false)),
        }
    }
}

/// The kernel that fills a slot, and with which of its values, if it makes each element of leaves.
fn made_by(before: &[Option<Step>], slot: usize) -> Option<(&MapKernel, usize)> {
    before.iter().flatten().find_map(|step| {
        let Step::Map(kernel) = step else { return None };
        let (value, _) = kernel.stores.iter().find(|(_, to)| *to == slot)?;
        let is_of_leaves = kernel.loads.iter().all(|load| load.slot().is_none());
        (kernel.reduced.is_empty() && is_of_leaves).then_some((kernel, *value))
    })
}

/// Whether all elements of a value are indices of an axis, if the host has what they are made of, and they are few.
fn is_made_inside(kernel: &MapKernel, value: usize, size: usize, leaves: &[Value], words: &[u8]) -> Option<bool> {
    if kernel.space.numel() > MADE_INDICES_MAX {
        return None;
    }
    let size = i64::try_from(size).ok()?;
    let mut known = vec![None; value + 1];
    host_value(kernel, value, leaves, words, &mut known)?;
    Some(known[value].as_ref()?.iter().all(|index| (-size..size).contains(index)))
}

/// Computes the elements of a kernel's value, if they are integers or truths that the host can make.
fn host_value(
    kernel: &MapKernel,
    value: usize,
    leaves: &[Value],
    words: &[u8],
    known: &mut [Option<Vec<i64>>],
) -> Option<()> {
    if known[value].is_some() {
        return Some(());
    }
    let made = &kernel.values[value];
    if !matches!(made.dtype, DType::I64 | DType::Bool) {
        return None;
    }
    for operand in made.kind.operands() {
        host_value(kernel, operand, leaves, words, known)?;
    }
    let of = |operand: usize| known[operand].as_deref();
    let elements = match &made.kind {
        ValueKind::Load(load) => {
            let BufferView { source: Source::Leaf(leaf), layout, dtype } = &kernel.loads[*load] else { return None };
            let buffer = leaves.get(*leaf)?.storage.here()?;
            if layout.shape != kernel.space {
                return None;
            }
            let mut elements = Vec::with_capacity(layout.shape.numel());
            layout.for_each_position(|position| elements.push(buffer.at(*dtype, position).1));
            elements
        }
        ValueKind::Fill(number) if made.dtype == DType::I64 => {
            let word = words.chunks_exact(size_of::<i64>()).nth(*number)?;
            vec![i64::from_le_bytes(word.try_into().ok()?); kernel.space.numel()]
        }
        ValueKind::Binary(op, a, b) => {
            let apply: fn(i64, i64) -> i64 = match op {
                BinaryOp::Add => i64::wrapping_add,
                BinaryOp::Sub => i64::wrapping_sub,
                BinaryOp::Max => i64::max,
                BinaryOp::Min => i64::min,
                BinaryOp::Eq => |a, b| i64::from(a == b),
                BinaryOp::Lt => |a, b| i64::from(a < b),
                BinaryOp::Le => |a, b| i64::from(a <= b),
                _ => return None,
            };
            of(*a)?.iter().zip(of(*b)?).map(|(a, b)| apply(*a, *b)).collect()
        }
        ValueKind::Where(condition, a, b) => {
            let both = of(*a)?.iter().zip(of(*b)?);
            of(*condition)?.iter().zip(both).map(|(is_first, (a, b))| if *is_first != 0 { *a } else { *b }).collect()
        }
        _ => return None,
    };
    known[value] = Some(elements);
    Some(())
}

/// Whether a slot has places of extremes along an axis that is no longer than so much.
fn is_extreme(before: &[Option<Step>], slot: usize, size: usize) -> bool {
    before.iter().flatten().any(|step| match step {
        Step::Special(kernel) if kernel.slot == slot => match (&kernel.op, &kernel.inputs[..]) {
            (Op::ArgReduce { axis, .. }, [from]) => from.layout.shape[*axis] <= size,
            _ => false,
        },
        _ => false,
    })
}

/// Whether all indices of a leaf are those of an axis, if the host has them and they are few.
fn is_inside(view: &BufferView, size: usize, leaves: &[Value]) -> Option<bool> {
    let Source::Leaf(leaf) = view.source else { return None };
    let buffer = leaves.get(leaf)?.storage.here()?;
    // Those that are repeated are looked at once.
    let repeated = (0..view.layout.shape.rank()).filter(|axis| view.layout.strides()[*axis] == 0);
    let layout = repeated.fold(view.layout, |layout, axis| {
        let len = layout.shape[axis].min(1);
        layout.slice(axis, 0, 1, len)
    });
    if layout.shape.numel() > INDICES_MAX {
        return None;
    }
    let size = i64::try_from(size).ok()?;
    let mut is_inside = true;
    layout.for_each_position(|position| is_inside &= (-size..size).contains(&buffer.at(view.dtype, position).1));
    Some(is_inside)
}

impl CudaPlan {
    /// Lowers a plan, for the numbers that a run comes with if they are given.
    pub(super) fn new(device: &CudaDevice, plan: &Plan, words: Option<&[u8]>) -> Result<CudaPlan, (usize, ErrorKind)> {
        let halved = HalvedPlan::of(plan);
        let mut assumed = Vec::new();
        let mut steps = Vec::with_capacity(plan.steps.len());
        for (n, step) in halved.steps.iter().enumerate() {
            let Some(step) = step else {
                steps.push(LoweredStep::default());
                continue;
            };
            let at_node = |what: ErrorKind| (step.node(), what);
            check_sizes(plan, step).map_err(at_node)?;
            let by_library = by_library(device, &halved, n, words).ok();
            assumed.extend(by_library.iter().flat_map(ByLibrary::assumed));
            let is_needed = is_product_needed(&halved, n);
            steps.push(lower(step, by_library, is_needed, device.target()).map_err(at_node)?);
        }
        let places = Places::of(plan, &halved, &steps);
        let mut launches = Vec::new();
        let mut uses = Vec::new();
        for (n, lowered) in steps.into_iter().enumerate() {
            let first = launches.len();
            for kernel in &lowered.kernels {
                let launch = load(device, kernel, &places, n).map_err(|what| (plan.steps[n].node(), what))?;
                launches.push(launch);
            }
            let Some(step) = &halved.steps[n] else { continue };
            let layouts = Layouts {
                slots: &places.slots,
                outputs: &places.outputs,
                slot_bytes: &|slot| slot_bytes(plan, slot) as u64,
                scratch: places.scratch[n]
                    .iter()
                    .zip(&lowered.scratch_bytes)
                    .map(|(from, bytes)| *from..from + bytes)
                    .collect(),
            };
            let arguments = lowered.kernels.iter().flat_map(|kernel| &kernel.arguments);
            uses.push(StepUse::of(step, layouts, arguments, can_fail(step), first..launches.len()));
        }
        let after = order::order(&uses);
        let check = Check::of(&halved);
        Ok(CudaPlan { launches, after, block_bytes: places.bytes, outputs: places.outputs, check, assumed })
    }

    /// What a failure says that a kernel wrote down.
    pub(super) fn failure(plan: &Plan, flags: &[u8]) -> Option<(usize, ErrorKind)> {
        let word = |at: usize| flags.get(at..at + 4).and_then(|four| four.try_into().ok()).map(u32::from_le_bytes);
        let (code, node) = (word(0)?, word(4)? as usize);
        match code {
            DIVIDED_BY_ZERO => Some((node, ErrorKind::DivisionByZero)),
            OUT_OF_RANGE => {
                let index = flags.get(8..16)?.try_into().map(i64::from_le_bytes).ok()?;
                let special = plan.steps.iter().find_map(|step| match step {
                    Step::Special(kernel) if kernel.node == node => Some(kernel),
                    _ => None,
                })?;
                let (axis, size) = match special.op {
                    Op::Gather { axis } => (axis, special.inputs.first()?.layout.shape[axis]),
                    Op::ScatterAdd { axis, size } => (axis, size),
                    _ => return None,
                };
                Some((node, ErrorKind::OutOfRange { index, axis, size }))
            }
            _ => None,
        }
    }
}

/// Whether what a step computes, before what follows it, is read by anybody else.
fn is_product_needed(plan: &HalvedPlan, step: usize) -> bool {
    match &plan.steps[step] {
        Some(Step::Special(kernel)) => plan.last_steps[kernel.slot] != Some(step),
        Some(Step::Map(_)) | None => false,
    }
}

/// A product as the device's library does it, and what of that which follows it is done on the way: all of it or
/// nothing.
struct ByLibrary {
    product: LoweredKernel,
    following: Option<product::Following>,
}

impl ByLibrary {
    fn assumed(&self) -> &[usize] {
        self.following.as_ref().map_or(&[], |following| &following.assumed)
    }
}

/// A product as the device's library does it, if it has an algorithm for it, and room to work in; or why not. What
/// follows is done on the way unless the library does not have it for this type.
fn by_library(device: &CudaDevice, plan: &HalvedPlan, step: usize, words: Option<&[u8]>) -> Result<ByLibrary, String> {
    let Some(Step::Special(kernel)) = &plan.steps[step] else { return Err("it is fused".to_owned()) };
    if matrix::is_small(kernel) {
        return Err("it is small".to_owned());
    }
    let whole = product::following(kernel, is_product_needed(plan, step), words);
    let made = |following: Option<product::Following>| {
        let none = || "a library has none of this type or layout".to_owned();
        let product = product::of(kernel, following.as_ref()).ok_or_else(none)?;
        if kernel.epilogue.is_some() && following.is_none() && matrix::is_quick(kernel, device.target()) {
            return Err("it is as quick, and computes what follows on the way".to_owned());
        }
        let loaded = device.workspace().and_then(|_| load_program(device, &product.program));
        loaded.map(|_| ByLibrary { product, following }).map_err(|why| why.to_string())
    };
    match whole {
        Some(whole) => made(Some(whole)).or_else(|_| made(None)),
        None => made(None),
    }
}

/// What became of a step, for people.
pub(crate) struct ExplainedStep {
    /// By what a product is computed.
    pub by: Option<String>,
    /// Each launch: groups and items of a kernel of our own, or whose it is.
    pub launches: Vec<String>,
}

/// What becomes of each step of a plan, for people, and for the numbers of a run if they are given.
pub(crate) fn explain(device: &CudaDevice, plan: &Plan, words: Option<&[u8]>) -> Vec<ExplainedStep> {
    let (halved, target) = (HalvedPlan::of(plan), device.target());
    let launch = |kernel: &LoweredKernel| match kernel.program {
        Program::Built(_) => format!("{}×{}", kernel.groups, kernel.items),
        Program::Product(_) => "cuBLASLt".to_owned(),
    };
    let explained = |n: usize| {
        // Casts around a product that takes halves as they are, and what a device cannot do, are no launches.
        let Some(step) = &halved.steps[n] else { return ExplainedStep { by: None, launches: Vec::new() } };
        let library = by_library(device, &halved, n, words);
        let by = match step {
            Step::Special(SpecialKernel { op: Op::Attention { .. }, dtype, .. }) => {
                Some(attention::explained(*dtype, true))
            }
            Step::Special(SpecialKernel {
                op: Op::AttentionRows { .. } | Op::AttentionGradient { .. }, dtype, ..
            }) => Some(attention::explained(*dtype, false)),
            Step::Special(kernel) if matches!(kernel.op, Op::Matmul) => {
                let own = matrix::lower(kernel, is_product_needed(&halved, n), target).map(drop);
                Some(product_by(kernel, &library, own))
            }
            _ => None,
        };
        let lowered = lower(step, library.ok(), is_product_needed(&halved, n), target);
        let launches = lowered.map(|lowered| lowered.kernels.iter().map(launch).collect());
        ExplainedStep { by, launches: launches.unwrap_or_default() }
    };
    (0..plan.steps.len()).map(explained).collect()
}

/// The library, or why not; then a kernel of our own, on tensor cores or why not.
fn product_by(kernel: &SpecialKernel, library: &Result<ByLibrary, String>, own: Result<(), &str>) -> String {
    let dtype = if kernel.dtype.size() == 2 { format!(" in {}", kernel.dtype) } else { String::new() };
    match library {
        Ok(ByLibrary { product, .. }) => match &product.program {
            Program::Product(product) => {
                let tf32 = if product.element == ProductElement::Tf32 { " in tf32" } else { "" };
                format!("cuBLASLt{dtype}{tf32}{}", done_on_the_way(product))
            }
            Program::Built(_) => "own kernel".to_owned(),
        },
        Err(why) => {
            let is_tf32 = kernel.dtype == DType::F32 && super::is_tf32();
            match own {
                Ok(()) if is_tf32 => format!("own kernel on tensor cores in tf32: {why}"),
                Ok(()) if kernel.dtype == DType::F32 => format!("own kernel: {why}"),
                Ok(()) => format!("own kernel on tensor cores{dtype}: {why}"),
                Err(no_cores) => format!("own kernel{dtype}: {why}; {no_cores}"),
            }
        }
    }
}

/// What a library does of that which follows, as ", with the bias and relu".
fn done_on_the_way(product: &Product) -> String {
    let activation = match product.epilogue {
        ProductEpilogue::None => None,
        ProductEpilogue::Relu => Some("relu"),
        ProductEpilogue::Gelu => Some("gelu_approximate"),
    };
    let added = [(product.has_bias, "the bias"), (product.has_residual, "the residual")];
    let done: Vec<&str> = added.into_iter().filter_map(|(is, what)| is.then_some(what)).chain(activation).collect();
    match &done[..] {
        [] => String::new(),
        [only] => format!(", with {only}"),
        [first @ .., last] => format!(", with {} and {last}", first.join(", ")),
    }
}

fn lower(
    step: &Step,
    by_library: Option<ByLibrary>,
    is_product_needed: bool,
    target: Target,
) -> Result<LoweredStep, ErrorKind> {
    let bug = |error: tensor_wasm_jit::build::BuildError| ErrorKind::Bug { why: format!("a kernel: {error}") };
    match step {
        Step::Map(kernel) => map::lower(kernel, target).map_err(bug),
        Step::Special(kernel) => {
            let mut is_all = false;
            let mut lowered = match by_library {
                Some(ByLibrary { product, following }) => {
                    is_all = following.is_some();
                    LoweredStep { kernels: vec![product], scratch_bytes: Vec::new() }
                }
                None => match matrix::lower(kernel, is_product_needed, target) {
                    Ok(lowered) => {
                        is_all = true;
                        lowered.map_err(bug)?
                    }
                    Err(_) => special::lower(kernel).map_err(bug)?,
                },
            };
            if let Some(after) = kernel.epilogue.as_ref().filter(|_| !is_all) {
                let epilogue = map::lower(after, target).map_err(bug)?;
                let shift = lowered.scratch_bytes.len();
                lowered.scratch_bytes.extend(epilogue.scratch_bytes);
                lowered.kernels.extend(epilogue.kernels.into_iter().map(|kernel| kernel.with_scratch_from(shift)));
            }
            Ok(lowered)
        }
    }
}

fn check_sizes(plan: &Plan, step: &Step) -> Result<(), ErrorKind> {
    let too_large = |what: String| {
        let why = format!("{what}: a kernel goes over fewer than 2^31 elements, of buffers of less than 4 GiB");
        Err(ErrorKind::Device { why })
    };
    let space = match step {
        Step::Map(kernel) => kernel.space,
        Step::Special(kernel) => kernel.shape,
    };
    if space.numel() > ELEMENTS_MAX {
        return too_large(format!("shape {space}"));
    }
    for view in step.reads() {
        let last = view.layout.reach().map_or(0, |(_, last)| last.unsigned_abs() + 1);
        if last > ELEMENTS_MAX || last.saturating_mul(view.dtype.size()) > BYTES_MAX {
            return too_large(format!("a tensor of shape {}", view.layout.shape));
        }
    }
    match step.writes().find(|slot| slot_bytes(plan, *slot) > BYTES_MAX) {
        Some(slot) => too_large(format!("a tensor of shape {}", plan.slots[slot].shape)),
        None => Ok(()),
    }
}

/// Whether integers are divided: elements decide if that can be computed.
fn divides(step: &Step) -> bool {
    let divides = |kernel: &MapKernel| {
        kernel.values.iter().any(|value| {
            matches!(value.kind, ValueKind::Binary(BinaryOp::Div | BinaryOp::Rem, ..)) && !value.dtype.is_float()
        })
    };
    match step {
        Step::Map(kernel) => divides(kernel),
        Step::Special(kernel) => kernel.epilogue.as_ref().is_some_and(divides),
    }
}

/// Whether elements decide if a step can be computed, and its kernels say so if not.
fn can_fail(step: &Step) -> bool {
    let is_indexed = |kernel: &SpecialKernel| matches!(kernel.op, Op::Gather { .. } | Op::ScatterAdd { .. });
    divides(step) || matches!(step, Step::Special(kernel) if is_indexed(kernel))
}

/// The leaf whose memory a slot takes over.
fn taken_leaf(plan: &Plan, slot: usize) -> Option<usize> {
    let taken = |kernel: &MapKernel| {
        let at = kernel.stores.iter().position(|(_, stored)| *stored == slot)?;
        let load = kernel.in_place.get(at).copied().flatten()?;
        match kernel.loads[load].source {
            Source::Leaf(leaf) => Some(leaf),
            Source::Slot(_) => None,
        }
    };
    // Of what follows a product, leaves are never taken.
    plan.steps.iter().find_map(|step| if let Step::Map(kernel) = step { taken(kernel) } else { None })
}

fn slot_bytes(plan: &Plan, slot: usize) -> usize {
    plan.slots[slot].shape.numel().saturating_mul(plan.slots[slot].dtype.size())
}

/// A kernel on the device, and how much shared memory its launches ask for.
fn load_program(device: &CudaDevice, program: &Program) -> Result<(Kernel, u32), ErrorKind> {
    let refused = |why: String| ErrorKind::Bug { why: format!("a kernel was refused: {why}") };
    let (image, entry, shared_bytes) = match program {
        Program::Built(built) => {
            let image = built.compile_trusted().map_err(|refusal| refused(refusal.to_string()))?;
            (image.ptx.into_bytes(), image.entry, image.dynamic_shared_bytes)
        }
        Program::Product(product) => (product.to_image(), Product::ENTRY.to_owned(), 0),
    };
    let kernel = device.when_done(|stream| {
        block_on(async {
            let module = stream.load(&image).await?;
            stream.kernel(&module, &entry).await
        })
    })?;
    Ok((kernel, shared_bytes))
}

fn load(device: &CudaDevice, lowered: &LoweredKernel, places: &Places, step: usize) -> Result<CudaLaunch, ErrorKind> {
    let (kernel, shared_bytes) = load_program(device, &lowered.program)?;
    let grid = Grid { blocks: [lowered.groups, 1, 1], threads: [lowered.items, 1, 1], shared_bytes };
    let part = |source: &Source, from: u64| match source {
        Source::Leaf(leaf) => LaunchArgument::Leaf(*leaf, from),
        Source::Slot(slot) => match places.slots[*slot] {
            SlotPlace::Block(offset) => LaunchArgument::Block(offset + from),
            SlotPlace::Output(output) => LaunchArgument::Output(output, from),
        },
    };
    let argument = |argument: &Argument| match argument {
        Argument::Buffer(source) => part(source, 0),
        Argument::Part(source, from) => part(source, *from as u64),
        Argument::Workspace => LaunchArgument::Workspace,
        Argument::Scratch(n) => LaunchArgument::Block(places.scratch[step][*n]),
        Argument::Parameters(first) => LaunchArgument::Parameters(*first),
        Argument::Flags => LaunchArgument::Flags,
    };
    let arguments = lowered.arguments.iter().map(argument).collect();
    Ok(CudaLaunch { kernel, grid, arguments })
}

/// Where everything lies.
struct Places {
    slots: Vec<SlotPlace>,
    /// For each step.
    scratch: Vec<Vec<u64>>,
    bytes: u64,
    outputs: Vec<PlanOutput>,
}

impl Places {
    fn of(plan: &Plan, halved: &HalvedPlan, steps: &[LoweredStep]) -> Places {
        let mut places = Places {
            slots: vec![SlotPlace::Block(0); plan.slots.len()],
            scratch: Vec::new(),
            bytes: 0,
            outputs: Vec::new(),
        };
        let slot_bytes = |slot: usize| slot_bytes(plan, slot);
        let all_bytes = (0..plan.slots.len()).map(slot_bytes).fold(0, usize::saturating_add);
        let scratch_bytes: u64 = steps.iter().flat_map(|step| &step.scratch_bytes).sum();
        let is_shared = (all_bytes as u64).saturating_add(scratch_bytes) > UNSHARED_BYTES_MAX;
        for (n, slot) in plan.slots.iter().enumerate() {
            if slot.last_step.is_none() {
                places.slots[n] = SlotPlace::Output(places.outputs.len());
                places.outputs.push(PlanOutput { slot: n, bytes: slot_bytes(n), over: taken_leaf(plan, n) });
            }
        }
        let mut taken: Vec<(u64, u64, usize)> = Vec::new();
        for (n, (step, lowered)) in halved.steps.iter().zip(steps).enumerate() {
            for slot in step.iter().flat_map(Step::writes) {
                if let Some(last) = halved.last_steps[slot] {
                    let offset = places.take(&mut taken, slot_bytes(slot) as u64, last);
                    places.slots[slot] = SlotPlace::Block(offset);
                }
            }
            let scratch = lowered.scratch_bytes.iter().map(|bytes| places.take(&mut taken, *bytes, n)).collect();
            places.scratch.push(scratch);
            taken.retain(|(.., last)| !is_shared || *last > n);
        }
        places
    }

    /// The first gap that is large enough, until after a step.
    fn take(&mut self, taken: &mut Vec<(u64, u64, usize)>, bytes: u64, last: usize) -> u64 {
        let bytes = bytes.max(1).next_multiple_of(ALIGN);
        let mut offset = 0;
        for (start, len, _) in taken.iter() {
            if *start >= offset + bytes {
                break;
            }
            offset = offset.max(start + len);
        }
        let at = taken.partition_point(|(start, ..)| *start < offset);
        taken.insert(at, (offset, bytes, last));
        self.bytes = self.bytes.max(offset + bytes);
        offset
    }
}

/// The views of a plan's outputs that are slots, or leaves as they are.
pub(super) fn output_of(view: &BufferView, plan: &CudaPlan) -> Option<usize> {
    let Source::Slot(slot) = view.source else { return None };
    plan.outputs.iter().position(|own| own.slot == slot)
}
