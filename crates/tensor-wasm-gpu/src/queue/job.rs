//! Jobs: the one way to ask a device for anything. A closed enum of plain data, written into a cell of the slab as words.
//!
//! A worker trusts the addresses in a job (the server checked them against the tenant's buffers before sending it) but
//! not its shape: a cell that holds no job is refused.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::DeviceError;
use crate::slab::{ANSWER_WORDS, CELL_WORDS, JOB_WORDS, PAYLOAD_BYTES_MAX, TEXT_BYTES_MAX};

/// What a worker is asked to do. Addresses are the device's, offsets are the slab's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Job {
    /// Makes a stream and a memory pool with a true cap. Stream 0, the control stream, exists always.
    OpenStream {
        stream: u32,
        memory_bytes_max: u64,
        sm_count: u32,
    },
    /// Forgets a stream on which everything is done.
    CloseStream {
        stream: u32,
    },
    /// On a stream: gives back its memory and forgets its graphs. On a lane: unloads its modules.
    Clear,
    /// Takes memory from the stream's pool. Answers with its address.
    Reserve {
        stream: u32,
        bytes: u64,
    },
    Release {
        stream: u32,
        address: u64,
        bytes: u64,
    },
    Fill {
        address: u64,
        bytes: u64,
        value: u8,
    },
    Write {
        from_offset: u64,
        to_address: u64,
        bytes: u64,
    },
    Read {
        from_address: u64,
        to_offset: u64,
        bytes: u64,
    },
    /// The payload is what is written.
    WriteInline {
        to_address: u64,
    },
    /// What is read becomes the payload.
    ReadInline {
        from_address: u64,
        bytes: u64,
    },
    Copy {
        from_address: u64,
        to_address: u64,
        bytes: u64,
    },
    /// Takes a copy of a module in the slab, for a lane. Answers with the image's number. Quick, so that staging is soon free.
    Upload {
        lane: u32,
        offset: u64,
        bytes: u64,
    },
    /// Loads an image, which is forgotten with this. Answers with the module's number. Modules and kernels are the business of
    /// a tenant's lane, not of its stream: compiling takes long.
    Load {
        image: u32,
    },
    ForgetImage {
        image: u32,
    },
    Unload {
        module: u32,
    },
    /// Finds a kernel; its name is the payload. Answers with its number and limits; the payload becomes the offset and size of
    /// each parameter, as pairs of u32.
    Kernel {
        module: u32,
    },
    /// The payload is the parameter block.
    Launch {
        kernel: u32,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
    },
    /// The stream's next jobs are recorded, not run, until `GraphEnd`, which answers with the graph's number.
    GraphBegin,
    GraphEnd,
    Replay {
        graph: u32,
    },
    ForgetGraph {
        graph: u32,
    },
}

/// What a worker answers to a job that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Answer {
    pub values: [u64; 6],
}

