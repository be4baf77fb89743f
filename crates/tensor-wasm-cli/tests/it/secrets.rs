//! Secrets: a function sees its own, and nobody sees them again. And the data directory is its owner's only.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use crate::support::{EXE, Options, Server, guest_bytes, stderr, stdout, wait_until};

const KEY: &str = "8f1b3c5d7e9f0a2b4c6d8e0f1a3b5c7d9e1f2a4b6c8d0e2f4a6b8c0d2e4f6a8b";
const VALUE: &str = "correct-horse-battery-staple";

fn with_key() -> Options {
    Options::default().env("TENSOR_WASM_SECRETS_KEY", KEY)
}

fn set(server: &Server, name: &str, key: &str, value: &[u8]) -> crate::support::Answer {
    server.request(
        "PUT",
        &format!("/functions/{name}/secrets/{key}"),
        &[("content-type", "application/octet-stream")],
        value,
    )
}

/// Every byte of every file below a folder.
fn everything(dir: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        all.extend(if path.is_dir() { everything(&path) } else { std::fs::read(&path).unwrap_or_default() });
    }
    all
}

fn holds(haystack: &[u8], needle: &str) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle.as_bytes())
}

#[test]
fn a_secret_is_seen_by_its_function_and_by_nothing_else() {
    let server = Server::with(with_key());
    let lab = guest_bytes("http-lab.wasm");
    server.deploy_with("lab", &lab, r#"{"env":{"A":"open","PASSWORD":"hidden by the secret"}}"#).ok();
    server.deploy_with("other", &lab, "{}").ok();
    assert_eq!(set(&server, "lab", "PASSWORD", VALUE.as_bytes()).status, 204);
    assert_eq!(server.get("/run/lab/env").text(), format!("A=open\nPASSWORD={VALUE}"));
    assert_eq!(server.get("/run/other/env").text(), "", "same bytes, another function");
    // Names come back, values do not.
    assert_eq!(server.get("/functions/lab/secrets").ok(), serde_json::json!(["PASSWORD"]));
    assert_eq!(server.get("/functions/lab").ok()["secrets"], serde_json::json!(["PASSWORD"]));
    for path in
        ["/functions", "/functions/lab", "/functions/lab/revisions", "/functions/lab/secrets", "/limits", "/metrics"]
    {
        assert!(!server.get(path).text().contains(VALUE), "{path}");
    }
    // Redeploys keep it, and a rollback brings back neither a deleted one nor an old value.
    server.deploy_with("lab", &lab, r#"{"env":{"A":"2"}}"#).ok();
    set(&server, "lab", "PASSWORD", b"second").ok();
    assert_eq!(server.get("/run/lab/env").text(), "A=2\nPASSWORD=second");
    server.post("/functions/lab/rollback", "").ok();
    assert_eq!(server.get("/run/lab/env").text(), "A=open\nPASSWORD=second");
    assert_eq!(server.request("DELETE", "/functions/lab/secrets/PASSWORD", &[], b"").status, 204);
    server.request("DELETE", "/functions/lab/secrets/PASSWORD", &[], b"").refused(404, "not_found");
    server
        .post(
            "/functions/lab/rollback",
            &format!(r#"{{"revision":{}}}"#, server.get("/functions/lab/revisions").ok()[0]["revision"]),
        )
        .ok();
    assert!(!server.get("/run/lab/env").text().contains("second"));
    // Deleting a function deletes them: another one of that name has none.
    set(&server, "lab", "PASSWORD", VALUE.as_bytes()).ok();
    server.request("DELETE", "/functions/lab", &[], b"").ok();
    server.deploy_with("lab", &lab, "{}").ok();
    assert_eq!(server.get("/functions/lab/secrets").ok(), serde_json::json!([]));
    assert_eq!(server.get("/run/lab/env").text(), "");

    // On disk, in the log and in the audit log it is nowhere.
    set(&server, "lab", "PASSWORD", VALUE.as_bytes()).ok();
    wait_until("the audit line", || server.audit.lock().unwrap().iter().any(|line| line.contains("secret.set")));
    let lines = server.audit.lock().unwrap().join("\n") + &server.log_text();
    assert!(lines.contains("lab/PASSWORD") && !lines.contains(VALUE) && !lines.contains(KEY), "{lines}");
    let data = server.kill();
    let on_disk = everything(data.path());
    assert!(holds(&on_disk, "PASSWORD") && !holds(&on_disk, VALUE) && !holds(&on_disk, KEY));
    let server = Server::with(with_key().data(&data));
    assert_eq!(server.get("/run/lab/env").text(), format!("PASSWORD={VALUE}"), "after a restart");
}

#[test]
fn kept_instances_do_not_outlive_a_secret() {
    let server = Server::with(with_key());
    server.deploy_with("lab", &guest_bytes("http-lab.wasm"), r#"{"reuse":true}"#).ok();
    for value in ["one", "two", "three"] {
        set(&server, "lab", "WHICH", value.as_bytes()).ok();
        assert!((0..5).all(|_| server.get("/run/lab/env").text() == format!("WHICH={value}")), "{value}");
    }
}

#[test]
fn secrets_need_the_operators_key_and_the_right_one() {
    let server = Server::start();
    server.deploy("lab", "http-lab.wasm");
    let message = set(&server, "lab", "A", VALUE.as_bytes()).refused(409, "conflict");
    assert!(message.contains("TENSOR_WASM_SECRETS_KEY") && message.contains("secrets_key_file"), "{message}");
    assert!(!message.contains(VALUE));
    let data = server.kill();

    // A key file does as well, and base64 as well as hexadecimal digits.
    let file = data.path().join("test-key");
    std::fs::write(&file, format!("{KEY}\n")).unwrap();
    let config = format!("[server]\nsecrets_key_file = {file:?}\n");
    let server = Server::with(Options::config(&config).data(&data));
    set(&server, "lab", "A", b"1").ok();
    let data = server.kill();
    std::fs::remove_file(&file).unwrap();
    let refused = |options: Options| Server::try_with(options.data(&data)).err().unwrap();
    let missing = refused(Options::default());
    assert!(missing.contains("no key was given") && missing.contains("--forget-secrets"), "{missing}");
    let other = KEY.replace('8', "7");
    let wrong = refused(Options::default().env("TENSOR_WASM_SECRETS_KEY", other.as_str()));
    assert!(wrong.contains("not the one its secrets were sealed with") && !wrong.contains(&other), "{wrong}");
    let nonsense = refused(Options::default().env("TENSOR_WASM_SECRETS_KEY", "hunter2"));
    assert!(nonsense.contains("32 bytes") && !nonsense.contains("hunter2"), "{nonsense}");
    let server = Server::with(with_key().data(&data));
    assert_eq!(server.get("/run/lab/env").text(), "A=1");
}

#[test]
fn a_lost_secret_refuses_calls_and_can_be_set_again() {
    let server = Server::with(with_key());
    server.deploy("lab", "http-lab.wasm");
    server.deploy("hello", "hello.wasm");
    set(&server, "lab", "A", b"1").ok();
    let data = server.kill();
    // The store is damaged: functions are rebuilt from their manifests, which hold no values.
    std::fs::write(data.path().join("catalog.redb"), b"nonsense").unwrap();
    let server = Server::with(with_key().data(&data));
    // A caller may be a stranger, who need not know what the function's secrets are called.
    let message = server.get("/run/lab/env").refused(503, "capacity_exhausted");
    assert!(message.contains("cannot be run at present") && !message.contains("secret"), "{message}");
    let reason = server.get("/functions/lab").ok()["unavailable"].as_str().unwrap().to_owned();
    assert!(reason.contains("lost its secret \"A\"") && reason.contains("secret set lab A"), "{reason}");
    assert_eq!(server.get("/run/hello/").status, 200);
    set(&server, "lab", "A", b"2").ok();
    assert_eq!(server.get("/run/lab/env").text(), "A=2");
}

#[test]
fn secrets_are_bounded_and_belong_to_their_tenant() {
    let config = "[limits]\nsecrets_max = 3\nsecret_bytes_max = 100\n";
    let tokens = "token-of-a:tenant=a token-of-b:tenant=b";
    let options = Options::config(config).env("TENSOR_WASM_SECRETS_KEY", KEY).env("TENSOR_WASM_API_TOKENS", tokens);
    let server = Server::with(options);
    let (a, b) = (("authorization", "Bearer token-of-a"), ("authorization", "Bearer token-of-b"));
    let wasm = guest_bytes("math.wasm");
    for name in ["f", "g"] {
        let path = format!("/functions?name={name}");
        server.request("POST", &path, &[a, ("content-type", "application/wasm")], &wasm).ok();
    }
    let put = |who, path: &str, value: &[u8]| {
        server.request("PUT", path, &[who, ("content-type", "application/octet-stream")], value)
    };
    put(b, "/functions/f/secrets/A", b"x").refused(404, "not_found");
    server
        .request("PUT", "/functions/f/secrets/A", &[("content-type", "application/octet-stream")], b"x")
        .refused(401, "unauthorized");
    put(a, "/functions/f/secrets/A", &[b'x'; 101]).refused(413, "body_too_large");
    for (name, bad) in [("1A", &b"x"[..]), ("A-B", b"x"), ("%00", b"x"), (&"A".repeat(200), b"x")] {
        put(a, &format!("/functions/f/secrets/{name}"), bad).refused(400, "invalid_name");
    }
    put(a, "/functions/f/secrets/A", b"\xff\xfe").refused(400, "invalid_args");
    put(a, "/functions/f/secrets/A", b"a\0b").refused(400, "invalid_args");
    // The limit is the tenant's, over all its functions; replacing one needs no more room. Racing ones are counted too.
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let one = |n: usize| {
            let (put, function) = (&put, if n.is_multiple_of(2) { "f" } else { "g" });
            scope.spawn(move || put(a, &format!("/functions/{function}/secrets/K{n}"), b"x").status)
        };
        (0..8).map(one).collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(statuses.iter().filter(|status| **status == 204).count(), 3, "{statuses:?}");
    assert_eq!(statuses.iter().filter(|status| **status == 409).count(), 5, "{statuses:?}");
    let kept = statuses.iter().position(|status| *status == 204).unwrap();
    let function = if kept % 2 == 0 { "f" } else { "g" };
    assert_eq!(put(a, &format!("/functions/{function}/secrets/K{kept}"), b"again").status, 204);
}

#[test]
fn the_command_line_sets_lists_and_deletes_secrets() {
    let server = Server::with(with_key());
    server.deploy("lab", "http-lab.wasm");
    let url = server.url("");
    let try_set = |args: &[&str], input: &str| {
        let mut command = Command::new(&*EXE);
        command.args(["--server", &url, "secret", "set", "lab"]).args(args);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    let set = |args: &[&str], input: &str| {
        let output = try_set(args, input);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(!stdout(&output).contains(VALUE), "{}", stdout(&output));
        stdout(&output)
    };
    assert_eq!(set(&["TYPED"], &format!("{VALUE}\n")), "set TYPED of lab\n");
    let file = server.data.path().join("test-value");
    std::fs::write(&file, "from a file\n").unwrap();
    set(&["READ", "--value-file", file.to_str().unwrap()], "");
    assert_eq!(server.get("/run/lab/env").text(), format!("READ=from a file\n\nTYPED={VALUE}"));
    assert_eq!(stdout(&server.cli(&["secret", "list", "lab"])), "READ\nTYPED\n");
    assert_eq!(stdout(&server.cli(&["secret", "delete", "lab", "READ"])), "deleted READ of lab\n");
    assert_eq!(server.cli(&["secret", "delete", "lab", "READ"]).status.code(), Some(1));
    assert_eq!(set(&["JSON", "--json"], "x"), "{\"set\":true}\n");
    assert_eq!(stdout(&server.cli(&["secret", "delete", "lab", "JSON", "--json"])), "{\"deleted\":true}\n");
    // Too long is refused, here and by the server, and never cut.
    std::fs::write(&file, vec![b'x'; (1 << 20) + 1]).unwrap();
    for (args, input) in
        [(&["LONG"][..], "x".repeat((1 << 20) + 1)), (&["LONG", "--value-file", file.to_str().unwrap()], String::new())]
    {
        let output = try_set(args, &input);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains("it has more than 1048576 bytes"), "{}", stderr(&output));
    }
    let output = try_set(&["LONG"], &format!("{}\n", "x".repeat(1 << 20)));
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("secret_bytes_max"), "{}", stderr(&output));
    assert_eq!(stdout(&server.cli(&["secret", "list", "lab"])), "TYPED\n");
    // A value is no argument: it would be in the shell's history and in everybody's list of processes.
    assert_eq!(server.cli(&["secret", "set", "lab", "KEY", VALUE]).status.code(), Some(2));
    let shown = stdout(&server.cli(&["revisions", "lab"])) + &stdout(&server.cli(&["functions"]));
    assert!(!shown.contains(VALUE));
}

/// Files and folders that others may read.
fn readable_by_others(dir: &Path, found: &mut Vec<String>) {
    let expect = |path: &Path, mode: u32| {
        let found = std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        (found != mode).then(|| format!("{} is {found:o}", path.display()))
    };
    found.extend(expect(dir, 0o700));
    for path in std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path()) {
        // What the test itself put there.
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("test-")) {
            continue;
        }
        if path.is_dir() {
            readable_by_others(&path, found);
        } else {
            found.extend(expect(&path, 0o600));
        }
    }
}

#[test]
fn the_data_directory_is_its_owners_only_whatever_the_umask() {
    let outer = tempfile::tempdir().unwrap();
    let data = outer.path().join("not/yet/there");
    let start = || {
        let mut shell = Command::new("sh");
        let serve = r#"umask 000; exec "$0" serve --addr 127.0.0.1:0 --data-dir "$1""#;
        shell.args(["-c", serve, EXE.as_str(), data.to_str().unwrap()]).env("TENSOR_WASM_SECRETS_KEY", KEY);
        Server::started(shell, Arc::new(tempfile::tempdir().unwrap())).unwrap()
    };
    let check = |when: &str| {
        let mut found = Vec::new();
        readable_by_others(&data, &mut found);
        assert_eq!(found, Vec::<String>::new(), "{when}");
    };
    let server = start();
    server.deploy("lab", "http-lab.wasm");
    server.deploy_with("gpu", &guest_bytes("gpu-examples.wasm"), r#"{"gpu":true}"#).ok();
    // Compiles a kernel, which is kept too.
    server.invoke("gpu", r#"{"export":"saxpy","args":[2.0,[1,2],[3,4]]}"#).ok();
    set(&server, "lab", "A", b"1").ok();
    let job = server.post("/functions/gpu/invoke-async", r#"{"export":"saxpy","args":[2.0,[1],[3]]}"#);
    assert_eq!(job.status, 202, "{}", job.text());
    wait_until("a kept kernel", || std::fs::read_dir(data.join("kernels")).is_ok_and(|dir| dir.count() > 0));
    check("made under umask 0");
    drop(server);
    // What an earlier version left open is closed, quarantined files included.
    std::fs::write(data.join("manifests/damaged.json"), b"nonsense").unwrap();
    std::fs::write(data.join("catalog.redb"), b"nonsense").unwrap();
    let open = Command::new("chmod").arg("-R").arg("a+rwX").arg(&data).status().unwrap();
    assert!(open.success());
    let _server = start();
    check("made private at start");
    assert!(std::fs::read_dir(data.join("quarantine")).unwrap().count() >= 2);
}
