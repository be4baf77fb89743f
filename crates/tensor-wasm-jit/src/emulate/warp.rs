//! Instructions that the items of a warp do together, and copies that go on beside what an item does.
//!
//! A matrix instruction multiplies exactly, adds up in double precision and rounds once. A device adds fewer bits up in
//! an order of its own and rounds as it likes, so that its sums of `k` products differ from these by at most `k` ulp of
//! the largest of them. A copy reads when it begins and writes when it is waited for; in between its target holds what
//! shows if somebody looks: no barrier, or no waiting, is a wrong result here as it may be on a device.

use super::parse::{Operand, PtxInstruction};
use super::{COPY_BYTES, Item, Run, SHARED_AT, Stands, WARP, from_single, single};

/// NaNs, in every float type.
const POISON: u8 = 0xff;

/// Operands of what lanes do together by their masks.
const OPERANDS_MAX: usize = 5;

/// Rows of the tiles that are loaded together, and bytes of a row.
const TILE_ROWS: usize = 8;

fn register(instruction: &PtxInstruction, n: usize) -> Result<usize, String> {
    match instruction.operands.get(n) {
        Some(Operand::Register(register)) => Ok(*register),
        _ => Err(format!("operand {n} is no register")),
    }
}

/// An element of a fragment: of two halves, or of one tf32.
fn element(ty: &str, word: u64, n: usize) -> f64 {
    let half = (word >> (16 * n)) as u16;
    match ty {
        "f16" => half::f16::from_bits(half).to_f64(),
        "bf16" => half::bf16::from_bits(half).to_f64(),
        // The bits below are not looked at.
        _ => f64::from(single(word & 0xffff_e000)),
    }
}

