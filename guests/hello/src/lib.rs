//! The smallest useful `wasi:http` handler: it greets. The benchmarks serve it with several hosts.

use wasip2::exports::http::incoming_handler::Guest;
use wasip2::http::types::{Fields, IncomingRequest, OutgoingBody, OutgoingResponse, ResponseOutparam};

struct Hello;

impl Guest for Hello {
    fn handle(_request: IncomingRequest, out: ResponseOutparam) {
        let headers = Fields::new();
        let _ = headers.append("content-type", b"text/plain");
        let response = OutgoingResponse::new(headers);
        let body = response.body().expect("the body is taken once");
        ResponseOutparam::set(out, Ok(response));
        let stream = body.write().expect("the stream is taken once");
        stream.blocking_write_and_flush(b"Hello from TensorWasm!\n").expect("the client is there");
        drop(stream);
        OutgoingBody::finish(body, None).expect("the body is whole");
    }
}

wasip2::http::proxy::export!(Hello);
