//! Calling exports: JSON in and out for every type, bytes, commands, streams, and calls that do not fit.

use std::io::{BufRead, BufReader};

use serde_json::json;

use crate::support::{Options, Server, send};

fn typed() -> Server {
    let server = Server::start();
    server.deploy("typed", "typed.wasm");
    server
}

#[test]
fn every_wit_type_goes_there_and_back() {
    let server = typed();
    let check = |export: &str, args: serde_json::Value, expect: serde_json::Value| {
        let body = json!({ "export": export, "args": args }).to_string();
        assert_eq!(server.invoke("typed", &body).result(), expect, "{export} {args}");
    };
    check("greet", json!(["wörld"]), json!("Hello, wörld!"));
    check("greet", json!({ "name": "by name" }), json!("Hello, by name!"));
    check("area", json!([{ "rect": [2, 3.5] }]), json!(7.0));
    check("area", json!(["nothing"]), json!(0.0));
    check("mix", json!(["red", "green"]), json!("blue"));
    check("invert", json!([["bold"]]), json!(["italic", "underline"]));
    check("centroid", json!([[]]), json!({ "err": "no points" }));
    let points = json!([{ "x": 1, "y": 2 }, { "x": 3, "y": 5, "label": "q" }]);
    check("centroid", json!([points]), json!({ "ok": { "x": 2.0, "y": 3.5, "label": "q" } }));
    let extremes = json!([-128, 255, -32768, 65535, i32::MIN, u32::MAX, i64::MIN, u64::MAX]);
    check("ints", extremes.clone(), extremes);
    let as_text = json!([0, 0, 0, 0, 0, 0, "-9223372036854775808", "18446744073709551615"]);
    check("ints", as_text, json!([0, 0, 0, 0, 0, 0, i64::MIN, u64::MAX]));
    check("floats", json!([0.1, 0.1]), json!([0.1, 0.1]));
    check("floats", json!(["NaN", "-Infinity"]), json!(["NaN", "-Infinity"]));
    check("maybe", json!([2, { "some": 3 }]), json!({ "some": 5 }));
    check("maybe", json!([null, { "some": null }]), json!({ "some": null }));
    check("maybe", json!([1, null]), json!(null));
    check("divide", json!([7, 2]), json!({ "ok": 3 }));
    check("divide", json!([7, 0]), json!({ "err": "7 / 0 has no answer" }));
    check("no-payload", json!([true]), json!({ "ok": null }));
    check("initial", json!(["Ω"]), json!("Ω"));
    check("initial", json!([""]), json!(null));
    check("demo:typed/shapes@1.0.0#area", json!([{ "circle": 0 }]), json!(0.0));
}

