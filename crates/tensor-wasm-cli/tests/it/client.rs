//! The client commands as a person uses them.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::support::{EXE, Options, Server, guest, root, stderr, stdout, tensor_wasm, wait_until};

/// A client command with an environment and an input.
fn client(server: &Server, env: &[(&str, &str)], stdin: &[u8], args: &[&str]) -> Output {
    let mut command = Command::new(&*EXE);
    command.args(args).env("TENSOR_WASM_SERVER", server.url("")).envs(env.iter().copied());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(stdin).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn a_session() {
    let server = Server::start();
    let ok = |args: &[&str]| {
        let output = server.cli(args);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        stdout(&output)
    };
    let typed = guest("typed.wasm");
    assert!(
        ok(&["deploy", typed.to_str().unwrap(), "--name", "shapes"]).contains("deployed shapes (component_exports)")
    );
    // Text is converted on the way.
    let math = root().join("guests/wat/math.wat");
    ok(&["deploy", math.to_str().unwrap(), "--name", "math"]);
    let hello = guest("hello.wasm");
    assert!(
        ok(&["deploy", hello.to_str().unwrap(), "--name", "hello", "--public"])
            .contains("http://hello.default.localhost:")
    );
    assert_eq!(ok(&["invoke", "shapes", "--export", "greet", "--args", r#"["Ada"]"#]), "\"Hello, Ada!\"\n");
    assert_eq!(ok(&["invoke", "math", "--export", "add", "--args", "[1,2]"]), "3\n");
    let table = ok(&["functions"]);
    assert!(table.starts_with("NAME") && table.lines().count() == 4, "{table}");
    let json: Value = serde_json::from_str(&ok(&["--json", "functions"])).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 3);

    ok(&["deploy", guest("hostile.wasm").to_str().unwrap(), "--name", "math"]);
    let revisions = ok(&["revisions", "math"]);
    assert_eq!(revisions.lines().count(), 3, "{revisions}");
    let first = revisions.lines().nth(2).unwrap().split_whitespace().next().unwrap().to_owned();
    let second = revisions.lines().nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    assert!(ok(&["rollback", "math"]).contains(&first));
    assert_eq!(
        ok(&["split", "math", &format!("{first}=9"), &format!("{second}=1")]),
        format!("{first} 9\n{second} 1\n")
    );
    ok(&["rollback", "math", &first]);

    let id = ok(&["invoke", "math", "--export", "add", "--args", "[20,22]", "--async"]).trim().to_owned();
    wait_until("the job", || ok(&["jobs", "show", &id]).contains("succeeded"));
    let jobs = ok(&["jobs"]);
    assert!(jobs.contains(&id) && jobs.contains("42"), "{jobs}");
    ok(&["invoke", "shapes", "--export", "shout", "--args", r#"["hear this"]"#]);
    assert!(ok(&["logs", "shapes"]).contains("stdout: HEAR!\nstdout: THIS!"));
    assert!(ok(&["metrics"]).contains("tensor_wasm_functions 3"));
    let metrics: Value = serde_json::from_str(&ok(&["--json", "metrics"])).unwrap();
    assert_eq!(metrics["tensor_wasm_functions"], 3.0);
    assert_eq!(ok(&["delete", "math"]), "deleted math\n");
    // A command's output and exit code come through.
    ok(&["deploy", guest("command-p1.wasm").to_str().unwrap(), "--name", "command"]);
    let left = server.cli(&["invoke", "command", "--args", r#"["exit","7"]"#]);
    assert_eq!((left.status.code(), stderr(&left).as_str()), (Some(7), "leaving\n"));
}

#[test]
fn refusals_are_one_line_and_exit_with_1() {
    let server = Server::start();
    server.deploy("math", "math.wasm");
    let check = |args: &[&str], code: i32, expect: &str| {
        let output = server.cli(args);
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        assert!(errors.starts_with("error: ") && errors.contains(expect), "{args:?}: {errors}");
        assert_eq!(errors.trim_end().lines().count(), 1, "{errors}");
    };
    check(&["invoke", "nobody"], 1, "there is no function \"nobody\"");
    check(&["invoke", "math", "--export", "add", "--args", "[1]"], 1, "takes 2 argument(s)");
    check(&["invoke", "math", "--export", "nope"], 1, "has: add, ");
    check(&["invoke", "math", "--export", "nope"], 1, "`tensor-wasm show math` says how it is called");
    check(&["invoke", "math", "--args", "{"], 2, "--args");
    check(&["deploy", "/no/such.wasm", "--name", "x"], 2, "/no/such.wasm");
    check(&["deploy", guest("math.wasm").to_str().unwrap(), "--name", "a/b"], 1, "'/'");
    check(&["deploy", root().join("README.md").to_str().unwrap(), "--name", "x"], 1, "magic number");
    check(&["split", "math", "nonsense"], 2, "REVISION=WEIGHT");
    check(&["jobs", "cancel", "x"], 1, "there is no job");
    check(&["logs", "nobody"], 1, "there is no function");
}

#[test]
fn a_server_that_is_down_is_explained() {
    let output = tensor_wasm(&["--server", "http://127.0.0.1:1", "functions"]);
    assert_eq!(output.status.code(), Some(1));
    let errors = stderr(&output);
    assert!(
        errors.contains("no server answers at http://127.0.0.1:1") && errors.contains("tensor-wasm serve"),
        "{errors}"
    );
    let output = tensor_wasm(&["--server", "not a url", "functions"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    // Something else listens there: what it sends is not put on the terminal.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 4096]);
        stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 12\r\n\r\n<h1>404</h1>").unwrap();
    });
    let output = tensor_wasm(&["functions", "--server", &addr]);
    other.join().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let expected = "answers, but not as a TensorWasm server does; check --server URL";
    assert_eq!(stderr(&output), format!("error: http://{addr} {expected}\n"));
}

#[test]
fn a_function_that_returns_err_exits_with_1() {
    let server = Server::start();
    server.deploy("shapes", "typed.wasm");
    let invoke = |json: &[&str], export: &str, args: &str| {
        let output = server.cli(&[json, &["invoke", "shapes", "--export", export, "--args", args]].concat());
        (output.status.code(), stdout(&output), stderr(&output))
    };
    let expected = "{\"err\":\"7 / 0 has no answer\"}\n";
    assert_eq!(invoke(&[], "divide", "[7,0]"), (Some(1), expected.to_owned(), String::new()));
    assert_eq!(invoke(&[], "divide", "[7,2]"), (Some(0), "{\"ok\":3}\n".to_owned(), String::new()));
    assert_eq!(invoke(&[], "demo:typed/shapes@1.0.0#centroid", "[[]]").0, Some(1));
    let (code, out, _) = invoke(&["--json"], "divide", "[7,0]");
    let answer: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &answer["result"]), (Some(1), &json!({ "err": "7 / 0 has no answer" })));
    // A command's exit code is the same with --json.
    server.deploy("command", "command-p1.wasm");
    let left = server.cli(&["--json", "invoke", "command", "--args", r#"["exit","7"]"#]);
    assert_eq!(left.status.code(), Some(7));
}

/// Invokes a function of a server that gives this answer, once. The request comes back too.
fn answered(answer: &Value) -> (Output, String) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let body = answer.to_string();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = Vec::new();
        // Its last byte is the end of its JSON.
        while !request.ends_with(b"}") {
            let mut buffer = [0; 4096];
            let n = stream.read(&mut buffer).unwrap();
            assert!(n > 0, "{}", String::from_utf8_lossy(&request));
            request.extend_from_slice(&buffer[..n]);
        }
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close";
        write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
        String::from_utf8(request).unwrap()
    });
    let output = tensor_wasm(&["--server", &addr, "invoke", "f"]);
    (output, server.join().unwrap())
}

#[test]
fn what_a_result_is_the_server_says() {
    let check = |kind: &str, result: Value, is_err: bool, code: i32, out: &str| {
        let (output, request) = answered(&json!({ "kind": kind, "result": result, "is_err": is_err }));
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(code), out), "{}", stderr(&output));
        let request = request.to_lowercase();
        assert!(request.contains("content-length:") && !request.contains("transfer-encoding:"), "{request}");
    };
    // A record may look like an error or like a command's output.
    check("component_exports", json!({ "err": 1 }), false, 0, "{\"err\":1}\n");
    check("component_exports", json!({ "err": 1 }), true, 1, "{\"err\":1}\n");
    let ended = json!({ "exit_code": 7, "stdout": "out" });
    check("component_exports", ended.clone(), false, 0, "{\"exit_code\":7,\"stdout\":\"out\"}\n");
    check("component_command", ended.clone(), false, 7, "out");
    check("core_command", ended, false, 7, "out");
    let server = Server::start();
    for (name, file, kind) in [
        ("typed", "typed.wasm", "component_exports"),
        ("math", "math.wasm", "core_exports"),
        ("command", "command.wasm", "component_command"),
        ("command-p1", "command-p1.wasm", "core_command"),
    ] {
        server.deploy(name, file);
        let body = match name {
            "typed" => r#"{"export":"greet","args":["x"]}"#,
            "math" => r#"{"export":"nothing"}"#,
            _ => "{}",
        };
        assert_eq!(server.invoke(name, body).ok()["kind"], kind);
        let streamed = server.post(&format!("/functions/{name}/invoke-stream"), body).text();
        assert!(streamed.contains(&format!("\"kind\":\"{kind}\"")), "{streamed}");
    }
}

#[test]
fn arguments_come_from_files_and_stdin_and_mistakes_are_pointed_at() {
    let server = Server::start();
    server.deploy("shapes", "typed.wasm");
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).unwrap();
        format!("@{}", dir.path().join(name).display())
    };
    let greet = |args: &str, stdin: &str| {
        let output = client(&server, &[], stdin.as_bytes(), &["invoke", "shapes", "--export", "greet", "--args", args]);
        (output.status.code().unwrap(), stdout(&output), stderr(&output))
    };
    let good = file("good.json", "[\n  \"Ada\"\n]\n");
    assert_eq!(greet(&good, ""), (0, "\"Hello, Ada!\"\n".to_owned(), String::new()));
    assert_eq!(greet("-", r#"{"name":"stdin"}"#).1, "\"Hello, stdin!\"\n");
    let (code, _, errors) = greet(&file("bad.json", "[\n  \"Ada\"\n  1]"), "");
    assert_eq!(code, 2);
    assert!(errors.contains("at line 3, column 3, near \"1]\""), "{errors}");
    let (code, _, errors) = greet("Ada", "");
    assert_eq!((code, errors.contains("expected JSON such as '[1,\"two\"]', @FILE or - for stdin")), (2, true));
    assert!(greet("@/no/such.json", "").2.contains("--args @/no/such.json: No such file"));

    // Bytes in, bytes out.
    let input = dir.path().join("in.bin");
    std::fs::write(&input, b"abc\xff").unwrap();
    let output = dir.path().join("out.bin");
    let upper = ["invoke", "shapes", "--export", "upper", "--in"];
    let all = [&upper[..], &[input.to_str().unwrap(), "--out", output.to_str().unwrap()]].concat();
    let ran = client(&server, &[], b"", &all);
    assert!(ran.status.success(), "{}", stderr(&ran));
    assert_eq!(std::fs::read(&output).unwrap(), b"ABC\xff");
    assert_eq!(client(&server, &[], b"x\0y", &[&upper[..], &["-"]].concat()).stdout, b"X\0Y");
}

#[test]
fn errors_are_json_with_json_and_speak_of_tokens_and_tenants() {
    let tokens = "plain-token; team-token:tenant=a,b";
    let server = Server::with(Options::default().env("TENSOR_WASM_API_TOKENS", tokens));
    let check = |token: Option<&str>, args: &[&str], code: i32, kind: &str, expect: &str| {
        let env: Vec<(&str, &str)> = token.map(|token| ("TENSOR_WASM_TOKEN", token)).into_iter().collect();
        let people = client(&server, &env, b"", args);
        assert_eq!(people.status.code(), Some(code), "{args:?}");
        assert!(stderr(&people).contains(expect), "{args:?}: {}", stderr(&people));
        let programs = client(&server, &env, b"", &[&["--json"], args].concat());
        assert_eq!((programs.status.code(), stdout(&programs).as_str()), (Some(code), ""), "{args:?}");
        let errors = stderr(&programs);
        let error: Value = serde_json::from_str(&errors).unwrap_or_else(|e| panic!("{args:?}: {e}: {errors}"));
        assert_eq!(error["error"]["kind"], kind, "{errors}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(expect) && !message.contains('\n'), "{args:?}: {message}");
        let words = ["401", "403", "404", "HTTP", "header", "Bearer", "x-tensorwasm"];
        assert!(!words.iter().any(|word| message.contains(word)), "{message}");
    };
    check(None, &["functions"], 1, "unauthorized", "put yours into TENSOR_WASM_TOKEN");
    check(Some("wrong-token"), &["functions"], 1, "unauthorized", "does not know the token in TENSOR_WASM_TOKEN");
    let plain = Some("plain-token");
    check(plain, &["functions", "--tenant", "acme"], 1, "tenant_scope_denied", "does not speak for tenant \"acme\"");
    check(Some("team-token"), &["functions"], 1, "tenant_scope_denied", "speaks for a, b; name one with --tenant ID");
    check(plain, &["metrics"], 1, "permission_denied", "a token for every tenant");
    check(plain, &["show", "nobody"], 1, "not_found", "there is no function \"nobody\"");
    check(plain, &["--server", "127.0.0.1:1", "functions"], 1, "unreachable", "`tensor-wasm serve`");
    // Bad usage, found by us and by the parser of the command line.
    check(plain, &["invoke", "x", "--args", "{"], 2, "usage", "--args");
    check(plain, &["invoke"], 2, "usage", "<NAME>");
    check(plain, &["functions", "--no-such-option"], 2, "usage", "--no-such-option");
    check(plain, &["deplo"], 2, "usage", "'deploy'");
    // Commands that ask no server.
    for args in [&["run", "/no/such.wasm"][..], &["kernel", "check", "/no/such.wasm"], &["man", "no-such"]] {
        let output = tensor_wasm(&[&["--json"], args].concat());
        let error: Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!((output.status.code(), &error["error"]["kind"]), (Some(2), &json!("usage")), "{error}");
    }
}

#[test]
fn typos_are_corrected_to_commands_for_people() {
    let said = |typo: &str| {
        let output = tensor_wasm(&[typo]);
        assert_eq!(output.status.code(), Some(2), "{typo}");
        stderr(&output)
    };
    assert!(said("deplyo").contains("'deploy'"));
    assert!(said("device").contains("'devices'"));
    for typo in ["device-workr", "device", "compile-worke", "compile", "complie-worker"] {
        let suggested = said(typo).replace(&format!("'{typo}'"), "");
        assert!(!suggested.contains("-worker"), "{suggested}");
    }
    assert!(!stdout(&tensor_wasm(&["--help"])).contains("worker"));
}

#[test]
fn options_are_shown_where_they_mean_something() {
    let help = |args: &[&str]| stdout(&tensor_wasm(&[args, &["--help"]].concat()));
    for client in ["deploy", "invoke", "functions", "show", "logs", "jobs", "revisions", "rollback", "delete"] {
        let text = help(&[client]);
        let (_, grouped) = text.split_once("Client options:").unwrap_or_else(|| panic!("{client}: {text}"));
        assert!(["--server", "--tenant", "--json", "TENSOR_WASM_TOKEN"].iter().all(|o| grouped.contains(o)), "{text}");
    }
    assert!(help(&["jobs", "show"]).contains("Client options:"));
    for local in ["run", "serve", "completions", "man"] {
        let text = help(&[local]);
        assert!(!["--server", "--tenant", "--json"].iter().any(|option| text.contains(option)), "{text}");
    }
    for local in [&["devices"][..], &["kernel", "check"], &["kernel", "run"]] {
        let text = help(local);
        assert!(text.contains("--json") && !text.contains("--server") && !text.contains("--tenant"), "{text}");
    }
    let output = tensor_wasm(&["--server", "http://127.0.0.1:1", "devices"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--server: it is for commands that talk to a server"), "{}", stderr(&output));
}

#[test]
fn completions_are_scripts_that_know_the_commands() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = tensor_wasm(&["completions", shell]);
        let script = stdout(&output);
        assert!(output.status.success() && script.contains("deploy") && !script.contains("-worker"), "{shell}");
        std::fs::write(dir.path().join(shell), script).unwrap();
    }
    // What bash does when the key is pressed after `tensor-wasm dep`.
    let press = "set -e; source ./bash; f=$(complete -p tensor-wasm); f=${f#*-F }; COMP_WORDS=(tensor-wasm dep); \
                 COMP_CWORD=1; ${f%% *} tensor-wasm dep tensor-wasm; echo \"${COMPREPLY[@]}\"";
    let bash = Command::new("bash").args(["--norc", "-c", press]).current_dir(&dir).output().unwrap();
    assert!(bash.status.success(), "{}", stderr(&bash));
    assert_eq!(stdout(&bash), "deploy\n");
    assert_eq!(tensor_wasm(&["completions", "tcsh"]).status.code(), Some(2));
}

#[test]
fn manual_pages_are_pages() {
    let dir = tempfile::tempdir().unwrap();
    let output = tensor_wasm(&["man", "--dir", dir.path().join("man1").to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let page = |name: &str| std::fs::read_to_string(dir.path().join("man1").join(name)).unwrap();
    assert!(page("tensor-wasm.1").contains("tensor\\-wasm\\-deploy(1)"), "{}", page("tensor-wasm.1"));
    assert!(page("tensor-wasm-jobs-show.1").contains(".SH NAME"));
    let printed = stdout(&tensor_wasm(&["man", "deploy"]));
    assert_eq!(printed, page("tensor-wasm-deploy.1"));
    let mut man = Command::new("man");
    man.args(["-l", "--warnings", "tensor-wasm-deploy.1"]).env("MANPAGER", "cat").current_dir(dir.path().join("man1"));
    match man.output() {
        // A machine without manual pages may still have a `man` that says so.
        Ok(man) if man.status.success() && stdout(&man).contains("SYNOPSIS") => {
            assert!(stdout(&man).contains("--name") && stderr(&man).is_empty(), "{}{}", stdout(&man), stderr(&man));
        }
        _ => println!("skipped: no man"),
    }
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let server = Server::with(Options::default().env("TENSOR_WASM_SECRETS_KEY", "8f".repeat(32)));
    server.deploy("f", "math.wasm");
    server.deploy("typed", "typed.wasm");
    let (math, typed) = (guest("math.wasm"), guest("typed.wasm"));
    let (math, typed) = (math.to_str().unwrap(), typed.to_str().unwrap());
    for args in [
        &["metrics"][..],
        &["deploy", typed, "--name", "f"],
        &["show", "f"],
        &["invoke", "f", "--export", "greet", "--args", r#"["x"]"#],
        &["invoke", "f", "--export", "upper", "--in", math],
        &["secret", "set", "f", "A", "--value-file", "/dev/null"],
        &["secret", "list", "f"],
        &["secret", "delete", "f", "A"],
        &["rollback", "f"],
        &["functions", "--json"],
        &["delete", "f"],
        &["serve", "--print-config"],
        &["run", "--invoke", "add", math, "1", "2"],
        &["completions", "bash"],
    ] {
        // Nobody is there when it begins.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(&*EXE);
        command.args(args).env("TENSOR_WASM_SERVER", server.url("")).stdin(Stdio::null()).stdout(writer);
        let output = command.stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn show_tells_what_a_function_is() {
    let server = Server::start();
    let settings = ["--public", "--deadline-ms", "500", "--env", "GREETING=hi"];
    let typed = guest("typed.wasm");
    let deploy = [&["deploy", typed.to_str().unwrap(), "--name", "shapes"], &settings[..]].concat();
    assert!(server.cli(&deploy).status.success());
    let shown = stdout(&server.cli(&["show", "shapes"]));
    for line in ["name      shapes", "tenant    default", "kind      component_exports"] {
        assert!(shown.lines().any(|found| found == line), "{line}: {shown}");
    }
    let json: Value = serde_json::from_str(&stdout(&server.cli(&["show", "shapes", "--json"]))).unwrap();
    let revision: String = json["revision"].as_str().unwrap().chars().take(12).collect();
    assert!(shown.contains(&format!("revision  {revision}")), "{shown}");
    for line in ["setting   public", "setting   deadline_ms 500", "setting   env GREETING=hi"] {
        assert!(shown.lines().any(|found| found == line), "{line}: {shown}");
    }
    assert!(shown.lines().any(|line| line.contains("greet: func(name: string) -> string")), "{shown}");
}

#[test]
fn logs_are_followed_until_ctrl_c() {
    let server = Server::start();
    server.deploy("shapes", "typed.wasm");
    let shout = |text: &str| {
        server.invoke("shapes", &json!({ "export": "shout", "args": [text] }).to_string()).ok();
    };
    shout("before");
    let url = server.url("");
    let mut child = Command::new(&*EXE)
        .args(["--server", &url, "logs", "-f", "shapes"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line == "stdout: BEFORE!"));
    shout("after \u{1b}[2J");
    assert!(lines.any(|line| line == "stdout: AFTER!"));
    // What a guest writes does not move the cursor.
    assert_eq!(lines.next().unwrap(), "stdout: \\u{1b}[2J!");
    let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    // A server that ends is no quiet end of its log.
    let output = server.cli(&["logs", "-f", "nobody"]);
    assert_eq!((output.status.code(), stderr(&output).contains("there is no function")), (Some(1), true));
}

#[test]
fn every_command_explains_itself() {
    let help = stdout(&tensor_wasm(&["--help"]));
    let commands: Vec<&str> = help
        .split("Commands:")
        .nth(1)
        .unwrap()
        .lines()
        .skip(1)
        .take_while(|line| !line.trim().is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .filter(|command| *command != "help")
        .collect();
    assert!(commands.len() >= 12, "{commands:?}");
    for command in commands {
        let output = tensor_wasm(&[command, "--help"]);
        assert!(output.status.success() && stdout(&output).len() > 80, "{command}");
    }
    assert_eq!(tensor_wasm(&["no-such-command"]).status.code(), Some(2));
}
