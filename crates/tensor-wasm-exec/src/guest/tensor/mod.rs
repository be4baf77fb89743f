//! Tensors, as guests see them: `component.rs` is the interface, `plan.rs` how what they ask for is computed,
//! `turns.rs` whose turn it is, `error.rs` what they are told. Here is what an instance has of them. Operations only
//! record nodes, on the serving thread; whatever computes or reads much goes elsewhere. All of it belongs to the
//! instance: another cannot name its tensors, and everything goes back with it, a plan that is being computed too.
//!
//! A function that was deployed with `--gpu` computes on the server's device if that is a GPU, as a part of what its
//! tenant has there. Everybody else computes on the CPU, which needs no permission.

pub(crate) mod component;
mod error;
pub(crate) mod plan;
mod turns;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tensor_wasm_gpu::DeviceKind;
use tensor_wasm_tensor::{Account, AccountLimits, CudaDevice, Device, Tensor};
use tokio::task::AbortHandle;

use self::error::TensorFailure;
use self::plan::PlanContext;
use super::state::State;
use crate::config::Limits;
use crate::models::LoadedModel;

/// Computations of an instance under way that it has not waited for.
const COMPUTATIONS_MAX: usize = 16;

/// What an instance has of tensors.
pub(crate) struct TensorSession {
    /// A part of the tenant's.
    account: Arc<Account>,
    device: Device,
    /// Tensors that it holds.
    held: Arc<AtomicUsize>,
    computing: Vec<AbortHandle>,
    /// Models that it has opened. What is computed of a model's tensors holds on to them, so they stay.
    models: Vec<Arc<LoadedModel>>,
}

/// A tensor that a guest holds.
#[allow(unreachable_pub, reason = "the bindings name it")]
pub struct HeldTensor {
    tensor: Tensor,
    /// The same with its elements in row-major order, once somebody read some of them and they were not.
    straight: Option<Tensor>,
    _place: TensorPlace,
}

/// One of the tensors that an instance may hold.
struct TensorPlace(Arc<AtomicUsize>);

impl Drop for TensorPlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl TensorSession {
    /// Stops what a call began to compute and did not wait for.
    pub(crate) fn end_call(&mut self) {
        self.computing.drain(..).for_each(|computation| computation.abort());
    }
}

impl Drop for TensorSession {
    fn drop(&mut self) {
        self.end_call();
    }
}

/// What all tensors of a tenant may have together.
pub(crate) fn tenant_account(limits: &Limits) -> Arc<Account> {
    let bytes_max = usize::try_from(limits.tensor_memory_bytes_max).unwrap_or(usize::MAX);
    Account::new(AccountLimits { bytes_max, ..AccountLimits::default() })
}

fn instance_limits(limits: &Limits) -> AccountLimits {
    AccountLimits {
        bytes_max: usize::MAX,
        nodes_max: limits.tensor_nodes_max,
        elements_max: usize::try_from(limits.tensor_elements_max).unwrap_or(usize::MAX),
    }
}

/// What a tenant's tensors have of a GPU, for as long as the tenant is there.
struct TenantDevice {
    device: CudaDevice,
    account: Arc<Account>,
}

impl Drop for TenantDevice {
    /// Plans that are kept hold on to the device, and so to the tenant.
    fn drop(&mut self) {
        self.account.forget_plans();
    }
}

impl State {
    /// What the instance has of tensors, from its first use of them on. Waits for a device that is being opened, if the
    /// function may use it.
    async fn tensors(&mut self) -> Result<&mut TensorSession, TensorFailure> {
        if self.tensors.is_none() {
            let device = self.tensor_device().await?;
            let account = &self.call().account;
            let account = account.tensors.part(instance_limits(&account.limits));
            let (held, computing, models) = (Arc::default(), Vec::new(), Vec::new());
            self.tensors = Some(Box::new(TensorSession { account, device, held, computing, models }));
        }
        self.tensors.as_deref_mut().ok_or_else(|| TensorFailure::denied("the instance is gone"))
    }

    async fn tensor_device(&mut self) -> Result<Device, TensorFailure> {
        let call = self.call().clone();
        if !call.serving.revision().settings.gpu || call.account.limits.gpu_memory_bytes_max == 0 {
            return Ok(Device::Cpu);
        }
        match call.surroundings.kernels.wait().await {
            Ok(kernels) if kernels.device().info().kind == DeviceKind::Cuda => {}
            Ok(_) | Err(_) => return Ok(Device::Cpu),
        }
        let stream = self.stream().await.map_err(|error| TensorFailure::denied(error.to_string()))?;
        let bytes_max = call.account.limits.gpu_memory_bytes_max;
        // One for all instances of a tenant: kernels of a plan are loaded once, and its memory is the tenant's.
        let companion = stream.kernels.companion(|| TenantDevice {
            device: CudaDevice::of_tenant(stream.kernels.tenant.clone(), bytes_max),
            account: call.account.tensors.clone(),
        });
        let companion = companion.ok_or_else(|| TensorFailure::denied("the tenant's device has another companion"))?;
        Ok(Device::Cuda(companion.device.clone()))
    }

    /// What a plan of this instance runs for, and with.
    async fn plan(&mut self) -> Result<PlanContext, TensorFailure> {
        let session = self.tensors().await?;
        let (account, device) = (session.account.clone(), session.device.clone());
        Ok(PlanContext { call: self.call().clone(), account, device })
    }

    /// A place for one more tensor, taken before it is made.
    async fn tensor_place(&mut self) -> Result<TensorPlace, TensorFailure> {
        let tensors_max = self.call().account.limits.tensors_max;
        let held = self.tensors().await?.held.clone();
        let more = |held: usize| (held < tensors_max).then_some(held + 1);
        match held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(TensorPlace(held)),
            Err(held) => {
                let why = format!("it holds {held} tensors, which is the most ([limits] tensors_max); drop some first");
                Err(TensorFailure::too_many(why))
            }
        }
    }

    /// Records something, charged to the tenant, and computes it now if so much waits that it should be.
    async fn record(
        &mut self,
        make: impl FnOnce() -> Result<Tensor, TensorFailure> + Send,
    ) -> Result<Tensor, TensorFailure> {
        let account = self.tensors().await?.account.clone();
        let made = tensor_wasm_tensor::charged_to(&account, make)?;
        made.check()?;
        if made.is_deep() {
            let (plan, deep) = (self.plan().await?, made.clone());
            plan.run(move || deep.realize()).await?;
        }
        Ok(made)
    }

    /// Begins to compute tensors, and remembers that, to be stopped with the call. None if a GPU was sent all of it.
    async fn begin(
        &mut self,
        tensors: Vec<Tensor>,
    ) -> Result<Option<tokio::task::JoinHandle<Result<(), TensorFailure>>>, TensorFailure> {
        let plan = self.plan().await?;
        let work = move || Tensor::realize_all(&tensors.iter().collect::<Vec<_>>());
        // On a CPU the guest goes on beside it.
        if plan.device != Device::Cpu
            && let Ok(Some(_)) = plan.try_run(&work)
        {
            return Ok(None);
        }
        let background = self.call().surroundings.background.clone();
        let session = self.tensors().await?;
        session.computing.retain(|computation| !computation.is_finished());
        if session.computing.len() >= COMPUTATIONS_MAX {
            let why = format!("{COMPUTATIONS_MAX} computations are under way that were not waited for; wait for one");
            return Err(TensorFailure::too_many(why));
        }
        let computing = background.spawn(plan.run(work));
        session.computing.push(computing.abort_handle());
        Ok(Some(computing))
    }
}
