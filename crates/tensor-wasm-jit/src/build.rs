//! Kernels that a host builds, operation by operation, instead of writing Wasm: a tensor library lowers its expressions
//! so. What is built is compiled like any other kernel: the same limits, the same fence, the same devices.
//!
//! A builder checks as it goes: types, that a value is used where it is known to have been computed, that blocks are
//! closed and branches go to open ones, and how much is built. Whatever is wrong is an error, never a panic, and the
//! builder stays usable.
//!
//! ```
//! use tensor_wasm_jit::build::{Axis, BinaryOp, BuildError, IdKind, KernelBuilder};
//! use tensor_wasm_jit::Ty;
//!
//! // y[i] = a * x[i] + y[i]
//! fn saxpy() -> Result<(), Box<dyn std::error::Error>> {
//!     let mut b = KernelBuilder::new("saxpy");
//!     let (n, a) = (b.scalar(Ty::I32)?, b.scalar(Ty::F32)?);
//!     let (x, y) = (b.window()?, b.window()?);
//!     let i = b.id(IdKind::Global, Axis::X)?;
//!     let is_inside = b.binary(BinaryOp::I32LtU, i, n)?;
//!     b.begin_if(is_inside, &[])?;
//!     let (x, y) = (b.element(x, i, 4)?, b.element(y, i, 4)?);
//!     let (x, old) = (b.load(Ty::F32, x, 0)?, b.load(Ty::F32, y, 0)?);
//!     let sum = b.fma(a, x, old)?;
//!     b.store(sum, y, 0)?;
//!     b.end()?;
//!     let kernel = b.finish()?;
//!     assert!(kernel.compile()?.ptx.contains("fma.rn.f32"));
//!     Ok(())
//! }
//! saxpy().unwrap();
//! ```

mod gpu;

pub use self::gpu::Accumulators;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::assemble::{Assembler, BARRIERS_MAX, BlockKind, Jump, OPS_MAX, SHARED_BYTES_MAX};
use crate::gpu::Target;
use crate::image::KernelImage;
use crate::ir::{Access, Address, Body, Label, Math, Op, Reg, SUBGROUP, Site, TrapKind, Ty};
pub use crate::ir::{Axis, Bin as BinaryOp, Id as IdKind, Rmw as AtomicOp, Un as UnaryOp};
use crate::legalize::{self, WindowSizes};
pub use crate::math::MathFunction;
use crate::math::TypedFunction;
use crate::profile::PARAMS_MAX;
use crate::refusal::{Refusal, SourceLocation};
use crate::{HostImage, exchange, host, pressure, ptx};

/// Blocks inside one another: each is looked through for every value that is used.
pub const DEPTH_MAX: usize = 256;

/// Labels of one branch table.
pub const TABLE_LABELS_MAX: usize = 1_024;

/// Variables that the blocks of a kernel carry, counted once for each block and each branch to one.
pub const CARRIED_MAX: usize = 4 * OPS_MAX;

/// Characters of a location's name, and of the kernel's.
const NAME_CHARS_MAX: usize = 200;

