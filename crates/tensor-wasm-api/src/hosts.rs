//! Which host a request is for: the API's, or one that belongs to a function.
//!
//! A browser keeps pages apart by origin, and an origin is a scheme, a host and a port. So a function has a host of its
//! own, `NAME.TENANT.localhost`, `NAME.TENANT.DOMAIN` or one the operator routes to it, and there every path is the
//! function's and the API is out of reach. The API in turn answers only under names that are known to be its own:
//! behind any other name may be a page that had its own name point here (DNS rebinding).

use std::borrow::Cow;
use std::net::IpAddr;

use http::request::Parts;
use http::{HeaderMap, StatusCode, header};
use tensor_wasm_exec::catalog::check_name;
use tensor_wasm_exec::config;

use crate::error::ApiError;

/// The name every browser resolves to this machine, with everything below it (RFC 6761).
const LOCALHOST: &str = "localhost";

/// RFC 1035: of one label, and of a whole name.
const LABEL_BYTES_MAX: usize = 63;
const HOST_BYTES_MAX: usize = 253;

/// The hosts of a server, from its configuration.
#[derive(Debug)]
pub(crate) struct Hosts {
    /// The API's own names, in lower case.
    api: Vec<String>,
    any_api: bool,
    /// Functions are below it, besides `localhost`.
    domain: Option<Base>,
    /// Longest prefix first, so that the first match is the right one.
    routes: Vec<FunctionRoute>,
    allowed_origins: Vec<String>,
}

/// A base address as the operator wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Base {
    is_https: bool,
    host: String,
    port: Option<u16>,
}

#[derive(Debug)]
struct FunctionRoute {
    base: Base,
    /// Empty, or `/shop`.
    prefix: String,
    tenant: String,
    name: String,
}

/// What a request's host stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Host {
    Api,
    Function(FunctionHost),
    /// A host of functions, but of none: why not.
    Nobody(String),
    /// Not ours.
    Foreign(String),
}

/// The function that a host belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FunctionHost {
    pub tenant: String,
    pub name: String,
    /// The part of the path that is the route's and that the guest does not see.
    pub prefix_bytes: usize,
    /// Whether other functions may be on its siblings: it is below `localhost` or `[server] domain`, by its own name or
    /// by a route.
    pub is_shared: bool,
}

impl Hosts {
    /// `listening` is the name in `--addr`, where it has one.
    pub(crate) fn new(server: &config::Server, listening: Option<&str>) -> Result<Hosts, String> {
        let any_api = server.hosts.iter().any(|host| host == "*");
        let mut api = Vec::new();
        for host in server.hosts.iter().filter(|host| *host != "*") {
            let (base, prefix) = parse_base(host).map_err(|why| format!("[server] hosts: {host:?}: {why}"))?;
            if !prefix.is_empty() {
                return Err(format!("[server] hosts: {host:?}: a host has no path"));
            }
            api.push(base.host);
        }
        api.extend(listening.filter(|name| name.parse::<IpAddr>().is_err()).map(str::to_ascii_lowercase));
        let domain = match &server.domain {
            None => None,
            Some(text) => {
                let (base, prefix) = parse_base(text).map_err(|why| format!("[server] domain: {text:?}: {why}"))?;
                if !prefix.is_empty() || is_ip(&base.host) {
                    return Err(format!("[server] domain: {text:?}: give a domain such as fn.example.com"));
                }
                Some(base)
            }
        };
        api.extend(domain.iter().map(|domain| domain.host.clone()));
        let mut routes = Vec::new();
        for (from, to) in &server.routes {
            let wrong = |why: String| format!("[server.routes] {from:?}: {why}");
            let (base, prefix) = parse_base(from).map_err(|why| wrong(why.to_owned()))?;
            if is_ip(&base.host) || base.host == LOCALHOST || api.contains(&base.host) {
                // A page of the function could then call the API in the name of whoever looks at it.
                return Err(wrong("that host is the API's, and a function there would share its origin".to_owned()));
            }
            let Some((tenant, name)) = to.split_once('/') else {
                return Err(wrong(format!("{to:?} is not of the form TENANT/FUNCTION")));
            };
            check_name(tenant).and_then(|()| check_name(name)).map_err(|e| wrong(e.to_string()))?;
            routes.push(FunctionRoute { base, prefix, tenant: tenant.to_owned(), name: name.to_owned() });
        }
        routes.sort_by_key(|route| std::cmp::Reverse(route.prefix.len()));
        let mut allowed_origins = Vec::new();
        for origin in &server.allowed_origins {
            let is_origin = origin.starts_with("http://") || origin.starts_with("https://");
            match parse_base(origin) {
                Ok((_, prefix)) if is_origin && prefix.is_empty() => {
                    allowed_origins.push(origin.trim_end_matches('/').to_ascii_lowercase());
                }
                _ => {
                    return Err(format!(
                        "[server] allowed_origins: {origin:?} is not like https://console.example.com"
                    ));
                }
            }
        }
        Ok(Hosts { api, any_api, domain, routes, allowed_origins })
    }

