//! A `wasi:http` handler of WASI 0.3: asynchronous, its body a stream.

use wasip3::http::types::{ErrorCode, Fields, Request, Response};
use wasip3::{wit_future, wit_stream};

struct Hello;

impl wasip3::exports::http::handler::Guest for Hello {
    async fn handle(_request: Request) -> Result<Response, ErrorCode> {
        let (mut body, reader) = wit_stream::new();
        wasip3::wit_bindgen::spawn_local(async move {
            body.write_all(b"Hello from WASI 0.3!\n".to_vec()).await;
        });
        let headers = Fields::from_list(&[("content-type".to_owned(), b"text/plain".to_vec())]);
        let headers = headers.map_err(|_| ErrorCode::InternalError(None))?;
        let (trailers, trailers_reader) = wit_future::new(|| Ok(None));
        drop(trailers);
        let (response, _sent) = Response::new(headers, Some(reader), trailers_reader);
        Ok(response)
    }
}

wasip3::http::service::export!(Hello);
