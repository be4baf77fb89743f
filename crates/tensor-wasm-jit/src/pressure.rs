//! Register pressure: how many values a kernel keeps alive at once. The device's assembler allocates registers, and
//! takes very long over a long kernel that makes it spill: such kernels are refused before it sees them.
//!
//! The estimate is a value's live interval, from where it is first assigned to where it is last used, or to the end of
//! a loop that it comes into from outside. It takes time in proportion to the kernel, and is close for what compilers
//! write.

use std::collections::HashMap;

use crate::ir::{Body, Flow, Label, Op, Structure};
use crate::refusal::{Refusal, SourceLocation};

/// Registers of 32 bits that a work item may have on every device, less a few for the fence. `ptxas` 13 for sm_90 takes
/// about 3 s for 20,000 operations on as many values in a loop.
const REGISTERS: usize = 250;

/// Values beyond that, times the operations of the kernel. For 20,000 operations on 300 values it takes 10 s, on 400
/// values 28 s, on 600 values 54 s; for 2,000 operations on 600 values less than 1 s. With this it is 5 s at most.
const SPILLS_MAX: usize = 500_000;

/// Refuses a kernel that the device's assembler would take very long for.
pub(crate) fn check(body: &Body) -> Result<(), Refusal> {
    let values_max = REGISTERS + SPILLS_MAX / body.ops.len().max(1);
    let (values, at) = most(body);
    if values <= values_max {
        return Ok(());
    }
    let site = body.ops.iter().take(at + 1).rev().find_map(Op::site);
    let place = site.and_then(|site| body.sites.get(site.0 as usize)).cloned();
    let place = place.unwrap_or_else(|| SourceLocation { function: body.name.clone(), offset: None });
    Err(Refusal::TooManyValues { values_max, place })
}

/// The most values of 32 bits that are alive at once, and the operation at which they are.
fn most(body: &Body) -> (usize, usize) {
    let intervals = intervals(body);
    let mut changes = vec![0_isize; body.ops.len() + 1];
    for (interval, ty) in intervals.iter().zip(&body.types) {
        if let Some((first, last)) = *interval {
            let words = if ty.bytes() == 8 { 2 } else { 1 };
            changes[first] += words;
            // It makes room for what the operation assigns.
            changes[last] -= words;
        }
    }
    let (mut alive, mut most) = (0, (0, 0));
    for (at, change) in changes.into_iter().enumerate() {
        alive += change;
        most = most.max((alive, at));
    }
    (usize::try_from(most.0).unwrap_or(0), most.1)
}

/// Where each register begins and ends to be needed; none for constants, which are part of instructions, and for what
/// nobody uses.
fn intervals(body: &Body) -> Vec<Option<(usize, usize)>> {
    let count = body.types.len();
    let (mut first, mut last) = (vec![usize::MAX; count], vec![None; count]);
    let mut is_value = vec![false; count];
    // Of a register that goes round a loop, where that begins.
    let mut header = vec![0; count];
    for reg in &body.params {
        (first[reg.0 as usize], is_value[reg.0 as usize]) = (0, true);
    }
    let (ends, carried) = (ends(body), carried(body));
    for (op, to) in body.ops.iter().zip(&carried) {
        if let (Op::Move { to: reg, .. }, Some(to)) = (op, to)
            && matches!(body.ops.get(*to), Some(Op::Loop { .. }))
        {
            header[reg.0 as usize] = to + 1;
        }
    }
    // Loops around an operation, the outermost first: where they begin and end.
    let mut loops: Vec<(usize, usize)> = Vec::new();
    for (at, op) in body.ops.iter().enumerate() {
        while loops.last().is_some_and(|(_, end)| *end < at) {
            loops.pop();
        }
        for reg in op.read() {
            let reg = reg.0 as usize;
            first[reg] = first[reg].min(at);
            // The outermost loop that it was assigned before: it is needed until that ends. What goes round a loop is
            // assigned anew each time.
            let from = if header[reg] <= at { first[reg].max(header[reg]) } else { first[reg] };
            let outside = loops.partition_point(|(start, _)| *start < from);
            let until = loops.get(outside).map_or(at, |(_, end)| *end);
            last[reg] = last[reg].max(Some(until));
        }
        for to in op.assigned() {
            let to = to.0 as usize;
            first[to] = first[to].min(carried[at].unwrap_or(at));
            is_value[to] |= !matches!(op, Op::Const { .. });
        }
        if matches!(op, Op::Loop { .. }) {
            loops.push((at, ends[at]));
        }
    }
    let all = first.into_iter().zip(last).zip(is_value);
    all.map(|((first, last), is_value)| last.filter(|_| is_value).map(|last| (first, last))).collect()
}

/// For the operation that begins a block, the one that ends it.
fn ends(body: &Body) -> Vec<usize> {
    let mut ends = vec![0; body.ops.len()];
    let mut open = Vec::new();
    for (at, op) in body.ops.iter().enumerate() {
        match op.flow() {
            Flow::Open(..) => open.push(at),
            Flow::Close(_) => {
                if let Some(start) = open.pop() {
                    ends[start] = at;
                }
            }
            Flow::Straight | Flow::Else(_) | Flow::Leave | Flow::Wait => {}
        }
    }
    ends
}

/// For each move that a branch follows, where the branch goes: nothing is in between, so that the register it assigns
/// is needed from there on.
fn carried(body: &Body) -> Vec<Option<usize>> {
    let mut targets: HashMap<Label, usize> = HashMap::new();
    for (at, op) in body.ops.iter().enumerate() {
        match op.flow() {
            Flow::Open(label, Structure::Loop) => drop(targets.insert(label, at)),
            // A loop's own end is not where a branch to it goes.
            Flow::Close(label) => drop(targets.entry(label).or_insert(at)),
            Flow::Open(_, Structure::Block | Structure::If)
            | Flow::Straight
            | Flow::Else(_)
            | Flow::Leave
            | Flow::Wait => {}
        }
    }
    let mut carried = vec![None; body.ops.len()];
    let mut to = None;
    for (at, op) in body.ops.iter().enumerate().rev() {
        if let Op::Branch { label } | Op::Else { label } = op {
            to = targets.get(label).copied();
        } else if !matches!(op, Op::Move { .. }) {
            to = None;
        }
        carried[at] = to;
    }
    carried
}
