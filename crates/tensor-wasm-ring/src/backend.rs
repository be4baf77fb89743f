//! What differs between devices: of what the lanes of a behaviour are made, and how they are woken. Everything else is
//! the same for all of them.

use tensor_wasm_gpu::{DeviceKind, Param, Params, Tenant};

use crate::behaviour::Behaviour;
use crate::error::ActorError;
#[cfg(feature = "cuda")]
use crate::gpu::GpuMemory;
use crate::layout::Shape;

/// The kernel that every image of lanes has.
pub(crate) const LANE_KERNEL: &str = "lane";

/// Its parameters: address and bytes of the span, the address of the host's bell, and the two of every kernel that
/// stays, heartbeat and stop word.
pub(crate) const LANE_PARAMS: u32 = 5;

/// What an image of lanes for a CPU begins with; what follows is the name of a behaviour.
const CPU_IMAGE: &[u8] = b"tensor-wasm lane\0";

/// Lanes that can be loaded on a device.
pub(crate) struct LaneImage {
    pub image: Vec<u8>,
    /// The name of the kernel in it.
    pub kernel: String,
    /// State that its handler needs an actor to have.
    pub state_bytes_min: u32,
    /// Whether its lanes are blocks of a GPU, with memory of their own there.
    pub is_gpu: bool,
    /// Threads of a lane.
    pub threads: u32,
    /// Whether a lane parks and is rung for, and rings the host itself. If not, both sides look.
    pub rings: bool,
}

/// Lanes of a behaviour for a device of a kind.
pub(crate) fn lane_image(kind: DeviceKind, behaviour: Behaviour) -> Result<LaneImage, ActorError> {
    match kind {
        DeviceKind::Cpu => {
            let image = [CPU_IMAGE, behaviour.name().as_bytes()].concat();
            let state_bytes_min = behaviour.state_bytes_min();
            Ok(LaneImage {
                image,
                kernel: LANE_KERNEL.to_owned(),
                state_bytes_min,
                is_gpu: false,
                threads: 1,
                rings: true,
            })
        }
        DeviceKind::Cuda => gpu_image(behaviour),
    }
}

#[cfg(feature = "cuda")]
pub(crate) fn gpu_image(behaviour: Behaviour) -> Result<LaneImage, ActorError> {
    let compiled = crate::gpu::compile(behaviour)?;
    Ok(LaneImage {
        image: compiled.ptx.into_bytes(),
        kernel: compiled.entry,
        state_bytes_min: behaviour.state_bytes_min().max(compiled.state_bytes_min),
        is_gpu: true,
        threads: compiled.group_items,
        rings: false,
    })
}

#[cfg(not(feature = "cuda"))]
fn gpu_image(behaviour: Behaviour) -> Result<LaneImage, ActorError> {
    Err(ActorError::Unsupported {
        what: format!("{:?} on a GPU, in a build without the feature `cuda`", behaviour.name()),
    })
}

/// What makes lanes for a device.
pub(crate) type LaneMaker = fn(DeviceKind, Behaviour) -> Result<LaneImage, ActorError>;

/// What lanes have of their device's memory, besides the span: nothing on a CPU, whose lanes keep it themselves.
pub(crate) enum LaneMemory {
    Cpu,
    #[cfg(feature = "cuda")]
    Gpu(GpuMemory),
}

impl LaneMemory {
    pub(crate) fn new(tenant: &Tenant, image: &LaneImage, shape: &Shape) -> Result<LaneMemory, ActorError> {
        #[cfg(feature = "cuda")]
        if image.is_gpu {
            return GpuMemory::new(tenant, shape).map(LaneMemory::Gpu);
        }
        let _ = (tenant, image, shape);
        Ok(LaneMemory::Cpu)
    }

    /// The parameters of the kernel: from the addresses of the span and of the host's bell, and the bytes of the span.
    pub(crate) fn params(&self, shape: &Shape, [span, bytes, bell]: [u64; 3]) -> Params {
        match self {
            LaneMemory::Cpu => {
                let _ = shape;
                Params::new([span, bytes, bell].map(Param::U64))
            }
            #[cfg(feature = "cuda")]
            LaneMemory::Gpu(memory) => memory.params(shape, span),
        }
    }
}

/// The behaviour of an image for a CPU; none if it is another image.
pub(crate) fn behaviour_of_image(image: &[u8]) -> Option<Result<Behaviour, String>> {
    let name = String::from_utf8_lossy(image.strip_prefix(CPU_IMAGE)?).into_owned();
    Some(Behaviour::named(&name).ok_or_else(|| format!("no behaviour is called {name:?}")))
}
