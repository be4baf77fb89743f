//! `tensor-wasm:gpu`, for components.

use std::sync::Arc;

use tensor_wasm_gpu::DeviceError;
use wasmtime::component::{HasSelf, Linker, Resource};
use wasmtime_wasi::WasiView;
use wasmtime_wasi::p2::{DynPollable, Pollable, subscribe};

use self::bindings::tensor_wasm::gpu::compute::{self, Error, Info, Kind, Size};
use super::error::{ErrorKind, GpuError};
use super::{GuestLaunch, HeldModule, State};
use tensor_wasm_launch::Argument;

/// Interfaces of it begin with this.
pub(crate) const PACKAGE: &str = "tensor-wasm:gpu/";

/// What one call may read: it is copied through the host's memory.
const READ_BYTES_MAX: u64 = 16 << 20;

mod bindings {
    wasmtime::component::bindgen!({
        path: "../../wit/gpu",
        world: "tensor-wasm:gpu/imports",
        imports: { default: async | trappable },
        with: {
            "wasi:io": wasmtime_wasi::p2::bindings::io,
            "tensor-wasm:gpu/compute.buffer": super::Buffer,
            "tensor-wasm:gpu/compute.kernels": super::Kernels,
            "tensor-wasm:gpu/compute.completion": super::Completion,
        },
    });
}

#[allow(unreachable_pub, reason = "the bindings name it")]
pub struct Buffer {
    buffer: tensor_wasm_gpu::Buffer,
    bytes: u64,
}

#[allow(unreachable_pub, reason = "the bindings name it")]
pub struct Kernels(Arc<HeldModule>);

#[allow(unreachable_pub, reason = "the bindings name it")]
pub struct Completion(GuestLaunch);

#[wasmtime_wasi::async_trait]
impl Pollable for Completion {
    async fn ready(&mut self) {
        let _ = self.0.wait().await;
    }
}

pub(crate) fn add_to_linker(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    compute::add_to_linker::<State, HasSelf<State>>(linker, |state| state)
}

impl From<GpuError> for Error {
    fn from(error: GpuError) -> Error {
        let text = error.text;
        match error.kind {
            ErrorKind::Denied => Error::Denied(text),
            ErrorKind::OutOfMemory => Error::OutOfMemory(error.asked_bytes),
            ErrorKind::OutOfRange => Error::OutOfRange(text),
            ErrorKind::InvalidModule => Error::InvalidModule(text),
            ErrorKind::NoSuchKernel => Error::NoSuchKernel(text),
            ErrorKind::InvalidLaunch => Error::InvalidLaunch(text),
            ErrorKind::Trap => Error::Trap(text),
            ErrorKind::Deadline => Error::Deadline(text),
            ErrorKind::DeviceLost => Error::DeviceLost(text),
            ErrorKind::Busy => Error::Busy(text),
            // Handles are the component model's: one that is not there never gets here.
            ErrorKind::NoSuchHandle | ErrorKind::Failed => Error::Failed(text),
        }
    }
}

/// What a host function answers: an error of the guest's to handle, or one that ends it.
type HostResult<T> = wasmtime::Result<Result<T, Error>>;

/// Answers with an error, or goes on.
macro_rules! try_answer {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(error) => return Ok(Err(GpuError::of(error)?.into())),
        }
    };
}

impl compute::Host for State {
    async fn device_info(&mut self) -> HostResult<Info> {
        let tenant = try_answer!(self.stream().await).kernels.tenant.clone();
        let (info, stats) = (tenant.device().info(), tenant.memory());
        Ok(Ok(Info {
            kind: match info.kind {
                tensor_wasm_gpu::DeviceKind::Cpu => Kind::Cpu,
                tensor_wasm_gpu::DeviceKind::Cuda => Kind::Cuda,
            },
            name: info.name,
            multiprocessors: info.multiprocessors,
            group_items_max: info.threads_per_block_max,
            memory_bytes_max: self.call().account.limits.gpu_memory_bytes_max,
            memory_bytes_used: stats.used_bytes,
        }))
    }
}

impl State {
    fn device_buffer(&mut self, buffer: &Resource<Buffer>) -> wasmtime::Result<(tensor_wasm_gpu::Handle, u64)> {
        let buffer = self.ctx().table.get(buffer)?;
        Ok((buffer.buffer.handle(), buffer.bytes))
    }
}

impl compute::HostBuffer for State {
    async fn allocate(&mut self, bytes: u64) -> HostResult<Resource<Buffer>> {
        let buffer = try_answer!(self.allocate_buffer(bytes).await);
        Ok(Ok(self.ctx().table.push(Buffer { buffer, bytes })?))
    }

    async fn size(&mut self, buffer: Resource<Buffer>) -> wasmtime::Result<u64> {
        Ok(self.device_buffer(&buffer)?.1)
    }

