//! Jobs: the one way to ask a device for anything. A closed enum of plain data, written into a cell of the slab as
//! words.
//!
//! A worker trusts the addresses in a job (the server checked them against the tenant's buffers before sending it) but
//! not its shape: a cell that holds no job is refused.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::DeviceError;
use crate::slab::{ANSWER_WORDS, CELL_WORDS, JOB_WORDS, PAYLOAD_BYTES_MAX, TEXT_BYTES_MAX};

/// A field of a job as words of a cell.
trait Field: Sized {
    const WORDS: usize;

    fn put(self, words: &mut [u64]);

    /// `None` for words that no value of this type is written as.
    fn get(words: &[u64]) -> Option<Self>;

    /// A value whose every byte matters, for tests.
    #[cfg(test)]
    fn sample(seed: u64) -> Self;
}

macro_rules! number_field {
    ($type:ty) => {
        impl Field for $type {
            const WORDS: usize = 1;

            fn put(self, words: &mut [u64]) {
                words[0] = u64::from(self);
            }

            fn get(words: &[u64]) -> Option<$type> {
                <$type>::try_from(words[0]).ok()
            }

            #[cfg(test)]
            fn sample(seed: u64) -> $type {
                let [.., low] = seed.to_be_bytes();
                <$type>::MAX - <$type>::from(low)
            }
        }
    };
}

number_field!(u8);
number_field!(u32);
number_field!(u64);

impl Field for [u32; 3] {
    const WORDS: usize = 3;

    fn put(self, words: &mut [u64]) {
        words.iter_mut().zip(self).for_each(|(word, number)| *word = u64::from(number));
    }

    fn get(words: &[u64]) -> Option<[u32; 3]> {
        let at = |n: usize| u32::try_from(words[n]).ok();
        Some([at(0)?, at(1)?, at(2)?])
    }

    #[cfg(test)]
    fn sample(seed: u64) -> [u32; 3] {
        [0, 1, 2].map(|n| u32::sample(seed + n))
    }
}

/// The table of jobs. From it come the enum, how each is written into a cell and read from one, its name, and samples
/// of every job for the tests. A number is what a cell's first word says; 0 is no job.
macro_rules! jobs {
    ($($(#[$doc:meta])* $number:literal $name:ident $({ $($field:ident: $type:ty),+ $(,)? })?;)+) => {
        /// What a worker is asked to do. Addresses are the device's, offsets are the slab's.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Job {
            $($(#[$doc])* $name $({ $($field: $type),+ })?,)+
        }

        $(const _: () = assert!($number > 0 && HEAD_WORDS $($(+ <$type as Field>::WORDS)+)? <= JOB_WORDS);)+

        impl Job {
            /// For messages and logs.
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $(Job::$name $({ $($field: _),+ })? => stringify!($name),)+
                }
            }

            fn to_words(self) -> [u64; JOB_WORDS] {
                let mut words = [0; JOB_WORDS];
                match self {
                    $(Job::$name $({ $($field),+ })? => {
                        words[0] = $number;
                        $(
                            let rest = &mut words[HEAD_WORDS..];
                            $(let rest = put_field(rest, $field);)+
                            let _ = rest;
                        )?
                    })+
                }
                words
            }

            fn from_words(words: &[u64; JOB_WORDS]) -> Option<Job> {
                match words[0] {
                    $($number => {
                        $(
                            let rest = &words[HEAD_WORDS..];
                            $(let ($field, rest) = get_field::<$type>(rest)?;)+
                            let _ = rest;
                        )?
                        Some(Job::$name $({ $($field),+ })?)
                    })+
                    _ => None,
                }
            }

            /// One of each.
            #[cfg(test)]
            fn samples(seed: u64) -> Vec<Job> {
                vec![$(Job::$name $({ $($field: <$type>::sample(seed + stringify!($field).len() as u64)),+ })?),+]
            }
        }
    };
}

fn put_field<F: Field>(words: &mut [u64], field: F) -> &mut [u64] {
    let (own, rest) = words.split_at_mut(F::WORDS);
    field.put(own);
    rest
}

fn get_field<F: Field>(words: &[u64]) -> Option<(F, &[u64])> {
    let (own, rest) = words.split_at(F::WORDS);
    Some((F::get(own)?, rest))
}

jobs! {
    /// Makes a stream and a memory pool with a true cap. Stream 0, the control stream, exists always.
    1 OpenStream { stream: u32, memory_bytes_max: u64, sm_count: u32 };
    /// Forgets a stream on which everything is done.
    2 CloseStream { stream: u32 };
    /// On a stream: gives back its memory and forgets its graphs. On a lane: unloads its modules.
    3 Clear;
    /// Takes memory from the stream's pool. Answers with its address.
    4 Reserve { stream: u32, bytes: u64 };
    5 Release { stream: u32, address: u64, bytes: u64 };
    6 Fill { address: u64, bytes: u64, value: u8 };
    7 Write { from_offset: u64, to_address: u64, bytes: u64 };
    8 Read { from_address: u64, to_offset: u64, bytes: u64 };
    /// The payload is what is written.
    9 WriteInline { to_address: u64 };
    /// What is read becomes the payload.
    10 ReadInline { from_address: u64, bytes: u64 };
    11 Copy { from_address: u64, to_address: u64, bytes: u64 };
    /// Copies a module out of the slab, for a lane. Answers with the image's number. Quick, so that staging is soon
    /// free.
    12 Upload { lane: u32, offset: u64, bytes: u64 };
    /// Loads an image, which is forgotten with this. Answers with the module's number. Modules and kernels are the
    /// business of a tenant's lane, not of its stream: compiling takes long.
    13 Load { image: u32 };
    14 ForgetImage { image: u32 };
    15 Unload { module: u32 };
    /// Finds a kernel; its name is the payload. Answers with its number and limits; the payload becomes the offset and
    /// size of each parameter, as pairs of u32.
    16 Kernel { module: u32 };
    /// The payload is the parameter block.
    17 Launch { kernel: u32, grid: [u32; 3], block: [u32; 3], shared_bytes: u32 };
    /// The stream's next jobs are recorded, not run, until `GraphEnd`, which answers with the graph's number.
    18 GraphBegin;
    19 GraphEnd;
    20 Replay { graph: u32 };
    21 ForgetGraph { graph: u32 };
    /// Makes one more stream for the tenant whose first stream is `owner`: with its multiprocessors, memory and
    /// modules.
    22 OpenMore { stream: u32, owner: u32 };
    /// What comes next on this job's stream begins after everything that was sent to another stream of the tenant
    /// before.
    23 Await { stream: u32 };
    /// Makes a stream for one resident kernel of the tenant whose first stream is `owner`; `words` are its words in the
    /// slab.
    24 OpenResident { stream: u32, owner: u32, words: u32 };
    /// While recording: the next step begins after some of those before and beside the others. The payload is their
    /// numbers, as u16; the first step is 0. Steps without this come after the one before.
    25 GraphAfter;
}

/// What a worker answers to a job that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Answer {
    pub values: [u64; 6],
}

