//! Resident kernels: jobs of another class. They run on a stream of their own until they are told to end, so neither
//! the limit of a job nor the tenants' line is for them. What shows that one is well is its heartbeat, a word in the
//! slab that it counts up; what ends it is its stop word. One that does not beat, or does not end when it was told to,
//! costs the worker (`worker/keeper.rs`). What it does meanwhile, and how it is talked to, is not this crate's
//! business.

use std::sync::Arc;

use crate::device::launch::{Grid, Kernel, addresses, launch_job, whole_parts};
use crate::device::params::{Param, Params};
use crate::device::staging::Keep;
use crate::device::stream::{Stream, StreamSlot};
use crate::device::{Bound, Completion, Tenant};
use crate::error::DeviceError;
use crate::queue::job::Job;
use crate::queue::link::{CONTROL, Link, Order, StreamUse};
use crate::slab::Slab;

/// A kernel that stays. Dropping this tells it to end.
pub struct Resident {
    stream: Stream,
    link: Arc<Link>,
    /// Which of the slab's words are its own.
    words: usize,
    own: StreamUse,
    completion: Option<Completion>,
}

impl Tenant {
    /// Launches a kernel that stays until it is told to end. It takes two parameters more than are given here, the
    /// last ones: the addresses of two words, its heartbeat, which it is to count up for as long as it is well, and
    /// its stop word, on which it is to return when it is not zero. Returning need not be the end: a device on which
    /// modules are loaded has resident kernels make way for that and launches them again with the same parameters, so
    /// what a resident kernel is to remember it keeps in memory. Its buffers may be used by others meanwhile; when is
    /// for them to settle.
    pub fn resident(&self, kernel: &Kernel, grid: Grid, params: &Params) -> Result<Resident, DeviceError> {
        let state = &self.state;
        let bound = state.bound()?;
        let refused = |why: String| DeviceError::BadLaunch { why };
        let max = state.limits.residents_max;
        let words = bound.link.take_resident(state.id, max).map_err(|held| {
            refused(format!("tenant {:?} has {held} resident kernels, of {max} that it may have", state.name))
        })?;
        let Some(number) = state.device.take_stream() else {
            bound.link.end_resident(words);
            return Err(refused("there is no stream left for a resident kernel".to_owned()));
        };
        let slot = Arc::new(StreamSlot { number, index: 0 });
        let stream = Stream { state: state.clone(), slot, payer: None };
        match stream.launch_resident(&bound, words, kernel, grid, params) {
            Ok(completion) => {
                let own = completion.0.as_use();
                Ok(Resident { stream, link: bound.link.clone(), words, own, completion: Some(completion) })
            }
            Err(error) => {
                bound.link.end_resident(words);
                state.device.close_streams(state.number(), vec![number]);
                Err(error)
            }
        }
    }
}

impl Stream {
    fn launch_resident(
        &self,
        bound: &Bound,
        words: usize,
        kernel: &Kernel,
        grid: Grid,
        params: &Params,
    ) -> Result<Completion, DeviceError> {
        let address = |offset: u64| Param::U64(bound.info.slab_address + offset);
        let params = params.followed_by([address(Slab::beat_offset(words)), address(Slab::stop_offset(words))]);
        let pinned = self.check_launch(kernel, grid, &params, bound)?;
        let (stream, owner) = (self.number(), self.state.number());
        bound.link.open_resident(stream as usize, &self.state.name);
        let words = u32::try_from(words).unwrap_or(u32::MAX);
        bound.link.send(CONTROL, vec![Job::OpenResident { stream, owner, words }.into()])?.wait(|_| ())?;
        let mut memory = self.state.memory.lock();
        let parts = whole_parts(&memory, &params)?;
        let (mut orders, spans) = self.before(bound, &memory, &parts)?;
        let block = params.block(addresses(&spans, &params));
        orders.push(Order::new(launch_job(kernel, grid), &block, Some(Keep::Kernel(kernel.module().clone(), pinned))));
        let ticket = bound.link.send(stream as usize, orders)?;
        parts.iter().for_each(|part| memory.arena.hold(*part, ticket.as_use()));
        bound.link.watch_resident(words as usize, ticket.as_use());
        Ok(Completion(ticket))
    }
}

impl Resident {
    /// How often it has beaten.
    pub fn beats(&self) -> u64 {
        self.link.slab.beat(self.words).load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Tells it to end.
    pub fn stop(&self) {
        self.link.stop_resident(self.words, self.own);
    }

    /// Whether it has ended, or its worker has.
    pub fn is_over(&self) -> bool {
        self.completion.as_ref().is_none_or(Completion::is_over)
    }

    /// Waits in this thread until it has ended. Tell it first.
    pub fn wait(mut self) -> Result<(), DeviceError> {
        self.completion.take().map_or(Ok(()), Completion::wait)
    }

    /// The same for a task. May be given up and asked again until it has ended.
    pub async fn ended(&mut self) -> Result<(), DeviceError> {
        let Some(completion) = &mut self.completion else { return Ok(()) };
        let ended = completion.await;
        self.completion = None;
        ended
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.stop();
        // Its stream is free once it has ended.
        let owner = self.stream.state.number();
        self.stream.device().close_streams(owner, vec![self.stream.number()]);
    }
}
