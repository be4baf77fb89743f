//! A result file: the rows, the goals and whether they hold, with what is needed to repeat them.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

/// What a ratio is held to.
#[derive(Clone, Copy)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

impl Goal {
    fn holds(self, value: f64) -> bool {
        match self {
            Goal::AtLeast(bound) => value >= bound,
            Goal::AtMost(bound) => value <= bound,
        }
    }

    fn text(self) -> String {
        match self {
            Goal::AtLeast(bound) => format!(">= {bound}"),
            Goal::AtMost(bound) => format!("<= {bound}"),
        }
    }

    fn better(self) -> &'static str {
        match self {
            Goal::AtLeast(_) => "higher",
            Goal::AtMost(_) => "lower",
        }
    }
}

pub(crate) struct Report {
    name: &'static str,
    device: Option<String>,
    rows: Vec<Value>,
}

impl Report {
    pub(crate) fn new(name: &'static str) -> Report {
        Report { name, device: None, rows: Vec::new() }
    }

    /// Says which device the numbers are of.
    #[allow(dead_code, reason = "some of the programs that share this file have no device")]
    pub(crate) fn on(self, device: &str) -> Report {
        Report { device: Some(device.to_owned()), ..self }
    }

    /// Ours against a baseline from the same run; the goal is on their ratio.
    pub(crate) fn ratio(&mut self, id: &str, what: &str, ours: f64, baseline: (f64, &str), unit: &str, goal: Goal) {
        let ratio = ours / baseline.0;
        let holds = goal.holds(ratio);
        self.row(id, what, ours, Some(baseline), unit, Some(ratio), goal, holds);
    }

    /// Ours against a fixed bound.
    pub(crate) fn bound(&mut self, id: &str, what: &str, ours: f64, unit: &str, goal: Goal) {
        let holds = goal.holds(ours);
        self.row(id, what, ours, None, unit, None, goal, holds);
    }

    /// Ours against a fixed bound, with a baseline from the same run beside it.
    #[allow(dead_code, reason = "some of the programs that share this file have no such rows")]
    pub(crate) fn beside(&mut self, id: &str, what: &str, ours: f64, baseline: (f64, &str), unit: &str, goal: Goal) {
        let holds = goal.holds(ours);
        self.row(id, what, ours, Some(baseline), unit, Some(ours / baseline.0), goal, holds);
    }

    #[expect(clippy::too_many_arguments, reason = "a row has this many columns")]
    fn row(
        &mut self,
        id: &str,
        what: &str,
        ours: f64,
        baseline: Option<(f64, &str)>,
        unit: &str,
        ratio: Option<f64>,
        goal: Goal,
        holds: bool,
    ) {
        let round = |x: f64| (x * 1e4).round() / 1e4;
        println!(
            "{:<36} ours {:>11.2}  {:<28} ratio {:>6}  goal {:<8} {}",
            id,
            ours,
            baseline.map_or_else(String::new, |(value, name)| format!("{name} {value:.2}")),
            ratio.map_or_else(|| "-".to_owned(), |r| format!("{r:.2}")),
            goal.text(),
            if holds { "holds" } else { "FALLS SHORT" },
        );
        self.rows.push(json!({
            "id": id,
            "what": what,
            "ours": round(ours),
            "baseline": baseline.map(|(value, _)| round(value)),
            "baseline_name": baseline.map(|(_, name)| name),
            "unit": unit,
            "better": goal.better(),
            "ratio": ratio.map(round),
            "goal": goal.text(),
            "holds": holds,
        }));
    }

    pub(crate) fn save(self) -> anyhow::Result<()> {
        let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
        let profile = if cfg!(debug_assertions) { "" } else { "--release " };
        let command = match env!("CARGO_PKG_NAME") {
            "tensor-wasm-bench" => format!("cargo run {profile}-p tensor-wasm-bench -- {}", args.join(" ")),
            package => format!("cargo bench -p {package} --bench {} -- {}", env!("CARGO_CRATE_NAME"), args.join(" ")),
        };
        let file = json!({
            "command": command,
            "date": output("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]),
            "machine": self.device.map_or_else(machine, |device| format!("{}; {}", described(&device), machine())),
            "rows": self.rows,
        });
        let folder =
            std::env::var_os("TENSOR_WASM_RESULTS").map_or_else(|| root().join("bench-results"), PathBuf::from);
        let path = folder.join(format!("{}.json", self.name));
        std::fs::create_dir_all(path.parent().unwrap_or(&path))?;
        std::fs::write(&path, serde_json::to_string_pretty(&file)? + "\n")?;
        println!("wrote bench-results/{}.json", self.name);
        Ok(())
    }
}

/// A device with its driver, where NVIDIA's tool tells.
fn described(device: &str) -> String {
    let told = output("nvidia-smi", &["--query-gpu=name,driver_version", "--format=csv,noheader"]);
    let first = told.lines().next().and_then(|line| line.split_once(", "));
    first.map_or_else(|| device.to_owned(), |(name, driver)| format!("{name}, driver {driver}"))
}

fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name\t: ")).unwrap_or("unknown CPU").to_owned();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    format!("{model}, {cores} cores, Linux {}", output("uname", &["-r"]))
}

fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    output.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned()).unwrap_or_default()
}

/// The repository; `TENSOR_WASM_TEST_ROOT` names another one, where this was built on another machine.
pub(crate) fn root() -> PathBuf {
    if let Some(root) = std::env::var_os("TENSOR_WASM_TEST_ROOT") {
        return root.into();
    }
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).map_or(here.clone(), PathBuf::from)
}

pub(crate) fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
