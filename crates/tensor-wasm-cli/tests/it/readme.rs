//! What the READMEs tell a reader to type works, in the order it is written, from a folder that has the guests.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};

use crate::support::{EXE, guest, root, stderr, stdout};

/// A folder as a reader would have it, and the server that the README starts there.
struct Session {
    folder: tempfile::TempDir,
    server: Option<(Child, String)>,
}

impl Session {
    fn new() -> Session {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for file in std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file())
        {
            std::fs::copy(&file, at(file.file_name().unwrap().to_str().unwrap())).unwrap();
        }
        std::fs::create_dir(at("target")).unwrap();
        symlink(guest("hello.wasm").parent().unwrap(), at("target/guests")).unwrap();
        symlink(root().join("guests"), at("guests")).unwrap();
        std::fs::create_dir(at("bin")).unwrap();
        symlink(&*EXE, at("bin/tensor-wasm")).unwrap();
        // An answer that is an error is a failure, as a reader would see it.
        std::fs::write(at(".curlrc"), "fail\nsilent\nshow-error\n").unwrap();
        Session { folder, server: None }
    }

    fn command(&self, line: &str) -> Command {
        let path = format!("{}/bin:{}", self.folder.path().display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("sh");
        command.args(["-e", "-c", line]).current_dir(self.folder.path()).stdin(Stdio::null());
        command.env("PATH", path).env("CURL_HOME", self.folder.path());
        for name in ["TENSOR_WASM_API_TOKENS", "TENSOR_WASM_SERVER", "TENSOR_WASM_TENANT", "TENSOR_WASM_TOKEN"] {
            command.env_remove(name);
        }
        command
    }

    /// Starts the server that a line asks for, on a port that is free.
    fn serve(&mut self, line: &str) {
        let line = line.split(" #").next().unwrap();
        // The shell is replaced by it, so that ending the child ends the server.
        let mut command = self.command(&format!("exec {line} --addr 127.0.0.1:0"));
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let listening = lines.find_map(|line| line.strip_prefix("listening on http://").map(str::to_owned));
        let addr = listening.expect("the server starts").split(' ').next().unwrap().to_owned();
        std::thread::spawn(move || lines.for_each(drop));
        self.server = Some((child, addr));
    }

    /// Runs a line to its end. The README's server is on port 8080, ours is not.
    #[track_caller]
    fn run(&self, line: &str) -> String {
        let (_, addr) = self.server.as_ref().expect("a line that starts the server comes first");
        let port = addr.rsplit_once(':').unwrap().1;
        let line = line.replace(":8080", &format!(":{port}"));
        let output = self.command(&line).env("TENSOR_WASM_SERVER", format!("http://{addr}")).output().unwrap();
        assert!(output.status.success(), "{line}\n{}\n{}{}", output.status, stdout(&output), stderr(&output));
        stdout(&output)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some((child, _)) = &mut self.server {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The lines of a paper's shell blocks, but for those of `make`, which the rest of the tests stand for.
fn shell_lines(paper: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(paper)).unwrap();
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let lines = blocks.flat_map(str::lines).map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.filter(|line| !line.starts_with("make ")).map(str::to_owned).collect()
}

#[test]
fn the_readmes_commands_work_in_order() {
    let mut session = Session::new();
    let lines = shell_lines("README.md");
    assert!(lines.len() > 10, "{lines:?}");
    for line in &lines {
        if line.starts_with("tensor-wasm serve") {
            session.serve(line);
        } else {
            session.run(line);
        }
    }
    // What its comments say: where the data is, what was drawn, what was rolled back.
    assert!(session.folder.path().join("tensor-wasm-data").is_dir());
    let png = std::fs::read(session.folder.path().join("m.png")).unwrap();
    assert_eq!(&png[1..4], b"PNG");
    assert_eq!(session.run("curl http://127.0.0.1:8080/run/hello/"), "Hello from TensorWasm!\n");
    let read = session.run("curl --data-binary @guests/classify/seven.png http://127.0.0.1:8080/run/classify/");
    assert!(read.starts_with(r#"{"digit":7,"#), "{read}");
}

#[test]
fn the_sdks_examples_work_as_written() {
    let mut session = Session::new();
    session.serve("tensor-wasm serve");
    for line in shell_lines("sdk/README.md") {
        session.run(&line);
    }
    let text = std::fs::read_to_string(root().join("sdk/README.md")).unwrap();
    let cells = text.lines().filter(|line| line.starts_with("| ")).filter_map(|line| line.rsplit('`').nth(1));
    let commands: Vec<&str> =
        cells.filter(|cell| cell.starts_with("tensor-wasm invoke ") || cell.starts_with("curl ")).collect();
    assert!(commands.len() > 10, "{commands:?}");
    // Those of the hostile guest are there to fail; `gpu.rs` holds what they say.
    for line in commands.iter().filter(|line| !line.contains(" hostile ")) {
        session.run(line);
    }
}
