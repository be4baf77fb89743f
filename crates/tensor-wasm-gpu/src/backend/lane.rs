//! A tenant's lane: the thread on which its modules are loaded, which may take seconds. Nobody else's launches, and
//! nobody else's modules, wait for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};

use super::modules::{ModuleLoader, Modules};
use crate::error::DeviceError;
use crate::queue::job::{Answer, Cell, SentJob};
use crate::slab::Slab;

/// The lanes of a device that have a thread, by their numbers. A lane gets one with its first job.
pub(super) struct Lanes(HashMap<usize, Lane>);

impl Lanes {
    pub(super) fn new() -> Lanes {
        Lanes(HashMap::new())
    }

    /// Has a job done on its lane, which answers it and sets its flag.
    pub(super) fn hand<L: ModuleLoader>(
        &mut self,
        modules: &Arc<Modules<L>>,
        slab: &Arc<Slab>,
        sent: SentJob,
        payload: &[u8],
        cell: u32,
    ) {
        let lane = self.0.entry(sent.stream).or_insert_with(|| Lane::start(sent.stream, modules, slab));
        lane.hand(slab, LaneJob { sent, payload: payload.to_vec(), cell });
    }

    /// Its thread ends once what it was handed is done; nobody waits for that.
    pub(super) fn close(&mut self, lane: usize) {
        self.0.remove(&lane);
    }

    pub(super) fn close_all(&mut self) {
        self.0.clear();
    }
}

struct Lane {
    number: usize,
    /// None where no thread could be started.
    jobs: Option<Sender<LaneJob>>,
}

struct LaneJob {
    sent: SentJob,
    payload: Vec<u8>,
    cell: u32,
}

impl Lane {
    fn start<L: ModuleLoader>(number: usize, modules: &Arc<Modules<L>>, slab: &Arc<Slab>) -> Lane {
        let (sender, jobs) = channel::<LaneJob>();
        let (modules, slab) = (modules.clone(), slab.clone());
        let run = move || {
            let entered = modules.loader().enter();
            for LaneJob { sent, payload, cell } in jobs {
                let execute =
                    || entered.clone().and_then(|()| modules.execute(number, &slab, sent.job, &payload, cell));
                // A compiler that panics on somebody's module is no reason for the lane to end: nobody would answer.
                let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(execute)).unwrap_or_else(|_| {
                    Err(DeviceError::BadModule { why: "the device's compiler panicked on it".to_owned() })
                });
                if let Err(error @ DeviceError::DeviceLost { .. }) = &answer {
                    return crate::worker::lost(&slab, error);
                }
                finish(&slab, &sent, cell, &answer);
            }
        };
        let spawned = std::thread::Builder::new().name(format!("lane-{number}")).spawn(run);
        Lane { number, jobs: spawned.is_ok().then_some(sender) }
    }

    fn hand(&self, slab: &Slab, job: LaneJob) {
        let refused = match &self.jobs {
            Some(jobs) => jobs.send(job).err().map(|refused| refused.0),
            None => Some(job),
        };
        if let Some(LaneJob { sent, cell, .. }) = refused {
            let why = match self.jobs {
                Some(_) => format!("lane {} ended with the device it loads for", self.number),
                None => format!("no thread can be started for lane {}", self.number),
            };
            finish(slab, &sent, cell, &Err(DeviceError::Refused { why }));
        }
    }
}

/// Answers a job of a lane, and says that it is done.
fn finish(slab: &Slab, sent: &SentJob, cell: u32, answer: &Result<Answer, DeviceError>) {
    Cell(slab.cell(cell)).answer(answer);
    slab.flag(sent.stream).store(sent.number, Ordering::Release);
    slab.done_bell().ring();
}
