use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use tensor_wasm_api::{AuditTarget, Server, ServerOptions, Telemetry, Tokens};
use tensor_wasm_exec::catalog::{SecretsAccess, SecretsKey};
use tensor_wasm_exec::{Config, Runtime};
use tensor_wasm_gpu::{Device, DeviceChoice, DeviceEvent, DeviceKind, Events, OpenOptions, Placement};
use tokio::signal::unix::{SignalKind, signal};

use crate::output::write;
use crate::{Ended, Failed};

/// Serve functions over HTTP until interrupted; then finish running calls and exit 0.
///
/// Environment: TENSOR_WASM_API_TOKENS (tokens and the tenants they speak for), TENSOR_WASM_API_RATE_LIMIT_QPS and
/// TENSOR_WASM_API_RATE_LIMIT_BURST (every tenant's rate), TENSOR_WASM_API_AUDIT_LOG (stdout, none or file:PATH),
/// TENSOR_WASM_SECRETS_KEY (32 bytes that functions' secrets are sealed with), TENSOR_WASM_LOG (info, debug…),
/// TENSOR_WASM_OTLP_ENDPOINT (where spans go, as http://host:4318).
#[derive(clap::Args)]
pub(crate) struct Serve {
    /// Where to listen; a name stands for all its addresses. Anything but loopback needs tokens.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "HOST:PORT")]
    addr: String,
    /// Where functions, artifacts and jobs are kept.
    #[arg(long, default_value = "tensor-wasm-data", value_name = "DIR")]
    data_dir: PathBuf,
    /// auto (a GPU where there is one), cpu, cuda or cuda:N. With cuda, it does not start without.
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: DeviceChoice,
    /// Limits and tenants (TOML); defaults apply without one.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the configuration this would serve with, every key explained, and exit.
    #[arg(long)]
    print_config: bool,
    /// Give up all functions' secrets, because their key is lost; functions that had some refuse calls until they are
    /// set again or deleted.
    #[arg(long)]
    forget_secrets: bool,
}

impl Serve {
    pub(crate) fn execute(self) -> Ended {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let log = variable("TENSOR_WASM_LOG").unwrap_or_else(|| "info".to_owned());
        let telemetry =
            Telemetry::start(&log, variable("TENSOR_WASM_OTLP_ENDPOINT").as_deref()).map_err(Failed::Usage)?;
        let tokens = Tokens::parse(&variable("TENSOR_WASM_API_TOKENS").unwrap_or_default()).map_err(Failed::Usage)?;
        let audit = match variable("TENSOR_WASM_API_AUDIT_LOG") {
            Some(text) => AuditTarget::parse(&text).map_err(Failed::Usage)?,
            None => AuditTarget::default(),
        };
        let mut config = self.read_config()?;
        if let Some(qps) = number(variable("TENSOR_WASM_API_RATE_LIMIT_QPS"), "TENSOR_WASM_API_RATE_LIMIT_QPS")? {
            config.limits.rate_per_second = qps;
        }
        if let Some(burst) = number(variable("TENSOR_WASM_API_RATE_LIMIT_BURST"), "TENSOR_WASM_API_RATE_LIMIT_BURST")? {
            config.limits.rate_burst = burst;
        }
        config.check().map_err(Failed::Usage)?;
        if self.print_config {
            write(format_args!("{}", config.explained().map_err(Failed::No)?));
            return Ok(ExitCode::SUCCESS);
        }
        let secrets = SecretsAccess { key: secrets_key(&config)?, forget: self.forget_secrets };
        // Each connection is a file; the soft limit is for programs that use select(2).
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let raised = rustix::process::Rlimit { current: files.maximum, maximum: files.maximum };
        let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised);
        let exe = std::env::current_exe().map_err(|e| Failed::No(e.to_string()))?;
        let (tell, device_events) = std::sync::mpsc::channel();
        let options = device_options(self.device, &exe, tell);
        // Asked for by name, it must be there; otherwise functions that need none are served while it is opened.
        let device = match self.device {
            DeviceChoice::Cuda(_) => Some(Device::open(&options).map_err(|e| Failed::No(format!("--device: {e}")))?),
            DeviceChoice::Auto | DeviceChoice::Cpu => None,
        };
        let opened = Runtime::open_with(&self.data_dir, config, Some(exe), secrets);
        let (runtime, damages) = opened.map_err(|e| Failed::No(e.to_string()))?;
        for damage in &damages {
            eprintln!("warning: quarantined {}: {}", damage.what, damage.why);
        }
        match device {
            Some(device) => attach(&runtime, device, &options),
            None => open_later(&runtime, options)?,
        }
        let exporting = telemetry.is_exporting();
        let options = ServerOptions { addr: self.addr, tokens, audit, exporting, device_events: Some(device_events) };
        let server = Server::bind(runtime.clone(), options).map_err(|e| Failed::Usage(e.to_string()))?;
        let addrs = server.local_addrs().map_err(|e| Failed::No(e.to_string()))?;
        let addrs: Vec<String> = addrs.iter().map(|addr| format!("http://{addr}")).collect();
        eprintln!(
            "listening on {} with {} function(s) in {}",
            addrs.join(" and "),
            runtime.catalog.len(),
            self.data_dir.display()
        );

