use std::process::ExitCode;

use crate::output::outln;
use crate::{Ended, Failed};

/// Compile one module for the server that started this process.
#[derive(clap::Args)]
pub(crate) struct CompileWorker {
    order: String,
}

impl CompileWorker {
    pub(crate) fn execute(self) -> Ended {
        outln!("{}", tensor_wasm_exec::engine::compile::worker(&self.order).map_err(Failed::Usage)?);
        Ok(ExitCode::SUCCESS)
    }
}
