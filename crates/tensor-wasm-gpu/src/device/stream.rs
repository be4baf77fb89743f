//! Streams of a tenant: what is asked for on one is done in that order, what is asked for on two side by side.
//!
//! Every tenant has one from the beginning. More come from a pool that is bounded for each tenant and for the device;
//! where it is exhausted, streams are shared, and nothing fails. A stream is opened with the worker when it is first
//! used, and kept for the next who asks: making one takes a driver some ten microseconds. It is not a tenant's line:
//! that is shared by all of its streams (`queue/fair.rs`), so they are parallelism and no larger part of the device.
//!
//! What two streams do with one buffer is in the order it was asked for, too: the arena remembers the last uses of
//! every block, and a job that must come after one on another stream is sent behind an `Await`.

use std::sync::Arc;

use crate::device::arena::{Part, Span};
use crate::device::{Bound, Completion, Device, TenantMemory, TenantState};
use crate::error::DeviceError;
use crate::info::DeviceKind;
use crate::queue::job::Job;
use crate::queue::link::{CONTROL, Order, Payer, StreamUse, Ticket};

/// Streams of one tenant from the pool. A GPU runs 128 kernels at once, and its queues are 32: with more streams than
/// that they wait for each other. On a CPU a stream that has long jobs is a thread.
const TENANT_STREAMS_CUDA: usize = 32;
const TENANT_STREAMS_CPU: usize = 8;

/// Streams of the pool on a CPU device, for all tenants: each may become a thread.
const POOL_STREAMS_CPU: u32 = 64;

/// Streams that other tenants do not use and that are taken from them at once when the pool is empty.
const RECLAIMED_AT_ONCE: usize = 16;

const _: () = assert!(TENANT_STREAMS_CUDA < u64::BITS as usize, "they are bits of a word");

/// How many streams of the pool a device of this kind may have.
pub(crate) fn pool_max(kind: DeviceKind) -> u32 {
    match kind {
        DeviceKind::Cuda => u32::MAX,
        DeviceKind::Cpu => POOL_STREAMS_CPU,
    }
}

/// A stream's number with the worker, and its index among the tenant's own, the first being 0.
pub(crate) struct StreamSlot {
    pub number: u32,
    pub index: usize,
}

/// The streams that a tenant has from the pool. Those that nobody but this list holds are idle.
#[derive(Default)]
pub(crate) struct TenantStreams {
    pub slots: Vec<Arc<StreamSlot>>,
}

impl TenantStreams {
    /// A stream that nobody holds, of those that have something more.
    fn idle(&self, is_fit: impl Fn(&StreamSlot) -> bool) -> Option<&Arc<StreamSlot>> {
        self.slots.iter().find(|slot| Arc::strong_count(slot) == 1 && is_fit(slot))
    }

    /// The lowest index that no stream has.
    fn free_index(&self) -> usize {
        (1..).find(|index| self.slots.iter().all(|slot| slot.index != *index)).unwrap_or(1)
    }
}

/// A stream of a tenant, held by one who sends jobs. Cloning shares it; it goes back to the tenant with the last clone.
#[derive(Clone)]
pub struct Stream {
    pub(crate) state: Arc<TenantState>,
    pub(crate) slot: Arc<StreamSlot>,
    pub(crate) payer: Option<Arc<dyn Payer>>,
}

impl TenantState {
    pub(crate) fn stream(self: &Arc<Self>) -> Stream {
        let state = self.clone();
        let tenant_max = match self.device.kind() {
            DeviceKind::Cuda => TENANT_STREAMS_CUDA,
            DeviceKind::Cpu => TENANT_STREAMS_CPU,
        };
        let slot = {
            let mut streams = self.streams.lock();
            if let Some(slot) = streams.idle(|_| true) {
                return Stream { state, slot: slot.clone(), payer: None };
            }
            if streams.slots.len() < tenant_max
                && let Some(number) = self.device.take_stream()
            {
                let slot = Arc::new(StreamSlot { number, index: streams.free_index() });
                streams.slots.push(slot.clone());
                return Stream { state, slot, payer: None };
            }
            // The one that the fewest hold.
            let shared = streams.slots.iter().min_by_key(|slot| Arc::strong_count(slot));
            let slot = shared.unwrap_or(&self.home).clone();
            if streams.slots.len() >= tenant_max {
                return Stream { state, slot, payer: None };
            }
            slot
        };
        // Whoever asks next may have one that another tenant does not use.
        self.reclaim();
        Stream { state, slot, payer: None }
    }

