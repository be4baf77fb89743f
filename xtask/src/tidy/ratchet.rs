//! Rules that came later than the code. Each file keeps as many violations as `xtask/ratchet.txt` gives it, one line of
//! `RULE FILE COUNT` each; more is a complaint, and so is fewer, until `cargo xtask tidy --tighten` has written that
//! down. Counts only ever shrink, and a file that is not listed has none.

use std::collections::BTreeMap;

use anyhow::Context;

use super::{Tree, manifests, sources};
use crate::root;

const FILE: &str = "xtask/ratchet.txt";

/// What is found of one rule, by file.
type Rule = fn(&Tree) -> BTreeMap<String, Vec<String>>;

const RULES: [(&str, Rule); 5] = [
    ("columns", sources::columns),
    ("bool-match", sources::bool_matches),
    ("names", sources::names),
    ("lints", manifests::lints),
    ("dependencies", manifests::dependencies),
];

/// Complaints about files that have more than they may.
pub(super) fn hold(tree: &Tree, rule: &str, find: Rule) -> Vec<String> {
    let allowed = allowed(tree);
    let mut complaints = Vec::new();
    for (file, found) in find(tree) {
        let count = allowed.get(&(rule.to_owned(), file.clone())).copied().unwrap_or(0);
        if found.len() > count {
            if count > 0 {
                complaints.push(format!("{file} has {} where {FILE} allows {count}:", found.len()));
            }
            complaints.extend(found);
        }
    }
    complaints
}

/// Complaints about allowances that are larger than they need be.
pub(super) fn slack(tree: &Tree) -> Vec<String> {
    let found = found(tree);
    let loose = allowed(tree).into_iter().filter_map(|(key, count)| {
        let there = found.get(&key).copied().unwrap_or(0);
        let (rule, file) = key;
        (there < count)
            .then(|| format!("{file} has {there} of {rule}, {FILE} allows {count}: `cargo xtask tidy --tighten`"))
    });
    loose.collect()
}

/// Lowers every allowance to what is there. None is raised and none added.
pub(super) fn tighten(tree: &Tree) -> anyhow::Result<()> {
    let path = root().join(FILE);
    std::fs::write(&path, tightened(tree)).with_context(|| path.display().to_string())
}

pub(super) fn tightened(tree: &Tree) -> String {
    let found = found(tree);
    let lines = allowed(tree).into_iter().filter_map(|((rule, file), count)| {
        let there = found.get(&(rule.clone(), file.clone())).copied().unwrap_or(0).min(count);
        (there > 0).then(|| format!("{rule} {file} {there}\n"))
    });
    lines.collect()
}

fn found(tree: &Tree) -> BTreeMap<(String, String), usize> {
    let of = |(rule, find): &(&str, Rule)| -> Vec<_> {
        find(tree).into_iter().map(|(file, found)| ((String::from(*rule), file), found.len())).collect()
    };
    RULES.iter().flat_map(of).collect()
}

fn allowed(tree: &Tree) -> BTreeMap<(String, String), usize> {
    let text = tree.files.get(FILE).map_or("", String::as_str);
    let entry = |line: &str| {
        let mut words = line.split(' ');
        let (rule, file, count) = (words.next()?, words.next()?, words.next()?);
        Some(((rule.to_owned(), file.to_owned()), count.parse().ok()?))
    };
    text.lines().filter_map(entry).collect()
}
