//! Functions that launch their own kernels, over HTTP: what they compute, what happens to those that misbehave, and
//! that nobody else notices. Everything runs on the CPU, and again on a GPU where there is one.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Options, Server, devices, guest_bytes, wait_until};

fn deploy(server: &Server, name: &str, file: &str) {
    server.deploy_with(name, &guest_bytes(file), r#"{"gpu":true}"#).ok();
}

fn call(server: &Server, name: &str, export: &str, args: &Value) -> Value {
    let answer = server.invoke(name, &json!({ "export": export, "args": args }).to_string()).result();
    match answer.get("ok") {
        Some(value) => value.clone(),
        None => answer,
    }
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap_or_else(|| panic!("{value}")).iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Numbers that differ from run to run, with few digits.
fn numbers(count: usize, seed: u64) -> Vec<f64> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let mut state = (now ^ seed) | 1;
    let next = move |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state % 2000) as f64 - 1000.0) / 8.0
    };
    (0..count).map(next).collect()
}

#[test]
fn a_component_launches_its_own_kernel_and_every_element_is_right() {
    for device in devices() {
        let server = Server::with(Options::default().device(device));
        deploy(&server, "gpu", "gpu-examples.wasm");
        let named = call(&server, "gpu", "device", &json!([]));
        assert!(named.as_str().unwrap().to_lowercase().contains(device), "{named}");
        for n in [1, 255, 256, 1_000, 20_011] {
            let (x, y) = (numbers(n, 1), numbers(n, 2));
            let found = floats(&call(&server, "gpu", "saxpy", &json!([2.5, x, y])));
            assert_eq!(found.len(), n);
            for i in 0..n {
                assert_eq!(found[i], 2.5 * x[i] + y[i], "element {i} of {n} on {device}");
            }
        }
        assert!(server.metric("tensor_wasm_kernel_dispatches_total") >= 5.0);
        server.wait_for_metric("tensor_wasm_active_instances", 0.0);
        // What a call allocated goes back with it; what launches share stays.
        wait_until("memory to be given back", || server.metric("tensor_wasm_gpu_memory_used_bytes") < 8192.0);
    }
}

