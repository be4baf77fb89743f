//! Decisions on machines that are made up: what things take there is computed by rules that the estimates do not know.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::cost::{KernelWork, Link, Speeds, Work};
use super::history::{Estimates, History};
use super::{Machine, Processor};
use crate::dtype::DType;

/// A link of 50 GB/s that takes so much for any copy.
fn link_of(latency: f64) -> Link {
    let known = [1e3, 1e5, 2e6, 2e7].map(|bytes| (bytes, latency + bytes / 5e10));
    Link { to_gpu: known, from_gpu: known }
}

/// About a server with some cores, and a GPU in it.
fn machine() -> Machine {
    let cpu = Speeds {
        run: 1e-6,
        kernel: 5e-7,
        rates: [(8e5, 4e11), (1.2e7, 2e11), (5e7, 5e10)],
        operations: 2e11,
        products_f32: 1e12,
        products_f64: 5e11,
        products_half: 8e11,
    };
    let gpu = Speeds {
        run: 9e-6,
        kernel: 2.5e-6,
        rates: [(3e6, 2e12), (2.5e7, 6e12), (4e8, 4e12)],
        operations: 2e13,
        products_f32: 5e13,
        products_f64: 5e13,
        products_half: 7e14,
    };
    Machine { cpu, gpu, link: link_of(8e-6) }
}

/// Where what a plan reads comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Leaves {
    /// The host has it anew for each run.
    New,
    /// The host had it once.
    Same,
    /// It was computed on the GPU, anew for each run.
    There,
}

/// Kinds of plans by what they have to do for `n` × `n` elements: kernels, operations for each element, products.
const KINDS: [(usize, f64, bool, DType); 7] = [
    (1, 1.0, false, DType::F32),
    (1, 30.0, false, DType::F32),
    (3, 6.0, false, DType::F64),
    (1, 1.0, true, DType::F32),
    (1, 1.0, true, DType::BF16),
    (12, 4.0, true, DType::F32),
    (30, 2.0, false, DType::F32),
];

fn work((kernels, operations, is_product, dtype): (usize, f64, bool, DType), n: f64) -> Work {
    #[expect(clippy::cast_precision_loss, reason = "few")]
    let bytes = 3.0 * n * n * dtype.size() as f64;
    let flops = if is_product { 2.0 * n * n * n } else { 0.0 };
    Work { kernels: vec![KernelWork { bytes, operations: operations * n * n, flops, dtype }; kernels] }
}

/// What a plan really takes on a machine: its kernels are better or worse than others, by a factor that nobody knows;
/// what is small does not fill it.
fn truth(work: &Work, speeds: &Speeds, factor: f64, fills: f64) -> f64 {
    let roofline = work.time(speeds) - speeds.run;
    let flops: f64 = work.kernels.iter().map(|kernel| kernel.flops + kernel.operations).sum();
    speeds.run + roofline * factor * (1.0 + fills / (flops + 0.1 * fills)).powf(0.2)
}

#[test]
fn nearly_all_decisions_are_within_a_tenth_of_the_better_device() {
    let machine = machine();
    let (mut good, mut all, mut early) = (0, 0, 0);
    for seed in 0..20 {
        let mut rng = SmallRng::seed_from_u64(seed);
        for kind in KINDS {
            for power in 5..13 {
                for leaves in [Leaves::New, Leaves::Same, Leaves::There] {
                    let n = f64::from(1 << power);
                    let work = work(kind, n);
                    let [a, b] = [0, 1].map(|_| rng.random_range(-0.4_f64..0.4).exp());
                    let cpu = truth(&work, &machine.cpu, a, 1e5);
                    let gpu = truth(&work, &machine.gpu, b, 1e8);
                    let bytes = n * n * 4.0;
                    let copy = |to: Processor| machine.link.time(2, 2.0 * bytes, to);
                    let mut history = History::default();
                    let mut is_there = leaves == Leaves::There;
                    let mut is_here = !is_there;
                    for run in 0..200 {
                        if leaves != Leaves::Same {
                            (is_there, is_here) = (leaves == Leaves::There, leaves != Leaves::There);
                        }
                        let name = if leaves == Leaves::Same { 0 } else { run + 1 };
                        let spread = history.spread(name, false);
                        let estimates = Estimates {
                            cpu: work.time(&machine.cpu),
                            gpu: work.time(&machine.gpu),
                            to_cpu: if is_here { 0.0 } else { copy(Processor::Cpu) / spread },
                            to_gpu: if is_there { 0.0 } else { copy(Processor::Gpu) / spread },
                            lies: (is_here != is_there).then_some(if is_here {
                                Processor::Cpu
                            } else {
                                Processor::Gpu
                            }),
                        };
                        let on = history.choose(&estimates).on;
                        // What it costs from now on, each time.
                        let stays = leaves == Leaves::Same;
                        let cost_cpu = cpu + if is_here || stays { 0.0 } else { copy(Processor::Cpu) };
                        let cost_gpu = gpu + if is_there || stays { 0.0 } else { copy(Processor::Gpu) };
                        let (cost, best) =
                            (if on == Processor::Gpu { cost_gpu } else { cost_cpu }, cost_cpu.min(cost_gpu));
                        let is_good = cost <= 1.1 * best;
                        early += usize::from(run == 0 && is_good);
                        if run >= 190 {
                            all += 1;
                            good += usize::from(is_good);
                        }
                        (is_there, is_here) = (is_there || on == Processor::Gpu, is_here || on == Processor::Cpu);
                        let noise = rng.random_range(1.0..1.06);
                        let seconds = if on == Processor::Gpu { gpu } else { cpu } * noise;
                        let seconds = history.is_measured_next(on).then_some(seconds);
                        history.ran(on, vec![name], seconds);
                    }
                }
            }
        }
    }
    assert!(good * 100 >= all * 95, "{good} of {all} decisions; {early} of the first ones");
    // Without any history: what the roofline is good for alone.
    assert!(early * 10 >= all / 10 * 8, "{early} of {} first decisions", all / 10);
}

