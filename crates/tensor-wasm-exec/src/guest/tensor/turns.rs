//! Whose plan runs next on the CPU. Tenants are served by the time their plans have taken, in proportion to their
//! weights: a free place goes to the tenant that has had the least of it among those that wait, and a plan that has run
//! for longer than a quantum lets such a tenant go first, between two of its kernels. So nobody waits for longer than
//! the kernels under way, whatever others have in line. A tenant that was quiet comes back at the time of the last turn
//! that was given: silence earns no credit, and a debt is not forgotten.
//!
//! Not to be confused with admission, which decides which calls run at all, and with the device's own line
//! (`tensor-wasm-gpu`), which does the same for a GPU.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::HashMap;

/// What a plan may run for while others wait that have had less.
const QUANTUM: Duration = Duration::from_millis(5);

/// Plans that have begun and let others go first: each is a thread that is parked.
const PARKED_MAX: usize = 64;

/// Tenants that nothing is known of but the time they had, before those without debt are forgotten.
const IDLE_MAX: usize = 1024;

pub(crate) struct Turns {
    running_max: usize,
    state: Mutex<TurnState>,
}

#[derive(Default)]
struct TurnState {
    /// What one tenant may have of the places.
    tenant_max: usize,
    running: usize,
    waiting: usize,
    parked: usize,
    tenants: HashMap<Arc<str>, Share>,
    /// Where the last turn that was given stood.
    now_ns: u64,
    next_ticket: u64,
}

#[derive(Default)]
struct Share {
    /// The time its plans took, by weight.
    pass_ns: u64,
    running: usize,
    waiting: VecDeque<(u64, oneshot::Sender<()>)>,
}

impl TurnState {
    /// A tenant, which does not lag behind.
    fn share(&mut self, tenant: &Arc<str>) -> &mut Share {
        let now_ns = self.now_ns;
        if self.tenants.len() >= IDLE_MAX && !self.tenants.contains_key(tenant) {
            let is_known = |share: &Share| share.running > 0 || !share.waiting.is_empty() || share.pass_ns > now_ns;
            self.tenants.retain(|_, share| is_known(share));
        }
        let share = self.tenants.entry(tenant.clone()).or_default();
        share.pass_ns = share.pass_ns.max(now_ns);
        share
    }

    fn start(&mut self, tenant: &Arc<str>) {
        self.running += 1;
        let share = self.share(tenant);
        share.running += 1;
        let pass_ns = share.pass_ns;
        self.now_ns = self.now_ns.max(pass_ns);
    }

    /// Who has had the least of those that wait and may have another place.
    fn next(&self) -> Option<(Arc<str>, u64)> {
        let may_run = |share: &Share| !share.waiting.is_empty() && share.running < self.tenant_max;
        let waiting = self.tenants.iter().filter(|(_, share)| may_run(share));
        waiting.min_by_key(|(_, share)| share.pass_ns).map(|(name, share)| (name.clone(), share.pass_ns))
    }

    /// Gives free places away.
    fn give(&mut self, running_max: usize) {
        while self.running < running_max
            && let Some((tenant, _)) = self.next()
        {
            let Some((_, waiter)) = self.share(&tenant).waiting.pop_front() else { return };
            self.waiting -= 1;
            self.start(&tenant);
            // One that is gone meanwhile gives its place back when it is dropped.
            let _ = waiter.send(());
        }
    }

    fn end(&mut self, tenant: &Arc<str>, used: Duration, weight: u32) {
        self.running -= 1;
        let share = self.share(tenant);
        share.running -= 1;
        share.pass_ns = share.pass_ns.saturating_add(by_weight(used, weight));
    }
}

fn by_weight(used: Duration, weight: u32) -> u64 {
    u64::try_from(used.as_nanos()).unwrap_or(u64::MAX) / u64::from(weight.max(1))
}

/// The right to compute, given back by dropping it.
pub(crate) struct Turn {
    turns: Arc<Turns>,
    tenant: Arc<str>,
    weight: u32,
    began: Instant,
    /// Not any more once it was given back.
    is_held: bool,
}

/// A place in line. Leaving it early must neither keep it nor lose a turn that was given.
struct InLine {
    turns: Arc<Turns>,
    tenant: Arc<str>,
    ticket: Option<u64>,
}

impl Turns {
    /// So many places, of which one tenant has no more than `tenant_max`: plans may hold theirs for as long as their
    /// calls last, and nobody is asked to give one back.
    pub(crate) fn new(running_max: usize, tenant_max: usize) -> Arc<Turns> {
        let state = TurnState { tenant_max: tenant_max.max(1), ..TurnState::default() };
        Arc::new(Turns { running_max: running_max.max(1), state: Mutex::new(state) })
    }

