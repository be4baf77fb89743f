//! Functions that compute tensors, over HTTP: what they compute, compared with the library; the limits they meet; and
//! that nobody else notices when one misbehaves. Everything runs on the CPU, and again on a GPU where there is one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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

/// What a tenant's tensors have of a device's memory.
fn memory(server: &Server, device: &str) -> f64 {
    let of = if device == "cpu" { "tensor_memory_bytes" } else { "gpu_memory_bytes" };
    server.metric(&format!("tensor_wasm_{of}_per_tenant{{tenant_id=\"default\"}}"))
}

/// What a function had of the device's time, by tenant, in seconds.
fn gpu_seconds(page: &str, tenant: &str, function: &str) -> f64 {
    let labels = format!("tenant_id=\"{tenant}\",function=\"{function}\"");
    let series = format!("tensor_wasm_function_gpu_seconds_total{{{labels}}} ");
    page.lines().find_map(|line| line.strip_prefix(&series)).map_or(0.0, |seconds| seconds.parse().unwrap())
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
        assert!((sum[0].as_f64().unwrap() - 1.0).abs() < 1e-4 && sum[1].as_array().unwrap().len() == 3, "{sum}");
        assert!(beside[0].as_u64().unwrap() > 0 && beside[1].as_f64().unwrap() > 100.0, "{beside}");
        // Sent in pieces, computed as one, turned over, read in pieces.
        let large = || assert_eq!(call(&server, "tensors", "large", &json!([3000, 2111])), 0);
        large();
        // What a call had goes back with it.
        for answer in call(&server, "hostile", "long-lists", &json!([])).as_array().unwrap() {
            println!("{device}: {answer}");
            let answer = answer.as_str().unwrap();
            assert!(answer.contains("at most") && answer.len() < 1_000, "{answer} on {device}");
        }
        // On a GPU plans keep what is between their kernels for their next run, and nothing else.
        let kept = if device == "cpu" { 0.0 } else { memory(&server, device) };
        (0..2).for_each(|_| large());
        wait_until("memory to be given back", || memory(&server, device) <= kept);
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
        let used = |outcome: &Value, what: &str| outcome["usage"][what].as_u64().unwrap();
        assert!(used(&outcome, "cpu_us") > 1_000 && used(&outcome, "gpu_us") == 0, "{outcome}");
        // The same of one that may use the device: a GPU, or the CPU in its place.
        server.deploy_with("allowed", &guest_bytes("tensor-examples.wasm"), r#"{"gpu":true}"#).ok();
        let mut paid_us = 0;
        for _ in 0..3 {
            let outcome = ask(&server, "allowed", "rounds", &json!([512, 1, 4])).ok();
            let (gpu_us, wall_us) = (used(&outcome, "gpu_us"), used(&outcome, "wall_us"));
            assert!(gpu_us > 0 && gpu_us <= wall_us, "{outcome} on {device}");
            paid_us += gpu_us;
        }
        let page = server.get("/metrics").text();
        let counted_us = gpu_seconds(&page, "default", "allowed") * 1e6;
        // What a call did not wait for is not in its own answer.
        assert!(counted_us >= paid_us as f64, "{counted_us} µs and {paid_us} on {device}");
        assert_eq!(gpu_seconds(&page, "default", "plain"), 0.0);
    }
}

#[test]
fn limits_are_met_with_an_error_that_names_them() {
    for device in devices() {
        let config = "[limits]\ntensor_memory_bytes_max = 67108864\ngpu_memory_bytes_max = 67108864\ntensors_max = 1000\n\
                      tensor_nodes_max = 20000\ndeadline_ms_max = 120000\n";
        let server = server(config, device);
        let limit = if device == "cpu" { "tensor_memory_bytes_max" } else { "gpu_memory_bytes_max" };
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
        assert!((40 << 20..=64 << 20).contains(&bytes) && hoarded.contains(limit), "{hoarded} on {device}");
        // Two of 64 MB are needed at once; nothing of it was allocated.
        let plan = text(&server, "large-plan", &json!([4096]));
        assert!(plan.contains(limit) && plan.contains("67108864") && plan.contains("free"), "{plan} on {device}");
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
        // All of it is there again, also what plans had kept.
        let again = text(&server, "hoard-bytes", &json!([8 << 20]));
        let bytes: u64 = again.split(',').next().unwrap().parse().unwrap();
        assert!((40 << 20..=64 << 20).contains(&bytes), "{again} on {device}");
        let kept = if device == "cpu" { 0.0 } else { f64::from(24 << 20) };
        wait_until("memory to be given back", || memory(&server, device) <= kept);
    }
}

