//! The library as its users see it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tensor_wasm_tensor::nn::{self, Module};
use tensor_wasm_tensor::{
    AdaGrad, Adam, AdamW, DType, Device, Mode, Optimizer, RmsProp, Sgd, Tensor, Variable, clip_grad_norm,
    clip_grad_value, device, grad, io, memory_limit, no_grad, plans_made, set_threads,
};

mod modules;
#[path = "../examples/support/mod.rs"]
mod support;

fn close(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let error = (f64::from(*found) - expected).abs();
        assert!(error <= 1e-5 * expected.abs().max(1.0), "{found} and not {expected}");
    }
}

/// The message of what a tensor holds.
fn message(tensor: &Tensor) -> String {
    tensor.to_f64().expect_err("it makes no sense").to_string()
}

#[test]
fn what_makes_no_sense_says_what_and_where() {
    let (a, b) = (Tensor::zeros(&[2, 3], DType::F32), Tensor::zeros(&[4], DType::F32));
    let whole = Tensor::zeros(&[2, 3], DType::I64);
    let image = Tensor::zeros(&[1, 1, 1, 9], DType::F32);
    let far = |stride, padding| {
        let columns = tensor_wasm_tensor::Window { stride, padding, dilation: 1 };
        tensor_wasm_tensor::Convolution { columns, ..Default::default() }
    };
    for (tensor, expected) in [
        (&a + &b, "add: shapes [2, 3] and [4] do not broadcast"),
        (&a * &whole, "mul: operands are f32 and i64; make them the same with .cast()"),
        (a.sum(2), "sum: axis 2 of a tensor of shape [2, 3]: there are axes 0 to 1, and from the end -1 to -2"),
        (a.sum([0, -2]), "sum: axis -2 is named twice"),
        (a.reshape(&[4, -1]), "reshape: 6 elements of shape [2, 3] cannot have shape [4, -1]"),
        (a.matmul(&b), "matmul: [2, 3] times [4, 1]: the left has 3 columns and the right 4 rows"),
        (
            a.matmul(&Tensor::ones(&[5, 3, 4], DType::F32)).matmul(&Tensor::ones(&[3, 4, 1], DType::F32)),
            "matmul: [5, 2, 4] times [3, 4, 1]: what comes before rows and columns does not broadcast",
        ),
        (
            a.cross_entropy(&a.sum(1)),
            "cross_entropy: not for elements of type f32; it takes classes as i64: use .cast()",
        ),
        (a.cross_entropy(&whole), "cross_entropy: "),
        (whole.exp(), "exp: not for elements of type i64; it takes floats"),
        (&whole + 0.5, "a number with a fraction: not for elements of type i64; it takes floats"),
        (
            Tensor::zeros(&[1 << 40, 1 << 40], DType::U8),
            "full: shape [1099511627776, 1099511627776]: a tensor has at most",
        ),
        (Tensor::zeros(&[1; 9], DType::U8), "full: shape [1, 1, 1, 1, 1, 1, 1, 1, 1]: a tensor has at most 8 axes"),
        (Tensor::zeros(&[0, 3], DType::F32).max(0), "max: shape [0, 3]: there is no extreme of no elements"),
        (&whole / &whole, "div: an integer is divided by zero"),
        (a.gather(1, &b.cast(DType::I64)), "gather: shape [4], and an index of 2 axes is needed"),
        (a.index_select(0, &Tensor::from_slice(&[0_i64, 2], &[2])), "gather: index 2 of axis 0, which has 2"),
        (Tensor::from_slice(&[1_u8, 2], &[3]), "from: 2 elements are given for shape [3], which has 3"),
        (a.slice(0, None, None, 0), "slice: a step is not zero"),
        (a.narrow(1, 2, 2), "narrow: 2 elements from 2 on, along an axis of 3"),
        (a.logical_not(), "not: not for elements of type f32; it takes bool"),
        (Tensor::concat(&[], 0), "concat: no tensors are given"),
        (a.gt(0).scatter_add(0, &whole, 1), "scatter_add: not for elements of type bool"),
        (Tensor::arange(0.0, 1.0, 0.25, DType::I64), "fractions are not for i64"),
        (image.conv_transpose2d(&image, far(1 << 61, 0)), "conv_transpose2d: shape [1, 1, 1, 9]"),
        (image.conv2d(&image, far(1, 1 << 63)), "conv2d: a padding of 9223372036854775808 elements on each side"),
        (image.avg_pool2d_with(1 << 32, tensor_wasm_tensor::Window::default()), "avg_pool2d: a window of 4294967296"),
        (a.slice(0, None, None, isize::MAX).expand(&[1 << 40, 3]), "to_f64: no 26388279066624 bytes of memory"),
    ] {
        let message = message(&tensor);
        assert!(message.contains(expected), "{message}\nand not\n{expected}");
        assert!(message.contains("tests/api.rs:"), "{message}");
        // Whatever is made of it says the same, if it did not fail for want of memory.
        if message.contains("of memory") {
            continue;
        }
        let later = (tensor.relu() * 2.0).sum(());
        assert_eq!(later.item::<f32>().expect_err("still").to_string(), message);
    }
    assert!(a.item::<f32>().expect_err("six").to_string().contains("[2, 3] is not a single number"));
    assert!(a.to_vec::<i32>().expect_err("f32").to_string().contains("elements are f32, and i32 was asked for"));
    let error = Tensor::full(&[1 << 50], 1, DType::F32).to_vec::<f32>().expect_err("memory").to_string();
    assert!(error.contains("bytes of memory") || is_beyond_a_gpu(&error), "{error}");
}

/// What a GPU says of a tensor that is too large, where `TENSOR_WASM_DEVICE` has these tests run on one.
fn is_beyond_a_gpu(error: &str) -> bool {
    device() != Device::Cpu && error.contains("fewer than 2^31 elements")
}

