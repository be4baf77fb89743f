//! Functions that compute tensors, over HTTP: what they compute, compared with the library; the limits they meet; and
//! that nobody else notices when one misbehaves. Everything runs on the CPU, and again on a GPU where there is one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tensor_wasm_tensor::operations::{OPERATIONS, Operation, examples};
use tensor_wasm_tensor::{DType, Tensor, expression, io};

use crate::support::{Answer, Options, Server, devices, guest_bytes, wait_until};

fn server(config: &str, device: &str) -> Server {
    let server = Server::with(Options::config(config).device(device));
    for (name, file) in [("tensors", "tensor-examples.wasm"), ("hostile", "tensor-hostile.wasm")] {
        server.deploy_with(name, &guest_bytes(file), r#"{"gpu":true}"#).ok();
    }
    server
}

fn ask(server: &Server, name: &str, export: &str, args: &Value) -> Answer {
    server.invoke(name, &json!({ "export": export, "args": args }).to_string())
}

/// What an export returned, or the text of its error.
#[track_caller]
fn call(server: &Server, name: &str, export: &str, args: &Value) -> Value {
    let answer = ask(server, name, export, args).result();
    match answer.get("ok") {
        Some(value) => value.clone(),
        None => answer,
    }
}

#[track_caller]
fn text(server: &Server, export: &str, args: &Value) -> String {
    let answer = call(server, "hostile", export, args);
    answer.as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

#[track_caller]
fn floats(value: &Value) -> Vec<f64> {
    let float = |x: &Value| match x.as_str() {
        Some("NaN") => f64::NAN,
        Some("Infinity") => f64::INFINITY,
        Some("-Infinity") => f64::NEG_INFINITY,
        _ => x.as_f64().unwrap_or_else(|| panic!("{x}")),
    };
    value.as_array().unwrap_or_else(|| panic!("{value}")).iter().map(float).collect()
}

fn is_near(found: &[f64], expected: &[f64], tolerance: f64) -> bool {
    let near =
        |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * b.abs().max(1.0);
    found.len() == expected.len() && found.iter().zip(expected).all(near)
}

fn numbers(tensor: &Tensor) -> Value {
    let shape: Vec<usize> = tensor.shape().to_vec();
    json!({ "dtype": tensor.dtype().name(), "shape": shape, "data": tensor.cast(DType::F64).to_vec::<f64>().unwrap() })
}

/// The inputs of the table's examples, as a function takes them.
fn inputs() -> Value {
    let input = |(name, tensor): &(&str, Tensor)| json!({ "name": name, "numbers": numbers(tensor) });
    examples(DType::F64).iter().map(input).collect()
}

#[test]
fn what_a_function_computes_is_what_the_library_computes() {
    for device in devices() {
        let server = server("", device);
        let named = call(&server, "tensors", "device", &json!([]));
        assert!(named.as_str().unwrap().contains(device), "{named}");
        for n in [1_usize, 16, 61, 256] {
            let matrix = |seed| Tensor::normal(&[n, n], seed, DType::F32);
            let (a, b) = (matrix(1), matrix(2));
            let expected = a.matmul(&b).softmax(-1).cast(DType::F64).to_vec::<f64>().unwrap();
            let args = json!([n, a.to_vec::<f32>().unwrap(), b.to_vec::<f32>().unwrap()]);
            let found = floats(&call(&server, "tensors", "matmul-softmax", &args));
            assert!(is_near(&found, &expected, 1e-5), "{n} by {n} on {device}");
        }
        let x: Vec<f32> = (0..40).map(|n| n as f32 / 40.0).collect();
        let probabilities = floats(&call(&server, "tensors", "mlp", &json!([x, 64, 10, 7])));
        let weights = |shape: [usize; 2], seed| Tensor::normal(&shape, seed, DType::F32) * 0.1;
        let inner = (Tensor::from_slice(&x, &[1, 40]).matmul(&weights([40, 64], 7)) + 0.1).gelu();
        let expected = inner.matmul(&weights([64, 10], 8)).softmax(-1).cast(DType::F64).to_vec::<f64>().unwrap();
        assert!(is_near(&probabilities, &expected, 1e-5), "{probabilities:?} for {expected:?}");
        let gradient = floats(&call(&server, "tensors", "gradient", &json!([[1.0, -2.0, 3.0]])));
        assert!(is_near(&gradient, &[3.0, 12.0, 27.0], 1e-12), "{gradient:?}");
        let learned = floats(&call(&server, "tensors", "learn", &json!([200, 0.2])));
        assert!(is_near(&learned, &[3.0, 2.0, 0.0], 1e-4), "{learned:?}");
        let (sum, beside) =
            (call(&server, "tensors", "rounds", &json!([64, 3, 3])), call(&server, "tensors", "beside", &json!([700])));
        assert!((sum[0].as_f64().unwrap() - 64.0).abs() < 1e-3 && sum[1].as_array().unwrap().len() == 3, "{sum}");
        assert!(beside[0].as_u64().unwrap() > 0 && beside[1].as_f64().unwrap() > 100.0, "{beside}");
        // Sent in pieces, computed as one, turned over, read in pieces.
        assert_eq!(call(&server, "tensors", "large", &json!([3000, 2111])), 0);
        // What a call had goes back with it.
        for answer in call(&server, "hostile", "long-lists", &json!([])).as_array().unwrap() {
            println!("{device}: {answer}");
            let answer = answer.as_str().unwrap();
            assert!(answer.contains("at most") && answer.len() < 1_000, "{answer} on {device}");
        }
        let used = "tensor_wasm_tensor_memory_bytes_per_tenant{tenant_id=\"default\"}";
        wait_until("memory to be given back", || server.metric(used) == 0.0);
        assert!(server.metric("tensor_wasm_tensor_plans_total") > 10.0);
        server.wait_for_metric("tensor_wasm_tensor_plans_running", 0.0);
    }
}

#[test]
fn every_operation_of_the_table_is_reached_by_its_name() {
    for device in devices() {
        let server = server("", device);
        let (inputs, tensors) = (inputs(), examples(DType::F64));
        let named: Vec<(&str, Tensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor.clone())).collect();
        for operation in OPERATIONS {
            let Operation { name, example, .. } = operation;
            let expected = expression::evaluate(example, &named, DType::F32).unwrap();
            let by_text = call(&server, "tensors", "evaluate", &json!([example, inputs]));
            let (example, arguments) = arguments_of(operation);
            let by_name = call(&server, "tensors", "apply", &json!([name, arguments, inputs]));
            let applied = expression::evaluate(&example, &named, DType::F32).unwrap();
            for (found, expected) in [(by_text, expected), (by_name, applied)] {
                assert_eq!(found["shape"], json!(expected.shape().to_vec()), "{name}: {found} on {device}");
                assert_eq!(found["dtype"], expected.dtype().name(), "{name}: {found} on {device}");
                let elements = expected.cast(DType::F64).to_vec::<f64>().unwrap();
                assert!(
                    is_near(&floats(&found["data"]), &elements, 1e-5),
                    "{name} on {device}: {found} for {elements:?}"
                );
            }
        }
    }
}

/// Arguments for `apply` that amount to an operation's example, and that example: calls are taken apart, operators are
/// calls, and the only one that is neither is another example.
fn arguments_of(operation: &Operation) -> (String, Value) {
    let (name, mut example) = (operation.name, operation.example.to_owned());
    if name == "slice" {
        example = "x.slice(0, start=1)".to_owned();
        let arguments = json!([argument("x"), argument("0"), argument("start=1")]);
        return (example, arguments);
    }
    let inside = example.strip_prefix(&format!("{name}(")).and_then(|rest| rest.strip_suffix(')'));
    let parts: Vec<&str> = match inside {
        Some(inside) => split(inside),
        None => match example.strip_prefix(['-', '~']) {
            Some(operand) => vec![operand],
            None => {
                let symbols = [
                    " - ", " * ", " / ", " % ", " ** ", " == ", " != ", " <= ", " >= ", " & ", " | ", " @ ", " < ",
                    " > ",
                ];
                let symbol = symbols.iter().find(|symbol| example.contains(**symbol)).unwrap();
                let (left, right) = example.split_once(symbol).unwrap();
                vec![left, right]
            }
        },
    };
    let arguments = parts.iter().map(|part| argument(part)).collect();
    (example, arguments)
}

/// At commas that are in no brackets.
fn split(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, letter) in text.char_indices() {
        match letter {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts
}

fn argument(text: &str) -> Value {
    let is_name = |name: &str| name.chars().all(|letter| letter.is_alphanumeric() || letter == '_');
    match text.split_once('=').filter(|(name, rest)| is_name(name) && !rest.starts_with('=')) {
        Some((name, value)) => json!({ "name": name, "value": value_of(value) }),
        None => json!({ "name": null, "value": value_of(text) }),
    }
}

fn value_of(text: &str) -> Value {
    if let Ok(value) = text.parse::<i64>() {
        return json!({ "integer": value });
    }
    if let Ok(value) = text.parse::<f64>() {
        return json!({ "number": value });
    }
    if let Some(inside) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        let parts = split(inside);
        let integers: Result<Vec<i64>, _> = parts.iter().map(|part| part.parse::<i64>()).collect();
        return integers.map_or_else(|_| json!({ "tensors": parts }), |integers| json!({ "integers": integers }));
    }
    match text {
        "true" | "false" => json!({ "boolean": text == "true" }),
        _ if DType::named(text).is_some() => json!({ "dtype": text }),
        _ => json!({ "tensor": text }),
    }
}

#[test]
fn files_that_a_function_has_become_tensors() {
    let server = server("", "cpu");
    let mut file = Vec::new();
    let tensors =
        [("weight", Tensor::arange(0, 6, 1, DType::F32).reshape(&[2, 3])), ("bias", Tensor::ones(&[3], DType::BF16))];
    io::write_safetensors(&mut file, tensors, &Default::default()).unwrap();
    let sums = call(&server, "tensors", "safetensors", &json!([file]));
    assert_eq!(sums, json!([["bias", 3.0], ["weight", 15.0]]));
    let cut = call(&server, "tensors", "safetensors", &json!([file[..file.len() - 1]]));
    assert!(cut["err"].as_str().unwrap().contains("cut off"), "{cut}");
    // Models are for those whose settings name them.
    let denied = call(&server, "tensors", "model", &json!(["mnist"]));
    assert!(denied["err"].as_str().unwrap().contains("--model mnist"), "{denied}");
}

#[test]
fn a_function_without_permission_computes_on_the_cpu() {
    for device in devices() {
        let server = Server::with(Options::default().device(device));
        server.deploy("plain", "tensor-examples.wasm");
        let named = call(&server, "plain", "device", &json!([]));
        assert!(named.as_str().unwrap().starts_with("cpu (cpu), 0 of "), "{named} on {device}");
        let gradient = floats(&call(&server, "plain", "gradient", &json!([[2.0]])));
        assert!(is_near(&gradient, &[12.0], 1e-12), "{gradient:?}");
        let outcome = ask(&server, "plain", "rounds", &json!([512, 1, 4])).ok();
        assert!(outcome["usage"]["cpu_us"].as_u64().unwrap() > 1_000, "{outcome}");
    }
}

#[test]
fn limits_are_met_with_an_error_that_names_them() {
    for device in devices() {
        let config = "[limits]\ntensor_memory_bytes_max = 67108864\ngpu_memory_bytes_max = 67108864\ntensors_max = 1000\n\
                      tensor_nodes_max = 20000\ndeadline_ms_max = 120000\n";
        let server = server(config, device);
        let memory = if device == "cpu" { "tensor_memory_bytes_max" } else { "gpu_memory_bytes_max" };
        // A million operations one after the other are computed in between; where nothing can be let go, that ends.
        assert_eq!(text(&server, "chain", &json!([1_000_000, false])), "[1000000.0, 1000000.0, 1000000.0, 1000000.0]");
        let nodes = text(&server, "chain", &json!([1_000_000, true]));
        assert!(nodes.contains("then: too many") && nodes.contains("tensor_nodes_max"), "{nodes}");
        let wide = text(&server, "wide", &json!([900]));
        assert_eq!(wide, "1", "on {device}");
        let tensors = text(&server, "hoard-tensors", &json!([]));
        assert!(tensors.starts_with("1000, then: too many") && tensors.contains("tensors_max"), "{tensors}");
        let hoarded = text(&server, "hoard-bytes", &json!([8 << 20]));
        let bytes: u64 = hoarded.split(',').next().unwrap().parse().unwrap();
        assert!((40 << 20..=64 << 20).contains(&bytes) && hoarded.contains(memory), "{hoarded} on {device}");
        // Two of 64 MB are needed at once; nothing of it was allocated.
        let plan = text(&server, "large-plan", &json!([4096]));
        assert!(plan.contains(memory) && plan.contains("67108864"), "{plan} on {device}");
        assert_eq!(text(&server, "large-plan", &json!([1000])), "no error");
        // A GPU may be done with them as fast as they come.
        if device == "cpu" {
            let flood = text(&server, "flood", &json!([1500]));
            // More than are allowed at once come in only as some end.
            let begun: usize = flood.split(',').next().unwrap().parse().unwrap();
            assert!((16..1500).contains(&begun) && flood.contains("then: too many"), "{flood}");
            assert!(flood.contains("wait for one"), "{flood}");
        }
        for answer in call(&server, "hostile", "absurd-sizes", &json!([])).as_array().unwrap() {
            println!("{device}: {answer}");
            assert!(!answer.as_str().unwrap().contains("no error"), "{answer} on {device}");
        }
        for answer in call(&server, "hostile", "wrong-calls", &json!([])).as_array().unwrap() {
            println!("{device}: {answer}");
            let answer = answer.as_str().unwrap();
            assert!(
                !answer.contains("no error") && !answer.contains(".rs:") && answer.len() < 1_000,
                "{answer} on {device}"
            );
        }
        let used = "tensor_wasm_tensor_memory_bytes_per_tenant{tenant_id=\"default\"}";
        wait_until("memory to be given back", || server.metric(used) == 0.0);
    }
}

#[test]
fn a_plan_ends_with_its_call() {
    for device in devices() {
        let server = server("", device);
        let is_idle = |after: &str| {
            let began = Instant::now();
            let used = "tensor_wasm_tensor_memory_bytes_per_tenant{tenant_id=\"default\"}";
            wait_until(&format!("memory to be given back after {after}"), || {
                server.metric(used) == 0.0 && server.metric("tensor_wasm_tensor_plans_running") == 0.0
            });
            let took = began.elapsed();
            assert!(took < Duration::from_secs(5), "{after}: {took:?} on {device}");
            assert_eq!(text(&server, "products", &json!([32, 4])), "1");
        };
        assert_eq!(text(&server, "dropped-while-running", &json!([500, 4])), "no error");
        is_idle("dropping");
        // Enough for minutes on a CPU.
        let long = json!([1024, 1500]);
        assert_eq!(text(&server, "abandon", &long), "no error");
        is_idle("abandoning");
        assert_eq!(ask(&server, "hostile", "trap-itself", &long).status, 422);
        is_idle("a trap");
        // More than a second, of which the estimate knows less than half.
        let short = json!([1024, 60]);
        let hang = json!({ "export": "hang-itself", "args": short, "deadline_ms": 500 });
        server.invoke("hostile", &hang.to_string()).refused(504, "invoke_timeout");
        is_idle("a guest that hangs");
        if device == "cpu" {
            let waits = json!({ "export": "products", "args": short, "deadline_ms": 500 });
            let answer = server.invoke("hostile", &waits.to_string());
            assert!(answer.status == 504 || answer.text().contains("no time"), "{}", answer.text());
            is_idle("its deadline");
            // Known before it begins: a million million operations in a tenth of a second.
            let hopeless = json!({ "export": "products", "args": [8192, 1], "deadline_ms": 100 });
            let answer = server.invoke("hostile", &hopeless.to_string()).result();
            let answer = answer.as_str().unwrap();
            assert!(answer.contains("no time") && answer.contains("ms at least"), "{answer}");
            is_idle("a plan that is hopeless");
        }
    }
}

#[test]
fn two_hundred_functions_that_compute_at_once_do_not_starve_anybody() {
    for device in devices() {
        let server = server("[limits]\nconcurrency_max = 220\n", device);
        let headers = [("x-tensorwasm-tenant", "small"), ("content-type", "application/wasm")];
        let path = "/functions?name=tensors&settings=%7B%22gpu%22%3Atrue%7D";
        server.request("POST", path, &headers, &guest_bytes("tensor-examples.wasm")).ok();
        let small = || {
            let headers = [("x-tensorwasm-tenant", "small"), ("content-type", "application/json")];
            let body = br#"{"export":"gradient","args":[[1.0]]}"#;
            server.request("POST", "/functions/tensors/invoke", &headers, body).result()
        };
        assert_eq!(small()["ok"], json!([3.0]));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let crowd: Vec<_> = (0..200)
                .map(|_| {
                    scope.spawn(|| {
                        while !is_over.load(Ordering::Relaxed) {
                            assert_eq!(text(&server, "products", &json!([256, 20])), "1");
                        }
                    })
                })
                .collect();
            wait_until("a crowd", || server.metric("tensor_wasm_tensor_plans_waiting") > 50.0 || device == "cuda");
            let mut slowest = Duration::ZERO;
            for _ in 0..10 {
                let began = Instant::now();
                assert_eq!(small()["ok"], json!([3.0]));
                slowest = slowest.max(began.elapsed());
            }
            is_over.store(true, Ordering::Relaxed);
            println!("{device}: the slowest of ten calls beside 200: {slowest:?}");
            assert!(slowest < Duration::from_secs(5), "{slowest:?} on {device}");
            crowd.into_iter().for_each(|one| one.join().unwrap());
        });
        server.wait_for_metric("tensor_wasm_tensor_plans_waiting", 0.0);
    }
}
