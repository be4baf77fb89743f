//! `tensor-wasm run`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};

use crate::support::{EXE, guest, root, stderr, stdout, tensor_wasm};

fn run(args: &[&str]) -> (i32, String, String) {
    let mut all = vec!["run"];
    all.extend(args);
    let output = tensor_wasm(&all);
    (output.status.code().unwrap(), stdout(&output), stderr(&output))
}

#[test]
fn commands_get_arguments_environment_and_pass_their_exit_code_through() {
    for file in ["command.wasm", "command-p1.wasm"] {
        let path = guest(file);
        let path = path.to_str().unwrap();
        assert_eq!(run(&[path, "args", "--a", "b c"]), (0, "--a|b c\n".into(), String::new()), "{file}");
        assert_eq!(run(&["--env", "A=b", "--env", "C=d=e", path, "env"]).1, "A=b\nC=d=e\n", "{file}");
        let (code, _, errors) = run(&[path, "exit", "7"]);
        // WASI 0.2 knows success and failure only; preview 1 has the number.
        assert_eq!(code, if file == "command.wasm" { 1 } else { 7 }, "{file}");
        assert_eq!(errors, "leaving\n");
        let (code, _, errors) = run(&[path, "panic"]);
        assert_eq!(code, 1, "{errors}");
        assert!(errors.contains("asked to") && errors.contains("error: the guest trapped"), "{errors}");
    }
}

#[test]
fn compiled_code_is_kept_in_the_users_cache() {
    let cache = tempfile::tempdir().unwrap();
    let file = guest("command-p1.wasm");
    let run = |flags: &[&str]| {
        let mut command = Command::new(&*EXE);
        command.arg("run").args(flags).arg(&file).args(["args", "x"]).env("XDG_CACHE_HOME", cache.path());
        assert_eq!(stdout(&command.output().unwrap()), "x\n");
        walkdir(cache.path())
    };
    assert_eq!(run(&["--no-cache"]), 0);
    let first = run(&[]);
    assert!(first > 0, "nothing was kept");
    run(&[]);
    // Kept code of another program, or damaged: compiled again.
    let garble = |dir: &std::path::Path| each_file(dir, &|path| std::fs::write(path, "damaged").unwrap());
    garble(cache.path());
    run(&[]);
}

fn walkdir(dir: &std::path::Path) -> usize {
    let files = std::cell::Cell::new(0);
    each_file(dir, &|_| files.set(files.get() + 1));
    files.get()
}

fn each_file(dir: &std::path::Path, act: &dyn Fn(&std::path::Path)) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        if entry.path().is_dir() {
            each_file(&entry.path(), act);
        } else {
            act(&entry.path());
        }
    }
}

