//! `cargo xtask tidy`: what the papers say exists, what the code registers is used, and nothing is left lying about.
//!
//! Each check is a function from the tree to complaints. It reads text, not syntax: crude, and quick enough to run with
//! every test. Here are the tree and the checks of papers; `sources.rs` reads Rust, `manifests.rs` the manifests,
//! `house.rs` what everything else stands on.

mod house;
mod manifests;
mod sources;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::{Context, bail};

use crate::root;

/// Longer files must be split, or explain themselves here.
const LINES_MAX: usize = 1_000;

const PAPERS: [&str; 11] = [
    "README.md",
    "ARCHITECTURE.md",
    "SPECIFICATION.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/DESIGN.md",
    "docs/KERNELS.md",
    "docs/PERFORMANCE.md",
    "docs/TENSORS.md",
    "sdk/README.md",
];

/// Where metrics are registered.
const METRICS: [&str; 3] = [
    "crates/tensor-wasm-api/src/metrics.rs",
    "crates/tensor-wasm-exec/src/metrics.rs",
    "crates/tensor-wasm-gpu/src/metrics.rs",
];

/// From the tree to complaints.
type Check = fn(&Tree) -> Vec<String>;

#[derive(Default)]
struct Tree {
    /// Every tracked text file by its path from the root.
    files: BTreeMap<String, String>,
    /// Every tracked file that is not text.
    binaries: BTreeSet<String>,
}

