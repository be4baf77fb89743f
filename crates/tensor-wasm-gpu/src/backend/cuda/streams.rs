//! Streams of a CUDA device: two priorities of one order, a share of the multiprocessors, and the thread that sleeps
//! in the driver until an event and then rings the server's doorbell.

use std::collections::HashSet;
use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use cudarc::driver::sys as cu;

use super::driver::{Context, check};
use crate::error::DeviceError;
use crate::slab::Slab;

/// Stream priorities; every device that has any has these two.
const HIGH: c_int = -1;
const LOW: c_int = 0;

const NON_BLOCKING: c_uint = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;

pub(super) struct CudaStream {
    /// The first stream of its tenant.
    pub owner: usize,
    /// Whether the driver's stream is the owner's, because it would make no more: shared, and not destroyed with this.
    is_shared: bool,
    /// What jobs go to: of high priority, or of low.
    pub stream: cu::CUstream,
    /// The other of the two, once there was need for it.
    other: Option<cu::CUstream>,
    is_low: bool,
    /// A context with a part of the multiprocessors.
    pub green: Option<cu::CUgreenCtx>,
    pub pool: Option<cu::CUmemoryPool>,
    /// Memory taken from the pool.
    pub reserved: HashSet<u64>,
    pub is_recording: bool,
    waiter: Option<Sender<RecordedEvent>>,
}

struct RecordedEvent(cu::CUevent);

// SAFETY: an event may be waited for and destroyed by any thread with its context; here exactly one does, after the
// worker recorded it and let go of it.
unsafe impl Send for RecordedEvent {}

impl CudaStream {
    /// A tenant's first stream, of high priority, on all multiprocessors or, if the number is not zero, on so many.
    pub(super) fn new(device: cu::CUdevice, own: usize, multiprocessors: u32) -> Result<CudaStream, DeviceError> {
        let green = if multiprocessors > 0 { Some(new_green(device, multiprocessors)?) } else { None };
        let stream = new_stream(green, HIGH).inspect_err(|_| {
            if let Some(green) = green {
                // SAFETY: just made, and not used by anything.
                unsafe { cu::cuGreenCtxDestroy(green) };
            }
        })?;
        Ok(CudaStream::of(own, stream, green, false))
    }

    /// One more stream of a tenant, on its multiprocessors. Where the driver makes no more it shares the first:
    /// slower, and not refused.
    pub(super) fn another(owner: usize, first: &CudaStream) -> Result<CudaStream, DeviceError> {
        match new_stream(first.green, HIGH) {
            Ok(stream) => Ok(CudaStream::of(owner, stream, first.green, false)),
            Err(DeviceError::DeviceLost { why }) => Err(DeviceError::DeviceLost { why }),
            Err(error) => {
                tracing::warn!(%error, "the driver makes no more streams; a tenant shares its first");
                Ok(CudaStream::of(owner, first.stream, first.green, true))
            }
        }
    }

    fn of(owner: usize, stream: cu::CUstream, green: Option<cu::CUgreenCtx>, is_shared: bool) -> CudaStream {
        CudaStream {
            owner,
            is_shared,
            stream,
            other: None,
            is_low: false,
            green,
            pool: None,
            reserved: HashSet::new(),
            is_recording: false,
            waiter: None,
        }
    }

    /// `own` is the stream's number. What is the owner's goes with the owner.
    pub(super) fn destroy(self, own: usize) {
        // SAFETY: handles of ours that nothing uses any more; a stream that still has work is destroyed when that is
        // done.
        unsafe {
            if !self.is_shared {
                let _ = cu::cuStreamDestroy_v2(self.stream);
            }
            if let Some(other) = self.other {
                let _ = cu::cuStreamDestroy_v2(other);
            }
            if let Some(pool) = self.pool {
                let _ = cu::cuMemPoolDestroy(pool);
            }
            if let Some(green) = self.green.filter(|_| self.owner == own) {
                let _ = cu::cuGreenCtxDestroy(green);
            }
        }
    }

    /// Sends what comes from here on to the stream of the other priority, which begins after what is on this one.
    pub(super) fn prioritize(&mut self, low: bool) -> Result<(), DeviceError> {
        if self.is_low == low || self.is_recording || self.is_shared {
            return Ok(());
        }
        let other = match self.other {
            Some(other) => other,
            None => *self.other.insert(new_stream(self.green, if low { LOW } else { HIGH })?),
        };
        order(self.stream, other)?;
        self.other = Some(std::mem::replace(&mut self.stream, other));
        self.is_low = low;
        Ok(())
    }

    /// Rings once everything on the stream so far is done.
    pub(super) fn notify(&mut self, own: usize, context: &Arc<Context>, slab: &Arc<Slab>) -> Result<(), DeviceError> {
        const FLAGS: c_uint =
            cu::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint | cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        if self.is_recording {
            slab.done_bell().ring();
            return Ok(());
        }
        let mut event = null_mut();
        // SAFETY: writes a handle to a variable of ours, recorded on a stream of ours.
        unsafe {
            check(cu::cuEventCreate(&mut event, FLAGS))?;
            check(cu::cuEventRecord(event, self.stream))?;
        }
        let waiter = match &self.waiter {
            Some(waiter) => waiter,
            None => self.waiter.insert(start_waiter(own, context.clone(), slab.clone())?),
        };
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

fn new_stream(green: Option<cu::CUgreenCtx>, priority: c_int) -> Result<cu::CUstream, DeviceError> {
    let mut stream = null_mut();
    // SAFETY: writes a handle to a variable of ours; the context is current, and a green context is one we made.
    check(unsafe {
        match green {
            None => cu::cuStreamCreateWithPriority(&mut stream, NON_BLOCKING, priority),
            Some(green) => cu::cuGreenCtxStreamCreate(&mut stream, green, NON_BLOCKING, priority),
        }
    })?;
    Ok(stream)
}

/// A context with a part of the multiprocessors.
fn new_green(device: cu::CUdevice, multiprocessors: u32) -> Result<cu::CUgreenCtx, DeviceError> {
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
