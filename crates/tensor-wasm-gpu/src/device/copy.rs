//! Moving bytes: between buffers, to and from pinned memory, and through staging to and from ordinary memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;

use crate::device::Completion;
use crate::device::arena::{Access, Handle, Part};
use crate::device::pinned::Pinned;
use crate::device::staging::{BLOCK_BYTES, Block, Keep, Staging};
use crate::device::stream::Stream;
use crate::error::DeviceError;
use crate::number::index;
use crate::queue::job::{Cell, Job};
use crate::queue::link::{Link, Order, Ticket};
use crate::slab::PAYLOAD_BYTES_MAX;

/// Copies of ordinary memory from this size on are shared between threads: one alone fills staging slower than a GPU
/// empties it. On an H200's host one copied 4 MiB in half a millisecond, seven times what the link takes.
const PARALLEL_BYTES_MIN: usize = 4 << 20;

/// What a thread has of a shared copy at once, so that there is something for each of them.
const PIECE_BYTES: usize = 512 << 10;
const _: () = assert!(PIECE_BYTES as u64 <= BLOCK_BYTES);

/// Threads that share a large copy.
const COPY_THREADS_MAX: usize = 8;

impl Stream {
    /// Copies within or between buffers.
    pub fn copy(&self, from: (Handle, u64), to: (Handle, u64), bytes: u64) -> Result<Completion, DeviceError> {
        let access = if from.0 == to.0 { Access::Update } else { Access::Overwrite };
        let parts = [part(from.0, from.1, bytes, Access::Read), part(to.0, to.1, bytes, access)];
        self.send(&parts, |spans| {
            let (from_address, to_address) = (spans[0].address, spans[1].address);
            Ok(vec![Job::Copy { from_address, to_address, bytes }.into()])
        })
    }

    pub fn fill(&self, buffer: Handle, offset: u64, bytes: u64, value: u8) -> Result<Completion, DeviceError> {
        self.send(&[part(buffer, offset, bytes, Access::Overwrite)], |spans| {
            Ok(vec![Job::Fill { address: spans[0].address, bytes, value }.into()])
        })
    }

    /// Copies pinned memory to a buffer.
    pub fn write_pinned(&self, from: (&Pinned, u64), to: (Handle, u64), bytes: u64) -> Result<Completion, DeviceError> {
        from.0.check(from.1, bytes)?;
        from.0.check_worker(&self.state.bound()?.link.slab)?;
        let from_offset = from.0.slab_offset() + from.1;
        self.count_to(bytes);
        self.send(&[part(to.0, to.1, bytes, Access::Overwrite)], |spans| {
            let job = Job::Write { from_offset, to_address: spans[0].address, bytes };
            Ok(vec![Order::new(job, &[], Some(Keep::Pinned(vec![from.0.clone()])))])
        })
    }

    /// Copies a buffer to pinned memory.
    pub fn read_pinned(&self, from: (Handle, u64), to: (&Pinned, u64), bytes: u64) -> Result<Completion, DeviceError> {
        to.0.check(to.1, bytes)?;
        to.0.check_worker(&self.state.bound()?.link.slab)?;
        let to_offset = to.0.slab_offset() + to.1;
        self.count_from(bytes);
        self.send(&[part(from.0, from.1, bytes, Access::Read)], |spans| {
            let job = Job::Read { from_address: spans[0].address, to_offset, bytes };
            Ok(vec![Order::new(job, &[], Some(Keep::Pinned(vec![to.0.clone()])))])
        })
    }

    /// Copies ordinary memory to a buffer; done when it returns.
    pub async fn write(&self, buffer: Handle, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        if bytes.len() <= PAYLOAD_BYTES_MAX {
            return self.write_inline(buffer, offset, bytes)?.await;
        }
        for completion in self.write_pieces(buffer, offset, bytes).await? {
            completion.await?;
        }
        Ok(())
    }

    /// The same without waiting for the copy, which is over when what is returned is: the bytes have been read. Large
    /// ones, which pass through more of staging than one may leave to a copy that nobody waits for, are done when it
    /// returns, and nothing is returned.
    pub fn write_ahead(&self, buffer: Handle, offset: u64, bytes: &[u8]) -> Result<Option<Completion>, DeviceError> {
        if bytes.len() <= PAYLOAD_BYTES_MAX {
            return self.write_inline(buffer, offset, bytes).map(Some);
        }
        if bytes.len() >= PARALLEL_BYTES_MIN {
            return self.write_blocking(buffer, offset, bytes).map(|()| None);
        }
        // The last of them: a stream does them in order.
        let last = block_on(self.write_pieces(buffer, offset, bytes))?.pop_back();
        // Somebody has to see that it is over, so that its blocks come back.
        if let Some(Completion(ticket)) = &last {
            ticket.notice();
        }
        Ok(last)
    }

