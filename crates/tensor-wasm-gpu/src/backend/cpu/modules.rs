//! Kernel modules on the CPU: loaded by what the worker was given to run kernels with, kept by number, owned by lanes.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{GROUP_ITEMS_MAX, no_kernels, unknown};
use crate::backend::lane::Loader;
use crate::error::DeviceError;
use crate::queue::job::{Answer, Cell, Job};
use crate::slab::{PAYLOAD_BYTES_MAX, SEATS, Slab};
use crate::worker::host::{HostKernels, HostModule};

/// Modules that were loaded, for the worker and for every lane.
pub(super) struct Modules {
    pub(super) kernels: HostKernels,
    pub(super) table: Mutex<Table>,
}

#[derive(Default)]
pub(super) struct Table {
    /// By their numbers, with the lanes they belong to.
    modules: HashMap<u32, (usize, Arc<dyn HostModule>)>,
    /// Kernels that were asked for: their lanes, modules and names.
    kernels: slab::Slab<(usize, u32, String)>,
    pub(super) images: HashMap<u32, (usize, Vec<u8>)>,
    next_number: u32,
}

impl Table {
    pub(super) fn number(&mut self) -> u32 {
        self.next_number = self.next_number.wrapping_add(1);
        self.next_number
    }

    fn take_image(&mut self, lane: usize, image: u32) -> Option<Vec<u8>> {
        self.images.get(&image).filter(|(owner, _)| *owner == lane)?;
        self.images.remove(&image).map(|(_, bytes)| bytes)
    }

    fn unload(&mut self, which: impl Fn(u32, usize) -> bool) {
        self.modules.retain(|number, (owner, _)| !which(*number, *owner));
        let modules = &self.modules;
        self.kernels.retain(|_, (_, module, _)| modules.contains_key(module));
    }
}

impl Modules {
    fn find(&self, lane: usize, slab: &Slab, module: u32, name: &[u8], cell: u32) -> Result<Answer, DeviceError> {
        let name = String::from_utf8_lossy(name).into_owned();
        let mut table = self.table.lock();
        let found = table.modules.get(&module).filter(|(owner, _)| *owner == lane).ok_or_else(unknown)?;
        let Some(params) = found.1.params(&name) else { return Err(DeviceError::NoSuchKernel { name }) };
        let layout: Vec<u8> =
            params.iter().flat_map(|(offset, size)| [*offset, *size]).flat_map(u32::to_le_bytes).collect();
        if layout.len() >= PAYLOAD_BYTES_MAX {
            return Err(DeviceError::Unsupported { what: "a kernel with that many parameters".to_owned() });
        }
        Cell(slab.cell(cell)).put_payload(&layout);
        let number = table.kernels.insert((lane, module, name)) as u64;
        Ok(Answer { values: [number, params.len() as u64, u64::from(GROUP_ITEMS_MAX), 0, 0, 1] })
    }

    pub(super) fn kernel(&self, lane: usize, number: u32) -> Option<(Arc<dyn HostModule>, String)> {
        let table = self.table.lock();
        let (_, module, name) = table.kernels.get(number as usize).filter(|(owner, ..)| *owner == lane)?;
        table.modules.get(module).map(|(_, module)| (module.clone(), name.clone()))
    }
}

impl Loader for Modules {
    fn enter(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn execute(&self, lane: usize, slab: &Slab, job: Job, payload: &[u8], cell: u32) -> Result<Answer, DeviceError> {
        match job {
            Job::Load { image } => {
                let image = self.table.lock().take_image(lane, image).ok_or_else(unknown)?;
                let code = self.kernels.0.as_ref().ok_or_else(no_kernels)?;
                let module = code.load(lane - SEATS, &image).map_err(|why| DeviceError::BadModule { why })?;
                let mut table = self.table.lock();
                let number = table.number();
                table.modules.insert(number, (lane, module));
                Ok(Answer { values: [u64::from(number), 0, 0, 0, 0, 0] })
            }
            Job::ForgetImage { image } => {
                self.table.lock().take_image(lane, image).map(|_| Answer::default()).ok_or_else(unknown)
            }
            Job::Kernel { module } => self.find(lane, slab, module, payload, cell),
            Job::Unload { module } => {
                self.table.lock().unload(|number, owner| number == module && owner == lane);
                Ok(Answer::default())
            }
            Job::Clear => {
                let mut table = self.table.lock();
                table.images.retain(|_, (owner, _)| *owner != lane);
                table.unload(|_, owner| owner == lane);
                Ok(Answer::default())
            }
            _ => Err(unknown()),
        }
    }
}
