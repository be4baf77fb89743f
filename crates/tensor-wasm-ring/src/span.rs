//! An executor's span of the region, as words: who has the words sees the parts that `layout.rs` says are there.
//!
//! Everything in it is read and written as atomic words, so what is wrong there is a wrong number, never more.

use std::mem::offset_of;

use tensor_wasm_gpu::{Bell, SharedWords};

use crate::layout::{ControlBlock, ExecutorHeader, SLOT_BYTES, Shape, TelemetryBlock};
use crate::ring::Slots;
use crate::sync::{AtomicU64, Ordering};

const HEADER_WORDS: usize = size_of::<ExecutorHeader>() / 8;
const CONTROL_WORDS: usize = size_of::<ControlBlock>() / 8;
const TELEMETRY_WORDS: usize = size_of::<TelemetryBlock>() / 8;

/// A span, and what shape it has.
#[derive(Clone)]
pub(crate) struct Span {
    words: SharedWords,
    pub shape: Shape,
}

/// A lane's control block.
#[derive(Clone)]
pub(crate) struct Control(SharedWords);

/// An actor's telemetry block.
#[derive(Clone)]
pub(crate) struct Telemetry(SharedWords);

fn at(offset: u64) -> usize {
    usize::try_from(offset / 8).unwrap_or(usize::MAX)
}

impl Span {
    /// Makes a span of words that nobody uses: what was there is zeroed.
    pub(crate) fn create(words: SharedWords, shape: Shape) -> Option<Span> {
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        let header: [u64; HEADER_WORDS] = zerocopy::transmute!(shape.header());
        words.iter().zip(header).for_each(|(word, value)| word.store(value, Ordering::Release));
        (words.len() as u64 * 8 >= shape.span_bytes()).then_some(Span { words, shape })
    }

    /// Finds the span that a host has made.
    pub(crate) fn open(words: SharedWords) -> Result<Span, String> {
        let mut header = [0; HEADER_WORDS];
        let there = words.get(..HEADER_WORDS).ok_or("there is no room for a header")?;
        header.iter_mut().zip(there).for_each(|(value, word)| *value = word.load(Ordering::Acquire));
        let shape = Shape::read(&zerocopy::transmute!(header), words.len() as u64 * 8)?;
        Ok(Span { words, shape })
    }

    fn part(&self, offset: u64, words: usize) -> Option<SharedWords> {
        self.words.part(at(offset), words)
    }

    pub(crate) fn control(&self, lane: u32) -> Option<Control> {
        self.part(self.shape.control_at(lane), CONTROL_WORDS).map(Control)
    }

    pub(crate) fn mailbox(&self, lane: u32) -> Option<Slots<SharedWords>> {
        self.slots(self.shape.mailbox_at(lane), self.shape.mailbox_slots)
    }

    pub(crate) fn replies(&self, lane: u32) -> Option<Slots<SharedWords>> {
        self.slots(self.shape.replies_at(lane), self.shape.reply_slots)
    }

    fn slots(&self, offset: u64, slots: u32) -> Option<Slots<SharedWords>> {
        Slots::new(self.part(offset, slots as usize * SLOT_BYTES / 8)?)
    }

    /// All of it, for tests that do damage.
    #[cfg(test)]
    pub(crate) fn words(&self) -> &SharedWords {
        &self.words
    }

    pub(crate) fn telemetry(&self, actor: u32) -> Option<Telemetry> {
        self.part(self.shape.telemetry_at(actor), TELEMETRY_WORDS).map(Telemetry)
    }
}

impl Control {
    pub(crate) fn replies_taken(&self) -> &AtomicU64 {
        &self.0[offset_of!(ControlBlock, replies_taken) / 8]
    }

    pub(crate) fn bell(&self) -> Bell<'_> {
        Bell::of(&self.0[offset_of!(ControlBlock, bell) / 8])
    }

    pub(crate) fn mailbox_taken(&self) -> &AtomicU64 {
        &self.0[offset_of!(ControlBlock, mailbox_taken) / 8]
    }

    pub(crate) fn replies_written(&self) -> &AtomicU64 {
        &self.0[offset_of!(ControlBlock, replies_written) / 8]
    }

    pub(crate) fn beats(&self) -> &AtomicU64 {
        &self.0[offset_of!(ControlBlock, beats) / 8]
    }

    pub(crate) fn asleep(&self) -> &AtomicU64 {
        &self.0[offset_of!(ControlBlock, asleep) / 8]
    }

    pub(crate) fn torn(&self) -> &AtomicU64 {
        &self.0[offset_of!(ControlBlock, torn) / 8]
    }
}

impl Telemetry {
    /// Writes all of it. Whoever reads meanwhile sees some words older than others, never half a word.
    pub(crate) fn store(&self, block: &TelemetryBlock) {
        let values: [u64; TELEMETRY_WORDS] = zerocopy::transmute!(*block);
        // The state last: who sees it sees what led there.
        for (word, value) in self.0.iter().zip(values).rev() {
            word.store(value, Ordering::Release);
        }
    }

    pub(crate) fn load(&self) -> TelemetryBlock {
        let mut values = [0; TELEMETRY_WORDS];
        values.iter_mut().zip(self.0.iter()).for_each(|(value, word)| *value = word.load(Ordering::Acquire));
        zerocopy::transmute!(values)
    }

    /// The number of its state alone.
    pub(crate) fn state(&self) -> u32 {
        u32::try_from(self.0[0].load(Ordering::Acquire) & u64::from(u32::MAX)).unwrap_or(0)
    }
}

const _: () = assert!(offset_of!(TelemetryBlock, state) == 0);
