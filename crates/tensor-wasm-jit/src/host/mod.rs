//! From a legalised kernel to Wasm again, for a CPU: one function that runs many work items of many groups, with the
//! same fence and the same bits as the PTX, and a trap where that traps; where several things are wrong between two
//! branches, the one may name another of them than the other. Whoever runs it compiles it with an engine and calls it
//! with a range of groups, on as many threads as there are.
//!
//! The module has two memories. The first is imported: the kernel's address space, in which its windows lie at the
//! addresses that the kernel knows, and nothing else does. The second is its own, one for each thread: what it is
//! called with, trap records, the group's shared memory, constant data, the stacks of work items, and what work items
//! that wait at a barrier have to remember.
//!
//! `locals.rs` gives registers their locals, `emit.rs` has an arm for each operation (`halves.rs` for those on
//! halves), `memory.rs` the fence, `barriers.rs` the way back into the middle of a function, `subgroups.rs` what items
//! that wait do together (`products.rs`: products of matrices).

mod barriers;
mod emit;
mod halves;
mod locals;
mod memory;
mod products;
mod subgroups;

use wasm_encoder::{
    CodeSection, ConstExpr, CustomSection, DataSection, EntityType, ExportKind, ExportSection, Function,
    FunctionSection, ImportSection, MemorySection, MemoryType, Module, TypeSection, ValType,
};

use crate::image::Param;
use crate::ir::{Body, SHARED_ADDRESS, Ty};
use crate::legalize::{Legal, Lookup};
use crate::refusal::{Refusal, SourceLocation};
use subgroups::{SubgroupHelper, scratch_bytes};

/// Where a thread's own memory has what it is called with. All numbers are little-endian.
#[derive(Debug, Clone, Copy)]
pub struct CallLayout {
    /// The first group's number and how many there are, eight bytes each.
    pub first: u32,
    pub count: u32,
    /// Work items of a group, and groups, in three dimensions.
    pub items: u32,
    pub groups: u32,
    /// The addresses of the stacks and of what waiting items remember.
    pub stacks: u32,
    pub contexts: u32,
    /// What a trap leaves: kind, site, which memory, offset, then six numbers of group and item, four bytes each.
    pub trap: u32,
    /// Parameters, so many bytes each: a window's address and size, or a number.
    pub params: u32,
    pub param_bytes: u32,
}

pub const CALL: CallLayout = CallLayout {
    first: 0,
    count: 8,
    items: 16,
    groups: 28,
    stacks: 40,
    contexts: 44,
    trap: 64,
    params: 128,
    param_bytes: 16,
};

/// The name of the section in which an image says how it wants to be run.
const SECTION: &str = "tensor-wasm-host";

/// How a kernel for the CPU is to be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLayout {
    pub params: Vec<Param>,
    /// What the thread's own memory needs, besides stacks and contexts.
    pub fixed_bytes: u32,
    /// For each work item that is under way: of a kernel without barriers one, else all of a group.
    pub stack_bytes: u32,
    pub context_bytes: u32,
    pub has_barriers: bool,
    pub shared_bytes: u32,
    /// Windows lie from here on, and below the other.
    pub windows_from: u32,
    pub windows_to: u32,
}

/// A kernel compiled for a CPU.
#[derive(Debug, Clone, PartialEq)]
pub struct HostImage {
    pub name: String,
    pub wasm: Vec<u8>,
    pub layout: HostLayout,
    pub sites: Vec<SourceLocation>,
}

impl HostLayout {
    /// Bytes of the thread's own memory for groups of so many work items, and where the stacks and the contexts begin.
    pub fn memory(&self, items: u32) -> (u64, u32, u32) {
        let under_way = if self.has_barriers { u64::from(items) } else { 1 };
        let stacks = u64::from(self.fixed_bytes);
        let contexts = stacks + under_way * u64::from(self.stack_bytes);
        let end = contexts + if self.has_barriers { under_way * u64::from(self.context_bytes) } else { 0 };
        let low = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        (end, low(stacks), low(contexts))
    }

    fn write(&self) -> Vec<u8> {
        let numbers = [
            self.fixed_bytes,
            self.stack_bytes,
            self.context_bytes,
            u32::from(self.has_barriers),
            self.shared_bytes,
            self.windows_from,
            self.windows_to,
        ];
        let mut bytes: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
        bytes.extend(self.params.iter().map(|param| match param {
            Param::Window => 0,
            Param::Scalar(Ty::I32) => 1,
            Param::Scalar(Ty::I64) => 2,
            Param::Scalar(Ty::F32) => 3,
            Param::Scalar(Ty::F64) => 4,
        }));
        bytes
    }

    /// Reads it from an image; none if it is no such image.
    pub fn read(wasm: &[u8]) -> Option<HostLayout> {
        let mut sections = wasmparser::Parser::new(0).parse_all(wasm).filter_map(Result::ok);
        let data = sections.find_map(|payload| {
            let wasmparser::Payload::CustomSection(section) = payload else { return None };
            (section.name() == SECTION).then(|| section.data())
        })?;
        let number = |n: usize| data.get(4 * n..4 * n + 4)?.try_into().ok().map(u32::from_le_bytes);
        let param = |byte: &u8| {
            Some(match byte {
                0 => Param::Window,
                1 => Param::Scalar(Ty::I32),
                2 => Param::Scalar(Ty::I64),
                3 => Param::Scalar(Ty::F32),
                4 => Param::Scalar(Ty::F64),
                _ => return None,
            })
        };
        Some(HostLayout {
            fixed_bytes: number(0)?,
            stack_bytes: number(1)?,
            context_bytes: number(2)?,
            has_barriers: number(3)? != 0,
            shared_bytes: number(4)?,
            windows_from: number(5)?,
            windows_to: number(6)?,
            params: data.get(28..)?.iter().map(param).collect::<Option<_>>()?,
        })
    }
}