impl Job {
    fn to_words(self) -> [u64; JOB_WORDS] {
        let mut words = [0; JOB_WORDS];
        let fields: (u64, &[u64]) = match self {
            Job::OpenStream { stream, memory_bytes_max, sm_count } => {
                (1, &[u64::from(stream), memory_bytes_max, u64::from(sm_count)])
            }
            Job::CloseStream { stream } => (2, &[u64::from(stream)]),
            Job::Reserve { stream, bytes } => (3, &[u64::from(stream), bytes]),
            Job::Release { stream, address, bytes } => (4, &[u64::from(stream), address, bytes]),
            Job::Fill { address, bytes, value } => (5, &[address, bytes, u64::from(value)]),
            Job::Write { from_offset, to_address, bytes } => (6, &[from_offset, to_address, bytes]),
            Job::Read { from_address, to_offset, bytes } => (7, &[from_address, to_offset, bytes]),
            Job::Copy { from_address, to_address, bytes } => (8, &[from_address, to_address, bytes]),
            Job::Load { image } => (9, &[u64::from(image)]),
            Job::Upload { lane, offset, bytes } => (20, &[u64::from(lane), offset, bytes]),
            Job::ForgetImage { image } => (21, &[u64::from(image)]),
            Job::Unload { module } => (10, &[u64::from(module)]),
            Job::Kernel { module } => (11, &[u64::from(module)]),
            Job::Launch { kernel, grid, block, shared_bytes } => {
                let three = |v: [u32; 3]| v.map(u64::from);
                let ([gx, gy, gz], [bx, by, bz]) = (three(grid), three(block));
                (12, &[u64::from(kernel), gx, gy, gz, bx, by, bz, u64::from(shared_bytes)])
            }
            Job::GraphBegin => (13, &[]),
            Job::GraphEnd => (14, &[]),
            Job::Replay { graph } => (15, &[u64::from(graph)]),
            Job::ForgetGraph { graph } => (16, &[u64::from(graph)]),
            Job::WriteInline { to_address } => (17, &[to_address]),
            Job::ReadInline { from_address, bytes } => (18, &[from_address, bytes]),
            Job::Clear => (19, &[]),
        };
        words[0] = fields.0;
        words[HEAD_WORDS..HEAD_WORDS + fields.1.len()].copy_from_slice(fields.1);
        words
    }

    fn from_words(words: &[u64; JOB_WORDS]) -> Option<Job> {
        let at = |n: usize| words[HEAD_WORDS + n];
        let half = |n: usize| u32::try_from(at(n)).ok();
        Some(match words[0] {
            1 => Job::OpenStream { stream: half(0)?, memory_bytes_max: at(1), sm_count: half(2)? },
            2 => Job::CloseStream { stream: half(0)? },
            3 => Job::Reserve { stream: half(0)?, bytes: at(1) },
            4 => Job::Release { stream: half(0)?, address: at(1), bytes: at(2) },
            5 => Job::Fill { address: at(0), bytes: at(1), value: u8::try_from(at(2)).ok()? },
            6 => Job::Write { from_offset: at(0), to_address: at(1), bytes: at(2) },
            7 => Job::Read { from_address: at(0), to_offset: at(1), bytes: at(2) },
            8 => Job::Copy { from_address: at(0), to_address: at(1), bytes: at(2) },
            9 => Job::Load { image: half(0)? },
            10 => Job::Unload { module: half(0)? },
            11 => Job::Kernel { module: half(0)? },
            12 => Job::Launch {
                kernel: half(0)?,
                grid: [half(1)?, half(2)?, half(3)?],
                block: [half(4)?, half(5)?, half(6)?],
                shared_bytes: half(7)?,
            },
            13 => Job::GraphBegin,
            14 => Job::GraphEnd,
            15 => Job::Replay { graph: half(0)? },
            16 => Job::ForgetGraph { graph: half(0)? },
            17 => Job::WriteInline { to_address: at(0) },
            18 => Job::ReadInline { from_address: at(0), bytes: at(1) },
            19 => Job::Clear,
            20 => Job::Upload { lane: half(0)?, offset: at(1), bytes: at(2) },
            21 => Job::ForgetImage { image: half(0)? },
            _ => return None,
        })
    }
}

/// Before a job's own fields: its kind, its stream and number, the length of its payload.
const HEAD_WORDS: usize = 4;
const _: () = assert!(HEAD_WORDS + 8 <= JOB_WORDS);

/// Before an answer's text: its code, the text's length, and six values.
const ANSWER_HEAD_WORDS: usize = 8;

/// A job as it lies in a cell.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    pub job: Job,
    pub stream: usize,
    /// Counts the jobs of its stream; the stream's flag shows the last one that is done.
    pub number: u32,
    pub payload_bytes: usize,
    /// The last of the jobs that were sent together. The others' answers are not looked at.
    pub is_last: bool,
}

/// Beside the length of the payload: more jobs follow that were sent together with this one.
const MORE: u64 = 1 << 63;

/// A cell of the slab, seen as a job and its answer.
pub(crate) struct Cell<'a>(pub &'a [AtomicU64]);

