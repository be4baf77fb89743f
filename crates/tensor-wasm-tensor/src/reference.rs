//! What a graph should be: every operation by its definition, one element after the other, in double precision. Slow
//! and plain; everything else is compared with it. With it come generated graphs, and finite differences for gradients.

use std::collections::HashMap;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::autograd;
use crate::dtype::DType;
use crate::graph::op::{BinaryOp, Movement, Op, ReduceOp, UnaryOp};
use crate::graph::{Inputs, Node};
use crate::schedule::Mode;
use crate::shape::Shape;
use crate::tensor::{Convolution, Tensor, Window};

/// Elements by their index.
struct Reference {
    shape: Shape,
    elements: Vec<f64>,
}

impl Reference {
    fn at(&self, index: &[usize]) -> f64 {
        let mut position = 0;
        for (along, size) in index.iter().zip(self.shape.iter()) {
            position = position * size + along;
        }
        self.elements[position]
    }
}

fn indices(shape: &Shape) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for size in shape.iter() {
        all = all
            .into_iter()
            .flat_map(|index: Vec<usize>| {
                (0..*size).map(move |n| {
                    let mut longer = index.clone();
                    longer.push(n);
                    longer
                })
            })
            .collect();
    }
    all
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to the type is what it does")]
fn rounded(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::Bool => f64::from(u8::from(x != 0.0)),
        DType::F16 => half::f16::from_f64(x).to_f64(),
        DType::BF16 => half::bf16::from_f64(x).to_f64(),
        DType::F32 => f64::from(x as f32),
        DType::F64 => x,
        DType::U8 | DType::I32 | DType::I64 => x.trunc(),
    }
}

fn unary(op: UnaryOp, x: f64) -> f64 {
    match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Sign => {
            if x > 0.0 {
                1.0
            } else if x < 0.0 {
                -1.0
            } else {
                x
            }
        }
        UnaryOp::Recip => 1.0 / x,
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Exp => x.exp(),
        UnaryOp::Expm1 => x.exp_m1(),
        UnaryOp::Ln => x.ln(),
        UnaryOp::Ln1p => x.ln_1p(),
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Erf => crate::cpu::wide_erf(x),
        UnaryOp::Floor => x.floor(),
        UnaryOp::Round => x.round_ties_even(),
        UnaryOp::Not => f64::from(u8::from(x == 0.0)),
    }
}

fn binary(op: BinaryOp, is_float: bool, a: f64, b: f64) -> f64 {
    let truth = |is: bool| f64::from(u8::from(is));
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        BinaryOp::Div if is_float => a / b,
        BinaryOp::Div => (a / b).trunc(),
        BinaryOp::Rem => a - b * (a / b).floor(),
        BinaryOp::Pow => a.powf(b),
        BinaryOp::Max | BinaryOp::Or => {
            if a.is_nan() || a > b {
                a
            } else {
                b
            }
        }
        BinaryOp::Min | BinaryOp::And => {
            if a.is_nan() || a < b {
                a
            } else {
                b
            }
        }
        BinaryOp::Eq => truth(a == b),
        BinaryOp::Lt => truth(a < b),
        BinaryOp::Le => truth(a <= b),
    }
}

