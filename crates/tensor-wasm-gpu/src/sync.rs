//! Atomics, from `loom` when the lock-free parts are being model-checked.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};
