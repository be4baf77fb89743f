//! Functions on hosts of their own, and the API against pages, names and bodies that have no business with it. Spoken
//! by hand, because a well-meaning client would not say these things; and with a browser, because it is browsers that
//! the rules are for.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::support::{Answer, Options, Server, guest, guest_bytes, read_all, send, stdout};

/// One request as it is written here, on a connection of its own.
fn raw(server: &Server, head: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let mut stream = server.connect();
    let mut text = format!("{head} HTTP/1.1\r\nconnection: close\r\n");
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() {
        text += &format!("content-length: {}\r\n", body.len());
    }
    send(&mut stream, &format!("{text}\r\n{body}"));
    let bytes = read_all(&mut stream);
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| panic!("no answer to {head}"));
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers = lines.filter_map(|l| l.split_once(": ")).map(|(n, v)| (n.to_owned(), v.to_owned())).collect();
    let mut body = bytes[end + 4..].to_vec();
    if head.to_lowercase().contains("transfer-encoding: chunked") {
        body = unchunked(&body);
    }
    Answer { status, headers, bytes: body }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(at) = bytes.windows(2).position(|w| w == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..at]).unwrap().trim(), 16).unwrap();
        all.extend_from_slice(&bytes[at + 2..at + 2 + size]);
        if size == 0 {
            break;
        }
        bytes = &bytes[at + 4 + size..];
    }
    all
}

fn port(server: &Server) -> &str {
    server.addr.rsplit_once(':').unwrap().1
}

#[test]
fn a_function_has_a_host_of_its_own_where_the_api_is_out_of_reach() {
    let server = Server::start();
    let deployed = server.deploy("lab", "http-lab.wasm");
    assert_eq!(deployed["address"], format!("http://lab.default.localhost:{}/", port(&server)));
    let host = format!("lab.default.localhost:{}", port(&server));
    let get = |path: &str| raw(&server, &format!("GET {path}"), &[("host", &host)], "");
    assert_eq!(get("/").text(), "lab\n");
    assert_eq!(get("/path?a=b").text(), "/path?a=b");
    for path in ["/functions", "/healthz", "/metrics", "/openapi.json", "/run/lab/", "/t/default/lab/"] {
        assert_eq!(get(path).text(), "the lab has no such experiment\n", "{path} is the function's");
    }
    assert_eq!(raw(&server, "DELETE /functions/lab", &[("host", &host)], "").status, 404, "by the guest");
    // The absolute form and the header must agree.
    let absolute = format!("GET http://{host}/");
    assert_eq!(raw(&server, &absolute, &[("host", &host)], "").text(), "lab\n");
    raw(&server, &absolute, &[("host", "localhost")], "").refused(400, "invalid_host");
    raw(&server, "GET /", &[("host", "localhost"), ("host", &host)], "").refused(400, "invalid_host");
    // Hosts of nobody.
    for host in ["default.localhost", "a.lab.default.localhost", "lab.default.localhost.evil.com"] {
        let answer = raw(&server, "GET /functions", &[("host", host)], "");
        assert!([404, 421].contains(&answer.status), "{host}: {}", answer.text());
    }
    raw(&server, "GET /", &[("host", "none.default.localhost")], "").refused(404, "not_found");
    // Names that are no host labels have a spelling that is.
    let odd = server.deploy("My_fn.2", "http-lab.wasm");
    let address = odd["address"].as_str().unwrap().to_owned();
    assert_eq!(address, format!("http://--4dy--5ffn--2e2.default.localhost:{}/", port(&server)));
    let host = address.trim_start_matches("http://").trim_end_matches('/');
    assert_eq!(raw(&server, "GET /", &[("host", host)], "").text(), "lab\n");
    let long = server.deploy(&"x".repeat(100), "http-lab.wasm");
    assert_eq!(long["address"], server.url(&format!("/t/default/{}/", "x".repeat(100))), "too long for a label");
    let wasm = guest("http-lab.wasm");
    let printed = stdout(&server.cli(&["deploy", wasm.to_str().unwrap(), "--name", "lab"]));
    assert!(printed.contains(&format!("\nhttp://lab.default.localhost:{}/\n", port(&server))), "{printed}");
}

