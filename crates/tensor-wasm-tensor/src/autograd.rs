//! Gradients: one rule for each primitive operation, which makes nodes like any other operation. So going backwards is
//! fused as going forwards is, and gradients have gradients.

use std::cell::Cell;
use std::panic::Location;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::dtype::DType;
use crate::error::{ErrorKind, Result, TensorError, asked_as};
use crate::graph::Node;
use crate::graph::numbers::Numbers;
use crate::graph::op::{
    ATTENTION_ROWS, AttentionInput, BinaryOp, FoldedAxis, Movement, Op, ReduceOp, UnaryOp, packed_values_start,
};
use crate::shape::{AxisSet, RANK_MAX, Shape};
use crate::tensor::{Caller, Tensor};
use crate::train;

thread_local! {
    static IS_RECORDING: Cell<bool> = const { Cell::new(true) };
}

pub(crate) fn is_recording() -> bool {
    IS_RECORDING.get()
}

/// Runs something without keeping what gradients would need.
pub fn no_grad<R>(run: impl FnOnce() -> R) -> R {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            IS_RECORDING.set(self.0);
        }
    }
    let _before = Before(IS_RECORDING.replace(false));
    run()
}

impl Tensor {
    /// The same elements, as something that gradients are asked for.
    #[track_caller]
    pub fn with_grad(&self) -> Tensor {
        let at = Location::caller();
        if let Err(error) = self.check() {
            return Tensor::holding(error);
        }
        if !self.dtype().is_float() {
            return self.wrong_dtype("with_grad", "floats", at);
        }
        Tensor { node: Node::asked(&self.node, at) }
    }

    /// The same elements, through which no gradients flow.
    #[track_caller]
    pub fn detach(&self) -> Tensor {
        if !self.requires_grad() {
            return self.clone();
        }
        let op = Op::Move(Movement::Reshape);
        let at = Location::caller();
        Tensor { node: Node::new(op, smallvec![self.node.clone()], self.shape(), self.dtype(), false, at) }
    }
}

/// The gradients of a single number with respect to tensors. Nothing is computed yet.
#[track_caller]
pub fn grad(of: &Tensor, with_respect_to: &[&Tensor]) -> Result<Vec<Tensor>> {
    let at = Location::caller();
    NodeGradients::of(reachable(&of.node)).of_number(of, "grad", at)?.found(with_respect_to, "grad", at)
}

/// Gradients of nodes, as far as they are known.
pub(crate) struct NodeGradients {
    /// Those that gradients flow through, and those that they stop at, the last made first.
    nodes: Vec<Arc<Node>>,
    known: Vec<Option<Tensor>>,
}

impl NodeGradients {
    pub(crate) fn of(nodes: Vec<Arc<Node>>) -> NodeGradients {
        NodeGradients { known: vec![None; nodes.len()], nodes }
    }

    pub(crate) fn nodes(&self) -> &[Arc<Node>] {
        &self.nodes
    }

    fn position(&self, node: &Node) -> Option<usize> {
        self.nodes.binary_search_by(|other| node.id.cmp(&other.id)).ok()
    }

    fn get(&self, node: &Node) -> Option<&Tensor> {
        self.position(node).and_then(|at| self.known[at].as_ref())
    }

    /// The gradients of a single number, with respect to some that it may be made of.
    pub(crate) fn of_number(self, of: &Tensor, operation: &'static str, at: Caller) -> Result<NodeGradients> {
        of.check()?;
        let error = |what| Err(TensorError::new(operation, what, at));
        if of.numel() != 1 {
            return error(ErrorKind::NotScalar { shape: of.shape().to_vec() });
        }
        if !of.requires_grad() {
            return error(ErrorKind::NoGradient);
        }
        let one = Tensor::fill(1.into(), of.shape(), of.dtype(), at);
        self.flow_back(of, one, &[], operation, at)
    }

