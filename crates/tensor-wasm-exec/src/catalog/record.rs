//! What the catalog keeps of a function. Plain data with serde, because it is what lies on disk; the HTTP shapes are
//! `tensor-wasm-api`'s own.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use super::secrets::OpenSecrets;
use super::settings::Settings;
use crate::failure::Rejection;

/// Longest function or tenant name: fits a DNS label with room, a metric label and a file name.
pub const NAME_BYTES_MAX: usize = 128;

/// A BLAKE3 hash in hexadecimal, as a type of its own.
macro_rules! hash_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Box<str>);

        impl std::hash::Hash for $name {
            fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
                // Already a hash: 128 bits of it are as good as all, also against someone who searches for collisions.
                state.write(&self.0.as_bytes()[..32]);
            }
        }

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// The first characters: enough for people and messages.
            pub fn short(&self) -> &str {
                &self.0[..12]
            }
        }

        impl From<blake3::Hash> for $name {
            fn from(hash: blake3::Hash) -> $name {
                $name(hash.to_hex().as_str().into())
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                // A record is untrusted as far as file names go: only a well-formed hash becomes a path.
                let hash = blake3::Hash::from_hex(&text).map_err(|e| format!("{text:?} is not a hash: {e}"))?;
                Ok(hash.into())
            }
        }

        impl From<$name> for String {
            fn from(hash: $name) -> String {
                hash.0.into()
            }
        }
    };
}

hash_type! {
    /// What was deployed: the hash of a module's or component's bytes. Names its files; two revisions may share them.
    SourceHash
}

hash_type! {
    /// A model: the hash of its file's bytes, which names it. Two models, of two tenants too, may share the file.
    ModelHash
}

hash_type! {
    /// A revision's id: the hash over its bytes' hash and its settings. Same bytes and settings, same revision.
    Revision
}

impl SourceHash {
    pub fn of(wasm: &[u8]) -> SourceHash {
        blake3::hash(wasm).into()
    }
}

impl Revision {
    pub fn of(source: &SourceHash, settings: &Settings) -> Revision {
        let mut hasher = blake3::Hasher::new_derive_key("tensor-wasm 2026 revision: source and settings");
        hasher.update(source.as_str().as_bytes());
        // Keys in the order of the struct and, in `env`, sorted: the same settings are the same text.
        hasher.update(&serde_json::to_vec(settings).unwrap_or_default());
        hasher.finalize().into()
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

/// Whether its code needs concurrency support: components of WASI 0.3 do, and everything else is plain, because calls
/// without it are cheaper. With the memory that its settings ask for it says which of the three engines it is for
/// (`EngineKind::of`): a core module with pinned memory is plain too, and runs on the third.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Flavor {
    Plain,
    Concurrent,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RevisionRecord {
    pub revision: Revision,
    pub source: SourceHash,
    pub kind: Kind,
    pub flavor: Flavor,
    pub bytes: u64,
    /// When it was last deployed.
    pub created_ms: u64,
    pub settings: Settings,
    /// Why it cannot be served, once found damaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quarantined: Option<String>,
}

/// A revision's part of a function's traffic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    pub revision: Revision,
    pub weight: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(from = "StoredFunction")]
pub struct FunctionRecord {
    pub id: String,
    pub tenant: String,
    pub name: String,
    pub created_ms: u64,
    /// In the order they were deployed, the newest last.
    pub revisions: Vec<RevisionRecord>,
    /// One or two shares, their weights adding up to more than zero.
    pub traffic: Vec<Share>,
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub secret_names: BTreeSet<String>,
    /// The values of those names that could be opened. In memory only.
    #[serde(skip)]
    pub(crate) secrets: OpenSecrets,
    #[serde(skip)]
    pub(crate) superseded: Superseded,
}

/// Whether a function has changed, or is gone, since this record of it was made: an instance with the settings and
/// secrets of then serves no later call. A clone is a record of its own, which nothing has superseded yet.
#[derive(Debug, Default)]
pub(crate) struct Superseded(AtomicBool);

impl Clone for Superseded {
    fn clone(&self) -> Superseded {
        Superseded::default()
    }
}

impl Superseded {
    // Relaxed: who keeps instances and who forgets them take the same lock, the forgetting one after it has set this.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A function as it lies on disk, in this form or an earlier one.
#[derive(Deserialize)]
struct StoredFunction {
    id: String,
    tenant: String,
    name: String,
    created_ms: u64,
    revisions: Vec<StoredRevision>,
    traffic: Vec<Share>,
    #[serde(default)]
    secret_names: BTreeSet<String>,
}

#[derive(Deserialize)]
struct StoredRevision {
    revision: Revision,
    /// Absent in records from before settings were part of the id, when a revision was the hash of its bytes.
    source: Option<SourceHash>,
    kind: Kind,
    flavor: Flavor,
    bytes: u64,
    created_ms: u64,
    #[serde(default)]
    settings: Settings,
    #[serde(default)]
    quarantined: Option<String>,
}

impl From<StoredFunction> for FunctionRecord {
    fn from(stored: StoredFunction) -> FunctionRecord {
        let StoredFunction { id, tenant, name, created_ms, revisions, mut traffic, secret_names } = stored;
        let migrate = |stored: StoredRevision| {
            let StoredRevision { revision, source, kind, flavor, bytes, created_ms, settings, quarantined } = stored;
            let (revision, source) = match source {
                Some(source) => (revision, source),
                None => {
                    let source = SourceHash(revision.0.clone());
                    let migrated = Revision::of(&source, &settings);
                    for share in traffic.iter_mut().filter(|share| share.revision == revision) {
                        share.revision = migrated.clone();
                    }
                    (migrated, source)
                }
            };
            RevisionRecord { revision, source, kind, flavor, bytes, created_ms, settings, quarantined }
        };
        let revisions = revisions.into_iter().map(migrate).collect();
        FunctionRecord {
            id,
            tenant,
            name,
            created_ms,
            revisions,
            traffic,
            secret_names,
            secrets: OpenSecrets::default(),
            superseded: Superseded::default(),
        }
    }
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