/// Runs every check.
pub(crate) fn check() -> anyhow::Result<()> {
    let tree = Tree::read()?;
    let checks: [(&str, Check); 18] = [
        ("papers name files that exist, by their whole path", paths),
        ("links of papers lead somewhere", links),
        ("comments name files that exist", sources::comments),
        ("SPECIFICATION.md names tests and results that exist, and what falls short", specification),
        ("PERFORMANCE.md quotes the result files", performance),
        ("registered metrics are written", metrics),
        ("environment variables are read and documented", variables),
        ("configuration keys are used", configuration),
        ("documented flags exist", flags),
        ("files say what they are and are not too long", shape),
        ("no unfinished business", leftovers),
        ("lines of code and comments fit 120 columns", sources::columns),
        ("a choice between true and false is an `if`", sources::bool_matches),
        ("a type's name means one thing in its crate", sources::names),
        ("every crate takes the workspace's lints", manifests::lints),
        ("every dependency is named by its crate", manifests::dependencies),
        ("crates keep their boundaries", manifests::boundaries),
        ("the house stands: its files, and all steps of .ci/run", house::house),
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
        let (mut files, mut binaries) = (BTreeMap::new(), BTreeSet::new());
        for path in String::from_utf8(output.stdout)?.lines() {
            match std::fs::read_to_string(root().join(path)) {
                Ok(text) => _ = files.insert(path.to_owned(), text),
                Err(why) if why.kind() == std::io::ErrorKind::InvalidData => _ = binaries.insert(path.to_owned()),
                // Removed, and not yet said so to git.
                Err(_) => {}
            }
        }
        Ok(Tree { files, binaries })
    }

    /// Whether there is a file or a folder of this path, from the root.
    fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        let below = format!("{path}/");
        let within = |known: &String| known == path || known.starts_with(&below);
        self.files.keys().chain(&self.binaries).any(within)
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

/// A paper's sections, cut at headings of the first two levels, each with the folders its paths may start from: the
/// root, and those that the section declares with "Paths are in `FOLDER`".
fn sections(text: &str) -> Vec<(String, Vec<String>)> {
    let mut sections: Vec<String> = vec![String::new()];
    let mut in_block = false;
    for line in text.lines() {
        if line.starts_with("```") {
            in_block = !in_block;
        } else if (line.starts_with("# ") || line.starts_with("## ")) && !in_block {
            sections.push(String::new());
        }
        if let Some(section) = sections.last_mut() {
            section.push_str(line);
            section.push('\n');
        }
    }
    let bases = |section: &str| {
        let mut bases = vec![String::new()];
        for rest in section.split("Paths are in ").skip(1) {
            // To the end of the sentence: the first full stop that is not inside backticks.
            for (at, part) in rest.split('`').enumerate() {
                if at % 2 == 1 {
                    bases.push(format!("{part}/"));
                } else if part.contains('.') {
                    break;
                }
            }
        }
        bases
    };
    sections.into_iter().map(|section| (section.clone(), bases(&section))).collect()
}

fn paths(tree: &Tree) -> Vec<String> {
    let mut complaints: Vec<String> =
        PAPERS.iter().filter(|p| !tree.files.contains_key(**p)).map(|p| format!("{p} is missing")).collect();
    let endings = [".rs", ".md", ".toml", ".wat", ".wit", ".json", ".html"];
    let roots = ["crates/", "docs/", "fuzz/", "guests/", "sdk/", "wit/", "xtask/", "bench-results/"];
    for (paper, text) in tree.papers() {
        for (section, bases) in sections(text) {
            for word in quoted(&section) {
                // `FILE.json#ID` is a row of a result file, `ID.json` any file of a kind.
                let word = word.split('#').next().unwrap_or(word);
                let is_placeholder = word.contains(['*', ' ', '<', '{', '$', ':', '…'])
                    || word
                        .split(['/', '.'])
                        .any(|part| !part.is_empty() && part.chars().all(|c| c.is_ascii_uppercase()));
                let is_path = endings.iter().any(|e| word.ends_with(e)) && !word.starts_with(['.', '/']);
                let is_folder =
                    roots.iter().any(|root| word.starts_with(root)) || word.ends_with('/') && word.len() > 1;
                let is_made = ["target/", "bench-cache/", "manifests/"].iter().any(|made| word.starts_with(made));
                let is_capitals = word.trim_end_matches(".md").chars().all(|c| c.is_ascii_uppercase());
                let means_one = !is_made && !word.starts_with('/') && (!is_placeholder || is_capitals);
                let is_there = || bases.iter().any(|base| tree.has(&format!("{base}{word}")));
                if (is_path || is_folder) && means_one && !is_there() {
                    complaints.push(format!(
                        "{paper} names {word}, which is no path from the root or from what its section says"
                    ));
                }
            }
        }
    }
    complaints
}

/// What is written `[text](target)` leads to a file, from the paper's own folder.
fn links(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (paper, text) in tree.papers() {
        let folder = paper.rsplit_once('/').map_or("", |(folder, _)| folder);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap_or(target);
            if file.is_empty() || target.contains("://") || target.contains(' ') {
                continue;
            }
            let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
            for part in file.split('/') {
                if part == ".." {
                    parts.pop();
                } else {
                    parts.push(part);
                }
            }
            if !tree.has(&parts.join("/")) {
                complaints.push(format!("{paper} links to {target}"));
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
        } else if let Some((suite, case)) = word.split_once("::").filter(|(s, _)| ["conformance", "actors"].contains(s))
        {
            let of = if suite == "actors" { "ring" } else { "gpu" };
            let suite = tree.files.get(&format!("crates/tensor-wasm-{of}/tests/conformance.rs"));
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
        } else if let Some(name) = word.strip_prefix("tensors::") {
            if !has_test(tree.files.get("crates/tensor-wasm-tensor/tests/api.rs"), name) {
                complaints.push(format!("no test {word}"));
            }
        } else if let Some((crate_name, rest)) = word
            .split_once("::")
            .filter(|(c, _)| ["exec", "api", "gpu", "jit", "launch", "ring", "tensor", "cli", "xtask"].contains(c))
        {
            let (path, name) = rest.rsplit_once("::").unwrap_or(("", rest));
            let folder =
                if crate_name == "xtask" { "xtask".to_owned() } else { format!("crates/tensor-wasm-{crate_name}") };
            let base = format!("{folder}/src/{}", path.replace("::", "/"));
            let file = tree.files.get(&format!("{base}.rs")).or_else(|| tree.files.get(&format!("{base}/mod.rs")));
            if !has_test(file, name) {
                complaints.push(format!("no test {word}"));
            }
        }
    }
    // A row of a table without anything that holds it is a promise nobody checks.
    for line in text.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| promise")) {
        if !line.contains("::") && !line.contains(".json#") {
            complaints.push(format!("nothing holds: {line}"));
        }
        complaints.extend(shortfalls(tree, line));
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

/// A promise whose measurement falls short of the goal says so, by the figure that `docs/PERFORMANCE.md` has, and says
/// it no longer than that is so.
fn shortfalls(tree: &Tree, line: &str) -> Vec<String> {
    let results = quoted(line).into_iter().filter_map(|word| word.split_once(".json#"));
    let measured = results.flat_map(|(file, id)| {
        let rows = rows(tree, &format!("{file}.json"));
        rows.into_iter().filter(move |row| row["id"] == id)
    });
    let short: Vec<_> = measured.filter(|row| row["holds"] == false).collect();
    let said = line.split_once("falls short:").map(|(_, rest)| rest.split('|').next().unwrap_or(rest));
    if short.is_empty() && said.is_some() {
        return vec![format!("nothing falls short any more: {line}")];
    }
    let mut complaints = Vec::new();
    for row in short {
        let figure = crate::results::number(if row["ratio"].is_null() { &row["ours"] } else { &row["ratio"] });
        let words = |said: &str| said.split(|c: char| !c.is_ascii_digit() && c != '.').any(|word| word == figure);
        if !said.is_some_and(words) {
            let text = |key: &str| row[key].as_str().unwrap_or("?").to_owned();
            complaints.push(format!(
                "{} does not hold, and its row lacks \"falls short: {figure} (goal {})\"",
                text("id"),
                text("goal")
            ));
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
    for file in METRICS {
        let Some(text) = tree.files.get(file) else {
            complaints.push(format!("{file} is missing"));
            continue;
        };
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
    let tests = [
        "TENSOR_WASM_BLESS",
        "TENSOR_WASM_TEST_EXE",
        "TENSOR_WASM_TEST_KILLS",
        "TENSOR_WASM_TEST_PROGRAMS",
        "TENSOR_WASM_TEST_SEED",
    ];
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
    let empty = tree.files.iter().filter(|(_, text)| text.is_empty());
    complaints.extend(empty.map(|(path, _)| format!("{path} is empty")));
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
