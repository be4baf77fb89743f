//! Threads that stay: work is split into items, which they and the caller take one by one, each from a part of its own
//! first and then from the others' (work stealing). How it is split into items never depends on how many threads there
//! are, so neither do results.
#![expect(unsafe_code, reason = "threads borrow what the caller lends them until it returns")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::account;

/// A thread looks for more work this long before it parks: waking one takes tens of microseconds.
const SPIN: Duration = Duration::from_micros(30);

/// More threads than any machine has use for.
const THREADS_MAX: usize = 1024;

static POOL: OnceLock<Pool> = OnceLock::new();

/// How many threads may be used; zero until somebody asks or says.
static ALLOWED: AtomicUsize = AtomicUsize::new(0);

struct Pool {
    /// Held by whoever has work done. Others do theirs alone meanwhile.
    user: Mutex<()>,
    /// Counts up with every piece of work; threads look at it while they spin.
    round: AtomicUsize,
    work: Mutex<Option<Work>>,
    changed: Condvar,
    /// Threads that are at work.
    busy: AtomicUsize,
    /// The next item of each part.
    next: Vec<Apart>,
    has_panicked: AtomicBool,
}

/// A number that is not in the same cache line as another.
#[repr(align(128))]
struct Apart(AtomicUsize);

#[derive(Clone, Copy)]
struct Work {
    run: *const (dyn Fn(usize) + Sync),
    items: usize,
    /// Into how many parts they are divided.
    parts: usize,
    /// Threads that may still join.
    helpers: usize,
}

// SAFETY: what it points to is shared between threads, and lives until the caller has seen all of them leave.
unsafe impl Send for Work {}

/// How many threads work on one thing at once, the caller among them.
pub fn threads() -> usize {
    let allowed = ALLOWED.load(Ordering::Relaxed);
    if allowed > 0 {
        return allowed;
    }
    let asked = std::env::var("TENSOR_WASM_THREADS").ok().and_then(|text| text.parse::<usize>().ok());
    let count = asked.filter(|count| *count > 0);
    let count = count.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    set_threads(count);
    threads()
}

/// Uses that many threads from now on: at least one, the caller's.
pub fn set_threads(count: usize) {
    ALLOWED.store(count.clamp(1, THREADS_MAX), Ordering::Relaxed);
}

fn pool() -> &'static Pool {
    POOL.get_or_init(|| {
        let count = threads().max(std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
        for n in 1..count {
            let run = move || {
                if let Some(pool) = wait_for_pool() {
                    pool.serve(n);
                }
            };
            // With fewer threads everything still happens.
            let _ = std::thread::Builder::new().name(format!("tensor-{n}")).spawn(run);
        }
        Pool {
            user: Mutex::new(()),
            round: AtomicUsize::new(0),
            work: Mutex::new(None),
            changed: Condvar::new(),
            busy: AtomicUsize::new(0),
            next: (0..count).map(|_| Apart(AtomicUsize::new(0))).collect(),
            has_panicked: AtomicBool::new(false),
        }
    })
}

fn wait_for_pool() -> Option<&'static Pool> {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(10) {
        if let Some(pool) = POOL.get() {
            return Some(pool);
        }
        std::thread::yield_now();
    }
    None
}

/// Does `run(0)` to `run(items - 1)`, in any order and on any threads.
pub(crate) fn parallel(items: usize, run: &(dyn Fn(usize) + Sync)) {
    match account::supervisor() {
        None => share_out(items, run),
        // Nobody will see what comes of a kernel that is to stop.
        Some(supervisor) => share_out(items, &|item| {
            if !supervisor.is_stopped() {
                run(item);
            }
        }),
    }
}

fn share_out(items: usize, run: &(dyn Fn(usize) + Sync)) {
    let helpers = threads().min(items).saturating_sub(1);
    let pool = if helpers == 0 { None } else { Some(pool()) };
    let held = pool.and_then(|pool| Some((pool, pool.user.try_lock()?)));
    match held {
        None => (0..items).for_each(run),
        Some((pool, _user)) => pool.share(items, helpers, run),
    }
}