impl Run<'_> {
    /// Does what a warp does together, for all of its items.
    pub(super) fn together(&mut self, warp: &mut [Item], instruction: &PtxInstruction) -> Result<(), String> {
        let opcode: Vec<&str> = instruction.opcode.iter().map(String::as_str).collect();
        match opcode.as_slice() {
            ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", ty @ ("f16" | "bf16"), other, "f32"]
                if ty == other =>
            {
                multiply(warp, instruction, ty, 2)
            }
            ["mma", "sync", "aligned", "m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32"] => {
                multiply(warp, instruction, "tf32", 1)
            }
            ["ldmatrix", "sync", "aligned", "m8n8", "x4", "shared", "b16"] => self.load_tiles(warp, instruction, false),
            ["ldmatrix", "sync", "aligned", "m8n8", "x4", "trans", "shared", "b16"] => {
                self.load_tiles(warp, instruction, true)
            }
            ["wgmma", "fence" | "commit_group" | "wait_group" | "mma_async", "sync", "aligned", ..] => {
                self.warpgroup(warp, instruction, &opcode)
            }
            _ => Err("it is not something we emit".to_owned()),
        }
    }

    /// Does what lanes of a warp do together that name those that take part, or that asks who is here. Whether there
    /// was such an instruction. Lanes wait for all that they name and that have not exited, wherever in the code each
    /// is at the same instruction with the same lanes.
    pub(super) fn among(&mut self, warp: &mut [Item]) -> Result<bool, String> {
        let unit = self.unit;
        let mut is_any = false;
        let mut is_done = [false; WARP];
        for first in 0..warp.len() {
            if is_done[first] || warp[first].stands != Stands::AtWarp {
                continue;
            }
            let instruction = unit.instructions.get(warp[first].at).ok_or("it ran past its end")?;
            let name = instruction.opcode.first().map_or("", String::as_str);
            if !matches!(name, "shfl" | "vote" | "match" | "activemask" | "bar") {
                continue;
            }
            is_any = true;
            let lanes = self.lanes_of(&warp[first], instruction)?;
            let mut here = 0_u32;
            for (lane, item) in warp.iter().enumerate().filter(|(_, item)| item.stands == Stands::AtWarp) {
                let Some(own) = unit.instructions.get(item.at) else { continue };
                let is_with_it = match lanes {
                    Some(_) => {
                        let is_same = item.at == warp[first].at || own.opcode == instruction.opcode;
                        is_same && self.lanes_of(item, own)? == lanes
                    }
                    // Whoever is at the very same place, as a device may have it.
                    None => item.at == warp[first].at,
                };
                if is_with_it {
                    here |= 1 << lane;
                    is_done[lane] = true;
                }
            }
            if let Some(lanes) = lanes {
                if here & !lanes != 0 {
                    return Err(format!("line {}: a lane does it that is not named", instruction.line));
                }
                let lives = |lane: &usize| warp.get(*lane).is_some_and(|item| item.stands != Stands::IsOver);
                let awaited = (0..WARP).filter(lives).fold(0_u32, |all, lane| all | 1 << lane) & lanes;
                if awaited != here {
                    continue;
                }
            }
            self.lanes_do(warp, here).map_err(|why| format!("line {}: {why}", instruction.line))?;
        }
        Ok(is_any)
    }

    /// The lanes that an instruction names, if it does: by its last operand.
    fn lanes_of(&self, item: &Item, instruction: &PtxInstruction) -> Result<Option<u32>, String> {
        if instruction.opcode.first().is_some_and(|name| name == "activemask") {
            return Ok(None);
        }
        let last = instruction.operands.last().ok_or("which lanes?")?;
        Ok(Some(self.value(item, last)? as u32))
    }

    fn lanes_do(&mut self, warp: &mut [Item], here: u32) -> Result<(), String> {
        let unit = self.unit;
        let is_here = |lane: usize| lane < WARP && here >> lane & 1 == 1;
        // What each has, before anybody's result is written.
        let mut operands = [[0_u64; OPERANDS_MAX]; WARP];
        for (lane, item) in warp.iter().enumerate().filter(|(lane, _)| is_here(*lane)) {
            let instruction = unit.instructions.get(item.at).ok_or("it ran past its end")?;
            for (to, operand) in operands[lane].iter_mut().zip(&instruction.operands) {
                *to = self.value(item, operand)?;
            }
        }
        let of = |lane: usize, n: usize| operands[lane][n];
        for (lane, item) in warp.iter_mut().enumerate().filter(|(lane, _)| is_here(*lane)) {
            let instruction = unit.instructions.get(item.at).ok_or("it ran past its end")?;
            let opcode: Vec<&str> = instruction.opcode.iter().map(String::as_str).collect();
            if opcode.first() == Some(&"bar") {
                (item.at, item.stands) = (item.at + 1, Stands::Goes);
                continue;
            }
            let lanes_where = |holds: &dyn Fn(usize) -> bool| {
                (0..WARP).filter(|lane| is_here(*lane) && holds(*lane)).fold(0_u32, |all, lane| all | 1 << lane)
            };
            let result = match opcode.as_slice() {
                ["activemask", "b32"] => here,
                ["shfl", "sync", mode @ ("bfly" | "idx"), "b32"] => {
                    let operand = of(lane, 2) as usize & (WARP - 1);
                    let other = if *mode == "bfly" { lane ^ operand } else { operand };
                    if of(lane, 3) != 31 || !is_here(other) {
                        return Err(format!("lane {lane} reads lane {other}, which does not take part"));
                    }
                    of(other, 1) as u32
                }
                ["vote", "sync", "ballot", "b32"] => lanes_where(&|other| of(other, 1) != 0),
                ["match", "any", "sync", "b32"] => lanes_where(&|other| of(other, 1) as u32 == of(lane, 1) as u32),
                ["match", "all", "sync", "b32"] => {
                    let same = lanes_where(&|other| of(other, 1) as u32 == of(lane, 1) as u32);
                    if same == here { here } else { 0 }
                }
                _ => return Err("it is not something we emit".to_owned()),
            };
            item.registers[register(instruction, 0)?] = u64::from(result);
            (item.at, item.stands) = (item.at + 1, Stands::Goes);
        }
        Ok(())
    }

    /// Products of a warpgroup read shared memory and add to registers as late as they may: when they are waited for.
    fn warpgroup(&self, items: &mut [Item], instruction: &PtxInstruction, opcode: &[&str]) -> Result<(), String> {
        match opcode[1] {
            "commit_group" => items[0].products.push(Vec::new()),
            "wait_group" => {
                let Some(Operand::Immediate(pending)) = instruction.operands.first() else {
                    return Err("how many?".to_owned());
                };
                let open = items[0].products.pop().unwrap_or_default();
                let over = items[0].products.len().saturating_sub(usize::try_from(*pending).unwrap_or(usize::MAX));
                for (at, left, right) in items[0].products.drain(..over).flatten().collect::<Vec<_>>() {
                    self.multiply_shared(items, &self.unit.instructions[at], left, right)?;
                }
                items[0].products.push(open);
            }
            "mma_async" => {
                let first = sums_of(instruction)?;
                let descriptor = |item: &Item, n: usize| self.value(item, &instruction.operands[first + n]);
                let (left, right) = (descriptor(&items[0], 0)?, descriptor(&items[0], 1)?);
                for item in &*items {
                    if (descriptor(item, 0)?, descriptor(item, 1)?) != (left, right) {
                        return Err("items of a warpgroup have different descriptors".to_owned());
                    }
                }
                let at = items[0].at;
                items[0].products.last_mut().ok_or("no group of products")?.push((at, left, right));
            }
            _ => {}
        }
        Ok(())
    }

    /// An element of an operand in shared memory: the line along which it lies, and its number in that.
    fn shared_element(&self, ty: &str, descriptor: u64, is_turned: bool, along: u64, step: u64) -> Result<f64, String> {
        let field = |from: u32| 16 * (descriptor >> from & 0x3fff);
        if descriptor >> 62 != 1 {
            return Err("128 bytes are swizzled together".to_owned());
        }
        let (start, block, eight) = (field(0), field(16), field(32));
        let bytes = if ty == "tf32" { 4 } else { 2 };
        let at = if is_turned {
            start + along / 64 * block + step / 8 * eight + step % 8 * 128 + along % 64 * 2
        } else {
            start + along / 8 * eight + along % 8 * 128 + step * bytes
        };
        // Chunks of 16 bytes are exchanged by the line of 128 that they are in.
        let at = usize::try_from(at ^ (at >> 7 & 7) << 4).map_err(|_| "too far")?;
        let found = self.shared.get(at..at + bytes as usize);
        let found = found.ok_or_else(|| format!("nothing is at {at:#x} of shared memory"))?;
        let word = found.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        Ok(element(ty, word, 0))
    }

    fn multiply_shared(
        &self,
        items: &mut [Item],
        instruction: &PtxInstruction,
        left: u64,
        right: u64,
    ) -> Result<(), String> {
        let count = sums_of(instruction)?;
        // Tf32 is not turned, and does not say so.
        let turned = |n: usize| instruction.operands.get(n) == Some(&Operand::Immediate(1));
        let (is_left_turned, is_right_turned) = (turned(count + 5), turned(count + 6));
        let ty = instruction.opcode.get(6).ok_or("of which type?")?;
        let (rows, columns, depth) = (64, 2 * count as u64, if ty == "tf32" { 8 } else { 16 });
        let mut a = vec![[0.0_f64; 16]; 64];
        let mut b = vec![[0.0_f64; 16]; 2 * count];
        for step in 0..depth {
            for row in 0..rows {
                a[row as usize][step as usize] = self.shared_element(ty, left, is_left_turned, row, step)?;
            }
            for column in 0..columns {
                b[column as usize][step as usize] = self.shared_element(ty, right, is_right_turned, column, step)?;
            }
        }
        for (number, item) in items.iter_mut().enumerate() {
            let (warp, lane) = (number / WARP, number % WARP);
            for n in 0..count {
                let row = 16 * warp + lane / 4 + 8 * (n % 4 / 2);
                let column = n / 4 * 8 + 2 * (lane % 4) + n % 2;
                let to = register(instruction, n)?;
                let start = f64::from(single(item.registers[to]));
                let sum = (0..16).fold(start, |sum, step| sum + a[row][step] * b[column][step]);
                item.registers[to] = from_single(sum as f32);
            }
        }
        Ok(())
    }

    fn load_tiles(&self, warp: &mut [Item], instruction: &PtxInstruction, is_transposed: bool) -> Result<(), String> {
        let from = instruction.operands.get(4).ok_or("where from?")?;
        let mut rows: Vec<&[u8]> = Vec::with_capacity(WARP);
        for item in &*warp {
            let address = self.address(item, from)?;
            let at = address.checked_sub(SHARED_AT).and_then(|at| usize::try_from(at).ok());
            let row = at.filter(|at| at.is_multiple_of(16)).and_then(|at| self.shared.get(at..at + 16));
            rows.push(row.ok_or_else(|| format!("16 bytes at {address:#x} are not in shared memory, or not aligned"))?);
        }
        for (lane, item) in warp.iter_mut().enumerate() {
            for tile in 0..4 {
                let half = |row: usize, column: usize| {
                    let bytes = rows[tile * TILE_ROWS + row];
                    u64::from(u16::from_le_bytes([bytes[2 * column], bytes[2 * column + 1]]))
                };
                let (group, pair) = (lane / 4, 2 * (lane % 4));
                let (low, high) = if is_transposed {
                    (half(pair, group), half(pair + 1, group))
                } else {
                    (half(group, pair), half(group, pair + 1))
                };
                item.registers[register(instruction, tile)?] = low | high << 16;
            }
        }
        Ok(())
    }

    /// Asynchronous copies: begun, made a group, waited for.
    pub(super) fn copy(&mut self, item: &mut Item, opcode: &[&str], operands: &[Operand]) -> Result<(), String> {
        match opcode {
            ["cp", "async", "commit_group"] => item.copies.push(Vec::new()),
            ["cp", "async", "wait_group"] => {
                let Some(Operand::Immediate(pending)) = operands.first() else { return Err("how many?".to_owned()) };
                let open = item.copies.pop().unwrap_or_default();
                let over = item.copies.len().saturating_sub(usize::try_from(*pending).unwrap_or(usize::MAX));
                for (to, bytes) in item.copies.drain(..over).flatten().collect::<Vec<_>>() {
                    self.shared_bytes_at(to)?.copy_from_slice(&bytes);
                }
                item.copies.push(open);
            }
            ["cp", "async", "cg", "shared", "global"] => {
                let [to, from, Operand::Immediate(16), rest @ ..] = operands else {
                    return Err("what is copied?".to_owned());
                };
                let (to, from) = (self.address(item, to)?, self.address(item, from)?);
                let count = rest.first().map_or(Ok(COPY_BYTES as u64), |count| self.value(item, count))?;
                let count = usize::try_from(count & 0xffff_ffff).ok().filter(|count| *count <= COPY_BYTES);
                let count = count.ok_or("more than 16 bytes")?;
                if !from.is_multiple_of(COPY_BYTES as u64) {
                    return Err(format!("{from:#x} is not aligned to {COPY_BYTES} bytes"));
                }
                let mut bytes = [0; COPY_BYTES];
                for (n, byte) in bytes.iter_mut().enumerate().take(count) {
                    *byte = self.load(item, "global", from + n as u64, 1)? as u8;
                }
                self.shared_bytes_at(to)?.fill(POISON);
                item.copies.last_mut().ok_or("no group of copies")?.push((to, bytes));
            }
            _ => return Err("it is not something we emit".to_owned()),
        }
        Ok(())
    }

    fn shared_bytes_at(&mut self, address: u64) -> Result<&mut [u8], String> {
        let at = address.checked_sub(SHARED_AT).and_then(|at| usize::try_from(at).ok());
        let found =
            at.filter(|at| at.is_multiple_of(COPY_BYTES)).and_then(|at| self.shared.get_mut(at..at + COPY_BYTES));
        found.ok_or_else(|| format!("16 bytes at {address:#x} are not in shared memory, or not aligned"))
    }
}

