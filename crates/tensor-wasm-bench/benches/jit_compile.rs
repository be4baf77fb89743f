//! What compiling kernels costs, and what it costs to have compiled them before.

#![allow(clippy::unwrap_used, reason = "a benchmark that goes wrong says so")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use tensor_wasm_gpu::DeviceKind;
use tensor_wasm_jit::Program;
use tensor_wasm_launch::Code;
use tensor_wasm_launch::cache::{Images, Options};

fn module(body: &str) -> Vec<u8> {
    let text = format!(
        r#"(module
            (import "kernel" "global_id" (func $global_id (param i32) (result i32)))
            (import "kernel" "fma_f32" (func $fma (param f32 f32 f32) (result f32)))
            (memory 1)
            {body})"#
    );
    wat::parse_str(text).unwrap()
}

/// Adds so many elements in every item.
fn vector_add(count: usize) -> Vec<u8> {
    let one = |n: usize| {
        let at = 4 * n;
        format!(
            "(f32.store offset={at} (local.get $o) (f32.add (f32.load offset={at} (local.get $p)) (f32.load offset={at} (local.get $q))))"
        )
    };
    let all: String = (0..count).map(one).collect();
    let bytes = 4 * count;
    module(&format!(
        r#"(func (export "k") (param $a i32) (param $b i32) (param $c i32) (local $i i32) (local $p i32) (local $q i32) (local $o i32)
            (local.set $i (i32.mul (call $global_id (i32.const 0)) (i32.const {bytes})))
            (local.set $p (i32.add (local.get $a) (local.get $i)))
            (local.set $q (i32.add (local.get $b) (local.get $i)))
            (local.set $o (i32.add (local.get $c) (local.get $i)))
            {all})"#
    ))
}

fn matmul() -> Vec<u8> {
    module(
        r#"(func (export "k") (param $a i32) (param $b i32) (param $c i32) (local $k i32) (local $row i32) (local $col i32) (local $sum f32)
            (local.set $col (call $global_id (i32.const 0)))
            (local.set $row (call $global_id (i32.const 1)))
            (loop $again
              (local.set $sum (call $fma
                (f32.load (i32.add (local.get $a) (i32.shl (i32.add (i32.shl (local.get $row) (i32.const 4)) (local.get $k)) (i32.const 2))))
                (f32.load (i32.add (local.get $b) (i32.shl (i32.add (i32.shl (local.get $k) (i32.const 4)) (local.get $col)) (i32.const 2))))
                (local.get $sum)))
              (br_if $again (i32.ne (local.tee $k (i32.add (local.get $k) (i32.const 1))) (i32.const 16))))
            (f32.store (i32.add (local.get $c) (i32.shl (i32.add (i32.shl (local.get $row) (i32.const 4)) (local.get $col)) (i32.const 2)))
              (local.get $sum)))"#,
    )
}

/// Nine points, weighted, of an image that is 1024 wide.
fn conv2d() -> Vec<u8> {
    let point = |n: usize| {
        let (at, weight) = (4096 * (n / 3) + 4 * (n % 3), 4 * n);
        format!(
            "(local.set $sum (call $fma (f32.load offset={at} (local.get $p)) (f32.load offset={weight} (local.get $w)) (local.get $sum)))"
        )
    };
    let all: String = (0..9).map(point).collect();
    module(&format!(
        r#"(func (export "k") (param $from i32) (param $w i32) (param $to i32) (local $i i32) (local $p i32) (local $sum f32)
            (local.set $i (i32.shl (i32.add (i32.shl (call $global_id (i32.const 1)) (i32.const 10)) (call $global_id (i32.const 0))) (i32.const 2)))
            (local.set $p (i32.add (local.get $from) (local.get $i)))
            {all}
            (f32.store offset=4100 (i32.add (local.get $to) (local.get $i)) (local.get $sum)))"#
    ))
}

fn benches(criterion: &mut Criterion) {
    let windows = [true; 3];
    let mut group = criterion.benchmark_group("jit_compile");
    for (name, wasm) in [
        ("vector_add[4]", vector_add(4)),
        ("vector_add[16]", vector_add(16)),
        ("matmul[16x16x16]", matmul()),
        ("conv2d[3x3]", conv2d()),
    ] {
        // From the bytes of the module to the text of the PTX.
        let compile = || Program::read(black_box(&wasm)).and_then(|program| program.compile("k", &windows)).unwrap();
        assert!(compile().ptx.contains(".visible .entry"));
        group.bench_function(format!("emit_text/{name}"), |bencher| bencher.iter(compile));
    }
    let wasm = matmul();
    group.bench_function("fingerprint/matmul_16x16x16", |bencher| bencher.iter(|| blake3::hash(black_box(&wasm))));
    let (hash, kernel) = (blake3::hash(&wasm), "k".into());
    let code = Code::Wasm(wasm);
    let options = Options { kind: DeviceKind::Cuda, kernel, windows: windows.to_vec(), is_small: false };
    group.bench_function("cache/cold_miss_then_insert", |bencher| {
        bencher.iter(|| {
            let images = Images::new(None);
            assert!(images.get(hash, &options).is_none());
            images.make(hash, &code, &options).unwrap()
        });
    });
    let images = Images::new(None);
    let made = images.make(hash, &code, &options).unwrap();
    assert_eq!(images.get(hash, &options), Some(made));
    group.bench_function("cache/warm_hit", |bencher| bencher.iter(|| images.get(black_box(hash), &options)));
    group.finish();
}

criterion_group!(all, benches);
criterion_main!(all);
