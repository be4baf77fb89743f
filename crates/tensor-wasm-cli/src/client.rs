//! Talking to a server: one request, one answer, and an error that says what to do about it.

use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use ureq::http::{HeaderMap, Method, Request, Response, header};
use ureq::{Agent, Body, SendBody};

use crate::{Failed, Global};

/// Answers larger than this are cut off by the client; the server's own limit on results is lower.
pub(crate) const ANSWER_BYTES_MAX: u64 = 256 << 20;

/// A machine that drops packets would otherwise be waited for until TCP gives up, two minutes later.
const CONNECT_MAX: Duration = Duration::from_secs(10);

pub(crate) const OCTETS: &str = "application/octet-stream";

const NDJSON: &str = "application/x-ndjson";

pub(crate) struct Client {
    agent: Agent,
    server: String,
    tenant: Option<String>,
    token: Option<String>,
}

impl Client {
    pub(crate) fn new(global: &Global) -> Client {
        let config = Agent::config_builder().http_status_as_error(false).timeout_connect(Some(CONNECT_MAX));
        let token = std::env::var("TENSOR_WASM_TOKEN").ok().filter(|token| !token.is_empty());
        let agent = config.build().new_agent();
        Client { agent, server: global.server.clone(), tenant: global.tenant.clone(), token }
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
        // A reader's length is not known: without this header the body is chunked, and the server has to set aside
        // memory for the largest there may be.
        let length = text.len().to_string();
        let mut all = vec![("content-type", "application/json"), ("content-length", length.as_str())];
        all.extend_from_slice(headers);
        self.json(self.send(method, path, &all, SendBody::from_reader(&mut text.as_bytes()))?)
    }

    /// Sends so many bytes as they are read.
    pub(crate) fn upload(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        bytes: u64,
        mut body: impl Read,
    ) -> Result<Value, Failed> {
        let length = bytes.to_string();
        let headers = [("content-type", content_type), ("content-length", length.as_str())];
        self.json(self.send(method, path, &headers, SendBody::from_reader(&mut body))?)
    }

    /// Sends bytes as they are.
    pub(crate) fn put(&self, path: &str, body: &[u8]) -> Result<Value, Failed> {
        self.upload(Method::PUT, path, OCTETS, body.len() as u64, body)
    }

    pub(crate) fn text(&self, path: &str) -> Result<String, Failed> {
        let response = self.send(Method::GET, path, &[], SendBody::none())?;
        let response = self.accepted(response)?;
        self.read(response)
    }

    /// Bytes there and bytes back.
    pub(crate) fn octets(&self, path: &str, body: &[u8]) -> Result<Vec<u8>, Failed> {
        let length = body.len().to_string();
        let headers = [("content-type", OCTETS), ("content-length", length.as_str())];
        let response = self.send(Method::POST, path, &headers, SendBody::from_reader(&mut &body[..]))?;
        let mut response = self.accepted(response)?;
        let read = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
        read.map_err(|e| self.broke_off(&e))
    }

    /// An answer that comes line by line, each a JSON value, for as long as the server keeps it open.
    pub(crate) fn lines(&self, path: &str) -> Result<impl Iterator<Item = Result<Value, Failed>>, Failed> {
        let response = self.send(Method::GET, path, &[("accept", NDJSON)], SendBody::none())?;
        let response = self.accepted(response)?;
        let content_type = response.headers().get(header::CONTENT_TYPE);
        if !content_type.is_some_and(|value| value.as_bytes().starts_with(NDJSON.as_bytes())) {
            return Err(self.foreign());
        }
        let mut reader = BufReader::new(response.into_body().into_reader());
        Ok(std::iter::from_fn(move || {
            loop {
                let mut line = Vec::new();
                match reader.by_ref().take(ANSWER_BYTES_MAX).read_until(b'\n', &mut line) {
                    Ok(0) => return None,
                    // Empty lines keep the connection open.
                    Ok(_) if line.trim_ascii().is_empty() => {}
                    Ok(_) => return Some(serde_json::from_slice(&line).map_err(|_| self.foreign())),
                    Err(error) => return Some(Err(self.broke_off(&error.into()))),
                }
            }
        }))
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
        let request = request.body(body).map_err(|e| Failed::Usage(format!("--server {}: {e}", self.server)))?;
        self.agent.run(request).map_err(|error| self.unreachable(&error))
    }

