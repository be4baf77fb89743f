//! A server under test, a client for it, and the guests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The binary under test. `TENSOR_WASM_TEST_EXE` names another one, where the tests were built on another machine.
pub static EXE: LazyLock<String> = LazyLock::new(|| {
    std::env::var("TENSOR_WASM_TEST_EXE").unwrap_or_else(|_| env!("CARGO_BIN_EXE_tensor-wasm").to_owned())
});

/// The repository. `TENSOR_WASM_TEST_ROOT` names another one, where the tests were built on another machine.
pub fn root() -> PathBuf {
    match std::env::var_os("TENSOR_WASM_TEST_ROOT") {
        Some(root) => root.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().parent().unwrap().to_owned(),
    }
}

/// The path of a built guest. `make test` builds them first; on its own, the first test to ask does.
pub fn guest(name: &str) -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    let path = root().join("target/guests").join(name);
    BUILT.get_or_init(|| {
        if !path.is_file() {
            let built = Command::new("cargo").args(["xtask", "guests"]).current_dir(root()).status().unwrap();
            assert!(built.success(), "cargo xtask guests");
        }
    });
    path
}

pub fn guest_bytes(name: &str) -> Vec<u8> {
    std::fs::read(guest(name)).unwrap()
}

/// Runs the binary to its end.
pub fn tensor_wasm(args: &[&str]) -> Output {
    Command::new(&*EXE).args(args).stdin(Stdio::null()).output().unwrap()
}

/// What tests of devices run on: the CPU, and a GPU where there is one.
pub fn devices() -> Vec<&'static str> {
    if stdout(&tensor_wasm(&["devices"])).contains("cuda:0") {
        return vec!["cpu", "cuda"];
    }
    println!("skipped: no CUDA device");
    vec!["cpu"]
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub struct Server {
    pub child: Child,
    pub addr: String,
    pub data: Arc<tempfile::TempDir>,
    pub log: Arc<Mutex<Vec<String>>>,
    pub audit: Arc<Mutex<Vec<String>>>,
}

#[derive(Default, Clone)]
pub struct Options {
    pub config: String,
    pub env: Vec<(&'static str, String)>,
    pub data: Option<Arc<tempfile::TempDir>>,
    pub device: Option<String>,
}

impl Options {
    pub fn device(mut self, device: &str) -> Options {
        self.device = Some(device.to_owned());
        self
    }

    pub fn config(text: &str) -> Options {
        Options { config: text.to_owned(), ..Options::default() }
    }

    pub fn env(mut self, name: &'static str, value: impl Into<String>) -> Options {
        self.env.push((name, value.into()));
        self
    }

    pub fn data(mut self, data: &Arc<tempfile::TempDir>) -> Options {
        self.data = Some(data.clone());
        self
    }
}

impl Server {
    pub fn start() -> Server {
        Server::with(Options::default())
    }

    pub fn with(options: Options) -> Server {
        Server::try_with(options).unwrap_or_else(|log| panic!("the server did not start:\n{log}"))
    }

    /// A server, or what it said instead of starting.
    pub fn try_with(options: Options) -> Result<Server, String> {
        let data = options.data.unwrap_or_else(|| Arc::new(tempfile::tempdir().unwrap()));
        let config = data.path().join("test-config.toml");
        std::fs::write(&config, &options.config).unwrap_or_default();
        let mut command = Command::new(&*EXE);
        command.args(["serve", "--addr", "127.0.0.1:0", "--data-dir"]).arg(data.path());
        if config.is_file() {
            command.arg("--config").arg(&config);
        }
        if let Some(device) = &options.device {
            command.args(["--device", device]);
        }
        for name in ["TENSOR_WASM_API_TOKENS", "TENSOR_WASM_SERVER", "TENSOR_WASM_TENANT", "TENSOR_WASM_TOKEN"] {
            command.env_remove(name);
        }
        command.env_remove("TENSOR_WASM_SECRETS_KEY").envs(options.env.iter().map(|(k, v)| (k, v)));
        Server::started(command, data)
    }

    /// The server that a command starts, or what it said instead.
    pub fn started(mut command: Command, data: Arc<tempfile::TempDir>) -> Result<Server, String> {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let audit = collect(child.stdout.take().unwrap());
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut early = Vec::new();
        for line in lines.by_ref().map_while(Result::ok) {
            let addr = line.strip_prefix("listening on http://").map(|rest| rest.split(' ').next().unwrap().to_owned());
            early.push(line);
            if let Some(addr) = addr {
                let log = Arc::new(Mutex::new(early));
                let sink = log.clone();
                std::thread::spawn(move || {
                    lines.map_while(Result::ok).for_each(|line| sink.lock().unwrap().push(line))
                });
                return Ok(Server { child, addr, data, log, audit });
            }
        }
        child.wait().unwrap();
        Err(early.join("\n"))
    }

