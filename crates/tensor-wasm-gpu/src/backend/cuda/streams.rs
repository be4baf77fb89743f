//! Streams of a CUDA device: which hardware queue a stream's jobs go to, a share of the multiprocessors, and the thread
//! that sleeps in the driver until an event and then rings the server's doorbell.

use std::collections::HashSet;
use std::ffi::c_uint;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use cudarc::driver::sys as cu;

use super::driver::{Context, check};
use super::queues::{HardwareQueues, QueueUse};
use super::recording::Recording;
use crate::backend::residents::Ending;
use crate::error::DeviceError;
use crate::slab::Slab;

pub(super) struct CudaStream {
    /// The first stream of its tenant.
    pub owner: usize,
    /// Where its jobs go: of high priority, or of low. Other streams' jobs may go there too.
    pub queue: QueueUse,
    is_low: bool,
    /// A context with a part of the multiprocessors.
    pub green: Option<cu::CUgreenCtx>,
    pub pool: Option<cu::CUmemoryPool>,
    /// Memory taken from the pool.
    pub reserved: HashSet<u64>,
    /// What is being recorded goes to a stream that nobody shares.
    pub recording: Option<Recording>,
    pub resident: Option<ResidentStream>,
    waiter: Option<Sender<RecordedEvent>>,
}

/// Of a stream for a resident kernel.
pub(super) struct ResidentStream {
    /// The number of its words in the slab.
    pub words: usize,
    /// Once it was launched.
    pub ending: Option<Arc<Ending>>,
}

struct RecordedEvent(cu::CUevent);

// SAFETY: an event may be waited for and destroyed by any thread with its context; here exactly one does, after the
// worker recorded it and let go of it.
unsafe impl Send for RecordedEvent {}

impl CudaStream {
    /// A stream of high priority, on all multiprocessors or on those of a green context.
    pub(super) fn new(
        owner: usize,
        green: Option<cu::CUgreenCtx>,
        queues: &mut HardwareQueues,
    ) -> Result<CudaStream, DeviceError> {
        Ok(CudaStream::on(queues.take(green, false)?, owner, green, None))
    }

    pub(super) fn control(own: usize, queues: &mut HardwareQueues) -> Result<CudaStream, DeviceError> {
        Ok(CudaStream::on(queues.take_control()?, own, None, None))
    }

    /// A stream for one resident kernel.
    pub(super) fn resident(
        owner: usize,
        green: Option<cu::CUgreenCtx>,
        words: usize,
        queues: &mut HardwareQueues,
    ) -> Result<CudaStream, DeviceError> {
        let resident = ResidentStream { words, ending: None };
        Ok(CudaStream::on(queues.take_alone(green)?, owner, green, Some(resident)))
    }

    fn on(
        queue: QueueUse,
        owner: usize,
        green: Option<cu::CUgreenCtx>,
        resident: Option<ResidentStream>,
    ) -> CudaStream {
        CudaStream {
            owner,
            queue,
            is_low: false,
            green,
            pool: None,
            reserved: HashSet::new(),
            recording: None,
            resident,
            waiter: None,
        }
    }

    /// `own` is the stream's number. What is the owner's goes with the owner; a green context is returned, because the
    /// driver waits for resident kernels before it goes.
    pub(super) fn destroy(self, own: usize, queues: &mut HardwareQueues) -> Option<cu::CUgreenCtx> {
        queues.give_back(self.queue);
        if let Some(pool) = self.pool {
            // SAFETY: a pool of ours whose memory was given back, or is by the driver once it is not used.
            let _ = unsafe { cu::cuMemPoolDestroy(pool) };
        }
        self.green.filter(|_| self.owner == own)
    }

    /// Sends what comes from here on to a queue of the other priority, where it begins after what is on this one.
    pub(super) fn prioritize(&mut self, low: bool, queues: &mut HardwareQueues) -> Result<(), DeviceError> {
        if self.is_low == low || self.resident.is_some() {
            return Ok(());
        }
        let other = queues.take(self.green, low)?;
        if let Err(error) = order(queues.stream(self.queue), queues.stream(other)) {
            queues.give_back(other);
            return Err(error);
        }
        queues.give_back(std::mem::replace(&mut self.queue, other));
        self.is_low = low;
        Ok(())
    }

