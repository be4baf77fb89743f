//! A tenant's lane: the thread on which its modules are loaded, which may take seconds. Nobody else's launches, and nobody
//! else's modules, wait for it.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use super::finish;
use crate::error::DeviceError;
use crate::queue::job::{Answer, Job, Sent};
use crate::slab::Slab;

/// What lanes do their jobs with.
pub(super) trait Loader: Send + Sync + 'static {
    /// Whatever a thread needs before its first job.
    fn enter(&self) -> Result<(), DeviceError>;

    fn execute(&self, lane: usize, slab: &Slab, job: Job, payload: &[u8], cell: u32) -> Result<Answer, DeviceError>;
}

/// A thread that loads the modules of one tenant. It ends when this is dropped and what it was handed is done.
pub(super) struct Lane {
    number: usize,
    slab: Arc<Slab>,
    jobs: Option<Sender<Handed>>,
}

struct Handed {
    sent: Sent,
    payload: Vec<u8>,
    cell: u32,
}

impl Lane {
    pub(super) fn start(number: usize, loader: Arc<impl Loader>, slab: Arc<Slab>) -> Lane {
        let (sender, jobs) = channel::<Handed>();
        let own = slab.clone();
        let run = move || {
            let current = loader.enter();
            for Handed { sent, payload, cell } in jobs {
                let answer = current.clone().and_then(|()| loader.execute(number, &own, sent.job, &payload, cell));
                if let Err(error @ DeviceError::DeviceLost { .. }) = &answer {
                    return crate::worker::lost(&own, error);
                }
                finish(&own, &sent, cell, &answer);
            }
        };
        let spawned = std::thread::Builder::new().name(format!("lane-{number}")).spawn(run);
        Lane { number, slab, jobs: spawned.is_ok().then_some(sender) }
    }

    pub(super) fn hand(&self, sent: Sent, payload: &[u8], cell: u32) {
        let number = self.number;
        let handed = Handed { sent, payload: payload.to_vec(), cell };
        let refused = match &self.jobs {
            Some(jobs) => jobs.send(handed).err().map(|refused| refused.0),
            None => Some(handed),
        };
        if let Some(Handed { sent, cell, .. }) = refused {
            let why = format!("no thread can be started for lane {number}");
            finish(&self.slab, &sent, cell, &Err(DeviceError::Refused { why }));
        }
    }
}

/// Copies an image out of the slab, and so many bytes more that are zero.
pub(super) fn uploaded(slab: &Slab, offset: u64, bytes: u64, more: usize) -> Option<Vec<u8>> {
    offset.checked_add(bytes).filter(|end| *end < slab.len() as u64)?;
    let len = usize::try_from(bytes).ok()?;
    let mut image = vec![0; len + more];
    slab.copy_out(offset, &mut image[..len]);
    Some(image)
}
