//! Kernel modules of a device: images that were uploaded, modules that were loaded, kernels that were found. All of
//! them are numbered and belong to a tenant's lane. How an image becomes code is the backend's business
//! ([`ModuleLoader`]).

use std::collections::HashMap;

use parking_lot::Mutex;

use super::unknown;
use crate::error::DeviceError;
use crate::queue::job::{Answer, Cell, Job};
use crate::slab::{PAYLOAD_BYTES_MAX, Slab};

/// What a backend itself does to load modules. Every lane calls it, on a thread of its own.
pub(super) trait ModuleLoader: Send + Sync + 'static {
    type Module: Clone + Send;
    type Kernel: Clone + Send;

    /// Zero bytes that an image is followed by, for compilers that want text to end with a NUL.
    const IMAGE_PADDING_BYTES: usize;

    /// Whatever a thread needs before its first job.
    fn enter(&self) -> Result<(), DeviceError>;

    /// Loads an image, padding included. It may take seconds, and only its lane waits.
    fn load(&self, lane: usize, image: Vec<u8>) -> Result<Self::Module, DeviceError>;

    /// The server sees to it that nothing on the device uses the modules any more.
    fn unload(&self, modules: Vec<Self::Module>) -> Result<(), DeviceError>;

    fn find(&self, module: &Self::Module, name: &[u8]) -> Result<FoundKernel<Self::Kernel>, DeviceError>;
}

/// A kernel, and what its device says about it.
pub(super) struct FoundKernel<K> {
    pub kernel: K,
    /// Offset and size of each parameter.
    pub params: Vec<(u32, u32)>,
    pub threads_max: u64,
    pub shared_bytes: u64,
    pub registers: u64,
    pub blocks_per_multiprocessor: u64,
}

/// The modules of all lanes, for the worker and for every lane. What is left is unloaded with the last of them.
pub(super) struct Modules<L: ModuleLoader> {
    loader: L,
    table: Mutex<ModuleTable<L::Module, L::Kernel>>,
}

impl<L: ModuleLoader> Drop for Modules<L> {
    fn drop(&mut self) {
        let _ = self.loader.enter().and_then(|()| self.unload(|_, _| true));
    }
}

impl<L: ModuleLoader> Modules<L> {
    pub(super) fn new(loader: L) -> Modules<L> {
        Modules { loader, table: Mutex::new(ModuleTable::new()) }
    }

    pub(super) fn loader(&self) -> &L {
        &self.loader
    }

    pub(super) fn kernel(&self, lane: usize, number: u32) -> Option<L::Kernel> {
        self.table.lock().kernel(lane, number)
    }

    /// Copies an image out of the slab: what a compiler parses must not change under it.
    pub(super) fn upload(&self, lane: usize, slab: &Slab, offset: u64, bytes: u64) -> Result<u32, DeviceError> {
        let outside = || DeviceError::OutOfRange { offset, len: bytes, size: slab.len() as u64 };
        offset.checked_add(bytes).filter(|end| *end <= slab.len() as u64).ok_or_else(outside)?;
        let len = usize::try_from(bytes).map_err(|_| outside())?;
        let mut image = vec![0; len + L::IMAGE_PADDING_BYTES];
        slab.copy_out(offset, &mut image[..len]);
        Ok(self.table.lock().add_image(lane, image))
    }

    /// Does a lane's job, on the lane's thread.
    pub(super) fn execute(
        &self,
        lane: usize,
        slab: &Slab,
        job: Job,
        payload: &[u8],
        cell: u32,
    ) -> Result<Answer, DeviceError> {
        match job {
            Job::Load { image } => {
                let bytes = self.table.lock().take_image(lane, image).ok_or_else(|| unknown(job))?;
                let module = self.loader.load(lane, bytes)?;
                Ok(Answer::of(self.table.lock().add_module(lane, module)))
            }
            Job::ForgetImage { image } => {
                self.table.lock().take_image(lane, image).map(|_| Answer::default()).ok_or_else(|| unknown(job))
            }
            Job::Kernel { module: number } => {
                let module = self.table.lock().module(lane, number).ok_or_else(|| unknown(job))?;
                let found = self.loader.find(&module, payload)?;
                self.answer_kernel(lane, number, found, &Cell(slab.cell(cell)))
            }
            Job::Unload { module } => match self.unload(|number, owner| number == module && owner == lane)? {
                0 => Err(unknown(job)),
                _ => Ok(Answer::default()),
            },
            Job::Clear => {
                self.table.lock().forget_images(lane);
                self.unload(|_, owner| owner == lane).map(|_| Answer::default())
            }
            other => Err(unknown(other)),
        }
    }

    /// The payload becomes the kernel's parameters, as pairs of u32.
    fn answer_kernel(
        &self,
        lane: usize,
        module: u32,
        found: FoundKernel<L::Kernel>,
        cell: &Cell<'_>,
    ) -> Result<Answer, DeviceError> {
        let FoundKernel { kernel, params, threads_max, shared_bytes, registers, blocks_per_multiprocessor } = found;
        let layout: Vec<u8> =
            params.iter().flat_map(|(offset, size)| [*offset, *size]).flat_map(u32::to_le_bytes).collect();
        if layout.len() >= PAYLOAD_BYTES_MAX {
            let what = format!("a kernel with {} parameters", params.len());
            return Err(DeviceError::Unsupported { what });
        }
        cell.put_payload(&layout);
        let number = u64::from(self.table.lock().add_kernel(lane, module, kernel));
        let count = params.len() as u64;
        Ok(Answer { values: [number, count, threads_max, shared_bytes, registers, blocks_per_multiprocessor] })
    }

