//! Kernels on the CPU device: what a worker is given to load and run them. How they are written and compiled is not
//! this crate's business; it hands over bytes and has launches done, in the order of their stream.

use std::sync::Arc;

use crate::backend::cpu::memory::HostMemory;

/// What the CPU device compiles and runs kernels with.
pub trait HostCode: Send + Sync {
    /// Compiles a module of the tenant on a stream. The text of an error is for whoever wrote the module.
    fn load(&self, stream: usize, image: &[u8]) -> Result<Arc<dyn HostModule>, String>;

    /// Memory of a stream was given back: what is still mapped of it is to be forgotten, now or when a launch that is
    /// under way is done. Does not wait.
    fn forget(&self, stream: usize);
}

/// A module that was loaded.
pub trait HostModule: Send + Sync {
    /// A kernel of it: the offset and size of each of its parameters; none if there is no such kernel.
    fn params(&self, kernel: &str) -> Option<Vec<(u32, u32)>>;

    /// Runs a kernel and returns when it is done. What goes wrong is written where the parameters say.
    fn launch(&self, launch: &HostLaunch<'_>);
}

/// A launch on the CPU.
pub struct HostLaunch<'l> {
    pub kernel: &'l str,
    pub groups: [u32; 3],
    pub items: [u32; 3],
    pub params: &'l [u8],
    pub memory: &'l Arc<HostMemory>,
}

/// Who runs kernels, if anybody does.
#[derive(Clone, Default)]
pub struct HostKernels(pub Option<Arc<dyn HostCode>>);

impl std::fmt::Debug for HostKernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "HostKernels(…)" } else { "HostKernels(none)" })
    }
}
