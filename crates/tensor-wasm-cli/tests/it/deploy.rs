//! Deploying: kinds, revisions, rollback, traffic, and everything that is refused.

use std::collections::BTreeMap;

use crate::support::{Options, Server, guest_bytes, wait_until};

const ONE: &str = r#"(module (func (export "which") (result i32) i32.const 1))"#;
const TWO: &str = r#"(module (func (export "which") (result i32) i32.const 2))"#;

#[test]
fn every_kind_is_recognised_and_served() {
    let server = Server::start();
    let kind = |name: &str, file: &str| server.deploy(name, file)["kind"].as_str().unwrap().to_owned();
    assert_eq!(kind("hello", "hello.wasm"), "http_handler");
    assert_eq!(kind("hello-p3", "hello-p3.wasm"), "http_handler");
    assert_eq!(kind("typed", "typed.wasm"), "component_exports");
    assert_eq!(kind("command", "command.wasm"), "component_command");
    assert_eq!(kind("command-p1", "command-p1.wasm"), "core_command");
    assert_eq!(kind("math", "math.wasm"), "core_exports");
    assert_eq!(server.get("/run/hello/").text(), "Hello from TensorWasm!\n");
    assert_eq!(server.get("/run/hello-p3/").text(), "Hello from WASI 0.3!\n");
    assert_eq!(server.invoke("typed", r#"{"export":"greet","args":["you"]}"#).result(), "Hello, you!");
    assert_eq!(server.invoke("command", r#"{"args":["hello","you"]}"#).result()["stdout"], "hello, you\n");
    assert_eq!(server.invoke("command-p1", r#"{"args":["exit","7"]}"#).result()["exit_code"], 7);
    assert_eq!(server.invoke("math", r#"{"export":"add","args":[1,2]}"#).result(), 3);
}

#[test]
fn json_and_binary_uploads_make_the_same_revision() {
    use base64::Engine;
    let server = Server::start();
    let wasm = wat::parse_str(ONE).unwrap();
    let binary = server.deploy_bytes("a", &wasm).ok();
    let b64 = base64::engine::general_purpose::STANDARD.encode(&wasm);
    let json = server.post("/functions", &format!(r#"{{"name":"b","wasm_b64":"{b64}"}}"#));
    assert_eq!(json.status, 201);
    assert_eq!(json.ok()["revision"], binary["revision"]);
    let source = blake3::hash(&wasm).to_hex().to_string();
    assert_eq!(server.get("/functions/a/revisions").ok()[0]["source"], source.as_str(), "the content's hash");
    let escaped = b64.replacen('A', "\\u0041", 1);
    let escaped = server.post("/functions", &format!(r#"{{"name":"c","wasm_b64":"{escaped}"}}"#)).ok();
    assert_eq!(escaped["revision"], binary["revision"]);
    // One of many pieces.
    let hello = guest_bytes("hello.wasm");
    let b64 = base64::engine::general_purpose::STANDARD.encode(&hello);
    let pieces = server.post("/functions", &format!(r#"{{"name":"d","wasm_b64":"{b64}"}}"#)).ok();
    assert_eq!(pieces["revision"], server.deploy_bytes("e", &hello).ok()["revision"]);
    assert_ne!(json.ok()["id"], binary["id"]);
    // By id as well as by name.
    let id = binary["id"].as_str().unwrap();
    assert_eq!(server.invoke(id, "").result(), 1);
}

#[test]
fn revisions_rollback_and_split() {
    let server = Server::start();
    let one = server.deploy_wat("f", ONE).ok()["revision"].as_str().unwrap().to_owned();
    let two = server.deploy_wat("f", TWO).ok()["revision"].as_str().unwrap().to_owned();
    assert_eq!(server.invoke("f", "{}").result(), 2);

    assert_eq!(server.post("/functions/f/rollback", "").ok()["revision"], one);
    assert_eq!(server.invoke("f", "{}").result(), 1);
    server.post("/functions/f/rollback", "").refused(409, "conflict");
    assert_eq!(
        server.post("/functions/f/rollback", &format!(r#"{{"revision":"{}"}}"#, &two[..10])).ok()["revision"],
        two
    );
    server.post("/functions/f/rollback", r#"{"revision":"0000"}"#).refused(404, "not_found");

    let split = format!(r#"{{"shares":[{{"revision":"{one}","weight":75}},{{"revision":"{two}","weight":25}}]}}"#);
    server.request("PUT", "/functions/f/traffic", &[], split.as_bytes()).ok();
    let mut counts = BTreeMap::new();
    for _ in 0..400 {
        *counts.entry(server.invoke("f", "{}").result().as_i64().unwrap()).or_insert(0) += 1;
    }
    // Binomial with n = 400, p = 0.25: 60 to 140 is beyond four standard deviations either way.
    assert!((60..=140).contains(&counts[&2]), "{counts:?}");
    let revisions = server.get("/functions/f/revisions").ok();
    assert_eq!(revisions[0]["traffic_percent"], 25.0);
    assert_eq!(revisions[1]["traffic_percent"], 75.0);

    for bad in [
        r#"{"shares":[]}"#.to_owned(),
        format!(r#"{{"shares":[{{"revision":"{one}","weight":0}}]}}"#),
        format!(r#"{{"shares":[{{"revision":"{one}","weight":1}},{{"revision":"{one}","weight":1}}]}}"#),
    ] {
        server.request("PUT", "/functions/f/traffic", &[], bad.as_bytes()).refused(400, "invalid_args");
    }
    // A new deploy takes all the traffic again.
    server.deploy_wat("f", ONE).ok();
    assert!((0..20).all(|_| server.invoke("f", "{}").result() == 1));
}

#[test]
fn old_revisions_are_pruned_but_never_those_with_traffic() {
    let server = Server::with(Options::config("[limits]\nrevisions_max = 3\n"));
    for n in 0..6 {
        server.deploy_wat("f", &format!(r#"(module (func (export "which") (result i32) i32.const {n}))"#)).ok();
    }
    let revisions = server.get("/functions/f/revisions").ok();
    assert_eq!(revisions.as_array().unwrap().len(), 3);
    assert_eq!(server.invoke("f", "{}").result(), 5);
    server.post("/functions/f/rollback", "").ok();
    assert_eq!(server.invoke("f", "{}").result(), 4);
}

#[test]
fn deleting_removes_the_function_and_its_files() {
    let server = Server::start();
    server.deploy_wat("f", ONE).ok();
    server.deploy_wat("g", ONE).ok();
    assert_eq!(server.request("DELETE", "/functions/f", &[], b"").status, 204);
    server.get("/functions/f").refused(404, "not_found");
    server.invoke("f", "{}").refused(404, "not_found");
    assert_eq!(server.invoke("g", "{}").result(), 1, "same bytes, other function");
    assert_eq!(server.request("DELETE", "/functions/g", &[], b"").status, 204);
    for kept in ["sources", "artifacts", "manifests"] {
        assert_eq!(walk(&server.data.path().join(kept)), Vec::<String>::new());
    }
}

fn walk(dir: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    entries
        .flat_map(|e| if e.path().is_dir() { walk(&e.path()) } else { vec![e.path().display().to_string()] })
        .collect()
}

#[test]
fn settings_take_effect() {
    let server = Server::start();
    let lab = guest_bytes("http-lab.wasm");
    server.deploy_with("lab", &lab, r#"{"env":{"GREETING":"hi there"},"deadline_ms":200}"#).ok();
    assert_eq!(server.get("/run/lab/env").text(), "GREETING=hi there");
    server.get("/run/lab/loop").refused(504, "invoke_timeout");
    // A fresh instance per call, unless its author allows reuse.
    let call = |name: &str| {
        // An instance is back only after its response has left; the next call could be quicker.
        wait_until("the call before to be over", || server.get("/limits").ok()["running"] == 0);
        server.get(&format!("/run/{name}/calls")).text()
    };
    let calls = |name: &str| (0..5).map(|_| call(name)).collect::<Vec<_>>().join(",");
    assert_eq!(calls("lab"), "1,1,1,1,1");
    server.deploy_with("kept", &lab, r#"{"reuse":true}"#).ok();
    assert_eq!(calls("kept"), "1,2,3,4,5");
    // A fault ends the instance; the next call gets a new one.
    server.get("/run/kept/trap").refused(422, "guest_trap");
    assert_eq!(calls("kept"), "1,2,3,4,5");
    // Another function of the same bytes has instances of its own.
    server.deploy_with("other", &lab, r#"{"reuse":true}"#).ok();
    assert_eq!(calls("other"), "1,2,3,4,5");
    let small = server.deploy_with("small", &guest_bytes("hostile.wasm"), r#"{"memory_bytes":1114112}"#);
    small.ok();
    assert_eq!(server.invoke("small", r#"{"export":"grow"}"#).result(), 17, "pages of 64 KiB");
    server.deploy_with("bad", &lab, r#"{"deadline_ms":0}"#).refused(400, "invalid_args");
    server.deploy_with("bad", &lab, r#"{"dedline_ms":5}"#).refused(400, "invalid_json");
}

/// The revision a deploy made.
fn revision(answer: &crate::support::Answer) -> String {
    answer.ok()["revision"].as_str().unwrap().to_owned()
}

#[test]
fn a_revision_is_bytes_and_settings() {
    let server = Server::start();
    let lab = guest_bytes("http-lab.wasm");
    let deploy = |settings: &str| revision(&server.deploy_with("lab", &lab, settings));
    let env = || server.get("/run/lab/env").text();
    let settings = || server.get("/functions/lab").ok()["settings"].clone();

    let first = deploy(r#"{"env":{"A":"1","B":"2"},"public":true,"deadline_ms":20000}"#);
    // What is not mentioned stays: the same settings, the same revision, nothing added.
    assert_eq!(deploy("{}"), first);
    assert_eq!(deploy(r#"{"public":true}"#), first);
    assert_eq!(server.get("/functions/lab/revisions").ok().as_array().unwrap().len(), 1);
    // Other settings are another revision of the same bytes.
    let second = deploy(r#"{"env":{"A":null,"C":"3"},"deadline_ms":null}"#);
    assert_ne!(second, first);
    assert_eq!(env(), "B=2\nC=3");
    assert_eq!(settings(), serde_json::json!({"public": true, "env": {"B": "2", "C": "3"}}));
    let revisions = server.get("/functions/lab/revisions").ok();
    assert_eq!(revisions[0]["source"], revisions[1]["source"]);
    assert_eq!(revisions[1]["settings"]["deadline_ms"], 20_000, "the old revision keeps its own");
    assert_eq!(server.metric("tensor_wasm_compiles_total"), 1.0, "the same bytes are compiled once");

    // Going back brings bytes and settings back, also after a restart.
    server.post("/functions/lab/rollback", "").ok();
    assert_eq!(env(), "A=1\nB=2");
    assert_eq!(settings()["deadline_ms"], 20_000);
    let data = server.kill();
    let server = Server::with(Options::default().data(&data));
    assert_eq!(server.get("/run/lab/env").text(), "A=1\nB=2");
    // A deploy builds on what serves now, not on what was deployed last.
    let answer = server.deploy_with("lab", &lab, r#"{"env":null}"#);
    assert_eq!(answer.ok()["kind"], "http_handler");
    assert_eq!(server.get("/run/lab/env").text(), "");
    assert_eq!(server.get("/functions/lab").ok()["settings"]["deadline_ms"], 20_000);
    // Another module under the name has the settings too.
    server.deploy("lab", "hello.wasm");
    assert_eq!(server.get("/functions/lab").ok()["settings"]["public"], true);
    // Deploying an earlier revision again makes it the newest, so that `rollback` goes back to where it came from.
    server.deploy_with("lab", &lab, r#"{"env":{"B":"2","C":"3"},"deadline_ms":null}"#).ok();
    assert_eq!(server.get("/functions/lab").ok()["revision"], second.as_str());
    server.post("/functions/lab/rollback", "").ok();
    assert_eq!(server.get("/run/lab/").text(), "Hello from TensorWasm!\n");
    for bad in [r#"{"public":"yes"}"#, r#"{"env":{"A":1}}"#, r#"{"memory":"shared"}"#, "[]"] {
        server.deploy_with("lab", &lab, bad).refused(400, "invalid_json");
    }
    server.deploy_with("lab", &lab, r#"{"env":{"A=B":"1"}}"#).refused(400, "invalid_args");
}

#[test]
fn split_revisions_of_the_same_bytes_do_not_share_instances() {
    let server = Server::start();
    let lab = guest_bytes("http-lab.wasm");
    let one = revision(&server.deploy_with("lab", &lab, r#"{"reuse":true,"env":{"WHO":"one"}}"#));
    let two = revision(&server.deploy_with("lab", &lab, r#"{"env":{"WHO":"two"}}"#));
    let shares = serde_json::json!({"shares": [{"revision": one, "weight": 1}, {"revision": two, "weight": 1}]});
    server.request("PUT", "/functions/lab/traffic", &[], shares.to_string().as_bytes()).ok();
    let mut seen = BTreeMap::<String, usize>::new();
    for _ in 0..60 {
        // The environment is read when an instance starts: a kept one of the other revision would show here.
        let who = server.get("/run/lab/env").text();
        *seen.entry(who).or_default() += 1;
    }
    assert_eq!(seen.keys().map(String::as_str).collect::<Vec<_>>(), ["WHO=one", "WHO=two"], "{seen:?}");
    for (revision, who) in [(&one, "WHO=one"), (&two, "WHO=two")] {
        server.post("/functions/lab/rollback", &format!(r#"{{"revision":"{revision}"}}"#)).ok();
        assert!((0..10).all(|_| server.get("/run/lab/env").text() == who), "{who}");
    }
}

#[test]
fn the_command_line_changes_only_the_settings_it_mentions() {
    let server = Server::start();
    let lab = crate::support::guest("http-lab.wasm");
    let deploy = |more: &[&str]| {
        let output = server.cli(&[&["deploy", lab.to_str().unwrap(), "--name", "lab"], more].concat());
        assert!(output.status.success(), "{more:?}: {}", crate::support::stderr(&output));
        server.get("/functions/lab").ok()["settings"].clone()
    };
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let all = deploy(&["--public", "--reuse", "--deadline-ms", "900", "--env", "A=1", "--env", "B=x=y"]);
    assert_eq!(all, json(r#"{"public":true,"reuse":true,"deadline_ms":900,"env":{"A":"1","B":"x=y"}}"#));
    assert_eq!(deploy(&[]), all);
    let fewer = deploy(&["--no-public", "--deadline-ms", "default", "--unset-env", "A", "--env", "C=3"]);
    assert_eq!(fewer, json(r#"{"reuse":true,"env":{"B":"x=y","C":"3"}}"#));
    let table = crate::support::stdout(&server.cli(&["revisions", "lab"]));
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows.len(), 3, "{table}");
    assert!(rows[1].ends_with("env.C=3, -deadline_ms, -env.A, -public") && rows[1].contains(" same "), "{table}");
    assert!(rows[2].ends_with("deadline_ms=900, env.A=1, env.B=x=y, public, reuse"), "{table}");
    let bad = server.cli(&["deploy", lab.to_str().unwrap(), "--name", "lab", "--deadline-ms", "soon"]);
    assert_eq!(bad.status.code(), Some(2));
    server.cli(&["rollback", "lab"]);
    assert_eq!(server.get("/functions/lab").ok()["settings"], all);
}

#[test]
fn a_function_is_shown_with_its_exports_and_settings() {
    let server = Server::start();
    server.deploy_with("typed", &guest_bytes("typed.wasm"), r#"{"deadline_ms":900}"#).ok();
    let shown = server.get("/functions/typed").ok();
    assert_eq!((&shown["kind"], &shown["revisions"]), (&"component_exports".into(), &1.into()));
    assert_eq!(shown["settings"], serde_json::json!({"deadline_ms": 900}));
    let exports = shown["exports"].as_array().unwrap();
    let named = |name: &str| {
        let is_it = |e: &&serde_json::Value| e["name"].as_str().unwrap().rsplit('#').next() == Some(name);
        exports.iter().find(is_it).unwrap_or_else(|| panic!("{exports:?}"))
    };
    let greet = named("greet");
    assert_eq!(greet["params"][0]["type"], "string");
    assert_eq!(greet["results"], serde_json::json!(["string"]));
    assert!(named("area")["params"][0]["type"].as_str().unwrap().starts_with("variant { "), "{exports:?}");
    server.deploy_wat("core", r#"(module (func (export "f") (param i32 f64) (result i64) i64.const 1))"#).ok();
    let expected = serde_json::json!([{"name": "f", "results": ["i64"],
        "params": [{"name": "p0", "type": "i32"}, {"name": "p1", "type": "f64"}]}]);
    assert_eq!(server.get("/functions/core").ok()["exports"], expected);
    // A handler's interface and a command's entry are exports too.
    server.deploy("hello", "hello.wasm");
    let hello = server.get("/functions/hello").ok();
    assert!(hello["exports"][0]["name"].as_str().unwrap().starts_with("wasi:http/incoming-handler@"), "{hello}");
}

#[test]
fn functions_that_need_the_gpu_and_kernel_modules_are_told_so() {
    let server = Server::start();
    let gpu = guest_bytes("gpu-examples.wasm");
    for settings in ["{}", r#"{"public":true}"#] {
        let message = server.deploy_with("gpu", &gpu, settings).refused(400, "invalid_args");
        assert!(message.contains("tensor-wasm:gpu/") && message.contains("--gpu"), "{message}");
    }
    let flat = r#"(module (import "wasi:cuda/host@0.2.0" "wasi_cuda_free" (func (param i64) (result i32))))"#;
    let message = server.deploy_wat("flat", flat).refused(400, "invalid_args");
    assert!(message.contains("wasi:cuda/host"), "{message}");
    assert_eq!(server.get("/functions").ok(), serde_json::json!([]), "nothing was deployed");
    // Who says that it gets none is believed, and what is not mentioned later stays.
    server.deploy_with("gpu", &gpu, r#"{"gpu":false}"#).ok();
    server.deploy_with("gpu", &gpu, r#"{"gpu":true}"#).ok();
    server.deploy_with("gpu", &gpu, "{}").ok();
    assert_eq!(server.get("/functions/gpu").ok()["settings"]["gpu"], true);

    let kernel = r#"(module (import "kernel" "thread-x" (func (result i32))) (memory (export "memory") 1))"#;
    let message = server.deploy_wat("kernel", kernel).refused(400, "invalid_wasm");
    assert!(message.contains("kernel module") && message.contains("tensor-wasm kernel run"), "{message}");
    // A component that has a module inside which imports something of that name is none.
    let nested = r#"(component (core module (import "kernel" "x" (func))))"#;
    server.deploy_wat("nested", nested).ok();
}

#[test]
fn a_long_compilation_shows_progress_and_its_cost() {
    use std::io::{BufRead, BufReader, Read, Write};
    let server = Server::start();
    let deployed = server.deploy("typed", "typed.wasm");
    assert!(deployed["compiled"]["cpu_ms"].as_u64().unwrap() > 0, "{deployed}");
    assert!(server.deploy("again", "typed.wasm")["compiled"].is_null(), "compiled once");

    // A server that takes its time over it.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let slow = std::thread::spawn(move || {
        let mut stream = BufReader::new(listener.accept().unwrap().0);
        let mut length = 0;
        for line in stream.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty()) {
            let value = line.to_ascii_lowercase().strip_prefix("content-length: ").map(|n| n.parse::<usize>().unwrap());
            length = value.unwrap_or(length);
        }
        stream.read_exact(&mut vec![0; length]).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(2600));
        let body =
            r#"{"name":"f","kind":"core_exports","revision":"0123","compiled":{"wall_ms":11200,"cpu_ms":20100}}"#;
        let head =
            format!("HTTP/1.1 201 Created\r\ncontent-type: application/json\r\ncontent-length: {}\r\n", body.len());
        stream.get_mut().write_all(format!("{head}connection: close\r\n\r\n{body}").as_bytes()).unwrap();
    });
    let math = crate::support::guest("math.wasm");
    let output = crate::support::tensor_wasm(&["--server", &url, "deploy", math.to_str().unwrap(), "--name", "f"]);
    slow.join().unwrap();
    let (out, err) = (crate::support::stdout(&output), crate::support::stderr(&output));
    assert!(output.status.success(), "{err}");
    assert!(err.contains("compiling 0.0 MB, 2 s\n"), "{err}");
    assert!(out.contains("compiled in 11.2 s (20.1 s of CPU time)"), "{out}");
    // What is quick says nothing but its result.
    let quick = server.cli(&["deploy", math.to_str().unwrap(), "--name", "f"]);
    assert_eq!(crate::support::stderr(&quick), "");
}

/// A module that does little and has this many bytes: the rest is a custom section.
fn padded(bytes: usize) -> Vec<u8> {
    let mut wasm = wat::parse_str(ONE).unwrap();
    // Its size, the name's length and the name, then the rest of the section.
    let content = bytes - wasm.len() - 6;
    wasm.push(0);
    let mut left = content;
    for _ in 0..4 {
        wasm.push((left & 0x7f) as u8 | 0x80);
        left >>= 7;
    }
    wasm.push(left as u8);
    wasm.extend([3, b'p', b'a', b'd']);
    wasm.resize(bytes, 0x5a);
    wasm
}

pub fn peak_kib(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_large_module_is_streamed_to_disk() {
    const BYTES: usize = 200 << 20;
    let server = Server::with(Options::config(&format!("[limits]\nmodule_bytes_max = {BYTES}\n")));
    // Whatever the first deploy needs is needed once.
    server.deploy_wat("small", TWO).ok();
    let before = peak_kib(&server);
    let wasm = padded(BYTES);
    server.deploy_bytes("large", &wasm).ok();
    assert_eq!(server.invoke("large", "{}").result(), 1);
    let grown = peak_kib(&server).saturating_sub(before);
    assert!(grown < 48 << 10, "a deploy of {} MiB took {} MiB of memory", BYTES >> 20, grown >> 10);
    let revision = &server.get("/functions/large/revisions").ok()[0];
    assert_eq!(revision["source"], blake3::hash(&wasm).to_hex().as_str());
    assert_eq!(revision["bytes"], BYTES);
    // Deploying it again finds it, and a byte more is too much: said before it is sent.
    server.deploy_bytes("again", &wasm).ok();
    assert_eq!(walk(&server.data.path().join("sources")).len(), 2);
    let mut stream = server.connect();
    let head = "POST /functions?name=x HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/wasm\r\n";
    crate::support::send(&mut stream, &format!("{head}content-length: {}\r\n\r\n", BYTES + 1));
    let mut answer = [0; 12];
    std::io::Read::read_exact(&mut stream, &mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    assert_eq!(walk(&server.data.path().join("tmp")), Vec::<String>::new());
}

#[test]
fn an_upload_that_breaks_off_leaves_nothing() {
    let server = Server::start();
    let tmp = server.data.path().join("tmp");
    let begin = || {
        let mut stream = server.connect();
        let head = "POST /functions?name=x HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/wasm\r\n";
        crate::support::send(&mut stream, &format!("{head}content-length: 30000000\r\n\r\n"));
        std::io::Write::write_all(&mut stream, &vec![7; 1_000_000]).unwrap();
        stream
    };
    let stream = begin();
    wait_until("its scratch file", || !walk(&tmp).is_empty());
    drop(stream);
    wait_until("the scratch file to go", || walk(&tmp).is_empty());
    // And if the server breaks off, the next one cleans up.
    let _stream = begin();
    wait_until("its scratch file", || !walk(&tmp).is_empty());
    let data = server.kill();
    assert!(!walk(&data.path().join("tmp")).is_empty());
    let server = Server::with(Options::default().data(&data));
    assert_eq!(walk(&server.data.path().join("tmp")), Vec::<String>::new());
    assert_eq!(server.get("/functions").ok(), serde_json::json!([]));
}

#[test]
fn uploads_of_a_tenant_are_bounded_together() {
    use base64::Engine;
    let server = Server::with(Options::config("[limits]\nuploads_bytes_max = 1000000\n"));
    let begin = |bytes: usize| {
        let mut stream = server.connect();
        let head = "POST /functions?name=x HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/wasm\r\n";
        crate::support::send(&mut stream, &format!("{head}content-length: {bytes}\r\n\r\n"));
        std::io::Write::write_all(&mut stream, &[7; 1000]).unwrap();
        stream
    };
    // One of any size may always run; the next has to fit beside it.
    let stream = begin(5_000_000);
    wait_until("its scratch file", || !walk(&server.data.path().join("tmp")).is_empty());
    let wasm = wat::parse_str(ONE).unwrap();
    let message = server.deploy_bytes("f", &wasm).refused(429, "tenant_capacity_exhausted");
    assert!(message.contains("uploads_bytes_max"), "{message}");
    // In JSON it takes as much disk.
    let b64 = base64::engine::general_purpose::STANDARD.encode(&wasm);
    let in_json = || server.post("/functions", &format!(r#"{{"name":"f","wasm_b64":"{b64}"}}"#));
    let message = in_json().refused(429, "tenant_capacity_exhausted");
    assert!(message.contains("uploads_bytes_max"), "{message}");
    drop(stream);
    wait_until("the upload to be over", || server.deploy_bytes("f", &wasm).status == 201);
    in_json().ok();
}

#[test]
fn bad_uploads_are_refused_with_their_reason_and_leave_nothing() {
    let server = Server::with(Options::config("[limits]\nmodule_bytes_max = 200000\nmemory_bytes_max = 1048576\n"));
    let hello = guest_bytes("hello.wasm");
    let refused = |wasm: &[u8], status, kind: &str| server.deploy_bytes("bad", wasm).refused(status, kind);
    assert!(refused(b"hello", 400, "invalid_wasm").contains("magic number"));
    assert!(refused(b"", 400, "invalid_wasm").contains("magic number"));
    assert!(refused(&hello[..hello.len() / 2], 400, "invalid_wasm").contains("unexpected end"));
    let invalid = wat::parse_str("(module (func (result i32)))").unwrap();
    assert!(refused(&invalid, 400, "invalid_wasm").contains("type mismatch"));
    assert!(refused(&vec![0; 200_001], 413, "module_too_large").contains("200000"));
    let memory = wat::parse_str("(module (memory 100))").unwrap();
    assert!(refused(&memory, 413, "module_memory_too_large").contains("6553600"));
    let import = wat::parse_str(r#"(module (import "env" "secret" (func)))"#).unwrap();
    assert!(refused(&import, 400, "invalid_wasm").contains("env::secret"));
    let component =
        wat::parse_str(r#"(component (import "acme:db/query@1.0.0" (instance (export "run" (func)))))"#).unwrap();
    assert!(refused(&component, 400, "invalid_wasm").contains("acme:db/query@1.0.0"));

    server.post("/functions", "{").refused(400, "invalid_json");
    server.post("/functions", r#"{"name":"x"}"#).refused(400, "invalid_json");
    let message = server.post("/functions", r#"{"name":"x","wasm_b64":"%%%"}"#).refused(400, "invalid_base64");
    assert!(message.contains("wasm_b64"), "{message}");
    let wasm = wat::parse_str(ONE).unwrap();
    for name in ["a%07b", "a%2Fb", "%2e%2e", "", &"x".repeat(300)] {
        server.deploy_bytes(name, &wasm).refused(400, "invalid_name");
    }
    let message = server.deploy_bytes("a%20b", &wasm).refused(400, "invalid_name");
    assert!(message.contains("' '"), "{message}");

    assert_eq!(server.get("/functions").ok(), serde_json::json!([]));
    for kept in ["sources", "artifacts", "manifests", "tmp"] {
        assert_eq!(walk(&server.data.path().join(kept)), Vec::<String>::new());
    }
}

#[test]
fn racing_deploys_of_one_name_leave_one_function_with_a_whole_revision() {
    let server = Server::start();
    let wasm: Vec<Vec<u8>> = (0..4)
        .map(|n| wat::parse_str(format!(r#"(module (func (export "which") (result i32) i32.const {n}))"#)).unwrap())
        .collect();
    let ids: Vec<String> = std::thread::scope(|scope| {
        let deploys = wasm.iter().map(|wasm| scope.spawn(|| server.deploy_bytes("f", wasm).ok())).collect::<Vec<_>>();
        deploys.into_iter().map(|d| d.join().unwrap()["id"].as_str().unwrap().to_owned()).collect()
    });
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    let revisions = server.get("/functions/f/revisions").ok();
    assert_eq!(revisions.as_array().unwrap().len(), 4);
    assert!((0..4).contains(&server.invoke("f", "{}").result().as_i64().unwrap()));
}