    /// Rings once everything on the stream so far is done.
    pub(super) fn notify(
        &mut self,
        own: usize,
        queues: &HardwareQueues,
        context: &Arc<Context>,
        slab: &Arc<Slab>,
    ) -> Result<(), DeviceError> {
        const FLAGS: c_uint =
            cu::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint | cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        // What is recorded is not run, and a resident kernel's thread rings when it has ended.
        let is_launched = self.resident.as_ref().is_some_and(|resident| resident.ending.is_some());
        if self.recording.is_some() || is_launched {
            slab.done_bell().ring();
            return Ok(());
        }
        let waiter = match &self.waiter {
            Some(waiter) => waiter,
            None => self.waiter.insert(start_waiter(own, context.clone(), slab.clone())?),
        };
        let mut event = null_mut();
        // SAFETY: writes a handle to a variable of ours, recorded on a stream of ours.
        unsafe {
            check(cu::cuEventCreate(&mut event, FLAGS))?;
            if let Err(error) = check(cu::cuEventRecord(event, queues.stream(self.queue))) {
                let _ = cu::cuEventDestroy_v2(event);
                return Err(error);
            }
        }
        // The thread ends only when its sender goes.
        let _ = waiter.send(RecordedEvent(event));
        Ok(())
    }
}

/// Has one stream begin what comes next after everything that the other was given so far.
pub(super) fn order(before: cu::CUstream, after: cu::CUstream) -> Result<(), DeviceError> {
    const UNTIMED: c_uint = cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
    if before == after {
        return Ok(());
    }
    let mut event = null_mut();
    // SAFETY: a handle is written to a variable of ours; the streams are ours. The event may be destroyed while it is
    // waited for.
    unsafe {
        check(cu::cuEventCreate(&mut event, UNTIMED))?;
        let recorded = check(cu::cuEventRecord(event, before));
        let ordered = recorded.and_then(|()| check(cu::cuStreamWaitEvent(after, event, 0)));
        check(cu::cuEventDestroy_v2(event))?;
        ordered
    }
}

/// A context with a part of the multiprocessors.
pub(super) fn new_green(device: cu::CUdevice, multiprocessors: u32) -> Result<cu::CUgreenCtx, DeviceError> {
    const SM: cu::CUdevResourceType = cu::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
    const DEFAULT_STREAM: c_uint = 1;
    let mut all = MaybeUninit::<cu::CUdevResource>::zeroed();
    let (mut part, mut rest) = (MaybeUninit::<cu::CUdevResource>::zeroed(), MaybeUninit::zeroed());
    let (mut groups, mut description, mut green) = (1, null_mut(), null_mut());
    // SAFETY: plain data that the driver fills in, each from the one before; all of it is ours.
    unsafe {
        check(cu::cuDeviceGetDevResource(device, all.as_mut_ptr(), SM))?;
        check(cu::cuDevSmResourceSplitByCount(
            part.as_mut_ptr(),
            &mut groups,
            all.as_ptr(),
            rest.as_mut_ptr(),
            0,
            multiprocessors,
        ))?;
        check(cu::cuDevResourceGenerateDesc(&mut description, part.as_mut_ptr(), 1))?;
        check(cu::cuGreenCtxCreate(&mut green, description, device, DEFAULT_STREAM))?;
    }
    Ok(green)
}

pub(super) fn destroy_green(green: cu::CUgreenCtx) {
    // SAFETY: made by `new_green`; no stream is in it any more.
    let _ = unsafe { cu::cuGreenCtxDestroy(green) };
}

fn start_waiter(own: usize, context: Arc<Context>, slab: Arc<Slab>) -> Result<Sender<RecordedEvent>, DeviceError> {
    let (sender, events) = channel::<RecordedEvent>();
    let wait = move || {
        let entered = context.enter();
        for RecordedEvent(event) in events {
            // SAFETY: an event that was recorded, and that only this thread has.
            let waited = unsafe { (cu::cuEventSynchronize(event), cu::cuEventDestroy_v2(event)) }.0;
            match entered.clone().and_then(|()| check(waited)) {
                Ok(()) => slab.done_bell().ring(),
                Err(error) => crate::worker::lost(&slab, &error),
            }
        }
    };
    let spawned = std::thread::Builder::new().name(format!("stream-{own}")).spawn(wait);
    spawned.map_err(|e| DeviceError::Refused { why: format!("no thread can be started: {e}") })?;
    Ok(sender)
}
