//! The archive that an `.npz` file is: a zip file of stored or deflated members. Only what that needs, and stricter
//! than most: members that overlap, sizes that deflating cannot have, names that are there twice are refused before
//! anything is inflated.

use std::collections::BTreeSet;
use std::io::{Read, Seek, SeekFrom, Write};

use flate2::Crc;
use flate2::read::DeflateDecoder;

use super::{Parsed, Why, read_exactly, shortened};

/// Bytes that the members of one archive may have together, beyond what the archive itself has. A training set of
/// some gigabytes passes; what unpacks to petabytes does not. [`super::load_npz_within`] takes another.
pub const INFLATED_BYTES_MAX: u64 = 8 << 30;

/// Bytes that a byte can be inflated to: a match of 258 for two bits, which is the best that deflating can do.
pub const INFLATED_PER_BYTE_MAX: u64 = 1032;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END_64: u32 = 0x0606_4b50;
const LOCATOR_64: u32 = 0x0706_4b50;

const LOCAL_BYTES: usize = 30;
const END_BYTES: usize = 22;
const END_64_BYTES: usize = 56;
const LOCATOR_64_BYTES: usize = 20;

/// What fields of four bytes say if the number is in a field of eight.
const IN_64: u64 = u32::MAX as u64;

/// The field with those numbers.
const EXTRA_64: u16 = 1;

const STORED: u16 = 0;
const DEFLATED: u16 = 8;

/// The bit of a member that is encrypted.
const ENCRYPTED: u16 = 1;

#[derive(Clone)]
pub(super) struct Member {
    pub name: String,
    /// Once it is inflated.
    pub bytes: u64,
    packed_bytes: u64,
    is_deflated: bool,
    crc: u32,
    /// Of its own header, and then of what follows that.
    offset: u64,
    data: u64,
}

pub(super) struct Archive<R> {
    file: R,
    members: Vec<Member>,
}

/// Numbers that follow each other, lowest byte first.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Parsed<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or("it is damaged: its directory ends in an entry")?;
        self.0 = rest;
        Ok(bytes)
    }

    fn number(&mut self, len: usize) -> Parsed<u64> {
        Ok(self.bytes(len)?.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
    }

    #[expect(clippy::cast_possible_truncation, reason = "two bytes")]
    fn short(&mut self) -> Parsed<u16> {
        Ok(self.number(2)? as u16)
    }

    #[expect(clippy::cast_possible_truncation, reason = "four bytes")]
    fn word(&mut self) -> Parsed<u32> {
        Ok(self.number(4)? as u32)
    }
}

impl<R: Read + Seek> Archive<R> {
    /// Reads where everything is.
    pub(super) fn open(mut file: R, len: u64, inflated_bytes_max: u64) -> Parsed<Archive<R>> {
        let directory = Directory::find(&mut file, len)?;
        let text = read_at(&mut file, directory.offset, directory.bytes, len)?;
        let mut fields = Fields(&text);
        let mut members = Vec::new();
        let mut names = BTreeSet::new();
        // An entry is 46 bytes at least: a number of them that lies ends with the directory.
        for _ in 0..directory.entries {
            let mut member = Member::listed(&mut fields)?;
            let named = format!("{:?}", shortened(member.name.as_bytes()));
            member.find(&mut file, directory.offset).map_err(|why| why.of(&named))?;
            if !names.insert(member.name.clone()) {
                return Err(format!("{named} is in it twice").into());
            }
            members.push(member);
        }
        if !fields.0.is_empty() {
            return Err("it is damaged: its directory has more entries than it says".into());
        }
        members.sort_by_key(|member| member.offset);
        for pair in members.windows(2) {
            if pair[0].data + pair[0].packed_bytes > pair[1].offset {
                let (a, b) = (shortened(pair[0].name.as_bytes()), shortened(pair[1].name.as_bytes()));
                return Err(
                    format!("{a:?} and {b:?} overlap in it, which no archive has that was written honestly").into()
                );
            }
        }
        let all = members.iter().try_fold(0_u64, |all, member| all.checked_add(member.bytes));
        if all.is_none_or(|all| all > inflated_bytes_max.saturating_add(len)) {
            let all = all.map_or("more than can be counted".to_owned(), |all| format!("{all} bytes"));
            let most = format!("{inflated_bytes_max} more than it has itself are read");
            return Err(format!("it unpacks to {all}, and {most}; load_npz_within takes another limit").into());
        }
        Ok(Archive { file, members })
    }

