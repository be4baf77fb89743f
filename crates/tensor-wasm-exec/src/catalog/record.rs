//! What the catalog keeps of a function. Plain data with serde, because it is what lies on disk; the HTTP shapes are
//! `tensor-wasm-api`'s own.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::failure::Rejection;

/// Longest function or tenant name: fits a DNS label with room, a metric label and a file name.
pub const NAME_BYTES_MAX: usize = 128;

/// The BLAKE3 hash of a deployed module or component, in hexadecimal. Same bytes, same revision.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Revision(Box<str>);

impl std::hash::Hash for Revision {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        // Already a hash: 128 bits of it are as good as all, also against someone who searches for collisions.
        state.write(&self.0.as_bytes()[..32]);
    }
}

impl Revision {
    pub fn of(wasm: &[u8]) -> Revision {
        Revision(blake3::hash(wasm).to_hex().as_str().into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The first characters: enough for people and messages.
    pub fn short(&self) -> &str {
        &self.0[..12]
    }
}

impl TryFrom<String> for Revision {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match blake3::Hash::from_hex(&text) {
            // A record is untrusted as far as file names go: only a well-formed hash becomes a path.
            Ok(hash) => Ok(Revision(hash.to_hex().as_str().into())),
            Err(e) => Err(format!("{text:?} is not a revision: {e}")),
        }
    }
}

impl From<Revision> for String {
    fn from(revision: Revision) -> String {
        revision.0.into()
    }
}

/// How a function is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A core module whose exports are called with JSON arguments.
    CoreExports,
    /// A core module with `_start` (WASI preview 1).
    CoreCommand,
    /// A component whose exported functions are called with JSON arguments.
    ComponentExports,
    /// A component exporting `wasi:cli/run`.
    ComponentCommand,
    /// A component exporting a `wasi:http` handler.
    HttpHandler,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::CoreExports => "core_exports",
            Kind::CoreCommand => "core_command",
            Kind::ComponentExports => "component_exports",
            Kind::ComponentCommand => "component_command",
            Kind::HttpHandler => "http_handler",
        }
    }
}

/// Which of the two engines compiled it: components of WASI 0.3 need the one with concurrency support, everything else
/// runs on the one without, whose calls are cheaper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Flavor {
    Plain,
    Concurrent,
}

/// Where a function's linear memory comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// From the engine's pool, a copy-on-write image of the module's: quickest to start.
    #[default]
    Pooled,
    /// From memory that the device sees in place, so that kernels may be passed pointers into it.
    Pinned,
}

impl MemoryKind {
    fn is_pooled(&self) -> bool {
        *self == MemoryKind::Pooled
    }
}

/// What a function's author chooses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The author promises that a call leaves nothing behind that the next one may not see: instances are kept and
    /// called again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub reuse: bool,
    /// `/run/NAME` answers callers without a token.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub public: bool,
    /// A tighter deadline than the tenant's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// A tighter memory limit than the tenant's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// It may use the GPU.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub gpu: bool,
    /// Where its linear memory comes from.
    #[serde(skip_serializing_if = "MemoryKind::is_pooled")]
    pub memory: MemoryKind,
    /// Environment variables of the guest.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RevisionRecord {
    pub revision: Revision,
    pub kind: Kind,
    pub flavor: Flavor,
    pub bytes: u64,
    pub created_ms: u64,
    #[serde(default)]
    pub settings: Settings,
    /// Why it cannot be served, once found damaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantined: Option<String>,
}

/// A revision's part of a function's traffic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    pub revision: Revision,
    pub weight: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionRecord {
    pub id: String,
    pub tenant: String,
    pub name: String,
    pub created_ms: u64,
    /// Oldest first.
    pub revisions: Vec<RevisionRecord>,
    /// One or two shares, their weights adding up to more than zero.
    pub traffic: Vec<Share>,
}

impl FunctionRecord {
    pub fn revision(&self, revision: &Revision) -> Option<&RevisionRecord> {
        self.revisions.iter().find(|r| r.revision == *revision)
    }

    /// The revision that gets (most of) the traffic.
    pub fn current(&self) -> Option<&RevisionRecord> {
        let share = self.traffic.iter().max_by_key(|share| share.weight)?;
        self.revision(&share.revision)
    }

    /// Finds a revision by the beginning of its hash.
    pub fn find(&self, prefix: &str) -> Result<&RevisionRecord, Rejection> {
        let mut matching =
            self.revisions.iter().filter(|r| !prefix.is_empty() && r.revision.as_str().starts_with(prefix));
        match (matching.next(), matching.next()) {
            (Some(only), None) => Ok(only),
            (Some(_), Some(_)) => {
                Err(Rejection::Conflict { why: format!("revision {prefix:?} is ambiguous: give more of it") })
            }
            (None, _) => {
                Err(Rejection::NotFound { what: "revision", name: prefix.to_owned(), tenant: self.tenant.clone() })
            }
        }
    }

    pub fn key(&self) -> String {
        key(&self.tenant, &self.name)
    }
}

pub(crate) fn key(tenant: &str, name: &str) -> String {
    format!("{tenant}\0{name}")
}

/// Names are file-, URL- and log-safe: letters, digits, `-`, `_` and `.`, beginning with a letter or digit.
pub fn check_name(name: &str) -> Result<(), Rejection> {
    let invalid = |why: String| Err(Rejection::InvalidName { name: name.chars().take(64).collect(), why });
    if name.is_empty() {
        return invalid("it is empty".to_owned());
    }
    if name.len() > NAME_BYTES_MAX {
        return invalid(format!("it has {} bytes, more than {NAME_BYTES_MAX}", name.len()));
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if let Some(bad) = name.chars().find(|c| !allowed(*c)) {
        return invalid(format!("{bad:?} is not a letter, a digit, '-', '_' or '.'"));
    }
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return invalid("it must begin with a letter or a digit".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "hello-1", "a.b_c", &"x".repeat(NAME_BYTES_MAX)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", ".a", "a/b", "a b", "a\u{7}", "ü", "..", &"x".repeat(300)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_revision_is_a_hash_or_nothing() {
        let revision = Revision::of(b"x");
        assert_eq!(Revision::try_from(revision.as_str().to_owned()), Ok(revision));
        assert!(Revision::try_from("../../etc/passwd".to_owned()).is_err());
    }
}
