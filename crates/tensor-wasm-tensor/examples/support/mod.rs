//! What the examples share, and what `tensor-wasm-tensor/tests/api.rs` runs too, so that an example cannot stop working
//! unseen: options, data, models, the loop that trains, and charts.
#![allow(dead_code, reason = "every example, and the test, uses a part of it")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "printing is what an example does")]

pub(crate) mod chart;
pub(crate) mod digits;
pub(crate) mod models;
pub(crate) mod options;
pub(crate) mod points;
pub(crate) mod text;
pub(crate) mod training;

use std::process::ExitCode;

use tensor_wasm_tensor::nn::Module;
use tensor_wasm_tensor::{DType, Device, Tensor, io, set_device};

use self::options::{Command, Options, Parsed};

/// Whatever went wrong, in words.
pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Writes a trained model where `--save` says, with tensors beside it that say how it is to be used.
pub(crate) fn save(model: &dyn Module, more: Vec<(String, Tensor)>, options: &Options) -> Outcome<()> {
    let Some(file) = options.get("save") else { return Ok(()) };
    let dtype = match options.get("save-dtype").unwrap_or("f32") {
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        other => return Err(format!("--save-dtype is f32, f16 or bf16, not {other:?}").into()),
    };
    let state = model.state_dict().into_iter().map(|(name, tensor)| (name, tensor.cast(dtype)));
    io::save_safetensors(file, state.chain(more))?;
    println!("written: {file}");
    Ok(())
}

/// The main function of every example: reads the options, and says what went wrong.
pub(crate) fn run(command: &Command, train: impl FnOnce(&Options) -> Outcome<()>) -> ExitCode {
    let options = match command.parse(std::env::args().skip(1)) {
        Ok(Parsed::Options(options)) => options,
        Ok(Parsed::Help) => {
            println!("{}", command.usage());
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("error: {why}\n\n{}", command.usage());
            return ExitCode::from(2);
        }
    };
    let device = options.get("device").map(Device::named).transpose();
    let trained = device.map_err(Into::into).and_then(|device| {
        device.into_iter().for_each(set_device);
        train(&options)
    });
    match trained {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}
