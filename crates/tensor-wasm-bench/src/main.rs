//! Comparisons with peers, both sides in one run and interleaved: `cargo run --release -p tensor-wasm-bench -- WHAT`.
//! Each writes a file under `bench-results/` whose rows carry the goal and whether it holds.

#![expect(clippy::print_stdout, reason = "a benchmark reports on stdout")]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "statistics")]

mod cold;
mod concurrent;
mod decode;
mod invoke;
mod kernels;
mod peers;
mod report;
mod run;
mod serve;
mod served;
mod tensors;
mod tensors_auto;
mod tensors_cuda;
mod tensors_http;
mod tensors_latency;

use clap::Parser;

/// The product's allocator, for both sides of in-process comparisons.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(about = "Compares TensorWasm with its peers on this machine")]
enum Comparison {
    /// HTTP: a hello component against `wasmtime serve` and a JavaScript hello on `workerd`, loaded with `wrk`.
    Serve {
        /// Seconds per measurement.
        #[arg(long, default_value_t = 4)]
        seconds: u32,
        /// Measurements of each side per number of connections; the median counts.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    },
    /// An empty export in process, against bare Wasmtime with the same pool.
    Invoke,
    /// A CPU-bound program, against `wasmtime run`.
    Run,
    /// Starting with many functions deployed.
    Cold,
    /// Kernels on the CPU, against the same loops in Rust.
    Kernels,
    /// What a guest waits for a launch on a GPU, against raw driver calls.
    Guest,
    /// Concurrent calls of one tenant on a GPU, over HTTP.
    Concurrent,
    /// Tensors on the CPU, against NumPy, PyTorch, ndarray, candle and burn, which are installed first.
    Tensors {
        /// Measurements of each side of each row, in turns; the median counts.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Only rows whose names contain this.
        #[arg(long)]
        only: Option<String>,
    },
    /// Tensors on a GPU, against the PyTorch that `python3` has.
    TensorsCuda {
        /// Measurements of each side of each row, in turns; the median counts.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Print the microseconds of one row of ours, and nothing else.
        #[arg(long, value_name = "ROW")]
        raw: Option<String>,
        /// Only the device `auto`: print its grid, and how often it took the better device.
        #[arg(long)]
        auto: bool,
        /// Only where the time goes between a call and its result on the host.
        #[arg(long)]
        latency: bool,
    },
}

fn main() -> anyhow::Result<()> {
    match Comparison::parse() {
        Comparison::Serve { seconds, rounds } => serve::compare(seconds, rounds),
        Comparison::Invoke => invoke::compare(),
        Comparison::Run => run::compare(),
        Comparison::Cold => cold::compare(),
        Comparison::Kernels => kernels::compare(),
        Comparison::Guest => kernels::guest(),
        Comparison::Concurrent => concurrent::compare(),
        Comparison::Tensors { rounds, only } => tensors::compare(rounds, only.as_deref()),
        Comparison::TensorsCuda { auto: true, .. } => tensors_auto::print(),
        Comparison::TensorsCuda { latency: true, .. } => tensors_latency::print(),
        Comparison::TensorsCuda { rounds, raw, .. } => tensors_cuda::compare(rounds, raw.as_deref()),
    }
}
