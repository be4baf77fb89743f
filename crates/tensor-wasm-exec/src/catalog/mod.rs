//! The catalog: which functions exist, which revisions they have and which of them get traffic.
//!
//! The whole of it is in memory (a few hundred bytes per function) for lookups, and in the store for good; a change is
//! visible only after it is on disk. It knows names and bytes, not how to compile or run them (`engine/compile.rs`,
//! `engine/pool.rs`). What it finds damaged at start it sets aside and says so, and serves the rest.

mod files;
pub mod models;
pub mod record;
pub mod secrets;
pub mod settings;
pub(crate) mod store;
pub mod upload;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::{Mutex, RwLock};
use rand::Rng;
use serde::de::DeserializeOwned;

pub(crate) use self::files::{Files, hash as hash_of_file, write_private};
use self::models::ModelIndex;
pub use self::models::{AddedModel, ModelRecord};
use self::record::Superseded;
pub use self::record::{
    Flavor, FunctionRecord, Kind, ModelHash, Revision, RevisionRecord, Share, SourceHash, check_name,
};
use self::secrets::{OpenSecrets, Vault};
pub use self::secrets::{Secret, SecretsKey};
pub use self::settings::{MemoryKind, Settings, SettingsPatch};
pub use self::store::StoreError;
use self::store::{Change, Read, Store, Table};
use self::upload::Uploaded;
use crate::HashMap;
use crate::config::Limits;
use crate::failure::Rejection;

/// Locks that serialise changes of one function; two functions rarely share one.
const LOCKS: usize = 64;

/// Weights are parts of this many at most, so that their sum cannot overflow.
pub const WEIGHT_MAX: u32 = 10_000;

pub struct Catalog {
    pub(crate) files: Files,
    pub(crate) store: Store,
    index: RwLock<Index>,
    /// Who refers to a source; without anyone its file goes.
    references: Mutex<HashMap<SourceHash, Reference>>,
    locks: Vec<tokio::sync::Mutex<()>>,
    vault: Vault,
    models: ModelIndex,
    /// Locks that serialise what adds to a tenant's functions, secrets or models, so that their number is counted
    /// before one is added. Taken before a function's.
    tenant_locks: Vec<tokio::sync::Mutex<()>>,
    /// Locks that serialise putting a model's file into its place and taking a damaged one away, by hash.
    model_locks: Vec<tokio::sync::Mutex<()>>,
    /// A function's record or bytes were lost at start: sources without a function may belong to it and stay.
    is_incomplete: bool,
}

#[derive(Default)]
struct Reference {
    count: usize,
    /// What it was found to be when it was compiled.
    shape: Option<(Kind, Flavor)>,
}

#[derive(Default)]
struct Index {
    tenants: HashMap<Box<str>, Tenant>,
    functions: usize,
}

#[derive(Default)]
struct Tenant {
    by_name: HashMap<Box<str>, Arc<FunctionRecord>>,
    by_id: HashMap<Box<str>, Arc<FunctionRecord>>,
}

/// Where a function's traffic is to go.
#[derive(Debug, Clone)]
pub enum Traffic {
    /// To one revision, or split between two by weight. Revisions may be given by prefix.
    Shares(Vec<(String, u32)>),
    /// All of it to the revision deployed before the current one, whichever that is by then.
    Previous,
}

/// Something found damaged at start and set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    pub what: String,
    pub why: String,
}

/// Why a source cannot be had.
#[derive(Debug)]
pub(crate) enum SourceError {
    /// It is not what it was; nothing but deploying it again helps.
    Damaged(String),
    /// It could not be read just now, which says nothing about it. Without its path, which is in the log.
    Unreadable(String),
}

/// A source kept alive while something works on it, whether or not a function refers to it already.
pub(crate) struct Pinned<'a> {
    catalog: &'a Catalog,
    source: SourceHash,
}

/// What a catalog needs to know of its secrets.
#[derive(Debug, Default)]
pub struct SecretsAccess {
    /// What they are sealed with; without one there can be none.
    pub key: Option<SecretsKey>,
    /// Gives up the values there are, because their key is lost.
    pub forget: bool,
}

