//! Kernels of a tenant: loading modules, finding kernels, launching them, recording graphs.

use crate::arena::{Arena, Handle};
use crate::device::{Bound, Completion, Tenant};
use crate::error::DeviceError;
use crate::info::DeviceInfo;
use crate::job::{Answer, Cell, Job};
use crate::link::{CONTROL, Order, Ticket};
use crate::params::Params;
use crate::slab::PAYLOAD_BYTES_MAX;
use crate::staging::{BLOCK_BYTES, Keep};

/// A loaded kernel module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module {
    worker: u32,
    number: u32,
}

/// A kernel, ready to be launched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    worker: u32,
    number: u32,
    pub name: String,
    pub threads_max: u32,
    pub shared_bytes: u32,
    pub registers: u32,
    /// Blocks of `threads_max` threads that one multiprocessor holds at once.
    pub blocks_per_multiprocessor: u32,
    /// Offset and size of each parameter.
    params: Vec<(u32, u32)>,
}

/// A sequence that was recorded once and runs as one.
#[derive(Debug)]
pub struct Graph {
    worker: u32,
    stream: u32,
    number: u32,
    /// What it reads and writes; all of it must be there still when it is replayed.
    buffers: Vec<Handle>,
}

/// How many threads a kernel runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    pub blocks: [u32; 3],
    pub threads: [u32; 3],
    pub shared_bytes: u32,
}

/// A step of a graph.
pub enum Step<'a> {
    Launch { kernel: &'a Kernel, grid: Grid, params: &'a Params },
    Copy { from: (Handle, u64), to: (Handle, u64), bytes: u64 },
    Fill { buffer: Handle, offset: u64, bytes: u64, value: u8 },
}

impl Tenant {
    /// Loads a kernel module (PTX text or a cubin), or finds it loaded: same bytes, same module.
    pub async fn load(&self, image: &[u8]) -> Result<Module, DeviceError> {
        let bound = self.0.bound()?;
        let hash = blake3::hash(image);
        let worker = bound.link.worker;
        if let Some(number) = bound.modules.lock().get(&hash) {
            return Ok(Module { worker, number: *number });
        }
        if image.is_empty() || image.len() as u64 >= BLOCK_BYTES {
            let why = format!("it has {} bytes; between 1 and {} are possible", image.len(), BLOCK_BYTES - 1);
            return Err(DeviceError::BadModule { why });
        }
        let block = bound.link.staging.block().await?;
        block.slab().copy_in(block.offset, image);
        // PTX ends with a NUL.
        block.slab().copy_in(block.offset + image.len() as u64, &[0]);
        let job = Job::Load { offset: block.offset, bytes: image.len() as u64 };
        let order = Order { job, payload: &[], keeps: Some(Keep::Block(block)) };
        let answer = bound.link.send(CONTROL, vec![order])?.await?;
        let number = u32::try_from(answer.values[0]).unwrap_or(u32::MAX);
        let number = *bound.modules.lock().entry(hash).or_insert(number);
        Ok(Module { worker, number })
    }

    /// A kernel of a module.
    pub async fn kernel(&self, module: Module, name: &str) -> Result<Kernel, DeviceError> {
        let bound = self.0.bound()?;
        same_worker(module.worker, &bound)?;
        if name.is_empty() || name.len() >= PAYLOAD_BYTES_MAX || name.contains('\0') {
            return Err(DeviceError::NoSuchKernel { name: name.chars().take(64).collect() });
        }
        let job = Job::Kernel { module: module.number };
        let mut ticket = bound.link.send(CONTROL, vec![Order { job, payload: name.as_bytes(), keeps: None }])?;
        let cell = ticket.cell();
        let mut layout = vec![0; PAYLOAD_BYTES_MAX];
        let link = bound.link.clone();
        let answer =
            std::future::poll_fn(|cx| ticket.poll_with(cx, |_| Cell(link.slab.cell(cell)).payload(&mut layout)));
        let Answer { values: [number, count, threads, shared, registers, resident] } = answer.await?;
        let half = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
        let pairs = layout.chunks_exact(8).map(|pair| (word(&pair[..4]), word(&pair[4..])));
        Ok(Kernel {
            worker: module.worker,
            number: half(number),
            name: name.to_owned(),
            threads_max: half(threads),
            shared_bytes: half(shared),
            registers: half(registers),
            blocks_per_multiprocessor: half(resident),
            params: pairs.take(usize::try_from(count).unwrap_or(0)).collect(),
        })
    }

