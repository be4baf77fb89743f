//! Kernels are Wasm: compiles the kernels of a core Wasm module to PTX that cannot leave the memory it is given and
//! cannot run for ever, and runs that PTX in an emulator where there is no GPU. A pure function of its input: no I/O,
//! no threads, no unsafe code, no panics.
//!
//! ```text
//! bytes → Program ─┐                  ┌─ Facts ─┐           ┌→ PTX  (ptx)  → KernelImage
//!        (profile) ├ lower ─→ Body ───┤         ├→ Legal ───┤
//!   a host's calls ┴ build            └─────────┘ (legalize)└→ Wasm (host) → HostImage
//! ```
//!
//! In that order: `profile` reads a module; `lower` makes operations (`ir`) of it, by way of `assemble` and `math`,
//! which `build` uses too for what a host builds; `pressure` refuses what a device's assembler would choke on; `facts`
//! finds out about registers; `legalize` says in operations what Wasm only implies, with `groups` of accesses that are
//! checked together; `ptx`, with `loops`, and `host` translate. What they return is in `image`, why they refuse in
//! `refusal`.

pub mod actor;
// Where operations are matched, a wildcard would swallow a new one: each pass has to say what it means.
#[warn(clippy::wildcard_enum_match_arm)]
mod assemble;
#[warn(clippy::wildcard_enum_match_arm)]
pub mod build;
#[warn(clippy::wildcard_enum_match_arm)]
mod exchange;
#[warn(clippy::wildcard_enum_match_arm)]
mod facts;
#[warn(clippy::wildcard_enum_match_arm)]
mod gpu;
#[warn(clippy::wildcard_enum_match_arm)]
mod groups;
#[warn(clippy::wildcard_enum_match_arm)]
mod host;
#[warn(clippy::wildcard_enum_match_arm)]
mod ir;
#[warn(clippy::wildcard_enum_match_arm)]
mod legalize;
#[warn(clippy::wildcard_enum_match_arm)]
mod loops;
#[warn(clippy::wildcard_enum_match_arm)]
mod math;
#[warn(clippy::wildcard_enum_match_arm)]
mod pressure;
#[warn(clippy::wildcard_enum_match_arm)]
mod ptx;
#[warn(clippy::wildcard_enum_match_arm)]
mod subgroup;

pub mod emulate;
mod image;
mod instructions;
mod lower;
mod profile;
mod refusal;

pub use crate::assemble::{OPS_MAX, SHARED_BYTES_MAX};
pub use crate::gpu::{COPY_BYTES, HalfType, MatrixElement, Target};
pub use crate::host::{CALL, CallLayout, HostImage, HostLayout};
pub use crate::image::{
    BUDGET_TICKS_MAX, CONTROL, ControlLayout, KernelImage, LAUNCHES_MAX, Memory, Param, RECORD, RecordLayout, Trap,
    budget_ticks,
};
pub use crate::ir::{SHARED_ADDRESS, SUBGROUP, TrapKind, Ty};
use crate::legalize::WindowSizes;
pub use crate::profile::{MODULE_BYTES_MAX, Program};
pub use crate::refusal::{Refusal, SourceLocation};

/// Changes with the compiler: what it made of a kernel may be kept under it.
pub const VERSION: &str = env!("COMPILER_VERSION");

impl Program<'_> {
    /// Compiles a kernel. `windows` says which parameters are given buffers; those must be i32.
    pub fn compile(&self, kernel: &str, windows: &[bool]) -> Result<KernelImage, Refusal> {
        self.built(kernel, windows)?.compile()
    }

    /// The same for windows of any size, even smaller than an access ([`KernelImage::fits`]): slower.
    pub fn compile_small(&self, kernel: &str, windows: &[bool]) -> Result<KernelImage, Refusal> {
        self.built(kernel, windows)?.compile_small()
    }

    /// Compiles a kernel for a CPU: to Wasm that runs many work items at a call.
    pub fn compile_host(&self, kernel: &str, windows: &[bool]) -> Result<HostImage, Refusal> {
        self.built(kernel, windows)?.compile_host()
    }

    /// A kernel in the form that all of them are compiled from, whoever made it.
    pub fn built(&self, kernel: &str, windows: &[bool]) -> Result<build::BuiltKernel, Refusal> {
        let body = lower::lower(self, kernel)?;
        let is_address =
            |(n, is_window): (usize, &bool)| !is_window || body.params.get(n).map(|reg| body.ty(*reg)) == Some(Ty::I32);
        if windows.len() != body.params.len() || !windows.iter().enumerate().all(is_address) {
            let why =
                format!("it has {} parameters, and buffers can only be given to those that are i32", body.params.len());
            return Err(Refusal::NotAKernel { name: kernel.to_owned(), why });
        }
        // On every device alike, so that what runs on one runs on the others.
        pressure::check(&body)?;
        Ok(build::BuiltKernel { body, windows: windows.to_vec() })
    }

    /// The parameters of a kernel that memory is accessed through, as far as can be told: they will be given buffers.
    pub fn pointers(&self, kernel: &str) -> Result<Vec<bool>, Refusal> {
        let body = lower::lower(self, kernel)?;
        Ok(facts::pointers(&body))
    }

    /// Compiles any exported function, with two windows before its parameters: one for results and globals, eight bytes
    /// each (globals from byte 512 on), and one that is the module's memory. For comparing with other engines.
    pub fn compile_call(&self, function: &str) -> Result<KernelImage, Refusal> {
        let body = lower::lower_call(self, function)?;
        pressure::check(&body)?;
        let windows: Vec<bool> = (0..body.params.len()).map(|n| n < 2).collect();
        ptx::emit(&legalize::legalize(body, &windows, WindowSizes::FitAccesses))
    }

    /// The same for a CPU.
    pub fn compile_host_call(&self, function: &str) -> Result<HostImage, Refusal> {
        let body = lower::lower_call(self, function)?;
        pressure::check(&body)?;
        let windows: Vec<bool> = (0..body.params.len()).map(|n| n < 2).collect();
        host::emit(&legalize::legalize(body, &windows, WindowSizes::FitAccesses))
    }
}