impl Catalog {
    /// Opens a data directory, creating it if need be.
    pub fn open(root: &Path, secrets: SecretsAccess) -> Result<(Catalog, Vec<Damage>), StoreError> {
        let io = |e: std::io::Error| StoreError::Io { path: root.to_owned(), why: e.to_string() };
        let files = Files::open(root).map_err(io)?;
        let mut damages = Vec::new();
        let store = match Store::open(&files.store()).and_then(|store| {
            // Reading everything is the check: what cannot be walked is as bad as what cannot be opened.
            store.each::<serde::de::IgnoredAny>(Table::Functions, |_, _| {})?;
            store.each::<serde::de::IgnoredAny>(Table::Jobs, |_, _| {})?;
            store.each::<serde::de::IgnoredAny>(Table::Models, |_, _| {})?;
            Ok(store)
        }) {
            Ok(store) => store,
            Err(StoreError::Damaged { path, why }) => {
                tracing::error!(file = %path.display(), why, "the catalog is damaged; rebuilding it from the manifests");
                damages.push(Damage {
                    what: path.display().to_string(),
                    why: format!("{why}; functions and models were rebuilt from their manifests; jobs, results and secrets are lost"),
                });
                files.quarantine(&path, &why);
                rebuild(&files, &mut damages)?
            }
            Err(other) => return Err(other),
        };
        files.empty_tmp().map_err(io)?;
        if secrets.forget {
            secrets::forget_all(&store)?;
        }
        let vault = Vault::open(secrets.key, &store)?;
        let locks = || (0..LOCKS).map(|_| tokio::sync::Mutex::default()).collect();
        let mut catalog = Catalog {
            files,
            store,
            vault,
            models: ModelIndex::default(),
            model_locks: locks(),
            tenant_locks: locks(),
            index: RwLock::default(),
            references: Mutex::default(),
            locks: locks(),
            is_incomplete: false,
        };
        let lost_secrets = catalog.load(&mut damages)?;
        catalog.load_models(&mut damages)?;
        // A lost secret says nothing about sources: its function is here and refers to its own.
        catalog.is_incomplete = !damages.is_empty();
        damages.extend(lost_secrets);
        Ok((catalog, damages))
    }

    /// The function a tenant calls `name`, by name or id.
    pub fn resolve(&self, tenant: &str, name: &str) -> Result<Arc<FunctionRecord>, Rejection> {
        let index = self.index.read();
        let found = index.tenants.get(tenant).and_then(|t| t.by_name.get(name).or_else(|| t.by_id.get(name)));
        found.cloned().ok_or_else(|| Rejection::NotFound {
            what: "function",
            name: name.chars().take(record::NAME_BYTES_MAX).collect(),
            tenant: tenant.to_owned(),
        })
    }

