//! Reads PTX text as far as we emit it. Anything else is an error: the emulator does not guess.

use std::collections::HashMap;

/// An operand of an instruction.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Operand {
    Register(usize),
    Immediate(u64),
    /// `%tid.x` and its like.
    Special(String),
    /// `[register + offset]` or `[symbol + offset]`.
    Memory(Box<Operand>, u64),
    /// A variable, a label or a table of labels.
    Name(String),
}

#[derive(Debug, Clone)]
pub(super) struct PtxInstruction {
    /// A predicate, and whether it must not hold.
    pub guard: Option<(usize, bool)>,
    pub opcode: Vec<String>,
    pub operands: Vec<Operand>,
    /// Whether its results come first, in braces.
    pub is_split: bool,
    pub line: usize,
}

#[derive(Debug, Default)]
pub(super) struct PtxUnit {
    pub instructions: Vec<PtxInstruction>,
    pub labels: HashMap<String, usize>,
    pub tables: HashMap<String, Vec<String>>,
    /// Name, offset and size of each parameter.
    pub params: Vec<(String, usize, usize)>,
    pub registers: HashMap<String, usize>,
    /// Sizes of what a group and an item have for themselves.
    pub shared_bytes: usize,
    pub local_bytes: usize,
    pub data: Vec<u8>,
}

pub(super) fn parse(text: &str) -> Result<PtxUnit, String> {
    let mut unit = PtxUnit::default();
    let mut end = 0;
    for (n, line) in text.lines().enumerate() {
        // A launch says how much it is; the emulator is told by a comment.
        if let Some(bytes) = line.strip_prefix(".extern .shared .align 1024 .b8 shared[]; // ") {
            let bytes = bytes.strip_suffix(" bytes").and_then(|bytes| bytes.parse().ok());
            unit.shared_bytes = bytes.ok_or_else(|| format!("line {n}: {line}"))?;
            continue;
        }
        let line = line.split("//").next().unwrap_or("").trim();
        if let Some(rest) = line.strip_prefix(".param .") {
            let mut words = rest.trim_end_matches(',').split(' ');
            let (Some(ty), Some(name)) = (words.next(), words.next()) else { return Err(format!("line {n}: {line}")) };
            let size = type_bytes(ty).ok_or_else(|| format!("line {n}: {line}"))?;
            let offset = usize::next_multiple_of(end, size);
            end = offset + size;
            unit.params.push((name.to_owned(), offset, size));
        } else if let Some(rest) = line.strip_prefix(".global .align 16 .b8 data") {
            let list = rest.split(['{', '}']).nth(1).unwrap_or("");
            unit.data = list
                .split(',')
                .map(|byte| byte.trim().parse().map_err(|_| format!("line {n}: {byte}")))
                .collect::<Result<_, _>>()?;
        } else if let Some(rest) = line.strip_prefix(".shared .align 16 .b8 shared") {
            unit.shared_bytes = bracketed(rest)?;
        } else if let Some(rest) = line.strip_prefix(".local .align 16 .b8 stack") {
            unit.local_bytes = bracketed(rest)?;
        } else if line.is_empty() || line.starts_with('.') || matches!(line, "{" | "}" | ")") {
            // Directives, and registers: those that occur exist.
        } else if let Some((label, rest)) = line.split_once(':') {
            match rest.trim().strip_prefix(".branchtargets") {
                Some(targets) => {
                    let targets = targets.trim_end_matches(';').split(',').map(|t| t.trim().to_owned()).collect();
                    unit.tables.insert(label.to_owned(), targets);
                }
                None => {
                    unit.labels.insert(label.to_owned(), unit.instructions.len());
                }
            }
        } else {
            let instruction = unit.instruction(line, n)?;
            unit.instructions.push(instruction);
        }
    }
    Ok(unit)
}

fn bracketed(text: &str) -> Result<usize, String> {
    let inner = text.split(['[', ']']).nth(1).unwrap_or("");
    inner.parse().map_err(|_| format!("a size: {text}"))
}

pub(super) fn type_bytes(ty: &str) -> Option<usize> {
    match ty {
        "u8" | "s8" | "b8" => Some(1),
        "u16" | "s16" | "b16" => Some(2),
        "u32" | "s32" | "b32" | "f32" => Some(4),
        "u64" | "s64" | "b64" | "f64" => Some(8),
        _ => None,
    }
}

impl PtxUnit {
    fn register(&mut self, name: &str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name.to_owned()).or_insert(next)
    }

    fn instruction(&mut self, line: &str, n: usize) -> Result<PtxInstruction, String> {
        let line = line.strip_suffix(';').ok_or_else(|| format!("line {n} does not end: {line}"))?;
        let (guard, line) = match line.strip_prefix('@') {
            Some(rest) => {
                let (predicate, rest) = rest.split_once(' ').ok_or_else(|| format!("line {n}: {rest}"))?;
                let (name, is_not) = match predicate.strip_prefix('!') {
                    Some(name) => (name, true),
                    None => (predicate, false),
                };
                (Some((self.register(name), is_not)), rest)
            }
            None => (None, line),
        };
        let (opcode, rest) = line.split_once(' ').unwrap_or((line, ""));
        let opcode = opcode.split('.').map(str::to_owned).collect();
        let mut operands = Vec::new();
        let is_split = rest.trim_start().starts_with('{');
        let rest = rest.replace(['{', '}'], "");
        for operand in rest.split(',').map(str::trim).filter(|text| !text.is_empty()) {
            operands.push(self.operand(operand).ok_or_else(|| format!("line {n}: what is {operand}?"))?);
        }
        Ok(PtxInstruction { guard, opcode, operands, is_split, line: n + 1 })
    }

    fn operand(&mut self, text: &str) -> Option<Operand> {
        if let Some(inner) = text.strip_prefix('[') {
            let inner = inner.strip_suffix(']')?;
            let (base, offset) = match inner.split_once('+') {
                Some((base, offset)) => (base, offset.parse().ok()?),
                None => (inner, 0),
            };
            return Some(Operand::Memory(Box::new(self.operand(base)?), offset));
        }
        if let Some(name) = text.strip_prefix('%') {
            let is_special = ["%tid.", "%ctaid.", "%ntid.", "%nctaid.", "%globaltimer", "%clock64", "%laneid"]
                .iter()
                .any(|s| text.starts_with(s));
            return Some(if is_special {
                Operand::Special(name.to_owned())
            } else {
                Operand::Register(self.register(text))
            });
        }
        if let Some(hex) = text.strip_prefix("0x") {
            return u64::from_str_radix(hex, 16).ok().map(Operand::Immediate);
        }
        if let Some(hex) = text.strip_prefix("0f") {
            return u64::from_str_radix(hex, 16).ok().map(Operand::Immediate);
        }
        if let Some(hex) = text.strip_prefix("0d") {
            return u64::from_str_radix(hex, 16).ok().map(Operand::Immediate);
        }
        if text.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
            let number: i128 = text.parse().ok()?;
            return Some(Operand::Immediate(number as u64));
        }
        Some(Operand::Name(text.to_owned()))
    }
}