    /// Those of some tensors; zero where nothing flowed.
    pub(crate) fn found(
        &self,
        with_respect_to: &[&Tensor],
        operation: &'static str,
        at: Caller,
    ) -> Result<Vec<Tensor>> {
        let found = |(input, tensor): (usize, &&Tensor)| match self.get(&tensor.node) {
            Some(gradient) => Ok(gradient.clone()),
            None if tensor.requires_grad() => Ok(Tensor::fill(0.into(), tensor.shape(), tensor.dtype(), at)),
            None => Err(TensorError::new(operation, ErrorKind::NotAsked { input }, at)),
        };
        with_respect_to.iter().enumerate().map(found).collect()
    }

    /// Gradients of all nodes that a tensor is made of, from its own. Nodes to stop at get what flows to them, and
    /// nothing flows through them.
    fn flow_back(
        mut self,
        of: &Tensor,
        gradient: Tensor,
        stops: &[Tensor],
        operation: &'static str,
        at: Caller,
    ) -> Result<NodeGradients> {
        let error = |what| Err(TensorError::new(operation, what, at));
        if let Some(first) = self.position(&of.node) {
            self.known[first] = Some(gradient);
        }
        for n in 0..self.nodes.len() {
            let node = self.nodes[n].clone();
            if stops.iter().any(|stop| stop.node.id == node.id) {
                continue;
            }
            let Some(gradient) = self.known[n].take() else { continue };
            // Whatever uses it was made later and came before: it is whole.
            let gradient = train::fire(&node, gradient);
            gradient.check()?;
            if (gradient.shape(), gradient.dtype()) != (node.shape, node.dtype) {
                let expected = format!("a gradient of shape {} of {}", node.shape, node.dtype);
                return error(ErrorKind::WrongShape { found: gradient.shape().to_vec(), expected });
            }
            self.known[n] = Some(gradient.clone());
            let (op, inputs) = match &node.state.lock().recipe {
                // What is asked for with respect to itself ends there, as does what was made from something without
                // gradients.
                Some(recipe) if !recipe.inputs.iter().any(|input| input.requires_grad) => continue,
                Some(recipe) => {
                    let inputs = recipe.inputs.iter().map(|input| Tensor { node: input.clone() });
                    (recipe.op.clone(), inputs.collect::<SmallVec<[Tensor; 2]>>())
                }
                None => return error(ErrorKind::GraphFreed),
            };
            let output = Tensor { node };
            // What goes wrong on the way back is said of the operation that is gone back through, and of its line.
            let name = output.node.asked.unwrap_or_else(|| op.name());
            let parts = asked_as(name, output.node.at, || pull_back(&op, &inputs, &output, &gradient, at));
            for (input, part) in inputs.iter().zip(parts) {
                let Some(part) = part.filter(|_| input.requires_grad()) else { continue };
                let Some(position) = self.position(&input.node) else { continue };
                let sum = match &self.known[position] {
                    Some(known) => known + part,
                    None => part,
                };
                self.known[position] = Some(sum);
            }
        }
        Ok(self)
    }
}

/// Everything that gradients flow through, the last made first.
pub(crate) fn reachable(from: &Arc<Node>) -> Vec<Arc<Node>> {
    reachable_before(from, &[])
}

/// The same without what only some nodes are made of: those are the last.
fn reachable_before(from: &Arc<Node>, stops: &[Tensor]) -> Vec<Arc<Node>> {
    let (mut found, mut seen) = (Vec::new(), Numbers::default());
    if from.requires_grad {
        seen.of(from.id, 0);
        found.push(from.clone());
    }
    let mut at = 0;
    let mut new: Vec<Arc<Node>> = Vec::new();
    while let Some(node) = found.get(at) {
        if stops.iter().all(|stop| stop.node.id != node.id)
            && let Some(recipe) = &node.state.lock().recipe
        {
            for input in recipe.inputs.iter().filter(|input| input.requires_grad) {
                let next = found.len() + new.len();
                let next = u32::try_from(next).unwrap_or(u32::MAX);
                if seen.of(input.id, next) == next {
                    new.push(input.clone());
                }
            }
        }
        found.append(&mut new);
        at += 1;
    }
    found.sort_unstable_by_key(|node| std::cmp::Reverse(node.id));
    found
}

