//! The graph behind tensors: nodes that know how they are computed until they are, and then what they are.

pub(crate) mod numbers;
pub(crate) mod op;

use std::panic::Location;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};

use self::op::{Movement, Op};
#[cfg(feature = "cuda")]
use crate::account;
use crate::account::NodeCharge;
use crate::cpu::memory::CpuBuffer;
#[cfg(feature = "cuda")]
use crate::cuda::CudaBuffer;
use crate::dtype::DType;
use crate::error::{ErrorKind, asked_operation, caller};
use crate::shape::{Layout, Shape};
use crate::train::Gradients;

/// Nodes are numbered as they are made, so inputs have smaller numbers than what is made of them: sorting by number is
/// sorting topologically.
static NODES: AtomicU64 = AtomicU64::new(0);

pub(crate) struct Node {
    pub id: u64,
    pub shape: Shape,
    pub dtype: DType,
    /// Whether gradients flow through it.
    pub requires_grad: bool,
    /// Where the user asked for it.
    pub at: &'static Location<'static>,
    /// The operation that errors name, if this is a part of one.
    pub asked: Option<&'static str>,
    pub state: Mutex<NodeState>,
    /// Operations that have to be computed for it, one after the other; none once it is.
    pub depth: AtomicU32,
    /// There once somebody asks for gradients of it, or looks at them.
    pub gradients: OnceLock<Arc<Gradients>>,
    /// Whether gradients are asked for, and not only flow through it.
    pub is_asked: bool,
    /// Whether it holds an error, as its operation then does.
    pub is_failed: bool,
    /// Whose node it is, as long as it lives.
    #[expect(dead_code, reason = "held for its end")]
    pub charge: NodeCharge,
}

#[derive(Default)]
pub(crate) struct NodeState {
    /// How it is computed. Gone once it is, unless gradients flow through it.
    pub recipe: Option<Recipe>,
    /// Boxed: most nodes never have one, and are moved when they are made.
    pub value: Option<Box<Value>>,
}

#[derive(Clone)]
pub(crate) struct Recipe {
    pub op: Op,
    pub inputs: Inputs,
}

/// Nearly all have at most two.
pub(crate) type Inputs = SmallVec<[Arc<Node>; 2]>;

/// Elements in a buffer.
#[derive(Clone)]
pub(crate) struct Value {
    pub storage: Arc<Storage>,
    pub layout: Layout,
}

/// Elements, in the memory of one device or of several: they never change, so a copy stays what it is.
#[cfg_attr(not(feature = "cuda"), derive(Default))]
pub(crate) struct Storage {
    cpu: OnceLock<CpuBuffer>,
    #[cfg(feature = "cuda")]
    cuda: Mutex<Option<Arc<CudaBuffer>>>,
    /// Whether a plan made them, and not somebody who has them on that device.
    #[cfg(feature = "cuda")]
    is_computed: bool,
    /// No other has it, not even one that is made where this one was.
    #[cfg(feature = "cuda")]
    id: u64,
}

#[cfg(feature = "cuda")]
impl Default for Storage {
    fn default() -> Storage {
        static STORAGES: AtomicU64 = AtomicU64::new(0);
        let id = STORAGES.fetch_add(1, Ordering::Relaxed);
        Storage { cpu: OnceLock::new(), cuda: Mutex::default(), is_computed: false, id }
    }
}

impl Storage {
    pub(crate) fn of_cpu(buffer: CpuBuffer) -> Storage {
        Storage { cpu: OnceLock::from(buffer), ..Storage::default() }
    }

    /// The same, as what a plan made.
    pub(crate) fn computed(self) -> Storage {
        Storage {
            #[cfg(feature = "cuda")]
            is_computed: true,
            ..self
        }
    }

    /// Whether it is so many bytes of this library's own memory, in one place and nowhere else.
    fn is_own(&self, bytes: usize) -> bool {
        #[cfg(feature = "cuda")]
        if let Some(buffer) = &*self.cuda.lock() {
            return self.cpu.get().is_none() && buffer.bytes() == bytes;
        }
        self.cpu.get().is_some_and(|buffer| buffer.is_own() && buffer.bytes() == bytes)
    }

    /// What a CPU writes over is no longer what a GPU has a copy of.
    pub(crate) fn forget_copies(&self) {
        #[cfg(feature = "cuda")]
        self.cuda.lock().take();
    }

