//! Metrics, traces and the audit log, as an operator reads them.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use crate::support::{Options, Server, wait_until};

#[test]
fn metrics_count_what_happens() {
    let server = Server::start();
    server.deploy("lab", "http-lab.wasm");
    server.deploy("hostile", "hostile.wasm");
    for _ in 0..3 {
        server.get("/run/lab/");
    }
    server.invoke("hostile", r#"{"export":"trap"}"#).refused(422, "guest_trap");
    server.get("/nowhere");
    let metric = |series: &str| server.metric(&format!("tensor_wasm_{series}"));
    assert_eq!(metric(r#"http_requests_total{route="/run/{name}/",method="GET",status="200"}"#), 3.0);
    assert_eq!(metric(r#"http_requests_total{route="/functions/{f}/invoke",method="POST",status="422"}"#), 1.0);
    assert_eq!(metric(r#"http_requests_total{route="/functions",method="POST",status="201"}"#), 2.0);
    assert_eq!(metric(r#"http_requests_total{route="unmatched",method="GET",status="404"}"#), 1.0);
    assert!(metric("http_request_duration_seconds_count") >= 7.0);
    assert_eq!(metric("http_requests_in_flight"), 1.0, "the one that asks");
    assert_eq!(metric("instance_spawns_total"), 4.0);
    wait_until("the last instance to end", || metric("instance_terminations_total") == 4.0);
    assert_eq!(metric("active_instances"), 0.0);
    assert_eq!(metric("functions"), 2.0);
    assert_eq!(metric("compiles_total"), 2.0);
    assert_eq!(metric("artifact_loads_total"), 2.0);
    assert_eq!(metric(r#"cpu_memory_bytes_per_tenant{tenant_id="default"}"#), 0.0);
    let page = server.get("/metrics").text();
    assert!(page.contains("tensor_wasm_build_info{version="), "{page}");
    assert!(page.ends_with("# EOF\n"));
}

#[test]
fn traces_continue_the_callers() {
    let server = Server::start();
    server.deploy("lab", "http-lab.wasm");
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let answer = server.request("GET", "/run/lab/headers", &[("traceparent", parent)], b"");
    assert_eq!(answer.header("x-trace-id"), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
    let out = answer.header("traceparent").unwrap();
    assert!(out.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && out != parent, "{out}");
    assert!(answer.text().contains(out), "the guest continues our span: {}", answer.text());
    let fresh = server.get("/healthz");
    assert_eq!(fresh.header("x-trace-id").unwrap().len(), 32);
    let broken = server.request("GET", "/healthz", &[("traceparent", "00-xyz")], b"");
    assert_eq!(broken.header("x-trace-id").unwrap().len(), 32);
    // The same id finds the call's log.
    let printed = server.get("/run/lab/print?x");
    let logs = server.get("/functions/lab/logs").ok();
    let entry = logs["logs"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(entry["trace_id"].as_str(), printed.header("x-trace-id"));
    assert_eq!((&entry["stdout"], &entry["stderr"]), (&"to stdout: x\n".into(), &"to stderr: x\n".into()));
}

/// Takes OTLP over HTTP and keeps the bodies.
fn collector() -> (String, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = format!("http://{}", listener.local_addr().unwrap());
    let received = Arc::new(Mutex::new(Vec::new()));
    let sink = received.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let sink = sink.clone();
            std::thread::spawn(move || {
                let mut buffer = [0; 65536];
                while let Ok(n @ 1..) = stream.read(&mut buffer) {
                    sink.lock().unwrap().extend_from_slice(&buffer[..n]);
                    // Small exports arrive in one piece; a success without content answers any of them.
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
                }
            });
        }
    });
    (addr, received)
}

#[test]
fn spans_are_exported_to_an_otlp_endpoint() {
    let (endpoint, received) = collector();
    let server = Server::with(Options::default().env("TENSOR_WASM_OTLP_ENDPOINT", endpoint));
    server.deploy("math", "math.wasm");
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let body = br#"{"export":"nothing"}"#;
    let answer = server.request("POST", "/functions/math/invoke", &[("traceparent", parent)], body);
    assert_eq!(answer.header("x-trace-id"), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
    let unparented = server.get("/healthz").header("x-trace-id").unwrap().to_owned();
    server.terminate();
    let has = |needle: &[u8]| received.lock().unwrap().windows(needle.len()).any(|w| w == needle);
    let bytes = |hex: &str| {
        (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[i * 2..i * 2 + 2], 16).unwrap()).collect::<Vec<u8>>()
    };
    wait_until("the export", || has(b"/functions/{f}/invoke") && has(b"/healthz"));
    assert!(has(b"POST /v1/traces"));
    assert!(has(&bytes("4bf92f3577b34da6a3ce929d0e0e4736")), "the caller's trace id");
    assert!(has(&bytes("00f067aa0ba902b7")), "the caller's span as parent");
    assert!(has(&bytes(&unparented)), "the id we answered is the id we exported");
    assert!(has(b"tensor-wasm"), "the service's name");
}

#[test]
fn the_audit_log_has_every_change_call_and_refusal() {
    let server = Server::with(Options::default().env("TENSOR_WASM_API_TOKENS", "right-token"));
    let ours = [("authorization", "Bearer right-token"), ("content-type", "application/wasm")];
    let call = |method: &str, path: &str, body: &[u8]| server.request(method, path, &ours, body);
    call("POST", "/functions?name=math", &crate::support::guest_bytes("math.wasm")).ok();
    let json = [("authorization", "Bearer right-token")];
    server.request("POST", "/functions/math/invoke", &json, br#"{"export":"nothing"}"#).ok();
    server.request("POST", "/functions/math/invoke", &json, br#"{"export":"nope"}"#);
    server.request("POST", "/functions/math/invoke-async", &json, br#"{"export":"nothing"}"#).ok();
    server.request("DELETE", "/functions/math", &json, b"");
    server.request("GET", "/functions", &[("authorization", "Bearer wrong-token")], b"");
    server.terminate();
    let expected = [
        ("function.deploy", "math", 201, None),
        ("function.invoke", "math", 200, None),
        ("function.invoke", "math", 400, Some("missing_export")),
        ("job.submit", "math", 202, None),
        ("function.delete", "math", 204, None),
        ("token.refused", "", 401, Some("unauthorized")),
    ];
    wait_until("the audit lines", || server.audit.lock().unwrap().len() >= expected.len());
    let lines = server.audit.lock().unwrap().clone();
    assert!(!lines.join("\n").contains("-token"), "no secrets");
    for (line, (event, subject, status, error)) in lines.iter().zip(expected) {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["event"], event, "{line}");
        assert_eq!(line["subject"].as_str().unwrap_or(""), subject, "{line}");
        assert_eq!(line["status"], status, "{line}");
        assert_eq!(line["error"].as_str(), error, "{line}");
        assert!(line["time_ms"].as_u64().unwrap() > 1_700_000_000_000, "{line}");
        assert_eq!(line["trace_id"].as_str().unwrap().len(), 32, "{line}");
    }
}

#[test]
fn the_audit_log_goes_to_a_file_or_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    let server = Server::with(Options::default().env("TENSOR_WASM_API_AUDIT_LOG", format!("file:{}", path.display())));
    server.deploy("math", "math.wasm");
    wait_until("the file", || std::fs::read_to_string(&path).is_ok_and(|text| text.contains("function.deploy")));
    assert!(server.audit.lock().unwrap().is_empty(), "not on stdout too");
    let wrong = Server::try_with(Options::default().env("TENSOR_WASM_API_AUDIT_LOG", "syslog")).err().unwrap();
    assert!(wrong.contains("stdout, none or file:PATH"), "{wrong}");
}

#[test]
fn the_description_covers_every_route() {
    let server = Server::start();
    let document = server.get("/openapi.json").ok();
    let paths = document["paths"].as_object().unwrap();
    let source =
        std::fs::read_to_string(crate::support::root().join("crates/tensor-wasm-api/src/routes/mod.rs")).unwrap();
    let routes: Vec<&str> = source.split(".route(\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(routes.len() > 15);
    for route in routes {
        let described = match route {
            "/run/{name}" | "/run/{name}/" | "/run/{name}/{*path}" => "/run/{name}/{path}",
            other => other,
        };
        assert!(paths.contains_key(described), "{route} is served but not described");
    }
    for (path, methods) in paths {
        for (method, _) in methods.as_object().unwrap() {
            let concrete = path.replace("{f}", "x").replace("{id}", "x").replace("{name}", "x").replace("{path}", "x");
            let answer = server.request(&method.to_uppercase(), &concrete, &[], b"");
            assert_ne!(answer.status, 405, "{method} {path} is described but not served");
            if answer.status == 404 {
                assert!(!answer.text().contains("no such route"), "{method} {path} is described but not served");
            }
        }
    }
    let page = server.get("/");
    assert!(page.header("content-type").unwrap().starts_with("text/html") && page.text().contains("TensorWasm"));
}