impl Answer {
    /// An answer of one value.
    pub(crate) fn of(value: impl Into<u64>) -> Answer {
        Answer { values: [value.into(), 0, 0, 0, 0, 0] }
    }
}

/// Before a job's own fields: its kind, its stream and number, the length of its payload.
const HEAD_WORDS: usize = 4;

/// Before an answer's text: its code, the text's length, and six values.
const ANSWER_HEAD_WORDS: usize = 8;

/// A job as it lies in a cell.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SentJob {
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

    pub(crate) fn get(&self) -> Option<SentJob> {
        let words: [u64; JOB_WORDS] = std::array::from_fn(|n| self.0[n].load(Ordering::Relaxed));
        let payload_bytes = usize::try_from(words[3] & !MORE).ok().filter(|n| *n <= PAYLOAD_BYTES_MAX)?;
        let stream = usize::try_from(words[1]).ok().filter(|n| *n < crate::slab::STREAMS)?;
        let (job, number) = (Job::from_words(&words)?, u32::try_from(words[2]).ok()?);
        Some(SentJob { job, stream, number, payload_bytes, is_last: words[3] & MORE == 0 })
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
        for job in (0..3).flat_map(Job::samples) {
            let payload: Vec<u8> = (0..=u8::MAX).cycle().take(PAYLOAD_BYTES_MAX - 3).collect();
            for is_last in [true, false] {
                cell.put(job, 5, u32::MAX, &payload, is_last);
                let sent = SentJob { job, stream: 5, number: u32::MAX, payload_bytes: payload.len(), is_last };
                assert_eq!(cell.get(), Some(sent));
            }
            let mut seen = vec![0; payload.len()];
            cell.payload(&mut seen);
            assert_eq!(seen, payload);
        }
    }

    /// Whatever a worker reads as a job is written as the same words: no number is cut, and none is read twice.
    #[test]
    fn hostile_words_are_refused_or_read_as_they_stand() {
        let mut refused = 0;
        for job in Job::samples(0) {
            assert!(job.name().starts_with(char::is_uppercase), "{}", job.name());
            let words = job.to_words();
            for at in HEAD_WORDS..JOB_WORDS {
                for hostile in [u64::MAX, 1 << 32, 1 << 8, 1 << 63] {
                    let mut words = words;
                    words[at] = hostile;
                    let Some(read) = Job::from_words(&words) else {
                        refused += 1;
                        continue;
                    };
                    assert!(read == job || read.to_words() == words, "{} at {at}: {read:?}", job.name());
                }
            }
        }
        assert!(refused > 50, "{refused}");
        let kinds = Job::samples(0).len() as u64;
        for kind in [0].into_iter().chain(kinds + 1..kinds + 300).chain([u64::MAX, 1 << 32 | 1]) {
            let mut words = [0; JOB_WORDS];
            words[0] = kind;
            assert_eq!(Job::from_words(&words), None, "kind {kind}");
        }
    }

    #[test]
    fn a_cell_without_a_job_is_refused() {
        let words = cell();
        let cell = Cell(&words);
        assert_eq!(cell.get(), None);
        for (at, hostile) in [
            (0, 99),
            (1, crate::slab::STREAMS as u64),
            (1, u64::MAX),
            (2, 1 << 32),
            (3, PAYLOAD_BYTES_MAX as u64 + 1),
            (3, !MORE),
        ] {
            cell.put(Job::GraphBegin, 0, 0, &[], true);
            assert!(cell.get().is_some());
            words[at].store(hostile, Ordering::Relaxed);
            assert_eq!(cell.get(), None, "word {at} is {hostile}");
        }
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