/// A chain of products: their width, and how many.
fn chain(width: u32, times: u32) -> Value {
    json!([width, times])
}

#[test]
fn a_plan_ends_with_its_call() {
    for device in devices() {
        let server = server("[limits]\ngpu_memory_bytes_max = 8589934592\n", device);
        // Enough for minutes on a CPU of two cores, and for seconds on a GPU; more than a second, of which the estimate
        // knows less than half; and what is known not to be done in a tenth of a second before it begins.
        let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get() as u32).max(2);
        let (long, short, hopeless) = match device {
            "cpu" => (chain(1024, 750 * cores), chain(1024, 30 * cores), chain(4096, 400)),
            _ => (chain(8192, 400), chain(8192, 150), chain(8192, 300)),
        };
        let mut kept = 0.0;
        let ends = |after: &str, kept: f64| {
            let began = Instant::now();
            wait_until(&format!("memory to be given back after {after}"), || {
                memory(&server, device) <= kept && server.metric("tensor_wasm_tensor_plans_running") == 0.0
            });
            let took = began.elapsed();
            assert!(took < Duration::from_secs(5), "{after}: {took:?} on {device}");
            assert_eq!(text(&server, "products", &json!([32, 4])), "1");
        };
        // What a plan keeps on a GPU it keeps once, however often it runs and ends.
        for round in 0..if device == "cpu" { 1 } else { 2 } {
            let is_idle = |after: &str| ends(after, if device == "cpu" || round > 0 { kept } else { f64::MAX });
            assert_eq!(text(&server, "dropped-while-running", &json!([500, 4])), "no error");
            is_idle("dropping");
            assert_eq!(text(&server, "abandon", &long), "no error");
            is_idle("abandoning");
            assert_eq!(ask(&server, "hostile", "trap-itself", &long).status, 422);
            is_idle("a trap");
            let hang = json!({ "export": "hang-itself", "args": short, "deadline_ms": 500 });
            server.invoke("hostile", &hang.to_string()).refused(504, "invoke_timeout");
            is_idle("a guest that hangs");
            // Twice: a plan that ran before is not sent at once either.
            for _ in 0..2 {
                let waits = json!({ "export": "products", "args": short, "deadline_ms": 500 });
                let answer = server.invoke("hostile", &waits.to_string());
                assert!(answer.status == 504 || answer.text().contains("no time"), "{}", answer.text());
                is_idle("its deadline");
            }
            let asked = json!({ "export": "products", "args": hopeless, "deadline_ms": 100 });
            let answer = server.invoke("hostile", &asked.to_string()).result();
            let answer = answer.as_str().unwrap();
            assert!(answer.contains("no time") && answer.contains("ms at least"), "{answer} on {device}");
            is_idle("a plan that is hopeless");
            kept = if device == "cpu" { 0.0 } else { memory(&server, device) };
        }
    }
}

/// On a CPU tensors are computed by the server itself, and its worker's end is nothing to them.
#[test]
fn a_device_that_is_lost_under_a_plan_is_said_to_its_call_and_the_next_plan_works() {
    for device in devices() {
        let server = server("[limits]\ngpu_memory_bytes_max = 8589934592\n", device);
        let long = if device == "cpu" { chain(1024, 60) } else { chain(8192, 150) };
        let is_well = || text(&server, "products", &json!([32, 4])) == "1";
        wait_until("the device", || is_well() && !crate::device::workers(&server).is_empty());
        std::thread::scope(|scope| {
            let under_way = scope.spawn(|| text(&server, "products", &long));
            wait_until("a plan", || server.metric("tensor_wasm_tensor_plans_running") > 0.0);
            // Long enough for it to be among its kernels.
            std::thread::sleep(Duration::from_millis(200));
            crate::device::kill_worker(&server);
            let answer = under_way.join().unwrap();
            println!("{device}: {answer}");
            assert!(if device == "cpu" { answer == "1" } else { answer.contains("lost") }, "{answer} on {device}");
        });
        wait_until("the next plan", is_well);
        wait_until("another worker", || server.metric("tensor_wasm_gpu_device_lost_total") == 1.0);
        assert!(is_well(), "on {device}");
    }
}

