//! Kernel modules: bytes whose exports are kernels, read once and shared by everybody who has the same bytes, or one
//! kernel that a host built.

use std::sync::Arc;

use tensor_wasm_jit::build::BuiltKernel;
use tensor_wasm_jit::{Program, Refusal, Ty};

use crate::KernelError;

/// A module whose exports are kernels.
pub struct KernelModule {
    pub(crate) code: Code,
    pub(crate) hash: blake3::Hash,
    kernels: Vec<(Arc<str>, Vec<Ty>)>,
    /// Exports that are no kernels, and why.
    others: Vec<(String, String)>,
}

/// What kernels are made from.
pub enum Code {
    Wasm(Vec<u8>),
    /// Code of a GPU, taken as it is.
    Raw(Vec<u8>),
    Built(Box<BuiltKernel>),
}

/// PTX, a cubin or a fat binary: what a driver would load.
pub(crate) fn is_device_code(bytes: &[u8]) -> bool {
    let text = bytes.trim_ascii_start();
    let starts = [&b"//"[..], b".version", b".target", b"\x50\xed\x55\xba"];
    // The machine that an ELF file is for.
    let is_cubin = bytes.starts_with(b"\x7fELF") && bytes.get(18..20) == Some(&[190, 0]);
    is_cubin || starts.iter().any(|start| text.starts_with(start))
}

impl KernelModule {
    /// Code of a GPU, taken as it is.
    pub(crate) fn raw(code: Vec<u8>) -> KernelModule {
        let hash = blake3::hash(&code);
        KernelModule { code: Code::Raw(code), hash, kernels: Vec::new(), others: Vec::new() }
    }

    /// One kernel, which a host built. Cached under what it is, as bytes are.
    pub fn built(kernel: BuiltKernel) -> KernelModule {
        let hash = blake3::hash(kernel.text().as_bytes());
        let kernels = vec![(kernel.name().into(), kernel.types())];
        KernelModule { code: Code::Built(Box::new(kernel)), hash, kernels, others: Vec::new() }
    }

    pub(crate) fn read(wasm: Vec<u8>, hash: blake3::Hash) -> Result<KernelModule, Refusal> {
        let program = Program::read(&wasm)?;
        let (mut kernels, mut others) = (Vec::new(), Vec::new());
        for (name, types) in program.exports() {
            match types {
                Ok(types) => kernels.push((name.into(), types)),
                Err(why) => others.push((name.to_owned(), why.to_string())),
            }
        }
        Ok(KernelModule { code: Code::Wasm(wasm), hash, kernels, others })
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|(name, _)| &**name)
    }

    /// Whether it has a kernel of that name, and if not why.
    pub fn has(&self, name: &str) -> Result<(), KernelError> {
        // Of code that is taken as it is, the device says so when it is launched.
        if matches!(self.code, Code::Raw(_)) { Ok(()) } else { self.kernel(name).map(drop) }
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<&(Arc<str>, Vec<Ty>), KernelError> {
        if matches!(self.code, Code::Raw(_)) {
            return Err(KernelError::Arguments("it is code of a GPU, whose kernels are not known here".to_owned()));
        }
        if let Some(kernel) = self.kernels.iter().find(|(own, _)| &**own == name) {
            return Ok(kernel);
        }
        if let Some((_, why)) = self.others.iter().find(|(own, _)| own == name) {
            return Err(KernelError::Arguments(why.clone()));
        }
        let known = self.names().collect::<Vec<_>>().join(", ");
        Err(Refusal::NoSuchKernel { name: name.chars().take(64).collect(), known }.into())
    }
}
