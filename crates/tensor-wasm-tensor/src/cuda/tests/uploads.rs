//! What waits for a device, and what does not: copies to it while kernels run there, plans, and whoever reads a number.

use super::*;

/// A device whose kernels wait at a gate.
fn gated() -> (CudaDevice, Arc<Gate>) {
    let gate: Arc<Gate> = Arc::default();
    let opened = Device::open(&emulated_with(Emulated { gate: gate.clone(), ..Emulated::default() })).unwrap();
    (CudaDevice::of(opened, "gated").unwrap(), gate)
}

/// More than travels with a job; so many that each has blocks of its own.
const ELEMENTS: usize = 5000;

fn counted(from: usize) -> Tensor {
    let elements: Vec<f32> = (from..from + ELEMENTS).map(|n| f32::from(u16::try_from(n).unwrap())).collect();
    Tensor::from_slice(&elements, &[ELEMENTS])
}

fn on(device: &CudaDevice, tensor: &Tensor) -> Arc<CudaBuffer> {
    tensor.value().unwrap().storage.cuda(device).unwrap()
}

fn element(tensor: &Tensor, at: usize) -> f32 {
    tensor.to_vec::<f32>().unwrap()[at]
}

#[test]
fn an_upload_waits_for_no_kernel_and_what_reads_it_for_both() {
    let (cuda, gate) = gated();
    with_device(&Place::Cuda(cuda.clone()), || {
        let (a, b) = (counted(0), counted(1000));
        on(&cuda, &a);
        // Loaded before: a module is loaded on a lane, for which kernels do not wait.
        (&a * 3.0).realize().unwrap();
        (&a * 2.0 + &a).realize().unwrap();
        cuda.synchronize().unwrap();
        gate.set(true);
        let running = &a * 3.0;
        running.realize().unwrap();
        // Nobody opens the gate before this is over.
        on(&cuda, &b).wait().unwrap();
        assert!(!on(&cuda, &running).pending.is_over().unwrap(), "the kernel is not over");
        let sum = &running * 2.0 + &b;
        sum.realize().unwrap();
        assert!(!on(&cuda, &sum).pending.is_over().unwrap(), "it comes after the kernel");
        gate.set(false);
        assert_eq!(element(&sum, 4999), 4999.0 * 6.0 + 5999.0);
    });
    assert!(!gate.is_broken.load(Ordering::Relaxed), "an upload waited for a kernel");
}

/// Memory that was freed while a kernel was still to read it is not written before the kernel has, nobody waits for
/// that, and the bytes that are copied are those that there were.
#[test]
fn an_upload_into_memory_that_a_kernel_reads_comes_after_it() {
    let (cuda, gate) = gated();
    with_device(&Place::Cuda(cuda.clone()), || {
        let first = counted(0);
        (&first * 3.0).realize().unwrap();
        cuda.synchronize().unwrap();
        for round in 1..4 {
            let old = counted(round);
            on(&cuda, &old).wait().unwrap();
            gate.set(true);
            let running = &old * 3.0;
            running.realize().unwrap();
            drop(old);
            let new = counted(100 * round);
            on(&cuda, &new);
            let tripled = &new * 3.0;
            tripled.realize().unwrap();
            drop(new);
            gate.set(false);
            let at = f32::from(u16::try_from(round).unwrap());
            assert_eq!((element(&running, 7), element(&tripled, 7)), (3.0 * (7.0 + at), 3.0 * (7.0 + 100.0 * at)));
        }
    });
    assert!(!gate.is_broken.load(Ordering::Relaxed), "the host waited");
}