/// Makes a tensor of its own that it does not let go of, and asks for the shape of any: a handle is a number, and a
/// guest that is not in Rust may name any number.
const GUESSES: &str = r#"(component
  (import "tensor-wasm:tensor/tensors@0.1.0" (instance $tensors
    (type $why (variant (case "denied" string) (case "invalid" string) (case "out-of-memory" string)
      (case "too-many" string) (case "deadline" string) (case "device-lost" string) (case "no-such-model" string)
      (case "failed" string)))
    (export "error" (type $error (eq $why)))
    (type $types (enum "bool" "u8" "i32" "i64" "f16" "bf16" "f32" "f64"))
    (export "dtype" (type $dtype (eq $types)))
    (export "tensor" (type $tensor (sub resource)))
    (export "[static]tensor.from-bytes" (func (param "data" (list u8)) (param "shape" (list u64))
      (param "dtype" $dtype) (result (result (own $tensor) (error $error)))))
    (export "[method]tensor.shape" (func (param "self" (borrow $tensor)) (result (list u64))))))
  (core module $memory
    (memory (export "memory") 1)
    (func (export "realloc") (param i32 i32 i32 i32) (result i32) (i32.const 1024)))
  (core instance $memory (instantiate $memory))
  (alias export $tensors "[static]tensor.from-bytes" (func $make))
  (alias export $tensors "[method]tensor.shape" (func $shape))
  (core func $make (canon lower (func $make) (memory (core memory $memory "memory"))
    (realloc (core func $memory "realloc"))))
  (core func $shape (canon lower (func $shape) (memory (core memory $memory "memory"))
    (realloc (core func $memory "realloc"))))
  (core module $main
    (import "host" "memory" (memory 1))
    (import "host" "make" (func $make (param i32 i32 i32 i32 i32 i32)))
    (import "host" "shape" (func $shape (param i32 i32)))
    (func (export "own") (result i32)
      (i64.store (i32.const 512) (i64.const 3))
      (call $make (i32.const 0) (i32.const 3) (i32.const 512) (i32.const 1) (i32.const 1) (i32.const 16))
      (if (i32.load8_u (i32.const 16)) (then unreachable))
      (i32.load (i32.const 20)))
    (func (export "guess") (param i32) (result i32)
      (call $shape (local.get 0) (i32.const 32))
      (i32.load (i32.load (i32.const 32)))))
  (core instance $main (instantiate $main (with "host" (instance
    (export "memory" (memory $memory "memory"))
    (export "make" (func $make)) (export "shape" (func $shape))))))
  (func (export "own") (result u32) (canon lift (core func $main "own")))
  (func (export "guess") (param "handle" u32) (result u32) (canon lift (core func $main "guess"))))"#;