    /// Plans that run, and that wait.
    pub(crate) fn depth(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.running, state.waiting + state.parked)
    }

    /// Waits for a turn.
    pub(crate) async fn take(self: &Arc<Turns>, tenant: &Arc<str>, weight: u32) -> Turn {
        self.take_in_line(tenant, weight, false).await
    }

    /// A turn, if there is one now.
    pub(crate) fn try_take(self: &Arc<Turns>, tenant: &Arc<str>, weight: u32) -> Option<Turn> {
        let mut state = self.state.lock();
        self.start_now(&mut state, tenant).then(|| self.turn(tenant, weight))
    }

    /// Whether a tenant has a place from now on: there is one, and nobody waits for it.
    fn start_now(&self, state: &mut TurnState, tenant: &Arc<str>) -> bool {
        let is_below_its_own = state.share(tenant).running < state.tenant_max;
        let is_free = state.running < self.running_max && is_below_its_own && state.next().is_none();
        if is_free {
            state.start(tenant);
        }
        is_free
    }

    /// Waits for one before or behind all others of the same tenant. A plan that let others go first goes on before
    /// those that have not begun: what it holds meanwhile is then held by as few as ran at once.
    async fn take_in_line(self: &Arc<Turns>, tenant: &Arc<str>, weight: u32, is_first: bool) -> Turn {
        let (mut in_line, given) = {
            let mut state = self.state.lock();
            if self.start_now(&mut state, tenant) {
                return self.turn(tenant, weight);
            }
            let (sender, given) = oneshot::channel();
            let ticket = state.next_ticket;
            state.next_ticket += 1;
            let waiting = &mut state.share(tenant).waiting;
            if is_first {
                waiting.push_front((ticket, sender))
            } else {
                waiting.push_back((ticket, sender))
            }
            state.waiting += 1;
            (InLine { turns: self.clone(), tenant: tenant.clone(), ticket: Some(ticket) }, given)
        };
        // The sender is kept until it is used.
        let _ = given.await;
        in_line.ticket = None;
        self.turn(tenant, weight)
    }

    fn turn(self: &Arc<Turns>, tenant: &Arc<str>, weight: u32) -> Turn {
        Turn { turns: self.clone(), tenant: tenant.clone(), weight, began: Instant::now(), is_held: true }
    }
}

impl Turn {
    /// How long it has lasted.
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Whether somebody waits who has had less, and this has lasted for long enough.
    fn is_due(&self, state: &TurnState) -> bool {
        let used = self.elapsed();
        if used < QUANTUM || state.parked >= PARKED_MAX {
            return false;
        }
        let own_ns = state.tenants.get(&self.tenant).map_or(0, |share| share.pass_ns);
        state.next().is_some_and(|(_, pass_ns)| pass_ns < own_ns.saturating_add(by_weight(used, self.weight)))
    }

    /// Lets somebody go first who has had less, and waits in this thread for the next turn, which is in place of this
    /// one. Returns the time of the turn that ended, if it did.
    pub(crate) fn let_others(&mut self, runtime: &tokio::runtime::Handle) -> Option<Duration> {
        {
            let mut state = self.turns.state.lock();
            if !self.is_due(&state) {
                return None;
            }
            state.parked += 1;
        }
        let used = self.elapsed();
        self.release(used);
        self.is_held = false;
        let next = runtime.block_on(self.turns.take_in_line(&self.tenant, self.weight, true));
        self.turns.state.lock().parked -= 1;
        *self = next;
        Some(used)
    }

