//! Runs the PTX that we emit, work item by work item: an oracle for the compiler where there is no GPU. It is written
//! from what PTX says its instructions do, not from what the compiler means by them, and it is stricter than a device:
//! an access outside the memory it was given, or one that is not aligned, is an error and not a fault of the whole
//! device.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "registers have 64 bits here, and instructions look at some of them"
)]

mod parse;
mod warp;

use std::collections::HashMap;

use parse::{Operand, PtxInstruction, PtxUnit, type_bytes};

/// Nanoseconds that the emulated timer advances with each instruction of a work item.
const NANOS_PER_INSTRUCTION: u64 = 100;

/// An item that runs for longer than this is taken to run for ever: polls should have stopped it.
const STEPS_MAX: u64 = 2_000_000_000;

/// Items that do something together: a warp, and four of them.
const WARP: usize = 32;
const WARPGROUP: usize = 128;

/// Where the emulator puts what belongs to no buffer.
const DATA_AT: u64 = 0x7000_0000_0000;
const SHARED_AT: u64 = 0x7100_0000_0000;
const LOCAL_AT: u64 = 0x7200_0000_0000;

/// A program that was read.
pub struct Emulator {
    unit: PtxUnit,
}

/// Memory of the emulated device: pieces at addresses, and perhaps memory of somebody else.
#[derive(Default)]
pub struct DeviceMemory {
    pieces: Vec<(u64, Vec<u8>)>,
    other: Option<Box<dyn OtherMemory>>,
}

/// Memory that is not the emulator's own. Both say whether there is such memory.
pub trait OtherMemory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool;
    fn write(&self, address: u64, bytes: &[u8]) -> bool;
}

impl DeviceMemory {
    /// Nothing but what somebody else has.
    pub fn of(other: Box<dyn OtherMemory>) -> DeviceMemory {
        DeviceMemory { pieces: Vec::new(), other: Some(other) }
    }

    /// Adds a piece at an address that no other has.
    pub fn add(&mut self, address: u64, bytes: Vec<u8>) {
        self.pieces.push((address, bytes));
    }

    pub fn bytes(&self, address: u64) -> &[u8] {
        self.pieces.iter().find(|(at, _)| *at == address).map_or(&[], |(_, bytes)| bytes)
    }

    pub fn bytes_mut(&mut self, address: u64) -> &mut [u8] {
        self.pieces.iter_mut().find(|(at, _)| *at == address).map_or(&mut [], |(_, bytes)| bytes)
    }
}

/// One item of a group.
struct Item {
    registers: Vec<u64>,
    local: Vec<u8>,
    at: usize,
    id: [u32; 3],
    stands: Stands,
    /// Copies to shared memory that are under way, group by group; the last group is not committed yet.
    copies: Vec<Vec<PendingCopy>>,
    /// Products of a warpgroup that are under way, in its first item: groups of the numbers of their instructions and
    /// of both descriptors.
    products: Vec<Vec<(usize, u64, u64)>>,
}

/// Bytes that a copy has read and not yet written, and where they go.
type PendingCopy = (u64, [u8; COPY_BYTES]);

/// What one asynchronous copy moves.
const COPY_BYTES: usize = crate::gpu::COPY_BYTES as usize;

/// Whether an item goes on, and if not why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stands {
    Goes,
    /// At a barrier of this number, for so many items, or for all there are.
    AtBarrier(u32, Option<usize>),
    /// Before an instruction that the items of a warp do together.
    AtWarp,
    IsOver,
}

struct Run<'a> {
    unit: &'a PtxUnit,
    memory: &'a mut DeviceMemory,
    data: Vec<u8>,
    shared: Vec<u8>,
    params: &'a [u8],
    groups: [u32; 3],
    items: [u32; 3],
    group: [u32; 3],
    nanos: u64,
}

enum Next {
    Go(usize),
    /// It may be waiting for what another item writes: the others have a turn.
    Yield(usize),
    Barrier(u32, Option<usize>),
    Warp,
    Exit,
}

impl Emulator {
    pub fn new(ptx: &str) -> Result<Emulator, String> {
        parse::parse(ptx).map(|unit| Emulator { unit })
    }

    /// Offset and size of each parameter.
    pub fn params(&self) -> Vec<(u32, u32)> {
        self.unit.params.iter().map(|(_, offset, size)| (*offset as u32, *size as u32)).collect()
    }

    /// Runs a launch. What goes wrong is either the compiler's fault or the emulator's.
    pub fn run(
        &self,
        memory: &mut DeviceMemory,
        params: &[u8],
        groups: [u32; 3],
        items: [u32; 3],
    ) -> Result<(), String> {
        let mut run = self.run_of(memory, params, groups, items);
        for z in 0..groups[2] {
            for y in 0..groups[1] {
                for x in 0..groups[0] {
                    run.group = [x, y, z];
                    run.one_group()?;
                }
            }
        }
        Ok(())
    }