#[test]
fn numbers_behave_as_documented() {
    let x = Tensor::from_slice(&[f32::NAN, f32::INFINITY, -0.0, 0.0, -1.5, 2.5], &[6]);
    let bits = |tensor: Tensor| tensor.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(-&x)[2..4], [0.0_f32.to_bits(), (-0.0_f32).to_bits()]);
    assert_eq!(x.round().to_vec::<f32>().unwrap()[4..], [-2.0, 2.0]);
    assert!(x.max(()).item::<f32>().unwrap().is_nan() && x.relu().to_vec::<f32>().unwrap()[0].is_nan());
    assert_eq!(x.cast(DType::I32).to_vec::<i32>().unwrap(), [0, i32::MAX, 0, 0, -1, 2]);
    assert_eq!(x.cast(DType::Bool).to_vec::<bool>().unwrap(), [true, true, false, false, true, true]);
    assert_eq!((x.recip()).to_vec::<f32>().unwrap()[2..4], [f32::NEG_INFINITY, f32::INFINITY]);
    let whole = Tensor::from_slice(&[i32::MAX, i32::MIN, -7, 7], &[4]);
    assert_eq!((&whole + 1).to_vec::<i32>().unwrap(), [i32::MIN, i32::MIN + 1, -6, 8]);
    assert_eq!((&whole / 2).to_vec::<i32>().unwrap()[2..], [-3, 3]);
    assert_eq!((&whole % 3).to_vec::<i32>().unwrap()[2..], [2, 1]);
    assert_eq!((&whole / -1).to_vec::<i32>().unwrap()[1], i32::MIN);
    assert_eq!(whole.sum(()).item::<i64>().unwrap(), -1);
    let bytes = Tensor::from_slice(&[200_u8, 100], &[2]);
    assert_eq!((&bytes + 100).to_vec::<u8>().unwrap(), [44, 200]);
    assert_eq!(bytes.prod(()).item::<i64>().unwrap(), 20_000);
    // Half precision is rounded when it is stored.
    for dtype in [DType::F16, DType::BF16] {
        let third = Tensor::full(&[3], 1, dtype) / 3.0;
        let rounded = third.cast(DType::F32).to_vec::<f32>().unwrap()[0];
        assert!((rounded - 1.0 / 3.0).abs() < 2e-3 && third.dtype() == dtype, "{rounded}");
        assert!((third.sum(()).cast(DType::F32).item::<f32>().unwrap() - 1.0).abs() < 1e-2);
    }
}

/// A kernel that computes `2m` where `m` was and sums `m` up has to read it first.
#[test]
fn what_is_reduced_is_read_before_anything_takes_its_place() {
    for (shape, axis) in [([128, 48], 0), ([4, 20_000], 1), ([70, 3], 0)] {
        let (a, b) = (Tensor::uniform(&[shape[0], 5], 1, DType::F64), Tensor::uniform(&[5, shape[1]], 2, DType::F64));
        let both = |m: &Tensor| m * 2.0 + m.sum_keepdims(axis);
        let fused = both(&a.matmul(&b));
        let product = a.matmul(&b);
        product.realize().unwrap();
        let sums = product.sum_keepdims(axis);
        sums.realize().unwrap();
        let expected = (&product * 2.0 + &sums).to_f64().unwrap();
        for (found, expected) in fused.to_f64().unwrap().iter().zip(&expected) {
            assert!((found - expected).abs() <= 1e-9 * expected.abs(), "{shape:?}: {found} and {expected}");
        }
    }
}

#[test]
fn large_reductions_are_right_and_the_same_on_any_number_of_threads() {
    for shape in
        [&[1_000_003][..], &[3, 70_001], &[70_001, 3], &[1024, 1025], &[7, 300, 130], &[5, 4, 3, 2000], &[2, 200_000]]
    {
        let x = (Tensor::uniform(shape, 5, DType::F32) - 0.3).sin();
        x.realize().unwrap();
        let elements = x.to_f64().unwrap();
        for mask in 1..1_usize << shape.len() {
            let axes: Vec<isize> =
                (0..shape.len()).filter(|axis| mask >> axis & 1 == 1).map(|axis| axis.cast_signed()).collect();
            let kept: Vec<usize> = (0..shape.len()).filter(|axis| mask >> axis & 1 == 0).collect();
            let count: usize = kept.iter().map(|axis| shape[*axis]).product();
            let mut expected = vec![0.0; count];
            for (n, element) in elements.iter().enumerate() {
                let (mut rest, mut index) = (n, vec![0; shape.len()]);
                for axis in (0..shape.len()).rev() {
                    index[axis] = rest % shape[axis];
                    rest /= shape[axis];
                }
                let to = kept.iter().fold(0, |at, axis| at * shape[*axis] + index[*axis]);
                expected[to] += element * element;
            }
            let mut results = Vec::new();
            for threads in [1, 2, 5] {
                set_threads(threads);
                results.push(x.square().sum(&axes[..]).to_vec::<f32>().unwrap());
            }
            close(&results[0], &expected);
            assert!(results.iter().all(|result| result == &results[0]), "{shape:?} over {axes:?}");
        }
        set_threads(2);
        let soft = x.softmax(-1).to_vec::<f32>().unwrap();
        let row = shape[shape.len() - 1];
        assert!(soft.chunks(row).all(|row| (row.iter().map(|x| f64::from(*x)).sum::<f64>() - 1.0).abs() < 1e-4));
    }
}

#[test]
fn operators_methods_and_modes_agree() {
    let x = Tensor::normal(&[50, 40], 3, DType::F32);
    let y = Tensor::uniform(&[40], 4, DType::F32);
    let fused = (&x * 2.0 + &y).tanh() / (1.0 + x.exp());
    let eager = x.mul(2.0).add(&y).tanh().div(x.exp().add(1.0));
    Tensor::realize_in(&[&eager], Mode::Eager).unwrap();
    assert_eq!(fused.to_vec::<f32>().unwrap(), eager.to_vec::<f32>().unwrap());
    // What lies the other way round is read in blocks.
    let (high, wide) = (131, 77);
    let z = Tensor::uniform(&[3, wide, high], 8, DType::F32);
    let elements = z.to_vec::<f32>().unwrap();
    let turned = (z.t() * 2.0 + z.transpose(0, 2).transpose(0, 1).permute(&[2, 1, 0])).to_vec::<f32>().unwrap();
    for batch in 0..3 {
        for (row, column) in (0..high).flat_map(|row| (0..wide).map(move |column| (row, column))) {
            let at = elements[(batch * wide + column) * high + row];
            assert_eq!(turned[(batch * high + row) * wide + column], at * 2.0 + at);
        }
    }
    // Seeds make the same numbers, whatever is made of them.
    let again = Tensor::normal(&[50, 40], 3, DType::F32).reshape(&[40, 50]).t().t().reshape(&[-1]);
    assert_eq!(again.to_vec::<f32>().unwrap(), x.to_vec::<f32>().unwrap());
    let mean = x.mean(()).item::<f32>().unwrap();
    let variance = x.var((), 1).item::<f32>().unwrap();
    assert!(mean.abs() < 0.1 && (variance - 1.0).abs() < 0.1, "{mean} {variance}");
    assert_eq!(Tensor::arange(1.0, 2.0, 0.25, DType::F64).to_vec::<f64>().unwrap(), [1.0, 1.25, 1.5, 1.75]);
    assert_eq!(Tensor::linspace(0.0, 1.0, 3, DType::F32).to_vec::<f32>().unwrap(), [0.0, 0.5, 1.0]);
    assert_eq!(Tensor::eye(2, DType::I32).to_vec::<i32>().unwrap(), [1, 0, 0, 1]);
}