    /// What the host of a request stands for.
    pub(crate) fn of(&self, authority: Option<&str>, path: &str) -> Host {
        // HTTP/1.0 has no host, and browsers do not speak it.
        let Some(authority) = authority else { return Host::Api };
        let Some((host, _)) = split(authority) else { return Host::Foreign(shown(authority)) };
        if host == LOCALHOST || is_ip(&host) {
            // An address cannot be made to point elsewhere, as a name can.
            return Host::Api;
        }
        let mut is_routed = false;
        for route in self.routes.iter().filter(|route| route.base.host == *host) {
            is_routed = true;
            if let Some(rest) = path.strip_prefix(&route.prefix)
                && (rest.is_empty() || rest.starts_with('/'))
            {
                return Host::Function(FunctionHost {
                    tenant: route.tenant.clone(),
                    name: route.name.clone(),
                    prefix_bytes: route.prefix.len(),
                    is_shared: self.bases().any(|base| labels_below(&host, base).is_some()),
                });
            }
        }
        if is_routed {
            return Host::Nobody(format!("no route of {host:?} matches this path ([server.routes])"));
        }
        if self.api.iter().any(|name| *name == *host) {
            return Host::Api;
        }
        for base in self.bases() {
            if let Some(labels) = labels_below(&host, base) {
                return match labels.split_once('.').map(|(name, tenant)| (from_label(name), from_label(tenant))) {
                    Some((Some(name), Some(tenant))) => {
                        Host::Function(FunctionHost { tenant, name, prefix_bytes: 0, is_shared: true })
                    }
                    _ => Host::Nobody(format!("functions are served at NAME.TENANT.{base}, and {host:?} is not that")),
                };
            }
        }
        if self.any_api { Host::Api } else { Host::Foreign(shown(&host)) }
    }

    /// The names below which functions have their hosts.
    fn bases(&self) -> impl Iterator<Item = &str> {
        [Some(LOCALHOST), self.domain.as_ref().map(|domain| domain.host.as_str())].into_iter().flatten()
    }

    /// Where a browser finds a function, for somebody who reached the API as `asked`.
    pub(crate) fn address(&self, tenant: &str, name: &str, asked: &Asked<'_>) -> String {
        if let Some(route) = self.routes.iter().find(|route| route.tenant == tenant && route.name == name) {
            return format!("{}{}/", route.base.url(&route.base.host, asked), route.prefix);
        }
        let labels = match (to_label(name), to_label(tenant)) {
            (Some(name), Some(tenant)) => Some(format!("{name}.{tenant}")),
            _ => None,
        };
        let below = |host: &str| labels.as_ref().map(|l| format!("{l}.{host}")).filter(|h| h.len() <= HOST_BYTES_MAX);
        if let Some(domain) = &self.domain
            && let Some(host) = below(&domain.host)
        {
            return format!("{}/", domain.url(&host, asked));
        }
        let scheme = if asked.is_https { "https" } else { "http" };
        let (host, port) = asked.authority.and_then(split).unwrap_or((Cow::Borrowed(LOCALHOST), None));
        let is_loopback = host == LOCALHOST || ip(&host).is_some_and(|ip| ip.is_loopback());
        match below(LOCALHOST).filter(|_| is_loopback && self.domain.is_none()) {
            Some(own) => format!("{scheme}://{own}{}/", port_suffix(port)),
            // From another machine `localhost` is another machine, and some names are too long for a host.
            None => format!("{scheme}://{host}{}/t/{tenant}/{name}/", port_suffix(port)),
        }
    }

