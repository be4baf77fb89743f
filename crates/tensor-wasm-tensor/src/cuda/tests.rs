//! Plans for a GPU, run where there is none: the device is the CPU's, and what it is given to run is PTX, which the
//! compiler's emulator does, work item by work item. Everything else is as it is with a driver.

mod lines;
mod products;
mod snapshots;
mod uploads;

use std::sync::{Arc, LazyLock};

use parking_lot::Condvar;
use tensor_wasm_gpu::{
    HostCode, HostKernels, HostLaunch, HostMemory, HostModule, Product, ProductElement, ProductEpilogue, ProductOperand,
};
use tensor_wasm_jit::emulate::{DeviceMemory, Emulator, OtherMemory};

use super::*;
use crate::expression::evaluate;
use crate::operations::{OPERATIONS, examples};
use crate::{DType, Device as Place, Mode, Tensor, with_device};

#[derive(Default)]
struct Emulated {
    /// Products that its library has done, if it has one.
    products: Option<Arc<Mutex<Vec<Product>>>>,
    /// The PTX of the kernels that were loaded, if somebody wants to see it.
    loaded: Option<Arc<Mutex<Vec<String>>>>,
    gate: Arc<Gate>,
}

struct EmulatedModule(Emulator, Arc<Gate>);

/// What kernels wait at before they run, while it is closed.
#[derive(Default)]
struct Gate {
    is_closed: Mutex<bool>,
    opened: Condvar,
    /// Whether a kernel waited for longer than anybody would keep it closed.
    is_broken: AtomicBool,
}

impl Gate {
    fn set(&self, is_closed: bool) {
        *self.is_closed.lock() = is_closed;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let mut is_closed = self.is_closed.lock();
        while *is_closed {
            if self.opened.wait_for(&mut is_closed, Duration::from_secs(20)).timed_out() {
                self.is_broken.store(true, Ordering::Relaxed);
                return;
            }
        }
    }
}

/// A product as the device's library would do it, but for the order of its sums; and where it is seen that it was done.
struct EmulatedProduct(Product, Arc<Mutex<Vec<Product>>>);

struct Mapped(Arc<HostMemory>);

impl OtherMemory for Mapped {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.0.read(address, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.0.write(address, bytes)
    }
}

impl HostCode for Emulated {
    fn load(&self, _stream: usize, image: &[u8]) -> Result<Arc<dyn HostModule>, String> {
        if Product::is_image(image) {
            let done = self.products.clone().ok_or("no library")?;
            return Ok(Arc::new(EmulatedProduct(Product::from_image(image).ok_or("no product")?, done)));
        }
        let text = std::str::from_utf8(image).map_err(|error| error.to_string())?;
        if let Some(loaded) = &self.loaded {
            loaded.lock().push(text.trim_end_matches('\0').to_owned());
        }
        Ok(Arc::new(EmulatedModule(Emulator::new(text)?, self.gate.clone())))
    }

    fn forget(&self, _stream: usize) {}
}

impl HostModule for EmulatedModule {
    fn params(&self, _kernel: &str) -> Option<Vec<(u32, u32)>> {
        Some(self.0.params())
    }

    fn launch(&self, launch: &HostLaunch<'_>) {
        self.1.pass();
        let mut memory = DeviceMemory::of(Box::new(Mapped(launch.memory.clone())));
        let ran = self.0.run(&mut memory, launch.params, launch.groups, launch.items);
        // Nobody would hear of a panic here.
        if let Err(why) = ran {
            eprintln!("a kernel failed in the emulator: {why}");
            std::process::abort();
        }
    }
}

impl EmulatedProduct {
    fn element(&self, memory: &HostMemory, start: u64, at: u64) -> f64 {
        let mut bytes = [0; 8];
        let size = self.bytes();
        assert!(memory.read(start + at * size, &mut bytes[..usize::try_from(size).unwrap()]));
        let [a, b, c, d, ..] = bytes;
        match self.0.element {
            ProductElement::F16 => half::f16::from_le_bytes([a, b]).to_f64(),
            ProductElement::BF16 => half::bf16::from_le_bytes([a, b]).to_f64(),
            ProductElement::F32 | ProductElement::Tf32 => f32::from_le_bytes([a, b, c, d]).into(),
            ProductElement::F64 => f64::from_le_bytes(bytes),
        }
    }

    fn bytes(&self) -> u64 {
        match self.0.element {
            ProductElement::F16 | ProductElement::BF16 => 2,
            ProductElement::F32 | ProductElement::Tf32 => 4,
            ProductElement::F64 => 8,
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "rounding to the type is what it does")]
    fn stored(&self, value: f64) -> Vec<u8> {
        match self.0.element {
            ProductElement::F16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
            ProductElement::BF16 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
            ProductElement::F32 | ProductElement::Tf32 => (value as f32).to_le_bytes().to_vec(),
            ProductElement::F64 => value.to_le_bytes().to_vec(),
        }
    }
}

impl HostModule for EmulatedProduct {
    fn params(&self, kernel: &str) -> Option<Vec<(u32, u32)>> {
        (kernel == Product::ENTRY).then(|| Product::PARAMS.to_vec())
    }

    fn launch(&self, launch: &HostLaunch<'_>) {
        let addresses: Vec<u64> =
            launch.params.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        let [left, right, to, bias, residual, _] = addresses[..] else { std::process::abort() };
        let product = &self.0;
        self.1.lock().push(*product);
        let place = |operand: &ProductOperand, batch: u64, row: u64, column: u64| {
            let within =
                if operand.is_by_columns { column * operand.stride + row } else { row * operand.stride + column };
            batch * operand.batch_stride + within
        };
        let mut at = 0;
        for batch in 0..product.batches {
            for row in 0..product.rows {
                for column in 0..product.columns {
                    let mut sum = if product.has_bias { self.element(launch.memory, bias, column) } else { 0.0 };
                    for step in 0..product.depth {
                        let a = self.element(launch.memory, left, place(&product.left, batch, row, step));
                        sum += a * self.element(launch.memory, right, place(&product.right, batch, step, column));
                    }
                    if product.has_residual {
                        sum += self.element(launch.memory, residual, at);
                    }
                    let result = match product.epilogue {
                        ProductEpilogue::None => sum,
                        ProductEpilogue::Relu if sum.is_nan() => sum,
                        ProductEpilogue::Relu => sum.max(0.0),
                        ProductEpilogue::Gelu => {
                            let inner = (sum + 0.044_715 * sum.powi(3)) * std::f64::consts::FRAC_2_PI.sqrt();
                            sum * 0.5 * (inner.tanh() + 1.0)
                        }
                    };
                    assert!(launch.memory.write(to + at * self.bytes(), &self.stored(result)));
                    at += 1;
                }
            }
        }
    }
}