#[test]
fn gradients_flow_where_they_are_asked_for() {
    let w = Tensor::from_slice(&[1.0_f32, 2.0, 3.0], &[3]).with_grad();
    let loss = (&w * &w * w.detach()).sum(());
    let gradients = grad(&loss, &[&w]).unwrap();
    assert_eq!(gradients[0].to_vec::<f32>().unwrap(), [2.0, 8.0, 18.0]);
    let silent = no_grad(|| (&w * 2.0).sum(()));
    assert!(!silent.requires_grad());
    assert!(grad(&silent, &[&w]).expect_err("nothing flows").to_string().contains("asks for gradients"));
    assert!(grad(&(&w * 2.0), &[&w]).expect_err("three").to_string().contains("[3] is not a single number"));
    // Through what was computed already, too.
    let half = (&w * 0.5).exp();
    half.realize().unwrap();
    let gradient = grad(&half.sum(()), &[&w]).unwrap().remove(0);
    close(&gradient.to_vec::<f32>().unwrap(), &[0.5, 1.0, 1.5].map(|x: f64| 0.5 * x.exp()));
}

#[test]
fn a_million_operations_are_neither_too_deep_to_compute_nor_to_drop() {
    let mut x = Tensor::zeros(&[4], DType::F32);
    let plans = plans_made();
    for _ in 0..1_000_000 {
        x = x + 1.0;
    }
    assert_eq!(x.to_vec::<f32>().unwrap(), [1e6; 4]);
    assert!(
        plans_made() - plans <= 3,
        "long queues are computed on the way, all by one plan: {}",
        plans_made() - plans
    );
    let mut y = Tensor::zeros(&[4], DType::F32).with_grad();
    for _ in 0..1_000_000 {
        y = y + 1.0;
    }
    drop(y);
}

#[test]
fn going_backwards_adds_up_frees_the_graph_and_calls_hooks_once() {
    let w = Tensor::from_slice(&[1.0_f32, 2.0], &[2]).with_grad();
    let square = &w * &w;
    let (on_square, on_w) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let count = |counter: &Arc<AtomicUsize>| {
        let counter = counter.clone();
        move |_: &Tensor| {
            counter.fetch_add(1, Ordering::Relaxed);
            None
        }
    };
    square.register_hook(count(&on_square));
    let hook = w.register_hook(count(&on_w));
    // Used twice: its gradient is whole when the hook sees it.
    let loss = (&square + &square * 3.0).sum(());
    loss.backward().unwrap();
    assert_eq!(w.grad().unwrap().to_vec::<f32>().unwrap(), [8.0, 16.0]);
    assert_eq!((on_square.load(Ordering::Relaxed), on_w.load(Ordering::Relaxed)), (1, 1));
    assert_eq!(loss.item::<f32>().unwrap(), 20.0);
    let again = loss.backward().expect_err("the graph is gone").to_string();
    assert!(again.contains("backward: the graph was freed by an earlier backward()"), "{again}");
    // What somebody still holds can be read.
    assert_eq!(square.to_vec::<f32>().unwrap(), [1.0, 4.0]);
    (&w * 2.0).sum(()).backward().unwrap();
    assert_eq!(w.grad().unwrap().to_vec::<f32>().unwrap(), [10.0, 18.0], "gradients add up");
    w.remove_hook(hook);
    w.zero_grad();
    w.register_hook(|gradient| Some(gradient * 10.0));
    (&w * 2.0).sum(()).backward().unwrap();
    assert_eq!(w.grad().unwrap().to_vec::<f32>().unwrap(), [20.0, 20.0], "a hook may put another in its place");
    assert_eq!(on_w.load(Ordering::Relaxed), 2);
    assert!(
        w.sum(0)
            .relu()
            .unsqueeze(0)
            .expand(&[2])
            .backward()
            .expect_err("two")
            .to_string()
            .contains("[2] is not a single number")
    );
}

/// What optimizers do to one number, by the book.
struct Book {
    value: f64,
    first: f64,
    second: f64,
}

#[test]
fn optimizers_do_what_the_book_says() {
    type Make = fn(&[Variable]) -> Box<dyn Optimizer>;
    type Step = fn(&mut Book, f64, i32);
    let make: [(&str, Make, Step); 7] = [
        ("sgd", |v| Box::new(Sgd::new(v, 0.1)), |b, g, _| b.value -= 0.1 * g),
        (
            "momentum",
            |v| Box::new(Sgd::with_momentum(v, 0.1, 0.9, false)),
            |b, g, _| {
                b.first = 0.9 * b.first + g;
                b.value -= 0.1 * b.first;
            },
        ),
        (
            "nesterov",
            |v| Box::new(Sgd::with_momentum(v, 0.1, 0.9, true)),
            |b, g, _| {
                b.first = 0.9 * b.first + g;
                b.value -= 0.1 * (g + 0.9 * b.first);
            },
        ),
        (
            "adam",
            |v| Box::new(Adam::new(v, 0.1)),
            |b, g, t| {
                b.first = 0.9 * b.first + 0.1 * g;
                b.second = 0.999 * b.second + 0.001 * g * g;
                let (mean, square) = (b.first / (1.0 - 0.9_f64.powi(t)), b.second / (1.0 - 0.999_f64.powi(t)));
                b.value -= 0.1 * mean / (square.sqrt() + 1e-8);
            },
        ),
        (
            "adamw",
            |v| Box::new(AdamW::new(v, 0.1)),
            |b, g, t| {
                b.value -= 0.1 * 0.01 * b.value;
                b.first = 0.9 * b.first + 0.1 * g;
                b.second = 0.999 * b.second + 0.001 * g * g;
                let (mean, square) = (b.first / (1.0 - 0.9_f64.powi(t)), b.second / (1.0 - 0.999_f64.powi(t)));
                b.value -= 0.1 * mean / (square.sqrt() + 1e-8);
            },
        ),
        (
            "adagrad",
            |v| Box::new(AdaGrad::new(v, 0.1)),
            |b, g, _| {
                b.first += g * g;
                b.value -= 0.1 * g / (b.first.sqrt() + 1e-10);
            },
        ),
        (
            "rmsprop",
            |v| Box::new(RmsProp::new(v, 0.1)),
            |b, g, _| {
                b.first = 0.99 * b.first + 0.01 * g * g;
                b.value -= 0.1 * g / (b.first.sqrt() + 1e-8);
            },
        ),
    ];
    for (name, make, book) in make {
        let start = [1.5, -2.0, 0.25];
        let variable = Variable::new(&Tensor::from_slice(&start, &[3]));
        let mut optimizer = make(std::slice::from_ref(&variable));
        let mut books = start.map(|value| Book { value, first: 0.0, second: 0.0 });
        for step in 1..=12 {
            let w = variable.get();
            w.cos().sum(()).backward().unwrap();
            optimizer.step().unwrap();
            books.iter_mut().for_each(|own| book(own, -own.value.sin(), step));
            if step == 6 {
                // Saved and restored, it goes on as before.
                let state = optimizer.state();
                optimizer = make(std::slice::from_ref(&variable));
                optimizer.load_state(&state).unwrap();
            }
        }
        let found = variable.get().to_vec::<f64>().unwrap();
        let is_close = found.iter().zip(&books).all(|(found, book)| (found - book.value).abs() < 1e-9);
        assert!(is_close, "{name}: {found:?} and not {:?}", books.map(|book| book.value));
    }
}

