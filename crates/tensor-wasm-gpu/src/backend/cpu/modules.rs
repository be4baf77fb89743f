//! Kernel modules on the CPU: loaded by what the worker was given to run kernels with.

use std::sync::Arc;

use super::GROUP_ITEMS_MAX;
use crate::backend::modules::{FoundKernel, ModuleLoader};
use crate::error::DeviceError;
use crate::slab::TENANTS;
use crate::worker::host::{HostKernels, HostModule};

pub(super) struct CpuLoader {
    pub(super) kernels: HostKernels,
}

/// A kernel of a module, ready to run.
pub(super) struct CpuKernel {
    pub module: Arc<dyn HostModule>,
    pub name: String,
}

impl ModuleLoader for CpuLoader {
    type Module = Arc<dyn HostModule>;
    type Kernel = Arc<CpuKernel>;

    const IMAGE_PADDING_BYTES: usize = 0;

    fn enter(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn load(&self, lane: usize, image: Vec<u8>) -> Result<Arc<dyn HostModule>, DeviceError> {
        let none = || DeviceError::Unsupported { what: "running kernels".to_owned() };
        let code = self.kernels.0.as_ref().ok_or_else(none)?;
        code.load(lane - TENANTS, &image).map_err(|why| DeviceError::BadModule { why })
    }

    fn unload(&self, _modules: Vec<Arc<dyn HostModule>>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn find(&self, module: &Arc<dyn HostModule>, name: &[u8]) -> Result<FoundKernel<Arc<CpuKernel>>, DeviceError> {
        let name = String::from_utf8_lossy(name).into_owned();
        let Some(params) = module.params(&name) else { return Err(DeviceError::NoSuchKernel { name }) };
        Ok(FoundKernel {
            kernel: Arc::new(CpuKernel { module: module.clone(), name }),
            params,
            threads_max: u64::from(GROUP_ITEMS_MAX),
            shared_bytes: 0,
            registers: 0,
            blocks_per_multiprocessor: 1,
        })
    }
}
