//! Tensor operations by themselves: from a graph to a value, in single precision, on all cores.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use tensor_wasm_tensor::{Convolution, DType, Tensor};

fn random(sizes: &[usize], seed: u64) -> Tensor {
    let tensor = Tensor::uniform(sizes, seed, DType::F32);
    tensor.realize().expect("numbers can be made");
    tensor
}

/// Measures what making and computing a tensor takes.
fn measure(criterion: &mut Criterion, group: &str, id: &str, make: impl Fn() -> Tensor) {
    let computed = || {
        let tensor = make();
        tensor.realize().expect("it can be computed");
        tensor
    };
    assert_eq!(computed().to_f64().expect("it can be read").len(), make().numel());
    let mut group = criterion.benchmark_group(group);
    group.sample_size(20);
    group.bench_function(BenchmarkId::from_parameter(id), |bencher| bencher.iter(|| black_box(computed())));
    group.finish();
}

fn tensors(criterion: &mut Criterion) {
    for n in [256, 1024, 4096] {
        let id = n.to_string();
        let (a, b) = (random(&[n, n], 1), random(&[n, n], 2));
        measure(criterion, "matmul", &id, || a.matmul(&b));
        measure(criterion, "transpose", &id, || a.t().mul(1.0));
        measure(criterion, "add", &id, || a.add(&b));
        measure(criterion, "mul", &id, || a.mul(&b));
        measure(criterion, "sub", &id, || a.sub(&b));
        measure(criterion, "div", &id, || a.div(&b));
        measure(criterion, "relu", &id, || a.relu());
        measure(criterion, "sum", &id, || a.sum(()));
        measure(criterion, "mean", &id, || a.mean(()));
        measure(criterion, "sum_axis0", &id, || a.sum(0));
        measure(criterion, "mean_axis0", &id, || a.mean(0));
        let c = random(&[n, 10], 3);
        measure(criterion, "log_softmax", &format!("{n}x10"), || c.log_softmax(1));
    }
    let (images, filters) = (random(&[32, 1, 28, 28], 4), random(&[16, 1, 5, 5], 5));
    measure(criterion, "conv2d", "32x1x28x28", || images.conv2d(&filters, Convolution::default()));
    let maps = random(&[32, 16, 24, 24], 6);
    measure(criterion, "max_pool2d", "32x16x24x24", || maps.max_pool2d(2));
    let one = random(&[], 7);
    measure(criterion, "scalar", "operator", || &one + 1.0);
    measure(criterion, "scalar", "method", || one.add(1.0));
}

criterion_group!(benches, tensors);
criterion_main!(benches);