#[test]
fn a_core_module_does_the_same_with_buffers_and_in_its_own_memory() {
    for device in devices() {
        let server = Server::with(Options::default().device(device));
        deploy(&server, "core", "gpu-saxpy-core.wasm");
        for n in [1, 1_000, 100_003] {
            assert_eq!(call(&server, "core", "saxpy_check", &json!([n, 2.5])), 0, "{n} elements on {device}");
        }
        // Its memory is the engine's, which the device does not see.
        let negative = call(&server, "core", "saxpy_pinned", &json!([1_000, 2.5]));
        assert_eq!(negative, -6, "an invalid launch");
        let settings = r#"{"gpu":true,"memory":"pinned"}"#;
        server.deploy_with("pinned", &guest_bytes("gpu-saxpy-core.wasm"), settings).ok();
        let kept = server.get("/functions/pinned/revisions").text();
        assert!(kept.contains(r#""memory":"pinned""#) && kept.contains(r#""gpu":true"#), "{kept}");
        for n in [1, 1_000, 100_003] {
            assert_eq!(call(&server, "pinned", "saxpy_pinned", &json!([n, 2.5])), 0, "{n} elements on {device}");
            assert_eq!(call(&server, "pinned", "saxpy_check", &json!([n, 2.5])), 0, "{n} elements on {device}");
        }
        let why = server.deploy_with("no", &guest_bytes("gpu-examples.wasm"), settings).refused(400, "invalid_args");
        assert!(why.contains("memory = pinned is for core modules"), "{why}");
    }
}

#[test]
fn the_examples_compute_what_they_should() {
    for device in devices() {
        let server = Server::with(Options::default().device(device));
        deploy(&server, "gpu", "gpu-examples.wasm");
        for n in [1_usize, 16, 37] {
            let (a, b) = (numbers(n * n, 3), numbers(n * n, 4));
            let found = floats(&call(&server, "gpu", "matmul", &json!([n, a, b])));
            for row in 0..n {
                for column in 0..n {
                    let exact: f64 = (0..n).map(|k| a[row * n + k] * b[k * n + column]).sum();
                    let bound: f64 = (0..n).map(|k| (a[row * n + k] * b[k * n + column]).abs()).sum::<f64>() * 1e-5;
                    let own = found[row * n + column];
                    assert!((own - exact).abs() <= bound + 1e-6, "{own} for {exact}, {n} by {n} on {device}");
                }
            }
        }
        let data: Vec<u8> = numbers(5_000, 5).iter().map(|x| (*x as i64 & 255) as u8).collect();
        let bins = floats(&call(&server, "gpu", "histogram", &json!([data])));
        for value in 0..=255_u8 {
            let exact = data.iter().filter(|byte| **byte == value).count() as f64;
            assert_eq!(bins[usize::from(value)], exact, "{value} on {device}");
        }
        let x = numbers(10_007, 6);
        let sum = call(&server, "gpu", "sum", &json!([x])).as_f64().unwrap();
        let (exact, scale): (f64, f64) = (x.iter().sum(), x.iter().map(|x| x.abs()).sum());
        assert!((sum - exact).abs() <= scale * 1e-5, "{sum} for {exact} on {device}");
        // Two bodies come together, and neither of them moves the middle.
        let bodies = floats(&call(&server, "gpu", "nbody", &json!([[0, 0, 0, 1, 1, 0, 0, 1], 50, 0.01])));
        assert!(bodies[0] > 0.0 && bodies[4] < 1.0 && (bodies[0] + bodies[4] - 1.0).abs() < 1e-4, "{bodies:?}");
        // Heat spreads evenly and nothing of it is made.
        let mut field = vec![0.0; 15 * 15];
        field[7 * 15 + 7] = 100.0;
        let after = floats(&call(&server, "gpu", "heat", &json!([15, 15, 5, field])));
        let total: f64 = after.iter().sum();
        assert!((total - 100.0).abs() < 1e-3 && after[7 * 15 + 7] < 100.0, "{total}");
        assert_eq!(after[7 * 15 + 6], after[6 * 15 + 7]);
        let beside = call(&server, "gpu", "wait-beside", &json!([2_000_000]));
        assert!(beside.as_u64().is_some(), "{beside}");
    }
}

#[test]
fn images_are_drawn_and_blurred_over_http() {
    for device in devices() {
        let server = Server::with(Options::default().device(device));
        deploy(&server, "images", "gpu-images.wasm");
        let drawn = server.get("/run/images/mandelbrot?width=200&height=120&iterations=100");
        assert_eq!((drawn.status, drawn.header("content-type")), (200, Some("image/png")), "{}", drawn.text());
        assert!(drawn.bytes.starts_with(b"\x89PNG\r\n\x1a\n") && drawn.bytes.len() > 500);
        let again = server.get("/run/images/mandelbrot?width=200&height=120&iterations=100");
        assert_eq!(drawn.bytes, again.bytes);
        let blurred =
            server.request("POST", "/run/images/blur?radius=3", &[("content-type", "image/png")], &drawn.bytes);
        assert_eq!((blurred.status, blurred.header("content-type")), (200, Some("image/png")), "{}", blurred.text());
        assert!(blurred.bytes.starts_with(b"\x89PNG\r\n\x1a\n") && blurred.bytes != drawn.bytes);
        for (path, body) in [
            ("/run/images/blur?radius=3", &b"not a png"[..]),
            ("/run/images/blur?radius=9999", &drawn.bytes),
            ("/run/images/blur", &drawn.bytes[..drawn.bytes.len() / 2]),
        ] {
            let refused = server.request("POST", path, &[], body);
            assert_eq!(refused.status, 400, "{path}: {}", refused.text());
        }
        for path in ["?width=0", "?width=100000", "?iterations=x", "?scale=nan"] {
            let refused = server.get(&format!("/run/images/mandelbrot{path}"));
            assert_eq!(refused.status, 400, "{path}: {}", refused.text());
        }
    }
}

#[test]
fn a_function_without_permission_does_not_reach_the_device() {
    let server = Server::with(Options::config("[tenant.none]\ngpu_memory_bytes_max = 0\n").device("cpu"));
    // A deploy that says nothing of the GPU is told so; one that says no is taken at its word.
    let plain = [("content-type", "application/wasm")];
    let wasm = guest_bytes("gpu-examples.wasm");
    let refused = server.request("POST", "/functions?name=plain", &plain, &wasm);
    assert!(refused.text().contains("--gpu"), "{}", refused.text());
    server.request("POST", "/functions?name=plain&settings=%7B%22gpu%22%3Afalse%7D", &plain, &wasm).ok();
    let answer = server.invoke("plain", r#"{"export":"device"}"#).result();
    assert!(answer["err"].as_str().unwrap().contains("deploy it with --gpu"), "{answer}");
    let tenant = [("x-tensorwasm-tenant", "none"), ("content-type", "application/wasm")];
    let path = "/functions?name=f&settings=%7B%22gpu%22%3Atrue%7D";
    server.request("POST", path, &tenant, &guest_bytes("gpu-examples.wasm")).ok();
    let tenant = [("x-tensorwasm-tenant", "none"), ("content-type", "application/json")];
    let answer = server.request("POST", "/functions/f/invoke", &tenant, br#"{"export":"device"}"#).result();
    assert!(answer["err"].as_str().unwrap().contains("gpu_memory_bytes_max"), "{answer}");
}

#[test]
fn code_of_a_gpu_is_for_tenants_that_are_trusted_with_it() {
    for device in devices() {
        let server = Server::with(Options::config("[tenant.trusted]\ngpu_raw_ptx = true\n").device(device));
        let ask = |tenant: &str| {
            let headers = [("x-tensorwasm-tenant", tenant), ("content-type", "application/wasm")];
            let path = "/functions?name=hostile&settings=%7B%22gpu%22%3Atrue%7D";
            server.request("POST", path, &headers, &guest_bytes("gpu-hostile.wasm")).ok();
            let headers = [("x-tensorwasm-tenant", tenant), ("content-type", "application/json")];
            server.request("POST", "/functions/hostile/invoke", &headers, br#"{"export":"raw-ptx"}"#).result()
        };
        let denied = ask("other");
        assert!(denied.as_str().unwrap().contains("gpu_raw_ptx"), "{denied}");
        let ran = ask("trusted");
        let expected = if device == "cuda" { "it ran: [42, 0, 0, 0]" } else { "compiled for a CPU" };
        assert!(ran.as_str().unwrap().contains(expected), "{ran} on {device}");
        // In a worker of its own.
        assert_eq!(crate::device::workers(&server).len(), 2, "on {device}");
    }
}

/// A kernel that traps, launched and not waited for, and what waiting says.
fn careless() -> Vec<u8> {
    let kernel = wat::parse_str(r#"(module (memory 1) (func (export "trap") unreachable))"#).unwrap();
    let bytes: String = kernel.iter().map(|byte| format!("\\{byte:02x}")).collect();
    let text = format!(
        r#"(module
  (import "wasi:cuda/host@0.2.0" "wasi_cuda_load_ptx" (func $load (param i32 i32 i32 i32) (result i64)))
  (import "wasi:cuda/host@0.2.0" "wasi_cuda_launch"
    (func $launch (param i64 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
  (import "wasi:cuda/host@0.2.0" "wasi_cuda_sync" (func $sync (result i32)))
  (import "wasi:cuda/host@0.2.0" "wasi_cuda_last_error_len" (func $error (result i32)))
  (memory (export "memory") 1)
  (global $calls (mut i32) (i32.const 0))
  (data (i32.const 0) "trap")
  (data (i32.const 64) "{bytes}")
  (func (export "launch") (result i32)
    (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
    (call $launch (call $load (i32.const 64) (i32.const {len}) (i32.const 0) (i32.const 4))
      (i32.const 1) (i32.const 1) (i32.const 1) (i32.const 1) (i32.const 1) (i32.const 1)
      (i32.const 0) (i32.const 0) (i32.const 0)))
  (func (export "sync") (result i32 i32 i32)
    (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
    (call $sync) (call $error) (global.get $calls)))"#,
        len = kernel.len()
    );
    wat::parse_str(text).unwrap()
}

#[test]
fn what_a_call_launched_and_did_not_wait_for_is_not_the_next_calls() {
    for device in devices() {
        let server = Server::with(Options::default().device(device));
        server.deploy_with("careless", &careless(), r#"{"gpu":true,"reuse":true}"#).ok();
        for call in 0..3 {
            assert_eq!(server.invoke("careless", r#"{"export":"launch"}"#).result(), 0, "on {device}");
            // The same instance, which hears neither of the trap nor of an error.
            let heard = server.invoke("careless", r#"{"export":"sync"}"#).result();
            assert_eq!(heard, json!([0, 0, 2 * call + 2]), "on {device}");
        }
    }
}

#[test]
fn hostile_kernels_get_the_right_error_and_the_next_tenant_notices_nothing() {
    for device in devices() {
        let config = "[limits]\ngpu_kernel_ms_max = 1000\ngpu_memory_bytes_max = 67108864\n";
        let server = Server::with(Options::config(config).device(device));
        deploy(&server, "hostile", "gpu-hostile.wasm");
        let headers = [("x-tensorwasm-tenant", "next"), ("content-type", "application/wasm")];
        let path = "/functions?name=gpu&settings=%7B%22gpu%22%3Atrue%7D";
        server.request("POST", path, &headers, &guest_bytes("gpu-examples.wasm")).ok();
        let is_well = |after: &str| {
            let headers = [("x-tensorwasm-tenant", "next"), ("content-type", "application/json")];
            let body = br#"{"export":"saxpy","args":[2.0,[1,2,3],[10,20,30]]}"#;
            let result = server.request("POST", "/functions/gpu/invoke", &headers, body).result();
            assert_eq!(result["ok"], json!([12.0, 24.0, 36.0]), "after {after} on {device}");
        };
        is_well("nothing");
        for (export, args, expected) in [
            ("out-of-bounds", json!([]), "out of bounds memory access"),
            ("endless", json!([]), "took longer than 1s"),
            ("divide-by-zero", json!([]), "integer divide by zero"),
            ("one-lane", json!([]), "integer divide by zero"),
            ("panics", json!([]), "unreachable code was reached"),
            ("too-large", json!([]), "2147483648"),
            ("too-many-items", json!([]), "1048576"),
            ("no-groups", json!([]), "empty"),
            ("huge-allocation", json!([]), "out of device memory"),
            ("raw-ptx", json!([]), "trusted tenants"),
            ("not-wasm", json!([]), "not a Wasm module"),
            ("large-module", json!([10_000_000]), "at most 4194304"),
            ("no-such-kernel", json!([]), "there is no kernel"),
            ("freed-while-running", json!([100_000]), "no error"),
            ("abandon", json!([1_000_000_000_u32]), "no error"),
            ("half-a-barrier", json!([]), "no error"),
        ] {
            let began = Instant::now();
            let text = call(&server, "hostile", export, &args);
            let text = text.as_str().unwrap();
            println!("{device}: {export}: {text}");
            assert!(text.contains(expected), "{export} on {device}: {text}");
            assert!(began.elapsed() < Duration::from_secs(10), "{export} took {:?}", began.elapsed());
            is_well(export);
        }
        for export in ["wrong-args", "beyond"] {
            for text in call(&server, "hostile", export, &json!([])).as_array().unwrap() {
                assert!(!text.as_str().unwrap().contains("no error"), "{export} on {device}: {text}");
            }
        }
        // All the memory a tenant may have, and no more; it comes back with the instance.
        let hoarded = call(&server, "hostile", "hoard", &json!([8 << 20]));
        assert!(
            hoarded.as_str().unwrap().contains("67108864") || hoarded.as_str().unwrap().contains("58720256"),
            "{hoarded}"
        );
        assert_eq!(call(&server, "hostile", "leak", &json!([7, 8 << 20])), 7, "what was hoarded came back");
        assert_eq!(call(&server, "hostile", "leak", &json!([7, 8 << 20])), 7, "what was leaked came back");
        let flood = call(&server, "hostile", "flood", &json!([5_000, 1_000]));
        println!("{device}: flood: {flood}");
        // A GPU may be done with them as fast as they come.
        let text = flood.as_str().unwrap();
        assert!(text.contains("under way") || (device == "cuda" && text.starts_with("5000 launches")), "{flood}");
        is_well("a flood");
        // A guest that dies, or is killed, while its kernel runs: the kernel goes too.
        let answer = server.invoke("hostile", r#"{"export":"trap-itself","args":[4000000000]}"#);
        assert_eq!(answer.status, 422, "{}", answer.text());
        is_well("a guest that died");
        let answer = server.invoke("hostile", r#"{"export":"hang-itself","args":[4000000000],"deadline_ms":300}"#);
        answer.refused(504, "invoke_timeout");
        let began = Instant::now();
        assert_eq!(call(&server, "hostile", "spin", &json!([10])), "no error");
        assert!(began.elapsed() < Duration::from_secs(3), "the stream was free after {:?}", began.elapsed());
        is_well("everything");
        assert_eq!(server.metric("tensor_wasm_gpu_device_lost_total"), 0.0);
    }
}

#[test]
fn what_a_function_launches_is_in_its_usage() {
    for device in devices() {
        let server = Server::with(Options::default().device(device));
        deploy(&server, "hostile", "gpu-hostile.wasm");
        deploy(&server, "gpu", "gpu-examples.wasm");
        let gpu_us = |name: &str, export: &str, args: &Value| {
            let answer = server.invoke(name, &json!({ "export": export, "args": args }).to_string()).ok();
            let used = |what: &str| answer["usage"][what].as_u64().unwrap();
            assert!(used("gpu_us") <= used("wall_us"), "{answer} on {device}");
            used("gpu_us")
        };
        let few = gpu_us("gpu", "saxpy", &json!([2.0, [1, 2, 3], [10, 20, 30]]));
        let many = gpu_us("hostile", "spin", &json!([2_000_000]));
        println!("{device}: {few} µs and {many} µs");
        assert!(few > 0 && many > 1_000 && many > few, "{few} µs and {many} µs on {device}");
        let series = "tensor_wasm_function_gpu_seconds_total{tenant_id=\"default\",function=\"hostile\"}";
        let counted_us = server.metric(series) * 1e6;
        assert!(counted_us >= many as f64, "{counted_us} of {many} on {device}");
    }
}

#[test]
fn a_device_that_is_lost_is_an_error_once_and_then_works_again() {
    let server = Server::start();
    deploy(&server, "gpu", "gpu-examples.wasm");
    assert_eq!(call(&server, "gpu", "saxpy", &json!([1.0, [1], [2]])), json!([3.0]));
    crate::device::kill_worker(&server);
    wait_until("the function to work again", || {
        let answer = server.invoke("gpu", r#"{"export":"saxpy","args":[1.0,[1],[2]]}"#);
        answer.status == 200 && answer.json()["result"]["ok"] == json!([3.0])
    });
    // Compiled kernels are on disk, for the next server too.
    assert!(server.data.path().join("kernels").read_dir().unwrap().count() > 0);
    let again = Server::with(Options::default().data(&server.kill()));
    assert_eq!(call(&again, "gpu", "saxpy", &json!([1.0, [1], [2]])), json!([3.0]));
}