    /// One group of a launch, for those whose groups do not end: each is for a thread of its own.
    pub fn run_group(
        &self,
        memory: &mut DeviceMemory,
        params: &[u8],
        groups: [u32; 3],
        items: [u32; 3],
        group: [u32; 3],
    ) -> Result<(), String> {
        Run { group, ..self.run_of(memory, params, groups, items) }.one_group()
    }

    fn run_of<'a>(
        &'a self,
        memory: &'a mut DeviceMemory,
        params: &'a [u8],
        groups: [u32; 3],
        items: [u32; 3],
    ) -> Run<'a> {
        let data = self.unit.data.clone();
        let nanos = 1_000_000_000;
        Run { unit: &self.unit, memory, data, shared: Vec::new(), params, groups, items, group: [0; 3], nanos }
    }
}

impl Run<'_> {
    fn one_group(&mut self) -> Result<(), String> {
        self.shared = vec![0xa5; self.unit.shared_bytes];
        let [nx, ny, nz] = self.items;
        let mut items: Vec<Item> = Vec::new();
        for z in 0..nz {
            for y in 0..ny {
                for x in 0..nx {
                    items.push(Item {
                        // What nobody wrote is noticed.
                        registers: vec![0xdead_beef_dead_beef; self.unit.registers.len()],
                        local: vec![0xa5; self.unit.local_bytes],
                        at: 0,
                        id: [x, y, z],
                        stands: Stands::Goes,
                        copies: vec![Vec::new()],
                        products: vec![Vec::new()],
                    });
                }
            }
        }
        // Every item runs until it has to wait, or looks whether it still has to. Then warps whose items do something
        // together do it, and barriers open to which all have come.
        while items.iter().any(|item| item.stands != Stands::IsOver) {
            for item in items.iter_mut().filter(|item| item.stands == Stands::Goes) {
                self.until_it_waits(item)?;
            }
            let is_in_warp = items.iter().any(|item| item.stands == Stands::AtWarp);
            if is_in_warp {
                for warpgroup in items.chunks_mut(WARPGROUP) {
                    // Those that a warpgroup does are done by four warps.
                    if self.is_of_warpgroup(warpgroup) {
                        self.exchange(warpgroup, WARPGROUP)?;
                        continue;
                    }
                    for warp in warpgroup.chunks_mut(WARP) {
                        if !self.among(warp)? {
                            self.exchange(warp, WARP)?;
                        }
                    }
                }
            }
            self.barriers(&mut items)?;
            let is_stuck = items.iter().all(|item| !matches!(item.stands, Stands::Goes | Stands::IsOver));
            if is_stuck && is_in_warp {
                return Err("items of a warp wait for others of it that wait elsewhere: for ever".to_owned());
            }
            if is_stuck {
                return Err("items wait at barriers to which nobody else comes: for ever".to_owned());
            }
        }
        Ok(())
    }

    /// Opens the barriers to which all have come that they wait for. A vote tells each what all have said.
    fn barriers(&mut self, items: &mut [Item]) -> Result<(), String> {
        let live = items.iter().filter(|item| item.stands != Stands::IsOver).count();
        for first in 0..items.len() {
            let Stands::AtBarrier(number, count) = items[first].stands else { continue };
            let is_here = |item: &Item| matches!(item.stands, Stands::AtBarrier(own, _) if own == number);
            let here = items.iter().filter(|item| is_here(item)).count();
            if here < count.unwrap_or(live) {
                continue;
            }
            let mut all_say = 1;
            for item in items.iter().filter(|item| is_here(item)) {
                if let Some(said) = self.vote(item)? {
                    all_say &= said;
                }
            }
            for item in items.iter_mut().filter(|item| is_here(item)) {
                let instruction = self.unit.instructions.get(item.at).ok_or("it ran past its end")?;
                if let (Some(Operand::Register(to)), Some(_)) = (instruction.operands.first(), self.vote(item)?) {
                    item.registers[*to] = all_say;
                }
                (item.at, item.stands) = (item.at + 1, Stands::Goes);
            }
        }
        Ok(())
    }

    /// What an item says at a barrier that is a vote.
    fn vote(&self, item: &Item) -> Result<Option<u64>, String> {
        let instruction = self.unit.instructions.get(item.at).ok_or("it ran past its end")?;
        if !instruction.opcode.iter().any(|word| word == "red") {
            return Ok(None);
        }
        let said = instruction.operands.last().ok_or("what does it say?")?;
        Ok(Some(u64::from(self.value(item, said)? != 0)))
    }

    /// Whether the items stand before something that a warpgroup does together.
    fn is_of_warpgroup(&self, items: &[Item]) -> bool {
        let waiting = items.iter().find(|item| item.stands == Stands::AtWarp);
        let instruction = waiting.and_then(|item| self.unit.instructions.get(item.at));
        instruction.is_some_and(|instruction| instruction.opcode.first().is_some_and(|word| word == "wgmma"))
    }

    /// Items of a warp, or of a warpgroup, that stand before the same instruction, all of them.
    fn exchange(&mut self, warp: &mut [Item], count: usize) -> Result<(), String> {
        if warp.iter().all(|item| item.stands != Stands::AtWarp) {
            return Ok(());
        }
        let at = warp[0].at;
        let is_together = |item: &Item| item.stands == Stands::AtWarp && item.at == at;
        let instruction =
            self.unit.instructions.get(at).filter(|_| warp.len() == count && warp.iter().all(is_together));
        let instruction = instruction.ok_or("not all items of a warp come to one instruction of the warp")?;
        self.together(warp, instruction).map_err(|why| format!("line {}: {why}", instruction.line))?;
        for item in warp {
            (item.at, item.stands) = (at + 1, Stands::Goes);
        }
        Ok(())
    }

    fn until_it_waits(&mut self, item: &mut Item) -> Result<(), String> {
        for _ in 0..STEPS_MAX {
            let unit = self.unit;
            let Some(instruction) = unit.instructions.get(item.at) else {
                return Err("it ran past its end".to_owned());
            };
            self.nanos += NANOS_PER_INSTRUCTION;
            let next = self.step(item, instruction);
            match next.map_err(|why| format!("line {}: {}: {why}", instruction.line, instruction.opcode.join(".")))? {
                Next::Go(at) => item.at = at,
                Next::Yield(at) => {
                    item.at = at;
                    return Ok(());
                }
                Next::Barrier(number, count) => {
                    item.stands = Stands::AtBarrier(number, count);
                    return Ok(());
                }
                Next::Warp => {
                    item.stands = Stands::AtWarp;
                    return Ok(());
                }
                Next::Exit => {
                    item.stands = Stands::IsOver;
                    return Ok(());
                }
            }
        }
        Err("it does not end".to_owned())
    }

    fn value(&self, item: &Item, operand: &Operand) -> Result<u64, String> {
        Ok(match operand {
            Operand::Register(n) => item.registers[*n],
            Operand::Immediate(bits) => *bits,
            Operand::Special(name) => match name.as_str() {
                "globaltimer" | "clock64" => self.nanos,
                "laneid" => u64::from(self.lane(item)),
                _ => {
                    let (name, axis) = name.split_once('.').ok_or("no such register")?;
                    let axis = ["x", "y", "z"].iter().position(|own| *own == axis).ok_or("no such axis")?;
                    u64::from(match name {
                        "tid" => item.id[axis],
                        "ctaid" => self.group[axis],
                        "ntid" => self.items[axis],
                        "nctaid" => self.groups[axis],
                        _ => return Err(format!("what is {name}?")),
                    })
                }
            },
            Operand::Name(name) => match name.as_str() {
                "data" => DATA_AT,
                "shared" => SHARED_AT,
                "stack" => LOCAL_AT,
                _ => return Err(format!("what is {name}?")),
            },
            Operand::Memory(..) => return Err("memory is no value".to_owned()),
        })
    }

    fn lane(&self, item: &Item) -> u32 {
        let [x, y, z] = item.id;
        (x + self.items[0] * (y + self.items[1] * z)) % 32
    }

    fn address(&self, item: &Item, operand: &Operand) -> Result<u64, String> {
        match operand {
            Operand::Memory(base, offset) => Ok(self.value(item, base)?.wrapping_add(*offset)),
            _ => Err("an address is in brackets".to_owned()),
        }
    }

    /// The bytes of an access, which must lie in one piece of memory and be aligned.
    fn bytes<'m>(
        &'m mut self,
        item: &'m mut Item,
        space: &str,
        address: u64,
        len: usize,
    ) -> Result<&'m mut [u8], String> {
        if !address.is_multiple_of(len as u64) {
            return Err(format!("{address:#x} is not aligned to {len} bytes"));
        }
        let end = address.checked_add(len as u64).ok_or("beyond the address space")?;
        let local = &mut item.local;
        let pieces = self.memory.pieces.iter_mut().map(|(at, bytes)| (*at, bytes, "global"));
        let own =
            [(DATA_AT, &mut self.data, "global"), (SHARED_AT, &mut self.shared, "shared"), (LOCAL_AT, local, "local")];
        for (at, bytes, own) in own.into_iter().chain(pieces) {
            let is_inside = address >= at && end <= at + bytes.len() as u64;
            if is_inside && (space.is_empty() || space == own) {
                let from = (address - at) as usize;
                return Ok(&mut bytes[from..from + len]);
            }
        }
        Err(format!("{len} bytes at {address:#x} are not in {} memory", if space.is_empty() { "any" } else { space }))
    }

    /// Memory of somebody else, if an access goes there: a global one is not looked for in the emulator's own first.
    fn other(&self, item: &Item, space: &str, address: u64, len: usize) -> Option<&dyn OtherMemory> {
        let own = [(DATA_AT, self.data.len()), (SHARED_AT, self.shared.len()), (LOCAL_AT, item.local.len())];
        let is_own = || own.iter().any(|(at, bytes)| address >= *at && address - at < *bytes as u64);
        let is_global = space == "global" || space.is_empty() && !is_own();
        self.memory.other.as_deref().filter(|_| is_global && address.is_multiple_of(len as u64))
    }

    fn load(&mut self, item: &mut Item, space: &str, address: u64, len: usize) -> Result<u64, String> {
        let mut whole = [0; 8];
        if let Some(other) = self.other(item, space, address, len) {
            let is_there = other.read(address, &mut whole[..len]);
            return if is_there { Ok(u64::from_le_bytes(whole)) } else { Err(format!("nothing is at {address:#x}")) };
        }
        whole[..len].copy_from_slice(self.bytes(item, space, address, len)?);
        Ok(u64::from_le_bytes(whole))
    }

    fn store(&mut self, item: &mut Item, space: &str, address: u64, len: usize, value: u64) -> Result<(), String> {
        if let Some(other) = self.other(item, space, address, len) {
            let is_there = other.write(address, &value.to_le_bytes()[..len]);
            return if is_there { Ok(()) } else { Err(format!("nothing is at {address:#x}")) };
        }
        self.bytes(item, space, address, len)?.copy_from_slice(&value.to_le_bytes()[..len]);
        Ok(())
    }

    fn step(&mut self, item: &mut Item, instruction: &PtxInstruction) -> Result<Next, String> {
        let next = Next::Go(item.at + 1);
        if let Some((predicate, is_not)) = instruction.guard
            && (item.registers[predicate] != 0) == is_not
        {
            return Ok(next);
        }
        let opcode: Vec<&str> = instruction.opcode.iter().map(String::as_str).collect();
        let operands = &instruction.operands;
        let value = |run: &Self, item: &Item, n: usize| match operands.get(n) {
            Some(operand) => run.value(item, operand),
            None => Err("an operand is missing".to_owned()),
        };
        let label = |n: usize| match operands.get(n) {
            Some(Operand::Name(name)) => Ok(name.as_str()),
            _ => Err("a label is missing".to_owned()),
        };
        let jump = |name: &str| match self.unit.labels.get(name) {
            Some(at) => Ok(Next::Go(*at)),
            None => Err(format!("there is no label {name}")),
        };
        let result = match opcode.as_slice() {
            ["bra"] => return jump(label(0)?),
            ["brx", "idx"] => {
                let index = value(self, item, 0)? as u32 as usize;
                let table = self.unit.tables.get(label(1)?).ok_or("there is no such table")?;
                return jump(table.get(index).ok_or("beyond the table")?);
            }
            ["ret" | "exit"] => return Ok(Next::Exit),
            ["barrier", "sync"] | ["barrier", "red", "and", "pred"] => {
                let at = usize::from(opcode[1] == "red");
                let number = value(self, item, at)? as u32;
                let count = if operands.len() > 1 + 2 * at { Some(value(self, item, at + 1)? as usize) } else { None };
                return Ok(Next::Barrier(number, count));
            }
            ["nanosleep", "u32"] => return Ok(Next::Yield(item.at + 1)),
            ["bar", "warp", "sync"] => return Ok(Next::Warp),
            ["shfl" | "vote" | "match" | "mma" | "ldmatrix", "sync" | "any" | "all", ..]
            | ["wgmma", ..]
            | ["activemask", "b32"] => return Ok(Next::Warp),
            ["cp", "async", ..] => {
                self.copy(item, &opcode, operands)?;
                return Ok(next);
            }
            // Two halves of a word.
            ["mov", "b32"] if instruction.is_split => {
                let (Some(Operand::Register(low)), Some(Operand::Register(high))) = (operands.first(), operands.get(1))
                else {
                    return Err("where to?".to_owned());
                };
                let whole = value(self, item, 2)?;
                (item.registers[*low], item.registers[*high]) = (whole & 0xffff, whole >> 16 & 0xffff);
                return Ok(next);
            }
            // Two halves of a register, apart and together.
            ["mov", "b64"] if operands.len() == 3 => {
                if let (Some(Operand::Register(low)), Some(Operand::Register(high)), true) =
                    (operands.first(), operands.get(1), instruction.is_split)
                {
                    let whole = value(self, item, 2)?;
                    (item.registers[*low], item.registers[*high]) = (u64::from(whole as u32), whole >> 32);
                    return Ok(next);
                }
                u64::from(value(self, item, 1)? as u32) | value(self, item, 2)? << 32
            }
            ["fence", ..] => return Ok(next),
            ["ld", "param", ty] => {
                let Some(Operand::Memory(name, 0)) = operands.get(1) else { return Err("which parameter?".to_owned()) };
                let Operand::Name(name) = name.as_ref() else { return Err("which parameter?".to_owned()) };
                let known = self.unit.params.iter().find(|(own, _, _)| own == name);
                let (_, offset, size) = known.ok_or_else(|| format!("there is no parameter {name}"))?;
                if type_bytes(ty) != Some(*size) {
                    return Err(format!("parameter {name} has {size} bytes"));
                }
                let mut whole = [0; 8];
                whole[..*size].copy_from_slice(self.params.get(*offset..offset + size).ok_or("too few parameters")?);
                u64::from_le_bytes(whole)
            }
            ["ld", rest @ .., count @ ("v2" | "v4"), ty] => {
                let (count, len) = (if *count == "v2" { 2 } else { 4 }, type_bytes(ty).ok_or("of which type?")?);
                let address = self.address(item, operands.get(count).ok_or("where from?")?)?;
                if !address.is_multiple_of((count * len) as u64) {
                    return Err(format!("{address:#x} is not aligned to {} bytes", count * len));
                }
                for (n, operand) in operands[..count].iter().enumerate() {
                    let Operand::Register(to) = operand else { return Err("where to?".to_owned()) };
                    item.registers[*to] = self.load(item, space(rest), address + (n * len) as u64, len)?;
                }
                return Ok(if rest.contains(&"volatile") { Next::Yield(item.at + 1) } else { next });
            }
            ["ld", rest @ .., ty] => {
                let len = type_bytes(ty).ok_or("of which type?")?;
                let address = self.address(item, &operands[1])?;
                let bits = self.load(item, space(rest), address, len)?;
                if rest.contains(&"volatile") {
                    let Some(Operand::Register(to)) = operands.first() else { return Err("where to?".to_owned()) };
                    item.registers[*to] = bits;
                    return Ok(Next::Yield(item.at + 1));
                }
                match *ty {
                    "s8" => i64::from(bits as u8 as i8) as u64,
                    "s16" => i64::from(bits as u16 as i16) as u64,
                    "s32" => i64::from(bits as u32 as i32) as u64,
                    _ => bits,
                }
            }
            ["st", rest @ .., count @ ("v2" | "v4"), ty] => {
                let (count, len) = (if *count == "v2" { 2 } else { 4 }, type_bytes(ty).ok_or("of which type?")?);
                let address = self.address(item, &operands[0])?;
                if !address.is_multiple_of((count * len) as u64) {
                    return Err(format!("{address:#x} is not aligned to {} bytes", count * len));
                }
                for n in 0..count {
                    let stored = value(self, item, 1 + n)?;
                    self.store(item, space(rest), address + (n * len) as u64, len, stored)?;
                }
                return Ok(next);
            }
            ["st", rest @ .., ty] => {
                let len = type_bytes(ty).ok_or("of which type?")?;
                let (address, stored) = (self.address(item, &operands[0])?, value(self, item, 1)?);
                self.store(item, space(rest), address, len, stored)?;
                return Ok(next);
            }
            ["atom", rest @ .., op, ty] => {
                let len = type_bytes(ty).ok_or("of which type?")?;
                let address = self.address(item, &operands[1])?;
                let mask = if len == 8 { u64::MAX } else { u64::from(u32::MAX) };
                let (old, with) = (self.load(item, space(rest), address, len)?, value(self, item, 2)? & mask);
                let new = match *op {
                    "add" => old.wrapping_add(with),
                    "and" => old & with,
                    "or" => old | with,
                    "xor" => old ^ with,
                    "exch" => with,
                    "max" if ty.starts_with('u') => old.max(with),
                    "cas" => {
                        let new = value(self, item, 3)? & mask;
                        if old == with { new } else { old }
                    }
                    _ => return Err("what is that?".to_owned()),
                };
                self.store(item, space(rest), address, len, new)?;
                old
            }
            _ => {
                let values: Result<Vec<u64>, String> = operands.iter().skip(1).map(|o| self.value(item, o)).collect();
                compute(&opcode, &values?).ok_or("it is not something we emit")?
            }
        };
        let Some(Operand::Register(to)) = operands.first() else { return Err("where to?".to_owned()) };
        item.registers[*to] = result;
        Ok(next)
    }
}

