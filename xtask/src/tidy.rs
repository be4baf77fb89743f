//! `cargo xtask tidy`: what the papers say exists, what the code registers is used, and nothing is left lying about.
//!
//! Each check is a function from the tree to complaints. It reads text, not syntax: crude, and quick enough to run with
//! every test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

use crate::root;

/// Longer files must be split, or explain themselves here.
const LINES_MAX: usize = 1_000;

const PAPERS: [&str; 6] =
    ["README.md", "ARCHITECTURE.md", "SPECIFICATION.md", "CHANGELOG.md", "docs/DESIGN.md", "docs/PERFORMANCE.md"];

/// From the tree to complaints.
type Check = fn(&Tree) -> Vec<String>;

struct Tree {
    /// Every tracked text file by its path from the root.
    files: BTreeMap<String, String>,
}

pub(crate) fn check() -> anyhow::Result<()> {
    let tree = Tree::read()?;
    let checks: [(&str, Check); 9] = [
        ("papers name files that exist", paths),
        ("SPECIFICATION.md names tests and results that exist", specification),
        ("PERFORMANCE.md quotes the result files", performance),
        ("registered metrics are written", metrics),
        ("environment variables are read and documented", variables),
        ("configuration keys are used", configuration),
        ("documented flags exist", flags),
        ("files say what they are and are not too long", shape),
        ("no unfinished business", leftovers),
    ];
    let mut failed = 0;
    for (what, check) in checks {
        let complaints = check(&tree);
        println!("{} {what}", if complaints.is_empty() { "ok  " } else { "FAIL" });
        for complaint in &complaints {
            println!("       {complaint}");
        }
        failed += complaints.len();
    }
    if failed > 0 {
        bail!("{failed} complaint(s)");
    }
    Ok(())
}

impl Tree {
    fn read() -> anyhow::Result<Tree> {
        // Files that are new and not yet added count too.
        let output = Command::new("git")
            .args(["ls-files", "--cached", "--others", "--exclude-standard"])
            .current_dir(root())
            .output()
            .context("git ls-files")?;
        let mut files = BTreeMap::new();
        for path in String::from_utf8(output.stdout)?.lines() {
            if let Ok(text) = std::fs::read_to_string(root().join(path)) {
                files.insert(path.to_owned(), text);
            }
        }
        Ok(Tree { files })
    }

    fn papers(&self) -> impl Iterator<Item = (&str, &str)> {
        PAPERS.iter().filter_map(|path| Some((*path, self.files.get(*path)?.as_str())))
    }

    /// Product code: sources of the crates, without tests.
    fn sources(&self) -> impl Iterator<Item = (&str, &str)> {
        let is_source = |path: &str| path.starts_with("crates/") && path.contains("/src/") && path.ends_with(".rs");
        self.files.iter().filter(move |(path, _)| is_source(path)).map(|(path, text)| (path.as_str(), text.as_str()))
    }
}

/// The words in backticks of a paper, code blocks left out.
fn quoted(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if !in_block {
            words.extend(line.split('`').skip(1).step_by(2));
        }
    }
    words
}

fn paths(tree: &Tree) -> Vec<String> {
    let mut complaints: Vec<String> =
        PAPERS.iter().filter(|p| !tree.files.contains_key(**p)).map(|p| format!("{p} is missing")).collect();
    let endings = [".rs", ".md", ".toml", ".wat", ".json", ".html"];
    for (paper, text) in tree.papers() {
        for word in quoted(text) {
            let is_path = endings.iter().any(|e| word.ends_with(e))
                && !word.contains(['*', ' ', '<', '{', '$'])
                && !word.starts_with(['.', '/']);
            let known = |word: &str| tree.files.keys().any(|p| p == word || p.ends_with(&format!("/{word}")));
            let is_folder = word.contains('/') && word.starts_with("crates/") && !word.contains(' ');
            let there = known(word) || (is_folder && root().join(word).exists());
            if (is_path || is_folder) && !there && !word.starts_with("ID.") {
                complaints.push(format!("{paper} names {word}"));
            }
        }
    }
    complaints
}

