//! Workers that are threads end before the process does. A CUDA driver takes itself apart in handlers of the process's
//! exit; a thread that is in the driver then, be it to give back a context, works on freed memory.
//!
//! Invariant: handlers run in the reverse order of their registration, so ours is registered again after whatever
//! library registers its own.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::slab::Slab;

/// A worker that is in the middle of a long kernel is not waited for any longer.
const END_MAX: Duration = Duration::from_secs(5);

const PAUSE: Duration = Duration::from_micros(200);

static IS_EXITING: AtomicBool = AtomicBool::new(false);
static WORKERS: Mutex<Vec<(Weak<Slab>, JoinHandle<()>)>> = Mutex::new(Vec::new());

unsafe extern "C" {
    fn atexit(handler: extern "C" fn()) -> i32;
}

/// Whether the process is about to end, and workers with it.
pub(super) fn is_exiting() -> bool {
    IS_EXITING.load(Ordering::Relaxed)
}

/// A worker has been started, and is to be over before the process is.
pub(super) fn end_before_exit(slab: Weak<Slab>, thread: JoinHandle<()>) {
    let mut workers = WORKERS.lock();
    workers.retain(|(_, thread)| !thread.is_finished());
    workers.push((slab, thread));
}

/// A library that the worker uses is there. Where that cannot be registered, the process exits as it would have.
pub(crate) fn loaded_a_library() {
    // SAFETY: the handler is a function without a state of its own, and there for as long as this code is.
    let _ = unsafe { atexit(end_workers) };
}

extern "C" fn end_workers() {
    IS_EXITING.store(true, Ordering::Relaxed);
    // Whoever holds it is another thread that has not ended: there is nobody to wait for then.
    let Some(workers) = WORKERS.try_lock_for(END_MAX) else { return };
    let until = Instant::now() + END_MAX;
    for (slab, thread) in workers.iter() {
        while !thread.is_finished() && Instant::now() < until {
            if let Some(slab) = slab.upgrade() {
                slab.worker_bell().ring();
            }
            std::thread::park_timeout(PAUSE);
        }
    }
}
