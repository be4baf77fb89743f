//! A graph while it is recorded. Branches are put one after the other, from the last to the first as far as their
//! order allows: where a GPU would run steps side by side, nothing here happens to come in the order in which it was
//! recorded, and whoever forgot to say that a step comes after another finds out without a GPU.

use super::streams::StreamOp;
use crate::backend::no_such_step;
use crate::error::DeviceError;

#[derive(Default)]
pub(super) struct Recording {
    ops: Vec<StreamOp>,
    /// Where each step begins, and which of those before it comes after; nothing if nobody said.
    steps: Vec<(usize, Vec<usize>)>,
}

impl Recording {
    pub(super) fn put(&mut self, op: StreamOp) {
        self.ops.push(op);
    }

    /// The next step comes after some of those before.
    pub(super) fn branch(&mut self, after: &[usize]) -> Result<(), DeviceError> {
        if let Some(step) = after.iter().find(|step| **step >= self.steps.len()) {
            return Err(no_such_step(*step, self.steps.len()));
        }
        self.steps.push((self.ops.len(), after.to_vec()));
        Ok(())
    }

    pub(super) fn end(self) -> Vec<StreamOp> {
        let begins = |step: usize| self.steps.get(step).map_or(self.ops.len(), |(begin, _)| *begin);
        let after: Vec<&[usize]> = self.steps.iter().map(|(_, after)| &after[..]).collect();
        let unbranched = &self.ops[..begins(0)];
        let branched = last_first(&after).into_iter().flat_map(|step| &self.ops[begins(step)..begins(step + 1)]);
        unbranched.iter().chain(branched).cloned().collect()
    }
}

/// The steps in an order that has each behind those it comes after: always the last that is possible next.
fn last_first(after: &[&[usize]]) -> Vec<usize> {
    let mut order: Vec<usize> = Vec::with_capacity(after.len());
    let mut is_done = vec![false; after.len()];
    while let Some(next) =
        (0..after.len()).rev().find(|step| !is_done[*step] && after[*step].iter().all(|before| is_done[*before]))
    {
        is_done[next] = true;
        order.push(next);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::last_first;

    #[test]
    fn what_has_an_order_keeps_it_and_the_rest_is_turned_round() {
        assert_eq!(last_first(&[&[], &[], &[]]), [2, 1, 0]);
        assert_eq!(last_first(&[&[], &[0], &[1]]), [0, 1, 2]);
        assert_eq!(last_first(&[&[], &[0], &[0], &[1, 2], &[]]), [4, 0, 2, 1, 3]);
        assert_eq!(last_first(&[]), []);
    }
}