/// Sums up what was repeated.
fn unexpand(gradient: &Tensor, shape: Shape, at: Caller) -> Tensor {
    let from = gradient.shape();
    let new = from.rank() - shape.rank();
    let mut axes = AxisSet::default();
    for axis in 0..from.rank() {
        if axis < new || (shape[axis - new] == 1 && from[axis] != 1) {
            axes.insert(axis);
        }
    }
    gradient.reduce(ReduceOp::Sum, axes, at).reshape_to(shape, at)
}

/// What the gradient of a result says about each input; none where nothing flows.
fn pull_back(op: &Op, inputs: &[Tensor], output: &Tensor, gradient: &Tensor, at: Caller) -> Vec<Option<Tensor>> {
    let g = gradient;
    let one = |tensor: Tensor| vec![Some(tensor)];
    match op {
        Op::Data
        | Op::Fill(_)
        | Op::Iota
        | Op::Random { .. }
        | Op::ArgReduce { .. }
        | Op::ArgSort { .. }
        | Op::AttentionRows { .. }
        | Op::AttentionGradient { .. }
        | Op::Failed(_) => {
            vec![None; inputs.len()]
        }
        Op::Unary(op) => {
            let x = &inputs[0];
            match op {
                UnaryOp::Neg => one(-g),
                UnaryOp::Abs => one(g * x.sign()),
                UnaryOp::Sign | UnaryOp::Floor | UnaryOp::Round | UnaryOp::Not => vec![None],
                UnaryOp::Recip => one(-(g * output * output)),
                UnaryOp::Sqrt => one(g * 0.5 / output),
                UnaryOp::Rsqrt => one(g * output * output * output * -0.5),
                UnaryOp::Exp => one(g * output),
                UnaryOp::Expm1 => one(g * (output + 1.0)),
                UnaryOp::Ln => one(g / x),
                UnaryOp::Ln1p => one(g / (x + 1.0)),
                UnaryOp::Sin => one(g * x.cos()),
                UnaryOp::Cos => one(-(g * x.sin())),
                UnaryOp::Tanh => one(g * (1.0 - output * output)),
                UnaryOp::Erf => one(g * (-(x * x)).exp() * std::f64::consts::FRAC_2_SQRT_PI),
            }
        }
        Op::Binary(op) => {
            let (a, b) = (&inputs[0], &inputs[1]);
            match op {
                BinaryOp::Add => vec![Some(g.clone()), Some(g.clone())],
                BinaryOp::Sub => vec![Some(g.clone()), Some(-g)],
                BinaryOp::Mul => vec![Some(g * b), Some(g * a)],
                BinaryOp::Div => vec![Some(g / b), Some(-(g * output / b))],
                BinaryOp::Rem => vec![Some(g.clone()), Some(-(g * (a / b).floor()))],
                BinaryOp::Pow => {
                    // At zero, the logarithm is infinite and the power does not depend on the exponent.
                    let log = a.eq(0).where_(a.scalar_like(0, at), a.ln());
                    let slope = b.eq(0).where_(b.scalar_like(0, at), b * a.pow(b - 1.0));
                    vec![Some(g * slope), Some(g * output * log)]
                }
                BinaryOp::Max | BinaryOp::Min => {
                    // A bound has none, and what is at its bound does not move: a rectifier is flat at zero. The result
                    // is beyond the bound where the operand is, so that the operand need not be kept.
                    if !(a.requires_grad() && b.requires_grad()) {
                        let beyond = |bound: &Tensor| {
                            let mask = if *op == BinaryOp::Max { bound.lt(output) } else { output.lt(bound) };
                            Some(Tensor::choose(&mask, g, &g.scalar_like(0, at), at))
                        };
                        return vec![beyond(b), beyond(a)];
                    }
                    let first = if *op == BinaryOp::Max { b.lt(a) } else { a.lt(b) };
                    // Where both are the same, each has half.
                    let half = a.eq(b).cast_to(a.dtype(), at) * 0.5;
                    let first = first.cast_to(a.dtype(), at) + half;
                    vec![Some(g * &first), Some(g * (1.0 - first))]
                }
                BinaryOp::Eq | BinaryOp::Lt | BinaryOp::Le | BinaryOp::And | BinaryOp::Or => vec![None, None],
            }
        }
        Op::Where => {
            let zero = g.scalar_like(0, at);
            let (a, b) = (Tensor::choose(&inputs[0], g, &zero, at), Tensor::choose(&inputs[0], &zero, g, at));
            vec![None, Some(a), Some(b)]
        }
        Op::Cast => {
            let x = &inputs[0];
            if x.dtype().is_float() { one(g.cast_to(x.dtype(), at)) } else { vec![None] }
        }
        Op::Move(movement) => one(pull_back_view(movement, &inputs[0], g, at)),
        Op::Reduce(op, axes) => {
            let x = &inputs[0];
            let spread = |tensor: &Tensor| tensor.expand_to(x.shape(), at);
            match op {
                ReduceOp::Sum => one(spread(g)),
                ReduceOp::Prod => one(spread(g) * product_of_others(x, *axes, at)),
                ReduceOp::Max | ReduceOp::Min => {
                    // Where several are extreme, each has its part.
                    let is_extreme = x.eq(spread(output)).cast_to(x.dtype(), at);
                    let count = is_extreme.reduce(ReduceOp::Sum, *axes, at);
                    one(spread(&(g / count)) * is_extreme)
                }
            }
        }
        Op::Matmul => {
            let (a, b) = (&inputs[0], &inputs[1]);
            vec![Some(g.matrix_product(&b.t(), at)), Some(a.t().matrix_product(g, at))]
        }
        Op::Attention { is_causal } => pull_back_attention(*is_causal, inputs, output, g, at),
        // As the composed one says.
        Op::Preferred => (0..inputs.len()).map(|n| (n + 1 == inputs.len()).then(|| g.clone())).collect(),
        Op::Contract { .. } => {
            // Whatever one operand does not know, its gradient is summed over: a contraction again.
            let part = |own: &Tensor, other: &Tensor| {
                let (shape, size) = (own.shape(), other.shape());
                let mut summed = AxisSet::default();
                (0..shape.rank()).filter(|axis| shape[*axis] == 1 && size[*axis] != 1).for_each(|axis| {
                    summed.insert(axis);
                });
                Some(g.contract(other, summed, at).expand_to(shape, at))
            };
            vec![part(&inputs[0], &inputs[1]), part(&inputs[1], &inputs[0])]
        }
        Op::Cumsum { axis, is_reverse } => one(g.running_sum(*axis, !is_reverse, at)),
        Op::Gather { axis } => {
            let size = inputs[0].shape()[*axis];
            vec![Some(g.scatter_add(signed(*axis), &inputs[1], size)), None]
        }
        Op::ScatterAdd { axis, .. } => vec![Some(g.gather(signed(*axis), &inputs[1])), None],
        Op::Place(corners) => {
            let part = |(input, corner): (&Tensor, &[usize; RANK_MAX])| {
                let shape = input.shape();
                Some(
                    (0..shape.rank())
                        .fold(g.clone(), |part, axis| part.narrow(signed(axis), corner[axis], shape[axis])),
                )
            };
            inputs.iter().zip(corners.iter()).map(part).collect()
        }
        Op::Fold { last, before } => {
            let shape = inputs[0].shape();
            let windows = |g: &Tensor, folded: &FoldedAxis, shape: Shape| {
                let FoldedAxis { axis, step, dilation, .. } = *folded;
                g.moved(Movement::Windows { axis, step, dilation }, shape, at)
            };
            let Some(before) = before else { return one(windows(g, last, shape)) };
            let outer = Shape::new(&shape[..shape.rank() - 1]).unwrap_or(Shape::SCALAR);
            let outer = outer.with(last.axis, g.shape()[last.axis]);
            one(windows(&windows(g, before, outer), last, shape))
        }
    }
}

