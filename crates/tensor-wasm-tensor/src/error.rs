//! What can go wrong, with what it was about. Building an expression never fails: an operation that makes no sense
//! makes a tensor that holds the error, and whoever reads a value that depends on it gets it, with the operation and
//! the line that asked for it.

use std::cell::Cell;
use std::panic::Location;
use std::sync::Arc;

use crate::dtype::DType;
use crate::graph::Node;
use crate::shape::RANK_MAX;

pub type Result<T> = std::result::Result<T, TensorError>;

/// An error, the operation that made it, and where that was called.
#[derive(Clone, thiserror::Error)]
#[error("{operation}: {what} ({}:{}:{})", at.file(), at.line(), at.column())]
pub struct TensorError {
    pub operation: &'static str,
    pub what: Arc<ErrorKind>,
    pub at: &'static Location<'static>,
}

impl TensorError {
    pub(crate) fn new(operation: &'static str, what: ErrorKind, at: &'static Location<'static>) -> TensorError {
        let operation = asked_operation().unwrap_or(operation);
        TensorError { operation, what: Arc::new(what), at: caller(at) }
    }

    /// What went wrong while a node was computed, in the words of the operation that somebody asked for.
    pub(crate) fn of_node(node: &Node, computed: &'static str, what: ErrorKind) -> TensorError {
        let operation = node.asked.unwrap_or(computed);
        let what = match (operation, what) {
            // Classes below zero were moved out of the range, by as many as there are.
            ("cross_entropy", ErrorKind::OutOfRange { index, size, .. }) => {
                let classes = i64::try_from(size).unwrap_or(i64::MAX);
                let class = if index < 0 { index.saturating_add(classes) } else { index };
                ErrorKind::BadArgument { why: format!("class {class}, and there are {size}, from 0 on") }
            }
            ("embedding", ErrorKind::OutOfRange { index, size, .. }) => {
                ErrorKind::BadArgument { why: format!("row {index} of a table of {size} rows") }
            }
            (_, what) => what,
        };
        TensorError { operation, what: Arc::new(what), at: node.at }
    }
}

/// For people: it is what a `main` prints that returns it.
impl std::fmt::Debug for TensorError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

thread_local! {
    /// What somebody else's program asked for that is being made.
    static ASKED: Cell<Option<Asked>> = const { Cell::new(None) };
}

/// A line of a program, and the operation that it called, where errors should name that one and not what it is composed
/// of.
#[derive(Clone, Copy)]
struct Asked {
    at: &'static Location<'static>,
    operation: Option<&'static str>,
}

/// Makes something that is composed of several operations: whatever is wrong with one of them is said of the line that
/// asked for all of them, and not of a line in here.
pub(crate) fn asked_at<R>(at: &'static Location<'static>, make: impl FnOnce() -> R) -> R {
    asked(Asked { at, operation: None }, make)
}

/// The same for an operation that has a name of its own.
pub(crate) fn asked_as<R>(operation: &'static str, at: &'static Location<'static>, make: impl FnOnce() -> R) -> R {
    asked(Asked { at, operation: Some(operation) }, make)
}

fn asked<R>(what: Asked, make: impl FnOnce() -> R) -> R {
    struct Before(Option<Asked>);
    impl Drop for Before {
        fn drop(&mut self) {
            ASKED.set(self.0);
        }
    }
    // The outermost counts.
    let outer = ASKED.get();
    let at = outer.map_or(what.at, |outer| outer.at);
    let operation = outer.and_then(|outer| outer.operation).or(what.operation);
    let _before = Before(ASKED.replace(Some(Asked { at, operation })));
    make()
}

/// The line to name for an operation that was called at one.
pub(crate) fn caller(at: &'static Location<'static>) -> &'static Location<'static> {
    ASKED.get().map_or(at, |asked| asked.at)
}

/// The operation to name instead of one that it is composed of.
pub(crate) fn asked_operation() -> Option<&'static str> {
    ASKED.get().and_then(|asked| asked.operation)
}

