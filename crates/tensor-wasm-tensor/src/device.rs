//! Where tensors are computed.

use std::cell::RefCell;
use std::panic::Location;
use std::sync::LazyLock;

use parking_lot::RwLock;

#[cfg(feature = "cuda")]
use crate::cuda::CudaDevice;
use crate::error::{ErrorKind, Result, TensorError};
#[cfg(feature = "cuda")]
use crate::graph::Value;

/// What [`set_device`] is before anybody calls it, as [`Device::named`] takes it.
const VARIABLE: &str = "TENSOR_WASM_DEVICE";

/// A device that tensors are computed on.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Device {
    #[default]
    Cpu,
    /// For each plan the one that should have it done first, from what it has to do, where that lies, and how long it
    /// took before: see [`Tensor::explain`](crate::Tensor::explain), which says what was chosen and why. Without a GPU
    /// it is the CPU.
    Auto,
    #[cfg(feature = "cuda")]
    Cuda(CudaDevice),
}

thread_local! {
    /// What a thread computes on while it is told to.
    static OWN: RefCell<Option<Device>> = const { RefCell::new(None) };
}

static CURRENT: LazyLock<RwLock<Device>> = LazyLock::new(|| {
    let name = std::env::var(VARIABLE).unwrap_or_default();
    if name.is_empty() {
        return RwLock::default();
    }
    // Whoever set the variable must hear of it: nobody else would notice what it was computed on.
    RwLock::new(Device::named(&name).unwrap_or_else(|error| {
        eprintln!("{VARIABLE}: {}; tensors are computed on the cpu", error.what);
        Device::Cpu
    }))
});

impl Device {
    /// `cpu`, `cuda`, `cuda:N` or `auto`. Opening a GPU takes some hundred milliseconds; `auto` does it when there is
    /// enough to compute.
    #[track_caller]
    pub fn named(name: &str) -> Result<Device> {
        let at = Location::caller();
        let no_device = |why: &str| {
            let (name, why) = (name.chars().take(64).collect(), why.to_owned());
            TensorError::new("device", ErrorKind::NoDevice { name, why }, at)
        };
        match name {
            "cpu" => return Ok(Device::Cpu),
            "auto" => return Ok(Device::Auto),
            // What a GPU would run, run by the compiler's emulator: so that the tests of everything can be tried on it.
            #[cfg(all(test, feature = "cuda"))]
            "emulated" => return Ok(crate::cuda::tests::DEVICE.clone()),
            _ => {}
        }
        let number = if name == "cuda" { Some("0") } else { name.strip_prefix("cuda:") };
        let number: Option<u32> = number.and_then(|number| number.parse().ok());
        match number {
            None => Err(no_device("there are cpu, cuda, cuda:N and auto")),
            #[cfg(feature = "cuda")]
            Some(number) => match CudaDevice::open(number) {
                Ok(device) => Ok(Device::Cuda(device)),
                Err(what) => Err(TensorError::new("device", what, at)),
            },
            #[cfg(not(feature = "cuda"))]
            Some(_) => Err(no_device("this build has no feature `cuda`")),
        }
    }
}

/// The device that tensors are computed on, unless what they are computed from is only on another: a CPU at first, or
/// what the variable `TENSOR_WASM_DEVICE` names.
pub fn device() -> Device {
    OWN.with_borrow(Clone::clone).unwrap_or_else(|| CURRENT.read().clone())
}

/// Has tensors computed on a device from now on, in all threads.
pub fn set_device(device: Device) {
    *CURRENT.write() = device;
}

/// Has this thread compute on a device while a function runs.
pub fn with_device<R>(device: &Device, run: impl FnOnce() -> R) -> R {
    let _own = OwnDevice::set(device);
    run()
}

/// What a thread computes on for as long as this lives.
pub(crate) struct OwnDevice(Option<Device>);

impl OwnDevice {
    pub(crate) fn set(device: &Device) -> OwnDevice {
        OwnDevice(OWN.replace(Some(device.clone())))
    }
}

impl Drop for OwnDevice {
    fn drop(&mut self) {
        OWN.replace(self.0.take());
    }
}

/// The GPU to compute something on that is made from these; none for a CPU.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_for(leaves: &[Value]) -> Option<CudaDevice> {
    if let Device::Cuda(device) = device() {
        return Some(device);
    }
    leaves.iter().find_map(|leaf| leaf.storage.cuda_device())
}