#[test]
fn a_model_learns_and_its_second_step_makes_no_plan() {
    let x = Tensor::uniform(&[64, 8], 1, DType::F32);
    let truth = Tensor::normal(&[8, 1], 2, DType::F32);
    let y = x.matmul(&truth).tanh();
    let hidden = Variable::new(&(Tensor::normal(&[8, 16], 3, DType::F32) * 0.3));
    let bias = Variable::new(&Tensor::zeros(&[16], DType::F32));
    let out = Variable::new(&(Tensor::normal(&[16, 1], 4, DType::F32) * 0.3));
    let variables = [hidden, bias, out];
    let mut optimizer = Adam::new(&variables, 0.02);
    let (mut first, mut last, mut plans) = (0.0, 0.0, 0);
    for step in 0..200 {
        let [hidden, bias, out] = [0, 1, 2].map(|n: usize| variables[n].get());
        let guess = (x.matmul(&hidden) + bias).relu().matmul(&out);
        let loss = guess.mse_loss(&y);
        loss.backward().unwrap();
        clip_grad_value(&variables, 10.0);
        let norm = clip_grad_norm(&variables, 5.0).unwrap();
        assert!(norm.is_finite());
        // Rates may change: they are no part of a plan.
        optimizer.set_learning_rate(0.02 / (1.0 + f64::from(step) / 100.0));
        optimizer.step().unwrap();
        last = loss.item::<f32>().unwrap();
        match step {
            0 => first = last,
            4 => plans = plans_made(),
            _ => {}
        }
    }
    assert!(last < first / 20.0, "{first} became {last}");
    assert_eq!(plans_made(), plans, "plans that later steps made");
}

