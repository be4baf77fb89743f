//! The library as its users see it.

use tensor_wasm_tensor::{DType, Mode, Tensor, grad, no_grad, set_threads};

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
    for (tensor, expected) in [
        (&a + &b, "add: shapes [2, 3] and [4] do not broadcast"),
        (&a * &whole, "mul: operands are f32 and i64; make them the same with .cast()"),
        (a.sum(2), "sum: axis 2 of a tensor of shape [2, 3]: there are axes 0 to 1, and from the end -1 to -2"),
        (a.sum([0, -2]), "sum: axis -2 is named twice"),
        (a.reshape(&[4, -1]), "reshape: 6 elements of shape [2, 3] cannot have shape [4, -1]"),
        (a.matmul(&b), "matmul: shape [4, 1], and […, 3, n] for the right operand is needed"),
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
    ] {
        let message = message(&tensor);
        assert!(message.contains(expected), "{message}\nand not\n{expected}");
        assert!(message.contains("tests/api.rs:"), "{message}");
        // Whatever is made of it says the same.
        let later = (tensor.relu() * 2.0).sum(());
        assert_eq!(later.item::<f32>().expect_err("still").to_string(), message);
    }
    assert!(a.item::<f32>().expect_err("six").to_string().contains("[2, 3] is not a single number"));
    assert!(a.to_vec::<i32>().expect_err("f32").to_string().contains("elements are f32, and i32 was asked for"));
    assert!(
        Tensor::full(&[1 << 50], 1, DType::F32)
            .to_vec::<f32>()
            .expect_err("memory")
            .to_string()
            .contains("bytes of memory")
    );
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
    Tensor::realize_all(&[&eager], Mode::Eager).unwrap();
    assert_eq!(fused.to_vec::<f32>().unwrap(), eager.to_vec::<f32>().unwrap());
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
    for n in 0..1_000_000 {
        x = x + 1.0;
        if n % 10_000 == 0 {
            x.realize().unwrap();
        }
    }
    assert_eq!(x.to_vec::<f32>().unwrap(), [1e6; 4]);
    let mut y = Tensor::zeros(&[4], DType::F32).with_grad();
    for _ in 0..1_000_000 {
        y = y + 1.0;
    }
    drop(y);
}