    /// Sends a copy in pieces, and returns what is under way of them when the last was sent.
    async fn write_pieces(
        &self,
        buffer: Handle,
        offset: u64,
        bytes: &[u8],
    ) -> Result<VecDeque<Completion>, DeviceError> {
        self.check_range(buffer, offset, bytes.len())?;
        self.zero_first(buffer)?;
        let bound = self.state.bound()?;
        // As many as there are blocks for are under way at once. Blocks come back when their copies are seen to be
        // done, so whoever has some under way waits for those, and only then for others'.
        let mut under_way = VecDeque::new();
        for (n, piece) in bytes.chunks(index(BLOCK_BYTES)).enumerate() {
            let block = loop {
                match (bound.link.staging.try_block(), under_way.pop_front()) {
                    (Some(block), oldest) => {
                        oldest.into_iter().for_each(|oldest| under_way.push_front(oldest));
                        break block;
                    }
                    (None, Some(oldest)) => oldest.await?,
                    (None, None) => break bound.link.staging.block().await?,
                }
            };
            under_way.push_back(self.write_block(block, buffer, offset + n as u64 * BLOCK_BYTES, piece)?);
        }
        Ok(under_way)
    }

    /// The same in this thread and, for large copies, some helpers.
    pub fn write_blocking(&self, buffer: Handle, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        if bytes.len() < PARALLEL_BYTES_MIN {
            return block_on(self.write(buffer, offset, bytes));
        }
        self.check_range(buffer, offset, bytes.len())?;
        self.zero_first(buffer)?;
        let bound = self.state.bound()?;
        let size = piece_bytes(bytes.len());
        in_parallel(&bound.link.staging, bytes.chunks(size).enumerate().collect(), |block, (n, piece)| {
            self.write_block(block, buffer, offset + (n * size) as u64, piece).map(|sent| (sent, ()))
        })
    }

    fn write_block(&self, block: Block, buffer: Handle, offset: u64, piece: &[u8]) -> Result<Completion, DeviceError> {
        block.slab().copy_in(block.offset, piece);
        let bytes = piece.len() as u64;
        self.count_to(bytes);
        self.send(&[part(buffer, offset, bytes, Access::Overwrite)], |spans| {
            let job = Job::Write { from_offset: block.offset, to_address: spans[0].address, bytes };
            Ok(vec![Order::new(job, &[], Some(Keep::Block(block)))])
        })
    }

    /// Copies a few bytes, at most [`Stream::SMALL_BYTES_MAX`], without waiting: they travel with the job.
    pub fn write_small(&self, buffer: Handle, offset: u64, bytes: &[u8]) -> Result<Completion, DeviceError> {
        if bytes.len() > PAYLOAD_BYTES_MAX {
            let why = format!("{} bytes at once; {PAYLOAD_BYTES_MAX} are possible", bytes.len());
            return Err(DeviceError::BadLaunch { why });
        }
        self.write_inline(buffer, offset, bytes)
    }

    /// The most that [`Stream::write_small`] takes.
    pub const SMALL_BYTES_MAX: usize = PAYLOAD_BYTES_MAX;

    fn write_inline(&self, buffer: Handle, offset: u64, bytes: &[u8]) -> Result<Completion, DeviceError> {
        self.count_to(bytes.len() as u64);
        self.send(&[part(buffer, offset, bytes.len() as u64, Access::Overwrite)], |spans| {
            let job = Job::WriteInline { to_address: spans[0].address };
            Ok(vec![Order::new(job, bytes, None)])
        })
    }

