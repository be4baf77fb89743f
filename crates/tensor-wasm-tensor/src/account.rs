//! Who pays for tensors, and who watches while they are computed. What a thread makes while it is
//! [`charged`](charged_to) to an account belongs to it: bytes of memory and nodes of graphs are counted when they are
//! made, before they are there, and given back when they are gone, on whatever thread that is. Plans are kept with the
//! outermost account, so that nobody can push out another's. Without an account nothing is counted here;
//! [`crate::set_memory_limit`] bounds all tensors of the process together, also those that have an account.
//!
//! Nothing that is charged computes anything by itself: operations only record, however many there are.
//! [`Tensor::is_deep`](crate::Tensor::is_deep) says when to compute.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::ErrorKind;
use crate::schedule::PlanCache;
use crate::shape::Shape;

/// What an account may have at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccountLimits {
    /// Bytes of the CPU's memory.
    pub bytes_max: usize,
    /// Nodes of graphs, computed or not.
    pub nodes_max: usize,
    /// Elements of one tensor.
    pub elements_max: usize,
}

impl Default for AccountLimits {
    fn default() -> AccountLimits {
        AccountLimits { bytes_max: usize::MAX, nodes_max: usize::MAX, elements_max: usize::MAX }
    }
}

/// Whom tensors are charged to.
pub struct Account {
    limits: AccountLimits,
    bytes: AtomicUsize,
    nodes: AtomicUsize,
    /// Who pays for its bytes too.
    outer: Option<Arc<Account>>,
    plans: PlanCache,
}

/// What a plan needs, known before it runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlanNeed {
    pub kernels: usize,
    /// The most bytes of memory that it has at once, besides what it is given.
    pub bytes: usize,
    /// Bytes that its kernels read and write.
    pub moved_bytes: usize,
    /// Operations on numbers.
    pub flops: u64,
    /// All that is done to elements, in simple operations of a core that does one after the other: a function of an
    /// element is many, and so is a random number.
    pub work: u64,
}

/// Who is asked before a plan runs and while it does. What it answers with ends the plan.
pub trait Supervisor: Send + Sync {
    /// Before anything is allocated or computed.
    fn admit(&self, need: &PlanNeed) -> Result<(), ErrorKind>;

    /// Between two kernels. It may let others go first.
    fn between(&self) -> Result<(), ErrorKind>;

    /// Whether the thread is one that others wait for: it computes what takes a moment, and does not wait. What would
    /// ends with [`ErrorKind::WouldWait`], with nothing computed, and can be asked for again without hurry.
    fn is_hurried(&self) -> bool {
        false
    }

    /// Asked by every thread that helps with a kernel, often: whether it can end early; what comes of the
    /// plan is refused then. Once it says so it must not change its mind.
    fn is_stopped(&self) -> bool;

    /// Who is charged for what its plans take of a GPU, besides the tenant's line.
    #[cfg(feature = "cuda")]
    fn payer(&self) -> Option<Arc<dyn tensor_wasm_gpu::Payer>> {
        None
    }
}

/// What a thread's tensors are charged to.
#[derive(Clone)]
struct Scope {
    account: Arc<Account>,
    supervisor: Option<Arc<dyn Supervisor>>,
}

thread_local! {
    static SCOPE: RefCell<Option<Scope>> = const { RefCell::new(None) };
}

/// Charges whatever this thread makes to an account while a function runs.
pub fn charged_to<R>(account: &Arc<Account>, run: impl FnOnce() -> R) -> R {
    scoped(Some(Scope { account: account.clone(), supervisor: None }), run)
}

/// The same for a function that computes, under a supervisor.
pub fn supervised<R>(account: &Arc<Account>, supervisor: Arc<dyn Supervisor>, run: impl FnOnce() -> R) -> R {
    scoped(Some(Scope { account: account.clone(), supervisor: Some(supervisor) }), run)
}

/// Charges nobody while a function runs: what it makes is the process's.
#[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "only devices are everybody's"))]
pub(crate) fn uncharged<R>(run: impl FnOnce() -> R) -> R {
    scoped(None, run)
}

fn scoped<R>(scope: Option<Scope>, run: impl FnOnce() -> R) -> R {
    struct Before(Option<Scope>);
    impl Drop for Before {
        fn drop(&mut self) {
            let ended = SCOPE.replace(self.0.take());
            drop(ended);
        }
    }
    let _before = Before(SCOPE.replace(scope));
    run()
}

fn current() -> Option<Arc<Account>> {
    SCOPE.with_borrow(|scope| scope.as_ref().map(|scope| scope.account.clone()))
}

/// Whether this thread is charged to an account.
pub(crate) fn is_charged() -> bool {
    SCOPE.with_borrow(Option::is_some)
}