#[test]
fn a_tensor_is_its_instances_whatever_number_another_guesses() {
    let wasm = wat::parse_str(GUESSES).unwrap();
    for device in devices() {
        let server = Server::with(Options::default().device(device));
        let deploy = |tenant: &str, name: &str, settings: &str| {
            let settings: String = settings.bytes().map(|b| format!("%{b:02x}")).collect();
            let headers = [("x-tensorwasm-tenant", tenant), ("content-type", "application/wasm")];
            server.request("POST", &format!("/functions?name={name}&settings={settings}"), &headers, &wasm).ok();
        };
        let ask = |tenant: &str, name: &str, body: &Value| {
            let headers = [("x-tensorwasm-tenant", tenant), ("content-type", "application/json")];
            let path = format!("/functions/{name}/invoke");
            server.request("POST", &path, &headers, body.to_string().as_bytes())
        };
        let own = || ask("owner", "kept", &json!({ "export": "own", "args": [] })).result().as_u64().unwrap();
        let guess =
            |tenant: &str, name: &str, handle: u64| ask(tenant, name, &json!({ "export": "guess", "args": [handle] }));
        // An instance that is used again, and so keeps its tensors.
        deploy("owner", "kept", r#"{"gpu":true,"reuse":true}"#);
        deploy("owner", "other", r#"{"gpu":true}"#);
        deploy("stranger", "kept", r#"{"gpu":true,"reuse":true}"#);
        let handles = [own(), own()];
        for handle in handles {
            assert_eq!(guess("owner", "kept", handle).result(), 3, "its own, in a later call");
        }
        for (tenant, name) in [("owner", "other"), ("stranger", "kept")] {
            for handle in (0..16).chain(handles).chain([u64::from(u32::MAX)]) {
                let answer = guess(tenant, name, handle);
                let text = answer.text();
                assert!(answer.status == 422 && text.contains("guest_trap"), "{tenant}'s {name}, {handle}: {text}");
            }
        }
        for handle in handles {
            assert_eq!(guess("owner", "kept", handle).result(), 3, "it is there still");
        }
    }
}

#[test]
fn two_hundred_functions_that_compute_at_once_share_the_device_by_tenant() {
    /// How long is counted.
    const COUNTED: Duration = Duration::from_secs(5);
    const CALLERS: [(&str, usize); 2] = [("large", 190), ("small", 10)];
    for device in devices() {
        let server = Server::with(Options::config("[limits]\nconcurrency_max = 220\n").device(device));
        for (tenant, _) in CALLERS {
            for (name, file) in [("hostile", "tensor-hostile.wasm"), ("tensors", "tensor-examples.wasm")] {
                let headers = [("x-tensorwasm-tenant", tenant), ("content-type", "application/wasm")];
                let path = format!("/functions?name={name}&settings=%7B%22gpu%22%3Atrue%7D");
                server.request("POST", &path, &headers, &guest_bytes(file)).ok();
            }
        }
        let ask = |tenant: &str, name: &str, body: &Value| {
            let headers = [("x-tensorwasm-tenant", tenant), ("content-type", "application/json")];
            let path = format!("/functions/{name}/invoke");
            server.request("POST", &path, &headers, body.to_string().as_bytes()).result()
        };
        // So much that the device is what is short of, and not what calls take besides.
        let work = if device == "cpu" { chain(256, 20) } else { chain(2048, 40) };
        let (is_over, done) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
        let read = || {
            let page = server.get("/metrics").text();
            let seconds = CALLERS.map(|(tenant, _)| gpu_seconds(&page, tenant, "hostile"));
            (seconds, [0, 1].map(|n: usize| done[n].load(Ordering::Relaxed)))
        };
        std::thread::scope(|scope| {
            for (n, (tenant, callers)) in CALLERS.into_iter().enumerate() {
                for _ in 0..callers {
                    let (ask, is_over, done, work) = (&ask, &is_over, &done[n], &work);
                    scope.spawn(move || {
                        while !is_over.load(Ordering::Relaxed) {
                            let asked = json!({ "export": "products", "args": work });
                            assert_eq!(ask(tenant, "hostile", &asked), "1");
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
            }
            wait_until("a crowd", || {
                done.iter().all(|done| done.load(Ordering::Relaxed) > 5)
                    && (server.metric("tensor_wasm_tensor_plans_waiting") > 50.0 || device == "cuda")
            });
            let (seconds_before, done_before) = read();
            let began = Instant::now();
            let mut slowest = Duration::ZERO;
            while began.elapsed() < COUNTED {
                // One more, that asks for next to nothing.
                let began = Instant::now();
                let gradient = json!({ "export": "gradient", "args": [[1.0]] });
                assert_eq!(ask("small", "tensors", &gradient)["ok"], json!([3.0]));
                slowest = slowest.max(began.elapsed());
            }
            let (seconds, done) = read();
            is_over.store(true, Ordering::Relaxed);
            let seconds = [0, 1].map(|n| seconds[n] - seconds_before[n]);
            let done = [0, 1].map(|n| done[n] - done_before[n]);
            println!("{device}: large and small: {seconds:?} s of the device, {done:?} calls; the slowest {slowest:?}");
            assert!(slowest < Duration::from_secs(5), "{slowest:?} on {device}");
            // Half of the device is the small one's by right; half of that it has on the busiest machine.
            assert!(seconds[1] >= (seconds[0] + seconds[1]) / 4.0, "{seconds:?} on {device}");
            assert!(done[1] * 4 >= done[0] + done[1], "{done:?} on {device}");
            // And no more was charged than there was: cores, or one GPU.
            let cores = std::thread::available_parallelism().unwrap().get();
            let devices = if device == "cpu" { cores } else { 1 };
            let room = began.elapsed().as_secs_f64() * devices as f64;
            assert!(seconds.iter().sum::<f64>() <= room * 1.1, "{seconds:?} of {room} on {device}");
        });
        server.wait_for_metric("tensor_wasm_tensor_plans_waiting", 0.0);
    }
}
