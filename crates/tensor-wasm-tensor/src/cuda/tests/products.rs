//! What a device's library is told of that which follows a product, and what comes of it.

use super::*;

/// The default device if it is a GPU, whose library then does it; else one that is emulated.
fn with_library() -> Place {
    match crate::device() {
        found @ Place::Cuda(_) => found,
        _ => WITH_LIBRARY.clone(),
    }
}

/// Elements on a CPU, whatever the default is.
fn here(sizes: &[usize], seed: u64, dtype: DType) -> Tensor {
    with_device(&Place::Cpu, || normal(sizes, seed, dtype))
}

/// What a device makes of a graph, whose leaves are on a CPU, is what that makes of it.
fn same_as_here(device: &Place, what: &str, tolerance: f64, make: &dyn Fn() -> Tensor) {
    let expected = with_device(&Place::Cpu, || make().to_f64().unwrap());
    let found = with_device(device, || make().to_f64().unwrap());
    assert_eq!(expected.len(), found.len(), "{what}");
    let wrong = expected.iter().zip(&found).position(|(a, b)| !is_close(*a, *b, tolerance));
    assert!(wrong.is_none(), "{what}: {:?}", wrong.map(|at| (at, expected[at], found[at])));
}

#[test]
fn the_library_is_told_of_all_that_follows_or_of_nothing() {
    let done: Arc<Mutex<Vec<Product>>> = Arc::default();
    let opened =
        Device::open(&emulated_with(Emulated { products: Some(done.clone()), ..Emulated::default() })).unwrap();
    let device = Place::Cuda(CudaDevice::of(opened, "emulated").unwrap());
    // What is done by the library: whether a bias and a residual are added, and the activation; none if by a kernel.
    type Told = Option<(bool, bool, ProductEpilogue)>;
    let check = |what: &str, dtype: DType, told: Told, make: &dyn Fn() -> Tensor| {
        done.lock().clear();
        let tolerance = if dtype.size() == 2 { 3e-2 } else { 2e-6 };
        same_as_here(&device, what, tolerance, make);
        let product = done.lock().pop().unwrap();
        let (bias, residual, epilogue) = told.unwrap_or((false, false, ProductEpilogue::None));
        let found = (product.has_bias, product.has_residual, product.epilogue);
        assert_eq!(found, (bias, residual, epilogue), "{what} {dtype}");
        let explained = with_device(&device, || make().explain().unwrap()).kernels;
        let launches: Vec<String> = explained.into_iter().filter_map(|kernel| kernel.launches).flatten().collect();
        assert_eq!(launches.len() == 1, told.is_some(), "{what} {dtype}: {launches:?}");
    };
    let (none, relu, gelu) = (ProductEpilogue::None, ProductEpilogue::Relu, ProductEpilogue::Gelu);
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let of = |sizes: &[usize], seed: u64| here(sizes, seed, dtype);
        let (x, y, z) = (of(&[12, 20], 1), of(&[20, 16], 2), of(&[16, 12], 3));
        let (bias, other, wide) = (of(&[16], 4), of(&[12, 16], 5), of(&[12, 40], 6));
        let rows = of(&[12, 1], 7);
        let long = of(&[600], 8);
        let product = || x.matmul(&y);
        check("bias", dtype, Some((true, false, none)), &|| product() + &bias);
        check("relu", dtype, Some((false, false, relu)), &|| product().relu());
        check("bias and relu", dtype, Some((true, false, relu)), &|| (&bias + product()).relu());
        check("relu the other way", dtype, Some((true, false, relu)), &|| {
            Tensor::full(&[12, 16], 0.0, dtype).maximum(&(product() + &bias))
        });
        check("residual", dtype, Some((false, true, none)), &|| product() + &other);
        check("residual and relu", dtype, Some((false, true, relu)), &|| (&other + product()).relu());
        check("all", dtype, Some((true, true, relu)), &|| (product() + &bias + &other).relu());
        check("in another order", dtype, Some((true, true, none)), &|| &other + (product() + &bias));
        check("and in one more", dtype, Some((true, true, none)), &|| product() + (&bias + &other));
        let approximate = Some((true, false, gelu)).filter(|_| dtype.size() == 2);
        check("approximate gelu", dtype, approximate, &|| (product() + &bias).gelu_approximate());
        // Parts of buffers that the library can read, and others.
        let part = |from: usize, len: usize| long.narrow(0, from, len);
        check("bias from a chunk on", dtype, Some((true, false, none)), &|| product() + part(8, 16));
        check("residual from a chunk on", dtype, Some((false, true, none)), &|| {
            product() + part(64, 192).reshape(&[12, 16])
        });
        check("bias from anywhere on", dtype, None, &|| product() + part(1, 16));
        check("residual from anywhere on", dtype, None, &|| product() + part(1, 192).reshape(&[12, 16]));
        // What means something else, or is more than it does.
        check("exact gelu", dtype, None, &|| (product() + &bias).gelu());
        check("not zero", dtype, None, &|| product().maximum(0.5));
        check("the smaller", dtype, None, &|| product().minimum(0));
        check("residual after relu", dtype, None, &|| product().relu() + &other);
        check("two biases", dtype, None, &|| product() + &bias + long.narrow(0, 16, 16));
        check("twice", dtype, None, &|| {
            let product = product();
            &product + &product
        });
        check("scaled", dtype, None, &|| product() * 2.0 + &bias);
        check("less", dtype, None, &|| &other - product());
        check("turned", dtype, None, &|| product() + z.t());
        check("rows apart", dtype, None, &|| product() + wide.narrow(1, 0, 16));
        check("a number for each row", dtype, None, &|| product() + &rows);
        // The same for many, one after the other or as one.
        let (many, each) = (of(&[3, 12, 20], 9), of(&[3, 20, 16], 10));
        let all = of(&[3, 12, 16], 11);
        check("batches", dtype, Some((true, true, relu)), &|| (many.matmul(&each) + &all + &bias).relu());
        check("all rows at once", dtype, Some((true, true, relu)), &|| (many.matmul(&y) + &all + &bias).relu());
        check("one for all of them", dtype, None, &|| many.matmul(&each) + &other);
    }
}