    /// Launches a kernel. Its parameters are checked against its signature, its buffers against the tenant's.
    pub fn launch(&self, kernel: &Kernel, grid: Grid, params: &Params) -> Result<Completion, DeviceError> {
        let bound = self.0.bound()?;
        same_worker(kernel.worker, &bound)?;
        check_grid(kernel, grid, &bound.info)?;
        params.check(&kernel.params)?;
        let spans = params.spans();
        let mut place = self.0.place.lock();
        let mut orders: Vec<Order<'_>> = Vec::new();
        let mut addresses = Vec::with_capacity(spans.len());
        for (handle, offset) in &spans {
            let size = place.arena.size(*handle)?;
            let len = size.checked_sub(*offset).ok_or(DeviceError::OutOfRange { offset: *offset, len: 0, size })?;
            // The kernel may reach all of it, whatever is left after the offset.
            let whole = place.arena.peek(*handle, 0, size, false)?;
            orders.extend(whole.zero_first.map(|(address, bytes)| Job::Fill { address, bytes, value: 0 }.into()));
            addresses.push(place.arena.peek(*handle, *offset, len, false)?.address);
        }
        let block = params.block(&addresses);
        let Grid { blocks, threads, shared_bytes } = grid;
        let job = Job::Launch { kernel: kernel.number, grid: blocks, block: threads, shared_bytes };
        orders.push(Order { job, payload: &block, keeps: None });
        let ticket = bound.link.send(self.0.stream as usize, orders)?;
        spans.iter().for_each(|(handle, _)| place.arena.touch(*handle));
        Ok(Completion(ticket))
    }

