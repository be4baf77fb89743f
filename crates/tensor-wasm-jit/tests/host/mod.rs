//! Kernels on the CPU, for the tests of this crate: what an engine has to do to run an image, as simply as possible.

use tensor_wasm_jit::{CALL, HostImage, RECORD, Trap, TrapKind};
use wasmtime::{Caller, Config, Engine, Func, Instance, MemoryType, Module, SharedMemory, Store};

/// An address space, all of which can be touched: nothing but the fence keeps a kernel from it.
pub(crate) struct Host {
    engine: Engine,
    windows: SharedMemory,
}

/// An argument of a launch.
pub(crate) enum HostArg<'a> {
    Bits(u64),
    /// A window at an address.
    Window(u32, &'a mut Vec<u8>),
}

impl Host {
    pub(crate) fn new() -> Host {
        let mut config = Config::new();
        config.relaxed_simd_deterministic(true).shared_memory(true);
        let engine = Engine::new(&config).unwrap();
        let windows = SharedMemory::new(&engine, MemoryType::shared(1 << 16, 1 << 16)).unwrap();
        Host { engine, windows }
    }

    pub(crate) fn compile(&self, image: &HostImage) -> Module {
        Module::new(&self.engine, &image.wasm).unwrap_or_else(|why| panic!("{}: {why:?}", image.name))
    }

    /// Runs a kernel in one thread. What was in the windows comes back, whatever happens.
    pub(crate) fn run(
        &self,
        image: &HostImage,
        module: &Module,
        groups: [u32; 3],
        items: [u32; 3],
        args: Vec<HostArg<'_>>,
    ) -> Option<Trap> {
        self.run_within(image, module, groups, items, args, u32::MAX)
    }

    /// The same until it has polled so often: then its deadline has passed.
    pub(crate) fn run_within(
        &self,
        image: &HostImage,
        module: &Module,
        groups: [u32; 3],
        items: [u32; 3],
        mut args: Vec<HostArg<'_>>,
        polls: u32,
    ) -> Option<Trap> {
        let mut store = Store::new(&self.engine, polls);
        let poll = Func::wrap(&mut store, |mut caller: Caller<'_, u32>| {
            let left = caller.data().saturating_sub(1);
            *caller.data_mut() = left;
            if left == 0 { TrapKind::Deadline as u32 } else { 0 }
        });
        let instance = Instance::new(&mut store, module, &[self.windows.clone().into(), poll.into()]).unwrap();
        let own = instance.get_memory(&mut store, "own").unwrap();
        let (bytes, stacks, contexts) = image.layout.memory(items.iter().product());
        let more = bytes.div_ceil(1 << 16).saturating_sub(own.size(&store));
        own.grow(&mut store, more).unwrap();
        let mut put = |at: u32, bytes: &[u8]| own.write(&mut store, at as usize, bytes).unwrap();
        put(CALL.first, &0_u64.to_le_bytes());
        put(CALL.count, &groups.iter().map(|n| u64::from(*n)).product::<u64>().to_le_bytes());
        for axis in 0..3 {
            put(CALL.items + 4 * axis, &items[axis as usize].to_le_bytes());
            put(CALL.groups + 4 * axis, &groups[axis as usize].to_le_bytes());
        }
        put(CALL.stacks, &stacks.to_le_bytes());
        put(CALL.contexts, &contexts.to_le_bytes());
        for (arg, at) in args.iter().zip((CALL.params..).step_by(CALL.param_bytes as usize)) {
            match arg {
                HostArg::Bits(bits) => put(at, &bits.to_le_bytes()),
                HostArg::Window(start, bytes) => {
                    put(at, &start.to_le_bytes());
                    put(at + 4, &u32::try_from(bytes.len()).unwrap().to_le_bytes());
                    self.copy(*start, &mut bytes.to_vec(), true);
                }
            }
        }
        let run = instance.get_typed_func::<(), i32>(&mut store, "run").unwrap();
        let ended = run.call(&mut store, ()).unwrap_or_else(|why| panic!("{}: {why:?}", image.name));
        for arg in &mut args {
            if let HostArg::Window(start, bytes) = arg {
                self.copy(*start, bytes, false);
            }
        }
        if ended == 0 {
            return None;
        }
        // As a record, which is what launches leave.
        let mut record = vec![0; RECORD.bytes as usize];
        let trap = &own.data(&store)[CALL.trap as usize..][..40];
        record[RECORD.launch as usize] = 1;
        record[RECORD.kind as usize..][..40].copy_from_slice(trap);
        Some(Trap::read(&record, 1, &image.sites).unwrap())
    }

    #[expect(unsafe_code, reason = "memory that threads could share")]
    fn copy(&self, start: u32, bytes: &mut [u8], is_in: bool) {
        let cells = &self.windows.data()[start as usize..start as usize + bytes.len()];
        for (cell, byte) in cells.iter().zip(bytes) {
            // SAFETY: no kernel runs, and nobody else has this memory.
            unsafe { if is_in { *cell.get() = *byte } else { *byte = *cell.get() } }
        }
    }
}
