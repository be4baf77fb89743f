//! Resident kernels make way. A driver waits for everything that runs in its context before it loads a module, makes
//! a green context or grows the threads' stacks, and a resident kernel never ends of itself. So whoever does such a
//! thing asks the resident kernels to leave first, and they are launched again when it is done: about half a
//! millisecond in which messages wait in memory. Nothing is lost, because what a resident kernel knows is in memory
//! too.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::DeviceError;
use crate::slab::{STOP_LEAVE, STOP_NO, Slab};

/// A resident kernel that was asked to leave and is there after this long costs the worker.
const LEAVE_MAX: Duration = Duration::from_secs(5);

/// A resident kernel as its thread has it.
pub(super) trait ResidentKernel: Send + 'static {
    /// Makes the calling thread one that may launch.
    fn enter(&self) -> Result<(), DeviceError>;

    fn launch(&mut self) -> Result<(), DeviceError>;

    /// Waits in this thread until it has left the device.
    fn wait(&mut self) -> Result<(), DeviceError>;
}

/// The resident kernels of a device, for its worker and for the lanes.
pub(super) struct Residents {
    slab: Arc<Slab>,
    state: Mutex<Presence>,
    changed: Condvar,
}

/// Resident kernels by the number of their words in the slab.
#[derive(Default)]
struct Presence {
    present: Vec<usize>,
    /// Asked to leave and to come back.
    asked: Vec<usize>,
    /// How many want the device without resident kernels.
    pauses: usize,
}

/// While this is held, no resident kernel is on the device.
pub(super) struct Pause<'a>(&'a Residents);

/// How a resident kernel's end is told: its stream's flag is set by its thread, not by the device.
pub(super) struct Ending {
    slab: Arc<Slab>,
    stream: usize,
    state: Mutex<EndingState>,
}

#[derive(Default)]
struct EndingState {
    /// What the flag is to show.
    number: Option<u32>,
    is_over: bool,
}

impl Residents {
    pub(super) fn new(slab: Arc<Slab>) -> Residents {
        Residents { slab, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Launches a kernel whose words are `words`, and again whenever it has made way, until it is told to end.
    pub(super) fn stay(
        self: &Arc<Self>,
        words: usize,
        stream: usize,
        mut kernel: impl ResidentKernel,
    ) -> Result<Arc<Ending>, DeviceError> {
        let ending = Arc::new(Ending { slab: self.slab.clone(), stream, state: Mutex::default() });
        let (own, ends) = (self.clone(), ending.clone());
        // A worker does not wait for a pause to be over; that is for the thread.
        let mut state = self.state.lock();
        let is_launched = state.pauses == 0;
        if is_launched {
            kernel.launch()?;
            state.present.push(words);
        }
        drop(state);
        let run = move || {
            match kernel.enter().and_then(|()| own.keep(words, &mut kernel, is_launched)) {
                Ok(()) => {}
                Err(lost @ DeviceError::DeviceLost { .. }) => crate::worker::lost(&own.slab, &lost),
                Err(error) => tracing::error!(%error, "a resident kernel could not be launched again and has ended"),
            }
            ends.tell();
        };
        match std::thread::Builder::new().name(format!("resident-{words}")).spawn(run) {
            Ok(_) => Ok(ending),
            // It is on the device and nobody would launch it again: the worker goes, and it with it.
            Err(e) if is_launched => Err(DeviceError::DeviceLost { why: format!("no thread can be started: {e}") }),
            Err(e) => Err(DeviceError::Refused { why: format!("no thread can be started: {e}") }),
        }
    }

    fn keep(&self, words: usize, kernel: &mut impl ResidentKernel, is_launched: bool) -> Result<(), DeviceError> {
        let mut is_present = is_launched || self.come(words, kernel)?;
        while is_present {
            let waited = kernel.wait();
            let is_asked = self.leave(words);
            waited?;
            is_present = is_asked && self.come(words, kernel)?;
        }
        Ok(())
    }

    /// Launches a kernel once nobody wants the device without it. False if it was told to end.
    fn come(&self, words: usize, kernel: &mut impl ResidentKernel) -> Result<bool, DeviceError> {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |state| state.pauses > 0);
        if self.slab.stop(words).load(Ordering::Acquire) != STOP_NO {
            return Ok(false);
        }
        kernel.launch()?;
        state.present.push(words);
        Ok(true)
    }

    /// Takes note that a kernel has left. Returns whether it was only asked to make way: if so, nobody takes that back
    /// before this is known.
    fn leave(&self, words: usize) -> bool {
        let mut state = self.state.lock();
        state.present.retain(|present| *present != words);
        self.changed.notify_all();
        self.slab.stop(words).load(Ordering::Acquire) == STOP_LEAVE
    }

    /// Has all resident kernels leave, and waits until they have.
    pub(super) fn pause(&self) -> Result<Pause<'_>, DeviceError> {
        let mut state = self.state.lock();
        state.pauses += 1;
        let pause = Pause(self);
        let Presence { present, asked, .. } = &mut *state;
        for words in present.iter() {
            let stop = self.slab.stop(*words);
            // One that is told to end meanwhile does that.
            if stop.compare_exchange(STOP_NO, STOP_LEAVE, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                asked.push(*words);
            }
        }
        let until = Instant::now() + LEAVE_MAX;
        let is_late = self.changed.wait_while_until(&mut state, |state| !state.present.is_empty(), until).timed_out();
        drop(state);
        if is_late {
            return Err(DeviceError::DeviceLost {
                why: format!("a resident kernel was asked to make way and was there after {LEAVE_MAX:?}"),
            });
        }
        Ok(pause)
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.pauses -= 1;
        if state.pauses == 0 {
            for words in state.asked.drain(..) {
                let stop = self.0.slab.stop(words);
                let _ = stop.compare_exchange(STOP_LEAVE, STOP_NO, Ordering::AcqRel, Ordering::Relaxed);
            }
            self.0.changed.notify_all();
        }
    }
}