    /// Refuses what a page of another origin sends; the API's own pages and programs pass.
    pub(crate) fn check_origin(&self, parts: &Parts, authority: Option<&str>) -> Result<(), ApiError> {
        let text = |name: &str| parts.headers.get(name).map(|value| value.to_str().unwrap_or("?"));
        let origin = text("origin");
        if let Some(origin) = origin {
            if self.allows(origin) || authority.is_some_and(|authority| is_same_origin(origin, authority)) {
                return Ok(());
            }
            return Err(denied(&format!("pages of {:?} may not call the API", shown(origin))));
        }
        match text("sec-fetch-site") {
            None | Some("same-origin" | "none") => Ok(()),
            // A link to the dashboard: what it shows goes to the person, not to the page with the link.
            Some(_)
                if parts.method == http::Method::GET
                    && text("sec-fetch-mode") == Some("navigate")
                    && text("sec-fetch-dest") == Some("document") =>
            {
                Ok(())
            }
            Some(_) => Err(denied("pages of other sites may not call the API")),
        }
    }

    /// Whether the operator lets pages of this origin call the API.
    pub(crate) fn allows(&self, origin: &str) -> bool {
        self.allowed_origins.iter().any(|allowed| allowed.eq_ignore_ascii_case(origin))
    }
}

/// `a.b` for `a.b.fn.example.com` and the base `fn.example.com`; `None` for a host that is not below it.
fn labels_below<'a>(host: &'a str, base: &str) -> Option<&'a str> {
    host.strip_suffix(base).and_then(|rest| rest.strip_suffix('.'))
}

/// How a client reached the API.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asked<'a> {
    pub authority: Option<&'a str>,
    pub is_https: bool,
}

impl<'a> Asked<'a> {
    pub(crate) fn of(headers: &'a HeaderMap) -> Asked<'a> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        // A proxy's word, or the client's own: it is told to nobody else.
        Asked { authority: text("host"), is_https: text("x-forwarded-proto") == Some("https") }
    }
}

impl Base {
    fn url(&self, host: &str, asked: &Asked<'_>) -> String {
        let scheme = if self.is_https { "https" } else { "http" };
        // Behind a proxy the port is the proxy's, which is the scheme's own unless the operator says otherwise.
        let asked_port = asked.authority.and_then(split).and_then(|(_, port)| port);
        let port = if self.is_https { self.port } else { self.port.or(asked_port) };
        format!("{scheme}://{host}{}", port_suffix(port))
    }
}

/// The authority a request is for: in the URI of HTTP/2 and of requests meant for proxies, in `Host` otherwise. Where
/// both are there and differ, whoever stands in front of us may have looked at the other one.
pub(crate) fn authority(parts: &Parts) -> Result<Option<&str>, ApiError> {
    let wrong = |why: &str| ApiError::bad_request("invalid_host", why);
    let mut given = parts.headers.get_all(header::HOST).iter();
    let host = match (given.next(), given.next()) {
        (None, _) => None,
        (Some(host), None) => Some(host.to_str().map_err(|_| wrong("the Host header is not text"))?),
        (Some(_), Some(_)) => return Err(wrong("there is more than one Host header")),
    };
    match (parts.uri.authority().map(http::uri::Authority::as_str), host) {
        (Some(uri), Some(host)) if !uri.eq_ignore_ascii_case(host) => Err(wrong("the URI and the Host header differ")),
        (Some(uri), _) => Ok(Some(uri)),
        (None, host) => Ok(host),
    }
}

