use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tensor_wasm_exec::engine::cpu_kernels;
use tensor_wasm_gpu::{
    Buffer, Device, DeviceChoice, DeviceError, DeviceKind, OpenOptions, Pinned, SlabPlan, TenantLimits,
};
use tensor_wasm_jit::{BUDGET_TICKS_MAX, CONTROL, Program};
use tensor_wasm_launch::{Argument, KernelError, KernelModule, Kernels, LaunchStream};

use super::argument::{Content, Given, Output, Value, check_outputs};
use crate::output::outln;
use crate::{Ended, Failed, Global, table};

/// What a device is given beyond the launch's buffers: their sizes are rounded up by as much as a quarter, and a launch
/// needs some of its own.
const MEMORY_SLACK_BYTES: u64 = 64 << 20;

/// A worker is taken to be stuck when a job takes this much longer than the launch may.
const STUCK: Duration = Duration::from_secs(60);

/// Run a kernel here, with numbers and files for arguments
///
/// Each parameter of the kernel is given by one --arg, in order; messages count them from 0:
///
///   i32:7  i64:-1  f32:2.5  f64:inf   a number; whole ones also as 0xff
///   in:FILE                           a buffer, read from a file
///   inout:FILE=OUT                    a buffer, read from a file and afterwards written to OUT
///   out:TYPE[SHAPE]=OUT               a buffer of zeros, afterwards written to OUT
///
/// TYPE is i8, u8, i16, u16, i32, u32, i64, u64, f32 or f64, and SHAPE is such as 1024 or 32,32.
/// Files whose names end in .npy are NumPy's, in C order; all others are raw bytes.
/// Files are written only if the launch ends well.
///
/// Exit code 1 if the kernel traps, takes too long or is refused; 2 if an argument or a file is not right.
#[allow(rustdoc::broken_intra_doc_links, reason = "the text is the help that is printed, brackets and all")]
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "Example: y = 2.5 x + y for 1000 elements, by 8 groups of 128 work items\n  \
                  tensor-wasm kernel run kernels.wasm --kernel saxpy --grid 8 --block 128 \\\n    \
                  --arg i32:1000 --arg f32:2.5 --arg in:x.npy --arg inout:y.npy=sum.npy"
)]
pub(super) struct Run {
    /// A core Wasm module, `.wasm` or `.wat`.
    file: PathBuf,
    /// Which kernel; not needed if there is only one.
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// How many groups.
    #[arg(long, value_name = "X[,Y,Z]")]
    grid: String,
    /// How many work items in each group.
    #[arg(long, value_name = "X[,Y,Z]")]
    block: String,
    /// An argument of the kernel: one of these for each, in order.
    #[arg(long = "arg", value_name = "ARGUMENT")]
    args: Vec<String>,
    /// Where to run it: `auto` (CUDA where there is some, else the CPU), `cpu`, `cuda` or `cuda:N`.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: String,
    /// Stop it after this long.
    #[arg(long, value_name = "N", default_value_t = 60_000)]
    deadline_ms: u64,
}

/// A buffer on the device. Those of no bytes are parts of memory that is there anyway: no device has such buffers.
enum DeviceCopy {
    Buffer(Buffer),
    Empty(Pinned),
}

/// A launch that went well.
struct LaunchReport {
    outputs: Vec<(Output, u64)>,
    /// Until the launch was in line, and from then on.
    compile: Duration,
    launch: Duration,
}

