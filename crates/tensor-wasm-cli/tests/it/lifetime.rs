//! Worker processes end with their server, at whatever moment it is killed: while it starts, while its device worker
//! starts, while a compile worker compiles.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{EXE, Options, Server};

/// How soon nothing may be left of a server: a worker's hang-up takes microseconds, its exit unmaps a slab.
const GONE_MAX: Duration = Duration::from_secs(10);

/// A variable that server and workers pass on, and that nothing reads where there is no CUDA.
const MARKER: &str = "CUDA_CACHE_PATH";

/// Processes that carry a server's marker: itself and its workers, also those whose parent is gone. A zombie has none.
/// A compile worker has no environment, but its order names files of the data directory.
fn marked(data: &Path) -> Vec<(i32, String)> {
    let marker = format!("{MARKER}={}\0", data.display());
    let carries = |pid: i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
        let is_marked = environment.windows(marker.len()).any(|window| window == marker.as_bytes());
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().replace('\0', " ");
        let is_compiling = line.contains(" compile-worker ") && line.contains(data.to_str()?);
        (is_marked || is_compiling).then_some(line)
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| Some((pid, carries(pid)?))).collect()
}

/// Sees to it that nothing is left of a server that was killed.
fn assert_gone(data: &Path, moment: &str) {
    let until = Instant::now() + GONE_MAX;
    let mut left = marked(data);
    while !left.is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
        left = marked(data);
    }
    // What is left is ended by its number before the test says so.
    for (pid, _) in &left {
        let pid = rustix::process::Pid::from_raw(*pid).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    assert!(left.is_empty(), "{GONE_MAX:?} after its server was killed {moment}: {left:?}");
}

fn serve(data: &Path) -> Child {
    let mut command = Command::new(&*EXE);
    command.args(["serve", "--addr", "127.0.0.1:0", "--device", "cpu", "--data-dir"]).arg(data);
    command.env(MARKER, data).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn kill(mut server: Child, data: &Path, moment: &str) {
    server.kill().unwrap();
    server.wait().unwrap();
    assert_gone(data, moment);
}

#[test]
fn no_worker_outlives_a_server_that_is_killed_while_it_starts() {
    let started = Instant::now();
    // After a fixed time from its start: whatever happens then.
    for step in 0..60 {
        let delay = Duration::from_micros(step * step * 60);
        let data = tempfile::tempdir().unwrap();
        let server = serve(data.path());
        std::thread::sleep(delay);
        kill(server, data.path(), &format!("{delay:?} after its start"));
    }
    // From the moment on at which its worker is there, by small steps: before it runs, while it maps, when it is ready.
    let mut tried = 0;
    for step in 0..40 {
        let delay = Duration::from_micros(step * step * 25);
        let data = tempfile::tempdir().unwrap();
        let mut server = serve(data.path());
        let children = format!("/proc/{}/task", server.id());
        let has_child = || {
            let tasks = std::fs::read_dir(&children).into_iter().flatten().flatten();
            let of_task = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).ok();
            tasks.filter_map(of_task).any(|children| !children.is_empty())
        };
        while !has_child() && server.try_wait().unwrap().is_none() {}
        tried += u32::from(has_child());
        std::thread::sleep(delay);
        kill(server, data.path(), &format!("{delay:?} after its device worker's start"));
    }
    assert!(tried > 30, "only {tried} of 40 servers had a worker");
    println!("100 servers killed while they started in {:?}", started.elapsed());
}

#[test]
fn no_compile_worker_outlives_a_server_that_is_killed_while_it_compiles() {
    // Some hundred milliseconds of Cranelift.
    let adds = "local.get 0 i32.const 3 i32.mul local.get 0 i32.add local.set 0 ".repeat(200);
    let function = |n: u32| format!("(func (export \"f{n}\") (param i32) (result i32) {adds} local.get 0)");
    let text = format!("(module {})", (0..200).map(function).collect::<String>());
    let wasm = wat::parse_str(text).unwrap();
    for step in 0..10_u64 {
        let data = Arc::new(tempfile::tempdir().unwrap());
        let marker = data.path().to_str().unwrap();
        let server = Server::with(Options::default().device("cpu").data(&data).env(MARKER, marker));
        let url = server.url("/functions?name=slow");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Answered or cut off: whatever becomes of it.
                let request = ureq::post(&url).header("content-type", "application/wasm");
                let _ = request.send(&wasm[..]);
            });
            let until = Instant::now() + Duration::from_secs(30);
            while !marked(data.path()).iter().any(|(_, line)| line.contains("compile-worker")) {
                assert!(Instant::now() < until, "no compile worker was started");
            }
            let delay = Duration::from_micros(step * step * 1_000);
            std::thread::sleep(delay);
            server.kill();
            assert_gone(data.path(), &format!("{delay:?} after its compile worker's start"));
        });
    }
}
