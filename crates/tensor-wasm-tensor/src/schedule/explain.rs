//! Plans for people: which kernels, what each reads, writes and computes, and what was not fused, and why not.

use std::fmt;

use super::group::{Grouping, WhyNot};
use super::plan::{BufferView, Level, MapKernel, Plan, Slot, SpecialKernel, Step, ValueKind};
use super::snapshot::{PlanGraph, Snapshot};
use super::{CompiledPlan, Mode, planned};
use crate::account::PlanNeed;
use crate::cpu;
use crate::dtype::DType;
use crate::error::TensorError;
use crate::graph::Node;
use crate::graph::op::{AttentionInput, Op};
use crate::shape::Shape;
use std::sync::Arc;

/// What computing some tensors amounts to. Its `Display` is a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    pub kernels: Vec<ExplainedKernel>,
    /// Operations that began a kernel of their own though their input comes from another: which, where, and why.
    pub not_fused: Vec<(&'static str, String, &'static str)>,
    /// Whether the plan was there already.
    pub is_planned: bool,
    /// The most bytes that the plan has between its kernels at once, besides what it is given.
    pub peak_bytes: usize,
    /// What it runs on.
    pub device: String,
    /// Why there, if it was chosen: what it should take on each device, or did.
    pub choice: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ExplainedKernel {
    /// `map` for a fused expression, or the operation that is a kernel by itself.
    pub kind: &'static str,
    pub shape: Vec<usize>,
    pub dtype: DType,
    /// Operations in the order they are computed; those after a product are done to its elements while they are there.
    pub operations: Vec<&'static str>,
    pub read_bytes: usize,
    pub written_bytes: usize,
    pub flops: u64,
    /// Results that take the place of an operand.
    pub in_place: usize,
    /// By what it is computed, where there is a choice.
    pub by: Option<String>,
    /// Launches on a GPU, each as groups and items of a kernel, or as whose it is; there are none where the product
    /// that comes before or after does it.
    pub launches: Option<Vec<String>>,
}

/// Where something runs, for people.
struct Placed {
    device: String,
    choice: Option<String>,
    #[cfg(feature = "cuda")]
    cuda: Option<crate::cuda::CudaDevice>,
}

impl Placed {
    fn of(compiled: &CompiledPlan, snapshot: &Snapshot) -> Placed {
        let on_cpu = || format!("cpu, {} threads, {}", cpu::threads(), cpu::instructions());
        let is_auto = crate::device() == crate::Device::Auto;
        #[cfg(feature = "cuda")]
        {
            let (cuda, choice) = if is_auto {
                let (cuda, why) = crate::auto::explain(compiled, &snapshot.leaves);
                (cuda, Some(why))
            } else {
                (crate::device::gpu_for(&snapshot.leaves), None)
            };
            let device = cuda.as_ref().map_or_else(on_cpu, crate::cuda::CudaDevice::description);
            Placed { device, choice, cuda }
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (compiled, snapshot);
            let why = || "auto is the cpu: this build has no feature `cuda`".to_owned();
            Placed { device: on_cpu(), choice: is_auto.then(why) }
        }
    }
}