impl Ending {
    /// Has the stream's flag show `number` when the kernel has ended.
    pub(super) fn flag(&self, number: u32) {
        let mut state = self.state.lock();
        state.number = Some(number);
        self.show(&state);
    }

    fn tell(&self) {
        let mut state = self.state.lock();
        state.is_over = true;
        self.show(&state);
    }

    fn show(&self, state: &EndingState) {
        if let (Some(number), true) = (state.number, state.is_over) {
            self.slab.flag(self.stream).store(number, Ordering::Release);
            self.slab.done_bell().ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::{STOP_END, SlabPlan};
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::thread::JoinHandle;

    /// A kernel of threads: it leaves when its stop word says so, if it listens.
    struct ThreadKernel {
        slab: Arc<Slab>,
        words: usize,
        launches: Arc<AtomicUsize>,
        is_on_device: Arc<AtomicBool>,
        running: Option<JoinHandle<()>>,
    }

    impl ResidentKernel for ThreadKernel {
        fn enter(&self) -> Result<(), DeviceError> {
            Ok(())
        }

        fn launch(&mut self) -> Result<(), DeviceError> {
            self.launches.fetch_add(1, Ordering::Relaxed);
            self.is_on_device.store(true, Ordering::SeqCst);
            let (slab, words, is_on_device) = (self.slab.clone(), self.words, self.is_on_device.clone());
            self.running = Some(std::thread::spawn(move || {
                while slab.stop(words).load(Ordering::Acquire) == STOP_NO {
                    slab.beat(words).fetch_add(1, Ordering::Relaxed);
                    std::thread::yield_now();
                }
                is_on_device.store(false, Ordering::SeqCst);
            }));
            Ok(())
        }

        fn wait(&mut self) -> Result<(), DeviceError> {
            self.running.take().unwrap().join().unwrap();
            Ok(())
        }
    }

    #[test]
    fn resident_kernels_make_way_and_come_back_until_they_are_told_to_end() {
        const KERNELS: usize = 3;
        let slab = Arc::new(Slab::create(&SlabPlan::default()).unwrap());
        let residents = Arc::new(Residents::new(slab.clone()));
        let launches = Arc::new(AtomicUsize::new(0));
        let on_device: Vec<Arc<AtomicBool>> = (0..KERNELS).map(|_| Arc::default()).collect();
        let endings: Vec<Arc<Ending>> = (0..KERNELS)
            .map(|words| {
                let (slab, launches, is_on_device) = (slab.clone(), launches.clone(), on_device[words].clone());
                let kernel = ThreadKernel { slab, words, launches, is_on_device, running: None };
                residents.stay(words, 10 + words, kernel).unwrap()
            })
            .collect();
        endings.iter().for_each(|ending| ending.flag(77));
        // Two at once want the device for themselves, again and again.
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let pause = residents.pause().unwrap();
                        assert!(on_device.iter().all(|on| !on.load(Ordering::SeqCst)), "nobody is on the device");
                        drop(pause);
                        std::thread::yield_now();
                    }
                });
            }
        });
        let is_flagged = |words: usize| slab.flag(10 + words).load(Ordering::Acquire) == 77;
        // All of them come back, however often they left, and beat.
        let beats: Vec<u64> = (0..KERNELS).map(|words| slab.beat(words).load(Ordering::Relaxed)).collect();
        while (0..KERNELS).any(|words| slab.beat(words).load(Ordering::Relaxed) == beats[words]) {
            std::thread::yield_now();
        }
        assert!((0..KERNELS).all(|words| !is_flagged(words)), "leaving is not ending");
        assert!(launches.load(Ordering::Relaxed) > KERNELS);
        // Told to end on the device, and while it has made way.
        slab.stop(0).store(STOP_END, Ordering::Release);
        let pause = residents.pause().unwrap();
        slab.stop(1).store(STOP_END, Ordering::Release);
        drop(pause);
        while !is_flagged(0) || !is_flagged(1) {
            std::thread::yield_now();
        }
        assert!(!is_flagged(2));
        slab.stop(2).store(STOP_END, Ordering::Release);
        while !is_flagged(2) {
            std::thread::yield_now();
        }
    }
}