    /// On a CPU, if it is there.
    pub(crate) fn here(&self) -> Option<&CpuBuffer> {
        self.cpu.get()
    }

    /// On a CPU; copied there from wherever it is.
    pub(crate) fn cpu(&self) -> Result<&CpuBuffer, ErrorKind> {
        #[cfg(feature = "cuda")]
        if self.cpu.get().is_none()
            && let Some(buffer) = self.cuda.lock().clone()
        {
            account::check_hurry()?;
            // Another thread may have been quicker.
            let _ = self.cpu.set(buffer.read()?);
        }
        self.cpu.get().ok_or_else(|| ErrorKind::Bug { why: "a tensor has no elements".to_owned() })
    }
}

#[cfg(feature = "cuda")]
impl Storage {
    /// On a GPU, if it is there and nowhere else.
    pub(crate) fn only_cuda(&self) -> Option<Arc<CudaBuffer>> {
        if self.cpu.get().is_some() { None } else { self.cuda.lock().clone() }
    }

    pub(crate) fn of_cuda(buffer: Arc<CudaBuffer>) -> Storage {
        Storage { cuda: Mutex::new(Some(buffer)), ..Storage::default() }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn is_computed(&self) -> bool {
        self.is_computed
    }

    pub(crate) fn bytes(&self) -> usize {
        match self.cpu.get() {
            Some(buffer) => buffer.bytes(),
            None => self.cuda.lock().as_ref().map_or(0, |buffer| buffer.bytes()),
        }
    }

    /// Whether it is on a device, perhaps among others.
    pub(crate) fn is_on(&self, device: &crate::cuda::CudaDevice) -> bool {
        self.cuda.lock().as_ref().is_some_and(|buffer| buffer.is_there() && buffer.device() == device)
    }

    /// Waits until it is computed.
    pub(crate) fn wait(&self) -> Result<(), ErrorKind> {
        let buffer = self.cuda.lock().clone();
        buffer.map_or(Ok(()), |buffer| buffer.wait())
    }

    /// The CUDA device that it is on, if it is nowhere else.
    pub(crate) fn cuda_device(&self) -> Option<crate::cuda::CudaDevice> {
        if self.cpu.get().is_some() {
            return None;
        }
        self.cuda.lock().as_ref().map(|buffer| buffer.device().clone())
    }

    /// On a CUDA device; copied there from wherever it is, from another one through the CPU, also if it was there and
    /// the device was lost since. Of several devices, the last one's copy is kept.
    pub(crate) fn cuda(&self, device: &crate::cuda::CudaDevice) -> Result<Arc<CudaBuffer>, ErrorKind> {
        match self.on(device)? {
            Some(buffer) => Ok(buffer),
            None => {
                let made = Arc::new(CudaBuffer::write(device, self.cpu()?)?);
                self.keep(&made);
                Ok(made)
            }
        }
    }

    /// On a CUDA device if it is there; an error if it was on one that was lost, and nowhere else.
    pub(crate) fn on(&self, device: &crate::cuda::CudaDevice) -> Result<Option<Arc<CudaBuffer>>, ErrorKind> {
        let there = self.cuda.lock().clone();
        match there {
            // A copy that failed is made again.
            Some(buffer) if buffer.has_failed() && self.cpu.get().is_some() => Ok(None),
            Some(buffer) if buffer.is_there() && buffer.device() == device => Ok(Some(buffer)),
            Some(buffer) if !buffer.is_there() && self.cpu.get().is_none() => Err(ErrorKind::DeviceLost {
                why: "it was lost, and elements with it that were nowhere else".to_owned(),
            }),
            Some(_) | None => Ok(None),
        }
    }

    /// Keeps a copy that somebody has made.
    pub(crate) fn keep(&self, copy: &Arc<CudaBuffer>) {
        *self.cuda.lock() = Some(copy.clone());
    }
}

impl Node {
    pub(crate) fn new(
        op: Op,
        inputs: Inputs,
        shape: Shape,
        dtype: DType,
        requires_grad: bool,
        at: &'static Location<'static>,
    ) -> Arc<Node> {
        let depth = inputs.iter().map(|input| input.depth.load(Ordering::Relaxed)).max().unwrap_or(0);
        let is_failed = matches!(op, Op::Failed(_));
        let state = NodeState { recipe: Some(Recipe { op, inputs }), value: None };
        Node::with(state, depth.saturating_add(1), shape, dtype, requires_grad, is_failed, at)
    }