pub(crate) fn explain(nodes: &[Arc<Node>], mode: Mode) -> Result<Explanation, TensorError> {
    let graph = PlanGraph::take(nodes, mode, &[])?;
    let snapshot = &graph.snapshot;
    let grouping = Grouping::of(&graph, mode);
    let kept = planned(snapshot);
    let is_planned = kept.is_some() || !snapshot.has_outputs();
    let compiled = kept.unwrap_or_else(|| Arc::new(CompiledPlan::new(grouping.plan())));
    let plan = &compiled.plan;
    let placed = Placed::of(&compiled, snapshot);
    let apart = |(node, why): (usize, WhyNot)| {
        let found = &graph.nodes[node];
        let at = found.node.at;
        (found.op.name(), format!("{}:{}", at.file(), at.line()), why.reason())
    };
    // A product's epilogue is fused after all.
    let is_after = |node: usize| {
        let epilogue = |step: &Step| matches!(step, Step::Special(kernel) if kernel.epilogue.is_some());
        plan.steps.iter().any(|step| epilogue(step) && step_has(step, &graph, node))
    };
    let not_fused =
        grouping.apart().filter(|(node, why)| *why != WhyNot::Alone || !is_after(*node)).map(apart).collect();
    let kernels = explained_kernels(plan);
    #[cfg(feature = "cuda")]
    let mut kernels = kernels;
    #[cfg(feature = "cuda")]
    if let Some(cuda) = &placed.cuda {
        let words = compiled.cuda.words(plan, &snapshot.parameters);
        for (kernel, lowered) in kernels.iter_mut().zip(crate::cuda::plan::explain(cuda, plan, words.as_deref())) {
            (kernel.by, kernel.launches) = (lowered.by, Some(lowered.launches));
        }
    }
    let Placed { device, choice, .. } = placed;
    Ok(Explanation { kernels, not_fused, is_planned, peak_bytes: peak_bytes(plan), device, choice })
}

/// A plan's kernels, as a CPU runs them.
pub(crate) fn explained_kernels(plan: &Plan) -> Vec<ExplainedKernel> {
    (0..plan.steps.len()).map(|step| kernel(step, plan)).collect()
}

/// Whether an operation is computed right after a product, as far as its name and inputs tell.
fn step_has(step: &Step, graph: &PlanGraph, node: usize) -> bool {
    let Step::Special(special) = step else { return false };
    graph.inputs(node).contains(&special.node)
        || graph.inputs(node).iter().any(|input| graph.inputs(*input).contains(&special.node))
}

fn bytes(shape: Shape, dtype: DType) -> usize {
    shape.numel().saturating_mul(dtype.size())
}

/// What is read of a buffer: an element that is repeated is read once.
fn touched(view: &BufferView) -> usize {
    let own = view.layout.shape.iter().zip(view.layout.strides()).filter(|(_, stride)| **stride != 0);
    own.map(|(size, _)| *size).product::<usize>().saturating_mul(view.dtype.size())
}

fn kernel(number: usize, plan: &Plan) -> ExplainedKernel {
    let step = &plan.steps[number];
    let slot_bytes = |slot: usize| bytes(plan.slots[slot].shape, plan.slots[slot].dtype);
    match step {
        Step::Map(map) => ExplainedKernel {
            kind: "map",
            shape: map.space.to_vec(),
            dtype: map.stores.first().map_or(DType::F32, |(value, _)| map.values[*value].dtype),
            operations: operations(map),
            read_bytes: map.loads.iter().map(touched).sum(),
            written_bytes: step.writes().map(slot_bytes).sum(),
            flops: flops(map),
            in_place: map.in_place.iter().flatten().count(),
            by: None,
            launches: None,
        },
        Step::Special(special) => {
            let after = special.epilogue.as_ref();
            // What it made is still in the cache when the epilogue reads it.
            let own = |view: &&BufferView| view.source != super::plan::Source::Slot(special.slot);
            let read_after: usize = after.map_or(0, |map| map.loads.iter().filter(own).map(touched).sum());
            let inner = special.inputs.first().map_or(0, |view| view.layout.shape.last().copied().unwrap_or(0));
            let (count, inner) = (special.shape.numel() as u64, inner as u64);
            let own_flops = match special.op {
                Op::Matmul => 2 * count * inner,
                // Queries times keys, and what that gives times values.
                Op::Attention { .. } => attention_flops(special, special.shape, [1, 1]),
                Op::AttentionRows { .. } => attention_flops(special, special.shape, [1, 0]),
                // Scores, their gradients from values, and what each gradient adds up.
                Op::AttentionGradient { of, .. } => {
                    let heads = special.inputs.last().map_or(special.shape, |view| view.layout.shape);
                    attention_flops(special, heads, if of == AttentionInput::Queries { [2, 1] } else { [2, 2] })
                }
                Op::Contract { .. } => {
                    let both = special.inputs.iter().map(|view| view.layout.shape);
                    let both = both.reduce(|a, b| a.broadcast(&b).unwrap_or(a));
                    2 * both.map_or(0, |shape| shape.numel() as u64)
                }
                // Comparisons, and a move for each.
                Op::ArgSort { axis, .. } => sort_flops(count, special.shape[axis]),
                Op::ArgReduce { .. } => special.inputs.first().map_or(0, |view| view.layout.shape.numel() as u64),
                Op::Cumsum { .. } => count,
                // Windows that overlap are added up: an addition for each element of each.
                Op::Fold { .. } => special.inputs.first().map_or(0, |view| view.layout.shape.numel() as u64),
                // An addition for each, and as much as sorting the indices takes, which a GPU does.
                Op::ScatterAdd { axis, .. } => {
                    let of = |view: &BufferView| (touched(view) / view.dtype.size().max(1)) as u64;
                    let added = special.inputs.first().map_or(0, |view| view.layout.shape.numel() as u64);
                    let sorted = special.inputs.get(1).map_or(0, |view| sort_flops(of(view), view.layout.shape[axis]));
                    added + sorted
                }
                _ => 0,
            };
            ExplainedKernel {
                kind: special.op.name(),
                shape: special.shape.to_vec(),
                dtype: special.dtype,
                operations: after.map(operations).unwrap_or_default(),
                read_bytes: special.inputs.iter().map(touched).sum::<usize>() + read_after,
                written_bytes: step.writes().map(slot_bytes).sum(),
                flops: own_flops + after.map_or(0, flops),
                in_place: after.map_or(0, |map| map.in_place.iter().flatten().count()),
                by: matches!(special.op, Op::Matmul).then(|| cpu::product_by(special.dtype)),
                launches: None,
            }
        }
    }
}

