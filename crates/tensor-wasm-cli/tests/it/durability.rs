//! Nothing acknowledged is lost and nothing half-written is visible: crashes, restarts, damaged files, full and
//! read-only disks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::support::{Options, Server, wait_until};

fn module(n: u64) -> Vec<u8> {
    wat::parse_str(format!(r#"(module (func (export "which") (result i64) i64.const {n}))"#)).unwrap()
}

#[test]
fn a_restart_serves_everything_without_compiling_again() {
    let server = Server::start();
    for n in 0..10 {
        server.deploy_bytes(&format!("f{n}"), &module(n)).ok();
    }
    server.deploy("hello", "hello.wasm");
    assert_eq!(server.metric("tensor_wasm_compiles_total"), 11.0);
    // An address has the server's port in it, which is another one after the restart.
    let listed = |server: &Server| {
        let mut functions = server.get("/functions").ok();
        for function in functions.as_array_mut().unwrap() {
            let address = function.as_object_mut().unwrap().remove("address");
            assert_eq!(address.is_some(), function["kind"] == "http_handler", "{function}");
        }
        functions
    };
    let before = listed(&server);
    let data = server.kill();
    let server = Server::with(Options::default().data(&data));
    assert_eq!(listed(&server), before);
    for n in 0..10 {
        assert_eq!(server.invoke(&format!("f{n}"), "{}").result(), n);
    }
    assert_eq!(server.get("/run/hello/").text(), "Hello from TensorWasm!\n");
    assert_eq!(server.metric("tensor_wasm_compiles_total"), 0.0);
    assert_eq!(server.metric("tensor_wasm_artifact_loads_total"), 11.0);
}

#[test]
fn another_engine_compiles_again_from_the_kept_source() {
    let server = Server::with(Options::config("[engine]\noptimize = \"none\"\n"));
    server.deploy("math", "math.wasm");
    server.deploy("hello", "hello.wasm");
    let data = server.kill();
    let server = Server::with(Options::config("[engine]\noptimize = \"speed\"\n").data(&data));
    assert_eq!(server.invoke("math", r#"{"export":"add","args":[1,2]}"#).result(), 3);
    assert!(server.metric("tensor_wasm_compiles_total") >= 1.0);
    // The rest follows in the background, without being asked for.
    server.wait_for_metric("tensor_wasm_compiles_total", 2.0);
    assert_eq!(server.get("/run/hello/").text(), "Hello from TensorWasm!\n");
}

#[test]
fn two_servers_do_not_share_a_data_directory() {
    let server = Server::start();
    let second = Server::try_with(Options::default().data(&server.data)).err().unwrap();
    assert!(second.contains("in use by another server"), "{second}");
}

fn find(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(find(&path, extension));
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
    found
}

fn damage(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    std::fs::write(path, bytes).unwrap();
}

fn quarantined(data: &tempfile::TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(data.path().join("quarantine")).unwrap().flatten();
    entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_damaged_artifact_is_set_aside_and_made_anew() {
    let server = Server::start();
    server.deploy("math", "math.wasm");
    let data = server.kill();
    damage(&find(&data.path().join("artifacts"), "cwasm")[0]);
    let server = Server::with(Options::default().data(&data));
    assert_eq!(server.invoke("math", r#"{"export":"add","args":[1,2]}"#).result(), 3);
    assert_eq!(server.metric("tensor_wasm_compiles_total"), 1.0);
    assert!(quarantined(&data).iter().any(|name| name.contains(".cwasm")), "{:?}", quarantined(&data));
    wait_until("the log", || server.log_text().contains("digest"));
}

#[test]
fn a_damaged_source_is_named_and_the_rest_is_served() {
    let server = Server::start();
    let revision = server.deploy_bytes("bad", &module(1)).ok()["revision"].as_str().unwrap().to_owned();
    let bad = blake3::hash(&module(1)).to_hex().to_string();
    server.deploy_bytes("good", &module(2)).ok();
    let data = server.kill();
    damage(&data.path().join(format!("sources/{}/{bad}.wasm", &bad[..2])));
    std::fs::remove_dir_all(data.path().join("artifacts")).unwrap();
    let server = Server::with(Options::default().data(&data));
    assert_eq!(server.invoke("good", "{}").result(), 2);
    // A caller may be a stranger, who need not know where the data directory is.
    let message = server.invoke("bad", "{}").refused(503, "capacity_exhausted");
    assert!(message.contains("cannot be run at present") && !message.contains("sources/"), "{message}");
    wait_until("its mark", || server.get("/functions/bad/revisions").ok()[0]["quarantined"].is_string());
    server.invoke("bad", "{}").refused(503, "capacity_exhausted");
    let reason = server.get("/functions/bad").ok()["unavailable"].as_str().unwrap().to_owned();
    assert!(reason.contains("quarantined") && reason.contains(&revision[..12]), "{reason}");
    assert!(quarantined(&data).iter().any(|name| name.contains(&bad)), "{:?}", quarantined(&data));
    // Deploying it again brings it back.
    server.deploy_bytes("bad", &module(1)).ok();
    assert_eq!(server.invoke("bad", "{}").result(), 1);
}

#[test]
fn a_source_damaged_while_nobody_looks_is_found_in_the_background() {
    let server = Server::start();
    server.deploy_bytes("bad", &module(1)).ok();
    let bad = blake3::hash(&module(1)).to_hex().to_string();
    let data = server.kill();
    damage(&data.path().join(format!("sources/{}/{bad}.wasm", &bad[..2])));
    let server = Server::with(Options::default().data(&data));
    wait_until("its mark", || server.get("/functions/bad/revisions").ok()[0]["quarantined"].is_string());
}

#[test]
fn a_missing_source_is_said_at_start() {
    let server = Server::start();
    server.deploy_bytes("bad", &module(1)).ok();
    server.deploy_bytes("good", &module(2)).ok();
    let data = server.kill();
    let first = blake3::hash(&module(1)).to_hex().to_string();
    std::fs::remove_file(data.path().join(format!("sources/{}/{first}.wasm", &first[..2]))).unwrap();
    let server = Server::with(Options::default().data(&data));
    assert!(server.log_text().contains("quarantined function bad"), "{}", server.log_text());
    server.invoke("bad", "{}").refused(503, "capacity_exhausted");
    assert_eq!(server.invoke("good", "{}").result(), 2);
}

#[test]
fn a_damaged_catalog_is_set_aside_and_rebuilt() {
    for overwrite in ["everything", "the middle"] {
        let server = Server::start();
        for n in 0..20 {
            server.deploy_bytes(&format!("f{n}"), &module(n)).ok();
        }
        server.request("DELETE", "/functions/f0", &[], b"");
        let data = server.kill();
        let path = data.path().join("catalog.redb");
        let mut bytes = std::fs::read(&path).unwrap();
        let range = if overwrite == "everything" { 0..bytes.len() } else { 4096..bytes.len() / 2 };
        bytes[range].fill(0x5a);
        std::fs::write(&path, bytes).unwrap();
        let server = Server::with(Options::default().data(&data));
        assert!(server.log_text().contains("catalog.redb"), "{overwrite}: {}", server.log_text());
        assert_eq!(server.get("/functions").ok().as_array().unwrap().len(), 19, "{overwrite}");
        for n in 1..20 {
            assert_eq!(server.invoke(&format!("f{n}"), "{}").result(), n, "{overwrite}");
        }
        assert!(quarantined(&data).iter().any(|name| name.contains("catalog.redb")));
        // And it is durable again.
        server.deploy_bytes("new", &module(99)).ok();
        let data = server.kill();
        let server = Server::with(Options::default().data(&data));
        assert_eq!(server.invoke("new", "{}").result(), 99);
    }
}

/// A small file system of its own, unmounted at the end. Needs root; without it the test says so and skips.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(dir: &Path, size: &str) -> Option<SmallDisk> {
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(dir).output();
        match mounted {
            Ok(output) if output.status.success() => Some(SmallDisk(dir.to_owned())),
            _ => {
                println!("skipped: mounting a file system needs root");
                None
            }
        }
    }

    fn remount(&self, options: &str) {
        let status = Command::new("mount").args(["-o", &format!("remount,{options}")]).arg(&self.0).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_refuses_deploys_and_loses_nothing() {
    let data = Arc::new(tempfile::tempdir().unwrap());
    let Some(_disk) = SmallDisk::mount(data.path(), "12m") else { return };
    let server = Server::with(Options::default().data(&data));
    server.deploy_bytes("kept", &module(7)).ok();
    std::fs::write(data.path().join("ballast"), vec![0; 64 << 20]).unwrap_err();
    let refused = server.deploy_bytes("late", &crate::support::guest_bytes("http-lab.wasm"));
    let message = refused.refused(503, "capacity_exhausted");
    assert!(message.contains("No space left") && message.contains("nothing was changed"), "{message}");
    assert_eq!(server.invoke("kept", "{}").result(), 7);
    server.get("/functions/late").refused(404, "not_found");
    let job = server.post("/functions/kept/invoke-async", "{}");
    assert!(job.status == 202 || job.status == 503, "{}", job.text());
    // With room again it goes on, without a restart.
    std::fs::remove_file(data.path().join("ballast")).unwrap();
    server.deploy("late", "http-lab.wasm");
    assert_eq!(server.get("/run/late/").text(), "lab\n");
    let data = server.kill();
    let server = Server::with(Options::default().data(&data));
    assert_eq!(server.invoke("kept", "{}").result(), 7);
    drop(server);
}

#[test]
fn a_read_only_disk_refuses_changes_and_serves_on() {
    let data = Arc::new(tempfile::tempdir().unwrap());
    let Some(disk) = SmallDisk::mount(data.path(), "64m") else { return };
    let server = Server::with(Options::default().data(&data));
    server.deploy_bytes("kept", &module(7)).ok();
    // The store's file is open for writing, so the whole mount cannot be made read-only under it; its folders can.
    disk.remount("size=64m");
    let sources = data.path().join("sources");
    let bound = Command::new("mount").args(["--bind"]).arg(&sources).arg(&sources).status().unwrap();
    assert!(bound.success());
    let _unbind = SmallDisk(sources.clone());
    let read_only = Command::new("mount").args(["-o", "remount,ro,bind"]).arg(&sources).status().unwrap();
    assert!(read_only.success());
    let message = server.deploy_bytes("late", &module(8)).refused(503, "capacity_exhausted");
    assert!(message.contains("Read-only"), "{message}");
    assert_eq!(server.invoke("kept", "{}").result(), 7);
    server.get("/functions/late").refused(404, "not_found");
}

#[test]
fn an_unwritable_data_directory_is_explained() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output =
        crate::support::tensor_wasm(&["serve", "--addr", "127.0.0.1:0", "--data-dir", file.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let errors = crate::support::stderr(&output);
    assert!(errors.contains(file.path().to_str().unwrap()), "{errors}");
}

/// What the server acknowledged.
#[derive(Default)]
struct Acknowledged {
    /// Function → the value it returns, `None` once its deletion was acknowledged. While a change is under way the
    /// function is in `unsure`.
    functions: BTreeMap<String, Option<u64>>,
    unsure: BTreeMap<String, (Option<u64>, Option<u64>)>,
    jobs: BTreeMap<String, u64>,
}

/// Kills the server at a random moment under load, again and again. `TENSOR_WASM_TEST_KILLS` sets how often.
#[test]
fn kill_9_at_any_moment_loses_nothing_acknowledged() {
    let kills: u32 = std::env::var("TENSOR_WASM_TEST_KILLS").map_or(8, |n| n.parse().unwrap());
    let seed = std::env::var("TENSOR_WASM_TEST_SEED").map_or_else(|_| rand::random(), |n| n.parse().unwrap());
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let data = Arc::new(tempfile::tempdir().unwrap());
    let acknowledged = Mutex::new(Acknowledged::default());
    let serial = AtomicU64::new(1);
    let (mut changes, mut checks) = (0, 0);
    for round in 0..kills {
        let server = Server::with(Options::default().data(&data));
        checks += verify(&server, &mut acknowledged.lock().unwrap(), round);
        let stop = AtomicBool::new(false);
        let after = Duration::from_micros(rng.random_range(20_000..400_000));
        let done: Vec<u64> = std::thread::scope(|scope| {
            let seeds: Vec<u64> = (0..4).map(|_| rng.random()).collect();
            let (server, stop, serial, acknowledged) = (&server, &stop, &serial, &acknowledged);
            let loads: Vec<_> = seeds
                .into_iter()
                .enumerate()
                .map(|(thread, seed)| scope.spawn(move || load(server, thread, seed, stop, serial, acknowledged)))
                .collect();
            std::thread::sleep(after);
            let pid = rustix::process::Pid::from_raw(server.child.id() as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            stop.store(true, Ordering::Release);
            loads.into_iter().map(|l| l.join().unwrap()).collect()
        });
        changes += done.iter().sum::<u64>();
        server.kill();
    }
    let server = Server::with(Options::default().data(&data));
    checks += verify(&server, &mut acknowledged.lock().unwrap(), kills);
    println!("{kills} kills, {changes} acknowledged changes, {checks} checks");
    assert!(changes >= u64::from(kills), "the load did something: {changes}");
}

/// Deploys, redeploys, deletes and submits jobs until the server is gone; notes what was acknowledged.
fn load(
    server: &Server,
    thread: usize,
    seed: u64,
    stop: &AtomicBool,
    serial: &AtomicU64,
    acknowledged: &Mutex<Acknowledged>,
) -> u64 {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut done = 0;
    while !stop.load(Ordering::Acquire) {
        // Each thread has names of its own, so that what a name should be is certain.
        let name = format!("f{thread}-{}", rng.random_range(0..8));
        let before = acknowledged.lock().unwrap().functions.get(&name).copied().flatten();
        let n = serial.fetch_add(1, Ordering::Relaxed);
        match rng.random_range(0..10) {
            0..6 => {
                acknowledged.lock().unwrap().unsure.insert(name.clone(), (before, Some(n)));
                let path = format!("/functions?name={name}");
                let answer = server.try_request("POST", &path, &[("content-type", "application/wasm")], &module(n));
                if let Ok(answer) = answer {
                    assert_eq!(answer.status, 201, "{}", answer.text());
                    let mut acknowledged = acknowledged.lock().unwrap();
                    acknowledged.functions.insert(name.clone(), Some(n));
                    acknowledged.unsure.remove(&name);
                    done += 1;
                }
            }
            6 if before.is_some() => {
                acknowledged.lock().unwrap().unsure.insert(name.clone(), (before, None));
                if let Ok(answer) = server.try_request("DELETE", &format!("/functions/{name}"), &[], b"") {
                    assert_eq!(answer.status, 204, "{}", answer.text());
                    let mut acknowledged = acknowledged.lock().unwrap();
                    acknowledged.functions.insert(name.clone(), None);
                    acknowledged.unsure.remove(&name);
                    done += 1;
                }
            }
            _ => {
                let Some(n) = before else { continue };
                let path = format!("/functions/{name}/invoke-async");
                if let Ok(answer) = server.try_request("POST", &path, &[], b"{}")
                    && answer.status == 202
                {
                    let id = answer.json()["job_id"].as_str().unwrap().to_owned();
                    acknowledged.lock().unwrap().jobs.insert(id, n);
                    done += 1;
                }
            }
        }
    }
    done
}

/// Everything acknowledged is there and works; what was under way is either as before or as asked, never in between.
fn verify(server: &Server, acknowledged: &mut Acknowledged, round: u32) -> usize {
    let found = |name: &str| {
        let answer = server.invoke(name, "{}");
        match answer.status {
            404 => None,
            200 => Some(answer.result().as_u64().unwrap()),
            _ => panic!("round {round}: {name}: {}", answer.text()),
        }
    };
    for (name, (before, after)) in std::mem::take(&mut acknowledged.unsure) {
        let now = found(&name);
        assert!(now == before || now == after, "round {round}: {name} is {now:?}, was {before:?}, should be {after:?}");
        acknowledged.functions.insert(name, now);
    }
    for (name, expected) in &acknowledged.functions {
        assert_eq!(found(name), *expected, "round {round}: {name}");
    }
    let listed = server.get("/functions").ok();
    let expected = acknowledged.functions.values().flatten().count();
    assert_eq!(listed.as_array().unwrap().len(), expected, "round {round}: nothing that was not asked for");
    // A compilation for a job may be under way right now; what an earlier server left half-written is not finished
    // ever.
    wait_until("tmp/ to be empty", || std::fs::read_dir(server.data.path().join("tmp")).unwrap().count() == 0);
    for id in acknowledged.jobs.keys() {
        let state = server.get(&format!("/jobs/{id}")).ok()["state"].as_str().unwrap().to_owned();
        assert!(["queued", "running", "succeeded", "failed"].contains(&state.as_str()), "round {round}: {id}: {state}");
    }
    acknowledged.functions.len() + acknowledged.jobs.len()
}