/// Tests are written `it::module::name` or `crate::path::name`, results `bench-results/FILE.json#ID`.
fn specification(tree: &Tree) -> Vec<String> {
    let Some(text) = tree.files.get("SPECIFICATION.md") else { return vec![] };
    let mut complaints = Vec::new();
    let mut named = BTreeSet::new();
    let table: String = text.lines().filter(|line| line.starts_with("| ")).flat_map(|line| [line, "\n"]).collect();
    for word in quoted(&table) {
        if let Some((file, id)) = word.split_once(".json#") {
            let rows = rows(tree, &format!("{file}.json"));
            if !rows.iter().any(|row| row["id"] == id) {
                complaints.push(format!("no result {word}"));
            }
        } else if let Some(test) = word.strip_prefix("it::") {
            let (module, name) = test.split_once("::").unwrap_or((test, ""));
            let file = format!("crates/tensor-wasm-cli/tests/it/{module}.rs");
            if !has_test(tree.files.get(&file), name) {
                complaints.push(format!("no test {word}"));
            }
            named.insert((file, name.to_owned()));
        } else if let Some(case) = word.strip_prefix("conformance::") {
            let suite = tree.files.get("crates/tensor-wasm-gpu/tests/conformance.rs");
            if !suite.is_some_and(|text| text.contains(&format!("(\"{case}\", "))) {
                complaints.push(format!("no case {word}"));
            }
        } else if let Some(name) = word.strip_prefix("kernels::") {
            let (file, name) = match name.split_once("::") {
                Some((module, name)) => (format!("{module}/mod.rs"), name),
                None => ("kernels.rs".to_owned(), name),
            };
            if !has_test(tree.files.get(&format!("crates/tensor-wasm-jit/tests/{file}")), name) {
                complaints.push(format!("no test {word}"));
            }
        } else if let Some((crate_name, rest)) =
            word.split_once("::").filter(|(c, _)| ["exec", "api", "gpu", "jit"].contains(c))
        {
            let (path, name) = rest.rsplit_once("::").unwrap_or(("", rest));
            let base = format!("crates/tensor-wasm-{crate_name}/src/{}", path.replace("::", "/"));
            let file = tree.files.get(&format!("{base}.rs")).or_else(|| tree.files.get(&format!("{base}/mod.rs")));
            if !has_test(file, name) {
                complaints.push(format!("no test {word}"));
            }
        }
    }
    // A row of a table without anything that holds it is a promise nobody checks.
    for line in text.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| promise")) {
        if !line.contains("::") && !line.contains(".json#") && !line.contains("pending") {
            complaints.push(format!("nothing holds: {line}"));
        }
    }
    for (path, text) in tree.files.iter().filter(|(path, _)| path.starts_with("crates/tensor-wasm-cli/tests/it/")) {
        for name in tests(text) {
            if !named.contains(&(path.clone(), name.to_owned())) {
                complaints.push(format!("{path}: {name} holds no promise of SPECIFICATION.md"));
            }
        }
    }
    complaints
}

fn tests(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let is_test = |line: &&str| line.trim().starts_with("#[test]") || line.trim().starts_with("#[tokio::test]");
    let mut names = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        if let Some(rest) = line.trim_start().trim_start_matches("async ").strip_prefix("fn ")
            && lines[..at].iter().rev().take(2).any(is_test)
        {
            names.extend(rest.split('(').next());
        }
    }
    names
}

fn has_test(text: Option<&String>, name: &str) -> bool {
    text.is_some_and(|text| tests(text).contains(&name))
}

fn rows(tree: &Tree, file: &str) -> Vec<serde_json::Value> {
    let parsed: Option<serde_json::Value> = tree.files.get(file).and_then(|text| serde_json::from_str(text).ok());
    parsed.and_then(|value| value["rows"].as_array().cloned()).unwrap_or_default()
}

/// Every row of every result file appears in the table of `docs/PERFORMANCE.md`, with its numbers.
fn performance(tree: &Tree) -> Vec<String> {
    let Some(paper) = tree.files.get("docs/PERFORMANCE.md") else { return vec![] };
    let mut complaints = Vec::new();
    for file in tree.files.keys().filter(|path| path.starts_with("bench-results/") && path.ends_with(".json")) {
        let rows = rows(tree, file);
        if rows.is_empty() {
            complaints.push(format!("{file} has no rows"));
        }
        for row in rows {
            let line = crate::results::line(&row);
            if !paper.contains(&line) {
                complaints.push(format!("{file}: PERFORMANCE.md lacks the line: {line}"));
            }
        }
    }
    complaints
}

/// Each field that is registered must be changed by code elsewhere.
fn metrics(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in ["crates/tensor-wasm-exec/src/metrics.rs", "crates/tensor-wasm-api/src/metrics.rs"] {
        let Some(text) = tree.files.get(file) else { continue };
        let fields = text.lines().filter_map(|line| {
            let (name, ty) = line.trim().trim_start_matches("pub ").split_once(": ")?;
            let is_metric =
                ["Gauge,", "Counter,", "Histogram,"].iter().any(|t| ty.ends_with(t)) || ty.starts_with("Family<");
            is_metric.then_some(name)
        });
        for field in fields {
            let writes = ["inc", "dec", "set", "observe", "get_or_create"].map(|write| format!("{field}.{write}"));
            let written = tree.sources().any(|(_, text)| writes.iter().any(|write| text.contains(write)));
            if !written {
                complaints.push(format!("{file}: {field} is registered and never written"));
            }
        }
    }
    complaints
}