#[test]
fn stdin_and_directories() {
    for file in ["command.wasm", "command-p1.wasm"] {
        let mut child = Command::new(&*EXE)
            .args(["run", guest(file).to_str().unwrap(), "upper"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all("grüße\n".as_bytes()).unwrap();
        assert_eq!(stdout(&child.wait_with_output().unwrap()), "GRÜSSE\n", "{file}");

        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f.txt"), "content").unwrap();
        let path = guest(file);
        let path = path.to_str().unwrap();
        let mapped = format!("{}::/data", dir.path().display());
        assert_eq!(run(&["--dir", &mapped, path, "cat", "/data/f.txt"]).1, "content", "{file}");
        let (code, _, errors) = run(&[path, "cat", "/etc/passwd"]);
        assert_eq!(code, 1, "nothing is readable without --dir: {errors}");
    }
}

#[test]
fn exports_are_called_by_their_signature() {
    let math = root().join("guests/wat/math.wat");
    let math = math.to_str().unwrap();
    assert_eq!(run(&["--invoke", "add", math, "40", "2"]).1, "42\n");
    assert_eq!(run(&["--invoke", "mul64", math, "--", "-3", "4000000000"]).1, "-12000000000\n");
    assert_eq!(run(&["--invoke", "scale", math, "0.1", "1e300"]).1, "0.2\n2e+300\n");
    let typed = guest("typed.wasm");
    let typed = typed.to_str().unwrap();
    assert_eq!(run(&["--invoke", "greet", typed, "Ada"]).1, "\"Hello, Ada!\"\n");
    assert_eq!(run(&["--invoke", "area", typed, "rect((2.0, 3.5))"]).1, "7\n");
    let (code, out, _) = run(&["--invoke", "divide", typed, "7", "0"]);
    assert_eq!((code, out.as_str()), (1, "err(\"7 / 0 has no answer\")\n"));
    assert_eq!(run(&["--invoke", "demo:typed/shapes@1.0.0#mix", typed, "red", "green"]).1, "blue\n");
}

#[test]
fn wasi_0_3_components_run() {
    // Its only export is a handler, so `run` must say what to do with it, having understood the component.
    let p3 = guest("hello-p3.wasm");
    let (code, _, errors) = run(&[p3.to_str().unwrap()]);
    assert_eq!(code, 2);
    assert!(errors.contains("tensor-wasm serve"), "{errors}");
}

#[test]
fn a_command_of_both_worlds_is_run_by_the_newer_export() {
    let p3 = guest("command-p3.wasm");
    let p3 = p3.to_str().unwrap();
    assert_eq!(run(&[p3]), (0, "hello from WASI 0.3\n".into(), String::new()));
    assert_eq!(run(&["--env", "A=b", p3, "env"]).1, "A=b\n");
    assert_eq!(run(&[p3, "exit", "7"]).0, 7);
    assert_eq!(run(&[p3, "nonsense"]).0, 1);
    let (code, _, errors) = run(&["--timeout-ms", "200", p3, "sleep", "60000"]);
    assert!(code == 1 && errors.contains("deadline of 200 ms"), "{errors}");
    assert_eq!(run(&[root().join("guests/wat/both-runs.wat").to_str().unwrap()]).0, 0);
}

/// Answers each connection with what `answer` makes of its first line.
fn serve_tcp(answer: fn(&str) -> String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut line = String::new();
            let _ = BufReader::new(&stream).read_line(&mut line);
            let _ = stream.write_all(answer(&line).as_bytes());
        }
    });
    address
}

#[test]
fn sockets_are_closed_unless_opened() {
    let net = guest("net.wasm");
    let net = net.to_str().unwrap();
    let server = serve_tcp(|line| format!("got {line}"));
    let other = serve_tcp(|_| "other\n".to_owned());
    assert_eq!(run(&["--net", net, "tcp", &server]).1, "got ping\n");
    let only = format!("--net={server}");
    assert_eq!(run(&[&only, net, "tcp", &server]), (0, "got ping\n".into(), String::new()));
    for flags in [&[][..], &[only.as_str()]] {
        let mut args = flags.to_vec();
        args.extend([net, "tcp", &other]);
        let (code, out, errors) = run(&args);
        assert_eq!((code, out.as_str()), (1, ""), "{errors}");
        assert!(errors.contains(&format!("a socket to {other} was denied; allow it with --net={other}")), "{errors}");
    }
    // Datagrams, and a program that listens itself.
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = udp.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let (_, from) = udp.recv_from(&mut [0; 64]).unwrap();
        udp.send_to(b"pong", from).unwrap();
    });
    assert_eq!(run(&[net, "udp", &at]).0, 1, "closed");
    assert_eq!(run(&[&format!("--net={at}"), net, "udp", &at]).1, "pong");
    assert_eq!(run(&[&only, net, "listen", "127.0.0.1:0"]).0, 1, "only that address");
    let mut child = Command::new(&*EXE)
        .args(["run", "--net", net, "listen", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut address = String::new();
    lines.read_line(&mut address).unwrap();
    let mut answer = String::new();
    TcpStream::connect(address.trim()).unwrap().read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "pong\n");
    assert!(child.wait().unwrap().success());
    let (code, _, errors) = run(&["--net=nowhere", net, "tcp", &server]);
    assert!(code == 2 && errors.contains("--net=nowhere") && errors.contains("HOST:PORT"), "{errors}");
}

