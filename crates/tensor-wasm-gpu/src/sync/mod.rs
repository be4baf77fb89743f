//! The lock-free parts: the job ring, the doorbell that wakes a side that has parked, and the wakers of those who wait
//! for a flag. Atomics and locks come from here, and from `loom` when these parts are being model-checked.

pub(crate) mod doorbell;
pub(crate) mod ring;
pub(crate) mod waiters;

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

#[cfg(not(loom))]
pub(crate) use parking_lot::Mutex;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

#[cfg(loom)]
#[derive(Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

#[cfg(loom)]
impl<T> Mutex<T> {
    pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }
}
