//! The device, as guests see it: `component.rs` for components, `flat.rs` for core modules, and here what both are: a guest's
//! part of its tenant's place on the device. Whatever a guest holds goes back with its instance, and what it launched
//! and did not wait for is stopped.

pub(crate) mod component;
pub(crate) mod flat;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensor_wasm_gpu::TenantLimits;

use super::running::RunningCall;
use super::state::State;
use crate::config::Limits;
use crate::kernels::{Argument, Canceller, KernelError, KernelModule, Launch, Seat};

/// Jobs of a tenant on the device at once, and in line for it.
const JOBS_RUNNING_MAX: usize = 256;
const JOBS_WAITING_MAX: usize = 1024;

/// Launches a guest may have under way and not waited for.
const LAUNCHES_MAX: usize = 1000;

/// What an instance has of the device.
#[derive(Default)]
pub(crate) struct Session {
    seat: Option<Arc<Seat>>,
    under_way: Vec<Canceller>,
    flat: flat::Flat,
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
        let kernels = call.surroundings.kernels.wait().await.as_ref().map_err(|why| KernelError::Denied(why.clone()))?;
        let seat = kernels.seat(&call.account.name, tenant_limits(&call.account.limits))?;
        self.session().seat = Some(seat.clone());
        Ok(seat)
    }

    fn session(&mut self) -> &mut Session {
        self.session.get_or_insert_default().as_mut()
    }

    /// Reads a kernel module.
    async fn kernel_module(&mut self, wasm: Vec<u8>) -> Result<Arc<KernelModule>, KernelError> {
        self.seat().await?;
        let surroundings = self.call().surroundings.clone();
        let kernels = surroundings.kernels.wait().await.as_ref().map_err(|why| KernelError::Denied(why.clone()))?;
        kernels.module(wasm)
    }

    async fn launch(
        &mut self,
        module: &Arc<KernelModule>,
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
        let launch = seat.launch(module, kernel, groups, items, arguments, budget).await?;
        self.session().under_way.push(launch.canceller());
        Ok(launch)
    }
}
