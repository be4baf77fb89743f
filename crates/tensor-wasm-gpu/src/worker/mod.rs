//! The worker: the one thread that owns a device. It takes jobs from the ring, has the backend do them, and lets the
//! backend write the stream's flag when they are done. In `serve` it is a process of its own and for library use a
//! thread; `keeper.rs` starts either.

pub(crate) mod exit;
mod flags;
pub(crate) mod host;
pub(crate) mod keeper;
pub(crate) mod lifeline;

use std::sync::atomic::Ordering;
use std::time::Duration;

use self::flags::{FlagStreams, Flags};
use crate::backend::Backend;
use crate::error::DeviceError;
use crate::queue::job::{Answer, Cell, Job};
use crate::queue::link::{FLAGGED, LOW, NOTIFY, PRIORITY, has_passed};
use crate::slab::{CELLS, PAYLOAD_BYTES_MAX, STREAMS, Slab, WorkerState, is_lane};
use crate::wait::SpinThenPark;

/// An entry of the ring that ends the worker.
pub(crate) const STOP: u32 = u32::MAX;

/// How many jobs ahead their cells are fetched.
const FETCH_AHEAD: u32 = 2;

/// Runs jobs until told to stop or until the device is lost.
pub(crate) fn run(slab: &Slab, backend: &mut dyn Backend, spin: Duration) {
    let ring = slab.ring();
    let mut flags = Flags::new(STREAMS);
    let mut tail_seen = ring.start();
    let mut payload = [0; PAYLOAD_BYTES_MAX];
    let mut idle = SpinThenPark::new(spin, 1);
    let mut batch_error: Option<DeviceError> = None;
    let heartbeat = slab.heartbeat();
    slab.set_state(WorkerState::Ready);
    slab.done_bell().ring();
    loop {
        if exit::is_exiting() {
            return;
        }
        let Some(entry) = ring.pop(&mut tail_seen) else {
            let is_spinning = idle.is_spinning();
            let mut streams = BackendStreams { backend: &mut *backend, slab };
            let written = if is_spinning { flags.write_due(&mut streams) } else { flags.write_all(&mut streams) };
            if let Err(error) = written {
                return lost(slab, &error);
            }
            if is_spinning {
                idle.pause();
            } else {
                slab.worker_bell().park_unless(|| !ring.is_empty() || exit::is_exiting(), None);
                idle.reset();
            }
            continue;
        };
        idle.reset();
        heartbeat.store(heartbeat.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        if entry == STOP {
            return;
        }
        if entry & NOTIFY != 0 {
            let stream = ((entry & !NOTIFY) as usize).min(STREAMS - 1);
            let flagged = flags.write_all(&mut BackendStreams { backend: &mut *backend, slab });
            let announced = flagged.and_then(|()| backend.notify(stream));
            if let Err(error) = announced {
                return lost(slab, &error);
            }
            continue;
        }
        if entry & PRIORITY != 0 {
            let stream = (entry & !(PRIORITY | LOW)) as usize;
            if let Err(error) = backend.prioritize(stream.min(STREAMS - 1), entry & LOW != 0) {
                return lost(slab, &error);
            }
            continue;
        }
        let (is_flagged, entry) = (entry & FLAGGED != 0, entry & !FLAGGED);
        if entry as usize >= CELLS {
            continue;
        }
        // A later job's lines are on their way while this one is done.
        let later = ring.peek(tail_seen, FETCH_AHEAD).map(|later| later & !FLAGGED);
        if let Some(later) = later.filter(|later| (*later as usize) < CELLS) {
            slab.prefetch(later);
        }
        let cell = Cell(slab.cell(entry));
        // A cell without a job has no stream to flag either; the server finds out when it waits too long.
        let Some(sent) = cell.get() else { continue };
        let bytes = &mut payload[..sent.payload_bytes];
        cell.payload(bytes);
        if is_lane(sent.stream) {
            backend.in_lane(sent, bytes, entry);
            continue;
        }
        let mut answer = match (&batch_error, sent.job) {
            (Some(error), Job::GraphEnd) => {
                // The recording ends in any case; what was recorded is of no use.
                if let Ok(Answer { values: [graph, ..] }) = backend.execute(sent.stream, sent.job, bytes, entry) {
                    let graph = u32::try_from(graph).unwrap_or(u32::MAX);
                    let _ = backend.execute(sent.stream, Job::ForgetGraph { graph }, &[], entry);
                }
                Err(error.clone())
            }
            (Some(error), _) => Err(error.clone()),
            (None, _) => backend.execute(sent.stream, sent.job, bytes, entry),
        };
        if let Err(error @ DeviceError::DeviceLost { .. }) = &answer {
            return lost(slab, error);
        }
        // What was sent together fails together: with the first error, answered by the last.
        if sent.is_last {
            batch_error = None;
        } else {
            batch_error = batch_error.or(std::mem::replace(&mut answer, Ok(Answer::default())).err());
        }
        // A cell is sent with an empty answer in it; writing the same again would take the line from the server's core.
        if answer != Ok(Answer::default()) {
            cell.answer(&answer);
        }
        let mut streams = BackendStreams { backend: &mut *backend, slab };
        let flagged = if is_flagged {
            flags.write(sent.stream, sent.number, &mut streams)
        } else {
            flags.add(sent.stream, sent.number, &mut streams)
        };
        if let Err(error) = flagged {
            return lost(slab, &error);
        }
    }
}

/// The streams of a device, whose flags are in the slab.
struct BackendStreams<'a> {
    backend: &'a mut dyn Backend,
    slab: &'a Slab,
}

