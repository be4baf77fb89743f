//! `wasi:http` functions: paths, headers, bodies streamed both ways, trailers, clients that leave, responses that are
//! none.

use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use crate::support::{Options, Server, guest_bytes, read_all, send};

fn lab() -> Server {
    let server = Server::with(Options::config("[limits]\ndeadline_ms_max = 10000\n"));
    server.deploy("lab", "http-lab.wasm");
    server
}

#[test]
fn requests_and_responses_pass_through() {
    let server = lab();
    assert_eq!(server.get("/run/lab").text(), "lab\n");
    assert_eq!(server.get("/run/lab/").text(), "lab\n");
    assert_eq!(server.get("/run/lab/path?a=b%20c").text(), "/path?a=b%20c");
    let teapot = server.get("/run/lab/status?418");
    assert_eq!((teapot.status, teapot.header("x-lab")), (418, Some("yes")));
    let seen = server.request("GET", "/run/lab/headers", &[("x-custom", "v")], b"").text();
    assert!(seen.contains("x-custom: v\n"), "{seen}");
    assert!(seen.contains("traceparent: 00-"), "{seen}");
    let head = server.request("HEAD", "/run/lab/", &[], b"");
    assert_eq!((head.status, head.bytes.len()), (200, 0));
}

#[test]
fn large_bodies_are_echoed_whole() {
    let server = lab();
    let sent: Vec<u8> = (0..5_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let echoed = server.request("POST", "/run/lab/echo", &[], &sent);
    assert_eq!(echoed.status, 200);
    assert!(echoed.bytes == sent, "{} of {} bytes", echoed.bytes.len(), sent.len());
}

#[test]
fn bodies_stream_in_both_directions_at_once() {
    let server = lab();
    let mut stream = server.connect();
    send(&mut stream, "POST /run/lab/echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n");
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        reader.read_line(&mut line).unwrap();
    }
    // Each piece comes back before the next is sent: neither side waits for the end.
    for piece in ["first", "second", "third"] {
        send(&mut stream, &format!("{:x}\r\n{piece}\r\n", piece.len()));
        let mut size = String::new();
        reader.read_line(&mut size).unwrap();
        let mut back = vec![0; usize::from_str_radix(size.trim(), 16).unwrap() + 2];
        reader.read_exact(&mut back).unwrap();
        assert_eq!(&back[..piece.len()], piece.as_bytes());
    }
    send(&mut stream, "0\r\n\r\n");
    let mut rest = String::new();
    reader.read_line(&mut rest).unwrap();
    assert_eq!(rest, "0\r\n");
}

#[test]
fn trailers_pass_both_ways() {
    let server = lab();
    let mut stream = server.connect();
    send(
        &mut stream,
        "POST /run/lab/trailers HTTP/1.1\r\nhost: localhost\r\nte: trailers\r\nconnection: close\r\ntrailer: x-sum\r\n\
         transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx-sum: 42\r\n\r\n",
    );
    let answer = String::from_utf8(read_all(&mut stream)).unwrap();
    assert!(answer.contains("x-sum=42"), "the guest saw the request's trailer: {answer}");
    assert!(answer.contains("x-lab-bytes: 5"), "the client sees the guest's: {answer}");
}

#[test]
fn a_client_that_leaves_stops_the_guest() {
    let server = lab();
    for path in ["endless", "loop", "sleep?60000"] {
        let mut stream = server.connect();
        send(&mut stream, &format!("GET /run/lab/{path} HTTP/1.1\r\nhost: localhost\r\n\r\n"));
        server.wait_for_metric("tensor_wasm_active_instances", 1.0);
        if path == "endless" {
            let mut some = [0; 100_000];
            stream.read_exact(&mut some).unwrap();
        }
        let left = Instant::now();
        drop(stream);
        server.wait_for_metric("tensor_wasm_active_instances", 0.0);
        assert!(left.elapsed() < Duration::from_secs(5), "{path}: before its deadline of 10 s: {:?}", left.elapsed());
    }
    // One that never sends its body does not keep the guest either.
    let mut stream = server.connect();
    send(&mut stream, "POST /run/lab/echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\npart");
    server.wait_for_metric("tensor_wasm_active_instances", 1.0);
    drop(stream);
    server.wait_for_metric("tensor_wasm_active_instances", 0.0);
}

