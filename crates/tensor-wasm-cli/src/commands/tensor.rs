//! `tensor-wasm tensor`: expressions over arrays in files (`eval`), and the operations there are (`ops`).

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use serde_json::json;
use tensor_wasm_gpu::DeviceChoice;
use tensor_wasm_tensor::operations::OPERATIONS;
use tensor_wasm_tensor::{DType, Device, Tensor, TensorError, expression, grad, io, set_device};

use crate::output::outln;
use crate::{Ended, Failed, Global, table};

/// Compute with tensors: an expression over arrays in files.
#[derive(clap::Args)]
pub(crate) struct TensorCommand {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Eval(Eval),
    /// List the operations that expressions can use.
    Ops,
}

/// Compute an expression and print or write the result
///
/// Names stand for the arrays that are given as NAME=FILE. Operations are called as op(a, b, key=value) or
/// a.op(b, key=value), which is the same; there are + - * / % ** @ (matrix product), comparisons, ~ & | for
/// true and false, lists such as [1, -1], and slices such as a[1:, ::-2, 0]. `tensor-wasm tensor ops` lists all
/// operations with their parameters.
///
/// Files are .npy. Of .npz and .safetensors, which have several arrays, NAME=FILE:ARRAY is one; without :ARRAY it is
/// the one of that name, or the only one.
///
/// Exit code 1 if it cannot be computed (a division of integers by zero, no memory); 2 if the expression or a file
/// is not right.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "Examples:\n  \
                  tensor-wasm tensor eval 'matmul(a, b).softmax(axis=1)' a=x.npy b=y.npy -o out.npy\n  \
                  tensor-wasm tensor eval 'layer_norm(x)' x=x.npy --grad x\n  \
                  tensor-wasm tensor eval 'normal([2, 3], seed=1) * 2'"
)]
struct Eval {
    /// What to compute.
    #[arg(value_name = "EXPRESSION")]
    expression: String,
    /// An array that the expression names: NAME=FILE.npy, or NAME=FILE.npz:ARRAY.
    #[arg(value_name = "NAME=FILE")]
    inputs: Vec<String>,
    /// Where to write the result, as .npy or .safetensors; it is printed without.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Where to compute: `cpu`, `cuda`, `cuda:N`, or `auto` for a GPU where that should be done sooner, and the cpu
    /// otherwise: the default, unless TENSOR_WASM_DEVICE says something else.
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Compute floats as this: arrays of floats are cast to it, and what zeros, uniform and others make has it: f16,
    /// bf16, f32, f64; or an integer type.
    #[arg(long, value_name = "TYPE")]
    dtype: Option<String>,
    /// Say how it is computed: kernels, bytes, operations, what was fused and what not. On stderr.
    #[arg(long)]
    explain: bool,
    /// Not the result but the gradient of its sum with respect to this array.
    #[arg(long, value_name = "NAME")]
    grad: Option<String>,
}

impl TensorCommand {
    pub(crate) fn execute(self, global: &Global) -> Ended {
        match self.command {
            Command::Eval(eval) => eval.execute(global),
            Command::Ops => Ok(list(global)),
        }
    }
}

fn list(global: &Global) -> ExitCode {
    if global.json {
        let row = |operation: &tensor_wasm_tensor::operations::Operation| {
            json!({
                "name": operation.name, "signature": operation.signature(), "about": operation.about,
                "gradient": operation.has_gradient, "example": operation.example,
            })
        };
        outln!("{}", serde_json::Value::from(OPERATIONS.iter().map(row).collect::<Vec<_>>()));
        return ExitCode::SUCCESS;
    }
    let row = |operation: &tensor_wasm_tensor::operations::Operation| {
        vec![operation.signature(), operation.about.replace("\\|", "|")]
    };
    table::print(&["operation", "what it is"], &OPERATIONS.iter().map(row).collect::<Vec<_>>());
    ExitCode::SUCCESS
}

/// Bad input, without the line of our own source that noticed it.
fn usage(what: &str, error: &TensorError) -> Failed {
    Failed::Usage(format!("{what}{}", error.what))
}

fn no(error: &TensorError) -> Failed {
    Failed::No(format!("{}: {}", error.operation, error.what))
}