#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ErrorKind {
    #[error("shapes {left:?} and {right:?} do not broadcast")]
    NoBroadcast { left: Vec<usize>, right: Vec<usize> },
    #[error("axis {axis} of a tensor of shape {shape:?}: there are axes {}", axes(shape))]
    NoSuchAxis { axis: isize, shape: Vec<usize> },
    #[error("axis {axis} is named twice")]
    AxisTwice { axis: isize },
    #[error("operands are {left} and {right}; make them the same with .cast()")]
    MixedDTypes { left: DType, right: DType },
    #[error("not for elements of type {found}; it takes {takes}")]
    WrongDType { found: DType, takes: &'static str },
    #[error("{} elements of shape {from:?} cannot have shape {to:?}", from.iter().product::<usize>())]
    Reshape { from: Vec<usize>, to: Vec<isize> },
    #[error("shape {shape:?}: a tensor has at most {RANK_MAX} axes and {} bytes", isize::MAX)]
    TooLarge { shape: Vec<usize> },
    #[error("shape {found:?}, and {expected} is needed")]
    WrongShape { found: Vec<usize>, expected: String },
    #[error("{why}")]
    BadArgument { why: String },
    #[error("index {index} of axis {axis}, which has {size}")]
    OutOfRange { index: i64, axis: usize, size: usize },
    #[error(
        "no {bytes} bytes of memory are to be had (tensors have {} of {}: set_memory_limit)",
        crate::cpu::used_bytes(),
        crate::cpu::memory_limit()
    )]
    OutOfMemory { bytes: usize },
    #[error("{bytes} bytes of memory are needed; at most {bytes_max} may be had, and {free} of them are free")]
    OverBudget { bytes: usize, bytes_max: usize, free: usize },
    #[error("there are {nodes_max} operations and tensors already, which is the most; drop some, or compute first")]
    TooManyNodes { nodes_max: usize },
    #[error("shape {shape:?}: a tensor has at most {elements_max} elements here")]
    TooManyElements { shape: Vec<usize>, elements_max: usize },
    #[error("it takes {estimate_ms} ms at least, and {left_ms} are left")]
    NoTime { estimate_ms: u64, left_ms: u64 },
    #[error("it was stopped")]
    Stopped,
    #[error("it takes longer than whoever asked is to wait")]
    WouldWait,
    #[error("the tensor of shape {shape:?} is not a single number; reduce it first, as with .sum(()) or .mean(())")]
    NotScalar { shape: Vec<usize> },
    #[error("the graph was freed by an earlier backward(); use grad() to go through it more than once")]
    GraphFreed,
    #[error("nothing it depends on asks for gradients: make it from a Variable or x.with_grad(), outside of no_grad()")]
    NoGradient,
    #[error("input {input} is nothing that gradients are asked for; x.with_grad() returns a new tensor, which is")]
    NotAsked { input: usize },
    #[error("the gradient of element {element} of input {input} is {gradient}, and the slope there {slope}")]
    WrongGradient { input: usize, element: usize, gradient: f64, slope: f64 },
    #[error("an integer is divided by zero")]
    DivisionByZero,
    #[error("elements are {found}, and {asked} was asked for; read them as {found}, or .cast() first")]
    ElementType { found: DType, asked: DType },
    #[error("no device {name:?}: {why}")]
    NoDevice { name: String, why: String },
    #[error("the device: {why}")]
    Device { why: String },
    /// What it was doing is gone, and what lay there; it can be asked again.
    #[error("the device was lost: {why}")]
    DeviceLost { why: String },
    #[error("{bytes} bytes of the device's memory are needed; {used} of {limit} are used, and there are {free} free")]
    DeviceMemory { bytes: u64, used: u64, limit: u64, free: u64 },
    #[error("{file}: {why}")]
    File { file: String, why: String },
    #[error("this is a bug in this library: {why}")]
    Bug { why: String },
}

fn axes(shape: &[usize]) -> String {
    match shape.len() {
        0 => "none".to_owned(),
        rank => format!("0 to {}, and from the end -1 to -{rank}", rank - 1),
    }
}
