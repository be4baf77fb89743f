//! Resident kernels make way. A driver waits for everything that runs in its context before it loads a module, makes
//! a green context or grows the threads' stacks, and a resident kernel never ends of itself. So whoever does such a
//! thing asks the resident kernels to leave first, and they are launched again when it is done: about half a
//! millisecond in which messages wait in memory. Nothing is lost, because what a resident kernel knows is in memory
//! too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::DeviceError;
use crate::slab::{STOP_END, STOP_LEAVE, STOP_NO, Slab};
use crate::wait::RESIDENT_PERIOD;

/// A resident kernel that was asked to leave and is there after this long costs the worker; one that has not begun,
/// because it waits for what comes before it, may take as long as that may.
const LEAVE_MAX: Duration = Duration::from_secs(5);
const BEGIN_MAX: Duration = Duration::from_secs(60);

/// A resident kernel as its thread has it.
pub(super) trait ResidentKernel: Send + 'static {
    /// Makes the calling thread one that may launch.
    fn enter(&self) -> Result<(), DeviceError>;

    fn launch(&mut self) -> Result<(), DeviceError>;

    /// Waits in this thread until it has left the device.
    fn wait(&mut self) -> Result<(), DeviceError>;
}

/// The resident kernels that share a context with this process's workers, for those and for their lanes.
#[derive(Default)]
pub(super) struct Residents {
    state: Mutex<Presence>,
    changed: Condvar,
}

#[derive(Default)]
struct Presence {
    present: Vec<ResidentWords>,
    /// Asked to leave, or to stay away, and to come back.
    asked: Vec<ResidentWords>,
    /// How many want the device without resident kernels.
    pauses: usize,
    /// Those that a thread keeps, on the device or not, and the slabs of workers that are gone.
    kept: Vec<ResidentWords>,
    closed: Vec<Weak<Slab>>,
}

/// Which words of which worker's slab are a resident kernel's.
#[derive(Clone)]
struct ResidentWords {
    slab: Arc<Slab>,
    words: usize,
}

impl ResidentWords {
    fn stop(&self) -> &AtomicU64 {
        self.slab.stop(self.words)
    }

    fn has_begun(&self) -> bool {
        self.slab.beat(self.words).load(Ordering::Relaxed) != 0
    }

