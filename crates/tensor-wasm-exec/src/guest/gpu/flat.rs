//! The same for core modules: functions of module `wasi:cuda/host@0.2.0` on numbers and addresses. Negative results are
//! errors; what was wrong is the last error's text.

use std::sync::Arc;

use slab::Slab;
use tensor_wasm_gpu::{Buffer, DeviceError, Handle};
use wasmtime::{Caller, Extern, Linker, Memory};

use super::error::{ErrorKind, GpuError};
use super::{GuestLaunch, HeldModule, State};
use tensor_wasm_launch::{Argument, KernelError};

pub(crate) const MODULE: &str = "wasi:cuda/host@0.2.0";

/// Kernels and buffers of an instance, counted together.
const HANDLES_MAX: usize = 10_000;

/// Bytes of a kernel's name.
const NAME_BYTES_MAX: usize = 1024;

/// Bytes of packed arguments.
const ARGS_BYTES_MAX: usize = 4096;

/// What an instance holds by number.
#[derive(Default)]
pub(crate) struct Flat {
    kernels: Slab<(Arc<HeldModule>, String)>,
    buffers: Slab<Held>,
    /// Launches since the last time the guest waited.
    launches: Vec<GuestLaunch>,
    last_error: String,
}

impl Flat {
    pub(super) fn end_call(&mut self) {
        self.launches.clear();
        self.last_error.clear();
    }
}

struct Held {
    buffer: Buffer,
    bytes: u64,
}

/// A result, or an error of the guest's to handle.
type FlatResult<T> = Result<T, GpuError>;

pub(crate) fn add_to_linker(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    linker.func_wrap_async(MODULE, "wasi_cuda_load_ptx", |caller, args: (u32, u32, u32, u32)| {
        Box::new(async move {
            let mut guest = Guest(caller);
            let loaded = guest.load(args).await;
            guest.answer(loaded)
        })
    })?;
    linker.func_wrap_async(
        MODULE,
        "wasi_cuda_launch",
        |caller, args: (i64, u32, u32, u32, u32, u32, u32, u32, u32, u32)| {
            Box::new(async move {
                let mut guest = Guest(caller);
                let launched = guest.launch(args).await;
                guest.answer(launched).map(low)
            })
        },
    )?;
    linker.func_wrap_async(MODULE, "wasi_cuda_sync", |caller, (): ()| {
        Box::new(async move {
            let mut guest = Guest(caller);
            let ended = guest.sync().await;
            guest.answer(ended).map(low)
        })
    })?;
    linker.func_wrap_async(MODULE, "wasi_cuda_alloc", |caller, (bytes,): (i64,)| {
        Box::new(async move {
            let mut guest = Guest(caller);
            let allocated = guest.alloc(bytes).await;
            guest.answer(allocated)
        })
    })?;
    linker.func_wrap(MODULE, "wasi_cuda_free", |caller: Caller<'_, State>, handle: i64| {
        let mut guest = Guest(caller);
        let freed = guest.free(handle);
        guest.answer(freed).map(low)
    })?;
    linker.func_wrap_async(MODULE, "wasi_cuda_memcpy_h2d", |caller, args: (i64, i64, u32, u32)| {
        Box::new(async move {
            let mut guest = Guest(caller);
            let copied = guest.write(args).await;
            guest.answer(copied).map(low)
        })
    })?;
    linker.func_wrap_async(MODULE, "wasi_cuda_memcpy_d2h", |caller, args: (u32, i64, i64, u32)| {
        Box::new(async move {
            let mut guest = Guest(caller);
            let copied = guest.read(args).await;
            guest.answer(copied).map(low)
        })
    })?;
    linker.func_wrap(MODULE, "wasi_cuda_last_error_len", |mut caller: Caller<'_, State>| {
        i32::try_from(caller.data_mut().session().flat.last_error.len()).unwrap_or(i32::MAX)
    })?;
    linker.func_wrap(MODULE, "wasi_cuda_last_error_copy", |caller: Caller<'_, State>, at: u32, len: u32| {
        Guest(caller).copy_error(at, len).map(low)
    })?;
    Ok(())
}

fn low(value: i64) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// A core module that calls one of the functions above.
struct Guest<'a>(Caller<'a, State>);

fn no_such(what: &str, handle: i64) -> GpuError {
    GpuError::new(ErrorKind::NoSuchHandle, format!("there is no {what} {handle}"))
}

/// Nothing but that it went well, or the error.
fn answered(done: Result<(), impl Into<KernelError>>) -> wasmtime::Result<FlatResult<i64>> {
    Ok(match done {
        Ok(()) => Ok(0),
        Err(error) => Err(GpuError::of(error)?),
    })
}

fn index(handle: i64, first: i64) -> Option<usize> {
    usize::try_from(handle.checked_sub(first)?).ok()
}

/// Buffers are numbered from 1 on, so that 0 is none.
const FIRST_BUFFER: i64 = 1;