    pub(super) fn members(&self) -> Vec<Member> {
        self.members.clone()
    }

    /// Gives what a member is inflated to to somebody who reads all of it, and then checks that it was that.
    pub(super) fn read<T>(&mut self, member: &Member, reader: impl FnOnce(&mut dyn Read) -> Parsed<T>) -> Parsed<T> {
        self.file.seek(SeekFrom::Start(member.data))?;
        let packed = (&mut self.file).take(member.packed_bytes);
        let inflated: Box<dyn Read> =
            if member.is_deflated { Box::new(DeflateDecoder::new(packed)) } else { Box::new(packed) };
        let mut summed = Summed { inner: inflated, crc: Crc::new() };
        let made = reader(&mut summed)?;
        if summed.read(&mut [0])? != 0 {
            return Err(format!("it is damaged: it has more than the {} bytes that it says", member.bytes).into());
        }
        if summed.crc.sum() != member.crc {
            return Err("it is damaged: its checksum is another".into());
        }
        Ok(made)
    }
}

/// Sums up what is read.
struct Summed<'r> {
    inner: Box<dyn Read + 'r>,
    crc: Crc,
}

impl Read for Summed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.crc.update(&buffer[..count]);
        Ok(count)
    }
}

fn read_at(file: &mut (impl Read + Seek), offset: u64, bytes: u64, len: u64) -> Parsed<Vec<u8>> {
    let outside = || Why::from("it is damaged or cut off: it refers to where it has nothing");
    if offset.checked_add(bytes).is_none_or(|end| end > len) {
        return Err(outside());
    }
    file.seek(SeekFrom::Start(offset))?;
    read_exactly(file, usize::try_from(bytes).map_err(|_| outside())?)?.ok_or_else(outside)
}

/// The list of members at the end of an archive.
struct Directory {
    entries: u64,
    bytes: u64,
    offset: u64,
}

impl Directory {
    fn find(file: &mut (impl Read + Seek), len: u64) -> Parsed<Directory> {
        let tail_bytes = len.min(END_BYTES as u64 + u64::from(u16::MAX));
        let tail = read_at(file, len - tail_bytes, tail_bytes, len)?;
        let is_end = |at: &usize| {
            let comment = tail.get(at + END_BYTES - 2..at + END_BYTES);
            let comment = comment.map(|two| usize::from(two[0]) | usize::from(two[1]) << 8);
            tail[*at..].starts_with(&END.to_le_bytes())
                && comment.is_some_and(|bytes| at + END_BYTES + bytes == tail.len())
        };
        let at = (0..tail.len().saturating_sub(END_BYTES - 1)).rev().find(is_end);
        let at = at.ok_or("it is not an .npz file, or it is cut off: it does not end as a zip archive")?;
        let end = len - tail_bytes + at as u64;
        let mut fields = Fields(&tail[at + 4..]);
        let disks = fields.number(4)?;
        let (here, entries) = (fields.number(2)?, fields.number(2)?);
        let mut found = Directory { entries, bytes: fields.number(4)?, offset: fields.number(4)? };
        if disks != 0 || here != entries {
            return Err("it is one of several parts of an archive; join them first".into());
        }
        let locator = end.checked_sub(LOCATOR_64_BYTES as u64);
        let mut until = end;
        if let Some(at) = locator
            && let locator = read_at(file, at, LOCATOR_64_BYTES as u64, len)?
            && locator.starts_with(&LOCATOR_64.to_le_bytes())
        {
            let record = Fields(&locator[8..]).number(8)?;
            let text = read_at(file, record, END_64_BYTES as u64, at)?;
            if !text.starts_with(&END_64.to_le_bytes()) {
                return Err("it is damaged: its directory of 64 bits is not where it says".into());
            }
            let mut fields = Fields(&text[24..]);
            let here = fields.number(8)?;
            found = Directory { entries: fields.number(8)?, bytes: fields.number(8)?, offset: fields.number(8)? };
            if here != found.entries {
                return Err("it is one of several parts of an archive; join them first".into());
            }
            until = record;
        }
        if found.offset.checked_add(found.bytes).is_none_or(|end| end > until) {
            return Err("it is damaged or cut off: it refers to where it has nothing".into());
        }
        Ok(found)
    }
}