        let control = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let control = control.map_err(|e| Failed::No(e.to_string()))?;
        let served = control.block_on(server.run(stopped()));
        control.shutdown_background();
        drop(telemetry);
        match served {
            Ok(0) => eprintln!("stopped"),
            Ok(abandoned) => eprintln!("stopped; {abandoned} call(s) did not finish in time"),
            Err(error) => return Err(Failed::No(error.to_string())),
        }
        Ok(ExitCode::SUCCESS)
    }

    fn read_config(&self) -> Result<Config, Failed> {
        let Some(path) = &self.config else { return Ok(Config::default()) };
        let text = std::fs::read_to_string(path).map_err(|e| Failed::Usage(format!("{}: {e}", path.display())))?;
        Config::parse(&text).map_err(|e| Failed::Usage(format!("{}: {e}", path.display())))
    }
}

/// The key that secrets are sealed with, from the environment or the file the configuration names.
fn secrets_key(config: &Config) -> Result<Option<SecretsKey>, Failed> {
    let (text, from) = match (std::env::var("TENSOR_WASM_SECRETS_KEY"), &config.server.secrets_key_file) {
        (Ok(text), _) if !text.is_empty() => (text, "TENSOR_WASM_SECRETS_KEY".to_owned()),
        (_, Some(path)) => {
            let text = std::fs::read_to_string(path);
            let from = format!("[server] secrets_key_file, {}", path.display());
            (text.map_err(|e| Failed::Usage(format!("{from}: {e}")))?, from)
        }
        (_, None) => return Ok(None),
    };
    SecretsKey::parse(&text).map(Some).map_err(|e| Failed::Usage(format!("{from}: {e}")))
}

fn device_options(choice: DeviceChoice, exe: &std::path::Path, tell: Sender<DeviceEvent>) -> OpenOptions {
    let tell = Mutex::new(tell);
    let listener = move |event: DeviceEvent| {
        match &event {
            DeviceEvent::Lost { why } => tracing::error!(why, "the device worker was lost"),
            DeviceEvent::Restored { after } => tracing::warn!(?after, "the device is back, with a new worker"),
        }
        if let Ok(tell) = tell.lock() {
            let _ = tell.send(event);
        }
    };
    // The CPU too: what compiles and runs strangers' kernels is not the server.
    let placement = Placement::Process { exe: exe.to_owned(), args: vec!["device-worker".to_owned()] };
    let host = tensor_wasm_exec::engine::cpu_kernels::host_kernels();
    OpenOptions { choice, placement, events: Events(Some(Arc::new(listener))), host, ..OpenOptions::default() }
}

/// Opens a device in a thread of its own and gives it to the runtime.
fn open_later(runtime: &Arc<Runtime>, options: OpenOptions) -> Result<(), Failed> {
    let runtime = Arc::downgrade(runtime);
    let open = move || match Device::open(&options) {
        Ok(device) => runtime.upgrade().into_iter().for_each(|runtime| attach(&runtime, device.clone(), &options)),
        Err(error) => {
            tracing::error!(%error, "no device could be opened");
            runtime.upgrade().into_iter().for_each(|runtime| runtime.without_device(&error.to_string()));
        }
    };
    let spawned = std::thread::Builder::new().name("device-open".to_owned()).spawn(open);
    spawned.map(drop).map_err(|e| Failed::No(e.to_string()))
}

fn attach(runtime: &Runtime, device: Device, options: &OpenOptions) {
    let info = device.info();
    match device.fallback() {
        None => tracing::info!(device = info.kind.as_str(), name = info.name, "device ready"),
        Some(why) => tracing::info!(device = info.kind.as_str(), %why, "device ready; no GPU"),
    }
    // The same device, in a worker of its own: a GPU that is there will still be there.
    let choice = match (device.kind(), options.choice) {
        (DeviceKind::Cpu, _) => DeviceChoice::Cpu,
        (DeviceKind::Cuda, DeviceChoice::Cuda(index)) => DeviceChoice::Cuda(index),
        (DeviceKind::Cuda, _) => DeviceChoice::Cuda(0),
    };
    let options = OpenOptions { choice, ..options.clone() };
    let open = move || Device::open(&options).map_err(|error| error.to_string());
    runtime.attach_with(device, Some(Arc::new(open)));
}

fn number<T: std::str::FromStr>(text: Option<String>, name: &str) -> Result<Option<T>, Failed> {
    match text {
        None => Ok(None),
        Some(text) => text.parse().map(Some).map_err(|_| Failed::Usage(format!("{name}: {text:?} is not a number"))),
    }
}

/// SIGTERM or SIGINT; a second one ends the process at once.
async fn stopped() {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        std::process::exit(130);
    });
}