    /// Copies a buffer to ordinary memory; done when it returns.
    pub async fn read(&self, buffer: Handle, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        if bytes.len() <= PAYLOAD_BYTES_MAX {
            let Completion(mut ticket) = self.read_inline(buffer, offset, bytes.len() as u64)?;
            let (link, cell) = (ticket.link().clone(), ticket.cell());
            return std::future::poll_fn(|cx| {
                ticket.poll_with(cx, |_| Cell(link.slab.cell(cell)).payload(bytes)).map(|answer| answer.map(drop))
            })
            .await;
        }
        self.check_range(buffer, offset, bytes.len())?;
        let bound = self.state.bound()?;
        // All that fit are under way at once; each is copied out as it comes.
        let mut pieces = bytes.chunks_mut(index(BLOCK_BYTES)).enumerate();
        let mut under_way = VecDeque::new();
        loop {
            let block = match (pieces.len(), under_way.is_empty()) {
                (0, _) => None,
                (_, true) => Some(bound.link.staging.block().await?),
                (_, false) => bound.link.staging.try_block(),
            };
            if let Some(block) = block
                && let Some((n, piece)) = pieces.next()
            {
                let sent = self.read_block(block, buffer, offset + n as u64 * BLOCK_BYTES, piece.len() as u64)?;
                under_way.push_back((sent, piece));
                continue;
            }
            let Some((Completion(mut ticket), piece)) = under_way.pop_front() else { return Ok(()) };
            std::future::poll_fn(|cx| ticket.poll_with(cx, |kept| copy_out(kept, piece))).await?;
        }
    }

    /// Begins to copy a buffer to ordinary memory, without waiting for anything: memory can be had for it meanwhile.
    /// None where that takes more than one block of staging, or where there is none.
    pub fn try_read(&self, buffer: Handle, offset: u64, bytes: usize) -> Result<Option<ReadUnderWay>, DeviceError> {
        if bytes <= PAYLOAD_BYTES_MAX {
            let Completion(ticket) = self.read_inline(buffer, offset, bytes as u64)?;
            return Ok(Some(ReadUnderWay { ticket, bytes }));
        }
        if bytes as u64 > BLOCK_BYTES {
            return Ok(None);
        }
        let Some(block) = self.state.bound()?.link.staging.try_block() else { return Ok(None) };
        let Completion(ticket) = self.read_block(block, buffer, offset, bytes as u64)?;
        Ok(Some(ReadUnderWay { ticket, bytes }))
    }

    /// [`Stream::read`] in this thread and, for large copies, some helpers.
    pub fn read_blocking(&self, buffer: Handle, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        if bytes.len() < PARALLEL_BYTES_MIN {
            return block_on(self.read(buffer, offset, bytes));
        }
        self.check_range(buffer, offset, bytes.len())?;
        let bound = self.state.bound()?;
        let size = piece_bytes(bytes.len());
        in_parallel(&bound.link.staging, bytes.chunks_mut(size).enumerate().collect(), |block, (n, piece)| {
            let sent = self.read_block(block, buffer, offset + (n * size) as u64, piece.len() as u64)?;
            Ok((sent, piece))
        })
    }

    fn read_block(&self, block: Block, buffer: Handle, offset: u64, bytes: u64) -> Result<Completion, DeviceError> {
        self.count_from(bytes);
        self.send(&[part(buffer, offset, bytes, Access::Read)], |spans| {
            let job = Job::Read { from_address: spans[0].address, to_offset: block.offset, bytes };
            Ok(vec![Order::new(job, &[], Some(Keep::Block(block)))])
        })
    }

    fn read_inline(&self, buffer: Handle, offset: u64, bytes: u64) -> Result<Completion, DeviceError> {
        self.count_from(bytes);
        self.send(&[part(buffer, offset, bytes, Access::Read)], |spans| {
            Ok(vec![Job::ReadInline { from_address: spans[0].address, bytes }.into()])
        })
    }

    fn check_range(&self, buffer: Handle, offset: u64, len: usize) -> Result<(), DeviceError> {
        self.state.bound()?;
        self.state.memory.lock().arena.peek(part(buffer, offset, len as u64, Access::Read)).map(drop)
    }

    /// Has a buffer zeroed that will be written in pieces: some of them may never come.
    fn zero_first(&self, buffer: Handle) -> Result<(), DeviceError> {
        let bound = self.state.bound()?;
        let mut memory = self.state.memory.lock();
        let whole = part(buffer, 0, memory.arena.size(buffer)?, Access::Update);
        let (orders, spans) = self.before(&bound, &memory, &[whole])?;
        if spans.iter().any(|span| span.zero_first.is_some()) {
            self.open(&bound, &mut memory)?;
            let ticket = self.send_orders(&bound, orders)?;
            memory.arena.touch(whole, ticket.as_use());
        }
        Ok(())
    }

    fn count_to(&self, bytes: u64) {
        self.device().0.metrics.bytes_to_device.inc_by(bytes);
    }

    fn count_from(&self, bytes: u64) {
        self.device().0.metrics.bytes_from_device.inc_by(bytes);
    }
}

/// A copy from a buffer that was begun. Dropping it does not stop the copy.
pub struct ReadUnderWay {
    ticket: Ticket,
    bytes: usize,
}

