//! From a legalised kernel to PTX, operation by operation. A table says what most of them are in PTX (`table.rs`); what
//! they mean was said before (`legalize.rs`). The rest is the fence, which is this backend's own:
//!
//! - An access whose address comes from one window is clamped into it and remembers the largest offset asked for;
//!   whether any was outside is looked at where the work item ends, at barriers and when it polls. So a bad access
//!   never leaves the window, and costs the launch its result a little later. Anything else is looked up among all
//!   windows and traps at once (`memory.rs`). Counted loops are checked before they begin (`counted.rs`).
//! - Loops pay for their iterations and poll now and then: whether the launch has run for too long, or was stopped
//!   (`control.rs`).
//! - Items of a subgroup agree on who does something together before they do it, unless all are there (`subgroups.rs`).
//! - A trap writes one record for the launch and ends the work item.
//!
//! A kernel that a host built and vouches for has none of this: its windows are addresses, and that is all. A handler
//! of an actor is fenced too, inside of a lane that calls it once per message (`actor.rs`).

/// Writes a line of PTX.
macro_rules! put {
    ($emitter:expr, $($arg:tt)*) => {{
        $emitter.out.push('\t');
        // Writing to a string does not fail.
        let _ = writeln!($emitter.out, $($arg)*);
    }};
}

mod actor;
mod control;
mod counted;
mod entry;
mod gpu;
mod memory;
mod subgroups;
mod table;

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use self::actor::Handler;
use self::table::{binary, math, unary};

use crate::assemble::{OPS_MAX, SHARED_BYTES_MAX};
use crate::facts::Facts;
use crate::gpu::{GpuOp, Target};
use crate::image::{KernelImage, Param};
use crate::ir::{
    Access, Axis, Body, Flow, Id, Label, Least, Op, Reg, Region, SHARED_ADDRESS, Site, Structure, Test, TrapKind, Ty,
    low_half,
};
use crate::legalize::Legal;
use crate::refusal::{Refusal, SourceLocation};

/// Operations that a work item does in loops between two polls: some milliseconds on a device that is full.
const FUEL: u32 = 1 << 18;

/// One group in this many polls as it starts, for launches of many groups that do not loop. A power of two.
const GROUPS_PER_POLL: u32 = 1 << 10;

/// Limits that single accesses are checked against; the device's compiler keeps all of them in registers. Beyond these
/// an access is looked up among all regions.
const LIMITS_MAX: usize = 64;

/// PTX of one kernel.
const PTX_BYTES_MAX: usize = 16 << 20;

/// Limits that are looked at, counted once for each place at which they are.
const CHECKS_MAX: usize = 100_000;

/// A kernel of so few operations, without loops, runs to its end whatever happens.
const SHORT_OPS_MAX: usize = 256;

/// The end of a region for accesses of so many bytes.
struct RegionLimit {
    region: Region,
    bytes: u32,
    /// What an offset is a multiple of.
    multiple: u32,
    /// The first access that it is for.
    site: Site,
}