fn evaluate(node: &Node, known: &mut HashMap<u64, Reference>) {
    if known.contains_key(&node.id) {
        return;
    }
    let (recipe, value) = {
        let state = node.state.lock();
        (state.recipe.clone(), state.value.as_deref().cloned())
    };
    let shape = node.shape;
    let elements: Vec<f64> = match (&recipe, &value) {
        (_, Some(_)) | (None, _) => {
            let tensor = Tensor { node: Node::of_value(value.unwrap(), node.dtype, false, node.at) };
            tensor.to_f64().unwrap()
        }
        (Some(recipe), None) => {
            recipe.inputs.iter().for_each(|input| evaluate(input, known));
            let input = |n: usize| &known[&recipe.inputs[n].id];
            let is_float = recipe.inputs.first().is_some_and(|input| input.dtype.is_float());
            let each = |f: &dyn Fn(&[usize]) -> f64| indices(&shape).iter().map(|index| f(index)).collect::<Vec<f64>>();
            match &recipe.op {
                Op::Fill(value) => vec![rounded(node.dtype, value.as_f64()); shape.numel()],
                Op::Iota => (0..shape.numel()).map(|n| n as f64).collect(),
                Op::Random { seed } => {
                    (0..shape.numel()).map(|n| f64::from(crate::random::uniform(*seed, n as u64))).collect()
                }
                Op::Unary(op) => each(&|index| unary(*op, input(0).at(index))),
                Op::Binary(op) => each(&|index| binary(*op, is_float, input(0).at(index), input(1).at(index))),
                Op::Where => {
                    each(&|index| if input(0).at(index) != 0.0 { input(1).at(index) } else { input(2).at(index) })
                }
                Op::Cast => each(&|index| rounded(node.dtype, input(0).at(index))),
                Op::Move(movement) => moved(movement, input(0), &shape),
                Op::Reduce(op, axes) => each(&|index| {
                    let all = indices(&input(0).shape);
                    let of_this = all.iter().filter(|other| {
                        (0..shape.rank()).all(|axis| axes.contains(axis) || other[axis] == index[axis])
                    });
                    let values: Vec<f64> = of_this.map(|other| input(0).at(other)).collect();
                    match op {
                        ReduceOp::Sum => values.iter().sum(),
                        ReduceOp::Prod => values.iter().product(),
                        ReduceOp::Max => {
                            values.iter().copied().reduce(|a, b| binary(BinaryOp::Max, true, a, b)).unwrap()
                        }
                        ReduceOp::Min => {
                            values.iter().copied().reduce(|a, b| binary(BinaryOp::Min, true, a, b)).unwrap()
                        }
                    }
                }),
                Op::Matmul => each(&|index| {
                    let rank = shape.rank();
                    let steps = input(0).shape[rank - 1];
                    let (mut left, mut right) = (index.to_vec(), index.to_vec());
                    (0..steps)
                        .map(|step| {
                            left[rank - 1] = step;
                            right[rank - 2] = step;
                            input(0).at(&left) * input(1).at(&right)
                        })
                        .sum()
                }),
                Op::Contract { summed } => each(&|index| {
                    let (left, right) = (&input(0).shape, &input(1).shape);
                    let both = left.broadcast(right).unwrap();
                    let all = indices(&both);
                    let of_this = all.iter().filter(|other| {
                        (0..both.rank()).all(|axis| summed.contains(axis) || other[axis] == index[axis])
                    });
                    let known = |other: &[usize], shape: &Shape| -> Vec<usize> {
                        other.iter().zip(shape.iter()).map(|(at, size)| if *size == 1 { 0 } else { *at }).collect()
                    };
                    of_this.map(|other| input(0).at(&known(other, left)) * input(1).at(&known(other, right))).sum()
                }),
                Op::ArgReduce { axis, largest } => each(&|index| {
                    let mut index = index.to_vec();
                    let values: Vec<f64> = (0..input(0).shape[*axis])
                        .map(|n| {
                            index[*axis] = n;
                            input(0).at(&index)
                        })
                        .collect();
                    let best = (0..values.len()).reduce(|best, n| {
                        let is_better = if *largest { values[n] > values[best] } else { values[n] < values[best] };
                        if is_better { n } else { best }
                    });
                    best.unwrap() as f64
                }),
                // The composed one.
                Op::Attention { .. } => each(&|index| input(3).at(index)),
                Op::Preferred => each(&|index| input(4).at(index)),
                // Which nobody has beside it.
                Op::AttentionRows { .. } | Op::AttentionGradient { .. } => vec![f64::NAN; shape.numel()],
                Op::Cumsum { axis, is_reverse } => each(&|index| {
                    let mut other = index.to_vec();
                    let range = if *is_reverse { index[*axis]..shape[*axis] } else { 0..index[*axis] + 1 };
                    range
                        .map(|n| {
                            other[*axis] = n;
                            input(0).at(&other)
                        })
                        .sum()
                }),
                Op::ArgSort { axis, is_descending } => each(&|index| {
                    let mut other = index.to_vec();
                    let mut order: Vec<(f64, usize)> = (0..shape[*axis])
                        .map(|n| {
                            other[*axis] = n;
                            (input(0).at(&other), n)
                        })
                        .collect();
                    // NaN is larger than everything, and zeros are equal.
                    let compare = |a: f64, b: f64| a.partial_cmp(&b).unwrap_or(a.is_nan().cmp(&b.is_nan()));
                    order.sort_by(|a, b| if *is_descending { compare(b.0, a.0) } else { compare(a.0, b.0) });
                    order[index[*axis]].1 as f64
                }),
                Op::Gather { axis } => each(&|index| {
                    let mut other = index.to_vec();
                    other[*axis] = whole(input(1).at(index));
                    input(0).at(&other)
                }),
                Op::ScatterAdd { axis, .. } => {
                    let mut sums: HashMap<Vec<usize>, f64> = HashMap::new();
                    for index in indices(&input(0).shape) {
                        let mut to = index.clone();
                        to[*axis] = whole(input(1).at(&index));
                        *sums.entry(to).or_default() += input(0).at(&index);
                    }
                    each(&|index| sums.get(index).copied().unwrap_or_default())
                }
                Op::Place(corners) => each(&|index| {
                    let inside = |n: usize| {
                        let along = |axis: usize| {
                            index[axis].checked_sub(corners[n][axis]).filter(|at| *at < input(n).shape[axis])
                        };
                        (0..shape.rank()).map(along).collect::<Option<Vec<usize>>>().map(|at| input(n).at(&at))
                    };
                    (0..corners.len()).find_map(inside).unwrap_or_default()
                }),
                Op::Fold { last, before } => {
                    let mut sums: HashMap<Vec<usize>, f64> = HashMap::new();
                    for index in indices(&input(0).shape) {
                        let mut to = index.clone();
                        for folded in [Some(last), before.as_ref()].into_iter().flatten() {
                            let within = to.pop().unwrap();
                            to[folded.axis] = to[folded.axis] * folded.step + within * folded.dilation;
                        }
                        *sums.entry(to).or_default() += input(0).at(&index);
                    }
                    each(&|index| sums.get(index).copied().unwrap_or_default())
                }
                Op::Data | Op::Failed(_) => panic!("not computed"),
            }
        }
    };
    assert_eq!(elements.len(), shape.numel());
    known.insert(node.id, Reference { shape, elements });
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "indices are whole numbers")]
fn whole(x: f64) -> usize {
    x as usize
}

