//! `tensor-wasm kernel`.

use crate::support::{guest, stderr, stdout, tensor_wasm};

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