    /// The settings that a deploy's changes are made to: those of the revision with (most of) the traffic.
    pub fn serving_settings(&self) -> Settings {
        self.current().map(|r| r.settings.clone()).unwrap_or_default()
    }

    /// Finds a revision by the beginning of its id, or else by that of its bytes' hash.
    pub fn find(&self, prefix: &str) -> Result<&RevisionRecord, Rejection> {
        let only = |text: fn(&RevisionRecord) -> &str| {
            let mut matching = self.revisions.iter().filter(|r| !prefix.is_empty() && text(r).starts_with(prefix));
            (matching.next(), matching.next())
        };
        match only(|r| r.revision.as_str()) {
            (Some(only), None) => return Ok(only),
            (Some(_), Some(_)) => {
                let why = format!("revision {prefix:?} is ambiguous: give more of it");
                return Err(Rejection::Conflict { why });
            }
            (None, _) => {}
        }
        match only(|r| r.source.as_str()) {
            (Some(only), None) => Ok(only),
            (Some(_), Some(_)) => {
                let why = format!("{prefix:?} names the bytes of several revisions: give a revision's id");
                Err(Rejection::Conflict { why })
            }
            (None, _) => {
                Err(Rejection::NotFound { what: "revision", name: prefix.to_owned(), tenant: self.tenant.clone() })
            }
        }
    }

    /// Why a revision of it cannot run, if it cannot: for its owner.
    pub(crate) fn cannot_run(&self, revision: &RevisionRecord) -> Option<Rejection> {
        let name = self.name.clone();
        if let Some(secret) = self.lost_secret() {
            // It would run with half of what it needs to know.
            let why = format!(
                "{name:?} has lost its secret {secret:?}; set it again: tensor-wasm secret set {name} {secret}"
            );
            return Some(Rejection::Conflict { why });
        }
        let why = revision.quarantined.clone()?;
        Some(Rejection::Quarantined { name, revision: revision.revision.short().to_owned(), why })
    }

    /// The first of its secrets that has no value any more.
    fn lost_secret(&self) -> Option<&str> {
        if self.secret_names.len() == self.secrets.len() {
            return None;
        }
        self.secret_names.iter().map(String::as_str).find(|name| !self.secrets.contains_key(*name))
    }

    /// The revision deployed before the current one.
    pub(crate) fn previous(&self) -> Result<&RevisionRecord, Rejection> {
        let current = self.current().map(|r| &r.revision);
        let at = self.revisions.iter().position(|r| Some(&r.revision) == current).unwrap_or(0);
        at.checked_sub(1).map(|before| &self.revisions[before]).ok_or_else(|| {
            let why = format!("function {:?} has no revision deployed before the current one", self.name);
            Rejection::Conflict { why }
        })
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
        let source = SourceHash::of(b"x");
        let revision = Revision::of(&source, &Settings::default());
        assert_eq!(Revision::try_from(revision.as_str().to_owned()), Ok(revision.clone()));
        assert_eq!(SourceHash::try_from(source.as_str().to_owned()), Ok(source.clone()));
        assert!(SourceHash::try_from("../../etc/passwd".to_owned()).is_err());
        let public = Settings { public: true, ..Settings::default() };
        assert_ne!(Revision::of(&source, &public), revision, "settings are part of it");
        assert_ne!(Revision::of(&SourceHash::of(b"y"), &Settings::default()), revision, "and so are the bytes");
    }

    #[test]
    fn records_of_the_version_before_are_read() {
        let (one, two) = (SourceHash::of(b"1"), SourceHash::of(b"2"));
        let old = serde_json::json!({
            "id": "i", "tenant": "t", "name": "n", "created_ms": 1,
            "revisions": [
                {"revision": one, "kind": "core_exports", "flavor": "plain", "bytes": 1, "created_ms": 2},
                {"revision": two, "kind": "core_exports", "flavor": "plain", "bytes": 1, "created_ms": 3,
                 "settings": {"public": true, "env": {"A": "1"}}},
            ],
            "traffic": [{"revision": two, "weight": 3}, {"revision": one, "weight": 1}],
        });
        let record: FunctionRecord = serde_json::from_value(old).unwrap();
        let current = record.current().unwrap();
        assert_eq!(current.source, two);
        assert_eq!(current.revision, Revision::of(&two, &current.settings));
        assert!(current.settings.public);
        assert_eq!(record.traffic[1].revision, Revision::of(&one, &Settings::default()));
        // What was known as a revision still finds it.
        assert_eq!(record.find(&one.as_str()[..10]).unwrap().source, one);
        let again: FunctionRecord = serde_json::from_value(serde_json::to_value(&record).unwrap()).unwrap();
        assert_eq!((again.revisions, again.traffic), (record.revisions, record.traffic));
    }
}
