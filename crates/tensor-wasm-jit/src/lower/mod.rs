//! From Wasm to a kernel's operations. One walk over the instructions, with what a kernel calls inlined: there is no
//! recursion, so it ends, and a limit on the result bounds what a call graph can make of it.
//!
//! Wasm's operand stack is gone after this, and so are its locals: both are names for registers. Assigning a local
//! gives its name to another register; where paths with different registers meet, at the end of a block or the
//! beginning of a loop, each of them is moved into one. So a register holds one thing, however compilers share locals
//! between several.

mod calls;
mod subgroups;

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use wasmparser::{BlockType, FuncType, Operator};

use crate::assemble::{Assembler, BlockKind, Jump, KnownValue, OPS_MAX};
use crate::instructions::{atomic_load, atomic_store, instruction_name, load, read_modify_write, store};
use crate::ir::{Access, Address, Bin, Body, Label, Op, Reg, Rmw, Site, TrapKind, Ty, Un, low_half};
use crate::profile::Program;
use crate::refusal::{Refusal, SourceLocation};

/// A stack whose depth cannot be told gets this much beyond what can.
const STACK_BYTES_UNKNOWN: u32 = 4 << 10;

/// The stack that a work item may have at most.
const STACK_BYTES_MAX: u32 = 64 << 10;

/// Values on Wasm's stack at once. Compilers need a few dozen.
const VALUES_MAX: usize = 1_000;

/// Locals of one function.
const LOCALS_MAX: usize = 10_000;

/// Locals that blocks assign, counted once for each block around the assignment.
const ASSIGNED_MAX: usize = 200_000;

/// Instructions that are read for one kernel, again for every call; a branch table counts for its length.
const READ_MAX: usize = 2_000_000;

/// How far calls may nest: inlining is a recursion here.
const CALL_DEPTH_MAX: usize = 64;

pub(crate) fn lower(program: &Program<'_>, kernel: &str) -> Result<Body, Refusal> {
    let (function, params) = program.kernel(kernel)?;
    let mut lower = Lower::new(program);
    lower.make_globals();
    let params: Vec<Reg> = params.into_iter().map(|ty| lower.asm.register(ty)).collect();
    lower.inline(function, &params, 0)?;
    lower.asm.push(Op::Return);
    let stack_pointer = program.globals.iter().position(|global| global.is_stack_pointer);
    let stack_top = stack_pointer.map_or(0, |at| low_half(program.globals[at].bits) & !15);
    let unknown = if lower.stack.is_unknown { STACK_BYTES_UNKNOWN } else { 0 };
    // A kernel may move its stack pointer to anywhere.
    let used = lower.stack.depth_max.saturating_add(unknown).min(STACK_BYTES_MAX);
    let stack_bytes = used.next_multiple_of(16).min(stack_top);
    let (data_address, data) = constant_data(program);
    let stack_pointer = stack_pointer.map(|at| lower.globals[at]);
    Ok(Body { stack_top, stack_bytes, stack_pointer, data, data_address, ..lower.asm.body(kernel, params) })
}

/// Where `lower_call` puts what, in the window that is its first parameter.
pub(crate) const CALL_RESULTS_AT: u32 = 0;
pub(crate) const CALL_GLOBALS_AT: u32 = 512;