    /// A tenant's functions by name.
    pub fn list(&self, tenant: &str) -> Vec<Arc<FunctionRecord>> {
        let index = self.index.read();
        let mut all: Vec<_> =
            index.tenants.get(tenant).map_or_else(Vec::new, |t| t.by_name.values().cloned().collect());
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    pub fn len(&self) -> usize {
        self.index.read().functions
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a tenant may have one more function.
    pub(crate) fn check_room(&self, tenant: &str, functions_max: usize) -> Result<(), Rejection> {
        if self.index.read().tenants.get(tenant).map_or(0, |t| t.by_name.len()) < functions_max {
            return Ok(());
        }
        let why =
            format!("tenant {tenant:?} has {functions_max} functions, which is its limit ([limits] functions_max)");
        Err(Rejection::Conflict { why })
    }

    /// Every function of every tenant.
    pub(crate) fn everything(&self) -> Vec<Arc<FunctionRecord>> {
        self.index.read().tenants.values().flat_map(|t| t.by_name.values().cloned()).collect()
    }

    /// Gives a function a new revision and all the traffic. `revise` makes it from what the function is by then, under
    /// the function's lock, so that of two deploys that race the second one builds on the first. A revision that is
    /// there already becomes the newest again.
    pub(crate) async fn deploy(
        &self,
        tenant: &str,
        name: &str,
        limits: &Limits,
        revise: impl FnOnce(Option<&FunctionRecord>) -> Result<RevisionRecord, Rejection>,
    ) -> Result<Arc<FunctionRecord>, Rejection> {
        let _counted = self.tenant_locks[lock_of(tenant)].lock().await;
        self.change(tenant, name, |old| {
            if old.is_none() {
                self.check_room(tenant, limits.functions_max)?;
            }
            let mut revision = revise(old)?;
            let mut record = old.cloned().unwrap_or_else(|| FunctionRecord {
                id: uuid::Uuid::now_v7().to_string(),
                tenant: tenant.to_owned(),
                name: name.to_owned(),
                created_ms: now_ms(),
                revisions: Vec::new(),
                traffic: Vec::new(),
                secret_names: BTreeSet::new(),
                secrets: OpenSecrets::default(),
                superseded: Superseded::default(),
            });
            record.traffic = vec![Share { revision: revision.revision.clone(), weight: 1 }];
            // Its bytes are there again, whole: also for the other revisions that have them.
            for r in record.revisions.iter_mut().filter(|r| r.source == revision.source) {
                r.quarantined = None;
            }
            // Deploying the newest once more changes nothing, its time included.
            match record.revisions.iter().position(|r| r.revision == revision.revision) {
                Some(at) if at + 1 == record.revisions.len() => {
                    revision.created_ms = record.revisions[at].created_ms;
                    record.revisions[at] = revision;
                }
                known => {
                    if let Some(at) = known {
                        record.revisions.remove(at);
                    }
                    record.revisions.push(revision);
                }
            }
            while record.revisions.len() > limits.revisions_max {
                let has_traffic = |r: &RevisionRecord| record.traffic.iter().any(|s| s.revision == r.revision);
                let Some(oldest) = record.revisions.iter().position(|r| !has_traffic(r)) else { break };
                record.revisions.remove(oldest);
            }
            Ok(Some(record))
        })
        .await?
        .ok_or_else(|| Rejection::Conflict { why: "the function vanished while it was deployed".to_owned() })
    }

    /// Sends a function's traffic elsewhere.
    pub(crate) async fn set_traffic(
        &self,
        tenant: &str,
        name: &str,
        to: &Traffic,
    ) -> Result<Arc<FunctionRecord>, Rejection> {
        if let Traffic::Shares(shares) = to {
            check_shares(shares)?;
        }
        let name = &self.resolve(tenant, name)?.name;
        self.change(tenant, name, |old| {
            let mut record = old.cloned().ok_or_else(|| not_found(tenant, name))?;
            let chosen = match to {
                Traffic::Shares(shares) => {
                    let share = |(prefix, weight): &(String, u32)| Ok((record.find(prefix)?, *weight));
                    shares.iter().map(share).collect::<Result<Vec<_>, Rejection>>()?
                }
                Traffic::Previous => vec![(record.previous()?, 1)],
            };
            let mut traffic = Vec::new();
            for (revision, weight) in chosen {
                if let Some(why) = &revision.quarantined {
                    return Err(Rejection::Quarantined {
                        name: name.clone(),
                        revision: revision.revision.short().to_owned(),
                        why: why.clone(),
                    });
                }
                traffic.push(Share { revision: revision.revision.clone(), weight });
            }
            if matches!(traffic.as_slice(), [a, b] if a.revision == b.revision) {
                return Err(Rejection::InvalidArgs { why: "the two revisions of a split are the same".to_owned() });
            }
            record.traffic = traffic;
            Ok(Some(record))
        })
        .await?
        .ok_or_else(|| not_found(tenant, name))
    }

    /// Deletes a function and its secrets; returns it as it was.
    pub(crate) async fn delete(&self, tenant: &str, name: &str) -> Result<FunctionRecord, Rejection> {
        let name = &self.resolve(tenant, name)?.name;
        let mut deleted = None;
        self.change_with(tenant, name, |old| {
            let old = old.ok_or_else(|| not_found(tenant, name))?;
            deleted = Some(old.clone());
            Ok((None, old.secret_names.iter().map(|key| secrets::remove(old, key)).collect()))
        })
        .await?;
        deleted.ok_or_else(|| not_found(tenant, name))
    }

    /// Gives a function a secret, or a secret another value.
    pub(crate) async fn set_secret(
        &self,
        tenant: &str,
        name: &str,
        key: &str,
        value: Secret,
        limits: &Limits,
    ) -> Result<Arc<FunctionRecord>, Rejection> {
        secrets::check_secret_name(key)?;
        if value.len() > limits.secret_bytes_max {
            let (what, limit) = ("the secret's value", "[limits] secret_bytes_max");
            return Err(Rejection::TooLarge { what, bytes_max: limits.secret_bytes_max, limit });
        }
        let _counted = self.tenant_locks[lock_of(tenant)].lock().await;
        let name = &self.resolve(tenant, name)?.name;
        self.change_with(tenant, name, |old| {
            let mut record = old.cloned().ok_or_else(|| not_found(tenant, name))?;
            if !record.secret_names.contains(key) && self.count_secrets(tenant) >= limits.secrets_max {
                let max = limits.secrets_max;
                let why = format!("tenant {tenant:?} has {max} secrets, which is its limit ([limits] secrets_max)");
                return Err(Rejection::Conflict { why });
            }
            let changes = self.vault.put(&record, key, &value)?;
            record.secret_names.insert(key.to_owned());
            Arc::make_mut(&mut record.secrets).insert(key.to_owned(), Arc::new(value));
            Ok((Some(record), changes))
        })
        .await?
        .ok_or_else(|| not_found(tenant, name))
    }

    pub(crate) async fn delete_secret(
        &self,
        tenant: &str,
        name: &str,
        key: &str,
    ) -> Result<Arc<FunctionRecord>, Rejection> {
        let _counted = self.tenant_locks[lock_of(tenant)].lock().await;
        let name = &self.resolve(tenant, name)?.name;
        self.change_with(tenant, name, |old| {
            let mut record = old.cloned().ok_or_else(|| not_found(tenant, name))?;
            if !record.secret_names.remove(key) {
                let key = key.chars().take(record::NAME_BYTES_MAX).collect();
                return Err(Rejection::NotFound { what: "secret", name: key, tenant: tenant.to_owned() });
            }
            Arc::make_mut(&mut record.secrets).remove(key);
            let change = secrets::remove(&record, key);
            Ok((Some(record), vec![change]))
        })
        .await?
        .ok_or_else(|| not_found(tenant, name))
    }

    fn count_secrets(&self, tenant: &str) -> usize {
        let index = self.index.read();
        index.tenants.get(tenant).map_or(0, |t| t.by_name.values().map(|f| f.secret_names.len()).sum())
    }

    /// Marks every revision of a source as unusable; they are still listed, with the reason. Returns the functions that
    /// have one.
    pub(crate) async fn quarantine(&self, source: &SourceHash, why: &str) -> Vec<Arc<FunctionRecord>> {
        {
            // A deploy of the same bytes may have written them anew since they were found damaged.
            let _no_deploy = self.references.lock();
            match self.check_source(source) {
                Err(SourceError::Damaged(_)) => self.files.quarantine(&self.files.source(source), why),
                _ => return Vec::new(),
            }
        }
        let mut marked = Vec::new();
        for function in self.everything() {
            let is_good = |r: &RevisionRecord| r.source == *source && r.quarantined.is_none();
            if !function.revisions.iter().any(is_good) {
                continue;
            }
            tracing::error!(
                tenant = function.tenant,
                function = function.name,
                source = source.as_str(),
                why,
                "quarantined"
            );
            let changed = self
                .change(&function.tenant, &function.name, |old| {
                    let mut record = old.cloned().ok_or_else(|| not_found(&function.tenant, &function.name))?;
                    for r in record.revisions.iter_mut().filter(|r| r.source == *source) {
                        r.quarantined = Some(why.to_owned());
                    }
                    Ok(Some(record))
                })
                .await;
            match changed {
                Ok(changed) => marked.extend(changed),
                Err(error) => tracing::error!(%error, function = function.name, "could not note the quarantine"),
            }
        }
        marked
    }

    /// Checks the deployed bytes against their hash, reading them piece by piece.
    pub(crate) fn check_source(&self, source: &SourceHash) -> Result<(), SourceError> {
        check_file(&self.files.source(source), |found| SourceHash::from(found) == *source)
    }

    /// Moves an upload to where its hash belongs (if it is not there, whole) and keeps it until the guard drops.
    pub(crate) fn pin_source(&self, upload: &Uploaded) -> Result<Pinned<'_>, Rejection> {
        let source = upload.source();
        self.references.lock().entry(source.clone()).or_default().count += 1;
        let pinned = Pinned { catalog: self, source };
        // Not under the lock: hashing a gigabyte takes a second. It is referred to, so it stays.
        if self.check_source(&pinned.source).is_err() {
            let installed = self.files.install(upload.path(), &self.files.source(&pinned.source));
            installed.map_err(|e| Rejection::Storage { why: e.to_string() })?;
        }
        Ok(pinned)
    }

    /// What a source is, where some function has it already.
    pub(crate) fn shape(&self, source: &SourceHash) -> Option<(Kind, Flavor)> {
        self.references.lock().get(source)?.shape
    }

    pub(crate) fn artifact_digest(&self, source: &SourceHash, engine: &str) -> Option<String> {
        match self.store.get(Table::Artifacts, &artifact_key(source, engine)) {
            Ok(Some(Read::Good(digest))) => Some(digest),
            _ => None,
        }
    }

    pub(crate) async fn set_artifact_digest(
        &self,
        source: &SourceHash,
        engine: &str,
        digest: &str,
    ) -> Result<(), Rejection> {
        let change = Change::put(Table::Artifacts, artifact_key(source, engine), &digest);
        self.store.write(vec![change]).await.map_err(storage)
    }

    /// Removes sources that no function refers to: left by a crash between writing a file and committing its record.
    pub(crate) fn sweep_sources(&self) {
        if self.is_incomplete {
            return;
        }
        let Some(root) = self.files.source(&SourceHash::of(b"")).parent().and_then(Path::parent).map(Path::to_owned)
        else {
            return;
        };
        each_file(&root, |name, path| {
            let Ok(source) = SourceHash::try_from(name) else { return };
            let references = self.references.lock();
            if !references.contains_key(&source) {
                tracing::info!(file = %path.display(), "removing a source no function refers to");
                let _ = std::fs::remove_file(path);
                self.files.remove_artifacts(&source);
            }
        });
    }

    /// Commits a function's record as it is: instances with what was its surroundings serve no later call.
    pub(crate) async fn renew(&self, function: &FunctionRecord) -> Result<(), Rejection> {
        self.change(&function.tenant, &function.name, |old| Ok(old.cloned())).await.map(drop)
    }

    /// Reads, changes and commits one function's record; `None` deletes it.
    async fn change(
        &self,
        tenant: &str,
        name: &str,
        edit: impl FnOnce(Option<&FunctionRecord>) -> Result<Option<FunctionRecord>, Rejection>,
    ) -> Result<Option<Arc<FunctionRecord>>, Rejection> {
        self.change_with(tenant, name, |old| Ok((edit(old)?, Vec::new()))).await
    }

    /// The same, with changes that are committed together with the record.
    async fn change_with(
        &self,
        tenant: &str,
        name: &str,
        edit: impl FnOnce(Option<&FunctionRecord>) -> Result<(Option<FunctionRecord>, Vec<Change>), Rejection>,
    ) -> Result<Option<Arc<FunctionRecord>>, Rejection> {
        let key = record::key(tenant, name);
        let _guard = self.locks[lock_of(&key)].lock().await;
        let old = self.resolve_name(tenant, name);
        let (new, mut changes) = edit(old.as_deref())?;
        let new = new.map(Arc::new);
        let change = match (&old, &new) {
            (_, Some(new)) => Change::put(Table::Functions, key, &**new),
            (Some(_), None) => Change::Delete(Table::Functions, key),
            (None, None) => return Ok(None),
        };
        changes.push(change);
        self.store.write(changes).await.map_err(storage)?;
        self.refer(old.as_deref(), new.as_deref());
        self.show(old.as_deref(), new.clone());
        self.keep_manifest(old.as_deref(), new.as_deref());
        Ok(new)
    }

    fn resolve_name(&self, tenant: &str, name: &str) -> Option<Arc<FunctionRecord>> {
        self.index.read().tenants.get(tenant)?.by_name.get(name).cloned()
    }

    fn show(&self, old: Option<&FunctionRecord>, new: Option<Arc<FunctionRecord>>) {
        let mut index = self.index.write();
        if let Some(old) = old {
            old.superseded.set();
            if let Some(tenant) = index.tenants.get_mut(old.tenant.as_str()) {
                tenant.by_name.remove(old.name.as_str());
                tenant.by_id.remove(old.id.as_str());
                if tenant.by_name.is_empty() {
                    index.tenants.remove(old.tenant.as_str());
                }
            }
            index.functions -= 1;
        }
        if let Some(new) = new {
            let tenant = index.tenants.entry(new.tenant.as_str().into()).or_default();
            tenant.by_id.insert(new.id.as_str().into(), new.clone());
            tenant.by_name.insert(new.name.as_str().into(), new);
            index.functions += 1;
        }
    }

    fn refer(&self, old: Option<&FunctionRecord>, new: Option<&FunctionRecord>) {
        for revision in new.into_iter().flat_map(|r| &r.revisions) {
            let mut references = self.references.lock();
            let reference = references.entry(revision.source.clone()).or_default();
            reference.count += 1;
            reference.shape = Some((revision.kind, revision.flavor));
        }
        for revision in old.into_iter().flat_map(|r| &r.revisions) {
            self.unrefer(&revision.source);
        }
    }

    fn unrefer(&self, source: &SourceHash) {
        let mut references = self.references.lock();
        let Some(reference) = references.get_mut(source) else { return };
        reference.count -= 1;
        if reference.count == 0 {
            references.remove(source);
            // Under the lock, so that a deploy of the same bytes cannot find the files and then lose them.
            let _ = std::fs::remove_file(self.files.source(source));
            let engines = self.files.remove_artifacts(source);
            let digests = engines.iter().map(|engine| Change::Delete(Table::Artifacts, artifact_key(source, engine)));
            self.store.write_later(digests.collect());
        }
    }

    fn keep_manifest(&self, old: Option<&FunctionRecord>, new: Option<&FunctionRecord>) {
        match (old, new) {
            (_, Some(new)) => self.keep_manifest_file(&self.files.manifest(&new.id), Some(new)),
            (Some(old), None) => self.keep_manifest_file::<FunctionRecord>(&self.files.manifest(&old.id), None),
            (None, None) => {}
        }
    }

    /// Takes in every function of the store. Returns the secrets that were lost.
    fn load(&mut self, damages: &mut Vec<Damage>) -> Result<Vec<Damage>, StoreError> {
        let (mut repaired, mut lost_secrets) = (Vec::new(), Vec::new());
        for (key, read) in self.store.all::<FunctionRecord>(Table::Functions)? {
            let function = match read {
                Read::Good(function) => function,
                Read::Damaged(bytes, why) => {
                    let what = format!("record of function {}", key.replace('\0', "/"));
                    self.files.quarantine_bytes(&format!("function-{}", key.replace(['\0', '/'], "-")), &bytes, &why);
                    let kept = manifests::<FunctionRecord>(&self.files, &self.files.manifests(), &mut Vec::new())?;
                    let kept = kept.into_iter().find(|f| f.key() == key);
                    let outcome = if kept.is_some() { "restored from its manifest" } else { "lost" };
                    tracing::error!(what, why, outcome, "quarantined");
                    damages.push(Damage { what, why: format!("{why}; {outcome}") });
                    let Some(kept) = kept else {
                        repaired.push(Change::Delete(Table::Functions, key));
                        continue;
                    };
                    repaired.push(Change::put(Table::Functions, key, &kept));
                    kept
                }
            };
            let (secrets, lost) = self.vault.open_all(&self.store, &function)?;
            for (key, why) in lost {
                let what = format!("secret {key} of function {}", function.name);
                tracing::error!(what, why, "lost; set it again");
                lost_secrets.push(Damage { what, why: format!("{why}; set it again") });
            }
            self.take_in(FunctionRecord { secrets, ..function }, damages);
        }
        if !repaired.is_empty() {
            self.store.write_blocking(repaired)?;
        }
        Ok(lost_secrets)
    }

    fn take_in(&self, mut function: FunctionRecord, damages: &mut Vec<Damage>) {
        for revision in &mut function.revisions {
            let path = self.files.source(&revision.source);
            if revision.quarantined.is_none() && !path.is_file() {
                let why = format!("{}: missing", path.display());
                let what = format!("function {} revision {}", function.name, revision.revision.short());
                tracing::error!(what, why, "quarantined");
                damages.push(Damage { what, why: why.clone() });
                revision.quarantined = Some(why);
            }
        }
        let function = Arc::new(function);
        self.refer(None, Some(&function));
        self.show(None, Some(function));
    }
}

/// A function and the one of its revisions that serves a call; cheap to pass around.
#[derive(Clone)]
pub(crate) struct Serving {
    pub function: Arc<FunctionRecord>,
    at: usize,
}

impl Serving {
    /// Chooses the revision: by weight where traffic is split. Gives the function back where none has any.
    pub(crate) fn of(function: Arc<FunctionRecord>) -> Result<Serving, Arc<FunctionRecord>> {
        match chosen(&function) {
            Some(at) => Ok(Serving { function, at }),
            None => Err(function),
        }
    }

