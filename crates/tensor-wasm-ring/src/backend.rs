//! What differs between devices: of what the lanes of a behaviour are made, and how they are woken. Everything else is
//! the same for all of them.

use tensor_wasm_gpu::DeviceKind;

use crate::behaviour::Behaviour;
use crate::error::ActorError;

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
            Ok(LaneImage { image, threads: 1, rings: true })
        }
        DeviceKind::Cuda => Err(ActorError::Unsupported { what: format!("{:?} on a GPU", behaviour.name()) }),
    }
}

/// The behaviour of an image for a CPU; none if it is another image.
pub(crate) fn behaviour_of_image(image: &[u8]) -> Option<Result<Behaviour, String>> {
    let name = String::from_utf8_lossy(image.strip_prefix(CPU_IMAGE)?).into_owned();
    Some(Behaviour::named(&name).ok_or_else(|| format!("no behaviour is called {name:?}")))
}
