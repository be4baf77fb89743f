//! Metrics, traces and the audit log, as an operator reads them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::support::{Options, Server, root, send, wait_until};

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
    assert_eq!(metric(r#"http_requests_total{route="/run/{name}/{path}",method="GET",status="2xx"}"#), 3.0);
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
    let sha = page.split("git_sha=\"").nth(1).unwrap().split('"').next().unwrap().trim_end_matches("-dirty");
    let known = std::process::Command::new("git").args(["cat-file", "-t", sha]).current_dir(root()).output();
    if let Some(known) = known.ok().filter(|_| root().join(".git").exists()) {
        assert_eq!(String::from_utf8_lossy(&known.stdout).trim(), "commit", "{sha}");
    }
    assert!(page.ends_with("# EOF\n"));
}

#[test]
fn a_guest_makes_no_series_by_its_choice_of_status() {
    let server = Server::start();
    server.deploy("lab", "http-lab.wasm");
    let host = format!("lab.default.localhost:{}", server.addr.rsplit_once(':').unwrap().1);
    for status in [200, 204, 299, 404, 418, 499, 500, 599, 600, 700, 999] {
        let path = format!("/status?{status}");
        assert_eq!(server.get(&format!("/run/lab{path}")).status, status);
        assert_eq!(server.get(&format!("/t/default/lab{path}")).status, status);
        assert_eq!(server.request("GET", &path, &[("host", &host)], b"").status, status);
    }
    for route in ["/run/{name}/{path}", "/t/{tenant}/{name}/{path}", "{function}"] {
        for (class, count) in [("2xx", 3.0), ("4xx", 3.0), ("5xx", 2.0), ("other", 3.0)] {
            let series = format!(r#"tensor_wasm_http_requests_total{{route="{route}",method="GET",status="{class}"}}"#);
            assert_eq!(server.metric(&series), count, "{series}");
        }
    }
    assert_eq!(server.get("/metrics").text().matches(r#"status="999""#).count(), 0);
}

#[test]
fn calls_are_counted_by_tenant_and_function() {
    let server = Server::with(Options::config("[server]\nmetrics_functions_max = 2\n"));
    for name in ["a", "b", "c"] {
        server.deploy(name, "hostile.wasm");
    }
    server.deploy("math", "math.wasm");
    for _ in 0..3 {
        server.invoke("math", r#"{"export":"nothing"}"#).ok();
    }
    server.invoke("a", r#"{"export":"trap"}"#).refused(422, "guest_trap");
    server.invoke("math", r#"{"export":"nope"}"#).refused(400, "missing_export");
    let of = |name: &str, labels: &str| server.metric(&format!("tensor_wasm_function_{name}{{{labels}}}"));
    let math = r#"tenant_id="default",function="math""#;
    let a = r#"tenant_id="default",function="a""#;
    assert_eq!(of("invocations_total", &format!(r#"{math},outcome="ok""#)), 3.0);
    assert_eq!(of("invocations_total", &format!(r#"{math},outcome="rejected""#)), 1.0);
    assert_eq!(of("duration_seconds_count", math), 3.0);
    assert!(of("cpu_seconds_total", math) > 0.0);
    assert_eq!(of("invocations_total", &format!(r#"{a},outcome="fault""#)), 1.0);
    assert_eq!(of("faults_total", &format!(r#"{a},kind="guest_trap""#)), 1.0);
    // Two have series of their own; the rest are counted together.
    for name in ["b", "c"] {
        server.invoke(name, r#"{"export":"trap"}"#);
    }
    assert_eq!(of("invocations_total", r#"tenant_id="other",function="other",outcome="fault""#), 2.0);
    server.request("DELETE", "/functions/math", &[], b"");
    assert!(!server.get("/metrics").text().contains(r#"function="math""#), "they go with the function");
    server.invoke("b", r#"{"export":"trap"}"#);
    let b = r#"tenant_id="default",function="b",outcome="fault""#;
    assert_eq!(of("invocations_total", b), 1.0, "and leave room");
}

#[test]
fn logs_are_followed_until_the_function_or_the_server_goes() {
    let server = Server::with(Options::config("[server]\nlog_followers_per_tenant_max = 2\n"));
    server.deploy("lab", "http-lab.wasm");
    server.deploy("gone", "http-lab.wasm");
    server.get("/run/lab/print?before");
    let follow = |name: &str| {
        let mut stream = server.connect();
        send(
            &mut stream,
            &format!("GET /functions/{name}/logs?follow=true&limit=1 HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        );
        BufReader::new(stream)
    };
    // The next line with an entry; chunk sizes and keep-alives are between them.
    let entry = |reader: &mut BufReader<TcpStream>| loop {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).unwrap() > 0, "the stream ended");
        if line.starts_with('{') {
            return serde_json::from_str::<serde_json::Value>(&line).unwrap();
        }
    };
    let mut lab = follow("lab");
    assert_eq!(entry(&mut lab)["stdout"], "to stdout: before\n");
    let printed = server.get("/run/lab/print?now");
    let now = entry(&mut lab);
    assert_eq!((&now["stdout"], now["trace_id"].as_str()), (&"to stdout: now\n".into(), printed.header("x-trace-id")));
    let mut gone = follow("gone");
    server.get("/run/gone/print?x");
    entry(&mut gone);
    // Each holds a connection, so a tenant has so many.
    let refused = server.get("/functions/lab/logs?follow=true").refused(429, "tenant_capacity_exhausted");
    assert!(refused.contains("log_followers_per_tenant_max"), "{refused}");
    server.get("/functions/nobody/logs?follow=true").refused(404, "not_found");
    server.get("/functions/lab/logs?follow=perhaps").refused(400, "invalid_args");
    let ends = |reader: &mut BufReader<TcpStream>| {
        let mut rest = String::new();
        while reader.read_line(&mut rest).unwrap() > 0 && !rest.ends_with("0\r\n") {}
        assert!(rest.ends_with("0\r\n"), "a clean end: {rest:?}");
    };
    server.request("DELETE", "/functions/gone", &[], b"");
    ends(&mut gone);
    drop(gone);
    server.terminate();
    ends(&mut lab);
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
    wait_until("the export", || has(b"POST /functions/{f}/invoke") && has(b"GET /healthz"));
    for name in
        ["queue", "instance", "call", "http.request.method", "http.response.status_code", "url.path", "faas.name"]
    {
        assert!(has(name.as_bytes()), "{name}");
    }
    assert!(has(b"POST /v1/traces"));
    assert!(has(&bytes("4bf92f3577b34da6a3ce929d0e0e4736")), "the caller's trace id");
    assert!(has(&bytes("00f067aa0ba902b7")), "the caller's span as parent");
    assert!(has(&bytes(&unparented)), "the id we answered is the id we exported");
    assert!(has(b"tensor-wasm"), "the service's name");
}

#[test]
fn launches_are_spans_that_name_their_kernels() {
    let (endpoint, received) = collector();
    let server = Server::with(Options::default().device("cpu").env("TENSOR_WASM_OTLP_ENDPOINT", endpoint));
    server.deploy_with("gpu", &crate::support::guest_bytes("gpu-examples.wasm"), r#"{"gpu":true}"#).ok();
    server.invoke("gpu", r#"{"export":"saxpy","args":[2.0,[1,2],[3,4]]}"#).result();
    server.terminate();
    let has = |needle: &[u8]| received.lock().unwrap().windows(needle.len()).any(|w| w == needle);
    wait_until("the export", || has(b"POST /functions/{f}/invoke"));
    for name in ["launch", "kernel", "groups", "items", "saxpy"] {
        assert!(has(name.as_bytes()), "{name}");
    }
}

#[test]
fn the_audit_log_has_every_change_call_and_refusal() {
    let server = Server::with(Options::default().env("TENSOR_WASM_API_TOKENS", "right-token:name=ci"));
    let ours = [("authorization", "Bearer right-token"), ("content-type", "application/wasm")];
    let call = |method: &str, path: &str, body: &[u8]| server.request(method, path, &ours, body);
    call("POST", "/functions?name=math", &crate::support::guest_bytes("math.wasm")).ok();
    let json = [("authorization", "Bearer right-token")];
    server.request("POST", "/functions/math/invoke", &json, br#"{"export":"nothing"}"#).ok();
    server.request("POST", "/functions/math/invoke", &json, br#"{"export":"nope"}"#);
    server.request("POST", "/functions/math/invoke-async", &json, br#"{"export":"nothing"}"#).ok();
    // Nothing was made by these, and nothing served.
    call("POST", "/functions?name=math", b"nonsense");
    server.request("POST", "/functions/math/rollback", &json, b"");
    server.request("POST", "/functions/math/invoke-async", &json, b"{");
    server.request("DELETE", "/functions/math", &json, b"");
    server.request("GET", "/functions", &[("authorization", "Bearer wrong-token")], b"");
    server.request("GET", "/functions", &[json[0], ("x-tensorwasm-tenant", "other")], b"");
    server.request("GET", "/functions", &[json[0], ("origin", "http://evil.example")], b"");
    server.terminate();
    let expected = [
        ("function.deploy", "math", 201, None),
        ("function.invoke", "math", 200, None),
        ("function.invoke", "math", 400, Some("missing_export")),
        ("job.submit", "math", 202, None),
        ("function.deploy", "math", 400, Some("invalid_wasm")),
        ("function.rollback", "math", 409, Some("conflict")),
        ("job.submit", "math", 400, Some("invalid_json")),
        ("function.delete", "math", 204, None),
        ("token.refused", "", 401, Some("unauthorized")),
        ("token.refused", "", 403, Some("tenant_scope_denied")),
        ("origin.refused", "", 403, Some("origin_denied")),
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
        assert_eq!(line["client"], "127.0.0.1", "{line}");
        assert_eq!(line["token"].as_str(), (status != 401).then_some("ci"), "{line}");
        let has_revision = event == "function.invoke" || event == "function.deploy" && status == 201;
        assert_eq!(line["revision"].as_str().map(str::len), has_revision.then_some(64), "{line}");
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
    let source = std::fs::read_to_string(root().join("crates/tensor-wasm-api/src/routes/mod.rs")).unwrap();
    let routes: Vec<&str> = source.split(".route(\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(routes.len() > 15);
    for route in routes {
        assert!(paths.contains_key(route), "{route} is served but not described");
    }
    for (path, methods) in paths {
        for (method, _) in methods.as_object().unwrap() {
            let concrete = ["{f}", "{id}", "{name}", "{key}", "{tenant}", "{path}"]
                .iter()
                .fold(path.clone(), |p, x| p.replace(x, "x"));
            if method == "trace" {
                continue; // the client does not speak it
            }
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
