//! Kernels on a GPU, for the tests and benchmarks of this crate.

use std::cell::Cell;

use tensor_wasm_gpu::{
    Buffer, Completion, Device, DeviceChoice, DeviceError, Grid, Kernel, OpenOptions, Param, Params, Pinned, Tenant,
};
use tensor_wasm_jit::{CONTROL, KernelImage, RECORD, Trap, budget_ticks};

/// A stream of launches of one tenant.
pub(crate) struct Gpu {
    pub(crate) tenant: Tenant,
    control: Buffer,
    record: Pinned,
    launch: Cell<u64>,
    pub(crate) deadline_ns: Cell<u64>,
    runtime: tokio::runtime::Runtime,
}

/// An argument of a launch.
pub(crate) enum Arg<'a> {
    Scalar(Param),
    /// A buffer, the kernel's address of it, and its size.
    Window(&'a Buffer, u32, u32),
}

pub(crate) fn open() -> Option<Device> {
    match Device::open(&OpenOptions { choice: DeviceChoice::Cuda(0), ..OpenOptions::default() }) {
        Ok(device) => Some(device),
        Err(why) => {
            println!("skipped: no CUDA device: {why}");
            None
        }
    }
}

impl Gpu {
    pub(crate) fn new(device: &Device, name: &str) -> Gpu {
        let limits = tensor_wasm_gpu::TenantLimits { memory_bytes_max: 16 << 30, ..Default::default() };
        let tenant = device.tenant(name, limits).unwrap();
        let control = tenant.buffer(u64::from(CONTROL.bytes)).unwrap();
        let record = device.pinned(u64::from(RECORD.bytes)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        Gpu { tenant, control, record, launch: Cell::new(0), deadline_ns: Cell::new(10_000_000_000), runtime }
    }

    pub(crate) fn load(&self, image: &[u8], entry: &str) -> Result<Kernel, DeviceError> {
        let module = self.runtime.block_on(self.tenant.load(image))?;
        self.runtime.block_on(self.tenant.kernel(&module, entry))
    }

    pub(crate) fn launch(&self, kernel: &Kernel, grid: [u32; 3], block: [u32; 3], args: &[Arg<'_>]) -> Completion {
        self.launch.set(self.launch.get() + 1);
        let mut params = Vec::new();
        for arg in args {
            match arg {
                Arg::Scalar(param) => params.push(param.clone()),
                Arg::Window(buffer, start, size) => {
                    params.extend([Param::from(*buffer), Param::U32(*start), Param::U32(*size)]);
                }
            }
        }
        params.push(Param::from(&self.control));
        params.push(Param::Pinned { memory: self.record.clone(), offset: 0 });
        params.push(Param::U64(self.launch.get()));
        params.push(Param::U32(budget_ticks(self.deadline_ns.get())));
        let grid = Grid { blocks: grid, threads: block, shared_bytes: 0 };
        self.tenant.launch(kernel, grid, &Params::new(params)).unwrap()
    }

    /// The trap of the last launch, which is over.
    pub(crate) fn trap(&self, image: &KernelImage) -> Option<Trap> {
        let mut record = vec![0; RECORD.bytes as usize];
        self.record.read(0, &mut record).unwrap();
        Trap::read(&record, self.launch.get(), &image.sites)
    }
}