pub(crate) fn foreign(host: &str) -> ApiError {
    let message = format!(
        "this server does not answer as {host:?}; reach it by address or as localhost, or list the name in [server] \
         hosts"
    );
    ApiError::new(StatusCode::MISDIRECTED_REQUEST, "unknown_host", message)
}

fn denied(what: &str) -> ApiError {
    let message = format!("{what}; list their origin in [server] allowed_origins if they should");
    ApiError::new(StatusCode::FORBIDDEN, "origin_denied", message)
}

/// `Host: a.b:80` → `a.b`, 80; in lower case, without the dot of the root.
fn split(authority: &str) -> Option<(Cow<'_, str>, Option<u16>)> {
    let is_bracketed = authority.starts_with('[');
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !is_bracketed || host.ends_with(']') => (host, Some(port.parse().ok()?)),
        _ => (authority, None),
    };
    let host = host.strip_suffix('.').unwrap_or(host);
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'[' | b']' | b':');
    if host.is_empty() || host.len() > HOST_BYTES_MAX || !host.bytes().all(allowed) {
        return None;
    }
    let is_lower = !host.bytes().any(|b| b.is_ascii_uppercase());
    Some((if is_lower { Cow::Borrowed(host) } else { Cow::Owned(host.to_ascii_lowercase()) }, port))
}

fn ip(host: &str) -> Option<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    // Names do not begin with a digit often; parsing one as an address is what is saved.
    let may_be = bare.len() != host.len() || bare.starts_with(|c: char| c.is_ascii_digit());
    may_be.then(|| bare.parse().ok()).flatten()
}

fn is_ip(host: &str) -> bool {
    ip(host).is_some()
}

fn port_suffix(port: Option<u16>) -> String {
    port.map_or_else(String::new, |port| format!(":{port}"))
}

/// `[scheme://]host[:port][/prefix]`.
fn parse_base(text: &str) -> Result<(Base, String), &'static str> {
    let (is_https, rest) = match text.split_once("://") {
        None => (false, text),
        Some(("http", rest)) => (false, rest),
        Some(("https", rest)) => (true, rest),
        Some(_) => return Err("the scheme is http or https"),
    };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (host, port) = split(authority).ok_or("that is not a host name")?;
    if path.contains(['?', '#', '%']) || path.contains("//") {
        return Err("a prefix is plain path segments");
    }
    Ok((Base { is_https, host: host.into_owned(), port }, path.trim_end_matches('/').to_owned()))
}

fn is_same_origin(origin: &str, authority: &str) -> bool {
    let (default, origin) = match origin.split_once("://") {
        Some(("http", rest)) => (80, rest),
        Some(("https", rest)) => (443, rest),
        _ => return false,
    };
    match (split(origin), split(authority)) {
        (Some((a, a_port)), Some((b, b_port))) => a == b && a_port.unwrap_or(default) == b_port.unwrap_or(default),
        _ => false,
    }
}

/// What a stranger sent, short enough to send back.
fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

/// A name as a label of a host. Lower-case letters, digits and single hyphens inside stand for themselves; every other
/// byte is `--` and two hexadecimal digits (`My_fn` → `--4dy--5ffn`). `None` where that is no label: too long, or what
/// browsers take for an internationalised name.
pub(crate) fn to_label(name: &str) -> Option<String> {
    let bytes = name.as_bytes();
    let is_plain = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let mut label = String::with_capacity(name.len());
    for (at, byte) in bytes.iter().enumerate() {
        let is_inner_hyphen = *byte == b'-' && at > 0 && bytes.get(at + 1).is_some_and(is_plain);
        if is_plain(byte) || is_inner_hyphen {
            label.push(char::from(*byte));
        } else {
            label.push_str(&format!("--{byte:02x}"));
        }
    }
    (!label.is_empty() && label.len() <= LABEL_BYTES_MAX && !label.starts_with("xn--")).then_some(label)
}