    /// Unloads some modules, by number and lane. Returns how many.
    fn unload(&self, which: impl Fn(u32, usize) -> bool) -> Result<usize, DeviceError> {
        // Outside the lock: a driver may take its time.
        let gone = self.table.lock().remove_modules(which);
        let count = gone.len();
        if count > 0 {
            self.loader.unload(gone)?;
        }
        Ok(count)
    }
}

/// Numbers and owners. A number that is another lane's is as good as none.
struct ModuleTable<M, K> {
    /// Uploaded and not loaded yet.
    images: HashMap<u32, LaneOwned<Vec<u8>>>,
    modules: HashMap<u32, LaneOwned<M>>,
    /// Found in a module, and forgotten with it.
    kernels: slab::Slab<(u32, LaneOwned<K>)>,
    last_number: u32,
}

struct LaneOwned<T> {
    lane: usize,
    value: T,
}

impl<M: Clone, K: Clone> ModuleTable<M, K> {
    fn new() -> ModuleTable<M, K> {
        ModuleTable { images: HashMap::new(), modules: HashMap::new(), kernels: slab::Slab::new(), last_number: 0 }
    }

    fn next_number(&mut self) -> u32 {
        self.last_number = self.last_number.wrapping_add(1);
        self.last_number
    }

    fn add_image(&mut self, lane: usize, image: Vec<u8>) -> u32 {
        let number = self.next_number();
        self.images.insert(number, LaneOwned { lane, value: image });
        number
    }

    fn take_image(&mut self, lane: usize, number: u32) -> Option<Vec<u8>> {
        self.images.get(&number).filter(|image| image.lane == lane)?;
        self.images.remove(&number).map(|image| image.value)
    }

    fn forget_images(&mut self, lane: usize) {
        self.images.retain(|_, image| image.lane != lane);
    }

    fn add_module(&mut self, lane: usize, module: M) -> u32 {
        let number = self.next_number();
        self.modules.insert(number, LaneOwned { lane, value: module });
        number
    }

    fn module(&self, lane: usize, number: u32) -> Option<M> {
        self.modules.get(&number).filter(|module| module.lane == lane).map(|module| module.value.clone())
    }

    fn remove_modules(&mut self, which: impl Fn(u32, usize) -> bool) -> Vec<M> {
        let gone = self.modules.extract_if(|number, module| which(*number, module.lane));
        let gone: Vec<M> = gone.map(|(_, module)| module.value).collect();
        let modules = &self.modules;
        self.kernels.retain(|_, (module, _)| modules.contains_key(module));
        gone
    }

    fn add_kernel(&mut self, lane: usize, module: u32, kernel: K) -> u32 {
        let number = self.kernels.insert((module, LaneOwned { lane, value: kernel }));
        // More of them than a u32 counts do not fit into memory; the number of none is refused when it is used.
        u32::try_from(number).unwrap_or(u32::MAX)
    }

    fn kernel(&self, lane: usize, number: u32) -> Option<K> {
        let (_, kernel) = self.kernels.get(number as usize)?;
        (kernel.lane == lane).then(|| kernel.value.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_another_lanes_is_not_there() {
        let mut table: ModuleTable<&str, &str> = ModuleTable::new();
        let image = table.add_image(7, vec![1, 2]);
        assert_eq!(table.take_image(8, image), None);
        assert_eq!((table.take_image(7, image), table.take_image(7, image)), (Some(vec![1, 2]), None));
        let (mine, theirs) = (table.add_module(7, "mine"), table.add_module(8, "theirs"));
        assert!(image != mine && mine != theirs);
        assert_eq!((table.module(7, mine), table.module(7, theirs)), (Some("mine"), None));
        let (k, l) = (table.add_kernel(7, mine, "k"), table.add_kernel(8, theirs, "l"));
        assert_eq!((table.kernel(7, k), table.kernel(8, k), table.kernel(8, l)), (Some("k"), None, Some("l")));
        assert_eq!((table.kernel(7, u32::MAX), table.module(7, u32::MAX)), (None, None));
        assert_eq!(table.remove_modules(|number, lane| number == theirs && lane == 7), [""; 0], "not its owner");
        assert_eq!(table.remove_modules(|_, lane| lane == 7), ["mine"]);
        assert_eq!((table.kernel(7, k), table.kernel(8, l)), (None, Some("l")), "kernels go with their module");
        let again = table.add_kernel(8, theirs, "m");
        assert_eq!(
            (table.kernel(7, again), table.kernel(8, again)),
            (None, Some("m")),
            "a number that was used before"
        );
        table.add_image(8, vec![3]);
        table.forget_images(8);
        assert!(table.images.is_empty());
    }
}
