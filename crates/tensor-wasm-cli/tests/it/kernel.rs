//! `tensor-wasm kernel`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::support::{guest, root, stderr, stdout, tensor_wasm};

fn kernel(args: &[&str]) -> (i32, String, String) {
    let output = tensor_wasm(&[&["kernel"], args].concat());
    (output.status.code().unwrap(), stdout(&output), stderr(&output))
}

#[test]
fn check_lists_kernels_and_what_is_refused() {
    let file = guest("kernels.wasm");
    let (code, out, errors) = kernel(&["check", file.to_str().unwrap()]);
    assert_eq!((code, errors.as_str()), (0, ""));
    let line = |name: &str| out.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(line("saxpy ").contains("i32 f32 buffer buffer"), "{out}");
    assert!(line("nbody ").contains("4096"), "{out}");
    let json = tensor_wasm(&["--json", "kernel", "check", file.to_str().unwrap()]);
    let rows: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let row = rows.as_array().unwrap().iter().find(|row| row["kernel"] == "spmv").unwrap();
    assert_eq!(row["parameters"], serde_json::json!(["i32", "buffer", "buffer", "buffer", "buffer", "buffer"]));
    // A module that is no module of kernels, and a file that is no module.
    let dir = tempfile::tempdir().unwrap();
    let none = dir.path().join("none.wasm");
    // (module (func (export "f") (result i32) (i32.const 1)))
    let module =
        b"\0asm\x01\0\0\0\x01\x05\x01\x60\0\x01\x7f\x03\x02\x01\0\x07\x05\x01\x01f\0\0\x0a\x06\x01\x04\0\x41\x01\x0b";
    std::fs::write(&none, module).unwrap();
    let (code, out, errors) = kernel(&["check", none.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(out.contains("it returns a value, and kernels return nothing"), "{out}");
    assert_eq!(errors, "error: it has no kernel that can be compiled\n");
    let (code, _, errors) = kernel(&["check", guest("hello.wasm").to_str().unwrap()]);
    assert_eq!((code, errors.contains("it is a component, and kernels are core modules")), (1, true), "{errors}");
}

#[test]
fn build_writes_ptx() {
    let (file, dir) = (guest("kernels.wasm"), tempfile::tempdir().unwrap());
    let file = file.to_str().unwrap();
    let output = dir.path().join("saxpy.ptx");
    let (code, _, errors) = kernel(&["build", file, "--kernel", "saxpy", "-o", output.to_str().unwrap()]);
    assert_eq!((code, errors.as_str()), (0, ""));
    let written = std::fs::read_to_string(&output).unwrap();
    assert!(written.contains(".visible .entry k_saxpy("), "{written}");
    assert_eq!(kernel(&["build", file, "--kernel", "saxpy"]).1, written);
    let (code, _, errors) = kernel(&["build", file]);
    assert_eq!(code, 2);
    assert!(errors.contains("which kernel? give --kernel with one of: empty, matmul"), "{errors}");
    let (code, _, errors) = kernel(&["build", file, "--kernel", "nope"]);
    assert_eq!(code, 1);
    assert!(errors.contains("there is no kernel \"nope\"; there are: empty, matmul"), "{errors}");
    let (code, _, errors) = kernel(&["build", "/nowhere.wasm"]);
    assert_eq!((code, errors.contains("/nowhere.wasm")), (2, true));
}

#[test]
fn build_for_an_architecture() {
    let (file, dir) = (guest("kernels.wasm"), tempfile::tempdir().unwrap());
    let file = file.to_str().unwrap();
    let build = |arch: &str| kernel(&["build", file, "--kernel", "nbody", "--arch", arch]);
    let ptxas = root().join("target/ptxas/ptxas");
    let has_ptxas = Command::new(&ptxas).arg("--version").output().is_ok_and(|output| output.status.success());
    if !has_ptxas {
        println!("skipped: no ptxas; `cargo xtask ptxas` installs it");
    }
    let rest = |ptx: &str| {
        let is_header = |line: &&str| line.starts_with(".version") || line.starts_with(".target");
        ptx.lines().filter(|line| !is_header(line)).map(str::to_owned).collect::<Vec<_>>()
    };
    let portable = kernel(&["build", file, "--kernel", "nbody"]).1;
    for arch in ["sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120"] {
        let (code, ptx, errors) = build(arch);
        assert_eq!((code, errors.as_str()), (0, ""), "{arch}");
        let targets: Vec<&str> = ptx.lines().filter_map(|line| line.strip_prefix(".target ")).collect();
        assert_eq!(targets, [arch]);
        assert_eq!(rest(&ptx), rest(&portable), "{arch}");
        if has_ptxas {
            let from = dir.path().join(format!("{arch}.ptx"));
            std::fs::write(&from, &ptx).unwrap();
            let output = Command::new(&ptxas).args(["-arch", arch, "-o", "/dev/null"]).arg(&from).output().unwrap();
            // CUDA 13 knows no device between 7.5 and 8.0, and all of these.
            assert!(output.status.success(), "{arch}: {}", stderr(&output));
        }
    }
    assert_eq!(build("sm_75").1, portable);
    for arch in ["sm_70", "sm_90a", "compute_90", "90", ""] {
        let (code, out, errors) = build(arch);
        assert_eq!((code, out.as_str()), (2, ""), "{arch}");
        let known = "it is not known; known are sm_75, sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_120";
        assert_eq!(errors, format!("error: --arch {arch}: {known}\n"));
    }
}

/// Files for one test.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), content).unwrap();
        self.name(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

/// An `.npy` file, made without the code under test.
fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let header = format!("{header:<117}\n");
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|f| f.to_le_bytes()).collect()
}

fn floats(path: &Path) -> Vec<f32> {
    let file = std::fs::read(path).unwrap();
    assert!(file.len().is_multiple_of(4), "{}", file.len());
    file.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn has_cuda() -> bool {
    stdout(&tensor_wasm(&["devices"])).contains("cuda:0")
}

/// Not a multiple of the block.
const N: usize = 1003;

fn x_and_y() -> (Vec<f32>, Vec<f32>) {
    ((0..N).map(|i| i as f32 * 0.25 - 60.0).collect(), (0..N).map(|i| 1000.0 / (i as f32 + 1.0)).collect())
}

fn saxpy(device: &str, n: usize, x: &str, y: &str) -> (i32, String, String) {
    let (file, n) = (guest("kernels.wasm"), format!("i32:{n}"));
    kernel(
        &[
            &["run", file.to_str().unwrap(), "--kernel", "saxpy", "--grid", "8", "--block", "128", "--device", device],
            &["--arg", &n, "--arg", "f32:2.5", "--arg", x, "--arg", y][..],
        ]
        .concat(),
    )
}

fn check_saxpy(device: &str) {
    let files = Files::new();
    let (x, y) = x_and_y();
    let x_npy = files.write("x.npy", npy("<f4", "(1003,)", &bytes(&x)));
    let y_npy = files.write("y.npy", npy("<f4", "(17, 59)", &bytes(&y)));
    let out = files.name("out.npy");
    let (code, said, errors) = saxpy(device, N, &format!("in:{x_npy}"), &format!("inout:{y_npy}={out}"));
    assert_eq!((code, errors.as_str()), (0, ""), "{said}");
    let lines: Vec<Vec<&str>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["OUTPUT", "SHAPE", "DTYPE", "BYTES"]);
    assert_eq!(lines[1], [out.as_str(), "17,59", "f32", "4012"]);
    let expected_line = format!("saxpy on {}", if device == "cpu" { "cpu (CPU): " } else { "cuda:0 (" });
    assert!(said.lines().nth(2).unwrap().starts_with(&expected_line) && said.contains(" ms, after "), "{said}");
    let written = std::fs::read(files.path("out.npy")).unwrap();
    let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 2.5_f32.mul_add(*x, *y)).collect();
    assert!(written == npy("<f4", "(17, 59)", &bytes(&expected)), "the file differs");
    for (i, (found, expected)) in floats(&files.path("out.npy"))[32..].iter().zip(&expected).enumerate() {
        assert_eq!(found.to_bits(), expected.to_bits(), "element {i}");
    }
    // What was only read is as it was.
    assert!(std::fs::read(&y_npy).unwrap() == npy("<f4", "(17, 59)", &bytes(&y)));

    // The same with raw bytes, in place.
    let (x_bin, y_bin) = (files.write("x.bin", bytes(&x)), files.write("y.bin", bytes(&y)));
    let (code, said, errors) = saxpy(device, N, &format!("in:{x_bin}"), &format!("inout:{y_bin}={y_bin}"));
    assert_eq!((code, errors.as_str()), (0, ""), "{said}");
    assert_eq!(said.lines().nth(1).unwrap().split_whitespace().skip(1).collect::<Vec<_>>(), ["-", "-", "4012"]);
    assert_eq!(floats(Path::new(&y_bin)), expected);

    // One element too few: the trap says of what, and who did it; nothing is written.
    let x_npy = files.write("x.npy", npy("<f4", "(1002,)", &bytes(&x[..N - 1])));
    let none = files.name("none.npy");
    let (code, said, errors) = saxpy(device, N, &format!("in:{x_npy}"), &format!("inout:{y_npy}={none}"));
    assert_eq!((code, said.as_str()), (1, ""), "{errors}");
    assert!(
        errors.starts_with("error: out of bounds memory access at byte 4008 of argument 2 (in saxpy at"),
        "{errors}"
    );
    assert!(errors.ends_with("in work item 106,0,0 of group 7,0,0\n"), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(!files.path("none.npy").exists());

    // Arrays of nothing are arrays.
    let empty = files.write("empty.npy", npy("<f4", "(0, 3)", b""));
    let (code, _, errors) = saxpy(device, 0, &format!("in:{empty}"), &format!("inout:{empty}={none}"));
    assert_eq!((code, errors.as_str()), (0, ""));
    assert!(std::fs::read(&none).unwrap() == npy("<f4", "(0, 3)", b""));
    let (code, _, errors) = saxpy(device, 1, &format!("in:{empty}"), &format!("inout:{empty}={none}"));
    assert_eq!(code, 1);
    // Which one is not always known: a GPU looks for the address in all buffers where one is smaller than an access.
    let place = if device == "cpu" { " at byte 0 of argument " } else { "" };
    assert!(errors.contains(&format!("out of bounds memory access{place}")), "{errors}");
}

#[test]
fn run_computes_saxpy_on_the_cpu() {
    check_saxpy("cpu");
}

#[test]
fn run_computes_saxpy_on_cuda() {
    if has_cuda() {
        check_saxpy("cuda");
    } else {
        println!("skipped: no CUDA device");
    }
}

/// Runs a kernel on groups of 96, 33 and 7 items, and returns what it left in the last buffer of so many numbers.
fn run_in_groups(device: &str, name: &str, args: &[String], per_item: bool) -> Vec<Vec<u8>> {
    let (files, module) = (Files::new(), guest("kernels.wasm"));
    let run = |items: usize| {
        let (block, count) = (items.to_string(), if per_item { 5 * items } else { 5 });
        let out = format!("out:i32[{count}]={}", files.name("out.bin"));
        let mut all = vec!["run", module.to_str().unwrap(), "--kernel", name, "--grid", "5", "--block", &block];
        all.extend(["--device", device]);
        args.iter().chain([&out]).for_each(|arg| all.extend(["--arg", arg]));
        let (code, said, errors) = kernel(&all);
        assert_eq!((code, errors.as_str()), (0, ""), "{said}");
        std::fs::read(files.path("out.bin")).unwrap()
    };
    [96, 33, 7].map(run).to_vec()
}

#[test]
fn run_adds_up_groups_by_their_subgroups() {
    let files = Files::new();
    // Whole numbers, whose sums are exact; fewer than there are items.
    let x: Vec<f32> = (0..450).map(|i| (i * i % 101) as f32).collect();
    let args = ["i32:450".to_owned(), format!("in:{}", files.write("x.bin", bytes(&x)))];
    let devices = if has_cuda() { &["cpu", "cuda"][..] } else { &["cpu"] };
    for device in devices {
        let found = run_in_groups(device, "sums", &args, false);
        for (items, found) in [96, 33, 7].into_iter().zip(found) {
            let of = |group: usize| x.iter().skip(group * items).take(items).sum::<f32>();
            assert_eq!(found, bytes(&(0..5).map(of).collect::<Vec<f32>>()), "{items} items on {device}");
        }
    }
    // Items that part do the same wherever they run.
    let expected = run_in_groups("cpu", "parted", &[], true);
    for device in &devices[1..] {
        assert_eq!(run_in_groups(device, "parted", &[], true), expected);
    }
}

/// Multiplies ones by ones, adds the item's number in its subgroup, and writes the item's four sums.
const PRODUCT: &str = r#"
(module
  (import "kernel" "global_id" (func $id (param i32) (result i32)))
  (import "kernel" "subgroup_lane" (func $lane (result i32)))
  (import "kernel" "mma_bf16_f32" (func $multiply (param i32 i32 i32 i32 i32 i32 f32 f32 f32 f32)))
  (import "kernel" "mma_sum" (func $sum (param i32) (result f32)))
  (memory 1)
  (func (export "product") (param $to i32) (local $ones i32) (local $own f32)
    (local.set $ones (i32.const 0x3f803f80))
    (local.set $own (f32.convert_i32_u (call $lane)))
    (local.set $to (i32.add (local.get $to) (i32.shl (call $id (i32.const 0)) (i32.const 4))))
    (call $multiply (local.get $ones) (local.get $ones) (local.get $ones) (local.get $ones) (local.get $ones)
      (local.get $ones) (local.get $own) (local.get $own) (local.get $own) (local.get $own))
    (f32.store (local.get $to) (call $sum (i32.const 0)))
    (f32.store offset=4 (local.get $to) (call $sum (i32.const 1)))
    (f32.store offset=8 (local.get $to) (call $sum (i32.const 2)))
    (f32.store offset=12 (local.get $to) (call $sum (i32.const 3)))))
"#;

#[test]
fn run_multiplies_matrices_whoever_is_there() {
    let files = Files::new();
    let module = files.write("product.wat", PRODUCT);
    let devices = if has_cuda() { &["cpu", "cuda"][..] } else { &["cpu"] };
    for (device, items) in devices.iter().flat_map(|device| [96, 33, 7].map(|items| (device, items))) {
        let (out, block) = (format!("out:f32[{}]={}", 5 * 4 * items, files.name("out.bin")), items.to_string());
        let run = ["run", &module, "--kernel", "product", "--grid", "5", "--block", &block, "--device", device];
        let (code, said, errors) = kernel(&[&run[..], &["--arg", &out]].concat());
        assert_eq!((code, errors.as_str()), (0, ""), "{said}");
        // Four products for each item of the four that have the row and of those that have the column, if both are
        // there.
        let sum = |item: usize, n: usize| {
            let (lane, there) = (item % 32, (items - item / 32 * 32).min(32));
            let (row, column) = (lane / 4, 2 * (lane % 4) + n % 2);
            let count = (0..4).filter(|own| 4 * row + own < there && 4 * column + own < there).count();
            (lane + 4 * count) as f32
        };
        let group: Vec<f32> = (0..items).flat_map(|item| [0, 1, 2, 3].map(|n| sum(item, n))).collect();
        assert_eq!(std::fs::read(files.path("out.bin")).unwrap(), bytes(&group.repeat(5)), "{items} items on {device}");
    }
    // For GPUs that have it.
    let (code, ptx, _) = kernel(&["build", &module]);
    assert!(code == 0 && ptx.contains(".target sm_80"), "{ptx}");
    let (code, ptx, _) = kernel(&["build", &module, "--arch", "sm_90"]);
    assert!(code == 0 && ptx.contains(".target sm_90"), "{ptx}");
    let (code, _, errors) = kernel(&["build", &module, "--arch", "sm_75"]);
    let why = "error: --arch sm_75: product multiplies matrices, which GPUs do from sm_80 on\n";
    assert_eq!((code, errors.as_str()), (2, why));
}

#[test]
fn run_on_cuda_where_there_is_none_says_why() {
    if has_cuda() {
        return println!("skipped: there is a CUDA device");
    }
    let file = guest("kernels.wasm");
    let run = ["run", file.to_str().unwrap(), "--kernel", "empty", "--grid", "1", "--block", "1"];
    let (code, out, errors) = kernel(&[&run[..], &["--device", "cuda"]].concat());
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(errors.starts_with("error: --device cuda:0: ") && errors.contains("NVIDIA driver"), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    // Left to itself it takes the CPU, and says so.
    let (code, out, errors) = kernel(&run);
    assert_eq!(code, 0, "{errors}");
    assert!(out.starts_with("empty on cpu (CPU): "), "{out}");
    assert!(errors.starts_with("note: running on the CPU: ") && errors.lines().count() == 1, "{errors}");
}

/// Writes what it is given and where it is, and loops if it is told to.
const LAB: &str = r#"
;; Kernels of tests.
(module
  (import "kernel" "global_id" (func $id (param i32) (result i32)))
  (memory (import "env" "memory") 0)
  (func (export "numbers") (param $to i32) (param $a i64) (param $b f64)
    (i64.store (local.get $to) (local.get $a))
    (f64.store offset=8 (local.get $to) (local.get $b)))
  (func (export "where") (param $to i32)
    (local $i i32)
    (local.set $i (i32.add (call $id (i32.const 0))
      (i32.mul (i32.const 4) (i32.add (call $id (i32.const 1)) (i32.mul (i32.const 4) (call $id (i32.const 2)))))))
    (i32.store16 (i32.add (local.get $to) (i32.mul (local.get $i) (i32.const 2))) (i32.add (local.get $i) (i32.const 1))))
  (func (export "forever") (param $to i32)
    (loop $l
      (i32.store (local.get $to) (i32.add (i32.load (local.get $to)) (i32.const 1)))
      (br $l))))
"#;

#[test]
fn run_takes_text_numbers_dimensions_and_outputs_of_any_type() {
    let files = Files::new();
    let lab = files.write("lab.wat", LAB);
    let out = files.name("out.npy");
    let to = format!("out:u64[1,2]={out}");
    let common = ["run", &lab, "--device", "cpu", "--block", "1", "--grid", "1", "--kernel", "numbers"];
    let (code, said, errors) =
        kernel(&[&common[..], &["--arg", &to, "--arg", "i64:-0x2", "--arg", "f64:-inf"]].concat());
    assert_eq!((code, errors.as_str()), (0, ""), "{said}");
    let data = [(-2_i64).to_le_bytes(), f64::NEG_INFINITY.to_le_bytes()].concat();
    assert!(std::fs::read(&out).unwrap() == npy("<u8", "(1, 2)", &data));

    let args = ["kernel", "run", &lab, "--device", "cpu", "--kernel", "where", "--grid", "2,1,2", "--block", "2,4"];
    let to = format!("out:i16[32]={}", files.name("where.bin"));
    let output = tensor_wasm(&[&["--json"], &args[..], &["--arg", &to]].concat());
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    let written: Vec<u8> = (1..=32_i16).flat_map(i16::to_le_bytes).collect();
    assert_eq!(std::fs::read(files.path("where.bin")).unwrap(), written, "raw bytes have no header");
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["kernel"], "where");
    assert_eq!((&said["device"], &said["device_name"]), (&"cpu".into(), &"CPU".into()));
    assert_eq!((&said["grid"], &said["block"]), (&serde_json::json!([2, 1, 2]), &serde_json::json!([2, 4, 1])));
    let row = serde_json::json!([{ "file": files.name("where.bin"), "shape": [32], "dtype": "i16", "bytes": 64 }]);
    assert_eq!(said["outputs"], row);
    assert!(said["launch_ms"].as_f64().unwrap() > 0.0 && said["compile_ms"].as_f64().unwrap() > 0.0, "{said}");
}

#[test]
fn run_stops_at_the_deadline() {
    let files = Files::new();
    let lab = files.write("lab.wat", LAB);
    let to = format!("out:i32[1]={}", files.name("out.npy"));
    let mut devices = vec!["cpu"];
    if has_cuda() {
        devices.push("cuda");
    } else {
        println!("skipped: no CUDA device");
    }
    for device in devices {
        let began = Instant::now();
        let run = ["run", &lab, "--kernel", "forever", "--grid", "64", "--block", "64", "--device", device];
        let (code, out, errors) = kernel(&[&run[..], &["--deadline-ms", "300", "--arg", &to]].concat());
        assert_eq!((code, out.as_str()), (1, ""), "{errors}");
        assert_eq!(errors, "error: the launch took longer than 300ms\n");
        assert!(began.elapsed().as_secs() < 10, "{:?}", began.elapsed());
        assert!(!files.path("out.npy").exists());
    }
}

#[test]
fn run_explains_mistakes_and_exits_with_2() {
    let files = Files::new();
    let module = guest("kernels.wasm");
    let module = module.to_str().unwrap();
    let check = |args: &[&str], expected: &str| {
        let (code, out, errors) = kernel(&[&["run"], args].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {errors}");
        assert!(errors.contains(expected), "{args:?}: {errors:?} does not say {expected:?}");
        assert_eq!(errors.lines().count(), 1, "one line: {errors}");
    };
    let shape = ["--grid", "8", "--block", "128", "--device", "cpu"];
    let of = |args: &[&str], expected: &str| {
        let args: Vec<&str> = args.iter().flat_map(|arg| ["--arg", *arg]).collect();
        check(&[&[module, "--kernel", "saxpy"], &shape[..], &args].concat(), expected);
    };
    let x = format!("in:{}", files.write("x.bin", [0; 4000]));
    let out = files.name("out.npy");
    let y = format!("out:f32[1000]={out}");
    // Too few, too many, the wrong kind.
    let takes = "saxpy takes 4: i32 f32 buffer buffer";
    of(&[], &format!("{takes}; 0 --arg were given"));
    of(&["i32:1000", "f32:1", &x], &format!("{takes}; 3 --arg were given"));
    of(&["i32:1000", "f32:1", &x, &y, "i32:1"], &format!("{takes}; 5 --arg were given"));
    of(&["i64:1000", "f32:1", &x, &y], &format!("--arg i64:1000: argument 0 is to be i32; {takes}"));
    of(&["i32:1000", &x, &x, &y], "argument 1 is to be f32");
    of(&["i32:1000", "f32:1", "f64:2", &y], "--arg f64:2: argument 2 is to be buffer");
    of(&["i32:ten", "f32:1", &x, &y], "--arg i32:ten: expected a whole number from -2147483648 to 4294967295");
    of(&["i32:1", "f32:1e99", &x, &y], "--arg f32:1e99: expected a number such as 2.5, -1e-3, inf or nan");
    let with = |arg: &str, expected: &str| of(&["i32:1000", "f32:1", &x, arg], expected);
    with("1000", "--arg 1000: expected i32:N, i64:N, f32:X");
    with("u32:1000", "--arg u32:1000: \"u32\" is no kind of argument; expected i32:N");
    with("in:", "--arg in:: the name of a file is missing");
    with("inout:y.npy", "--arg inout:y.npy: expected inout:FILE=OUT");
    with("out:f32[8]", "expected out:TYPE[SHAPE]=OUT, such as out:f32[1024]=y.npy");
    with("out:f16[8]=y.npy", "\"f16\" is no type of elements; known are i8 u8 i16");
    with("out:f32[x]=y.npy", "expected TYPE[SHAPE] such as f32[1024] or u8[32,32], found \"f32[x]\"");
    with("out:f32[99999999999]=y.npy", "f32[99999999999] is too large");
    // Files that are not there, or not what they should be.
    with("in:/no/such.npy", "--arg in:/no/such.npy: /no/such.npy: No such file");
    with(&format!("in:{}", files.name("")), "Is a directory");
    with("out:f32[8]=/no/such/out.npy", "there is no folder /no/such to write into");
    with(&format!("out:f32[8]={}", files.name("")), "is a folder, and a file is to be written");
    with(&format!("inout:{}={out}", files.name("x.bin")), "the type and shape for an .npy file are not known");
    let twice = format!("inout:{}={out}", files.write("y.npy", npy("<f4", "(1000,)", &[0; 4000])));
    of(&["i32:1000", "f32:1", &twice, &y], "another argument is written to");
    let sparse = files.write("sparse.bin", "");
    std::fs::File::create(&sparse).unwrap().set_len(1 << 40).unwrap();
    with(&format!("in:{sparse}"), "sparse.bin: it is too large");
    let damaged = |name: &str, content: Vec<u8>, expected: &str| {
        let file = files.write(name, content);
        with(&format!("in:{file}"), &format!("{file}: {expected}"));
    };
    damaged("empty.npy", Vec::new(), "it is not an .npy file");
    damaged("zip.npy", b"PK\x03\x04".to_vec(), "it is not an .npy file");
    damaged("header.npy", npy("<f4", "(1000,)", b"")[..40].to_vec(), "it is cut off: it ends in its header");
    damaged(
        "cut.npy",
        npy("<f4", "(1000,)", &[0; 3999]),
        "it is cut off: its header says f32[1000], 4000 bytes, and 3999",
    );
    damaged("more.npy", npy("<f4", "(1000,)", &[0; 4001]), "its header says f32[1000], 4000 bytes, and 1 more");
    damaged(
        "huge.npy",
        npy("<f8", "(4294967296, 4294967296)", b""),
        "its header says f64[4294967296,4294967296], which",
    );
    damaged("big-endian.npy", npy(">f4", "(1000,)", &[0; 4000]), "its elements are big-endian");
    damaged("object.npy", npy("|O", "(1000,)", &[0; 4000]), "its elements are Python objects");
    damaged("half.npy", npy("<f2", "(1000,)", &[0; 2000]), "its elements are \"<f2\"; known are i8 u8");
    let fortran = String::from_utf8_lossy(&npy("<f4", "(2, 2)", b"")[10..]).replace("False,", "True, ");
    let fortran = [&npy("<f4", "(2, 2)", b"")[..10], fortran.as_bytes(), &[0; 16]].concat();
    damaged("fortran.npy", fortran, "its elements are in Fortran order; convert them with numpy.ascontiguousarray");
    damaged("control.npy", npy("\u{1b}[2J\nx", "(1000,)", b""), "its elements are \"\\u{1b}[2J\\nx\"");
    // The launch.
    let empty = |grid: &str, block: &str, more: &[&str], expected: &str| {
        let launch = [module, "--kernel", "empty", "--grid", grid, "--block", block];
        let device: &[&str] = if more.contains(&"--device") { &[] } else { &["--device", "cpu"] };
        check(&[&launch[..], device, more].concat(), expected);
    };
    let expected = "expected one to three whole numbers from 1 on, as in 8 or 16,16";
    for grid in ["0", "8,0", "", "8,", "1,1,1,1", "4294967296", "8x8", "1.5"] {
        empty(grid, "1", &[], &format!("--grid {grid}: {expected}"));
        empty("1", grid, &[], &format!("--block {grid}: {expected}"));
    }
    empty("1", "2048", &[], "a block of [2048, 1, 1] threads; this kernel allows 1024");
    empty("1", "1,1,65", &[], "1024 by 1024 by 64");
    empty("1", "65536,65536", &[], "this kernel allows 1024");
    empty("1,65536", "1", &[], "a grid of [1, 65536, 1] blocks; the device allows");
    empty("1", "1", &["--arg", "i32:1"], "empty takes no arguments; 1 --arg were given");
    empty("1", "1", &["--device", "gpu"], "--device: \"gpu\" is not auto, cpu, cuda or cuda:N");
    empty("1", "1", &["--deadline-ms", "0"], "--deadline-ms 0: expected a number from 1 to 87960");
    empty("1", "1", &["--deadline-ms", "18446744073709551615"], "expected a number from 1 to");
    // The module.
    check(&[&["/no/such.wasm"], &shape[..]].concat(), "/no/such.wasm: No such file");
    check(&[&[module], &shape[..]].concat(), "which kernel? give --kernel with one of: empty, matmul");
    let text = files.write("bad.wat", "(module\n  (func (export \"f\") (i32.nonsense)))");
    check(
        &[&[text.as_str()], &shape[..]].concat(),
        "bad.wat: unknown operator or unexpected token (line 2, column 23)",
    );
    assert!(!Path::new(&out).exists() && !Path::new("y.npy").exists(), "nothing was written");
}

#[test]
fn run_refuses_what_is_no_kernel_with_1() {
    let files = Files::new();
    let check = |file: &str, kernel_name: &str, expected: &str| {
        let run = ["run", file, "--kernel", kernel_name, "--grid", "1", "--block", "1", "--device", "cpu"];
        let (code, out, errors) = kernel(&run);
        assert_eq!((code, out.as_str()), (1, ""), "{errors}");
        assert!(errors.contains(expected) && errors.lines().count() == 1, "{errors:?} does not say {expected:?}");
    };
    let module = guest("kernels.wasm");
    check(module.to_str().unwrap(), "nope", "there is no kernel \"nope\"; there are: empty, matmul");
    check(guest("hello.wasm").to_str().unwrap(), "k", "it is a component, and kernels are core modules");
    check(&files.write("f.wat", r#"(module (func (export "f") (result i32) (i32.const 1)))"#), "f", "returns a value");
    check(&files.write("k.ptx", ".version 7.1"), "k", "it is not a Wasm module");
    check(
        &files.write("trap.wat", r#"(module (func (export "f") unreachable))"#),
        "f",
        "in work item 0,0,0 of group 0,0,0",
    );
}