fn signed(axis: usize) -> isize {
    isize::try_from(axis).unwrap_or(isize::MAX)
}

/// Gradients of attention's queries, keys and values: each as the composed one says, and as kernels do that recompute
/// scores tile by tile. Which of the two is decided when it is computed.
fn pull_back_attention(
    is_causal: bool,
    inputs: &[Tensor],
    output: &Tensor,
    g: &Tensor,
    at: Caller,
) -> Vec<Option<Tensor>> {
    let mut parts = vec![None; inputs.len()];
    let [queries, keys, values, composed] = inputs else { return parts };
    let operands = [queries, keys, values];
    let stops = &inputs[..operands.len()];
    let before = NodeGradients::of(reachable_before(&composed.node, stops));
    let composed = match before.flow_back(composed, g.clone(), stops, "attention", at) {
        Ok(composed) => composed,
        Err(error) => return vec![Some(Tensor::holding(error)); inputs.len()],
    };
    // Nothing flows through kernels.
    let by_kernels = no_grad(|| attention_kernels(is_causal, operands, output, g, at));
    let is_same = |a: usize, b: usize| operands[a].node.id == operands[b].node.id;
    for (n, operand) in operands.into_iter().enumerate() {
        // What is all of them, or two, has the sum, once.
        let Some(composed) = composed.get(&operand.node).filter(|_| !(0..n).any(|other| is_same(n, other))) else {
            continue;
        };
        let own = (n..operands.len()).filter(|other| is_same(n, *other)).filter_map(|other| by_kernels[other].clone());
        let by_kernels = no_grad(|| own.reduce(|a, b| a + b)).filter(|made| made.check().is_ok());
        // What kernels make may be too large where what is composed is not.
        parts[n] = Some(by_kernels.map_or_else(
            || composed.clone(),
            |by_kernels| {
                let both = [queries, keys, values, &by_kernels, composed];
                Tensor::make(Op::Preferred, &both, operand.shape(), operand.dtype(), at)
            },
        ));
    }
    parts
}