/// The state space among the parts of an opcode.
fn space<'a>(parts: &[&'a str]) -> &'a str {
    parts.iter().copied().find(|part| matches!(*part, "global" | "shared" | "local")).unwrap_or("")
}

fn single(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn double(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// What a device makes of a NaN: all its bits but the sign, in single precision; quiet in double.
fn from_single(value: f32) -> u64 {
    if value.is_nan() { 0x7fff_ffff } else { u64::from(value.to_bits()) }
}

fn from_double(value: f64) -> u64 {
    if value.is_nan() { 0xfff8_0000_0000_0000 } else { value.to_bits() }
}

/// Instructions that compute something of their operands alone.
fn compute(opcode: &[&str], v: &[u64]) -> Option<u64> {
    let low = |value: u64| u64::from(value as u32);
    let at = |n: usize| v.get(n).copied();
    Some(match opcode {
        ["mov", "pred"] => at(0)?,
        ["mov", "b32" | "u32" | "f32"] => low(at(0)?),
        ["mov", "b64" | "u64" | "f64"] => at(0)?,
        ["cvta", _, "u64"] => at(0)?,
        ["selp", ty] => {
            let chosen = if at(2)? != 0 { at(0)? } else { at(1)? };
            if ty.ends_with("32") { low(chosen) } else { chosen }
        }
        ["setp", compare, ty] => u64::from(compares(compare, ty, at(0)?, at(1)?)?),
        ["setp", compare, "and", ty] => u64::from(compares(compare, ty, at(0)?, at(1)?)? && at(2)? != 0),
        ["add", "s32"] => low(at(0)?.wrapping_add(at(1)?)),
        ["add", "s64"] => at(0)?.wrapping_add(at(1)?),
        ["sub", "s32"] => low(at(0)?.wrapping_sub(at(1)?)),
        ["sub", "s64"] => at(0)?.wrapping_sub(at(1)?),
        ["mul", "lo", "s32"] => low(at(0)?.wrapping_mul(at(1)?)),
        ["mul", "wide", "u32"] => low(at(0)?) * low(at(1)?),
        ["rsqrt", "approx", "f32"] => from_single(1.0 / single(at(0)?).sqrt()),
        ["ex2", "approx", "ftz", "f32"] => {
            let power = single(at(0)?).exp2();
            from_single(if power.is_subnormal() { 0.0 } else { power })
        }
        ["mul", "lo", "s64"] => at(0)?.wrapping_mul(at(1)?),
        ["mul", "hi", "u64"] => ((u128::from(at(0)?) * u128::from(at(1)?)) >> 64) as u64,
        ["not", "b32"] => low(!at(0)?),
        ["mad", "lo", "s32"] => low(at(0)?.wrapping_mul(at(1)?).wrapping_add(at(2)?)),
        ["neg", "s32"] => low(at(0)?.wrapping_neg()),
        ["neg", "s64"] => at(0)?.wrapping_neg(),
        ["div", "s32"] => low(i64::from((at(0)? as i32).checked_div(at(1)? as i32)?) as u64),
        ["div", "u32"] => u64::from((at(0)? as u32).checked_div(at(1)? as u32)?),
        ["div", "s64"] => (at(0)? as i64).checked_div(at(1)? as i64)? as u64,
        ["div", "u64"] => at(0)?.checked_div(at(1)?)?,
        ["rem", "s32"] => low(i64::from((at(0)? as i32).checked_rem(at(1)? as i32)?) as u64),
        ["rem", "u32"] => u64::from((at(0)? as u32).checked_rem(at(1)? as u32)?),
        ["rem", "s64"] => (at(0)? as i64).checked_rem(at(1)? as i64)? as u64,
        ["rem", "u64"] => at(0)?.checked_rem(at(1)?)?,
        ["and", ty] => narrowed(ty, at(0)? & at(1)?),
        ["or", ty] => narrowed(ty, at(0)? | at(1)?),
        ["xor", ty] => narrowed(ty, at(0)? ^ at(1)?),
        // Shifts by more than there are bits leave nothing, or only the sign.
        ["shl", "b32"] => (at(0)? as u32).checked_shl(at(1)? as u32).map_or(0, u64::from),
        ["shl", "b64"] => at(0)?.checked_shl(at(1)? as u32).unwrap_or(0),
        ["shr", "u32"] => (at(0)? as u32).checked_shr(at(1)? as u32).map_or(0, u64::from),
        ["shr", "u64"] => at(0)?.checked_shr(at(1)? as u32).unwrap_or(0),
        ["shr", "s32"] => low(i64::from((at(0)? as i32) >> (at(1)? as u32).min(31)) as u64),
        ["shr", "s64"] => ((at(0)? as i64) >> (at(1)? as u32).min(63)) as u64,
        ["shf", "l", "wrap", "b32"] if at(0)? as u32 == at(1)? as u32 => {
            u64::from((at(0)? as u32).rotate_left(at(2)? as u32 & 31))
        }
        ["shf", "r", "wrap", "b32"] if at(0)? as u32 == at(1)? as u32 => {
            u64::from((at(0)? as u32).rotate_right(at(2)? as u32 & 31))
        }
        ["clz", "b32"] => u64::from((at(0)? as u32).leading_zeros()),
        ["clz", "b64"] => u64::from(at(0)?.leading_zeros()),
        ["brev", "b32"] => u64::from((at(0)? as u32).reverse_bits()),
        ["brev", "b64"] => at(0)?.reverse_bits(),
        ["popc", "b32"] => u64::from((at(0)? as u32).count_ones()),
        ["popc", "b64"] => u64::from(at(0)?.count_ones()),
        ["min", "s32"] => u64::from(((at(0)? as i32).min(at(1)? as i32)).cast_unsigned()),
        ["max", "s32"] => u64::from(((at(0)? as i32).max(at(1)? as i32)).cast_unsigned()),
        ["min", "s64"] => (at(0)? as i64).min(at(1)? as i64) as u64,
        ["max", "s64"] => (at(0)? as i64).max(at(1)? as i64) as u64,
        ["min", "u32"] => u64::from((at(0)? as u32).min(at(1)? as u32)),
        ["max", "u32"] => u64::from((at(0)? as u32).max(at(1)? as u32)),
        ["max", "u64"] => at(0)?.max(at(1)?),
        ["add", "rn", "f32"] => from_single(single(at(0)?) + single(at(1)?)),
        ["sub", "rn", "f32"] => from_single(single(at(0)?) - single(at(1)?)),
        ["mul", "rn", "f32"] => from_single(single(at(0)?) * single(at(1)?)),
        ["div", "rn", "f32"] => from_single(single(at(0)?) / single(at(1)?)),
        ["fma", "rn", "f32"] => from_single(single(at(0)?).mul_add(single(at(1)?), single(at(2)?))),
        ["sqrt", "rn", "f32"] => from_single(single(at(0)?).sqrt()),
        ["add", "rn", "f64"] => from_double(double(at(0)?) + double(at(1)?)),
        ["sub", "rn", "f64"] => from_double(double(at(0)?) - double(at(1)?)),
        ["mul", "rn", "f64"] => from_double(double(at(0)?) * double(at(1)?)),
        ["div", "rn", "f64"] => from_double(double(at(0)?) / double(at(1)?)),
        ["fma", "rn", "f64"] => from_double(double(at(0)?).mul_add(double(at(1)?), double(at(2)?))),
        ["sqrt", "rn", "f64"] => from_double(double(at(0)?).sqrt()),
        // The number where one is a NaN; of two zeros the negative one is less.
        ["min" | "max", "f32"] => {
            let (a, b) = (single(at(0)?), single(at(1)?));
            let takes_first = a.is_nan() || b.is_nan() || a.total_cmp(&b).is_lt() == (opcode[0] == "min");
            from_single(if (takes_first && !a.is_nan()) || b.is_nan() { a } else { b })
        }
        ["min" | "max", "f64"] => {
            let (a, b) = (double(at(0)?), double(at(1)?));
            let takes_first = a.is_nan() || b.is_nan() || a.total_cmp(&b).is_lt() == (opcode[0] == "min");
            from_double(if (takes_first && !a.is_nan()) || b.is_nan() { a } else { b })
        }
        ["max", "NaN", "f32"] => {
            let (a, b) = (single(at(0)?), single(at(1)?));
            from_single(if a.is_nan() || b.is_nan() {
                f32::NAN
            } else if a.total_cmp(&b).is_lt() {
                b
            } else {
                a
            })
        }
        ["cvt", "rn", ty @ ("f16x2" | "bf16x2"), "f32"] => {
            let rounded = |bits: u64| match *ty {
                "f16x2" => half::f16::from_f32(single(bits)).to_bits(),
                _ => half::bf16::from_f32(single(bits)).to_bits(),
            };
            u64::from(rounded(at(0)?)) << 16 | u64::from(rounded(at(1)?))
        }
        ["cvt", rest @ ..] => convert(rest, at(0)?)?,
        _ => return None,
    })
}

fn narrowed(ty: &str, bits: u64) -> u64 {
    if ty.ends_with("32") { u64::from(bits as u32) } else { bits }
}

fn compares(how: &str, ty: &str, a: u64, b: u64) -> Option<bool> {
    use std::cmp::Ordering;
    let ordering = match ty {
        "s32" => Some((a as i32).cmp(&(b as i32))),
        "u32" => Some((a as u32).cmp(&(b as u32))),
        "s64" => Some((a as i64).cmp(&(b as i64))),
        "u64" => Some(a.cmp(&b)),
        "f32" => single(a).partial_cmp(&single(b)),
        "f64" => double(a).partial_cmp(&double(b)),
        _ => return None,
    };
    Some(match how {
        "eq" => ordering == Some(Ordering::Equal),
        "ne" => ordering.is_some() && ordering != Some(Ordering::Equal),
        "neu" => ordering != Some(Ordering::Equal),
        "lt" => ordering == Some(Ordering::Less),
        "gt" => ordering == Some(Ordering::Greater),
        "le" => matches!(ordering, Some(Ordering::Less | Ordering::Equal)),
        "ge" => matches!(ordering, Some(Ordering::Greater | Ordering::Equal)),
        "nan" => ordering.is_none(),
        _ => return None,
    })
}

/// `cvt` between types. Rust's own conversions round, and stop at the ends, as PTX says; what PTX leaves open about NaN
/// is filled in so that it shows if somebody relies on it.
fn convert(parts: &[&str], bits: u64) -> Option<u64> {
    let nan = 0x1234_5678_9abc_def0_u64;
    Some(match parts {
        ["u32", "u64"] => u64::from(bits as u32),
        ["u64", "u32"] => u64::from(bits as u32),
        ["s64", "s32"] => i64::from(bits as u32 as i32) as u64,
        ["f32", "f16"] => from_single(half::f16::from_bits(bits as u16).to_f32()),
        ["rn", "f16", "f32"] => {
            let value = half::f16::from_f32(single(bits));
            // A device's NaN.
            u64::from(if value.is_nan() { 0x7fff } else { value.to_bits() })
        }
        ["u16", "u32"] => bits & 0xffff,
        ["u32", "u16"] => bits & 0xffff,
        // Ten bits of mantissa are left; ties go away from zero.
        ["rna", "tf32", "f32"] => {
            let is_number = single(bits).is_finite();
            (bits as u32).wrapping_add(if is_number { 0x1000 } else { 0 }) as u64 & 0xffff_e000
        }
        ["f64", "f32"] => from_double(f64::from(single(bits))),
        ["rn", "f32", "f64"] => from_single(double(bits) as f32),
        ["rn", "f32", "s32"] => from_single(bits as u32 as i32 as f32),
        ["rn", "f32", "u32"] => from_single(bits as u32 as f32),
        ["rn", "f32", "s64"] => from_single(bits as i64 as f32),
        ["rn", "f32", "u64"] => from_single(bits as f32),
        ["rn", "f64", "s32"] => from_double(f64::from(bits as u32 as i32)),
        ["rn", "f64", "u32"] => from_double(f64::from(bits as u32)),
        ["rn", "f64", "s64"] => from_double(bits as i64 as f64),
        ["rn", "f64", "u64"] => from_double(bits as f64),
        ["rpi", "f32", "f32"] => from_single(single(bits).ceil()),
        ["rmi", "f32", "f32"] => from_single(single(bits).floor()),
        ["rzi", "f32", "f32"] => from_single(single(bits).trunc()),
        ["rni", "f32", "f32"] => from_single(single(bits).round_ties_even()),
        ["rpi", "f64", "f64"] => from_double(double(bits).ceil()),
        ["rmi", "f64", "f64"] => from_double(double(bits).floor()),
        ["rzi", "f64", "f64"] => from_double(double(bits).trunc()),
        ["rni", "f64", "f64"] => from_double(double(bits).round_ties_even()),
        ["rzi", to, from @ ("f32" | "f64")] => {
            let value = if *from == "f32" { f64::from(single(bits)) } else { double(bits) };
            match *to {
                _ if value.is_nan() => narrowed(to, nan),
                "s32" => u64::from((value as i32).cast_unsigned()),
                "u32" => u64::from(value as u32),
                "s64" => (value as i64).cast_unsigned(),
                "u64" => value as u64,
                _ => return None,
            }
        }
        _ => return None,
    })
}

/// Puts together the parameter block of a launch, laid out as the program says.
pub struct ParamBlock<'e> {
    emulator: &'e Emulator,
    values: HashMap<String, u64>,
}

impl<'e> ParamBlock<'e> {
    pub fn new(emulator: &'e Emulator) -> ParamBlock<'e> {
        ParamBlock { emulator, values: HashMap::new() }
    }

    pub fn set(&mut self, name: &str, bits: u64) -> &mut Self {
        self.values.insert(name.to_owned(), bits);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut block = Vec::new();
        for (name, offset, size) in &self.emulator.unit.params {
            block.resize(*offset, 0);
            let bits = self.values.get(name).copied().unwrap_or(0);
            block.extend_from_slice(&bits.to_le_bytes()[..*size]);
        }
        block
    }
}
