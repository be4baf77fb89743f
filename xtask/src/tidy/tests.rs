//! Each check can fail: a tree of a few lines that it must complain about, and one that it must not.

use super::*;

fn tree(files: &[(&str, &str)]) -> Tree {
    let files = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
    Tree { files, binaries: BTreeSet::new() }
}

/// What a check says about a tree, without what it says about papers that a small tree lacks.
fn complaints(check: Check, files: &[(&str, &str)]) -> Vec<String> {
    check(&tree(files)).into_iter().filter(|complaint| !complaint.ends_with(" is missing")).collect()
}

fn assert_one(check: Check, files: &[(&str, &str)], part: &str) {
    let complaints = complaints(check, files);
    assert_eq!(complaints.len(), 1, "{complaints:?}");
    assert!(complaints[0].contains(part), "{complaints:?}");
}

fn assert_none(check: Check, files: &[(&str, &str)]) {
    assert_eq!(complaints(check, files), Vec::<String>::new());
}

#[test]
fn paths_of_papers_match_whole() {
    let file = ("crates/a/src/deep/b.rs", "//! b\n");
    assert_one(paths, &[file, ("README.md", "see `b.rs`")], "b.rs");
    assert_one(paths, &[file, ("README.md", "see `deep/b.rs`")], "deep/b.rs");
    assert_one(paths, &[file, ("README.md", "see `crates/c`")], "crates/c");
    assert_none(paths, &[file, ("README.md", "see `crates/a/src/deep/b.rs` and `crates/a`, `ID.json`, `x.rs y`")]);
}

#[test]
fn a_section_declares_where_its_paths_start() {
    let file = ("crates/a/src/b.rs", "//! b\n");
    let declared = "# One\nPaths are in `docs` and `crates/a/src`. See `b.rs`.\n";
    let docs = ("docs/DESIGN.md", "# Design\n");
    assert_none(paths, &[file, docs, ("README.md", declared)]);
    // It holds below smaller headings, and not beyond the section.
    assert_none(paths, &[file, docs, ("README.md", &format!("{declared}### Part\nSee `b.rs`.\n"))]);
    let next = format!("{declared}## Two\nSee `b.rs`.\n");
    assert_one(paths, &[file, docs, ("README.md", &next)], "b.rs");
    // A base that is not there, and a path outside the sentence that declares.
    assert_one(paths, &[file, ("README.md", "Paths are in `crates/z`. Nothing more.")], "crates/z");
    assert_one(paths, &[file, ("README.md", "Paths are in the sky. `crates/a/src` has `b.rs`.")], "b.rs");
}

#[test]
fn the_guide_to_kernels_and_the_sdk_are_read() {
    assert_one(paths, &[("docs/KERNELS.md", "`gone.rs`")], "docs/KERNELS.md");
    assert_one(paths, &[("sdk/README.md", "`gone.rs`")], "sdk/README.md");
}

#[test]
fn links_are_followed_from_the_papers_folder() {
    let docs = ("docs/KERNELS.md", "[sdk](../sdk/README.md), [web](https://example.org), [here](#part)");
    assert_one(links, &[docs], "../sdk/README.md");
    assert_none(links, &[docs, ("sdk/README.md", "# SDK\n")]);
}

#[test]
fn files_in_comments_exist() {
    let manifest = ("crates/a/Cargo.toml", "");
    let file = ("crates/a/src/deep/b.rs", "//! `c.rs`, `deep/c.rs`, `crates/a/src/deep/c.rs`, `a/src/deep/c.rs`\n");
    assert_none(sources::comments, &[manifest, file, ("crates/a/src/deep/c.rs", "//! c\n")]);
    assert_eq!(complaints(sources::comments, &[manifest, file]).len(), 4);
    // Not by the end of its path, and behind code as well.
    let other = ("crates/a/src/d.rs", concat!("fn f() {} /", "/ see `c.rs`\n"));
    assert_one(sources::comments, &[manifest, other, ("crates/a/src/deep/c.rs", "//! c\n")], "d.rs:1: names c.rs");
    assert_none(sources::comments, &[manifest, ("crates/a/src/d.rs", "let s = \"`c.rs`\";\n/// `{n}.rs` and `.rs`\n")]);
    // Of a diagram, the sources it names.
    let drawn = ("crates/a/src/d.rs", "//! ```text\n//! a ─ deep/c.rs → b (deep/c.rs.)\n//! ```\n");
    assert_eq!(complaints(sources::comments, &[manifest, drawn]).len(), 2);
    assert_none(sources::comments, &[manifest, drawn, ("crates/a/src/deep/c.rs", "//! c\n")]);
}

