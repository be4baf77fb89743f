//! Asynchronous invocations: their life, retries, cancellation, idempotency, bounds, and survival of a crash.

use serde_json::Value;

use crate::support::{Options, Server, wait_until};

fn submit(server: &Server, function: &str, body: &str) -> String {
    let answer = server.post(&format!("/functions/{function}/invoke-async"), body);
    assert_eq!(answer.status, 202, "{}", answer.text());
    answer.ok()["job_id"].as_str().unwrap().to_owned()
}

fn job(server: &Server, id: &str) -> Value {
    server.get(&format!("/jobs/{id}")).ok()
}

fn finished(server: &Server, id: &str) -> Value {
    wait_until("the job", || !["queued", "running"].contains(&job(server, id)["state"].as_str().unwrap()));
    job(server, id)
}

#[test]
fn a_job_runs_and_keeps_its_result() {
    let server = Server::start();
    server.deploy("math", "math.wasm");
    let id = submit(&server, "math", r#"{"export":"add","args":[20,22]}"#);
    let done = finished(&server, &id);
    assert_eq!((&done["state"], &done["result"], &done["attempts"]), (&"succeeded".into(), &42.into(), &1.into()));
    assert_eq!(server.get("/jobs").ok()["jobs"][0]["id"], id.as_str());
    server.get("/jobs/nonsense").refused(404, "not_found");
    let theirs = server.request("GET", &format!("/jobs/{id}"), &[("x-tensorwasm-tenant", "other")], b"");
    theirs.refused(404, "not_found");
    server.request("DELETE", &format!("/jobs/{id}"), &[], b"").refused(409, "conflict");
    server.post("/functions/nobody/invoke-async", "{}").refused(404, "not_found");
    server.post("/functions/math/invoke-async", r#"{"attempts":99}"#).refused(400, "invalid_args");
    // A mistake in the call is found when it runs, and not tried again.
    let id = submit(&server, "math", r#"{"export":"add","args":["x","y"],"attempts":5}"#);
    let failed = finished(&server, &id);
    assert_eq!((&failed["state"], &failed["error"]["kind"]), (&"failed".into(), &"invalid_args".into()));
    assert_eq!(failed["attempts"], 1);
}

#[test]
fn a_faulting_job_is_tried_as_often_as_asked() {
    let server = Server::start();
    server.deploy("hostile", "hostile.wasm");
    let once = submit(&server, "hostile", r#"{"export":"trap"}"#);
    let thrice = submit(&server, "hostile", r#"{"export":"trap","attempts":3}"#);
    assert_eq!(finished(&server, &once)["attempts"], 1);
    let failed = finished(&server, &thrice);
    assert_eq!((&failed["state"], &failed["attempts"]), (&"failed".into(), &3.into()));
    assert_eq!(failed["error"]["kind"], "guest_trap");
    assert!(failed["error"]["message"].as_str().unwrap().contains("unreachable"));
}

#[test]
fn jobs_can_be_cancelled_while_waiting_and_while_running() {
    let server = Server::with(Options::config("[jobs]\nconcurrency_max = 1\n"));
    server.deploy("command", "command.wasm");
    let running = submit(&server, "command", r#"{"args":["sleep","60000"]}"#);
    let waiting = submit(&server, "command", r#"{"args":["hello"]}"#);
    wait_until("the first to run", || job(&server, &running)["state"] == "running");
    assert_eq!(job(&server, &waiting)["state"], "queued");
    for id in [&waiting, &running] {
        assert_eq!(server.request("DELETE", &format!("/jobs/{id}"), &[], b"").ok()["state"], "cancelled");
    }
    server.wait_for_metric("tensor_wasm_active_instances", 0.0);
    let next = submit(&server, "command", r#"{"args":["hello"]}"#);
    assert_eq!(finished(&server, &next)["result"]["stdout"], "hello, world\n");
    assert_eq!(server.metric("tensor_wasm_jobs_active"), 0.0);
    assert_eq!(server.metric("tensor_wasm_jobs_queued"), 0.0);
}

#[test]
fn a_job_between_two_attempts_can_be_cancelled() {
    let server = Server::start();
    server.deploy("hostile", "hostile.wasm");
    let id = submit(&server, "hostile", r#"{"export":"trap","attempts":10}"#);
    wait_until("the fourth attempt to fail", || {
        let job = job(&server, &id);
        job["attempts"] == 4 && job["state"] == "queued"
    });
    assert_eq!(server.request("DELETE", &format!("/jobs/{id}"), &[], b"").ok()["state"], "cancelled");
    std::thread::sleep(std::time::Duration::from_millis(2500));
    let later = job(&server, &id);
    assert_eq!((&later["state"], &later["attempts"]), (&"cancelled".into(), &4.into()));
    let huge = format!(r#"{{"export":"trap","args":["{}"]}}"#, "x".repeat(300_000));
    server.post("/functions/hostile/invoke-async", &huge).refused(413, "body_too_large");
}

#[test]
fn a_client_that_leaves_while_submitting_loses_nothing() {
    let server = Server::start();
    server.deploy("math", "math.wasm");
    let body = r#"{"export":"add","args":[1,2]}"#;
    for n in 0..20 {
        let mut stream = server.connect();
        let head =
            "POST /functions/math/invoke-async HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
        crate::support::send(
            &mut stream,
            &format!("{head}idempotency-key: k{n}\r\ncontent-length: {}\r\n\r\n{body}", body.len()),
        );
        drop(stream);
        let again = [("idempotency-key", format!("k{n}"))];
        let again: Vec<(&str, &str)> = again.iter().map(|(k, v)| (*k, v.as_str())).collect();
        let answer = server.request("POST", "/functions/math/invoke-async", &again, body.as_bytes()).ok();
        assert_eq!(finished(&server, answer["job_id"].as_str().unwrap())["result"], 3);
    }
    wait_until("every job", || {
        let jobs = server.get("/jobs?limit=200").ok();
        jobs["jobs"].as_array().unwrap().iter().all(|job| job["state"] == "succeeded")
    });
}

#[test]
fn an_idempotency_key_makes_one_job() {
    let server = Server::start();
    server.deploy("math", "math.wasm");
    let submit = |key: &str, body: &str| {
        server.request("POST", "/functions/math/invoke-async", &[("idempotency-key", key)], body.as_bytes())
    };
    let body = r#"{"export":"add","args":[1,2]}"#;
    let ids: Vec<String> = std::thread::scope(|scope| {
        let submits: Vec<_> = (0..8).map(|_| scope.spawn(|| submit("k1", body).ok())).collect();
        submits.into_iter().map(|s| s.join().unwrap()["job_id"].as_str().unwrap().to_owned()).collect()
    });
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    assert_ne!(submit("k2", body).ok()["job_id"], ids[0].as_str());
    submit("k1", r#"{"export":"add","args":[1,3]}"#).refused(409, "conflict");
    submit(&"k".repeat(300), body).refused(400, "invalid_args");
}

#[test]
fn unfinished_jobs_are_bounded() {
    let server = Server::with(Options::config("[jobs]\nconcurrency_max = 1\nqueue_max = 5\n[limits]\njobs_max = 3\n"));
    server.deploy("command", "command.wasm");
    let ids: Vec<String> = (0..3).map(|_| submit(&server, "command", r#"{"args":["sleep","60000"]}"#)).collect();
    let refused = server.post("/functions/command/invoke-async", "{}");
    let message = refused.refused(429, "tenant_capacity_exhausted");
    assert!(message.contains("jobs_max") && refused.header("retry-after").is_some(), "{message}");
    for id in ids {
        server.request("DELETE", &format!("/jobs/{id}"), &[], b"").ok();
    }
    submit(&server, "command", "{}");
}

#[test]
fn jobs_survive_planned_restarts_however_many() {
    let config = "[server]\ndrain_ms_max = 100\n";
    let mut server = Server::with(Options::config(config));
    server.deploy("command", "command.wasm");
    let long = submit(&server, "command", r#"{"args":["sleep","1500"]}"#);
    for _ in 0..4 {
        wait_until("it to run", || job(&server, &long)["state"] == "running");
        server.terminate();
        assert!(server.child.wait().unwrap().success());
        server = Server::with(Options::config(config).data(&server.data));
    }
    let done = finished(&server, &long);
    assert_eq!((&done["state"], &done["attempts"]), (&"succeeded".into(), &1.into()), "{done}");
}

#[test]
fn jobs_survive_a_crash() {
    // Four workers, of which one tenant may hold three.
    let server = Server::with(Options::config("[jobs]\nconcurrency_max = 4\n"));
    server.deploy("command", "command.wasm");
    server.deploy("math", "math.wasm");
    let done = submit(&server, "math", r#"{"export":"add","args":[1,2]}"#);
    finished(&server, &done);
    let running: Vec<String> = (0..3).map(|_| submit(&server, "command", r#"{"args":["sleep","1500"]}"#)).collect();
    let waiting = submit(&server, "math", r#"{"export":"add","args":[3,4]}"#);
    wait_until("three to run", || running.iter().all(|id| job(&server, id)["state"] == "running"));
    let data = server.kill();

    let server = Server::with(Options::config("").data(&data));
    assert_eq!(job(&server, &done)["result"], 3, "finished before the crash");
    assert_eq!(finished(&server, &waiting)["result"], 7, "was waiting");
    for id in &running {
        let again = finished(&server, id);
        assert_eq!((&again["state"], &again["attempts"]), (&"succeeded".into(), &2.into()), "was running: run again");
    }
}
