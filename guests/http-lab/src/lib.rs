//! A `wasi:http` handler that does what its path says, well-behaved or not: the tests' laboratory.

use wasip2::exports::http::incoming_handler::Guest;
use wasip2::http::types::{
    Fields, IncomingBody, IncomingRequest, Method, OutgoingBody, OutgoingRequest, OutgoingResponse, ResponseOutparam,
    Scheme,
};
use wasip2::io::streams::StreamError;

struct Lab;

/// Survives between calls only where an instance is reused.
static mut CALLS: u32 = 0;

impl Guest for Lab {
    fn handle(request: IncomingRequest, out: ResponseOutparam) {
        // SAFETY: a guest has one thread.
        let calls = unsafe {
            CALLS += 1;
            CALLS
        };
        let path = request.path_with_query().unwrap_or_default();
        let (path, query) = path.split_once('?').unwrap_or((&path, ""));
        match path {
            "/" => respond(out, 200, &[], b"lab\n"),
            "/calls" => respond(out, 200, &[], calls.to_string().as_bytes()),
            "/path" => respond(out, 200, &[], request.path_with_query().unwrap_or_default().as_bytes()),
            "/headers" => respond(out, 200, &[], headers(&request).as_bytes()),
            "/env" => {
                let all: Vec<String> = std::env::vars().map(|(k, v)| format!("{k}={v}")).collect();
                respond(out, 200, &[], all.join("\n").as_bytes());
            }
            "/print" => {
                println!("to stdout: {query}");
                eprintln!("to stderr: {query}");
                respond(out, 200, &[], b"printed\n");
            }
            "/status" => respond(out, query.parse().unwrap_or(500), &[("x-lab", "yes")], b""),
            "/respond-with" => {
                let pairs: Vec<(String, String)> = query
                    .split('&')
                    .filter_map(|p| p.split_once('='))
                    .map(|(n, v)| (n.to_owned(), decoded(v)))
                    .collect();
                let headers: Vec<(&str, &str)> = pairs.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
                respond(out, 200, &headers, b"as you wished\n");
            }
            "/page" => respond(out, 200, &[("content-type", "text/html; charset=utf-8")], include_bytes!("page.html")),
            "/echo" => echo(request, out),
            "/trailers" => trailers(request, out),
            "/endless" => endless(out),
            "/after" => {
                // The response is complete; the guest is not.
                respond(out, 200, &[], b"done\n");
                std::thread::sleep(std::time::Duration::from_millis(query.parse().unwrap_or(50)));
                println!("after");
            }
            "/fetch" => fetch(query, out),
            "/trap" => panic!("asked to"),
            "/trap-midway" => {
                let body = start(out, 200, &[]);
                let stream = body.write().unwrap();
                stream.blocking_write_and_flush(b"half").unwrap();
                panic!("asked to, midway");
            }
            "/loop" => loop {
                std::hint::black_box(0);
            },
            "/sleep" => {
                std::thread::sleep(std::time::Duration::from_millis(query.parse().unwrap_or(1000)));
                respond(out, 200, &[], b"slept\n");
            }
            "/spin" => {
                let until = std::time::Instant::now() + std::time::Duration::from_millis(query.parse().unwrap_or(10));
                while std::time::Instant::now() < until {}
                respond(out, 200, &[], b"spun\n");
            }
            "/silent" => drop(out),
            "/error" => {
                ResponseOutparam::set(out, Err(wasip2::http::types::ErrorCode::InternalError(Some("lab".into()))))
            }
            "/bad-length" => {
                let body = start(out, 200, &[("content-length", "1000")]);
                let stream = body.write().unwrap();
                stream.blocking_write_and_flush(b"short").unwrap();
                drop(stream);
                let _ = OutgoingBody::finish(body, None);
            }
            "/two-lengths" => {
                let headers = Fields::new();
                headers.append("content-length", b"1").unwrap();
                headers.append("content-length", b"2").unwrap();
                ResponseOutparam::set(out, Ok(OutgoingResponse::new(headers)));
            }
            _ => respond(out, 404, &[], b"the lab has no such experiment\n"),
        }
    }
}