#[test]
fn public_functions_of_any_tenant_are_reached_without_a_header() {
    let server = Server::with(Options::default().env("TENSOR_WASM_API_TOKENS", "acme-token:tenant=acme"));
    let ours = [("authorization", "Bearer acme-token"), ("content-type", "application/wasm")];
    let deploy = |name: &str, settings: &str| {
        let path = format!("/functions?name={name}&settings={settings}");
        server.request("POST", &path, &ours, &guest_bytes("http-lab.wasm")).ok()
    };
    deploy("open", "%7B%22public%22%3Atrue%7D");
    deploy("shut", "%7B%7D");
    let on_host = |name: &str, path: &str, more: &[(&str, &str)]| {
        let host = format!("{name}.acme.localhost");
        let mut headers = vec![("host", host.as_str())];
        headers.extend(more);
        raw(&server, &format!("GET {path}"), &headers, "")
    };
    assert_eq!(on_host("open", "/", &[]).text(), "lab\n");
    on_host("shut", "/", &[]).refused(401, "unauthorized");
    let token = [("authorization", "Bearer acme-token")];
    assert_eq!(on_host("shut", "/", &token).text(), "lab\n");
    assert!(!on_host("shut", "/headers", &token).text().contains("acme-token"), "our token is not the guest's");
    assert_eq!(server.get("/t/acme/open/path?x").text(), "/path?x");
    assert_eq!(server.get("/t/acme/open").text(), "lab\n");
    server.get("/t/acme/shut/").refused(401, "unauthorized");
    server.get("/t/other/open/").refused(401, "unauthorized");
    assert_eq!(server.request("GET", "/t/acme/shut/", &token, b"").text(), "lab\n");
    server.request("GET", "/t/other/shut/", &token, b"").refused(403, "tenant_scope_denied");
}

#[test]
fn a_domain_and_routes_come_from_the_configuration() {
    let config = "[server]\ndomain = \"https://fn.example.com\"\nhosts = [\"api.example.com\"]\n[server.routes]\n\
                  \"shop.example.com\" = \"default/lab\"\n\"example.com/lab\" = \"default/lab\"\n\
                  \"shop.fn.example.com\" = \"default/lab\"\n";
    let server = Server::with(Options::config(config));
    server.deploy("lab", "http-lab.wasm");
    let other = server.deploy("other", "http-lab.wasm");
    assert_eq!(other["address"], "https://other.default.fn.example.com/");
    let get = |host: &str, path: &str| raw(&server, &format!("GET {path}"), &[("host", host)], "");
    assert_eq!(get("lab.default.fn.example.com", "/path").text(), "/path");
    assert_eq!(get("shop.example.com:8080", "/functions").text(), "the lab has no such experiment\n");
    assert_eq!(get("example.com", "/lab/path?x").text(), "/path?x");
    // Below the domain, other tenants' functions are on its siblings: also where the operator gave it the host.
    let wish = "/respond-with?clear-site-data=%22*%22&set-cookie=a%3Db;%20Domain%3Dexample.com";
    let own = get("shop.example.com", wish);
    assert_eq!(
        (own.header("clear-site-data"), own.header("set-cookie")),
        (Some("\"*\""), Some("a=b; Domain=example.com"))
    );
    for host in ["shop.fn.example.com", "lab.default.fn.example.com", "lab.default.localhost"] {
        let shared = get(host, wish);
        assert_eq!((shared.header("clear-site-data"), shared.header("set-cookie")), (None, Some("a=b")), "{host}");
    }
    get("example.com", "/functions").refused(404, "not_found");
    assert!(get("api.example.com", "/functions").ok().is_array());
    assert!(get("fn.example.com", "/functions").ok().is_array());
    get("elsewhere.example.com", "/functions").refused(421, "unknown_host");
    let wrong = Server::try_with(Options::config("[server.routes]\n\"localhost/x\" = \"a/b\"\n")).err().unwrap();
    assert!(wrong.contains("share its origin"), "{wrong}");
}