#[test]
fn a_client_that_reads_nothing_does_not_outlast_the_deadline() {
    let server = Server::with(Options::config("[limits]\ndeadline_ms_max = 500\n"));
    server.deploy("lab", "http-lab.wasm");
    let mut stream = server.connect();
    send(&mut stream, "GET /run/lab/endless HTTP/1.1\r\nhost: localhost\r\n\r\n");
    server.wait_for_metric("tensor_wasm_active_instances", 1.0);
    server.wait_for_metric("tensor_wasm_active_instances", 0.0);
    // And what it did send does not look like a whole response.
    let sent = read_all(&mut stream);
    assert!(!sent.ends_with(b"0\r\n\r\n"), "cut off at the deadline, {} bytes", sent.len());
}

#[test]
fn a_guest_may_work_on_after_its_response() {
    let server = lab();
    let started = Instant::now();
    assert_eq!(server.get("/run/lab/after?300").text(), "done\n");
    assert!(started.elapsed() < Duration::from_millis(250), "the response did not wait: {:?}", started.elapsed());
    crate::support::wait_until("the guest's last words", || {
        server.get("/functions/lab/logs").ok()["logs"].as_array().unwrap().iter().any(|l| l["stdout"] == "after\n")
    });
}

#[test]
fn responses_that_are_none_become_errors() {
    let server = lab();
    assert!(server.get("/run/lab/silent").refused(502, "guest_bad_response").contains("without setting a response"));
    assert!(server.get("/run/lab/error").refused(502, "guest_bad_response").contains("InternalError"));
    assert!(server.get("/run/lab/trap").refused(422, "guest_trap").contains("unreachable"));
    assert!(server.get("/run/lab/trap-midway").refused(422, "guest_trap").contains("unreachable"));
    server.get("/run/lab/two-lengths").refused(422, "guest_trap");
    // Promised 1000 bytes, delivered 5: the client must be able to tell.
    assert!(server.try_request("GET", "/run/lab/bad-length", &[], b"").is_err());
    let logs = server.get("/functions/lab/logs").ok();
    let faults: Vec<&str> = logs["logs"].as_array().unwrap().iter().filter_map(|l| l["fault"].as_str()).collect();
    assert!(faults.iter().any(|f| f.contains("unreachable")), "{faults:?}");
    assert_eq!(server.get("/run/lab/").text(), "lab\n", "and it goes on");
}

#[test]
fn outgoing_requests_need_the_operators_leave() {
    let server = lab();
    let target = server.addr.clone();
    let denied = server.get(&format!("/run/lab/fetch?{target}"));
    assert_eq!(denied.status, 502);
    assert!(denied.text().contains("HttpRequestDenied"), "{}", denied.text());
    let open = Server::with(Options::config(&format!("[server]\noutbound_http = [\"{target}\"]\n")));
    open.deploy("lab", "http-lab.wasm");
    assert_eq!(open.get(&format!("/run/lab/fetch?{target}")).text(), "200");
    assert_eq!(open.get("/run/lab/fetch?127.0.0.1:1").status, 502);
}

#[test]
fn http_2_works_too() {
    let server = lab();
    let output = std::process::Command::new("curl")
        .args([
            "-s",
            "--http2-prior-knowledge",
            "-w",
            " %{http_version}",
            "-d",
            "over two",
            &server.url("/run/lab/echo"),
        ])
        .output();
    match output {
        Ok(output) => assert_eq!(String::from_utf8_lossy(&output.stdout), "over two 2"),
        Err(_) => println!("skipped: no curl"),
    }
}

#[test]
fn our_tokens_are_not_shown_to_guests() {
    let server = Server::with(Options::default().env("TENSOR_WASM_API_TOKENS", "secret-token;other-token:tenant=*"));
    let ours = [("authorization", "Bearer secret-token"), ("content-type", "application/wasm")];
    assert_eq!(server.request("POST", "/functions?name=lab", &ours, &guest_bytes("http-lab.wasm")).status, 201);
    let seen = server.request("GET", "/run/lab/headers", &ours[..1], b"").text();
    assert!(!seen.contains("secret-token"), "{seen}");
    server.get("/run/lab/headers").refused(401, "unauthorized");
    // A public function answers everyone, and sees the credentials that are meant for it.
    let settings = "/functions?name=lab&settings=%7B%22public%22%3Atrue%7D";
    assert_eq!(server.request("POST", settings, &ours, &guest_bytes("http-lab.wasm")).status, 201);
    let seen = server.request("GET", "/run/lab/headers", &[("authorization", "Bearer theirs")], b"").text();
    assert!(seen.contains("authorization: Bearer theirs"), "{seen}");
}
