//! The device as a user of the binary meets it. What every device must do is the conformance suite of
//! `tensor-wasm-gpu`.

use std::process::Command;

use crate::support::{EXE, Options, Server, stderr, stdout, tensor_wasm, wait_until};

/// The process ids of the server's device workers.
pub fn workers(server: &Server) -> Vec<i32> {
    let tasks = format!("/proc/{0}/task", server.child.id());
    let children = std::fs::read_dir(tasks).unwrap().flatten().filter_map(|task| {
        let children = std::fs::read_to_string(task.path().join("children")).ok()?;
        let is_worker = |pid: &i32| {
            std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("device-worker"))
        };
        let pids = children.split_whitespace().map(|pid| pid.parse::<i32>().unwrap());
        Some(pids.filter(is_worker).collect::<Vec<_>>())
    });
    children.flatten().collect()
}

fn worker(server: &Server) -> Option<i32> {
    workers(server).first().copied()
}

pub fn kill_worker(server: &Server) {
    let pid = rustix::process::Pid::from_raw(worker(server).expect("the worker is a process")).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn devices_are_listed_with_the_reason_for_no_gpu() {
    let output = tensor_wasm(&["devices"]);
    let text = stdout(&output);
    assert!(output.status.success() && text.starts_with("DEVICE"), "{text}{}", stderr(&output));
    assert!(text.lines().any(|line| line.starts_with("cpu ")), "{text}");
    assert!(text.contains("cuBLASLt: "), "{text}");
    let has_gpu = text.contains("cuda:0");
    assert_eq!(has_gpu, !text.contains("no CUDA: "), "{text}");
    let json: serde_json::Value = serde_json::from_str(&stdout(&tensor_wasm(&["--json", "devices"]))).unwrap();
    assert_eq!(json["no_cuda"].is_null(), has_gpu, "{json}");
    let cpu = json["devices"].as_array().unwrap().iter().find(|d| d["device"] == "cpu").unwrap();
    assert!(cpu["multiprocessors"].as_u64().unwrap() > 0 && cpu["memory_total_bytes"].as_u64().unwrap() > 1 << 20);
}

#[test]
fn the_binary_needs_no_cuda_library() {
    let linked = Command::new("ldd").arg(&*EXE).output().unwrap();
    assert!(linked.status.success());
    let text = stdout(&linked).to_lowercase();
    assert!(text.contains("libc.so") && !text.contains("cuda") && !text.contains("nvidia"), "{text}");
}

#[test]
fn asking_for_cuda_where_there_is_none_is_an_error_that_says_why() {
    let data = tempfile::tempdir().unwrap();
    let serve = |device: &str| {
        let data = data.path().to_str().unwrap();
        tensor_wasm(&["serve", "--addr", "127.0.0.1:0", "--data-dir", data, "--device", device])
    };
    let output = serve("gpu");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("auto, cpu, cuda or cuda:N"), "{}", stderr(&output));
    if stdout(&tensor_wasm(&["devices"])).contains("cuda:0") {
        println!("skipped: there is a CUDA device");
        return;
    }
    let output = serve("cuda");
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("--device: ") && message.contains("NVIDIA driver"), "{message}");
}

#[test]
fn a_lost_worker_is_replaced_counted_and_audited_while_functions_are_served() {
    let server = Server::with(Options::default());
    server.deploy("math", "math.wasm");
    let lost = "tensor_wasm_gpu_device_lost_total";
    wait_until("the device", || server.get("/metrics").text().contains(lost));
    assert_eq!(server.metric(lost), 0.0);
    assert_eq!(server.metric("tensor_wasm_gpu_memory_used_bytes"), 0.0);
    let worker = || worker(&server);
    let first = worker().expect("the worker is a process");
    let status = std::fs::read_to_string(format!("/proc/{first}/status")).unwrap();
    assert!(status.contains("NoNewPrivs:\t1"), "{status}");
    let environment = std::fs::read(format!("/proc/{first}/environ")).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("TENSOR_WASM"), "it has no business with our settings");
    kill_worker(&server);
    wait_until("another worker", || worker().is_some_and(|pid| pid != first));
    assert_eq!(server.invoke("math", r#"{"export":"add","args":[1,2]}"#).result(), 3, "nobody noticed");
    wait_until("it to be counted", || server.metric(lost) == 1.0);
    wait_until("it to be audited", || {
        let lines = server.audit.lock().unwrap().join("\n");
        lines.contains(r#""event":"device.lost""#) && lines.contains(r#""event":"device.restored""#)
    });
    // The worker goes with its server, however that goes.
    let last = worker().unwrap();
    server.kill();
    wait_until("the worker to be gone", || {
        std::fs::read_to_string(format!("/proc/{last}/cmdline")).map_or(true, |line| !line.contains("device-worker"))
    });
}