impl Cell<'_> {
    pub(crate) fn put(&self, job: Job, stream: usize, number: u32, payload: &[u8], is_last: bool) {
        debug_assert!(payload.len() <= PAYLOAD_BYTES_MAX && self.0.len() == CELL_WORDS);
        let mut words = job.to_words();
        words[1] = stream as u64;
        words[2] = u64::from(number);
        words[3] = payload.len() as u64 | if is_last { 0 } else { MORE };
        for (cell, word) in self.0.iter().zip(words) {
            cell.store(word, Ordering::Relaxed);
        }
        put_bytes(&self.0[JOB_WORDS..], payload);
        self.0[CELL_WORDS - ANSWER_WORDS..][..ANSWER_HEAD_WORDS]
            .iter()
            .for_each(|word| word.store(0, Ordering::Relaxed));
    }

    pub(crate) fn get(&self) -> Option<Sent> {
        let words: [u64; JOB_WORDS] = std::array::from_fn(|n| self.0[n].load(Ordering::Relaxed));
        let payload_bytes = usize::try_from(words[3] & !MORE).ok().filter(|n| *n <= PAYLOAD_BYTES_MAX)?;
        let stream = usize::try_from(words[1]).ok().filter(|n| *n < crate::slab::STREAMS)?;
        let (job, number) = (Job::from_words(&words)?, u32::try_from(words[2]).ok()?);
        Some(Sent { job, stream, number, payload_bytes, is_last: words[3] & MORE == 0 })
    }

    /// Replaces the payload, as part of an answer.
    pub(crate) fn put_payload(&self, bytes: &[u8]) {
        put_bytes(&self.0[JOB_WORDS..CELL_WORDS - ANSWER_WORDS], bytes);
    }

    pub(crate) fn payload(&self, bytes: &mut [u8]) {
        get_bytes(&self.0[JOB_WORDS..], bytes);
    }

    pub(crate) fn answer(&self, answer: &Result<Answer, DeviceError>) {
        let words = &self.0[CELL_WORDS - ANSWER_WORDS..];
        match answer {
            Ok(answer) => {
                words[0].store(0, Ordering::Relaxed);
                words[2..].iter().zip(answer.values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
            }
            Err(error) => {
                let (code, number, text) = error.to_wire();
                let mut end = text.len().min(TEXT_BYTES_MAX);
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                words[0].store(code, Ordering::Relaxed);
                words[1].store(end as u64, Ordering::Relaxed);
                words[2].store(number, Ordering::Relaxed);
                put_bytes(&words[ANSWER_HEAD_WORDS..], &text.as_bytes()[..end]);
            }
        }
    }

    pub(crate) fn answered(&self) -> Result<Answer, DeviceError> {
        let words = &self.0[CELL_WORDS - ANSWER_WORDS..];
        let code = words[0].load(Ordering::Relaxed);
        if code == 0 {
            return Ok(Answer { values: std::array::from_fn(|n| words[2 + n].load(Ordering::Relaxed)) });
        }
        let len = usize::try_from(words[1].load(Ordering::Relaxed)).unwrap_or(0).min(TEXT_BYTES_MAX);
        let mut text = vec![0; len];
        get_bytes(&words[ANSWER_HEAD_WORDS..], &mut text);
        let text = String::from_utf8_lossy(&text).into_owned();
        let error = DeviceError::from_wire(code, words[2].load(Ordering::Relaxed), text);
        Err(error.unwrap_or(DeviceError::Refused { why: "an error without a reason".to_owned() }))
    }
}

fn put_bytes(words: &[AtomicU64], bytes: &[u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks(8)) {
        let mut whole = [0; 8];
        whole[..chunk.len()].copy_from_slice(chunk);
        word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
    }
}

