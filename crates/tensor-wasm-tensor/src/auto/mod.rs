//! The device `auto`: each plan runs where it should be done first. What it should take is estimated from its bytes and
//! operations (`cost.rs`) with the speeds of this machine, measured once in each process (`measure.rs`), and then
//! replaced by what it did take (`history.rs`). What a plan reads has to be where it runs, so copies count.
//!
//! Speeds are of a process and not of a file: they depend on how many threads are used, on the library and on the
//! driver, and measuring them takes a part of what opening the GPU takes. Neither is done before there is enough to
//! compute that it can pay.

pub(crate) mod cost;
pub(crate) mod history;
mod measure;
mod place;
#[cfg(test)]
mod tests;

pub(crate) use place::{execute, explain};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Processor {
    Cpu,
    Gpu,
}

impl Processor {
    fn other(self) -> Processor {
        match self {
            Processor::Cpu => Processor::Gpu,
            Processor::Gpu => Processor::Cpu,
        }
    }
}

/// Both processors of the machine, and the way between them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Machine {
    pub cpu: cost::Speeds,
    pub gpu: cost::Speeds,
    pub link: cost::Link,
}
