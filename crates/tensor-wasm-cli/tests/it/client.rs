//! The client commands as a person uses them.

use serde_json::Value;

use crate::support::{Server, guest, root, stderr, stdout, tensor_wasm};

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
    crate::support::wait_until("the job", || ok(&["jobs", "show", &id]).contains("succeeded"));
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
