//! A resident kernel on a CUDA device.

use std::ffi::c_uint;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys as cu;

use super::driver::{Context, check};
use super::launch_kernel;
use crate::backend::execute::LaunchShape;
use crate::backend::residents::ResidentKernel;
use crate::error::DeviceError;

pub(super) struct CudaResident {
    context: Arc<Context>,
    function: cu::CUfunction,
    stream: cu::CUstream,
    shape: LaunchShape,
    params: Vec<u8>,
    /// Recorded behind each launch.
    left: cu::CUevent,
}

// SAFETY: the driver's handles may be used by any thread that has entered their context. The stream is closed, and the
// module unloaded, only after this has said that the kernel has ended.
unsafe impl Send for CudaResident {}

impl CudaResident {
    pub(super) fn new(
        context: Arc<Context>,
        function: cu::CUfunction,
        stream: cu::CUstream,
        shape: LaunchShape,
        params: &[u8],
    ) -> Result<CudaResident, DeviceError> {
        const FLAGS: c_uint =
            cu::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint | cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        let mut left = null_mut();
        // SAFETY: writes a handle to a variable of ours.
        check(unsafe { cu::cuEventCreate(&mut left, FLAGS) })?;
        Ok(CudaResident { context, function, stream, shape, params: params.to_vec(), left })
    }
}

impl ResidentKernel for CudaResident {
    fn enter(&self) -> Result<(), DeviceError> {
        self.context.enter()
    }

    fn launch(&mut self) -> Result<(), DeviceError> {
        launch_kernel(self.function, self.stream, self.shape, &self.params)?;
        // SAFETY: an event and a stream of ours.
        check(unsafe { cu::cuEventRecord(self.left, self.stream) })
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        // SAFETY: an event of ours that was recorded.
        check(unsafe { cu::cuEventSynchronize(self.left) })
    }
}

impl Drop for CudaResident {
    fn drop(&mut self) {
        // SAFETY: an event of ours that nobody waits for any more.
        let _ = unsafe { cu::cuEventDestroy_v2(self.left) };
    }
}
