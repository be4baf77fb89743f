//! What is refused before a route of the API sees it: requests for a host that is not ours, from pages that are not
//! ours, and with bodies of a type that the route does not read. What is for a function is the function's own business
//! and does not come by here; what a function answers does, where it is answered on the API's host.

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};

use crate::error::ApiError;
use crate::hosts::{self, Host, Hosts};
use crate::openapi::is_operation;

const JSON: &str = "application/json";
const WASM: &str = "application/wasm";
const OCTETS: &str = "application/octet-stream";

/// What pages of allowed origins may send.
const CORS_METHODS: &str = "GET, POST, PUT, DELETE";
const CORS_HEADERS: &str = "authorization, content-type, idempotency-key, x-tensorwasm-tenant, traceparent, tracestate";

/// Lets a request for the API through, or says why not. `route` is the pattern it matched.
pub(crate) fn check(hosts: &Hosts, host: &Host, parts: &Parts, route: Option<&str>) -> Result<(), ApiError> {
    match host {
        Host::Api | Host::Function(_) => {}
        Host::Nobody(why) => return Err(ApiError::new(StatusCode::NOT_FOUND, "not_found", why.clone())),
        Host::Foreign(host) => return Err(hosts::foreign(host)),
    }
    hosts.check_origin(parts, hosts::authority(parts)?)?;
    match accepted(&parts.method, route.unwrap_or_default()) {
        Some(types) => check_content_type(&parts.headers, types),
        None => Ok(()),
    }
}

/// The types of body that a route reads; `None` where it reads none.
fn accepted(method: &Method, route: &str) -> Option<&'static [&'static str]> {
    match (method, route) {
        (&Method::POST, "/functions") => Some(&[WASM, JSON]),
        (&Method::POST, "/functions/{f}/invoke") => Some(&[JSON, OCTETS]),
        // A secret is bytes, whatever they are; with this type a page has to ask first.
        (&Method::PUT, "/functions/{f}/secrets/{key}") => Some(&[OCTETS]),
        (&Method::PUT, "/models/{name}") => Some(&[OCTETS]),
        // Where there is no such method, the router says so.
        (&Method::POST | &Method::PUT, route) if is_operation(method, route) => Some(&[JSON]),
        _ => None,
    }
}

/// Pages of other sites can send forms and plain text without asking first, and nothing else. A request without a body
/// needs no type.
fn check_content_type(headers: &HeaderMap, types: &[&str]) -> Result<(), ApiError> {
    let given = match headers.get(header::CONTENT_TYPE) {
        Some(value) => value.to_str().unwrap_or("?"),
        None => {
            let is_empty = match headers.get(header::CONTENT_LENGTH) {
                Some(length) => length.as_bytes() == b"0",
                None => !headers.contains_key(header::TRANSFER_ENCODING),
            };
            if is_empty {
                return Ok(());
            }
            "none"
        }
    };
    let essence = given.split(';').next().unwrap_or_default().trim();
    if types.iter().any(|accepted| accepted.eq_ignore_ascii_case(essence)) {
        return Ok(());
    }
    let shown: String = essence.chars().take(80).collect();
    let message = format!("the content type is {shown:?}; this route takes {}", types.join(" or "));
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

/// The answer to a browser that asks whether a page of an allowed origin may send what it wants to.
pub(crate) fn is_preflight(hosts: &Hosts, parts: &Parts) -> bool {
    parts.method == Method::OPTIONS
        && parts.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
        && allowed_origin(hosts, &parts.headers).is_some()
}

pub(crate) fn allowed_origin(hosts: &Hosts, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    origin.to_str().is_ok_and(|text| hosts.allows(text)).then(|| origin.clone())
}

/// What every answer of the API says to browsers; `cors` is the allowed origin that asked.
pub(crate) fn seal(headers: &mut HeaderMap, cors: Option<HeaderValue>) {
    let fixed = |text: &'static str| HeaderValue::from_static(text);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, fixed("nosniff"));
    headers.insert(header::X_FRAME_OPTIONS, fixed("DENY"));
    headers.insert(header::REFERRER_POLICY, fixed("no-referrer"));
    if !headers.contains_key(header::CONTENT_SECURITY_POLICY) {
        headers.insert(header::CONTENT_SECURITY_POLICY, fixed("default-src 'none'; frame-ancestors 'none'"));
    }
    if let Some(origin) = cors {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, fixed(CORS_METHODS));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, fixed(CORS_HEADERS));
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, fixed("x-trace-id, retry-after"));
        headers.append(header::VARY, fixed("origin"));
    }
}

/// A document under this policy has an origin that nothing else has, so that its scripts are strangers to the API even
/// where they came from its host. Policies only ever add up: one that the guest sends cannot take this away.
const SANDBOX: &str = "sandbox allow-scripts allow-forms allow-modals allow-popups allow-downloads";

const CLEAR_SITE_DATA: &str = "clear-site-data";