impl FlagStreams for BackendStreams<'_> {
    fn write(&mut self, stream: usize, number: u32) -> Result<bool, DeviceError> {
        self.backend.flag(stream, number)
    }

    fn has_passed(&self, stream: usize, number: u32) -> bool {
        has_passed(self.slab.flag(stream).load(Ordering::Acquire), number)
    }
}

/// Says that the device is of no more use to this process.
pub(crate) fn lost(slab: &Slab, error: &DeviceError) {
    let why = match error {
        DeviceError::DeviceLost { why } | DeviceError::Refused { why } => why.clone(),
        other => other.to_string(),
    };
    crate::info::put_reason(slab, &why);
    slab.set_state(WorkerState::Lost);
    slab.done_bell().ring();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::DeviceChoice;
    use crate::queue::link::{CONTROL, Link};
    use crate::slab::SlabPlan;
    use std::sync::Arc;

    #[test]
    fn what_is_sent_together_fails_together_with_the_first_error() {
        let slab = Arc::new(Slab::create(&SlabPlan::default()).unwrap());
        let own = slab.clone();
        let worker = std::thread::spawn(move || {
            let opened = crate::backend::open(&own, DeviceChoice::Cpu, host::HostKernels::default());
            run(&own, &mut *opened.unwrap(), Duration::ZERO);
        });
        let link = Link::new(slab, 0, Arc::default());
        let send = |jobs: &[Job]| {
            let orders = jobs.iter().map(|job| (*job).into()).collect();
            link.send(CONTROL, orders).unwrap().wait(|_| ())
        };
        let bad = Job::Release { stream: 0, address: 7, bytes: 7 };
        send(&[Job::GraphBegin, Job::GraphEnd]).unwrap();
        assert!(matches!(send(&[bad, Job::GraphBegin, Job::GraphEnd]), Err(DeviceError::Refused { .. })));
        // Neither begun nor left open: the next recording begins and ends.
        send(&[Job::GraphBegin, Job::GraphEnd]).unwrap();
        assert!(matches!(send(&[Job::GraphBegin, bad, Job::GraphEnd]), Err(DeviceError::Refused { .. })));
        let Answer { values: [graph, ..] } = send(&[Job::GraphBegin, Job::GraphEnd]).unwrap();
        let graph = u32::try_from(graph).unwrap();
        let before = Job::Replay { graph: graph - 1 };
        assert!(send(&[before]).is_err(), "what was recorded with an error is forgotten");
        send(&[Job::Replay { graph }]).unwrap();
        drop(link);
        worker.join().unwrap();
    }
}