/// A plan is the same whatever its numbers are, and a rectifier is the larger of two, of which one is zero.
#[test]
fn a_number_that_changes_is_no_activation() {
    let done: Arc<Mutex<Vec<Product>>> = Arc::default();
    let opened =
        Device::open(&emulated_with(Emulated { products: Some(done.clone()), ..Emulated::default() })).unwrap();
    let device = Place::Cuda(CudaDevice::of(opened, "emulated").unwrap());
    let (x, y) = (here(&[13, 22], 1, DType::F32), here(&[22, 18], 2, DType::F32));
    let before = crate::plans_made();
    for number in [0.0, 0.0, 0.25, 0.0, -0.5] {
        let make = || x.matmul(&y).maximum(number);
        let found = with_device(&device, || make().to_f64().unwrap());
        let expected = with_device(&Place::Cpu, || x.matmul(&y).to_f64().unwrap());
        let is_right = |(a, b): (&f64, &f64)| is_close(a.max(number), *b, 2e-6);
        assert!(expected.iter().zip(&found).all(is_right), "{number}: {expected:?} {found:?}");
    }
    let epilogues: Vec<ProductEpilogue> = done.lock().iter().map(|product| product.epilogue).collect();
    let (none, relu) = (ProductEpilogue::None, ProductEpilogue::Relu);
    assert_eq!(epilogues, [relu, relu, none, none, none], "what is not sure is not asked for again");
    assert_eq!(crate::plans_made() - before, 2, "the product alone is another");
}

#[test]
fn explaining_says_what_is_done_on_the_way() {
    let of = |sizes: &[usize], dtype: DType| here(sizes, 3, dtype);
    let by = |dtype: DType, after: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Tensor| {
        let (x, bias, other) = (of(&[12, 12], dtype), of(&[12], dtype), of(&[12, 12], dtype));
        product_by(&WITH_LIBRARY, &|| after(&x.matmul(&x), &bias, &other))
    };
    assert_eq!(by(DType::F32, &|product, _, _| product.relu()), "cuBLASLt, with relu");
    assert_eq!(by(DType::F32, &|product, bias, _| (product + bias).relu()), "cuBLASLt, with the bias and relu");
    let all = by(DType::BF16, &|product, bias, other| (product + bias + other).gelu_approximate());
    assert_eq!(all, "cuBLASLt in bf16, with the bias, the residual and gelu_approximate");
    assert_eq!(by(DType::F32, &|product, bias, _| (product + bias).gelu()), "cuBLASLt");
}