fn get_bytes(words: &[AtomicU64], bytes: &mut [u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks_mut(8)) {
        let whole = word.load(Ordering::Relaxed).to_le_bytes();
        chunk.copy_from_slice(&whole[..chunk.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell() -> Vec<AtomicU64> {
        (0..CELL_WORDS).map(|_| AtomicU64::new(0xdead)).collect()
    }

    #[test]
    fn every_job_survives_its_cell() {
        let words = cell();
        let cell = Cell(&words);
        for job in [
            Job::OpenStream { stream: 3, memory_bytes_max: u64::MAX, sm_count: 8 },
            Job::CloseStream { stream: 3 },
            Job::Reserve { stream: 3, bytes: 1 << 40 },
            Job::Release { stream: 3, address: 1 << 63, bytes: 1 << 40 },
            Job::Fill { address: 1, bytes: 2, value: 255 },
            Job::Write { from_offset: 1, to_address: 2, bytes: 3 },
            Job::Read { from_address: 1, to_offset: 2, bytes: 3 },
            Job::Copy { from_address: 1, to_address: 2, bytes: 3 },
            Job::Upload { lane: 513, offset: 1, bytes: 2 },
            Job::Load { image: 1 },
            Job::ForgetImage { image: 1 },
            Job::Unload { module: 1 },
            Job::Kernel { module: 1 },
            Job::Launch { kernel: 9, grid: [1, 2, 3], block: [4, 5, u32::MAX], shared_bytes: 7 },
            Job::GraphBegin,
            Job::GraphEnd,
            Job::Replay { graph: 5 },
            Job::ForgetGraph { graph: 5 },
            Job::WriteInline { to_address: 5 },
            Job::ReadInline { from_address: 5, bytes: 6 },
            Job::Clear,
        ] {
            let payload: Vec<u8> = (0..PAYLOAD_BYTES_MAX - 3).map(|n| n as u8).collect();
            for is_last in [true, false] {
                cell.put(job, 5, u32::MAX, &payload, is_last);
                let sent = Sent { job, stream: 5, number: u32::MAX, payload_bytes: payload.len(), is_last };
                assert_eq!(cell.get(), Some(sent));
            }
            let mut seen = vec![0; payload.len()];
            cell.payload(&mut seen);
            assert_eq!(seen, payload);
        }
    }

    #[test]
    fn a_cell_without_a_job_is_refused() {
        let words = cell();
        let cell = Cell(&words);
        assert_eq!(cell.get(), None);
        cell.put(Job::GraphBegin, 0, 0, &[], true);
        words[0].store(99, Ordering::Relaxed);
        assert_eq!(cell.get(), None, "kind");
        cell.put(Job::Unload { module: 1 }, 0, 0, &[], true);
        words[HEAD_WORDS].store(1 << 32, Ordering::Relaxed);
        assert_eq!(cell.get(), None, "field");
        cell.put(Job::GraphBegin, 0, 0, &[], true);
        words[3].store(PAYLOAD_BYTES_MAX as u64 + 1, Ordering::Relaxed);
        assert_eq!(cell.get(), None, "payload");
        cell.put(Job::GraphBegin, 0, 0, &[], true);
        words[1].store(crate::slab::STREAMS as u64, Ordering::Relaxed);
        assert_eq!(cell.get(), None, "stream");
    }

    #[test]
    fn answers_and_errors_come_back() {
        let words = cell();
        let cell = Cell(&words);
        let answer = Answer { values: [1, 2, 3, 4, 5, u64::MAX] };
        cell.answer(&Ok(answer));
        assert_eq!(cell.answered(), Ok(answer));
        let long = "ü".repeat(TEXT_BYTES_MAX);
        cell.answer(&Err(DeviceError::BadModule { why: long }));
        let Err(DeviceError::BadModule { why }) = cell.answered() else { panic!("a bad module") };
        assert_eq!(why, "ü".repeat(TEXT_BYTES_MAX / 2));
        words[CELL_WORDS - ANSWER_WORDS + 1].store(u64::MAX, Ordering::Relaxed);
        assert!(matches!(cell.answered(), Err(DeviceError::BadModule { .. })), "a lying length is cut");
    }
}
