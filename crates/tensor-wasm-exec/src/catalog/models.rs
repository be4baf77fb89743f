//! Models in the catalog: safetensors files that functions open by name, which tenants have of them, and where they
//! lie. What is in them is read by `crate::models`.
//!
//! A model is its bytes: adding another file under the name replaces it, and a file is never changed. Its record is
//! visible only once file and record are on disk. Files are named by their hash and shared by whoever has the same;
//! each tenant is charged for its own all the same, so that nobody's room depends on somebody else.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use super::store::{self, Change, Read, StoreError, Table};
use super::upload::Uploaded;
use super::{Catalog, Damage, FunctionRecord, ModelHash, SourceError, lock_of, now_ms, record, storage};
use crate::HashMap;
use crate::config::Limits;
use crate::failure::Rejection;

/// What the catalog keeps of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// Of this file under this name; names its manifest.
    pub id: String,
    pub tenant: String,
    pub name: String,
    pub hash: ModelHash,
    /// Of the file.
    pub bytes: u64,
    /// How many are in it.
    pub tensors: usize,
    pub created_ms: u64,
    /// Why it cannot be used, once found damaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantined: Option<String>,
}

impl ModelRecord {
    pub(super) fn key(&self) -> String {
        record::key(&self.tenant, &self.name)
    }
}

/// A model as it stands after it was added.
pub struct AddedModel {
    pub model: Arc<ModelRecord>,
    /// What was there under the name before.
    pub replaced: Option<Arc<ModelRecord>>,
}

type ByName = BTreeMap<String, Arc<ModelRecord>>;

/// Every tenant's models by name, and who refers to which file.
#[derive(Default)]
pub(super) struct ModelIndex {
    tenants: RwLock<HashMap<Box<str>, ByName>>,
    /// A file without a reference goes.
    references: Mutex<HashMap<ModelHash, usize>>,
}

/// A file kept while its record is being made.
struct PinnedModel<'a> {
    catalog: &'a Catalog,
    hash: ModelHash,
}

impl Drop for PinnedModel<'_> {
    fn drop(&mut self) {
        self.catalog.unrefer_model(&self.hash);
    }
}

impl Catalog {
    /// A tenant's model.
    pub fn model(&self, tenant: &str, name: &str) -> Result<Arc<ModelRecord>, Rejection> {
        let found = self.models.tenants.read().get(tenant).and_then(|models| models.get(name)).cloned();
        found.ok_or_else(|| Rejection::NotFound {
            what: "model",
            name: name.chars().take(record::NAME_BYTES_MAX).collect(),
            tenant: tenant.to_owned(),
        })
    }

    /// A tenant's models by name.
    pub fn models(&self, tenant: &str) -> Vec<Arc<ModelRecord>> {
        self.models.tenants.read().get(tenant).map_or_else(Vec::new, |models| models.values().cloned().collect())
    }

    pub(crate) fn models_of_all(&self) -> Vec<Arc<ModelRecord>> {
        self.models.tenants.read().values().flat_map(|models| models.values().cloned()).collect()
    }

    /// The functions with a serving revision that names a model.
    pub fn users_of_model(&self, tenant: &str, model: &str) -> Vec<Arc<FunctionRecord>> {
        let names_it = |function: &&Arc<FunctionRecord>| {
            let mut serving = function.traffic.iter().filter_map(|share| function.revision(&share.revision));
            serving.any(|revision| revision.settings.models.contains(model))
        };
        self.list(tenant).iter().filter(names_it).cloned().collect()
    }

    /// Refuses names of models that the tenant does not have.
    pub(crate) fn check_models(&self, tenant: &str, names: &BTreeSet<String>) -> Result<(), Rejection> {
        match names.iter().find(|name| self.model(tenant, name).is_err()) {
            None => Ok(()),
            Some(name) => {
                let shown: String = name.chars().take(record::NAME_BYTES_MAX).collect();
                let why = format!(
                    "settings: tenant {tenant:?} has no model {shown:?}; add it first: tensor-wasm model add {shown} \
                     FILE.safetensors"
                );
                Err(Rejection::InvalidArgs { why })
            }
        }
    }

    /// Whether a tenant has room for a model of so many bytes under a name, in place of the one that is there.
    pub(crate) fn check_model_room(
        &self,
        tenant: &str,
        name: &str,
        bytes: u64,
        limits: &Limits,
    ) -> Result<(), Rejection> {
        let models = self.models(tenant);
        let others = || models.iter().filter(|model| model.name != name);
        if others().count() >= limits.models_max {
            let max = limits.models_max;
            let why = format!("tenant {tenant:?} has {max} models, which is its limit ([limits] models_max)");
            return Err(Rejection::Conflict { why });
        }
        let taken: u64 = others().map(|model| model.bytes).sum();
        if taken.saturating_add(bytes) > limits.models_bytes_max {
            let why = format!(
                "the model has {bytes} bytes, and tenant {tenant:?} has models of {taken} bytes; together they may have \
                 {} ([limits] models_bytes_max)",
                limits.models_bytes_max
            );
            return Err(Rejection::Conflict { why });
        }
        Ok(())
    }