#[test]
fn a_plan_does_not_go_back_and_forth() {
    let mut history = History::default();
    let estimates = |cpu: f64, gpu: f64| Estimates { cpu, gpu, to_cpu: 0.0, to_gpu: 0.0, lies: None };
    let mut changes = 0;
    let mut last = None;
    let mut rng = SmallRng::seed_from_u64(3);
    for _ in 0..1000 {
        // As good as each other, and never twice the same.
        let times = [0, 1].map(|_| 1e-3 * rng.random_range(0.97..1.03));
        let on = history.choose(&estimates(times[0], times[1])).on;
        changes += usize::from(last.is_some_and(|last| last != on));
        last = Some(on);
        let seconds = if on == Processor::Gpu { times[1] } else { times[0] };
        let seconds = history.is_measured_next(on).then_some(seconds);
        history.ran(on, vec![7], seconds);
    }
    // There to try it, and perhaps back.
    assert!(changes <= 2, "{changes} changes");
}

#[test]
fn plans_run_where_their_explanation_says() {
    use super::place::{Auto, set};
    use crate::{Device, Tensor, with_device};

    let Device::Cuda(device) = &*crate::cuda::tests::DEVICE else { panic!("it is no GPU") };
    let x = Tensor::from_vec((0..4096_u16).map(f32::from).collect(), &[64, 64]);
    let is_on_gpu = |tensor: &Tensor| tensor.value().unwrap().storage.is_on(device);
    let run = |make: &dyn Fn() -> Tensor| {
        with_device(&Device::Auto, || {
            let made = make();
            let explanation = made.explain().unwrap();
            made.realize().unwrap();
            assert_eq!(is_on_gpu(&made), !explanation.device.starts_with("cpu"), "{explanation}");
            (made, explanation.choice.unwrap())
        })
    };
    set(Auto::None { why: "there is none here".into() });
    let (made, choice) = run(&|| &x + 1.0);
    assert!(!is_on_gpu(&made) && choice.contains("auto is the cpu: there is none here"), "{choice}");
    // Small, and on the host: a copy alone would take longer.
    let own = machine();
    set(Auto::Open { device: device.clone(), machine: own.into() });
    let (made, choice) = run(&|| &x + 2.0);
    assert!(!is_on_gpu(&made) && choice.contains("µs on the cpu (estimated)"), "{choice}");
    // What lies there is used there, unless the way is short.
    let far = link_of(3e-5);
    set(Auto::Open { device: device.clone(), machine: Machine { link: far, ..own }.into() });
    let there = x.to(&Device::Cuda(device.clone()));
    let (made, choice) = run(&|| (&there * 3.0).exp());
    assert!(is_on_gpu(&made) && choice.starts_with("auto is "), "{choice}");
    // On a host that is slow enough, the same goes to the GPU from where it is.
    let slow = Speeds { rates: [(1e3, 1e6); 3], operations: 1e6, ..own.cpu };
    set(Auto::Open { device: device.clone(), machine: Machine { cpu: slow, ..own }.into() });
    let (made, _) = run(&|| (&x * 5.0).tanh());
    assert!(is_on_gpu(&made));
    let expected = (&x * 5.0).tanh().to_vec::<f32>().unwrap();
    assert_eq!(made.to_vec::<f32>().unwrap()[0], expected[0]);
    // A GPU without room for it is no reason to fail where the CPU has what it is made of.
    let small = crate::cuda::tests::within(20_000);
    set(Auto::Open { device: small.clone(), machine: Machine { cpu: slow, ..own }.into() });
    let fits = with_device(&Device::Auto, || (&x * 6.0).realize().map(|()| small.used_bytes()));
    assert!(fits.unwrap() > 0, "it was tried there");
    let (made, choice) = with_device(&Device::Auto, || {
        let made = (&x * 7.0).tanh() + x.t();
        let explanation = made.explain().unwrap();
        (made.to_vec::<f32>().unwrap(), explanation.choice.unwrap())
    });
    assert!(!choice.contains("auto is the cpu"), "{choice}");
    assert_eq!(made, ((&x * 7.0).tanh() + x.t()).to_vec::<f32>().unwrap());
    set(Auto::None { why: "there is none here".into() });
}
