//! Blocks of pinned memory that copies from and to ordinary memory pass through.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Poll, Waker};

use parking_lot::Mutex;

use crate::device::launch::{LoadedModule, Recorded};
use crate::device::pinned::Pinned;
use crate::error::DeviceError;
use crate::slab::{STAGING, Slab};

/// Large enough that the copy engine runs at full speed, small enough that filling one overlaps with sending the last.
pub(crate) const BLOCK_BYTES: u64 = 2 << 20;

pub(crate) struct Staging {
    slab: Arc<Slab>,
    state: Mutex<StagingState>,
}

struct StagingState {
    free: Vec<u64>,
    waiting: VecDeque<Waker>,
    closed: Option<DeviceError>,
}

/// A block in use; goes back when dropped.
pub(crate) struct Block {
    staging: Arc<Staging>,
    pub offset: u64,
}

/// What a job under way uses.
pub(crate) enum Keep {
    Block(Block),
    /// Held until the job is done, not read.
    Pinned(#[expect(dead_code, reason = "held, not read")] Vec<Pinned>),
    Kernel(
        #[expect(dead_code, reason = "held, not read")] Arc<LoadedModule>,
        #[expect(dead_code, reason = "held, not read")] Vec<Pinned>,
    ),
    Graph(#[expect(dead_code, reason = "held, not read")] Arc<Recorded>),
}

impl Staging {
    pub(crate) fn new(slab: Arc<Slab>) -> Arc<Staging> {
        let (begin, len) = slab.region_range(STAGING);
        let free = (0..len / BLOCK_BYTES).rev().map(|n| begin + n * BLOCK_BYTES).collect();
        Arc::new(Staging { slab, state: Mutex::new(StagingState { free, waiting: VecDeque::new(), closed: None }) })
    }

    pub(crate) fn try_block(self: &Arc<Self>) -> Option<Block> {
        let offset = self.state.lock().free.pop()?;
        Some(Block { staging: self.clone(), offset })
    }

    /// A block, once there is one.
    pub(crate) async fn block(self: &Arc<Self>) -> Result<Block, DeviceError> {
        std::future::poll_fn(|cx| {
            let mut state = self.state.lock();
            if let Some(closed) = &state.closed {
                return Poll::Ready(Err(closed.clone()));
            }
            if self.slab.region_range(STAGING).1 == 0 {
                let what = "copying more than 4 KiB of ordinary memory without staging".to_owned();
                return Poll::Ready(Err(DeviceError::Unsupported { what }));
            }
            match state.free.pop() {
                Some(offset) => Poll::Ready(Ok(Block { staging: self.clone(), offset })),
                None => {
                    state.waiting.push_back(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// No block will come any more.
    pub(crate) fn close(&self, why: DeviceError) {
        let mut state = self.state.lock();
        state.closed = Some(why);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Block {
    pub(crate) fn slab(&self) -> &Slab {
        &self.staging.slab
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut state = self.staging.state.lock();
        state.free.push(self.offset);
        // All of them: one that was dropped while it waited must not swallow the wake-up of another.
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}