#[test]
fn outgoing_http_is_closed_unless_opened() {
    let net = guest("net.wasm");
    let net = net.to_str().unwrap();
    let server = serve_tcp(|line| {
        assert!(line.starts_with("GET / "), "{line}");
        "HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nhello\n".to_owned()
    });
    for allowed in [server.as_str(), "127.0.0.1", "*"] {
        let ended = run(&["--allow-http", allowed, net, "http", &server]);
        assert_eq!(ended, (0, "200 hello\n".into(), String::new()), "{allowed}");
    }
    for flags in [&[][..], &["--allow-http", "example.com"], &["--net"]] {
        let mut args = flags.to_vec();
        args.extend([net, "http", &server]);
        let (code, _, errors) = run(&args);
        assert_eq!(code, 1, "{errors}");
        assert!(errors.contains("HttpRequestDenied"), "{errors}");
        assert!(errors.contains(&format!("denied; allow it with --allow-http {server}")), "{errors}");
    }
}

#[test]
fn programs_that_import_the_gpu_run_with_a_device() {
    let (component, module) = (guest("gpu-examples.wasm"), guest("gpu-saxpy-core.wasm"));
    let (component, module) = (component.to_str().unwrap(), module.to_str().unwrap());
    for file in [component, module] {
        let (code, _, errors) = run(&["--invoke", "saxpy", file]);
        assert_eq!(code, 2, "{errors}");
        assert!(errors.contains("imports the GPU") && errors.contains("--device auto"), "{errors}");
    }
    let saxpy = ["--device", "cpu", "--invoke", "saxpy", component, "2", "[1, 2, 3]", "[10, 20, 30]"];
    assert_eq!(run(&saxpy), (0, "ok([12, 24, 36])\n".into(), String::new()));
    let checked = ["--device", "cpu", "--invoke", "saxpy_check", module, "1000", "2.5"];
    assert_eq!(run(&checked), (0, "0\n".into(), String::new()), "no element is wrong");
    let (code, _, errors) = run(&["--device", "gpu9", "--invoke", "saxpy", component]);
    assert!(code == 2 && errors.contains("is not auto, cpu, cuda or cuda:N"), "{errors}");
    // A device is opened for those that import it only.
    let math = root().join("guests/wat/math.wat");
    assert_eq!(run(&["--device", "cuda:99", "--invoke", "add", math.to_str().unwrap(), "1", "2"]).1, "3\n");
}

#[test]
fn mistakes_are_explained_and_exit_with_2() {
    let check = |args: &[&str], expect: &str| {
        let (code, out, errors) = run(args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {errors}");
        assert!(errors.contains(expect), "{args:?}: {errors}");
        assert_eq!(errors.trim_end().lines().count(), 1, "one line: {errors}");
    };
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    check(&["/no/such/file.wasm"], "/no/such/file.wasm: No such file");
    let math = root().join("guests/wat/math.wat");
    let math = math.to_str().unwrap();
    check(&[math], "no _start");
    check(&["--invoke", "sub", math], "there is no export \"sub\"; this function has: add");
    check(&["--invoke", "add", math, "1"], "takes 2 argument(s), 1 were given");
    check(&["--invoke", "add", math, "1", "two"], "expected a whole number (i32), found \"two\"");
    check(&["--env", "SURELY_NOT_SET", math], "SURELY_NOT_SET=VALUE");
    check(&["--dir", "/no/such/dir", &guest("command.wasm").display().to_string()], "--dir /no/such/dir");
    let typed = guest("typed.wasm");
    check(&["--invoke", "area", typed.to_str().unwrap(), "triangle(1.0)"], "argument \"s\"");
    let whole = crate::support::guest_bytes("hello.wasm");
    let (code, _, errors) = run(&[&file("cut.wasm", &whole[..whole.len() / 2])]);
    assert_eq!(code, 2, "{errors}");
    assert!(errors.contains("out of bounds"), "{errors}");
}

#[test]
fn a_time_limit_stops_loops_and_sleeps() {
    for (file, mode) in [("command.wasm", "loop"), ("command-p1.wasm", "loop"), ("command.wasm", "sleep")] {
        let path = guest(file);
        let started = std::time::Instant::now();
        let (code, _, errors) = run(&["--timeout-ms", "300", path.to_str().unwrap(), mode, "60000"]);
        assert_eq!(code, 1);
        assert!(errors.contains("deadline of 300 ms"), "{errors}");
        assert!(started.elapsed().as_secs() < 20, "{file} {mode}: {:?}", started.elapsed());
    }
}