pub(crate) static DEVICE: LazyLock<Place> = LazyLock::new(|| {
    let opened = Device::open(&emulated(false)).unwrap();
    Place::Cuda(CudaDevice::of(opened, "emulated").unwrap())
});

/// The same with a library for products.
static WITH_LIBRARY: LazyLock<Place> = LazyLock::new(|| {
    let opened = Device::open(&emulated(true)).unwrap();
    Place::Cuda(CudaDevice::of(opened, "emulated").unwrap())
});

/// One of so few bytes.
pub(crate) fn within(bytes: u64) -> CudaDevice {
    CudaDevice::within(Device::open(&emulated(false)).unwrap(), "small", bytes).unwrap()
}

fn emulated(has_library: bool) -> OpenOptions {
    emulated_with(Emulated { products: has_library.then(Arc::default), ..Emulated::default() })
}

fn emulated_with(emulated: Emulated) -> OpenOptions {
    let host = HostKernels(Some(Arc::new(emulated)));
    OpenOptions { choice: DeviceChoice::Cpu, host, ..OpenOptions::default() }
}

fn is_close(a: f64, b: f64, tolerance: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * a.abs().max(b.abs()).max(1.0)
}

/// Computes something on both devices, fused and one by one, and compares.
fn same(what: &str, tolerance: f64, make: impl Fn() -> Tensor) {
    same_on(&DEVICE, what, tolerance, make);
}

fn same_on(device: &Place, what: &str, tolerance: f64, make: impl Fn() -> Tensor) {
    same_in(&[Mode::Fused, Mode::Eager], device, what, tolerance, make);
}

fn same_in(modes: &[Mode], device: &Place, what: &str, tolerance: f64, make: impl Fn() -> Tensor) {
    let expected = make().to_f64();
    for mode in modes.iter().copied() {
        let found = with_device(device, || {
            let tensor = make();
            Tensor::realize_in(&[&tensor], mode).and_then(|()| tensor.to_f64())
        });
        match (&expected, &found) {
            (Ok(expected), Ok(found)) => {
                assert_eq!(expected.len(), found.len(), "{what}");
                let wrong = expected.iter().zip(found).position(|(a, b)| !is_close(*a, *b, tolerance));
                assert!(wrong.is_none(), "{what} {mode:?} at {wrong:?}: {expected:?} {found:?}");
            }
            (expected, found) => {
                let (expected, found) = (expected.as_ref().err(), found.as_ref().err());
                let words = |error: Option<&crate::TensorError>| error.map(|error| error.what.to_string());
                assert_eq!(words(expected), words(found), "{what} {mode:?}");
            }
        }
    }
}

#[test]
fn every_operation_is_computed_as_on_a_cpu() {
    for operation in OPERATIONS {
        for dtype in [DType::F32, DType::F64] {
            let example = operation.example;
            let words: Vec<&str> = example.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            let inputs: Vec<(&str, Tensor)> =
                examples(dtype).into_iter().filter(|(name, _)| words.contains(name)).collect();
            // Both compute from the same.
            inputs.iter().for_each(|(_, tensor)| tensor.realize().unwrap());
            // Random numbers are made in single precision, whatever they become.
            let is_made = operation.computed == crate::operations::Computed::Made;
            let tolerance = if dtype == DType::F32 || is_made { 2e-6 } else { 1e-12 };
            same(example, tolerance, || evaluate(example, &inputs, dtype).unwrap());
        }
    }
}

#[test]
fn every_type_is_computed_as_on_a_cpu() {
    let base =
        Tensor::from_slice(&[3.7_f64, -2.5, 0.0, -0.0, 1.0, 255.9, 300.0, -1.0, 1e-5, 65_519.9, 70_000.0, 7.0], &[12]);
    for from in DType::ALL {
        let x = base.cast(from);
        x.realize().unwrap();
        for to in DType::ALL {
            same(&format!("{from} to {to}"), 0.0, || x.cast(to));
        }
        if from == DType::Bool {
            same("not", 0.0, || !&x);
            continue;
        }
        let y = Tensor::from_slice(&[2_i32, 3, 5, 7, 1, 2, 3, 4, 9, 11, 13, 3], &[12]).cast(from);
        y.realize().unwrap();
        let tolerance = if matches!(from, DType::F16 | DType::BF16) { 1e-2 } else { 1e-6 };
        same(&format!("{from}: add"), tolerance, || &x + &y);
        same(&format!("{from}: mul"), tolerance, || &x * &y);
        same(&format!("{from}: div"), tolerance, || &x / &y);
        same(&format!("{from}: rem"), tolerance, || &x % &y);
        same(&format!("{from}: lt"), tolerance, || x.lt(&y));
        same(&format!("{from}: sum"), tolerance, || x.reshape(&[3, 4]).sum(1));
        same(&format!("{from}: max"), tolerance, || x.reshape(&[3, 4]).max(0));
        same(&format!("{from}: sort"), tolerance, || x.sort(0, true));
        same(&format!("{from}: matmul"), tolerance, || x.reshape(&[3, 4]).matmul(&y.reshape(&[4, 3])));
        same(&format!("{from}: cumsum"), tolerance, || y.reshape(&[3, 4]).cumsum(1));
    }
}

#[test]
fn floats_that_are_no_numbers_are_computed_as_on_a_cpu() {
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-42, 3e38, -7.5, 7.5, 1e30, 0.3];
    let x = Tensor::from_slice(&odd, &[11]);
    let y = Tensor::from_slice(&[3_f32, 2.0, -2.0, 0.0, 5.0, 1e-40, 1e-30, 2.0, -2.0, 3.0, f32::NAN], &[11]);
    same("rem", 1e-6, || &x % &y);
    same("rem turned round", 1e-6, || &y % &x);
    same("maximum", 0.0, || x.maximum(&y));
    same("minimum", 0.0, || x.minimum(&y));
    same("sign", 0.0, || x.sign());
    same("expm1", 1e-6, || x.expm1());
    same("ln1p", 1e-6, || x.ln1p());
    same("erf", 1e-6, || x.erf());
    same("argmax", 0.0, || x.argmax(0));
    same("sort", 0.0, || x.sort(0, false));
    same("to i32", 0.0, || x.cast(DType::I32));
}