/// Response headers that act on a whole origin, not on the one answer. On the API's host they are not the guest's to
/// send: cookies and credentials would go to every function there, and the rest clears, moves, upgrades or spies on
/// what is the API's.
const ORIGIN_WIDE: [&str; 16] = [
    "accept-ch",
    "alt-svc",
    CLEAR_SITE_DATA,
    "critical-ch",
    "expect-ct",
    "nel",
    "origin-agent-cluster",
    "public-key-pins",
    "report-to",
    "service-worker-allowed",
    "set-cookie",
    "set-cookie2",
    "set-login",
    "strict-transport-security",
    "use-as-dictionary",
    "www-authenticate",
];

/// Puts a guest's answer on the API's host into a sandbox of its own.
pub(crate) fn sandbox(headers: &mut HeaderMap) {
    // Most answers have few headers, so they are what is gone through; without a match nothing is allocated.
    let found: Vec<HeaderName> = headers.keys().filter(|name| ORIGIN_WIDE.contains(&name.as_str())).cloned().collect();
    for name in found {
        headers.remove(name);
    }
    headers.append(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(SANDBOX));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}

/// On a host below one that functions share, an answer acts on its own host only: `Domain` would send a cookie to other
/// tenants' functions, and `Clear-Site-Data` removes the cookies of the whole registrable domain, theirs included.
pub(crate) fn host_only(headers: &mut HeaderMap) {
    headers.remove(CLEAR_SITE_DATA);
    let attributes = |cookie: &HeaderValue| cookie.as_bytes().split(|b| *b == b';').skip(1).any(is_domain_attribute);
    if !headers.get_all(header::SET_COOKIE).iter().any(attributes) {
        return;
    }
    let cookies: Vec<HeaderValue> = headers.get_all(header::SET_COOKIE).iter().cloned().collect();
    headers.remove(header::SET_COOKIE);
    for cookie in cookies {
        let parts = cookie.as_bytes().split(|b| *b == b';').enumerate();
        let kept: Vec<&[u8]> =
            parts.filter(|(n, part)| *n == 0 || !is_domain_attribute(part)).map(|(_, p)| p).collect();
        if let Ok(value) = HeaderValue::from_bytes(&kept.join(&b';')) {
            headers.append(header::SET_COOKIE, value);
        }
    }
}

fn is_domain_attribute(part: &[u8]) -> bool {
    let name = part.split(|b| *b == b'=').next().unwrap_or_default();
    name.trim_ascii().eq_ignore_ascii_case(b"domain")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(headers: &[(&'static str, &str)]) -> HeaderMap {
        headers.iter().map(|(n, v)| (HeaderName::from_static(n), HeaderValue::from_str(v).unwrap())).collect()
    }

    #[test]
    fn content_types_are_demanded() {
        let check = |headers: &[(&'static str, &str)], types: &[&str], is_taken: bool| {
            let checked = check_content_type(&map(headers), types).map_err(|e| e.kind);
            assert_eq!(checked, if is_taken { Ok(()) } else { Err("unsupported_media_type") }, "{headers:?}");
        };
        check(&[("content-type", "application/json")], &[JSON], true);
        check(&[("content-type", "Application/JSON; charset=utf-8")], &[JSON], true);
        check(&[("content-type", "application/jsonp")], &[JSON], false);
        check(&[("content-type", "text/plain")], &[JSON, WASM], false);
        check(&[("content-type", "text/plain; application/json")], &[JSON], false);
        check(&[("content-type", "application/wasm")], &[JSON], false);
        check(&[], &[JSON], true);
        check(&[("content-length", "0")], &[JSON], true);
        check(&[("content-length", "2")], &[JSON], false);
        check(&[("transfer-encoding", "chunked")], &[JSON], false);
    }

    #[test]
    fn a_guest_cannot_leave_the_sandbox_or_act_on_the_whole_origin() {
        let mut headers = map(&[
            ("content-security-policy", "sandbox allow-same-origin allow-scripts"),
            ("x-content-type-options", "sniff"),
            ("set-cookie", "a=b"),
            ("clear-site-data", "\"*\""),
            ("service-worker-allowed", "/"),
            ("content-type", "text/html"),
        ]);
        headers.append("set-cookie", HeaderValue::from_static("c=d"));
        sandbox(&mut headers);
        let policies: Vec<_> = headers.get_all("content-security-policy").iter().collect();
        assert_eq!(policies.last().unwrap().as_bytes(), SANDBOX.as_bytes());
        assert!(!SANDBOX.contains("same-origin"));
        assert_eq!(headers["x-content-type-options"], "nosniff");
        let left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        assert!(ORIGIN_WIDE.iter().all(|name| !left.contains(name)), "{left:?}");
        assert_eq!(headers["content-type"], "text/html");
    }

    #[test]
    fn cookies_stay_with_their_host() {
        let mut headers = map(&[
            ("set-cookie", "a=b; Path=/; domain = .fn.example.com; HttpOnly"),
            ("clear-site-data", "\"cookies\""),
        ]);
        headers.append("set-cookie", HeaderValue::from_static("domain=x; Secure"));
        host_only(&mut headers);
        assert!(!headers.contains_key("clear-site-data"));
        let left: Vec<_> = headers.get_all("set-cookie").iter().map(|v| v.to_str().unwrap()).collect();
        assert_eq!(left, ["a=b; Path=/; HttpOnly", "domain=x; Secure"]);
    }
}