#[test]
fn the_api_refuses_hosts_origins_and_types_that_a_web_page_could_send() {
    let server = Server::with(Options::config("[server]\nallowed_origins = [\"https://console.example.com\"]\n"));
    server.deploy("math", "math.wasm");
    let host = server.addr.as_str();
    let local = format!("localhost:{}", port(&server));
    for good in [host, &local, "127.0.0.1", "[::1]:80"] {
        assert!(raw(&server, "GET /functions", &[("host", good)], "").ok().is_array(), "{good}");
    }
    // DNS rebinding: the page's own name points here.
    for bad in ["evil.com", "evil.com:8080", "127.0.0.1.evil.com", "localhost.evil.com", "x", ""] {
        let message = raw(&server, "GET /functions", &[("host", bad)], "").refused(421, "unknown_host");
        assert!(message.contains("[server] hosts"), "{message}");
    }
    // What a page can send without asking first.
    let call = "{\"export\":\"nothing\"}";
    let post = |headers: &[(&str, &str)]| {
        let mut all = vec![("host", host)];
        all.extend(headers);
        raw(&server, "POST /functions/math/invoke", &all, call)
    };
    let json = ("content-type", "application/json");
    post(&[json]).ok();
    post(&[("content-type", "application/json; charset=utf-8")]).ok();
    for kind in
        ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain; application/json"]
    {
        let message = post(&[("content-type", kind)]).refused(415, "unsupported_media_type");
        assert!(message.contains("application/json"), "{message}");
    }
    post(&[]).refused(415, "unsupported_media_type");
    raw(&server, "POST /functions?name=x", &[("host", host), ("content-type", "text/plain")], "\0asm")
        .refused(415, "unsupported_media_type");
    let own = format!("http://{host}");
    post(&[json, ("origin", &own)]).ok();
    post(&[json, ("sec-fetch-site", "same-origin")]).ok();
    for origin in ["http://evil.com", "null", "http://lab.default.localhost", "https://127.0.0.1", "http://127.0.0.1"] {
        let message = post(&[json, ("origin", origin)]).refused(403, "origin_denied");
        assert!(message.contains("[server] allowed_origins"), "{message}");
        raw(&server, "GET /functions", &[("host", host), ("origin", origin)], "").refused(403, "origin_denied");
        raw(&server, "DELETE /functions/math", &[("host", host), ("origin", origin)], "").refused(403, "origin_denied");
    }
    for site in ["cross-site", "same-site"] {
        post(&[json, ("sec-fetch-site", site)]).refused(403, "origin_denied");
    }
    let link = [
        ("host", host),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-mode", "navigate"),
        ("sec-fetch-dest", "document"),
    ];
    assert_eq!(raw(&server, "GET /", &link, "").status, 200, "a link to the dashboard");
    // An allowed page may, and its browser is told so.
    let console = [("host", host), ("origin", "https://console.example.com")];
    let listed = raw(&server, "GET /functions", &console, "");
    assert_eq!(listed.header("access-control-allow-origin"), Some("https://console.example.com"));
    let mut ask = console.to_vec();
    ask.push(("access-control-request-method", "POST"));
    let preflight = raw(&server, "OPTIONS /functions/math/invoke", &ask, "");
    assert_eq!(preflight.status, 204);
    assert!(preflight.header("access-control-allow-headers").unwrap().contains("authorization"));
    let stranger = [("host", host), ("origin", "http://evil.com"), ("access-control-request-method", "POST")];
    let refused = raw(&server, "OPTIONS /functions/math/invoke", &stranger, "");
    assert!(refused.status >= 400 && refused.header("access-control-allow-origin").is_none(), "{}", refused.text());
    let page = server.get("/");
    assert!(page.header("content-security-policy").unwrap().contains("frame-ancestors 'none'"));
    assert_eq!(page.header("x-frame-options"), Some("DENY"));
    // Someone who knows better.
    let any = Server::with(Options::config("[server]\nhosts = [\"*\"]\n"));
    assert!(raw(&any, "GET /functions", &[("host", "whatever.example")], "").ok().is_array());
}

#[test]
fn answers_of_functions_on_the_apis_host_are_sandboxed() {
    let server = Server::start();
    server.deploy("lab", "http-lab.wasm");
    let wish = "set-cookie=a%3Db&clear-site-data=%22*%22&service-worker-allowed=/&strict-transport-security=max-age%3D1\
                &content-security-policy=sandbox%20allow-same-origin&x-content-type-options=no&alt-svc=h3&x-own=kept";
    for path in [format!("/run/lab/respond-with?{wish}"), format!("/t/default/lab/respond-with?{wish}")] {
        let answer = server.get(&path);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let policies: Vec<_> = answer.headers.iter().filter(|(n, _)| n == "content-security-policy").collect();
        assert!(policies.iter().any(|(_, v)| v.starts_with("sandbox ") && !v.contains("same-origin")), "{policies:?}");
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(answer.header("x-own"), Some("kept"));
        for gone in ["set-cookie", "clear-site-data", "service-worker-allowed", "strict-transport-security", "alt-svc"]
        {
            assert_eq!(answer.header(gone), None, "{gone}");
        }
    }
    // On its own host its headers are its own, but for whom a cookie is sent to.
    let path = "GET /respond-with?set-cookie=a%3Db;%20Domain%3Dfn.example.com&x-frame-options=SAMEORIGIN";
    let own = raw(&server, path, &[("host", "lab.default.localhost")], "");
    assert_eq!(own.header("set-cookie"), Some("a=b"));
    assert_eq!(own.header("x-frame-options"), Some("SAMEORIGIN"));
    assert_eq!(own.header("content-security-policy"), None);
    // Errors of ours on the API's host are sandboxed too: they may quote the guest.
    assert!(server.get("/run/lab/trap").header("content-security-policy").unwrap().contains("sandbox"));
}

