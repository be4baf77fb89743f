//! The way of a job from whoever asks to the worker and back: what jobs there are (`job.rs`), whose goes next
//! (`fair.rs`), and the server's end of the ring and the flags (`link.rs`).

pub(crate) mod fair;
pub(crate) mod job;
pub(crate) mod link;
