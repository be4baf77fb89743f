//! Talking to a server: one request, one answer, and an error that says what to do about it.

use std::io::Read;

use serde_json::Value;
use ureq::http::{Method, Request, Response, header};
use ureq::{Agent, Body, SendBody};

use crate::{Failed, Global};

/// Answers larger than this are cut off by the client; the server's own limit on results is lower.
const ANSWER_BYTES_MAX: u64 = 256 << 20;

pub(crate) struct Client {
    agent: Agent,
    server: String,
    tenant: Option<String>,
    token: Option<String>,
}

impl Client {
    pub(crate) fn new(global: &Global) -> Client {
        let agent = Agent::config_builder().http_status_as_error(false).build().new_agent();
        let token = std::env::var("TENSOR_WASM_TOKEN").ok().filter(|token| !token.is_empty());
        let server = global.server.trim_end_matches('/').to_owned();
        Client { agent, server, tenant: global.tenant.clone(), token }
    }

    pub(crate) fn get(&self, path: &str) -> Result<Value, Failed> {
        self.json(self.send(Method::GET, path, &[], SendBody::none())?)
    }

    pub(crate) fn delete(&self, path: &str) -> Result<Value, Failed> {
        self.json(self.send(Method::DELETE, path, &[], SendBody::none())?)
    }

    pub(crate) fn with_json(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> Result<Value, Failed> {
        let text = body.to_string();
        let mut all = vec![("content-type", "application/json")];
        all.extend_from_slice(headers);
        self.json(self.send(method, path, &all, SendBody::from_reader(&mut text.as_bytes()))?)
    }

    pub(crate) fn upload(&self, path: &str, bytes: u64, mut body: impl Read) -> Result<Value, Failed> {
        let length = bytes.to_string();
        let headers = [("content-type", "application/wasm"), ("content-length", length.as_str())];
        self.json(self.send(Method::POST, path, &headers, SendBody::from_reader(&mut body))?)
    }

    /// Sends bytes as they are.
    pub(crate) fn put(&self, path: &str, mut body: &[u8]) -> Result<Value, Failed> {
        let headers = [("content-type", "application/octet-stream")];
        self.json(self.send(Method::PUT, path, &headers, SendBody::from_reader(&mut body))?)
    }

    pub(crate) fn text(&self, path: &str) -> Result<String, Failed> {
        let response = self.send(Method::GET, path, &[], SendBody::none())?;
        let is_ok = response.status().is_success();
        let text = self.read(response)?;
        if is_ok { Ok(text) } else { Err(refusal(&text)) }
    }

    fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: SendBody<'_>,
    ) -> Result<Response<Body>, Failed> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.server));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(tenant) = &self.tenant {
            request = request.header("x-tensorwasm-tenant", tenant);
        }
        let request = request.body(body).map_err(|e| Failed::Usage(format!("{}: {e}", self.server)))?;
        self.agent.run(request).map_err(|error| self.unreachable(&error))
    }

    fn unreachable(&self, error: &ureq::Error) -> Failed {
        let server = &self.server;
        match error {
            ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => Failed::No(format!(
                "no server answers at {server}; start one with `tensor-wasm serve`, or name another with --server URL"
            )),
            ureq::Error::ConnectionFailed | ureq::Error::HostNotFound | ureq::Error::Io(_) => {
                Failed::No(format!("cannot reach {server}: {error}"))
            }
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => Failed::Usage(format!("--server {server:?}: {error}")),
            other => Failed::No(format!("{server}: {other}")),
        }
    }

    fn json(&self, response: Response<Body>) -> Result<Value, Failed> {
        let is_ok = response.status().is_success();
        let text = self.read(response)?;
        if !is_ok {
            return Err(refusal(&text));
        }
        if text.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&text).map_err(|e| Failed::No(format!("{}: not a TensorWasm server? {e}", self.server)))
    }

    fn read(&self, mut response: Response<Body>) -> Result<String, Failed> {
        let text = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
        text.map_err(|e| Failed::No(format!("{}: the answer broke off: {e}", self.server)))
    }
}

/// The server's own words.
fn refusal(text: &str) -> Failed {
    let parsed: Option<Value> = serde_json::from_str(text).ok();
    let error = parsed.as_ref().and_then(|v| v.get("error"));
    match error.and_then(|e| Some((e.get("kind")?.as_str()?, e.get("message")?.as_str()?))) {
        Some((kind, message)) => Failed::No(format!("{message} ({kind})")),
        None => Failed::No(text.trim().to_owned()),
    }
}

/// One part of a path, encoded so that any name stays one part.
pub(crate) fn segment(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'~');
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