/// The name that a label stands for; `None` where it stands for none.
fn from_label(label: &str) -> Option<String> {
    let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if label.ends_with('-') || !label.bytes().all(is_plain) {
        return None;
    }
    if !label.contains("--") {
        return check_name(label).ok().map(|()| label.to_owned());
    }
    let mut name = String::new();
    let mut rest = label;
    while let Some(at) = rest.find("--") {
        name.push_str(&rest[..at]);
        let byte = u8::from_str_radix(rest.get(at + 2..at + 4)?, 16).ok()?;
        name.push(char::from(byte));
        rest = &rest[at + 4..];
    }
    name.push_str(rest);
    // One host, one function: a second spelling would be a second origin.
    (check_name(&name).is_ok() && to_label(&name).as_deref() == Some(label)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(toml: &str) -> Result<Hosts, String> {
        Hosts::new(&config::Config::parse(toml)?.server, Some("box.lan"))
    }

    fn function(tenant: &str, name: &str, prefix_bytes: usize, is_shared: bool) -> Host {
        Host::Function(FunctionHost { tenant: tenant.to_owned(), name: name.to_owned(), prefix_bytes, is_shared })
    }

    #[test]
    fn a_host_is_the_apis_or_a_functions_or_nobodys() {
        let hosts = hosts(
            "[server]\ndomain = \"https://fn.example.com\"\nhosts = [\"API.example.com\"]\n[server.routes]\n\
             \"shop.example.com\" = \"acme/shop\"\n\"example.com/a\" = \"acme/a\"\n\"example.com/a/b\" = \"acme/b\"\n\
             \"shop.fn.example.com\" = \"acme/shop\"\n\"shop.localhost\" = \"acme/shop\"\n",
        )
        .unwrap();
        let check = |host: &str, path: &str, expect: Host| assert_eq!(hosts.of(Some(host), path), expect, "{host}");
        for host in
            ["localhost:8080", "LOCALHOST", "127.0.0.1:1", "[::1]:8080", "10.1.2.3", "api.example.com", "box.lan:1"]
        {
            check(host, "/functions", Host::Api);
        }
        check("fn.example.com", "/", Host::Api);
        assert_eq!(hosts.of(None, "/"), Host::Api);
        check("hello.acme.localhost:8080", "/functions", function("acme", "hello", 0, true));
        check("Hello.Acme.localhost.:8080", "/", function("acme", "hello", 0, true));
        check("hello.acme.fn.example.com", "/", function("acme", "hello", 0, true));
        check("a--5fb.acme.localhost", "/", function("acme", "a_b", 0, true));
        check("shop.example.com", "/x", function("acme", "shop", 0, false));
        check("shop.fn.example.com", "/x", function("acme", "shop", 0, true));
        check("shop.localhost:8080", "/x", function("acme", "shop", 0, true));
        check("example.com", "/a", function("acme", "a", 2, false));
        check("example.com", "/a/b/c", function("acme", "b", 4, false));
        check("example.com", "/a/bc", function("acme", "a", 2, false));
        for (host, path) in [("example.com", "/ab"), ("acme.localhost", "/"), ("a.b.c.localhost", "/")] {
            assert!(matches!(hosts.of(Some(host), path), Host::Nobody(_)), "{host}{path}");
        }
        for host in
            ["evil.com", "evil.com:8080", "localhost.evil.com", "evillocalhost", "127.0.0.1.evil.com", "", "a b", "@"]
        {
            assert!(matches!(hosts.of(Some(host), "/"), Host::Foreign(_)), "{host}");
        }
    }

    #[test]
    fn names_become_labels_and_come_back() {
        for (name, label) in [
            ("hello", "hello"),
            ("a-b", "a-b"),
            ("a_b", "a--5fb"),
            ("My.Fn", "--4dy--2e--46n"),
            ("a--b", "a--2d-b"),
            ("a-", "a--2d"),
            ("a-_b", "a--2d--5fb"),
            ("0", "0"),
        ] {
            assert_eq!(to_label(name).as_deref(), Some(label), "{name}");
            assert_eq!(from_label(label).as_deref(), Some(name), "{label}");
        }
        for none in ["xn--a", "xn_a", &"x".repeat(64), &"_".repeat(17)] {
            assert_eq!(to_label(none), None, "{none}");
        }
        for none in ["", "a--61", "a--", "a--5", "a--zz", "--2f", "a--5Fb", "-a", "a--é0"] {
            assert_eq!(from_label(none), None, "{none}");
        }
    }

    #[test]
    fn addresses_are_ones_that_work() {
        let asked = |authority: &'static str| Asked { authority: Some(authority), is_https: false };
        let plain = hosts("").unwrap();
        assert_eq!(plain.address("acme", "hi", &asked("127.0.0.1:8080")), "http://hi.acme.localhost:8080/");
        assert_eq!(plain.address("acme", "a_b", &asked("localhost:1")), "http://a--5fb.acme.localhost:1/");
        assert_eq!(plain.address("acme", "hi", &asked("10.0.0.1:80")), "http://10.0.0.1:80/t/acme/hi/");
        let long = "x".repeat(64);
        let path = format!("http://localhost:1/t/acme/{long}/");
        assert_eq!(plain.address("acme", &long, &asked("localhost:1")), path);
        let proxied = Asked { authority: Some("box.lan"), is_https: true };
        assert_eq!(plain.address("acme", "hi", &proxied), "https://box.lan/t/acme/hi/");
        let domain =
            hosts("[server]\ndomain = \"https://fn.example.com\"\n[server.routes]\n\"s.example.com/p\" = \"a/s\"\n");
        let domain = domain.unwrap();
        assert_eq!(domain.address("acme", "hi", &asked("10.0.0.1:80")), "https://hi.acme.fn.example.com/");
        assert_eq!(domain.address("a", "s", &asked("10.0.0.1:8080")), "http://s.example.com:8080/p/");
    }

    #[test]
    fn mistakes_in_the_configuration_are_named() {
        for (toml, expect) in [
            ("[server]\ndomain = \"a b\"\n", "[server] domain"),
            ("[server]\ndomain = \"127.0.0.1\"\n", "[server] domain"),
            ("[server]\nhosts = [\"a/b\"]\n", "has no path"),
            ("[server]\nallowed_origins = [\"example.com\"]\n", "allowed_origins"),
            ("[server.routes]\n\"a.com\" = \"b\"\n", "TENANT/FUNCTION"),
            ("[server.routes]\n\"localhost/x\" = \"a/b\"\n", "share its origin"),
            ("[server.routes]\n\"ftp://x\" = \"a/b\"\n", "http or https"),
        ] {
            let error = hosts(toml).err().unwrap();
            assert!(error.contains(expect), "{toml}: {error}");
        }
    }

    #[test]
    fn pages_of_other_origins_are_refused() {
        let hosts = hosts("[server]\nallowed_origins = [\"https://console.example.com\"]\n").unwrap();
        let check = |method: &str, headers: &[(&str, &str)], is_allowed: bool| {
            let mut request = http::Request::builder().method(method).uri("/functions");
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let (parts, ()) = request.body(()).unwrap().into_parts();
            let checked = hosts.check_origin(&parts, Some("localhost:8080"));
            assert_eq!(
                checked.map_err(|e| e.kind),
                if is_allowed { Ok(()) } else { Err("origin_denied") },
                "{headers:?}"
            );
        };
        check("POST", &[], true);
        check("POST", &[("origin", "http://localhost:8080")], true);
        check("POST", &[("origin", "https://console.example.com")], true);
        check("GET", &[("sec-fetch-site", "same-origin")], true);
        check("GET", &[("sec-fetch-site", "none")], true);
        let link = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")];
        check("GET", &link, true);
        check("POST", &link, false);
        let frame = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")];
        check("GET", &frame, false);
        for origin in
            ["null", "http://evil.com", "http://localhost", "http://localhost:8081", "http://x.y.localhost:8080"]
        {
            check("GET", &[("origin", origin)], false);
        }
        check("GET", &[("sec-fetch-site", "cross-site")], false);
        check("GET", &[("sec-fetch-site", "same-site")], false);
    }
}