    fn unreachable(&self, error: &ureq::Error) -> Failed {
        let server = &self.server;
        let unreachable = |message| Failed::Server { kind: "unreachable".to_owned(), message };
        match error {
            ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => unreachable(format!(
                "no server answers at {server}; start one with `tensor-wasm serve`, or name another with --server URL"
            )),
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => Failed::Usage(format!("--server {server}: {error}")),
            other => unreachable(format!("cannot reach {server}: {other}; name another server with --server URL")),
        }
    }

    fn json(&self, response: Response<Body>) -> Result<Value, Failed> {
        let response = self.accepted(response)?;
        let text = self.read(response)?;
        if text.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&text).map_err(|_| self.foreign())
    }

    /// The response, unless it is a refusal.
    fn accepted(&self, response: Response<Body>) -> Result<Response<Body>, Failed> {
        if response.status().is_success() {
            return Ok(response);
        }
        let headers = response.headers().clone();
        let text = self.read(response)?;
        Err(self.refusal(&headers, &text))
    }

    fn read(&self, mut response: Response<Body>) -> Result<String, Failed> {
        let text = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
        text.map_err(|e| self.broke_off(&e))
    }

    fn broke_off(&self, error: &ureq::Error) -> Failed {
        let message = format!("{}: the answer broke off: {error}; has the server stopped?", self.server);
        Failed::Server { kind: "broken_answer".to_owned(), message }
    }

    /// Something answers there, and it is not one of our servers.
    fn foreign(&self) -> Failed {
        let message = format!("{} answers, but not as a TensorWasm server does; check --server URL", self.server);
        Failed::Server { kind: "not_a_server".to_owned(), message }
    }

    /// The server's own words, with what to do about them here: they were written for callers by HTTP.
    fn refusal(&self, headers: &HeaderMap, text: &str) -> Failed {
        let parsed: Option<Value> = serde_json::from_str(text).ok();
        let error = parsed.as_ref().and_then(|v| v.get("error"));
        let Some((kind, message)) = error.and_then(|e| Some((e.get("kind")?.as_str()?, e.get("message")?.as_str()?)))
        else {
            return self.foreign();
        };
        let said = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let message = match (kind, &self.token, &self.tenant) {
            ("unauthorized", None, _) => "this server asks for a token; put yours into TENSOR_WASM_TOKEN".to_owned(),
            ("unauthorized", Some(_), _) => "the server does not know the token in TENSOR_WASM_TOKEN".to_owned(),
            ("tenant_scope_denied", _, Some(tenant)) => format!(
                "the token in TENSOR_WASM_TOKEN does not speak for tenant {tenant:?}; leave --tenant away, or use a \
                 token of that tenant"
            ),
            ("tenant_scope_denied", _, None) => message.replace("in x-tensorwasm-tenant", "with --tenant ID"),
            _ => match (said("retry-after"), said("x-trace-id")) {
                (Some(seconds), _) => format!("{message}; try again in {seconds} s"),
                (None, Some(trace)) if kind == "internal" => format!("{message} ({trace})"),
                _ => message.to_owned(),
            },
        };
        Failed::Server { kind: kind.to_owned(), message }
    }
}

/// All but the unreserved characters of RFC 3986.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// One segment of a path or a value of a query, encoded so that any name stays one.
pub(crate) fn segment(text: &str) -> String {
    utf8_percent_encode(text, ENCODED).to_string()
}
