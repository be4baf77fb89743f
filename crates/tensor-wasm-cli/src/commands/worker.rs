use std::ffi::OsStr;

use clap::Parser;

use super::{compile_worker, device_worker};
use crate::Ended;

/// What the server starts this binary as. Apart from the commands of `cli.rs`: these are not for people.
#[derive(Parser)]
#[command(name = "tensor-wasm")]
pub(crate) enum Worker {
    DeviceWorker(device_worker::DeviceWorker),
    CompileWorker(compile_worker::CompileWorker),
}

impl Worker {
    /// The worker that this process is to be, if its first argument says so.
    pub(crate) fn asked_for() -> Option<Worker> {
        let is_worker = |arg: &OsStr| ["device-worker", "compile-worker"].iter().any(|name| arg == *name);
        std::env::args_os().nth(1).filter(|arg| is_worker(arg)).map(|_| Worker::parse())
    }

    pub(crate) fn execute(self) -> Ended {
        match self {
            Worker::DeviceWorker(worker) => worker.execute(),
            Worker::CompileWorker(worker) => worker.execute(),
        }
    }
}