#[test]
fn metrics_of_every_crate_are_written() {
    let registered = "pub(crate) struct Metrics {\n    pub jobs: Counter,\n}\n";
    for file in METRICS {
        assert_one(metrics, &[(file, registered)], "jobs is registered and never written");
        assert_none(metrics, &[(file, registered), ("crates/a/src/b.rs", "m.jobs.inc();")]);
    }
    assert_eq!(metrics(&tree(&[])).len(), METRICS.len());
}

#[test]
fn lines_fit() {
    let check: Check = sources::columns;
    let (fits, long) = (format!("// {}\n", "é".repeat(117)), format!("// {}\n", "é".repeat(118)));
    assert_none(check, &[("crates/a/src/b.rs", &fits)]);
    assert_one(check, &[("crates/a/src/b.rs", &long)], "b.rs:1: 121 columns");
    let string = format!("    r#\"{}\"#\n", "x".repeat(200));
    assert_none(check, &[("crates/a/src/b.rs", &string)]);
    // Comments of other files, and nothing else of those.
    let long = |mark: &str| format!("  {mark} {}\n", "x".repeat(120));
    for (path, mark) in [("wit/a.wit", "///"), ("b.wat", ";;"), ("Cargo.toml", "#"), (".ci/run", "#")] {
        assert_one(check, &[(path, &long(mark))], ":1: 12");
        assert_none(check, &[(path, &long("x ="))]);
    }
    assert_none(check, &[("README.md", &long("#"))]);
    assert_none(check, &[("b.wat", &long(";;     "))]);
}

#[test]
fn a_choice_between_truths_is_an_if() {
    let check: Check = sources::bool_matches;
    let several = format!("match a {{\n    {} 1,\n    (true, _) => 2,\n}}\n", "true =>");
    assert_one(check, &[("crates/a/src/b.rs", &several)], "b.rs:2");
    assert_one(check, &[("crates/a/src/b.rs", &format!("match a {{ {} 1 }}\n", "false =>"))], "b.rs:1");
    assert_none(check, &[("crates/a/src/b.rs", "match a {\n    Some(true) => 1,\n    (_, false) => 2,\n}\n")]);
}

#[test]
fn generic_names_are_used_once_in_a_crate() {
    let check: Check = sources::names;
    let (a, b) = (("crates/a/Cargo.toml", ""), ("crates/b/Cargo.toml", ""));
    let (first, second) = (("crates/a/src/x.rs", "struct State {}\n"), ("crates/a/src/y.rs", "pub enum State {}\n"));
    assert_one(check, &[a, first, second], "State is crates/a/src/x.rs:1 and crates/a/src/y.rs:1");
    // Another crate, an associated type, a longer name.
    assert_none(check, &[a, b, first, ("crates/b/src/y.rs", "struct State;\n")]);
    assert_none(check, &[a, first, ("crates/a/src/y.rs", "    type State = ();\nstruct StateOfThings;\n")]);
}

#[test]
fn crates_take_the_workspaces_lints() {
    let check: Check = manifests::lints;
    assert_one(check, &[("crates/a/Cargo.toml", "[lints.rust]\nunsafe_code = \"allow\"\n")], "crates/a/Cargo.toml");
    assert_none(check, &[("crates/a/Cargo.toml", "[lints]\nworkspace = true\n"), ("guests/a/Cargo.toml", "")]);
}