    /// The first revision of a function that has no traffic to choose by.
    pub(crate) fn only(function: Arc<FunctionRecord>) -> Serving {
        Serving { function, at: 0 }
    }

    pub(crate) fn revision(&self) -> &RevisionRecord {
        &self.function.revisions[self.at]
    }
}

fn chosen(function: &FunctionRecord) -> Option<usize> {
    let revision = match function.traffic.as_slice() {
        [only] => &only.revision,
        shares => {
            let total: u64 = shares.iter().map(|s| u64::from(s.weight)).sum();
            let mut at = if total == 0 { return None } else { rand::rng().random_range(0..total) };
            let hit = |share: &&Share| {
                let weight = u64::from(share.weight);
                let here = at < weight;
                at = at.wrapping_sub(weight);
                here
            };
            &shares.iter().find(hit)?.revision
        }
    };
    function.revisions.iter().position(|r| r.revision == *revision)
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.catalog.unrefer(&self.source);
    }
}

/// Makes a new store from the manifests, after the old one was set aside.
fn rebuild(files: &Files, damages: &mut Vec<Damage>) -> Result<Store, StoreError> {
    let store = Store::open(&files.store())?;
    let functions: Vec<FunctionRecord> = manifests(files, &files.manifests(), damages)?;
    let models: Vec<ModelRecord> = manifests(files, &files.model_manifests(), damages)?;
    tracing::warn!(functions = functions.len(), models = models.len(), "rebuilt the catalog from the manifests");
    let functions = functions.iter().map(|f| Change::put(Table::Functions, f.key(), f));
    store.write_blocking(functions.chain(models.iter().map(|m| Change::put(Table::Models, m.key(), m))).collect())?;
    Ok(store)
}