/// Of sorting so many elements, each in a line of so many.
fn sort_flops(count: u64, len: usize) -> u64 {
    2 * count * u64::from(len.max(2).ilog2())
}

/// Of so many products as wide as keys and as values, for each head of a shape.
fn attention_flops(special: &SpecialKernel, heads: Shape, products: [u64; 2]) -> u64 {
    let size = |input: usize, from_last: usize| {
        let shape = special.inputs.get(input).map(|view| view.layout.shape);
        shape.map_or(0, |shape| shape.iter().rev().nth(from_last).copied().unwrap_or(0) as u64)
    };
    let heads = heads.iter().rev().skip(2).product::<usize>() as u64;
    let widths = products[0] * size(0, 0) + products[1] * size(2, 0);
    2 * heads * size(0, 1) * size(1, 1) * widths
}

fn name_of(kind: &ValueKind) -> Option<&'static str> {
    match kind {
        ValueKind::Load(_) | ValueKind::Fill(_) => None,
        ValueKind::Iota(_) => Some("iota"),
        ValueKind::Random(..) => Some("random"),
        ValueKind::Unary(op, _) => Some(op.name()),
        ValueKind::Binary(op, ..) => Some(op.name()),
        ValueKind::Where(..) => Some("where"),
        ValueKind::Cast(_) => Some("cast"),
        ValueKind::Reduce(op, _) => Some(op.name()),
    }
}

fn operations(map: &MapKernel) -> Vec<&'static str> {
    let names: Vec<&str> = map.values.iter().filter_map(|value| name_of(&value.kind)).collect();
    if names.is_empty() { vec!["copy"] } else { names }
}

/// Simple operations that a kernel costs besides what it does to elements: a microsecond of a slow core.
const KERNEL_WORK: u64 = 1000;

/// What is done to an element, in simple operations of a slow core.
fn weight(operation: &str) -> u64 {
    match operation {
        "cast" => 4,
        "div" | "recip" | "sqrt" | "rsqrt" => 8,
        "exp" | "expm1" | "ln" | "ln1p" | "tanh" | "erf" | "sin" | "cos" => 40,
        "rem" | "pow" | "random" => 80,
        _ => 1,
    }
}

