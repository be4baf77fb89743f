//! Checks of manifests: workspace lints, dependencies that nothing names, and those that cross a boundary.

use std::collections::BTreeSet;

use super::Tree;

fn manifests(tree: &Tree) -> impl Iterator<Item = (&str, toml::Table)> {
    let manifests = tree.files.iter().filter(|(path, _)| path.ends_with("Cargo.toml"));
    manifests.filter_map(|(path, text)| Some((path.as_str(), text.parse().ok()?)))
}

/// Crates of the workspace that have lints of their own, or none.
pub(super) fn lints(tree: &Tree) -> Vec<String> {
    let members = manifests(tree).filter(|(path, _)| path.starts_with("crates/") || path.starts_with("xtask/"));
    let takes = |manifest: &toml::Table| {
        let lints = manifest.get("lints").and_then(|lints| lints.get("workspace"));
        lints.and_then(toml::Value::as_bool) == Some(true)
    };
    let without = members.filter(|(_, manifest)| !takes(manifest));
    without.map(|(path, _)| format!("{path} lacks `[lints] workspace = true`")).collect()
}

/// Every dependency of a crate is named by one of its sources, and every dependency of a workspace by one of its
/// crates.
pub(super) fn dependencies(tree: &Tree) -> Vec<String> {
    let mut found = Vec::new();
    let mut complain = |path: &str, what: String| found.push(format!("{path}: {what}"));
    // What crates take from their workspace. Names are enough: the workspaces here do not share any that differ.
    let mut taken = BTreeSet::new();
    for (path, manifest) in manifests(tree).filter(|(_, manifest)| manifest.contains_key("package")) {
        let folder = path.trim_end_matches("Cargo.toml");
        let nested = |source: &str| {
            let mut folders = source.match_indices('/').map(|(at, _)| &source[..=at]);
            folders.any(|f| f.len() > folder.len() && tree.files.contains_key(&format!("{f}Cargo.toml")))
        };
        let own = tree
            .files
            .iter()
            .filter(|(source, _)| source.starts_with(folder) && source.ends_with(".rs") && !nested(source));
        let text: String = own.map(|(_, text)| text.as_str()).collect();
        let features = manifest.get("features").map(ToString::to_string).unwrap_or_default();
        let (normal, develop) = (names(&manifest, "dependencies"), names(&manifest, "dev-dependencies"));
        for name in normal.union(&develop) {
            let ident = name.replace('-', "_");
            let is_named = mentions(&text, &ident) || features.contains(&format!("\"{name}/"));
            if !is_named {
                complain(path, format!("{name} is named by no source of the crate"));
            }
        }
        normal.intersection(&develop).for_each(|name| complain(path, format!("{name} is a dependency twice")));
        taken.extend(normal.into_iter().chain(develop).chain(names(&manifest, "build-dependencies")));
    }
    for (path, manifest) in manifests(tree) {
        let offered = manifest.get("workspace").and_then(|workspace| workspace.get("dependencies"));
        let offered = offered.and_then(toml::Value::as_table).into_iter().flat_map(toml::Table::keys);
        let unused = offered.filter(|name| !taken.contains(*name));
        unused.for_each(|name| complain(path, format!("{name} is taken by no crate")));
    }
    found
}

/// What a crate must not depend on, as the table of crates in `ARCHITECTURE.md` has it. Tests and benchmarks may.
const FORBIDDEN: [(&str, &[&str]); 6] = [
    ("tensor-wasm-jit", &["tensor-wasm-", "wasmtime", "cudarc", "tokio", "rustix", "libc", "redb", "axum", "hyper"]),
    ("tensor-wasm-gpu", &["tensor-wasm-", "wasmtime", "wasmparser", "wasm-encoder", "redb", "axum", "hyper", "http"]),
    (
        "tensor-wasm-launch",
        &["tensor-wasm-exec", "tensor-wasm-api", "wasmtime", "cudarc", "redb", "axum", "hyper", "http", "clap"],
    ),
    (
        "tensor-wasm-tensor",
        &[
            "tensor-wasm-exec",
            "tensor-wasm-api",
            "wasmtime",
            "cudarc",
            "redb",
            "axum",
            "hyper",
            "http",
            "clap",
            "tokio",
        ],
    ),
    ("tensor-wasm-exec", &["tensor-wasm-api", "cudarc", "axum", "utoipa", "clap"]),
    ("tensor-wasm-api", &["wasmtime", "cudarc", "redb", "clap"]),
];

/// Crates depend along the line that `ARCHITECTURE.md` draws, and on nothing that another layer is there for.
pub(super) fn boundaries(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (name, forbidden) in FORBIDDEN {
        let path = format!("crates/{name}/Cargo.toml");
        let Some(manifest) = tree.files.get(&path).and_then(|text| text.parse().ok()) else {
            complaints.push(format!("{path} is missing"));
            continue;
        };
        let over = |dependency: &String| forbidden.iter().any(|prefix| dependency.starts_with(prefix));
        for dependency in names(&manifest, "dependencies").into_iter().filter(over) {
            complaints.push(format!("{path}: {dependency} is not for this crate, see ARCHITECTURE.md"));
        }
    }
    complaints
}

/// The dependencies of one kind, of every platform.
fn names(manifest: &toml::Table, kind: &str) -> BTreeSet<String> {
    let platforms = manifest.get("target").and_then(toml::Value::as_table);
    let of_platforms = platforms.into_iter().flat_map(toml::Table::values).filter_map(|platform| platform.get(kind));
    let tables = manifest.get(kind).into_iter().chain(of_platforms).filter_map(toml::Value::as_table);
    tables.flat_map(toml::Table::keys).cloned().collect()
}

/// Whether a name is used as a path or a macro's: followed by `::`, or by itself in a `use`.
fn mentions(text: &str, ident: &str) -> bool {
    text.match_indices(ident).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = &text[at + ident.len()..];
        let begins = !before.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let in_use = || text[..at].ends_with("use ") && after.starts_with([';', ' ']);
        begins && (after.starts_with("::") || in_use())
    })
}
