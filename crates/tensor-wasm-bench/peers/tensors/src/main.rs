//! ndarray, candle and burn, measured on request: a line `NAME MILLISECONDS` on stdin is answered by a line with the
//! median time of one run in nanoseconds, or `none` where the library has no such thing. `compare tensors` starts this.

use std::collections::HashMap;
use std::hint::black_box;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

type Rows = HashMap<String, Box<dyn FnMut()>>;

fn add<T>(rows: &mut Rows, name: &str, mut run: impl FnMut() -> T + 'static) {
    rows.insert(name.to_owned(), Box::new(move || drop(black_box(run()))));
}

fn ndarray_rows() -> Rows {
    use ndarray::{Array2, Axis, Zip};
    let mut rows = Rows::new();
    let make = |r: usize, c: usize, seed: usize| {
        Array2::from_shape_fn((r, c), |(i, j)| ((i * 31 + j * 17 + seed * 7) % 97) as f32 / 97.0)
    };
    for n in [256, 1024, 4096] {
        let (a, b) = (make(n, n, 1), make(n, n, 2));
        let two = |rows: &mut Rows, name: &str, f: fn(&Array2<f32>, &Array2<f32>) -> Array2<f32>| {
            let (a, b) = (a.clone(), b.clone());
            add(rows, &format!("{name}/{n}"), move || f(&a, &b));
        };
        two(&mut rows, "matmul", |a, b| a.dot(b));
        two(&mut rows, "add", |a, b| Zip::from(a).and(b).par_map_collect(|a, b| a + b));
        two(&mut rows, "sub", |a, b| Zip::from(a).and(b).par_map_collect(|a, b| a - b));
        two(&mut rows, "mul", |a, b| Zip::from(a).and(b).par_map_collect(|a, b| a * b));
        two(&mut rows, "div", |a, b| Zip::from(a).and(b).par_map_collect(|a, b| a / b));
        two(&mut rows, "relu", |a, _| Zip::from(a).par_map_collect(|a| a.max(0.0)));
        two(&mut rows, "transpose", |a, _| a.t().as_standard_layout().into_owned());
        let one = |rows: &mut Rows, name: &str, f: fn(&Array2<f32>) -> f32| {
            let a = a.clone();
            add(rows, &format!("{name}/{n}"), move || f(&a));
        };
        one(&mut rows, "sum", |a| a.sum());
        one(&mut rows, "mean", |a| a.mean().unwrap_or(0.0));
        for axis in [0, 1] {
            let (x, y) = (a.clone(), a.clone());
            add(&mut rows, &format!("sum_axis{axis}/{n}"), move || x.sum_axis(Axis(axis)));
            add(&mut rows, &format!("mean_axis{axis}/{n}"), move || y.mean_axis(Axis(axis)));
        }
    }
    let (a, b) = (make(4096, 4096, 1), make(4096, 4096, 2));
    add(&mut rows, "chain6/4096", move || {
        Zip::from(&a).and(&b).par_map_collect(|a, b| ((a * 2.0 + b) * a - 1.0).max(0.0) * 0.5)
    });
    let (x, w) = (make(64, 784, 1), make(784, 128, 2));
    add(&mut rows, "matmul/64x784x128", move || x.dot(&w));
    rows
}

fn candle_rows() -> Rows {
    use candle_core::{Device, Result, Tensor};
    let mut rows = Rows::new();
    let device = Device::Cpu;
    let random = |sizes: &[usize]| Tensor::rand(0_f32, 1_f32, sizes, &device).expect("candle makes tensors");
    fn row(rows: &mut Rows, name: &str, mut run: impl FnMut() -> Result<Tensor> + 'static) {
        add(rows, name, move || run().expect("candle computes"));
    }
    for n in [256, 1024, 4096] {
        let (a, b, c) = (random(&[n, n]), random(&[n, n]), random(&[n, 10]));
        let two = |rows: &mut Rows, name: &str, f: fn(&Tensor, &Tensor) -> Result<Tensor>| {
            let (a, b) = (a.clone(), b.clone());
            row(rows, &format!("{name}/{n}"), move || f(&a, &b));
        };
        two(&mut rows, "matmul", |a, b| a.matmul(b));
        two(&mut rows, "add", |a, b| a + b);
        two(&mut rows, "sub", |a, b| a - b);
        two(&mut rows, "mul", |a, b| a * b);
        two(&mut rows, "div", |a, b| a / b);
        two(&mut rows, "relu", |a, _| a.relu());
        two(&mut rows, "transpose", |a, _| a.t()?.contiguous());
        two(&mut rows, "sum", |a, _| a.sum_all());
        two(&mut rows, "mean", |a, _| a.mean_all());
        two(&mut rows, "sum_axis0", |a, _| a.sum(0));
        two(&mut rows, "sum_axis1", |a, _| a.sum(1));
        two(&mut rows, "mean_axis0", |a, _| a.mean(0));
        two(&mut rows, "mean_axis1", |a, _| a.mean(1));
        row(&mut rows, &format!("log_softmax/{n}x10"), move || candle_nn::ops::log_softmax(&c, 1));
    }
    let (a, b) = (random(&[4096, 4096]), random(&[4096, 4096]));
    row(&mut rows, "chain6/4096", move || ((((a.affine(2.0, 0.0)? + &b)? * &a)?.affine(1.0, -1.0))?.relu()?).affine(0.5, 0.0));
    let (x, w) = (random(&[64, 784]), random(&[784, 128]));
    row(&mut rows, "matmul/64x784x128", move || x.matmul(&w));
    let (images, filters) = (random(&[32, 1, 28, 28]), random(&[16, 1, 5, 5]));
    row(&mut rows, "conv2d/32x1x28x28", move || images.conv2d(&filters, 0, 1, 1, 1));
    let maps = random(&[32, 16, 24, 24]);
    row(&mut rows, "max_pool2d/32x16x24x24", move || maps.max_pool2d(2));
    let wide = random(&[4096, 1024]);
    let (other, scale, shift) = (wide.clone(), random(&[1024]), random(&[1024]));
    row(&mut rows, "softmax/4096x1024", move || candle_nn::ops::softmax_last_dim(&wide));
    row(&mut rows, "layer_norm/4096x1024", move || candle_nn::ops::layer_norm(&other, &scale, &shift, 1e-5));
    let one = Tensor::new(1_f32, &device).expect("candle makes tensors");
    add(&mut rows, "scalar", move || one.affine(1.0, 1.0).and_then(|x| x.to_scalar::<f32>()));
    rows
}