/// Where things are in a thread's own memory.
struct OwnMemory {
    data: u32,
    shared: u32,
    /// Where values of a subgroup are put together.
    scratch: u32,
    fixed_bytes: u32,
}

impl OwnMemory {
    fn of(body: &Body) -> OwnMemory {
        let size = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        let data = CALL.params + CALL.param_bytes * size(body.params.len());
        let shared = (data + size(body.data.len())).next_multiple_of(16);
        let scratch = (shared + body.shared_bytes).next_multiple_of(16);
        OwnMemory { data, shared, scratch, fixed_bytes: (scratch + scratch_bytes(body)).next_multiple_of(64) }
    }
}

pub(crate) fn emit(legal: &Legal) -> Result<HostImage, Refusal> {
    let Legal { body, windows, .. } = legal;
    let plan = OwnMemory::of(body);
    let (run, context_bytes) = emit::run(legal, &plan);
    if run.byte_len() > FUNCTION_BYTES_MAX {
        let place = SourceLocation { function: body.name.clone(), offset: None };
        return Err(Refusal::TooLong { ops_max: crate::assemble::OPS_MAX, place });
    }
    let param = |(reg, is_window): (&crate::ir::Reg, &bool)| {
        if *is_window { Param::Window } else { Param::Scalar(body.ty(*reg)) }
    };
    let layout = HostLayout {
        params: body.params.iter().zip(windows).map(param).collect(),
        fixed_bytes: plan.fixed_bytes,
        stack_bytes: body.stack_bytes,
        context_bytes,
        has_barriers: barriers::has_any(body),
        shared_bytes: body.shared_bytes,
        windows_from: body.windows_from(),
        windows_to: SHARED_ADDRESS,
    };
    let finds = Lookup::ALL.map(|lookup| memory::find(legal, lookup, &plan));
    let helpers: Vec<Function> =
        SubgroupHelper::all(body).into_iter().map(|helper| helper.function(&plan, context_bytes)).collect();
    let wasm = assemble(body, &plan, &layout, &run, &finds, &helpers);
    Ok(HostImage { name: body.name.clone(), wasm, layout, sites: body.sites.clone() })
}

/// The functions, by their numbers. `poll` is imported: it returns 0, or the kind of trap that the launch is to end
/// with.
const POLL: u32 = 0;
const RUN: u32 = 1;

/// The function that looks an address up.
fn find_number(lookup: Lookup) -> u32 {
    match lookup {
        Lookup::Read => 2,
        Lookup::Write => 3,
        Lookup::Atomic => 4,
    }
}

/// A function that computes what the items of a subgroup do together.
fn subgroup_number(helper: usize) -> u32 {
    RUN + 1 + u32::try_from(Lookup::ALL.len() + helper).unwrap_or(0)
}

/// Engines refuse functions that are longer than this.
const FUNCTION_BYTES_MAX: usize = 7 << 20;

fn assemble(
    body: &Body,
    plan: &OwnMemory,
    layout: &HostLayout,
    run: &Function,
    finds: &[Function],
    helpers: &[Function],
) -> Vec<u8> {
    let mut types = TypeSection::new();
    types.ty().function([], [ValType::I32]);
    types.ty().function([ValType::I64, ValType::I64, ValType::I32], [ValType::I64]);
    types.ty().function(SubgroupHelper::params(), [ValType::I64]);
    let mut imports = ImportSection::new();
    let windows =
        MemoryType { minimum: 1, maximum: Some(1 << 16), memory64: false, shared: true, page_size_log2: None };
    imports.import("host", "windows", EntityType::Memory(windows));
    imports.import("host", "poll", EntityType::Function(0));
    let mut functions = FunctionSection::new();
    functions.function(0);
    for _ in finds {
        functions.function(1);
    }
    for _ in helpers {
        functions.function(2);
    }
    let mut memories = MemorySection::new();
    let minimum = u64::from(plan.fixed_bytes).div_ceil(1 << 16).max(1);
    memories.memory(MemoryType { minimum, maximum: None, memory64: false, shared: false, page_size_log2: None });
    let mut exports = ExportSection::new();
    exports.export("run", ExportKind::Func, RUN).export("own", ExportKind::Memory, 1);
    let mut code = CodeSection::new();
    code.function(run);
    for function in finds.iter().chain(helpers) {
        code.function(function);
    }
    let mut module = Module::new();
    module.section(&types).section(&imports).section(&functions).section(&memories).section(&exports).section(&code);
    if !body.data.is_empty() {
        let mut data = DataSection::new();
        data.active(1, &ConstExpr::i32_const(plan.data.cast_signed()), body.data.iter().copied());
        module.section(&data);
    }
    module.section(&CustomSection { name: SECTION.into(), data: layout.write().into() });
    module.finish()
}
