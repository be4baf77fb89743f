//! Checks of Rust sources, all of them tracked: of the crates, their tests, guests, the SDK, the fuzz targets. Of other
//! files that people write, comments have to fit too.

use std::collections::BTreeMap;

use super::Tree;

/// As `rustfmt.toml` has it for code; rustfmt leaves comments and strings alone.
const COLUMNS_MAX: usize = 120;

/// Names that say so little that two types of one crate may not both have them.
const GENERIC: [&str; 8] = ["Answer", "Loaded", "Place", "Seat", "Slab", "State", "Step", "Table"];

fn rust(tree: &Tree) -> impl Iterator<Item = (&str, &str)> {
    tree.files.iter().filter(|(path, _)| path.ends_with(".rs")).map(|(path, text)| (path.as_str(), text.as_str()))
}

/// What a line says as a comment, if it has one. A `//` inside a string looks like one where a space comes before it.
fn comment(line: &str) -> Option<&str> {
    let trimmed = line.trim_start();
    trimmed.strip_prefix("//").or_else(|| line.split_once(" // ").map(|(_, comment)| comment))
}

/// The folder of a crate's manifest, for a source of it.
fn crate_folder<'t>(tree: &Tree, path: &'t str) -> &'t str {
    let mut folder = path;
    while let Some((parent, _)) = folder.rsplit_once('/') {
        if tree.files.contains_key(&format!("{parent}/Cargo.toml")) {
            return parent;
        }
        folder = parent;
    }
    ""
}

/// A file in backticks is there, and so is a source that the words or the diagrams of a file's beginning name without:
/// from the comment's own folder, from its crate's `src`, from `crates`, or from the root.
pub(super) fn comments(tree: &Tree) -> Vec<String> {
    let endings = [".rs", ".md", ".wit", ".toml"];
    let mut complaints = Vec::new();
    for (path, text) in rust(tree) {
        let own = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let bases =
            [format!("{own}/"), format!("{}/src/", crate_folder(tree, path)), "crates/".to_owned(), String::new()];
        for (number, line) in text.lines().enumerate() {
            let is_other = |c: char| !(c.is_ascii_alphanumeric() || "/_-.".contains(c));
            let words = comment(line).into_iter().flat_map(|comment| comment.split('`').skip(1).step_by(2));
            let is_path = |word: &&str| {
                endings.iter().any(|ending| word.ends_with(ending) && word.len() > ending.len())
                    && !word.contains(is_other)
            };
            let beginning = line.strip_prefix("//!").into_iter().flat_map(|text| text.split('`').step_by(2));
            let tokens = beginning.flat_map(|text| text.split(is_other)).map(|token| token.trim_end_matches('.'));
            let is_source = |token: &&str| token.ends_with(".rs") && token.len() > 3;
            for word in words.filter(is_path).chain(tokens.filter(is_source)) {
                if !bases.iter().any(|base| tree.has(&format!("{base}{word}"))) {
                    complaints.push(format!("{path}:{}: names {word}", number + 1));
                }
            }
        }
    }
    complaints
}

/// How a line of comment begins in files that are not Rust, if this is one that people write.
fn comment_mark(path: &str) -> Option<&'static str> {
    let of_ending = |ending: &str| match ending {
        "wit" => Some("//"),
        "wat" => Some(";;"),
        "toml" => Some("#"),
        _ => None,
    };
    let of_script = || path.starts_with(".ci/").then_some("#");
    path.rsplit_once('.').and_then(|(_, ending)| of_ending(ending)).or_else(of_script)
}

/// Lines that are too long. A line with a string in it may be longer: text of another language is not broken. Of what
/// is not Rust only comments count: nothing formats the rest, and a dependency with its features is one line. What is
/// indented behind the mark is text of another language again, as the PTX in a snapshot.
pub(super) fn columns(tree: &Tree) -> Vec<String> {
    let too_long = |line: &str| line.chars().count() > COLUMNS_MAX;
    let say = |line: &str| format!("{} columns", line.chars().count());
    let is_text = |line: &str| !line.trim_start().starts_with("//") && line.contains(['"', '$']);
    let mut found = by_line(tree, |line| (too_long(line) && !is_text(line)).then(|| say(line)));
    for (path, text) in &tree.files {
        let Some(mark) = comment_mark(path) else { continue };
        for (number, line) in text.lines().enumerate() {
            let is_comment = |rest: &str| !rest.starts_with("    ");
            if too_long(line) && line.trim_start().strip_prefix(mark).is_some_and(is_comment) {
                found.push(format!("{path}:{}: {}", number + 1, say(line)));
            }
        }
    }
    found
}

/// Arms of a `match` on a truth.
pub(super) fn bool_matches(tree: &Tree) -> Vec<String> {
    let is_arm = |line: &str| {
        ["true =>", "false =>"].iter().any(|arm| {
            let first = line.trim_start().starts_with(arm);
            // In one line; in two halves, so that this file does not find itself.
            first || line.contains(&format!("{}{arm}", "{ "))
        })
    };
    by_line(tree, |line| is_arm(line).then(|| line.trim().to_owned()))
}

fn by_line(tree: &Tree, check: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in rust(tree) {
        for (number, line) in text.lines().enumerate() {
            if let Some(what) = check(line) {
                found.push(format!("{path}:{}: {what}", number + 1));
            }
        }
    }
    found
}

/// Types of a crate that share a name which says too little.
pub(super) fn names(tree: &Tree) -> Vec<String> {
    let mut places: BTreeMap<(String, &str), Vec<String>> = BTreeMap::new();
    for (path, text) in rust(tree).filter(|(path, _)| path.contains("/src/") && !path.ends_with("/tests.rs")) {
        for (number, line) in text.lines().enumerate() {
            let words: Vec<&str> = line.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
            let defined = words.windows(2).find(|pair| ["struct", "enum", "type", "union", "trait"].contains(&pair[0]));
            let Some(name) = defined.and_then(|pair| GENERIC.iter().find(|name| **name == pair[1])) else { continue };
            // An associated type has the name its trait gives it.
            if comment(line).is_none() && !line.starts_with("    type ") {
                let place = format!("{path}:{}", number + 1);
                places.entry((crate_folder(tree, path).to_owned(), name)).or_default().push(place);
            }
        }
    }
    let shared = places.into_iter().filter(|(_, places)| places.len() > 1);
    shared.map(|((_, name), places)| format!("{name} is {}", places.join(" and "))).collect()
}