/// A copy of a loop without a fence.
struct UnfencedCopy {
    labels: HashSet<u32>,
    copy: usize,
    /// Registers that addresses are a fixed distance from; the state space, the register that holds the device's
    /// address, and how far below the other that is.
    pointers: HashMap<Reg, (&'static str, String, i32)>,
}

/// Where an access goes: in a state space, at an address in a register.
struct FencedAddress {
    space: &'static str,
    address: String,
}

struct PtxEmitter<'b> {
    legal: &'b Legal,
    body: &'b Body,
    facts: &'b Facts,
    windows: &'b [bool],
    out: String,
    /// Code that is seldom run, after the rest.
    aside: String,
    temps: [u32; 7],
    limits: Vec<RegionLimit>,
    traps: Vec<(TrapKind, Site)>,
    trap_numbers: HashMap<(TrapKind, u32), usize>,
    /// Labels of those `if`s that have an `else`.
    with_else: HashSet<u32>,
    loops: Vec<(Label, usize)>,
    /// The copy of a loop without a fence that is being written.
    fast: Option<UnfencedCopy>,
    /// Loops that have such a copy, which ends after the other.
    skipped: HashSet<u32>,
    /// Operations that were written more than once.
    copied: usize,
    asides: u32,
    /// The code in which a loop polls, by its label.
    polls: HashMap<u32, String>,
    /// Groups of accesses that were checked together: the state space and a register with the address of the lowest.
    checked: HashMap<usize, (&'static str, String)>,
    /// Places at which limits are looked at.
    checks: usize,
    /// The operation that is being written.
    at: usize,
    /// The operation before which the work item looks whether the launch was stopped.
    look_before: usize,
    /// It is called by a lane, once per message.
    handler: Option<Handler>,
}

/// Kinds of registers that belong to no register of the kernel: their prefix and their type.
const TEMPS: [(&str, &str); 7] =
    [("%t", ".b32"), ("%u", ".b64"), ("%x", ".f32"), ("%y", ".f64"), ("%q", ".pred"), ("%w", ".b32"), ("%h", ".b16")];

pub(crate) fn emit(legal: &Legal) -> Result<KernelImage, Refusal> {
    if legal.is_trusted {
        check_trusted(legal)?;
    } else {
        check_fenced(&legal.body)?;
    }
    emit_for(legal, None)
}

/// A handler with its lane around it, called by so many work items together.
pub(crate) fn emit_actor(legal: &Legal, items: u32) -> Result<KernelImage, Refusal> {
    check_fenced(&legal.body)?;
    actor::check_handler(&legal.body)?;
    emit_for(legal, Some(Handler { items }))
}

fn emit_for(legal: &Legal, handler: Option<Handler>) -> Result<KernelImage, Refusal> {
    let Legal { body, facts, windows, .. } = legal;
    let mut emitter = PtxEmitter {
        legal,
        body,
        facts,
        windows,
        out: String::new(),
        aside: String::new(),
        temps: [0; 7],
        limits: Vec::new(),
        traps: Vec::new(),
        trap_numbers: HashMap::new(),
        with_else: body
            .ops
            .iter()
            .filter_map(|op| if let Op::Else { label } = op { Some(label.0) } else { None })
            .collect(),
        loops: Vec::new(),
        fast: None,
        skipped: HashSet::new(),
        copied: 0,
        asides: 0,
        polls: HashMap::new(),
        checked: HashMap::new(),
        checks: 0,
        at: 0,
        // A message is begun or not; nobody calls it back.
        look_before: if handler.is_some() { body.ops.len() } else { look_before(legal) },
        handler,
    };
    emitter.operations();
    let needed = |n: usize| {
        let is_own = |limit: &&RegionLimit| limit.region == Region::Window(u16::try_from(n).unwrap_or(u16::MAX));
        emitter.limits.iter().filter(is_own).map(|limit| limit.bytes).max().unwrap_or(0)
    };
    let window_bytes_min = (0..windows.len()).map(needed).collect();
    let is_too_long = emitter.out.len() + emitter.aside.len() > PTX_BYTES_MAX;
    if is_too_long || emitter.checks * emitter.limits.len() > CHECKS_MAX {
        let place = SourceLocation { function: body.name.clone(), offset: None };
        return Err(Refusal::TooLong { ops_max: OPS_MAX, place });
    }
    let text = emitter.finish();
    let params = body.params.iter().zip(windows);
    let param = |(reg, is_window): (&Reg, &bool)| if *is_window { Param::Window } else { Param::Scalar(body.ty(*reg)) };
    Ok(KernelImage {
        name: body.name.clone(),
        entry: entry_name(&body.name),
        ptx: text,
        params: params.map(param).collect(),
        window_bytes_min,
        windows_from: body.windows_from(),
        shared_bytes: body.shared_bytes,
        dynamic_shared_bytes: if is_dynamic(body) { body.shared_bytes } else { 0 },
        target: target(body),
        sites: body.sites.clone(),
    })
}

/// Without a fence, which memory an access goes to has to be known before.
fn check_trusted(legal: &Legal) -> Result<(), Refusal> {
    let refused = |why: &str| Err(Refusal::NotAKernel { name: legal.body.name.clone(), why: why.to_owned() });
    let is_known = |op: &Op| match op.access().map(|(at, _)| at.region) {
        Some(Region::Window(_) | Region::Shared) => true,
        Some(Region::SmallWindow(_) | Region::Stack | Region::Any) => false,
        None => !matches!(op, Op::Gpu { op, .. } if !is_of_its_space(op)),
    };
    if !legal.body.ops.iter().all(is_known) {
        return refused("an address is not of one window, or of shared memory, and without a fence it has to be");
    }
    if legal.body.stack_bytes > 0 || !legal.body.data.is_empty() {
        return refused("it has a stack or data of its own, for which there is a fence");
    }
    Ok(())
}

/// Whether what only a GPU does goes to the memory that it is for.
fn is_of_its_space(op: &GpuOp) -> bool {
    match op {
        GpuOp::LoadTiles { at, .. } | GpuOp::SharedAddress { at, .. } => at.region == Region::Shared,
        GpuOp::Copy { to, from, .. } => to.region == Region::Shared && matches!(from.region, Region::Window(_)),
        GpuOp::Multiply { .. }
        | GpuOp::CommitCopies
        | GpuOp::AwaitCopies { .. }
        | GpuOp::MultiplyShared { .. }
        | GpuOp::FenceMultiply
        | GpuOp::CommitMultiply
        | GpuOp::AwaitMultiply { .. }
        | GpuOp::FenceAsync
        | GpuOp::Pack { .. }
        | GpuOp::Unpack { .. }
        | GpuOp::RoundTf32 { .. }
        | GpuOp::Max { .. }
        | GpuOp::Exp2 { .. } => true,
    }
}

/// What there is no fence for is refused.
fn check_fenced(body: &Body) -> Result<(), Refusal> {
    let has_accesses = body.ops.iter().any(|op| matches!(op, Op::Gpu { op, .. } if op.orders_memory()));
    if !has_accesses && !is_dynamic(body) {
        return Ok(());
    }
    let why = "it copies to shared memory beside its computing, loads tiles from there, or has more of it than every \
               device gives: for that there is no fence"
        .to_owned();
    Err(Refusal::NotAKernel { name: body.name.clone(), why })
}

/// Whether it has more shared memory than can be part of its PTX: then a launch says how much.
fn is_dynamic(body: &Body) -> bool {
    body.shared_bytes > SHARED_BYTES_MAX
}

/// The least device that has all its instructions.
fn target(body: &Body) -> Target {
    let targets = body.ops.iter().map(|op| if let Op::Gpu { op, .. } = op { op.target() } else { Target::default() });
    let least = if body.has_products() { Target::Ampere } else { Target::default() };
    targets.max().unwrap_or_default().max(least)
}

/// A name that PTX allows.
fn entry_name(name: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' };
    format!("k_{}", name.chars().take(100).map(allowed).collect::<String>())
}

/// The first operation that writes, loops or waits, or the `if` in which it does so. A path around it comes to the
/// launch's end a little later.
fn look_before(legal: &Legal) -> usize {
    let body = &legal.body;
    // What is over soon need not look.
    let is_short = legal.is_trusted
        || legal.cost(0, body.ops.len()) <= SHORT_OPS_MAX && !body.ops.iter().any(|op| matches!(op, Op::Loop { .. }));
    if is_short {
        return body.ops.len();
    }
    let mut outer_if: Option<(Label, usize)> = None;
    for (n, op) in body.ops.iter().enumerate() {
        match op.flow() {
            Flow::Open(_, Structure::Loop) | Flow::Wait => return outer_if.map_or(n, |(_, at)| at),
            Flow::Straight if op.writes() => return outer_if.map_or(n, |(_, at)| at),
            Flow::Leave if matches!(op, Op::Return) => return outer_if.map_or(n, |(_, at)| at),
            Flow::Open(label, Structure::If) if outer_if.is_none() => outer_if = Some((label, n)),
            Flow::Close(label) if outer_if.is_some_and(|(own, _)| own == label) => outer_if = None,
            Flow::Straight
            | Flow::Leave
            | Flow::Else(_)
            | Flow::Close(_)
            | Flow::Open(_, Structure::Block | Structure::If) => {}
        }
    }
    body.ops.len()
}

impl PtxEmitter<'_> {
    /// The state space of a region. What is looked up has none: its address is generic.
    fn space(&self, region: Region) -> &'static str {
        match region {
            Region::Window(n) | Region::SmallWindow(n) if self.handler.is_some() && n > 0 => ".shared",
            Region::Window(_) | Region::SmallWindow(_) => ".global",
            Region::Stack => ".local",
            Region::Shared => ".shared",
            Region::Any => "",
        }
    }

    fn temp(&mut self, kind: usize) -> String {
        self.temps[kind] += 1;
        format!("{}{}", TEMPS[kind].0, self.temps[kind] - 1)
    }

    fn b32(&mut self) -> String {
        self.temp(0)
    }

    fn b64(&mut self) -> String {
        self.temp(1)
    }

    fn pred(&mut self) -> String {
        self.temp(4)
    }

    fn b16(&mut self) -> String {
        self.temp(6)
    }

    fn reg(&self, reg: Reg) -> String {
        let prefix = match self.body.ty(reg) {
            Ty::I32 => "%r",
            Ty::I64 => "%l",
            Ty::F32 => "%f",
            Ty::F64 => "%d",
        };
        format!("{prefix}{}", reg.0)
    }

    /// Fills in a line of the tables above.
    fn fill(&mut self, template: &str, to: &str, operands: &[&str]) {
        let mut own: Vec<(char, String)> = Vec::new();
        for instruction in template.split_inclusive(';') {
            let mut line = String::new();
            let mut word = String::new();
            for c in instruction.trim_start().chars().chain([' ']) {
                if c.is_ascii_alphanumeric() || c == '.' {
                    word.push(c);
                    continue;
                }
                match word.as_str() {
                    "D" => line.push_str(to),
                    "A" | "B" | "C" => line.push_str(operands[usize::from(word.as_bytes()[0] - b'A')]),
                    "T" | "S" | "U" | "V" | "F" | "G" | "Q" | "H" => {
                        let letter = word.chars().next().unwrap_or('T');
                        let found = own.iter().find(|(own, _)| *own == letter).map(|(_, name)| name.clone());
                        let name = found.unwrap_or_else(|| {
                            let kind = match letter {
                                'T' | 'S' => 0,
                                'U' | 'V' => 1,
                                'F' => 2,
                                'G' => 3,
                                'H' => 6,
                                _ => 4,
                            };
                            let name = self.temp(kind);
                            own.push((letter, name.clone()));
                            name
                        });
                        line.push_str(&name);
                    }
                    other => line.push_str(other),
                }
                word.clear();
                line.push(c);
            }
            put!(self, "{}", line.trim_end());
        }
    }

    /// A label to which a trap of this kind at this site goes.
    fn trap(&mut self, kind: TrapKind, site: Site) -> String {
        let traps = &mut self.traps;
        let at = *self.trap_numbers.entry((kind, site.0)).or_insert_with(|| {
            traps.push((kind, site));
            traps.len() - 1
        });
        format!("TRAP_{at}")
    }

    fn operations(&mut self) {
        let body = self.body;
        for (n, op) in body.ops.iter().enumerate() {
            if n == self.look_before {
                self.look();
            }
            self.one(n, op);
            if self.out.len() + self.aside.len() > PTX_BYTES_MAX {
                return;
            }
        }
    }

    fn one(&mut self, n: usize, op: &Op) {
        self.at = n;
        self.operation(n, op);
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each operation")]
    fn operation(&mut self, n: usize, op: &Op) {
        match op {
            Op::Const { to, bits } => {
                let name = self.reg(*to);
                match self.body.ty(*to) {
                    Ty::I32 => put!(self, "mov.b32 {name}, {};", low_half(*bits).cast_signed()),
                    Ty::I64 => put!(self, "mov.b64 {name}, {};", bits.cast_signed()),
                    Ty::F32 => put!(self, "mov.f32 {name}, 0f{:08X};", low_half(*bits)),
                    Ty::F64 => put!(self, "mov.f64 {name}, 0d{bits:016X};"),
                }
            }
            Op::Move { to, from } => {
                let (ty, to, from) = (mov_type(self.body.ty(*to)), self.reg(*to), self.reg(*from));
                put!(self, "mov.{ty} {to}, {from};");
            }
            Op::Un { op, to, a, .. } => {
                let (to, a) = (self.reg(*to), self.reg(*a));
                self.fill(unary(*op), &to, &[&a]);
            }
            Op::Bin { op, to, a, b, .. } => {
                let (to, a, b) = (self.reg(*to), self.reg(*a), self.reg(*b));
                self.fill(binary(*op), &to, &[&a, &b]);
            }
            Op::Math { op, to, operands } => {
                let operands: Vec<String> = operands.iter().map(|reg| self.reg(*reg)).collect();
                let to = self.reg(*to);
                self.fill(math(*op), &to, &[&operands[0], &operands[1], &operands[2]]);
            }
            Op::Select { to, condition, a, b } => {
                let q = self.test(*condition);
                let (ty, to) = (mov_type(self.body.ty(*to)), self.reg(*to));
                let (a, b) = (self.reg(*a), self.reg(*b));
                put!(self, "selp.{ty} {to}, {a}, {b}, {q};");
            }
            Op::Id { id, to, axis } => {
                let to = self.reg(*to);
                match self.handler {
                    Some(handler) => self.handler_id(handler, *id, &to, *axis),
                    None => self.id(*id, &to, *axis),
                }
            }
            Op::Shared { to } => {
                let to = self.reg(*to);
                let start = if self.legal.is_trusted { 0 } else { SHARED_ADDRESS };
                put!(self, "mov.b32 {to}, {};", start.cast_signed());
            }
            Op::Barrier { .. } => {
                self.check_limits();
                if let Some(handler) = self.handler {
                    self.handler_barrier(handler);
                } else if self.body.has_subgroups() {
                    self.barrier_among_subgroups();
                } else {
                    put!(self, "barrier.sync 0;");
                }
            }
            Op::Load { to, access, at, site } => self.load(*to, *access, *at, *site),
            Op::Store { access, at, value, site } => self.store(*access, *at, *value, *site),
            Op::AtomicLoad { to, access, at, site } => {
                let target = self.atomic_target(*at, access.bytes, *site);
                let (ty, to) = (load_type(*access), self.reg(*to));
                let scope = scope(target.space);
                put!(self, "ld.acquire.{scope}{}.{ty} {to}, [{}];", target.space, target.address);
            }
            Op::AtomicStore { access, at, value, site } => {
                let target = self.atomic_target(*at, access.bytes, *site);
                let (ty, value) = (if access.bytes == 8 { "u64" } else { "u32" }, self.reg(*value));
                let scope = scope(target.space);
                put!(self, "st.release.{scope}{}.{ty} [{}], {value};", target.space, target.address);
            }
            Op::Atomic { op, to, access, at, value, expected, site } => {
                let target = self.atomic_target(*at, access.bytes, *site);
                self.read_modify_write(*op, *to, *access, &target, *value, *expected);
            }
            Op::Shuffle { to, value, mask, .. } => {
                let (ty, to, value) = (self.body.ty(*to), self.reg(*to), self.reg(*value));
                self.exchange("bfly", ty, &to, &value, &mask.to_string(), "-1");
            }
            Op::Subgroup { op, to, value, .. } => self.subgroup(*op, *to, *value),
            Op::Product { product, .. } => self.product(product),
            Op::CheckRange { start, count, is_write, site } => self.check_range(*start, *count, *is_write, *site),
            Op::Gpu { op, .. } => self.gpu(op),
            Op::Fence => put!(self, "fence.sc.gpu;"),
            Op::Trap { kind, site } => {
                let trap = self.trap(*kind, *site);
                put!(self, "bra {trap};");
            }
            Op::TrapIf { test, kind, site } => {
                let trap = self.trap(*kind, *site);
                self.trap_if(*test, &trap);
            }
            Op::Canonical { to, from } => {
                let (q, ty) = (self.pred(), mov_type(self.body.ty(*to)));
                let (to, from) = (self.reg(*to), self.reg(*from));
                let nan = if ty == "f64" { "0d7FF8000000000000" } else { "0f7FC00000" };
                put!(self, "setp.nan.{ty} {q}, {from}, {from};");
                put!(self, "selp.{ty} {to}, {nan}, {from}, {q};");
            }
            Op::Block { .. } => {}
            Op::Loop { label } => {
                self.counted_loop(n);
                self.loops.push((*label, n));
                let _ = writeln!(self.out, "L{}:", label.0);
            }
            Op::If { condition, label } => {
                let q = self.test(*condition);
                let prefix = if self.with_else.contains(&label.0) { 'E' } else { 'L' };
                let name = self.name(prefix, *label);
                put!(self, "@!{q} bra {name};");
            }
            Op::Else { label } => {
                let (end, own) = (self.name('L', *label), self.name('E', *label));
                put!(self, "bra {end};");
                let _ = writeln!(self.out, "{own}:");
            }
            Op::End { label } => match self.loops.last() {
                Some((own, _)) if own == label => {
                    self.loops.pop();
                    if self.skipped.contains(&label.0) {
                        let _ = writeln!(self.out, "D{}:", label.0);
                    }
                }
                _ => {
                    let name = self.name('L', *label);
                    let _ = writeln!(self.out, "{name}:");
                }
            },
            Op::Branch { label } => self.branch(n, *label, None),
            Op::BranchIf { condition, label } => {
                let q = self.test(*condition);
                self.branch(n, *label, Some(&q));
            }
            Op::BranchTable { index, labels } => self.branch_table(n, *index, labels),
            Op::Return => {
                self.check_limits();
                put!(self, "{}", if self.handler.is_some() { "bra DONE;" } else { "ret;" });
            }
        }
    }

    fn test(&mut self, condition: Reg) -> String {
        let (q, condition) = (self.pred(), self.reg(condition));
        put!(self, "setp.ne.s32 {q}, {condition}, 0;");
        q
    }

    /// Goes to a trap if a test is true.
    fn trap_if(&mut self, test: Test, trap: &str) {
        let q = self.pred();
        match test {
            Test::IsZero(a) => {
                let (ty, a) = (signed_type(self.body.ty(a)), self.reg(a));
                put!(self, "setp.eq.{ty} {q}, {a}, 0;");
            }
            Test::Overflows(a, b) => {
                let lowest = if self.body.ty(a) == Ty::I64 { i64::MIN } else { i64::from(i32::MIN) };
                let (ty, a, b) = (signed_type(self.body.ty(a)), self.reg(a), self.reg(b));
                put!(self, "setp.eq.{ty} {q}, {a}, {lowest};");
                put!(self, "setp.eq.and.{ty} {q}, {b}, -1, {q};");
            }
            Test::IsNan(a) => {
                let (ty, a) = (mov_type(self.body.ty(a)), self.reg(a));
                put!(self, "setp.nan.{ty} {q}, {a}, {a};");
            }
            Test::IsOutside(a, least, below) => {
                let ty = self.body.ty(a);
                let (comparison, low) = match least {
                    Least::At(low) => ("ge", low),
                    Least::Above(low) => ("gt", low),
                };
                let (low, below) = (float_text(ty, low), float_text(ty, below));
                let (ty, a) = (mov_type(ty), self.reg(a));
                put!(self, "setp.{comparison}.{ty} {q}, {a}, {low};");
                put!(self, "setp.lt.and.{ty} {q}, {a}, {below}, {q};");
                put!(self, "@!{q} bra {trap};");
                return;
            }
            Test::IsUnaligned(base, offset, bytes) => {
                let (low, base) = (self.b32(), self.reg(base));
                put!(self, "add.s32 {low}, {base}, {};", offset.cast_signed());
                put!(self, "and.b32 {low}, {low}, {};", bytes - 1);
                put!(self, "setp.ne.s32 {q}, {low}, 0;");
            }
        }
        put!(self, "@{q} bra {trap};");
    }

    fn id(&mut self, id: Id, to: &str, axis: Axis) {
        let axis = match axis {
            Axis::X => 'x',
            Axis::Y => 'y',
            Axis::Z => 'z',
        };
        match id {
            Id::Local => put!(self, "mov.u32 {to}, %tid.{axis};"),
            Id::Group => put!(self, "mov.u32 {to}, %ctaid.{axis};"),
            Id::LocalSize => put!(self, "mov.u32 {to}, %ntid.{axis};"),
            Id::Groups => put!(self, "mov.u32 {to}, %nctaid.{axis};"),
            Id::Global | Id::GlobalSize => {
                let (size, other) = (self.b32(), self.b32());
                put!(self, "mov.u32 {size}, %ntid.{axis};");
                if id == Id::Global {
                    let group = self.b32();
                    put!(self, "mov.u32 {group}, %ctaid.{axis};");
                    put!(self, "mov.u32 {other}, %tid.{axis};");
                    put!(self, "mad.lo.s32 {to}, {group}, {size}, {other};");
                } else {
                    put!(self, "mov.u32 {other}, %nctaid.{axis};");
                    put!(self, "mul.lo.s32 {to}, {size}, {other};");
                }
            }
        }
    }
}

