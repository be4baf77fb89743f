//! `tensor-wasm kernel`: what a module has (`check`), its PTX (`build`), and a launch (`run.rs`, with its arguments in
//! `argument.rs`).

mod argument;
mod run;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tensor_wasm_jit::{Program, Refusal, Ty};

use crate::output::{outln, write};
use crate::{Ended, Failed, Global, table};

/// Look at a module of kernels, run one, or compile it to PTX.
#[derive(clap::Args)]
pub(crate) struct Kernel {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Say which kernels a module has, and what is refused and why.
    ///
    /// A kernel is an exported function that returns nothing. Exit code 1 if there is none that can be compiled.
    Check {
        /// A core Wasm module, `.wasm` or `.wat`.
        file: PathBuf,
    },
    Run(run::Run),
    /// Compile a kernel to PTX, fenced, for every GPU from compute capability 7.5 on; from 8.0 on if it multiplies
    /// matrices.
    Build {
        /// A core Wasm module, `.wasm` or `.wat`.
        file: PathBuf,
        /// Which kernel; not needed if there is only one.
        #[arg(long, value_name = "NAME")]
        kernel: Option<String>,
        /// The oldest GPU that is to accept it: sm_75, sm_80, sm_86, sm_87, sm_89, sm_90, sm_100 or sm_120. Newer ones
        /// do too. If not given, the oldest that the kernel can have.
        #[arg(long, value_name = "ARCH")]
        arch: Option<String>,
        /// Where to write the PTX; to stdout without it.
        #[arg(long, short)]
        output: Option<PathBuf>,
    },
}

/// The architectures that PTX can be for, and the version of PTX that first knows each, from 7.1 on.
const ARCHITECTURES: [(&str, &str); 8] = [
    ("sm_75", "7.1"),
    ("sm_80", "7.1"),
    ("sm_86", "7.1"),
    ("sm_87", "7.4"),
    ("sm_89", "7.8"),
    ("sm_90", "7.8"),
    ("sm_100", "8.6"),
    ("sm_120", "8.7"),
];

/// What is known about a kernel.
struct KernelInfo {
    parameters: Vec<&'static str>,
    ptx_bytes: usize,
    shared_bytes: u32,
}

impl Kernel {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        match self.command {
            Command::Check { file } => check(&read(&file)?, global),
            Command::Run(run) => run.execute(global),
            Command::Build { file, kernel, arch, output } => build(&file, kernel, arch.as_deref(), output),
        }
    }
}

/// The module in a file, which may be text.
fn read(file: &Path) -> Result<Vec<u8>, Failed> {
    let bad = |why: String| Failed::Usage(format!("{}: {why}", file.display()));
    let bytes = std::fs::read(file).map_err(|e| bad(e.to_string()))?;
    // What is wrong with text is shown below the line it is in; here it is one line, with the place.
    let short = |why: String| {
        let mut lines = why.lines();
        let what = lines.next().unwrap_or_default().trim().to_owned();
        match lines.find_map(|line| line.split_once("<anon>:")).and_then(|(_, place)| place.trim().split_once(':')) {
            Some((line, column)) => format!("{what} (line {line}, column {column})"),
            None => what,
        }
    };
    tensor_wasm_exec::local::binary(&bytes).map(Into::into).map_err(|why| bad(short(why)))
}

fn no(refusal: &Refusal) -> Failed {
    // Some quote bytes over several lines.
    Failed::No(refusal.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
}

/// What a parameter is given.
fn parameter((ty, is_pointer): (&Ty, &bool)) -> &'static str {
    match ty {
        _ if *is_pointer => "buffer",
        Ty::I32 => "i32",
        Ty::I64 => "i64",
        Ty::F32 => "f32",
        Ty::F64 => "f64",
    }
}

fn inspect(program: &Program<'_>, kernel: &str, types: &[Ty]) -> Result<KernelInfo, Refusal> {
    let pointers = program.pointers(kernel)?;
    let image = program.compile(kernel, &pointers)?;
    let parameters = types.iter().zip(&pointers).map(parameter).collect();
    Ok(KernelInfo { parameters, ptx_bytes: image.ptx.len(), shared_bytes: image.shared_bytes })
}

