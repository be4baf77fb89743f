//! Stopping: running calls finish, new ones are refused, the exit code is 0, and it does not take for ever.

use std::time::{Duration, Instant};

use crate::support::{Options, Server, wait_until};

#[test]
fn running_calls_finish_and_the_exit_code_is_0() {
    let mut server = Server::start();
    server.deploy("lab", "http-lab.wasm");
    let answer = std::thread::scope(|scope| {
        let running = scope.spawn(|| server.get("/run/lab/sleep?700"));
        wait_until("it to run", || server.get("/limits").ok()["running"] == 1);
        server.terminate();
        running.join().unwrap()
    });
    assert_eq!(answer.text(), "slept\n");
    let status = server.child.wait().unwrap();
    assert_eq!(status.code(), Some(0), "{}", server.log_text());
    wait_until("its last word", || server.log_text().contains("stopped"));
}

#[test]
fn a_call_that_does_not_finish_is_abandoned_at_the_drain_limit() {
    let mut server = Server::with(Options::config("[server]\ndrain_ms_max = 500\n"));
    server.deploy("lab", "http-lab.wasm");
    std::thread::scope(|scope| {
        scope.spawn(|| drop(server.try_request("GET", "/run/lab/sleep?20000", &[], b"")));
        wait_until("it to run", || server.get("/limits").ok()["running"] == 1);
        let pid = server.child.id();
        let started = Instant::now();
        server.terminate();
        wait_until("its end", || {
            std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") Z "))
        });
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    });
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
    wait_until("its last word", || server.log_text().contains("1 call(s) did not finish in time"));
}