fn moved(movement: &Movement, input: &Reference, shape: &Shape) -> Vec<f64> {
    let from = &input.shape;
    let source = |index: &[usize]| -> Vec<usize> {
        match movement {
            Movement::Reshape => unreachable!("it has the same elements"),
            Movement::Permute(axes) => {
                let mut other = vec![0; index.len()];
                index.iter().zip(axes).for_each(|(at, axis)| other[usize::from(*axis)] = *at);
                other
            }
            Movement::Expand => {
                let kept = &index[shape.rank() - from.rank()..];
                kept.iter().zip(from.iter()).map(|(at, size)| if *size == 1 { 0 } else { *at }).collect()
            }
            Movement::Slice { axis, start, step } => {
                let mut other = index.to_vec();
                let at = isize::try_from(*start).unwrap() + isize::try_from(index[*axis]).unwrap() * step;
                other[*axis] = usize::try_from(at).unwrap();
                other
            }
            Movement::Windows { axis, step, dilation } => {
                let mut other = index[..from.rank()].to_vec();
                other[*axis] = index[*axis] * step + index[from.rank()] * dilation;
                other
            }
        }
    };
    if *movement == Movement::Reshape {
        return input.elements.clone();
    }
    indices(shape).iter().map(|index| input.at(&source(index))).collect()
}

/// What a tensor should be.
pub(crate) fn expected(tensor: &Tensor) -> Vec<f64> {
    let mut known = HashMap::new();
    evaluate(&tensor.node, &mut known);
    known.remove(&tensor.node.id).unwrap().elements
}

/// The operations that a tensor is made of, a line each, with what they should be.
fn described(tensor: &Tensor) -> String {
    let mut known = HashMap::new();
    evaluate(&tensor.node, &mut known);
    let mut left = vec![tensor.node.clone()];
    let mut lines = std::collections::BTreeMap::new();
    while let Some(node) = left.pop() {
        let recipe = node.state.lock().recipe.clone();
        let (op, inputs) = recipe.map_or((Op::Data, Inputs::new()), |recipe| (recipe.op, recipe.inputs));
        let ids: Vec<u64> = inputs.iter().map(|input| input.id).collect();
        let shown: Vec<f64> = known[&node.id].elements.iter().take(12).copied().collect();
        lines.insert(node.id, format!("{} = {op:?} {ids:?} {} {shown:?}", node.id, node.shape));
        left.extend(inputs);
    }
    lines.into_values().collect::<Vec<_>>().join("\n")
}