#[test]
fn dependencies_are_named() {
    let check: Check = manifests::dependencies;
    let manifest = ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n[dependencies]\nb-c.workspace = true\n");
    assert_one(check, &[manifest, ("crates/a/src/lib.rs", "//! Not my_b_c::x.\n")], "b-c is named by no source");
    assert_none(check, &[manifest, ("crates/a/tests/t.rs", "use b_c::x;\n")]);
    assert_none(check, &[manifest, ("crates/a/src/lib.rs", "#[b_c::test]\nfn f() {}\n")]);
    // A source of a crate inside the folder is not the crate's.
    let inner = ("crates/a/inner/Cargo.toml", "[package]\nname = \"inner\"\n");
    assert_one(check, &[manifest, inner, ("crates/a/inner/src/lib.rs", "use b_c::x;\n")], "b-c is named by no source");
    let twice =
        ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n[dependencies]\nb = \"1\"\n[dev-dependencies]\nb = \"1\"\n");
    assert_one(check, &[twice, ("crates/a/src/lib.rs", "b::x();\n")], "b is a dependency twice");
    let platform =
        ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n[target.'cfg(loom)'.dependencies]\nloom = \"1\"\n");
    assert_one(check, &[platform], "loom is named by no source");
    assert_one(check, &[("Cargo.toml", "[workspace.dependencies]\nb = \"1\"\n")], "b is taken by no crate");
}

#[test]
fn crates_keep_their_boundaries() {
    let launch = "crates/tensor-wasm-launch/Cargo.toml";
    let check: Check = manifests::boundaries;
    assert_one(check, &[(launch, "[dependencies]\nwasmtime-wasi.workspace = true\n")], "wasmtime-wasi is not for this");
    assert_none(check, &[(launch, "[dependencies]\nblake3 = \"1\"\n[dev-dependencies]\nwasmtime = \"1\"\n")]);
    assert_eq!(manifests::boundaries(&tree(&[])).len(), 6, "manifests that are not there");
}

#[test]
fn promises_are_held_by_tests_that_exist() {
    let suite = ("crates/tensor-wasm-cli/tests/it/run.rs", "#[test]\nfn works() {}\n");
    let row = |held: &str| format!("| promise | held by |\n|---|---|\n| it runs | {held} |\n");
    assert_none(specification, &[suite, ("SPECIFICATION.md", &row("`it::run::works`"))]);
    let two = [suite, ("SPECIFICATION.md", &row("`it::run::gone`"))];
    assert_eq!(complaints(specification, &two).len(), 2, "one missing, one that holds no promise");
    assert_one(specification, &[("SPECIFICATION.md", &row("hope"))], "nothing holds");
    assert_one(specification, &[("SPECIFICATION.md", &row("`launch::cache::kept`"))], "no test launch::cache::kept");
    assert_one(specification, &[("SPECIFICATION.md", &row("`bench-results/a.json#x`"))], "no result");
    assert_one(specification, &[("SPECIFICATION.md", &row("`conformance::x`"))], "no case");
    assert_one(specification, &[("SPECIFICATION.md", &row("`kernels::x`"))], "no test kernels::x");
    assert_one(specification, &[("SPECIFICATION.md", &row("`tensors::x`"))], "no test tensors::x");
}