#[test]
fn long_and_wide_reductions_are_computed_as_on_a_cpu() {
    for sizes in [[3, 1000], [1000, 3], [1, 5000], [5000, 1], [40, 257], [2, 64]] {
        let x = Tensor::normal(&sizes, 7, DType::F32);
        x.realize().unwrap();
        same(&format!("{sizes:?} sum"), 2e-6, || x.sum(()));
        for axis in [0, 1] {
            same(&format!("{sizes:?} sum {axis}"), 2e-6, || x.sum(axis));
            same(&format!("{sizes:?} max {axis}"), 0.0, || x.max(axis));
            same(&format!("{sizes:?} softmax {axis}"), 2e-6, || x.softmax(axis));
            same(&format!("{sizes:?} norm {axis}"), 1e-5, || (&x * 2.0).layer_norm(axis, 1e-5));
        }
    }
}

#[test]
fn operands_that_lie_another_way_are_computed_as_on_a_cpu() {
    for (sizes, dtype) in [([1, 40, 70], DType::F32), ([2, 64, 33], DType::F64), ([3, 33, 35], DType::U8)] {
        let x = (Tensor::normal(&sizes, 5, DType::F32) * 40.0).abs().cast(dtype);
        let y = (Tensor::normal(&[sizes[0], sizes[2], sizes[1]], 6, DType::F32) * 40.0).abs().cast(dtype);
        Tensor::realize_all(&[&x, &y]).unwrap();
        same(&format!("{sizes:?} turned"), 1e-6, || x.t() + &y * 2);
        same(&format!("{sizes:?} both"), 1e-6, || x.t() * x.t() + x.slice(1, Some(0), None, 1).t());
        same(&format!("{sizes:?} outwards"), 0.0, || x.permute(&[1, 2, 0]) + 0);
    }
}

/// What a plan says that its product is computed by.
fn product_by(device: &Place, make: &dyn Fn() -> Tensor) -> String {
    let explained = with_device(device, || make().explain().unwrap());
    assert!(explained.device.starts_with("emulated, "), "{}", explained.device);
    explained.kernels.iter().find_map(|kernel| kernel.by.clone()).unwrap_or_default()
}

/// However the operands lie, whatever follows; and what the library cannot do is done by a kernel.
#[test]
fn products_by_the_library_are_as_on_a_cpu() {
    let normal = |sizes: &[usize]| Tensor::normal(sizes, 3, DType::F32);
    let compare = |what: &str, dtype: DType, is_by_library: bool, make: &dyn Fn() -> Tensor| {
        let tolerance = if matches!(dtype, DType::F16 | DType::BF16) { 2e-2 } else { 2e-6 };
        same_on(&WITH_LIBRARY, what, tolerance, make);
        let by = product_by(&WITH_LIBRARY, make);
        assert_eq!(by.starts_with("cuBLASLt"), is_by_library, "{what} {dtype}: {by}");
    };
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64, DType::I32] {
        let of = |sizes: &[usize]| {
            let made = normal(sizes).cast(dtype);
            made.realize().unwrap();
            made
        };
        let is_float = dtype.is_float();
        let (x, y, z) = (of(&[15, 17]), of(&[17, 13]), of(&[13, 17]));
        compare("plain", dtype, is_float, &|| x.matmul(&y));
        compare("right turned", dtype, is_float, &|| x.matmul(&z.t()));
        compare("left turned", dtype, is_float, &|| y.t().matmul(&x.t()));
        let wide = of(&[19, 50]);
        compare("parts", dtype, is_float, &|| wide.narrow(0, 2, 15).narrow(1, 3, 17).matmul(&y));
        compare("every second", dtype, false, &|| wide.slice(1, None, None, 3).matmul(&y));
        compare("backwards", dtype, false, &|| x.flip(0).matmul(&y));
        let (many, one) = (of(&[2, 4, 15, 17]), of(&[4, 17, 13]));
        compare("all rows at once", dtype, is_float, &|| many.matmul(&y));
        compare("one for all", dtype, false, &|| many.matmul(&one));
        compare("batches", dtype, is_float, &|| many.narrow(0, 0, 1).squeeze(0).matmul(&one));
        compare("turned batches", dtype, is_float, &|| one.transpose(1, 2).matmul(&one));
        let (bias, other) = (of(&[13]), of(&[15, 13]));
        compare("bias", dtype, is_float, &|| x.matmul(&y) + &bias);
        compare("and more", dtype, is_float, &|| (x.matmul(&y) + &bias).relu());
        compare("residual", dtype, is_float, &|| x.matmul(&y) + &other);
        compare("row and column", dtype, is_float, &|| of(&[1, 1100]).matmul(&of(&[1100, 1])));
        compare("nothing to add up", dtype, false, &|| of(&[2, 0]).matmul(&of(&[0, 3])));
    }
    let by = |device: &Place, dtype: DType| {
        let of = |sizes: &[usize]| normal(sizes).cast(dtype);
        product_by(device, &|| of(&[12, 12]).matmul(&of(&[12, 12])) + &of(&[12]))
    };
    assert_eq!(by(&WITH_LIBRARY, DType::F32), "cuBLASLt, with the bias");
    let small = product_by(&WITH_LIBRARY, &|| normal(&[4, 4]).matmul(&normal(&[4, 4])));
    assert_eq!(small, "own kernel: it is small");
    let integers = "own kernel: a library has none of this type or layout; tensor cores do not have its type";
    assert_eq!(by(&WITH_LIBRARY, DType::I32), integers);
    let without = by(&DEVICE, DType::F32);
    assert!(without.starts_with("own kernel: ") && without.contains("no library"), "{without}");
    let both = with_device(&WITH_LIBRARY, || {
        let product = normal(&[4, 4]).matmul(&normal(&[4, 4]));
        let sum = &product + &normal(&[4]);
        Tensor::realize_all(&[&product, &sum]).unwrap();
        (product.to_f64().unwrap(), sum.to_f64().unwrap())
    });
    let product = normal(&[4, 4]).matmul(&normal(&[4, 4]));
    let expected = [product.to_f64().unwrap(), (&product + &normal(&[4])).to_f64().unwrap()];
    for (expected, found) in expected.iter().zip([both.0, both.1]) {
        assert!(expected.iter().zip(&found).all(|(a, b)| is_close(*a, *b, 2e-6)), "{expected:?} {found:?}");
    }
}

