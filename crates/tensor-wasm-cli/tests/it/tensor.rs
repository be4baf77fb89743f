//! `tensor-wasm tensor`.

use crate::support::{stderr, stdout, tensor_wasm};

fn tensor(args: &[&str]) -> (i32, String, String) {
    let output = tensor_wasm(&[&["tensor"], args].concat());
    (output.status.code().unwrap(), stdout(&output), stderr(&output))
}

/// A file as NumPy writes it.
fn npy(descr: &str, shape: &str, elements: &[u8]) -> Vec<u8> {
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    header.extend(std::iter::repeat_n(' ', 117 - header.len()));
    header.push('\n');
    let length = u16::try_from(header.len()).unwrap().to_le_bytes();
    [b"\x93NUMPY\x01\x00".as_slice(), &length, header.as_bytes(), elements].concat()
}

#[test]
fn eval_computes_prints_writes_and_differentiates() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let elements: Vec<u8> = (0..6_u8).flat_map(|n| f32::from(n).to_le_bytes()).collect();
    std::fs::write(path("a.npy"), npy("<f4", "(2, 3)", &elements)).unwrap();
    let a = format!("a={}", path("a.npy"));
    assert_eq!(tensor(&["eval", "a * 2 + 1", &a]), (0, "[[ 1.  3.  5.]\n [ 7.  9. 11.]]\n".to_owned(), String::new()));
    assert_eq!(tensor(&["eval", "a[1, ::-1].sum()", &a]).1, "12.0\n");
    // What one command writes, the next reads.
    let out = path("out.npy");
    let (code, said, errors) = tensor(&["eval", "a @ a.transpose()", &a, "-o", &out]);
    assert_eq!((code, said.contains("[2, 2] of f32"), errors.as_str()), (0, true, ""));
    assert_eq!(tensor(&["eval", "b", &format!("b={out}")]).1, "[[ 5. 14.]\n [14. 50.]]\n");
    let kept = path("out.safetensors");
    assert_eq!(tensor(&["eval", "a.cast(bf16)", &a, "-o", &kept]).0, 0);
    assert_eq!(tensor(&["eval", "b.sum().cast(f32)", &format!("b={kept}:result")]).1, "15.0\n");
    // The slope of x² is 2x.
    assert_eq!(tensor(&["eval", "square(a)", &a, "--grad", "a"]).1, "[[ 0.  2.  4.]\n [ 6.  8. 10.]]\n");
    let json = tensor_wasm(&["--json", "tensor", "eval", "a[0]", &a, "--dtype", "f64"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json, serde_json::json!({ "shape": [3], "dtype": "f64", "data": [0.0, 1.0, 2.0] }));
    let (code, _, explained) = tensor(&["eval", "(a @ ones([3, 4]) + 1).relu().sum()", &a, "--explain"]);
    assert!(
        code == 0 && explained.contains("matmul [2, 4] f32") && explained.contains("add maximum sum"),
        "{explained}"
    );
}

#[test]
fn eval_says_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("n.npy"), npy("<i8", "(2,)", &[0; 16])).unwrap();
    std::fs::write(path("short.npy"), npy("<f4", "(1000,)", &[0; 16])).unwrap();
    let n = format!("n={}", path("n.npy"));
    for (args, code, what) in [
        (vec!["b + 1", n.as_str()], 2, "there is no \"b\"; given are n"),
        (vec!["sofmax(n)", &n], 2, "there is softmax"),
        (vec!["n.reshape([3])", &n], 2, "reshape: 2 elements of shape [2] cannot have shape [3]"),
        (vec!["1 / n", &n], 1, "an integer is divided by zero"),
        (vec!["n", "n"], 2, "give arrays as NAME=FILE.npy"),
        (vec!["n", "n=/nowhere.npy"], 2, "/nowhere.npy"),
        (vec!["s", &format!("s={}", path("short.npy"))], 2, "short.npy"),
        (vec!["n", &n, &n], 2, "n is given twice"),
        (vec!["n * 1.0", &n, "--grad", "n"], 2, "floats"),
        (vec!["n", &n, "--grad", "m"], 2, "there is no m=FILE"),
        (vec!["n", &n, "--dtype", "f31"], 2, "none of bool u8"),
        (vec!["n", &n, "--device", "vulkan"], 2, "--device"),
        (vec!["n", &n, "--device", "cuda:99"], 1, "no device \"cuda:99\""),
        (vec!["zeros([1000000, 1000000])"], 1, "bytes of memory"),
    ] {
        let (found, _, errors) = tensor(&[&["eval"], args.as_slice()].concat());
        assert!(found == code && errors.contains(what), "{args:?}: {found} {errors}");
        assert!(!errors.contains(".rs:"), "{errors}");
    }
    let (code, listed, _) = tensor(&["ops"]);
    assert!(code == 0 && listed.contains("softmax(x, axis=-1)") && listed.lines().count() > 90, "{listed}");
}