    /// Ends it at once, as a crash would.
    pub fn kill(mut self) -> Arc<tempfile::TempDir> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.data.clone()
    }

    pub fn terminate(&self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    pub fn log_text(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    pub fn deploy(&self, name: &str, file: &str) -> Value {
        self.deploy_bytes(name, &guest_bytes(file)).ok()
    }

    pub fn deploy_bytes(&self, name: &str, wasm: &[u8]) -> Answer {
        self.deploy_with(name, wasm, "{}")
    }

    pub fn deploy_with(&self, name: &str, wasm: &[u8], settings: &str) -> Answer {
        let settings: String = settings.bytes().map(|b| format!("%{b:02x}")).collect();
        let path = format!("/functions?name={name}&settings={settings}");
        self.request("POST", &path, &[("content-type", "application/wasm")], wasm)
    }

    pub fn deploy_wat(&self, name: &str, text: &str) -> Answer {
        self.deploy_bytes(name, &wat::parse_str(text).unwrap())
    }

    pub fn invoke(&self, name: &str, body: &str) -> Answer {
        self.post(&format!("/functions/{name}/invoke"), body)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &str) -> Answer {
        self.request("POST", path, &[("content-type", "application/json")], body.as_bytes())
    }

    pub fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        // The client keeps connections that the server has meanwhile closed as idle; the next one is fresh.
        let again = |_| self.try_request(method, path, headers, body);
        self.try_request(method, path, headers, body).or_else(again).unwrap()
    }

    pub fn try_request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<Answer, ureq::Error> {
        static AGENT: OnceLock<ureq::Agent> = OnceLock::new();
        let agent = AGENT.get_or_init(|| {
            let config = ureq::Agent::config_builder().http_status_as_error(false).max_idle_connections_per_host(64);
            config.timeout_global(Some(Duration::from_secs(120))).build().new_agent()
        });
        let mut request = ureq::http::Request::builder().method(method).uri(self.url(path));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if !body.is_empty() && !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
            request = request.header("content-type", "application/json");
        }
        let is_bare = body.is_empty() && method != "POST";
        let mut response =
            if is_bare { agent.run(request.body(()).unwrap())? } else { agent.run(request.body(body).unwrap())? };
        let status = response.status().as_u16();
        let headers =
            response.headers().iter().map(|(k, v)| (k.to_string(), String::from_utf8_lossy(v.as_bytes()).into_owned()));
        let headers = headers.collect();
        let bytes = response.body_mut().with_config().limit(1 << 30).read_to_vec()?;
        Ok(Answer { status, headers, bytes })
    }

    /// The value of a metric series, 0 if absent.
    pub fn metric(&self, series: &str) -> f64 {
        let page = self.get("/metrics").text();
        let line = page.lines().find(|line| line.rsplit_once(' ').is_some_and(|(name, _)| name == series));
        line.map_or(0.0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
    }

    pub fn wait_for_metric(&self, series: &str, wanted: f64) {
        wait_until(&format!("{series} = {wanted}"), || self.metric(series) == wanted);
    }

    /// A connection to speak HTTP over by hand.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.addr).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    pub fn cli(&self, args: &[&str]) -> Output {
        let mut all = vec!["--server"];
        let url = self.url("");
        all.push(&url);
        all.extend(args);
        tensor_wasm(&all)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            println!("server log:\n{}", self.log.lock().unwrap().join("\n"));
        }
    }
}

fn collect(from: impl Read + Send + 'static) -> Arc<Mutex<Vec<String>>> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = lines.clone();
    std::thread::spawn(move || {
        BufReader::new(from).lines().map_while(Result::ok).for_each(|line| sink.lock().unwrap().push(line));
    });
    lines
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub bytes: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    /// The JSON of a successful answer.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert!((200..300).contains(&self.status), "{}: {}", self.status, self.text());
        if self.bytes.is_empty() { Value::Null } else { self.json() }
    }

    #[track_caller]
    pub fn result(&self) -> Value {
        self.ok()["result"].clone()
    }

    /// The message of a refusal of the given status and kind.
    #[track_caller]
    pub fn refused(&self, status: u16, kind: &str) -> String {
        assert_eq!(self.status, status, "{}", self.text());
        let json = self.json();
        assert_eq!(json["error"]["kind"], kind, "{}", self.text());
        json["error"]["message"].as_str().unwrap().to_owned()
    }
}

#[track_caller]
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < until, "waited 30 s for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads until the peer closes; returns what came, whether or not it ended cleanly.
pub fn read_all(stream: &mut TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    let mut buffer = [0; 64 << 10];
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        all.extend_from_slice(&buffer[..n]);
    }
    all
}

pub fn send(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).unwrap();
}

pub fn percentile(samples: &mut [f64], p: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * p) as usize]
}