/// The casts around a product are left out, whoever does it, and kept where somebody else needs what they make.
#[test]
fn products_of_halves_are_not_widened() {
    for dtype in [DType::F16, DType::BF16] {
        let of = |sizes: &[usize]| {
            let made = Tensor::normal(sizes, 4, DType::F32).cast(dtype);
            made.realize().unwrap();
            made
        };
        let (x, y, bias) = (of(&[6, 16]), of(&[16, 5]), of(&[5]));
        let many = of(&[3, 6, 16]);
        let cases: [(&str, bool, &dyn Fn() -> Tensor); 9] = [
            ("plain", true, &|| x.matmul(&y)),
            ("turned", true, &|| y.t().matmul(&x.t())),
            ("computed before", false, &|| (&x * 2.0).matmul(&y)),
            ("bias", true, &|| x.matmul(&y) + &bias),
            ("bias and more", true, &|| (x.matmul(&y) + &bias).gelu()),
            ("rows of many", true, &|| many.matmul(&y) + &bias),
            ("batches", true, &|| many.matmul(&many.transpose(1, 2))),
            ("in single precision", false, &|| x.cast(DType::F32).matmul(&y.cast(DType::F32)) + 1.0),
            ("another product of the same", true, &|| x.matmul(&y).t().matmul(&x)),
        ];
        for (what, is_halved, make) in cases {
            for device in [&*DEVICE, &*WITH_LIBRARY] {
                same_on(device, what, 2e-2, make);
                let by = product_by(device, make);
                assert_eq!(by.contains(&format!(" in {dtype}")), is_halved, "{what}: {by}");
            }
        }
        let (both, expected) = (|| (x.matmul(&y), x.cast(DType::F32).sum(1)), x.cast(DType::F32).sum(1));
        let found = with_device(&DEVICE, || {
            let (product, sum) = both();
            Tensor::realize_all(&[&product, &sum]).unwrap();
            sum.to_f64().unwrap()
        });
        assert!(expected.to_f64().unwrap().iter().zip(&found).all(|(a, b)| is_close(*a, *b, 1e-5)));
    }
}

#[test]
fn what_cannot_be_computed_is_said() {
    let (x, zero) = (Tensor::from_slice(&[5_i64, 6], &[2]), Tensor::from_slice(&[1_i64, 0], &[2]));
    same("division", 0.0, || &x / &zero);
    let index = Tensor::from_slice(&[0_i64, 9], &[2]);
    same("gather", 0.0, || x.index_select(0, &index));
    // And what comes after is as if nothing had been.
    same("division", 0.0, || &x / 2);
    same("gather", 0.0, || x.index_select(0, &Tensor::from_slice(&[1_i64, -1], &[2])));
}