/// However large it is: by pieces that nobody waits for, or by many threads.
#[test]
fn uploads_of_any_size_arrive() {
    let (cuda, _) = gated();
    with_device(&Place::Cuda(cuda.clone()), || {
        let sums: Vec<(usize, Tensor)> = [1000, 1025, 1 << 18, 700_000, 1 << 20, 1_500_000]
            .into_iter()
            .map(|count| {
                let elements: Vec<f32> = (0..count).map(|n| f32::from(u8::try_from(n % 251).unwrap())).collect();
                let there = Tensor::from_slice(&elements, &[count]);
                on(&cuda, &there);
                drop(elements);
                (count, there)
            })
            .collect();
        cuda.synchronize().unwrap();
        for (count, there) in sums {
            let mut found = vec![0; 4 * count];
            let buffer = on(&cuda, &there);
            cuda.when_possible(|stream| stream.read_blocking(buffer.buffer.handle(), 0, &mut found)).unwrap();
            let is_right = |(n, bytes): (usize, &[u8])| {
                f32::from_le_bytes(bytes.try_into().unwrap()) == f32::from(u8::try_from(n % 251).unwrap())
            };
            assert!(found.chunks(4).enumerate().all(is_right), "{count}");
        }
    });
}

/// However many kernels a plan has, whoever reads a number of it waits for the device once.
#[test]
fn reading_a_number_is_one_round_trip() {
    let device = Place::Cuda(CudaDevice::of(Device::open(&emulated(false)).unwrap(), "trips").unwrap());
    let w = with_device(&Place::Cpu, || normal(&[8, 8], 3, DType::F32));
    with_device(&device, || {
        let mut x = Tensor::normal(&[4, 8], 1, DType::F32);
        let mut trips = Vec::new();
        for _ in 0..8 {
            let before = execute::round_trips();
            x = (x.matmul(&w) + 0.5).tanh().softmax(1);
            let loss = x.square().sum(());
            let indices = x.argmax(1);
            Tensor::realize_all(&[&x, &loss, &indices]).unwrap();
            assert_eq!(execute::round_trips() - before > 0, trips.len() < 4, "computing is none: {trips:?}");
            let before = execute::round_trips();
            assert!(loss.item::<f32>().unwrap() > 0.0);
            trips.push(execute::round_trips() - before);
        }
        assert_eq!(trips, [1; 8]);
        // Many that are read after one another, each computed before any is read: what is over is not waited for.
        let sums: Vec<Tensor> = (0..3).map(|n| (&x + f64::from(n)).sum(())).collect();
        Tensor::realize_all(&sums.iter().collect::<Vec<_>>()).unwrap();
        let before = execute::round_trips();
        assert!(sums.iter().all(|sum| sum.item::<f32>().is_ok()));
        assert_eq!(execute::round_trips() - before, 3);
    });
}

/// A loss moves classes below zero out of the range, in a kernel; what comes of those that the host has it knows.
#[test]
fn classes_that_the_host_has_are_looked_at_there() {
    let device = Place::Cuda(CudaDevice::of(Device::open(&emulated(false)).unwrap(), "classes").unwrap());
    let weights = with_device(&Place::Cpu, || normal(&[8, 3], 3, DType::F32));
    with_device(&device, || {
        let x = Tensor::normal(&[4, 8], 1, DType::F32);
        x.realize().unwrap();
        let step = |classes: [i64; 4]| {
            let weights = weights.with_grad();
            let loss = x.matmul(&weights).cross_entropy(&Tensor::from_slice(&classes, &[4]));
            let before = execute::round_trips();
            loss.backward().map(|()| (execute::round_trips() - before, loss))
        };
        // In the first few runs kernels are loaded and graphs recorded.
        let trips: Vec<u64> = (0..8).map(|n| step([0, 1, 2, n % 3]).unwrap().0).collect();
        assert_eq!(trips[5..], [0; 3], "{trips:?}");
        for (class, text) in [(-1, "class -1, and there are 3"), (3, "class 3, and there are 3")] {
            let error = step([0, 1, class, 2]).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        assert!(step([2, 2, 2, 2]).unwrap().1.item::<f32>().unwrap() > 0.0);
    });
}