fn variables(tree: &Tree) -> Vec<String> {
    let names = |text: &str| -> BTreeSet<String> {
        let word = |c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
        text.split(word).filter(|w| w.starts_with("TENSOR_WASM_") && w.len() > 12).map(str::to_owned).collect()
    };
    // In the compiler's environment rather than the user's.
    let internal = ["TENSOR_WASM_GIT_SHA"];
    let read: BTreeSet<String> = tree.sources().flat_map(|(_, text)| names(text)).collect();
    let documented: BTreeSet<String> = tree.papers().flat_map(|(_, text)| names(text)).collect();
    let undocumented = read.difference(&documented).filter(|name| !internal.contains(&name.as_str()));
    let tests = ["TENSOR_WASM_TEST_EXE", "TENSOR_WASM_TEST_KILLS", "TENSOR_WASM_TEST_SEED"];
    let unread = documented.difference(&read).filter(|name| !tests.contains(&name.as_str()));
    let undocumented = undocumented.map(|name| format!("{name} is read and not documented"));
    undocumented.chain(unread.map(|name| format!("{name} is documented and not read"))).collect()
}

/// Every key of the configuration file is used somewhere but where it is defined.
fn configuration(tree: &Tree) -> Vec<String> {
    let file = "crates/tensor-wasm-exec/src/config.rs";
    let Some(text) = tree.files.get(file) else { return vec![format!("{file} is missing")] };
    let keys = text.lines().filter_map(|line| line.strip_prefix("    pub ")?.split_once(": ").map(|(name, _)| name));
    let keys: BTreeSet<&str> = keys.filter(|name| !name.contains('(')).collect();
    let used = |key: &str| tree.sources().any(|(path, text)| path != file && text.contains(&format!(".{key}")));
    let by_method = |key: &str| text.contains(&format!("self.{key})"));
    let unused = keys.iter().filter(|key| !used(key) && !by_method(key) && **key != "tenant");
    unused.map(|key| format!("{key} is read from the configuration and used nowhere")).collect()
}

fn flags(tree: &Tree) -> Vec<String> {
    let commands: String =
        tree.sources().filter(|(path, _)| path.contains("tensor-wasm-cli")).map(|(_, text)| text).collect();
    let mut complaints = Vec::new();
    for (paper, text) in tree.papers() {
        let words =
            text.lines().filter(|line| line.contains("tensor-wasm ")).flat_map(|line| line.split([' ', '`', ')']));
        for flag in words.filter_map(|word| word.strip_prefix("--")).filter(|flag| !flag.is_empty()) {
            let name = flag.split('=').next().unwrap_or(flag);
            let is_name = name.chars().all(|c| c.is_ascii_lowercase() || c == '-');
            let field = format!("    {}: ", name.replace('-', "_"));
            let renamed = format!("long = \"{name}\"");
            let known = ["help", "month", "release", "device"].contains(&name);
            if is_name && !known && !commands.contains(&field) && !commands.contains(&renamed) {
                complaints.push(format!("{paper} names --{name}"));
            }
        }
    }
    complaints
}

fn shape(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in tree.files.iter().filter(|(path, _)| path.ends_with(".rs")) {
        if text.lines().count() > LINES_MAX {
            complaints.push(format!("{path} has more than {LINES_MAX} lines"));
        }
        // A command's first words are its help text, on the struct that clap reads.
        let is_command = path.contains("/commands/") && !path.ends_with("mod.rs");
        if !is_command && !text.starts_with("//! ") {
            complaints.push(format!("{path} does not say in its first line what it is"));
        }
    }
    let empty = |path: &str| std::fs::metadata(Path::new(&root()).join(path)).is_ok_and(|m| m.len() == 0);
    complaints.extend(tree.files.keys().filter(|path| empty(path)).map(|path| format!("{path} is empty")));
    complaints
}

fn leftovers(tree: &Tree) -> Vec<String> {
    // Written in two halves, so that this file does not find itself.
    let words = [
        ("TO", "DO"),
        ("FIX", "ME"),
        ("XX", "X"),
        ("HA", "CK"),
        ("todo", "!("),
        ("unimplemented", "!("),
        ("#[ign", "ore"),
    ];
    let words = words.map(|(a, b)| format!("{a}{b}"));
    let mut complaints = Vec::new();
    for (path, text) in tree.files.iter().filter(|(path, _)| !path.ends_with(".lock")) {
        for (number, line) in text.lines().enumerate() {
            let is_word = |word: &String| {
                line.split(|c: char| !(c.is_alphanumeric() || "!(#[".contains(c))).any(|w| w.starts_with(word.as_str()))
            };
            if words.iter().any(is_word) {
                complaints.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    complaints
}