/// All of a kernel, for whoever must not be long.
fn simple_work(step: &Step, kernel: &ExplainedKernel) -> u64 {
    let of_map = |map: &MapKernel| {
        let full = map.space.numel() as u64;
        map.values
            .iter()
            .map(|value| full.saturating_mul(name_of(&value.kind).map_or(1, weight)))
            .fold(0, u64::saturating_add)
    };
    let own = match step {
        Step::Map(map) => of_map(map),
        // Elements that are looked for anywhere, of views that may have more of them than there are in memory.
        Step::Special(special) => {
            let read: u64 = special.inputs.iter().map(|view| view.layout.shape.numel() as u64).sum();
            let moved = 4_u64.saturating_mul(read.saturating_add(special.shape.numel() as u64));
            kernel.flops.saturating_add(moved).saturating_add(special.epilogue.as_ref().map_or(0, of_map))
        }
    };
    own.saturating_add(KERNEL_WORK)
}

fn flops(map: &MapKernel) -> u64 {
    let (full, rows) = (map.space.numel() as u64, map.rows().numel() as u64);
    let of = |kind: &ValueKind, level: Level| match kind {
        ValueKind::Load(_) | ValueKind::Fill(_) | ValueKind::Iota(_) | ValueKind::Random(..) | ValueKind::Cast(_) => 0,
        ValueKind::Reduce(..) => full,
        _ if level == Level::Full => full,
        _ => rows,
    };
    map.values.iter().map(|value| of(&value.kind, value.level)).sum()
}

/// What a plan needs, known before it runs.
pub(super) fn need(plan: &Plan) -> PlanNeed {
    let mut need = PlanNeed { kernels: plan.steps.len(), ..PlanNeed::default() };
    for (step, kernel) in plan.steps.iter().zip(explained_kernels(plan)) {
        need.work = need.work.saturating_add(simple_work(step, &kernel));
        need.moved_bytes = need.moved_bytes.saturating_add(kernel.read_bytes).saturating_add(kernel.written_bytes);
        need.flops = need.flops.saturating_add(kernel.flops);
    }
    need.bytes = peak_of(plan, |slot| cpu::memory::block_bytes(bytes(slot.shape, slot.dtype)));
    need
}

/// The most bytes in slots at once.
fn peak_bytes(plan: &Plan) -> usize {
    peak_of(plan, |slot| bytes(slot.shape, slot.dtype))
}

fn peak_of(plan: &Plan, bytes: impl Fn(&Slot) -> usize) -> usize {
    let (mut live, mut now, mut peak) = (vec![false; plan.slots.len()], 0_usize, 0);
    for (n, step) in plan.steps.iter().enumerate() {
        for slot in step.writes().filter(|slot| !std::mem::replace(&mut live[*slot], true)) {
            now = now.saturating_add(bytes(&plan.slots[slot]));
        }
        let in_place: usize = match step {
            Step::Map(map) | Step::Special(SpecialKernel { epilogue: Some(map), .. }) => {
                let taken = map.in_place.iter().zip(&map.stores).filter(|(load, _)| load.is_some());
                taken.map(|(_, (_, slot))| bytes(&plan.slots[*slot])).sum()
            }
            Step::Special(_) => 0,
        };
        peak = peak.max(now.saturating_sub(in_place));
        // A slot's last step reads or writes it.
        for slot in step.slots() {
            if plan.slots[slot].last_step == Some(n) && std::mem::replace(&mut live[slot], false) {
                now -= bytes(&plan.slots[slot]);
            }
        }
    }
    peak
}

/// `12.6 MB`.
fn amount(bytes: usize) -> String {
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let bytes = bytes as f64;
    match bytes {
        b if b < 1e4 => format!("{b:.0} B"),
        b if b < 1e6 => format!("{:.1} kB", b / 1e3),
        b if b < 1e9 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.2} GB", b / 1e9),
    }
}