    /// Takes idle streams from the other tenants.
    fn reclaim(self: &Arc<Self>) {
        let bound = self.device.bound();
        let mut count = 0;
        for tenant in self.device.tenants() {
            if Arc::ptr_eq(&tenant, self) || count >= RECLAIMED_AT_ONCE {
                continue;
            }
            let mut numbers = Vec::new();
            // Whoever sends on a stream holds it, and nobody can begin to while the list is locked. Nor is anything
            // left on those that are taken: another stream may have the same index from now on.
            let is_done = |slot: &StreamSlot| bound.link.is_idle(slot.number as usize);
            let mut streams = tenant.streams.lock();
            let mut memory = tenant.memory.lock();
            while let Some(slot) = streams.idle(is_done).cloned() {
                streams.slots.retain(|other| !Arc::ptr_eq(other, &slot));
                memory.opened &= !(1 << slot.index);
                numbers.push(slot.number);
            }
            drop((streams, memory));
            count += numbers.len();
            // While the tenant is held: its line is there for as long as one of its streams is.
            if !numbers.is_empty() {
                self.device.close_streams(tenant.number(), numbers);
            }
        }
    }
}

impl Stream {
    pub fn device(&self) -> &Device {
        &self.state.device
    }

    /// The same stream for somebody who is charged for what is sent by it.
    pub fn paid_by(&self, payer: Arc<dyn Payer>) -> Stream {
        Stream { payer: Some(payer), ..self.clone() }
    }

    /// Waits in this thread until all that was sent by it so far is done.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.state.bound()?.link.synchronize(self.slot.number as usize)
    }

    /// Which of its tenant's streams it is: 0 for the first, below [`Stream::INDEX_MAX`] for all. Another stream that
    /// has the same index later begins after everything on this one is done.
    pub fn index(&self) -> usize {
        self.slot.index
    }

    /// More than any index.
    pub const INDEX_MAX: usize = TENANT_STREAMS_CUDA + 1;

    pub(crate) fn number(&self) -> u32 {
        self.slot.number
    }

    /// Has the worker know the stream. Does not wait for it: what is sent to the stream comes after.
    pub(crate) fn open(&self, bound: &Bound, memory: &mut TenantMemory) -> Result<(), DeviceError> {
        let bit = 1 << self.slot.index;
        if memory.opened & bit != 0 {
            return Ok(());
        }
        let (stream, owner) = (self.slot.number, self.state.number());
        if !bound.link.open_more(stream as usize, owner as usize) {
            return Err(DeviceError::StaleHandle);
        }
        if let Err(error) = bound.link.send(CONTROL, vec![Job::OpenMore { stream, owner }.into()]) {
            bound.link.close(stream as usize);
            return Err(error);
        }
        memory.opened |= bit;
        Ok(())
    }

    /// What must come before a job that uses these parts: uses on other streams that are not over, each stream once,
    /// and the zeroing of what was never written. Also finds the parts.
    pub(crate) fn before<'a>(
        &self,
        bound: &Bound,
        memory: &TenantMemory,
        parts: &[Part],
    ) -> Result<(Vec<Order<'a>>, Vec<Span>), DeviceError> {
        let mut found = Vec::with_capacity(parts.len());
        let mut uses: Vec<StreamUse> = Vec::new();
        let mut zeroed: Vec<(u64, u64)> = Vec::new();
        for part in parts {
            let span = memory.arena.peek(*part)?;
            let left = memory.arena.before(*part, self.slot.number).filter(|before| !bound.link.is_past(*before));
            left.for_each(|before| last_of_each_stream(&mut uses, before));
            zeroed.extend(span.zero_first.filter(|range| !zeroed.contains(range)));
            found.push(span);
        }
        let fill = |(address, bytes)| Job::Fill { address, bytes, value: 0 }.into();
        let orders = uses.into_iter().map(Order::after).chain(zeroed.into_iter().map(fill)).collect();
        Ok((orders, found))
    }

    pub(crate) fn send_orders(&self, bound: &Bound, orders: Vec<Order<'_>>) -> Result<Ticket, DeviceError> {
        bound.link.send_for(self.payer.as_ref(), self.slot.number as usize, orders)
    }

    /// Sends jobs about parts of buffers. What needs zeroing first is zeroed first, what must come after other streams
    /// does, and nothing comes between: the memory stays locked until the jobs are in line.
    pub(crate) fn send<'a>(
        &self,
        parts: &[Part],
        make: impl FnOnce(&[Span]) -> Result<Vec<Order<'a>>, DeviceError>,
    ) -> Result<Completion, DeviceError> {
        let bound = self.state.bound()?;
        let mut memory = self.state.memory.lock();
        let (mut orders, found) = self.before(&bound, &memory, parts)?;
        orders.extend(make(&found)?);
        self.open(&bound, &mut memory)?;
        let ticket = self.send_orders(&bound, orders)?;
        parts.iter().for_each(|part| memory.arena.touch(*part, ticket.as_use()));
        Ok(Completion(ticket))
    }
}

/// Keeps the last use of each stream.
pub(crate) fn last_of_each_stream(uses: &mut Vec<StreamUse>, before: StreamUse) {
    match uses.iter_mut().find(|other| other.stream == before.stream) {
        // Numbers wrap: the later is the one that is ahead.
        Some(other) if before.number.wrapping_sub(other.number) < 1 << 31 => *other = before,
        Some(_) => {}
        None => uses.push(before),
    }
}