/// Bytes of keys' and values' gradients together: they are one buffer, and those of a kernel have 32 bits of addresses.
/// Two that are larger may fit one by one, as they are composed.
const PACKED_BYTES_MAX: usize = u32::MAX as usize;

/// Those of operands that gradients flow to, by kernels.
fn attention_kernels(
    is_causal: bool,
    operands: [&Tensor; 3],
    output: &Tensor,
    g: &Tensor,
    at: Caller,
) -> [Option<Tensor>; 3] {
    let [queries, keys, values] = operands;
    let rank = output.rank();
    let dtype = output.dtype();
    // Each head has its own, and those that share an operand are summed up.
    let of_heads = |sizes: [usize; 2]| Shape::new(&[&output.shape()[..rank - 2], &sizes].concat());
    let whole = |tensor: &Tensor| of_heads([tensor.shape()[tensor.rank() - 2], tensor.shape()[tensor.rank() - 1]]);
    let row_shape = of_heads([ATTENTION_ROWS, output.shape()[rank - 2]]);
    let (Some(query_shape), Some(key_shape), Some(value_shape), Some(row_shape)) =
        (whole(queries), whole(keys), whole(values), row_shape)
    else {
        return [None, None, None];
    };
    let rows = Tensor::make(Op::AttentionRows { is_causal }, &[queries, keys, output, g], row_shape, DType::F32, at);
    let gradient = |of: AttentionInput, shape: Shape| {
        let op = Op::AttentionGradient { is_causal, of };
        Tensor::make(op, &[queries, keys, values, g, &rows], shape, dtype, at)
    };
    let of_queries =
        queries.requires_grad().then(|| unexpand(&gradient(AttentionInput::Queries, query_shape), queries.shape(), at));
    let start = packed_values_start(key_shape.numel());
    let packed = (keys.requires_grad() || values.requires_grad())
        .then(|| Shape::new(&[start + value_shape.numel()]))
        .flatten()
        .filter(|shape| shape.numel().saturating_mul(dtype.size()) <= PACKED_BYTES_MAX)
        .map(|shape| gradient(AttentionInput::KeysAndValues, shape));
    let part = |tensor: &Tensor, start: usize, shape: Shape| {
        let packed = packed.as_ref().filter(|_| tensor.requires_grad())?;
        let own = packed.narrow(0, start, shape.numel()).reshape_to(shape, at);
        Some(unexpand(&own, tensor.shape(), at))
    };
    [of_queries, part(keys, 0, key_shape), part(values, start, value_shape)]
}