fn start(out: ResponseOutparam, status: u16, headers: &[(&str, &str)]) -> OutgoingBody {
    let fields = Fields::new();
    for (name, value) in headers {
        fields.append(name, value.as_bytes()).unwrap();
    }
    let response = OutgoingResponse::new(fields);
    response.set_status_code(status).unwrap();
    let body = response.body().unwrap();
    ResponseOutparam::set(out, Ok(response));
    body
}

fn respond(out: ResponseOutparam, status: u16, headers: &[(&str, &str)], content: &[u8]) {
    let body = start(out, status, headers);
    let stream = body.write().unwrap();
    for piece in content.chunks(4096) {
        stream.blocking_write_and_flush(piece).unwrap();
    }
    drop(stream);
    OutgoingBody::finish(body, None).unwrap();
}

fn headers(request: &IncomingRequest) -> String {
    let line = |(name, value): (String, Vec<u8>)| format!("{name}: {}\n", String::from_utf8_lossy(&value));
    request.headers().entries().into_iter().map(line).collect()
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Each piece goes back as soon as it came.
fn echo(request: IncomingRequest, out: ResponseOutparam) {
    let incoming = request.consume().unwrap();
    let body = start(out, 200, &[]);
    let (input, output) = (incoming.stream().unwrap(), body.write().unwrap());
    loop {
        match input.blocking_read(64 * 1024) {
            Ok(piece) => {
                for part in piece.chunks(4096) {
                    output.blocking_write_and_flush(part).unwrap();
                }
            }
            Err(StreamError::Closed) => break,
            Err(e) => panic!("{e:?}"),
        }
    }
    drop((input, output));
    OutgoingBody::finish(body, None).unwrap();
}

/// Answers with the request's trailers, and with a trailer of its own.
fn trailers(request: IncomingRequest, out: ResponseOutparam) {
    let incoming = request.consume().unwrap();
    let input = incoming.stream().unwrap();
    let mut bytes = 0;
    while let Ok(piece) = input.blocking_read(64 * 1024) {
        bytes += piece.len();
    }
    drop(input);
    let future = IncomingBody::finish(incoming);
    future.subscribe().block();
    let got = match future.get() {
        Some(Ok(Ok(Some(fields)))) => {
            fields.entries().into_iter().map(|(n, v)| format!("{n}={}", String::from_utf8_lossy(&v))).collect()
        }
        _ => Vec::new(),
    };
    let body = start(out, 200, &[("trailer", "x-lab-bytes")]);
    let stream = body.write().unwrap();
    stream.blocking_write_and_flush(got.join(",").as_bytes()).unwrap();
    drop(stream);
    let fields = Fields::new();
    fields.append("x-lab-bytes", bytes.to_string().as_bytes()).unwrap();
    OutgoingBody::finish(body, Some(fields)).unwrap();
}

/// Writes until nobody listens.
fn endless(out: ResponseOutparam) {
    let body = start(out, 200, &[]);
    let stream = body.write().unwrap();
    while stream.blocking_write_and_flush(&[b'x'; 4096]).is_ok() {}
    println!("the listener left");
}

fn fetch(authority: &str, out: ResponseOutparam) {
    let request = OutgoingRequest::new(Fields::new());
    request.set_method(&Method::Get).unwrap();
    request.set_scheme(Some(&Scheme::Http)).unwrap();
    request.set_authority(Some(authority)).unwrap();
    request.set_path_with_query(Some("/")).unwrap();
    let result = wasip2::http::outgoing_handler::handle(request, None).and_then(|future| {
        future.subscribe().block();
        future.get().unwrap().unwrap()
    });
    match result {
        Ok(response) => respond(out, 200, &[], response.status().to_string().as_bytes()),
        Err(code) => respond(out, 502, &[], format!("{code:?}").as_bytes()),
    }
}

wasip2::http::proxy::export!(Lab);