/// Whether numbers are the same but for rounding.
fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().filter(|x| x.is_finite()).fold(1.0_f64, |most, x| most.max(x.abs()));
    for (n, (found, expected)) in found.iter().zip(expected).enumerate() {
        let is_same = found == expected || found.is_nan() && expected.is_nan();
        let error = (found - expected).abs();
        assert!(is_same || error <= tolerance * scale, "{what}: element {n} is {found} and should be {expected}");
    }
}

/// Makes graphs by chance.
struct Generator {
    rng: SmallRng,
    /// What can be used; all of them floats of one type, or integers.
    made: Vec<Tensor>,
    /// A size that some axes of this graph have: of all others, none is as long as a vector.
    wide: usize,
}

impl Generator {
    fn new(seed: u64) -> Generator {
        let mut rng = SmallRng::seed_from_u64(seed);
        // Longer than a vector, or than rows that are computed side by side. Few: definitions are slow.
        let wide = [6, 6, 6, 6, 6, 17, 70, 130][rng.random_range(0..8)];
        Generator { rng, made: Vec::new(), wide }
    }

    fn shape(&mut self) -> Vec<usize> {
        let rank = self.rng.random_range(0..4);
        let sizes = [1, 1, 2, 3, 4, 5, 7, 0];
        let most = if self.rng.random_ratio(1, 20) { 8 } else { 7 };
        let mut shape: Vec<usize> = (0..rank).map(|_| sizes[self.rng.random_range(0..most)]).collect();
        if rank > 0 && self.rng.random_bool(0.4) {
            let axis = self.rng.random_range(0..rank);
            shape[axis] = self.wide;
        }
        shape
    }

    #[expect(clippy::cast_possible_truncation, reason = "elements are small")]
    fn leaf(&mut self, dtype: DType) -> Tensor {
        let shape = self.shape();
        let count: usize = shape.iter().product();
        // Some are made from nothing, and stored only if somebody needs a buffer.
        match self.rng.random_range(0..8) {
            0 if dtype.is_float() => return Tensor::uniform(&shape, self.rng.random(), dtype),
            1 => return Tensor::full(&shape, self.rng.random_range(-2..3), dtype),
            2 => {
                let sizes: Vec<isize> = shape.iter().map(|size| size.cast_signed()).collect();
                return Tensor::arange(0, i64::try_from(count).unwrap(), 1, dtype).reshape(&sizes);
            }
            _ => {}
        }
        let elements: Vec<f64> = (0..count).map(|_| (self.rng.random_range(-400..400) as f64) / 128.0).collect();
        match dtype {
            DType::F64 => Tensor::from_vec(elements, &shape),
            DType::F32 => Tensor::from_vec(elements.iter().map(|x| *x as f32).collect::<Vec<f32>>(), &shape),
            _ => Tensor::from_vec(elements.iter().map(|x| (*x * 3.0) as i64).collect::<Vec<i64>>(), &shape),
        }
    }

    fn any(&mut self) -> Tensor {
        let n = self.rng.random_range(0..self.made.len());
        // The last ones more often, so that chains become long.
        let n = if self.rng.random_bool(0.5) { self.made.len() - 1 - n / 3 } else { n };
        self.made[n].clone()
    }

    fn axis(&mut self, tensor: &Tensor) -> isize {
        let rank = i32::try_from(tensor.rank()).unwrap();
        self.rng.random_range(-rank..rank) as isize
    }