#[test]
fn what_is_computed_follows_what_it_is_computed_from() {
    let x = Tensor::from_slice(&[1_f32, 2.0, 3.0, 4.0], &[4]);
    let there = x.to(&DEVICE);
    let sum = (&there * 2.0 + &x).sum(());
    sum.realize().unwrap();
    let is_there = |tensor: &Tensor| tensor.value().unwrap().storage.here().is_none();
    assert!(is_there(&there) && is_there(&sum) && !is_there(&x), "nothing was read back");
    assert_eq!(sum.item::<f32>().unwrap(), 30.0);
    assert_eq!(there.to(&Place::Cpu).to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    assert!(!with_device(&Place::Cpu, || is_there(&(&x + 1.0))));
    let elsewhere = with_device(&WITH_LIBRARY, || (&there + 1.0).to_f64().unwrap());
    assert_eq!(elsewhere, [2.0, 3.0, 4.0, 5.0], "from one device to another");
    let far = Tensor::ones(&[1 << 20, 1 << 20], DType::F32).to(&DEVICE);
    let error = far.to_f64().unwrap_err().to_string();
    assert!(error.contains("2^31 elements"), "{error}");
}

#[test]
fn a_device_that_was_lost_is_used_again() {
    let opened = Device::open(&emulated(false)).unwrap();
    let device = Place::Cuda(CudaDevice::of(opened.clone(), "lost").unwrap());
    let x = Tensor::from_slice(&[1_f32, 2.0, 3.0], &[3]);
    let compute = || with_device(&device, || (&x * 3.0 + 0.25).sum(()));
    let run = || with_device(&device, || compute().item::<f32>());
    assert_eq!(run().unwrap(), 18.75);
    let only_there = x.to(&device);
    // One that is not read before the worker goes.
    let unread = compute();
    with_device(&device, || unread.realize()).unwrap();
    opened.lose("a test");
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while opened.restarts() == 0 {
        assert!(std::time::Instant::now() < until, "there is no other worker");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    // What was nowhere else is gone, and everything else is computed again.
    for gone in [&only_there, &unread] {
        let error = (gone + 1.0).to_f64().unwrap_err().to_string();
        assert!(error.contains("lost"), "{error}");
    }
    assert_eq!(run().unwrap(), 18.75);
    assert_eq!(run().unwrap(), 18.75);
}

#[test]
fn more_than_the_devices_memory_is_an_error_and_leaves_nothing() {
    let cuda = within(1 << 20);
    let device = Place::Cuda(cuda.clone());
    let small =
        |number: f64| with_device(&device, || (Tensor::ones(&[64, 64], DType::F32) + number).sum(()).item::<f32>());
    assert_eq!(small(1.0).unwrap(), 8192.0);
    let before = cuda.used_bytes();
    let large = with_device(&device, || (Tensor::ones(&[1 << 19], DType::F32) * 2.0).realize());
    let error = large.unwrap_err().to_string();
    assert!(
        error.contains("2097408 bytes of the device's memory are needed") && error.contains("of 1048576 are used"),
        "{error}"
    );
    assert!(cuda.used_bytes() <= before, "{} and {before} before", cuda.used_bytes());
    // What is between the kernels counts, before any of it is taken.
    let both = with_device(&device, || {
        let turned = (Tensor::arange(0.0, f64::from(1 << 17), 1.0, DType::F32).reshape(&[512, 256]) + 1.0).exp();
        (turned.t().reshape(&[512, 256]) + &turned).realize()
    });
    let error = both.unwrap_err().to_string();
    assert!(error.contains("1048832 bytes of the device's memory are needed"), "{error}");
    assert!(cuda.used_bytes() <= before, "{} and {before} before", cuda.used_bytes());
    assert_eq!(small(2.0).unwrap(), 12288.0);
}

#[test]
fn a_plan_that_runs_again_is_replayed() {
    // Of its own: where buffers lie is nobody else's doing.
    let device = Place::Cuda(CudaDevice::of(Device::open(&emulated(false)).unwrap(), "replayed").unwrap());
    let w = with_device(&Place::Cpu, || normal(&[8, 8], 3, DType::F32));
    let step = |x: &Tensor| (x.matmul(&w) + 0.5).tanh().softmax(1);
    let run = || {
        let mut x = Tensor::normal(&[4, 8], 1, DType::F32);
        let mut counts = Vec::new();
        for _ in 0..10 {
            x = step(&x);
            x.realize().unwrap();
            counts.push((execute::graphs_made(), execute::graphs_replayed()));
        }
        (x.to_f64().unwrap(), counts)
    };
    let ((here, none), (there, counts)) = (with_device(&Place::Cpu, run), with_device(&device, run));
    assert!(here.iter().zip(&there).all(|(a, b)| is_close(*a, *b, 1e-5)), "{here:?} {there:?}");
    assert!(none.iter().all(|count| *count == none[0]), "on a CPU there are none");
    let since = |n: usize| (counts[9].0 - counts[n].0, counts[9].1 - counts[n].1);
    assert!(since(1).0 > 0, "a graph is made: {counts:?}");
    assert_eq!(since(5), (0, 4), "and replayed: {counts:?}");
}

/// Leaves that lie in one buffer, and others of the same shapes that lie in another: a graph is of one or the other.
#[test]
fn a_graph_is_replayed_only_with_each_buffer_in_its_role() {
    let run = || {
        let of = |from: i64| {
            let made = Tensor::arange(from, from + 64, 1, DType::I64).cast(DType::F32).reshape(&[8, 8]) / 64.0;
            made.realize().unwrap();
            made
        };
        let (a, b) = (of(0), of(100));
        let (at, bt) = (a.t(), b.t());
        Tensor::realize_all(&[&at, &bt]).unwrap();
        let of = |z: &Tensor| (a.matmul(&b).softmax(1).matmul(z)).to_f64().unwrap();
        [&at, &at, &at, &bt, &at, &bt, &bt].map(of)
    };
    let (here, there) = (run(), with_device(&DEVICE, run));
    for (n, (here, there)) in here.iter().zip(&there).enumerate() {
        assert!(here.iter().zip(there).all(|(a, b)| is_close(*a, *b, 1e-5)), "run {n}: {here:?} {there:?}");
    }
}

#[test]
fn what_is_too_large_for_a_kernel_is_refused_before_it_is_allocated() {
    let Place::Cuda(cuda) = &*DEVICE else { panic!("it is no GPU") };
    let used = cuda.used_bytes();
    for (shape, dtype) in [(&[1_100_000_000][..], DType::F32), (&[40_000, 20_000], DType::F64)] {
        let error = with_device(&DEVICE, || Tensor::full(shape, 1.0, dtype).realize()).unwrap_err().to_string();
        assert!(error.contains("less than 4 GiB"), "{error}");
    }
    assert!(cuda.used_bytes() <= used);
}

type MakeOptimizer = dyn Fn(&[crate::Variable]) -> Box<dyn crate::Optimizer>;

/// Weights of a small network after some steps, and how many graphs were recorded in the last of them, and before.
fn trained(make: &MakeOptimizer) -> (Vec<f64>, u64, u64) {
    use crate::nn::Module;
    let layer = |inputs, outputs, seed| crate::nn::Linear::new(inputs, outputs, seed);
    let model =
        crate::nn::Sequential::new().then(layer(6, 5, 1)).then(crate::nn::function(Tensor::relu)).then(layer(5, 3, 2));
    let images = Tensor::normal(&[4, 6], 3, DType::F32);
    images.realize().unwrap();
    let labels = Tensor::from_slice(&[0_i64, 2, 1, 2], &[4]);
    let mut optimizer = make(&model.parameters());
    let before = execute::graphs_made();
    let (mut graphs, mut used) = (0, 0);
    for step in 0..8 {
        model.forward(&images).cross_entropy(&labels).backward().unwrap();
        optimizer.step().unwrap();
        if step == 3 {
            graphs = execute::graphs_made();
            if let Place::Cuda(device) = crate::device() {
                used = device.used_bytes();
            }
        }
    }
    if let Place::Cuda(device) = crate::device() {
        assert_eq!(device.used_bytes(), used, "steps leave nothing behind");
    }
    let weights = model.parameters().iter().flat_map(|variable| variable.get().to_f64().unwrap()).collect();
    (weights, execute::graphs_made() - graphs, graphs - before)
}

#[test]
fn training_writes_over_what_it_replaces_and_soon_records_no_more() {
    let opened = Device::open(&emulated(false)).unwrap();
    let device = Place::Cuda(CudaDevice::of(opened, "training").unwrap());
    let optimizers: [&MakeOptimizer; 2] =
        [&|variables| Box::new(crate::Sgd::with_momentum(variables, 0.1, 0.9, false)), &|variables| {
            Box::new(crate::Adam::new(variables, 0.01))
        }];
    for make in optimizers {
        let (expected, ..) = with_device(&Place::Cpu, || trained(make));
        let (found, recorded, graphs) = with_device(&device, || trained(make));
        assert!(expected.iter().zip(&found).all(|(a, b)| is_close(*a, *b, 1e-5)), "{expected:?} {found:?}");
        assert!(graphs > 0, "none is recorded");
        assert_eq!(recorded, 0, "after {graphs}");
    }
}

#[test]
fn what_somebody_holds_is_not_written_over() {
    let variable = crate::Variable::new(&Tensor::from_slice(&[1_f32, 2.0, 3.0], &[3]));
    with_device(&DEVICE, || {
        let mut sgd = crate::Sgd::new(std::slice::from_ref(&variable), 0.5);
        let mut step = || {
            variable.get().set_grad(Some(Tensor::ones(&[3], DType::F32)));
            crate::Optimizer::step(&mut sgd).unwrap();
        };
        step();
        let held = variable.get();
        step();
        step();
        assert_eq!(held.to_vec::<f32>().unwrap(), [0.5, 1.5, 2.5]);
        assert_eq!(variable.get().to_vec::<f32>().unwrap(), [-0.5, 0.5, 1.5]);
    });
    // Back to the CPU, with a copy on both sides, and on from there.
    let mut sgd = crate::Sgd::new(std::slice::from_ref(&variable), 1.0);
    for _ in 0..2 {
        variable.get().set_grad(Some(Tensor::ones(&[3], DType::F32)));
        with_device(&Place::Cpu, || crate::Optimizer::step(&mut sgd)).unwrap();
    }
    assert_eq!(variable.get().to_vec::<f32>().unwrap(), [-2.5, -1.5, -0.5]);
}

#[test]
fn what_is_given_up_is_written_over_when_nobody_reads_it_any_more() {
    let round = |seed: u16| {
        let x = Tensor::arange(0.0, 64.0, 1.0, DType::F32) * f32::from(seed);
        x.realize().unwrap();
        let given_up = [Node::sole_storage(&x.node).unwrap()];
        // Of other sizes, so that they are kernels of their own, before the one that takes the place.
        let outputs = [x.narrow(0, 0, 30) * 2.0, x.narrow(0, 30, 20) * 3.0, &x + 1.0];
        Tensor::realize_over(&outputs.each_ref(), &given_up).unwrap();
        outputs.map(|output| output.to_f64().unwrap())
    };
    for seed in 0..4 {
        let (here, there) = (round(seed), with_device(&DEVICE, || round(seed)));
        assert_eq!(here, there, "round {seed}: a graph from the second on, whose branches run in any order");
    }
}

/// However operands lie, in whichever order tiles come, whatever follows: what one kernel on tensor cores makes of it.
#[test]
fn products_on_tensor_cores_are_as_on_a_cpu() {
    for dtype in [DType::BF16, DType::F16] {
        let of = |sizes: &[usize], seed: u64| {
            let made = Tensor::normal(sizes, seed, DType::F32).cast(dtype);
            made.realize().unwrap();
            made
        };
        let (x, y, z) = (of(&[130, 72], 1), of(&[72, 136], 2), of(&[136, 72], 3));
        let (bias, residual) = (of(&[136], 4), of(&[130, 136], 5));
        let (many, one) = (of(&[2, 3, 20, 24], 6), of(&[3, 24, 16], 7));
        let wide = of(&[140, 200], 8);
        let (left, right) = (of(&[50, 37], 9), of(&[37, 41], 10));
        let cases: [(&str, &dyn Fn() -> Tensor); 8] = [
            ("plain", &|| x.matmul(&y)),
            ("turned", &|| x.matmul(&z.t())),
            ("bias, gelu and residual", &|| (x.matmul(&y) + &bias).gelu() + &residual),
            ("all rows at once", &|| (many.reshape(&[6, 20, 24]).matmul(&of(&[24, 40], 11)) * 2.0).relu()),
            ("one for all", &|| many.matmul(&one)),
            ("parts", &|| wide.narrow(0, 3, 65).narrow(1, 8, 72).matmul(&y)),
            ("odd parts", &|| wide.narrow(0, 3, 65).narrow(1, 7, 72).matmul(&y) + &bias),
            ("odd sizes", &|| left.matmul(&right)),
        ];
        for (what, make) in cases {
            // A CPU rounds the product before what follows.
            same_on(&DEVICE, what, 5e-2, make);
            let by = product_by(&DEVICE, make);
            assert!(by.starts_with(&format!("own kernel on tensor cores in {dtype}")), "{what}: {by}");
        }
        let both = || {
            let product = x.matmul(&y);
            let sum = &product + &bias;
            Tensor::realize_all(&[&product, &sum]).unwrap();
            (product.to_f64().unwrap(), sum.to_f64().unwrap())
        };
        let (here, there) = (both(), with_device(&DEVICE, both));
        for (here, there) in [(here.0, there.0), (here.1, there.1)] {
            assert!(here.iter().zip(&there).all(|(a, b)| is_close(*a, *b, 2e-2)), "the product is kept too");
        }
    }
}

/// Elements that are there already, so that both devices compute from the same.
fn normal(sizes: &[usize], seed: u64, dtype: DType) -> Tensor {
    let made = Tensor::normal(sizes, seed, DType::F32).cast(dtype);
    made.realize().unwrap();
    made
}

#[test]
fn attention_on_tensor_cores_is_as_composed() {
    attention_is_as_composed(&[DType::BF16, DType::F16]);
}

#[test]
fn attention_in_single_precision_is_as_composed() {
    attention_is_as_composed(&[DType::F32]);
    let q = Tensor::normal(&[4, 16], 10, DType::F32);
    let explained = |q: &Tensor| with_device(&DEVICE, || q.attention(q, q, false).explain().unwrap());
    assert!(explained(&q).kernels.len() > 1, "not if it is small");
    let large = normal(&[40, 16], 10, DType::F32);
    assert_eq!(explained(&large).kernels.len(), 1);
    let cast = crate::autocast(DType::BF16, || explained(&large));
    assert!(cast.kernels.len() > 1, "products that take another type are none of this kernel's");
}

/// As one kernel, with operands of any sizes that lie in any way.
fn attention_is_as_composed(dtypes: &[DType]) {
    for dtype in dtypes.iter().copied() {
        let of = |sizes: &[usize], seed: u64| normal(sizes, seed, dtype);
        let near = if dtype == DType::F32 { 5e-6 } else { 2e-2 };
        // Queries, keys, and their width.
        let sizes = [(70, 70, 16), (3, 130, 64), (65, 64, 128), (20, 40, 80), (9, 5, 32), (17, 19, 20)];
        let wide = if dtype == DType::F32 { [(9, 33, 256), (12, 129, 101)] } else { [(70, 33, 256), (9, 15, 32)] };
        for (queries, keys, width) in sizes.into_iter().chain(wide) {
            let (q, k, v) = (of(&[2, queries, width], 1), of(&[2, keys, width], 2), of(&[2, keys, width], 3));
            for causal in [false, true] {
                let what = format!("{dtype} {queries} {keys} {width} {causal}");
                same_on(&DEVICE, &what, near, || q.attention(&k, &v, causal));
                let explained = with_device(&DEVICE, || q.attention(&k, &v, causal).explain().unwrap());
                let is_small = dtype == DType::F32 && 2 * queries * keys < 128;
                assert_eq!(explained.kernels.len() == 1, !is_small, "{what}: {explained}");
                assert!(is_small || explained.to_string().contains("no score in memory"), "{explained}");
                let is_on_cores = explained.to_string().contains("on tensor cores");
                assert_eq!(is_on_cores, dtype != DType::F32, "{explained}");
            }
        }
        // Narrow keys beside wide values, and wide ones beside narrow.
        for (narrow, wide) in [(16, 256), (256, 16), (20, 130)] {
            let (q, k, v) = (of(&[70, narrow], 1), of(&[90, narrow], 2), of(&[90, wide], 3));
            same_on(&DEVICE, &format!("{dtype} {narrow} {wide}"), near, || q.attention(&k, &v, true));
        }
        // Heads that share keys and values, values of another width, and operands that lie another way.
        let (q, k, v) = (of(&[2, 3, 20, 32], 4), of(&[1, 3, 40, 32], 5), of(&[3, 40, 48], 6));
        same_on(&DEVICE, "shared", near, || q.attention(&k, &v, false));
        let (q, k, v) = (of(&[2, 3, 20, 32], 4), of(&[40, 32], 5), of(&[1, 40, 48], 6));
        same_on(&DEVICE, "one for all", near, || q.attention(&k, &v, false));
        let (q, k, v) = (of(&[20, 3, 32], 7), of(&[40, 3, 32], 8), of(&[40, 3, 31], 9));
        let heads = |tensor: &Tensor| tensor.permute(&[1, 0, 2]);
        same_on(&DEVICE, "heads inside", near, || heads(&q).attention(&heads(&k), &heads(&v), true));
        let turned = || heads(&q).t().cast(DType::F64).cast(dtype).t();
        same_on(&DEVICE, "turned", near, || turned().attention(&heads(&k).flip(1), &heads(&v), false));
        same_on(&DEVICE, "and what follows", 2.5 * near, || {
            heads(&q).attention(&heads(&k), &heads(&v), true) * 2.0 + 1.0
        });
        // None, and none to see.
        for (queries, keys) in [(0, 4), (4, 0)] {
            let (q, k) = (of(&[2, queries, 8], 1), of(&[2, keys, 8], 2));
            same_on(&DEVICE, "nothing", near, || q.attention(&k, &k, true));
        }
        // A GPU that it is already on is noticed.
        let there = of(&[12, 16], 10).to(&DEVICE);
        assert_eq!(there.attention(&there, &there, false).explain().unwrap().kernels.len(), 1);
    }
}

/// Gradients of attention's queries, keys and values, each element of the result with a weight of its own.
fn attention_gradients(operands: &[Tensor; 3], weights: &Tensor, causal: bool) -> Vec<Tensor> {
    let asked = operands.each_ref().map(|tensor| tensor.with_grad());
    let [q, k, v] = &asked;
    crate::grad(&(q.attention(k, v, causal) * weights).sum(()), &[q, k, v]).unwrap()
}

fn assert_close(what: &str, near: f64, expected: &[Tensor], found: &[Tensor]) {
    for (n, (expected, found)) in expected.iter().zip(found).enumerate() {
        assert_eq!(expected.shape(), found.shape(), "{what} {n}");
        let (expected, found) = (expected.to_f64().unwrap(), found.to_f64().unwrap());
        let wrong = expected.iter().zip(&found).position(|(a, b)| !is_close(*a, *b, near));
        assert!(wrong.is_none(), "{what} {n}: {:?}", wrong.map(|at| (at, expected[at], found[at])));
    }
}

#[test]
fn gradients_of_attention_by_kernels_are_as_composed() {
    let of = |sizes: &[usize], seed: u64| normal(sizes, seed, DType::F32);
    let check = |what: &str, operands: [Tensor; 3], causal: bool| {
        let dtype = operands[0].dtype();
        let (near, units) = if dtype == DType::F32 { (1e-5, "") } else { (3e-2, " on tensor cores") };
        let result = operands[0].attention(&operands[1], &operands[2], causal);
        let weights = normal(&result.shape(), 9, dtype);
        let wide = operands.each_ref().map(|tensor| tensor.cast(DType::F64));
        let expected = attention_gradients(&wide, &weights.cast(DType::F64), causal);
        let here = attention_gradients(&operands, &weights, causal);
        assert_close(&format!("{what}, on a CPU"), near, &expected, &here);
        let kinds = with_device(&DEVICE, || {
            let there = attention_gradients(&operands, &weights, causal);
            let kinds: Vec<_> = there.iter().flat_map(|made| made.explain().unwrap().kernels).collect();
            Tensor::realize_all(&there.iter().collect::<Vec<_>>()).unwrap();
            assert_close(what, near, &expected, &there);
            kinds
        });
        assert!(kinds.iter().all(|kernel| kernel.kind != "matmul"), "{what}: {kinds:?}");
        let by = |kind: &str| kinds.iter().find(|kernel| kernel.kind == kind).and_then(|kernel| kernel.by.clone());
        let expected = [("attention", units, dtype), ("attention_rows", "", DType::F32)];
        let gradients = ["attention_queries", "attention_keys"].map(|kind| (kind, "", dtype));
        for (kind, units, dtype) in expected.into_iter().chain(gradients) {
            assert_eq!(by(kind), Some(format!("own kernel{units} in {dtype}, no score in memory")), "{what} {kind}");
        }
    };
    // Queries, keys, and their width.
    let sizes = [
        (70, 70, 16, true),
        (70, 70, 16, false),
        (3, 130, 64, true),
        (65, 64, 128, false),
        (17, 19, 20, true),
        (64, 128, 33, true),
        (64, 128, 33, false),
    ];
    for (queries, keys, width, causal) in sizes {
        let operands = [of(&[2, queries, width], 1), of(&[2, keys, width], 2), of(&[2, keys, width + width % 3], 3)];
        check(&format!("{queries} {keys} {width} {causal}"), operands, causal);
    }
    check("shared", [of(&[2, 3, 20, 32], 4), of(&[1, 3, 40, 32], 5), of(&[3, 40, 48], 6)], false);
    check("one for all", [of(&[2, 20, 32], 4), of(&[40, 32], 5), of(&[2, 40, 16], 6)], true);
    check("shared queries", [of(&[20, 32], 4), of(&[2, 40, 32], 5), of(&[2, 40, 16], 6)], true);
    let heads = |sizes: &[usize], seed: u64| of(sizes, seed).permute(&[1, 0, 2]);
    check("heads inside", [heads(&[20, 3, 32], 7), heads(&[40, 3, 32], 8), heads(&[40, 3, 31], 9)], true);
    check("wide values", [of(&[20, 16], 4), of(&[40, 16], 5), of(&[40, 256], 6)], false);
    check("wide keys", [of(&[20, 256], 4), of(&[40, 256], 5), of(&[40, 16], 6)], false);
    check("both wide", [of(&[20, 200], 4), of(&[40, 200], 5), of(&[40, 130], 6)], true);
    // Halves are added up in single precision, and rounded once.
    for dtype in [DType::F16, DType::BF16] {
        let of = |sizes: &[usize], seed: u64| normal(sizes, seed, dtype);
        check(&format!("{dtype}"), [of(&[2, 70, 16], 1), of(&[2, 70, 16], 2), of(&[2, 70, 17], 3)], true);
        check(&format!("{dtype} shared"), [of(&[2, 20, 32], 4), of(&[40, 32], 5), of(&[40, 16], 6)], false);
    }
}

/// However queries, keys and values depend on each other, whoever looks on, and gradients of gradients too.
#[test]
fn gradients_of_attention_flow_on() {
    let x = normal(&[2, 20, 16], 1, DType::F32);
    let make = |x: &Tensor| {
        let calls = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let x = x.with_grad();
        let queries = &x * 2.0;
        let seen = calls.clone();
        queries.register_hook(move |gradient| {
            seen.fetch_add(1, Ordering::Relaxed);
            Some(gradient * 0.5)
        });
        let result = x.attention(&x, &x, true) + queries.attention(&x, &x.tanh(), false);
        let first = crate::grad(&(&result * &result).sum(()), &[&x]).unwrap().remove(0);
        assert_eq!(calls.load(Ordering::Relaxed), 1, "a hook sees the whole gradient");
        let second = crate::grad(&(&first * &first * &x).sum(()), &[&x]).unwrap().remove(0);
        // The same by going backwards, where the graph is freed.
        let other = x.detach().with_grad();
        let loss = other.attention(&other, &x.detach(), true).square().sum(());
        loss.backward().unwrap();
        [first, second, other.grad().unwrap(), loss.detach()]
    };
    let expected = make(&x.cast(DType::F64));
    let check = |what: &str| {
        let found = make(&x);
        assert_close(what, 2e-5, &[&expected[..1], &expected[2..]].concat(), &[&found[..1], &found[2..]].concat());
        // Sums of large numbers that are nearly none.
        assert_close(what, 2e-3, &expected[1..2], &found[1..2]);
    };
    check("on a CPU");
    with_device(&DEVICE, || check("by kernels"));
    // Without gradients of it, nothing is computed for it.
    let [q, k] = [1, 2].map(|seed| normal(&[20, 16], seed, DType::F32));
    let asked = q.with_grad();
    let made = crate::grad(&asked.attention(&k, &k, false).sum(()), &[&asked]).unwrap().remove(0);
    let explained = with_device(&DEVICE, || made.explain().unwrap());
    assert!(explained.kernels.iter().all(|kernel| kernel.kind != "attention_keys"), "{explained}");
    // With the result there already, three kernels and what makes its gradient.
    with_device(&DEVICE, || {
        let [q, k, v] = [1, 2, 3].map(|seed| normal(&[20, 16], seed, DType::F32).with_grad());
        let result = q.attention(&k, &v, false);
        assert_eq!(result.explain().unwrap().kernels.len(), 1);
        result.realize().unwrap();
        let made = crate::grad(&(&result * normal(&[20, 16], 4, DType::F32)).sum(()), &[&q, &k, &v]).unwrap();
        let before = crate::plans_made();
        let explained = (&made[0] + &made[1] + &made[2]).explain().unwrap();
        let own = explained.kernels.iter().filter(|kernel| kernel.kind != "map").count();
        assert_eq!(own, 3, "{explained}");
        Tensor::realize_all(&made.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(crate::plans_made() - before, 1);
    });
    // A query that sees nothing has no gradients that are numbers, composed or not.
    let [few, many] = [normal(&[10, 16], 1, DType::F32), normal(&[20, 16], 2, DType::F32)];
    let (asked, weights) = ([many.clone(), few.clone(), few], normal(&[20, 16], 3, DType::F32));
    let explained = with_device(&DEVICE, || attention_gradients(&asked, &weights, true)[0].explain().unwrap());
    assert!(explained.kernels.iter().all(|kernel| !kernel.kind.starts_with("attention")), "{explained}");
}

/// Tokens of a small model, each the place of the largest of what it makes of the last, and what they see; on whatever
/// device there is.
fn tokens() -> (Vec<i64>, Vec<f32>) {
    let table = Tensor::normal(&[7, 8], 1, DType::F32);
    let places = Tensor::normal(&[6, 8], 2, DType::F32);
    Tensor::realize_all(&[&table, &places]).unwrap();
    let mut cache = crate::nn::KvCache::new(1, &[1, 2, 6, 4], DType::F32);
    let mut row = table.narrow(0, 3, 1).reshape(&[1, 1, 8]);
    let mut made = Vec::new();
    for _ in 0..6 {
        let x = (&row + cache.place(&places)).reshape(&[1, 2, 1, 4]);
        let seen = cache.attend(0, &x, &(&x * 0.5), &x.tanh()).reshape(&[1, 8]);
        let token = seen.matmul(&table.t()).argmax(-1);
        row = table.embedding(&token).reshape(&[1, 1, 8]);
        cache.advance(&[&token, &row, &seen]).unwrap();
        made.push((token, seen));
    }
    let tokens = made.iter().map(|(token, _)| token.item::<i64>().unwrap()).collect();
    (tokens, made.iter().flat_map(|(_, seen)| seen.to_vec::<f32>().unwrap()).collect())
}

#[test]
fn tokens_are_made_one_by_one_as_on_a_cpu() {
    let (expected, seen_there) = tokens();
    let (found, seen) = with_device(&DEVICE, tokens);
    assert_eq!(found, expected);
    assert!(seen.iter().zip(&seen_there).all(|(a, b)| (a - b).abs() < 1e-5), "{seen:?} and {seen_there:?}");
}

#[test]
fn indices_are_checked_wherever_they_are() {
    let table = Tensor::normal(&[5, 3], 1, DType::F32);
    let select = |index: &[i64], is_computed: bool| {
        with_device(&DEVICE, || {
            let index = Tensor::from_slice(index, &[index.len()]);
            let index = if is_computed { index + 0_i64 } else { index };
            table.index_select(0, &index).to_vec::<f32>()
        })
    };
    for is_computed in [false, true] {
        let rows = select(&[4, -5, 0], is_computed).unwrap();
        assert_eq!(rows[3..6], rows[6..9]);
        for outside in [5, -6] {
            let error = select(&[1, outside], is_computed).unwrap_err().to_string();
            assert!(error.contains(&format!("index {outside}")), "{error}");
        }
    }
}

#[test]
fn what_is_computed_and_read_is_waited_for_once() {
    with_device(&DEVICE, || {
        // What comes with the answer, and what passes through staging.
        for count in [4, 20_000] {
            let x = Tensor::arange(0, count, 1, DType::F32);
            x.realize().unwrap();
            let run = || (&x + 1.0).to_vec::<f32>().unwrap();
            run();
            let before = crate::round_trips();
            let found = run();
            assert_eq!(crate::round_trips() - before, 1, "{count}");
            assert!(found.iter().zip(1..).all(|(element, n)| *element == n as f32), "{count}");
        }
    });
}