/// Any exported function as a kernel of one work item, for comparing with other engines. Before its own parameters it
/// has two windows: one for its results and the module's globals, eight bytes each, and one that is the module's
/// memory.
pub(crate) fn lower_call(program: &Program<'_>, name: &str) -> Result<Body, Refusal> {
    let (function, ty) = program.exported(name)?;
    let mut lower = Lower::new(program);
    let (results_at, memory) = (lower.asm.register(Ty::I32), lower.asm.register(Ty::I32));
    let mut params = vec![results_at, memory];
    let not_number = || Refusal::NotAKernel { name: name.to_owned(), why: "a parameter is not a number".to_owned() };
    for ty in ty.params() {
        params.push(lower.asm.register(Ty::of(*ty).ok_or_else(not_number)?));
    }
    lower.make_globals();
    lower.asm.sites.push(SourceLocation { function: name.to_owned(), offset: None });
    let whole = |ty: Ty| Access { bytes: ty.bytes(), is_signed: false };
    let at = |from: u32, n: usize| Address::new(results_at, from + 8 * u32::try_from(n).unwrap_or(0));
    for (n, global) in program.globals.iter().enumerate() {
        let to = lower.globals[n];
        lower.asm.push(Op::Load { to, access: whole(global.ty), at: at(CALL_GLOBALS_AT, n), site: Site(0) });
    }
    let results = lower.inline(function, &params[2..], 0)?;
    for (n, value) in results.into_iter().enumerate() {
        let access = whole(lower.asm.types[value.0 as usize]);
        lower.asm.push(Op::Store { access, at: at(CALL_RESULTS_AT, n), value, site: Site(0) });
    }
    for (n, global) in program.globals.iter().enumerate() {
        let value = lower.globals[n];
        lower.asm.push(Op::Store { access: whole(global.ty), at: at(CALL_GLOBALS_AT, n), value, site: Site(0) });
    }
    lower.asm.push(Op::Return);
    Ok(lower.asm.body(name, params))
}

impl<'p, 'a> Lower<'p, 'a> {
    fn new(program: &'p Program<'a>) -> Lower<'p, 'a> {
        Lower {
            assigned: HashMap::new(),
            program,
            asm: Assembler::default(),
            globals: Vec::new(),
            kept_sums: None,
            calls: Vec::new(),
            read: 0,
            stack: StackDepth::default(),
        }
    }

    fn make_globals(&mut self) {
        for global in &self.program.globals {
            let from = self.asm.constant(global.ty, global.bits);
            let to = self.asm.register(global.ty);
            self.asm.push(Op::Move { to, from });
            self.globals.push(to);
        }
        self.make_sums();
    }
}

/// The data segments as one piece.
fn constant_data(program: &Program<'_>) -> (u32, Vec<u8>) {
    let ends = program.data.iter().map(|segment| (segment.address, segment.address + segment.bytes.len() as u64));
    let (low, high) = ends.fold((u64::MAX, 0), |(low, high), (from, to)| (low.min(from), high.max(to)));
    if low >= high {
        return (0, Vec::new());
    }
    // Addresses and the device's addresses are aligned alike.
    let low = low & !15;
    let mut data = vec![0; usize::try_from(high - low).unwrap_or(0)];
    for segment in &program.data {
        let at = usize::try_from(segment.address - low).unwrap_or(0);
        data[at..at + segment.bytes.len()].copy_from_slice(segment.bytes);
    }
    (u32::try_from(low).unwrap_or(u32::MAX), data)
}

/// What is known about how deep the private stack gets: compilers subtract a constant from its pointer, and add it
/// again.
#[derive(Default)]
struct StackDepth {
    depth: u32,
    depth_max: u32,
    is_unknown: bool,
}

struct Lower<'p, 'a> {
    program: &'p Program<'a>,
    asm: Assembler,
    globals: Vec<Reg>,
    /// The four sums of the item's last product, if the module asks for them.
    kept_sums: Option<[Reg; 4]>,
    calls: Vec<u32>,
    /// Instructions that were read, each time they were.
    read: usize,
    stack: StackDepth,
    /// For each function that was read: the locals that each of its blocks assigns, in the order of their beginnings.
    assigned: HashMap<u32, Rc<Vec<Vec<u32>>>>,
}

/// A function that is being inlined.
struct Frame {
    function: u32,
    /// The registers that its locals are at the moment.
    locals: Vec<Reg>,
    operands: Vec<Reg>,
    blocks: Vec<WasmBlock>,
    assigned: Rc<Vec<Vec<u32>>>,
    blocks_begun: usize,
    /// Where the code is that is being read.
    offset: usize,
}