    /// One more operation. All of them are smooth or flat, so that rounding stays small.
    fn step(&mut self) -> Tensor {
        let a = self.any();
        let is_float = a.dtype().is_float();
        loop {
            let made = match self.rng.random_range(0..24) {
                0 if is_float => a.sin(),
                1 if is_float => a.tanh(),
                2 if is_float => (-a.abs()).exp(),
                3 if is_float => a.sigmoid(),
                4 => -&a,
                5 => a.abs(),
                6..=8 => {
                    // With something that broadcasts, if there is.
                    let others: Vec<Tensor> =
                        self.made.iter().filter(|b| a.shape().broadcast(&b.shape()).is_some()).cloned().collect();
                    let b = others[self.rng.random_range(0..others.len())].clone();
                    match self.rng.random_range(0..6) {
                        0 => &a + &b,
                        1 => &a - &b,
                        2 if is_float => a.tanh() * b.cos(),
                        2 => a.maximum(&b),
                        3 => a.minimum(&b),
                        4 => a.lt(&b).where_(&a, &b),
                        _ => a.maximum(&b),
                    }
                }
                9 if a.rank() > 0 => {
                    let axis = self.axis(&a);
                    if is_float { a.mean(axis) } else { a.sum(axis) }
                }
                10 if a.rank() > 0 && a.numel() > 0 => {
                    let axis = self.axis(&a);
                    a.max_keepdims(axis)
                }
                11 if a.rank() > 0 && a.numel() > 0 && is_float => {
                    let axis = self.axis(&a);
                    a.softmax(axis)
                }
                12 if a.rank() > 0 && is_float => {
                    let axis = self.axis(&a);
                    a.layer_norm(axis, 0.5)
                }
                13 if a.rank() > 1 => a.t(),
                14 if a.rank() > 0 => {
                    let axis = self.axis(&a);
                    a.flip(axis)
                }
                15 if a.rank() > 0 => {
                    let axis = self.axis(&a);
                    let step = [-2, -1, 1, 2][self.rng.random_range(0..4)];
                    let start = self.rng.random_range(-3..4_i32) as isize;
                    a.slice(axis, Some(start), None, step)
                }
                16 => {
                    let mut sizes: Vec<isize> = a.shape().iter().map(|size| isize::try_from(*size).unwrap()).collect();
                    let at = self.rng.random_range(0..=sizes.len());
                    if self.rng.random_bool(0.5) {
                        sizes.insert(at, 1)
                    } else {
                        sizes = vec![isize::try_from(a.numel()).unwrap()]
                    }
                    if sizes.len() > 4 { continue } else { a.reshape(&sizes) }
                }
                17 if a.rank() < 4 && a.numel() < 500 => {
                    let mut sizes = a.shape().to_vec();
                    sizes.insert(0, 3);
                    a.expand(&sizes)
                }
                18 if a.rank() > 1 && is_float && a.numel() < 2000 => a.tanh().matmul(&a.t().tanh()) * 0.1,
                19 if a.rank() > 0 => {
                    let axis = self.axis(&a);
                    a.cumsum(axis) * if is_float { 0.25.into_scalar() } else { 1.0.into_scalar() }
                }
                20 if a.numel() < 500 => {
                    if a.rank() == 0 {
                        continue;
                    } else {
                        Tensor::concat(&[&a, &a.flip(())], self.axis(&a))
                    }
                }
                21 if a.rank() > 0 && a.numel() > 0 => {
                    let axis = self.axis(&a);
                    a.sort(axis, self.rng.random_bool(0.5))
                }
                22 if is_float => a.gt(0).where_(&a, &a * 0.5),
                22 => a.gt(0).cast(a.dtype()),
                23 if a.rank() > 0 => a.pad(&vec![1; a.rank()], &vec![0; a.rank()]),
                _ => continue,
            };
            if made.numel() < if self.wide > 6 { 3_000 } else { 20_000 } {
                return made;
            }
        }
    }
}

/// A number as an operand whose type is not known here.
trait IntoScalar {
    fn into_scalar(self) -> f64;
}

impl IntoScalar for f64 {
    fn into_scalar(self) -> f64 {
        self
    }
}

impl Generator {
    /// A graph of up to so many operations on three leaves.
    fn graph(seed: u64, operations_max: usize) -> (Generator, DType) {
        let mut generator = Generator::new(seed);
        let dtype = [DType::F32, DType::F32, DType::F64, DType::I64][generator.rng.random_range(0..4)];
        for _ in 0..3 {
            let leaf = generator.leaf(dtype);
            generator.made.push(leaf);
        }
        for _ in 0..generator.rng.random_range(1..operations_max) {
            let next = generator.step();
            next.check().unwrap_or_else(|error| panic!("{seed}: {error}"));
            generator.made.push(next);
        }
        (generator, dtype)
    }
}