fn work(flops: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let flops = flops as f64;
    match flops {
        f if f < 1e4 => format!("{f:.0}"),
        f if f < 1e6 => format!("{:.1} k", f / 1e3),
        f if f < 1e9 => format!("{:.1} M", f / 1e6),
        f => format!("{:.2} G", f / 1e9),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let read: usize = self.kernels.iter().map(|kernel| kernel.read_bytes).sum();
        let written: usize = self.kernels.iter().map(|kernel| kernel.written_bytes).sum();
        let flops: u64 = self.kernels.iter().map(|kernel| kernel.flops).sum();
        writeln!(
            f,
            "{} kernels on {}: {} read, {} written, {} operations of numbers, {} at once; the plan is {}",
            self.kernels.len(),
            self.device,
            amount(read),
            amount(written),
            work(flops),
            amount(self.peak_bytes),
            if self.is_planned { "kept from before" } else { "new" },
        )?;
        if let Some(choice) = &self.choice {
            writeln!(f, "{choice}")?;
        }
        let launches: Option<usize> = self.kernels.iter().map(|kernel| kernel.launches.as_ref().map(Vec::len)).sum();
        if let Some(launches) = launches.filter(|_| !self.kernels.is_empty()) {
            let graph = if launches > 1 { ", one graph from the second run on" } else { "" };
            writeln!(f, "{launches} launches{graph}")?;
        }
        for (n, kernel) in self.kernels.iter().enumerate() {
            let ExplainedKernel { kind, shape, dtype, operations, read_bytes, written_bytes, flops, by, .. } = kernel;
            let (in_place, launches) = (&kernel.in_place, &kernel.launches);
            let what = format!("{kind} {shape:?} {dtype}");
            let traffic = format!("{} → {}", amount(*read_bytes), amount(*written_bytes));
            write!(f, "{:>3}  {what:<32} {traffic:<22} {:>8}", n + 1, work(*flops))?;
            if let Some(by) = by {
                write!(f, "  by {by}")?;
            }
            if !operations.is_empty() {
                let after = if by.is_some() { "then " } else { "" };
                write!(f, "  {after}{}", operations.join(" "))?;
            }
            if let Some(launches) = launches {
                let launches = if launches.is_empty() { "none".to_owned() } else { launches.join(", ") };
                write!(f, "  (launches: {launches})")?;
            } else if *in_place > 0 {
                write!(f, "  (in place)")?;
            }
            writeln!(f)?;
        }
        for (operation, at, why) in &self.not_fused {
            writeln!(f, "not fused: {operation} ({at}): {why}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::device::OwnDevice;
    use crate::{DType, Device, Mode, Tensor};

    fn kinds(tensor: &Tensor) -> Vec<&'static str> {
        tensor.explain().unwrap().kernels.iter().map(|kernel| kernel.kind).collect()
    }

    #[test]
    fn a_product_takes_bias_and_activation_along() {
        let normal = |sizes: &[usize], seed| Tensor::normal(sizes, seed, DType::F32);
        let (x, w, b) = (normal(&[70, 33], 1), normal(&[33, 65], 2), normal(&[65], 3));
        for tensor in [&x, &w, &b] {
            tensor.realize().unwrap();
        }
        let layer = || (x.matmul(&w) + &b).gelu();
        let explanation = layer().explain().unwrap();
        assert_eq!(explanation.kernels.len(), 1, "{explanation}");
        let kernel = &explanation.kernels[0];
        assert_eq!((kernel.kind, kernel.operations[0], kernel.in_place), ("matmul", "add", 1), "{explanation}");
        assert!(kernel.flops > 2 * 70 * 33 * 65 && kernel.by.is_some());
        assert!(explanation.not_fused.is_empty(), "{explanation}");
        assert_eq!(explanation.peak_bytes, 70 * 65 * 4, "the product is not kept: {explanation}");
        let eager = layer();
        Tensor::realize_in(&[&eager], Mode::Eager).unwrap();
        assert_eq!(layer().to_vec::<f32>().unwrap(), eager.to_vec::<f32>().unwrap());
        // Where somebody else wants the product, both are kept.
        let product = x.matmul(&w);
        let active = product.relu();
        let explanation = Tensor::explain_all(&[&product, &active]).unwrap();
        assert_eq!((explanation.kernels.len(), explanation.kernels[0].in_place), (1, 0), "{explanation}");
        Tensor::realize_all(&[&product, &active]).unwrap();
        let expect: Vec<f32> = product.to_vec::<f32>().unwrap().iter().map(|x| x.max(0.0)).collect();
        assert_eq!(active.to_vec::<f32>().unwrap(), expect);
        // What is needed first may come later in the program.
        let late = (x.matmul(&w) * (normal(&[70, 65], 4).exp() + 1.0)).to_vec::<f32>().unwrap();
        let eager = x.matmul(&w) * (normal(&[70, 65], 4).exp() + 1.0);
        Tensor::realize_in(&[&eager], Mode::Eager).unwrap();
        assert_eq!(late, eager.to_vec::<f32>().unwrap());
    }

    #[test]
    fn what_goes_along_lines_is_counted() {
        let x = Tensor::normal(&[64, 100], 1, DType::F32);
        let index = Tensor::zeros(&[64, 1], DType::I64);
        Tensor::realize_all(&[&x, &index]).unwrap();
        let flops = |tensor: &Tensor| tensor.explain().unwrap().kernels.iter().map(|kernel| kernel.flops).sum::<u64>();
        let all = 64 * 100;
        assert_eq!(flops(&x.argmax(1)), all, "elements, not results");
        assert_eq!(flops(&x.cumsum(0)), all);
        assert_eq!(flops(&x.argsort(1, false)), 2 * 6 * all);
        // A line of 64 indices for all columns is sorted once.
        assert_eq!(flops(&x.scatter_add(0, &index.expand(&[64, 100]), 7)), all + 2 * 6 * 64);
    }

    /// What moves few bytes and counts no operations on numbers may still be long.
    #[test]
    fn functions_casts_and_overlaps_are_work() {
        let work = |made: &Tensor| {
            let plan = crate::schedule::plan_of(std::slice::from_ref(&made.node), Mode::Fused, &[]).unwrap();
            super::need(&plan).work
        };
        let x = Tensor::normal(&[1000], 1, DType::F32);
        x.realize().unwrap();
        let casts = (0..10).fold(x.clone(), |x, _| x.cast(DType::F64).cast(DType::F32));
        assert!(work(&casts) >= 20 * 1000 && work(&x.pow(&x)) >= 80 * 1000);
        assert!(work(&Tensor::uniform(&[1000], 1, DType::F32).cast(DType::U8)) >= 80 * 1000);
        // Each of 64 windows adds to 64 elements, of a view that is one element in memory.
        let x = Tensor::normal(&[1, 1, 127, 127], 1, DType::F32).with_grad();
        let pooled = x.avg_pool2d_with(64, crate::Window::default());
        let gradients = crate::autograd::grad(&pooled.sum(()), &[&x]).unwrap();
        assert!(work(&gradients[0]) >= 64 * 64 * 64, "{}", work(&gradients[0]));
    }

    #[test]
    fn a_plan_is_explained_with_what_was_not_fused() {
        let _cpu = OwnDevice::set(&Device::Cpu);
        let x = Tensor::normal(&[64, 64], 1, DType::F32);
        x.realize().unwrap();
        assert_eq!(kinds(&(&x * 2.0 + 1.0).softmax(1)), ["map"]);
        assert!(kinds(&x).is_empty(), "it is there");
        let turned = (&x + 1.0).exp();
        let explanation = (turned.t() + &turned).explain().unwrap();
        assert_eq!(explanation.kernels.len(), 2, "{explanation}");
        let (operation, at, why) = &explanation.not_fused[0];
        assert_eq!(*operation, "add", "{explanation}");
        assert!(at.contains("explain.rs:") && why.contains("another order"), "{explanation}");
        let text = explanation.to_string();
        assert!(text.starts_with("2 kernels on cpu") && text.contains("not fused: add"), "{text}");
        assert!(text.contains("the plan is new"), "{text}");
        (turned.t() + &turned).realize().unwrap();
        assert!((turned.t() + &turned).explain().unwrap().is_planned);
        let read: usize = explanation.kernels.iter().map(|kernel| kernel.read_bytes).sum();
        assert_eq!(read, 3 * 64 * 64 * 4, "x once, and the sums twice: {explanation}");
    }
}