fn pull_back_view(movement: &Movement, x: &Tensor, g: &Tensor, at: Caller) -> Tensor {
    let shape = x.shape();
    match movement {
        Movement::Reshape => g.reshape_to(shape, at),
        Movement::Permute(axes) => {
            let mut back = [0_u8; RANK_MAX];
            for (to, from) in axes.iter().take(shape.rank()).enumerate() {
                back[usize::from(*from)] = u8::try_from(to).unwrap_or_default();
            }
            g.moved(Movement::Permute(back), shape, at)
        }
        Movement::Expand => unexpand(g, shape, at),
        Movement::Slice { axis, start, step } => {
            // Between the elements of a step there are zeros.
            let (count, stride) = (g.shape()[*axis], step.unsigned_abs());
            if count == 0 {
                return Tensor::fill(0.into(), shape, g.dtype(), at);
            }
            let forward = if *step < 0 { g.flip(signed(*axis)) } else { g.clone() };
            let spread = if stride > 1 && count > 1 {
                let mut after = vec![0; shape.rank() + 1];
                let with_gaps = forward.unsqueeze(signed(*axis) + 1);
                after[axis + 1] = stride - 1;
                let padded = with_gaps.pad(&vec![0; shape.rank() + 1], &after);
                let flat = padded.reshape_to(g.shape().with(*axis, count * stride), at);
                flat.narrow(signed(*axis), 0, (count - 1) * stride + 1)
            } else {
                forward
            };
            let first = if *step < 0 { start - (count - 1) * stride } else { *start };
            let mut corner = [0; RANK_MAX];
            corner[*axis] = first;
            Tensor::place(&[&spread], &[corner], shape, at)
        }
        Movement::Windows { axis, step, dilation } => {
            let (axis, step, dilation) = (*axis, *step, *dilation);
            g.folded(FoldedAxis { axis, step, dilation, size: shape[axis] }, at)
        }
    }
}

/// For each element, the product of the others: without dividing, as one of them may be zero.
fn product_of_others(x: &Tensor, axes: AxisSet, at: Caller) -> Tensor {
    // The axes in one line at the end; then a matrix of them with ones on its diagonal.
    let rank = x.rank();
    let kept: Vec<isize> = (0..rank).filter(|axis| !axes.contains(*axis)).map(signed).collect();
    let reduced: Vec<isize> = (0..rank).filter(|axis| axes.contains(*axis)).map(signed).collect();
    let order: Vec<isize> = kept.iter().chain(&reduced).copied().collect();
    let moved = x.permute(&order);
    let count: usize = reduced.iter().map(|axis| x.shape()[axis.unsigned_abs()]).product();
    let rows = x.numel().checked_div(count).unwrap_or(0);
    let (Some(flat), Some(square)) = (Shape::new(&[rows, 1, count]), Shape::new(&[rows, count, count])) else {
        return x.clone();
    };
    let lines = moved.reshape_to(flat, at).expand_to(square, at);
    let diagonal = Tensor::eye(count, DType::Bool).expand_to(square, at);
    let others = Tensor::choose(&diagonal, &x.scalar_like(1, at), &lines, at);
    let mut last = AxisSet::default();
    last.insert(2);
    let products = others.reduce(ReduceOp::Prod, last, at).reshape_to(moved.shape(), at);
    let mut back = vec![0; rank];
    order.iter().enumerate().for_each(|(to, from)| back[from.unsigned_abs()] = signed(to));
    products.permute(&back)
}