/// Graphs of some operations, computed fused and one by one, compared with what they should be.
fn try_graphs(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let (mut generator, dtype) = Generator::graph(seed, 20);
        let count = generator.made.len();
        let outputs: Vec<Tensor> =
            (0..3).map(|n| generator.made[generator.rng.random_range(n * count / 4..count)].clone()).collect();
        let wanted: Vec<Vec<f64>> = outputs.iter().map(expected).collect();
        let described: Vec<String> = outputs.iter().map(described).collect();
        let mode = if generator.rng.random_ratio(1, 4) { Mode::Eager } else { Mode::Fused };
        let nodes: Vec<_> = outputs.iter().map(|output| output.node.clone()).collect();
        let plan = crate::schedule::plan_of(&nodes, mode, &[]).unwrap();
        Tensor::realize_in(&outputs.iter().collect::<Vec<_>>(), mode).unwrap_or_else(|error| panic!("{seed}: {error}"));
        let tolerance = if dtype == DType::F32 { 2e-4 } else { 1e-10 };
        for ((output, wanted), described) in outputs.iter().zip(&wanted).zip(&described) {
            let what = format!("seed {seed}, {mode:?}, {dtype}, {described}\n{:#?}\n", plan.steps);
            assert_close(&output.to_f64().unwrap(), wanted, tolerance, &what);
        }
    }
}

#[test]
fn generated_graphs_are_computed_as_they_are_defined() {
    // How many, or which, as `1000..2000`: on a GPU most of the time goes into its compiler, on one core.
    let asked = std::env::var("TENSOR_WASM_TEST_GRAPHS").unwrap_or_else(|_| "1500".to_owned());
    let (from, to) = asked.split_once("..").unwrap_or(("0", &asked));
    try_graphs(from.parse().unwrap()..to.parse().unwrap());
}

/// The same where results may take the place of leaves that were given up.
#[test]
fn generated_graphs_are_the_same_in_the_place_of_what_is_given_up() {
    let mut taken = 0;
    for seed in 0..1500 {
        let (generator, dtype) = Generator::graph(seed, 5);
        let outputs: Vec<Tensor> = generator.made[3..].to_vec();
        let wanted: Vec<Vec<f64>> = outputs.iter().map(expected).collect();
        // Some operations give back what they were given.
        let is_asked = |leaf: &&Tensor| outputs.iter().any(|output| output.node.id == leaf.node.id);
        let leaves = generator.made[..3].iter().filter(|leaf| !is_asked(leaf));
        let leaves = leaves.filter_map(|leaf| leaf.node.state.lock().value.clone());
        let given_up: Vec<_> = leaves.map(|value| value.storage).collect();
        let nodes: Vec<_> = outputs.iter().map(|output| output.node.clone()).collect();
        let plan = crate::schedule::plan_of(&nodes, Mode::Fused, &given_up).unwrap();
        taken += usize::from(plan.takes_leaves);
        Tensor::realize_over(&outputs.iter().collect::<Vec<_>>(), &given_up).unwrap();
        let tolerance = if dtype == DType::F32 { 2e-4 } else { 1e-10 };
        for (output, wanted) in outputs.iter().zip(&wanted) {
            let what = format!("seed {seed}, {dtype}\n{:#?}\n", plan.steps);
            assert_close(&output.to_f64().unwrap(), wanted, tolerance, &what);
        }
    }
    assert!(taken >= 100, "only {taken} plans took a leaf's place");
}

/// The same as PTX, in the emulator.
#[cfg(feature = "cuda")]
#[test]
fn generated_graphs_are_computed_as_they_are_defined_as_ptx() {
    crate::with_device(&crate::cuda::tests::DEVICE, || try_graphs(0..150));
}

