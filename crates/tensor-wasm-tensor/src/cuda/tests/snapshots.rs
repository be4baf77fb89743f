//! What some plans become: `tests/snapshots/*.ptx`, the kernels of each as the compiler makes them, which are also run
//! and compared with what a CPU computes. After a change that is meant, `TENSOR_WASM_BLESS=1` writes them anew, and
//! what has changed is read in the difference.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::*;

/// Of a longer kernel the snapshot has how often each instruction is there, and not where.
const LINES_MAX: usize = 250;

/// A plan whose kernels are looked at: what it shows, and what makes its results from leaves that are there.
struct Case {
    name: &'static str,
    shows: &'static str,
    leaves: &'static [&'static [usize]],
    make: fn(&[Tensor]) -> Vec<Tensor>,
}

const CASES: &[Case] = &[
    Case {
        name: "chain",
        shows: "Six operations on each element are one pass over memory: relu(abs(x * y + z) - x) * 0.5.",
        leaves: &[&[4, 16], &[4, 16], &[4, 16]],
        make: |of| vec![((&of[0] * &of[1] + &of[2]).abs() - &of[0]).relu() * 0.5],
    },
    Case {
        name: "softmax",
        shows: "The largest of a row, the sum of its powers and the division are one kernel, which reads a row once.",
        leaves: &[&[4, 8]],
        make: |of| vec![of[0].softmax(1)],
    },
    Case {
        name: "layer_norm",
        shows: "Mean and variance of a row, and what is made of them, are one kernel, which reads a row once.",
        leaves: &[&[6, 40], &[40], &[40]],
        make: |of| vec![of[0].layer_norm(1, 1e-5) * &of[1] + &of[2]],
    },
    Case {
        name: "sum",
        shows: "A sum along the first axis: neighbouring items add up neighbouring columns.",
        leaves: &[&[24, 64]],
        make: |of| vec![of[0].sum(0)],
    },
    Case {
        name: "argmax",
        shows: "The largest of each row: items load neighbours, and exchange what they have found in a butterfly.",
        leaves: &[&[12, 100]],
        make: |of| vec![of[0].argmax(1)],
    },
    Case {
        name: "cumsum",
        shows: "Running sums in double precision: four items have a row, by turns as neighbours and apart.",
        leaves: &[&[6, 30]],
        make: |of| vec![of[0].cumsum(1)],
    },
    Case {
        name: "argsort",
        shows: "A line of two tiles: each is sorted in shared memory, and a second kernel merges both.",
        leaves: &[&[2100]],
        make: |of| vec![of[0].argsort(0, false)],
    },
    Case {
        name: "adam",
        shows: "Two steps of Adam, a kernel each: both means and the new value are one pass, with scalars from memory.",
        leaves: &[&[48], &[48], &[48]],
        make: |of| {
            let variable = crate::Variable::new(&of[0]);
            let mut adam = crate::Adam::new(std::slice::from_ref(&variable), 0.01);
            for gradient in &of[1..] {
                variable.get().set_grad(Some(gradient.clone()));
                crate::Optimizer::step(&mut adam).unwrap();
            }
            let kept =
                crate::Optimizer::state(&adam).into_iter().filter(|(name, _)| name != "steps").map(|(_, kept)| kept);
            kept.chain([variable.get()]).collect()
        },
    },
    Case {
        name: "product",
        shows: "A product in single precision with its bias and its rectifier: one kernel, which stores once.",
        leaves: &[&[24, 20], &[20, 36], &[36]],
        make: |of| vec![(of[0].matmul(&of[1]) + &of[2]).relu()],
    },
    Case {
        name: "attention",
        shows: "Attention in single precision: one kernel, which keeps no score in memory.",
        leaves: &[&[24, 16], &[24, 16], &[24, 16]],
        make: |of| vec![of[0].attention(&of[1], &of[2], true)],
    },
];

#[test]
fn plans_become_what_their_snapshots_say() {
    let is_blessed = std::env::var("TENSOR_WASM_BLESS").is_ok_and(|value| value == "1");
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/tests/snapshots");
    let mut wrong = Vec::new();
    for case in CASES {
        let loaded: Arc<Mutex<Vec<String>>> = Arc::default();
        let opened =
            Device::open(&emulated_with(Emulated { loaded: Some(loaded.clone()), ..Emulated::default() })).unwrap();
        let device = Place::Cuda(CudaDevice::of(opened, "emulated").unwrap());
        let leaves: Vec<Tensor> = with_device(&Place::Cpu, || {
            (1..).zip(case.leaves).map(|(seed, sizes)| normal(sizes, seed, DType::F32)).collect()
        });
        let compute = || {
            let made = (case.make)(&leaves);
            Tensor::realize_all(&made.iter().collect::<Vec<_>>()).unwrap();
            made.iter().map(|made| made.to_f64().unwrap()).collect::<Vec<_>>()
        };
        let (expected, found) = (with_device(&Place::Cpu, compute), with_device(&device, compute));
        for (expected, found) in expected.iter().zip(&found) {
            let wrong = expected.iter().zip(found).position(|(a, b)| !is_close(*a, *b, 1e-5));
            assert!(wrong.is_none(), "{}: {:?}", case.name, wrong.map(|at| (at, expected[at], found[at])));
        }
        let text = format!("// {}\n{}", case.shows, loaded.lock().iter().map(|ptx| shown(ptx)).collect::<String>());
        let path = format!("{folder}/{}.ptx", case.name);
        if std::fs::read_to_string(&path).ok().as_deref() != Some(&text) {
            if is_blessed { std::fs::write(&path, text).unwrap() } else { wrong.push(path) }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?} are not what is compiled; TENSOR_WASM_BLESS=1 writes them anew");
    let files = std::fs::read_dir(folder).unwrap().count();
    assert_eq!(files, CASES.len(), "a snapshot is nobody's");
}

/// A kernel as it is, without registers that it declares; or if it is long, what it consists of.
fn shown(ptx: &str) -> String {
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with(".reg");
    let lines: Vec<&str> = ptx.lines().filter(is_code).collect();
    if lines.len() <= LINES_MAX {
        return format!("\n{}\n", lines.iter().map(|line| line.replace('\t', "    ")).collect::<Vec<_>>().join("\n"));
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for line in &lines {
        let words = line.split_whitespace().filter(|word| !word.starts_with('@') && *word != "{");
        if let Some(name) = words.map(|word| word.trim_end_matches(';')).next().filter(|_| line.ends_with(';')) {
            *counts.entry(name).or_default() += 1;
        }
    }
    let mut text = String::from("\n");
    counts.iter().for_each(|(name, count)| writeln!(text, "{count:6} {name}").unwrap());
    text
}