    async fn write(&mut self, buffer: Resource<Buffer>, offset: u64, data: Vec<u8>) -> HostResult<()> {
        let (handle, _) = self.device_buffer(&buffer)?;
        let stream = try_answer!(self.stream().await).stream;
        try_answer!(stream.write(handle, offset, &data).await);
        Ok(Ok(()))
    }

    async fn read(&mut self, buffer: Resource<Buffer>, offset: u64, bytes: u64) -> HostResult<Vec<u8>> {
        let (handle, size) = self.device_buffer(&buffer)?;
        let stream = try_answer!(self.stream().await).stream;
        if offset.checked_add(bytes).is_none_or(|end| end > size) {
            return Ok(Err(GpuError::of(DeviceError::OutOfRange { offset, len: bytes, size })?.into()));
        }
        let Some(len) = usize::try_from(bytes).ok().filter(|_| bytes <= READ_BYTES_MAX) else {
            let why = format!("{bytes} bytes at once; read at most {READ_BYTES_MAX} and then the next");
            return Ok(Err(Error::OutOfRange(why)));
        };
        let mut data = vec![0; len];
        try_answer!(stream.read(handle, offset, &mut data).await);
        Ok(Ok(data))
    }

    async fn copy_from(
        &mut self,
        buffer: Resource<Buffer>,
        offset: u64,
        source: Resource<Buffer>,
        source_offset: u64,
        bytes: u64,
    ) -> HostResult<()> {
        let ((to, _), (from, _)) = (self.device_buffer(&buffer)?, self.device_buffer(&source)?);
        let stream = try_answer!(self.stream().await).stream;
        drop(try_answer!(stream.copy((from, source_offset), (to, offset), bytes)));
        Ok(Ok(()))
    }

    async fn fill(&mut self, buffer: Resource<Buffer>, offset: u64, bytes: u64, value: u8) -> HostResult<()> {
        let (handle, _) = self.device_buffer(&buffer)?;
        let stream = try_answer!(self.stream().await).stream;
        drop(try_answer!(stream.fill(handle, offset, bytes, value)));
        Ok(Ok(()))
    }

    async fn drop(&mut self, buffer: Resource<Buffer>) -> wasmtime::Result<()> {
        self.ctx().table.delete(buffer)?;
        Ok(())
    }
}

impl compute::HostKernels for State {
    async fn load(&mut self, wasm: Vec<u8>) -> HostResult<Resource<Kernels>> {
        let module = try_answer!(self.kernel_module(wasm).await);
        Ok(Ok(self.ctx().table.push(Kernels(Arc::new(module)))?))
    }

    async fn names(&mut self, kernels: Resource<Kernels>) -> wasmtime::Result<Vec<String>> {
        Ok(self.ctx().table.get(&kernels)?.0.module.names().map(str::to_owned).collect())
    }

    async fn launch(
        &mut self,
        kernels: Resource<Kernels>,
        kernel: String,
        groups: Size,
        items: Size,
        arguments: Vec<compute::Argument>,
    ) -> HostResult<Resource<Completion>> {
        let module = self.ctx().table.get(&kernels)?.0.clone();
        let mut given = Vec::with_capacity(arguments.len());
        for argument in arguments {
            given.push(match argument {
                compute::Argument::S32(value) => Argument::I32(value),
                compute::Argument::S64(value) => Argument::I64(value),
                compute::Argument::F32(value) => Argument::F32(value),
                compute::Argument::F64(value) => Argument::F64(value),
                compute::Argument::Buffer(buffer) => Argument::Buffer(self.device_buffer(&buffer)?.0),
            });
        }
        let three = |size: Size| [size.x, size.y, size.z];
        let launch = self.launch(&module, &kernel, three(groups), three(items), &given).await;
        let launch = try_answer!(launch);
        Ok(Ok(self.ctx().table.push(Completion(launch))?))
    }

    async fn drop(&mut self, kernels: Resource<Kernels>) -> wasmtime::Result<()> {
        self.ctx().table.delete(kernels)?;
        Ok(())
    }
}

impl compute::HostCompletion for State {
    async fn subscribe(&mut self, completion: Resource<Completion>) -> wasmtime::Result<Resource<DynPollable>> {
        subscribe(self.ctx().table, completion)
    }

    async fn wait(&mut self, completion: Resource<Completion>) -> HostResult<()> {
        let launch = &mut self.ctx().table.get_mut(&completion)?.0;
        try_answer!(launch.wait().await);
        Ok(Ok(()))
    }

    async fn drop(&mut self, completion: Resource<Completion>) -> wasmtime::Result<()> {
        self.ctx().table.delete(completion)?;
        Ok(())
    }
}