/// Compares gradients with differences.
fn check_gradient(what: &str, inputs: &[Tensor], f: &dyn Fn(&[Tensor]) -> Tensor) {
    let with_grad: Vec<Tensor> = inputs.iter().map(Tensor::with_grad).collect();
    let result = f(&with_grad);
    result.check().unwrap_or_else(|error| panic!("{what}: {error}"));
    // Every element of the result counts differently.
    let weights = Tensor::arange(1, 1 + i64::try_from(result.numel()).unwrap(), 1, DType::F64);
    let weights = (weights * 0.37).sin().reshape_to(result.shape(), result.node.at);
    let number = (&result * &weights).sum(());
    let gradients = autograd::grad(&number, &with_grad.iter().collect::<Vec<_>>()).unwrap();
    for (n, (input, gradient)) in inputs.iter().zip(&gradients).enumerate() {
        assert_eq!(gradient.shape(), input.shape(), "{what}");
        let found = gradient.to_f64().unwrap_or_else(|error| panic!("{what}: {error}"));
        let elements = input.to_vec::<f64>().unwrap();
        let step = 1e-6;
        let slopes: Vec<f64> = (0..elements.len())
            .map(|at| {
                let value = |by: f64| {
                    let mut moved = elements.clone();
                    moved[at] += by;
                    let mut all = inputs.to_vec();
                    all[n] = Tensor::from_vec(moved, &input.shape());
                    (f(&all) * &weights).sum(()).item::<f64>().unwrap()
                };
                (value(step) - value(-step)) / (2.0 * step)
            })
            .collect();
        assert_close(&found, &slopes, 1e-6, &format!("gradient of {what}, input {n}"));
    }
}