#[test]
fn a_name_stands_for_all_its_addresses_and_a_public_one_needs_tokens() {
    let start = |addr: &str| {
        let data = tempfile::tempdir().unwrap();
        let mut command = Command::new(&*crate::support::EXE);
        command.args(["serve", "--addr", addr, "--data-dir"]).arg(data.path()).env_remove("TENSOR_WASM_API_TOKENS");
        (command, data)
    };
    let (mut command, _data) = start("localhost:0");
    let mut child = command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let lines = std::io::BufReader::new(child.stderr.take().unwrap());
    let said = std::io::BufRead::lines(lines).map_while(Result::ok).find(|line| line.starts_with("listening on "));
    let said = said.expect("it listens");
    let addrs: Vec<&str> = said.split(' ').filter_map(|word| word.strip_prefix("http://")).collect();
    assert!(addrs[0].starts_with("127.0.0.1:"), "IPv4 first: {said}");
    let ports: Vec<&str> = addrs.iter().map(|addr| addr.rsplit_once(':').unwrap().1).collect();
    assert!(ports.iter().all(|port| *port == ports[0]), "one port: {said}");
    for addr in &addrs {
        let mut stream = std::net::TcpStream::connect(addr).unwrap();
        send(&mut stream, "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        assert!(String::from_utf8_lossy(&read_all(&mut stream)).contains("\"ok\""), "{addr}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    for (addr, expect) in [("nowhere.invalid:1", "ADDRESS:PORT"), ("localhost", "ADDRESS:PORT"), ("[::]:0", "TOKENS")] {
        let (mut command, _data) = start(addr);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{addr}");
        assert!(crate::support::stderr(&output).contains(expect), "{addr}: {}", crate::support::stderr(&output));
    }
}

/// A browser, where there is one.
fn chromium() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    std::env::split_paths(&path).flat_map(|dir| names.map(|name| dir.join(name))).find(|file| file.is_file())
}

/// The page as the browser shows it, after its scripts have run.
fn browse(browser: &Path, url: &str) -> String {
    let profile = tempfile::tempdir().unwrap();
    let mut command = Command::new(browser);
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--virtual-time-budget=8000",
    ]);
    command.arg(format!("--user-data-dir={}", profile.path().display())).args(["--dump-dom", url]);
    let mut child = command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = std::io::Read::read_to_string(&mut out, &mut text);
        text
    });
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        if std::time::Instant::now() > until {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    reader.join().unwrap()
}

#[test]
fn a_browser_shows_a_functions_page_and_keeps_it_from_the_api() {
    let Some(browser) = chromium() else {
        println!("skipped: no chromium");
        return;
    };
    let server = Server::start();
    server.deploy("lab", "http-lab.wasm");
    let deployed = server.get("/functions/lab").ok();
    let own = browse(&browser, &format!("{}page", deployed["address"].as_str().unwrap()));
    assert!(own.contains("The lab's page"), "{own}");
    // Its own paths are its own, the API's are out of reach on any host.
    let origin = format!("origin http://lab.default.localhost:{}", port(&server));
    assert!(own.contains(&origin), "{own}");
    assert!(own.contains("own: 404 the lab has no such experiment"), "{own}");
    let api = server.url("");
    let reached = browse(&browser, &format!("{}page?{api}", deployed["address"].as_str().unwrap()));
    assert!(reached.contains("api: refused"), "{reached}");
    // Below the API's own host it runs, but as nobody.
    let sandboxed = browse(&browser, &server.url(&format!("/run/lab/page?{api}")));
    assert!(sandboxed.contains("The lab's page") && sandboxed.contains("origin null"), "{sandboxed}");
    assert!(sandboxed.contains("api: refused") && sandboxed.contains("cookie: refused"), "{sandboxed}");
    assert!(reached.contains("done") && sandboxed.contains("done"), "{reached}\n{sandboxed}");
    // It was the server that said no, not only the browser.
    let refused = |method: &str| {
        server.metric(&format!(
            "tensor_wasm_http_requests_total{{route=\"/functions\",method=\"{method}\",status=\"403\"}}"
        ))
    };
    assert!(refused("GET") >= 2.0 && refused("POST") >= 2.0, "{} {}", refused("GET"), refused("POST"));
    assert_eq!(server.get("/functions").ok().as_array().unwrap().len(), 1, "nothing was planted");
    // The dashboard, which is the API's own, works.
    let dashboard = browse(&browser, &server.url("/"));
    assert!(dashboard.contains("Tenant default") && dashboard.contains("lab.default.localhost"), "{dashboard}");
}
