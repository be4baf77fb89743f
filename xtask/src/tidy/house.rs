//! What the house stands on: files that people and tools look for by their names, and the steps of `.ci/run`, none of
//! which may go missing without somebody noticing.

use super::Tree;

/// What is looked for by rustup, editors, contributors, whoever found a hole, `cargo xtask deny`, and the forge.
pub(super) const FILES: [&str; 6] =
    ["rust-toolchain.toml", ".editorconfig", "CONTRIBUTING.md", "SECURITY.md", "deny.toml", WORKFLOW];

pub(super) const WORKFLOW: &str = ".github/workflows/ci.yml";

pub(super) const CI: &str = ".ci/run";

/// The commands of steps that may be added to, and not taken away.
pub(super) const COMMANDS: [&str; 11] = [
    "make fmt-check",
    "make tidy",
    "make deny",
    "make lint",
    "make doc",
    "make lint-guests",
    "make doc-sdk",
    "make model",
    "make test",
    "make fuzz-seeds",
    "env CI=true make run",
];

/// The files are there, the forge runs `.ci/run`, and that runs everything. Lines that are commented out do not count.
pub(super) fn house(tree: &Tree) -> Vec<String> {
    let gone = FILES.iter().filter(|file| !tree.has(file)).map(|file| format!("there is no {file}"));
    let mut complaints: Vec<String> = gone.collect();
    let lines = |file: &str| tree.files.get(file).map(String::as_str).unwrap_or_default().lines().map(str::trim);
    let run = format!("run: {CI}");
    if tree.has(WORKFLOW) && !lines(WORKFLOW).any(|line| line.trim_start_matches("- ") == run) {
        complaints.push(format!("{WORKFLOW} does not run {CI}"));
    }
    // `step 'what it is' command`
    let steps: Vec<&str> =
        lines(CI).filter_map(|line| Some(line.strip_prefix("step '")?.split_once("' ")?.1)).collect();
    let missing = COMMANDS.iter().filter(|command| !steps.contains(command));
    complaints.extend(missing.map(|command| format!("{CI} has no step `{command}`")));
    complaints
}