/// Every record as its manifest in a folder has it; unreadable ones are set aside.
fn manifests<T: DeserializeOwned>(
    files: &Files,
    folder: &Path,
    damages: &mut Vec<Damage>,
) -> Result<Vec<T>, StoreError> {
    let io = |path: PathBuf, e: std::io::Error| StoreError::Io { path, why: e.to_string() };
    let entries = std::fs::read_dir(folder).map_err(|e| io(folder.to_owned(), e))?;
    let mut records = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let bytes = std::fs::read(&path).map_err(|e| io(path.clone(), e))?;
        match store::decode(&bytes) {
            Read::Good(record) => records.push(record),
            Read::Damaged(_, why) => {
                damages.push(Damage { what: path.display().to_string(), why: why.clone() });
                files.quarantine(&path, &why);
            }
        }
    }
    Ok(records)
}

/// Checks a file against the hash it is named by, reading it piece by piece.
fn check_file(path: &Path, is_right: impl FnOnce(blake3::Hash) -> bool) -> Result<(), SourceError> {
    match files::hash(path) {
        Ok(found) if is_right(found) => Ok(()),
        Ok(_) => Err(SourceError::Damaged(format!("{}: the content does not match its hash", path.display()))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            Err(SourceError::Damaged(format!("{}: missing", path.display())))
        }
        Err(error) => {
            tracing::error!(file = %path.display(), %error, "a file cannot be read");
            Err(SourceError::Unreadable(error.to_string()))
        }
    }
}

