use crate::Ended;

/// Own a device for the server that started this process.
#[derive(clap::Args)]
pub(crate) struct DeviceWorker {
    #[arg(long)]
    slab_fd: i32,
    #[arg(long)]
    device: tensor_wasm_gpu::DeviceChoice,
}

impl DeviceWorker {
    pub(crate) fn execute(self) -> Ended {
        Ok(tensor_wasm_gpu::worker_main(
            self.slab_fd,
            self.device,
            tensor_wasm_exec::engine::cpu_kernels::host_kernels(),
        ))
    }
}