/// On a GPU, if that is the default device, and else emulated: what the library does is what a CPU does.
#[test]
fn what_the_library_does_on_the_way_is_as_on_a_cpu() {
    let device = with_library();
    let is_emulated = matches!(&device, Place::Cuda(cuda) if cuda.name() == "emulated");
    let mut sizes = vec![(33, 40, 48), (17, 24, 31)];
    if !is_emulated {
        sizes.extend([(256, 512, 384), (1000, 72, 136), (130, 2048, 8)]);
    }
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for (m, k, n) in sizes.iter().copied() {
            // Small enough that sums are not, in the type's own precision.
            let of = |sizes: &[usize], seed: u64| {
                with_device(&Place::Cpu, || {
                    let made = (Tensor::normal(sizes, seed, DType::F32) * (1.0 / (k as f64).sqrt().sqrt())).cast(dtype);
                    made.realize().unwrap();
                    made
                })
            };
            let (x, y, z) = (of(&[m, k], 1), of(&[k, n], 2), of(&[n, k], 3));
            let (bias, other) = (of(&[n], 4), of(&[m, n], 5));
            let cases: [(&str, &dyn Fn() -> Tensor); 8] = [
                ("relu", &|| x.matmul(&y).relu()),
                ("bias", &|| x.matmul(&y) + &bias),
                ("bias and relu", &|| (x.matmul(&z.t()) + &bias).relu()),
                ("residual", &|| x.matmul(&y) + &other),
                ("residual and relu", &|| (x.matmul(&z.t()) + &other).relu()),
                ("all", &|| (x.matmul(&y) + &bias + &other).relu()),
                ("gelu", &|| (x.matmul(&y) + &bias).gelu()),
                ("approximate gelu", &|| (x.matmul(&y) + &bias + &other).gelu_approximate()),
            ];
            // A CPU rounds what it adds up on the way.
            let tolerance = if dtype.size() == 2 { 3e-2 } else { 1e-5 };
            for (what, make) in cases {
                same_as_here(&device, &format!("{what} {dtype} {m} {k} {n}"), tolerance, make);
            }
        }
    }
}

/// The larger of a number that is none and zero is none.
#[test]
fn rectifiers_keep_what_is_no_number() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let x = with_device(&Place::Cpu, || {
            let normal = Tensor::normal(&[16, 24], 1, DType::F32);
            let row = Tensor::arange(0, 16, 1, DType::I64).reshape(&[16, 1]);
            let odd = row.eq(3).where_(&(&normal * f64::NAN), &normal);
            let odd = row.eq(5).where_(&(odd.abs() * f64::INFINITY), &odd).cast(dtype);
            odd.realize().unwrap();
            odd
        });
        let (y, bias) = (here(&[24, 32], 2, dtype).abs(), here(&[32], 3, dtype));
        with_device(&Place::Cpu, || y.realize().unwrap());
        same_as_here(&with_library(), &format!("{dtype}"), 3e-2, &|| (x.matmul(&y) + &bias).relu());
        same_as_here(&with_library(), &format!("{dtype} less"), 3e-2, &|| (&bias + x.matmul(&-&y)).relu());
    }
}

/// In a process of its own: it is asked of all threads.
#[test]
fn products_are_in_tf32_only_if_asked_for() {
    const ALONE: &str = "CUDA_TESTS_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = std::thread::current().name().unwrap().to_owned();
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let run = alone.args([&name, "--exact", "--nocapture"]).env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let devices = match crate::device() {
        gpu @ Place::Cuda(_) => vec![gpu, DEVICE.clone(), WITH_LIBRARY.clone()],
        _ => vec![DEVICE.clone(), WITH_LIBRARY.clone()],
    };
    let (x, y) = with_device(&Place::Cpu, || (normal(&[48, 96], 1, DType::F32), normal(&[96, 72], 2, DType::F32)));
    let exact = with_device(&Place::Cpu, || x.cast(DType::F64).matmul(&y.cast(DType::F64)).to_f64().unwrap());
    let sizes =
        with_device(&Place::Cpu, || x.cast(DType::F64).abs().matmul(&y.cast(DType::F64).abs()).to_f64().unwrap());
    for device in &devices {
        let run = || with_device(device, || x.matmul(&y).to_f64().unwrap());
        let by = || with_device(device, || x.matmul(&y).explain().unwrap()).kernels[0].by.clone().unwrap();
        let error = |found: &[f64]| {
            let one = |((found, exact), size): ((&f64, &f64), &f64)| (found - exact).abs() / size;
            found.iter().zip(&exact).zip(&sizes).map(one).fold(0.0, f64::max)
        };
        for _ in 0..2 {
            assert!(!by().contains("tf32"), "{device:?}: {}", by());
            assert!(error(&run()) < 1e-6, "{device:?}: {}", error(&run()));
            set_tf32(true);
            assert!(by().contains("in tf32"), "{device:?}: {}", by());
            // Ten bits of each operand, cut off or rounded.
            assert!(error(&run()) < 2.0 / 1024.0, "{device:?}: {}", error(&run()));
            set_tf32(false);
        }
    }
}