#[test]
fn calls_that_do_not_fit_are_refused_by_name_before_anything_runs() {
    let server = typed();
    server.deploy("math", "math.wasm");
    server.deploy("hello", "hello.wasm");
    let check = |function: &str, body: &str, kind: &str, expect: &str| {
        let message = server.invoke(function, body).refused(400, kind);
        assert!(message.contains(expect), "{body}: {message}");
    };
    check("typed", r#"{"export":"nope"}"#, "missing_export", "this function has: greet, upper");
    check("typed", "{}", "missing_export", "greet");
    check("typed", r#"{"export":"greet"}"#, "invalid_args", "takes 1 argument(s), 0 were given");
    check("typed", r#"{"export":"greet","args":["a","b"]}"#, "too_many_args", "takes 1 argument(s), 2 were given");
    check("typed", r#"{"export":"greet","args":[5]}"#, "invalid_args", "args[0]: expected a string, found 5");
    check("typed", r#"{"export":"greet","args":{"nom":"x"}}"#, "invalid_args", "no parameter \"nom\"");
    check("typed", r#"{"export":"area","args":["square"]}"#, "invalid_args", "no case \"square\"; it has \"circle\"");
    check("typed", r#"{"export":"area","args":["circle"]}"#, "invalid_args", "needs a payload");
    check("typed", r#"{"export":"centroid","args":[[{"x":1}]]}"#, "invalid_args", "args[0][0]: field \"y\" is missing");
    check("typed", r#"{"export":"centroid","args":[[{"x":1,"y":2,"z":3}]]}"#, "invalid_args", "no field \"z\"");
    check("typed", r#"{"export":"mix","args":["red","pink"]}"#, "invalid_args", "args[1]: expected one of \"red\"");
    check("typed", r#"{"export":"ints","args":[128,0,0,0,0,0,0,0]}"#, "invalid_args", "128 does not fit s8");
    check("math", r#"{"export":"add","args":[1.5,2]}"#, "invalid_args", "args[0]: expected a whole number (i32)");
    check("math", r#"{"export":"add","args":[1,4294967296]}"#, "invalid_args", "does not fit i32");
    check("math", r#"{"export":"add","args":"x"}"#, "invalid_args", "an array");
    check("math", "{", "invalid_json", "request body");
    check("math", r#"{"exprot":"add"}"#, "invalid_json", "exprot");
    check("hello", "{}", "missing_export", "/run/");
    let message = server.get("/run/math/").refused(400, "missing_export");
    assert!(message.contains("invoke"), "{message}");
    server.invoke("nobody", "{}").refused(404, "not_found");
    assert_eq!(server.metric("tensor_wasm_instance_spawns_total"), 0.0);
}

#[test]
fn core_values_and_multiple_results() {
    let server = Server::start();
    server.deploy("math", "math.wasm");
    let call = |body: &str| server.invoke("math", body).result();
    assert_eq!(call(r#"{"export":"mul64","args":[-3,4000000000]}"#), json!(-12_000_000_000_i64));
    assert_eq!(call(r#"{"export":"scale","args":[0.1,0.1]}"#), json!([0.2, 0.2]));
    assert_eq!(call(r#"{"export":"scale","args":["Infinity","NaN"]}"#), json!(["Infinity", "NaN"]));
    assert_eq!(call(r#"{"export":"nothing"}"#), json!(null));
    assert_eq!(call(r#"{"export":"add","args":[2147483647,1]}"#), json!(-2147483648));
}

#[test]
fn bytes_in_and_bytes_out() {
    let server = typed();
    server.deploy("command", "command.wasm");
    let octets = [("content-type", "application/octet-stream")];
    let upper = server.request("POST", "/functions/typed/invoke?export=upper", &octets, b"abc\xff");
    assert_eq!((upper.status, upper.bytes.as_slice()), (200, &b"ABC\xff"[..]));
    assert_eq!(upper.header("content-type"), Some("application/octet-stream"));
    let refused = server.request("POST", "/functions/typed/invoke?export=greet", &octets, b"abc");
    assert!(refused.refused(400, "invalid_args").contains("list<u8>"));
    // A command reads them from stdin and answers on stdout; without arguments it greets.
    assert_eq!(server.request("POST", "/functions/command/invoke", &octets, b"x").text(), "hello, world\n");
}

#[test]
fn as_many_octets_as_the_body_limit_says() {
    let server = typed();
    let octets = [("content-type", "application/octet-stream")];
    let upper = |server: &Server, n: usize| {
        server.request("POST", "/functions/typed/invoke?export=upper", &octets, &vec![b'a'; n])
    };
    let large = upper(&server, 15 << 20);
    assert_eq!(large.status, 200, "{}", large.text().chars().take(300).collect::<String>());
    assert_eq!((large.bytes.len(), large.bytes.iter().all(|b| *b == b'A')), (15 << 20, true));
    let message = upper(&server, (16 << 20) + 1).refused(413, "body_too_large");
    assert!(message.contains("16777216 bytes ([server] body_bytes_max)"), "{message}");
    // What comes back has a limit of its own, and is the tenant's memory until it is sent.
    let server = Server::with(Options::config("[limits]\noutput_bytes_max = 1000\n"));
    server.deploy("typed", "typed.wasm");
    assert_eq!(upper(&server, 1000).status, 200);
    let message = upper(&server, 1001).refused(422, "guest_trap");
    assert!(message.contains("more than 1000 bytes of output ([limits] output_bytes_max)"), "{message}");
}

#[test]
fn octets_come_back_from_results_too() {
    let server = typed();
    let octets = [("content-type", "application/octet-stream")];
    let call = |export: &str, body: &[u8]| {
        server.request("POST", &format!("/functions/typed/invoke?export={export}"), &octets, body)
    };
    assert_eq!(call("text", "grüße".as_bytes()).bytes, "grüße".as_bytes());
    assert!(call("text", b"\xff").refused(422, "guest_trap").contains("the export returned an error"));
    assert_eq!(call("rest", b"abc").bytes, b"bc");
    assert!(call("rest", b"").refused(422, "guest_trap").contains("red"));
    // An error type of the component's own is carried by values, of which a body may be no more than fit.
    let message = call("rest", &vec![0; 15 << 20]).refused(413, "body_too_large");
    assert!(message.contains("hostcall_bytes_max"), "{message}");
    assert!(call("counter", b"").refused(400, "invalid_args").contains("does not take bytes"));
}

#[test]
fn a_result_that_is_an_error_says_so() {
    let server = typed();
    let divide = |b: i32| server.invoke("typed", &format!(r#"{{"export":"divide","args":[7,{b}]}}"#)).ok();
    assert_eq!((divide(2)["is_err"].clone(), divide(2)["result"].clone()), (json!(false), json!({ "ok": 3 })));
    let failed = divide(0);
    assert_eq!((&failed["is_err"], &failed["result"]), (&json!(true), &json!({ "err": "7 / 0 has no answer" })));
    assert_eq!(server.invoke("typed", r#"{"export":"greet","args":["x"]}"#).ok()["is_err"], false);
}

#[test]
fn a_command_of_both_worlds_is_run_by_the_newer_export() {
    let server = Server::start();
    server.deploy("p3", "command-p3.wasm");
    let run = |args: &str| server.invoke("p3", &format!(r#"{{"args":{args}}}"#)).result();
    assert_eq!(run("[]"), json!({ "exit_code": 0, "stdout": "hello from WASI 0.3\n", "stderr": "" }));
    assert_eq!(run(r#"["sleep","5"]"#)["stdout"], "slept\n");
    assert_eq!(run(r#"["nonsense"]"#)["exit_code"], 1);
    assert_eq!(run(r#"["exit","7"]"#)["exit_code"], 7);
    // Written by hand, without anything else in it.
    let both = wat::parse_file(crate::support::root().join("guests/wat/both-runs.wat")).unwrap();
    server.deploy_bytes("both", &both).ok();
    assert_eq!(server.invoke("both", "{}").result()["exit_code"], 0);
}

#[test]
fn usage_is_reported() {
    let server = Server::start();
    server.deploy("hostile", "hostile.wasm");
    server.deploy("math", "math.wasm");
    let light = server.invoke("math", r#"{"export":"fib","args":[10]}"#).ok()["usage"].clone();
    let heavy = server.invoke("math", r#"{"export":"fib","args":[200000000]}"#).ok()["usage"].clone();
    let cpu = |usage: &serde_json::Value| usage["cpu_us"].as_u64().unwrap();
    assert!(cpu(&heavy) > 20_000 && cpu(&heavy) > 10 * cpu(&light), "{light} {heavy}");
    assert!(heavy["wall_us"].as_u64() >= heavy["cpu_us"].as_u64(), "{heavy}");
    let stain = server.invoke("hostile", r#"{"export":"stain"}"#).ok()["usage"].clone();
    assert_eq!(stain["memory_peak_bytes"], 65536);
}

#[test]
fn streams_arrive_while_the_guest_runs() {
    let server = Server::start();
    server.deploy("command", "command.wasm");
    let body = r#"{"args":["drip","5","100"]}"#;
    let mut stream = server.connect();
    send(
        &mut stream,
        &format!(
            "POST /functions/command/invoke-stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        ),
    );
    let mut arrivals = Vec::new();
    let mut events = Vec::new();
    for line in BufReader::new(stream).lines() {
        let line = line.unwrap();
        if let Some(event) = line.strip_prefix("event: ") {
            events.push(event.to_owned());
            arrivals.push(std::time::Instant::now());
        }
        if let Some(data) = line.strip_prefix("data: ") {
            let data: serde_json::Value = serde_json::from_str(data).unwrap();
            if events.last().unwrap() == "done" {
                assert_eq!(data["result"]["exit_code"], 0);
                break;
            }
            assert!(data["text"].as_str().unwrap().starts_with("drop "), "{data}");
        }
    }
    assert_eq!(events, ["chunk", "chunk", "chunk", "chunk", "chunk", "done"]);
    let spread = *arrivals.last().unwrap() - arrivals[0];
    assert!(spread.as_millis() >= 350, "the chunks came one by one over 400 ms, not at once: {spread:?}");
    assert_eq!(server.metric("tensor_wasm_streaming_chunks_emitted_total"), 5.0);

    let raw = server.request(
        "POST",
        "/functions/command/invoke-stream",
        &[("accept", "application/octet-stream")],
        br#"{"args":["drip","2","1"]}"#,
    );
    assert_eq!(raw.text(), "drop 0\ndrop 1\n");
    let failed = server.post("/functions/command/invoke-stream", r#"{"args":["panic"]}"#).text();
    assert!(failed.contains("event: error") && failed.contains("guest_trap"), "{failed}");
    server.post("/functions/nobody/invoke-stream", "{}").refused(404, "not_found");
}

#[test]
fn reuse_mixes_up_neither_streams_nor_commands() {
    let server = Server::start();
    server.deploy_with("typed", &crate::support::guest_bytes("typed.wasm"), r#"{"reuse":true}"#).ok();
    server.deploy_with("command", &crate::support::guest_bytes("command.wasm"), r#"{"reuse":true}"#).ok();
    for n in 0..4 {
        server.invoke("typed", r#"{"export":"counter"}"#).ok();
        let body = format!(r#"{{"export":"shout","args":["call {n}"]}}"#);
        let streamed = server.post("/functions/typed/invoke-stream", &body).text();
        assert!(streamed.contains(&format!("{n}!")) && streamed.contains("event: done"), "{streamed}");
        let stdout = server.invoke("command", &format!(r#"{{"args":["args","{n}"]}}"#)).result()["stdout"].clone();
        assert_eq!(stdout, format!("{n}\n"));
    }
}

#[test]
fn leaving_a_stream_stops_the_guest() {
    let server = Server::start();
    server.deploy("command", "command.wasm");
    let body = r#"{"args":["drip","100000","1"]}"#;
    let mut stream = server.connect();
    send(
        &mut stream,
        &format!(
            "POST /functions/command/invoke-stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        ),
    );
    server.wait_for_metric("tensor_wasm_active_instances", 1.0);
    drop(stream);
    server.wait_for_metric("tensor_wasm_active_instances", 0.0);
}

#[test]
fn what_guests_write_is_in_the_logs() {
    let server = typed();
    server.invoke("typed", r#"{"export":"shout","args":["hear this"]}"#).ok();
    let logs = server.get("/functions/typed/logs").ok();
    assert_eq!(logs["logs"][0]["stdout"], "HEAR!\nTHIS!\n");
    assert_eq!(logs["logs"][0]["dropped_bytes"], 0);
}

#[test]
fn what_commands_write_is_in_the_logs_by_stream() {
    let server = Server::with(Options::config("[limits]\nlog_bytes_max = 1000\n"));
    server.deploy("command", "command.wasm");
    let last = || server.get("/functions/command/logs?limit=1").ok()["logs"][0].clone();
    server.invoke("command", r#"{"args":["hello","log"]}"#).ok();
    assert_eq!((&last()["stdout"], &last()["stderr"]), (&json!("hello, log\n"), &json!("")));
    server.invoke("command", r#"{"args":["exit","3"]}"#).ok();
    assert_eq!((&last()["stdout"], &last()["stderr"]), (&json!(""), &json!("leaving\n")));
    // A stream's and a large result's beginning is kept; the answer itself is whole.
    let streamed = server.post("/functions/command/invoke-stream", r#"{"args":["hello","stream"]}"#).text();
    assert_eq!(streamed.matches("hello, stream").count(), 1, "{streamed}");
    assert_eq!(last()["stdout"], "hello, stream\n");
    let whole = server.invoke("command", r#"{"args":["spam","1"]}"#).result();
    assert_eq!(whole["stdout"].as_str().unwrap().len(), 65536);
    assert_eq!((last()["stdout"].as_str().unwrap().len(), &last()["dropped_bytes"]), (1000, &json!(64536)));
}