impl Run {
    pub(super) fn execute(self, global: &Global) -> Ended {
        let (grid, block) = (dimensions("--grid", &self.grid)?, dimensions("--block", &self.block)?);
        let choice: DeviceChoice = self.device.parse().map_err(|why| Failed::Usage(format!("--device: {why}")))?;
        let deadline = deadline(self.deadline_ms)?;
        let given = self.args.iter().map(|text| Given::parse(text)).collect::<Result<Vec<Given>, Failed>>()?;
        check_outputs(&given)?;
        let wasm = super::read(&self.file)?;
        let kernel = check(&wasm, self.kernel, &given)?;
        let contents = given.iter().map(Given::content).collect::<Result<Vec<Option<Content>>, Failed>>()?;

        let device = open(choice, deadline)?;
        let info = device.info();
        let place = match (info.kind, choice) {
            (DeviceKind::Cpu, _) => "cpu".to_owned(),
            (DeviceKind::Cuda, DeviceChoice::Cuda(index)) => format!("cuda:{index}"),
            (DeviceKind::Cuda, _) => "cuda:0".to_owned(),
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|e| Failed::No(e.to_string()))?;
        let kernels = Kernels::new(device, None, runtime.handle().clone());
        let bytes = contents.iter().flatten().fold(0_u64, |sum, content| sum.saturating_add(content.bytes));
        let memory_bytes_max = bytes.saturating_add(bytes / 4).saturating_add(MEMORY_SLACK_BYTES);
        let limits = TenantLimits { memory_bytes_max, ..TenantLimits::default() };
        let stream = kernels.tenant("local", limits).map_err(failed)?.stream();
        let module = kernels.module(wasm).map_err(failed)?;
        let launch = Launching { stream: &stream, module: &module, kernel: &kernel, grid, block, deadline };
        let ran = launch.run(&runtime, &given, contents)?;

        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        if global.json {
            let row = |(output, bytes): &(Output, u64)| {
                let layout = output.layout.as_ref();
                json!({
                    "file": output.file.display().to_string(), "bytes": bytes,
                    "shape": layout.map(|layout| &layout.shape), "dtype": layout.map(|layout| layout.dtype.name),
                })
            };
            let outputs: Vec<_> = ran.outputs.iter().map(row).collect();
            table::print_json(&json!({
                "kernel": kernel, "device": place, "device_name": info.name, "grid": grid, "block": block,
                "compile_ms": milliseconds(ran.compile), "launch_ms": milliseconds(ran.launch), "outputs": outputs,
            }));
            return Ok(ExitCode::SUCCESS);
        }
        let row = |(output, bytes): &(Output, u64)| {
            let layout = output.layout.as_ref();
            let shape = layout.map_or("-".to_owned(), crate::npy::Layout::shape_text);
            let dtype = layout.map_or("-", |layout| layout.dtype.name).to_owned();
            vec![output.file.display().to_string(), shape, dtype, bytes.to_string()]
        };
        if !ran.outputs.is_empty() {
            let rows: Vec<Vec<String>> = ran.outputs.iter().map(row).collect();
            table::print(&["OUTPUT", "SHAPE", "DTYPE", "BYTES"], &rows);
        }
        outln!(
            "{kernel} on {place} ({}): {:.3} ms, after {:.3} ms to compile and load it",
            info.name,
            milliseconds(ran.launch),
            milliseconds(ran.compile)
        );
        Ok(ExitCode::SUCCESS)
    }
}

struct Launching<'a> {
    stream: &'a LaunchStream,
    module: &'a Arc<KernelModule>,
    kernel: &'a str,
    grid: [u32; 3],
    block: [u32; 3],
    deadline: Duration,
}

impl Launching<'_> {
    fn run(
        &self,
        runtime: &tokio::runtime::Runtime,
        given: &[Given],
        contents: Vec<Option<Content>>,
    ) -> Result<LaunchReport, Failed> {
        let mut arguments = Vec::with_capacity(given.len());
        let mut places = Vec::new();
        let mut outputs = Vec::new();
        for (given, content) in given.iter().zip(contents) {
            let argument = match (&given.value, content) {
                (Value::I32(value), _) => Argument::I32(*value),
                (Value::I64(value), _) => Argument::I64(*value),
                (Value::F32(value), _) => Argument::F32(*value),
                (Value::F64(value), _) => Argument::F64(*value),
                (_, None) => return Err(given.wrong("it has no content")),
                (_, Some(content)) => {
                    let place = self.place(&content).map_err(|e| failed(e.into()))?;
                    let argument = place.argument();
                    outputs.extend(content.output.map(|output| (places.len(), output, content.bytes)));
                    places.push(place);
                    argument
                }
            };
            arguments.push(argument);
        }
        let began = Instant::now();
        let launched = self.stream.launch(self.module, self.kernel, self.grid, self.block, &arguments, self.deadline);
        let mut launch = runtime.block_on(launched).map_err(failed)?;
        let sent = Instant::now();
        runtime.block_on(launch.wait()).map_err(failed)?;
        let (compile, launch) = (sent - began, sent.elapsed());

        // Read back as a whole before the first file is written: a device may be lost in between.
        let mut read = Vec::with_capacity(outputs.len());
        for (n, output, bytes) in outputs {
            let header = output.header();
            // What did not fit into this machine's memory would not have fitted into a launch.
            let len = usize::try_from(bytes).unwrap_or(usize::MAX);
            let mut data = vec![0; len];
            if let DeviceCopy::Buffer(buffer) = &places[n] {
                let read = self.stream.stream.read_blocking(buffer.handle(), 0, &mut data);
                read.map_err(|e| failed(e.into()))?;
            }
            read.push((output, header, data));
        }
        let mut outputs = Vec::with_capacity(read.len());
        for (output, header, data) in read {
            let written = std::fs::File::create(&output.file).and_then(|mut file| {
                file.write_all(&header)?;
                file.write_all(&data)
            });
            written.map_err(|error| Failed::No(format!("{}: {error}", output.file.display())))?;
            outputs.push((output, data.len() as u64));
        }
        Ok(LaunchReport { outputs, compile, launch })
    }

    /// Memory of the device with an argument's content.
    fn place(&self, content: &Content) -> Result<DeviceCopy, DeviceError> {
        if content.bytes == 0 {
            return self.stream.stream.device().pinned(1).map(DeviceCopy::Empty);
        }
        let buffer = self.stream.kernels.tenant.buffer(content.bytes)?;
        if let Some(file) = &content.file {
            self.stream.stream.write_blocking(buffer.handle(), 0, &file[content.begins..])?;
        }
        Ok(DeviceCopy::Buffer(buffer))
    }
}