impl Member {
    /// The next entry of a directory.
    fn listed(fields: &mut Fields<'_>) -> Parsed<Member> {
        if fields.word()? != CENTRAL {
            return Err("it is damaged: its directory has an entry that is none".into());
        }
        fields.bytes(4)?;
        let (flags, method) = (fields.short()?, fields.short()?);
        fields.bytes(4)?;
        let crc = fields.word()?;
        let (mut packed_bytes, mut bytes) = (fields.number(4)?, fields.number(4)?);
        let (name, extra, comment) = (fields.short()?, fields.short()?, fields.short()?);
        fields.bytes(8)?;
        let mut offset = fields.number(4)?;
        let name = fields.bytes(usize::from(name))?;
        let mut extra = Fields(fields.bytes(usize::from(extra))?);
        fields.bytes(usize::from(comment))?;
        let named = format!("{:?}", shortened(name));
        while extra.0.len() >= 4 {
            let (id, len) = (extra.short()?, extra.short()?);
            let mut inside = Fields(extra.bytes(usize::from(len))?);
            if id == EXTRA_64 {
                // Only those that did not fit are there, in this order.
                for number in [&mut bytes, &mut packed_bytes, &mut offset] {
                    if *number == IN_64 {
                        *number = inside.number(8)?;
                    }
                }
            }
        }
        let wrong = |why: &str| Err(Why::Wrong(format!("{named}: {why}")));
        let Ok(name) = std::str::from_utf8(name) else { return wrong("its name is not UTF-8") };
        if flags & ENCRYPTED != 0 {
            return wrong("it is encrypted; decrypt it first");
        }
        match method {
            STORED if bytes != packed_bytes => return wrong("it is damaged: it is stored, with two sizes"),
            STORED => {}
            DEFLATED if bytes / INFLATED_PER_BYTE_MAX > packed_bytes => {
                return wrong(&format!("it is damaged: {packed_bytes} bytes are not inflated to {bytes}"));
            }
            DEFLATED => {}
            _ => return wrong(&format!("it is packed by method {method}; known are stored and deflated")),
        }
        let is_deflated = method == DEFLATED;
        Ok(Member { name: name.to_owned(), bytes, packed_bytes, is_deflated, crc, offset, data: 0 })
    }

    /// Reads its own header, behind which its data is.
    fn find(&mut self, file: &mut (impl Read + Seek), directory: u64) -> Parsed<()> {
        let header = read_at(file, self.offset, LOCAL_BYTES as u64, directory)?;
        let name = Fields(&header[26..]).number(2)?;
        let extra = Fields(&header[28..]).number(2)?;
        let start = self.offset + LOCAL_BYTES as u64;
        let own = read_at(file, start, name, directory)?;
        if !header.starts_with(&LOCAL.to_le_bytes()) || own != self.name.as_bytes() {
            return Err("it is damaged: it is not where the directory says".into());
        }
        self.data = start + name + extra;
        if self.data.checked_add(self.packed_bytes).is_none_or(|end| end > directory) {
            return Err("it is damaged or cut off: it ends behind the directory".into());
        }
        Ok(())
    }
}

/// Writes stored members, one after the other.
pub(super) struct ArchiveWriter<W> {
    to: W,
    at: u64,
    directory: Vec<u8>,
    names: BTreeSet<String>,
}