struct WasmBlock {
    label: Label,
    kind: BlockKind,
    /// Registers that a branch to it assigns: what it results in, or a loop's parameters.
    targets: Vec<Reg>,
    results: Vec<Reg>,
    /// What was on the stack before it, without its parameters.
    height: usize,
    params: Vec<Reg>,
    /// Locals that are assigned inside it: their numbers, the register that a branch to it moves them to, and what they
    /// were before.
    merges: Vec<(u32, Reg, Reg)>,
    /// Nothing from here to its end can be reached.
    is_dead: bool,
}

impl<'a> Lower<'_, 'a> {
    fn place(&self, frame: &Frame) -> SourceLocation {
        SourceLocation { function: self.program.name(frame.function), offset: Some(frame.offset) }
    }

    fn site(&mut self, frame: &Frame) -> Site {
        let place = self.place(frame);
        self.asm.site(place)
    }

    /// Inlines a function. Returns the registers of its results.
    fn inline(&mut self, function: u32, arguments: &[Reg], call_offset: usize) -> Result<Vec<Reg>, Refusal> {
        let program = self.program;
        let here = |program: &Program<'_>, caller: Option<&u32>| SourceLocation {
            function: program.name(caller.copied().unwrap_or(function)),
            offset: Some(call_offset),
        };
        if self.calls.contains(&function) || self.calls.len() >= CALL_DEPTH_MAX {
            let names: Vec<String> = self
                .calls
                .iter()
                .skip_while(|f| **f != function)
                .chain([&function])
                .map(|f| program.name(*f))
                .collect();
            return Err(Refusal::Recursion { cycle: names.join(" calls "), place: here(program, self.calls.last()) });
        }
        let index = function as usize - program.imports.len();
        let (Some(code), Some((_, ty))) = (program.functions.get(index), program.type_of(function)) else {
            return Err(Refusal::Module { what: format!("function {function}, which is not there,") });
        };
        self.calls.push(function);
        let refuse = |instruction: &str| Refusal::Instruction {
            instruction: instruction.to_owned(),
            place: SourceLocation { function: program.name(function), offset: Some(code.body.range().start) },
        };
        let mut locals = arguments.to_vec();
        let read = |error: wasmparser::BinaryReaderError| Refusal::NotWasm { why: error.to_string() };
        for group in code.body.get_locals_reader().map_err(read)? {
            let (count, ty) = group.map_err(read)?;
            let ty = Ty::of(ty).ok_or_else(|| refuse("a local that is not a number"))?;
            let zero = self.asm.constant(ty, 0);
            if locals.len() + count as usize > LOCALS_MAX {
                return Err(refuse(&format!("more than {LOCALS_MAX} locals")));
            }
            locals.resize(locals.len() + count as usize, zero);
        }
        let mut results = Vec::new();
        for ty in ty.results() {
            let ty = Ty::of(*ty).ok_or_else(|| refuse("a result that is not a number"))?;
            results.push(self.asm.register(ty));
        }
        let assigned = match self.assigned.get(&function) {
            Some(known) => known.clone(),
            None => {
                let found = Rc::new(assigned(code).ok_or_else(|| self.too_long(function, code.body.range().start))?);
                self.assigned.insert(function, found.clone());
                found
            }
        };
        let label = self.asm.label();
        self.asm.push(Op::Block { label });
        let outer = WasmBlock {
            label,
            kind: BlockKind::Block,
            targets: results.clone(),
            results: results.clone(),
            height: 0,
            params: Vec::new(),
            // Nobody asks for its locals after it.
            merges: Vec::new(),
            is_dead: false,
        };
        let (operands, blocks) = (Vec::new(), vec![outer]);
        let mut frame = Frame { function, locals, operands, blocks, assigned, blocks_begun: 0, offset: call_offset };
        let depth_before = self.stack.depth;
        let mut reader = code.body.get_operators_reader().map_err(read)?;
        while !reader.eof() {
            let (operator, offset) = reader.read_with_offset().map_err(read)?;
            frame.offset = offset;
            self.read += match &operator {
                Operator::BrTable { targets } => 1 + targets.len() as usize,
                _ => 1,
            };
            self.instruction(&mut frame, &operator)?;
            self.check_length(function, offset)?;
            if frame.operands.len() > VALUES_MAX {
                return Err(Refusal::TooManyValues { values_max: VALUES_MAX, place: self.place(&frame) });
            }
        }
        // What a function takes of the stack it gives back.
        self.stack.depth = depth_before;
        self.calls.pop();
        Ok(results)
    }

    fn check_length(&self, function: u32, offset: usize) -> Result<(), Refusal> {
        if self.asm.is_too_long() || self.read > READ_MAX { Err(self.too_long(function, offset)) } else { Ok(()) }
    }

    fn too_long(&self, function: u32, offset: usize) -> Refusal {
        Refusal::TooLong {
            ops_max: OPS_MAX,
            place: SourceLocation { function: self.program.name(function), offset: Some(offset) },
        }
    }

    fn instruction(&mut self, frame: &mut Frame, operator: &Operator<'a>) -> Result<(), Refusal> {
        let is_dead = frame.blocks.last().is_some_and(|block| block.is_dead);
        match operator {
            Operator::Block { blockty } => self.enter(frame, BlockKind::Block, *blockty, is_dead)?,
            Operator::Loop { blockty } => self.enter(frame, BlockKind::Loop, *blockty, is_dead)?,
            Operator::If { blockty } => self.enter(frame, BlockKind::If, *blockty, is_dead)?,
            Operator::Else => self.otherwise(frame),
            Operator::End => self.end(frame),
            _ if is_dead => {}
            _ => self.plain(frame, operator)?,
        }
        Ok(())
    }

    /// Instructions other than those that begin and end blocks, where they can be reached.
    fn plain(&mut self, frame: &mut Frame, operator: &Operator<'a>) -> Result<(), Refusal> {
        if let Some(op) = Un::of(operator) {
            let a = frame.pop();
            let (to, site) = (self.asm.register(op.to()), self.site(frame));
            self.asm.push(Op::Un { op, to, a, site });
            frame.operands.push(to);
            return Ok(());
        }
        if let Some(op) = Bin::of(operator) {
            let (b, a) = (frame.pop(), frame.pop());
            let (to, site) = (self.asm.register(op.to()), self.site(frame));
            self.asm.known[to.0 as usize] = self.fold(op, a, b);
            self.asm.push(Op::Bin { op, to, a, b, site });
            frame.operands.push(to);
            return Ok(());
        }
        if let Some((to, access, memarg)) = load(operator) {
            let at = self.address(frame, memarg)?;
            let (to, site) = (self.asm.register(to), self.site(frame));
            self.asm.push(Op::Load { to, access, at, site });
            frame.operands.push(to);
            return Ok(());
        }
        if let Some((access, memarg)) = store(operator) {
            let value = frame.pop();
            let at = self.address(frame, memarg)?;
            let site = self.site(frame);
            self.asm.push(Op::Store { access, at, value, site });
            return Ok(());
        }
        if self.atomic(frame, operator)? {
            return Ok(());
        }
        match operator {
            Operator::Nop => {}
            Operator::Unreachable => {
                let site = self.site(frame);
                self.asm.push(Op::Trap { kind: TrapKind::Unreachable, site });
                frame.die();
            }
            Operator::Drop => {
                frame.pop();
            }
            Operator::Select | Operator::TypedSelect { .. } => {
                let (condition, b, a) = (frame.pop(), frame.pop(), frame.pop());
                let to = self.asm.register(self.asm.types[a.0 as usize]);
                self.asm.push(Op::Select { to, condition, a, b });
                frame.operands.push(to);
            }
            Operator::I32Const { value } => self.push_constant(frame, Ty::I32, u64::from(value.cast_unsigned())),
            Operator::I64Const { value } => self.push_constant(frame, Ty::I64, value.cast_unsigned()),
            Operator::F32Const { value } => self.push_constant(frame, Ty::F32, u64::from(value.bits())),
            Operator::F64Const { value } => self.push_constant(frame, Ty::F64, value.bits()),
            Operator::LocalGet { local_index } => frame.operands.push(frame.locals[*local_index as usize]),
            Operator::LocalSet { local_index } => {
                frame.locals[*local_index as usize] = frame.pop();
            }
            Operator::LocalTee { local_index } => {
                let value = frame.pop();
                frame.locals[*local_index as usize] = value;
                frame.operands.push(value);
            }
            Operator::GlobalGet { global_index } => {
                let from = self.globals[*global_index as usize];
                let to = self.asm.register(self.asm.types[from.0 as usize]);
                if self.program.globals[*global_index as usize].is_stack_pointer {
                    self.asm.known[to.0 as usize] = KnownValue::Stack(self.stack.depth);
                }
                self.asm.push(Op::Move { to, from });
                frame.operands.push(to);
            }
            Operator::GlobalSet { global_index } => {
                let (from, to) = (frame.pop(), self.globals[*global_index as usize]);
                if self.program.globals[*global_index as usize].is_stack_pointer {
                    self.set_stack(from);
                }
                self.asm.push(Op::Move { to, from });
            }
            Operator::Br { relative_depth } => {
                let jump = self.jump(frame, *relative_depth);
                self.asm.jump(&jump);
                frame.die();
            }
            Operator::BrIf { relative_depth } => {
                let condition = frame.pop();
                let jump = self.jump(frame, *relative_depth);
                self.asm.jump_if(condition, &jump);
            }
            Operator::BrTable { targets } => {
                let read = |error: wasmparser::BinaryReaderError| Refusal::NotWasm { why: error.to_string() };
                let mut depths = Vec::new();
                for depth in targets.targets() {
                    depths.push(depth.map_err(read)?);
                }
                depths.push(targets.default());
                self.branch_table(frame, &depths);
                frame.die();
            }
            Operator::Return => {
                let outermost = u32::try_from(frame.blocks.len() - 1).unwrap_or(0);
                let jump = self.jump(frame, outermost);
                self.asm.jump(&jump);
                frame.die();
            }
            Operator::Call { function_index } => self.call(frame, *function_index)?,
            Operator::CallIndirect { type_index, .. } => self.call_indirect(frame, *type_index)?,
            Operator::MemorySize { .. } => {
                let pages = self.program.memory_bytes >> 16;
                self.push_constant(frame, Ty::I32, pages);
            }
            Operator::MemoryFill { .. } => {
                let (count, value, to) = (frame.pop(), frame.pop(), frame.pop());
                let site = self.site(frame);
                self.asm.memory_fill(to, value, count, site);
            }
            Operator::MemoryCopy { .. } => {
                let (count, from, to) = (frame.pop(), frame.pop(), frame.pop());
                let site = self.site(frame);
                self.asm.memory_copy(to, from, count, site);
            }
            other => {
                let instruction = instruction_name(other);
                return Err(Refusal::Instruction { instruction, place: self.place(frame) });
            }
        }
        Ok(())
    }

    fn push_constant(&mut self, frame: &mut Frame, ty: Ty, bits: u64) {
        let reg = self.asm.constant(ty, bits);
        frame.operands.push(reg);
    }

    /// What is known of a sum or difference: enough to follow the stack pointer.
    fn fold(&self, op: Bin, a: Reg, b: Reg) -> KnownValue {
        match (op, self.asm.known(a), self.asm.known(b)) {
            (Bin::I32Sub, KnownValue::Stack(depth), KnownValue::Constant(n)) => match depth.checked_add(low_half(n)) {
                Some(depth) => KnownValue::Stack(depth),
                None => KnownValue::Nothing,
            },
            (Bin::I32Add, KnownValue::Stack(depth), KnownValue::Constant(n))
            | (Bin::I32Add, KnownValue::Constant(n), KnownValue::Stack(depth)) => {
                let added = low_half(n).cast_signed();
                match depth.checked_add_signed(added.wrapping_neg()) {
                    Some(depth) => KnownValue::Stack(depth),
                    None => KnownValue::Nothing,
                }
            }
            // Rounding down takes at most as much as the mask can clear.
            (Bin::I32And, KnownValue::Stack(depth), KnownValue::Constant(mask)) => {
                let mask = low_half(mask).cast_signed();
                if mask < 0 && mask > -4096 {
                    KnownValue::Stack(depth.saturating_add(mask.unsigned_abs()))
                } else {
                    KnownValue::Nothing
                }
            }
            _ => KnownValue::Nothing,
        }
    }

    fn set_stack(&mut self, from: Reg) {
        match self.asm.known(from) {
            KnownValue::Stack(depth) => {
                self.stack.depth = depth;
                self.stack.depth_max = self.stack.depth_max.max(depth);
            }
            _ => self.stack.is_unknown = true,
        }
    }

    fn enter(&mut self, frame: &mut Frame, kind: BlockKind, ty: BlockType, is_dead: bool) -> Result<(), Refusal> {
        let condition = (kind == BlockKind::If && !is_dead).then(|| frame.pop());
        let (params, results) = self.block_type(frame, ty)?;
        let label = self.asm.label();
        let assigned = frame.assigned.clone();
        let assigned = assigned.get(frame.blocks_begun).map_or(&[][..], Vec::as_slice);
        frame.blocks_begun += 1;
        if is_dead {
            // Only so that its end is found.
            let (height, results, merges) = (frame.operands.len(), Vec::new(), Vec::new());
            let (targets, params) = (Vec::new(), Vec::new());
            frame.blocks.push(WasmBlock { label, kind, targets, results, height, params, merges, is_dead });
            return Ok(());
        }
        let results: Vec<Reg> = results.into_iter().map(|ty| self.asm.register(ty)).collect();
        let height = frame.operands.len() - params.len();
        let mut entering: Vec<Reg> = frame.operands[height..].to_vec();
        let mut targets = results.clone();
        let mut merges = Vec::with_capacity(assigned.len());
        for local in assigned {
            let before = frame.locals[*local as usize];
            merges.push((*local, self.asm.register(self.asm.types[before.0 as usize]), before));
        }
        if kind == BlockKind::Loop {
            targets = params.into_iter().map(|ty| self.asm.register(ty)).collect();
            let all = |values: &[Reg], locals: Vec<Reg>| values.iter().copied().chain(locals).collect::<Vec<Reg>>();
            let to = all(&targets, merges.iter().map(|merge| merge.1).collect());
            let from = all(&entering, merges.iter().map(|merge| merge.2).collect());
            self.asm.move_all(&to, &from);
            entering.clone_from(&targets);
            frame.operands.truncate(height);
            frame.operands.extend(&targets);
            for (local, reg, _) in &merges {
                frame.locals[*local as usize] = *reg;
            }
        }
        self.asm.push(match condition {
            Some(condition) => Op::If { condition, label },
            None if kind == BlockKind::Loop => Op::Loop { label },
            None => Op::Block { label },
        });
        frame.blocks.push(WasmBlock { label, kind, targets, results, height, params: entering, merges, is_dead });
        Ok(())
    }

    fn block_type(&self, frame: &Frame, ty: BlockType) -> Result<(Vec<Ty>, Vec<Ty>), Refusal> {
        let types = |func: &FuncType| -> Option<(Vec<Ty>, Vec<Ty>)> {
            let all = |types: &[wasmparser::ValType]| types.iter().map(|ty| Ty::of(*ty)).collect::<Option<Vec<Ty>>>();
            Some((all(func.params())?, all(func.results())?))
        };
        let found = match ty {
            BlockType::Empty => Some((Vec::new(), Vec::new())),
            BlockType::Type(ty) => Ty::of(ty).map(|ty| (Vec::new(), vec![ty])),
            BlockType::FuncType(index) => self.program.ty(index).and_then(types),
        };
        let instruction = "a block of values that are not numbers".to_owned();
        found.ok_or_else(|| Refusal::Instruction { instruction, place: self.place(frame) })
    }

    fn otherwise(&mut self, frame: &mut Frame) {
        // An `if` inside dead code has no operations.
        if self.is_dead_above(frame) {
            return;
        }
        self.finish_results(frame);
        let Some(block) = frame.blocks.last_mut() else { return };
        block.kind = BlockKind::Else;
        block.is_dead = false;
        let (label, height, params) = (block.label, block.height, block.params.clone());
        for (local, _, before) in &block.merges {
            frame.locals[*local as usize] = *before;
        }
        frame.operands.truncate(height);
        frame.operands.extend(params);
        self.asm.push(Op::Else { label });
    }

    /// Whether the code around the innermost block is dead.
    fn is_dead_above(&self, frame: &Frame) -> bool {
        frame.blocks.iter().rev().nth(1).is_some_and(|block| block.is_dead)
    }

    /// At the end of a block, its results are what is on top of the stack. What comes after a loop comes from its end
    /// only, so that its locals need not be moved.
    fn finish_results(&mut self, frame: &mut Frame) {
        let Some(block) = frame.blocks.last() else { return };
        if block.is_dead {
            return;
        }
        let mut from = frame.operands.split_off(frame.operands.len() - block.results.len());
        let mut to = block.results.clone();
        if block.kind != BlockKind::Loop {
            from.extend(block.merges.iter().map(|(local, ..)| frame.locals[*local as usize]));
            to.extend(block.merges.iter().map(|(_, reg, _)| *reg));
        }
        self.asm.move_all(&to, &from);
    }

    fn end(&mut self, frame: &mut Frame) {
        let is_nested_dead = self.is_dead_above(frame);
        if !is_nested_dead {
            self.finish_results(frame);
        }
        let Some(block) = frame.blocks.pop() else { return };
        if is_nested_dead {
            return;
        }
        // Without an `else` what went in comes out.
        if block.kind == BlockKind::If && !(block.results.is_empty() && block.merges.is_empty()) {
            self.asm.push(Op::Else { label: block.label });
            let from: Vec<Reg> = block.params.iter().copied().chain(block.merges.iter().map(|merge| merge.2)).collect();
            let to: Vec<Reg> = block.results.iter().copied().chain(block.merges.iter().map(|merge| merge.1)).collect();
            self.asm.move_all(&to, &from);
        }
        if block.kind != BlockKind::Loop {
            for (local, reg, _) in &block.merges {
                frame.locals[*local as usize] = *reg;
            }
        }
        frame.operands.truncate(block.height);
        frame.operands.extend(&block.results);
        self.asm.push(Op::End { label: block.label });
    }

    fn target<'f>(&self, frame: &'f Frame, depth: u32) -> &'f WasmBlock {
        &frame.blocks[frame.blocks.len() - 1 - depth as usize]
    }

    /// A branch to a block, with what it carries there.
    fn jump(&self, frame: &Frame, depth: u32) -> Jump {
        let block = self.target(frame, depth);
        let mut from = frame.operands[frame.operands.len() - block.targets.len()..].to_vec();
        let mut to = block.targets.clone();
        from.extend(block.merges.iter().map(|(local, ..)| frame.locals[*local as usize]));
        to.extend(block.merges.iter().map(|(_, reg, _)| *reg));
        Jump { label: block.label, to, from }
    }

    fn branch_table(&mut self, frame: &mut Frame, depths: &[u32]) {
        let index = frame.pop();
        let labels = depths.iter().map(|depth| self.target(frame, *depth).label).collect();
        let mut distinct: Vec<u32> = depths.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let jumps: Vec<Jump> = distinct.iter().map(|depth| self.jump(frame, *depth)).collect();
        self.asm.jump_table(index, labels, &jumps);
    }

    fn address(&mut self, frame: &mut Frame, memarg: &wasmparser::MemArg) -> Result<Address, Refusal> {
        let base = frame.pop();
        match u32::try_from(memarg.offset) {
            Ok(offset) if memarg.memory == 0 => Ok(Address::new(base, offset)),
            _ => Err(Refusal::Instruction { instruction: "a second memory".to_owned(), place: self.place(frame) }),
        }
    }

    fn atomic(&mut self, frame: &mut Frame, operator: &Operator<'a>) -> Result<bool, Refusal> {
        if let Some((ty, access, memarg)) = atomic_load(operator) {
            let at = self.address(frame, memarg)?;
            let (to, site) = (self.asm.register(ty), self.site(frame));
            self.asm.push(Op::AtomicLoad { to, access, at, site });
            frame.operands.push(to);
        } else if let Some((access, memarg)) = atomic_store(operator) {
            let value = frame.pop();
            let at = self.address(frame, memarg)?;
            let site = self.site(frame);
            self.asm.push(Op::AtomicStore { access, at, value, site });
        } else if let Some((op, ty, access, memarg)) = read_modify_write(operator) {
            let value = frame.pop();
            let expected = if op == Rmw::CompareExchange { frame.pop() } else { value };
            let at = self.address(frame, memarg)?;
            let (to, site) = (self.asm.register(ty), self.site(frame));
            self.asm.push(Op::Atomic { op, to, access, at, value, expected, site });
            frame.operands.push(to);
        } else if matches!(operator, Operator::AtomicFence) {
            self.asm.push(Op::Fence);
        } else {
            return Ok(false);
        }
        Ok(true)
    }
}