    pub(crate) fn of_value(
        value: Value,
        dtype: DType,
        requires_grad: bool,
        at: &'static Location<'static>,
    ) -> Arc<Node> {
        let shape = value.layout.shape;
        Node::with(NodeState { recipe: None, value: Some(Box::new(value)) }, 0, shape, dtype, requires_grad, false, at)
    }

    fn with(
        state: NodeState,
        depth: u32,
        shape: Shape,
        dtype: DType,
        requires_grad: bool,
        is_failed: bool,
        at: &'static Location<'static>,
    ) -> Arc<Node> {
        let (id, at) = (NODES.fetch_add(1, Ordering::Relaxed), caller(at));
        let (state, depth, gradients) = (Mutex::new(state), AtomicU32::new(depth), OnceLock::new());
        let (asked, charge, is_asked) = (asked_operation(), NodeCharge::take(), false);
        Arc::new(Node {
            id,
            shape,
            dtype,
            requires_grad,
            at,
            asked,
            state,
            depth,
            gradients,
            is_asked,
            is_failed,
            charge,
        })
    }

    /// The same elements as another node, as something that gradients are asked for.
    pub(crate) fn asked(of: &Arc<Node>, at: &'static Location<'static>) -> Arc<Node> {
        let recipe = Recipe { op: Op::Move(Movement::Reshape), inputs: smallvec![of.clone()] };
        let state = Mutex::new(NodeState { recipe: Some(recipe), value: None });
        let id = NODES.fetch_add(1, Ordering::Relaxed);
        let gradients = OnceLock::from(Arc::new(Gradients::default()));
        let depth = AtomicU32::new(of.depth.load(Ordering::Relaxed).saturating_add(1));
        Arc::new(Node {
            id,
            shape: of.shape,
            dtype: of.dtype,
            requires_grad: true,
            at,
            asked: asked_operation(),
            state,
            depth,
            gradients,
            is_asked: true,
            is_failed: false,
            charge: NodeCharge::take(),
        })
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked
    }

    /// What its elements are in, if nobody can reach them but through the one reference that the caller has, and if
    /// they may be overwritten. Nobody can reach them later either, as long as the caller gives nobody that reference.
    pub(crate) fn sole_storage(node: &Arc<Node>) -> Option<Arc<Storage>> {
        // The caller's, and this function's.
        const REFERENCES: usize = 2;
        let bytes = node.shape.numel() * node.dtype.size();
        let (mut node, mut found) = (node.clone(), None::<Arc<Storage>>);
        let mut holders = 1;
        loop {
            if Arc::strong_count(&node) != REFERENCES {
                return None;
            }
            let state = node.state.lock();
            if let Some(value) = &state.value {
                let storage = found.get_or_insert_with(|| value.storage.clone());
                if !Arc::ptr_eq(storage, &value.storage) || !value.layout.is_contiguous() {
                    return None;
                }
                holders += 1;
            }
            // What is trained is a view of what was computed.
            let of = match &state.recipe {
                Some(Recipe { op: Op::Move(Movement::Reshape), inputs }) => inputs.first().cloned(),
                _ => None,
            };
            drop(state);
            match of {
                Some(of) => node = of,
                None => break,
            }
        }
        found.filter(|storage| Arc::strong_count(storage) == holders && storage.is_own(bytes))
    }

    /// Takes in what it was computed to be, and lets go of what only its computing needed.
    pub(crate) fn realize(&self, value: Value) {
        self.depth.store(0, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.value = Some(Box::new(value));
        let gone = if self.requires_grad { None } else { state.recipe.take() };
        drop(state);
        // Outside the lock: dropping it may drop a whole graph.
        drop(gone);
    }
}

impl Drop for Node {
    /// A chain of a million operations must not take a million stack frames to drop.
    fn drop(&mut self) {
        let Some(recipe) = self.state.get_mut().recipe.take() else { return };
        let mut left = recipe.inputs;
        while let Some(node) = left.pop() {
            if let Some(mut last) = Arc::into_inner(node)
                && let Some(recipe) = last.state.get_mut().recipe.take()
            {
                left.extend(recipe.inputs);
            }
        }
    }
}