impl Eval {
    fn execute(self, global: &Global) -> Ended {
        let is_named = std::env::var_os("TENSOR_WASM_DEVICE").is_some_and(|name| !name.is_empty());
        let asked = self.device.as_deref().or_else(|| (!is_named).then_some("auto"));
        match asked.map(str::parse::<DeviceChoice>).transpose() {
            Ok(None) => {}
            Ok(Some(choice)) => set_device(Device::named(&choice.to_string()).map_err(|error| no(&error))?),
            Err(why) => return Err(Failed::Usage(format!("--device: {why}"))),
        }
        let asked = self.dtype.as_deref().map(dtype).transpose()?;
        let mut inputs: Vec<(&str, Tensor)> = Vec::new();
        for given in &self.inputs {
            let (name, tensor) = input(given)?;
            if inputs.iter().any(|(known, _)| *known == name) {
                return Err(Failed::Usage(format!("{name} is given twice")));
            }
            let tensor = match asked {
                Some(asked) if tensor.dtype().is_float() => tensor.cast(asked),
                _ => tensor,
            };
            inputs.push((name, if self.grad.as_deref() == Some(name) { tensor.with_grad() } else { tensor }));
        }
        let literal = asked.unwrap_or(DType::F32);
        let made = expression::evaluate(&self.expression, &inputs, literal);
        let made = made.map_err(|error| Failed::Usage(format!("the expression: {error}")))?;
        let result = match &self.grad {
            None => made,
            Some(name) => gradient(&made, name, &inputs)?,
        };
        if self.explain {
            eprint!("{}", result.explain().map_err(|error| no(&error))?);
        }
        let began = Instant::now();
        result.realize().map_err(|error| no(&error))?;
        let took = began.elapsed();
        if self.explain {
            eprintln!("computed in {:.3} ms", took.as_secs_f64() * 1e3);
        }
        if let Some(path) = &self.output {
            save(path, &result)?;
        }
        let (shape, dtype) = (result.shape().to_vec(), result.dtype().name());
        match (&self.output, global.json) {
            (Some(path), true) => {
                outln!("{}", json!({ "file": path.display().to_string(), "shape": shape, "dtype": dtype }))
            }
            (Some(path), false) => outln!("wrote {} ({shape:?} of {dtype})", path.display()),
            (None, true) => {
                let text = io::to_json(&result).map_err(|error| no(&error))?;
                let data: serde_json::Value =
                    serde_json::from_str(&text).map_err(|error| Failed::No(error.to_string()))?;
                outln!("{}", json!({ "shape": shape, "dtype": dtype, "data": data }));
            }
            (None, false) => outln!("{result}"),
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn dtype(name: &str) -> Result<DType, Failed> {
    let known = DType::ALL.map(DType::name).join(" ");
    DType::named(name).ok_or_else(|| Failed::Usage(format!("--dtype: {name:?} is none of {known}")))
}

/// `NAME=FILE.npy`, `NAME=FILE.npz:ARRAY`.
fn input(given: &str) -> Result<(&str, Tensor), Failed> {
    let is_name = |name: &str| {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        name.chars().all(is_part) && !name.starts_with(|c: char| c.is_ascii_digit()) && !name.is_empty()
    };
    let Some((name, file)) = given.split_once('=').filter(|(name, _)| is_name(name)) else {
        return Err(Failed::Usage(format!("{given:?}: give arrays as NAME=FILE.npy")));
    };
    let (path, member) = match file.rsplit_once(':') {
        Some((path, member)) if has_members(Path::new(path)) => (path, Some(member)),
        _ => (file, None),
    };
    let path = Path::new(path);
    if !has_members(path) {
        return io::load_npy(path).map(|tensor| (name, tensor)).map_err(|error| usage("", &error));
    }
    let arrays = if is_safetensors(path) {
        io::load_safetensors(path).map(|file| file.into_state())
    } else {
        io::load_npz(path).map(|arrays| arrays.into_iter().collect())
    };
    let arrays: Vec<(String, Tensor)> = arrays.map_err(|error| usage("", &error))?;
    let names: Vec<&str> = arrays.iter().map(|(name, _)| name.as_str()).collect();
    let wanted = member.unwrap_or(name);
    let found = arrays.iter().find(|(known, _)| known == wanted);
    let only = if let ([only], None) = (&arrays[..], member) { Some(only) } else { None };
    match found.or(only) {
        Some((_, tensor)) => Ok((name, tensor.clone())),
        None => {
            let (path, all) = (path.display(), names.join(", "));
            Err(Failed::Usage(format!("{path} has no array {wanted:?}; it has {all}: say {name}={path}:ARRAY")))
        }
    }
}

fn is_safetensors(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
}

fn has_members(path: &Path) -> bool {
    is_safetensors(path) || path.extension().is_some_and(|extension| extension == "npz")
}

fn gradient(made: &Tensor, name: &str, inputs: &[(&str, Tensor)]) -> Result<Tensor, Failed> {
    let Some((_, asked)) = inputs.iter().find(|(known, _)| *known == name) else {
        return Err(Failed::Usage(format!("--grad {name}: there is no {name}=FILE")));
    };
    asked.check().map_err(|error| usage("--grad: ", &error))?;
    let gradients = grad(&made.sum(()), &[asked]).map_err(|error| usage("--grad: ", &error))?;
    gradients.into_iter().next().ok_or_else(|| Failed::No("there is no gradient".to_owned()))
}

fn save(path: &Path, result: &Tensor) -> Result<(), Failed> {
    let saved = if is_safetensors(path) {
        io::save_safetensors(path, [("result", result.clone())])
    } else {
        // NumPy has no such numbers; as f32 they are the same.
        let is_bf16 = result.dtype() == DType::BF16;
        io::save_npy(path, &if is_bf16 { result.cast(DType::F32) } else { result.clone() })
    };
    saved.map_err(|error| no(&error))
}