/// The first item of a part.
fn first_of(part: usize, parts: usize, items: usize) -> usize {
    // Items are few: they are chunks of something that is in memory.
    items.saturating_mul(part) / parts
}

impl Pool {
    fn share(&self, items: usize, helpers: usize, run: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes. Threads use it between joining and leaving, and this returns when nobody
        // can join and all have left.
        let run: *const (dyn Fn(usize) + Sync + 'static) = unsafe { std::mem::transmute(std::ptr::from_ref(run)) };
        let parts = (helpers + 1).min(self.next.len());
        for (part, next) in self.next.iter().take(parts).enumerate() {
            next.0.store(first_of(part, parts, items), Ordering::Relaxed);
        }
        let work = Work { run, items, parts, helpers };
        {
            // Under the lock, or a thread that is about to park would miss it.
            *self.work.lock() = Some(work);
            self.round.fetch_add(1, Ordering::Release);
        }
        self.changed.notify_all();
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.take_items(&work, 0)));
        // Nobody joins from here on; who has joined is counted.
        *self.work.lock() = None;
        let mut looks = 0_u32;
        while self.busy.load(Ordering::Acquire) > 0 {
            looks += 1;
            if looks.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        let has_panicked = self.has_panicked.swap(false, Ordering::Relaxed);
        match own {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => assert!(!has_panicked, "a thread that helped has panicked"),
        }
    }

    /// Takes items until there are none. Neighbouring items are neighbouring memory: a thread that goes on where it is
    /// has it fetched ahead, and finds in its own caches what it had there the last time. When every thread took the
    /// next item of all, two of them were no faster than one on matrices that the shared cache holds.
    fn take_items(&self, work: &Work, own: usize) {
        // SAFETY: it lives until everybody who has joined has left.
        let run = unsafe { &*work.run };
        for n in 0..work.parts {
            let part = (own + n) % work.parts;
            let end = first_of(part + 1, work.parts, work.items);
            loop {
                let item = self.next[part].0.fetch_add(1, Ordering::Relaxed);
                if item >= end {
                    break;
                }
                run(item);
            }
        }
    }

    fn serve(&self, thread: usize) {
        let mut seen = 0;
        loop {
            self.wait_for_round(&mut seen);
            let joined = {
                let mut work = self.work.lock();
                work.as_mut().filter(|work| work.helpers > 0).map(|work| {
                    work.helpers -= 1;
                    self.busy.fetch_add(1, Ordering::Relaxed);
                    *work
                })
            };
            if let Some(work) = joined {
                if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.take_items(&work, thread))).is_err() {
                    self.has_panicked.store(true, Ordering::Relaxed);
                }
                self.busy.fetch_sub(1, Ordering::Release);
            }
        }
    }

    fn wait_for_round(&self, seen: &mut usize) {
        let begun = Instant::now();
        loop {
            for _ in 0..64 {
                let round = self.round.load(Ordering::Acquire);
                if round != *seen {
                    *seen = round;
                    return;
                }
                std::hint::spin_loop();
            }
            if begun.elapsed() > SPIN {
                break;
            }
        }
        let mut work = self.work.lock();
        while self.round.load(Ordering::Acquire) == *seen {
            self.changed.wait(&mut work);
        }
        *seen = self.round.load(Ordering::Acquire);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_by_whoever_has_time() {
        set_threads(4);
        for items in [0, 1, 2, 3, 1000] {
            let done: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..20 {
                parallel(items, &|n| {
                    done[n].fetch_add(1, Ordering::Relaxed);
                    // Work inside of work is done by whoever finds it.
                    parallel(2, &|_| ());
                });
            }
            assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 20), "{items}");
        }
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let sum = AtomicUsize::new(0);
                        parallel(10, &|n| {
                            sum.fetch_add(n, Ordering::Relaxed);
                        });
                        assert_eq!(sum.into_inner(), 45);
                    }
                });
            }
        });
        let caught = std::panic::catch_unwind(|| parallel(64, &|n| assert_ne!(n, 40)));
        assert!(caught.is_err());
        parallel(3, &|_| ());
    }
}
