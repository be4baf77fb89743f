//! The device, as guests see it: `component.rs` for components, `flat.rs` for core modules, and here what both are: a guest's
//! part of its tenant's place on the device. Whatever a guest holds goes back with its instance, and what it launched
//! and did not wait for is stopped.

pub(crate) mod component;
pub(crate) mod flat;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tensor_wasm_gpu::{Buffer, TenantLimits};
use tensor_wasm_jit::{MODULE_BYTES_MAX, Refusal};
use tracing::Instrument;

use super::running::RunningCall;
use super::state::State;
use crate::config::Limits;
use tensor_wasm_launch::{Argument, Canceller, KernelError, KernelModule, Launch, Seat};

/// Jobs of a tenant on the device at once, and in line for it.
const JOBS_RUNNING_MAX: usize = 256;
const JOBS_WAITING_MAX: usize = 1024;

/// Launches a guest may have under way and not waited for.
const LAUNCHES_MAX: usize = 1000;

/// Modules up to this are read by the serving thread: it takes some hundred microseconds.
const READ_AT_ONCE_BYTES_MAX: usize = 64 << 10;

/// Bytes of the kernel modules that an instance may hold at once.
const MODULES_BYTES_MAX: usize = 16 << 20;

/// What an instance has of the device.
#[derive(Default)]
pub(crate) struct Session {
    seat: Option<Arc<Seat>>,
    under_way: Vec<Canceller>,
    /// Bytes of the kernel modules it holds.
    module_bytes: Arc<AtomicUsize>,
    flat: flat::Flat,
}

/// A kernel module that a guest holds. It is the host's memory.
pub(crate) struct HeldModule {
    pub module: Arc<KernelModule>,
    bytes: usize,
    counted: Arc<AtomicUsize>,
}

impl Drop for HeldModule {
    fn drop(&mut self) {
        self.counted.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Refuses what is too large before it is copied.
fn check_module_bytes(bytes: usize) -> Result<(), KernelError> {
    match bytes > MODULE_BYTES_MAX {
        true => Err(Refusal::TooLarge { bytes, bytes_max: MODULE_BYTES_MAX }.into()),
        false => Ok(()),
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.under_way.iter().for_each(Canceller::cancel);
    }
}

fn tenant_limits(limits: &Limits) -> TenantLimits {
    TenantLimits {
        memory_bytes_max: limits.gpu_memory_bytes_max,
        weight: limits.weight,
        running_max: JOBS_RUNNING_MAX,
        waiting_max: JOBS_WAITING_MAX,
        multiprocessors: limits.gpu_multiprocessors,
    }
}

/// Whether the call's function may use the device at all.
fn allowed(call: &RunningCall) -> Result<(), KernelError> {
    let denied = |why: &str| Err(KernelError::Denied(why.to_owned()));
    if !call.serving.revision().settings.gpu {
        return denied("the function was not deployed to use the GPU; deploy it with --gpu");
    }
    if call.account.limits.gpu_memory_bytes_max == 0 {
        return denied("the tenant may not use the GPU ([limits] gpu_memory_bytes_max is 0)");
    }
    Ok(())
}

impl State {
    /// The tenant's place on the device. Waits for a device that is being opened.
    async fn seat(&mut self) -> Result<Arc<Seat>, KernelError> {
        if let Some(seat) = self.session.as_ref().and_then(|session| session.seat.clone()) {
            return Ok(seat);
        }
        let call = self.call().clone();
        allowed(&call)?;
        let kernels =
            call.surroundings.kernels.wait().await.as_ref().map_err(|why| KernelError::Denied(why.clone()))?;
        let (name, limits) = (&call.account.name, &call.account.limits);
        let seat = match limits.gpu_raw_ptx {
            false => kernels.seat(name, tenant_limits(limits))?,
            // Its worker is started now, if this is the first call.
            true => {
                let (kernels, name, limits) = (kernels.clone(), name.clone(), tenant_limits(limits));
                let opened = call.surroundings.background.spawn_blocking(move || kernels.trusted_seat(&name, limits));
                opened.await.map_err(|e| KernelError::Denied(format!("no worker could be started: {e}")))??
            }
        };
        self.session().seat = Some(seat.clone());
        Ok(seat)
    }

    fn session(&mut self) -> &mut Session {
        self.session.get_or_insert_default().as_mut()
    }

    /// Allocates a buffer. That may wait for the device to give memory back, which a serving thread must not.
    async fn allocate_buffer(&mut self, bytes: u64) -> Result<Buffer, KernelError> {
        let seat = self.seat().await?;
        let background = self.call().surroundings.background.clone();
        let allocated = background.spawn_blocking(move || seat.tenant.buffer(bytes)).await;
        Ok(allocated.map_err(|e| KernelError::Denied(format!("allocating ended: {e}")))??)
    }

    /// Reads a kernel module.
    async fn kernel_module(&mut self, wasm: Vec<u8>) -> Result<HeldModule, KernelError> {
        self.seat().await?;
        check_module_bytes(wasm.len())?;
        let counted = self.session().module_bytes.clone();
        let held = counted.fetch_add(wasm.len(), Ordering::Relaxed) + wasm.len();
        let bytes = wasm.len();
        let module = match held > MODULES_BYTES_MAX {
            false => self.read_module(wasm).await,
            true => {
                let why = format!("the kernel modules it holds have more than {MODULES_BYTES_MAX} bytes");
                Err(KernelError::Busy(why))
            }
        };
        match module {
            Ok(module) => Ok(HeldModule { module, bytes, counted }),
            Err(error) => {
                counted.fetch_sub(bytes, Ordering::Relaxed);
                Err(error)
            }
        }
    }

    async fn read_module(&mut self, wasm: Vec<u8>) -> Result<Arc<KernelModule>, KernelError> {
        let surroundings = self.call().surroundings.clone();
        let bytes = wasm.len();
        let is_trusted = self.call().account.limits.gpu_raw_ptx;
        let kernels = surroundings.kernels.wait().await.as_ref().map_err(|why| KernelError::Denied(why.clone()))?;
        let kernels = kernels.clone();
        let read = move || match is_trusted {
            true => kernels.trusted_module(wasm),
            false => kernels.module(wasm),
        };
        if bytes <= READ_AT_ONCE_BYTES_MAX {
            return read();
        }
        let done = surroundings.background.spawn_blocking(read).await;
        done.map_err(|e| KernelError::Denied(format!("reading the module ended: {e}")))?
    }

    async fn launch(
        &mut self,
        module: &HeldModule,
        kernel: &str,
        groups: [u32; 3],
        items: [u32; 3],
        arguments: &[Argument],
    ) -> Result<Launch, KernelError> {
        let seat = self.seat().await?;
        let session = self.session();
        session.under_way.retain(Canceller::is_under_way);
        if session.under_way.len() >= LAUNCHES_MAX {
            let why = format!("{LAUNCHES_MAX} launches are under way that were not waited for");
            return Err(KernelError::Busy(why));
        }
        let call = self.call();
        let left = call.deadline().saturating_duration_since(Instant::now());
        let budget = left.min(Duration::from_millis(call.account.limits.gpu_kernel_ms_max));
        let span = tracing::debug_span!("launch", kernel, ?groups, ?items);
        let launch = seat.launch(&module.module, kernel, groups, items, arguments, budget).instrument(span).await?;
        self.session().under_way.push(launch.canceller());
        Ok(launch)
    }
}
