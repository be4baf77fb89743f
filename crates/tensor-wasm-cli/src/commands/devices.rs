use std::process::ExitCode;

use tensor_wasm_gpu::{Device, DeviceChoice, DeviceInfo, DeviceKind, OpenOptions, Placement, SlabPlan};

use crate::output::outln;
use crate::{Ended, Failed, Global, table};

/// List the devices of this machine, or say why there is no GPU.
///
/// Each is opened as the server would open it, in a worker process. Without a GPU functions run on the CPU.
#[derive(clap::Args)]
pub(crate) struct Devices {}

impl Devices {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        let exe = std::env::current_exe().map_err(|e| Failed::No(e.to_string()))?;
        let mut found: Vec<(String, DeviceInfo)> = Vec::new();
        let mut why = None;
        for index in 0.. {
            match Device::open(&options(DeviceChoice::Cuda(index), &exe)) {
                Ok(device) => found.push((format!("cuda:{index}"), device.info())),
                Err(error) => {
                    why = found.is_empty().then(|| error.to_string());
                    break;
                }
            }
        }
        let cpu = Device::open(&options(DeviceChoice::Cpu, &exe)).map_err(|e| Failed::No(e.to_string()))?;
        found.push(("cpu".to_owned(), cpu.info()));
        let libraries = tensor_wasm_gpu::optional_libraries();
        if global.json {
            let row = |(name, info): &(String, DeviceInfo)| {
                serde_json::json!({
                    "device": name, "name": info.name, "multiprocessors": info.multiprocessors,
                    "memory_free_bytes": info.memory_free_bytes, "memory_total_bytes": info.memory_total_bytes,
                    "compute_capability": capability(info), "cuda": driver(info),
                })
            };
            let rows: Vec<_> = found.iter().map(row).collect();
            outln!("{}", serde_json::json!({ "devices": rows, "no_cuda": why, "libraries": libraries }));
            return Ok(ExitCode::SUCCESS);
        }
        let gib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 30));
        let row = |(name, info): &(String, DeviceInfo)| {
            let memory = format!("{} of {}", gib(info.memory_free_bytes), gib(info.memory_total_bytes));
            let units = info.multiprocessors.to_string();
            vec![name.clone(), info.name.clone(), units, memory, capability(info), driver(info)]
        };
        let head = ["DEVICE", "NAME", "SMS OR CORES", "GIB FREE", "CAPABILITY", "CUDA"];
        table::print(&head, &found.iter().map(row).collect::<Vec<_>>());
        for (library, is_there) in libraries {
            outln!("{library}: {}", if is_there { "found" } else { "not found (not needed)" });
        }
        if let Some(why) = why {
            outln!("no CUDA: {why}");
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn options(choice: DeviceChoice, exe: &std::path::Path) -> OpenOptions {
    let placement = Placement::Process { exe: exe.to_owned(), args: vec!["device-worker".to_owned()] };
    OpenOptions { choice, placement, memory: SlabPlan::default(), ..OpenOptions::default() }
}

fn capability(info: &DeviceInfo) -> String {
    let (major, minor) = info.compute_capability;
    if info.kind == DeviceKind::Cuda { format!("{major}.{minor}") } else { "-".to_owned() }
}

fn driver(info: &DeviceInfo) -> String {
    let version = info.driver_version;
    if info.kind == DeviceKind::Cuda { format!("{}.{}", version / 1000, version % 1000 / 10) } else { "-".to_owned() }
}
