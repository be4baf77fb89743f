//! Atomics of the rings: the standard ones, and `loom`'s when the rings are being model-checked.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};

/// Something that has its cache lines to itself. Two of them: processors fetch lines in pairs, and so does a GPU.
#[repr(align(128))]
pub(crate) struct OwnLine<T>(pub(crate) T);