    /// Moves an upload to where its hash belongs and gives it a name. Its content was looked at by the caller.
    pub(crate) async fn add_model(
        self: &Arc<Self>,
        tenant: &str,
        name: &str,
        upload: Uploaded,
        tensors: usize,
        limits: &Limits,
    ) -> Result<AddedModel, Rejection> {
        let (hash, bytes) = (upload.model(), upload.bytes() as u64);
        *self.models.references.lock().entry(hash.clone()).or_default() += 1;
        let pinned = PinnedModel { catalog: self, hash };
        {
            // Also where the file is there already: this one was hashed as it came, that one may have been damaged.
            let _installing = self.model_locks[lock_of(pinned.hash.as_str())].lock().await;
            let (catalog, path) = (self.clone(), self.files.model(&pinned.hash));
            // Not on a thread that serves others: it waits until gigabytes are on the disk.
            let install = move || catalog.files.install(upload.path(), &path);
            let installed = tokio::task::spawn_blocking(install).await.map_err(std::io::Error::other);
            installed.flatten().map_err(|e| Rejection::Storage { why: e.to_string() })?;
        }
        let _counted = self.tenant_locks[lock_of(tenant)].lock().await;
        self.check_model_room(tenant, name, bytes, limits)?;
        let replaced = self.model(tenant, name).ok();
        let model = Arc::new(ModelRecord {
            id: uuid::Uuid::now_v7().to_string(),
            tenant: tenant.to_owned(),
            name: name.to_owned(),
            hash: pinned.hash.clone(),
            bytes,
            tensors,
            created_ms: now_ms(),
            quarantined: None,
        });
        self.change_model(replaced.as_deref(), Some(model.clone())).await?;
        Ok(AddedModel { model, replaced })
    }

    /// Removes a model that no serving revision names; with `force`, whoever names it.
    pub(crate) async fn remove_model(
        &self,
        tenant: &str,
        name: &str,
        force: bool,
    ) -> Result<Arc<ModelRecord>, Rejection> {
        let _counted = self.tenant_locks[lock_of(tenant)].lock().await;
        let model = self.model(tenant, name)?;
        let users = self.users_of_model(tenant, name);
        if !force && !users.is_empty() {
            let users: Vec<&str> = users.iter().map(|function| function.name.as_str()).collect();
            let why = format!(
                "model {name:?} is used by {}; deploy them without it, or remove it all the same: tensor-wasm model \
                 remove {name} --force (?force=true)",
                users.join(", ")
            );
            return Err(Rejection::Conflict { why });
        }
        self.change_model(Some(&model), None).await?;
        Ok(model)
    }

    /// Marks every model of a file as unusable; they are still listed, with the reason. Returns whether it was needed.
    pub(crate) async fn quarantine_model(self: &Arc<Self>, hash: &ModelHash, why: &str) -> bool {
        let Some(damaged) = self.set_model_aside(hash, why).await else { return false };
        self.mark_models(&damaged, why).await;
        true
    }

    /// Takes a damaged file away, and says whose models it was. Those that are added from now on write it anew.
    pub(crate) async fn set_model_aside(
        self: &Arc<Self>,
        hash: &ModelHash,
        why: &str,
    ) -> Option<Vec<Arc<ModelRecord>>> {
        // Whoever adds the same bytes has written them anew since they were found damaged, or will.
        let _installing = self.model_locks[lock_of(hash.as_str())].lock().await;
        let (catalog, wanted) = (self.clone(), hash.clone());
        let checked = tokio::task::spawn_blocking(move || catalog.check_model(&wanted)).await;
        let Ok(Err(SourceError::Damaged(_))) = checked else { return None };
        let damaged = self.models_of_all().into_iter().filter(|model| model.hash == *hash).collect();
        self.files.quarantine(&self.files.model(hash), why);
        Some(damaged)
    }

    /// Marks those of some models that are still what they were.
    pub(crate) async fn mark_models(&self, damaged: &[Arc<ModelRecord>], why: &str) {
        for model in damaged {
            let _counted = self.tenant_locks[lock_of(&model.tenant)].lock().await;
            let Ok(now) = self.model(&model.tenant, &model.name) else { continue };
            if now.id != model.id || now.quarantined.is_some() {
                continue;
            }
            tracing::error!(tenant = now.tenant, model = now.name, hash = now.hash.as_str(), why, "quarantined");
            let marked = Arc::new(ModelRecord { quarantined: Some(why.to_owned()), ..(*now).clone() });
            if let Err(error) = self.change_model(Some(&now), Some(marked)).await {
                tracing::error!(%error, model = now.name, "could not note the quarantine");
            }
        }
    }