fn burn_rows() -> Rows {
    use burn::tensor::module::{conv2d, layer_norm, max_pool2d};
    use burn::tensor::ops::{ConvOptions, MaxPoolOptions};
    use burn::tensor::{Device, Distribution, Tensor, activation};
    let mut rows = Rows::new();
    let device = Device::flex();
    let matrix = |r: usize, c: usize| Tensor::<2>::random([r, c], Distribution::Default, &device);
    for n in [256, 1024, 4096] {
        let (a, b, c) = (matrix(n, n), matrix(n, n), matrix(n, 10));
        let two = |rows: &mut Rows, name: &str, f: fn(Tensor<2>, Tensor<2>) -> Tensor<2>| {
            let (a, b) = (a.clone(), b.clone());
            add(rows, &format!("{name}/{n}"), move || f(a.clone(), b.clone()));
        };
        two(&mut rows, "matmul", |a, b| a.matmul(b));
        two(&mut rows, "add", |a, b| a + b);
        two(&mut rows, "sub", |a, b| a - b);
        two(&mut rows, "mul", |a, b| a * b);
        two(&mut rows, "div", |a, b| a / b);
        two(&mut rows, "relu", |a, _| activation::relu(a));
        two(&mut rows, "sum_axis0", |a, _| a.sum_dim(0));
        two(&mut rows, "sum_axis1", |a, _| a.sum_dim(1));
        two(&mut rows, "mean_axis0", |a, _| a.mean_dim(0));
        two(&mut rows, "mean_axis1", |a, _| a.mean_dim(1));
        let (x, y) = (a.clone(), a.clone());
        add(&mut rows, &format!("sum/{n}"), move || x.clone().sum());
        add(&mut rows, &format!("mean/{n}"), move || y.clone().mean());
        add(&mut rows, &format!("log_softmax/{n}x10"), move || activation::log_softmax(c.clone(), 1));
    }
    let (a, b) = (matrix(4096, 4096), matrix(4096, 4096));
    add(&mut rows, "chain6/4096", move || activation::relu((a.clone() * 2.0 + b.clone()) * a.clone() - 1.0) * 0.5);
    let (x, w) = (matrix(64, 784), matrix(784, 128));
    add(&mut rows, "matmul/64x784x128", move || x.clone().matmul(w.clone()));
    let images = Tensor::<4>::random([32, 1, 28, 28], Distribution::Default, &device);
    let filters = Tensor::<4>::random([16, 1, 5, 5], Distribution::Default, &device);
    let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
    add(&mut rows, "conv2d/32x1x28x28", move || conv2d(images.clone(), filters.clone(), None, options.clone()));
    let maps = Tensor::<4>::random([32, 16, 24, 24], Distribution::Default, &device);
    add(&mut rows, "max_pool2d/32x16x24x24", move || {
        max_pool2d(maps.clone(), MaxPoolOptions::new([2, 2]))
    });
    let wide = matrix(4096, 1024);
    let (other, scale) = (wide.clone(), Tensor::<1>::ones([1024], &device));
    add(&mut rows, "softmax/4096x1024", move || activation::softmax(wide.clone(), 1));
    add(&mut rows, "layer_norm/4096x1024", move || layer_norm(other.clone(), scale.clone(), None, 1e-5));
    let one = Tensor::<1>::from_floats([1.0], &device);
    add(&mut rows, "scalar", move || (one.clone() + 1.0).into_scalar::<f32>());
    rows
}

fn median(run: &mut dyn FnMut(), slice: Duration) -> u128 {
    run();
    let mut times = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < slice || times.len() < 3 {
        let one = Instant::now();
        run();
        times.push(one.elapsed().as_nanos());
    }
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    let which = std::env::args().nth(1).unwrap_or_default();
    let make = match which.as_str() {
        "ndarray" => ndarray_rows,
        "candle" => candle_rows,
        "burn" => burn_rows,
        other => panic!("{other:?} is none of ndarray, candle, burn"),
    };
    let (mut rows, mut last) = (make(), String::new());
    let answer = |text: String| {
        println!("{text}");
        let _ = std::io::stdout().flush();
    };
    answer("ready".to_owned());
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let (name, slice) = line.split_once(' ').unwrap_or((&line, "100"));
        let slice = Duration::from_millis(slice.parse().unwrap_or(100));
        // Fresh memory for each row: `compare` says why.
        if name != last && rows.contains_key(name) {
            rows.clear();
            rows = make();
            last = name.to_owned();
        }
        answer(rows.get_mut(name).map_or("none".to_owned(), |run| median(run, slice).to_string()));
    }
}