/// The files in the folders of a folder, with their names without extensions.
fn each_file(root: &Path, visit: impl Fn(String, &Path)) {
    let folders = std::fs::read_dir(root).into_iter().flatten().flatten();
    for file in folders.filter_map(|folder| std::fs::read_dir(folder.path()).ok()).flatten().flatten() {
        let path = file.path();
        visit(path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), &path);
    }
}

fn check_shares(shares: &[(String, u32)]) -> Result<(), Rejection> {
    if !(1..=2).contains(&shares.len()) {
        let why = format!("traffic goes to one revision or is split between two, not {}", shares.len());
        return Err(Rejection::InvalidArgs { why });
    }
    if shares.iter().any(|(_, weight)| *weight == 0 || *weight > WEIGHT_MAX) {
        return Err(Rejection::InvalidArgs { why: format!("a weight is between 1 and {WEIGHT_MAX}") });
    }
    Ok(())
}

fn not_found(tenant: &str, name: &str) -> Rejection {
    Rejection::NotFound { what: "function", name: name.to_owned(), tenant: tenant.to_owned() }
}

fn artifact_key(source: &SourceHash, engine: &str) -> String {
    format!("{}/{engine}", source.as_str())
}

/// Which lock of [`LOCKS`] a key takes.
fn lock_of(key: &str) -> usize {
    usize::from(blake3::hash(key.as_bytes()).as_bytes()[0]) % LOCKS
}