/// Who watches this thread's plans.
pub(crate) fn supervisor() -> Option<Arc<dyn Supervisor>> {
    SCOPE.with_borrow(|scope| scope.as_ref().and_then(|scope| scope.supervisor.clone()))
}

/// Does something with the plans that this thread's account keeps, if it has one.
pub(crate) fn with_plans<R>(run: impl FnOnce(Option<&PlanCache>) -> R) -> R {
    let account = current();
    let outermost = account.as_deref().map(|account| {
        let mut outermost = account;
        while let Some(outer) = &outermost.outer {
            outermost = outer;
        }
        &outermost.plans
    });
    run(outermost)
}

/// Refuses a node that this thread's account has no room for, or that has too many elements.
pub(crate) fn check_node(shape: &Shape) -> Result<(), ErrorKind> {
    SCOPE.with_borrow(|scope| {
        let Some(Scope { account, .. }) = scope else { return Ok(()) };
        let AccountLimits { nodes_max, elements_max, .. } = account.limits;
        if shape.numel() > elements_max {
            return Err(ErrorKind::TooManyElements { shape: shape.to_vec(), elements_max });
        }
        if account.nodes.load(Ordering::Relaxed) >= nodes_max {
            return Err(ErrorKind::TooManyNodes { nodes_max });
        }
        Ok(())
    })
}

/// Refuses a plan that needs more memory than there is, or that the supervisor does not want.
pub(crate) fn admit(need: &PlanNeed, is_on_cpu: bool) -> Result<(), ErrorKind> {
    let Some(account) = current().filter(|_| is_on_cpu) else {
        return supervisor().map_or(Ok(()), |supervisor| supervisor.admit(need));
    };
    let (bytes_max, free) = account.room();
    if need.bytes > free {
        return Err(ErrorKind::OverBudget { bytes: need.bytes, bytes_max, free });
    }
    supervisor().map_or(Ok(()), |supervisor| supervisor.admit(need))
}

/// Between two kernels of a plan.
pub(crate) fn between_kernels() -> Result<(), ErrorKind> {
    supervisor().map_or(Ok(()), |supervisor| supervisor.between())
}

/// Whether this thread is not to wait.
pub(crate) fn is_hurried() -> bool {
    SCOPE.with_borrow(|scope| {
        scope.as_ref().and_then(|scope| scope.supervisor.as_ref()).is_some_and(|own| own.is_hurried())
    })
}

/// Before something that takes long, or waits: refused where that must not be.
pub(crate) fn check_hurry() -> Result<(), ErrorKind> {
    if is_hurried() { Err(ErrorKind::WouldWait) } else { Ok(()) }
}

/// Who is charged for what this thread has a GPU do.
#[cfg(feature = "cuda")]
pub(crate) fn payer() -> Option<Arc<dyn tensor_wasm_gpu::Payer>> {
    supervisor().and_then(|supervisor| supervisor.payer())
}

/// After the last kernel of a plan: what came of one that was stopped is nothing.
pub(crate) fn check_stopped() -> Result<(), ErrorKind> {
    let is_stopped = supervisor().is_some_and(|supervisor| supervisor.is_stopped());
    if is_stopped { Err(ErrorKind::Stopped) } else { Ok(()) }
}

impl Account {
    pub fn new(limits: AccountLimits) -> Arc<Account> {
        Account::inside(limits, None)
    }

    /// An account whose bytes this one pays for too. Nodes are counted for each by itself.
    pub fn part(self: &Arc<Account>, limits: AccountLimits) -> Arc<Account> {
        Account::inside(limits, Some(self.clone()))
    }

    fn inside(limits: AccountLimits, outer: Option<Arc<Account>>) -> Arc<Account> {
        let (bytes, nodes, plans) = (AtomicUsize::new(0), AtomicUsize::new(0), PlanCache::new());
        Arc::new(Account { limits, bytes, nodes, outer, plans })
    }

    pub fn limits(&self) -> AccountLimits {
        self.limits
    }

    /// Lets go of the plans that are kept for it, and of what they keep on GPUs.
    pub fn forget_plans(&self) {
        self.plans.clear();
    }

    pub fn used_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn used_nodes(&self) -> usize {
        self.nodes.load(Ordering::Relaxed)
    }

    /// The limit that leaves the least, and what it leaves.
    pub fn room(&self) -> (usize, usize) {
        let own = (self.limits.bytes_max, self.limits.bytes_max.saturating_sub(self.used_bytes()));
        let outer = self.outer.as_ref().map(|outer| outer.room());
        outer.filter(|(_, free)| *free < own.1).unwrap_or(own)
    }

    fn add_bytes(&self, bytes: usize) -> bool {
        let more = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= self.limits.bytes_max);
        if self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
            return false;
        }
        let is_paid = self.outer.as_ref().is_none_or(|outer| outer.add_bytes(bytes));
        if !is_paid {
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        is_paid
    }

    fn give_back(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(outer) = &self.outer {
            outer.give_back(bytes);
        }
    }
}