impl<W: Write> ArchiveWriter<W> {
    pub(super) fn new(to: W) -> ArchiveWriter<W> {
        ArchiveWriter { to, at: 0, directory: Vec::new(), names: BTreeSet::new() }
    }

    /// Writes a member that consists of these parts.
    pub(super) fn add(&mut self, name: &str, parts: &[&[u8]]) -> Parsed<()> {
        let name_bytes = u16::try_from(name.len()).map_err(|_| "its name is too long for an archive")?;
        if !self.names.insert(name.to_owned()) {
            return Err("there are two of that name".into());
        }
        let mut crc = Crc::new();
        parts.iter().for_each(|part| crc.update(part));
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let short = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        // Of a member that does not fit in 32 bits, all three numbers are in the extra field.
        let is_large = bytes >= IN_64 || self.at >= IN_64;
        let extra = |numbers: &[u64]| {
            let mut extra = Vec::new();
            if is_large {
                extra.extend(EXTRA_64.to_le_bytes());
                #[expect(clippy::cast_possible_truncation, reason = "three numbers at most")]
                extra.extend((8 * numbers.len() as u16).to_le_bytes());
                numbers.iter().for_each(|number| extra.extend(number.to_le_bytes()));
            }
            extra
        };
        let size = if is_large { u32::MAX } else { short(bytes) };
        // What both headers have: version, flags (the name is UTF-8), method, 1980-01-01, checksum and sizes.
        let mut common = Vec::new();
        for number in [if is_large { 45_u16 } else { 20 }, 1 << 11, STORED, 0, 0x21] {
            common.extend(number.to_le_bytes());
        }
        for number in [crc.sum(), size, size] {
            common.extend(number.to_le_bytes());
        }
        common.extend(name_bytes.to_le_bytes());
        let (own, listed) = (extra(&[bytes, bytes]), extra(&[bytes, bytes, self.at]));
        let len = |extra: &[u8]| u16::try_from(extra.len()).unwrap_or(0).to_le_bytes();
        let header = [&LOCAL.to_le_bytes(), &common[..], &len(&own), name.as_bytes(), &own].concat();
        self.directory.extend(CENTRAL.to_le_bytes());
        self.directory.extend(if is_large { [45, 0] } else { [20, 0] });
        self.directory.extend(&common);
        self.directory.extend(len(&listed));
        // No comment, disk 0, no attributes.
        self.directory.extend([0; 10]);
        let offset = if is_large { u32::MAX } else { short(self.at) };
        self.directory.extend(offset.to_le_bytes());
        self.directory.extend(name.as_bytes());
        self.directory.extend(listed);
        self.to.write_all(&header)?;
        for part in parts {
            self.to.write_all(part)?;
        }
        self.at += header.len() as u64 + bytes;
        Ok(())
    }

    pub(super) fn finish(mut self) -> Parsed<()> {
        let (entries, bytes) = (self.names.len() as u64, self.directory.len() as u64);
        self.to.write_all(&self.directory)?;
        if entries >= u64::from(u16::MAX) || self.at >= IN_64 || bytes >= IN_64 {
            let mut record = END_64.to_le_bytes().to_vec();
            record.extend((END_64_BYTES as u64 - 12).to_le_bytes());
            record.extend([45, 0, 45, 0]);
            record.extend([0; 8]);
            for number in [entries, entries, bytes, self.at] {
                record.extend(number.to_le_bytes());
            }
            record.extend(LOCATOR_64.to_le_bytes());
            record.extend([0; 4]);
            record.extend((self.at + bytes).to_le_bytes());
            record.extend(1_u32.to_le_bytes());
            self.to.write_all(&record)?;
        }
        let mut end = END.to_le_bytes().to_vec();
        end.extend([0; 4]);
        let short = u16::try_from(entries).unwrap_or(u16::MAX);
        end.extend(short.to_le_bytes());
        end.extend(short.to_le_bytes());
        for number in [bytes, self.at] {
            end.extend(u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
        }
        end.extend([0; 2]);
        Ok(self.to.write_all(&end)?)
    }
}