    /// Checks a model's file against its hash, reading it piece by piece.
    pub(crate) fn check_model(&self, hash: &ModelHash) -> Result<(), SourceError> {
        super::check_file(&self.files.model(hash), |found| ModelHash::from(found) == *hash)
    }

    /// Removes files that no model refers to: left by a crash between writing one and committing its record.
    pub(crate) fn sweep_models(&self) {
        if self.is_incomplete {
            return;
        }
        super::each_file(&self.files.models(), |name, path| {
            let Ok(hash) = ModelHash::try_from(name) else { return };
            let references = self.models.references.lock();
            if !references.contains_key(&hash) {
                tracing::info!(file = %path.display(), "removing a model's file that no model refers to");
                let _ = std::fs::remove_file(path);
            }
        });
    }

    /// Commits one model's record, under its tenant's lock; `None` removes it.
    async fn change_model(&self, old: Option<&ModelRecord>, new: Option<Arc<ModelRecord>>) -> Result<(), Rejection> {
        let change = match (old, &new) {
            (_, Some(new)) => Change::put(Table::Models, new.key(), &**new),
            (Some(old), None) => Change::Delete(Table::Models, old.key()),
            (None, None) => return Ok(()),
        };
        self.store.write(vec![change]).await.map_err(storage)?;
        if let Some(new) = &new {
            self.keep_manifest_file(&self.files.model_manifest(&new.id), Some(&**new));
        }
        if let Some(old) = old.filter(|old| new.as_ref().is_none_or(|new| new.id != old.id)) {
            self.keep_manifest_file::<ModelRecord>(&self.files.model_manifest(&old.id), None);
        }
        self.show_model(old, new);
        if let Some(old) = old {
            self.unrefer_model(&old.hash);
        }
        Ok(())
    }

    fn show_model(&self, old: Option<&ModelRecord>, new: Option<Arc<ModelRecord>>) {
        let mut tenants = self.models.tenants.write();
        if let Some(old) = old
            && let Some(models) = tenants.get_mut(old.tenant.as_str())
        {
            models.remove(&old.name);
            if models.is_empty() {
                tenants.remove(old.tenant.as_str());
            }
        }
        if let Some(new) = new {
            *self.models.references.lock().entry(new.hash.clone()).or_default() += 1;
            tenants.entry(new.tenant.as_str().into()).or_default().insert(new.name.clone(), new);
        }
    }

    fn unrefer_model(&self, hash: &ModelHash) {
        let mut references = self.models.references.lock();
        let Some(count) = references.get_mut(hash) else { return };
        *count -= 1;
        if *count == 0 {
            references.remove(hash);
            // Under the lock, so that whoever adds the same bytes cannot put the file there and then lose it.
            let _ = std::fs::remove_file(self.files.model(hash));
        }
    }

    /// Takes in every model of the store.
    pub(super) fn load_models(&self, damages: &mut Vec<Damage>) -> Result<(), StoreError> {
        let mut repaired = Vec::new();
        for (key, read) in self.store.all::<ModelRecord>(Table::Models)? {
            let mut model = match read {
                Read::Good(model) => model,
                Read::Damaged(bytes, why) => {
                    let what = format!("record of model {}", key.replace('\0', "/"));
                    self.files.quarantine_bytes(&format!("model-{}", key.replace(['\0', '/'], "-")), &bytes, &why);
                    let kept =
                        super::manifests::<ModelRecord>(&self.files, &self.files.model_manifests(), &mut Vec::new())?;
                    let kept = kept.into_iter().find(|model| model.key() == key);
                    let outcome = if kept.is_some() { "restored from its manifest" } else { "lost; add it again" };
                    tracing::error!(what, why, outcome, "quarantined");
                    damages.push(Damage { what, why: format!("{why}; {outcome}") });
                    let Some(kept) = kept else {
                        repaired.push(Change::Delete(Table::Models, key));
                        continue;
                    };
                    repaired.push(Change::put(Table::Models, key, &kept));
                    kept
                }
            };
            if model.quarantined.is_none() && !self.files.model(&model.hash).is_file() {
                let (what, why) = (format!("model {} of tenant {}", model.name, model.tenant), MISSING.to_owned());
                tracing::error!(what, why, "quarantined");
                damages.push(Damage { what, why: why.clone() });
                model.quarantined = Some(why);
            }
            self.show_model(None, Some(Arc::new(model)));
        }
        if !repaired.is_empty() {
            self.store.write_blocking(repaired)?;
        }
        Ok(())
    }

    /// Keeps a copy of a record as a file, or removes it.
    pub(super) fn keep_manifest_file<T: Serialize>(&self, path: &Path, record: Option<&T>) {
        let kept = match record {
            Some(record) => self.files.write(path, &store::encode(record)),
            None => std::fs::remove_file(path),
        };
        if let Err(error) = kept {
            // The store has it; only a later loss of the whole store would miss it.
            tracing::warn!(%error, "could not update a manifest");
        }
    }
}

const MISSING: &str = "its file is missing";
