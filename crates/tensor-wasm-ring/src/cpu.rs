//! Lanes on a CPU: a module whose one kernel stays, each of its lanes on a thread of its own.
//!
//! The device's worker is given [`host_kernels`] to load and run kernels with. It knows the images that `backend.rs`
//! makes, and hands whatever else it is asked to what the server runs Wasm kernels with. It runs where the worker does,
//! in another process perhaps: lanes and host share the region and nothing else.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::ScopedJoinHandle;

use tensor_wasm_gpu::{HostCode, HostKernels, HostLaunch, HostMemory, HostModule, SharedWords};

use crate::backend::{LANE_KERNEL, LANE_PARAMS, behaviour_of_image};
use crate::behaviour::Handler;
use crate::lane::{Lane, Peer};
use crate::span::Span;
use crate::sync::Ordering;
use crate::wait::WATCH_PERIOD;

/// What a worker of a CPU device runs lanes with, and `others` with whatever is no lane's.
pub fn host_kernels(others: HostKernels) -> HostKernels {
    HostKernels(Some(Arc::new(LaneCode { others })))
}

struct LaneCode {
    others: HostKernels,
}

impl HostCode for LaneCode {
    fn load(&self, stream: usize, image: &[u8]) -> Result<Arc<dyn HostModule>, String> {
        match (behaviour_of_image(image), &self.others.0) {
            (Some(behaviour), _) => Ok(Arc::new(LaneModule { handler: behaviour?.handler() })),
            (None, Some(others)) => others.load(stream, image),
            (None, None) => {
                Err("it is no image of a lane, and there is nothing here that runs other kernels".to_owned())
            }
        }
    }

    fn forget(&self, stream: usize) {
        if let Some(others) = &self.others.0 {
            others.forget(stream);
        }
    }
}

struct LaneModule {
    handler: Handler,
}

/// The kernel's parameters, and the two that all kernels have that stay.
struct LaneParams {
    span: SharedWords,
    host_bell: SharedWords,
    beat: SharedWords,
    stop: SharedWords,
}

impl LaneParams {
    fn read(params: &[u8], memory: &HostMemory) -> Option<LaneParams> {
        let (words, _) = params.as_chunks();
        let [address, bytes, host_bell, beat, stop] = *words.first_chunk()?;
        let word = |address| memory.slab_words(u64::from_le_bytes(address), 1);
        let count = usize::try_from(u64::from_le_bytes(bytes) / 8).ok()?;
        let span = memory.slab_words(u64::from_le_bytes(address), count)?;
        Some(LaneParams { span, host_bell: word(host_bell)?, beat: word(beat)?, stop: word(stop)? })
    }
}

impl HostModule for LaneModule {
    fn params(&self, kernel: &str) -> Option<Vec<(u32, u32)>> {
        (kernel == LANE_KERNEL).then(|| (0..LANE_PARAMS).map(|n| (8 * n, 8)).collect())
    }

    fn launch(&self, launch: &HostLaunch<'_>) {
        let Some(params) = LaneParams::read(launch.params, launch.memory) else { return };
        // A header that is wrong is no executor: the kernel ends, which is what the host sees.
        let Ok(span) = Span::open(params.span.clone()) else { return };
        let Ok(peers) = Peer::all(&span) else { return };
        stay(&span, &peers, self.handler, &params);
    }
}

/// Runs all lanes until told to stop, or until one of them cannot go on.
fn stay(span: &Span, peers: &[Peer], handler: Handler, params: &LaneParams) {
    let LaneParams { host_bell, beat, stop, .. } = params;
    let is_ending = AtomicBool::new(false);
    let is_stopped = || stop[0].load(Ordering::Relaxed) != 0 || is_ending.load(Ordering::Relaxed);
    let watcher = std::thread::current();
    std::thread::scope(|scope| {
        let (is_stopped, is_ending, watcher) = (&is_stopped, &is_ending, &watcher);
        let start = |lane| {
            let run = move || {
                if let Ok(mut lane) = Lane::new(span, lane, handler, peers, host_bell) {
                    lane.run(is_stopped);
                }
                is_ending.store(true, Ordering::Relaxed);
                watcher.unpark();
            };
            std::thread::Builder::new()
                .name(format!("actor-{}-{lane}", span.shape.executor))
                .spawn_scoped(scope, run)
                .ok()
        };
        let threads: Option<Vec<ScopedJoinHandle<'_, ()>>> = (0..span.shape.lanes).map(start).collect();
        let mut seen: Vec<u64> = vec![0; peers.len()];
        // Without one of its threads there is no executor.
        while threads.is_some() && !is_stopped() {
            let beats: Vec<u64> = peers.iter().map(Peer::beats).collect();
            // It is well as long as all of its lanes are.
            if beats.iter().zip(&seen).all(|(now, before)| now != before) {
                beat[0].store(beat[0].load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
                seen = beats;
            }
            std::thread::park_timeout(WATCH_PERIOD);
        }
        is_ending.store(true, Ordering::Relaxed);
        peers.iter().for_each(Peer::ring);
    });
}
