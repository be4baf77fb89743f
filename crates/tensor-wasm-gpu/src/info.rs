//! What a device is, as the worker writes it into the slab and the server reads it.

use std::sync::atomic::{AtomicU64, Ordering};

pub use crate::choice::DeviceKind;
use crate::choice::Unavailable;
use crate::slab::{INFO_WORDS, Slab};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `cpu` or `cuda`.
    pub kind: DeviceKind,
    pub name: String,
    /// Streaming multiprocessors, or CPU cores.
    pub multiprocessors: u32,
    pub memory_total_bytes: u64,
    pub memory_free_bytes: u64,
    /// Major and minor compute capability; zero on a CPU.
    pub compute_capability: (u32, u32),
    /// Version of the CUDA the driver is for, as 1000 × major + 10 × minor; zero on a CPU.
    pub driver_version: u32,
    pub threads_per_block_max: u32,
    /// Threads of a block, and blocks of a grid, in each direction.
    pub block_max: [u32; 3],
    pub grid_max: [u32; 3],
    pub shared_bytes_per_block_max: u32,
    /// The slab's address on the device; zero where the device does not see it.
    pub slab_address: u64,
}

const NUMBERS: usize = 16;
const NAME_AT: usize = NUMBERS;
const NAME_BYTES_MAX: usize = 128;
const REASON_AT: usize = NAME_AT + 1 + NAME_BYTES_MAX / 8;
const REASON_BYTES_MAX: usize = 512;
const _: () = assert!(REASON_AT + 1 + REASON_BYTES_MAX / 8 <= INFO_WORDS);

pub(crate) fn put(slab: &Slab, info: &DeviceInfo) {
    let words = slab.info();
    let ([block_x, block_y, block_z], [grid_x, grid_y, grid_z]) =
        (info.block_max.map(u64::from), info.grid_max.map(u64::from));
    let numbers: [u64; NUMBERS] = [
        info.kind.number(),
        u64::from(info.multiprocessors),
        info.memory_total_bytes,
        info.memory_free_bytes,
        u64::from(info.compute_capability.0),
        u64::from(info.compute_capability.1),
        u64::from(info.driver_version),
        u64::from(info.threads_per_block_max),
        u64::from(info.shared_bytes_per_block_max),
        info.slab_address,
        block_x,
        block_y,
        block_z,
        grid_x,
        grid_y,
        grid_z,
    ];
    words.iter().zip(numbers).for_each(|(word, number)| word.store(number, Ordering::Relaxed));
    put_text(&words[NAME_AT..], &info.name, NAME_BYTES_MAX);
}

pub(crate) fn get(slab: &Slab) -> DeviceInfo {
    let words = slab.info();
    let at = |n: usize| words[n].load(Ordering::Relaxed);
    let half = |n: usize| u32::try_from(at(n)).unwrap_or(u32::MAX);
    DeviceInfo {
        kind: DeviceKind::from_number(at(0)).unwrap_or_default(),
        name: get_text(&words[NAME_AT..], NAME_BYTES_MAX),
        multiprocessors: half(1),
        memory_total_bytes: at(2),
        memory_free_bytes: at(3),
        compute_capability: (half(4), half(5)),
        driver_version: half(6),
        threads_per_block_max: half(7),
        shared_bytes_per_block_max: half(8),
        slab_address: at(9),
        block_max: [half(10), half(11), half(12)],
        grid_max: [half(13), half(14), half(15)],
    }
}

/// Why the worker gave up.
pub(crate) fn put_reason(slab: &Slab, why: &str) {
    put_text(&slab.info()[REASON_AT..], why, REASON_BYTES_MAX);
}

pub(crate) fn reason(slab: &Slab) -> String {
    get_text(&slab.info()[REASON_AT..], REASON_BYTES_MAX)
}

fn put_text(words: &[AtomicU64], text: &str, bytes_max: usize) {
    let bytes = &text.as_bytes()[..text.len().min(bytes_max)];
    words[0].store(bytes.len() as u64, Ordering::Relaxed);
    for (word, chunk) in words[1..].iter().zip(bytes.chunks(8)) {
        let mut whole = [0; 8];
        whole[..chunk.len()].copy_from_slice(chunk);
        word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
    }
}

fn get_text(words: &[AtomicU64], bytes_max: usize) -> String {
    let len = usize::try_from(words[0].load(Ordering::Relaxed)).unwrap_or(0).min(bytes_max);
    let bytes: Vec<u8> = words[1..].iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).take(len).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Why the device could not be opened, in a form that survives the slab.
pub(crate) fn put_unavailable(slab: &Slab, why: &Unavailable) {
    let (kind, text) = match why {
        Unavailable::NoDriver { why } => ("no-driver", why.clone()),
        Unavailable::DriverTooOld { found, needed } => ("too-old", format!("{found}\n{needed}")),
        Unavailable::NoDevice { why } => ("no-device", why.clone()),
        Unavailable::NoSuchDevice { index, count } => ("no-such-device", format!("{index}\n{count}")),
        Unavailable::DriverFailed { why } => ("failed", why.clone()),
        Unavailable::Worker { why } => ("worker", why.clone()),
        Unavailable::Memory { why } => ("memory", why.clone()),
    };
    put_reason(slab, &format!("{kind}\n{text}"));
}

pub(crate) fn unavailable(slab: &Slab) -> Unavailable {
    let text = reason(slab);
    let (kind, rest) = text.split_once('\n').unwrap_or(("worker", &text));
    let two = || rest.split_once('\n').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap_or_default();
    let why = rest.to_owned();
    match kind {
        "no-driver" => Unavailable::NoDriver { why },
        "too-old" => Unavailable::DriverTooOld { found: two().0, needed: two().1 },
        "no-device" => Unavailable::NoDevice { why },
        "no-such-device" => {
            let number = |text: String| text.parse().unwrap_or(0);
            Unavailable::NoSuchDevice { index: number(two().0), count: number(two().1) }
        }
        "failed" => Unavailable::DriverFailed { why },
        "memory" => Unavailable::Memory { why },
        _ => Unavailable::Worker { why },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::SlabPlan;

    #[test]
    fn what_a_worker_says_arrives() {
        let slab = Slab::create(&SlabPlan::default()).unwrap();
        let info = DeviceInfo {
            kind: DeviceKind::Cuda,
            name: "NVIDIA H200".to_owned(),
            multiprocessors: 132,
            memory_total_bytes: 1 << 37,
            memory_free_bytes: 1 << 36,
            compute_capability: (9, 0),
            driver_version: 13000,
            threads_per_block_max: 1024,
            block_max: [1024, 1023, 64],
            grid_max: [u32::MAX, 65_535, 65_534],
            shared_bytes_per_block_max: 232_448,
            slab_address: 0x7f00_0000_0000,
        };
        put(&slab, &info);
        assert_eq!(get(&slab), info);
        for why in [
            Unavailable::NoDriver { why: "libcuda.so.1: not found".to_owned() },
            Unavailable::DriverTooOld { found: "11.4".to_owned(), needed: "12.4".to_owned() },
            Unavailable::NoDevice { why: "no device".to_owned() },
            Unavailable::NoSuchDevice { index: 3, count: 1 },
            Unavailable::DriverFailed { why: "unknown error".to_owned() },
            Unavailable::Worker { why: "it ended".to_owned() },
            Unavailable::Memory { why: "none".to_owned() },
        ] {
            put_unavailable(&slab, &why);
            assert_eq!(unavailable(&slab), why);
        }
    }
}