#[test]
fn gradients_are_slopes() {
    let mut rng = SmallRng::seed_from_u64(11);
    let mut random = |sizes: &[usize], low: f64, high: f64| {
        let count = sizes.iter().product();
        Tensor::from_vec((0..count).map(|_| rng.random_range(low..high)).collect::<Vec<f64>>(), sizes)
    };
    let x = random(&[3, 4], -2.0, 2.0);
    let y = random(&[4], 0.3, 2.0);
    let positive = random(&[3, 4], 0.2, 3.0);
    type Unary = (&'static str, fn(&Tensor) -> Tensor);
    let anywhere: [Unary; 30] = [
        ("neg", |x| -x),
        ("abs", Tensor::abs),
        ("exp", Tensor::exp),
        ("expm1", Tensor::expm1),
        ("sin", Tensor::sin),
        ("cos", Tensor::cos),
        ("tanh", Tensor::tanh),
        ("erf", Tensor::erf),
        ("square", Tensor::square),
        ("sigmoid", Tensor::sigmoid),
        ("softplus", Tensor::softplus),
        ("relu", Tensor::relu),
        ("elu", |x| x.elu(1.3)),
        ("gelu", Tensor::gelu),
        ("gelu_approximate", Tensor::gelu_approximate),
        ("silu", Tensor::silu),
        ("clip", |x| x.clip(-1.0, 0.7)),
        ("sum", |x| x.sum(1)),
        ("mean", |x| x.mean(())),
        ("prod", |x| x.prod(0)),
        ("prod of both", |x| x.prod([0, 1])),
        ("max", |x| x.max(1)),
        ("min", |x| x.min(0)),
        ("var", |x| x.var(1, 1)),
        ("logsumexp", |x| x.logsumexp(0)),
        ("softmax", |x| x.softmax(1)),
        ("log_softmax", |x| x.log_softmax(-1)),
        ("layer_norm", |x| x.layer_norm(1, 1e-5)),
        ("rms_norm", |x| x.rms_norm(1, 1e-5)),
        ("cumsum", |x| x.cumsum(1)),
    ];
    for (name, f) in anywhere {
        check_gradient(name, std::slice::from_ref(&x), &|inputs| f(&inputs[0]));
    }
    let above_zero: [Unary; 6] = [
        ("ln", Tensor::ln),
        ("ln1p", Tensor::ln1p),
        ("sqrt", Tensor::sqrt),
        ("rsqrt", Tensor::rsqrt),
        ("recip", Tensor::recip),
        ("tan", |x| (x * 0.4).tan()),
    ];
    for (name, f) in above_zero {
        check_gradient(name, std::slice::from_ref(&positive), &|inputs| f(&inputs[0]));
    }
    let views: [Unary; 10] = [
        ("reshape", |x| x.reshape(&[2, -1])),
        ("transpose", |x| x.t().reshape(&[-1])),
        ("expand", |x| x.expand(&[2, 3, 4])),
        ("slice", |x| x.slice(1, Some(1), None, 2)),
        ("slice backwards", |x| x.slice(1, None, None, -2)),
        ("flip", |x| x.flip(())),
        ("concat", |x| Tensor::concat(&[x, &x.flip(0)], 0)),
        ("pad", |x| x.pad(&[1, 0], &[0, 2])),
        ("sort", |x| x.sort(1, true)),
        ("index_select", |x| x.index_select(0, &Tensor::from_slice(&[2_i64, 0, 2, -1], &[4]))),
    ];
    for (name, f) in views {
        check_gradient(name, std::slice::from_ref(&x), &|inputs| f(&inputs[0]));
    }
    type Binary = (&'static str, fn(&Tensor, &Tensor) -> Tensor);
    let both: [Binary; 8] = [
        ("add", |a, b| a + b),
        ("sub", |a, b| a - b),
        ("mul", |a, b| a * b),
        ("div", |a, b| a / b),
        ("pow", |a, b| (a.abs() + 0.1).pow(b)),
        ("rem", |a, b| a % b),
        ("maximum", |a, b| a.maximum(b)),
        ("minimum", |a, b| a.minimum(b)),
    ];
    for (name, f) in both {
        check_gradient(name, &[x.clone(), y.clone()], &|inputs| f(&inputs[0], &inputs[1]));
    }
    let z = random(&[2, 4, 5], -1.0, 1.0);
    check_gradient("matmul", &[x.clone(), z.clone()], &|inputs| inputs[0].matmul(&inputs[1]));
    check_gradient("matmul with a vector", &[z.clone(), random(&[5], -1.0, 1.0)], &|inputs| {
        inputs[0].matmul(&inputs[1])
    });
    check_gradient("where", &[x.clone(), y], &|inputs| inputs[0].gt(0).where_(&inputs[0] * &inputs[1], &inputs[1]));
    let images = random(&[2, 2, 5, 6], -1.0, 1.0);
    let filters = random(&[4, 1, 3, 2], -1.0, 1.0);
    let options = Convolution { groups: 2, ..Convolution::new(2, 1) };
    check_gradient("conv2d", &[images.clone(), filters.clone()], &|inputs| inputs[0].conv2d(&inputs[1], options));
    let back = random(&[2, 2, 3, 2], -1.0, 1.0);
    let turned = random(&[2, 3, 2, 3], -1.0, 1.0);
    check_gradient("conv_transpose2d", &[back, turned], &|inputs| {
        inputs[0].conv_transpose2d(&inputs[1], Convolution::new(2, 1))
    });
    let window = Window { stride: 1, padding: 1, dilation: 1 };
    check_gradient("max_pool2d", std::slice::from_ref(&images), &|inputs| inputs[0].max_pool2d_with(2, window));
    check_gradient("avg_pool2d", std::slice::from_ref(&images), &|inputs| inputs[0].avg_pool2d_with(3, window));
    let apart = Window { stride: 2, padding: 0, dilation: 1 };
    check_gradient("max_pool2d of windows apart", std::slice::from_ref(&images), &|inputs| {
        (inputs[0].max_pool2d_with(2, apart) * inputs[0].square().avg_pool2d_with(2, apart)).tanh()
    });
    let keys = random(&[2, 4, 5], -1.0, 1.0);
    check_gradient("attention", &[z.clone(), keys, z.clone()], &|inputs| {
        inputs[0].attention(&inputs[1], &inputs[2], true)
    });
    let classes = Tensor::from_slice(&[1_i64, 3, 0], &[3]);
    check_gradient("cross_entropy", std::slice::from_ref(&x), &|inputs| inputs[0].cross_entropy(&classes));
    let index = Tensor::from_slice(&[2_i64, 0, 2], &[3]);
    check_gradient("embedding", std::slice::from_ref(&x), &|inputs| inputs[0].embedding(&index));
    check_gradient("repeat", std::slice::from_ref(&x), &|inputs| inputs[0].repeat(&[2, 3]));
    check_gradient("dropout", std::slice::from_ref(&x), &|inputs| inputs[0].dropout(0.4, 3));
    // Gradients of gradients.
    check_gradient("a gradient", std::slice::from_ref(&x), &|inputs| {
        let inner = inputs[0].with_grad();
        let cubes = (&inner * &inner * inner.tanh()).sum(());
        autograd::grad(&cubes, &[&inner]).unwrap().remove(0)
    });
}
