//! What comes out of the compiler, and the layout of the two blocks of memory that a kernel shares with whoever
//! launches it.

use crate::gpu::Target;
use crate::ir::{TrapKind, Ty};
use crate::refusal::SourceLocation;

/// A compiled kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelImage {
    /// As the Wasm module exports it.
    pub name: String,
    /// As the PTX calls it.
    pub entry: String,
    pub ptx: String,
    pub params: Vec<Param>,
    /// What the window of each parameter must have at least. For a smaller one the kernel is compiled for small
    /// windows.
    pub window_bytes_min: Vec<u32>,
    /// Windows lie from here on, in the kernel's addresses: below are its own stack and data, and what wraps around.
    pub windows_from: u32,
    /// Memory that a group shares; part of the PTX, unless the next is not zero.
    pub shared_bytes: u32,
    /// What a launch has to give each group of that: more than can be part of the PTX.
    pub dynamic_shared_bytes: u32,
    /// The least device that has all its instructions.
    pub target: Target,
    /// Places that a trap record's number stands for.
    pub sites: Vec<SourceLocation>,
}

impl KernelImage {
    /// Whether windows of these sizes, one for each parameter, are large enough for it.
    pub fn fits(&self, sizes: impl IntoIterator<Item = u64>) -> bool {
        self.window_bytes_min.iter().zip(sizes).all(|(needed, size)| size >= u64::from(*needed))
    }
}

/// A parameter of a kernel, as it is laid out in a launch's parameter block. After all of them come the addresses of
/// the control block and of the record, the number of the launch, and its budget in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Param {
    Scalar(Ty),
    /// The device's address, the kernel's address of it, and its size in bytes. Both addresses are multiples of 16.
    Window,
}

/// The layout of a control block: in device memory, one for each stream, zero at first and never reset.
#[derive(Debug, Clone, Copy)]
pub struct ControlLayout {
    /// The launch's number above the complement of the earliest tick that was seen.
    pub start: u32,
    /// The number of the launch that is to stop: the first of several copies, so far apart.
    pub stop: u32,
    pub stop_copies: u32,
    pub stop_stride: u32,
    /// The number of the launch that trapped last.
    pub trapped: u32,
    pub bytes: u32,
    /// A tick is the device's nanoseconds shifted right by this.
    pub tick_shift: u32,
    pub tick_mask: u32,
    pub launch_shift: u32,
}

const TICK_BITS: u32 = 28;

pub const CONTROL: ControlLayout = ControlLayout {
    start: 0,
    stop: 128,
    stop_copies: 16,
    stop_stride: 128,
    trapped: 16,
    bytes: 128 + 16 * 128,
    tick_shift: 16,
    tick_mask: (1 << TICK_BITS) - 1,
    launch_shift: TICK_BITS,
};

/// Numbers of launches are below this, so that they fit above a tick.
pub const LAUNCHES_MAX: u64 = 1 << (64 - TICK_BITS);

/// The longest budget: half of what the ticks can tell apart.
pub const BUDGET_TICKS_MAX: u32 = CONTROL.tick_mask / 2;

/// A budget in ticks, for a launch that may take so many nanoseconds.
pub fn budget_ticks(nanos: u64) -> u32 {
    u32::try_from(nanos >> CONTROL.tick_shift).unwrap_or(u32::MAX).clamp(1, BUDGET_TICKS_MAX)
}

/// The layout of a trap record: in memory that the host sees, one for each launch under way.
#[derive(Debug, Clone, Copy)]
pub struct RecordLayout {
    /// The number of the launch it is about, written last.
    pub launch: u32,
    /// The number of a launch that the host has cancelled.
    pub cancelled: u32,
    pub kind: u32,
    pub site: u32,
    /// The parameter whose window it was, or one of the numbers below.
    pub which: u32,
    /// The offset in the window.
    pub offset: u32,
    /// The group's three numbers, then the item's in the group.
    pub ids: u32,
    pub bytes: u32,
    pub stack: u32,
    pub shared: u32,
    pub nothing: u32,
}

pub const RECORD: RecordLayout = RecordLayout {
    launch: 0,
    cancelled: 8,
    kind: 16,
    site: 20,
    which: 24,
    offset: 28,
    ids: 32,
    bytes: 64,
    stack: 0xffff_fffe,
    shared: 0xffff_fffd,
    nothing: 0xffff_ffff,
};

/// A trap of a launch, as read from its record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trap {
    pub kind: TrapKind,
    pub place: Option<SourceLocation>,
    /// Which memory an access was outside of, and at which offset.
    pub outside: Option<(Memory, u32)>,
    pub group: [u32; 3],
    pub item: [u32; 3],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    Argument(u32),
    Stack,
    Shared,
}

impl Trap {
    /// Reads a record; none if it is about another launch.
    pub fn read(record: &[u8], launch: u64, sites: &[SourceLocation]) -> Option<Trap> {
        let word = |at: u32| {
            let at = at as usize;
            record.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes)
        };
        let number = u64::from(word(RECORD.launch)?) | u64::from(word(RECORD.launch + 4)?) << 32;
        if number != launch {
            return None;
        }
        let kind = TrapKind::of(word(RECORD.kind)?)?;
        let (which, offset) = (word(RECORD.which)?, word(RECORD.offset)?);
        let memory = match which {
            _ if which == RECORD.nothing => None,
            _ if which == RECORD.stack => Some(Memory::Stack),
            _ if which == RECORD.shared => Some(Memory::Shared),
            argument => Some(Memory::Argument(argument)),
        };
        let three = |from: u32| Some([word(from)?, word(from + 4)?, word(from + 8)?]);
        let has_place = !matches!(kind, TrapKind::Deadline | TrapKind::Cancelled);
        Some(Trap {
            kind,
            place: sites.get(word(RECORD.site)? as usize).filter(|_| has_place).cloned(),
            outside: memory.map(|memory| (memory, offset)),
            group: three(RECORD.ids)?,
            item: three(RECORD.ids + 12)?,
        })
    }
}

impl std::fmt::Display for Trap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind.what())?;
        match self.outside {
            Some((Memory::Argument(n), offset)) => write!(f, " at byte {offset} of argument {n}")?,
            Some((Memory::Stack, _)) => write!(f, " beyond the work item's stack")?,
            Some((Memory::Shared, offset)) => write!(f, " at byte {offset} of the group's shared memory")?,
            None => {}
        }
        if let Some(place) = &self.place {
            write!(f, " ({place})")?;
        }
        let ([gx, gy, gz], [x, y, z]) = (self.group, self.item);
        write!(f, ", in work item {x},{y},{z} of group {gx},{gy},{gz}")
    }
}