impl std::fmt::Debug for Account {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Account({} bytes, {} nodes, {:?})", self.used_bytes(), self.used_nodes(), self.limits)
    }
}

/// Bytes that an account pays for, if there is one, for as long as this lives.
#[derive(Default)]
pub(crate) struct Charge(Option<(Arc<Account>, usize)>);

impl Charge {
    /// None if this thread's account cannot pay.
    pub(crate) fn take(bytes: usize) -> Option<Charge> {
        match current() {
            None => Some(Charge(None)),
            Some(account) => account.add_bytes(bytes).then(|| Charge(Some((account, bytes)))),
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some((account, bytes)) = &self.0 {
            account.give_back(*bytes);
        }
    }
}

/// A node that an account has, for as long as this lives.
pub(crate) struct NodeCharge(Option<Arc<Account>>);

impl NodeCharge {
    /// It was asked for by [`check_node`], or holds an error, which takes no more than one.
    pub(crate) fn take() -> NodeCharge {
        let account = current();
        if let Some(account) = &account {
            account.nodes.fetch_add(1, Ordering::Relaxed);
        }
        NodeCharge(account)
    }
}

impl Drop for NodeCharge {
    fn drop(&mut self) {
        if let Some(account) = &self.0 {
            account.nodes.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::device::OwnDevice;
    use crate::{DType, Device, Tensor};

    fn limits(bytes_max: usize) -> AccountLimits {
        AccountLimits { bytes_max, ..AccountLimits::default() }
    }

    #[test]
    fn memory_is_charged_until_it_is_gone_on_whatever_thread() {
        let _cpu = OwnDevice::set(&Device::Cpu);
        let tenant = Account::new(limits(1 << 20));
        let own = tenant.part(limits(usize::MAX));
        let x = charged_to(&own, || Tensor::from_slice(&vec![1_f32; 10_000], &[100, 100]));
        let at_first = own.used_bytes();
        assert!(at_first >= 40_000 && tenant.used_bytes() == at_first, "{own:?}");
        let y = charged_to(&own, || {
            let y = x.matmul(&x);
            y.realize().map(|()| y)
        });
        let y = y.unwrap();
        assert!(own.used_bytes() >= 80_000, "{own:?}");
        // Nobody is charged outside.
        let z = &y + 1.0;
        z.realize().unwrap();
        let before = own.used_bytes();
        std::thread::spawn(move || drop((x, y))).join().unwrap();
        assert_eq!((own.used_bytes(), tenant.used_bytes()), (0, 0), "{before}");
        assert_eq!(own.used_nodes(), 0);
        assert_eq!(z.item_at_start(), 101.0);
        let mine = charged_to(&own, || uncharged(|| Tensor::from_slice(&[1_f32; 100], &[100])));
        assert_eq!((own.used_bytes(), own.used_nodes(), mine.numel()), (0, 0, 100));
    }

    impl Tensor {
        fn item_at_start(&self) -> f32 {
            self.to_vec::<f32>().unwrap()[0]
        }
    }

    #[test]
    fn what_a_plan_needs_is_refused_before_it_runs() {
        let _cpu = OwnDevice::set(&Device::Cpu);
        let account = Account::new(limits(100_000));
        charged_to(&account, || {
            let small = Tensor::ones(&[100, 100], DType::F32);
            small.realize().unwrap();
            let error = (&small.reshape(&[100, 100, 1]) * &small.reshape(&[100, 1, 100])).realize().unwrap_err();
            let text = error.to_string();
            assert!(matches!(*error.what, ErrorKind::OverBudget { bytes_max: 100_000, .. }), "{text}");
            assert!(text.contains("4000000") || text.contains("4194304"), "{text}");
            let used = account.used_bytes();
            assert!(used < 60_000, "nothing is left of it: {used}");
            assert_eq!((&small + &small).to_vec::<f32>().unwrap()[9], 2.0);
        });
        assert_eq!((account.used_bytes(), account.used_nodes()), (0, 0));
    }

    #[test]
    fn nodes_and_elements_are_bounded_and_nothing_is_computed_unasked() {
        let limits = AccountLimits { nodes_max: 10_000, elements_max: 1 << 20, ..AccountLimits::default() };
        let account = Account::new(limits);
        charged_to(&account, || {
            let mut x = Tensor::ones(&[4], DType::F32);
            while x.check().is_ok() {
                x = &x + 1.0;
                assert!(account.used_bytes() == 0 && account.used_nodes() < 10_100, "{account:?}");
            }
            assert!(matches!(*x.check().unwrap_err().what, ErrorKind::TooManyNodes { nodes_max: 10_000 }));
            drop(x);
            assert_eq!(account.used_nodes(), 0);
            let large = Tensor::zeros(&[1 << 20, 1 << 20], DType::U8);
            assert!(large.check().unwrap_err().to_string().contains("1048576"), "{large:?}");
            let chain = |length| (0..length).fold(Tensor::ones(&[4], DType::F32), |x, _| -x);
            assert!(!chain(2000).is_deep());
            let deep = chain(4096);
            assert!(deep.is_deep() && account.used_bytes() == 0);
            assert_eq!(deep.to_vec::<f32>().unwrap(), [1.0; 4]);
            assert!(!deep.is_deep());
        });
        assert_eq!((account.used_bytes(), account.used_nodes()), (0, 0));
    }

    struct Stopping {
        admitted: AtomicUsize,
        asked: AtomicUsize,
        is_stopped: AtomicBool,
    }

    impl Supervisor for Stopping {
        fn admit(&self, need: &PlanNeed) -> Result<(), ErrorKind> {
            self.admitted.fetch_add(need.kernels, Ordering::Relaxed);
            Ok(())
        }

        fn between(&self) -> Result<(), ErrorKind> {
            match self.asked.fetch_add(1, Ordering::Relaxed) {
                2 => {
                    self.is_stopped.store(true, Ordering::Relaxed);
                    Err(ErrorKind::Stopped)
                }
                _ => Ok(()),
            }
        }

        fn is_stopped(&self) -> bool {
            self.is_stopped.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn a_plan_ends_between_kernels_and_leaves_nothing() {
        let _cpu = OwnDevice::set(&Device::Cpu);
        let account = Account::new(AccountLimits::default());
        let supervisor = Arc::new(Stopping {
            admitted: AtomicUsize::new(0),
            asked: AtomicUsize::new(0),
            is_stopped: AtomicBool::new(false),
        });
        let x = charged_to(&account, || Tensor::from_slice(&vec![1_f32; 10_000], &[100, 100]));
        let before = account.used_bytes();
        let stopped = supervised(&account, supervisor.clone(), || {
            let product = (0..6).fold(x.clone(), |product, _| product.matmul(&x));
            product.realize()
        });
        assert!(matches!(*stopped.unwrap_err().what, ErrorKind::Stopped));
        assert_eq!((supervisor.admitted.load(Ordering::Relaxed), supervisor.asked.load(Ordering::Relaxed)), (6, 3));
        assert_eq!(account.used_bytes(), before);
    }

    struct Hurried;

    impl Supervisor for Hurried {
        fn admit(&self, need: &PlanNeed) -> Result<(), ErrorKind> {
            if need.flops > 1_000_000 { Err(ErrorKind::WouldWait) } else { Ok(()) }
        }

        fn between(&self) -> Result<(), ErrorKind> {
            Ok(())
        }

        fn is_hurried(&self) -> bool {
            true
        }

        fn is_stopped(&self) -> bool {
            false
        }
    }

    #[test]
    fn whoever_does_not_wait_runs_what_is_small_and_known() {
        let _cpu = OwnDevice::set(&Device::Cpu);
        let account = Account::new(AccountLimits::default());
        let run = |n: usize| {
            let x = Tensor::ones(&[n, n], DType::F32);
            x.matmul(&x).sum(()).item::<f32>()
        };
        let chain = |length| (0..length).fold(Tensor::ones(&[4], DType::F32), |x, _| -x).to_vec::<f32>();
        let is_refused = |error: crate::TensorError| assert!(matches!(*error.what, ErrorKind::WouldWait), "{error}");
        let hurried = |n: usize| supervised(&account, Arc::new(Hurried), || run(n));
        for n in [8, 200] {
            is_refused(hurried(n).unwrap_err());
            assert_eq!((account.used_bytes(), account.used_nodes()), (0, 0));
            charged_to(&account, || run(n)).unwrap();
        }
        assert_eq!(hurried(8).unwrap(), 512.0);
        is_refused(hurried(200).unwrap_err());
        charged_to(&account, || chain(1000)).unwrap();
        is_refused(supervised(&account, Arc::new(Hurried), || chain(1000)).unwrap_err());
        assert_eq!((account.used_bytes(), account.used_nodes()), (0, 0));
    }

    #[test]
    fn plans_are_kept_by_account() {
        let plans = || {
            let x = Tensor::ones(&[7, 11], DType::F32);
            let before = crate::plans_made();
            ((x + 3.0).sum(()) * 2.0).realize().unwrap();
            crate::plans_made() - before
        };
        let (one, other) = (Account::new(AccountLimits::default()), Account::new(AccountLimits::default()));
        let part = one.part(AccountLimits::default());
        assert_eq!((charged_to(&one, plans), charged_to(&other, plans), charged_to(&part, plans)), (1, 1, 0));
    }
}