/// What a caller learns of it, who may be a stranger: not where the data directory is.
pub(crate) fn storage(error: StoreError) -> Rejection {
    tracing::error!(%error, "the store cannot do what it was asked");
    Rejection::Storage { why: error.without_path() }
}

pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A data directory as the version before wrote it, when a revision was the hash of its bytes.
    #[test]
    fn a_data_directory_of_the_version_before_opens() {
        let dir = tempfile::tempdir().unwrap();
        let source = SourceHash::of(b"bytes");
        let old = serde_json::json!({
            "id": "0190", "tenant": "default", "name": "f", "created_ms": 1,
            "revisions": [{"revision": source, "kind": "core_exports", "flavor": "plain", "bytes": 5, "created_ms": 2,
                           "settings": {"public": true}}],
            "traffic": [{"revision": source, "weight": 1}],
        });
        {
            let files = Files::open(dir.path()).unwrap();
            files.write(&files.source(&source), b"bytes").unwrap();
            files.write(&files.manifest("0190"), &store::encode(&old)).unwrap();
            let store = Store::open(&files.store()).unwrap();
            store.write_blocking(vec![Change::put(Table::Functions, "default\0f", &old)]).unwrap();
        }
        let reopened = || Catalog::open(dir.path(), SecretsAccess::default()).unwrap();
        let check = |function: &FunctionRecord| {
            let current = function.current().unwrap();
            assert_eq!((&current.source, current.settings.public), (&source, true));
            assert_eq!(current.revision, Revision::of(&source, &current.settings));
        };
        let (catalog, damages) = reopened();
        assert_eq!(damages, []);
        check(&catalog.resolve("default", "f").unwrap());
        // Any change writes it in today's form, under the id it has now.
        let now = catalog.resolve("default", "f").unwrap().traffic[0].revision.as_str().to_owned();
        let threads = tokio::runtime::Runtime::new().unwrap();
        threads.block_on(catalog.set_traffic("default", "f", &Traffic::Shares(vec![(now, 2)]))).unwrap();
        drop(catalog);
        check(&reopened().0.resolve("default", "f").unwrap());
        // And the manifest alone is enough.
        std::fs::write(dir.path().join("manifests/0190.json"), store::encode(&old)).unwrap();
        std::fs::write(dir.path().join("catalog.redb"), b"nonsense").unwrap();
        let (catalog, damages) = reopened();
        assert_eq!(damages.len(), 1);
        check(&catalog.resolve("default", "f").unwrap());
    }

    #[test]
    fn a_second_server_leaves_the_first_ones_uploads_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (catalog, _) = Catalog::open(dir.path(), SecretsAccess::default()).unwrap();
        let upload = catalog.files.scratch();
        std::fs::write(&upload, b"half of it").unwrap();
        let refused = Catalog::open(dir.path(), SecretsAccess::default()).err().unwrap();
        assert!(matches!(refused, StoreError::InUse { .. }), "{refused}");
        assert_eq!(std::fs::read(&upload).unwrap(), b"half of it");
        drop(catalog);
        Catalog::open(dir.path(), SecretsAccess::default()).unwrap();
        assert!(!upload.exists(), "what an earlier server left half written goes");
    }

    #[test]
    fn a_lost_secret_does_not_keep_sources_that_nobody_refers_to() {
        let dir = tempfile::tempdir().unwrap();
        let (source, orphan) = (SourceHash::of(b"bytes"), SourceHash::of(b"left by a crash"));
        let revision = Revision::of(&source, &Settings::default());
        let record = serde_json::json!({
            "id": "0190", "tenant": "default", "name": "f", "created_ms": 1, "secret_names": ["API_KEY"],
            "revisions": [{"revision": revision, "source": source, "kind": "core_exports", "flavor": "plain",
                           "bytes": 5, "created_ms": 2}],
            "traffic": [{"revision": revision, "weight": 1}],
        });
        {
            let files = Files::open(dir.path()).unwrap();
            files.write(&files.source(&source), b"bytes").unwrap();
            files.write(&files.source(&orphan), b"left by a crash").unwrap();
            let store = Store::open(&files.store()).unwrap();
            store.write_blocking(vec![Change::put(Table::Functions, "default\0f", &record)]).unwrap();
        }
        let (catalog, damages) = Catalog::open(dir.path(), SecretsAccess::default()).unwrap();
        assert!(matches!(damages.as_slice(), [one] if one.what.contains("API_KEY")), "{damages:?}");
        catalog.sweep_sources();
        assert!(catalog.files.source(&source).exists());
        assert!(!catalog.files.source(&orphan).exists());
    }
}
