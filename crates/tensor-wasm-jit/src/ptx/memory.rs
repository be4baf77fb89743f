//! Accesses to memory as PTX, each of them fenced: clamped into its region now, a trap later; or looked up, and a trap
//! at once. Which of them, and which region, the access itself says (`legalize.rs`). Those of a kernel that is trusted
//! are not fenced.

use std::fmt::Write as _;

use super::{FencedAddress, LIMITS_MAX, PtxEmitter, RegionLimit, load_type, scope};
use crate::groups::{GroupMember, VectorPart};
use crate::ir::{Access, Address, Reg, Region, Rmw, Site, TrapKind, Ty};
use crate::legalize::{Candidate, Lookup};

impl PtxEmitter<'_> {
    /// Where an access goes, checked.
    pub(super) fn target(&mut self, at: Address, bytes: u32, lookup: Lookup, site: Site) -> FencedAddress {
        if self.legal.is_trusted {
            return self.trusted(at.base, at.region, i64::from(at.offset));
        }
        if at.is_aligned
            && let Some(target) = self.known_inside(at)
        {
            return target;
        }
        if let Some(member) = self.legal.groups.members.get(&self.at).copied() {
            return self.grouped(member, at, bytes, lookup, site);
        }
        if at.region.can_clamp() && self.limits.len() < LIMITS_MAX {
            return self.clamped(at, bytes, site);
        }
        self.looked_up(at, bytes, lookup, site)
    }

    /// An address of a kernel that is trusted. Windows and shared memory begin at 0 there.
    pub(super) fn trusted(&mut self, base: Reg, region: Region, offset: i64) -> FencedAddress {
        let (from, beyond) = match region {
            Region::Window(n) | Region::SmallWindow(n) => (format!("%window{n}"), self.facts.beyond(base, n)),
            Region::Shared | Region::Stack | Region::Any => ("%shared".to_owned(), None),
        };
        let (wide, base) = (self.b64(), self.reg(beyond.unwrap_or(base)));
        put!(self, "cvt.u64.u32 {wide}, {base};");
        put!(self, "add.s64 {wide}, {wide}, {from};");
        FencedAddress { space: self.space(region), address: format!("{wide}+{offset}") }
    }

    /// An access that was looked at before its loop began.
    fn known_inside(&self, at: Address) -> Option<FencedAddress> {
        let (root, distance) = self.facts.root(at.base);
        let (space, pointer, low) = self.fast.as_ref()?.pointers.get(&root)?;
        let distance = i64::from(distance) + i64::from(at.offset) - i64::from(*low);
        Some(FencedAddress { space, address: format!("{pointer}+{distance}") })
    }

    /// An access that is checked together with others, by the first of them.
    fn grouped(&mut self, member: GroupMember, at: Address, bytes: u32, lookup: Lookup, site: Site) -> FencedAddress {
        if member.is_first {
            let start = Address { base: member.root, offset: 0, ..at };
            let target = self.clamped_from(start, member.low, member.reach, member.multiple, site);
            self.checked.insert(member.group, (target.space, target.address));
        }
        match self.checked.get(&member.group) {
            Some((space, address)) => FencedAddress { space, address: format!("{address}+{}", member.distance) },
            // The first was known to be inside, in a counted loop.
            None if at.region.can_clamp() => self.clamped(at, bytes, site),
            None => self.looked_up(at, bytes, lookup, site),
        }
    }

    pub(super) fn limit(&mut self, region: Region, bytes: u32, multiple: u32, site: Site) -> usize {
        let is_same =
            |limit: &RegionLimit| limit.region == region && limit.bytes == bytes && limit.multiple == multiple;
        self.limits.iter().position(is_same).unwrap_or_else(|| {
            self.limits.push(RegionLimit { region, bytes, multiple, site });
            self.limits.len() - 1
        })
    }

    /// An access that cannot leave its region, and is remembered if it would have.
    fn clamped(&mut self, at: Address, bytes: u32, site: Site) -> FencedAddress {
        self.clamped_from(at, 0, bytes, if at.is_aligned { bytes } else { 1 }, site)
    }

    /// So many bytes from an address, less or more, all of them inside. What they are a multiple of in the region is
    /// known.
    fn clamped_from(&mut self, at: Address, low: i32, bytes: u32, multiple: u32, site: Site) -> FencedAddress {
        let region = at.region;
        let (space, start, size) = match region {
            Region::Window(n) | Region::SmallWindow(n) => (self.space(region), format!("%window{n}"), u32::MAX),
            Region::Stack => (self.space(region), "%stack".to_owned(), self.body.stack_bytes),
            Region::Shared | Region::Any => (self.space(region), "%shared".to_owned(), self.body.shared_bytes),
        };
        if size < bytes {
            // Nothing so large fits; what follows is never reached.
            let trap = self.trap(TrapKind::OutOfBounds, site);
            put!(self, "bra {trap};");
            return FencedAddress { space, address: start };
        }
        let limit = self.limit(region, bytes, multiple, site);
        let (base, offset, wide) = (self.reg(at.base), self.b32(), self.b64());
        let distance = at.offset.wrapping_add_signed(low);
        // What was added to the window's address is the offset; no need to subtract the address again.
        let beyond = match region {
            Region::Window(window) | Region::SmallWindow(window) => self.facts.beyond(at.base, window),
            Region::Stack | Region::Shared | Region::Any => None,
        };
        if let Some(beyond) = beyond {
            let beyond = self.reg(beyond);
            put!(self, "add.s32 {offset}, {beyond}, {};", distance.cast_signed());
        } else if distance == 0 {
            put!(self, "sub.s32 {offset}, {base}, %base{limit};");
        } else {
            put!(self, "add.s32 {offset}, {base}, {};", distance.cast_signed());
            put!(self, "sub.s32 {offset}, {offset}, %base{limit};");
        }
        if at.may_wrap() {
            let q = self.pred();
            put!(self, "setp.gt.u32 {q}, {base}, {};", u32::MAX - at.offset);
            put!(self, "selp.b32 {offset}, -1, {offset}, {q};");
        }
        put!(self, "max.u32 %worst{limit}, %worst{limit}, {offset};");
        put!(self, "min.u32 {offset}, {offset}, %limit{limit};");
        put!(self, "cvt.u64.u32 {wide}, {offset};");
        put!(self, "add.s64 {wide}, {wide}, {start};");
        FencedAddress { space, address: wide }
    }

    /// An access by an address that may be of any region, or is of a window that may be small. Traps at once.
    fn looked_up(&mut self, at: Address, bytes: u32, lookup: Lookup, site: Site) -> FencedAddress {
        let (base, address, found) = (self.reg(at.base), self.b64(), self.b64());
        put!(self, "cvt.u64.u32 {address}, {base};");
        if at.offset > 0 {
            put!(self, "add.s64 {address}, {address}, {};", at.offset);
        }
        put!(self, "mov.b64 {found}, 0;");
        // An address that comes from a window is looked for in that one only.
        let candidates = match at.region {
            Region::Window(n) | Region::SmallWindow(n) => vec![Candidate::Window(n)],
            Region::Any | Region::Stack | Region::Shared => self.legal.candidates(lookup),
        };
        for candidate in candidates {
            let (start, size, pointer) = self.extent(candidate);
            let (offset, end, q, whole) = (self.b64(), self.b64(), self.pred(), self.b64());
            put!(self, "sub.s64 {offset}, {address}, {start};");
            put!(self, "add.s64 {end}, {offset}, {bytes};");
            put!(self, "setp.lt.u64 {q}, {offset}, {size};");
            put!(self, "setp.le.and.u64 {q}, {end}, {size}, {q};");
            put!(self, "add.s64 {whole}, {pointer}, {offset};");
            put!(self, "selp.b64 {found}, {whole}, {found}, {q};");
        }
        if self.legal.may_write_data(lookup) {
            let (start, size) = self.legal.extent(Candidate::Data);
            let (offset, q, trap) = (self.b64(), self.pred(), self.trap(TrapKind::WriteToConstant, site));
            put!(self, "sub.s64 {offset}, {address}, {start};");
            put!(self, "setp.lt.u64 {q}, {offset}, {size};");
            put!(self, "@{q} bra {trap};");
        }
        let (q, trap) = (self.pred(), self.trap(TrapKind::OutOfBounds, site));
        put!(self, "setp.eq.s64 {q}, {found}, 0;");
        put!(self, "@{q} bra {trap};");
        FencedAddress { space: "", address: found }
    }

    /// Where a region starts, its size, and a generic pointer to it.
    fn extent(&self, candidate: Candidate) -> (String, String, String) {
        let pointer = match candidate {
            Candidate::Window(n) => {
                let pointer = if self.handler.is_some() { "%gwindow" } else { "%window" };
                return (format!("%start{n}"), format!("%size{n}"), format!("{pointer}{n}"));
            }
            Candidate::Shared => "%gshared",
            Candidate::Stack => "%gstack",
            Candidate::Data => "%gdata",
        };
        let (start, size) = self.legal.extent(candidate);
        (start.to_string(), size.to_string(), pointer.to_owned())
    }

    pub(super) fn check_range(&mut self, start: Reg, count: Reg, is_write: bool, site: Site) {
        if self.legal.is_trusted {
            return;
        }
        let (start, count) = (self.reg(start), self.reg(count));
        let (from, len, good) = (self.b64(), self.b64(), self.b32());
        put!(self, "cvt.u64.u32 {from}, {start};");
        put!(self, "cvt.u64.u32 {len}, {count};");
        let q = self.pred();
        put!(self, "setp.eq.u64 {q}, {len}, 0;");
        put!(self, "selp.b32 {good}, 1, 0, {q};");
        let lookup = if is_write { Lookup::Write } else { Lookup::Read };
        for candidate in self.legal.candidates(lookup) {
            let (start, size, _) = self.extent(candidate);
            let (offset, end) = (self.b64(), self.b64());
            put!(self, "sub.s64 {offset}, {from}, {start};");
            put!(self, "add.s64 {end}, {offset}, {len};");
            put!(self, "setp.lt.u64 {q}, {offset}, {size};");
            put!(self, "setp.le.and.u64 {q}, {end}, {size}, {q};");
            put!(self, "selp.b32 {good}, 1, {good}, {q};");
        }
        let trap = self.trap(TrapKind::OutOfBounds, site);
        put!(self, "setp.eq.s32 {q}, {good}, 0;");
        put!(self, "@{q} bra {trap};");
    }

    pub(super) fn load(&mut self, to: Reg, access: Access, at: Address, site: Site) {
        let vector = self.legal.groups.vectors.get(&self.at).cloned();
        if let Some(VectorPart::Rest) = vector {
            return;
        }
        let target = self.target(at, access.bytes, Lookup::Read, site);
        if let Some(VectorPart::Lead { registers, distance, from_root }) = vector {
            self.vector("ld", &registers, at, &target, distance, from_root);
            return;
        }
        let ty = match self.body.ty(to) {
            Ty::F32 => "f32",
            Ty::F64 => "f64",
            Ty::I32 | Ty::I64 => load_type(access),
        };
        let name = self.reg(to);
        let FencedAddress { space, address } = &target;
        if at.is_aligned || access.bytes == 1 {
            put!(self, "ld{space}.{ty} {name}, [{address}];");
            return;
        }
        // A device faults where an address is not aligned; such an access goes byte by byte.
        let (slow, back) = self.unless_aligned(&target, access.bytes);
        put!(self, "ld{space}.{ty} {name}, [{address}];");
        let _ = writeln!(self.out, "{back}:");
        let main = std::mem::take(&mut self.out);
        let _ = writeln!(self.out, "{slow}:");
        let (sum, byte) = (self.b64(), self.b64());
        put!(self, "mov.b64 {sum}, 0;");
        for n in (0..access.bytes).rev() {
            put!(self, "ld{space}.u8 {byte}, [{address}+{n}];");
            put!(self, "shl.b64 {sum}, {sum}, 8;");
            put!(self, "or.b64 {sum}, {sum}, {byte};");
        }
        if access.is_signed {
            let shift = 64 - access.bytes * 8;
            put!(self, "shl.b64 {sum}, {sum}, {shift};");
            put!(self, "shr.s64 {sum}, {sum}, {shift};");
        }
        match self.body.ty(to) {
            Ty::I32 => put!(self, "cvt.u32.u64 {name}, {sum};"),
            Ty::I64 | Ty::F64 => put!(self, "mov.b64 {name}, {sum};"),
            Ty::F32 => {
                let half = self.b32();
                put!(self, "cvt.u32.u64 {half}, {sum};");
                put!(self, "mov.b32 {name}, {half};");
            }
        }
        put!(self, "bra {back};");
        self.aside.push_str(&std::mem::replace(&mut self.out, main));
    }

    /// Loads or stores several registers at once. The target is that of one of them, not always the lowest.
    fn vector(
        &mut self,
        how: &str,
        registers: &[Reg],
        at: Address,
        target: &FencedAddress,
        distance: u32,
        from_root: i32,
    ) {
        let (root, _) = self.facts.root(at.base);
        let names: Vec<String> = registers.iter().map(|reg| self.reg(*reg)).collect();
        let ty = match self.body.ty(registers[0]) {
            Ty::F32 => "f32",
            Ty::F64 => "f64",
            Ty::I32 => "u32",
            Ty::I64 => "u64",
        };
        let trusted = self.legal.is_trusted.then(|| self.trusted(root, at.region, i64::from(from_root)).address);
        let pointer = target.address.split('+').next().unwrap_or_default();
        let is_fast = self.fast.as_ref().and_then(|fast| fast.pointers.get(&root));
        let from = match is_fast {
            Some((_, _, low)) => i64::from(from_root) - i64::from(*low),
            None => i64::from(distance),
        };
        let address = trusted.unwrap_or_else(|| format!("{pointer}+{from}"));
        let (space, count, names) = (target.space, names.len(), names.join(", "));
        if how == "ld" {
            put!(self, "ld{space}.v{count}.{ty} {{{names}}}, [{address}];");
        } else {
            put!(self, "st{space}.v{count}.{ty} [{address}], {{{names}}};");
        }
    }

    pub(super) fn store(&mut self, access: Access, at: Address, value: Reg, site: Site) {
        let name = self.reg(value);
        let target = self.target(at, access.bytes, Lookup::Write, site);
        match self.legal.groups.vectors.get(&self.at).cloned() {
            Some(VectorPart::Rest) => return,
            Some(VectorPart::Lead { registers, distance, from_root }) => {
                return self.vector("st", &registers, at, &target, distance, from_root);
            }
            None => {}
        }
        let FencedAddress { space, address } = &target;
        let ty = match (self.body.ty(value), access.bytes) {
            (Ty::F32, _) => "f32",
            (Ty::F64, _) => "f64",
            (_, 1) => "u8",
            (_, 2) => "u16",
            (_, 4) => "u32",
            _ => "u64",
        };
        if at.is_aligned || access.bytes == 1 {
            put!(self, "st{space}.{ty} [{address}], {name};");
            return;
        }
        let (slow, back) = self.unless_aligned(&target, access.bytes);
        put!(self, "st{space}.{ty} [{address}], {name};");
        let _ = writeln!(self.out, "{back}:");
        let main = std::mem::take(&mut self.out);
        let _ = writeln!(self.out, "{slow}:");
        let rest = self.b64();
        match self.body.ty(value) {
            Ty::I32 => put!(self, "cvt.u64.u32 {rest}, {name};"),
            Ty::I64 | Ty::F64 => put!(self, "mov.b64 {rest}, {name};"),
            Ty::F32 => {
                let half = self.b32();
                put!(self, "mov.b32 {half}, {name};");
                put!(self, "cvt.u64.u32 {rest}, {half};");
            }
        }
        for n in 0..access.bytes {
            put!(self, "st{space}.u8 [{address}+{n}], {rest};");
            put!(self, "shr.u64 {rest}, {rest}, 8;");
        }
        put!(self, "bra {back};");
        self.aside.push_str(&std::mem::replace(&mut self.out, main));
    }

    /// Goes aside where an address is not aligned. Returns the labels of the way out and back.
    pub(super) fn unless_aligned(&mut self, target: &FencedAddress, bytes: u32) -> (String, String) {
        self.asides += 1;
        let (slow, back) = (format!("U{}", self.asides), format!("V{}", self.asides));
        let (low, q) = (self.b64(), self.pred());
        put!(self, "and.b64 {low}, {}, {};", target.address, bytes - 1);
        put!(self, "setp.ne.s64 {q}, {low}, 0;");
        put!(self, "@{q} bra {slow};");
        (slow, back)
    }

    /// Where an atomic goes. That it is aligned is known, or was checked.
    pub(super) fn atomic_target(&mut self, at: Address, bytes: u32, site: Site) -> FencedAddress {
        if self.legal.is_trusted {
            return self.trusted(at.base, at.region, i64::from(at.offset));
        }
        if at.region.can_clamp() {
            self.clamped(at, bytes, site)
        } else {
            self.looked_up(at, bytes, Lookup::Atomic, site)
        }
    }

    pub(super) fn read_modify_write(
        &mut self,
        op: Rmw,
        to: Reg,
        access: Access,
        target: &FencedAddress,
        value: Reg,
        expected: Reg,
    ) {
        let (bits, is_wide) = if access.bytes == 8 { ("64", true) } else { ("32", false) };
        let (to, value, expected) = (self.reg(to), self.reg(value), self.reg(expected));
        let at = format!("acq_rel.{}{}", scope(target.space), target.space);
        let address = &target.address;
        match op {
            Rmw::Add => put!(self, "atom.{at}.add.u{bits} {to}, [{address}], {value};"),
            Rmw::Sub => {
                let less = if is_wide { self.b64() } else { self.b32() };
                put!(self, "neg.s{bits} {less}, {value};");
                put!(self, "atom.{at}.add.u{bits} {to}, [{address}], {less};");
            }
            Rmw::And => put!(self, "atom.{at}.and.b{bits} {to}, [{address}], {value};"),
            Rmw::Or => put!(self, "atom.{at}.or.b{bits} {to}, [{address}], {value};"),
            Rmw::Xor => put!(self, "atom.{at}.xor.b{bits} {to}, [{address}], {value};"),
            Rmw::Exchange => put!(self, "atom.{at}.exch.b{bits} {to}, [{address}], {value};"),
            Rmw::CompareExchange => put!(self, "atom.{at}.cas.b{bits} {to}, [{address}], {expected}, {value};"),
        }
    }
}