impl Frame {
    /// The validator has seen to it that there is something.
    fn pop(&mut self) -> Reg {
        self.operands.pop().unwrap_or(Reg(0))
    }

    /// Nothing until the end of the block can be reached.
    fn die(&mut self) {
        if let Some(block) = self.blocks.last_mut() {
            block.is_dead = true;
            self.operands.truncate(block.height);
        }
    }
}

/// The locals that each block of a function assigns, in the order of their beginnings. None if there are absurdly many.
fn assigned(code: &crate::profile::FunctionCode<'_>) -> Option<Vec<Vec<u32>>> {
    let mut all: Vec<BTreeSet<u32>> = Vec::new();
    let mut open: Vec<usize> = Vec::new();
    let mut total = 0;
    for operator in code.body.get_operators_reader().ok()?.into_iter().flatten() {
        match operator {
            Operator::Block { .. } | Operator::Loop { .. } | Operator::If { .. } => {
                open.push(all.len());
                all.push(BTreeSet::new());
            }
            Operator::End => {
                let Some(inner) = open.pop() else { continue };
                if let Some(outer) = open.last() {
                    let locals = all[inner].clone();
                    total += locals.len();
                    all[*outer].extend(locals);
                }
            }
            Operator::LocalSet { local_index } | Operator::LocalTee { local_index } => {
                if let Some(innermost) = open.last() {
                    total += usize::from(all[*innermost].insert(local_index));
                }
            }
            _ => {}
        }
        if total > ASSIGNED_MAX {
            return None;
        }
    }
    Some(all.into_iter().map(|locals| locals.into_iter().collect()).collect())
}