#[test]
fn what_falls_short_says_so() {
    let result = |holds: bool| format!(r#"{{"rows":[{{"id":"a/b","ratio":1.253,"goal":"<= 1.2","holds":{holds}}}]}}"#);
    let row = |said: &str| format!("| promise | held by |\n|---|---|\n| quick{said} | `bench-results/a.json#a/b` |\n");
    let check = |holds, said| {
        let (result, row) = (result(holds), row(said));
        complaints(specification, &[("bench-results/a.json", &result), ("SPECIFICATION.md", &row)])
    };
    assert_eq!(check(true, ""), Vec::<String>::new());
    assert_eq!(check(false, "; falls short: 1.25 (goal 1.2)"), Vec::<String>::new());
    assert_eq!(check(false, ""), [r#"a/b does not hold, and its row lacks "falls short: 1.25 (goal <= 1.2)""#]);
    assert_eq!(check(false, ", 1.25; falls short: 1.31 (goal 1.2)").len(), 1, "another figure");
    assert_eq!(check(true, "; falls short: 1.25 (goal 1.2)").len(), 1, "not any more");
    assert_one(specification, &[("SPECIFICATION.md", "| promise | held by |\n| quick | pending |\n")], "nothing holds");
}

#[test]
fn the_house_stands() {
    let step = |command: &str| format!("step 'what it is' {command}\n");
    let workflow = "    steps:\n      - run: .ci/run\n";
    let house_of = |without: &str, workflow: &str, script: &str| {
        let files = house::FILES.iter().filter(|file| **file != without).map(|file| (*file, "x\n"));
        let mut files: BTreeMap<&str, &str> = files.collect();
        files.entry(house::WORKFLOW).and_modify(|text| *text = workflow);
        files.insert(house::CI, script);
        house::house(&tree(&files.into_iter().collect::<Vec<_>>()))
    };
    let script: String = house::COMMANDS.map(step).concat();
    assert_eq!(house_of("", workflow, &script), Vec::<String>::new());
    for file in house::FILES {
        assert_eq!(house_of(file, workflow, &script), [format!("there is no {file}")]);
    }
    for command in house::COMMANDS {
        let without = script.replace(&step(command), &format!("# {}", step(command)));
        assert_eq!(house_of("", workflow, &without), [format!(".ci/run has no step `{command}`")]);
    }
    // A comment that speaks of it does not run it.
    let spoken_of = house_of("", "# It is all in .ci/run\n", &script);
    assert_eq!(spoken_of, [".github/workflows/ci.yml does not run .ci/run"]);
}

#[test]
fn results_are_quoted() {
    let result = ("bench-results/a.json", r#"{"rows":[{"id":"a/b","ours":1.0}]}"#);
    assert_one(performance, &[result, ("docs/PERFORMANCE.md", "# Performance\n")], "lacks the line");
    assert_one(performance, &[("bench-results/a.json", "{}"), ("docs/PERFORMANCE.md", "# P\n")], "has no rows");
}

#[test]
fn variables_are_read_and_documented() {
    let (read, documented) = (("crates/a/src/b.rs", "TENSOR_WASM_X_Y"), ("README.md", "`TENSOR_WASM_X_Y`"));
    assert_one(variables, &[read], "is read and not documented");
    assert_one(variables, &[documented], "is documented and not read");
    assert_none(variables, &[read, documented]);
}

#[test]
fn configuration_keys_are_used() {
    let config = ("crates/tensor-wasm-exec/src/config.rs", "pub struct Limits {\n    pub depth_max: usize,\n}\n");
    assert_one(configuration, &[config], "depth_max");
    assert_none(configuration, &[config, ("crates/a/src/b.rs", "limits.depth_max")]);
}

#[test]
fn documented_flags_exist() {
    let paper = ("README.md", "tensor-wasm run --quick-start x");
    assert_one(flags, &[paper], "--quick-start");
    assert_none(flags, &[paper, ("crates/tensor-wasm-cli/src/commands/run.rs", "    quick_start: bool,\n")]);
}

#[test]
fn files_have_a_shape() {
    assert_one(shape, &[("crates/a/src/b.rs", "fn f() {}\n")], "does not say in its first line");
    assert_one(shape, &[("crates/a/src/b.rs", &"//! b\n".repeat(LINES_MAX + 1))], "more than");
    assert_one(shape, &[("docs/x.md", "")], "is empty");
}

#[test]
fn nothing_is_left_to_be_done() {
    let word = ["FIX", "ME"].concat();
    assert_one(leftovers, &[("crates/a/src/b.rs", &format!("// {word}: later\n"))], "b.rs:1");
    assert_none(leftovers, &[("crates/a/src/b.rs", "// done\n")]);
}