fn mov_type(ty: Ty) -> &'static str {
    match ty {
        Ty::I32 => "b32",
        Ty::I64 => "b64",
        Ty::F32 => "f32",
        Ty::F64 => "f64",
    }
}

fn signed_type(ty: Ty) -> &'static str {
    if ty.bytes() == 8 { "s64" } else { "s32" }
}

/// A float as PTX writes it.
fn float_text(ty: Ty, value: f64) -> String {
    match ty {
        Ty::I64 | Ty::F64 => format!("0d{:016X}", value.to_bits()),
        #[expect(clippy::cast_possible_truncation, reason = "a power of two, or next to one, as f32 has them")]
        Ty::I32 | Ty::F32 => format!("0f{:08X}", (value as f32).to_bits()),
    }
}

fn param_type(ty: Ty) -> &'static str {
    match ty {
        Ty::I32 => "u32",
        Ty::I64 => "u64",
        Ty::F32 => "f32",
        Ty::F64 => "f64",
    }
}

fn load_type(access: Access) -> &'static str {
    match (access.bytes, access.is_signed) {
        (1, false) => "u8",
        (1, true) => "s8",
        (2, false) => "u16",
        (2, true) => "s16",
        (4, false) => "u32",
        (4, true) => "s32",
        _ => "u64",
    }
}

/// Who else sees an atomic in a space.
fn scope(space: &str) -> &'static str {
    if space == ".shared" { "cta" } else { "gpu" }
}
