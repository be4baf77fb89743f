//! Why a kernel is refused. Every refusal names what was found and where, so that it can be mended by reading it.

use std::fmt;

/// Where in the source something is: in a Wasm module, or in what a host has built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceLocation {
    /// The function's name, or its number where it has none; or what the host says.
    pub function: String,
    /// The byte of the module at which the instruction begins.
    pub offset: Option<usize>,
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.offset {
            Some(offset) => write!(f, "in {} at byte {offset:#x}", self.function),
            None => write!(f, "in {}", self.function),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("it is not a Wasm module: {why}")]
    NotWasm { why: String },
    #[error("the module has {bytes} bytes; at most {bytes_max} are possible")]
    TooLarge { bytes: usize, bytes_max: usize },
    #[error("{what} is not possible in a kernel module")]
    Module { what: String },
    #[error("{instruction} is not possible in a kernel ({place})")]
    Instruction { instruction: String, place: SourceLocation },
    #[error("{import} is not something a kernel can call ({place}); the imports of module `kernel` are")]
    Import { import: String, place: SourceLocation },
    #[error("it calls itself ({place}): {cycle}; kernels cannot recurse")]
    Recursion { cycle: String, place: SourceLocation },
    #[error("kernel.shared needs a constant number of bytes, at most {bytes_max} in all ({place})")]
    Shared { bytes_max: u32, place: SourceLocation },
    #[error("with everything it calls it has more than {ops_max} operations ({place}); split it into smaller kernels")]
    TooLong { ops_max: usize, place: SourceLocation },
    #[error(
        "it keeps more than {values_max} values alive at once ({place}), for which the GPU's compiler would take minutes; split it, or keep some of them in memory"
    )]
    TooManyValues { values_max: usize, place: SourceLocation },
    #[error("there is no kernel {name:?}; there are: {known}")]
    NoSuchKernel { name: String, known: String },
    #[error("it has instructions that GPUs have from compute capability {}.{} on; this one has {}.{}", needed.0, needed.1, found.0, found.1)]
    OlderGpu { needed: (u32, u32), found: (u32, u32) },
    #[error("{name} is exported but is not a kernel: {why}")]
    NotAKernel { name: String, why: String },
}