/// Why a builder refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    #[error("{what} takes a value of type {expected:?}, and was given one of type {found:?}")]
    Type { what: &'static str, expected: Ty, found: Ty },
    #[error("{what} is not possible for type {found:?}")]
    NoSuchType { what: &'static str, found: Ty },
    #[error("{what} takes {expected} operands, and was given {found}")]
    Operands { what: &'static str, expected: usize, found: usize },
    #[error(
        "{bytes} bytes of a value of type {ty:?} cannot be accessed; loads and stores move 1, 2, 4 or 8, no more than it has"
    )]
    Width { ty: Ty, bytes: u32 },
    #[error("a value, variable or block of another builder was used")]
    Foreign,
    #[error("a value was used outside the block that computes it; carry it out in a variable")]
    OutOfScope,
    #[error("a variable was assigned inside a block that does not carry it; name it where the block begins")]
    NotCarried,
    #[error("{what}, but nothing can follow a branch, a return or a trap until its block ends")]
    Unreachable { what: &'static str },
    #[error("{what}")]
    Structure { what: &'static str },
    #[error("a kernel has at most {max} {what}")]
    Limit { what: &'static str, max: usize },
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// What an operation computed. Belongs to its builder, and to the block it was made in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value {
    builder: u32,
    scope: u32,
    reg: Reg,
}

/// A name for one value after another: assigned on different paths, it is what the path that was taken made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variable {
    builder: u32,
    index: u32,
}

/// A block, loop or `if` that branches can go to while it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockLabel {
    builder: u32,
    label: u32,
}

/// A variable that is assigned inside a block: the register that a branch to it moves it to, and what it was before.
#[derive(Debug, Clone, Copy)]
struct Merge {
    variable: u32,
    to: Reg,
    before: Reg,
}

struct OpenBlock {
    kind: BlockKind,
    label: Label,
    /// What is made inside is used inside.
    scope: u32,
    merges: Vec<Merge>,
    /// The variables of the merges.
    carried: HashSet<u32>,
    /// Nothing from here to its end can be reached.
    is_dead: bool,
}

/// The register that a variable is at the moment, and the block it was declared in.
struct VariableSlot {
    reg: Reg,
    scope: u32,
}

/// Tells the builders of a process apart, so that one's values are not taken for another's.
static BUILDERS: AtomicU32 = AtomicU32::new(0);

/// Builds one kernel.
pub struct KernelBuilder {
    builder: u32,
    name: String,
    asm: Assembler,
    params: Vec<Reg>,
    windows: Vec<bool>,
    variables: Vec<VariableSlot>,
    /// The innermost last; the first is the whole kernel.
    blocks: Vec<OpenBlock>,
    scopes: u32,
    carried: usize,
    place: SourceLocation,
    target: Target,
}

/// A kernel that was built, ready to be compiled for any device.
#[derive(Debug, Clone)]
pub struct BuiltKernel {
    pub(crate) body: Body,
    pub(crate) windows: Vec<bool>,
}

impl BuiltKernel {
    /// Which parameters are windows, in the order they were made.
    pub fn windows(&self) -> &[bool] {
        &self.windows
    }

    pub fn name(&self) -> &str {
        &self.body.name
    }

    /// The types of its parameters; a window is an address.
    pub fn types(&self) -> Vec<Ty> {
        self.body.params.iter().map(|reg| self.body.types[reg.0 as usize]).collect()
    }

    /// Everything that it is, as text: for a reader, and so that two that are the same are known to be.
    pub fn text(&self) -> String {
        let BuiltKernel { body, windows } = self;
        format!("windows {windows:?}\n{body:#?}\n")
    }

    /// Compiles it to PTX, as [`Program::compile`](crate::Program::compile) does.
    pub fn compile(&self) -> Result<KernelImage, Refusal> {
        ptx::emit(&legalize::legalize(self.body.clone(), &self.windows, WindowSizes::FitAccesses))
    }

    /// The same for windows of any size, even smaller than an access: slower.
    pub fn compile_small(&self) -> Result<KernelImage, Refusal> {
        ptx::emit(&legalize::legalize(self.body.clone(), &self.windows, WindowSizes::Any))
    }

    /// Compiles it without a fence: for kernels whose host vouches for every access, for the end of every loop, and for
    /// every division. Its parameters are the addresses of windows, each of fewer than 4 GiB, and numbers; nothing
    /// else. Refused if an address is not known to be of one window, or of shared memory.
    pub fn compile_trusted(&self) -> Result<KernelImage, Refusal> {
        ptx::emit(&legalize::legalize(self.body.clone(), &self.windows, WindowSizes::Trusted))
    }

    /// Compiles it for a CPU.
    pub fn compile_host(&self) -> Result<HostImage, Refusal> {
        let body = exchange::for_cpu(self.body.clone())?;
        host::emit(&legalize::legalize(body, &self.windows, WindowSizes::FitAccesses))
    }
}

impl KernelBuilder {
    /// For every device.
    pub fn new(name: &str) -> KernelBuilder {
        KernelBuilder::on(name, Target::default())
    }

    /// For a device that has at least so much. Whoever builds asks for it ([`KernelBuilder::target`]) before using what
    /// not every device has.
    pub fn on(name: &str, target: Target) -> KernelBuilder {
        let name: String = name.chars().take(NAME_CHARS_MAX).collect();
        let mut asm = Assembler::default();
        let label = asm.label();
        let (merges, carried) = (Vec::new(), HashSet::new());
        let whole = OpenBlock { kind: BlockKind::Block, label, scope: 0, merges, carried, is_dead: false };
        KernelBuilder {
            builder: BUILDERS.fetch_add(1, Ordering::Relaxed),
            place: SourceLocation { function: name.clone(), offset: None },
            name,
            asm,
            params: Vec::new(),
            windows: Vec::new(),
            variables: Vec::new(),
            blocks: vec![whole],
            scopes: 1,
            carried: 0,
            target,
        }
    }

    /// What the device has that it is for.
    pub fn target(&self) -> Target {
        self.target
    }

    /// What follows is blamed on this, if it traps: whatever helps whoever reads it.
    pub fn locate(&mut self, what: &str) {
        self.place = SourceLocation { function: what.chars().take(NAME_CHARS_MAX).collect(), offset: None };
    }

    // ---- parameters and constants

    /// A parameter that is given a buffer: the address of its first byte, a multiple of 16.
    pub fn window(&mut self) -> Result<Value, BuildError> {
        self.param(Ty::I32, true)
    }

    /// A parameter that is a number.
    pub fn scalar(&mut self, ty: Ty) -> Result<Value, BuildError> {
        self.param(ty, false)
    }

    fn param(&mut self, ty: Ty, is_window: bool) -> Result<Value, BuildError> {
        if self.params.len() >= PARAMS_MAX {
            return Err(BuildError::Limit { what: "parameters", max: PARAMS_MAX });
        }
        if !self.asm.ops.is_empty() {
            return Err(BuildError::Structure { what: "parameters are made before the first operation" });
        }
        let reg = self.asm.register(ty);
        self.params.push(reg);
        self.windows.push(is_window);
        Ok(self.value(reg))
    }

    pub fn i32(&mut self, number: i32) -> Result<Value, BuildError> {
        self.constant(Ty::I32, u64::from(number.cast_unsigned()))
    }

    pub fn i64(&mut self, number: i64) -> Result<Value, BuildError> {
        self.constant(Ty::I64, number.cast_unsigned())
    }

    pub fn f32(&mut self, number: f32) -> Result<Value, BuildError> {
        self.constant(Ty::F32, u64::from(number.to_bits()))
    }

    pub fn f64(&mut self, number: f64) -> Result<Value, BuildError> {
        self.constant(Ty::F64, number.to_bits())
    }

    /// A constant by its bits; of 32-bit types the lower half counts.
    pub fn constant(&mut self, ty: Ty, bits: u64) -> Result<Value, BuildError> {
        self.begin("a constant")?;
        let bits = if ty.bytes() == 4 { bits & u64::from(u32::MAX) } else { bits };
        let reg = self.asm.constant(ty, bits);
        Ok(self.value(reg))
    }

    // ---- computing

    pub fn unary(&mut self, op: UnaryOp, a: Value) -> Result<Value, BuildError> {
        self.begin(op.name())?;
        let (a, site) = (self.operand(op.name(), a, op.from())?, self.site());
        let reg = self.asm.unary(op, a, site);
        Ok(self.value(reg))
    }

    /// Also comparisons, whose result is an i32: 1 or 0.
    pub fn binary(&mut self, op: BinaryOp, a: Value, b: Value) -> Result<Value, BuildError> {
        self.begin(op.name())?;
        let (a, b) = (self.operand(op.name(), a, op.from())?, self.operand(op.name(), b, op.from())?);
        let site = self.site();
        let reg = self.asm.binary(op, a, b, site);
        Ok(self.value(reg))
    }

    /// `a * b + c` of one float type, rounded once.
    pub fn fma(&mut self, a: Value, b: Value, c: Value) -> Result<Value, BuildError> {
        self.begin("fma")?;
        let ty = self.float("fma", a)?;
        let operands = [self.operand("fma", a, ty)?, self.operand("fma", b, ty)?, self.operand("fma", c, ty)?];
        let to = self.asm.register(ty);
        self.asm.push(Op::Math { op: if ty == Ty::F32 { Math::FmaF32 } else { Math::FmaF64 }, to, operands });
        Ok(self.value(to))
    }

    /// One over the square root. In single precision at most 2 ulp from the truth, and not the same on every device.
    pub fn rsqrt(&mut self, x: Value) -> Result<Value, BuildError> {
        self.begin("rsqrt")?;
        let ty = self.float("rsqrt", x)?;
        let x = self.operand("rsqrt", x, ty)?;
        if ty == Ty::F64 {
            let site = self.site();
            let reg = self.asm.rsqrt_double(x, site);
            return Ok(self.value(reg));
        }
        let to = self.asm.register(ty);
        self.asm.push(Op::Math { op: Math::RsqrtF32, to, operands: [x, x, x] });
        Ok(self.value(to))
    }

    /// A function that is expanded into a polynomial, with the same bits on every device.
    pub fn math(&mut self, function: MathFunction, operands: &[Value]) -> Result<Value, BuildError> {
        let what = function.name();
        self.begin(what)?;
        let Some((first, last)) = operands.first().zip(operands.last()) else {
            return Err(BuildError::Operands { what, expected: function.operands(), found: 0 });
        };
        if operands.len() != function.operands() {
            return Err(BuildError::Operands { what, expected: function.operands(), found: operands.len() });
        }
        let ty = self.float(what, *first)?;
        let (x, y) = (self.operand(what, *first, ty)?, self.operand(what, *last, ty)?);
        let site = self.site();
        let reg = self.asm.expand(TypedFunction { what: function, ty }, x, y, site);
        Ok(self.value(reg))
    }

    /// `a` where the condition, an i32, is not zero, else `b`.
    pub fn select(&mut self, condition: Value, a: Value, b: Value) -> Result<Value, BuildError> {
        self.begin("select")?;
        let condition = self.operand("select", condition, Ty::I32)?;
        let ty = self.ty(a)?;
        let (a, b) = (self.operand("select", a, ty)?, self.operand("select", b, ty)?);
        let reg = self.asm.select(condition, a, b);
        Ok(self.value(reg))
    }

    /// Where the work item is, or how many there are.
    pub fn id(&mut self, id: IdKind, axis: Axis) -> Result<Value, BuildError> {
        self.begin("an id")?;
        let reg = self.asm.id(id, axis);
        Ok(self.value(reg))
    }

    // ---- memory

    /// The address of an element: `base + index * bytes`, for sizes that are powers of two.
    pub fn element(&mut self, base: Value, index: Value, bytes: u32) -> Result<Value, BuildError> {
        if !bytes.is_power_of_two() {
            return Err(BuildError::Structure { what: "an element's size is a power of two" });
        }
        let shift = self.i32(bytes.trailing_zeros().cast_signed())?;
        let offset = self.binary(BinaryOp::I32Shl, index, shift)?;
        self.binary(BinaryOp::I32Add, base, offset)
    }

    /// Memory that the work items of a group share, zero at first: the address of so many bytes of it.
    pub fn shared(&mut self, bytes: u32) -> Result<Value, BuildError> {
        self.take_shared(bytes, SHARED_BYTES_MAX)
    }

    fn take_shared(&mut self, bytes: u32, bytes_max: u32) -> Result<Value, BuildError> {
        self.begin("shared memory")?;
        let site = self.site();
        match self.asm.shared(u64::from(bytes), bytes_max, site) {
            Some(reg) => Ok(self.value(reg)),
            None => Err(BuildError::Limit { what: "bytes of shared memory", max: bytes_max as usize }),
        }
    }

    /// What another item of the subgroup has: the one whose number in the group, counted along x first, differs in
    /// these bits, which are below [`SUBGROUP`]. Every item of the group comes here, and the group is
    /// made of whole subgroups.
    pub fn shuffle(&mut self, value: Value, mask: u32) -> Result<Value, BuildError> {
        self.begin("a shuffle")?;
        if mask >= SUBGROUP {
            return Err(BuildError::Structure { what: "items of a subgroup differ in five bits" });
        }
        let ty = self.ty(value)?;
        let (value, site) = (self.operand("a shuffle", value, ty)?, self.site());
        if !self.asm.exchange() {
            return Err(BuildError::Limit { what: "barriers", max: BARRIERS_MAX });
        }
        let to = self.asm.register(ty);
        self.asm.push(Op::Shuffle { to, value, mask, site });
        Ok(self.value(to))
    }

    /// Every item of the group comes here, or to its end, before any goes on.
    pub fn barrier(&mut self) -> Result<(), BuildError> {
        self.begin("a barrier")?;
        let site = self.site();
        if self.asm.barrier(site) { Ok(()) } else { Err(BuildError::Limit { what: "barriers", max: BARRIERS_MAX }) }
    }

    /// Loads a whole value from an address and an offset.
    pub fn load(&mut self, ty: Ty, base: Value, offset: u32) -> Result<Value, BuildError> {
        self.load_narrow(ty, ty.bytes(), false, base, offset)
    }

    /// Loads some bytes and extends them, with the sign or with zeros.
    pub fn load_narrow(
        &mut self,
        ty: Ty,
        bytes: u32,
        is_signed: bool,
        base: Value,
        offset: u32,
    ) -> Result<Value, BuildError> {
        self.begin("a load")?;
        let access = self.width(ty, bytes, is_signed)?;
        let (at, site) = (self.address("a load", base, offset)?, self.site());
        let to = self.asm.register(ty);
        self.asm.push(Op::Load { to, access, at, site });
        Ok(self.value(to))
    }

    /// Stores a whole value.
    pub fn store(&mut self, value: Value, base: Value, offset: u32) -> Result<(), BuildError> {
        let bytes = self.ty(value)?.bytes();
        self.store_narrow(bytes, value, base, offset)
    }

    /// Stores the lowest bytes of an integer.
    pub fn store_narrow(&mut self, bytes: u32, value: Value, base: Value, offset: u32) -> Result<(), BuildError> {
        self.begin("a store")?;
        let ty = self.ty(value)?;
        let access = self.width(ty, bytes, false)?;
        let value = self.operand("a store", value, ty)?;
        let (at, site) = (self.address("a store", base, offset)?, self.site());
        self.asm.push(Op::Store { access, at, value, site });
        Ok(())
    }

    /// An atomic load of 4 or 8 bytes; an i64 of 4 bytes is extended with zeros.
    pub fn atomic_load(&mut self, ty: Ty, bytes: u32, base: Value, offset: u32) -> Result<Value, BuildError> {
        self.begin("an atomic load")?;
        let access = self.atomic_width("an atomic load", ty, bytes)?;
        let (at, site) = (self.address("an atomic load", base, offset)?, self.site());
        let to = self.asm.register(ty);
        self.asm.push(Op::AtomicLoad { to, access, at, site });
        Ok(self.value(to))
    }

    pub fn atomic_store(&mut self, bytes: u32, value: Value, base: Value, offset: u32) -> Result<(), BuildError> {
        self.begin("an atomic store")?;
        let ty = self.ty(value)?;
        let access = self.atomic_width("an atomic store", ty, bytes)?;
        let value = self.operand("an atomic store", value, ty)?;
        let (at, site) = (self.address("an atomic store", base, offset)?, self.site());
        self.asm.push(Op::AtomicStore { access, at, value, site });
        Ok(())
    }

    /// Changes an integer in memory and returns what it was. [`AtomicOp::CompareExchange`] has a method of its own.
    pub fn atomic(&mut self, op: AtomicOp, value: Value, base: Value, offset: u32) -> Result<Value, BuildError> {
        if op == AtomicOp::CompareExchange {
            return Err(BuildError::Operands { what: "compare and exchange", expected: 2, found: 1 });
        }
        self.read_modify_write(op, value, value, base, offset)
    }

    /// Stores `value` where memory holds `expected`; returns what it held.
    pub fn compare_exchange(
        &mut self,
        expected: Value,
        value: Value,
        base: Value,
        offset: u32,
    ) -> Result<Value, BuildError> {
        self.read_modify_write(AtomicOp::CompareExchange, expected, value, base, offset)
    }

    fn read_modify_write(
        &mut self,
        op: AtomicOp,
        expected: Value,
        value: Value,
        base: Value,
        offset: u32,
    ) -> Result<Value, BuildError> {
        self.begin("an atomic")?;
        let ty = self.ty(value)?;
        let access = self.atomic_width("an atomic", ty, ty.bytes())?;
        let (expected, value) = (self.operand("an atomic", expected, ty)?, self.operand("an atomic", value, ty)?);
        let (at, site) = (self.address("an atomic", base, offset)?, self.site());
        let to = self.asm.register(ty);
        self.asm.push(Op::Atomic { op, to, access, at, value, expected, site });
        Ok(self.value(to))
    }

    /// Orders the accesses before it and after it, for everybody.
    pub fn fence(&mut self) -> Result<(), BuildError> {
        self.begin("a fence")?;
        self.asm.push(Op::Fence);
        Ok(())
    }

    // ---- variables and control flow

    /// A variable that is a value at first. It lives to the end of the block it is made in.
    pub fn variable(&mut self, value: Value) -> Result<Variable, BuildError> {
        self.begin("a variable")?;
        if self.variables.len() >= OPS_MAX {
            return Err(BuildError::Limit { what: "variables", max: OPS_MAX });
        }
        let ty = self.ty(value)?;
        let reg = self.operand("a variable", value, ty)?;
        let index = u32::try_from(self.variables.len()).unwrap_or(u32::MAX);
        self.variables.push(VariableSlot { reg, scope: self.scope() });
        Ok(Variable { builder: self.builder, index })
    }

    /// What a variable is here.
    pub fn get(&self, variable: Variable) -> Result<Value, BuildError> {
        let slot = self.slot(variable)?;
        Ok(self.value(slot.reg))
    }

    /// Makes a variable another value. Blocks that began since it was declared have to carry it.
    pub fn set(&mut self, variable: Variable, value: Value) -> Result<(), BuildError> {
        self.begin("an assignment")?;
        let (reg, scope) = {
            let slot = self.slot(variable)?;
            (slot.reg, slot.scope)
        };
        let value = self.operand("an assignment", value, self.asm.ty(reg))?;
        let inner = self.blocks.iter().rev().take_while(|block| block.scope != scope);
        if !inner.into_iter().all(|block| block.carried.contains(&variable.index)) {
            return Err(BuildError::NotCarried);
        }
        if let Some(slot) = self.variables.get_mut(variable.index as usize) {
            slot.reg = value;
        }
        Ok(())
    }

    /// A block: a branch to it goes to its end. Variables that are assigned inside are named.
    pub fn begin_block(&mut self, carried: &[Variable]) -> Result<BlockLabel, BuildError> {
        self.open(BlockKind::Block, None, carried)
    }

    /// A loop: a branch to it goes to its beginning; without one it is left at its end.
    pub fn begin_loop(&mut self, carried: &[Variable]) -> Result<BlockLabel, BuildError> {
        self.open(BlockKind::Loop, None, carried)
    }

    /// What is done where the condition, an i32, is not zero. A branch to it goes to its end.
    pub fn begin_if(&mut self, condition: Value, carried: &[Variable]) -> Result<BlockLabel, BuildError> {
        self.begin("an `if`")?;
        let condition = self.operand("an `if`", condition, Ty::I32)?;
        self.open(BlockKind::If, Some(condition), carried)
    }

    fn open(
        &mut self,
        kind: BlockKind,
        condition: Option<Reg>,
        carried: &[Variable],
    ) -> Result<BlockLabel, BuildError> {
        self.begin("a block")?;
        if self.blocks.len() > DEPTH_MAX {
            return Err(BuildError::Limit { what: "blocks inside one another", max: DEPTH_MAX });
        }
        self.carry(carried.len())?;
        let mut before = Vec::with_capacity(carried.len());
        let mut distinct = HashSet::with_capacity(carried.len());
        for variable in carried {
            if !distinct.insert(variable.index) {
                return Err(BuildError::Structure { what: "a block carries a variable once" });
            }
            before.push(self.slot(*variable)?.reg);
        }
        let merge = |asm: &mut Assembler, (variable, before): (&Variable, Reg)| Merge {
            variable: variable.index,
            to: asm.register(asm.ty(before)),
            before,
        };
        let merges: Vec<Merge> = carried.iter().zip(before).map(|pair| merge(&mut self.asm, pair)).collect();
        let label = self.asm.label();
        if kind == BlockKind::Loop {
            let (to, from): (Vec<Reg>, Vec<Reg>) = merges.iter().map(|merge| (merge.to, merge.before)).unzip();
            self.asm.move_all(&to, &from);
            self.assign(&merges, |merge| merge.to);
        }
        self.asm.push(match (condition, kind) {
            (Some(condition), _) => Op::If { condition, label },
            (None, BlockKind::Loop) => Op::Loop { label },
            (None, BlockKind::Block | BlockKind::If | BlockKind::Else) => Op::Block { label },
        });
        let scope = self.new_scope();
        self.blocks.push(OpenBlock { kind, label, scope, merges, carried: distinct, is_dead: false });
        Ok(BlockLabel { builder: self.builder, label: label.0 })
    }

    /// What is done where the condition of the innermost `if` is zero.
    pub fn otherwise(&mut self) -> Result<(), BuildError> {
        if self.blocks.last().is_none_or(|block| block.kind != BlockKind::If) {
            return Err(BuildError::Structure { what: "there is no `if` to have another side here" });
        }
        self.merge_into_end();
        let scope = self.new_scope();
        let Some(block) = self.blocks.last_mut() else { return Ok(()) };
        (block.kind, block.is_dead, block.scope) = (BlockKind::Else, false, scope);
        let (label, merges) = (block.label, block.merges.clone());
        self.assign(&merges, |merge| merge.before);
        self.asm.push(Op::Else { label });
        Ok(())
    }

    /// Ends the innermost block, loop or `if`.
    pub fn end(&mut self) -> Result<(), BuildError> {
        if self.blocks.len() < 2 {
            return Err(BuildError::Structure { what: "there is no block to end here" });
        }
        self.merge_into_end();
        let Some(block) = self.blocks.pop() else { return Ok(()) };
        // Without another side what went in comes out.
        if block.kind == BlockKind::If && !block.merges.is_empty() {
            self.asm.push(Op::Else { label: block.label });
            let (to, from): (Vec<Reg>, Vec<Reg>) = block.merges.iter().map(|merge| (merge.to, merge.before)).unzip();
            self.asm.move_all(&to, &from);
        }
        if block.kind != BlockKind::Loop {
            self.assign(&block.merges, |merge| merge.to);
        }
        self.asm.push(Op::End { label: block.label });
        Ok(())
    }

    /// Goes to a block's end or a loop's beginning.
    pub fn branch(&mut self, to: BlockLabel) -> Result<(), BuildError> {
        self.begin("a branch")?;
        let jump = self.jump(to)?;
        self.asm.jump(&jump);
        self.die();
        Ok(())
    }

    pub fn branch_if(&mut self, condition: Value, to: BlockLabel) -> Result<(), BuildError> {
        self.begin("a branch")?;
        let condition = self.operand("a branch", condition, Ty::I32)?;
        let jump = self.jump(to)?;
        self.asm.jump_if(condition, &jump);
        Ok(())
    }

    /// Goes to the block that an index, an i32, says, or to the other.
    pub fn branch_table(&mut self, index: Value, to: &[BlockLabel], other: BlockLabel) -> Result<(), BuildError> {
        self.begin("a branch")?;
        if to.len() >= TABLE_LABELS_MAX {
            return Err(BuildError::Limit { what: "labels in a branch table", max: TABLE_LABELS_MAX });
        }
        let index = self.operand("a branch", index, Ty::I32)?;
        let labels: Vec<BlockLabel> = to.iter().copied().chain([other]).collect();
        let mut distinct = labels.clone();
        // Inner blocks have higher labels.
        distinct.sort_unstable_by_key(|label| std::cmp::Reverse(label.label));
        distinct.dedup();
        let jumps: Vec<Jump> = distinct.into_iter().map(|label| self.jump(label)).collect::<Result<_, _>>()?;
        self.asm.jump_table(index, labels.iter().map(|label| Label(label.label)).collect(), &jumps);
        self.die();
        Ok(())
    }

    /// Ends the work item.
    pub fn finish_item(&mut self) -> Result<(), BuildError> {
        self.begin("a return")?;
        let Some(label) = self.blocks.first().map(|block| block.label) else { return Ok(()) };
        self.asm.push(Op::Branch { label });
        self.die();
        Ok(())
    }

    /// Ends the launch: what should not be reached was.
    pub fn trap(&mut self) -> Result<(), BuildError> {
        self.begin("a trap")?;
        let site = self.site();
        self.asm.push(Op::Trap { kind: TrapKind::Unreachable, site });
        self.die();
        Ok(())
    }

    /// Does something for each number from 0 on, below `count`, which is taken as unsigned. It has the form of which a
    /// device knows how often it goes round, so that accesses are checked once, before it.
    pub fn count_to<E: From<BuildError>>(
        &mut self,
        count: Value,
        carried: &[Variable],
        body: impl FnOnce(&mut KernelBuilder, Value) -> Result<(), E>,
    ) -> Result<(), E> {
        self.begin_if(count, carried)?;
        let zero = self.i32(0)?;
        let counter = self.variable(zero)?;
        let all: Vec<Variable> = carried.iter().copied().chain([counter]).collect();
        let again = self.begin_loop(&all)?;
        let n = self.get(counter)?;
        body(self, n)?;
        let (one, n) = (self.i32(1)?, self.get(counter)?);
        let next = self.binary(BinaryOp::I32Add, n, one)?;
        self.set(counter, next)?;
        let has_more = self.binary(BinaryOp::I32Ne, next, count)?;
        self.branch_if(has_more, again)?;
        self.end()?;
        self.end()?;
        Ok(())
    }

    /// The kernel, if every block was ended. Refused if it keeps too many values at once.
    pub fn finish(mut self) -> Result<BuiltKernel, BuildError> {
        if self.blocks.len() != 1 {
            return Err(BuildError::Structure { what: "a block has not ended" });
        }
        self.check_length()?;
        let Some(whole) = self.blocks.pop() else { return Err(BuildError::Structure { what: "there is no kernel" }) };
        self.asm.ops.insert(0, Op::Block { label: whole.label });
        self.asm.push(Op::End { label: whole.label });
        self.asm.push(Op::Return);
        let body = self.asm.body(&self.name, self.params);
        pressure::check(&body)?;
        Ok(BuiltKernel { body, windows: self.windows })
    }

    // ---- what is checked

    /// Before an operation: whether it can be reached, and whether there is room for it.
    fn begin(&mut self, what: &'static str) -> Result<(), BuildError> {
        if self.blocks.last().is_some_and(|block| block.is_dead) {
            return Err(BuildError::Unreachable { what });
        }
        self.check_length()
    }

    fn check_length(&self) -> Result<(), BuildError> {
        if self.asm.is_too_long() { Err(BuildError::Limit { what: "operations", max: OPS_MAX }) } else { Ok(()) }
    }

    fn carry(&mut self, count: usize) -> Result<(), BuildError> {
        self.carried = self.carried.saturating_add(count);
        if self.carried > CARRIED_MAX {
            return Err(BuildError::Limit { what: "variables carried by blocks and branches", max: CARRIED_MAX });
        }
        Ok(())
    }

    fn value(&self, reg: Reg) -> Value {
        Value { builder: self.builder, scope: self.scope(), reg }
    }

    fn scope(&self) -> u32 {
        self.blocks.last().map_or(0, |block| block.scope)
    }

    fn new_scope(&mut self) -> u32 {
        self.scopes += 1;
        self.scopes - 1
    }

    fn is_open(&self, scope: u32) -> bool {
        self.blocks.iter().rev().any(|block| block.scope == scope)
    }

    /// The type of a value of this builder that can be used here.
    fn ty(&self, value: Value) -> Result<Ty, BuildError> {
        if value.builder != self.builder {
            return Err(BuildError::Foreign);
        }
        if !self.is_open(value.scope) {
            return Err(BuildError::OutOfScope);
        }
        self.asm.types.get(value.reg.0 as usize).copied().ok_or(BuildError::Foreign)
    }

    fn operand(&self, what: &'static str, value: Value, expected: Ty) -> Result<Reg, BuildError> {
        let found = self.ty(value)?;
        if found == expected { Ok(value.reg) } else { Err(BuildError::Type { what, expected, found }) }
    }

    fn float(&self, what: &'static str, value: Value) -> Result<Ty, BuildError> {
        let found = self.ty(value)?;
        if found.is_float() { Ok(found) } else { Err(BuildError::NoSuchType { what, found }) }
    }

    fn address(&self, what: &'static str, base: Value, offset: u32) -> Result<Address, BuildError> {
        Ok(Address::new(self.operand(what, base, Ty::I32)?, offset))
    }

    fn width(&self, ty: Ty, bytes: u32, is_signed: bool) -> Result<Access, BuildError> {
        let is_whole = bytes == ty.bytes();
        let is_part = !ty.is_float() && bytes < ty.bytes() && matches!(bytes, 1 | 2 | 4);
        if !is_whole && !is_part {
            return Err(BuildError::Width { ty, bytes });
        }
        Ok(Access { bytes, is_signed: is_signed && is_part })
    }

    fn atomic_width(&self, what: &'static str, ty: Ty, bytes: u32) -> Result<Access, BuildError> {
        if ty.is_float() {
            return Err(BuildError::NoSuchType { what, found: ty });
        }
        if bytes < 4 {
            return Err(BuildError::Width { ty, bytes });
        }
        self.width(ty, bytes, false)
    }

    fn slot(&self, variable: Variable) -> Result<&VariableSlot, BuildError> {
        let slot = self.variables.get(variable.index as usize).filter(|_| variable.builder == self.builder);
        let slot = slot.ok_or(BuildError::Foreign)?;
        if self.is_open(slot.scope) { Ok(slot) } else { Err(BuildError::OutOfScope) }
    }

    fn site(&mut self) -> Site {
        let place = self.place.clone();
        self.asm.site(place)
    }

    fn jump(&mut self, to: BlockLabel) -> Result<Jump, BuildError> {
        if to.builder != self.builder {
            return Err(BuildError::Foreign);
        }
        let found = self.blocks.iter().find(|block| block.label.0 == to.label);
        let Some(block) = found else {
            return Err(BuildError::Structure { what: "a branch goes to a block that is open" });
        };
        let merges = block.merges.clone();
        self.carry(merges.len())?;
        let from = merges.iter().filter_map(|merge| self.variables.get(merge.variable as usize));
        let from = from.map(|slot| slot.reg).collect();
        Ok(Jump { label: Label(to.label), to: merges.iter().map(|merge| merge.to).collect(), from })
    }

    /// At the end of a block, its variables are what they are there. What comes after a loop comes from its end only,
    /// so that nothing is moved.
    fn merge_into_end(&mut self) {
        let Some(block) = self.blocks.last() else { return };
        if block.is_dead || block.kind == BlockKind::Loop {
            return;
        }
        let to: Vec<Reg> = block.merges.iter().map(|merge| merge.to).collect();
        let slots = block.merges.iter().filter_map(|merge| self.variables.get(merge.variable as usize));
        let from: Vec<Reg> = slots.map(|slot| slot.reg).collect();
        self.asm.move_all(&to, &from);
    }

    fn assign(&mut self, merges: &[Merge], reg: impl Fn(&Merge) -> Reg) {
        for merge in merges {
            if let Some(slot) = self.variables.get_mut(merge.variable as usize) {
                slot.reg = reg(merge);
            }
        }
    }

    fn die(&mut self) {
        if let Some(block) = self.blocks.last_mut() {
            block.is_dead = true;
        }
    }
}