/// How many sums an item has of a warpgroup's product: half as many as it has columns.
fn sums_of(instruction: &PtxInstruction) -> Result<usize, String> {
    let shape = instruction.opcode.get(4).and_then(|shape| shape.strip_prefix("m64n"));
    let columns = shape.and_then(|shape| shape.split('k').next()).and_then(|columns| columns.parse::<usize>().ok());
    columns.map(|columns| columns / 2).ok_or_else(|| "of which shape?".to_owned())
}

/// `D = A * B + C`, of 16 rows and 8 columns; the depth is 8 times the elements that a register has of one row.
fn multiply(warp: &mut [Item], instruction: &PtxInstruction, ty: &str, per_register: usize) -> Result<(), String> {
    let depth = 8 * per_register;
    let (mut left, mut right) = (vec![[0.0_f64; 16]; 16], vec![[0.0_f64; 8]; 16]);
    for (lane, item) in warp.iter().enumerate() {
        let (group, own) = (lane / 4, lane % 4);
        for n in 0..4 {
            let word = item.registers[register(instruction, 4 + n)?];
            for part in 0..per_register {
                let step = own * per_register + part + if n >= 2 { depth / 2 } else { 0 };
                left[group + 8 * (n % 2)][step] = element(ty, word, part);
            }
        }
        for n in 0..2 {
            let word = item.registers[register(instruction, 8 + n)?];
            for part in 0..per_register {
                right[own * per_register + part + n * depth / 2][group] = element(ty, word, part);
            }
        }
    }
    for (lane, item) in warp.iter_mut().enumerate() {
        let (group, pair) = (lane / 4, 2 * (lane % 4));
        for n in 0..4 {
            let (row, column) = (group + 8 * (n / 2), pair + n % 2);
            let start = f64::from(single(item.registers[register(instruction, 10 + n)?]));
            let sum = (0..depth).fold(start, |sum, step| sum + left[row][step] * right[step][column]);
            item.registers[register(instruction, n)?] = from_single(sum as f32);
        }
    }
    Ok(())
}