    /// Records a sequence that can then be replayed as one.
    pub async fn graph(&self, steps: &[Step<'_>]) -> Result<Graph, DeviceError> {
        let bound = self.0.bound()?;
        let (ticket, buffers) = self.record(&bound, steps)?;
        let number = u32::try_from(ticket.await?.values[0]).unwrap_or(u32::MAX);
        Ok(Graph { worker: bound.link.worker, stream: self.0.stream, number, buffers })
    }

    /// Sends the steps to be recorded; also returns the buffers they use.
    fn record(&self, bound: &Bound, steps: &[Step<'_>]) -> Result<(Ticket, Vec<Handle>), DeviceError> {
        let mut blocks: Vec<Vec<u8>> = Vec::new();
        let mut jobs: Vec<(Job, Option<usize>)> = Vec::new();
        let mut zeros: Vec<Order<'_>> = Vec::new();
        let mut place = self.0.place.lock();
        let mut used: Vec<Handle> = Vec::new();
        let mut span = |arena: &Arena, handle: Handle, offset: u64, len: u64| {
            let span = arena.peek(handle, offset, len, false)?;
            let whole = arena.peek(handle, 0, arena.size(handle)?, false)?;
            zeros.extend(whole.zero_first.map(|(address, bytes)| Job::Fill { address, bytes, value: 0 }.into()));
            used.push(handle);
            Ok::<u64, DeviceError>(span.address)
        };
        for step in steps {
            match step {
                Step::Copy { from, to, bytes } => {
                    let from_address = span(&place.arena, from.0, from.1, *bytes)?;
                    let to_address = span(&place.arena, to.0, to.1, *bytes)?;
                    jobs.push((Job::Copy { from_address, to_address, bytes: *bytes }, None));
                }
                Step::Fill { buffer, offset, bytes, value } => {
                    let address = span(&place.arena, *buffer, *offset, *bytes)?;
                    jobs.push((Job::Fill { address, bytes: *bytes, value: *value }, None));
                }
                Step::Launch { kernel, grid, params } => {
                    same_worker(kernel.worker, bound)?;
                    check_grid(kernel, *grid, &bound.info)?;
                    params.check(&kernel.params)?;
                    let mut addresses = Vec::new();
                    for (handle, offset) in params.spans() {
                        let size = place.arena.size(handle)?;
                        let out = DeviceError::OutOfRange { offset, len: 0, size };
                        let len = size.checked_sub(offset).ok_or(out)?;
                        addresses.push(span(&place.arena, handle, offset, len)?);
                    }
                    let block = params.block(&addresses);
                    let Grid { blocks: grid, threads, shared_bytes } = *grid;
                    jobs.push((
                        Job::Launch { kernel: kernel.number, grid, block: threads, shared_bytes },
                        Some(blocks.len()),
                    ));
                    blocks.push(block);
                }
            }
        }
        let payload = |at: &Option<usize>| at.map_or(&[][..], |at| &blocks[at]);
        let mut orders = zeros;
        orders.push(Job::GraphBegin.into());
        orders.extend(jobs.iter().map(|(job, at)| Order { job: *job, payload: payload(at), keeps: None }));
        orders.push(Job::GraphEnd.into());
        let ticket = bound.link.send(self.0.stream as usize, orders)?;
        used.iter().for_each(|handle| place.arena.touch(*handle));
        Ok((ticket, used))
    }

    /// Runs a recorded sequence. The buffers it was recorded with must not have been freed.
    pub fn replay(&self, graph: &Graph) -> Result<Completion, DeviceError> {
        let bound = self.0.bound()?;
        same_worker(graph.worker, &bound)?;
        if graph.stream != self.0.stream {
            return Err(DeviceError::ForeignHandle);
        }
        // Held until the job is in line: what is freed after that is freed after it on the stream.
        let place = self.0.place.lock();
        graph.buffers.iter().try_for_each(|handle| place.arena.size(*handle).map(drop))?;
        let job = Job::Replay { graph: graph.number };
        bound.link.send(self.0.stream as usize, vec![job.into()]).map(Completion)
    }
}

fn same_worker(worker: u32, bound: &Bound) -> Result<(), DeviceError> {
    match worker == bound.link.worker {
        true => Ok(()),
        false => Err(DeviceError::DeviceLost { why: "it belonged to an earlier worker".to_owned() }),
    }
}

fn check_grid(kernel: &Kernel, grid: Grid, info: &DeviceInfo) -> Result<(), DeviceError> {
    let bad = |why: String| Err(DeviceError::BadLaunch { why });
    let Grid { blocks, threads, shared_bytes } = grid;
    if blocks.contains(&0) || threads.contains(&0) {
        return bad(format!("grid {blocks:?} of blocks {threads:?} is empty"));
    }
    let per_block = threads.iter().try_fold(1_u32, |product, n| product.checked_mul(*n));
    let threads_max = kernel.threads_max.min(info.threads_per_block_max);
    if per_block.is_none_or(|n| n > threads_max) || threads[2] > 64 {
        return bad(format!("a block of {threads:?} threads; this kernel allows {threads_max}, 64 of them deep"));
    }
    if blocks[0] > i32::MAX as u32 || blocks[1] > 65_535 || blocks[2] > 65_535 {
        return bad(format!("a grid of {blocks:?} blocks; at most 2147483647 by 65535 by 65535 are possible"));
    }
    let shared = u64::from(shared_bytes) + u64::from(kernel.shared_bytes);
    if shared > u64::from(info.shared_bytes_per_block_max) {
        let max = info.shared_bytes_per_block_max;
        return bad(format!("{shared} bytes of shared memory; the device has {max} for a block"));
    }
    Ok(())
}
