//! Numbers from one width to another. What does not fit becomes the largest number, which is no stream, cell or offset
//! of anything, and so is refused where it is used: never a smaller number that is somebody else's.

/// As a word of the slab has it: a stream, a cell, a count of jobs.
pub(crate) fn half(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// As an index into memory of this process.
pub(crate) fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
