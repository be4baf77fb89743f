//! `cargo xtask deny`: what may be linked into this, by `deny.toml`. Licences, bans and sources of every package of
//! every workspace are checked here, from `cargo metadata`, so that nothing has to be installed. Where `cargo-deny` is,
//! it is run as well: it reads licence texts, and it knows advisories where it has their database.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::root;

/// Each has a lockfile of its own. Guests are for wasm32, where fewer packages are needed: the host's are a superset.
/// Programs that we are compared with, below `crates/tensor-wasm-bench/peers`, are linked into nothing that ships, and
/// some of what they need is under licences that are not allowed here.
const WORKSPACES: [&str; 3] = ["", "guests", "fuzz"];

pub(crate) fn check() -> anyhow::Result<()> {
    let text = std::fs::read_to_string(root().join("deny.toml")).context("deny.toml")?;
    let rules = Rules::read(&text)?;
    let (mut complaints, mut packages) = (BTreeSet::new(), 0);
    for workspace in WORKSPACES {
        let metadata = metadata(workspace)?;
        for package in linked(&metadata) {
            packages += 1;
            complaints.extend(rules.complaints(package));
        }
    }
    for complaint in &complaints {
        println!("{complaint}");
    }
    ensure!(complaints.is_empty(), "{} complaint(s) about {packages} packages", complaints.len());
    println!("{packages} packages: licences, bans and sources are as deny.toml has them");
    let version = Command::new("cargo").args(["deny", "--version"]).output();
    if !version.is_ok_and(|output| output.status.success()) {
        println!("advisories were not looked at: cargo-deny is not installed");
        return Ok(());
    }
    for workspace in WORKSPACES {
        let status = Command::new("cargo")
            .args(["deny", "--manifest-path"])
            .arg(root().join(workspace).join("Cargo.toml"))
            .args(["check", "--config"])
            .arg(root().join("deny.toml"))
            .status()
            .context("cargo deny")?;
        ensure!(status.success(), "cargo deny check failed in ./{workspace}");
    }
    Ok(())
}

