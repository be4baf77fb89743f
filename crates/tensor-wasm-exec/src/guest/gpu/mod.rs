//! The device, as guests see it: `component.rs` for components, `flat.rs` for core modules, `error.rs` what both are
//! told, and here what both are: a guest's part of what its tenant has on the device, with a stream of its own.
//! Whatever a guest holds goes back with its instance, and what it launched and did not wait for is stopped.

pub(crate) mod component;
mod error;
pub(crate) mod flat;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tensor_wasm_gpu::{Buffer, TenantLimits};
use tensor_wasm_jit::{MODULE_BYTES_MAX, Refusal};
use tracing::{Instrument, Span};

use super::running::RunningCall;
use super::state::State;
use crate::config::Limits;
use tensor_wasm_launch::{Argument, Canceller, KernelError, KernelModule, Kernels, Launch, LaunchStream};

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
    stream: Option<LaunchStream>,
    under_way: Vec<(Canceller, LaunchSpan)>,
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

/// A guest's launch, with a span that lasts until the guest hears of its end: sending it is the smallest part of it.
pub(crate) struct GuestLaunch {
    launch: Launch,
    span: LaunchSpan,
}

impl GuestLaunch {
    pub(crate) async fn wait(&mut self) -> Result<(), KernelError> {
        let ended = self.launch.wait().await;
        self.span.end();
        ended
    }
}

/// A launch's span, if anybody listens. It ends with the wait or with the call, whichever comes first: one that a guest
/// kept would keep those of its call and its request from being exported.
#[derive(Clone)]
struct LaunchSpan(Option<Arc<Mutex<Option<Span>>>>);

impl LaunchSpan {
    fn new(span: Span) -> LaunchSpan {
        LaunchSpan((!span.is_disabled()).then(|| Arc::new(Mutex::new(Some(span)))))
    }

    fn end(&self) {
        // It ends when it was left for the last time.
        if let Some(span) = self.0.as_ref().and_then(|span| span.lock().take()) {
            span.in_scope(|| ());
        }
    }
}

/// Refuses what is too large before it is copied.
fn check_module_bytes(bytes: usize) -> Result<(), KernelError> {
    if bytes > MODULE_BYTES_MAX {
        return Err(Refusal::TooLarge { bytes, bytes_max: MODULE_BYTES_MAX }.into());
    }
    Ok(())
}

impl Session {
    /// Stops the launches that a call did not wait for; the next one hears nothing of them.
    pub(crate) fn end_call(&mut self) {
        for (launch, span) in self.under_way.drain(..) {
            launch.cancel();
            span.end();
        }
        self.flat.end_call();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end_call();
    }
}

fn tenant_limits(limits: &Limits) -> TenantLimits {
    TenantLimits {
        memory_bytes_max: limits.gpu_memory_bytes_max,
        weight: limits.weight,
        running_max: JOBS_RUNNING_MAX,
        waiting_max: JOBS_WAITING_MAX,
        multiprocessors: limits.gpu_multiprocessors,
        // No guest can launch one.
        residents_max: 0,
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
    /// The instance's stream on the device, charged to its call. Waits for a device that is being opened.
    pub(in crate::guest) async fn stream(&mut self) -> Result<LaunchStream, KernelError> {
        Ok(self.own_stream().await?.paid_by(self.call().gpu_time()))
    }

    async fn own_stream(&mut self) -> Result<LaunchStream, KernelError> {
        if let Some(stream) = self.session.as_ref().and_then(|session| session.stream.clone()) {
            return Ok(stream);
        }
        let call = self.call().clone();
        allowed(&call)?;
        let kernels =
            call.surroundings.kernels.wait().await.as_ref().map_err(|why| KernelError::Denied(why.clone()))?;
        let (name, limits) = (call.account.name.clone(), tenant_limits(&call.account.limits));
        let is_trusted = call.account.limits.gpu_raw_ptx;
        let known = if is_trusted { None } else { kernels.try_tenant(&name, limits) };
        let tenant = match known {
            Some(tenant) => tenant,
            // A trusted tenant's worker is started now, if this is its first call; for others, tenants make room first.
            None => {
                let kernels = kernels.clone();
                let open = if is_trusted { Kernels::trusted_tenant } else { Kernels::tenant };
                let opened = call.surroundings.background.spawn_blocking(move || open(&kernels, &name, limits));
                opened.await.map_err(tensor_wasm_launch::ended)??
            }
        };
        let stream = tenant.stream();
        self.session().stream = Some(stream.clone());
        Ok(stream)
    }

    fn session(&mut self) -> &mut Session {
        self.session.get_or_insert_default().as_mut()
    }

    /// Allocates a buffer. That may wait for the device to give memory back, which a serving thread must not.
    async fn allocate_buffer(&mut self, bytes: u64) -> Result<Buffer, KernelError> {
        let stream = self.stream().await?;
        let background = self.call().surroundings.background.clone();
        let allocated = background.spawn_blocking(move || stream.kernels.tenant.buffer(bytes)).await;
        Ok(allocated.map_err(tensor_wasm_launch::ended)??)
    }

    /// Reads a kernel module.
    async fn kernel_module(&mut self, wasm: Vec<u8>) -> Result<HeldModule, KernelError> {
        self.stream().await?;
        check_module_bytes(wasm.len())?;
        let counted = self.session().module_bytes.clone();
        let held = counted.fetch_add(wasm.len(), Ordering::Relaxed) + wasm.len();
        let bytes = wasm.len();
        let module = if held <= MODULES_BYTES_MAX {
            self.read_module(wasm).await
        } else {
            let why = format!("the kernel modules it holds have more than {MODULES_BYTES_MAX} bytes");
            Err(KernelError::Busy(why))
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
        let read = move || if is_trusted { kernels.trusted_module(wasm) } else { kernels.module(wasm) };
        if bytes <= READ_AT_ONCE_BYTES_MAX {
            return read();
        }
        surroundings.background.spawn_blocking(read).await.map_err(tensor_wasm_launch::ended)?
    }

    async fn launch(
        &mut self,
        module: &HeldModule,
        kernel: &str,
        groups: [u32; 3],
        items: [u32; 3],
        arguments: &[Argument],
    ) -> Result<GuestLaunch, KernelError> {
        let stream = self.stream().await?;
        let session = self.session();
        session.under_way.retain(|(launch, _)| launch.is_under_way());
        if session.under_way.len() >= LAUNCHES_MAX {
            let why = format!("{LAUNCHES_MAX} launches are under way that were not waited for");
            return Err(KernelError::Busy(why));
        }
        let call = self.call();
        let left = call.deadline().saturating_duration_since(Instant::now());
        let budget = left.min(Duration::from_millis(call.account.limits.gpu_kernel_ms_max));
        let span = tracing::debug_span!("launch", kernel, ?groups, ?items);
        let launching = stream.launch(&module.module, kernel, groups, items, arguments, budget);
        let launch = launching.instrument(span.clone()).await?;
        let span = LaunchSpan::new(span);
        self.session().under_way.push((launch.canceller(), span.clone()));
        Ok(GuestLaunch { launch, span })
    }
}