    /// Asks it to leave, unless it is told to end or asked already.
    fn ask(&self) -> bool {
        self.stop().compare_exchange(STOP_NO, STOP_LEAVE, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

impl PartialEq for ResidentWords {
    fn eq(&self, other: &ResidentWords) -> bool {
        Arc::ptr_eq(&self.slab, &other.slab) && self.words == other.words
    }
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
    /// Workers that are threads of one process share a device's primary context.
    pub(super) fn of_process() -> Arc<Residents> {
        static RESIDENTS: LazyLock<Arc<Residents>> = LazyLock::new(Arc::default);
        RESIDENTS.clone()
    }

    /// Launches a kernel whose words are `words`, and again whenever it has made way, until it is told to end.
    pub(super) fn stay(
        self: &Arc<Self>,
        slab: &Arc<Slab>,
        words: usize,
        stream: usize,
        mut kernel: impl ResidentKernel,
    ) -> Result<Arc<Ending>, DeviceError> {
        let ending = Arc::new(Ending { slab: slab.clone(), stream, state: Mutex::default() });
        let (own, ends, id) = (self.clone(), ending.clone(), ResidentWords { slab: slab.clone(), words });
        let unkept = id.clone();
        // A worker does not wait for a pause to be over; that is for the thread.
        let mut state = self.state.lock();
        let is_launched = state.pauses == 0;
        if is_launched {
            kernel.launch()?;
            state.present.push(id.clone());
        }
        state.kept.push(id.clone());
        drop(state);
        let run = move || {
            let kept = kernel.enter().and_then(|()| own.keep(&id, &mut kernel, is_launched));
            match kept {
                Ok(()) => ends.tell(),
                // Its flag stays as it is: whoever waits for it must not take it for one that was told to end.
                Err(error) => {
                    let why = format!("a resident kernel failed: {error}");
                    crate::worker::lost(&id.slab, &DeviceError::DeviceLost { why });
                }
            }
            own.state.lock().kept.retain(|kept| *kept != id);
            own.changed.notify_all();
        };
        match std::thread::Builder::new().name(format!("resident-{words}")).spawn(run) {
            Ok(_) => Ok(ending),
            // It may be on the device, and nobody would launch it again: the worker goes, and it with it.
            Err(e) => {
                let mut state = self.state.lock();
                state.kept.retain(|kept| *kept != unkept);
                state.present.retain(|present| *present != unkept);
                Err(DeviceError::DeviceLost { why: format!("no thread can be started: {e}") })
            }
        }
    }

    fn keep(&self, id: &ResidentWords, kernel: &mut impl ResidentKernel, is_launched: bool) -> Result<(), DeviceError> {
        let mut is_present = is_launched || self.come(id, kernel)?;
        while is_present {
            let waited = kernel.wait();
            let is_asked = self.leave(id);
            waited?;
            is_present = is_asked && self.come(id, kernel)?;
        }
        Ok(())
    }

    /// Launches a kernel once nobody wants the device without it. False if it was told to end.
    fn come(&self, id: &ResidentWords, kernel: &mut impl ResidentKernel) -> Result<bool, DeviceError> {
        let mut state = self.state.lock();
        while state.pauses > 0 {
            // Whoever watches its heartbeat sees that it is away.
            if id.ask() {
                state.asked.push(id.clone());
            }
            self.changed.wait(&mut state);
        }
        let is_closed = state.closed.iter().any(|slab| std::ptr::eq(slab.as_ptr(), Arc::as_ptr(&id.slab)));
        if is_closed || id.stop().load(Ordering::Acquire) != STOP_NO {
            return Ok(false);
        }
        // It begins anew, when the device has room for it.
        id.slab.beat(id.words).store(0, Ordering::Relaxed);
        kernel.launch()?;
        state.present.push(id.clone());
        Ok(true)
    }

    /// Takes note that a kernel has left. Returns whether it was only asked to make way: if so, nobody takes that back
    /// before this is known. One that returned of itself at that moment is launched again.
    fn leave(&self, id: &ResidentWords) -> bool {
        let mut state = self.state.lock();
        state.present.retain(|present| present != id);
        self.changed.notify_all();
        id.stop().load(Ordering::Acquire) == STOP_LEAVE
    }

    /// Has all resident kernels leave, and waits until they have.
    pub(super) fn pause(&self) -> Result<Pause<'_>, DeviceError> {
        let mut state = self.state.lock();
        state.pauses += 1;
        let pause = Pause(self);
        let Presence { present, asked, .. } = &mut *state;
        asked.extend(present.iter().filter(|id| id.ask()).cloned());
        let asked_at = Instant::now();
        let mut begun_at = asked_at;
        while !state.present.is_empty() {
            let now = Instant::now();
            if state.present.iter().any(|id| !id.has_begun()) {
                begun_at = now;
            }
            if now - begun_at > LEAVE_MAX || now - asked_at > BEGIN_MAX {
                drop(state);
                return Err(DeviceError::DeviceLost {
                    why: format!("a resident kernel was asked to make way and was there after {:?}", now - asked_at),
                });
            }
            self.changed.wait_for(&mut state, RESIDENT_PERIOD);
        }
        drop(state);
        Ok(pause)
    }

    /// Ends those of a worker that is going, and waits until their threads have let go of what is its.
    pub(super) fn close(&self, slab: &Arc<Slab>) {
        let mut state = self.state.lock();
        state.closed.retain(|slab| slab.strong_count() > 0);
        state.closed.push(Arc::downgrade(slab));
        let is_its = |id: &ResidentWords| Arc::ptr_eq(&id.slab, slab);
        state.kept.iter().filter(|id| is_its(id)).for_each(|id| id.stop().store(STOP_END, Ordering::Release));
        let until = Instant::now() + LEAVE_MAX;
        self.changed.wait_while_until(&mut state, |state| state.kept.iter().any(is_its), until);
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.pauses -= 1;
        if state.pauses == 0 {
            for id in state.asked.drain(..) {
                let _ = id.stop().compare_exchange(STOP_LEAVE, STOP_NO, Ordering::AcqRel, Ordering::Relaxed);
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
    use crate::slab::SlabPlan;
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
        let residents = Arc::new(Residents::default());
        let launches = Arc::new(AtomicUsize::new(0));
        let on_device: Vec<Arc<AtomicBool>> = (0..KERNELS).map(|_| Arc::default()).collect();
        let endings: Vec<Arc<Ending>> = (0..KERNELS)
            .map(|words| {
                let (launches, is_on_device) = (launches.clone(), on_device[words].clone());
                let kernel = ThreadKernel { slab: slab.clone(), words, launches, is_on_device, running: None };
                residents.stay(&slab, words, 10 + words, kernel).unwrap()
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
        for (words, is_on_device) in on_device.iter().enumerate() {
            let beats = || slab.beat(words).load(Ordering::Relaxed);
            let before = beats();
            while !is_on_device.load(Ordering::SeqCst) || beats() == before || beats() == 0 {
                std::thread::yield_now();
            }
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
        // With its worker, the last one goes too, and nobody comes back.
        residents.close(&slab);
        assert!(is_flagged(2) && !on_device[2].load(Ordering::SeqCst));
        assert!(residents.state.lock().kept.is_empty());
    }

    /// A kernel that ends with an error: an illegal address, say.
    struct FailingKernel;

    impl ResidentKernel for FailingKernel {
        fn enter(&self) -> Result<(), DeviceError> {
            Ok(())
        }

        fn launch(&mut self) -> Result<(), DeviceError> {
            Ok(())
        }

        fn wait(&mut self) -> Result<(), DeviceError> {
            Err(DeviceError::Refused { why: "an illegal address".to_owned() })
        }
    }

    #[test]
    fn a_resident_kernel_that_fails_has_not_ended_well() {
        let slab = Arc::new(Slab::create(&SlabPlan::default()).unwrap());
        let residents = Arc::new(Residents::default());
        residents.stay(&slab, 0, 10, FailingKernel).unwrap().flag(77);
        let mut state = residents.state.lock();
        residents.changed.wait_while(&mut state, |state| !state.kept.is_empty());
        assert_ne!(slab.flag(10).load(Ordering::Acquire), 77);
        assert_eq!(slab.state(), crate::slab::WorkerState::Lost);
        assert!(crate::info::reason(&slab).contains("an illegal address"));
    }
}
