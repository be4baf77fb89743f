#![expect(clippy::print_stdout, reason = "what was found goes to stdout")]

use std::path::PathBuf;
use std::process::ExitCode;

use tensor_wasm_jit::{Program, Refusal, Ty};

use crate::{Ended, Failed, Global, table};

/// Look at a module of kernels, or compile them to PTX.
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
        /// A core Wasm module.
        file: PathBuf,
    },
    /// Compile a kernel to PTX, fenced, for every GPU from compute capability 7.5 on.
    Build {
        /// A core Wasm module.
        file: PathBuf,
        /// Which kernel; not needed if there is only one.
        #[arg(long)]
        kernel: Option<String>,
        /// Where to write the PTX; to stdout without it.
        #[arg(long, short)]
        output: Option<PathBuf>,
    },
}

/// What is known about a kernel.
struct Found {
    parameters: Vec<&'static str>,
    ptx_bytes: usize,
    shared_bytes: u32,
}

impl Kernel {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        match self.command {
            Command::Check { file } => check(&read(&file)?, global),
            Command::Build { file, kernel, output } => build(&read(&file)?, kernel, output),
        }
    }
}

fn read(file: &PathBuf) -> Result<Vec<u8>, Failed> {
    std::fs::read(file).map_err(|error| Failed::Usage(format!("{}: {error}", file.display())))
}

fn no(refusal: &Refusal) -> Failed {
    Failed::No(refusal.to_string())
}

fn look(program: &Program<'_>, kernel: &str, types: &[Ty]) -> Result<Found, Refusal> {
    let pointers = program.pointers(kernel)?;
    let image = program.compile(kernel, &pointers)?;
    let name = |(ty, is_pointer): (&Ty, &bool)| match ty {
        _ if *is_pointer => "buffer",
        Ty::I32 => "i32",
        Ty::I64 => "i64",
        Ty::F32 => "f32",
        Ty::F64 => "f64",
    };
    let parameters = types.iter().zip(&pointers).map(name).collect();
    Ok(Found { parameters, ptx_bytes: image.ptx.len(), shared_bytes: image.shared_bytes })
}

fn check(wasm: &[u8], global: &Global) -> Ended {
    let program = Program::read(wasm).map_err(|refusal| no(&refusal))?;
    let exports = program.exports().map(|(name, types)| (name, types.and_then(|types| look(&program, name, &types))));
    let exports: Vec<(&str, Result<Found, Refusal>)> = exports.collect();
    let is_good = exports.iter().any(|(_, found)| found.is_ok());
    if global.json {
        let row = |(name, found): &(&str, Result<Found, Refusal>)| match found {
            Ok(found) => serde_json::json!({
                "kernel": name, "parameters": found.parameters, "shared_bytes": found.shared_bytes,
                "ptx_bytes": found.ptx_bytes,
            }),
            Err(refusal) => serde_json::json!({ "export": name, "refused": refusal.to_string() }),
        };
        println!("{}", serde_json::Value::from(exports.iter().map(row).collect::<Vec<_>>()));
    } else {
        let row = |(name, found): &(&str, Result<Found, Refusal>)| match found {
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
    match is_good {
        true => Ok(ExitCode::SUCCESS),
        false => Err(Failed::No("it has no kernel that can be compiled".to_owned())),
    }
}

fn build(wasm: &[u8], kernel: Option<String>, output: Option<PathBuf>) -> Ended {
    let program = Program::read(wasm).map_err(|refusal| no(&refusal))?;
    let kernels: Vec<&str> = program.exports().filter(|(_, types)| types.is_ok()).map(|(name, _)| name).collect();
    let kernel = match (kernel, kernels.as_slice()) {
        (Some(kernel), _) => kernel,
        (None, [only]) => (*only).to_owned(),
        (None, []) => return Err(Failed::No("it has no kernel".to_owned())),
        (None, several) => {
            return Err(Failed::Usage(format!("which kernel? give --kernel with one of: {}", several.join(", "))));
        }
    };
    let pointers = program.pointers(&kernel).map_err(|refusal| no(&refusal))?;
    let image = program.compile(&kernel, &pointers).map_err(|refusal| no(&refusal))?;
    match output {
        None => print!("{}", image.ptx),
        Some(file) => {
            std::fs::write(&file, &image.ptx).map_err(|error| Failed::No(format!("{}: {error}", file.display())))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