impl ReadUnderWay {
    /// Whether the copy is done, or never will be.
    pub fn is_over(&self) -> bool {
        self.ticket.is_over()
    }

    /// Polls for its end, once. What was read is then at the beginning of `all`.
    pub fn poll_to(&mut self, cx: &mut Context<'_>, all: &mut [u8]) -> Poll<Result<(), DeviceError>> {
        let (link, cell) = (self.ticket.link().clone(), self.ticket.cell());
        let all = match self.target(all) {
            Ok(all) => all,
            Err(error) => return Poll::Ready(Err(error)),
        };
        self.ticket.poll_with(cx, |kept| arrived(kept, &link, cell, all)).map(|answer| answer.map(drop))
    }

    /// Waits for its end, in this thread.
    pub fn finish(self, all: &mut [u8]) -> Result<(), DeviceError> {
        let (link, cell) = (self.ticket.link().clone(), self.ticket.cell());
        let all = self.target(all)?;
        self.ticket.wait(|kept| arrived(kept, &link, cell, all)).map(drop)
    }

    fn target<'a>(&self, all: &'a mut [u8]) -> Result<&'a mut [u8], DeviceError> {
        let room = all.len();
        all.get_mut(..self.bytes).ok_or_else(|| {
            let why = format!("{} bytes are read, and there is room for {room}", self.bytes);
            DeviceError::BadLaunch { why }
        })
    }
}

/// Copies out what has come through a block of staging, or with the job.
fn arrived(kept: Option<&Keep>, link: &Link, cell: u32, all: &mut [u8]) {
    match kept {
        Some(_) => copy_out(kept, all),
        None => Cell(link.slab.cell(cell)).payload(all),
    }
}

/// How large the pieces of a shared copy are: whole blocks where there are many.
fn piece_bytes(bytes: usize) -> usize {
    (bytes / (2 * COPY_THREADS_MAX)).next_multiple_of(PIECE_BYTES).min(index(BLOCK_BYTES))
}

fn part(handle: Handle, offset: u64, len: u64, access: Access) -> Part {
    Part { handle, offset, len, access }
}

fn copy_out(kept: Option<&Keep>, piece: &mut [u8]) {
    if let Some(Keep::Block(block)) = kept {
        block.slab().copy_out(block.offset, piece);
    }
}

/// Shares pieces of a copy between threads: each fills or empties a block and has it sent, keeping one more under way.
fn in_parallel<P: Send, R: Piece>(
    staging: &Arc<Staging>,
    pieces: Vec<P>,
    send: impl Fn(Block, P) -> Result<(Completion, R), DeviceError> + Sync,
) -> Result<(), DeviceError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = cores.min(COPY_THREADS_MAX).min(pieces.len());
    let left = Mutex::new(pieces.into_iter());
    let work = || {
        let mut under_way: VecDeque<(Completion, R)> = VecDeque::new();
        let finish = |(Completion(ticket), target): (Completion, R)| ticket.wait(|kept| target.arrived(kept)).map(drop);
        while let Some(piece) = { left.lock().next() } {
            // Own work first: blocks come back only when somebody sees that their copies are done.
            let block = loop {
                match (staging.try_block(), under_way.pop_front()) {
                    (Some(block), oldest) => {
                        oldest.into_iter().for_each(|oldest| under_way.push_front(oldest));
                        break block;
                    }
                    (None, Some(oldest)) => finish(oldest)?,
                    (None, None) => break block_on(staging.block())?,
                }
            };
            under_way.push_back(send(block, piece)?);
            if under_way.len() > 1 {
                under_way.pop_front().map_or(Ok(()), finish)?;
            }
        }
        under_way.into_iter().try_for_each(finish)
    };
    std::thread::scope(|scope| {
        // Without helpers it takes longer, no more.
        let helper = |_| std::thread::Builder::new().name("copy".to_owned()).spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (1..threads).map_while(helper).collect();
        let own = work();
        let lost = || DeviceError::Refused { why: "a copying thread panicked".to_owned() };
        helpers.into_iter().map(|h| h.join().unwrap_or_else(|_| Err(lost()))).fold(own, Result::and)
    })
}

/// What becomes of a piece once it is through.
trait Piece: Send {
    fn arrived(self, kept: Option<&Keep>);
}

impl Piece for () {
    fn arrived(self, _kept: Option<&Keep>) {}
}

impl Piece for &mut [u8] {
    fn arrived(self, kept: Option<&Keep>) {
        copy_out(kept, self);
    }
}

/// Runs a future in this thread, which sleeps while there is nothing to do: for callers without a runtime.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut cx = Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}