    fn release(&self, used: Duration) {
        let mut state = self.turns.state.lock();
        state.end(&self.tenant, used, self.weight);
        state.give(self.turns.running_max);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.is_held {
            self.release(self.elapsed());
        }
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.turns.state.lock();
        let share = state.share(&self.tenant);
        let place = share.waiting.iter().position(|(own, _)| *own == ticket);
        match place {
            Some(place) => {
                share.waiting.remove(place);
                state.waiting -= 1;
            }
            // It was given a turn that nobody will take.
            None => {
                state.end(&self.tenant, Duration::ZERO, 1);
                state.give(self.turns.running_max);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> Arc<str> {
        name.into()
    }

    /// Polls once: a turn, or none yet.
    fn once<F: Future + Unpin>(waiting: &mut F) -> Option<F::Output> {
        let waker = std::task::Waker::noop();
        match std::pin::Pin::new(waiting).poll(&mut std::task::Context::from_waker(waker)) {
            std::task::Poll::Ready(turn) => Some(turn),
            std::task::Poll::Pending => None,
        }
    }

    #[test]
    fn a_place_goes_to_who_has_had_the_least() {
        let turns = Turns::new(1, 1);
        let (a, b) = (name("a"), name("b"));
        let mut first = once(&mut Box::pin(turns.take(&a, 1))).unwrap();
        let mut more: Vec<_> = (0..5).map(|_| Box::pin(turns.take(&a, 1))).collect();
        more.iter_mut().for_each(|waiting| assert!(once(waiting).is_none()));
        let mut other = Box::pin(turns.take(&b, 1));
        assert!(once(&mut other).is_none());
        assert_eq!(turns.depth(), (1, 6));
        first.began -= Duration::from_millis(2);
        drop(first);
        // b came last, and a has had something.
        let other = once(&mut other).unwrap();
        assert!(more.iter_mut().all(|waiting| once(waiting).is_none()));
        drop(other);
        let next = once(&mut more[0]).unwrap();
        drop(next);
        // Who was given a turn and never took it gives it back.
        drop(more);
        assert_eq!(turns.depth(), (0, 0));
        assert!(once(&mut Box::pin(turns.take(&b, 1))).is_some());
    }

    #[test]
    fn nobody_is_passed_by_who_does_not_wait() {
        let turns = Turns::new(2, 1);
        let (a, b, c) = (name("a"), name("b"), name("c"));
        let held = turns.try_take(&a, 1).unwrap();
        assert!(turns.try_take(&a, 1).is_none(), "a tenant has one place");
        let other = turns.try_take(&b, 1).unwrap();
        let mut waiting = Box::pin(turns.take(&c, 1));
        assert!(once(&mut waiting).is_none() && turns.try_take(&c, 1).is_none());
        drop(other);
        assert!(turns.try_take(&b, 1).is_none(), "the place was given to who waited");
        drop((waiting, held));
        assert_eq!(turns.depth(), (0, 0));
    }

    #[test]
    fn a_tenant_leaves_places_to_others() {
        let turns = Turns::new(4, 3);
        let (greedy, other) = (name("greedy"), name("other"));
        let mut held: Vec<_> = (0..3).filter_map(|_| once(&mut Box::pin(turns.take(&greedy, 1)))).collect();
        assert_eq!(held.len(), 3);
        let mut fourth = Box::pin(turns.take(&greedy, 1));
        assert!(once(&mut fourth).is_none(), "there is a place, but not for this tenant");
        let own = once(&mut Box::pin(turns.take(&other, 1)));
        assert!(own.is_some(), "who waits for a place of its own is in nobody's way");
        let mut second = Box::pin(turns.take(&other, 1));
        assert!(once(&mut second).is_none(), "all places are taken");
        drop(held.pop());
        assert!(once(&mut second).is_some() != once(&mut fourth).is_some(), "one place, for one of them");
        drop((held, own, second, fourth));
        assert_eq!(turns.depth(), (0, 0));
    }

    #[test]
    fn weights_divide_the_time() {
        let turns = Turns::new(1, 1);
        let (light, heavy) = (name("light"), name("heavy"));
        let mut state = turns.state.lock();
        for (tenant, weight) in [(&light, 1), (&heavy, 4)] {
            state.start(tenant);
            state.end(tenant, Duration::from_millis(8), weight);
        }
        assert_eq!((state.tenants[&light].pass_ns, state.tenants[&heavy].pass_ns), (8_000_000, 2_000_000));
    }

    #[test]
    fn a_long_plan_lets_others_go_first_and_comes_back() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let turns = Turns::new(1, 1);
        let mut long = once(&mut Box::pin(turns.take(&name("long"), 1))).unwrap();
        assert_eq!(long.let_others(runtime.handle()), None, "nobody waits");
        let waiting = {
            let turns = turns.clone();
            runtime.spawn(async move {
                let turn = turns.take(&name("short"), 1).await;
                drop(turn);
            })
        };
        while turns.depth().1 == 0 {
            std::thread::yield_now();
        }
        assert_eq!(long.let_others(runtime.handle()), None, "it has not lasted for long");
        long.began -= QUANTUM;
        assert!(long.let_others(runtime.handle()).is_some_and(|used| used >= QUANTUM));
        runtime.block_on(waiting).unwrap();
        assert_eq!(turns.depth(), (1, 0));
        drop(long);
        assert_eq!(turns.depth(), (0, 0));
    }
}
