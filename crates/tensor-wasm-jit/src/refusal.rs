//! Why a kernel is refused. Every refusal names what was found and where, so that it can be mended by reading it.

use std::fmt;

/// A place in a Wasm module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The function's name, or its number where it has none.
    pub function: String,
    /// The byte of the module at which the instruction begins.
    pub offset: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in {} at byte {:#x}", self.function, self.offset)
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
    Instruction { instruction: String, place: Place },
    #[error("{import} is not something a kernel can call ({place}); the imports of module `kernel` are")]
    Import { import: String, place: Place },
    #[error("it calls itself ({place}): {cycle}; kernels cannot recurse")]
    Recursion { cycle: String, place: Place },
    #[error("kernel.shared needs a constant number of bytes, at most {bytes_max} in all ({place})")]
    Shared { bytes_max: u32, place: Place },
    #[error("with everything it calls it has more than {ops_max} operations ({place}); split it into smaller kernels")]
    TooLong { ops_max: usize, place: Place },
    #[error(
        "it keeps more than {values_max} values alive at once ({place}), for which the GPU's compiler would take minutes; split it, or keep some of them in memory"
    )]
    TooManyValues { values_max: usize, place: Place },
    #[error("there is no kernel {name:?}; there are: {known}")]
    NoSuchKernel { name: String, known: String },
    #[error("{name} is exported but is not a kernel: {why}")]
    NotAKernel { name: String, why: String },
}