impl DeviceCopy {
    fn argument(&self) -> Argument {
        match self {
            DeviceCopy::Buffer(buffer) => Argument::Buffer(buffer.handle()),
            DeviceCopy::Empty(memory) => Argument::Pinned { memory: memory.clone(), offset: 0, bytes: 0 },
        }
    }
}

/// How many in each of three dimensions; those not given are 1.
fn dimensions(option: &str, text: &str) -> Result<[u32; 3], Failed> {
    let bad =
        || Failed::Usage(format!("{option} {text}: expected one to three whole numbers from 1 on, as in 8 or 16,16"));
    let mut all = [1; 3];
    for (n, part) in text.split(',').enumerate() {
        let number = part.trim().parse().ok().filter(|number| *number > 0);
        *all.get_mut(n).ok_or_else(bad)? = number.ok_or_else(bad)?;
    }
    Ok(all)
}

fn deadline(ms: u64) -> Result<Duration, Failed> {
    // What a kernel can tell of the time.
    let max = Duration::from_nanos(u64::from(BUDGET_TICKS_MAX) << CONTROL.tick_shift).as_millis();
    match ms {
        1.. if u128::from(ms) <= max => Ok(Duration::from_millis(ms)),
        _ => Err(Failed::Usage(format!("--deadline-ms {ms}: expected a number from 1 to {max}"))),
    }
}

/// Finds the kernel and holds the arguments against its parameters, before any file is read.
fn check(wasm: &[u8], kernel: Option<String>, given: &[Given]) -> Result<String, Failed> {
    let program = Program::read(wasm).map_err(|refusal| super::no(&refusal))?;
    let kernel = super::choose(&program, kernel)?;
    let pointers = program.pointers(&kernel).map_err(|refusal| super::no(&refusal))?;
    let found = program.exports().find(|(name, _)| *name == kernel);
    // There is one: its parameters were looked at.
    let types = found.map_or(Ok(Vec::new()), |(_, types)| types).map_err(|refusal| super::no(&refusal))?;
    let names: Vec<&str> = types.iter().zip(&pointers).map(super::parameter).collect();
    let takes = match names.as_slice() {
        [] => format!("{kernel} takes no arguments"),
        names => format!("{kernel} takes {}: {}", names.len(), names.join(" ")),
    };
    if types.len() != given.len() {
        return Err(Failed::Usage(format!("{takes}; {} --arg were given", given.len())));
    }
    for (n, (ty, given)) in types.iter().zip(given).enumerate() {
        if given.ty() != *ty {
            return Err(given.wrong(format!("argument {n} is to be {}; {takes}", names[n])));
        }
    }
    Ok(kernel)
}

fn open(choice: DeviceChoice, deadline: Duration) -> Result<Device, Failed> {
    let options = OpenOptions {
        choice,
        memory: SlabPlan { pinned_bytes: 1 << 20, ..OpenOptions::default().memory },
        job_max: deadline + STUCK,
        host: cpu_kernels::host_kernels(),
        ..OpenOptions::default()
    };
    let device = Device::open(&options).map_err(|why| Failed::No(format!("--device {choice}: {why}")))?;
    if let Some(why) = device.fallback() {
        eprintln!("note: running on the CPU: {why}");
    }
    Ok(device)
}

/// What a kernel's error means for who ran it: whether the launch was asked for wrongly, or went wrong.
fn failed(error: KernelError) -> Failed {
    match error {
        KernelError::Arguments(_) | KernelError::Device(DeviceError::BadLaunch { .. }) => {
            Failed::Usage(error.to_string())
        }
        other => Failed::No(other.to_string()),
    }
}