fn check(wasm: &[u8], global: &Global) -> Ended {
    let program = Program::read(wasm).map_err(|refusal| no(&refusal))?;
    let exports =
        program.exports().map(|(name, types)| (name, types.and_then(|types| inspect(&program, name, &types))));
    let exports: Vec<(&str, Result<KernelInfo, Refusal>)> = exports.collect();
    let is_good = exports.iter().any(|(_, found)| found.is_ok());
    if global.json {
        let row = |(name, found): &(&str, Result<KernelInfo, Refusal>)| match found {
            Ok(found) => serde_json::json!({
                "kernel": name, "parameters": found.parameters, "shared_bytes": found.shared_bytes,
                "ptx_bytes": found.ptx_bytes,
            }),
            Err(refusal) => serde_json::json!({ "export": name, "refused": refusal.to_string() }),
        };
        outln!("{}", serde_json::Value::from(exports.iter().map(row).collect::<Vec<_>>()));
    } else {
        let row = |(name, found): &(&str, Result<KernelInfo, Refusal>)| match found {
            Ok(found) => {
                let shared = found.shared_bytes.to_string();
                vec![(*name).to_owned(), found.parameters.join(" "), shared, found.ptx_bytes.to_string(), String::new()]
            }
            Err(refusal) => {
                let none = String::new;
                vec![(*name).to_owned(), none(), none(), none(), format!("refused: {refusal}")]
            }
        };
        let head = ["EXPORT", "PARAMETERS", "SHARED BYTES", "PTX BYTES", ""];
        table::print(&head, &exports.iter().map(row).collect::<Vec<_>>());
    }
    if is_good { Ok(ExitCode::SUCCESS) } else { Err(Failed::No("it has no kernel that can be compiled".to_owned())) }
}

/// The kernel that was asked for, or the only one.
fn choose(program: &Program<'_>, kernel: Option<String>) -> Result<String, Failed> {
    let kernels: Vec<&str> = program.exports().filter(|(_, types)| types.is_ok()).map(|(name, _)| name).collect();
    match (kernel, kernels.as_slice()) {
        (Some(kernel), _) => Ok(kernel),
        (None, [only]) => Ok((*only).to_owned()),
        (None, []) => Err(Failed::No("it has no kernel".to_owned())),
        (None, several) => {
            Err(Failed::Usage(format!("which kernel? give --kernel with one of: {}", several.join(", "))))
        }
    }
}

fn build(file: &Path, kernel: Option<String>, arch: Option<&str>, output: Option<PathBuf>) -> Ended {
    let known = |arch: &str| {
        let found = ARCHITECTURES.into_iter().find(|(name, _)| *name == arch);
        found.ok_or_else(|| {
            let known = ARCHITECTURES.map(|(name, _)| name).join(", ");
            Failed::Usage(format!("--arch {arch}: it is not known; known are {known}"))
        })
    };
    let asked = arch.map(known).transpose()?;
    let wasm = read(file)?;
    let program = Program::read(&wasm).map_err(|refusal| no(&refusal))?;
    let kernel = choose(&program, kernel)?;
    let pointers = program.pointers(&kernel).map_err(|refusal| no(&refusal))?;
    let image = program.compile(&kernel, &pointers).map_err(|refusal| no(&refusal))?;
    let ptx = match asked {
        None => image.ptx,
        Some((arch, version)) => {
            let (major, minor) = image.target.capability();
            let number = arch.trim_start_matches("sm_").parse().unwrap_or(0_u32);
            if number < 10 * major + minor {
                let why = format!("{kernel} multiplies matrices, which GPUs do from sm_{major}{minor} on");
                return Err(Failed::Usage(format!("--arch {arch}: {why}")));
            }
            retarget(&image.ptx, arch, version)
        }
    };
    match output {
        None => write(format_args!("{ptx}")),
        Some(file) => {
            std::fs::write(&file, &ptx).map_err(|error| Failed::No(format!("{}: {error}", file.display())))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// PTX for another architecture: the two lines that say which are the first of their kind, and nothing else differs.
fn retarget(ptx: &str, arch: &str, version: &str) -> String {
    let lines = ptx.split_inclusive('\n').map(|line| match line.split_once(' ') {
        Some((".version", _)) => format!(".version {version}\n"),
        Some((".target", _)) => format!(".target {arch}\n"),
        _ => line.to_owned(),
    });
    lines.collect()
}