impl Guest<'_> {
    /// What the guest gets: a result, or the number of an error, whose text it may ask for. Addresses that are not its
    /// own end it.
    fn answer(&mut self, answer: wasmtime::Result<FlatResult<i64>>) -> wasmtime::Result<i64> {
        Ok(answer?.unwrap_or_else(|GpuError { kind, text, .. }| {
            self.0.data_mut().session().flat.last_error = text;
            kind as i64
        }))
    }

    fn memory(&mut self) -> wasmtime::Result<Memory> {
        match self.0.get_export("memory") {
            Some(Extern::Memory(memory)) => Ok(memory),
            _ => Err(wasmtime::Error::msg("the module exports no memory named \"memory\"")),
        }
    }

    fn bytes(&mut self, at: u32, len: u32) -> wasmtime::Result<&mut [u8]> {
        let memory = self.memory()?;
        let (at, len) = (at as usize, len as usize);
        let bytes = memory.data_mut(&mut self.0).get_mut(at..at.saturating_add(len));
        bytes.ok_or_else(|| wasmtime::Error::msg(format!("{len} bytes at {at} do not lie in the module's memory")))
    }

    fn flat(&mut self) -> &mut Flat {
        &mut self.0.data_mut().session().flat
    }

    fn has_room(&mut self) -> FlatResult<()> {
        let flat = self.flat();
        if flat.kernels.len() + flat.buffers.len() < HANDLES_MAX {
            return Ok(());
        }
        let why = format!("it holds {HANDLES_MAX} kernels and buffers already");
        Err(GpuError::new(ErrorKind::OutOfMemory, why))
    }

    async fn load(
        &mut self,
        (code, code_len, entry, entry_len): (u32, u32, u32, u32),
    ) -> wasmtime::Result<FlatResult<i64>> {
        if let Err(refused) = self.has_room() {
            return Ok(Err(refused));
        }
        if let Err(error) = super::check_module_bytes(code_len as usize) {
            return Ok(Err(GpuError::of(error)?));
        }
        if entry_len as usize > NAME_BYTES_MAX {
            return Ok(Err(GpuError::new(ErrorKind::NoSuchKernel, format!("a name of {entry_len} bytes"))));
        }
        // Copied before they are looked at: a kernel of the guest's may change what lies in pinned memory meanwhile.
        let (wasm, entry) = (self.bytes(code, code_len)?.to_vec(), self.bytes(entry, entry_len)?.to_vec());
        let entry = String::from_utf8_lossy(&entry).into_owned();
        let module = match self.0.data_mut().kernel_module(wasm).await {
            Ok(module) => module,
            Err(error) => return Ok(Err(GpuError::of(error)?)),
        };
        if let Err(error) = module.module.has(&entry) {
            return Ok(Err(GpuError::of(error)?));
        }
        let number = self.flat().kernels.insert((Arc::new(module), entry));
        Ok(Ok(i64::try_from(number).unwrap_or(i64::MAX)))
    }

    async fn launch(
        &mut self,
        (kernel, gx, gy, gz, bx, by, bz, shared_bytes, args, args_len): (
            i64,
            u32,
            u32,
            u32,
            u32,
            u32,
            u32,
            u32,
            u32,
            u32,
        ),
    ) -> wasmtime::Result<FlatResult<i64>> {
        let found = index(kernel, 0).and_then(|at| self.flat().kernels.get(at).cloned());
        let Some((module, name)) = found else { return Ok(Err(no_such("kernel", kernel))) };
        let invalid = |why: &str| Ok(Err(GpuError::new(ErrorKind::InvalidLaunch, why.to_owned())));
        if shared_bytes != 0 {
            return invalid("a kernel asks for shared memory itself, with kernel.shared; pass 0");
        }
        if args_len as usize > ARGS_BYTES_MAX {
            return invalid("the arguments have more than 4096 bytes");
        }
        let packed = self.bytes(args, args_len)?.to_vec();
        let arguments = match self.arguments(&packed) {
            Ok(arguments) => arguments,
            Err(refused) => return Ok(Err(refused)),
        };
        let launch = self.0.data_mut().launch(&module, &name, [gx, gy, gz], [bx, by, bz], &arguments).await;
        match launch {
            Ok(launch) => {
                self.flat().launches.push(launch);
                Ok(Ok(0))
            }
            Err(error) => Ok(Err(GpuError::of(error)?)),
        }
    }

    /// Reads packed arguments: a tag each, and a value behind it.
    fn arguments(&mut self, packed: &[u8]) -> FlatResult<Vec<Argument>> {
        let mut rest = packed;
        let mut arguments = Vec::new();
        let cut =
            || GpuError::new(ErrorKind::InvalidLaunch, "the packed arguments end in the middle of one".to_owned());
        while let Some((tag, after)) = rest.split_first() {
            let len = match tag {
                1 | 3 | 5 => 4,
                2 | 4 | 6 | 7 | 8 => 8,
                other => {
                    let why = format!("{other:#04x} is no tag of an argument; tags are 01 to 08");
                    return Err(GpuError::new(ErrorKind::InvalidLaunch, why));
                }
            };
            let (value, after) = after.split_at_checked(len).ok_or_else(cut)?;
            rest = after;
            let mut whole = [0; 8];
            whole[..len].copy_from_slice(value);
            let bits = u64::from_le_bytes(whole);
            let half = u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(0);
            arguments.push(match tag {
                1 | 5 => Argument::I32(half.cast_signed()),
                2 | 6 => Argument::I64(bits.cast_signed()),
                3 => Argument::F32(f32::from_bits(half)),
                4 => Argument::F64(f64::from_bits(bits)),
                7 => self.pointer(u64::from(half), bits >> 32)?,
                _ => Argument::Buffer(self.buffer(bits.cast_signed())?.0),
            });
        }
        Ok(arguments)
    }

    /// A pointer into the guest's own memory, where the device sees that.
    fn pointer(&mut self, offset: u64, bytes: u64) -> FlatResult<Argument> {
        let memory = self.memory().map_err(|error| GpuError::new(ErrorKind::InvalidLaunch, error.to_string()))?;
        let size = memory.data_size(&self.0) as u64;
        if offset + bytes > size {
            let error = DeviceError::OutOfRange { offset, len: bytes, size };
            return Err(GpuError::new(ErrorKind::OutOfRange, error.to_string()));
        }
        let base = memory.data_ptr(&self.0) as usize;
        match self.0.data().call().surroundings.pinned.find(base) {
            Some(memory) => Ok(Argument::Pinned { memory, offset, bytes }),
            None => {
                let why =
                    "the device does not see the module's memory; deploy it with --memory pinned, or pass buffers";
                Err(GpuError::new(ErrorKind::InvalidLaunch, why.to_owned()))
            }
        }
    }

    fn buffer(&mut self, handle: i64) -> FlatResult<(Handle, u64)> {
        let held = index(handle, FIRST_BUFFER).and_then(|at| self.flat().buffers.get(at));
        held.map(|held| (held.buffer.handle(), held.bytes)).ok_or_else(|| no_such("buffer", handle))
    }

    /// Waits for every launch; the first that went wrong is the error.
    async fn sync(&mut self) -> wasmtime::Result<FlatResult<i64>> {
        let mut launches = std::mem::take(&mut self.flat().launches);
        let mut first = Ok(0);
        for launch in &mut launches {
            let ended = launch.wait().await;
            if first.is_ok() {
                first = answered(ended)?;
            }
        }
        Ok(first)
    }

    async fn alloc(&mut self, bytes: i64) -> wasmtime::Result<FlatResult<i64>> {
        if let Err(refused) = self.has_room() {
            return Ok(Err(refused));
        }
        let bytes = bytes.cast_unsigned();
        let allocated = self.0.data_mut().allocate_buffer(bytes).await;
        Ok(match allocated {
            Ok(buffer) => {
                let number = self.flat().buffers.insert(Held { buffer, bytes });
                Ok(i64::try_from(number).unwrap_or(i64::MAX - 1) + FIRST_BUFFER)
            }
            Err(error) => Err(GpuError::of(error)?),
        })
    }

    fn free(&mut self, handle: i64) -> wasmtime::Result<FlatResult<i64>> {
        let held = index(handle, FIRST_BUFFER).and_then(|at| self.flat().buffers.try_remove(at));
        Ok(held.map(|_| 0).ok_or_else(|| no_such("buffer", handle)))
    }

    async fn write(&mut self, (handle, offset, at, len): (i64, i64, u32, u32)) -> wasmtime::Result<FlatResult<i64>> {
        let (buffer, _) = match self.buffer(handle) {
            Ok(found) => found,
            Err(refused) => return Ok(Err(refused)),
        };
        let stream = match self.0.data_mut().stream().await {
            Ok(stream) => stream.stream,
            Err(error) => return Ok(Err(GpuError::of(error)?)),
        };
        let bytes = self.bytes(at, len)?;
        let written = stream.write(buffer, offset.cast_unsigned(), bytes).await;
        answered(written)
    }

    async fn read(&mut self, (at, handle, offset, len): (u32, i64, i64, u32)) -> wasmtime::Result<FlatResult<i64>> {
        let (buffer, _) = match self.buffer(handle) {
            Ok(found) => found,
            Err(refused) => return Ok(Err(refused)),
        };
        let stream = match self.0.data_mut().stream().await {
            Ok(stream) => stream.stream,
            Err(error) => return Ok(Err(GpuError::of(error)?)),
        };
        let bytes = self.bytes(at, len)?;
        let read = stream.read(buffer, offset.cast_unsigned(), bytes).await;
        answered(read)
    }

    fn copy_error(&mut self, at: u32, len: u32) -> wasmtime::Result<i64> {
        let text = self.flat().last_error.clone();
        let len = text.len().min(len as usize);
        let bytes = self.bytes(at, u32::try_from(len).unwrap_or(0))?;
        bytes.copy_from_slice(&text.as_bytes()[..len]);
        Ok(i64::try_from(len).unwrap_or(0))
    }
}