#[test]
fn modules_have_names_states_and_hooks() {
    let model = || {
        let options = tensor_wasm_tensor::Convolution::new(1, 1);
        nn::Sequential::new()
            .then(nn::Conv2d::new(1, 4, 3, options, 1))
            .then(nn::BatchNorm::new(4))
            .then(nn::function(Tensor::relu))
            .then(nn::Dropout::new(0.5, 5))
            .then(nn::function(|x| x.flatten(1)))
            .then(nn::Linear::new(4 * 36, 10, 2))
            .then(nn::LayerNorm::new(10))
            .then(nn::RmsNorm::new(10))
    };
    let (one, two) = (model(), model());
    let names: Vec<String> = one.state_dict().into_iter().map(|(name, _)| name).collect();
    let expected =
        "0.weight 0.bias 1.weight 1.bias 5.weight 5.bias 6.weight 6.bias 7.weight 1.running_mean 1.running_var";
    assert_eq!(names.join(" "), expected);
    let x = Tensor::normal(&[3, 1, 6, 6], 3, DType::F32);
    let mut optimizer = Adam::new(&one.parameters(), 0.01);
    for _ in 0..3 {
        one.forward(&x).square().mean(()).backward().unwrap();
        optimizer.step().unwrap();
    }
    let (trained, fresh) = (one.state_dict(), two.state_dict());
    let elements = |(_, tensor): &(String, Tensor)| tensor.to_vec::<f32>().unwrap();
    let changed = trained.iter().zip(&fresh).filter(|(a, b)| elements(a) != elements(b));
    assert_eq!(changed.count(), 11, "everything is trained, or runs along");
    two.load_state_dict(&one.state_dict()).unwrap();
    [&one, &two].into_iter().for_each(|model| model.set_training(false));
    let results = [&one, &two].map(|model| model.forward(&x).to_vec::<f32>().unwrap());
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], one.forward(&x).to_vec::<f32>().unwrap(), "nothing is left to chance");
    // What does not fit changes nothing and is named.
    let mut state = one.state_dict();
    state[4].1 = Tensor::zeros(&[2, 2], DType::F32);
    let wrong = two.load_state_dict(&state).expect_err("another shape").to_string();
    assert!(wrong.contains(r#""5.weight" is [144, 10] of f32, and [2, 2] of f32 is given"#), "{wrong}");
    state.remove(4);
    assert!(two.load_state_dict(&state).expect_err("missing").to_string().contains(r#"there is no "5.weight""#));
    assert_eq!(two.forward(&x).to_vec::<f32>().unwrap(), results[0]);
    // Hooks.
    let (forward, backward) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (f, b) = (forward.clone(), backward.clone());
    let hooked = nn::Hooked::new(nn::Linear::new(6, 2, 1))
        .on_forward(move |_, output| {
            f.fetch_add(output.shape()[1], Ordering::Relaxed);
        })
        .on_backward(move |gradient| {
            b.fetch_add(gradient.numel(), Ordering::Relaxed);
        });
    hooked.forward(&Tensor::ones(&[5, 6], DType::F32)).sum(()).backward().unwrap();
    assert_eq!((forward.load(Ordering::Relaxed), backward.load(Ordering::Relaxed)), (2, 10));
}

#[test]
fn cells_remember_and_learn() {
    // Whether there were more ones than zeros: nothing at the last step says so.
    let bits = Tensor::bernoulli(&[64, 9, 1], 0.5, 3).cast(DType::F32);
    let target = bits.sum([1, 2]).gt(4.5).cast(DType::F32).unsqueeze(1);
    let lstm = nn::Lstm::new(1, 12, 1);
    let gru = nn::Gru::new(1, 12, 2);
    let cells: [&dyn Module; 2] = [&lstm, &gru];
    for (name, cell) in ["lstm", "gru"].into_iter().zip(cells) {
        let head = nn::Linear::new(12, 1, 3);
        let mut optimizer = Adam::new(&[cell.parameters(), head.parameters()].concat(), 0.02);
        let mut losses = Vec::new();
        for _ in 0..60 {
            let last = cell.forward(&bits).narrow(1, 8, 1).squeeze(1);
            let loss = head.forward(&last).binary_cross_entropy(&target);
            loss.backward().unwrap();
            optimizer.step().unwrap();
            losses.push(loss.item::<f32>().unwrap());
        }
        assert!(losses[59] < losses[0] / 3.0, "{name}: {} became {}", losses[0], losses[59]);
    }
}

#[test]
fn what_is_made_from_nothing_can_be_stored_and_used() {
    let zeros = Tensor::zeros(&[3], DType::F32);
    let ones = &zeros + 1.0;
    Tensor::realize_all(&[&zeros, &ones]).unwrap();
    assert_eq!((zeros.to_vec::<f32>().unwrap(), ones.to_vec::<f32>().unwrap()), (vec![0.0; 3], vec![1.0; 3]));
    // A product needs a buffer of what others compute by themselves.
    let numbers = Tensor::arange(0, 4, 1, DType::F32).reshape(&[2, 2]);
    let (sum, product) = (&numbers + 1.0, Tensor::ones(&[2, 2], DType::F32).matmul(&Tensor::ones(&[2, 2], DType::F32)));
    let both = &sum + &product;
    Tensor::realize_all(&[&sum, &both, &numbers]).unwrap();
    assert_eq!(both.to_vec::<f32>().unwrap(), [3.0, 4.0, 5.0, 6.0]);
    let (w, b) = (Tensor::ones(&[2, 2], DType::F32).with_grad(), Tensor::zeros(&[2], DType::F32).with_grad());
    (numbers.matmul(&w) + &b).sum(()).backward().unwrap();
    assert_eq!(w.grad().unwrap().to_vec::<f32>().unwrap(), [2.0, 2.0, 4.0, 4.0]);
    assert_eq!(b.grad().unwrap().to_vec::<f32>().unwrap(), [2.0, 2.0]);
    let (x, y) = (Tensor::ones(&[3], DType::F32).with_grad(), Tensor::ones(&[3], DType::F32).with_grad());
    (x.sum(()) + (&y * &y).sum(())).backward().unwrap();
    assert_eq!(y.grad().unwrap().to_vec::<f32>().unwrap(), [2.0; 3]);
    // Matrices that lie upside down, and are wide enough to be read as they lie.
    let a = Tensor::uniform(&[4, 8], 1, DType::F32);
    let c = Tensor::uniform(&[8, 64], 2, DType::F32);
    let copied = Tensor::from_vec(c.flip(0).to_vec::<f32>().unwrap(), &[8, 64]);
    c.realize().unwrap();
    // A GPU's library takes only the second of them, and adds up in another order.
    let (there, copied) = (a.matmul(&c.flip(0)).to_f64().unwrap(), a.matmul(&copied).to_f64().unwrap());
    assert!(there.iter().zip(&copied).all(|(a, b)| (a - b).abs() < 1e-5 * b), "{there:?} {copied:?}");
    // A hook cannot put something of another shape in the place of a gradient.
    let y = x.reshape(&[3, 1]);
    y.register_hook(|_| Some(Tensor::zeros(&[1 << 20], DType::F32)));
    let refused = y.sum(()).backward().expect_err("another shape").to_string();
    assert!(refused.contains("a gradient of shape [3, 1] of f32 is needed"), "{refused}");
    // Half precision is the same, stored in between or not.
    let h = Tensor::full(&[1], 1.0 + 1.0 / 1024.0, DType::F16).with_grad();
    let most = (&h * &h).max(());
    most.realize().unwrap();
    assert!(grad(&most, &[&h]).unwrap()[0].to_f64().unwrap()[0].is_finite());
    // No elements, however many there would be.
    let nothing = Tensor::zeros(&[1 << 40, 0], DType::F32);
    assert!(nothing.to_f64().unwrap().is_empty() && nothing.cumsum(1).realize().is_ok());
    let large = 1_i64 << 53;
    assert_eq!(Tensor::arange(large, large + 1, 1, DType::I64).to_vec::<i64>().unwrap(), [large]);
    assert_eq!(Tensor::full(&[1], 1e10, DType::I32).to_vec::<i32>().unwrap(), [i32::MAX]);
    let choice = Tensor::from_slice(&[true, false], &[2]).where_(0.5, Tensor::ones(&[2], DType::F64));
    assert_eq!(choice.to_vec::<f64>().unwrap(), [0.5, 1.0]);
}

#[test]
fn kinks_ties_and_nans_do_what_the_guide_says() {
    let slope = |f: fn(&Tensor) -> Tensor, x: &[f64]| {
        let x = Tensor::from_slice(x, &[x.len()]).with_grad();
        grad(&f(&x).sum(()), &[&x]).unwrap().remove(0).to_vec::<f64>().unwrap()
    };
    assert_eq!(slope(|x| x.relu(), &[-1.0, 0.0, 1.0]), [0.0, 0.0, 1.0]);
    assert_eq!(slope(|x| x.abs(), &[-1.0, 0.0, 1.0]), [-1.0, 0.0, 1.0]);
    assert_eq!(slope(|x| x.max(()), &[2.0, 1.0, 2.0]), [0.5, 0.0, 0.5]);
    let x = Tensor::from_slice(&[1.0_f32, f32::NAN, 3.0, -2.0], &[4]);
    assert_eq!(x.argmax(0).item::<i64>().unwrap(), 1);
    assert_eq!(x.argmin(0).item::<i64>().unwrap(), 1);
    for is_descending in [false, true] {
        let sorted = x.sort(0, is_descending).to_vec::<f32>().unwrap();
        let nan = if is_descending { 0 } else { 3 };
        assert!(sorted[nan].is_nan() && sorted.iter().filter(|x| x.is_nan()).count() == 1, "{sorted:?}");
    }
    assert_eq!(Tensor::from_slice(&[200_u8, 100], &[2]).cumsum(0).to_vec::<i64>().unwrap(), [200, 300]);
}

#[test]
fn more_memory_than_there_is_is_an_error_and_loses_nothing() {
    let before = Tensor::ones(&[1000], DType::F32);
    before.realize().unwrap();
    // Twice what the machine has, which a system may well promise.
    let many = memory_limit() / 4 * 2;
    let error = (Tensor::ones(&[many], DType::F32) + 1.0).realize().expect_err("too much").to_string();
    let is_said = error.contains(&format!("no {} bytes of memory are to be had", many * 4));
    assert!(is_said || is_beyond_a_gpu(&error), "{error}");
    assert!(error.contains("tests/api.rs:"), "{error}");
    assert_eq!((&before + 1.0).sum(()).item::<f32>().unwrap(), 2000.0);
}

/// What NumPy printed for arrays, by `fixtures/make_printing.py`.
#[derive(serde::Deserialize)]
struct Printed {
    dtype: String,
    shape: Vec<usize>,
    bits: String,
    text: String,
}

#[test]
fn tensors_print_as_numpy_prints_arrays() {
    let cases: Vec<Printed> = serde_json::from_str(include_str!("fixtures/printing.json")).unwrap();
    assert!(cases.len() > 500);
    let mut wrong = Vec::new();
    for case in &cases {
        let count = case.shape.iter().product();
        let words: Vec<&str> = case.bits.split_whitespace().collect();
        let bits: Vec<i64> = words.iter().map(|word| word.parse().unwrap()).cycle().take(count).collect();
        let shape = &case.shape[..];
        let tensor = match &*case.dtype {
            "float64" => Tensor::from_vec(bits.iter().map(|x| f64::from_bits(x.cast_unsigned())).collect(), shape),
            "float32" => Tensor::from_vec(
                bits.iter().map(|x| f32::from_bits(i32::try_from(*x).unwrap().cast_unsigned())).collect(),
                shape,
            ),
            "float16" => {
                let half = |x: &i64| half::f16::from_bits(i16::try_from(*x).unwrap().cast_unsigned());
                Tensor::from_vec(bits.iter().map(half).collect(), shape)
            }
            "int64" => Tensor::from_vec(bits, shape),
            "int32" => Tensor::from_vec(bits.iter().map(|x| i32::try_from(*x).unwrap()).collect(), shape),
            "uint8" => Tensor::from_vec(bits.iter().map(|x| u8::try_from(*x).unwrap()).collect(), shape),
            "bool" => Tensor::from_vec(bits.iter().map(|x| *x != 0).collect(), shape),
            other => panic!("{other}"),
        };
        let found = tensor.to_string();
        if found != case.text {
            wrong.push(format!("{} of {shape:?}:\n{found}\nand not\n{}", case.dtype, case.text));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong[..wrong.len().min(8)].join("\n\n"));
    // A view prints as what it shows; halves of the other kind as few digits as say which they are.
    let view = Tensor::arange(0, 6, 1, DType::I32).reshape(&[2, 3]).t();
    assert_eq!(view.to_string(), "[[0 3]\n [1 4]\n [2 5]]");
    assert_eq!((Tensor::ones(&[2], DType::BF16) / 3.0).to_string(), "[0.334 0.334]");
    // What cannot be computed prints why, and saying what a tensor is computes nothing.
    let failed = Tensor::ones(&[2], DType::F32) + Tensor::ones(&[3], DType::F32);
    assert!(failed.to_string().starts_with("add: shapes [2] and [3] do not broadcast"), "{failed}");
    let before = plans_made();
    assert_eq!(format!("{:?}", Tensor::ones(&[2, 3], DType::F32) + 1.0), "Tensor([2, 3] of f32)");
    assert_eq!(plans_made(), before);
}

/// Bytes that a thread has allocated: now, and at most.
#[derive(Clone, Copy, Default)]
struct Held {
    now: usize,
    most: usize,
}

thread_local! {
    static HELD: Cell<Held> = const { Cell::new(Held { now: 0, most: 0 }) };
}

/// The allocator of the system, which counts.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn held(more: usize, less: usize) {
    let Held { now, most } = HELD.get();
    let peak = now + more;
    // What another thread has allocated may be freed here.
    HELD.set(Held { now: peak.saturating_sub(less), most: most.max(peak) });
}

#[expect(unsafe_code, reason = "an allocator has no other way to be one")]
// SAFETY: all of it is the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        held(layout.size(), 0);
        // SAFETY: as the caller has it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        held(0, layout.size());
        // SAFETY: as the caller has it.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        held(size, layout.size());
        // SAFETY: as the caller has it.
        unsafe { System.realloc(start, layout, size) }
    }
}

/// Reads a file of some format, and all of what it holds; returns whether it was one.
fn read_file(format: usize, file: &[u8]) -> bool {
    let one = |tensor: tensor_wasm_tensor::Result<Tensor>| tensor.map(|tensor| vec![tensor]);
    let table = io::CsvFormat { has_header: false, ..Default::default() };
    let tensors = match format {
        0 => one(io::read_npy(file)),
        1 => io::read_npz(file).map(|all| all.into_values().collect()),
        2 => io::read_safetensors(file).map(|all| all.tensors.into_values().collect()),
        3 => one(io::read_idx(file)),
        4 => one(io::read_csv(file, DType::F32, table)),
        _ => one(io::from_json(&String::from_utf8_lossy(file), DType::F64)),
    };
    tensors.is_ok_and(|tensors| {
        tensors.iter().for_each(|tensor| assert_eq!(tensor.to_f64().expect("it was read").len(), tensor.numel()));
        true
    })
}

/// One change, of those that are likely to hurt.
fn change(file: &mut Vec<u8>, random: &mut SmallRng) {
    if file.is_empty() {
        return;
    }
    let at = random.random_range(0..file.len());
    match random.random_range(0..8) {
        0 => file[at] ^= 1 << random.random_range(0..8),
        1 => file[at] = [0, 1, 0x7f, 0x80, 0xff, b'9', b'[', b'"'][random.random_range(0..8)],
        2 => file.truncate(at),
        3 => {
            let end = random.random_range(at..=file.len().min(at + 40));
            file.drain(at..end);
        }
        4 => {
            let end = random.random_range(at..=file.len().min(at + 40));
            let part = file[at..end].to_vec();
            file.splice(at..at, part);
        }
        5 => {
            let number: u64 =
                [0, 1, 1 << 31, u64::from(u32::MAX), 1 << 62, 1 << 63, u64::MAX][random.random_range(0..7)];
            let bytes = number.to_le_bytes();
            let count = [2, 4, 8][random.random_range(0..3)].min(file.len() - at);
            file[at..at + count].copy_from_slice(&bytes[..count]);
        }
        6 => file.extend_from_within(at..),
        // Digits become longer numbers.
        _ => {
            let digit = file[at..].iter().position(u8::is_ascii_digit).map_or(at, |more| at + more);
            file.splice(digit..digit, random.random::<u64>().to_string().into_bytes());
        }
    }
}

#[test]
fn files_that_chance_has_damaged_are_errors_and_take_no_more_memory_than_promised() {
    let (mut tensors, mut table) = (Vec::new(), Vec::new());
    let x = Tensor::uniform(&[3, 4], 1, DType::F32);
    let names = BTreeMap::from([("by".to_owned(), "chance".to_owned())]);
    io::write_safetensors(&mut tensors, [("a", x.clone()), ("b", x.gt(0.5)), ("c", x.cast(DType::BF16))], &names)
        .unwrap();
    io::write_csv(&mut table, &x).unwrap();
    let seeds: Vec<(usize, Vec<u8>)> = vec![
        (0, include_bytes!("fixtures/rows.npy").to_vec()),
        (0, include_bytes!("fixtures/columns.npy").to_vec()),
        (0, include_bytes!("fixtures/big.npy").to_vec()),
        (1, include_bytes!("fixtures/stored.npz").to_vec()),
        (1, include_bytes!("fixtures/deflated.npz").to_vec()),
        (2, tensors),
        (3, vec![0, 0, 11, 2, 0, 0, 0, 1, 0, 0, 0, 3, 7, 8, 9, 10, 11, 12]),
        (4, table),
        (5, io::to_json(&x).unwrap().into_bytes()),
    ];
    let mut random = SmallRng::seed_from_u64(7);
    let mut read = 0;
    let mut check = |format: usize, file: &[u8]| {
        let before = HELD.get().now;
        HELD.set(Held { now: before, most: before });
        read += usize::from(read_file(format, file));
        let took = HELD.get().most - before;
        let inflated = if format == 1 { usize::try_from(io::INFLATED_PER_BYTE_MAX).unwrap() } else { 0 };
        let most = file.len() * (io::READ_BYTES_PER_FILE_BYTE_MAX + inflated) + io::READ_BYTES_MIN;
        assert!(took <= most, "{took} bytes for {} of format {format}: {file:?}", file.len());
    };
    // As much as possible in as few bytes as possible.
    let entry = |n: usize| format!(r#""{n}":{{"dtype":"U8","shape":[],"data_offsets":[{n},{}]}}"#, n + 1);
    let header = format!("{{{}}}", (0..2000).map(entry).collect::<Vec<_>>().join(","));
    check(2, &[&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[7; 2000]].concat());
    let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{}0]"#, "0,".repeat(50_000));
    check(2, &[&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat());
    check(4, "0\n".repeat(50_000).as_bytes());
    check(4, "0,".repeat(50_000).as_bytes());
    check(5, format!("[{}0]", "0,".repeat(50_000)).as_bytes());
    for n in 0..10_000 {
        let (format, file) = &seeds[n % seeds.len()];
        let mut file = file.clone();
        (0..random.random_range(1..4)).for_each(|_| change(&mut file, &mut random));
        check(*format, &file);
    }
    // Some are none the worse for it, and most are.
    assert!((500..6000).contains(&read), "{read}");
}

#[test]
fn a_model_and_its_optimizer_go_on_from_files_as_if_nothing_had_been() {
    let folder = tempfile::tempdir().unwrap();
    let (weights, memory) = (folder.path().join("model.safetensors"), folder.path().join("optimizer.safetensors"));
    let make = |seed| {
        let first = nn::Sequential::new().then(nn::Linear::new(5, 8, seed));
        first.then(nn::function(Tensor::relu)).then(nn::Linear::new(8, 2, seed + 1))
    };
    let (x, y) = (Tensor::normal(&[16, 5], 1, DType::F32), Tensor::normal(&[16, 2], 2, DType::F32));
    let step = |model: &nn::Sequential, optimizer: &mut Adam| {
        (model.forward(&x) - &y).square().mean(()).backward().unwrap();
        optimizer.step().unwrap();
    };
    let model = make(3);
    let mut optimizer = Adam::new(&model.parameters(), 1e-2);
    (0..2).for_each(|_| step(&model, &mut optimizer));
    io::save_safetensors(&weights, model.state_dict()).unwrap();
    io::save_safetensors(&memory, optimizer.state()).unwrap();

    let other = make(30);
    let mut resumed = Adam::new(&other.parameters(), 1e-2);
    other.load_state_dict(&io::load_safetensors(&weights).unwrap().into_state()).unwrap();
    resumed.load_state(&io::load_safetensors(&memory).unwrap().into_state()).unwrap();
    for _ in 0..2 {
        step(&model, &mut optimizer);
        step(&other, &mut resumed);
        for ((name, a), (_, b)) in model.state_dict().iter().zip(other.state_dict()) {
            let bits = |x: &Tensor| x.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(a), bits(&b), "{name}");
        }
    }
}

#[test]
fn what_has_no_gradient_any_more_leaves_no_subnormal_numbers() {
    type Make = fn(&[Variable]) -> Box<dyn Optimizer>;
    let make: [Make; 3] = [
        |v| Box::new(Adam::new(v, 0.1)),
        |v| Box::new(Sgd::with_momentum(v, 0.1, 0.9, false)),
        |v| {
            let mut optimizer = RmsProp::new(v, 0.1);
            optimizer.alpha = 0.8;
            Box::new(optimizer)
        },
    ];
    for make in make {
        let variable = Variable::new(&Tensor::from_slice(&[1.5_f32, -2.0], &[2]));
        let mut optimizer = make(std::slice::from_ref(&variable));
        for step in 0..1_500 {
            (variable.get() * if step == 0 { 1.0 } else { 0.0 }).sum(()).backward().unwrap();
            optimizer.step().unwrap();
        }
        for (name, kept) in optimizer.state().iter().filter(|(name, _)| name != "steps") {
            let kept = kept.to_vec::<f32>().unwrap();
            assert!(kept.iter().all(|x| !x.is_subnormal() && x.abs() < 1.0), "{name}: {kept:?}");
        }
    }
}

#[test]
fn gradients_that_are_clipped_and_those_that_are_not_have_one_plan() {
    let variable = Variable::new(&Tensor::from_slice(&[3.0_f32, 4.0], &[2]));
    let mut optimizer = Sgd::new(std::slice::from_ref(&variable), 1.0);
    let mut plans = 0;
    for (step, most) in [100.0, 2.5, 100.0, 2.5].into_iter().enumerate() {
        variable.set(&Tensor::from_slice(&[3.0_f32, 4.0], &[2]));
        (variable.get().square().sum(()) * 0.5).backward().unwrap();
        assert_eq!(clip_grad_norm(std::slice::from_ref(&variable), most).unwrap(), 5.0);
        optimizer.step().unwrap();
        let expected = if most < 5.0 { [1.5, 2.0] } else { [0.0, 0.0] };
        assert_eq!(variable.get().to_vec::<f32>().unwrap(), expected);
        plans = if step == 0 { plans_made() } else { plans };
    }
    assert_eq!(plans_made(), plans, "plans that later steps made");
}

/// Trains a model as the examples do, a little, and returns the first loss and the mean of the last ones.
fn trained(
    name: &str,
    steps: u64,
    rate: f64,
    model: &dyn Module,
    loss: impl FnMut(u64) -> support::Outcome<Tensor>,
    judge: impl Fn() -> support::Outcome<support::training::Score>,
) -> (f64, f64) {
    let schedule = nn::Schedule::Constant(rate);
    let training = support::training::Training {
        name,
        batch: 1,
        epoch_steps: steps,
        schedule,
        norm_max: Some(1.0),
        precision: DType::F32,
        is_shown: false,
    };
    let mut optimizer = Adam::new(&model.parameters(), rate);
    let history = training.run(steps, &mut optimizer, &model.parameters(), loss, judge).expect("it trains");
    assert_eq!(history.later_plans, 0, "{name}: plans that later steps made");
    assert_eq!(history.scores.len(), 2, "{name}: before and after");
    let svg = history.chart(name).svg();
    assert!(svg.contains("<polyline") && svg.contains(">training<") && svg.contains(">validation<"), "{svg}");
    (history.losses[0], history.last_loss())
}

#[test]
fn perceptrons_and_convolutions_learn_digits() {
    use support::digits::{Batches, Digits};
    let (digits, others) = (Digits::drawn(640, 1), Digits::drawn(100, 2));
    for (name, model, size, steps, factor) in
        [("mlp", support::models::mlp(1), 64, 60, 1.7), ("cnn", support::models::cnn(1), 32, 30, 1.7)]
    {
        let mut batches = Batches::new(&digits, size, 3);
        let loss = |_| {
            let (pixels, labels) = batches.next();
            Ok(model.forward(&pixels).cross_entropy(&labels))
        };
        let (first, last) = trained(name, steps, 5e-3, &model, loss, || others.judge(&model));
        assert!(last < first / factor, "{name}: {first} became {last}");
        let accuracy = others.judge(&model).unwrap().accuracy.unwrap();
        assert!(accuracy > 0.4, "{name}: {accuracy}");
    }
}

#[test]
fn a_network_learns_a_sine() {
    let (points, others) = (support::points::Points::noisy(128, 1), support::points::Points::noisy(128, 2));
    let model = support::models::sine(1);
    let judge = || {
        let loss = no_grad(|| model.forward(&others.x)).mse_loss(&others.y);
        Ok(support::training::Score { loss: f64::from(loss.item::<f32>()?), accuracy: None })
    };
    let (first, last) = trained("sine", 300, 1e-2, &model, |_| Ok(model.forward(&points.x).mse_loss(&points.y)), judge);
    assert!(last < first / 4.0, "{first} became {last}");
}

#[test]
fn language_models_learn_letters() {
    use rand::SeedableRng;
    use support::models::{CharLstm, Transformer};
    let (batch, length) = (4, 24);
    let prose = "The lamp is lit at night, and put out in the morning. ".repeat(20);
    let text = support::text::Text::new(&prose, length).unwrap();
    let (lstm, transformer) = (CharLstm::new(text.letters(), 1), Transformer::new(text.letters(), 1));
    let models: [(&str, &dyn Module, f64); 2] = [("char_lstm", &lstm, 1e-2), ("transformer", &transformer, 3e-3)];
    for (name, model, rate) in models {
        let mut random = rand::rngs::StdRng::seed_from_u64(1);
        let loss = |_| {
            let (input, target) = text.batch(&mut random, batch, length);
            Ok(model.forward(&input).reshape(&[-1, text.letters().cast_signed()]).cross_entropy(&target))
        };
        let (first, last) = trained(name, 60, rate, model, loss, || text.judge(model, batch, length));
        assert!(last < first / 2.0, "{name}: {first} became {last}");
        // What comes later changes nothing of what is guessed before.
        let letters = [1_i64, 2, 3, 4, 5, 6];
        let of = |letters: &[i64]| {
            let logits = no_grad(|| model.forward(&Tensor::from_slice(letters, &[1, letters.len()])));
            logits.narrow(1, 0, 5).to_vec::<f32>().unwrap()
        };
        let other = [1_i64, 2, 3, 4, 5, 0];
        assert_eq!(of(&letters), of(&other), "{name}");
    }
}

#[test]
fn examples_say_what_is_wrong_with_options_and_files() {
    use support::digits::Digits;
    use support::options::{Command, Flag, Parsed};
    const FLAGS: &[Flag] = &[Flag { name: "text", value: "FILE", about: "what is learned" }];
    let command = Command { name: "name", about: "Does something.", steps: 7, flags: FLAGS };
    let parse = |line: &str| command.parse(line.split_whitespace().map(str::to_owned));
    let Ok(Parsed::Options(options)) = parse("--steps 3 --seed=9 --text a.txt") else { panic!("these are right") };
    assert_eq!((options.steps, options.seed, options.get("text")), (3, 9, Some("a.txt")));
    assert_eq!(options.out, std::path::Path::new("target/examples-out"));
    assert!(matches!(parse("--steps 3 --help"), Ok(Parsed::Help)));
    assert!(command.usage().contains("--steps N              steps of training (7)"), "{}", command.usage());
    for (line, expected) in [
        (
            "--step 3",
            "there is no option --step; there are --text, --steps, --seed, --out, --save, --save-dtype, --precision, --device and --help",
        ),
        ("--steps", "--steps needs a value: --steps N"),
        ("--steps many", "--steps takes a whole number, not \"many\""),
        ("--steps 0", "--steps is at least 1"),
        ("--seed 1 --seed 2", "--seed is given twice"),
        ("digits", "\"digits\" is no option; all arguments are options"),
    ] {
        assert_eq!(parse(line).expect_err(line), expected);
    }
    let folder = std::env::temp_dir().join(format!("tensor-wasm-idx-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, sizes: &[u32], data: &[u8]| {
        let head = [0x0800 + u32::try_from(sizes.len()).unwrap()].into_iter().chain(sizes.iter().copied());
        let bytes: Vec<u8> = head.flat_map(u32::to_be_bytes).chain(data.iter().copied()).collect();
        std::fs::write(folder.join(name), bytes).unwrap();
        folder.join(name)
    };
    let images = write("images", &[2, 28, 28], &[255; 2 * 784]);
    let labels = write("labels", &[2], &[3, 9]);
    assert_eq!(Digits::read(&images, &labels).unwrap().count(), 2);
    let short = write("short", &[3], &[3, 9]);
    let small = write("small", &[2, 2, 2], &[0; 8]);
    let high = write("high", &[2], &[3, 10]);
    let packed = folder.join("packed");
    std::fs::write(&packed, [0x1f, 0x8b, 8]).unwrap();
    for (images, labels, expected) in [
        (&images, &short, "has 2 bytes for sizes [3]"),
        (&small, &labels, "pictures of 2 × 2, not 28 × 28"),
        (&labels, &labels, "is no IDX file of bytes with 3 axes: it does not begin with 0x00000803"),
        (&images, &high, "10 is no digit"),
        (&packed, &labels, "unpack it with gunzip"),
        (&folder, &labels, "directory"),
    ] {
        let message = Digits::read(images, labels).err().map(|why| why.to_string()).unwrap_or_default();
        assert!(message.contains(expected), "{message}\nand not\n{expected}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