fn metadata(workspace: &str) -> anyhow::Result<Value> {
    let output = Command::new("cargo")
        .args(["metadata", "--locked", "--format-version", "1", "--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root().join(workspace))
        .output()
        .context("cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata in ./{workspace}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Packages that are part of something; the rest is for other platforms.
fn linked(metadata: &Value) -> Vec<&Value> {
    let nodes = metadata["resolve"]["nodes"].as_array().into_iter().flatten();
    let ids: BTreeSet<&str> = nodes.filter_map(|node| node["id"].as_str()).collect();
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages.filter(|package| package["id"].as_str().is_some_and(|id| ids.contains(id))).collect()
}

struct Rules {
    licences: BTreeSet<String>,
    banned: Vec<(String, String)>,
}

impl Rules {
    fn read(text: &str) -> anyhow::Result<Rules> {
        let table: toml::Table = text.parse().context("deny.toml")?;
        let list = |part: &str, key: &str| table.get(part)?.get(key)?.as_array().cloned();
        let licences = list("licenses", "allow").context("deny.toml allows no licences")?;
        let licences = licences.iter().filter_map(|licence| licence.as_str().map(str::to_owned)).collect();
        let ban = |entry: &toml::Value| {
            let text = |key: &str| entry.get(key).and_then(toml::Value::as_str).map(str::to_owned);
            Some((text("crate")?, text("reason").unwrap_or_default()))
        };
        let banned = list("bans", "deny").unwrap_or_default().iter().filter_map(ban).collect();
        Ok(Rules { licences, banned })
    }

    fn complaints(&self, package: &Value) -> Vec<String> {
        let text = |key: &str| package[key].as_str();
        let name = format!("{} {}", text("name").unwrap_or("?"), text("version").unwrap_or("?"));
        let mut complaints = Vec::new();
        match text("license") {
            None => complaints.push(format!("{name} names no licence")),
            Some(licence) if !allows(licence, &self.licences) => {
                complaints.push(format!("{name} is under {licence}, which deny.toml does not allow"));
            }
            Some(_) => {}
        }
        let ban = self.banned.iter().find(|(banned, _)| text("name") == Some(banned));
        complaints.extend(ban.map(|(_, reason)| format!("{name} is banned: {reason}")));
        // Without a source it is a folder of this repository.
        if let Some(source) = text("source").filter(|source| !source.starts_with("registry+")) {
            complaints.push(format!("{name} comes from {source}, which is no registry"));
        }
        complaints
    }
}

/// Whether a licence expression can be met with the licences that are allowed. `/` is how older manifests write `OR`.
/// One that cannot be read is not met.
fn allows(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut words = words.as_slice();
    any(&mut words, allowed) == Some(true) && words.is_empty()
}

fn any(words: &mut &[&str], allowed: &BTreeSet<String>) -> Option<bool> {
    let mut is_met = all(words, allowed)?;
    while let ["OR", rest @ ..] = *words {
        *words = rest;
        is_met |= all(words, allowed)?;
    }
    Some(is_met)
}

fn all(words: &mut &[&str], allowed: &BTreeSet<String>) -> Option<bool> {
    let mut is_met = one(words, allowed)?;
    while let ["AND", rest @ ..] = *words {
        *words = rest;
        is_met &= one(words, allowed)?;
    }
    Some(is_met)
}

fn one(words: &mut &[&str], allowed: &BTreeSet<String>) -> Option<bool> {
    let (is_met, rest) = match *words {
        ["(", rest @ ..] => {
            *words = rest;
            let is_met = any(words, allowed)?;
            let [")", rest @ ..] = *words else { return None };
            (is_met, rest)
        }
        [licence, "WITH", exception, rest @ ..] => (allowed.contains(&format!("{licence} WITH {exception}")), rest),
        [licence, rest @ ..] => (allowed.contains(*licence), rest),
        [] => return None,
    };
    *words = rest;
    Some(is_met)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rules() -> Rules {
        let text = r#"
            licenses.allow = ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"]
            bans.deny = [{ crate = "bad", reason = "use good" }]
        "#;
        Rules::read(text).unwrap()
    }

    #[test]
    fn licence_expressions() {
        let allowed = rules().licences;
        let met = ["MIT", "X OR MIT", "X/MIT", "MIT AND ISC", "(X OR MIT) AND ISC", "Apache-2.0 WITH LLVM-exception"];
        for expression in met {
            assert!(allows(expression, &allowed), "{expression}");
        }
        let unmet =
            ["", "X", "MIT AND X", "X OR MIT AND Y", "Apache-2.0", "(MIT", "MIT)", "MIT ISC", "MIT OR", "OR MIT"];
        for expression in unmet {
            assert!(!allows(expression, &allowed), "{expression}");
        }
    }

    #[test]
    fn packages_are_complained_about() {
        let package = |name: &str, licence: Value, source: Value| {
            rules().complaints(&json!({"name": name, "version": "1.0.0", "license": licence, "source": source}))
        };
        let registry = json!("registry+index");
        assert_eq!(package("fine", json!("MIT"), registry.clone()), Vec::<String>::new());
        assert_eq!(package("fine", json!("MIT"), Value::Null), Vec::<String>::new());
        assert_eq!(package("a", json!("GPL-3.0"), registry.clone()).len(), 1);
        assert_eq!(package("a", Value::Null, registry.clone()), ["a 1.0.0 names no licence"]);
        assert_eq!(package("bad", json!("MIT"), registry), ["bad 1.0.0 is banned: use good"]);
        assert_eq!(package("a", json!("MIT"), json!("git+https://example.org/a")).len(), 1);
    }

    #[test]
    fn only_linked_packages_count() {
        let metadata = json!({"packages": [{"id": "a"}, {"id": "b"}], "resolve": {"nodes": [{"id": "b"}]}});
        assert_eq!(linked(&metadata), [&json!({"id": "b"})]);
    }
}
